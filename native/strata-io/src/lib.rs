//! Bytes to and from a place named by a URL.
//!
//! A [`Store`] is a directory, a bucket prefix or a map in memory. It writes large objects in parts,
//! publishes small ones conditionally, and reads ranges straight into memory that the caller lends.
//! This crate knows neither Python nor checkpoints.

pub mod digest;
mod error;
mod gate;
pub mod lent;
pub mod local;
mod memory;
mod open;
mod pace;
mod remote;
mod retry;
pub mod schedule;
mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, Result};
pub use open::{IoConfig, SCHEMES, open};
pub use remote::{PendingUpload, UPLOADS_FOLDER, discard_upload, pending_uploads};
pub use store::{Counters, ObjectInfo, ObjectWriter, OpenUpload, Part, PutMode, Store, is_plain};
