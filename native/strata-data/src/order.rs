//! The order of the samples of one epoch: a pure function from a position to a sample.
//!
//! Nothing is kept but the number of samples of each shard: a shuffle is a permutation that can be asked anywhere, so a
//! position is all that is needed to go on. docs/concepts/data-order.md has it in words, for other languages.

use crate::permutation::{Permutation, key};

/// How the samples of an epoch are put into disorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    /// Not at all.
    None,
    /// Whole shards; within a shard as they lie.
    Shards,
    /// Runs of `block` samples, then the samples among each `buffer` of what comes of that.
    Blocks {
        /// Samples that lie, and are read, together. Above 0.
        block: u64,
        /// Samples that are put into disorder among themselves. Above 0.
        buffer: u64,
    },
    /// Every sample.
    Full,
}

/// How the sequence of an epoch is dealt out: in `num_lanes` equal pieces, of which turns of `turn` samples are taken
/// one lane after the other. Who takes every turn of a lane reads one piece of the sequence, and nobody else does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes {
    /// Number of lanes. Above 0.
    pub num_lanes: u64,
    /// Samples in a turn. Above 0.
    pub turn: u64,
}

/// What the permutations of an epoch are for; part of their keys.
const OF_SHARDS: u64 = 1;
const OF_BLOCKS: u64 = 2;
const OF_BUFFERS: u64 = 3;
const OF_SAMPLES: u64 = 4;

/// The order of one epoch.
#[derive(Debug, Clone)]
pub struct Order {
    shuffle: Shuffle,
    lanes: Lanes,
    /// Of the epoch.
    key: u64,
    num_samples: u64,
    /// Of whole shards only: for each place in their order, the samples before it; and the first sample there.
    shards: Vec<(u64, u64)>,
}

impl Order {
    /// The order of `epoch` for shards of `counts` samples each.
    pub fn new(counts: &[u64], shuffle: Shuffle, lanes: Lanes, seed: u64, epoch: u64) -> Self {
        let (key, num_samples) = (key(seed, &[epoch]), counts.iter().sum());
        let shards = if shuffle == Shuffle::Shards { shuffled_shards(counts, key) } else { Vec::new() };
        Self { shuffle, lanes, key, num_samples, shards }
    }

    /// Samples in the epoch.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// The sample at `position`, counted through all shards as they are listed.
    ///
    /// # Panics
    /// If `position` is not below the number of samples.
    pub fn sample(&self, position: u64) -> u64 {
        assert!(position < self.num_samples, "{position} is not below {}", self.num_samples);
        let (place, lane) = self.dealt(position);
        match self.shuffle {
            Shuffle::None => place,
            Shuffle::Shards => {
                let (before, first) = self.shards[self.shards.partition_point(|&(before, _)| before <= place) - 1];
                first + (place - before)
            }
            Shuffle::Blocks { block, buffer } => self.in_blocks(self.in_buffer(place, lane, buffer), block),
            Shuffle::Full => Permutation::new(self.num_samples, key(self.key, &[OF_SAMPLES])).at(place),
        }
    }

    /// Place in the sequence of the epoch, and the part of the sequence, a range, that is dealt out with it.
    fn dealt(&self, position: u64) -> (u64, (u64, u64)) {
        let Lanes { num_lanes, turn } = self.lanes;
        let num_rounds = self.num_samples / turn / num_lanes;
        let (each, dealt) = (num_rounds * turn, num_rounds * turn * num_lanes);
        if position >= dealt {
            return (position, (dealt, self.num_samples));
        }
        let (nth, within) = (position / turn, position % turn);
        let (lane, round) = (nth % num_lanes, nth / num_lanes);
        (lane * each + round * turn + within, (lane * each, (lane + 1) * each))
    }

    /// Shuffles within the buffer of `place`; buffers do not reach over the ends of their lane.
    fn in_buffer(&self, place: u64, (start, end): (u64, u64), buffer: u64) -> u64 {
        let first = start + (place - start) / buffer * buffer;
        let size = buffer.min(end - first);
        first + Permutation::new(size, key(self.key, &[OF_BUFFERS, first])).at(place - first)
    }

    /// Shuffles blocks; the last one, if it is short, stays where it is.
    fn in_blocks(&self, place: u64, block: u64) -> u64 {
        let num_blocks = self.num_samples / block;
        if place >= num_blocks * block {
            return place;
        }
        Permutation::new(num_blocks, key(self.key, &[OF_BLOCKS])).at(place / block) * block + place % block
    }
}

