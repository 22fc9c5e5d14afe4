//! Data: which sample comes when, where it lies, and how it gets here.
//!
//! Pure: [`permutation`], [`order`], [`partition`], [`bounds`], [`formats`], [`reads`], `pattern`. They take values and
//! return values. The rest acts on a [`strata_io::Store`]. No Python here.

pub mod batches;
pub mod bounds;
mod buffers;
pub mod dataset;
mod error;
mod fetch;
pub mod formats;
mod objects;
pub mod order;
pub mod partition;
mod pattern;
pub mod permutation;
pub mod reads;
mod scan;
mod shard;

pub use error::{Error, Result};
