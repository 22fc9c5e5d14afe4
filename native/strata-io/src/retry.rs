//! The one retry layer: exponential back-off with full jitter, a number of tries, a deadline.
//!
//! The stores' own clients never retry. Whether a failure deserves another try is decided where the answer
//! of the store is understood; here only the waiting and the counting happen.

use std::future::Future;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::{Error, Result};

/// First upper bound of the random wait; doubled for each further try.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// Largest upper bound: what S3 advises for throttled clients.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// How one try ended, if not well.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another try would end the same way.
    Final(Error),
    /// Worth another try.
    Again {
        /// What happened, for the message should every try fail.
        detail: String,
        /// The shortest wait that the store asked for.
        after: Option<Duration>,
    },
}

impl Failure {
    /// A failure worth another try, with no wait asked for.
    pub(crate) fn again(detail: impl Into<String>) -> Self {
        Self::Again { detail: detail.into(), after: None }
    }
}

/// Limits of one operation with all its tries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Tries, the first included.
    pub(crate) max_tries: u32,
    /// Time for all of them.
    pub(crate) deadline: Duration,
}

/// The tries of one operation.
#[derive(Debug)]
pub(crate) struct Retry<'a> {
    policy: Policy,
    operation: &'static str,
    object: &'a str,
    began: Instant,
    tries: u32,
    since_progress: u32,
}

impl<'a> Retry<'a> {
    /// Starts the clock. `operation` is a verb, `object` a URL; both are for the message.
    pub(crate) fn start(policy: Policy, operation: &'static str, object: &'a str) -> Self {
        Self { policy, operation, object, began: Instant::now(), tries: 0, since_progress: 0 }
    }

    /// Runs one try when a slot is free, cut off at the deadline. Waiting for the slot costs no time.
    pub(crate) async fn attempt<T>(
        &mut self,
        slots: &Semaphore,
        try_once: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let asked = Instant::now();
        let _slot = slots.acquire().await.expect("the semaphore is never closed");
        self.began += asked.elapsed();
        let left = self.policy.deadline.saturating_sub(self.began.elapsed());
        match tokio::time::timeout(left, try_once).await {
            Ok(ended) => ended,
            Err(_) => Err(Failure::again(format!("no answer within the deadline of {:?}", self.policy.deadline))),
        }
    }

    /// The transfer moved on, so that the tries count from here; the deadline stays.
    pub(crate) fn progressed(&mut self) {
        self.since_progress = 0;
    }

    /// Waits before the next try, or says why there is none.
    ///
    /// # Errors
    /// The final error, or [`Error::Exhausted`] when tries or time are used up.
    pub(crate) async fn pause(&mut self, failure: Failure) -> Result<()> {
        let (detail, after) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Again { detail, after } => (detail, after),
        };
        self.tries += 1;
        self.since_progress += 1;
        let wait = longest_wait(self.since_progress).mul_f64(rand::random()).max(after.unwrap_or_default());
        let elapsed = self.began.elapsed();
        if self.since_progress >= self.policy.max_tries || elapsed + wait >= self.policy.deadline {
            return Err(Error::Exhausted {
                operation: self.operation,
                object: self.object.to_owned(),
                tries: self.tries,
                elapsed_s: elapsed.as_secs_f64(),
                detail,
            });
        }
        tracing::info!(object = self.object, tries = self.tries, wait_s = wait.as_secs_f64(), detail, "trying again");
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

/// Upper bound of the wait after the `tries`-th failure, from 1.
fn longest_wait(tries: u32) -> Duration {
    FIRST_WAIT.saturating_mul(1 << (tries - 1).min(16)).min(LONGEST_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest() {
        let waits: Vec<u128> = [1, 2, 3, 8, 9, 40].iter().map(|&n| longest_wait(n).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 12_800, 20_000, 20_000]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_a_store_asks_for_is_kept() {
        let mut retry = Retry::start(Policy { max_tries: 3, deadline: Duration::from_secs(60) }, "read", "s3://b/k");
        let began = tokio::time::Instant::now();
        let asked = Some(Duration::from_secs(7));
        retry.pause(Failure::Again { detail: "503".into(), after: asked }).await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(7));
    }

    #[tokio::test(start_paused = true)]
    async fn tries_end_at_the_limit_and_are_reported() {
        let mut retry = Retry::start(Policy { max_tries: 2, deadline: Duration::from_secs(60) }, "read", "s3://b/k");
        retry.pause(Failure::again("reset")).await.unwrap();
        let error = retry.pause(Failure::again("reset again")).await.unwrap_err();
        assert!(matches!(&error, Error::Exhausted { tries: 2, detail, .. } if detail == "reset again"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn progress_renews_the_tries_but_not_the_deadline() {
        let mut retry = Retry::start(Policy { max_tries: 2, deadline: Duration::from_secs(60) }, "read", "s3://b/k");
        for _ in 0..5 {
            retry.pause(Failure::again("cut")).await.unwrap();
            retry.progressed();
        }
        let late = Failure::Again { detail: "cut".into(), after: Some(Duration::from_secs(61)) };
        assert!(matches!(retry.pause(late).await, Err(Error::Exhausted { tries: 6, .. })));
    }
}
