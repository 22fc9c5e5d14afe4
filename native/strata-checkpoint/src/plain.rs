//! Tensors in files without a container of ours, such as safetensors: contiguous, no digests.

use std::collections::HashMap;
use std::sync::Arc;

use crate::item::{Digests, Item, Kind, Object};
use crate::manifest::{Extent, Manifest};
use crate::open::{Checkpoint, Source};
use crate::servable::contiguous;
use crate::{Error, Result};

/// One contiguous tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainTensor {
    /// Name in the state_dict.
    pub fqn: Vec<u8>,
    /// File relative to the place.
    pub object: String,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// torch's name of the dtype.
    pub dtype: String,
    /// In elements.
    pub shape: Vec<u64>,
}

impl Checkpoint {
    /// A checkpoint of `tensors`, each whole.
    ///
    /// # Errors
    /// [`Error::Manifest`] if a dtype is unknown, or shape and length contradict each other.
    pub fn plain(url: &str, tensors: Vec<PlainTensor>) -> Result<Self> {
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let (mut objects, mut items) = (Vec::<Object>::new(), Vec::with_capacity(tensors.len()));
        for tensor in tensors {
            let number = *numbers.entry(tensor.object).or_insert_with_key(|name| {
                objects.push(Object { name: name.clone(), size: 0, reference: None });
                objects.len() as u32 - 1
            });
            let item = Item {
                offsets: Some(Arc::from(vec![0; tensor.shape.len()])),
                index: None,
                kind: Kind::Tensor,
                dtype: Arc::from(tensor.dtype),
                strides: Arc::from(contiguous(&tensor.shape)),
                shape: Arc::from(tensor.shape),
                object: number,
                item_offset: tensor.offset,
                item_bytes: tensor.bytes,
                payload_skip: 0,
                payload_bytes: tensor.bytes,
                digests: Digests::None,
                inline: None,
                whole_crc32: None,
                encoding: None,
                fqn: Arc::from(tensor.fqn),
            };
            let object = &mut objects[number as usize];
            Extent::from(&item).check().map_err(|detail| Error::Manifest {
                object: format!("{url}/{}", object.name),
                detail: format!("{:?}: {detail}", item.name()),
            })?;
            object.size = object.size.max(item.item_offset + item.item_bytes);
            items.push(item);
        }
        items.sort_by(|a, b| a.fqn.cmp(&b.fqn));
        let manifest = Manifest { objects, items: items.into(), ..Manifest::default() };
        Ok(Self { source: Source::Plain, manifest, beside: None, warnings: Vec::new() })
    }
}
