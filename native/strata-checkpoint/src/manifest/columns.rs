//! Items and entries as columns, and back. Everything read from a file is distrusted.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::digest::BlockDigest;
use strata_proto::v1::{ItemGroup, TensorGroup};

use crate::item::{Entry, Item, Kind, TensorEntry, num_blocks};

const DIGEST_BYTES: usize = 20;
/// torch stops at 64 dims; more is an attack on our memory, not a tensor.
const MAX_DIMS: usize = 64;
/// Names share prefixes, so that a small file could unfold to any size; no name of ours is longer.
const MAX_NAME_BYTES: usize = 1 << 20;

/// Why columns cannot be decoded.
pub type Fault = String;

/// One group's columns, digests and inline payloads.
pub fn encode_items(items: &[Item]) -> (ItemGroup, Vec<u8>, Vec<u8>) {
    let mut group = ItemGroup::default();
    let (mut digests, mut inline) = (Vec::new(), Vec::new());
    let mut names = FrontCoder::default();
    let mut dtypes = Dictionary::default();
    for item in items {
        let (shared, rest) = names.push(&item.fqn, &mut group.fqn_bytes);
        group.fqn_shared.push(shared);
        group.fqn_rest.push(rest);
        group.kind.push(item.kind.code());
        group.dtype.push(dtypes.code(&item.dtype));
        group.object.push(item.object);
        group.item_offset.push(item.item_offset);
        group.item_bytes.push(item.item_bytes);
        group.payload_skip.push(item.payload_skip);
        group.payload_bytes.push(item.payload_bytes);
        group.num_dims_plus_one.push(item.offsets.as_ref().map_or(0, |o| o.len() as u32 + 1));
        group.offsets.extend(item.offsets.iter().flat_map(|offsets| offsets.iter()));
        if item.offsets.is_some() {
            group.shape.extend(&*item.shape);
            group.strides.extend(&*item.strides);
        }
        group.index_plus_one.push(item.index.map_or(0, |i| i + 1));
        group.inline_plus_one.push(item.inline.as_ref().map_or(0, |b| b.len() as u32 + 1));
        group.encoding.push(0);
        inline.extend(item.inline.iter().flat_map(|bytes| bytes.iter()));
        for digest in item.digests.iter() {
            digests.extend(digest.crc32.to_le_bytes());
            digests.extend(digest.xxh3.to_le_bytes());
        }
    }
    group.dtypes = dtypes.words;
    (group, digests, inline)
}

