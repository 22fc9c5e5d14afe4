//! Reading a range straight into the memory it is for, whatever happens to the connection.
//!
//! A body that breaks off is resumed at the exact byte, and only from the same version of the object. A body that is
//! slow to come, by what others of the store took, is asked for once more from where it stands; the first to bring a byte
//! goes on. One task copies for both, so each byte of the memory is written once, and in order. Digests are taken of what
//! has just been copied, while it is in cache, and go on where a resumed body does.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use tokio::time::Instant;

use super::answer::{Doing, wrong_length};
use super::body::{Body, Got, Head};
use super::http::Call;
use super::{Headers, Remote, names};
use crate::digest::{DigestKind, RunningDigest};
use crate::gate::{Pass, Tally};
use crate::lent::LentMut;
use crate::retry::Failure;
use crate::{Error, Result};

/// Most bytes that are reserved ahead on a store's word for an object's size.
const RESERVE_BYTES: u64 = 64 << 20;

/// How often a slow read looks whether a second request may be made.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Copied and digested at a time: with its source it fits into a second-level cache.
const STRIDE_BYTES: usize = 256 << 10;

/// Fills `targets` with `range`, and returns the digest of each.
pub(super) async fn into_targets(
    remote: &Remote,
    name: &str,
    range: Range<u64>,
    targets: Vec<LentMut>,
    kind: DigestKind,
) -> Result<Vec<u128>> {
    let wanted = range.end.saturating_sub(range.start);
    let lent: u64 = targets.iter().map(|target| target.len() as u64).sum();
    if lent != wanted {
        return Err(wrong_length(&remote.object(name), wanted, lent));
    }
    let mut read = Read::new(remote, name, Some(range), Sink::Targets(Targets::new(targets, kind)))?;
    if wanted > 0 {
        read.run(remote).await?;
    }
    let Sink::Targets(targets) = read.sink else { unreachable!("set above") };
    Ok(targets.finish())
}

pub(super) async fn into_bytes(remote: &Remote, name: &str, range: Option<Range<u64>>) -> Result<Bytes> {
    if range.as_ref().is_some_and(Range::is_empty) {
        return Ok(Bytes::new());
    }
    let mut read = Read::new(remote, name, range, Sink::Collected(Vec::new()))?;
    read.run(remote).await?;
    let Sink::Collected(bytes) = read.sink else { unreachable!("set above") };
    Ok(bytes.into())
}

/// Where the bytes go.
enum Sink {
    Targets(Targets),
    Collected(Vec<u8>),
}

impl Sink {
    /// Takes the next bytes, of which there are never more than the targets hold.
    fn put(&mut self, bytes: &[u8]) {
        match self {
            Self::Collected(all) => all.extend_from_slice(bytes),
            Self::Targets(targets) => bytes.chunks(STRIDE_BYTES).for_each(|stride| targets.put(stride)),
        }
    }
}

/// Memory that is filled in order, and what was digested of it.
struct Targets {
    targets: Vec<LentMut>,
    kind: DigestKind,
    /// Of the targets that are full.
    digests: Vec<u128>,
    /// Of the first `filled` bytes of the next one.
    running: RunningDigest,
    filled: usize,
}

impl Targets {
    fn new(targets: Vec<LentMut>, kind: DigestKind) -> Self {
        Self { targets, kind, digests: Vec::new(), running: RunningDigest::new(kind), filled: 0 }
    }

    fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let target = self.targets[self.digests.len()].as_mut_slice();
            let free = &mut target[self.filled..];
            let fitting = free.len().min(bytes.len());
            free[..fitting].copy_from_slice(&bytes[..fitting]);
            // Of the target: what counts is what it holds.
            self.running.update(&free[..fitting]);
            bytes = &bytes[fitting..];
            self.filled += fitting;
            if self.filled == target.len() {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        let digest = std::mem::replace(&mut self.running, RunningDigest::new(self.kind));
        self.digests.push(digest.finish());
        self.filled = 0;
    }

    /// The digest of each target, all of which are full.
    fn finish(mut self) -> Vec<u128> {
        while self.digests.len() < self.targets.len() {
            self.close(); // empty ones at the end
        }
        self.digests
    }
}

/// One read in progress.
struct Read {
    object: String,
    key: Path,
    at: u64,
    /// Known from the start for a range, from the first answer for a whole object.
    end: Option<u64>,
    e_tag: Option<String>,
    sink: Sink,
}

