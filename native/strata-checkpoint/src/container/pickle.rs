//! data.pkl of one tensor: written byte for byte as torch.save's pickler does (protocol 2), and read by a machine
//! that knows only what such a pickle contains. Reading executes nothing: it yields numbers and names.

use std::rc::Rc;

use super::{ContainerError, DTYPES, Dtype, TensorSpec, dtype};

mod op {
    pub const PROTO: u8 = 0x80;
    pub const STOP: u8 = b'.';
    pub const MARK: u8 = b'(';
    pub const GLOBAL: u8 = b'c';
    pub const REDUCE: u8 = b'R';
    pub const BINPERSID: u8 = b'Q';
    pub const BINPUT: u8 = b'q';
    pub const BINGET: u8 = b'h';
    pub const BINUNICODE: u8 = b'X';
    pub const BININT: u8 = b'J';
    pub const BININT1: u8 = b'K';
    pub const BININT2: u8 = b'M';
    pub const LONG1: u8 = 0x8A;
    pub const NEWTRUE: u8 = 0x88;
    pub const NEWFALSE: u8 = 0x89;
    pub const EMPTY_TUPLE: u8 = b')';
    pub const TUPLE1: u8 = 0x85;
    pub const TUPLE2: u8 = 0x86;
    pub const TUPLE3: u8 = 0x87;
    pub const TUPLE: u8 = b't';
}

const PROTOCOL: u8 = 2;

const UTILS: &str = "torch._utils";
/// Rebuilds from a storage that carries the dtype.
const REBUILD_TYPED: &str = "_rebuild_tensor_v2";
/// Rebuilds from bare bytes and a dtype.
const REBUILD_UNTYPED: &str = "_rebuild_tensor_v3";
const REBUILD_PARAMETER: &str = "_rebuild_parameter";

/// The pickle that torch.save writes for this tensor, held on the CPU.
///
/// # Errors
/// `UnknownDtype`.
pub fn write(spec: &TensorSpec<'_>) -> Result<Vec<u8>, ContainerError> {
    let row = dtype(spec.dtype).ok_or_else(|| ContainerError::UnknownDtype(spec.dtype.to_owned()))?;
    let mut out = Pickler::default();
    out.bytes.extend([op::PROTO, PROTOCOL]);
    out.global(UTILS, if row.storage.is_some() { REBUILD_TYPED } else { REBUILD_UNTYPED });
    out.bytes.extend([op::MARK, op::MARK]);
    out.text("storage");
    match row.storage {
        Some(class) => out.global("torch", class),
        None => out.global("torch.storage", "UntypedStorage"),
    }
    out.text("0");
    out.text("cpu");
    // An untyped storage counts bytes.
    out.int(if row.storage.is_some() { spec.payload_bytes / row.bytes } else { spec.payload_bytes });
    out.memoized(op::TUPLE);
    out.bytes.push(op::BINPERSID);
    out.int(0);
    out.ints(spec.shape);
    out.ints(spec.strides);
    out.bytes.push(op::NEWFALSE);
    out.global("collections", "OrderedDict");
    out.bytes.push(op::EMPTY_TUPLE);
    out.memoized(op::REDUCE);
    if row.storage.is_none() {
        out.global("torch", row.name);
    }
    out.memoized(op::TUPLE);
    out.memoized(op::REDUCE);
    out.bytes.push(op::STOP);
    Ok(out.bytes)
}

/// Python's pickler memoizes every string, global, tuple and result, though this pickle recalls none.
#[derive(Default)]
struct Pickler {
    bytes: Vec<u8>,
    memos: u8,
}

impl Pickler {
    fn memoize(&mut self) {
        self.bytes.extend([op::BINPUT, self.memos]);
        self.memos += 1;
    }

    fn memoized(&mut self, opcode: u8) {
        self.bytes.push(opcode);
        self.memoize();
    }

    fn global(&mut self, module: &str, name: &str) {
        self.bytes.push(op::GLOBAL);
        self.bytes.extend_from_slice(format!("{module}\n{name}\n").as_bytes());
        self.memoize();
    }

    fn text(&mut self, text: &str) {
        self.bytes.push(op::BINUNICODE);
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(text.as_bytes());
        self.memoize();
    }

    fn int(&mut self, value: u64) {
        let bytes = value.to_le_bytes();
        match value {
            0..=0xFF => self.bytes.extend([op::BININT1, bytes[0]]),
            0x100..=0xFFFF => self.bytes.extend([op::BININT2, bytes[0], bytes[1]]),
            0x1_0000..=0x7FFF_FFFF => {
                self.bytes.push(op::BININT);
                self.bytes.extend_from_slice(&bytes[..4]);
            }
            _ => {
                // The shortest two's complement: one bit more than the value, for the sign.
                let len = 1 + (value.ilog2() as usize + 1) / 8;
                self.bytes.extend([op::LONG1, len as u8]);
                self.bytes.extend(bytes.iter().chain(&[0]).take(len));
            }
        }
    }

