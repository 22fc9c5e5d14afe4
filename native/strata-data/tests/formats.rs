//! What every format promises: each sample with its fields, damage named, and never more memory than there are bytes.

mod support;

use std::sync::Arc;

use async_trait::async_trait;
use proptest::prelude::*;
use strata_data::Error;
use strata_data::batches::Sample;
use strata_data::dataset::{Format, Shard, Source};
use strata_data::formats::tokens::Windows;
use strata_data::formats::{Dtype, ReadAt, lines, mds, megatron, tar};
use strata_data::order::{Lanes, Order, Shuffle};
use strata_io::testing::{CountingStore, Counts, Hook, Hooked, Kind as Asked, Request};
use support::readers::{Notes, batches, damaged, folder, read, scan, store};
use support::writers::{COMPRESSED, DataSet, KINDS, Kind, data_set};

/// Writes, finds and reads the data set; also as if it were elsewhere.
async fn check(kind: Kind, counts: &[usize], size: usize) {
    let DataSet { format, pattern, objects, samples, .. } = data_set(kind, counts, size);
    let folder = folder(&objects);
    let local = store(folder.path());
    let elsewhere = Arc::new(CountingStore::new(local.clone(), Counts::default()));
    for store in [local, elsewhere] {
        let index = scan(store.clone(), &pattern, format).await.unwrap();
        assert_eq!(index.num_samples(), samples.len() as u64, "{kind:?}");
        assert!(read(store, index).await.unwrap() == samples, "{kind:?}");
    }
}

#[tokio::test]
async fn every_sample_comes_once_with_its_fields() {
    for kind in KINDS {
        check(kind, &[3, 1, 40, 7], 700).await;
        check(kind, &[2], 1).await;
    }
}

#[tokio::test]
async fn shards_without_samples_are_no_damage() {
    for kind in KINDS {
        check(kind, &[0, 2, 0, 0, 3, 0], 20).await;
        if kind != Kind::Files {
            check(kind, &[0], 20).await;
        }
    }
}

#[tokio::test]
async fn a_sample_may_be_large() {
    for kind in KINDS {
        // Larger than the budget; decompressing takes long where it is not optimized.
        check(kind, &[1, 2], if kind.compressed().is_some() { 1 << 20 } else { 20 << 20 }).await;
    }
}

#[tokio::test]
async fn a_file_without_bytes_is_a_sample() {
    let folder = folder(&[("a.txt".to_owned(), Vec::new()), ("b.txt".to_owned(), b"b".to_vec())]);
    let store = store(folder.path());
    let index = scan(store.clone(), "*.txt", Format::Files).await.unwrap();
    let found = read(store, index).await.unwrap();
    assert_eq!(found.iter().map(|sample| sample.fields[0].1.len()).collect::<Vec<_>>(), [0, 1]);
}

#[tokio::test]
async fn what_a_store_says_is_the_error() {
    for kind in [&[Kind::Tar, Kind::Megatron, Kind::Mds, Kind::Lines][..], &COMPRESSED].concat() {
        let data = data_set(kind, &[2], 100);
        let folder = folder(&data.objects);
        let refusing = Hooked::new(store(folder.path()), Refusals);
        let found = scan(Arc::new(refusing), &data.pattern, data.format).await;
        assert!(matches!(found, Err(Error::Io(strata_io::Error::PermissionDenied { .. }))), "{kind:?}: {found:?}");
    }
}

