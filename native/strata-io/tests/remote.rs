//! What only remote stores promise.

mod support;

use std::process::Command;

use strata_io::testing::bench_server::BenchServer;
use strata_io::{Error, PutMode, digest};
use support::proxy::{Action, Proxy, Rule, answer, error, header};
use support::{config, pattern, s3, servers, store};

#[tokio::test]
async fn a_missing_bucket_is_said_to_be_missing() {
    let store = s3(servers::moto(), &servers::fresh("never-made"), &config());
    let errors = [
        store.put("k", "x".into(), PutMode::Overwrite).await.unwrap_err(),
        store.put("k", "x".into(), PutMode::Create).await.unwrap_err(),
        store.create("k", 20 << 20).await.unwrap_err(),
        store.read("k", None).await.unwrap_err(),
        store.size("k").await.unwrap_err(),
        store.list("").await.unwrap_err(),
        store.delete("k").await.unwrap_err(),
    ];
    for error in errors {
        let named = matches!(&error, Error::NoBucket { .. });
        assert!(named, "{error}");
    }
}

#[tokio::test]
async fn wrong_credentials_are_denied_without_being_shown() {
    let (endpoint, bucket) = servers::s3s_bucket();
    let url = format!("s3://{bucket}/run");
    for (key, secret) in [(servers::KEY, "wrong-secret"), ("AKIAUNKNOWN", servers::SECRET)] {
        let options = [("endpoint", endpoint), ("access_key_id", key), ("secret_access_key", secret)];
        let denied = store(&url, &options, &config());
        let errors = [
            denied.put("k", "x".into(), PutMode::Overwrite).await.unwrap_err(),
            denied.put("k", "x".into(), PutMode::Create).await.unwrap_err(),
            denied.read("k", None).await.unwrap_err(),
            denied.size("k").await.unwrap_err(),
            denied.list("").await.unwrap_err(),
            denied.create("k", 20 << 20).await.unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
            assert!(!format!("{error} {error:?} {denied:?}").contains(secret), "{error}");
        }
    }
}

