//! Slots: which 4 KiB places of a spill file are taken. Pure: no file, no lock, no clock.
//!
//! ```text
//!   slot      0  1  2  3  4  5  6  7  8  9 10 11
//!             #  #  .  .  #  #  #  #  .  .  .  .        # taken    take(4): 8 to 11, behind the last one taken,
//!                               ^ last                            and only then from the start
//! ```
//!
//! What goes out together should lie together, so that it is written, and comes back, as one run. So a search
//! begins where the last one ended, goes on to the end, and then once more from the start: the next fit. Runs are of
//! one slot to as many as the largest folio has pages, and need no alignment.
//!
//! A slot that is given back while somebody reads it must not become another folio's before he is done. So who reads
//! says so ([`Slots::begin_read`]), and what is freed meanwhile is free when he has ended.
//!
//! Invariants (asserted by [`Slots::check`]):
//!  1. No slot is taken twice, or freed twice.
//!  2. The number of slots taken is counted, and never larger than the bound.
//!  3. A slot that is being read is taken, also if it was freed meanwhile. It is read by one reader at a time.
//!
//! Not an invariant: that a run is found whenever so many slots are free. They may lie apart.
//!
//! Cost: a bit for each slot, so 2 KiB for 64 MiB. A search looks at a word for each 64 slots that it passes, and at
//! two bits for each change from free to taken.

use std::ops::Range;

/// The slots of one spill file.
#[derive(Debug)]
pub struct Slots {
    /// A bit a slot: taken.
    words: Vec<u64>,
    slots: u32,
    taken: u32,
    /// Where the next search begins.
    next: u32,
    /// What is being read; a few.
    reading: Vec<Range<u32>>,
    /// What was freed while it was being read.
    condemned: Vec<Range<u32>>,
}

impl Slots {
    /// So many slots, all free.
    pub fn new(slots: u32) -> Self {
        let words = vec![0; slots.div_ceil(64) as usize];
        Self { words, slots, taken: 0, next: 0, reading: Vec::new(), condemned: Vec::new() }
    }

    /// How many there are.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// How many are taken, those among them that are freed when their reader is done.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Takes `run` slots that follow each other; the first of them. `None`: no such run is free.
    ///
    /// # Panics
    /// If `run` is 0.
    pub fn take(&mut self, run: u32) -> Option<u32> {
        assert!(run > 0, "a run has a slot");
        let found = self.find(self.next..self.slots, run).or_else(|| {
            // A run that begins before that place may end behind it.
            self.find(0..(self.next.saturating_add(run - 1)).min(self.slots), run)
        })?;
        self.set(found..found + run);
        self.taken += run;
        self.next = if found + run == self.slots { 0 } else { found + run };
        Some(found)
    }

    /// Takes just this one; whether it was free.
    pub fn take_this(&mut self, slot: u32) -> bool {
        let free = !self.is_taken(slot);
        if free {
            self.set(slot..slot + 1);
            self.taken += 1;
        }
        free
    }

    /// Gives slots back; those that are being read are free when that has ended.
    ///
    /// # Panics
    /// If one of them is free.
    pub fn free(&mut self, slots: Range<u32>) {
        for slot in slots.clone() {
            let condemned = self.condemned.iter().any(|range| range.contains(&slot));
            assert!(self.is_taken(slot) && !condemned, "slot {slot} is freed twice");
        }
        if self.is_read(&slots) {
            self.condemned.extend(slots.map(|slot| slot..slot + 1));
            self.settle();
        } else {
            self.release(slots);
        }
    }

    /// Somebody is about to read these slots, which are taken; until [`Slots::end_read`] they stay so. `false`: another
    /// one is reading some of them.
    pub fn begin_read(&mut self, slots: Range<u32>) -> bool {
        debug_assert!(slots.clone().all(|slot| self.is_taken(slot)), "{slots:?} are read, and free");
        let free = !self.is_read(&slots);
        if free {
            self.reading.push(slots);
        }
        free
    }

