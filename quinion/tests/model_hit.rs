//! The hit protocol and the holds, run under a model checker: they are right, and no step of them can be left out.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test model_hit --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. With it, `quinion::internals::sync::atomic` gives out the checker's atomics,
//! and [`Descriptor`](quinion::internals::arena::Descriptor) is the real code on top of them. The checker runs each
//! scenario under every interleaving, and lets every relaxed load return every value that the memory model of Rust
//! allows.
//!
//! # The protocol
//!
//! ```text
//!        reader                                      owner (several threads in turn)
//!   r1   word, Acquire         --------.
//!   r2   index, mapping                 \        o1  retire: sequence odd, AcqRel
//!   r3   even? of the file? covers it?    \           (through a lock or a queue)
//!        up to date?                      \      o2  prepare: RELEASE FENCE
//!   r4   copy the bytes                    \     o3    mapping, index; sequence even, LOCKED
//!   r5   ACQUIRE FENCE                      \        (through a lock or a queue)
//!   r6   word: same sequence as in r1?       \   o4  fill: RELEASE FENCE, then the bytes
//!                                             '-  o5  complete: UPTODATE, Release
//! ```
//!
//! 1. r1 reads what o5 wrote, or a later step on the same word: then r2 and r4 see that folio's
//!    identity and bytes, **or later ones**. Never earlier ones.
//! 2. r2 or r4 sees something later: it was stored after the fence o2 or o4, and that fence stands
//!    between an odd sequence and the store. So from r5 on the reader sees that odd sequence or a
//!    later one, and r6 refuses. This is why `index` and `mapping` may be read once, relaxed, and not
//!    looked at again: an identity from after the word that was read is as fatal to r6 as a byte is.
//! 3. r2 and r4 see nothing later: all is of one folio, the one that r3 approved of.
//!
//! The fence of step 2 must be on **the thread that stores**. A fence in `retire` would do if one
//! thread retired, prepared and filled. It does not when another takes the frame over, although the
//! lock between them orders the two: the reader meets no release in the second thread, and there is
//! nothing for its own fence to pair with (`taken_over_old`, `taken_over_new`, `filled_elsewhere`).
//! So the fence is in `prepare`, and in [`before_bytes`](quinion::internals::arena::before_bytes) for a fill.
//!
//! A hold is one compare-and-exchange of the whole word. If it succeeds, the sequence is the one that was checked; and
//! it succeeds before the folio can be retired unheld, so no later identity can have been seen. The word alone decides
//! which thread frees a frame: the one whose `retire` finds no hold, or whose `put` or `complete` is the last on a
//! detached folio.
//!
//! # A page that has arrived
//!
//! ```text
//!        reader, at r3: not up to date                  fill, in parts                     who frees the frames
//!   l1   word, Acquire: live, its, PARTIAL      f1   bytes of a part                f4  retire; bits cleared
//!   l2   the page's bit, Acquire                   f2   PARTIAL, then the bit, Release      (through a lock)
//!   r4 ..                                          f3   bytes of another part ..       o2  prepare: fence, word
//! ```
//!
//! 4. l2 sees the bit that f2 of this folio set: then r4 copies the bytes of f1 or later ones, as if o5 had been
//!    there. This folio's fill writes them once, so later ones are a later folio's, and r6 refuses.
//! 5. l2 sees a bit from before this folio: it cannot. Such a bit was cleared at f4, before o2; and l1 read what o2
//!    wrote, or a step on the same word since, each of which hands the Release of o2 on. (o2 has two: its fence,
//!    which stands behind the clearing as well, and its word. Either would do here.)
//! 6. l2 sees a bit of a later folio: with it (its Release) the reader has met the odd sequence before that
//!    folio, and r6 refuses, without need of r5.
//!
//! # A page that is written in place
//!
//! The steps p1 to p6 of the writer and q1 to q6 of the reader, and why they suffice, are told at the head of
//! [`written`](quinion::internals::arena::written). A holder copies as if there were no writer, looks once more, and if
//! there was one it copies page by page; a thread that pins looks for writers, and a writer for pins, each behind a
//! fence of its own.
//!
//! # The folio lock
//!
//! Its holder sees what the previous holder did under it: the lock's Acquire reads what `unlock` or `complete` stored
//! with Release, or a later step on the same word. So of two threads that find a folio without bytes one fills it, and
//! the other, if it gets the lock, finds them. Readers look at UPTODATE and not at the lock; there is nothing to show
//! of them that is not shown above.
//!
//! # A page that is changed while it is written back
//!
//! The steps w1 to w3 of the writer and b1 to b3 of write-back are told at the head of
//! [`dirty`](quinion::internals::arena::dirty). That a dirty folio is not evicted, and not dropped behind a reader who
//! has just seen it clean (D07), is the tree lock's doing: flags change under it, and are looked at under it.
//!
//! # Every step is needed
//!
//! Each row leaves one step out of the real code and shows what a scenario then meets. "race" is the checker's report
//! that plain memory is written while another thread reads or writes it.
//!
//! | left out | scenario | what happens |
//! |---|---|---|
//! | `ReaderFence` | `old_file` | half of the next file's bytes are accepted: `[1, 2]` |
//! | | `new_file` | the next identity is seen with the old word: file 2 reads `[1, 1]` |
//! | | `partial_page_of_a_failed_fill` | file 1 reads `[1, 2]`: the folio failed, and its frames are file 2's |
//! | | `first_write` | half of a writer's bytes are accepted: `[1, 2]` |
//! | `ReaderRecheck` | `old_page` | as above, on every machine |
//! | | `partial_page_of_the_next_folio` | file 1 reads `[2, 2]` by a bit that was set for file 2 |
//! | | `written_folio_is_retired` | `[2, 20]`: the page's number is as it was, the frame is file 2's |
//! | `ReaderMapping` | `old_file` | file 1 reads `[2, 2]` |
//! | `ReaderIndex` | `old_page` | page 0 reads `[2, 2]` |
//! | `ReaderParity` | `singles_become_pair` | a page inside a new folio passes for the old folio: `[2, 21]` |
//! | `ReaderUptodate` | `first_fill` | a page that is not filled reads `[0, 0]` |
//! | `ReaderAcquire` | `first_fill` | as above, although the folio is up to date |
//! | `PrepareFence` | `new_file` | file 2 reads `[1, 1]`: its name, the old word, the old bytes |
//! | | `taken_over_new` | the same |
//! | `PrepareStep` | `old_file` | the old sequence comes back: `[1, 2]` |
//! | `PrepareRelease` | `unfilled_hold_of_a_later_folio` | file 1's reader waits for file 2's folio and reads 2 |
//! | `FillFence` | `filled_elsewhere` | file 1 reads `[1, 2]`: a worker's bytes, the old word |
//! | `CompleteRelease` | `first_fill` | `[0, 0]` in a folio that is up to date |
//! | `RetireStep` | `singles_become_pair` | the old single is never refused: `[2, 21]` |
//! | `RetireHolds` | `hold_against_eviction` | race: the frame is reused under a hold |
//! | `RetireDetached` | `fill_against_removal` | race: the frame is reused under its fill |
//! | `RetireAcquire` | `hold_against_eviction` | race: a holder's reads are not yet over |
//! | `RetireRelease` | `look_then_remove` | race: the remover's reads are not yet over |
//! | `HoldAcquire` | `hold_against_fill` | race: a holder reads what is being filled |
//! | `HoldUptodate` | `hold_against_fill` | race: the same |
//! | `HoldCompare` | `hold_against_reuse` | a hold on another file's folio: 2 for 1 |
//! | `PutAcquire` | `two_holds_against_removal` | race: the last holder frees too early for the other |
//! | `PutRelease` | `hold_against_eviction` | race: as `RetireAcquire` |
//! | `PutHolds` | `hold_against_failed_fill` | race: two parties free the frame |
//! | `ReadableAcquire` | `wait_for_a_fill` | race: a holder is told "filled" and reads what is being filled |
//! | `ReadableSequence` | `wait_for_a_removed_fill` | bytes of a removed folio pass for the file's |
//! | `PagesReadRelease` | `page_of_a_fill` | race: a holder reads a page that is said to have arrived |
//! | | `page_of_a_partial_fill` | a reader without a hold reads `[0, 0]` there |
//! | `PagesReadAcquire` | `page_of_a_fill` | race: the same |
//! | `PagesReadClear` | `page_of_a_later_fill` | race: what arrived for the folio before passes for this one's |
//! | | `partial_page_noted_elsewhere` | a reader without a hold reads `[1, 1]` as file 2's |
//! | `ReaderPartialUptodate` | `page_of_a_partial_fill` | a page that has not arrived reads `[0, 0]` |
//! | `ReaderWordAcquire` | `partial_page_noted_elsewhere` | file 2 reads `[1, 1]`: a bit from before its folio |
//! | `ReaderSteady` | `later_write` | a page is accepted half written: `[2, 3]` |
//! | `WrittenAcquire` | `written_folio_seen_first` | `[0, 0]`: a writer's word, and not the fill's bytes of another page |
//! | `WrittenStep` | `first_write` | a reader that found the folio steady accepts `[1, 2]` |
//! | | `partial_page_is_written` | a reader of what had arrived accepts the same |
//! | | `two_writers_of_two_pages` | the same |
//! | `WriteOdd` | `later_write` | `[2, 3]` |
//! | | `pin_against_later_write` | race: a user reads what is being written |
//! | `WriteFence` | `first_write`, `later_write` | a byte is seen before the number that says so |
//! | `WriteFenceOrder` | `pin_against_first_write`, `.._later_write` | race: neither sees the other |
//! | | `write_against_fill` | race: a writer's bytes and the fill's |
//! | `WriteRelease` | `later_write` | the new number, and half of the old bytes |
//! | | `pin_against_later_write` | race: lent bytes are not yet there |
//! | `PageOdd`, `PageAcquire`, `PageFence`, `PageRecheck` | `later_write` | `[2, 3]` |
//! | `HolderFence`, `HolderRecheck` | `hold_against_first_write` | `[1, 2]` under a hold |
//! | `PinFence` | `pin_against_first_write`, `.._later_write` | race: neither sees the other |
//! | `PinWritten` | `pin_against_first_write` | race: bytes are lent while a writer is in them |
//! | `NoWriterAcquire` | `pin_against_later_write` | race: the writer has left, and its bytes have not come |
//! | `WritePins` | `pin_against_first_write` | race: what is lent is written |
//! | `PinnedAcquire`, `UnpinRelease` | `pin_against_first_write` | race: the user's reads are not yet over |
//! | `SplitStep` | `split_then_reuse` | a reader of the whole accepts `[11, 20]`: half of it is another file's by now |
//! | `PieceFence` | `piece_where_a_folio_was` | a piece's name, the word and the bytes of what its frame headed before |
//! | `PieceRelease` | `piece_of_another_file` | `[21, 21]`: a piece's word, the name of what its frame headed before |
//! | `RetireUnwritten` | `change_against_eviction` | a page is evicted that its writer was told is dirty |
//! | `DirtyWriteFence`, `DirtyFlushFence` | `change_against_write_back` | the bit was set, and the flush has old bytes |
//! | `MarkerSequence` | `marker_of_a_later_folio` | the next folio has lost its marker |
//! | `MarkerFlag` | `one_marker_for_two` | two readers start the same window |
//!
//! # What was found to be unnecessary
//!
//! * For a reader, Release on the word's store in `prepare`: a reader that sees that word sees "not up to date" and
//!   copies nothing, whatever identity it sees. It stands there for a holder of a folio that is still being
//!   filled (`PrepareRelease`). Since it does stand there, a reader of the old page never meets "filling":
//!   with the new word it sees the new identity.
//! * A fence where a fill fails, beyond those of `retire` and `complete`, one after the other.
//! * For a reader who holds nothing, the look at `PARTIAL_UPTODATE`: bits that are not in use are clear. It spares the
//!   look at them.
//! * A look at `LOCKED` in `try_retire`: a fill has a hold.
//! * Acquire in a writer's look whether the folio is filled, and any ordering of the step to written: the fence
//!   behind its entering does both.
//! * For a reader of a written folio, the fence of its second look at the word: the fence of its second look at
//!   the page stands before it. It is there because that look is the one of all readers.
//!
//! # What the checker does not show
//!
//! * Loads that return what is stored later by the same execution (load buffering). The Acquire in
//!   `complete` stands against that alone: it frees a frame whose identity the remover has just read.
//! * Devices. A direct read into a frame starts with a system call after `before_bytes`; that the kernel and the
//!   device do not write before it is their contract, and not tested here.
//! * The lock of a page, for which the scenarios have one of the checker's.
//! * The wrap of the sequence: a reader that sleeps in its copy while its frame is given away 2^31 times
//!   and wakes at that very number is not noticed.
//! * It keeps the last seven stores to each atomic, so a scenario has no more than that within a reader's sight.
//! * It tracks one last access of an atomic, so it overlooks that a load races with a store if the storing
//!   thread loads first. Hence the owner runs on the model's first thread: the first run explored has it as far
//!   ahead as can be, and relaxed loads then return everything older. For a reader that only loads this is all
//!   there is; `two_generations` without preemptions has 201 runs, the number that counting by hand gives.
//!   And each scenario lists the outcomes it must meet, so that none passes because it met nothing.

