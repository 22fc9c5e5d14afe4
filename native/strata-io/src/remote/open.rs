//! From a URL to a bucket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as S3Key, AwsCredential, AwsCredentialProvider};
use object_store::azure::{AzureConfigKey as AzureKey, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey as GoogleKey};
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{ClientConfigKey, ClientOptions, RetryConfig, StaticCredentialProvider};

use super::credentials::{SdkChain, profile_settings};
use super::http::{Connector, Signer};
use super::options::{self, CredentialSource, S3Settings};
use super::signing::{Clock, Signing};
use super::unknown::Listing;
use super::{Abilities, Bucket, RemoteStore};
use crate::error::chain;
use crate::schedule::PartLimits;
use crate::{Error, IoConfig, Result};

type Options = BTreeMap<String, String>;

/// Blocks of Azure: <https://learn.microsoft.com/rest/api/storageservices/put-block-list>.
const AZURE_LIMITS: PartLimits = PartLimits { min_bytes: 1, max_bytes: 4000 << 20, max_parts: 50_000 };

/// In memory nothing is too small, so that tests of parts need few bytes.
const MEMORY_LIMITS: PartLimits = PartLimits { min_bytes: 1, max_bytes: 1 << 40, max_parts: 10_000 };

/// Opens a remote store; `scheme` is one of [`crate::SCHEMES`], not `file`.
pub(crate) fn open(url: &str, scheme: &str, rest: &str, options: &Options, config: &IoConfig) -> Result<RemoteStore> {
    let (place, root) = rest.split_once('/').unwrap_or((rest, ""));
    checked(scheme, place, rest)?;
    let bucket = match scheme {
        "s3" | "s3a" => s3(place, options)?,
        "gs" => google(place, options)?,
        "http" | "https" => web(scheme, place, options)?,
        "memory" => memory(place, options)?,
        _ => azure(url, options)?,
    };
    Ok(RemoteStore::new(url, root, bucket, config))
}

/// URLs stand in messages and logs, so none may carry a secret; what is refused here is not repeated.
fn checked(scheme: &str, place: &str, rest: &str) -> Result<()> {
    let problem = if place.is_empty() {
        "names no bucket or host"
    } else if rest.contains('?') || rest.contains('#') {
        "has a query or a fragment"
    } else if place.contains('@') && !scheme.starts_with("abfs") {
        "has credentials in it"
    } else {
        return Ok(());
    };
    Err(Error::Config(format!("a {scheme}:// URL {problem}; settings and credentials are options")))
}

fn s3(bucket: &str, options: &Options) -> Result<Bucket> {
    let env =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut settings = options::s3(options, env)?;
    let region = complete(&mut settings)?;
    let endpoint = endpoint(&settings).cloned();
    if let Some(endpoint) = endpoint.as_deref().filter(|url| !url.contains("://")) {
        return Err(Error::Config(format!(
            "endpoint: expected a URL such as \"https://{endpoint}\", found {endpoint:?}"
        )));
    }
    let mut builder = AmazonS3Builder::new()
        .with_retry(no_retries())
        .with_bucket_name(bucket)
        // Signing the payload hashes every byte once more; the CRC is in the signed headers instead.
        .with_unsigned_payload(true)
        .with_disable_bulk_delete(true);
    for (key, value) in &settings.keys {
        builder = builder.with_config(*key, value);
    }
    let mut connector = Connector { signer: None, proxy: proxied(endpoint.as_deref()), stall: settings.stall };
    let is_on = |key: S3Key| settings.keys.get(&key).is_some_and(|on| on == "true");
    let chain = (settings.source == CredentialSource::Sdk)
        .then(|| Arc::new(SdkChain::new(settings.profile.clone(), region.clone())));
    let credentials = match &chain {
        Some(chain) => chain.clone(),
        None => credentials(&settings, &builder, &connector)?,
    };
    let clock = Clock::default();
    let signer = Signer { credentials: credentials.clone(), region, clock: clock.clone() };
    connector.signer = (!is_on(S3Key::SkipSignature)).then_some(signer);
    // A session of S3 Express signs with other keys than the ones we would sign again with.
    let clock = (connector.signer.is_some() && !is_on(S3Key::S3Express)).then_some(clock);
    let uploads = (!is_on(S3Key::S3Express)).then(|| listing(bucket, &settings, &connector)).transpose()?.map(Arc::new);
    let store = builder.with_credentials(credentials).with_http_connector(connector).build().map_err(unusable)?;
    let identity = format!("s3://{bucket} at {}", endpoint.unwrap_or_default());
    let abilities = Abilities { limits: PartLimits::S3, crc32: settings.crc32, upload_metadata: true };
    Ok(Bucket { signing: Signing { chain, clock }, uploads, ..both(Arc::new(store), identity, abilities) })
}