    fn ints(&mut self, values: &[u64]) {
        if values.len() > 3 {
            self.bytes.push(op::MARK);
        }
        for value in values {
            self.int(*value);
        }
        match values.len() {
            0 => self.bytes.push(op::EMPTY_TUPLE),
            1 => self.memoized(op::TUPLE1),
            2 => self.memoized(op::TUPLE2),
            3 => self.memoized(op::TUPLE3),
            _ => self.memoized(op::TUPLE),
        }
    }
}

/// What a data.pkl says of its one tensor. Nothing is checked against the payload yet, nor the parts against
/// one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pickled {
    pub dtype: &'static Dtype,
    pub shape: Vec<u64>,
    pub strides: Vec<u64>,
    /// In elements.
    pub storage_offset: u64,
    /// Name of the payload's record below `data/`.
    pub storage_key: String,
    /// `None` when it does not fit.
    pub storage_bytes: Option<u64>,
}

/// Reads the data.pkl of a plain tensor or Parameter.
///
/// # Errors
/// `Unrecognised` for every pickle that is not exactly such a one.
pub fn read(data: &[u8]) -> Result<Pickled, ContainerError> {
    let mut machine = Machine { data, at: 0, stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
    machine.run().ok_or_else(|| {
        let at = machine.at;
        ContainerError::Unrecognised(format!("data.pkl is not that of one plain tensor (byte {at} of {})", data.len()))
    })
}

/// All that a pickle of one tensor puts on the stack. Clones share, so that no memo can multiply memory.
#[derive(Clone)]
enum Value {
    Int(u64),
    Bool,
    Text(Rc<str>),
    Global(Rc<str>, Rc<str>),
    Storage(Rc<Storage>),
    Hooks,
    /// A tuple of numbers only.
    Ints(Rc<[u64]>),
    /// Any other tuple; it holds no further one of its kind.
    Args(Rc<[Value]>),
    Tensor(Rc<Pickled>),
}

struct Storage {
    /// `None`: bare bytes.
    dtype: Option<&'static Dtype>,
    key: Rc<str>,
    numel: u64,
}

/// Every step answers `None` at the first thing that torch.save would not have written.
struct Machine<'a> {
    data: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    /// Index by index, as the pickler counts: a gap is not recognised.
    memo: Vec<Value>,
}

impl Machine<'_> {
    fn run(&mut self) -> Option<Pickled> {
        if self.take(2)? != [op::PROTO, PROTOCOL] {
            return None;
        }
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                op::STOP => break,
                op::MARK => self.marks.push(self.stack.len()),
                op::GLOBAL => {
                    let value = Value::Global(self.line()?, self.line()?);
                    self.stack.push(value);
                }
                op::BINUNICODE => {
                    let text = self.text()?;
                    self.stack.push(Value::Text(text));
                }
                op::BININT1 => self.int(1)?,
                op::BININT2 => self.int(2)?,
                op::BININT => self.signed_int(4)?,
                op::LONG1 => {
                    let len = self.take(1)?[0];
                    self.signed_int(usize::from(len))?;
                }
                op::NEWTRUE | op::NEWFALSE => self.stack.push(Value::Bool),
                op::EMPTY_TUPLE => self.stack.push(Value::Ints(Rc::new([]))),
                op::TUPLE1 | op::TUPLE2 | op::TUPLE3 => {
                    let start = self.stack.len().checked_sub(usize::from(opcode - op::TUPLE1) + 1)?;
                    self.tuple(start)?;
                }
                op::TUPLE => {
                    let start = self.marks.pop()?;
                    self.tuple(start)?;
                }
                op::BINPUT => {
                    let index = self.take(1)?[0];
                    if usize::from(index) != self.memo.len() {
                        return None;
                    }
                    self.memo.push(self.stack.last()?.clone());
                }
                op::BINGET => {
                    let index = self.take(1)?[0];
                    let value = self.memo.get(usize::from(index))?.clone();
                    self.stack.push(value);
                }
                op::BINPERSID => {
                    let storage = storage(&self.pop_args()?)?;
                    self.stack.push(Value::Storage(Rc::new(storage)));
                }
                op::REDUCE => {
                    let args = self.pop_args()?;
                    let Value::Global(module, name) = self.stack.pop()? else {
                        return None;
                    };
                    let value = reduce(&module, &name, &args)?;
                    self.stack.push(value);
                }
                _ => return None,
            }
        }
        match (self.stack.as_slice(), self.at == self.data.len() && self.marks.is_empty()) {
            ([Value::Tensor(tensor)], true) => Some(Pickled::clone(tensor)),
            _ => None,
        }
    }

    fn take(&mut self, len: usize) -> Option<&[u8]> {
        let taken = self.data.get(self.at..)?.get(..len)?;
        self.at += len;
        Some(taken)
    }

    fn line(&mut self) -> Option<Rc<str>> {
        let len = self.data.get(self.at..)?.iter().position(|byte| *byte == b'\n')?;
        let line = Rc::from(std::str::from_utf8(self.take(len)?).ok()?);
        self.at += 1;
        Some(line)
    }

    fn text(&mut self) -> Option<Rc<str>> {
        let len = u32::from_le_bytes(self.take(4)?.try_into().ok()?);
        Some(Rc::from(std::str::from_utf8(self.take(len as usize)?).ok()?))
    }

    fn int(&mut self, len: usize) -> Option<()> {
        let value = self.take(len)?.iter().rev().fold(0, |high, byte| high << 8 | u64::from(*byte));
        self.stack.push(Value::Int(value));
        Some(())
    }

    /// Of up to 8 bytes. No count of a tensor is negative.
    fn signed_int(&mut self, len: usize) -> Option<()> {
        let negative = self.data.get(self.at..)?.get(..len)?.last().is_some_and(|byte| byte >> 7 == 1);
        if len > 8 || negative { None } else { self.int(len) }
    }

    /// Makes a tuple of the stack from `start`. A tower of tuples would overflow the stack when dropped, so
    /// arguments hold tuples of numbers and nothing nests deeper.
    fn tuple(&mut self, start: usize) -> Option<()> {
        if start > self.stack.len() || self.marks.last().is_some_and(|mark| start < *mark) {
            return None;
        }
        let values = &self.stack[start..];
        let tuple = match values.iter().map(Value::as_int).collect() {
            Some(ints) => Value::Ints(ints),
            None if values.iter().any(|value| matches!(value, Value::Args(_))) => return None,
            None => Value::Args(values.into()),
        };
        self.stack.truncate(start);
        self.stack.push(tuple);
        Some(())
    }

    fn pop_args(&mut self) -> Option<Rc<[Value]>> {
        match self.stack.pop()? {
            Value::Args(args) => Some(args),
            Value::Ints(ints) if ints.is_empty() => Some(Rc::new([])),
            _ => None,
        }
    }
}

