//! The manifest: what goes in comes out, and nothing hostile gets through.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use strata_checkpoint::encoding::{Encoding, XorBase};
use strata_checkpoint::item::{Entry, Item, Kind, Object, TensorEntry, num_blocks};
use strata_checkpoint::manifest::{DecodeError, GROUP_ROWS, Key, Manifest, ManifestName, decode, encode};
use strata_checkpoint::run::{CheckpointType, RunInfo};
use strata_io::digest::BlockDigest;

fn item(fqn: &str, shape: &[u64], object: u32, offset: u64) -> Item {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    let payload_bytes = shape.iter().product::<u64>() * 4;
    let digest = |block| BlockDigest { crc32: block as u32 * 7, xxh3: block as u128 * 11 + 3 };
    Item {
        fqn: Arc::from(fqn.as_bytes()),
        offsets: Some(Arc::from(vec![0; shape.len()])),
        index: Some(0),
        kind: Kind::Tensor,
        dtype: Arc::from("float32"),
        shape: Arc::from(shape),
        strides: Arc::from(strides),
        object,
        item_offset: offset,
        item_bytes: payload_bytes + 1000,
        payload_skip: 800,
        payload_bytes,
        digests: (0..num_blocks(payload_bytes)).map(digest).collect(),
        inline: (payload_bytes <= 64).then(|| Box::new(Bytes::from(vec![5; payload_bytes as usize]))),
        whole_crc32: None,
        encoding: None,
    }
}

fn manifest(num_items: usize) -> Manifest {
    let shapes: [&[u64]; 5] = [&[], &[0], &[3, 5], &[2, 1, 4], &[1 << 21]];
    let items: Vec<Item> = (0..num_items)
        .map(|i| item(&format!("model.layers.{i:06}.weight"), shapes[i % 5], (i % 2) as u32, i as u64 * 64))
        .collect();
    let entry = |item: &Item| Entry {
        fqn: item.fqn.to_vec(),
        tensor: Some(TensorEntry {
            dtype: "float32".into(),
            size: item.shape.to_vec(),
            strides: Some(item.strides.iter().map(|s| *s as i64).collect()),
            requires_grad: true,
            pin_memory: false,
            memory_format: 0,
            layout: "strided".into(),
        }),
    };
    let mut entries: Vec<Entry> = items.iter().map(entry).collect();
    entries.reverse();
    entries.push(Entry { fqn: b"step".to_vec(), tensor: None });
    Manifest {
        save_id: "new".into(),
        previous_save_id: "old".into(),
        number: 7,
        created_at: 1,
        world_size: 2,
        rank: None,
        generation: 3,
        objects: vec![
            Object { name: "__0_0.new.distcp".into(), size: 1 << 40, reference: None },
            Object { name: "__1_0.new.distcp".into(), size: 1 << 40, reference: Some(0) },
        ],
        references: vec![("step-1".into(), "older".into())],
        entries,
        items: items.into(),
        planner_data: b"j{}".to_vec(),
        payload_bytes: 12,
        run: Some(RunInfo {
            step: 400,
            epoch: 2,
            checkpoint_type: CheckpointType::Incremental,
            metadata: [("who".to_owned(), "me".to_owned())].into(),
            metrics: [("loss".to_owned(), 0.5)].into(),
            model_hash: Some("00ff".to_owned()),
        }),
        ..Manifest::default()
    }
}

#[test]
fn a_manifest_survives_the_way_to_the_file_and_back() {
    for num_items in [0, 1, 9, GROUP_ROWS, GROUP_ROWS + 1] {
        let manifest = manifest(num_items);
        assert_eq!(decode(&Bytes::from(encode(&manifest))).as_ref(), Ok(&manifest));
    }
}

#[test]
fn a_row_asked_for_is_the_item_that_was_written() {
    let written = manifest(2 * GROUP_ROWS + 3);
    let read = decode(&Bytes::from(encode(&written))).unwrap();
    let keys: Vec<Key<'_>> = (0..written.items.len())
        .rev()
        .step_by(97)
        .chain([0, GROUP_ROWS - 1, GROUP_ROWS, GROUP_ROWS])
        .map(|row| (&*written.items[row].fqn, written.items[row].offsets.as_deref()))
        .collect();
    let rows = read.items.rows_of(&keys);
    assert_eq!(rows, written.items.rows_of(&keys));
    for row in rows.into_iter().flatten().chain([1, GROUP_ROWS + 1, 2 * GROUP_ROWS + 2]) {
        assert_eq!(read.items[row], written.items[row], "row {row}");
    }
}

