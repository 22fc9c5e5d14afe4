//! The wire and disk formats of proto/strata/v1, as generated.

/// Version 1.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/strata.v1.rs"));
}
