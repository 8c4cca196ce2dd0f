#![cfg_attr(not(quinion_model), allow(unused))]
#![cfg(quinion_model)]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "bytes under a hold are plain memory; the model watches them for races")]

use std::process::Command;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;
use quinion::arena::{Completed, Descriptor, Flags, Put, Retire, before_bytes};
use quinion::sync::{Mutant, model};
use quinion::units::{MappingId, Order, PageIndex};

const ONE: MappingId = MappingId(1);
const TWO: MappingId = MappingId(2);
const THREE: MappingId = MappingId(3);
const PAGE_0: PageIndex = PageIndex(0);
const PAGE_1: PageIndex = PageIndex(1);
const SMALL: Order = Order(0);
const PAIR: Order = Order(1);

// ---- the stage: two frames ----------------------------------------------------------------------

/// A frame's bytes as an optimistic copy sees them: words, loaded and stored relaxed. Every content is
/// one number, written to both words, so that a mixture shows.
#[derive(Debug)]
struct Bytes([AtomicU64; 2]);

impl Bytes {
    fn new() -> Self {
        Self([AtomicU64::new(0), AtomicU64::new(0)])
    }
    fn write(&self, content: u64) {
        before_bytes();
        self.0.iter().for_each(|word| word.store(content, Ordering::Relaxed));
    }
    fn copy(&self) -> [u64; 2] {
        [0, 1].map(|word| self.0[word].load(Ordering::Relaxed))
    }
}

/// Two neighbouring frames: their descriptors and their bytes.
#[derive(Debug)]
struct Frames {
    descriptors: [Descriptor; 2],
    bytes: [Bytes; 2],
}

impl Frames {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            descriptors: [Descriptor::new(), Descriptor::new()],
            bytes: [Bytes::new(), Bytes::new()],
        })
    }
    /// Makes `frame` a folio of one page and fills it.
    fn fill(&self, frame: usize, mapping: MappingId, index: PageIndex, content: u64) {
        self.descriptors[frame].prepare(mapping, index, SMALL, false);
        self.bytes[frame].write(content);
        assert_eq!(self.descriptors[frame].complete(true), Completed::Attached);
    }
    /// Makes both frames one folio and fills it; the second page's content is one more.
    fn fill_pair(&self, mapping: MappingId, content: u64) {
        self.descriptors[0].prepare(mapping, PAGE_0, PAIR, false);
        self.bytes[0].write(content);
        self.bytes[1].write(content + 1);
        assert_eq!(self.descriptors[0].complete(true), Completed::Attached);
    }
    fn retire(&self, frame: usize) {
        self.descriptors[frame].try_retire().expect("nobody holds it");
    }
    /// The hit: look at the folio that `head` heads, copy from `frame`, look again.
    fn read(&self, head: usize, frame: usize, mapping: MappingId, index: PageIndex) -> Read {
        let Ok(ticket) = self.descriptors[head].begin_read(mapping, index) else { return Read::Refused };
        let bytes = self.bytes[frame].copy();
        if self.descriptors[head].end_read(ticket) { Read::Accepted(bytes) } else { Read::Refused }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Read {
    Refused,
    Accepted([u64; 2]),
}

impl Read {
    /// Whatever was accepted must be one of `right`.
    #[track_caller]
    fn must_be(self, right: &[u64]) {
        if let Read::Accepted(bytes) = self {
            let whole = right.iter().any(|&content| bytes == [content; 2]);
            assert!(whole, "wrong bytes: accepted {bytes:?}, right is {right:?}");
        }
    }
}

// ---- the stage for holds: one frame whose bytes are plain memory ------------------------------------

/// A frame as holders see it. Under a hold bytes are read as plain memory, so the model must see that
/// no write comes near; `freed` counts the parties that believe the frame is theirs.
#[derive(Debug)]
struct Held {
    descriptor: Descriptor,
    bytes: UnsafeCell<u64>,
    freed: AtomicU32,
}

const FREED: u64 = 99;

impl Held {
    fn new() -> Arc<Self> {
        let held = Self { descriptor: Descriptor::new(), bytes: UnsafeCell::new(0), freed: AtomicU32::new(0) };
        Arc::new(held)
    }
    fn filled() -> Arc<Self> {
        let held = Self::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL, false);
        held.write(1);
        assert_eq!(held.descriptor.complete(true), Completed::Attached);
        held
    }
    fn write(&self, content: u64) {
        // SAFETY: whether nobody else is there is what the model finds out.
        self.bytes.with_mut(|bytes| unsafe { *bytes = content });
    }
    fn content(&self) -> u64 {
        // SAFETY: as in `write`.
        self.bytes.with(|bytes| unsafe { *bytes })
    }
    /// What the party does that the protocol tells to free the frame: the next use overwrites it.
    fn free(&self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
        self.write(FREED);
    }
    /// A holder: look at the bytes, if there is a folio to hold.
    fn hold_and_look(&self) {
        if self.descriptor.try_hold(ONE, PAGE_0).is_ok() {
            assert_eq!(self.content(), 1, "wrong bytes: under a hold");
            self.put();
        }
    }
    fn put(&self) {
        if let Put::Last(_) = self.descriptor.put() {
            self.free();
        }
    }
    fn retire(&self) {
        if self.descriptor.retire() == Retire::Free {
            self.free();
        }
    }
    #[track_caller]
    fn freed_once(&self) {
        assert_eq!(self.freed.load(Ordering::Relaxed), 1, "wrong count: of parties that free the frame");
    }
}

