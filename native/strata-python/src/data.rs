//! `_native.DataIndex` and `_native.Batches`: samples of data shards.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use strata_data::batches::{Batches as Reading, Plan, RawBatch};
use strata_data::dataset::{Format, Index, Place, Source};
use strata_data::formats::tokens::Windows;
use strata_data::formats::{Dtype, Encoding, Field};
use strata_data::order::{Lanes, Order, Shuffle};
use strata_data::partition::{Ending, Stream};
use strata_io::schedule::ByteBudget;

use crate::buffers::SharedBytes;
use crate::errors::forked;
use crate::runtime::{runtime, wait};
use crate::store::Store;

/// Shards and where their samples begin: of no process.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct DataIndex {
    index: Arc<Index>,
}

/// (name, bytes, number of samples) of a shard.
type RawShard = (String, u64, u64);

#[pymethods]
impl DataIndex {
    #[staticmethod]
    fn scan(
        py: Python<'_>,
        stores: Vec<PyRef<'_, Store>>,
        places: Vec<(u32, String)>,
        format: RawFormat,
    ) -> PyResult<Self> {
        let (stores, format) = (opened(&stores)?, format_of(format)?);
        let place = |(number, pattern)| Place { number, store: stores[number as usize].clone(), pattern };
        let places = places.into_iter().map(place).collect();
        let index = wait(py, async move { Index::scan(places, format).await })?;
        Ok(Self { index: Arc::new(index) })
    }

    #[getter]
    fn num_samples(&self) -> u64 {
        self.index.num_samples()
    }

    #[getter]
    fn shards(&self) -> Vec<RawShard> {
        let shard = |shard: &strata_data::dataset::Shard| (shard.name.clone(), shard.size_bytes, shard.num_samples());
        self.index.shards().iter().map(shard).collect()
    }

    fn store_of(&self, shard: usize) -> PyResult<u32> {
        let found = self.index.shards().get(shard).map(|shard| shard.store);
        found.ok_or_else(|| PyValueError::new_err(format!("{shard} of {} shards", self.index.shards().len())))
    }

    fn order(&self, shuffle: RawShuffle, num_lanes: u64, turn: u64, seed: u64, epoch: u64) -> PyResult<DataOrder> {
        let counts: Vec<u64> = self.index.shards().iter().map(strata_data::dataset::Shard::num_samples).collect();
        let order = Order::new(&counts, shuffle_of(shuffle)?, Lanes { num_lanes, turn }, seed, epoch);
        Ok(DataOrder { order: Arc::new(order) })
    }

    #[pyo3(signature = (stores, order, following, *, world_size, rank, num_workers, worker, batch_size, ending, start,
                        first, max_ahead_bytes))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn batches(
        &self,
        stores: Vec<PyRef<'_, Store>>,
        order: &DataOrder,
        following: &DataOrder,
        world_size: u64,
        rank: u64,
        num_workers: u64,
        worker: u64,
        batch_size: u64,
        ending: &str,
        start: u64,
        first: u64,
        max_ahead_bytes: u64,
    ) -> PyResult<Batches> {
        let stream = Stream { world_size, rank, num_workers, worker, batch_size };
        let (order, next) = (order.order.clone(), following.order.clone());
        let plan = Plan { order, next, stream, ending: ending_of(ending)?, start, first };
        let source = Source { stores: opened(&stores)?, index: self.index.clone() };
        let runtime = runtime()?;
        let _guard = runtime.enter();
        let reading = Reading::new(source, plan, ByteBudget::new(max_ahead_bytes), max_ahead_bytes / WINDOWS);
        Ok(Batches { pid: std::process::id(), reading: Mutex::new(State::Open(reading)) })
    }
}

fn opened(stores: &[PyRef<'_, Store>]) -> PyResult<Vec<Arc<dyn strata_io::Store>>> {
    stores.iter().map(|store| Ok(store.open()?.0)).collect()
}

/// Windows that are read ahead at a time.
const WINDOWS: u64 = 4;

/// kind, block, buffer.
type RawShuffle = (String, u64, u64);

/// The order of an epoch.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct DataOrder {
    order: Arc<Order>,
}

/// Batches that are read ahead.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Batches {
    pid: u32,
    reading: Mutex<State>,
}

enum State {
    Open(Reading),
    /// Ctrl-C came while a batch was waited for.
    Gone,
}

/// Where all ranks stand behind the batch, its number, samples that others have too; keys; shard and first byte of each
/// sample; by name the fields.
type RawSamples<'py> = (u64, u64, u64, Vec<String>, Vec<(u32, u64)>, Bound<'py, PyDict>);

/// kind, dtype, header bytes, window, stride.
type RawFormat = (String, String, u64, u64, u64);

#[pymethods]
impl Batches {
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<RawSamples<'py>>> {
        if self.pid != std::process::id() {
            return Err(forked("batches"));
        }
        let taken = std::mem::replace(&mut *self.reading.lock().expect("never poisoned"), State::Gone);
        let mut reading = match taken {
            State::Open(reading) => reading,
            State::Gone => return Err(PyValueError::new_err("the reading of these batches was interrupted")),
        };
        let (back, came) = std::sync::mpsc::sync_channel(1);
        let batch = wait(py, async move {
            let batch = reading.next().await;
            // The channel has room, and its other end waits.
            let _ = back.send(reading);
            batch
        });
        if let Ok(reading) = came.try_recv() {
            *self.reading.lock().expect("never poisoned") = State::Open(reading);
        }
        batch?.map(|batch| raw(py, batch)).transpose()
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // Its tasks are those of a runtime that a forked child lacks.
            std::mem::forget(std::mem::replace(self.reading.get_mut().expect("never poisoned"), State::Gone));
        }
    }
}

