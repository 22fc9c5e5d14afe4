//! The wrappers do to a store what they say, and nothing else.

mod support;

use std::sync::Arc;
use std::time::Duration;

use strata_io::lent::LentMut;
use strata_io::testing::{CountingStore, Counts, Fault, FaultyStore, Kind, SlowStore, Way};
use strata_io::{Error, PutMode, Store};
use support::{config, pattern, servers, write_object};

fn memory() -> Arc<dyn Store> {
    let mut config = config();
    config.part_bytes = 1000;
    support::store(&format!("memory://{}/run", servers::fresh("w")), &[], &config)
}

fn failing(inner: &Arc<dyn Store>, kind: Kind, nth: u64, way: Way) -> FaultyStore {
    FaultyStore::failing(inner.clone(), vec![Fault { kind, nth, way }])
}

fn broken() -> Error {
    Error::Config("by the test".to_owned())
}

#[tokio::test]
async fn requests_and_bytes_are_counted_by_kind() {
    let store = CountingStore::new(memory(), Counts::default());
    write_object(&store, "large", &pattern(2500)).await.unwrap();
    store.put("small", pattern(9), PutMode::Create).await.unwrap();
    store.read("large", Some(10..30)).await.unwrap();
    store.read_into("large", 0..5, vec![LentMut::owned(5)]).await.unwrap();
    let counted: Vec<(Kind, (u64, u64))> = store.hook().all().into_iter().collect();
    let expected = [
        (Kind::PutNew, (1, 9)),
        (Kind::Begin, (1, 0)),
        (Kind::Part, (3, 2500)),
        (Kind::Finish, (1, 0)),
        (Kind::Read, (2, 25)),
    ];
    assert_eq!(counted, expected);
    assert_eq!((store.hook().requests(Kind::Part), store.hook().bytes(Kind::Read)), (3, 25));
}

#[tokio::test(start_paused = true)]
async fn a_slow_store_takes_latency_and_transfer_time() {
    let store = SlowStore::delaying(memory(), Duration::from_secs(2), 100.0);
    let began = tokio::time::Instant::now();
    store.put("o", pattern(300), PutMode::Overwrite).await.unwrap();
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(5) && took < Duration::from_secs(6), "{took:?}");
}

#[tokio::test]
async fn a_refused_request_has_no_effect() {
    let inner = memory();
    let store = failing(&inner, Kind::Put, 2, Way::Refused(broken()));
    store.put("first", "x".into(), PutMode::Overwrite).await.unwrap();
    assert!(matches!(store.put("second", "x".into(), PutMode::Overwrite).await, Err(Error::Config(_))));
    store.put("third", "x".into(), PutMode::Overwrite).await.unwrap();
    let names: Vec<String> = inner.list("").await.unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["first", "third"]);
}

#[tokio::test]
async fn a_lost_answer_has_its_effect() {
    let inner = memory();
    let store = failing(&inner, Kind::Finish, 1, Way::AnswerLost(broken()));
    assert!(matches!(write_object(&store, "large", &pattern(2500)).await, Err(Error::Config(_))));
    assert_eq!(inner.read("large", None).await.unwrap(), pattern(2500));
}

#[tokio::test]
async fn a_flipped_bit_is_one_bit() {
    let inner = memory();
    inner.put("o", pattern(100), PutMode::Overwrite).await.unwrap();
    let differing = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();

    let store = failing(&inner, Kind::Read, 1, Way::BitFlipped);
    assert_eq!(differing(&store.read("o", None).await.unwrap(), &pattern(100)), 1);
    assert_eq!(store.read("o", None).await.unwrap(), pattern(100));

    let store = failing(&inner, Kind::Read, 1, Way::BitFlipped);
    let mut target = LentMut::owned(100);
    // SAFETY: the alias is read only after the store is done with the original.
    #[allow(unsafe_code)]
    let alias = unsafe { target.alias() };
    let head = target.split_to(30);
    store.read_into("o", 0..100, vec![head, target]).await.unwrap();
    assert_eq!(differing(alias.as_slice(), &pattern(100)), 1);

    let store = failing(&inner, Kind::Part, 2, Way::BitFlipped);
    write_object(&store, "large", &pattern(2500)).await.unwrap();
    assert_eq!(differing(&inner.read("large", None).await.unwrap(), &pattern(2500)), 1);
}
