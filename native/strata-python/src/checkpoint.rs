//! `_native.Checkpoint` and `_native.ReadStats`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use strata_checkpoint::geometry::StridedCopy;
use strata_checkpoint::item::{Item, Kind};
use strata_checkpoint::{self as core, PlainTensor, Source, StockEntry, TensorRead, VerifyMode, stock};
use strata_io::schedule::ByteBudget;

use crate::buffers::{Owners, destination};
use crate::entries::{PyEntries, RawStockParts, entries, stock_parts};
use crate::errors::to_py;
use crate::run::{RawRunInfo, raw_run_info};
use crate::runtime::wait;
use crate::save::{RawStockEntry, stock_to_py};
use crate::store::Store;

/// Adds this file's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ReadStats>()?;
    module.add_class::<Checkpoint>()?;
    module.add_function(wrap_pyfunction!(is_our_data_object, module)?)?;
    module.add_function(wrap_pyfunction!(is_inside, module)?)?;
    module.add_function(wrap_pyfunction!(is_sealed, module)?)
}

/// What a read cost and checked.
#[pyclass(module = "torch_strata._native", frozen, get_all)]
pub(crate) struct ReadStats {
    requests: u64,
    bytes_read: u64,
    blocks_verified: u64,
    unverified_bytes: u64,
}

impl From<core::ReadStats> for ReadStats {
    fn from(stats: core::ReadStats) -> Self {
        let core::ReadStats { requests, bytes_read, blocks_verified, unverified_bytes } = stats;
        Self { requests, bytes_read, blocks_verified, unverified_bytes }
    }
}

#[pyfunction]
fn is_inside(path: &str) -> bool {
    core::names::is_inside(path)
}

#[pyfunction]
fn is_our_data_object(name: &str) -> bool {
    core::names::is_our_data_object(name)
}

#[pyfunction]
fn is_sealed(index: &[u8]) -> Option<bool> {
    core::is_sealed(index)
}

/// A checkpoint that is open for reading.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Checkpoint {
    pub reading: core::Reading,
    /// Replaced when stock items are looked at; a read holds the one it began with.
    checkpoint: Mutex<Arc<core::Checkpoint>>,
}

/// fqn, encoding, bytes that it takes, bytes of the payload, object of the base.
type RawEncoding<'py> = (Bound<'py, PyBytes>, &'static str, u64, u64, Option<String>);

/// fqn, object, offset, bytes, dtype, shape.
type RawPlain = (Vec<u8>, String, u64, u64, String, Vec<u64>);

/// kind, dtype, shape, strides.
type Described = (u32, String, Vec<u64>, Vec<u64>);

/// row, first element, lengths, device, address, destination strides, owner.
pub(crate) type RawRead<'py> = (usize, Vec<u64>, Vec<u64>, i64, usize, Vec<i64>, Bound<'py, PyAny>);

impl Checkpoint {
    fn new(store: Arc<dyn strata_io::Store>, budget: ByteBudget, checkpoint: core::Checkpoint) -> Self {
        let reading = core::Reading { store, budget, progress: Arc::default() };
        Self { reading, checkpoint: Mutex::new(Arc::new(checkpoint)) }
    }

    /// As it is; what stock items are found to be later is in another one.
    pub fn now(&self) -> Arc<core::Checkpoint> {
        self.checkpoint.lock().expect("never poisoned").clone()
    }

    /// Changes the checkpoint, of which readers that began before keep the old one.
    fn change<T>(&self, change: impl FnOnce(&mut core::Checkpoint) -> T) -> T {
        let mut checkpoint = self.checkpoint.lock().expect("never poisoned");
        change(Arc::make_mut(&mut checkpoint))
    }

