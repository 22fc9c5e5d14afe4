//! Small objects: written whole beside their name, made durable, and only then given the name.
//!
//! Mounts differ in what they can do (object-store mounts often have neither rename nor hard links), so
//! publishing asks for the strongest call first and takes the next one when that is not there:
//!
//! | mode | calls, in order | after a crash |
//! | --- | --- | --- |
//! | create | hard link, rename without replacing | the new object or none |
//! | create | O_EXCL and write in place | the new object, none, or a torn one |
//! | overwrite | rename | the old object or the new one |
//! | overwrite | truncate and write in place | the old object, the new one, or a torn one |
//!
//! The torn cases are those of mounts that offer nothing better; whoever reads must check what it reads.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::{Shared, failure};
use crate::{PutMode, Result};

/// Files that start so are being written; [`crate::Store::list`] hides them.
pub(super) const STAGE_PREFIX: &str = ".tmp-";

/// A small object is written in seconds: one this old was left by a process that died, even between two
/// machines whose clocks differ by minutes.
const STALE_AFTER: Duration = Duration::from_secs(3600);

/// Whether a file name is that of an object still being written.
pub(super) fn is_stage(file_name: &str) -> bool {
    file_name.starts_with(STAGE_PREFIX)
}

type Call = fn(&Path, &Path) -> io::Result<()>;

/// The system calls that give a file its name; tests put in ones that a poor mount would answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calls {
    pub(super) link: Call,
    pub(super) rename_new: Call,
    pub(super) rename: Call,
}

impl Calls {
    pub(super) const SYSTEM: Calls = Calls {
        link: |from, to| fs::hard_link(from, to),
        rename_new: |from, to| Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?),
        rename: |from, to| fs::rename(from, to),
    };
}

/// Whether the answer means "not on this mount" and not "not with these names".
fn is_unavailable(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOSYS | Errno::PERM | Errno::OPNOTSUPP | Errno::INVAL))
}

/// Which directories this store has made and swept.
#[derive(Debug, Default)]
pub(super) struct Directories {
    /// Directories that this store has made, parents first. Held while they are made and synced, so that nobody writes
    /// into one that a crash may still undo.
    made: Mutex<Vec<PathBuf>>,
    /// Whether the root was looked for and not there.
    had_no_root: AtomicBool,
    /// Directories without stages of dead processes, so that each is read once and not at every put.
    swept: Mutex<HashSet<PathBuf>>,
}

