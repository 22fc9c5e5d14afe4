//! Shards that are compressed as a whole: nothing of them can be read without all that lies before it. Pure.
//!
//! Several members of gzip (<https://www.rfc-editor.org/rfc/rfc1952>), or frames of zstd
//! (<https://www.rfc-editor.org/rfc/rfc8878>), are one stream. Places in what is wrong count decompressed bytes.

use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Read};

use super::{Fault, ReadAt, Result, damage};

/// How a shard is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Members of gzip.
    Gzip,
    /// Frames of zstd.
    Zstd,
}

/// More no shard gives: it must lie in memory whole to be read. Ends the scan of what a few bytes blow up.
const MAX_BYTES: u64 = 16 << 30;

/// Of what is compressed, and of what is skipped, at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// Decompressed before somebody is asked whether it is wanted: some milliseconds.
const PIECE_BYTES: usize = 1 << 20;

const GZIP_MAGIC: &[u8] = b"\x1f\x8b";
const ZSTD_MAGIC: &[u8] = b"\x28\xb5\x2f\xfd";
/// Of frames that are skipped, behind a byte of 0x50 to 0x5f.
const ZSTD_SKIPPED_MAGIC: &[u8] = b"\x2a\x4d\x18";

impl Compression {
    /// What the end of a name says.
    pub fn of_name(name: &str) -> Option<Self> {
        match &*name.rsplit_once('.')?.1.to_ascii_lowercase() {
            "gz" | "tgz" => Some(Self::Gzip),
            "zst" | "zstd" | "tzst" => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Such as `gzip`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    fn begins(self, bytes: &[u8]) -> bool {
        match self {
            Self::Gzip => bytes.starts_with(GZIP_MAGIC),
            Self::Zstd => {
                let is_skipped = |bytes: &[u8]| bytes[0] & 0xf0 == 0x50 && bytes[1..].starts_with(ZSTD_SKIPPED_MAGIC);
                bytes.starts_with(ZSTD_MAGIC) || !bytes.is_empty() && is_skipped(bytes)
            }
        }
    }

    fn decoder<'a>(self, compressed: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(compressed)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(compressed)?),
        })
    }

    /// What failed behind `at` decompressed bytes: the reading of the compressed ones, or what they are.
    fn fault(self, error: io::Error, at: u64) -> Fault {
        match error.downcast::<Fault>() {
            Ok(fault) => fault,
            Err(error) => Fault::Damage { at, detail: format!("cannot be decompressed as {}: {error}", self.name()) },
        }
    }
}

/// What the name of a shard says of its first bytes.
///
/// # Errors
/// [`Fault::Damage`] where they say something else.
pub fn check(compression: Option<Compression>, source: &(impl ReadAt + ?Sized)) -> Result<()> {
    let mut first = [0; 4];
    let found = source.read_at(0, &mut first)?;
    let first = &first[..found];
    match compression {
        Some(named) if named.begins(first) => Ok(()),
        Some(named) => {
            let (named, first) = (named.name(), first.escape_ascii());
            damage(0, &format!("is {named} by its name, found first bytes \"{first}\""))
        }
        None => match [(Compression::Gzip, GZIP_MAGIC), (Compression::Zstd, ZSTD_MAGIC)]
            .iter()
            .find(|(_, magic)| first.starts_with(magic))
        {
            None => Ok(()),
            Some((begun, _)) => damage(0, &format!("begins as {} does, which its name does not say", begun.name())),
        },
    }
}

/// Decompresses `compressed` into `target`, which it fills, for as long as `is_wanted`.
///
/// # Errors
/// [`Fault::Damage`] for what cannot be decompressed, and for more or fewer bytes; [`Fault::Io`] if it is wanted no more.
pub fn decompress(
    compression: Compression,
    compressed: &[u8],
    target: &mut [u8],
    is_wanted: impl Fn() -> bool,
) -> Result<()> {
    let mut decoder = compression.decoder(compressed)?;
    let mut next = |at: u64, target: &mut [u8]| decoder.read(target).map_err(|error| compression.fault(error, at));
    let (mut filled, expected) = (0, target.len());
    while filled < expected {
        if !is_wanted() {
            return Err(io::Error::other("nobody waits for what is decompressed").into());
        }
        let piece = filled..expected.min(filled + PIECE_BYTES);
        match next(filled as u64, &mut target[piece])? {
            0 => {
                return damage(
                    filled as u64,
                    &format!("expected {expected} bytes decompressed, found the end after {filled}"),
                );
            }
            bytes => filled += bytes,
        }
    }
    // Checksums are behind the last byte.
    match next(filled as u64, &mut [0])? {
        0 => Ok(()),
        _ => damage(filled as u64, &format!("expected {expected} bytes decompressed, found more")),
    }
}

/// A compressed shard as what it holds, decompressed on the way and not kept: can only be read forwards.
pub struct Decompressed<'a> {
    reading: RefCell<Reading<'a>>,
    size: u64,
}

