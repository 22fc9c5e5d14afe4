//! Shards that are made whole in files of safetensors: every byte arrives, and a death anywhere leaves the old or the
//! new checkpoint whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use strata_checkpoint::item::{Entry, Kind, TensorEntry};
use strata_checkpoint::servable::INDEX_NAME;
use strata_checkpoint::{
    Commit, CommitStats, Error, Payload, Progress, Promises, Reading, Records, SaveItem, commit, open, open_base,
    rewrite_safetensors, verify, write_items,
};
use strata_io::schedule::ByteBudget;
use strata_io::testing::{Dies, Hooked};
use strata_io::{IoConfig, Store};

/// First element, and shape.
type Chunk = ([u64; 2], [u64; 2]);

/// The quarters of a tensor of 6 x 10, in no order.
const CHUNKS: [Chunk; 4] = [([4, 7], [2, 3]), ([0, 0], [4, 7]), ([4, 0], [2, 7]), ([0, 7], [4, 3])];
const SHAPE: [u64; 2] = [6, 10];
const NAMES: [&str; 2] = ["model.a", "model.b"];

/// Parts end within heads and elements.
fn memory() -> Arc<dyn Store> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let config = IoConfig {
        budget: ByteBudget::new(1 << 20),
        max_concurrency: 4,
        part_bytes: 31,
        fsync: false,
        direct_io: false,
        max_tries: 1,
        deadline: Duration::from_secs(10),
    };
    let url = format!("memory://model-{}/step-1-model", NUMBER.fetch_add(1, Relaxed));
    strata_io::open(&url, &BTreeMap::new(), &config).expect("a store")
}

/// An element of the tensor `name`, which no other one is.
fn element(name: &str, row: u64, column: u64) -> [u8; 2] {
    let tensor = NAMES.iter().position(|known| *known == name).expect("known") as u64;
    ((tensor * 100 + row * SHAPE[1] + column + 1) as u16 * 257).to_le_bytes()
}

fn content(name: &str, (first, shape): Chunk) -> Vec<u8> {
    let rows = first[0]..first[0] + shape[0];
    rows.flat_map(|row| (first[1]..first[1] + shape[1]).flat_map(move |column| element(name, row, column))).collect()
}

fn item(name: &str, chunk: Chunk) -> SaveItem {
    SaveItem {
        fqn: Arc::from(name.as_bytes()),
        offsets: Some(Arc::from(chunk.0)),
        index: None,
        kind: Kind::Tensor,
        dtype: Arc::from("bfloat16"),
        shape: Arc::from(chunk.1),
        strides: Arc::from([chunk.1[1], 1]),
        payload: Payload::Host(Bytes::from(content(name, chunk))),
    }
}

fn promises(chunks: &[Chunk]) -> Promises {
    let entry = |name: &&str| {
        let tensor = TensorEntry {
            dtype: "bfloat16".into(),
            size: SHAPE.to_vec(),
            strides: None,
            requires_grad: false,
            pin_memory: false,
            memory_format: 0,
            layout: "strided".into(),
        };
        Entry { fqn: name.as_bytes().to_vec(), tensor: Some(tensor) }
    };
    let count = chunks.len();
    Promises {
        entries: NAMES.iter().map(entry).collect(),
        first_chunks: (0..=NAMES.len()).map(|n| n * count).collect(),
        first_dims: (0..=NAMES.len() * count).map(|n| n * 2).collect(),
        offsets: NAMES.iter().flat_map(|_| chunks.iter().flat_map(|(first, _)| *first)).collect(),
    }
}

async fn publish(
    store: &dyn Store,
    records: &[Vec<u8>],
    chunks: &[Chunk],
    save_id: &str,
) -> Result<CommitStats, Error> {
    let base = open_base(store, None).await?;
    let previous = base.manifest.as_ref().map(|manifest| manifest.save_id.clone()).unwrap_or_default();
    let records: Vec<&[u8]> = records.iter().map(|record| &**record).collect();
    let job = Commit {
        records: Records::decode(&records)?,
        promises: promises(chunks),
        planner_data: Vec::new(),
        stock: None,
        save_id: save_id.to_owned(),
        previous_save_id: previous,
        rank: None,
        world_size: 1,
        generation: 0,
        run: None,
        run_root: None,
    };
    commit(store, &base, job).await
}

