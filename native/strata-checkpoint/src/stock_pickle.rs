//! The `.metadata` of stock torch, written opcode by opcode from a manifest: half a million index objects are never
//! made. Pure.
//!
//! What it unpickles to is what stock torch's own pickle does; `tests/checkpoint/test_stock_pickle.py` compares them.

use std::collections::HashMap;

use strata_io::digest::xxh3;

use crate::item::{Entry, Item, TensorEntry};
use crate::manifest::Manifest;

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// As many pairs as pickle itself puts on the stack before it adds them to a dict.
const BATCH: usize = 1000;

/// A guess at the opcodes of one item: memory is asked for once.
const ITEM_BYTES: usize = 112;

/// Sizes and offsets that are kept in the memo: shards of all tensors have some hundreds of them.
const MAX_SIZES: usize = 1 << 16;

/// What of a `.metadata` only its writer knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StockParts {
    /// The planner's data as opcodes, without head and stop.
    pub planner_data: Vec<u8>,
    /// StorageMeta likewise; may use what the planner's data has put into the memo.
    pub storage_meta: Vec<u8>,
    /// Both have put fewer than this into the memo.
    pub first_memo: u32,
    /// DCP's version of the format.
    pub version: String,
    /// Whether this torch's properties have strides: 2.14 and older have none.
    pub has_strides: bool,
}

/// The end of a sealed index. Before it stands the XXH3-128 of all before that.
pub(crate) const SEAL: &[u8; 8] = b"STRATAX\n";

/// The index with a digest behind it. Whoever unpickles it reads no further than the pickle's end.
pub(crate) fn seal(mut index: Vec<u8>) -> Vec<u8> {
    index.extend(xxh3(&index).to_le_bytes());
    index.extend(SEAL);
    index
}

/// Whether the digest behind an index is that of the index; None if there is none.
pub fn is_sealed(index: &[u8]) -> Option<bool> {
    let (content, digest) = index.strip_suffix(SEAL)?.split_last_chunk::<16>()?;
    Some(xxh3(content).to_le_bytes() == *digest)
}

/// A pickled `torch.distributed.checkpoint.metadata.Metadata` of what is in `manifest`.
pub fn stock_pickle(manifest: &Manifest, parts: &StockParts) -> Vec<u8> {
    let rows = manifest.items.len() + manifest.entries.len();
    let mut pickler = Pickler {
        out: Vec::with_capacity(rows * ITEM_BYTES + parts.planner_data.len()),
        next_memo: parts.first_memo,
        known: HashMap::new(),
        sizes: HashMap::new(),
    };
    let paths: Vec<String> = (0..manifest.objects.len()).map(|i| manifest.path_of(i as u32)).collect();
    pickler.out.extend(b"\x80\x04");
    let words = pickler.define(manifest, parts, &paths);
    pickler.global(METADATA, "Metadata");
    pickler.out.extend(b")\x81}(");
    pickler.get(words.planner_data);
    pickler.out.extend(&parts.planner_data);

    let mut names: HashMap<&[u8], u32> = HashMap::with_capacity(manifest.entries.len());
    pickler.get(words.state_dict_metadata);
    pickler.out.push(b'}');
    let chunks = manifest.chunks();
    let numbers: Vec<usize> = (0..manifest.entries.len()).collect();
    for numbers in numbers.chunks(BATCH) {
        pickler.out.push(b'(');
        for number in numbers {
            let entry = &manifest.entries[*number];
            pickler.string(&entry.fqn);
            names.insert(&entry.fqn, pickler.put());
            pickler.entry(&words, entry, chunks.of(*number), parts.has_strides);
        }
        pickler.out.push(b'u');
    }
    drop(chunks);
    pickler.get(words.storage_data);
    pickler.out.push(b'}');
    let num_items = manifest.items.len();
    let mut row = 0;
    manifest.items.each(|item| {
        if row % BATCH == 0 {
            pickler.out.push(b'(');
        }
        pickler.item(&words, item, &names);
        row += 1;
        if row % BATCH == 0 || row == num_items {
            pickler.out.push(b'u');
        }
    });

    // At the end, where a reader looks for the save_id.
    pickler.get(words.version_key);
    pickler.get(words.version);
    pickler.get(words.storage_meta);
    pickler.out.extend(&parts.storage_meta);
    pickler.out.extend(b"ub.");
    pickler.out
}

