//! Rings: queues of frames in chunks, out of the middle of which a frame can be taken.
//!
//! ```text
//!   ring 2   head ----> [2|next| x x 7 9 0 4] --> [2|next| 5 0 6 8 1 3] --> [2|-| 2 . . . . .] <---- tail
//!                              ^ first                  ^ dead                     ^ end
//!
//!   position of frame 9: (this chunk, slot 3)         spare ---> [ ] ---> [ ]
//! ```
//!
//! A chunk is `SLOTS` words: the number of its ring, the next chunk, and entries, each a frame and its order. Frames
//! join at the tail and leave at the head. One that leaves from elsewhere leaves its entry **dead** (0), to be stepped
//! over when the head comes to it; when a ring has more dead entries than living ones and a chunk's worth, all of it
//! goes round once, which leaves the living in their order and the dead behind.
//!
//! **Room.** A ring of n occupied entries, living or dead, has n / E + 2 chunks at most, E being a chunk's entries: all
//! but the first and the last are full. So R rings with as many chunks together as that says for their sum, and 2 R
//! more, always have a spare one when a tail is full. [`Rings::free_entries`] is the rest of this.
//!
//! Invariants (asserted by [`Rings::check`]):
//!  1. A frame has a position exactly while one living entry names it, and the position is that entry's.
//!  2. The living and the dead entries and the pages counted of each ring are those in its chunks.
//!  3. A ring without occupied entries has no chunk.
//!  4. Dead entries are at most as many as the living ones of their ring and a chunk's worth.
//!
//! Not an invariant: the contents of a spare chunk, or of slots beyond the ends of a ring.
//!
//! Locks: the caller's. Cost: some steps for each entry that joins, leaves or moves; going round costs a step for each
//! entry of the ring, at least half of which have died since the last time.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::units::{Frame, Order};

const NIL: u32 = 0;
/// A dead entry; frame 0 is never a folio's.
const DEAD: u32 = 0;
/// Words of a chunk before its entries.
const HEADER: usize = 2;
const RING: usize = 0;
const NEXT: usize = 1;
const ORDER_BITS: u32 = 4;

/// Where a frame's entry is: a chunk, and the entry's number in it.
pub type Position = (u32, u32);

pub trait RingStorage {
    fn words(&self, chunk: u32) -> &[AtomicU32];
    /// Where the frame's entry is; `None`: it has none.
    fn position(&self, frame: Frame) -> Option<Position>;
    fn set_position(&self, frame: Frame, position: Option<Position>);
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Ring {
    head: u32,
    tail: u32,
    /// The entry of the head chunk that goes next.
    first: u32,
    /// The entry of the tail chunk that is filled next.
    end: u32,
    live: u64,
    dead: u64,
    pages: u64,
}

/// Rings of one storage. `SLOTS` is the length of a chunk in words.
#[derive(Debug)]
pub struct Rings<const SLOTS: usize> {
    rings: Vec<Ring>,
    spare: u32,
    spares: u64,
    chunks: u64,
    occupied: u64,
}

fn entry_of(frame: Frame, order: Order) -> u32 {
    frame.0 << ORDER_BITS | u32::from(order.0)
}
fn frame_of(entry: u32) -> (Frame, Order) {
    (Frame(entry >> ORDER_BITS), Order((entry & ((1 << ORDER_BITS) - 1)) as u8))
}

impl<const SLOTS: usize> Rings<SLOTS> {
    /// Entries of a chunk.
    pub const ENTRIES: u64 = (SLOTS - HEADER) as u64;

    /// `rings` empty ones, and no chunk; with memory for `rings_max` rings.
    pub fn new(rings: usize, rings_max: usize) -> Self {
        let mut list = Vec::with_capacity(rings_max);
        list.resize(rings, Ring::default());
        Self { rings: list, spare: NIL, spares: 0, chunks: 0, occupied: 0 }
    }
    /// Adds empty rings, until they are `rings`. Each takes from the room as many entries as its two chunks can hold.
    pub fn grow_to(&mut self, rings: usize) {
        self.rings.resize(rings.max(self.rings.len()), Ring::default());
    }
    pub fn rings(&self) -> usize {
        self.rings.len()
    }

