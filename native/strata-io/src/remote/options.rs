//! What options and environment say about a store, checked and merged. Pure: the environment is handed in.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use object_store::ClientConfigKey;
use object_store::aws::AmazonS3ConfigKey as S3Key;
use object_store::azure::AzureConfigKey as AzureKey;
use object_store::gcp::GoogleConfigKey as GoogleKey;

use super::client::{HONOURED, duration};
use crate::{Error, Result};

/// Time without a byte moved after which a transfer is given up; the option `read_timeout` changes it.
const STALL: Duration = Duration::from_secs(30);

const S3_OPTIONS: &str = "access_key_id, secret_access_key, session_token, profile, region, endpoint, \
    virtual_hosted_style_request, skip_signature, unsigned_payload, checksum_algorithm (crc32, none, crc64nvme, \
    sha256), conditional_put, request_payer, s3_express, server_side_encryption, sse_kms_key_id, \
    sse_bucket_key_enabled, sse_customer_key_base64, web_identity_token_file, role_arn, role_session_name, \
    endpoint_url_sts, metadata_endpoint, imdsv1_fallback, container_credentials_relative_uri, \
    container_credentials_full_uri, container_authorization_token_file";
const GOOGLE_OPTIONS: &str = "service_account, service_account_key, application_credentials, bearer_token, base_url, \
    skip_signature";
const AZURE_OPTIONS: &str = "account_name, account_key, sas_key, bearer_token, client_id, client_secret, tenant_id, \
    authority_host, federated_token_file, msi_endpoint, object_id, msi_resource_id, use_azure_cli, use_emulator, \
    endpoint, skip_signature, encryption_key";
const CLIENT_OPTIONS: &str = "allow_http, allow_invalid_certificates, connect_timeout, read_timeout, \
    pool_idle_timeout, pool_max_idle_per_host, proxy_url, proxy_excludes, proxy_ca_certificate, user_agent";

/// Options that are either on or off, without the prefix of their scheme.
const FLAGS: [&str; 12] = [
    "allow_http",
    "allow_invalid_certificates",
    "virtual_hosted_style_request",
    "skip_signature",
    "unsigned_payload",
    "request_payer",
    "s3_express",
    "sse_bucket_key_enabled",
    "disable_tagging",
    "imdsv1_fallback",
    "use_emulator",
    "use_azure_cli",
];

/// Settings of an S3 store. Not `Debug`: secrets are among them.
pub(super) struct S3Settings {
    /// For the crate's builder.
    pub(super) keys: HashMap<S3Key, String>,
    /// Profile that the caller named.
    pub(super) profile: Option<String>,
    /// Profile that `AWS_PROFILE` names.
    pub(super) env_profile: Option<String>,
    /// Whether our own CRC is sent with the bytes.
    pub(super) crc32: bool,
    /// Where credentials come from.
    pub(super) source: CredentialSource,
    /// See [`STALL`].
    pub(super) stall: Duration,
}

/// Where AWS credentials come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CredentialSource {
    /// The keys themselves are given, so that nobody is asked.
    Keys,
    /// Options name a role or a metadata service, which the crate's builder understands.
    Options,
    /// Profile, web identity, container, instance: whatever the SDK finds.
    Sdk,
}

/// Keys that are credentials; those of the environment yield together to any that the caller gives.
const KEYS: [S3Key; 3] = [S3Key::AccessKeyId, S3Key::SecretAccessKey, S3Key::Token];

