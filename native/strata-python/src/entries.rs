//! What state_dict_metadata says, as columns: an object for each chunk would be most of what a large index costs.

use std::collections::HashMap;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use strata_checkpoint::item::{Entry, Item, TensorEntry};
use strata_checkpoint::manifest::Manifest;
use strata_checkpoint::{Promises, StockParts};

/// dtype, requires_grad, pin_memory, memory_format, layout, whether strides are known.
type Template = (String, bool, bool, u32, String, bool);

/// Names, templates and the columns template, num_dims, size, strides, first_chunk, first_dim, offsets.
pub(crate) type RawPromises = (Vec<PyBackedBytes>, Vec<Template>, [PyBuffer<i64>; 7]);

/// As [`RawPromises`], with the lengths of the chunks behind their offsets. Little-endian bytes of 64-bit integers.
pub(crate) type PyEntries<'py> = (Vec<Bound<'py, PyBytes>>, Vec<Template>, [Bound<'py, PyBytes>; 8]);

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
                size: unsigned(size)?,
                strides: known.then(|| strides.to_vec()),
                requires_grad: *requires_grad,
                pin_memory: *pin_memory,
                memory_format: *memory_format,
                layout: layout.clone(),
            })
        });
        entries.push(Entry { fqn: name.to_vec(), tensor: tensor.transpose()? });
    }
    let offsets = unsigned(&offsets.to_vec(py)?)?;
    let first_dims = bounds(&first_dims.to_vec(py)?, offsets.len()).ok_or_else(unfit)?;
    let first_chunks = bounds(&first_chunks.to_vec(py)?, first_dims.len() - 1).ok_or_else(unfit)?;
    if first_chunks.len() != entries.len() + 1 {
        return Err(unfit());
    }
    Ok(Promises { entries, first_chunks, first_dims, offsets })
}

fn unsigned(values: &[i64]) -> PyResult<Vec<u64>> {
    let negative = |value| PyOverflowError::new_err(format!("{value} is below 0"));
    values.iter().map(|value| u64::try_from(*value).map_err(|_| negative(value))).collect()
}

/// Ascending from 0 to `end`.
fn bounds(values: &[i64], end: usize) -> Option<Vec<usize>> {
    let found: Option<Vec<usize>> = values.iter().map(|value| usize::try_from(*value).ok()).collect();
    found.filter(|found| found.first() == Some(&0) && found.is_sorted() && found.last() == Some(&end))
}

/// What `manifest` says of every name, with the chunks that it holds, each tensor's in the order of their hints.
pub(crate) fn entries<'py>(py: Python<'py>, manifest: &Manifest) -> PyEntries<'py> {
    let mut table: Vec<Template> = Vec::new();
    let mut numbers: HashMap<Template, i64> = HashMap::new();
    let mut columns: [Vec<u8>; 8] = Default::default();
    let mut names = Vec::with_capacity(manifest.entries.len());
    let (mut num_chunks, mut num_dims) = (0, 0);
    let dims: usize = manifest.items.iter().map(|item| item.shape.len()).sum();
    columns[5].reserve_exact((manifest.items.len() + 1) * size_of::<i64>());
    columns[6].reserve_exact(dims * size_of::<i64>());
    columns[7].reserve_exact(dims * size_of::<i64>());
    push(&mut columns[4], [0]);
    push(&mut columns[5], [0]);
    for entry in &manifest.entries {
        names.push(PyBytes::new(py, &entry.fqn));
        let number = entry.tensor.as_ref().map_or(-1, |tensor| {
            let TensorEntry { dtype, strides, requires_grad, pin_memory, memory_format, layout, .. } = tensor.clone();
            let template = (dtype, requires_grad, pin_memory, memory_format, layout, strides.is_some());
            *numbers.entry(template).or_insert_with_key(|template| {
                table.push(template.clone());
                table.len() as i64 - 1
            })
        });
        let size = entry.tensor.as_ref().map_or(&[][..], |tensor| &tensor.size);
        push(&mut columns[0], [number]);
        push(&mut columns[1], [size.len() as i64]);
        push(&mut columns[2], size.iter().map(|extent| *extent as i64));
        match entry.tensor.as_ref().and_then(|tensor| tensor.strides.as_ref()) {
            Some(strides) => push(&mut columns[3], strides.iter().copied()),
            None => push(&mut columns[3], size.iter().map(|_| 0)),
        }
        if entry.tensor.is_some() {
            let mut chunks: Vec<&Item> = manifest.items[manifest.rows_of(&entry.fqn)].iter().collect();
            chunks.sort_by_key(|item| item.index);
            for item in chunks {
                let Some(offsets) = &item.offsets else { continue };
                num_chunks += 1;
                num_dims += offsets.len() as i64;
                push(&mut columns[5], [num_dims]);
                push(&mut columns[6], offsets.iter().map(|offset| *offset as i64));
                push(&mut columns[7], item.shape.iter().map(|extent| *extent as i64));
            }
        }
        push(&mut columns[4], [num_chunks]);
    }
    (names, table, columns.map(|column| PyBytes::new(py, &column)))
}

fn push(column: &mut Vec<u8>, values: impl IntoIterator<Item = i64>) {
    values.into_iter().for_each(|value| column.extend(value.to_le_bytes()));
}
