//! The shards at a place, and where the samples of each begin. Reads no sample.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use strata_io::Store;

use crate::Result;
use crate::bounds::Bounds;
use crate::formats::compression::{Compression, in_decompressed};
use crate::formats::tokens::Windows;
use crate::formats::{Dtype, Fault, Fields, files, lines, mds, tar, tokens};
use crate::reads::Extent;
use crate::scan::shards;

/// How samples lie in shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Archives of files, as WebDataset writes them; compressed where their names say so.
    Tar,
    /// Files of nothing but tokens.
    Tokens {
        /// Of the tokens: whole numbers.
        dtype: Dtype,
        /// Bytes before them, which are skipped.
        header_bytes: u64,
        /// Which of them are a sample.
        windows: Windows,
    },
    /// Pairs of `.bin`, which the pattern names, and `.idx` beside it, as Megatron-LM writes them.
    Megatron {
        /// Which tokens are a sample.
        windows: Windows,
    },
    /// What an `index.json` lists, as MosaicML's Streaming writes it. The pattern names the index, or its folder with a
    /// `/` at the end.
    Mds,
    /// Text, each line a sample; compressed where the names say so.
    Lines,
    /// Each file a sample.
    Files,
}

/// Where shards are, and their names.
#[derive(Debug, Clone)]
pub struct Place {
    /// Number of `store` among those of the data set.
    pub number: u32,
    /// Where they are kept.
    pub store: Arc<dyn Store>,
    /// A name, or a glob: `*` and `?` within a folder, `**` over folders, `{a,b}`, `[0-9]`; and `{000..127}` or `{a..f}`
    /// for each of a range.
    pub pattern: String,
}

/// Places, and shards whose samples are looked for, at a time.
pub(crate) const CONCURRENCY: usize = 16;

/// One object with samples.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Number of its store among those of the data set.
    pub store: u32,
    /// Its name, relative to the store's root.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// What it is decompressed to as a whole; None where its bytes are read as they are.
    pub unit: Option<Unit>,
    /// Where its samples lie: in the unit if it is one.
    pub bounds: Bounds,
    /// What else must be known to find their fields.
    pub layout: Layout,
}

/// A shard of which nothing can be read without the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// How it is compressed.
    pub compression: Compression,
    /// Size of what it is decompressed to.
    pub size_bytes: u64,
}

/// How the fields of the samples of a shard are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// By the headers of files.
    Tar,
    /// All of it is tokens.
    Tokens {
        /// Of each.
        dtype: Dtype,
        /// Tokens before which a document ends, where documents are told.
        breaks: Option<Arc<[u64]>>,
    },
    /// By the sizes before them.
    Columns(Arc<[mds::Column]>),
    /// All of it is a line and blank ones.
    Line,
    /// By the shard's name.
    File,
}

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
    ///
    /// [`Error::Config`]: crate::Error::Config
    /// [`Error::NotFound`]: crate::Error::NotFound
    /// [`Error::Damaged`]: crate::Error::Damaged
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

impl Shard {
    /// Samples in it.
    pub fn num_samples(&self) -> u64 {
        self.bounds.num_samples()
    }
}

/// URL of what is called `name` below `store`.
pub(crate) fn url_of(store: &dyn Store, name: &str) -> String {
    format!("{}/{name}", store.url().trim_end_matches('/'))
}
