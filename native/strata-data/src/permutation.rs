//! Permutations of `0..size` by a key, without memory: any element in constant time. Pure.
//!
//! A Feistel network over the smallest even number of bits that holds `size`, walked on until it lands below `size`
//! (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Its rounds mix as SplitMix64 does (Steele, Lea
//! and Flood, "Fast Splittable Pseudorandom Number Generators", 2014). docs/concepts/data-order.md has it in words.

/// Swaps of halves. Four make a pseudorandom permutation of large halves (Luby and Rackoff, 1988); halves of a few
/// bits want more.
const ROUNDS: u64 = 8;

/// SplitMix64's step.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A permutation of `0..size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    size: u64,
    key: u64,
    half_bits: u32,
}

impl Permutation {
    /// That of `key` among the permutations of `0..size`.
    pub fn new(size: u64, key: u64) -> Self {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        Self { size, key, half_bits: bits.div_ceil(2).max(1) }
    }

    /// Where `index` goes.
    ///
    /// # Panics
    /// If `index` is not below the size.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.size, "{index} is not below {}", self.size);
        let mut found = self.crossed(index);
        while found >= self.size {
            found = self.crossed(found);
        }
        found
    }

    fn crossed(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mixed(self.key ^ mixed(right ^ (round << 32 | round))) & mask));
        }
        left << self.half_bits | right
    }
}

/// A key made of a seed and of what it is for.
pub fn key(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(mixed(seed), |key, word| mixed(key ^ mixed(*word)))
}

/// SplitMix64's output for a state.
fn mixed(state: u64) -> u64 {
    let state = state.wrapping_add(GOLDEN);
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_element_comes_once(size in 1u64..3000, key in any::<u64>()) {
            let permutation = Permutation::new(size, key);
            let mut found: Vec<u64> = (0..size).map(|index| permutation.at(index)).collect();
            found.sort_unstable();
            prop_assert_eq!(found, (0..size).collect::<Vec<_>>());
        }

        #[test]
        fn the_largest_sizes_stay_in_range(index in any::<u64>(), key in any::<u64>()) {
            let permutation = Permutation::new(u64::MAX, key);
            prop_assert!(permutation.at(index.min(u64::MAX - 1)) < u64::MAX);
        }
    }

    /// Chi-squared of the 24 permutations of four elements over 24,000 keys: 23 degrees of freedom, 49.7 is met by
    /// chance once in a thousand.
    #[test]
    fn keys_spread_evenly_over_the_permutations() {
        let mut counts = BTreeMap::new();
        for seed in 0..24_000 {
            let permutation = Permutation::new(4, key(seed, &[7]));
            *counts.entry((0..4).map(|index| permutation.at(index)).collect::<Vec<_>>()).or_insert(0u32) += 1;
        }
        let distance: f64 = counts.values().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(counts.len() == 24 && distance < 49.7, "{distance} of {} permutations", counts.len());
    }

    #[test]
    fn neighbours_do_not_stay_together() {
        let permutation = Permutation::new(100_000, key(1, &[2]));
        let apart = (1..100_000).map(|index| permutation.at(index).abs_diff(permutation.at(index - 1)));
        let mean = apart.map(|distance| distance as f64).sum::<f64>() / 99_999.0;
        // A third of the size, if all pairs are equally likely.
        assert!((mean / 100_000.0 - 1.0 / 3.0).abs() < 0.01, "{mean}");
    }

    /// What was published may not change: a state saved long ago leads to the same samples.
    #[test]
    fn golden_values() {
        assert_eq!(key(0, &[]), 0xE220_A839_7B1D_CDAF, "SplitMix64's first output for the seed 0");
        let permutation = Permutation::new(10, key(42, &[0, 1]));
        assert_eq!((0..10).map(|index| permutation.at(index)).collect::<Vec<_>>(), GOLDEN_TEN);
    }

    const GOLDEN_TEN: [u64; 10] = [7, 0, 4, 2, 9, 6, 5, 3, 1, 8];
}
