//! Where the samples of a shard lie in it. Pure.

use std::ops::Range;

/// The bytes of each sample of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bounds {
    /// Where each begins, and where the last one ends: one more than there are samples.
    Listed(Vec<u64>),
    /// As many as `count`, of `size` bytes each, the next one `stride` bytes behind the one before: less than `size`
    /// where they overlap.
    Even {
        /// Where the first one begins.
        first: u64,
        /// From one to the next.
        stride: u64,
        /// Of each.
        size: u64,
        /// How many. The last one ends below 2^64.
        count: u64,
    },
}

impl Bounds {
    /// How many samples there are.
    pub fn num_samples(&self) -> u64 {
        match self {
            Self::Listed(bounds) => bounds.len() as u64 - 1,
            Self::Even { count, .. } => *count,
        }
    }

    /// The bytes of the sample `at`, counted from 0.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn range(&self, at: u64) -> Range<u64> {
        match self {
            Self::Listed(bounds) => bounds[at as usize]..bounds[at as usize + 1],
            Self::Even { first, stride, size, count } => {
                assert!(at < *count, "{at} is not below {count}");
                let start = first + at * stride;
                start..start + size
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(bounds: &Bounds) -> Vec<Range<u64>> {
        (0..bounds.num_samples()).map(|at| bounds.range(at)).collect()
    }

    #[test]
    fn listed_ones_end_where_the_next_begins() {
        assert_eq!(ranges(&Bounds::Listed(vec![3, 10, 10, 12])), [3..10, 10..10, 10..12]);
        assert!(ranges(&Bounds::Listed(vec![7])).is_empty());
    }

    #[test]
    fn even_ones_may_overlap_or_leave_gaps() {
        let even = |stride| Bounds::Even { first: 16, stride, size: 10, count: 3 };
        assert_eq!(ranges(&even(10)), [16..26, 26..36, 36..46]);
        assert_eq!(ranges(&even(4)), [16..26, 20..30, 24..34]);
        assert_eq!(ranges(&even(20)), [16..26, 36..46, 56..66]);
    }

    #[test]
    fn a_billion_even_ones_cost_nothing() {
        let bounds = Bounds::Even { first: 0, stride: 4096, size: 4098, count: 1_000_000_000 };
        assert_eq!(bounds.range(999_999_999), 4_095_999_995_904..4_096_000_000_002);
    }
}
