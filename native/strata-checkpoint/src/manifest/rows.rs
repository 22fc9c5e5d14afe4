//! The rows of one group of items, each checked before it is handed out. Everything read from a file is distrusted.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::digest::BlockDigest;
use strata_proto::v1::ItemGroup;

use super::columns::{Cursor, Fault, FrontDecoder, same_length};
use crate::encoding::{Encoding, XorBase};
use crate::item::{Item, Kind, num_blocks};

const DIGEST_BYTES: usize = 20;
/// Of one block of an encoded row: the frame's length and XXH3-128; and the XXH3-128 of the base's block.
const FRAME_BYTES: usize = 4 + XXH3_BYTES;
const XXH3_BYTES: usize = 16;
/// torch stops at 64 dims; more is an attack on our memory, not a tensor.
const MAX_DIMS: usize = 64;

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
    let mut rows = Rows::new(group, digests, inline.len(), num_objects)?;
    let mut items = Vec::with_capacity(group.kind.len());
    while let Some(row) = rows.advance()? {
        items.push(row.item(inline, shared));
    }
    Ok(items)
}

/// What lies where in an item, and what it is to mean.
pub(crate) struct Extent<'a> {
    pub kind: Kind,
    pub dtype: &'a str,
    pub shape: &'a [u64],
    pub strides: &'a [u64],
    pub item_offset: u64,
    pub item_bytes: u64,
    pub payload_skip: u64,
    pub payload_bytes: u64,
    /// What the frames of an encoded payload take.
    pub encoded_bytes: Option<u64>,
}

impl<'a> From<&'a Item> for Extent<'a> {
    fn from(item: &'a Item) -> Self {
        Self {
            kind: item.kind,
            dtype: &item.dtype,
            shape: &item.shape,
            strides: &item.strides,
            item_offset: item.item_offset,
            item_bytes: item.item_bytes,
            payload_skip: item.payload_skip,
            payload_bytes: item.payload_bytes,
            encoded_bytes: item.encoding.as_ref().map(|encoding| encoding.stored_bytes()),
        }
    }
}

impl Extent<'_> {
    /// Checks that payload and geometry stay within the item, so that later arithmetic cannot overflow.
    pub fn check(&self) -> Result<(), Fault> {
        let item_end = self.item_offset.checked_add(self.item_bytes).ok_or("the item's end overflows")?;
        let stored_bytes = self.encoded_bytes.unwrap_or(self.payload_bytes);
        let payload_end = self.payload_skip.checked_add(stored_bytes).ok_or("the payload's end overflows")?;
        if payload_end > self.item_bytes || item_end > i64::MAX as u64 {
            return Err(format!("the payload ends at {payload_end} of an item of {} bytes", self.item_bytes));
        }
        if self.kind != Kind::Tensor {
            return Ok(());
        }
        if crate::geometry::overlaps(self.shape, self.strides) {
            return Err(format!("elements of shape {:?} with strides {:?} overlap", self.shape, self.strides));
        }
        let itemsize =
            crate::container::dtype_bytes(self.dtype).ok_or_else(|| format!("unknown dtype {:?}", self.dtype))?;
        let needed = crate::container::span(self.shape, self.strides)
            .and_then(|elements| elements.checked_mul(itemsize))
            .ok_or("shape and strides overflow")?;
        if needed != self.payload_bytes {
            return Err(format!("shape and strides span {needed} bytes, the payload has {}", self.payload_bytes));
        }
        Ok(())
    }
}

/// One item where it lies in its group's columns.
pub(super) struct Row<'a> {
    pub fqn: &'a [u8],
    pub offsets: Option<&'a [u64]>,
    pub index: Option<u32>,
    pub object: u32,
    pub extent: Extent<'a>,
    digests: &'a [u8],
    inline: Option<Range<usize>>,
    pub encoding: Option<Arc<Encoding>>,
}

