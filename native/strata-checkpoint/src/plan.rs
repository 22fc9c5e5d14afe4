//! Which ranges to read for what is wanted. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use strata_io::digest::BLOCK_BYTES;

use crate::destination::Destination;
use crate::manifest::Items;

/// Neighbouring blocks are read in one request up to this size: large enough that a request's latency is paid
/// for, small enough that several are in flight within a modest budget.
pub(crate) const REQUEST_BYTES: u64 = 16 << 20;

/// Bytes that are read and thrown away rather than starting another request.
const GAP_BYTES: u64 = 64 << 10;

/// One block of a payload, and where its bytes go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockRead {
    /// Row of an item with this payload.
    pub row: usize,
    /// Position among the payload's blocks.
    pub block: u64,
    /// Bytes of the payload.
    pub payload: Range<u64>,
    /// Whether it is stored encoded.
    pub is_encoded: bool,
    /// The same bytes in the object; of an encoded payload the block's frame.
    pub file: Range<u64>,
    /// Indices of the destinations that need some of it.
    pub destinations: Vec<usize>,
}

/// One range of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub object: u32,
    pub range: Range<u64>,
    /// In the order of the file, without overlap.
    pub blocks: Vec<BlockRead>,
}

impl Request {
    /// Whether its blocks are stored encoded: all are, or none.
    pub fn is_encoded(&self) -> bool {
        self.blocks[0].is_encoded
    }

    /// What its blocks hold, in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.payload.end - block.payload.start).sum()
    }
}

/// Blocks, each with its object, as few requests.
pub(crate) fn joined(mut blocks: Vec<(u32, BlockRead)>) -> Vec<Request> {
    blocks.sort_by_key(|(object, block)| (*object, block.file.start));
    let mut requests: Vec<Request> = Vec::new();
    for (object, block) in blocks {
        match requests.last_mut().filter(|request| joins(request, object, &block)) {
            Some(request) => {
                request.range.end = block.file.end;
                request.blocks.push(block);
            }
            None => requests.push(Request { object, range: block.file.clone(), blocks: vec![block] }),
        }
    }
    requests
}

fn joins(request: &Request, object: u32, block: &BlockRead) -> bool {
    request.object == object
        && request.is_encoded() == block.is_encoded
        && (!block.is_encoded || request.payload_bytes() + (block.payload.end - block.payload.start) <= REQUEST_BYTES)
        && block.file.start >= request.range.end
        && block.file.start - request.range.end <= GAP_BYTES
        && block.file.end - request.range.start <= REQUEST_BYTES
}

/// The blocks that `wanted` needs, each with its object.
///
/// Tied tensors share a payload: it is read once however many names want it.
pub(crate) fn needed_blocks(items: &Items, wanted: &[(usize, Destination)]) -> Vec<(u32, BlockRead)> {
    let mut payloads: BTreeMap<(u32, u64, u64), (usize, Vec<usize>)> = BTreeMap::new();
    for (index, (row, destination)) in wanted.iter().enumerate() {
        let item = &items[*row];
        let key = (item.object, item.payload_offset(), item.payload_bytes);
        let (_, sharers) = payloads.entry(key).or_insert_with(|| (*row, Vec::new()));
        if !sharers.iter().any(|other| wanted[*other].1.same_as(destination)) {
            sharers.push(index);
        }
    }
    let mut blocks = Vec::new();
    for ((object, _, bytes), (row, sharers)) in payloads {
        let mut needed: BTreeMap<u64, (Range<u64>, Vec<usize>)> = BTreeMap::new();
        for index in sharers {
            let range = wanted[index].1.source_range();
            for block in range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES) {
                let whole = block_range(block, bytes);
                if wanted[index].1.needs(whole.clone()) {
                    let part = range.start.max(whole.start)..range.end.min(whole.end);
                    let (read, destinations) = needed.entry(block).or_insert((part.clone(), Vec::new()));
                    *read = read.start.min(part.start)..read.end.max(part.end);
                    destinations.push(index);
                }
            }
        }
        let is_encoded = items[row].encoding.is_some();
        let has_digest = !items[row].digests.is_empty() || items[row].whole_crc32.is_some();
        blocks.extend(needed.into_iter().map(|(block, (part, destinations))| {
            // A digest covers the whole block; where there is none, what is wanted suffices.
            let payload = if has_digest { block_range(block, bytes) } else { part };
            let file = items[row].stored_range(block, &payload);
            (object, BlockRead { row, block, payload, is_encoded, file, destinations })
        }));
    }
    blocks
}

/// Bytes of block number `block` in a payload of `payload_bytes`.
pub(crate) fn block_range(block: u64, payload_bytes: u64) -> Range<u64> {
    block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(payload_bytes)
}
