//! Writing an object in parts, or whole when one part holds it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ::http::{HeaderName, HeaderValue};
use async_trait::async_trait;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{Attribute, Attributes, GetOptions, PutMultipartOptions, PutPayload};
use tokio::runtime::Handle;

use super::answer::{Doing, wrong_length};
use super::unknown::Beginning;
use super::{Headers, Remote, journal, names};
use crate::digest::crc32_combine;
use crate::{Error, ObjectWriter, Part, Result};

/// Metadata of an object by which its own upload is recognised.
const NONCE: &str = "strata-upload";

/// Begins an object of `size` bytes.
pub(super) async fn begin(remote: Arc<Remote>, name: &str, size: u64) -> Result<Box<dyn ObjectWriter>> {
    remote.uploads("write", name)?;
    names::key(&remote.root, name)?;
    if size <= remote.part_bytes(size) {
        return Ok(Box::new(Whole { remote, name: name.to_owned(), size, parts: Mutex::default() }));
    }
    Upload::begin(remote, name, size).await.map(|upload| -> Box<dyn ObjectWriter> {
        Box::new(InParts { upload: Arc::new(upload), settled: AtomicBool::new(false), runtime: Handle::current() })
    })
}

/// An object that fits into one part: kept, not copied, and put at the end.
#[derive(Debug)]
struct Whole {
    remote: Arc<Remote>,
    name: String,
    size: u64,
    parts: Mutex<BTreeMap<u64, Part>>,
}

#[async_trait]
impl ObjectWriter for Whole {
    async fn write_part(&self, part: Part) -> Result<()> {
        self.parts.lock().expect("no panic while held").insert(part.offset, part);
        Ok(())
    }

    async fn finish(self: Box<Self>) -> Result<()> {
        let parts = self.parts.into_inner().expect("no panic while held");
        let whole = sequence(parts.values().map(|part| (part.offset, part.len() as u64, part.crc32)));
        let (bytes, crc) = whole.unwrap_or_default();
        if bytes != self.size {
            return Err(wrong_length(&self.remote.object(&self.name), self.size, bytes));
        }
        let payload: PutPayload = parts.into_values().flat_map(|part| part.pieces).collect();
        self.remote.put_payload(&self.name, payload, self.remote.crc_header(crc)).await
    }

    async fn abort(self: Box<Self>) {}
}

/// Length and CRC of parts given as (offset, length, CRC) in order; `None` if they leave a gap or overlap.
fn sequence(parts: impl Iterator<Item = (u64, u64, u32)>) -> Option<(u64, u32)> {
    let mut whole = (0, 0);
    for (offset, bytes, crc) in parts {
        if offset != whole.0 {
            return None;
        }
        whole = (offset + bytes, crc32_combine(whole.1, crc, bytes));
    }
    Some(whole)
}

/// An upload in parts. Dropped before its end, it is aborted in the background.
#[derive(Debug)]
struct InParts {
    upload: Arc<Upload>,
    settled: AtomicBool,
    runtime: Handle,
}

#[async_trait]
impl ObjectWriter for InParts {
    async fn write_part(&self, part: Part) -> Result<()> {
        self.upload.write_part(part).await
    }

    async fn finish(self: Box<Self>) -> Result<()> {
        let ended = self.upload.complete().await;
        match &ended {
            Ok(()) => {
                self.upload.forget().await;
                self.upload.abort_lost().await;
            }
            Err(_) => self.upload.abort().await,
        }
        self.settled.store(true, Ordering::Relaxed);
        ended
    }

    async fn abort(self: Box<Self>) {
        self.upload.abort().await;
        self.settled.store(true, Ordering::Relaxed);
    }
}

impl Drop for InParts {
    fn drop(&mut self) {
        if !*self.settled.get_mut() {
            let upload = self.upload.clone();
            self.runtime.spawn(async move { upload.abort().await });
        }
    }
}

struct Upload {
    remote: Arc<Remote>,
    parts: Arc<dyn MultipartStore>,
    name: String,
    object: String,
    key: Path,
    size: u64,
    part_bytes: u64,
    id: String,
    nonce: String,
    /// Whether the store may have begun other uploads of this key, whose ids were lost.
    lost: bool,
    /// Name of the record that says this upload has begun; `None` where the store has no id to abort by.
    record: Option<String>,
    written: Mutex<BTreeMap<u32, Written>>,
}

struct Written {
    id: PartId,
    bytes: u64,
    crc32: u32,
}

impl Upload {
    async fn begin(remote: Arc<Remote>, name: &str, size: u64) -> Result<Self> {
        let (object, key) = (remote.object(name), names::key(&remote.root, name)?);
        let parts = remote.uploads("write", name)?.clone();
        let nonce = format!("{:032x}", rand::random::<u128>());
        let create = || parts.create_multipart_opts(&key, options(&remote, &nonce));
        let (id, lost) = Beginning::new(&remote, name).run(begin_headers(&remote), create).await?;
        let part_bytes = remote.part_bytes(size);
        let (name, written) = (name.to_owned(), Mutex::default());
        let record = None;
        let mut upload = Self { remote, parts, name, object, key, size, part_bytes, id, nonce, lost, record, written };
        if !upload.id.is_empty() {
            let (record, content) = journal::record(&upload.name, &upload.id);
            upload.record = Some(record.clone());
            if let Err(error) = upload.remote.put(&record, content).await {
                upload.abort().await;
                return Err(error);
            }
        }
        Ok(upload)
    }

