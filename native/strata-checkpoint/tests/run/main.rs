//! A run's checkpoints: what an incremental one refers to outlives its own checkpoint, and a sweep that dies anywhere
//! leaves each checkpoint whole or gone.

mod chaos;
mod cost;
mod lost;
mod model;
mod process;
mod schedules;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use strata_checkpoint::item::{Entry, Kind, TensorEntry};
use strata_checkpoint::run::catalog::{Listed, State, catalog};
use strata_checkpoint::run::life::Run as Life;
use strata_checkpoint::run::manager::{CheckpointManager, CheckpointManagerConfig};
use strata_checkpoint::run::retention::Policy;
use strata_checkpoint::run::sweep::{Rules, Swept, plan_sweep, sweep};
use strata_checkpoint::run::{CheckpointType, Part, RunInfo};
use strata_checkpoint::{
    Commit, CommitStats, Error, Parent, Payload, Promises, Records, SaveItem, Source, StockParts, claim_generation,
    commit, open, open_base, write_items,
};
use strata_io::schedule::ByteBudget;
use strata_io::testing::{Dies, Hooked};
use strata_io::{IoConfig, PutMode, Store};

const NOW: u64 = 2_000_000_000;

/// Just large enough to be referred to.
const TENSOR_BYTES: u64 = 16 << 10;

/// A tensor of this name and content.
type Tensor = (&'static str, u8);

fn memory() -> Arc<dyn Store> {
    memory_in_parts(16 << 20)
}

fn memory_in_parts(part_bytes: u64) -> Arc<dyn Store> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let config = IoConfig {
        budget: ByteBudget::new(64 << 20),
        max_concurrency: 4,
        part_bytes,
        fsync: false,
        direct_io: false,
        max_tries: 1,
        deadline: Duration::from_secs(10),
    };
    let url = format!("memory://run-{}/root", NUMBER.fetch_add(1, Relaxed));
    strata_io::open(&url, &BTreeMap::new(), &config).expect("a store")
}

fn content(fill: u8) -> Bytes {
    static ALL: LazyLock<Vec<Bytes>> = LazyLock::new(|| {
        let of = |fill: u8| (0..TENSOR_BYTES).map(move |i| (i as u8).wrapping_mul(fill).wrapping_add(fill));
        (0..=u8::MAX).map(|fill| of(fill).collect::<Vec<u8>>().into()).collect()
    });
    ALL[usize::from(fill)].clone()
}

fn item((name, fill): &Tensor) -> SaveItem {
    SaveItem {
        fqn: Arc::from(name.as_bytes()),
        offsets: Some(Arc::from([0])),
        index: None,
        kind: Kind::Tensor,
        dtype: Arc::from("float32"),
        shape: Arc::from([TENSOR_BYTES / 4]),
        strides: Arc::from([1]),
        payload: Payload::Host(content(*fill)),
    }
}

fn entry((name, _): &Tensor) -> Entry {
    let tensor = TensorEntry {
        dtype: "float32".into(),
        size: vec![TENSOR_BYTES / 4],
        strides: Some(vec![1]),
        requires_grad: false,
        pin_memory: false,
        memory_format: 0,
        layout: "strided".into(),
    };
    Entry { fqn: name.as_bytes().to_vec(), tensor: Some(tensor) }
}

/// One chunk of one dim for each of `tensors`.
fn promises(tensors: &[Tensor]) -> Promises {
    let bounds: Vec<usize> = (0..=tensors.len()).collect();
    Promises {
        entries: tensors.iter().map(entry).collect(),
        first_chunks: bounds.clone(),
        first_dims: bounds,
        offsets: vec![0; tensors.len()],
    }
}

/// Readers look for no more in a `.metadata` than the save's id.
fn stock(save_id: &str) -> StockParts {
    let storage_meta = [b"X\x20\0\0\0", save_id.as_bytes()].concat();
    StockParts { planner_data: b"N".to_vec(), storage_meta, first_memo: 0, version: "1.0.0".into(), has_strides: true }
}

struct Run {
    root: Arc<dyn Store>,
    generation: u64,
}

impl Run {
    async fn new(root: Arc<dyn Store>) -> Self {
        let generation = claim_generation(&*root, "me").await.expect("claimed");
        Self { root, generation }
    }

    async fn save(&self, step: u64, tensors: &[Tensor], parent: Option<&str>) -> CommitStats {
        self.save_as(step, &format!("{step:032x}"), tensors, parent).await
    }

