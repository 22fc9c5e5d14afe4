//! Which rank of a group reads which block, and when it hands it on. Pure: every rank computes the same from what all
//! ranks need.

use std::collections::HashMap;
use std::ops::Range;

use strata_io::digest::BLOCK_BYTES;

use crate::geometry::StridedCopy;
use crate::item::Item;
use crate::manifest::Items;
use crate::plan::{REQUEST_BYTES, block_range};

/// A number for each block of a checkpoint: the same on every rank that has opened the same state.
///
/// Counted by the length of the framed item, because the payload of a stock item is known only where it was looked at;
/// of what is encoded by the payload's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbering {
    /// Of each row, that of its first block; names of one payload share it.
    first: Vec<usize>,
    /// The blocks of each payload.
    payloads: Vec<Range<usize>>,
    /// Length of each block in bytes, or a little more.
    bytes: Vec<u64>,
}

impl Numbering {
    /// Numbers the blocks of `items`, which are all that the checkpoint has.
    pub fn new(items: &Items) -> Self {
        let mut numbering = Self { first: Vec::with_capacity(items.len()), payloads: Vec::new(), bytes: Vec::new() };
        let mut known: HashMap<(u32, u64, u64), usize> = HashMap::new();
        items.each(|item| {
            let next = numbering.bytes.len();
            let first = *known.entry((item.object, item.item_offset, item.item_bytes)).or_insert(next);
            numbering.first.push(first);
            if first == next {
                let bytes = if item.encoding.is_some() { item.payload_bytes } else { item.item_bytes };
                let blocks = bytes.div_ceil(BLOCK_BYTES);
                let length = |block| block_range(block, bytes).end - block * BLOCK_BYTES;
                numbering.bytes.extend((0..blocks).map(length));
                numbering.payloads.push(next..numbering.bytes.len());
            }
        });
        numbering
    }

    /// The number of a block of a row's payload.
    pub fn number(&self, row: usize, block: u64) -> usize {
        self.first[row] + block as usize
    }

    /// How many blocks there are.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// One bit for each block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bits(Vec<u8>);

impl Bits {
    /// `len` bits, none of them set.
    pub fn none(len: usize) -> Self {
        Self(vec![0; len.div_ceil(8)])
    }

    /// The bits of another rank, if they are `len`.
    pub fn from_bytes(bytes: Vec<u8>, len: usize) -> Option<Self> {
        (bytes.len() == len.div_ceil(8)).then_some(Self(bytes))
    }

    /// For another rank.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Sets one.
    pub fn set(&mut self, number: usize) {
        self.0[number / 8] |= 1 << (number % 8);
    }

    /// Whether it is set.
    pub fn has(&self, number: usize) -> bool {
        self.0[number / 8] >> (number % 8) & 1 == 1
    }
}

/// The blocks of `item` that `copy` takes bytes from.
pub(crate) fn blocks_of<'a>(item: &'a Item, copy: &'a StridedCopy) -> impl Iterator<Item = u64> + 'a {
    let range = copy.source_range();
    let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
    blocks.filter(|block| copy.runs_in(block_range(*block, item.payload_bytes)).next().is_some())
}

/// When a block is read, and by whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// From 0.
    pub round: u32,
    /// Rank in the group, one of those that need the block.
    pub owner: u32,
}

/// What a group reads together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Of each block, unless its payload is of no concern to a second rank.
    turns: Vec<Option<Turn>>,
    /// Of each rank: the most bytes of one round.
    most_bytes: Vec<u64>,
    rounds: u32,
    needs: Vec<Bits>,
}

impl Schedule {
    /// Cuts the payloads of which a block is needed by several of the ranks, `needs` (at least one), into rounds in
    /// which no rank takes more than `round_bytes`, or one block.
    ///
    /// Blocks of the same ranks keep their order, so that neighbours are read in one request; ranks that share nothing
    /// do not wait for each other.
    pub fn new(numbering: &Numbering, needs: Vec<Bits>, round_bytes: u64) -> Self {
        let world = needs.len();
        let payloads = numbering.payloads.iter().filter(|payload| is_shared(&needs, payload));
        let shared: Vec<usize> = payloads.flat_map(Range::clone).collect();
        let shared_bytes: u64 = shared.iter().map(|number| numbering.bytes[*number]).sum();
        // Each rank's part of a round, as far as a request may be that long.
        let stripe_bytes = (round_bytes.min(shared_bytes) / world as u64).clamp(BLOCK_BYTES, REQUEST_BYTES);
        let mut draft = Draft::new(world, round_bytes, stripe_bytes);
        let mut turns = vec![None; numbering.len()];
        for number in shared {
            let needers = needers(&needs, number);
            if !needers.is_empty() {
                turns[number] = Some(draft.place(needers, numbering.bytes[number]));
            }
        }
        Self { turns, most_bytes: draft.most_bytes(), rounds: draft.held.len() as u32, needs }
    }