// ---- scenarios ----------------------------------------------------------------------------------------

fn explore(scenario: fn()) {
    explore_bounded(None, scenario);
}
/// Runs `scenario` under every interleaving and every value that a relaxed load may return.
fn explore_bounded(preemptions_max: Option<usize>, scenario: fn()) {
    if let Some(step) = step_left_out() {
        model::leave_out(step);
    }
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions_max;
    model.check(move || {
        COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        scenario();
    });
    println!("{} executions", COUNT.load(std::sync::atomic::Ordering::Relaxed));
}
static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

#[test]
fn another_file() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.fill(0, TWO, PAGE_0, 2);
        });
        frames.read(0, 0, ONE, PAGE_0).must_be(&[1]);
        owner.join().unwrap();
    });
}

#[test]
fn another_page() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.fill(0, ONE, PAGE_1, 2);
        });
        frames.read(0, 0, ONE, PAGE_0).must_be(&[1]);
        owner.join().unwrap();
    });
}

#[test]
fn new_file() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.fill(0, TWO, PAGE_0, 2);
        });
        frames.read(0, 0, TWO, PAGE_0).must_be(&[2]);
        owner.join().unwrap();
    });
}

#[test]
fn new_page() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.fill(0, ONE, PAGE_1, 2);
        });
        frames.read(0, 0, ONE, PAGE_1).must_be(&[2]);
        owner.join().unwrap();
    });
}

#[test]
fn first_fill() {
    explore(|| {
        let frames = Frames::new();
        let slot = Arc::new(AtomicU32::new(u32::MAX));
        let published = slot.clone();
        let owner = spawn(&frames, move |frames| {
            frames.descriptors[0].prepare(ONE, PAGE_0, SMALL, false);
            published.store(0, Ordering::Relaxed);
            frames.bytes[0].write(1);
            frames.descriptors[0].complete(true);
        });
        if slot.load(Ordering::Relaxed) == 0 {
            frames.read(0, 0, ONE, PAGE_0).must_be(&[1]);
        }
        owner.join().unwrap();
    });
}

#[test]
fn two_generations() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.fill(0, TWO, PAGE_0, 2);
            frames.retire(0);
            frames.fill(0, ONE, PAGE_0, 3);
        });
        frames.read(0, 0, ONE, PAGE_0).must_be(&[1, 3]);
        owner.join().unwrap();
    });
}

#[test]
fn abandoned_insertion() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.descriptors[0].prepare(TWO, PAGE_0, SMALL, false);
            frames.descriptors[0].unprepare();
            frames.fill(0, ONE, PAGE_0, 3);
        });
        frames.read(0, 0, ONE, PAGE_0).must_be(&[1, 3]);
        owner.join().unwrap();
    });
}

#[test]
fn pair_becomes_singles() {
    explore(|| {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.descriptors[0].set_free(None);
            frames.fill(1, THREE, PAGE_1, 30);
            frames.fill(0, TWO, PAGE_0, 20);
        });
        frames.read(0, 1, ONE, PAGE_1).must_be(&[11]);
        owner.join().unwrap();
    });
}

#[test]
fn singles_become_pair() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        frames.fill(1, ONE, PAGE_1, 2);
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.retire(1);
            frames.fill_pair(TWO, 20);
        });
        frames.read(1, 1, ONE, PAGE_1).must_be(&[2]);
        owner.join().unwrap();
    });
}

