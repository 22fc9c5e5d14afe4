//! Objects of a store as [`ReadAt`], for threads that may wait.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use strata_io::Store;
use tokio::runtime::Handle;

use crate::dataset::url_of;
use crate::formats::{self, ReadAt};
use crate::{Error, Result};

/// Read ahead where much of an object is looked at.
pub(crate) const AHEAD_BYTES: u64 = 4 << 20;

/// What `look` finds in the object `name`, in a thread that may wait. A size that is not known is asked for. From a store
/// that is elsewhere `ahead_bytes` are read at a time, or what is asked for if that is more.
///
/// # Errors
/// [`Error::Damaged`] for what `look` says; what the store says.
pub(crate) async fn look<T: Send + 'static>(
    store: &Arc<dyn Store>,
    name: &str,
    size: Option<u64>,
    ahead_bytes: u64,
    look: impl FnOnce(&(dyn ReadAt + 'static)) -> formats::Result<T> + Send + 'static,
) -> Result<T> {
    let (store, name, object, handle) = (store.clone(), name.to_owned(), url_of(&**store, name), Handle::current());
    let path = store.path(&name);
    let size = match size {
        Some(size) => size,
        // The file will say.
        None if path.is_some() => 0,
        None => store.size(&name).await?,
    };
    let looked = move || match path {
        Some(path) => File::open(path).map_err(Into::into).and_then(|file| look(&OnDisk::new(file)?)),
        None => look(&Elsewhere { store, name, size, ahead_bytes, handle, chunks: RefCell::default() }),
    };
    let looked = tokio::task::spawn_blocking(looked).await.expect("looking does not panic");
    looked.map_err(|fault| Error::of(fault, object, 0))
}

/// A file of this machine.
struct OnDisk {
    file: File,
    size: u64,
}

impl OnDisk {
    fn new(file: File) -> io::Result<Self> {
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

/// An object of a store, of which the two pieces looked at last are kept: some formats are read at two places in turn.
struct Elsewhere {
    store: Arc<dyn Store>,
    name: String,
    size: u64,
    ahead_bytes: u64,
    /// Of the runtime that is to read it.
    handle: Handle,
    /// Where each begins, and what is there.
    chunks: RefCell<[(u64, Bytes); 2]>,
}

impl ReadAt for Elsewhere {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let end = at.saturating_add(buffer.len() as u64).min(self.size);
        if at >= end {
            return Ok(0);
        }
        let mut chunks = self.chunks.borrow_mut();
        let has = |(start, bytes): &(u64, Bytes)| *start <= at && end <= start + bytes.len() as u64;
        if !has(&chunks[0]) {
            chunks.swap(0, 1);
        }
        if !has(&chunks[0]) {
            let range = at..(at + self.ahead_bytes).min(self.size).max(end);
            let read = self.handle.block_on(self.store.read(&self.name, Some(range))).map_err(io::Error::other)?;
            chunks[0] = (at, read);
        }
        let (start, bytes) = &chunks[0];
        bytes[(at - start) as usize..].read_at(0, &mut buffer[..(end - at) as usize])
    }
}
