//! Saving: `write_items`, `open_base`, `commit` and what they exchange.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyList};
use strata_checkpoint::item::{Dims, Kind};
use strata_checkpoint::{self as core, Commit, Payload, RankRecord, Records, SaveItem, StockEntry};
use tokio::sync::watch;

use crate::buffers::{Owners, lend_device, lend_memory};
use crate::checkpoint::Checkpoint;
use crate::entries::{RawPromises, RawStockParts, promises, stock_parts};
use crate::errors::to_py;
use crate::run::{Parent, RawRunInfo, run_info};
use crate::runtime::wait;
use crate::store::Store;

/// Adds this file's functions and classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Base>()?;
    module.add_class::<Transfer>()?;
    module.add_class::<CommitStats>()?;
    module.add_function(wrap_pyfunction!(open_base, module)?)?;
    module.add_function(wrap_pyfunction!(claim_generation, module)?)?;
    module.add_function(wrap_pyfunction!(write_items, module)?)?;
    module.add_function(wrap_pyfunction!(write_safetensors, module)?)?;
    module.add_function(wrap_pyfunction!(rewrite_safetensors, module)?)?;
    module.add_function(wrap_pyfunction!(record_objects, module)?)?;
    module.add_function(wrap_pyfunction!(record_encoded, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)
}

/// What was at a place before a save.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Base {
    base: Arc<core::Base>,
}

#[pymethods]
impl Base {
    #[getter]
    fn exists(&self) -> bool {
        self.base.exists()
    }

    #[getter]
    fn number(&self) -> u64 {
        self.base.number
    }

    #[getter]
    fn save_id(&self) -> &str {
        self.base.manifest.as_ref().map_or("", |manifest| &manifest.save_id)
    }

    #[getter]
    fn foreign_metadata<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.base.foreign_metadata.as_ref().map(|bytes| PyBytes::new(py, bytes))
    }

    #[getter]
    fn stale_metadata(&self) -> bool {
        self.base.stale_metadata
    }

    #[getter]
    fn ranks(&self) -> Option<u32> {
        self.base.ranks
    }
}

#[pyfunction]
#[pyo3(signature = (store, *, rank, transfer = None))]
fn open_base(py: Python<'_>, store: &Store, rank: Option<u32>, transfer: Option<&Transfer>) -> PyResult<Base> {
    let (store, _) = store.open()?;
    let cancelled = transfer.map(|transfer| transfer.cancelled.subscribe());
    let base = wait(py, async move {
        let opening = core::open_base(&*store, rank);
        match cancelled {
            Some(cancelled) => unless_cancelled(opening, cancelled).await,
            None => opening.await,
        }
    })?;
    Ok(Base { base: Arc::new(base) })
}

#[pyfunction]
#[pyo3(signature = (run_root, *, owner))]
fn claim_generation(py: Python<'_>, run_root: &Store, owner: String) -> PyResult<u64> {
    let (store, _) = run_root.open()?;
    wait(py, async move { core::claim_generation(&*store, &owner).await })
}

/// A `write_items`, seen from another thread: how far it has come, and a way to end it, also before it begins, and the
/// `open_base` before it.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Transfer {
    cancelled: watch::Sender<bool>,
    progress: Arc<core::Progress>,
}

impl Transfer {
    /// How far it has come, for whoever writes.
    pub fn counter(&self) -> &Arc<core::Progress> {
        &self.progress
    }
}

#[pymethods]
impl Transfer {
    #[new]
    fn new() -> Self {
        Self { cancelled: watch::Sender::new(false), progress: Arc::default() }
    }

    fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.progress.seen()
    }
}

/// `future` until it ends or is cancelled; it is dropped then, and what it was writing is removed.
async fn unless_cancelled<T>(
    future: impl Future<Output = core::Result<T>>,
    mut cancelled: watch::Receiver<bool>,
) -> core::Result<T> {
    tokio::select! {
        result = future => result,
        Ok(_) = cancelled.wait_for(|cancelled| *cancelled) => Err(core::Error::Plan("the save was given up".to_owned())),
    }
}

