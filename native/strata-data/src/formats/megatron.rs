//! Token files of Megatron-LM: a `.bin` of tokens and an `.idx` that says of what kind they are and where sequences and
//! documents begin. Samples are windows over all tokens, whose documents are told where that is asked for. Pure: bytes come in through [`ReadAt`].
//!
//! The layout is that of <https://github.com/NVIDIA/Megatron-LM> (`megatron/core/datasets/indexed_dataset.py`), all
//! little-endian: magic, version (u64), kind of number (u8), number of sequences (u64) and of document bounds (u64);
//! then tokens of each sequence (i32), its first byte in the `.bin` (i64), the first sequence of each document and the
//! end of the last one (i64), and where there are several modalities one byte for each sequence.

use super::tokens::Windows;
use super::{Dtype, ReadAt, Result, damage};
use crate::bounds::Bounds;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const HEADER_BYTES: u64 = 34;

/// Numbers that are looked at together: their memory stays small.
const BLOCK: u64 = 1 << 16;

/// What an `.idx` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Index {
    /// Of the tokens.
    pub dtype: Dtype,
    /// In all sequences.
    pub num_tokens: u64,
    /// Sequences.
    pub num_sequences: u64,
    /// Bounds of documents: one more than there are.
    pub num_documents: u64,
}

/// Reads and checks an `.idx`.
///
/// # Errors
/// [`super::Fault::Damage`] for what is none, for one that is cut, for sequences that do not lie one behind the other,
/// and for documents that do not add up to the sequences.
pub fn scan(source: &(impl ReadAt + ?Sized)) -> Result<Index> {
    let mut header = [0; HEADER_BYTES as usize];
    let found = source.read_at(0, &mut header)?;
    if found < header.len() {
        return damage(0, &format!("expected a header of {HEADER_BYTES} bytes, found the end after {found}"));
    }
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    if &header[..9] != MAGIC {
        let found = header[..9].escape_ascii();
        return damage(0, &format!("expected an index that begins with {}, found {found}", MAGIC.escape_ascii()));
    }
    if number(9) != 1 {
        return damage(9, &format!("expected the version 1, found {}", number(9)));
    }
    let (dtype, num_sequences, num_documents) = (dtype(header[17])?, number(18), number(26));
    let sizes = HEADER_BYTES;
    let of = |count: u64, each: u64, start: u64| count.checked_mul(each).and_then(|bytes| bytes.checked_add(start));
    let pointers = of(num_sequences, 4, sizes);
    let documents = pointers.and_then(|start| of(num_sequences, 8, start));
    let end = documents.and_then(|start| of(num_documents, 8, start));
    let with_modes = end.and_then(|start| of(num_sequences, 1, start));
    let (Some(pointers), Some(documents), true) =
        (pointers, documents, [end, with_modes].contains(&Some(source.size())))
    else {
        let expected = end.map_or_else(|| "more than 2^64".to_owned(), |end| end.to_string());
        let (of, found) = (format!("{num_sequences} sequences and {num_documents} documents"), source.size());
        return damage(18, &format!("expected {expected} bytes for {of}, found {found}"));
    };
    let num_tokens = sequences(source, num_sequences, sizes, pointers, dtype)?;
    check_documents(source, num_documents, documents, num_sequences)?;
    Ok(Index { dtype, num_tokens, num_sequences, num_documents })
}

/// The tokens at which another document begins than that of the token before, ascending; `index` is what [`scan`] found.
/// Documents without tokens have none of their own.
///
/// # Errors
/// What reading says.
pub fn breaks(source: &(impl ReadAt + ?Sized), index: &Index) -> Result<Vec<u64>> {
    let pointers = HEADER_BYTES + 4 * index.num_sequences;
    let documents = pointers + 8 * index.num_sequences;
    let mut breaks = Vec::new();
    // Sequences whose beginnings are known.
    let (mut first, mut starts) = (0, Vec::new());
    for from in (0..index.num_documents).step_by(BLOCK as usize) {
        let block = numbers::<8>(source, documents + 8 * from, BLOCK.min(index.num_documents - from))?;
        for sequence in block.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)) {
            if sequence == index.num_sequences {
                break;
            }
            if starts.is_empty() || sequence >= first + BLOCK {
                first = sequence;
                starts = numbers::<8>(source, pointers + 8 * first, BLOCK.min(index.num_sequences - first))?;
            }
            let start = &starts.as_chunks::<8>().0[(sequence - first) as usize];
            let token = u64::from_le_bytes(*start) / index.dtype.num_bytes();
            if token > breaks.last().copied().unwrap_or(0) && token < index.num_tokens {
                breaks.push(token);
            }
        }
    }
    Ok(breaks)
}

