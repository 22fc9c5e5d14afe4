//! Finds the payload of an item that torch.save wrote, from a few windows onto it.
//!
//! [`parse()`] keeps nothing between calls: it looks at the windows it is given and either has the answer or names
//! the next range to read. Everything it believes, it has seen twice or bounded: the item may be hostile.

use std::ops::Range;

use strata_io::digest::crc32;

use super::{ContainerError, PICKLE_LIMIT_BYTES, pickle, span, zip};

/// An item up to this length is read whole at once: below it a second request costs more than the bytes.
const WHOLE_BYTES: u64 = 64 << 10;

/// Length of the tail read from a longer item. Stock's records behind the payload and the central directory take
/// about 1.2 KiB, a few hundred bytes more under a long archive name.
const TAIL_BYTES: u64 = 4 << 10;

/// A plain tensor has 7 records; other archives may have millions.
const MAX_RECORDS: u64 = 16;

/// Tail, directory, data.pkl, byteorder and the payload's header, each by itself at worst; then some.
const MAX_READS: usize = 8;

const EXTRA_LIMIT_BYTES: u64 = 0xFFFF;

/// Bytes of the item that the caller has read.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// Offset of `bytes[0]` in the item.
    pub start: u64,
    /// The bytes there.
    pub bytes: &'a [u8],
}

/// What [`parse()`] can say so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Read this range of the item, add it as one window to those given so far, and call again. Never empty,
    /// never longer than 256 KiB; a stock item needs one such range, or two when it is longer than 64 KiB, and no
    /// item more than eight.
    NeedRange(Range<u64>),
    /// The item is a plain tensor.
    Done(ParsedItem),
}

/// One plain tensor as stored. All of shape, strides, storage offset and dtype must be honoured to read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedItem {
    /// Torch's name without `torch.`, known to [`dtype_bytes`](super::dtype_bytes).
    pub dtype: String,
    /// Elements in each dim.
    pub shape: Vec<u64>,
    /// In elements; the elements they reach lie in the payload.
    pub strides: Vec<u64>,
    /// Elements of the payload before the tensor's first.
    pub storage_offset: u64,
    /// The storage's bytes, as a range of the item.
    pub payload: Range<u64>,
    /// CRC-32/ISO-HDLC of the payload; `None` when the file was written without CRCs, as torch can be set to do.
    pub crc32: Option<u32>,
}

/// Finds the payload in an item of `item_bytes` bytes, of which `have` is known.
///
/// # Errors
/// `Unrecognised` for what may be another kind of file, `Damaged` for what contradicts itself.
pub fn parse(item_bytes: u64, have: &[Window<'_>]) -> Result<Step, ContainerError> {
    match find(&View { item_bytes, have }) {
        Ok(item) => Ok(Step::Done(item)),
        // A reader that answers short would be asked for ever.
        Err(Stop::Need(range)) if have.len() >= MAX_READS => {
            Err(ContainerError::Damaged(format!("bytes {range:?} still missing after {MAX_READS} reads")))
        }
        Err(Stop::Need(range)) => Ok(Step::NeedRange(range)),
        Err(Stop::Failed(error)) => Err(error),
    }
}

/// Why the search ends before its answer.
enum Stop {
    Need(Range<u64>),
    Failed(ContainerError),
}

impl From<ContainerError> for Stop {
    fn from(error: ContainerError) -> Self {
        Self::Failed(error)
    }
}

fn damaged(what: impl Into<String>) -> Stop {
    Stop::Failed(ContainerError::Damaged(what.into()))
}

fn unrecognised(what: impl Into<String>) -> Stop {
    Stop::Failed(ContainerError::Unrecognised(what.into()))
}

fn find(view: &View<'_>) -> Result<ParsedItem, Stop> {
    let records = read_records(view)?;
    let found = classify(&records)?;
    // Asked for together: in a stock item these lie side by side before the payload.
    let wanted = [Some(found.pickle.span()), found.byteorder.map(Record::span), Some(found.payload.header_span())];
    view.require(wanted.into_iter().flatten().collect())?;

    if let Some(byteorder) = found.byteorder
        && view.get(byteorder.data(view)?)? != b"little"
    {
        return Err(unrecognised("its byte order is not little"));
    }
    let data_pkl = view.get(found.pickle.data(view)?)?;
    let (listed, computed) = (found.pickle.crc32, crc32(data_pkl));
    // set_crc32_options(False) leaves 0 in every record, and data.pkl is the one whose CRC can be told from that.
    let has_crcs = listed != 0 || computed == 0;
    if has_crcs && listed != computed {
        return Err(damaged(format!("checksum of data.pkl: expected {listed:#010x}, found {computed:#010x}")));
    }
    let tensor = pickle::read(data_pkl)?;
    let payload = found.payload.data(view)?;
    check_tensor(&tensor, found.payload, &payload)?;
    Ok(ParsedItem {
        dtype: tensor.dtype.name.to_owned(),
        shape: tensor.shape,
        strides: tensor.strides,
        storage_offset: tensor.storage_offset,
        payload,
        crc32: has_crcs.then_some(found.payload.crc32),
    })
}

fn check_tensor(tensor: &pickle::Pickled, record: &Record<'_>, payload: &Range<u64>) -> Result<(), Stop> {
    let held = payload.end - payload.start;
    if record.name.strip_prefix("data/") != Some(&tensor.storage_key) {
        return Err(damaged(format!("data.pkl names storage {:?}, stored is {:?}", tensor.storage_key, record.name)));
    }
    if tensor.storage_bytes != Some(held) {
        return Err(damaged(format!("storage is {held} bytes long, in data.pkl {:?}", tensor.storage_bytes)));
    }
    let reach = span(&tensor.shape, &tensor.strides).and_then(|elements| elements.checked_add(tensor.storage_offset));
    if reach.is_none_or(|reach| reach > held / tensor.dtype.bytes) {
        let pickle::Pickled { shape, strides, storage_offset, dtype, .. } = tensor;
        return Err(damaged(format!(
            "{held} bytes do not hold a {} tensor of shape {shape:?}, strides {strides:?}, storage offset {storage_offset}",
            dtype.name
        )));
    }
    Ok(())
}

/// The windows, as one item with holes.
struct View<'a> {
    item_bytes: u64,
    have: &'a [Window<'a>],
}

