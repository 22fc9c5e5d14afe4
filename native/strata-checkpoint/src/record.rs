//! What one rank tells the planning rank: its objects and where its items are in them.

use std::collections::{BTreeSet, HashMap};

use bytes::Bytes;
use prost::Message;
use strata_proto::v1;

use crate::item::{Item, Object};
use crate::manifest::{Shared, decode_items, encode_items};
use crate::packed::PackedItems;
use crate::{Error, Result};

/// One rank's part of a save.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankRecord {
    /// The rank.
    pub rank: u32,
    /// Its objects, and those of other checkpoints that it refers to; items point into this list.
    pub objects: Vec<Object>,
    /// (checkpoint_id below the run root, save_id) of the checkpoints that it refers to.
    pub references: Vec<(String, String)>,
    /// The checkpoint, as in `references`, whose manifest keeps all of these alive.
    pub parent: Option<(String, String)>,
    /// Its items, in the order of the plan.
    pub items: Vec<Item>,
    /// Sum of the payloads that it wrote, aliases counted once.
    pub payload_bytes: u64,
    /// Sum of the payloads that it refers to and did not write.
    pub referred_bytes: u64,
    /// Sum of the payloads that it wrote encoded.
    pub encoded_payload_bytes: u64,
    /// What these take.
    pub encoded_bytes: u64,
    /// How many checkpoints in a row, this one the last, hold encoded payloads, as far as it knows.
    pub encoded_in_a_row: u32,
}

impl RankRecord {
    /// Bytes for the way to the planning rank.
    pub fn encode(&self) -> Vec<u8> {
        let (items, digests, inline) = encode_items(&self.items);
        v1::RankRecord {
            rank: self.rank,
            objects: self.objects.iter().map(crate::manifest::stored_object).collect(),
            items: Some(items),
            digests,
            inline,
            payload_bytes: self.payload_bytes,
            references: self.references.iter().map(crate::manifest::stored_reference).collect(),
            referred_bytes: self.referred_bytes,
            parents: self.parent.iter().map(crate::manifest::stored_reference).collect(),
            encoded_payload_bytes: self.encoded_payload_bytes,
            encoded_bytes: self.encoded_bytes,
            encoded_in_a_row: self.encoded_in_a_row,
        }
        .encode_to_vec()
    }

    /// Sum of the payloads that the rank of the record in `bytes` wrote encoded, and what these take.
    ///
    /// # Errors
    /// [`Error::Manifest`] if `bytes` are no record.
    pub fn encoded(bytes: &[u8]) -> Result<(u64, u64)> {
        let record = parsed(bytes)?;
        Ok((record.encoded_payload_bytes, record.encoded_bytes))
    }

    /// The objects of the record in `bytes` that its rank wrote; not those that it refers to.
    ///
    /// # Errors
    /// [`Error::Manifest`] if `bytes` are no record.
    pub fn own_objects(bytes: &[u8]) -> Result<Vec<Object>> {
        let own = parsed(bytes)?.objects.into_iter().filter(|object| object.reference == 0);
        Ok(own.map(object).collect())
    }
}

/// Of all ranks, one after the other.
#[derive(Debug, Default)]
pub struct Records {
    /// All objects, one of another checkpoint once; items point into this list.
    pub objects: Vec<Object>,
    /// (checkpoint_id below the run root, save_id) of the checkpoints that objects belong to.
    pub references: Vec<(String, String)>,
    /// The checkpoints, as in `references`, whose manifests keep all of these alive.
    pub parents: BTreeSet<(String, String)>,
    /// All items.
    pub items: PackedItems,
    /// Sum of the payloads that were written, aliases of one rank counted once.
    pub payload_bytes: u64,
    /// Sum of the payloads that are referred to and were not written.
    pub referred_bytes: u64,
    /// How many checkpoints in a row, this one the last, hold encoded payloads.
    pub encoded_in_a_row: u32,
}

impl Records {
    /// What `records` hold.
    ///
    /// # Errors
    /// [`Error::Manifest`] if one is no record, or refers to a checkpoint that it does not list.
    pub fn decode(records: &[&[u8]]) -> Result<Self> {
        let items = PackedItems::with_room(records.iter().map(|record| record.len()).sum());
        let mut all = Self { items, ..Self::default() };
        let (mut shared, mut foreign) = (Shared::default(), Foreign::new());
        for bytes in records {
            let raw = parsed(bytes)?;
            let group = raw.items.unwrap_or_default();
            let inline = Bytes::from(raw.inline);
            let items = decode_items(&group, &raw.digests, &inline, raw.objects.len(), &mut shared).map_err(fault)?;
            let place = |object| all.place(object, &raw.references, &mut foreign);
            let places: Vec<u32> = raw.objects.into_iter().map(place).collect::<Result<_>>()?;
            items.into_iter().for_each(|item| all.items.push(item.moved(|object| places[object as usize])));
            all.parents.extend(raw.parents.into_iter().map(|parent| (parent.checkpoint_id, parent.save_id)));
            all.payload_bytes += raw.payload_bytes;
            all.referred_bytes += raw.referred_bytes;
            all.encoded_in_a_row = all.encoded_in_a_row.max(raw.encoded_in_a_row);
        }
        Ok(all)
    }

