//! An S3 server for measurements: it answers fast enough that the client is the limit.
//!
//! It speaks as much of S3 as uploads, ranged reads, listings and deletes need, trusts every signature, and
//! lives on one thread for each connection. Large bodies are thrown away inside the kernel unless they are to
//! be kept; then they go into memory that is used again once the object is gone, because fresh pages cost far
//! more than the copy. A CRC-32 that comes with a kept body is checked. Faults can be asked for. Never an example of a
//! store: nothing is durable.

mod faults;
mod objects;
mod wire;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub use faults::Trouble;
use faults::{Fault, Faults, wait_for_the_end};
use objects::{Body, Objects};
use wire::{Head, Reply};

/// Bucket and key under which the number of requests by kind is read, as a JSON object; not itself counted.
const COUNTERS: &str = "-/counters";

/// A running server, stopped when dropped.
#[derive(Debug)]
pub struct BenchServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    objects: Objects,
    faults: Faults,
    requests: Mutex<BTreeMap<String, u64>>,
    stopped: AtomicBool,
}

impl BenchServer {
    /// Listens on a port of the system's choice on 127.0.0.1. `keep` says whether large bodies are kept;
    /// otherwise reading them back gives a pattern of the same length.
    ///
    /// # Errors
    /// If no port can be had.
    pub fn start(keep: bool) -> io::Result<Self> {
        Self::troubled(keep, Trouble::default())
    }

    /// As [`BenchServer::start`], with faults.
    ///
    /// # Errors
    /// If no port can be had.
    pub fn troubled(keep: bool, trouble: Trouble) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            objects: Objects::new(keep),
            faults: Faults::new(trouble),
            requests: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let own = shared.clone();
        std::thread::Builder::new().name("bench-s3".to_owned()).spawn(move || accept(&listener, &own))?;
        Ok(Self { address, shared })
    }

    /// `http://127.0.0.1:port`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Number of requests by kind, such as `PUT part`; those that failed are `fault` too or, if nothing was done, only.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.shared.requests.lock().expect("no panic while held").clone()
    }

    /// Requests in flight while one is served, on average.
    pub fn mean_in_flight(&self) -> f64 {
        self.shared.faults.mean_in_flight()
    }

    /// From here on nothing goes wrong.
    pub fn heal(&self) {
        self.shared.faults.heal();
    }

    /// Ids of uploads that have begun and not ended.
    pub fn pending_uploads(&self) -> Vec<String> {
        self.shared.objects.pending_uploads()
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, which then sees the flag; if nobody listens any more, all is done.
        let _ = TcpStream::connect(self.address);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stopped.load(Ordering::Relaxed) {
            return;
        }
        let (Ok(stream), shared) = (stream, shared.clone()) else {
            continue;
        };
        // A client that goes away in the middle is no fault of the server's.
        let serve = move || serve(stream, &shared).unwrap_or_else(|error| tracing::debug!(%error, "connection ended"));
        if let Err(error) = std::thread::Builder::new().name("bench-s3-connection".to_owned()).spawn(serve) {
            tracing::warn!(%error, "no thread for a connection");
        }
    }
}

fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffered = Vec::new();
    while let Some(head) = wire::read_head(&mut stream, &mut buffered)? {
        if head.header("expect").is_some() {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let (_in_flight, fault) = shared.faults.enter(&head);
        shared.faults.wait();
        if fault.is_some() {
            shared.count("fault");
        }
        let refusal = match fault {
            Some(Fault::Reset) => return Ok(()),
            Some(Fault::SlowDown) => Some(Reply::error(503, "SlowDown")),
            Some(Fault::TimedOut) => Some(Reply::error(400, "RequestTimeout")),
            _ => None,
        };
        let reply = match refusal {
            Some(refusal) => {
                // Read first: a connection closed over unread bytes is reset, and the answer lost.
                drop(wire::read_body(&mut stream, &mut buffered, &head, &shared.objects)?);
                refusal
            }
            None => answer(&head, &mut stream, &mut buffered, shared)?,
        };
        match fault {
            Some(Fault::Lost) => return Ok(()),
            Some(Fault::Error) => wire::write_reply(&mut stream, &head, &Reply::error(500, "InternalError"))?,
            Some(Fault::Cut) => return wire::write_half(&mut stream, &head, &reply),
            Some(Fault::Stalled) => {
                wire::write_half(&mut stream, &head, &reply)?;
                return wait_for_the_end(&mut stream);
            }
            _ => wire::write_reply(&mut stream, &head, &reply)?,
        }
    }
    Ok(())
}

impl Shared {
    fn count(&self, kind: &str) {
        *self.requests.lock().expect("no panic while held").entry(kind.to_owned()).or_default() += 1;
    }
}

fn answer(head: &Head, stream: &mut TcpStream, buffered: &mut Vec<u8>, shared: &Shared) -> io::Result<Reply> {
    let objects = &shared.objects;
    let body = match wire::read_body(stream, buffered, head, objects)? {
        Ok(body) => body,
        Err(refused) => return Ok(refused),
    };
    let query = |name: &str| head.query.get(name).map(String::as_str);
    let (upload, part) = (query("uploadId"), query("partNumber").and_then(|number| number.parse::<u32>().ok()));
    let count = |kind: &str| shared.count(kind);
    let (bucket, key) = head.path.split_once('/').unwrap_or((&head.path, ""));
    let path = format!("{bucket}/{key}");
    Ok(match (head.method.as_str(), key.is_empty(), upload, part) {
        ("PUT", false, Some(upload), Some(part)) => {
            count("PUT part");
            objects.put_part(upload, part, body)
        }
        ("PUT", false, ..) if head.header("x-amz-copy-source").is_some() => {
            count("PUT copy");
            let source = wire::decoded(head.header("x-amz-copy-source").unwrap_or_default());
            objects.copy(source.trim_start_matches('/'), &path)
        }
        ("PUT", false, ..) => {
            count("PUT object");
            objects.put(&path, body, head.metadata(), head.header("if-none-match").is_some())
        }
        ("POST", false, Some(upload), _) => {
            count("POST complete");
            objects.complete(&path, upload)
        }
        ("POST", false, None, _) => {
            count("POST begin");
            objects.begin(&path, head.metadata())
        }
        ("POST", true, ..) => {
            count("POST delete");
            objects.delete_all(bucket, &String::from_utf8_lossy(&body.to_vec()))
        }
        ("DELETE", ..) => {
            count("DELETE");
            objects.delete(&path, upload)
        }
        ("GET", false, ..) if path == COUNTERS => {
            let requests = shared.requests.lock().expect("no panic while held").clone();
            Reply::xml(200, serde_json::to_string(&requests).expect("a map of numbers is JSON"))
        }
        ("GET" | "HEAD", false, ..) => {
            count(&head.method);
            objects.get(&path, head.header("range"))
        }
        ("GET", true, ..) if query("uploads").is_some() => {
            count("GET uploads");
            objects.list_uploads(bucket, query("prefix").unwrap_or_default())
        }
        ("GET", true, ..) if query("location").is_none() => {
            count("GET list");
            objects.list(bucket, &head.query)
        }
        ("PUT" | "GET" | "HEAD", true, ..) => Reply::xml(200, "<LocationConstraint/>".to_owned()),
        _ => Reply::error(501, "NotImplemented"),
    })
}
