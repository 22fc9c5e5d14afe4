//! torch_strata for programs in Rust: names of the other crates in one place, no code of its own.
//!
//! `examples/checkpoints.rs` shows how they are used.

/// What describes a checkpoint.
pub mod types {
    pub use strata_checkpoint::run::{CheckpointMetadata, CheckpointType, Part, RunInfo};
}

/// Saving, keeping and loading the checkpoints of a run.
pub mod checkpoint {
    pub use strata_checkpoint::run::life::{NewCheckpoint, Run};
    pub use strata_checkpoint::run::manager::{
        AsyncCheckpointWriter, CheckpointManager, CheckpointManagerConfig, PendingSave,
    };
    pub use strata_checkpoint::run::retention::Policy;
    pub use strata_checkpoint::{Error, Result};
}

/// Places where objects are kept.
pub mod io {
    pub use strata_io::{Error, IoConfig, ObjectInfo, Result, Store, open};
}

pub use checkpoint::{AsyncCheckpointWriter, CheckpointManager, CheckpointManagerConfig};
pub use types::{CheckpointMetadata, CheckpointType};
