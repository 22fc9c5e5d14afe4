//! How a tensor that has changed is best stored: as it is, encoded, or XORed with what it was. Told by a sample.

use std::ops::Range;
use std::sync::Arc;

use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use strata_io::Error as IoError;
use strata_io::digest::{BLOCK_BYTES, DigestKind};

use crate::bounce::{self, Bounce};
use crate::destination::watch;
use crate::encoding::{Encoding, encode_block, planes_of};
use crate::item::{Kind, num_blocks};
use crate::payload;
use crate::plan::block_range;
use crate::save::SaveItem;
use crate::unchanged::{LEAST_BYTES, Parent};
use crate::{Error, Result};

/// Tensors looked at together: of a base on an object store one waits longer than one compresses.
const LOOKS: usize = 8;

/// Looked at of a block, of two blocks: enough to tell how a tensor's bytes are distributed.
const SAMPLE_BYTES: u64 = 256 << 10;

/// Per cent of a tensor's bytes that an encoding must save, over the next simpler one.
const LEAST_SAVED: u64 = 5;

/// Per cent of its bytes that a tensor may take XORed. It moves away from its base with each step: beyond this it is
/// stored as it is, and later ones are XORed with that.
const MOST_XORED: u64 = 60;

/// A content of a tensor that is stored as it is, in one of the parent's objects.
#[derive(Debug, Clone)]
pub(crate) struct EarlierContent {
    /// Number of the object.
    pub object: u32,
    /// First byte in it.
    pub offset: u64,
    /// XXH3-128 of each block.
    pub digests: Arc<[u128]>,
}

/// What pays.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// What the tensor is best XORed with.
    pub base: Option<EarlierContent>,
    /// Whether it is better encoded than not if it is not XORed.
    pub planes_pay: bool,
}

/// Bytes of a sample: as they are, encoded, and XORed where there is a base.
#[derive(Debug, Clone, Copy)]
struct Sample {
    raw: u64,
    planes: u64,
    xored: Option<u64>,
}

impl Sample {
    /// Whether to XOR, and whether to encode if not. `was_xored`: when it was saved last. Pure.
    fn decide(self, was_xored: bool) -> (bool, bool) {
        let saves = |bytes: u64, before: u64| 100 * bytes + LEAST_SAVED * self.raw <= 100 * before;
        let xors = self.xored.is_some_and(|xored| 100 * xored <= MOST_XORED * self.raw && saves(xored, self.planes));
        // What was XORed and is not worth it any more becomes the new base.
        (xors, (xors || !was_xored) && saves(self.planes, self.raw))
    }
}

/// What pays for each of `items`, whose content `parent` does not hold.
pub(crate) async fn choose(items: Vec<SaveItem>, parent: &Arc<Parent>) -> Result<Vec<(SaveItem, Choice)>> {
    // A first one is stored as it is: whatever follows can be XORed with it.
    if !parent.encodes() || parent.manifest.items.is_empty() {
        return Ok(items.into_iter().map(|item| (item, Choice::default())).collect());
    }
    let looks: Vec<_> = items.into_iter().map(|item| look(item, parent).boxed()).collect();
    stream::iter(looks).buffered(LOOKS).try_collect().await
}

async fn look(item: SaveItem, parent: &Parent) -> Result<(SaveItem, Choice)> {
    let bytes = item.payload.len();
    if item.kind != Kind::Tensor || bytes < LEAST_BYTES {
        return Ok((item, Choice::default()));
    }
    let (base, was_xored) = earlier_content(&item, parent);
    let blocks = num_blocks(bytes);
    let mut sample = Sample { raw: 0, planes: 0, xored: base.as_ref().map(|_| 0) };
    let mut looked_at = vec![blocks / 4, blocks * 3 / 4];
    looked_at.dedup();
    for block in looked_at {
        let before = match &base {
            None => None,
            Some(base) => read_base(parent, base, block, bytes).await?,
        };
        let sampled = item.clone();
        let take = move || take_sample(&sampled, block, before);
        let taken = tokio::task::spawn_blocking(take).await.expect("a sample does not panic")?;
        sample.raw += taken.raw;
        sample.planes += taken.planes;
        // A base that cannot be read is none.
        sample.xored = sample.xored.zip(taken.xored).map(|(sum, bytes)| sum + bytes);
    }
    let (xors, planes_pay) = sample.decide(was_xored);
    Ok((item, Choice { base: base.filter(|_| xors), planes_pay }))
}

