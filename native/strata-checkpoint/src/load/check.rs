//! Digests of what was read, against those that were written.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use strata_io::digest::crc32_combine;

use crate::item::{Item, num_blocks};
use crate::open::Checkpoint;
use crate::plan::{BlockRead, block_range};
use crate::{Error, Result};

/// Compares the XXH3-128 of one block of a payload with what was written; the CRC says nothing more.
///
/// # Errors
/// [`Error::Checksum`].
pub(crate) fn verify_block(item: &Item, block: u64, found: u128, object: impl Fn() -> String) -> Result<()> {
    let expected = item.digests.get(block as usize).expect("a block of the payload").xxh3;
    if found == expected {
        return Ok(());
    }
    let range = block_range(block, item.payload_bytes);
    Err(mismatch(item, item.stored_range(block, &range), (expected, found), object()))
}

/// The error of bytes at `stored` in `object` that have another digest than was `expected`.
pub(crate) fn mismatch(item: &Item, stored: Range<u64>, (expected, found): (u128, u128), object: String) -> Error {
    Error::Checksum {
        object,
        expected: format!("xxh3 {expected:#034x}"),
        found: format!("{found:#034x}"),
        start: stored.start,
        end: stored.end,
        fqn: item.name(),
    }
}

/// One block of a payload that has no digest of its own.
struct Unsettled {
    block: u64,
    crc: u32,
    bytes: u64,
}

/// What was checked so far. Stock items have only a CRC of the whole payload, so their blocks wait for each other.
#[derive(Default)]
pub(crate) struct Checks {
    verified: AtomicU64,
    waiting: Mutex<HashMap<usize, Vec<Unsettled>>>,
}

impl Checks {
    pub fn note_verified(&self) {
        self.verified.fetch_add(1, Ordering::Relaxed);
    }

    pub fn note_unverified(&self, block: &BlockRead, crc: u32) {
        let unsettled = Unsettled { block: block.block, crc, bytes: block.payload.end - block.payload.start };
        self.waiting.lock().expect("never poisoned").entry(block.row).or_default().push(unsettled);
    }

    /// Compares the items that were read whole; returns verified blocks and unverified bytes.
    pub fn settle(&self, checkpoint: &Checkpoint, url: &str) -> Result<(u64, u64)> {
        let mut verified = self.verified.load(Ordering::Relaxed);
        let mut unverified = 0;
        for (row, mut blocks) in std::mem::take(&mut *self.waiting.lock().expect("never poisoned")) {
            let item = &checkpoint.manifest.items[row];
            blocks.sort_by_key(|read| read.block);
            match item.whole_crc32.filter(|_| blocks.len() as u64 == num_blocks(item.payload_bytes)) {
                None => unverified += blocks.iter().map(|read| read.bytes).sum::<u64>(),
                Some(expected) => {
                    let found = blocks.iter().fold(0, |crc, read| crc32_combine(crc, read.crc, read.bytes));
                    compare(item, expected, found, checkpoint, url)?;
                    verified += blocks.len() as u64;
                }
            }
        }
        Ok((verified, unverified))
    }
}

fn compare(item: &Item, expected: u32, found: u32, checkpoint: &Checkpoint, url: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let start = item.payload_offset();
    Err(Error::Checksum {
        object: super::object_path(url, checkpoint, item.object),
        expected: format!("crc32 {expected:#010x}"),
        found: format!("{found:#010x}"),
        start,
        end: start + item.payload_bytes,
        fqn: item.name(),
    })
}
