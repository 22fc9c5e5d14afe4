//! Objects as files below one directory: our own positioned I/O, made durable with fsync.
//!
//! Small objects are written beside their name and then published ([`publish`]); large ones are written in
//! place by several threads ([`writer`]), past the page cache where the file system allows ([`transfer`]).
//! Every system call runs on tokio's blocking pool, at most `max_concurrency` at a time. A dropped future does
//! not end a running call: the memory it touches moves into the call and is given back after it.

mod publish;
mod transfer;
mod writer;

#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::UNIX_EPOCH;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use tokio::sync::Semaphore;

use self::publish::{Calls, Directories, is_stage};
use self::transfer::{DIRECT_FROM_BYTES, OpenFile, PAGE_BYTES};
use crate::digest::DigestKind;
use crate::lent::LentMut;
use crate::store::check_plain;
use crate::{Error, IoConfig, ObjectInfo, ObjectWriter, PutMode, Result, Store};

/// A directory as a store.
#[derive(Debug)]
pub struct LocalStore {
    url: String,
    shared: Arc<Shared>,
}

/// What running calls keep alive.
#[derive(Debug)]
struct Shared {
    root: PathBuf,
    config: IoConfig,
    permits: Arc<Semaphore>,
    directories: Directories,
    calls: Calls,
}

impl LocalStore {
    /// The store whose root is the directory `path`; it is made by the first write. `url` is for messages.
    pub fn new(url: &str, path: &str, config: IoConfig) -> LocalStore {
        Self::with_calls(url, Path::new(path), config, Calls::SYSTEM)
    }

    fn with_calls(url: &str, root: &Path, config: IoConfig, calls: Calls) -> LocalStore {
        let permits = Arc::new(Semaphore::new(config.max_concurrency.max(1)));
        let directories = Directories::default();
        let shared = Shared { root: root.to_owned(), config, permits, directories, calls };
        LocalStore { url: url.to_owned(), shared: Arc::new(shared) }
    }

    fn part_length(&self) -> u64 {
        self.shared.config.part_bytes.max(1).next_multiple_of(PAGE_BYTES)
    }
}

