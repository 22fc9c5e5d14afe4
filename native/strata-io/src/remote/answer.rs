//! What a failed answer means: a final error by its name, or another try.

use std::time::SystemTime;

use super::seen::Seen;
use crate::Error;
use crate::error::chain;
use crate::retry::{Cause, Failure};

/// Error codes after which the same request may succeed.
const PASSING: [&str; 12] = [
    "BadGateway",
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "OperationTimedOut",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
];

/// Those of them that ask for fewer requests.
const THROTTLED: [&str; 6] =
    ["RequestLimitExceeded", "ServerBusy", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException"];

/// Codes for keys that were valid once.
const EXPIRED: [&str; 3] = ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"];

/// Codes by which a store says that the bytes it got are not the ones it was told of.
const DIGEST: [&str; 6] = [
    "BadDigest",
    "InvalidDigest",
    "Md5Mismatch",
    "Crc64Mismatch",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
];

/// Codes for a bucket or container that is not there.
const NO_BUCKET: [&str; 2] = ["NoSuchBucket", "ContainerNotFound"];

/// What was being done, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doing<'a> {
    /// A verb: `write`, `read`, `list`.
    pub(crate) operation: &'static str,
    /// The object's URL.
    pub(crate) object: &'a str,
}

/// Judges the failure `error` of a request whose answer was `seen`.
pub(crate) fn failure(doing: Doing<'_>, error: &object_store::Error, seen: &Seen) -> Failure {
    if let Some(detail) = &seen.transport {
        let cause = if seen.stalled { Cause::Stalled } else { Cause::Other };
        return Failure::Again { detail: detail.clone(), cause, after: None };
    }
    let code = seen.code.as_deref().unwrap_or_default();
    if PASSING.contains(&code) || matches!(seen.status, Some(408 | 429 | 500 | 502 | 503 | 504)) {
        return Failure::Again { detail: words(error, seen), cause: cause(seen.status, code), after: seen.retry_after };
    }
    Failure::Final(final_error(doing, error, seen, code))
}

fn cause(status: Option<u16>, code: &str) -> Cause {
    match status {
        Some(429 | 503) => Cause::Throttled,
        _ if THROTTLED.contains(&code) => Cause::Throttled,
        Some(409) => Cause::Other,
        _ => Cause::Server,
    }
}

/// Whether newer keys may be accepted.
pub(crate) fn is_expired(seen: &Seen) -> bool {
    seen.code.as_deref().is_some_and(|code| EXPIRED.contains(&code))
}

/// Whether the store found our clock wrong.
pub(crate) fn is_skewed(seen: &Seen) -> bool {
    seen.code.as_deref() == Some("RequestTimeTooSkewed")
}

fn final_error(doing: Doing<'_>, error: &object_store::Error, seen: &Seen, code: &str) -> Error {
    let object = doing.object.to_owned();
    let detail = words(error, seen);
    if NO_BUCKET.contains(&code) {
        return Error::NoBucket { object };
    }
    if DIGEST.contains(&code) {
        return Error::Mismatch { object, expected: "bytes that match their checksum".to_owned(), found: detail };
    }
    match seen.status {
        Some(301 | 307 | 400) if seen.bucket_region.is_some() => wrong_region(object, seen),
        Some(401 | 403) if is_skewed(seen) => Error::PermissionDenied { object, detail: clocks(&detail, seen) },
        Some(401 | 403) => Error::PermissionDenied { object, detail },
        // Stores differ in the status for credentials they cannot use.
        Some(400) if is_about_credentials(code) => Error::PermissionDenied { object, detail },
        Some(404) if code == "NoSuchUpload" => Error::UploadEnded { object },
        Some(404) => Error::NotFound { object, detail: String::new() },
        Some(409 | 412) => Error::AlreadyExists { object },
        Some(501) => Error::Io { operation: doing.operation, object, errno: Some(libc::ENOSYS), detail },
        // A success whose content makes no sense, an unexpected status, or no request at all.
        _ => without_status(doing, error, detail),
    }
}

fn without_status(doing: Doing<'_>, error: &object_store::Error, detail: String) -> Error {
    use object_store::Error as Crate;
    let object = doing.object.to_owned();
    match error {
        Crate::NotFound { .. } => Error::NotFound { object, detail: String::new() },
        Crate::AlreadyExists { .. } | Crate::Precondition { .. } => Error::AlreadyExists { object },
        Crate::PermissionDenied { .. } | Crate::Unauthenticated { .. } => Error::PermissionDenied { object, detail },
        Crate::NotImplemented { .. } | Crate::NotSupported { .. } => {
            Error::Io { operation: doing.operation, object, errno: Some(libc::ENOSYS), detail }
        }
        _ => Error::Io { operation: doing.operation, object, errno: None, detail },
    }
}

fn wrong_region(object: String, seen: &Seen) -> Error {
    let region = seen.bucket_region.as_deref().unwrap_or("another one");
    Error::Config(format!("{object}: the bucket is in region {region:?}; set the option \"region\" or AWS_REGION"))
}

fn is_about_credentials(code: &str) -> bool {
    EXPIRED.contains(&code) || matches!(code, "InvalidToken" | "AuthorizationHeaderMalformed")
}