    pub fn pages(&self, ring: usize) -> u64 {
        self.rings[ring].pages
    }
    pub fn pages_from<const N: usize>(&self, first: usize) -> [u64; N] {
        let rings = self.rings[first..].first_chunk::<N>().expect("there are so many rings");
        std::array::from_fn(|at| rings[at].pages)
    }
    pub fn listed(&self) -> u64 {
        self.rings.iter().map(|ring| ring.live).sum()
    }
    /// How many entries more may join; below 0 if chunks are missing for the steps that the present entries may need.
    pub fn free_entries(&self) -> i64 {
        let chunks = self.chunks as i64 - 2 * self.rings.len() as i64;
        chunks * Self::ENTRIES as i64 - self.occupied as i64
    }

    pub fn put_spare(&mut self, storage: &impl RingStorage, chunk: u32) {
        self.chunks += 1;
        self.release(storage, chunk);
    }
    /// Takes a spare chunk out; the caller ensures that room for reserved entries is left.
    pub fn take_spare(&mut self, storage: &impl RingStorage) -> Option<u32> {
        let chunk = self.acquire(storage)?;
        self.chunks -= 1;
        Some(chunk)
    }

    /// Lists a frame as the youngest of `ring`. The caller has room for it.
    ///
    /// # Panics
    /// If there is no chunk for it, or in debug builds, if it is listed.
    pub fn push(&mut self, storage: &impl RingStorage, ring: usize, frame: Frame, order: Order) {
        debug_assert_eq!(storage.position(frame), None, "{frame:?} is listed twice");
        debug_assert_ne!(frame.0, 0, "frame 0 is no folio's");
        if self.rings[ring].tail == NIL || u64::from(self.rings[ring].end) == Self::ENTRIES {
            self.append_chunk(storage, ring);
        }
        let at = &mut self.rings[ring];
        entry(storage, at.tail, at.end).store(entry_of(frame, order), Ordering::Relaxed);
        storage.set_position(frame, Some((at.tail, at.end)));
        at.end += 1;
        at.live += 1;
        self.occupied += 1;
        at.pages += u64::from(order.pages());
    }

    /// Takes the oldest frame of `ring` out, and steps over dead entries before it. Room grows by both.
    pub fn pop(&mut self, storage: &impl RingStorage, ring: usize) -> Option<(Frame, Order)> {
        while let Some(found) = self.take_first(storage, ring) {
            if found == DEAD {
                continue;
            }
            let (frame, order) = frame_of(found);
            storage.set_position(frame, None);
            self.compact(storage, ring);
            return Some((frame, order));
        }
        None
    }

    /// The frame that is popped of `ring` after `ahead` others, if it stands in the same chunk as the oldest; a hint.
    #[inline]
    pub fn ahead(&self, storage: &impl RingStorage, ring: usize, ahead: u32) -> Option<Frame> {
        let (at, entries) = (&self.rings[ring], Self::ENTRIES as u32);
        let (slot, end) = (at.first + ahead, if at.head == at.tail { at.end } else { entries });
        if at.head == NIL || slot >= end {
            return None;
        }
        let found = entry(storage, at.head, slot).load(Ordering::Relaxed);
        (found != DEAD).then(|| frame_of(found).0)
    }

    /// Returns the ring that the frame was in, and its order. May compact the ring.
    pub fn remove(&mut self, storage: &impl RingStorage, frame: Frame) -> Option<(usize, Order)> {
        let (chunk, slot) = storage.position(frame)?;
        let ring = word(storage, chunk, RING).load(Ordering::Relaxed) as usize;
        let (named, order) = frame_of(entry(storage, chunk, slot).swap(DEAD, Ordering::Relaxed));
        debug_assert_eq!(named, frame, "the entry of {frame:?} names another");
        storage.set_position(frame, None);
        let at = &mut self.rings[ring];
        at.live -= 1;
        at.dead += 1;
        at.pages -= u64::from(order.pages());
        self.compact(storage, ring);
        Some((ring, order))
    }

