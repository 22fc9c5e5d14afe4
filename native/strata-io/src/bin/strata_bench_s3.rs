//! Runs the measurement server until its input is closed, so that it ends with whoever started it.
//!
//! `strata-bench-s3 [--keep] [--latency-ms N] [--faults SHARE] [--busy-above N]` prints its endpoint. With `--keep`,
//! large bodies are kept and come back. Each answer comes N ms late; a share of the requests, such as 0.01, fails; above
//! so many at a time, requests are answered 503.

use std::io::{Error, Read};
use std::str::FromStr;
use std::time::Duration;

use strata_io::testing::bench_server::{BenchServer, Trouble};

fn main() -> std::io::Result<()> {
    let (mut keep, mut trouble, mut arguments) = (false, Trouble::default(), std::env::args().skip(1));
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--keep" => keep = true,
            "--latency-ms" => trouble.latency = Duration::from_millis(number(arguments.next())?),
            "--faults" => trouble.share = number(arguments.next())?,
            "--busy-above" => trouble.busy_above = Some(number(arguments.next())?),
            _ => return Err(usage()),
        }
    }
    let server = BenchServer::troubled(keep, trouble)?;
    println!("{}", server.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn number<T: FromStr>(text: Option<String>) -> std::io::Result<T> {
    text.and_then(|text| text.parse().ok()).ok_or_else(usage)
}

fn usage() -> Error {
    Error::other("usage: strata-bench-s3 [--keep] [--latency-ms N] [--faults SHARE] [--busy-above N]")
}
