//! Tar archives of samples, as WebDataset writes them: consecutive files whose names agree up to the first dot of the
//! last part are one sample. Pure: bytes come in through [`ReadAt`].
//!
//! Headers are those of POSIX.1-2001 (ustar and pax) and of GNU tar:
//! <https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html>,
//! <https://www.gnu.org/software/tar/manual/html_node/Standard.html>. Grouping is that of
//! <https://github.com/webdataset/webdataset> (`webdataset/tariterators.py`).

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::{Encoding, Field, Fields, ReadAt, Result, damage, key_and_field};

const BLOCK: u64 = 512;

/// More than this of names and attributes no archive has; a damaged size would ask for it.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;

/// One file of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its whole path.
    pub name: String,
    /// Where its content lies.
    pub data: Range<u64>,
    /// Its first header, those with a long name among them.
    pub start: u64,
    /// Where the next one begins.
    pub end: u64,
}

impl Entry {
    /// Key of its sample and name of its field; None for what belongs to no sample.
    pub fn key_and_field(&self) -> Option<(&str, &str)> {
        // WebDataset's own are none.
        let is_special = self.name.starts_with("__") && self.name.ends_with("__");
        if is_special { None } else { key_and_field(&self.name) }
    }
}

/// Reads the regular file that begins at or behind `at`; None at the end of the archive.
///
/// # Errors
/// [`Fault::Damage`] for what no archive holds, for one that is cut, and for sparse files.
pub fn entry(source: &(impl ReadAt + ?Sized), mut at: u64) -> Result<Option<Entry>> {
    let (mut start, mut extended) = (None, Extended::default());
    loop {
        let mut block = [0; BLOCK as usize];
        let found = source.read_at(at, &mut block)?;
        if found == 0 || block == [0; BLOCK as usize] {
            let is_end = start.is_none();
            return if is_end { Ok(None) } else { damage(at, "the archive ends behind a long name") };
        }
        if found < block.len() {
            return damage(at, &format!("expected a header of 512 bytes, found the end after {found}"));
        }
        let header = Header::of(&block, at)?;
        let (begin, size) = (at + BLOCK, extended.size.unwrap_or(header.size));
        let Some(end) = size.checked_next_multiple_of(BLOCK).and_then(|size| begin.checked_add(size)) else {
            return damage(at, &format!("a file of {size} bytes"));
        };
        if end > source.size() {
            let left = source.size().saturating_sub(begin);
            return damage(at, &format!("expected {} bytes behind the header, found {left}", end - begin));
        }
        start.get_or_insert(at);
        match header.kind {
            b'0' | 0 | b'7' => {
                let name = extended.name.unwrap_or(header.name);
                let start = start.expect("set above");
                return Ok(Some(Entry { name, data: begin..begin + size, start, end }));
            }
            b'x' | b'L' => {
                if size > MAX_EXTENSION_BYTES {
                    return damage(at, &format!("{size} bytes of names and attributes"));
                }
                let mut text = vec![0; size as usize];
                source.read_exact_at(begin, &mut text)?;
                if let Err(detail) = if header.kind == b'L' { extended.long_name(&text) } else { extended.pax(&text) } {
                    return damage(begin, &detail);
                }
            }
            b'S' => return damage(at, "a sparse file, which is not read"),
            // Folders, links, devices, attributes of all files: nothing of a sample. What was said of it goes with it.
            _ => (start, extended) = (None, Extended::default()),
        }
        at = end;
    }
}

