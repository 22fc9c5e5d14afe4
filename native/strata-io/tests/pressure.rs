//! What remote stores promise when a server is slow or too busy.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream;
use strata_io::lent::LentMut;
use strata_io::testing::bench_server::{BenchServer, Trouble};
use strata_io::{Error, IoConfig, PutMode, Result, Store};
use support::proxy::{Action, Proxy, Rule, error, header};
use support::{config, pattern};

/// Reads `num` ranges of `o`, all at once.
async fn read_ranges(store: &Arc<dyn Store>, num: usize) -> Result<()> {
    let expected = pattern(1 << 20);
    let read = |index: usize| {
        let (start, expected) = (index * 997 % 1_000_000, expected.clone());
        async move {
            let read = store.read("o", Some(start as u64..start as u64 + 4096)).await?;
            assert!(read == expected[start..start + 4096]);
            Ok(())
        }
    };
    let all: Vec<Result<()>> = stream::iter((0..num).map(read)).buffer_unordered(num).collect().await;
    all.into_iter().collect()
}

#[tokio::test]
async fn requests_settle_at_what_a_throttling_server_bears() {
    let trouble = Trouble { latency: Duration::from_millis(50), busy_above: Some(4), ..Trouble::default() };
    let server = BenchServer::troubled(true, trouble).unwrap();
    let store = support::s3(&server.endpoint(), "b", &IoConfig { max_concurrency: 32, max_tries: 8, ..config() });
    store.put("o", pattern(1 << 20), PutMode::Overwrite).await.unwrap();
    read_ranges(&store, 200).await.unwrap();
    // Of four; one at a time would be safe and slow.
    assert!(server.mean_in_flight() > 1.8, "{}", server.mean_in_flight());
    let refused = server.requests()["fault"];
    // The first burst of 32, and one at the top of each climb; without a gate they are thousands.
    assert!((28..100).contains(&refused), "{refused} refused");
    let counters = store.counters();
    assert_eq!((counters.throttled, counters.retries, counters.restarted), (refused, refused, 0));
}

#[tokio::test]
async fn a_neighbour_of_a_throttled_store_is_as_careful() {
    let server = BenchServer::start(true).unwrap();
    let proxy = Proxy::start(
        &server.endpoint(),
        vec![Rule { method: "GET", target: "first/o", nth: 0, action: Action::Answer(error(503, "", "SlowDown")) }],
    );
    let first = support::store("s3://b/first", &[("endpoint", &proxy.endpoint()), KEY, SECRET], &config());
    let second = first.sibling("second").unwrap();
    second.put("o", pattern(1 << 20), PutMode::Overwrite).await.unwrap();
    first.read("o", None).await.unwrap_err();
    let error = first.read("o", None).await.unwrap_err();
    assert!(
        matches!(&error, Error::Exhausted { operation: "read", tries: 4, detail, .. } if detail.contains("SlowDown"))
    );
    assert_eq!(second.counters(), first.counters());
    assert_eq!(first.counters().throttled, 8);
}