    pub fn ring_of(&self, storage: &impl RingStorage, frame: Frame) -> Option<usize> {
        let (chunk, _) = storage.position(frame)?;
        Some(word(storage, chunk, RING).load(Ordering::Relaxed) as usize)
    }

    /// If too many are dead: moves every living entry behind the last, in order, after which the dead are gone.
    fn compact(&mut self, storage: &impl RingStorage, ring: usize) {
        if self.rings[ring].dead <= self.rings[ring].live + Self::ENTRIES {
            return;
        }
        for _ in 0..self.rings[ring].live + self.rings[ring].dead {
            match self.take_first(storage, ring) {
                None => unreachable!("an entry is counted that is not there"),
                Some(DEAD) => {}
                Some(found) => {
                    let (frame, order) = frame_of(found);
                    storage.set_position(frame, None);
                    self.push(storage, ring, frame, order);
                }
            }
        }
    }

    /// Takes the first entry off, dead or living, and its chunk, if that was the last of it.
    fn take_first(&mut self, storage: &impl RingStorage, ring: usize) -> Option<u32> {
        let at = &mut self.rings[ring];
        if at.head == NIL {
            return None;
        }
        let (chunk, last) = (at.head, at.head == at.tail);
        let found = entry(storage, chunk, at.first).load(Ordering::Relaxed);
        at.first += 1;
        self.occupied -= 1;
        if found == DEAD {
            at.dead -= 1;
        } else {
            at.live -= 1;
            at.pages -= u64::from(frame_of(found).1.pages());
        }
        if last && at.first == at.end {
            *at = Ring::default();
            self.release(storage, chunk);
        } else if u64::from(at.first) == Self::ENTRIES {
            (at.head, at.first) = (word(storage, chunk, NEXT).load(Ordering::Relaxed), 0);
            self.release(storage, chunk);
        }
        Some(found)
    }

    fn append_chunk(&mut self, storage: &impl RingStorage, ring: usize) {
        let chunk = self.acquire(storage).expect("an entry is listed by a reservation");
        word(storage, chunk, RING).store(ring as u32, Ordering::Relaxed);
        word(storage, chunk, NEXT).store(NIL, Ordering::Relaxed);
        let at = &mut self.rings[ring];
        match at.tail {
            NIL => (at.head, at.first) = (chunk, 0),
            tail => word(storage, tail, NEXT).store(chunk, Ordering::Relaxed),
        }
        (at.tail, at.end) = (chunk, 0);
    }

    fn acquire(&mut self, storage: &impl RingStorage) -> Option<u32> {
        let chunk = (self.spare != NIL).then_some(self.spare)?;
        self.spare = word(storage, chunk, NEXT).load(Ordering::Relaxed);
        self.spares -= 1;
        Some(chunk)
    }
    fn release(&mut self, storage: &impl RingStorage, chunk: u32) {
        word(storage, chunk, NEXT).store(self.spare, Ordering::Relaxed);
        self.spare = chunk;
        self.spares += 1;
    }

