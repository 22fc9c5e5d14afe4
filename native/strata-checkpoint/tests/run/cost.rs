//! What a save and its retention ask of the store in a long run.

use std::sync::Arc;

use strata_checkpoint::run::catalog::catalog;
use strata_checkpoint::run::retention::Policy;
use strata_checkpoint::run::sweep::{Rules, plan_sweep, sweep};
use strata_checkpoint::run::{CheckpointType, Part, RunInfo, folder};
use strata_checkpoint::{Commit, Records, SaveItem, commit, open_base, write_items};
use strata_io::Store;
use strata_io::schedule::ByteBudget;
use strata_io::testing::{CountingStore, Counts};

use super::{Duration, Life, NOW, NonZeroU64, Tensor, item, memory, promises, stock};

const CHECKPOINTS: u64 = 200;
const RANKS: u32 = 10;
const NAMES: [&str; 10] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];

/// As a job of ten ranks saves: an object each.
async fn save(life: &Life, root: &dyn Store, step: u64) {
    life.check_new(step, Part::Whole, false).await.expect("allowed");
    let place = root.child(&folder(step, Part::Whole)).expect("a plain name");
    let base = open_base(&*place, None).await.expect("looked at");
    let tensors: Vec<Tensor> = NAMES.iter().map(|name| (*name, step as u8)).collect();
    let (budget, save_id) = (ByteBudget::new(64 << 20), format!("{step:032x}"));
    let mut records = Vec::new();
    for rank in 0..RANKS {
        let items: Vec<SaveItem> = vec![item(&tensors[rank as usize])];
        let record = write_items(&*place, &budget, items, rank, &save_id, None, &Arc::default()).await;
        records.push(record.expect("written").encode());
    }
    let run = RunInfo {
        step,
        epoch: 0,
        checkpoint_type: CheckpointType::Full,
        metadata: Default::default(),
        metrics: Default::default(),
        model_hash: None,
    };
    let job = Commit {
        records: Records::decode(&records.iter().map(Vec::as_slice).collect::<Vec<_>>()).expect("records"),
        promises: promises(&tensors),
        planner_data: Vec::new(),
        stock: Some(stock(&save_id)),
        save_id,
        previous_save_id: String::new(),
        rank: None,
        world_size: RANKS,
        generation: life.generation().await.expect("claimed"),
        run: Some(run),
        run_root: Some(root),
    };
    commit(&*place, &base, job).await.expect("committed");
}

#[tokio::test]
async fn a_save_and_its_retention_do_not_ask_for_each_folder_again_and_again() {
    let root = memory();
    let counting = Arc::new(CountingStore::new(root.clone(), Counts::default()));
    let last = Policy::Last(NonZeroU64::new(CHECKPOINTS).expect("above 0"));
    let life = Life::new(counting.clone(), ByteBudget::new(64 << 20), "me".into(), last, Duration::from_secs(3600));
    let quiet = Life::new(root.clone(), ByteBudget::new(64 << 20), "me".into(), Policy::All, Duration::from_secs(3600));
    quiet.hold(life.generation().await.expect("claimed"));
    for step in 1..=CHECKPOINTS {
        save(&quiet, &*root, step).await;
    }
    save(&life, &*counting, CHECKPOINTS + 1).await;
    life.retain().await.expect("swept");
    let before = total(&counting);
    save(&life, &*counting, CHECKPOINTS + 2).await;
    let saved = total(&counting) - before;
    assert_eq!(life.retain().await.expect("swept").removed, ["step-2"]);
    let retained = total(&counting) - before - saved;
    eprintln!("a save: {saved} requests, retention: {retained}; {:?}", counting.hook().all());
    assert!(saved < 80 && retained < 60, "a save {saved}, retention {retained}: {:?}", counting.hook().all());
    // Nothing of what was learned is taken on trust.
    let listed = catalog(&root).await.expect("listed");
    let rules = Rules { policy: Policy::All, orphan_age: Duration::ZERO, now: NOW };
    let generation = life.generation().await.expect("held");
    let swept = sweep(&root, &listed, &plan_sweep(&listed, &rules), &rules, generation).await.expect("swept");
    assert_eq!(swept.num_objects, 0);
}

fn total(store: &CountingStore) -> u64 {
    store.hook().all().values().map(|(requests, _)| requests).sum()
}