impl Read {
    fn new(remote: &Remote, name: &str, range: Option<Range<u64>>, sink: Sink) -> Result<Self> {
        let (at, end) = range.map_or((0, None), |range| (range.start, Some(range.end)));
        Ok(Self { object: remote.object(name), key: names::key(&remote.root, name)?, at, end, e_tag: None, sink })
    }

    async fn run(&mut self, remote: &Remote) -> Result<()> {
        let object = self.object.clone();
        let doing = Doing { operation: "read", object: &object };
        let mut retry = remote.tries(doing.operation, doing.object);
        loop {
            let before = self.at;
            let ended = retry.attempt(self.run_once(remote, doing)).await;
            if self.at > before {
                retry.progressed();
            }
            match ended {
                Ok(()) => return Ok(()),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }

    async fn run_once(&mut self, remote: &Remote, doing: Doing<'_>) -> Result<(), Failure> {
        if self.end == Some(self.at) {
            return Ok(());
        }
        let (range, resumed) = (self.at..self.end.unwrap_or(u64::MAX), self.e_tag.is_some());
        match self.stream(remote, doing).await {
            Err(Failure::Final(Error::AlreadyExists { object })) if resumed => Err(Failure::Final(changed(object))),
            Err(Failure::Final(Error::Io { operation, object, errno, detail })) if range.end != u64::MAX => {
                Err(Failure::Final(match self.too_short(remote, range).await {
                    Some(error) => error,
                    None => Error::Io { operation, object, errno, detail },
                }))
            }
            ended => ended,
        }
    }

    /// Streams the rest into the sink, from one request or two.
    async fn stream(&mut self, remote: &Remote, doing: Doing<'_>) -> Result<(), Failure> {
        let (began_at, start) = (Instant::now(), self.at);
        let patience = self.end.and_then(|end| remote.reads().patience(end - start));
        let mut slow = pin!(tokio::time::sleep(patience.unwrap_or(Duration::MAX)));
        let mut first = Body::ask(remote, &self.key, self.at..self.end.unwrap_or(u64::MAX), self.e_tag.clone());
        let mut second: Option<(Body, Pass<'_>)> = None;
        let (mut head_at, mut is_hedged) = (None, false);
        loop {
            tokio::select! {
                biased;
                got = first.next() => match self.take(&mut first, got) {
                    Ok(true) => break,
                    Ok(false) => head_at = head_at.or_else(|| Some(Instant::now())),
                    Err(refused) => match second.take() {
                        // The other one goes on alone.
                        Some((body, _)) => first = body,
                        None => return Err(refused.failure(remote, doing, first.sent()).await),
                    },
                },
                got = next_of(&mut second) => {
                    let (mut body, pass) = second.take().expect("it has brought something");
                    let before = self.at;
                    match self.take(&mut body, got) {
                        Ok(true) => break,
                        // It is ahead now.
                        Ok(false) if self.at > before => first = body,
                        Ok(false) => second = Some((body, pass)),
                        Err(refused) => {
                            let (load, after) = refused.failure(remote, doing, body.sent()).await.load();
                            pass.ended(load, after);
                        }
                    }
                }
                () = slow.as_mut(), if !is_hedged => {
                    second = self.hedge(remote, head_at.is_some());
                    is_hedged = second.is_some();
                    slow.as_mut().reset(Instant::now() + LOOK_AGAIN);
                }
            }
        }
        let head_at = head_at.unwrap_or_else(Instant::now);
        remote.reads().ended(head_at - began_at, head_at.elapsed(), self.at - start);
        Ok(())
    }

    /// A second request for what is missing, if the store can bear it and says which version it sends.
    fn hedge<'a>(&self, remote: &'a Remote, is_answered: bool) -> Option<(Body, Pass<'a>)> {
        // Without a strong tag two answers may be of two versions (RFC 9110, 8.8.1).
        if is_answered && !self.e_tag.as_deref().is_some_and(is_strong) {
            return None;
        }
        let pass = remote.lanes.try_enter()?;
        if !remote.reads().pay() {
            return None;
        }
        Tally::add(&remote.lanes.tally.hedged);
        tracing::info!(object = self.object, at = self.at, "a read is slow: asking a second time");
        Some((Body::ask(remote, &self.key, self.at..self.end?, self.e_tag.clone()), pass))
    }

    /// Takes what `body` brought; whether that was the end.
    fn take(&mut self, body: &mut Body, got: Got) -> Result<bool, Refused> {
        match got {
            Got::Head(head) => self.begin(body, head).map(|()| false),
            Got::Bytes(bytes) => {
                let end = self.end.expect("known from the head");
                if bytes.len() as u64 > end - body.at {
                    return Err(Refused::Is(wrong_length(&self.object, end - body.at, bytes.len() as u64)));
                }
                // What the other one has brought already is not written again.
                let known = (self.at - body.at).min(bytes.len() as u64);
                self.sink.put(&bytes[known as usize..]);
                body.at += bytes.len() as u64;
                self.at = self.at.max(body.at);
                Ok(false)
            }
            Got::End if self.end == Some(self.at) => Ok(true),
            Got::End => Err(Refused::Is(past_end(&self.object, self.at..self.end.unwrap_or(self.at), self.at))),
            Got::Failed(error) => Err(Refused::By(error)),
        }
    }

    /// Checks the head of an answer against what is wanted and what other answers said.
    fn begin(&mut self, body: &Body, head: Head) -> Result<(), Refused> {
        if self.e_tag.is_some() && head.e_tag != self.e_tag {
            return Err(Refused::Is(changed(self.object.clone())));
        }
        let end = self.end.unwrap_or(head.size);
        if head.range != (body.at..end) {
            return Err(Refused::Is(past_end(&self.object, body.at..end, head.size)));
        }
        (self.e_tag, self.end) = (head.e_tag, Some(end));
        if let Sink::Collected(all) = &mut self.sink {
            all.reserve((end - self.at).min(RESERVE_BYTES) as usize);
        }
        Ok(())
    }

    /// Stores differ in how they refuse a range past the end; the size tells.
    async fn too_short(&self, remote: &Remote, range: Range<u64>) -> Option<Error> {
        let doing = Doing { operation: "stat", object: &self.object };
        let head = object_store::ObjectStoreExt::head(&*remote.bucket.objects, &self.key);
        let meta = remote.request(doing, Headers::new(), head).await.ok()?;
        (meta.size < range.end).then(|| past_end(&self.object, range, meta.size))
    }
}

/// Why an answer is of no use.
enum Refused {
    /// For what it says.
    Is(Error),
    /// It failed.
    By(object_store::Error),
}

impl Refused {
    async fn failure(self, remote: &Remote, doing: Doing<'_>, (call, generation): (Arc<Call>, u64)) -> Failure {
        match self {
            Self::Is(error) => Failure::Final(error),
            Self::By(error) => remote.failure(doing, &error, &call, generation).await,
        }
    }
}

/// What a second request brings next; never, if there is none.
async fn next_of(second: &mut Option<(Body, Pass<'_>)>) -> Got {
    match second {
        Some((body, _)) => body.next().await,
        None => std::future::pending().await,
    }
}

/// Whether equal tags mean equal bytes.
fn is_strong(e_tag: &str) -> bool {
    !e_tag.starts_with("W/")
}

fn past_end(object: &str, range: Range<u64>, size: u64) -> Error {
    Error::Mismatch {
        object: object.to_owned(),
        expected: format!("bytes {}..{}", range.start, range.end),
        found: format!("{size} bytes in all"),
    }
}

fn changed(object: String) -> Error {
    Error::Mismatch {
        object,
        expected: "one version of the object from the first byte to the last".to_owned(),
        found: "that it was replaced while being read".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::{crc32, xxh3};

    #[test]
    fn targets_are_filled_and_digested_in_order_across_their_borders() {
        for (kind, digest) in [(DigestKind::Xxh3, xxh3 as fn(&[u8]) -> u128), (DigestKind::Crc32, |b| crc32(b).into())]
        {
            let targets = [3, 0, 4, 0].map(LentMut::owned);
            let landed: Vec<LentMut> = targets.iter().map(LentMut::landing).collect();
            let mut sink = Sink::Targets(Targets::new(targets.into(), kind));
            for piece in [&b"ab"[..], b"cde", b"fg"] {
                sink.put(piece);
            }
            let Sink::Targets(targets) = sink else { unreachable!() };
            let expected = [&b"abc"[..], b"", b"defg", b""];
            assert_eq!(targets.finish(), expected.map(digest));
            let filled: Vec<&[u8]> = landed.iter().map(|target| target.as_slice()).collect();
            assert_eq!(filled, expected);
        }
    }
}