#[tokio::test]
async fn memory_that_changed_since_its_crc_was_taken_is_refused_by_the_store() {
    // s3s-fs checks whole objects but not parts; the measurement server checks both.
    let bench = BenchServer::start(true).unwrap();
    let (endpoint, bucket) = servers::s3s_bucket();
    let bytes = pattern(6 << 20);
    let crc = |index: usize| digest::crc32(&bytes[index * (5 << 20)..bytes.len().min((index + 1) * (5 << 20))]);
    let changed = |len: usize, index: usize| {
        let mut parts = support::parts(&*s3(endpoint, &bucket, &config()), &bytes.slice(..len));
        parts[index].crc32 = crc(index) ^ 1;
        parts
    };

    let store = s3(&bench.endpoint(), "b", &config());
    let writer = store.create("large", bytes.len() as u64).await.unwrap();
    let error = support::write_all(&*writer, changed(bytes.len(), 1)).await.unwrap_err();
    assert!(matches!(&error, Error::Mismatch { object, .. } if object.ends_with("/large")), "{error}");
    writer.abort().await;

    for store in [store, s3(endpoint, &bucket, &config())] {
        let writer = store.create("small", 5 << 20).await.unwrap();
        support::write_all(&*writer, changed(5 << 20, 0)).await.unwrap();
        let error = writer.finish().await.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[tokio::test]
async fn moto_knows_the_crc_of_the_whole_object() {
    let (endpoint, bucket) = servers::moto_bucket().await;
    let store = s3(endpoint, &bucket, &config());
    let bytes = pattern((5 << 20) + 12_345);
    support::write_object(&*store, "large", &bytes).await.unwrap();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{endpoint}/{bucket}/run/large");
    let head = client.head(url).header("x-amz-checksum-mode", "ENABLED").send().await.unwrap();
    use base64::Engine;
    let crc = base64::engine::general_purpose::STANDARD.encode(digest::crc32(&bytes).to_be_bytes());
    assert_eq!(head.headers()["x-amz-checksum-crc32"], crc.as_str());
}

/// Runs `test` of this file in a process of its own, with these variables and none of AWS's.
fn in_its_own_process(test: &str, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("AWS_")) {
        command.env_remove(name);
    }
    command.args(["--exact", test]).env(INNER, "1").envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

const INNER: &str = "STRATA_TEST_INNER";

#[tokio::test]
async fn a_proxy_in_the_environment_does_not_catch_this_machine() {
    if std::env::var_os(INNER).is_none() {
        // Nothing listens on port 9 (discard).
        let proxy = ["http_proxy", "HTTP_PROXY", "ALL_PROXY"].map(|name| (name, "http://127.0.0.1:9"));
        return in_its_own_process("a_proxy_in_the_environment_does_not_catch_this_machine", &proxy);
    }
    let (endpoint, bucket) = servers::s3s_bucket();
    let store = s3(endpoint, &bucket, &config());
    store.put("k", "x".into(), PutMode::Overwrite).await.unwrap();
}

#[tokio::test]
async fn a_profile_gives_keys_and_region() {
    if std::env::var_os(INNER).is_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        let keys = format!("aws_access_key_id = {}\naws_secret_access_key = {}", servers::KEY, servers::SECRET);
        let wrong = "aws_access_key_id = other\naws_secret_access_key = other";
        std::fs::write(&file, format!("[default]\n{wrong}\n[profile team]\nregion = eu-west-3\n{keys}\n")).unwrap();
        let file = file.to_str().unwrap();
        let variables =
            [("AWS_CONFIG_FILE", file), ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"), ("AWS_PROFILE", "team")];
        return in_its_own_process("a_profile_gives_keys_and_region", &variables);
    }
    let (endpoint, bucket) = servers::s3s_bucket();
    let url = format!("s3://{bucket}/run");
    let by_environment = store(&url, &[("endpoint", endpoint)], &config());
    by_environment.put("k", "x".into(), PutMode::Overwrite).await.unwrap();
    let by_option = store(&url, &[("endpoint", endpoint), ("profile", "default")], &config());
    let error = by_option.read("k", None).await.unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
}

#[tokio::test]
async fn an_instance_is_asked_once_for_its_keys() {
    let role = format!(
        r#"{{"Code":"Success","AccessKeyId":"{}","SecretAccessKey":"{}","Token":"t","Expiration":"2099-01-01T00:00:00Z"}}"#,
        servers::KEY,
        servers::SECRET
    );
    if std::env::var_os(INNER).is_none() {
        let rule = |method, target, answer| Rule { method, target, nth: 0, action: Action::Answer(answer) };
        let metadata = Proxy::start(
            "http://127.0.0.1:9",
            vec![
                rule("PUT", "/api/token", answer(200, "x-aws-ec2-metadata-token-ttl-seconds: 600\r\n", "session")),
                rule("GET", "security-credentials/role", answer(200, "", &role)),
                rule("GET", "security-credentials", answer(200, "", "role")),
            ],
        );
        let endpoint = metadata.endpoint();
        let variables = [
            ("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint.as_str()),
            ("AWS_CONFIG_FILE", "/dev/null"),
            ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"),
        ];
        in_its_own_process("an_instance_is_asked_once_for_its_keys", &variables);
        assert_eq!(metadata.heads("GET", "security-credentials/role").len(), 1);
        return;
    }
    let (endpoint, bucket) = servers::s3s_bucket();
    let store = store(&format!("s3://{bucket}/run"), &[("endpoint", endpoint)], &config());
    let puts = ["a", "b", "c"].map(|name| store.put(name, "x".into(), PutMode::Overwrite));
    futures::future::try_join_all(puts).await.unwrap();
}

/// A credential process that gives a new key at each call, or the same one each time.
fn key_process(directory: &std::path::Path, key: &str) -> std::path::PathBuf {
    let (script, calls) = (directory.join("keys.sh"), directory.join("calls"));
    let json = format!(
        r#"{{"Version":1,"AccessKeyId":"{key}","SecretAccessKey":"s","SessionToken":"t","Expiration":"2099-01-01T00:00:00Z"}}"#
    );
    let line = format!("echo x >> {calls}\nn=$(wc -l < {calls})\ncat <<END\n{json}\nEND\n", calls = calls.display());
    std::fs::write(&script, line).unwrap();
    let file = directory.join("config");
    std::fs::write(&file, format!("[default]\ncredential_process = sh {}\n", script.display())).unwrap();
    file
}

const EXPIRED_TEST: &str = "keys_that_expire_in_mid_upload_are_renewed_once";

#[tokio::test]
async fn keys_that_expire_in_mid_upload_are_renewed_once() {
    if std::env::var_os(INNER).is_none() {
        for key in ["KEY$n", "KEY"] {
            let directory = tempfile::tempdir().unwrap();
            let file = key_process(directory.path(), key);
            let variables = [("AWS_CONFIG_FILE", file.to_str().unwrap()), ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")];
            in_its_own_process(EXPIRED_TEST, &[variables[0], variables[1], ("STRATA_TEST_KEY", key)]);
        }
        return;
    }
    let is_renewable = std::env::var("STRATA_TEST_KEY").unwrap() == "KEY$n";
    let server = BenchServer::start(true).unwrap();
    for (status, nth) in [(400, 1), (403, 1), (403, 0)] {
        let expired = Action::Answer(error(status, "", "ExpiredToken"));
        let rule = Rule { method: "PUT", target: "partNumber=2", nth, action: expired };
        let proxy = Proxy::start(&server.endpoint(), vec![rule]);
        let store = store("s3://b/run", &[("endpoint", &proxy.endpoint())], &config());
        let written = support::write_object(&*store, "large", &pattern((5 << 20) + 1)).await;
        let used: Vec<String> =
            proxy.heads("PUT", "partNumber=2").iter().map(|head| header(head, "authorization")).collect();
        assert_eq!(used.len(), if is_renewable { 2 } else { 1 }, "{used:?}");
        assert!(!is_renewable || used[0] != used[1], "{used:?}");
        match written {
            Ok(()) => assert!(is_renewable && nth == 1),
            Err(Error::PermissionDenied { detail, .. }) => {
                assert!(detail.contains("ExpiredToken") && !(is_renewable && nth == 1), "{detail}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn a_wrong_clock_is_set_by_the_stores_or_else_named_with_both_times() {
    let server = BenchServer::start(true).unwrap();
    for nth in [1, 0] {
        let skewed = error(403, "date: Thu, 01 Jan 2026 00:00:00 GMT\r\n", "RequestTimeTooSkewed");
        let rule = Rule { method: "PUT", target: "/o", nth, action: Action::Answer(skewed) };
        let proxy = Proxy::start(&server.endpoint(), vec![rule]);
        let store = s3(&proxy.endpoint(), "b", &config());
        let written = store.put("o", "x".into(), PutMode::Overwrite).await;
        let dates: Vec<String> = proxy.heads("PUT", "/o").iter().map(|head| header(head, "x-amz-date")).collect();
        assert!(dates.len() == 2 && dates[1].starts_with("20260101T0000"), "{dates:?}");
        if nth == 1 {
            written.unwrap();
            // A request that has no header of ours is signed with the store's time too.
            store.read("o", None).await.unwrap();
            let date = header(&proxy.heads("GET", "/o")[0], "x-amz-date");
            assert!(date.starts_with("20260101T00"), "{date}");
        } else {
            let error = written.unwrap_err();
            let denied = matches!(&error, Error::PermissionDenied { detail, .. }
                if detail.contains("RequestTimeTooSkewed") && detail.contains("the clock of this machine says"));
            assert!(denied && error.to_string().contains("the store's Thu, 01 Jan 2026 00:00:00 GMT"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_server_that_checks_signatures_accepts_a_corrected_time() {
    let (endpoint, bucket) = servers::s3s_bucket();
    // It checks the signature over whatever time it is told: one minute off is within every store's limit.
    let minute_ahead = httpdate::fmt_http_date(std::time::SystemTime::now() + std::time::Duration::from_secs(60));
    let skewed = error(403, &format!("date: {minute_ahead}\r\n"), "RequestTimeTooSkewed");
    let proxy =
        Proxy::start(endpoint, vec![Rule { method: "PUT", target: "/odd", nth: 1, action: Action::Answer(skewed) }]);
    let store = s3(&proxy.endpoint(), &bucket, &config());
    let name = "odd ü~#?[]{}/a%20b+c=d";
    store.put(name, "x".into(), PutMode::Overwrite).await.unwrap();
    assert_eq!(store.read(name, None).await.unwrap(), "x");
    assert_eq!(store.list("odd ü~#?[]{}/").await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_web_server_is_read_and_never_written() {
    let server = BenchServer::start(true).unwrap();
    s3(&server.endpoint(), "b", &config()).put("k", pattern(1000), PutMode::Overwrite).await.unwrap();
    let web = store(&format!("{}/b/run", server.endpoint()), &[], &config());
    assert_eq!(web.size("k").await.unwrap(), 1000);
    assert_eq!(web.read("k", Some(10..20)).await.unwrap(), pattern(1000)[10..20]);
    assert!(matches!(web.read("no", None).await, Err(Error::NotFound { .. })));
    for error in [
        web.put("k", "x".into(), PutMode::Overwrite).await.unwrap_err(),
        web.delete("k").await.unwrap_err(),
        web.create("k", 1).await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("read-only"), "{error}");
    }
}
