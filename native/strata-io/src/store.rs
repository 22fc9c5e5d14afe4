//! The one interface to a place where objects are kept.

use std::fmt::Debug;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;

use crate::digest::{DigestKind, RunningDigest};
use crate::lent::LentMut;
use crate::{Error, Result};

/// Whether a small write may replace what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Replace, atomically where the store can.
    Overwrite,
    /// Fail with [`crate::Error::AlreadyExists`] if the name is taken; of several racing creators one wins.
    Create,
}

/// One stored object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Name relative to the store's root, `/`-separated.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// When it was last written, by the store's clock, in seconds since 1970.
    pub modified_at: u64,
}

/// An upload in parts that has begun and not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenUpload {
    /// Name of the object that was to be written.
    pub name: String,
    /// The store's id of the upload.
    pub upload_id: String,
    /// When it began, by the store's clock.
    pub began_at: SystemTime,
}

/// What has happened so far to the requests of a store, of its siblings and of their writers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests sent, every try and every second request counted.
    pub requests: u64,
    /// Tries after the first one of each operation.
    pub retries: u64,
    /// Answers by which the store asked for fewer requests.
    pub throttled: u64,
    /// Transfers that moved too little for too long, and were ended to be begun again.
    pub restarted: u64,
    /// Second requests for what a first one was slow to bring.
    pub hedged: u64,
}

/// A range of an object about to be written.
#[derive(Debug, Clone)]
pub struct Part {
    /// Position in the object's sequence of parts, from 0.
    pub index: u32,
    /// First byte in the object.
    pub offset: u64,
    /// The bytes, in order; slices of lent memory are not copied.
    pub pieces: Vec<Bytes>,
    /// CRC-32/ISO-HDLC of the pieces, taken when they were first read: a store that checks it refuses
    /// memory that changed since.
    pub crc32: u32,
}

impl Part {
    /// Bytes in this part.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Whether the part holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A place where objects are kept: a directory, a bucket prefix, a map in memory.
///
/// Names are relative, `/`-separated, and never leave the root. Every method returns only when the
/// effect is durable; every error names the object. Retries happen inside.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// The root as the user wrote it, for messages; no credentials.
    fn url(&self) -> &str;

