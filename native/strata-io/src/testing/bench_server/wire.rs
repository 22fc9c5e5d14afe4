//! HTTP/1.1, as far as clients of object stores use it.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;

use base64::Engine;
use rustix::net::{RecvFlags, recv};

use super::{Body, Objects};

/// Bodies up to here are always kept: manifests and such must come back as they were.
const SMALL_BYTES: usize = 1 << 20;
/// Taken from the socket at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Heads longer than this are no client of ours.
const HEAD_BYTES: usize = 64 << 10;

/// The head of a request, decoded.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) method: String,
    /// Without the leading slash.
    pub(super) path: String,
    pub(super) query: BTreeMap<String, String>,
    headers: HashMap<String, String>,
}

impl Head {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The headers `x-amz-meta-*`.
    pub(super) fn metadata(&self) -> Vec<(String, String)> {
        let is_metadata = |(name, _): &(&String, &String)| name.starts_with("x-amz-meta-");
        self.headers.iter().filter(is_metadata).map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

/// The answer to a request.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) text: String,
    /// Part of an object, instead of a text.
    pub(super) content: Option<(Body, Range<u64>)>,
}

impl Reply {
    pub(super) fn xml(status: u16, text: String) -> Self {
        Self { status, text, headers: vec![("content-type".to_owned(), "application/xml".to_owned())], content: None }
    }

