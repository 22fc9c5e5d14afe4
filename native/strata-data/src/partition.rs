//! Who takes which samples: ranks step together, workers of a rank take its batches in turn. Pure.

use std::ops::Range;

/// What becomes of the samples at the end of an epoch that do not fill a batch on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The last batches are short, as even as they can be; where there are fewer samples than ranks, some are repeated.
    Short,
    /// They are left out.
    Drop,
    /// The last batches are filled from the beginning of the epoch.
    Pad,
    /// The last batches are filled with the first samples of the next epoch, which then begins behind them.
    Continue,
}

/// One stream of batches among those of all ranks and their workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Number of ranks that step together. Above 0.
    pub world_size: u64,
    /// This one.
    pub rank: u64,
    /// Workers that take a rank's batches in turn. Above 0.
    pub num_workers: u64,
    /// This one.
    pub worker: u64,
    /// Samples in a rank's batch. Above 0.
    pub batch_size: u64,
}

/// A rank's batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Positions in the epoch; those from its number of samples on are of the next epoch, or of the beginning of this
    /// one, as the ending says.
    pub positions: Range<u64>,
    /// Samples at the end of the batch that others have too.
    pub num_repeated: u64,
    /// Where all ranks together stand behind the step.
    pub after: u64,
}

impl Stream {
    /// Steps of every rank from `start` to the end of an epoch of `num_samples`.
    pub fn num_steps(&self, num_samples: u64, start: u64, ending: Ending) -> u64 {
        let (left, each) = (num_samples.saturating_sub(start), self.world_size * self.batch_size);
        if ending == Ending::Drop { left / each } else { left.div_ceil(each) }
    }

    /// This rank's batch in step `step` after `start`; None behind the end.
    pub fn batch(&self, num_samples: u64, start: u64, step: u64, ending: Ending) -> Option<Batch> {
        if step >= self.num_steps(num_samples, start, ending) {
            return None;
        }
        let each = self.world_size * self.batch_size;
        let first = start + step * each;
        let left = num_samples - first;
        if left >= each || ending == Ending::Continue {
            let positions = first + self.rank * self.batch_size..first + (self.rank + 1) * self.batch_size;
            let is_last = ending == Ending::Drop && left < 2 * each;
            return Some(Batch { positions, num_repeated: 0, after: if is_last { num_samples } else { first + each } });
        }
        Some(match ending {
            Ending::Pad => self.padded(num_samples, first),
            _ => self.short(num_samples, first),
        })
    }

    /// The step of this worker's `nth` batch, both from 0.
    pub fn step(&self, nth: u64) -> u64 {
        nth * self.num_workers + self.worker
    }

    fn padded(&self, num_samples: u64, first: u64) -> Batch {
        let positions = first + self.rank * self.batch_size..first + (self.rank + 1) * self.batch_size;
        let num_repeated = positions.end.saturating_sub(num_samples.max(positions.start));
        Batch { positions, num_repeated, after: num_samples }
    }

