//! Between a store and its server: lets chosen requests fail in chosen ways.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What happens to a request.
#[derive(Debug, Clone)]
pub enum Action {
    /// The connection ends; the server never sees the request.
    Reset,
    /// Answered with this; the server never sees the request.
    Answer(String),
    /// The server does it, and the connection ends without an answer.
    Lost,
    /// The server does it, and this is the answer.
    Replaced(String),
    /// The server's answer ends after this many bytes of its body.
    Cut(usize),
    /// The server's answer comes without its body, and nothing more.
    Stall,
    /// The server's answer comes with so many bytes of its body, and the others after this time.
    Late(usize, Duration),
    /// The server's answer comes with a byte of its body every 50 ms.
    Trickle,
    /// Nobody reads the request's body.
    Deaf,
}

/// Applies `action` to request number `nth`, from 1, of those with this method and a target that contains
/// `target`; with `nth` 0, to all of them.
#[derive(Debug, Clone)]
pub struct Rule {
    pub method: &'static str,
    pub target: &'static str,
    pub nth: usize,
    pub action: Action,
}

/// A running proxy.
pub struct Proxy {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Stands before the server at `endpoint`.
    pub fn start(endpoint: &str, rules: Vec<Rule>) -> Self {
        let server: SocketAddr = endpoint.trim_start_matches("http://").parse().expect("an address");
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let address = listener.local_addr().expect("bound");
        let heads = Arc::new(Mutex::new(Vec::new()));
        let (own, rules) = (heads.clone(), Arc::new(rules));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (heads, rules) = (own.clone(), rules.clone());
                // Errors are ends of connections, which is what this is for.
                std::thread::spawn(move || drop(serve(client, server, &rules, &heads)));
            }
        });
        Self { address, heads }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Heads of the requests so far that have this method and a target that contains `target`.
    pub fn heads(&self, method: &str, target: &str) -> Vec<String> {
        let heads = self.heads.lock().unwrap();
        heads.iter().filter(|head| matches(head, method, target)).cloned().collect()
    }
}

/// The value of a header, or nothing.
pub fn header(head: &str, name: &str) -> String {
    let value = |line: &str| {
        let (own, value) = line.split_once(':')?;
        own.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    };
    head.lines().find_map(value).unwrap_or_default()
}

/// A complete answer.
pub fn answer(status: u16, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status} -\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

/// An error as S3 writes it.
pub fn error(status: u16, headers: &str, code: &str) -> String {
    answer(status, headers, &format!("<Error><Code>{code}</Code><Message>by the test</Message></Error>"))
}

fn matches(head: &str, method: &str, target: &str) -> bool {
    let mut words = head.split(' ');
    words.next() == Some(method) && words.next().is_some_and(|own| own.contains(target))
}

fn serve(mut client: TcpStream, server: SocketAddr, rules: &[Rule], heads: &Mutex<Vec<String>>) -> io::Result<()> {
    loop {
        let head = read_head(&mut client)?;
        let action = {
            let mut heads = heads.lock().unwrap();
            heads.push(head.clone());
            let nth = |rule: &Rule| heads.iter().filter(|head| matches(head, rule.method, rule.target)).count();
            let applies = |rule: &&Rule| matches(&head, rule.method, rule.target) && [0, nth(rule)].contains(&rule.nth);
            rules.iter().find(applies).map(|rule| rule.action.clone())
        };
        if let Some(Action::Deaf) = action {
            return wait_for_the_end(&mut client);
        }
        let mut body = vec![0; length(&head)];
        client.read_exact(&mut body)?;
        match action {
            Some(Action::Reset) => return Ok(()),
            Some(Action::Answer(answer)) => {
                client.write_all(answer.as_bytes())?;
                continue;
            }
            _ => {}
        }
        let mut upstream = TcpStream::connect(server)?;
        upstream.write_all(head.as_bytes())?;
        upstream.write_all(&body)?;
        let answer_head = read_head(&mut upstream)?;
        let mut answer = vec![0; if head.starts_with("HEAD") { 0 } else { length(&answer_head) }];
        upstream.read_exact(&mut answer)?;
        match action {
            Some(Action::Lost) => return Ok(()),
            Some(Action::Replaced(answer)) => client.write_all(answer.as_bytes())?,
            Some(Action::Cut(bytes)) => {
                client.write_all(answer_head.as_bytes())?;
                return client.write_all(&answer[..bytes]);
            }
            Some(Action::Late(bytes, wait)) => {
                client.write_all(answer_head.as_bytes())?;
                client.write_all(&answer[..bytes])?;
                std::thread::sleep(wait);
                client.write_all(&answer[bytes..])?;
            }
            Some(Action::Trickle) => {
                client.write_all(answer_head.as_bytes())?;
                for byte in answer {
                    client.write_all(&[byte])?;
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            Some(Action::Stall) => {
                client.write_all(answer_head.as_bytes())?;
                return wait_for_the_end(&mut client);
            }
            _ => {
                client.write_all(answer_head.as_bytes())?;
                client.write_all(&answer)?;
            }
        }
    }
}

/// Up to and with the empty line.
fn read_head(stream: &mut TcpStream) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    String::from_utf8(head).map_err(io::Error::other)
}

fn length(head: &str) -> usize {
    let value = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length:").map(|v| v.trim().parse().ok());
    head.lines().find_map(value).flatten().unwrap_or(0)
}

/// Returns when the peer has closed, without reading: its bytes stay in its own socket.
fn wait_for_the_end(stream: &mut TcpStream) -> io::Result<()> {
    let mut byte = [0];
    loop {
        std::thread::sleep(Duration::from_millis(20));
        stream.set_nonblocking(true)?;
        match stream.peek(&mut byte) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        if stream.take_error()?.is_some() {
            return Ok(());
        }
    }
}
