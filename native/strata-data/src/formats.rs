//! How samples lie in shards: where each begins, and which fields it has. Pure.

pub mod compression;
mod dtype;
pub mod files;
pub mod lines;
pub mod mds;
pub mod megatron;
pub mod tar;
pub mod tokens;

pub use dtype::Dtype;

use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Why samples cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Reading failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are not what the format wants.
    #[error("{detail} (at byte {at})")]
    Damage {
        /// Where in what was read.
        at: u64,
        /// Expected and found.
        detail: String,
    },
}

/// Result of reading a format.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

fn damage<T>(at: u64, detail: &str) -> Result<T> {
    Err(Fault::Damage { at, detail: detail.to_owned() })
}

/// The name of a file as key of its sample and name of its field: before and behind the first dot of its last part. None
/// where one of them is empty.
fn key_and_field(name: &str) -> Option<(&str, &str)> {
    let last = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = last + name[last..].find('.')?;
    let (key, field) = (&name[..dot], &name[dot + 1..]);
    (dot > last && !field.is_empty()).then_some((key, field))
}

/// Bytes that can be read anywhere.
pub trait ReadAt {
    /// How many there are.
    fn size(&self) -> u64;

    /// Reads into `buffer` from `at` on; fewer bytes only at the end.
    ///
    /// # Errors
    /// What reading says.
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize>;

    /// As [`ReadAt::read_at`], all of `buffer`.
    ///
    /// # Errors
    /// `UnexpectedEof` where there are fewer bytes.
    fn read_exact_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let found = self.read_at(at, buffer)?;
        if found == buffer.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl ReadAt for [u8] {
    fn size(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.get(at..)).unwrap_or_default();
        let found = rest.len().min(buffer.len());
        buffer[..found].copy_from_slice(&rest[..found]);
        Ok(found)
    }
}

/// A sample: which of its bytes are which field.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    /// Its name among the samples.
    pub key: String,
    /// In the order in which they lie.
    pub fields: Vec<Field>,
}

/// A field of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Such as `jpg`.
    pub name: String,
    /// Its content among the sample's bytes.
    pub data: Range<u64>,
    /// What the content is.
    pub encoding: Encoding,
}

/// What the content of a field is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Encoding {
    /// What the field's name says, such as `jpg`.
    #[default]
    ByName,
    /// Numbers, little-endian, those of the last axis side by side. A single number has no axes.
    Array {
        /// Of each number.
        dtype: Dtype,
        /// Lengths of the axes.
        shape: Vec<u64>,
    },
    /// What MosaicML calls by this name, such as `str`, `json`, `jpeg`, `pil` or `pkl`.
    Named(Arc<str>),
}