/// Sends to where the crate's builder sends.
fn listing(bucket: &str, settings: &S3Settings, connector: &Connector) -> Result<Listing> {
    let client_option = |(key, value): (&S3Key, &String)| match key {
        S3Key::Client(key) => Some((*key, value.clone())),
        _ => None,
    };
    let options = settings.keys.iter().filter_map(client_option);
    let options = options.fold(ClientOptions::new(), |options, (key, value)| options.with_config(key, value));
    let virtual_hosted = settings.keys.get(&S3Key::VirtualHostedStyleRequest).is_some_and(|on| on == "true");
    let region = &settings.keys[&S3Key::Region];
    let url = match (endpoint(settings), virtual_hosted) {
        (Some(endpoint), true) => endpoint.clone(),
        (Some(endpoint), false) => format!("{}/{bucket}", endpoint.trim_end_matches('/')),
        (None, true) => format!("https://{bucket}.s3.{region}.amazonaws.com"),
        (None, false) => format!("https://s3.{region}.amazonaws.com/{bucket}"),
    };
    let client = connector.connect(&options).map_err(unusable)?;
    Ok(Listing { client, url, signer: connector.signer.clone() })
}

fn endpoint(settings: &S3Settings) -> Option<&String> {
    settings.keys.get(&S3Key::S3Endpoint).or_else(|| settings.keys.get(&S3Key::Endpoint))
}

/// Fills in what a profile says, decides the region, and allows plain HTTP on this machine.
fn complete(settings: &mut S3Settings) -> Result<String> {
    let has_region = settings.keys.contains_key(&S3Key::Region) || settings.keys.contains_key(&S3Key::DefaultRegion);
    let named = settings.profile.as_deref().map(|name| (name, "the option profile"));
    let named = named.or(settings.env_profile.as_deref().map(|name| (name, "AWS_PROFILE")));
    if named.is_some() || !has_region || endpoint(settings).is_none() {
        let profile = profile_settings(named)?;
        if let Some(region) = profile.region.filter(|_| !has_region) {
            settings.keys.insert(S3Key::Region, region);
        }
        if let Some(url) = profile.endpoint.filter(|_| endpoint(settings).is_none()) {
            settings.keys.insert(S3Key::Endpoint, url);
        }
    }
    let weak = settings.keys.remove(&S3Key::DefaultRegion);
    let region = settings.keys.entry(S3Key::Region).or_insert_with(|| weak.unwrap_or_else(|| "us-east-1".to_owned()));
    let region = region.clone();
    if let Some(url) = endpoint(settings).filter(|url| url.starts_with("http://")) {
        let allowed = settings.keys.get(&S3Key::Client(ClientConfigKey::AllowHttp)).is_some_and(|on| on == "true");
        if !allowed && !is_loopback(url) {
            return Err(Error::Config(format!("the endpoint {url} is not encrypted; allow_http=true permits it")));
        }
        settings.keys.insert(S3Key::Client(ClientConfigKey::AllowHttp), "true".to_owned());
    }
    Ok(region)
}

/// Keys that are given, or those of a source that options name.
fn credentials(
    settings: &S3Settings,
    builder: &AmazonS3Builder,
    connector: &Connector,
) -> Result<AwsCredentialProvider> {
    let key = |key: S3Key| settings.keys.get(&key).cloned();
    if settings.source == CredentialSource::Options {
        let store = builder.clone().with_http_connector(connector.clone()).build().map_err(unusable)?;
        return Ok(store.credentials().clone());
    }
    let missing = || Error::Config("access_key_id is given without secret_access_key".to_owned());
    Ok(Arc::new(StaticCredentialProvider::new(AwsCredential {
        key_id: key(S3Key::AccessKeyId).ok_or_else(missing)?,
        secret_key: key(S3Key::SecretAccessKey).ok_or_else(missing)?,
        token: key(S3Key::Token),
    })))
}