    async fn save_as(&self, step: u64, save_id: &str, tensors: &[Tensor], parent: Option<&str>) -> CommitStats {
        let store = self.root.child(&format!("step-{step}")).expect("a plain name");
        let base = open_base(&*store, None).await.expect("looked at");
        let parent = match parent {
            None => None,
            Some(folder) => {
                let place = self.root.child(folder).expect("a plain name");
                Some(Arc::new(Parent::open(&*place, folder).await.expect("a parent")))
            }
        };
        let items = tensors.iter().map(item).collect();
        let budget = ByteBudget::new(64 << 20);
        let record = write_items(&*store, &budget, items, 0, save_id, parent.as_ref(), &Arc::default()).await;
        let run = RunInfo {
            step,
            epoch: 0,
            checkpoint_type: if parent.is_some() { CheckpointType::Incremental } else { CheckpointType::Full },
            metadata: BTreeMap::new(),
            metrics: BTreeMap::new(),
            model_hash: None,
        };
        let job = Commit {
            records: Records::decode(&[&record.expect("written").encode()]).expect("a record"),
            promises: promises(tensors),
            planner_data: Vec::new(),
            stock: Some(stock(save_id)),
            save_id: save_id.to_owned(),
            previous_save_id: String::new(),
            rank: None,
            world_size: 1,
            generation: self.generation,
            run: Some(run),
            run_root: Some(&*self.root),
        };
        commit(&*store, &base, job).await.expect("committed")
    }

    async fn sweep(&self, keep: u64) -> Result<Swept, Error> {
        let rules = Rules {
            policy: Policy::Last(NonZeroU64::new(keep).expect("not 0")),
            orphan_age: Duration::from_secs(3600),
            now: NOW,
        };
        let listed = catalog(&self.root).await?;
        sweep(&self.root, &listed, &plan_sweep(&listed, &rules), &rules, self.generation).await
    }

    /// The committed steps; each must hold what was saved there, read through its references.
    async fn committed(&self, saved: &[(u64, Vec<Tensor>)]) -> Vec<u64> {
        let mut steps = Vec::new();
        for listed in catalog(&self.root).await.expect("listed") {
            if !matches!(listed.state, State::Committed(_)) {
                continue;
            }
            let step = listed.metadata(self.root.url()).expect("of ours").step;
            let tensors = &saved.iter().find(|(saved, _)| *saved == step).expect("was saved").1;
            self.check(&listed, tensors).await;
            steps.push(step);
        }
        steps.sort_unstable();
        steps
    }

    async fn check(&self, listed: &Listed, tensors: &[Tensor]) {
        let store = self.root.child(&listed.folder).expect("a plain name");
        let opened = open(&*store, None).await.expect("opens");
        assert_eq!(opened.source, Source::Strata);
        for (name, fill) in tensors {
            let row = opened.rows(&[(name.as_bytes(), Some(&[0]))])[0].expect("is in it");
            let item = &opened.manifest.items[row];
            let object = &opened.manifest.objects[item.object as usize];
            let owner =
                object.reference.map_or(listed.folder.clone(), |at| opened.manifest.references[at as usize].0.clone());
            let range = item.payload_offset()..item.payload_offset() + item.payload_bytes;
            let found = self.root.read(&format!("{owner}/{}", object.name), Some(range)).await.expect("is there");
            assert_eq!(found, content(*fill), "{name} of {}", listed.folder);
        }
    }

    /// Every object below the root, but the generations.
    async fn everything(&self) -> Vec<String> {
        let mut found = Vec::new();
        for folder in self.root.list_folders("").await.expect("listed") {
            for inside in ["/", "/.strata/", "/.strata/uploads/"] {
                let objects = self.root.list(&format!("{folder}{inside}")).await.expect("listed");
                found.extend(objects.into_iter().map(|object| object.name));
            }
        }
        found
    }
}

#[tokio::test]
async fn what_has_not_changed_is_referred_to_whatever_it_is_called_now() {
    let run = Run::new(memory()).await;
    run.save(1, &[("model.a", 1), ("model.b", 2)], None).await;
    let stats = run.save(2, &[("model.a", 1), ("model.b", 3), ("ema.b", 2)], Some("step-1")).await;
    assert_eq!((stats.payload_bytes, stats.referred_bytes), (TENSOR_BYTES, 2 * TENSOR_BYTES));
    // The third refers to where the bytes are, not to who refers to them.
    let stats = run.save(3, &[("model.a", 1), ("model.b", 3)], Some("step-2")).await;
    assert_eq!((stats.payload_bytes, stats.referred_bytes), (0, 2 * TENSOR_BYTES));
    let saved = [
        (1, vec![("model.a", 1), ("model.b", 2)]),
        (2, vec![("model.a", 1), ("model.b", 3), ("ema.b", 2)]),
        (3, vec![("model.a", 1), ("model.b", 3)]),
    ];
    assert_eq!(run.committed(&saved).await, [1, 2, 3]);
    let opened = open(&*run.root.child("step-3").expect("plain"), None).await.expect("opens");
    let owners: Vec<&str> = opened.manifest.references.iter().map(|(folder, _)| folder.as_str()).collect();
    assert_eq!(owners, ["step-1", "step-2"]);
}

