//! An encoded block: its frame, its base, and what comes of them.

use std::ops::Range;

use bytes::Bytes;
use strata_io::Store;
use strata_io::digest::{BLOCK_BYTES, xxh3};

use super::Piece;
use crate::bounce;
use crate::destination::watch;
use crate::encoding::{Encoding, decode_block, planes_of};
use crate::item::Item;
use crate::load::{mismatch, object_path, verify_block};
use crate::open::Checkpoint;
use crate::siblings::Siblings;

/// What one object holds of a block: the object, where in it, and the XXH3-128 of that.
type Part = (u32, Range<u64>, u128);

/// Reads and checks the block that is `payload` of the item.
pub(super) async fn check_block<'a>(
    (store, siblings, checkpoint): (&dyn Store, &Siblings, &Checkpoint),
    item: &'a Item,
    encoding: &Encoding,
    payload: Range<u64>,
) -> Piece<'a> {
    let parts = parts_of(item, encoding, &payload);
    let mut piece = Piece { item, bytes: 0, payload_bytes: 0, crc32: 0, blocks: 0, problems: Vec::new(), failed: None };
    let mut read: Vec<Bytes> = Vec::new();
    for (object, range, _) in &parts {
        piece.bytes += range.end - range.start;
        let object = &checkpoint.manifest.objects[*object as usize];
        match siblings.place(store, object).read(&object.name, Some(range.clone())).await {
            Ok(bytes) => read.push(bytes),
            Err(error) => {
                piece.failed = Some(error);
                return piece;
            }
        }
    }
    let width = planes_of(&item.dtype);
    let look = move || {
        let digests: Vec<u128> = read.iter().map(|bytes| xxh3(bytes)).collect();
        (digests, decoded_digest(&read, width, payload.end - payload.start))
    };
    let (digests, decoded) = tokio::task::spawn_blocking(look).await.expect("decoding does not panic");
    let path = |object| object_path(store.url(), checkpoint, object);
    for ((object, range, expected), found) in parts.into_iter().zip(digests) {
        if expected != found {
            piece.problems.push(mismatch(item, range, (expected, found), path(object)).to_string());
        }
    }
    // What comes of damaged parts says nothing more.
    if piece.problems.is_empty() {
        let block = payload.start / BLOCK_BYTES;
        let verified = match decoded {
            Ok(digest) => verify_block(item, block, digest, || path(item.object)).map_err(|error| error.to_string()),
            Err(fault) => Err(format!("{:?} in {}, block {block}: {fault}", item.name(), path(item.object))),
        };
        match verified {
            Ok(()) => piece.blocks = 1,
            Err(problem) => piece.problems.push(problem),
        }
    }
    piece
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
