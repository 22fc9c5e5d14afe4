//! Batches of samples, read ahead. The order says which samples, [`crate::reads`] which ranges; this reads them.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::schedule::ByteBudget;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::Result;
use crate::dataset::Source;
use crate::fetch::{Fetch, Read};
use crate::formats::Fields;
use crate::order::Order;
use crate::partition::{Batch, Ending, Stream};
use crate::reads::{Extent, reads};

/// Which batches: a stream's part of an epoch from some position on.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of this epoch.
    pub order: Arc<Order>,
    /// Of the next one; where the ending goes on into it.
    pub next: Arc<Order>,
    /// Whose batches.
    pub stream: Stream,
    /// What becomes of the last samples.
    pub ending: Ending,
    /// Position from which all ranks begin.
    pub start: u64,
    /// The first of this worker's batches behind `start`, from 0.
    pub first: u64,
}

impl Plan {
    /// The `nth` batch of this worker behind the start, with its samples.
    fn batch(&self, nth: u64) -> Option<(Batch, Vec<u64>)> {
        let num_samples = self.order.num_samples();
        let batch = self.stream.batch(num_samples, self.start, self.stream.step(nth), self.ending)?;
        let over = if self.ending == Ending::Continue { &self.next } else { &self.order };
        let sample = |position: u64| match position.checked_sub(num_samples) {
            None => self.order.sample(position),
            Some(over_the_end) => over.sample(over_the_end % num_samples),
        };
        let samples = batch.positions.clone().map(sample).collect();
        Some((batch, samples))
    }
}

/// A batch whose bytes have come.
#[derive(Debug)]
pub struct RawBatch {
    /// Which positions it is of.
    pub batch: Batch,
    /// Number of the batch among this worker's, behind the start.
    pub nth: u64,
    /// Its samples.
    pub samples: Vec<Sample>,
}

/// A sample whose bytes have come.
#[derive(Debug)]
pub struct Sample {
    /// Where it lies.
    pub extent: Extent,
    /// All its bytes, and those of fields that no shard has.
    pub bytes: Bytes,
    /// Which of them are which field.
    pub fields: Fields,
}

/// Reads the batches of a plan, some of them ahead. Dropped, it ends what it has begun.
pub struct Batches {
    source: Source,
    coming: mpsc::Receiver<Coming>,
    reader: JoinHandle<()>,
}

/// The first batch waits for no more than this, or itself; each window is twice as large as the one before.
const FIRST_WINDOW_BYTES: u64 = 1 << 20;

/// What a batch waits for.
struct Coming {
    batch: Batch,
    nth: u64,
    /// Of each sample: where it lies, and which bytes of which read it is.
    samples: Vec<(Extent, Read, usize)>,
}

impl Batches {
    /// Begins to read: windows of `window_bytes`, at least a batch each, as many as `budget` has room for. Where shards
    /// are compressed, half of it is for those that are kept decompressed, one at least. No other stream takes of it.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(source: Source, plan: Plan, budget: ByteBudget, window_bytes: u64) -> Self {
        // What is read ahead is bounded in bytes; batches without bytes cost a little too.
        let (sender, coming) = mpsc::channel(1024);
        let ahead = Ahead { source: source.clone(), plan, budget, window_bytes, sender };
        Self { source, coming, reader: tokio::spawn(ahead.run()) }
    }

    /// The next batch; None behind the last one.
    ///
    /// # Errors
    /// [`Error::Damaged`] for a sample that its format cannot be; what the store says. The next call gives the next batch.
    ///
    /// # Cancel safety
    /// A batch whose wait is dropped is lost.
    pub async fn next(&mut self) -> Result<Option<RawBatch>> {
        let Some(Coming { batch, nth, samples }) = self.coming.recv().await else { return Ok(None) };
        let mut found = Vec::with_capacity(samples.len());
        for (extent, read, at) in samples {
            let arrived = read.await?;
            let bytes = arrived.bytes.slice(at..at + (extent.end - extent.start) as usize);
            let fields = self.source.index.fields(&extent, bytes);
            let (fields, bytes) = fields.map_err(|fault| self.source.fault(fault, &extent))?;
            found.push(Sample { extent, bytes, fields });
        }
        Ok(Some(RawBatch { batch, nth, samples: found }))
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

struct Ahead {
    source: Source,
    plan: Plan,
    budget: ByteBudget,
    window_bytes: u64,
    sender: mpsc::Sender<Coming>,
}

impl Ahead {
    async fn run(self) {
        let total_bytes = self.budget.total_bytes();
        let has_units = self.source.index.shards().iter().any(|shard| shard.unit.is_some());
        // Apart: batches give room back when they are taken, and shards are kept until others are needed.
        let budget = if has_units { ByteBudget::new(total_bytes / 2) } else { self.budget.clone() };
        // Dropped with this future, and its reads with it.
        let mut fetch = Fetch::new(self.source.clone(), 2 * self.window_bytes, total_bytes / 2);
        let (mut nth, mut window_bytes) = (self.plan.first, FIRST_WINDOW_BYTES);
        loop {
            let window = self.window(nth, window_bytes.min(self.window_bytes));
            window_bytes = window_bytes.saturating_mul(2);
            if window.is_empty() {
                break;
            }
            let extents: Vec<Extent> = window.iter().flat_map(|(_, extents)| extents.iter().cloned()).collect();
            let (ranges, places) = reads(&extents);
            // For all together: what is read of a batch whose rest finds no room would wait for ever.
            let permit = Arc::new(budget.take(ranges.iter().map(|range| range.end - range.start).sum()).await);
            let mut fetched = fetch.begin(ranges, permit);
            let mut places = places.into_iter();
            for (batch, extents) in window {
                let mut samples = Vec::with_capacity(extents.len());
                for extent in extents {
                    let (read, at) = places.next().expect("one for each extent");
                    samples.push((extent, fetch.read(&mut fetched, read).await, at as usize));
                }
                if self.sender.send(Coming { batch, nth, samples }).await.is_err() {
                    return;
                }
                nth += 1;
            }
        }
        // Reads end with this task, and batches still wait for them.
        fetch.finish().await;
    }

    /// The batches from `nth` on that are read together: `window_bytes`, or the one that is more.
    fn window(&self, mut nth: u64, window_bytes: u64) -> VecDeque<(Batch, Vec<Extent>)> {
        let (mut window, mut bytes) = (VecDeque::new(), 0);
        while bytes < window_bytes {
            let Some((batch, samples)) = self.plan.batch(nth) else { break };
            let extents: Vec<Extent> = samples.iter().map(|&sample| self.source.index.extent(sample)).collect();
            bytes += extents.iter().map(|extent| extent.end - extent.start).sum::<u64>();
            window.push_back((batch, extents));
            nth += 1;
        }
        window
    }
}