fn raw<'py>(py: Python<'py>, batch: RawBatch) -> PyResult<RawSamples<'py>> {
    let num_samples = batch.samples.len();
    let mut keys = Vec::with_capacity(num_samples);
    let places = batch.samples.iter().map(|sample| (sample.extent.shard, sample.extent.start)).collect();
    // In the order in which they are first seen; None for the samples that lack one.
    let mut columns: Vec<(String, Vec<Option<Value>>)> = Vec::new();
    for (at, sample) in batch.samples.into_iter().enumerate() {
        for Field { name, data, encoding } in sample.fields.fields {
            let value = Value { bytes: sample.bytes.slice(data.start as usize..data.end as usize), encoding };
            match columns.iter_mut().find(|(known, _)| *known == name) {
                Some((_, values)) => values[at] = Some(value),
                None => {
                    let mut values = vec![None; num_samples];
                    values[at] = Some(value);
                    columns.push((name, values));
                }
            }
        }
        keys.push(sample.fields.key);
    }
    let fields = PyDict::new(py);
    for (name, values) in columns {
        fields.set_item(name, column(py, values)?)?;
    }
    Ok((batch.batch.after, batch.nth, batch.batch.num_repeated, keys, places, fields))
}

/// Name of the encoding, dtype and shape of an array, content.
type RawValue = (String, &'static str, Vec<u64>, SharedBytes);

#[derive(Clone)]
struct Value {
    bytes: Bytes,
    encoding: Encoding,
}

/// What the values of a field are, for Python: `("array", dtype, shape, bytearray)` where they are arrays of one kind, else
/// `("each", [(name of the encoding, dtype, shape, bytes) or None])`; the name is empty where the field's says it.
fn column<'py>(py: Python<'py>, values: Vec<Option<Value>>) -> PyResult<Bound<'py, PyAny>> {
    if let Some(Some(Value { encoding: Encoding::Array { dtype, shape }, .. })) = values.first() {
        let is_like = |value: &Option<Value>| matches!(value, Some(Value { encoding: Encoding::Array { dtype: d, shape: s }, .. }) if d == dtype && s == shape);
        if values.iter().all(is_like) {
            let found: Vec<&[u8]> = values.iter().flatten().map(|value| &*value.bytes).collect();
            let together = PyByteArray::new_with(py, found.iter().map(|bytes| bytes.len()).sum(), |memory| {
                let mut rest = memory;
                for bytes in &found {
                    let (own, others) = rest.split_at_mut(bytes.len());
                    own.copy_from_slice(bytes);
                    rest = others;
                }
                Ok(())
            })?;
            return Ok(("array", dtype.name(), shape.clone(), together).into_pyobject(py)?.into_any());
        }
    }
    let each = values.into_iter().map(|value| {
        value.map(|Value { bytes, encoding }| {
            let (name, dtype, shape) = match encoding {
                Encoding::ByName => (String::new(), "", Vec::new()),
                Encoding::Array { dtype, shape } => ("array".to_owned(), dtype.name(), shape),
                Encoding::Named(name) => (name.to_string(), "", Vec::new()),
            };
            (name, dtype, shape, SharedBytes::new(bytes))
        })
    });
    let each: Vec<Option<RawValue>> = each.collect();
    Ok(("each", each).into_pyobject(py)?.into_any())
}

fn format_of((kind, dtype, header_bytes, window, stride): RawFormat) -> PyResult<Format> {
    let windows = Windows { window, stride, with_documents: false };
    let no_dtype = || PyValueError::new_err(format!("no dtype {dtype:?}"));
    match &*kind {
        "tar" => Ok(Format::Tar),
        "tokens" => Ok(Format::Tokens { dtype: Dtype::of(&dtype).ok_or_else(no_dtype)?, header_bytes, windows }),
        "megatron" => Ok(Format::Megatron { windows }),
        "mds" => Ok(Format::Mds),
        "jsonl" => Ok(Format::Lines),
        "files" => Ok(Format::Files),
        _ => Err(PyValueError::new_err(format!("no format {kind:?}"))),
    }
}

fn shuffle_of((kind, block, buffer): RawShuffle) -> PyResult<Shuffle> {
    match &*kind {
        "none" => Ok(Shuffle::None),
        "shards" => Ok(Shuffle::Shards),
        "blocks" => Ok(Shuffle::Blocks { block, buffer }),
        "full" => Ok(Shuffle::Full),
        _ => Err(PyValueError::new_err(format!("no shuffle {kind:?}"))),
    }
}

fn ending_of(name: &str) -> PyResult<Ending> {
    match name {
        "short" => Ok(Ending::Short),
        "drop" => Ok(Ending::Drop),
        "pad" => Ok(Ending::Pad),
        "continue" => Ok(Ending::Continue),
        _ => Err(PyValueError::new_err(format!("no ending {name:?}"))),
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<DataIndex>()?;
    module.add_class::<DataOrder>()?;
    module.add_class::<Batches>()?;
    module.add_class::<SharedBytes>()
}
