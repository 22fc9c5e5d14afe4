//! A checkpoint of ours whose manifest is lost or blank is known as damaged, not as somebody else's.

use async_trait::async_trait;
use bytes::Bytes;
use strata_checkpoint::Error;
use strata_checkpoint::run::Part;
use strata_checkpoint::run::catalog::{State, catalog};
use strata_checkpoint::run::life::Run as Life;
use strata_checkpoint::run::retention::Policy;
use strata_io::schedule::ByteBudget;
use strata_io::testing::{CountingStore, Counts, Hook, Hooked, Request};
use strata_io::{PutMode, Store};

use super::{Arc, Duration, Run, memory};

const FROZEN: [(&str, u8); 1] = [("frozen", 7)];

/// Two checkpoints, each with data of its own; no manager works on them.
async fn two_checkpoints() -> (Run, Life) {
    let run = Run::new(memory()).await;
    run.save(1, &[("a", 1)], None).await;
    run.save(2, &[("a", 2)], None).await;
    let life = life_of(&run.root);
    (run, life)
}

fn life_of(root: &Arc<dyn Store>) -> Life {
    Life::new(root.clone(), ByteBudget::new(64 << 20), "me".to_owned(), Policy::All, Duration::MAX)
}

async fn manifest_of(run: &Run, folder: &str) -> String {
    let listed = run.root.list(&format!("{folder}/.strata/")).await.expect("listed");
    listed.into_iter().next().expect("a manifest").name
}

async fn state_of(run: &Run, folder: &str) -> State {
    let listed = catalog(&run.root).await.expect("listed");
    listed.into_iter().find(|one| one.folder == folder).expect("is there").state
}

async fn is_damaged(run: &Run, folder: &str) -> bool {
    matches!(state_of(run, folder).await, State::Unreadable(_))
}

#[tokio::test]
async fn a_checkpoint_that_has_lost_its_manifest_is_damaged_and_may_be_replaced_by_the_same_step() {
    let (run, life) = two_checkpoints().await;
    run.root.delete(&manifest_of(&run, "step-2").await).await.expect("deleted");
    let State::Unreadable(why) = state_of(&run, "step-2").await else { panic!("not damaged") };
    assert!(why.contains("step-2: damaged: the manifest of what was committed here is lost"), "{why}");
    assert_eq!(life.all().await.expect("listed").len(), 1);
    assert!(matches!(life.found("step-2").await, Err(Error::Manifest { .. })));
    assert!(matches!(life.pin("step-2", "me").await, Err(Error::Manifest { .. })));
    let admitted = life.check_new(2, Part::Whole, false).await.expect("allowed");
    assert_eq!((admitted.parent.as_deref(), admitted.replaces), (Some("step-1"), Some(why)));
    let swept = run.sweep(1).await.expect("swept");
    assert!(swept.notes.iter().any(|note| note.contains("nothing is removed")), "it may refer to anything");
    run.save(2, &[("a", 3)], None).await;
    assert_eq!(run.committed(&[(1, vec![("a", 1)]), (2, vec![("a", 3)])]).await, [1, 2]);
    assert_eq!(run.sweep(1).await.expect("swept").removed, ["step-1"]);
}

#[tokio::test]
async fn a_manifest_that_is_blank_is_damage() {
    for content in [Bytes::new(), Bytes::from(vec![0; 500])] {
        let (run, life) = two_checkpoints().await;
        let manifest = manifest_of(&run, "step-2").await;
        run.root.put(&manifest, content, PutMode::Overwrite).await.expect("blanked");
        assert!(is_damaged(&run, "step-2").await);
        assert!(life.check_new(2, Part::Whole, false).await.expect("allowed").replaces.is_some());
    }
}

#[tokio::test]
async fn an_index_that_is_damaged_too_is_ours_while_all_data_is() {
    let (run, _) = two_checkpoints().await;
    run.root.delete(&manifest_of(&run, "step-2").await).await.expect("deleted");
    run.root.put("step-2/.metadata", Bytes::from(vec![0; 99]), PutMode::Overwrite).await.expect("put");
    assert!(is_damaged(&run, "step-2").await);
    run.root.put("step-2/__0_0.distcp", Bytes::from("theirs"), PutMode::Create).await.expect("put");
    assert!(matches!(state_of(&run, "step-2").await, State::Foreign));
}

