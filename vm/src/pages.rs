//! Pages: the state of each page of a VM's memory, and the answer that a fault there needs.
//!
//! ```text
//!   addresses   base                                        the VM says where its regions are
//!   region      [ . . # # # . . - - . ]      . absent    it was not supplied yet: the image has it
//!   image         offset                     # present   it was supplied; whatever it is now is the VM's
//!                                            - removed   it was given back: it is zeros, and not mapped
//!
//!   fault on .   supply: the absent ones around it, in its aligned run
//!   fault on -   zeros:  the removed ones around it, in its aligned run; they are present then
//!   fault on #   look:   it is there, or was given back without a word: zeros, if nothing is there
//! ```
//!
//! Pure: numbers in, a decision out. A **unit** is the page size that maps the VM's memory, 4 KiB or 2 MiB, and two
//! bits give its state: a GiB of 4 KiB pages takes 64 KiB.
//!
//! **Removed for good.** A page that was given back never becomes absent again: the image's bytes must not come back.
//! A page that is present and faults is treated so too. Either two processors touched one page, or a thread gave
//! memory back without asking to have that told (`UFFD_FEATURE_EVENT_REMOVE`), and expects zeros as well.
//!
//! **Out of order.** The kernel hands out faults before the events that came earlier. So all events that can be read
//! are noted before any fault is answered, and an answer that the kernel refuses because there are events again is
//! decided anew when they are noted.
//!
//! Invariants (asserted by `Pages::check`):
//!  1. Regions stand in the order of their addresses and do not overlap.
//!  2. Bases, offsets and lengths are multiples of the unit.
//!  3. There are [`PIECES_MAX`] at most, however often the VM cuts its memory up.
//!
//! Not an invariant: that two regions have different parts of the image. They begin so.

use std::ops::Range;

/// How many pieces a VM's regions may be cut into by unmapping and moving.
pub const PIECES_MAX: usize = 1024;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum SupplyState {
    /// The page was not supplied yet.
    Absent = 0,
    /// The page was supplied.
    Present = 1,
    /// The page was given back, and is zeros.
    Removed = 2,
}

/// The answer that a fault needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageNeed {
    /// The bytes of this part of the image.
    Supply(ImagePart),
    /// Zeros.
    Zeros {
        /// The first address in the VM.
        address: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// Zeros for one page, if nothing is there; else a waiting thread may continue.
    CheckPresent {
        /// The first address in the VM.
        address: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// No region has that address.
    Nowhere,
}

/// Part of an image that belongs to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImagePart {
    /// Where in the VM.
    pub address: u64,
    /// Where in the image.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl ImagePart {
    /// The page of it at `address`, which has `unit` bytes.
    pub(crate) fn page(self, address: u64, unit: u64) -> Self {
        Self { address, offset: self.offset + (address - self.address), bytes: unit }
    }
}

/// The VM's regions are in more than 1024 pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the VM has cut its memory into more than {PIECES_MAX} pieces; let it unmap and move larger ones")]
pub struct TooManyPieces;

/// Why a move cannot be followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveError {
    /// The move cuts the memory into too many pieces.
    TooManyPieces(TooManyPieces),
    /// The distance is no multiple of the unit: the memory has smaller pages than the VM has said.
    BetweenPages,
}

/// A region as the VM describes it, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRegion {
    /// The region's first address.
    pub base: u64,
    /// Where it begins in the image.
    pub offset: u64,
    /// The region's length in bytes.
    pub bytes: u64,
}

/// A region with the state of each of its pages, two bits a page, the first page in the lowest bits of the first word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionStates {
    /// The region's first address.
    pub base: u64,
    /// Where it begins in the image.
    pub offset: u64,
    /// How many pages it has.
    pub pages: u64,
    /// The states of the pages; bits behind the last page are 0.
    pub words: Vec<u64>,
}

/// The pages of one VM.
#[derive(Clone, Debug)]
pub struct Pages {
    unit: u64,
    regions: Vec<RegionPages>,
}

#[derive(Clone, Debug)]
struct RegionPages {
    base: u64,
    offset: u64,
    states: States,
}

impl RegionPages {
    fn end(&self, unit: u64) -> u64 {
        self.base + self.states.len as u64 * unit
    }
}

#[derive(Clone, Debug, Default)]
struct States {
    words: Vec<u64>,
    len: usize,
}

const IN_WORD: usize = 32;

