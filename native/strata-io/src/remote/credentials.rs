//! AWS credentials from wherever the SDKs find them: profiles, credential processes, web identity, container, instance.
//!
//! `object_store` reads no profiles, so the SDK's own chain stands behind its interface. Keys are kept until
//! shortly before they expire: a request signed with the last second of a key would be refused.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::provider::ProvideCredentials;
use aws_runtime::env_config::file::EnvConfigFiles;
use aws_smithy_http_client::tls;
use aws_types::os_shim_internal::{Env, Fs};
use aws_types::region::Region;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use tokio::sync::Mutex;

use crate::error::chain;
use crate::{Error, Result};

/// Keys are renewed this long before they expire, as the SDKs do at the latest.
const RENEW_BEFORE: Duration = Duration::from_secs(5 * 60);

/// The SDK's chain of credential sources.
#[derive(Debug)]
pub(crate) struct SdkChain {
    profile: Option<String>,
    region: String,
    found: Mutex<Found>,
    /// How often keys that a store refused were replaced.
    generation: AtomicU64,
}

#[derive(Debug, Default)]
struct Found {
    sources: Option<DefaultCredentialsChain>,
    kept: Option<Kept>,
}

#[derive(Debug, Clone)]
struct Kept {
    keys: Arc<AwsCredential>,
    expires_at: Option<SystemTime>,
}

impl SdkChain {
    /// A chain that asks nobody before the first request. `profile` beats `AWS_PROFILE`.
    pub(crate) fn new(profile: Option<String>, region: String) -> Self {
        Self { profile, region, found: Mutex::default(), generation: AtomicU64::new(0) }
    }

    /// Which keys are in use, for [`SdkChain::renewed_after`].
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// A store has refused keys of this generation as expired, whatever they said themselves: whether there are others.
    pub(crate) async fn renewed_after(&self, generation: u64) -> bool {
        // Held while renewing, so that of many refused requests one asks.
        let mut found = self.found.lock().await;
        if self.generation() != generation {
            return true;
        }
        // The sources remember the files they have read.
        found.sources = None;
        let renewed = match self.ask(&mut found.sources).await {
            Ok(renewed) => renewed,
            Err(error) => {
                tracing::warn!(error = chain(&error), "expired AWS credentials could not be renewed");
                return false;
            }
        };
        let is_new = found.kept.as_ref().is_none_or(|kept| kept.keys != renewed.keys);
        found.kept = Some(renewed);
        self.generation.fetch_add(u64::from(is_new), Ordering::Relaxed);
        is_new
    }

    async fn sources(&self) -> DefaultCredentialsChain {
        let http = aws_smithy_http_client::Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let region = Region::new(self.region.clone());
        let config = ProviderConfig::without_region().with_region(Some(region.clone())).with_http_client(http);
        let mut builder = DefaultCredentialsChain::builder().configure(config).region(region);
        if let Some(profile) = &self.profile {
            builder = builder.profile_name(profile);
        }
        builder.build().await
    }

    async fn ask(&self, sources: &mut Option<DefaultCredentialsChain>) -> object_store::Result<Kept> {
        let sources = match sources {
            Some(sources) => sources,
            None => sources.insert(self.sources().await),
        };
        let found = sources.provide_credentials().await.map_err(|error| object_store::Error::Unauthenticated {
            path: "credentials".to_owned(),
            source: format!("no usable AWS credentials: {}", chain(&error)).into(),
        })?;
        let keys = AwsCredential {
            key_id: found.access_key_id().to_owned(),
            secret_key: found.secret_access_key().to_owned(),
            token: found.session_token().map(str::to_owned),
        };
        Ok(Kept { keys: Arc::new(keys), expires_at: found.expiry() })
    }
}

#[async_trait]
impl CredentialProvider for SdkChain {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        // Held while renewing, so that of many waiting requests one asks.
        let mut found = self.found.lock().await;
        let Found { sources, kept } = &mut *found;
        if let Some(kept) = kept.as_ref().filter(|kept| is_valid_for(kept.expires_at, RENEW_BEFORE)) {
            return Ok(kept.keys.clone());
        }
        match (self.ask(sources).await, kept.as_ref()) {
            (Ok(renewed), _) => Ok(kept.insert(renewed).keys.clone()),
            (Err(error), Some(old)) if is_valid_for(old.expires_at, Duration::ZERO) => {
                tracing::warn!(error = chain(&error), "AWS credentials could not be renewed; the old ones still hold");
                Ok(old.keys.clone())
            }
            (Err(error), _) => Err(error),
        }
    }
}

fn is_valid_for(expires_at: Option<SystemTime>, time: Duration) -> bool {
    expires_at.is_none_or(|expires_at| expires_at > SystemTime::now() + time)
}

/// Region and endpoint that a profile names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ProfileSettings {
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
}

/// Reads the profile files; `named` is a profile and who names it. Without one a file that is missing says nothing,
/// and one that cannot be read is logged, because keys may come from elsewhere.
///
/// # Errors
/// [`Error::Config`] if the profile that is named is not there, as boto3 refuses it, whatever other keys there are.
pub(crate) fn profile_settings(named: Option<(&str, &str)>) -> Result<ProfileSettings> {
    let profile = named.map(|(name, _)| Cow::Owned(name.to_owned()));
    let (fs, env, files) = (Fs::real(), Env::real(), EnvConfigFiles::default());
    // Blocks for the reading of two small files: the SDK's shim does not really wait.
    match futures::executor::block_on(aws_config::profile::load(&fs, &env, &files, profile)) {
        Ok(settings) => match named {
            Some((name, by)) if settings.get_profile(name).is_none() => Err(no_profile(name, by, "")),
            _ => Ok(ProfileSettings {
                region: settings.get("region").map(str::to_owned),
                endpoint: settings.get("endpoint_url").map(str::to_owned),
            }),
        },
        Err(error) => match named {
            Some((name, by)) => Err(no_profile(name, by, &format!(": {}", chain(&error)))),
            None => {
                tracing::warn!(error = chain(&error), "the AWS profile files cannot be read");
                Ok(ProfileSettings::default())
            }
        },
    }
}

fn no_profile(name: &str, by: &str, why: &str) -> Error {
    let file = |variable: &str, usual: &str| std::env::var(variable).unwrap_or_else(|_| usual.to_owned());
    let config = file("AWS_CONFIG_FILE", "~/.aws/config");
    let keys = file("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials");
    Error::Config(format!("no AWS profile {name:?}, which {by} names, in {config} or {keys}{why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_about_to_expire_are_not_valid() {
        let in_a_minute = Some(SystemTime::now() + Duration::from_secs(60));
        assert!(!is_valid_for(in_a_minute, RENEW_BEFORE));
        assert!(is_valid_for(in_a_minute, Duration::ZERO));
        assert!(is_valid_for(None, RENEW_BEFORE));
    }
}