#![cfg(quinion_model)]
#![allow(unsafe_code, reason = "bytes under a hold are plain memory; the model watches them for races")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;
use model_support::{Needed, all_needed, explore as explore_bounded};
use quinion::internals::arena::{
    Descriptor, FillEnd, Flags, FolioStamp, LockRefused, NotReady, PutOutcome, ReadableState, RetireOutcome,
    WriteRefused, before_bytes, dirty, pages_read, written,
};
use quinion::internals::sync::Mutant;
use quinion::internals::units::{MappingId, Order, PageIndex};

mod model_support;

const ONE: MappingId = MappingId(1);
const TWO: MappingId = MappingId(2);
const THREE: MappingId = MappingId(3);
const PAGE_0: PageIndex = PageIndex(0);
const PAGE_1: PageIndex = PageIndex(1);
const SMALL: Order = Order(0);
const PAIR: Order = Order(1);

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
    /// As `write`, by a thread that has entered the page, and without the fence that `copy_in` has besides.
    fn change(&self, content: u64) {
        self.0.iter().for_each(|word| word.store(content, Ordering::Relaxed));
    }
    fn copy(&self) -> [u64; 2] {
        [0, 1].map(|word| self.0[word].load(Ordering::Relaxed))
    }
}

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
    fn fill(&self, frame: usize, mapping: MappingId, index: PageIndex, content: u64) {
        self.descriptors[frame].prepare(mapping, index, SMALL);
        self.bytes[frame].write(content);
        assert_eq!(self.descriptors[frame].complete(), FillEnd::Attached);
    }
    /// Makes both frames one folio and fills it; the second page's content is one more.
    fn fill_pair(&self, mapping: MappingId, content: u64) {
        self.descriptors[0].prepare(mapping, PAGE_0, PAIR);
        self.bytes[0].write(content);
        self.bytes[1].write(content + 1);
        assert_eq!(self.descriptors[0].complete(), FillEnd::Attached);
    }
    fn retire(&self, frame: usize) {
        self.descriptors[frame].try_retire().expect("nobody holds it");
    }
    /// The hit: look at the folio that `head` heads, copy from `frame`, look again.
    fn read(&self, head: usize, frame: usize, mapping: MappingId, index: PageIndex) -> Read {
        match self.descriptors[head].begin_read(mapping, index) {
            Err(reason) => Read::Refused(reason),
            Ok(stamp) => {
                let bytes = self.bytes[frame].copy();
                if self.descriptors[head].end_read(stamp) { Read::Accepted(bytes) } else { Read::Changed }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Read {
    Refused(NotReady),
    Changed,
    Accepted([u64; 2]),
}

impl Read {
    /// Checks that an accepted content is one of `right`, whole.
    #[track_caller]
    fn must_be(self, right: &[u64]) -> String {
        if let Read::Accepted(bytes) = self {
            let whole = right.iter().any(|&content| bytes == [content; 2]);
            assert!(whole, "wrong bytes: accepted {bytes:?}, right is {right:?}");
        }
        format!("{self:?}")
    }
}

// ---- the fixture for holds: one frame whose bytes are plain memory ------------------------------------

/// A frame as holders see it. Under a hold bytes are read as plain memory, so the model must see that no write comes
/// near; `freed` counts the parties that take the frame for theirs.
#[derive(Debug)]
struct Held {
    descriptor: Descriptor,
    bytes: UnsafeCell<u64>,
    freed: AtomicU32,
}

// SAFETY: the model runs one thread at a time, and its cell reports what would be a race.
unsafe impl Sync for Held {}

/// What the next use of a frame writes to it.
const FREED: u64 = 99;

impl Held {
    fn new() -> Arc<Self> {
        let held =
            Self { descriptor: Descriptor::new(), bytes: UnsafeCell::new(0), freed: AtomicU32::new(0) };
        Arc::new(held)
    }
    fn filled() -> Arc<Self> {
        let held = Self::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL);
        held.write(1);
        assert_eq!(held.descriptor.complete(), FillEnd::Attached);
        held
    }
    fn write(&self, content: u64) {
        // SAFETY: the model checks that no other thread accesses it.
        self.bytes.with_mut(|bytes| unsafe { *bytes = content });
    }
    fn content(&self) -> u64 {
        // SAFETY: as in `write`.
        self.bytes.with(|bytes| unsafe { *bytes })
    }
    /// What the party does that frees the frame by the protocol: the next use overwrites it.
    fn free(&self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
        self.write(FREED);
    }
    /// A holder: reads the bytes if there is a folio to hold, and releases it.
    fn hold_and_look(&self) -> String {
        match self.descriptor.try_hold(ONE, PAGE_0) {
            Err(reason) => format!("{reason:?}"),
            Ok(_) => {
                let content = self.content();
                assert!(content == 1, "wrong bytes: {content} under a hold");
                self.put()
            }
        }
    }
    /// A grabber of what is up to date: changes what the lock guards, if it gets it.
    fn lock_and_add(&self) -> &'static str {
        let stamp = self.descriptor.try_hold_unfilled(ONE, PAGE_0).expect("it stays");
        let told = match self.descriptor.try_lock(stamp) {
            Ok(_) => {
                self.write(self.content() + 1);
                self.descriptor.unlock();
                "locked"
            }
            Err(LockRefused::Locked) => "refused",
            Err(LockRefused::Left) => "left",
        };
        self.descriptor.put();
        told
    }
    /// A grabber of what was allocated: fills it, or looks at what the other has filled it with.
    fn lock_and_fill(&self, content: u64) -> String {
        let stamp = self.descriptor.try_hold_unfilled(ONE, PAGE_0).expect("it stays");
        match self.descriptor.try_lock(stamp) {
            Ok(word) if word.has(Flags::UPTODATE) => {
                let seen = self.content();
                self.descriptor.unlock();
                self.descriptor.put();
                format!("saw {seen}")
            }
            Ok(_) => {
                self.write(content);
                assert_eq!(self.descriptor.complete(), FillEnd::Attached);
                "filled".into()
            }
            Err(refused) => {
                self.descriptor.put();
                format!("{refused:?}")
            }
        }
    }
    fn put(&self) -> String {
        let put = self.descriptor.put();
        if put != PutOutcome::Kept {
            self.free();
        }
        format!("{put:?}")
    }
    fn retire(&self) -> String {
        let retire = self.descriptor.retire();
        if retire == RetireOutcome::Free {
            self.free();
        }
        format!("{retire:?}")
    }
    fn evict(&self) -> String {
        let evicted = self.descriptor.try_retire();
        if evicted.is_some() {
            self.free();
        }
        format!("{evicted:?}")
    }
    #[track_caller]
    fn freed_once(&self) {
        let freed = self.freed.load(Ordering::Relaxed);
        assert!(freed == 1, "wrong count: {freed} parties freed the frame");
    }
}

/// A fill that fails: the folio leaves its tree, and is unlocked. The caller is the fill, under the tree lock.
fn fail(descriptor: &Descriptor) -> PutOutcome {
    assert_eq!(descriptor.retire(), RetireOutcome::Held, "a fill has a hold");
    match descriptor.complete_empty() {
        FillEnd::Detached(put) => put,
        FillEnd::Attached => panic!("it was just retired"),
    }
}

// ---- scenarios ----------------------------------------------------------------------------------------

fn explore(expected: &[&str], scenario: fn() -> String) {
    explore_bounded(None, expected, scenario);
}

fn spawn<T: Send + Sync + 'static, R: Send + 'static>(
    fixture: &Arc<T>,
    act: impl FnOnce(&T) -> R + 'static,
) -> thread::JoinHandle<R> {
    let fixture = fixture.clone();
    thread::spawn(move || act(&fixture))
}

/// A reader of `mapping` and `index` against the owner, who gives the frame to `next`.
fn refill(
    mapping: MappingId,
    index: PageIndex,
    right: &'static [u64],
    next: (MappingId, PageIndex),
) -> String {
    let frames = Frames::new();
    frames.fill(0, ONE, PAGE_0, 1);
    let reader = spawn(&frames, move |frames| frames.read(0, 0, mapping, index).must_be(right));
    frames.retire(0);
    frames.fill(0, next.0, next.1, 2);
    reader.join().unwrap()
}

#[test]
fn old_file() {
    explore(&["Accepted([1, 1])", "Changed", "Refused(Mismatch)"], || {
        refill(ONE, PAGE_0, &[1], (TWO, PAGE_0))
    });
}

#[test]
fn new_file() {
    explore(&["Accepted([2, 2])", "Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        refill(TWO, PAGE_0, &[2], (TWO, PAGE_0))
    });
}

#[test]
fn old_page() {
    explore(&["Accepted([1, 1])", "Changed", "Refused(Mismatch)"], || {
        refill(ONE, PAGE_0, &[1], (ONE, PAGE_1))
    });
}

#[test]
fn new_page() {
    explore(&["Accepted([2, 2])", "Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        refill(ONE, PAGE_1, &[2], (ONE, PAGE_1))
    });
}

#[test]
fn first_fill() {
    explore(&["Accepted([1, 1])", "Refused(Filling)", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        let reader = spawn(&frames, |frames| frames.read(0, 0, ONE, PAGE_0).must_be(&[1]));
        frames.fill(0, ONE, PAGE_0, 1);
        reader.join().unwrap()
    });
}

#[test]
fn two_generations() {
    explore_bounded(
        Some(1),
        &["Accepted([1, 1])", "Accepted([3, 3])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let frames = Frames::new();
            frames.fill(0, ONE, PAGE_0, 1);
            let reader = spawn(&frames, |frames| frames.read(0, 0, ONE, PAGE_0).must_be(&[1, 3]));
            frames.retire(0);
            frames.fill(0, TWO, PAGE_0, 2);
            frames.retire(0);
            frames.fill(0, ONE, PAGE_0, 3);
            reader.join().unwrap()
        },
    );
}

#[test]
fn failed_fill() {
    explore_bounded(
        Some(1),
        &["Accepted([1, 1])", "Accepted([3, 3])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let frames = Frames::new();
            frames.fill(0, ONE, PAGE_0, 1);
            let reader = spawn(&frames, |frames| frames.read(0, 0, ONE, PAGE_0).must_be(&[1, 3]));
            frames.retire(0);
            frames.descriptors[0].prepare(TWO, PAGE_0, SMALL);
            let put = fail(&frames.descriptors[0]);
            assert_eq!(put, PutOutcome::Last(Order(0)), "nobody holds it");
            frames.fill(0, ONE, PAGE_0, 3);
            reader.join().unwrap()
        },
    );
}

#[test]
fn pair_becomes_singles() {
    explore(&["Accepted([11, 11])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let reader = spawn(&frames, |frames| frames.read(0, 1, ONE, PAGE_1).must_be(&[11]));
        frames.retire(0);
        frames.descriptors[0].set_free(Some(PAIR));
        frames.descriptors[0].set_free(None);
        frames.fill(1, THREE, PAGE_1, 30);
        frames.fill(0, TWO, PAGE_0, 20);
        reader.join().unwrap()
    });
}

#[test]
fn singles_become_pair() {
    explore(&["Accepted([2, 2])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        frames.fill(1, ONE, PAGE_1, 2);
        let reader = spawn(&frames, |frames| frames.read(1, 1, ONE, PAGE_1).must_be(&[2]));
        frames.retire(0);
        frames.retire(1);
        frames.fill_pair(TWO, 20);
        reader.join().unwrap()
    });
}

fn split(frames: &Frames, mapping: MappingId) {
    let whole = frames.descriptors[0].try_begin_split().expect("nobody holds it");
    frames.descriptors[0].prepare_piece(mapping, PAGE_0, SMALL, whole, 0);
    frames.descriptors[1].prepare_piece(mapping, PAGE_1, SMALL, whole, 0);
}

/// A reader who came by the whole folio, and one who comes by a piece.
#[test]
fn split_pair() {
    explore(&["Accepted([11, 11])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let reader = spawn(&frames, |frames| frames.read(0, 1, ONE, PAGE_1).must_be(&[11]));
        split(&frames, ONE);
        reader.join().unwrap()
    });
    explore(&["Accepted([11, 11])", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let reader = spawn(&frames, |frames| frames.read(1, 1, ONE, PAGE_1).must_be(&[11]));
        split(&frames, ONE);
        reader.join().unwrap()
    });
}

/// The second page of a folio is split off, and its frame becomes another file's, while a reader takes it for a page of
/// the whole.
#[test]
fn split_then_reuse() {
    explore(&["Accepted([11, 11])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let reader = spawn(&frames, |frames| frames.read(0, 1, ONE, PAGE_1).must_be(&[11]));
        split(&frames, ONE);
        frames.retire(1);
        frames.fill(1, TWO, PAGE_1, 20);
        reader.join().unwrap()
    });
}

/// A frame that headed file 2's folio is the second of file 1's, which another thread splits.
#[test]
fn piece_where_a_folio_was() {
    explore(&["Accepted([11, 11])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill(1, TWO, PAGE_1, 5);
        let filled = Arc::new(AtomicU32::new(0));
        let seen = filled.clone();
        let splitter = spawn(&frames, move |frames| {
            // Acquire, partner: the Release below.
            if seen.load(Ordering::Acquire) == 1 {
                split(frames, ONE);
            }
        });
        let reader = spawn(&frames, |frames| frames.read(1, 1, ONE, PAGE_1).must_be(&[11]));
        frames.retire(1);
        frames.fill_pair(ONE, 10);
        filled.store(1, Ordering::Release); // partner: the Acquire above
        splitter.join().unwrap();
        reader.join().unwrap()
    });
}

/// A frame that headed file 1's folio of page 1 is the second of file 2's, which is split.
#[test]
fn piece_of_another_file() {
    explore(&["Accepted([1, 1])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill(1, ONE, PAGE_1, 1);
        let reader = spawn(&frames, |frames| frames.read(1, 1, ONE, PAGE_1).must_be(&[1]));
        frames.retire(1);
        frames.fill_pair(TWO, 20);
        split(&frames, TWO);
        reader.join().unwrap()
    });
}

/// A hold against a split: one of the two is refused, and the holder reads the whole.
#[test]
fn hold_against_split() {
    explore(&["Mismatch, split", "held, refused", "held, split"], || {
        let frames = Frames::new();
        frames.fill_pair(ONE, 10);
        let holder = spawn(&frames, |frames| match frames.descriptors[0].try_hold(ONE, PAGE_1) {
            Err(reason) => format!("{reason:?}"),
            Ok(stamp) => {
                let bytes = frames.bytes[1].copy();
                let same = frames.descriptors[0].is_readable(stamp) == ReadableState::Yes;
                assert!(bytes == [11; 2] && same, "wrong bytes: accepted {bytes:?} under a hold");
                assert_eq!(frames.descriptors[0].put(), PutOutcome::Kept);
                "held".to_owned()
            }
        });
        let split = match frames.descriptors[0].try_begin_split() {
            None => "refused",
            Some(whole) => {
                frames.descriptors[0].prepare_piece(ONE, PAGE_0, SMALL, whole, 0);
                frames.descriptors[1].prepare_piece(ONE, PAGE_1, SMALL, whole, 0);
                frames.retire(1);
                frames.fill(1, TWO, PAGE_1, 20);
                "split"
            }
        };
        format!("{}, {split}", holder.join().unwrap())
    });
}

/// One thread retires, another takes the frame over; the flag stands for the arena's lock.
fn taken_over(mapping: MappingId, right: &'static [u64]) -> String {
    let frames = Frames::new();
    frames.fill(0, ONE, PAGE_0, 1);
    let free = Arc::new(AtomicU32::new(0));
    let freed = free.clone();
    let owner = spawn(&frames, move |frames| {
        // Acquire, partner: the Release below.
        if free.load(Ordering::Acquire) == 1 {
            frames.fill(0, TWO, PAGE_0, 2);
        }
    });
    let reader = spawn(&frames, move |frames| frames.read(0, 0, mapping, PAGE_0).must_be(right));
    frames.retire(0);
    freed.store(1, Ordering::Release); // partner: the Acquire above
    owner.join().unwrap();
    reader.join().unwrap()
}

#[test]
fn taken_over_old() {
    explore(&["Accepted([1, 1])", "Changed", "Refused(Mismatch)"], || taken_over(ONE, &[1]));
}

#[test]
fn taken_over_new() {
    explore(&["Accepted([2, 2])", "Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        taken_over(TWO, &[2])
    });
}

#[test]
fn filled_elsewhere() {
    explore(&["Accepted([1, 1])", "Changed", "Refused(Mismatch)"], || {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let queue = Arc::new(AtomicU32::new(0));
        let queued = queue.clone();
        let worker = spawn(&frames, move |frames| {
            // Acquire, partner: the Release below.
            if queue.load(Ordering::Acquire) == 1 {
                frames.bytes[0].write(2);
                frames.descriptors[0].complete();
            }
        });
        let reader = spawn(&frames, |frames| frames.read(0, 0, ONE, PAGE_0).must_be(&[1]));
        frames.retire(0);
        frames.descriptors[0].prepare(TWO, PAGE_0, SMALL);
        queued.store(1, Ordering::Release); // partner: the Acquire above
        worker.join().unwrap();
        reader.join().unwrap()
    });
}

/// The rule of growth, with a size of the scenario's own: the old last page is retired, then the size grows.
#[test]
fn growth() {
    explore(&["Accepted([2, 2])", "Refused(Filling)", "Refused(Mismatch)", "old size"], || {
        let frames = Frames::new();
        frames.fill(0, ONE, PAGE_0, 1);
        let size = Arc::new(AtomicU64::new(1));
        let grown = size.clone();
        let reader = spawn(&frames, move |frames| {
            // Acquire, partner: the Release below.
            if size.load(Ordering::Acquire) == 1 {
                return "old size".into();
            }
            frames.read(0, 0, ONE, PAGE_0).must_be(&[2])
        });
        frames.retire(0);
        grown.store(2, Ordering::Release); // partner: the Acquire above
        frames.fill(0, ONE, PAGE_0, 2);
        reader.join().unwrap()
    });
}

/// A file that is cut and grows again around a reader: what was filled meanwhile, with zeroes behind the end, is not
/// shown by the size before it or after it. `read` is told how to look at the size, and accepts nothing but 2.
fn growth_after_a_cut(outcomes: &[&str], read: fn(&Frames, &dyn Fn() -> bool) -> String) {
    explore_bounded(Some(3), outcomes, move || {
        let frames = Frames::new();
        let size = Arc::new(AtomicU64::new(2));
        let known = size.clone();
        // Acquire, partner: the Release below.
        let reaches = move || known.load(Ordering::Acquire) == 2;
        let reader =
            spawn(&frames, move |frames| if reaches() { read(frames, &reaches) } else { "cut".into() });
        frames.descriptors[0].prepare(ONE, PAGE_0, SMALL);
        frames.bytes[0].write(1);
        size.store(1, Ordering::Relaxed);
        frames.descriptors[0].complete();
        let retired = frames.descriptors[0].retire();
        size.store(2, Ordering::Release); // partner: the Acquire above
        // What is still held is another's to reuse.
        if retired == RetireOutcome::Free {
            frames.fill(0, ONE, PAGE_0, 2);
        }
        reader.join().unwrap()
    });
}

/// A hit looks at the size before its second look at the folio; after it, and the outcome `[1, 1]` is met.
#[test]
fn growth_after_a_cut_around_a_hit() {
    let outcomes =
        &["Accepted([2, 2])", "Changed", "Refused(Filling)", "Refused(Mismatch)", "cut", "cut meanwhile"];
    growth_after_a_cut(outcomes, |frames, reaches| {
        let stamp = match frames.descriptors[0].begin_read(ONE, PAGE_0) {
            Err(reason) => return format!("Refused({reason:?})"),
            Ok(stamp) => stamp,
        };
        let bytes = frames.bytes[0].copy();
        fence(Ordering::Acquire); // partner: the Release fence of `before_bytes`
        if !reaches() {
            "cut meanwhile".into()
        } else if frames.descriptors[0].end_read(stamp) {
            Read::Accepted(bytes).must_be(&[2])
        } else {
            "Changed".into()
        }
    });
}

/// The holder checks after the size whether the folio has left the index.
#[test]
fn growth_after_a_cut_under_a_hold() {
    let outcomes = &["Accepted([2, 2])", "Filling", "Mismatch", "cut", "cut meanwhile", "left"];
    growth_after_a_cut(outcomes, |frames, reaches| {
        let stamp = match frames.descriptors[0].try_hold(ONE, PAGE_0) {
            Err(reason) => return format!("{reason:?}"),
            Ok(stamp) => stamp,
        };
        let bytes = frames.bytes[0].copy();
        let outcome = if !reaches() {
            "cut meanwhile".into()
        } else if frames.descriptors[0].is_attached(stamp) {
            Read::Accepted(bytes).must_be(&[2])
        } else {
            "left".into()
        };
        frames.descriptors[0].put();
        outcome
    });
}

#[test]
fn hold_against_eviction() {
    explore(
        &[
            "evicted None, holder Kept",
            "evicted Some(order 0), holder Kept",
            "evicted Some(order 0), holder Mismatch",
        ],
        || {
            let held = Held::filled();
            let holder = spawn(&held, |held| held.hold_and_look());
            let evicted = held.evict();
            let look = holder.join().unwrap();
            if evicted == "None" {
                held.evict();
            }
            held.freed_once();
            format!("evicted {evicted}, holder {look}")
        },
    );
}

#[test]
fn pin_against_eviction() {
    explore(
        &[
            "evicted None, pinner Kept",
            "evicted Some(order 0), pinner Kept",
            "evicted Some(order 0), pinner refused",
        ],
        || {
            let held = Held::filled();
            let holder = spawn(&held, |held| {
                let Ok(_) = held.descriptor.try_hold(ONE, PAGE_0) else { return "refused".into() };
                held.descriptor.pin();
                assert!(!held.descriptor.may_have_writers(), "wrong answer: nobody writes it");
                let content = held.content();
                assert!(content == 1, "wrong bytes: {content} under a pin");
                held.descriptor.unpin();
                held.put()
            });
            let evicted = held.evict();
            let pins = held.descriptor.pins();
            assert!(pins == 0 || evicted == "None", "wrong count: {pins} pins on an evicted folio");
            format!("evicted {evicted}, pinner {}", holder.join().unwrap())
        },
    );
}

#[test]
fn two_holds_against_removal() {
    explore_bounded(
        Some(3),
        &[
            "Free, Kept, Kept",
            "Free, Kept, Mismatch",
            "Free, Mismatch, Kept",
            "Free, Mismatch, Mismatch",
            "Held, Kept, Last(order 0)",
            "Held, Last(order 0), Kept",
            "Held, Last(order 0), Mismatch",
            "Held, Mismatch, Last(order 0)",
        ],
        || {
            let held = Held::filled();
            let [one, two] = [0, 1].map(|_| spawn(&held, |held| held.hold_and_look()));
            let retired = held.retire();
            let (one, two) = (one.join().unwrap(), two.join().unwrap());
            held.freed_once();
            format!("{retired}, {one}, {two}")
        },
    );
}

#[test]
fn look_then_remove() {
    explore(&["Free, Kept", "Free, Mismatch", "Held, Last(order 0)"], || {
        let held = Held::filled();
        let holder = spawn(&held, |held| held.hold_and_look());
        let content = held.content();
        assert!(content == 1, "wrong bytes: {content} under the tree lock");
        let retired = held.retire();
        let look = holder.join().unwrap();
        held.freed_once();
        format!("{retired}, {look}")
    });
}

#[test]
fn hold_against_fill() {
    explore(&["Filling", "Kept", "Mismatch"], || {
        let held = Held::new();
        let holder = spawn(&held, |held| held.hold_and_look());
        held.descriptor.prepare(ONE, PAGE_0, SMALL);
        held.write(1);
        held.descriptor.complete();
        holder.join().unwrap()
    });
}

#[test]
fn hold_against_reuse() {
    explore(&["Kept", "Mismatch"], || {
        let held = Held::filled();
        let holder = spawn(&held, |held| held.hold_and_look());
        if held.descriptor.try_retire().is_some() {
            held.descriptor.prepare(TWO, PAGE_0, SMALL);
            held.write(2);
            held.descriptor.complete();
        }
        holder.join().unwrap()
    });
}

#[test]
fn fill_against_removal() {
    explore(&["Free, Attached, Mismatch", "Held, Detached(Last(order 0)), Mismatch"], || {
        let held = Held::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL);
        let filler = spawn(&held, |held| {
            held.write(1);
            let completed = held.descriptor.complete();
            if let FillEnd::Detached(PutOutcome::Last(_)) = completed {
                held.free();
            }
            format!("{completed:?}")
        });
        let retired = held.retire();
        let look = held.hold_and_look();
        let completed = filler.join().unwrap();
        held.freed_once();
        format!("{retired}, {completed}, {look}")
    });
}

