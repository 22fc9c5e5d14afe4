//! Records of all ranks to one manifest. Pure.

use crate::item::{Entry, Item, num_blocks};
use crate::manifest::Manifest;
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
    fn offsets_of(&self, entry: usize) -> impl Iterator<Item = &[u64]> {
        let chunks = self.first_chunks[entry]..self.first_chunks[entry + 1];
        chunks.map(|chunk| &self.offsets[self.first_dims[chunk]..self.first_dims[chunk + 1]])
    }
}

/// One manifest of all records, if they hold each promised item once and nothing else.
pub(super) fn merge(records: Records, promises: Promises) -> Result<Manifest> {
    let Records { objects, mut items, payload_bytes } = records;
    items.sort_unstable_by(|a, b| (&a.fqn, &a.offsets).cmp(&(&b.fqn, &b.offsets)));
    check_blocks(&items)?;
    check_promises(&items, &promises)?;
    Ok(Manifest { objects, items: items.into(), payload_bytes, entries: promises.entries, ..Manifest::default() })
}

fn check_blocks(items: &[Item]) -> Result<()> {
    match items.iter().find(|item| item.digests.len() as u64 != num_blocks(item.payload_bytes)) {
        None => Ok(()),
        Some(item) => Err(Error::Plan(format!("{:?}: a rank reported no digests for it", item.name()))),
    }
}

fn check_promises(items: &[Item], promises: &Promises) -> Result<()> {
    let mut keys: Vec<(&[u8], Option<&[u64]>)> = Vec::with_capacity(items.len());
    for (number, entry) in promises.entries.iter().enumerate() {
        match entry.tensor {
            None => keys.push((&entry.fqn, None)),
            Some(_) => keys.extend(promises.offsets_of(number).map(|offsets| (entry.fqn.as_slice(), Some(offsets)))),
        }
    }
    keys.sort_unstable();
    let name = |key: &(&[u8], Option<&[u64]>)| format!("{:?} at {:?}", String::from_utf8_lossy(key.0), key.1);
    let written = items.iter().map(|item| (&*item.fqn, item.offsets.as_deref()));
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
