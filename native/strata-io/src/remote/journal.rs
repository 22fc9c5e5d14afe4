//! Uploads in parts that have begun and not ended, written down so that a later process can end them.
//!
//! A store keeps, and charges for, the parts of an upload that nobody completes or aborts, and does not list
//! them among the objects. So before its first part each upload puts a small record below
//! [`UPLOADS_FOLDER`], and removes it when it has ended. Whoever collects garbage reads the records. An
//! upload whose id was lost on its way here is looked for when its object ends ([`super::unknown`]), and one whose
//! process died before the record was there, among those that the store lists ([`Store::open_uploads`]). What stays is
//! such a one at a store that cannot list uploads: a bucket's lifecycle rule for incomplete uploads is for those.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, Store};

/// Folder of the records, below the store's root.
pub const UPLOADS_FOLDER: &str = ".strata/uploads/";

/// An upload that has begun and, as far as its record says, not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingUpload {
    /// Name of the record.
    pub record: String,
    /// Name of the object that was to be written.
    pub name: String,
    /// The store's id of the upload.
    pub upload_id: String,
    /// When it began, by the clock of the process that began it.
    pub began_at: SystemTime,
}

#[derive(Serialize, Deserialize)]
struct Record {
    name: String,
    upload_id: String,
    began_at_unix_s: u64,
}

/// A new record: its name and content.
pub(super) fn record(name: &str, upload_id: &str) -> (String, Bytes) {
    let began_at_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let record = Record { name: name.to_owned(), upload_id: upload_id.to_owned(), began_at_unix_s };
    let content = serde_json::to_vec(&record).expect("strings and a number are JSON");
    (format!("{UPLOADS_FOLDER}{:032x}.json", rand::random::<u128>()), content.into())
}

/// Uploads that have a record in `store`, those of running processes among them: judge by their age.
///
/// # Errors
/// As [`Store::list`] and [`Store::read`]; [`Error::Mismatch`] for a record that cannot be read.
pub async fn pending_uploads(store: &dyn Store) -> Result<Vec<PendingUpload>> {
    let mut pending = Vec::new();
    for info in store.list(UPLOADS_FOLDER).await? {
        let content = match store.read(&info.name, None).await {
            Ok(content) => content,
            // Ended since the listing.
            Err(Error::NotFound { .. }) => continue,
            Err(error) => return Err(error),
        };
        let record: Record = serde_json::from_slice(&content).map_err(|error| Error::Mismatch {
            object: format!("{}/{}", store.url(), info.name),
            expected: "the record of an upload".to_owned(),
            found: error.to_string(),
        })?;
        let began_at = UNIX_EPOCH + Duration::from_secs(record.began_at_unix_s);
        pending.push(PendingUpload { record: info.name, name: record.name, upload_id: record.upload_id, began_at });
    }
    Ok(pending)
}

/// Aborts `upload` at the store, then removes its record.
///
/// # Errors
/// As [`Store::abort_upload`] and [`Store::delete`].
pub async fn discard_upload(store: &dyn Store, upload: &PendingUpload) -> Result<()> {
    store.abort_upload(&upload.name, &upload.upload_id).await?;
    store.delete(&upload.record).await
}