/// A reader holds a folio that the device then does not deliver: it leaves its tree, and is unlocked.
#[test]
fn hold_against_failed_fill() {
    explore(
        &[
            "given up Kept, holder Last(order 0)",
            "given up Last(order 0), holder Kept",
            "given up Last(order 0), holder Mismatch",
        ],
        || {
            let held = Held::new();
            let holder = spawn(&held, |held| match held.descriptor.try_hold_unfilled(ONE, PAGE_0) {
                Err(reason) => format!("{reason:?}"),
                Ok(stamp) => {
                    let readable = held.descriptor.is_readable(stamp);
                    assert!(
                        readable != ReadableState::Yes,
                        "wrong answer: a folio that was never filled is readable"
                    );
                    held.put()
                }
            });
            held.descriptor.prepare(ONE, PAGE_0, SMALL);
            let given_up = fail(&held.descriptor);
            if given_up != PutOutcome::Kept {
                held.free();
            }
            let look = holder.join().unwrap();
            held.freed_once();
            format!("given up {given_up:?}, holder {look}")
        },
    );
}

/// A reader of the old folio's slot comes while the frame is being filled for another file: it must not
/// hold the new folio for the old one's.
#[test]
fn unfilled_hold_of_a_later_folio() {
    explore(
        &[
            "evicted None, holder Kept",
            "evicted Some(order 0), holder Kept",
            "evicted Some(order 0), holder Mismatch",
        ],
        || {
            let held = Held::filled();
            let holder = spawn(&held, |held| match held.descriptor.try_hold_unfilled(ONE, PAGE_0) {
                Err(reason) => format!("{reason:?}"),
                Ok(stamp) => {
                    if held.descriptor.is_readable(stamp) == ReadableState::Yes {
                        let content = held.content();
                        assert!(content == 1, "wrong bytes: {content} under a hold");
                    }
                    held.put()
                }
            });
            let evicted = held.descriptor.try_retire();
            if evicted.is_some() {
                held.descriptor.prepare(TWO, PAGE_0, SMALL);
                held.write(2);
                held.descriptor.complete();
            }
            format!("evicted {evicted:?}, holder {}", holder.join().unwrap())
        },
    );
}