/// What `item` may be XORed with: the newest content of the same name and form that is stored as it is; and whether it
/// was XORed when it was saved last.
fn earlier_content(item: &SaveItem, parent: &Parent) -> (Option<EarlierContent>, bool) {
    let items = &parent.manifest.items;
    let Some(row) = items.rows_of(&[(&item.fqn, item.offsets.as_deref())])[0] else { return (None, false) };
    let stored = &items[row];
    let looks_alike = stored.kind == Kind::Tensor
        && (&stored.dtype, &stored.shape, &stored.strides) == (&item.dtype, &item.shape, &item.strides)
        && stored.payload_bytes == item.payload.len();
    if !looks_alike {
        return (None, false);
    }
    match stored.encoding.as_deref() {
        None => {
            let digests: Arc<[u128]> = stored.digests.iter().map(|digest| digest.xxh3).collect();
            let known = digests.len() as u64 == num_blocks(stored.payload_bytes);
            let content = EarlierContent { object: stored.object, offset: stored.payload_offset(), digests };
            (known.then_some(content), false)
        }
        Some(Encoding { base: Some(base), .. }) => {
            let digests = base.digests.iter().copied().collect();
            (Some(EarlierContent { object: base.object, offset: base.offset, digests }), true)
        }
        Some(Encoding { base: None, .. }) => (None, false),
    }
}

/// A block of `base`, verified; None, with a warning, if it is damaged or gone: a save needs none.
pub(crate) async fn read_base(
    parent: &Parent,
    base: &EarlierContent,
    block: u64,
    payload_bytes: u64,
) -> Result<Option<Bounce>> {
    let expected = base.digests[block as usize];
    let Some((place, object)) = parent.place(base.object).filter(|_| expected != 0) else { return Ok(None) };
    let Range { start, end } = block_range(block, payload_bytes);
    let buffer = bounce::take(end - start, None);
    let target = watch(buffer.memory()).split_to((end - start) as usize);
    let range = base.offset + start..base.offset + end;
    let unusable = |why: String| {
        tracing::warn!("{}/{}: {why}; nothing is XORed with bytes {range:?} of it", place.url(), object.name);
        Ok(None)
    };
    match place.read_digested(&object.name, range.clone(), vec![target], DigestKind::Xxh3).await {
        Ok(digests) if digests[0] == expected => Ok(Some(buffer)),
        Ok(digests) => unusable(format!("expected xxh3 {expected:#034x}, found {:#034x}", digests[0])),
        Err(error @ (IoError::NotFound { .. } | IoError::Mismatch { .. })) => unusable(error.to_string()),
        Err(error) => Err(Error::from(error)),
    }
}

/// Of the first bytes of a block. Blocks.
fn take_sample(item: &SaveItem, block: u64, base: Option<Bounce>) -> Result<Sample> {
    let Range { start, end } = block_range(block, item.payload.len());
    let raw = SAMPLE_BYTES.min(end - start);
    let bytes = payload::on_host(raw, &[(0, &item.payload, start..start + raw)])?;
    let width = planes_of(&item.dtype);
    let planes = encode_block(&bytes[0], None, width).as_ref().len() as u64;
    let xored = base.map(|base| {
        let frame = encode_block(&bytes[0], Some(&base.memory().as_slice()[..raw as usize]), width);
        bounce::give(base);
        frame.as_ref().len() as u64
    });
    Ok(Sample { raw, planes, xored })
}

const _: () = assert!(SAMPLE_BYTES <= BLOCK_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simplest_that_pays_is_chosen_and_what_has_moved_away_becomes_a_base() {
        let sample = |planes, xored| Sample { raw: 1000, planes, xored };
        for (sample, was_xored, expected) in [
            (sample(990, None), false, (false, false)),
            (sample(950, None), false, (false, true)),
            (sample(800, Some(300)), false, (true, true)),
            (sample(800, Some(780)), false, (false, true)),
            (sample(620, Some(590)), false, (false, true)),
            (sample(990, Some(610)), false, (false, false)),
            (sample(800, Some(300)), true, (true, true)),
            (sample(800, Some(610)), true, (false, false)),
        ] {
            assert_eq!(sample.decide(was_xored), expected, "{sample:?} {was_xored}");
        }
    }
}
