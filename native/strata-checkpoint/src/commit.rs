//! The commit: every object durable, then the manifest, then `.metadata`, then the superseded objects.

mod merge;

use std::collections::{BTreeSet, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use strata_io::{Error as IoError, ObjectInfo, PutMode, Store, pending_uploads};

pub use self::merge::Promises;
use self::merge::merge;
use crate::base::{Base, newest_generation};
use crate::collect::{Before, FOLDERS, collect};
use crate::item::Object;
use crate::manifest::{DecodeError, FOLDER, Manifest, ManifestName, decode, encode_with};
use crate::open::{MetadataState, RETIRED, marked, metadata_name, metadata_state, metadata_tail, or_empty};
use crate::record::Records;
use crate::run::catalog::{State, folder_of};
use crate::run::{RunInfo, model_hash};
use crate::save::discard;
use crate::servable::INDEX_NAME;
use crate::stock_pickle::{StockParts, seal, stock_pickle};
use crate::{Error, Result, servable};

/// Numbers of manifests of one generation. Those of a later one are higher, whatever has been removed since: a name that
/// was used twice would be removed for the old one by a run that was replaced in the middle of its retention.
const GENERATION_BITS: u32 = 20;

/// What is to be committed.
#[derive(Debug)]
pub struct Commit<'a> {
    /// Of every rank that wrote.
    pub records: Records,
    /// What state_dict_metadata promises.
    pub promises: Promises,
    /// The planner's data, one byte of encoding first.
    pub planner_data: Vec<u8>,
    /// What the new `.metadata` says beside the manifest; None if stock cannot read what is saved. There is none either
    /// if a payload is encoded.
    pub stock: Option<StockParts>,
    /// Of this save.
    pub save_id: String,
    /// Of the `.metadata` that is there; empty if none.
    pub previous_save_id: String,
    /// The rank, for a save without collectives.
    pub rank: Option<u32>,
    /// Ranks that save.
    pub world_size: u32,
    /// Held by this run; 0 without a run root.
    pub generation: u64,
    /// What a manager says of the checkpoint; its `model_hash` is for the commit to take.
    pub run: Option<RunInfo>,
    /// Where generations are claimed, and where other checkpoints may refer to this one.
    pub run_root: Option<&'a dyn Store>,
}

/// What a commit did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommitStats {
    /// Of the manifest.
    pub number: u64,
    /// Whether the store guarantees that no other commit took the same number.
    pub fenced: bool,
    /// Objects of the checkpoint.
    pub num_objects: u64,
    /// Items of the checkpoint.
    pub num_items: u64,
    /// Sum of the payloads, aliases counted once.
    pub payload_bytes: u64,
    /// Sum of the payloads that stand in other checkpoints, to which this one refers.
    pub referred_bytes: u64,
    /// Sum of the checkpoint's own objects.
    pub own_bytes: u64,
    /// Of the model's content, see [`RunInfo`]; None without a manager or a model.
    pub model_hash: Option<String>,
    /// Superseded objects that were removed.
    pub collected: u64,
    /// What a person should know.
    pub warnings: Vec<String>,
}