/// A reader holds a folio that is being filled, and reads it when it is told that it may.
fn wait(held: &Held) -> (ReadableState, String) {
    let Ok(stamp) = held.descriptor.try_hold_unfilled(ONE, PAGE_0) else {
        return (ReadableState::Never, "Mismatch".into());
    };
    let readable = held.descriptor.is_readable(stamp);
    if readable == ReadableState::Yes {
        let content = held.content();
        assert!(content == 1, "wrong bytes: {content} under a hold");
    }
    (readable, held.put())
}

#[test]
fn wait_for_a_fill() {
    explore(&["NotYet, Kept", "Yes, Kept"], || {
        let held = Held::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL);
        let waiter = spawn(&held, |held| {
            let (readable, put) = wait(held);
            format!("{readable:?}, {put}")
        });
        held.write(1);
        held.descriptor.complete();
        waiter.join().unwrap()
    });
}

/// The folio leaves the index, then its fill ends: an earlier holder must not take the bytes for the file's.
#[test]
fn wait_for_a_removed_fill() {
    explore(&["Never, Last(order 0)", "Never, Mismatch", "NotYet, Kept", "NotYet, Last(order 0)"], || {
        let held = Held::new();
        held.descriptor.prepare(ONE, PAGE_0, SMALL);
        let waiter = spawn(&held, |held| {
            let (readable, put) = wait(held);
            assert!(readable != ReadableState::Yes, "wrong answer: it left the index before it was filled");
            format!("{readable:?}, {put}")
        });
        held.retire();
        held.write(1);
        if let FillEnd::Detached(PutOutcome::Last(_)) = held.descriptor.complete() {
            held.free();
        }
        let waited = waiter.join().unwrap();
        held.freed_once();
        waited
    });
}