impl<'a> View<'a> {
    /// These bytes, which must lie in the item and in one window.
    fn get(&self, range: Range<u64>) -> Result<&'a [u8], Stop> {
        if range.start > range.end || range.end > self.item_bytes {
            return Err(damaged(format!("bytes {range:?} of an item of {}", self.item_bytes)));
        }
        self.have.iter().find_map(|window| window.get(&range)).ok_or(Stop::Need(range))
    }

    /// Asks for the first of these that is missing, joined with the missing ones next to it.
    fn require(&self, mut ranges: Vec<Range<u64>>) -> Result<(), Stop> {
        ranges.retain(|range| self.have.iter().all(|window| window.get(range).is_none()));
        ranges.sort_by_key(|range| range.start);
        let mut ranges = ranges.into_iter();
        let Some(mut first) = ranges.next() else { return Ok(()) };
        for next in ranges.take_while(|range| range.end.saturating_sub(first.start) <= 2 * TAIL_BYTES) {
            first.end = first.end.max(next.end);
        }
        Err(Stop::Need(first))
    }
}

impl<'a> Window<'a> {
    fn get(&self, range: &Range<u64>) -> Option<&'a [u8]> {
        let start = usize::try_from(range.start.checked_sub(self.start)?).ok()?;
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        self.bytes.get(start..)?.get(..len)
    }
}

/// One entry of the central directory, checked to lie in the item before the directory.
#[derive(Debug)]
struct Record<'a> {
    /// Below the archive's own folder.
    name: &'a str,
    full_name: &'a [u8],
    flags: u16,
    crc32: u32,
    bytes: u64,
    header: u64,
    /// Where the next local header or the central directory starts.
    next: u64,
}

impl Record<'_> {
    /// Everything of a small record that can matter, however it is padded.
    fn span(&self) -> Range<u64> {
        self.header..self.next.min(self.header_limit() + self.bytes)
    }

    /// The local header and what may be its extra field, without the data.
    fn header_span(&self) -> Range<u64> {
        self.header..(self.next - self.bytes).min(self.header_limit())
    }

    fn header_limit(&self) -> u64 {
        self.header + zip::LOCAL_BYTES + self.full_name.len() as u64 + EXTRA_LIMIT_BYTES
    }

    /// Where its data lies, by its own local header, which must agree with the directory.
    fn data(&self, view: &View<'_>) -> Result<Range<u64>, Stop> {
        let known = self.header_span();
        let name_at = self.header + zip::LOCAL_BYTES;
        if known.end < name_at + self.full_name.len() as u64 {
            return Err(damaged(format!("record {} does not fit before the next", self.name)));
        }
        let header = view.get(self.header..name_at)?;
        let name = view.get(name_at..name_at + self.full_name.len() as u64)?;
        let fields = Fields(header);
        let agrees = header.starts_with(zip::LOCAL)
            && (fields.u16(6), fields.u16(8)) == (self.flags, 0)
            && usize::from(fields.u16(26)) == name.len()
            && name == self.full_name;
        let start = name_at + name.len() as u64 + u64::from(fields.u16(28));
        if !agrees || start > self.next - self.bytes {
            return Err(damaged(format!("local header of {} at {}", self.name, self.header)));
        }
        Ok(start..start + self.bytes)
    }
}