/// The items of one group.
///
/// # Errors
/// What does not fit together, without the file's name.
pub fn decode_items(
    group: &ItemGroup,
    digests: &[u8],
    inline: &Bytes,
    num_objects: usize,
    shared: &mut Shared,
) -> Result<Vec<Item>, Fault> {
    let rows = group.kind.len();
    same_length(
        rows,
        &[
            ("fqn_shared", group.fqn_shared.len()),
            ("fqn_rest", group.fqn_rest.len()),
            ("dtype", group.dtype.len()),
            ("object", group.object.len()),
            ("item_offset", group.item_offset.len()),
            ("item_bytes", group.item_bytes.len()),
            ("payload_skip", group.payload_skip.len()),
            ("payload_bytes", group.payload_bytes.len()),
            ("num_dims_plus_one", group.num_dims_plus_one.len()),
            ("index_plus_one", group.index_plus_one.len()),
            ("inline_plus_one", group.inline_plus_one.len()),
            ("encoding", group.encoding.len()),
        ],
    )?;
    let dtypes: Vec<Arc<str>> = group.dtypes.iter().map(|word| shared.words.of(word.as_str())).collect();
    let mut names = FrontDecoder::new(&group.fqn_bytes);
    let mut dims = Cursor::new(&group.shape, "shape");
    let mut strides = Cursor::new(&group.strides, "strides");
    let mut offsets = Cursor::new(&group.offsets, "offsets");
    let (mut digest_at, mut inline_at) = (0usize, 0usize);
    let mut items = Vec::with_capacity(rows);
    for row in 0..rows {
        let fqn = names.next(group.fqn_shared[row], group.fqn_rest[row])?;
        let num_dims = group.num_dims_plus_one[row] as usize;
        if num_dims > MAX_DIMS + 1 {
            return Err(format!("row {row} has {} dims, at most {MAX_DIMS} are possible", num_dims - 1));
        }
        if let Some(encoding) = group.encoding[row].checked_sub(1) {
            let name = group.encodings.get(encoding as usize).map_or("?", String::as_str);
            return Err(format!("row {row} has the encoding {name:?}, which this reader does not know"));
        }
        if group.object[row] as usize >= num_objects {
            return Err(format!("row {row} points to object {} of {num_objects}", group.object[row]));
        }
        let payload_bytes = group.payload_bytes[row];
        let blocks = num_blocks(payload_bytes) as usize;
        let digest_end = blocks.checked_mul(DIGEST_BYTES).and_then(|n| n.checked_add(digest_at));
        let raw = digest_end.and_then(|end| digests.get(digest_at..end)).ok_or("the digests end early")?;
        digest_at += raw.len();
        let inline_bytes = match group.inline_plus_one[row].checked_sub(1) {
            None => None,
            Some(length) if u64::from(length) != payload_bytes => {
                return Err(format!("row {row} has {length} inline bytes for a payload of {payload_bytes}"));
            }
            Some(length) => {
                let end = inline_at + length as usize;
                if end > inline.len() {
                    return Err("the inline payloads end early".into());
                }
                let bytes = inline.slice(inline_at..end);
                inline_at = end;
                Some(Box::new(bytes))
            }
        };
        let placed = num_dims > 0;
        let item = Item {
            fqn: shared.names.of(fqn),
            offsets: placed.then(|| offsets.slice(num_dims - 1)).transpose()?.map(|dims| shared.dims.of(dims)),
            index: group.index_plus_one[row].checked_sub(1),
            kind: Kind::from_code(group.kind[row]).ok_or_else(|| format!("row {row} has kind {}", group.kind[row]))?,
            dtype: dtypes.get(group.dtype[row] as usize).cloned().ok_or("a dtype is not in the dictionary")?,
            shape: shared.dims.of(if placed { dims.slice(num_dims - 1)? } else { &[] }),
            strides: shared.dims.of(if placed { strides.slice(num_dims - 1)? } else { &[] }),
            object: group.object[row],
            item_offset: group.item_offset[row],
            item_bytes: group.item_bytes[row],
            payload_skip: group.payload_skip[row],
            payload_bytes,
            digests: raw.chunks_exact(DIGEST_BYTES).map(read_digest).collect(),
            inline: inline_bytes,
            whole_crc32: None,
        };
        check_extent(&item).map_err(|fault| format!("row {row}: {fault}"))?;
        items.push(item);
    }
    for (what, left) in [("digests", digests.len() - digest_at), ("inline payloads", inline.len() - inline_at)] {
        if left > 0 {
            return Err(format!("{left} bytes of {what} belong to no row"));
        }
    }
    Ok(items)
}

/// What items of several groups have in common.
#[derive(Default)]
pub struct Shared {
    names: Pool<u8>,
    dims: Pool<u64>,
    words: Words,
}

/// Equal slices, of which each is kept once.
#[derive(Default)]
struct Pool<T> {
    known: HashSet<Arc<[T]>>,
    last: Arc<[T]>,
}

impl<T: Clone + Eq + std::hash::Hash> Pool<T> {
    fn of(&mut self, value: &[T]) -> Arc<[T]> {
        // Chunks of one tensor stand one after the other.
        if *self.last != *value {
            self.last = match self.known.get(value) {
                Some(known) => known.clone(),
                None => {
                    let new: Arc<[T]> = Arc::from(value);
                    self.known.insert(new.clone());
                    new
                }
            };
        }
        self.last.clone()
    }
}

#[derive(Default)]
struct Words(HashSet<Arc<str>>);

