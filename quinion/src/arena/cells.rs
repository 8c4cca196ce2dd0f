//! Cells: which 256-byte cells are free, in the extents that are cut into them.
//!
//! ```text
//!   an extent of cells       used | never used            free list (heap, one an extent)
//!   +---+---+---+---+---+---+---+---+---+- - -            free   2 -> 0
//!   | 0 | U | 2 | U | U | .   .   .   .                   fresh  5
//!   +-|-+---+-|-+---+---+---+---+---+---+- - -            used   3
//!     ^-------+ the link lies in the cell's first word
//! ```
//!
//! A reader that still walks a freed node may read the link in its first word as an entry: whatever a walk finds is a
//! hint that the descriptor it names confirms or does not. Cells that were never used since their extent was cut need
//! no link, so cutting an extent touches none of its memory.
//!
//! The list is kept for each extent, not for all, and cells are taken from the lowest extent that has one. So the
//! highest extents run empty, and an empty extent is given back by forgetting its list.
//!
//! Invariants (asserted by [`Cells::check`]):
//!  1. In each extent: used + free + never used = 6144.
//!  2. A cell is in at most one list, that of its extent.
//!  3. An extent has a place among `with_free` exactly while a cell of it can be taken.
//!
//! Not an invariant: the bytes of a free cell beyond its link, or any byte of a fresh one. A user of a cell makes it
//! empty first.
//!
//! Locks: the caller's. Cost: a few steps a cell; one search among the extents of cells, of which there are few.
#![deny(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use crate::units::{EXTENT_PAGES, Frame};
use quinion_view::arena::{CELLS_PER_PAGE, CellNumber};

pub const CELLS_PER_EXTENT: u32 = CELLS_PER_PAGE * EXTENT_PAGES;
/// The first extent that holds no cells, because a slot of the index cannot number them: that at 256 GiB.
pub const CELL_EXTENTS_MAX: u32 = (1 << 26) / EXTENT_PAGES;

const NIL: u32 = 0;

pub trait CellLinks {
    /// The first word of a free cell, as it was last set.
    fn link(&self, cell: CellNumber) -> u32;
    fn set_link(&self, cell: CellNumber, to: u32);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CellFreed {
    Kept,
    /// The cell was the last used one of this extent.
    ExtentEmpty(u32),
}

#[derive(Debug)]
struct ExtentCells {
    /// [`NIL`] for none.
    free: u32,
    /// The first cell that was never used, counted from 0 in this extent.
    fresh: u32,
    used: u32,
}

#[derive(Debug, Default)]
pub struct Cells {
    extents_of_cells: BTreeMap<u32, ExtentCells>,
    with_free: BTreeSet<u32>,
    used: u64,
}

impl Cells {
    pub const fn new() -> Self {
        Self { extents_of_cells: BTreeMap::new(), with_free: BTreeSet::new(), used: 0 }
    }

    pub fn extents(&self) -> u32 {
        self.extents_of_cells.len() as u32
    }
    pub fn used(&self) -> u64 {
        self.used
    }
    pub fn has_extent(&self, extent: u32) -> bool {
        self.extents_of_cells.contains_key(&extent)
    }

    /// Cuts `extent`, whose memory is not in use, into cells.
    ///
    /// # Panics
    /// If it is cut already or lies beyond [`CELL_EXTENTS_MAX`].
    pub fn add_extent(&mut self, extent: u32) {
        assert!(extent < CELL_EXTENTS_MAX, "extent {extent} is too high for cells");
        let before = self.extents_of_cells.insert(extent, ExtentCells { free: NIL, fresh: 0, used: 0 });
        assert!(before.is_none(), "extent {extent} is cut twice");
        self.with_free.insert(extent);
    }

    /// Takes an extent back out of which no cell is used.
    ///
    /// # Panics
    /// If one is.
    pub fn remove_extent(&mut self, extent: u32) {
        let cells = self.extents_of_cells.remove(&extent).expect("the extent holds cells");
        assert_eq!(cells.used, 0, "extent {extent} is in use");
        self.with_free.remove(&extent);
    }

