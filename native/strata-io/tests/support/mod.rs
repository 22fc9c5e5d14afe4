//! Servers and stores that the tests share.
#![allow(dead_code)] // each test file uses a part

pub mod emulators;
pub mod proxy;
pub mod servers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use strata_io::schedule::ByteBudget;
use strata_io::{IoConfig, ObjectWriter, Part, Result, Store, digest, open};

/// Limits that let a failing test end soon.
pub fn config() -> IoConfig {
    IoConfig {
        budget: ByteBudget::new(256 << 20),
        max_concurrency: 16,
        part_bytes: 5 << 20,
        fsync: false,
        direct_io: false,
        max_tries: 4,
        deadline: Duration::from_secs(60),
    }
}

/// A store at `url` with these options.
pub fn store(url: &str, options: &[(&str, &str)], config: &IoConfig) -> Arc<dyn Store> {
    let options: BTreeMap<String, String> =
        options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    open(url, &options, config).expect("the store opens")
}

/// An S3 store in `bucket` of the server at `endpoint`.
pub fn s3(endpoint: &str, bucket: &str, config: &IoConfig) -> Arc<dyn Store> {
    let keys = [("access_key_id", servers::KEY), ("secret_access_key", servers::SECRET)];
    let options = [("endpoint", endpoint), ("region", "us-east-1"), keys[0], keys[1]];
    store(&format!("s3://{bucket}/run"), &options, config)
}

/// `len` bytes that are not periodic in any power of two, so that misplaced pieces show.
pub fn pattern(len: usize) -> Bytes {
    (0..len as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as u8).collect()
}

/// The parts of `bytes`, each of two pieces, as `store` wants them.
pub fn parts(store: &dyn Store, bytes: &Bytes) -> Vec<Part> {
    let part_bytes = store.part_bytes(bytes.len() as u64) as usize;
    let part = |(index, offset): (usize, usize)| {
        let own = bytes.slice(offset..bytes.len().min(offset + part_bytes));
        let pieces = vec![own.slice(..own.len() / 3), own.slice(own.len() / 3..)];
        Part { index: index as u32, offset: offset as u64, pieces, crc32: digest::crc32(&own) }
    };
    (0..bytes.len()).step_by(part_bytes).enumerate().map(part).collect()
}

/// Writes the parts side by side, the last first.
pub async fn write_all(writer: &dyn ObjectWriter, mut parts: Vec<Part>) -> Result<()> {
    parts.reverse();
    futures::future::try_join_all(parts.into_iter().map(|part| writer.write_part(part))).await.map(|_| ())
}

/// Writes `bytes` under `name` as a large object.
pub async fn write_object(store: &dyn Store, name: &str, bytes: &Bytes) -> Result<()> {
    let writer = store.create(name, bytes.len() as u64).await?;
    write_all(&*writer, parts(store, bytes)).await?;
    writer.finish().await
}
