//! Whether a checkpoint may be saved to a run now, and to which earlier one it may refer. Decides; asks no store.

use std::collections::BTreeSet;

use super::catalog::{Listed, State};
use super::{Part, folder};
use crate::{Error, Result};

/// What a run allows for a save.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Admitted {
    /// Folder of the checkpoint to which an incremental save may refer.
    pub parent: Option<String>,
    /// What is wrong with the checkpoint that the save replaces, if one is there, and known to be damaged.
    pub replaces: Option<String>,
}

/// Whether a checkpoint of this step and part may be saved beside those in `listed`. `url`: of the run's root.
///
/// One that is damaged may be replaced by the same step: a training that has resumed before it comes to it again.
///
/// # Errors
/// [`Error::Exists`] if there is one, ours or somebody else's, and `overwrite` is not set; [`Error::Plan`] if somebody
/// holds what would be replaced, or if the run has gone further.
pub(super) fn admit(listed: &[Listed], url: &str, step: u64, part: Part, overwrite: bool) -> Result<Admitted> {
    let name = folder(step, part);
    let place = || format!("{url}/{name}");
    let usable: Vec<_> = usable(listed).filter(|listed| listed.part() == Some(part)).collect();
    let steps = || usable.iter().filter_map(|listed| Some(listed.metadata(url)?.step));
    let there = listed.iter().find(|listed| listed.folder == name);
    let is_foreign = there.is_some_and(|listed| matches!(listed.state, State::Foreign));
    if !overwrite && (is_foreign || steps().any(|saved| saved == step)) {
        return Err(Error::Exists { url: place() });
    }
    if let Some(who) = there.and_then(|listed| listed.pins.first()) {
        let at = place();
        return Err(Error::Plan(format!(
            "{at}: {who:?} holds it, it is not replaced; release({step}, {who:?}) ends a hold of somebody who is gone"
        )));
    }
    if let Some(newest) = steps().max().filter(|newest| *newest > step) {
        let before = steps().filter(|saved| *saved < step).max().unwrap_or(0);
        return Err(Error::Plan(format!(
            "{url}: step {step} lies before step {newest}, which is saved already: who resumes would go on from that \
             one; call rollback({before}) first if the run was taken back"
        )));
    }
    let replaces = there.and_then(|listed| listed.damage().map(str::to_owned));
    Ok(Admitted { parent: parent(listed, url, step), replaces })
}

/// Folder of the checkpoint to which an incremental one of `step` may refer: the newest whole one, if nothing of it is
/// in doubt.
///
/// Of a checkpoint that was found damaged nobody knows which of its objects are, its own or one that it refers to. So
/// what has any of them in common is not referred to, or the damage would go on into all that is saved from then on.
fn parent(listed: &[Listed], url: &str, step: u64) -> Option<String> {
    let doubtful: BTreeSet<&str> = listed.iter().filter(|listed| listed.is_quarantined).flat_map(owners).collect();
    let whole = usable(listed).filter(|listed| listed.part() == Some(Part::Whole));
    let newest = whole.filter_map(|listed| Some((listed.metadata(url)?.step, listed))).max_by_key(|(step, _)| *step);
    // What is replaced goes: nothing can refer to it.
    let (_, newest) = newest.filter(|(newest, _)| *newest != step)?;
    (!owners(newest).any(|folder| doubtful.contains(folder))).then(|| newest.folder.clone())
}

fn usable(listed: &[Listed]) -> impl Iterator<Item = &Listed> {
    listed
        .iter()
        .filter(|listed| matches!(listed.state, State::Committed(_)) && !listed.is_quarantined && !listed.is_abandoned)
}

/// Folders of the objects that a checkpoint holds or refers to.
fn owners(listed: &Listed) -> impl Iterator<Item = &str> {
    listed.refers_to.iter().map(|(folder, _)| &**folder).chain([&*listed.folder])
}
