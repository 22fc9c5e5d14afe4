//! Removing what a commit has superseded, and never anything that somebody may still read.

use std::collections::HashSet;
use std::time::{SystemTime, UNIX_EPOCH};

use strata_io::{ObjectInfo, OpenUpload, PendingUpload, Store, discard_upload};

use crate::item::Object;
use crate::manifest::{DecodeError, FOLDER, Manifest, ManifestName, RANKS_FOLDER, decode};
use crate::names::is_our_safetensors;
use crate::open::{manifest_names, missing_ranks, or_empty};
use crate::servable::INDEX_NAME;
use crate::{Error, Result};

/// Leases of readers: `.strata/leases/<expiry, Unix seconds, 20 digits>-<nonce>`.
pub const LEASES_FOLDER: &str = ".strata/leases/";

/// Where a save puts files.
pub(crate) const FOLDERS: [&str; 3] = ["", FOLDER, RANKS_FOLDER];

/// What was at the place right before a commit: later writers' objects and uploads are not in here, and so are safe.
pub(crate) struct Before {
    pub listed: Vec<ObjectInfo>,
    pub uploads: Vec<PendingUpload>,
    /// As the store lists them: those without a record too.
    pub open_uploads: Vec<OpenUpload>,
}

/// Removes what was there `before` the commit of `manifest` and nobody needs any more.
///
/// Returns the number of data objects removed.
pub(crate) async fn collect(
    store: &dyn Store,
    run_root: Option<&dyn Store>,
    manifest: &Manifest,
    before: &Before,
) -> Result<u64> {
    // Saves that were killed left these; those that still run began before this commit and cannot commit any more.
    for upload in before.open_uploads.iter().filter(|upload| is_own_data(manifest, &upload.name)) {
        store.abort_upload(&upload.name, &upload.upload_id).await?;
    }
    for upload in before.uploads.iter().filter(|upload| is_own_data(manifest, &upload.name)) {
        discard_upload(store, upload).await?;
    }
    for folder in FOLDERS {
        store.sweep(folder).await?;
    }
    if leased(store).await? {
        tracing::info!("{}: a reader holds a lease; superseded objects stay for now", store.url());
        return Ok(0);
    }
    if manifest.rank.is_some() {
        let all = manifest_names(store, true).await?;
        if !missing_ranks(&all, manifest.number, manifest.world_size).is_empty() {
            return Ok(0);
        }
    }
    let mut needed: HashSet<String> = manifest.objects.iter().map(|object| object.name.clone()).collect();
    let mut doomed = superseded(manifest, &before.listed, &needed);
    if let Some(run_root) = run_root
        && !doomed.is_empty()
    {
        needed.extend(referenced(run_root, manifest).await?);
        doomed = superseded(manifest, &before.listed, &needed);
    }
    for name in &doomed {
        store.delete(name).await?;
    }
    Ok(doomed.iter().filter(|name| is_own_data(manifest, name)).count() as u64)
}

/// Names in `listed` that `manifest` supersedes, what points first: an index must not outlive what it names, and data
/// that nothing names is found again by the next save here.
fn superseded(manifest: &Manifest, listed: &[ObjectInfo], needed: &HashSet<String>) -> Vec<String> {
    let is_old_manifest = |name: &str| {
        ManifestName::parse(name).is_some_and(|parsed| {
            let own = manifest.rank.is_none() || parsed.rank == manifest.rank || parsed.rank.is_none();
            own && parsed.number < manifest.number
        })
    };
    let is_metadata = |name: &str| match manifest.rank {
        None => name.starts_with("__") && name.ends_with(".metadata"),
        Some(_) => name == ".metadata",
    };
    let names = || listed.iter().map(|object| object.name.as_str());
    let data = || names().filter(|name| is_own_data(manifest, name) && !needed.contains(*name));
    // That of a save of safetensors has been replaced by another such save, or has nothing to name any more.
    let is_outdated = !manifest.has_safetensors() && data().any(is_our_safetensors);
    let index = names().filter(|name| is_outdated && *name == INDEX_NAME);
    let indices = names().filter(|name| is_metadata(name)).chain(names().filter(|name| is_old_manifest(name)));
    indices.chain(index).chain(data()).map(str::to_owned).collect()
}

/// Whether a data object is for this manifest's writer to remove.
fn is_own_data(manifest: &Manifest, name: &str) -> bool {
    // The other ranks' objects are theirs; they may be in the middle of a save. Only managers write safetensors, for
    // all ranks together.
    let owner = manifest.rank.map_or("__".to_owned(), |rank| format!("__{rank}_"));
    (name.starts_with(&owner) && name.ends_with(".distcp")) || (manifest.rank.is_none() && is_our_safetensors(name))
}

/// Whether a reader holds a lease; those that have expired are removed.
pub(crate) async fn leased(store: &dyn Store) -> Result<bool> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let leases = or_empty(store.list(LEASES_FOLDER).await)?;
    let expiry = |name: &str| name.strip_prefix(LEASES_FOLDER)?.split('-').next()?.parse::<u64>().ok();
    let mut held = false;
    for lease in leases {
        match expiry(&lease.name) {
            Some(expiry) if expiry > now => held = true,
            Some(_) => store.delete(&lease.name).await?,
            None => {}
        }
    }
    Ok(held)
}

/// Objects of the checkpoint of `committed` that others under the run root refer to.
async fn referenced(run_root: &dyn Store, committed: &Manifest) -> Result<Vec<String>> {
    let mut manifests = Vec::new();
    for folder in run_root.list_folders("").await? {
        for manifest in manifests_below(run_root, &folder).await? {
            manifests.push((folder.clone(), manifest));
        }
    }
    // The folder is known by what is in it: the place may have been named in another way, such as ".".
    let own = manifests.iter().find(|(_, manifest)| manifest.save_id == committed.save_id).map(|(folder, _)| folder);
    let to_us = |manifest: &Manifest, reference: u32| Some(&manifest.references[reference as usize].0) == own;
    let others = manifests.iter().filter(|(folder, _)| Some(folder) != own).map(|(_, manifest)| manifest);
    let objects = others.flat_map(|manifest| {
        let ours = |object: &&Object| object.reference.is_some_and(|reference| to_us(manifest, reference));
        manifest.objects.iter().filter(ours).map(|object| object.name.clone())
    });
    Ok(objects.collect())
}

/// Every valid manifest of the checkpoint `folder`: a reader may still be on an older one.
async fn manifests_below(run_root: &dyn Store, folder: &str) -> Result<Vec<Manifest>> {
    let mut listed = or_empty(run_root.list(&format!("{folder}/{FOLDER}")).await)?;
    listed.extend(or_empty(run_root.list(&format!("{folder}/{RANKS_FOLDER}")).await)?);
    let mut manifests = Vec::new();
    for object in listed {
        let path = object.name.strip_prefix(&format!("{folder}/")).unwrap_or_default();
        if ManifestName::parse(path).is_some() {
            match decode(&run_root.read(&object.name, None).await?) {
                Ok(manifest) => manifests.push(manifest),
                Err(DecodeError::Damaged(_)) => {}
                // It may refer to us in a way that we do not know: nothing is removed then.
                Err(DecodeError::Unsupported(detail)) => {
                    return Err(Error::Unsupported { object: format!("{}/{}", run_root.url(), object.name), detail });
                }
            }
        }
    }
    Ok(manifests)
}
