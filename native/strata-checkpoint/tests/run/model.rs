//! What must be there of a run, whatever has happened to it: worked out from what callers were told, not from the store.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use strata_checkpoint::run::retention::Policy;
use strata_checkpoint::run::{Part, folder};

use super::Tensor;

/// A checkpoint that callers know of.
#[derive(Debug, Clone)]
pub struct Known {
    pub step: u64,
    pub part: Part,
    /// Saves that may be the one that is there.
    pub ids: HashSet<String>,
}

/// What callers were told.
#[derive(Debug, Default)]
pub struct Model {
    /// What each save wrote, by its id.
    pub written: HashMap<String, Vec<Tensor>>,
    /// Saves that were said not to be committed, by why.
    pub refused: HashMap<String, String>,
    /// By folder: must be there.
    pub required: BTreeMap<String, Known>,
    /// By folder: may be there, for its save has died or nobody knows what came of it.
    pub possible: BTreeMap<String, Known>,
    /// Folders that somebody holds.
    pub pins: BTreeSet<String>,
    /// Folders that were found damaged, with the save that is in them.
    pub quarantined: BTreeMap<String, String>,
    /// The newest of the folders that were found sound.
    pub verified: BTreeMap<Part, String>,
    /// The newest generation.
    pub generation: u64,
    /// What has happened, for whoever looks into a failure.
    pub history: Vec<String>,
}

impl Model {
    /// A save has begun; from now on it may be there.
    pub fn begin(&mut self, id: &str, step: u64, part: Part, tensors: &[Tensor]) {
        self.written.insert(id.to_owned(), tensors.to_vec());
        let name = folder(step, part);
        self.quarantined.remove(&name);
        let known = || Known { step, part, ids: HashSet::new() };
        self.possible.entry(name.clone()).or_insert_with(known).ids.insert(id.to_owned());
        if let Some(known) = self.required.get_mut(&name) {
            known.ids.insert(id.to_owned());
        }
    }

    /// A save was said to be committed. `was_raced`: others have changed the run since it began, maybe even what it did.
    pub fn committed(&mut self, id: &str, step: u64, part: Part, was_raced: bool) {
        let name = folder(step, part);
        self.verified.retain(|_, verified| *verified != name);
        if was_raced {
            if let Some(known) = self.required.get_mut(&name) {
                known.ids.insert(id.to_owned());
            }
            return;
        }
        self.possible.remove(&name);
        self.required.insert(name, Known { step, part, ids: HashSet::from([id.to_owned()]) });
    }

    /// Nobody knows whether a save was committed: what was found sound before may have been replaced.
    pub fn unsure(&mut self, step: u64, part: Part) {
        let name = folder(step, part);
        self.verified.retain(|_, verified| *verified != name);
    }

    /// A save was said not to be committed.
    pub fn refused(&mut self, id: &str, why: String) {
        self.refused.insert(id.to_owned(), why);
        for known in self.required.values_mut().chain(self.possible.values_mut()) {
            known.ids.remove(id);
        }
        self.possible.retain(|_, known| !known.ids.is_empty());
    }

    /// Retention by `policy` may have been at work: forgets what it does not keep, even if all that may be there is.
    pub fn weaken(&mut self, policy: &Policy) {
        let kept: HashSet<String> = self.required.keys().filter(|name| self.keeps(policy, name)).cloned().collect();
        let gone: Vec<String> = self.required.keys().filter(|name| !kept.contains(*name)).cloned().collect();
        for name in gone {
            let known = self.required.remove(&name).expect("is in it");
            self.possible.entry(name).or_insert(known);
        }
    }

    fn keeps(&self, policy: &Policy, name: &String) -> bool {
        let Known { step, part, .. } = self.required[name];
        let newer = self.required.values().chain(self.possible.values());
        let newer: BTreeSet<u64> =
            newer.filter(|other| other.part == part && other.step > step).map(|other| other.step).collect();
        let always = newer.is_empty() || self.pins.contains(name) || self.verified.get(&part) == Some(name);
        always || chosen(policy, step, newer.len() as u64)
    }

    /// The run was taken back to `step`, or may have been.
    pub fn taken_back(&mut self, step: u64, is_sure: bool) {
        let later = self.required.extract_if(.., |_, known| known.step > step);
        let later: Vec<(String, Known)> = later.collect();
        self.possible.retain(|_, known| known.step <= step || !is_sure);
        if !is_sure {
            self.possible.extend(later);
        }
    }

    /// Step of the newest whole checkpoint that must be there, and of the newest that may be.
    pub fn newest(&self, part: Part) -> (Option<u64>, Option<u64>) {
        let newest = |known: &BTreeMap<String, Known>| {
            known.values().filter(|known| known.part == part).map(|known| known.step).max()
        };
        (newest(&self.required), newest(&self.required).max(newest(&self.possible)))
    }
}

fn chosen(policy: &Policy, step: u64, newer: u64) -> bool {
    match policy {
        Policy::All => true,
        Policy::Last(count) => newer < count.get(),
        Policy::EverySteps(steps) => step.is_multiple_of(steps.get()),
        Policy::Any(policies) => policies.iter().any(|policy| chosen(policy, step, newer)),
        other => unreachable!("no schedule has {other:?}"),
    }
}
