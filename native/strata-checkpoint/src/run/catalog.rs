//! Which checkpoints a run has, by one listing and the first bytes of each manifest.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{Error as IoError, Store};

use super::{CheckpointMetadata, CheckpointType, Part, parse_folder};
use crate::manifest::{DecodeError, FOLDER, Manifest, ManifestName, RANKS_FOLDER, decode_head, head_bytes};
use crate::names::is_our_safetensors;
use crate::open::or_empty;
use crate::servable::INDEX_NAME;
use crate::{Error, Result};

/// Read at once of a manifest; most heads are shorter.
const HEAD_BYTES: u64 = 64 << 10;

/// Folders looked at together.
const CONCURRENCY: usize = 16;

/// Marks beside the manifests, each followed by the save_id that it is of, or by a pin's name.
pub(crate) const QUARANTINED: &str = "quarantined-";
/// A run that was taken back has left them behind.
pub(crate) const ABANDONED: &str = "abandoned-";
pub(crate) const VERIFIED: &str = "verified-";
pub(crate) const PIN: &str = "pin-";

/// A folder below a run's root, and what is committed in it.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its name.
    pub folder: String,
    /// What is in it.
    pub state: State,
    /// Whether what is committed was found damaged, and is passed over.
    pub is_quarantined: bool,
    /// Whether the run was taken back behind what is committed.
    pub is_abandoned: bool,
    /// Whether what is committed was read and found sound.
    pub is_verified: bool,
    /// Who holds it.
    pub pins: Vec<String>,
    /// Objects of other checkpoints, each with its folder, to which any manifest here refers.
    pub refers_to: Vec<(String, String)>,
}

/// What is committed in a folder.
#[derive(Debug, Clone)]
pub enum State {
    /// The newest manifest, without entries and items.
    Committed(Box<Manifest>),
    /// Stock's `.metadata`, or ranks that saved on their own.
    Foreign,
    /// Nothing; objects of ours are there.
    Uncommitted,
    /// Manifests of which none can be read, and why: torn, or of a newer version of the format.
    Unreadable(String),
}

impl Listed {
    /// What there is to know, if a checkpoint of ours is committed here. `root`: URL or path of the run.
    ///
    /// One that no manager saved tells its step by its name, and counts as full.
    pub fn metadata(&self, root: &str) -> Option<CheckpointMetadata> {
        let State::Committed(manifest) = &self.state else { return None };
        let run = manifest.run.clone();
        let named = parse_folder(&self.folder).map(|(step, _)| step);
        let own = manifest.objects.iter().filter(|object| object.reference.is_none());
        Some(CheckpointMetadata {
            id: manifest.save_id.clone(),
            step: run.as_ref().map(|run| run.step).or(named)?,
            epoch: run.as_ref().map_or(0, |run| run.epoch),
            path: format!("{}/{}", root.trim_end_matches('/'), self.folder),
            size_bytes: own.map(|object| object.size).sum(),
            checkpoint_type: run.as_ref().map_or(CheckpointType::Full, |run| run.checkpoint_type),
            model_hash: run.as_ref().and_then(|run| run.model_hash.clone()),
            metadata: run.as_ref().map(|run| run.metadata.clone().into_iter().collect()).unwrap_or_default(),
            metrics: run.map(|run| run.metrics).unwrap_or_default(),
            created_at: manifest.created_at,
        })
    }

    /// What it can be loaded in the place of, if something is committed here.
    pub fn part(&self) -> Option<Part> {
        match &self.state {
            State::Committed(manifest) => {
                Some(manifest.run.as_ref().map_or(Part::Whole, |run| run.checkpoint_type.part()))
            }
            State::Foreign => Some(Part::Whole),
            State::Uncommitted | State::Unreadable(_) => None,
        }
    }
}

/// The folders of checkpoints below `run_root`: those with names of ours, and others with a manifest of ours.
///
/// # Errors
/// What the store says: a listing that failed is never an empty one. A root that is not there yet is empty.
pub async fn catalog(run_root: &Arc<dyn Store>) -> Result<Vec<Listed>> {
    let folders = or_empty(run_root.list_folders("").await)?;
    let looks = folders.into_iter().filter(|folder| format!("{folder}/") != FOLDER).map(|folder| {
        let run_root = run_root.clone();
        async move { look(&*run_root, folder).await }
    });
    let found: Vec<Option<Listed>> = stream::iter(looks).buffered(CONCURRENCY).try_collect().await?;
    Ok(found.into_iter().flatten().collect())
}

