//! Rings: a cache of pages that does what a policy says, the naive way.
//!
//! It has no tree and no frames: the rings are queues, and a map holds each evicted page's age. The cache's policy and
//! those that the benchmark compares it with are tested over it.
//!
//! Invariants, asserted at each step: those of every policy, as `quinion/src/policy/mod.rs` numbers them. A ring that
//! is named holds something, and a folio that is not read leaves after [`SCANS_MAX`] scans at most.

use std::collections::{HashMap, VecDeque};

use quinion::internals::policy::{
    ArrivingFolio, CLASSES, Class, FetchOrigin, NewPolicy, Policy, PolicyVerdict, READS_MAX, SCANS_MAX,
    SOON_PART, Weights,
};
use quinion::internals::workingset::Refault;

#[derive(Clone, Copy, Debug)]
struct Folio {
    page: u32,
    pages: u32,
    reads: u8,
    /// Scans since the last read.
    scans: u32,
}

/// A cache of rings and nothing else.
#[derive(Debug)]
pub struct Rings {
    policy: Box<dyn Policy>,
    rings: [VecDeque<Folio>; CLASSES],
    pages_max: u64,
    evicted: u64,
    /// The age of each page that left a shadow.
    shadows: HashMap<u32, u64>,
}

impl Rings {
    pub fn new(policy: NewPolicy, pages_max: u64) -> Self {
        let (rings, shadows) = (Default::default(), HashMap::new());
        Self { policy: policy(), rings, pages_max, evicted: 0, shadows }
    }

    fn held(&self) -> Weights {
        Weights { pages: [0, 1, 2, 3].map(|ring: usize| weight(&self.rings[ring])) }
    }

    /// One scan; returns how many pages left.
    fn turn(&mut self) -> u32 {
        let held = self.held();
        let class = self.policy.next(&held).expect("something is held");
        let mut folio =
            self.rings[class as usize].pop_front().expect("the policy names a ring with something");
        folio.scans += 1;
        assert!(folio.scans <= SCANS_MAX, "{folio:?} of {class:?} stays for ever");
        match self.policy.decide(class, folio.reads, folio.pages, &held) {
            PolicyVerdict::Keep { class, reads } => {
                assert!(reads <= READS_MAX);
                self.rings[class as usize].push_back(Folio { reads, ..folio });
                0
            }
            PolicyVerdict::Evict { remember } => {
                if remember {
                    self.shadows.insert(folio.page, self.evicted);
                }
                self.evicted += u64::from(folio.pages);
                folio.pages
            }
        }
    }

    /// Scans until `pages` pages fit into the cache; returns the number of scans.
    fn make_room(&mut self, pages: u32) -> u32 {
        let mut turns = 0;
        while self.held().total() + u64::from(pages) > self.pages_max {
            self.turn();
            turns += 1;
        }
        turns
    }

    pub fn read(&mut self, page: u32, pages: u32, came: FetchOrigin) {
        if let Some(folio) = self.rings.iter_mut().flatten().find(|folio| folio.page == page) {
            folio.reads = (folio.reads + 1).min(READS_MAX);
            folio.scans = 0;
            return;
        }
        let (folios, reach) =
            (self.rings.iter().map(VecDeque::len).sum::<usize>(), self.policy.reach(&self.held()));
        let turns = self.make_room(pages);
        assert!(turns as usize <= folios * SCANS_MAX as usize, "{turns} turns for {folios} folios");
        let distance = self.shadows.remove(&page).map(|left| self.evicted - left);
        let is_soon = distance.is_some_and(|far| far <= self.pages_max / SOON_PART);
        let returned_soon = if is_soon { u64::from(pages) } else { 0 };
        let refault = distance.map(|far| if far <= reach { Refault::Recent } else { Refault::Old });
        let held = self.held();
        let class = self.policy.admit(ArrivingFolio { pages, came, refault, returned_soon }, &held);
        self.rings[class as usize].push_back(Folio { page, pages, reads: 0, scans: 0 });
    }

    pub fn has(&self, page: u32) -> bool {
        self.rings.iter().flatten().any(|folio| folio.page == page)
    }

    fn has_in(&self, class: Class, page: u32) -> bool {
        self.rings[class as usize].iter().any(|folio| folio.page == page)
    }
}

/// The pages, of 30 that were read four times, that a scan of twice the cache's size evicts.
pub fn lost_to_a_scan(policy: NewPolicy) -> Vec<u32> {
    let mut cache = Rings::new(policy, 100);
    for _ in 0..4 {
        (0..30).for_each(|page| cache.read(page, 1, FetchOrigin::Asked));
    }
    (1000..1200).for_each(|page| cache.read(page, 1, FetchOrigin::Asked));
    (0..30).filter(|page| !cache.has(*page)).collect()
}

/// Whether a page that a scan has evicted is in Main when it was read again soon after.
pub fn activates_refaulted_pages(policy: NewPolicy) -> bool {
    let mut cache = Rings::new(policy, 100);
    // Half of the cache has proved itself: two lists measure a distance by that half.
    for _ in 0..4 {
        (0..50).for_each(|page| cache.read(page, 1, FetchOrigin::Asked));
    }
    (100..200).for_each(|page| cache.read(page, 1, FetchOrigin::Asked));
    let back = (100..200).rfind(|page| !cache.has(*page)).expect("not all of the scan fits");
    cache.read(back, 1, FetchOrigin::Asked);
    cache.has_in(Class::Main, back)
}

/// Reads (page, order, how it comes) through a cache of `pages_max` pages, and then empties it. The bounds are asserted
/// where a ring is named and a folio scanned.
pub fn makes_room(policy: NewPolicy, pages_max: u64, reads: &[(u32, u32, FetchOrigin)]) {
    let mut cache = Rings::new(policy, pages_max);
    for (page, order, came) in reads {
        cache.read(*page, 1 << order, *came);
        assert!(cache.held().total() <= pages_max);
    }
    let held = cache.held().total();
    while cache.held().total() > 0 {
        cache.turn();
    }
    assert!(cache.policy.next(&Weights::default()).is_none());
    assert!(cache.evicted >= held, "a full cache can be emptied");
}

fn weight(ring: &VecDeque<Folio>) -> u64 {
    ring.iter().map(|folio| u64::from(folio.pages)).sum()
}