/// Where each sample begins, and where the last one ends: one more than there are samples.
///
/// # Errors
/// As [`entry`]; for a sample whose files are not side by side.
pub fn scan(source: &(impl ReadAt + ?Sized)) -> Result<Vec<u64>> {
    let (mut bounds, mut at, mut end) = (Vec::new(), 0, 0);
    let mut last = String::new();
    let mut fields: HashMap<String, HashSet<String>> = HashMap::new();
    while let Some(entry) = entry(source, at)? {
        at = entry.end;
        let Some((key, field)) = entry.key_and_field() else { continue };
        let (field, is_next) = (field.to_lowercase(), bounds.is_empty() || last != key);
        if is_next {
            // Another sample of that name has the same fields.
            if fields.get(key).is_some_and(|known| !known.contains(&field)) {
                let detail =
                    format!("expected the files of the sample {key:?} side by side, found {field:?} behind others");
                return damage(entry.start, &detail);
            }
            bounds.push(entry.start);
            key.clone_into(&mut last);
        }
        fields.entry(key.to_owned()).or_default().insert(field);
        end = entry.end;
    }
    check_end(source, at)?;
    bounds.push(end);
    Ok(bounds)
}

/// Two blocks of zeros say that an archive ends, and the first of them, at `at`, has been seen if it is there. Without them
/// it may have been cut, and with more behind them it has a second part.
fn check_end(source: &(impl ReadAt + ?Sized), at: u64) -> Result<()> {
    let second = at + BLOCK;
    let mut rest = vec![0; source.size().saturating_sub(second).min(128 * BLOCK) as usize];
    let found = source.read_at(second, &mut rest)?;
    if found < BLOCK as usize {
        return damage(at, "expected two blocks of zeros, which end an archive, found the end");
    }
    match rest[..found].iter().position(|&byte| byte != 0) {
        Some(more) => damage(second + more as u64, "expected nothing but zeros behind the end of the archive"),
        None => Ok(()),
    }
}

/// The fields of the sample whose bytes `source` is, its key first.
///
/// # Errors
/// As [`entry`]; for a field that is there twice, and for files of another sample.
pub fn fields(source: &(impl ReadAt + ?Sized)) -> Result<Fields> {
    let (mut at, mut found) = (0, Fields::default());
    while at < source.size() {
        let Some(entry) = entry(source, at)? else { break };
        at = entry.end;
        let Some((key, field)) = entry.key_and_field() else { continue };
        if found.fields.is_empty() {
            found.key = key.to_owned();
        } else if found.key != key {
            return damage(
                entry.start,
                &format!("expected a file of the sample {:?}, found one of {key:?}", found.key),
            );
        }
        let name = field.to_lowercase();
        if found.fields.iter().any(|field| field.name == name) {
            return damage(entry.start, &format!("{name:?} is there twice in the sample {key:?}"));
        }
        found.fields.push(Field { name, data: entry.data, encoding: Encoding::ByName });
    }
    if found.fields.is_empty() { damage(0, "expected the files of a sample, found none") } else { Ok(found) }
}

/// What headers before a file's own say of it. They beat its own.
#[derive(Default)]
struct Extended {
    name: Option<String>,
    size: Option<u64>,
}

impl Extended {
    fn long_name(&mut self, text: &[u8]) -> std::result::Result<(), String> {
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
        self.name = Some(String::from_utf8_lossy(&text[..end]).into_owned());
        Ok(())
    }

    /// Records `"<length> <keyword>=<value>\n"`; the length counts itself.
    fn pax(&mut self, mut text: &[u8]) -> std::result::Result<(), String> {
        while !text.is_empty() {
            let (record, rest) = pax_record(text).ok_or("pax attributes that cannot be read")?;
            text = rest;
            let (keyword, value) = record;
            match keyword {
                "path" => self.name = Some(String::from_utf8_lossy(value).into_owned()),
                "size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|size| size.parse().ok());
                    self.size = Some(size.ok_or("a size that is no number")?);
                }
                _ if keyword.starts_with("GNU.sparse.") => return Err("a sparse file, which is not read".to_owned()),
                _ => {}
            }
        }
        Ok(())
    }
}

type PaxRecord<'a> = (&'a str, &'a [u8]);

fn pax_record(text: &[u8]) -> Option<(PaxRecord<'_>, &[u8])> {
    let space = text.iter().take(20).position(|&byte| byte == b' ')?;
    let length: usize = std::str::from_utf8(&text[..space]).ok()?.parse().ok()?;
    let record = text.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some(((std::str::from_utf8(&record[..equals]).ok()?, &record[equals + 1..]), &text[length..]))
}

