//! The one tokio runtime of a process, and the one place that blocks on it.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::Runtime;

use crate::errors::{Raised, to_py};

/// How long Ctrl-C may go unnoticed.
const SIGNAL_EVERY: Duration = Duration::from_millis(50);

/// After Ctrl-C: time for a cancelled operation to remove what it has begun. What is still running then keeps its
/// leases and ends by itself.
const CLEAN_UP_WITHIN: Duration = Duration::from_secs(2);

/// A runtime belongs to the process that built it: its threads do not exist in a forked child.
struct Process {
    pid: u32,
    runtime: Arc<Runtime>,
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// The runtime of this process, built at the first use.
pub(crate) fn runtime() -> PyResult<Arc<Runtime>> {
    let pid = std::process::id();
    let mut process = PROCESS.lock().expect("never poisoned");
    if let Some(process) = process.as_ref().filter(|process| process.pid == pid) {
        return Ok(process.runtime.clone());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().thread_name("strata").enable_all().build()?;
    let runtime = Arc::new(runtime);
    // Forgotten, not dropped: dropping joins worker threads, and a forked child has none.
    std::mem::forget(process.replace(Process { pid, runtime: runtime.clone() }));
    Ok(runtime)
}

/// Runs `future` to its end without the GIL. Ctrl-C drops it and raises KeyboardInterrupt.
///
/// # Errors
/// What the future returns; what a signal handler raises.
pub(crate) fn wait<T, E, F>(py: Python<'_>, future: F) -> PyResult<T>
where
    T: Send + 'static,
    E: Raised + Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let runtime = runtime()?;
    let (sender, receiver) = sync_channel(1);
    // Only this thread receives; the lock makes the receiver fit through `detach`.
    let receiver = Mutex::new(receiver);
    let task = runtime.spawn(async move {
        // The receiver is gone only if Ctrl-C came first.
        let _ = sender.send(future.await);
    });
    let outcome = loop {
        match py.detach(|| receiver.lock().expect("never poisoned").recv_timeout(SIGNAL_EVERY)) {
            Ok(result) => break result.map_err(Raised::raised),
            Err(RecvTimeoutError::Disconnected) => {
                let detail = "the operation panicked; this is a bug of torch_strata".to_owned();
                break Err(to_py(strata_checkpoint::Error::Plan(detail)));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Err(signal) = py.check_signals() {
                    task.abort();
                    py.detach(|| runtime.block_on(async { tokio::time::timeout(CLEAN_UP_WITHIN, task).await })).ok();
                    break Err(signal);
                }
            }
        }
    };
    crate::buffers::bury(py);
    outcome
}
