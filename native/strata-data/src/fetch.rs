//! Begins reads, and keeps what is read as a whole. Ranges of plain shards are read as they are; those of a unit, a shard
//! of which nothing can be read without the whole, are copied out of it, so that samples that wait do not keep it.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt, Shared};
use strata_io::schedule::ByteBudget;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;

use crate::buffers::{Buffers, GRAIN_BYTES};
use crate::dataset::{Source, Unit};
use crate::formats::compression::{decompress, in_decompressed};
use crate::reads::Extent;
use crate::{Error, Result};

/// Small ranges that are read in one go: enough that to ask costs little beside it, and few enough that many go on.
const GROUP_BYTES: u64 = 512 << 10;

/// Bytes that come.
pub(crate) type Read = Shared<BoxFuture<'static, Result<Arc<Arrived>>>>;

/// Bytes that have come, and the room that they take until nobody needs them any more.
pub(crate) struct Arrived {
    pub bytes: Bytes,
    _permit: Arc<OwnedSemaphorePermit>,
}

/// The reads of one stream of batches. Dropped, it ends them.
pub(crate) struct Fetch {
    source: Source,
    buffers: Buffers,
    running: JoinSet<()>,
    /// Of units, those too that have just left `kept`. Only [`Fetch::unit`] takes of it, one after the other.
    budget: ByteBudget,
    /// Of `kept`, unless it is one alone. No more than the budget: what waits for room waits only for copies to end.
    max_bytes: u64,
    /// The unit that was used last at the end.
    kept: Vec<Kept>,
}

struct Kept {
    shard: u32,
    num_bytes: u64,
    whole: Read,
}

/// Ranges that are read together.
pub(crate) struct Ranges {
    ranges: Vec<Extent>,
    /// None for those that wait for their unit.
    begun: Vec<Option<Read>>,
    permit: Arc<OwnedSemaphorePermit>,
}

impl Fetch {
    /// Keeps `unit_bytes` of units, and `free_bytes` of memory that is free.
    pub fn new(source: Source, free_bytes: u64, unit_bytes: u64) -> Self {
        Self {
            source,
            buffers: Buffers::new(free_bytes as usize),
            running: JoinSet::new(),
            budget: ByteBudget::new(unit_bytes),
            max_bytes: unit_bytes,
            kept: Vec::new(),
        }
    }

    /// Begins to read all that is not in a unit that must be read first.
    pub fn begin(&mut self, ranges: Vec<Extent>, permit: Arc<OwnedSemaphorePermit>) -> Ranges {
        while self.running.try_join_next().is_some() {}
        let mut ranges = Ranges { begun: vec![None; ranges.len()], ranges, permit };
        let is_unit = |range: &Extent| self.source.index.shards()[range.shard as usize].unit.is_some();
        let plain: Vec<usize> = (0..ranges.ranges.len()).filter(|&at| !is_unit(&ranges.ranges[at])).collect();
        for group in groups(&plain, &ranges.ranges) {
            self.begin_group(&mut ranges, &group);
        }
        for at in 0..ranges.ranges.len() {
            let range = &ranges.ranges[at];
            if ranges.begun[at].is_none()
                && let Some(whole) = self.kept(range.shard)
            {
                // Before others are read, for which it may have to go.
                self.copy(&mut ranges, at, &whole);
            }
        }
        ranges
    }

    /// Begins to read ranges of one shard, in one go.
    fn begin_group(&mut self, ranges: &mut Ranges, group: &[usize]) {
        let extents: Vec<Extent> = group.iter().map(|&at| ranges.ranges[at].clone()).collect();
        let lengths: Vec<usize> = extents.iter().map(|extent| (extent.end - extent.start) as usize).collect();
        let (source, buffers) = (self.source.clone(), self.buffers.clone());
        let together = self.spawn(async move { read(&source, &buffers, &extents).await }, ranges.permit.clone());
        let mut start = 0;
        for (&at, length) in group.iter().zip(lengths) {
            let own = start..start + length;
            start = own.end;
            let piece = together.clone().map(move |arrived| {
                let arrived = arrived?;
                Ok(Arc::new(Arrived { bytes: arrived.bytes.slice(own), _permit: arrived._permit.clone() }))
            });
            ranges.begun[at] = Some(piece.boxed().shared());
        }
    }

    /// The read `at`, whose unit is read if it has to be: once for all of `ranges`.
    pub async fn read(&mut self, ranges: &mut Ranges, at: usize) -> Read {
        if ranges.begun[at].is_none() {
            let whole = self.unit(ranges.ranges[at].shard).await;
            self.copy(ranges, at, &whole);
        }
        ranges.begun[at].clone().expect("begun above")
    }

    /// Waits for all that was begun.
    pub async fn finish(mut self) {
        while self.running.join_next().await.is_some() {}
    }

    /// The unit that `shard` is, if it need not be read again.
    fn kept(&mut self, shard: u32) -> Option<Read> {
        let kept = self.kept.remove(self.kept.iter().position(|kept| kept.shard == shard)?);
        let whole = kept.whole.clone();
        if let Some(Err(_)) = whole.peek() {
            return None;
        }
        self.kept.push(kept);
        Some(whole)
    }

