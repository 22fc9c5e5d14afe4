//! What a request is signed with, and how that is put right when a store refuses it.
//!
//! Keys expire before they say so, and clocks are wrong. Both show only in a refusal; after it the next try carries newer
//! keys, or the store's time.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings, UriPathNormalizationMode,
};
use aws_sigv4::sign::v4;
use object_store::aws::AwsCredential;
use object_store::client::HttpRequest;

use super::answer::{is_expired, is_skewed};
use super::credentials::SdkChain;
use super::seen::Seen;

/// This machine's clock, set right by what a store said.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    /// Seconds that the store is ahead.
    ahead_s: Arc<AtomicI64>,
}

impl Clock {
    /// Whether it differs from this machine's.
    pub(crate) fn is_corrected(&self) -> bool {
        self.ahead_s.load(Ordering::Relaxed) != 0
    }

    /// The time to sign with.
    pub(crate) fn now(&self) -> SystemTime {
        let (now, ahead_s) = (SystemTime::now(), self.ahead_s.load(Ordering::Relaxed));
        let difference = Duration::from_secs(ahead_s.unsigned_abs());
        let moved = if ahead_s < 0 { now.checked_sub(difference) } else { now.checked_add(difference) };
        moved.unwrap_or(now)
    }

    fn correct(&self, store: SystemTime, here: SystemTime) {
        let ahead_s = match store.duration_since(here) {
            Ok(ahead) => ahead.as_secs() as i64,
            Err(behind) => -(behind.duration().as_secs() as i64),
        };
        self.ahead_s.store(ahead_s, Ordering::Relaxed);
    }
}

/// What can be put right about the signatures of a bucket's requests; nothing, where there is neither.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signing {
    /// Where newer keys come from.
    pub(crate) chain: Option<Arc<SdkChain>>,
    /// The clock of the signatures.
    pub(crate) clock: Option<Clock>,
}

impl Signing {
    /// Which keys a request is about to be signed with, for [`Signing::correct`].
    pub(crate) fn generation(&self) -> u64 {
        self.chain.as_ref().map_or(0, |chain| chain.generation())
    }

    /// Whether a request with keys of this generation, to which the answer was `seen`, may be accepted next time.
    pub(crate) async fn correct(&self, seen: &Seen, generation: u64) -> bool {
        match (&self.chain, &self.clock, seen.date) {
            (Some(chain), ..) if is_expired(seen) => chain.renewed_after(generation).await,
            (_, Some(clock), Some((store, here))) if is_skewed(seen) => {
                clock.correct(store, here);
                true
            }
            _ => false,
        }
    }
}

/// Signs `request` as it is, but for its body, with version 4 of AWS's signatures.
pub(crate) fn sign(
    request: &mut HttpRequest,
    keys: &AwsCredential,
    region: &str,
    time: SystemTime,
) -> Result<(), Box<dyn StdError + Send + Sync>> {
    for header in ["authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"] {
        request.headers_mut().remove(header);
    }
    // As S3 differs from AWS's other services:
    // <https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html>.
    let mut settings = SigningSettings::default();
    settings.percent_encoding_mode = PercentEncodingMode::Single;
    settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
    let (key, secret, token) = (keys.key_id.as_str(), keys.secret_key.as_str(), keys.token.clone());
    let identity = Credentials::new(key, secret, token, None, "strata-io").into();
    let params = v4::SigningParams::builder().identity(&identity).region(region).name("s3").time(time);
    let params = params.settings(settings).build()?.into();
    let (method, uri) = (request.method().to_string(), request.uri().to_string());
    let headers = request.headers().iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)));
    let signable = SignableRequest::new(&method, uri, headers, SignableBody::UnsignedPayload)?;
    let (instructions, _) = aws_sigv4::http_request::sign(signable, &params)?.into_parts();
    instructions.apply_to_request_http1x(request);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_corrected_clock_is_the_stores() {
        let clock = Clock::default();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        for store in [now - hour, now + hour, now] {
            clock.correct(store, now);
            let differs = clock.now().duration_since(store).unwrap_or_else(|error| error.duration());
            assert!(differs < Duration::from_secs(60), "{differs:?}");
        }
        assert!(!clock.is_corrected());
    }
}