fn shuffled_shards(counts: &[u64], epoch_key: u64) -> Vec<(u64, u64)> {
    let starts = |counts: &mut dyn Iterator<Item = u64>| -> Vec<u64> {
        counts.scan(0, |before, count| Some(std::mem::replace(before, *before + count))).collect()
    };
    let firsts = starts(&mut counts.iter().copied());
    let permutation = Permutation::new(counts.len() as u64, key(epoch_key, &[OF_SHARDS]));
    let order: Vec<usize> = (0..counts.len()).map(|place| permutation.at(place as u64) as usize).collect();
    let befores = starts(&mut order.iter().map(|&shard| counts[shard]));
    // An empty shard is no place.
    befores.into_iter().zip(order).filter(|&(_, shard)| counts[shard] > 0).map(|(b, s)| (b, firsts[s])).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE_LANE: Lanes = Lanes { num_lanes: 1, turn: 1 };

    fn shuffles() -> impl Strategy<Value = Shuffle> {
        let blocks = (1u64..20, 1u64..60).prop_map(|(block, buffer)| Shuffle::Blocks { block, buffer });
        prop_oneof![Just(Shuffle::None), Just(Shuffle::Shards), Just(Shuffle::Full), blocks]
    }

    fn samples(order: &Order) -> Vec<u64> {
        (0..order.num_samples()).map(|position| order.sample(position)).collect()
    }

    proptest! {
        #[test]
        fn every_sample_comes_once(
            counts in prop::collection::vec(0u64..40, 0..12),
            shuffle in shuffles(),
            num_lanes in 1u64..9,
            turn in 1u64..9,
            seed in any::<u64>(),
            epoch in 0u64..3,
        ) {
            let order = Order::new(&counts, shuffle, Lanes { num_lanes, turn }, seed, epoch);
            let mut found = samples(&order);
            found.sort_unstable();
            prop_assert_eq!(found, (0..counts.iter().sum()).collect::<Vec<u64>>());
        }

        /// What one lane takes is one run of the sequence, so that blocks and buffers are its own.
        #[test]
        fn a_lane_is_one_run_of_the_sequence(num_samples in 1u64..400, num_lanes in 1u64..9, turn in 1u64..9) {
            let order = Order::new(&[num_samples], Shuffle::None, Lanes { num_lanes, turn }, 0, 0);
            let dealt = num_samples / (num_lanes * turn) * num_lanes * turn;
            for lane in 0..num_lanes {
                let own: Vec<u64> = (0..dealt).filter(|at| at / turn % num_lanes == lane).map(|at| order.sample(at)).collect();
                prop_assert!(own.windows(2).all(|pair| pair[1] == pair[0] + 1), "{own:?}");
            }
        }
    }

    #[test]
    fn without_a_shuffle_and_lanes_they_come_as_they_lie() {
        assert_eq!(samples(&Order::new(&[3, 0, 2], Shuffle::None, ONE_LANE, 5, 1)), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn lanes_take_turns() {
        let lanes = Lanes { num_lanes: 2, turn: 2 };
        // Two lanes of four, and one sample that is left.
        let found = samples(&Order::new(&[9], Shuffle::None, lanes, 0, 0));
        assert_eq!(found, [0, 1, 4, 5, 2, 3, 6, 7, 8]);
    }

    #[test]
    fn shuffled_shards_stay_whole() {
        let counts = [4, 1, 3, 2, 5];
        let found = samples(&Order::new(&counts, Shuffle::Shards, ONE_LANE, 3, 0));
        let runs = found.chunk_by(|a, b| b == &(a + 1) && ![4, 5, 8, 10].contains(b));
        let mut sizes: Vec<usize> = runs.map(<[u64]>::len).collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [1, 2, 3, 4, 5]);
        assert_ne!(found, (0..15).collect::<Vec<_>>());
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let of = |shuffle, seed, epoch| samples(&Order::new(&[30, 40, 30, 10], shuffle, ONE_LANE, seed, epoch));
        for shuffle in [Shuffle::Shards, Shuffle::Full, Shuffle::Blocks { block: 8, buffer: 16 }] {
            assert_ne!(of(shuffle, 0, 0), of(shuffle, 0, 3), "{shuffle:?}");
            assert_ne!(of(shuffle, 0, 0), of(shuffle, 2, 0), "{shuffle:?}");
            assert_eq!(of(shuffle, 1, 2), of(shuffle, 1, 2));
        }
    }

    #[test]
    fn a_buffer_reads_few_blocks() {
        let order = Order::new(&[10_000], Shuffle::Blocks { block: 100, buffer: 400 }, ONE_LANE, 1, 1);
        for first in (0..10_000).step_by(400) {
            let mut blocks: Vec<u64> = (first..first + 400).map(|position| order.sample(position) / 100).collect();
            blocks.sort_unstable();
            blocks.dedup();
            assert_eq!(blocks.len(), 4);
        }
    }
}