    /// Begins to read the unit that `shard` is, when there is room for it.
    async fn unit(&mut self, shard: u32) -> Read {
        let (size_bytes, unit) = {
            let shard = &self.source.index.shards()[shard as usize];
            (shard.size_bytes, shard.unit.expect("a unit"))
        };
        // In whole permits of the budget, or sums would differ.
        let num_bytes = (size_bytes + unit.size_bytes).next_multiple_of(GRAIN_BYTES as u64);
        let mut others: u64 = self.kept.iter().map(|kept| kept.num_bytes).sum();
        while !self.kept.is_empty() && others + num_bytes > self.max_bytes {
            others -= self.kept.remove(0).num_bytes;
        }
        let permit = Arc::new(self.budget.take(num_bytes).await);
        let (source, buffers) = (self.source.clone(), self.buffers.clone());
        let stored = Extent { shard, start: 0, end: size_bytes };
        let whole = self.spawn(async move { whole(&source, &buffers, stored, unit).await }, permit);
        self.kept.push(Kept { shard, num_bytes, whole: whole.clone() });
        whole
    }

    /// Begins all reads of the shard that the read `at` is of, from the `whole` of it.
    fn copy(&mut self, ranges: &mut Ranges, at: usize, whole: &Read) {
        let shard = ranges.ranges[at].shard;
        for (range, begun) in ranges.ranges.iter().zip(&mut ranges.begun).filter(|(range, _)| range.shard == shard) {
            let (whole, buffers, range) = (whole.clone(), self.buffers.clone(), range.range());
            let copied = async move {
                let (whole, length) = (whole.await?, (range.end - range.start) as usize);
                let mut memory = buffers.take(length);
                memory.as_mut_slice()[..length].copy_from_slice(&whole.bytes[range.start as usize..range.end as usize]);
                Ok(buffers.share(memory, length))
            };
            *begun = Some(self.spawn(copied, ranges.permit.clone()));
        }
    }

    fn spawn(
        &mut self,
        read: impl Future<Output = Result<Bytes>> + Send + 'static,
        permit: Arc<OwnedSemaphorePermit>,
    ) -> Read {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.running.spawn(async move {
            let arrived = read.await.map(|bytes| Arc::new(Arrived { bytes, _permit: permit }));
            // Nobody waits once the stream has been dropped.
            let _ = sender.send(arrived);
        });
        let ended = |_| Err(Error::Config("the reader of the batches has ended".to_owned()));
        receiver.map(move |read| read.unwrap_or_else(ended)).boxed().shared()
    }
}

/// Small ones of `at` that are of one shard together, up to [`GROUP_BYTES`]; each other one alone.
fn groups(at: &[usize], ranges: &[Extent]) -> Vec<Vec<usize>> {
    let mut groups: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut open: HashMap<u32, usize> = HashMap::new();
    for &at in at {
        let Extent { shard, start, end } = ranges[at];
        let num_bytes = end - start;
        match open.get(&shard).map(|&group| &mut groups[group]) {
            Some((room, group)) if *room >= num_bytes => {
                *room -= num_bytes;
                group.push(at);
            }
            _ => {
                open.insert(shard, groups.len());
                groups.push((GROUP_BYTES.saturating_sub(num_bytes), vec![at]));
            }
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// `extents`, which are of one shard, one behind the other.
async fn read(source: &Source, buffers: &Buffers, extents: &[Extent]) -> Result<Bytes> {
    let length = extents.iter().map(|extent| (extent.end - extent.start) as usize).sum();
    let (mut memory, loan) = buffers.take(length).on_loan_again();
    let piece = |extent: &Extent| (extent.range(), memory.split_to((extent.end - extent.start) as usize));
    let mut pieces: Vec<_> = extents.iter().map(piece).collect();
    drop(memory);
    let (store, name) = source.kept(&extents[0]);
    match pieces.pop() {
        // A large one is read in parts.
        Some((range, target)) if pieces.is_empty() => store.read_into(name, range, vec![target]).await?,
        last => {
            pieces.extend(last);
            store.read_pieces(name, pieces).await?;
        }
    }
    let memory = loan.reclaim().expect("the read has ended");
    Ok(buffers.share(memory, length))
}

/// What the shard that is `stored` is decompressed to.
async fn whole(source: &Source, buffers: &Buffers, stored: Extent, unit: Unit) -> Result<Bytes> {
    let compressed = read(source, buffers, std::slice::from_ref(&stored)).await?;
    let length = unit.size_bytes as usize;
    let mut memory = buffers.take(length);
    // Dropped with this future.
    let asker = Arc::new(());
    let wanted = Arc::downgrade(&asker);
    // A thread of the runtime would keep reads waiting for as long.
    let decompressed = tokio::task::spawn_blocking(move || {
        let target = &mut memory.as_mut_slice()[..length];
        decompress(unit.compression, &compressed, target, || wanted.strong_count() > 0).map(|()| memory)
    });
    let memory = decompressed.await.expect("decompressing does not panic");
    Ok(buffers.share(memory.map_err(|fault| source.fault(in_decompressed(fault), &stored))?, length))
}
