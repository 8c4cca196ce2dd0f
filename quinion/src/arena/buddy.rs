//! Buddy: which frames are free, as naturally aligned runs of 2^order.
//!
//! ```text
//!   frames   0   1   2   3   4   5   6   7          lists    order 0:  3
//!           [  used ] u [3] [------ 4 ------]                order 1:
//!                                                            order 2:  4
//!   free(2): 2 and 3 are buddies -> one run of order 1 at 2; its buddy 0 is used: stop
//! ```
//!
//! A free run is known by its first frame, the head, whose descriptor has the order and the links of the list of that
//! order: a free frame costs no memory of its own.
//!
//! **Recent frames.** A full cache of single pages frees one for each that it takes: to merge each with its buddies and
//! split it off again would be work for nothing. So single frames that come back by [`Buddy::free_page`] wait on a
//! small stack, unmerged, and the next request for one frame takes the newest. A request for more than a frame, and
//! any search for the free frames of a range, merges them first. Linux has the same in its per-CPU page lists.
//!
//! ```text
//!   free_page: 7, 40, 3     recent  [7 40 3|      no head, in no list, merged with nothing
//!   alloc(0): 3             recent  [7 40|
//!   alloc(2)                recent  [|            7 and 40 are freed as ever, then a run of order 2 is sought
//! ```
//!
//! Invariants (asserted by [`Buddy::check`]):
//!  1. A free run of order n starts at a frame divisible by 2^n.
//!  2. No two free runs overlap, and two buddies of one order below the top are never both free.
//!  3. A frame is marked as head exactly while it is in the list of its order.
//!  4. A recent frame is no head and lies in no free run, and counts as free.
//!
//! Not an invariant: the order of a list. It is kept loosely by address, so that high extents stay whole, and otherwise
//! the last freed is the first used, because its lines may still be in a cache.
//!
//! Locks: the caller's; nothing here is shared. Cost: at most ten steps a call, and no memory.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::units::{Frame, Order};

const NIL: u32 = u32::MAX;
/// In place of a link: the frame waits unmerged. No frame has this number, nor is it a place in a ring.
const WAITS: u32 = u32::MAX - 1;
/// Frames that wait unmerged, at most: as many as one reclaim frees.
const RECENT_MAX: usize = 256;
const ORDERS: usize = Order::MAX.0 as usize + 1;

pub trait FreeLinks {
    /// The next and the previous head in the list of `frame`'s order, as they were last set.
    fn links(&self, frame: Frame) -> [u32; 2];
    /// Sets the next (0) or the previous (1) head.
    fn set_link(&self, frame: Frame, which: usize, to: u32);
    /// The order of the free run that `frame` heads; `None` if it heads none.
    fn free_order(&self, frame: Frame) -> Option<Order>;
    fn set_free(&self, frame: Frame, order: Option<Order>);
}

const NEXT: usize = 0;
const PREVIOUS: usize = 1;

/// Frames that follow each other, for a caller that asked to use as one folio or as many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRun {
    /// The first frame, divisible by `pages`.
    pub frame: Frame,
    /// How many: a power of two.
    pub pages: u32,
}

/// The free runs, up to order `TOP`.
#[derive(Debug)]
pub struct Buddy<const TOP: u8> {
    heads: [u32; ORDERS],
    listed_pages: u64,
    whole_extents: u32,
    /// Single frames that came back last, the newest last; the first `recent_pages` of these.
    recent: [u32; RECENT_MAX],
    recent_pages: usize,
}

impl<const TOP: u8> Default for Buddy<TOP> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const TOP: u8> Buddy<TOP> {
    const TOP_ORDER: Order = {
        assert!(TOP <= Order::MAX.0);
        Order(TOP)
    };

    pub const fn new() -> Self {
        Self {
            heads: [NIL; ORDERS],
            listed_pages: 0,
            whole_extents: 0,
            recent: [NIL; RECENT_MAX],
            recent_pages: 0,
        }
    }

    pub fn free_pages(&self) -> u64 {
        self.listed_pages + self.recent_pages as u64
    }

