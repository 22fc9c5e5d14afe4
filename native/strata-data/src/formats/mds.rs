//! Shards of MosaicML's Streaming: an `index.json` that lists them, and in each the offsets of its samples. Pure: bytes
//! come in through [`ReadAt`].
//!
//! The layout is that of version 2 of <https://github.com/mosaicml/streaming> (`streaming/base/format/mds`), all
//! little-endian. A shard: number of samples (u32), where each begins and the last one ends (u32 each), a description
//! in JSON, samples. A sample: size of each column whose size is not fixed (u32), then the columns.

use std::sync::Arc;

use serde::Deserialize;
use strata_io::is_plain;

use super::compression::Compression;
use super::{Dtype, Encoding, Field, Fields, ReadAt, Result, damage};

/// A shard, as the index has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Name beside the index; may lie in a folder there.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// How many.
    pub num_samples: u64,
    /// What each sample has.
    pub columns: Arc<[Column]>,
    /// What is kept instead of it, as a rule; sizes and offsets are not of this one.
    pub zip: Option<Zip>,
}

/// A shard, compressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zip {
    /// Name beside the index; may lie in a folder there.
    pub name: String,
    /// As its name says.
    pub compression: Compression,
}

/// A field of each sample of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Of every value; None where each sample says it.
    size: Option<u64>,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Number(Dtype),
    /// What is None, each value says.
    Array(Option<Dtype>, Option<Vec<u64>>),
    /// Left as it is.
    Other(Arc<str>),
}

#[derive(Deserialize)]
struct RawIndex {
    version: u64,
    shards: Vec<RawShard>,
}

#[derive(Deserialize)]
struct RawShard {
    format: String,
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    column_sizes: Vec<Option<u64>>,
    raw_data: RawFile,
    zip_data: Option<RawZip>,
    samples: u64,
}

#[derive(Deserialize)]
struct RawFile {
    basename: String,
    bytes: u64,
}

#[derive(Deserialize)]
struct RawZip {
    basename: String,
}

/// The shards that an `index.json` lists.
///
/// # Errors
/// [`super::Fault::Damage`] for what is none, for shards of other formats or compressed in other ways than
/// [`Compression`], and for shards that lie elsewhere.
pub fn shards(index: &[u8]) -> Result<Vec<Shard>> {
    let raw: RawIndex = match serde_json::from_slice(index) {
        Ok(raw) => raw,
        Err(error) => return damage(offset(index, &error), &format!("no index of MDS shards: {error}")),
    };
    if raw.version != 2 {
        return damage(0, &format!("expected an index of version 2, found {}", raw.version));
    }
    let mut shards: Vec<Shard> = Vec::with_capacity(raw.shards.len());
    for raw in raw.shards {
        let name = raw.raw_data.basename;
        let refused = |what: &str| damage(0, &format!("{name:?} {what}"));
        if raw.format != "mds" {
            return refused(&format!("has the format {:?}, expected \"mds\"", raw.format));
        }
        let zip = match raw.zip_data {
            None => None,
            Some(RawZip { basename: name }) => match Compression::of_name(&name) {
                Some(compression) => Some(Zip { name, compression }),
                None => return refused(&format!("is compressed (as {name:?}), expected gzip or zstd")),
            },
        };
        let names = [&name].into_iter().chain(zip.as_ref().map(|zip| &zip.name));
        if !names.flat_map(|name| name.split('/')).all(is_plain) {
            return refused("leads elsewhere, expected a name beside the index");
        }
        let columns = match columns(&raw.column_names, &raw.column_encodings, &raw.column_sizes) {
            Ok(columns) => columns,
            Err(detail) => return refused(&detail),
        };
        // Shards have the same ones as a rule: kept once.
        let columns = match shards.last() {
            Some(last) if *last.columns == *columns => last.columns.clone(),
            _ => columns.into(),
        };
        shards.push(Shard { name, size_bytes: raw.raw_data.bytes, num_samples: raw.samples, columns, zip });
    }
    Ok(shards)
}

