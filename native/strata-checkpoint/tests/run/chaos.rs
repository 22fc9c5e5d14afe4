//! A process's view of a store that fails: requests refused, answers lost, and death at any request.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use futures::future::BoxFuture;
use strata_io::Error;
use strata_io::testing::{Hook, Request};

/// Numbers that are the same for the same seed: splitmix64, <https://prng.di.unimi.it/splitmix64.c>.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of 0..`count`.
    pub fn below(&mut self, count: u64) -> u64 {
        self.next() % count
    }

    /// True in `percent` of 100 throws.
    pub fn hits(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What goes wrong with one process's requests from now on.
#[derive(Default)]
pub struct Trouble {
    /// Of 1,000 requests so many are refused.
    pub refused: u64,
    /// Of 1,000 changes so many are made, and said to have failed.
    pub lost: u64,
    /// The process dies at this request, before or after it is made.
    pub dies: Option<(u64, bool)>,
    /// What happens elsewhere right before this request.
    pub meanwhile: Option<(u64, BoxFuture<'static, ()>)>,
}

/// A hook that makes [`Trouble`].
pub struct Chaos {
    dice: Mutex<Dice>,
    trouble: Mutex<Trouble>,
    requests: AtomicU64,
    is_dead: AtomicBool,
}

impl Chaos {
    pub fn new(seed: u64) -> Self {
        let (dice, trouble) = (Mutex::new(Dice::new(seed)), Mutex::default());
        Self { dice, trouble, requests: AtomicU64::new(0), is_dead: AtomicBool::new(false) }
    }

    /// Requests are counted from 1 again.
    pub fn set(&self, trouble: Trouble) {
        self.requests.store(0, Relaxed);
        *self.trouble.lock().expect("no panic while held") = trouble;
    }

    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Relaxed)
    }

    fn hits(&self, per_thousand: u64) -> bool {
        self.dice.lock().expect("no panic while held").below(1000) < per_thousand
    }
}

impl fmt::Debug for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Chaos")
    }
}

fn failed(request: &Request<'_>, detail: &str) -> Error {
    let (object, detail) = (request.name.to_owned(), detail.to_owned());
    Error::Exhausted { operation: "ask for", object, tries: 8, elapsed_s: 1.0, detail }
}

#[async_trait]
impl Hook for Chaos {
    async fn before(&self, request: &Request<'_>) -> strata_io::Result<()> {
        if self.is_dead() {
            return Err(failed(request, "the process is dead"));
        }
        let number = self.requests.fetch_add(1, Relaxed) + 1;
        let (meanwhile, dies, refused) = {
            let mut trouble = self.trouble.lock().expect("no panic while held");
            let is_now = trouble.meanwhile.as_ref().is_some_and(|(at, _)| *at == number);
            let meanwhile = if is_now { trouble.meanwhile.take() } else { None };
            (meanwhile, trouble.dies.filter(|(at, _)| *at == number), trouble.refused)
        };
        if let Some((_, meanwhile)) = meanwhile {
            meanwhile.await;
        }
        if let Some((_, is_made)) = dies {
            self.is_dead.store(true, Relaxed);
            return if is_made { Ok(()) } else { Err(failed(request, "the process is dead")) };
        }
        if self.hits(refused) { Err(failed(request, "503 Slow Down")) } else { Ok(()) }
    }

    async fn after(&self, request: &Request<'_>) -> strata_io::Result<()> {
        if self.is_dead() {
            return Err(failed(request, "the process is dead"));
        }
        let lost = self.trouble.lock().expect("no panic while held").lost;
        if request.kind.is_change() && self.hits(lost) { Err(failed(request, "the answer was lost")) } else { Ok(()) }
    }
}
