//! Reading a range straight into the memory it is for, whatever happens to the connection.
//!
//! A body that breaks off is resumed at the exact byte, and only from the same version of the object. Digests are
//! taken of what has just been copied, while it is in cache, and go on where a resumed body does.

use std::ops::Range;

use bytes::Bytes;
use futures::StreamExt;
use object_store::path::Path;
use object_store::{GetOptions, GetRange};

use super::answer::{Doing, wrong_length};
use super::{Headers, Remote, names};
use crate::digest::{DigestKind, RunningDigest};
use crate::lent::LentMut;
use crate::retry::{Failure, Retry};
use crate::{Error, Result};

/// Most bytes that are reserved ahead on a store's word for an object's size.
const RESERVE_BYTES: u64 = 64 << 20;

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
        let mut retry = Retry::start(remote.policy(), doing.operation, doing.object);
        loop {
            let before = self.at;
            let ended = retry.attempt(&remote.slots, self.run_once(remote, doing)).await;
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
        match remote.request(doing, Headers::new(), self.stream(remote)).await {
            Ok(streamed) => streamed.map_err(Failure::Final),
            Err(Failure::Final(Error::AlreadyExists { object })) if resumed => Err(Failure::Final(changed(object))),
            Err(Failure::Final(Error::Io { operation, object, errno, detail })) if range.end != u64::MAX => {
                Err(Failure::Final(match self.too_short(remote, range).await {
                    Some(error) => error,
                    None => Error::Io { operation, object, errno, detail },
                }))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Streams the rest into the sink. The outer result is the request's, the inner one what its bytes mean.
    async fn stream(&mut self, remote: &Remote) -> object_store::Result<Result<()>> {
        let range = self.end.map(|end| GetRange::Bounded(self.at..end));
        // A weak tag never matches a condition (RFC 9110, 13.1.1); it is still compared below.
        let if_match = self.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        let options = GetOptions { range, if_match, ..GetOptions::default() };
        let answer = remote.bucket.objects.get_opts(&self.key, options).await?;
        if self.e_tag.is_some() && answer.meta.e_tag != self.e_tag {
            return Ok(Err(changed(self.object.clone())));
        }
        self.e_tag = answer.meta.e_tag.clone();
        let end = *self.end.get_or_insert(answer.meta.size);
        if answer.range != (self.at..end) {
            return Ok(Err(past_end(&self.object, self.at..end, answer.meta.size)));
        }
        if let Sink::Collected(all) = &mut self.sink {
            all.reserve((end - self.at).min(RESERVE_BYTES) as usize);
        }
        let mut body = answer.into_stream();
        while let Some(bytes) = body.next().await.transpose()? {
            if bytes.len() as u64 > end - self.at {
                return Ok(Err(wrong_length(&self.object, end - self.at, bytes.len() as u64)));
            }
            self.sink.put(&bytes);
            self.at += bytes.len() as u64;
        }
        if self.at < end {
            return Ok(Err(past_end(&self.object, self.at..end, self.at)));
        }
        Ok(Ok(()))
    }

    /// Stores differ in how they refuse a range past the end; the size tells.
    async fn too_short(&self, remote: &Remote, range: Range<u64>) -> Option<Error> {
        let doing = Doing { operation: "stat", object: &self.object };
        let head = object_store::ObjectStoreExt::head(&*remote.bucket.objects, &self.key);
        let meta = remote.request(doing, Headers::new(), head).await.ok()?;
        (meta.size < range.end).then(|| past_end(&self.object, range, meta.size))
    }
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
