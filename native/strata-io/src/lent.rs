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

    /// Memory that was reclaimed, on loan once more.
    ///
    /// # Panics
    /// If it is not the whole of what [`Loan::reclaim`] gave back.
    pub fn on_loan_again(self) -> (Self, Loan) {
        let LentMut { ptr, len, lease } = self;
        let buffer = lease.downcast::<AlignedBuffer>().expect("memory of our own");
        assert!(ptr == buffer.ptr && Arc::strong_count(&buffer) == 1, "a piece of lent memory is not lent again");
        (Self { ptr, len, lease: buffer.clone() }, Loan { buffer, len })
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

    /// Writes `source`, which is as long, past the caches: of memory that nobody reads soon, no line is fetched before
    /// it is overwritten.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn stream_from(&mut self, source: &[u8]) {
        assert_eq!(self.len, source.len());
        stream(source, self.as_mut_slice());
    }

    /// Makes all pages present, at a fifth of what it costs to do so one by one as they are written. Whole pages.
    pub fn populate(&mut self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the memory is ours, and its content stays. A system that cannot do it does it one by one, later.
        let _ = unsafe { rustix::mm::madvise(self.ptr.cast(), self.len, rustix::mm::Advice::LinuxPopulateWrite) };
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

#[cfg(target_arch = "x86_64")]
fn stream(source: &[u8], target: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128};
    const WORD: usize = size_of::<__m128i>();
    const LINE: usize = 64;
    const PAGE: usize = 4096;
    // SAFETY: any bytes are a valid __m128i.
    let (head, words, tail) = unsafe { target.align_to_mut::<__m128i>() };
    let (head_source, rest) = source.split_at(head.len());
    let (from, tail_source) = rest.split_at(size_of_val(words));
    head.copy_from_slice(head_source);
    tail.copy_from_slice(tail_source);
    let put = |word: &mut __m128i, bytes: &[u8]| {
        debug_assert_eq!(bytes.len(), WORD);
        // SAFETY: `word` is aligned, `bytes` is as long.
        unsafe { _mm_stream_si128(word, _mm_loadu_si128(bytes.as_ptr().cast())) }
    };
    // Two pages at a time, for memory answers two streams sooner than one (as glibc's large copies do).
    let mut pairs = words.chunks_exact_mut(2 * PAGE / WORD);
    let mut from_pairs = from.chunks_exact(2 * PAGE);
    for (pair, from_pair) in pairs.by_ref().zip(from_pairs.by_ref()) {
        let (first, second) = pair.split_at_mut(PAGE / WORD);
        let lines = first.chunks_exact_mut(LINE / WORD).zip(second.chunks_exact_mut(LINE / WORD));
        for (at, (one, other)) in (0..PAGE).step_by(LINE).zip(lines) {
            for (line, at) in [(one, at), (other, PAGE + at)] {
                // SAFETY: a hint, which may name any address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(from_pair.as_ptr().wrapping_add(2 * PAGE + at).cast()) };
                line.iter_mut().zip(from_pair[at..at + LINE].chunks_exact(WORD)).for_each(|(word, b)| put(word, b));
            }
        }
    }
    let rest = pairs.into_remainder().iter_mut().zip(from_pairs.remainder().chunks_exact(WORD));
    rest.for_each(|(word, bytes)| put(word, bytes));
    // SAFETY: every x86_64 has it. Streamed stores are seen by other threads in order only with this.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_made_present_hold_what_they_held() {
        let mut memory = LentMut::owned(3 << 20);
        memory.as_mut_slice()[5000] = 7;
        memory.populate();
        assert_eq!((memory.as_slice()[5000], memory.as_slice()[2 << 20]), (7, 0));
    }

    #[test]
    fn streamed_bytes_arrive_from_and_at_any_address() {
        let source: Vec<u8> = (0..30_000_usize).map(|i| (i * 31 + i / 251) as u8).collect();
        for (from, at, bytes) in [(0, 0, 24576), (1, 0, 16384), (0, 3, 8192), (5, 7, 20321), (2, 9, 5), (0, 0, 0)] {
            let (mut memory, loan) = LentMut::on_loan(30_000);
            let _before = memory.split_to(at);
            memory.split_to(bytes).stream_from(&source[from..from + bytes]);
            drop((_before, memory));
            let found = loan.reclaim().unwrap();
            assert_eq!(&found.as_slice()[at..at + bytes], &source[from..from + bytes]);
            assert!(found.as_slice()[..at].iter().chain(&found.as_slice()[at + bytes..]).all(|byte| *byte == 0));
        }
    }
}
