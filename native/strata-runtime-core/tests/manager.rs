//! What a program in Rust calls, by the names of this crate.

use std::error::Error;

use strata_runtime_core::checkpoint::{CheckpointManager, CheckpointManagerConfig};
use strata_runtime_core::types::{CheckpointMetadata, CheckpointType};

async fn manager_of(directory: &tempfile::TempDir) -> Result<CheckpointManager, Box<dyn Error>> {
    let checkpoint_dir = directory.path().to_str().ok_or("a name in UTF-8")?.to_owned();
    let config = CheckpointManagerConfig { storage_backend: "local".into(), checkpoint_dir, keep_count: 2 };
    Ok(CheckpointManager::new(config).await?)
}

#[tokio::test]
async fn the_last_are_kept_and_another_process_resumes_from_them() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir()?;
    let manager = manager_of(&directory).await?;
    let pending: Vec<_> =
        (1..=4_u64).map(|step| manager.save(vec![step as u8; 100_000], step, step / 2, CheckpointType::Full)).collect();
    manager.wait().await;
    for (save, step) in pending.into_iter().zip(1..) {
        let saved: CheckpointMetadata = save.await?;
        assert_eq!((saved.step, saved.epoch), (step, step / 2));
    }
    let resumed = manager_of(&directory).await?;
    let kept: Vec<u64> = resumed.all().await?.iter().map(|checkpoint| checkpoint.step).collect();
    let newest = resumed.latest().await?.ok_or("one is there")?;
    assert_eq!((kept, newest.step), (vec![3, 4], 4));
    assert_eq!(resumed.load(4).await?, vec![4; 100_000]);
    Ok(())
}
