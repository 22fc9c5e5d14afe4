//! Items of many ranks in a third of the memory that values take: what many have in common is kept once.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::digest::BlockDigest;

use crate::encoding::Encoding;
use crate::item::{Digests, Dims, Item, Kind, num_blocks};
use crate::manifest::Key;

/// Items, each of which is made when it is looked at.
#[derive(Debug, Default)]
pub struct PackedItems {
    rows: Vec<Packed>,
    names: Table<Arc<[u8]>>,
    places: Table<Option<Dims>>,
    forms: Table<Form>,
    digests: Vec<(u32, [u8; 16])>,
    inline: Vec<Bytes>,
    encodings: Vec<Arc<Encoding>>,
}

/// One item; numbers of what is in the tables.
#[derive(Debug, Clone, Copy)]
struct Packed {
    item_offset: u64,
    name: u32,
    place: u32,
    form: u32,
    object: u32,
    index_plus_one: u32,
    first_digest: u32,
    inline_plus_one: u32,
    encoding_plus_one: u32,
}

/// What shards of one tensor, and tensors of one shape, have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Form {
    kind: Kind,
    dtype: Arc<str>,
    shape: Dims,
    strides: Dims,
    item_bytes: u64,
    payload_skip: u64,
    payload_bytes: u64,
}

/// The fewest bytes of a record that are one item's: a digest and its numbers.
const LEAST_BYTES: usize = 32;

impl PackedItems {
    /// For what `bytes` of records hold: what grows step by step leaves as much behind as it is itself.
    pub fn with_room(bytes: usize) -> Self {
        let most = bytes / LEAST_BYTES;
        Self { rows: Vec::with_capacity(most), digests: Vec::with_capacity(most), ..Self::default() }
    }

    /// Adds an item, which has the digests of all its blocks.
    pub fn push(&mut self, item: Item) {
        debug_assert_eq!(item.digests.len() as u64, num_blocks(item.payload_bytes), "{:?}", item.name());
        let form = Form {
            kind: item.kind,
            dtype: item.dtype,
            shape: item.shape,
            strides: item.strides,
            item_bytes: item.item_bytes,
            payload_skip: item.payload_skip,
            payload_bytes: item.payload_bytes,
        };
        let first_digest = self.digests.len() as u32;
        self.digests.extend(item.digests.iter().map(|digest| (digest.crc32, digest.xxh3.to_le_bytes())));
        let inline_plus_one = item.inline.map_or(0, |bytes| {
            self.inline.push(*bytes);
            self.inline.len() as u32
        });
        let encoding_plus_one = item.encoding.map_or(0, |encoding| {
            self.encodings.push(encoding);
            self.encodings.len() as u32
        });
        self.rows.push(Packed {
            item_offset: item.item_offset,
            name: self.names.number(item.fqn),
            place: self.places.number(item.offsets),
            form: self.forms.number(form),
            object: item.object,
            index_plus_one: item.index.map_or(0, |index| index + 1),
            first_digest,
            inline_plus_one,
            encoding_plus_one,
        });
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Sorts them as a manifest has them: by fqn, then offsets.
    pub fn sort(&mut self) {
        let (names, places) = (&self.names.values, &self.places.values);
        self.rows.sort_unstable_by(|a, b| {
            // Of one tensor there are as many as ranks.
            let by_name = if a.name == b.name {
                std::cmp::Ordering::Equal
            } else {
                names[a.name as usize].cmp(&names[b.name as usize])
            };
            by_name.then_with(|| places[a.place as usize].cmp(&places[b.place as usize]))
        });
    }

    /// Name and place of each.
    pub fn keys(&self) -> impl Iterator<Item = Key<'_>> {
        self.rows
            .iter()
            .map(|row| (&*self.names.values[row.name as usize], self.places.values[row.place as usize].as_deref()))
    }

    /// Each in turn.
    pub fn iter(&self) -> impl Iterator<Item = Item> {
        self.rows.iter().map(|row| self.made(row))
    }

    fn made(&self, row: &Packed) -> Item {
        let form = self.forms.values[row.form as usize].clone();
        let first = row.first_digest as usize;
        let digests = &self.digests[first..first + num_blocks(form.payload_bytes) as usize];
        let digest = |(crc32, xxh3): &(u32, [u8; 16])| BlockDigest { crc32: *crc32, xxh3: u128::from_le_bytes(*xxh3) };
        let inline = row.inline_plus_one.checked_sub(1).map(|number| Box::new(self.inline[number as usize].clone()));
        Item {
            fqn: self.names.values[row.name as usize].clone(),
            offsets: self.places.values[row.place as usize].clone(),
            index: row.index_plus_one.checked_sub(1),
            kind: form.kind,
            dtype: form.dtype,
            shape: form.shape,
            strides: form.strides,
            object: row.object,
            item_offset: row.item_offset,
            item_bytes: form.item_bytes,
            payload_skip: form.payload_skip,
            payload_bytes: form.payload_bytes,
            digests: digests.iter().map(digest).collect::<Digests>(),
            inline,
            whole_crc32: None,
            encoding: row.encoding_plus_one.checked_sub(1).map(|number| self.encodings[number as usize].clone()),
        }
    }
}

/// Values, each once.
#[derive(Debug)]
struct Table<T> {
    values: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { values: Vec::new(), numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Table<T> {
    fn number(&mut self, value: T) -> u32 {
        *self.numbers.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            self.values.len() as u32 - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(fqn: &str, offsets: Option<&[u64]>, item_offset: u64, payload_bytes: u64) -> Item {
        let digest = |block| BlockDigest { crc32: item_offset as u32 + block as u32, xxh3: u128::from(block) << 100 };
        Item {
            fqn: Arc::from(fqn.as_bytes()),
            offsets: offsets.map(Arc::from),
            index: item_offset.is_multiple_of(2).then_some(item_offset as u32),
            kind: if offsets.is_some() { Kind::Tensor } else { Kind::Bytes },
            dtype: Arc::from("uint8"),
            shape: Arc::from([payload_bytes]),
            strides: Arc::from([1]),
            object: 7,
            item_offset,
            item_bytes: payload_bytes + 100,
            payload_skip: 64,
            payload_bytes,
            digests: (0..num_blocks(payload_bytes)).map(digest).collect(),
            inline: (payload_bytes < 10).then(|| Box::new(Bytes::from(vec![3; payload_bytes as usize]))),
            whole_crc32: None,
            encoding: None,
        }
    }

    #[test]
    fn packed_items_come_back_as_they_were_sorted_by_name_and_place() {
        let sorted = [
            item("a", None, 5, 3),
            item("b", Some(&[0]), 4, 9 << 20),
            item("b", Some(&[1]), 1, 0),
            item("b", Some(&[1, 0]), 3, 20),
            item("c", Some(&[0]), 2, 9 << 20),
        ];
        let mut packed = PackedItems::with_room(0);
        [4, 1, 3, 0, 2].into_iter().for_each(|row: usize| packed.push(sorted[row].clone()));
        packed.sort();
        assert_eq!(packed.iter().collect::<Vec<_>>(), sorted);
        assert!(packed.keys().eq(sorted.iter().map(|item| (&*item.fqn, item.offsets.as_deref()))));
    }
}
