use std::ops::Range;

use proptest::prelude::*;
use strata_io::digest::crc32;

use super::{ContainerError, DTYPES, Frame, ParsedItem, Placement, Step, TensorSpec, Window, parse, pickle, span, zip};

const ANYWHERE: Placement = Placement { item_offset: 0, align: 64, residue: 0 };

/// The answer, and how many ranges were read for it.
fn drive(item_bytes: u64, read: impl Fn(Range<u64>) -> Vec<u8>) -> Result<(ParsedItem, usize), ContainerError> {
    let mut have: Vec<(u64, Vec<u8>)> = Vec::new();
    for reads in 0..9 {
        let windows: Vec<_> = have.iter().map(|(start, bytes)| Window { start: *start, bytes }).collect();
        match parse(item_bytes, &windows)? {
            Step::Done(item) => return Ok((item, reads)),
            Step::NeedRange(range) => {
                assert!(range.start < range.end && range.end <= item_bytes && range.end - range.start <= 256 << 10);
                have.push((range.start, read(range)));
            }
        }
    }
    panic!("eight reads did not suffice");
}

fn parse_whole(item: &[u8]) -> Result<ParsedItem, ContainerError> {
    drive(item.len() as u64, |range| item[range.start as usize..range.end as usize].to_vec()).map(|(item, _)| item)
}

fn framed(spec: &TensorSpec<'_>, place: Placement, payload: &[u8]) -> Vec<u8> {
    let frame = Frame::new(spec, place).unwrap();
    [frame.prefix(), payload, &frame.suffix(crc32(payload))].concat()
}

fn small_item() -> (Vec<u8>, Vec<u8>) {
    let spec = TensorSpec { dtype: "float32", shape: &[2, 3], strides: &[3, 1], payload_bytes: 24 };
    let payload: Vec<u8> = (0..24).collect();
    (framed(&spec, ANYWHERE, &payload), payload)
}

fn is_damaged(result: &Result<ParsedItem, ContainerError>) -> bool {
    matches!(result, Err(ContainerError::Damaged(_)))
}

fn is_unrecognised(result: &Result<ParsedItem, ContainerError>) -> bool {
    matches!(result, Err(ContainerError::Unrecognised(_)))
}

/// A zip archive as other tools write it: sizes in the local headers, no zip64 records, no padding.
fn archive(records: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut out, mut central) = (Vec::new(), Vec::new());
    for (name, data) in records {
        let header = out.len() as u32;
        let sizes = [crc32(data), data.len() as u32, data.len() as u32].map(u32::to_le_bytes).concat();
        let name_bytes = (name.len() as u16).to_le_bytes();
        out.extend([&zip::LOCAL[..], &[0; 10], &sizes, &name_bytes, &[0; 2], name.as_bytes(), data].concat());
        central.extend([&zip::CENTRAL[..], &[0; 12], &sizes, &name_bytes, &[0; 12]].concat());
        central.extend([&header.to_le_bytes(), name.as_bytes()].concat());
    }
    let (start, len) = (out.len() as u32, central.len() as u32);
    let count = (records.len() as u16).to_le_bytes();
    out.extend(central);
    out.extend([&zip::END[..], &[0; 4], &count, &count, &len.to_le_bytes(), &start.to_le_bytes(), &[0; 2]].concat());
    out
}

fn pickle_of(dtype: &str, shape: &[u64], strides: &[u64], payload_bytes: u64) -> Vec<u8> {
    pickle::write(&TensorSpec { dtype, shape, strides, payload_bytes }).unwrap()
}

/// An archive of a float32 tensor with one record replaced, added or, given `None`, left out.
fn archive_with(name: &str, data: Option<&[u8]>) -> Vec<u8> {
    let data_pkl = pickle_of("float32", &[2], &[1], 8);
    let mut records: Vec<(&str, &[u8])> = vec![("x/version", b"3\n"), ("x/data/0", &[1; 8]), ("x/data.pkl", &data_pkl)];
    records.retain(|record| record.0 != name);
    records.extend(data.map(|data| (name, data)));
    archive(&records)
}

#[test]
fn an_item_is_as_long_as_said_and_its_payload_stands_where_asked() {
    let spec = TensorSpec { dtype: "bfloat16", shape: &[5], strides: &[1], payload_bytes: 10 };
    for align in [64, 512, 4096, 32_768] {
        for residue in [0, 64, align - 64].into_iter().filter(|residue| *residue < align) {
            for item_offset in [0, 64, 999, 4096, (1 << 40) + 17] {
                let place = Placement { item_offset, align, residue };
                let frame = Frame::new(&spec, place).unwrap();
                let prefix_bytes = frame.prefix().len() as u64;
                assert_eq!((item_offset + prefix_bytes) % align, residue);
                assert!(prefix_bytes < 1024 + align, "{prefix_bytes}");
                let suffix = frame.suffix(7);
                assert_eq!(suffix.len() as u64, frame.suffix_bytes());
                assert_eq!(frame.item_bytes(), prefix_bytes + 10 + suffix.len() as u64);
            }
        }
    }
}