impl Words {
    fn of(&mut self, word: &str) -> Arc<str> {
        if !self.0.contains(word) {
            self.0.insert(Arc::from(word));
        }
        self.0.get(word).expect("inserted").clone()
    }
}

/// Checks that payload and geometry stay within the item, so that later arithmetic cannot overflow.
pub(crate) fn check_extent(item: &Item) -> Result<(), Fault> {
    let item_end = item.item_offset.checked_add(item.item_bytes).ok_or("the item's end overflows")?;
    let payload_end = item.payload_skip.checked_add(item.payload_bytes).ok_or("the payload's end overflows")?;
    if payload_end > item.item_bytes || item_end > i64::MAX as u64 {
        return Err(format!("the payload ends at {payload_end} of an item of {} bytes", item.item_bytes));
    }
    if item.kind != Kind::Tensor {
        return Ok(());
    }
    if crate::geometry::overlaps(&item.shape, &item.strides) {
        return Err(format!("elements of shape {:?} with strides {:?} overlap", item.shape, item.strides));
    }
    let itemsize =
        crate::container::dtype_bytes(&item.dtype).ok_or_else(|| format!("unknown dtype {:?}", &*item.dtype))?;
    let needed = crate::container::span(&item.shape, &item.strides)
        .and_then(|elements| elements.checked_mul(itemsize))
        .ok_or("shape and strides overflow")?;
    if needed != item.payload_bytes {
        return Err(format!("shape and strides span {needed} bytes, the payload has {}", item.payload_bytes));
    }
    Ok(())
}

/// One group's columns; `entries` come with their position in the state_dict.
pub(super) fn encode_entries(entries: &[(u64, &Entry)]) -> TensorGroup {
    let mut group = TensorGroup::default();
    let mut names = FrontCoder::default();
    let (mut dtypes, mut layouts) = (Dictionary::default(), Dictionary::default());
    let none = TensorEntry {
        dtype: String::new(),
        size: Vec::new(),
        strides: None,
        requires_grad: false,
        pin_memory: false,
        memory_format: 0,
        layout: String::new(),
    };
    for (position, entry) in entries {
        let (shared, rest) = names.push(&entry.fqn, &mut group.fqn_bytes);
        let tensor = entry.tensor.as_ref().unwrap_or(&none);
        group.fqn_shared.push(shared);
        group.fqn_rest.push(rest);
        group.position.push(*position);
        group.is_tensor.push(entry.tensor.is_some() as u32);
        group.dtype.push(dtypes.code(&tensor.dtype));
        group.num_dims.push(tensor.size.len() as u32);
        group.size.extend(&tensor.size);
        group.has_strides.push(tensor.strides.is_some() as u32);
        group.strides.extend(tensor.strides.iter().flatten());
        group.flags.push(tensor.requires_grad as u32 | (tensor.pin_memory as u32) << 1);
        group.memory_format.push(tensor.memory_format);
        group.layout.push(layouts.code(&tensor.layout));
    }
    group.dtypes = dtypes.words;
    group.layouts = layouts.words;
    group
}

/// Entries of one group with their positions.
pub(super) fn decode_entries(group: &TensorGroup) -> Result<Vec<(u64, Entry)>, Fault> {
    let rows = group.is_tensor.len();
    same_length(
        rows,
        &[
            ("fqn_shared", group.fqn_shared.len()),
            ("fqn_rest", group.fqn_rest.len()),
            ("position", group.position.len()),
            ("dtype", group.dtype.len()),
            ("num_dims", group.num_dims.len()),
            ("has_strides", group.has_strides.len()),
            ("flags", group.flags.len()),
            ("memory_format", group.memory_format.len()),
            ("layout", group.layout.len()),
        ],
    )?;
    let mut names = FrontDecoder::new(&group.fqn_bytes);
    let mut sizes = Cursor::new(&group.size, "size");
    let mut strides = Cursor::new(&group.strides, "strides");
    let word = |words: &[String], code: u32| words.get(code as usize).cloned().ok_or("a word is not in its dictionary");
    (0..rows)
        .map(|row| {
            let fqn = names.next(group.fqn_shared[row], group.fqn_rest[row])?.to_vec();
            let num_dims = group.num_dims[row] as usize;
            let size = sizes.take(num_dims)?;
            let strides = (group.has_strides[row] != 0).then(|| strides.take(num_dims)).transpose()?;
            let tensor = TensorEntry {
                dtype: word(&group.dtypes, group.dtype[row])?,
                size,
                strides,
                requires_grad: group.flags[row] & 1 != 0,
                pin_memory: group.flags[row] & 2 != 0,
                memory_format: group.memory_format[row],
                layout: word(&group.layouts, group.layout[row])?,
            };
            let tensor = (group.is_tensor[row] != 0).then_some(tensor);
            Ok((group.position[row], Entry { fqn, tensor }))
        })
        .collect()
}