/// Where each sample of the shard begins, and where the last one ends. Reads no more than that.
///
/// # Errors
/// [`super::Fault::Damage`] for what is not what the index says, and for offsets that do not ascend to its end.
pub fn scan(source: &(impl ReadAt + ?Sized), shard: &Shard) -> Result<Vec<u64>> {
    let (size, num_samples) = (source.size(), shard.num_samples);
    if size != shard.size_bytes {
        return damage(size, &format!("expected {} bytes as index.json says, found {size}", shard.size_bytes));
    }
    let header_bytes = num_samples.saturating_add(2).saturating_mul(4);
    if header_bytes > size {
        return damage(0, &format!("expected {num_samples} samples as index.json says, found {size} bytes in all"));
    }
    let mut header = vec![0; header_bytes as usize];
    source.read_exact_at(0, &mut header)?;
    let mut numbers = header.as_chunks::<4>().0.iter().map(|number| u64::from(u32::from_le_bytes(*number)));
    let found = numbers.next().expect("8 bytes at least");
    if found != num_samples {
        return damage(0, &format!("expected {num_samples} samples as index.json says, found {found}"));
    }
    let bounds: Vec<u64> = numbers.collect();
    let mut last = header_bytes;
    for (nth, &bound) in bounds.iter().enumerate() {
        if bound < last || bound > size {
            let at = 4 + 4 * nth as u64;
            return damage(at, &format!("expected offset {nth} within {last}..={size}, found {bound}"));
        }
        last = bound;
    }
    if last != size {
        return damage(header_bytes - 4, &format!("expected the last sample to end at {size}, found {last}"));
    }
    Ok(bounds)
}

/// The fields of the sample whose bytes these are.
///
/// # Errors
/// [`super::Fault::Damage`] for columns that do not add up to it, and for arrays that are none.
pub fn fields(bytes: &[u8], columns: &[Column]) -> Result<Fields> {
    let num_varying = columns.iter().filter(|column| column.size.is_none()).count();
    let Some((sizes, _)) = bytes.split_at_checked(4 * num_varying) else {
        let (expected, found) = (4 * num_varying, bytes.len());
        return damage(0, &format!("expected {expected} bytes of sizes, found the end after {found}"));
    };
    let mut sizes = sizes.as_chunks::<4>().0.iter().map(|size| u64::from(u32::from_le_bytes(*size)));
    let (mut at, mut fields) = (4 * num_varying as u64, Vec::with_capacity(columns.len()));
    for column in columns {
        let size = column.size.unwrap_or_else(|| sizes.next().expect("one for each that varies"));
        let left = bytes.len() as u64 - at;
        if size > left {
            return damage(at, &format!("expected {size} bytes of {:?}, found {left}", column.name));
        }
        let value = &bytes[at as usize..(at + size) as usize];
        let (skipped, encoding) = match column.kind.read(value) {
            Ok(found) => found,
            Err(detail) => return damage(at, &format!("{:?} {detail}", column.name)),
        };
        fields.push(Field { name: column.name.clone(), data: at + skipped..at + size, encoding });
        at += size;
    }
    let left = bytes.len() as u64 - at;
    if left > 0 {
        damage(at, &format!("expected the sample to end, found {left} bytes"))
    } else {
        Ok(Fields { key: String::new(), fields })
    }
}

fn columns(names: &[String], encodings: &[String], sizes: &[Option<u64>]) -> Result<Vec<Column>, String> {
    if names.len() != encodings.len() || names.len() != sizes.len() {
        let (encodings, sizes) = (encodings.len(), sizes.len());
        return Err(format!("has {} columns, {encodings} encodings and {sizes} sizes", names.len()));
    }
    let mut columns: Vec<Column> = Vec::with_capacity(names.len());
    for ((name, encoding), &size) in names.iter().zip(encodings).zip(sizes) {
        if columns.iter().any(|column| column.name == *name) {
            return Err(format!("has the column {name:?} twice"));
        }
        let Some(kind) = Kind::of(encoding) else {
            return Err(format!("has the column {name:?} of {encoding:?}, which says no array"));
        };
        // Their own reader takes a size of zero for none.
        columns.push(Column { name: name.clone(), size: size.filter(|&size| size > 0), kind });
    }
    Ok(columns)
}

