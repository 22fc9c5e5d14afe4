//! Records of all ranks to one manifest. Pure.

use std::collections::HashMap;

use crate::item::{Entry, Item, Object, num_blocks};
use crate::manifest::Manifest;
use crate::record::RankRecord;
use crate::{Error, Result};

/// What state_dict_metadata says of one name, and which chunks of it must have been written.
#[derive(Debug, Clone, PartialEq)]
pub struct PromisedEntry {
    /// The name and its properties.
    pub entry: Entry,
    /// (offsets, sizes) of each chunk; empty for a pickled value.
    pub chunks: Vec<(Vec<u64>, Vec<u64>)>,
}

/// One manifest of all records, if they hold each promised item once and nothing else.
pub(super) fn merge(records: &[RankRecord], promised: &[PromisedEntry]) -> Result<Manifest> {
    let mut manifest = Manifest::default();
    let mut objects = Merged::default();
    for record in records {
        let places: Vec<u32> = record.objects.iter().map(|object| objects.place(object, &record.references)).collect();
        let moved = |item: &Item| Item { object: places[item.object as usize], ..item.clone() };
        manifest.items.extend(record.items.iter().map(moved));
        manifest.payload_bytes += record.payload_bytes;
    }
    (manifest.objects, manifest.references) = (objects.objects, objects.references);
    manifest.items.sort_by(|a, b| (&a.fqn, &a.offsets).cmp(&(&b.fqn, &b.offsets)));
    check_blocks(&manifest.items)?;
    check_promises(&manifest.items, promised)?;
    manifest.entries = promised.iter().map(|promise| promise.entry.clone()).collect();
    Ok(manifest)
}

/// The objects of all ranks. Several may refer to one of another checkpoint.
#[derive(Default)]
struct Merged {
    objects: Vec<Object>,
    references: Vec<(String, String)>,
    foreign: HashMap<(u32, String), u32>,
}

impl Merged {
    /// Where `object`, of a record with `references`, stands among all.
    fn place(&mut self, object: &Object, references: &[(String, String)]) -> u32 {
        let next = self.objects.len() as u32;
        let Some(reference) = object.reference.map(|at| &references[at as usize]) else {
            self.objects.push(object.clone());
            return next;
        };
        let known = self.references.iter().position(|known| known == reference);
        let reference = known.unwrap_or_else(|| {
            self.references.push(reference.clone());
            self.references.len() - 1
        }) as u32;
        *self.foreign.entry((reference, object.name.clone())).or_insert_with(|| {
            self.objects.push(Object { reference: Some(reference), ..object.clone() });
            next
        })
    }
}

fn check_blocks(items: &[Item]) -> Result<()> {
    match items.iter().find(|item| item.digests.len() as u64 != num_blocks(item.payload_bytes)) {
        None => Ok(()),
        Some(item) => Err(Error::Plan(format!("{:?}: a rank reported no digests for it", item.name()))),
    }
}

fn check_promises(items: &[Item], promised: &[PromisedEntry]) -> Result<()> {
    let mut keys: Vec<(&[u8], Option<&[u64]>)> = Vec::with_capacity(items.len());
    for PromisedEntry { entry, chunks } in promised {
        match entry.tensor {
            None => keys.push((&entry.fqn, None)),
            Some(_) => keys.extend(chunks.iter().map(|(offsets, _)| (entry.fqn.as_slice(), Some(offsets.as_slice())))),
        }
    }
    keys.sort();
    let name = |key: &(&[u8], Option<&[u64]>)| format!("{:?} at {:?}", String::from_utf8_lossy(key.0), key.1);
    let written = items.iter().map(|item| (item.fqn.as_slice(), item.offsets.as_deref()));
    let mut keys = keys.into_iter().peekable();
    for key in written {
        match keys.next() {
            Some(expected) if expected == key => {}
            Some(expected) if expected < key => {
                return Err(Error::Plan(format!("{} was planned, but no rank wrote it", name(&expected))));
            }
            _ => {
                return Err(Error::Plan(format!("{} was written twice, or was not planned", name(&key))));
            }
        }
    }
    match keys.next() {
        None => Ok(()),
        Some(expected) => Err(Error::Plan(format!("{} was planned, but no rank wrote it", name(&expected)))),
    }
}
