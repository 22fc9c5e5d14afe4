//! Items that stock torch wrote: `.metadata` says where they are, their own zip archive what they are.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::stream::{self, StreamExt, TryStreamExt};
use strata_io::Store;

use crate::container::{ContainerError, ParsedItem, Step, Window, dtype_bytes, parse, span};
use crate::geometry::overlaps;
use crate::item::{Digests, Item, Kind, Object};
use crate::manifest::{FOLDER, Manifest};
use crate::names::{is_inside, is_our_data_object};
use crate::open::{Checkpoint, Source};
use crate::record::StockEntry;
use crate::stock_pickle::is_sealed;
use crate::{Error, Result};

/// Heads and tails read at a time; the store bounds its own concurrency below this.
const READS_AHEAD: usize = 64;

impl Checkpoint {
    /// Takes what `.metadata` lists; where that is all in a manifest [`Checkpoint::beside`] it, takes the manifest.
    ///
    /// Tensors count as [`Kind::TorchSave`] until [`resolve`] has looked at them.
    ///
    /// # Errors
    /// [`Error::Manifest`] if an entry leaves the checkpoint or overflows.
    pub fn set_stock_entries(&mut self, url: &str, entries: Vec<StockEntry>) -> Result<()> {
        let fault = |detail: String| Error::Manifest { object: format!("{url}/.metadata"), detail };
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let (mut objects, mut items) = (Vec::<Object>::new(), Vec::with_capacity(entries.len()));
        for entry in entries {
            let end = entry.offset.checked_add(entry.length).filter(|end| *end <= i64::MAX as u64);
            let end = end.ok_or_else(|| fault(format!("an item of {:?} ends behind any file", entry.object)))?;
            if !is_inside(&entry.object) {
                return Err(fault(format!("{:?} is not a name inside the checkpoint", entry.object)));
            }
            let number = *numbers.entry(entry.object).or_insert_with_key(|name| {
                objects.push(Object { name: name.clone(), size: 0, reference: None });
                objects.len() as u32 - 1
            });
            let object = &mut objects[number as usize];
            object.size = object.size.max(end);
            items.push(Item {
                fqn: Arc::from(entry.fqn),
                kind: if entry.offsets.is_some() { Kind::TorchSave } else { Kind::Bytes },
                offsets: entry.offsets.map(Arc::from),
                index: entry.index,
                dtype: Arc::from(""),
                shape: Arc::default(),
                strides: Arc::default(),
                object: number,
                item_offset: entry.offset,
                item_bytes: entry.length,
                payload_skip: 0,
                payload_bytes: entry.length,
                digests: Digests::None,
                inline: None,
                whole_crc32: None,
                encoding: None,
            });
        }
        items.sort_by(|a, b| (&a.fqn, &a.offsets).cmp(&(&b.fqn, &b.offsets)));
        if let Some(beside) = self.beside.take_if(|beside| beside.holds_all(&objects)) {
            // Stock never writes into an object of ours, so nobody but us can have saved what this names.
            self.keep(beside.manifest, format!("{url}/.metadata carries another save_id than the save that it lists"));
            return Ok(());
        }
        self.manifest = Manifest { objects, items: items.into(), ..Manifest::default() };
        self.warnings.extend(self.lost_manifest(url));
        Ok(())
    }

    /// What is wrong with a stock checkpoint whose data is ours: it had a manifest, and so digests.
    pub(crate) fn lost_manifest(&self, url: &str) -> Option<String> {
        let Source::Stock(index) = &self.source else { return None };
        let ours = self.manifest.objects.iter().map(|object| &*object.name).find(|name| is_our_data_object(name));
        // What refers to others for all that it holds has no data of its own.
        let ours = ours.or_else(|| is_sealed(index).map(|_| ".metadata"))?;
        Some(format!(
            "{url}: no manifest in {FOLDER} is of the save that wrote {ours}; it is read by .metadata alone, without its \
             digests"
        ))
    }
}

/// Looks at the archives of `rows`; those that hold one plain tensor become [`Kind::Tensor`].
///
/// # Errors
/// What the store says; [`Error::Manifest`] if an archive contradicts itself.
pub async fn resolve(store: &dyn Store, checkpoint: &mut Checkpoint, rows: &[usize]) -> Result<()> {
    let manifest = &checkpoint.manifest;
    let unresolved: HashSet<usize> =
        rows.iter().copied().filter(|row| manifest.items[*row].kind == Kind::TorchSave).collect();
    let looks = unresolved.into_iter().map(|row| {
        let item = manifest.items[row].clone();
        let name = manifest.objects[item.object as usize].name.clone();
        async move { Ok::<_, Error>((row, look(store, &name, item).await?)) }.boxed()
    });
    let looks: Vec<_> = looks.collect();
    let resolved: Vec<(usize, Item)> = stream::iter(looks).buffer_unordered(READS_AHEAD).try_collect().await?;
    for (row, item) in resolved {
        checkpoint.manifest.items[row] = item;
    }
    Ok(())
}

async fn look(store: &dyn Store, name: &str, item: Item) -> Result<Item> {
    let mut windows: Vec<(u64, Bytes)> = Vec::new();
    loop {
        let view: Vec<Window<'_>> = windows.iter().map(|(start, bytes)| Window { start: *start, bytes }).collect();
        match parse(item.item_bytes, &view) {
            Ok(Step::NeedRange(range)) => {
                let file = item.item_offset + range.start..item.item_offset + range.end;
                windows.push((range.start, store.read(name, Some(file)).await?));
            }
            // Elements that share memory are left to torch: our copies go through the payload in one direction.
            Ok(Step::Done(parsed)) if overlaps(&parsed.shape, &parsed.strides) => return Ok(item),
            Ok(Step::Done(parsed)) => return Ok(as_tensor(item, parsed)),
            Err(ContainerError::Unrecognised(_)) => return Ok(item),
            Err(error) => {
                let object = format!("{}/{name}", store.url());
                return Err(Error::Manifest { object, detail: format!("{:?}: {error}", item.name()) });
            }
        }
    }
}

/// The payload becomes the part of the storage that the tensor reaches.
fn as_tensor(item: Item, parsed: ParsedItem) -> Item {
    let itemsize = dtype_bytes(&parsed.dtype).expect("parsed dtypes are known");
    let payload_bytes = span(&parsed.shape, &parsed.strides).expect("parsed geometry is bounded") * itemsize;
    let first = parsed.storage_offset * itemsize;
    let is_whole = payload_bytes == parsed.payload.end - parsed.payload.start;
    Item {
        kind: Kind::Tensor,
        dtype: Arc::from(parsed.dtype.as_str()),
        shape: Arc::from(parsed.shape),
        strides: Arc::from(parsed.strides),
        payload_skip: parsed.payload.start + first,
        payload_bytes,
        whole_crc32: parsed.crc32.filter(|_| is_whole),
        ..item
    }
}
