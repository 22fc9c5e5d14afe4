//! S3 servers on ports of the system's choice, which end with the test process.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, mpsc};

use hyper_util::rt::{TokioExecutor, TokioIo};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

/// Credentials that every server accepts.
pub const KEY: &str = "AKIATESTTESTTEST";
/// Their secret.
pub const SECRET: &str = "secret-that-no-message-may-show";

/// Ends by itself when our end of its input closes, however this process ends.
const MOTO: &str = "
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger('werkzeug').setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
server.start()
print('http://%s:%d' % server.get_host_and_port(), flush=True)
sys.stdin.read()
";

struct Moto {
    endpoint: String,
    _process: Mutex<Child>,
}

static MOTO_SERVER: LazyLock<Moto> = LazyLock::new(|| {
    let python = std::env::var("STRATA_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let hint = format!("{python:?} must have moto[server]; STRATA_TEST_PYTHON names another interpreter");
    let mut process = Command::new(&python)
        .args(["-c", MOTO])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("moto cannot start: {error}; {hint}"));
    let mut endpoint = String::new();
    BufReader::new(process.stdout.take().expect("piped")).read_line(&mut endpoint).expect("readable");
    assert!(endpoint.starts_with("http://"), "moto did not start; {hint}");
    Moto { endpoint: endpoint.trim().to_owned(), _process: Mutex::new(process) }
});

/// A name no other test uses, in this process or, on servers that are shared, another.
pub fn fresh(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Endpoint of moto, started when first asked for.
///
/// # Panics
/// If it cannot start: a test that needs it must not pass without it.
pub fn moto() -> &'static str {
    &MOTO_SERVER.endpoint
}

/// Endpoint of moto and a new bucket there.
pub async fn moto_bucket() -> (&'static str, String) {
    let bucket = fresh("bucket");
    let made = http_request("PUT", &format!("{}/{bucket}", moto())).await;
    assert_eq!(made.0, 200, "a bucket could not be made: {}", made.1);
    (moto(), bucket)
}

/// For requests of the tests themselves.
pub fn client() -> reqwest::Client {
    // A store may not have been opened yet; an error says that one has.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().expect("a client")
}

/// Status and body of an unsigned request.
pub async fn http_request(method: &str, url: &str) -> (u16, String) {
    let method = method.parse().expect("a method");
    let answer = client().request(method, url).send().await.expect("an answer");
    (answer.status().as_u16(), answer.text().await.expect("a body"))
}

struct S3sFs {
    endpoint: String,
    root: PathBuf,
    _directory: tempfile::TempDir,
}

static S3S_FS: LazyLock<S3sFs> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().to_owned();
    let (own_root, (ready, endpoint)) = (root.clone(), mpsc::channel());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build();
        runtime.expect("a runtime").block_on(serve_s3s(own_root, ready));
    });
    S3sFs { endpoint: endpoint.recv().expect("the server starts"), root, _directory: directory }
});

async fn serve_s3s(root: PathBuf, ready: mpsc::Sender<String>) {
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).expect("a root"));
    builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
    let service = builder.build();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    ready.send(format!("http://{}", listener.local_addr().expect("bound"))).expect("somebody waits");
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            continue;
        };
        let service = service.clone();
        tokio::spawn(async move {
            let http = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            // A client that goes away in the middle is what some tests do.
            let _ = http.serve_connection(TokioIo::new(socket), service).await;
        });
    }
}

/// Endpoint of s3s-fs.
pub fn s3s_fs() -> &'static str {
    &S3S_FS.endpoint
}

/// Endpoint of s3s-fs and a new bucket there.
pub fn s3s_bucket() -> (&'static str, String) {
    let bucket = fresh("bucket");
    std::fs::create_dir(S3S_FS.root.join(&bucket)).expect("a bucket is a directory");
    (s3s_fs(), bucket)
}