/// The records of a plain tensor.
struct Found<'r> {
    pickle: &'r Record<'r>,
    byteorder: Option<&'r Record<'r>>,
    payload: &'r Record<'r>,
}

fn classify<'r>(records: &'r [Record<'r>]) -> Result<Found<'r>, Stop> {
    let (mut pickle, mut byteorder, mut payload, mut version) = (None, None, None, None);
    let (mut written_for, mut alignment, mut id) = (None, None, None);
    for record in records {
        let slot = match record.name {
            "data.pkl" => &mut pickle,
            "byteorder" => &mut byteorder,
            "version" => &mut version,
            ".format_version" => &mut written_for,
            ".storage_alignment" => &mut alignment,
            ".data/serialization_id" => &mut id,
            // One storage: a second is no plain tensor.
            name if is_storage(name) && payload.is_none_or(|first: &Record<'_>| first.name == name) => &mut payload,
            name => return Err(unrecognised(format!("it has a record {name:?}"))),
        };
        if slot.replace(record).is_some() {
            return Err(damaged(format!("two records are called {}", record.name)));
        }
    }
    let (Some(pickle), Some(payload), Some(_)) = (pickle, payload, version) else {
        return Err(unrecognised("data.pkl, data/0 or version is missing"));
    };
    let byteorder_limit = b"little".len() as u64;
    if pickle.bytes > PICKLE_LIMIT_BYTES || byteorder.is_some_and(|record| record.bytes > byteorder_limit) {
        return Err(unrecognised("data.pkl or byteorder is too long"));
    }
    Ok(Found { pickle, byteorder, payload })
}

/// `data/<number>`: new torch numbers storages from 0, old torch by their address.
fn is_storage(name: &str) -> bool {
    name.strip_prefix("data/").is_some_and(|key| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The central directory as the end records give it.
struct Directory {
    range: Range<u64>,
    records: u64,
}

fn read_records<'a>(view: &View<'a>) -> Result<Vec<Record<'a>>, Stop> {
    let directory = find_directory(view)?;
    let start = directory.range.start;
    let mut rest = view.get(directory.range)?;
    let mut records = Vec::with_capacity(directory.records as usize);
    for _ in 0..directory.records {
        records.push(take_record(&mut rest, start)?);
    }
    if !rest.is_empty() {
        return Err(damaged("the central directory is longer than its records"));
    }
    let archive = records.first().map(|first| archive_of(first.full_name));
    if records.iter().any(|record| Some(archive_of(record.full_name)) != archive) {
        return Err(unrecognised("its records lie in several folders"));
    }
    bound(&mut records, start)?;
    Ok(records)
}

fn find_directory(view: &View<'_>) -> Result<Directory, Stop> {
    let item_bytes = view.item_bytes;
    // The length comes from metadata that may lie as well; below this no sum of offsets overflows.
    if !(zip::END_BYTES..1 << 62).contains(&item_bytes) {
        return Err(unrecognised(format!("it is {item_bytes} bytes long")));
    }
    let end_at = item_bytes - zip::END_BYTES;
    let tail = if item_bytes <= WHOLE_BYTES { 0 } else { item_bytes - TAIL_BYTES };
    view.get(tail..item_bytes)?;
    let end = view.get(end_at..item_bytes)?;
    let fields = Fields(end);
    // Torch writes no comment; with one, the end would have to be guessed.
    if !end.starts_with(zip::END) || fields.u16(20) != 0 {
        return Err(unrecognised("it does not end as a zip archive"));
    }
    let short = [u64::from(fields.u16(10)), fields.u32(12).into(), fields.u32(16).into()];
    let (ends_at, [records, bytes, offset]) = match find_end64(view, end_at)? {
        Some((at, wide)) => {
            let agree = |(short, wide): (&u64, &u64)| short == wide || *short == zip::SEE64;
            if !short.iter().zip(&wide).all(agree) {
                return Err(damaged("its two end records differ"));
            }
            (at, wide)
        }
        None => (end_at, short),
    };
    if offset.checked_add(bytes) != Some(ends_at) {
        return Err(damaged(format!("central directory at {offset}, {bytes} bytes, must end at {ends_at}")));
    }
    if records > MAX_RECORDS || bytes > WHOLE_BYTES {
        return Err(unrecognised(format!("it has {records} records")));
    }
    Ok(Directory { range: offset..ends_at, records })
}

/// The zip64 end record, if there is one: its offset, and its records, directory bytes and directory offset.
fn find_end64(view: &View<'_>, end_at: u64) -> Result<Option<(u64, [u64; 3])>, Stop> {
    let Some(locator_at) = end_at.checked_sub(zip::LOCATOR64_BYTES) else {
        return Ok(None);
    };
    let locator = view.get(locator_at..end_at)?;
    if !locator.starts_with(zip::LOCATOR64) {
        return Ok(None);
    }
    let at = Fields(locator).u64(8);
    if at.checked_add(zip::END64_BYTES) != Some(locator_at) {
        return Err(damaged(format!("zip64 end record said to be at {at}")));
    }
    let end64 = view.get(at..locator_at)?;
    if !end64.starts_with(zip::END64) {
        return Err(damaged(format!("no zip64 end record at {at}")));
    }
    let fields = Fields(end64);
    Ok(Some((at, [fields.u64(32), fields.u64(40), fields.u64(48)])))
}

/// Takes one entry off the central directory, which starts at `directory`.
fn take_record<'a>(rest: &mut &'a [u8], directory: u64) -> Result<Record<'a>, Stop> {
    let truncated = || damaged("the central directory is cut short");
    let fixed = rest.split_off(..zip::CENTRAL_BYTES as usize).ok_or_else(truncated)?;
    let fields = Fields(fixed);
    let full_name = rest.split_off(..usize::from(fields.u16(28))).ok_or_else(truncated)?;
    let extra = rest.split_off(..usize::from(fields.u16(30))).ok_or_else(truncated)?;
    if !fixed.starts_with(zip::CENTRAL) {
        return Err(damaged("no entry where the central directory has one"));
    }
    let name = std::str::from_utf8(full_name).ok().and_then(|name| name.split_once('/')).map(|(_, name)| name);
    let Some(name) = name else {
        return Err(unrecognised("a record lies in no folder"));
    };
    let (flags, method) = (fields.u16(8), fields.u16(10));
    if flags & !(zip::FLAG_DESCRIPTOR | zip::FLAG_UTF8) != 0 || method != 0 || fields.u16(32) != 0 {
        return Err(unrecognised(format!("record {name} has flags {flags:#06x}, method {method}")));
    }
    let mut sizes = [fields.u32(24), fields.u32(20), fields.u32(42)].map(u64::from);
    widen(&mut sizes, extra).ok_or_else(|| damaged(format!("zip64 sizes of record {name}")))?;
    let [bytes, compressed, header] = sizes;
    if bytes != compressed || header.checked_add(bytes).is_none_or(|end| end > directory) {
        return Err(damaged(format!("record {name} at {header}: {bytes} bytes, stored as {compressed}")));
    }
    Ok(Record { name, full_name, flags, crc32: fields.u32(16), bytes, header, next: directory })
}

