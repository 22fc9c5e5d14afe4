//! Which state is committed at a place: the newest valid manifest, or stock's `.metadata`.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use strata_io::{Error as IoError, ObjectInfo, Store};

use crate::item::Object;
use crate::manifest::{DecodeError, FOLDER, Key, Manifest, ManifestName, RANKS_FOLDER, decode};
use crate::names::is_our_data_object;
use crate::{Error, Result};

/// Where the save_id stands: torch pickles storage_meta near the end of `.metadata`.
const METADATA_TAIL_BYTES: u64 = 4 << 10;

/// A place that changes under every look is being saved to without a pause, which nobody does.
pub(crate) const OPEN_TRIES: u32 = 4;

/// Mark of a save that retention takes away: from then on it is out of sight, whole or not. Its save_id follows.
pub(crate) const RETIRED: &str = "retired-";

/// Who committed the state that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// We did: the manifest is the truth.
    Strata,
    /// Stock torch did: the content of `.metadata`, to be unpickled by the caller.
    Stock(Bytes),
    /// Nobody: files of plain tensors that the caller has indexed, such as safetensors.
    Plain,
}

/// A committed state, open for reading.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Who committed it.
    pub source: Source,
    /// Ours, or what the caller made of `.metadata`.
    pub manifest: Manifest,
    /// The newest manifest of ours, where `.metadata` is the truth and does not know it.
    pub beside: Option<Box<Beside>>,
    /// What a person should know, such as a torn manifest that was passed over.
    pub warnings: Vec<String>,
}

/// A manifest that counts only if `.metadata` turns out not to be of a later save.
#[derive(Debug, Clone)]
pub struct Beside {
    /// The manifest.
    pub manifest: Manifest,
    /// Whether a newer manifest is there, and damaged.
    pub is_outdated: bool,
}

impl Beside {
    /// Whether every object is this manifest's, and there are any.
    pub(crate) fn holds_all(&self, objects: &[Object]) -> bool {
        let names: HashSet<&str> = self.manifest.objects.iter().map(|object| object.name.as_str()).collect();
        !objects.is_empty() && objects.iter().all(|object| names.contains(object.name.as_str()))
    }
}

/// How `.metadata` relates to a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetadataState {
    Absent,
    /// It carries the manifest's save_id.
    Current,
    /// It is the one that the manifest replaces: a save ended between the two writes.
    Stale,
    /// Stock saved here after us.
    Foreign,
}

/// Opens the newest committed state at `store`.
///
/// # Errors
/// [`Error::NotFound`] if nothing is committed; [`Error::Manifest`] if what is there cannot be used.
pub async fn open(store: &dyn Store, rank: Option<u32>) -> Result<Checkpoint> {
    let mut foreign = None;
    for _ in 1..OPEN_TRIES {
        match look(store, rank, foreign.as_ref()).await {
            Ok(Look::Found(checkpoint)) => return Ok(*checkpoint),
            Ok(Look::Foreign(found)) => foreign = Some(found),
            // Listed, then superseded and collected before it was read.
            Err(Error::Io(IoError::NotFound { .. })) => {}
            Err(error) => return Err(error),
        }
    }
    match look(store, rank, foreign.as_ref()).await? {
        Look::Found(checkpoint) => Ok(*checkpoint),
        Look::Foreign(_) => {
            let detail = format!("saves were committed here during each of {OPEN_TRIES} looks");
            Err(Error::NotFound { url: store.url().to_owned(), detail })
        }
    }
}

/// What one look at a place shows.
enum Look {
    Found(Box<Checkpoint>),
    /// `.metadata` knows nothing of the newest manifest: stock saved later, or we did since the listing.
    Foreign(Foreign),
}

/// The number of a manifest, and the end of a `.metadata` that does not know it.
type Foreign = (u64, Option<Bytes>);

