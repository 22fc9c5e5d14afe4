//! Which checkpoints a run has, by one listing and the first bytes of each manifest.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{Error as IoError, ObjectInfo, Store};

use super::lost::{Without, without_manifest};
use super::{CheckpointMetadata, CheckpointType, Part, parse_folder};
use crate::manifest::{DecodeError, FOLDER, Manifest, ManifestName, decode_head, head_bytes};
use crate::names::is_our_data_object;
use crate::open::{OPEN_TRIES, RETIRED, marked, or_empty};
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

/// Characters of the nonce that keeps the pins of two holders of the same name apart, behind the name and a dot.
const NONCE_DIGITS: usize = 16;

/// Who a pin is of.
fn holder(pin: &str) -> &str {
    let is_nonce = |end: &str| end.len() == NONCE_DIGITS && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    pin.rsplit_once('.').filter(|(_, end)| is_nonce(end)).map_or(pin, |(who, _)| who)
}

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
    /// Objects of its own that any manifest here names.
    pub owns: BTreeSet<String>,
    /// Manifests that a newer one here has superseded.
    pub outdated: Vec<String>,
    /// Saves of the manifests that no retention has taken.
    pub save_ids: BTreeSet<String>,
    /// Manifests and objects of checkpoints that retention has taken.
    pub retired: BTreeSet<String>,
    /// What a manifest is that cannot be read, though another one may be, or that one is lost.
    pub fault: Option<String>,
    /// Every object in it, by its name in the folder.
    pub objects: Vec<ObjectInfo>,
    /// What was read of its manifests.
    heads: Known,
}

/// Heads of manifests by their names below the root. While a run looks now and then, no name comes to stand for another
/// manifest unnoticed: a later generation numbers its own higher, and what this one has removed it misses at its next
/// look.
pub(super) type Known = HashMap<String, Head>;

/// The head of a manifest, and how it was listed.
#[derive(Debug, Clone)]
pub(super) struct Head {
    size: u64,
    modified_at: u64,
    manifest: Arc<Manifest>,
}

/// What was read for `listed`, for the next look.
pub(super) fn known(listed: &[Listed]) -> Known {
    listed.iter().flat_map(|listed| listed.heads.clone()).collect()
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
    /// Nothing any more: a checkpoint that retention took, whose data these others still refer to, by their folders.
    Kept(Vec<String>),
    /// Manifests of which none can be read, and why: torn, lost, or of a newer version of the format.
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
        Some(CheckpointMetadata {
            id: manifest.save_id.clone(),
            step: run.as_ref().map(|run| run.step).or(named)?,
            epoch: run.as_ref().map_or(0, |run| run.epoch),
            path: format!("{}/{}", root.trim_end_matches('/'), self.folder),
            size_bytes: manifest.own_objects().map(|object| object.size).sum(),
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
            State::Uncommitted | State::Kept(_) | State::Unreadable(_) => None,
        }
    }

    /// Whether nothing is committed here, and nothing was that retention has not taken.
    pub(super) fn is_uncommitted(&self) -> bool {
        matches!(self.state, State::Uncommitted | State::Kept(_))
    }

    /// Why what was committed here is damaged, if that is known; None too if the run was taken back behind it.
    pub(super) fn damage(&self) -> Option<&str> {
        match &self.state {
            State::Unreadable(fault) => Some(fault),
            _ => (self.is_quarantined && !self.is_abandoned).then_some("it was found damaged"),
        }
    }
}

/// The folders of checkpoints below `run_root`: those with names of ours, and others with a manifest of ours.
///
/// # Errors
/// What the store says: a listing that failed is never an empty one. A root that is not there yet is empty.
pub async fn catalog(run_root: &Arc<dyn Store>) -> Result<Vec<Listed>> {
    catalog_again(run_root, &Known::new()).await
}

