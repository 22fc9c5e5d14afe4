//! One rank's items into new objects, each byte read once on the way.

mod encoded;
mod files;
mod objects;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use strata_io::digest::Digester;
use strata_io::schedule::ByteBudget;
use strata_io::{ObjectWriter, Part, Store};
use tokio::task::JoinSet;

use self::objects::{ObjectPlan, Segment, plan_objects};
use crate::changed::EarlierContent;
use crate::item::{Digests, Dims, Item, Kind, Object};
use crate::layout::{self, Piece};
use crate::payload::{self, Payload};
use crate::progress::Progress;
use crate::record::RankRecord;
use crate::unchanged::{self, Parent, Sorted};
use crate::{Error, Result, names};

/// Payloads up to this size travel inside the manifest as well: scalars, RNG states, counters.
const INLINE_ITEM_BYTES: u64 = 4 << 10;

/// Inline payloads of one rank together.
const INLINE_RANK_BYTES: u64 = 1 << 20;

/// One item to be saved.
#[derive(Debug, Clone)]
pub struct SaveItem {
    /// Name in the state_dict.
    pub fqn: Arc<[u8]>,
    /// Of the chunk; None for a pickled value.
    pub offsets: Option<Dims>,
    /// DCP's index hint.
    pub index: Option<u32>,
    /// What the payload is.
    pub kind: Kind,
    /// torch's name of the dtype; empty for bytes.
    pub dtype: Arc<str>,
    /// Shape of what is stored, in elements.
    pub shape: Dims,
    /// Strides of what is stored, in elements.
    pub strides: Dims,
    /// The payload; lent memory.
    pub payload: Payload,
}

/// Writes `items` into objects `__{rank}_{k}.{save_id}.distcp`, durable when this returns; what `parent` holds it
/// refers to instead. If the parent is one for encoding, what is written is encoded where that pays.
///
/// # Errors
/// The first failure; everything that was written is removed first.
///
/// # Cancel safety
/// A dropped call leaves objects behind; no manifest names them, and the next save here collects them.
pub async fn write_items(
    store: &dyn Store,
    budget: &ByteBudget,
    items: Vec<SaveItem>,
    rank: u32,
    save_id: &str,
    parent: Option<&Arc<Parent>>,
    progress: &Arc<Progress>,
) -> Result<RankRecord> {
    let Sorted { plain, encoded, unchanged } = match parent {
        None => Sorted { plain: items, ..Sorted::default() },
        Some(parent) => unchanged::sort(items, parent).await?,
    };
    // What later saves may be XORed with goes into objects of its own, which stay no longer than that is of use.
    let apart = |item: &SaveItem| parent.is_some_and(|parent| parent.encodes()) && is_likely_base(item);
    let (apart, plain): (Vec<_>, Vec<_>) = plain.into_iter().partition(apart);
    let to = Target { store, budget, rank, save_id, progress };
    let mut record = RankRecord { rank, ..RankRecord::default() };
    match to.write_all([plain, apart], encoded, parent, &mut record).await {
        Ok(encoded) => {
            if let Some(parent) = parent {
                unchanged::refer(&mut record, unchanged, encoded, parent);
            }
            Ok(record)
        }
        Err(error) => {
            to.remove(&record, &error, (0..).map(|k| to.name(k))).await;
            Err(error)
        }
    }
}

/// Writes the tensors among `items`, whole ones, into files of safetensors `model-{rank}-{k}.{save_id}.safetensors`,
/// and what is no tensor as [`write_items`] does.
///
/// # Errors
/// [`Error::Plan`] if the format cannot hold one, before anything is written; as [`write_items`].
///
/// # Cancel safety
/// As [`write_items`].
pub async fn write_safetensors(
    store: &dyn Store,
    budget: &ByteBudget,
    items: Vec<SaveItem>,
    rank: u32,
    save_id: &str,
    progress: &Arc<Progress>,
) -> Result<RankRecord> {
    let to = Target { store, budget, rank, save_id, progress };
    let (tensors, values): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| item.kind == Kind::Tensor);
    let mut plans = files::plan_files(tensors, rank, save_id, files::FILE_BYTES)?;
    plans.extend(plan_objects(values, |k| to.name(k))?);
    let mut record = RankRecord { rank, ..RankRecord::default() };
    let names: Vec<String> = plans.iter().map(|plan| plan.name.clone()).collect();
    match to.write_plans(plans, &mut record).await {
        Ok(()) => Ok(record),
        Err(error) => {
            to.remove(&record, &error, names.into_iter()).await;
            Err(error)
        }
    }
}

