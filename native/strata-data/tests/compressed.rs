//! What shards that are compressed as a whole promise beside what every format does: damage named, and each read as
//! seldom as there is room for.

mod support;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use strata_data::dataset::{Format, Shard, Source};
use strata_data::formats::compression::{Compression, Decompressed, decompress, in_decompressed};
use strata_data::formats::tokens::Windows;
use strata_data::formats::{Dtype, Fault, ReadAt};
use strata_data::order::{Lanes, Order, Shuffle};
use strata_io::testing::{Hooked, Kind as Asked};
use support::readers::{Notes, batches, damaged, folder, read, scan, store};
use support::writers::{COMPRESSED, Kind, compress, data_set};

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
async fn compressed_tokens_are_refused() {
    let folder = folder(&[("a.bin.gz".to_owned(), compress(&[0; 100], true))]);
    let windows = Windows { window: 2, stride: 2, with_documents: false };
    let format = Format::Tokens { dtype: Dtype::Uint8, header_bytes: 0, windows };
    let error = scan(store(folder.path()), "*.gz", format).await.expect_err("no tokens").to_string();
    assert!(error.contains("a.bin.gz: is gzip by its name"), "{error}");
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

/// Some compressed and some not, some larger than all room and some empty.
#[tokio::test(flavor = "multi_thread")]
async fn no_room_is_too_small_for_what_comes() {
    let mut objects = Vec::new();
    let mut num_samples = 0;
    for (kind, counts, size) in [
        (Kind::Lines, &[30, 0, 9][..], 300),
        (Kind::ZstdLines, &[90, 1, 0, 40, 7, 150], 400),
        (Kind::GzipLines, &[1, 5, 60], 1000),
    ] {
        let data = data_set(kind, counts, size);
        objects.extend(data.objects);
        num_samples += data.samples.len();
    }
    let folder = folder(&objects);
    let store = store(folder.path());
    let index = Arc::new(scan(store.clone(), "*.jsonl*", Format::Lines).await.unwrap());
    let counts: Vec<u64> = index.shards().iter().map(Shard::num_samples).collect();
    for shuffle in [Shuffle::None, Shuffle::Full, Shuffle::Blocks { block: 5, buffer: 40 }] {
        for (room, window_bytes) in
            [1u64, 300_000, 700_000, 4 << 20].into_iter().flat_map(|room| [(room, 1), (room, room / 4 + 1)])
        {
            let order = Arc::new(Order::new(&counts, shuffle, Lanes { num_lanes: 2, turn: 3 }, room, 0));
            let source = Source { stores: vec![store.clone()], index: index.clone() };
            let mut batches = batches(source, order, room, window_bytes);
            let (mut found, mut kept) = (0, Vec::new());
            let all = async {
                while let Some(batch) = batches.next().await.unwrap() {
                    found += batch.samples.len();
                    kept.push(batch);
                }
            };
            let is_stuck = tokio::time::timeout(Duration::from_secs(120), all).await.is_err();
            assert!(!is_stuck && found == num_samples, "{shuffle:?} {room} {window_bytes}: {found}");
        }
    }
}

struct Owned(Vec<u8>);

impl ReadAt for Owned {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.as_slice().read_at(at, buffer)
    }
}

proptest! {
    /// As a whole and on the way the same comes out, or both is damage.
    #[test]
    fn no_bytes_make_decompressing_panic(
        as_gzip in any::<bool>(),
        content in prop::collection::vec(prop::sample::select(&b"abc"[..]), 0..3000),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..3),
        rest in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let compression = if as_gzip { Compression::Gzip } else { Compression::Zstd };
        let mut bytes = [compress(&content, as_gzip), rest].concat();
        for (at, with) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= with;
        }
        let mut whole = vec![0; content.len()];
        let found = decompress(compression, &bytes, &mut whole, || true);
        let source = Owned(bytes);
        let stream = Decompressed::new(&source, compression, u64::MAX).unwrap();
        let mut streamed = vec![0; content.len() + 1];
        match stream.read_at(0, &mut streamed) {
            Ok(length) => prop_assert!(found.is_err() || length == content.len() && streamed[..length] == whole),
            Err(error) => {
                let fault = in_decompressed(error.into());
                prop_assert!(found.is_err() && matches!(fault, Fault::Damage { .. }), "{found:?}, {fault}");
            }
        }
    }
}