#[test]
fn a_payload_of_any_size_is_found_in_two_reads() {
    for payload_bytes in [0, 1, 65_536, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, 1 << 45] {
        let spec = TensorSpec { dtype: "uint8", shape: &[payload_bytes], strides: &[1], payload_bytes };
        let frame = Frame::new(&spec, Placement { item_offset: 64, align: 4096, residue: 128 }).unwrap();
        let (head, tail) = (frame.prefix(), frame.suffix(0xABCD_EF01));
        let tail_at = head.len() as u64 + payload_bytes;
        let byte = |at: u64| match at {
            at if at < head.len() as u64 => head[at as usize],
            at if at < tail_at => 0,
            at => tail[(at - tail_at) as usize],
        };
        let (item, reads) = drive(frame.item_bytes(), |range| range.map(byte).collect()).unwrap();
        assert_eq!(item.payload, head.len() as u64..tail_at);
        assert_eq!((item.crc32, item.shape), (Some(0xABCD_EF01), vec![payload_bytes]));
        assert_eq!(reads, if payload_bytes < 65_536 { 1 } else { 2 });
    }
}

#[test]
fn a_tensor_that_its_payload_cannot_hold_is_not_framed() {
    let base = TensorSpec { dtype: "int16", shape: &[2, 3], strides: &[3, 1], payload_bytes: 12 };
    let refused = |spec| matches!(Frame::new(&spec, ANYWHERE), Err(ContainerError::Invalid(_)));
    assert!(!refused(base));
    assert!(refused(TensorSpec { payload_bytes: 10, ..base }));
    assert!(refused(TensorSpec { payload_bytes: 13, ..base }));
    assert!(refused(TensorSpec { strides: &[3], ..base }));
    assert!(refused(TensorSpec { strides: &[4, 1], ..base }));
    assert!(refused(TensorSpec { shape: &[1 << 40, 1 << 40], strides: &[0, 0], ..base }));
    assert!(refused(TensorSpec { shape: &[u64::MAX], ..base }));
    assert!(refused(TensorSpec { shape: &[1; 40_000], strides: &[1; 40_000], ..base }));
    assert!(refused(TensorSpec { payload_bytes: u64::MAX - 1, ..base }));
    let unknown = Frame::new(&TensorSpec { dtype: "quint8", ..base }, ANYWHERE);
    assert_eq!(unknown, Err(ContainerError::UnknownDtype("quint8".to_owned())));
    for place in [Placement { residue: 64, ..ANYWHERE }, Placement { align: 96, ..ANYWHERE }] {
        assert!(matches!(Frame::new(&base, place), Err(ContainerError::Invalid(_))));
    }
}

#[test]
fn span_counts_the_elements_reached() {
    assert_eq!(span(&[], &[]), Some(1));
    assert_eq!(span(&[0, 5], &[5, 1]), Some(0));
    assert_eq!(span(&[2, 3], &[10, 2]), Some(15));
    assert_eq!(span(&[7], &[0]), Some(1));
    assert_eq!(span(&[2], &[1 << 63]), None);
    assert_eq!(span(&[3], &[1 << 62]), None);
}

#[test]
fn an_archive_of_another_tool_and_order_is_read() {
    let item = parse_whole(&archive_with("x/byteorder", Some(b"little"))).unwrap();
    assert_eq!((item.dtype.as_str(), item.crc32), ("float32", Some(crc32(&[1; 8]))));
    assert_eq!(item.payload.end - item.payload.start, 8);
    let nested = archive(&[("x/data.pkl", b"none"), ("x/data/0", &[2; 8]), ("x/version", b"3\n")]);
    let data_pkl = pickle_of("uint8", &[nested.len() as u64], &[1], nested.len() as u64);
    let outer = archive(&[("y/data.pkl", &data_pkl), ("y/data/0", &nested), ("y/version", b"3\n")]);
    let payload = parse_whole(&outer).unwrap().payload;
    assert_eq!(outer[payload.start as usize..payload.end as usize], nested);
}

