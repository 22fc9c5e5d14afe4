//! Where the chunks of every tensor are, as columns: an object for each would be most of what a large index costs.

use super::Manifest;

/// Numbers in the narrowest of two types that holds them all. Beyond 63 bits they turn negative, which no reader takes
/// for a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ints {
    /// Of 32 bits.
    Narrow(Vec<i32>),
    /// Of 64 bits.
    Wide(Vec<i64>),
}

impl Ints {
    fn zeros(length: usize, largest: u64) -> Self {
        if i32::try_from(largest).is_ok() { Self::Narrow(vec![0; length]) } else { Self::Wide(vec![0; length]) }
    }

    fn set(&mut self, at: usize, value: u64) {
        match self {
            Self::Narrow(values) => values[at] = value as i32,
            Self::Wide(values) => values[at] = value as i64,
        }
    }

    /// The value there.
    pub fn get(&self, at: usize) -> i64 {
        match self {
            Self::Narrow(values) => i64::from(values[at]),
            Self::Wide(values) => values[at],
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Narrow(values) => values.len(),
            Self::Wide(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The chunks of every entry that is a tensor, each tensor's in the order of their hints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunks {
    /// Where each entry's chunks begin, and the end of the last.
    pub first: Vec<usize>,
    /// Where each chunk's dims begin, likewise.
    pub begin: Ints,
    /// First element of each chunk, dims of all chunks one after the other.
    pub offsets: Ints,
    /// Their lengths, likewise.
    pub lengths: Ints,
}

impl Chunks {
    /// (offsets, lengths) of the chunks of an entry.
    pub fn of(&self, entry: usize) -> impl Iterator<Item = (Vec<i64>, Vec<i64>)> {
        (self.first[entry]..self.first[entry + 1]).map(|chunk| {
            let dims = self.begin.get(chunk) as usize..self.begin.get(chunk + 1) as usize;
            (dims.clone().map(|dim| self.offsets.get(dim)).collect(), dims.map(|dim| self.lengths.get(dim)).collect())
        })
    }
}

impl Manifest {
    /// What the items say of the chunks of the entries.
    pub fn chunks(&self) -> Chunks {
        let count = Count::of(self);
        let (mut first, mut next_dims) = (vec![0], vec![0]);
        for (chunks, dims) in &count.of_entries {
            first.push(first[first.len() - 1] + chunks);
            next_dims.push(next_dims[next_dims.len() - 1] + dims);
        }
        let num_dims = next_dims[next_dims.len() - 1];
        let mut chunks = Chunks {
            begin: Ints::zeros(first[first.len() - 1] + 1, num_dims as u64),
            offsets: Ints::zeros(num_dims, count.largest_offset),
            lengths: Ints::zeros(num_dims, count.largest_length),
            first,
        };
        let last = chunks.begin.len() - 1;
        chunks.begin.set(last, num_dims as u64);
        let mut of_one = OfOne::default();
        let mut names = Names::of(self);
        self.items.each_chunk(|(fqn, offsets), lengths, hint| {
            let Some((entry, offsets)) = names.entry(fqn).zip(offsets) else { return };
            if entry != of_one.entry {
                of_one.put(&mut chunks, next_dims[of_one.entry]);
                of_one.entry = entry;
            }
            of_one.hints.push((hint, of_one.dims.len(), offsets.len()));
            of_one.dims.extend(offsets);
            of_one.dims.extend(lengths);
        });
        of_one.put(&mut chunks, next_dims[of_one.entry]);
        chunks
    }
}

/// How many chunks and dims each entry has, and what widths they need.
struct Count {
    of_entries: Vec<(usize, usize)>,
    largest_offset: u64,
    largest_length: u64,
}

impl Count {
    fn of(manifest: &Manifest) -> Self {
        let of_entries = vec![(0, 0); manifest.entries.len()];
        let mut count = Self { of_entries, largest_offset: 0, largest_length: 0 };
        let mut names = Names::of(manifest);
        manifest.items.each_chunk(|(fqn, offsets), lengths, _| {
            let Some((entry, offsets)) = names.entry(fqn).zip(offsets) else { return };
            let (chunks, dims) = &mut count.of_entries[entry];
            *chunks += 1;
            *dims += offsets.len();
            count.largest_offset = offsets.iter().copied().fold(count.largest_offset, u64::max);
            count.largest_length = lengths.iter().copied().fold(count.largest_length, u64::max);
        });
        count
    }
}

/// Finds the entry, if it is a tensor, of names that come sorted.
struct Names<'a> {
    sorted: Vec<(&'a [u8], usize)>,
    at: usize,
}

impl<'a> Names<'a> {
    fn of(manifest: &'a Manifest) -> Self {
        let tensors = manifest.entries.iter().enumerate().filter(|(_, entry)| entry.tensor.is_some());
        let mut sorted: Vec<_> = tensors.map(|(number, entry)| (entry.fqn.as_slice(), number)).collect();
        sorted.sort_unstable();
        Self { sorted, at: 0 }
    }

    fn entry(&mut self, fqn: &[u8]) -> Option<usize> {
        while self.sorted.get(self.at).is_some_and(|(name, _)| *name < fqn) {
            self.at += 1;
        }
        self.sorted.get(self.at).filter(|(name, _)| *name == fqn).map(|(_, number)| *number)
    }
}

/// The chunks of one entry, until all are known.
#[derive(Default)]
struct OfOne {
    entry: usize,
    /// Hint, and where the dims are: so many offsets, then as many lengths.
    hints: Vec<(Option<u32>, usize, usize)>,
    dims: Vec<u64>,
}

impl OfOne {
    /// Puts them into the columns, where the entry's dims begin.
    fn put(&mut self, chunks: &mut Chunks, mut next_dim: usize) {
        self.hints.sort_by_key(|(hint, _, _)| *hint);
        for (number, (_, start, num_dims)) in self.hints.iter().enumerate() {
            chunks.begin.set(chunks.first[self.entry] + number, next_dim as u64);
            for dim in 0..*num_dims {
                chunks.offsets.set(next_dim, self.dims[start + dim]);
                chunks.lengths.set(next_dim, self.dims[start + num_dims + dim]);
                next_dim += 1;
            }
        }
        self.hints.clear();
        self.dims.clear();
    }
}
