//! Churn: no read returns a mixture, whatever happens to the frames meanwhile.
//!
//! ```text
//!   owner     retire what is in the way, prepare, fill by `copy_in`, complete     over and over, 24 frames
//!   reader    slot -> look -> `copy_out` -> look; then every byte must be right   any range, any folio
//!   holder    slot -> hold -> `copy_out` -> put;  then every byte must be right
//! ```
//!
//! The model (`model_hit.rs`) proves the protocol on two words; this runs it on real pages with the real copy. The
//! contents describe themselves (`common`), so that a byte of another file, page or generation is found wherever it
//! lands. Folios are of orders 0 to 2 over frames that are split and joined all the time; slots are stale, and every
//! fourth hint is a frame taken at random.
//!
//! What is checked of each accepted read:
//!  1. Every page of it is whole: of the right file and place, of one generation.
//!  2. The folio is whole: its pages are of the same generation.
//!  3. It is not older than a folio that had left before the read began.
//!
//! `CHURN_REFILLS=100000000 cargo test --release --test churn` makes it a soak.

#![allow(unsafe_code, reason = "bytes are copied while they are overwritten: that is the test")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use quinion::internals::arena::{Descriptor, FillEnd, FolioStamp, PutOutcome, RetireOutcome};
use quinion::internals::folio::copy::{copy_in, copy_out};
use quinion::internals::units::{MappingId, Order, PageIndex};

use quinion_testing::content::{Dice, LINE, PAGE, fill_content, generations, page_content, verify};

const FRAMES: usize = 24;
const FILES: usize = 3;
const PAGES: usize = 12;
const ORDER_MAX: u64 = 2;
const NOWHERE: u32 = u32::MAX;

/// A small arena and the slots of a few files; all that readers see.
struct Fixture {
    bytes: NonNull<u8>,
    descriptors: Vec<Descriptor>,
    /// The head frame of the folio that covers a page; a hint.
    slots: [[AtomicU32; PAGES]; FILES],
    /// The least generation that a read may return if it begins now.
    oldest: [[AtomicU32; PAGES]; FILES],
    /// Set by the last holder of a folio that the owner has detached, on its first frame.
    given_back: Vec<AtomicBool>,
    stop: AtomicBool,
    accepted: AtomicU64,
    changed: AtomicU64,
    held: AtomicU64,
}

// SAFETY: the bytes are only ever copied by `copy_in` and `copy_out`, which are made for sharing.
unsafe impl Send for Fixture {}
// SAFETY: as above.
unsafe impl Sync for Fixture {}

impl Fixture {
    fn layout() -> Layout {
        Layout::from_size_align(FRAMES * PAGE, PAGE).expect("a few pages")
    }
    fn new() -> Self {
        // SAFETY: the layout is not empty.
        let bytes = unsafe { alloc_zeroed(Self::layout()) };
        Self {
            bytes: NonNull::new(bytes).expect("a few pages of memory"),
            descriptors: (0..FRAMES).map(|_| Descriptor::new()).collect(),
            slots: [const { [const { AtomicU32::new(NOWHERE) }; PAGES] }; FILES],
            oldest: [const { [const { AtomicU32::new(0) }; PAGES] }; FILES],
            given_back: (0..FRAMES).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }
    }
    fn address(&self, frame: usize) -> *mut u8 {
        assert!(frame < FRAMES);
        // SAFETY: the frame exists.
        unsafe { self.bytes.as_ptr().add(frame * PAGE) }
    }
    fn copy<'a>(&self, frame: usize, stamp: FolioStamp, position: u64, buf: &'a mut [u8]) -> &'a [u8] {
        let inside = (position - stamp.first.first_byte()) as usize;
        let bytes = buf.len().min(stamp.order().bytes() - inside);
        assert!(frame * PAGE + inside + bytes <= FRAMES * PAGE, "a folio lies in the arena");
        // SAFETY: the source lies in the arena by the assertion, the destination in `buf`.
        unsafe { copy_out(self.address(frame).add(inside), buf.as_mut_ptr(), bytes) };
        &buf[..bytes]
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.bytes.as_ptr(), Self::layout()) };
    }
}

fn mapping(file: usize) -> MappingId {
    MappingId(file as u32 + 1)
}

// ---- the owner ----------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Folio {
    frame: usize,
    order: Order,
    file: usize,
    page: usize,
    generation: u32,
}

impl Folio {
    fn pages(&self) -> usize {
        self.order.pages() as usize
    }
    fn is_in_the_way_of(&self, other: &Folio) -> bool {
        let meet = |a: usize, b: usize| a < b + other.pages() && b < a + self.pages();
        meet(self.frame, other.frame) || self.file == other.file && meet(self.page, other.page)
    }
}

