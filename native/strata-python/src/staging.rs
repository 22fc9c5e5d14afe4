//! Copies of a training state to memory that is kept for it.

use std::os::fd::IntoRawFd;
use std::sync::Mutex;
use std::thread::available_parallelism;

use pyo3::prelude::*;
use strata_device::{Copies, PageLocked, memory_file as new_file, populate as make_present};
use tokio::sync::watch;

use crate::buffers::{Owners, bury, device, lend_buffer, lend_device, lend_memory};
use crate::errors::to_py;
use crate::runtime::{runtime, wait};

/// Beyond this many threads memory, not the number of cores, is what limits a copy.
const MOST_THREADS: usize = 16;

/// Adds this file's functions and classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Copy>()?;
    module.add_class::<PageLock>()?;
    module.add_function(wrap_pyfunction!(memory_file, module)?)?;
    module.add_function(wrap_pyfunction!(populate, module)?)?;
    module.add_function(wrap_pyfunction!(release_ended, module)?)?;
    module.add_function(wrap_pyfunction!(start_copy, module)?)
}

#[pyfunction]
fn memory_file(py: Python<'_>, bytes: u64) -> PyResult<Option<i32>> {
    Ok(py.detach(|| new_file(bytes))?.map(IntoRawFd::into_raw_fd))
}

#[pyfunction]
fn populate(py: Python<'_>, address: usize, bytes: usize, owner: Bound<'_, PyAny>) {
    let memory = lend_buffer(address, bytes, &Owners::of(owner));
    py.detach(|| make_present(memory, num_threads()));
    bury(py);
}

/// Threads for work that memory limits.
fn num_threads() -> usize {
    available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

#[pyfunction]
fn release_ended(py: Python<'_>) {
    bury(py);
}

/// Pages that are locked for devices.
#[pyclass(module = "torch_strata._native")]
pub(crate) struct PageLock {
    lock: Mutex<Option<PageLocked>>,
    #[pyo3(get)]
    is_locked: bool,
}

#[pymethods]
impl PageLock {
    #[new]
    #[pyo3(signature = (ordinal, address, bytes, owner))]
    fn new(py: Python<'_>, ordinal: u32, address: usize, bytes: usize, owner: Bound<'_, PyAny>) -> PyResult<Self> {
        let device = device(ordinal).map_err(strata_checkpoint::Error::from).map_err(to_py)?;
        let memory = lend_buffer(address, bytes, &Owners::of(owner));
        let lock = py.detach(|| PageLocked::new(&device, memory));
        Ok(Self { is_locked: lock.is_locked(), lock: Mutex::new(Some(lock)) })
    }

    fn release(&self, py: Python<'_>) {
        let lock = self.lock.lock().expect("never poisoned").take();
        py.detach(|| drop(lock));
        bury(py);
    }
}

/// A copy that runs.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Copy {
    outcome: watch::Receiver<Option<strata_device::Result<()>>>,
}

#[pymethods]
impl Copy {
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let mut outcome = self.outcome.clone();
        wait(py, async move {
            let bug = |_| strata_checkpoint::Error::Plan("the copy panicked; this is a bug of torch_strata".to_owned());
            let done = outcome.wait_for(Option::is_some).await.map_err(bug)?;
            done.clone().expect("waited for").map_err(strata_checkpoint::Error::from)
        })
    }
}

/// device, address of the source, bytes, address of the target.
type RawCopy = (i64, usize, usize, usize);

#[pyfunction]
fn start_copy(pieces: Vec<RawCopy>, owner: Bound<'_, PyAny>) -> PyResult<Copy> {
    let lease = Owners::of(owner);
    let mut copies = Copies::default();
    for (device, source, bytes, target) in pieces {
        let target = lend_buffer(target, bytes, &lease);
        match u32::try_from(device) {
            Err(_) => copies.from_host(lend_memory(source, bytes, &lease), target),
            Ok(ordinal) => {
                let source = lend_device(ordinal, source, bytes, &lease);
                copies.from_device(source.map_err(strata_checkpoint::Error::from).map_err(to_py)?, target);
            }
        }
    }
    drop(lease);
    let (sender, outcome) = watch::channel(None);
    // Whoever waited is gone if nobody receives; the lease ends with the copy all the same.
    runtime()?.spawn_blocking(move || sender.send(Some(copies.run(num_threads()))));
    Ok(Copy { outcome })
}
