//! Checkpoints: the format, and saving, committing and loading them.
//!
//! Pure: [`item`], [`manifest`], [`layout`], [`geometry`], [`container`], [`encoding`], [`names`], [`plan`],
//! [`servable`], [`share`], `stock_pickle`. They take values and return values. The rest acts on a [`strata_io::Store`]
//! or on memory. No Python here.

mod base;
mod bounce;
mod changed;
mod collect;
mod commit;
pub mod container;
mod destination;
pub mod encoding;
mod error;
pub mod geometry;
pub mod item;
pub mod layout;
mod load;
pub mod manifest;
pub mod names;
mod open;
mod packed;
mod payload;
mod plain;
mod plan;
mod progress;
mod record;
pub mod run;
mod save;
pub mod servable;
pub mod share;
mod siblings;
pub mod stock;
mod stock_pickle;
mod stored_tensor;
mod unchanged;
mod verify;

pub use base::{Base, claim_generation, open_base};
pub use commit::{Commit, CommitStats, Promises, commit};
pub use destination::Destination;
pub use error::{Error, Result};
pub use load::{Piece, ReadStats, Reading, Round, TensorRead, Together, VerifyMode, blob_bytes, read};
pub use open::{Beside, Checkpoint, Source, open};
pub use packed::PackedItems;
pub use payload::Payload;
pub use plain::PlainTensor;
pub use progress::Progress;
pub use record::{RankRecord, Records, StockEntry};
pub use save::{SaveItem, write_items, write_safetensors};
pub use stock_pickle::{StockParts, is_sealed, stock_pickle};
pub use stored_tensor::{StoredTensor, rewrite_safetensors};
pub use unchanged::Parent;
pub use verify::{Findings, verify};
