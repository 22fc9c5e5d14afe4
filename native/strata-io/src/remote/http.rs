//! The one way to the network: every request of every remote store passes through here.
//!
//! Three things happen that the `object_store` crate leaves out. A request can carry headers which its
//! interface has no place for (our checksums), and is then signed again. What came back is noted where the
//! retry layer finds it: status, error code, `Retry-After`. And a transfer in which no byte moves, or hardly any, is
//! ended: a limit on the whole body would kill large transfers on slow links, so only progress counts.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::aws::AwsCredentialProvider;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use tokio::time::{Instant, Sleep};

use super::seen::{Seen, element};
use super::signing::{Clock, sign};
use crate::error::chain;

tokio::task_local! {
    /// The call in whose name this task sends requests.
    static CALL: Arc<Call>;
}

/// Error bodies are read up to here; real ones have a few hundred bytes.
const ERROR_BODY_BYTES: usize = 64 << 10;

/// Request bodies are handed to the socket in pieces of this size, so that progress is seen while a large
/// part is sent. Pieces of 4 MiB measured no faster
/// (examples/s3_throughput.rs).
const PIECE_BYTES: usize = 1 << 20;

/// A body that brings less than this, in bytes a second, while it is waited for is as good as stalled: a connection that
/// still works is some thousand times faster.
const SLOWEST_BYTES_PER_S: f64 = 1024.0;

/// What one request carries besides what the crate sends, and what was seen of its answer.
#[derive(Debug, Default)]
pub(crate) struct Call {
    headers: Vec<(HeaderName, HeaderValue)>,
    seen: Mutex<Seen>,
}

impl Call {
    /// A call with additional headers.
    pub(crate) fn with_headers(headers: Vec<(HeaderName, HeaderValue)>) -> Arc<Self> {
        Arc::new(Self { headers, seen: Mutex::default() })
    }

    /// Runs `request` in the name of this call.
    pub(crate) async fn scope<T>(self: &Arc<Self>, request: impl Future<Output = T>) -> T {
        CALL.scope(self.clone(), request).await
    }

    /// What was seen so far.
    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().expect("no panic while held").clone()
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().expect("no panic while held"));
    }
}

/// Makes the HTTP clients of a store.
#[derive(Debug, Clone)]
pub(crate) struct Connector {
    /// Signs requests that carry additional headers, or another time; `None` where none ever does.
    pub(crate) signer: Option<Signer>,
    /// Whether a proxy from the environment may be used: never for an endpoint on this machine.
    pub(crate) proxy: bool,
    /// Time without a byte moved after which a transfer is given up.
    pub(crate) stall: Duration,
}

/// What a signature needs.
#[derive(Debug, Clone)]
pub(crate) struct Signer {
    /// Where the keys come from.
    pub(crate) credentials: AwsCredentialProvider,
    /// The region that is signed for.
    pub(crate) region: String,
    /// What time it is for the store.
    pub(crate) clock: Clock,
}

impl Signer {
    /// Signs `request` as it is now, but for its body.
    pub(crate) async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()> {
        let credentials = self.credentials.get_credential().await?;
        sign(request, &credentials, &self.region, self.clock.now())
            .map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(Unsigned(error)) })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = super::client::build(options, self.proxy)?;
        Ok(HttpClient::new(Service { client, signer: self.signer.clone(), stall: self.stall }))
    }
}

#[derive(Debug)]
struct Service {
    client: reqwest::Client,
    signer: Option<Signer>,
    stall: Duration,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let call = CALL.try_with(Arc::clone).unwrap_or_default();
        self.complete(&call, &mut request).await?;
        let method = request.method().clone();
        let response = self.send(&call, request).await?;
        let (parts, body) = response.into_parts();
        // While a store puts an object together it sends blanks, some bytes a minute: to a POST any byte is progress.
        let slowest_bytes = if method == Method::POST { 1 } else { self.slowest_bytes() };
        let body = Watched::new(body, call.clone(), self.stall, slowest_bytes);
        call.note(|seen| *seen = Seen::of_head(parts.status, &parts.headers));
        // Of a batch of answers, as Azure gives to deletes, the crate reads each one.
        let batch = parts.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"multipart/"));
        if parts.status.is_success() && (method != Method::POST || batch) {
            return Ok(http::Response::from_parts(parts, HttpResponseBody::new(body)));
        }
        self.read_error(&call, parts, body).await
    }
}

impl Service {
    /// Fewer bytes than this within the time for a stall are one.
    fn slowest_bytes(&self) -> u64 {
        (SLOWEST_BYTES_PER_S * self.stall.as_secs_f64()).max(1.0) as u64
    }

