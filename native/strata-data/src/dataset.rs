//! The shards at a place, and where the samples of each begin. Reads no sample.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use strata_io::Store;

use crate::formats::compression::in_decompressed;
use crate::formats::{Fault, Fields, files, lines, mds, tar, tokens};
use crate::reads::Extent;
use crate::scan::shards;
use crate::shard::url_of;
pub use crate::shard::{Format, Layout, Place, Shard, Unit};
use crate::{Error, Result};

/// Places whose shards are looked for at a time.
const CONCURRENCY: usize = 16;

/// Shards of one format, at each place in the order of their names or of the index that lists them. Belongs to no process.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Shard>,
    /// The first sample of each shard.
    firsts: Vec<u64>,
    num_samples: u64,
}

impl Index {
    /// The shards at `places`, one place after the other, with their samples.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no pattern or no window, [`Error::NotFound`] if nothing matches,
    /// [`Error::Damaged`] for a shard that its format cannot be; what the store says.
    pub async fn scan(places: Vec<Place>, format: Format) -> Result<Self> {
        let scans = places.into_iter().map(|place| async move { shards(&place, format).await });
        let found: Vec<Vec<Shard>> = stream::iter(scans).buffered(CONCURRENCY).try_collect().await?;
        Ok(Self::of(found.into_iter().flatten().collect()))
    }

    fn of(shards: Vec<Shard>) -> Self {
        let (mut firsts, mut num_samples) = (Vec::with_capacity(shards.len()), 0);
        for shard in &shards {
            firsts.push(num_samples);
            num_samples += shard.num_samples();
        }
        Self { shards, firsts, num_samples }
    }

    /// All samples.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// The shards.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The bytes of `sample`, counted through all shards; of a unit, the decompressed ones.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn extent(&self, sample: u64) -> Extent {
        // Behind shards without samples, which begin where the next one does.
        let shard = self.firsts.partition_point(|&first| first <= sample) - 1;
        let Range { start, end } = self.shards[shard].bounds.range(sample - self.firsts[shard]);
        Extent { shard: shard as u32, start, end }
    }

    /// What the `bytes` of the sample at `extent` hold; and these, behind which there are those that no shard has.
    ///
    /// # Errors
    /// [`Fault`], counted from the sample's first byte.
    ///
    /// # Panics
    /// If there are not so many shards.
    pub fn fields(&self, extent: &Extent, bytes: Bytes) -> Result<(Fields, Bytes), Fault> {
        let shard = &self.shards[extent.shard as usize];
        if let Layout::Tokens { dtype, breaks: Some(breaks) } = &shard.layout {
            return Ok(tokens::fields_with_documents(&bytes, *dtype, breaks, extent.start / dtype.num_bytes()));
        }
        let found = match &shard.layout {
            Layout::Tar => tar::fields(&*bytes),
            Layout::Tokens { dtype, .. } => Ok(tokens::fields(&bytes, *dtype)),
            Layout::Columns(columns) => mds::fields(&bytes, columns),
            Layout::Line => lines::fields(&bytes),
            Layout::File => Ok(files::fields(&shard.name, &bytes)),
        };
        let found = if shard.unit.is_some() { found.map_err(in_decompressed) } else { found };
        Ok((found?, bytes))
    }
}

/// What is read, and where it is kept.
#[derive(Debug, Clone)]
pub struct Source {
    /// Of this process, by their numbers.
    pub stores: Vec<Arc<dyn Store>>,
    /// The shards.
    pub index: Arc<Index>,
}

impl Source {
    pub(crate) fn fault(&self, fault: Fault, extent: &Extent) -> Error {
        let (store, name) = self.kept(extent);
        Error::of(fault, url_of(&**store, name), extent.start)
    }

    /// Where a shard is kept, and its name there.
    pub(crate) fn kept(&self, extent: &Extent) -> (&Arc<dyn Store>, &str) {
        let shard = &self.index.shards()[extent.shard as usize];
        (&self.stores[shard.store as usize], &shard.name)
    }
}
