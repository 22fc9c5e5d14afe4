//! Memory of the caller that a load fills. This crate's one home of `unsafe`.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use strata_io::lent::{Lease, LentMut};

use crate::geometry::StridedCopy;

/// A strided region of somebody's memory, and which payload bytes go where in it.
#[derive(Clone)]
pub struct Destination {
    first: *mut u8,
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
        Self { first, copy, lease }
    }

    /// All of a buffer of ours, as one run.
    pub(crate) fn of_buffer(buffer: &mut LentMut, copy: StridedCopy) -> Self {
        let first = buffer.as_mut_slice().as_mut_ptr();
        Self { first, copy, lease: Arc::new(watch(buffer)) }
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

    /// The payload bytes that are needed, from the first to the last.
    pub fn source_range(&self) -> Range<u64> {
        self.copy.source_range()
    }

    /// Whether any byte of `range` of the payload is needed.
    pub fn needs(&self, range: Range<u64>) -> bool {
        self.copy.runs_in(range).next().is_some()
    }

    /// The memory that all of `range` of the payload goes to, if that is one piece.
    pub(crate) fn direct(&self, range: Range<u64>) -> Option<LentMut> {
        let run = self.copy.run_over(range)?;
        // SAFETY: the run lies within the region, by the constructor's contract.
        Some(unsafe {
            LentMut::new(self.first.offset(run.destination as isize), run.bytes as usize, self.lease.clone())
        })
    }

    /// Copies what is needed of `bytes`, which are the payload's from `start` on.
    pub(crate) fn scatter(&self, start: u64, bytes: &[u8]) {
        for run in self.copy.runs_in(start..start + bytes.len() as u64) {
            let from = &bytes[(run.source - start) as usize..][..run.bytes as usize];
            // SAFETY: as in `direct`; source and destination are different allocations.
            unsafe {
                let to = self.first.offset(run.destination as isize);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
            }
        }
    }
}

/// A second handle on memory that a read is filling, for the check after the read.
///
/// The caller reads through it only after the read's future has ended with success.
pub(crate) fn watch(target: &LentMut) -> LentMut {
    // SAFETY: the first handle is consumed by the read, which has ended before this one is used.
    unsafe { target.alias() }
}
