//! Stores in this process's memory, for tests: `memory://name/prefix`, shared by name.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use async_trait::async_trait;
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, PutMultipartOptions, PutPayload, PutResult, Result};

static BY_NAME: LazyLock<Mutex<HashMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);

/// The store called `name`, made when first asked for; it lives as long as the process.
pub(crate) fn named(name: &str) -> Arc<InMemory> {
    let mut stores = BY_NAME.lock().expect("no panic while held");
    stores.entry(name.to_owned()).or_default().clone()
}

/// Its uploads. To abort one that is gone is no error, as it is none elsewhere: the crate's own words for that are those of
/// any failure.
#[derive(Debug)]
pub(crate) struct Uploads(pub(crate) Arc<InMemory>);

#[async_trait]
impl MultipartStore for Uploads {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.0.create_multipart(path).await
    }

    async fn create_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<MultipartId> {
        self.0.create_multipart_opts(path, options).await
    }

    async fn put_part(&self, path: &Path, id: &MultipartId, index: usize, data: PutPayload) -> Result<PartId> {
        self.0.put_part(path, id, index, data).await
    }

    async fn complete_multipart(&self, path: &Path, id: &MultipartId, parts: Vec<PartId>) -> Result<PutResult> {
        self.0.complete_multipart(path, id, parts).await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        // Nothing else can fail in memory.
        let _ = self.0.abort_multipart(path, id).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_upload_that_is_gone_is_aborted_again_without_an_error() {
        let (uploads, path) = (Uploads(named("aborted-twice")), Path::from("a"));
        let id = uploads.create_multipart(&path).await.unwrap();
        for _ in 0..2 {
            uploads.abort_multipart(&path, &id).await.unwrap();
        }
    }

    #[test]
    fn one_name_is_one_store() {
        assert!(Arc::ptr_eq(&named("one-name"), &named("one-name")));
        assert!(!Arc::ptr_eq(&named("one-name"), &named("another")));
    }
}
