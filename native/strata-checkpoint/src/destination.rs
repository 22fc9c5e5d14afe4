//! Memory of the caller that a load fills. This crate's one home of `unsafe`.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use strata_device::Device;
use strata_io::lent::{Lease, LentMut};

use crate::Result;
use crate::geometry::{Run, StridedCopy};

/// A strided region of somebody's memory, and which payload bytes go where in it.
#[derive(Clone)]
pub struct Destination {
    /// Address, on the host or on `device`.
    first: *mut u8,
    device: Option<Device>,
    copy: StridedCopy,
    lease: Lease,
}

// SAFETY: plain memory, exclusive by the constructor's contract; the lease is Send + Sync.
unsafe impl Send for Destination {}
unsafe impl Sync for Destination {}

impl Destination {
    /// Memory whose first element is at `first`.
    ///
    /// # Safety
    /// Every byte that `copy` reaches from `first` stays writable, and is not touched by anybody else, until
    /// `lease` is dropped.
    pub unsafe fn new(first: *mut u8, copy: StridedCopy, lease: Lease) -> Self {
        Self { first, device: None, copy, lease }
    }

    /// Memory of a device whose first element is at `first` there.
    ///
    /// # Safety
    /// As [`Destination::new`], with memory of that device.
    pub unsafe fn on_device(device: Device, first: u64, copy: StridedCopy, lease: Lease) -> Self {
        Self { first: first as *mut u8, device: Some(device), copy, lease }
    }

    /// All of a buffer of ours, as one run.
    pub(crate) fn of_buffer(buffer: &mut LentMut, copy: StridedCopy) -> Self {
        let first = buffer.as_mut_slice().as_mut_ptr();
        Self { first, device: None, copy, lease: Arc::new(watch(buffer)) }
    }

    /// A part of a buffer of ours, whose first element is at byte `at`; what `copy` reaches lies in it.
    pub(crate) fn in_buffer(buffer: &mut LentMut, at: usize, copy: StridedCopy) -> Self {
        assert!(at as u64 + copy.destination_bytes() <= buffer.len() as u64, "a copy ends behind its buffer");
        let first = buffer.as_mut_slice()[at..].as_mut_ptr();
        Self { first, device: None, copy, lease: Arc::new(watch(buffer)) }
    }

    /// Whether both fill the same memory with the same bytes of a payload.
    pub fn same_as(&self, other: &Self) -> bool {
        self.first == other.first && self.copy == other.copy
    }

    /// Addresses from the first byte that is filled to one past the last.
    pub(crate) fn extent(&self) -> Range<usize> {
        let first = self.first as usize;
        first..first + self.copy.destination_bytes() as usize
    }

    /// The device that holds the memory; None for the host.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// The payload bytes that are needed, from the first to the last.
    pub fn source_range(&self) -> Range<u64> {
        self.copy.source_range()
    }

    /// Whether any byte of `range` of the payload is needed.
    pub fn needs(&self, range: Range<u64>) -> bool {
        self.copy.runs_in(range).next().is_some()
    }

    /// The memory of the host that all of `range` of the payload goes to, if that is one piece.
    pub(crate) fn direct(&self, range: Range<u64>) -> Option<LentMut> {
        if self.device.is_some() {
            return None;
        }
        let run = self.copy.run_over(range)?;
        // SAFETY: the run lies within the region, by the constructor's contract.
        Some(unsafe {
            LentMut::new(self.first.offset(run.destination as isize), run.bytes as usize, self.lease.clone())
        })
    }

    /// Copies what is needed of `bytes`, which are the payload's from `start` on. Blocks.
    ///
    /// # Errors
    /// Those of the device that holds the memory.
    pub(crate) fn scatter(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let runs = self.copy.runs_in(start..start + bytes.len() as u64);
        let source = |run: &Run| &bytes[(run.source - start) as usize..][..run.bytes as usize];
        if let Some(Device { driver, ordinal }) = &self.device {
            let address = |run: &Run| (self.first as u64).wrapping_add_signed(run.destination);
            let pieces: Vec<(u64, &[u8])> = runs.map(|run| (address(&run), source(&run))).collect();
            return Ok(driver.write(*ordinal, &pieces)?);
        }
        for run in runs {
            let from = source(&run);
            // SAFETY: as in `direct`; source and destination are different allocations.
            unsafe {
                let to = self.first.offset(run.destination as isize);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
            }
        }
        Ok(())
    }
}

/// A second handle on memory that a read is filling, for the check after the read.
///
/// The caller reads through it only after the read's future has ended with success.
pub(crate) fn watch(target: &LentMut) -> LentMut {
    // SAFETY: the first handle is consumed by the read, which has ended before this one is used.
    unsafe { target.alias() }
}

#[cfg(test)]
mod tests {
    use strata_device::testing::StandIn;

    use super::*;
    use crate::geometry::Box;

    #[test]
    fn a_payload_reaches_each_row_of_a_device() {
        let stand_in = Arc::new(StandIn::new(vec![0; 40]));
        let device = Device { driver: stand_in.clone(), ordinal: 0 };
        // Rows 1 and 2 of a payload of 4 rows of 3 bytes, to rows that are 10 bytes apart.
        let region = Box { source_strides: &[3, 1], first: &[1, 0], lengths: &[2, 3], destination_strides: &[10, 1] };
        let copy = StridedCopy::new(region, 1);
        // SAFETY: the stand-in's own memory.
        let destination = unsafe { Destination::on_device(device, StandIn::BASE + 5, copy, Arc::new(())) };
        assert!(destination.direct(3..9).is_none());
        destination.scatter(0, b"abcdefg").expect("copied");
        destination.scatter(7, b"hijkl").expect("copied");
        let mut expected = vec![0; 40];
        expected[5..8].copy_from_slice(b"def");
        expected[15..18].copy_from_slice(b"ghi");
        assert_eq!(stand_in.memory(), expected);
    }
}
