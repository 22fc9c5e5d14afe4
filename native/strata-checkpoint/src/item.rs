//! What one checkpoint holds: items in objects, and what state_dict_metadata says of them.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::digest::{BLOCK_BYTES, BlockDigest};

use crate::container::dtype_bytes;
use crate::encoding::{Encoding, XorBase};
use crate::geometry::{self, StridedCopy};

/// How an item's payload is to be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A tensor's own memory, in a frame that torch.load reads.
    Tensor,
    /// Bytes of a pickled value, unframed.
    Bytes,
    /// A tensor as torch.save wrote it, unframed: subclasses, quantised and sparse tensors.
    TorchSave,
}

impl Kind {
    /// The number in files and at the Python boundary.
    pub fn code(self) -> u32 {
        match self {
            Self::Tensor => 0,
            Self::Bytes => 1,
            Self::TorchSave => 2,
        }
    }

    /// The kind with that number.
    pub fn from_code(code: u32) -> Option<Self> {
        [Self::Tensor, Self::Bytes, Self::TorchSave].into_iter().find(|kind| kind.code() == code)
    }
}

/// One number for each dim. Many items have the same: half a million of them fit into a hundred megabytes.
pub type Dims = Arc<[u64]>;

/// Digests of a payload's blocks. One block, as nearly all payloads have, takes no allocation of its own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Digests {
    /// Of a payload without bytes, or of stock items.
    #[default]
    None,
    /// CRC-32 and XXH3-128 of the only block.
    One(u32, [u8; 16]),
    /// Of several blocks.
    Many(Box<[BlockDigest]>),
}

impl Digests {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(..) => 1,
            Self::Many(digests) => digests.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Of one block, if there are so many.
    pub fn get(&self, block: usize) -> Option<BlockDigest> {
        match self {
            Self::One(crc32, xxh3) if block == 0 => {
                Some(BlockDigest { crc32: *crc32, xxh3: u128::from_le_bytes(*xxh3) })
            }
            Self::Many(digests) => digests.get(block).copied(),
            _ => None,
        }
    }

    /// Of each block in turn.
    pub fn iter(&self) -> impl Iterator<Item = BlockDigest> {
        (0..self.len()).filter_map(|block| self.get(block))
    }
}

impl FromIterator<BlockDigest> for Digests {
    fn from_iter<I: IntoIterator<Item = BlockDigest>>(digests: I) -> Self {
        let mut digests = digests.into_iter();
        match (digests.next(), digests.next()) {
            (None, _) => Self::None,
            (Some(only), None) => Self::One(only.crc32, only.xxh3.to_le_bytes()),
            (Some(first), Some(second)) => Self::Many([first, second].into_iter().chain(digests).collect()),
        }
    }
}

/// One tensor chunk or pickled value, and where it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Item {
    /// Name in the state_dict, as bytes: UTF-8 with lone surrogates let through.
    pub fqn: Arc<[u8]>,
    /// Of the chunk in the whole tensor, in elements; None for a pickled value.
    pub offsets: Option<Dims>,
    /// DCP's index hint.
    pub index: Option<u32>,
    /// What the payload is.
    pub kind: Kind,
    /// torch's name of the stored dtype, such as `float32`; empty for bytes.
    pub dtype: Arc<str>,
    /// Shape of what is stored, in elements.
    pub shape: Dims,
    /// Strides of what is stored, in elements.
    pub strides: Dims,
    /// Which of the checkpoint's objects.
    pub object: u32,
    /// The framed item inside the object, in bytes.
    pub item_offset: u64,
    /// Length of the framed item in bytes.
    pub item_bytes: u64,
    /// From the item's start to the payload's, in bytes.
    pub payload_skip: u64,
    /// Length of the payload in bytes.
    pub payload_bytes: u64,
    /// One for each [`BLOCK_BYTES`] of the payload, or none at all: stock items have none.
    pub digests: Digests,
    /// The payload itself, where it is small.
    pub inline: Option<Box<Bytes>>,
    /// CRC-32 of the whole payload, where only that is known: stock items.
    pub whole_crc32: Option<u32>,
    /// How the payload is stored, if not as it is; `payload_skip` is 0 then, and digests are of the payload.
    pub encoding: Option<Arc<Encoding>>,
}

impl Item {
    /// First byte of the payload in its object.
    pub fn payload_offset(&self) -> u64 {
        self.item_offset + self.payload_skip
    }