    pub fn item(checkpoint: &core::Checkpoint, row: usize) -> PyResult<&Item> {
        let items = &checkpoint.manifest.items;
        if row >= items.len() {
            return Err(PyValueError::new_err(format!("no row {row} of {}", items.len())));
        }
        Ok(&items[row])
    }
}

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    #[pyo3(signature = (store, *, rank))]
    fn open(py: Python<'_>, store: &Store, rank: Option<u32>) -> PyResult<Self> {
        let (store, budget) = store.open()?;
        let opened = store.clone();
        let checkpoint = wait(py, async move { core::open(&*opened, rank).await })?;
        Ok(Self::new(store, budget, checkpoint))
    }

    #[staticmethod]
    fn plain(store: &Store, tensors: Vec<RawPlain>) -> PyResult<Self> {
        let (store, budget) = store.open()?;
        let tensor =
            |(fqn, object, offset, bytes, dtype, shape)| PlainTensor { fqn, object, offset, bytes, dtype, shape };
        let tensors = tensors.into_iter().map(tensor).collect();
        let checkpoint = core::Checkpoint::plain(store.url(), tensors).map_err(to_py)?;
        Ok(Self::new(store, budget, checkpoint))
    }

    #[getter]
    fn is_stock(&self) -> bool {
        matches!(self.now().source, Source::Stock(_))
    }

    #[getter]
    fn stock_metadata<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        match &self.now().source {
            Source::Strata | Source::Plain => None,
            Source::Stock(bytes) => Some(PyBytes::new(py, bytes)),
        }
    }

    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.reading.progress.seen()
    }

    #[getter]
    fn save_id(&self) -> String {
        self.now().manifest.save_id.clone()
    }

    #[getter]
    fn previous_save_id(&self) -> String {
        self.now().manifest.previous_save_id.clone()
    }

    #[getter]
    fn number(&self) -> u64 {
        self.now().manifest.number
    }

    #[getter]
    fn has_safetensors(&self) -> bool {
        self.now().manifest.has_safetensors()
    }

    #[getter]
    fn safetensors_index<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        core::servable::index(&self.now().manifest).map(|index| PyBytes::new(py, &index))
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.now().manifest.world_size
    }

    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.now().warnings.clone()
    }

    #[getter]
    fn created_at(&self) -> u64 {
        self.now().manifest.created_at
    }

    #[getter]
    fn run(&self) -> Option<RawRunInfo> {
        self.now().manifest.run.clone().map(raw_run_info)
    }

    fn digests<'py>(&self, py: Python<'py>, rows: Vec<usize>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let checkpoint = self.now();
        let of_blocks = |row: usize| {
            let blocks = Self::item(&checkpoint, row)?.digests.iter();
            Ok(PyBytes::new(py, &blocks.flat_map(|block| block.xxh3.to_le_bytes()).collect::<Vec<u8>>()))
        };
        rows.into_iter().map(of_blocks).collect()
    }

    #[getter]
    fn planner_data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.now().manifest.planner_data)
    }

    fn entries<'py>(&self, py: Python<'py>) -> PyResult<PyEntries<'py>> {
        entries(py, &self.now().manifest)
    }

    fn stock_pickle<'py>(&self, py: Python<'py>, parts: RawStockParts) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &core::stock_pickle(&self.now().manifest, &stock_parts(parts)))
    }

    fn items<'py>(&self, py: Python<'py>) -> Vec<RawStockEntry<Bound<'py, PyBytes>>> {
        let checkpoint = self.now();
        let manifest = &checkpoint.manifest;
        let mut entries = Vec::with_capacity(manifest.items.len());
        manifest.items.each(|item| {
            entries.push(stock_to_py(py, StockEntry::of(item.clone(), manifest.path_of(item.object))));
        });
        entries
    }

    #[getter]
    fn is_encoded(&self) -> bool {
        self.now().manifest.is_encoded
    }

    fn encodings<'py>(&self, py: Python<'py>) -> Vec<RawEncoding<'py>> {
        let checkpoint = self.now();
        let manifest = &checkpoint.manifest;
        let mut found = Vec::new();
        manifest.items.each(|item| {
            if let Some(encoding) = &item.encoding {
                let base = encoding.base.as_ref().map(|base| manifest.path_of(base.object));
                let fqn = PyBytes::new(py, &item.fqn);
                found.push((fqn, encoding.name(), item.item_bytes, item.payload_bytes, base));
            }
        });
        found
    }

    fn objects(&self) -> Vec<(String, u64)> {
        self.now().manifest.objects.iter().map(|object| (object.name.clone(), object.size)).collect()
    }

    fn set_stock_entries(&self, items: Vec<RawStockEntry<Vec<u8>>>) -> PyResult<bool> {
        let entry = |(fqn, offsets, index, object, offset, length)| {
            let index: i64 = index;
            StockEntry { fqn, offsets, index: u32::try_from(index).ok(), object, offset, length }
        };
        let entries = items.into_iter().map(entry).collect();
        self.change(|checkpoint| checkpoint.set_stock_entries(self.reading.store.url(), entries)).map_err(to_py)?;
        Ok(self.is_stock())
    }

    fn without_metadata(&self, py: Python<'_>, reason: String) -> PyResult<()> {
        let (store, checkpoint) = (self.reading.store.clone(), (*self.now()).clone());
        let kept = wait(py, async move { checkpoint.without_metadata(&*store, &reason).await })?;
        *self.checkpoint.lock().expect("never poisoned") = Arc::new(kept);
        Ok(())
    }

    fn locate(
        &self,
        py: Python<'_>,
        fqns: Vec<PyBackedBytes>,
        places: Vec<usize>,
        offsets: Vec<Option<Vec<u64>>>,
    ) -> PyResult<(Vec<i64>, Vec<usize>, Vec<Described>)> {
        let mut checkpoint = self.now();
        let mut keys = Vec::with_capacity(fqns.len());
        for (fqn, place) in fqns.iter().zip(places) {
            let place = offsets.get(place).ok_or_else(|| PyValueError::new_err(format!("no offsets {place}")))?;
            keys.push((&**fqn, place.as_deref()));
        }
        let rows = checkpoint.rows(&keys);
        if checkpoint.source != Source::Strata {
            let wanted: Vec<usize> = rows.iter().copied().flatten().collect();
            let (store, mut changed) = (self.reading.store.clone(), (*checkpoint).clone());
            let changed = wait(py, async move {
                stock::resolve(&*store, &mut changed, &wanted).await?;
                Ok::<_, core::Error>(changed)
            })?;
            checkpoint = Arc::new(changed);
            *self.checkpoint.lock().expect("never poisoned") = checkpoint.clone();
        }
        let mut table: Vec<Described> = Vec::new();
        let mut numbers: HashMap<_, usize> = HashMap::new();
        let mut number = |row: &Option<usize>| {
            let Some(row) = row else { return 0 };
            let Item { kind, dtype, shape, strides, .. } = &checkpoint.manifest.items[*row];
            *numbers.entry((kind.code(), &**dtype, &**shape, &**strides)).or_insert_with(|| {
                table.push((kind.code(), dtype.to_string(), shape.to_vec(), strides.to_vec()));
                table.len() - 1
            })
        };
        let described = rows.iter().map(&mut number).collect();
        Ok((rows.into_iter().map(|row| row.map_or(-1, |row| row as i64)).collect(), described, table))
    }

    #[pyo3(signature = (tensors, blobs, whole, *, verify))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<RawRead<'py>>,
        blobs: Vec<usize>,
        whole: Vec<(usize, usize, Bound<'py, PyAny>)>,
        verify: &str,
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, ReadStats)> {
        let mode = mode_of(verify)?;
        let checkpoint = self.now();
        for row in &blobs {
            Self::item(&checkpoint, *row)?;
        }
        let mut tensors = lend_destinations(&checkpoint, tensors)?;
        tensors.extend(lend_whole(&checkpoint, whole)?);
        let reading = self.reading.clone();
        let (blobs, stats) = wait(py, async move { core::read(&reading, checkpoint, tensors, &blobs, mode).await })?;
        Ok((blobs.iter().map(|bytes| PyBytes::new(py, bytes)).collect(), stats.into()))
    }

    fn blob_bytes(&self, py: Python<'_>, rows: Vec<usize>) -> PyResult<Vec<u64>> {
        let checkpoint = self.now();
        for row in &rows {
            Self::item(&checkpoint, *row)?;
        }
        let store = self.reading.store.clone();
        wait(py, async move { core::blob_bytes(&*store, &checkpoint, &rows).await })
    }

    fn verify(&self, py: Python<'_>) -> PyResult<(ReadStats, Vec<String>, Vec<String>)> {
        let (store, checkpoint, progress) = (self.reading.store.clone(), self.now(), self.reading.progress.clone());
        let (stats, found) = wait(py, async move {
            let mut checkpoint = (*checkpoint).clone();
            let rows: Vec<usize> = (0..checkpoint.manifest.items.len()).collect();
            if checkpoint.source != Source::Strata {
                stock::resolve(&*store, &mut checkpoint, &rows).await?;
            }
            Ok::<_, core::Error>(core::verify(&*store, &checkpoint, &progress).await)
        })?;
        Ok((stats.into(), found.problems, found.unchecked))
    }
}

