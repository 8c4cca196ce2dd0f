//! Lists: the rings in which every folio of the cache stands, from its insertion to its end.
//!
//! ```text
//!   insertion    reserve --> tree lock, inserted --> list       a place for each folio, before it is there
//!   reclaim      pop --> scanned --> push                        one hold of the lock for many
//!                    \--> a victim --> evicted, or listed again
//!   removal      tree lock --> remove, retire                   and only then are its frames freed
//! ```
//!
//! A ring is a queue of frame numbers, oldest first, in **chunks** of the size of a cell (`rings.rs`). A folio's place
//! in it stands in the descriptor of its first frame, in the two numbers that are the arena's while the frame is free.
//! So a folio that leaves other than by the head of its ring is taken off before its frames are given back.
//!
//! **One lock** guards all rings. Under it nothing is allocated: a thread that will list something has a
//! [`ListReservation`] of the room for it first. A frame that is popped keeps its room, reserved, until it is listed
//! again or known to be gone:
//!
//! ```text
//!   folios of the trees that are not listed  <=  entries reserved
//! ```
//!
//! A folio can be retired between its insertion (or its relisting) and the list. Only live folios are listed, and a
//! folio is retired under the lock, or removed after it: so it is either seen dead, or found listed.
//!
//! Each **pool** has rings of its own. The pages that it lists and is about to list are its charge (`charge.rs`): a
//! reservation carries one, for the pages that its entries will weigh.
//!
//! Invariants (asserted by [`Lists::check`] and `Mapping::check`):
//!  1. Those of `rings.rs` and of `charge.rs`.
//!  2. A listed frame heads a folio of the order that its entry says.
//!  3. The inequality above, whenever a tree's lock and this one are held.
//!
//! Not an invariant: that a listed folio can go, or that it stands in the ring where it would be put today.
//!
//! Cost: 4.2 bytes for each folio, and at most as much again if many left other than by the head; they are
//! cells and so within the bound. The lock is held for some steps an entry.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use crate::arena::{Arena, CellNumber, DescriptorWord, GrownView, NO_PLACE};
use crate::sync::{LockWait, Rank, RankedGuard, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, Order, POOLS_MAX, PoolNumber};

mod charge;
mod rings;

use charge::{Account, ChargeDelta};
pub use charge::{Charge, UNLIMITED};
use rings::{Position, RingStorage, Rings};

const SLOTS: usize = 64;
/// Chunks taken beyond those that are missing, for the next ones.
const CHUNKS_AHEAD: u64 = 8;
/// How many folios before its own a descriptor is fetched that is scanned soon.
const FETCHED_AHEAD: u32 = 8;
/// Chunks given back under one hold of the arena's lock.
const GIVE_BACK_BATCH: usize = 64;

/// The rings of one cache.
#[derive(Debug)]
pub struct Lists {
    arena: Arc<Arena>,
    rings: RankedMutex<Rings<SLOTS>>,
    /// Entries for which there is room and no reservation. May be below 0, where the rings took room for themselves:
    /// the next reservation grows by that.
    unreserved: AtomicI64,
    pool_rings: usize,
    accounts: Box<[Account]>,
    process: ForkGuard,
}

/// Room for so many entries, and a charge for their pages. Unused room and charge go back.
#[derive(Debug)]
pub struct ListReservation<'a> {
    lists: &'a Lists,
    entries: u32,
    charge: Charge<'a>,
    returned_soon: u64,
}

impl<'a> ListReservation<'a> {
    /// Sets the charge for the folios that the reservation lists.
    #[must_use]
    #[inline]
    pub fn with_charge(mut self, charge: Charge<'a>) -> Self {
        self.charge = charge;
        self
    }
    /// Sets how many pages of the folios to be listed came back soon.
    #[must_use]
    #[inline]
    pub fn with_returned_soon(mut self, pages: u64) -> Self {
        self.returned_soon = pages;
        self
    }
    /// Pages listed by it that came back soon.
    #[inline]
    pub fn returned_soon(&self) -> u64 {
        self.returned_soon
    }
    /// The pool in whose rings it lists.
    pub fn pool(&self) -> PoolNumber {
        self.charge.pool
    }
    /// For how many entries there is room.
    pub fn entries(&self) -> u32 {
        self.entries
    }
}

impl Drop for ListReservation<'_> {
    fn drop(&mut self) {
        if self.entries > 0 {
            self.lists.unreserved.fetch_add(i64::from(self.entries), Ordering::Relaxed);
        }
    }
}

/// The positions of the frames that had grown when the lock was taken: those listed before, and the caller's.
struct ListPositions<'a>(GrownView<'a>);

