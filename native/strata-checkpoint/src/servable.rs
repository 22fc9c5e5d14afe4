//! What others read a checkpoint of a model by: heads of safetensors files, and the index that names them. Pure.
//!
//! The format: eight bytes that give the head's length, the head in JSON, the tensors' bytes without a gap
//! (<https://huggingface.co/docs/safetensors/index#format>). The index is as Hugging Face's `save_pretrained` writes it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::item::{Item, Kind};
use crate::manifest::Manifest;
use crate::names::is_our_safetensors;
use crate::run::MODEL_PREFIX;
use crate::{Error, Result};

/// The index that Hugging Face's loaders look for, relative to the checkpoint.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// What gives the head's length.
const LENGTH_BYTES: u64 = 8;

/// The library pads its heads to a multiple of this.
const HEAD_ALIGN: u64 = 8;

/// A key that the format keeps for itself.
const NOTES_KEY: &str = "__metadata__";

/// The dtype of two 4-bit numbers: shapes count pairs in torch, numbers in the file.
const PAIRS: &str = "float4_e2m1fn_x2";

/// torch's name and that of safetensors 0.8, of each dtype that it hands to torch.
const DTYPES: [(&str, &str); 20] = [
    ("float64", "F64"),
    ("float32", "F32"),
    ("float16", "F16"),
    ("bfloat16", "BF16"),
    ("int64", "I64"),
    ("int32", "I32"),
    ("int16", "I16"),
    ("int8", "I8"),
    ("uint64", "U64"),
    ("uint32", "U32"),
    ("uint16", "U16"),
    ("uint8", "U8"),
    ("bool", "BOOL"),
    ("complex64", "C64"),
    ("float8_e5m2", "F8_E5M2"),
    ("float8_e4m3fn", "F8_E4M3"),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    ("float8_e8m0fnu", "F8_E8M0"),
    (PAIRS, "F4"),
];

/// A tensor in a file, as its head says it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    /// First byte of the payload, from the file's start or, while the head is not made, from the first payload.
    pub at: u64,
    /// One past its last byte.
    pub end: u64,
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
}

impl Row {
    /// The row of a tensor in `at..at + bytes`.
    ///
    /// # Errors
    /// [`Error::Plan`] if the format cannot hold it, naming it.
    pub fn new(fqn: &[u8], dtype: &str, shape: &[u64], strides: &[u64], at: u64, bytes: u64) -> Result<Self> {
        let refused = |why: &str| {
            Error::Plan(format!("cannot store {:?}: safetensors cannot hold {why}", String::from_utf8_lossy(fqn)))
        };
        let name = std::str::from_utf8(fqn.strip_prefix(MODEL_PREFIX.as_bytes()).unwrap_or(fqn));
        let name = name.ok().filter(|name| *name != NOTES_KEY).ok_or_else(|| refused("its name"))?;
        let known = DTYPES.iter().find(|(torch, _)| *torch == dtype);
        let (_, named) = known.ok_or_else(|| refused(&format!("the dtype {dtype}")))?;
        if strides != contiguous(shape) && bytes > 0 {
            return Err(refused("other than row-major memory"));
        }
        let mut shape = shape.to_vec();
        if dtype == PAIRS {
            *shape.last_mut().ok_or_else(|| refused("a pair of numbers without a dim"))? *= 2;
        }
        Ok(Self { at, end: at + bytes, name: name.to_owned(), dtype: named, shape })
    }
}

/// Row-major strides; saturating, because [`crate::manifest::Extent::check`] refuses what overflows.
pub(crate) fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1u64; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
    }
    strides
}

/// Length of the head of `rows` and of what gives its length, before it is padded, in bytes.
pub(crate) fn least_head_bytes(rows: &[Row]) -> u64 {
    let origin = rows.iter().map(|row| row.at).min().unwrap_or(0);
    (LENGTH_BYTES + text(rows, origin).len() as u64).next_multiple_of(HEAD_ALIGN)
}

/// All that stands before the first payload, at byte `first`; `rows` are sorted. None if it does not fit there.
pub(crate) fn head(rows: &[Row], first: u64) -> Option<Vec<u8>> {
    let length = first.checked_sub(LENGTH_BYTES)?;
    let text = text(rows, rows.first().map_or(first, |row| row.at));
    if text.len() as u64 > length {
        return None;
    }
    let mut head = length.to_le_bytes().to_vec();
    head.extend(text.as_bytes());
    head.resize(first as usize, b' ');
    Some(head)
}