/// Puts the 64-bit values of the extra field where the short ones ask for them, in that order.
fn widen(sizes: &mut [u64; 3], mut extra: &[u8]) -> Option<()> {
    let mut values: &[u8] = &[];
    while !extra.is_empty() {
        let header = extra.split_off(..4)?;
        let body = extra.split_off(..usize::from(Fields(header).u16(2)))?;
        if Fields(header).u16(0) == zip::EXTRA64 {
            values = body;
        }
    }
    for size in sizes.iter_mut().filter(|size| **size == zip::SEE64) {
        *size = Fields(values.split_off(..8)?).u64(0);
    }
    Some(())
}

/// Tells each record where the next one starts, and that none reaches into it.
fn bound(records: &mut [Record<'_>], directory: u64) -> Result<(), Stop> {
    let mut headers: Vec<u64> = records.iter().map(|record| record.header).collect();
    headers.push(directory);
    headers.sort_unstable();
    for record in records {
        let after = headers.partition_point(|header| *header <= record.header);
        record.next = headers.get(after).copied().unwrap_or(directory);
        if record.next - record.header < record.bytes {
            return Err(damaged(format!("record {} reaches into the next", record.name)));
        }
    }
    Ok(())
}

fn archive_of(full_name: &[u8]) -> &[u8] {
    full_name.split(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Little-endian numbers at fixed places of a header whose length was checked.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0[at..at + N].try_into().expect("N bytes were taken")
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.array(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }
}
