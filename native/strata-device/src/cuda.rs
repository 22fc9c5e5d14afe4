//! NVIDIA's driver, opened at run time. This crate's one home of `unsafe`.
//!
//! Names and values: <https://docs.nvidia.com/cuda/cuda-driver-api/>. The driver's API is stable over versions, and its
//! primary context of a device is the one that torch uses.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock};

use libloading::Library;
use strata_io::lent::{Lease, LentMut};

use crate::{Device, DeviceMemory, Driver, Error, PinnedBuffer, Result};

type Status = c_int;
const SUCCESS: Status = 0;

/// CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream, nor that one for it.
const NON_BLOCKING: c_uint = 1;

/// CU_MEMHOSTREGISTER_PORTABLE: locked for all contexts, so that one buffer serves every device.
const PORTABLE: c_uint = 1;

#[cfg(unix)]
const LIBRARY: &str = "libcuda.so.1";
#[cfg(windows)]
const LIBRARY: &str = "nvcuda.dll";

/// The CUDA driver of this machine.
///
/// # Errors
/// [`Error::NoDriver`] on a machine without one.
pub fn cuda() -> Result<Arc<dyn Driver>> {
    static CUDA: OnceLock<Result<Arc<Cuda>>> = OnceLock::new();
    CUDA.get_or_init(|| Cuda::open().map(Arc::new)).clone().map(|cuda| cuda as Arc<dyn Driver>)
}

impl DeviceMemory {
    /// `bytes` from `address` on of `device`, owned by something under `lease`.
    ///
    /// # Safety
    /// The range is memory of that device until `lease` is dropped: with one address space for host and devices, the
    /// driver would follow an address of the host too.
    pub unsafe fn lend(device: Device, address: u64, bytes: u64, lease: Lease) -> Self {
        Self { device, address, bytes, _lease: lease }
    }
}

impl PinnedBuffer {
    /// The buffer as memory to be read into; it goes back to be used again when the last handle on it is gone.
    pub fn lent(mut self) -> LentMut {
        let (first, bytes) = (self.as_mut_slice().as_mut_ptr(), self.as_ref().len());
        // SAFETY: the buffer is ours alone, and the lease keeps it.
        unsafe { LentMut::new(first, bytes, Arc::new(self)) }
    }
}

type Handle = *mut c_void;

/// The driver's functions, as its header declares them.
struct Functions {
    device_get: unsafe extern "C" fn(*mut c_int, c_int) -> Status,
    primary_context_retain: unsafe extern "C" fn(*mut Handle, c_int) -> Status,
    context_set_current: unsafe extern "C" fn(Handle) -> Status,
    stream_create: unsafe extern "C" fn(*mut Handle, c_uint) -> Status,
    stream_synchronize: unsafe extern "C" fn(Handle) -> Status,
    copy_to_host: unsafe extern "C" fn(*mut c_void, u64, usize, Handle) -> Status,
    copy_to_device: unsafe extern "C" fn(u64, *const c_void, usize, Handle) -> Status,
    host_register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Status,
    host_unregister: unsafe extern "C" fn(*mut c_void) -> Status,
    error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    _library: Library,
}

/// A device's primary context and our own stream in it; both live as long as the process.
#[derive(Clone, Copy)]
struct Opened {
    context: Handle,
    stream: Handle,
}

// SAFETY: handles of the driver may be used on any thread.
unsafe impl Send for Opened {}

struct Cuda {
    call: Functions,
    devices: Mutex<HashMap<u32, Opened>>,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cuda")
    }
}

impl Cuda {
    fn open() -> Result<Self> {
        let missing = |error: libloading::Error| Error::NoDriver(error.to_string());
        // SAFETY: the driver's library may be loaded at any time; with torch on a GPU it already is.
        let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
        macro_rules! function {
            // SAFETY: the fields' types are those of the driver's header.
            ($name:literal) => {
                *unsafe { library.get($name.as_bytes()) }.map_err(missing)?
            };
        }
        // SAFETY: as above.
        let init: unsafe extern "C" fn(c_uint) -> Status = function!("cuInit");
        let call = Functions {
            device_get: function!("cuDeviceGet"),
            primary_context_retain: function!("cuDevicePrimaryCtxRetain"),
            context_set_current: function!("cuCtxSetCurrent"),
            stream_create: function!("cuStreamCreate"),
            stream_synchronize: function!("cuStreamSynchronize"),
            copy_to_host: function!("cuMemcpyDtoHAsync_v2"),
            copy_to_device: function!("cuMemcpyHtoDAsync_v2"),
            host_register: function!("cuMemHostRegister_v2"),
            host_unregister: function!("cuMemHostUnregister"),
            error_string: function!("cuGetErrorString"),
            _library: library,
        };
        let cuda = Self { call, devices: Mutex::default() };
        // SAFETY: the one argument must be 0.
        match unsafe { init(0) } {
            SUCCESS => Ok(cuda),
            status => Err(Error::NoDriver(cuda.words(status))),
        }
    }

