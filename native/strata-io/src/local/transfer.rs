//! Positioned, vectored transfers between memory and one file: through the page cache, or past it.
//!
//! A direct transfer (O_DIRECT) wants memory and file offset aligned. Of a large piece whose memory and file
//! offset are congruent, the interior goes directly and its head and tail through the page cache. Both kinds
//! never share a page: an interior is whole pages of the file, so a page that is written back later holds only
//! bytes that were written to it.
//!
//! Before Linux 6.3 a process that forks during a direct read may lose what is read (open(2), NOTES): callers
//! verify digests after a read, which finds that.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::failure;
use crate::digest::{DigestKind, RunningDigest};
use crate::lent::LentMut;
use crate::{Error, Result};

/// Grain of part sizes: the page of most machines, and a multiple of every disk's block.
pub(super) const PAGE_BYTES: u64 = 4096;

/// Below this a copy costs little and a direct transfer is mostly waiting; a round figure, not tuned.
pub(super) const DIRECT_FROM_BYTES: usize = 1 << 20;

/// Fits in L2 beside what the copy from the page cache leaves there.
const DIGEST_STRIDE_BYTES: usize = 256 << 10;

/// Most slices one system call takes (IOV_MAX on Linux).
const SLICES_A_CALL: usize = 1024;

/// What direct transfers ask for, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alignment {
    /// Of the memory's address.
    pub(super) memory: usize,
    /// Of the file offset and the length: whole pages, and what the device asks for.
    pub(super) file: u64,
}

/// Consecutive bytes that travel the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) len: usize,
    pub(super) direct: bool,
}

/// How pieces of memory at (address, length), one after the other in the file from `offset` on, travel.
pub(super) fn runs(pieces: impl Iterator<Item = (usize, usize)>, offset: u64, align: Option<Alignment>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut push = |len: usize, direct: bool| match runs.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.direct == direct => last.len += len,
        _ => runs.push(Run { len, direct }),
    };
    let mut at = offset;
    for (addr, len) in pieces {
        match align.and_then(|align| interior(addr, len, at, align)) {
            None => push(len, false),
            Some(interior) => {
                push(interior.start, false);
                push(interior.len(), true);
                push(len - interior.end, false);
            }
        }
        at += len as u64;
    }
    runs
}

/// The part of a piece that may travel directly, if that is worth it.
fn interior(addr: usize, len: usize, at: u64, align: Alignment) -> Option<Range<usize>> {
    let head = (at.next_multiple_of(align.file) - at) as usize;
    let tail = ((at + len as u64) % align.file) as usize;
    let worth_it = len >= DIRECT_FROM_BYTES && head + tail < len;
    (worth_it && (addr + head).is_multiple_of(align.memory)).then(|| head..len - tail)
}

/// A slice to be read from or written to the file.
trait Piece: Sized {
    fn addr(&self) -> usize;
    fn len(&self) -> usize;
    fn cut(self, at: usize) -> (Self, Self);
    /// One system call for as many of the pieces as it takes; returns the bytes moved.
    fn transfer(file: &File, pieces: &mut VecDeque<Self>, offset: u64) -> rustix::io::Result<usize>;
}

impl Piece for &[u8] {
    fn addr(&self) -> usize {
        self.as_ptr() as usize
    }
    fn len(&self) -> usize {
        (**self).len()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        self.split_at(at)
    }
    fn transfer(file: &File, pieces: &mut VecDeque<Self>, offset: u64) -> rustix::io::Result<usize> {
        let slices: Vec<_> = pieces.iter().take(SLICES_A_CALL).map(|piece| IoSlice::new(piece)).collect();
        rustix::io::pwritev(file, &slices, offset)
    }
}

impl Piece for &mut [u8] {
    fn addr(&self) -> usize {
        self.as_ptr() as usize
    }
    fn len(&self) -> usize {
        (**self).len()
    }
    fn cut(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
    fn transfer(file: &File, pieces: &mut VecDeque<Self>, offset: u64) -> rustix::io::Result<usize> {
        rustix::io::preadv(file, &mut io_slices(pieces), offset)
    }
}

fn io_slices<'a>(pieces: &'a mut VecDeque<&mut [u8]>) -> Vec<IoSliceMut<'a>> {
    pieces.iter_mut().take(SLICES_A_CALL).map(|piece| IoSliceMut::new(piece)).collect()
}