impl RingStorage for ListPositions<'_> {
    #[inline]
    fn words(&self, chunk: u32) -> &[AtomicU32] {
        self.0.own_slots(CellNumber(chunk))
    }
    #[inline]
    fn position(&self, frame: Frame) -> Option<Position> {
        let [chunk, slot] = self.0.own_descriptor(frame).links();
        (chunk != NO_PLACE).then_some((chunk, slot))
    }
    #[inline]
    fn set_position(&self, frame: Frame, position: Option<Position>) {
        let (chunk, slot) = position.unwrap_or((NO_PLACE, 0));
        let descriptor = self.0.own_descriptor(frame);
        descriptor.set_link(0, chunk);
        descriptor.set_link(1, slot);
    }
}

impl Lists {
    /// Rings for folios of `arena`, `pool_rings` for each pool; of the default pool only, until others are added.
    pub fn new(arena: Arc<Arena>, pool_rings: usize) -> Self {
        let rings = Rings::new(pool_rings, pool_rings * POOLS_MAX);
        let unreserved = AtomicI64::new(rings.free_entries());
        Self {
            arena,
            rings: RankedMutex::new(Rank::Lists, rings),
            unreserved,
            pool_rings,
            accounts: (0..POOLS_MAX).map(|_| Account::default()).collect(),
            process: ForkGuard::new(),
        }
    }

    /// Sees to it that there are rings for `pool`, and for all pools before it. They stay.
    pub fn add_pool(&self, pool: PoolNumber) {
        let mut guard = self.lock();
        // Memory that the rings need is free no more; the guard says so when it goes.
        guard.rings.grow_to((usize::from(pool.0) + 1) * self.pool_rings);
    }

    fn account(&self, pool: PoolNumber) -> &Account {
        &self.accounts[usize::from(pool.0)]
    }
    /// Pages that `pool` is charged for.
    pub fn charged(&self, pool: PoolNumber) -> u64 {
        self.account(pool).read().0
    }
    /// Pages of these that are in no ring: on their way into one, or out.
    pub fn outstanding(&self, pool: PoolNumber) -> u64 {
        self.account(pool).read().1
    }
    /// The most pages that `pool` may be charged for.
    pub fn limit(&self, pool: PoolNumber) -> u64 {
        self.account(pool).limit()
    }
    /// Sets it; the pool keeps the pages it has until they are reclaimed.
    pub fn set_limit(&self, pool: PoolNumber, pages: u64) {
        self.account(pool).set_limit(pages);
    }
    /// Charges `pool` as many of `wanted` pages as its limit allows, in whole folios of `unit`.
    pub fn charge(&self, pool: PoolNumber, wanted: u32, unit: Order) -> Charge<'_> {
        Charge::of(self, pool, wanted, unit)
    }

    /// Room for `entries` more, or `None` if the arena has no cell for it. May wait for the arena's lock, if `locks`
    /// says so, and holds that of the lists for some steps. To be called before a tree is locked.
    pub fn reserve(&self, entries: u32, locks: LockWait) -> Option<ListReservation<'_>> {
        let wanted = i64::from(entries);
        let take = |left: i64| (left >= wanted).then_some(left - wanted);
        loop {
            // Relaxed: the chunks behind the room are behind the lock.
            match self.unreserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                Ok(_) => {
                    let charge = Charge::none(self, PoolNumber::DEFAULT);
                    return Some(ListReservation { lists: self, entries, charge, returned_soon: 0 });
                }
                Err(left) if !self.grow((wanted - left) as u64, locks) => return None,
                Err(_) => {}
            }
        }
    }

    /// A reservation of nothing, to which entries popped of the rings of `pool` add.
    pub fn empty_reservation(&self, pool: PoolNumber) -> ListReservation<'_> {
        ListReservation { lists: self, entries: 0, charge: Charge::none(self, pool), returned_soon: 0 }
    }

    /// Takes chunks for at least so many entries more; whether there were any.
    fn grow(&self, entries: u64, locks: LockWait) -> bool {
        let missing = entries.div_ceil(Rings::<SLOTS>::ENTRIES);
        let mut cells = Vec::new();
        let wanted = (missing + CHUNKS_AHEAD) as usize;
        self.arena.alloc_cells(wanted, &mut cells, locks);
        if (cells.len() as u64) < missing {
            self.arena.free_cells(cells);
            return false;
        }
        let mut rings = self.rings.lock();
        cells.iter().for_each(|cell| rings.put_spare(&ListPositions(self.arena.view().grown()), cell.0));
        let more = cells.len() as i64 * Rings::<SLOTS>::ENTRIES as i64;
        self.unreserved.fetch_add(more, Ordering::Relaxed); // under the lock, as the chunks are
        true
    }

    /// Gives unused chunks back, but for a few.
    pub fn give_back(&self) {
        let entries = Rings::<SLOTS>::ENTRIES as i64;
        let (one, kept) = (entries, CHUNKS_AHEAD as i64 * entries);
        loop {
            let mut cells = Vec::with_capacity(GIVE_BACK_BATCH);
            let mut rings = self.rings.lock();
            while cells.len() < GIVE_BACK_BATCH {
                let take = |left: i64| (left >= kept + one).then_some(left - one);
                if self.unreserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                    break;
                }
                let chunk = rings.take_spare(&ListPositions(self.arena.view().grown()));
                cells.push(CellNumber(chunk.expect("what is not needed is spare")));
            }
            drop(rings);
            let given = cells.len();
            self.arena.free_cells(cells);
            if given < GIVE_BACK_BATCH {
                return;
            }
        }
    }

    /// Takes the lock; waits for it.
    pub fn lock(&self) -> ListsGuard<'_> {
        self.guard(self.rings.lock())
    }
    /// Takes the lock, or not if that means waiting and `locks` says no.
    pub fn lock_as(&self, locks: LockWait) -> Option<ListsGuard<'_>> {
        self.rings.lock_as(locks).map(|rings| self.guard(rings))
    }
    fn guard<'a>(&'a self, rings: RankedGuard<'a, Rings<SLOTS>>) -> ListsGuard<'a> {
        let grown = self.arena.view().grown(); // with the lock: see `ListPositions`
        ListsGuard { free: rings.free_entries(), tally: ChargeDelta::default(), lists: self, grown, rings }
    }

    /// Whether every invariant of the rings holds; the first that does not, in words. Cost: all entries.
    pub fn check(&self) -> Result<(), String> {
        let (rings, view) = (self.rings.lock(), self.arena.view());
        rings.check(&ListPositions(view.grown()), |frame, order| {
            let word = view.own(frame).word();
            (word.order() != order).then(|| format!("it heads {word:?}, and {order:?} is listed"))
        })?;
        let (left, all) = (self.unreserved.load(Ordering::Relaxed), rings.free_entries());
        if left > all {
            return Err(format!("room for {left} entries is counted, and there is room for {all}"));
        }
        for (number, account) in self.accounts.iter().enumerate() {
            let own = number * self.pool_rings..(number + 1) * self.pool_rings;
            let listed: u64 = own.filter(|ring| *ring < rings.rings()).map(|ring| rings.pages(ring)).sum();
            let (charged, outstanding) = account.read();
            if charged != listed + outstanding {
                return Err(format!(
                    "pool {number} is charged for {charged} pages, lists {listed}, and {outstanding} are on their way"
                ));
            }
        }
        Ok(())
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return; // the arena is not mapped here
        }
        let rings = self.rings.get_mut();
        debug_assert_eq!(rings.listed(), 0, "lists are dropped when no folio is left");
        let spares = || rings.take_spare(&ListPositions(self.arena.view().grown())).map(CellNumber);
        let spares: Vec<_> = std::iter::from_fn(spares).collect();
        self.arena.free_cells(spares);
    }
}

