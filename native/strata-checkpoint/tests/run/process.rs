//! A process that manages the run, and what becomes of what it does.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use strata_checkpoint::run::life::Run as Life;
use strata_checkpoint::run::retention::Policy;
use strata_checkpoint::run::{CheckpointType, RunInfo, folder};
use strata_checkpoint::{Commit, Error, Parent, Records, commit, open_base, write_items};
use strata_io::Store;
use strata_io::schedule::ByteBudget;
use strata_io::testing::Hooked;

use super::chaos::Chaos;
use super::model::Model;
use super::{Tensor, promises, stock};

pub const DAY: Duration = Duration::from_secs(24 * 3600);

pub type Shared = Arc<Mutex<Model>>;

/// A process that manages the run.
#[derive(Clone)]
pub struct Process {
    pub life: Arc<Life>,
    pub store: Arc<Hooked<Chaos>>,
    pub policy: Policy,
    pub model: Shared,
    pub seed: u64,
}

impl Process {
    pub fn new(root: &Arc<dyn Store>, model: &Shared, seed: u64, policy: Policy) -> Self {
        let store = Arc::new(Hooked::new(root.clone(), Chaos::new(seed)));
        let life = Life::new(store.clone(), ByteBudget::new(64 << 20), seed.to_string(), policy.clone(), DAY);
        Self { life: Arc::new(life), store, policy, model: model.clone(), seed }
    }

    /// The right to commit; fails if the store does.
    pub async fn claim(&self) -> Result<u64, Error> {
        let generation = self.life.generation().await?;
        let mut model = self.model.lock().expect("no panic while held");
        model.generation = model.generation.max(generation);
        Ok(generation)
    }

    pub async fn save(&self, order: &Order) {
        let Order { id, step, kind, tensors, .. } = order;
        let was_replaced = self.is_replaced().await;
        let before = {
            let mut model = self.model.lock().expect("no panic while held");
            model.begin(id, *step, kind.part(), tensors);
            model.history.len()
        };
        let ended = self.try_save(order).await;
        let was_raced = self.model.lock().expect("no panic while held").history.len() > before;
        self.note(format!("save {order:?}: {ended:?}"));
        let mut model = self.model.lock().expect("no panic while held");
        match ended {
            Ok(()) => {
                assert!(!was_replaced, "{order:?} was committed by a process that had been replaced");
                model.committed(id, *step, kind.part(), was_raced);
            }
            // These say that nothing was published.
            Err(
                error @ (Error::Exists { .. }
                | Error::Plan(_)
                | Error::Superseded { .. }
                | Error::StaleGeneration { .. }),
            ) => model.refused(id, error.to_string()),
            Err(_) => model.unsure(*step, kind.part()),
        }
    }

    pub fn note(&self, what: String) {
        let what = format!("{}: {what}", self.seed);
        self.model.lock().expect("no panic while held").history.push(what);
    }

    pub async fn is_replaced(&self) -> bool {
        let newest = self.model.lock().expect("no panic while held").generation;
        self.life.generation().await.is_ok_and(|held| held < newest)
    }

    /// As the writer of a manager does it.
    pub async fn try_save(&self, order: &Order) -> Result<(), Error> {
        let Order { id, step, kind, tensors, overwrite } = order;
        let parent = self.life.check_new(*step, kind.part(), *overwrite).await?.parent;
        let parent = match parent.filter(|_| *kind == CheckpointType::Incremental) {
            None => None,
            Some(name) => Parent::open(&*self.store.child(&name)?, &name).await.ok().map(Arc::new),
        };
        let place = self.store.child(&folder(*step, kind.part()))?;
        let base = open_base(&*place, None).await?;
        let generation = self.claim().await?;
        let (budget, items) = (ByteBudget::new(64 << 20), tensors.iter().map(super::item).collect());
        let record = write_items(&*place, &budget, items, 0, id, parent.as_ref(), &Arc::default()).await?;
        let run = RunInfo {
            step: *step,
            epoch: 0,
            checkpoint_type: *kind,
            metadata: Default::default(),
            metrics: Default::default(),
            model_hash: None,
        };
        let job = Commit {
            records: Records::decode(&[&record.encode()])?,
            promises: promises(tensors),
            planner_data: Vec::new(),
            stock: Some(stock(id)),
            save_id: id.clone(),
            previous_save_id: base.manifest.as_ref().map(|old| old.save_id.clone()).unwrap_or_default(),
            rank: None,
            world_size: 1,
            generation,
            run: Some(run),
            run_root: Some(&*self.store),
        };
        commit(&*place, &base, job).await.map(drop)
    }

    pub async fn retain(&self) {
        self.model.lock().expect("no panic while held").weaken(&self.policy);
        // What it was refused is for the next one.
        let ended = self.life.retain().await;
        self.note(format!("retain by {:?}: {ended:?}", self.policy));
        self.model.lock().expect("no panic while held").weaken(&self.policy);
    }

    pub async fn roll_back(&self, step: u64) {
        let ended = self.life.rollback(step).await;
        self.note(format!("roll back to {step}: {ended:?}"));
        self.model.lock().expect("no panic while held").taken_back(step, ended.is_ok());
    }
}

/// A save to come.
#[derive(Debug, Clone)]
pub struct Order {
    pub id: String,
    pub step: u64,
    pub kind: CheckpointType,
    pub tensors: Vec<Tensor>,
    pub overwrite: bool,
}
