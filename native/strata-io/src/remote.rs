//! A bucket, a container, a web server: every store behind HTTP, and the one in memory for tests.
//!
//! The `object_store` crate speaks the protocols; its retries and time-outs are off. What is ours: one retry
//! layer, transfers watched by progress, checksums taken before the bytes were sent, creates and completed
//! uploads whose outcome is looked up when the answer was lost, and uploads that leave nothing behind.

mod answer;
mod body;
mod client;
mod credentials;
mod download;
mod http;
mod journal;
mod names;
pub(crate) mod open;
mod options;
mod seen;
mod signing;
mod unknown;
mod upload;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use ::http::{HeaderName, HeaderValue};
use async_trait::async_trait;
use base64::Engine;
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

use self::answer::Doing;
use self::http::Call;
pub use self::journal::{PendingUpload, UPLOADS_FOLDER, discard_upload, pending_uploads};
use self::signing::Signing;
use self::unknown::Listing;
use crate::digest::DigestKind;
use crate::gate::{Gate, Lanes, Tally};
use crate::lent::LentMut;
use crate::pace::Siblings;
use crate::retry::{Failure, Policy, Retry};
use crate::schedule::PartLimits;
use crate::store::{OpenUpload, check_plain};
use crate::{Counters, Error, IoConfig, ObjectInfo, ObjectWriter, PutMode, Result, Store};

/// What a kind of store can do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abilities {
    /// Sizes and number of parts.
    pub(crate) limits: PartLimits,
    /// Requests may carry `x-amz-checksum-crc32`.
    pub(crate) crc32: bool,
    /// An upload can carry metadata by which its object is recognised.
    pub(crate) upload_metadata: bool,
}

/// The crate's face of one bucket.
#[derive(Clone)]
pub(crate) struct Bucket {
    /// Single objects.
    pub(crate) objects: Arc<dyn ObjectStore>,
    /// Uploads in parts; `None` where nothing can be written.
    pub(crate) parts: Option<Arc<dyn MultipartStore>>,
    /// Scheme, endpoint and bucket: what one probe speaks for.
    pub(crate) identity: String,
    /// What it can do.
    pub(crate) abilities: Abilities,
    /// What its requests are signed with.
    pub(crate) signing: Signing,
    /// Lists the uploads that have begun; `None` where that cannot be asked.
    pub(crate) uploads: Option<Arc<Listing>>,
}

/// A [`Store`] over the `object_store` crate.
#[derive(Debug)]
pub(crate) struct RemoteStore {
    remote: Arc<Remote>,
}

/// What the store and its writers share.
struct Remote {
    url: String,
    root: String,
    bucket: Bucket,
    config: IoConfig,
    lanes: Lanes,
}

/// What a store has throttled past a short deadline is still cleaned up, if it can be within this time.
const CLEAN_UP: Duration = Duration::from_secs(10);

/// Headers that a request carries besides the crate's.
type Headers = Vec<(HeaderName, HeaderValue)>;

impl RemoteStore {
    /// The store at `url` (no credentials in it), whose objects have keys below `root`.
    pub(crate) fn new(url: &str, root: &str, bucket: Bucket, config: &IoConfig) -> Self {
        let gate = Gate::of(&bucket.identity);
        Self::counting(url, root, bucket, config, gate, Arc::default())
    }

    fn counting(url: &str, root: &str, bucket: Bucket, config: &IoConfig, gate: Arc<Gate>, tally: Arc<Tally>) -> Self {
        let lanes = Lanes::new(config.max_concurrency, gate, tally);
        let (url, root) = (url.trim_end_matches('/').to_owned(), root.trim_matches('/').to_owned());
        Self { remote: Arc::new(Remote { url, root, bucket, config: config.clone(), lanes }) }
    }
}

#[async_trait]
impl Store for RemoteStore {
    fn url(&self) -> &str {
        &self.remote.url
    }

    fn sibling(&self, name: &str) -> Result<Arc<dyn Store>> {
        check_plain(name)?;
        let Remote { url, root, bucket, config, lanes } = &*self.remote;
        if root.is_empty() {
            return Err(Error::Config(format!("nothing lies beside {url}: it is all of the bucket")));
        }
        let beside = |place: &str| place.rsplit_once('/').map_or(name.to_owned(), |(up, _)| format!("{up}/{name}"));
        let (gate, tally) = (lanes.gate.clone(), lanes.tally.clone());
        Ok(Arc::new(Self::counting(&beside(url), &beside(root), bucket.clone(), config, gate, tally)))
    }

