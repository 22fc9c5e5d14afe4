//! Bytes to a manifest. The file may be torn, damaged or hostile.

use bytes::Bytes;
use prost::Message;
use strata_io::digest::{crc32, xxh3};
use strata_io::is_plain;
use strata_proto::v1;
use strata_proto::v1::section::Kind;

use super::columns::{Fault, decode_entries};
use super::items::Stored;
use super::{MAGIC, Manifest, READER_VERSION};
use crate::encoding::FEATURE;
use crate::item::{Entry, Object};
use crate::run::{CheckpointType, RunInfo};

const PREAMBLE_BYTES: usize = 16;

/// Why a file cannot be used as a manifest; without the file's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodeError {
    /// Torn, damaged or hostile.
    Damaged(Fault),
    /// Sound, but beyond this reader.
    Unsupported(Fault),
}

impl<F: Into<Fault>> From<F> for DecodeError {
    fn from(fault: F) -> Self {
        Self::Damaged(fault.into())
    }
}

/// The manifest in `file`.
///
/// # Errors
/// What is wrong with it.
pub fn decode(file: &Bytes) -> Result<Manifest, DecodeError> {
    let (header, body) = split(file)?;
    let mut manifest = from_header(&header)?;
    let mut entries: Vec<(u64, Entry)> = Vec::new();
    let mut items = Stored::new(&manifest.objects);
    let mut sections = header.sections.iter();
    while let Some(section) = sections.next() {
        let bytes = section_bytes(section, &body)?;
        match Kind::try_from(section.kind) {
            Ok(Kind::Tensors) => entries.extend(decode_entries(&message::<v1::TensorGroup>(&bytes)?)?),
            Ok(Kind::Items) => {
                let digests = follower(sections.next(), Kind::Digests, &body)?;
                let inline = follower(sections.next(), Kind::Inline, &body)?;
                items.push(bytes, digests, inline, &manifest.objects)?;
            }
            Ok(Kind::PlannerData) => manifest.planner_data = bytes.to_vec(),
            Ok(Kind::Digests | Kind::Inline | Kind::Unspecified) | Err(_) => {
                return Err(format!("a section of kind {} stands where none may", section.kind).into());
            }
        }
    }
    if items.num_rows() as u64 != header.num_items {
        return Err(format!("expected {} items, found {}", header.num_items, items.num_rows()).into());
    }
    entries.sort_by_key(|(position, _)| *position);
    manifest.entries = entries.into_iter().map(|(_, entry)| entry).collect();
    manifest.items = items.into();
    Ok(manifest)
}

/// How many of the first bytes of a manifest [`decode_head`] needs, told by its first bytes.
///
/// # Errors
/// If they are not a manifest's.
pub fn head_bytes(start: &[u8]) -> Result<u64, DecodeError> {
    if start.len() < PREAMBLE_BYTES || &start[..8] != MAGIC {
        return Err(format!("not a manifest: {} bytes without the magic", start.len()).into());
    }
    Ok(PREAMBLE_BYTES as u64 + u64::from(word(start, 8)))
}

/// What the first bytes of a manifest say of the whole: everything but entries, items and the planner's data.
///
/// # Errors
/// What is wrong with them.
pub fn decode_head(start: &[u8]) -> Result<Manifest, DecodeError> {
    from_header(&header_of(start)?.0)
}

