//! `_native.Run`: the checkpoints of one training below a root.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use strata_checkpoint::run::catalog::{Listed, State};
use strata_checkpoint::run::life::{NewCheckpoint, Run as Life};
use strata_checkpoint::run::retention::{Better, Policy};
use strata_checkpoint::run::sweep::Swept;
use strata_checkpoint::run::{CheckpointMetadata, CheckpointType, RunInfo, folder};

use crate::buffers::{Owners, lend_memory};
use crate::runtime::wait;
use crate::save::Transfer;
use crate::store::Store;

/// A run's root, opened anew in each process that uses it.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Run {
    root: Py<Store>,
    owner: String,
    policy: Policy,
    orphan_age: Duration,
    opened: Mutex<Option<(u32, Arc<Life>)>>,
}

/// id, step, epoch, path, size_bytes, type, model_hash, metadata, metrics, created_at.
type RawMetadata =
    (String, u64, u64, String, u64, String, Option<String>, BTreeMap<String, String>, BTreeMap<String, f64>, u64);

/// folder, state, detail, what is committed, is_quarantined, is_abandoned, is_verified, pins, checkpoints referred to.
type RawListed = (String, &'static str, String, Option<RawMetadata>, bool, bool, bool, Vec<String>, Vec<String>);

/// step, epoch, type, metadata, metrics.
pub(crate) type RawRunInfo = (u64, u64, String, BTreeMap<String, String>, BTreeMap<String, f64>);

/// Folder to which a save may refer, what is wrong with the checkpoint that it replaces.
type RawAdmitted = (Option<String>, Option<String>);

/// folders removed, checkpoints kept, objects, bytes, notes.
type RawSwept = (Vec<String>, u64, u64, u64, Vec<String>);

/// (folder, keeps, because) of each checkpoint; notes.
type RawPlan = (Vec<(String, bool, String)>, Vec<String>);

/// What Python says of a checkpoint.
pub(crate) fn run_info(raw: RawRunInfo) -> PyResult<RunInfo> {
    let (step, epoch, checkpoint_type, metadata, metrics) = raw;
    Ok(RunInfo { step, epoch, checkpoint_type: type_of(&checkpoint_type)?, metadata, metrics, model_hash: None })
}

/// What was said of a checkpoint, for Python.
pub(crate) fn raw_run_info(run: RunInfo) -> RawRunInfo {
    let RunInfo { step, epoch, checkpoint_type, metadata, metrics, .. } = run;
    (step, epoch, checkpoint_type.to_string(), metadata, metrics)
}

fn type_of(name: &str) -> PyResult<CheckpointType> {
    name.parse().map_err(PyValueError::new_err)
}

fn raw_metadata(found: CheckpointMetadata) -> RawMetadata {
    let CheckpointMetadata { id, step, epoch, path, size_bytes, checkpoint_type, model_hash, .. } = found;
    let metadata = found.metadata.into_iter().collect();
    let kind = checkpoint_type.to_string();
    (id, step, epoch, path, size_bytes, kind, model_hash, metadata, found.metrics, found.created_at)
}

fn raw_listed(listed: Listed, root: &str) -> RawListed {
    let metadata = listed.metadata(root).map(raw_metadata);
    let (state, detail, mut refers_to) = match &listed.state {
        State::Committed(manifest) => {
            ("committed", String::new(), manifest.references.iter().map(|(folder, _)| folder.clone()).collect())
        }
        State::Foreign => ("foreign", String::new(), Vec::new()),
        State::Uncommitted => ("uncommitted", String::new(), Vec::new()),
        State::Kept(users) => ("kept", format!("for {}", users.join(", ")), Vec::new()),
        State::Unreadable(fault) => ("unreadable", fault.clone(), Vec::new()),
    };
    refers_to.sort();
    let Listed { folder, is_quarantined, is_abandoned, is_verified, pins, .. } = listed;
    (folder, state, detail, metadata, is_quarantined, is_abandoned, is_verified, pins, refers_to)
}

fn raw_swept(swept: Swept) -> RawSwept {
    (swept.removed, swept.num_kept, swept.num_objects, swept.freed_bytes, swept.notes)
}

/// A policy as nested tuples: its name, then what it takes.
fn policy_of(raw: &Bound<'_, PyTuple>) -> PyResult<Policy> {
    let name: String = raw.get_item(0)?.extract()?;
    let count = |at: usize| -> PyResult<NonZeroU64> {
        let count: u64 = raw.get_item(at)?.extract()?;
        NonZeroU64::new(count).ok_or_else(|| PyValueError::new_err(format!("{name}: expected at least 1, found 0")))
    };
    let seconds = || -> PyResult<Duration> { Ok(Duration::from_secs_f64(raw.get_item(1)?.extract()?)) };
    Ok(match name.as_str() {
        "all" => Policy::All,
        "last" => Policy::Last(count(1)?),
        "every_steps" => Policy::EverySteps(count(1)?),
        "every" => Policy::Every(seconds()?),
        "younger" => Policy::Younger(seconds()?),
        "best" => {
            let (metric, higher): (String, bool) = (raw.get_item(1)?.extract()?, raw.get_item(2)?.extract()?);
            Policy::Best { metric, better: if higher { Better::Higher } else { Better::Lower }, count: count(3)? }
        }
        "any" => {
            let inner: Vec<Bound<'_, PyTuple>> = raw.get_item(1)?.extract()?;
            Policy::Any(inner.iter().map(policy_of).collect::<PyResult<_>>()?)
        }
        unknown => return Err(PyValueError::new_err(format!("no policy {unknown:?}"))),
    })
}

impl Run {
    fn open(&self) -> PyResult<Arc<Life>> {
        let pid = std::process::id();
        let mut opened = self.opened.lock().expect("never poisoned");
        if let Some((_, run)) = opened.as_ref().filter(|(of, _)| *of == pid) {
            return Ok(run.clone());
        }
        let (root, budget) = self.root.get().open()?;
        let run = Arc::new(Life::new(root, budget, self.owner.clone(), self.policy.clone(), self.orphan_age));
        // Forgotten, not dropped: the store of before a fork holds on to a runtime that a child lacks.
        std::mem::forget(opened.replace((pid, run.clone())));
        Ok(run)
    }
}

#[pymethods]
impl Run {
    #[new]
    #[pyo3(signature = (root, *, owner, policy, orphan_age_s))]
    fn new(root: Py<Store>, owner: String, policy: &Bound<'_, PyTuple>, orphan_age_s: f64) -> PyResult<Self> {
        let (policy, orphan_age) = (policy_of(policy)?, Duration::from_secs_f64(orphan_age_s));
        Ok(Self { root, owner, policy, orphan_age, opened: Mutex::new(None) })
    }

    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        let run = self.open()?;
        wait(py, async move { run.generation().await })
    }

    fn hold(&self, generation: u64) -> PyResult<()> {
        self.open()?.hold(generation);
        Ok(())
    }

    fn catalog(&self, py: Python<'_>) -> PyResult<Vec<RawListed>> {
        let (run, root) = (self.open()?, self.root.get().url().to_owned());
        let listed = wait(py, async move { run.catalog().await })?;
        Ok(listed.into_iter().map(|listed| raw_listed(listed, &root)).collect())
    }

    fn all(&self, py: Python<'_>) -> PyResult<Vec<RawMetadata>> {
        let run = self.open()?;
        Ok(wait(py, async move { run.all().await })?.into_iter().map(raw_metadata).collect())
    }

    fn found(&self, py: Python<'_>, folder: String) -> PyResult<RawMetadata> {
        let run = self.open()?;
        Ok(raw_metadata(wait(py, async move { run.found(&folder).await })?))
    }

    #[pyo3(signature = (step, checkpoint_type, *, overwrite))]
    fn check_new(&self, py: Python<'_>, step: u64, checkpoint_type: &str, overwrite: bool) -> PyResult<RawAdmitted> {
        let (run, part) = (self.open()?, type_of(checkpoint_type)?.part());
        let admitted = wait(py, async move { run.check_new(step, part, overwrite).await })?;
        Ok((admitted.parent, admitted.replaces))
    }

    #[pyo3(signature = (data, run_info, *, save_id, overwrite, transfer))]
    fn save_bytes(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        run_info: RawRunInfo,
        save_id: String,
        overwrite: bool,
        transfer: &Transfer,
    ) -> PyResult<RawMetadata> {
        let (run, progress) = (self.open()?, transfer.counter().clone());
        let new = NewCheckpoint { run: self::run_info(run_info)?, overwrite };
        let mut owners = Owners::default();
        let (address, bytes) = owners.keep_buffer(data.as_any())?;
        let data = lend_memory(address, bytes, &owners.lease());
        let saved = wait(py, async move { run.save_bytes(data, &new, &save_id, &progress).await })?;
        Ok(raw_metadata(saved))
    }

    fn load_bytes<'py>(&self, py: Python<'py>, step: u64, checkpoint_type: &str) -> PyResult<Bound<'py, PyBytes>> {
        let (run, part) = (self.open()?, type_of(checkpoint_type)?.part());
        let bytes = wait(py, async move { run.load_bytes(step, part).await })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn plan(&self, py: Python<'_>) -> PyResult<RawPlan> {
        let run = self.open()?;
        let plan = wait(py, async move { run.plan().await })?;
        let decisions = plan.decisions.into_iter().map(|(folder, d)| (folder, d.keeps, d.because)).collect();
        Ok((decisions, plan.notes))
    }

    fn retain(&self, py: Python<'_>) -> PyResult<RawSwept> {
        let run = self.open()?;
        Ok(raw_swept(wait(py, async move { run.retain().await })?))
    }

    fn pin(&self, py: Python<'_>, folder: String, who: String) -> PyResult<()> {
        let run = self.open()?;
        wait(py, async move { run.pin(&folder, &who).await })
    }

    fn unpin(&self, py: Python<'_>, folder: String, who: String) -> PyResult<()> {
        let run = self.open()?;
        wait(py, async move { run.unpin(&folder, &who).await })
    }

    fn note_verified(&self, py: Python<'_>, folder: String, save_id: String) -> PyResult<()> {
        let run = self.open()?;
        wait(py, async move { run.note_verified(&folder, &save_id).await })
    }

    fn quarantine(&self, py: Python<'_>, folder: String, save_id: String, why: String) -> PyResult<()> {
        let run = self.open()?;
        wait(py, async move { run.quarantine(&folder, &save_id, &why).await })
    }

    fn rollback(&self, py: Python<'_>, step: u64) -> PyResult<Vec<String>> {
        let run = self.open()?;
        wait(py, async move { run.rollback(step).await })
    }
}