/// As [`catalog`], but for manifests of which the head is known.
pub(super) async fn catalog_again(run_root: &Arc<dyn Store>, known: &Known) -> Result<Vec<Listed>> {
    let mut folders: BTreeMap<String, Vec<ObjectInfo>> = BTreeMap::new();
    for object in or_empty(run_root.list_below("").await)? {
        if let Some((folder, name)) = object.name.split_once('/') {
            let inside = ObjectInfo { name: name.to_owned(), ..object };
            folders.entry(folder.to_owned()).or_default().push(inside);
        }
    }
    // On a file system one may be left with nothing in it.
    for folder in or_empty(run_root.list_folders("").await)? {
        folders.entry(folder).or_default();
    }
    folders.retain(|folder, _| format!("{folder}/") != FOLDER);
    let looks = folders.into_iter().map(|(folder, objects)| {
        let run_root = run_root.clone();
        async move { look(&*run_root, folder, objects, known).await }
    });
    let found: Vec<Option<Listed>> = stream::iter(looks).buffered(CONCURRENCY).try_collect().await?;
    let mut listed: Vec<Listed> = found.into_iter().flatten().collect();
    note_kept(&mut listed);
    Ok(listed)
}

/// Tells what is kept for others from what saves have left.
fn note_kept(listed: &mut [Listed]) {
    let mut users: HashMap<String, BTreeSet<String>> = HashMap::new();
    for one in &*listed {
        for (folder, _) in &one.refers_to {
            users.entry(folder.clone()).or_default().insert(one.folder.clone());
        }
    }
    for one in listed {
        if matches!(one.state, State::Uncommitted)
            && marked(&one.objects, RETIRED).next().is_some()
            && let Some(users) = users.remove(&one.folder)
        {
            one.state = State::Kept(users.into_iter().collect());
        }
    }
}

/// What is in one folder of a run; None if it is none of our business.
///
/// # Errors
/// As [`catalog`].
pub async fn folder_of(run_root: &dyn Store, folder: &str) -> Result<Option<Listed>> {
    look(run_root, folder.to_owned(), inside(run_root, folder).await?, &Known::new()).await
}

async fn inside(run_root: &dyn Store, folder: &str) -> Result<Vec<ObjectInfo>> {
    let listed = or_empty(run_root.list_below(&format!("{folder}/")).await)?;
    let name = |object: &ObjectInfo| object.name[folder.len() + 1..].to_owned();
    Ok(listed.into_iter().map(|object| ObjectInfo { name: name(&object), ..object }).collect())
}

async fn look(
    run_root: &dyn Store,
    folder: String,
    mut objects: Vec<ObjectInfo>,
    known: &Known,
) -> Result<Option<Listed>> {
    for _ in 1..OPEN_TRIES {
        match look_once(run_root, &folder, &objects, known).await {
            // Listed, then superseded and collected: what supersedes it was not listed.
            Err(Error::Io(IoError::NotFound { .. })) => objects = inside(run_root, &folder).await?,
            looked => return looked,
        }
    }
    look_once(run_root, &folder, &objects, known).await
}

async fn look_once(
    run_root: &dyn Store,
    folder: &str,
    objects: &[ObjectInfo],
    known: &Known,
) -> Result<Option<Listed>> {
    let Heads { newest, refers_to, owns, outdated, save_ids, retired, fault, all } =
        heads(run_root, folder, objects, known).await?;
    let state = match (newest, &fault) {
        (Some(manifest), _) => State::Committed(Box::new(manifest)),
        (None, Some(fault)) => State::Unreadable(fault.clone()),
        (None, None) => match without_manifest(run_root, folder, objects).await? {
            Some(Without::Foreign) => State::Foreign,
            Some(Without::Lost(words)) => State::Unreadable(words),
            Some(Without::Uncommitted) => State::Uncommitted,
            None => return Ok(None),
        },
    };
    // An index alone may be of a process that wrote it when retention had taken all else.
    let has_data = objects.iter().any(|object| is_our_data_object(&object.name));
    let fault = fault.or_else(|| match &state {
        State::Unreadable(lost) if has_data => Some(lost.clone()),
        _ => None,
    });
    let save_id = match &state {
        State::Committed(manifest) => manifest.save_id.clone(),
        _ => String::new(),
    };
    let is_marked = |mark: &str| !save_id.is_empty() && marked(objects, mark).any(|of| of == save_id);
    Ok(Some(Listed {
        is_quarantined: is_marked(QUARANTINED),
        is_abandoned: is_marked(ABANDONED),
        is_verified: is_marked(VERIFIED),
        pins: marked(objects, PIN).map(holder).map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect(),
        folder: folder.to_owned(),
        objects: objects.to_vec(),
        state,
        refers_to,
        owns,
        outdated,
        save_ids,
        retired,
        fault,
        heads: all,
    }))
}