/// What many items have in common: offsets, kind, device, bytes, dtype, shape, strides.
type RawTemplate = (Option<Vec<u64>>, u32, i64, usize, String, Vec<u64>, Vec<u64>);

/// fqn, index, template, address, owner.
type RawItem<'py> = (PyBackedBytes, i64, usize, usize, Bound<'py, PyAny>);

#[pyfunction]
#[pyo3(signature = (store, items, templates, *, rank, save_id, parent, transfer))]
#[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn write_items<'py>(
    py: Python<'py>,
    store: &Store,
    items: Vec<RawItem<'py>>,
    templates: Vec<RawTemplate>,
    rank: u32,
    save_id: String,
    parent: Option<&Parent>,
    transfer: &Transfer,
) -> PyResult<Bound<'py, PyBytes>> {
    let (store, budget) = store.open()?;
    let items = lend_items(items, &templates)?;
    let parent = parent.map(|parent| parent.parent.clone());
    let (cancelled, progress) = (transfer.cancelled.subscribe(), transfer.progress.clone());
    let record = wait(py, async move {
        unless_cancelled(
            core::write_items(&*store, &budget, items, rank, &save_id, parent.as_ref(), &progress),
            cancelled,
        )
        .await
    })?;
    Ok(PyBytes::new(py, &record.encode()))
}

#[pyfunction]
#[pyo3(signature = (store, items, templates, *, rank, save_id, transfer))]
fn write_safetensors<'py>(
    py: Python<'py>,
    store: &Store,
    items: Vec<RawItem<'py>>,
    templates: Vec<RawTemplate>,
    rank: u32,
    save_id: String,
    transfer: &Transfer,
) -> PyResult<Bound<'py, PyBytes>> {
    let (store, budget) = store.open()?;
    let items = lend_items(items, &templates)?;
    let (cancelled, progress) = (transfer.cancelled.subscribe(), transfer.progress.clone());
    let record = wait(py, async move {
        let writing = core::write_safetensors(&*store, &budget, items, rank, &save_id, &progress);
        unless_cancelled(writing, cancelled).await
    })?;
    Ok(PyBytes::new(py, &record.encode()))
}

#[pyfunction]
#[pyo3(signature = (source, store, *, save_id, transfer))]
fn rewrite_safetensors<'py>(
    py: Python<'py>,
    source: &Checkpoint,
    store: &Store,
    save_id: String,
    transfer: &Transfer,
) -> PyResult<Bound<'py, PyBytes>> {
    let (store, budget) = store.open()?;
    let (reading, checkpoint) = (source.reading.clone(), source.now());
    let (cancelled, progress) = (transfer.cancelled.subscribe(), transfer.progress.clone());
    let record = wait(py, async move {
        let writing = core::rewrite_safetensors(&reading, &checkpoint, &*store, &budget, &save_id, &progress);
        unless_cancelled(writing, cancelled).await
    })?;
    Ok(PyBytes::new(py, &record.encode()))
}

fn lend_items(raw: Vec<RawItem<'_>>, templates: &[RawTemplate]) -> PyResult<Vec<SaveItem>> {
    let mut owners = Owners::default();
    let share = |(offsets, _, device, _, dtype, shape, strides): &RawTemplate| {
        let offsets = offsets.as_deref().map(Dims::from);
        (offsets, *device, Arc::<str>::from(dtype.as_str()), Dims::from(&**shape), Dims::from(&**strides))
    };
    let shared: Vec<_> = templates.iter().map(share).collect();
    let mut placed = Vec::with_capacity(raw.len());
    for (fqn, index, number, address, owner) in raw {
        let template = templates.get(number).ok_or_else(|| PyValueError::new_err(format!("no template {number}")))?;
        let kind = kind_of(template.1)?;
        let (address, bytes) = match kind {
            Kind::Tensor => {
                owners.keep(owner);
                (address, template.3)
            }
            Kind::Bytes | Kind::TorchSave => owners.keep_buffer(&owner)?,
        };
        placed.push((Arc::from(&*fqn), u32::try_from(index).ok(), number, kind, address, bytes));
    }
    let lease = owners.lease();
    let lend = |(fqn, index, number, kind, address, bytes): (_, _, usize, _, _, _)| {
        let (offsets, device, dtype, shape, strides) = shared[number].clone();
        let payload = match u32::try_from(device).ok() {
            None => Payload::Host(lend_memory(address, bytes, &lease)),
            Some(ordinal) => {
                let memory = lend_device(ordinal, address, bytes, &lease);
                Payload::Device(memory.map_err(core::Error::from).map_err(to_py)?)
            }
        };
        Ok(SaveItem { fqn, offsets, index, kind, dtype, shape, strides, payload })
    };
    placed.into_iter().map(lend).collect()
}

