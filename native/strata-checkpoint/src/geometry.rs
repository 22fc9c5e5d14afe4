//! How a box of a stored tensor maps onto memory with other strides. Pure arithmetic on byte offsets.

use std::ops::Range;

/// A copy from a stored payload to strided memory, as runs of bytes that are contiguous in both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedCopy {
    /// Offset of the first byte in the payload.
    start: u64,
    /// Outer dims, by falling source stride: (length, source stride, destination stride), in bytes.
    outer: Vec<(u64, u64, i64)>,
    /// Bytes of one run; 0 if there is nothing to copy.
    run_bytes: u64,
}

/// Whether two elements of a tensor may lie in the same place. The walk below needs that none do.
pub fn overlaps(shape: &[u64], strides: &[u64]) -> bool {
    let mut dims: Vec<(u64, u64)> =
        strides.iter().copied().zip(shape.iter().copied()).filter(|(_, length)| *length > 1).collect();
    dims.sort();
    let mut reach = 1u64;
    !shape.contains(&0)
        && dims.iter().any(|(stride, length)| {
            let collides = *stride < reach;
            reach = reach.saturating_add((length - 1).saturating_mul(*stride));
            collides
        })
}

/// Bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// In the payload.
    pub source: u64,
    /// From the destination's first element.
    pub destination: i64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The box to be copied: one entry a dim, in elements.
#[derive(Debug, Clone, Copy)]
pub struct Box<'a> {
    /// Strides of the stored chunk.
    pub source_strides: &'a [u64],
    /// First element of the box, in the chunk's coordinates.
    pub first: &'a [u64],
    /// Length of the box.
    pub lengths: &'a [u64],
    /// Strides of the destination, whose first element is the box's.
    pub destination_strides: &'a [i64],
}

impl StridedCopy {
    /// The copy of `region`, with elements of `itemsize` bytes.
    pub fn new(region: Box<'_>, itemsize: u64) -> Self {
        let size = itemsize as i64;
        let dims = region.lengths.len();
        let start = (0..dims).map(|d| region.first[d] * region.source_strides[d] * itemsize).sum();
        if region.lengths.contains(&0) {
            return Self { start, outer: Vec::new(), run_bytes: 0 };
        }
        let mut outer: Vec<(u64, u64, i64)> = (0..dims)
            .filter(|d| region.lengths[*d] > 1)
            .map(|d| (region.lengths[d], region.source_strides[d] * itemsize, region.destination_strides[d] * size))
            .collect();
        outer.sort_by_key(|(_, source, _)| std::cmp::Reverse(*source));
        let mut run_bytes = itemsize;
        while let Some((length, source, destination)) = outer.last().copied() {
            if source != run_bytes || destination != run_bytes as i64 {
                break;
            }
            run_bytes *= length;
            outer.pop();
        }
        Self { start, outer, run_bytes }
    }

    /// The copy of a part of a payload into one piece of memory.
    pub fn of_bytes(range: Range<u64>) -> Self {
        Self { start: range.start, outer: Vec::new(), run_bytes: range.end - range.start }
    }

    /// Payload bytes from the first that is needed to one past the last.
    pub fn source_range(&self) -> Range<u64> {
        if self.run_bytes == 0 {
            return self.start..self.start;
        }
        let last: u64 = self.outer.iter().map(|(length, source, _)| (length - 1) * source).sum();
        self.start..self.start + last + self.run_bytes
    }

    /// Bytes of the destination from its first element to the end of its last; strides are not negative in torch.
    pub fn destination_bytes(&self) -> u64 {
        if self.run_bytes == 0 {
            return 0;
        }
        let last: i64 = self.outer.iter().map(|(length, _, to)| (*length as i64 - 1) * to).sum();
        last.max(0) as u64 + self.run_bytes
    }

    /// The runs that touch `range` of the payload, cut to it.
    pub fn runs_in(&self, range: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let mut walk = self.walk_from(range.start);
        std::iter::from_fn(move || {
            loop {
                let (source, destination) = walk.as_ref()?.at();
                if source >= range.end {
                    walk = None;
                    return None;
                }
                if !walk.as_mut()?.step() {
                    walk = None;
                }
                let from = source.max(range.start);
                let to = (source + self.run_bytes).min(range.end);
                if from < to {
                    let destination = destination + (from - source) as i64;
                    return Some(Run { source: from, destination, bytes: to - from });
                }
            }
        })
    }

