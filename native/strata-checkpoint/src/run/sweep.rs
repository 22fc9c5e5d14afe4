//! Removing the checkpoints of a run that no policy keeps, and what saves that never ended have left.
//!
//! Mark and sweep over the manifests: an object to which any manifest of the run refers outlives its checkpoint. A
//! tombstone takes a checkpoint out of sight before anything of it goes, so that a crash after any request leaves a
//! checkpoint whole or gone; what is left of it is for this sweep or the next.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use strata_io::{ObjectInfo, PutMode, Store};

use super::catalog::{Listed, PIN, State, catalog_again, known};
use super::leftovers::{Clock, end_unrecorded, left_over, remove_left};
use super::retention::{Decision, Facts, Policy, decide};
use crate::base::newest_generation;
use crate::collect::leased;
use crate::manifest::FOLDER;
use crate::open::{RETIRED, marked, or_empty};
use crate::{Error, Result};

/// What decides what a sweep removes.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Which checkpoints stay.
    pub policy: Policy,
    /// What no manifest names is removed when it is that old: it may be of a save in flight.
    pub orphan_age: Duration,
    /// Seconds since 1970.
    pub now: u64,
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
    let decisions = decisions.into_iter().map(|(_, folder, decision)| (folder, decision)).collect();
    SweepPlan { decisions, notes: listed.iter().filter_map(|listed| listed.fault.clone()).collect() }
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
    let mut swept = Swept::default();
    if swept.is_barred(&plan.notes) {
        return Ok(swept);
    }
    for (folder, _) in plan.decisions.iter().filter(|(_, decision)| !decision.keeps) {
        let found = listed.iter().find(|listed| listed.folder == *folder).expect("the plan is of this listing");
        check_generation(&**run_root, generation).await?;
        if retire(&*run_root.child(folder)?, found).await? {
            swept.removed.push(folder.clone());
        } else {
            swept.notes.push(format!("{folder}: somebody reads or holds it; it stays for now"));
        }
    }
    if swept.removed.is_empty() {
        return remove_leftovers(run_root, listed, rules, generation, swept).await;
    }
    // Once more, now that they are out of sight: what was saved since the first look may refer to what they hold.
    let listed = catalog_again(run_root, &known(listed)).await?;
    let faults: Vec<String> = listed.iter().filter_map(|listed| listed.fault.clone()).collect();
    if swept.is_barred(&faults) {
        return Ok(swept);
    }
    remove_leftovers(run_root, &listed, rules, generation, swept).await
}

async fn remove_leftovers(
    run_root: &Arc<dyn Store>,
    listed: &[Listed],
    rules: &Rules,
    generation: u64,
    mut swept: Swept,
) -> Result<Swept> {
    let needed = needed(listed);
    let clock = Clock { now: rules.now, orphan_age: rules.orphan_age };
    for listed in listed {
        let left = left_over(listed, needed.get(&*listed.folder), &clock);
        let is_empty = listed.is_uncommitted() && left.len() == listed.objects.len();
        if !left.is_empty() || is_empty {
            check_generation(&**run_root, generation).await?;
            remove_left(&*run_root.child(&listed.folder)?, &left, is_empty, |object| swept.count(object)).await?;
        }
    }
    end_unrecorded(&**run_root, &clock).await?;
    Ok(swept)
}

/// Objects by folder that are in use.
type Needed<'a> = HashMap<&'a str, HashSet<&'a str>>;

fn needed(listed: &[Listed]) -> Needed<'_> {
    let mut needed = Needed::new();
    for listed in listed {
        needed.entry(&listed.folder).or_default().extend(listed.owns.iter().map(String::as_str));
        for (folder, name) in &listed.refers_to {
            needed.entry(folder).or_default().insert(name);
        }
    }
    needed
}

/// Whether `held` is still the newest generation.
pub(super) async fn check_generation(run_root: &dyn Store, held: u64) -> Result<()> {
    let found = newest_generation(run_root).await?;
    if found != held {
        return Err(Error::StaleGeneration { url: run_root.url().to_owned(), found, held });
    }
    Ok(())
}

/// Takes the checkpoint in `store` out of sight; false if somebody holds it.
async fn retire(store: &dyn Store, listed: &Listed) -> Result<bool> {
    let State::Committed(manifest) = &listed.state else { unreachable!("only what is committed is retired") };
    let tombstone = format!("{FOLDER}{RETIRED}{}", manifest.save_id);
    store.put(&tombstone, Bytes::new(), PutMode::Overwrite).await?;
    // Looked for only now: whoever takes hold of it later sees the tombstone.
    let is_held = marked(&or_empty(store.list(FOLDER).await)?, PIN).next().is_some() || leased(store).await?;
    if is_held {
        store.delete(&tombstone).await?;
    }
    Ok(!is_held)
}

impl Swept {
    /// Notes `faults` of manifests; whether there are any, for what cannot be read may refer to anything.
    fn is_barred(&mut self, faults: &[String]) -> bool {
        self.notes.extend_from_slice(faults);
        if !faults.is_empty() {
            self.notes.push("nothing is removed while a manifest of the run cannot be read".to_owned());
        }
        !faults.is_empty()
    }

    /// Notes that `object` was removed.
    fn count(&mut self, object: &ObjectInfo) {
        self.num_objects += 1;
        self.freed_bytes += object.size;
    }
}