/// When the caller wants bytes checked.
pub(crate) fn mode_of(verify: &str) -> PyResult<VerifyMode> {
    match verify {
        "inplace" => Ok(VerifyMode::InPlace),
        "before" => Ok(VerifyMode::Before),
        other => Err(PyValueError::new_err(format!("verify is \"inplace\" or \"before\", not {other:?}"))),
    }
}

/// The copy of a box of a tensor; of what is no tensor, all of it.
pub(crate) fn copy_of(item: &Item, first: &[u64], lengths: &[u64], strides: &[i64]) -> PyResult<StridedCopy> {
    let outside = || format!("the box {first:?} + {lengths:?} is not in {:?} of {:?}", item.shape, item.name());
    item.copy(first, lengths, strides).ok_or_else(|| PyValueError::new_err(outside()))
}

/// Destinations that keep their owners alive.
pub(crate) fn lend_destinations(checkpoint: &core::Checkpoint, raw: Vec<RawRead<'_>>) -> PyResult<Vec<TensorRead>> {
    let mut owners = Owners::default();
    let mut copies = Vec::with_capacity(raw.len());
    for (row, first, lengths, device, address, strides, owner) in raw {
        let ordinal = u32::try_from(device).ok();
        copies.push((row, ordinal, address, copy_of(Checkpoint::item(checkpoint, row)?, &first, &lengths, &strides)?));
        owners.keep(owner);
    }
    let lease = owners.lease();
    let lend = |(row, ordinal, address, copy)| {
        let destination = destination(ordinal, address, copy, &lease);
        Ok(TensorRead { row, destination: destination.map_err(core::Error::from).map_err(to_py)? })
    };
    copies.into_iter().map(lend).collect()
}

/// Destinations that take all of a row, contiguously: row, address, owner.
fn lend_whole(checkpoint: &core::Checkpoint, raw: Vec<(usize, usize, Bound<'_, PyAny>)>) -> PyResult<Vec<TensorRead>> {
    let mut owners = Owners::default();
    let mut places = Vec::with_capacity(raw.len());
    for (row, address, owner) in raw {
        let item = Checkpoint::item(checkpoint, row)?;
        if item.kind != Kind::Tensor {
            return Err(PyValueError::new_err(format!("{:?} is not stored as a tensor", item.name())));
        }
        let strides = contiguous(&item.shape);
        places.push((row, address, copy_of(item, &vec![0; item.shape.len()], &item.shape, &strides)?));
        owners.keep(owner);
    }
    let lease = owners.lease();
    let lend = |(row, address, copy)| {
        let destination = destination(None, address, copy, &lease);
        Ok(TensorRead { row, destination: destination.map_err(core::Error::from).map_err(to_py)? })
    };
    places.into_iter().map(lend).collect()
}

/// Row-major strides, in elements.
fn contiguous(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1) as i64;
    }
    strides
}