fn split(file: &Bytes) -> Result<(v1::ManifestHeader, Bytes), DecodeError> {
    let (header, end) = header_of(file)?;
    let body = file.slice(end..);
    let expected: u64 = header.sections.iter().map(|s| s.length).fold(0, u64::saturating_add);
    if expected != body.len() as u64 {
        return Err(format!("the sections have {expected} bytes, the file holds {}", body.len()).into());
    }
    Ok((header, body))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

/// The header, and where it ends.
fn header_of(file: &[u8]) -> Result<(v1::ManifestHeader, usize), DecodeError> {
    let end = usize::try_from(head_bytes(file)?).ok().filter(|end| *end <= file.len());
    let end = end.ok_or_else(|| format!("the header of {} bytes is cut", word(file, 8)))?;
    let header = &file[PREAMBLE_BYTES..end];
    let (expected, found) = (word(file, 12), crc32(header));
    if found != expected {
        return Err(format!("checksum of the header: expected {expected:#010x}, found {found:#010x}").into());
    }
    let header = message::<v1::ManifestHeader>(header)?;
    if header.min_reader_version > READER_VERSION {
        let needed = header.min_reader_version;
        let fault = format!("needs a reader of format version {needed}, this one implements {READER_VERSION}");
        return Err(DecodeError::Unsupported(fault));
    }
    if let Some(feature) = header.required_features.iter().find(|feature| *feature != FEATURE) {
        let fault = format!("needs the feature {feature:?}, which this reader does not know");
        return Err(DecodeError::Unsupported(fault));
    }
    Ok((header, end))
}

fn from_header(header: &v1::ManifestHeader) -> Result<Manifest, DecodeError> {
    let objects = header
        .objects
        .iter()
        .map(|object| {
            check_plain_name(&object.name)?;
            if object.reference as usize > header.references.len() {
                return Err(format!("object {:?} refers to a checkpoint that is not listed", object.name));
            }
            let reference = object.reference.checked_sub(1);
            Ok(Object { name: object.name.clone(), size: object.size, reference })
        })
        .collect::<Result<_, Fault>>()?;
    for reference in &header.references {
        check_plain_name(&reference.checkpoint_id)?;
    }
    Ok(Manifest {
        save_id: header.save_id.clone(),
        previous_save_id: header.previous_save_id.clone(),
        number: header.number,
        created_at: header.created_at,
        world_size: header.world_size,
        rank: header.rank_plus_one.checked_sub(1),
        generation: header.generation,
        objects,
        references: header.references.iter().map(|r| (r.checkpoint_id.clone(), r.save_id.clone())).collect(),
        payload_bytes: header.payload_bytes,
        run: header.run.as_ref().map(run_info).transpose()?,
        is_encoded: header.required_features.iter().any(|feature| feature == FEATURE),
        encoded_in_a_row: header.encoded_in_a_row,
        ..Manifest::default()
    })
}

fn run_info(run: &v1::RunInfo) -> Result<RunInfo, DecodeError> {
    let unknown = || {
        DecodeError::Unsupported(format!(
            "the checkpoint is of type {}, which this reader does not know",
            run.checkpoint_type
        ))
    };
    Ok(RunInfo {
        step: run.step,
        epoch: run.epoch,
        checkpoint_type: CheckpointType::from_code(run.checkpoint_type).ok_or_else(unknown)?,
        metadata: run.metadata.clone(),
        metrics: run.metrics.clone(),
        model_hash: (!run.model_hash.is_empty()).then(|| run.model_hash.clone()),
    })
}

/// A manifest may name what lies beside it, nothing else.
fn check_plain_name(name: &str) -> Result<(), Fault> {
    if is_plain(name) { Ok(()) } else { Err(format!("{name:?} is not a plain name")) }
}

fn section_bytes(section: &v1::Section, body: &Bytes) -> Result<Bytes, Fault> {
    if !section.compression.is_empty() {
        return Err(format!(
            "a section has the compression {:?}, which this reader does not know",
            section.compression
        ));
    }
    let end = section.offset.checked_add(section.length).filter(|end| *end <= body.len() as u64);
    let bytes = body.slice(section.offset as usize..end.ok_or("a section ends behind the file")? as usize);
    if xxh3(&bytes).to_le_bytes() != section.xxh3[..] {
        return Err(format!("checksum of the section at {}..{}", section.offset, section.offset + section.length));
    }
    Ok(bytes)
}

fn follower(section: Option<&v1::Section>, kind: Kind, body: &Bytes) -> Result<Bytes, Fault> {
    match section {
        Some(section) if section.kind == kind as i32 => section_bytes(section, body),
        _ => Err(format!("a section of kind {kind:?} is missing")),
    }
}

fn message<M: Message + Default>(bytes: &[u8]) -> Result<M, Fault> {
    M::decode(bytes).map_err(|error| format!("cannot be decoded: {error}"))
}
