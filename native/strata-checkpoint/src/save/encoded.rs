//! Encoded payloads into objects of their own. How long they will be is not known before they are encoded, and a store
//! wants to know how long an object is: so an object is encoded into memory, while the one before it is written.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, Stream, StreamExt};
use strata_io::digest::{BlockDigest, crc32, xxh3};

use super::objects::{ObjectPlan, Segment};
use super::{SaveItem, Target};
use crate::bounce::{self, Bounce};
use crate::changed::{EarlierContent, read_base};
use crate::encoding::{Encoding, XorBase, encode_block, planes_of};
use crate::item::{Item, num_blocks};
use crate::payload;
use crate::plan::block_range;
use crate::record::RankRecord;
use crate::unchanged::Parent;
use crate::{Error, Result};

/// About as many objects as one rank makes; each is in memory until it is written.
const NUM_OBJECTS: u64 = 64;

/// An object ends with the payload that brings it to this size, and to its part of all; a payload is never cut.
const LEAST_OBJECT_BYTES: u64 = 64 << 20;
const MOST_OBJECT_BYTES: u64 = 512 << 20;

/// Blocks in work at least: of a base on an object store one waits longer than one compresses.
const BLOCKS: usize = 8;

/// One payload, and every item that it stands for.
struct Row {
    items: Vec<SaveItem>,
    base: Option<EarlierContent>,
}

/// One block, encoded.
struct Block {
    frame: Bytes,
    xxh3: u128,
    digest: BlockDigest,
    /// Of what it was XORed with; 0 for nothing.
    base: u128,
}

/// What one object will hold, and the rows of it.
struct Batch {
    plan: ObjectPlan,
    items: Vec<Item>,
    payload_bytes: u64,
}

impl Target<'_> {
    /// Writes `encoded` items and returns their rows, whose bases are among the parent's objects.
    pub(super) async fn write_encoded(
        &self,
        encoded: Vec<(SaveItem, Option<EarlierContent>)>,
        parent: &Arc<Parent>,
        record: &mut RankRecord,
    ) -> Result<Vec<Item>> {
        let rows = rows(encoded);
        let all: u64 = rows.iter().map(|row| row.items[0].payload.len()).sum();
        let object_bytes = (all / NUM_OBJECTS).clamp(LEAST_OBJECT_BYTES, MOST_OBJECT_BYTES);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut encoding = Vec::new();
        for row in &rows {
            let (item, base) = (&row.items[0], &row.base);
            let blocks = 0..num_blocks(item.payload.len());
            encoding.extend(blocks.map(|block| encode(parent, item.clone(), base.clone(), block).boxed()));
        }
        let mut blocks = stream::iter(encoding).buffered(BLOCKS.max(threads));
        let mut left = rows.iter();
        let mut written = Vec::new();
        let mut next = self.batch(&mut left, &mut blocks, object_bytes, record.objects.len()).await?;
        while let Some(Batch { plan, items, payload_bytes }) = next {
            self.progress.plan(plan.size);
            let number = record.objects.len() + 1;
            let batch = self.batch(&mut left, &mut blocks, object_bytes, number);
            let (put, batch) = tokio::join!(self.put_object(plan), batch);
            let (plan, _) = put?;
            let object = record.add_object(&plan);
            record.payload_bytes += payload_bytes;
            record.encoded_payload_bytes += payload_bytes;
            record.encoded_bytes += plan.size;
            written.extend(items.into_iter().map(|item| Item { object, ..item }));
            next = batch?;
        }
        Ok(written)
    }

    /// The next rows whose frames make an object; None if none is left.
    async fn batch<'a>(
        &self,
        left: &mut impl Iterator<Item = &'a Row>,
        blocks: &mut (impl Stream<Item = Result<Block>> + Unpin),
        object_bytes: u64,
        number: usize,
    ) -> Result<Option<Batch>> {
        let mut batch = Batch { plan: ObjectPlan::new(self.name(number)), items: Vec::new(), payload_bytes: 0 };
        while batch.plan.size < object_bytes {
            let Some(row) = left.next() else { break };
            let mut encoded = Vec::new();
            for _ in 0..num_blocks(row.items[0].payload.len()) {
                encoded.push(blocks.next().await.expect("one for each block")?);
            }
            batch.push(row, encoded)?;
        }
        Ok((!batch.items.is_empty()).then_some(batch))
    }
}

/// One for each payload: names of the same memory share one.
fn rows(encoded: Vec<(SaveItem, Option<EarlierContent>)>) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let mut known = HashMap::new();
    for (item, base) in encoded {
        let row = *known.entry(item.memory()).or_insert(rows.len());
        match rows.get_mut(row) {
            Some(row) => row.items.push(item),
            None => rows.push(Row { items: vec![item], base }),
        }
    }
    rows
}

async fn encode(parent: &Parent, item: SaveItem, base: Option<EarlierContent>, block: u64) -> Result<Block> {
    let (before, digest) = match base {
        None => (None, 0),
        Some(base) => {
            let before = read_base(parent, &base, block, item.payload.len()).await?;
            let digest = before.as_ref().map_or(0, |_| base.digests[block as usize]);
            (before, digest)
        }
    };
    let encode = move || encode_now(&item, block, before, digest);
    tokio::task::spawn_blocking(encode).await.expect("encoding does not panic")
}

/// Blocks.
fn encode_now(item: &SaveItem, block: u64, before: Option<Bounce>, base: u128) -> Result<Block> {
    let range = block_range(block, item.payload.len());
    let length = range.end - range.start;
    let bytes = &payload::on_host(length, &[(0, &item.payload, range)])?[0];
    let before_bytes = before.as_ref().map(|before| &before.memory().as_slice()[..length as usize]);
    let frame = encode_block(bytes, before_bytes, planes_of(&item.dtype));
    before.into_iter().for_each(bounce::give);
    let frame = Bytes::from_owner(frame);
    let digest = BlockDigest { crc32: crc32(bytes), xxh3: xxh3(bytes) };
    Ok(Block { xxh3: xxh3(&frame), frame, digest, base })
}

impl Batch {
    fn push(&mut self, row: &Row, blocks: Vec<Block>) -> Result<()> {
        let payload_bytes = row.items[0].payload.len();
        let base = row.base.as_ref().filter(|_| blocks.iter().any(|block| block.base != 0));
        let base = base.map(|base| XorBase {
            object: base.object,
            offset: base.offset,
            digests: blocks.iter().map(|block| block.base).collect(),
        });
        let frames = blocks.iter().map(|block| (block.frame.len() as u32, block.xxh3));
        let encoding = Arc::new(Encoding::new(frames, base, payload_bytes).map_err(Error::Plan)?);
        let digests: crate::item::Digests = blocks.iter().map(|block| block.digest).collect();
        let item_offset = self.plan.size; // frames are copied out of where they lie: none is aligned
        let item_bytes = encoding.stored_bytes();
        self.plan.size += item_bytes;
        self.plan.segments.extend(blocks.into_iter().map(|block| Segment::Fixed(block.frame)));
        self.payload_bytes += payload_bytes;
        self.items.extend(row.items.iter().map(|item| Item {
            item_offset,
            item_bytes,
            digests: digests.clone(),
            encoding: Some(encoding.clone()),
            ..item.clone().unplaced()
        }));
        Ok(())
    }
}
