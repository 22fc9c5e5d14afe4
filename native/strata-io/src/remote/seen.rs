//! What was seen of an answer: by the one who sends, for those who judge it. Judges nothing.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};

/// What was seen of an answer that failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// HTTP status, when an answer came at all.
    pub(crate) status: Option<u16>,
    /// The store's error code, such as `SlowDown`.
    pub(crate) code: Option<String>,
    /// The store's own words.
    pub(crate) message: Option<String>,
    /// The wait the store asked for.
    pub(crate) retry_after: Option<Duration>,
    /// Size of the whole object, from `Content-Range`.
    pub(crate) object_bytes: Option<u64>,
    /// Region in which the bucket is, when it is another one.
    pub(crate) bucket_region: Option<String>,
    /// How the connection failed: no answer, or a body that broke off.
    pub(crate) transport: Option<String>,
    /// Whether it failed because too few bytes moved.
    pub(crate) stalled: bool,
    /// When the answer was sent, by the clocks of the store and of this machine.
    pub(crate) date: Option<(SystemTime, SystemTime)>,
}

impl Seen {
    /// What the head of an answer says.
    pub(crate) fn of_head(status: StatusCode, headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let date = text("date").and_then(|date| httpdate::parse_http_date(date).ok());
        Self {
            status: Some(status.as_u16()),
            // The other form, a date, is not sent by stores.
            retry_after: text("retry-after").and_then(|s| s.trim().parse().ok()).map(Duration::from_secs),
            object_bytes: text("content-range").and_then(|range| range.rsplit_once('/')?.1.parse().ok()),
            bucket_region: text("x-amz-bucket-region").map(str::to_owned),
            // Azure repeats the code in a header, the only place when a HEAD fails.
            code: text("x-ms-error-code").map(str::to_owned),
            date: date.map(|date| (date, SystemTime::now())),
            ..Self::default()
        }
    }
}

/// Text of the first `<name>` in an XML document; stores send these without attributes.
pub(crate) fn element(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn code_and_message_are_found_in_an_error_document() {
        let xml = "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>";
        assert_eq!(element(xml, "Code").as_deref(), Some("SlowDown"));
        assert_eq!(element(xml, "Message").as_deref(), Some("Reduce your rate."));
        assert_eq!(element(xml, "Region"), None);
    }

    #[test]
    fn what_the_head_says_is_noted() {
        let mut headers = HeaderMap::new();
        headers.insert("retry-after", HeaderValue::from_static("3"));
        headers.insert("content-range", HeaderValue::from_static("bytes */512"));
        let expected = Seen {
            status: Some(503),
            retry_after: Some(Duration::from_secs(3)),
            object_bytes: Some(512),
            ..Seen::default()
        };
        assert_eq!(Seen::of_head(StatusCode::SERVICE_UNAVAILABLE, &headers), expected);
    }
}