    /// How many runs of the top order are free; runs that become whole only when waiting frames are merged do not
    /// count.
    pub fn whole_extents(&self) -> u32 {
        self.whole_extents
    }

    /// Frames that are free and in no run, the oldest first.
    pub fn recent(&self) -> &[u32] {
        &self.recent[..self.recent_pages]
    }

    pub fn add_extent(&mut self, links: &impl FreeLinks, first: Frame) {
        self.free(links, first, Self::TOP_ORDER);
    }

    /// Takes a run of `order`, out of the smallest that is free and large enough.
    #[inline]
    pub fn alloc(&mut self, links: &impl FreeLinks, order: Order) -> Option<Frame> {
        if self.recent_pages > 0 {
            if order == Order::ZERO {
                self.recent_pages -= 1;
                let frame = Frame(self.recent[self.recent_pages]);
                links.set_link(frame, PREVIOUS, NIL);
                return Some(frame);
            }
            if self.free_pages() < u64::from(order.pages()) {
                return None; // nothing to be merged could make it
            }
            self.merge_recent(links);
        }
        self.alloc_merged(links, order)
    }

    fn alloc_merged(&mut self, links: &impl FreeLinks, order: Order) -> Option<Frame> {
        let found = (order.0..=TOP).map(Order).find(|&o| self.heads[o.0 as usize] != NIL)?;
        let frame = self.pop(links, found)?;
        // The surplus goes back, upper half first.
        for half in (order.0..found.0).rev().map(Order) {
            self.push(links, frame.plus(half.pages()), half);
        }
        Some(frame)
    }

    fn pop(&mut self, links: &impl FreeLinks, order: Order) -> Option<Frame> {
        let head = self.heads[order.0 as usize];
        if head == NIL {
            return None;
        }
        self.remove(links, Frame(head), order);
        Some(Frame(head))
    }

    /// Gives a single frame back, to be taken again as it is; see the head of this file.
    ///
    /// # Panics
    /// If the frame waits unmerged already, or heads a free run.
    #[inline]
    pub fn free_page(&mut self, links: &impl FreeLinks, frame: Frame) {
        let waits = links.links(frame)[PREVIOUS] == WAITS;
        assert!(!waits && links.free_order(frame).is_none(), "{frame:?} is freed twice");
        if self.recent_pages == RECENT_MAX {
            return self.free(links, frame, Order::ZERO);
        }
        debug_assert!(!self.is_inside_free(links, frame), "{frame:?} is inside a free run and freed again");
        links.set_link(frame, PREVIOUS, WAITS);
        self.recent[self.recent_pages] = frame.0;
        self.recent_pages += 1;
    }

    pub fn merge_recent(&mut self, links: &impl FreeLinks) {
        for at in 0..std::mem::take(&mut self.recent_pages) {
            let frame = Frame(self.recent[at]);
            links.set_link(frame, PREVIOUS, NIL);
            self.free(links, frame, Order::ZERO);
        }
    }

    /// Gives a run of `order` back and merges it with its buddies as far as they are free.
    ///
    /// # Panics
    /// If the run is not aligned or its first frame is free already.
    pub fn free(&mut self, links: &impl FreeLinks, frame: Frame, order: Order) {
        assert!(order <= Self::TOP_ORDER && is_aligned(frame, order), "{frame:?} heads no run of {order:?}");
        assert!(links.free_order(frame).is_none(), "{frame:?} is freed twice");
        debug_assert!(!self.is_inside_free(links, frame), "{frame:?} is inside a free run and freed again");
        let (mut head, mut merged) = (frame, order);
        while merged < Self::TOP_ORDER {
            let buddy = Frame(head.0 ^ merged.pages());
            if links.free_order(buddy) != Some(merged) {
                break;
            }
            self.remove(links, buddy, merged);
            head = head.min(buddy);
            merged = Order(merged.0 + 1);
        }
        self.push(links, head, merged);
    }

