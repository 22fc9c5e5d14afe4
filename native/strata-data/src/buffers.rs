//! Memory that shards are read into, used again once nobody looks at it any more: new pages cost more than reading them.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use strata_io::lent::LentMut;

/// Pages are fetched from the system in pieces of this.
pub(crate) const GRAIN_BYTES: usize = 64 << 10;

/// Free memory of one stream of batches.
#[derive(Debug, Clone)]
pub(crate) struct Buffers {
    free: Arc<Mutex<Vec<LentMut>>>,
    max_bytes: usize,
}

impl Buffers {
    /// Keeps at most `max_bytes` of what is free.
    pub fn new(max_bytes: usize) -> Self {
        Self { free: Arc::default(), max_bytes }
    }

    /// Memory for `bytes`, which may be more.
    pub fn take(&self, bytes: usize) -> LentMut {
        let mut free = self.free.lock().expect("no panic while held");
        let fits = |memory: &LentMut| memory.len() >= bytes && memory.len() <= 2 * bytes + GRAIN_BYTES;
        match free.iter().rposition(fits) {
            Some(at) => free.swap_remove(at),
            None => {
                drop(free);
                LentMut::owned(bytes.next_multiple_of(GRAIN_BYTES))
            }
        }
    }

    /// The first `bytes` of `memory`, to be read; it comes back when the last slice of them has gone.
    pub fn share(&self, memory: LentMut, bytes: usize) -> Bytes {
        Bytes::from_owner(Shared { memory: Some(memory), buffers: self.clone() }).slice(..bytes)
    }

    fn give_back(&self, memory: LentMut) {
        let mut free = self.free.lock().expect("no panic while held");
        free.push(memory);
        let mut kept: usize = free.iter().map(LentMut::len).sum();
        // The oldest are the coldest, and of sizes that are wanted no more.
        while kept > self.max_bytes {
            kept -= free.remove(0).len();
        }
    }
}

struct Shared {
    memory: Option<LentMut>,
    buffers: Buffers,
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().expect("taken when dropped").as_slice()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.buffers.give_back(self.memory.take().expect("taken once"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_when_the_last_slice_has_gone() {
        let buffers = Buffers::new(1 << 20);
        let memory = buffers.take(100_000);
        let address = memory.addr();
        let bytes = buffers.share(memory, 100_000);
        let slice = bytes.slice(10..20);
        drop(bytes);
        assert_ne!(buffers.take(100_000).addr(), address);
        drop(slice);
        assert_eq!(buffers.take(90_000).addr(), address);
    }

    #[test]
    fn no_more_is_kept_than_was_said() {
        let buffers = Buffers::new(200_000);
        let all: Vec<Bytes> = (0..5).map(|_| buffers.share(buffers.take(65_536), 65_536)).collect();
        drop(all);
        assert_eq!(buffers.free.lock().unwrap().len(), 3);
    }
}