    fn child(&self, name: &str) -> Result<Arc<dyn Store>> {
        check_plain(name)?;
        let Remote { url, root, bucket, config, lanes } = &*self.remote;
        let inside = |place: &str| if place.is_empty() { name.to_owned() } else { format!("{place}/{name}") };
        let (gate, tally) = (lanes.gate.clone(), lanes.tally.clone());
        Ok(Arc::new(Self::counting(
            &inside(url.trim_end_matches('/')),
            &inside(root),
            bucket.clone(),
            config,
            gate,
            tally,
        )))
    }

    fn part_bytes(&self, object_bytes: u64) -> u64 {
        self.remote.part_bytes(object_bytes)
    }

    async fn put(&self, name: &str, bytes: Bytes, mode: PutMode) -> Result<()> {
        self.remote.uploads("write", name)?;
        match mode {
            PutMode::Overwrite => self.remote.put(name, bytes).await,
            PutMode::Create => self.remote.put_new(name, bytes).await,
        }
    }

    async fn create(&self, name: &str, size: u64) -> Result<Box<dyn ObjectWriter>> {
        upload::begin(self.remote.clone(), name, size).await
    }

    async fn read_into(&self, name: &str, range: Range<u64>, targets: Vec<LentMut>) -> Result<()> {
        download::into_targets(&self.remote, name, range, targets, DigestKind::None).await.map(|_| ())
    }

    async fn read_digested(
        &self,
        name: &str,
        range: Range<u64>,
        targets: Vec<LentMut>,
        kind: DigestKind,
    ) -> Result<Vec<u128>> {
        download::into_targets(&self.remote, name, range, targets, kind).await
    }

    async fn read(&self, name: &str, range: Option<Range<u64>>) -> Result<Bytes> {
        download::into_bytes(&self.remote, name, range).await
    }

    async fn size(&self, name: &str) -> Result<u64> {
        match self.remote.head_size(name).await {
            // The answer to a HEAD has no body and so cannot say that the bucket is missing; a GET's can.
            Err(Error::NotFound { .. }) => {
                download::into_bytes(&self.remote, name, Some(0..1)).await?;
                self.remote.head_size(name).await
            }
            known => known,
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        Ok(self.remote.infos(prefix, &self.remote.list(prefix).await?.objects))
    }

    async fn list_below(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        Ok(self.remote.infos(prefix, &self.remote.list_below(prefix).await?))
    }

    async fn list_folders(&self, prefix: &str) -> Result<Vec<String>> {
        let listed = self.remote.list(prefix).await?;
        let name = |key: &Path| names::name(&self.remote.root, key).map(str::to_owned);
        let mut folders: Vec<String> = listed.common_prefixes.iter().filter_map(name).collect();
        folders.sort();
        Ok(folders)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.remote.uploads("delete", name)?;
        self.remote.delete(name).await
    }

    async fn honours_create(&self) -> Result<bool> {
        static PROBED: LazyLock<Mutex<HashMap<String, bool>>> = LazyLock::new(Mutex::default);
        let identity = &self.remote.bucket.identity;
        let known = PROBED.lock().expect("no panic while held").get(identity).copied();
        if let Some(honoured) = known {
            return Ok(honoured);
        }
        let honoured = self.remote.probe_create().await?;
        PROBED.lock().expect("no panic while held").insert(identity.clone(), honoured);
        Ok(honoured)
    }

    async fn abort_upload(&self, name: &str, upload_id: &str) -> Result<()> {
        self.remote.abort_upload(name, upload_id).await
    }

    async fn open_uploads(&self) -> Result<Vec<OpenUpload>> {
        self.remote.open_uploads().await
    }

    fn counters(&self) -> Counters {
        self.remote.lanes.tally.counters()
    }
}

impl Remote {
    fn object(&self, name: &str) -> String {
        format!("{}/{name}", self.url)
    }

    fn part_bytes(&self, object_bytes: u64) -> u64 {
        self.bucket.abilities.limits.part_bytes(object_bytes, self.config.part_bytes)
    }

    /// The half that writes in parts.
    fn uploads(&self, operation: &'static str, name: &str) -> Result<&Arc<dyn MultipartStore>> {
        self.bucket.parts.as_ref().ok_or_else(|| Error::Io {
            operation,
            object: self.object(name),
            errno: Some(libc::EROFS),
            detail: "stores over plain HTTP are read-only".to_owned(),
        })
    }

