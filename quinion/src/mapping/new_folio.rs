//! New folio: a request to insert into an index, and its outcome.
//!
//! ```text
//!   run of frames   [------------- 13 pages -------------]        index and frame of its first page
//!   folios          [0] [- 1 -] [----- 2 -----] ...               each the largest that its place allows
//!   outcome         |<---- pages: inserted ---->|<-- the caller's, as it was -->|   and why it ended there
//! ```
//!
//! Plain values; `insert.rs` has the ways in.

use crate::arena::{DescriptorWord, Flags, referenced};
use crate::backend::FillRun;
use crate::units::{Frame, Order, Orders, PageIndex};
use crate::xarray::{RangeStop, Value};

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum InsertPurpose {
    /// The pages are read: the shadows that they replace are reported.
    #[default]
    Read,
    /// The pages are overwritten: the shadows are removed and not reported.
    Write,
}

/// A folio that is to be inserted: a run of frames that the caller owns alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewFolio {
    /// First page of the folio; a multiple of its length.
    pub index: PageIndex,
    /// First frame of the folio; a multiple of its length.
    pub frame: Frame,
    /// log2 of its length in pages, 0 to 9.
    pub order: Order,
}

/// The outcome of inserting one folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddedFolio {
    /// The folio is in the tree: locked, not up to date, with its fill's hold.
    Added {
        /// The shadow it took the place of, that at its highest index; none for a [`InsertPurpose::Write`].
        shadow: Option<Value>,
    },
    /// A folio or a spill covers some of its pages. The tree is unchanged.
    Present,
    /// No node could be had. The tree is unchanged, but a shadow may be in smaller pieces.
    NoNode,
}

/// How a run of frames becomes folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolioShape {
    /// Each folio is the largest of these that index, frame and rest of the run allow.
    pub orders: Orders,
    /// The folio that covers this page carries the readahead marker.
    pub marker: Option<PageIndex>,
    pub purpose: InsertPurpose,
    /// The pages that were asked for; the rest are fetched ahead.
    pub wanted: AskedFor,
    /// How long they stay.
    pub fate: FolioLifetime,
}

/// How long a folio stays.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum FolioLifetime {
    /// Until it is evicted.
    #[default]
    Stays,
    /// Until the uncached reader it was made for has passed, unless another reader or writer uses it first.
    DropsBehind,
}

impl FolioLifetime {
    /// The lifetime of the folio whose descriptor has this word.
    #[inline]
    pub(super) fn of(word: DescriptorWord) -> Self {
        if word.has(Flags::DROPBEHIND) { Self::DropsBehind } else { Self::Stays }
    }
}

/// Which of the inserted pages a caller asked for. A folio with one such page counts as asked for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum AskedFor {
    #[default]
    All,
    /// The pages within a range, which may be empty.
    Only {
        from: PageIndex,
        /// The first page after it.
        end: PageIndex,
    },
}

impl AskedFor {
    /// The referenced byte's first value, of a folio of `pages` pages from `index` on.
    #[inline]
    pub(super) fn first_byte(self, index: PageIndex, pages: u32) -> u8 {
        if self.overlaps(index, pages) { referenced::ASKED } else { referenced::AHEAD }
    }

    /// Whether any of `pages` pages from `index` on was asked for.
    #[inline]
    pub fn overlaps(self, index: PageIndex, pages: u32) -> bool {
        match self {
            AskedFor::All => true,
            AskedFor::Only { from, end } => overlaps(index, pages, from, end),
        }
    }
}

/// Whether a folio of `pages` pages from `index` on has a page in `from..end`; an empty range has none.
#[inline]
fn overlaps(index: PageIndex, pages: u32, from: PageIndex, end: PageIndex) -> bool {
    from.max(index) < end.min(index.plus(u64::from(pages)))
}

impl FolioShape {
    /// Folios for readers, without a marker.
    pub const fn of(orders: Orders) -> Self {
        Self {
            orders,
            marker: None,
            purpose: InsertPurpose::Read,
            wanted: AskedFor::All,
            fate: FolioLifetime::Stays,
        }
    }
}

/// The outcome of inserting a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunOutcome {
    /// Pages inserted, from the start of the run on. The frames of the rest are the caller's.
    pub pages: u32,
    /// Why it ended there.
    pub stop: RangeStop,
}

/// The outcome of inserting the runs of a window.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddedRuns {
    /// Runs inserted, in rising order: locked folios.
    pub inserted: Vec<FillRun>,
    /// Runs not inserted: the caller's frames.
    pub left: Vec<FillRun>,
    /// The last reason for which something was left; [`RangeStop::NoNode`] if nodes could not be had for good.
    pub stop: RangeStop,
}

/// Called under the tree lock, with a folio that replaced shadows, and the value at its highest index.
pub type ShadowObserver<'c> = &'c mut dyn FnMut(Frame, Value);

impl NewFolio {
    /// # Panics
    /// If it is too large, or not aligned.
    pub(super) fn assert_fits(self) {
        let Self { index, frame, order } = self;
        assert!(order <= Order::MAX, "{order:?} was asked for; a folio is of {:?} at most", Order::MAX);
        let aligned = index.is_aligned(order) && frame.0 & (order.pages() - 1) == 0;
        assert!(aligned, "a folio of {order:?} cannot stand at {index:?} in {frame:?}: align them");
    }
}

/// The folios a run is made of: each the largest that index, frame, rest and `orders` allow.
pub fn folios_of(run: FillRun, orders: Orders) -> impl Iterator<Item = (Frame, Order)> {
    let mut page = 0;
    std::iter::from_fn(move || {
        let rest = run.pages - page;
        let (at, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
        let aligned = (at.0 | u64::from(frame.0)).trailing_zeros() as u8;
        let order = Order(aligned.min(orders.max.0).min(Order::fitting(rest.max(1)).0));
        page += order.pages();
        (rest > 0).then_some((frame, order))
    })
}

/// The first `pages` pages of a run, and the rest.
pub fn cut(run: FillRun, pages: u32) -> (FillRun, FillRun) {
    let behind = FillRun {
        index: run.index.plus(u64::from(pages)),
        frame: run.frame.plus(pages),
        pages: run.pages - pages,
    };
    (FillRun { pages, ..run }, behind)
}
