//! What remote stores promise when the network or the server fails.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_io::digest::{self, DigestKind};
use strata_io::lent::LentMut;
use strata_io::testing::bench_server::BenchServer;
use strata_io::{Error, OpenUpload, PutMode, Store, pending_uploads};
use support::proxy::{Action, Proxy, Rule, answer, error, header};
use support::{config, pattern, write_object};

/// A store behind a proxy with these rules. Objects are put straight into `direct`.
struct Place {
    store: Arc<dyn Store>,
    direct: Arc<dyn Store>,
    proxy: Proxy,
    server: BenchServer,
}

fn place(rules: Vec<Rule>) -> Place {
    let server = BenchServer::start(true).unwrap();
    let proxy = Proxy::start(&server.endpoint(), rules);
    let endpoint = proxy.endpoint();
    let options = [("endpoint", endpoint.as_str()), ("access_key_id", "k"), ("secret_access_key", "s")];
    let store = support::store("s3://b/run", &[options[0], options[1], options[2], ("read_timeout", "1s")], &config());
    let direct = support::s3(&server.endpoint(), "b", &config());
    Place { store, direct, proxy, server }
}

fn rule(method: &'static str, target: &'static str, nth: usize, action: Action) -> Rule {
    Rule { method, target, nth, action }
}

#[tokio::test]
async fn a_throttled_request_is_made_again_after_the_wait_it_was_told() {
    let slow_down = error(503, "retry-after: 1\r\n", "SlowDown");
    let place = place(vec![rule("PUT", "/o", 1, Action::Answer(slow_down))]);
    let began = Instant::now();
    place.store.put("o", pattern(100), PutMode::Overwrite).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(place.direct.read("o", None).await.unwrap(), pattern(100));
}

#[tokio::test]
async fn passing_failures_are_tried_again() {
    let failures = [
        Action::Reset,
        Action::Lost,
        Action::Answer(error(500, "", "InternalError")),
        Action::Answer(error(400, "", "RequestTimeout")),
        Action::Answer(answer(429, "", "")),
    ];
    for failure in failures {
        let place =
            place(vec![rule("PUT", "partNumber=2", 1, failure.clone()), rule("PUT", "small", 1, failure.clone())]);
        let bytes = pattern((11 << 20) + 5);
        write_object(&*place.store, "large", &bytes).await.unwrap_or_else(|error| panic!("{failure:?}: {error}"));
        place.store.put("small", pattern(9), PutMode::Overwrite).await.unwrap();
        assert!(place.direct.read("large", None).await.unwrap() == bytes, "{failure:?}");
        assert_eq!(place.proxy.heads("PUT", "partNumber=2").len(), 2, "{failure:?}");
    }
}

#[tokio::test]
async fn a_refusal_is_not_tried_again() {
    let place = place(vec![rule("PUT", "/o", 0, Action::Answer(error(403, "", "AccessDenied")))]);
    let error = place.store.put("o", pattern(1), PutMode::Overwrite).await.unwrap_err();
    assert!(
        matches!(&error, Error::PermissionDenied { detail, .. } if detail == "AccessDenied: by the test"),
        "{error}"
    );
    assert_eq!(place.proxy.heads("PUT", "/o").len(), 1);
}

#[tokio::test]
async fn when_every_try_fails_the_error_counts_them() {
    let place = place(vec![rule("PUT", "/o", 0, Action::Answer(error(503, "", "SlowDown")))]);
    let error = place.store.put("o", pattern(1), PutMode::Overwrite).await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted { tries: 4, object, .. } if object == "s3://b/run/o"), "{error}");
}

#[tokio::test]
async fn a_create_whose_answer_was_lost_is_known_for_ours() {
    for lost in [Action::Lost, Action::Replaced(error(500, "", "InternalError"))] {
        let place = place(vec![rule("PUT", "/o", 1, lost)]);
        place.store.put("o", pattern(100), PutMode::Create).await.unwrap();
        assert_eq!(place.direct.read("o", None).await.unwrap(), pattern(100));
    }
}

