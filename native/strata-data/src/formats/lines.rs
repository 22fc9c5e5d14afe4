//! Lines of text, each a sample, as in JSON Lines. Pure: bytes come in through [`ReadAt`].
//!
//! A line ends with LF or CRLF and with nothing else, as JSON needs it (U+2028 may stand in a string); the last one may
//! lack it. Lines of nothing but blanks are no samples, nor is a byte order mark at the beginning a part of one.
//! <https://jsonlines.org>

use memchr::{memchr, memchr_iter};

use super::{Encoding, Field, Fields, ReadAt, Result, damage};

/// Name of the only field.
pub const FIELD: &str = "json";

/// Looked at together: stays in the cache of a core.
const BLOCK_BYTES: usize = 256 << 10;

/// Beginnings of files that are no lines of UTF-8, and what they are.
const OTHERS: [(&[u8], &str); 4] = [
    (b"\x1f\x8b", "compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
];

/// Where each sample begins, and where the last one ends. Blank lines are at the end of the sample before them.
///
/// # Errors
/// [`super::Fault::Damage`] for what begins as compressed text does, or UTF-16.
pub fn scan(source: &(impl ReadAt + ?Sized)) -> Result<Vec<u64>> {
    let mut block = vec![0; BLOCK_BYTES.min(usize::try_from(source.size()).unwrap_or(BLOCK_BYTES))];
    let mut lines = Lines::default();
    let mut at = 0;
    loop {
        let found = source.read_at(at, &mut block)?;
        let text = &block[..found];
        if found == 0 {
            break;
        }
        if at == 0
            && let Some((_, what)) = OTHERS.iter().find(|(begin, _)| text.starts_with(begin))
        {
            return damage(0, &format!("expected lines of text in UTF-8, found {what}, which is not read"));
        }
        let mark = if at == 0 && text.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
        lines.start += mark as u64;
        lines.push(at, mark, text);
        at += found as u64;
    }
    Ok(lines.bounds(at))
}

/// The field of the sample whose bytes these are.
///
/// # Errors
/// [`super::Fault::Damage`] where no line is.
pub fn fields(bytes: &[u8]) -> Result<Fields> {
    let line = &bytes[..memchr(b'\n', bytes).unwrap_or(bytes.len())];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if is_blank(line) {
        return damage(0, "expected a line of text, found blanks");
    }
    let data = 0..line.len() as u64;
    let field = Field { name: FIELD.to_owned(), data, encoding: Encoding::ByName };
    Ok(Fields { key: String::new(), fields: vec![field] })
}

/// The lines up to some byte.
#[derive(Default)]
struct Lines {
    /// Of those that are no blanks.
    starts: Vec<u64>,
    /// Of the last one of them.
    end: u64,
    /// Of the line that has not ended.
    start: u64,
    /// Whether something stands in that.
    has_text: bool,
}

impl Lines {
    /// Goes on with `text` from `from` on; it lies at `at`.
    fn push(&mut self, at: u64, mut from: usize, text: &[u8]) {
        let first = from;
        for newline in memchr_iter(b'\n', &text[first..]) {
            let newline = first + newline;
            self.has_text = self.has_text || !is_blank(&text[from..newline]);
            from = newline + 1;
            self.end_line(at + from as u64);
        }
        self.has_text = self.has_text || !is_blank(&text[from..]);
    }

    fn end_line(&mut self, end: u64) {
        if self.has_text {
            self.starts.push(self.start);
            self.end = end;
        }
        (self.start, self.has_text) = (end, false);
    }

    fn bounds(mut self, size: u64) -> Vec<u64> {
        self.end_line(size);
        self.starts.push(self.end);
        self.starts
    }
}

fn is_blank(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_whitespace)
}

#[cfg(test)]
mod tests {
    use super::super::Fault;
    use super::*;

    fn lines(text: &[u8]) -> Vec<String> {
        let bounds = scan(text).expect("sound");
        let line = |pair: &[u64]| {
            let bytes = &text[pair[0] as usize..pair[1] as usize];
            let data = &fields(bytes).expect("sound").fields[0].data;
            String::from_utf8(bytes[data.start as usize..data.end as usize].to_vec()).expect("UTF-8")
        };
        bounds.windows(2).map(line).collect()
    }

    #[test]
    fn lines_end_with_a_newline_and_with_nothing_else() {
        assert_eq!(
            lines("{\"a\": \"x\u{2028}y\u{85}\"}\n[1]\r\n\"\r\x0b\"\n".as_bytes()),
            ["{\"a\": \"x\u{2028}y\u{85}\"}", "[1]", "\"\r\x0b\""]
        );
    }

    #[test]
    fn the_last_line_may_lack_its_end() {
        assert_eq!(lines(b"1\n2"), ["1", "2"]);
        assert_eq!(lines(b"1\n2\r"), ["1", "2"]);
    }

    #[test]
    fn blank_lines_and_the_mark_at_the_beginning_are_no_samples() {
        assert_eq!(lines(b"\xef\xbb\xbf\r\n \t\n 1 \n\n\r\n2\n\n  "), [" 1 ", "2"]);
        assert_eq!(lines(b"\xef\xbb\xbf1\n\xef\xbb\xbf2\n"), ["1", "\u{feff}2"]);
        for empty in [&b""[..], b"\n", b" \r\n\n", b"\xef\xbb\xbf"] {
            assert_eq!(lines(empty), [""; 0]);
        }
    }

    #[test]
    fn lines_reach_over_the_pieces_that_are_looked_at() {
        let long = "x".repeat(BLOCK_BYTES);
        let blank = " ".repeat(BLOCK_BYTES + 7);
        let text = format!("{long}\n{blank}\n{blank}1\n2{long}{long}\n\n{blank}");
        assert_eq!(lines(text.as_bytes()), [long.clone(), format!("{blank}1"), format!("2{long}{long}")]);
    }

    #[test]
    fn what_is_no_text_in_utf_8_is_refused_with_its_name() {
        for (bytes, name) in OTHERS {
            match scan(&*[bytes, b"rest\n"].concat()) {
                Err(Fault::Damage { at: 0, detail }) => assert!(detail.contains(name), "{detail}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