#[tokio::test]
async fn what_little_is_left_of_an_object_is_written_again_so_that_it_can_go() {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1), ("b", 2), ("c", 3), ("d", 4)], None).await;
    let stats = run.save(2, &[("a", 1), ("b", 5), ("c", 6), ("d", 7)], Some("step-1")).await;
    assert_eq!((stats.payload_bytes, stats.referred_bytes), (4 * TENSOR_BYTES, 0));
    run.sweep(1).await.expect("swept");
    assert!(run.everything().await.iter().all(|name| name.starts_with("step-2/")));
}

#[tokio::test]
async fn equal_weights_have_equal_hashes() {
    let run = Run::new(memory()).await;
    for (step, fill, parent) in [(1, 1, None), (2, 1, Some("step-1")), (3, 2, Some("step-2"))] {
        run.save(step, &[("model.a", fill), ("optimizer.a", step as u8 + 10)], parent).await;
    }
    let listed = catalog(&run.root).await.expect("listed");
    let hash = |row: usize| listed[row].metadata("root").expect("of ours").model_hash.expect("has a model");
    assert_eq!(hash(0), hash(1));
    assert_ne!(hash(1), hash(2));
}

#[tokio::test]
async fn an_object_outlives_its_checkpoint_while_somebody_refers_to_it_and_no_longer() {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1)], None).await;
    run.save(2, &[("a", 1), ("b", 2)], Some("step-1")).await;
    run.sweep(1).await.expect("swept");
    assert_eq!(run.committed(&[(2, vec![("a", 1), ("b", 2)])]).await, [2]);
    let of_first = format!("step-1/__0_0.{:032x}.distcp", 1);
    assert!(run.everything().await.contains(&of_first));
    run.save(3, &[("a", 5)], None).await;
    let swept = run.sweep(1).await.expect("swept");
    assert_eq!(swept.removed, ["step-2"]);
    assert!(run.everything().await.iter().all(|name| name.starts_with("step-3/")), "{:?}", run.everything().await);
}

#[tokio::test]
async fn a_save_in_flight_is_left_alone_and_what_is_left_of_an_old_one_is_not() {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1)], None).await;
    let store = run.root.child("step-2").expect("plain");
    let budget = ByteBudget::new(64 << 20);
    write_items(&*store, &budget, vec![item(&("a", 2))], 0, &"e".repeat(32), None, &Arc::default())
        .await
        .expect("written");
    let listed = catalog(&run.root).await.expect("listed");
    let rules = |age: u64| Rules {
        policy: Policy::All,
        orphan_age: Duration::from_secs(age),
        now: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs() + 10,
    };
    for (rules, expected) in [(rules(3600), 0), (rules(5), 1)] {
        let swept =
            sweep(&run.root, &listed, &plan_sweep(&listed, &rules), &rules, run.generation).await.expect("swept");
        assert_eq!(swept.num_objects, expected);
    }
    assert_eq!(run.committed(&[(1, vec![("a", 1)])]).await, [1]);
}

#[tokio::test]
async fn a_clock_that_was_set_back_makes_nothing_old_and_the_order_is_that_of_the_steps() {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1)], None).await;
    run.save(2, &[("a", 2)], None).await;
    let (store, budget) = (run.root.child("step-3").expect("plain"), ByteBudget::new(64 << 20));
    let orphan = write_items(&*store, &budget, vec![item(&("a", 3))], 0, &"e".repeat(32), None, &Arc::default()).await;
    orphan.expect("written");
    // 1970: all that is there comes from the future.
    let rules = |policy| Rules { policy, orphan_age: Duration::from_secs(60), now: 10 };
    let last = Policy::Last(NonZeroU64::MIN);
    let young = Policy::Younger(Duration::from_secs(60));
    for (policy, removed) in [(young, vec![]), (last, vec!["step-1"])] {
        let (listed, rules) = (catalog(&run.root).await.expect("listed"), rules(policy));
        let plan = plan_sweep(&listed, &rules);
        let swept = sweep(&run.root, &listed, &plan, &rules, run.generation).await.expect("swept");
        assert_eq!(swept.removed, removed);
    }
    assert!(run.everything().await.contains(&format!("step-3/__0_0.{}.distcp", "e".repeat(32))));
}