    fn short(&self, num_samples: u64, first: u64) -> Batch {
        let left = num_samples - first;
        if left < self.world_size {
            let own = first + self.rank % left;
            return Batch { positions: own..own + 1, num_repeated: u64::from(self.rank >= left), after: num_samples };
        }
        let (size, more) = (left / self.world_size, left % self.world_size);
        let start = first + self.rank * size + self.rank.min(more);
        let positions = start..start + size + u64::from(self.rank < more);
        Batch { positions, num_repeated: 0, after: num_samples }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ENDINGS: [Ending; 4] = [Ending::Short, Ending::Drop, Ending::Pad, Ending::Continue];

    fn streams(world_size: u64, num_workers: u64, batch_size: u64) -> Vec<Stream> {
        let stream = |rank, worker| Stream { world_size, rank, num_workers, worker, batch_size };
        (0..world_size).flat_map(|rank| (0..num_workers).map(move |worker| stream(rank, worker))).collect()
    }

    /// The batches of each rank, as its workers' turns put them together.
    fn by_rank(streams: &[Stream], num_samples: u64, start: u64, ending: Ending) -> Vec<Vec<Batch>> {
        let world_size = streams[0].world_size as usize;
        let mut ranks = vec![Vec::new(); world_size];
        for step in 0..streams[0].num_steps(num_samples, start, ending) {
            for stream in streams.iter().filter(|stream| step % stream.num_workers == stream.worker) {
                assert_eq!(stream.step(step / stream.num_workers), step);
                ranks[stream.rank as usize]
                    .push(stream.batch(num_samples, start, step, ending).expect("below the end"));
            }
        }
        ranks
    }

    proptest! {
        #[test]
        fn every_position_once_and_every_rank_as_often(
            world_size in 1u64..7,
            num_workers in 1u64..4,
            batch_size in 1u64..6,
            num_samples in 0u64..120,
            start in 0u64..40,
            ending in prop::sample::select(&ENDINGS),
        ) {
            let start = start.min(num_samples);
            let ranks = by_rank(&streams(world_size, num_workers, batch_size), num_samples, start, ending);
            prop_assert!(ranks.iter().all(|batches| batches.len() == ranks[0].len()), "a rank runs dry");
            let own = |batch: &Batch| batch.positions.start..batch.positions.end - batch.num_repeated;
            let mut taken: Vec<u64> = ranks.iter().flatten().flat_map(own).collect();
            taken.sort_unstable();
            let each = world_size * batch_size;
            let end = match ending {
                Ending::Drop => start + (num_samples - start) / each * each,
                Ending::Continue => start + (num_samples - start).div_ceil(each) * each,
                Ending::Short | Ending::Pad => num_samples,
            };
            prop_assert_eq!(taken, (start..end).collect::<Vec<_>>());
        }

        /// Interrupted behind any step and resumed on any other numbers of ranks and workers, nothing is lost or twice.
        #[test]
        fn other_ranks_go_on_where_some_have_stopped(
            first in (1u64..6, 1u64..4, 1u64..5),
            second in (1u64..6, 1u64..4, 1u64..5),
            num_samples in 1u64..150,
            stop in 0u64..30,
        ) {
            let ranks = by_rank(&streams(first.0, first.1, first.2), num_samples, 0, Ending::Short);
            let stop = (stop as usize).min(ranks[0].len());
            let done = ranks.iter().flat_map(|batches| &batches[..stop]);
            let start = if stop == 0 { 0 } else { ranks[0][stop - 1].after };
            let rest = by_rank(&streams(second.0, second.1, second.2), num_samples, start, Ending::Short);
            let own = |batch: &Batch| batch.positions.start..batch.positions.end - batch.num_repeated;
            let mut taken: Vec<u64> = done.chain(rest.iter().flatten()).flat_map(own).collect();
            taken.sort_unstable();
            prop_assert_eq!(taken, (0..num_samples).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_last_batches_are_as_the_ending_says() {
        let last = |ending, num_samples: u64| -> Vec<(Range<u64>, u64)> {
            let ranks = by_rank(&streams(2, 1, 3), num_samples, 0, ending);
            ranks.iter().filter_map(|batches| batches.last()).map(|b| (b.positions.clone(), b.num_repeated)).collect()
        };
        assert_eq!(last(Ending::Short, 9), [(6..8, 0), (8..9, 0)]);
        assert_eq!(last(Ending::Short, 7), [(6..7, 0), (6..7, 1)]);
        assert_eq!(last(Ending::Drop, 9), [(0..3, 0), (3..6, 0)]);
        assert_eq!(last(Ending::Pad, 8), [(6..9, 1), (9..12, 3)]);
        assert_eq!(last(Ending::Continue, 8), [(6..9, 0), (9..12, 0)]);
    }
}