struct Reading<'a> {
    compression: Compression,
    decoder: Box<dyn Read + 'a>,
    /// Bytes that have been given or skipped.
    at: u64,
}

impl<'a> Decompressed<'a> {
    /// Of `size` bytes; where nobody knows, u64::MAX.
    ///
    /// # Errors
    /// Where there is no memory for it.
    pub fn new(compressed: &'a (dyn ReadAt + 'a), compression: Compression, size: u64) -> Result<Self> {
        let compressed = BufReader::with_capacity(CHUNK_BYTES, Compressed { source: compressed, at: 0 });
        let decoder = compression.decoder(compressed)?;
        Ok(Self { reading: RefCell::new(Reading { compression, decoder, at: 0 }), size })
    }

    /// How many bytes there are, found by decompressing all of them.
    ///
    /// # Errors
    /// [`Fault::Damage`] for what cannot be decompressed.
    pub fn end(self) -> Result<u64> {
        let mut reading = self.reading.into_inner();
        reading.skip_to(u64::MAX)?;
        Ok(reading.at)
    }
}

impl ReadAt for Decompressed<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut reading = self.reading.borrow_mut();
        assert!(at >= reading.at, "{at} lies before {}, which is read", reading.at);
        reading.skip_to(at).map_err(io::Error::other)?;
        let mut found = 0;
        while reading.at == at + found as u64 && found < buffer.len() {
            match reading.read(&mut buffer[found..]).map_err(io::Error::other)? {
                0 => break,
                bytes => found += bytes,
            }
        }
        Ok(found)
    }
}

impl Reading<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let found = self.decoder.read(buffer).map_err(|error| self.compression.fault(error, self.at))?;
        self.at += found as u64;
        if self.at > MAX_BYTES {
            return damage(
                self.at,
                &format!("gives more than {MAX_BYTES} bytes decompressed, which cannot be read at once"),
            );
        }
        Ok(found)
    }

    /// Up to `at`, or the end.
    fn skip_to(&mut self, at: u64) -> Result<()> {
        let mut skipped = [0; CHUNK_BYTES];
        while self.at < at {
            let wanted = skipped.len().min(usize::try_from(at - self.at).unwrap_or(usize::MAX));
            if self.read(&mut skipped[..wanted])? == 0 {
                break;
            }
        }
        Ok(())
    }
}

/// What went wrong while a format looked at [`Decompressed`] or at decompressed bytes: places are marked as such.
pub fn in_decompressed(fault: Fault) -> Fault {
    let fault = match fault {
        Fault::Io(error) => error.downcast::<Fault>().unwrap_or_else(Fault::Io),
        damage => damage,
    };
    match fault {
        Fault::Damage { at, detail } => {
            Fault::Damage { at, detail: format!("{detail}, counted in decompressed bytes") }
        }
        io => io,
    }
}

/// A source, read from its beginning on. What it says is told apart from what a decoder says.
struct Compressed<'a> {
    source: &'a (dyn ReadAt + 'a),
    at: u64,
}