#[tokio::test]
async fn throttling_that_does_not_stop_ends_at_the_deadline() {
    let server = BenchServer::troubled(true, Trouble { busy_above: Some(0), ..Trouble::default() }).unwrap();
    let config = IoConfig { max_tries: 100, deadline: Duration::from_secs(2), ..config() };
    let store = support::s3(&server.endpoint(), "b", &config);
    let began = Instant::now();
    let error = read_ranges(&store, 32).await.unwrap_err();
    let Error::Exhausted { operation: "read", tries, elapsed_s, detail, .. } = &error else { panic!("{error}") };
    assert!(*tries > 1 && *elapsed_s <= 2.0 && detail == "SlowDown: SlowDown", "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(server.requests()["fault"] < 32 * 12, "{} requests", server.requests()["fault"]);
}

#[tokio::test]
async fn a_store_that_asks_everybody_to_wait_cannot_hold_anybody_past_the_deadline() {
    let server = BenchServer::start(true).unwrap();
    let wait = Action::Answer(error(503, "retry-after: 1\r\n", "SlowDown"));
    let proxy = Proxy::start(&server.endpoint(), vec![Rule { method: "GET", target: "/o", nth: 0, action: wait }]);
    let store = support::s3(&proxy.endpoint(), "b", &IoConfig { deadline: Duration::from_secs(3), ..config() });
    let began = Instant::now();
    let error = read_ranges(&store, 32).await.unwrap_err();
    assert!(matches!(&error, Error::Exhausted { operation: "read", .. }), "{error}");
    // Sixteen at a time; one after another they would hold each other for a second each.
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
}

const KEY: (&str, &str) = ("access_key_id", "k");
const SECRET: (&str, &str) = ("secret_access_key", "s");

/// A store whose reads have been fast so far, with `rules` for those that follow.
async fn fast_so_far(actions: Vec<Action>) -> (Arc<dyn Store>, Proxy, BenchServer) {
    const SO_FAR: usize = 40;
    let server = BenchServer::start(true).unwrap();
    let rule = |(nth, action)| Rule { method: "GET", target: "/o", nth, action };
    let proxy = Proxy::start(&server.endpoint(), (SO_FAR + 1..).zip(actions).map(rule).collect());
    let store = support::store("s3://b/run", &[("endpoint", &proxy.endpoint()), KEY, SECRET], &config());
    store.put("o", pattern(1 << 20), PutMode::Overwrite).await.unwrap();
    read_ranges(&store, SO_FAR).await.unwrap();
    assert_eq!(store.counters().hedged, 0);
    (store, proxy, server)
}

/// Reads bytes 1000..5096 into two pieces of memory: how long it took, and the ranges that were asked for.
async fn timed_read(store: &Arc<dyn Store>, proxy: &Proxy) -> (Duration, Vec<String>) {
    let mut target = LentMut::owned(4096);
    // SAFETY: the alias is read only after the store is done with the original.
    #[allow(unsafe_code)]
    let alias = unsafe { target.alias() };
    let head = target.split_to(77);
    let began = Instant::now();
    store.read_into("o", 1000..5096, vec![head, target]).await.unwrap();
    let took = began.elapsed();
    assert!(alias.as_slice() == &pattern(1 << 20)[1000..5096]);
    (took, proxy.heads("GET", "/o")[40..].iter().map(|head| header(head, "range")).collect())
}

#[tokio::test]
async fn a_read_far_slower_than_its_siblings_is_asked_for_once_more() {
    for (slow, rest) in [
        (Action::Deaf, "bytes=1000-5095"),
        (Action::Stall, "bytes=1000-5095"),
        (Action::Late(500, Duration::from_secs(20)), "bytes=1500-5095"),
    ] {
        let (store, proxy, _server) = fast_so_far(vec![slow]).await;
        let (took, ranges) = timed_read(&store, &proxy).await;
        assert!((1.0..5.0).contains(&took.as_secs_f64()), "{took:?}");
        assert_eq!(ranges, ["bytes=1000-5095", rest]);
        assert_eq!((store.counters().hedged, store.counters().retries), (1, 0));
    }
}

#[tokio::test]
async fn a_slow_read_that_comes_first_after_all_is_taken() {
    let refused = Action::Answer(error(412, "", "PreconditionFailed"));
    for second in [Action::Late(0, Duration::from_secs(20)), refused, Action::Reset, Action::Cut(0)] {
        let first = Action::Late(500, Duration::from_millis(1500));
        let (store, proxy, _server) = fast_so_far(vec![first, second]).await;
        let (took, ranges) = timed_read(&store, &proxy).await;
        assert!((1.4..5.0).contains(&took.as_secs_f64()), "{took:?}");
        assert_eq!(ranges, ["bytes=1000-5095", "bytes=1500-5095"]);
        assert_eq!((store.counters().hedged, store.counters().retries), (1, 0));
    }
}

#[tokio::test]
async fn a_slow_read_that_fails_leaves_the_rest_to_the_second() {
    let (first, second) = (Action::Late(500, Duration::from_millis(1500)), Action::Late(100, Duration::from_secs(1)));
    let (store, proxy, _server) = fast_so_far(vec![first, second]).await;
    let (took, ranges) = timed_read(&store, &proxy).await;
    assert!((1.4..5.0).contains(&took.as_secs_f64()), "{took:?}");
    assert_eq!(ranges.len(), 2);
    assert_eq!(store.counters().retries, 0);
}

#[tokio::test]
async fn second_requests_are_few() {
    let slow = Action::Late(500, Duration::from_millis(1300));
    let (store, proxy, _server) = fast_so_far(vec![slow; 6]).await;
    for _ in 0..3 {
        let (_, ranges) = timed_read(&store, &proxy).await;
        assert!(ranges.len() <= 4, "{ranges:?}");
    }
    assert_eq!(store.counters().hedged, 1);
}