/// The thread that fills and retires. Readers never make it wait.
struct Owner<'a> {
    fixture: &'a Fixture,
    live: Vec<Folio>,
    detached: Vec<Folio>,
    dice: Dice,
}

impl Owner<'_> {
    fn refill(&mut self, generation: u32) {
        let order = Order(self.dice.below(ORDER_MAX + 1) as u8);
        let mut aligned = |end: usize| {
            let runs = end as u64 >> order.0;
            (self.dice.below(runs) << order.0) as usize
        };
        let (frame, page) = (aligned(FRAMES), aligned(PAGES));
        let file = self.dice.below(FILES as u64) as usize;
        let folio = Folio { frame, order, file, page, generation };
        self.make_room(&folio);
        if self.is_free(&folio) {
            self.insert(folio);
        }
    }

    /// 1. Takes what is in the way out of the index.
    fn make_room(&mut self, folio: &Folio) {
        let (leaving, staying) = self.live.drain(..).partition(|other| other.is_in_the_way_of(folio));
        self.live = staying;
        let leaving: Vec<Folio> = leaving;
        for old in leaving {
            if self.retire(&old) == RetireOutcome::Held {
                self.detached.push(old);
            }
        }
    }

    fn retire(&mut self, old: &Folio) -> RetireOutcome {
        let descriptor = &self.fixture.descriptors[old.frame];
        // Eviction if possible, removal if it is held or the dice say so.
        let evict = self.dice.below(2) == 0 && descriptor.try_retire().is_some();
        let retire = if evict { RetireOutcome::Free } else { descriptor.retire() };
        for page in old.page..old.page + old.pages() {
            self.fixture.slots[old.file][page].store(NOWHERE, Ordering::Relaxed);
            // Release, partner: the Acquire of a read that begins: it may not return what has left.
            self.fixture.oldest[old.file][page].store(old.generation + 1, Ordering::Release);
        }
        retire
    }

    /// 2. Asks whether no holder keeps the frames.
    fn is_free(&mut self, folio: &Folio) -> bool {
        self.detached.retain(|old| {
            // Acquire, partner: the Release of the last holder.
            !self.fixture.given_back[old.frame].swap(false, Ordering::Acquire)
        });
        let end = folio.frame + folio.pages();
        self.detached.iter().all(|old| old.frame >= end || folio.frame >= old.frame + old.pages())
    }

    /// 3. Names the folio, publishes it, fills it.
    fn insert(&mut self, folio: Folio) {
        let descriptor = &self.fixture.descriptors[folio.frame];
        let index = PageIndex(folio.page as u64);
        descriptor.prepare(mapping(folio.file), index, folio.order);
        for page in folio.page..folio.page + folio.pages() {
            self.fixture.slots[folio.file][page].store(folio.frame as u32, Ordering::Release); // partner: `find`
        }
        for page in 0..folio.pages() {
            let content = page_content(folio.file as u32, (folio.page + page) as u64, folio.generation);
            // SAFETY: the frame is in the arena and locked by this thread, which has the source.
            unsafe { copy_in(content.as_ptr(), self.fixture.address(folio.frame + page), PAGE) };
        }
        assert_eq!(descriptor.complete(), FillEnd::Attached);
        self.live.push(folio);
    }
}

// ---- readers ------------------------------------------------------------------------------------------

struct PlannedRead {
    file: usize,
    position: u64,
    bytes: usize,
    oldest: [u32; PAGES],
    frame: usize,
}

fn find(fixture: &Fixture, dice: &mut Dice) -> Option<PlannedRead> {
    let file = dice.below(FILES as u64) as usize;
    let position = dice.below((PAGES * PAGE) as u64);
    let bytes = [64, 200, PAGE, 4 * PAGE][dice.below(4) as usize];
    // Acquire, partner: the Release in `retire`.
    let oldest = std::array::from_fn(|page| fixture.oldest[file][page].load(Ordering::Acquire));
    let page = position as usize / PAGE;
    let slot = fixture.slots[file][page].load(Ordering::Acquire); // partner: `insert`
    // A hint may be anything. Slots are seldom stale for long, so now and then it is any frame at all.
    let frame = if dice.below(4) == 0 { dice.below(FRAMES as u64) as u32 } else { slot };
    (frame != NOWHERE).then_some(PlannedRead { file, position, bytes, oldest, frame: frame as usize })
}

