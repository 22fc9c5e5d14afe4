//! Azurite, Microsoft's emulator of its blob store: whoever runs these tests has installed it and names its program.

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