struct Header {
    name: String,
    size: u64,
    kind: u8,
}

impl Header {
    fn of(block: &[u8; BLOCK as usize], at: u64) -> Result<Self> {
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        let blank: u32 = block[148..156].iter().map(|&byte| u32::from(byte)).sum();
        let (expected, found) = (octal(&block[148..156]), sum - blank + 8 * u32::from(b' '));
        if expected != Some(u64::from(found)) {
            return damage(
                at,
                &format!(
                    "expected a header with the sum {found}, found {:?}",
                    block[148..156].escape_ascii().to_string()
                ),
            );
        }
        let Some(size) = number(&block[124..136]) else {
            return damage(at, &format!("a size that is no number: {:?}", block[124..136].escape_ascii().to_string()));
        };
        let text = |range: Range<usize>| {
            let field = &block[range];
            let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
            String::from_utf8_lossy(&field[..end]).into_owned()
        };
        // GNU's own headers have other things where ustar has the prefix.
        let prefix = if &block[257..263] == b"ustar\0" { text(345..500) } else { String::new() };
        let name = if prefix.is_empty() { text(0..100) } else { format!("{prefix}/{}", text(0..100)) };
        Ok(Self { name, size, kind: block[156] })
    }
}

/// Octal digits, or GNU's binary number with the highest bit set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 == 0 {
        return octal(field);
    }
    let (high, low) = field.split_at(field.len() - 8);
    let is_small = high[0] == 0x80 && high[1..].iter().all(|&byte| byte == 0);
    is_small.then(|| u64::from_be_bytes(low.try_into().expect("8 bytes")))
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\0']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

#[cfg(test)]
mod tests {
    use super::super::Fault;
    use super::*;

    fn header(name: &[u8], size: u64, kind: u8) -> Vec<u8> {
        let mut block = vec![0; BLOCK as usize];
        block[..name.len()].copy_from_slice(name);
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        signed(block)
    }

