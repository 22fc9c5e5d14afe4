//! Runs the measurement server until its input is closed, so that it ends with whoever started it.
//!
//! `strata-bench-s3 [--keep]` prints its endpoint. With `--keep`, large bodies are kept and come back.

use std::io::Read;

use strata_io::testing::bench_server::BenchServer;

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument != "--keep") {
        return Err(std::io::Error::other("usage: strata-bench-s3 [--keep]"));
    }
    let server = BenchServer::start(!arguments.is_empty())?;
    println!("{}", server.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