    /// The place `name`, a plain name, beside this one: below the same parent.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the name is not plain, or nothing can lie beside the root of this store.
    fn sibling(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// The place `name`, a plain name, in this one.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if the name is not plain.
    fn child(&self, name: &str) -> Result<Arc<dyn Store>>;

    /// Size of the parts this store wants for an object of `object_bytes`, in bytes.
    ///
    /// All parts but the last have exactly this size.
    fn part_bytes(&self, object_bytes: u64) -> u64;

    /// Writes a small object whole. A failed or interrupted write leaves the old object or none.
    async fn put(&self, name: &str, bytes: Bytes, mode: PutMode) -> Result<()>;

    /// Begins an object of exactly `size` bytes under a name never used before.
    ///
    /// Nothing is visible to [`Store::list`] on remote stores before [`ObjectWriter::finish`]; on local ones the
    /// file is, so names must not be trusted before a commit.
    async fn create(&self, name: &str, size: u64) -> Result<Box<dyn ObjectWriter>>;

    /// Reads `range` of `name` into `targets`, in order; their lengths add up to the range's.
    ///
    /// The memory goes back to the lender when the returned future ends or, if it is dropped before,
    /// when the last operation that can touch it has ended.
    async fn read_into(&self, name: &str, range: Range<u64>, targets: Vec<LentMut>) -> Result<()>;

    /// As [`Store::read_into`], several ranges of `name`, each into its target: in one go where a read costs little more
    /// than to ask for it, else side by side.
    async fn read_pieces(&self, name: &str, pieces: Vec<(Range<u64>, LentMut)>) -> Result<()> {
        let reads = pieces.into_iter().map(|(range, target)| self.read_into(name, range, vec![target]));
        // All are waited for, also after an error: the caller has its memory back when we return.
        join_all(reads).await.into_iter().collect()
    }

    /// As [`Store::read_into`], and takes a digest of what each target got: on the way, while it is in cache, where
    /// the store can.
    async fn read_digested(
        &self,
        name: &str,
        range: Range<u64>,
        targets: Vec<LentMut>,
        kind: DigestKind,
    ) -> Result<Vec<u128>> {
        let landed: Vec<LentMut> = targets.iter().map(LentMut::landing).collect();
        self.read_into(name, range, targets).await?;
        let digest = move |memory: &LentMut| {
            let mut digest = RunningDigest::new(kind);
            digest.update(memory.as_slice());
            digest.finish()
        };
        let digests = tokio::task::spawn_blocking(move || landed.iter().map(digest).collect());
        Ok(digests.await.expect("a digest does not panic"))
    }

    /// Reads `range` of `name`, or all of it.
    async fn read(&self, name: &str, range: Option<Range<u64>>) -> Result<Bytes>;

    /// Size of `name` in bytes.
    async fn size(&self, name: &str) -> Result<u64>;

    /// Objects whose name starts with `prefix` (`""`, or ending in `/`), direct children only, sorted.
    async fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>>;

    /// Names of the direct sub-folders below `prefix`, without a trailing `/`, sorted.
    async fn list_folders(&self, prefix: &str) -> Result<Vec<String>>;

    /// Every object below `prefix` (`""`, or ending in `/`), those in folders too, sorted. In a bucket one request for
    /// each thousand of them; elsewhere one or two for each folder.
    async fn list_below(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let mut found = Vec::new();
        let mut left = vec![prefix.to_owned()];
        while let Some(folder) = left.pop() {
            let is_gone = |error: &Error| folder != prefix && matches!(error, Error::NotFound { .. });
            let (objects, folders) = match (self.list(&folder).await, self.list_folders(&folder).await) {
                // Removed since its parent was listed.
                (Err(error), _) | (_, Err(error)) if is_gone(&error) => continue,
                (objects, folders) => (objects?, folders?),
            };
            found.extend(objects);
            left.extend(folders.into_iter().map(|name| format!("{name}/")));
        }
        found.sort_by(|a: &ObjectInfo, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Where `name` lies as a file of this machine; None at stores that are elsewhere. It need not exist.
    fn path(&self, _name: &str) -> Option<PathBuf> {
        None
    }

    /// Removes `name`; a name that is not there is no error.
    async fn delete(&self, name: &str) -> Result<()>;

    /// Whether create-only puts were seen to be honoured; false once a probe showed otherwise.
    async fn honours_create(&self) -> Result<bool>;

    /// Removes the parts of an upload that another process began and will not finish; see
    /// [`crate::pending_uploads`]. Stores without such uploads, and uploads that are gone, are no error.
    async fn abort_upload(&self, _name: &str, _upload_id: &str) -> Result<()> {
        Ok(())
    }

    /// Uploads below the root that have begun and not ended, as the store lists them, whoever began them; none where it
    /// cannot be asked.
    async fn open_uploads(&self) -> Result<Vec<OpenUpload>> {
        Ok(Vec::new())
    }

    /// Counters since this store was opened; all zero where nothing is ever tried twice.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Removes the empty folders that a failed save leaves, best effort: those that this handle has made, and the root if
    /// it has seen that there was none. Stores without folders have nothing to remove.
    async fn tidy(&self) {}

    /// Removes the root's folder and those in it, as far as they are empty, best effort. Stores without folders have
    /// nothing to remove.
    async fn remove_empty(&self) {}

    /// Removes what small writes of processes that have died left in the folder `prefix` (`""`, or ending in `/`), best
    /// effort. A folder that is not there, and a store whose writes leave nothing, are no error.
    async fn sweep(&self, _prefix: &str) -> Result<()> {
        Ok(())
    }
}

/// Whether `name` is one part of a path, so that it leads nowhere else.
pub fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// Checks that a name [`is_plain`].
pub(crate) fn check_plain(name: &str) -> Result<()> {
    if !is_plain(name) {
        return Err(Error::Config(format!("{name:?} is not the name of a neighbour: expected one plain name")));
    }
    Ok(())
}

/// An object in the making. Parts may be written concurrently and in any order.
#[async_trait]
pub trait ObjectWriter: Debug + Send + Sync {
    /// Writes one part.
    async fn write_part(&self, part: Part) -> Result<()>;

    /// Makes the object durable and visible. All parts have been written.
    async fn finish(self: Box<Self>) -> Result<()>;

    /// Removes what was written. Best effort: a failure is logged.
    async fn abort(self: Box<Self>);
}
