//! Reading and checking everything that a checkpoint holds, within bounded memory.

mod encoded;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, StreamExt};
use strata_io::digest::{crc32, crc32_combine, xxh3};
use strata_io::{Error as IoError, Store};

use crate::container::{Frame, Placement, TensorSpec};
use crate::item::{Item, Kind, num_blocks};
use crate::layout;
use crate::load::{ReadStats, object_path, verify_block};
use crate::open::{Checkpoint, Source};
use crate::plan::{REQUEST_BYTES, block_range};
use crate::siblings::{Siblings, explained};

/// Ranges read at a time, of at most [`REQUEST_BYTES`] each.
const READS_AHEAD: usize = 4;

/// What a verification found.
#[derive(Debug, Default)]
pub struct Findings {
    /// One sentence for each damage.
    pub problems: Vec<String>,
    /// One sentence for each object that could not be looked at, or not whole: nobody knows whether it is damaged.
    pub unchecked: Vec<String>,
}

impl Findings {
    /// Files a store's failure under what it means.
    fn add(&mut self, error: &IoError, sentence: String) {
        match error {
            IoError::NotFound { .. } | IoError::Mismatch { .. } => self.problems.push(sentence),
            _ => self.unchecked.push(sentence),
        }
    }
}

/// Reads and checks every block, frame and inline payload, `.metadata` excepted.
///
/// Stock checkpoints: the CRC of each archive's tensor, where it has one; call [`crate::stock::resolve`] first.
pub async fn verify(store: &dyn Store, checkpoint: &Checkpoint) -> (ReadStats, Findings) {
    let mut findings = Findings::default();
    findings.problems.extend(checkpoint.lost_manifest(store.url()));
    let siblings = match Siblings::of(store, &checkpoint.manifest) {
        Ok(siblings) => siblings,
        Err(error) => {
            findings.problems.push(error.to_string());
            return (ReadStats::default(), findings);
        }
    };
    let sizes = object_sizes(store, &siblings, checkpoint, &mut findings).await;
    let base = |item: &Item| item.encoding.as_ref().and_then(|encoding| encoding.base.clone());
    let is_there = |item: &&Item| {
        let end_of_base = base(item).map(|base| (base.object, base.offset + item.payload_bytes));
        let ends = [(item.object, item.item_offset + item.item_bytes)].into_iter().chain(end_of_base);
        ends.into_iter().all(|(object, end)| end <= sizes[object as usize])
    };
    let all = checkpoint.manifest.items.all();
    let items: Vec<&Item> = unique_items(&all).into_iter().filter(is_there).collect();
    let checks = items.iter().flat_map(|item| pieces(item).into_iter().map(move |piece| (*item, piece)));
    let checks: Vec<_> =
        checks.map(|(item, range)| check_piece(store, &siblings, checkpoint, item, range).boxed()).collect();
    let mut results = stream::iter(checks).buffered(READS_AHEAD);
    let mut stats = ReadStats::default();
    let mut whole = WholeCrcs::default();
    let mut unreadable = HashSet::new();
    while let Some(piece) = results.next().await {
        stats.requests += 1;
        if let Some(error) = &piece.failed {
            // One sentence an object: what refuses one read most often refuses all.
            if unreadable.insert(piece.item.object) {
                findings.add(error, format!("{:?}: {error}", piece.item.name()));
            }
            continue;
        }
        stats.bytes_read += piece.bytes;
        stats.blocks_verified += piece.blocks;
        findings.problems.extend(piece.problems);
        whole.add(piece.item, piece.crc32, piece.payload_bytes);
    }
    // What was not read whole has been said.
    let read_whole = whole.crcs.into_iter().filter(|(item, _)| !unreadable.contains(&item.object));
    for (item, found) in read_whole.filter(|(item, _)| item.digests.is_empty()) {
        check_whole(checkpoint, item, found, &mut stats, &mut findings);
    }
    findings.problems.extend(all.iter().filter_map(inline_problem));
    (stats, findings)
}

/// Real size of each object; one that is missing, shorter than its items need, or of ours longer than it was written,
/// is a problem, named once.
async fn object_sizes(
    store: &dyn Store,
    siblings: &Siblings,
    checkpoint: &Checkpoint,
    findings: &mut Findings,
) -> Vec<u64> {
    let mut sizes = Vec::new();
    for (number, object) in checkpoint.manifest.objects.iter().enumerate() {
        let size = siblings.place(store, object).size(&object.name).await;
        match &size {
            Ok(size) if *size == object.size || (*size > object.size && checkpoint.source != Source::Strata) => {}
            Ok(size) => {
                let path = object_path(store.url(), checkpoint, number as u32);
                findings.problems.push(format!("{path}: expected {} bytes, found {size}", object.size));
            }
            Err(error) => findings.add(error, explained(error.clone(), store.url(), object).to_string()),
        }
        sizes.push(size.unwrap_or(0));
    }
    sizes
}

/// Each payload once, in the order of the objects.
fn unique_items(items: &[Item]) -> Vec<&Item> {
    let unique: BTreeMap<(u32, u64, u64), &Item> =
        items.iter().map(|item| ((item.object, item.item_offset, item.item_bytes), item)).collect();
    unique.into_values().collect()
}