    /// Who began to read `slots` is done.
    ///
    /// # Panics
    /// If nobody began just that.
    pub fn end_read(&mut self, slots: Range<u32>) {
        let place = self.reading.iter().position(|other| *other == slots);
        self.reading.swap_remove(place.expect("what is ended was begun"));
        self.settle();
    }

    /// Whether one of these is being read.
    pub fn is_read(&self, slots: &Range<u32>) -> bool {
        self.reading.iter().any(|other| other.start < slots.end && slots.start < other.end)
    }

    /// Whether a slot is taken.
    pub fn is_taken(&self, slot: u32) -> bool {
        slot < self.slots && self.words[slot as usize / 64] >> (slot % 64) & 1 == 1
    }

    /// How many were freed and are still being read.
    pub fn condemned(&self) -> u32 {
        self.condemned.iter().map(|range| range.end - range.start).sum()
    }

    /// What is wrong, if anything. Cost: a step for each 64 slots.
    pub fn check(&self) -> Result<(), String> {
        let counted: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        if counted != self.taken || self.taken > self.slots {
            return Err(format!("{counted} of {} slots are taken, and {} counted", self.slots, self.taken));
        }
        for range in self.reading.iter().chain(&self.condemned) {
            if let Some(slot) = range.clone().find(|&slot| !self.is_taken(slot)) {
                return Err(format!("slot {slot} is being read, or was, and is free"));
            }
        }
        match self.condemned.iter().find(|range| !self.is_read(range)) {
            Some(range) => Err(format!("slots {range:?} were freed, and nobody reads them")),
            None => Ok(()),
        }
    }

