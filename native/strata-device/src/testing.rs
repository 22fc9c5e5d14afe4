//! A device whose memory is a vector: what stands on this crate is tested with it where there is no GPU.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::{Device, DeviceMemory, Driver, Error, Result};

/// One device, number 0, whose memory begins at address [`StandIn::BASE`].
#[derive(Debug)]
pub struct StandIn {
    memory: Mutex<Vec<u8>>,
    pinned_bytes: AtomicUsize,
    refuses_to_pin: bool,
}

impl StandIn {
    /// Address of the first byte; no address of the host.
    pub const BASE: u64 = 0x10_0000_0000;

    /// A device that holds `memory`.
    pub fn new(memory: Vec<u8>) -> Self {
        Self { memory: Mutex::new(memory), pinned_bytes: AtomicUsize::new(0), refuses_to_pin: false }
    }

    /// `range` of the memory of `device`; reaching past its end fails when it is copied, as on a GPU.
    pub fn lend(device: &Arc<Self>, range: Range<u64>) -> DeviceMemory {
        DeviceMemory {
            device: Device { driver: device.clone(), ordinal: 0 },
            address: Self::BASE + range.start,
            bytes: range.end - range.start,
            _lease: Arc::new(()),
        }
    }

    /// The same, on a system that allows no locked memory.
    pub fn without_locked_memory(memory: Vec<u8>) -> Self {
        Self { refuses_to_pin: true, ..Self::new(memory) }
    }

    /// Bytes of the host that are locked now.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned_bytes.load(Ordering::Relaxed)
    }

    /// All of the device's memory.
    pub fn memory(&self) -> Vec<u8> {
        self.memory.lock().expect("no panic while held").clone()
    }

    fn each(
        &self,
        call: &'static str,
        ordinal: u32,
        pieces: impl Iterator<Item = (u64, usize)>,
        mut copy: impl FnMut(usize, &mut [u8]),
    ) -> Result<()> {
        let mut memory = self.memory.lock().expect("no panic while held");
        for (i, (address, bytes)) in pieces.enumerate() {
            let at = address.checked_sub(Self::BASE).map(|at| at as usize);
            let range = at.filter(|_| ordinal == 0).map(|at| at..at + bytes);
            match range.and_then(|range| memory.get_mut(range)) {
                Some(found) => copy(i, found),
                None => return Err(Error::Call { call, ordinal, detail: "invalid argument (1)".into() }),
            }
        }
        Ok(())
    }
}

impl Driver for StandIn {
    fn read(&self, ordinal: u32, pieces: &mut [(u64, &mut [u8])]) -> Result<()> {
        let places: Vec<(u64, usize)> = pieces.iter().map(|(address, target)| (*address, target.len())).collect();
        self.each("read", ordinal, places.into_iter(), |i, found| pieces[i].1.copy_from_slice(found))
    }

    fn write(&self, ordinal: u32, pieces: &[(u64, &[u8])]) -> Result<()> {
        let places = pieces.iter().map(|(address, source)| (*address, source.len()));
        self.each("write", ordinal, places, |i, found| found.copy_from_slice(pieces[i].1))
    }

    fn pin(&self, ordinal: u32, memory: &mut [u8]) -> Result<()> {
        if self.refuses_to_pin {
            return Err(Error::Call { call: "pin", ordinal, detail: "out of memory (2)".into() });
        }
        self.pinned_bytes.fetch_add(memory.len(), Ordering::Relaxed);
        Ok(())
    }

    fn unpin(&self, memory: &mut [u8]) {
        self.pinned_bytes.fetch_sub(memory.len(), Ordering::Relaxed);
    }
}
