//! What a shard is: where it is kept, how samples lie in it, and how its fields are found. Values; reads nothing.

use std::sync::Arc;

use strata_io::Store;

use crate::bounds::Bounds;
use crate::formats::compression::Compression;
use crate::formats::tokens::Windows;
use crate::formats::{Dtype, mds};

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
