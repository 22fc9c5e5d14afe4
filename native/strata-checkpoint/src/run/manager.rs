//! Saves of bytes one after another, while whoever saves goes on.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use strata_io::IoConfig;
use strata_io::schedule::ByteBudget;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::life::{NewCheckpoint, Run};
use super::retention::Policy;
use super::{CheckpointMetadata, CheckpointType, Part, RunInfo};
use crate::progress::Progress;
use crate::{Error, Result};

/// Limits of the store of a manager that is made from a [`CheckpointManagerConfig`].
const IN_FLIGHT_BYTES: u64 = 256 << 20;
const PART_BYTES: u64 = 16 << 20;
const REQUESTS: usize = 16;
const TRIES: u32 = 8;
const DEADLINE: Duration = Duration::from_secs(600);

/// Longer than any save takes.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);

/// What a manager is made from.
#[derive(Debug, Clone)]
pub struct CheckpointManagerConfig {
    /// `local`, or a scheme such as `s3`.
    pub storage_backend: String,
    /// Path below it: a directory, or bucket and prefix.
    pub checkpoint_dir: String,
    /// How many of the newest checkpoints are kept; 0 is refused.
    pub keep_count: u64,
}

/// Saves of one run, one after another, while whoever saves goes on.
#[derive(Debug, Clone)]
pub struct CheckpointManager {
    run: Arc<Run>,
    writer: AsyncCheckpointWriter,
}

impl CheckpointManager {
    /// A manager of the run at `config.checkpoint_dir`; claims the right to commit there.
    ///
    /// # Errors
    /// [`Error::Io`] if the backend is unknown or cannot be reached.
    pub async fn new(config: CheckpointManagerConfig) -> Result<Self> {
        let keep = NonZeroU64::new(config.keep_count);
        let keep =
            keep.ok_or_else(|| strata_io::Error::Config("keep_count: expected at least 1, found 0".to_owned()))?;
        let run = open_run(&config, Policy::Last(keep))?;
        run.generation().await?;
        Ok(Self::of(Arc::new(run)))
    }

    /// A manager of `run`.
    pub fn of(run: Arc<Run>) -> Self {
        Self { writer: AsyncCheckpointWriter::new(run.clone()), run }
    }

    /// What it manages.
    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// Begins to save `bytes`; await what is returned to know that they are committed, or go on and do so later.
    pub fn save(&self, bytes: impl Into<Bytes>, step: u64, epoch: u64, checkpoint_type: CheckpointType) -> PendingSave {
        let (metadata, metrics) = (BTreeMap::new(), BTreeMap::new());
        let run = RunInfo { step, epoch, checkpoint_type, metadata, metrics, model_hash: None };
        self.writer.write(bytes.into(), NewCheckpoint { run, overwrite: false })
    }

    /// The bytes saved at `step`.
    ///
    /// # Errors
    /// As [`Run::load_bytes`].
    pub async fn load(&self, step: u64) -> Result<Bytes> {
        self.run.load_bytes(step, Part::Whole).await
    }

    /// The newest whole checkpoint.
    ///
    /// # Errors
    /// As [`Run::all`].
    pub async fn latest(&self) -> Result<Option<CheckpointMetadata>> {
        Ok(self.all().await?.into_iter().rfind(|found| found.checkpoint_type.part() == Part::Whole))
    }

    /// The committed checkpoints, ascending by step.
    ///
    /// # Errors
    /// As [`Run::all`].
    pub async fn all(&self) -> Result<Vec<CheckpointMetadata>> {
        self.run.all().await
    }

    /// Returns when no save that has begun is going on.
    pub async fn wait(&self) {
        self.writer.wait().await;
    }
}

/// Where the backend's name and the directory lead.
fn open_run(config: &CheckpointManagerConfig, policy: Policy) -> Result<Run> {
    let CheckpointManagerConfig { storage_backend, checkpoint_dir, .. } = config;
    let url = match storage_backend.as_str() {
        "local" | "file" => checkpoint_dir.clone(),
        scheme => format!("{scheme}://{}", checkpoint_dir.trim_start_matches('/')),
    };
    let budget = ByteBudget::new(IN_FLIGHT_BYTES);
    let limits = IoConfig {
        budget: budget.clone(),
        max_concurrency: REQUESTS,
        part_bytes: PART_BYTES,
        fsync: true,
        direct_io: true,
        max_tries: TRIES,
        deadline: DEADLINE,
    };
    let root = strata_io::open(&url, &BTreeMap::new(), &limits)?;
    Ok(Run::new(root, budget, format!("{:032x}", rand::random::<u128>()), policy, ORPHAN_AGE))
}

/// Writes checkpoints of bytes in the background, in the order in which they were handed over.
#[derive(Debug, Clone)]
pub struct AsyncCheckpointWriter {
    run: Arc<Run>,
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    begun: AtomicU64,
    ended: watch::Sender<u64>,
}

impl AsyncCheckpointWriter {
    /// A writer to `run`.
    pub fn new(run: Arc<Run>) -> Self {
        Self { run, queue: Arc::default() }
    }

    /// Hands `bytes` over; they are committed when what is returned is ready, which may be awaited or dropped.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn write(&self, bytes: Bytes, new: NewCheckpoint) -> PendingSave {
        let progress = Arc::<Progress>::default();
        let (run, shown) = (self.run.clone(), progress.clone());
        let turn = self.queue.clone().turn();
        let task = tokio::spawn(async move {
            turn.wait().await;
            let save_id = format!("{:032x}", rand::random::<u128>());
            let saved = run.save_bytes(bytes, &new, &save_id, &shown).await;
            // Whoever dropped what is returned hears of it here.
            let saved = saved.inspect_err(|error| tracing::error!("step {}: not saved: {error}", new.run.step))?;
            if let Err(error) = run.retain().await {
                tracing::warn!("{}: nothing more is removed for now: {error}", run.root().url());
            }
            Ok(saved)
        });
        PendingSave { task, progress }
    }

    /// Returns when nothing that was handed over before is being written.
    pub async fn wait(&self) {
        let begun = self.queue.begun.load(Relaxed);
        // The sender is ours: it cannot be gone.
        let _ = self.queue.ended.subscribe().wait_for(|ended| *ended >= begun).await;
    }
}

impl Queue {
    fn turn(self: Arc<Self>) -> Turn {
        Turn { number: self.begun.fetch_add(1, Relaxed), queue: self }
    }
}

/// A place in the queue; given up when dropped, whatever came of it.
struct Turn {
    number: u64,
    queue: Arc<Queue>,
}

impl Turn {
    async fn wait(&self) {
        let _ = self.queue.ended.subscribe().wait_for(|ended| *ended >= self.number).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.queue.ended.send_modify(|ended| *ended += 1);
    }
}

/// A save that goes on; awaiting it tells how it ended. Dropping it does not end it.
#[derive(Debug)]
pub struct PendingSave {
    task: JoinHandle<Result<CheckpointMetadata>>,
    progress: Arc<Progress>,
}

impl PendingSave {
    /// How far it has come.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.task.is_finished()
    }
}

impl Future for PendingSave {
    type Output = Result<CheckpointMetadata>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = |ended: Result<_, _>| ended.unwrap_or_else(|_| Err(Error::Plan("the save was cut off".to_owned())));
        Pin::new(&mut self.task).poll(context).map(ended)
    }
}