/// Merges options over the environment.
///
/// # Errors
/// [`Error::Config`] if an option is unknown, or a value is unusable.
pub(super) fn s3(
    options: &BTreeMap<String, String>,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<S3Settings> {
    let mut given: HashMap<S3Key, String> = HashMap::new();
    let mut profile = None;
    for (name, value) in options {
        match name.as_str() {
            "profile" | "aws_profile" => profile = Some(value.clone()),
            name => {
                let key = name.parse().ok().filter(|key| !matches!(key, S3Key::Client(key) if !HONOURED.contains(key)));
                given.insert(key.ok_or_else(|| unknown("s3", name, S3_OPTIONS))?, checked(name, value)?);
            }
        }
    }
    let (mut keys, mut env_profile): (HashMap<S3Key, String>, _) = (HashMap::new(), None);
    for (name, value) in env {
        if name == "AWS_PROFILE" && !value.is_empty() {
            env_profile = Some(value.clone());
        }
        let key = name.starts_with("AWS_").then(|| name.to_ascii_lowercase().parse().ok()).flatten();
        if let Some(key) = key.filter(|key| !matches!(key, S3Key::Client(key) if !HONOURED.contains(key))) {
            keys.insert(key, checked(&name, &value)?);
        }
    }
    if profile.is_some() || KEYS.iter().any(|key| given.contains_key(key)) {
        keys.retain(|key, _| !KEYS.contains(key));
    }
    if given.contains_key(&S3Key::Endpoint) {
        // The builder would prefer it, and an argument beats the environment.
        keys.remove(&S3Key::S3Endpoint);
    }
    let source = source(&given, &keys);
    keys.extend(given);
    let crc32 = own_crc(&mut keys);
    let stall = stall(keys.remove(&S3Key::Client(ClientConfigKey::ReadTimeout)).as_deref())?;
    Ok(S3Settings { keys, profile, env_profile, crc32, source, stall })
}

fn source(given: &HashMap<S3Key, String>, env: &HashMap<S3Key, String>) -> CredentialSource {
    let roles = [
        S3Key::WebIdentityTokenFile,
        S3Key::MetadataEndpoint,
        S3Key::ImdsV1Fallback,
        S3Key::ContainerCredentialsRelativeUri,
        S3Key::ContainerCredentialsFullUri,
    ];
    if given.contains_key(&S3Key::AccessKeyId) || env.contains_key(&S3Key::AccessKeyId) {
        CredentialSource::Keys
    } else if roles.iter().any(|key| given.contains_key(key)) {
        CredentialSource::Options
    } else {
        CredentialSource::Sdk
    }
}

/// Takes our own values of `checksum_algorithm` out; the crate knows the others, and computes them at send.
fn own_crc(keys: &mut HashMap<S3Key, String>) -> bool {
    // A session of S3 Express signs with other keys than the ones we would sign again with.
    let express = keys.get(&S3Key::S3Express).is_some_and(|on| on == "true");
    match keys.get(&S3Key::Checksum).map(|name| name.to_ascii_lowercase()).as_deref() {
        Some("crc32") => {
            keys.remove(&S3Key::Checksum);
            !express
        }
        Some("none") => {
            keys.remove(&S3Key::Checksum);
            false
        }
        Some(_) => false,
        None => !express,
    }
}

/// Options of a Google store.
pub(super) fn google(options: &BTreeMap<String, String>) -> Result<(Vec<(GoogleKey, String)>, Duration)> {
    let client = |key: &GoogleKey| {
        if let GoogleKey::Client(key) = key { Some(*key) } else { None }
    };
    let mut keys = parsed("gs", options, GOOGLE_OPTIONS, client)?;
    let stall = take_stall(&mut keys, client)?;
    Ok((keys, stall))
}

/// Options of an Azure store.
pub(super) fn azure(options: &BTreeMap<String, String>) -> Result<(Vec<(AzureKey, String)>, Duration)> {
    let client = |key: &AzureKey| {
        if let AzureKey::Client(key) = key { Some(*key) } else { None }
    };
    let mut keys = parsed("az", options, AZURE_OPTIONS, client)?;
    let stall = take_stall(&mut keys, client)?;
    Ok((keys, stall))
}

/// Options of a web server.
pub(super) fn web(options: &BTreeMap<String, String>) -> Result<(Vec<(ClientConfigKey, String)>, Duration)> {
    let client = |key: &ClientConfigKey| Some(*key);
    let mut keys = parsed("http", options, "none of its own", client)?;
    let stall = take_stall(&mut keys, client)?;
    Ok((keys, stall))
}

fn parsed<K: std::str::FromStr>(
    scheme: &str,
    options: &BTreeMap<String, String>,
    known: &str,
    client: impl Fn(&K) -> Option<ClientConfigKey>,
) -> Result<Vec<(K, String)>> {
    let parse = |(name, value): (&String, &String)| match name.parse::<K>() {
        Ok(key) if client(&key).is_none_or(|key| HONOURED.contains(&key)) => Ok((key, checked(name, value)?)),
        _ => Err(unknown(scheme, name, known)),
    };
    options.iter().map(parse).collect()
}

fn take_stall<K>(keys: &mut Vec<(K, String)>, client: impl Fn(&K) -> Option<ClientConfigKey>) -> Result<Duration> {
    let found = keys.iter().position(|(key, _)| client(key) == Some(ClientConfigKey::ReadTimeout));
    stall(found.map(|index| keys.remove(index).1).as_deref())
}

fn stall(text: Option<&str>) -> Result<Duration> {
    text.map_or(Ok(STALL), duration)
}

/// The value of an option or variable; that of a flag as `true` or `false`.
fn checked(name: &str, value: &str) -> Result<String> {
    let lower = name.to_ascii_lowercase();
    let own = ["aws_", "google_", "azure_storage_", "azure_"].iter().find_map(|prefix| lower.strip_prefix(prefix));
    if !FLAGS.contains(&own.unwrap_or(&lower)) {
        return Ok(value.to_owned());
    }
    match value.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "y" | "on" => Ok("true".to_owned()),
        "false" | "0" | "no" | "n" | "off" => Ok("false".to_owned()),
        _ => Err(Error::Config(format!("{name}: expected true or false, found {value:?}"))),
    }
}

