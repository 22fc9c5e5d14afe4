//! What an incremental save need not write: tensors whose content an earlier checkpoint of the run holds.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::Store;
use strata_io::digest::xxh3;

use crate::changed::{self, EarlierContent};
use crate::item::{Dims, Item, Kind, Object, num_blocks};
use crate::manifest::Manifest;
use crate::open::{Source, open};
use crate::payload;
use crate::plan::block_range;
use crate::record::{RankRecord, number_of};
use crate::save::SaveItem;
use crate::{Error, Result};

/// Below this a tensor is written again: that costs no more than the row that would refer to it.
pub(crate) const LEAST_BYTES: u64 = 16 << 10;

/// A committed checkpoint that lies beside the one being saved, and to whose objects it may refer.
#[derive(Debug)]
pub struct Parent {
    checkpoint_id: String,
    pub(crate) manifest: Manifest,
    /// Where it and those are that it refers to, by folder.
    places: HashMap<String, Arc<dyn Store>>,
    encodes: bool,
    /// Rows whose content could be that of a tensor, by what it looks like from outside.
    rows: HashMap<Look, Vec<usize>>,
}

/// dtype, shape and strides: together with the bytes they are all of a stored tensor.
type Look = (Arc<str>, Dims, Dims);

impl Parent {
    /// Opens the checkpoint in the folder `checkpoint_id` at `store`.
    ///
    /// # Errors
    /// As [`open`]; [`Error::Plan`] if no save of ours is the newest there, for others have no digests.
    pub async fn open(store: &dyn Store, checkpoint_id: &str) -> Result<Self> {
        let opened = open(store, None).await?;
        if opened.source != Source::Strata {
            return Err(Error::Plan(format!("{}: not a checkpoint of ours, nothing can refer to it", store.url())));
        }
        // Asked here, of what exists: beside a folder that a save has not made yet a file system finds nothing.
        let owners = opened.manifest.references.iter().map(|(folder, _)| folder.as_str()).chain([checkpoint_id]);
        let place = |folder: &str| Some((folder.to_owned(), store.sibling(folder).ok()?));
        let places = owners.filter_map(place).collect();
        Ok(Self { places, ..Self::of(checkpoint_id.to_owned(), opened.manifest) })
    }

    /// One that holds nothing: all is written.
    pub fn none() -> Self {
        Self::of(String::new(), Manifest::default())
    }

    /// Stores changed tensors encoded where that pays, and what later ones may be XORed with apart from the rest.
    pub fn encoding(self) -> Self {
        Self { encodes: true, ..self }
    }

    /// Whether changed tensors may be stored encoded, in this save or in later ones.
    pub(crate) fn encodes(&self) -> bool {
        self.encodes
    }

    /// How many checkpoints in a row, this one the last, have stored payloads encoded.
    pub fn encoded_in_a_row(&self) -> u32 {
        self.manifest.encoded_in_a_row
    }

    fn of(checkpoint_id: String, manifest: Manifest) -> Self {
        let mut rows: HashMap<Look, Vec<usize>> = HashMap::new();
        let mut row = 0;
        manifest.items.each(|item| {
            let is_candidate =
                item.kind == Kind::Tensor && item.payload_bytes >= LEAST_BYTES && !item.digests.is_empty();
            if is_candidate {
                rows.entry((item.dtype.clone(), item.shape.clone(), item.strides.clone())).or_default().push(row);
            }
            row += 1;
        });
        Self { checkpoint_id, manifest, places: HashMap::new(), encodes: false, rows }
    }

    /// Identity of the save in it.
    pub fn save_id(&self) -> &str {
        &self.manifest.save_id
    }

    /// Where `object` really is: in this checkpoint, or where this one refers to.
    fn owner(&self, object: &Object) -> (String, String) {
        match object.reference {
            None => (self.checkpoint_id.clone(), self.manifest.save_id.clone()),
            Some(reference) => self.manifest.references[reference as usize].clone(),
        }
    }

    /// Its object number `object`, and where that is; None if nothing can lie beside this checkpoint.
    pub(crate) fn place(&self, object: u32) -> Option<(&dyn Store, &Object)> {
        let object = &self.manifest.objects[object as usize];
        let (folder, _) = self.owner(object);
        self.places.get(&folder).map(|place| (&**place, object))
    }

    /// The row that holds what `item` is, if there is one; an item of another name is as good. Blocks.
    ///
    /// A tensor that has changed mostly differs in its first block: no more of it is read then.
    fn row_of(&self, item: &SaveItem) -> Result<Option<usize>> {
        let look = (item.dtype.clone(), item.shape.clone(), item.strides.clone());
        let same_bytes = |row: &&usize| self.manifest.items[**row].payload_bytes == item.payload.len();
        let known = self.rows.get(&look).filter(|_| item.kind == Kind::Tensor);
        let mut left: Vec<usize> = known.into_iter().flatten().filter(same_bytes).copied().collect();
        for block in 0..num_blocks(item.payload.len()) {
            if left.is_empty() {
                return Ok(None);
            }
            let range = block_range(block, item.payload.len());
            let bytes = payload::on_host(range.end - range.start, &[(0, &item.payload, range)])?;
            let digest = xxh3(&bytes[0]);
            let known = |row: usize| self.manifest.items[row].digests.get(block as usize);
            left.retain(|row| known(*row).is_some_and(|known| known.xxh3 == digest));
        }
        // Of equal ones the item's own: whoever looks into the file finds the name there.
        let own = left.iter().copied().find(|row| self.manifest.items[*row].fqn == item.fqn);
        Ok(own.or(left.first().copied()))
    }
}

