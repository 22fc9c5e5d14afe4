//! Writes the two ends of an item; the payload goes between them untouched.
//!
//! Everything small stands before the payload, so an item streams without back-patching. `version` therefore
//! comes earlier than in stock's order, and `.data/serialization_id`, which hashes the payload, is left out:
//! torch only logs it.

use strata_io::digest::crc32;

use super::{ContainerError, PICKLE_LIMIT_BYTES, TensorSpec, dtype, pickle, span, zip};

/// Stock starts every record's data at a multiple of this from the start of the item.
const RECORD_ALIGN: u64 = 64;

/// The payload's record; the prefix ends with its local header.
const PAYLOAD_NAME: &str = "archive/data/0";

const PICKLE_NAME: &str = "archive/data.pkl";

/// The records that are the same in every item, in stock's order but for `version`, which stock puts after the
/// payload. The alignment is the one stock promises, whatever larger one the payload has.
const FIXED: [(&str, &[u8]); 4] = [
    ("archive/.format_version", b"1"),
    ("archive/.storage_alignment", b"64"),
    ("archive/byteorder", b"little"),
    ("archive/version", b"3\n"),
];

/// Where in its file an item starts and its payload shall stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Offset of the item's first byte in the file.
    pub item_offset: u64,
    /// A power of two from 64 to 32768: what the payload's offset in the file is counted modulo.
    pub align: u64,
    /// The wanted payload offset in the file, modulo `align`: a multiple of 64 below it.
    pub residue: u64,
}

/// The two ends of one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    prefix: Vec<u8>,
    /// Offset of the payload's local header in the prefix.
    payload_header: u32,
    /// Offset in the item, CRC and length of data.pkl and of each of `FIXED`.
    small: [Small; 1 + FIXED.len()],
    payload_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Small {
    header: u32,
    crc32: u32,
    bytes: u32,
}

impl Frame {
    /// Frames a tensor, before any byte of it is read.
    ///
    /// # Errors
    /// `UnknownDtype`; `Invalid` when shape, strides and payload length contradict each other or the placement
    /// is not one.
    pub fn new(spec: &TensorSpec<'_>, place: Placement) -> Result<Self, ContainerError> {
        check(spec, place)?;
        let data_pkl = pickle::write(spec)?;
        if data_pkl.len() as u64 > PICKLE_LIMIT_BYTES {
            return Err(ContainerError::Invalid(format!("a tensor of {} dims cannot be framed", spec.shape.len())));
        }
        // Stock's archive of a tensor is 700 bytes long up to its payload; `version` adds one record.
        let mut prefix = Vec::with_capacity(1024 + data_pkl.len() + place.align as usize);
        let first = add_small(&mut prefix, PICKLE_NAME, &data_pkl);
        let [second, third, fourth, fifth] = FIXED.map(|(name, data)| add_small(&mut prefix, name, data));
        let payload_header = prefix.len() as u32;
        let target = Target { base: place.item_offset % place.align, align: place.align, residue: place.residue };
        add_local_header(&mut prefix, PAYLOAD_NAME, spec.payload_bytes, target);
        let small = [first, second, third, fourth, fifth];
        Ok(Self { prefix, payload_header, small, payload_bytes: spec.payload_bytes })
    }

