//! Tensors into files of safetensors: which file, in which order, and the head that says so. Pure.

use std::cmp::Reverse;

use bytes::Bytes;

use super::SaveItem;
use super::objects::{ObjectPlan, Segment, Stored};
use crate::container::dtype_bytes;
use crate::servable::{Row, head, least_head_bytes};
use crate::{Result, layout, names};

/// Hugging Face's own default: what reads them maps or fetches a whole file at a time.
pub(super) const FILE_BYTES: u64 = 5_000_000_000;

/// Files of at most `max_bytes`, but for a tensor that is larger. Two names of one memory are stored twice: the format
/// forbids that they share bytes, and loaders look for every name.
///
/// # Errors
/// [`crate::Error::Plan`] if the format cannot hold an item, naming it.
pub(super) fn plan_files(items: Vec<SaveItem>, rank: u32, save_id: &str, max_bytes: u64) -> Result<Vec<ObjectPlan>> {
    let mut files: Vec<(u64, Vec<SaveItem>)> = Vec::new();
    for item in items {
        let bytes = item.payload.len();
        match files.last_mut().filter(|(held, _)| held + bytes <= max_bytes) {
            Some((held, file)) => {
                *held += bytes;
                file.push(item);
            }
            None => files.push((bytes, vec![item])),
        }
    }
    let plan = |(k, (_, file))| plan_file(file, names::safetensors_object(rank, k, save_id));
    files.into_iter().enumerate().map(plan).collect()
}

fn plan_file(mut items: Vec<SaveItem>, name: String) -> Result<ObjectPlan> {
    // Larger elements first: each tensor then begins at a multiple of its element, without a gap.
    items.sort_by_key(|item| Reverse(dtype_bytes(&item.dtype)));
    let (mut rows, mut at) = (Vec::with_capacity(items.len()), 0);
    for item in &items {
        let bytes = item.payload.len();
        rows.push(Row::new(&item.fqn, &item.dtype, &item.shape, &item.strides, at, bytes)?);
        at += bytes;
    }
    rows.sort();
    let lead = &items[0].payload;
    let place = layout::residue(lead.len(), lead.congruent_to());
    let first = layout::next_at(least_head_bytes(&rows), place);
    let head = head(&rows, first).expect("there is room for it");
    let mut plan =
        ObjectPlan { name, segments: vec![Segment::Fixed(Bytes::from(head))], stored: Vec::new(), size: first };
    for item in items {
        let bytes = item.payload.len();
        plan.segments.push(Segment::Payload(plan.stored.len()));
        let payload = item.payload.clone();
        plan.stored.push(Stored { payload, frame: None, offset: plan.size, skip: 0, bytes, items: vec![item] });
        plan.size += bytes;
    }
    Ok(plan)
}