    /// Checks the rings, and by `wrong` each listed frame with its order. Cost: all entries.
    pub fn check(
        &self,
        storage: &impl RingStorage,
        mut wrong: impl FnMut(Frame, Order) -> Option<String>,
    ) -> Result<(), String> {
        let mut chunks = self.check_spares(storage)?;
        for (number, ring) in self.rings.iter().enumerate() {
            let mut found = Ring { live: 0, dead: 0, pages: 0, ..*ring };
            let (mut chunk, mut slot) = (ring.head, ring.first);
            while chunk != NIL {
                let last = chunk == ring.tail;
                chunks += 1;
                if word(storage, chunk, RING).load(Ordering::Relaxed) as usize != number {
                    return Err(format!("chunk {chunk} of ring {number} says that it is another's"));
                }
                if chunks > self.chunks {
                    return Err(format!("ring {number} has more chunks than there are"));
                }
                for at in slot..if last { ring.end } else { Self::ENTRIES as u32 } {
                    let content = entry(storage, chunk, at).load(Ordering::Relaxed);
                    if content == DEAD {
                        found.dead += 1;
                        continue;
                    }
                    let (frame, order) = frame_of(content);
                    found.live += 1;
                    found.pages += u64::from(order.pages());
                    if storage.position(frame) != Some((chunk, at)) {
                        return Err(format!("{frame:?} in ring {number} says that it stands elsewhere"));
                    }
                    if let Some(what) = wrong(frame, order) {
                        return Err(format!("{frame:?} in ring {number}: {what}"));
                    }
                }
                (chunk, slot) =
                    (if last { NIL } else { word(storage, chunk, NEXT).load(Ordering::Relaxed) }, 0);
            }
            if found != *ring {
                return Err(format!("ring {number} counts {ring:?} and has {found:?}"));
            }
            if ring.dead > ring.live + Self::ENTRIES {
                return Err(format!("ring {number} is more dead than alive: {ring:?}"));
            }
        }
        let occupied: u64 = self.rings.iter().map(|ring| ring.live + ring.dead).sum();
        if occupied != self.occupied {
            return Err(format!("{occupied} entries are occupied, {} counted", self.occupied));
        }
        if chunks != self.chunks {
            return Err(format!("{chunks} chunks are linked, {} counted", self.chunks));
        }
        Ok(())
    }