/// A folio of two pages that is filled in two parts: what its holder reads is its first page.
#[derive(Debug)]
struct PartialFill {
    held: Arc<Held>,
    /// The bits of both pages, the first page's lowest.
    bits: quinion::internals::sync::atomic::AtomicU64,
}

impl PartialFill {
    fn new() -> Arc<Self> {
        Arc::new(Self { held: Held::new(), bits: quinion::internals::sync::atomic::AtomicU64::new(0) })
    }
    fn prepare(&self, mapping: MappingId) {
        self.held.descriptor.prepare(mapping, PAGE_0, PAIR);
    }
    fn note_read(&self, bit: u64) {
        self.held.descriptor.note_pages_read();
        pages_read::set(&self.bits, bit);
    }
    /// A reader holds the folio, and reads the first page when it is told that it may.
    fn wait(&self, mapping: MappingId, right: u64) -> String {
        let Ok(stamp) = self.held.descriptor.try_hold_unfilled(mapping, PAGE_0) else {
            return "Mismatch".into();
        };
        let descriptor = &self.held.descriptor;
        let readable = descriptor.is_page_readable(stamp, || pages_read::load(&self.bits) & 1 != 0);
        if readable == ReadableState::Yes {
            let content = self.held.content();
            assert!(content == right, "wrong bytes: {content} in a page that has been read");
        }
        format!("{readable:?}, {}", self.held.put())
    }
}

#[test]
fn page_of_a_fill() {
    explore(&["NotYet, Kept", "Yes, Kept"], || {
        let fixture = PartialFill::new();
        fixture.prepare(ONE);
        let waiter = spawn(&fixture, |fixture| fixture.wait(ONE, 1));
        fixture.held.write(1);
        fixture.note_read(1);
        fixture.held.descriptor.complete();
        waiter.join().unwrap()
    });
}

/// The frames are freed and prepared again: the first page arrived for the folio before, and has not for this one.
#[test]
fn page_of_a_later_fill() {
    explore(&["NotYet, Kept", "Yes, Kept"], || {
        let fixture = PartialFill::new();
        fixture.prepare(ONE);
        fixture.held.write(1);
        fixture.note_read(1);
        fixture.held.descriptor.complete();
        fixture.held.descriptor.try_retire().expect("nobody holds it");
        pages_read::clear(&fixture.bits, 3);
        fixture.prepare(TWO);
        let waiter = spawn(&fixture, |fixture| fixture.wait(TWO, 2));
        fixture.note_read(2);
        fixture.held.write(2);
        fixture.held.descriptor.complete();
        waiter.join().unwrap()
    });
}

/// The folio leaves the index while its reader waits: what lands then is not taken for the file's; what arrived before
/// may be, and stays as long as it is held.
#[test]
fn page_of_a_removed_fill() {
    explore(&["Mismatch", "Never, Kept", "NotYet, Kept", "Yes, Kept"], || {
        let fixture = PartialFill::new();
        fixture.prepare(ONE);
        let waiter = spawn(&fixture, |fixture| {
            let waited = fixture.wait(ONE, 1);
            waited.replace("Last(order 1)", "Kept")
        });
        fixture.held.write(1);
        fixture.note_read(1);
        fixture.held.retire();
        if let FillEnd::Detached(PutOutcome::Last(_)) = fixture.held.descriptor.complete_empty() {
            fixture.held.free();
        }
        waiter.join().unwrap()
    });
}

/// A folio of two pages that is filled in parts, and a reader who holds nothing.
#[derive(Debug)]
struct Parts {
    frames: Arc<Frames>,
    /// The bits of both pages, the first page's lowest.
    bits: quinion::internals::sync::atomic::AtomicU64,
}

impl Parts {
    fn new() -> Arc<Self> {
        Arc::new(Self { frames: Frames::new(), bits: quinion::internals::sync::atomic::AtomicU64::new(0) })
    }
    fn head(&self) -> &Descriptor {
        &self.frames.descriptors[0]
    }
    fn prepare(&self, mapping: MappingId) {
        self.head().prepare(mapping, PAGE_0, PAIR);
    }
    fn note_read(&self, page: usize, content: u64) {
        self.frames.bytes[page].write(content);
        self.head().note_pages_read();
        pages_read::set(&self.bits, 1 << page);
    }
    fn complete(&self) {
        assert_eq!(self.head().complete(), FillEnd::Attached);
    }
    /// A part of the fill fails: the folio goes, and its frames are freed.
    fn fail(&self) {
        assert_eq!(fail(self.head()), PutOutcome::Last(PAIR), "nobody holds it");
        pages_read::clear(&self.bits, 3);
    }
    fn evict(&self) {
        self.head().try_retire().expect("nobody holds it");
        pages_read::clear(&self.bits, 3);
    }
    /// The hit on a folio that is being filled: look at its word and at the page's bit, copy, look again.
    fn read(&self, mapping: MappingId, index: PageIndex) -> Read {
        let in_row = |place: u32, pages| (pages_read::load(&self.bits) >> place).trailing_ones().min(pages);
        match self.head().begin_read_partial(mapping, index, in_row) {
            Err(reason) => Read::Refused(reason),
            Ok((stamp, _)) => {
                let bytes = self.frames.bytes[index.0 as usize].copy();
                if self.head().end_read(stamp) { Read::Accepted(bytes) } else { Read::Changed }
            }
        }
    }
    fn reader(self: &Arc<Self>, mapping: MappingId, right: &'static [u64]) -> thread::JoinHandle<String> {
        spawn(self, move |fixture| fixture.read(mapping, PAGE_0).must_be(right))
    }
}

#[test]
fn page_of_a_partial_fill() {
    explore(&["Accepted([1, 1])", "Refused(Filling)", "Refused(Mismatch)"], || {
        let fixture = Parts::new();
        let reader = fixture.reader(ONE, &[1]);
        fixture.prepare(ONE);
        fixture.note_read(0, 1);
        fixture.note_read(1, 11);
        fixture.complete();
        reader.join().unwrap()
    });
}

/// What arrived is read until its folio goes because another part failed. Then the frames are another file's.
#[test]
fn partial_page_of_a_failed_fill() {
    explore_bounded(
        Some(3),
        &["Accepted([1, 1])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let fixture = Parts::new();
            fixture.prepare(ONE);
            let reader = fixture.reader(ONE, &[1]);
            fixture.note_read(0, 1);
            fixture.fail();
            fixture.prepare(TWO);
            fixture.note_read(0, 2);
            reader.join().unwrap()
        },
    );
}

/// The page lands for the folio after this one only: its bit says nothing of this one.
#[test]
fn partial_page_of_the_next_folio() {
    explore_bounded(Some(3), &["Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        let fixture = Parts::new();
        fixture.prepare(ONE);
        fixture.note_read(1, 11);
        let reader = fixture.reader(ONE, &[]);
        fixture.fail();
        fixture.prepare(TWO);
        fixture.note_read(0, 2);
        reader.join().unwrap()
    });
}

