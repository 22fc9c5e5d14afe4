//! A store that counts requests and bytes by kind.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;

use super::hooked::{Hook, Hooked, Kind, Request};
use crate::Result;

/// Counts what is asked of a store, whether or not it succeeds.
pub type CountingStore = Hooked<Counts>;

/// Requests and payload bytes by kind.
#[derive(Debug, Default)]
pub struct Counts {
    by_kind: Mutex<BTreeMap<Kind, (u64, u64)>>,
}

impl Counts {
    /// Number of requests of `kind` so far.
    pub fn requests(&self, kind: Kind) -> u64 {
        self.all().get(&kind).map_or(0, |counted| counted.0)
    }

    /// Bytes of payload in requests of `kind` so far; a read of a whole object counts none.
    pub fn bytes(&self, kind: Kind) -> u64 {
        self.all().get(&kind).map_or(0, |counted| counted.1)
    }

    /// (requests, bytes) by kind.
    pub fn all(&self) -> BTreeMap<Kind, (u64, u64)> {
        self.by_kind.lock().expect("no panic while held").clone()
    }
}

#[async_trait]
impl Hook for Counts {
    async fn before(&self, request: &Request<'_>) -> Result<()> {
        let mut by_kind = self.by_kind.lock().expect("no panic while held");
        let counted = by_kind.entry(request.kind).or_default();
        *counted = (counted.0 + 1, counted.1 + request.bytes);
        Ok(())
    }
}