    /// The one run that holds all of `range`, if there is one.
    pub fn run_over(&self, range: Range<u64>) -> Option<Run> {
        self.runs_in(range.clone())
            .next()
            .filter(|run| run.source == range.start && run.bytes == range.end - range.start)
    }

    /// Starts at the last run that begins at or before `offset`: source offsets rise with the index, because the
    /// source is dense and the dims are sorted by stride.
    fn walk_from(&self, offset: u64) -> Option<Walk<'_>> {
        if self.run_bytes == 0 {
            return None;
        }
        let mut left = offset.saturating_sub(self.start);
        let index = self
            .outer
            .iter()
            .map(|(length, source, _)| {
                let at = left.checked_div(*source).unwrap_or(0).min(length - 1);
                left -= at * source;
                at
            })
            .collect();
        Some(Walk { copy: self, index })
    }
}

/// The boxes, each its first element and its lengths, that hold elements `range` of a row-major tensor, in that order.
pub(crate) fn boxes(shape: &[u64], range: Range<u64>) -> Vec<(Vec<u64>, Vec<u64>)> {
    let Some((_, inner)) = shape.split_first() else { return vec![(Vec::new(), Vec::new())] };
    let row: u64 = inner.iter().product();
    let (mut found, mut at) = (Vec::new(), range.start);
    while at < range.end {
        let (index, inside) = (at / row, at % row);
        let rows = if inside == 0 { (range.end - at) / row } else { 0 };
        if rows > 0 {
            let first = std::iter::once(index).chain(inner.iter().map(|_| 0)).collect();
            found.push((first, std::iter::once(rows).chain(inner.iter().copied()).collect()));
            at += rows * row;
            continue;
        }
        let end = row.min(range.end - index * row);
        let ahead = |number: u64, dims: Vec<u64>| std::iter::once(number).chain(dims).collect();
        found.extend(boxes(inner, inside..end).into_iter().map(|(a, n)| (ahead(index, a), ahead(1, n))));
        at = index * row + end;
    }
    found
}

/// What two boxes, each its first element and its lengths, share; None if that is nothing.
pub(crate) fn shared(a: (&[u64], &[u64]), b: (&[u64], &[u64])) -> Option<(Vec<u64>, Vec<u64>)> {
    let dims = 0..a.0.len();
    let first: Vec<u64> = dims.clone().map(|d| a.0[d].max(b.0[d])).collect();
    let end = |d: usize| (a.0[d] + a.1[d]).min(b.0[d] + b.1[d]);
    let lengths: Vec<u64> = dims.map(|d| end(d).saturating_sub(first[d])).collect();
    (!lengths.contains(&0)).then_some((first, lengths))
}

/// An index over the outer dims, counted up like an odometer.
struct Walk<'a> {
    copy: &'a StridedCopy,
    index: Vec<u64>,
}

