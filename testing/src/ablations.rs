//! Ablations: the index without one of its mechanisms, and with nodes that run out.
//!
//! | hooks | instead of |
//! |---|---|
//! | [`OneByOne`] | one hold of the tree's lock for a whole window, or for all that a grab inserts |
//! | the same, [`Lookups::Alone`] | one walk for all pages of a leaf that a grab looks up |
//! | [`ThreeWalks`] | one walk for the conflict check, the shadow's order, its split and the store |
//! | [`NodesAtMost`] | all the nodes that an insertion can need, taken before its lock |
//!
//! The benchmark compares the cache with these; the tests of the library show that each leaves the same tree as the
//! mechanism that it replaces, and make shortages of nodes with the last.
//!
//! Invariant: an ablation differs from the library in cost alone. A reader sees the same.

use quinion::backend::FillRun;
use quinion::internals::hooks::with_index_hooks;
use quinion::internals::mapping::{
    IndexHooks, InsertPurpose, NewFolio, RunInsertion, RunOutcome, TreeWalks, cut, folios_of,
};
use quinion::internals::units::PageIndex;
use quinion::internals::xarray::RangeStop;
use quinion::{Builder, Cache};

/// A builder of caches with these hooks, if there are any.
pub fn builder(hooks: Option<&'static dyn IndexHooks>) -> Builder {
    match hooks {
        None => Cache::builder(),
        Some(hooks) => with_index_hooks(Cache::builder(), hooks),
    }
}

/// Whether a grab looks up the pages of its range together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lookups {
    SideBySide,
    /// A walk from the root for each page.
    Alone,
}

/// Each folio of a run is inserted under a hold of the tree's lock of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneByOne {
    /// The runs that it is about: those of windows are for [`InsertPurpose::Read`], those of grabs for
    /// [`InsertPurpose::Write`].
    pub inserted_for: InsertPurpose,
    pub lookups: Lookups,
}

impl OneByOne {
    /// Hooks that insert the folios of windows one by one.
    pub const WINDOWS: Option<&'static dyn IndexHooks> =
        Some(&Self { inserted_for: InsertPurpose::Read, lookups: Lookups::SideBySide });
    /// For grabs, whose lookups stay the library's.
    pub const GRABS: Option<&'static dyn IndexHooks> =
        Some(&Self { inserted_for: InsertPurpose::Write, lookups: Lookups::SideBySide });
    /// For grabs, which look up each page by itself, too.
    pub const GRABS_AND_LOOKUPS: Option<&'static dyn IndexHooks> =
        Some(&Self { inserted_for: InsertPurpose::Write, lookups: Lookups::Alone });
}

impl IndexHooks for OneByOne {
    fn lookup_pages_max(&self) -> u64 {
        match self.lookups {
            Lookups::SideBySide => u64::MAX,
            Lookups::Alone => 1,
        }
    }

    fn add_run(&self, insertion: &mut dyn RunInsertion, run: FillRun) -> RunOutcome {
        let shape = insertion.shape();
        if shape.purpose != self.inserted_for {
            return insertion.add_run(run);
        }
        let (mut done, mut rest) = (0, run);
        for (frame, order) in folios_of(run, shape.orders) {
            let (one, behind) = cut(rest, order.pages());
            insertion.relock(one);
            if !insertion.add_folio(NewFolio { index: one.index, frame, order }) {
                // Rare: the library takes more nodes, and finds what is in the way.
                let added = insertion.add_run(one);
                if added.stop != RangeStop::All {
                    return RunOutcome { pages: done, stop: added.stop };
                }
            }
            (done, rest) = (done + one.pages, behind);
        }
        RunOutcome { pages: done, stop: RangeStop::All }
    }
}

/// A folio that is inserted alone costs three walks, split or not: the conflict check, the order of what is there, the
/// store. Batches walk once, as in the library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreeWalks;

impl ThreeWalks {
    pub const HOOKS: Option<&'static dyn IndexHooks> = Some(&Self);
}

impl IndexHooks for ThreeWalks {
    fn before_folio(&self, tree: &dyn TreeWalks, folio: NewFolio) {
        walk_twice(tree, folio.index, u64::from(folio.order.pages()));
    }

    fn add_run(&self, insertion: &mut dyn RunInsertion, run: FillRun) -> RunOutcome {
        if let Some(tree) = insertion.tree()
            && run.pages == insertion.shape().orders.min.pages()
        {
            walk_twice(tree, run.index, u64::from(run.pages));
        }
        insertion.add_run(run)
    }
}

/// The first two walks: whether a folio is in the way, and the order of what is there. The third finds out both again.
fn walk_twice(tree: &dyn TreeWalks, first: PageIndex, pages: u64) {
    if !tree.has_folio(first, pages) {
        std::hint::black_box(tree.order_at(first));
    }
}

/// An insertion takes this many nodes at most before its lock, and leaves none for the next one: so it runs out under
/// the lock, releases it and tries again. With 0, no node can ever be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodesAtMost(pub u32);

impl NodesAtMost {
    /// Hooks that are never freed, as hooks must be.
    pub fn hooks(nodes: u32) -> Option<&'static dyn IndexHooks> {
        Some(Box::leak(Box::new(Self(nodes))))
    }
}

impl IndexHooks for NodesAtMost {
    fn nodes_taken_max(&self) -> u32 {
        self.0
    }
    fn nodes_kept_max(&self) -> u32 {
        0
    }
}