/// Weights in floats of 16 bits: from save to save most of their bits stay. Moments change in all of them.
fn is_likely_base(item: &SaveItem) -> bool {
    matches!(&*item.dtype, "bfloat16" | "float16") && !item.fqn.starts_with(b"optim")
}

/// Where a rank's objects go.
#[derive(Clone, Copy)]
struct Target<'a> {
    store: &'a dyn Store,
    budget: &'a ByteBudget,
    rank: u32,
    save_id: &'a str,
    progress: &'a Arc<Progress>,
}

impl Target<'_> {
    /// Of the object number `k`.
    fn name(&self, k: usize) -> String {
        names::data_object(self.rank, k, self.save_id)
    }

    /// Writes items as they are, each group into objects of its own, and `encoded` ones, whose rows it returns: their
    /// bases are among the parent's objects.
    async fn write_all(
        &self,
        plain: [Vec<SaveItem>; 2],
        encoded: Vec<(SaveItem, Option<EarlierContent>)>,
        parent: Option<&Arc<Parent>>,
        record: &mut RankRecord,
    ) -> Result<Vec<Item>> {
        let mut plans = Vec::new();
        for items in plain {
            let next = plans.len();
            plans.extend(plan_objects(items, |k| self.name(next + k))?);
        }
        self.write_plans(plans, record).await?;
        match parent {
            Some(parent) if !encoded.is_empty() => self.write_encoded(encoded, parent, record).await,
            _ => Ok(Vec::new()),
        }
    }

    /// Writes objects one after another.
    async fn write_plans(&self, plans: Vec<ObjectPlan>, record: &mut RankRecord) -> Result<()> {
        self.progress.plan(plans.iter().map(|plan| plan.size).sum());
        let mut payloads = Vec::new();
        for plan in plans {
            self.write_object(plan, record, &mut payloads).await?;
        }
        choose_inline(&mut record.items, &payloads).await
    }

    /// Appends to `record`, and to `payloads` the payload of each item.
    async fn write_object(&self, plan: ObjectPlan, record: &mut RankRecord, payloads: &mut Vec<Payload>) -> Result<()> {
        let (plan, digests) = self.put_object(plan).await?;
        let object = record.add_object(&plan);
        for (stored, digester) in plan.stored.into_iter().zip(digests) {
            let (blocks, _) = digester.finish();
            let digests: Digests = blocks.into_iter().collect();
            record.payload_bytes += stored.payload.len();
            payloads.extend(stored.items.iter().map(|item| item.payload.clone()));
            record.items.extend(stored.items.into_iter().map(|item| Item {
                object,
                item_offset: stored.offset,
                item_bytes: stored.bytes,
                payload_skip: stored.skip,
                digests: digests.clone(),
                ..item.unplaced()
            }));
        }
        Ok(())
    }

    /// Writes the object of `plan`, durable when this returns; with the digests of the payloads in it.
    async fn put_object(&self, plan: ObjectPlan) -> Result<(ObjectPlan, Vec<Digester>)> {
        let writer = Arc::new(self.store.create(&plan.name, plan.size).await?);
        let plan = Arc::new(plan);
        let mut writes = JoinSet::new();
        let written = self.write_parts(&plan, &writer, &mut writes).await;
        writes.shutdown().await;
        let writer = Arc::into_inner(writer).expect("every part's write has ended");
        match written {
            Ok(digests) => {
                writer.finish().await?;
                Ok((Arc::into_inner(plan).expect("every part is written"), digests))
            }
            Err(error) => {
                writer.abort().await;
                Err(error)
            }
        }
    }

    /// Digests the parts one after another and writes them concurrently, as far as the budget allows. After a failure
    /// some of `writes` may still be going on.
    async fn write_parts(
        &self,
        plan: &Arc<ObjectPlan>,
        writer: &Arc<Box<dyn ObjectWriter>>,
        writes: &mut JoinSet<strata_io::Result<()>>,
    ) -> Result<Vec<Digester>> {
        let digests = Arc::new(Mutex::new(plan.stored.iter().map(|_| Digester::default()).collect::<Vec<_>>()));
        let mut offset = 0;
        let parts = layout::parts(&plan.segment_bytes(), self.store.part_bytes(plan.size));
        for (index, pieces) in parts.into_iter().enumerate() {
            let bytes: u64 = pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
            let permit = self.budget.take(bytes).await;
            while let Some(done) = writes.try_join_next() {
                done.expect("a part's write does not panic")?;
            }
            let part = {
                let (plan, digests) = (plan.clone(), digests.clone());
                let digest = move || {
                    let mut digests = digests.lock().expect("a digest does not panic");
                    make_part(&plan, &pieces, &mut digests, index as u32, offset)
                };
                tokio::task::spawn_blocking(digest).await.expect("a digest does not panic")?
            };
            let (writer, progress) = (writer.clone(), self.progress.clone());
            writes.spawn(async move {
                let _permit = permit;
                writer.write_part(part).await?;
                progress.moved(bytes);
                Ok(())
            });
            offset += bytes;
        }
        while let Some(done) = writes.join_next().await {
            done.expect("a part's write does not panic")?;
        }
        Ok(Arc::into_inner(digests).expect("every part is digested").into_inner().expect("a digest does not panic"))
    }

    /// Removes what was written of objects with these `names`, the first ones of them, until it failed.
    async fn remove(&self, record: &RankRecord, error: &Error, names: impl Iterator<Item = String>) {
        // An object that was there before is not ours to remove.
        let begun = usize::from(!matches!(error, Error::Io(strata_io::Error::AlreadyExists { .. })));
        discard(self.store, names.take(record.objects.len() + begun)).await;
    }
}