/// The lock of the rings, held.
#[derive(Debug)]
pub struct ListsGuard<'a> {
    lists: &'a Lists,
    grown: GrownView<'a>,
    rings: RankedGuard<'a, Rings<SLOTS>>,
    /// Entries for which there was room when `Lists::unreserved` was last right.
    free: i64,
    tally: ChargeDelta,
}

impl<'a> ListsGuard<'a> {
    /// Pages listed in `ring`.
    pub fn pages(&self, ring: usize) -> u64 {
        self.rings.pages(ring)
    }
    /// Pages listed in each of `N` rings from `first` on.
    pub fn pages_from<const N: usize>(&self, first: usize) -> [u64; N] {
        self.rings.pages_from(first)
    }
    /// Folios listed in all rings.
    pub fn listed(&self) -> u64 {
        self.rings.listed()
    }
    /// Whether the folio that `frame` heads is listed. The frame is a folio's.
    pub fn holds(&self, frame: Frame) -> bool {
        self.places().position(frame).is_some()
    }
    /// The ring in which the folio that `frame` heads is listed, if it is.
    pub fn ring_of(&self, frame: Frame) -> Option<usize> {
        self.rings.ring_of(&self.places(), frame)
    }
    /// Entries that are reserved.
    pub fn reserved(&self) -> u64 {
        (self.rings.free_entries() - self.lists.unreserved.load(Ordering::Relaxed)).max(0) as u64
    }