/// What becomes of the items of a save.
#[derive(Default)]
pub(crate) struct Sorted {
    /// Written as they are.
    pub plain: Vec<SaveItem>,
    /// Written encoded, those with a base XORed.
    pub encoded: Vec<(SaveItem, Option<EarlierContent>)>,
    /// Referred to, with their rows in the parent.
    pub unchanged: Vec<(SaveItem, usize)>,
}

/// What becomes of `items` of a save beside `parent`.
pub(crate) async fn sort(items: Vec<SaveItem>, parent: &Arc<Parent>) -> Result<Sorted> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let looks = items.into_iter().map(|item| {
        let parent = parent.clone();
        async move {
            let look = move || parent.row_of(&item).map(|row| (item, row));
            tokio::task::spawn_blocking(look).await.expect("a digest does not panic")
        }
    });
    let found: Vec<(SaveItem, Option<usize>)> = stream::iter(looks).buffered(threads).try_collect().await?;
    let (mut changed, mut unchanged) = (Vec::new(), Vec::new());
    for (item, row) in found {
        match row {
            None => changed.push(item),
            Some(row) => unchanged.push((item, row)),
        }
    }
    let changed = changed::choose(changed, parent).await?;
    let rows = unchanged.iter().map(|(_, row)| &parent.manifest.items[*row]);
    let rows = rows.map(|item| (item.object, item.item_offset, item.item_bytes));
    let bases = changed.iter().filter_map(|(item, choice)| {
        let base = choice.base.as_ref()?;
        Some((base.object, base.offset, item.payload.len()))
    });
    let worth = worth_keeping(parent, rows.chain(bases));

    let mut sorted = Sorted::default();
    for (item, row) in unchanged {
        if worth.contains(&parent.manifest.items[row].object) {
            sorted.unchanged.push((item, row));
        } else {
            sorted.plain.push(item);
        }
    }
    for (item, choice) in changed {
        match choice.base.filter(|base| worth.contains(&base.object)) {
            Some(base) => sorted.encoded.push((item, Some(base))),
            None if choice.planes_pay => sorted.encoded.push((item, None)),
            None => sorted.plain.push(item),
        }
    }
    Ok(sorted)
}

/// The objects of which a third or more would be in use by `pieces`: object, offset, bytes. Pure.
///
/// An object stays as long as anybody refers to any of it: what little is left of one is better written again.
fn worth_keeping(parent: &Parent, pieces: impl Iterator<Item = (u32, u64, u64)>) -> HashSet<u32> {
    let mut used: HashMap<u32, HashMap<u64, u64>> = HashMap::new();
    for (object, offset, bytes) in pieces {
        used.entry(object).or_default().insert(offset, bytes);
    }
    let is_worth = |(object, items): &(u32, HashMap<u64, u64>)| {
        3 * items.values().sum::<u64>() >= parent.manifest.objects[*object as usize].size
    };
    used.into_iter().filter(is_worth).map(|(object, _)| object).collect()
}

/// Adds to `record` what stands in objects of other checkpoints: all of `unchanged`, the bases of `encoded`.
///
/// The latter are written already; their bases are among the parent's objects.
pub(crate) fn refer(record: &mut RankRecord, unchanged: Vec<(SaveItem, usize)>, encoded: Vec<Item>, parent: &Parent) {
    let mut places: HashMap<u32, u32> = HashMap::new();
    for item in encoded {
        let item = item.with_base(|object| place(record, parent, &mut places, object));
        record.items.push(item);
    }
    for (item, row) in unchanged {
        let stored = parent.manifest.items[row].clone().moved(|object| place(record, parent, &mut places, object));
        record.referred_bytes += stored.payload_bytes;
        record.items.push(Item { fqn: item.fqn, offsets: item.offsets, index: item.index, inline: None, ..stored });
    }
    if !record.references.is_empty() {
        record.parent = Some((parent.checkpoint_id.clone(), parent.manifest.save_id.clone()));
    }
    if record.items.iter().any(|item| item.encoding.is_some()) {
        record.encoded_in_a_row = parent.encoded_in_a_row() + 1;
    }
}

/// Where the parent's object number `object` stands in the record, to which it is added if it is not there yet.
fn place(record: &mut RankRecord, parent: &Parent, places: &mut HashMap<u32, u32>, object: u32) -> u32 {
    *places.entry(object).or_insert_with(|| {
        let object = &parent.manifest.objects[object as usize];
        let reference = number_of(&mut record.references, parent.owner(object));
        record.objects.push(Object { reference: Some(reference), ..object.clone() });
        record.objects.len() as u32 - 1
    })
}
