//! What one rank tells the planning rank: its objects and where its items are in them.

use bytes::Bytes;
use prost::Message;
use strata_proto::v1;

use crate::item::{Item, Object};
use crate::manifest::{Shared, decode_items, encode_items};
use crate::packed::PackedItems;
use crate::{Error, Result};

/// One rank's part of a save.
#[derive(Debug, Clone, PartialEq)]
pub struct RankRecord {
    /// The rank.
    pub rank: u32,
    /// Its objects; items point into this list.
    pub objects: Vec<Object>,
    /// Its items, in the order of the plan.
    pub items: Vec<Item>,
    /// Sum of its payloads, aliases counted once.
    pub payload_bytes: u64,
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
        }
        .encode_to_vec()
    }

    /// The objects of the record in `bytes`.
    ///
    /// # Errors
    /// [`Error::Manifest`] if `bytes` are no record.
    pub fn objects_of(bytes: &[u8]) -> Result<Vec<Object>> {
        Ok(parsed(bytes)?.objects.into_iter().map(object).collect())
    }
}

/// Of all ranks, one after the other.
#[derive(Debug, Default)]
pub struct Records {
    /// All objects; items point into this list.
    pub objects: Vec<Object>,
    /// All items.
    pub items: PackedItems,
    /// Sum of the payloads, aliases of one rank counted once.
    pub payload_bytes: u64,
}

impl Records {
    /// What `records` hold.
    ///
    /// # Errors
    /// [`Error::Manifest`] if one is no record.
    pub fn decode(records: &[&[u8]]) -> Result<Self> {
        let items = PackedItems::with_room(records.iter().map(|record| record.len()).sum());
        let mut all = Self { items, ..Self::default() };
        let mut shared = Shared::default();
        for bytes in records {
            let raw = parsed(bytes)?;
            let group = raw.items.unwrap_or_default();
            let inline = Bytes::from(raw.inline);
            let items = decode_items(&group, &raw.digests, &inline, raw.objects.len(), &mut shared).map_err(fault)?;
            let first = all.objects.len() as u32;
            items.into_iter().for_each(|item| all.items.push(Item { object: item.object + first, ..item }));
            all.objects.extend(raw.objects.into_iter().map(object));
            all.payload_bytes += raw.payload_bytes;
        }
        Ok(all)
    }
}

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
    /// Object's name relative to the checkpoint.
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
