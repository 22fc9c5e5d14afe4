//! A run: the checkpoints of one training, side by side below a root. What they are called and what is said of them.

mod admission;
pub mod catalog;
mod leftovers;
pub mod life;
mod lost;
pub mod manager;
pub mod retention;
pub mod sweep;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

use strata_io::digest::xxh3;

use crate::item::Item;

/// What a checkpoint of a run holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CheckpointType {
    /// All of the state.
    Full,
    /// All of the state; what did not change since an earlier checkpoint is referred to.
    Incremental,
    /// The optimizer's part.
    OptimizerOnly,
    /// The model's part, as safetensors.
    ModelOnly,
}

/// What a checkpoint can be loaded in the place of: one of each kind at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The whole state.
    Whole,
    /// The optimizer.
    Optimizer,
    /// The model.
    Model,
}

const TYPES: [(CheckpointType, &str); 4] = [
    (CheckpointType::Full, "full"),
    (CheckpointType::Incremental, "incremental"),
    (CheckpointType::OptimizerOnly, "optimizer_only"),
    (CheckpointType::ModelOnly, "model_only"),
];

const PARTS: [(Part, &str); 3] = [(Part::Whole, ""), (Part::Optimizer, "-optimizer"), (Part::Model, "-model")];

impl CheckpointType {
    /// The number in manifests.
    pub fn code(self) -> i32 {
        TYPES.iter().position(|(known, _)| *known == self).expect("every type is listed") as i32
    }

    /// The type with that number.
    pub fn from_code(code: i32) -> Option<Self> {
        TYPES.get(usize::try_from(code).ok()?).map(|(known, _)| *known)
    }

    /// What it can be loaded in the place of.
    pub fn part(self) -> Part {
        match self {
            Self::Full | Self::Incremental => Part::Whole,
            Self::OptimizerOnly => Part::Optimizer,
            Self::ModelOnly => Part::Model,
        }
    }
}

impl fmt::Display for CheckpointType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(TYPES[self.code() as usize].1)
    }
}

impl FromStr for CheckpointType {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        let known = TYPES.iter().find(|(_, name)| *name == word);
        let expected = || TYPES.map(|(_, name)| name).join(", ");
        known
            .map(|(kind, _)| *kind)
            .ok_or_else(|| format!("{word:?} is no type of a checkpoint: expected {}", expected()))
    }
}

/// What a manager says of a checkpoint; stands in its manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    /// Optimizer steps done.
    pub step: u64,
    /// Of the data.
    pub epoch: u64,
    /// What it holds.
    pub checkpoint_type: CheckpointType,
    /// The user's own.
    pub metadata: BTreeMap<String, String>,
    /// The user's own, by which checkpoints are compared.
    pub metrics: BTreeMap<String, f64>,
    /// Of the model's items, 32 hex digits; None if there is no model in it.
    pub model_hash: Option<String>,
}

/// What there is to know of a committed checkpoint of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointMetadata {
    /// Of the save.
    pub id: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Of the data.
    pub epoch: u64,
    /// URL or path.
    pub path: String,
    /// What its own objects take, in bytes; what it refers to is not counted.
    pub size_bytes: u64,
    /// What it holds.
    pub checkpoint_type: CheckpointType,
    /// Of the model's content: equal for equal weights that were saved alike.
    pub model_hash: Option<String>,
    /// The user's own.
    pub metadata: HashMap<String, String>,
    /// The user's own, by which checkpoints are compared.
    pub metrics: BTreeMap<String, f64>,
    /// Seconds since 1970, by the planning rank's clock.
    pub created_at: u64,
}

/// What the names of a model's items begin with: the state has the model under the key `model`.
pub(crate) const MODEL_PREFIX: &str = "model.";

/// Name of the folder, below the run's root, of a part of the state at a step.
pub fn folder(step: u64, part: Part) -> String {
    let suffix = PARTS.iter().find(|(known, _)| *known == part).map_or("", |(_, suffix)| suffix);
    format!("step-{step}{suffix}")
}

/// What a folder of that name holds, if it is one that [`folder`] gives.
pub fn parse_folder(name: &str) -> Option<(u64, Part)> {
    let rest = name.strip_prefix("step-")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (step, suffix) = rest.split_at(digits);
    let part = PARTS.iter().find(|(_, known)| *known == suffix)?.0;
    let step = step.parse().ok()?;
    // One name for each step: "step-07" is somebody else's.
    (folder(step, part) == name).then_some((step, part))
}

/// What the model's items hold: names, places, types and the digests of all blocks, 32 hex digits.
///
/// The model's items are those below the key `model`; None if there are none, or one of them has no digests.
pub(crate) fn model_hash(items: impl Iterator<Item = Item>) -> Option<String> {
    // Of each item its hash: half a million of them are eight megabytes.
    let (mut of_all, mut of_one) = (Vec::new(), Vec::new());
    for item in items.filter(|item| item.fqn.starts_with(MODEL_PREFIX.as_bytes())) {
        if item.payload_bytes > 0 && item.digests.is_empty() {
            return None;
        }
        of_one.clear();
        of_one.extend((item.fqn.len() as u64).to_le_bytes());
        of_one.extend(&*item.fqn);
        of_one.extend((item.dtype.len() as u64).to_le_bytes());
        of_one.extend(item.dtype.as_bytes());
        for numbers in [item.offsets.as_deref().unwrap_or_default(), &*item.shape, &*item.strides] {
            of_one.extend((numbers.len() as u64).to_le_bytes());
            of_one.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        of_one.extend(item.digests.iter().flat_map(|digest| digest.xxh3.to_le_bytes()));
        of_all.extend(xxh3(&of_one).to_le_bytes());
    }
    (!of_all.is_empty()).then(|| format!("{:032x}", xxh3(&of_all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_known_by_its_name_and_a_stranger_is_not() {
        for step in [0, 7, 400, u64::MAX] {
            for (part, _) in PARTS {
                assert_eq!(parse_folder(&folder(step, part)), Some((step, part)));
            }
        }
        for name in [
            "",
            "step-",
            "step-x",
            "step-7x",
            "step-07",
            "step--7",
            "step-7-models",
            "7",
            "step-7/x",
            "step-18446744073709551616",
        ] {
            assert_eq!(parse_folder(name), None, "{name:?}");
        }
    }

    #[test]
    fn a_type_is_known_by_its_number_and_by_its_name() {
        for (kind, name) in TYPES {
            assert_eq!(CheckpointType::from_code(kind.code()), Some(kind));
            assert_eq!((kind.to_string().as_str(), name.parse()), (name, Ok(kind)));
        }
        assert_eq!((CheckpointType::from_code(4), CheckpointType::from_code(-1)), (None, None));
        assert!("Full".parse::<CheckpointType>().is_err());
    }
}