#[tokio::test]
async fn a_create_in_conflict_is_settled_by_what_is_there() {
    for refused in [error(409, "", "ConditionalRequestConflict"), error(412, "", "PreconditionFailed")] {
        // The conflict was with nobody that has won; the answer was to our own write; somebody else was there first.
        let ours = place(vec![rule("PUT", "/o", 1, Action::Answer(refused.clone()))]);
        ours.store.put("o", "ours".into(), PutMode::Create).await.unwrap();
        let ours_too = place(vec![rule("PUT", "/o", 1, Action::Replaced(refused.clone()))]);
        ours_too.store.put("o", "ours".into(), PutMode::Create).await.unwrap();
        assert_eq!(ours_too.proxy.heads("PUT", "/o").len(), 1);
        let theirs = place(vec![rule("PUT", "/o", 1, Action::Answer(refused))]);
        theirs.direct.put("o", "theirs".into(), PutMode::Overwrite).await.unwrap();
        let error = theirs.store.put("o", "ours".into(), PutMode::Create).await.unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
        let found = [&ours, &ours_too, &theirs].map(|place| place.direct.read("o", None));
        assert_eq!(futures::future::try_join_all(found).await.unwrap(), ["ours", "ours", "theirs"]);
    }
}

#[tokio::test]
async fn a_create_that_failed_before_another_won_is_refused() {
    let place = place(vec![rule("PUT", "/o", 1, Action::Reset)]);
    place.direct.put("o", "theirs".into(), PutMode::Create).await.unwrap();
    let error = place.store.put("o", "ours".into(), PutMode::Create).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
}

#[tokio::test]
async fn a_store_without_create_only_puts_says_so_and_is_still_written() {
    let place = place(vec![]);
    assert!(place.store.honours_create().await.unwrap());
    let unsupported = Action::Answer(error(501, "", "NotImplemented"));
    let place = self::place((1..9).step_by(2).map(|nth| rule("PUT", "/o", nth, unsupported.clone())).collect());
    place.store.put("o", "first".into(), PutMode::Create).await.unwrap();
    assert_eq!(place.direct.read("o", None).await.unwrap(), "first");
    let error = place.store.put("o", "second".into(), PutMode::Create).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
}

#[tokio::test]
async fn an_upload_that_was_completed_without_an_answer_is_known_for_ours() {
    let lost =
        [Action::Lost, Action::Replaced(error(500, "", "InternalError")), Action::Replaced(error(200, "", "SlowDown"))];
    for lost in lost {
        let place = place(vec![rule("POST", "large?uploadId", 1, lost.clone())]);
        let bytes = pattern((5 << 20) + 1);
        write_object(&*place.store, "large", &bytes).await.unwrap_or_else(|error| panic!("{lost:?}: {error}"));
        assert!(place.direct.read("large", None).await.unwrap() == bytes);
        assert_eq!(pending_uploads(&*place.direct).await.unwrap(), []);
    }
}

#[tokio::test]
async fn a_success_with_an_error_in_it_is_not_taken_for_one() {
    let place = place(vec![rule("POST", "large?uploadId", 1, Action::Answer(error(200, "", "InternalError")))]);
    let bytes = pattern((5 << 20) + 1);
    write_object(&*place.store, "large", &bytes).await.unwrap();
    assert_eq!(place.proxy.heads("POST", "large?uploadId").len(), 2);
    assert!(place.direct.read("large", None).await.unwrap() == bytes);
}

#[tokio::test]
async fn an_upload_that_cannot_be_completed_is_aborted() {
    let place = place(vec![rule("POST", "large?uploadId", 0, Action::Answer(error(400, "", "InvalidPart")))]);
    write_object(&*place.store, "large", &pattern((5 << 20) + 1)).await.unwrap_err();
    assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
    assert_eq!(pending_uploads(&*place.direct).await.unwrap(), []);
}

#[tokio::test]
async fn a_success_with_an_error_in_it_for_ever_is_an_error() {
    let place = place(vec![rule("POST", "large?uploadId", 0, Action::Answer(error(200, "", "InternalError")))]);
    let error = write_object(&*place.store, "large", &pattern((5 << 20) + 1)).await.unwrap_err();
    let named = matches!(&error, Error::Exhausted { operation: "complete", tries: 4, detail, .. }
        if detail == "InternalError: by the test");
    assert!(named, "{error}");
    assert!(matches!(place.direct.size("large").await, Err(Error::NotFound { .. })));
    assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
}