/// The page arrived for the folio before this one, and has not yet for this one, whose other page has.
#[test]
fn partial_page_of_the_folio_before() {
    explore_bounded(
        Some(3),
        &["Accepted([2, 2])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let fixture = Parts::new();
            fixture.prepare(ONE);
            fixture.note_read(0, 1);
            fixture.complete();
            let reader = fixture.reader(TWO, &[2]);
            fixture.evict();
            fixture.prepare(TWO);
            fixture.note_read(1, 12);
            fixture.note_read(0, 2);
            reader.join().unwrap()
        },
    );
}

/// A device brings the bytes: one thread prepares and has it start, another says what has arrived and
/// has no fence of its own. The flag stands for the device's queue.
#[test]
fn partial_page_noted_elsewhere() {
    explore_bounded(Some(2), &["Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        let fixture = Parts::new();
        fixture.prepare(ONE);
        fixture.note_read(0, 1);
        fixture.complete();
        let queue = Arc::new(AtomicU32::new(0));
        let queued = queue.clone();
        let reaper = spawn(&fixture, move |fixture| {
            // Acquire, partner: the Release below.
            if queue.load(Ordering::Acquire) == 1 {
                fixture.head().note_pages_read();
                pages_read::set(&fixture.bits, 2);
            }
        });
        let reader = fixture.reader(TWO, &[]);
        fixture.evict();
        fixture.prepare(TWO);
        fixture.frames.bytes[1].write(12);
        queued.store(1, Ordering::Release); // partner: the Acquire above
        reaper.join().unwrap();
        reader.join().unwrap()
    });
}

/// Two fills of the same pages of one file: the first fails, and the second brings the other page first.
#[test]
fn partial_page_twice() {
    explore_bounded(
        Some(2),
        &["Accepted([1, 1])", "Accepted([3, 3])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let fixture = Parts::new();
            fixture.prepare(ONE);
            let reader = fixture.reader(ONE, &[1, 3]);
            fixture.note_read(0, 1);
            fixture.fail();
            fixture.prepare(ONE);
            fixture.note_read(1, 13);
            fixture.note_read(0, 3);
            fixture.complete();
            reader.join().unwrap()
        },
    );
}

/// A folio of two pages that are written in place, each with a sequence and a lock.
#[derive(Debug)]
struct Pages {
    frames: Arc<Frames>,
    sequences: [quinion::internals::sync::atomic::AtomicU32; 2],
    locks: [Mutex<()>; 2],
}

impl Pages {
    fn new() -> Arc<Self> {
        let sequences = [0, 0].map(quinion::internals::sync::atomic::AtomicU32::new);
        Arc::new(Self { frames: Frames::new(), sequences, locks: [Mutex::new(()), Mutex::new(())] })
    }
    fn filled() -> Arc<Self> {
        let fixture = Self::new();
        fixture.fill();
        fixture
    }
    fn fill(&self) {
        self.head().prepare(ONE, PAGE_0, PAIR);
        self.frames.bytes[0].write(1);
        self.frames.bytes[1].write(11);
        assert_eq!(self.head().complete(), FillEnd::Attached);
    }
    fn head(&self) -> &Descriptor {
        &self.frames.descriptors[0]
    }
    fn write(&self, page: usize, content: u64) {
        self.head().begin_writes().expect("it is filled and in the index");
        let _lock = self.locks[page].lock().unwrap();
        written::enter(&self.sequences[page]);
        assert!(!self.head().is_pinned(), "nobody pins it");
        self.frames.bytes[page].change(content);
        written::leave(&self.sequences[page]);
    }
    /// The hit, by whichever way the first look says.
    fn read(&self, page: usize) -> Read {
        match self.head().begin_read(ONE, PageIndex(page as u64)) {
            Ok(stamp) => self.end(stamp, self.frames.bytes[page].copy()),
            Err(NotReady::Written) => self.read_written(page),
            Err(reason) => Read::Refused(reason),
        }
    }
    fn read_written(&self, page: usize) -> Read {
        match self.head().begin_read_written(ONE, PageIndex(page as u64)) {
            Err(reason) => Read::Refused(reason),
            Ok(stamp) => match self.copy(page) {
                Some(bytes) => self.end(stamp, bytes),
                None => Read::Changed,
            },
        }
    }
    fn copy(&self, page: usize) -> Option<[u64; 2]> {
        let seen = written::read_begin(&self.sequences[page])?;
        let bytes = self.frames.bytes[page].copy();
        written::is_still(&self.sequences[page], seen).then_some(bytes)
    }
    fn end(&self, stamp: FolioStamp, bytes: [u64; 2]) -> Read {
        if self.head().end_read(stamp) { Read::Accepted(bytes) } else { Read::Changed }
    }
    /// A holder's copy: first as if there were no writer, and if there was one, page by page; one try.
    fn hold_and_copy(&self, page: usize) -> Read {
        self.head().try_hold(ONE, PAGE_0).expect("it is filled and stays");
        let steady = (!self.head().word().is_written()).then(|| self.frames.bytes[page].copy());
        let bytes = steady.filter(|_| !self.head().was_written()).or_else(|| self.copy(page));
        self.head().put();
        bytes.map_or(Read::Changed, Read::Accepted)
    }
    fn reader(
        self: &Arc<Self>,
        read: fn(&Self, usize) -> Read,
        page: usize,
        right: &'static [u64],
    ) -> thread::JoinHandle<String> {
        spawn(self, move |fixture| read(fixture, page).must_be(right))
    }
}

/// The reader may come before the first writer, and find the folio steady; or while it writes, or after.
#[test]
fn first_write() {
    explore(&["Accepted([1, 1])", "Accepted([2, 2])", "Changed"], || {
        let fixture = Pages::filled();
        let reader = fixture.reader(Pages::read, 0, &[1, 2]);
        fixture.write(0, 2);
        reader.join().unwrap()
    });
}

#[test]
fn later_write() {
    explore(&["Accepted([2, 2])", "Accepted([3, 3])", "Changed"], || {
        let fixture = Pages::filled();
        fixture.write(0, 2);
        let reader = fixture.reader(Pages::read, 0, &[2, 3]);
        fixture.write(0, 3);
        reader.join().unwrap()
    });
}

/// A reader of one page is not disturbed by a writer of another.
#[test]
fn write_of_another_page() {
    explore(&["Accepted([11, 11])"], || {
        let fixture = Pages::filled();
        fixture.write(0, 2);
        let reader = fixture.reader(Pages::read, 1, &[11]);
        fixture.write(0, 3);
        reader.join().unwrap()
    });
}

/// The folio is filled and one page of it written; the other is read, of which no writer has said anything.
#[test]
fn fill_then_write_of_another_page() {
    explore(&["Accepted([11, 11])", "Changed", "Refused(Filling)", "Refused(Mismatch)"], || {
        let fixture = Pages::new();
        let reader = fixture.reader(Pages::read, 1, &[11]);
        fixture.fill();
        fixture.write(0, 2);
        reader.join().unwrap()
    });
}

/// The reader has been told that the folio is written and knows nothing else.
#[test]
fn written_folio_seen_first() {
    explore(&["Accepted([11, 11])", "Refused(Mismatch)"], || {
        let fixture = Pages::new();
        let reader = fixture.reader(Pages::read_written, 1, &[11]);
        fixture.fill();
        fixture.write(0, 2);
        reader.join().unwrap()
    });
}

#[test]
fn two_writers_of_a_page() {
    explore_bounded(
        Some(2),
        &["Accepted([1, 1])", "Accepted([2, 2])", "Accepted([3, 3])", "Changed"],
        || {
            let fixture = Pages::filled();
            let reader = fixture.reader(Pages::read, 0, &[1, 2, 3]);
            let other = spawn(&fixture, |fixture| fixture.write(0, 3));
            fixture.write(0, 2);
            other.join().unwrap();
            reader.join().unwrap()
        },
    );
}

/// The two writers find the folio steady, or one finds that the other has marked it.
#[test]
fn two_writers_of_two_pages() {
    explore_bounded(Some(2), &["Accepted([1, 1])", "Accepted([2, 2])", "Changed"], || {
        let fixture = Pages::filled();
        let reader = fixture.reader(Pages::read, 0, &[1, 2]);
        let other = spawn(&fixture, |fixture| fixture.write(1, 12));
        fixture.write(0, 2);
        other.join().unwrap();
        reader.join().unwrap()
    });
}

/// The page's sequence is not touched when its frame gets other bytes: the folio's tells.
#[test]
fn written_folio_is_retired() {
    explore_bounded(Some(3), &["Accepted([2, 2])", "Changed", "Refused(Mismatch)"], || {
        let fixture = Pages::filled();
        fixture.write(0, 2);
        let reader = fixture.reader(Pages::read, 0, &[2]);
        fixture.frames.retire(0);
        fixture.frames.fill_pair(TWO, 20);
        reader.join().unwrap()
    });
}

/// The frame's next folio is of the same pages, and steady.
#[test]
fn written_folio_is_filled_anew() {
    explore_bounded(
        Some(2),
        &["Accepted([2, 2])", "Accepted([4, 4])", "Changed", "Refused(Filling)", "Refused(Mismatch)"],
        || {
            let fixture = Pages::filled();
            fixture.write(0, 2);
            let reader = fixture.reader(Pages::read, 0, &[2, 4]);
            fixture.frames.retire(0);
            fixture.frames.fill_pair(ONE, 4);
            reader.join().unwrap()
        },
    );
}

/// A page lands and is being read as such; the rest of the folio lands, and then a writer comes.
#[test]
fn partial_page_is_written() {
    explore_bounded(Some(3), &["Accepted([1, 1])", "Changed", "Refused(Written)"], || {
        let fixture = Parts::new();
        fixture.prepare(ONE);
        fixture.note_read(0, 1);
        let sequence = Arc::new(quinion::internals::sync::atomic::AtomicU32::new(0));
        let reader = fixture.reader(ONE, &[1]);
        fixture.complete();
        fixture.head().begin_writes().unwrap();
        written::enter(&sequence);
        fixture.frames.bytes[0].change(2);
        written::leave(&sequence);
        reader.join().unwrap()
    });
}

