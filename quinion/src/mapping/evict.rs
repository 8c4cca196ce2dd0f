//! Evict: how folios leave a mapping: by eviction, by a failed fill, or all at once.
//!
//! ```text
//!   evict           retire if nothing holds it --> a shadow in its place --> off its ring --> its frames to the
//!                   caller, who frees them
//!   remove_failed   erase --> off its ring, retire --> freed when the fill gives its hold back
//!   remove_all      erase --> off its ring, retire --> the frames of folios that nothing holds are freed at once, the
//!                   others at their last put
//! ```
//!
//! A descriptor is retired under the same hold of the tree lock under which its entry leaves the tree; a reader that
//! finds one without the other looks at the descriptor, which alone decides.
//!
//! The last holder of a folio that is retired may free its frames at once. So the folio is taken off its ring first,
//! under one hold of the lists' lock, so that no other thread lists it in between.
//!
//! Locks: the tree lock, by its guard; under it the lists' lock, and the arena's lock to give frames back.

use std::sync::atomic::Ordering;

use crate::arena::{DescriptorWord, Flags, RetireOutcome, referenced};
use crate::backend::FillRun;
use crate::mapping::AgeLimit;
use crate::stats::Count;
use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{Entry, ForgetOutcome, INDICES_MAX, Kind, Revision, Value};

use super::owner::{Mapping, MappingGuard};

/// Folios given back to the arena at a time.
const FREE_BATCH: usize = 256;

/// The entry that an eviction leaves in the folio's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replacement {
    /// No entry: the folio's nodes go with it, if they hold nothing else.
    Nothing,
    /// One shadow of the folio's order, with this payload of 25 bits. It needs no node that is not there.
    Shadow(u32),
}

impl Mapping {
    /// Pages of a folio retired under the tree lock, if no reader has used it and it lacks `DROPBEHIND`; else 0.
    pub(super) fn take_unread(&self, frame: Frame, order: Order) -> u64 {
        let byte = self.view().referenced(frame).expect("a frame of ours");
        if !referenced::is_unread(byte.load(Ordering::Relaxed)) {
            return 0;
        }
        byte.store(0, Ordering::Relaxed);
        // Folios of uncached reads begin with this byte, read or not.
        let behind = self.view().own(frame).word().has(Flags::DROPBEHIND);
        if behind { 0 } else { u64::from(order.pages()) }
    }

    /// Takes folios that were retired off their rings. They had no holders, and their frames are the caller's.
    pub(super) fn unlist(&self, folios: &[(Frame, Order)]) {
        if let Some(lists) = self.lists().filter(|_| !folios.is_empty()) {
            let mut listed = lists.lock();
            folios.iter().for_each(|&(frame, _)| listed.remove(frame));
        }
    }

    /// Takes folios off their rings and retires them, held or not, and reports each to `retired`. Returns the pages of
    /// those that had never been read. They are out of the tree, whose lock the caller holds.
    pub(super) fn retire_all(
        &self,
        folios: &[(Frame, Order)],
        mut retired: impl FnMut(Frame, Order, RetireOutcome),
    ) -> u64 {
        let mut listed = self.lists().filter(|_| !folios.is_empty()).map(|lists| lists.lock());
        let mut unread = 0;
        for &(frame, order) in folios {
            if let Some(listed) = &mut listed {
                listed.remove(frame);
            }
            // Before the next step, after which another holder may free the frames.
            unread += self.take_unread(frame, order);
            self.forget_leaving(frame, order);
            retired(frame, order, self.view().own(frame).retire());
        }
        unread
    }

    /// As [`Mapping::retire_all`]; frees those without holders, and empties the list of them.
    fn retire_and_free(&self, folios: &mut Vec<(Frame, Order)>) -> u64 {
        let mut free = Vec::with_capacity(folios.len());
        let unread = self.retire_all(folios, |frame, order, retired| match retired {
            RetireOutcome::Free => free.push((frame, order)),
            RetireOutcome::Held => {}
        });
        self.arena().free_all(&free);
        folios.clear();
        unread
    }
}