#[tokio::test]
async fn an_upload_that_failed_is_aborted_although_the_abort_is_throttled() {
    let throttled = Action::Answer(error(503, "", "SlowDown"));
    let rules = vec![
        rule("PUT", "partNumber=2", 0, Action::Answer(error(403, "", "AccessDenied"))),
        rule("DELETE", "uploadId", 1, throttled.clone()),
        rule("DELETE", "uploadId", 2, throttled),
    ];
    let place = place(rules);
    let bytes = pattern(11 << 20);
    let writer = place.store.create("large", bytes.len() as u64).await.unwrap();
    let error = support::write_all(&*writer, support::parts(&*place.store, &bytes)).await.unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
    writer.abort().await;
    assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
    assert_eq!(pending_uploads(&*place.direct).await.unwrap(), []);
}

#[tokio::test]
async fn an_upload_that_met_its_deadline_leaves_nothing() {
    let mut hasty = config();
    hasty.deadline = Duration::from_secs(1);
    for action in [Action::Deaf, Action::Answer(error(503, "retry-after: 1\r\n", "SlowDown"))] {
        let server = BenchServer::start(true).unwrap();
        let proxy = Proxy::start(&server.endpoint(), vec![rule("PUT", "partNumber=2", 0, action)]);
        let store = support::s3(&proxy.endpoint(), "b", &hasty);
        let bytes = pattern(11 << 20);
        let writer = store.create("large", bytes.len() as u64).await.unwrap();
        let began = Instant::now();
        let error = support::write_all(&*writer, support::parts(&*store, &bytes)).await.unwrap_err();
        let named = matches!(&error, Error::Exhausted { operation: "write", object, tries: 1, .. } if object.ends_with("/large"));
        assert!(named && began.elapsed() < Duration::from_secs(5), "{error}");
        writer.abort().await;
        assert_eq!(server.pending_uploads(), Vec::<String>::new());
        assert_eq!(pending_uploads(&*store).await.unwrap(), []);
    }
}

