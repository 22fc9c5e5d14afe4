//! Buffers for bytes that cannot be read straight to their destination, kept between reads: fresh pages cost
//! 30 times what copying into warm ones does.

use std::sync::Mutex;

use strata_device::{Device, PinnedBuffer};
use strata_io::lent::LentMut;

use crate::plan::REQUEST_BYTES;

/// Smallest buffer: a request whose blocks all have destinations still needs room for the frames between them.
const LEAST_BYTES: u64 = 64 << 10;

/// Buffers that stay allocated while nobody reads, all together.
const KEPT_BYTES: usize = 128 << 20;

static FREE: Mutex<Vec<LentMut>> = Mutex::new(Vec::new());

/// Length of the buffer that holds `bytes`: powers of two up to a request's length, so that kept ones fit again.
pub(crate) fn buffer_bytes(bytes: u64) -> u64 {
    if bytes > REQUEST_BYTES { bytes } else { bytes.next_power_of_two().max(LEAST_BYTES) }
}

/// A buffer of at least `bytes`, page-locked if they go on to `device`. Give it back with [`give`] once no operation
/// can touch it.
pub(crate) fn take(bytes: u64, device: Option<&Device>) -> Bounce {
    let wanted = buffer_bytes(bytes) as usize;
    match device {
        None => Bounce::Pageable(pageable(wanted)),
        Some(device) => Bounce::Locked(PinnedBuffer::take(device, wanted).lent()),
    }
}

/// A buffer in use.
pub(crate) enum Bounce {
    /// Goes back by [`give`].
    Pageable(LentMut),
    /// Goes back by itself, when its last handle is gone.
    Locked(LentMut),
}

impl Bounce {
    /// All of its memory.
    pub fn memory(&self) -> &LentMut {
        match self {
            Self::Pageable(memory) | Self::Locked(memory) => memory,
        }
    }
}

fn pageable(wanted: usize) -> LentMut {
    let mut free = FREE.lock().expect("never poisoned");
    if let Some(at) = free.iter().position(|buffer| buffer.len() == wanted) {
        return free.swap_remove(at);
    }
    drop(free);
    LentMut::owned(wanted)
}

/// Keeps the buffer for the next read.
pub(crate) fn give(buffer: Bounce) {
    let Bounce::Pageable(buffer) = buffer else { return };
    let mut free = FREE.lock().expect("never poisoned");
    let kept: usize = free.iter().map(LentMut::len).sum();
    if buffer.len() as u64 <= REQUEST_BYTES && kept + buffer.len() <= KEPT_BYTES {
        free.push(buffer);
    }
}