    /// The checksum header for bytes whose CRC is `crc`, where the store takes one.
    fn crc_header(&self, crc: u32) -> Headers {
        if !self.bucket.abilities.crc32 {
            return Headers::new();
        }
        let value = base64::engine::general_purpose::STANDARD.encode(crc.to_be_bytes());
        let value = HeaderValue::try_from(value).expect("base64 is ASCII");
        vec![(HeaderName::from_static("x-amz-checksum-crc32"), value)]
    }

    /// One request, once; the caller holds a slot.
    async fn request<T>(
        &self,
        doing: Doing<'_>,
        headers: Headers,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failure> {
        let call = Call::with_headers(headers);
        let generation = self.bucket.signing.generation();
        match call.scope(request).await {
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.failure(doing, &error, &call, generation).await),
        }
    }

    /// What the failure of a request with keys of `generation` means.
    async fn failure(&self, doing: Doing<'_>, error: &object_store::Error, call: &Call, generation: u64) -> Failure {
        let seen = call.seen();
        match answer::failure(doing, error, &seen) {
            Failure::Final(error) if self.bucket.signing.correct(&seen, generation).await => Failure::Corrected(error),
            failure => failure,
        }
    }

    /// How long reads take here.
    fn reads(&self) -> MutexGuard<'_, Siblings> {
        self.lanes.gate.reads.lock().expect("no panic while held")
    }

