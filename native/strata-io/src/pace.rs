//! How many requests one store bears at a time, and when a read is worth a second request. Pure: values in, values out,
//! no clock.
//!
//! The width follows TCP's rule, additive increase and multiplicative decrease (RFC 5681): half as wide when the store
//! says that it is too much, one wider after each full round that it served. It starts as wide as callers like, so that
//! a store which never complains is never slowed.

use std::collections::VecDeque;
use std::time::Duration;

/// Wider than anything a process asks for at once.
const WIDEST: usize = 1 << 16;

/// Failures of the server in a row (see [`CALM`]) that count as a complaint: one alone is an accident.
const BURST: u32 = 3;

/// Requests served in a row after which earlier failures are forgotten.
const CALM: u32 = 16;

/// How a request ended, as far as it says something about the store's load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// It was answered, or failed for a reason of its own.
    Served,
    /// The store said that there are too many.
    Throttled,
    /// The server failed, or nothing came for too long.
    Troubled,
}

/// The number of requests that may be in flight.
#[derive(Debug)]
pub(crate) struct Pace {
    width: usize,
    /// How often the width was cut; what began before the last cut says nothing about the width after it.
    epoch: u64,
    /// Served at this width since it last changed.
    served: usize,
    troubled: u32,
    calm: u32,
}

impl Pace {
    /// As wide as callers like.
    pub(crate) fn new() -> Self {
        Self { width: WIDEST, epoch: 0, served: 0, troubled: 0, calm: 0 }
    }

    /// Requests that may be in flight; at least 1.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// What a request remembers from its start until [`Pace::ended`].
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Takes the end of a request that began in `epoch`, with `in_flight` of them at its end, itself included.
    pub(crate) fn ended(&mut self, load: Load, epoch: u64, in_flight: usize) {
        match load {
            Load::Served => self.served(epoch, in_flight),
            // Answers to one burst are one complaint.
            Load::Throttled if epoch == self.epoch => self.narrow(in_flight),
            Load::Throttled => {}
            Load::Troubled => {
                (self.troubled, self.calm) = (self.troubled + 1, 0);
                if self.troubled >= BURST && epoch == self.epoch {
                    self.narrow(in_flight);
                }
            }
        }
    }

    fn served(&mut self, epoch: u64, in_flight: usize) {
        self.calm += 1;
        if self.calm >= CALM {
            (self.troubled, self.calm) = (0, 0);
        }
        // A width that is not used is not tried: growing it would end in a burst.
        if epoch != self.epoch || in_flight < self.width {
            return;
        }
        self.served += 1;
        if self.served >= self.width {
            (self.width, self.served) = ((self.width + 1).min(WIDEST), 0);
        }
    }

    fn narrow(&mut self, in_flight: usize) {
        self.width = (self.width.min(in_flight) / 2).max(1);
        self.epoch += 1;
        (self.served, self.troubled, self.calm) = (0, 0, 0);
    }
}

/// Reads that are remembered.
const SIBLINGS: usize = 32;

/// Reads that must have ended before one can be called slow.
const ENOUGH: usize = 8;

/// A read is slow when it takes this many times as long as its siblings would…
const SLOWER: u32 = 4;

/// … and at least this long: below it a second request gains nothing worth its price.
const PATIENCE: Duration = Duration::from_secs(1);

/// One second request for this many reads, at most: 3 %.
const READS_FOR_ONE: u32 = 32;

/// Second requests that may be saved up for one bad moment.
const SAVED: u32 = 4;

/// Bodies below this size say nothing about how fast bytes come.
const TELLING_BYTES: u64 = 64 << 10;

/// What the last reads of a store took, and how many second requests they have paid for.
#[derive(Debug, Default)]
pub(crate) struct Siblings {
    /// From the request to the head of its answer.
    heads: VecDeque<Duration>,
    /// Seconds for a byte of the body.
    bytes: VecDeque<f64>,
    /// In parts of [`READS_FOR_ONE`].
    credit: u32,
}

impl Siblings {
    /// A read has ended well: the head of its answer came after `head`, its `num_bytes` bytes within `body` after that.
    pub(crate) fn ended(&mut self, head: Duration, body: Duration, num_bytes: u64) {
        remember(&mut self.heads, head);
        if num_bytes >= TELLING_BYTES {
            remember(&mut self.bytes, body.as_secs_f64() / num_bytes as f64);
        }
        self.credit = (self.credit + 1).min(SAVED * READS_FOR_ONE);
    }

    /// Time after which a read of `num_bytes` bytes is slow; `None` while too little is known.
    pub(crate) fn patience(&self, num_bytes: u64) -> Option<Duration> {
        if self.heads.len() < ENOUGH {
            return None;
        }
        let body_s = if num_bytes < TELLING_BYTES {
            0.0
        } else if self.bytes.len() < ENOUGH {
            return None;
        } else {
            median(&self.bytes) * num_bytes as f64
        };
        let whole = median(&self.heads) + Duration::try_from_secs_f64(body_s).ok()?;
        Some((whole * SLOWER).max(PATIENCE))
    }

    /// Takes the price of a second request, if the reads so far have paid for one.
    pub(crate) fn pay(&mut self) -> bool {
        let paid = self.credit >= READS_FOR_ONE;
        if paid {
            self.credit -= READS_FOR_ONE;
        }
        paid
    }
}

fn remember<T>(last: &mut VecDeque<T>, value: T) {
    if last.len() == SIBLINGS {
        last.pop_front();
    }
    last.push_back(value);
}

