//! `torch_strata._native`: converts arguments, lets go of the GIL, waits, converts the result.

mod buffers;
mod checkpoint;
mod data;
mod entries;
mod errors;
mod run;
mod runtime;
mod save;
mod staging;
mod store;
mod together;
mod upload;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The Rust core of torch_strata; the stub `_native.pyi` is its documentation.
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("SCHEMES", PyTuple::new(module.py(), strata_io::SCHEMES)?)?;
    module.add("TENSOR", strata_checkpoint::item::Kind::Tensor.code())?;
    module.add("BYTES", strata_checkpoint::item::Kind::Bytes.code())?;
    module.add("TORCH_SAVE", strata_checkpoint::item::Kind::TorchSave.code())?;
    module.add_class::<store::Store>()?;
    module.add_class::<upload::Upload>()?;
    save::register(module)?;
    run::register(module)?;
    staging::register(module)?;
    checkpoint::register(module)?;
    data::register(module)?;
    together::register(module)
}
