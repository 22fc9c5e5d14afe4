//! What was saved encoded is loaded as it was, whole and in ranges.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use strata_io::schedule::ByteBudget;
use strata_io::{IoConfig, Store};

use super::*;
use crate::container::dtype_bytes;
use crate::geometry::StridedCopy;
use crate::item::{Entry, Kind, TensorEntry};
use crate::load::{Reading, TensorRead, VerifyMode, read};
use crate::open::{Checkpoint, open};
use crate::payload::Payload;
use crate::record::Records;
use crate::save::{SaveItem, write_items};
use crate::unchanged::Parent;
use crate::{Commit, Destination, Promises, commit, open_base};

const BLOCK: usize = strata_io::digest::BLOCK_BYTES as usize;

fn budget() -> ByteBudget {
    ByteBudget::new(64 << 20)
}

fn memory() -> Arc<dyn Store> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let config = IoConfig {
        budget: budget(),
        max_concurrency: 4,
        part_bytes: 16 << 20,
        fsync: false,
        direct_io: false,
        max_tries: 1,
        deadline: Duration::from_secs(10),
    };
    let url = format!("memory://encoded-{}/root", NUMBER.fetch_add(1, Relaxed));
    strata_io::open(&url, &BTreeMap::new(), &config).expect("a store")
}

/// Elements whose low byte is noise, their others less so.
fn content(dtype: &str, bytes: usize, seed: u64) -> Bytes {
    let width = dtype_bytes(dtype).expect("known") as usize;
    let byte = |i: usize| {
        let mut mixed = (i as u64 + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let noise = (mixed >> 56) as u8;
        if i.is_multiple_of(width) && width > 1 { noise } else { noise & 15 }
    };
    (0..bytes).map(byte).collect::<Vec<u8>>().into()
}

/// The same with another low bit here and there.
fn moved_on(bytes: &Bytes, width: usize) -> Bytes {
    bytes.iter().enumerate().map(|(i, byte)| byte ^ u8::from(i % (11 * width) == 0)).collect::<Vec<u8>>().into()
}

type Tensor = (&'static str, &'static str, Bytes);

fn item((fqn, dtype, bytes): &Tensor) -> SaveItem {
    let count = bytes.len() as u64 / dtype_bytes(dtype).expect("known");
    SaveItem {
        fqn: Arc::from(fqn.as_bytes()),
        offsets: Some(Arc::from([0])),
        index: None,
        kind: Kind::Tensor,
        dtype: Arc::from(*dtype),
        shape: Arc::from([count]),
        strides: Arc::from([1]),
        payload: Payload::Host(bytes.clone()),
    }
}

fn entry((fqn, dtype, bytes): &Tensor) -> Entry {
    let tensor = TensorEntry {
        dtype: (*dtype).to_owned(),
        size: vec![bytes.len() as u64 / dtype_bytes(dtype).expect("known")],
        strides: None,
        requires_grad: false,
        pin_memory: false,
        memory_format: 0,
        layout: "strided".to_owned(),
    };
    Entry { fqn: fqn.as_bytes().to_vec(), tensor: Some(tensor) }
}

/// Saves, beside the folder `parent`.
async fn save(root: &dyn Store, folder: &str, tensors: &[Tensor], parent: Option<&str>) {
    let store = root.child(folder).expect("plain");
    let parent = match parent {
        None => Parent::none(),
        Some(folder) => Parent::open(&*root.child(folder).expect("plain"), folder).await.expect("a parent"),
    };
    let (parent, items) = (Arc::new(parent.encoding()), tensors.iter().map(item).collect());
    let base = open_base(&*store, None).await.expect("looked at");
    let record = write_items(&*store, &budget(), items, 0, folder, Some(&parent), &Arc::default()).await;
    let record = record.expect("written").encode();
    let bounds: Vec<usize> = (0..=tensors.len()).collect();
    let job = Commit {
        records: Records::decode(&[&record]).expect("a record"),
        promises: Promises {
            entries: tensors.iter().map(entry).collect(),
            first_chunks: bounds.clone(),
            first_dims: bounds,
            offsets: vec![0; tensors.len()],
        },
        planner_data: Vec::new(),
        stock: None,
        save_id: folder.to_owned(),
        previous_save_id: String::new(),
        rank: None,
        world_size: 1,
        generation: 0,
        run: None,
        run_root: None,
    };
    commit(&*store, &base, job).await.expect("committed");
}

async fn opened(root: &dyn Store, folder: &str) -> (Reading, Arc<Checkpoint>) {
    let store = root.child(folder).expect("plain");
    let checkpoint = Arc::new(open(&*store, None).await.expect("opens"));
    (Reading { store, budget: budget(), progress: Arc::default() }, checkpoint)
}

fn encoding_of(checkpoint: &Checkpoint, fqn: &str) -> Option<&'static str> {
    let row = checkpoint.rows(&[(fqn.as_bytes(), Some(&[0]))])[0].expect("is in it");
    checkpoint.manifest.items[row].encoding.as_ref().map(|encoding| encoding.name())
}

