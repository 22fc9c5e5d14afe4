//! One `reqwest` client from the options of a store.

use std::sync::Once;
use std::time::Duration;

use object_store::{ClientConfigKey, ClientOptions};

use crate::{Error, Result};

/// The client options that are honoured here; every other one is refused when a store is opened.
pub(crate) const HONOURED: [ClientConfigKey; 10] = [
    ClientConfigKey::AllowHttp,
    ClientConfigKey::AllowInvalidCertificates,
    ClientConfigKey::ConnectTimeout,
    ClientConfigKey::PoolIdleTimeout,
    ClientConfigKey::PoolMaxIdlePerHost,
    ClientConfigKey::ProxyUrl,
    ClientConfigKey::ProxyExcludes,
    ClientConfigKey::ProxyCaCertificate,
    ClientConfigKey::ReadTimeout,
    ClientConfigKey::UserAgent,
];

/// Builds a client. HTTP/1.1 only: the stores gain nothing from HTTP/2, and it is slower for large bodies.
pub(crate) fn build(options: &ClientOptions, proxy: bool) -> object_store::Result<reqwest::Client> {
    use_ring();
    let text = |key: ClientConfigKey| options.get_config_value(&key);
    let on = |key: ClientConfigKey| text(key).as_deref() == Some("true");
    let mut builder = reqwest::Client::builder()
        .http1_only()
        .https_only(!on(ClientConfigKey::AllowHttp))
        .danger_accept_invalid_certs(on(ClientConfigKey::AllowInvalidCertificates))
        .redirect(reqwest::redirect::Policy::limited(5))
        .user_agent(text(ClientConfigKey::UserAgent).unwrap_or_else(|| "torch-strata".to_owned()));
    if let Some(time) = text(ClientConfigKey::ConnectTimeout) {
        builder = builder.connect_timeout(duration(&time).map_err(unusable)?);
    }
    if let Some(time) = text(ClientConfigKey::PoolIdleTimeout) {
        builder = builder.pool_idle_timeout(duration(&time).map_err(unusable)?);
    }
    if let Some(num) = text(ClientConfigKey::PoolMaxIdlePerHost) {
        builder = builder.pool_max_idle_per_host(num.parse().map_err(unusable)?);
    }
    if !proxy {
        return builder.no_proxy().build().map_err(unusable);
    }
    if let Some(url) = text(ClientConfigKey::ProxyUrl) {
        let excludes = text(ClientConfigKey::ProxyExcludes).and_then(|names| reqwest::NoProxy::from_string(&names));
        builder = builder.proxy(reqwest::Proxy::all(url).map_err(unusable)?.no_proxy(excludes));
    }
    if let Some(pem) = text(ClientConfigKey::ProxyCaCertificate) {
        builder = builder.add_root_certificate(reqwest::Certificate::from_pem(pem.as_bytes()).map_err(unusable)?);
    }
    builder.build().map_err(unusable)
}

/// `30s`, `500ms`, `2m`, or seconds without a unit.
///
/// # Errors
/// [`Error::Config`] if `text` is none of these.
pub(crate) fn duration(text: &str) -> Result<Duration> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_s = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" | "sec" | "seconds" => 1.0,
        "m" | "min" | "minutes" => 60.0,
        _ => f64::NAN,
    };
    let seconds = digits.trim().parse::<f64>().unwrap_or(f64::NAN) * unit_s;
    Duration::try_from_secs_f64(seconds).map_err(|_| Error::Config(format!("{text:?} is not a duration like \"30s\"")))
}

/// TLS by ring, unless the process has already chosen: one library, and no C++ build.
pub(crate) fn use_ring() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An error only says that a choice was made before ours.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

fn unusable(error: impl std::error::Error + Send + Sync + 'static) -> object_store::Error {
    object_store::Error::Generic { store: "HTTP", source: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_nonsense_is_refused() {
        assert_eq!(duration("30s").unwrap(), Duration::from_secs(30));
        assert_eq!(duration("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(duration("2m").unwrap(), Duration::from_secs(120));
        assert_eq!(duration("5 seconds").unwrap(), Duration::from_secs(5));
        for nonsense in ["", "s", "-1s", "30 parsecs"] {
            assert!(matches!(duration(nonsense), Err(Error::Config(_))), "{nonsense}");
        }
    }
}