#[test]
fn a_name_or_a_place_that_is_not_stored_has_no_row() {
    let written = manifest(GROUP_ROWS + 3);
    let read = decode(&Bytes::from(encode(&written))).unwrap();
    let last = format!("model.layers.{:06}.weight", GROUP_ROWS + 2);
    let keys: [Key<'_>; 6] = [
        (b"", None),
        (b"model.layers.000000.weight", None),
        (b"model.layers.000002.weight", Some(&[0, 1])),
        (b"model.layers.000002.weigh", Some(&[0, 0])),
        (last.as_bytes(), Some(&[0, 0, 0, 0])),
        (b"z", None),
    ];
    assert_eq!(read.items.rows_of(&keys), [None; 6]);
}

#[test]
fn chunks_come_by_entry_in_the_order_of_their_hints() {
    // As names sort, "b" stands before "w"; as the state has them, behind it.
    let chunk = |fqn: &str, first: u64, index| Item {
        offsets: Some(Arc::from([first])),
        index: Some(index),
        ..item(fqn, &[2], 0, 4096 * first)
    };
    let mut written = manifest(0);
    written.items = vec![chunk("b", 0, 0), chunk("w", 0, 2), chunk("w", 2, 0), chunk("w", 1 << 40, 1)].into();
    let tensor = TensorEntry {
        dtype: "float32".into(),
        size: vec![6],
        strides: None,
        requires_grad: false,
        pin_memory: false,
        memory_format: 0,
        layout: "strided".into(),
    };
    let entry = |fqn: &str, tensor| Entry { fqn: fqn.into(), tensor };
    written.entries = vec![
        entry("step", None),
        entry("w", Some(tensor.clone())),
        entry("none", Some(tensor.clone())),
        entry("b", Some(tensor)),
    ];
    written.objects[0].size = 1 << 60;
    let read = decode(&Bytes::from(encode(&written))).unwrap();
    for chunks in [written.chunks(), read.chunks()] {
        let of = |entry| chunks.of(entry).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(1), [(vec![2], vec![2]), (vec![1 << 40], vec![2]), (vec![0], vec![2])]);
        assert_eq!(of(2), []);
        assert_eq!(of(3), [(vec![0], vec![2])]);
    }
}

#[test]
fn disorder_between_two_sections_is_refused() {
    let mut hostile = manifest(GROUP_ROWS + 1);
    hostile.items[GROUP_ROWS] = hostile.items[GROUP_ROWS - 1].clone();
    assert!(matches!(decode(&Bytes::from(encode(&hostile))), Err(DecodeError::Damaged(_))));
}

#[test]
fn a_manifest_cut_anywhere_is_damaged() {
    let file = Bytes::from(encode(&manifest(20)));
    for end in 0..file.len() {
        assert!(matches!(decode(&file.slice(..end)), Err(DecodeError::Damaged(_))), "cut at {end}");
    }
}

#[test]
fn a_flipped_bit_anywhere_is_noticed() {
    let file = encode(&manifest(20));
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(decode(&Bytes::from(damaged)).is_err(), "bit flipped in byte {at}");
    }
}

#[test]
fn names_that_leave_the_checkpoint_are_refused() {
    for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0"] {
        let mut hostile = manifest(2);
        hostile.objects[0].name = name.into();
        assert!(matches!(decode(&Bytes::from(encode(&hostile))), Err(DecodeError::Damaged(_))), "{name:?}");
        let mut hostile = manifest(2);
        hostile.references[0].0 = name.into();
        assert!(matches!(decode(&Bytes::from(encode(&hostile))), Err(DecodeError::Damaged(_))), "{name:?}");
    }
}

#[test]
fn items_that_do_not_fit_are_refused() {
    type Change = fn(&mut Item);
    let changes: [(&str, Change); 6] = [
        ("behind its object", |item| item.item_offset = 1 << 41),
        ("overflowing", |item| item.item_offset = u64::MAX - 5),
        ("payload behind the item", |item| item.payload_skip = 1 << 30),
        ("shape larger than the payload", |item| Arc::make_mut(&mut item.shape)[0] += 1),
        ("overflowing shape", |item| Arc::make_mut(&mut item.shape)[0] = u64::MAX),
        ("unknown dtype", |item| item.dtype = Arc::from("float31")),
    ];
    for (what, change) in changes {
        let mut hostile = manifest(3);
        change(&mut hostile.items[2]);
        assert!(matches!(decode(&Bytes::from(encode(&hostile))), Err(DecodeError::Damaged(_))), "{what}");
    }
}

