//! Crash: a disk that remembers all that was done to it, and what a crash may leave of that.
//!
//! A double for tests, Quinion's and those of its users, that a [`SimulatedBackend`](super::SimulatedBackend) serves.
//! It keeps a log of writes, sizes, holes and syncs. Of each prefix of the log it gives the states that the machine may
//! find after the crash.
//!
//! ```text
//!   log      write A   write B   sync   write C   punch D   write E   | crash
//!            \______ promised _______/   \________ each sector of these is there or not ____/
//!
//!   a sector    old -> after C -> after D -> after E        any of these, each sector by itself
//!               ^ lowest: moved to the last one by each sync that succeeds
//! ```
//!
//! So between two syncs writes come apart at sectors, are reordered and left out. The file's size and its holes
//! are the file system's, which keeps a journal: of them, and only of them, a state has those before some point
//! of the log and none after it. Bytes that the journal has cut off do not come back.
//!
//! **A sync that fails** is as on Linux. Bytes that were not durable by then may be, or not, for good: a later sync
//! that succeeds says nothing of them, unless they were written again. And some of them are lost at once: reading gives
//! what the device has, old or in part. The journal forgets nothing: a later sync writes it or fails. So a sync that
//! succeeds makes sizes and holes durable, whatever failed before.
//!
//! Invariants:
//!  1. A change that completed before a successful sync is in every later state, or a later change over it.
//!  2. A state holds nothing that was never there: each sector is as it was after some event.
//!  3. Equal logs and equal seeds give equal states.
//!
//! Not an invariant: that a state is one that some file system would leave. There are more of them here, never fewer,
//! but for devices that break what they were not writing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use quinion::backend::{Attributes, Fill, Flush, Identity, Version};

/// Bytes that a device writes whole or not at all.
pub const SECTOR: usize = 512;
/// The [`Identity::device`] of these disks.
const DEVICE: u64 = u64::MAX - 2;

static LAST_INODE: AtomicU64 = AtomicU64::new(0);

/// One file on a disk that remembers.
pub struct CrashDisk {
    inode: u64,
    state: Mutex<State>,
}

struct State {
    log: CrashLog,
    replay: Replay,
    /// Events that changed the file, which its times count. A sync is none.
    changes: i64,
}

/// The events of a [`CrashDisk`], in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CrashLog {
    start: Vec<u8>,
    events: Vec<Event>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Event {
    Write {
        position: u64,
        bytes: Vec<u8>,
    },
    SetSize(u64),
    Punch(Range<u64>),
    Synced(Range<u64>),
    /// With the seed of what is lost at once.
    SyncFailed(u64),
}

impl CrashDisk {
    /// A disk with these bytes, all of them durable.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        let start = bytes.into();
        let replay = Replay::new(&start);
        let inode = LAST_INODE.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            inode,
            state: Mutex::new(State { log: CrashLog { start, events: Vec::new() }, replay, changes: 0 }),
        }
    }

    /// A copy of the log so far.
    pub fn log(&self) -> CrashLog {
        self.lock().log.clone()
    }

    /// The file's content as a reader sees it now.
    pub fn content(&self) -> Vec<u8> {
        self.lock().replay.content()
    }

    pub(super) fn copy_to(&self, fill: &mut Fill) -> usize {
        let state = self.lock();
        let there = state.replay.size().saturating_sub(fill.position()).min(fill.len() as u64) as usize;
        let from = fill.position() as usize;
        fill.write(0, state.replay.now.get(from..from + there).unwrap_or(&[]));
        there
    }

    pub(super) fn copy_from(&self, flush: &Flush, bytes: usize) {
        if bytes > 0 {
            let mut taken = vec![0; bytes];
            flush.read(0, &mut taken);
            self.write(flush.position(), taken);
        }
    }

    /// Writes `bytes` (at least one) at byte `position`.
    pub fn write(&self, position: u64, bytes: Vec<u8>) {
        self.note(Event::Write { position, bytes });
    }

    /// Cuts the file at `bytes`, or extends it with zeros.
    pub fn set_size(&self, bytes: u64) {
        self.note(Event::SetSize(bytes));
    }

    /// Makes `range` read as zeros.
    pub fn punch(&self, range: Range<u64>) {
        self.note(Event::Punch(range));
    }

    /// Makes the bytes of `range`, sizes and holes durable.
    pub fn sync(&self, range: Range<u64>) {
        self.note(Event::Synced(range));
    }

    /// A sync that fails; the seed says what is lost at once.
    pub fn fail_sync(&self, seed: u64) {
        self.note(Event::SyncFailed(seed));
    }

    /// The file's identity, times and size now.
    pub fn attributes(&self) -> Attributes {
        let state = self.lock();
        let changes = state.changes;
        Attributes {
            identity: Identity { device: DEVICE, inode: self.inode, born: 0 },
            version: Version { modified: changes, changed: changes, settled: true, steps: true },
            size: state.replay.size(),
        }
    }

    fn note(&self, event: Event) {
        let mut state = self.lock();
        let number = state.log.events.len() + 1;
        state.replay.apply(number, &event);
        state.changes += i64::from(!matches!(event, Event::Synced(_) | Event::SyncFailed(_)));
        state.log.events.push(event);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CrashLog {
    /// How many events there are.
    pub fn len(&self) -> usize {
        self.events.len()
    }
    /// Whether nothing was done.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The file's content as a reader saw it after the first `events` events.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn prefix(&self, events: usize) -> Vec<u8> {
        self.replay(events).content()
    }

    /// One of the states that a crash after the first `events` events may leave; the seed decides which. It is
    /// of one of four kinds: all of it, nothing but what is durable, some of the writes, and some of their sectors.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn state(&self, events: usize, seed: u64) -> Vec<u8> {
        self.replay(events).crash(&self.start, &mut Chance(seed))
    }

    /// States that crashes may leave: `samples` for each prefix of the log, the empty one and the whole included,
    /// each with how many events it is of.
    pub fn states(&self, samples: u64, seed: u64) -> impl Iterator<Item = (usize, Vec<u8>)> + '_ {
        let mut replay = Replay::new(&self.start);
        (0..=self.events.len()).flat_map(move |events| {
            if let Some(last) = events.checked_sub(1) {
                replay.apply(events, &self.events[last]);
            }
            let crash = |sample| {
                let mut chance = Chance(seed ^ (events as u64) << 32 ^ sample);
                (events, replay.crash(&self.start, &mut chance))
            };
            (0..samples).map(crash).collect::<Vec<_>>()
        })
    }

    fn replay(&self, events: usize) -> Replay {
        let mut replay = Replay::new(&self.start);
        for (number, event) in (1..).zip(&self.events[..events]) {
            replay.apply(number, event);
        }
        replay
    }
}