    fn places(&self) -> ListPositions<'a> {
        ListPositions(self.grown)
    }

    fn word(&self, frame: Frame) -> DescriptorWord {
        self.grown.own_descriptor(frame).settled_word()
    }

    /// How many pools have rings.
    pub fn pools(&self) -> usize {
        self.rings.rings() / self.lists.pool_rings
    }
    fn pool_of(&self, ring: usize) -> PoolNumber {
        PoolNumber((ring / self.lists.pool_rings) as u8)
    }

    /// Lists the folio that `frame` heads as the youngest of `ring`, if it is one and is not listed. Uses an entry of
    /// the reservation then, and of its charge the folio's pages. Pages beyond the charge are charged now, whatever
    /// the limit: a caller that has a limit to keep brings a charge. Returns the pages that it has listed.
    pub fn list(&mut self, frame: Frame, ring: usize, reservation: &mut ListReservation<'_>) -> u64 {
        let word = self.word(frame);
        if !word.is_live() || self.holds(frame) {
            return 0;
        }
        self.list_as(frame, word.order(), ring, reservation);
        u64::from(word.order().pages())
    }

    /// As [`ListsGuard::list`], if it is still the folio that it was when its sequence was `sequence`, written in place
    /// since or not.
    pub fn list_again(
        &mut self,
        frame: Frame,
        sequence: u32,
        ring: usize,
        reservation: &mut ListReservation<'_>,
    ) {
        let word = self.word(frame);
        if word.is_live() && word.is_still(sequence) && !self.holds(frame) {
            self.list_as(frame, word.order(), ring, reservation);
        }
    }

    fn list_as(&mut self, frame: Frame, order: Order, ring: usize, reservation: &mut ListReservation<'_>) {
        let charged = reservation.charge.pages > 0;
        let pool = if charged { reservation.charge.pool } else { self.pool_of(ring) };
        debug_assert_eq!(pool, self.pool_of(ring), "a charge is one pool's");
        reservation.entries -= 1;
        self.push(frame, order, ring);
        self.free -= 1;
        let covered = order.pages().min(reservation.charge.pages);
        reservation.charge.pages -= covered;
        self.tally(pool, i64::from(order.pages() - covered), -i64::from(covered));
    }

    /// Takes the oldest of `ring` out. The room that it had stays reserved, and its charge goes along.
    pub fn pop(&mut self, ring: usize, reservation: &mut ListReservation<'_>) -> Option<(Frame, Order)> {
        let places = self.places();
        let (frame, order) = self.rings.pop(&places, ring)?;
        // Each descriptor is far away: that of a folio to come is fetched meanwhile.
        if let Some(frame) = self.rings.ahead(&places, ring, FETCHED_AHEAD) {
            self.grown.prefetch(frame);
        }
        reservation.entries += 1;
        self.free += 1;
        let pool = reservation.charge.pool;
        debug_assert_eq!(self.pool_of(ring), pool, "what is popped of a pool is charged to it");
        reservation.charge.pages += order.pages();
        self.tally(pool, 0, i64::from(order.pages()));
        Some((frame, order))
    }

    /// Moves the oldest of `ring` to the young end of `to`, which may be another pool's. Whether there was one.
    pub fn move_oldest(&mut self, ring: usize, to: usize) -> bool {
        let places = self.places();
        let Some((frame, order)) = self.rings.pop(&places, ring) else { return false };
        self.push(frame, order, to);
        let pages = i64::from(order.pages());
        self.tally(self.pool_of(ring), -pages, 0);
        self.tally(self.pool_of(to), pages, 0);
        true
    }

    fn push(&mut self, frame: Frame, order: Order, ring: usize) {
        let places = self.places();
        self.rings.push(&places, ring, frame, order);
    }

    /// Takes the folio that `frame` heads out of its ring, if it is in one, and its pages off the pool's charge. It is
    /// retired under this lock, or was before; its frames are not free yet.
    #[inline]
    pub fn remove(&mut self, frame: Frame) {
        if self.holds(frame) {
            self.remove_held(frame); // folios that reclaim has popped are in none
        }
    }

    fn remove_held(&mut self, frame: Frame) {
        let places = self.places();
        if let Some((ring, order)) = self.rings.remove(&places, frame) {
            self.tally(self.pool_of(ring), -i64::from(order.pages()), 0);
        }
    }

    fn tally(&mut self, pool: PoolNumber, charged: i64, outstanding: i64) {
        if self.tally.pool != pool {
            self.settle();
            self.tally.pool = pool;
        }
        self.tally.charged += charged;
        self.tally.outstanding += outstanding;
    }

    fn settle(&mut self) {
        let ChargeDelta { pool, charged, outstanding } = std::mem::take(&mut self.tally);
        if (charged, outstanding) != (0, 0) {
            self.lists.account(pool).add(charged, outstanding);
        }
    }
}

impl Drop for ListsGuard<'_> {
    /// Entries freed under the lock, dead ones among them, are room for all.
    fn drop(&mut self) {
        self.settle();
        let freed = self.rings.free_entries() - self.free;
        if freed != 0 {
            self.lists.unreserved.fetch_add(freed, Ordering::Relaxed);
        }
    }
}
