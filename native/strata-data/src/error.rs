//! Everything that can go wrong with data.

use std::sync::Arc;

use crate::formats::Fault;

/// Result of a data operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed data operation.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// What was asked for cannot be.
    #[error("{0}")]
    Config(String),
    /// The store failed.
    #[error(transparent)]
    Io(#[from] strata_io::Error),
    /// A file of this machine could not be read.
    #[error("cannot read {object}: {error}")]
    File {
        /// Path of the file.
        object: String,
        /// What the system says.
        error: Arc<std::io::Error>,
    },
    /// A shard is not what its format wants, or not what it was.
    #[error("{object}: {detail}")]
    Damaged {
        /// URL of the shard.
        object: String,
        /// Where, expected and found.
        detail: String,
    },
    /// No shard is at the place.
    #[error("no shard matches {url}: {detail}")]
    NotFound {
        /// The place.
        url: String,
        /// What was looked for.
        detail: String,
    },
}

impl Error {
    /// `fault` of the shard `object`, of which `from` is the first byte that was looked at.
    pub(crate) fn of(fault: Fault, object: String, from: u64) -> Self {
        match fault {
            // What the store said, where it was asked for the bytes.
            Fault::Io(error) => match error.downcast() {
                Ok(said) => Self::Io(said),
                Err(error) => Self::File { object, error: Arc::new(error) },
            },
            Fault::Damage { at, detail } => {
                Self::Damaged { object, detail: format!("{detail} (at byte {})", from + at) }
            }
        }
    }
}