fn unknown(scheme: &str, name: &str, known: &str) -> Error {
    Error::Config(format!("no option {name:?} for {scheme}:// stores; there are: {known}; and {CLIENT_OPTIONS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn an_unknown_option_is_refused_with_the_known_ones() {
        let error = s3(&pairs(&[("regoin", "x")]), []).err().unwrap().to_string();
        assert!(error.contains("\"regoin\"") && error.contains("region") && error.contains("allow_http"), "{error}");
        assert!(matches!(s3(&pairs(&[("http2_only", "true")]), []), Err(Error::Config(_))), "not honoured");
        assert!(matches!(google(&pairs(&[("region", "x")])), Err(Error::Config(_))));
        assert!(matches!(azure(&pairs(&[("region", "x")])), Err(Error::Config(_))));
        assert!(matches!(web(&pairs(&[("region", "x")])), Err(Error::Config(_))));
    }

    #[test]
    fn an_option_beats_the_environment() {
        let env = pairs(&[("AWS_REGION", "env"), ("AWS_ENDPOINT_URL_S3", "http://env"), ("AWS_ALLOW_HTTP", "true")]);
        let settings = s3(&pairs(&[("region", "option"), ("endpoint", "http://option")]), env).unwrap();
        assert_eq!(settings.keys[&S3Key::Region], "option");
        assert_eq!(settings.keys[&S3Key::Endpoint], "http://option");
        assert!(!settings.keys.contains_key(&S3Key::S3Endpoint));
        assert_eq!(settings.keys[&S3Key::Client(ClientConfigKey::AllowHttp)], "true");
    }

    #[test]
    fn given_keys_are_not_mixed_with_those_of_the_environment() {
        let env = || pairs(&[("AWS_ACCESS_KEY_ID", "e"), ("AWS_SECRET_ACCESS_KEY", "e"), ("AWS_SESSION_TOKEN", "e")]);
        let given = s3(&pairs(&[("access_key_id", "o"), ("secret_access_key", "o")]), env()).unwrap();
        assert_eq!(given.source, CredentialSource::Keys);
        assert!(!given.keys.contains_key(&S3Key::Token));
        let profile = s3(&pairs(&[("profile", "team")]), env()).unwrap();
        assert_eq!((profile.source, profile.profile.as_deref()), (CredentialSource::Sdk, Some("team")));
        assert_eq!(s3(&pairs(&[]), env()).unwrap().source, CredentialSource::Keys);
        assert_eq!(s3(&pairs(&[]), []).unwrap().source, CredentialSource::Sdk);
    }

    #[test]
    fn our_own_checksum_is_the_default_and_can_be_turned_off() {
        let crc32 = |value: &[(&str, &str)]| s3(&pairs(value), []).unwrap().crc32;
        assert!(crc32(&[]));
        assert!(crc32(&[("checksum_algorithm", "CRC32")]));
        assert!(!crc32(&[("checksum_algorithm", "none")]));
        assert!(!crc32(&[("checksum_algorithm", "sha256")]));
        assert!(!crc32(&[("s3_express", "true")]));
    }

    #[test]
    fn a_flag_is_true_or_false_by_any_of_their_names() {
        for (value, expected) in [("true", "true"), ("YES", "true"), ("1", "true"), ("off", "false"), ("0", "false")] {
            let settings = s3(&pairs(&[("allow_http", value), ("aws_skip_signature", value)]), []).unwrap();
            assert_eq!(settings.keys[&S3Key::Client(ClientConfigKey::AllowHttp)], expected);
            assert_eq!(settings.keys[&S3Key::SkipSignature], expected);
        }
        let told = |result: Result<S3Settings>| result.err().unwrap().to_string();
        let maybe = [("allow_http", "maybe")];
        assert_eq!(told(s3(&pairs(&maybe), [])), "allow_http: expected true or false, found \"maybe\"");
        let variable = told(s3(&pairs(&[]), pairs(&[("AWS_S3_EXPRESS", "maybe")])));
        assert_eq!(variable, "AWS_S3_EXPRESS: expected true or false, found \"maybe\"");
        let others = [
            google(&pairs(&maybe)).is_err(),
            azure(&pairs(&[("use_emulator", "maybe")])).is_err(),
            web(&pairs(&maybe)).is_err(),
        ];
        assert_eq!(others, [true; 3]);
    }

    #[test]
    fn the_read_timeout_is_our_stall() {
        assert_eq!(s3(&pairs(&[("read_timeout", "2s")]), []).unwrap().stall, Duration::from_secs(2));
        assert_eq!(web(&pairs(&[("read_timeout", "2s")])).unwrap().1, Duration::from_secs(2));
        assert_eq!(web(&pairs(&[])).unwrap().1, STALL);
    }
}
