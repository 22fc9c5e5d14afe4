//! Removing the checkpoints of a run that no policy keeps, and what saves that never ended have left.
//!
//! Mark and sweep over the manifests: an object to which any manifest of the run refers outlives its checkpoint. What
//! makes a checkpoint visible goes first, so that a crash after any delete leaves a checkpoint whole or gone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use strata_io::{ObjectInfo, PutMode, Store, discard_upload, pending_uploads};

use super::catalog::{Listed, State};
use super::retention::{Decision, Facts, Policy, decide};
use crate::base::newest_generation;
use crate::collect::{FOLDERS, LEASES_FOLDER, leased};
use crate::manifest::{FOLDER, ManifestName};
use crate::names::is_our_data_object;
use crate::open::or_empty;
use crate::{Error, Result};

/// Written before a checkpoint goes: what is left of it is not of a save in flight. Its save_id follows.
const RETIRED: &str = ".strata/retired-";

/// Deletes at a time.
const CONCURRENCY: usize = 16;

/// What decides what a sweep removes.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Which checkpoints stay.
    pub policy: Policy,
    /// What no manifest names is removed when it is that old: it may be of a save in flight.
    pub orphan_age: Duration,
    /// Seconds since 1970.
    pub now: u64,
    /// Folders of saves in flight.
    pub in_flight: HashSet<String>,
}

/// What is to become of a run's folders.
#[derive(Debug, Clone, Default)]
pub struct SweepPlan {
    /// Of each committed checkpoint, by folder, ascending by step.
    pub decisions: Vec<(String, Decision)>,
    /// What was not looked at, or stays for now, and why.
    pub notes: Vec<String>,
}

/// What a sweep did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Folders of checkpoints that are gone.
    pub removed: Vec<String>,
    /// Checkpoints that are still there, as [`super::life::Run::retain`] counts them.
    pub num_kept: u64,
    /// Objects that were removed, those of saves that never ended among them.
    pub num_objects: u64,
    /// What these took, in bytes.
    pub freed_bytes: u64,
    /// What stays for now, and why.
    pub notes: Vec<String>,
}

/// What becomes of each checkpoint in `listed`. Pure.
pub fn plan_sweep(listed: &[Listed], rules: &Rules) -> SweepPlan {
    let known = listed.iter().filter_map(|listed| Some((listed, facts(listed)?)));
    // Those that nobody can resume from take nobody's place among the last or the best.
    let (usable, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|(listed, _)| is_usable(listed));
    let facts: Vec<Facts> = usable.iter().map(|(_, facts)| facts.clone()).collect();
    let decisions = decide(&facts, &rules.policy, rules.now);
    let others = others.iter().map(|(listed, facts)| (facts.step, listed.folder.clone(), unusable(listed, facts)));
    let decided = usable.iter().zip(decisions).map(|((listed, facts), d)| (facts.step, listed.folder.clone(), d));
    let mut decisions: Vec<(u64, String, Decision)> = others.chain(decided).collect();
    decisions.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let unreadable = listed.iter().filter_map(|listed| match &listed.state {
        State::Unreadable(fault) => Some(fault.clone()),
        _ => None,
    });
    let decisions = decisions.into_iter().map(|(_, folder, decision)| (folder, decision)).collect();
    SweepPlan { decisions, notes: unreadable.collect() }
}

fn is_usable(listed: &Listed) -> bool {
    !listed.is_quarantined && !listed.is_abandoned
}

/// What becomes of a checkpoint that was found damaged, or left behind.
fn unusable(listed: &Listed, facts: &Facts) -> Decision {
    let damaged = listed.is_quarantined.then(|| "it was found damaged, and is for a person to look at".to_owned());
    match facts.held.clone().or(damaged) {
        Some(because) => Decision { keeps: true, because },
        None => Decision { keeps: false, because: "the run was taken back behind it".to_owned() },
    }
}

/// None for what no manager saved: that is not ours to remove.
fn facts(listed: &Listed) -> Option<Facts> {
    let State::Committed(manifest) = &listed.state else { return None };
    let run = manifest.run.as_ref()?;
    let pinned = listed.pins.first().map(|pin| format!("{pin:?} holds it"));
    Some(Facts {
        step: run.step,
        part: run.checkpoint_type.part(),
        created_at: manifest.created_at,
        metrics: run.metrics.clone(),
        held: pinned,
        is_verified: listed.is_verified,
    })
}

