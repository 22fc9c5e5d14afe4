//! What the local store promises; the suite that all stores share is elsewhere.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use super::*;
use crate::Part;
use crate::schedule::ByteBudget;

const MIB: usize = 1 << 20;
const UNAVAILABLE: fn(&Path, &Path) -> io::Result<()> = |_, _| Err(rustix::io::Errno::NOSYS.into());
const BROKEN: fn(&Path, &Path) -> io::Result<()> = |_, _| Err(rustix::io::Errno::IO.into());

/// A good mount, one without hard links, one without anything.
const MOUNTS: [Calls; 3] = [
    Calls::SYSTEM,
    Calls { link: UNAVAILABLE, ..Calls::SYSTEM },
    Calls { link: UNAVAILABLE, rename_new: UNAVAILABLE, rename: UNAVAILABLE },
];

fn config(direct_io: bool) -> IoConfig {
    IoConfig {
        budget: ByteBudget::new(1 << 30),
        max_concurrency: 4,
        part_bytes: 2 * MIB as u64,
        fsync: true,
        direct_io,
        max_tries: 1,
        deadline: Duration::from_secs(60),
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn store(root: &Path) -> LocalStore {
    store_on(root, Calls::SYSTEM)
}

fn store_on(root: &Path, calls: Calls) -> LocalStore {
    LocalStore::with_calls("file:///somewhere", root, config(true), calls)
}

/// Bytes that differ between places and seeds, at `residue` modulo 4096 in memory.
fn bytes_at(residue: usize, len: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut memory = vec![0u8; len + 8192];
    for word in memory.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    let start = 4096 - memory.as_ptr() as usize % 4096 + residue;
    Bytes::from(memory).slice(start..start + len)
}

fn part(index: u32, offset: u64, pieces: Vec<Bytes>) -> Part {
    Part { index, offset, pieces, crc32: 0 }
}

/// Writes `parts` (sizes and contents as given, one after the other) at once and finishes.
async fn write(store: &LocalStore, name: &str, parts: &[Vec<Bytes>]) -> Result<()> {
    let len = |pieces: &Vec<Bytes>| pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
    let writer = store.create(name, parts.iter().map(len).sum()).await?;
    let mut offset = 0;
    let mut writes = Vec::new();
    for (index, pieces) in parts.iter().enumerate() {
        writes.push(writer.write_part(part(index as u32, offset, pieces.clone())));
        offset += len(pieces);
    }
    join_all(writes).await.into_iter().collect::<Result<()>>()?;
    writer.finish().await
}

fn evict(path: &Path) {
    let file = File::open(path).expect("there");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice is taken");
}

#[tokio::test]
async fn bytes_come_back_equal_from_every_place_in_memory_and_file() {
    let folder = folder();
    for direct in [false, true] {
        let store = LocalStore::new("here", folder.path().to_str().expect("UTF-8"), config(direct));
        for (case, (residue, shift)) in
            [(0, 0), (64, 64), (64, 0), (1, 1), (511, 1023), (512, 0), (4032, 4032), (4095, 4095), (3648, 64)]
                .into_iter()
                .enumerate()
        {
            let name = format!("{direct}/{case}");
            let [head, payload, tail] =
                [bytes_at(8, shift, 1), bytes_at(residue, 5 * MIB + 12_345, case as u64 + 2), bytes_at(3, 777, 3)];
            let whole: Vec<u8> = [&head[..], &payload[..], &tail[..]].concat();
            // Cut as a scheduler would: at multiples of the part size in the file.
            let cut = 2 * MIB - shift;
            let parts = [
                vec![head.clone(), payload.slice(..cut)],
                vec![payload.slice(cut..cut + 2 * MIB)],
                vec![payload.slice(cut + 2 * MIB..), tail.clone()],
            ];
            write(&store, &name, &parts).await.expect("written");
            let path = folder.path().join(&name);
            assert!(fs::read(&path).expect("there") == whole, "written at {residue}, {shift}");
            for cold in [false, true] {
                if cold {
                    evict(&path);
                }
                let range = shift as u64..whole.len() as u64;
                let cuts = [payload.len(), whole.len() - shift - payload.len()];
                let read = read_back(&store, &name, range, residue, &cuts).await;
                assert!(read == whole[shift..], "read at {residue}, {shift}, cold: {cold}");
            }
        }
    }
}

/// Reads into targets of these lengths, the first at `residue` modulo 4096; returns what they then hold.
async fn read_back(store: &LocalStore, name: &str, range: Range<u64>, residue: usize, lengths: &[usize]) -> Vec<u8> {
    let (mut memory, loan) = LentMut::on_loan(residue + lengths.iter().sum::<usize>());
    memory.split_to(residue);
    let targets = lengths.iter().map(|&len| memory.split_to(len)).collect();
    drop(memory);
    store.read_into(name, range, targets).await.expect("read");
    let back = loan.reclaim().expect("nothing touches the memory after the read");
    back.as_slice()[residue..].to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_whose_edges_share_pages_do_not_damage_each_other() {
    let folder = folder();
    let store = store(folder.path());
    for round in 0..12u64 {
        let mut whole = Vec::new();
        let mut parts = Vec::new();
        for index in 0..8u64 {
            // Odd lengths, and memory congruent to the file: direct interiors with buffered edges everywhere.
            let len = MIB + 4096 * 3 + 100 * (index + round) as usize + 1;
            let payload = bytes_at(whole.len() % 4096, len, round * 8 + index);
            whole.extend_from_slice(&payload);
            parts.push(vec![payload]);
        }
        let name = format!("{round}");
        write(&store, &name, &parts).await.expect("written");
        let path = folder.path().join(&name);
        assert!(fs::read(&path).expect("there") == whole, "from the page cache, round {round}");
        evict(&path);
        assert!(fs::read(&path).expect("there") == whole, "from the disk, round {round}");
        fs::remove_file(&path).expect("removed");
    }
}

#[tokio::test]
async fn a_small_object_is_read_back_and_replaced_on_every_mount() {
    for calls in MOUNTS {
        let folder = folder();
        let store = store_on(&folder.path().join("new/root"), calls);
        store.put("a/b", Bytes::from_static(b"first"), PutMode::Create).await.expect("created");
        let again = store.put("a/b", Bytes::from_static(b"other"), PutMode::Create).await;
        assert!(matches!(again, Err(Error::AlreadyExists { .. })), "{again:?}");
        assert_eq!(store.read("a/b", None).await.expect("read"), "first");
        store.put("a/b", Bytes::from_static(b"second"), PutMode::Overwrite).await.expect("replaced");
        assert_eq!(store.read("a/b", Some(1..3)).await.expect("read"), "ec");
        assert_eq!(store.size("a/b").await.expect("there"), 6);
        let files = fs::read_dir(folder.path().join("new/root/a")).expect("there").count();
        assert_eq!(files, 1, "no staged file is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_sixteen_racing_creators_one_wins_and_its_bytes_stay() {
    for calls in MOUNTS {
        let folder = folder();
        let store = Arc::new(store_on(folder.path(), calls));
        for round in 0..10 {
            let name = format!("race-{round}");
            let creators = (0..16u8).map(|id| {
                let (store, name) = (store.clone(), name.clone());
                tokio::spawn(async move { (id, store.put(&name, vec![id; 100].into(), PutMode::Create).await) })
            });
            let mut winners = Vec::new();
            for outcome in join_all(creators).await {
                match outcome.expect("no panic") {
                    (id, Ok(())) => winners.push(id),
                    (_, Err(Error::AlreadyExists { .. })) => {}
                    (_, Err(error)) => panic!("{error}"),
                }
            }
            assert_eq!(winners.len(), 1, "winners: {winners:?}");
            assert_eq!(store.read(&name, None).await.expect("read"), vec![winners[0]; 100]);
        }
    }
}

#[tokio::test]
async fn a_put_that_fails_or_dies_leaves_the_old_object() {
    let folder = folder();
    store(folder.path()).put("x", Bytes::from_static(b"old"), PutMode::Overwrite).await.expect("written");
    let broken = store_on(folder.path(), Calls { rename: BROKEN, link: BROKEN, ..Calls::SYSTEM });
    let failed = broken.put("x", Bytes::from_static(b"new"), PutMode::Overwrite).await;
    assert!(matches!(failed, Err(Error::Io { errno: Some(5), .. })), "{failed:?}");
    assert!(broken.put("y", Bytes::from_static(b"new"), PutMode::Create).await.is_err());
    assert_eq!(fs::read_dir(folder.path()).expect("there").count(), 1, "what failed is cleaned up");
    // A process that dies before it publishes leaves its staged file.
    fs::write(folder.path().join(".tmp-dead"), b"half").expect("written");
    let store = store(folder.path());
    assert_eq!(store.read("x", None).await.expect("read"), "old");
    let listed = store.list("").await.expect("listed");
    let seen: Vec<(&str, u64)> = listed.iter().map(|object| (object.name.as_str(), object.size)).collect();
    assert_eq!(seen, [("x", 3)]);
}

#[tokio::test]
async fn a_put_removes_stale_staged_files_and_no_others() {
    let folder = folder();
    let make = |name: &str, age: u64| {
        let file = File::create(folder.path().join(name)).expect("created");
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).expect("set");
    };
    make(".tmp-stale", 7200);
    make(".tmp-fresh", 60);
    make("old-object", 7200);
    store(folder.path()).put("x", Bytes::new(), PutMode::Create).await.expect("created");
    let mut left: Vec<_> = fs::read_dir(folder.path()).expect("there").map(|e| e.expect("entry").file_name()).collect();
    left.sort();
    assert_eq!(left, [".tmp-fresh", "old-object", "x"]);
}

#[tokio::test]
async fn a_sweep_removes_stale_staged_files_of_a_folder_that_nobody_writes_to() {
    let folder = folder();
    fs::create_dir(folder.path().join("sub")).expect("made");
    for (name, age) in [("stale", 7200), ("fresh", 60)] {
        let file = File::create(folder.path().join("sub").join(format!(".tmp-{name}"))).expect("created");
        file.set_modified(SystemTime::now() - Duration::from_secs(age)).expect("set");
    }
    let store = store(folder.path());
    for prefix in ["", "sub/", "not-there/"] {
        store.sweep(prefix).await.expect("swept");
    }
    let left: Vec<_> = fs::read_dir(folder.path().join("sub")).expect("there").map(|e| e.expect("entry")).collect();
    assert_eq!(left.iter().map(|entry| entry.file_name()).collect::<Vec<_>>(), [".tmp-fresh"]);
}

#[tokio::test]
async fn empty_folders_are_removed_and_what_holds_anything_stays() {
    let (folder, elsewhere) = (folder(), self::folder());
    fs::create_dir_all(folder.path().join("empty/in/it")).expect("made");
    fs::create_dir_all(folder.path().join("used/empty")).expect("made");
    fs::write(folder.path().join("used/file"), b"x").expect("written");
    std::os::unix::fs::symlink(elsewhere.path(), folder.path().join("link")).expect("linked");
    store(folder.path()).remove_empty().await;
    let mut left: Vec<_> = fs::read_dir(folder.path()).expect("there").map(|e| e.expect("entry").file_name()).collect();
    left.sort();
    assert_eq!((left, elsewhere.path().exists()), (vec!["link".into(), "used".into()], true));
    assert!(!folder.path().join("used/empty").exists() && folder.path().join("used/file").exists());
    store(&folder.path().join("not-there")).remove_empty().await;
}

#[tokio::test]
async fn a_full_disk_is_errno_28_and_abort_leaves_nothing() {
    let folder = folder();
    let store = store(folder.path());
    let path = folder.path().join("big");
    // /dev/full answers every write with ENOSPC.
    let full = File::options().write(true).open("/dev/full").expect("Linux has it");
    let writer = writer::LocalWriter::create(store.shared.clone(), path.clone(), 3).expect("created").onto(full);
    let writer: Box<dyn ObjectWriter> = Box::new(writer);
    let failed = writer.write_part(part(0, 0, vec![Bytes::from_static(b"abc")])).await;
    let Err(Error::Io { errno: Some(28), object, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(object, path.display().to_string());
    assert!(path.exists());
    writer.abort().await;
    assert!(!path.exists());
}

#[tokio::test]
async fn an_object_with_a_gap_is_not_finished_and_a_name_is_not_used_twice() {
    let folder = folder();
    let store = store(folder.path());
    let writer = store.create("x", 6).await.expect("created");
    let twice = store.create("x", 6).await;
    assert!(matches!(twice, Err(Error::AlreadyExists { .. })), "{twice:?}");
    writer.write_part(part(1, 4, vec![Bytes::from_static(b"ef")])).await.expect("written");
    let beyond = writer.write_part(part(2, 5, vec![Bytes::from_static(b"gh")])).await;
    assert!(matches!(beyond, Err(Error::Mismatch { .. })), "{beyond:?}");
    let gap = writer.finish().await;
    assert!(matches!(gap, Err(Error::Mismatch { .. })), "{gap:?}");
    store.create("empty", 0).await.expect("created").finish().await.expect("finished");
    assert_eq!(store.read("empty", None).await.expect("read"), "");
}

#[tokio::test]
async fn a_read_past_the_end_names_both_sizes() {
    let folder = folder();
    for (direct, wanted) in [(false, 5 * MIB), (true, 5 * MIB), (true, 10)] {
        let store = LocalStore::new("here", folder.path().to_str().expect("UTF-8"), config(direct));
        fs::write(folder.path().join("x"), vec![7; wanted - 3]).expect("written");
        for range in [0..wanted as u64, wanted as u64..2 * wanted as u64] {
            let failed = store.read_into("x", range.clone(), vec![LentMut::owned(wanted)]).await;
            let Err(Error::Mismatch { expected, found, .. }) = failed else { panic!("{failed:?}") };
            assert!(expected.starts_with("at least "), "{expected}");
            assert_eq!(found, format!("{} bytes", wanted - 3));
            assert!(matches!(store.read("x", Some(range)).await, Err(Error::Mismatch { .. })));
        }
    }
}

#[tokio::test]
async fn memory_stays_lent_until_the_running_call_has_ended() {
    let folder = folder();
    let store = store(folder.path());
    let memory = Arc::new(());
    let (started, has_started) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let inside = memory.clone();
    let mut call = Box::pin(store.shared.run(move |_| {
        started.send(()).expect("the test waits");
        released.recv().expect("the test releases");
        drop(inside);
        Ok(())
    }));
    assert!(futures::poll!(&mut call).is_pending());
    assert!(futures::poll!(&mut call).is_pending());
    has_started.recv_timeout(Duration::from_secs(30)).expect("the call runs");
    drop(call);
    assert_eq!(Arc::strong_count(&memory), 2, "the call still has it");
    release.send(()).expect("the call waits");
    let all = store.shared.config.max_concurrency as u32;
    let _all = store.shared.permits.acquire_many(all).await.expect("every call has ended");
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[tokio::test]
async fn names_and_prefixes_never_leave_the_root() {
    let folder = folder();
    let store = store(folder.path());
    for name in ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b", ".tmp-x", "a/.tmp-x"] {
        assert!(matches!(store.size(name).await, Err(Error::Config(_))), "{name:?}");
        assert!(matches!(store.put(name, Bytes::new(), PutMode::Create).await, Err(Error::Config(_))), "{name:?}");
        assert!(matches!(store.create(name, 1).await, Err(Error::Config(_))), "{name:?}");
        assert!(matches!(store.delete(name).await, Err(Error::Config(_))), "{name:?}");
    }
    for prefix in ["/", "../", "a", "a/../"] {
        assert!(matches!(store.list(prefix).await, Err(Error::Config(_))), "{prefix:?}");
    }
}

#[tokio::test]
async fn listing_shows_direct_children_sorted_and_tells_no_root_from_an_empty_folder() {
    let folder = folder();
    let missing = store(&folder.path().join("missing"));
    for prefix in ["", "a/"] {
        assert!(matches!(missing.list(prefix).await, Err(Error::NotFound { .. })));
        assert!(matches!(missing.list_folders(prefix).await, Err(Error::NotFound { .. })));
    }
    let store = store(folder.path());
    for name in ["b", "a", "f/2", "f/1", "f/g/x", "e/y"] {
        store.put(name, Bytes::from_static(b"12"), PutMode::Create).await.expect("created");
    }
    let names = |infos: Vec<ObjectInfo>| infos.into_iter().map(|info| info.name).collect::<Vec<_>>();
    assert_eq!(names(store.list("").await.expect("listed")), ["a", "b"]);
    assert_eq!(names(store.list("f/").await.expect("listed")), ["f/1", "f/2"]);
    assert_eq!(names(store.list("none/").await.expect("listed")), [""; 0]);
    assert_eq!(store.list_folders("").await.expect("listed"), ["e", "f"]);
    assert_eq!(store.list_folders("f/").await.expect("listed"), ["f/g"]);
    assert!(matches!(store.size("f").await, Err(Error::NotFound { .. })));
    store.delete("f/1").await.expect("deleted");
    store.delete("f/1").await.expect("a name that is not there is no error");
    assert_eq!(names(store.list("f/").await.expect("listed")), ["f/2"]);
    assert!(matches!(store.read("f/1", None).await, Err(Error::NotFound { .. })));
}

#[test]
fn errors_of_the_system_get_the_class_the_caller_acts_on() {
    use rustix::io::Errno;
    let class = |errno: Errno| failure("write", Path::new("/data/x"), errno.into());
    assert!(matches!(class(Errno::NOENT), Error::NotFound { .. }));
    assert!(matches!(class(Errno::EXIST), Error::AlreadyExists { .. }));
    for errno in [Errno::ACCESS, Errno::PERM, Errno::ROFS] {
        assert!(matches!(class(errno), Error::PermissionDenied { .. }));
    }
    let full = class(Errno::NOSPC);
    assert!(matches!(full, Error::Io { errno: Some(28), .. }));
    assert!(full.to_string().starts_with("write /data/x: No space left"), "{full}");
}

#[test]
fn new_files_get_the_permissions_the_umask_leaves() {
    let folder = folder();
    let store = store(folder.path());
    store.shared.put(&folder.path().join("x"), b"1", PutMode::Overwrite).expect("written");
    let plain = File::create(folder.path().join("y")).expect("created");
    let mode = |file: &File| file.metadata().expect("there").permissions().mode();
    assert_eq!(mode(&File::open(folder.path().join("x")).expect("there")), mode(&plain));
}

#[tokio::test]
async fn a_root_that_is_a_link_to_nowhere_is_named_and_no_write_takes_it_for_another_writers() {
    let folder = folder();
    let root = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path().join("unmounted"), &root).expect("linked");
    let refused = store(&root).put("below/object", Bytes::from("x"), PutMode::Create).await.expect_err("refused");
    let expected = format!("expected a directory at {}, found a link to what is not there", root.display());
    assert!(matches!(&refused, Error::Io { detail, .. } if *detail == expected), "{refused}");
}