    /// Number of rounds.
    pub fn rounds(&self) -> u32 {
        self.rounds
    }

    /// When a block is read and by whom; None if its payload is of no concern to a second rank.
    pub fn turn(&self, number: usize) -> Option<Turn> {
        self.turns[number]
    }

    /// The ranks that need a block, ascending.
    pub fn needers(&self, number: usize) -> Vec<u32> {
        needers(&self.needs, number)
    }

    /// Bytes that `rank` takes in one round at most.
    pub fn most_bytes(&self, rank: u32) -> u64 {
        self.most_bytes[rank as usize]
    }
}

/// A schedule in the making.
struct Draft {
    round_bytes: u64,
    stripe_bytes: u64,
    /// Of each round: the bytes that each rank takes.
    held: Vec<Vec<u64>>,
    /// Of each rank: the bytes that it reads.
    loads: Vec<u64>,
    /// Of each set of ranks: the stripe that its next block may go on.
    stripes: HashMap<Vec<u32>, Stripe>,
}

/// The neighbouring blocks that one owner reads for the same ranks.
#[derive(Clone, Copy, Default)]
struct Stripe {
    round: usize,
    owner: u32,
    bytes: u64,
}

impl Draft {
    fn new(world: usize, round_bytes: u64, stripe_bytes: u64) -> Self {
        Self { round_bytes, stripe_bytes, held: Vec::new(), loads: vec![0; world], stripes: HashMap::new() }
    }

    /// Gives a block of `bytes` its turn, behind the blocks before it that the same ranks need.
    fn place(&mut self, needers: Vec<u32>, bytes: u64) -> Turn {
        let last = self.stripes.get(&needers).copied().unwrap_or_default();
        let round = self.round_with_room(last.round, &needers, bytes);
        let goes_on = last.round == round && last.bytes > 0 && last.bytes + bytes <= self.stripe_bytes;
        let (owner, before) = if goes_on { (last.owner, last.bytes) } else { (self.idlest(&needers), 0) };
        self.loads[owner as usize] += bytes;
        needers.iter().for_each(|rank| self.held[round][*rank as usize] += bytes);
        self.stripes.insert(needers, Stripe { round, owner, bytes: before + bytes });
        Turn { round: round as u32, owner }
    }

    /// The first round from `from` on in which all `needers` can take `bytes` more, or nothing yet; a new one if none.
    fn round_with_room(&mut self, from: usize, needers: &[u32], bytes: u64) -> usize {
        let has_room = |held: u64| held == 0 || held + bytes <= self.round_bytes;
        let fits = |round: &Vec<u64>| needers.iter().all(|rank| has_room(round[*rank as usize]));
        if let Some(ahead) = self.held.iter().skip(from).position(fits) {
            return from + ahead;
        }
        self.held.push(vec![0; self.loads.len()]);
        self.held.len() - 1
    }

    /// Who of `needers` has the least to read; of equals the first.
    fn idlest(&self, needers: &[u32]) -> u32 {
        let idlest = needers.iter().min_by_key(|rank| (self.loads[**rank as usize], **rank));
        *idlest.expect("somebody needs it")
    }

    fn most_bytes(&self) -> Vec<u64> {
        (0..self.loads.len()).map(|rank| self.held.iter().map(|round| round[rank]).max().unwrap_or(0)).collect()
    }
}

fn needers(needs: &[Bits], number: usize) -> Vec<u32> {
    (0..needs.len() as u32).filter(|rank| needs[*rank as usize].has(number)).collect()
}

fn is_shared(needs: &[Bits], payload: &Range<usize>) -> bool {
    payload.clone().any(|number| needs.iter().filter(|rank| rank.has(number)).nth(1).is_some())
}

#[cfg(test)]
mod tests;
