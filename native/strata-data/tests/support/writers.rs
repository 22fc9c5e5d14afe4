//! Small data sets of each format, written without the code under test, and what their samples hold.

use std::io::Write;

use strata_data::dataset::Format;
use strata_data::formats::tokens::Windows;
use strata_data::formats::{Dtype, Encoding};

/// A format, in the ways in which it is written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tar,
    Tokens,
    OverlappingTokens,
    Megatron,
    Documents,
    Mds,
    Lines,
    Files,
    GzipTar,
    ZstdTar,
    GzipMds,
    ZstdMds,
    GzipLines,
    ZstdLines,
}

pub const KINDS: [Kind; 14] = [
    Kind::Tar,
    Kind::Tokens,
    Kind::OverlappingTokens,
    Kind::Megatron,
    Kind::Documents,
    Kind::Mds,
    Kind::Lines,
    Kind::Files,
    Kind::GzipTar,
    Kind::ZstdTar,
    Kind::GzipMds,
    Kind::ZstdMds,
    Kind::GzipLines,
    Kind::ZstdLines,
];

pub const COMPRESSED: [Kind; 6] =
    [Kind::GzipTar, Kind::ZstdTar, Kind::GzipMds, Kind::ZstdMds, Kind::GzipLines, Kind::ZstdLines];

impl Kind {
    /// What is compressed, and the end of the names.
    pub fn compressed(self) -> Option<(Self, &'static str)> {
        match self {
            Self::GzipTar => Some((Self::Tar, "gz")),
            Self::ZstdTar => Some((Self::Tar, "zst")),
            Self::GzipMds => Some((Self::Mds, "gz")),
            Self::ZstdMds => Some((Self::Mds, "zstd")),
            Self::GzipLines => Some((Self::Lines, "gz")),
            Self::ZstdLines => Some((Self::Lines, "zst")),
            _ => None,
        }
    }
}

/// A sample, as it was written.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub key: String,
    /// Name, content and what it is.
    pub fields: Vec<(String, Vec<u8>, Encoding)>,
}

/// Objects, and what reading them must give.
pub struct DataSet {
    pub format: Format,
    pub pattern: String,
    /// Name and content.
    pub objects: Vec<(String, Vec<u8>)>,
    /// What they would be if they were not compressed.
    pub plain: Vec<(String, Vec<u8>)>,
    /// In the order of the names of the shards.
    pub samples: Vec<Written>,
}

/// As many samples in each shard as `counts` say, each with a content of about `size` bytes.
pub fn data_set(kind: Kind, counts: &[usize], size: usize) -> DataSet {
    if let Some((plain, end)) = kind.compressed() {
        return compressed(data_set(plain, counts, size), end);
    }
    let mut shards = Shards { counts, size, objects: Vec::new(), samples: Vec::new() };
    let (format, pattern) = match kind {
        Kind::Tar => shards.tar(),
        Kind::Tokens => shards.tokens(false),
        Kind::OverlappingTokens => shards.tokens(true),
        Kind::Megatron => shards.megatron(false),
        Kind::Documents => shards.megatron(true),
        Kind::Mds => shards.mds(),
        Kind::Lines => shards.lines(),
        Kind::Files => shards.files(),
        _ => unreachable!("compressed above"),
    };
    let (objects, plain) = (shards.objects.clone(), shards.objects);
    DataSet { format, pattern: pattern.to_owned(), objects, plain, samples: shards.samples }
}

