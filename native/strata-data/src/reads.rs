//! Which ranges of which shards are read for some samples, and where each sample lies in them. Pure.

use std::ops::Range;

/// One request, and one piece of memory: large enough that its latency is small beside the transfer, small enough that
/// many are in flight.
pub const READ_BYTES: u64 = 8 << 20;

/// Bytes of one shard.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Which shard.
    pub shard: u32,
    /// From where to where.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl Extent {
    /// As a range.
    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }
}

/// Reads that bring `extents`, in the order in which they are first needed; and for each extent its read and where it
/// begins in that. Extents that touch are read together, up to [`READ_BYTES`]; none is cut; no byte is read twice.
pub fn reads(extents: &[Extent]) -> (Vec<Extent>, Vec<(usize, u64)>) {
    let mut by_place: Vec<usize> = (0..extents.len()).collect();
    by_place.sort_by_key(|&at| &extents[at]);
    // Each read with the first extent that needs it.
    let mut reads: Vec<(usize, Extent)> = Vec::new();
    let mut places = vec![(0, 0); extents.len()];
    for at in by_place {
        let extent = &extents[at];
        match reads.last_mut() {
            Some((first, read)) if takes(read, extent) => {
                read.end = read.end.max(extent.end);
                *first = at.min(*first);
            }
            _ => reads.push((at, extent.clone())),
        }
        let read = reads.len() - 1;
        places[at] = (read, extent.start - reads[read].1.start);
    }
    let mut order: Vec<usize> = (0..reads.len()).collect();
    order.sort_by_key(|&read| reads[read].0);
    let mut turn = vec![0; reads.len()];
    order.iter().enumerate().for_each(|(at, &read)| turn[read] = at);
    places.iter_mut().for_each(|(read, _)| *read = turn[*read]);
    (order.into_iter().map(|read| reads[read].1.clone()).collect(), places)
}

fn takes(read: &Extent, extent: &Extent) -> bool {
    let touches = read.shard == extent.shard && extent.start <= read.end;
    touches && (extent.end <= read.end || extent.end - read.start <= READ_BYTES)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extent(shard: u32, range: Range<u64>) -> Extent {
        Extent { shard, start: range.start, end: range.end }
    }

    #[test]
    fn neighbours_are_read_together_and_first_what_is_needed_first() {
        let wanted = [extent(1, 50..60), extent(0, 10..20), extent(0, 0..10), extent(0, 30..40), extent(0, 0..10)];
        let (found, places) = reads(&wanted);
        assert_eq!(found, [extent(1, 50..60), extent(0, 0..20), extent(0, 30..40)]);
        assert_eq!(places, [(0, 0), (1, 10), (1, 0), (2, 0), (1, 0)]);
    }

    #[test]
    fn a_read_ends_before_it_is_too_large_unless_one_sample_is() {
        const MIB: u64 = 1 << 20;
        let wanted = [extent(0, 0..5 * MIB), extent(0, 5 * MIB..9 * MIB), extent(0, 9 * MIB..30 * MIB)];
        assert_eq!(reads(&wanted).0, wanted);
    }

    proptest! {
        #[test]
        fn every_sample_is_brought_and_no_byte_twice(
            wanted in prop::collection::btree_set((0u32..3, 0u64..40), 0..40),
            order in any::<u64>(),
        ) {
            // Of unequal size, and side by side.
            let mut wanted: Vec<Extent> = wanted.into_iter().map(|(s, at)| extent(s, at * at..(at + 1) * (at + 1))).collect();
            wanted.sort_by_key(|extent| crate::permutation::key(order, &[extent.start]));
            let (found, places) = reads(&wanted);
            for (extent, (read, at)) in wanted.iter().zip(&places) {
                let start = found[*read].start + at;
                prop_assert!(found[*read].shard == extent.shard && start == extent.start && extent.end <= found[*read].end);
            }
            let bytes = |extents: &[Extent]| extents.iter().map(|extent| extent.end - extent.start).sum::<u64>();
            prop_assert_eq!(bytes(&found), bytes(&wanted));
        }
    }
}
