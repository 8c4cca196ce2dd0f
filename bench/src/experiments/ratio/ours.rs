//! Ours: the policy code of Quinion's cache over rings like the cache's, without the cache.
//!
//! ```text
//!   rings     a queue of pages for each class            policy      quinion::policy, as it is
//!   shadows   an age for each evicted page             ages        quinion::workingset, as it is
//!   nodes     64 places each: shadows are lost with a node that only remembers, the oldest first,
//!             when there are more such nodes than the cache would have
//! ```
//!
//! Folios are single pages here, and one goes at a time, where the cache evicts up to 64 at once. In the cache, a
//! stream that needs room first drops pages that it has read itself and left behind. So does this simulation: it drops
//! the youngest page of the stream's ring that was read once.
//!
//! Invariants:
//!  1. No more pages are held than the cache was made for.
//!  2. A page has a shadow or is held, never both.

use std::collections::VecDeque;

use quinion::internals::policy::{
    ArrivingFolio, CLASSES, Class, FetchOrigin, Policy, PolicyVerdict, READS_MAX, SOON_PART, Weights,
};
use quinion::internals::reclaim::shadow_nodes_max;
use quinion::internals::units::{Order, PAGE_SIZE};
use quinion::internals::workingset::{EvictedState, Refault, ShadowInfo, WorkingSet};

use super::peers::Simulated;

const NODE_SHIFT: u32 = 6;

pub struct Ours {
    pages_max: u64,
    policy: Box<dyn Policy>,
    came: FetchOrigin,
    rings: [VecDeque<u32>; CLASSES],
    held: Weights,
    class: Vec<Option<Class>>,
    reads: Vec<u8>,
    /// The state of each page at its eviction, for pages that returned soon.
    standing: Vec<EvictedState>,
    ages: WorkingSet,
    shadows: Shadows,
    /// The policy's answer at the end of the last scan.
    reach: u64,
}

impl Ours {
    /// A cache of `pages_max` pages; the pages at `places` are all fetched as `came` says.
    pub fn new(places: &[u64], pages_max: usize, policy: Box<dyn Policy>, came: FetchOrigin) -> Self {
        Self {
            pages_max: pages_max as u64,
            policy,
            came,
            rings: Default::default(),
            held: Weights::default(),
            class: vec![None; places.len()],
            reads: vec![0; places.len()],
            standing: vec![EvictedState::Plain; places.len()],
            ages: WorkingSet::new(pages_max as u64),
            shadows: Shadows::new(places, pages_max),
            reach: 0,
        }
    }

    /// Takes the shadow of `page`, and returns what it says; and whether the page was away for a short time.
    fn refault(&mut self, page: u32) -> (Option<Refault>, bool) {
        let Some(memory) = self.shadows.take(page) else { return (None, false) };
        let is_soon = self.ages.distance(memory) <= self.pages_max / SOON_PART;
        let refault = self.ages.refault(memory, Order::ZERO, self.reach);
        // As in the cache, a page that has aged in Main counts as new.
        (Some(refault).filter(|_| memory.standing == EvictedState::Plain), is_soon)
    }

    fn put(&mut self, page: u32, class: Class, reads: u8) {
        self.rings[class as usize].push_back(page);
        self.held.pages[class as usize] += 1;
        self.class[page as usize] = Some(class);
        self.reads[page as usize] = reads;
    }

    fn evict_one(&mut self) {
        if self.held.total() < self.pages_max || self.drop_behind() {
            return;
        }
        while self.held.total() >= self.pages_max {
            let class = self.policy.next(&self.held).expect("a full cache holds something");
            let page =
                self.rings[class as usize].pop_front().expect("a policy names a ring that holds something");
            let verdict = self.policy.decide(class, self.reads[page as usize], 1, &self.held);
            self.held.pages[class as usize] -= 1;
            match verdict {
                PolicyVerdict::Keep { class, reads } => self.put(page, class, reads),
                PolicyVerdict::Evict { remember } => self.evict(page, remember),
            }
        }
        self.reach = self.policy.reach(&self.held);
    }

    /// A stream makes its own room: it evicts the youngest page that it has read, unless another reader has read it,
    /// too.
    fn drop_behind(&mut self) -> bool {
        let stream = Class::Stream as usize;
        if self.came != FetchOrigin::Stream {
            return false;
        }
        let Some(&page) = self.rings[stream].back() else { return false };
        let verdict = self.policy.decide(Class::Stream, self.reads[page as usize], 1, &self.held);
        if matches!(verdict, PolicyVerdict::Keep { .. }) {
            return false;
        }
        let page = self.rings[stream].pop_back().expect("it was looked at");
        self.held.pages[stream] -= 1;
        self.class[page as usize] = None;
        self.shadows.leave(page, None);
        true
    }

