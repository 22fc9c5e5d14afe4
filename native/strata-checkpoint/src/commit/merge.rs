//! Records of all ranks to one manifest. Pure.

use crate::item::Entry;
use crate::manifest::{Key, Manifest};
use crate::packed::PackedItems;
use crate::record::Records;
use crate::{Error, Result};

/// What state_dict_metadata says, and which chunks must have been written.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Promises {
    /// Names and their properties, in the order of the state_dict.
    pub entries: Vec<Entry>,
    /// Where the chunks of each entry begin, and the end of the last; a pickled value has none.
    pub first_chunks: Vec<usize>,
    /// Where the dims of each chunk begin, and the end of the last.
    pub first_dims: Vec<usize>,
    /// First element of each chunk, dims of all chunks one after the other.
    pub offsets: Vec<u64>,
}

impl Promises {
    /// What an item must be called: an entry that is a tensor has chunks, another one no place.
    fn key(&self, entry: usize, chunk: usize) -> Key<'_> {
        let Entry { fqn, tensor } = &self.entries[entry];
        (fqn, tensor.is_some().then(|| &self.offsets[self.first_dims[chunk]..self.first_dims[chunk + 1]]))
    }
}

/// One manifest of all records, if they hold each promised item once and nothing else. Its items are beside it.
pub(super) fn merge(records: Records, promises: Promises) -> Result<(Manifest, PackedItems)> {
    let Records { objects, references, mut items, payload_bytes, encoded_in_a_row, .. } = records;
    items.sort();
    check_promises(&items, &promises)?;
    let entries = promises.entries;
    let manifest = Manifest { objects, references, payload_bytes, entries, encoded_in_a_row, ..Manifest::default() };
    Ok((manifest, items))
}

fn check_promises(items: &PackedItems, promises: &Promises) -> Result<()> {
    let mut chunks: Vec<(u32, u32)> = Vec::with_capacity(items.len());
    for (number, entry) in promises.entries.iter().enumerate() {
        let first = promises.first_chunks[number];
        let count = if entry.tensor.is_some() { promises.first_chunks[number + 1] - first } else { 1 };
        chunks.extend((first..first + count).map(|chunk| (number as u32, chunk as u32)));
    }
    let key = |(entry, chunk): (u32, u32)| promises.key(entry as usize, chunk as usize);
    chunks.sort_unstable_by(|a, b| key(*a).cmp(&key(*b)));
    let name = |key: &Key<'_>| format!("{:?} at {:?}", String::from_utf8_lossy(key.0), key.1);
    let mut keys = chunks.into_iter().map(key);
    for written in items.keys() {
        match keys.next() {
            Some(expected) if expected == written => {}
            Some(expected) if expected < written => {
                return Err(Error::Plan(format!("{} was planned, but no rank wrote it", name(&expected))));
            }
            _ => {
                return Err(Error::Plan(format!("{} was written twice, or was not planned", name(&written))));
            }
        }
    }
    match keys.next() {
        None => Ok(()),
        Some(expected) => Err(Error::Plan(format!("{} was planned, but no rank wrote it", name(&expected)))),
    }
}
