//! Uploads that a store has begun and whose ids nobody has written down: the answer was lost on its way, or its receiver
//! died with it.
//!
//! The store keeps their parts, and charges for them, until somebody aborts them. Only an object's own key leads to
//! them: names are new, so whatever upload the store knows under the key of ours is ours. The request is not among those
//! of the `object_store` crate.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use chrono::DateTime;
use http_body_util::BodyExt;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use tokio::runtime::Handle;

use super::answer::Doing;
use super::http::Signer;
use super::seen::element;
use super::{CLEAN_UP, Headers, Remote, names};
use crate::error::chain;
use crate::retry::{Cause, Failure, Policy, Retry};
use crate::store::OpenUpload;
use crate::{Error, Result};

/// Time for a request that nobody waits for any more to arrive.
const GRACE: Duration = Duration::from_secs(1);

/// Asks S3 which uploads have begun.
#[derive(Debug)]
pub(crate) struct Listing {
    /// Sends, as every request is sent.
    pub(crate) client: HttpClient,
    /// Of the bucket.
    pub(crate) url: String,
    /// None where requests are anonymous.
    pub(crate) signer: Option<Signer>,
}

/// One page of uploads, and where the next one begins if there is one.
#[derive(Debug, Default, PartialEq)]
struct Page {
    uploads: Vec<Begun>,
    next: Option<String>,
}

#[derive(Debug, PartialEq)]
struct Begun {
    key: String,
    id: String,
    at: SystemTime,
}

impl Listing {
    /// Uploads whose keys begin with `prefix`.
    async fn begun(&self, prefix: &str) -> object_store::Result<Vec<Begun>> {
        let first = format!("{}?uploads=&prefix={}", self.url, encoded(prefix));
        let (mut begun, mut after) = (Vec::new(), String::new());
        loop {
            let page = self.page(&format!("{first}{after}")).await?;
            begun.extend(page.uploads);
            match page.next.map(|next| format!("&{next}")) {
                Some(next) if next != after => after = next,
                _ => return Ok(begun),
            }
        }
    }

    async fn page(&self, uri: &str) -> object_store::Result<Page> {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = uri.parse().map_err(failed)?;
        if let Some(signer) = &self.signer {
            signer.sign(&mut request).await?;
        }
        let answer = self.client.execute(request).await.map_err(failed)?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(failed)?.to_bytes();
        if !status.is_success() {
            return Err(failed(format!("HTTP status {status}")));
        }
        Ok(page(&String::from_utf8_lossy(&body)))
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: error.into() }
}

