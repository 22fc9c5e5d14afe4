//! A store that is far away: each request takes time, and bytes take more.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::hooked::{Hook, Hooked, Request};
use crate::{Result, Store};

/// Delays each request.
pub type SlowStore = Hooked<Delay>;

/// Time that requests take.
#[derive(Debug, Clone, Copy)]
pub struct Delay {
    latency: Duration,
    bytes_per_s: f64,
}

impl SlowStore {
    /// `inner`, with `latency` before each request and at most `bytes_per_s` within it. Requests side by side
    /// do not slow each other.
    pub fn delaying(inner: Arc<dyn Store>, latency: Duration, bytes_per_s: f64) -> Self {
        Self::new(inner, Delay { latency, bytes_per_s })
    }
}

#[async_trait]
impl Hook for Delay {
    async fn before(&self, request: &Request<'_>) -> Result<()> {
        let transfer = Duration::from_secs_f64(request.bytes as f64 / self.bytes_per_s);
        tokio::time::sleep(self.latency + transfer).await;
        Ok(())
    }
}
