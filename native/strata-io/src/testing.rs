//! For tests and benchmarks: stores that count, delay or fail, and a server that is not the speed limit.

pub mod bench_server;
mod counting;
mod faulty;
mod hooked;
mod mortal;
mod slow;

pub use counting::{CountingStore, Counts};
pub use faulty::{Fault, FaultyStore, Way};
pub use hooked::{Hook, Hooked, Kind, Request};
pub use mortal::Dies;
pub use slow::SlowStore;