/// The upper one of two in the middle; `values` is not empty.
fn median<T: PartialOrd + Copy>(values: &VecDeque<T>) -> T {
    let mut sorted: Vec<T> = values.iter().copied().collect();
    sorted.sort_by(|a, b| a.partial_cmp(b).expect("times are numbers"));
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn throttled_to(width: usize) -> Pace {
        let mut pace = Pace::new();
        pace.ended(Load::Throttled, 0, 2 * width);
        assert_eq!(pace.width(), width);
        pace
    }

    #[test]
    fn a_store_that_serves_is_never_narrowed() {
        let mut pace = Pace::new();
        (0..1000).for_each(|_| pace.ended(Load::Served, 0, 16));
        assert_eq!(pace.width(), WIDEST);
    }

    #[test]
    fn a_complaint_halves_what_is_in_flight_and_a_burst_is_one_complaint() {
        let mut pace = Pace::new();
        (0..12).for_each(|_| pace.ended(Load::Throttled, 0, 16));
        assert_eq!((pace.width(), pace.epoch()), (8, 1));
        pace.ended(Load::Throttled, 1, 8);
        assert_eq!((pace.width(), pace.epoch()), (4, 2));
    }

    #[test]
    fn each_full_round_served_widens_by_one() {
        let mut pace = throttled_to(4);
        let widths: Vec<usize> = (0..15)
            .map(|_| {
                pace.ended(Load::Served, 1, pace.width());
                pace.width()
            })
            .collect();
        assert_eq!(widths, [4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7]);
    }

    #[test]
    fn a_width_that_is_not_used_does_not_grow() {
        let mut pace = throttled_to(4);
        (0..100).for_each(|_| pace.ended(Load::Served, 1, 3));
        assert_eq!(pace.width(), 4);
    }

    #[test]
    fn failures_of_the_server_count_only_in_a_burst() {
        let mut pace = Pace::new();
        for _ in 0..50 {
            pace.ended(Load::Troubled, 0, 16);
            (0..CALM).for_each(|_| pace.ended(Load::Served, 0, 16));
        }
        assert_eq!(pace.width(), WIDEST);
        (0..BURST).for_each(|_| pace.ended(Load::Troubled, 0, 16));
        assert_eq!(pace.width(), 8);
    }

    /// Rounds of requests against a server that throttles those above `capacity`.
    fn rounds(capacity: usize, wanted: usize, num: usize) -> (Vec<usize>, usize) {
        let (mut pace, mut widths, mut refused) = (Pace::new(), Vec::new(), 0);
        for _ in 0..num {
            let (in_flight, epoch) = (pace.width().min(wanted), pace.epoch());
            for index in 0..in_flight {
                let load = if index < capacity { Load::Served } else { Load::Throttled };
                refused += usize::from(load == Load::Throttled);
                pace.ended(load, epoch, in_flight);
            }
            widths.push(in_flight);
        }
        (widths, refused)
    }

    proptest! {
        #[test]
        fn the_width_settles_at_what_the_server_bears(capacity in 1..40usize, wanted in 1..64usize) {
            let (widths, refused) = rounds(capacity, wanted, 400);
            let (settled, most) = (&widths[20..], capacity.min(wanted));
            prop_assert!(settled.iter().all(|&width| width <= most + 1));
            let mean = settled.iter().sum::<usize>() as f64 / settled.len() as f64;
            prop_assert!(mean >= 0.6 * most as f64, "{mean} of {most}");
            // The first burst, and then one at the top of each climb.
            prop_assert!(refused <= 2 * wanted + 2 * 400 / most.max(1), "{refused} refused");
        }

        #[test]
        fn whatever_happens_something_may_go_and_nothing_is_unbounded(
            ends in proptest::collection::vec((0..3u8, 0..3u64, 1..100usize), 0..300)
        ) {
            let mut pace = Pace::new();
            for (load, behind, in_flight) in ends {
                let load = [Load::Served, Load::Throttled, Load::Troubled][load as usize];
                let before = pace.width();
                pace.ended(load, pace.epoch().saturating_sub(behind), in_flight);
                prop_assert!((1..=WIDEST).contains(&pace.width()));
                prop_assert!(pace.width() <= before + 1);
                prop_assert!(load != Load::Served || pace.width() >= before);
            }
        }

        #[test]
        fn second_requests_stay_a_few_in_a_hundred(reads in 0..5000u32) {
            let (mut siblings, mut paid) = (Siblings::default(), 0);
            for _ in 0..reads {
                siblings.ended(Duration::ZERO, Duration::ZERO, 0);
                paid += u32::from(siblings.pay());
            }
            prop_assert!(paid <= reads / READS_FOR_ONE);
        }
    }

    #[test]
    fn a_read_is_slow_by_the_median_of_its_siblings() {
        let mut siblings = Siblings::default();
        let second = Duration::from_secs(1);
        for index in 0..9 {
            assert_eq!(siblings.patience(1 << 20).is_some(), index >= ENOUGH);
            // Two of them are out of the ordinary.
            let factor = if index < 2 { 100 } else { 1 };
            siblings.ended(second * factor, second * factor, 1 << 20);
        }
        assert_eq!(siblings.patience(0), Some(4 * second));
        assert_eq!(siblings.patience(1 << 20), Some(8 * second));
        assert_eq!(siblings.patience(3 << 20), Some(16 * second));
    }

    #[test]
    fn nothing_is_slow_before_a_second() {
        let mut siblings = Siblings::default();
        (0..ENOUGH).for_each(|_| siblings.ended(Duration::from_millis(1), Duration::ZERO, 0));
        assert_eq!(siblings.patience(100), Some(PATIENCE));
    }
}
