//! What the server does wrong on purpose: late answers, too many requests, and, drawn from a seed, answers that fail.

use std::io::{self, Read};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::wire::Head;

/// A stalled answer ends here should the client wait longer.
const STALL: Duration = Duration::from_secs(30);

/// What is to go wrong; by default nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trouble {
    /// Time before each answer.
    pub latency: Duration,
    /// Requests at a time above which the others are told to slow down.
    pub busy_above: Option<usize>,
    /// Share of the requests that fail in one of the ways of a real network and store, from 0 to 1.
    pub share: f64,
    /// Share of those in which nothing more comes, instead of an end.
    pub stalled: f64,
    /// Decides which requests fail, and how.
    pub seed: u64,
}

/// How a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// 503, and nothing is done.
    SlowDown,
    /// 400, and nothing is done: the body was too slow to come.
    TimedOut,
    /// The connection ends before the body is read.
    Reset,
    /// It is done, and the connection ends without an answer.
    Lost,
    /// It is done, and the answer is 500.
    Error,
    /// The answer's body ends in the middle.
    Cut,
    /// The answer's body stops in the middle, and the connection stays.
    Stalled,
}

/// Decides about each request in turn.
#[derive(Debug, Default)]
pub(super) struct Faults {
    trouble: Trouble,
    healed: AtomicBool,
    in_flight: AtomicUsize,
    requests: AtomicU64,
    /// Requests that were served, and the sum of those in flight then.
    served: AtomicU64,
    together: AtomicU64,
}

/// Counts a request as being in flight.
pub(super) struct InFlight<'a>(&'a Faults);

impl Faults {
    pub(super) fn new(trouble: Trouble) -> Self {
        Self { trouble, ..Self::default() }
    }

    /// A request has come: what goes wrong with it.
    pub(super) fn enter(&self, head: &Head) -> (InFlight<'_>, Option<Fault>) {
        let in_flight = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        let nth = self.requests.fetch_add(1, Ordering::Relaxed);
        let is_busy = self.trouble.busy_above.is_some_and(|most| in_flight > most);
        if self.healed.load(Ordering::Relaxed) {
            return (InFlight(self), None);
        }
        if !is_busy {
            self.served.fetch_add(1, Ordering::Relaxed);
            self.together.fetch_add(in_flight as u64, Ordering::Relaxed);
        }
        let fault = if is_busy { Some(Fault::SlowDown) } else { self.drawn(head, nth) };
        (InFlight(self), fault)
    }

    fn drawn(&self, head: &Head, nth: u64) -> Option<Fault> {
        let [fails, stalls, way] = [0, 1, 2].map(|k| unit(self.trouble.seed, 3 * nth + k));
        if fails >= self.trouble.share {
            return None;
        }
        let ways: &[Fault] = match head.method.as_str() {
            "GET" => &[Fault::SlowDown, Fault::Reset, Fault::Error, Fault::Cut, Fault::Lost],
            _ => &[Fault::SlowDown, Fault::TimedOut, Fault::Reset, Fault::Lost, Fault::Error],
        };
        let fault = ways[(way * ways.len() as f64) as usize];
        let stalls = stalls < self.trouble.stalled && head.method == "GET";
        Some(if stalls { Fault::Stalled } else { fault })
    }

    pub(super) fn mean_in_flight(&self) -> f64 {
        self.together.load(Ordering::Relaxed) as f64 / self.served.load(Ordering::Relaxed) as f64
    }

    pub(super) fn heal(&self) {
        self.healed.store(true, Ordering::Relaxed);
    }

    /// Waits as long as the network would.
    pub(super) fn wait(&self) {
        if !self.trouble.latency.is_zero() {
            std::thread::sleep(self.trouble.latency);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns when the client has gone, or waited long enough.
pub(super) fn wait_for_the_end(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(STALL))?;
    stream.read(&mut [0; 16]).map(|_| ())
}

/// A number from 0 to 1, the same for the same seed and position.
fn unit(seed: u64, at: u64) -> f64 {
    // SplitMix64 <https://prng.di.unimi.it/splitmix64.c>.
    let mut z =
        seed.wrapping_mul(0xd129_0b8d_2a1a_5ed1).wrapping_add(at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_spread_over_the_whole_range() {
        let draws: Vec<f64> = (0..10_000).map(|at| unit(7, at)).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)) && (0.49..0.51).contains(&mean), "{mean}");
    }
}
