//! Objects of a store as [`ReadAt`], for threads that may wait.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::Store;
use tokio::runtime::Handle;

use crate::formats::ReadAt;

/// Read ahead where headers are looked for in an object that is elsewhere.
const CHUNK_BYTES: u64 = 8 << 20;

/// A file of this machine.
pub(crate) struct OnDisk {
    file: File,
    size: u64,
}

impl OnDisk {
    pub fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl ReadAt for OnDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut found = 0;
        while found < buffer.len() {
            match self.file.read_at(&mut buffer[found..], at + found as u64)? {
                0 => break,
                bytes => found += bytes,
            }
        }
        Ok(found)
    }
}

/// An object of a store, of which one piece is kept.
pub(crate) struct Elsewhere<'a> {
    store: Arc<dyn Store>,
    name: &'a str,
    size: u64,
    handle: Handle,
    /// Where it begins, and what is there.
    chunk: RefCell<(u64, Bytes)>,
}

impl<'a> Elsewhere<'a> {
    /// `name`, of `size` bytes; `handle` is of the runtime that is to read it.
    pub fn new(store: Arc<dyn Store>, name: &'a str, size: u64, handle: Handle) -> Self {
        Self { store, name, size, handle, chunk: RefCell::default() }
    }
}

impl ReadAt for Elsewhere<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let end = at.saturating_add(buffer.len() as u64).min(self.size);
        if at >= end {
            return Ok(0);
        }
        let mut chunk = self.chunk.borrow_mut();
        if at < chunk.0 || end > chunk.0 + chunk.1.len() as u64 {
            let range = at..(at + CHUNK_BYTES).min(self.size).max(end);
            let read = self.handle.block_on(self.store.read(self.name, Some(range))).map_err(io::Error::other)?;
            *chunk = (at, read);
        }
        chunk.1[(at - chunk.0) as usize..].read_at(0, &mut buffer[..(end - at) as usize])
    }
}
