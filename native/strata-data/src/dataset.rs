//! The shards at a place, and where the samples of each begin. Reads no sample.

use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use globset::GlobBuilder;
use strata_io::{ObjectInfo, Store};

use crate::bounds::Bounds;
use crate::formats::tokens::Windows;
use crate::formats::{Dtype, Fault, Fields, megatron, tar, tokens};
use crate::objects::look;
use crate::reads::Extent;
use crate::{Error, Result};

/// Shards whose samples are looked for at a time.
const CONCURRENCY: usize = 16;

/// How samples lie in shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Archives of files, as WebDataset writes them.
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
}

/// One object with samples.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Its name, relative to the store's root.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Where its samples lie.
    pub bounds: Bounds,
    /// What else must be known to find their fields.
    pub layout: Layout,
}

/// How the fields of the samples of a shard are found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// By the headers of files.
    Tar,
    /// All of it is tokens.
    Tokens(Dtype),
}

/// Shards of one format, in the order of their names. Belongs to no store and no process.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Shard>,
    /// The first sample of each shard.
    firsts: Vec<u64>,
    num_samples: u64,
}

impl Index {
    /// The shards below `store` whose names match `pattern`, with their samples.
    ///
    /// `pattern` is a glob: `*` and `?` within a folder, `**` over folders, `{a,b}`, `[0-9]`.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no pattern or no window, [`Error::NotFound`] if nothing matches, [`Error::Damaged`] for a shard
    /// that its format cannot be; what the store says.
    pub async fn scan(store: Arc<dyn Store>, pattern: &str, format: Format) -> Result<Self> {
        format.check()?;
        let mut found = matching(&*store, pattern).await?;
        if let Format::Megatron { .. } = format {
            found.retain(|info| info.name.ends_with(".bin"));
        }
        if found.is_empty() {
            let url = url_of(&*store, pattern);
            return Err(Error::NotFound { url, detail: "nothing of such a name is there".to_owned() });
        }
        let scans = found.into_iter().map(|info| scanned(store.clone(), info, format));
        let shards: Vec<Shard> = stream::iter(scans).buffered(CONCURRENCY).try_collect().await?;
        Ok(Self::of(shards))
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

    /// The bytes of `sample`, counted through all shards.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn extent(&self, sample: u64) -> Extent {
        // Behind shards without samples, which begin where the next one does.
        let shard = self.firsts.partition_point(|&first| first <= sample) - 1;
        let Range { start, end } = self.shards[shard].bounds.range(sample - self.firsts[shard]);
        Extent { shard: shard as u32, start, end }
    }

    /// What the `bytes` of a sample of the first shard hold, and of those that are like it.
    ///
    /// # Errors
    /// As [`Index::fields_of`].
    pub fn fields(&self, bytes: &[u8]) -> Result<Fields, Fault> {
        self.fields_of(0, bytes)
    }

    /// What the `bytes` of a sample of `shard` hold.
    ///
    /// # Errors
    /// [`Fault`], counted from the sample's first byte.
    ///
    /// # Panics
    /// If there are not so many shards.
    pub fn fields_of(&self, shard: u32, bytes: &[u8]) -> Result<Fields, Fault> {
        match self.shards[shard as usize].layout {
            Layout::Tar => tar::fields(bytes),
            Layout::Tokens(dtype) => Ok(tokens::fields(bytes, dtype)),
        }
    }
}

impl Format {
    fn check(self) -> Result<()> {
        let windows = match self {
            Self::Tar => return Ok(()),
            Self::Tokens { dtype, .. } if !dtype.is_integer() => {
                return Err(Error::Config(format!("tokens of {}: expected whole numbers", dtype.name())));
            }
            Self::Tokens { windows, .. } | Self::Megatron { windows } => windows,
        };
        if windows.window == 0 || windows.stride == 0 {
            return Err(Error::Config(format!("{windows:?}: expected numbers above 0")));
        }
        Ok(())
    }
}

impl Shard {
    /// Samples in it.
    pub fn num_samples(&self) -> u64 {
        self.bounds.num_samples()
    }
}

async fn matching(store: &dyn Store, pattern: &str) -> Result<Vec<ObjectInfo>> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).build();
    let glob = glob.map_err(|error| Error::Config(format!("the pattern {pattern:?}: {error}")))?.compile_matcher();
    let is_deep = pattern.contains('/') || pattern.contains("**");
    let mut found = if is_deep { store.list_below("").await? } else { store.list("").await? };
    found.retain(|info| glob.is_match(&info.name));
    Ok(found)
}

async fn scanned(store: Arc<dyn Store>, info: ObjectInfo, format: Format) -> Result<Shard> {
    let ObjectInfo { name, size, .. } = info;
    let fault = |fault| Error::of(fault, url_of(&*store, &name), 0);
    let (bounds, layout) = match format {
        Format::Tar => (Bounds::Listed(look(&store, &name, Some(size), tar::scan).await?), Layout::Tar),
        Format::Tokens { dtype, header_bytes, windows } => {
            (tokens::scan(size, header_bytes, dtype, windows).map_err(fault)?, Layout::Tokens(dtype))
        }
        Format::Megatron { windows } => {
            let index = format!("{}.idx", name.strip_suffix(".bin").expect("others were left out"));
            let index = look(&store, &index, None, megatron::scan).await?;
            (megatron::bounds(&index, size, windows).map_err(fault)?, Layout::Tokens(index.dtype))
        }
    };
    Ok(Shard { name, size_bytes: size, bounds, layout })
}

/// URL of what is called `name` below `store`.
pub(crate) fn url_of(store: &dyn Store, name: &str) -> String {
    format!("{}/{name}", store.url().trim_end_matches('/'))
}