#[tokio::test]
async fn an_upload_whose_id_was_lost_is_found_and_aborted() {
    let bytes = pattern((11 << 20) + 5);
    for lost in [Action::Lost, Action::Replaced(error(500, "", "InternalError"))] {
        let place = place(vec![rule("POST", "uploads", 1, lost.clone())]);
        let other = place.direct.create("large.2", 6 << 20).await.unwrap();
        write_object(&*place.store, "large", &bytes).await.unwrap_or_else(|error| panic!("{lost:?}: {error}"));
        assert!(place.direct.read("large", None).await.unwrap() == bytes);
        // That of another key is somebody else's.
        assert_eq!(place.server.pending_uploads().len(), 1, "{lost:?}");
        other.abort().await;
        assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn of_an_upload_that_could_not_be_begun_nothing_stays() {
    for lost in [Action::Lost, Action::Replaced(error(500, "", "InternalError"))] {
        let place = place(vec![rule("POST", "uploads", 0, lost)]);
        let error = place.store.create("large", 11 << 20).await.unwrap_err();
        assert!(matches!(error, Error::Exhausted { operation: "begin", tries: 4, .. }), "{error}");
        assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
    }
    let place = place(vec![rule("POST", "uploads", 0, Action::Replaced(answer(200, "", "")))]);
    let error = place.store.create("large", 11 << 20).await.unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
}

#[tokio::test]
async fn an_upload_that_nobody_waits_for_any_more_is_aborted_when_it_has_begun() {
    let place = place(vec![rule("POST", "uploads", 0, Action::Stall)]);
    let create = place.store.create("large", 11 << 20);
    tokio::time::timeout(Duration::from_millis(300), create).await.unwrap_err();
    assert_eq!(place.server.pending_uploads().len(), 1);
    let gone = async {
        while !place.server.pending_uploads().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.unwrap();
}

#[tokio::test]
async fn a_store_that_cannot_list_uploads_is_still_written() {
    let refused = [error(501, "", "NotImplemented"), error(403, "", "AccessDenied")];
    for refused in refused {
        let rules =
            vec![rule("POST", "uploads", 1, Action::Lost), rule("GET", "uploads=&prefix", 0, Action::Answer(refused))];
        let place = place(rules);
        write_object(&*place.store, "large", &pattern(11 << 20)).await.unwrap();
        assert_eq!(place.proxy.heads("GET", "uploads=&prefix").len(), 1);
        assert_eq!(place.server.pending_uploads().len(), 1);
    }
}

#[tokio::test]
async fn moto_lists_the_upload_whose_id_was_lost() {
    let (endpoint, bucket) = support::servers::moto_bucket().await;
    let proxy = Proxy::start(endpoint, vec![rule("POST", "uploads", 1, Action::Lost)]);
    let store = support::s3(&proxy.endpoint(), &bucket, &config());
    write_object(&*store, "odd & <name>", &pattern(11 << 20)).await.unwrap();
    let (status, listed) = support::servers::http_request("GET", &format!("{endpoint}/{bucket}?uploads")).await;
    assert!(status == 200 && !listed.contains("<UploadId>"), "{status} {listed}");
    assert_eq!(proxy.heads("DELETE", "uploadId").len(), 1);
}

#[tokio::test]
async fn an_upload_that_nobody_could_abort_is_found_and_ended_later() {
    let place = place(vec![rule("DELETE", "uploadId", 0, Action::Answer(error(403, "", "AccessDenied")))]);
    let writer = place.store.create("large", 6 << 20).await.unwrap();
    writer.abort().await;
    let pending = pending_uploads(&*place.direct).await.unwrap();
    assert_eq!(pending.iter().map(|upload| upload.name.as_str()).collect::<Vec<_>>(), ["large"]);
    assert_eq!(place.server.pending_uploads(), [pending[0].upload_id.clone()]);
    strata_io::discard_upload(&*place.direct, &pending[0]).await.unwrap();
    assert_eq!(place.server.pending_uploads(), Vec::<String>::new());
    assert_eq!(pending_uploads(&*place.direct).await.unwrap(), []);
}

#[tokio::test]
async fn uploads_are_listed_whoever_began_them() {
    let (endpoint, bucket) = support::servers::moto_bucket().await;
    let store = support::s3(endpoint, &bucket, &config());
    let child = store.child("odd & <name>").unwrap();
    let writer = child.create("large", 11 << 20).await.unwrap();
    let names = |open: Vec<OpenUpload>| open.into_iter().map(|upload| upload.name).collect::<Vec<_>>();
    assert_eq!(names(store.open_uploads().await.unwrap()), ["odd & <name>/large"]);
    assert_eq!(names(store.child("odd").unwrap().open_uploads().await.unwrap()), [""; 0]);
    let open = child.open_uploads().await.unwrap();
    store.abort_upload("odd & <name>/large", &open[0].upload_id).await.unwrap();
    assert_eq!((open.len(), child.open_uploads().await.unwrap()), (1, vec![]));
    writer.abort().await;
}

#[tokio::test]
async fn a_store_that_cannot_list_uploads_has_none_to_show() {
    for refused in [error(501, "", "NotImplemented"), error(403, "", "AccessDenied")] {
        let place = place(vec![rule("GET", "uploads=&prefix", 0, Action::Answer(refused))]);
        assert_eq!(place.store.open_uploads().await.unwrap(), []);
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_resumed_at_the_exact_byte() {
    let place = place(vec![rule("GET", "/o", 1, Action::Cut(1000)), rule("GET", "/o", 2, Action::Cut(500))]);
    let bytes = pattern(100_000);
    place.direct.put("o", bytes.clone(), PutMode::Overwrite).await.unwrap();
    let mut target = LentMut::owned(60_000);
    // SAFETY: the alias is read only after the store is done with the original.
    #[allow(unsafe_code)]
    let alias = unsafe { target.alias() };
    let head = target.split_to(7);
    place.store.read_into("o", 20_000..80_000, vec![head, target]).await.unwrap();
    assert_eq!(alias.as_slice(), &bytes[20_000..80_000]);
    let heads = place.proxy.heads("GET", "/o");
    let ranges: Vec<String> = heads.iter().map(|head| header(head, "range")).collect();
    assert_eq!(ranges, ["bytes=20000-79999", "bytes=21000-79999", "bytes=21500-79999"]);
    // Only of the version that the first bytes are from.
    let conditions: Vec<bool> = heads.iter().map(|head| header(head, "if-match").starts_with('"')).collect();
    assert_eq!(conditions, [false, true, true]);
}

#[tokio::test]
async fn a_body_that_breaks_off_has_the_digests_of_one_that_does_not() {
    let bytes = pattern(1_000_000);
    let (range, borders) = (20_000..920_000, [0, 7, 7, 400_000, 900_000]);
    let wanted = &bytes[range.start as usize..range.end as usize];
    // In the first target, on a border, and in the middle of the last one; then a try that brings nothing.
    let actions = [Action::Cut(3), Action::Cut(399_997), Action::Reset, Action::Cut(300_001)];
    let numbered = || (1..).zip(actions.clone());
    for (kind, digest) in
        [(DigestKind::Xxh3, digest::xxh3 as fn(&[u8]) -> u128), (DigestKind::Crc32, |b| digest::crc32(b).into())]
    {
        let place = place(numbered().map(|(nth, action)| rule("GET", "/o", nth, action)).collect());
        place.direct.put("o", bytes.clone(), PutMode::Overwrite).await.unwrap();
        let targets = borders.windows(2).map(|pair| LentMut::owned(pair[1] - pair[0])).collect();
        let digests = place.store.read_digested("o", range.clone(), targets, kind).await.unwrap();
        let expected: Vec<u128> = borders.windows(2).map(|pair| digest(&wanted[pair[0]..pair[1]])).collect();
        assert_eq!(digests, expected);
        assert_eq!(place.proxy.heads("GET", "/o").len(), actions.len() + 1);
    }
}

#[tokio::test]
async fn a_whole_object_is_resumed_too() {
    let place = place(vec![rule("GET", "/o", 1, Action::Cut(1)), rule("GET", "/o", 2, Action::Reset)]);
    place.direct.put("o", pattern(100_000), PutMode::Overwrite).await.unwrap();
    assert_eq!(place.store.read("o", None).await.unwrap(), pattern(100_000));
}

#[tokio::test]
async fn an_object_replaced_while_it_is_read_is_a_mismatch() {
    let other = "etag: \"other\"\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\ncontent-range: bytes 4-9/10\r\n";
    for second in [answer(206, other, "567890"), error(412, "", "PreconditionFailed")] {
        let place = place(vec![rule("GET", "/o", 1, Action::Cut(4)), rule("GET", "/o", 2, Action::Answer(second))]);
        place.direct.put("o", pattern(10), PutMode::Overwrite).await.unwrap();
        let error = place.store.read("o", Some(0..10)).await.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_stalled_download_goes_on() {
    let place = place(vec![rule("GET", "/o", 1, Action::Stall)]);
    place.direct.put("o", pattern(100_000), PutMode::Overwrite).await.unwrap();
    assert_eq!(place.store.read("o", None).await.unwrap(), pattern(100_000));
}

#[tokio::test]
async fn a_download_that_hardly_moves_is_begun_again_where_it_stands() {
    let place = place(vec![rule("GET", "/o", 1, Action::Trickle)]);
    place.direct.put("o", pattern(100_000), PutMode::Overwrite).await.unwrap();
    assert_eq!(place.store.read("o", Some(0..100_000)).await.unwrap(), pattern(100_000));
    let ranges: Vec<String> = place.proxy.heads("GET", "/o").iter().map(|head| header(head, "range")).collect();
    let resumed_at: u64 = ranges[1].trim_start_matches("bytes=").split('-').next().unwrap().parse().unwrap();
    assert!(ranges.len() == 2 && (1..1000).contains(&resumed_at), "{ranges:?}");
    assert_eq!(place.store.counters().restarted, 1);
}

#[tokio::test]
async fn a_stalled_upload_goes_on() {
    let place = place(vec![rule("PUT", "/o", 1, Action::Deaf)]);
    let bytes = pattern(12 << 20);
    place.store.put("o", bytes.clone(), PutMode::Overwrite).await.unwrap();
    assert!(place.direct.read("o", None).await.unwrap() == bytes);
    assert_eq!(place.proxy.heads("PUT", "/o").len(), 2);
    let counters = place.store.counters();
    assert_eq!((counters.retries, counters.restarted), (1, 1));
}

#[tokio::test]
async fn the_deadline_ends_a_server_that_never_answers() {
    let server = BenchServer::start(true).unwrap();
    let proxy = Proxy::start(&server.endpoint(), vec![rule("GET", "/o", 0, Action::Stall)]);
    let mut config = config();
    config.deadline = Duration::from_millis(500);
    let store = support::s3(&proxy.endpoint(), "b", &config);
    support::s3(&server.endpoint(), "b", &config).put("o", pattern(9), PutMode::Overwrite).await.unwrap();
    let error = store.read("o", None).await.unwrap_err();
    assert!(matches!(error, Error::Exhausted { .. }), "{error}");
}