/// Name of the folder of a checkpoint, below the run's root.
#[pyfunction]
fn run_folder(step: u64, checkpoint_type: &str) -> PyResult<String> {
    Ok(folder(step, type_of(checkpoint_type)?.part()))
}

/// A checkpoint of the run that an incremental save may refer to.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Parent {
    pub(crate) parent: Arc<strata_checkpoint::Parent>,
}

#[pymethods]
impl Parent {
    #[staticmethod]
    #[pyo3(signature = (store, checkpoint_id, *, encode = false))]
    fn open(py: Python<'_>, store: &Store, checkpoint_id: String, encode: bool) -> PyResult<Self> {
        let (store, _) = store.open()?;
        let parent = wait(py, async move { strata_checkpoint::Parent::open(&*store, &checkpoint_id).await })?;
        Ok(Self { parent: Arc::new(if encode { parent.encoding() } else { parent }) })
    }

    #[staticmethod]
    fn none() -> Self {
        Self { parent: Arc::new(strata_checkpoint::Parent::none().encoding()) }
    }

    #[getter]
    fn encoded_in_a_row(&self) -> u32 {
        self.parent.encoded_in_a_row()
    }

    #[getter]
    fn save_id(&self) -> &str {
        self.parent.save_id()
    }
}

/// Adds this file's functions and classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Run>()?;
    module.add_class::<Parent>()?;
    module.add_function(wrap_pyfunction!(run_folder, module)?)
}
