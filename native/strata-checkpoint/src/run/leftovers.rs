//! What is left in a run's folders of checkpoints that have gone and of saves that never ended: which objects (pure), and
//! their removal.

use std::collections::HashSet;
use std::time::{Duration, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{ObjectInfo, Store, UPLOADS_FOLDER, discard_upload, pending_uploads};

use super::catalog::{ABANDONED, Listed, PIN, QUARANTINED, State, VERIFIED};
use crate::Result;
use crate::collect::{FOLDERS, LEASES_FOLDER};
use crate::manifest::{FOLDER, ManifestName};
use crate::names::is_our_data_object;
use crate::open::{RETIRED, carries, marked, metadata_tail, or_empty};

/// Objects by which it was tried whether a store honours create-only writes.
const PROBE: &str = "probe-";

/// What stock reads by.
const METADATA: &str = ".metadata";

/// Deletes at a time.
const CONCURRENCY: usize = 16;

/// When it is, and how old an object must be that it cannot be of a save in flight.
pub(super) struct Clock {
    /// Seconds since 1970.
    pub now: u64,
    pub orphan_age: Duration,
}

impl Clock {
    fn is_old(&self, at: u64) -> bool {
        self.now.saturating_sub(at) >= self.orphan_age.as_secs()
    }
}

/// What nobody needs of the folder `listed`, of which `needed` are in use, in the order in which it is to go. Pure.
///
/// Of a checkpoint that retention took, everything; its manifest and its tombstone, which tell what its data is, once no
/// other checkpoint refers to any of that. Else what is so old that it cannot be of a save in flight.
pub(super) fn left_over<'a>(listed: &'a Listed, needed: Option<&HashSet<&str>>, clock: &Clock) -> Vec<Left<'a>> {
    let is_read = |object: &ObjectInfo| expiry(&object.name).is_some_and(|at| at > clock.now);
    if matches!(listed.state, State::Foreign | State::Unreadable(_)) || listed.objects.iter().any(is_read) {
        return Vec::new();
    }
    // Whoever took hold of a checkpoint before it was gone keeps it.
    let tombstones = marked(&listed.objects, RETIRED).filter(|id| !listed.save_ids.contains(*id)).collect();
    let is_needed = |object: &ObjectInfo| needed.is_some_and(|needed| needed.contains(&*object.name));
    let folder = Folder { listed, clock, tombstones };
    let still_needed = listed.objects.iter().any(|object| is_needed(object) && folder.is_retired(&object.name));
    let left = listed.objects.iter().filter_map(|object| {
        let turn = folder.turn(object).filter(|_| !is_needed(object))?;
        (turn < Turn::Manifest || !still_needed).then_some((turn, object))
    });
    let mut left: Vec<Left<'a>> = left.collect();
    left.sort_by_key(|(turn, _)| *turn);
    left
}

/// An object that is to go, and when.
pub(super) type Left<'a> = (Turn, &'a ObjectInfo);

/// What goes before what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// What stock reads by, and manifests that were superseded: they must not outlive what they name.
    Index,
    Data,
    /// Marks, leases, records.
    Mark,
    /// Tells what the data of a retired checkpoint is.
    Manifest,
    /// Tells that a checkpoint is retired.
    Tombstone,
}

struct Folder<'a> {
    listed: &'a Listed,
    clock: &'a Clock,
    /// Saves that retention took.
    tombstones: HashSet<&'a str>,
}