    /// Everything before the payload.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Everything after the payload, `suffix_bytes()` long. `payload_crc32` is CRC-32/ISO-HDLC of the payload.
    pub fn suffix(&self, payload_crc32: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.suffix_bytes() as usize);
        add_descriptor(&mut out, payload_crc32, self.payload_bytes);
        let central_offset = self.prefix.len() as u64 + self.payload_bytes + out.len() as u64;
        let descriptor_bytes = out.len();
        let names = [PICKLE_NAME].into_iter().chain(FIXED.map(|(name, _)| name));
        for (name, small) in names.zip(self.small) {
            add_central(&mut out, name, small.header, small.crc32, u64::from(small.bytes));
        }
        add_central(&mut out, PAYLOAD_NAME, self.payload_header, payload_crc32, self.payload_bytes);
        let central_bytes = (out.len() - descriptor_bytes) as u64;
        add_end(&mut out, 2 + FIXED.len() as u16, central_offset, central_bytes);
        out
    }

    /// Length of the suffix, known before the CRC.
    pub fn suffix_bytes(&self) -> u64 {
        let names = FIXED.iter().map(|(name, _)| name.len()).sum::<usize>() + PICKLE_NAME.len() + PAYLOAD_NAME.len();
        let wide = if is_wide(self.payload_bytes) { 4 + 16 } else { 0 };
        descriptor_bytes(self.payload_bytes)
            + (2 + FIXED.len() as u64) * zip::CENTRAL_BYTES
            + names as u64
            + wide
            + zip::END64_BYTES
            + zip::LOCATOR64_BYTES
            + zip::END_BYTES
    }

    /// Length of the whole item: prefix, payload and suffix.
    pub fn item_bytes(&self) -> u64 {
        self.prefix.len() as u64 + self.payload_bytes + self.suffix_bytes()
    }
}

fn check(spec: &TensorSpec<'_>, place: Placement) -> Result<(), ContainerError> {
    let Placement { align, residue, item_offset } = place;
    if !(align.is_power_of_two() && (64..=32_768).contains(&align)) || residue >= align || !residue.is_multiple_of(64) {
        return Err(ContainerError::Invalid(format!("a payload cannot stand at {residue} modulo {align}")));
    }
    let row = dtype(spec.dtype).ok_or_else(|| ContainerError::UnknownDtype(spec.dtype.to_owned()))?;
    let needed = span(spec.shape, spec.strides).and_then(|elements| elements.checked_mul(row.bytes));
    let held = spec.payload_bytes;
    // Torch counts storage in signed 64 bits, and the ends must not push the item past them.
    let ends_too_far = item_offset.checked_add(held).is_none_or(|end| end > i64::MAX as u64 - (1 << 20));
    if needed.is_none_or(|needed| needed > held) || !held.is_multiple_of(row.bytes) || ends_too_far {
        let TensorSpec { dtype, shape, strides, .. } = spec;
        return Err(ContainerError::Invalid(format!(
            "{held} bytes at {item_offset} do not hold a {dtype} tensor of shape {shape:?}, strides {strides:?}"
        )));
    }
    Ok(())
}

/// Where the data of a record shall start: `(base + offset in the item) % align == residue`.
#[derive(Clone, Copy)]
struct Target {
    base: u64,
    align: u64,
    residue: u64,
}

fn add_small(prefix: &mut Vec<u8>, name: &str, data: &[u8]) -> Small {
    let small = Small { header: prefix.len() as u32, crc32: crc32(data), bytes: data.len() as u32 };
    add_local_header(prefix, name, data.len() as u64, Target { base: 0, align: RECORD_ALIGN, residue: 0 });
    prefix.extend_from_slice(data);
    add_descriptor(prefix, small.crc32, data.len() as u64);
    small
}

/// The local header, padded by an extra field `FB` as stock does it. CRC and sizes stay 0 here: the descriptor
/// has them, and only that can know the CRC of a payload that was not read yet.
fn add_local_header(prefix: &mut Vec<u8>, name: &str, data_bytes: u64, target: Target) {
    let mut extra64 = Vec::new();
    if is_wide(data_bytes) {
        add_extra64(&mut extra64, data_bytes);
    }
    let unpadded = prefix.len() as u64 + zip::LOCAL_BYTES + (name.len() + extra64.len()) as u64 + 4;
    let beyond = (target.base + unpadded) % target.align;
    let padding = (target.residue + target.align - beyond) % target.align;

    prefix.extend_from_slice(zip::LOCAL);
    add_u16s(prefix, [0, flags(data_bytes), 0, 0, 0]);
    prefix.extend_from_slice(&[0; 12]);
    add_u16s(prefix, [name.len() as u16, extra64.len() as u16 + 4 + padding as u16]);
    prefix.extend_from_slice(name.as_bytes());
    prefix.extend_from_slice(&extra64);
    prefix.extend_from_slice(b"FB");
    add_u16s(prefix, [padding as u16]);
    prefix.resize(prefix.len() + padding as usize, b'Z');
}

