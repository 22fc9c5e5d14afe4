//! The manifest file: values to bytes and back. Pure; the format is proto/strata/v1/checkpoint.proto.

mod chunks;
mod columns;
mod decode;
mod encode;
mod items;
mod rows;

pub use chunks::{Chunks, Ints};
pub use columns::encode_items;
pub use decode::{DecodeError, decode, decode_head, head_bytes};
pub use encode::encode;
pub(crate) use encode::{encode_with, stored_object, stored_reference};
pub use items::{Items, Key};
pub(crate) use rows::Extent;
pub use rows::{Shared, decode_items};

use crate::item::{Entry, Object};
use crate::names::is_our_safetensors;
use crate::run::RunInfo;

/// First bytes of every manifest file.
pub const MAGIC: &[u8; 8] = b"STRATAM\n";

/// The format version that this reader implements.
pub const READER_VERSION: u32 = 1;

/// Rows of one section. Large enough that the section table stays small (123 rows for 500,000 items), small
/// enough that a rank which needs one tensor decodes little.
pub const GROUP_ROWS: usize = 4096;

/// The committed index of one checkpoint.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Manifest {
    /// Of the save that wrote it.
    pub save_id: String,
    /// Of the `.metadata` that was there before; empty if none.
    pub previous_save_id: String,
    /// Position in the sequence at this place, from 1.
    pub number: u64,
    /// Seconds since the epoch; for people.
    pub created_at: u64,
    /// Ranks that took part.
    pub world_size: u32,
    /// The rank, where one rank saved without collectives.
    pub rank: Option<u32>,
    /// Of the run root; 0 without one.
    pub generation: u64,
    /// Everything that items point into.
    pub objects: Vec<Object>,
    /// (checkpoint_id below the run root, save_id) of other checkpoints that hold objects of this one.
    pub references: Vec<(String, String)>,
    /// In the order of the state_dict.
    pub entries: Vec<Entry>,
    /// Sorted by fqn, then offsets.
    pub items: Items,
    /// The planner's data, one byte of encoding first; empty if there is none.
    pub planner_data: Vec<u8>,
    /// Sum of the payloads, aliases counted once.
    pub payload_bytes: u64,
    /// Where in a run it stands, if a manager saved it.
    pub run: Option<RunInfo>,
    /// Whether payloads are stored encoded: stock torch cannot read them. What is encoded says so by its items.
    pub is_encoded: bool,
    /// How many checkpoints in a row, this one the last, have stored payloads encoded.
    pub encoded_in_a_row: u32,
}

impl Manifest {
    /// An object's path from the checkpoint, by which stock torch finds it too, on a file system.
    pub fn path_of(&self, object: u32) -> String {
        self.objects[object as usize].path(&self.references)
    }

    /// Its objects, without those of other checkpoints.
    pub(crate) fn own_objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(|object| object.is_own())
    }

    /// Whether any of it is in files of safetensors.
    pub fn has_safetensors(&self) -> bool {
        self.objects.iter().any(|object| is_our_safetensors(&object.name))
    }
}

/// Folder of the manifests; those of ranks that saved without collectives are in [`RANKS_FOLDER`].
pub const FOLDER: &str = ".strata/";

/// Folder of the manifests of single ranks.
pub const RANKS_FOLDER: &str = ".strata/ranks/";

/// Which manifest a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManifestName {
    /// Position in the sequence.
    pub number: u64,
    /// The rank, where one rank saved without collectives.
    pub rank: Option<u32>,
}

impl ManifestName {
    /// Relative to the checkpoint; numbers sort as text.
    pub fn path(self) -> String {
        match self.rank {
            None => format!("{FOLDER}{:020}", self.number),
            Some(rank) => format!("{RANKS_FOLDER}{:020}.{rank}", self.number),
        }
    }

    /// The manifest that a name relative to the checkpoint stands for, if it is one's.
    pub fn parse(path: &str) -> Option<Self> {
        let (name, rank) = match path.strip_prefix(RANKS_FOLDER) {
            Some(name) => {
                let (name, rank) = name.split_once('.')?;
                (name, Some(rank.parse().ok()?))
            }
            None => (path.strip_prefix(FOLDER)?, None),
        };
        let is_number = name.len() == 20 && name.bytes().all(|b| b.is_ascii_digit());
        let number = is_number.then(|| name.parse().ok())??;
        Some(Self { number, rank })
    }
}