#[test]
fn an_archive_that_is_no_plain_little_endian_tensor_is_left_to_torch() {
    let cases = [
        archive_with("x/byteorder", Some(b"big")),
        archive_with("x/version", None),
        archive_with("x/data/0", None),
        archive_with("x/data.pkl", Some(b"\x80\x02N.")),
        archive_with("x/data/1", Some(b"second")),
        archive_with("x/constants.pkl", Some(b"")),
        archive_with("other/version", Some(b"3\n")),
        archive_with("no folder", Some(b"")),
        b"".to_vec(),
        b"PK\x05\x06".to_vec(),
        vec![0; 100_000],
    ];
    for (case, item) in cases.iter().enumerate() {
        assert!(is_unrecognised(&parse_whole(item)), "case {case}: {:?}", parse_whole(item));
    }
    let many: Vec<_> = (0..100).map(|i| format!("x/{i}")).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), &b""[..])).collect();
    assert!(is_unrecognised(&parse_whole(&archive(&many))));
}

#[test]
fn a_compressed_or_encrypted_record_is_left_to_torch() {
    let (item, _) = small_item();
    let central = item.windows(4).position(|bytes| bytes == zip::CENTRAL).unwrap();
    for (at, value) in [(8, 9), (10, 8)] {
        let mut item = item.clone();
        item[central + at] = value;
        assert!(is_unrecognised(&parse_whole(&item)));
    }
}

#[test]
fn storage_that_does_not_fit_the_tensor_is_damage() {
    let cases = [
        pickle_of("float32", &[2], &[1], 12),
        pickle_of("float32", &[2], &[1], 4),
        pickle_of("float32", &[3], &[1], 8),
        pickle_of("float32", &[2], &[2], 8),
        pickle_of("float32", &[2, 1], &[1], 8),
        pickle_of("float32", &[1 << 62, 1 << 62], &[0, 0], 8),
        pickle_of("float64", &[1], &[1], u64::MAX),
        pickle_of("uint16", &[5], &[1], 8),
    ];
    for (case, data_pkl) in cases.iter().enumerate() {
        assert!(is_damaged(&parse_whole(&archive_with("x/data.pkl", Some(data_pkl)))), "case {case}");
    }
}

#[test]
fn two_records_of_one_name_are_damage() {
    let data_pkl = pickle_of("uint8", &[1], &[1], 1);
    for name in ["x/data.pkl", "x/data/0", "x/version"] {
        let records: [(&str, &[u8]); 4] =
            [("x/data.pkl", &data_pkl), ("x/data/0", b"a"), ("x/version", b"3\n"), (name, b"a")];
        assert!(is_damaged(&parse_whole(&archive(&records))), "{name}");
    }
}

#[test]
fn a_flipped_bit_in_data_pkl_is_damage() {
    let (item, _) = small_item();
    for at in 64..64 + 154 {
        let mut item = item.clone();
        item[at] ^= 0x10;
        assert!(is_damaged(&parse_whole(&item)), "byte {at}");
    }
}

#[test]
fn a_lying_offset_size_or_length_is_refused() {
    let (item, _) = small_item();
    let starts = item
        .windows(4)
        .enumerate()
        .filter(|(_, bytes)| [zip::CENTRAL, zip::END].contains(&(*bytes).try_into().unwrap()));
    let fields: Vec<usize> = starts
        .flat_map(|(start, bytes)| {
            if bytes == zip::END {
                vec![start + 10, start + 12, start + 16]
            } else {
                vec![start + 20, start + 24, start + 28, start + 42]
            }
        })
        .collect();
    assert_eq!(fields.len(), 6 * 4 + 3);
    for at in fields {
        for lie in [1u32, 0x7FFF, 0xFFFF_FFFF, 0xFFFF_FFFE] {
            let mut item = item.clone();
            let told = u32::from_le_bytes(item[at..at + 4].try_into().unwrap());
            item[at..at + 4].copy_from_slice(&told.wrapping_add(lie).to_le_bytes());
            let parsed = parse_whole(&item);
            // The offset of a record that is not read may lie within its gap; nothing found may change by it.
            assert!(parsed.is_err() || parsed == parse_whole(&small_item().0), "field at {at}, {lie}: {parsed:?}");
        }
    }
    assert!(parse(u64::MAX, &[]).is_err());
    assert!(parse(1000, &[Window { start: 0, bytes: &[] }; 8]).is_err());
    assert!(parse(1 << 62, &[]).is_err());
}

#[test]
fn every_cut_is_refused() {
    let (item, _) = small_item();
    for len in 0..item.len() {
        assert!(parse_whole(&item[..len]).is_err(), "{len} bytes");
        assert!(parse_whole(&item[item.len() - len..]).is_err(), "last {len} bytes");
    }
}

