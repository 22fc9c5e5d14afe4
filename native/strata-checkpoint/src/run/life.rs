//! One run's checkpoints over its whole life: which there are, which may be saved next, which go. No task, no queue.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use strata_io::schedule::ByteBudget;
use strata_io::{PutMode, Store};
use tokio::sync::OnceCell;

pub use super::admission::Admitted;
use super::admission::admit;
use super::catalog::{ABANDONED, Known, Listed, PIN, QUARANTINED, State, VERIFIED, catalog_again, folder_of, known};
use super::retention::Policy;
use super::sweep::{Rules, SweepPlan, Swept, check_generation, plan_sweep, sweep};
use super::{CheckpointMetadata, Part, RunInfo, folder};
use crate::commit::{Commit, Promises, commit};
use crate::item::{Entry, Kind};
use crate::load::{Reading, VerifyMode, read};
use crate::manifest::FOLDER;
use crate::open::{Source, open};
use crate::payload::Payload;
use crate::progress::Progress;
use crate::record::Records;
use crate::save::{SaveItem, write_items};
use crate::{Error, Result, claim_generation, open_base};

/// Name of the one value in a checkpoint of bytes.
pub const BYTES_KEY: &str = "bytes";

/// A run's root, and what this process knows of it. Shared by the manager's faces.
#[derive(Debug)]
pub struct Run {
    root: Arc<dyn Store>,
    budget: ByteBudget,
    owner: String,
    generation: OnceCell<u64>,
    policy: Policy,
    orphan_age: Duration,
    known: Mutex<Known>,
}

/// What to save, besides the bytes.
#[derive(Debug, Clone)]
pub struct NewCheckpoint {
    /// What is said of it.
    pub run: RunInfo,
    /// Whether one of the same step may be replaced.
    pub overwrite: bool,
}

impl Run {
    /// The run below `root`; looks at nothing yet. `owner`: a nonce of this process.
    pub fn new(root: Arc<dyn Store>, budget: ByteBudget, owner: String, policy: Policy, orphan_age: Duration) -> Self {
        Self { root, budget, owner, policy, orphan_age, generation: OnceCell::new(), known: Mutex::default() }
    }

    /// The root's store.
    pub fn root(&self) -> &Arc<dyn Store> {
        &self.root
    }

    /// This process's right to commit and to remove, claimed when it is first asked for.
    ///
    /// # Errors
    /// As [`claim_generation`].
    pub async fn generation(&self) -> Result<u64> {
        self.generation.get_or_try_init(|| claim_generation(&*self.root, &self.owner)).await.copied()
    }

    /// Takes a generation that another object of this process has claimed.
    pub fn hold(&self, generation: u64) {
        // Held already: the first one counts.
        let _ = self.generation.set(generation);
    }

    /// Every folder of the run.
    ///
    /// # Errors
    /// As [`super::catalog::catalog`].
    pub async fn catalog(&self) -> Result<Vec<Listed>> {
        let before = self.known.lock().expect("no panic while held").clone();
        let listed = catalog_again(&self.root, &before).await?;
        *self.known.lock().expect("no panic while held") = known(&listed);
        Ok(listed)
    }

    /// The committed checkpoints, ascending by step; not those that were found damaged or abandoned.
    ///
    /// # Errors
    /// As [`super::catalog::catalog`].
    pub async fn all(&self) -> Result<Vec<CheckpointMetadata>> {
        let listed = self.catalog().await?;
        let usable = listed.iter().filter(|listed| !listed.is_quarantined && !listed.is_abandoned);
        let mut all: Vec<_> = usable.filter_map(|listed| listed.metadata(self.root.url())).collect();
        all.sort_by_key(|checkpoint| (checkpoint.step, checkpoint.checkpoint_type.part()));
        Ok(all)
    }

