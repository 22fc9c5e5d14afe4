//! Reading regions of tensors into the caller's memory, every block verified.

mod check;
mod encoded;
mod together;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use strata_io::Store;
use strata_io::digest::DigestKind;
use strata_io::lent::LentMut;
use strata_io::schedule::ByteBudget;
use tokio::task::JoinSet;

use self::check::Checks;
pub(crate) use self::check::{mismatch, verify_block};
pub use self::together::{Piece, Round, Together};
use crate::bounce::{self, Bounce};
use crate::destination::{Destination, watch};
use crate::geometry::StridedCopy;
use crate::open::{Checkpoint, Source};
use crate::plan::{BlockRead, Request, joined, needed_blocks};
use crate::progress::Progress;
use crate::siblings::{Siblings, explained};
use crate::{Error, Result};

/// One region of one row, and the memory that it fills.
#[derive(Clone)]
pub struct TensorRead {
    /// Row of the checkpoint.
    pub row: usize,
    /// Where its bytes go.
    pub destination: Destination,
}

/// When bytes are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyMode {
    /// In the destination: after an error it holds anything.
    InPlace,
    /// Before they reach it, at the price of a copy.
    Before,
}

/// Where a checkpoint is read from, and how far its reads have come.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The checkpoint's place.
    pub store: Arc<dyn Store>,
    /// Memory that reads in flight may take.
    pub budget: ByteBudget,
    /// Of all reads together.
    pub progress: Arc<Progress>,
}

/// What a read cost and what it checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Ranges that were read.
    pub requests: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// Blocks whose digest was compared.
    pub blocks_verified: u64,
    /// Bytes for which there is no digest: parts of stock items.
    pub unverified_bytes: u64,
}

/// Reads `tensors` into memory and `blobs` into buffers of their own.
///
/// # Errors
/// The first failure, after every operation that could touch a destination has ended.
///
/// # Cancel safety
/// A dropped read may still write to destinations until their leases are dropped.
pub async fn read(
    reading: &Reading,
    checkpoint: Arc<Checkpoint>,
    tensors: Vec<TensorRead>,
    blobs: &[usize],
    mode: VerifyMode,
) -> Result<(Vec<Bytes>, ReadStats)> {
    let items = &checkpoint.manifest.items;
    let sizes = blob_bytes(&*reading.store, &checkpoint, blobs).await?;
    let mut buffers: Vec<LentMut> = sizes.into_iter().map(|bytes| LentMut::owned(bytes as usize)).collect();
    let blob_reads = blobs.iter().zip(&mut buffers).map(|(row, buffer)| (*row, whole(buffer)));
    let wanted: Vec<(usize, Destination)> =
        tensors.into_iter().map(|read| (read.row, read.destination)).chain(blob_reads).collect();
    let (inline, stored): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|(row, _)| items[*row].inline.is_some());
    for (row, destination) in &inline {
        destination.scatter(0, items[*row].inline.as_deref().expect("partitioned so"))?;
    }
    let requests = joined(needed_blocks(items, &stored));
    let job = Arc::new(Job::new(reading.store.clone(), checkpoint, stored, mode, Arc::default())?);
    let mut stats = run(&job, reading, requests).await?;
    let (verified, unverified) = job.checks.settle(&job.checkpoint, job.store.url())?;
    stats.blocks_verified = verified;
    stats.unverified_bytes = unverified;
    Ok((buffers.iter().map(|buffer| Bytes::copy_from_slice(buffer.as_slice())).collect(), stats))
}

/// Lengths of the payloads of `blobs`, in bytes.
///
/// A `.metadata` can claim any length: memory is asked for only once the object is known to be that long.
///
/// # Errors
/// [`Error::Manifest`] if an object is shorter than its items; what the store says.
pub async fn blob_bytes(store: &dyn Store, checkpoint: &Checkpoint, blobs: &[usize]) -> Result<Vec<u64>> {
    let mut needed: BTreeMap<u32, u64> = BTreeMap::new();
    let items = blobs.iter().map(|row| &checkpoint.manifest.items[*row]).filter(|item| item.inline.is_none());
    for item in items {
        let end = needed.entry(item.object).or_default();
        *end = (*end).max(item.item_offset + item.item_bytes);
    }
    let siblings = Siblings::of(store, &checkpoint.manifest)?;
    for (number, end) in needed {
        let object = &checkpoint.manifest.objects[number as usize];
        let size = siblings.place(store, object).size(&object.name).await;
        let size = size.map_err(|error| explained(error, store.url(), object))?;
        if size < end {
            let detail = format!("expected at least {end} bytes, found {size}");
            return Err(Error::Manifest { object: object_path(store.url(), checkpoint, number), detail });
        }
    }
    Ok(blobs.iter().map(|row| checkpoint.manifest.items[*row].payload_bytes).collect())
}