impl Walk<'_> {
    fn at(&self) -> (u64, i64) {
        let dims = self.copy.outer.iter().zip(&self.index);
        dims.fold((self.copy.start, 0), |(source, destination), ((_, from, to), index)| {
            (source + index * from, destination + *index as i64 * to)
        })
    }

    fn step(&mut self) -> bool {
        for (index, (length, _, _)) in self.index.iter_mut().zip(&self.copy.outer).rev() {
            *index += 1;
            if *index < *length {
                return true;
            }
            *index = 0;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Copies one element at a time, the way the definition reads.
    fn by_definition(payload: &[u8], region: Box<'_>, itemsize: usize) -> Vec<(i64, Vec<u8>)> {
        let mut cells = vec![(0u64, 0i64)];
        for d in 0..region.lengths.len() {
            cells = (0..region.lengths[d])
                .flat_map(|i| {
                    let source = (region.first[d] + i) * region.source_strides[d];
                    let destination = i as i64 * region.destination_strides[d];
                    cells.iter().map(move |(s, t)| (s + source, t + destination)).collect::<Vec<_>>()
                })
                .collect();
        }
        let mut cells: Vec<_> = cells
            .into_iter()
            .map(|(source, to)| {
                let at = source as usize * itemsize;
                (to * itemsize as i64, payload[at..at + itemsize].to_vec())
            })
            .collect();
        cells.sort();
        cells
    }

    #[test]
    fn overlap_is_seen_in_any_order_of_dims() {
        for (shape, strides, expected) in [
            (vec![4, 6], vec![6, 1], false),
            (vec![6, 4], vec![1, 6], false),
            (vec![4, 6], vec![8, 1], false),
            (vec![1 << 20, 3], vec![1, 2], true),
            (vec![5], vec![0], true),
            (vec![1, 5], vec![0, 1], false),
            (vec![0, 5], vec![0, 0], false),
        ] {
            assert_eq!(overlaps(&shape, &strides), expected, "{shape:?} {strides:?}");
        }
    }

    fn dense_strides(shape: &[u64], order: &[usize]) -> Vec<u64> {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for d in order.iter().rev() {
            strides[*d] = step;
            step *= shape[*d].max(1);
        }
        strides
    }

    proptest! {
        #[test]
        fn boxes_hold_each_element_of_a_range_once_in_order(
            shape in prop::collection::vec(1u64..5, 0..4),
            ends in (0u64..130, 0u64..130),
        ) {
            let total: u64 = shape.iter().product();
            let (a, b) = (ends.0.min(ends.1) % total, (ends.0.max(ends.1) % total) + 1);
            let range = a.min(b - 1)..b;
            let strides = crate::servable::contiguous(&shape);
            let mut found = Vec::new();
            for (first, lengths) in boxes(&shape, range.clone()) {
                let mut cells = vec![0];
                for d in 0..shape.len() {
                    let (start, stride) = (first[d], strides[d]);
                    let places = |at: u64| (0..lengths[d]).map(move |i| at + (start + i) * stride);
                    cells = cells.into_iter().flat_map(places).collect();
                }
                found.extend(cells);
            }
            prop_assert_eq!(found, range.collect::<Vec<u64>>());
        }

        #[test]
        fn runs_copy_each_element_of_the_box_once(
            dims in prop::collection::vec((1u64..6, 0u64..6, 0u64..6), 0..4),
            seed in 0usize..24,
            itemsize in prop::sample::select(vec![1usize, 2, 4, 8]),
            block in 1u64..40,
        ) {
            let shape: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let first: Vec<u64> = dims.iter().map(|d| d.1 % d.0).collect();
            let lengths: Vec<u64> = dims.iter().zip(&first).map(|(d, f)| d.2.min(d.0 - f)).collect();
            let mut order: Vec<usize> = (0..shape.len()).collect();
            if shape.len() > 1 { order.rotate_left(seed % shape.len()); }
            let source_strides = dense_strides(&shape, &order);
            order.reverse();
            let destination_strides: Vec<i64> = dense_strides(&shape, &order).iter().map(|s| *s as i64).collect();
            let total = shape.iter().product::<u64>() as usize * itemsize;
            let payload: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
            let region = Box { source_strides: &source_strides, first: &first, lengths: &lengths,
                               destination_strides: &destination_strides };
            let copy = StridedCopy::new(region, itemsize as u64);
            let mut found: Vec<(i64, Vec<u8>)> = Vec::new();
            let mut at = 0;
            while at < total as u64 {
                let end = (at + block).min(total as u64);
                for run in copy.runs_in(at..end) {
                    prop_assert!(run.source >= at && run.source + run.bytes <= end);
                    let bytes = &payload[run.source as usize..(run.source + run.bytes) as usize];
                    found.extend(bytes.iter().enumerate().map(|(i, b)| (run.destination + i as i64, vec![*b])));
                }
                at = end;
            }
            found.sort();
            let expected: Vec<(i64, Vec<u8>)> = by_definition(&payload, region, itemsize)
                .into_iter()
                .flat_map(|(to, bytes)| bytes.into_iter().enumerate().map(move |(i, b)| (to + i as i64, vec![b])))
                .collect();
            let mut expected = expected;
            expected.sort();
            prop_assert_eq!(found, expected);
        }
    }
}