    /// Whether a checkpoint of this step and part may be saved now, to which one it may refer and what it replaces.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is one, ours or somebody else's, and `overwrite` is not set; [`Error::Plan`] if
    /// somebody holds what would be replaced, or if the run has gone further.
    pub async fn check_new(&self, step: u64, part: Part, overwrite: bool) -> Result<Admitted> {
        let (listed, url) = (self.catalog().await?, self.root.url());
        let admitted = admit(&listed, url, step, part, overwrite)?;
        if let Some(damage) = &admitted.replaces {
            tracing::warn!("{url}/{}: is damaged, and this save replaces it: {damage}", folder(step, part));
        }
        Ok(admitted)
    }

    /// Saves `bytes` as the checkpoint of a step, and lets retention do its work.
    ///
    /// # Errors
    /// As [`Run::check_new`] and [`commit`]; what is removed then is what was written.
    pub async fn save_bytes(
        &self,
        bytes: Bytes,
        new: &NewCheckpoint,
        save_id: &str,
        progress: &Arc<Progress>,
    ) -> Result<CheckpointMetadata> {
        let RunInfo { step, checkpoint_type, .. } = new.run;
        let name = folder(step, checkpoint_type.part());
        self.check_new(step, checkpoint_type.part(), new.overwrite).await?;
        let store = self.root.child(&name)?;
        let base = open_base(&*store, None).await?;
        let generation = self.generation().await?;
        let item = SaveItem {
            fqn: Arc::from(BYTES_KEY.as_bytes()),
            offsets: None,
            index: None,
            kind: Kind::Bytes,
            dtype: Arc::from(""),
            shape: Arc::from([]),
            strides: Arc::from([]),
            payload: Payload::Host(bytes),
        };
        let record = write_items(&*store, &self.budget, vec![item], 0, save_id, None, progress).await?;
        let entry = Entry { fqn: BYTES_KEY.into(), tensor: None };
        let job = Commit {
            records: Records::decode(&[&record.encode()])?,
            promises: Promises {
                entries: vec![entry],
                first_chunks: vec![0, 0],
                first_dims: vec![0],
                offsets: Vec::new(),
            },
            planner_data: Vec::new(),
            stock: None,
            save_id: save_id.to_owned(),
            previous_save_id: base.manifest.as_ref().map(|manifest| manifest.save_id.clone()).unwrap_or_default(),
            rank: None,
            world_size: 1,
            generation,
            run: Some(new.run.clone()),
            run_root: Some(&*self.root),
        };
        commit(&*store, &base, job).await?;
        self.found(&name).await
    }

    /// The bytes that [`Run::save_bytes`] saved at `step`, every block verified.
    ///
    /// # Errors
    /// [`Error::NotFound`] if no bytes are saved there; as [`read`].
    pub async fn load_bytes(&self, step: u64, part: Part) -> Result<Bytes> {
        let store = self.root.child(&folder(step, part))?;
        let opened = open(&*store, None).await?;
        let Some(row) = opened.rows(&[(BYTES_KEY.as_bytes(), None)])[0] else {
            let detail = "it holds a state, not bytes".to_owned();
            return Err(Error::NotFound { url: store.url().to_owned(), detail });
        };
        let reading = Reading { store, budget: self.budget.clone(), progress: Arc::default() };
        let (mut blobs, _) = read(&reading, Arc::new(opened), Vec::new(), &[row], VerifyMode::InPlace).await?;
        Ok(blobs.remove(0))
    }

    /// What is committed in the folder `name`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if nothing is; [`Error::Manifest`] if what is cannot be told any more.
    pub async fn found(&self, name: &str) -> Result<CheckpointMetadata> {
        let url = format!("{}/{name}", self.root.url());
        let listed = folder_of(&*self.root, name).await?;
        if let Some(State::Unreadable(detail)) = listed.as_ref().map(|listed| &listed.state) {
            return Err(Error::Manifest { object: url, detail: detail.clone() });
        }
        let nothing = || Error::NotFound { url, detail: "nothing is committed there".to_owned() };
        listed.and_then(|listed| listed.metadata(self.root.url())).ok_or_else(nothing)
    }