    /// Allocates a cell of the lowest extent that has one. Its content is arbitrary.
    #[cfg(test)]
    pub fn alloc(&mut self, links: &impl CellLinks) -> Option<CellNumber> {
        let mut one = Vec::new();
        self.alloc_some(links, 1, &mut one);
        one.pop()
    }

    /// Takes cells of the lowest extent that has some, until `cells` has `len` of them or this extent has no more; how
    /// many were taken. Their content is arbitrary.
    pub fn alloc_some(&mut self, links: &impl CellLinks, len: usize, cells: &mut Vec<CellNumber>) -> usize {
        let Some(&extent) = self.with_free.first() else { return 0 };
        let of_extent = self.extents_of_cells.get_mut(&extent).expect("an extent with room is cut");
        let before = cells.len();
        while cells.len() < len && of_extent.has_free() {
            cells.push(of_extent.take(extent, links));
        }
        if !of_extent.has_free() {
            self.with_free.remove(&extent);
        }
        let taken = cells.len() - before;
        self.used += taken as u64;
        taken
    }

    /// Gives a cell back.
    ///
    /// # Panics
    /// If its extent is not one of cells, or has no cell out.
    pub fn free(&mut self, links: &impl CellLinks, cell: CellNumber) -> CellFreed {
        let extent = cell.frame().extent();
        let cells = self.extents_of_cells.get_mut(&extent).expect("a cell lies in an extent of cells");
        assert!(cells.used > 0 && ordinal(cell) < cells.fresh, "{cell:?} was not handed out");
        links.set_link(cell, cells.free);
        let had_none = !cells.has_free();
        cells.free = cell.0;
        cells.used -= 1;
        let empty = cells.used == 0;
        self.used -= 1;
        if had_none {
            self.with_free.insert(extent);
        }
        if empty { CellFreed::ExtentEmpty(extent) } else { CellFreed::Kept }
    }

    /// Checks the lists. Cost: a step and a bit for each free cell.
    pub fn check(&self, links: &impl CellLinks) -> Result<(), String> {
        for (&extent, cells) in &self.extents_of_cells {
            cells.check(extent, links)?;
            if self.with_free.contains(&extent) != cells.has_free() {
                return Err(format!("extent {extent} is listed wrongly as one with room"));
            }
        }
        let used: u64 = self.extents_of_cells.values().map(|cells| u64::from(cells.used)).sum();
        if used != self.used {
            return Err(format!("{used} cells are used, {} counted", self.used));
        }
        if self.with_free.iter().any(|extent| !self.has_extent(*extent)) {
            return Err("an extent that is not cut is listed as one with room".into());
        }
        Ok(())
    }
}

impl ExtentCells {
    fn has_free(&self) -> bool {
        self.free != NIL || self.fresh < CELLS_PER_EXTENT
    }

    fn take(&mut self, extent: u32, links: &impl CellLinks) -> CellNumber {
        self.used += 1;
        if self.free != NIL {
            let cell = CellNumber(self.free);
            self.free = links.link(cell);
            return cell;
        }
        self.fresh += 1;
        cell_at(extent, self.fresh - 1)
    }

