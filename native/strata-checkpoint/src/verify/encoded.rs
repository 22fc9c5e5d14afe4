//! An encoded block: its frame, its base, and what comes of them.

use std::ops::Range;

use bytes::Bytes;
use strata_io::digest::{BLOCK_BYTES, xxh3};

use super::{Checked, Place};
use crate::bounce;
use crate::destination::watch;
use crate::encoding::{Encoding, decode_block, planes_of};
use crate::item::{Item, num_blocks};
use crate::load::{mismatch, object_path, verify_block};
use crate::plan::block_range;

/// What one object holds of a block: the object, where in it, and the XXH3-128 of that.
type Part = (u32, Range<u64>, u128);

/// One block of an encoded item.
pub(super) struct Block<'a> {
    item: &'a Item,
    payload: Range<u64>,
    parts: Vec<Part>,
}

/// All blocks of `items`, which are encoded.
pub(super) fn blocks<'a>(items: &[&'a Item]) -> Vec<Block<'a>> {
    let of_item = |item: &'a Item| {
        let encoding = item.encoding.as_ref().expect("only encoded items are asked for");
        (0..num_blocks(item.payload_bytes)).map(move |block| {
            let payload = block_range(block, item.payload_bytes);
            Block { item, parts: parts_of(item, encoding, &payload), payload }
        })
    };
    items.iter().flat_map(|item| of_item(item)).collect()
}

impl Block<'_> {
    /// Bytes that are read of it and of its base.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, range, _)| range.end - range.start).sum()
    }
}

impl Place<'_> {
    /// Reads a block and what it was XORed with, and compares both and what comes of them.
    pub(super) async fn check_block<'a>(&self, block: &'a Block<'a>) -> Checked<'a> {
        let Block { item, payload, parts } = block;
        let mut checked = Checked::of(item, block.bytes());
        let mut read: Vec<Bytes> = Vec::new();
        for (object, range, _) in parts {
            let object = &self.checkpoint.manifest.objects[*object as usize];
            match self.siblings.place(self.store, object).read(&object.name, Some(range.clone())).await {
                Ok(bytes) => read.push(bytes),
                Err(error) => {
                    checked.failed = Some(error);
                    return checked;
                }
            }
        }
        let (width, length) = (planes_of(&item.dtype), payload.end - payload.start);
        let look = move || {
            let digests: Vec<u128> = read.iter().map(|bytes| xxh3(bytes)).collect();
            (digests, decoded_digest(&read, width, length))
        };
        let (digests, decoded) = tokio::task::spawn_blocking(look).await.expect("decoding does not panic");
        let path = |object| object_path(self.store.url(), self.checkpoint, object);
        for ((object, range, expected), found) in parts.iter().zip(digests) {
            if *expected != found {
                let fault = mismatch(item, range.clone(), (*expected, found), path(*object));
                checked.problems.push(fault.to_string());
            }
        }
        // What comes of damaged parts says nothing more.
        if checked.problems.is_empty() {
            let number = payload.start / BLOCK_BYTES;
            let verified = match decoded {
                Ok(digest) => verify_block(item, number, digest, || path(item.object)).map_err(|e| e.to_string()),
                Err(fault) => Err(format!("{:?} in {}, block {number}: {fault}", item.name(), path(item.object))),
            };
            match verified {
                Ok(()) => checked.blocks = 1,
                Err(problem) => checked.problems.push(problem),
            }
        }
        checked
    }
}

/// The frame, and the block that it was XORed with.
fn parts_of(item: &Item, encoding: &Encoding, payload: &Range<u64>) -> Vec<Part> {
    let block = payload.start / BLOCK_BYTES;
    let frame = (item.object, item.stored_range(block, payload), encoding.frames[block as usize].xxh3);
    let base = encoding.base.as_ref().and_then(|base| {
        let (range, digest) = base.block(block, item.payload_bytes)?;
        Some((base.object, range, digest))
    });
    [Some(frame), base].into_iter().flatten().collect()
}

/// XXH3-128 of the block of which `parts` are frame and base. Blocks.
fn decoded_digest(parts: &[Bytes], width: usize, bytes: u64) -> Result<u128, String> {
    let buffer = bounce::take(bytes, None);
    let mut memory = watch(buffer.memory()).split_to(bytes as usize);
    let base = parts.get(1).map(|base| &base[..]);
    let decoded = decode_block(&parts[0], base, width, memory.as_mut_slice());
    let digest = decoded.map(|()| xxh3(memory.as_slice()));
    bounce::give(buffer);
    digest
}
