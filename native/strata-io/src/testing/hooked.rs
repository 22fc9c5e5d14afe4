//! A store around a store, with a hook before and after each request. The wrappers are hooks.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use crate::lent::LentMut;
use crate::{Counters, ObjectInfo, ObjectWriter, OpenUpload, Part, PutMode, Result, Store};

/// What kind of request; each method of [`Store`] and [`ObjectWriter`] is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// [`Store::put`] that may replace.
    Put,
    /// [`Store::put`] that may not.
    PutNew,
    /// [`Store::create`].
    Begin,
    /// [`ObjectWriter::write_part`].
    Part,
    /// [`ObjectWriter::finish`].
    Finish,
    /// [`ObjectWriter::abort`] and [`Store::abort_upload`].
    Abort,
    /// [`Store::read`] and [`Store::read_into`].
    Read,
    /// [`Store::size`].
    Size,
    /// [`Store::list`], [`Store::list_folders`], [`Store::list_below`] and [`Store::open_uploads`].
    List,
    /// [`Store::delete`].
    Delete,
    /// [`Store::honours_create`].
    Probe,
}

impl Kind {
    /// Whether such a request changes what is stored; ending an upload that nobody sees yet does not.
    pub fn is_change(self) -> bool {
        matches!(self, Self::Put | Self::PutNew | Self::Begin | Self::Part | Self::Finish | Self::Delete)
    }
}

/// A request about to be made, or just made.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its kind.
    pub kind: Kind,
    /// Name of the object, or the prefix listed.
    pub name: &'a str,
    /// Payload in bytes, where it is known before.
    pub bytes: u64,
}

/// What a wrapper does around a request.
#[async_trait]
pub trait Hook: Debug + Send + Sync + 'static {
    /// Runs first; an error is returned instead of making the request.
    async fn before(&self, _request: &Request<'_>) -> Result<()> {
        Ok(())
    }

    /// Runs after success; an error hides it, as a lost answer does.
    async fn after(&self, _request: &Request<'_>) -> Result<()> {
        Ok(())
    }

    /// Whether one bit of the payload flips on its way.
    fn flips(&self, _request: &Request<'_>) -> bool {
        false
    }
}

/// `inner`, with `hook` around each request.
#[derive(Debug)]
pub struct Hooked<H> {
    inner: Arc<dyn Store>,
    hook: Arc<H>,
}

impl<H: Hook> Hooked<H> {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Store>, hook: H) -> Self {
        Self { inner, hook: Arc::new(hook) }
    }

    /// The hook, to be asked or set.
    pub fn hook(&self) -> &H {
        &self.hook
    }

    async fn around<T>(
        &self,
        kind: Kind,
        name: &str,
        bytes: u64,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        around(&*self.hook, &Request { kind, name, bytes }, request).await
    }
}

async fn around<T>(hook: &impl Hook, request: &Request<'_>, made: impl Future<Output = Result<T>>) -> Result<T> {
    hook.before(request).await?;
    let answer = made.await?;
    hook.after(request).await?;
    Ok(answer)
}

#[async_trait]
impl<H: Hook> Store for Hooked<H> {
    fn url(&self) -> &str {
        self.inner.url()
    }