    /// Where `part` of block number `block`, a range of the payload, is in the object; of an encoded payload all of the
    /// block's frame.
    pub(crate) fn stored_range(&self, block: u64, part: &Range<u64>) -> Range<u64> {
        let (start, range) = match &self.encoding {
            None => (self.payload_offset(), part.clone()),
            Some(encoding) => (self.item_offset, encoding.frame_range(block)),
        };
        start + range.start..start + range.end
    }

    /// The same among other objects: `place` tells the number of each.
    pub(crate) fn moved(self, mut place: impl FnMut(u32) -> u32) -> Self {
        let object = place(self.object);
        Self { object, ..self.with_base(place) }
    }

    /// The same with its base, if it has one, among other objects.
    pub(crate) fn with_base(self, mut place: impl FnMut(u32) -> u32) -> Self {
        let encoding = self.encoding.map(|encoding| match &encoding.base {
            None => encoding,
            Some(base) => {
                let base = Some(XorBase { object: place(base.object), ..base.clone() });
                Arc::new(Encoding { base, frames: encoding.frames.clone() })
            }
        });
        Self { encoding, ..self }
    }

    /// Whether both are names of one payload.
    pub fn is_stored_as(&self, other: &Self) -> bool {
        let place =
            |item: &Self| (item.object, item.item_offset, item.item_bytes, item.payload_skip, item.payload_bytes);
        let kind = |item: &Self| (item.kind, item.dtype.clone());
        place(self) == place(other)
            && kind(self) == kind(other)
            && (&self.shape, &self.strides) == (&other.shape, &other.strides)
            && self.encoding == other.encoding
    }

    /// The copy of a box, in elements, to memory with these strides; of what is no tensor, all of it as it is.
    ///
    /// None if the box is not in what is stored.
    pub fn copy(&self, first: &[u64], lengths: &[u64], strides: &[i64]) -> Option<StridedCopy> {
        if self.kind != Kind::Tensor {
            return lengths.is_empty().then(|| StridedCopy::of_bytes(0..self.payload_bytes));
        }
        let dims = self.shape.len();
        let shaped = first.len() == dims && lengths.len() == dims && strides.len() == dims;
        let fits = |d: usize| first[d].checked_add(lengths[d]).is_some_and(|end| end <= self.shape[d]);
        let itemsize = dtype_bytes(&self.dtype).filter(|_| shaped && (0..dims).all(fits))?;
        let region = geometry::Box { source_strides: &self.strides, first, lengths, destination_strides: strides };
        Some(StridedCopy::new(region, itemsize))
    }

    /// The name for messages.
    pub fn name(&self) -> String {
        String::from_utf8_lossy(&self.fqn).into_owned()
    }
}

/// Number of digests that a payload has.
pub fn num_blocks(payload_bytes: u64) -> u64 {
    payload_bytes.div_ceil(BLOCK_BYTES)
}

/// What state_dict_metadata says of one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Name in the state_dict.
    pub fqn: Vec<u8>,
    /// None for a pickled value.
    pub tensor: Option<TensorEntry>,
}

/// torch's TensorStorageMetadata without the chunks, which the items tell.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// torch's name of the dtype in the properties.
    pub dtype: String,
    /// Shape of the whole tensor.
    pub size: Vec<u64>,
    /// Strides in the properties, if known.
    pub strides: Option<Vec<i64>>,
    /// torch's deprecated property.
    pub requires_grad: bool,
    /// torch's deprecated property.
    pub pin_memory: bool,
    /// Number of torch's `_MEM_FORMAT_ENCODING`.
    pub memory_format: u32,
    /// torch's name of the layout, such as `strided`.
    pub layout: String,
}

/// One object of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Name relative to the checkpoint.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Index into the manifest's references, if the object belongs to another checkpoint.
    pub reference: Option<u32>,
}

impl Object {
    /// Whether it belongs to the checkpoint that names it, and to no other.
    pub(crate) fn is_own(&self) -> bool {
        self.reference.is_none()
    }

    /// Its path from the checkpoint whose manifest has these `references`.
    pub(crate) fn path(&self, references: &[(String, String)]) -> String {
        match self.reference {
            None => self.name.clone(),
            Some(reference) => format!("../{}/{}", references[reference as usize].0, self.name),
        }
    }
}