    fn evict(&mut self, page: u32, remember: bool) {
        self.class[page as usize] = None;
        let standing = self.standing[page as usize];
        let memory = self.ages.remember(Order::ZERO, standing);
        let remember = remember || standing == EvictedState::WorkingSet;
        self.shadows.leave(page, remember.then_some(memory));
    }
}

impl Simulated for Ours {
    fn ask(&mut self, page: u32) -> bool {
        if self.class[page as usize].is_some() {
            let reads = &mut self.reads[page as usize];
            *reads = (*reads + 1).min(READS_MAX);
            return true;
        }
        let (refault, is_soon) = self.refault(page);
        self.evict_one();
        let came_back = refault == Some(Refault::Recent);
        self.standing[page as usize] = if came_back { EvictedState::WorkingSet } else { EvictedState::Plain };
        let arrival = ArrivingFolio { pages: 1, came: self.came, refault, returned_soon: u64::from(is_soon) };
        let class = self.policy.admit(arrival, &self.held);
        self.shadows.enter(page);
        self.put(page, class, 0);
        false
    }

    fn held(&self) -> usize {
        self.held.total() as usize
    }
}

struct Shadows {
    memory: Vec<Option<ShadowInfo>>,
    node: Vec<u32>,
    /// The pages of node n are those from `first[n]` up to `first[n + 1]`.
    first: Vec<u32>,
    live: Vec<u32>,
    remembered: Vec<u32>,
    /// Nodes that hold only shadows, the oldest first, each with the number of its entry here.
    order: VecDeque<(u32, u32)>,
    /// The number of each node's entry; 0 if it has none.
    entry: Vec<u32>,
    entries: u32,
    alone: usize,
    alone_max: usize,
}

impl Shadows {
    fn new(places: &[u64], pages_max: usize) -> Self {
        let mut shadows = Self {
            memory: vec![None; places.len()],
            node: Vec::with_capacity(places.len()),
            first: Vec::new(),
            live: Vec::new(),
            remembered: Vec::new(),
            order: VecDeque::new(),
            entry: Vec::new(),
            entries: 0,
            alone: 0,
            alone_max: shadow_nodes_max((pages_max * PAGE_SIZE) as u64) as usize,
        };
        let mut last = None;
        for (page, place) in places.iter().enumerate() {
            if last.replace(place >> NODE_SHIFT) != Some(place >> NODE_SHIFT) {
                shadows.first.push(page as u32);
            }
            shadows.node.push(shadows.first.len() as u32 - 1);
        }
        let nodes = shadows.first.len();
        shadows.first.push(places.len() as u32);
        shadows.live = vec![0; nodes];
        shadows.remembered = vec![0; nodes];
        shadows.entry = vec![0; nodes];
        shadows
    }

    fn take(&mut self, page: u32) -> Option<ShadowInfo> {
        self.memory[page as usize]
    }

    fn enter(&mut self, page: u32) {
        let node = self.node[page as usize] as usize;
        self.live[node] += 1;
        self.remembered[node] -= u32::from(self.memory[page as usize].take().is_some());
        self.update_node(node);
    }

    fn leave(&mut self, page: u32, memory: Option<ShadowInfo>) {
        let node = self.node[page as usize] as usize;
        self.live[node] -= 1;
        self.remembered[node] += u32::from(memory.is_some());
        self.memory[page as usize] = memory;
        self.update_node(node);
        while self.alone > self.alone_max {
            let (node, entry) = self.order.pop_front().expect("there are more than none");
            if self.entry[node as usize] == entry {
                self.forget(node as usize);
            }
        }
    }

    /// Updates whether the node, which has changed, holds only shadows.
    fn update_node(&mut self, node: usize) {
        let is_alone = self.live[node] == 0 && self.remembered[node] > 0;
        if is_alone && self.entry[node] == 0 {
            self.entries += 1;
            self.entry[node] = self.entries;
            self.order.push_back((node as u32, self.entries));
            self.alone += 1;
        } else if !is_alone && self.entry[node] != 0 {
            self.entry[node] = 0;
            self.alone -= 1;
        }
    }

    fn forget(&mut self, node: usize) {
        let pages = self.first[node] as usize..self.first[node + 1] as usize;
        self.memory[pages].fill(None);
        self.remembered[node] = 0;
        self.update_node(node);
    }
}
