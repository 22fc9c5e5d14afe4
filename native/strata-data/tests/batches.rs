//! Batches that are read ahead: which samples they hold, whatever room there is.

mod support;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use strata_data::batches::{Batches, Plan};
use strata_data::dataset::{Format, Index, Place, Shard, Source};
use strata_data::order::{Lanes, Order, Shuffle};
use strata_data::partition::{Ending, Stream};
use strata_io::schedule::ByteBudget;

use support::readers::store;
use support::writers::file;

/// An archive of samples `s<number>`, each with a field of some bytes of that number.
fn archive(numbers: Range<u64>) -> Vec<u8> {
    let mut archive = Vec::new();
    for number in numbers {
        file(&mut archive, &format!("s{number}.bin"), &vec![number as u8; number as usize * 7 % 1500]);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

async fn source(folder: &Path) -> Source {
    for (shard, numbers) in [0..40, 40..40, 40..47, 47..100].into_iter().enumerate() {
        std::fs::write(folder.join(format!("{shard}.tar")), archive(numbers)).unwrap();
    }
    std::fs::write(folder.join("README"), "no shard").unwrap();
    let store = store(folder);
    let place = Place { number: 0, store: store.clone(), pattern: "*.tar".to_owned() };
    let index = Arc::new(Index::scan(vec![place], Format::Tar).await.unwrap());
    Source { stores: vec![store], index }
}

fn plan(source: &Source, shuffle: Shuffle, stream: Stream) -> Plan {
    let counts: Vec<u64> = source.index.shards().iter().map(Shard::num_samples).collect();
    let order = |epoch| Arc::new(Order::new(&counts, shuffle, Lanes { num_lanes: 2, turn: 3 }, 5, epoch));
    Plan { order: order(0), next: order(1), stream, ending: Ending::Short, start: 0, first: 0 }
}

async fn keys(mut batches: Batches) -> Vec<String> {
    let mut keys = Vec::new();
    while let Some(raw) = batches.next().await.unwrap() {
        for sample in raw.samples {
            let number: u64 = sample.fields.key[1..].parse().unwrap();
            let field = &sample.fields.fields[0];
            let content = &sample.bytes[field.data.start as usize..field.data.end as usize];
            assert!(content.len() as u64 == number * 7 % 1500 && content.iter().all(|&byte| byte == number as u8));
            keys.push(sample.fields.key);
        }
    }
    keys
}

#[tokio::test]
async fn every_sample_comes_once_in_the_order_of_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(folder.path()).await;
    assert_eq!((source.index.num_samples(), source.index.shards().len()), (100, 4));
    let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 3 };
    for shuffle in [Shuffle::None, Shuffle::Shards, Shuffle::Full, Shuffle::Blocks { block: 4, buffer: 12 }] {
        let plan = plan(&source, shuffle, one);
        let expected: Vec<String> = (0..100).map(|at| format!("s{}", plan.order.sample(at))).collect();
        // A window of one batch, some, all; room for one window.
        for window_bytes in [1, 20_000, 1 << 20] {
            let budget = ByteBudget::new(window_bytes);
            let batches = Batches::new(source.clone(), plan.clone(), budget, window_bytes);
            assert_eq!(keys(batches).await, expected, "{shuffle:?} {window_bytes}");
        }
    }
}

#[tokio::test]
async fn batches_that_are_kept_do_not_stop_what_comes() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(folder.path()).await;
    let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 3 };
    let plan = plan(&source, Shuffle::Full, one);
    let mut batches = Batches::new(source, plan, ByteBudget::new(4096), 4096);
    let mut kept = Vec::new();
    while let Some(batch) = batches.next().await.unwrap() {
        kept.push(batch);
    }
    assert_eq!(kept.len(), 34);
}

#[tokio::test]
async fn a_shard_that_changed_is_damage_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let source = source(folder.path()).await;
    let mut bytes = std::fs::read(folder.path().join("3.tar")).unwrap();
    bytes[20] ^= 1;
    std::fs::write(folder.path().join("3.tar"), bytes).unwrap();
    let one = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 47 };
    let mut batches =
        Batches::new(source.clone(), plan(&source, Shuffle::None, one), ByteBudget::new(1 << 20), 1 << 20);
    let mut errors = Vec::new();
    loop {
        match batches.next().await {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) => errors.push(error.to_string()),
        }
    }
    assert!(errors.len() == 1 && errors[0].contains("3.tar: expected a header with the sum"), "{errors:?}");
}
