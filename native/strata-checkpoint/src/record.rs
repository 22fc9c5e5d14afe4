//! What one rank tells the planning rank: its objects and where its items are in them.

use bytes::Bytes;
use prost::Message;
use strata_proto::v1;

use crate::item::{Item, Object};
use crate::manifest::{decode_items, encode_items};
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
    /// Its items, in the order of the plan.
    pub items: Vec<Item>,
    /// Sum of the payloads that it wrote, aliases counted once.
    pub payload_bytes: u64,
    /// Sum of the payloads that it refers to and did not write.
    pub referred_bytes: u64,
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
        }
        .encode_to_vec()
    }

    /// The record in `bytes`.
    ///
    /// # Errors
    /// [`Error::Manifest`] if `bytes` are no record.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fault = |detail: String| Error::Manifest { object: "record of a rank".into(), detail };
        let raw = v1::RankRecord::decode(bytes).map_err(|error| fault(error.to_string()))?;
        let group = raw.items.unwrap_or_default();
        let items = decode_items(&group, &raw.digests, &Bytes::from(raw.inline), raw.objects.len()).map_err(fault)?;
        let object = |object: v1::StoredObject| {
            let reference = object.reference.checked_sub(1);
            let is_listed = reference.is_none_or(|at| (at as usize) < raw.references.len());
            let object = Object { name: object.name, size: object.size, reference };
            if is_listed {
                Ok(object)
            } else {
                Err(fault("an object refers to a checkpoint that is not listed".into()))
            }
        };
        Ok(Self {
            rank: raw.rank,
            objects: raw.objects.into_iter().map(object).collect::<Result<_>>()?,
            references: raw.references.iter().map(|r| (r.checkpoint_id.clone(), r.save_id.clone())).collect(),
            items,
            payload_bytes: raw.payload_bytes,
            referred_bytes: raw.referred_bytes,
        })
    }
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

/// What `.metadata` has to say of every item in `records`.
///
/// # Errors
/// [`Error::Manifest`] if one is no record.
pub fn stock_entries(records: &[impl AsRef<[u8]>]) -> Result<Vec<StockEntry>> {
    let mut entries = Vec::new();
    for record in records {
        let RankRecord { objects, references, items, .. } = RankRecord::decode(record.as_ref())?;
        let paths: Vec<String> = objects.iter().map(|object| object.path(&references)).collect();
        entries.extend(items.into_iter().map(|item| {
            let path = paths[item.object as usize].clone();
            StockEntry::of(item, path)
        }));
    }
    Ok(entries)
}

impl StockEntry {
    /// The entry of `item`, which is in one of `objects`.
    pub fn of(item: Item, object: String) -> Self {
        Self {
            object,
            fqn: item.fqn,
            offsets: item.offsets,
            index: item.index,
            offset: item.item_offset,
            length: item.item_bytes,
        }
    }
}