/// A destination that takes a payload as it is.
fn whole(buffer: &mut LentMut) -> Destination {
    let copy = StridedCopy::of_bytes(0..buffer.len() as u64);
    Destination::of_buffer(buffer, copy)
}

/// Everything that the requests of one read share.
struct Job {
    store: Arc<dyn Store>,
    siblings: Siblings,
    checkpoint: Arc<Checkpoint>,
    stored: Vec<(usize, Destination)>,
    /// Which of `stored` may share memory with another: those are filled one at a time, from buffers.
    shared: Vec<bool>,
    filling: Mutex<()>,
    mode: VerifyMode,
    checks: Arc<Checks>,
}

async fn run(job: &Arc<Job>, reading: &Reading, requests: Vec<Request>) -> Result<ReadStats> {
    let mut running: JoinSet<Result<()>> = JoinSet::new();
    let mut stats = ReadStats::default();
    let mut first_error = None;
    reading.progress.plan(requests.iter().map(|request| job.bytes_of(request)).sum());
    for request in requests {
        let bytes = job.bytes_of(&request);
        // What bounces of it is not known yet: at most all of it, in one buffer.
        let decoded = if request.is_encoded() { request.payload_bytes() } else { 0 };
        let permit = reading.budget.take(bounce::buffer_bytes(bytes) + decoded).await;
        while let Some(done) = running.try_join_next() {
            first_error = first_error.or(done.expect("a read does not panic").err());
        }
        if first_error.is_some() {
            break;
        }
        stats.requests += 1 + job.bases(&request).count() as u64;
        stats.bytes_read += bytes;
        let (job, progress) = (job.clone(), reading.progress.clone());
        running.spawn(async move {
            let _permit = permit;
            if request.is_encoded() {
                encoded::read_request(job, request).await?;
            } else {
                read_request(job, request).await?;
            }
            progress.moved(bytes);
            Ok(())
        });
    }
    // Never aborted: an aborted wait does not end a running read, and the memory goes back to its owner after this.
    while let Some(done) = running.join_next().await {
        first_error = first_error.or(done.expect("a read does not panic").err());
    }
    first_error.map_or(Ok(stats), Err)
}

/// Which destinations reach into the range of addresses of another one.
fn shared_memory(stored: &[(usize, Destination)]) -> Vec<bool> {
    let extents: Vec<_> = stored.iter().map(|(_, destination)| destination.extent()).collect();
    let mut order: Vec<usize> = (0..stored.len()).filter(|i| !extents[*i].is_empty()).collect();
    order.sort_by_key(|i| extents[*i].start);
    let mut shared = vec![false; stored.len()];
    let mut furthest: Option<usize> = None;
    for i in order {
        if let Some(before) = furthest.filter(|before| extents[i].start < extents[*before].end) {
            shared[i] = true;
            shared[before] = true;
        }
        if furthest.is_none_or(|before| extents[i].end > extents[before].end) {
            furthest = Some(i);
        }
    }
    shared
}

/// Where the bytes of one block were read to.
struct Landed {
    block: BlockRead,
    /// Position among the request's targets.
    target: usize,
    memory: LentMut,
    direct: bool,
}

async fn read_request(job: Arc<Job>, request: Request) -> Result<()> {
    let object = &job.checkpoint.manifest.objects[request.object as usize];
    let (targets, landed, buffer) = place(&job, &request);
    let place = job.siblings.place(&*job.store, object);
    let digests = place.read_digested(&object.name, request.range.clone(), targets, job.digest_kind()).await;
    let digests = digests.map_err(|error| named(error, job.store.url(), object))?;
    for landed in &landed {
        check(&job, &landed.block, digests[landed.target])?;
    }
    let Some(buffer) = buffer else { return Ok(()) };
    let bounced: Vec<Landed> = landed.into_iter().filter(|landed| !landed.direct).collect();
    if bounced.is_empty() {
        bounce::give(buffer); // it took only what lies between the blocks
        return Ok(());
    }
    let scatter = move || {
        for Landed { block, memory, .. } in &bounced {
            job.scatter(block, memory.as_slice())?;
        }
        drop(bounced);
        bounce::give(buffer);
        Ok(())
    };
    tokio::task::spawn_blocking(scatter).await.expect("a copy does not panic")
}

impl Job {
    fn new(
        store: Arc<dyn Store>,
        checkpoint: Arc<Checkpoint>,
        stored: Vec<(usize, Destination)>,
        mode: VerifyMode,
        checks: Arc<Checks>,
    ) -> Result<Self> {
        let siblings = Siblings::of(&*store, &checkpoint.manifest)?;
        let shared = shared_memory(&stored);
        Ok(Self { store, siblings, checkpoint, stored, shared, filling: Mutex::new(()), mode, checks })
    }

