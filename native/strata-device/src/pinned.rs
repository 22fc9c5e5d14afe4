//! Page-locked buffers, kept between uses: locking 16 MiB takes longer than copying them from a device.

use std::fmt;
use std::sync::{Arc, Mutex};

use strata_io::lent::LentMut;

use crate::{Device, Driver};

/// Locked memory that stays allocated while nobody copies; as much as a store's default budget in flight.
const KEPT_BYTES: usize = 256 << 20;

static FREE: Mutex<Vec<Locked>> = Mutex::new(Vec::new());

/// Host memory at a multiple of 4096, locked if the driver allows; goes back to be used again when dropped.
pub struct PinnedBuffer {
    locked: Option<Locked>,
    bytes: usize,
}

/// What is kept. Unlocked before it is freed.
struct Locked {
    memory: LentMut,
    driver: Arc<dyn Driver>,
    is_locked: bool,
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.is_locked {
            self.driver.unpin(self.memory.as_mut_slice());
        }
    }
}

impl PinnedBuffer {
    /// A buffer of `bytes` for copies from and to `device`; its content is anything.
    pub fn take(Device { driver, ordinal }: &Device, bytes: usize) -> Self {
        let fits = |kept: &Locked| kept.memory.len() >= bytes && Arc::ptr_eq(&kept.driver, driver);
        let mut free = FREE.lock().expect("never poisoned");
        // The smallest that fits, so that a large one is there when it is needed.
        let best = (0..free.len()).filter(|i| fits(&free[*i])).min_by_key(|i| free[*i].memory.len());
        let kept = best.map(|i| free.swap_remove(i));
        drop(free);
        let locked = kept.unwrap_or_else(|| {
            let mut memory = LentMut::owned(bytes);
            let is_locked = driver.pin(*ordinal, memory.as_mut_slice()).is_ok();
            Locked { memory, driver: driver.clone(), is_locked }
        });
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
