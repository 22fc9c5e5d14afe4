//! What every format promises: each sample with its fields, damage named, and never more memory than there are bytes.

mod support {
    pub mod writers;
}

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use proptest::prelude::*;
use strata_data::Error;
use strata_data::batches::{Batches, Plan, Sample, Source};
use strata_data::dataset::{Format, Index, Place, Shard};
use strata_data::formats::tokens::Windows;
use strata_data::formats::{self, Dtype, ReadAt, lines, mds, megatron, tar};
use strata_data::order::{Lanes, Order, Shuffle};
use strata_data::partition::{Ending, Stream};
use strata_io::schedule::ByteBudget;
use strata_io::testing::{CountingStore, Counts, Hook, Hooked, Kind as Asked, Request};
use strata_io::{IoConfig, Store, open};
use support::writers::{COMPRESSED, DataSet, KINDS, Kind, Written, compress, data_set};

async fn scan(store: Arc<dyn Store>, pattern: &str, format: Format) -> strata_data::Result<Index> {
    Index::scan(vec![Place { number: 0, store, pattern: pattern.to_owned() }], format).await
}

fn store(folder: &Path) -> Arc<dyn Store> {
    let config = IoConfig {
        budget: ByteBudget::new(64 << 20),
        max_concurrency: 8,
        part_bytes: 8 << 20,
        fsync: false,
        direct_io: false,
        max_tries: 3,
        deadline: Duration::from_secs(10),
    };
    open(folder.to_str().unwrap(), &BTreeMap::new(), &config).unwrap()
}

