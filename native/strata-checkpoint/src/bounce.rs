//! Buffers for bytes that cannot be read straight to their destination, kept between reads: fresh pages cost
//! 30 times what copying into warm ones does.

use std::sync::Mutex;

use strata_io::lent::LentMut;

use crate::plan::REQUEST_BYTES;

/// Buffers that stay allocated while nobody reads.
const KEPT: usize = 8;

static FREE: Mutex<Vec<LentMut>> = Mutex::new(Vec::new());

/// A buffer of at least `bytes`. Give it back with [`give`] once no operation can touch it.
pub(crate) fn take(bytes: u64) -> LentMut {
    if bytes <= REQUEST_BYTES
        && let Some(buffer) = FREE.lock().expect("never poisoned").pop()
    {
        return buffer;
    }
    LentMut::owned(bytes.max(REQUEST_BYTES) as usize)
}

/// Keeps the buffer for the next read.
pub(crate) fn give(buffer: LentMut) {
    let mut free = FREE.lock().expect("never poisoned");
    if buffer.len() as u64 == REQUEST_BYTES && free.len() < KEPT {
        free.push(buffer);
    }
}