impl Row<'_> {
    /// A value of its own; `inline` is what the group's rows carry inline.
    pub fn item(&self, inline: &Bytes, shared: &mut Shared) -> Item {
        let Extent { kind, dtype, shape, strides, item_offset, item_bytes, payload_skip, payload_bytes, .. } =
            self.extent;
        Item {
            fqn: shared.names.of(self.fqn),
            offsets: self.offsets.map(|offsets| shared.dims.of(offsets)),
            index: self.index,
            kind,
            dtype: shared.words.of(dtype),
            shape: shared.dims.of(shape),
            strides: shared.dims.of(strides),
            object: self.object,
            item_offset,
            item_bytes,
            payload_skip,
            payload_bytes,
            digests: self.digests.chunks_exact(DIGEST_BYTES).map(read_digest).collect(),
            inline: self.inline.clone().map(|range| Box::new(inline.slice(range))),
            whole_crc32: None,
            encoding: self.encoding.clone(),
        }
    }
}

/// Goes through a group.
pub(super) struct Rows<'a> {
    group: &'a ItemGroup,
    digests: &'a [u8],
    inline_bytes: usize,
    num_objects: usize,
    names: FrontDecoder<'a>,
    shapes: Cursor<'a, u64>,
    strides: Cursor<'a, u64>,
    offsets: Cursor<'a, u64>,
    frames: Cursor<'a, u8>,
    base_objects: Cursor<'a, u32>,
    base_offsets: Cursor<'a, u64>,
    row: usize,
    inline_at: usize,
}

impl<'a> Rows<'a> {
    /// At the first row.
    ///
    /// # Errors
    /// Columns of different lengths.
    pub fn new(
        group: &'a ItemGroup,
        digests: &'a [u8],
        inline_bytes: usize,
        num_objects: usize,
    ) -> Result<Self, Fault> {
        same_length(
            group.kind.len(),
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
        Ok(Self {
            group,
            digests,
            inline_bytes,
            num_objects,
            names: FrontDecoder::new(&group.fqn_bytes),
            shapes: Cursor::new(&group.shape, "shape"),
            strides: Cursor::new(&group.strides, "strides"),
            offsets: Cursor::new(&group.offsets, "offsets"),
            frames: Cursor::new(&group.frames, "frames"),
            base_objects: Cursor::new(&group.base_object, "base_object"),
            base_offsets: Cursor::new(&group.base_offset, "base_offset"),
            row: 0,
            inline_at: 0,
        })
    }

    /// The next row; None behind the last, if nothing is left over.
    ///
    /// # Errors
    /// What does not fit together.
    pub fn advance(&mut self) -> Result<Option<Row<'_>>, Fault> {
        let (group, row) = (self.group, self.row);
        if row == group.kind.len() {
            return self.end().map(|()| None);
        }
        self.row += 1;
        if group.object[row] as usize >= self.num_objects {
            return Err(format!("row {row} points to object {} of {}", group.object[row], self.num_objects));
        }
        let payload_bytes = group.payload_bytes[row];
        let digests = self.digests_of(payload_bytes)?;
        let inline = self.inline_of(row, payload_bytes)?;
        let [offsets, shape, strides] = self.dims_of(row)?;
        let encoding = self.encoding_of(row, payload_bytes)?;
        let extent = Extent {
            kind: Kind::from_code(group.kind[row]).ok_or_else(|| format!("row {row} has kind {}", group.kind[row]))?,
            dtype: group.dtypes.get(group.dtype[row] as usize).ok_or("a dtype is not in the dictionary")?,
            shape: shape.unwrap_or_default(),
            strides: strides.unwrap_or_default(),
            item_offset: group.item_offset[row],
            item_bytes: group.item_bytes[row],
            payload_skip: group.payload_skip[row],
            payload_bytes,
            encoded_bytes: encoding.as_ref().map(|encoding| encoding.stored_bytes()),
        };
        let is_in_frames_alone = |bytes| extent.payload_skip == 0 && extent.item_bytes == bytes;
        let is_plain_tensor = extent.kind == Kind::Tensor && inline.is_none();
        if extent.encoded_bytes.is_some_and(|bytes| !is_in_frames_alone(bytes) || !is_plain_tensor) {
            return Err(format!("row {row} is encoded, and no tensor that is stored in frames alone"));
        }
        extent.check().map_err(|fault| format!("row {row}: {fault}"))?;
        let fqn = self.names.next(group.fqn_shared[row], group.fqn_rest[row])?;
        let (index, object) = (group.index_plus_one[row].checked_sub(1), group.object[row]);
        Ok(Some(Row { fqn, offsets, index, object, extent, digests, inline, encoding }))
    }