    pub fn free_run(&mut self, links: &impl FreeLinks, frame: Frame, pages: u32) {
        let (mut frame, end) = (frame, frame.plus(pages));
        while frame < end {
            let aligned = Order((frame.0.trailing_zeros() as u8).min(TOP));
            let order = aligned.min(Order::fitting(end.0 - frame.0));
            self.free(links, frame, order);
            frame = frame.plus(order.pages());
        }
    }

    /// Takes all free runs out of the top-order run at `first`, which is free as a whole or in parts, and tells
    /// `taken` of each. Cost: a step for each frame that is not free.
    pub fn take_extent(&mut self, links: &impl FreeLinks, first: Frame, mut taken: impl FnMut(FrameRun)) {
        self.merge_recent(links);
        let (mut frame, end) = (first, first.plus(Self::TOP_ORDER.pages()));
        while frame < end {
            let pages = match links.free_order(frame) {
                Some(order) => {
                    self.remove(links, frame, order);
                    taken(FrameRun { frame, pages: order.pages() });
                    order.pages()
                }
                None => 1,
            };
            frame = frame.plus(pages);
        }
    }

    fn push(&mut self, links: &impl FreeLinks, frame: Frame, order: Order) {
        let first = self.heads[order.0 as usize];
        let (before, after) = if first == NIL || frame.0 < first {
            (NIL, first)
        } else {
            (first, links.links(Frame(first))[NEXT])
        };
        links.set_free(frame, Some(order));
        links.set_link(frame, NEXT, after);
        links.set_link(frame, PREVIOUS, before);
        self.link(links, order, before, frame.0, after);
        self.listed_pages += u64::from(order.pages());
        self.whole_extents += u32::from(order == Self::TOP_ORDER);
    }

    fn remove(&mut self, links: &impl FreeLinks, frame: Frame, order: Order) {
        let [after, before] = links.links(frame);
        if before == NIL {
            self.heads[order.0 as usize] = after;
        } else {
            links.set_link(Frame(before), NEXT, after);
        }
        if after != NIL {
            links.set_link(Frame(after), PREVIOUS, before);
        }
        links.set_free(frame, None);
        self.listed_pages -= u64::from(order.pages());
        self.whole_extents -= u32::from(order == Self::TOP_ORDER);
    }

    fn link(&mut self, links: &impl FreeLinks, order: Order, before: u32, frame: u32, after: u32) {
        if before == NIL {
            self.heads[order.0 as usize] = frame;
        } else {
            links.set_link(Frame(before), NEXT, frame);
        }
        if after != NIL {
            links.set_link(Frame(after), PREVIOUS, frame);
        }
    }

    fn is_inside_free(&self, links: &impl FreeLinks, frame: Frame) -> bool {
        (1..=TOP).any(|order| {
            let head = Frame(frame.0 & !(Order(order).pages() - 1));
            head != frame && links.free_order(head).is_some_and(|free| free.0 >= order)
        })
    }

    /// Checks the lists; `frames` are all that may be free. Cost: a step for each of them, and a bit of memory.
    pub fn check(&self, links: &impl FreeLinks, frames: Range<u32>) -> Result<(), String> {
        let listed = self.check_lists(links, &frames)?;
        let marked = frames.clone().filter(|&f| links.free_order(Frame(f)).is_some()).count();
        if listed != marked {
            return Err(format!("{listed} free runs are listed, {marked} frames are marked as heads"));
        }
        self.check_recent(links, &frames)?;
        let mut end = frames.start;
        for head in frames.clone().map(Frame) {
            let Some(order) = links.free_order(head) else { continue };
            if head.0 < end {
                return Err(format!("{head:?} heads a free run inside another"));
            }
            end = head.0 + order.pages();
            let buddy = Frame(head.0 ^ order.pages());
            if order.0 < TOP && frames.contains(&buddy.0) && links.free_order(buddy) == Some(order) {
                return Err(format!("{head:?} and its buddy are both free at {order:?}"));
            }
        }
        if end > frames.end { Err("a free run reaches beyond the arena".into()) } else { Ok(()) }
    }

