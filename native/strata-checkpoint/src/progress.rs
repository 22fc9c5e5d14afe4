//! How far a save or load of one rank has come; read by whoever shows it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes on their way between memory and a store.
#[derive(Debug, Default)]
pub struct Progress {
    moved_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl Progress {
    /// Bytes that the store has taken or brought, and bytes to move as far as that is planned: all objects of a save,
    /// the reads of a load that have been asked for.
    pub fn seen(&self) -> (u64, u64) {
        (self.moved_bytes.load(Relaxed), self.total_bytes.load(Relaxed))
    }

    pub(crate) fn plan(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn moved(&self, bytes: u64) {
        self.moved_bytes.fetch_add(bytes, Relaxed);
    }
}