    async fn write_part(&self, part: Part) -> Result<()> {
        let bytes = part.len() as u64;
        let offset = u64::from(part.index) * self.part_bytes;
        let expected = self.part_bytes.min(self.size.saturating_sub(offset));
        if part.offset != offset || bytes != expected {
            return Err(Error::Mismatch {
                object: self.object.clone(),
                expected: format!("part {} to be bytes {offset}..{}", part.index, offset + expected),
                found: format!("bytes {}..{}", part.offset, part.offset + bytes),
            });
        }
        let (index, crc32) = (part.index, part.crc32);
        let payload: PutPayload = part.pieces.into_iter().collect();
        let doing = Doing { operation: "write", object: &self.object };
        let put = || self.parts.put_part(&self.key, &self.id, index as usize, payload.clone());
        let id = self.remote.retried(doing, self.remote.crc_header(crc32), put).await?;
        self.written.lock().expect("no panic while held").insert(index, Written { id, bytes, crc32 });
        Ok(())
    }

    /// Puts the parts together. A lost answer may hide a success, after which the upload is unknown to the
    /// store: so after any failure the object itself is asked.
    async fn complete(&self) -> Result<()> {
        let (ids, crc) = self.all_parts()?;
        let mut headers = self.remote.crc_header(crc);
        if !headers.is_empty() {
            headers.push(FULL_OBJECT);
        }
        let doing = Doing { operation: "complete", object: &self.object };
        let mut retry = self.remote.tries(doing.operation, doing.object);
        loop {
            let complete = self.parts.complete_multipart(&self.key, &self.id, ids.clone());
            let request = self.remote.request(doing, headers.clone(), complete);
            let Err(failure) = retry.attempt(request).await else {
                return Ok(());
            };
            if self.landed().await {
                return Ok(());
            }
            retry.pause(failure).await?;
        }
    }

    /// Ids of the parts in order, and the CRC of the whole.
    fn all_parts(&self) -> Result<(Vec<PartId>, u32)> {
        let written = self.written.lock().expect("no panic while held");
        let whole = sequence(written.iter().map(|(&index, part)| {
            (u64::from(index) * self.part_bytes, part.bytes, part.crc32) //
        }));
        match whole {
            Some((bytes, crc)) if bytes == self.size => {
                Ok((written.values().map(|part| part.id.clone()).collect(), crc))
            }
            _ => Err(wrong_length(&self.object, self.size, written.values().map(|part| part.bytes).sum())),
        }
    }

    /// Whether the object is there, and is this upload's.
    async fn landed(&self) -> bool {
        let doing = Doing { operation: "stat", object: &self.object };
        let head = || {
            let options = GetOptions { head: true, ..GetOptions::default() };
            self.remote.bucket.objects.get_opts(&self.key, options)
        };
        let Ok(answer) = self.remote.retried(doing, Headers::new(), head).await else {
            return false;
        };
        let nonce = answer.attributes.get(&Attribute::Metadata(NONCE.into()));
        let ours = nonce.map_or(!self.remote.bucket.abilities.upload_metadata, |nonce| **nonce == *self.nonce);
        ours && answer.meta.size == self.size
    }

    /// Removes the parts, then the record. Failures are logged: the record lets a later process do it.
    async fn abort(&self) {
        match self.remote.abort_upload(&self.name, &self.id).await {
            Ok(()) => self.forget().await,
            Err(error) => tracing::warn!(%error, upload_id = self.id, "an upload could not be aborted"),
        }
        self.abort_lost().await;
    }

    /// After this upload's own end: those that were begun in its place and never known.
    async fn abort_lost(&self) {
        if self.lost {
            self.remote.abort_unknown(&self.name).await;
        }
    }

    async fn forget(&self) {
        let Some(record) = &self.record else { return };
        if let Err(error) = self.remote.delete(record).await {
            tracing::warn!(%error, "the record of an ended upload stays behind");
        }
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Upload({}, {} bytes, id {})", self.object, self.size, self.id)
    }
}

/// The checksum of the whole object, not one of the parts' checksums: parts can be combined into it, and it
/// is what a reader of the whole can compare.
/// <https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html>
const FULL_OBJECT: (HeaderName, HeaderValue) =
    (HeaderName::from_static("x-amz-checksum-type"), HeaderValue::from_static("FULL_OBJECT"));

fn begin_headers(remote: &Remote) -> Headers {
    let algorithm = (HeaderName::from_static("x-amz-checksum-algorithm"), HeaderValue::from_static("CRC32"));
    if remote.bucket.abilities.crc32 { vec![algorithm, FULL_OBJECT] } else { Headers::new() }
}

fn options(remote: &Remote, nonce: &str) -> PutMultipartOptions {
    let mut attributes = Attributes::new();
    if remote.bucket.abilities.upload_metadata {
        attributes.insert(Attribute::Metadata(NONCE.into()), nonce.to_owned().into());
    }
    PutMultipartOptions { attributes, ..PutMultipartOptions::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::crc32;

    #[test]
    fn parts_in_sequence_have_the_crc_of_the_whole() {
        let parts = [(0, 3, crc32(b"abc")), (3, 2, crc32(b"de"))];
        assert_eq!(sequence(parts.into_iter()), Some((5, crc32(b"abcde"))));
        assert_eq!(sequence([].into_iter()), Some((0, 0)));
    }

    #[test]
    fn a_gap_or_an_overlap_is_no_sequence() {
        assert_eq!(sequence([(1, 3, 0)].into_iter()), None);
        assert_eq!(sequence([(0, 3, 0), (4, 1, 0)].into_iter()), None);
        assert_eq!(sequence([(0, 3, 0), (2, 1, 0)].into_iter()), None);
    }
}