#[tokio::test]
async fn every_range_of_every_element_size_is_the_slice_that_was_saved() {
    let root = memory();
    let lengths = [16 << 10, 100_000, BLOCK, BLOCK + 70_000];
    let tensors: Vec<Tensor> = [
        ("a", "uint8", lengths[1]),
        ("b", "bfloat16", lengths[3]),
        ("c", "float32", lengths[0]),
        ("d", "float64", lengths[1]),
        ("e", "complex64", lengths[1]),
        ("f", "complex128", lengths[2]),
    ]
    .into_iter()
    .map(|(fqn, dtype, bytes)| (fqn, dtype, content(dtype, bytes, bytes as u64)))
    .collect();
    save(&*root, "step-1", &tensors, None).await;
    let after: Vec<Tensor> = tensors
        .iter()
        .map(|(fqn, dtype, bytes)| (*fqn, *dtype, moved_on(bytes, dtype_bytes(dtype).expect("known") as usize)))
        .collect();
    save(&*root, "step-2", &after, Some("step-1")).await;
    let (reading, checkpoint) = opened(&*root, "step-2").await;
    assert_eq!(encoding_of(&checkpoint, "b"), Some("xor-planes-zstd"));
    assert!(checkpoint.manifest.is_encoded && checkpoint.manifest.encoded_in_a_row == 1);

    for (fqn, _, bytes) in &after {
        let row = checkpoint.rows(&[(fqn.as_bytes(), Some(&[0]))])[0].expect("is in it");
        let length = bytes.len();
        let mut ranges = vec![0..length, 0..1, length - 1..length, 5..length - 3, length / 2..length / 2];
        if length > BLOCK {
            ranges.extend([BLOCK - 1..BLOCK + 1, BLOCK..length, 3..BLOCK]);
        }
        for (number, range) in ranges.into_iter().enumerate() {
            let mut buffer = LentMut::owned(range.end - range.start);
            let copy = StridedCopy::of_bytes(range.start as u64..range.end as u64);
            let tensor = TensorRead { row, destination: Destination::of_buffer(&mut buffer, copy) };
            let mode = if number % 2 == 0 { VerifyMode::InPlace } else { VerifyMode::Before };
            let (_, stats) = read(&reading, checkpoint.clone(), vec![tensor], &[], mode).await.expect("reads");
            assert!(buffer.as_slice() == &bytes[range.clone()], "{fqn} {range:?}");
            let blocks = if range.is_empty() { 0 } else { (range.end - 1) / BLOCK - range.start / BLOCK + 1 };
            assert_eq!(stats.blocks_verified, blocks as u64, "{fqn} {range:?}: only what is touched is read");
        }
    }
    let (_, findings) = crate::verify(&*reading.store, &checkpoint, &reading.progress).await;
    assert!(findings.problems.is_empty() && findings.unchecked.is_empty(), "{findings:?}");
}

#[tokio::test]
async fn what_is_xored_is_always_stored_as_it_is_once_before() {
    let root = memory();
    let mut now = content("bfloat16", 100_000, 1);
    save(&*root, "step-1", &[("w", "bfloat16", now.clone())], None).await;
    for step in 2..6 {
        now = moved_on(&now, 2 * step);
        let (folder, before) = (format!("step-{step}"), format!("step-{}", step - 1));
        save(&*root, &folder, &[("w", "bfloat16", now.clone())], Some(&before)).await;
        let (reading, checkpoint) = opened(&*root, &folder).await;
        assert_eq!(checkpoint.manifest.references, [("step-1".to_owned(), "step-1".to_owned())]);
        assert_eq!(checkpoint.manifest.encoded_in_a_row as usize, step - 1);
        let row = checkpoint.rows(&[(b"w", Some(&[0]))])[0].expect("is in it");
        let (blobs, _) = read(&reading, checkpoint, Vec::new(), &[row], VerifyMode::InPlace).await.expect("reads");
        assert_eq!(blobs[0], now);
    }
    // Nothing of it is alike any more: it becomes a base itself.
    let other = content("bfloat16", 100_000, 2);
    save(&*root, "step-6", &[("w", "bfloat16", other.clone())], Some("step-5")).await;
    let (_, checkpoint) = opened(&*root, "step-6").await;
    assert_eq!(encoding_of(&checkpoint, "w"), None);
    assert!(!checkpoint.manifest.is_encoded && checkpoint.manifest.encoded_in_a_row == 0);
    save(&*root, "step-7", &[("w", "bfloat16", moved_on(&other, 2))], Some("step-6")).await;
    assert_eq!(opened(&*root, "step-7").await.1.manifest.references[0].0, "step-6");
}