fn kind_of(code: u32) -> PyResult<Kind> {
    Kind::from_code(code).ok_or_else(|| PyValueError::new_err(format!("no kind {code}")))
}

#[pyfunction]
fn record_objects(record: &[u8]) -> PyResult<Vec<(String, u64)>> {
    let objects = RankRecord::own_objects(record).map_err(to_py)?;
    Ok(objects.into_iter().map(|object| (object.name, object.size)).collect())
}

#[pyfunction]
fn record_encoded(record: &[u8]) -> PyResult<(u64, u64)> {
    RankRecord::encoded(record).map_err(to_py)
}

/// fqn, offsets, index, object, offset, length.
pub(crate) type RawStockEntry<F> = (F, Option<Vec<u64>>, i64, String, u64, u64);

/// Python's view of a stock entry.
pub(crate) fn stock_to_py(py: Python<'_>, entry: StockEntry) -> RawStockEntry<Bound<'_, PyBytes>> {
    let index = entry.index.map_or(-1, i64::from);
    (PyBytes::new(py, &entry.fqn), entry.offsets, index, entry.object, entry.offset, entry.length)
}

/// What a commit did.
#[pyclass(module = "torch_strata._native", frozen, get_all)]
pub(crate) struct CommitStats {
    number: u64,
    fenced: bool,
    num_objects: u64,
    num_items: u64,
    payload_bytes: u64,
    referred_bytes: u64,
    own_bytes: u64,
    model_hash: Option<String>,
    collected: u64,
    warnings: Vec<String>,
}

#[pyfunction]
#[pyo3(signature = (store, base, records, entries, *, planner_data, stock, save_id, previous_save_id, rank,
                    world_size, generation, run_root, run))]
#[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
fn commit(
    py: Python<'_>,
    store: &Store,
    base: &Base,
    records: &Bound<'_, PyList>,
    entries: RawPromises,
    planner_data: Vec<u8>,
    stock: Option<RawStockParts>,
    save_id: String,
    previous_save_id: String,
    rank: Option<u32>,
    world_size: u32,
    generation: u64,
    run_root: Option<&Store>,
    run: Option<RawRunInfo>,
) -> PyResult<CommitStats> {
    let (store, _) = store.open()?;
    let run_root = run_root.map(Store::open).transpose()?;
    let base = base.base.clone();
    let run = run.map(run_info).transpose()?;
    let promises = promises(py, entries)?;
    let sent: Vec<PyBackedBytes> = records.extract()?;
    let bytes: Vec<&[u8]> = sent.iter().map(|record| &**record).collect();
    let decoded = py.detach(|| Records::decode(&bytes)).map_err(to_py)?;
    // The commit needs the memory.
    drop(sent);
    records.del_slice(0, records.len())?;
    let stats = wait(py, async move {
        let job = Commit {
            records: decoded,
            promises,
            planner_data,
            stock: stock.map(stock_parts),
            save_id,
            previous_save_id,
            rank,
            world_size,
            generation,
            run,
            run_root: run_root.as_ref().map(|(store, _)| &**store),
        };
        core::commit(&*store, &base, job).await
    })?;
    let core::CommitStats { number, fenced, num_objects, num_items, payload_bytes, referred_bytes, .. } = stats;
    let core::CommitStats { own_bytes, model_hash, collected, warnings, .. } = stats;
    Ok(CommitStats {
        number,
        fenced,
        num_objects,
        num_items,
        payload_bytes,
        referred_bytes,
        own_bytes,
        model_hash,
        collected,
        warnings,
    })
}
