//! Memory that another process can map: where a staged state lies, so that handing it over copies nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::thread;

use strata_io::lent::LentMut;

/// A file without a name that is `bytes` of memory, taken from the system as it is written. None where the system has
/// no such files.
///
/// # Errors
/// If the system does not promise that much memory.
#[cfg(target_os = "linux")]
pub fn memory_file(bytes: u64) -> io::Result<Option<OwnedFd>> {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let file = memfd_create("torch_strata", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    Ok(Some(file))
}

/// As on Linux; there are no such files here.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub fn memory_file(_bytes: u64) -> io::Result<Option<OwnedFd>> {
    Ok(None)
}

/// What one thread makes present at a time.
const POPULATED_BYTES: usize = 64 << 20;

/// Makes all pages of `memory` present, with `threads` threads. Blocks. Whole pages.
pub fn populate(mut memory: LentMut, threads: usize) {
    let mut parts = Vec::new();
    while memory.len() > POPULATED_BYTES {
        parts.push(memory.split_to(POPULATED_BYTES));
    }
    parts.push(memory);
    let threads = threads.min(parts.len());
    let parts = Mutex::new(parts);
    let next = || parts.lock().expect("no panic while held").pop();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(mut part) = next() {
                    part.populate();
                }
            });
        }
    });
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use rustix::fs::fstat;

    #[test]
    fn a_memory_file_takes_memory_only_when_it_is_written() {
        let status = fstat(memory_file(1 << 40).unwrap().unwrap()).unwrap();
        assert_eq!((status.st_size, status.st_blocks), (1 << 40, 0));
    }
}