fn page(xml: &str) -> Page {
    let text = |xml: &str, name: &str| element(xml, name).map(|text| unescaped(&text));
    let begun = |upload: &str| {
        // Without its time it is as young as can be, and nobody's to end.
        let at = text(upload, "Initiated").and_then(|at| Some(DateTime::parse_from_rfc3339(&at).ok()?.into()));
        let at = at.unwrap_or_else(SystemTime::now);
        Some(Begun { key: text(upload, "Key")?, id: text(upload, "UploadId")?, at })
    };
    let marker = |name: &str, from: &str| text(xml, from).map(|at| format!("{name}={}", encoded(&at)));
    let next = || {
        let key = marker("key-marker", "NextKeyMarker")?;
        let id = marker("upload-id-marker", "NextUploadIdMarker");
        Some([Some(key), id].into_iter().flatten().collect::<Vec<_>>().join("&"))
    };
    let is_cut = element(xml, "IsTruncated").is_some_and(|cut| cut == "true");
    Page { uploads: xml.split("<Upload>").skip(1).filter_map(begun).collect(), next: is_cut.then(next).flatten() }
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

fn unescaped(text: &str) -> String {
    let named = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&#39;", "'")];
    // Last, or an escaped "&lt;" would become a "<".
    named.iter().fold(text.to_owned(), |text, (name, char)| text.replace(name, char)).replace("&amp;", "&")
}

/// The tries to begin one upload. Dropped before they end, they are cleaned up after in the background.
pub(super) struct Beginning {
    remote: Arc<Remote>,
    name: String,
    /// Whether the store may have begun an upload without our learning its id.
    lost: bool,
    runtime: Handle,
}

impl Beginning {
    pub(super) fn new(remote: &Arc<Remote>, name: &str) -> Self {
        Self { remote: remote.clone(), name: name.to_owned(), lost: false, runtime: Handle::current() }
    }

    /// The id of the upload that `begin` begins, and whether there may be more of its key.
    pub(super) async fn run<F>(mut self, headers: Headers, mut begin: impl FnMut() -> F) -> Result<(String, bool)>
    where
        F: Future<Output = object_store::Result<String>>,
    {
        let remote = self.remote.clone();
        let object = remote.object(&self.name);
        let doing = Doing { operation: "begin", object: &object };
        let mut retry = remote.tries(doing.operation, doing.object);
        loop {
            let lost_before = std::mem::replace(&mut self.lost, true);
            let failure = match retry.attempt(remote.request(doing, headers.clone(), begin())).await {
                Ok(id) => {
                    self.lost = false;
                    return Ok((id, lost_before));
                }
                Err(failure) => failure,
            };
            self.lost = lost_before || may_have_begun(&failure);
            if let Err(error) = retry.pause(failure).await {
                if std::mem::take(&mut self.lost) {
                    remote.abort_unknown(&self.name).await;
                }
                return Err(error);
            }
        }
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if self.lost {
            let (remote, name) = (self.remote.clone(), std::mem::take(&mut self.name));
            self.runtime.spawn(async move {
                // The request may still be on its way.
                tokio::time::sleep(GRACE).await;
                remote.abort_unknown(&name).await;
            });
        }
    }
}

/// A refusal says that nothing was begun; anything else leaves it open.
fn may_have_begun(failure: &Failure) -> bool {
    match failure {
        Failure::Again { cause, .. } => *cause != Cause::Throttled,
        Failure::Corrected(_) => false,
        Failure::Final(error) => matches!(error, Error::Io { .. }),
    }
}

impl Remote {
    /// Aborts every upload that the store knows under the key of `name`, whose own one has ended. Failures are logged.
    pub(super) async fn abort_unknown(&self, name: &str) {
        let object = self.object(name);
        let stays = "an upload whose id was lost may stay at the store, until a lifecycle rule of the bucket ends it";
        let Some(listing) = &self.bucket.uploads else {
            tracing::warn!(object, "{stays}");
            return;
        };
        let ended = async {
            for id in self.unknown(listing, name, &object).await? {
                self.abort_upload(name, &id).await?;
                tracing::info!(object, upload_id = id, "an upload whose id had been lost is aborted");
            }
            Ok::<_, Error>(())
        };
        if let Err(error) = ended.await {
            tracing::warn!(object, error = chain(&error), "{stays}");
        }
    }

    async fn unknown(&self, listing: &Listing, name: &str, object: &str) -> Result<Vec<String>> {
        let key = names::key(&self.root, name)?;
        // An error may be waiting for this.
        let deadline = self.config.deadline.min(CLEAN_UP);
        let begun = self.begun(listing, key.as_ref(), object, deadline).await?;
        Ok(begun.into_iter().filter(|upload| upload.key == key.as_ref()).map(|upload| upload.id).collect())
    }

    async fn begun(&self, listing: &Listing, prefix: &str, object: &str, deadline: Duration) -> Result<Vec<Begun>> {
        let doing = Doing { operation: "list uploads of", object };
        let policy = Policy { max_tries: self.config.max_tries, deadline };
        let mut retry = Retry::start(policy, &self.lanes, doing.operation, doing.object);
        loop {
            match retry.attempt(self.request(doing, Headers::new(), listing.begun(prefix))).await {
                Ok(begun) => return Ok(begun),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }

    /// See [`crate::Store::open_uploads`].
    pub(super) async fn open_uploads(&self) -> Result<Vec<OpenUpload>> {
        let Some(listing) = &self.bucket.uploads else { return Ok(Vec::new()) };
        let folder = names::folder_key(&self.root, "")?;
        let prefix = if folder.as_ref().is_empty() { String::new() } else { format!("{folder}/") };
        let begun = match self.begun(listing, &prefix, &self.url, self.config.deadline).await {
            Err(Error::PermissionDenied { .. } | Error::Io { errno: Some(libc::ENOSYS), .. }) => return Ok(Vec::new()),
            begun => begun?,
        };
        let open = |upload: Begun| {
            let name = upload.key.strip_prefix(&prefix)?.to_owned();
            Some(OpenUpload { name, upload_id: upload.id, began_at: upload.at })
        };
        Ok(begun.into_iter().filter_map(open).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_tells_each_upload_and_where_the_next_page_begins() {
        let upload = |key: &str, id: &str, at: &str| {
            format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>{at}</Initiated></Upload>")
        };
        let all =
            upload("a&amp;b", "1", "1970-01-01T00:00:07.000Z") + &upload("a&amp;bc", "2", "1970-01-01T01:00:00+01:00");
        let next = "<NextKeyMarker>a&amp;bc</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker>";
        let xml = |cut: bool| {
            let head = format!("<Prefix>a&amp;b</Prefix>{next}<IsTruncated>{cut}</IsTruncated>");
            format!("<ListMultipartUploadsResult>{head}{all}</ListMultipartUploadsResult>")
        };
        let begun = |key: &str, id: &str, seconds: u64| Begun {
            key: key.to_owned(),
            id: id.to_owned(),
            at: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        };
        let uploads = || vec![begun("a&b", "1", 7), begun("a&bc", "2", 0)];
        assert_eq!(page(&xml(false)), Page { uploads: uploads(), next: None });
        let next = Some("key-marker=a%26bc&upload-id-marker=2".to_owned());
        assert_eq!(page(&xml(true)), Page { uploads: uploads(), next });
        assert_eq!(page("<ListMultipartUploadsResult/>"), Page::default());
    }

    #[test]
    fn keys_are_encoded_as_signatures_want_them() {
        assert_eq!(encoded("run/ü 1+2~"), "run%2F%C3%BC%201%2B2~");
    }
}