    /// Where `stored`, of a record with `references`, stands among all. Ranks may refer to the same one.
    fn place(&mut self, stored: v1::StoredObject, references: &[v1::Reference], foreign: &mut Foreign) -> Result<u32> {
        let next = self.objects.len() as u32;
        let reference = match stored.reference.checked_sub(1) {
            None => None,
            Some(at) => {
                let named = references.get(at as usize);
                let named = named.ok_or_else(|| fault("an object refers to a checkpoint that is not listed".into()))?;
                Some(number_of(&mut self.references, (named.checkpoint_id.clone(), named.save_id.clone())))
            }
        };
        if let Some(reference) = reference {
            let place = *foreign.entry((reference, stored.name.clone())).or_insert(next);
            if place < next {
                return Ok(place);
            }
        }
        self.objects.push(Object { reference, ..object(stored) });
        Ok(next)
    }
}

/// Position of `reference` among `references`, to which it is added if it is not there yet.
pub(crate) fn number_of(references: &mut Vec<(String, String)>, reference: (String, String)) -> u32 {
    let known = references.iter().position(|known| *known == reference);
    known.unwrap_or_else(|| {
        references.push(reference);
        references.len() - 1
    }) as u32
}

/// Places of objects of other checkpoints, by reference and name.
type Foreign = HashMap<(u32, String), u32>;

fn parsed(bytes: &[u8]) -> Result<v1::RankRecord> {
    v1::RankRecord::decode(bytes).map_err(|error| fault(error.to_string()))
}

fn fault(detail: String) -> Error {
    Error::Manifest { object: "record of a rank".into(), detail }
}

fn object(stored: v1::StoredObject) -> Object {
    Object { name: stored.name, size: stored.size, reference: None }
}

/// One item as `.metadata` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StockEntry {
    /// Name in the state_dict.
    pub fqn: Vec<u8>,
    /// Of the chunk; None for a pickled value.
    pub offsets: Option<Vec<u64>>,
    /// DCP's index hint.
    pub index: Option<u32>,
    /// Path of the object from the checkpoint.
    pub object: String,
    /// First byte of the framed item.
    pub offset: u64,
    /// Length of the framed item.
    pub length: u64,
}

impl StockEntry {
    /// The entry of `item`, which is in one of `objects`.
    pub fn of(item: Item, object: String) -> Self {
        Self {
            object,
            fqn: item.fqn.to_vec(),
            offsets: item.offsets.map(|offsets| offsets.to_vec()),
            index: item.index,
            offset: item.item_offset,
            length: item.item_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::item::{Digests, Kind};

    fn item(fqn: &str, object: u32) -> Item {
        Item {
            fqn: Arc::from(fqn.as_bytes()),
            offsets: None,
            index: None,
            kind: Kind::Bytes,
            dtype: Arc::from(""),
            shape: Arc::from([]),
            strides: Arc::from([]),
            object,
            item_offset: 0,
            item_bytes: 0,
            payload_skip: 0,
            payload_bytes: 0,
            digests: Digests::None,
            inline: None,
            whole_crc32: None,
            encoding: None,
        }
    }

    fn object(name: &str, reference: Option<u32>) -> Object {
        Object { name: name.to_owned(), size: 9, reference }
    }

    fn owner(step: u32) -> (String, String) {
        (format!("step-{step}"), step.to_string())
    }

    #[test]
    fn what_several_ranks_refer_to_is_one_object() {
        let first = RankRecord {
            objects: vec![object("own", None), object("old", Some(0))],
            references: vec![owner(1)],
            items: vec![item("a", 0), item("b", 1)],
            payload_bytes: 3,
            referred_bytes: 4,
            ..RankRecord::default()
        };
        let second = RankRecord {
            objects: vec![object("old", Some(1)), object("old", Some(0)), object("own", None)],
            references: vec![owner(0), owner(1)],
            items: vec![item("c", 0), item("d", 1), item("e", 2)],
            payload_bytes: 5,
            referred_bytes: 6,
            ..RankRecord::default()
        };
        let all = Records::decode(&[&first.encode(), &second.encode()]).expect("records");
        let objects = [object("own", None), object("old", Some(0)), object("old", Some(1)), object("own", None)];
        assert_eq!(all.objects, objects);
        assert_eq!(all.references, [owner(1), owner(0)]);
        let places: Vec<u32> = all.items.iter().map(|item| item.object).collect();
        assert_eq!(places, [0, 1, 1, 2, 3]);
        assert_eq!((all.payload_bytes, all.referred_bytes), (8, 10));
        let own = RankRecord::own_objects(&second.encode()).expect("a record");
        assert_eq!(own, [object("own", None)], "what is referred to is not this save's to remove");
    }

    #[test]
    fn a_record_that_refers_to_a_checkpoint_that_it_does_not_list_is_refused() {
        let record = RankRecord { objects: vec![object("old", Some(0))], ..RankRecord::default() };
        let refused = Records::decode(&[&record.encode()]).expect_err("not listed");
        assert!(refused.to_string().contains("not listed"), "{refused}");
    }
}