impl States {
    fn absent(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(IN_WORD)], len }
    }

    fn get(&self, at: usize) -> SupplyState {
        assert!(at < self.len);
        match (self.words[at / IN_WORD] >> (at % IN_WORD * 2)) & 3 {
            0 => SupplyState::Absent,
            1 => SupplyState::Present,
            _ => SupplyState::Removed,
        }
    }

    fn set(&mut self, range: Range<usize>, state: SupplyState) {
        assert!(range.end <= self.len);
        let all = u64::MAX / 3 * u64::from(state as u8);
        let mut at = range.start;
        while at < range.end {
            let (word, first) = (at / IN_WORD, at % IN_WORD);
            let count = (IN_WORD - first).min(range.end - at);
            let mask = (u64::MAX >> (64 - 2 * count)) << (2 * first);
            self.words[word] = self.words[word] & !mask | all & mask;
            at += count;
        }
    }

    fn run(&self, at: usize, within: Range<usize>, state: SupplyState) -> Range<usize> {
        let back = (within.start..at).rev().take_while(|&i| self.get(i) == state).count();
        let on = (at..within.end.min(self.len)).take_while(|&i| self.get(i) == state).count();
        at - back..at + on
    }

    fn part(&self, range: Range<usize>) -> Self {
        let mut part = Self::absent(range.len());
        for (to, from) in range.enumerate() {
            part.set(to..to + 1, self.get(from));
        }
        part
    }
}

impl Pages {
    /// Pages that are all absent. `unit` is a power of two; the places are non-empty multiples of it, do not overlap,
    /// and none ends behind the last address.
    pub fn new(unit: u64, places: &[MappedRegion]) -> Self {
        let region = |place: &MappedRegion| RegionPages {
            base: place.base,
            offset: place.offset,
            states: States::absent((place.bytes / unit) as usize),
        };
        let mut regions: Vec<RegionPages> = places.iter().map(region).collect();
        regions.sort_by_key(|region| region.base);
        let pages = Self { unit, regions };
        pages.check();
        pages
    }

    /// Pages in these states, as [`Pages::states`] told of them: the regions stand in the order of their addresses, do
    /// not overlap, and are [`PIECES_MAX`] at most.
    pub fn of_states(unit: u64, regions: Vec<RegionStates>) -> Self {
        let region = |region: RegionStates| RegionPages {
            base: region.base,
            offset: region.offset,
            states: States { words: region.words, len: region.pages as usize },
        };
        let pages = Self { unit, regions: regions.into_iter().map(region).collect() };
        pages.check();
        pages
    }