    /// Adds the call's headers, and signs again where the crate's signature does not fit any more.
    async fn complete(&self, call: &Call, request: &mut HttpRequest) -> Result<(), HttpError> {
        for (name, value) in &call.headers {
            request.headers_mut().insert(name, value.clone());
        }
        let is_outdated = |signer: &&Signer| !call.headers.is_empty() || signer.clock.is_corrected();
        let Some(signer) = self.signer.as_ref().filter(is_outdated) else { return Ok(()) };
        signer.sign(request).await.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))
    }

    /// Sends `request` and waits for the head of the answer, as long as bytes move.
    async fn send(&self, call: &Call, request: HttpRequest) -> Result<http::Response<reqwest::Body>, HttpError> {
        let sent = Arc::new(AtomicU64::new(0));
        let (parts, body) = request.into_parts();
        let url = parts.uri.to_string().parse().map_err(|e| HttpError::new(HttpErrorKind::Unknown, Unusable(e)))?;
        let mut request = reqwest::Request::new(parts.method, url);
        *request.headers_mut() = parts.headers;
        if body.content_length() > 0 {
            *request.body_mut() = Some(reqwest::Body::wrap(Counted { body, rest: Bytes::new(), sent: sent.clone() }));
        } else {
            // An explicit empty body, so that a PUT or POST says `Content-Length: 0`.
            *request.body_mut() = Some(Bytes::new().into());
        }
        let mut answer = std::pin::pin!(self.client.execute(request));
        let mut sent_before = 0;
        loop {
            match tokio::time::timeout(self.stall, &mut answer).await {
                Ok(Ok(response)) => return Ok(response.into()),
                Ok(Err(error)) => {
                    let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Request };
                    return Err(broken(call, kind, error.without_url()));
                }
                Err(_) => {
                    let sent_now = sent.load(Ordering::Relaxed);
                    if sent_now == sent_before {
                        return Err(stalled(call, self.stall));
                    }
                    sent_before = sent_now;
                }
            }
        }
    }

    /// Reads a short answer whole, notes an error in it, and gives it an error's status: S3 may answer a
    /// completed upload with 200 and an error in the body.
    async fn read_error(
        &self,
        call: &Call,
        mut parts: http::response::Parts,
        body: Watched,
    ) -> Result<HttpResponse, HttpError> {
        let bytes = match Limited::new(body, ERROR_BODY_BYTES).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => return Err(broken(call, HttpErrorKind::Interrupted, Cut(error))),
        };
        let text = String::from_utf8_lossy(&bytes);
        if !parts.status.is_success() || text.contains("<Error>") {
            call.note(|seen| {
                seen.code = element(&text, "Code");
                seen.message = element(&text, "Message");
            });
            if parts.status.is_success() {
                parts.status = StatusCode::INTERNAL_SERVER_ERROR;
                call.note(|seen| seen.status = Some(parts.status.as_u16()));
            }
        }
        Ok(http::Response::from_parts(parts, bytes.into()))
    }
}

fn broken(call: &Call, kind: HttpErrorKind, error: impl StdError + Send + Sync + 'static) -> HttpError {
    call.note(|seen| seen.transport = Some(chain(&error)));
    HttpError::new(kind, error)
}

fn stalled(call: &Call, stall: Duration) -> HttpError {
    call.note(|seen| seen.stalled = true);
    broken(call, HttpErrorKind::Timeout, Stalled { stall })
}

#[derive(Debug, thiserror::Error)]
#[error("no byte, or hardly any, moved for {stall:?}")]
struct Stalled {
    stall: Duration,
}

#[derive(Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
struct Cut(Box<dyn StdError + Send + Sync>);

#[derive(Debug, thiserror::Error)]
#[error("unusable URL: {0}")]
struct Unusable(url::ParseError);

#[derive(Debug, thiserror::Error)]
#[error("the request cannot be signed: {0}")]
struct Unsigned(Box<dyn StdError + Send + Sync>);

/// A request body that counts the bytes taken by the socket.
struct Counted {
    body: HttpRequestBody,
    rest: Bytes,
    sent: Arc<AtomicU64>,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        while self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => self.rest = frame.into_data().unwrap_or_default(),
                ended => return Poll::Ready(ended),
            }
        }
        let piece_bytes = self.rest.len().min(PIECE_BYTES);
        let piece = self.rest.split_to(piece_bytes);
        self.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let unsent = self.body.size_hint().exact().unwrap_or(0);
        SizeHint::with_exact(unsent + self.rest.len() as u64)
    }
}

/// An answer's body that fails when no byte comes for `stall`, or fewer than `slowest_bytes` in such a time.
#[derive(Debug)]
struct Watched {
    body: reqwest::Body,
    call: Arc<Call>,
    stall: Duration,
    slowest_bytes: u64,
    /// Armed when something is first waited for; set on only when it rings, for a timer for each frame costs more than
    /// the copy.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Since the alarm was set.
    received: u64,
    last_at: Instant,
}

impl Watched {
    fn new(body: reqwest::Body, call: Arc<Call>, stall: Duration, slowest_bytes: u64) -> Self {
        Self { body, call, stall, slowest_bytes, alarm: None, received: 0, last_at: Instant::now() }
    }
}

impl Body for Watched {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if let Some(Ok(bytes)) = frame.as_ref().map(|frame| frame.as_ref().map(|frame| frame.data_ref())) {
                this.received += bytes.map_or(0, |bytes| bytes.len() as u64);
                this.last_at = Instant::now();
            }
            let cut = |error: reqwest::Error| broken(&this.call, HttpErrorKind::Interrupted, error.without_url());
            return Poll::Ready(frame.map(|frame| frame.map_err(cut)));
        }
        let (stall, last_at) = (this.stall, this.last_at);
        let alarm = this.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(last_at + stall)));
        loop {
            ready!(alarm.as_mut().poll(cx));
            if this.received < this.slowest_bytes || last_at + stall <= Instant::now() {
                return Poll::Ready(Some(Err(stalled(&this.call, stall))));
            }
            this.received = 0;
            alarm.as_mut().reset(last_at + stall);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