/// `foreign`: what the last look found; if nothing has changed since, it was not we who saved.
async fn look(store: &dyn Store, rank: Option<u32>, foreign: Option<&Foreign>) -> Result<Look> {
    let found = |checkpoint| Ok(Look::Found(Box::new(checkpoint)));
    let Newest { manifest, incomplete, is_outdated, retired, warnings } = newest(store, rank).await?;
    let metadata = metadata_name(rank);
    let tail = metadata_tail(store, &metadata).await?;
    // A rank's index of a save that not all ranks have committed: nobody may take it for stock's, or the ranks load
    // a mix.
    let is_incomplete = tail.as_deref().is_some_and(|tail| incomplete.iter().any(|id| carries(tail, id)));
    // Nor may that of a checkpoint that retention took be taken for stock's.
    let is_retired = tail.as_deref().is_some_and(|tail| retired.iter().any(|id| carries(tail, id)));
    if let Some(manifest) = manifest {
        return match metadata_state(tail.as_deref(), &manifest) {
            MetadataState::Foreign if !is_incomplete && !is_retired => {
                let now = (manifest.number, tail);
                if foreign != Some(&now) {
                    return Ok(Look::Foreign(now));
                }
                let checkpoint = stock(store, &metadata, warnings).await?;
                match &checkpoint.source {
                    Source::Stock(bytes) if now.1.as_ref().is_some_and(|tail| bytes.ends_with(tail)) => {
                        let beside = Some(Box::new(Beside { manifest, is_outdated }));
                        found(Checkpoint { beside, ..checkpoint })
                    }
                    _ => Ok(Look::Foreign(now)),
                }
            }
            _ => found(Checkpoint { source: Source::Strata, manifest, beside: None, warnings }),
        };
    }
    if is_retired {
        let detail = "the retention of its run is removing what was here".to_owned();
        return Err(Error::NotFound { url: store.url().to_owned(), detail });
    }
    if is_incomplete {
        return Err(Error::NotFound { url: store.url().to_owned(), detail: warnings.join("; ") });
    }
    if rank.is_none()
        && let Some(world_size) = complete_ranks(store, 0).await?
    {
        let detail = format!(
            "{world_size} ranks saved here without collectives (use_collectives=False), each a part of its own: name one, as with \
             strata verify --rank 0"
        );
        return Err(Error::NotFound { url: store.url().to_owned(), detail });
    }
    found(stock(store, &metadata, warnings).await?)
}

async fn stock(store: &dyn Store, metadata: &str, warnings: Vec<String>) -> Result<Checkpoint> {
    match store.read(metadata, None).await {
        Ok(bytes) => {
            let (source, manifest) = (Source::Stock(bytes), Manifest::default());
            Ok(Checkpoint { source, manifest, beside: None, warnings })
        }
        Err(IoError::NotFound { .. }) => {
            let detail = format!("found neither a manifest in {FOLDER} nor {metadata}");
            Err(Error::NotFound { url: store.url().to_owned(), detail })
        }
        Err(error) => Err(error.into()),
    }
}

/// Stock's index of the whole checkpoint, or of one rank's part.
pub(crate) fn metadata_name(rank: Option<u32>) -> String {
    rank.map_or(".metadata".to_owned(), |rank| format!("__{rank}.metadata"))
}

/// What the manifests at a place say.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    /// The newest valid one, of ranks on their own: of which all ranks have that number.
    pub manifest: Option<Manifest>,
    /// save_ids of newer ones that not all ranks have.
    pub incomplete: Vec<String>,
    /// Whether a newer one is damaged.
    pub is_outdated: bool,
    /// save_ids of those that retention is taking away.
    pub retired: Vec<String>,
    /// What was passed over.
    pub warnings: Vec<String>,
}

/// Looks for the newest valid manifest.
pub(crate) async fn newest(store: &dyn Store, rank: Option<u32>) -> Result<Newest> {
    for _ in 1..OPEN_TRIES {
        match newest_listed(store, rank).await {
            // Listed, then superseded and collected before it was read.
            Err(Error::Io(IoError::NotFound { .. })) => {}
            answer => return answer,
        }
    }
    newest_listed(store, rank).await
}

