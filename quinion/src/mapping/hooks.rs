//! Hooks: steps of the index that a benchmark or a test takes over.
//!
//! ```text
//!   step                        hook                 simulates
//!   look up, for a grab         lookup_pages_max     a walk for each page
//!   take nodes, before a lock   nodes_taken_max      nodes that run out under the lock
//!   keep nodes, after it        nodes_kept_max       the same, each time
//!   insert a folio, under it    before_folio         more walks than one
//!   insert a run, under it      add_run              a hold of the lock for each folio
//! ```
//!
//! A benchmark runs the same cache without a mechanism to show its effect (an ablation). A test makes a shortage happen
//! each time. The alternatives are outside the library (`quinion_testing::ablations`).
//!
//! A hook has no lock of its own to take: it works through [`TreeWalks`] and [`RunInsertion`].
//!
//! Invariants:
//!  1. An index has one set of hooks, or none, from before its first folio until its end.
//!  2. Without hooks each step costs one test of a pointer. Hits take none of these steps.
//!  3. The tree after a hook is as the library's own step leaves it, or has a shorter prefix of that step.
//!
//! Not an invariant: that hooks stay as they are. No user has them.

use std::fmt::Debug;

use crate::backend::FillRun;
use crate::units::{Order, PageIndex};

use super::new_folio::{FolioShape, NewFolio, RunOutcome};

/// Steps of a mapping's index, of which an implementation replaces some.
pub trait IndexHooks: Debug + Send + Sync {
    /// The most pages that a grab finds by one walk down the tree.
    fn lookup_pages_max(&self) -> u64 {
        u64::MAX
    }

    /// The most nodes that an insertion takes from the arena each time before it takes the lock.
    fn nodes_taken_max(&self) -> u32 {
        u32::MAX
    }

    /// The most spare nodes that an insertion leaves for the next one. The library has a limit of its own, too.
    fn nodes_kept_max(&self) -> u32 {
        u32::MAX
    }

    /// A folio is inserted alone next, under this hold of the lock.
    fn before_folio(&self, _tree: &dyn TreeWalks, _folio: NewFolio) {}

    /// Inserts a prefix of a run.
    fn add_run(&self, insertion: &mut dyn RunInsertion, run: FillRun) -> RunOutcome {
        insertion.add_run(run)
    }
}

/// The tree, under its lock. Each call walks down from the root, and is counted.
pub trait TreeWalks {
    /// Whether a folio stands on one of `pages` pages from `first` on.
    fn has_folio(&self, first: PageIndex, pages: u64) -> bool;

    /// The order of the entry at `index`, if there is one.
    fn order_at(&self, index: PageIndex) -> Option<Order>;
}

/// An insertion of runs, with the hold of the lock that was taken for it, and nodes for all of it.
pub trait RunInsertion {
    /// The shape of the folios that the runs become.
    fn shape(&self) -> FolioShape;

    /// The tree, if the lock is held: it is let go where nodes run out for good.
    fn tree(&self) -> Option<&dyn TreeWalks>;

    /// Lets the lock go and takes it again, with nodes for `run`.
    fn relock(&mut self, run: FillRun);

    /// Inserts one folio with the nodes there are. False, and nothing has happened, if it cannot go in so.
    fn add_folio(&mut self, folio: NewFolio) -> bool;

    /// Inserts a prefix of a run, the library's way.
    fn add_run(&mut self, run: FillRun) -> RunOutcome;
}
