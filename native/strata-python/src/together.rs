//! `_native.Together` and `_native.Round`.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use strata_checkpoint as core;
use strata_checkpoint::geometry::StridedCopy;
use tokio::task::JoinHandle;

use crate::buffers::{Owners, lend_buffer};
use crate::checkpoint::{Checkpoint, RawRead, ReadStats, copy_of, lend_destinations, mode_of};
use crate::errors::to_py;
use crate::runtime::{runtime, wait};

/// Adds this file's classes.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Together>()?;
    module.add_class::<Round>()
}

/// row, first element, lengths.
type RawRegion = (usize, Vec<u64>, Vec<u64>);

/// owner, receivers, start, end.
type RawPiece = (u32, Vec<u32>, usize, usize);

/// What the ranks of a group read together.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Together {
    core: Arc<core::Together>,
    checkpoint: Arc<core::Checkpoint>,
}

#[pymethods]
impl Together {
    #[new]
    #[pyo3(signature = (checkpoint, needs, *, rank, round_bytes, verify))]
    fn new(checkpoint: &Checkpoint, needs: Vec<Vec<u8>>, rank: u32, round_bytes: u64, verify: &str) -> PyResult<Self> {
        let (reading, opened, mode) = (checkpoint.reading.clone(), checkpoint.now(), mode_of(verify)?);
        let core = core::Together::new(reading, opened.clone(), needs, rank, round_bytes, mode);
        Ok(Self { core: Arc::new(core.map_err(to_py)?), checkpoint: opened })
    }

    #[staticmethod]
    fn needs<'py>(py: Python<'py>, checkpoint: &Checkpoint, regions: Vec<RawRegion>) -> PyResult<Bound<'py, PyBytes>> {
        let checkpoint = checkpoint.now();
        let wanted = copies(&checkpoint, regions)?;
        Ok(PyBytes::new(py, core::Together::needs(&checkpoint, &wanted).as_bytes()))
    }

    #[getter]
    fn rounds(&self) -> u32 {
        self.core.rounds()
    }

    #[getter]
    fn buffer_bytes(&self) -> u64 {
        self.core.buffer_bytes()
    }

    fn spans(&self, regions: Vec<RawRegion>) -> PyResult<Vec<Option<(u32, u32)>>> {
        let span = |(row, copy): (usize, StridedCopy)| self.core.span(row, &copy).map(|span| (span.start, span.end));
        Ok(copies(&self.checkpoint, regions)?.into_iter().map(span).collect())
    }

    fn begin(
        &self,
        round: u32,
        tensors: Vec<RawRead<'_>>,
        address: usize,
        bytes: usize,
        owner: Bound<'_, PyAny>,
    ) -> PyResult<Round> {
        let tensors = lend_destinations(&self.checkpoint, tensors)?;
        let mut owners = Owners::default();
        owners.keep(owner);
        let buffer = lend_buffer(address, bytes, &owners.lease());
        let core = self.core.clone();
        let reading = runtime()?.spawn(async move { core.read(round, tensors, buffer).await });
        Ok(Round { state: Mutex::new(State::Reading(reading)) })
    }

    fn settle(&self) -> PyResult<ReadStats> {
        let (blocks_verified, unverified_bytes) = self.core.settle().map_err(to_py)?;
        Ok(core::ReadStats { blocks_verified, unverified_bytes, ..core::ReadStats::default() }.into())
    }
}

/// One round: this rank's reads, then the copies of everything that arrived.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct Round {
    state: Mutex<State>,
}

enum State {
    Reading(JoinHandle<core::Result<core::Round>>),
    Read(core::Round),
    Ended,
}

impl Round {
    fn take(&self) -> State {
        std::mem::replace(&mut *self.state.lock().expect("never poisoned"), State::Ended)
    }
}

#[pymethods]
impl Round {
    fn wait(&self, py: Python<'_>) -> PyResult<(Vec<RawPiece>, ReadStats)> {
        let State::Reading(reading) = self.take() else {
            return Err(PyValueError::new_err("this round has been waited for"));
        };
        let round = wait(py, async move { reading.await.expect("a read does not panic") })?;
        let piece = |piece: &core::Piece| (piece.owner, piece.receivers.clone(), piece.range.start, piece.range.end);
        let answer = (round.pieces().iter().map(piece).collect(), round.stats().into());
        *self.state.lock().expect("never poisoned") = State::Read(round);
        Ok(answer)
    }

    fn deliver(&self, py: Python<'_>) -> PyResult<()> {
        let State::Read(round) = self.take() else {
            return Err(PyValueError::new_err("this round has not been waited for"));
        };
        wait(py, async move { round.deliver().await })
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        match self.take() {
            State::Reading(reading) => wait(py, async move {
                // Whatever it says: the failure that ends the load came first.
                let _ = reading.await;
                Ok::<_, core::Error>(())
            }),
            State::Read(_) | State::Ended => Ok(()),
        }
    }
}

fn copies(checkpoint: &core::Checkpoint, regions: Vec<RawRegion>) -> PyResult<Vec<(usize, StridedCopy)>> {
    let copy = |(row, first, lengths): RawRegion| {
        // Where the bytes go does not matter here, only which are needed.
        let strides = vec![0; lengths.len()];
        Ok((row, copy_of(Checkpoint::item(checkpoint, row)?, &first, &lengths, &strides)?))
    };
    regions.into_iter().map(copy).collect()
}