/// A rank for each chunk.
async fn save_shards(store: &dyn Store) {
    let (budget, save_id) = (ByteBudget::new(1 << 20), "a".repeat(32));
    let mut records = Vec::new();
    for (rank, chunk) in CHUNKS.iter().enumerate() {
        let items = NAMES.iter().map(|name| item(name, *chunk)).collect();
        let record = write_items(store, &budget, items, rank as u32, &save_id, None, &Arc::default()).await;
        records.push(record.expect("written").encode());
    }
    publish(store, &records, &CHUNKS, &save_id).await.expect("committed");
}

async fn make_whole(store: &Arc<dyn Store>, save_id: &str) -> Result<CommitStats, Error> {
    let budget = ByteBudget::new(1 << 20);
    let reading = Reading { store: store.clone(), budget: budget.clone(), progress: Arc::default() };
    let opened = Arc::new(open(&**store, None).await?);
    let record = rewrite_safetensors(&reading, &opened, &**store, &budget, save_id, &Arc::default()).await?;
    publish(&**store, &[record.encode()], &[([0, 0], SHAPE)], save_id).await
}

/// Every element, found by what the manifest says, is what was saved; whether it is in one piece.
async fn is_whole(store: &dyn Store) -> bool {
    let opened = open(store, None).await.expect("opens");
    let (_, findings) = verify(store, &opened, &Progress::default()).await;
    assert!(findings.problems.is_empty() && findings.unchecked.is_empty(), "{findings:?}");
    let mut elements = 0;
    for item in opened.manifest.items.all().iter() {
        let object = &opened.manifest.objects[item.object as usize].name;
        let range = item.payload_offset()..item.payload_offset() + item.payload_bytes;
        let offsets = item.offsets.as_deref().expect("a chunk");
        let chunk = ([offsets[0], offsets[1]], [item.shape[0], item.shape[1]]);
        let found = store.read(object, Some(range)).await.expect("is there");
        assert_eq!(found, content(&item.name(), chunk), "{} at {offsets:?}", item.name());
        elements += item.shape.iter().product::<u64>();
    }
    assert_eq!(elements, 2 * SHAPE[0] * SHAPE[1]);
    opened.manifest.has_safetensors()
}

async fn names(store: &dyn Store) -> Vec<String> {
    let mut names = Vec::new();
    for folder in ["", ".strata/"] {
        names.extend(store.list(folder).await.expect("listed").into_iter().map(|object| object.name));
    }
    names
}

#[tokio::test]
async fn shards_are_made_whole_and_go() {
    let store = memory();
    save_shards(&*store).await;
    assert!(!is_whole(&*store).await);
    let id = "b".repeat(32);
    let stats = make_whole(&store, &id).await.expect("made whole");
    assert_eq!((stats.collected, stats.warnings), (4, Vec::new()));
    assert!(is_whole(&*store).await);
    let file = format!("model-00000-00000.{id}.safetensors");
    assert_eq!(names(&*store).await, [&file, INDEX_NAME, &format!(".strata/{:020}", 2)]);
    let index = store.read(INDEX_NAME, None).await.expect("is there");
    let expected = format!(
        "{{\n  \"metadata\": {{\n    \"format\": \"pt\",\n    \"total_size\": 240\n  }},\n  \"weight_map\": {{\n    \
         \"a\": \"{file}\",\n    \"b\": \"{file}\"\n  }}\n}}\n"
    );
    assert_eq!(index, expected);
}

#[tokio::test]
async fn a_death_after_any_request_leaves_the_shards_or_the_whole_and_the_next_try_leaves_nothing_else() {
    let (mut shards, mut whole) = (0, 0);
    for left in 0.. {
        let store = memory();
        save_shards(&*store).await;
        let mortal: Arc<dyn Store> = Arc::new(Hooked::new(store.clone(), Dies::after(left)));
        let done = make_whole(&mortal, &"b".repeat(32)).await;
        *(if is_whole(&*store).await { &mut whole } else { &mut shards }) += 1;
        make_whole(&store, &"c".repeat(32)).await.expect("made whole");
        assert!(is_whole(&*store).await);
        let found = names(&*store).await;
        assert_eq!(found.len(), 3, "died after {left} requests: {found:?}");
        // What fails behind the manifest is a warning.
        if done.is_ok_and(|stats| stats.warnings.is_empty()) {
            break;
        }
    }
    assert!(shards > 10 && whole > 4, "{shards} deaths left shards, {whole} the whole");
}