    fn signed(mut block: Vec<u8>) -> Vec<u8> {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    fn file(name: &str, content: &[u8]) -> Vec<u8> {
        [header(name.as_bytes(), content.len() as u64, b'0'), padded(content)].concat()
    }

    fn padded(content: &[u8]) -> Vec<u8> {
        let mut content = content.to_vec();
        content.resize(content.len().next_multiple_of(BLOCK as usize), 0);
        content
    }

    fn archive(files: &[Vec<u8>]) -> Vec<u8> {
        [files.concat(), vec![0; 1024]].concat()
    }

    /// Key, and name and content of each field.
    type Sample = (String, Vec<(String, Vec<u8>)>);

    fn samples(archive: &[u8]) -> Result<Vec<Sample>> {
        let bounds = scan(archive)?;
        let sample = |pair: &[u64]| {
            let bytes = &archive[pair[0] as usize..pair[1] as usize];
            let found = fields(bytes)?;
            let content = |field: &Field| bytes[field.data.start as usize..field.data.end as usize].to_vec();
            Ok((found.key, found.fields.iter().map(|field| (field.name.clone(), content(field))).collect()))
        };
        bounds.windows(2).map(sample).collect()
    }

    fn keys(archive: &[u8]) -> Vec<String> {
        samples(archive).expect("sound").into_iter().map(|(key, _)| key).collect()
    }

    fn refused(archive: &[u8]) -> (u64, String) {
        match samples(archive) {
            Err(Fault::Damage { at, detail }) => (at, detail),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn files_that_agree_up_to_the_first_dot_are_a_sample() {
        let bytes = archive(&[
            file("train/a.b/one.jpg", b"image"),
            file("train/a.b/one.SEG.png", b""),
            header(b"train/c/", 0, b'5'),
            file("two.cls", b"7"),
            file("__meta__.x__", b"of WebDataset"),
            file(".hidden", b"no key"),
            file("nodot", b"no field"),
            file("two.txt", b"text"),
            file("three.txt", b"3"),
            file("two.cls", b"another sample"),
        ]);
        let of = |key: &str, fields: &[(&str, &[u8])]| {
            (key.to_owned(), fields.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect())
        };
        let expected: Vec<Sample> = vec![
            of("train/a.b/one", &[("jpg", b"image"), ("seg.png", b"")]),
            of("two", &[("cls", b"7"), ("txt", b"text")]),
            of("three", &[("txt", b"3")]),
            of("two", &[("cls", b"another sample")]),
        ];
        assert_eq!(samples(&bytes).expect("sound"), expected);
    }

    #[test]
    fn long_names_come_in_three_ways() {
        let long = format!("{}/{}.txt", "d".repeat(120), "n".repeat(120));
        let pax = |record: &str| [header(b"x", record.len() as u64, b'x'), padded(record.as_bytes())].concat();
        let record = format!(" path={long}\n");
        let length = record.len() + 3;
        let gnu =
            [header(b"././@LongLink", long.len() as u64 + 1, b'L'), padded(format!("{long}\0").as_bytes())].concat();
        let key = long.trim_end_matches(".txt").to_owned();
        let by_pax = archive(&[pax(&format!("{length}{record}")), file("short.txt", b"1"), file("b.txt", b"2")]);
        assert_eq!(keys(&by_pax), [key.clone(), "b".to_owned()]);
        assert_eq!(keys(&archive(&[gnu, file("short.txt", b"1"), file("b.txt", b"2")])), [key, "b".to_owned()]);
        let short = format!("{}/{}.txt", "d".repeat(120), "n".repeat(90));
        let mut split = header(&short.as_bytes()[121..], 1, b'0');
        split[345..465].copy_from_slice(&short.as_bytes()[..120]);
        assert_eq!(keys(&archive(&[signed(split), padded(b"1")])), [short.trim_end_matches(".txt")]);
    }

    #[test]
    fn a_size_of_pax_beats_the_header_s_and_binary_sizes_are_read() {
        let record = b"10 size=3\n";
        let pax = [header(b"x", record.len() as u64, b'x'), padded(record)].concat();
        let bytes = archive(&[pax, header(b"a.txt", 0, b'0'), padded(b"abc"), file("b.txt", b"2")]);
        assert_eq!(keys(&bytes), ["a", "b"]);
        let mut binary = header(b"a.txt", 0, b'0');
        binary[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(keys(&archive(&[signed(binary), padded(b"abc")])), ["a"]);
    }

    #[test]
    fn what_is_no_sound_archive_is_refused_with_the_place() {
        let sound = archive(&[file("a.txt", &[1; 700]), file("a.cls", b"2")]);
        assert_eq!(refused(&sound[..600]).0, 0);
        assert_eq!(refused(&sound[..2048 - 500]).0, 1536);
        let mut flipped = sound.clone();
        flipped[1536] ^= 1;
        assert_eq!(refused(&flipped).0, 1536);
        let sparse = archive(&[header(b"a.txt", 0, b'S')]);
        assert!(refused(&sparse).1.contains("sparse"));
        let apart = archive(&[file("a.jpg", b"1"), file("b.jpg", b"2"), file("a.txt", b"3"), file("b.txt", b"4")]);
        assert!(refused(&apart).0 == 2048 && refused(&apart).1.contains("side by side"));
        let twice = archive(&[file("a.txt", b"1"), file("a.TXT", b"2")]);
        assert!(refused(&twice).1.contains("twice"));
        assert_eq!(keys(&archive(&[])), [""; 0]);
    }

    #[test]
    fn an_archive_without_its_end_and_two_in_one_file_are_refused() {
        let one = file("a.txt", b"1");
        assert_eq!(refused(&one).0, 1024);
        assert_eq!(refused(b"").0, 0);
        let whole = archive(&[one]);
        assert_eq!(refused(&[whole.clone(), whole].concat()).0, 2048);
    }
}
