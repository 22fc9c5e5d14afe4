//! Uploads that a store has begun for us and whose ids nobody knows, because the answer was lost on its way.
//!
//! The store keeps their parts, and charges for them, until somebody aborts them. Only an object's own key leads to
//! them: names are new, so whatever upload the store knows under the key of ours is ours. The request is not among those
//! of the `object_store` crate.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use object_store::path::Path;
use tokio::runtime::Handle;

use super::answer::Doing;
use super::http::Signer;
use super::seen::element;
use super::{CLEAN_UP, Headers, Remote, names};
use crate::error::chain;
use crate::retry::{Cause, Failure, Policy, Retry};
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

impl Listing {
    /// Ids of the uploads of `key`: not more than the first 1,000.
    async fn ids(&self, key: &Path) -> object_store::Result<Vec<String>> {
        let uri = format!("{}?uploads=&prefix={}", self.url, encoded(key.as_ref()));
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
        Ok(listed(&String::from_utf8_lossy(&body), key.as_ref()))
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: error.into() }
}

/// Ids of the uploads of exactly this key.
fn listed(xml: &str, key: &str) -> Vec<String> {
    let uploads = xml.split("<Upload>").skip(1);
    let own = uploads.filter(|upload| element(upload, "Key").is_some_and(|found| unescaped(&found) == key));
    own.filter_map(|upload| element(upload, "UploadId")).map(|id| unescaped(&id)).collect()
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
        let doing = Doing { operation: "list uploads of", object };
        // An error may be waiting for this.
        let policy = Policy { max_tries: self.config.max_tries, deadline: self.config.deadline.min(CLEAN_UP) };
        let mut retry = Retry::start(policy, &self.lanes, doing.operation, doing.object);
        loop {
            match retry.attempt(self.request(doing, Headers::new(), listing.ids(&key))).await {
                Ok(ids) => return Ok(ids),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uploads_of_the_very_key_are_taken() {
        let upload = |key: &str, id: &str| format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId></Upload>");
        let all = [upload("a&amp;b", "1"), upload("a&amp;bc", "2"), upload("a&amp;b", "3")].concat();
        let xml = format!("<ListMultipartUploadsResult><Prefix>a&amp;b</Prefix>{all}</ListMultipartUploadsResult>");
        assert_eq!(listed(&xml, "a&b"), ["1", "3"]);
        assert_eq!(listed("<ListMultipartUploadsResult/>", "a"), [""; 0]);
    }

    #[test]
    fn keys_are_encoded_as_signatures_want_them() {
        assert_eq!(encoded("run/ü 1+2~"), "run%2F%C3%BC%201%2B2~");
    }
}
