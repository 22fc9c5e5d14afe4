//! The one retry layer: exponential back-off with full jitter, a number of tries, a deadline.
//!
//! The stores' own clients never retry. Whether a failure deserves another try is decided where the answer
//! of the store is understood; here only the waiting and the counting happen.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use crate::gate::{Lanes, Tally};
use crate::pace::Load;
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
        /// Why it is worth one.
        cause: Cause,
        /// The shortest wait that the store asked for.
        after: Option<Duration>,
    },
    /// What the next try is signed with has changed: worth another one at once, but not a third.
    Corrected(Error),
}

/// Why a failure may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The store has too many requests.
    Throttled,
    /// The server failed.
    Server,
    /// Too few bytes moved for too long.
    Stalled,
    /// The connection broke, or another request was in the way.
    Other,
}

impl Failure {
    /// A failure worth another try, with no wait asked for.
    pub(crate) fn again(detail: impl Into<String>) -> Self {
        Self::Again { detail: detail.into(), cause: Cause::Other, after: None }
    }

    /// What it says about the store's load, and the wait that the store asked for.
    pub(crate) fn load(&self) -> (Load, Option<Duration>) {
        match self {
            Self::Again { cause: Cause::Throttled, after, .. } => (Load::Throttled, *after),
            Self::Again { cause: Cause::Server | Cause::Stalled, .. } => (Load::Troubled, None),
            Self::Again { cause: Cause::Other, .. } | Self::Final(_) | Self::Corrected(_) => (Load::Served, None),
        }
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
    lanes: &'a Lanes,
    tries: u32,
    since_progress: u32,
    corrected: bool,
    /// The last failure that passes.
    last: Option<String>,
}

impl<'a> Retry<'a> {
    /// Starts the clock. `operation` is a verb, `object` a URL; both are for the message.
    pub(crate) fn start(policy: Policy, lanes: &'a Lanes, operation: &'static str, object: &'a str) -> Self {
        let began = Instant::now();
        Self { policy, operation, object, began, lanes, tries: 0, since_progress: 0, corrected: false, last: None }
    }

    /// Runs one try when it may be made, cut off at the deadline. Waiting for others of the same handle costs no time;
    /// waiting for a store that is too busy does, or it could be for ever.
    pub(crate) async fn attempt<T>(
        &mut self,
        try_once: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let asked = Instant::now();
        let slot = self.lanes.slot().await;
        self.began += asked.elapsed();
        let (deadline, ends_at) = (self.policy.deadline, self.began + self.policy.deadline);
        let Ok(pass) = tokio::time::timeout_at(ends_at, self.lanes.enter(slot)).await else {
            let busy = format!("the store was too busy for a try within the deadline of {deadline:?}");
            return Err(Failure::again(match self.last.take() {
                Some(last) => format!("{last}; then {busy}"),
                None => busy,
            }));
        };
        let ended = tokio::time::timeout_at(ends_at, try_once).await.unwrap_or_else(|_| {
            let detail = format!("no answer within the deadline of {deadline:?}");
            Err(Failure::Again { detail, cause: Cause::Stalled, after: None })
        });
        let (load, after) = ended.as_ref().err().map_or((Load::Served, None), Failure::load);
        pass.ended(load, after);
        ended
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
        let (detail, cause, after) = match failure {
            Failure::Corrected(error) if !self.corrected => {
                tracing::warn!(%error, "trying again with other keys or another time");
                self.corrected = true;
                self.tries += 1;
                Tally::add(&self.lanes.tally.retries);
                return Ok(());
            }
            Failure::Final(error) | Failure::Corrected(error) => return Err(error),
            Failure::Again { detail, cause, after } => (detail, cause, after),
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
        Tally::add(&self.lanes.tally.retries);
        if cause == Cause::Stalled {
            Tally::add(&self.lanes.tally.restarted);
        }
        tracing::info!(object = self.object, tries = self.tries, wait_s = wait.as_secs_f64(), detail, "trying again");
        self.last = Some(detail);
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
    use std::sync::Arc;

    use super::*;
    use crate::gate::Gate;

    fn lanes() -> Lanes {
        Lanes::new(1, Gate::of("memory://retry"), Arc::default())
    }

    #[test]
    fn waits_double_up_to_the_longest() {
        let waits: Vec<u128> = [1, 2, 3, 8, 9, 40].iter().map(|&n| longest_wait(n).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 12_800, 20_000, 20_000]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_a_store_asks_for_is_kept() {
        let lanes = lanes();
        let mut retry =
            Retry::start(Policy { max_tries: 3, deadline: Duration::from_secs(60) }, &lanes, "read", "s3://b/k");
        let began = tokio::time::Instant::now();
        let asked = Some(Duration::from_secs(7));
        retry.pause(Failure::Again { detail: "503".into(), cause: Cause::Throttled, after: asked }).await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(7));
    }

    #[tokio::test(start_paused = true)]
    async fn tries_end_at_the_limit_and_are_reported() {
        let lanes = lanes();
        let mut retry =
            Retry::start(Policy { max_tries: 2, deadline: Duration::from_secs(60) }, &lanes, "read", "s3://b/k");
        retry.pause(Failure::again("reset")).await.unwrap();
        let error = retry.pause(Failure::again("reset again")).await.unwrap_err();
        assert!(matches!(&error, Error::Exhausted { tries: 2, detail, .. } if detail == "reset again"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn progress_renews_the_tries_but_not_the_deadline() {
        let lanes = lanes();
        let mut retry =
            Retry::start(Policy { max_tries: 2, deadline: Duration::from_secs(60) }, &lanes, "read", "s3://b/k");
        for _ in 0..5 {
            retry.pause(Failure::again("cut")).await.unwrap();
            retry.progressed();
        }
        let late = Failure::Again { detail: "cut".into(), cause: Cause::Other, after: Some(Duration::from_secs(61)) };
        assert!(matches!(retry.pause(late).await, Err(Error::Exhausted { tries: 6, .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_correction_is_worth_one_more_try() {
        let lanes = lanes();
        let mut retry =
            Retry::start(Policy { max_tries: 9, deadline: Duration::from_secs(60) }, &lanes, "read", "s3://b/k");
        let refused =
            || Failure::Corrected(Error::PermissionDenied { object: "s3://b/k".into(), detail: "Expired".into() });
        retry.pause(refused()).await.unwrap();
        assert!(matches!(retry.pause(refused()).await, Err(Error::PermissionDenied { .. })));
    }
}