    /// The tries of one operation.
    fn tries<'a>(&'a self, operation: &'static str, object: &'a str) -> Retry<'a> {
        let policy = Policy { max_tries: self.config.max_tries, deadline: self.config.deadline };
        Retry::start(policy, &self.lanes, operation, object)
    }

    /// One request with its tries.
    async fn retried<T, F>(&self, doing: Doing<'_>, headers: Headers, mut request: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut retry = self.tries(doing.operation, doing.object);
        loop {
            match retry.attempt(self.request(doing, headers.clone(), request())).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }

    async fn put(&self, name: &str, bytes: Bytes) -> Result<()> {
        let headers = self.crc_header(crate::digest::crc32(&bytes));
        self.put_payload(name, PutPayload::from_bytes(bytes), headers).await
    }

    async fn put_payload(&self, name: &str, payload: PutPayload, headers: Headers) -> Result<()> {
        let (object, key) = (self.object(name), names::key(&self.root, name)?);
        let doing = Doing { operation: "write", object: &object };
        self.retried(doing, headers, || self.bucket.objects.put(&key, payload.clone())).await.map(|_| ())
    }

    /// A create-only put. After any failure the object is read back: a lost answer hides a success, and a
    /// retry of our own create meets our own object. Equal bytes are taken for ours.
    async fn put_new(&self, name: &str, bytes: Bytes) -> Result<()> {
        let object = self.object(name);
        let mut retry = self.tries("create", &object);
        loop {
            let Err(failure) = retry.attempt(self.create_once(name, &bytes)).await else {
                return Ok(());
            };
            if is_unsupported(&failure) {
                return self.put_unless_seen(name, bytes).await;
            }
            match (download::into_bytes(self, name, None).await, failure) {
                (Ok(found), _) if found == bytes => return Ok(()),
                (Ok(_), _) => return Err(Error::AlreadyExists { object }),
                // Refused for an object that is gone again, or a conflict between two creators: try again.
                (Err(Error::NotFound { .. }), Failure::Final(Error::AlreadyExists { .. })) => {
                    retry.pause(Failure::again("another create was under way")).await?;
                }
                (Err(_), failure) => retry.pause(failure).await?,
            }
        }
    }

    async fn create_once(&self, name: &str, bytes: &Bytes) -> Result<(), Failure> {
        let object = self.object(name);
        let key = names::key(&self.root, name).map_err(Failure::Final)?;
        let headers = self.crc_header(crate::digest::crc32(bytes));
        let (payload, mode) = (PutPayload::from_bytes(bytes.clone()), object_store::PutMode::Create);
        let put = self.bucket.objects.put_opts(&key, payload, mode.into());
        self.request(Doing { operation: "create", object: &object }, headers, put).await.map(|_| ())
    }

    /// For stores that know no create-only put: [`Store::honours_create`] says so, and races are not noticed.
    async fn put_unless_seen(&self, name: &str, bytes: Bytes) -> Result<()> {
        match self.head_size(name).await {
            Ok(_) => Err(Error::AlreadyExists { object: self.object(name) }),
            Err(Error::NotFound { .. }) => self.put(name, bytes).await,
            Err(error) => Err(error),
        }
    }

    async fn probe_create(&self) -> Result<bool> {
        let name = format!(".strata/probe-{:016x}", rand::random::<u64>());
        self.put_new(&name, Bytes::from_static(b"first")).await?;
        let object = self.object(&name);
        let mut retry = self.tries("create", &object);
        let honoured = loop {
            match retry.attempt(self.create_once(&name, &Bytes::from_static(b"second"))).await {
                Ok(()) => break Ok(false),
                Err(Failure::Final(Error::AlreadyExists { .. })) => break Ok(true),
                Err(failure) if is_unsupported(&failure) => break Ok(false),
                Err(failure) => {
                    if let Err(error) = retry.pause(failure).await {
                        break Err(error);
                    }
                }
            }
        };
        if let Err(error) = self.delete(&name).await {
            tracing::warn!(%error, "the probe object stays behind");
        }
        honoured
    }

    async fn head_size(&self, name: &str) -> Result<u64> {
        let (object, key) = (self.object(name), names::key(&self.root, name)?);
        let doing = Doing { operation: "stat", object: &object };
        self.retried(doing, Headers::new(), || self.bucket.objects.head(&key)).await.map(|meta| meta.size)
    }

    async fn list(&self, prefix: &str) -> Result<object_store::ListResult> {
        let (object, key) = (self.object(prefix), names::folder_key(&self.root, prefix)?);
        let doing = Doing { operation: "list", object: &object };
        let key = (!key.as_ref().is_empty()).then_some(key);
        self.retried(doing, Headers::new(), || self.bucket.objects.list_with_delimiter(key.as_ref())).await
    }

    /// All pages in one try: a page that fails is asked for again together with those before it.
    async fn list_below(&self, prefix: &str) -> Result<Vec<object_store::ObjectMeta>> {
        let (object, key) = (self.object(prefix), names::folder_key(&self.root, prefix)?);
        let doing = Doing { operation: "list", object: &object };
        let key = (!key.as_ref().is_empty()).then_some(key);
        self.retried(doing, Headers::new(), || self.bucket.objects.list(key.as_ref()).try_collect()).await
    }

    fn infos(&self, prefix: &str, listed: &[object_store::ObjectMeta]) -> Vec<ObjectInfo> {
        let info = |meta: &object_store::ObjectMeta| {
            let name = names::name(&self.root, &meta.location)?;
            // Consoles mark an empty folder by an object of its name, which the crate strips of its slash.
            (name != prefix.trim_end_matches('/')).then(|| {
                let modified_at = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
                ObjectInfo { name: name.to_owned(), size: meta.size, modified_at }
            })
        };
        let mut infos: Vec<ObjectInfo> = listed.iter().filter_map(info).collect();
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        infos
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let (object, key) = (self.object(name), names::key(&self.root, name)?);
        let doing = Doing { operation: "delete", object: &object };
        match self.retried(doing, Headers::new(), || self.bucket.objects.delete(&key)).await {
            // Only a missing bucket comes with a detail.
            Err(Error::NotFound { detail, .. }) if detail.is_empty() => Ok(()),
            ended => ended,
        }
    }

    async fn abort_upload(&self, name: &str, upload_id: &str) -> Result<()> {
        let (object, key) = (self.object(name), names::key(&self.root, name)?);
        let (parts, id) = (self.uploads("abort", name)?, upload_id.to_owned());
        let doing = Doing { operation: "abort", object: &object };
        let deadline = self.config.deadline.max(CLEAN_UP);
        let policy = Policy { max_tries: self.config.max_tries, deadline };
        let mut retry = Retry::start(policy, &self.lanes, doing.operation, doing.object);
        loop {
            let abort = self.request(doing, Headers::new(), parts.abort_multipart(&key, &id));
            match retry.attempt(abort).await {
                // Finished or aborted before.
                Ok(()) | Err(Failure::Final(Error::NotFound { .. } | Error::UploadEnded { .. })) => return Ok(()),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }
}

/// Whether the store knows no such request.
fn is_unsupported(failure: &Failure) -> bool {
    matches!(failure, Failure::Final(Error::Io { errno: Some(libc::ENOSYS), .. }))
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({})", self.url)
    }
}