#[tokio::test]
async fn what_a_save_over_a_stranger_has_left_does_not_make_the_stranger_ours() {
    let (run, life) = two_checkpoints().await;
    for name in ["step-3/.metadata", "step-3/__0_0.distcp", &*format!("step-3/__0_0.{}.distcp", "e".repeat(32))] {
        run.root.put(name, Bytes::from("theirs"), PutMode::Create).await.expect("put");
    }
    assert!(matches!(state_of(&run, "step-3").await, State::Foreign));
    life.check_new(3, Part::Whole, false).await.expect_err("refused");
}

/// Commits when the manifests of step-2 are listed by themselves.
#[derive(Debug)]
struct CommitsMeanwhile {
    root: Arc<dyn Store>,
    name: String,
    manifest: Bytes,
}

#[async_trait]
impl Hook for CommitsMeanwhile {
    async fn before(&self, request: &Request<'_>) -> strata_io::Result<()> {
        if request.name == "step-2/.strata/" {
            self.root.put(&self.name, self.manifest.clone(), PutMode::Overwrite).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_commit_in_the_middle_of_a_listing_does_not_look_like_a_lost_manifest() {
    let (run, _) = two_checkpoints().await;
    let name = manifest_of(&run, "step-2").await;
    let manifest = run.root.read(&name, None).await.expect("read");
    run.root.delete(&name).await.expect("deleted");
    let hook = CommitsMeanwhile { root: run.root.clone(), name, manifest };
    let store: Arc<dyn Store> = Arc::new(Hooked::new(run.root.clone(), hook));
    let listed = catalog(&store).await.expect("listed");
    assert!(listed.iter().all(|one| matches!(one.state, State::Committed(_))), "{listed:?}");
}

#[tokio::test]
async fn a_stranger_costs_no_request_of_its_own() {
    let (run, _) = two_checkpoints().await;
    let requests = async || {
        let counting = Arc::new(CountingStore::new(run.root.clone(), Counts::default()));
        let store: Arc<dyn Store> = counting.clone();
        catalog(&store).await.expect("listed");
        counting.hook().all().values().map(|(requests, _)| requests).sum::<u64>()
    };
    let before = requests().await;
    for name in ["step-3/.metadata", "step-3/__0_0.distcp"] {
        run.root.put(name, Bytes::from("theirs"), PutMode::Create).await.expect("put");
    }
    assert!(matches!(state_of(&run, "step-3").await, State::Foreign));
    assert_eq!(requests().await, before);
}

#[tokio::test]
async fn a_save_that_never_committed_is_not_damaged() {
    let (run, _) = two_checkpoints().await;
    run.root.delete(&manifest_of(&run, "step-2").await).await.expect("deleted");
    run.root.delete("step-2/.metadata").await.expect("deleted");
    assert!(matches!(state_of(&run, "step-2").await, State::Uncommitted));
}

#[tokio::test]
async fn a_damaged_checkpoint_that_a_save_replaces_is_told() {
    let (_run, life) = two_checkpoints().await;
    assert_eq!(life.check_new(3, Part::Whole, false).await.expect("allowed").replaces, None);
    assert_eq!(life.check_new(2, Part::Whole, true).await.expect("allowed").replaces, None);
    life.quarantine("step-2", &format!("{:032x}", 2), "a bit flipped").await.expect("marked");
    let admitted = life.check_new(2, Part::Whole, false).await.expect("allowed");
    assert_eq!(admitted.replaces.as_deref(), Some("it was found damaged"));
}

#[tokio::test]
async fn what_is_kept_for_the_data_that_others_need_says_for_whom() {
    let run = Run::new(memory()).await;
    run.save(1, &FROZEN, None).await;
    run.save(2, &[("frozen", 7), ("b", 2)], Some("step-1")).await;
    run.sweep(1).await.expect("swept");
    let State::Kept(users) = state_of(&run, "step-1").await else { panic!("not kept") };
    assert_eq!(users, ["step-2"]);
    life_of(&run.root).check_new(3, Part::Whole, false).await.expect("allowed");
    run.save(3, &[("a", 5)], None).await;
    run.sweep(1).await.expect("swept");
    assert!(run.everything().await.iter().all(|name| name.starts_with("step-3/")), "{:?}", run.everything().await);
}

#[tokio::test]
async fn nothing_is_left_of_a_step_that_was_taken_back_twice() {
    let (run, _) = two_checkpoints().await;
    let life = life_of(&run.root);
    life.hold(run.generation);
    for fill in [2, 3] {
        assert_eq!(life.rollback(1).await.expect("taken back"), ["step-2"]);
        if fill == 2 {
            run.save_as(2, &"f".repeat(32), &[("a", fill)], None).await;
        }
    }
    life.retain().await.expect("swept");
    assert!(run.everything().await.iter().all(|name| name.starts_with("step-1/")), "{:?}", run.everything().await);
}
