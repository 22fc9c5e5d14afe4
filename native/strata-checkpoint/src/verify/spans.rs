//! Which bytes of an object are read at once to check them, and what each of them is. Pure.

use std::ops::Range;

use strata_io::digest::{BLOCK_BYTES, crc32_combine};
use strata_io::lent::LentMut;

use crate::item::{Item, num_blocks};
use crate::plan::{REQUEST_BYTES, block_range};

/// Memory and file agree modulo this, so that a direct read needs no copy.
const PAGE_BYTES: u64 = 4096;

/// Payload of an item in one span: room is left in a buffer for its frame and for alignment.
const PIECE_BYTES: u64 = REQUEST_BYTES - BLOCK_BYTES;

/// Between items more than this is not read.
const GAP_BYTES: u64 = 64 << 10;

/// Consecutive bytes of one object, at most [`REQUEST_BYTES`] of them with what a buffer needs to be aligned.
#[derive(Debug)]
pub(super) struct Span<'a> {
    pub object: u32,
    pub range: Range<u64>,
    pub parts: Vec<Part<'a>>,
    /// Lengths of what is read: heads, blocks, tails and gaps, in order.
    targets: Vec<u64>,
}

/// Whole blocks of an item in a span; its head with the first, its tail with the last.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub item: &'a Item,
    pub payload: Range<u64>,
    /// Positions among the span's targets. The gap is what lies before the item, by which it is aligned.
    pub gap: Option<usize>,
    pub head: Option<usize>,
    pub tail: Option<usize>,
    first_block: usize,
}

/// All bytes of `items`, which ascend by place, and those between them where `is_zero_between`.
pub(super) fn spans<'a>(items: &[&'a Item], is_zero_between: impl Fn(&Item) -> bool) -> Vec<Span<'a>> {
    let mut spans: Vec<Span<'a>> = Vec::new();
    let mut before = (u32::MAX, 0);
    for item in items {
        let count = item.payload_bytes.div_ceil(PIECE_BYTES).max(1);
        let end_before = if before.0 == item.object { before.1 } else { 0 };
        before = (item.object, item.item_offset + item.item_bytes);
        let gap = Some(item.item_offset.saturating_sub(end_before));
        let gap = gap.filter(|bytes| *bytes <= GAP_BYTES && is_zero_between(item)).unwrap_or(0);
        for i in 0..count {
            let payload = i * PIECE_BYTES..((i + 1) * PIECE_BYTES).min(item.payload_bytes);
            let mut file = file_range(item, &payload);
            file.start -= if i == 0 { gap } else { 0 };
            match spans.last_mut() {
                Some(span) if span.takes(item, &file) => span.add(item, payload, file),
                _ => {
                    let range = file.start..file.start;
                    let mut span = Span { object: item.object, range, parts: Vec::new(), targets: Vec::new() };
                    span.add(item, payload, file);
                    spans.push(span);
                }
            }
        }
    }
    spans
}

fn file_range(item: &Item, payload: &Range<u64>) -> Range<u64> {
    let start = if payload.start == 0 { item.item_offset } else { item.payload_offset() + payload.start };
    let is_last = payload.end == item.payload_bytes;
    start..if is_last { item.item_offset + item.item_bytes } else { item.payload_offset() + payload.end }
}

impl<'a> Span<'a> {
    /// Bytes that are read.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Length of the buffer that takes them.
    pub fn buffer_bytes(&self) -> u64 {
        self.bytes() + self.range.start % PAGE_BYTES
    }

    fn takes(&self, item: &Item, file: &Range<u64>) -> bool {
        let follows = self.object == item.object && file.start >= self.range.end;
        follows && file.start - self.range.end <= GAP_BYTES && file.end - self.range.start <= REQUEST_BYTES - PAGE_BYTES
    }

    fn add(&mut self, item: &'a Item, payload: Range<u64>, file: Range<u64>) {
        let mut at = self.range.end;
        let mut until = |end: u64| {
            let target = (end > at).then_some(self.targets.len());
            self.targets.extend(target.map(|_| end - at));
            at = end;
            target
        };
        until(file.start);
        let begin = item.payload_offset();
        let is_first = payload.start == 0;
        let gap = if is_first { until(item.item_offset) } else { None };
        let head = if is_first { until(begin) } else { None };
        let first = payload.start / BLOCK_BYTES;
        let mut first_block = None;
        for block in first..first + num_blocks(payload.end - payload.start) {
            let target = until(begin + block_range(block, item.payload_bytes).end);
            first_block = first_block.or(target);
        }
        let tail = if payload.end == item.payload_bytes { until(file.end) } else { None };
        self.range.end = file.end;
        self.parts.push(Part { item, payload, gap, head, tail, first_block: first_block.unwrap_or(0) });
    }

