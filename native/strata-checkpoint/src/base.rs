//! What is at a place before a save, and who may commit there.

use bytes::Bytes;
use strata_io::{Error as IoError, PutMode, Store};

use crate::manifest::Manifest;
use crate::open::{
    MetadataState, complete_ranks, manifest_names, metadata_name, metadata_state, metadata_tail, newest, or_empty,
};
use crate::{Error, Result};

/// Numbered, create-only records below a run root: the highest names the run that may commit.
const GENERATIONS_FOLDER: &str = ".strata/generations/";

/// Records that stay: a person may want to see who came and when. Only the highest counts.
const RECORDS_KEPT: u64 = 16;

/// Racing claims are rare: each loser moves up by one.
const CLAIM_TRIES: u32 = 100;

/// A place as the planning rank found it when its save began.
#[derive(Debug)]
pub struct Base {
    /// Highest manifest number, valid or torn; the commit takes the next.
    pub number: u64,
    /// The newest valid manifest.
    pub manifest: Option<Manifest>,
    /// `.metadata` of a stock save that our manifest does not know.
    pub foreign_metadata: Option<Bytes>,
    /// Whether `.metadata` is still the one before the manifest's, or not there yet.
    pub stale_metadata: bool,
    /// How many ranks saved here on their own, if that is the newest state and this is one of such a save.
    pub ranks: Option<u32>,
}

impl Base {
    /// Whether a committed checkpoint, ours or stock's, is there.
    pub fn exists(&self) -> bool {
        self.manifest.is_some() || self.foreign_metadata.is_some()
    }
}

/// Looks at a place before a save.
///
/// # Errors
/// What the store says; a place that does not exist yet is none.
pub async fn open_base(store: &dyn Store, rank: Option<u32>) -> Result<Base> {
    let mut names = manifest_names(store, false).await?;
    let of_all = names.last().map_or(0, |name| name.number);
    // One sequence for all, so that a save with collectives and one without supersede each other.
    let of_ranks = manifest_names(store, true).await?;
    names.extend(of_ranks.into_iter().filter(|name| rank.is_none() || name.rank == rank));
    let number = names.iter().map(|name| name.number).max().unwrap_or(0);
    // A damaged manifest must not stop the save that replaces it.
    let manifest = match newest(store, rank).await {
        Ok(found) => found.manifest,
        Err(Error::Manifest { object, detail }) => {
            tracing::warn!("{object}: {detail}; the save goes on and replaces it");
            None
        }
        Err(error) => return Err(error),
    };
    let metadata = metadata_name(rank);
    let state = match &manifest {
        Some(manifest) => metadata_state(metadata_tail(store, &metadata).await?.as_deref(), manifest),
        None => MetadataState::Foreign,
    };
    let foreign_metadata = match state {
        MetadataState::Foreign => match store.read(&metadata, None).await {
            Err(IoError::NotFound { .. }) => None,
            bytes => Some(bytes?),
        },
        _ => None,
    };
    // Stock cannot read what is in safetensors: there is no `.metadata` to be missed.
    let is_for_stock = manifest.as_ref().is_none_or(|manifest| !manifest.has_safetensors());
    let stale_metadata = is_for_stock && matches!(state, MetadataState::Stale | MetadataState::Absent);
    let ranks = if rank.is_some() { complete_ranks(store, of_all).await? } else { None };
    Ok(Base { number, manifest, foreign_metadata, stale_metadata, ranks })
}

/// Claims the next generation of a run root for `owner`, a nonce of this process.
///
/// # Errors
/// What the store says; [`Error::Plan`] after too many lost races.
pub async fn claim_generation(run_root: &dyn Store, owner: &str) -> Result<u64> {
    for _ in 0..CLAIM_TRIES {
        let next = newest_generation(run_root).await? + 1;
        let name = format!("{GENERATIONS_FOLDER}{next:020}");
        match run_root.put(&name, Bytes::copy_from_slice(owner.as_bytes()), PutMode::Create).await {
            Ok(()) => {
                forget_generations(run_root, next).await;
                return Ok(next);
            }
            Err(IoError::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Error::Plan(format!("{}: {CLAIM_TRIES} claims of a generation were lost to others", run_root.url())))
}

/// Removes records of long ago, best effort: what stays goes at the next claim.
async fn forget_generations(run_root: &dyn Store, newest: u64) {
    let Ok(listed) = run_root.list(GENERATIONS_FOLDER).await else { return };
    let is_old = |name: &str| number_of(name).is_some_and(|number| number + RECORDS_KEPT <= newest);
    for object in listed.iter().filter(|object| is_old(&object.name)) {
        if let Err(error) = run_root.delete(&object.name).await {
            tracing::debug!("{}: {} stays for now: {error}", run_root.url(), object.name);
            return;
        }
    }
}

fn number_of(name: &str) -> Option<u64> {
    name.strip_prefix(GENERATIONS_FOLDER)?.parse().ok()
}

/// Highest claimed generation; 0 if there is none.
pub(crate) async fn newest_generation(run_root: &dyn Store) -> Result<u64> {
    let listed = or_empty(run_root.list(GENERATIONS_FOLDER).await)?;
    Ok(listed.iter().filter_map(|object| number_of(&object.name)).max().unwrap_or(0))
}