/// Places in the memo of what occurs often.
struct Words {
    planner_data: u32,
    state_dict_metadata: u32,
    storage_data: u32,
    version_key: u32,
    version: u32,
    storage_meta: u32,
    properties: u32,
    size: u32,
    chunks: u32,
    offsets: u32,
    sizes: u32,
    fqn: u32,
    index: u32,
    offset: u32,
    relative_path: u32,
    length: u32,
    torch_size: u32,
    chunk_class: u32,
    tensor_class: u32,
    bytes_class: u32,
    properties_class: u32,
    index_class: u32,
    info_class: u32,
    layout_class: u32,
    format_class: u32,
    /// Of each object.
    paths: Vec<u32>,
    /// Of each dtype in the entries.
    dtypes: HashMap<String, u32>,
}

struct Pickler {
    out: Vec<u8>,
    next_memo: u32,
    known: HashMap<String, u32>,
    sizes: HashMap<Vec<i64>, u32>,
}

impl Pickler {
    /// Puts into the memo what occurs often.
    fn define(&mut self, manifest: &Manifest, parts: &StockParts, paths: &[String]) -> Words {
        let mut dtypes = HashMap::new();
        for tensor in manifest.entries.iter().filter_map(|entry| entry.tensor.as_ref()) {
            if !dtypes.contains_key(&tensor.dtype) {
                dtypes.insert(tensor.dtype.clone(), self.class("torch", &tensor.dtype));
            }
        }
        Words {
            planner_data: self.text("planner_data"),
            state_dict_metadata: self.text("state_dict_metadata"),
            storage_data: self.text("storage_data"),
            version_key: self.text("version"),
            version: self.text(&parts.version),
            storage_meta: self.text("storage_meta"),
            properties: self.text("properties"),
            size: self.text("size"),
            chunks: self.text("chunks"),
            offsets: self.text("offsets"),
            sizes: self.text("sizes"),
            fqn: self.text("fqn"),
            index: self.text("index"),
            offset: self.text("offset"),
            relative_path: self.text("relative_path"),
            length: self.text("length"),
            torch_size: self.class("torch", "Size"),
            chunk_class: self.class(METADATA, "ChunkStorageMetadata"),
            tensor_class: self.class(METADATA, "TensorStorageMetadata"),
            bytes_class: self.class(METADATA, "BytesStorageMetadata"),
            properties_class: self.class(METADATA, "TensorProperties"),
            index_class: self.class(METADATA, "MetadataIndex"),
            info_class: self.class(FILESYSTEM, "_StorageInfo"),
            layout_class: self.class("torch.serialization", "_get_layout"),
            format_class: self.class(METADATA, "_MEM_FORMAT_ENCODING"),
            paths: paths.iter().map(|path| self.text(path)).collect(),
            dtypes,
        }
    }

    /// What state_dict_metadata says of one name, with the offsets and lengths of its chunks.
    fn entry(
        &mut self,
        words: &Words,
        entry: &Entry,
        chunks: impl Iterator<Item = (Vec<i64>, Vec<i64>)>,
        has_strides: bool,
    ) {
        let Some(tensor) = &entry.tensor else {
            self.get(words.bytes_class);
            self.out.extend(b")\x81");
            return;
        };
        self.begin(words.tensor_class);
        self.get(words.properties);
        self.properties(words, tensor, has_strides);
        self.get(words.size);
        self.size(words, &signed(&tensor.size));
        self.get(words.chunks);
        self.out.extend(b"](");
        for (offsets, lengths) in chunks {
            self.begin(words.chunk_class);
            self.get(words.offsets);
            self.size(words, &offsets);
            self.get(words.sizes);
            self.size(words, &lengths);
            self.out.extend(b"ub");
        }
        self.out.extend(b"eub");
    }

    fn properties(&mut self, words: &Words, tensor: &TensorEntry, has_strides: bool) {
        self.get(words.properties_class);
        self.out.extend(b")\x81(");
        self.get(words.dtypes[&tensor.dtype]);
        self.get(words.layout_class);
        self.string(format!("torch.{}", tensor.layout).as_bytes());
        self.out.extend(b"\x85R");
        self.bool(tensor.requires_grad);
        self.get(words.format_class);
        self.int(i64::from(tensor.memory_format));
        self.out.extend(b"\x85R");
        self.bool(tensor.pin_memory);
        match &tensor.strides {
            _ if !has_strides => {}
            None => self.out.push(b'N'),
            Some(strides) => self.tuple(strides),
        }
        self.out.extend(b"tb");
    }

