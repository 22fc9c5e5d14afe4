//! What a device's driver must do for us.

use std::fmt::Debug;
use std::sync::Arc;

/// Result of a copy from or to a device.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed call of a device's driver.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The driver's library is not there, or too old.
    #[error("cannot open the CUDA driver: {0}")]
    NoDriver(String),
    /// A call of the driver failed.
    #[error("{call} failed on cuda:{ordinal}: {detail}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Number of the device, as torch counts.
        ordinal: u32,
        /// The driver's own words.
        detail: String,
    },
}

/// One device of a driver.
#[derive(Debug, Clone)]
pub struct Device {
    /// Who copies.
    pub driver: Arc<dyn Driver>,
    /// Number of the device, as torch counts.
    pub ordinal: u32,
}

/// Copies between the host and devices. Every call returns when the copies have ended, also after an error.
pub trait Driver: Debug + Send + Sync {
    /// Copies from each address of device `ordinal` into the memory beside it.
    ///
    /// # Errors
    /// [`Error::Call`]; the targets then hold anything.
    fn read(&self, ordinal: u32, pieces: &mut [(u64, &mut [u8])]) -> Result<()>;

    /// Copies to each address of device `ordinal` from the memory beside it.
    ///
    /// # Errors
    /// [`Error::Call`]; the device's memory then holds anything.
    fn write(&self, ordinal: u32, pieces: &[(u64, &[u8])]) -> Result<()>;

    /// Locks pages of the host so that devices copy to and from them at full speed.
    ///
    /// # Errors
    /// [`Error::Call`], as when the system allows no more locked memory; the memory can be used unlocked.
    fn pin(&self, ordinal: u32, memory: &mut [u8]) -> Result<()>;

    /// Undoes [`Driver::pin`].
    fn unpin(&self, memory: &mut [u8]);
}