/// Removes what `plan` does not keep. Only for the run that holds `generation` of the root.
///
/// # Errors
/// [`Error::StaleGeneration`] as soon as a newer run has claimed the root; what the store says. What is left then is
/// for the next sweep.
pub async fn sweep(
    run_root: &Arc<dyn Store>,
    listed: &[Listed],
    plan: &SweepPlan,
    rules: &Rules,
    generation: u64,
) -> Result<Swept> {
    let mut swept = Swept { notes: plan.notes.clone(), ..Swept::default() };
    if !plan.notes.is_empty() {
        // It may refer to anything.
        swept.notes.push("nothing is removed while a manifest of the run cannot be read".to_owned());
        return Ok(swept);
    }
    let doomed: Vec<&str> = plan.decisions.iter().filter(|(_, d)| !d.keeps).map(|(folder, _)| &**folder).collect();
    let mut staying: Vec<&Listed> = listed.iter().filter(|l| !doomed.contains(&&*l.folder)).collect();
    let mut going = Vec::new();
    for folder in doomed {
        let found = listed.iter().find(|listed| listed.folder == folder).expect("the plan is of this listing");
        if leased(&*run_root.child(folder)?).await? {
            swept.notes.push(format!("{folder}: a reader holds a lease; it stays for now"));
            staying.push(found);
        } else {
            going.push(found);
        }
    }
    let needed = needed(&staying);
    // Each goes out of sight before any data goes: one that is going may still be referring to another.
    let mut data = Vec::new();
    for listed in going {
        check_generation(&**run_root, generation).await?;
        let place = run_root.child(&listed.folder)?;
        data.push((retire(&*place, listed, &mut swept).await?, place, listed));
        swept.removed.push(listed.folder.clone());
    }
    for (objects, place, listed) in data {
        remove_data(&*place, &objects, listed, &needed, &mut swept).await?;
    }
    for listed in staying {
        if !rules.in_flight.contains(&listed.folder) {
            check_generation(&**run_root, generation).await?;
            tidy(&*run_root.child(&listed.folder)?, listed, &needed, rules, &mut swept).await?;
        }
    }
    Ok(swept)
}

/// Objects by folder that are in use by what stays.
type Needed = HashMap<String, HashSet<String>>;

fn needed(staying: &[&Listed]) -> Needed {
    let mut needed = Needed::new();
    for listed in staying {
        for (folder, name) in &listed.refers_to {
            needed.entry(folder.clone()).or_default().insert(name.clone());
        }
        if let State::Committed(manifest) = &listed.state {
            let own = manifest.objects.iter().filter(|object| object.reference.is_none());
            needed.entry(listed.folder.clone()).or_default().extend(own.map(|object| object.name.clone()));
        }
    }
    needed
}

async fn check_generation(run_root: &dyn Store, held: u64) -> Result<()> {
    let found = newest_generation(run_root).await?;
    if found != held {
        return Err(Error::StaleGeneration { url: run_root.url().to_owned(), found, held });
    }
    Ok(())
}

/// Takes the checkpoint in `store` out of sight: it cannot be opened any more. Returns what is left of it.
async fn retire(store: &dyn Store, listed: &Listed, swept: &mut Swept) -> Result<Vec<ObjectInfo>> {
    store.put(&tombstone(listed), Bytes::new(), PutMode::Overwrite).await?;
    // What stock reads by goes before what we read by: until the last manifest is gone it is whole.
    let rank = |object: &ObjectInfo| match ManifestName::parse(&object.name) {
        Some(_) => 1,
        None if is_stock_index(&object.name) => 0,
        None => 2,
    };
    let mut objects = all_objects(store).await?;
    objects.sort_by_key(|object| (rank(object), object.name.clone()));
    let left = objects.split_off(objects.partition_point(|object| rank(object) < 2));
    for object in &objects {
        store.delete(&object.name).await?;
        swept.count(object);
    }
    Ok(left)
}

