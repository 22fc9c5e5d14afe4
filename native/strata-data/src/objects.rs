//! Objects of a store as [`ReadAt`], for threads that may wait.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use strata_io::Store;
use tokio::runtime::Handle;

use crate::formats::{self, ReadAt};
use crate::shard::url_of;
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
    // Dropped with this future.
    let asker = Arc::new(());
    let wanted = Arc::downgrade(&asker);
    let looked = move || match path {
        Some(path) => {
            let file = File::open(path).and_then(OnDisk::new)?;
            look(&Wanted { source: file, wanted })
        }
        None => {
            let source = Elsewhere { store, name, size, ahead_bytes, handle, chunks: RefCell::default() };
            look(&Wanted { source, wanted })
        }
    };
    let looked = tokio::task::spawn_blocking(looked).await.expect("looking does not panic");
    looked.map_err(|fault| Error::of(fault, object, 0))
}

/// A source that is read for as long as somebody waits for what is found in it.
struct Wanted<T> {
    source: T,
    wanted: Weak<()>,
}

impl<T: ReadAt> ReadAt for Wanted<T> {
    fn size(&self) -> u64 {
        self.source.size()
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        if self.wanted.strong_count() == 0 {
            return Err(io::Error::other("nobody waits for what is read"));
        }
        self.source.read_at(at, buffer)
    }
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use strata_io::schedule::ByteBudget;
    use strata_io::{IoConfig, open};

    use super::*;

    #[tokio::test]
    async fn what_nobody_waits_for_is_read_no_more() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("object"), [1; 100]).unwrap();
        let config = IoConfig {
            budget: ByteBudget::new(1 << 20),
            max_concurrency: 1,
            part_bytes: 8 << 20,
            fsync: false,
            direct_io: false,
            max_tries: 1,
            deadline: Duration::from_secs(10),
        };
        let store = open(folder.path().to_str().unwrap(), &BTreeMap::new(), &config).unwrap();
        let (began, begins) = tokio::sync::oneshot::channel();
        let (ended, ends) = tokio::sync::oneshot::channel();
        let forever = move |object: &(dyn ReadAt + 'static)| -> formats::Result<()> {
            began.send(()).unwrap();
            let error = loop {
                if let Err(error) = object.read_exact_at(0, &mut [0; 100]) {
                    break error;
                }
            };
            ended.send(()).unwrap();
            Err(error.into())
        };
        let looking = tokio::spawn(async move { look(&store, "object", None, 0, forever).await });
        begins.await.unwrap();
        looking.abort();
        tokio::time::timeout(Duration::from_secs(60), ends).await.expect("it ends").unwrap();
    }
}
