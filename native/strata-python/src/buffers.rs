//! Memory of Python objects, lent to Rust. This crate's one home of `unsafe`.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};
use strata_checkpoint::Destination;
use strata_checkpoint::geometry::StridedCopy;
use strata_device::{Device, DeviceMemory, Result};
use strata_io::lent::{Lease, LentMut, lend};

/// Python objects whose memory is lent. The last operation that can touch the memory drops it, on any thread.
#[derive(Default)]
pub(crate) struct Owners {
    objects: Vec<Py<PyAny>>,
    buffers: Vec<PyBuffer<u8>>,
}

/// Owners that were dropped where Python must not be touched; the next call from Python releases them.
static DEAD: Mutex<Vec<Owners>> = Mutex::new(Vec::new());

impl Drop for Owners {
    fn drop(&mut self) {
        if !self.objects.is_empty() || !self.buffers.is_empty() {
            DEAD.lock().expect("never poisoned").push(std::mem::take(self));
        }
    }
}

/// Releases what tokio's threads have let go of.
pub(crate) fn bury(_py: Python<'_>) {
    let dead = std::mem::take(&mut *DEAD.lock().expect("never poisoned"));
    for mut owners in dead {
        // Field by field: dropping `owners` as it is would queue it again.
        drop((std::mem::take(&mut owners.objects), std::mem::take(&mut owners.buffers)));
    }
}

impl Owners {
    /// The lease on one object.
    pub fn of(object: Bound<'_, PyAny>) -> Lease {
        Self { objects: vec![object.unbind()], buffers: vec![] }.lease()
    }

    /// Keeps a tensor alive.
    pub fn keep(&mut self, object: Bound<'_, PyAny>) {
        self.objects.push(object.unbind());
    }

    /// Keeps a buffer exported; returns its address and length in bytes.
    pub fn keep_buffer(&mut self, object: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("expected a contiguous buffer"));
        }
        let place = (buffer.buf_ptr() as usize, buffer.len_bytes());
        self.buffers.push(buffer);
        Ok(place)
    }

    /// The lease on everything that is kept.
    pub fn lease(self) -> Lease {
        Arc::new(self)
    }
}

/// `bytes` of memory at `address`, owned by something under `lease`.
pub(crate) fn lend_memory(address: usize, bytes: usize, lease: &Lease) -> Bytes {
    // SAFETY: Python promises (_native.pyi) that the object kept under the lease owns this memory.
    unsafe { lend(address as *const u8, bytes, lease.clone()) }
}

/// The CUDA device `ordinal`.
pub(crate) fn device(ordinal: u32) -> Result<Device> {
    Ok(Device { driver: strata_device::cuda()?, ordinal })
}

/// `bytes` of memory at `address` of the CUDA device `ordinal`, owned by something under `lease`.
pub(crate) fn lend_device(ordinal: u32, address: usize, bytes: usize, lease: &Lease) -> Result<DeviceMemory> {
    // SAFETY: as above, with a tensor of that device.
    Ok(unsafe { DeviceMemory::lend(device(ordinal)?, address as u64, bytes as u64, lease.clone()) })
}

/// `bytes` of memory at `address` to be written, owned by something under `lease`.
pub(crate) fn lend_buffer(address: usize, bytes: usize, lease: &Lease) -> LentMut {
    // SAFETY: as above; Python touches it only between the calls of `_native.Round`, and after a `_native.Copy` has
    // ended.
    unsafe { LentMut::new(address as *mut u8, bytes, lease.clone()) }
}

/// A destination at `address` of the host, or of a CUDA device, owned by something under `lease`.
pub(crate) fn destination(
    ordinal: Option<u32>,
    address: usize,
    copy: StridedCopy,
    lease: &Lease,
) -> Result<Destination> {
    let Some(ordinal) = ordinal else {
        // SAFETY: as above; the caller's tensor has the shape and strides that `copy` was made from.
        return Ok(unsafe { Destination::new(address as *mut u8, copy, lease.clone()) });
    };
    // SAFETY: as above, with a tensor of that device.
    Ok(unsafe { Destination::on_device(device(ordinal)?, address as u64, copy, lease.clone()) })
}

/// Bytes of ours as a buffer of Python, read-only.
#[pyclass(module = "torch_strata._native", frozen)]
pub(crate) struct SharedBytes {
    bytes: Bytes,
}

impl SharedBytes {
    /// `bytes`, which stay as long as it and its views do.
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }
}

#[pymethods]
impl SharedBytes {
    fn __len__(&self) -> usize {
        self.bytes.len()
    }

    fn __repr__(&self) -> String {
        format!("<{} bytes>", self.bytes.len())
    }

    /// Pieces of `buffer`, one after the other, of so many bytes each; copies nothing.
    #[staticmethod]
    fn cut(py: Python<'_>, buffer: &Bound<'_, PyAny>, lengths: Vec<usize>) -> PyResult<Vec<Self>> {
        bury(py);
        let mut owners = Owners::default();
        let (address, bytes) = owners.keep_buffer(buffer)?;
        let mut rest = lend_memory(address, bytes, &owners.lease());
        let mut pieces = Vec::with_capacity(lengths.len());
        for length in lengths {
            if length > rest.len() {
                return Err(PyValueError::new_err(format!("{length} bytes of {} that are left", rest.len())));
            }
            pieces.push(Self { bytes: rest.split_to(length) });
        }
        Ok(pieces)
    }

    /// Another process gets plain `bytes`.
    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (py.get_type::<PyBytes>(), (PyBytes::new(py, &self.bytes),))
    }

    /// # Safety
    /// As CPython calls it: `view` is its own to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        const READ_ONLY: c_int = 1;
        let bytes = &slf.get().bytes;
        // SAFETY: the bytes live as long as `slf`, to which the view holds a reference.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.as_ptr().cast_mut().cast(),
                bytes.len() as isize,
                READ_ONLY,
                flags,
            )
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