#[test]
fn a_hostile_pickle_is_not_recognised() {
    let good = pickle_of("float32", &[2], &[1], 8);
    assert!(pickle::read(&good).is_ok());
    let replace = |from: &[u8], to: &[u8]| {
        let at = good.windows(from.len()).position(|bytes| bytes == from).unwrap();
        [&good[..at], to, &good[at + from.len()..]].concat()
    };
    let tower = [&b"\x80\x02)"[..], &[0x85; 60_000], b"."].concat();
    let wide = [&b"\x80\x02)q\x00"[..], &b"h\x00".repeat(30_000), b"t."].concat();
    let cases = [
        replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        replace(b"torch._utils", b"os"),
        replace(b"OrderedDict", b"OrderedDice"),
        replace(b"FloatStorage", b"QInt8Storage"),
        replace(b"\x03\x00\x00\x00cpu", b"\x04\x00\x00\x00meta"),
        replace(b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
        replace(b"K\x02\x85", b"\x8a\x01\xff\x85"),
        replace(b"K\x02\x85", b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01\x85"),
        replace(b"K\x02\x85", b"\x8a\xff\x85"),
        replace(b"K\x02\x85", b"\x88\x85"),
        replace(b"X\x07\x00\x00\x00", b"X\xff\xff\xff\xff"),
        replace(b"q\x05Q", b"q\x09Q"),
        [&good[..], b"."].concat(),
        b"\x80\x02(.".to_vec(),
        b"\x80\x02t.".to_vec(),
        b"\x80\x02(\x85.".to_vec(),
        b"\x80\x02h\x00.".to_vec(),
        b"\x80\x04.".to_vec(),
        tower,
        wide,
    ];
    for (case, data) in cases.iter().enumerate() {
        assert!(matches!(pickle::read(data), Err(ContainerError::Unrecognised(_))), "case {case}");
    }
    for len in 0..good.len() {
        assert!(pickle::read(&good[..len]).is_err());
    }
}

/// A tensor of any dtype with permuted dense strides and gaps, and the payload that it spans.
fn any_tensor() -> impl Strategy<Value = (&'static str, Vec<u64>, Vec<u64>, Vec<u8>)> {
    let dims = proptest::collection::vec((0u64..5, any::<u8>(), 0u64..3), 0..6);
    (0..DTYPES.len(), dims, any::<u8>()).prop_map(|(row, dims, seed)| {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        order.sort_by_key(|dim| dims[*dim].1);
        let mut strides = vec![0; dims.len()];
        let mut step = 1;
        for dim in order {
            strides[dim] = step;
            step = step * dims[dim].0.max(1) + dims[dim].2;
        }
        let shape: Vec<u64> = dims.iter().map(|dim| dim.0).collect();
        let payload_bytes = span(&shape, &strides).unwrap() * DTYPES[row].bytes;
        (DTYPES[row].name, shape, strides, (0..payload_bytes).map(|at| at as u8 ^ seed).collect())
    })
}

proptest! {
    #[test]
    fn what_is_framed_is_parsed_back(
        (dtype, shape, strides, payload) in any_tensor(), item_offset in 0u64..100_000, residue in 0u64..64,
    ) {
        let spec = TensorSpec { dtype, shape: &shape, strides: &strides, payload_bytes: payload.len() as u64 };
        let item = framed(&spec, Placement { item_offset, align: 4096, residue: residue * 64 }, &payload);
        let parsed = parse_whole(&item).unwrap();
        prop_assert_eq!(&item[parsed.payload.start as usize..parsed.payload.end as usize], &payload);
        prop_assert_eq!((parsed.dtype.as_str(), parsed.storage_offset), (dtype, 0));
        prop_assert_eq!((parsed.shape, parsed.strides, parsed.crc32), (shape, strides, Some(crc32(&payload))));
    }

    #[test]
    fn changed_bytes_never_panic_and_never_lead_out_of_the_item(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (mut item, _) = small_item();
        for (at, byte) in changes {
            let at = at.index(item.len());
            item[at] = byte;
        }
        if let Ok(parsed) = parse_whole(&item) {
            prop_assert!(parsed.payload.end <= item.len() as u64);
            let held = (parsed.payload.end - parsed.payload.start) / super::dtype_bytes(&parsed.dtype).unwrap();
            prop_assert!(span(&parsed.shape, &parsed.strides).unwrap() + parsed.storage_offset <= held);
        }
    }

    #[test]
    fn random_pickles_never_panic(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _answer_or_refusal = pickle::read(&[&b"\x80\x02"[..], &data].concat());
    }

    #[test]
    fn a_changed_pickle_never_panics(at in any::<proptest::sample::Index>(), byte in any::<u8>()) {
        let mut data = pickle_of("uint16", &[2, 3, 4, 5], &[60, 20, 5, 1], 240);
        let at = at.index(data.len());
        data[at] = byte;
        let _answer_or_refusal = pickle::read(&data);
    }
}
