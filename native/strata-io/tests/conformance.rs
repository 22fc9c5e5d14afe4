//! What every store and every wrapper promises, on real servers where it is remote.

mod support;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use strata_io::lent::LentMut;
use strata_io::testing::{CountingStore, Counts, FaultyStore, SlowStore};
use strata_io::{Error, ObjectInfo, PutMode, Store, pending_uploads};
use support::{config, emulators, pattern, servers, write_all, write_object};

/// A store that has just been opened, and what keeps its place alive.
struct Place {
    store: Arc<dyn Store>,
    _directory: Option<tempfile::TempDir>,
}

impl Place {
    fn new(store: Arc<dyn Store>) -> Self {
        Self { store, _directory: None }
    }
}

async fn local() -> Place {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("run");
    std::fs::create_dir(&root).unwrap();
    let store = support::store(root.to_str().unwrap(), &[], &config());
    Place { store, _directory: Some(directory) }
}

async fn memory() -> Place {
    let mut config = config();
    config.part_bytes = 1 << 20;
    Place::new(support::store(&format!("memory://{}/run", servers::fresh("m")), &[], &config))
}

async fn moto() -> Place {
    let (endpoint, bucket) = servers::moto_bucket().await;
    Place::new(support::s3(endpoint, &bucket, &config()))
}

async fn s3s() -> Place {
    let (endpoint, bucket) = servers::s3s_bucket();
    Place::new(support::s3(endpoint, &bucket, &config()))
}

async fn bench() -> Place {
    static SERVER: std::sync::LazyLock<strata_io::testing::bench_server::BenchServer> =
        std::sync::LazyLock::new(|| strata_io::testing::bench_server::BenchServer::start(true).unwrap());
    Place::new(support::s3(&SERVER.endpoint(), &servers::fresh("b"), &config()))
}

async fn counting() -> Place {
    Place::new(Arc::new(CountingStore::new(memory().await.store, Counts::default())))
}

async fn slow() -> Place {
    Place::new(Arc::new(SlowStore::delaying(memory().await.store, Duration::from_micros(50), 1e12)))
}

async fn faulty() -> Place {
    Place::new(Arc::new(FaultyStore::failing(memory().await.store, Vec::new())))
}

async fn azurite() -> Place {
    let (endpoint, container) = emulators::azurite_container().await;
    let keys = [("account_name", emulators::ACCOUNT), ("account_key", emulators::ACCOUNT_KEY)];
    let options = [("endpoint", endpoint.as_str()), ("allow_http", "true"), keys[0], keys[1]];
    Place::new(support::store(&format!("az://{container}/run"), &options, &config()))
}