fn add_descriptor(out: &mut Vec<u8>, crc32: u32, data_bytes: u64) {
    if data_bytes == 0 {
        return;
    }
    out.extend_from_slice(zip::DESCRIPTOR);
    out.extend_from_slice(&crc32.to_le_bytes());
    for _compressed_then_not in 0..2 {
        if is_wide(data_bytes) {
            out.extend_from_slice(&data_bytes.to_le_bytes());
        } else {
            out.extend_from_slice(&(data_bytes as u32).to_le_bytes());
        }
    }
}

fn descriptor_bytes(data_bytes: u64) -> u64 {
    match data_bytes {
        0 => 0,
        wide if is_wide(wide) => 24,
        _ => 16,
    }
}

/// `header` fits 32 bits because only the payload is large, and it comes last.
fn add_central(out: &mut Vec<u8>, name: &str, header: u32, crc32: u32, data_bytes: u64) {
    let mut extra64 = Vec::new();
    if is_wide(data_bytes) {
        add_extra64(&mut extra64, data_bytes);
    }
    out.extend_from_slice(zip::CENTRAL);
    add_u16s(out, [0, 0, flags(data_bytes), 0, 0, 0]);
    out.extend_from_slice(&crc32.to_le_bytes());
    for _compressed_then_not in 0..2 {
        out.extend_from_slice(&(data_bytes.min(zip::SEE64) as u32).to_le_bytes());
    }
    add_u16s(out, [name.len() as u16, extra64.len() as u16, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&header.to_le_bytes());
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&extra64);
}

/// The zip64 end record, its locator and the plain end record; stock writes all three whatever the size.
fn add_end(out: &mut Vec<u8>, records: u16, central_offset: u64, central_bytes: u64) {
    out.extend_from_slice(zip::END64);
    out.extend_from_slice(&(zip::END64_BYTES - 12).to_le_bytes());
    add_u16s(out, [0x031E, 45]); // made by Unix, needs zip 4.5: what miniz writes
    out.extend_from_slice(&[0; 8]);
    for value in [u64::from(records), u64::from(records), central_bytes, central_offset] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    out.extend_from_slice(zip::LOCATOR64);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(central_offset + central_bytes).to_le_bytes());
    out.extend_from_slice(&1u32.to_le_bytes());
    out.extend_from_slice(zip::END);
    add_u16s(out, [0, 0, records, records]);
    out.extend_from_slice(&(central_bytes as u32).to_le_bytes());
    out.extend_from_slice(&(central_offset.min(zip::SEE64) as u32).to_le_bytes());
    add_u16s(out, [0]);
}

fn add_extra64(out: &mut Vec<u8>, data_bytes: u64) {
    add_u16s(out, [zip::EXTRA64, 16]);
    out.extend_from_slice(&data_bytes.to_le_bytes());
    out.extend_from_slice(&data_bytes.to_le_bytes());
}

fn add_u16s<const N: usize>(out: &mut Vec<u8>, values: [u16; N]) {
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

fn flags(data_bytes: u64) -> u16 {
    if data_bytes == 0 { zip::FLAG_UTF8 } else { zip::FLAG_UTF8 | zip::FLAG_DESCRIPTOR }
}

/// Whether a length needs 64 bits in zip, whose 32-bit fields keep their largest value for a sign.
fn is_wide(data_bytes: u64) -> bool {
    data_bytes >= zip::SEE64
}