    /// Frees what was condemned and is not being read any more.
    fn settle(&mut self) {
        let (still, now): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.condemned).into_iter().partition(|range| self.is_read(range));
        self.condemned = still;
        now.into_iter().for_each(|range| self.release(range));
    }

    fn release(&mut self, slots: Range<u32>) {
        self.taken -= slots.end - slots.start;
        slots.for_each(|slot| self.words[slot as usize / 64] &= !(1 << (slot % 64)));
    }

    fn set(&mut self, slots: Range<u32>) {
        slots.for_each(|slot| self.words[slot as usize / 64] |= 1 << (slot % 64));
    }

    /// The first run of free slots within `range`.
    fn find(&self, range: Range<u32>, run: u32) -> Option<u32> {
        let mut at = range.start;
        while at < range.end && run <= range.end - at {
            let first = self.next_free(at, range.end)?;
            let end = first.checked_add(run).filter(|end| *end <= range.end)?;
            match self.next_taken(first, end) {
                None => return Some(first),
                Some(taken) => at = taken + 1,
            }
        }
        None
    }

    fn next_free(&self, from: u32, end: u32) -> Option<u32> {
        self.next_bit(from, end, |word| !word)
    }

    fn next_taken(&self, from: u32, end: u32) -> Option<u32> {
        self.next_bit(from, end, |word| word)
    }

    /// The first slot from `from` on and before `end` whose bit is set in what `of` makes of its word.
    fn next_bit(&self, from: u32, end: u32, of: impl Fn(u64) -> u64) -> Option<u32> {
        let mut at = from;
        while at < end {
            let rest = of(self.words[at as usize / 64]) >> (at % 64);
            if rest != 0 {
                return Some(at + rest.trailing_zeros()).filter(|slot| *slot < end);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_run_that_begins_before_the_last_place_and_ends_behind_it_is_found() {
        let mut slots = Slots::new(8);
        assert_eq!((slots.take(3), slots.take(3)), (Some(0), Some(3)));
        slots.free(0..6);
        assert_eq!(slots.take(8), Some(0), "all of them, and the next fit begins at 6");
        assert_eq!((slots.take(1), slots.taken()), (None, 8));
    }

    #[test]
    fn what_is_freed_while_it_is_read_is_free_when_that_has_ended() {
        let mut slots = Slots::new(4);
        assert_eq!(slots.take(4), Some(0));
        assert!(slots.begin_read(1..3));
        assert!(!slots.begin_read(2..4), "one reader at a time");
        slots.free(0..4);
        assert_eq!((slots.taken(), slots.condemned(), slots.take(2)), (2, 2, None));
        slots.check().unwrap();
        slots.end_read(1..3);
        assert_eq!((slots.taken(), slots.condemned(), slots.take(4)), (0, 0, Some(0)));
    }

    #[test]
    #[should_panic(expected = "slot 1 is freed twice")]
    fn a_slot_is_freed_once_also_while_it_is_read() {
        let mut slots = Slots::new(2);
        slots.take(2);
        assert!(slots.begin_read(0..2));
        slots.free(1..2);
        slots.free(0..2);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Take(u32),
        /// Frees a part of what a take got.
        Free(usize, u32, u32),
        BeginRead(usize),
        EndRead(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (1u32..40).prop_map(Op::Take),
            3 => (any::<usize>(), 0u32..40, 1u32..40).prop_map(|(which, from, len)| Op::Free(which, from, len)),
            1 => any::<usize>().prop_map(Op::BeginRead),
            1 => any::<usize>().prop_map(Op::EndRead),
        ]
    }

    /// The naive twin: which slots are owned, and which are being read, one by one.
    #[derive(Default)]
    struct Twin {
        owned: BTreeSet<u32>,
        condemned: BTreeSet<u32>,
        reading: Vec<Range<u32>>,
        runs: Vec<Range<u32>>,
    }

    impl Twin {
        fn is_read(&self, slot: u32) -> bool {
            self.reading.iter().any(|range| range.contains(&slot))
        }
        fn is_taken(&self, slot: u32) -> bool {
            self.owned.contains(&slot) || self.condemned.contains(&slot)
        }
        fn has_run(&self, slots: u32, run: u32) -> bool {
            (0..slots)
                .any(|first| first + run <= slots && (first..first + run).all(|slot| !self.is_taken(slot)))
        }
    }

    proptest! {
        #[test]
        fn slots_do_what_a_set_of_numbers_does(
            count in 1u32..200,
            ops in proptest::collection::vec(op(), 1..120),
        ) {
            let (mut slots, mut twin) = (Slots::new(count), Twin::default());
            for op in ops {
                match op {
                    Op::Take(run) => match slots.take(run) {
                        Some(first) => {
                            prop_assert!(first + run <= count);
                            prop_assert!((first..first + run).all(|slot| !twin.is_taken(slot)));
                            twin.owned.extend(first..first + run);
                            twin.runs.push(first..first + run);
                        }
                        None => prop_assert!(!twin.has_run(count, run), "a run of {run} is free"),
                    },
                    Op::Free(which, from, len) if !twin.runs.is_empty() => {
                        let run = twin.runs.swap_remove(which % twin.runs.len());
                        let start = run.start + from % (run.end - run.start);
                        let end = run.end.min(start + len);
                        slots.free(start..end);
                        for slot in start..end {
                            twin.owned.remove(&slot);
                            if twin.is_read(slot) {
                                twin.condemned.insert(slot);
                            }
                        }
                        twin.runs.extend([run.start..start, end..run.end].into_iter().filter(|run| !run.is_empty()));
                    }
                    Op::BeginRead(which) if !twin.runs.is_empty() => {
                        let run = twin.runs[which % twin.runs.len()].clone();
                        let begun = slots.begin_read(run.clone());
                        prop_assert_eq!(begun, !run.clone().any(|slot| twin.is_read(slot)));
                        if begun {
                            twin.reading.push(run);
                        }
                    }
                    Op::EndRead(which) if !twin.reading.is_empty() => {
                        let run = twin.reading.swap_remove(which % twin.reading.len());
                        slots.end_read(run);
                        let still: BTreeSet<u32> =
                            twin.condemned.iter().copied().filter(|&slot| twin.is_read(slot)).collect();
                        twin.condemned = still;
                    }
                    _ => {}
                }
                prop_assert_eq!(slots.check(), Ok(()));
                prop_assert_eq!(slots.taken() as usize, twin.owned.len() + twin.condemned.len());
                prop_assert_eq!(slots.condemned() as usize, twin.condemned.len());
                prop_assert!((0..count).all(|slot| slots.is_taken(slot) == twin.is_taken(slot)));
            }
        }
    }
}