/// Windows that overlap, and files of which one is empty, go through the reads that are made for neighbours.
#[tokio::test]
async fn what_is_read_ahead_is_what_lies_there() {
    for kind in KINDS {
        let mut data = data_set(kind, &[30, 0, 50], 200);
        if kind == Kind::Files {
            data.objects[3].1.clear();
            data.plain[3].1.clear();
        }
        let folder = folder(&data.objects);
        let store = store(folder.path());
        let index = Arc::new(scan(store.clone(), &data.pattern, data.format).await.unwrap());
        let counts: Vec<u64> = index.shards().iter().map(Shard::num_samples).collect();
        let order = Arc::new(Order::new(&counts, Shuffle::Full, Lanes { num_lanes: 1, turn: 1 }, 1, 0));
        let source = Source { stores: vec![store], index: index.clone() };
        let mut batches = batches(source, order, 1 << 20, 1 << 12);
        let mut num_samples = 0;
        while let Some(batch) = batches.next().await.unwrap() {
            for Sample { extent, bytes, .. } in batch.samples {
                let name = &index.shards()[extent.shard as usize].name;
                let shard = &data.plain.iter().find(|(plain, _)| plain == name).unwrap().1;
                // Behind it may be what no shard has.
                assert!(bytes.starts_with(&shard[extent.start as usize..extent.end as usize]), "{kind:?} {extent:?}");
                num_samples += 1;
            }
        }
        assert_eq!(num_samples, data.samples.len(), "{kind:?}");
    }
}

#[tokio::test]
async fn a_shard_that_was_cut_is_named_with_the_place() {
    let cut = |kind, end: &'static str, left: fn(usize) -> usize| async move {
        let data = data_set(kind, &[2, 2], 100);
        let victim = data.objects.iter().rfind(|(name, _)| name.ends_with(end)).unwrap().0.clone();
        let found = damaged(&data, |name, bytes| {
            if name == victim {
                bytes.truncate(left(bytes.len()))
            }
        })
        .await;
        let error = found.expect_err("cut").to_string();
        assert!(error.contains(&victim) && error.contains("(at byte "), "{error}");
    };
    for left in [|size| size - 1, |size| size / 2 + 1, |_| 3] {
        cut(Kind::Tokens, ".bin", left).await;
        cut(Kind::Megatron, ".bin", left).await;
        cut(Kind::Megatron, ".idx", left).await;
        cut(Kind::Mds, ".mds", left).await;
        cut(Kind::Mds, ".json", left).await;
        for kind in COMPRESSED {
            cut(kind, kind.compressed().unwrap().1, left).await;
        }
    }
    // Behind the last file of an archive nothing is missed.
    cut(Kind::Tar, ".tar", |size| size - 1024 - 1).await;
    cut(Kind::Tar, ".tar", |size| size / 2 + 1).await;
    cut(Kind::Tar, ".tar", |_| 3).await;
}

#[tokio::test]
async fn what_an_index_names_and_is_not_there_is_named() {
    for (kind, victim) in [(Kind::Megatron, "part1_text_document.idx"), (Kind::Mds, "shard.00001.mds")] {
        let data = data_set(kind, &[2, 2], 100);
        let folder = folder(&data.objects);
        let path = data.objects.iter().find(|(name, _)| name.ends_with(victim)).unwrap();
        std::fs::remove_file(folder.path().join(&path.0)).unwrap();
        let local = store(folder.path());
        for store in [local.clone(), Arc::new(CountingStore::new(local, Counts::default()))] {
            let error = scan(store, &data.pattern, data.format).await.expect_err("gone").to_string();
            assert!(error.contains(victim), "{error}");
        }
    }
}

#[tokio::test]
async fn what_cannot_be_asked_for_is_refused() {
    let folder = folder(&[("a.bin".to_owned(), vec![0; 8])]);
    let scan = |pattern, format| scan(store(folder.path()), pattern, format);
    let tokens = |dtype, window, stride| Format::Tokens {
        dtype,
        header_bytes: 0,
        windows: Windows { window, stride, with_documents: false },
    };
    for format in [tokens(Dtype::Uint16, 0, 1), tokens(Dtype::Uint16, 1, 0), tokens(Dtype::Float32, 1, 1)] {
        assert!(matches!(scan("*.bin", format).await, Err(Error::Config(_))), "{format:?}");
    }
    let windows = Windows { window: 1, stride: 1, with_documents: true };
    let no_documents = Format::Tokens { dtype: Dtype::Uint16, header_bytes: 0, windows };
    assert!(matches!(scan("*.bin", no_documents).await, Err(Error::Config(_))));
    assert!(matches!(scan("{1..}", Format::Files).await, Err(Error::Config(_))));
    assert!(matches!(scan("*.tar", Format::Tar).await, Err(Error::NotFound { .. })));
    assert!(matches!(scan("nowhere/*.tar", Format::Tar).await, Err(Error::NotFound { .. })));
}

