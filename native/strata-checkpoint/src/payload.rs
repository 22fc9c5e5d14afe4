//! What is to be saved, where it lies: on the host; on a device, or in another checkpoint, from which each part is
//! fetched when its turn comes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use strata_device::{DeviceMemory, PinnedBuffer};
use tokio::runtime::Handle;

use crate::stored_tensor::StoredTensor;
use crate::{Result, layout};

/// Lent memory with the bytes of one item.
#[derive(Debug, Clone)]
pub enum Payload {
    /// On the host; written from where it lies.
    Host(Bytes),
    /// On a device; copied part by part into page-locked buffers.
    Device(DeviceMemory),
    /// A tensor of another checkpoint; read a stretch at a time.
    Stored(Arc<StoredTensor>),
}

impl Payload {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.len() as u64,
            Self::Device(memory) => memory.len(),
            Self::Stored(tensor) => tensor.len(),
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What tells this memory from any other: device (None: the host), address, bytes.
    pub(crate) fn identity(&self) -> (Option<u32>, u64, u64) {
        match self {
            Self::Host(bytes) => (None, bytes.as_ptr() as u64, bytes.len() as u64),
            Self::Device(memory) => (Some(memory.device().ordinal), memory.address(), memory.len()),
            Self::Stored(tensor) => (None, Arc::as_ptr(tensor) as u64, tensor.len()),
        }
    }

    /// The address that the payload's place in the file should be congruent to. What is copied or read first can stand
    /// anywhere; a later load into the host's memory is best served by where that usually lies.
    pub(crate) fn congruent_to(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr() as u64,
            Self::Device(_) | Self::Stored(_) => layout::USUAL_RESIDUE,
        }
    }

    /// A copy of all of it.
    pub(crate) async fn copy(&self) -> Result<Bytes> {
        match self {
            Self::Host(bytes) => Ok(Bytes::copy_from_slice(bytes)),
            Self::Device(memory) => {
                let mut copy = vec![0; memory.len() as usize];
                memory.read(0..memory.len(), &mut copy)?;
                Ok(Bytes::from(copy))
            }
            Self::Stored(tensor) => tensor.read(0..tensor.len()).await,
        }
    }
}

/// The bytes of `ranges`, in order; `at` is where each stands in its part.
///
/// What lies on devices is copied into one buffer at the same place modulo any page size, so that the part can be
/// written from it directly. Blocks, in a thread of the runtime's that may.
pub(crate) fn on_host(part_bytes: u64, ranges: &[(u64, &Payload, Range<u64>)]) -> Result<Vec<Bytes>> {
    let staged = stage(part_bytes, ranges)?;
    let bytes = |(at, payload, range): &(u64, &Payload, Range<u64>)| match payload {
        Payload::Host(bytes) => Ok(bytes.slice(range.start as usize..range.end as usize)),
        Payload::Device(_) => Ok(staged.slice(*at as usize..(at + range.end - range.start) as usize)),
        Payload::Stored(tensor) => Handle::current().block_on(tensor.read(range.clone())),
    };
    ranges.iter().map(bytes).collect()
}

fn stage(part_bytes: u64, ranges: &[(u64, &Payload, Range<u64>)]) -> Result<Bytes> {
    let on_device = |(at, payload, range): &(u64, &Payload, Range<u64>)| match payload {
        Payload::Host(_) | Payload::Stored(_) => None,
        Payload::Device(memory) => Some((*at, memory.clone(), range.clone())),
    };
    let copies: Vec<(u64, DeviceMemory, Range<u64>)> = ranges.iter().filter_map(on_device).collect();
    let Some((_, first, _)) = copies.first() else { return Ok(Bytes::new()) };
    let mut buffer = PinnedBuffer::take(first.device(), part_bytes as usize);
    let mut of_device: BTreeMap<u32, Vec<(u64, &mut [u8])>> = BTreeMap::new();
    let (mut rest, mut passed) = (buffer.as_mut_slice(), 0);
    for (at, memory, range) in &copies {
        let (target, after) = rest[(at - passed) as usize..].split_at_mut((range.end - range.start) as usize);
        of_device.entry(memory.device().ordinal).or_default().push((memory.address() + range.start, target));
        (rest, passed) = (after, at + range.end - range.start);
    }
    for (ordinal, mut pieces) in of_device {
        first.device().driver.read(ordinal, &mut pieces)?;
    }
    Ok(Bytes::from_owner(buffer))
}
