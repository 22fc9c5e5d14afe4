//! A group's reads: of the blocks that several ranks need, one rank reads each into a buffer, from where it is handed
//! on. How it travels is the caller's affair; what arrives is verified again, on every rank, before it is copied.

use std::ops::Range;
use std::sync::Arc;

use strata_io::digest::{DigestKind, crc32, xxh3};
use strata_io::lent::LentMut;
use tokio::task::JoinSet;

use super::check::Checks;
use super::{Job, ReadStats, Reading, TensorRead, VerifyMode, check, run};
use crate::destination::Destination;
use crate::geometry::StridedCopy;
use crate::manifest::Items;
use crate::open::Checkpoint;
use crate::plan::{BlockRead, block_range, joined, needed_blocks};
use crate::share::{Bits, Numbering, Schedule, blocks_of};
use crate::{Error, Result};

/// What the ranks of a group read together, as one of them sees it.
pub struct Together {
    reading: Reading,
    checkpoint: Arc<Checkpoint>,
    numbering: Numbering,
    schedule: Schedule,
    rank: u32,
    mode: VerifyMode,
    checks: Arc<Checks>,
}

/// A run of a round's buffer that one rank has read and others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Rank in the group that has it.
    pub owner: u32,
    /// The other ranks that need it, ascending.
    pub receivers: Vec<u32>,
    /// Where it lies in the buffer, in bytes; other ranks have it elsewhere.
    pub range: Range<usize>,
}

/// A round whose own reads have ended.
pub struct Round {
    job: Arc<Job>,
    landed: Vec<(BlockRead, LentMut)>,
    pieces: Vec<Piece>,
    stats: ReadStats,
}

impl Together {
    /// The blocks from which `wanted` takes bytes, for the other ranks.
    pub fn needs(checkpoint: &Checkpoint, wanted: &[(usize, StridedCopy)]) -> Bits {
        let items = &checkpoint.manifest.items;
        let numbering = Numbering::new(items);
        let mut bits = Bits::none(numbering.len());
        for (row, copy) in wanted.iter().filter(|(row, _)| items[*row].inline.is_none()) {
            blocks_of(&items[*row], copy).for_each(|block| bits.set(numbering.number(*row, block)));
        }
        bits
    }

    /// What comes of the needs of all ranks, which are [`Together::needs`] of each.
    ///
    /// # Errors
    /// [`Error::Plan`] if the needs are not of this checkpoint.
    pub fn new(
        reading: Reading,
        checkpoint: Arc<Checkpoint>,
        needs: Vec<Vec<u8>>,
        rank: u32,
        round_bytes: u64,
        mode: VerifyMode,
    ) -> Result<Self> {
        let numbering = Numbering::new(&checkpoint.manifest.items);
        let bits: Option<Vec<Bits>> = needs.into_iter().map(|needs| Bits::from_bytes(needs, numbering.len())).collect();
        let needs = bits.filter(|bits| bits.len() > rank as usize).ok_or_else(|| {
            Error::Plan(format!("{}: the ranks of the group have not opened the same state", reading.store.url()))
        })?;
        let schedule = Schedule::new(&numbering, needs, round_bytes);
        Ok(Self { reading, checkpoint, numbering, schedule, rank, mode, checks: Arc::default() })
    }

    /// Number of rounds, the same on every rank.
    pub fn rounds(&self) -> u32 {
        self.schedule.rounds()
    }

    /// Memory that a round needs on this rank, in bytes.
    pub fn buffer_bytes(&self) -> u64 {
        self.schedule.most_bytes(self.rank)
    }

    /// The rounds in which a region's bytes arrive; None if it is for this rank to read on its own.
    pub fn span(&self, row: usize, copy: &StridedCopy) -> Option<Range<u32>> {
        let item = &self.checkpoint.manifest.items[row];
        if item.inline.is_some() {
            return None;
        }
        let turns = blocks_of(item, copy).filter_map(|block| self.schedule.turn(self.numbering.number(row, block)));
        let rounds: Vec<u32> = turns.map(|turn| turn.round).collect();
        Some(*rounds.iter().min()?..*rounds.iter().max()? + 1)
    }

    /// Reads what this rank owns in `round`: into `buffer` what others need too, into `tensors` (all whose span holds
    /// the round) what they do not.
    ///
    /// # Errors
    /// The first failure, after every operation that could touch the memory has ended.
    ///
    /// # Cancel safety
    /// As [`super::read`].
    pub async fn read(&self, round: u32, tensors: Vec<TensorRead>, buffer: LentMut) -> Result<Round> {
        let stored: Vec<(usize, Destination)> = tensors.into_iter().map(|t| (t.row, t.destination)).collect();
        let blocks = self.blocks(round, &stored);
        let job = Job::new(self.reading.store.clone(), self.checkpoint.clone(), stored, self.mode, self.checks.clone());
        let job = Arc::new(job?);
        let (alone, shared): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|block| block.needers.len() == 1);
        let alone = alone.into_iter().map(|block| (block.object, block.read)).collect();

        let (landed, own, pieces) = self.lay_out(shared, buffer)?;
        let (destinations, own): (Vec<_>, Vec<_>) = own.into_iter().unzip();
        // Verified here, and again where it is taken up: what it notes of stock items is noted there.
        let checks = Arc::default();
        let kept =
            Job::new(self.reading.store.clone(), self.checkpoint.clone(), destinations, VerifyMode::InPlace, checks);
        let kept = Arc::new(kept?);

