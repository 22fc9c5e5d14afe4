//! Page-locked buffers, kept between uses: locking 16 MiB takes longer than copying them from a device.

use std::fmt;
use std::sync::{Arc, Mutex};

use strata_io::lent::LentMut;

use crate::{Device, Driver};

/// Locked memory that stays allocated while nobody copies; as much as a store's default budget in flight.
const KEPT_BYTES: usize = 256 << 20;

static FREE: Mutex<Vec<PageLocked>> = Mutex::new(Vec::new());

/// Host memory at a multiple of 4096, locked if the driver allows; goes back to be used again when dropped.
pub struct PinnedBuffer {
    locked: Option<PageLocked>,
    bytes: usize,
}

/// Memory of the host whose pages are locked, if the driver allows, until this is dropped.
pub struct PageLocked {
    memory: LentMut,
    driver: Arc<dyn Driver>,
    is_locked: bool,
    pid: u32,
}

impl PageLocked {
    /// Locks `memory`, for copies from and to any device of the driver.
    pub fn new(Device { driver, ordinal }: &Device, mut memory: LentMut) -> Self {
        let is_locked = driver.pin(*ordinal, memory.as_mut_slice()).is_ok();
        Self { memory, driver: driver.clone(), is_locked, pid: std::process::id() }
    }

    /// Whether the driver allowed it; copies are slower if not.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        // The driver knows nothing of a forked child.
        if self.is_locked && self.pid == std::process::id() {
            self.driver.unpin(self.memory.as_mut_slice());
        }
    }
}

impl fmt::Debug for PageLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageLocked({} bytes, {})", self.memory.len(), if self.is_locked { "locked" } else { "not locked" })
    }
}

impl PinnedBuffer {
    /// A buffer of `bytes` for copies from and to `device`; its content is anything.
    pub fn take(device: &Device, bytes: usize) -> Self {
        let fits = |kept: &PageLocked| kept.memory.len() >= bytes && Arc::ptr_eq(&kept.driver, &device.driver);
        let mut free = FREE.lock().expect("never poisoned");
        // The smallest that fits, so that a large one is there when it is needed.
        let best = (0..free.len()).filter(|i| fits(&free[*i])).min_by_key(|i| free[*i].memory.len());
        let kept = best.map(|i| free.swap_remove(i));
        drop(free);
        let locked = kept.unwrap_or_else(|| PageLocked::new(device, LentMut::owned(bytes)));
        Self { locked: Some(locked), bytes }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.locked.as_mut().expect("held until dropped").memory.as_mut_slice()[..self.bytes]
    }
}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.locked.as_ref().expect("held until dropped").memory.as_slice()[..self.bytes]
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let Some(locked) = self.locked.take() else { return };
        let mut free = FREE.lock().expect("never poisoned");
        let held: usize = free.iter().map(|kept| kept.memory.len()).sum();
        if held + locked.memory.len() <= KEPT_BYTES {
            free.push(locked);
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::StandIn;

    #[test]
    fn pages_stay_locked_for_as_long_as_they_are_meant_to() {
        let driver = Arc::new(StandIn::new(vec![]));
        let device = Device { driver: driver.clone(), ordinal: 0 };
        let locked = PageLocked::new(&device, LentMut::owned(5 << 20));
        assert!(locked.is_locked());
        assert_eq!(driver.pinned_bytes(), 5 << 20);
        drop(locked);
        assert_eq!(driver.pinned_bytes(), 0);
    }

    #[test]
    fn where_no_page_may_be_locked_the_memory_is_used_as_it_is() {
        let device = Device { driver: Arc::new(StandIn::without_locked_memory(vec![])), ordinal: 0 };
        assert!(!PageLocked::new(&device, LentMut::owned(4096)).is_locked());
    }
}