impl Shared {
    /// Runs `work` on the blocking pool once one of the store's permits is free.
    ///
    /// # Cancel safety
    /// Dropped while it waits, nothing has happened; dropped later, `work` still runs to its end and holds
    /// its permit until then.
    async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let permit = self.permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        let shared = self.clone();
        let task = tokio::task::spawn_blocking(move || {
            let done = work(&shared);
            drop(permit);
            done
        });
        match task.await {
            Ok(done) => done,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Error::Io {
                operation: "use",
                object: self.root.display().to_string(),
                errno: None,
                detail: "the runtime is shutting down".into(),
            }),
        }
    }

    /// The path of an object, once its name is known to stay below the root.
    fn path(&self, name: &str) -> Result<PathBuf> {
        let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
        if name.split('/').all(plain) && !name.rsplit('/').next().is_some_and(is_stage) {
            return Ok(self.root.join(name));
        }
        let root = self.root.display();
        Err(Error::Config(format!(
            "{name:?} is no object name below {root}: expected parts joined by single slashes, none of them \
             \".\" or \"..\", the last not starting with {:?}",
            publish::STAGE_PREFIX
        )))
    }

    /// The directory that `prefix` (`""`, or ending in `/`) names.
    fn folder(&self, prefix: &str) -> Result<PathBuf> {
        match prefix.strip_suffix('/') {
            None if prefix.is_empty() => Ok(self.root.clone()),
            Some(name) => self.path(name),
            None => Err(Error::Config(format!("expected a prefix that is empty or ends in a slash, found {prefix:?}"))),
        }
    }

    /// What is in the directory of `prefix`: names relative to the root with their metadata, sorted.
    ///
    /// Links count as what they lead to. A folder that does not exist is empty, as on an object store; a root
    /// that does not exist is an error, for that is a mistyped path more often than a new store.
    fn entries(&self, prefix: &str) -> Result<Vec<(String, fs::Metadata)>> {
        let folder = self.folder(prefix)?;
        let failed = |error| failure("list", &folder, error);
        let reader = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && folder != self.root => {
                fs::metadata(&self.root).map_err(|error| self.without_root(error))?;
                return Ok(Vec::new());
            }
            Err(error) if folder == self.root => return Err(self.without_root(error)),
            other => other.map_err(failed)?,
        };
        let mut found = Vec::new();
        for entry in reader {
            let entry = entry.map_err(failed)?;
            // A name that is not UTF-8 cannot be asked for through this interface: it is not ours.
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if is_stage(&name) {
                continue;
            }
            match fs::metadata(entry.path()) {
                Ok(metadata) => found.push((format!("{prefix}{name}"), metadata)),
                // Deleted since the directory was read, or a link that leads nowhere.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failure("list", &entry.path(), error)),
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// The root cannot be listed: notes it if there is none.
    fn without_root(&self, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::NotFound {
            self.directories.note_no_root();
        }
        failure("list", &self.root, error)
    }

    /// Opens an object of which `bytes` will be read.
    fn open(&self, path: &Path, bytes: u64) -> Result<OpenFile> {
        let file = File::open(path).map_err(|error| failure("open", path, error))?;
        Ok(OpenFile::new(file, path.to_owned(), self.may_go_direct(bytes)))
    }

    fn may_go_direct(&self, bytes: u64) -> bool {
        self.config.direct_io && bytes >= DIRECT_FROM_BYTES as u64
    }
}

#[async_trait]
impl Store for LocalStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn sibling(&self, name: &str) -> Result<Arc<dyn Store>> {
        check_plain(name)?;
        // Left to the system to resolve, as stock torch does: the root may be a link, or "." itself.
        let Shared { root, config, calls, .. } = &*self.shared;
        let (url, root) = (self.url.trim_end_matches('/'), root.join("..").join(name));
        Ok(Arc::new(Self::with_calls(&format!("{url}/../{name}"), &root, config.clone(), *calls)))
    }

    fn child(&self, name: &str) -> Result<Arc<dyn Store>> {
        check_plain(name)?;
        let Shared { root, config, calls, .. } = &*self.shared;
        let url = format!("{}/{name}", self.url.trim_end_matches('/'));
        Ok(Arc::new(Self::with_calls(&url, &root.join(name), config.clone(), *calls)))
    }

    fn part_bytes(&self, _object_bytes: u64) -> u64 {
        self.part_length()
    }

    async fn put(&self, name: &str, bytes: Bytes, mode: PutMode) -> Result<()> {
        let path = self.shared.path(name)?;
        self.shared.run(move |shared| shared.put(&path, &bytes, mode)).await
    }

    async fn create(&self, name: &str, size: u64) -> Result<Box<dyn ObjectWriter>> {
        let path = self.shared.path(name)?;
        let keep = self.shared.clone();
        self.shared.run(move |_| Ok(Box::new(writer::LocalWriter::create(keep, path, size)?) as _)).await
    }

    async fn read_into(&self, name: &str, range: Range<u64>, targets: Vec<LentMut>) -> Result<()> {
        let path = self.shared.path(name)?;
        let wanted: u64 = targets.iter().map(|target| target.len() as u64).sum();
        if range.start > range.end || range.end - range.start != wanted {
            let path = path.display();
            return Err(Error::Config(format!("{wanted} bytes of memory for bytes {range:?} of {path}")));
        }
        let mut batches = batches(range.start, targets, self.part_length());
        if batches.len() <= 1 {
            let Some((offset, targets)) = batches.pop() else {
                return Ok(());
            };
            return self.shared.run(move |shared| shared.open(&path, wanted)?.read(targets, offset)).await;
        }
        let file = Arc::new(self.shared.run(move |shared| shared.open(&path, wanted)).await?);
        let failed = Arc::new(AtomicBool::new(false));
        let reads = batches.into_iter().map(|(offset, targets)| {
            let (file, failed) = (file.clone(), failed.clone());
            self.shared.run(move |_| {
                if failed.load(Ordering::Relaxed) {
                    return Ok(()); // the error of another batch is the answer
                }
                file.read(targets, offset).inspect_err(|_| failed.store(true, Ordering::Relaxed))
            })
        });
        // All are waited for, also after an error: the caller has its memory back when we return.
        join_all(reads).await.into_iter().collect()
    }

    async fn read_pieces(&self, name: &str, pieces: Vec<(Range<u64>, LentMut)>) -> Result<()> {
        let path = self.shared.path(name)?;
        let read = move |shared: &Shared| {
            let file = shared.open(&path, 0)?;
            pieces.into_iter().try_for_each(|(range, target)| file.read(vec![target], range.start))
        };
        self.shared.run(read).await
    }

    async fn read_digested(
        &self,
        name: &str,
        range: Range<u64>,
        targets: Vec<LentMut>,
        kind: DigestKind,
    ) -> Result<Vec<u128>> {
        let path = self.shared.path(name)?;
        let wanted = range.end - range.start;
        self.shared.run(move |shared| shared.open(&path, wanted)?.read_digested(targets, range.start, kind)).await
    }

    async fn read(&self, name: &str, range: Option<Range<u64>>) -> Result<Bytes> {
        let path = self.shared.path(name)?;
        // Fresh memory: what it costs to map it is more than a direct read could save.
        self.shared.run(move |shared| shared.open(&path, 0)?.read_fresh(range)).await
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.shared.path(name).ok()
    }

    async fn size(&self, name: &str) -> Result<u64> {
        let path = self.shared.path(name)?;
        self.shared
            .run(move |_| {
                let metadata = fs::metadata(&path).map_err(|error| failure("look up", &path, error))?;
                match metadata.is_dir() {
                    false => Ok(metadata.len()),
                    true => Err(Error::NotFound {
                        object: path.display().to_string(),
                        detail: ": it is a directory".into(),
                    }),
                }
            })
            .await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let prefix = prefix.to_owned();
        let entries = self.shared.run(move |shared| shared.entries(&prefix)).await?;
        let files = entries.into_iter().filter(|(_, metadata)| !metadata.is_dir());
        let modified_at = |metadata: &fs::Metadata| {
            let since = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            since.map_or(0, |since| since.as_secs())
        };
        let info = |(name, metadata): (String, fs::Metadata)| ObjectInfo {
            name,
            size: metadata.len(),
            modified_at: modified_at(&metadata),
        };
        Ok(files.map(info).collect())
    }

    async fn list_folders(&self, prefix: &str) -> Result<Vec<String>> {
        let prefix = prefix.to_owned();
        let entries = self.shared.run(move |shared| shared.entries(&prefix)).await?;
        Ok(entries.into_iter().filter(|(_, metadata)| metadata.is_dir()).map(|(name, _)| name).collect())
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let path = self.shared.path(name)?;
        self.shared
            .run(move |_| match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other.map_err(|error| failure("delete", &path, error)),
            })
            .await
    }

    async fn sweep(&self, prefix: &str) -> Result<()> {
        let folder = self.shared.folder(prefix)?;
        self.shared
            .run(move |shared| {
                shared.sweep(&folder);
                Ok(())
            })
            .await
    }

    async fn tidy(&self) {
        let tidied = self.shared.run(|shared| {
            shared.tidy();
            Ok(())
        });
        if let Err(error) = tidied.await {
            tracing::debug!(%error, "empty folders stay");
        }
    }

    async fn remove_empty(&self) {
        let removed = self.shared.run(|shared| {
            publish::remove_empty(&shared.root);
            Ok(())
        });
        if let Err(error) = removed.await {
            tracing::debug!(%error, "empty folders stay");
        }
    }

    async fn honours_create(&self) -> Result<bool> {
        Ok(true) // link, RENAME_NOREPLACE and O_EXCL all do, or answer that they cannot
    }
}