fn read_digest(raw: &[u8]) -> BlockDigest {
    let (crc32, xxh3) = raw.split_at(4);
    BlockDigest {
        crc32: u32::from_le_bytes(crc32.try_into().expect("4 bytes")),
        xxh3: u128::from_le_bytes(xxh3.try_into().expect("16 bytes")),
    }
}

fn same_length(rows: usize, columns: &[(&str, usize)]) -> Result<(), Fault> {
    match columns.iter().find(|(_, length)| *length != rows) {
        None => Ok(()),
        Some((name, length)) => Err(format!("column {name} has {length} values for {rows} rows")),
    }
}

/// Takes a few values at a time from a flattened column.
struct Cursor<'a, T> {
    left: &'a [T],
    name: &'static str,
}

impl<'a, T: Clone> Cursor<'a, T> {
    fn new(column: &'a [T], name: &'static str) -> Self {
        Self { left: column, name }
    }

    fn take(&mut self, count: usize) -> Result<Vec<T>, Fault> {
        Ok(self.slice(count)?.to_vec())
    }

    fn slice(&mut self, count: usize) -> Result<&'a [T], Fault> {
        let (head, tail) =
            self.left.split_at_checked(count).ok_or_else(|| format!("column {} ends early", self.name))?;
        self.left = tail;
        Ok(head)
    }
}

/// Distinct words in order of appearance.
#[derive(Default)]
struct Dictionary {
    words: Vec<String>,
}

impl Dictionary {
    fn code(&mut self, word: &str) -> u32 {
        // A checkpoint has a handful of dtypes and layouts: a scan beats a map.
        match self.words.iter().position(|known| known == word) {
            Some(code) => code as u32,
            None => {
                self.words.push(word.to_owned());
                self.words.len() as u32 - 1
            }
        }
    }
}

/// Sorted names as (bytes shared with the one before, the rest).
#[derive(Default)]
struct FrontCoder {
    before: Vec<u8>,
}

impl FrontCoder {
    fn push(&mut self, name: &[u8], bytes: &mut Vec<u8>) -> (u32, u32) {
        let shared = self.before.iter().zip(name).take_while(|(a, b)| a == b).count();
        bytes.extend(&name[shared..]);
        self.before.truncate(shared);
        self.before.extend_from_slice(&name[shared..]);
        (shared as u32, (name.len() - shared) as u32)
    }
}

struct FrontDecoder<'a> {
    before: Vec<u8>,
    left: &'a [u8],
}

impl<'a> FrontDecoder<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { before: Vec::new(), left: bytes }
    }

    fn next(&mut self, shared: u32, rest: u32) -> Result<&[u8], Fault> {
        let (head, tail) = self.left.split_at_checked(rest as usize).ok_or("the names end early")?;
        let kept = self.before.get(..shared as usize).ok_or("a name shares more than there is")?;
        if kept.len() + head.len() > MAX_NAME_BYTES {
            return Err(format!("a name is longer than {MAX_NAME_BYTES} bytes"));
        }
        self.before.truncate(shared as usize);
        self.before.extend_from_slice(head);
        self.left = tail;
        Ok(&self.before)
    }
}
