//! The container of one tensor: the zip archive that `torch.save(tensor)` writes.
//!
//! An item is `prefix | payload | suffix`, and the payload is the tensor's own memory: [`Frame`] makes the
//! two ends without seeing a payload byte, [`parse()`] finds the payload of an item that stock torch wrote.
//! Nothing here does I/O, copies a payload, or executes a pickle.
//!
//! Sizes, offsets and shapes are `u64`; shape, strides and storage offset count elements, all else bytes.

mod frame;
mod parse;
mod pickle;

pub use frame::{Frame, Placement};
pub use parse::{ParsedItem, Step, Window, parse};

/// What data.pkl says of one tensor. Its storage is the payload, from storage offset 0; it never requires grad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec<'a> {
    /// Torch's name of the dtype without `torch.`, such as `float32`.
    pub dtype: &'a str,
    /// Elements in each dim; empty for a scalar tensor.
    pub shape: &'a [u64],
    /// Elements between neighbours, one for each dim.
    pub strides: &'a [u64],
    /// The whole dense span of memory that shape and strides reach, in bytes; a multiple of the item size.
    pub payload_bytes: u64,
}

/// Why an item was not written or not read here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// The dtype is none that torch.save stores in a plain tensor.
    #[error("unknown dtype {0:?}: expected a torch name such as \"float32\"")]
    UnknownDtype(String),
    /// The caller described a tensor or a place that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// Perhaps a good file, but not one plain little-endian tensor: `torch.load(weights_only=True)` may read it.
    #[error("not a plain tensor as torch.save writes it: {0}")]
    Unrecognised(String),
    /// The item contradicts itself.
    #[error("damaged tensor item: {0}")]
    Damaged(String),
}

/// Bytes of one element of the dtype with this torch name; `None` for a dtype that cannot be framed.
pub fn dtype_bytes(name: &str) -> Option<u64> {
    dtype(name).map(|row| row.bytes)
}

/// How torch.save stores a dtype.
#[derive(Debug, PartialEq, Eq)]
struct Dtype {
    name: &'static str,
    bytes: u64,
    /// The legacy class in module `torch` that carries the dtype; without one, data.pkl names the dtype itself.
    storage: Option<&'static str>,
}

const fn legacy(name: &'static str, bytes: u64, storage: &'static str) -> Dtype {
    Dtype { name, bytes, storage: Some(storage) }
}

const fn untyped(name: &'static str, bytes: u64) -> Dtype {
    Dtype { name, bytes, storage: None }
}

/// `_dtype_to_storage_type_map` and `_new_dtypes` of torch/storage.py (2.15), without the quantized dtypes,
/// whose tensors need a quantizer, and the sub-byte integers, which torch.save refuses.
const DTYPES: [Dtype; 28] = [
    legacy("float64", 8, "DoubleStorage"),
    legacy("float32", 4, "FloatStorage"),
    legacy("float16", 2, "HalfStorage"),
    legacy("bfloat16", 2, "BFloat16Storage"),
    legacy("int64", 8, "LongStorage"),
    legacy("int32", 4, "IntStorage"),
    legacy("int16", 2, "ShortStorage"),
    legacy("int8", 1, "CharStorage"),
    legacy("uint8", 1, "ByteStorage"),
    legacy("bool", 1, "BoolStorage"),
    legacy("complex128", 16, "ComplexDoubleStorage"),
    legacy("complex64", 8, "ComplexFloatStorage"),
    untyped("float8_e5m2", 1),
    untyped("float8_e4m3fn", 1),
    untyped("float8_e5m2fnuz", 1),
    untyped("float8_e4m3fnuz", 1),
    untyped("float8_e8m0fnu", 1),
    untyped("float4_e2m1fn_x2", 1),
    untyped("bits8", 1),
    untyped("bits16", 2),
    untyped("bits1x8", 1),
    untyped("bits2x4", 1),
    untyped("bits4x2", 1),
    untyped("complex32", 4),
    untyped("bcomplex32", 4),
    untyped("uint16", 2),
    untyped("uint32", 4),
    untyped("uint64", 8),
];

fn dtype(name: &str) -> Option<&'static Dtype> {
    DTYPES.iter().find(|row| row.name == name)
}

/// Longest data.pkl that is written or read: one tensor of dozens of dims takes under 1 KiB, and a bound keeps
/// a lying size from costing memory.
const PICKLE_LIMIT_BYTES: u64 = 64 << 10;

/// Signatures and fixed lengths of APPNOTE.TXT, the zip specification.
mod zip {
    pub const LOCAL: &[u8; 4] = b"PK\x03\x04";
    pub const DESCRIPTOR: &[u8; 4] = b"PK\x07\x08";
    pub const CENTRAL: &[u8; 4] = b"PK\x01\x02";
    pub const END: &[u8; 4] = b"PK\x05\x06";
    pub const END64: &[u8; 4] = b"PK\x06\x06";
    pub const LOCATOR64: &[u8; 4] = b"PK\x06\x07";

    pub const LOCAL_BYTES: u64 = 30;
    pub const CENTRAL_BYTES: u64 = 46;
    pub const END_BYTES: u64 = 22;
    pub const END64_BYTES: u64 = 56;
    pub const LOCATOR64_BYTES: u64 = 20;

    /// Sizes follow the data, in a descriptor.
    pub const FLAG_DESCRIPTOR: u16 = 0x0008;
    /// Names are UTF-8.
    pub const FLAG_UTF8: u16 = 0x0800;
    /// Id of the extra field with 64-bit sizes and offsets.
    pub const EXTRA64: u16 = 0x0001;
    /// In a 32-bit field: the value stands in the 64-bit one.
    pub const SEE64: u64 = 0xFFFF_FFFF;
}

/// Elements of storage that a tensor reaches from its first one, 0 for a tensor without elements; `None` when
/// shape and strides differ in length, or a count does not fit torch's signed 64 bits.
pub(crate) fn span(shape: &[u64], strides: &[u64]) -> Option<u64> {
    if shape.len() != strides.len() {
        return None;
    }
    let fits = |count: u64| i64::try_from(count).is_ok().then_some(count);
    if !shape.iter().chain(strides).all(|count| fits(*count).is_some()) {
        return None;
    }
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |elements, dim| elements.checked_mul(*dim).and_then(fits))?;
    shape.iter().zip(strides).try_fold(1u64, |reach, (dim, stride)| {
        (dim - 1).checked_mul(*stride).and_then(|step| step.checked_add(reach)).and_then(fits)
    })
}

#[cfg(test)]
mod tests;