async fn look(run_root: &dyn Store, folder: String) -> Result<Option<Listed>> {
    let listed = or_empty(run_root.list(&format!("{folder}/{FOLDER}")).await)?;
    let inside = |name: &str| name.strip_prefix(&format!("{folder}/")).unwrap_or_default().to_owned();
    let names: Vec<(String, u64)> = listed.iter().map(|object| (inside(&object.name), object.size)).collect();
    let Heads { newest, refers_to, fault } = heads(run_root, &folder, &names).await?;
    let state = match (newest, fault) {
        (Some(manifest), _) => State::Committed(Box::new(manifest)),
        (None, Some(fault)) => State::Unreadable(fault),
        (None, None) => match uncommitted(run_root, &folder).await? {
            Some(state) => state,
            None => return Ok(None),
        },
    };
    let save_id = match &state {
        State::Committed(manifest) => manifest.save_id.as_str(),
        _ => "",
    };
    let marks = || names.iter().filter_map(|(name, _)| name.strip_prefix(FOLDER));
    let is_marked = |mark: &str| !save_id.is_empty() && marks().any(|name| name.strip_prefix(mark) == Some(save_id));
    Ok(Some(Listed {
        is_quarantined: is_marked(QUARANTINED),
        is_abandoned: is_marked(ABANDONED),
        is_verified: is_marked(VERIFIED),
        pins: marks().filter_map(|name| name.strip_prefix(PIN)).map(str::to_owned).collect(),
        refers_to,
        state,
        folder,
    }))
}

/// What the manifests in a folder say.
#[derive(Default)]
struct Heads {
    newest: Option<Manifest>,
    refers_to: Vec<(String, String)>,
    fault: Option<String>,
}

/// The heads of the manifests among `names`, which come with their sizes.
async fn heads(run_root: &dyn Store, folder: &str, names: &[(String, u64)]) -> Result<Heads> {
    let mut manifests: Vec<(ManifestName, u64)> =
        names.iter().filter_map(|(name, size)| Some((ManifestName::parse(name)?, *size))).collect();
    manifests.sort();
    let mut heads = Heads::default();
    for (name, size) in manifests.into_iter().rev() {
        let path = format!("{folder}/{}", name.path());
        match head(run_root, &path, size).await {
            Ok(manifest) => {
                let referred = manifest.objects.iter().filter_map(|object| {
                    let (folder, _) = &manifest.references[object.reference? as usize];
                    Some((folder.clone(), object.name.clone()))
                });
                heads.refers_to.extend(referred);
                heads.newest.get_or_insert(manifest);
            }
            Err(Error::Manifest { object, detail } | Error::Unsupported { object, detail }) => {
                heads.fault.get_or_insert(format!("{object}: {detail}"));
            }
            // Listed, then superseded and collected: what supersedes it is for the next look.
            Err(Error::Io(IoError::NotFound { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(heads)
}

/// The head of the manifest at `path`, of `size` bytes.
async fn head(run_root: &dyn Store, path: &str, size: u64) -> Result<Manifest> {
    let failed = |error| match error {
        DecodeError::Damaged(detail) => Error::Manifest { object: format!("{}/{path}", run_root.url()), detail },
        DecodeError::Unsupported(detail) => Error::Unsupported { object: format!("{}/{path}", run_root.url()), detail },
    };
    let mut start = run_root.read(path, Some(0..size.min(HEAD_BYTES))).await?;
    let needed = head_bytes(&start).map_err(failed)?;
    if needed > start.len() as u64 && needed <= size {
        start = run_root.read(path, Some(0..needed)).await?;
    }
    decode_head(&start).map_err(failed)
}

/// What a folder without a manifest of ours is: somebody else's checkpoint, what is left of a save, or none of our
/// business.
async fn uncommitted(run_root: &dyn Store, folder: &str) -> Result<Option<State>> {
    let names: Vec<String> =
        or_empty(run_root.list(&format!("{folder}/")).await)?.into_iter().map(|o| o.name).collect();
    let ranks = or_empty(run_root.list(&format!("{folder}/{RANKS_FOLDER}")).await)?;
    let inside = |name: &String| name.rsplit_once('/').map_or(name.clone(), |(_, inside)| inside.to_owned());
    let is_foreign = |name: String| {
        name == ".metadata" || name == INDEX_NAME || (name.ends_with(".safetensors") && !is_our_safetensors(&name))
    };
    if !ranks.is_empty() || names.iter().map(inside).any(is_foreign) {
        return Ok(Some(State::Foreign));
    }
    Ok(parse_folder(folder).map(|_| State::Uncommitted))
}