/// A folder with `objects`.
fn folder(objects: &[(String, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in objects {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}

/// All samples in their order.
async fn read(store: Arc<dyn Store>, index: Index) -> Result<Vec<Written>, Error> {
    let counts: Vec<u64> = index.shards().iter().map(Shard::num_samples).collect();
    let order = Arc::new(Order::new(&counts, Shuffle::None, Lanes { num_lanes: 1, turn: 1 }, 1, 0));
    let mut batches = batches(Source { stores: vec![store], index: Arc::new(index) }, order, 1 << 20, 1 << 16);
    let mut samples = Vec::new();
    while let Some(batch) = batches.next().await? {
        for Sample { bytes, fields, .. } in batch.samples {
            let field = |field: formats::Field| {
                (field.name, bytes[field.data.start as usize..field.data.end as usize].to_vec(), field.encoding)
            };
            samples.push(Written { key: fields.key, fields: fields.fields.into_iter().map(field).collect() });
        }
    }
    Ok(samples)
}

fn batches(source: Source, order: Arc<Order>, budget_bytes: u64, window_bytes: u64) -> Batches {
    let stream = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 7 };
    let plan = Plan { order: order.clone(), next: order, stream, ending: Ending::Short, start: 0, first: 0 };
    Batches::new(source, plan, ByteBudget::new(budget_bytes), window_bytes)
}

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

/// What comes of the data set after `damage`, which is told each object's name and bytes.
async fn damaged(data: &DataSet, damage: impl Fn(&str, &mut Vec<u8>)) -> Result<Vec<Written>, Error> {
    let mut objects = data.objects.clone();
    objects.iter_mut().for_each(|(name, bytes)| damage(name, bytes));
    let folder = folder(&objects);
    let store = store(folder.path());
    let index = scan(store.clone(), &data.pattern, data.format).await?;
    read(store, index).await
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
async fn a_byte_that_changed_in_what_is_compressed_is_named() {
    for kind in COMPRESSED {
        let (data, (_, end)) = (data_set(kind, &[3, 3], 5000), kind.compressed().unwrap());
        let victim = data.objects.iter().rfind(|(name, _)| name.ends_with(end)).unwrap().0.clone();
        // In the middle, and in the checksum at the end.
        for from_end in [3, 1000] {
            let found = damaged(&data, |name, bytes| {
                if name == victim {
                    let at = bytes.len() - bytes.len().min(from_end);
                    bytes[at] ^= 0x10;
                }
            });
            let error = found.await.expect_err("changed").to_string();
            assert!(error.contains(&victim) && error.contains("(at byte "), "{kind:?} {error}");
        }
    }
}

#[tokio::test]
async fn a_name_that_says_another_compression_than_the_bytes_is_named() {
    for kind in COMPRESSED {
        let (data, (plain, end)) = (data_set(kind, &[2], 100), kind.compressed().unwrap());
        for with in [data.plain[0].1.clone(), compress(&data.plain[0].1, !end.starts_with("gz")), Vec::new()] {
            let found = damaged(&data, |name, bytes| {
                if name.ends_with(end) {
                    *bytes = with.clone()
                }
            });
            let error = found.await.expect_err("another").to_string();
            assert!(error.contains(&data.objects[0].0) && error.contains("by its name"), "{error}");
        }
        if plain != Kind::Mds {
            let plain = data_set(plain, &[2], 100);
            let found = damaged(&plain, |_, bytes| *bytes = compress(bytes, end.starts_with("gz")));
            let error = found.await.expect_err("compressed").to_string();
            assert!(error.contains(&plain.objects[0].0) && error.contains("its name does not say"), "{error}");
        }
    }
}

#[tokio::test]
async fn what_holds_more_or_less_than_the_index_says_is_named() {
    for kind in [Kind::GzipMds, Kind::ZstdMds] {
        let (data, (_, end)) = (data_set(kind, &[2], 1000), kind.compressed().unwrap());
        let plain = &data.plain[0].1;
        let more = [plain, &vec![0; 4 << 20][..]].concat();
        for (with, expected) in [(&more[..], "found more"), (&plain[..plain.len() - 1], "found the end after")] {
            let with = compress(with, end == "gz");
            let found = damaged(&data, |name, bytes| {
                if name.ends_with(end) {
                    *bytes = with.clone()
                }
            });
            let error = found.await.expect_err("another size").to_string();
            assert!(error.contains(&data.objects[0].0) && error.contains(expected), "{error}");
        }
    }
}

#[tokio::test]
async fn a_shard_that_others_have_decompressed_is_read_as_it_is() {
    let data = data_set(Kind::ZstdMds, &[3, 2], 500);
    let mut objects = data.objects.clone();
    for (object, keeps_both) in [(0, true), (1, false)] {
        let name = objects[object].0.strip_suffix(".zstd").unwrap().to_owned();
        let bytes = data.plain[object].1.clone();
        if keeps_both { objects.push((name, bytes)) } else { objects[object] = (name, bytes) }
    }
    let folder = folder(&objects);
    let store = store(folder.path());
    let index = scan(store.clone(), &data.pattern, data.format).await.unwrap();
    assert!(index.shards().iter().all(|shard| shard.unit.is_none()));
    assert!(read(store, index).await.unwrap() == data.samples);
}

/// How often shards are read for a data set in `windows`, where the budget has room for `num_units` of the `num_shards`.
async fn unit_reads(
    kind: Kind,
    shuffle: Shuffle,
    num_shards: usize,
    num_units: u64,
    window_bytes: u64,
) -> (usize, usize) {
    let data = data_set(kind, &vec![50; num_shards], 2000);
    let folder = folder(&data.objects);
    let noted = Arc::new(Hooked::new(store(folder.path()), Notes::default()));
    let index = Arc::new(scan(noted.clone(), &data.pattern, data.format).await.unwrap());
    noted.hook().0.lock().unwrap().clear();
    let order = Arc::new(Order::new(&vec![50; num_shards], shuffle, Lanes { num_lanes: 1, turn: 1 }, 1, 0));
    let unit_bytes =
        index.shards().iter().map(|shard| shard.size_bytes + shard.unit.unwrap().size_bytes).max().unwrap();
    let room = 2 * num_units * unit_bytes.next_multiple_of(64 << 10);
    let source = Source { stores: vec![noted.clone()], index };
    let mut batches = batches(source, order, room, window_bytes);
    let (mut num_samples, mut num_windows, mut bytes) = (0, 0, window_bytes);
    while let Some(batch) = batches.next().await.unwrap() {
        num_samples += batch.samples.len();
        if bytes >= window_bytes {
            (num_windows, bytes) = (num_windows + 1, 0);
        }
        bytes += batch.samples.iter().map(|sample| sample.bytes.len() as u64).sum::<u64>();
    }
    assert_eq!(num_samples, 50 * num_shards);
    let notes = noted.hook().0.lock().unwrap();
    (notes.iter().filter(|(kind, _)| *kind == Asked::Read).count(), num_windows)
}

#[tokio::test]
async fn a_unit_that_the_next_window_needs_too_is_not_read_again() {
    let blocks = Shuffle::Blocks { block: 10, buffer: 60 };
    for kind in COMPRESSED {
        // In the order in which they lie, one at a time suffices.
        let (reads, num_windows) = unit_reads(kind, Shuffle::None, 8, 1, 40_000).await;
        assert!(reads == 8 && num_windows > 16, "{kind:?}: {reads} reads in {num_windows} windows");
        let (reads, _) = unit_reads(kind, Shuffle::Full, 8, 8, 40_000).await;
        assert_eq!(reads, 8, "{kind:?}");
        let (reads, _) = unit_reads(kind, blocks, 8, 8, 40_000).await;
        assert_eq!(reads, 8, "{kind:?}");
    }
}

#[tokio::test]
async fn without_room_for_all_a_window_reads_a_unit_once_and_those_that_stay_not_at_all() {
    // Each window needs all eight; six stay, and of the two others each window reads both.
    let (reads, num_windows) = unit_reads(Kind::ZstdLines, Shuffle::Full, 8, 6, 200_000).await;
    assert!(reads <= 8 + 2 * (num_windows - 1), "{reads} reads in {num_windows} windows");
    let (reads, num_windows) = unit_reads(Kind::ZstdLines, Shuffle::Full, 8, 0, 200_000).await;
    assert!(reads <= 8 + 7 * (num_windows - 1), "{reads} reads in {num_windows} windows");
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

/// Notes what is asked of a store.
#[derive(Debug, Default)]
struct Notes(Mutex<Vec<(Asked, String)>>);

#[async_trait]
impl Hook for Notes {
    async fn before(&self, request: &Request<'_>) -> strata_io::Result<()> {
        self.0.lock().unwrap().push((request.kind, request.name.to_owned()));
        Ok(())
    }
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