#[tokio::test]
async fn a_run_that_was_replaced_removes_nothing() {
    let old = Run::new(memory()).await;
    old.save(1, &[("a", 1)], None).await;
    old.save(2, &[("a", 2)], None).await;
    let new = Run::new(old.root.clone()).await;
    assert!(matches!(old.sweep(1).await, Err(Error::StaleGeneration { found: 2, held: 1, .. })));
    assert_eq!(new.committed(&[(1, vec![("a", 1)]), (2, vec![("a", 2)])]).await, [1, 2]);
}

#[tokio::test]
async fn a_sweep_that_dies_after_any_request_leaves_each_checkpoint_whole_or_gone_and_the_next_ends_it() {
    let saved = || {
        [
            (1, vec![("a", 1), ("b", 1)]),
            (2, vec![("a", 1), ("b", 2)]),
            (3, vec![("a", 3), ("b", 2)]),
            (4, vec![("a", 3), ("b", 4)]),
        ]
    };
    let mut died = 0;
    for left in 0.. {
        let run = Run::new(memory()).await;
        for (step, tensors) in saved() {
            let parent = (step > 1).then(|| format!("step-{}", step - 1));
            run.save(step, &tensors, parent.as_deref()).await;
        }
        let mortal: Arc<dyn Store> = Arc::new(Hooked::new(run.root.clone(), Dies::after(left)));
        let swept = Run { root: mortal, generation: run.generation }.sweep(1).await;
        let steps = run.committed(&saved()).await;
        assert!(steps.contains(&4) && steps.is_sorted(), "{steps:?}");
        run.sweep(1).await.expect("swept");
        assert_eq!(run.committed(&saved()).await, [4]);
        let expected = [2u128, 3, 4].map(|step| step);
        let data: Vec<String> = run.everything().await.into_iter().filter(|name| name.ends_with(".distcp")).collect();
        // Step 4 wrote b, step 3 wrote a; step 2 and step 1 are needed by none.
        let named: Vec<String> =
            expected[1..].iter().map(|step| format!("step-{step}/__0_0.{step:032x}.distcp")).collect();
        assert_eq!(data, named, "died after {left} requests");
        died += 1;
        if swept.is_ok() {
            break;
        }
    }
    assert!(died > 10, "only {died} deaths");
}

fn manager(root: &Arc<dyn Store>, keep: u64) -> CheckpointManager {
    let policy = Policy::Last(NonZeroU64::new(keep).expect("not 0"));
    let hour = Duration::from_secs(3600);
    CheckpointManager::of(Arc::new(Life::new(root.clone(), ByteBudget::new(64 << 20), "me".into(), policy, hour)))
}

#[tokio::test]
async fn bytes_are_saved_in_their_order_while_others_go_on_and_the_last_are_kept() {
    let manager = manager(&memory(), 2);
    let saves: Vec<_> = (1..=5u8).map(|n| manager.save(vec![n; 100_000], n.into(), 0, CheckpointType::Full)).collect();
    manager.wait().await;
    assert!(saves.iter().all(strata_checkpoint::run::manager::PendingSave::is_done));
    for (n, save) in (1..).zip(saves) {
        let saved = save.await.expect("saved");
        assert_eq!((saved.step, saved.size_bytes), (n, 100_000));
    }
    let steps: Vec<u64> = manager.all().await.expect("listed").iter().map(|found| found.step).collect();
    assert_eq!(steps, [4, 5]);
    assert_eq!(manager.load(5).await.expect("loaded"), vec![5; 100_000]);
    assert!(matches!(manager.load(3).await, Err(Error::NotFound { .. })));
    assert_eq!(manager.latest().await.expect("listed").expect("there").step, 5);
}

#[tokio::test]
async fn a_step_is_saved_once_and_the_run_does_not_go_back_unless_it_is_taken_back() {
    let root = memory();
    let manager = manager(&root, 9);
    for step in [10, 20, 30] {
        manager.save(vec![1], step, 0, CheckpointType::Full).await.expect("saved");
    }
    let again = manager.save(vec![2], 30, 0, CheckpointType::Full).await;
    assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    let back = manager.save(vec![2], 15, 0, CheckpointType::Full).await.expect_err("goes back").to_string();
    assert!(back.contains("step 15 lies before step 30") && back.contains("call rollback(10) first"), "{back}");
    let back = manager.save(vec![2], 5, 0, CheckpointType::Full).await.expect_err("goes back").to_string();
    assert!(back.contains("call rollback(0) first"), "{back}");
    assert_eq!(manager.run().rollback(10).await.expect("taken back"), ["step-20", "step-30"]);
    assert_eq!(manager.latest().await.expect("listed").expect("there").step, 10);
    manager.save(vec![3], 15, 0, CheckpointType::Full).await.expect("saved");
    let steps: Vec<u64> = manager.all().await.expect("listed").iter().map(|found| found.step).collect();
    assert_eq!(steps, [10, 15]);
    assert!(root.list("step-30/").await.expect("listed").is_empty(), "the next retention removes what was left behind");
}

