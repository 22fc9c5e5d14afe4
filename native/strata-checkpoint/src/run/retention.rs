//! Which checkpoints of a run are kept. Pure.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU64;
use std::time::Duration;

use super::Part;

/// What decides about one checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Optimizer steps done.
    pub step: u64,
    /// What it holds; each part of a state is kept as if there were no others.
    pub part: Part,
    /// Seconds since 1970, by the clock of the process that saved it.
    pub created_at: u64,
    /// What it can be compared by.
    pub metrics: BTreeMap<String, f64>,
    /// Why it must stay, whatever the policy says.
    pub held: Option<String>,
    /// Whether it was read and found sound.
    pub is_verified: bool,
}

/// Which end of a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Such as a loss.
    Lower,
    /// Such as an accuracy.
    Higher,
}

/// What is kept besides the newest, and the newest that was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// Everything.
    All,
    /// The highest steps, so many of them.
    Last(NonZeroU64),
    /// Steps that are a multiple.
    EverySteps(NonZeroU64),
    /// One in each span of time, the first; by when they were saved.
    Every(Duration),
    /// The best by a metric, so many of them; those without it, and those where it is NaN, are not compared.
    Best {
        /// Its name.
        metric: String,
        /// Which end is better.
        better: Better,
        /// How many.
        count: NonZeroU64,
    },
    /// Those that were saved less than so long ago.
    Younger(Duration),
    /// What any of these keeps.
    Any(Vec<Policy>),
}

/// What is to become of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether it stays.
    pub keeps: bool,
    /// Why, for people.
    pub because: String,
}

/// What becomes of each of `checkpoints`, in their order, which may be any. `now`: seconds since 1970.
///
/// The newest of each part, and the newest that was verified, always stay.
pub fn decide(checkpoints: &[Facts], policy: &Policy, now: u64) -> Vec<Decision> {
    let mut decisions = vec![Decision { keeps: false, because: "no policy keeps it".to_owned() }; checkpoints.len()];
    for part in [Part::Whole, Part::Optimizer, Part::Model] {
        let mut rows: Vec<usize> = (0..checkpoints.len()).filter(|row| checkpoints[*row].part == part).collect();
        rows.sort_by_key(|row| checkpoints[*row].step);
        for (row, because) in kept(checkpoints, &rows, policy, now) {
            if !decisions[row].keeps {
                decisions[row] = Decision { keeps: true, because };
            }
        }
    }
    decisions
}

/// Of `rows`, which ascend by step, those that stay, each with the reason; the strongest reason comes first.
fn kept(all: &[Facts], rows: &[usize], policy: &Policy, now: u64) -> Vec<(usize, String)> {
    let held = rows.iter().filter_map(|row| all[*row].held.clone().map(|because| (*row, because)));
    let newest = rows.last().map(|row| (*row, "it is the newest".to_owned()));
    let verified = rows.iter().rfind(|row| all[**row].is_verified);
    let verified = verified.map(|row| (*row, "it is the newest that was verified".to_owned()));
    held.chain(newest).chain(verified).chain(chosen(all, rows, policy, now)).collect()
}

fn chosen(all: &[Facts], rows: &[usize], policy: &Policy, now: u64) -> Vec<(usize, String)> {
    let because = |rows: Vec<usize>, why: String| rows.into_iter().map(|row| (row, why.clone())).collect();
    let where_ = |is_kept: &dyn Fn(&Facts) -> bool| rows.iter().copied().filter(|row| is_kept(&all[*row])).collect();
    match policy {
        Policy::All => because(rows.to_vec(), "everything is kept".to_owned()),
        Policy::Last(count) => {
            let first = rows.len().saturating_sub(usize::try_from(count.get()).unwrap_or(usize::MAX));
            because(rows[first..].to_vec(), format!("it is one of the last {count}"))
        }
        Policy::EverySteps(steps) => {
            because(where_(&|facts| facts.step.is_multiple_of(steps.get())), format!("one each {steps} steps is kept"))
        }
        Policy::Every(span) => because(spaced(all, rows, span.as_secs()), format!("one each {span:?} is kept")),
        Policy::Best { metric, better, count } => {
            because(best(all, rows, metric, *better, count.get()), format!("it is one of the best {count} by {metric}"))
        }
        // A clock that was set back makes some look as if they came from the future: those are young.
        Policy::Younger(span) => because(
            where_(&|facts| now.saturating_sub(facts.created_at) < span.as_secs()),
            format!("it is younger than {span:?}"),
        ),
        Policy::Any(policies) => {
            let mut seen = HashSet::new();
            let all = policies.iter().flat_map(|policy| chosen(all, rows, policy, now));
            all.filter(|(row, _)| seen.insert(*row)).collect()
        }
    }
}

