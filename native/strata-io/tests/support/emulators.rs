//! Emulators of other clouds: programs that whoever runs these tests has installed and names in the environment.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex};

use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::HttpRequestBody;

use super::servers::{client, fresh};

/// Azurite's account and key, which its documentation makes public.
pub const ACCOUNT: &str = "devstoreaccount1";
/// The key.
pub const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

struct Emulator {
    endpoint: String,
    _shell: Mutex<Child>,
}

/// Starts `program`, which ends when our end of the shell's input closes, however this process ends.
fn start(variable: &str, arguments: &str) -> Child {
    let program = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} must name the emulator's program"));
    let script = format!(r#""$0" {arguments} <&- & cat > /dev/null; kill $!"#);
    Command::new("sh")
        .args(["-c", &script, &program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a shell")
}

static AZURITE: LazyLock<Emulator> = LazyLock::new(|| {
    let arguments = "--blobHost 127.0.0.1 --blobPort 0 --inMemoryPersistence --skipApiVersionCheck --disableTelemetry";
    let mut shell = start("STRATA_TEST_AZURITE", arguments);
    let mut lines = BufReader::new(shell.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let endpoint = lines
        .find_map(|line| line.split_once("listens on ").map(|(_, url)| url.trim().to_owned()))
        .expect("azurite-blob says where it listens");
    // It ends when nobody reads what it has to say.
    std::thread::spawn(move || lines.for_each(drop));
    Emulator { endpoint, _shell: Mutex::new(shell) }
});

static FAKE_GCS: LazyLock<Emulator> = LazyLock::new(|| {
    // It does not say which port it got: one that is free now.
    let free = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port").local_addr().expect("bound").port();
    let endpoint = format!("http://127.0.0.1:{free}");
    let arguments = format!(
        "-scheme http -host 127.0.0.1 -port {free} -backend memory -external-url {endpoint} -public-host 127.0.0.1:{free}"
    );
    let shell = start("STRATA_TEST_FAKE_GCS", &arguments);
    for _ in 0..100 {
        if std::net::TcpStream::connect(("127.0.0.1", free)).is_ok() {
            return Emulator { endpoint, _shell: Mutex::new(shell) };
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("fake-gcs-server does not listen on {endpoint}");
});

/// Endpoint of Azurite and a new container there.
pub async fn azurite_container() -> (String, String) {
    let (container, endpoint) = (fresh("container"), format!("{}/{ACCOUNT}", AZURITE.endpoint));
    let url = format!("{endpoint}/{container}?restype=container");
    let mut request = http::Request::put(&url)
        .header("x-ms-version", "2023-11-03")
        .header("content-length", "0")
        .body(HttpRequestBody::empty())
        .expect("a request");
    let credential = AzureCredential::AccessKey(AzureAccessKey::try_new(ACCOUNT_KEY).expect("a key"));
    AzureAuthorizer::new(&credential, ACCOUNT).try_authorize(&mut request).expect("a signature");
    let answer = client().put(&url).headers(request.headers().clone()).send().await.expect("an answer");
    assert_eq!(answer.status().as_u16(), 201, "{}", answer.text().await.expect("a body"));
    (endpoint, container)
}

/// Endpoint of fake-gcs-server and a new bucket there.
pub async fn gcs_bucket() -> (String, String) {
    let (bucket, endpoint) = (fresh("bucket"), FAKE_GCS.endpoint.clone());
    let url = format!("{endpoint}/storage/v1/b?project=test");
    let answer = client().post(&url).body(format!(r#"{{"name":"{bucket}"}}"#)).send().await.expect("an answer");
    assert_eq!(answer.status().as_u16(), 200, "{}", answer.text().await.expect("a body"));
    (endpoint, bucket)
}