/// Its shards compressed, each in two parts.
fn compressed(mut data: DataSet, end: &str) -> DataSet {
    for (name, bytes) in data.objects.iter_mut().chain(&mut data.plain) {
        if name.ends_with(".json") {
            let mut index = String::from_utf8(std::mem::take(bytes)).unwrap();
            for shard in 0..index.matches("null}").count() {
                let zip = format!(r#"{{"basename": "shard.{shard:05}.mds.{end}", "bytes": 1, "hashes": {{}}}}}}"#);
                index = index.replacen("null}", &zip, 1);
            }
            *bytes = index.into_bytes();
        } else {
            *name = format!("{name}.{end}");
        }
    }
    for (name, bytes) in data.objects.iter_mut().filter(|(name, _)| name.ends_with(end)) {
        let parts = bytes.split_at(bytes.len() / 5);
        *bytes = [parts.0, parts.1].map(|part| compress(part, name.ends_with("gz"))).concat();
    }
    if data.format != Format::Mds {
        data.pattern = format!("{}.{end}", data.pattern);
    }
    data
}

/// With a checksum.
pub fn compress(content: &[u8], as_gzip: bool) -> Vec<u8> {
    if as_gzip {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(content).unwrap();
        return encoder.finish().unwrap();
    }
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

struct Shards<'a> {
    counts: &'a [usize],
    size: usize,
    objects: Vec<(String, Vec<u8>)>,
    samples: Vec<Written>,
}

/// Letters that differ from sample to sample.
fn letters(size: usize, seed: usize) -> Vec<u8> {
    let unit: Vec<u8> = (0..677).map(|at| b'a' + ((at * 7 + at / 26 + seed * 11) % 26) as u8).collect();
    let mut letters = unit.repeat(size.div_ceil(unit.len()));
    letters.truncate(size);
    letters
}

impl Shards<'_> {
    fn add(&mut self, key: &str, fields: &[(&str, &[u8], Encoding)]) {
        let owned =
            |(name, bytes, encoding): &(&str, &[u8], Encoding)| ((*name).to_owned(), bytes.to_vec(), encoding.clone());
        self.samples.push(Written { key: key.to_owned(), fields: fields.iter().map(owned).collect() });
    }

    fn tar(&mut self) -> (Format, &'static str) {
        for (shard, &count) in self.counts.iter().enumerate() {
            let mut archive = Vec::new();
            for nth in 0..count {
                let (key, text) = (format!("d.{shard}/s{nth}"), letters(self.size + nth % 5, nth));
                let class = nth.to_string();
                file(&mut archive, &format!("{key}.txt"), &text);
                file(&mut archive, &format!("{key}.Info.cls"), class.as_bytes());
                let fields: [(&str, &[u8], _); 2] =
                    [("txt", &text, Encoding::ByName), ("info.cls", class.as_bytes(), Encoding::ByName)];
                self.add(&key, &fields);
            }
            archive.resize(archive.len() + 1024, 0);
            self.objects.push((format!("shard-{shard:03}.tar"), archive));
        }
        (Format::Tar, "shard-{000..999}.tar")
    }

    fn tokens(&mut self, overlaps: bool) -> (Format, &'static str) {
        let window = self.size / 2 + 1;
        let stride = if overlaps { window / 2 + 1 } else { window };
        for (shard, &count) in self.counts.iter().enumerate() {
            // One token too few for another window.
            let num_tokens = if count == 0 { window - 1 } else { (count - 1) * stride + window + stride - 1 };
            let tokens = letters(2 * num_tokens, shard);
            let array = Encoding::Array { dtype: Dtype::Uint16, shape: vec![window as u64] };
            for nth in 0..count {
                self.add("", &[("tokens", &tokens[2 * nth * stride..2 * (nth * stride + window)], array.clone())]);
            }
            self.objects.push((format!("{shard}.bin"), [&b"HEAD"[..], &tokens].concat()));
        }
        let windows = Windows { window: window as u64, stride: stride as u64, with_documents: false };
        (Format::Tokens { dtype: Dtype::Uint16, header_bytes: 4, windows }, "*.bin")
    }

    fn megatron(&mut self, with_documents: bool) -> (Format, &'static str) {
        let window = self.size / 4 + 1;
        for (shard, &count) in self.counts.iter().enumerate() {
            let num_tokens = window * count + window / 2;
            let tokens = letters(4 * num_tokens, shard);
            let array = Encoding::Array { dtype: Dtype::Int32, shape: vec![window as u64] };
            // Two sequences, each a document.
            let lengths = [num_tokens / 3, num_tokens - num_tokens / 3];
            for nth in 0..count {
                let first = nth * window;
                // The first document of a window is its number 0.
                let of_first = if first < lengths[0] { window.min(lengths[0] - first) } else { window };
                let documents = [[0, 0, 0, 0].repeat(of_first), [1, 0, 0, 0].repeat(window - of_first)].concat();
                let tokens = ("tokens", &tokens[4 * first..4 * (first + window)], array.clone());
                let fields = [tokens, ("document", &*documents, array.clone())];
                self.add("", &fields[..if with_documents { 2 } else { 1 }]);
            }
            let mut index = b"MMIDIDX\0\0".to_vec();
            index.extend([1, 0, 0, 0, 0, 0, 0, 0, 4]);
            index.extend([2u64, 3].map(u64::to_le_bytes).concat());
            index.extend(lengths.map(|length| (length as i32).to_le_bytes()).concat());
            index.extend([0, 4 * lengths[0] as i64].map(i64::to_le_bytes).concat());
            index.extend([0i64, 1, 2].map(i64::to_le_bytes).concat());
            self.objects.push((format!("part{shard}_text_document.bin"), tokens));
            self.objects.push((format!("part{shard}_text_document.idx"), index));
        }
        (
            Format::Megatron { windows: Windows { window: window as u64, stride: window as u64, with_documents } },
            "part*",
        )
    }

    fn mds(&mut self) -> (Format, &'static str) {
        let mut listed = Vec::new();
        for (shard, &count) in self.counts.iter().enumerate() {
            let mut samples = Vec::new();
            for nth in 0..count {
                let (text, id) = (letters(self.size + nth % 5, nth), (nth as i64 - 1).to_le_bytes());
                let matrix = letters(12, nth + 1);
                let described = [&[17, 2 << 2, 3, 2], &*matrix].concat();
                let sizes = [described.len() as u32, text.len() as u32].map(u32::to_le_bytes).concat();
                samples.push([&*sizes, &id, &described, &text].concat());
                let fields: [(&str, &[u8], _); 3] = [
                    ("id", &id, Encoding::Array { dtype: Dtype::Int64, shape: vec![] }),
                    ("matrix", &matrix, Encoding::Array { dtype: Dtype::Int16, shape: vec![3, 2] }),
                    ("text", &text, Encoding::Named("str".into())),
                ];
                self.add("", &fields);
            }
            let config = br#"{"format": "mds"}"#;
            let mut offset = 4 * (count + 2) + config.len();
            let mut bytes = (count as u32).to_le_bytes().to_vec();
            for size in samples.iter().map(Vec::len).chain([0]) {
                bytes.extend((offset as u32).to_le_bytes());
                offset += size;
            }
            bytes.extend(config);
            bytes.extend(samples.concat());
            let name = format!("shard.{shard:05}.mds");
            listed.push(format!(
                r#"{{"column_encodings": ["int", "ndarray", "str"], "column_names": ["id", "matrix", "text"],
                "column_sizes": [8, null, null], "compression": null, "format": "mds", "hashes": [],
                "raw_data": {{"basename": "{name}", "bytes": {}, "hashes": {{}}}}, "samples": {count},
                "size_limit": 67108864, "version": 2, "zip_data": null}}"#,
                bytes.len()
            ));
            self.objects.push((format!("train/{name}"), bytes));
        }
        let index = format!(r#"{{"shards": [{}], "version": 2}}"#, listed.join(", "));
        self.objects.push(("train/index.json".to_owned(), index.into_bytes()));
        (Format::Mds, "train/")
    }

    fn lines(&mut self) -> (Format, &'static str) {
        for (shard, &count) in self.counts.iter().enumerate() {
            let mut text = if shard % 2 == 0 { b"\xef\xbb\xbf\n".to_vec() } else { Vec::new() };
            for nth in 0..count {
                let line = [b"{\"text\": \"\xe2\x80\xa8", &*letters(self.size + nth % 5, nth), b"\"}"].concat();
                text.extend(&line);
                self.add("", &[("json", &line, Encoding::ByName)]);
                let is_last = nth + 1 == count && shard % 2 == 0;
                text.extend(if is_last { &b""[..] } else { [&b"\n"[..], b"\r\n", b"\n \t\n\n"][nth % 3] });
            }
            self.objects.push((format!("{shard}.jsonl"), text));
        }
        (Format::Lines, "?.jsonl")
    }

    fn files(&mut self) -> (Format, &'static str) {
        for (shard, &count) in self.counts.iter().enumerate() {
            for nth in 0..count {
                let (key, text) = (format!("class {shard}/s{nth:03}"), letters(self.size + nth % 5, nth));
                self.add(&key, &[("seg.png", &text, Encoding::ByName)]);
                self.objects.push((format!("{key}.seg.PNG"), text));
            }
        }
        (Format::Files, "**/*.PNG")
    }
}

/// A file of an archive.
pub fn file(archive: &mut Vec<u8>, name: &str, content: &[u8]) {
    let mut block = [0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
    block[148..156].fill(b' ');
    block[156] = b'0';
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    archive.extend(block);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(512), 0);
}