/// The values of something after each event that changed it, and which of them a crash may leave.
struct History<T> {
    /// Each with the number of the event, from 1; 0 is the start.
    was: Vec<(usize, T)>,
    /// The oldest that a crash may leave.
    lowest: usize,
    /// The last sync that failed and concerned it. A later one makes up for that only if the journal keeps it.
    failed: usize,
}

impl<T: Clone> History<T> {
    fn new(start: T) -> Self {
        Self { was: vec![(0, start)], lowest: 0, failed: 0 }
    }
    fn now(&self) -> &T {
        &self.was.last().expect("it has a start").1
    }
    fn set(&mut self, event: usize, value: T) {
        self.was.push((event, value));
    }
    fn is_durable(&self) -> bool {
        self.lowest == self.was.len() - 1
    }
    fn sync(&mut self) {
        if self.was.last().is_some_and(|&(event, _)| event > self.failed) {
            self.lowest = self.was.len() - 1;
        }
    }
    fn newest_at(&self, event: usize) -> usize {
        self.was.partition_point(|&(at, _)| at <= event) - 1
    }
}

/// One sector's bytes, and the events by which the file system, not a write, changed it.
struct Sector {
    bytes: History<[u8; SECTOR]>,
    cuts: Vec<usize>,
}

struct Replay {
    /// Bytes that a read gives, in whole sectors; zero behind the end.
    now: Vec<u8>,
    size: History<u64>,
    sectors: BTreeMap<usize, Sector>,
    /// The events that the file system keeps a journal of: sizes and holes.
    journal: BTreeSet<usize>,
}

/// A change of bytes.
#[derive(Clone, Copy)]
enum Change<'b> {
    Written(&'b [u8]),
    /// The file system zeroes them.
    Zeroed,
}

impl Replay {
    fn new(start: &[u8]) -> Self {
        let mut now = start.to_vec();
        now.resize(start.len().next_multiple_of(SECTOR), 0);
        Self {
            now,
            size: History::new(start.len() as u64),
            sectors: BTreeMap::new(),
            journal: BTreeSet::new(),
        }
    }

    fn size(&self) -> u64 {
        *self.size.now()
    }

    fn content(&self) -> Vec<u8> {
        self.now[..self.size() as usize].to_vec()
    }

    fn apply(&mut self, number: usize, event: &Event) {
        match event {
            Event::Write { position, bytes } => {
                let at = *position as usize;
                self.reach(number, at + bytes.len());
                self.change(number, at..at + bytes.len(), Change::Written(bytes));
            }
            Event::SetSize(bytes) => {
                let (before, size) = (self.size() as usize, *bytes as usize);
                self.change(number, size..before, Change::Zeroed);
                self.size.set(number, *bytes);
                self.now.resize(size.next_multiple_of(SECTOR).max(self.now.len()), 0);
                self.journal.insert(number);
            }
            Event::Punch(range) => {
                let within = |byte: u64| byte.min(self.size()) as usize;
                let range = within(range.start)..within(range.end);
                self.change(number, range, Change::Zeroed);
                self.journal.insert(number);
            }
            Event::Synced(range) => {
                self.size.sync();
                for (&sector, history) in &mut self.sectors {
                    let first = (sector * SECTOR) as u64;
                    if range.start < first + SECTOR as u64 && first < range.end {
                        history.sync();
                    }
                }
            }
            Event::SyncFailed(seed) => self.lose(number, &mut Chance(*seed)),
        }
    }

