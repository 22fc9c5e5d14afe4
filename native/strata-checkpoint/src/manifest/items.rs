//! A manifest's items: values, or the file's sections, of which those rows become values that somebody asks for.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::{Index, IndexMut};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use prost::Message;
use strata_proto::v1::ItemGroup;

use super::GROUP_ROWS;
use super::columns::Fault;
use super::rows::{Row, Rows, Shared};
use crate::item::{Item, Object};

/// A name, and the first element of a chunk; None for a pickled value.
pub type Key<'a> = (&'a [u8], Option<&'a [u64]>);

/// Items, sorted by fqn, then offsets.
///
/// A rank needs a few of the half million that a large checkpoint has: what [`super::decode`] returns keeps the file's
/// bytes, which have been checked, and makes values of rows when they are asked for.
#[derive(Debug, Clone)]
pub struct Items(Held);

#[derive(Debug, Clone)]
enum Held {
    Made(Vec<Item>),
    Stored(Arc<Stored>),
}

impl Default for Items {
    fn default() -> Self {
        Self(Held::Made(Vec::new()))
    }
}

impl From<Vec<Item>> for Items {
    fn from(items: Vec<Item>) -> Self {
        Self(Held::Made(items))
    }
}

impl From<Stored> for Items {
    fn from(stored: Stored) -> Self {
        Self(Held::Stored(Arc::new(stored)))
    }
}

impl PartialEq for Items {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.all() == other.all()
    }
}

/// The first one of a group that is not made yet makes the whole group: ask for many by [`Items::rows_of`] before.
impl Index<usize> for Items {
    type Output = Item;

    fn index(&self, row: usize) -> &Item {
        match &self.0 {
            Held::Made(items) => &items[row],
            Held::Stored(stored) => stored.item(row),
        }
    }
}

/// Makes values of all.
impl IndexMut<usize> for Items {
    fn index_mut(&mut self, row: usize) -> &mut Item {
        if let Held::Stored(stored) = &self.0 {
            self.0 = Held::Made(stored.all());
        }
        match &mut self.0 {
            Held::Made(items) => &mut items[row],
            Held::Stored(_) => unreachable!("made above"),
        }
    }
}

impl Items {
    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Held::Made(items) => items.len(),
            Held::Stored(stored) => stored.num_rows,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All as values, which takes 170 bytes for each.
    pub fn all(&self) -> Cow<'_, [Item]> {
        match &self.0 {
            Held::Made(items) => Cow::Borrowed(items),
            Held::Stored(stored) => Cow::Owned(stored.all()),
        }
    }

    /// Shows each in turn, of which no more than one at a time is made.
    pub fn each(&self, mut see: impl FnMut(&Item)) {
        match &self.0 {
            Held::Made(items) => items.iter().for_each(see),
            Held::Stored(stored) => stored.each(|item| see(&item)),
        }
    }

    /// Shows where the chunk of each begins, how long it is, and its hint; of a value none is made.
    pub(super) fn each_chunk(&self, mut see: impl FnMut(Key<'_>, &[u64], Option<u32>)) {
        match &self.0 {
            Held::Made(items) => {
                items.iter().for_each(|item| see((&item.fqn, item.offsets.as_deref()), &item.shape, item.index));
            }
            Held::Stored(stored) => {
                let see = |_, row: &Row<'_>| see((row.fqn, row.offsets), row.extent.shape, row.index);
                stored.walk(see);
            }
        }
    }

    /// The row of each key that is there; their items are made.
    pub fn rows_of(&self, keys: &[Key<'_>]) -> Vec<Option<usize>> {
        match &self.0 {
            Held::Made(items) => {
                let row = |key: &Key<'_>| items.binary_search_by(|item| key_of(item).cmp(key)).ok();
                keys.iter().map(row).collect()
            }
            Held::Stored(stored) => stored.rows_of(keys),
        }
    }
}

fn key_of(item: &Item) -> Key<'_> {
    (&item.fqn, item.offsets.as_deref())
}

/// Sections of a file, each of which has been gone through once, row by row.
#[derive(Debug, Default)]
pub(super) struct Stored {
    groups: Vec<Group>,
    num_objects: usize,
    num_rows: usize,
}

/// One section of items and the two behind it.
#[derive(Debug)]
struct Group {
    first_row: usize,
    columns: Bytes,
    digests: Bytes,
    inline: Bytes,
    /// The last row's.
    last: (Vec<u8>, Option<Vec<u64>>),
    made: OnceLock<Box<[OnceLock<Box<Item>>]>>,
    num_rows: usize,
}

impl Stored {
    /// Of a file with these objects, in which nothing has been found yet.
    pub fn new(objects: &[Object]) -> Self {
        Self { num_objects: objects.len(), ..Self::default() }
    }