/// What a skewed clock comes from is found by comparing the two.
fn clocks(detail: &str, seen: &Seen) -> String {
    let store = seen.date.map_or("another time".to_owned(), |(store, _)| httpdate::fmt_http_date(store));
    let here = httpdate::fmt_http_date(seen.date.map_or_else(SystemTime::now, |(_, here)| here));
    format!("{detail}; the clock of this machine says {here}, the store's {store}")
}

/// The store's own words where it has any. Of the answer only code and message are quoted: other elements
/// repeat keys and signatures.
fn words(error: &object_store::Error, seen: &Seen) -> String {
    match (&seen.code, &seen.message, seen.status) {
        (Some(code), Some(message), _) => format!("{code}: {message}"),
        (Some(code), None, _) => code.clone(),
        (None, _, Some(status @ 400..)) => format!("HTTP status {status}"),
        _ => chain(error),
    }
}

/// A body that ended early or late, as an error.
pub(crate) fn wrong_length(object: &str, expected: u64, found: u64) -> Error {
    Error::Mismatch {
        object: object.to_owned(),
        expected: format!("{expected} bytes"),
        found: format!("{found} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DOING: Doing<'static> = Doing { operation: "write", object: "s3://b/k" };

    fn judge(status: u16, code: &str) -> Failure {
        let error = object_store::Error::Generic { store: "S3", source: "AKIASECRET".into() };
        let (code, message) = (Some(code.to_owned()), Some("words".to_owned()));
        failure(DOING, &error, &Seen { status: Some(status), code, message, ..Seen::default() })
    }

    #[test]
    fn each_refusal_has_its_own_error() {
        let named = |status, code| match judge(status, code) {
            Failure::Final(error) => error.to_string(),
            Failure::Again { .. } | Failure::Corrected(_) => "again".to_owned(),
        };
        assert_eq!(named(404, "NoSuchBucket"), "s3://b/k does not exist: the bucket does not exist");
        assert_eq!(named(404, "NoSuchKey"), "s3://b/k does not exist");
        assert_eq!(named(403, "AccessDenied"), "access to s3://b/k is denied: AccessDenied: words");
        assert_eq!(named(400, "ExpiredToken"), "access to s3://b/k is denied: ExpiredToken: words");
        assert_eq!(named(412, "PreconditionFailed"), "s3://b/k already exists");
        assert_eq!(
            named(400, "BadDigest"),
            "s3://b/k: expected bytes that match their checksum, found BadDigest: words"
        );
        assert_eq!(named(400, "InvalidArgument"), "write s3://b/k: InvalidArgument: words");
    }

    #[test]
    fn what_passes_is_tried_again() {
        for (status, code) in [
            (503, "SlowDown"),
            (500, "InternalError"),
            (400, "RequestTimeout"),
            (429, "Busy"),
            (409, "OperationAborted"),
        ] {
            assert!(matches!(judge(status, code), Failure::Again { .. }), "{status} {code}");
        }
        let error = object_store::Error::Generic { store: "S3", source: "x".into() };
        let seen = Seen { transport: Some("connection reset".into()), ..Seen::default() };
        assert!(matches!(failure(DOING, &error, &seen), Failure::Again { detail, .. } if detail == "connection reset"));
        let seen = Seen { status: Some(503), retry_after: Some(Duration::from_secs(2)), ..Seen::default() };
        assert!(matches!(failure(DOING, &error, &seen), Failure::Again { after: Some(_), .. }));
    }

    #[test]
    fn only_what_the_load_causes_counts_as_a_complaint() {
        let cause = |status, code| match judge(status, code) {
            Failure::Again { cause, .. } => cause,
            other => panic!("{other:?}"),
        };
        for (status, code) in [(503, "SlowDown"), (503, ""), (429, ""), (400, "ThrottlingException")] {
            assert_eq!(cause(status, code), Cause::Throttled, "{status} {code}");
        }
        for (status, code) in [(500, "InternalError"), (502, ""), (504, ""), (400, "RequestTimeout")] {
            assert_eq!(cause(status, code), Cause::Server, "{status} {code}");
        }
        assert_eq!(cause(409, "ConditionalRequestConflict"), Cause::Other);
    }

    #[test]
    fn a_skewed_clock_is_named_with_both_times() {
        let error = object_store::Error::Generic { store: "S3", source: "x".into() };
        let (code, hour) = (Some("RequestTimeTooSkewed".to_owned()), Duration::from_secs(3600));
        let date = Some((SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + hour));
        let Failure::Final(error) = failure(DOING, &error, &Seen { status: Some(403), code, date, ..Seen::default() })
        else {
            panic!("final")
        };
        let told = "RequestTimeTooSkewed; the clock of this machine says Thu, 01 Jan 1970 01:00:00 GMT, \
                    the store's Thu, 01 Jan 1970 00:00:00 GMT";
        assert_eq!(error.to_string(), format!("access to s3://b/k is denied: {told}"));
    }

    #[test]
    fn a_bucket_elsewhere_is_named() {
        let error = object_store::Error::Generic { store: "S3", source: "x".into() };
        let seen = Seen { status: Some(301), bucket_region: Some("eu-west-1".into()), ..Seen::default() };
        let Failure::Final(error) = failure(DOING, &error, &seen) else { panic!("final") };
        assert!(error.to_string().contains("eu-west-1"), "{error}");
    }
}