    fn check_spares(&self, storage: &impl RingStorage) -> Result<u64, String> {
        let (mut chunk, mut spares) = (self.spare, 0);
        while chunk != NIL && spares <= self.spares {
            (chunk, spares) = (word(storage, chunk, NEXT).load(Ordering::Relaxed), spares + 1);
        }
        match spares == self.spares {
            true => Ok(spares),
            false => Err(format!("{} spare chunks are counted, {spares} are there", self.spares)),
        }
    }
}

fn word(storage: &impl RingStorage, chunk: u32, which: usize) -> &AtomicU32 {
    &storage.words(chunk)[which]
}
fn entry(storage: &impl RingStorage, chunk: u32, slot: u32) -> &AtomicU32 {
    &storage.words(chunk)[HEADER + slot as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;
    use std::collections::{HashMap, VecDeque};

    const SLOTS: usize = HEADER + 3;
    const RINGS: usize = 3;
    const FRAMES: u32 = 60;

    struct Memory {
        chunks: Vec<[AtomicU32; SLOTS]>,
        positions: RefCell<HashMap<u32, Position>>,
    }
    impl RingStorage for Memory {
        fn words(&self, chunk: u32) -> &[AtomicU32] {
            &self.chunks[chunk as usize]
        }
        fn position(&self, frame: Frame) -> Option<Position> {
            self.positions.borrow().get(&frame.0).copied()
        }
        fn set_position(&self, frame: Frame, position: Option<Position>) {
            match position {
                Some(position) => drop(self.positions.borrow_mut().insert(frame.0, position)),
                None => drop(self.positions.borrow_mut().remove(&frame.0)),
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(usize, u32, u8),
        Pop(usize),
        Move(usize, usize),
        Remove(u32),
        RemoveMany(u32, u32),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let ring = 0..RINGS;
        let op = prop_oneof![
            6 => (ring.clone(), 1..FRAMES, 0..10u8).prop_map(|(ring, frame, order)| Op::Push(ring, frame, order)),
            1 => ring.clone().prop_map(Op::Pop),
            3 => (ring.clone(), ring).prop_map(|(from, to)| Op::Move(from, to)),
            2 => (1..FRAMES).prop_map(Op::Remove),
            1 => (1..FRAMES, 1..20u32).prop_map(|(from, many)| Op::RemoveMany(from, many)),
        ];
        prop::collection::vec(op, 1..200)
    }

    proptest! {
        /// The twin: a deque for each ring. Chunks are added only where room says that they are missing, so that
        /// a step that needs one more than that panics.
        #[test]
        fn agrees_with_deques(ops in ops()) {
            let chunks = std::iter::repeat_with(|| std::array::from_fn(|_| AtomicU32::new(77)));
            let memory = Memory { chunks: chunks.take(40).collect(), positions: RefCell::default() };
            let mut rings = Rings::<SLOTS>::new(RINGS, RINGS);
            let mut twin: [VecDeque<(u32, u8)>; RINGS] = Default::default();
            let mut next_chunk = 1;
            let drop_one = |twin: &mut [VecDeque<(u32, u8)>; RINGS], frame: u32| {
                twin.iter_mut().enumerate().find_map(|(ring, queue)| {
                    let at = queue.iter().position(|&(listed, _)| listed == frame)?;
                    queue.remove(at);
                    Some(ring)
                })
            };
            for op in ops {
                match op {
                    Op::Push(ring, frame, order) => {
                        if memory.position(Frame(frame)).is_none() {
                            while rings.free_entries() < 1 {
                                rings.put_spare(&memory, next_chunk);
                                next_chunk += 1;
                            }
                            rings.push(&memory, ring, Frame(frame), Order(order));
                            twin[ring].push_back((frame, order));
                        }
                    }
                    Op::Pop(ring) => {
                        let popped = rings.pop(&memory, ring).map(|(frame, order)| (frame.0, order.0));
                        prop_assert_eq!(popped, twin[ring].pop_front());
                    }
                    Op::Move(from, to) => {
                        let moved = rings.pop(&memory, from);
                        if let Some((frame, order)) = moved {
                            rings.push(&memory, to, frame, order);
                        }
                        let theirs = twin[from].pop_front();
                        twin[to].extend(theirs);
                        prop_assert_eq!(moved.map(|(frame, order)| (frame.0, order.0)), theirs);
                    }
                    Op::Remove(frame) => {
                        let removed = rings.remove(&memory, Frame(frame)).map(|(ring, _)| ring);
                        prop_assert_eq!(removed, drop_one(&mut twin, frame));
                    }
                    Op::RemoveMany(from, many) => for frame in from..(from + many).min(FRAMES) {
                        let removed = rings.remove(&memory, Frame(frame)).map(|(ring, _)| ring);
                        prop_assert_eq!(removed, drop_one(&mut twin, frame));
                    },
                }
                prop_assert_eq!(rings.check(&memory, |_, _| None), Ok(()));
                for (ring, queue) in twin.iter().enumerate() {
                    prop_assert_eq!(rings.rings[ring].live, queue.len() as u64);
                    let pages: u64 = queue.iter().map(|&(_, order)| 1 << order).sum();
                    prop_assert_eq!(rings.pages(ring), pages);
                }
            }
            // The rest is as the twin's, in its order; then all chunks are spare.
            for (ring, queue) in twin.iter_mut().enumerate() {
                while let Some((frame, order)) = rings.pop(&memory, ring) {
                    prop_assert_eq!(Some((frame.0, order.0)), queue.pop_front());
                }
                prop_assert!(queue.is_empty());
            }
            let free = std::iter::from_fn(|| rings.take_spare(&memory)).count();
            prop_assert_eq!(free, next_chunk as usize - 1);
        }
    }

    #[test]
    fn check_sees_a_frame_that_is_listed_twice_and_a_page_that_is_not_counted() {
        let chunks = std::iter::repeat_with(|| std::array::from_fn(|_| AtomicU32::new(0)));
        let memory = Memory { chunks: chunks.take(20).collect(), positions: RefCell::default() };
        let mut rings = Rings::<SLOTS>::new(RINGS, RINGS);
        (1..10).for_each(|chunk| rings.put_spare(&memory, chunk));
        rings.push(&memory, 0, Frame(5), Order(2));
        rings.check(&memory, |_, _| None).unwrap();
        assert!(rings.check(&memory, |_, order| Some(format!("{order:?}"))).is_err());
        memory.set_position(Frame(5), None);
        rings.push(&memory, 1, Frame(5), Order(2));
        assert!(rings.check(&memory, |_, _| None).is_err());
        rings.pop(&memory, 0);
        memory.set_position(Frame(5), Some((rings.rings[1].head, 0)));
        rings.check(&memory, |_, _| None).unwrap();
        rings.rings[1].pages += 1;
        assert!(rings.check(&memory, |_, _| None).is_err());
    }
}