/// Removes objects of a save that failed, as far as the store lets it.
pub(crate) async fn discard(store: &dyn Store, names: impl IntoIterator<Item = String>) {
    for name in names {
        if let Err(error) = store.delete(&name).await {
            tracing::warn!("cannot remove {name} of a failed save: {error}");
        }
    }
    store.tidy().await;
}

impl RankRecord {
    /// Adds an object of its own, and returns its number.
    fn add_object(&mut self, plan: &ObjectPlan) -> u32 {
        self.objects.push(Object { name: plan.name.clone(), size: plan.size, reference: None });
        self.objects.len() as u32 - 1
    }
}

impl SaveItem {
    /// Its row, without what is known only once it is written.
    fn unplaced(self) -> Item {
        Item {
            fqn: self.fqn,
            offsets: self.offsets,
            index: self.index,
            kind: self.kind,
            dtype: self.dtype,
            shape: self.shape,
            strides: self.strides,
            object: 0,
            item_offset: 0,
            item_bytes: 0,
            payload_skip: 0,
            payload_bytes: self.payload.len(),
            digests: Digests::None,
            inline: None,
            whole_crc32: None,
            encoding: None,
        }
    }
}

/// Blocks, for the digests and for copies from devices.
fn make_part(plan: &ObjectPlan, pieces: &[Piece], digests: &mut [Digester], index: u32, offset: u64) -> Result<Part> {
    let (mut part_pieces, mut part_crc) = (Vec::with_capacity(pieces.len()), 0);
    let mut payloads = payload_bytes(plan, pieces)?.into_iter();
    for Piece { segment, range } in pieces {
        let (bytes, crc) = match &plan.segments[*segment] {
            Segment::Fixed(bytes) => with_crc(slice(bytes, range)),
            Segment::Payload(i) => {
                let bytes = payloads.next().expect("one for each piece of a payload");
                let crc = digests[*i].update(&bytes);
                (bytes, crc)
            }
            Segment::Suffix(i) => {
                let frame = plan.stored[*i].frame.as_ref().expect("only framed items have a suffix");
                with_crc(slice(&Bytes::from(frame.suffix(digests[*i].crc32())), range))
            }
        };
        part_crc = strata_io::digest::crc32_combine(part_crc, crc, bytes.len() as u64);
        part_pieces.push(bytes);
    }
    Ok(Part { index, offset, pieces: part_pieces, crc32: part_crc })
}

/// Of those of a part's pieces that belong to payloads.
fn payload_bytes(plan: &ObjectPlan, pieces: &[Piece]) -> Result<Vec<Bytes>> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    for Piece { segment, range } in pieces {
        if let Segment::Payload(i) = &plan.segments[*segment] {
            ranges.push((at, &plan.stored[*i].payload, range.clone()));
        }
        at += range.end - range.start;
    }
    payload::on_host(at, &ranges)
}

fn slice(bytes: &Bytes, range: &Range<u64>) -> Bytes {
    bytes.slice(range.start as usize..range.end as usize)
}

fn with_crc(bytes: Bytes) -> (Bytes, u32) {
    let crc = strata_io::digest::crc32(&bytes);
    (bytes, crc)
}

/// Keeps copies of the smallest payloads, as many as fit.
async fn choose_inline(items: &mut [Item], payloads: &[Payload]) -> Result<()> {
    let mut order: Vec<usize> = (0..items.len()).filter(|i| items[*i].kind != Kind::TorchSave).collect();
    order.sort_by_key(|i| items[*i].payload_bytes);
    let mut left = INLINE_RANK_BYTES;
    for i in order {
        if items[i].payload_bytes > INLINE_ITEM_BYTES.min(left) {
            break;
        }
        left -= items[i].payload_bytes;
        items[i].inline = Some(Box::new(payloads[i].copy().await?));
    }
    Ok(())
}
