//! Seeded schedules over a run whose processes fail, die and race: nothing that was said to be committed is lost, and
//! nothing is left in the end that no manifest names.
//!
//! A seed that failed is run alone, or some are, with `STRATA_SEEDS=<seed>..<end> cargo test --test run schedules`.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use strata_checkpoint::manifest::decode;
use strata_checkpoint::run::catalog::{Listed, State, catalog};
use strata_checkpoint::run::retention::Policy;
use strata_checkpoint::run::sweep::{Rules, plan_sweep, sweep};
use strata_checkpoint::run::{CheckpointType, Part};
use strata_checkpoint::{Progress, open, verify};
use strata_io::{PutMode, Store};

use super::chaos::{Dice, Trouble};
use super::process::{Order, Process, Shared};
use super::{NonZeroU64, Tensor, memory_in_parts};

const SCHEDULES: u64 = 300;
/// Later than whatever this test writes is old.
const FAR: u64 = 4_000_000_000;

/// One schedule in the making.
struct Schedule {
    root: Arc<dyn Store>,
    model: Shared,
    dice: Dice,
    weights: Vec<Tensor>,
    saves: u64,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let weights = vec![("model.a", 1), ("model.b", 2), ("model.frozen", 3), ("optimizer.a", 4)];
        let root = memory_in_parts(16 << 10);
        Self { root, model: Shared::default(), dice: Dice::new(seed), weights, saves: 0 }
    }

    fn policy(&mut self) -> Policy {
        let some = |dice: &mut Dice| NonZeroU64::new(1 + dice.below(3)).expect("above 0");
        match self.dice.below(6) {
            0 => Policy::All,
            1 => Policy::Any(vec![Policy::Last(some(&mut self.dice)), Policy::EverySteps(some(&mut self.dice))]),
            _ => Policy::Last(some(&mut self.dice)),
        }
    }

    fn process(&mut self) -> Process {
        let policy = self.policy();
        let seed = self.dice.below(1 << 20);
        Process::new(&self.root, &self.model, seed, policy)
    }

    fn order(&mut self) -> Order {
        self.saves += 1;
        for (name, fill) in &mut self.weights {
            if *name != "model.frozen" && self.dice.hits(40) {
                *fill = fill.wrapping_add(7);
            }
        }
        let kind = match self.dice.below(10) {
            0..3 => CheckpointType::Full,
            3..8 => CheckpointType::Incremental,
            8 => CheckpointType::ModelOnly,
            _ => CheckpointType::OptimizerOnly,
        };
        let is_in = |name: &str| match kind.part() {
            Part::Whole => true,
            Part::Model => name.starts_with("model."),
            Part::Optimizer => name.starts_with("optimizer."),
        };
        let tensors = self.weights.iter().filter(|(name, _)| is_in(name)).copied().collect();
        let newest = self.model.lock().expect("no panic while held").newest(kind.part()).1.unwrap_or(0);
        let step = if self.dice.hits(20) { newest.saturating_sub(self.dice.below(2)) } else { newest + 1 };
        let id = format!("{:032x}", 0xabc_0000 + self.saves);
        Order { id, step, kind, tensors, overwrite: self.dice.hits(50) }
    }

    /// What a process does next.
    fn act(&mut self, process: &Process) -> BoxFuture<'static, ()> {
        let process = process.clone();
        match self.dice.below(12) {
            0 => async move { process.retain().await }.boxed(),
            1 => {
                let newest = self.model.lock().expect("no panic while held").newest(Part::Whole).1.unwrap_or(0);
                let step = newest.saturating_sub(self.dice.below(4));
                async move { process.roll_back(step).await }.boxed()
            }
            _ => {
                let order = self.order();
                async move {
                    process.save(&order).await;
                    process.retain().await;
                }
                .boxed()
            }
        }
    }

    /// Another process takes the run over, or prunes it without taking it over.
    fn interlude(&mut self) -> BoxFuture<'static, ()> {
        let other = self.process();
        if self.dice.hits(30) {
            other.life.hold(self.model.lock().expect("no panic while held").generation);
            return async move { other.retain().await }.boxed();
        }
        let acts: Vec<_> = (0..1 + self.dice.below(3)).map(|_| self.act(&other)).collect();
        async move {
            other.claim().await.expect("nothing fails here");
            for act in acts {
                act.await;
            }
        }
        .boxed()
    }

    fn trouble(&mut self) -> Trouble {
        let mut trouble = Trouble::default();
        match self.dice.below(10) {
            0..3 => {
                trouble.refused = self.dice.below(60);
                trouble.lost = self.dice.below(60);
            }
            3..6 => trouble.dies = Some((1 + self.dice.below(120), self.dice.hits(50))),
            6..8 => trouble.meanwhile = Some((1 + self.dice.below(60), self.interlude())),
            _ => {}
        }
        trouble
    }

    async fn run(&mut self) {
        let mut process = self.process();
        for _ in 0..6 + self.dice.below(10) {
            let trouble = self.trouble();
            let act = self.act(&process);
            process.store.hook().set(trouble);
            act.await;
            process.store.hook().set(Trouble::default());
            self.check(&catalog(&self.root).await.expect("listed"), false).await;
            self.mark().await;
            if process.store.hook().is_dead() || process.is_replaced().await {
                process = self.process();
            }
        }
        self.end().await;
    }

    /// What people and readers do beside: nothing fails then.
    async fn mark(&mut self) {
        let life = Process::new(&self.root, &self.model, 0, Policy::All).life;
        let names: Vec<String> = self.model.lock().expect("no panic while held").required.keys().cloned().collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.dice.below(names.len() as u64) as usize].clone();
        let found = life.found(&name).await.expect("is required");
        let which = self.dice.below(12);
        if which < 5 {
            self.model.lock().expect("no panic while held").history.push(format!("mark {which} of {name}"));
        }
        match which {
            0 => {
                life.pin(&name, "somebody").await.expect("pinned");
                self.model.lock().expect("no panic while held").pins.insert(name);
            }
            1 => {
                life.unpin(&name, "somebody").await.expect("unpinned");
                self.model.lock().expect("no panic while held").pins.remove(&name);
            }
            2 => {
                life.note_verified(&name, &found.id).await.expect("marked");
                let mut model = self.model.lock().expect("no panic while held");
                let part = found.checkpoint_type.part();
                let step = |name: &String| model.required.get(name).map_or(0, |known| known.step);
                if model.verified.get(&part).is_none_or(|known| step(known) < found.step) {
                    model.verified.insert(part, name);
                }
            }
            3 => {
                life.quarantine(&name, &found.id, "a bit flipped").await.expect("marked");
                let mut model = self.model.lock().expect("no panic while held");
                model.required.remove(&name);
                model.possible.remove(&name);
                model.verified.retain(|_, verified| *verified != name);
                model.quarantined.insert(name, found.id);
            }
            4 => {
                let lease = format!("{name}/.strata/leases/{:020}-reader", 5);
                self.root.put(&lease, Bytes::new(), PutMode::Create).await.ok();
            }
            _ => {}
        }
    }

    /// Everything that is committed is whole, what must be there is, and the newest is told.
    async fn check(&self, listed: &[Listed], is_end: bool) {
        let committed = || {
            listed.iter().filter_map(|one| match &one.state {
                State::Committed(manifest) => Some((one, manifest.save_id.clone())),
                _ => None,
            })
        };
        for (one, id) in committed() {
            self.check_one(&one.folder, &id, is_end).await;
        }
        let usable = || committed().filter(|(one, _)| !one.is_quarantined && !one.is_abandoned);
        let model = self.model.lock().expect("no panic while held");
        for (name, known) in &model.required {
            let there = usable().find(|(one, _)| one.folder == *name).map(|(_, id)| id);
            assert!(
                there.as_ref().is_some_and(|id| known.ids.contains(id)),
                "{name} is lost: {known:?}, found {there:?}"
            );
        }
        for (name, id) in &model.quarantined {
            let stays = committed().any(|(one, found)| one.folder == *name && found == *id && one.is_quarantined);
            let replaced = model.possible.contains_key(name);
            assert!(stays || replaced, "{name} was found damaged, and is gone");
        }
        let steps = usable().filter(|(one, _)| one.part() == Some(Part::Whole));
        let latest = steps.filter_map(|(one, _)| one.metadata("")).map(|found| found.step).max();
        let (must, may) = model.newest(Part::Whole);
        assert!(must <= latest && latest <= may, "latest is {latest:?}, of {must:?} to {may:?}");
    }

    async fn check_one(&self, name: &str, id: &str, is_end: bool) {
        let (written, refused) = {
            let model = self.model.lock().expect("no panic while held");
            (model.written.get(id).cloned(), model.refused.get(id).cloned())
        };
        assert_eq!(refused, None, "{name} holds {id}, which was said not to be committed");
        let written = written.unwrap_or_else(|| panic!("{name} holds {id}, which nobody saved"));
        let place = self.root.child(name).expect("a plain name");
        let opened = open(&*place, None).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(opened.manifest.save_id, id);
        let items = opened.manifest.items.all();
        assert_eq!(items.len(), written.len(), "{name} holds something else than was saved");
        for (tensor, fill) in &written {
            let item = items.iter().find(|item| &*item.fqn == tensor.as_bytes()).expect("is in it");
            let object = &opened.manifest.objects[item.object as usize];
            let owner = object.reference.map_or(name, |at| opened.manifest.references[at as usize].0.as_str());
            let path = format!("{owner}/{}", object.name);
            let range = item.payload_offset()..item.payload_offset() + item.payload_bytes;
            let found = self.root.read(&path, Some(range)).await;
            let found = found.unwrap_or_else(|error| panic!("{name} lost {tensor}: {error}"));
            assert_eq!(found, super::content(*fill), "{tensor} of {name}");
        }
        if is_end {
            let (_, findings) = verify(&*place, &opened, &Progress::default()).await;
            assert!(findings.problems.is_empty() && findings.unchecked.is_empty(), "{name}: {findings:?}");
        }
    }

    /// A process that lives takes the run over and sweeps; what is left then is what manifests name.
    async fn end(&mut self) {
        let last = self.process();
        let generation = last.claim().await.expect("claimed");
        last.retain().await;
        // What is superseded goes before what only that referred to.
        loop {
            let rules = Rules { policy: last.policy.clone(), orphan_age: Duration::ZERO, now: FAR };
            let listed = catalog(&self.root).await.expect("listed");
            let plan = plan_sweep(&listed, &rules);
            let swept = sweep(&self.root, &listed, &plan, &rules, generation).await.expect("swept");
            if swept.num_objects == 0 {
                break;
            }
        }
        let listed = catalog(&self.root).await.expect("listed");
        self.check(&listed, true).await;
        let found: BTreeSet<String> = everything(&*self.root, "").await.into_iter().collect();
        let named = self.named(&listed).await;
        let leaked: Vec<&String> = found.difference(&named).collect();
        let missing: Vec<&String> = named.difference(&found).collect();
        assert!(leaked.is_empty() && missing.is_empty(), "leaked {leaked:#?}, missing {missing:#?}");
    }

    /// Every object that the committed checkpoints name; marks that speak of what is there.
    async fn named(&self, listed: &[Listed]) -> BTreeSet<String> {
        let mut named = BTreeSet::new();
        for one in listed {
            let name = &one.folder;
            let place = self.root.child(name).expect("a plain name");
            let State::Committed(_) = one.state else { continue };
            let opened = open(&*place, None).await.expect("opens").manifest;
            for object in &opened.objects {
                let owner = object.reference.map_or(name, |at| &opened.references[at as usize].0);
                named.insert(format!("{owner}/{}", object.name));
            }
            // Whose data is needed stays known as gone, with the manifest that tells what it is.
            for (owner, _) in &opened.references {
                named.extend(self.remains(owner).await);
            }
            // A save is committed without it, if it could not be put.
            named.extend(
                one.objects.iter().find(|object| object.name == ".metadata").map(|_| format!("{name}/.metadata")),
            );
            named.insert(format!("{name}/.strata/{:020}", opened.number));
            let marks = [("verified", one.is_verified), ("quarantined", one.is_quarantined)];
            named.extend(
                marks.iter().filter(|mark| mark.1).map(|mark| format!("{name}/.strata/{}-{}", mark.0, opened.save_id)),
            );
            let abandoned = one.is_abandoned.then(|| format!("{name}/.strata/abandoned-{}", opened.save_id));
            named.extend(abandoned);
            named.extend(one.pins.iter().map(|pin| format!("{name}/.strata/pin-{pin}")));
        }
        for generation in 1..=self.model.lock().expect("no panic while held").generation {
            named.insert(format!(".strata/generations/{generation:020}"));
        }
        named
    }

    /// What tells of a folder, to whose data others refer, which checkpoints there have gone.
    async fn remains(&self, owner: &str) -> Vec<String> {
        let listed = self.root.list(&format!("{owner}/.strata/")).await.expect("listed");
        let names = || listed.iter().map(|object| object.name.clone());
        let mut remains: Vec<String> = names().filter(|name| name.contains("/retired-")).collect();
        for name in names() {
            let file = self.root.read(&name, None).await.expect("read");
            if decode(&file).is_ok_and(|manifest| remains.iter().any(|mark| mark.ends_with(&manifest.save_id))) {
                remains.push(name);
            }
        }
        remains
    }
}

