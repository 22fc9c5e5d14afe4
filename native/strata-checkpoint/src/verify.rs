//! Reading and checking everything that a checkpoint holds, within bounded memory.

mod encoded;
mod spans;

use std::collections::{BTreeMap, HashSet};

use futures::FutureExt;
use futures::stream::{self, StreamExt};
use strata_io::digest::{DigestKind, crc32_combine, xxh3};
use strata_io::lent::LentMut;
use strata_io::{Error as IoError, Store};

use self::encoded::Block;
use self::spans::{Part, Span, spans};
use crate::bounce;
use crate::container::{Frame, Placement, TensorSpec};
use crate::destination::watch;
use crate::item::{Item, Kind, num_blocks};
use crate::load::{ReadStats, object_path, verify_block};
use crate::names::is_our_safetensors;
use crate::open::{Checkpoint, Source};
use crate::plan::block_range;
use crate::progress::Progress;
use crate::siblings::{Siblings, explained};
use crate::{layout, servable};

/// Reads at a time: as many as there are buffers kept.
const READS_AHEAD: usize = 8;

/// Sizes asked for at a time.
const SIZES_AHEAD: usize = 16;

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
pub async fn verify(store: &dyn Store, checkpoint: &Checkpoint, progress: &Progress) -> (ReadStats, Findings) {
    let mut tally = Tally::default();
    tally.findings.problems.extend(checkpoint.lost_manifest(store.url()));
    let siblings = match Siblings::of(store, &checkpoint.manifest) {
        Ok(siblings) => siblings,
        Err(error) => {
            tally.findings.problems.push(error.to_string());
            return (tally.stats, tally.findings);
        }
    };
    let place = Place { store, siblings: &siblings, checkpoint };
    let sizes = place.object_sizes(&mut tally.findings).await;
    let all = checkpoint.manifest.items.all();
    let items = unique_items(&all).into_iter().filter(|item| is_within(item, &sizes));
    let (encoded, plain): (Vec<&Item>, Vec<&Item>) = items.partition(|item| item.encoding.is_some());
    let spans = spans(&plain, |item| place.is_zero_between(item));
    let blocks = encoded::blocks(&encoded);
    progress.plan(spans.iter().map(Span::bytes).sum::<u64>() + blocks.iter().map(Block::bytes).sum::<u64>());
    let of_spans = spans.iter().map(|span| place.check(span).boxed());
    let checks: Vec<_> = of_spans.chain(blocks.iter().map(|block| place.check_block(block).boxed())).collect();
    let mut results = stream::iter(checks).buffered(READS_AHEAD);
    while let Some(checked) = results.next().await {
        progress.moved(checked.bytes);
        tally.add(checked);
    }
    tally.settle(checkpoint);
    tally.findings.problems.extend(all.iter().filter_map(inline_problem));
    place.check_heads(&all, &sizes, &mut tally).await;
    (tally.stats, tally.findings)
}

/// What was found so far.
#[derive(Default)]
struct Tally<'a> {
    stats: ReadStats,
    findings: Findings,
    /// CRCs of payloads whose blocks have no digests; their pieces come in order.
    whole_crcs: Vec<(&'a Item, u32)>,
    /// Objects of which a read has failed.
    unreadable: HashSet<u32>,
}

impl<'a> Tally<'a> {
    fn add(&mut self, checked: Checked<'a>) {
        self.stats.requests += 1;
        if let Some(error) = &checked.failed {
            // One sentence an object: what refuses one read most often refuses all.
            if self.unreadable.insert(checked.first.object) {
                self.findings.add(error, format!("{:?}: {error}", checked.first.name()));
            }
            return;
        }
        self.stats.bytes_read += checked.bytes;
        self.stats.blocks_verified += checked.blocks;
        self.findings.problems.extend(checked.problems);
        for (part, crc32) in checked.crcs {
            match self.whole_crcs.last_mut() {
                Some((last, whole)) if std::ptr::eq(*last, part.item) => {
                    *whole = crc32_combine(*whole, crc32, part.payload.end - part.payload.start);
                }
                _ => self.whole_crcs.push((part.item, crc32)),
            }
        }
    }