    fn check_recent(&self, links: &impl FreeLinks, frames: &Range<u32>) -> Result<(), String> {
        for (at, &recent) in self.recent().iter().enumerate() {
            let frame = Frame(recent);
            if !frames.contains(&recent)
                || links.links(frame)[PREVIOUS] != WAITS
                || links.free_order(frame).is_some()
                || self.is_inside_free(links, frame)
            {
                return Err(format!(
                    "{frame:?} waits to be merged, and is not marked so, or is no frame outside of all free runs"
                ));
            }
            if self.recent()[..at].contains(&recent) {
                return Err(format!("{frame:?} waits to be merged twice"));
            }
        }
        Ok(())
    }

    fn check_lists(&self, links: &impl FreeLinks, frames: &Range<u32>) -> Result<usize, String> {
        let (mut listed, mut pages) = (0, 0);
        let mut whole = 0;
        for order in (0..=TOP).map(Order) {
            let (mut previous, mut at) = (NIL, self.heads[order.0 as usize]);
            while at != NIL {
                let frame = Frame(at);
                if !frames.contains(&at) || !is_aligned(frame, order) {
                    return Err(format!("{frame:?} cannot head a free run of {order:?}"));
                }
                if links.free_order(frame) != Some(order) || links.links(frame)[PREVIOUS] != previous {
                    return Err(format!("{frame:?} is listed at {order:?} and marked otherwise"));
                }
                (listed, pages) = (listed + 1, pages + u64::from(order.pages()));
                whole += u32::from(order == Self::TOP_ORDER);
                if pages > self.listed_pages {
                    return Err(format!("the lists hold more than the {} free frames", self.listed_pages));
                }
                (previous, at) = (at, links.links(frame)[NEXT]);
            }
        }
        if (pages, whole) == (self.listed_pages, self.whole_extents) {
            Ok(listed)
        } else {
            let counted = (self.listed_pages, self.whole_extents);
            Err(format!("frames and whole extents: {:?} are listed, {counted:?} counted", (pages, whole)))
        }
    }
}

