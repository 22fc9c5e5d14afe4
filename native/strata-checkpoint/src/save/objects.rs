//! Items into objects: which object, in which order, and what stands around each. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::SaveItem;
use crate::container::{Frame, Placement, TensorSpec};
use crate::item::{Dims, Kind};
use crate::payload::Payload;
use crate::{Error, Result, layout};

/// One object: what is in it and where.
pub(super) struct ObjectPlan {
    pub name: String,
    pub segments: Vec<Segment>,
    pub stored: Vec<Stored>,
    pub size: u64,
}

/// Consecutive bytes of an object.
pub(super) enum Segment {
    /// Known before any payload is read.
    Fixed(Bytes),
    /// Payload of `stored[i]`.
    Payload(usize),
    /// What follows the payload of `stored[i]`; its bytes need the payload's CRC.
    Suffix(usize),
}

/// One payload and every item that it stands for.
pub(super) struct Stored {
    pub payload: Payload,
    /// The archive around it, if it has one of its own.
    pub frame: Option<Frame>,
    /// First byte of the item in the object; the payload begins `skip` bytes later.
    pub offset: u64,
    pub skip: u64,
    /// What frame and payload take.
    pub bytes: u64,
    pub items: Vec<SaveItem>,
}

/// What makes two tensors one: device, address, length; dtype, shape and strides.
type Memory = ((Option<u32>, u64, u64), Arc<str>, Dims, Dims);

/// Tensors with the same memory and geometry become one stored payload; the order of the plan is kept.
pub(super) fn plan_objects(items: Vec<SaveItem>, name: impl Fn(usize) -> String) -> Result<Vec<ObjectPlan>> {
    let mut plans: Vec<ObjectPlan> = Vec::new();
    let mut known: HashMap<Memory, (usize, usize)> = HashMap::new();
    for item in items {
        let key = item.memory();
        let aliasable = item.kind == Kind::Tensor && !item.payload.is_empty();
        if let Some((plan, stored)) = known.get(&key).filter(|_| aliasable) {
            plans[*plan].stored[*stored].items.push(item);
            continue;
        }
        if plans.last().is_none_or(|plan| plan.size >= layout::OBJECT_BYTES) {
            plans.push(ObjectPlan::new(name(plans.len())));
        }
        let at = plans.len() - 1;
        plans[at].push(item)?;
        if aliasable {
            known.insert(key, (at, plans[at].stored.len() - 1));
        }
    }
    Ok(plans)
}

impl SaveItem {
    /// The same for items of which one payload is enough.
    pub(super) fn memory(&self) -> Memory {
        (self.payload.identity(), self.dtype.clone(), self.shape.clone(), self.strides.clone())
    }
}

impl ObjectPlan {
    /// One with nothing in it.
    pub fn new(name: String) -> Self {
        Self { name, segments: Vec::new(), stored: Vec::new(), size: 0 }
    }

    /// Where the next item begins; up to there the object is full.
    fn pad(&mut self) -> u64 {
        let offset = layout::next_offset(self.size);
        if offset > self.size {
            self.segments.push(Segment::Fixed(Bytes::from(vec![0; (offset - self.size) as usize])));
            self.size = offset;
        }
        offset
    }

    fn push(&mut self, item: SaveItem) -> Result<()> {
        let offset = self.pad();
        let number = self.stored.len();
        let payload = item.payload.clone();
        let (frame, skip, bytes) = match item.kind {
            Kind::Bytes | Kind::TorchSave => {
                self.segments.push(Segment::Payload(number));
                (None, 0, payload.len())
            }
            Kind::Tensor => {
                let frame = frame_of(&item, offset)?;
                let prefix = Bytes::copy_from_slice(frame.prefix());
                let (skip, bytes) = (prefix.len() as u64, frame.item_bytes());
                self.segments.extend([Segment::Fixed(prefix), Segment::Payload(number), Segment::Suffix(number)]);
                (Some(frame), skip, bytes)
            }
        };
        self.size = offset + bytes;
        self.stored.push(Stored { payload, frame, offset, skip, bytes, items: vec![item] });
        Ok(())
    }

    /// Length of each segment.
    pub fn segment_bytes(&self) -> Vec<u64> {
        let bytes = |segment: &Segment| match segment {
            Segment::Fixed(bytes) => bytes.len() as u64,
            Segment::Payload(i) => self.stored[*i].payload.len(),
            Segment::Suffix(i) => self.stored[*i].frame.as_ref().map_or(0, Frame::suffix_bytes),
        };
        self.segments.iter().map(bytes).collect()
    }
}

fn frame_of(item: &SaveItem, item_offset: u64) -> Result<Frame> {
    let payload_bytes = item.payload.len();
    let place = layout::residue(payload_bytes, item.payload.congruent_to());
    let spec = TensorSpec { dtype: &item.dtype, shape: &item.shape, strides: &item.strides, payload_bytes };
    let place = Placement { item_offset, align: place.align, residue: place.residue };
    Frame::new(&spec, place).map_err(|error| Error::Plan(format!("{:?}: {error}", String::from_utf8_lossy(&item.fqn))))
}