/// Publishes what the ranks wrote. A crash after any write leaves the old checkpoint or the new one, whole.
///
/// The manifest is the commit. What fails behind it is a warning, for the checkpoint is the new one; the next save here
/// makes up for it.
///
/// # Errors
/// [`Error::Plan`] if an item is missing or double; [`Error::Io`] or [`Error::Manifest`] if an object is not visible
/// from here or has another size; [`Error::Superseded`], [`Error::StaleGeneration`] if this save lost its right.
/// The objects are removed then, and what was there before still loads. [`Error::Io`] also if `.metadata` cannot be
/// put over a stock one without a save_id: that one still counts then, for readers cannot tell it from a later save.
pub async fn commit(store: &dyn Store, base: &Base, mut commit: Commit<'_>) -> Result<CommitStats> {
    let own = commit.records.objects.iter().filter(|object| object.is_own());
    let written: Vec<String> = own.map(|object| object.name.clone()).collect();
    let (mut stats, before, manifest) = match publish(store, base, &mut commit).await {
        Ok(published) => published,
        Err(Failure::Before(error)) => {
            discard(store, written).await;
            return Err(error);
        }
        Err(Failure::Unknown(error)) => return Err(error),
    };
    let metadata = metadata_name(commit.rank);
    let stock = commit.stock.as_ref().filter(|_| !manifest.is_encoded);
    let index = stock.map(|stock| Bytes::from(seal(stock_pickle(&manifest, stock))));
    if let Err(error) = put_metadata(store, &metadata, index).await {
        if base.foreign_metadata.is_some() && commit.previous_save_id.is_empty() {
            return Err(error.into());
        }
        stats.warnings.push(outdated(&metadata, &error, "stock readers"));
    } else if let Err(error) = put_index(store, &manifest).await {
        stats.warnings.push(outdated(INDEX_NAME, &error, "readers of safetensors"));
    } else if commit.run_root.is_some() && !counts_still(store, &manifest).await.unwrap_or(true) {
        take_back(store, &metadata, &manifest).await;
    } else {
        match collect(store, commit.run_root, &manifest, &before).await {
            Ok(collected) => stats.collected = collected,
            Err(error) => stats.warnings.push(format!("superseded objects stay for now: {error}")),
        }
    }
    Ok(stats)
}

/// Replaces what stock reads by; removes it if stock cannot read what is there now.
async fn put_metadata(store: &dyn Store, name: &str, content: Option<Bytes>) -> strata_io::Result<()> {
    match content {
        Some(content) => store.put(name, content, PutMode::Overwrite).await,
        None => store.delete(name).await,
    }
}

/// Whether `manifest`, which was published, has been neither superseded nor retired since, by a run that took over.
async fn counts_still(store: &dyn Store, manifest: &Manifest) -> Result<bool> {
    let listed = or_empty(store.list(FOLDER).await)?;
    let newest = listed.iter().filter_map(|object| ManifestName::parse(&object.name)).map(|name| name.number).max();
    Ok(newest == Some(manifest.number) && !marked(&listed, RETIRED).any(|id| id == manifest.save_id))
}

/// Removes what others would find a checkpoint by that is not there any more: nobody else would, or know it for ours.
async fn take_back(store: &dyn Store, metadata: &str, manifest: &Manifest) {
    let mut own = Vec::new();
    if let Ok(tail) = metadata_tail(store, metadata).await
        && metadata_state(tail.as_deref(), manifest) == MetadataState::Current
    {
        own.push(metadata);
    }
    if let Some(index) = servable::index(manifest)
        && store.read(INDEX_NAME, None).await.is_ok_and(|found| found == index)
    {
        own.push(INDEX_NAME);
    }
    for name in own {
        if let Err(error) = store.delete(name).await {
            tracing::warn!("{}/{name} stays, and its checkpoint has gone: {error}", store.url());
        }
    }
}

/// Writes what others find safetensors by. That of an earlier save goes with its files, see [`collect`].
async fn put_index(store: &dyn Store, manifest: &Manifest) -> strata_io::Result<()> {
    match servable::index(manifest) {
        Some(index) => store.put(INDEX_NAME, Bytes::from(index), PutMode::Overwrite).await,
        None => Ok(()),
    }
}

/// The old index still names the old objects: nothing is collected.
fn outdated(name: &str, error: &IoError, readers: &str) -> String {
    format!(
        "{name} could not be written: {error}; the checkpoint is committed, but {readers} see the one before it until \
         the next save here"
    )
}

/// Whether the manifest may have been published.
enum Failure {
    Before(Error),
    Unknown(Error),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Before(error.into())
    }
}