fn is_aligned(frame: Frame, order: Order) -> bool {
    frame.0 & (order.pages() - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;

    struct Table(RefCell<Vec<([u32; 2], Option<Order>)>>);

    impl Table {
        fn new(frames: u32) -> Self {
            Self(RefCell::new(vec![([77, 77], None); frames as usize]))
        }
    }
    impl FreeLinks for Table {
        fn links(&self, frame: Frame) -> [u32; 2] {
            self.0.borrow()[frame.0 as usize].0
        }
        fn set_link(&self, frame: Frame, which: usize, to: u32) {
            self.0.borrow_mut()[frame.0 as usize].0[which] = to;
        }
        fn free_order(&self, frame: Frame) -> Option<Order> {
            self.0.borrow()[frame.0 as usize].1
        }
        fn set_free(&self, frame: Frame, order: Option<Order>) {
            self.0.borrow_mut()[frame.0 as usize].1 = order;
        }
    }

    const TOP: u8 = 3;
    const EXTENT: u32 = 1 << TOP;

    struct Twin(Vec<bool>);

    impl Twin {
        fn set(&mut self, frame: Frame, pages: u32, free: bool) {
            for bit in &mut self.0[frame.0 as usize..(frame.0 + pages) as usize] {
                assert_ne!(*bit, free, "{frame:?} was so already");
                *bit = free;
            }
        }
        fn has(&self, order: Order) -> bool {
            self.0.chunks_exact(order.pages() as usize).any(|run| run.iter().all(|&free| free))
        }
        fn count(&self) -> u64 {
            self.0.iter().filter(|&&free| free).count() as u64
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Alloc(u8),
        AllocRun(u32),
        Free(usize),
        /// Frees one of them frame by frame, unmerged.
        FreePages(usize),
        /// Frees one of them in two unaligned parts, the second first.
        FreeParts(usize, u32),
        AddExtent,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0..=TOP).prop_map(Op::Alloc),
            3 => (1..2 * EXTENT).prop_map(Op::AllocRun),
            4 => any::<usize>().prop_map(Op::Free),
            4 => any::<usize>().prop_map(Op::FreePages),
            2 => (any::<usize>(), 0..EXTENT).prop_map(|(which, at)| Op::FreeParts(which, at)),
            1 => Just(Op::AddExtent),
        ];
        prop::collection::vec(op, 1..120)
    }

    struct BuddyFixture {
        buddy: Buddy<TOP>,
        table: Table,
        twin: Twin,
        out: Vec<FrameRun>,
        extents: u32,
    }
    const EXTENTS_MAX: u32 = 4;

    /// The largest run of at most `pages` frames that is free, as the arena asks for it.
    fn largest_run(buddy: &mut Buddy<TOP>, table: &Table, pages: u32) -> Option<FrameRun> {
        let mut orders = (0..=Order::fitting(pages).0.min(TOP)).rev().map(Order);
        orders
            .find_map(|order| buddy.alloc(table, order).map(|frame| FrameRun { frame, pages: order.pages() }))
    }

    impl BuddyFixture {
        fn new() -> Self {
            let frames = EXTENTS_MAX * EXTENT;
            Self {
                buddy: Buddy::new(),
                table: Table::new(frames),
                twin: Twin(vec![false; frames as usize]),
                out: Vec::new(),
                extents: 0,
            }
        }

        fn step(&mut self, op: &Op) {
            match *op {
                Op::Alloc(order) => {
                    let order = Order(order);
                    let got = self.buddy.alloc(&self.table, order);
                    assert_eq!(got.is_some(), self.twin.has(order), "{order:?}");
                    self.took(got.map(|frame| FrameRun { frame, pages: order.pages() }));
                }
                Op::AllocRun(pages) => {
                    let got = largest_run(&mut self.buddy, &self.table, pages);
                    let best = (0..=TOP).rev().map(Order).find(|o| o.pages() <= pages && self.twin.has(*o));
                    assert_eq!(got.map(|run| run.pages), best.map(Order::pages));
                    self.took(got);
                }
                Op::Free(which) if !self.out.is_empty() => {
                    let run = self.out.swap_remove(which % self.out.len());
                    self.buddy.free(&self.table, run.frame, Order::fitting(run.pages));
                    self.twin.set(run.frame, run.pages, true);
                }
                Op::FreePages(which) if !self.out.is_empty() => {
                    let run = self.out.swap_remove(which % self.out.len());
                    (0..run.pages).for_each(|page| self.buddy.free_page(&self.table, run.frame.plus(page)));
                    self.twin.set(run.frame, run.pages, true);
                }
                Op::FreeParts(which, at) if !self.out.is_empty() => {
                    let run = self.out.swap_remove(which % self.out.len());
                    let at = at % run.pages;
                    self.buddy.free_run(&self.table, run.frame.plus(at), run.pages - at);
                    self.buddy.free_run(&self.table, run.frame, at);
                    self.twin.set(run.frame, run.pages, true);
                }
                Op::AddExtent if self.extents < EXTENTS_MAX => {
                    let first = Frame(self.extents * EXTENT);
                    self.buddy.add_extent(&self.table, first);
                    self.twin.set(first, EXTENT, true);
                    self.extents += 1;
                }
                _ => {}
            }
        }

        fn took(&mut self, run: Option<FrameRun>) {
            let Some(run) = run else { return };
            assert!(is_aligned(run.frame, Order::fitting(run.pages)));
            self.twin.set(run.frame, run.pages, false);
            self.out.push(run);
        }

        fn check(&self) {
            assert_eq!(self.buddy.check(&self.table, 0..EXTENTS_MAX * EXTENT), Ok(()));
            assert_eq!(self.buddy.free_pages(), self.twin.count());
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_bitmap(ops in ops()) {
            let mut fixture = BuddyFixture::new();
            for op in &ops {
                fixture.step(op);
                fixture.check();
            }
            for _ in 0..fixture.out.len() {
                fixture.step(&Op::FreeParts(0, 3));
            }
            for _ in 0..fixture.extents {
                prop_assert!(fixture.buddy.alloc(&fixture.table, Order(TOP)).is_some());
            }
            prop_assert_eq!(fixture.buddy.free_pages(), 0);
        }
    }

    fn whole(extents: u32) -> (Buddy<TOP>, Table) {
        let (mut buddy, table) = (Buddy::new(), Table::new(EXTENTS_MAX * EXTENT));
        for extent in 0..extents {
            buddy.add_extent(&table, Frame(extent * EXTENT));
        }
        (buddy, table)
    }

    #[test]
    fn a_small_run_comes_out_of_broken_blocks() {
        let (mut buddy, table) = whole(2);
        let first = buddy.alloc(&table, Order(0)).unwrap();
        for _ in 1..EXTENT {
            assert_eq!(buddy.alloc(&table, Order(0)).unwrap().0 / EXTENT, first.0 / EXTENT);
        }
        assert!(buddy.alloc(&table, Order(TOP)).is_some(), "the other extent is whole");
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_head_freed_twice_is_caught() {
        let (mut buddy, table) = whole(1);
        let frame = buddy.alloc(&table, Order(1)).unwrap();
        buddy.free(&table, frame, Order(1));
        buddy.free(&table, frame, Order(1));
    }

    #[test]
    fn the_frame_that_came_back_last_is_taken_first_and_larger_runs_merge_it() {
        let (mut buddy, table) = whole(1);
        let frames: Vec<_> = (0..EXTENT).map(|_| buddy.alloc(&table, Order(0)).unwrap()).collect();
        for &frame in &frames {
            buddy.free_page(&table, frame);
        }
        assert_eq!(buddy.free_pages(), u64::from(EXTENT));
        assert!(frames.iter().all(|&frame| table.free_order(frame).is_none()), "none is merged");
        let last = *frames.last().unwrap();
        assert_eq!(buddy.alloc(&table, Order(0)), Some(last));
        buddy.free_page(&table, last);
        assert_eq!(buddy.alloc(&table, Order(TOP)), Some(Frame(0)), "all of them are one run");
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_recent_frame_freed_twice_is_caught() {
        let (mut buddy, table) = whole(1);
        let frame = buddy.alloc(&table, Order(0)).unwrap();
        // Taken, it may be freed again; and so it may after it was merged and split off.
        buddy.free_page(&table, frame);
        assert_eq!(buddy.alloc(&table, Order(0)), Some(frame));
        buddy.free_page(&table, frame);
        buddy.merge_recent(&table);
        assert_eq!(buddy.alloc(&table, Order(TOP)), Some(Frame(0)));
        (0..EXTENT).rev().for_each(|page| buddy.free_page(&table, Frame(page)));
        buddy.free_page(&table, frame);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "inside a free run")]
    fn an_inner_frame_freed_twice_is_caught() {
        let (mut buddy, table) = whole(1);
        let frame = buddy.alloc(&table, Order(2)).unwrap();
        buddy.free(&table, frame, Order(2));
        buddy.free(&table, frame.plus(1), Order(0));
    }

    #[test]
    fn check_sees_each_fault_that_it_claims_to_see() {
        let range = 0..EXTENTS_MAX * EXTENT;
        let (mut buddy, table) = whole(2);
        let frame = buddy.alloc(&table, Order(0)).unwrap();
        buddy.check(&table, range.clone()).unwrap();
        table.set_free(frame, Some(Order(0)));
        assert!(buddy.check(&table, range.clone()).is_err(), "a head that is not listed");
        table.set_free(frame, None);
        table.set_link(Frame(EXTENT), PREVIOUS, 5);
        assert!(buddy.check(&table, range.clone()).is_err(), "a list that does not lead back");
        table.set_link(Frame(EXTENT), PREVIOUS, NIL);
        buddy.listed_pages += 1;
        assert!(buddy.check(&table, range.clone()).is_err(), "a miscount");
        buddy.listed_pages -= 1;
        buddy.check(&table, range.clone()).unwrap();
        buddy.free_page(&table, frame);
        buddy.check(&table, range.clone()).unwrap();
        buddy.recent[0] = EXTENT;
        assert!(buddy.check(&table, range).is_err(), "a recent frame that lies in a free run");
    }
}
