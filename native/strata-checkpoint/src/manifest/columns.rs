//! Items and entries as columns, and back. Everything read from a file is distrusted.

use strata_proto::v1::{ItemGroup, TensorGroup};

use crate::encoding::Encoding;
use crate::item::{Entry, Item, TensorEntry};

/// Names share prefixes, so that a small file could unfold to any size; no name of ours is longer.
const MAX_NAME_BYTES: usize = 1 << 20;

/// Why columns cannot be decoded.
pub type Fault = String;

/// One group's columns, digests and inline payloads.
pub fn encode_items(items: &[Item]) -> (ItemGroup, Vec<u8>, Vec<u8>) {
    let mut group = ItemGroup::default();
    let (mut digests, mut inline) = (Vec::new(), Vec::new());
    let mut names = FrontCoder::default();
    let (mut dtypes, mut encodings) = (Dictionary::default(), Dictionary::default());
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
        group.encoding.push(item.encoding.as_ref().map_or(0, |encoding| encodings.code(encoding.name()) + 1));
        if let Some(encoding) = &item.encoding {
            encode_encoding(encoding, &mut group);
        }
        inline.extend(item.inline.iter().flat_map(|bytes| bytes.iter()));
        for digest in item.digests.iter() {
            digests.extend(digest.crc32.to_le_bytes());
            digests.extend(digest.xxh3.to_le_bytes());
        }
    }
    group.dtypes = dtypes.words;
    group.encodings = encodings.words;
    (group, digests, inline)
}

fn encode_encoding(encoding: &Encoding, group: &mut ItemGroup) {
    let base = encoding.base.as_ref();
    for (block, frame) in encoding.frames.iter().enumerate() {
        group.frames.extend(frame.bytes.to_le_bytes());
        group.frames.extend(frame.xxh3.to_le_bytes());
        group.frames.extend(base.iter().flat_map(|base| base.digests[block].to_le_bytes()));
    }
    group.base_object.extend(base.map(|base| base.object));
    group.base_offset.extend(base.map(|base| base.offset));
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

pub(super) fn same_length(rows: usize, columns: &[(&str, usize)]) -> Result<(), Fault> {
    match columns.iter().find(|(_, length)| *length != rows) {
        None => Ok(()),
        Some((name, length)) => Err(format!("column {name} has {length} values for {rows} rows")),
    }
}

/// Takes a few values at a time from a flattened column.
pub(super) struct Cursor<'a, T> {
    left: &'a [T],
    name: &'static str,
}

impl<'a, T: Clone> Cursor<'a, T> {
    pub fn new(column: &'a [T], name: &'static str) -> Self {
        Self { left: column, name }
    }

    fn take(&mut self, count: usize) -> Result<Vec<T>, Fault> {
        Ok(self.slice(count)?.to_vec())
    }

    pub fn left(&self) -> usize {
        self.left.len()
    }

    pub fn slice(&mut self, count: usize) -> Result<&'a [T], Fault> {
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

pub(super) struct FrontDecoder<'a> {
    before: Vec<u8>,
    left: &'a [u8],
}

impl<'a> FrontDecoder<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { before: Vec::new(), left: bytes }
    }

    pub fn next(&mut self, shared: u32, rest: u32) -> Result<&[u8], Fault> {
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
