//! Tensors on a device are saved as those of the host are, with no more host memory than the budget.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use strata_checkpoint::item::Kind;
use strata_checkpoint::{Error, Payload, RankRecord, SaveItem, write_items};
use strata_device::testing::StandIn;
use strata_io::schedule::ByteBudget;
use strata_io::{IoConfig, Store};

const PART_BYTES: u64 = 5 << 20;

/// Lengths in f32: smaller than a block, of no whole block, more than a part, and one that is inlined.
const ELEMENTS: [u64; 4] = [1000, 1_700_001, 3 << 20, 7];

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect()
}

fn items(payloads: Vec<Payload>) -> Vec<SaveItem> {
    let item = |(i, payload): (usize, Payload)| SaveItem {
        fqn: Arc::from(format!("layer.{i}").into_bytes()),
        offsets: Some(Arc::from([0])),
        index: None,
        kind: Kind::Tensor,
        dtype: Arc::from("float32"),
        shape: Arc::from([payload.len() / 4]),
        strides: Arc::from([1]),
        payload,
    };
    payloads.into_iter().enumerate().map(item).collect()
}

/// Each tensor's place in one large memory.
fn places() -> Vec<Range<u64>> {
    let ends = ELEMENTS.iter().scan(0, |end, elements| {
        *end += elements * 4;
        Some(*end)
    });
    ends.zip(ELEMENTS).map(|(end, elements)| end - elements * 4..end).collect()
}

fn memory() -> Vec<u8> {
    pattern(ELEMENTS.iter().sum::<u64>() as usize * 4)
}

fn on_host(memory: &Bytes) -> Vec<Payload> {
    places().into_iter().map(|range| Payload::Host(memory.slice(range.start as usize..range.end as usize))).collect()
}

fn on_device(device: &Arc<StandIn>) -> Vec<Payload> {
    places().into_iter().map(|range| Payload::Device(StandIn::lend(device, range))).collect()
}

struct Saved {
    record: Result<RankRecord, Error>,
    store: Arc<dyn Store>,
    _folder: tempfile::TempDir,
}

async fn saved(payloads: Vec<Payload>) -> Saved {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let budget = ByteBudget::new(2 * PART_BYTES);
    let config = IoConfig {
        budget: budget.clone(),
        max_concurrency: 4,
        part_bytes: PART_BYTES,
        fsync: false,
        direct_io: true,
        max_tries: 1,
        deadline: Duration::from_secs(60),
    };
    let path = folder.path().to_str().expect("an utf-8 path");
    let store = strata_io::open(path, &BTreeMap::new(), &config).expect("a local store");
    let record = write_items(&*store, &budget, items(payloads), 0, &"a".repeat(32), None, &Arc::default()).await;
    Saved { record, store, _folder: folder }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tensor_on_a_device_is_stored_as_one_on_the_host_would_be() {
    let memory = Bytes::from(memory());
    let theirs = saved(on_host(&memory)).await.record.expect("saved");
    for device in [StandIn::new(memory.to_vec()), StandIn::without_locked_memory(memory.to_vec())] {
        let ours = saved(on_device(&Arc::new(device))).await;
        let record = ours.record.expect("saved");
        let object = ours.store.read(&record.objects[0].name, None).await.expect("the object");
        for ((item, other), range) in record.items.iter().zip(&theirs.items).zip(places()) {
            let start = item.payload_offset() as usize;
            let expected = &memory[range.start as usize..range.end as usize];
            assert!(object[start..start + item.payload_bytes as usize] == *expected, "{} differs", item.name());
            assert_eq!((&item.digests, &item.inline), (&other.digests, &other.inline));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_memory_stays_within_the_budget_and_does_not_grow_over_saves() {
    let device = Arc::new(StandIn::new(memory()));
    for _ in 0..5 {
        saved(on_device(&device)).await.record.expect("saved");
        let locked = device.pinned_bytes() as u64;
        assert!((1..=2 * PART_BYTES).contains(&locked), "{locked} bytes are locked");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_fails_ends_the_save_with_its_reason_and_leaves_nothing() {
    let short = Arc::new(StandIn::new(vec![0; 16 << 20])); // the last tensors lie past its end
    let failed = saved(on_device(&short)).await;
    let error = failed.record.expect_err("not all can be read");
    assert!(matches!(error, Error::Device(_)), "{error}");
    assert!(error.to_string().contains("cuda:0"), "{error}");
    assert_eq!(failed.store.list("").await.expect("a listing"), []);
}