    /// What a sweep would do now.
    ///
    /// # Errors
    /// As [`super::catalog::catalog`].
    pub async fn plan(&self) -> Result<SweepPlan> {
        Ok(plan_sweep(&self.catalog().await?, &self.rules()))
    }

    /// Removes what the policy does not keep and what dead saves have left.
    ///
    /// # Errors
    /// As [`sweep`].
    pub async fn retain(&self) -> Result<Swept> {
        let (listed, rules) = (self.catalog().await?, self.rules());
        let plan = plan_sweep(&listed, &rules);
        let swept = sweep(&self.root, &listed, &plan, &rules, self.generation().await?).await?;
        Ok(Swept { num_kept: (plan.decisions.len() - swept.removed.len()) as u64, ..swept })
    }

    fn rules(&self) -> Rules {
        Rules {
            policy: self.policy.clone(),
            orphan_age: self.orphan_age,
            now: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        }
    }

    /// Lets `who` hold what is committed in `name`: no retention removes it.
    ///
    /// # Errors
    /// What the store says; [`Error::NotFound`] if nothing is committed there.
    pub async fn pin(&self, name: &str, who: &str) -> Result<()> {
        self.found(name).await?;
        self.mark(name, PIN, who, "").await?;
        // Retention may have looked before the pin was there: then its tombstone is.
        let place = self.root.child(name)?;
        match open(&*place, None).await {
            Ok(opened) if opened.source == Source::Strata => Ok(()),
            ended => {
                self.unpin(name, who).await?;
                let detail = "nothing of ours is committed there".to_owned();
                ended.and(Err(Error::NotFound { url: place.url().to_owned(), detail }))
            }
        }
    }

    /// Ends the hold of `who`.
    ///
    /// # Errors
    /// What the store says.
    pub async fn unpin(&self, name: &str, who: &str) -> Result<()> {
        Ok(self.root.delete(&format!("{name}/{FOLDER}{PIN}{who}")).await?)
    }

    /// Says that what is committed in `name` was read and found sound.
    ///
    /// # Errors
    /// What the store says.
    pub async fn note_verified(&self, name: &str, save_id: &str) -> Result<()> {
        self.mark(name, VERIFIED, save_id, "").await
    }

    /// Says that what is committed in `name` is damaged: it is passed over, and nothing of it is removed.
    ///
    /// # Errors
    /// What the store says.
    pub async fn quarantine(&self, name: &str, save_id: &str, why: &str) -> Result<()> {
        self.mark(name, QUARANTINED, save_id, why).await
    }

    async fn mark(&self, name: &str, mark: &str, of: &str, content: &str) -> Result<()> {
        let path = format!("{name}/{FOLDER}{mark}{of}");
        Ok(self.root.put(&path, Bytes::copy_from_slice(content.as_bytes()), PutMode::Overwrite).await?)
    }

    /// Takes the run back to `step`: later checkpoints are passed over, and go at the next retention.
    ///
    /// Claims the run first, so that whoever still saves to it cannot add to what is left behind. Returns the folders
    /// that were abandoned.
    ///
    /// # Errors
    /// [`Error::StaleGeneration`] if a newer run has claimed the root; what the store says.
    pub async fn rollback(&self, step: u64) -> Result<Vec<String>> {
        check_generation(&*self.root, self.generation().await?).await?;
        let mut abandoned = Vec::new();
        for listed in self.catalog().await? {
            let (State::Committed(manifest), Some(found)) = (&listed.state, listed.metadata(self.root.url())) else {
                continue;
            };
            if found.step > step && !listed.is_abandoned {
                self.mark(&listed.folder, ABANDONED, &manifest.save_id, &format!("rollback to {step}")).await?;
                abandoned.push(listed.folder);
            }
        }
        check_generation(&*self.root, self.generation().await?).await?;
        Ok(abandoned)
    }
}
