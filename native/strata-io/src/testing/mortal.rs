//! A process that dies among its requests.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use async_trait::async_trait;

use super::{Hook, Request};
use crate::{Error, Result};

/// Refuses everything once so many requests that change something were made.
#[derive(Debug)]
pub struct Dies {
    left: AtomicI64,
}

impl Dies {
    /// After `left` requests that change something.
    pub fn after(left: i64) -> Self {
        Self { left: AtomicI64::new(left) }
    }
}

#[async_trait]
impl Hook for Dies {
    async fn before(&self, request: &Request<'_>) -> Result<()> {
        let is_change = request.kind.is_change();
        let left = if is_change { self.left.fetch_sub(1, Relaxed) } else { self.left.load(Relaxed) };
        if left > 0 {
            return Ok(());
        }
        let (object, detail) = (request.name.to_owned(), "the process is dead".to_owned());
        Err(Error::Io { operation: "any", object, errno: None, detail })
    }
}
