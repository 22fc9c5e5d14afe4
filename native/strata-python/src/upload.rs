//! `_native.Upload`: an object in the making, for callers that hold its bytes in Python.

use std::sync::Arc;

use bytes::Bytes;
use pyo3::prelude::*;
use strata_checkpoint::Error;
use strata_io::{ObjectWriter, Part, digest};
use tokio::sync::Mutex;

use crate::runtime::wait;

/// One object; of one process and, call by call, of one thread.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Upload {
    part_bytes: u64,
    // Taken by the call that ends it.
    writer: Arc<Mutex<Option<Box<dyn ObjectWriter>>>>,
}

impl Upload {
    pub fn new(writer: Box<dyn ObjectWriter>, part_bytes: u64) -> Self {
        Self { part_bytes, writer: Arc::new(Mutex::new(Some(writer))) }
    }
}

#[pymethods]
impl Upload {
    #[getter]
    fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    fn write_part(&self, py: Python<'_>, index: u32, data: Vec<u8>) -> PyResult<()> {
        let (writer, offset) = (self.writer.clone(), u64::from(index) * self.part_bytes);
        wait(py, async move {
            let writer = writer.lock().await;
            let open = writer.as_ref().ok_or_else(|| Error::Plan("the upload has ended".to_owned()))?;
            let part = Part { index, offset, crc32: digest::crc32(&data), pieces: vec![Bytes::from(data)] };
            open.write_part(part).await.map_err(Error::from)
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.writer.clone();
        wait(py, async move {
            let open = writer.lock().await.take().ok_or_else(|| Error::Plan("the upload has ended".to_owned()))?;
            open.finish().await.map_err(Error::from)
        })
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let writer = self.writer.clone();
        wait(py, async move {
            if let Some(open) = writer.lock().await.take() {
                open.abort().await;
            }
            Ok::<(), Error>(())
        })
    }
}