impl Folder<'_> {
    /// When `object` goes, if nobody refers to it; None if it stays.
    fn turn(&self, object: &ObjectInfo) -> Option<Turn> {
        let name = &*object.name;
        let is_old = self.clock.is_old(object.modified_at);
        let is_uncommitted = self.listed.is_uncommitted();
        let (turn, goes) = match name.strip_prefix(FOLDER) {
            None if self.is_retired(name) => (Turn::Data, true),
            // Without a tombstone it would be of somebody else's checkpoint.
            None if is_stock_index(name) => (Turn::Index, is_uncommitted && !self.tombstones.is_empty()),
            None => (Turn::Data, is_our_data_object(name) && is_old),
            Some(_) if self.is_retired(name) => (Turn::Manifest, true),
            Some(_) if ManifestName::parse(name).is_some() => {
                (Turn::Index, self.listed.outdated.contains(&object.name) && is_old)
            }
            Some(mark) => match mark.strip_prefix(RETIRED) {
                // One of what stays is of a sweep that found it held, and died.
                Some(id) if self.tombstones.contains(id) => (Turn::Tombstone, true),
                Some(_) => (Turn::Mark, true),
                None => (Turn::Mark, self.is_left_mark(name, mark, is_old)),
            },
        };
        goes.then_some(turn)
    }

    fn is_left_mark(&self, name: &str, mark: &str, is_old: bool) -> bool {
        if name.starts_with(LEASES_FOLDER) {
            return expiry(name).is_some();
        }
        let of = [VERIFIED, QUARANTINED, ABANDONED].iter().find_map(|kind| mark.strip_prefix(kind));
        if let Some(id) = of {
            // Where retention took the last checkpoint, those of the ones that it had replaced go with it.
            let is_last = self.listed.is_uncommitted() && !self.tombstones.is_empty();
            return self.tombstones.contains(id) || ((is_last || is_old) && !self.listed.save_ids.contains(id));
        }
        let is_pin = mark.starts_with(PIN) && self.listed.is_uncommitted();
        is_old && (is_pin || name.starts_with(UPLOADS_FOLDER) || mark.starts_with(PROBE))
    }

    fn is_retired(&self, name: &str) -> bool {
        let is_data = is_our_data_object(name);
        self.listed.retired.contains(name)
            || (is_data && self.tombstones.iter().any(|id| name.contains(&format!(".{id}."))))
    }
}

fn is_stock_index(name: &str) -> bool {
    name == METADATA || (name.starts_with("__") && name.ends_with(".metadata")) || name.ends_with(".index.json")
}

/// Removes `left` from the folder `store`, one kind after the other, and the folder if nothing stays in it. Tells
/// `removed` of each.
pub(super) async fn remove_left(
    store: &dyn Store,
    left: &[Left<'_>],
    is_empty: bool,
    mut removed: impl FnMut(&ObjectInfo) + Send,
) -> Result<()> {
    let is_left = |name: &str| left.iter().any(|(_, object)| object.name == name);
    if left.iter().any(|(_, object)| object.name.starts_with(UPLOADS_FOLDER)) {
        for upload in or_empty(pending_uploads(store).await)?.iter().filter(|upload| is_left(&upload.record)) {
            discard_upload(store, upload).await?;
        }
    }
    let tombstones: Vec<&str> =
        left.iter().filter_map(|(_, object)| object.name.strip_prefix(FOLDER)?.strip_prefix(RETIRED)).collect();
    // A save that came after could not put its own: without the tombstone this one would pass for stock's.
    if !tombstones.is_empty() && !is_left(METADATA) {
        let tail = metadata_tail(store, METADATA).await?;
        if tail.is_some_and(|tail| tombstones.iter().any(|id| carries(&tail, id))) {
            store.delete(METADATA).await?;
        }
    }
    for of_kind in left.chunk_by(|(turn, _), (next, _)| turn == next) {
        let deletes: Vec<_> = of_kind.iter().map(|(_, object)| store.delete(&object.name)).collect();
        stream::iter(deletes).buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
        of_kind.iter().for_each(|(_, object)| removed(object));
    }
    if is_empty {
        for folder in FOLDERS {
            store.sweep(folder).await?;
        }
        store.remove_empty().await;
    }
    Ok(())
}

/// Ends uploads of data that are too old to be of a save in flight and of which no record tells: whoever began them died
/// with the store's answer.
pub(super) async fn end_unrecorded(run_root: &dyn Store, clock: &Clock) -> Result<()> {
    for upload in run_root.open_uploads().await? {
        let began_at = upload.began_at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let Some((folder, name)) = upload.name.split_once('/') else { continue };
        if !is_our_data_object(name) || !clock.is_old(began_at) {
            continue;
        }
        let recorded = or_empty(pending_uploads(&*run_root.child(folder)?).await)?;
        if recorded.iter().all(|recorded| recorded.upload_id != upload.upload_id) {
            run_root.abort_upload(&upload.name, &upload.upload_id).await?;
        }
    }
    Ok(())
}

/// When a lease ends, in seconds since 1970, if `name` is one's.
fn expiry(name: &str) -> Option<u64> {
    name.strip_prefix(LEASES_FOLDER)?.split('-').next()?.parse().ok()
}
