//! What state_dict_metadata says, as columns: an object for each chunk would be most of what a large index costs.

use std::collections::HashMap;

use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use strata_checkpoint::item::{Entry, TensorEntry};
use strata_checkpoint::manifest::{Chunks, Ints, Manifest};
use strata_checkpoint::{Promises, StockParts};

/// dtype, requires_grad, pin_memory, memory_format, layout, whether strides are known.
type Template = (String, bool, bool, u32, String, bool);

/// Names, templates and the columns template, num_dims, size, strides, first_chunk, first_dim, offsets.
pub(crate) type RawPromises = (Vec<PyBackedBytes>, Vec<Template>, [Numbers; 7]);

/// Of 32 bits where they suffice.
#[derive(FromPyObject)]
pub(crate) enum Numbers {
    Narrow(PyBuffer<i32>),
    Wide(PyBuffer<i64>),
    /// Memory without a byte lies anywhere: an empty `array` is not aligned.
    Empty(#[pyo3(from_py_with = no_numbers)] ()),
}

fn no_numbers(object: &Bound<'_, PyAny>) -> PyResult<()> {
    match PyUntypedBuffer::get(object)?.item_count() {
        0 => Ok(()),
        _ => Err(PyValueError::new_err("not empty")),
    }
}

impl Numbers {
    fn to_vec(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        self.to(py, Ok)
    }

    fn to<T>(&self, py: Python<'_>, as_it_is_kept: impl Fn(i64) -> PyResult<T>) -> PyResult<Vec<T>> {
        match self {
            Self::Narrow(values) => values.to_vec(py)?.into_iter().map(|value| as_it_is_kept(value.into())).collect(),
            Self::Wide(values) => values.to_vec(py)?.into_iter().map(as_it_is_kept).collect(),
            Self::Empty(()) => Ok(Vec::new()),
        }
    }
}

/// As [`RawPromises`], with the lengths of the chunks behind their offsets.
pub(crate) type PyEntries<'py> = (Vec<Bound<'py, PyBytes>>, Vec<Template>, [Column<'py>; 8]);

/// Type code as of Python's `array`, "i" for 32 and "q" for 64 bits, and the little-endian bytes.
pub(crate) type Column<'py> = (&'static str, Bound<'py, PyBytes>);

/// planner_data, storage_meta, first_memo, version, has_strides.
pub(crate) type RawStockParts = (Vec<u8>, Vec<u8>, u32, String, bool);

pub(crate) fn stock_parts((planner_data, storage_meta, first_memo, version, has_strides): RawStockParts) -> StockParts {
    StockParts { planner_data, storage_meta, first_memo, version, has_strides }
}

/// # Errors
/// ValueError if the columns do not fit together.
pub(crate) fn promises(py: Python<'_>, (names, table, columns): RawPromises) -> PyResult<Promises> {
    let [templates, num_dims, sizes, strides, first_chunks, first_dims, offsets] = columns;
    let (templates, num_dims) = (templates.to_vec(py)?, num_dims.to_vec(py)?);
    let (sizes, strides) = (sizes.to_vec(py)?, strides.to_vec(py)?);
    let unfit = || PyValueError::new_err("columns of different lengths");
    if [templates.len(), num_dims.len()] != [names.len(); 2] || strides.len() != sizes.len() {
        return Err(unfit());
    }
    let mut at = 0;
    let mut entries = Vec::with_capacity(names.len());
    for (name, (template, dims)) in names.iter().zip(templates.into_iter().zip(num_dims)) {
        let end = at + dims as usize;
        let (size, strides) = sizes.get(at..end).zip(strides.get(at..end)).ok_or_else(unfit)?;
        at = end;
        let template = usize::try_from(template).ok().map(|number| table.get(number).ok_or_else(unfit)).transpose()?;
        let tensor = template.map(|(dtype, requires_grad, pin_memory, memory_format, layout, known)| {
            Ok::<_, PyErr>(TensorEntry {
                dtype: dtype.clone(),
                size: size.iter().copied().map(unsigned).collect::<PyResult<_>>()?,
                strides: known.then(|| strides.to_vec()),
                requires_grad: *requires_grad,
                pin_memory: *pin_memory,
                memory_format: *memory_format,
                layout: layout.clone(),
            })
        });
        entries.push(Entry { fqn: name.to_vec(), tensor: tensor.transpose()? });
    }
    let offsets = offsets.to(py, unsigned)?;
    let place = |value| usize::try_from(value).map_err(|_| unfit());
    let (first_dims, first_chunks) = (first_dims.to(py, place)?, first_chunks.to(py, place)?);
    let fit = first_chunks.len() == entries.len() + 1
        && is_divided(&first_dims, offsets.len())
        && is_divided(&first_chunks, first_dims.len() - 1);
    if !fit {
        return Err(unfit());
    }
    Ok(Promises { entries, first_chunks, first_dims, offsets })
}

fn unsigned(value: i64) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| PyOverflowError::new_err(format!("{value} is below 0")))
}

