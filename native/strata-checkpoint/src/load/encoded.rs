//! Reading encoded blocks: the frames and what they were XORed with, each verified as it is stored, and the block that
//! comes of them before it goes on.

use std::ops::Range;
use std::sync::Arc;

use strata_io::digest::{DigestKind, xxh3};
use strata_io::lent::LentMut;
use tokio::task::JoinSet;

use super::{Job, check, mismatch, named, object_path};
use crate::bounce::{self, Bounce};
use crate::destination::watch;
use crate::encoding::{XorBase, decode_block, planes_of};
use crate::plan::{BlockRead, Request};
use crate::{Error, Result};

/// Fills the destinations of the request's blocks.
pub(super) async fn read_request(job: Arc<Job>, request: Request) -> Result<()> {
    let (frames, buffer) = read_frames(&job, &request).await?;
    let mut decoding = JoinSet::new();
    for (block, frame) in request.blocks.into_iter().zip(frames) {
        decoding.spawn(read_block(job.clone(), block, frame));
    }
    let mut first_error = None;
    while let Some(done) = decoding.join_next().await {
        first_error = first_error.or(done.expect("a block's read does not panic").err());
    }
    bounce::give(buffer);
    first_error.map_or(Ok(()), Err)
}

/// The frame of each block, verified, and the buffer in which they lie.
async fn read_frames(job: &Job, request: &Request) -> Result<(Vec<LentMut>, Bounce)> {
    let buffer = bounce::take(request.range.end - request.range.start, None);
    let mut free = watch(buffer.memory());
    let (mut targets, mut frames) = (Vec::new(), Vec::new());
    let mut at = request.range.start;
    for block in &request.blocks {
        if block.file.start > at {
            targets.push(free.split_to((block.file.start - at) as usize));
        }
        let memory = free.split_to((block.file.end - block.file.start) as usize);
        frames.push((targets.len(), watch(&memory)));
        targets.push(memory);
        at = block.file.end;
    }
    let digests = read_digested(job, request.object, request.range.clone(), targets).await?;
    for (block, (target, _)) in request.blocks.iter().zip(&frames) {
        let item = &job.checkpoint.manifest.items[block.row];
        let encoding = item.encoding.as_ref().expect("the request is of encoded blocks");
        let (expected, found) = (encoding.frames[block.block as usize].xxh3, digests[*target]);
        if expected != found {
            let object = object_path(job.store.url(), &job.checkpoint, request.object);
            return Err(mismatch(item, block.file.clone(), (expected, found), object));
        }
    }
    Ok((frames.into_iter().map(|(_, frame)| frame).collect(), buffer))
}

async fn read_digested(job: &Job, object: u32, range: Range<u64>, targets: Vec<LentMut>) -> Result<Vec<u128>> {
    let object = &job.checkpoint.manifest.objects[object as usize];
    let place = job.siblings.place(&*job.store, object);
    let digests = place.read_digested(&object.name, range, targets, DigestKind::Xxh3).await;
    digests.map_err(|error| named(error, job.store.url(), object))
}

async fn read_block(job: Arc<Job>, block: BlockRead, frame: LentMut) -> Result<()> {
    let encoding = job.checkpoint.manifest.items[block.row].encoding.clone();
    let encoding = encoding.expect("the request is of encoded blocks");
    let base = match &encoding.base {
        None => None,
        Some(base) => read_base(&job, &block, base).await?,
    };
    let decode = move || {
        decode(&job, &block, &frame, base.as_ref())?;
        base.into_iter().for_each(bounce::give);
        Ok(())
    };
    tokio::task::spawn_blocking(decode).await.expect("decoding does not panic")
}

async fn read_base(job: &Job, block: &BlockRead, base: &XorBase) -> Result<Option<Bounce>> {
    let item = &job.checkpoint.manifest.items[block.row];
    let Some((range, expected)) = base.block(block.block, item.payload_bytes) else { return Ok(None) };
    let buffer = bounce::take(range.end - range.start, None);
    let target = watch(buffer.memory()).split_to((range.end - range.start) as usize);
    let found = read_digested(job, base.object, range.clone(), vec![target]).await?[0];
    if expected != found {
        let object = object_path(job.store.url(), &job.checkpoint, base.object);
        return Err(mismatch(item, range, (expected, found), object));
    }
    Ok(Some(buffer))
}

/// Blocks.
fn decode(job: &Job, block: &BlockRead, frame: &LentMut, base: Option<&Bounce>) -> Result<()> {
    let item = &job.checkpoint.manifest.items[block.row];
    let bytes = (block.payload.end - block.payload.start) as usize;
    let base = base.map(|base| &base.memory().as_slice()[..bytes]);
    let unusable = |fault| {
        let object = object_path(job.store.url(), &job.checkpoint, item.object);
        Error::Manifest { object, detail: format!("{:?}, block {}: {fault}", item.name(), block.block) }
    };
    let into = |memory: &mut LentMut| {
        let decoded = decode_block(frame.as_slice(), base, planes_of(&item.dtype), memory.as_mut_slice());
        decoded.map_err(unusable)?;
        check(job, block, xxh3(memory.as_slice()))
    };
    if let Some(mut memory) = job.direct(block) {
        return into(&mut memory);
    }
    let buffer = bounce::take(bytes as u64, None);
    let mut memory = watch(buffer.memory()).split_to(bytes);
    into(&mut memory)?;
    job.scatter(block, memory.as_slice())?;
    bounce::give(buffer);
    Ok(())
}

#[cfg(test)]
mod tests;
