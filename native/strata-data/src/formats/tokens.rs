//! Windows over files of nothing but tokens: numbers of one kind, little-endian, one behind the other. Pure.

use bytes::Bytes;

use super::{Dtype, Encoding, Field, Fields, Result, damage};
use crate::bounds::Bounds;

/// Name of the field with the tokens.
pub const FIELD: &str = "tokens";

/// Name of the field that says for each token which of the window's documents it is of, from 0.
pub const DOCUMENT_FIELD: &str = "document";

/// Which runs of tokens are samples. What is left at the end of a file and fills no window is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens in a sample. Above 0.
    pub window: u64,
    /// Tokens from the beginning of one to that of the next. Above 0; less than `window` where they are to overlap.
    pub stride: u64,
    /// Whether [`DOCUMENT_FIELD`] is wanted: only of files that say where documents begin.
    pub with_documents: bool,
}

impl Windows {
    /// The windows of `num_tokens` of `dtype` that begin at the byte `first`.
    pub fn bounds(self, first: u64, num_tokens: u64, dtype: Dtype) -> Bounds {
        let count = num_tokens.checked_sub(self.window).map_or(0, |room| room / self.stride + 1);
        let bytes = |tokens: u64| tokens.saturating_mul(dtype.num_bytes());
        Bounds::Even { first, stride: bytes(self.stride), size: bytes(self.window), count }
    }
}

/// The windows of a file of `size` bytes, of which the first `header_bytes` are no tokens.
///
/// # Errors
/// [`super::Fault::Damage`] for a file that ends in its header or within a token.
pub fn scan(size: u64, header_bytes: u64, dtype: Dtype, windows: Windows) -> Result<Bounds> {
    let Some(rest) = size.checked_sub(header_bytes) else {
        return damage(size, &format!("expected a header of {header_bytes} bytes, found the end after {size}"));
    };
    let over = rest % dtype.num_bytes();
    if over > 0 {
        let (each, name) = (dtype.num_bytes(), dtype.name());
        return damage(
            size - over,
            &format!("expected {name} tokens of {each} bytes each, found {over} bytes at the end"),
        );
    }
    Ok(windows.bounds(header_bytes, rest / dtype.num_bytes(), dtype))
}

/// The field of the window whose bytes these are.
pub fn fields(bytes: &[u8], dtype: Dtype) -> Fields {
    let size = bytes.len() as u64;
    let encoding = Encoding::Array { dtype, shape: vec![size / dtype.num_bytes()] };
    Fields { key: String::new(), fields: vec![Field { name: FIELD.to_owned(), data: 0..size, encoding }] }
}

/// As [`fields`] of a window that begins with the token `first`, with the document of each token. Behind its bytes are
/// those of that.
pub fn fields_with_documents(bytes: &[u8], dtype: Dtype, breaks: &[u64], first: u64) -> (Fields, Bytes) {
    let mut found = fields(bytes, dtype);
    let count = bytes.len() as u64 / dtype.num_bytes();
    let bytes = [bytes, &documents(breaks, first, count)].concat();
    let data = found.fields[0].data.end..bytes.len() as u64;
    let encoding = Encoding::Array { dtype: Dtype::Int32, shape: vec![count] };
    found.fields.push(Field { name: DOCUMENT_FIELD.to_owned(), data, encoding });
    (found, bytes.into())
}

/// The document of each token of the window `first..first + count`, counted in it from 0: int32, little-endian. Behind
/// each of `breaks`, which ascend, there is another document.
fn documents(breaks: &[u64], first: u64, count: u64) -> Vec<u8> {
    // The document in which the window begins is its first, whether that begins there or before.
    let passed = breaks.partition_point(|&at| at <= first);
    let mut breaks = breaks[passed..].iter().copied().take_while(|&at| at < first + count).chain([first + count]);
    let (mut bytes, mut from) = (Vec::with_capacity(4 * count as usize), first);
    for (document, end) in (0i32..).zip(&mut breaks) {
        bytes.extend(document.to_le_bytes().repeat((end - from) as usize));
        from = end;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn ranges(size: u64, header_bytes: u64, window: u64, stride: u64) -> Vec<Range<u64>> {
        let bounds =
            scan(size, header_bytes, Dtype::Uint16, Windows { window, stride, with_documents: false }).expect("sound");
        (0..bounds.num_samples()).map(|at| bounds.range(at)).collect()
    }

    #[test]
    fn a_tail_shorter_than_a_window_is_no_sample() {
        assert_eq!(ranges(20, 0, 3, 3), [0..6, 6..12, 12..18]);
        assert_eq!(ranges(18, 0, 3, 3), [0..6, 6..12, 12..18]);
        assert_eq!(ranges(4, 0, 3, 3), [] as [Range<u64>; 0]);
        assert_eq!(ranges(0, 0, 3, 3), [] as [Range<u64>; 0]);
    }

    #[test]
    fn windows_overlap_or_leave_gaps_as_the_stride_says() {
        assert_eq!(ranges(14, 4, 3, 2), [4..10, 8..14]);
        assert_eq!(ranges(20, 4, 2, 3), [4..8, 10..14, 16..20]);
    }

    #[test]
    fn windows_and_strides_beyond_all_files_are_no_overflow() {
        assert_eq!(ranges(20, 0, u64::MAX, 1), [] as [Range<u64>; 0]);
        assert_eq!(ranges(20, 0, 3, u64::MAX).last(), Some(&(0..6)));
    }

    #[test]
    fn what_is_no_whole_number_of_tokens_is_refused() {
        let refused = |size, header_bytes| {
            let windows = Windows { window: 2, stride: 2, with_documents: false };
            scan(size, header_bytes, Dtype::Uint32, windows).expect_err("no tokens").to_string()
        };
        assert_eq!(refused(11, 0), "expected uint32 tokens of 4 bytes each, found 3 bytes at the end (at byte 8)");
        assert_eq!(refused(11, 12), "expected a header of 12 bytes, found the end after 11 (at byte 11)");
    }

    #[test]
    fn documents_are_counted_in_the_window() {
        let of = |first, count| -> Vec<i32> {
            let bytes = documents(&[3, 5, 6], first, count);
            bytes.as_chunks::<4>().0.iter().map(|number| i32::from_le_bytes(*number)).collect()
        };
        assert_eq!(of(0, 8), [0, 0, 0, 1, 1, 2, 3, 3]);
        assert_eq!(of(3, 3), [0, 0, 1]);
        assert_eq!(of(4, 3), [0, 1, 2]);
        assert_eq!(of(6, 2), [0, 0]);
        assert_eq!(of(0, 3), [0, 0, 0]);
    }

    #[test]
    fn a_window_is_one_field_of_numbers() {
        let found = fields(&[0; 12], Dtype::Int32);
        let encoding = Encoding::Array { dtype: Dtype::Int32, shape: vec![3] };
        assert_eq!(found.fields, [Field { name: "tokens".to_owned(), data: 0..12, encoding }]);
    }
}