/// Takes the first `bytes` out of `pieces`.
fn take<P: Piece>(pieces: &mut VecDeque<P>, mut bytes: usize) -> VecDeque<P> {
    let mut taken = VecDeque::new();
    while let Some(piece) = pieces.pop_front() {
        if piece.len() > bytes {
            let (head, rest) = piece.cut(bytes);
            pieces.push_front(rest);
            if bytes > 0 {
                taken.push_back(head);
            }
            break;
        }
        bytes -= piece.len();
        taken.push_back(piece);
    }
    taken
}

/// A file with, where it helps, a second handle that bypasses the page cache.
#[derive(Debug)]
pub(super) struct OpenFile {
    buffered: File,
    direct: Option<Direct>,
    path: PathBuf,
}

#[derive(Debug)]
struct Direct {
    file: File,
    align: Alignment,
    /// Set when the file system says no after all; everything then goes through the page cache.
    refused: AtomicBool,
}

impl OpenFile {
    /// Takes an open file; `direct` asks for direct transfers where they are possible.
    pub(super) fn new(buffered: File, path: PathBuf, direct: bool) -> Self {
        let direct = if direct { open_direct(&buffered, &path) } else { None };
        OpenFile { buffered, direct, path }
    }

    pub(super) fn path(&self) -> &PathBuf {
        &self.path
    }

    pub(super) fn file(&self) -> &File {
        &self.buffered
    }

    pub(super) fn is_direct(&self) -> bool {
        self.align().is_some()
    }

    /// Writes all of `pieces` from `offset` on.
    pub(super) fn write(&self, pieces: &[Bytes], offset: u64) -> Result<()> {
        let pieces = pieces.iter().map(|piece| &piece[..]).filter(|piece| !piece.is_empty()).collect();
        self.transfer(pieces, offset).map_err(|error| failure("write", &self.path, error))
    }

    /// Fills all of `targets` from `offset` on.
    pub(super) fn read(&self, mut targets: Vec<LentMut>, offset: u64) -> Result<()> {
        let pieces: VecDeque<_> = targets.iter_mut().map(|t| t.as_mut_slice()).filter(|t| !t.is_empty()).collect();
        let end = offset + pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        self.read_pieces(pieces, offset, end)
    }

    /// Fills all of `targets` from `offset` on, and takes the digest of each.
    ///
    /// What is in the page cache is digested stride by stride while it is in the processor's.
    pub(super) fn read_digested(&self, targets: Vec<LentMut>, offset: u64, kind: DigestKind) -> Result<Vec<u128>> {
        let end = offset + targets.iter().map(|target| target.len() as u64).sum::<u64>();
        let mut at = offset;
        let digest_of = |mut target: LentMut| {
            let bytes = target.as_mut_slice();
            let mut digest = RunningDigest::new(kind);
            let (mut done, mut is_cached) = (0, false);
            while done < bytes.len() {
                let stride = done..bytes.len().min(done + DIGEST_STRIDE_BYTES);
                let mut pieces = VecDeque::from([&mut bytes[stride.clone()]]);
                let cached = match self.is_direct() {
                    true if is_cached => self.read_while_cached(&mut pieces, at + done as u64),
                    true => self.read_cached(&mut pieces, at + done as u64),
                    false => 0,
                };
                is_cached = cached == stride.len();
                let fresh = match cached == stride.len() {
                    true => stride,
                    // On a device, one large read beats many small ones: all that is left at once.
                    false if self.is_direct() => done..bytes.len(),
                    false => stride,
                };
                if cached < fresh.len() {
                    let rest = &mut bytes[done + cached..fresh.end];
                    self.finish_read(VecDeque::from([rest]), at + (done + cached) as u64, end)?;
                }
                digest.update(&bytes[fresh.clone()]);
                done = fresh.end;
            }
            at += bytes.len() as u64;
            Ok(digest.finish())
        };
        targets.into_iter().map(digest_of).collect()
    }