async fn publish(
    store: &dyn Store,
    base: &Base,
    commit: &mut Commit<'_>,
) -> Result<(CommitStats, Before, Manifest), Failure> {
    let referred_bytes = commit.records.referred_bytes;
    let parents = std::mem::take(&mut commit.records.parents);
    let (manifest, file) = manifest_of(store.url(), base, commit)?;
    let before = look_around(store).await?;
    // The root was listed before the manifests: objects that are missing because a newer save has collected them come
    // with that save's manifest.
    if let Some(number) = newer_commit(&before, &manifest) {
        return Err(Error::Superseded { url: store.url().to_owned(), number }.into());
    }
    check_objects(store.url(), &manifest, &before.listed)?;
    check_referred(store, &manifest).await?;
    let fenced = store.honours_create().await?;
    let name = ManifestName { number: manifest.number, rank: commit.rank }.path();
    if !fenced && store.size(&name).await.is_ok() {
        return Err(superseded(store, &manifest).into());
    }
    check_right(commit, &parents).await?;
    put_manifest(store, &name, &manifest, file).await?;

    let mut stats = stats_of(&manifest, fenced, referred_bytes);
    // A run that takes over claims its generation before it looks what there is, and retention looks for references
    // after it has put its tombstones: either they have seen this manifest, or this sees theirs.
    match check_right(commit, &parents).await {
        Ok(()) => {}
        Err(error @ (Error::StaleGeneration { .. } | Error::Io(IoError::NotFound { .. }))) => {
            return Err(match store.delete(&name).await {
                Ok(()) => Failure::Before(error),
                Err(_) => Failure::Unknown(error),
            });
        }
        Err(error) => {
            stats.warnings.push(format!("whether another run has taken over could not be looked up: {error}"));
        }
    }
    if !fenced {
        let url = store.url();
        stats.warnings.push(format!("{url} ignores create-only writes: two saves to it at once are not kept apart"));
    }
    Ok((stats, before, manifest))
}

/// The manifest of what was written, and its file.
fn manifest_of(url: &str, base: &Base, commit: &mut Commit<'_>) -> Result<(Manifest, Bytes)> {
    let (merged, items) = merge(std::mem::take(&mut commit.records), std::mem::take(&mut commit.promises))?;
    let manifest = Manifest {
        save_id: commit.save_id.clone(),
        previous_save_id: commit.previous_save_id.clone(),
        planner_data: commit.planner_data.clone(),
        number: (base.number + 1).max(commit.generation << GENERATION_BITS),
        created_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
        world_size: commit.world_size,
        rank: commit.rank,
        generation: commit.generation,
        run: commit.run.clone().map(|run| RunInfo { model_hash: model_hash(items.iter()), ..run }),
        ..merged
    };
    let file = Bytes::from(encode_with(&manifest, items.iter()));
    drop(items);
    // What is put down is what was read back; its items are looked up in the file from here on.
    let manifest = decode(&file).map_err(|fault| unreadable(url, fault))?;
    Ok((manifest, file))
}

fn stats_of(manifest: &Manifest, fenced: bool, referred_bytes: u64) -> CommitStats {
    CommitStats {
        number: manifest.number,
        fenced,
        num_objects: manifest.objects.len() as u64,
        num_items: manifest.items.len() as u64,
        payload_bytes: manifest.payload_bytes,
        referred_bytes,
        own_bytes: manifest.own_objects().map(|object| object.size).sum(),
        model_hash: manifest.run.as_ref().and_then(|run| run.model_hash.clone()),
        ..CommitStats::default()
    }
}

/// Everything at the place, in the folders that we know.
async fn look_around(store: &dyn Store) -> Result<Before> {
    let mut listed = Vec::new();
    for folder in FOLDERS {
        listed.extend(or_empty(store.list(folder).await)?);
    }
    let uploads = or_empty(pending_uploads(store).await)?;
    let open_uploads = store.open_uploads().await.unwrap_or_else(|error| {
        tracing::warn!(%error, "uploads that dead processes have begun are not looked for");
        Vec::new()
    });
    Ok(Before { listed, uploads, open_uploads })
}

/// Number of a manifest that took the place of `manifest`, if there is one.
fn newer_commit(before: &Before, manifest: &Manifest) -> Option<u64> {
    let names = before.listed.iter().filter_map(|object| ManifestName::parse(&object.name));
    let competes = |name: &ManifestName| manifest.rank.is_none() || name.rank.is_none() || name.rank == manifest.rank;
    names.filter(|name| name.number >= manifest.number && competes(name)).map(|name| name.number).max()
}