#[tokio::test]
async fn a_manager_that_would_keep_nothing_is_refused() {
    let config = |backend: &str, keep_count| CheckpointManagerConfig {
        storage_backend: backend.to_owned(),
        checkpoint_dir: "x/y".to_owned(),
        keep_count,
    };
    let none = CheckpointManager::new(config("memory", 0)).await.expect_err("refused").to_string();
    assert!(none.contains("keep_count: expected at least 1, found 0"), "{none}");
    let unknown = CheckpointManager::new(config("ftp", 1)).await.expect_err("refused").to_string();
    assert!(unknown.contains("ftp"), "{unknown}");
}

#[tokio::test]
async fn a_checkpoint_that_is_held_stays_and_a_damaged_one_takes_nobodys_place() {
    let root = memory();
    let manager = manager(&root, 1);
    let save = |step: u64| manager.save(vec![1], step, 0, CheckpointType::Full);
    save(1).await.expect("saved");
    manager.run().pin("step-1", "an evaluation").await.expect("pinned");
    save(2).await.expect("saved");
    let third = save(3).await.expect("saved");
    let steps = || async { manager.all().await.expect("listed").iter().map(|found| found.step).collect::<Vec<_>>() };
    assert_eq!(steps().await, [1, 3]);
    manager.run().unpin("step-1", "an evaluation").await.expect("unpinned");
    manager.run().quarantine("step-3", &third.id, "a bit flipped").await.expect("marked");
    assert_eq!(manager.latest().await.expect("listed").expect("there").step, 1);
    manager.run().retain().await.expect("swept");
    assert_eq!(steps().await, [1], "the only one that can be resumed from stays");
    assert!(!root.list("step-3/").await.expect("listed").is_empty(), "a person shall look at it");
}

#[tokio::test]
async fn nobody_may_refer_to_what_a_damaged_checkpoint_has_in_common_with_others() {
    let run = Run::new(memory()).await;
    let frozen = [("frozen", 7)];
    run.save(1, &frozen, None).await;
    run.save(2, &frozen, Some("step-1")).await;
    run.save(3, &frozen, Some("step-2")).await;
    let life = Life::new(run.root.clone(), ByteBudget::new(64 << 20), "me".to_owned(), Policy::All, Duration::MAX);
    let parent = |step: u64, overwrite: bool| life.check_new(step, Part::Whole, overwrite);
    assert_eq!(parent(4, false).await.expect("allowed").parent, Some("step-3".to_owned()));
    assert_eq!(parent(3, true).await.expect("allowed").parent, None, "what is replaced goes");
    life.quarantine("step-3", &format!("{:032x}", 3), "a bit flipped, maybe in step-1").await.expect("marked");
    assert_eq!(parent(4, false).await.expect("allowed").parent, None, "step-2 refers to step-1 too");
    run.save(4, &frozen, None).await;
    assert_eq!(parent(5, false).await.expect("allowed").parent, Some("step-4".to_owned()));
}

#[tokio::test]
async fn what_somebody_holds_or_a_stranger_saved_is_not_replaced() {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1)], None).await;
    let life = Life::new(run.root.clone(), ByteBudget::new(64 << 20), "me".to_owned(), Policy::All, Duration::MAX);
    life.pin("step-1", "an evaluation.0123456789abcdef").await.expect("pinned");
    let refused = life.check_new(1, Part::Whole, true).await.expect_err("refused").to_string();
    assert!(refused.contains("\"an evaluation\" holds it"), "{refused}");
    run.root.put("step-2/.metadata", Bytes::from("theirs"), PutMode::Create).await.expect("put");
    let refused = life.check_new(2, Part::Whole, false).await.expect_err("refused");
    assert!(matches!(refused, Error::Exists { .. }), "{refused}");
    life.check_new(2, Part::Whole, true).await.expect("allowed");
    let missing = life.pin("step-9", "me").await.expect_err("refused");
    assert!(matches!(missing, Error::NotFound { .. }), "{missing}");
    assert!(run.root.list("step-9/.strata/").await.map_or(true, |left| left.is_empty()), "nothing stays");
}