    /// Compares the CRCs of whole payloads with those of their archives, where they have one.
    fn settle(&mut self, checkpoint: &Checkpoint) {
        for (item, found) in std::mem::take(&mut self.whole_crcs) {
            if self.unreadable.contains(&item.object) {
                continue; // not read whole, which has been said
            }
            match item.whole_crc32 {
                None => self.stats.unverified_bytes += item.payload_bytes,
                Some(expected) if expected == found => self.stats.blocks_verified += num_blocks(item.payload_bytes),
                Some(expected) => self.findings.problems.push(format!(
                    "{:?} in {}: expected crc32 {expected:#010x}, found {found:#010x}",
                    item.name(),
                    checkpoint.manifest.path_of(item.object)
                )),
            }
        }
    }
}

/// Each payload once, in the order of the objects.
fn unique_items(items: &[Item]) -> Vec<&Item> {
    let unique: BTreeMap<(u32, u64, u64), &Item> =
        items.iter().map(|item| ((item.object, item.item_offset, item.item_bytes), item)).collect();
    unique.into_values().collect()
}

/// Whether an item, and what it was XORed with, lie within their objects, which have these sizes.
fn is_within(item: &Item, sizes: &[u64]) -> bool {
    let base = item.encoding.as_ref().and_then(|encoding| encoding.base.as_ref());
    let end_of_base = base.map(|base| (base.object, base.offset + item.payload_bytes));
    let mut ends = [(item.object, item.item_offset + item.item_bytes)].into_iter().chain(end_of_base);
    ends.all(|(object, end)| end <= sizes[object as usize])
}

/// What was found in bytes that were read at once.
struct Checked<'a> {
    /// The first item in them.
    first: &'a Item,
    bytes: u64,
    /// Of payloads whose blocks have no digests.
    crcs: Vec<(&'a Part<'a>, u32)>,
    blocks: u64,
    problems: Vec<String>,
    failed: Option<IoError>,
}

impl<'a> Checked<'a> {
    fn of(first: &'a Item, bytes: u64) -> Self {
        Self { first, bytes, crcs: Vec::new(), blocks: 0, problems: Vec::new(), failed: None }
    }
}

/// Where the checkpoint's objects lie.
struct Place<'a> {
    store: &'a dyn Store,
    siblings: &'a Siblings,
    checkpoint: &'a Checkpoint,
}