/// The windows of the `.bin` of `size` bytes that `index` is of.
///
/// # Errors
/// [`super::Fault::Damage`] where it is too short.
pub fn bounds(index: &Index, size: u64, windows: Windows) -> Result<Bounds> {
    // Checked when the sequences were added up.
    let expected = index.num_tokens * index.dtype.num_bytes();
    if size < expected {
        let (tokens, name) = (index.num_tokens, index.dtype.name());
        return damage(
            size,
            &format!("expected {expected} bytes of {tokens} {name} tokens as the .idx says, found {size}"),
        );
    }
    Ok(windows.bounds(0, index.num_tokens, index.dtype))
}

fn dtype(code: u8) -> Result<Dtype> {
    Ok(match code {
        1 => Dtype::Uint8,
        2 => Dtype::Int8,
        3 => Dtype::Int16,
        4 => Dtype::Int32,
        5 => Dtype::Int64,
        8 => Dtype::Uint16,
        // 6 and 7 are floats, of sizes that depend on who wrote them.
        _ => return damage(17, &format!("expected the code of a whole number (1 to 5, or 8), found {code}")),
    })
}

/// Adds up the tokens of all sequences.
fn sequences(
    source: &(impl ReadAt + ?Sized),
    num_sequences: u64,
    sizes: u64,
    pointers: u64,
    dtype: Dtype,
) -> Result<u64> {
    let mut next: u64 = 0;
    for first in (0..num_sequences).step_by(BLOCK as usize) {
        let count = BLOCK.min(num_sequences - first);
        let lengths = numbers::<4>(source, sizes + 4 * first, count)?;
        let starts = numbers::<8>(source, pointers + 8 * first, count)?;
        for (nth, (length, start)) in (first..).zip(lengths.as_chunks::<4>().0.iter().zip(starts.as_chunks::<8>().0)) {
            let (length, start) = (i32::from_le_bytes(*length), u64::from_le_bytes(*start));
            if start != next {
                let at = pointers + 8 * nth;
                return damage(at, &format!("expected sequence {nth} to begin at byte {next}, found {start}"));
            }
            let end = u64::try_from(length).ok().and_then(|length| next.checked_add(length * dtype.num_bytes()));
            let Some(end) = end else {
                return damage(sizes + 4 * nth, &format!("sequence {nth} of {length} tokens"));
            };
            next = end;
        }
    }
    Ok(next / dtype.num_bytes())
}

fn check_documents(source: &(impl ReadAt + ?Sized), count: u64, start: u64, num_sequences: u64) -> Result<()> {
    let mut last = 0;
    for first in (0..count).step_by(BLOCK as usize) {
        let block = numbers::<8>(source, start + 8 * first, BLOCK.min(count - first))?;
        for (nth, document) in (first..).zip(block.as_chunks::<8>().0) {
            let document = u64::from_le_bytes(*document);
            if document < last || document > num_sequences {
                let at = start + 8 * nth;
                return damage(
                    at,
                    &format!("expected document {nth} within {last}..={num_sequences}, found {document}"),
                );
            }
            last = document;
        }
    }
    if last != num_sequences {
        let at = start + 8 * count;
        return damage(at, &format!("expected the documents to end with sequence {num_sequences}, found {last}"));
    }
    Ok(())
}

/// `count` numbers of `BYTES` bytes from `at` on.
fn numbers<const BYTES: usize>(source: &(impl ReadAt + ?Sized), at: u64, count: u64) -> Result<Vec<u8>> {
    let mut block = vec![0; count as usize * BYTES];
    source.read_exact_at(at, &mut block)?;
    Ok(block)
}

#[cfg(test)]
mod tests {
    use super::super::Fault;
    use super::*;

    fn index(code: u8, lengths: &[i32], pointers: &[u64], documents: &[u64]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(1u64.to_le_bytes());
        bytes.push(code);
        bytes.extend((lengths.len() as u64).to_le_bytes());
        bytes.extend((documents.len() as u64).to_le_bytes());
        bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        bytes.extend(pointers.iter().chain(documents).flat_map(|number| number.to_le_bytes()));
        bytes
    }

    fn sound() -> Vec<u8> {
        index(8, &[5, 0, 7], &[0, 10, 10], &[0, 2, 3])
    }