    /// Each region with the states of its pages, in the order of their addresses.
    pub fn states(&self) -> impl Iterator<Item = RegionStates> + '_ {
        self.regions.iter().map(|region| {
            let RegionPages { base, offset, states: States { words, len } } = region;
            let (mut words, used) = (words.clone(), len % IN_WORD);
            if let Some(last) = words.last_mut().filter(|_| used > 0) {
                *last &= u64::MAX >> (64 - 2 * used);
            }
            RegionStates { base: *base, offset: *offset, pages: *len as u64, words }
        })
    }

    /// The size of the pages by which the memory is mapped, in bytes.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// The addresses of each region.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.regions.iter().map(|region| region.base..region.end(self.unit))
    }

    fn find(&self, address: u64) -> Option<(usize, usize)> {
        let number = self.regions.partition_point(|region| region.base <= address).checked_sub(1)?;
        let region = &self.regions[number];
        (address < region.end(self.unit)).then(|| (number, ((address - region.base) / self.unit) as usize))
    }

    /// The answer that a fault at `address` needs, `run_bytes` at a time: a power of two.
    pub fn need(&self, address: u64, run_bytes: u64) -> PageNeed {
        let Some((number, at)) = self.find(address) else { return PageNeed::Nowhere };
        let (region, unit) = (&self.regions[number], self.unit);
        let state = region.states.get(at);
        // Runs are aligned in the image, so that all its VMs ask for the same ones.
        let per_run = (run_bytes / unit).max(1);
        let skew = region.offset / unit % per_run;
        let begin = ((at as u64 + skew) / per_run * per_run).saturating_sub(skew);
        let end = (at as u64 + skew) / per_run * per_run + per_run - skew;
        let run = match state {
            SupplyState::Present => at..at + 1,
            _ => region.states.run(at, begin as usize..end as usize, state),
        };
        let (address, bytes) = (region.base + run.start as u64 * unit, run.len() as u64 * unit);
        match state {
            SupplyState::Absent => PageNeed::Supply(ImagePart {
                address,
                offset: region.offset + run.start as u64 * unit,
                bytes,
            }),
            SupplyState::Removed => PageNeed::Zeros { address, bytes },
            SupplyState::Present => PageNeed::CheckPresent { address, bytes },
        }
    }

    /// The absent parts of `bytes` bytes of the image at `offset`, in all regions.
    pub fn absent_in(&self, offset: u64, bytes: u64) -> Vec<ImagePart> {
        let mut found = Vec::new();
        for region in &self.regions {
            let begin = offset.max(region.offset).saturating_sub(region.offset);
            self.absent_of(region, begin..(offset + bytes).saturating_sub(region.offset), &mut found);
        }
        found
    }

    /// The absent parts of these addresses.
    pub fn absent_at(&self, addresses: &Range<u64>) -> Vec<ImagePart> {
        let mut found = Vec::new();
        for region in &self.regions {
            let begin = addresses.start.saturating_sub(region.base);
            self.absent_of(region, begin..addresses.end.saturating_sub(region.base), &mut found);
        }
        found
    }

    /// Finds the absent parts of `bytes`, counted from where the region begins; it may end behind the region.
    fn absent_of(&self, region: &RegionPages, bytes: Range<u64>, found: &mut Vec<ImagePart>) {
        let unit = self.unit;
        let end = (bytes.end.div_ceil(unit) as usize).min(region.states.len);
        let mut at = (bytes.start / unit) as usize;
        while at < end {
            let state = region.states.get(at);
            let run = region.states.run(at, at..end, state);
            if state == SupplyState::Absent {
                found.push(ImagePart {
                    address: region.base + at as u64 * unit,
                    offset: region.offset + at as u64 * unit,
                    bytes: run.len() as u64 * unit,
                });
            }
            at = run.end;
        }
    }

    /// Notes that pages were supplied; addresses outside every region are ignored.
    pub fn supplied(&mut self, range: Range<u64>) {
        self.set(range, SupplyState::Present);
    }

    /// Notes that pages were given back. Of a page of 2 MiB that is all of it or nothing.
    pub fn removed(&mut self, range: Range<u64>) {
        self.set(range, SupplyState::Removed);
    }

    /// Notes that pages were given back whose next touch is to find the image's bytes.
    pub fn forgotten(&mut self, range: Range<u64>) {
        self.set(range, SupplyState::Absent);
    }

    fn set(&mut self, range: Range<u64>, state: SupplyState) {
        let unit = self.unit;
        for region in &mut self.regions {
            let (begin, end) = (range.start.max(region.base), range.end.min(region.end(unit)));
            if begin < end {
                let (first, last) = ((begin - region.base).div_ceil(unit), (end - region.base) / unit);
                region.states.set(first as usize..last.max(first) as usize, state);
            }
        }
    }

    /// Notes that addresses are no more.
    ///
    /// # Errors
    /// Too many pieces; the pages are as they were.
    pub fn unmapped(&mut self, range: Range<u64>) -> Result<(), TooManyPieces> {
        let mut regions = Vec::with_capacity(self.regions.len() + 1);
        for region in &self.regions {
            let (before, _, after) = self.cut(region, &range);
            regions.extend(before.into_iter().chain(after));
        }
        self.replace(regions)
    }

    /// Notes that `len` bytes went from `from` to `to`.
    ///
    /// # Errors
    /// See [`MoveError`]; the pages are as they were.
    pub fn moved(&mut self, from: u64, to: u64, len: u64) -> Result<(), MoveError> {
        let (gone, target) = (from..from.saturating_add(len), to..to.saturating_add(len));
        let (mut regions, mut moved) = (Vec::new(), Vec::new());
        for region in &self.regions {
            let (before, inside, after) = self.cut(region, &gone);
            regions.extend(before.into_iter().chain(after));
            moved.extend(inside.map(|piece| RegionPages { base: piece.base - from + to, ..piece }));
        }
        if !moved.is_empty() && !to.wrapping_sub(from).is_multiple_of(self.unit) {
            return Err(MoveError::BetweenPages);
        }
        // The mappings that were there before are gone.
        let mut cleared = Vec::with_capacity(regions.len() + moved.len());
        for region in &regions {
            let (before, _, after) = self.cut(region, &target);
            cleared.extend(before.into_iter().chain(after));
        }
        cleared.append(&mut moved);
        self.replace(cleared).map_err(MoveError::TooManyPieces)
    }

    fn cut(
        &self,
        region: &RegionPages,
        range: &Range<u64>,
    ) -> (Option<RegionPages>, Option<RegionPages>, Option<RegionPages>) {
        let (unit, len) = (self.unit, region.states.len as u64);
        let from = (range.start.max(region.base) - region.base).div_ceil(unit).min(len);
        let to = ((range.end.max(region.base) - region.base) / unit).clamp(from, len);
        let part = |units: Range<u64>| {
            (!units.is_empty()).then(|| RegionPages {
                base: region.base + units.start * unit,
                offset: region.offset + units.start * unit,
                states: region.states.part(units.start as usize..units.end as usize),
            })
        };
        if from == to {
            return (part(0..len), None, None);
        }
        (part(0..from), part(from..to), part(to..len))
    }

    fn replace(&mut self, mut regions: Vec<RegionPages>) -> Result<(), TooManyPieces> {
        if regions.len() > PIECES_MAX {
            return Err(TooManyPieces);
        }
        regions.sort_by_key(|region| region.base);
        self.regions = regions;
        Ok(())
    }

    /// Bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.states.len as u64 * self.unit).sum()
    }

    /// Where the last region ends in the image.
    pub fn image_end(&self) -> u64 {
        let end = |region: &RegionPages| region.offset + region.states.len as u64 * self.unit;
        self.regions.iter().map(end).max().unwrap_or(0)
    }

    /// Asserts the invariants; see the head of this file.
    pub fn check(&self) {
        assert!(self.unit.is_power_of_two() && self.regions.len() <= PIECES_MAX);
        let mut end = 0;
        for region in &self.regions {
            assert!(region.base >= end, "regions overlap");
            assert!(region.states.len > 0 && (region.base | region.offset).is_multiple_of(self.unit));
            end = region.end(self.unit);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::takeover::{parse_states, states_bytes};

    const UNIT: u64 = 4096;
    const SPAN: u64 = 96;

    /// The naive twin: for each unit's number by address, its place in the image and its state.
    type Twin = BTreeMap<u64, (u64, SupplyState)>;

    #[derive(Clone, Debug)]
    enum Op {
        Fault(u64, u32),
        Removed(u64, u64),
        Unmapped(u64, u64),
        Moved(u64, u64, u64),
        Absent(u64, u64),
        AbsentAt(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let (at, len) = (0..SPAN, 1..20_u64);
        prop_oneof![
            6 => (at.clone(), 0..6_u32).prop_map(|(at, order)| Op::Fault(at, order)),
            3 => (at.clone(), len.clone()).prop_map(|(at, len)| Op::Removed(at, len)),
            1 => (at.clone(), len.clone()).prop_map(|(at, len)| Op::Unmapped(at, len)),
            1 => (at.clone(), at.clone(), len).prop_map(|(from, to, len)| Op::Moved(from, to, len)),
            2 => (at.clone(), 1..40_u64).prop_map(|(at, len)| Op::Absent(at, len)),
            2 => (at, 1..40_u64).prop_map(|(at, len)| Op::AbsentAt(at, len)),
        ]
    }

    fn need(twin: &Twin, at: u64, per_run: u64) -> PageNeed {
        let Some(&(place, state)) = twin.get(&at) else { return PageNeed::Nowhere };
        let joins = |other: u64| {
            twin.get(&other).is_some_and(|&(there, its)| {
                its == state && there + at == place + other && there / per_run == place / per_run
            })
        };
        let (mut first, mut last) = (at, at);
        while state != SupplyState::Present && first > 0 && joins(first - 1) {
            first -= 1;
        }
        while state != SupplyState::Present && joins(last + 1) {
            last += 1;
        }
        let (address, bytes) = (first * UNIT, (last + 1 - first) * UNIT);
        match state {
            SupplyState::Absent => {
                PageNeed::Supply(ImagePart { address, offset: twin[&first].0 * UNIT, bytes })
            }
            SupplyState::Removed => PageNeed::Zeros { address, bytes },
            SupplyState::Present => PageNeed::CheckPresent { address, bytes },
        }
    }

    fn two_regions() -> (Pages, Twin) {
        // Neighbours by address and not in the image, so that no run may cross from one to the other.
        let places = [(8, 3, 40), (48, 77, 30)];
        let place = |&(base, offset, units): &(u64, u64, u64)| MappedRegion {
            base: base * UNIT,
            offset: offset * UNIT,
            bytes: units * UNIT,
        };
        let pages = Pages::new(UNIT, &places.iter().map(place).collect::<Vec<_>>());
        let units = places.iter().flat_map(|&(base, offset, units)| {
            (0..units).map(move |i| (base + i, (offset + i, SupplyState::Absent)))
        });
        (pages, units.collect())
    }

    fn apply(op: &Op, pages: &mut Pages, twin: &mut Twin) {
        let bytes = |at: u64, len: u64| at * UNIT..(at + len) * UNIT;
        match *op {
            Op::Fault(at, order) => {
                let found = pages.need(at * UNIT + 17, UNIT << order);
                // A piece that was cut off ends a run, also where its neighbour goes on; the twin has no pieces.
                let wanted = need(twin, at, 1 << order);
                assert_eq!(std::mem::discriminant(&found), std::mem::discriminant(&wanted));
                let (PageNeed::Supply(ImagePart { address, bytes, .. })
                | PageNeed::Zeros { address, bytes }
                | PageNeed::CheckPresent { address, bytes }) = found
                else {
                    return;
                };
                assert!(address <= at * UNIT && at * UNIT < address + bytes);
                for unit in address / UNIT..(address + bytes) / UNIT {
                    let (place, state) = twin[&unit];
                    assert_eq!(state, twin[&at].1, "a run is of one state");
                    assert_eq!(place >> order, twin[&at].0 >> order, "a run is aligned in the image");
                    if let PageNeed::Supply(stretch) = found {
                        assert_eq!(place * UNIT - stretch.offset, unit * UNIT - stretch.address);
                    }
                }
                let is_whole =
                    pages.regions.iter().map(|r| (r.base / UNIT, r.states.len)).eq([(8, 40), (48, 30)]);
                if is_whole {
                    assert_eq!(found, wanted, "nothing was cut, so the run is as long as it can be");
                }
                pages.supplied(address..address + bytes);
                (address / UNIT..(address + bytes) / UNIT)
                    .for_each(|unit| twin.get_mut(&unit).expect("known").1 = SupplyState::Present);
            }
            Op::Removed(at, len) => {
                pages.removed(bytes(at, len));
                twin.range_mut(at..at + len).for_each(|(_, unit)| unit.1 = SupplyState::Removed);
            }
            Op::Unmapped(at, len) => {
                pages.unmapped(bytes(at, len)).expect("few pieces");
                twin.retain(|unit, _| !(at..at + len).contains(unit));
            }
            Op::Moved(from, to, len) => {
                pages.moved(from * UNIT, to * UNIT, len * UNIT).expect("few pieces");
                let taken: Vec<_> =
                    (0..len).filter_map(|i| Some((to + i, twin.remove(&(from + i))?))).collect();
                twin.retain(|unit, _| !(to..to + len).contains(unit));
                twin.extend(taken);
            }
            Op::Absent(offset, len) => {
                let found = units_of(&pages.absent_in(offset * UNIT, len * UNIT));
                let is_wanted = |place: u64| (offset..offset + len).contains(&place);
                let wanted =
                    twin.iter().filter(|(_, unit)| unit.1 == SupplyState::Absent && is_wanted(unit.0));
                assert_eq!(found, wanted.map(|(&unit, &(place, _))| (unit, place)).collect::<Vec<_>>());
            }
            Op::AbsentAt(at, len) => {
                let found = units_of(&pages.absent_at(&bytes(at, len)));
                let wanted = twin.range(at..at + len).filter(|(_, unit)| unit.1 == SupplyState::Absent);
                assert_eq!(found, wanted.map(|(&unit, &(place, _))| (unit, place)).collect::<Vec<_>>());
            }
        }
    }

    /// The units of these parts, each with its place in the image.
    fn units_of(parts: &[ImagePart]) -> Vec<(u64, u64)> {
        let of_part = |part: &ImagePart| {
            let (address, place) = (part.address / UNIT, part.offset / UNIT);
            (0..part.bytes / UNIT).map(move |i| (address + i, place + i)).collect::<Vec<_>>()
        };
        let mut units: Vec<(u64, u64)> = parts.iter().flat_map(of_part).collect();
        units.sort_unstable();
        units
    }

    proptest! {
        #[test]
        fn pages_equal_a_naive_table(ops in prop::collection::vec(op(), 1..60)) {
            let (mut pages, mut twin) = two_regions();
            for op in &ops {
                apply(op, &mut pages, &mut twin);
                pages.check();
                prop_assert_eq!(pages.bytes(), twin.len() as u64 * UNIT);
                for unit in 0..SPAN + 40 {
                    let found = pages.find(unit * UNIT).map(|(n, at)| {
                        let region = &pages.regions[n];
                        (region.offset / UNIT + at as u64, region.states.get(at))
                    });
                    prop_assert_eq!(found, twin.get(&unit).copied());
                }
            }
        }
    }

    #[test]
    fn runs_are_aligned_in_the_image_and_stop_at_pages_that_are_there() {
        let place = MappedRegion { base: 0x10_0000, offset: 0x3000, bytes: 0x10_0000 };
        let mut pages = Pages::new(UNIT, &[place]);
        // Byte 0x3000 of the image is in the run from 0 to 0x10000, which the region has from 0x3000 on.
        let first = PageNeed::Supply(ImagePart { address: 0x10_0000, offset: 0x3000, bytes: 0xD000 });
        assert_eq!(pages.need(0x10_0FFF, 0x1_0000), first);
        pages.supplied(0x10_4000..0x10_5000);
        let behind = ImagePart { address: 0x10_5000, offset: 0x8000, bytes: 0x8000 };
        assert_eq!(pages.need(0x10_6000, 0x1_0000), PageNeed::Supply(behind));
        assert_eq!(
            pages.need(0x10_4000, 0x1_0000),
            PageNeed::CheckPresent { address: 0x10_4000, bytes: UNIT }
        );
        pages.removed(0x10_4000..0x10_6000);
        assert_eq!(pages.need(0x10_5000, 0x1_0000), PageNeed::Zeros { address: 0x10_4000, bytes: 2 * UNIT });
        assert_eq!(pages.need(0x0F_FFFF, 0x1_0000), PageNeed::Nowhere);
        assert_eq!(pages.need(0x20_0000, 0x1_0000), PageNeed::Nowhere);
    }

    #[test]
    fn a_large_page_is_removed_as_a_whole_or_not_at_all() {
        let large = 2 << 20;
        let mut pages = Pages::new(large, &[MappedRegion { base: large, offset: 0, bytes: 4 * large }]);
        pages.removed(large + 4096..3 * large);
        assert!(
            matches!(pages.need(large, 1 << 16), PageNeed::Supply(ImagePart { bytes, .. }) if bytes == large)
        );
        assert!(matches!(pages.need(2 * large, 1 << 16), PageNeed::Zeros { bytes, .. } if bytes == large));
        pages.removed(large + 4096..large + 8192);
        assert!(matches!(pages.need(large, 1 << 16), PageNeed::Supply(_)));
    }

    /// 1. A VM says that its memory has pages of 2 MiB, and it has pages of 4 KiB.
    /// 2. It moves 2 MiB by half a page of 2 MiB. Its states could be handed over to no other server.
    #[test]
    fn a_move_between_pages_is_an_error_and_the_states_can_still_be_handed_over() {
        let (large, small) = (2 << 20, 4096);
        let mut pages = Pages::new(large, &[MappedRegion { base: large, offset: 0, bytes: 4 * large }]);
        pages.supplied(large..2 * large);
        let before = pages.clone();
        for (from, to) in [(large, 9 * large + small), (large + small, 9 * large), (3 * large, small)] {
            assert_eq!(pages.moved(from, to, 2 * large), Err(MoveError::BetweenPages));
            assert!(pages.states().eq(before.states()), "nothing was moved");
        }
        // Less than a page, of none of the regions, and by whole pages.
        pages.moved(large, 9 * large + small, small).expect("no whole page");
        pages.moved(64 * large, 9 * large + small, large).expect("it is no region's");
        pages.moved(large + small, 9 * large + small, 2 * large).expect("a multiple");
        pages.check();
        let bytes = states_bytes(std::iter::once(&pages));
        assert!(parse_states(&bytes, 1, 4 * large).is_ok());
    }

    #[test]
    fn a_vm_that_cuts_its_memory_to_pieces_gets_an_error() {
        let mut pages =
            Pages::new(UNIT, &[MappedRegion { base: 0, offset: 0, bytes: 4 * PIECES_MAX as u64 * UNIT }]);
        let mut hole = |at: u64| pages.unmapped(at * UNIT..(at + 1) * UNIT);
        assert!((1..PIECES_MAX as u64).all(|i| hole(2 * i).is_ok()));
        assert_eq!(hole(2 * PIECES_MAX as u64), Err(TooManyPieces));
        pages.check();
    }
}