#[test]
fn hold_against_first_write() {
    explore(&["Accepted([1, 1])", "Accepted([2, 2])", "Changed"], || {
        let fixture = Pages::filled();
        let holder = fixture.reader(Pages::hold_and_copy, 0, &[1, 2]);
        fixture.write(0, 2);
        holder.join().unwrap()
    });
}

/// A folio whose page is plain memory to the thread that pins it and to the one that writes it.
#[derive(Debug)]
struct Lent {
    held: Arc<Held>,
    sequence: quinion::internals::sync::atomic::AtomicU32,
    lock: Mutex<()>,
}

impl Lent {
    fn new(held: Arc<Held>) -> Arc<Self> {
        let sequence = quinion::internals::sync::atomic::AtomicU32::new(0);
        Arc::new(Self { held, sequence, lock: Mutex::new(()) })
    }
    fn filled() -> Arc<Self> {
        Self::new(Held::filled())
    }
    fn write(&self, content: u64) -> &'static str {
        match self.held.descriptor.begin_writes() {
            Ok(()) => {
                let word = self.held.descriptor.word();
                assert!(word.is_written(), "wrong answer: readers take a folio for steady that is written");
                self.write_page(content)
            }
            Err(WriteRefused::Filling) => "Filling",
            Err(_) => "Left",
        }
    }
    fn write_page(&self, content: u64) -> &'static str {
        let _lock = self.lock.lock().unwrap();
        written::enter(&self.sequence);
        let is_pinned = self.held.descriptor.is_pinned();
        if !is_pinned {
            self.held.write(content);
        }
        written::leave(&self.sequence);
        if is_pinned { "Pinned" } else { "written" }
    }
    fn pin_and_look(&self) -> u64 {
        self.held.descriptor.try_hold(ONE, PAGE_0).expect("it is filled and stays");
        self.held.descriptor.pin();
        if self.held.descriptor.may_have_writers() && !written::has_no_writer(&self.sequence) {
            drop(self.lock.lock().unwrap());
        }
        let content = self.held.content();
        self.held.descriptor.unpin();
        self.held.descriptor.put();
        content
    }
}

#[test]
fn pin_against_first_write() {
    explore(&["Pinned, lent 1", "written, lent 1", "written, lent 2"], || {
        let fixture = Lent::filled();
        let pinner = spawn(&fixture, |fixture| fixture.pin_and_look());
        let wrote = fixture.write(2);
        format!("{wrote}, lent {}", pinner.join().unwrap())
    });
}

#[test]
fn pin_against_later_write() {
    explore(&["Pinned, lent 2", "written, lent 2", "written, lent 3"], || {
        let fixture = Lent::filled();
        assert_eq!(fixture.write(2), "written");
        let pinner = spawn(&fixture, |fixture| fixture.pin_and_look());
        let wrote = fixture.write(3);
        format!("{wrote}, lent {}", pinner.join().unwrap())
    });
}

/// Two writers in either order: the second finds the folio written, and a pin comes.
#[test]
fn pin_against_two_writers() {
    explore_bounded(
        Some(2),
        &[
            "Pinned, Pinned, lent 1",
            "Pinned, written, lent 1",
            "Pinned, written, lent 3",
            "written, Pinned, lent 1",
            "written, Pinned, lent 2",
            "written, written, lent 1",
            "written, written, lent 2",
            "written, written, lent 3",
        ],
        || {
            let fixture = Lent::filled();
            let pinner = spawn(&fixture, |fixture| fixture.pin_and_look());
            let other = spawn(&fixture, |fixture| fixture.write(3));
            let wrote = fixture.write(2);
            format!("{wrote}, {}, lent {}", other.join().unwrap(), pinner.join().unwrap())
        },
    );
}

/// A writer holds the folio before it is filled, and asks whether it may write.
#[test]
fn write_against_fill() {
    explore(&["Filling", "written"], || {
        let fixture = Lent::new(Held::new());
        fixture.held.descriptor.prepare(ONE, PAGE_0, SMALL);
        let writer = spawn(&fixture, |fixture| {
            fixture.held.descriptor.try_hold_unfilled(ONE, PAGE_0).expect("it is prepared");
            fixture.write(2)
        });
        fixture.held.write(1);
        fixture.held.descriptor.complete();
        writer.join().unwrap().into()
    });
}

/// A page that is changed and written back: its dirty bit, its bytes, the file's bytes, and the tree's lock.
#[derive(Debug)]
struct Changed {
    bits: quinion::internals::sync::atomic::AtomicU64,
    bytes: Bytes,
    file: Mutex<[u64; 2]>,
    tree: Mutex<()>,
}

impl Changed {
    fn dirty() -> Arc<Self> {
        let bits = quinion::internals::sync::atomic::AtomicU64::new(0);
        let fixture = Self { bits, bytes: Bytes::new(), file: Mutex::new([0, 0]), tree: Mutex::new(()) };
        fixture.bytes.change(1);
        dirty::set(&fixture.bits, 1);
        Arc::new(fixture)
    }
    /// A writer (w1 to w3), of these words of the page.
    fn change(&self, words: &[usize]) -> &'static str {
        words.iter().for_each(|&word| self.bytes.0[word].store(2, Ordering::Relaxed));
        dirty::after_bytes();
        if dirty::load(&self.bits) & 1 == 1 {
            return "was dirty";
        }
        let _tree = self.tree.lock().unwrap();
        dirty::set(&self.bits, 1);
        "marked"
    }
    /// Write-back (b1 to b3), if there is anything to write.
    fn write_back(&self) {
        let taken = {
            let _tree = self.tree.lock().unwrap();
            dirty::clear(&self.bits, 1)
        };
        if taken != 0 {
            dirty::before_flush();
            *self.file.lock().unwrap() = self.bytes.copy();
        }
    }
    /// At the end: what is clean is in the file.
    #[track_caller]
    fn is_dirty_or_written(&self) -> String {
        let (clean, file) = (dirty::load(&self.bits) == 0, *self.file.lock().unwrap());
        assert!(!clean || file == [2, 2], "wrong: clean, and the file has {file:?}");
        if clean { "written".into() } else { format!("dirty, written {file:?}") }
    }
}

#[test]
fn change_against_write_back() {
    let expected = [
        "marked, dirty, written [1, 1]",
        "marked, dirty, written [1, 2]",
        "marked, dirty, written [2, 1]",
        "marked, dirty, written [2, 2]",
        "was dirty, written",
    ];
    explore(&expected, || {
        let fixture = Changed::dirty();
        let writer = spawn(&fixture, |fixture| fixture.change(&[0, 1]));
        fixture.write_back();
        let told = writer.join().unwrap();
        format!("{told}, {}", fixture.is_dirty_or_written())
    });
}

/// Two writers, of which one may find the bit set by the other, and two rounds of write-back, one at a time.
#[test]
fn changes_against_two_rounds() {
    let expected = [
        "dirty, written [1, 1]",
        "dirty, written [1, 2]",
        "dirty, written [2, 1]",
        "dirty, written [2, 2]",
        "written",
    ];
    explore_bounded(Some(2), &expected, || {
        let fixture = Changed::dirty();
        let writer = spawn(&fixture, |fixture| fixture.change(&[0]));
        let other = spawn(&fixture, |fixture| fixture.change(&[1]));
        fixture.write_back();
        fixture.write_back();
        writer.join().unwrap();
        other.join().unwrap();
        fixture.is_dirty_or_written()
    });
}

/// A folio that is changed by one who holds it, while another takes it out of the index, under the tree's lock each.
#[derive(Debug)]
struct Indexed {
    held: Arc<Held>,
    tree: Mutex<()>,
}

impl Indexed {
    fn filled() -> Arc<Self> {
        Arc::new(Self { held: Held::filled(), tree: Mutex::new(()) })
    }
    /// Holds the folio, marks it, and lets go: whether it was told that the folio is dirty.
    fn mark(&self) -> &'static str {
        let descriptor = &self.held.descriptor;
        if descriptor.try_hold(ONE, PAGE_0).is_err() {
            return "gone";
        }
        let told = {
            let _tree = self.tree.lock().unwrap();
            let live = descriptor.word().is_live();
            if live {
                descriptor.mark_dirty();
            }
            if live { "dirty" } else { "left" }
        };
        self.held.put();
        told
    }
    fn against(&self, told: &str, taken: bool) -> String {
        assert!(told != "dirty" || !taken, "wrong: lost what its writer was told is dirty");
        format!("{told}, {}", if taken { "taken out" } else { "stays" })
    }
}

#[test]
fn change_against_eviction() {
    explore(&["dirty, stays", "gone, taken out"], || {
        let fixture = Indexed::filled();
        let writer = spawn(&fixture, Indexed::mark);
        let evict = || {
            let _tree = fixture.tree.lock().unwrap();
            fixture.held.evict() != "None"
        };
        let taken = evict() || evict(); // also when its writer may have let go
        fixture.against(writer.join().unwrap(), taken)
    });
}

/// D07: a reader has seen a folio that is clean; when it has the lock it looks again.
#[test]
fn change_against_drop_behind() {
    explore(&["dirty, stays", "gone, taken out", "left, taken out"], || {
        let fixture = Indexed::filled();
        let writer = spawn(&fixture, Indexed::mark);
        let clean = !fixture.held.descriptor.word().has(Flags::UNWRITTEN);
        let taken = clean && {
            let _tree = fixture.tree.lock().unwrap();
            let drops = !fixture.held.descriptor.word().has(Flags::UNWRITTEN);
            if drops {
                fixture.held.retire();
            }
            drops
        };
        fixture.against(writer.join().unwrap(), taken)
    });
}