impl Read for Compressed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let found = self.source.read_at(self.at, buffer).map_err(|error| io::Error::other(Fault::Io(error)))?;
        self.at += found as u64;
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::Compression::{Gzip, Zstd};
    use super::*;

    fn compressed(compression: Compression, content: &[u8]) -> Vec<u8> {
        match compression {
            Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(content).expect("memory");
                encoder.finish().expect("memory")
            }
            Zstd => {
                let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("memory");
                encoder.include_checksum(true).expect("a setting");
                encoder.write_all(content).expect("memory");
                encoder.finish().expect("memory")
            }
        }
    }

    fn content() -> Vec<u8> {
        (0..150_000u32).flat_map(|at| (at.wrapping_mul(at) % 9973).to_le_bytes()).collect()
    }

    fn damage_of<T: std::fmt::Debug>(found: Result<T>) -> (u64, String) {
        match found.map_err(in_decompressed) {
            Err(Fault::Damage { at, detail }) => (at, detail),
            other => panic!("{other:?}"),
        }
    }

    fn whole(compression: Compression, bytes: &[u8], size: usize) -> Result<Vec<u8>> {
        let mut target = vec![0; size];
        decompress(compression, bytes, &mut target, || true).map(|()| target)
    }

    /// Read in pieces with gaps, then to the end.
    fn streamed(compression: Compression, bytes: &[u8]) -> Result<(Vec<u8>, u64)> {
        // `&[u8]` is a source with a size.
        let source = Owned(bytes.to_vec());
        let stream = Decompressed::new(&source, compression, u64::MAX)?;
        let (mut pieces, mut piece) = (Vec::new(), [0; 1000]);
        for at in (0..400_000).step_by(100_000) {
            let found = stream.read_at(at, &mut piece)?;
            pieces.extend(&piece[..found]);
        }
        Ok((pieces, stream.end()?))
    }

    struct Owned(Vec<u8>);

    impl ReadAt for Owned {
        fn size(&self) -> u64 {
            self.0.len() as u64
        }

        fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.as_slice().read_at(at, buffer)
        }
    }

    #[test]
    fn all_members_and_frames_are_one_stream() {
        let content = content();
        for compression in [Gzip, Zstd] {
            let parts: Vec<u8> = [&content[..10], b"", &content[10..300_000], &content[300_000..]]
                .iter()
                .flat_map(|part| compressed(compression, part))
                .collect();
            assert!(whole(compression, &parts, content.len()).expect("sound") == content);
            let (pieces, size) = streamed(compression, &parts).expect("sound");
            let expected: Vec<u8> =
                (0..4).flat_map(|nth| &content[nth * 100_000..nth * 100_000 + 1000]).copied().collect();
            assert!(pieces == expected && size == content.len() as u64);
        }
    }

    #[test]
    fn frames_that_are_to_be_skipped_are() {
        let bytes =
            [&b"\x5a\x2a\x4d\x18\x03\0\0\0abc"[..], &compressed(Zstd, b"text"), b"\x50\x2a\x4d\x18\0\0\0\0"].concat();
        check(Some(Zstd), &*bytes).expect("sound");
        assert_eq!(whole(Zstd, &bytes, 4).expect("sound"), b"text");
    }

    #[test]
    fn a_cut_or_another_byte_is_damage() {
        let content = content();
        for compression in [Gzip, Zstd] {
            let sound = compressed(compression, &content);
            let size = content.len();
            for left in [sound.len() - 1, sound.len() - 8, sound.len() / 2, 20, 3, 0] {
                let (at, detail) = damage_of(whole(compression, &sound[..left], size));
                assert!(at <= size as u64, "{compression:?} {left}: {detail}");
                if left > 0 {
                    damage_of(streamed(compression, &sound[..left]));
                }
            }
            for flipped in [sound.len() / 3, sound.len() - 2] {
                let mut bytes = sound.clone();
                bytes[flipped] ^= 4;
                let (at, detail) = damage_of(whole(compression, &bytes, size));
                assert!(detail.contains(compression.name()), "{at}: {detail}");
                assert!(damage_of(streamed(compression, &bytes)).1.contains("decompressed bytes"));
            }
            damage_of(whole(compression, &[&*sound, b"rest"].concat(), size));
        }
    }

    #[test]
    fn no_more_comes_out_than_was_said() {
        for compression in [Gzip, Zstd] {
            let bomb = compressed(compression, &vec![0; 10 << 20]);
            let more = (1000, "expected 1000 bytes decompressed, found more, counted in decompressed bytes".to_owned());
            assert_eq!(damage_of(whole(compression, &bomb, 1000)), more);
            let (at, detail) = damage_of(whole(compression, &compressed(compression, b"abc"), 4));
            assert!(at == 3 && detail.starts_with("expected 4 bytes decompressed, found the end after 3"), "{detail}");
        }
    }

    #[test]
    fn what_is_wanted_no_more_ends_early() {
        for compression in [Gzip, Zstd] {
            let bytes = compressed(compression, &vec![7; 4 << 20]);
            let (mut target, asked) = (vec![0; 4 << 20], std::cell::Cell::new(0));
            let is_wanted = || asked.replace(asked.get() + 1) == 0;
            let found = decompress(compression, &bytes, &mut target, is_wanted);
            assert!(matches!(found, Err(Fault::Io(_))) && target[PIECE_BYTES..].iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn name_and_first_bytes_say_the_same() {
        let named = |name: &str| Compression::of_name(name);
        assert_eq!(named("a.tar.gz"), Some(Gzip));
        assert_eq!(named("a.TGZ"), Some(Gzip));
        assert_eq!([named("a.jsonl.zst"), named("s.mds.zstd"), named("a.tzst")], [Some(Zstd); 3]);
        assert_eq!([named("gz"), named("a.gz.tar"), named("zst.jsonl")], [None; 3]);
        for (compression, other) in [(Gzip, Zstd), (Zstd, Gzip)] {
            let bytes = compressed(compression, b"text");
            check(Some(compression), &*bytes).expect("as it is named");
            assert!(damage_of(check(None, &*bytes)).1.contains(compression.name()));
            assert!(damage_of(check(Some(other), &*bytes)).1.contains(other.name()));
            assert!(damage_of(check(Some(compression), &b"text"[..])).1.contains("\"text\""));
            assert!(damage_of(check(Some(compression), &b""[..])).1.contains(compression.name()));
        }
        check(None, &b"{}"[..]).expect("no magic");
    }

    #[test]
    fn what_the_source_says_is_no_damage() {
        struct Refusing;
        impl ReadAt for Refusing {
            fn size(&self) -> u64 {
                100
            }

            fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::PermissionDenied.into())
            }
        }
        for compression in [Gzip, Zstd] {
            let stream = Decompressed::new(&Refusing, compression, u64::MAX).expect("memory");
            let fault = in_decompressed(stream.read_at(0, &mut [0]).expect_err("refused").into());
            assert!(matches!(&fault, Fault::Io(error) if error.kind() == io::ErrorKind::PermissionDenied), "{fault:?}");
        }
    }
}