/// Whether bounds ascend from 0 to `end`.
fn is_divided(bounds: &[usize], end: usize) -> bool {
    bounds.first() == Some(&0) && bounds.is_sorted() && bounds.last() == Some(&end)
}

/// What `manifest` says of every name, with the chunks that it holds, each tensor's in the order of their hints.
pub(crate) fn entries<'py>(py: Python<'py>, manifest: &Manifest) -> PyResult<PyEntries<'py>> {
    let Chunks { first, begin, offsets, lengths } = py.detach(|| manifest.chunks());
    let mut table: Vec<Template> = Vec::new();
    let mut numbers: HashMap<Template, i64> = HashMap::new();
    let mut names = Vec::with_capacity(manifest.entries.len());
    let [mut templates, mut num_dims, mut sizes, mut strides]: [Vec<i64>; 4] = Default::default();
    for entry in &manifest.entries {
        names.push(PyBytes::new(py, &entry.fqn));
        let Some(tensor) = &entry.tensor else {
            templates.push(-1);
            num_dims.push(0);
            continue;
        };
        let TensorEntry { dtype, requires_grad, pin_memory, memory_format, layout, .. } = tensor.clone();
        let template = (dtype, requires_grad, pin_memory, memory_format, layout, tensor.strides.is_some());
        templates.push(*numbers.entry(template).or_insert_with_key(|template| {
            table.push(template.clone());
            table.len() as i64 - 1
        }));
        num_dims.push(tensor.size.len() as i64);
        sizes.extend(tensor.size.iter().map(|extent| *extent as i64));
        match &tensor.strides {
            Some(known) => strides.extend(known),
            None => strides.resize(sizes.len(), 0),
        }
    }
    let first = first.into_iter().map(|chunk| chunk as i64).collect();
    let columns = [
        column(py, Ints::Wide(templates))?,
        column(py, Ints::Wide(num_dims))?,
        column(py, Ints::Wide(sizes))?,
        column(py, Ints::Wide(strides))?,
        column(py, Ints::Wide(first))?,
        column(py, begin)?,
        column(py, offsets)?,
        column(py, lengths)?,
    ];
    Ok((names, table, columns))
}

/// Written where Python keeps them: there may be tens of megabytes.
fn column(py: Python<'_>, values: Ints) -> PyResult<Column<'_>> {
    fn put<const N: usize>(out: &mut [u8], values: impl Iterator<Item = [u8; N]>) -> PyResult<()> {
        out.chunks_exact_mut(N).zip(values).for_each(|(place, bytes)| place.copy_from_slice(&bytes));
        Ok(())
    }
    match values {
        Ints::Narrow(values) => {
            let write = |out: &mut [u8]| put(out, values.iter().map(|value| value.to_le_bytes()));
            Ok(("i", PyBytes::new_with(py, values.len() * size_of::<i32>(), write)?))
        }
        Ints::Wide(values) => {
            let write = |out: &mut [u8]| put(out, values.iter().map(|value| value.to_le_bytes()));
            Ok(("q", PyBytes::new_with(py, values.len() * size_of::<i64>(), write)?))
        }
    }
}
