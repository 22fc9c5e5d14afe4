//! Memory of a device that belongs to somebody else.

use std::fmt;
use std::ops::Range;

use strata_io::lent::Lease;

use crate::{Device, Result};

/// Dense memory on one device, lent for as long as a clone of this is kept.
#[derive(Clone)]
pub struct DeviceMemory {
    pub(crate) device: Device,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) _lease: Lease,
}

impl DeviceMemory {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies `range` into `target`, which is as long. Blocks.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn read(&self, range: Range<u64>, target: &mut [u8]) -> Result<()> {
        assert!(range.end <= self.bytes && range.end - range.start == target.len() as u64, "{range:?} of {self:?}");
        self.device.driver.read(self.device.ordinal, &mut [(self.address + range.start, target)])
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes on device {})", self.bytes, self.device.ordinal)
    }
}