#[test]
fn one_marker_for_two() {
    explore(&["[false, true]", "[true, false]"], || {
        let frames = Frames::new();
        frames.descriptors[0].prepare_with(ONE, PAGE_0, SMALL, Flags::MARKER);
        frames.descriptors[0].complete();
        let stamp = frames.descriptors[0].begin_read(ONE, PAGE_0).unwrap();
        let other = spawn(&frames, move |frames| frames.descriptors[0].take_marker(stamp));
        let taken = [frames.descriptors[0].take_marker(stamp), other.join().unwrap()];
        assert!(taken[0] != taken[1], "wrong count: {taken:?} took the marker");
        format!("{taken:?}")
    });
}

#[test]
fn marker_of_a_later_folio() {
    explore(&["false", "true"], || {
        let frames = Frames::new();
        frames.descriptors[0].prepare_with(ONE, PAGE_0, SMALL, Flags::MARKER);
        frames.descriptors[0].complete();
        let stamp = frames.descriptors[0].begin_read(ONE, PAGE_0).unwrap();
        let reader = spawn(&frames, move |frames| frames.descriptors[0].take_marker(stamp));
        frames.retire(0);
        frames.descriptors[0].prepare_with(ONE, PAGE_0, SMALL, Flags::MARKER);
        frames.descriptors[0].complete();
        let taken = reader.join().unwrap();
        assert!(frames.descriptors[0].word().has(Flags::MARKER), "wrong marker: a later folio's was taken");
        format!("{taken}")
    });
}

/// Two who grab a folio that is up to date.
#[test]
fn two_threads_lock_a_folio() {
    explore(&["locked, locked: 3", "locked, refused: 2", "refused, locked: 2"], || {
        let fixture = Held::filled();
        let other = spawn(&fixture, |fixture| fixture.lock_and_add());
        let mine = fixture.lock_and_add();
        let theirs = other.join().unwrap();
        format!("{mine}, {theirs}: {}", fixture.content())
    });
}

/// Two who grab a folio that was allocated and has no bytes yet.
#[test]
fn two_threads_fill_an_allocated_folio() {
    explore(&["Locked, filled", "filled, Locked", "filled, saw 2", "saw 3, filled"], || {
        let fixture = Held::new();
        fixture.descriptor.prepare(ONE, PAGE_0, SMALL);
        assert_eq!(fixture.descriptor.complete_empty(), FillEnd::Attached);
        let other = spawn(&fixture, |fixture| fixture.lock_and_fill(3));
        let mine = fixture.lock_and_fill(2);
        format!("{mine}, {}", other.join().unwrap())
    });
}

// ---- each step is needed ------------------------------------------------------------------------------

const BYTES: &str = "wrong bytes: accepted";
const LOST: &str = "wrong: clean, and the file has";
const RACE: &str = "Causality violation: Concurrent";

/// The scenarios that must fail without a step, and what they must fail with.
const NEEDED: &[Needed] = &[
    (
        Mutant::ReaderFence,
        &[
            ("old_file", BYTES),
            ("new_file", BYTES),
            ("two_generations", BYTES),
            ("partial_page_of_a_failed_fill", BYTES),
            ("first_write", BYTES),
        ],
    ),
    (
        Mutant::ReaderRecheck,
        &[
            ("old_page", BYTES),
            ("pair_becomes_singles", BYTES),
            ("partial_page_of_a_failed_fill", BYTES),
            ("partial_page_of_the_next_folio", BYTES),
            ("written_folio_is_retired", BYTES),
            ("first_write", BYTES),
        ],
    ),
    (Mutant::ReaderMapping, &[("old_file", "accepted [2, 2]"), ("hold_against_reuse", "under a hold")]),
    (Mutant::ReaderIndex, &[("old_page", "accepted [2, 2]")]),
    (Mutant::ReaderParity, &[("singles_become_pair", BYTES), ("fill_against_removal", "under a hold")]),
    (Mutant::ReaderUptodate, &[("first_fill", "accepted [0, 0]")]),
    (Mutant::ReaderAcquire, &[("first_fill", "accepted [0, 0]")]),
    (Mutant::PrepareFence, &[("new_file", "accepted [1, 1]"), ("taken_over_new", "accepted [1, 1]")]),
    (Mutant::PrepareStep, &[("old_file", BYTES), ("two_generations", BYTES)]),
    (Mutant::PrepareRelease, &[("unfilled_hold_of_a_later_folio", "wrong bytes: 2")]),
    (Mutant::FillFence, &[("filled_elsewhere", BYTES)]),
    (Mutant::CompleteRelease, &[("first_fill", "accepted [0, 0]"), ("hold_against_fill", RACE)]),
    (Mutant::RetireStep, &[("singles_become_pair", BYTES), ("look_then_remove", RACE)]),
    (Mutant::RetireHolds, &[("hold_against_eviction", RACE), ("pin_against_eviction", RACE)]),
    (Mutant::RetireUnwritten, &[("change_against_eviction", "wrong: lost")]),
    (Mutant::RetireDetached, &[("fill_against_removal", RACE), ("two_holds_against_removal", RACE)]),
    (Mutant::RetireAcquire, &[("hold_against_eviction", RACE)]),
    (Mutant::RetireRelease, &[("look_then_remove", RACE)]),
    (Mutant::HoldAcquire, &[("hold_against_fill", RACE)]),
    (Mutant::HoldUptodate, &[("hold_against_fill", RACE)]),
    (Mutant::HoldCompare, &[("hold_against_reuse", "wrong bytes: 2 under a hold")]),
    (Mutant::PutAcquire, &[("two_holds_against_removal", RACE)]),
    (Mutant::PutRelease, &[("hold_against_eviction", RACE), ("pin_against_eviction", RACE)]),
    (Mutant::PutHolds, &[("hold_against_failed_fill", RACE), ("two_holds_against_removal", RACE)]),
    (Mutant::ReadableAcquire, &[("wait_for_a_fill", RACE)]),
    (Mutant::ReadableSequence, &[("wait_for_a_removed_fill", "wrong answer")]),
    (Mutant::PagesReadRelease, &[("page_of_a_fill", RACE), ("page_of_a_partial_fill", BYTES)]),
    (Mutant::PagesReadAcquire, &[("page_of_a_fill", RACE), ("page_of_a_partial_fill", BYTES)]),
    (
        Mutant::PagesReadClear,
        &[
            ("page_of_a_later_fill", RACE),
            ("partial_page_of_the_folio_before", "accepted [1, 1]"),
            ("partial_page_noted_elsewhere", "accepted [1, 1]"),
        ],
    ),
    (
        Mutant::ReaderPartialUptodate,
        &[
            ("page_of_a_partial_fill", "accepted [0, 0]"),
            ("partial_page_of_the_next_folio", "accepted [0, 0]"),
        ],
    ),
    (
        Mutant::ReaderWordAcquire,
        &[
            ("partial_page_of_the_folio_before", "accepted [1, 1]"),
            ("partial_page_noted_elsewhere", "accepted [1, 1]"),
        ],
    ),
    (Mutant::ReaderSteady, &[("later_write", BYTES)]),
    (Mutant::WrittenAcquire, &[("written_folio_seen_first", "accepted [0, 0]")]),
    (
        Mutant::WrittenStep,
        &[("first_write", BYTES), ("partial_page_is_written", BYTES), ("two_writers_of_two_pages", BYTES)],
    ),
    (Mutant::WriteOdd, &[("later_write", BYTES), ("pin_against_later_write", RACE)]),
    (Mutant::WriteFence, &[("first_write", BYTES), ("later_write", BYTES)]),
    (
        Mutant::WriteFenceOrder,
        &[("pin_against_first_write", RACE), ("pin_against_later_write", RACE), ("write_against_fill", RACE)],
    ),
    (Mutant::WriteRelease, &[("later_write", BYTES), ("pin_against_later_write", RACE)]),
    (Mutant::PageOdd, &[("later_write", BYTES)]),
    (Mutant::PageAcquire, &[("later_write", BYTES)]),
    (Mutant::PageFence, &[("later_write", BYTES)]),
    (Mutant::PageRecheck, &[("later_write", BYTES)]),
    (Mutant::HolderFence, &[("hold_against_first_write", BYTES)]),
    (Mutant::HolderRecheck, &[("hold_against_first_write", BYTES)]),
    (Mutant::PinFence, &[("pin_against_first_write", RACE), ("pin_against_later_write", RACE)]),
    (Mutant::PinWritten, &[("pin_against_first_write", RACE)]),
    (Mutant::NoWriterAcquire, &[("pin_against_later_write", RACE)]),
    (Mutant::WritePins, &[("pin_against_first_write", RACE)]),
    (Mutant::PinnedAcquire, &[("pin_against_first_write", RACE)]),
    (Mutant::UnpinRelease, &[("pin_against_first_write", RACE)]),
    (Mutant::SplitStep, &[("split_then_reuse", BYTES)]),
    (Mutant::PieceFence, &[("piece_where_a_folio_was", BYTES)]),
    (Mutant::PieceRelease, &[("piece_of_another_file", BYTES)]),
    (Mutant::LockTaken, &[("two_threads_lock_a_folio", RACE)]),
    (
        Mutant::LockAcquire,
        &[("two_threads_lock_a_folio", RACE), ("two_threads_fill_an_allocated_folio", RACE)],
    ),
    (Mutant::UnlockRelease, &[("two_threads_lock_a_folio", RACE)]),
    (Mutant::DirtyWriteFence, &[("change_against_write_back", LOST), ("changes_against_two_rounds", LOST)]),
    (Mutant::DirtyFlushFence, &[("change_against_write_back", LOST), ("changes_against_two_rounds", LOST)]),
    (Mutant::MarkerSequence, &[("marker_of_a_later_folio", "wrong marker")]),
    (Mutant::MarkerFlag, &[("one_marker_for_two", "wrong count")]),
];

#[test]
fn no_step_can_be_left_out() {
    all_needed(Mutant::of_hits(), NEEDED);
}