    /// The driver's description of a status.
    fn words(&self, status: Status) -> String {
        let mut words: *const c_char = std::ptr::null();
        // SAFETY: the driver fills the pointer with a string of its own that stays, or returns an error.
        unsafe {
            match (self.call.error_string)(status, &mut words) {
                SUCCESS if !words.is_null() => format!("{} ({status})", CStr::from_ptr(words).to_string_lossy()),
                _ => format!("error {status}"),
            }
        }
    }

    fn check(&self, call: &'static str, ordinal: u32, status: Status) -> Result<()> {
        match status {
            SUCCESS => Ok(()),
            status => Err(Error::Call { call, ordinal, detail: self.words(status) }),
        }
    }

    /// The device, made current on this thread.
    fn enter(&self, ordinal: u32) -> Result<Opened> {
        let mut devices = self.devices.lock().expect("no panic while held");
        if let Some(device) = devices.get(&ordinal) {
            // SAFETY: the context is retained for good.
            let status = unsafe { (self.call.context_set_current)(device.context) };
            self.check("cuCtxSetCurrent", ordinal, status)?;
            return Ok(*device);
        }
        let (mut number, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: each call fills the place it is given; the context is current before a stream is made in it.
        unsafe {
            self.check("cuDeviceGet", ordinal, (self.call.device_get)(&mut number, ordinal as c_int))?;
            let retained = (self.call.primary_context_retain)(&mut context, number);
            self.check("cuDevicePrimaryCtxRetain", ordinal, retained)?;
            self.check("cuCtxSetCurrent", ordinal, (self.call.context_set_current)(context))?;
            self.check("cuStreamCreate", ordinal, (self.call.stream_create)(&mut stream, NON_BLOCKING))?;
        }
        let device = Opened { context, stream };
        devices.insert(ordinal, device);
        Ok(device)
    }

    /// Starts copies with `start` and waits for all of them, whatever happened meanwhile.
    fn run(&self, call: &'static str, ordinal: u32, start: impl FnOnce(Handle) -> Status) -> Result<()> {
        let device = self.enter(ordinal)?;
        let started = start(device.stream);
        // SAFETY: a stream of the current context.
        let ended = unsafe { (self.call.stream_synchronize)(device.stream) };
        self.check(call, ordinal, started)?;
        self.check("cuStreamSynchronize", ordinal, ended)
    }
}

impl Driver for Cuda {
    fn read(&self, ordinal: u32, pieces: &mut [(u64, &mut [u8])]) -> Result<()> {
        self.run("cuMemcpyDtoHAsync", ordinal, |stream| {
            let copy = |(from, to): &mut (u64, &mut [u8])| {
                // SAFETY: the target is exclusively ours until `run` has waited; the driver checks the device address.
                unsafe { (self.call.copy_to_host)(to.as_mut_ptr().cast(), *from, to.len(), stream) }
            };
            pieces.iter_mut().map(copy).find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
        })
    }

    fn write(&self, ordinal: u32, pieces: &[(u64, &[u8])]) -> Result<()> {
        self.run("cuMemcpyHtoDAsync", ordinal, |stream| {
            let copy = |(to, from): &(u64, &[u8])| {
                // SAFETY: the source stays until `run` has waited; the driver checks the device address.
                unsafe { (self.call.copy_to_device)(*to, from.as_ptr().cast(), from.len(), stream) }
            };
            pieces.iter().map(copy).find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
        })
    }

    fn pin(&self, ordinal: u32, memory: &mut [u8]) -> Result<()> {
        self.enter(ordinal)?;
        // SAFETY: whoever pins unpins before the memory is freed (`PinnedBuffer`).
        let status = unsafe { (self.call.host_register)(memory.as_mut_ptr().cast(), memory.len(), PORTABLE) };
        self.check("cuMemHostRegister", ordinal, status)
    }

    fn unpin(&self, memory: &mut [u8]) {
        // SAFETY: registered by `pin`. A failure means that the context is gone, and the lock with it.
        unsafe { (self.call.host_unregister)(memory.as_mut_ptr().cast()) };
    }
}