async fn newest_listed(store: &dyn Store, rank: Option<u32>) -> Result<Newest> {
    let listed = or_empty(store.list(if rank.is_some() { RANKS_FOLDER } else { FOLDER }).await)?;
    let all = sorted_names(&listed);
    let retired = marked(&listed, RETIRED).map(str::to_owned).collect();
    let mut found = Newest { retired, ..Newest::default() };
    let mut first_fault = None;
    for name in all.iter().rev().filter(|name| name.rank == rank) {
        let object = format!("{}/{}", store.url(), name.path());
        match decode(&store.read(&name.path(), None).await?) {
            Ok(manifest) if found.retired.contains(&manifest.save_id) => {}
            Ok(manifest) if rank.is_none() => {
                let superseded = complete_ranks(store, manifest.number).await?.is_some();
                found.manifest = (!superseded).then_some(manifest);
                return Ok(found);
            }
            Ok(manifest) => {
                let missing = missing_ranks(&all, name.number, manifest.world_size);
                if missing.is_empty() {
                    found.manifest = Some(manifest);
                    return Ok(found);
                }
                let world_size = manifest.world_size;
                found.warnings.push(format!("{object}: ranks {missing:?} of {world_size} have not committed"));
                found.incomplete.push(manifest.save_id);
            }
            Err(DecodeError::Unsupported(detail)) => return Err(Error::Unsupported { object, detail }),
            Err(DecodeError::Damaged(detail)) => {
                found.is_outdated = true;
                found.warnings.push(format!("{object}: {detail}; passed over"));
                first_fault.get_or_insert(Error::Manifest { object, detail });
            }
        }
    }
    // A torn manifest beside no older one is damage, not an interrupted commit: those leave the old one in place.
    first_fault.map_or(Ok(found), Err)
}

/// What the marks of a kind among `objects` are of.
pub(crate) fn marked<'a>(objects: &'a [ObjectInfo], mark: &'a str) -> impl Iterator<Item = &'a str> {
    objects.iter().filter_map(move |object| object.name.strip_prefix(FOLDER)?.strip_prefix(mark))
}

/// All manifests at a place, sorted by number.
pub(crate) async fn manifest_names(store: &dyn Store, of_ranks: bool) -> Result<Vec<ManifestName>> {
    let folder = if of_ranks { RANKS_FOLDER } else { FOLDER };
    Ok(sorted_names(&or_empty(store.list(folder).await)?))
}

fn sorted_names(listed: &[ObjectInfo]) -> Vec<ManifestName> {
    let mut names: Vec<ManifestName> = listed.iter().filter_map(|object| ManifestName::parse(&object.name)).collect();
    names.sort();
    names
}

/// A place or a folder that is not there holds nothing.
pub(crate) fn or_empty<T>(listed: strata_io::Result<Vec<T>>) -> Result<Vec<T>> {
    match listed {
        Err(IoError::NotFound { .. }) => Ok(Vec::new()),
        listed => Ok(listed?),
    }
}

/// World size of the newest complete set of rank manifests above `number`, if there is one.
pub(crate) async fn complete_ranks(store: &dyn Store, number: u64) -> Result<Option<u32>> {
    let all = manifest_names(store, true).await?;
    for name in all.iter().rev().filter(|name| name.number > number && name.rank == Some(0)) {
        let manifest = match decode(&store.read(&name.path(), None).await?) {
            Ok(manifest) => manifest,
            Err(DecodeError::Damaged(_)) => continue,
            Err(DecodeError::Unsupported(detail)) => {
                return Err(Error::Unsupported { object: format!("{}/{}", store.url(), name.path()), detail });
            }
        };
        if missing_ranks(&all, name.number, manifest.world_size).is_empty() {
            return Ok(Some(manifest.world_size));
        }
    }
    Ok(None)
}