    /// Memory for each target out of `buffer`: to be read into, and to look at afterwards.
    pub fn cut(&self, mut buffer: LentMut) -> (Vec<LentMut>, Vec<LentMut>) {
        buffer.split_to((self.range.start % PAGE_BYTES) as usize);
        let mut taken = Vec::with_capacity(self.targets.len());
        for bytes in &self.targets {
            taken.push(buffer.split_to(*bytes as usize));
        }
        let seen = taken.iter().map(crate::destination::watch).collect();
        (taken, seen)
    }

    /// CRC of each part's payload, from those of the targets.
    pub fn crcs(&self, digests: &[u128]) -> Vec<u32> {
        let of_part = |part: &Part<'_>| {
            part.blocks().fold(0, |crc, (_, target)| crc32_combine(crc, digests[target] as u32, self.targets[target]))
        };
        self.parts.iter().map(of_part).collect()
    }
}

impl Part<'_> {
    /// Number of each block with its position among the span's targets.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, usize)> {
        let first = self.payload.start / BLOCK_BYTES;
        let count = num_blocks(self.payload.end - self.payload.start);
        (first..first + count).zip(self.first_block..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::{Digests, Kind};

    const MIB: u64 = 1 << 20;

    /// An item of so many bytes of payload at `at`, in a frame of 100 bytes before and 50 behind it.
    fn item(object: u32, at: u64, payload_bytes: u64) -> Item {
        Item {
            fqn: [][..].into(),
            offsets: None,
            index: None,
            kind: Kind::Tensor,
            dtype: "uint8".into(),
            shape: [payload_bytes][..].into(),
            strides: [1][..].into(),
            object,
            item_offset: at,
            item_bytes: 150 + payload_bytes,
            payload_skip: 100,
            payload_bytes,
            digests: Digests::default(),
            inline: None,
            whole_crc32: None,
        }
    }

    #[test]
    fn every_byte_of_every_item_is_read_once_and_a_span_fits_in_a_buffer() {
        let sizes = [0, 1, 4 * MIB, 4 * MIB + 1, 12 * MIB, 40 * MIB + 3, 100, 100];
        let mut at = 4000;
        let mut items: Vec<Item> = Vec::new();
        for (number, bytes) in sizes.into_iter().enumerate() {
            items.push(item(u32::from(number == 7), at, bytes));
            at += 150 + bytes + [0, 7, GAP_BYTES + 1][number % 3];
        }
        let items: Vec<&Item> = items.iter().collect();
        let spans = spans(&items, |item| item.object == 0);
        let (mut read, mut gaps) = (vec![0; items.len()], Vec::new());
        for span in &spans {
            assert!(span.buffer_bytes() <= REQUEST_BYTES, "{span:?}");
            assert_eq!(span.targets.iter().sum::<u64>(), span.bytes());
            gaps.extend(span.parts.iter().filter_map(|part| part.gap).map(|target| span.targets[target]));
            for part in &span.parts {
                let number = items.iter().position(|item| std::ptr::eq(*item, part.item)).expect("one of them");
                assert_eq!(span.object, part.item.object);
                let blocks = part.blocks().map(|(block, target)| {
                    assert_eq!(span.targets[target], {
                        let range = block_range(block, part.item.payload_bytes);
                        range.end - range.start
                    });
                    span.targets[target]
                });
                let frame = [part.head, part.tail].into_iter().flatten().map(|target| span.targets[target]);
                read[number] += blocks.sum::<u64>() + frame.sum::<u64>();
            }
        }
        assert_eq!(read, items.iter().map(|item| item.item_bytes).collect::<Vec<_>>());
        assert_eq!(gaps, [4000, 7, 7]); // not what is too long for a gap, nor before the other object's
    }

    #[test]
    fn many_small_items_are_read_together() {
        let items: Vec<Item> = (0..10_000).map(|i| item(0, i * 1000, 850)).collect();
        assert_eq!(spans(&items.iter().collect::<Vec<_>>(), |_| false).len(), 1);
    }
}
