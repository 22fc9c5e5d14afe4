//! Lets requests to a store through: as many as the caller configured, and no more than the store bears.
//!
//! The first limit belongs to one store handle, the second to the bucket and all that this process does there. What the
//! second is, [`crate::pace`] decides.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::Counters;
use crate::pace::{Load, Pace, Siblings};

/// Longest time for which one answer keeps the others of its bucket waiting: a wrong `Retry-After` may say anything.
const LONGEST_HOLD: Duration = Duration::from_secs(20);

/// What has happened to the requests of a store handle and its siblings.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) restarted: AtomicU64,
    pub(crate) hedged: AtomicU64,
}

impl Tally {
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counters(&self) -> Counters {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            requests: value(&self.requests),
            retries: value(&self.retries),
            throttled: value(&self.throttled),
            restarted: value(&self.restarted),
            hedged: value(&self.hedged),
        }
    }
}

/// What one process knows of a bucket, whichever handle it came through.
#[derive(Debug)]
pub(crate) struct Gate {
    /// As many as the width, less those in flight.
    permits: Semaphore,
    state: Mutex<State>,
    /// How long reads take here.
    pub(crate) reads: Mutex<Siblings>,
}

#[derive(Debug)]
struct State {
    pace: Pace,
    in_flight: usize,
    /// Requests above the width that were in flight when it was cut: as many permits do not come back.
    owed: usize,
    held_until: Option<Instant>,
}

type Gates = HashMap<(u32, String), Weak<Gate>>;

impl Gate {
    fn new() -> Self {
        let pace = Pace::new();
        let permits = Semaphore::new(pace.width());
        let state = Mutex::new(State { pace, in_flight: 0, owed: 0, held_until: None });
        Self { permits, state, reads: Mutex::default() }
    }

    /// The gate of the bucket `identity` in this process.
    pub(crate) fn of(identity: &str) -> Arc<Self> {
        /// By process too: what was in flight when a process forked is not in flight in the child.
        static GATES: LazyLock<Mutex<Gates>> = LazyLock::new(Mutex::default);
        let mut gates = GATES.lock().expect("no panic while held");
        gates.retain(|_, gate| gate.strong_count() > 0);
        let known = gates.entry((std::process::id(), identity.to_owned())).or_default();
        known.upgrade().unwrap_or_else(|| {
            let gate = Arc::new(Self::new());
            *known = Arc::downgrade(&gate);
            gate
        })
    }

    /// Until when nobody may begin, if that is not over.
    fn held_until(&self) -> Option<Instant> {
        let held_until = self.state.lock().expect("no panic while held").held_until;
        held_until.filter(|instant| *instant > Instant::now())
    }

    fn set_width(&self, state: &mut State, before: usize) {
        let now = state.pace.width();
        if now < before {
            state.owed += before - now - self.permits.forget_permits(before - now);
            tracing::info!(requests = now, "the store is too busy: fewer requests at a time");
        } else {
            let paid = state.owed.min(now - before);
            state.owed -= paid;
            self.permits.add_permits(now - before - paid);
        }
    }
}

/// The way of a store handle's requests.
#[derive(Debug)]
pub(crate) struct Lanes {
    slots: Semaphore,
    pub(crate) gate: Arc<Gate>,
    pub(crate) tally: Arc<Tally>,
}

impl Lanes {
    /// `max_concurrency` requests at a time, fewer when the bucket bears fewer.
    pub(crate) fn new(max_concurrency: usize, gate: Arc<Gate>, tally: Arc<Tally>) -> Self {
        Self { slots: Semaphore::new(max_concurrency.clamp(1, Semaphore::MAX_PERMITS)), gate, tally }
    }

    /// Waits until this handle may make a request.
    ///
    /// # Cancel safety
    /// A dropped wait takes nothing.
    pub(crate) async fn slot(&self) -> SemaphorePermit<'_> {
        self.slots.acquire().await.expect("the semaphore is never closed")
    }

    /// Waits until the store bears a request more.
    ///
    /// # Cancel safety
    /// A dropped wait takes nothing, and gives up the slot.
    pub(crate) async fn enter<'a>(&'a self, slot: SemaphorePermit<'a>) -> Pass<'a> {
        let permit = self.gate.permits.acquire().await.expect("the semaphore is never closed");
        let pass = self.pass(slot, permit);
        while let Some(held_until) = self.gate.held_until() {
            tokio::time::sleep_until(held_until).await;
        }
        pass
    }

    /// A pass for a request that is only worth making now, while the store bears it.
    pub(crate) fn try_enter(&self) -> Option<Pass<'_>> {
        if self.gate.held_until().is_some() {
            return None;
        }
        let slot = self.slots.try_acquire().ok()?;
        Some(self.pass(slot, self.gate.permits.try_acquire().ok()?))
    }

    fn pass<'a>(&'a self, slot: SemaphorePermit<'a>, permit: SemaphorePermit<'a>) -> Pass<'a> {
        let mut state = self.gate.state.lock().expect("no panic while held");
        state.in_flight += 1;
        let epoch = state.pace.epoch();
        drop(state);
        Tally::add(&self.tally.requests);
        Pass { lanes: self, epoch, permit: Some(permit), _slot: slot }
    }
}

