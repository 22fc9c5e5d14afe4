//! A store in which chosen requests fail in chosen ways.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use super::hooked::{Hook, Hooked, Kind, Request};
use crate::{Error, Result, Store};

/// Fails request number k of a kind in a way.
pub type FaultyStore = Hooked<Faults>;

/// One failure to come.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The kind of request that fails.
    pub kind: Kind,
    /// Which of that kind, from 1.
    pub nth: u64,
    /// How.
    pub way: Way,
}

/// How a request fails.
#[derive(Debug, Clone)]
pub enum Way {
    /// Nothing happens, and this error is returned.
    Refused(Error),
    /// It happens, and this error is returned.
    AnswerLost(Error),
    /// It succeeds, with one bit of its payload changed.
    BitFlipped,
}

/// The failures to come, and how many requests there were.
#[derive(Debug)]
pub struct Faults {
    faults: Vec<Fault>,
    seen: Mutex<HashMap<Kind, u64>>,
}

impl FaultyStore {
    /// `inner`, failing as `faults` say.
    pub fn failing(inner: Arc<dyn Store>, faults: Vec<Fault>) -> Self {
        Self::new(inner, Faults { faults, seen: Mutex::default() })
    }
}

impl Faults {
    fn way(&self, kind: Kind, nth: u64) -> Option<&Way> {
        self.faults.iter().find(|fault| fault.kind == kind && fault.nth == nth).map(|fault| &fault.way)
    }

    fn so_far(&self, kind: Kind) -> u64 {
        self.seen.lock().expect("no panic while held").get(&kind).copied().unwrap_or(0)
    }
}

/// The number of a request is taken in `before`; with requests of one kind side by side, `after` may speak for
/// the neighbour, so lost answers are for requests in sequence.
#[async_trait]
impl Hook for Faults {
    async fn before(&self, request: &Request<'_>) -> Result<()> {
        let nth = {
            let mut seen = self.seen.lock().expect("no panic while held");
            let count = seen.entry(request.kind).or_default();
            *count += 1;
            *count
        };
        match self.way(request.kind, nth) {
            Some(Way::Refused(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    async fn after(&self, request: &Request<'_>) -> Result<()> {
        match self.way(request.kind, self.so_far(request.kind)) {
            Some(Way::AnswerLost(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn flips(&self, request: &Request<'_>) -> bool {
        matches!(self.way(request.kind, self.so_far(request.kind) + 1), Some(Way::BitFlipped))
    }
}