    fn refused(bytes: &[u8]) -> (u64, String) {
        match scan(bytes) {
            Err(Fault::Damage { at, detail }) => (at, detail),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn tokens_of_all_sequences_are_added_up() {
        let expected = Index { dtype: Dtype::Uint16, num_tokens: 12, num_sequences: 3, num_documents: 3 };
        assert_eq!(scan(&*sound()).expect("sound"), expected);
        let with_modes = [sound(), vec![0, 1, 0]].concat();
        assert_eq!(scan(&*with_modes).expect("sound"), expected);
        let empty = Index { dtype: Dtype::Int32, num_tokens: 0, num_sequences: 0, num_documents: 1 };
        assert_eq!(scan(&*index(4, &[], &[], &[0])).expect("sound"), empty);
    }

    #[test]
    fn many_sequences_are_looked_at_in_pieces() {
        let lengths: Vec<i32> = (0..200_000).map(|nth| nth % 7).collect();
        let pointers: Vec<u64> =
            lengths.iter().scan(0, |at, &n| Some(std::mem::replace(at, *at + 4 * n as u64))).collect();
        let documents: Vec<u64> = (0..=100_000).map(|nth| 2 * nth).collect();
        let sound = index(4, &lengths, &pointers, &documents);
        let num_tokens = lengths.iter().map(|&length| length as u64).sum::<u64>();
        assert_eq!(scan(&*sound).expect("sound").num_tokens, num_tokens);
        let found = breaks(&*sound, &scan(&*sound).expect("sound")).expect("sound");
        // Of two sequences each.
        let mut expected: Vec<u64> = pointers.iter().skip(2).step_by(2).map(|start| start / 4).collect();
        expected.dedup();
        assert!(found == expected && found.len() > 70_000);
        let mut moved = sound;
        let at = 34 + 4 * 200_000 + 8 * 150_001;
        moved[at] ^= 1;
        assert_eq!(refused(&moved).0, at as u64);
    }

    #[test]
    fn documents_without_tokens_are_no_breaks() {
        let of = |documents: &[u64]| {
            let bytes = index(8, &[5, 0, 7, 0], &[0, 10, 10, 24], documents);
            breaks(&*bytes, &scan(&*bytes).expect("sound")).expect("sound")
        };
        assert_eq!(of(&[0, 4]), [] as [u64; 0]);
        assert_eq!(of(&[0, 1, 2, 3, 4]), [5]);
        assert_eq!(of(&[0, 0, 2, 2, 4, 4]), [5]);
        assert_eq!(of(&[0, 3, 4]), [] as [u64; 0]);
    }

    #[test]
    fn windows_reach_over_sequences_and_stay_in_what_the_index_says() {
        let index = scan(&*sound()).expect("sound");
        let windows = Windows { window: 4, stride: 3, with_documents: false };
        let expected = Bounds::Even { first: 0, stride: 6, size: 8, count: 3 };
        assert_eq!(bounds(&index, 24, windows).expect("sound"), expected);
        assert_eq!(bounds(&index, 100, windows).expect("more than the index says"), expected);
        let short = bounds(&index, 23, windows).expect_err("too short").to_string();
        assert_eq!(short, "expected 24 bytes of 12 uint16 tokens as the .idx says, found 23 (at byte 23)");
    }

    #[test]
    fn what_is_no_sound_index_is_refused_with_the_place() {
        let damaged = |at: usize, with: u8| {
            let mut bytes = sound();
            bytes[at] = with;
            refused(&bytes).0
        };
        assert_eq!(damaged(0, b'm'), 0);
        assert_eq!(damaged(9, 2), 9);
        assert_eq!(damaged(17, 6), 17);
        assert_eq!(damaged(25, 0xff), 18);
        assert_eq!(damaged(26, 4), 18);
        // A negative length, and sequences and documents that do not follow.
        assert_eq!(damaged(34 + 4 * 2 + 3, 0xff), 34 + 4 * 2);
        assert_eq!(damaged(46 + 8, 11), 46 + 8);
        assert_eq!(damaged(70 + 8, 4), 70 + 8);
        assert_eq!(damaged(70 + 16, 2), 70 + 24);
        assert_eq!(refused(&sound()[..20]).0, 0);
        assert_eq!(
            refused(&sound()[..80]),
            (18, "expected 94 bytes for 3 sequences and 3 documents, found 80".to_owned())
        );
    }
}
