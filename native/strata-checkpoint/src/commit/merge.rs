//! Records of all ranks to one manifest. Pure.

use crate::item::{Entry, Item, num_blocks};
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
    for record in records {
        let first = manifest.objects.len() as u32;
        manifest.objects.extend(record.objects.iter().cloned());
        let moved = |item: &Item| Item { object: item.object + first, ..item.clone() };
        manifest.items.extend(record.items.iter().map(moved));
        manifest.payload_bytes += record.payload_bytes;
    }
    manifest.items.sort_by(|a, b| (&a.fqn, &a.offsets).cmp(&(&b.fqn, &b.offsets)));
    check_blocks(&manifest.items)?;
    check_promises(&manifest.items, promised)?;
    manifest.entries = promised.iter().map(|promise| promise.entry.clone()).collect();
    Ok(manifest)
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