    pub(super) fn error(status: u16, code: &str) -> Self {
        Self::xml(status, format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>"))
    }
}

/// Reads the next head; `None` when the client has closed. `buffered` keeps what came after it.
pub(super) fn read_head(stream: &mut TcpStream, buffered: &mut Vec<u8>) -> io::Result<Option<Head>> {
    let mut chunk = [0; 8 << 10];
    loop {
        if let Some(end) = buffered.windows(4).position(|four| four == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&buffered[..end]).into_owned();
            buffered.drain(..end + 4);
            return Ok(Some(parse(&text).ok_or_else(|| io::Error::other("a head that is none"))?));
        }
        let received = stream.read(&mut chunk)?;
        if received == 0 || buffered.len() > HEAD_BYTES {
            return Ok(None);
        }
        buffered.extend_from_slice(&chunk[..received]);
    }
}

fn parse(text: &str) -> Option<Head> {
    let mut lines = text.split("\r\n");
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query = url::form_urlencoded::parse(query.as_bytes()).into_owned().collect();
    let header = |line: &str| line.split_once(':').map(|(k, v)| (k.to_ascii_lowercase(), v.trim().to_owned()));
    let headers = lines.filter_map(header).collect();
    Some(Head { method, path: decoded(path.trim_start_matches('/')), query, headers })
}

pub(super) fn decoded(path: &str) -> String {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.filter(|_| *first == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &tail[2..]).1,
            None => (bytes.push(*first), rest = tail).1,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Takes a request's body off the connection, or refuses it after that.
pub(super) fn read_body(
    stream: &mut TcpStream,
    buffered: &mut Vec<u8>,
    head: &Head,
    objects: &Objects,
) -> io::Result<Result<Body, Reply>> {
    let number = |name: &str| head.header(name).and_then(|text| text.parse::<usize>().ok());
    let length = number("content-length").unwrap_or(0);
    let framed = head.header("content-encoding").is_some_and(|encoding| encoding.contains("aws-chunked"));
    if length > SMALL_BYTES && !objects.keeps() {
        discard(stream, buffered, length)?;
        return Ok(Ok(Body::Pattern(number("x-amz-decoded-content-length").unwrap_or(length) as u64)));
    }
    let mut memory = objects.memory(length);
    // With a POST it is the checksum of the whole object, not of this body.
    let told = head.header("x-amz-checksum-crc32").filter(|_| head.method == "PUT");
    let mut crc = crc32fast::Hasher::new();
    // While it is in cache: a server on the client's machine takes its time from the client.
    receive(stream, buffered, &mut memory, |received| {
        if told.is_some() && !framed {
            crc.update(received);
        }
    })?;
    if framed {
        memory = unframed(&memory).ok_or_else(|| io::Error::other("broken aws-chunked framing"))?;
        crc.update(&memory);
    }
    let found = base64::engine::general_purpose::STANDARD.encode(crc.finalize().to_be_bytes());
    if told.is_some_and(|told| told != found) {
        return Ok(Err(Reply::error(400, "BadDigest")));
    }
    Ok(Ok(objects.kept(memory)))
}

/// Fills `memory` with what came after the head and what follows, and shows each piece to `see`.
fn receive(
    stream: &mut TcpStream,
    buffered: &mut Vec<u8>,
    memory: &mut [u8],
    mut see: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut at = buffered.len().min(memory.len());
    memory[..at].copy_from_slice(&buffered[..at]);
    buffered.drain(..at);
    see(&memory[..at]);
    while at < memory.len() {
        let end = memory.len().min(at + CHUNK_BYTES);
        let received = match stream.read(&mut memory[at..end]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            received => received?,
        };
        see(&memory[at..at + received]);
        at += received;
    }
    Ok(())
}

/// `MSG_TRUNC` drops the bytes where they are: the client's copy into the kernel is the only one.
fn discard(stream: &TcpStream, buffered: &mut Vec<u8>, length: usize) -> io::Result<()> {
    let early = buffered.len().min(length);
    buffered.drain(..early);
    let mut rest = length - early;
    let mut unused = vec![0; CHUNK_BYTES];
    while rest > 0 {
        let wanted = rest.min(CHUNK_BYTES);
        let (_, dropped) = recv(stream, &mut unused[..wanted], RecvFlags::TRUNC)?;
        if dropped == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        rest -= dropped;
    }
    Ok(())
}

/// The payload of `size[;signature]\r\n data \r\n … 0\r\n trailers`.
fn unframed(framed: &[u8]) -> Option<Vec<u8>> {
    let mut payload = Vec::with_capacity(framed.len());
    let mut rest = framed;
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        let bytes = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        if bytes == 0 {
            return Some(payload);
        }
        payload.extend_from_slice(rest.get(end + 2..end + 2 + bytes)?);
        rest = rest.get(end + 2 + bytes + 2..)?;
    }
}

/// Writes `reply`; to a HEAD, its head only.
pub(super) fn write_reply(stream: &mut TcpStream, head: &Head, reply: &Reply) -> io::Result<()> {
    write_head(stream, head, reply)?;
    match &reply.content {
        Some((body, range)) if head.method != "HEAD" => body.write(range.clone(), stream),
        _ => Ok(()),
    }
}

/// Writes the head of `reply` and the first half of the object's bytes.
pub(super) fn write_half(stream: &mut TcpStream, head: &Head, reply: &Reply) -> io::Result<()> {
    write_head(stream, head, reply)?;
    match &reply.content {
        Some((body, range)) => body.write(range.start..range.start.midpoint(range.end), stream),
        _ => Ok(()),
    }
}

fn write_head(stream: &mut TcpStream, head: &Head, reply: &Reply) -> io::Result<()> {
    let length = reply.content.as_ref().map_or(reply.text.len() as u64, |(_, range)| range.end - range.start);
    // A client on the AWS CRT overlooks the status of an answer without any header.
    let mut text = format!("HTTP/1.1 {} -\r\nserver: strata-bench-s3\r\n", reply.status);
    if reply.status != 204 {
        text.push_str(&format!("content-length: {length}\r\n"));
    }
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    if head.method != "HEAD" {
        text.push_str(&reply.text);
    }
    stream.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_decoded() {
        let head = parse("PUT /b/a%20b+c?partNumber=2&uploadId=x%2Fy HTTP/1.1\r\nX-Amz-Meta-N: v\r\n").unwrap();
        assert_eq!((head.method.as_str(), head.path.as_str()), ("PUT", "b/a b+c"));
        assert_eq!(head.query["uploadId"], "x/y");
        assert_eq!(head.metadata(), [("x-amz-meta-n".to_owned(), "v".to_owned())]);
    }

    #[test]
    fn aws_chunked_framing_is_taken_off() {
        let framed = b"3;chunk-signature=0\r\nabc\r\n2\r\nde\r\n0\r\nx-amz-checksum-crc32:AAAA\r\n\r\n";
        assert_eq!(unframed(framed).unwrap(), b"abcde");
        assert_eq!(unframed(b"9\r\nabc\r\n"), None);
    }
}
