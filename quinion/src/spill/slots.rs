//! Slots: which 4 KiB places of a spill file are taken. Pure: no file, no lock, no clock.
//!
//! ```text
//!   slot      0  1  2  3  4  5  6  7  8  9 10 11
//!             #  #  .  .  #  #  #  #  .  .  .  .        # taken    take(4): 8 to 11, behind the last one taken,
//!                               ^ last                            and only then from the start
//! ```
//!
//! Pages that are spilled together should lie together, so that one run writes them, and one reads them. So a search
//! begins where the last one ended, and wraps once: the next fit. Runs need no alignment.
//!
//! A slot freed while a thread reads it must not become another folio's before. A thread that will put the bytes back
//! into memory reads alone ([`SpillSlots::begin_read`]); threads that only want to know them share
//! ([`SpillSlots::begin_share`]), with each other and with the one that reads alone: so no thread waits for them.
//!
//! Invariants (asserted by [`SpillSlots::check`]):
//!  1. No slot is taken twice, or freed twice.
//!  2. The number of slots taken is counted, and never larger than the bound.
//!  3. A slot that is being read is taken, also if it was freed meanwhile. One reader at a time is alone with it,
//!     beside those that share it.
//!
//! Not an invariant: that a run is found whenever so many slots are free. They may lie apart.
//!
//! Cost: three bits for each slot, so 6 KiB for 64 MiB, and an entry of a map for each that is shared. A search looks
//! at a word for each 64 slots that it passes.

use std::collections::BTreeMap;
use std::ops::Range;

/// The slots of one spill file.
#[derive(Debug)]
pub struct SpillSlots {
    words: Vec<u64>,
    slots: u32,
    taken: u32,
    next: u32,
    reading: Vec<u64>,
    /// By how many readers a slot is shared; those of none are not in it.
    shared: BTreeMap<u32, u32>,
    condemned_words: Vec<u64>,
    condemned: u32,
}

fn has(words: &[u64], slot: u32) -> bool {
    words[slot as usize / 64] >> (slot % 64) & 1 == 1
}
fn set(words: &mut [u64], slot: u32) {
    words[slot as usize / 64] |= 1 << (slot % 64);
}
fn clear(words: &mut [u64], slot: u32) {
    words[slot as usize / 64] &= !(1 << (slot % 64));
}