/// One test of one promise at one place.
macro_rules! promise {
    ([$($ignored:meta)?] $place:ident $promise:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        $(#[$ignored])?
        async fn $promise() {
            let place = super::$place().await;
            let promise = super::$promise(&*place.store);
            tokio::time::timeout(std::time::Duration::from_secs(120), promise).await.expect("within its time");
        }
    };
}

macro_rules! promises {
    ($ignored:tt $place:ident: $($promise:ident),* $(,)?) => {
        mod $place {
            $(promise!($ignored $place $promise);)*
        }
    };
}

macro_rules! all_promises {
    ($(#[$ignored:meta])? $place:ident $(, $more:ident)*) => {
        promises!([$($ignored)?] $place:
            small_objects_come_back_as_they_were,
            an_overwrite_replaces,
            a_taken_name_is_not_created_again,
            a_listing_has_direct_children_only_and_all_pages,
            a_folder_that_is_not_there_is_empty,
            a_deleted_object_is_gone_and_may_be_deleted_again,
            ranges_fill_the_memory_they_are_for,
            a_range_past_the_end_is_a_mismatch,
            what_is_not_there_is_named,
            odd_names_are_kept,
            names_that_leave_the_root_are_refused,
            a_neighbour_is_beside_and_has_a_plain_name,
            parts_in_any_order_make_the_object,
            an_aborted_object_leaves_nothing,
            an_object_with_a_part_missing_is_refused,
            create_only_puts_are_honoured,
            $($more,)*
        );
    };
}

all_promises!(local, of_racing_creators_one_wins);
all_promises!(memory, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
all_promises!(moto, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
// Its create-only puts are not atomic, so no races here.
all_promises!(s3s, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
all_promises!(bench, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
all_promises!(
    #[ignore = "needs Azurite"]
    azurite,
    of_racing_creators_one_wins,
    nothing_is_seen_before_the_end
);
all_promises!(counting, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
all_promises!(slow, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);
all_promises!(faulty, of_racing_creators_one_wins, nothing_is_seen_before_the_end, a_dropped_object_leaves_nothing);

async fn small_objects_come_back_as_they_were(store: &dyn Store) {
    for len in [0, 1, 63, 4097, 70_001] {
        let (name, bytes) = (format!("o{len}"), pattern(len));
        store.put(&name, bytes.clone(), PutMode::Overwrite).await.unwrap();
        assert_eq!(store.size(&name).await.unwrap(), len as u64);
        assert_eq!(store.read(&name, None).await.unwrap(), bytes);
    }
}

async fn an_overwrite_replaces(store: &dyn Store) {
    for bytes in ["first and longer", "second"] {
        store.put("a/b", bytes.into(), PutMode::Overwrite).await.unwrap();
        assert_eq!(store.read("a/b", None).await.unwrap(), bytes);
    }
}

async fn a_taken_name_is_not_created_again(store: &dyn Store) {
    store.put("a/b", "first".into(), PutMode::Create).await.unwrap();
    let error = store.put("a/b", "second".into(), PutMode::Create).await.unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    assert_eq!(store.read("a/b", None).await.unwrap(), "first");
}

async fn of_racing_creators_one_wins(store: &dyn Store) {
    for round in 0..3 {
        let name = format!("race{round}");
        let contents: Vec<Bytes> = (0..16).map(|i| format!("creator {i}").into()).collect();
        let creators = contents.iter().map(|bytes| store.put(&name, bytes.clone(), PutMode::Create));
        let results = futures::future::join_all(creators).await;
        let winners: Vec<usize> = (0..16).filter(|&i| results[i].is_ok()).collect();
        assert_eq!(winners.len(), 1, "{results:?}");
        assert!(results.iter().all(|r| matches!(r, Ok(()) | Err(Error::AlreadyExists { .. }))), "{results:?}");
        assert_eq!(store.read(&name, None).await.unwrap(), contents[winners[0]]);
    }
}

async fn a_listing_has_direct_children_only_and_all_pages(store: &dyn Store) {
    let name = |i: usize| format!("many/{i:04}");
    let put = |i: usize| {
        let name = name(i);
        async move { store.put(&name, pattern(i % 7), PutMode::Overwrite).await.unwrap() }
    };
    for chunk in (0..1005).collect::<Vec<_>>().chunks(50) {
        futures::future::join_all(chunk.iter().map(|&i| put(i))).await;
    }
    for name in ["many/deep/x", "many/deeper/y/z", "beside", "many.not"] {
        store.put(name, "x".into(), PutMode::Overwrite).await.unwrap();
    }
    let listed = store.list("many/").await.unwrap();
    let found: Vec<(String, u64)> = listed.into_iter().map(|info| (info.name, info.size)).collect();
    let expected: Vec<(String, u64)> = (0..1005).map(|i| (name(i), i as u64 % 7)).collect();
    assert_eq!(found, expected);
    assert_eq!(store.list_folders("many/").await.unwrap(), ["many/deep", "many/deeper"]);
    let names: Vec<String> = store.list("").await.unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(names, ["beside", "many.not"]);
    assert_eq!(store.list_folders("").await.unwrap(), ["many"]);
    let below = |infos: Vec<ObjectInfo>| infos.into_iter().map(|info| info.name).collect::<Vec<_>>();
    let deep = ["many/deep/x", "many/deeper/y/z"].map(str::to_owned);
    let mut all: Vec<String> = (0..1005).map(name).chain(deep.clone()).collect();
    assert_eq!(below(store.list_below("many/").await.unwrap()), all);
    all.splice(0..0, ["beside".to_owned(), "many.not".to_owned()]);
    assert_eq!(below(store.list_below("").await.unwrap()), all);
    assert_eq!(below(store.list_below("many/deeper/").await.unwrap()), deep[1..]);
    assert_eq!(store.list_below("nowhere/").await.unwrap(), []);
}

async fn a_folder_that_is_not_there_is_empty(store: &dyn Store) {
    assert_eq!(store.list("nowhere/").await.unwrap(), []);
    assert_eq!(store.list_folders("nowhere/").await.unwrap(), Vec::<String>::new());
}

async fn a_deleted_object_is_gone_and_may_be_deleted_again(store: &dyn Store) {
    store.put("a/b", "x".into(), PutMode::Overwrite).await.unwrap();
    for _ in 0..2 {
        store.delete("a/b").await.unwrap();
        assert!(matches!(store.size("a/b").await, Err(Error::NotFound { .. })));
    }
}

async fn ranges_fill_the_memory_they_are_for(store: &dyn Store) {
    let bytes = pattern(100_003);
    store.put("o", bytes.clone(), PutMode::Overwrite).await.unwrap();
    for range in [0..1, 0..100_003, 5..5, 99_990..100_003, 4095..70_000] {
        let wanted = bytes.slice(range.start as usize..range.end as usize);
        assert_eq!(store.read("o", Some(range.clone())).await.unwrap(), wanted, "{range:?}");
        let length = wanted.len();
        let mut whole = LentMut::owned(length);
        // SAFETY: the aliases are read only after the store is done with the originals.
        #[allow(unsafe_code)]
        let alias = unsafe { whole.alias() };
        let targets = vec![whole.split_to(length / 3), whole.split_to(0), whole];
        store.read_into("o", range.clone(), targets).await.unwrap();
        assert_eq!(alias.as_slice(), &wanted[..], "{range:?}");
    }
}

async fn a_range_past_the_end_is_a_mismatch(store: &dyn Store) {
    store.put("o", pattern(100), PutMode::Overwrite).await.unwrap();
    for range in [50..101, 100..101, 200..300] {
        let error = store.read("o", Some(range.clone())).await.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{range:?}: {error}");
        let targets = vec![LentMut::owned((range.end - range.start) as usize)];
        let error = store.read_into("o", range.clone(), targets).await.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{range:?}: {error}");
    }
}

async fn what_is_not_there_is_named(store: &dyn Store) {
    let errors = [
        store.size("a/nothing").await.unwrap_err(),
        store.read("a/nothing", None).await.unwrap_err(),
        store.read("a/nothing", Some(0..4)).await.unwrap_err(),
        store.read_into("a/nothing", 0..4, vec![LentMut::owned(4)]).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, Error::NotFound { object, .. } if object.ends_with("a/nothing")), "{error}");
    }
}

async fn odd_names_are_kept(store: &dyn Store) {
    let mut names = vec![
        ".metadata",
        "__0_0.0123abcd.distcp",
        "a b/with space",
        "hash#and?mark",
        "per%20cent",
        "plus+minus",
        "umlaut-ü-漢字",
        "~tilde[x]{y}&=;,'!$@",
    ];
    for name in &names {
        store.put(name, (*name).into(), PutMode::Overwrite).await.unwrap();
    }
    for name in &names {
        assert_eq!(store.read(name, None).await.unwrap(), *name, "{name}");
    }
    names.retain(|name| !name.contains('/'));
    names.sort_unstable();
    let listed: Vec<String> = store.list("").await.unwrap().into_iter().map(|info| info.name).collect();
    assert_eq!(listed, names);
}

async fn names_that_leave_the_root_are_refused(store: &dyn Store) {
    for name in ["../x", "a/../../x", "/etc/x", ""] {
        let error = store.put(name, "x".into(), PutMode::Overwrite).await.unwrap_err();
        assert!(matches!(error, Error::Config(_)), "{name:?}: {error}");
        assert!(store.read(name, None).await.is_err(), "{name:?}");
    }
}

async fn a_neighbour_is_beside_and_has_a_plain_name(store: &dyn Store) {
    store.put("x", "own".into(), PutMode::Overwrite).await.unwrap();
    let inside = store.child("inside").unwrap();
    inside.put("x", Bytes::from_static(b"the child's"), PutMode::Create).await.unwrap();
    assert_eq!(store.read("inside/x", None).await.unwrap(), "the child's");
    assert!(inside.url().ends_with("/inside"), "{}", inside.url());
    let beside = store.sibling("beside").unwrap();
    beside.put("x", "the neighbour's".into(), PutMode::Overwrite).await.unwrap();
    assert_eq!(store.read("x", None).await.unwrap(), "own");
    assert_eq!(store.sibling("beside").unwrap().read("x", None).await.unwrap(), "the neighbour's");
    let error = store.sibling("nowhere").unwrap().read("x", None).await.unwrap_err();
    assert!(matches!(&error, Error::NotFound { object, .. } if object.contains("nowhere/x")), "{error}");
    for name in ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\0"] {
        assert!(matches!(store.sibling(name), Err(Error::Config(_))), "{name:?}");
    }
}

async fn parts_in_any_order_make_the_object(store: &dyn Store) {
    let part_bytes = store.part_bytes(0) as usize;
    for len in [0, 1, part_bytes - 1, part_bytes, part_bytes + 1, 3 * part_bytes + 4097] {
        let (name, bytes) = (format!("large/{len}"), pattern(len));
        write_object(store, &name, &bytes).await.unwrap();
        assert_eq!(store.size(&name).await.unwrap(), len as u64);
        assert!(store.read(&name, None).await.unwrap() == bytes, "{len} bytes differ");
    }
    assert_eq!(pending_uploads(store).await.unwrap(), []);
}

async fn nothing_is_seen_before_the_end(store: &dyn Store) {
    for len in [10, store.part_bytes(0) as usize + 1] {
        let (name, bytes) = (format!("large-{len}"), pattern(len));
        let writer = store.create(&name, len as u64).await.unwrap();
        write_all(&*writer, support::parts(store, &bytes)).await.unwrap();
        assert!(!store.list("").await.unwrap().iter().any(|info| info.name == name));
        writer.finish().await.unwrap();
        assert!(store.list("").await.unwrap().iter().any(|info| info.name == name));
    }
}

async fn an_aborted_object_leaves_nothing(store: &dyn Store) {
    let bytes = pattern(store.part_bytes(0) as usize + 1);
    let writer = store.create("large", bytes.len() as u64).await.unwrap();
    write_all(&*writer, support::parts(store, &bytes)).await.unwrap();
    writer.abort().await;
    assert_eq!(store.list("").await.unwrap(), []);
    assert_eq!(pending_uploads(store).await.unwrap(), []);
}

async fn a_dropped_object_leaves_nothing(store: &dyn Store) {
    let bytes = pattern(store.part_bytes(0) as usize + 1);
    let writer = store.create("large", bytes.len() as u64).await.unwrap();
    write_all(&*writer, support::parts(store, &bytes)).await.unwrap();
    drop(writer);
    // The clean-up runs in the background; the test's own time limit ends this loop.
    while !(store.list("").await.unwrap().is_empty() && pending_uploads(store).await.unwrap().is_empty()) {
        tokio::task::yield_now().await;
    }
}

async fn an_object_with_a_part_missing_is_refused(store: &dyn Store) {
    let bytes = pattern(store.part_bytes(0) as usize + 1);
    let writer = store.create("large", bytes.len() as u64).await.unwrap();
    let mut parts = support::parts(store, &bytes);
    parts.pop();
    write_all(&*writer, parts).await.unwrap();
    let error = writer.finish().await.unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    assert_eq!(pending_uploads(store).await.unwrap(), []);
}

async fn create_only_puts_are_honoured(store: &dyn Store) {
    assert!(store.honours_create().await.unwrap());
    assert!(store.honours_create().await.unwrap(), "asked again");
    assert_eq!(store.list("").await.unwrap(), [], "the probe leaves nothing");
}
