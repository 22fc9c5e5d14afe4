//! Where each item of a rank goes: objects, offsets, parts. Pure.

use std::ops::Range;

/// A payload of at least this many bytes is placed so that it can be written and read without a bounce; below,
/// the padding would cost more than 1 % of the item.
pub const ALIGNED_PAYLOAD_BYTES: u64 = 512 << 10;

/// What direct I/O may ask of an address and an offset: the page size covers every sector size.
pub const DIRECT_ALIGN: u64 = 4096;

/// Large torch tensors sit here modulo 4096 (mmap'd chunk, 16 bytes of malloc header, aligned to 64), in the
/// process that saves and in the one that loads.
pub const USUAL_RESIDUE: u64 = 64;

/// Every item starts at a multiple of this, so that payloads can.
pub const ITEM_ALIGN: u64 = 64;

/// An object ends with the item that reaches this size. Stores allow 5 TiB; smaller ones are retried cheaper.
pub const OBJECT_BYTES: u64 = 256 << 30;

/// Where the payload of an item shall stand, modulo an alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residue {
    /// Modulus, a power of two.
    pub align: u64,
    /// Wanted remainder.
    pub residue: u64,
}

/// The residue for a payload of `bytes` at memory address `address`.
pub fn residue(bytes: u64, address: u64) -> Residue {
    if bytes < ALIGNED_PAYLOAD_BYTES {
        return Residue { align: ITEM_ALIGN, residue: 0 };
    }
    let congruent = address % DIRECT_ALIGN;
    let residue = if congruent.is_multiple_of(ITEM_ALIGN) { congruent } else { USUAL_RESIDUE };
    Residue { align: DIRECT_ALIGN, residue }
}

/// Offset of the next item after one that ends at `end`.
pub fn next_offset(end: u64) -> u64 {
    end.next_multiple_of(ITEM_ALIGN)
}

/// The first offset from `least` on that is at `place`.
pub fn next_at(least: u64, place: Residue) -> u64 {
    let Residue { align, residue } = place;
    least + (residue + align - least % align) % align
}

/// A piece of an object: a range of one of its segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Which segment.
    pub segment: usize,
    /// Bytes of that segment.
    pub range: Range<u64>,
}

/// Cuts segments of the given lengths, one after another, into parts of `part_bytes`.
///
/// Every part but the last is full; empty segments are in no part; an object without bytes has one empty part.
pub fn parts(segment_bytes: &[u64], part_bytes: u64) -> Vec<Vec<Piece>> {
    let mut parts = vec![Vec::new()];
    let mut free = part_bytes;
    for (segment, bytes) in segment_bytes.iter().enumerate() {
        let mut at = 0;
        while at < *bytes {
            if free == 0 {
                parts.push(Vec::new());
                free = part_bytes;
            }
            let taken = free.min(bytes - at);
            parts.last_mut().expect("never empty").push(Piece { segment, range: at..at + taken });
            at += taken;
            free -= taken;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_hold_every_byte_once_in_order(
            segments in prop::collection::vec(0u64..50, 0..20),
            part_bytes in 1u64..30,
        ) {
            let parts = parts(&segments, part_bytes);
            let bytes = |part: &[Piece]| part.iter().map(|p| p.range.end - p.range.start).sum::<u64>();
            for part in &parts[..parts.len() - 1] {
                prop_assert_eq!(bytes(part), part_bytes);
            }
            let flat: Vec<(usize, u64)> =
                parts.iter().flatten().flat_map(|p| p.range.clone().map(move |at| (p.segment, at))).collect();
            let expected: Vec<(usize, u64)> =
                segments.iter().enumerate().flat_map(|(s, n)| (0..*n).map(move |at| (s, at))).collect();
            prop_assert_eq!(flat, expected);
        }
    }

    #[test]
    fn large_payloads_are_congruent_to_their_memory_and_small_ones_are_packed() {
        assert_eq!(residue(64 << 20, 0x7f00_0000_0040), Residue { align: 4096, residue: 64 });
        assert_eq!(residue(64 << 20, 0x7f00_0000_0010), Residue { align: 4096, residue: USUAL_RESIDUE });
        assert_eq!(residue(1000, 0x7f00_0000_0040), Residue { align: 64, residue: 0 });
        for (least, expected) in [(0, 64), (64, 64), (65, 4160), (4159, 4160)] {
            assert_eq!(next_at(least, Residue { align: 4096, residue: 64 }), expected);
        }
    }
}