/// What the manifests in a folder say.
#[derive(Default)]
struct Heads {
    newest: Option<Manifest>,
    refers_to: Vec<(String, String)>,
    owns: BTreeSet<String>,
    outdated: Vec<String>,
    save_ids: BTreeSet<String>,
    retired: BTreeSet<String>,
    fault: Option<String>,
    all: Known,
}

/// The heads of the manifests among `objects`.
async fn heads(run_root: &dyn Store, folder: &str, objects: &[ObjectInfo], known: &Known) -> Result<Heads> {
    let of_whole = |object: &ObjectInfo| ManifestName::parse(&object.name).filter(|name| name.rank.is_none());
    let mut manifests: Vec<(ManifestName, &ObjectInfo)> =
        objects.iter().filter_map(|object| Some((of_whole(object)?, object))).collect();
    manifests.sort_by_key(|(name, _)| *name);
    // Somebody took hold of it before it was gone: the next sweep removes the tombstone.
    let is_held = marked(objects, PIN).next().is_some();
    let retired: BTreeSet<&str> = marked(objects, RETIRED).filter(|_| !is_held).collect();
    let mut heads = Heads::default();
    for (name, object) in manifests.into_iter().rev() {
        let path = format!("{folder}/{}", name.path());
        let manifest = match head(run_root, &path, object, known).await {
            Ok(manifest) => manifest,
            Err(Error::Manifest { object, detail } | Error::Unsupported { object, detail }) => {
                heads.fault.get_or_insert(format!("{object}: {detail}"));
                continue;
            }
            Err(error) => return Err(error),
        };
        heads.name(&manifest, name, retired.contains(&*manifest.save_id));
        heads.all.insert(path, Head { size: object.size, modified_at: object.modified_at, manifest });
    }
    Ok(heads)
}

impl Heads {
    fn name(&mut self, manifest: &Manifest, name: ManifestName, is_retired: bool) {
        if is_retired {
            self.retired.extend(manifest.own_objects().map(|object| object.name.clone()).chain([name.path()]));
            return;
        }
        self.save_ids.insert(manifest.save_id.clone());
        for object in &manifest.objects {
            match object.reference {
                None => drop(self.owns.insert(object.name.clone())),
                Some(at) => {
                    let (folder, _) = &manifest.references[at as usize];
                    self.refers_to.push((folder.clone(), object.name.clone()));
                }
            }
        }
        match &self.newest {
            None => self.newest = Some(manifest.clone()),
            Some(_) => self.outdated.push(name.path()),
        }
    }
}

/// The head of the manifest at `path`, which was listed as `object`.
async fn head(run_root: &dyn Store, path: &str, object: &ObjectInfo, known: &Known) -> Result<Arc<Manifest>> {
    let (size, modified_at) = (object.size, object.modified_at);
    if let Some(head) = known.get(path).filter(|head| (head.size, head.modified_at) == (size, modified_at)) {
        return Ok(head.manifest.clone());
    }
    let failed = |error| match error {
        DecodeError::Damaged(detail) => Error::Manifest { object: format!("{}/{path}", run_root.url()), detail },
        DecodeError::Unsupported(detail) => Error::Unsupported { object: format!("{}/{path}", run_root.url()), detail },
    };
    let mut start = run_root.read(path, Some(0..size.min(HEAD_BYTES))).await?;
    let needed = head_bytes(&start).map_err(failed)?;
    if needed > start.len() as u64 && needed <= size {
        start = run_root.read(path, Some(0..needed)).await?;
    }
    decode_head(&start).map(Arc::new).map_err(failed)
}