impl Kind {
    /// None for an array of something else than numbers.
    fn of(encoding: &str) -> Option<Self> {
        if encoding == "int" {
            return Some(Self::Number(Dtype::Int64));
        }
        if let Some(dtype) = Dtype::of(encoding) {
            return Some(Self::Number(dtype));
        }
        let (name, described) = encoding.split_once(':').unwrap_or((encoding, ""));
        if name != "ndarray" {
            return Some(Self::Other(encoding.into()));
        }
        let (dtype, shape) = described.split_once(':').map_or((described, None), |(dtype, shape)| (dtype, Some(shape)));
        let dtype = if described.is_empty() { None } else { Some(Dtype::of(dtype)?) };
        let axes = |shape: &str| shape.split(',').map(|axis| axis.parse().ok()).collect::<Option<Vec<u64>>>();
        let shape = if let Some(shape) = shape { Some(axes(shape)?) } else { None };
        Some(Self::Array(dtype, shape))
    }

    /// How many bytes before the value say what it is, and what they say.
    fn read(&self, value: &[u8]) -> Result<(u64, Encoding), String> {
        let (dtype, shape, rest) = match self {
            Self::Other(name) => return Ok((0, Encoding::Named(name.clone()))),
            Self::Number(dtype) => (*dtype, Vec::new(), value),
            Self::Array(dtype, shape) => {
                array(value, *dtype, shape.as_deref()).ok_or("does not begin as an array does")?
            }
        };
        let count = shape.iter().try_fold(1u64, |count, &axis| count.checked_mul(axis));
        let (expected, found) = (count.and_then(|count| count.checked_mul(dtype.num_bytes())), rest.len() as u64);
        if expected != Some(found) {
            return Err(format!("is {} of shape {shape:?}, found {found} bytes of it", dtype.name()));
        }
        Ok((value.len() as u64 - found, Encoding::Array { dtype, shape }))
    }
}

/// Kind and shape of an array, and its numbers. A kind that is not known before is the first byte; a shape, a byte with
/// the number of axes and, in its lowest two bits, the size of each length, and the lengths.
fn array<'a>(value: &'a [u8], dtype: Option<Dtype>, shape: Option<&[u64]>) -> Option<(Dtype, Vec<u64>, &'a [u8])> {
    let (dtype, value) = match dtype {
        Some(dtype) => (dtype, value),
        None => (dtype_of(*value.first()?)?, &value[1..]),
    };
    if let Some(shape) = shape {
        return Some((dtype, shape.to_vec(), value));
    }
    let (&axes, value) = value.split_first()?;
    let (num_axes, each) = (usize::from(axes >> 2), 1 << (axes & 3));
    let (lengths, rest) = value.split_at_checked(num_axes * each)?;
    let length = |bytes: &[u8]| bytes.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte));
    Some((dtype, lengths.chunks(each).map(length).collect(), rest))
}

/// The number of its bits, and in the lowest two what they are: unsigned, signed, a fraction.
fn dtype_of(code: u8) -> Option<Dtype> {
    Some(match code {
        8 => Dtype::Uint8,
        9 => Dtype::Int8,
        16 => Dtype::Uint16,
        17 => Dtype::Int16,
        18 => Dtype::Float16,
        32 => Dtype::Uint32,
        33 => Dtype::Int32,
        34 => Dtype::Float32,
        64 => Dtype::Uint64,
        65 => Dtype::Int64,
        66 => Dtype::Float64,
        _ => return None,
    })
}

/// Where in `text` the error is.
fn offset(text: &[u8], error: &serde_json::Error) -> u64 {
    let before = text.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1)).map(<[u8]>::len);
    (before.sum::<usize>() + error.column().saturating_sub(1)) as u64
}

#[cfg(test)]
mod tests {
    use super::super::Fault;
    use super::*;

    const COLUMNS: [(&str, &str, Option<u64>); 4] =
        [("id", "int", Some(8)), ("image", "jpeg", None), ("mask", "ndarray", None), ("text", "str", None)];