    fn sibling(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { inner: self.inner.sibling(name)?, hook: self.hook.clone() }))
    }

    fn child(&self, name: &str) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(Self { inner: self.inner.child(name)?, hook: self.hook.clone() }))
    }

    fn part_bytes(&self, object_bytes: u64) -> u64 {
        self.inner.part_bytes(object_bytes)
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }

    async fn put(&self, name: &str, bytes: Bytes, mode: PutMode) -> Result<()> {
        let kind = if mode == PutMode::Create { Kind::PutNew } else { Kind::Put };
        let length = bytes.len() as u64;
        self.around(kind, name, length, self.inner.put(name, bytes, mode)).await
    }

    async fn create(&self, name: &str, size: u64) -> Result<Box<dyn ObjectWriter>> {
        let inner = self.around(Kind::Begin, name, 0, self.inner.create(name, size)).await?;
        Ok(Box::new(HookedWriter { inner, name: name.to_owned(), hook: self.hook.clone() }))
    }

    async fn read_into(&self, name: &str, range: Range<u64>, targets: Vec<LentMut>) -> Result<()> {
        let bytes = range.end.saturating_sub(range.start);
        let request = Request { kind: Kind::Read, name, bytes };
        if !self.hook.flips(&request) {
            return around(&*self.hook, &request, self.inner.read_into(name, range, targets)).await;
        }
        let read = around(&*self.hook, &request, self.inner.read(name, Some(range))).await?;
        let mut rest = flipped(&read);
        for mut target in targets {
            let own = rest.split_to(target.len());
            target.as_mut_slice().copy_from_slice(&own);
        }
        Ok(())
    }

    async fn read(&self, name: &str, range: Option<Range<u64>>) -> Result<Bytes> {
        let bytes = range.as_ref().map_or(0, |range| range.end.saturating_sub(range.start));
        let request = Request { kind: Kind::Read, name, bytes };
        let flips = self.hook.flips(&request);
        let read = around(&*self.hook, &request, self.inner.read(name, range)).await?;
        Ok(if flips { flipped(&read) } else { read })
    }

    async fn size(&self, name: &str) -> Result<u64> {
        self.around(Kind::Size, name, 0, self.inner.size(name)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.around(Kind::List, prefix, 0, self.inner.list(prefix)).await
    }

    async fn list_folders(&self, prefix: &str) -> Result<Vec<String>> {
        self.around(Kind::List, prefix, 0, self.inner.list_folders(prefix)).await
    }

    async fn list_below(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.around(Kind::List, prefix, 0, self.inner.list_below(prefix)).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.around(Kind::Delete, name, 0, self.inner.delete(name)).await
    }

    async fn honours_create(&self) -> Result<bool> {
        self.around(Kind::Probe, "", 0, self.inner.honours_create()).await
    }

    async fn abort_upload(&self, name: &str, upload_id: &str) -> Result<()> {
        self.around(Kind::Abort, name, 0, self.inner.abort_upload(name, upload_id)).await
    }

    async fn open_uploads(&self) -> Result<Vec<OpenUpload>> {
        self.around(Kind::List, "", 0, self.inner.open_uploads()).await
    }

    // None is a request of its own: they ask nothing of stores that are reached by requests.

    async fn tidy(&self) {
        self.inner.tidy().await;
    }

    async fn remove_empty(&self) {
        self.inner.remove_empty().await;
    }

    async fn sweep(&self, prefix: &str) -> Result<()> {
        self.inner.sweep(prefix).await
    }
}

#[derive(Debug)]
struct HookedWriter<H> {
    inner: Box<dyn ObjectWriter>,
    name: String,
    hook: Arc<H>,
}

#[async_trait]
impl<H: Hook> ObjectWriter for HookedWriter<H> {
    async fn write_part(&self, mut part: Part) -> Result<()> {
        let request = Request { kind: Kind::Part, name: &self.name, bytes: part.len() as u64 };
        if self.hook.flips(&request) {
            // The CRC stays: it was taken from the bytes as they were.
            part.pieces = vec![flipped(&part.pieces.concat())];
        }
        around(&*self.hook, &request, self.inner.write_part(part)).await
    }

    async fn finish(self: Box<Self>) -> Result<()> {
        let Self { inner, name, hook } = *self;
        around(&*hook, &Request { kind: Kind::Finish, name: &name, bytes: 0 }, inner.finish()).await
    }

    async fn abort(self: Box<Self>) {
        let Self { inner, name, hook } = *self;
        let abort = async {
            inner.abort().await;
            Ok(())
        };
        // An abort has no result: what a hook refuses is left to the next collection, as in life.
        if let Err(error) = around(&*hook, &Request { kind: Kind::Abort, name: &name, bytes: 0 }, abort).await {
            tracing::warn!(%error, "an abort was refused");
        }
    }
}

/// A copy with the lowest bit of the middle byte changed.
fn flipped(bytes: &[u8]) -> Bytes {
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
    bytes.into()
}