    fn reach(&mut self, event: usize, size: usize) {
        if size as u64 > self.size() {
            self.now.resize(size.next_multiple_of(SECTOR).max(self.now.len()), 0);
            self.size.set(event, size as u64);
            self.journal.insert(event);
        }
    }

    /// Changes bytes, and notes the new state of the sectors around them.
    fn change(&mut self, event: usize, range: Range<usize>, change: Change<'_>) {
        if range.is_empty() {
            return;
        }
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        for sector in sectors.clone() {
            let before = sector_of(&self.now, sector);
            let new = || Sector { bytes: History::new(before), cuts: Vec::new() };
            self.sectors.entry(sector).or_insert_with(new);
        }
        match change {
            Change::Written(bytes) => self.now[range].copy_from_slice(bytes),
            Change::Zeroed => self.now[range].fill(0),
        }
        for (&sector, history) in self.sectors.range_mut(sectors) {
            history.bytes.set(event, sector_of(&self.now, sector));
            if matches!(change, Change::Zeroed) {
                history.cuts.push(event);
            }
        }
    }

    /// A sync fails: what is not durable stays in doubt, and reads of some of it give other bytes.
    fn lose(&mut self, event: usize, chance: &mut Chance) {
        for (&sector, history) in &mut self.sectors {
            if history.bytes.is_durable() {
                continue;
            }
            history.bytes.failed = event;
            // Bytes that the file system has cut off stay so while the machine is up.
            let lowest =
                history.cuts.last().map_or(0, |&cut| history.bytes.newest_at(cut)).max(history.bytes.lowest);
            if chance.below(2) == 0 {
                let found = history.bytes.was[lowest + chance.below(history.bytes.was.len() - lowest)].1;
                self.now[sector * SECTOR..(sector + 1) * SECTOR].copy_from_slice(&found);
                history.bytes.set(event, found);
            }
        }
    }

    fn crash(&self, start: &[u8], chance: &mut Chance) -> Vec<u8> {
        let kind = KINDS[chance.below(KINDS.len())];
        let seed = chance.next();
        // 1 How far the file system's journal came, and with it the size.
        let least = self.size.was[self.size.lowest].0;
        let points: Vec<_> = [least].into_iter().chain(self.journal.range(least + 1..).copied()).collect();
        let journalled = match kind {
            Left::All => points[points.len() - 1],
            Left::Least => least,
            Left::SomeWrites | Left::SomeSectors => points[chance.below(points.len())],
        };
        let mut image = start.to_vec();
        image.resize(self.size.was[self.size.newest_at(journalled)].1 as usize, 0);
        // 2 Each sector as it once was.
        for (&sector, history) in &self.sectors {
            let left = history.left_by(journalled);
            let chosen = match kind {
                Left::All => left[left.len() - 1],
                Left::Least => left[0],
                Left::SomeWrites => {
                    let is_left = |at: &&usize| Chance(seed ^ history.bytes.was[**at].0 as u64).below(2) == 0;
                    *left.iter().rfind(is_left).unwrap_or(&left[0])
                }
                Left::SomeSectors => left[chance.below(left.len())],
            };
            let from = (sector * SECTOR).min(image.len());
            let to = ((sector + 1) * SECTOR).min(image.len());
            image[from..to].copy_from_slice(&history.bytes.was[chosen].1[..to - from]);
        }
        image
    }
}

impl Sector {
    /// A sync succeeds: the bytes are durable, or, if an earlier one has lost them, what the file system did last.
    fn sync(&mut self) {
        self.bytes.sync();
        if let Some(&cut) = self.cuts.last() {
            self.bytes.lowest = self.bytes.lowest.max(self.bytes.newest_at(cut));
        }
    }

    /// The versions that a crash may leave if the journal came to this event, the oldest first: none from before the
    /// last cut that the journal has, and none from after that event.
    fn left_by(&self, journalled: usize) -> Vec<usize> {
        let Self { bytes, cuts } = self;
        let cut = cuts.iter().rfind(|&&cut| cut <= journalled).map_or(0, |&cut| bytes.newest_at(cut));
        let oldest = bytes.lowest.max(cut);
        let is_to_come = |event: usize| event > journalled && cuts.contains(&event);
        let left = (oldest..bytes.was.len()).filter(|&at| at == oldest || !is_to_come(bytes.was[at].0));
        left.collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    All,
    Least,
    /// A part of the writes, each whole but for what was written over it.
    SomeWrites,
    SomeSectors,
}

const KINDS: [Left; 4] = [Left::All, Left::Least, Left::SomeWrites, Left::SomeSectors];

fn sector_of(bytes: &[u8], sector: usize) -> [u8; SECTOR] {
    bytes[sector * SECTOR..(sector + 1) * SECTOR].try_into().expect("sectors are whole")
}

/// An endless sequence of numbers (splitmix64).
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

impl fmt::Debug for CrashDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("CrashDisk")
            .field("size", &state.replay.size())
            .field("events", &state.log.len())
            .finish_non_exhaustive()
    }
}