    fn digests_of(&mut self, payload_bytes: u64) -> Result<&'a [u8], Fault> {
        let length = (num_blocks(payload_bytes) as usize).checked_mul(DIGEST_BYTES);
        let cut = length.and_then(|length| self.digests.split_at_checked(length));
        let (digests, left) = cut.ok_or("the digests end early")?;
        self.digests = left;
        Ok(digests)
    }

    fn inline_of(&mut self, row: usize, payload_bytes: u64) -> Result<Option<Range<usize>>, Fault> {
        let Some(length) = self.group.inline_plus_one[row].checked_sub(1) else { return Ok(None) };
        if u64::from(length) != payload_bytes {
            return Err(format!("row {row} has {length} inline bytes for a payload of {payload_bytes}"));
        }
        let range = self.inline_at..self.inline_at + length as usize;
        if range.end > self.inline_bytes {
            return Err("the inline payloads end early".into());
        }
        self.inline_at = range.end;
        Ok(Some(range))
    }

    fn encoding_of(&mut self, row: usize, payload_bytes: u64) -> Result<Option<Arc<Encoding>>, Fault> {
        let Some(number) = self.group.encoding[row].checked_sub(1) else { return Ok(None) };
        let name = self.group.encodings.get(number as usize).map_or("?", String::as_str);
        let takes_base = Encoding::takes_base(name)
            .ok_or_else(|| format!("row {row} has the encoding {name:?}, which this reader does not know"))?;
        let entry_bytes = FRAME_BYTES + if takes_base { XXH3_BYTES } else { 0 };
        let length = (num_blocks(payload_bytes) as usize).checked_mul(entry_bytes).ok_or("the frames end early")?;
        let entries = self.frames.slice(length)?.chunks_exact(entry_bytes);
        let base = match takes_base {
            false => None,
            true => Some(XorBase {
                object: self.base_objects.slice(1)?[0],
                offset: self.base_offsets.slice(1)?[0],
                digests: entries.clone().map(|entry| read_xxh3(&entry[FRAME_BYTES..])).collect(),
            }),
        };
        if let Some(base) = base.as_ref().filter(|base| base.object as usize >= self.num_objects) {
            return Err(format!("row {row} has its base in object {} of {}", base.object, self.num_objects));
        }
        let frames = entries.map(|entry| {
            let bytes = u32::from_le_bytes(entry[..4].try_into().expect("4 bytes"));
            (bytes, read_xxh3(&entry[4..FRAME_BYTES]))
        });
        let encoding = Encoding::new(frames, base, payload_bytes).map_err(|fault| format!("row {row}: {fault}"))?;
        Ok(Some(Arc::new(encoding)))
    }

    /// Offsets, shape and strides, of a row that has a place in a tensor.
    fn dims_of(&mut self, row: usize) -> Result<[Option<&'a [u64]>; 3], Fault> {
        let Some(num_dims) = (self.group.num_dims_plus_one[row] as usize).checked_sub(1) else { return Ok([None; 3]) };
        if num_dims > MAX_DIMS {
            return Err(format!("row {row} has {num_dims} dims, at most {MAX_DIMS} are possible"));
        }
        let (offsets, shape) = (self.offsets.slice(num_dims)?, self.shapes.slice(num_dims)?);
        Ok([Some(offsets), Some(shape), Some(self.strides.slice(num_dims)?)])
    }

    fn end(&self) -> Result<(), Fault> {
        let left = [
            ("digests", self.digests.len()),
            ("inline payloads", self.inline_bytes - self.inline_at),
            ("frames", self.frames.left()),
        ];
        for (what, left) in left {
            if left > 0 {
                return Err(format!("{left} bytes of {what} belong to no row"));
            }
        }
        Ok(())
    }
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

fn read_xxh3(raw: &[u8]) -> u128 {
    u128::from_le_bytes(raw.try_into().expect("16 bytes"))
}

fn read_digest(raw: &[u8]) -> BlockDigest {
    let (crc32, xxh3) = raw.split_at(4);
    BlockDigest { crc32: u32::from_le_bytes(crc32.try_into().expect("4 bytes")), xxh3: read_xxh3(xxh3) }
}