    /// Reads `range`, or all there is, into memory of its own.
    pub(super) fn read_fresh(&self, range: Option<Range<u64>>) -> Result<Bytes> {
        let size = self.buffered.metadata().map_err(|error| failure("look up", &self.path, error))?.len();
        let range = range.unwrap_or(0..size);
        if range.start > range.end {
            return Err(Error::Config(format!(
                "bytes {range:?} of {}: a range ends before it starts",
                self.path.display()
            )));
        }
        if range.end > size {
            return Err(self.too_short(range.end, size)); // before memory for it is asked for
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        if !bytes.is_empty() {
            self.read_pieces(VecDeque::from([&mut bytes[..]]), range.start, range.end)?;
        }
        Ok(bytes.into())
    }

    fn read_pieces(&self, mut pieces: VecDeque<&mut [u8]>, offset: u64, end: u64) -> Result<()> {
        let mut at = offset;
        if self.is_direct() {
            at += self.read_cached(&mut pieces, offset) as u64;
        }
        self.finish_read(pieces, at, end)
    }

    /// Fills `pieces` from `at` on; `end` is where the whole read ends.
    fn finish_read(&self, pieces: VecDeque<&mut [u8]>, at: u64, end: u64) -> Result<()> {
        self.transfer(pieces, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                self.too_short(end, self.buffered.metadata().map_or(0, |metadata| metadata.len()))
            }
            _ => failure("read", &self.path, error),
        })
    }

    fn too_short(&self, expected: u64, found: u64) -> Error {
        Error::Mismatch {
            object: self.path.display().to_string(),
            expected: format!("at least {expected} bytes"),
            found: format!("{found} bytes"),
        }
    }

    /// Fills the start of `pieces` with what is in the page cache, so that only the rest goes to the device.
    fn read_cached(&self, pieces: &mut VecDeque<&mut [u8]>, offset: u64) -> usize {
        // One page first: asking for all would make the kernel read ahead what we then read directly.
        let mut moved = 0;
        let mut probe = take(pieces, PAGE_BYTES as usize);
        let cached = read_nowait(&self.buffered, &mut probe, offset);
        let probed = cached == probe.iter().map(|piece| piece.len()).sum::<usize>();
        take(&mut probe, cached);
        for rest in probe.into_iter().rev() {
            pieces.push_front(rest);
        }
        moved += cached;
        if probed && cached > 0 {
            moved += self.read_while_cached(pieces, offset + moved as u64);
        }
        moved
    }

    /// As [`OpenFile::read_cached`] without the page first: for what follows bytes that were cached.
    fn read_while_cached(&self, pieces: &mut VecDeque<&mut [u8]>, offset: u64) -> usize {
        let mut moved = 0;
        while !pieces.is_empty() {
            let cached = read_nowait(&self.buffered, pieces, offset + moved as u64);
            if cached == 0 {
                break;
            }
            take(pieces, cached);
            moved += cached;
        }
        moved
    }

    /// Moves all of `pieces`, each run its way.
    fn transfer<P: Piece>(&self, mut pieces: VecDeque<P>, offset: u64) -> io::Result<()> {
        let runs = runs(pieces.iter().map(|piece| (piece.addr(), piece.len())), offset, self.align());
        let mut at = offset;
        for run in runs {
            self.transfer_run(take(&mut pieces, run.len), at, run.direct)?;
            at += run.len as u64;
        }
        Ok(())
    }

    fn transfer_run<P: Piece>(&self, mut pieces: VecDeque<P>, offset: u64, direct: bool) -> io::Result<()> {
        let mut at = offset;
        while let Some(first) = pieces.front() {
            // A short transfer may leave a rest that is no longer aligned.
            let way = self.direct.as_ref().filter(|way| direct && way.fits(first.addr(), at));
            match P::transfer(way.map_or(&self.buffered, |way| &way.file), &mut pieces, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(moved) => {
                    take(&mut pieces, moved);
                    at += moved as u64;
                }
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if way.is_some() => self.refuse_direct(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn align(&self) -> Option<Alignment> {
        self.direct.as_ref().filter(|direct| !direct.refused.load(Ordering::Relaxed)).map(|direct| direct.align)
    }

    fn refuse_direct(&self) {
        tracing::debug!(path = %self.path.display(), "direct I/O refused, using the page cache");
        if let Some(direct) = &self.direct {
            direct.refused.store(true, Ordering::Relaxed);
        }
    }
}

impl Direct {
    fn fits(&self, addr: usize, at: u64) -> bool {
        let aligned = addr.is_multiple_of(self.align.memory) && at.is_multiple_of(self.align.file);
        aligned && !self.refused.load(Ordering::Relaxed)
    }
}

/// One read of what is cached; 0 where nothing is, or where the kernel cannot say.
fn read_nowait(file: &File, pieces: &mut VecDeque<&mut [u8]>, offset: u64) -> usize {
    rustix::io::preadv2(file, &mut io_slices(pieces), offset, ReadWriteFlags::NOWAIT).unwrap_or(0)
}

/// A second handle on an open file that bypasses the page cache, where the kernel tells what it asks for
/// (statx with STATX_DIOALIGN, Linux 6.1). Where it does not tell, the page cache is the safe way.
fn open_direct(buffered: &File, path: &Path) -> Option<Direct> {
    let status = rustix::fs::statx(buffered, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let (memory, file) = (status.stx_dio_mem_align, status.stx_dio_offset_align);
    if status.stx_mask & StatxFlags::DIOALIGN.bits() == 0 || memory == 0 || file == 0 {
        return None;
    }
    let page_bytes = rustix::param::page_size() as u64;
    let align = Alignment { memory: memory as usize, file: page_bytes.max(PAGE_BYTES).max(file.into()) };
    let access = rustix::fs::fcntl_getfl(buffered).ok()? & OFlags::RWMODE;
    let mut options = OpenOptions::new();
    options.read(access != OFlags::WRONLY).write(access != OFlags::RDONLY);
    let direct = options.custom_flags(OFlags::DIRECT.bits() as i32).open(path).ok()?;
    // The name may lead to another file by now.
    let identity = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
    let same = identity(buffered)? == identity(&direct)?;
    same.then_some(Direct { file: direct, align, refused: AtomicBool::new(false) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGN: Alignment = Alignment { memory: 512, file: 4096 };
    const MIB: usize = 1 << 20;

    fn ways(pieces: &[(usize, usize)], offset: u64) -> Vec<(usize, bool)> {
        runs(pieces.iter().copied(), offset, Some(ALIGN)).iter().map(|run| (run.len, run.direct)).collect()
    }

    #[test]
    fn the_interior_of_a_congruent_piece_goes_directly_and_its_edges_do_not() {
        let expected = [(4096 - 64, false), (2 * MIB - 4096, true), (64, false)];
        assert_eq!(ways(&[(0x10040, 2 * MIB)], 64), expected);
    }

    #[test]
    fn aligned_neighbours_go_in_one_call() {
        assert_eq!(ways(&[(0x10000, MIB), (0x90000, MIB)], 8192), [(2 * MIB, true)]);
    }

    #[test]
    fn small_or_incongruent_pieces_go_through_the_page_cache_together() {
        assert_eq!(ways(&[(0x10000, MIB - 4096), (0x10040, 2 * MIB)], 0), [(3 * MIB - 4096, false)]);
        assert_eq!(runs([(0x10000, 2 * MIB)].into_iter(), 0, None), [Run { len: 2 * MIB, direct: false }]);
        assert_eq!(ways(&[(0x10000, 0)], 0), []);
    }

    #[test]
    fn a_file_system_that_refuses_a_direct_transfer_gets_a_buffered_one() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("object");
        let file = File::create_new(&path).expect("a new file");
        let mut open = OpenFile::new(file, path.clone(), true);
        if let Some(direct) = &mut open.direct {
            direct.align.memory = 1; // a lie: the device wants more, and says EINVAL
        }
        let bytes = Bytes::from((0..3 * MIB).map(|at| (at % 251) as u8).collect::<Vec<u8>>());
        let odd = bytes.slice(1 + (4096 - bytes.as_ptr() as usize % 4096)..); // at 1 modulo 4096
        open.write(std::slice::from_ref(&odd), 0).expect("written in the end");
        assert!(!open.is_direct());
        assert_eq!(std::fs::read(&path).expect("there"), odd);
    }
}