/// Ranks of `world_size` that have no manifest with this number.
pub(crate) fn missing_ranks(all: &[ManifestName], number: u64, world_size: u32) -> Vec<u32> {
    // One rank more than there are manifests suffices to find one missing, however large the file says the world is.
    let ranks = world_size.min(u32::try_from(all.len()).unwrap_or(u32::MAX).saturating_add(1));
    (0..ranks).filter(|rank| !all.contains(&ManifestName { number, rank: Some(*rank) })).collect()
}

/// The end of a `.metadata`, where its save_id stands; None if there is no such file.
pub(crate) async fn metadata_tail(store: &dyn Store, name: &str) -> Result<Option<Bytes>> {
    let size = match store.size(name).await {
        Err(IoError::NotFound { .. }) => return Ok(None),
        size => size?,
    };
    Ok(Some(store.read(name, Some(size.saturating_sub(METADATA_TAIL_BYTES)..size)).await?))
}

pub(crate) fn carries(tail: &[u8], id: &str) -> bool {
    !id.is_empty() && tail.windows(id.len()).any(|window| window == id.as_bytes())
}

/// How the `.metadata` with this end relates to `manifest`.
pub(crate) fn metadata_state(tail: Option<&[u8]>, manifest: &Manifest) -> MetadataState {
    match tail {
        None => MetadataState::Absent,
        Some(tail) if carries(tail, &manifest.save_id) => MetadataState::Current,
        Some(tail) if carries(tail, &manifest.previous_save_id) => MetadataState::Stale,
        Some(_) => MetadataState::Foreign,
    }
}

impl Checkpoint {
    /// The checkpoint without its `.metadata`, which `reason` says cannot be read: the manifest beside it, if no other
    /// save can have written that `.metadata`. See `docs/design/2026-11-28-unreadable-metadata.md`.
    ///
    /// # Errors
    /// [`Error::Manifest`] if there is no manifest, or stock may have saved after it; what the store says.
    pub async fn without_metadata(mut self, store: &dyn Store, reason: &str) -> Result<Self> {
        let fault = |detail: String| Error::Manifest { object: store.url().to_owned(), detail };
        let Some(Beside { manifest, is_outdated }) = self.beside.take().map(|beside| *beside) else {
            return Err(fault(reason.to_owned()));
        };
        let number = manifest.number;
        let undecided = |why: String| {
            fault(format!(
                "{reason}; {why}, so that nothing tells whether manifest {number} is the newest state: restore \
                 .metadata, or remove it to read that manifest"
            ))
        };
        if is_outdated {
            return Err(undecided("a newer manifest is damaged".to_owned()));
        }
        let listed = store.list("").await?;
        let is_foreign = |name: &str| name.ends_with(".distcp") && !is_our_data_object(name);
        if let Some(object) = listed.iter().find(|object| is_foreign(&object.name)) {
            return Err(undecided(format!("{} is not of a save of ours", object.name)));
        }
        self.keep(manifest, reason.to_owned());
        Ok(self)
    }

    /// Takes `manifest` for the newest state although `.metadata` does not know it.
    pub(crate) fn keep(&mut self, manifest: Manifest, reason: String) {
        let number = manifest.number;
        self.warnings.push(format!("{reason}; manifest {number} is read, and the next save here mends .metadata"));
        self.manifest = manifest;
        self.source = Source::Strata;
    }

    /// The rows of these names and chunks; names of one payload have the row of the first of them.
    pub fn rows(&self, keys: &[Key<'_>]) -> Vec<Option<usize>> {
        let mut firsts: HashMap<(u32, u64), usize> = HashMap::new();
        let mut first = |row: usize| {
            let item = &self.manifest.items[row];
            let first = *firsts.entry((item.object, item.item_offset)).or_insert(row);
            // The same place is not enough: an index may describe it in two ways.
            if self.manifest.items[first].is_stored_as(item) { first } else { row }
        };
        self.manifest.items.rows_of(keys).into_iter().map(|row| row.map(&mut first)).collect()
    }
}