/// Leave to have one request in flight, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    lanes: &'a Lanes,
    epoch: u64,
    permit: Option<SemaphorePermit<'a>>,
    _slot: SemaphorePermit<'a>,
}

impl Pass<'_> {
    /// The request has ended so; `after` is the wait that the store asked for. A pass that is dropped instead says
    /// nothing about the store.
    pub(crate) fn ended(self, load: Load, after: Option<Duration>) {
        let gate = &self.lanes.gate;
        let mut state = gate.state.lock().expect("no panic while held");
        let (before, in_flight) = (state.pace.width(), state.in_flight);
        state.pace.ended(load, self.epoch, in_flight);
        gate.set_width(&mut state, before);
        if let Some(after) = after.filter(|_| load == Load::Throttled) {
            let until = Instant::now() + after.min(LONGEST_HOLD);
            state.held_until = state.held_until.max(Some(until));
        }
        if load == Load::Throttled {
            Tally::add(&self.lanes.tally.throttled);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.lanes.gate.state.lock().expect("no panic while held");
        state.in_flight -= 1;
        let permit = self.permit.take().expect("taken only here");
        if state.owed > 0 {
            state.owed -= 1;
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(max_concurrency: usize) -> Lanes {
        Lanes::new(max_concurrency, Arc::new(Gate::new()), Arc::default())
    }

    async fn enter(lanes: &Lanes) -> Pass<'_> {
        lanes.enter(lanes.slot().await).await
    }

    async fn enter_all(lanes: &Lanes, num: usize) -> Vec<Pass<'_>> {
        let mut passes = Vec::new();
        for _ in 0..num {
            passes.push(enter(lanes).await);
        }
        passes
    }

    fn is_open(lanes: &Lanes) -> bool {
        futures::FutureExt::now_or_never(enter(lanes)).is_some()
    }

    #[tokio::test]
    async fn after_a_complaint_half_as_many_may_be_in_flight() {
        let lanes = lanes(16);
        let mut passes = enter_all(&lanes, 16).await;
        passes.pop().unwrap().ended(Load::Throttled, None);
        while passes.len() >= 8 {
            assert!(!is_open(&lanes), "{} in flight", passes.len());
            passes.pop();
        }
        assert!(is_open(&lanes));
        passes.extend([enter(&lanes).await]);
        assert!(!is_open(&lanes));
    }

    #[tokio::test]
    async fn served_rounds_let_one_more_in() {
        let lanes = lanes(16);
        let mut passes = enter_all(&lanes, 4).await;
        passes.pop().unwrap().ended(Load::Throttled, None);
        passes.clear();
        for _ in 0..2 {
            let mut passes = enter_all(&lanes, 2).await;
            assert!(!is_open(&lanes));
            passes.pop().unwrap().ended(Load::Served, None);
        }
        let passes = enter_all(&lanes, 3).await;
        assert!(!is_open(&lanes));
        drop(passes);
    }

    #[tokio::test]
    async fn one_complaint_narrows_every_handle_of_the_bucket() {
        let (one, gate) = (lanes(16), Gate::of("s3://shared at test"));
        let [a, b] = [(); 2].map(|()| Lanes::new(16, Gate::of("s3://shared at test"), Arc::default()));
        assert!(Arc::ptr_eq(&a.gate, &gate) && !Arc::ptr_eq(&one.gate, &gate));
        let mut passes = enter_all(&a, 2).await;
        passes.pop().unwrap().ended(Load::Throttled, None);
        assert!(!is_open(&b) && is_open(&one));
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_a_store_asks_for_holds_everybody_but_not_for_ever() {
        for (asked_s, held_s) in [(7, 7), (10_000, 20)] {
            let lanes = lanes(16);
            let began = Instant::now();
            enter(&lanes).await.ended(Load::Throttled, Some(Duration::from_secs(asked_s)));
            drop(enter(&lanes).await);
            assert_eq!(began.elapsed().as_secs(), held_s);
        }
    }

    #[tokio::test]
    async fn a_wait_that_is_given_up_takes_nothing() {
        let lanes = lanes(2);
        let passes = enter_all(&lanes, 2).await;
        (0..10).for_each(|_| assert!(!is_open(&lanes)));
        drop(passes);
        assert_eq!(enter_all(&lanes, 2).await.len(), 2);
    }

    #[tokio::test]
    async fn a_store_that_is_busy_enough_gets_no_second_requests() {
        let lanes = lanes(3);
        let mut passes = enter_all(&lanes, 2).await;
        assert!(lanes.try_enter().is_some());
        passes.pop().unwrap().ended(Load::Throttled, None);
        assert!(lanes.try_enter().is_none());
    }
}