fn google(bucket: &str, options: &Options) -> Result<Bucket> {
    let (keys, stall) = options::google(options)?;
    let mut builder = GoogleCloudStorageBuilder::from_env().with_retry(no_retries()).with_bucket_name(bucket);
    for (key, value) in keys {
        builder = builder.with_config(key, value);
    }
    let endpoint = builder.get_config_value(&GoogleKey::BaseUrl);
    let connector = Connector { signer: None, proxy: proxied(endpoint.as_deref()), stall };
    let store = builder.with_http_connector(connector).build().map_err(unusable)?;
    let identity = format!("gs://{bucket} at {}", endpoint.unwrap_or_default());
    Ok(both(Arc::new(store), identity, Abilities { limits: PartLimits::S3, crc32: false, upload_metadata: true }))
}

fn azure(url: &str, options: &Options) -> Result<Bucket> {
    let (keys, stall) = options::azure(options)?;
    let mut builder = MicrosoftAzureBuilder::from_env().with_retry(no_retries()).with_url(url);
    for (key, value) in keys {
        builder = builder.with_config(key, value);
    }
    let emulator = builder.get_config_value(&AzureKey::UseEmulator).as_deref() == Some("true");
    let endpoint = builder.get_config_value(&AzureKey::Endpoint);
    let connector = Connector { signer: None, proxy: !emulator && proxied(endpoint.as_deref()), stall };
    let store = builder.with_http_connector(connector).build().map_err(unusable)?;
    let identity = format!("{store} at {}", endpoint.unwrap_or_default());
    // Its blocks have no id to abort by, and expire after a week.
    Ok(both(Arc::new(store), identity, Abilities { limits: AZURE_LIMITS, crc32: false, upload_metadata: false }))
}

fn web(scheme: &str, host: &str, options: &Options) -> Result<Bucket> {
    let (keys, stall) = options::web(options)?;
    let url = format!("{scheme}://{host}");
    let connector = Connector { signer: None, proxy: proxied(Some(&url)), stall };
    let mut builder = HttpBuilder::new().with_retry(no_retries()).with_url(&url);
    // The scheme in the URL is the permission.
    builder = builder.with_config(ClientConfigKey::AllowHttp, (scheme == "http").to_string());
    for (key, value) in keys {
        builder = builder.with_config(key, value);
    }
    let store = builder.with_http_connector(connector).build().map_err(unusable)?;
    let abilities = Abilities { limits: PartLimits::S3, crc32: false, upload_metadata: false };
    Ok(Bucket {
        objects: Arc::new(store),
        parts: None,
        identity: url,
        abilities,
        signing: Signing::default(),
        uploads: None,
    })
}

fn memory(name: &str, options: &Options) -> Result<Bucket> {
    if let Some(option) = options.keys().next() {
        return Err(Error::Config(format!("no option {option:?} for memory:// stores; there are none")));
    }
    let store = crate::memory::named(name);
    let abilities = Abilities { limits: MEMORY_LIMITS, crc32: false, upload_metadata: true };
    let parts: Arc<dyn MultipartStore> = Arc::new(crate::memory::Uploads(store.clone()));
    Ok(Bucket { parts: Some(parts), ..both(store, format!("memory://{name}"), abilities) })
}

fn both<S>(store: Arc<S>, identity: String, abilities: Abilities) -> Bucket
where
    S: object_store::ObjectStore + MultipartStore,
{
    Bucket {
        objects: store.clone(),
        parts: Some(store),
        identity,
        abilities,
        signing: Signing::default(),
        uploads: None,
    }
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
}

/// Whether a proxy from the environment may stand before `endpoint`.
fn proxied(endpoint: Option<&str>) -> bool {
    endpoint.is_none_or(|url| !is_loopback(url))
}

fn is_loopback(endpoint: &str) -> bool {
    match url::Url::parse(endpoint).ok().and_then(|url| url.host().map(|host| host.to_owned())) {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    }
}

fn unusable(error: object_store::Error) -> Error {
    Error::Config(chain(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_on_this_machine_see_no_proxy() {
        for local in ["http://127.0.0.1:9000", "http://localhost:1/x", "http://[::1]:5", "http://b.localhost:80"] {
            assert!(!proxied(Some(local)), "{local}");
        }
        assert!(proxied(Some("http://127.example.com")) && proxied(None));
    }

    #[test]
    fn a_url_with_a_secret_is_refused_and_not_repeated() {
        for (scheme, rest) in [("http", "user:secret@host/x"), ("https", "host/x?token=secret"), ("s3", "")] {
            let (place, _) = rest.split_once('/').unwrap_or((rest, ""));
            let error = checked(scheme, place, rest).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
