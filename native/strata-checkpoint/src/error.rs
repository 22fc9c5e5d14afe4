//! Everything that can go wrong with a checkpoint.

/// Result of a checkpoint operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed checkpoint operation.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Io(#[from] strata_io::Error),
    /// A copy from or to a GPU failed.
    #[error(transparent)]
    Device(#[from] strata_device::Error),
    /// Bytes that were read have another digest than when they were written.
    #[error("checksum mismatch at {object}: expected {expected}, found {found} (bytes {start}..{end}, in {fqn:?})")]
    Checksum {
        /// URL of the object.
        object: String,
        /// Digest that the manifest holds.
        expected: String,
        /// Digest of what was read.
        found: String,
        /// First byte of the block in the object.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// The tensor or value whose block it is.
        fqn: String,
    },
    /// A manifest, a record or `.metadata` cannot be what we or stock wrote.
    #[error("{object}: {detail}")]
    Manifest {
        /// URL of the file.
        object: String,
        /// What is wrong, expected and found.
        detail: String,
    },
    /// A manifest is sound, but beyond this version.
    #[error("{object}: {detail}")]
    Unsupported {
        /// URL of the file.
        object: String,
        /// What it needs.
        detail: String,
    },
    /// No committed checkpoint is at the place.
    #[error("no checkpoint at {url}: {detail}")]
    NotFound {
        /// The place.
        url: String,
        /// What was looked for.
        detail: String,
    },
    /// A checkpoint is at the place, and may not be replaced.
    #[error("a checkpoint is already at {url}, and it may not be overwritten")]
    Exists {
        /// The place.
        url: String,
    },
    /// Somebody else committed to the place since the save began.
    #[error("{url}: another save committed manifest {number} while this one was writing; nothing was published")]
    Superseded {
        /// The place.
        url: String,
        /// Number of the manifest that is there.
        number: u64,
    },
    /// A newer run has claimed the run root.
    #[error("{url}: {}; nothing was published", replaced(*found, *held))]
    StaleGeneration {
        /// The run root.
        url: String,
        /// Newest generation.
        found: u64,
        /// Ours.
        held: u64,
    },
    /// The save or the load as planned does not fit together.
    #[error("{0}")]
    Plan(String),
}

/// How a run has lost its right, and what to do.
fn replaced(found: u64, held: u64) -> String {
    if found == 0 {
        return "no claim is left there: the folder of the run was removed; a new CheckpointManager begins anew"
            .to_owned();
    }
    if found < held {
        return format!(
            "generation {held}, which this process claimed, is not there any more, and {found} is the newest, as where a \
             backup was put back; a new process can go on"
        );
    }
    format!(
        "another process has taken the run over: it claimed generation {found}, this process holds {held} and can save \
         and remove nothing more there, whatever manager it makes; to take the run over again, start a new process"
    )
}