/// Every object below `folder`, which is "" or ends with a slash.
fn everything<'a>(store: &'a dyn Store, folder: &'a str) -> BoxFuture<'a, Vec<String>> {
    async move {
        let mut found: Vec<String> =
            store.list(folder).await.expect("listed").into_iter().map(|object| object.name).collect();
        for inner in store.list_folders(folder).await.expect("listed") {
            found.extend(everything(store, &format!("{inner}/")).await);
        }
        found
    }
    .boxed()
}

/// Runs the schedule of `seed`; whether all it promises was kept.
fn passes(seed: u64) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut schedule = Schedule::new(seed);
    let model = schedule.model.clone();
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), schedule.run()).await.expect("ends") });
    }));
    if ended.is_err() {
        let left = runtime.block_on(everything(&*schedule.root, ""));
        eprintln!("there is:\n{}", left.join("\n"));
        let history = model.lock().map_or_else(|held| held.into_inner().history.clone(), |held| held.history.clone());
        eprintln!("that was seed {seed}:\n{}", history.join("\n"));
    }
    ended.is_ok()
}

#[test]
fn nothing_is_lost_and_nothing_is_leaked_whatever_fails() {
    let named = std::env::var("STRATA_SEEDS").unwrap_or_default();
    let seeds = named
        .split_once("..")
        .map_or(0..SCHEDULES, |(first, end)| first.parse().expect("a number")..end.parse().expect("a number"));
    let (next, end, failed) = (AtomicU64::new(seeds.start), seeds.end, Mutex::new(BTreeSet::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= end {
                        return;
                    }
                    if !passes(seed) {
                        failed.lock().expect("no panic while held").insert(seed);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no panic while held");
    assert!(failed.is_empty(), "{} schedules failed, of these seeds: {failed:?}", failed.len());
}
