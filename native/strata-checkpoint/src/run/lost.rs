//! What a folder of a run holds in which no manifest counts: somebody else's checkpoint, one of ours that has lost its
//! manifest, or none. Removes and mends nothing.

use strata_io::{Error as IoError, ObjectInfo, Store};

use super::parse_folder;
use crate::Result;
use crate::manifest::{FOLDER, RANKS_FOLDER};
use crate::names::{id_of_data_object, is_our_data_object, is_our_safetensors};
use crate::open::{RETIRED, carries, marked, metadata_name, metadata_tail, or_empty};
use crate::servable::INDEX_NAME;
use crate::stock_pickle::SEAL;

/// What a folder is in which no manifest counts.
pub(super) enum Without {
    /// A checkpoint of somebody else.
    Foreign,
    /// One of ours whose manifest is lost: in words.
    Lost(String),
    /// A save that has not ended, or what is left of one.
    Uncommitted,
}

/// What is in `folder`, which holds `objects` and no manifest that counts; None if it is none of our business.
///
/// # Errors
/// What the store says.
pub(super) async fn without_manifest(
    run_root: &dyn Store,
    folder: &str,
    objects: &[ObjectInfo],
) -> Result<Option<Without>> {
    let is_ours = parse_folder(folder).is_some();
    if objects.iter().any(|object| object.name.starts_with(RANKS_FOLDER)) {
        return Ok(Some(Without::Foreign));
    }
    if is_ours && let Some(index) = orphaned_index(run_root, folder, objects).await? {
        check_unchanged(run_root, folder, objects).await?;
        return Ok(Some(Without::Lost(format!(
            "{}/{folder}: damaged: the manifest of what was committed here is lost; StrataReader still reads it by \
             {index}, without digests",
            run_root.url()
        ))));
    }
    let was_ours = marked(objects, RETIRED).next().is_some();
    if !was_ours && objects.iter().any(|object| is_index(&object.name)) {
        return Ok(Some(Without::Foreign));
    }
    Ok(is_ours.then_some(Without::Uncommitted))
}

/// The index that a commit of ours wrote after its manifest, if retention has not taken that commit since.
async fn orphaned_index(run_root: &dyn Store, folder: &str, objects: &[ObjectInfo]) -> Result<Option<String>> {
    let retired: Vec<&str> = marked(objects, RETIRED).collect();
    let ids = objects.iter().filter_map(|object| id_of_data_object(&object.name));
    let ids: Vec<&str> = ids.filter(|id| !retired.contains(id)).collect();
    // Nothing is asked for where all that is there is a stranger's.
    if ids.is_empty() && objects.iter().all(|object| !object.name.starts_with(FOLDER)) {
        return Ok(None);
    }
    let is_only_ours = !ids.is_empty() && objects.iter().all(|object| !is_data_of_others(&object.name));
    for name in [metadata_name(None), INDEX_NAME.to_owned()] {
        if objects.iter().all(|object| object.name != name) {
            continue;
        }
        let Some(tail) = metadata_tail(run_root, &format!("{folder}/{name}")).await? else { continue };
        let carries_any = |ids: &[&str]| ids.iter().any(|id| carries(&tail, id));
        // One that is damaged too is told by the data: whoever saves over ours leaves data of his own.
        let is_of_ours = tail.ends_with(SEAL) || carries_any(&ids) || is_only_ours;
        if is_of_ours && !carries_any(&retired) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// A listing is not of one moment: a commit may have come after its manifests were listed and before the index was.
///
/// # Errors
/// [`IoError::NotFound`] if more is there by now, after which whoever looks looks again.
async fn check_unchanged(run_root: &dyn Store, folder: &str, objects: &[ObjectInfo]) -> Result<()> {
    let listed = or_empty(run_root.list(&format!("{folder}/{FOLDER}")).await)?;
    let is_known =
        |path: &str| objects.iter().any(|object| path.strip_prefix(folder) == Some(&format!("/{}", object.name)));
    match listed.into_iter().find(|object| !is_known(&object.name)) {
        Some(ObjectInfo { name: object, .. }) => {
            Err(IoError::NotFound { object, detail: "it was not listed before".to_owned() }.into())
        }
        None => Ok(()),
    }
}

fn is_index(name: &str) -> bool {
    name == metadata_name(None) || name == INDEX_NAME || is_safetensors_of_others(name)
}

fn is_data_of_others(name: &str) -> bool {
    (name.ends_with(".distcp") && !is_our_data_object(name)) || is_safetensors_of_others(name)
}

fn is_safetensors_of_others(name: &str) -> bool {
    !name.contains('/') && name.ends_with(".safetensors") && !is_our_safetensors(name)
}
