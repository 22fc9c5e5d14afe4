//! Data sets on disk, and what comes of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use strata_data::Error;
use strata_data::batches::{Batches, Plan, Sample};
use strata_data::dataset::{Format, Index, Place, Shard, Source};
use strata_data::formats;
use strata_data::order::{Lanes, Order, Shuffle};
use strata_data::partition::{Ending, Stream};
use strata_io::schedule::ByteBudget;
use strata_io::testing::{Hook, Kind as Asked, Request};
use strata_io::{IoConfig, Store, open};

use super::writers::{DataSet, Written};

pub async fn scan(store: Arc<dyn Store>, pattern: &str, format: Format) -> strata_data::Result<Index> {
    Index::scan(vec![Place { number: 0, store, pattern: pattern.to_owned() }], format).await
}

pub fn store(folder: &Path) -> Arc<dyn Store> {
    let config = IoConfig {
        budget: ByteBudget::new(64 << 20),
        max_concurrency: 8,
        part_bytes: 8 << 20,
        fsync: false,
        direct_io: false,
        max_tries: 3,
        deadline: Duration::from_secs(10),
    };
    open(folder.to_str().unwrap(), &BTreeMap::new(), &config).unwrap()
}

/// A folder with `objects`.
pub fn folder(objects: &[(String, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in objects {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    folder
}

/// All samples in their order.
pub async fn read(store: Arc<dyn Store>, index: Index) -> Result<Vec<Written>, Error> {
    let counts: Vec<u64> = index.shards().iter().map(Shard::num_samples).collect();
    let order = Arc::new(Order::new(&counts, Shuffle::None, Lanes { num_lanes: 1, turn: 1 }, 1, 0));
    let mut batches = batches(Source { stores: vec![store], index: Arc::new(index) }, order, 1 << 20, 1 << 16);
    let mut samples = Vec::new();
    while let Some(batch) = batches.next().await? {
        for Sample { bytes, fields, .. } in batch.samples {
            let field = |field: formats::Field| {
                (field.name, bytes[field.data.start as usize..field.data.end as usize].to_vec(), field.encoding)
            };
            samples.push(Written { key: fields.key, fields: fields.fields.into_iter().map(field).collect() });
        }
    }
    Ok(samples)
}

pub fn batches(source: Source, order: Arc<Order>, budget_bytes: u64, window_bytes: u64) -> Batches {
    let stream = Stream { world_size: 1, rank: 0, num_workers: 1, worker: 0, batch_size: 7 };
    let plan = Plan { order: order.clone(), next: order, stream, ending: Ending::Short, start: 0, first: 0 };
    Batches::new(source, plan, ByteBudget::new(budget_bytes), window_bytes)
}

/// What comes of the data set after `damage`, which is told each object's name and bytes.
pub async fn damaged(data: &DataSet, damage: impl Fn(&str, &mut Vec<u8>)) -> Result<Vec<Written>, Error> {
    let mut objects = data.objects.clone();
    objects.iter_mut().for_each(|(name, bytes)| damage(name, bytes));
    let folder = folder(&objects);
    let store = store(folder.path());
    let index = scan(store.clone(), &data.pattern, data.format).await?;
    read(store, index).await
}

/// Notes what is asked of a store.
#[derive(Debug, Default)]
pub struct Notes(pub Mutex<Vec<(Asked, String)>>);

#[async_trait]
impl Hook for Notes {
    async fn before(&self, request: &Request<'_>) -> strata_io::Result<()> {
        self.0.lock().unwrap().push((request.kind, request.name.to_owned()));
        Ok(())
    }
}