fn text(rows: &[Row], origin: u64) -> String {
    let mut text = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    for Row { at, end, name, dtype, shape } in rows {
        let shape = shape.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let (name, at, end) = (quoted(name), at - origin, end - origin);
        write!(text, r#",{name}:{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{at},{end}]}}"#)
            .expect("a String takes all");
    }
    text.push('}');
    text
}

fn quoted(name: &str) -> String {
    serde_json::to_string(name).expect("a str can be written")
}

/// What the head of a file must be that holds the tensors `items` and nothing else; None if no head can.
pub(crate) fn head_of<'a>(items: impl Iterator<Item = &'a Item>) -> Option<Vec<u8>> {
    let row = |item: &Item| {
        let at = item.payload_offset();
        Row::new(&item.fqn, &item.dtype, &item.shape, &item.strides, at, item.payload_bytes).ok()
    };
    let mut rows = items.map(row).collect::<Option<Vec<_>>>()?;
    rows.sort();
    head(&rows, rows.first()?.at)
}

/// The index of what `manifest` has in safetensors files; None if that is nothing.
pub fn index(manifest: &Manifest) -> Option<Vec<u8>> {
    let (mut file_of, mut total_bytes) = (BTreeMap::new(), 0);
    manifest.items.each(|item| {
        let object = &manifest.objects[item.object as usize];
        if item.kind == Kind::Tensor && object.is_own() && is_our_safetensors(&object.name) {
            let name = item.fqn.strip_prefix(MODEL_PREFIX.as_bytes()).unwrap_or(&item.fqn);
            file_of.insert(String::from_utf8_lossy(name).into_owned(), object.name.as_str());
            total_bytes += item.payload_bytes;
        }
    });
    let lines: Vec<String> =
        file_of.iter().map(|(name, file)| format!("    {}: {}", quoted(name), quoted(file))).collect();
    let index = format!(
        "{{\n  \"metadata\": {{\n    \"format\": \"pt\",\n    \"total_size\": {total_bytes}\n  }},\n  \
         \"weight_map\": {{\n{}\n  }}\n}}\n",
        lines.join(",\n")
    );
    (!lines.is_empty()).then(|| index.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(fqn: &str, dtype: &str, shape: &[u64], at: u64, bytes: u64) -> Result<Row> {
        Row::new(fqn.as_bytes(), dtype, shape, &contiguous(shape), at, bytes)
    }

    #[test]
    fn a_head_says_where_tensors_are_and_is_padded_with_spaces() {
        let rows = [
            row("model.a\"b", "float32", &[2, 1], 0, 8).expect("a row"),
            row("other", "bool", &[], 8, 1).expect("a row"),
        ];
        let text = concat!(
            r#"{"__metadata__":{"format":"pt"},"a\"b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"#,
            r#""other":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}"#
        );
        let least = least_head_bytes(&rows);
        assert_eq!(least, (8 + text.len() as u64).next_multiple_of(8));
        let made = head(&rows, 4096).expect("fits");
        assert_eq!((made.len(), &made[..8]), (4096, &4088u64.to_le_bytes()[..]));
        assert_eq!(std::str::from_utf8(&made[8..]).expect("JSON").trim_end_matches(' '), text);
        assert_eq!(head(&rows, least - 8), None);
    }

    #[test]
    fn what_the_format_cannot_hold_is_refused_by_name() {
        let pair = row("model.w", PAIRS, &[3, 2], 0, 6).expect("a row");
        assert_eq!(pair.shape, [3, 4]);
        let refused = [
            row("model.w", "complex128", &[1], 0, 16),
            row("model.__metadata__", "float32", &[1], 0, 4),
            row("model.w", PAIRS, &[], 0, 1),
            Row::new(b"model.w", "float32", &[2, 2], &[1, 2], 0, 16),
            Row::new(b"model.\xed\xa0\x80", "float32", &[], &[], 0, 4),
        ];
        for found in refused {
            assert!(matches!(&found, Err(Error::Plan(why)) if why.contains("cannot store \"model.")), "{found:?}");
        }
    }
}
