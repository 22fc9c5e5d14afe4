//! `_native.Store`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use strata_checkpoint::Error;
use strata_io::schedule::ByteBudget;
use strata_io::{Counters, IoConfig, PutMode, open};

use crate::errors::to_py;
use crate::runtime::{runtime, wait};
use crate::upload::Upload;

/// A place named by a URL; opened anew in each process that uses it.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Store {
    url: String,
    options: BTreeMap<String, String>,
    max_in_flight_bytes: u64,
    config: IoConfig,
    opened: Mutex<Option<Opened>>,
}

#[derive(Clone)]
struct Opened {
    pid: u32,
    store: Arc<dyn strata_io::Store>,
    budget: ByteBudget,
}

impl Store {
    /// The store and its budget, of this process.
    pub fn open(&self) -> PyResult<(Arc<dyn strata_io::Store>, ByteBudget)> {
        let pid = std::process::id();
        let mut opened = self.opened.lock().expect("never poisoned");
        if opened.as_ref().is_none_or(|opened| opened.pid != pid) {
            let runtime = runtime()?;
            let _guard = runtime.enter();
            let budget = ByteBudget::new(self.max_in_flight_bytes);
            let config = IoConfig { budget: budget.clone(), ..self.config.clone() };
            let store = open(&self.url, &self.options, &config).map_err(|error| to_py(error.into()))?;
            // Forgotten, not dropped: connection pools hold on to a runtime that a forked child lacks.
            std::mem::forget(opened.replace(Opened { pid, store, budget }));
        }
        let Opened { store, budget, .. } = opened.as_ref().expect("just opened").clone();
        Ok((store, budget))
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url, options, *, max_in_flight_bytes, max_concurrency, part_bytes, fsync, direct_io,
                        max_tries, deadline_s))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only in Python")]
    fn new(
        url: String,
        options: BTreeMap<String, String>,
        max_in_flight_bytes: u64,
        max_concurrency: usize,
        part_bytes: u64,
        fsync: bool,
        direct_io: bool,
        max_tries: u32,
        deadline_s: f64,
    ) -> Self {
        let deadline = Duration::from_secs_f64(deadline_s.max(0.0));
        let config = IoConfig {
            budget: ByteBudget::new(max_in_flight_bytes),
            max_concurrency,
            part_bytes,
            fsync,
            direct_io,
            max_tries,
            deadline,
        };
        Self { url, options, max_in_flight_bytes, config, opened: Mutex::new(None) }
    }

    #[getter]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn read<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyBytes>> {
        let (store, _) = self.open()?;
        let bytes = wait(py, async move { store.read(&name, None).await.map_err(Error::from) })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn read_range<'py>(&self, py: Python<'py>, name: String, start: u64, end: u64) -> PyResult<Bound<'py, PyBytes>> {
        let (store, _) = self.open()?;
        let bytes = wait(py, async move { store.read(&name, Some(start..end)).await.map_err(Error::from) })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn size(&self, py: Python<'_>, name: String) -> PyResult<u64> {
        let (store, _) = self.open()?;
        wait(py, async move { store.size(&name).await.map_err(Error::from) })
    }

    fn put(&self, py: Python<'_>, name: String, data: Vec<u8>) -> PyResult<()> {
        let (store, _) = self.open()?;
        wait(py, async move { store.put(&name, Bytes::from(data), PutMode::Overwrite).await.map_err(Error::from) })
    }

    fn list(&self, py: Python<'_>, prefix: String) -> PyResult<Vec<(String, u64)>> {
        let (store, _) = self.open()?;
        let listed = wait(py, async move { store.list(&prefix).await.map_err(Error::from) })?;
        Ok(listed.into_iter().map(|object| (object.name, object.size)).collect())
    }

    fn counters(&self) -> PyResult<BTreeMap<&'static str, u64>> {
        let Counters { requests, retries, throttled, restarted, hedged } = self.open()?.0.counters();
        let sent = [("requests", requests), ("retries", retries)];
        let met = [("throttled", throttled), ("restarted", restarted), ("hedged", hedged)];
        Ok(sent.into_iter().chain(met).collect())
    }

    fn list_folders(&self, py: Python<'_>, prefix: String) -> PyResult<Vec<String>> {
        let (store, _) = self.open()?;
        wait(py, async move { store.list_folders(&prefix).await.map_err(Error::from) })
    }

    fn create(&self, py: Python<'_>, name: String, size: u64) -> PyResult<Upload> {
        let (store, _) = self.open()?;
        let part_bytes = store.part_bytes(size);
        let writer = wait(py, async move { store.create(&name, size).await.map_err(Error::from) })?;
        Ok(Upload::new(writer, part_bytes))
    }

    fn tidy(&self, py: Python<'_>) -> PyResult<()> {
        let (store, _) = self.open()?;
        wait(py, async move {
            store.tidy().await;
            Ok::<_, Error>(())
        })
    }

    fn delete(&self, py: Python<'_>, name: String) -> PyResult<()> {
        let (store, _) = self.open()?;
        wait(py, async move { store.delete(&name).await.map_err(Error::from) })
    }
}
