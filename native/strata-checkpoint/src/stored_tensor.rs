//! A checkpoint's tensors whole, however they are sharded, and such a checkpoint's way into files of safetensors.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::Store;
use strata_io::lent::LentMut;
use strata_io::schedule::ByteBudget;
use tokio::sync::Mutex;

use crate::container::dtype_bytes;
use crate::destination::Destination;
use crate::geometry::{boxes, shared};
use crate::item::{Item, Kind};
use crate::load::{Reading, TensorRead, VerifyMode, read};
use crate::open::Checkpoint;
use crate::payload::Payload;
use crate::progress::Progress;
use crate::record::RankRecord;
use crate::save::{SaveItem, write_safetensors};
use crate::servable::contiguous;
use crate::{Error, Result};

/// Read at once: enough that its requests keep a store busy while little memory is held.
const STRETCH_BYTES: u64 = 64 << 20;

/// One tensor as a run of row-major memory, each block of which is verified when it is read.
#[derive(Debug)]
pub struct StoredTensor {
    reading: Reading,
    checkpoint: Arc<Checkpoint>,
    rows: Vec<usize>,
    shape: Vec<u64>,
    itemsize: u64,
    /// What was read last, and where it begins: parts are asked for one after another.
    stretch: Mutex<(u64, Bytes)>,
}

impl StoredTensor {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.itemsize
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes `range` of it.
    ///
    /// # Errors
    /// As [`read`].
    pub(crate) async fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let mut stretch = self.stretch.lock().await;
        let (begin, held) = &*stretch;
        if range.start < *begin || range.end > begin + held.len() as u64 {
            let first = range.start / self.itemsize;
            let last = range.end.max(range.start + STRETCH_BYTES).min(self.len()).div_ceil(self.itemsize);
            *stretch = (first * self.itemsize, self.elements(first..last).await?);
        }
        let at = (range.start - stretch.0) as usize;
        let bytes = stretch.1.slice(at..at + (range.end - range.start) as usize);
        if range.end == self.len() {
            *stretch = (0, Bytes::new());
        }
        Ok(bytes)
    }

    async fn elements(&self, range: Range<u64>) -> Result<Bytes> {
        let mut buffer = LentMut::owned(((range.end - range.start) * self.itemsize) as usize);
        let (mut reads, mut at) = (Vec::new(), 0);
        for (first, lengths) in boxes(&self.shape, range) {
            let strides = contiguous(&lengths);
            for row in &self.rows {
                let item = &self.checkpoint.manifest.items[*row];
                let place = item.offsets.as_deref().unwrap_or_default();
                let Some((from, extents)) = shared((place, &item.shape), (&first, &lengths)) else { continue };
                let inside: Vec<u64> = from.iter().zip(place).map(|(a, b)| a - b).collect();
                let to: u64 = (0..from.len()).map(|d| (from[d] - first[d]) * strides[d]).sum();
                let to_strides: Vec<i64> = strides.iter().map(|stride| *stride as i64).collect();
                let copy = item.copy(&inside, &extents, &to_strides).ok_or_else(|| self.fault(item))?;
                let destination = Destination::in_buffer(&mut buffer, ((at + to) * self.itemsize) as usize, copy);
                reads.push(TensorRead { row: *row, destination });
            }
            at += lengths.iter().product::<u64>();
        }
        read(&self.reading, self.checkpoint.clone(), reads, &[], VerifyMode::InPlace).await?;
        Ok(Bytes::from_owner(Owned(buffer)))
    }

    fn fault(&self, item: &Item) -> Error {
        let detail = format!("{:?} is not stored as what its row says", item.name());
        Error::Manifest { object: self.reading.store.url().to_owned(), detail }
    }
}

struct Owned(LentMut);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// Writes everything that a checkpoint of ours holds as [`write_safetensors`] does, each tensor whole, of which no more
/// than a stretch is in memory. `checkpoint` has been found to hold each element once.
///
/// # Errors
/// [`Error::Plan`] if torch.save framed a tensor, or safetensors cannot hold it; as [`read`] and [`write_safetensors`].
pub async fn rewrite_safetensors(
    reading: &Reading,
    checkpoint: &Arc<Checkpoint>,
    store: &dyn Store,
    budget: &ByteBudget,
    save_id: &str,
    progress: &Arc<Progress>,
) -> Result<RankRecord> {
    // What is read waits for what is written: of one budget there might be nothing left for it.
    let reading = Reading { budget: ByteBudget::new(STRETCH_BYTES), ..reading.clone() };
    let items = whole_items(&reading, checkpoint).await?;
    write_safetensors(store, budget, items, 0, save_id, progress).await
}

async fn whole_items(reading: &Reading, checkpoint: &Arc<Checkpoint>) -> Result<Vec<SaveItem>> {
    let mut rows: HashMap<Arc<[u8]>, Vec<usize>> = HashMap::new();
    let mut row = 0;
    checkpoint.manifest.items.each(|item| {
        rows.entry(item.fqn.clone()).or_default().push(row);
        row += 1;
    });
    let mut items = Vec::with_capacity(checkpoint.manifest.entries.len());
    for entry in &checkpoint.manifest.entries {
        let (fqn, rows) = rows.remove_entry(&*entry.fqn).ok_or_else(|| {
            let detail = format!("no object holds {:?}", String::from_utf8_lossy(&entry.fqn));
            Error::Manifest { object: reading.store.url().to_owned(), detail }
        })?;
        let first = &checkpoint.manifest.items[rows[0]];
        items.push(match (&entry.tensor, first.kind) {
            (Some(tensor), Kind::Tensor) => whole(reading, checkpoint, fqn, rows, tensor.size.clone())?,
            (None, Kind::Bytes) => value(reading, checkpoint, fqn, rows[0]).await?,
            _ => return Err(Error::Plan(format!("{:?} is a tensor that only torch can read", first.name()))),
        });
    }
    Ok(items)
}

fn whole(
    reading: &Reading,
    checkpoint: &Arc<Checkpoint>,
    fqn: Arc<[u8]>,
    rows: Vec<usize>,
    shape: Vec<u64>,
) -> Result<SaveItem> {
    let first = &checkpoint.manifest.items[rows[0]];
    let dtype = first.dtype.clone();
    let itemsize = dtype_bytes(&dtype).ok_or_else(|| Error::Plan(format!("{:?}: unknown dtype", first.name())))?;
    let tensor = StoredTensor {
        reading: reading.clone(),
        checkpoint: checkpoint.clone(),
        rows,
        shape: shape.clone(),
        itemsize,
        stretch: Mutex::default(),
    };
    Ok(SaveItem {
        fqn,
        offsets: Some(vec![0; shape.len()].into()),
        index: Some(0),
        kind: Kind::Tensor,
        dtype,
        strides: contiguous(&shape).into(),
        shape: shape.into(),
        payload: Payload::Stored(Arc::new(tensor)),
    })
}

async fn value(reading: &Reading, checkpoint: &Arc<Checkpoint>, fqn: Arc<[u8]>, row: usize) -> Result<SaveItem> {
    let (mut bytes, _) = read(reading, checkpoint.clone(), Vec::new(), &[row], VerifyMode::InPlace).await?;
    Ok(SaveItem {
        fqn,
        offsets: None,
        index: None,
        kind: Kind::Bytes,
        dtype: Arc::from(""),
        shape: Arc::from([]),
        strides: Arc::from([]),
        payload: Payload::Host(bytes.remove(0)),
    })
}