impl Place<'_> {
    /// Real size of each object; one that is missing, shorter than its items need, or of ours longer than it was
    /// written, is a problem, named once.
    async fn object_sizes(&self, findings: &mut Findings) -> Vec<u64> {
        let Self { store, siblings, checkpoint } = *self;
        let objects = &checkpoint.manifest.objects;
        let asked: Vec<_> = objects.iter().map(|object| siblings.place(store, object).size(&object.name)).collect();
        let found: Vec<_> = stream::iter(asked).buffered(SIZES_AHEAD).collect().await;
        let mut sizes = Vec::new();
        for ((number, object), size) in objects.iter().enumerate().zip(found) {
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

    /// Whether what lies before an item, behind the one before it, is known to be zeros: objects of others may hold
    /// items there that are not in this manifest, and stock's anything.
    fn is_zero_between(&self, item: &Item) -> bool {
        let object = &self.checkpoint.manifest.objects[item.object as usize];
        self.checkpoint.source == Source::Strata && object.is_own() && !is_our_safetensors(&object.name)
    }

    /// Reads a span, digested on the way, and compares.
    async fn check<'a>(&self, span: &'a Span<'a>) -> Checked<'a> {
        let mut checked = Checked::of(span.parts[0].item, span.bytes());
        let object = &self.checkpoint.manifest.objects[span.object as usize];
        let is_ours = self.checkpoint.source == Source::Strata;
        let kind = if is_ours { DigestKind::Xxh3 } else { DigestKind::Crc32 };
        let buffer = bounce::take(span.buffer_bytes(), None);
        let (targets, found) = span.cut(watch(buffer.memory()));
        let place = self.siblings.place(self.store, object);
        match place.read_digested(&object.name, span.range.clone(), targets, kind).await {
            Ok(digests) if is_ours => self.compare(span, &found, &digests, &mut checked),
            Ok(digests) => checked.crcs = span.parts.iter().zip(span.crcs(&digests)).collect(),
            Err(error) => checked.failed = Some(error),
        }
        drop(found);
        bounce::give(buffer);
        checked
    }

    fn compare(&self, span: &Span<'_>, found: &[LentMut], digests: &[u128], checked: &mut Checked<'_>) {
        let stored = &self.checkpoint.manifest.objects[span.object as usize];
        let object = || object_path(self.store.url(), self.checkpoint, span.object);
        for part in &span.parts {
            for (block, target) in part.blocks() {
                match verify_block(part.item, block, digests[target], object) {
                    Ok(()) => checked.blocks += 1,
                    Err(error) => checked.problems.push(error.to_string()),
                }
            }
            let is_zero = |target: usize| found[target].as_slice().iter().all(|byte| *byte == 0);
            if part.gap.is_some_and(|target| !is_zero(target)) {
                checked.problems.push(format!(
                    "{:?} in {}: the bytes before it are not zeros",
                    part.item.name(),
                    object()
                ));
            }
            let head = part.head.map(|target| found[target].as_slice());
            let tail = part.tail.map(|target| found[target].as_slice());
            let is_framed = part.item.kind == Kind::Tensor && !is_our_safetensors(&stored.name);
            let problem = if is_framed { frame_problem(part.item, head, tail) } else { None };
            checked.problems.extend(problem.map(|what| format!("{:?} in {}: {what}", part.item.name(), object())));
        }
    }

    /// Makes the head of each file of safetensors anew and compares it: our digests do not cover it.
    async fn check_heads(&self, items: &[Item], sizes: &[u64], tally: &mut Tally<'_>) {
        if self.checkpoint.source != Source::Strata {
            return;
        }
        for (number, object) in self.checkpoint.manifest.objects.iter().enumerate() {
            if !object.is_own() || !is_our_safetensors(&object.name) {
                continue;
            }
            let path = object_path(self.store.url(), self.checkpoint, number as u32);
            let inside = items.iter().filter(|item| item.object as usize == number && item.kind == Kind::Tensor);
            let Some(head) = servable::head_of(inside) else {
                tally.findings.problems.push(format!("{path}: no head of safetensors can say what is in it"));
                continue;
            };
            if sizes[number] < head.len() as u64 {
                continue; // it has been named
            }
            match self.store.read(&object.name, Some(0..head.len() as u64)).await {
                Ok(found) if found == head => {}
                Ok(_) => {
                    let what = "its head, which readers of safetensors need, is damaged";
                    tally.findings.problems.push(format!("{path}: {what}"));
                }
                Err(error) => tally.findings.add(&error, error.to_string()),
            }
            tally.stats.requests += 1;
            tally.stats.bytes_read += head.len() as u64;
        }
    }
}

/// What stock torch reads around a payload is made anew and compared: our digests do not cover it.
fn frame_problem(item: &Item, head: Option<&[u8]>, tail: Option<&[u8]>) -> Option<&'static str> {
    if head.is_none() && tail.is_none() {
        return None;
    }
    let spec = TensorSpec {
        dtype: &item.dtype,
        shape: &item.shape,
        strides: &item.strides,
        payload_bytes: item.payload_bytes,
    };
    let align = layout::residue(item.payload_bytes, 0).align;
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
