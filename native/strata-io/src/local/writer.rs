//! Large objects: one file, written in place by as many threads as the store has permits.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::publish::parent;
use super::transfer::OpenFile;
use super::{Shared, failure};
use crate::{Error, ObjectWriter, Part, Result};

/// A file being written. Dropped without `finish` it is removed: a cancelled save leaves nothing.
#[derive(Debug)]
pub(super) struct LocalWriter {
    shared: Arc<Shared>,
    file: Arc<OpenFile>,
    unfinished: Unfinished,
    size: u64,
    /// Length of every part that was written, by offset.
    written: Mutex<BTreeMap<u64, u64>>,
}

impl LocalWriter {
    /// Makes the file and its directories.
    pub(super) fn create(shared: Arc<Shared>, path: PathBuf, size: u64) -> Result<Self> {
        shared.make_parent(&path)?;
        let file = shared.make_file(&path).map_err(|error| failure("create", &path, error))?;
        let unfinished = Unfinished(Some(path.clone()));
        let file = Arc::new(OpenFile::new(file, path, shared.may_go_direct(size)));
        reserve(file.file(), size).map_err(|error| failure("create", file.path(), error))?;
        Ok(Self { shared, file, unfinished, size, written: Mutex::default() })
    }

    /// Sends the parts elsewhere, to see what an error leaves behind.
    #[cfg(test)]
    pub(super) fn onto(mut self, file: File) -> Self {
        self.file = Arc::new(OpenFile::new(file, self.file.path().clone(), false));
        self
    }

    /// Whether the parts that were written are all there is to write.
    fn check_whole(&self) -> Result<()> {
        let written = self.written.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let reached = written.iter().try_fold(0, |end, (&at, &len)| if at == end { Ok(end + len) } else { Err(end) });
        if reached == Ok(self.size) {
            return Ok(());
        }
        let (Ok(end) | Err(end)) = reached;
        Err(Error::Mismatch {
            object: self.file.path().display().to_string(),
            expected: format!("parts that make up {} bytes", self.size),
            found: format!("a gap or an overlap at byte {end}"),
        })
    }
}

/// Gives the file its size, and where the file system can its blocks, before the first part: a full disk is told
/// before a byte is written, and direct writes into reserved blocks need not wait for each other.
fn reserve(file: &File, size: u64) -> io::Result<()> {
    if size > 0 {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
            answer => return Ok(answer?),
        }
    }
    file.set_len(size)
}

#[async_trait]
impl ObjectWriter for LocalWriter {
    async fn write_part(&self, part: Part) -> Result<()> {
        let (offset, len) = (part.offset, part.len() as u64);
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(Error::Mismatch {
                object: self.file.path().display().to_string(),
                expected: format!("parts within {} bytes", self.size),
                found: format!("{len} bytes at {offset}"),
            });
        }
        let file = self.file.clone();
        self.shared.run(move |_| file.write(&part.pieces, offset)).await?;
        if len > 0 {
            self.written.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(offset, len);
        }
        Ok(())
    }

    async fn finish(self: Box<Self>) -> Result<()> {
        self.check_whole()?;
        let (file, size, unfinished) = (self.file, self.size, self.unfinished);
        self.shared
            .run(move |shared| {
                let failed = |error| failure("finish", file.path(), error);
                let found = file.file().metadata().map_err(failed)?.len();
                if found != size {
                    return Err(Error::Mismatch {
                        object: file.path().display().to_string(),
                        expected: format!("{size} bytes"),
                        found: format!("{found} bytes"),
                    });
                }
                if shared.config.fsync {
                    file.file().sync_data().map_err(failed)?; // data, size and extents; times may be lost
                }
                shared.sync_directory(parent(file.path())).map_err(failed)?;
                unfinished.keep();
                Ok(())
            })
            .await
    }

    async fn abort(self: Box<Self>) {
        drop(self.unfinished);
    }
}

/// Removes the file when dropped, unless it was finished.
#[derive(Debug)]
struct Unfinished(Option<PathBuf>);

impl Unfinished {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(path) = self.0.take() else { return };
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(%error, "{} is not complete and could not be removed", path.display());
        }
    }
}