impl SpillSlots {
    /// A file of `slots` slots, all free.
    pub fn new(slots: u32) -> Self {
        let words = || vec![0; slots.div_ceil(64) as usize];
        let (reading, condemned_words) = (words(), words());
        let shared = BTreeMap::new();
        Self { words: words(), slots, taken: 0, next: 0, reading, shared, condemned_words, condemned: 0 }
    }

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
        (found..found + run).for_each(|slot| set(&mut self.words, slot));
        self.taken += run;
        self.next = if found + run == self.slots { 0 } else { found + run };
        Some(found)
    }

    /// Takes just this one; whether it was free.
    pub fn take_this(&mut self, slot: u32) -> bool {
        let free = !self.is_taken(slot);
        if free {
            set(&mut self.words, slot);
            self.taken += 1;
        }
        free
    }

    /// Gives slots back; those that are being read are free when that has ended.
    ///
    /// # Panics
    /// If one of them is free.
    pub fn free(&mut self, slots: Range<u32>) {
        for slot in slots {
            let is_condemned = self.is_taken(slot) && has(&self.condemned_words, slot);
            assert!(self.is_taken(slot) && !is_condemned, "slot {slot} is freed twice");
            if has(&self.reading, slot) || self.shared.contains_key(&slot) {
                set(&mut self.condemned_words, slot);
                self.condemned += 1;
            } else {
                self.release(slot);
            }
        }
    }

    /// A thread is about to read these slots, which are taken; until [`SpillSlots::end_read`] they stay so.
    /// `false`: another thread is reading some of them.
    pub fn begin_read(&mut self, slots: Range<u32>) -> bool {
        debug_assert!(slots.clone().all(|slot| self.is_taken(slot)), "{slots:?} are read, and free");
        let free = !self.is_read(&slots);
        if free {
            slots.for_each(|slot| set(&mut self.reading, slot));
        }
        free
    }

    /// The reader of `slots` is done.
    ///
    /// # Panics
    /// If one of them is not being read.
    pub fn end_read(&mut self, slots: Range<u32>) {
        for slot in slots {
            assert!(has(&self.reading, slot), "slot {slot} is being read until that ends");
            clear(&mut self.reading, slot);
            self.release_if_condemned(slot);
        }
    }

    /// One more thread is about to read these slots, which are taken; until it has called [`SpillSlots::end_share`]
    /// they stay so.
    pub fn begin_share(&mut self, slots: Range<u32>) {
        debug_assert!(slots.clone().all(|slot| self.is_taken(slot)), "{slots:?} are read, and free");
        slots.for_each(|slot| *self.shared.entry(slot).or_default() += 1);
    }

    /// A thread that shared `slots` is done; whether some of them are free now.
    ///
    /// # Panics
    /// If one of them is not shared.
    pub fn end_share(&mut self, slots: Range<u32>) -> bool {
        let taken = self.taken;
        for slot in slots {
            let readers = self.shared.get_mut(&slot).expect("a slot is shared until that ends");
            *readers -= 1;
            if *readers == 0 {
                self.shared.remove(&slot);
                self.release_if_condemned(slot);
            }
        }
        self.taken < taken
    }

    /// Whether a thread is alone with one of these, reading.
    pub fn is_read(&self, slots: &Range<u32>) -> bool {
        slots.clone().any(|slot| has(&self.reading, slot))
    }

    pub fn is_taken(&self, slot: u32) -> bool {
        slot < self.slots && has(&self.words, slot)
    }

    /// How many were freed and are still being read.
    pub fn condemned(&self) -> u32 {
        self.condemned
    }

    /// Checks the counts. Cost: a step for each 64 slots.
    pub fn check(&self) -> Result<(), String> {
        let counted: u32 = self.words.iter().map(|word| word.count_ones()).sum();
        if counted != self.taken || self.taken > self.slots {
            return Err(format!("{counted} of {} slots are taken, and {} counted", self.slots, self.taken));
        }
        let condemned: u32 = self.condemned_words.iter().map(|word| word.count_ones()).sum();
        if condemned != self.condemned {
            return Err(format!(
                "{condemned} slots were freed while they are read, and {} counted",
                self.condemned
            ));
        }
        for (nth, &taken) in self.words.iter().enumerate() {
            let (first, condemned) = (nth as u32 * 64, self.condemned_words[nth]);
            let shared = self.shared.range(first..first + 64);
            let shared = shared.fold(0, |bits: u64, (&slot, _)| bits | 1 << (slot - first));
            let reading = self.reading[nth] | shared;
            if reading & !taken != 0 {
                return Err(format!("of the slots from {} on one is being read, and is free", nth * 64));
            }
            if condemned & !reading != 0 {
                return Err(format!(
                    "of the slots from {} on one waits for its last reader, and has none",
                    nth * 64
                ));
            }
        }
        Ok(())
    }

    /// A reader of `slot` is done: if it was freed meanwhile, and has no other reader, it is free.
    fn release_if_condemned(&mut self, slot: u32) {
        let is_read = has(&self.reading, slot) || self.shared.contains_key(&slot);
        if has(&self.condemned_words, slot) && !is_read {
            clear(&mut self.condemned_words, slot);
            self.condemned -= 1;
            self.release(slot);
        }
    }

    fn release(&mut self, slot: u32) {
        self.taken -= 1;
        clear(&mut self.words, slot);
    }

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

    /// The first slot from `from` on and before `end` whose bit is set after `of` has mapped its word.
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
        let mut slots = SpillSlots::new(8);
        assert_eq!((slots.take(3), slots.take(3)), (Some(0), Some(3)));
        slots.free(0..6);
        assert_eq!(slots.take(8), Some(0), "all of them, and the next fit begins at 6");
        assert_eq!((slots.take(1), slots.taken()), (None, 8));
    }

    #[test]
    fn slots_freed_during_a_read_are_free_when_it_has_ended() {
        let mut slots = SpillSlots::new(4);
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
    fn a_shared_slot_is_free_when_its_last_reader_is_done_and_holds_up_none() {
        let mut slots = SpillSlots::new(4);
        assert_eq!(slots.take(4), Some(0));
        slots.begin_share(0..3);
        slots.begin_share(2..4);
        assert!(slots.begin_read(1..3), "the one that reads alone does not wait for them");
        slots.free(0..4);
        assert_eq!((slots.taken(), slots.condemned()), (4, 4));
        slots.check().unwrap();
        slots.end_read(1..3);
        assert_eq!((slots.taken(), slots.end_share(0..3)), (4, true));
        assert_eq!((slots.taken(), slots.condemned()), (2, 2), "slots 2 and 3 are still shared");
        slots.check().unwrap();
        assert!(slots.end_share(2..4));
        assert_eq!((slots.taken(), slots.condemned(), slots.take(4)), (0, 0, Some(0)));
        slots.begin_share(0..1);
        assert!(!slots.end_share(0..1), "it was not freed");
        assert_eq!(slots.taken(), 4);
    }

    #[test]
    #[should_panic(expected = "slot 1 is freed twice")]
    fn a_slot_is_freed_once_also_while_it_is_read() {
        let mut slots = SpillSlots::new(2);
        slots.take(2);
        assert!(slots.begin_read(0..2));
        slots.free(1..2);
        slots.free(0..2);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Take(u32),
        Free(usize, u32, u32),
        BeginRead(usize),
        EndRead(usize),
        BeginShare(usize),
        EndShare(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (1u32..40).prop_map(Op::Take),
            3 => (any::<usize>(), 0u32..40, 1u32..40).prop_map(|(which, from, len)| Op::Free(which, from, len)),
            1 => any::<usize>().prop_map(Op::BeginRead),
            1 => any::<usize>().prop_map(Op::EndRead),
            1 => any::<usize>().prop_map(Op::BeginShare),
            1 => any::<usize>().prop_map(Op::EndShare),
        ]
    }

    #[derive(Default)]
    struct Twin {
        owned: BTreeSet<u32>,
        condemned: BTreeSet<u32>,
        reading: Vec<Range<u32>>,
        sharing: Vec<Range<u32>>,
        runs: Vec<Range<u32>>,
    }

    impl Twin {
        fn is_read(&self, slot: u32) -> bool {
            self.reading.iter().any(|range| range.contains(&slot))
        }
        fn is_shared(&self, slot: u32) -> bool {
            self.sharing.iter().any(|range| range.contains(&slot))
        }
        fn end_reads(&mut self) {
            let condemned = std::mem::take(&mut self.condemned).into_iter();
            self.condemned = condemned.filter(|&slot| self.is_read(slot) || self.is_shared(slot)).collect();
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
        fn slots_behave_as_a_set_of_numbers(
            count in 1u32..200,
            ops in proptest::collection::vec(op(), 1..120),
        ) {
            let (mut slots, mut twin) = (SpillSlots::new(count), Twin::default());
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
                            if twin.is_read(slot) || twin.is_shared(slot) {
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
                        twin.end_reads();
                    }
                    Op::BeginShare(which) if !twin.runs.is_empty() => {
                        let run = twin.runs[which % twin.runs.len()].clone();
                        slots.begin_share(run.clone());
                        twin.sharing.push(run);
                    }
                    Op::EndShare(which) if !twin.sharing.is_empty() => {
                        let run = twin.sharing.swap_remove(which % twin.sharing.len());
                        let before = twin.condemned.len();
                        let freed = slots.end_share(run);
                        twin.end_reads();
                        prop_assert_eq!(freed, twin.condemned.len() < before);
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