/// An item's bytes in ranges of the payload that hold whole blocks; the frame goes with the first and the last.
fn pieces(item: &Item) -> Vec<Range<u64>> {
    if item.encoding.is_some() {
        return (0..num_blocks(item.payload_bytes)).map(|block| block_range(block, item.payload_bytes)).collect();
    }
    let count = item.payload_bytes.div_ceil(REQUEST_BYTES).max(1);
    (0..count).map(|i| i * REQUEST_BYTES..((i + 1) * REQUEST_BYTES).min(item.payload_bytes)).collect()
}

struct Piece<'a> {
    item: &'a Item,
    bytes: u64,
    payload_bytes: u64,
    crc32: u32,
    blocks: u64,
    problems: Vec<String>,
    failed: Option<IoError>,
}

async fn check_piece<'a>(
    store: &dyn Store,
    siblings: &Siblings,
    checkpoint: &Checkpoint,
    item: &'a Item,
    payload: Range<u64>,
) -> Piece<'a> {
    if let Some(encoding) = &item.encoding {
        return encoded::check_block((store, siblings, checkpoint), item, encoding, payload).await;
    }
    let stored = &checkpoint.manifest.objects[item.object as usize];
    let object = || object_path(store.url(), checkpoint, item.object);
    let start = if payload.start == 0 { item.item_offset } else { item.payload_offset() + payload.start };
    let is_last = payload.end == item.payload_bytes;
    let end = if is_last { item.item_offset + item.item_bytes } else { item.payload_offset() + payload.end };
    let mut piece = Piece {
        item,
        bytes: end - start,
        payload_bytes: payload.end - payload.start,
        crc32: 0,
        blocks: 0,
        problems: Vec::new(),
        failed: None,
    };
    let bytes = match siblings.place(store, stored).read(&stored.name, Some(start..end)).await {
        Ok(bytes) => bytes,
        Err(error) => {
            piece.failed = Some(error);
            return piece;
        }
    };
    let at = (item.payload_offset() + payload.start - start) as usize;
    let body = bytes.slice(at..at + piece.payload_bytes as usize);
    piece.crc32 = crc32(&body);
    if checkpoint.source == Source::Strata {
        let first = payload.start / strata_io::digest::BLOCK_BYTES;
        for block in first..first + num_blocks(piece.payload_bytes) {
            let range = block_range(block, item.payload_bytes);
            let block_bytes = &body[(range.start - payload.start) as usize..(range.end - payload.start) as usize];
            match verify_block(item, block, xxh3(block_bytes), object) {
                Ok(()) => piece.blocks += 1,
                Err(error) => piece.problems.push(error.to_string()),
            }
        }
        let head = (payload.start == 0).then(|| bytes.slice(..at));
        let tail = is_last.then(|| bytes.slice(at + body.len()..));
        piece
            .problems
            .extend(frame_problem(item, head, tail).map(|what| format!("{:?} in {}: {what}", item.name(), object())));
    }
    piece
}

/// Compares the CRC that was `found` of a payload without digests with that of its archive, where it has one.
fn check_whole(checkpoint: &Checkpoint, item: &Item, found: u32, stats: &mut ReadStats, findings: &mut Findings) {
    match item.whole_crc32 {
        None => stats.unverified_bytes += item.payload_bytes,
        Some(expected) if expected == found => stats.blocks_verified += num_blocks(item.payload_bytes),
        Some(expected) => findings.problems.push(format!(
            "{:?} in {}: expected crc32 {expected:#010x}, found {found:#010x}",
            item.name(),
            checkpoint.manifest.path_of(item.object)
        )),
    }
}

/// What stock torch reads around a payload is made anew and compared: our digests do not cover it.
fn frame_problem(item: &Item, head: Option<Bytes>, tail: Option<Bytes>) -> Option<&'static str> {
    if item.kind != Kind::Tensor {
        return None;
    }
    let spec = TensorSpec {
        dtype: &item.dtype,
        shape: &item.shape,
        strides: &item.strides,
        payload_bytes: item.payload_bytes,
    };
    let align =
        if item.payload_bytes < layout::ALIGNED_PAYLOAD_BYTES { layout::ITEM_ALIGN } else { layout::DIRECT_ALIGN };
    let place = Placement { item_offset: item.item_offset, align, residue: item.payload_offset() % align };
    let Ok(frame) = Frame::new(&spec, place) else {
        return Some("its frame cannot be made");
    };
    let crc = item.digests.iter().enumerate().fold(0, |crc, (block, digest)| {
        let range = block_range(block as u64, item.payload_bytes);
        crc32_combine(crc, digest.crc32, range.end - range.start)
    });
    if head.is_some_and(|head| head != frame.prefix()) {
        return Some("the archive's head, which stock torch reads, is damaged");
    }
    tail.is_some_and(|tail| tail != frame.suffix(crc))
        .then_some("the archive's tail, which stock torch reads, is damaged")
}

fn inline_problem(item: &Item) -> Option<String> {
    let inline = item.inline.as_ref()?;
    let expected = item.digests.get(0).map_or(xxh3(b""), |digest| digest.xxh3);
    (xxh3(inline) != expected).then(|| format!("{:?}: the manifest's copy differs from the written value", item.name()))
}

/// CRCs of payloads whose pieces arrive in order.
#[derive(Default)]
struct WholeCrcs<'a> {
    crcs: Vec<(&'a Item, u32)>,
}

impl<'a> WholeCrcs<'a> {
    fn add(&mut self, item: &'a Item, crc: u32, bytes: u64) {
        match self.crcs.last_mut() {
            Some((last, whole)) if std::ptr::eq(*last, item) => *whole = crc32_combine(*whole, crc, bytes),
            _ => self.crcs.push((item, crc)),
        }
    }
}
