//! Payloads that are stored in fewer bytes than they have: how a row says so. Pure.
//!
//! Each block of the payload is a zstd frame of its own, so that a range is read without what lies beside it. In a
//! frame, byte `i` of all elements stands before byte `i + 1` of all (planes): signs and exponents, which are alike, do
//! not lie between fractions, which are noise. With a base, what is stored is the block XORed with the same block of an
//! earlier content of the tensor. A base is stored as it is, never encoded itself: nothing is followed any further.

mod codec;

use std::ops::Range;

use crate::container::dtype_bytes;
use crate::item::num_blocks;
use crate::plan::block_range;

pub use self::codec::{Framed, decode_block, encode_block};

/// What a manifest with encoded payloads requires of its readers.
pub const FEATURE: &str = "encoded-payloads";

const PLANES: &str = "planes-zstd";
const XOR_PLANES: &str = "xor-planes-zstd";

/// A frame takes no more than its block and this: what zstd adds to bytes that it cannot make less of.
const MOST_ADDED: u64 = 64 << 10;

/// How a payload is stored that is not stored as it is: frames one after another, from the item's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoding {
    /// One for each block of the payload.
    pub frames: Box<[FrameEntry]>,
    /// What the blocks were XORed with.
    pub base: Option<XorBase>,
}

/// The frame of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameEntry {
    /// Where it begins, from the item's start.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// XXH3-128 of the frame as it is stored.
    pub xxh3: u128,
}

/// An earlier content of the same length, stored as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XorBase {
    /// Which of the checkpoint's objects holds it.
    pub object: u32,
    /// First byte of it in the object.
    pub offset: u64,
    /// XXH3-128 of each of its blocks; 0 for one that nothing was XORed with.
    pub digests: Box<[u128]>,
}

impl Encoding {
    /// Of frames with these lengths and digests.
    ///
    /// # Errors
    /// Lengths that no frames of such a payload have.
    pub fn new(
        frames: impl IntoIterator<Item = (u32, u128)>,
        base: Option<XorBase>,
        payload_bytes: u64,
    ) -> Result<Self, String> {
        let mut offset = 0;
        let entry = |(bytes, xxh3)| {
            let entry = FrameEntry { offset, bytes, xxh3 };
            offset += u64::from(bytes);
            entry
        };
        let frames: Box<[FrameEntry]> = frames.into_iter().map(entry).collect();
        let blocks = num_blocks(payload_bytes);
        if frames.len() as u64 != blocks || base.as_ref().is_some_and(|base| base.digests.len() as u64 != blocks) {
            return Err(format!("{} frames for {blocks} blocks", frames.len()));
        }
        for (block, frame) in frames.iter().enumerate() {
            let range = block_range(block as u64, payload_bytes);
            if frame.bytes == 0 || u64::from(frame.bytes) > range.end - range.start + MOST_ADDED {
                return Err(format!("block {block} has a frame of {} bytes", frame.bytes));
            }
        }
        Ok(Self { frames, base })
    }

    /// Name of an encoding in files.
    pub fn name(&self) -> &'static str {
        if self.base.is_some() { XOR_PLANES } else { PLANES }
    }

    /// Whether the encoding with this name takes a base; None if this reader does not know it.
    pub fn takes_base(name: &str) -> Option<bool> {
        match name {
            PLANES => Some(false),
            XOR_PLANES => Some(true),
            _ => None,
        }
    }

    /// What all frames take, in bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.frames.last().map_or(0, |last| last.offset + u64::from(last.bytes))
    }

    /// Bytes of a block's frame, from the item's start.
    pub fn frame_range(&self, block: u64) -> Range<u64> {
        let FrameEntry { offset, bytes, .. } = self.frames[block as usize];
        offset..offset + u64::from(bytes)
    }
}

impl XorBase {
    /// Where in its object what a block was XORed with is, and its XXH3-128, if the payload has `payload_bytes`.
    pub fn block(&self, block: u64, payload_bytes: u64) -> Option<(Range<u64>, u128)> {
        let (range, digest) = (block_range(block, payload_bytes), self.digests[block as usize]);
        (digest != 0).then(|| (self.offset + range.start..self.offset + range.end, digest))
    }
}

/// Number of planes of the elements of a dtype: a complex number is two numbers.
pub fn planes_of(dtype: &str) -> usize {
    let bytes = dtype_bytes(dtype).unwrap_or(1) as usize;
    if dtype.starts_with("complex") { bytes / 2 } else { bytes }
}
