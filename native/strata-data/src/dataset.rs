//! The shards at a place, and where the samples of each begin. Reads no sample.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use globset::GlobBuilder;
use strata_io::{ObjectInfo, Store};
use tokio::runtime::Handle;

use crate::bounds::Bounds;
use crate::formats::{Fault, Fields, tar};
use crate::objects::{Elsewhere, OnDisk};
use crate::reads::Extent;
use crate::{Error, Result};

/// Shards whose samples are looked for at a time.
const CONCURRENCY: usize = 16;

/// How samples lie in shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Archives of files, as WebDataset writes them.
    Tar,
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
}

/// Shards of one format, in the order of their names. Belongs to no store and no process.
#[derive(Debug)]
pub struct Index {
    format: Format,
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
    /// [`Error::Config`] for what is no pattern, [`Error::NotFound`] if nothing matches, [`Error::Damaged`] for a shard
    /// that its format cannot be; what the store says.
    pub async fn scan(store: Arc<dyn Store>, pattern: &str, format: Format) -> Result<Self> {
        let found = matching(&*store, pattern).await?;
        let scans = found.into_iter().map(|info| scanned(store.clone(), info, format));
        let shards: Vec<Shard> = stream::iter(scans).buffered(CONCURRENCY).try_collect().await?;
        Ok(Self::of(format, shards))
    }

    fn of(format: Format, shards: Vec<Shard>) -> Self {
        let (mut firsts, mut num_samples) = (Vec::with_capacity(shards.len()), 0);
        for shard in &shards {
            firsts.push(num_samples);
            num_samples += shard.num_samples();
        }
        Self { format, shards, firsts, num_samples }
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

    /// What the `bytes` of a sample hold.
    ///
    /// # Errors
    /// [`Fault`], counted from the sample's first byte.
    pub fn fields(&self, bytes: &[u8]) -> Result<Fields, Fault> {
        match self.format {
            Format::Tar => tar::fields(bytes),
        }
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
    if found.is_empty() {
        let url = url_of(store, pattern);
        return Err(Error::NotFound { url, detail: "nothing of such a name is there".to_owned() });
    }
    Ok(found)
}

async fn scanned(store: Arc<dyn Store>, info: ObjectInfo, format: Format) -> Result<Shard> {
    let object = url_of(&*store, &info.name);
    let handle = Handle::current();
    let scan = move || {
        let Format::Tar = format;
        let bounds = match store.path(&info.name) {
            Some(path) => File::open(path).map_err(Into::into).and_then(|file| tar::scan(&OnDisk::new(file)?)),
            None => tar::scan(&Elsewhere::new(store, &info.name, info.size, handle)),
        };
        let bounds = bounds.map_err(|fault| Error::of(fault, object, 0))?;
        Ok(Shard { name: info.name, size_bytes: info.size, bounds: Bounds::Listed(bounds) })
    };
    tokio::task::spawn_blocking(scan).await.expect("a scan does not panic")
}

/// URL of what is called `name` below `store`.
pub(crate) fn url_of(store: &dyn Store, name: &str) -> String {
    format!("{}/{name}", store.url().trim_end_matches('/'))
}