fn check_objects(url: &str, manifest: &Manifest, listed: &[ObjectInfo]) -> Result<()> {
    let sizes: HashMap<&str, u64> = listed.iter().map(|object| (object.name.as_str(), object.size)).collect();
    for object in manifest.own_objects() {
        let missing = ": a rank wrote it, but the planning rank does not see it; do all ranks share this place?";
        check_size(format!("{url}/{}", object.name), object.size, sizes.get(object.name.as_str()), missing)?;
    }
    Ok(())
}

/// Looks for what other checkpoints hold, so that no collection since has left a hole in this one.
async fn check_referred(store: &dyn Store, manifest: &Manifest) -> Result<()> {
    for (reference, (checkpoint_id, _)) in manifest.references.iter().enumerate() {
        let sibling = store.sibling(checkpoint_id)?;
        let listed = or_empty(sibling.list("").await)?;
        let sizes: HashMap<&str, u64> = listed.iter().map(|object| (object.name.as_str(), object.size)).collect();
        let is_there = |object: &&Object| object.reference == Some(reference as u32);
        for object in manifest.objects.iter().filter(is_there) {
            let (path, found) = (format!("{}/{}", sibling.url(), object.name), sizes.get(object.name.as_str()));
            check_size(path, object.size, found, ": this save refers to it, and it is not there any more")?;
        }
    }
    Ok(())
}

/// Looks whether this run may commit still, and whether the checkpoints that keep what it refers to are still there.
async fn check_right(commit: &Commit<'_>, parents: &BTreeSet<(String, String)>) -> Result<()> {
    let Some(run_root) = commit.run_root else { return Ok(()) };
    let found = newest_generation(run_root).await?;
    if found != commit.generation {
        let url = run_root.url().to_owned();
        return Err(Error::StaleGeneration { url, found, held: commit.generation });
    }
    for (folder, save_id) in parents {
        let parent = folder_of(run_root, folder).await?;
        let is_there = parent.is_some_and(|listed| {
            matches!(&listed.state, State::Committed(manifest) if manifest.save_id == *save_id)
                && marked(&listed.objects, RETIRED).all(|id| id != save_id)
        });
        if !is_there {
            let detail = ": this save was compared with it, and it has been replaced or removed since".to_owned();
            return Err(IoError::NotFound { object: format!("{}/{folder}", run_root.url()), detail }.into());
        }
    }
    Ok(())
}

fn check_size(object: String, expected: u64, found: Option<&u64>, missing: &str) -> Result<()> {
    match found {
        Some(found) if *found == expected => Ok(()),
        Some(found) => {
            let detail = format!("expected {expected} bytes as its rank wrote, found {found}");
            Err(Error::Manifest { object, detail })
        }
        None => Err(IoError::NotFound { object, detail: missing.to_owned() }.into()),
    }
}

async fn put_manifest(store: &dyn Store, name: &str, manifest: &Manifest, file: Bytes) -> Result<(), Failure> {
    let error = match store.put(name, file, PutMode::Create).await {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    // The answer may have been lost after the write landed: what is there now decides, not the error.
    match store.read(name, None).await.map(|bytes| decode(&bytes)) {
        Ok(Ok(found)) if found.save_id == manifest.save_id => Ok(()),
        Ok(_) if matches!(error, IoError::AlreadyExists { .. }) => Err(superseded(store, manifest).into()),
        Err(IoError::NotFound { .. }) => Err(error.into()),
        _ => Err(Failure::Unknown(error.into())),
    }
}

/// A state that has a name or a shape beyond what readers accept: it is not committed.
fn unreadable(url: &str, fault: DecodeError) -> Error {
    match fault {
        DecodeError::Damaged(detail) | DecodeError::Unsupported(detail) => {
            Error::Plan(format!("{url}: a manifest of it could not be read: {detail}"))
        }
    }
}

fn superseded(store: &dyn Store, manifest: &Manifest) -> Error {
    Error::Superseded { url: store.url().to_owned(), number: manifest.number }
}