    fn check(&self, extent: u32, links: &impl CellLinks) -> Result<(), String> {
        let mut seen = vec![false; CELLS_PER_EXTENT as usize];
        let (mut at, mut free) = (self.free, 0);
        while at != NIL {
            let cell = CellNumber(at);
            if at % 16 < 4 || cell.frame().extent() != extent || ordinal(cell) >= self.fresh {
                return Err(format!("the free cells of extent {extent} lead to {cell:?}"));
            }
            if std::mem::replace(&mut seen[ordinal(cell) as usize], true) {
                return Err(format!("{cell:?} is free twice"));
            }
            (at, free) = (links.link(cell), free + 1);
        }
        if self.used + free == self.fresh {
            Ok(())
        } else {
            Err(format!("extent {extent}: {} used and {free} free of {} cells", self.used, self.fresh))
        }
    }
}

fn ordinal(cell: CellNumber) -> u32 {
    cell.frame().0 % EXTENT_PAGES * CELLS_PER_PAGE + cell.place()
}

fn cell_at(extent: u32, ordinal: u32) -> CellNumber {
    let frame = Frame(extent * EXTENT_PAGES + ordinal / CELLS_PER_PAGE);
    CellNumber::of(frame, ordinal % CELLS_PER_PAGE).expect("`add_extent` refused higher frames")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::collections::{HashMap, HashSet};

    #[derive(Default)]
    struct Words(RefCell<HashMap<u32, u32>>);
    impl CellLinks for Words {
        fn link(&self, cell: CellNumber) -> u32 {
            self.0.borrow()[&cell.0]
        }
        fn set_link(&self, cell: CellNumber, to: u32) {
            self.0.borrow_mut().insert(cell.0, to);
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Alloc(u32),
        Free(usize, u32),
        AddExtent(u32),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let many = prop_oneof![3 => 1..20u32, 1 => 3000..9000u32];
        let op = prop_oneof![
            3 => many.clone().prop_map(Op::Alloc),
            3 => (any::<usize>(), many).prop_map(|(from, many)| Op::Free(from, many)),
            1 => (1..5u32).prop_map(Op::AddExtent),
        ];
        prop::collection::vec(op, 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// The twin: the set of the cells that are out, and the set of extents.
        #[test]
        fn agrees_with_a_set(ops in ops()) {
            let (mut cells, words) = (Cells::new(), Words::default());
            let (mut out, mut extents) = (Vec::<CellNumber>::new(), HashSet::new());
            for op in ops {
                match op {
                    Op::Alloc(many) => for _ in 0..many {
                        let room = out.len() < extents.len() * CELLS_PER_EXTENT as usize;
                        let got = cells.alloc(&words);
                        prop_assert_eq!(got.is_some(), room);
                        out.extend(got);
                    },
                    Op::Free(from, many) => for _ in 0..many {
                        if out.is_empty() {
                            break;
                        }
                        let cell = out.swap_remove(from % out.len());
                        let extent = cell.frame().extent();
                        let last = out.iter().all(|cell| cell.frame().extent() != extent);
                        let freed = cells.free(&words, cell);
                        prop_assert_eq!(freed == CellFreed::ExtentEmpty(extent), last);
                        if last {
                            cells.remove_extent(extent);
                            extents.remove(&extent);
                        }
                        if out.len() > 200 && from % 3 > 0 {
                            break; // the search above is the twin's price
                        }
                    },
                    Op::AddExtent(extent) => if extents.insert(extent) {
                        cells.add_extent(extent);
                    },
                }
                prop_assert_eq!(cells.check(&words), Ok(()));
                prop_assert_eq!(cells.used(), out.len() as u64);
                prop_assert_eq!(cells.extents() as usize, extents.len());
                let distinct: HashSet<_> = out.iter().copied().collect();
                prop_assert_eq!(distinct.len(), out.len());
                prop_assert!(out.iter().all(|cell| extents.contains(&cell.frame().extent())));
            }
        }
    }

    #[test]
    fn an_extent_gives_each_of_its_cells_once_and_none_at_the_start_of_a_page() {
        let (mut cells, words) = (Cells::new(), Words::default());
        cells.add_extent(3);
        let all: HashSet<u32> = std::iter::from_fn(|| cells.alloc(&words)).map(|cell| cell.0).collect();
        assert_eq!(all.len(), CELLS_PER_EXTENT as usize);
        assert!(all.iter().all(|cell| cell % 16 >= 4 && cell / 16 / EXTENT_PAGES == 3));
    }

    #[test]
    fn check_sees_a_cell_that_was_freed_twice() {
        let (mut cells, words) = (Cells::new(), Words::default());
        cells.add_extent(1);
        let _other = cells.alloc(&words).unwrap();
        let cell = cells.alloc(&words).unwrap();
        cells.free(&words, cell);
        cells.check(&words).unwrap();
        cells.free(&words, cell);
        assert!(cells.check(&words).is_err());
    }

    #[test]
    #[should_panic(expected = "not handed out")]
    fn a_cell_that_was_never_out_is_not_taken_back() {
        let (mut cells, words) = (Cells::new(), Words::default());
        cells.add_extent(1);
        cells.alloc(&words).unwrap();
        cells.free(&words, cell_at(1, 5));
    }
}
