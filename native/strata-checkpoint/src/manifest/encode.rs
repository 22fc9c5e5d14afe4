//! A manifest as bytes.

use prost::Message;
use strata_io::digest::{crc32, xxh3};
use strata_proto::v1;
use strata_proto::v1::section::Kind;

use super::columns::{encode_entries, encode_items};
use super::{GROUP_ROWS, MAGIC, Manifest, READER_VERSION};
use crate::encoding::FEATURE;
use crate::item::{Item, Object};
use crate::run::RunInfo;

/// The file's bytes. Items must be sorted by fqn, then offsets.
pub fn encode(manifest: &Manifest) -> Vec<u8> {
    encode_with(manifest, manifest.items.all().iter().cloned())
}

/// As [`encode`], with `items` in the place of the manifest's own, of which no more than a section's are in memory.
pub(crate) fn encode_with(manifest: &Manifest, mut items: impl Iterator<Item = Item>) -> Vec<u8> {
    let mut body = Body::default();
    let mut entries: Vec<(u64, _)> = manifest.entries.iter().enumerate().map(|(i, e)| (i as u64, e)).collect();
    entries.sort_by(|a, b| a.1.fqn.cmp(&b.1.fqn));
    for rows in entries.chunks(GROUP_ROWS) {
        let ends = (&*rows[0].1.fqn, &*rows[rows.len() - 1].1.fqn);
        body.push(Kind::Tensors, &encode_entries(rows).encode_to_vec(), rows.len(), ends);
    }
    let (mut num_items, mut is_encoded) = (0, false);
    loop {
        let rows: Vec<Item> = items.by_ref().take(GROUP_ROWS).collect();
        if rows.is_empty() {
            break;
        }
        num_items += rows.len() as u64;
        is_encoded |= rows.iter().any(|row| row.encoding.is_some());
        let ends = (&*rows[0].fqn, &*rows[rows.len() - 1].fqn);
        let (group, digests, inline) = encode_items(&rows);
        body.push(Kind::Items, &group.encode_to_vec(), rows.len(), ends);
        body.push(Kind::Digests, &digests, rows.len(), ends);
        body.push(Kind::Inline, &inline, rows.len(), ends);
    }
    body.push(Kind::PlannerData, &manifest.planner_data, 0, (&[], &[]));

    let header = v1::ManifestHeader {
        min_reader_version: READER_VERSION,
        required_features: is_encoded.then(|| FEATURE.to_owned()).into_iter().collect(),
        writer: concat!("torch_strata ", env!("CARGO_PKG_VERSION")).to_owned(),
        save_id: manifest.save_id.clone(),
        previous_save_id: manifest.previous_save_id.clone(),
        number: manifest.number,
        created_at: manifest.created_at,
        world_size: manifest.world_size,
        rank_plus_one: manifest.rank.map_or(0, |rank| rank + 1),
        generation: manifest.generation,
        objects: manifest.objects.iter().map(stored_object).collect(),
        references: manifest.references.iter().map(stored_reference).collect(),
        sections: body.sections,
        num_items,
        payload_bytes: manifest.payload_bytes,
        run: manifest.run.as_ref().map(stored_run),
        encoded_in_a_row: manifest.encoded_in_a_row,
    }
    .encode_to_vec();

    let (length, sum) = ((header.len() as u32).to_le_bytes(), crc32(&header).to_le_bytes());
    // Into the body's own memory: there may be tens of megabytes.
    let mut file = body.bytes;
    file.splice(0..0, [&MAGIC[..], &length, &sum, &header].concat());
    file
}

fn stored_run(run: &RunInfo) -> v1::RunInfo {
    v1::RunInfo {
        step: run.step,
        epoch: run.epoch,
        checkpoint_type: run.checkpoint_type.code(),
        metadata: run.metadata.clone(),
        metrics: run.metrics.clone(),
        model_hash: run.model_hash.clone().unwrap_or_default(),
    }
}

pub(crate) fn stored_reference((checkpoint_id, save_id): &(String, String)) -> v1::Reference {
    v1::Reference { checkpoint_id: checkpoint_id.clone(), save_id: save_id.clone() }
}

pub(crate) fn stored_object(object: &Object) -> v1::StoredObject {
    v1::StoredObject { name: object.name.clone(), size: object.size, reference: object.reference.map_or(0, |r| r + 1) }
}

#[derive(Default)]
struct Body {
    bytes: Vec<u8>,
    sections: Vec<v1::Section>,
}

impl Body {
    fn push(&mut self, kind: Kind, bytes: &[u8], num_rows: usize, (first, last): (&[u8], &[u8])) {
        self.sections.push(v1::Section {
            kind: kind as i32,
            offset: self.bytes.len() as u64,
            length: bytes.len() as u64,
            xxh3: xxh3(bytes).to_le_bytes().to_vec(),
            num_rows: num_rows as u32,
            first_fqn: first.to_vec(),
            last_fqn: last.to_vec(),
            compression: String::new(),
        });
        self.bytes.extend(bytes);
    }
}