#[test]
fn two_items_with_one_name_and_place_are_refused() {
    let mut hostile = manifest(2);
    hostile.items[1] = hostile.items[0].clone();
    assert!(decode(&Bytes::from(encode(&hostile))).is_err());
}

/// `item` in frames, XORed with what `base` (object, offset) holds.
fn encoded(item: Item, base: Option<(u32, u64)>) -> Item {
    let blocks = num_blocks(item.payload_bytes);
    let digests = (0..blocks).map(|block| u128::from(block) << 70 | 5).collect();
    let base = base.map(|(object, offset)| XorBase { object, offset, digests });
    let frames = (0..blocks).map(|block| (1000 + block as u32, u128::from(block) << 80 | 9));
    let encoding = Encoding::new(frames, base, item.payload_bytes).expect("as many frames as blocks");
    let item_bytes = encoding.stored_bytes();
    Item { payload_skip: 0, item_bytes, inline: None, encoding: Some(Arc::new(encoding)), ..item }
}

#[test]
fn encoded_rows_come_back_and_require_their_feature() {
    let mut written = manifest(40);
    for row in [4, 9, 14, 19, 34] {
        written.items[row] = encoded(written.items[row].clone(), (row % 2 == 0).then_some((1, 77 + row as u64)));
    }
    let file = encode(&written);
    assert!(file.windows(16).any(|bytes| bytes == b"encoded-payloads"));
    written.is_encoded = true;
    written.encoded_in_a_row = 3;
    let read = decode(&Bytes::from(encode(&written))).expect("decodes");
    assert_eq!(read, written);
    assert_eq!(read.items[9].encoding.as_ref().map(|encoding| encoding.name()), Some("planes-zstd"));
    assert_eq!(read.items[14].encoding.as_ref().map(|encoding| encoding.name()), Some("xor-planes-zstd"));
    assert!(!encode(&manifest(40)).windows(16).any(|bytes| bytes == b"encoded-payloads"));
}

#[test]
fn encoded_rows_that_do_not_fit_are_refused() {
    type Change = fn(&mut Item);
    let changes: [(&str, Change); 6] = [
        ("frames that are not all of the item", |item| item.item_bytes += 1),
        ("a payload that begins in the item's midst", |item| item.payload_skip = 64),
        ("an inline copy", |item| item.inline = Some(Box::new(Bytes::from(vec![0; 1 << 23])))),
        ("no tensor", |item| item.kind = Kind::TorchSave),
        ("a base in no object", |item| *item = encoded(item.clone(), Some((2, 0)))),
        ("a base behind its object", |item| *item = encoded(item.clone(), Some((1, (1 << 40) - 5)))),
    ];
    for (what, change) in changes {
        let mut hostile = manifest(5);
        let mut item = encoded(hostile.items[4].clone(), Some((1, 0)));
        change(&mut item);
        hostile.items[4] = item;
        assert!(matches!(decode(&Bytes::from(encode(&hostile))), Err(DecodeError::Damaged(_))), "{what}");
    }
    for frames in [vec![(0, 1), (5, 1)], vec![(5 << 20, 1), (5, 1)], vec![(5, 1)]] {
        assert!(Encoding::new(frames, None, 8 << 20).is_err());
    }
}

#[test]
fn numbers_in_names_sort_and_read_back() {
    for name in [
        ManifestName { number: 1, rank: None },
        ManifestName { number: u64::MAX, rank: None },
        ManifestName { number: 12, rank: Some(31) },
    ] {
        assert_eq!(ManifestName::parse(&name.path()), Some(name));
    }
    for other in [".strata/1", ".strata/0000000000000000000a", ".metadata", ".strata/ranks/00000000000000000001"] {
        assert_eq!(ManifestName::parse(other), None, "{other}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut file = b"STRATAM\n".to_vec();
        file.extend(bytes);
        let _ = decode(&Bytes::from(file));
    }
}