impl Directories {
    pub(super) fn note_no_root(&self) {
        self.had_no_root.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// Writes one small object; see the module's table.
    pub(super) fn put(&self, path: &Path, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.make_parent(path)?;
        self.sweep(parent(path));
        let stage = self.stage(path, bytes)?;
        let published = match mode {
            PutMode::Create => self.publish_new(&stage, path, bytes),
            PutMode::Overwrite => self.publish_over(&stage, path, bytes),
        };
        // Gone already where it was renamed. What cannot be removed is swept later.
        match fs::remove_file(&stage) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %stage.display(), %error, "a staged file could not be removed");
            }
            _ => {}
        }
        published.map_err(|error| failure("write", path, error))?;
        self.sync_directory(parent(path)).map_err(|error| failure("sync the directory of", path, error))
    }

    /// Makes the directory of `path` with all it lies in, and makes every new one durable.
    pub(super) fn make_parent(&self, path: &Path) -> Result<()> {
        let directory = parent(path);
        let mut made = self.directories.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let missing: Vec<&Path> =
            directory.ancestors().take_while(|at| !at.as_os_str().is_empty() && !at.exists()).collect();
        fs::create_dir_all(directory).map_err(|error| match error.kind() {
            // Not of an object that is there already, which is how another writer's would look.
            io::ErrorKind::AlreadyExists => {
                failure("make the directory", directory, io::ErrorKind::NotADirectory.into())
            }
            _ => failure("make the directory", directory, error),
        })?;
        for new in &missing {
            self.sync_directory(parent(new)).map_err(|error| failure("sync the directory of", new, error))?;
        }
        made.extend(missing.into_iter().rev().map(Path::to_owned));
        Ok(())
    }

    /// Makes a new file at `path`, and the directory that it lies in.
    pub(super) fn make_file(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).open(path).or_else(|error| match error.kind() {
            // A failed save of another process has tidied up between the making of the directory and of the file.
            io::ErrorKind::NotFound => {
                fs::create_dir_all(parent(path))?;
                OpenOptions::new().write(true).create_new(true).open(path)
            }
            _ => Err(error),
        })
    }

    /// Removes the directories that are empty among those made here, and the root where there was none before.
    pub(super) fn tidy(&self) {
        let mut made = self.directories.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if self.directories.had_no_root.load(Ordering::Relaxed) && !made.contains(&self.root) {
            made.insert(0, self.root.clone());
        }
        // One that is not empty stays, and so does what it lies in.
        for directory in made.drain(..).rev() {
            let _ = fs::remove_dir(directory);
        }
    }

    /// Makes the names in `directory` durable.
    pub(super) fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        if !self.config.fsync {
            return Ok(());
        }
        match File::open(directory)?.sync_all() {
            // Mounts whose directories cannot be synced have no separate step that could be lost.
            Err(error) if is_unavailable(&error) => Ok(()),
            other => other,
        }
    }

    /// Writes the bytes under a name of their own beside `path`.
    fn stage(&self, path: &Path, bytes: &[u8]) -> Result<PathBuf> {
        let stage = parent(path).join(stage_name());
        let mut file = self.make_file(&stage).map_err(|error| failure("write", path, error))?;
        if let Err(error) = self.write_whole(&mut file, bytes) {
            let _ = fs::remove_file(&stage); // the first error is the one to tell
            return Err(failure("write", path, error));
        }
        Ok(stage)
    }

    fn publish_new(&self, stage: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match (self.calls.link)(stage, path) {
            Err(error) if is_unavailable(&error) => {}
            // A network file system may have linked, lost its answer and asked again: then it is our own file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_same_file(stage, path) => return Ok(()),
            answer => return answer,
        }
        match (self.calls.rename_new)(stage, path) {
            Err(error) if is_unavailable(&error) => {}
            answer => return answer,
        }
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        self.write_whole(&mut file, bytes).inspect_err(|_| {
            let _ = fs::remove_file(path); // ours alone: O_EXCL made it
        })
    }

    fn publish_over(&self, stage: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
        match (self.calls.rename)(stage, path) {
            Err(error) if is_unavailable(&error) => {}
            answer => return answer,
        }
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        self.write_whole(&mut file, bytes)
    }

    fn write_whole(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)?;
        if self.config.fsync { file.sync_all() } else { Ok(()) }
    }

    /// Removes what processes that died left in `directory`: once a store and directory, best effort.
    pub(super) fn sweep(&self, directory: &Path) {
        let mut swept = self.directories.swept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !swept.insert(directory.to_owned()) {
            return;
        }
        drop(swept);
        let Ok(entries) = fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            let is_stage = entry.file_name().to_str().is_some_and(is_stage);
            let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
            if is_stage && age().is_some_and(|age| age > STALE_AFTER) {
                let removed = fs::remove_file(entry.path());
                tracing::info!(path = %entry.path().display(), ?removed, "a stale staged file");
            }
        }
    }
}

/// Removes `directory` and those in it, as far as they are empty; one that is being written to stays.
pub(super) fn remove_empty(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        // Not what a link leads to: that lies elsewhere.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(directory); // fails if anything is in it
}

/// The directory of `path`, also of a bare relative name.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) => Path::new("."),
        None => path,
    }
}

/// A file name that no other writer chooses: random for this process, counted within it. The process id tells a
/// forked child, which inherits both, from its parent.
fn stage_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let random = RandomState::new().hash_one(std::process::id());
    format!("{STAGE_PREFIX}{random:016x}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path| fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}