/// Removes from `store` what a checkpoint that was retired left, `objects`, but for what others need.
async fn remove_data(
    store: &dyn Store,
    objects: &[ObjectInfo],
    listed: &Listed,
    needed: &Needed,
    swept: &mut Swept,
) -> Result<()> {
    let State::Committed(manifest) = &listed.state else { unreachable!("only what is committed is retired") };
    let named: HashSet<&str> = manifest.objects.iter().map(|object| object.name.as_str()).collect();
    let is_needed = |name: &str| needed.get(&listed.folder).is_some_and(|names| names.contains(name));
    let is_data = |name: &str| is_our_data_object(name) || named.contains(name);
    let data: Vec<&ObjectInfo> = objects.iter().filter(|o| is_data(&o.name) && !is_needed(&o.name)).collect();
    remove_all(store, &data, swept).await?;
    if !objects.iter().any(|object| is_needed(&object.name)) {
        let marks: Vec<&ObjectInfo> = objects.iter().filter(|object| object.name.starts_with(FOLDER)).collect();
        remove_all(store, &marks, swept).await?;
        store.remove_empty().await;
    }
    Ok(())
}

fn tombstone(listed: &Listed) -> String {
    let State::Committed(manifest) = &listed.state else { unreachable!("only what is committed is retired") };
    format!("{RETIRED}{}", manifest.save_id)
}

fn is_stock_index(name: &str) -> bool {
    name == ".metadata" || (name.starts_with("__") && name.ends_with(".metadata")) || name.ends_with(".index.json")
}

/// Removes what saves that ended long ago, and checkpoints that have gone, left in the folder `store`.
async fn tidy(store: &dyn Store, listed: &Listed, needed: &Needed, rules: &Rules, swept: &mut Swept) -> Result<()> {
    if matches!(listed.state, State::Foreign | State::Unreadable(_)) {
        return Ok(());
    }
    for upload in or_empty(pending_uploads(store).await)? {
        let began_at = upload.began_at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if is_old(began_at, rules) {
            discard_upload(store, &upload).await?;
        }
    }
    let objects = all_objects(store).await?;
    let retired: Vec<&str> = objects.iter().filter_map(|object| object.name.strip_prefix(RETIRED)).collect();
    let is_needed = |name: &str| needed.get(&listed.folder).is_some_and(|names| names.contains(name));
    let is_retired = |name: &str| retired.iter().any(|save_id| name.contains(&format!(".{save_id}.")));
    let is_left = |object: &&ObjectInfo| {
        let data = is_our_data_object(&object.name) && !is_needed(&object.name);
        data && (is_retired(&object.name) || is_old(object.modified_at, rules))
    };
    let left: Vec<&ObjectInfo> = objects.iter().filter(is_left).collect();
    remove_all(store, &left, swept).await?;
    let stays = |name: &str| is_our_data_object(name) && !left.iter().any(|object| object.name == name);
    if matches!(listed.state, State::Uncommitted) && !objects.iter().any(|object| stays(&object.name)) {
        let marks: Vec<&ObjectInfo> = objects.iter().filter(|object| object.name.starts_with(FOLDER)).collect();
        remove_all(store, &marks, swept).await?;
        store.remove_empty().await;
    }
    Ok(())
}

fn is_old(at: u64, rules: &Rules) -> bool {
    rules.now.saturating_sub(at) >= rules.orphan_age.as_secs()
}

async fn all_objects(store: &dyn Store) -> Result<Vec<ObjectInfo>> {
    let mut objects = Vec::new();
    for folder in FOLDERS.into_iter().chain([LEASES_FOLDER]) {
        objects.extend(or_empty(store.list(folder).await)?);
    }
    Ok(objects)
}

async fn remove_all(store: &dyn Store, objects: &[&ObjectInfo], swept: &mut Swept) -> Result<()> {
    let deletes: Vec<_> = objects.iter().map(|object| store.delete(&object.name)).collect();
    stream::iter(deletes).buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
    objects.iter().for_each(|object| swept.count(object));
    Ok(())
}

impl Swept {
    fn count(&mut self, object: &ObjectInfo) {
        self.num_objects += 1;
        self.freed_bytes += object.size;
    }
}