impl Value {
    fn as_int(&self) -> Option<u64> {
        if let Value::Int(int) = self { Some(*int) } else { None }
    }
}

/// The persistent id `('storage', class, key, location, numel)`. The location only says where torch.load would put
/// the bytes; those on `meta` do not exist.
fn storage(id: &[Value]) -> Option<Storage> {
    let [Value::Text(tag), Value::Global(module, class), Value::Text(key), Value::Text(location), Value::Int(numel)] =
        id
    else {
        return None;
    };
    if **tag != *"storage" || **location == *"meta" {
        return None;
    }
    let dtype = match (&**module, &**class) {
        ("torch.storage", "UntypedStorage") => None,
        ("torch", class) => Some(DTYPES.iter().find(|row| row.storage == Some(class))?),
        _ => return None,
    };
    Some(Storage { dtype, key: key.clone(), numel: *numel })
}

fn reduce(module: &str, name: &str, args: &[Value]) -> Option<Value> {
    match (module, name, args) {
        ("collections", "OrderedDict", []) => Some(Value::Hooks),
        ("torch", "Size", [sizes @ Value::Ints(_)]) => Some(sizes.clone()),
        (UTILS, REBUILD_PARAMETER, [tensor @ Value::Tensor(_), Value::Bool, Value::Hooks]) => Some(tensor.clone()),
        (UTILS, REBUILD_TYPED, [Value::Storage(storage), tensor @ ..]) => rebuild(storage, storage.dtype?, tensor),
        (UTILS, REBUILD_UNTYPED, [Value::Storage(storage), tensor @ .., Value::Global(module, name)]) => {
            if storage.dtype.is_some() || **module != *"torch" {
                return None;
            }
            rebuild(storage, dtype(name)?, tensor)
        }
        _ => None,
    }
}

/// `rest` is what both ways share: storage offset, size, stride, requires_grad, hooks. A further dict, which marks
/// conjugate and negative views, is not plain.
fn rebuild(storage: &Storage, dtype: &'static Dtype, rest: &[Value]) -> Option<Value> {
    let [Value::Int(storage_offset), Value::Ints(shape), Value::Ints(strides), Value::Bool, Value::Hooks] = rest else {
        return None;
    };
    Some(Value::Tensor(Rc::new(Pickled {
        dtype,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
        storage_offset: *storage_offset,
        storage_key: storage.key.to_string(),
        storage_bytes: storage.numel.checked_mul(storage.dtype.map_or(1, |row| row.bytes)),
    })))
}
