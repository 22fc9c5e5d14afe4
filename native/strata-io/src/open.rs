//! From a URL and options to a [`Store`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::local::LocalStore;
use crate::schedule::ByteBudget;
use crate::{Error, Result, Store, remote};

/// Limits of one store. The caller owns the defaults.
#[derive(Debug, Clone)]
pub struct IoConfig {
    /// Memory that buffers of ours and bytes in flight may take.
    pub budget: ByteBudget,
    /// Requests, or local reads and writes, at a time.
    pub max_concurrency: usize,
    /// Size of a part of a large object, in bytes; raised where an object would need too many.
    pub part_bytes: u64,
    /// Whether writes end with fsync (of file and directory) on local disks.
    pub fsync: bool,
    /// Whether large local transfers bypass the page cache where alignment allows.
    pub direct_io: bool,
    /// Tries of one request, the first included.
    pub max_tries: u32,
    /// Time for one operation with all its tries.
    pub deadline: Duration,
}

/// Schemes of the URLs that [`open`] takes.
pub const SCHEMES: [&str; 11] = ["file", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "http", "https", "memory"];

/// Opens the store that `url` names.
///
/// A local path or `file://`; `s3://bucket/prefix`; `gs://`; `az://`, `abfs://` and `abfss://`; `http://` and
/// `https://`, read-only; `memory://name`, one map for each name in this process. [`SCHEMES`] has them all.
///
/// `options` are the store's own settings, named as the `object_store` crate names them in lower case
/// (`endpoint`, `region`, `allow_http`, …). What they leave open is read from the environment, now: for S3 the
/// variables of the AWS SDKs, `AWS_PROFILE` and its files included. Keys beat profiles, options beat the
/// environment. No request is made here. The tests have no server for `gs://` and `az://`.
///
/// # Errors
/// [`Error::Config`] if the scheme or an option is unknown, or a value is unusable.
pub fn open(url: &str, options: &BTreeMap<String, String>, config: &IoConfig) -> Result<Arc<dyn Store>> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("file", url));
    if url.starts_with("file://") && !rest.starts_with('/') {
        return Err(Error::Config(format!(
            "{url:?}: after file:// comes a host, here {:?}; expected file:/// and an absolute path, or a path alone",
            rest.split('/').next().unwrap_or_default()
        )));
    }
    if scheme == "file" {
        return match options.keys().next() {
            None => Ok(Arc::new(LocalStore::new(url, rest, config.clone()))),
            Some(option) => Err(Error::Config(format!("no option {option:?} for local stores; there are none"))),
        };
    }
    if !SCHEMES.contains(&scheme) {
        return Err(Error::Config(format!(
            "no store for the scheme {scheme:?} of {url:?}; known: {}",
            SCHEMES.join(", ")
        )));
    }
    Ok(Arc::new(remote::open::open(url, scheme, rest, options, config)?))
}
