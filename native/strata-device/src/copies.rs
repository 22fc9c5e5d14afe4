//! Many copies to memory of the host at once: a training state that is set aside while training waits.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

use bytes::Bytes;
use strata_io::lent::LentMut;

use crate::{DeviceMemory, Result};

/// What one thread copies at a time: small enough that all threads end together.
const PIECE_BYTES: usize = 4 << 20;

/// Pieces from here on are written past the caches, which the system's memcpy does only from some MiB on.
const STREAMED_BYTES: usize = 64 << 10;

/// Copies that are to be made, each to memory of its own.
#[derive(Debug, Default)]
pub struct Copies {
    host: Vec<(Bytes, LentMut)>,
    devices: BTreeMap<u32, Vec<(DeviceMemory, LentMut)>>,
}

impl Copies {
    /// From memory of the host.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn from_host(&mut self, source: Bytes, target: LentMut) {
        assert_eq!(source.len(), target.len());
        self.host.push((source, target));
    }

    /// From memory of a device.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn from_device(&mut self, source: DeviceMemory, target: LentMut) {
        assert_eq!(source.len(), target.len() as u64);
        self.devices.entry(source.device().ordinal).or_default().push((source, target));
    }

    /// Makes them all, with `threads` for what lies on the host and one more for each device. Blocks.
    ///
    /// # Errors
    /// The driver's, once no copy runs any more; the targets then hold anything.
    ///
    /// # Panics
    /// If no thread can be started.
    pub fn run(self, threads: usize) -> Result<()> {
        let pieces = Mutex::new(self.host.into_iter().flat_map(|(source, target)| Pieces { source, target }));
        let next = || pieces.lock().expect("no panic while held").next();
        let copy_host = || {
            while let Some((source, mut target)) = next() {
                if source.len() < STREAMED_BYTES {
                    target.as_mut_slice().copy_from_slice(&source);
                } else {
                    target.stream_from(&source);
                }
            }
        };
        thread::scope(|scope| {
            let devices: Vec<_> = self.devices.into_values().map(|all| scope.spawn(move || from_device(all))).collect();
            for _ in 1..threads {
                scope.spawn(copy_host);
            }
            copy_host();
            devices.into_iter().try_for_each(|device| device.join().expect("a copy does not panic"))
        })
    }
}

/// One device's copies, all in flight together.
fn from_device(mut copies: Vec<(DeviceMemory, LentMut)>) -> Result<()> {
    let Some((first, _)) = copies.first() else { return Ok(()) };
    let device = first.device().clone();
    let mut pieces: Vec<(u64, &mut [u8])> =
        copies.iter_mut().map(|(source, target)| (source.address(), target.as_mut_slice())).collect();
    device.driver.read(device.ordinal, &mut pieces)
}

/// One copy, cut.
struct Pieces {
    source: Bytes,
    target: LentMut,
}

impl Iterator for Pieces {
    type Item = (Bytes, LentMut);

    fn next(&mut self) -> Option<Self::Item> {
        if self.target.is_empty() {
            return None;
        }
        let bytes = PIECE_BYTES.min(self.target.len());
        Some((self.source.split_to(bytes), self.target.split_to(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::StandIn;

    fn noise(bytes: usize, seed: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 31 + i / 251 + seed) as u8).collect()
    }

    /// What lies in `whole` once `sources` were copied there, one behind the other.
    fn run(threads: usize, bytes: usize, add: impl FnOnce(&mut Copies, &mut LentMut)) -> (Result<()>, Vec<u8>) {
        let (mut rest, loan) = LentMut::on_loan(bytes);
        let mut copies = Copies::default();
        add(&mut copies, &mut rest);
        let outcome = copies.run(threads);
        drop(rest);
        (outcome, loan.reclaim().unwrap().as_slice().to_vec())
    }

    #[test]
    fn every_byte_arrives_whatever_the_lengths_and_the_number_of_threads() {
        let lengths = [0, 1, 63, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7, 4];
        let sources: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(i, bytes)| noise(*bytes, i)).collect();
        for threads in [1, 2, 5] {
            let (outcome, found) = run(threads, lengths.iter().sum(), |copies, rest| {
                for source in &sources {
                    copies.from_host(Bytes::from(source.clone()), rest.split_to(source.len()));
                }
            });
            outcome.unwrap();
            assert!(found == sources.concat());
        }
    }

    #[test]
    fn memory_of_a_device_and_of_the_host_arrive_side_by_side() {
        let device = Arc::new(StandIn::new(noise(9000, 1)));
        let (outcome, found) = run(2, 6000, |copies, rest| {
            copies.from_device(StandIn::lend(&device, 100..3100), rest.split_to(3000));
            copies.from_host(Bytes::from(noise(1000, 2)), rest.split_to(1000));
            copies.from_device(StandIn::lend(&device, 7000..9000), rest.split_to(2000));
        });
        outcome.unwrap();
        let memory = device.memory();
        assert_eq!(found, [&memory[100..3100], &noise(1000, 2), &memory[7000..9000]].concat());
    }

    #[test]
    fn a_device_that_fails_is_an_error() {
        let device = Arc::new(StandIn::new(noise(100, 1)));
        let (outcome, _) =
            run(2, 200, |copies, rest| copies.from_device(StandIn::lend(&device, 0..200), rest.split_to(200)));
        assert!(outcome.is_err());
    }
}
