//! How close a store comes to plain concurrent HTTP requests of the same bytes.
//!
//! ```text
//! cargo run --release -p strata-io --features testing --example s3_throughput [rounds]
//! ```
//!
//! Alternates plain `reqwest` and ours, up and down, 2 GiB a run, against the measurement server in the same
//! process, and prints GB/s (1e9 bytes) and the ratio of each pair. The CRCs are taken before, as a caller does
//! in its own first pass; requests of both sides are 4 at a time.

#![allow(unsafe_code)] // memory is lent twice, never at once

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use strata_io::lent::LentMut;
use strata_io::schedule::ByteBudget;
use strata_io::testing::bench_server::BenchServer;
use strata_io::{IoConfig, Part, Store, digest, open};

const TOTAL_BYTES: u64 = 2 << 30;
const AT_A_TIME: usize = 4;

type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    println!("{:>10} {:>5} {:>10} {:>10}   ratio min / median / max", "part", "", "plain", "ours");
    for part_bytes in [8 << 20, 64 << 20] {
        for direction in ["up", "down"] {
            let mut pairs = Vec::new();
            for _ in 0..rounds {
                pairs.push(pair(direction, part_bytes).await?);
            }
            report(direction, part_bytes, &pairs);
        }
    }
    Ok(())
}

fn report(direction: &str, part_bytes: u64, pairs: &[(f64, f64)]) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[0], values[values.len() / 2], values[values.len() - 1])
    };
    let plain = median(pairs.iter().map(|pair| pair.0).collect()).1;
    let ours = median(pairs.iter().map(|pair| pair.1).collect()).1;
    let (least, middle, most) = median(pairs.iter().map(|pair| pair.1 / pair.0).collect());
    let part = format!("{} MiB", part_bytes >> 20);
    println!("{part:>10} {direction:>5} {plain:>10.2} {ours:>10.2}   {least:.2} / {middle:.2} / {most:.2}");
}

/// GB/s of the plain way and of ours, one after the other against the same server.
async fn pair(direction: &str, part_bytes: u64) -> Result<(f64, f64), Box<dyn std::error::Error + Send + Sync>> {
    let server = BenchServer::start(false)?;
    let part: Bytes = (0..part_bytes).map(|i| (i % 251) as u8).collect();
    // First, because it decides on the TLS library for the process.
    let store = store(&server, part_bytes)?;
    let client = reqwest::Client::builder().no_proxy().http1_only().build()?;
    // Both ends of both sides are warm: connections and, for reads, memory.
    plain_up(&client, &server, &part, AT_A_TIME as u64 * part_bytes).await?;
    up(&store, "warm", &part, (AT_A_TIME as u64 + 1) * part_bytes).await?;
    if direction == "up" {
        let plain = timed(plain_up(&client, &server, &part, TOTAL_BYTES)).await?;
        return Ok((plain, timed(up(&store, "large", &part, TOTAL_BYTES)).await?));
    }
    up(&store, "large", &part, TOTAL_BYTES).await?;
    let mut memory: Vec<LentMut> = (0..AT_A_TIME).map(|_| LentMut::owned(part_bytes as usize)).collect();
    memory.iter_mut().for_each(|target| target.as_mut_slice().fill(1));
    let url = format!("{}/b/run/large", server.endpoint());
    let plain = timed(plain_down(&client, &url, &mut memory, part_bytes)).await?;
    Ok((plain, timed(down(&store, &mut memory, part_bytes)).await?))
}

fn store(server: &BenchServer, part_bytes: u64) -> strata_io::Result<Arc<dyn Store>> {
    let config = IoConfig {
        budget: ByteBudget::new(1 << 30),
        max_concurrency: AT_A_TIME,
        part_bytes,
        fsync: false,
        direct_io: false,
        max_tries: 3,
        deadline: Duration::from_secs(60),
    };
    let options = [("endpoint", server.endpoint()), ("access_key_id", "k".into()), ("secret_access_key", "s".into())];
    let options: BTreeMap<String, String> = options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    open("s3://b/run", &options, &config)
}

async fn timed(work: impl Future<Output = Outcome>) -> Result<f64, Box<dyn std::error::Error + Send + Sync>> {
    let began = Instant::now();
    work.await?;
    Ok(TOTAL_BYTES as f64 / began.elapsed().as_secs_f64() / 1e9)
}

async fn plain_up(client: &reqwest::Client, server: &BenchServer, part: &Bytes, total: u64) -> Outcome {
    let put = |i: u64| {
        let request = client.put(format!("{}/b/plain-{i}", server.endpoint())).body(part.clone());
        tokio::spawn(async move { request.send().await?.error_for_status().map(drop) })
    };
    stream::iter(0..total / part.len() as u64)
        .map(put)
        .buffer_unordered(AT_A_TIME)
        .map(|joined| Ok(joined??))
        .try_collect()
        .await
}

async fn up(store: &Arc<dyn Store>, name: &str, part: &Bytes, total: u64) -> Outcome {
    let crc32 = digest::crc32(part);
    let writer = Arc::new(store.create(name, total).await?);
    let put = |i: u64| {
        let part = Part { index: i as u32, offset: i * part.len() as u64, pieces: vec![part.clone()], crc32 };
        let writer = writer.clone();
        tokio::spawn(async move { writer.write_part(part).await })
    };
    let puts = stream::iter(0..total / part.len() as u64).map(put).buffer_unordered(AT_A_TIME);
    puts.map(|joined| Outcome::Ok(joined??)).try_collect::<()>().await?;
    Ok(Arc::into_inner(writer).expect("all parts are written").finish().await?)
}

async fn plain_down(client: &reqwest::Client, url: &str, memory: &mut Vec<LentMut>, part_bytes: u64) -> Outcome {
    let get = |(lane, mut target): (u64, LentMut)| {
        let (client, url) = (client.clone(), url.to_owned());
        tokio::spawn(async move {
            for i in (lane..TOTAL_BYTES / part_bytes).step_by(AT_A_TIME) {
                let range = format!("bytes={}-{}", i * part_bytes, (i + 1) * part_bytes - 1);
                let mut body = client.get(&url).header("range", range).send().await?.error_for_status()?.bytes_stream();
                let mut at = 0;
                while let Some(bytes) = body.next().await.transpose()? {
                    target.as_mut_slice()[at..at + bytes.len()].copy_from_slice(&bytes);
                    at += bytes.len();
                }
            }
            Ok::<LentMut, reqwest::Error>(target)
        })
    };
    for lane in futures::future::join_all((0..).zip(memory.drain(..)).map(get)).await {
        memory.push(lane??);
    }
    Ok(())
}

async fn down(store: &Arc<dyn Store>, memory: &mut Vec<LentMut>, part_bytes: u64) -> Outcome {
    let get = |(lane, target): (u64, LentMut)| {
        let store = store.clone();
        tokio::spawn(async move {
            for i in (lane..TOTAL_BYTES / part_bytes).step_by(AT_A_TIME) {
                // SAFETY: the store is done with its handle before the next one is made.
                let own = unsafe { target.alias() };
                store.read_into("large", i * part_bytes..(i + 1) * part_bytes, vec![own]).await?;
            }
            Ok::<LentMut, strata_io::Error>(target)
        })
    };
    for lane in futures::future::join_all((0..).zip(memory.drain(..)).map(get)).await {
        memory.push(lane??);
    }
    Ok(())
}