/// Cuts `targets`, to be filled from `offset` on, at multiples of `batch_bytes` in the file.
fn batches(offset: u64, targets: Vec<LentMut>, batch_bytes: u64) -> Vec<(u64, Vec<LentMut>)> {
    let mut batches: Vec<(u64, Vec<LentMut>)> = Vec::new();
    let mut at = offset;
    for mut target in targets {
        while !target.is_empty() {
            if batches.is_empty() || at.is_multiple_of(batch_bytes) {
                batches.push((at, Vec::new()));
            }
            let room = (batch_bytes - at % batch_bytes).min(target.len() as u64);
            batches.last_mut().expect("pushed above").1.push(target.split_to(room as usize));
            at += room;
        }
    }
    batches
}

/// The error of this crate for an error of the system.
fn failure(operation: &'static str, path: &Path, error: io::Error) -> Error {
    let object = path.display().to_string();
    match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound { object, detail: String::new() },
        io::ErrorKind::AlreadyExists => Error::AlreadyExists { object },
        io::ErrorKind::NotADirectory => {
            Error::Io { operation, detail: in_the_way(path), object, errno: error.raw_os_error() }
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Error::PermissionDenied { object, detail: format!("{operation}: {error}") }
        }
        _ => Error::Io { operation, object, errno: error.raw_os_error(), detail: error.to_string() },
    }
}

/// Which part of `path` is no directory.
fn in_the_way(path: &Path) -> String {
    let is_file = |at: &&Path| fs::metadata(at).is_ok_and(|metadata| !metadata.is_dir());
    let leads_nowhere = |at: &&Path| fs::symlink_metadata(at).is_ok() && !at.exists();
    if let Some(file) = path.ancestors().find(is_file) {
        return format!("expected a directory at {}, found a file", file.display());
    }
    match path.ancestors().find(leads_nowhere) {
        Some(link) => format!("expected a directory at {}, found a link to what is not there", link.display()),
        None => io::Error::from(io::ErrorKind::NotADirectory).to_string(),
    }
}
