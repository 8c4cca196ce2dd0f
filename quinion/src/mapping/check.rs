//! Check: the invariants of a mapping, compared with the tree, the descriptors and the rings.
//!
//! Property tests call it after every step. It walks the whole tree under its lock, and takes the lists' lock under it.

use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{INDICES_MAX, Kind};

use super::owner::Mapping;

impl Mapping {
    /// Whether every invariant holds; the first that does not, in words. Takes the tree lock.
    pub fn check(&self) -> Result<(), String> {
        let guard = self.lock();
        let nodes = self.nodes();
        let tree = guard.xarray(&nodes);
        tree.check().map_err(|what| format!("{:?}: {what}", self.id()))?;
        let (mut from, mut pages, mut unlisted, mut spilled) = (0, 0, 0, 0);
        let listed = self.lists().map(|lists| lists.lock());
        while let Some((first, entry, order)) = tree.next(from, INDICES_MAX - 1) {
            if let Kind::Folio(frame) = entry.kind() {
                unlisted += u64::from(listed.as_ref().is_some_and(|listed| !listed.holds(Frame(frame))));
                let descriptor = self.view().descriptor(Frame(frame)).ok_or("a folio has no frame")?;
                if let Some(places) = self.backing().places()
                    && places.place(PageIndex(first)) != Some(Frame(frame))
                {
                    return Err(format!("{:?}, page {first}: {frame} is not its place", self.id()));
                }
                descriptor
                    .check_folio(Frame(frame), self.id(), PageIndex(first))
                    .map_err(|what| format!("{:?}, page {first}: {what}", self.id()))?;
                let backed = guard.check_backing(first, Frame(frame), Order(order));
                backed.map_err(|what| format!("{:?}, {what}", self.id()))?;
                pages += 1u64 << order;
            }
            if matches!(entry.kind(), Kind::Value(value) if value.is_spill()) {
                spilled += 1u64 << order;
            }
            from = first + (1 << order);
        }
        if pages != guard.tree.pages {
            return Err(format!("{:?} counts {} pages and has {pages}", self.id(), guard.tree.pages));
        }
        let counted = self.backing().spilled_pages();
        if spilled != counted {
            return Err(format!("{:?} counts {counted} spilled pages and has {spilled}", self.id()));
        }
        guard.check_dirty().map_err(|what| format!("{:?}: {what}", self.id()))?;
        let reserved = listed.map_or(0, |listed| listed.reserved());
        if unlisted > reserved {
            let id = self.id();
            return Err(format!(
                "{id:?}: {unlisted} folios stand in no ring, and {reserved} are on their way"
            ));
        }
        let (found, listed) = (tree.shadow_only_nodes(), self.index().shadow_nodes().all_of(self.id()));
        if found != listed {
            return Err(format!("{:?}: nodes {found:?} hold shadows only, {listed:?} are listed", self.id()));
        }
        self.index().shadow_nodes().check()
    }
}