    /// Copies the block's `bytes` to every destination that takes some of them. Blocks.
    fn scatter(&self, block: &BlockRead, bytes: &[u8]) -> Result<()> {
        for index in &block.destinations {
            let _alone = self.shared[*index].then(|| self.filling.lock().expect("a copy does not panic"));
            self.stored[*index].1.scatter(block.payload.start, bytes)?;
        }
        Ok(())
    }

    /// Bytes that `request` takes from the stores.
    fn bytes_of(&self, request: &Request) -> u64 {
        let bases = self.bases(request).map(|range| range.end - range.start);
        request.range.end - request.range.start + bases.sum::<u64>()
    }

    /// What the blocks of `request` were XORed with, each in its object.
    fn bases<'a>(&'a self, request: &'a Request) -> impl Iterator<Item = Range<u64>> + 'a {
        let encoded = request.blocks.iter().filter(|block| block.is_encoded);
        encoded.filter_map(|block| {
            let item = &self.checkpoint.manifest.items[block.row];
            let (range, _) = item.encoding.as_ref()?.base.as_ref()?.block(block.block, item.payload_bytes)?;
            Some(range)
        })
    }

    /// The destination of all of a block, if it may be filled before what goes there is verified.
    fn direct(&self, block: &BlockRead) -> Option<LentMut> {
        match (self.mode, block.destinations.as_slice()) {
            (VerifyMode::InPlace, [only]) if !self.shared[*only] => self.stored[*only].1.direct(block.payload.clone()),
            _ => None,
        }
    }

    /// What the store takes on the way: the digest that there is to compare with.
    fn digest_kind(&self) -> DigestKind {
        match self.checkpoint.source {
            Source::Strata => DigestKind::Xxh3,
            Source::Stock(_) => DigestKind::Crc32,
            Source::Plain => DigestKind::None,
        }
    }
}

fn check(job: &Job, block: &BlockRead, digest: u128) -> Result<()> {
    let item = &job.checkpoint.manifest.items[block.row];
    if item.digests.is_empty() {
        job.checks.note_unverified(block, digest as u32);
        return Ok(());
    }
    let object = || object_path(job.store.url(), &job.checkpoint, item.object);
    verify_block(item, block.block, digest, object)?;
    job.checks.note_verified();
    Ok(())
}

/// An object of the checkpoint at `url`, for messages.
pub(crate) fn object_path(url: &str, checkpoint: &Checkpoint, object: u32) -> String {
    format!("{url}/{}", checkpoint.manifest.path_of(object))
}

fn named(error: strata_io::Error, own: &str, object: &crate::item::Object) -> Error {
    match error {
        strata_io::Error::Mismatch { object: url, expected, found } => {
            let detail = format!("expected {expected}, found {found} (the manifest says {} bytes)", object.size);
            Error::Manifest { object: url, detail }
        }
        error => explained(error, own, object),
    }
}

/// Memory for every byte of the request, in order: destinations where a block fits in one piece, a kept buffer for
/// the rest and the gaps.
fn place(job: &Job, request: &Request) -> (Vec<LentMut>, Vec<Landed>, Option<Bounce>) {
    let directs: Vec<Option<LentMut>> = request.blocks.iter().map(|block| job.direct(block)).collect();
    let direct_bytes: u64 = directs.iter().flatten().map(|memory| memory.len() as u64).sum();
    let bounced = request.range.end - request.range.start - direct_bytes;
    let mut destinations = request.blocks.iter().flat_map(|block| &block.destinations);
    let device = destinations.find_map(|index| job.stored[*index].1.device());
    let buffer = (bounced > 0).then(|| bounce::take(bounced, device));
    let mut free = buffer.as_ref().map(|buffer| watch(buffer.memory()));
    let mut cut = |bytes: u64| free.as_mut().expect("sized for all that bounces").split_to(bytes as usize);

    let (mut targets, mut landed) = (Vec::new(), Vec::new());
    let mut at = request.range.start;
    for (block, direct) in request.blocks.iter().zip(directs) {
        if block.file.start > at {
            targets.push(cut(block.file.start - at));
        }
        let is_direct = direct.is_some();
        let memory = direct.unwrap_or_else(|| cut(block.file.end - block.file.start));
        let target = targets.len();
        landed.push(Landed { block: block.clone(), target, memory: watch(&memory), direct: is_direct });
        targets.push(memory);
        at = block.file.end;
    }
    (targets, landed, buffer)
}