/// Refuses to be read.
#[derive(Debug)]
struct Refusals;

#[async_trait]
impl Hook for Refusals {
    async fn before(&self, request: &Request<'_>) -> strata_io::Result<()> {
        let (object, detail) = (request.name.to_owned(), "expired".to_owned());
        if request.kind == Asked::Read { Err(strata_io::Error::PermissionDenied { object, detail }) } else { Ok(()) }
    }
}

#[tokio::test]
async fn only_the_folder_of_the_pattern_is_listed_and_files_are_not_read() {
    let names = (0..300).map(|nth| format!("{}/part-{:03}/{nth}.jpg", ["train", "old"][nth % 2], nth / 2));
    let folder = folder(&names.map(|name| (name, vec![1])).collect::<Vec<_>>());
    let noted = Arc::new(Hooked::new(store(folder.path()), Notes::default()));
    let index = scan(noted.clone(), "train/part-{010..029}/*.jpg", Format::Files).await.unwrap();
    assert_eq!(index.num_samples(), 20);
    let notes = noted.hook().0.lock().unwrap();
    assert!(notes.iter().all(|(kind, name)| *kind == Asked::List && name.starts_with("train/")), "{notes:?}");
}

#[tokio::test]
async fn what_a_format_can_say_without_the_samples_is_not_read() {
    for kind in [Kind::Tokens, Kind::Megatron, Kind::Mds] {
        let data = data_set(kind, &[2, 3], 1 << 20);
        let folder = folder(&data.objects);
        let counted = Arc::new(CountingStore::new(store(folder.path()), Counts::default()));
        scan(counted.clone(), &data.pattern, data.format).await.unwrap();
        assert!(counted.hook().bytes(Asked::Read) < 1000, "{kind:?}: {:?}", counted.hook().all());
    }
}

/// Bytes of which nobody may ask for many more than there are.
struct Frugal<'a>(&'a [u8]);

impl ReadAt for Frugal<'_> {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        assert!(buffer.len() <= self.0.len() + 4096, "{} bytes of {}", buffer.len(), self.0.len());
        self.0.read_at(at, buffer)
    }
}

fn columns() -> Arc<[mds::Column]> {
    let data = data_set(Kind::Mds, &[1], 1);
    mds::shards(&data.objects.last().unwrap().1).unwrap().remove(0).columns
}

proptest! {
    #[test]
    fn no_bytes_make_a_format_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), num_samples in any::<u64>()) {
        let source = Frugal(&bytes);
        let _ = (tar::scan(&source), lines::scan(&source), megatron::scan(&source), mds::shards(&bytes));
        let _ = (tar::fields(&*bytes), lines::fields(&bytes), mds::fields(&bytes, &columns()));
        for num_samples in [num_samples, num_samples % 200, u64::from(u32::MAX)] {
            let shard = mds::Shard { name: String::new(), size_bytes: bytes.len() as u64, num_samples, columns: columns(), zip: None };
            let _ = mds::scan(&source, &shard);
        }
    }

    /// All is read, or something is named, whatever bytes are others than they were.
    #[test]
    fn no_damage_goes_beyond_what_is_there(
        kind in prop::sample::select(&KINDS[..]),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1u8..), 1..5),
        cut in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
    ) {
        let mut data = data_set(kind, &[2, 3], 40);
        for (object, at, with) in flips {
            let object = object.index(data.objects.len());
            let bytes = &mut data.objects[object].1;
            // Where a format says something, for the most part.
            let at = at.index(bytes.len().min(600));
            bytes[at] ^= with;
        }
        if let Some((object, left)) = cut {
            let object = object.index(data.objects.len());
            let bytes = &mut data.objects[object].1;
            bytes.truncate(left.index(bytes.len()));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(damaged(&data, |_, _| {}));
        if let Err(Error::Damaged { object, detail }) = found {
            let is_named = data.objects.iter().any(|(name, _)| object.ends_with(name));
            prop_assert!(is_named && (detail.contains("(at byte ") || detail.contains("is not there")), "{object}: {detail}");
        }
    }
}