    fn index(columns: &[(&str, &str, Option<u64>)], name: &str, size_bytes: u64, num_samples: u64) -> String {
        let names: Vec<&str> = columns.iter().map(|column| column.0).collect();
        let encodings: Vec<&str> = columns.iter().map(|column| column.1).collect();
        let sizes: Vec<Option<u64>> = columns.iter().map(|column| column.2).collect();
        let shard = serde_json::json!({
            "version": 2, "format": "mds", "hashes": [], "compression": null, "size_limit": 67_108_864,
            "column_names": names, "column_encodings": encodings, "column_sizes": sizes, "samples": num_samples,
            "raw_data": {"basename": name, "bytes": size_bytes, "hashes": {}}, "zip_data": null,
        });
        serde_json::json!({"version": 2, "shards": [shard]}).to_string()
    }

    fn described(columns: &[(&str, &str, Option<u64>)]) -> Arc<[Column]> {
        shards(index(columns, "shard.00000.mds", 0, 0).as_bytes()).expect("sound").remove(0).columns
    }

    fn damage_of<T: std::fmt::Debug>(found: Result<T>) -> (u64, String) {
        match found {
            Err(Fault::Damage { at, detail }) => (at, detail),
            other => panic!("{other:?}"),
        }
    }

    fn sample(id: i64, image: &[u8], mask: &[u8], text: &str) -> Vec<u8> {
        let sizes = [image.len(), mask.len(), text.len()].map(|size| (size as u32).to_le_bytes()).concat();
        [&*sizes, &id.to_le_bytes(), image, mask, text.as_bytes()].concat()
    }

    /// uint16, of shape (2, 3).
    const MASK: [u8; 16] = [16, 2 << 2, 2, 3, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0];

    #[test]
    fn columns_of_a_sample_come_with_what_they_are() {
        let bytes = sample(-7, b"image", &MASK, "é");
        let found = fields(&bytes, &described(&COLUMNS)).expect("sound");
        let array = |dtype, shape| Encoding::Array { dtype, shape };
        let field = |name: &str, data, encoding| Field { name: name.to_owned(), data, encoding };
        let expected = [
            field("id", 12..20, array(Dtype::Int64, vec![])),
            field("image", 20..25, Encoding::Named("jpeg".into())),
            field("mask", 29..41, array(Dtype::Uint16, vec![2, 3])),
            field("text", 41..43, Encoding::Named("str".into())),
        ];
        assert_eq!(found.fields, expected);
    }