fn check_read(wanted: &PlannedRead, bytes: &[u8]) {
    let met =
        generations(bytes, wanted.file as u32, wanted.position).unwrap_or_else(|wrong| panic!("{wrong}"));
    let Some(met) = met else { return };
    assert_eq!(met.start(), met.end(), "a folio of two generations");
    let pages = wanted.position as usize / PAGE..=(wanted.position as usize + bytes.len() - 1) / PAGE;
    let oldest = pages.map(|page| wanted.oldest[page]).max().expect("at least one page");
    assert!(*met.start() >= oldest, "generation {} had left; {oldest} was the oldest", met.start());
}

fn read(fixture: &Fixture, dice: &mut Dice, buf: &mut [u8]) {
    let Some(wanted) = find(fixture, dice) else { return };
    let descriptor = &fixture.descriptors[wanted.frame];
    let index = PageIndex::of_byte(wanted.position);
    let Ok(stamp) = descriptor.begin_read(mapping(wanted.file), index) else { return };
    if wanted.frame + stamp.order().pages() as usize > FRAMES {
        return;
    }
    let bytes = fixture.copy(wanted.frame, stamp, wanted.position, &mut buf[..wanted.bytes]);
    if descriptor.end_read(stamp) {
        fixture.accepted.fetch_add(1, Ordering::Relaxed);
        check_read(&wanted, bytes);
    } else {
        fixture.changed.fetch_add(1, Ordering::Relaxed);
    }
}

fn hold(fixture: &Fixture, dice: &mut Dice, buf: &mut [u8]) {
    let Some(wanted) = find(fixture, dice) else { return };
    let descriptor = &fixture.descriptors[wanted.frame];
    let index = PageIndex::of_byte(wanted.position);
    let Ok(stamp) = descriptor.try_hold(mapping(wanted.file), index) else { return };
    let bytes = fixture.copy(wanted.frame, stamp, wanted.position, &mut buf[..wanted.bytes]);
    if let PutOutcome::Last(_) = descriptor.put() {
        fixture.given_back[wanted.frame].store(true, Ordering::Release); // partner: `is_free`
    }
    fixture.held.fetch_add(1, Ordering::Relaxed);
    check_read(&wanted, bytes);
}

fn until_stopped(fixture: &Fixture, seed: u64, act: fn(&Fixture, &mut Dice, &mut [u8])) {
    let mut dice = Dice::new(seed);
    let mut buf = vec![0; 4 * PAGE];
    while !fixture.stop.load(Ordering::Relaxed) {
        act(fixture, &mut dice, &mut buf);
    }
}

