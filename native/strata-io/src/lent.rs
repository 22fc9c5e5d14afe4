//! Memory that belongs to somebody else, for as long as an operation can touch it. This crate's one home of `unsafe`.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

/// What keeps lent memory alive; dropped only when the last operation that can touch the memory has ended.
pub type Lease = Arc<dyn Any + Send + Sync>;

/// Memory lent for reading, as [`Bytes`] that copy nothing.
///
/// # Safety
/// `ptr..ptr + len` stays readable until `lease` is dropped. (Bytes that change meanwhile are a wrong
/// result, found by the digests, not undefined behaviour we could prevent: the owner is another language.)
pub unsafe fn lend(ptr: *const u8, len: usize, lease: Lease) -> Bytes {
    if len == 0 {
        return Bytes::new();
    }
    Bytes::from_owner(Lent { ptr, len, _lease: lease })
}

struct Lent {
    ptr: *const u8,
    len: usize,
    _lease: Lease,
}

// SAFETY: the memory is plain bytes and the lease is Send + Sync; `lend`'s contract covers its life.
unsafe impl Send for Lent {}
unsafe impl Sync for Lent {}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `lend`'s contract.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

/// Memory lent for writing: one exclusive, sendable slice.
pub struct LentMut {
    ptr: *mut u8,
    len: usize,
    lease: Lease,
}

// SAFETY: exclusive access is the constructor's contract; the lease is Send + Sync.
unsafe impl Send for LentMut {}
unsafe impl Sync for LentMut {}

impl fmt::Debug for LentMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentMut({} bytes)", self.len)
    }
}

impl LentMut {
    /// Takes `ptr..ptr + len` for writing.
    ///
    /// # Safety
    /// The range stays writable, and nobody else reads or writes it, until `lease` is dropped.
    pub unsafe fn new(ptr: *mut u8, len: usize, lease: Lease) -> Self {
        Self { ptr, len, lease }
    }

    /// Memory of our own: `len` zeroed bytes whose address is a multiple of 4096.
    pub fn owned(len: usize) -> Self {
        Self::on_loan(len).0
    }

    /// Like [`LentMut::owned`], with a [`Loan`] that takes the memory back once every piece of it is gone.
    pub fn on_loan(len: usize) -> (Self, Loan) {
        let buffer = Arc::new(AlignedBuffer::new(len));
        // Arc<AlignedBuffer> frees the pages when the last piece is gone.
        (Self { ptr: buffer.ptr, len, lease: buffer.clone() }, Loan { buffer, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, for alignment checks.
    pub fn addr(&self) -> usize {
        self.ptr as usize
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the constructor's contract.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the constructor's contract.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// Splits off the first `at` bytes.
    ///
    /// # Panics
    /// If `at` is past the end.
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "split at {at} of {}", self.len);
        let head = Self { ptr: self.ptr, len: at, lease: self.lease.clone() };
        // SAFETY: within the same allocation, checked above.
        self.ptr = unsafe { self.ptr.add(at) };
        self.len -= at;
        head
    }

    /// A second handle on the same memory, read only after the operation that takes the first one has succeeded.
    pub(crate) fn landing(&self) -> Self {
        // SAFETY: `read_digested` looks at it when the read that took the first handle has ended.
        unsafe { self.alias() }
    }

    /// A second handle on the same memory, for the verifier that runs after the read has ended.
    ///
    /// # Safety
    /// The caller never writes through one handle while the other is in use.
    pub unsafe fn alias(&self) -> Self {
        Self { ptr: self.ptr, len: self.len, lease: self.lease.clone() }
    }
}

/// The lender's end of [`LentMut::on_loan`]: what it lent, to be had back.
pub struct Loan {
    buffer: Arc<AlignedBuffer>,
    len: usize,
}

impl Loan {
    /// All of the memory again, from its first byte.
    ///
    /// # Errors
    /// The loan itself, while a piece of the memory is still in use.
    pub fn reclaim(self) -> Result<LentMut, Loan> {
        let Loan { buffer, len } = self;
        match Arc::try_unwrap(buffer) {
            Ok(buffer) => Ok(LentMut { ptr: buffer.ptr, len, lease: Arc::new(buffer) }),
            Err(buffer) => Err(Loan { buffer, len }),
        }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} bytes)", self.len)
    }
}

struct AlignedBuffer {
    ptr: *mut u8,
    layout: std::alloc::Layout,
}

// SAFETY: plain memory, freed once.
unsafe impl Send for AlignedBuffer {}
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    fn new(len: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(len.max(1), 4096).expect("a buffer fits the address space");
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Self { ptr, layout }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.ptr, self.layout) }
    }
}