    #[test]
    fn arrays_say_as_much_as_their_column_does_not() {
        let read = |encoding: &str, size: Option<u64>, value: &[u8]| {
            let prefix = if size.is_none() { (value.len() as u32).to_le_bytes().to_vec() } else { Vec::new() };
            let found = fields(&[&*prefix, value].concat(), &described(&[("a", encoding, size)])).expect("sound");
            let Field { data, encoding, .. } = found.fields[0].clone();
            let Encoding::Array { dtype, shape } = encoding else { panic!("{encoding:?}") };
            (dtype, shape, data.end - data.start)
        };
        assert_eq!(read("ndarray:float32:2,1", Some(8), &[0; 8]), (Dtype::Float32, vec![2, 1], 8));
        assert_eq!(read("ndarray:int16", None, &[1 << 2, 3, 0, 0, 0, 0, 0, 0]), (Dtype::Int16, vec![3], 6));
        assert_eq!(
            read("ndarray", None, &[8, 1 << 2 | 1, 0, 1].iter().copied().chain([0; 256]).collect::<Vec<_>>()),
            (Dtype::Uint8, vec![256], 256)
        );
        let wide = [66, 2 << 2 | 3, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(read("ndarray", None, &wide), (Dtype::Float64, vec![1, 1], 8));
        assert_eq!(read("float16", Some(2), &[0; 2]), (Dtype::Float16, vec![], 2));
    }

    #[test]
    fn what_does_not_add_up_to_a_sample_is_refused_with_the_place() {
        let columns = described(&COLUMNS);
        let sound = sample(1, b"image", &MASK, "text");
        assert_eq!(damage_of(fields(&sound[..10], &columns)).0, 0);
        assert_eq!(damage_of(fields(&sound[..18], &columns)), (12, "expected 8 bytes of \"id\", found 6".to_owned()));
        assert_eq!(damage_of(fields(&sound[..sound.len() - 1], &columns)).0, 41);
        assert_eq!(damage_of(fields(&[&*sound, b"x"].concat(), &columns)).0, 45);
        let mut huge = sound.clone();
        huge[3] = 0xff;
        assert_eq!(damage_of(fields(&huge, &columns)).0, 20);
        for (at, with) in [(25, 15), (26, 63 << 2 | 3), (27, 3), (28, 0xff)] {
            let mut bytes = sound.clone();
            bytes[at] = with;
            assert_eq!(damage_of(fields(&bytes, &columns)).0, 25, "{at}");
        }
        let overflow = [65, 2 << 2 | 3, 0, 0, 0, 0, 0, 0, 0, 0x80, 4, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(damage_of(fields(&sample(1, b"", &overflow, ""), &columns)).0, 20);
    }

    #[test]
    fn what_is_no_index_of_plain_mds_shards_is_refused() {
        let sound = index(&COLUMNS, "shard.00000.mds", 9, 0);
        let refused = |from: &str, to: &str| {
            assert!(sound.contains(from), "{from}");
            damage_of(shards(sound.replace(from, to).as_bytes())).1
        };
        assert!(
            refused("\"zip_data\":null", "\"zip_data\":{\"basename\":\"s.mds.br\",\"bytes\":3}")
                .contains("\"s.mds.br\"), expected gzip or zstd")
        );
        assert!(refused("\"format\":\"mds\"", "\"format\":\"csv\"").contains("\"csv\""));
        assert!(refused("}],\"version\":2", "}],\"version\":3").contains("version 2, found 3"));
        assert!(refused("\"shard.00000.mds\"", "\"../other/shard.00000.mds\"").contains("leads elsewhere"));
        assert!(
            refused("\"zip_data\":null", "\"zip_data\":{\"basename\":\"../s.mds.gz\",\"bytes\":3}")
                .contains("leads elsewhere")
        );
        assert!(refused("\"ndarray\"", "\"ndarray:int7\"").contains("says no array"));
        assert!(refused("\"mask\"", "\"text\"").contains("twice"));
        assert!(refused("\"mask\",", "").contains("3 columns, 4 encodings and 4 sizes"));
        assert!(refused("\"samples\":0", "\"samples\":-1").contains("no index of MDS shards"));
        assert_eq!(damage_of(shards(b"{\n\"version\": !")).0, 13);
    }

    #[test]
    fn offsets_ascend_from_the_header_to_the_end() {
        let columns = described(&COLUMNS);
        let shard = |size_bytes, num_samples| Shard {
            name: String::new(),
            size_bytes,
            num_samples,
            columns: columns.clone(),
            zip: None,
        };
        let bytes = |numbers: &[u32]| -> Vec<u8> {
            let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            bytes.resize(30, b' ');
            bytes
        };
        let sound = bytes(&[2, 20, 25, 30]);
        assert_eq!(scan(&*sound, &shard(30, 2)).expect("sound"), [20, 25, 30]);
        assert_eq!(damage_of(scan(&*sound, &shard(31, 2))).0, 30);
        assert_eq!(damage_of(scan(&*sound, &shard(30, 3))).0, 0);
        assert_eq!(damage_of(scan(&*sound, &shard(30, u64::MAX))).0, 0);
        assert_eq!(damage_of(scan(&*bytes(&[2, 15, 25, 30]), &shard(30, 2))).0, 4);
        assert_eq!(damage_of(scan(&*bytes(&[2, 20, 31, 30]), &shard(30, 2))).0, 8);
        assert_eq!(damage_of(scan(&*bytes(&[2, 20, 25, 29]), &shard(30, 2))).0, 12);
        assert_eq!(scan(&*bytes(&[0, 30]), &shard(30, 0)).expect("sound"), [30]);
    }
}
