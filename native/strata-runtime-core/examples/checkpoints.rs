//! Saves states as bytes while the program goes on, keeps the last two, and resumes from the newest.
//!
//! `cargo run -p strata-runtime-core --example checkpoints -- local /tmp/run`, or `-- s3 bucket/run`.

use std::error::Error;

use strata_runtime_core::checkpoint::{CheckpointManager, CheckpointManagerConfig};
use strata_runtime_core::types::{CheckpointMetadata, CheckpointType};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(storage_backend), Some(checkpoint_dir)) = (arguments.next(), arguments.next()) else {
        return Err("usage: checkpoints local|s3|… DIRECTORY".into());
    };
    let manager =
        CheckpointManager::new(CheckpointManagerConfig { storage_backend, checkpoint_dir, keep_count: 2 }).await?;

    let (mut step, mut state) = match manager.latest().await? {
        Some(newest) => (newest.step, manager.load(newest.step).await?.to_vec()),
        None => (0, vec![0; 1 << 20]),
    };
    println!("begins at step {step}");
    for _ in 0..3 {
        step += 100;
        state.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        // Not awaited: the bytes are the manager's now, and the loop goes on.
        drop(manager.save(state.clone(), step, 0, CheckpointType::Full));
    }
    manager.wait().await;

    // Awaited: committed when it returns.
    let saved: CheckpointMetadata = manager.save(state, step + 100, 1, CheckpointType::Full).await?;
    println!("saved {} in {} bytes", saved.path, saved.size_bytes);
    for kept in manager.all().await? {
        println!("kept step {}, epoch {}", kept.step, kept.epoch);
    }
    Ok(())
}