impl MappingGuard<'_> {
    /// Takes the folio that `frame` heads out if it stands at `index`, is ready and has no holders. Returns its order
    /// then; its frames are the caller's to free. `leave` decides, by the folio's last word, what replaces it; a
    /// mapping that the cache has let go leaves nothing.
    pub fn evict(
        &mut self,
        index: PageIndex,
        frame: Frame,
        leave: impl FnOnce(DescriptorWord) -> Replacement,
    ) -> Option<Order> {
        let (mut leave, mut evicted) = (Some(leave), Vec::with_capacity(1));
        let leave = |_, word| leave.take().map_or(Replacement::Nothing, |leave| leave(word));
        self.evict_all(&[(index, frame)], leave, &mut evicted);
        evicted.first().map(|&(_, order)| order)
    }

    /// As [`MappingGuard::evict`], of `folios`, which stand in the rising order of their indices; adds those that went
    /// to `evicted`. `leave` is told the place of each among them besides. One way down for each leaf.
    pub fn evict_all(
        &mut self,
        folios: &[(PageIndex, Frame)],
        mut leave: impl FnMut(usize, DescriptorWord) -> Replacement,
        evicted: &mut Vec<(Frame, Order)>,
    ) {
        let (mapping, first) = (self.mapping, evicted.len());
        if mapping.backing().places().is_some() {
            return; // others map these pages
        }
        let nodes = mapping.nodes();
        let (mut tree, remembers) = (self.xarray(&nodes), self.tree.remembers);
        tree.revise(folios.iter().map(|(index, _)| index.0), |nth, found| {
            let (_, frame) = folios[nth];
            if found != Entry::folio(frame.0) {
                return Revision::Keep;
            }
            let descriptor = nodes.grown.own_descriptor(frame);
            let Some(order) = descriptor.try_retire() else { return Revision::Keep };
            evicted.push((frame, order));
            // A folio that only uncached reads wanted leaves no shadow.
            let word = descriptor.word();
            let remembers = remembers && !word.has(Flags::DROPBEHIND);
            match if remembers { leave(nth, word) } else { Replacement::Nothing } {
                Replacement::Nothing => Revision::Erase,
                Replacement::Shadow(payload) => Revision::Replace(Value::shadow(order.0, payload)),
            }
        });
        let evicted = &evicted[first..];
        mapping.unlist(evicted);
        let unread: u64 = evicted.iter().map(|&(frame, order)| mapping.take_unread(frame, order)).sum();
        mapping.count(Count::ReadaheadWasted, unread);
        self.tree.pages -= evicted.iter().map(|(_, order)| u64::from(order.pages())).sum::<u64>();
    }

    /// Forgets nodes of this tree that only remember, as long as the next one is within `reach` of the
    /// cache's oldest, at most `max` of them. Returns how many.
    pub fn forget_nodes(&mut self, max: u64, reach: AgeLimit) -> u64 {
        let nodes = self.mapping.nodes();
        let mut forgotten = 0;
        while forgotten < max
            && let Some(node) = self.mapping.index().shadow_nodes().oldest_of(self.mapping.id(), reach)
        {
            let done = self.xarray(&nodes).forget(node);
            assert_ne!(done, ForgetOutcome::Kept, "a node that is listed holds shadows only");
            forgotten += 1;
        }
        forgotten
    }

    /// Takes every shadow out, and has evictions leave none from now on: the cache lets the mapping go.
    pub fn forget_all(&mut self) {
        self.tree.remembers = false;
        let nodes = self.mapping.nodes();
        let (mut tree, mut from) = (self.xarray(&nodes), 0);
        while let Some((first, entry, order)) = tree.next(from, INDICES_MAX - 1) {
            if matches!(entry.kind(), Kind::Value(value) if !value.is_spill()) {
                tree.erase(first);
            }
            from = first + (1 << order);
        }
    }

    /// Takes out the folios that begin in `from..to`, end by `end`, are ready and have no holders, and the shadows
    /// there that reach over neither edge. Frees the frames and returns how many pages went. Keep the range short.
    pub fn drop_range(&mut self, from: PageIndex, to: PageIndex, end: PageIndex) -> u64 {
        let (mut folios, mut evicted) = (Vec::new(), Vec::new());
        for (first, entry, _) in self.inside(from, to, end) {
            match entry.kind() {
                Kind::Folio(frame) => folios.push((first, Frame(frame))),
                Kind::Value(value) if !value.is_spill() => self.forget_shadow(first),
                _ => {}
            }
        }
        self.evict_all(&folios, |_, _| Replacement::Nothing, &mut evicted);
        self.mapping.arena().free_all(&evicted);
        evicted.iter().map(|(_, order)| u64::from(order.pages())).sum()
    }

    fn forget_shadow(&mut self, index: PageIndex) {
        let nodes = self.mapping.nodes();
        self.xarray(&nodes).erase(index.0);
    }

    /// Takes out the folios of a fill that `came`, told where each lies in the run and its order, says did not come as
    /// a whole. The fill holds them until it ends. Returns the pages that went.
    pub fn remove_failed(&mut self, run: FillRun, came: impl Fn(u32, Order) -> bool) -> u64 {
        let nodes = self.mapping.nodes();
        let mut tree = self.xarray(&nodes);
        let (mut page, mut failed) = (0, Vec::new());
        while page < run.pages {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            let order = self.mapping.view().own(frame).word().order();
            let ours = !came(page, order) && tree.load(index.0) == Entry::folio(frame.0);
            if ours {
                tree.erase(index.0);
                self.tree.pages -= u64::from(order.pages());
                failed.push((frame, order));
            }
            page += order.pages();
        }
        let unread = self.mapping.retire_all(&failed, |_, _, retired| {
            debug_assert_eq!(retired, RetireOutcome::Held, "a fill holds its folios");
        });
        self.mapping.count(Count::ReadaheadWasted, unread);
        failed.iter().map(|(_, order)| u64::from(order.pages())).sum()
    }

    /// Takes every folio and value out, and frees folios without holders. Returns the pages of the folios.
    pub fn remove_all(&mut self) -> u64 {
        self.remove_all_but(&[])
    }

    /// As [`MappingGuard::remove_all`], but for `kept` folios: first pages and the pages behind (or inside), rising.
    pub(super) fn remove_all_but(&mut self, kept: &[(PageIndex, PageIndex)]) -> u64 {
        let nodes = self.mapping.nodes();
        let (mut folios, mut unread, mut pages) = (Vec::with_capacity(FREE_BATCH), 0, 0);
        let mut tree = self.xarray(&nodes);
        let (mut from, ends) = (0, kept.iter().map(|(first, _)| first.0).chain([INDICES_MAX]));
        for end in ends {
            tree.erase_range(from, end, |_, entry, order| {
                let frame = match entry.kind() {
                    Kind::Folio(frame) => frame,
                    Kind::Value(value) => return self.mapping.forget_value(value),
                    Kind::Empty | Kind::Node(_) => return,
                };
                folios.push((Frame(frame), Order(order)));
                pages += u64::from(Order(order).pages());
                if folios.len() == FREE_BATCH {
                    unread += self.mapping.retire_and_free(&mut folios);
                }
            });
            from = tree.next(end, INDICES_MAX - 1).map_or(end, |(first, _, order)| first + (1 << order));
        }
        unread += self.mapping.retire_and_free(&mut folios);
        self.mapping.count(Count::ReadaheadWasted, unread);
        self.tree.pages -= pages;
        pages
    }
}
