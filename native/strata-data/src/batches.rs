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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use strata_io::{IoConfig, open};

    use super::*;
    use crate::dataset::{Format, Index, Place};
    use crate::order::{Lanes, Shuffle};

    /// An archive of samples `s<number>`, each with a field of some bytes of that number.
    fn archive(numbers: std::ops::Range<u64>) -> Vec<u8> {
        let mut archive = Vec::new();
        for number in numbers {
            let content = vec![number as u8; number as usize * 7 % 1500];
            let mut block = [0u8; 512];
            let name = format!("s{number}.bin");
            block[..name.len()].copy_from_slice(name.as_bytes());
            block[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
            block[148..156].fill(b' ');
            block[156] = b'0';
            block[257..265].copy_from_slice(b"ustar\x0000");
            let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            archive.extend_from_slice(&block);
            archive.extend_from_slice(&content);
            archive.resize(archive.len().next_multiple_of(512), 0);
        }
        archive.resize(archive.len() + 1024, 0);
        archive
    }

    fn config() -> IoConfig {
        IoConfig {
            budget: ByteBudget::new(64 << 20),
            max_concurrency: 8,
            part_bytes: 8 << 20,
            fsync: false,
            direct_io: false,
            max_tries: 3,
            deadline: Duration::from_secs(10),
        }
    }

    async fn source(folder: &std::path::Path) -> Source {
        for (shard, numbers) in [0..40, 40..40, 40..47, 47..100].into_iter().enumerate() {
            std::fs::write(folder.join(format!("{shard}.tar")), archive(numbers)).unwrap();
        }
        std::fs::write(folder.join("README"), "no shard").unwrap();
        let store = open(folder.to_str().unwrap(), &BTreeMap::new(), &config()).unwrap();
        let place = Place { number: 0, store: store.clone(), pattern: "*.tar".to_owned() };
        let index = Arc::new(Index::scan(vec![place], Format::Tar).await.unwrap());
        Source { stores: vec![store], index }
    }

    fn plan(source: &Source, shuffle: Shuffle, stream: Stream) -> Plan {
        let counts: Vec<u64> = source.index.shards().iter().map(crate::dataset::Shard::num_samples).collect();
        let order = |epoch| Arc::new(Order::new(&counts, shuffle, Lanes { num_lanes: 2, turn: 3 }, 5, epoch));
        Plan { order: order(0), next: order(1), stream, ending: Ending::Short, start: 0, first: 0 }
    }

    async fn keys(mut batches: Batches) -> Vec<String> {
        let mut keys = Vec::new();
        while let Some(raw) = batches.next().await.unwrap() {
            for sample in raw.samples {
                let number: u64 = sample.fields.key[1..].parse().unwrap();
                let field = &sample.fields.fields[0];
                let content = &sample.bytes[field.data.start as usize..field.data.end as usize];
                assert!(content.len() as u64 == number * 7 % 1500 && content.iter().all(|&byte| byte == number as u8));
                keys.push(sample.fields.key);
            }
        }
        keys
    }

    #[tokio::test]
    async fn every_sample_comes_once_in_the_order_of_the_plan() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path()).await;
        assert_eq!((source.index.num_samples(), source.index.shards().len()), (100, 4));
        let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 3 };
        for shuffle in [Shuffle::None, Shuffle::Shards, Shuffle::Full, Shuffle::Blocks { block: 4, buffer: 12 }] {
            let plan = plan(&source, shuffle, one);
            let expected: Vec<String> = (0..100).map(|at| format!("s{}", plan.order.sample(at))).collect();
            // A window of one batch, some, all; room for one window.
            for window_bytes in [1, 20_000, 1 << 20] {
                let budget = ByteBudget::new(window_bytes);
                let batches = Batches::new(source.clone(), plan.clone(), budget, window_bytes);
                assert_eq!(keys(batches).await, expected, "{shuffle:?} {window_bytes}");
            }
        }
    }

    #[tokio::test]
    async fn batches_that_are_kept_do_not_stop_what_comes() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path()).await;
        let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 3 };
        let plan = plan(&source, Shuffle::Full, one);
        let mut batches = Batches::new(source, plan, ByteBudget::new(4096), 4096);
        let mut kept = Vec::new();
        while let Some(batch) = batches.next().await.unwrap() {
            kept.push(batch);
        }
        assert_eq!(kept.len(), 34);
    }

    #[tokio::test]
    async fn a_shard_that_changed_is_damage_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path()).await;
        let mut bytes = std::fs::read(folder.path().join("3.tar")).unwrap();
        bytes[20] ^= 1;
        std::fs::write(folder.path().join("3.tar"), bytes).unwrap();
        let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 47 };
        let mut batches =
            Batches::new(source.clone(), plan(&source, Shuffle::None, one), ByteBudget::new(1 << 20), 1 << 20);
        let mut errors = Vec::new();
        loop {
            match batches.next().await {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => errors.push(error.to_string()),
            }
        }
        assert!(errors.len() == 1 && errors[0].contains("3.tar: expected a header with the sum"), "{errors:?}");
    }
}