        let (first, second) =
            tokio::join!(run(&job, &self.reading, joined(alone)), run(&kept, &self.reading, joined(own)));
        let (first, second) = (first?, second?);
        let stats = ReadStats {
            requests: first.requests + second.requests,
            bytes_read: first.bytes_read + second.bytes_read,
            ..ReadStats::default()
        };
        Ok(Round { job, landed, pieces, stats })
    }

    /// Compares the stock items that arrived whole; returns verified blocks and unverified bytes of all rounds.
    ///
    /// # Errors
    /// [`Error::Checksum`].
    pub fn settle(&self) -> Result<(u64, u64)> {
        self.checks.settle(&self.checkpoint, self.reading.store.url())
    }

    fn blocks(&self, round: u32, stored: &[(usize, Destination)]) -> Vec<Block> {
        let blocks = needed_blocks(&self.checkpoint.manifest.items, stored).into_iter();
        let block = |(object, read): (u32, BlockRead)| {
            let number = self.numbering.number(read.row, read.block);
            let turn = self.schedule.turn(number).filter(|turn| turn.round == round)?;
            Some(Block { owner: turn.owner, needers: self.schedule.needers(number), number, object, read })
        };
        let mut blocks: Vec<Block> = blocks.filter_map(block).collect();
        blocks.sort_by(|a, b| (a.owner, &a.needers, a.number).cmp(&(b.owner, &b.needers, b.number)));
        blocks
    }

    /// Gives each block its place in the buffer: all of them, those that this rank reads, and the runs to hand on.
    fn lay_out(&self, blocks: Vec<Block>, mut buffer: LentMut) -> Result<Layout> {
        let items = &self.checkpoint.manifest.items;
        let (mut landed, mut own, mut pieces) = (Vec::new(), Vec::<Owned>::new(), Vec::<Piece>::new());
        let (mut at, buffer_bytes) = (0, buffer.len());
        for Block { owner, needers, object, read, .. } in blocks {
            let read = whole_block(read, items);
            let bytes = (read.payload.end - read.payload.start) as usize;
            if bytes > buffer.len() {
                return Err(Error::Plan(format!("a round needs more than the {buffer_bytes} bytes of its buffer")));
            }
            let mut memory = buffer.split_to(bytes);
            if owner == self.rank {
                let (payload, destinations) = (read.payload.clone(), vec![own.len()]);
                let place = Destination::of_buffer(&mut memory, StridedCopy::of_bytes(payload));
                own.push(((read.row, place), (object, BlockRead { destinations, ..read.clone() })));
            }
            match pieces.last_mut().filter(|piece| piece.owner == owner && is_for(piece, &needers)) {
                Some(piece) => piece.range.end += bytes,
                None => {
                    let receivers = needers.into_iter().filter(|rank| *rank != owner).collect();
                    pieces.push(Piece { owner, receivers, range: at..at + bytes });
                }
            }
            landed.push((read, memory));
            at += bytes;
        }
        Ok((landed, own, pieces))
    }
}

/// A row and a place in the buffer, and the block that is read there.
type Owned = ((usize, Destination), (u32, BlockRead));

type Layout = (Vec<(BlockRead, LentMut)>, Vec<Owned>, Vec<Piece>);

/// A block that this rank needs in a round.
struct Block {
    owner: u32,
    needers: Vec<u32>,
    number: usize,
    object: u32,
    read: BlockRead,
}

fn is_for(piece: &Piece, needers: &[u32]) -> bool {
    piece.receivers.iter().eq(needers.iter().filter(|rank| **rank != piece.owner))
}

/// All of the block: ranks need other parts of it.
fn whole_block(read: BlockRead, items: &Items) -> BlockRead {
    let item = &items[read.row];
    let payload = block_range(read.block, item.payload_bytes);
    let file = item.stored_range(read.block, &payload);
    BlockRead { payload, file, ..read }
}

impl Round {
    /// What is to be handed on, in the order in which any two ranks exchange it.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// What this rank has read.
    pub fn stats(&self) -> ReadStats {
        self.stats
    }

    /// Verifies what lies in the buffer, complete now, and copies it to its destinations.
    ///
    /// # Errors
    /// [`Error::Checksum`], after every copy has ended.
    pub async fn deliver(self) -> Result<()> {
        let mut copying = JoinSet::new();
        for (block, memory) in self.landed {
            let job = self.job.clone();
            copying.spawn_blocking(move || take_up(&job, &block, &memory));
        }
        let mut first_error = None;
        while let Some(done) = copying.join_next().await {
            first_error = first_error.or(done.expect("a copy does not panic").err());
        }
        first_error.map_or(Ok(()), Err)
    }
}

fn take_up(job: &Job, block: &BlockRead, memory: &LentMut) -> Result<()> {
    let bytes = memory.as_slice();
    let digest = match job.digest_kind() {
        DigestKind::Xxh3 => xxh3(bytes),
        DigestKind::Crc32 => crc32(bytes).into(),
        DigestKind::None => 0,
    };
    check(job, block, digest)?;
    job.scatter(block, bytes)
}