    /// Number of rows so far.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Adds a section, if every row of it is in order.
    ///
    /// # Errors
    /// What is not.
    pub fn push(&mut self, columns: Bytes, digests: Bytes, inline: Bytes, objects: &[Object]) -> Result<(), Fault> {
        let mut last = self.groups.last().map(|group| group.last.clone());
        let mut num_rows = 0;
        walk(&columns, &digests, &inline, objects.len(), |row| {
            let object = &objects[row.object as usize];
            let name = || String::from_utf8_lossy(row.fqn).into_owned();
            // The sum was checked with the row.
            if row.extent.item_offset + row.extent.item_bytes > object.size {
                return Err(format!("{:?} ends behind the {} bytes of {}", name(), object.size, object.name));
            }
            if let Some(base) = row.encoding.as_ref().and_then(|encoding| encoding.base.as_ref()) {
                let object = &objects[base.object as usize];
                if base.offset.checked_add(row.extent.payload_bytes).is_none_or(|end| end > object.size) {
                    return Err(format!(
                        "the base of {:?} ends behind the {} bytes of {}",
                        name(),
                        object.size,
                        object.name
                    ));
                }
            }
            if last.as_ref().is_some_and(|last| borrowed(last) >= (row.fqn, row.offsets)) {
                return Err(format!("{:?} stands twice or out of order", name()));
            }
            let (fqn, offsets) = last.get_or_insert_default();
            fqn.clear();
            fqn.extend(row.fqn);
            *offsets = row.offsets.map(|dims| replaced(offsets.take(), dims));
            num_rows += 1;
            Ok(())
        })?;
        if let Some(last) = last.filter(|_| num_rows > 0) {
            let (first_row, made) = (self.num_rows, OnceLock::new());
            self.groups.push(Group { first_row, columns, digests, inline, last, made, num_rows });
            self.num_rows += num_rows;
        }
        Ok(())
    }

    fn item(&self, row: usize) -> &Item {
        assert!(row < self.num_rows, "no row {row} of {}", self.num_rows);
        let group = &self.groups[self.groups.partition_point(|group| group.first_row <= row) - 1];
        let slot = &group.slots()[row - group.first_row];
        if slot.get().is_none() {
            let mut shared = Shared::default();
            group.walk(self.num_objects, |row, found| group.make(row, found, &mut shared));
        }
        slot.get().expect("made above")
    }

    fn all(&self) -> Vec<Item> {
        let mut items = Vec::with_capacity(self.num_rows);
        let mut shared = Shared::default();
        for group in &self.groups {
            group.walk(self.num_objects, |_, row| items.push(row.item(&group.inline, &mut shared)));
        }
        items
    }

    fn each(&self, mut see: impl FnMut(Item)) {
        for group in &self.groups {
            let mut shared = Shared::default();
            group.walk(self.num_objects, |_, row| see(row.item(&group.inline, &mut shared)));
        }
    }

    fn walk(&self, mut see: impl FnMut(usize, &Row<'_>)) {
        self.groups.iter().for_each(|group| group.walk(self.num_objects, &mut see));
    }

    fn rows_of(&self, keys: &[Key<'_>]) -> Vec<Option<usize>> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_unstable_by_key(|number| keys[*number]);
        let mut found = vec![None; keys.len()];
        let mut shared = Shared::default();
        let mut left = order.as_slice();
        for group in &self.groups {
            let count = left.partition_point(|number| keys[*number] <= borrowed(&group.last));
            let here;
            (here, left) = left.split_at(count);
            if here.is_empty() {
                continue;
            }
            let mut here = here.iter().copied().peekable();
            group.walk(self.num_objects, |row, stored| {
                while let Some(number) = here.next_if(|number| keys[*number] <= (stored.fqn, stored.offsets)) {
                    if keys[number].cmp(&(stored.fqn, stored.offsets)) == Ordering::Equal {
                        group.make(row, stored, &mut shared);
                        found[number] = Some(group.first_row + row);
                    }
                }
            });
        }
        found
    }
}

impl Group {
    fn slots(&self) -> &[OnceLock<Box<Item>>] {
        self.made.get_or_init(|| (0..self.num_rows).map(|_| OnceLock::new()).collect())
    }

    fn make(&self, row: usize, stored: &Row<'_>, shared: &mut Shared) {
        self.slots()[row].get_or_init(|| Box::new(stored.item(&self.inline, shared)));
    }

    /// Shows each row with its number in the group.
    fn walk(&self, num_objects: usize, mut see: impl FnMut(usize, &Row<'_>)) {
        let mut number = 0;
        let walked = walk(&self.columns, &self.digests, &self.inline, num_objects, |row| {
            see(number, row);
            number += 1;
            Ok(())
        });
        // The same bytes passed the same checks before.
        walked.expect("checked when it was added");
    }
}

/// Shows each row of a section.
fn walk(
    columns: &Bytes,
    digests: &[u8],
    inline: &Bytes,
    num_objects: usize,
    mut see: impl FnMut(&Row<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let group = ItemGroup::decode(&columns[..]).map_err(|error| format!("cannot be decoded: {error}"))?;
    if group.kind.len() > GROUP_ROWS {
        return Err(format!("a section has {} rows, at most {GROUP_ROWS} may be", group.kind.len()));
    }
    let mut rows = Rows::new(&group, digests, inline.len(), num_objects)?;
    while let Some(row) = rows.advance()? {
        see(&row)?;
    }
    Ok(())
}

fn borrowed((fqn, offsets): &(Vec<u8>, Option<Vec<u64>>)) -> Key<'_> {
    (fqn, offsets.as_deref())
}

/// `dims` in the memory of `before`.
fn replaced(before: Option<Vec<u64>>, dims: &[u64]) -> Vec<u64> {
    let mut kept = before.unwrap_or_default();
    kept.clear();
    kept.extend(dims);
    kept
}