struct StopAtEnd<'a>(&'a Fixture);
impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
fn reads_and_holds_against_refills() {
    let refills = std::env::var("CHURN_REFILLS").map_or(100_000, |text| text.parse().expect("a number"));
    let fixture = Fixture::new();
    std::thread::scope(|threads| {
        let acts: [fn(&Fixture, &mut Dice, &mut [u8]); 3] = [read, read, hold];
        let fixture = &fixture;
        let readers =
            [0, 1, 2].map(|who| threads.spawn(move || until_stopped(fixture, who as u64 + 1, acts[who])));
        let stop = StopAtEnd(fixture);
        let mut owner = Owner { fixture, live: vec![], detached: vec![], dice: Dice::new(4) };
        let nobody_read =
            || [&fixture.accepted, &fixture.held].iter().any(|counter| counter.load(Ordering::Relaxed) == 0);
        // Until the readers have read something: on a busy machine they begin late.
        for generation in (1..).take_while(|&generation| generation <= refills || nobody_read()) {
            owner.refill(generation);
        }
        drop(stop);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (accepted, changed, held) = (count(&fixture.accepted), count(&fixture.changed), count(&fixture.held));
    println!("{accepted} reads accepted, {changed} thrown away, {held} under a hold");
}

// ---- the verifier is tested ------------------------------------------------------------------------------

mod the_verifier {
    use super::*;
    use proptest::prelude::*;

    fn content(file: u32, position: u64, generation: u32, bytes: usize) -> Vec<u8> {
        let mut buf = vec![0xa5; bytes];
        fill_content(&mut buf, file, position, generation);
        buf
    }

    fn range() -> impl Strategy<Value = (u64, usize)> {
        (0..3 * PAGE as u64, prop_oneof![1..200usize, 1..3 * PAGE])
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn filled_bytes_are_right(file: u32, generation: u32, (position, bytes) in range()) {
            let buf = content(file, position, generation, bytes);
            prop_assert_eq!(verify(&buf, file, position), Ok(()));
            let met = generations(&buf, file, position).unwrap();
            prop_assert!(met.is_none_or(|met| met == (generation..=generation)));
            prop_assert!(bytes < 23 || generations(&buf, file, position).unwrap().is_some());
        }

        #[test]
        fn a_range_is_a_piece_of_its_pages(file: u32, generation: u32, (position, bytes) in range()) {
            let pages: Vec<u8> = (0..7).flat_map(|page| page_content(file, page, generation)).collect();
            prop_assert_eq!(&content(file, position, generation, bytes)[..], &pages[position as usize..][..bytes]);
        }

        #[test]
        fn one_changed_byte_is_found(
            file: u32, generation: u32, (position, bytes) in range(), at: prop::sample::Index, other in 1..=255u8,
        ) {
            prop_assume!(bytes >= 23);
            let mut buf = content(file, position, generation, bytes);
            // In a page of which only a shred is read, some bytes may belong to another generation.
            let at = at.index(bytes);
            buf[at] ^= other;
            let page = (position + at as u64) / PAGE as u64;
            let from = (page * PAGE as u64).max(position);
            let to = ((page + 1) * PAGE as u64).min(position + bytes as u64);
            prop_assume!(to - from >= 23);
            prop_assert!(verify(&buf, file, position).is_err());
        }

        /// From some byte on, the bytes are those of another version, file or place.
        #[test]
        fn a_mixture_is_found(
            file in 0..4u32, generation in 0..4u32, page in 0..4u64, cut in 0..PAGE, length in 1..PAGE,
            other_file in 0..4u32, other_generation in 0..4u32, other_page in 0..4u64, shift in 0..4usize,
        ) {
            let right = page_content(file, page, generation);
            let mut other = page_content(other_file, other_page, other_generation);
            other.rotate_left(shift * LINE);
            let end = (cut + length).min(PAGE);
            let mut buf = right;
            buf[cut..end].copy_from_slice(&other[cut..end]);
            prop_assume!(buf != right && buf != page_content(file, page, other_generation));
            let wrong = verify(&buf, file, page * PAGE as u64).expect_err("a mixture");
            let place = format!("file {file} page {page}");
            prop_assert!(wrong.contains(&place), "{}", wrong);
        }

        #[test]
        fn another_page_is_found_in_half_a_line(
            file in 0..4u32, other in 0..4u32, generation: u32, page in 0..1000u64, other_page in 0..1000u64,
            at in 0..PAGE - 64, bytes in 23..64usize,
        ) {
            let buf = &page_content(other, other_page, generation)[at..at + bytes];
            prop_assume!(buf != &page_content(file, page, generation)[at..at + bytes]);
            prop_assert!(verify(buf, file, page * PAGE as u64 + at as u64).is_err());
        }

        #[test]
        fn a_shred_is_verified_by_the_bytes_it_has(
            generation: u32, page in 0..1000u64, other_page in 0..1000u64, line in 0..PAGE / LINE,
        ) {
            let word_1 = line * LINE + 8;
            let buf = &page_content(1, other_page, generation)[word_1..word_1 + 8];
            let verdict = verify(buf, 1, page * PAGE as u64 + word_1 as u64);
            prop_assert_eq!(verdict.is_ok(), page == other_page);
        }
    }

    #[test]
    fn pages_may_differ_in_generation_and_a_page_may_not() {
        let mut buf = [page_content(1, 0, 5), page_content(1, 1, 7)].concat();
        assert_eq!(generations(&buf, 1, 0), Ok(Some(5..=7)));
        buf[PAGE - LINE..PAGE].copy_from_slice(&page_content(1, 0, 6)[PAGE - LINE..]);
        let wrong = verify(&buf, 1, 0).unwrap_err();
        assert_eq!(
            wrong,
            "byte 4036 is not of file 1 page 0 generation 5: here is file 1 page 0 generation 6 offset 4032"
        );
    }

    #[test]
    fn zeroes_are_not_a_file() {
        let wrong = verify(&[0; PAGE], 0, 0).unwrap_err();
        assert!(wrong.ends_with("here are zeroes"), "{wrong}");
    }

    #[test]
    #[ignore = "a measurement: cargo test --release --test churn speed -- --ignored --nocapture"]
    fn speed() {
        let buf: Vec<u8> = (0..256).flat_map(|page| page_content(1, page, page as u32)).collect();
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            verify(std::hint::black_box(&buf), 1, 0).unwrap();
        }
        let seconds = start.elapsed().as_secs_f64();
        println!("verify: {:.1} GB/s", 1000.0 * buf.len() as f64 / seconds / 1e9);
    }
}