    /// A MetadataIndex and where it is stored.
    fn item(&mut self, words: &Words, item: &Item, names: &HashMap<&[u8], u32>) {
        self.begin(words.index_class);
        self.get(words.fqn);
        match names.get(&*item.fqn) {
            Some(memo) => self.get(*memo),
            None => self.string(&item.fqn),
        }
        self.get(words.index);
        match item.index {
            None => self.out.push(b'N'),
            Some(index) => self.int(i64::from(index)),
        }
        if let Some(offsets) = &item.offsets {
            self.get(words.offset);
            self.size(words, &signed(offsets));
        }
        self.out.extend(b"ub");
        self.begin(words.info_class);
        self.get(words.relative_path);
        self.get(words.paths[item.object as usize]);
        self.get(words.offset);
        self.int(item.item_offset as i64);
        self.get(words.length);
        self.int(item.item_bytes as i64);
        self.out.extend(b"ub");
    }

    /// An object of a class without arguments, up to its state.
    fn begin(&mut self, class: u32) {
        self.get(class);
        self.out.extend(b")\x81}(");
    }

    /// A torch.Size.
    fn size(&mut self, words: &Words, dims: &[i64]) {
        if let Some(memo) = self.sizes.get(dims) {
            return self.get(*memo);
        }
        self.get(words.torch_size);
        self.tuple(dims);
        self.out.extend(b"\x85R");
        if self.sizes.len() < MAX_SIZES {
            let memo = self.put();
            self.sizes.insert(dims.to_vec(), memo);
        }
    }

    fn tuple(&mut self, values: &[i64]) {
        let short = [b')', b'\x85', b'\x86', b'\x87'].get(values.len()).copied();
        if short.is_none() {
            self.out.push(b'(');
        }
        values.iter().for_each(|value| self.int(*value));
        self.out.push(short.unwrap_or(b't'));
    }

    fn int(&mut self, value: i64) {
        if let Ok(byte) = u8::try_from(value) {
            self.out.extend([b'K', byte]);
        } else if let Ok(word) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend(word.to_le_bytes());
        } else {
            self.out.extend(b"\x8a\x08");
            self.out.extend(value.to_le_bytes());
        }
    }

    fn bool(&mut self, value: bool) {
        self.out.push(if value { b'\x88' } else { b'\x89' });
    }

    fn string(&mut self, value: &[u8]) {
        match u8::try_from(value.len()) {
            Ok(length) => self.out.extend([b'\x8c', length]),
            Err(_) => {
                self.out.push(b'X');
                self.out.extend((value.len() as u32).to_le_bytes());
            }
        }
        self.out.extend(value);
    }

    fn text(&mut self, value: &str) -> u32 {
        if let Some(memo) = self.known.get(value) {
            return *memo;
        }
        self.string(value.as_bytes());
        let memo = self.put();
        self.out.push(b'0');
        self.known.insert(value.to_owned(), memo);
        memo
    }

    fn class(&mut self, module: &str, name: &str) -> u32 {
        self.global(module, name);
        let memo = self.put();
        self.out.push(b'0');
        memo
    }

    fn global(&mut self, module: &str, name: &str) {
        self.out.extend(format!("c{module}\n{name}\n").as_bytes());
    }

    /// Puts the top of the stack into the memo.
    fn put(&mut self) -> u32 {
        let memo = self.next_memo;
        self.next_memo += 1;
        self.memo(memo, b'q', b'r');
        memo
    }

    fn get(&mut self, memo: u32) {
        self.memo(memo, b'h', b'j');
    }

    fn memo(&mut self, memo: u32, short: u8, long: u8) {
        match u8::try_from(memo) {
            Ok(byte) => self.out.extend([short, byte]),
            Err(_) => {
                self.out.push(long);
                self.out.extend(memo.to_le_bytes());
            }
        }
    }
}

fn signed(dims: &[u64]) -> Vec<i64> {
    dims.iter().map(|extent| *extent as i64).collect()
}