/// The first, and each that was saved `seconds` or more after the last of these. After a clock was set back the count
/// begins anew: rather one too many than none for hours.
fn spaced(all: &[Facts], rows: &[usize], seconds: u64) -> Vec<usize> {
    let mut last: Option<u64> = None;
    let mut is_next = |row: &usize| {
        let at = all[*row].created_at;
        let is_kept = last.is_none_or(|last| at < last || at - last >= seconds);
        if is_kept {
            last = Some(at);
        }
        is_kept
    };
    rows.iter().copied().filter(|row| is_next(row)).collect()
}

/// Of those that are equally good the later ones.
fn best(all: &[Facts], rows: &[usize], metric: &str, better: Better, count: u64) -> Vec<usize> {
    let value = |row: &usize| all[*row].metrics.get(metric).copied().filter(|value| !value.is_nan());
    let mut compared: Vec<(f64, usize)> = rows.iter().rev().filter_map(|row| Some((value(row)?, *row))).collect();
    compared.sort_by(|a, b| match better {
        Better::Lower => a.0.total_cmp(&b.0),
        Better::Higher => b.0.total_cmp(&a.0),
    });
    compared.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    compared.into_iter().map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(step: u64, created_at: u64) -> Facts {
        Facts { step, part: Part::Whole, created_at, metrics: BTreeMap::new(), held: None, is_verified: false }
    }

    fn with_loss(step: u64, loss: f64) -> Facts {
        Facts { metrics: [("loss".to_owned(), loss)].into(), ..at(step, step) }
    }

    fn count(n: u64) -> NonZeroU64 {
        NonZeroU64::new(n).expect("not 0")
    }

    /// Steps that stay.
    fn kept_steps(checkpoints: &[Facts], policy: &Policy, now: u64) -> Vec<u64> {
        let decisions = decide(checkpoints, policy, now);
        checkpoints.iter().zip(decisions).filter(|(_, decision)| decision.keeps).map(|(facts, _)| facts.step).collect()
    }

    #[test]
    fn the_last_are_those_with_the_highest_steps_in_whatever_order_they_come() {
        let steps = [at(30, 1), at(10, 9), at(100, 2), at(20, 3)];
        assert_eq!(kept_steps(&steps, &Policy::Last(count(2)), 10), [30, 100]);
        assert_eq!(kept_steps(&steps, &Policy::Last(count(9)), 10), [30, 10, 100, 20]);
    }

    #[test]
    fn multiples_stay_and_the_newest_beside_them() {
        let steps: Vec<Facts> = (1..=7).map(|n| at(n * 10, n)).collect();
        assert_eq!(kept_steps(&steps, &Policy::EverySteps(count(20)), 10), [20, 40, 60, 70]);
    }

    #[test]
    fn one_in_each_span_of_time_stays_also_when_the_clock_is_set_back() {
        let hour = |step: u64, seconds: u64| at(step, 100_000 + seconds);
        let steps =
            [hour(1, 0), hour(2, 1000), hour(3, 3600), hour(4, 3700), hour(5, 100), hour(6, 3700), hour(7, 3701)];
        let policy = Policy::Every(Duration::from_secs(3600));
        assert_eq!(kept_steps(&steps, &policy, 200_000), [1, 3, 5, 6, 7]);
    }

    #[test]
    fn the_best_are_compared_by_a_number_and_what_has_none_is_passed_over() {
        let steps =
            [with_loss(1, 0.5), with_loss(2, f64::NAN), at(3, 3), with_loss(4, 0.25), with_loss(5, 0.5), at(6, 6)];
        let best = |better, n| Policy::Best { metric: "loss".to_owned(), better, count: count(n) };
        assert_eq!(kept_steps(&steps, &best(Better::Lower, 1), 10), [4, 6]);
        assert_eq!(kept_steps(&steps, &best(Better::Lower, 2), 10), [4, 5, 6]);
        assert_eq!(kept_steps(&steps, &best(Better::Higher, 2), 10), [1, 5, 6]);
    }

    #[test]
    fn what_was_saved_in_the_future_is_young() {
        let steps = [at(1, 0), at(2, 95), at(3, 500), at(4, 0)];
        assert_eq!(kept_steps(&steps, &Policy::Younger(Duration::from_secs(10)), 100), [2, 3, 4]);
    }

    #[test]
    fn whatever_is_held_or_the_newest_verified_stays_and_says_why() {
        let held = Facts { held: Some("an evaluation holds it".to_owned()), ..at(1, 1) };
        let verified = |step| Facts { is_verified: true, ..at(step, step) };
        let checkpoints = [held, verified(2), verified(3), at(4, 4), at(5, 5)];
        let decisions = decide(&checkpoints, &Policy::Last(count(1)), 10);
        let told: Vec<(bool, &str)> = decisions.iter().map(|d| (d.keeps, d.because.as_str())).collect();
        let expected = [
            (true, "an evaluation holds it"),
            (false, "no policy keeps it"),
            (true, "it is the newest that was verified"),
            (false, "no policy keeps it"),
            (true, "it is the newest"),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn weights_that_were_published_do_not_count_among_whole_states() {
        let model = |step| Facts { part: Part::Model, ..at(step, step) };
        let checkpoints = [at(1, 1), model(2), at(3, 3), model(4), model(5)];
        let keeps = |d: Vec<Decision>| d.iter().map(|d| d.keeps).collect::<Vec<_>>();
        let decisions = decide(&checkpoints, &Policy::Last(count(2)), 10);
        assert_eq!(keeps(decisions), [true, false, true, true, true]);
    }

    prop_compose! {
        fn any_facts()(
            step in 0u64..50,
            created_at in 0u64..1000,
            loss in proptest::option::of(-1.0f64..1.0),
            held in proptest::bool::weighted(0.1),
            is_verified in proptest::bool::weighted(0.2),
        ) -> Facts {
            let metrics = loss.map(|loss| ("loss".to_owned(), loss)).into_iter().collect();
            let held = held.then(|| "held".to_owned());
            Facts { step, part: Part::Whole, created_at, metrics, held, is_verified }
        }
    }

    fn any_policy() -> impl Strategy<Value = Policy> {
        let number = || (1u64..6).prop_map(count);
        let leaf = prop_oneof![
            number().prop_map(Policy::Last),
            number().prop_map(Policy::EverySteps),
            (1u64..500).prop_map(|s| Policy::Every(Duration::from_secs(s))),
            (1u64..500).prop_map(|s| Policy::Younger(Duration::from_secs(s))),
            number().prop_map(|count| Policy::Best { metric: "loss".to_owned(), better: Better::Lower, count }),
        ];
        leaf.prop_recursive(2, 6, 3, |inner| prop::collection::vec(inner, 0..3).prop_map(Policy::Any))
    }

    proptest! {
        #[test]
        fn something_to_resume_from_always_stays(
            checkpoints in prop::collection::vec(any_facts(), 1..30), policy in any_policy(), now in 0u64..2000,
        ) {
            let decisions = decide(&checkpoints, &policy, now);
            let stays = |row: usize| decisions[row].keeps;
            let newest = checkpoints.iter().map(|facts| facts.step).max();
            prop_assert!((0..checkpoints.len()).any(|row| stays(row) && Some(checkpoints[row].step) == newest));
            let verified = checkpoints.iter().filter(|facts| facts.is_verified).map(|facts| facts.step).max();
            prop_assert!(verified.is_none() || (0..checkpoints.len()).any(
                |row| stays(row) && checkpoints[row].is_verified && Some(checkpoints[row].step) == verified));
            prop_assert!((0..checkpoints.len()).all(|row| checkpoints[row].held.is_none() || stays(row)));
        }

        #[test]
        fn any_of_two_keeps_what_one_of_them_keeps(
            checkpoints in prop::collection::vec(any_facts(), 1..30),
            a in any_policy(), b in any_policy(), now in 0u64..2000,
        ) {
            let keeps = |policy: &Policy| decide(&checkpoints, policy, now).iter().map(|d| d.keeps).collect::<Vec<_>>();
            let either: Vec<bool> = keeps(&a).into_iter().zip(keeps(&b)).map(|(a, b)| a || b).collect();
            prop_assert_eq!(keeps(&Policy::Any(vec![a, b])), either);
        }
    }
}
