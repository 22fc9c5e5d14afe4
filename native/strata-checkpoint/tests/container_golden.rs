//! The container against the bytes of torch itself, made by tests/tools/make_data_pkl_golden.py.

use strata_checkpoint::container::{ContainerError, Frame, ParsedItem, Placement, Step, TensorSpec, Window, parse};

const DATA_PKL: &str = include_str!("data/data_pkl.txt");
const STOCK_ITEMS: &str = include_str!("data/stock_items.txt");

fn numbers(text: &str) -> Vec<u64> {
    text.split(',').filter(|number| !number.is_empty()).map(|number| number.parse().unwrap()).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn fields<const N: usize>(line: &str) -> [&str; N] {
    line.split('|').collect::<Vec<_>>().try_into().unwrap()
}

fn parse_whole(item: &[u8]) -> Result<ParsedItem, ContainerError> {
    match parse(item.len() as u64, &[Window { start: 0, bytes: item }])? {
        Step::Done(parsed) => Ok(parsed),
        Step::NeedRange(range) => panic!("the whole item was given, asked for {range:?}"),
    }
}

#[test]
fn data_pkl_is_byte_for_byte_torchs() {
    for line in DATA_PKL.lines() {
        let [dtype, shape, strides, payload_bytes, hex] = fields(line);
        let (shape, strides, payload_bytes) = (numbers(shape), numbers(strides), payload_bytes.parse().unwrap());
        let spec = TensorSpec { dtype, shape: &shape, strides: &strides, payload_bytes };
        let frame = Frame::new(&spec, Placement { item_offset: 0, align: 64, residue: 0 }).unwrap();
        // The first record's data starts at 64, as in stock.
        let expected = bytes(hex);
        let found = &frame.prefix()[64..64 + expected.len()];
        assert!(found == expected, "{dtype} {shape:?} {strides:?}: {}", String::from_utf8_lossy(found));
    }
    assert_eq!(DATA_PKL.lines().count(), 28 * 3 + 2 * 16 + 2);
}

#[test]
fn a_prefix_begins_as_torchs_does() {
    let line = STOCK_ITEMS.lines().find(|line| line.starts_with("plain|")).unwrap();
    let [.., hex] = fields::<7>(line);
    let stock = bytes(hex);
    let spec = TensorSpec { dtype: "float32", shape: &[4, 6], strides: &[6, 1], payload_bytes: 96 };
    let frame = Frame::new(&spec, Placement { item_offset: 0, align: 64, residue: 0 }).unwrap();
    let common = frame.prefix().iter().zip(&stock).take_while(|(ours, theirs)| ours == theirs).count();
    let byteorder_end = stock.windows(6).position(|bytes| bytes == b"little").unwrap() + 6 + 16;
    assert!(common >= byteorder_end, "{common} bytes in common");
}

#[test]
fn the_items_of_torch_are_read_or_left_to_torch() {
    for line in STOCK_ITEMS.lines() {
        let [label, dtype, shape, strides, storage_offset, payload, hex] = fields(line);
        let item = bytes(hex);
        let parsed = parse_whole(&item);
        if dtype == "unrecognised" {
            assert!(matches!(parsed, Err(ContainerError::Unrecognised(_))), "{label}: {parsed:?}");
            continue;
        }
        let parsed = parsed.unwrap_or_else(|error| panic!("{label}: {error}"));
        let payload = bytes(payload);
        assert_eq!(item[parsed.payload.start as usize..parsed.payload.end as usize], payload, "{label}");
        let crc32 = (label != "without crc").then(|| strata_io::digest::crc32(&payload));
        let expected = ParsedItem {
            dtype: dtype.to_owned(),
            shape: numbers(shape),
            strides: numbers(strides),
            storage_offset: storage_offset.parse().unwrap(),
            payload: parsed.payload.clone(),
            crc32,
        };
        assert_eq!(parsed, expected, "{label}");
    }
}