/// One thread retires, another takes the frame over; the flag stands for the arena's lock.
fn taken_over(mapping: MappingId, right: u64) {
    let frames = Frames::new();
    frames.fill(0, ONE, PAGE_0, 1);
    let free = Arc::new(AtomicU32::new(0));
    let freed = free.clone();
    let evictor = spawn(&frames, move |frames| {
        frames.retire(0);
        freed.store(1, Ordering::Release); // partner: the Acquire below
    });
    let owner = spawn(&frames, move |frames| {
        if free.load(Ordering::Acquire) == 1 {
            frames.fill(0, TWO, PAGE_0, 2);
        }
    });
    frames.read(0, 0, mapping, PAGE_0).must_be(&[right]);
    evictor.join().unwrap();
    owner.join().unwrap();
}

#[test]
fn taken_over_old() {
    explore(|| taken_over(ONE, 1));
}

#[test]
fn taken_over_new() {
    explore(|| taken_over(TWO, 2));
}

#[test]
fn filled_elsewhere() {
    explore(|| {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let queue = Arc::new(AtomicU32::new(0));
        let queued = queue.clone();
        let owner = spawn(&frames, move |frames| {
            frames.retire(0);
            frames.descriptors[0].prepare(TWO, PAGE_0, SMALL, false);
            queued.store(1, Ordering::Release); // partner: the Acquire below
        });
        let worker = spawn(&frames, move |frames| {
            if queue.load(Ordering::Acquire) == 1 {
                frames.bytes[0].write(2);
                frames.descriptors[0].complete(true);
            }
        });
        frames.read(0, 0, ONE, PAGE_0).must_be(&[1]);
        owner.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn hold_against_eviction() {
    explore(|| {
        let held = Held::filled();
        let owner = spawn(&held, |held| {
            if held.descriptor.try_retire().is_some() {
                held.free();
            }
        });
        held.hold_and_look();
        owner.join().unwrap();
        if held.descriptor.try_retire().is_some() {
            held.free();
        }
        held.freed_once();
    });
}

#[test]
fn pin_against_eviction() {
    explore(|| {
        let held = Held::filled();
        let owner = spawn(&held, |held| {
            if held.descriptor.try_retire().is_some() {
                assert_eq!(held.descriptor.pins(), 0, "wrong count: of pins on an evicted folio");
                held.free();
            }
        });
        if held.descriptor.try_hold(ONE, PAGE_0).is_ok() {
            held.descriptor.pin();
            assert_eq!(held.content(), 1, "wrong bytes: under a pin");
            held.descriptor.unpin();
            held.put();
        }
        owner.join().unwrap();
        assert_eq!(held.descriptor.pins(), 0);
    });
}

#[test]
fn two_holds_against_removal() {
    explore_bounded(Some(3), || {
        let held = Held::filled();
        let other = spawn(&held, |held| held.hold_and_look());
        let owner = spawn(&held, |held| held.retire());
        held.hold_and_look();
        other.join().unwrap();
        owner.join().unwrap();
        held.freed_once();
    });
}

#[test]
fn look_then_remove() {
    explore(|| {
        let held = Held::filled();
        let owner = spawn(&held, |held| {
            assert_eq!(held.content(), 1, "wrong bytes: under the tree lock");
            held.retire();
        });
        held.hold_and_look();
        owner.join().unwrap();
        held.freed_once();
    });
}

#[test]
fn hold_against_fill() {
    explore(|| {
        let held = Held::new();
        let owner = spawn(&held, |held| {
            held.descriptor.prepare(ONE, PAGE_0, SMALL, false);
            held.write(1);
            held.descriptor.complete(true);
        });
        held.hold_and_look();
        owner.join().unwrap();
    });
}

#[test]
fn hold_against_reuse() {
    explore(|| {
        let held = Held::filled();
        let owner = spawn(&held, |held| {
            if held.descriptor.try_retire().is_some() {
                held.descriptor.prepare(TWO, PAGE_0, SMALL, false);
                held.write(2);
                held.descriptor.complete(true);
            }
        });
        held.hold_and_look();
        owner.join().unwrap();
    });
}

#[test]
fn fill_against_removal() {
    explore(|| {
        let held = Held::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL, false);
        let filler = spawn(&held, |held| {
            held.write(1);
            if let Completed::Detached(Put::Last(_)) = held.descriptor.complete(true) {
                held.free();
            }
        });
        held.retire();
        held.hold_and_look();
        filler.join().unwrap();
        held.freed_once();
    });
}

#[test]
fn one_marker_for_two() {
    explore(|| {
        let frames = Frames::new();
        frames.descriptors[0].prepare(ONE, PAGE_0, SMALL, true);
        frames.descriptors[0].complete(true);
        let ticket = frames.descriptors[0].begin_read(ONE, PAGE_0).unwrap();
        let other = spawn(&frames, move |frames| frames.descriptors[0].take_marker(ticket));
        let mine = frames.descriptors[0].take_marker(ticket);
        let theirs = other.join().unwrap();
        assert_eq!(u32::from(mine) + u32::from(theirs), 1, "wrong count: of those who took the marker");
    });
}

#[test]
fn marker_of_another_folio() {
    explore(|| {
        let frames = Frames::new();
        frames.descriptors[0].prepare(ONE, PAGE_0, SMALL, true);
        frames.descriptors[0].complete(true);
        let ticket = frames.descriptors[0].begin_read(ONE, PAGE_0).unwrap();
        let owner = spawn(&frames, |frames| {
            frames.retire(0);
            frames.descriptors[0].prepare(ONE, PAGE_0, SMALL, true);
            frames.descriptors[0].complete(true);
        });
        frames.descriptors[0].take_marker(ticket);
        owner.join().unwrap();
        assert!(frames.descriptors[0].word().has(Flags::MARKER), "wrong marker: that of a later folio was taken");
    });
}

fn spawn<T: 'static, R: 'static>(
    stage: &Arc<T>,
    act: impl FnOnce(&T) -> R + 'static,
) -> thread::JoinHandle<R> {
    let stage = stage.clone();
    thread::spawn(move || act(&stage))
}

// ---- each step is needed ------------------------------------------------------------------------------

const LEFT_OUT: &str = "QUINION_MODEL_LEFT_OUT";

fn step_left_out() -> Option<Mutant> {
    let name = std::env::var(LEFT_OUT).ok()?;
    Some(*STEPS.iter().find(|step| format!("{step:?}") == name).expect("a step of this name"))
}

const SCENARIOS: &[&str] = &[
    "another_file",
    "another_page",
    "new_file",
    "new_page",
    "first_fill",
    "two_generations",
    "abandoned_insertion",
    "pair_becomes_singles",
    "singles_become_pair",
    "taken_over_old",
    "taken_over_new",
    "filled_elsewhere",
    "hold_against_eviction",
    "pin_against_eviction",
    "two_holds_against_removal",
    "look_then_remove",
    "hold_against_fill",
    "hold_against_reuse",
    "fill_against_removal",
    "one_marker_for_two",
    "marker_of_another_folio",
];
use Mutant::{
    CompleteRelease, FillFence, HoldAcquire, HoldCompare, HoldUptodate, MarkerFlag, MarkerSequence, PrepareFence,
    PutAcquire, PutRelease, ReaderAcquire, ReaderFence, ReaderIndex, ReaderMapping, ReaderParity, ReaderRecheck,
    ReaderUptodate, RetireAcquire, RetireDetached, RetireHolds, RetireRelease, RetireStep,
};
const STEPS: &[Mutant] = &[
    ReaderFence, ReaderRecheck, ReaderMapping, ReaderIndex, ReaderParity, ReaderUptodate, ReaderAcquire,
    PrepareFence, FillFence, CompleteRelease, RetireStep, RetireHolds, RetireDetached, RetireAcquire,
    RetireRelease, HoldAcquire, HoldUptodate, HoldCompare, PutAcquire, PutRelease, MarkerSequence, MarkerFlag,
];

/// Runs one scenario with one step left out, in a process of its own; what it failed with, if it did.
fn run_without(step: Mutant, scenario: &str) -> Option<String> {
    let out = Command::new(std::env::current_exe().unwrap())
        .args([scenario, "--exact", "--nocapture"])
        .env(LEFT_OUT, format!("{step:?}"))
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    if out.status.success() {
        return None;
    }
    let err = String::from_utf8_lossy(&out.stderr);
    let line = err.lines().skip_while(|l| !l.contains("panicked at")).nth(1).unwrap_or("?").trim();
    Some(line.to_string())
}

#[test]
#[ignore]
fn matrix() {
    for &step in STEPS {
        for scenario in SCENARIOS {
            let t = std::time::Instant::now();
            if let Some(why) = run_without(step, scenario) {
                println!("{step:?}\t{scenario}\t{why}\t{:?}", t.elapsed());
            } else if t.elapsed().as_secs() > 5 { println!("slow {step:?} {scenario} {:?}", t.elapsed()); }
        }
    }
}
