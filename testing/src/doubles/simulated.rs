//! Simulated backend: a device with faults, under a seed.
//!
//! A double for tests, Quinion's and those of its users. It fails, ends early, delays, reorders and drops what it is
//! asked for: always the same way for the same seed and calls. It counts what it was asked.
//!
//! ```text
//!   submit, flush --> held, each until a tick of a clock of its own --reap--> complete, fail, end early, drop
//! ```
//!
//! Fills and flushes are held until a thread reaps them. So a cache that forgets to reap hangs here too, even with a
//! single thread. Time is a count: only a reap advances it.
//!
//! Invariants:
//!  1. With one thread, equal seeds and equal calls give equal outcomes, completion by completion.
//!  2. Bytes are taken from the content when a fill is completed, not when it is submitted; and to the content when a
//!     flush is.
//!  3. No lock is held when a fill or a flush is completed.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use quinion::backend::{
    Attributes, Backend, Fill, Flush, FlushError, Identity, MemoryFile, ReapMode, ReapOutcome, SyncKind,
    Version, WaitQueue,
};
use quinion::internals::units::PAGE_SIZE;

use super::crash::{Chance, CrashDisk};

/// The [`Identity::device`] of generated content.
const DEVICE: u64 = u64::MAX - 1;
/// The byte that a failed part leaves behind.
const RUBBISH: u8 = 0xbd;

/// Faults of fills, and how often. The default is none: fills are held until reaped, in the order of submission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// The seed of all chance.
    pub seed: u64,
    /// How many of 1000 fills fail with `EIO`.
    pub errors: u32,
    /// How many of 1000 fills end early, as if the file were cut there: at any byte of the fill.
    pub early_ends: u32,
    /// How many of 1000 fills are dropped without being completed.
    pub drops: u32,
    /// The most ticks a fill is held; each is held a number of them from 0 to this.
    pub delay_max: u32,
    /// In what order fills complete that are due at the same tick.
    pub sequence: CompletionOrder,
    /// Where fills complete.
    pub completing: CompletionPoint,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            seed: 0,
            errors: 0,
            early_ends: 0,
            drops: 0,
            delay_max: 0,
            sequence: CompletionOrder::Submitted,
            completing: CompletionPoint::WhenReaped,
        }
    }
}

/// Faults of writes, and how often. The default is none. Delays, their sequence and where flushes complete are those
/// of [`Faults`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WriteFaults {
    /// How many of 1000 flushes fail with `EIO`.
    pub errors: u32,
    /// How many of 1000 flushes fail with `ENOSPC`.
    pub full: u32,
    /// How many of 1000 flushes are dropped without being completed.
    pub drops: u32,
    /// How many of 1000 syncs fail with `EIO`.
    pub sync_errors: u32,
}

/// In what order fills complete that are due together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionOrder {
    Submitted,
    /// Any; the seed decides.
    Shuffled,
}

/// Where fills complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionPoint {
    /// In [`Backend::reap`], as a ring does.
    WhenReaped,
    /// In [`Backend::submit`], as memory does. Delays and shuffling do nothing then.
    WhenSubmitted,
}

/// How often a place fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailureCount {
    /// The first so many fills that touch it.
    First(u32),
    /// Every fill that touches it.
    Always,
}

/// Writes a page of a generated file: given the file's number and the page's, into 4096 bytes.
pub type Generator = dyn Fn(u64, u64, &mut [u8]) + Send + Sync;

/// A backend with faults.
pub struct SimulatedBackend {
    content: Content,
    faults: Faults,
    state: Mutex<State>,
    is_led: AtomicBool,
    is_paused: AtomicBool,
    held: AtomicUsize,
    queues: Mutex<Vec<Weak<WaitQueue>>>,
}

enum Content {
    Memory(Arc<MemoryFile>),
    Crash(Arc<CrashDisk>),
    Generated { file: u64, size: u64, generate: Box<Generator> },
}

struct State {
    random: Chance,
    tick: u64,
    held: Vec<HeldRequest>,
    bad_spots: Vec<(Range<u64>, FailureCount)>,
    bad_writes: Vec<(Range<u64>, FailureCount)>,
    write_faults: WriteFaults,
    /// After how many more calls a flush, or a sync, fails, and with which number.
    flushes_to_fail: Vec<(u64, i32)>,
    syncs_to_fail: Vec<(u64, i32)>,
    writes: u64,
    written_bytes: u64,
    syncs: u64,
    /// Bytes of a part, if fills are answered in parts.
    part: Option<usize>,
    reads: u64,
    read_bytes: u64,
    page_reads: BTreeMap<u64, u64>,
}

struct HeldRequest {
    due: u64,
    work: Work,
}

enum Work {
    Fill(Fill),
    Flush(Flush),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteFate {
    Served,
    /// With this number; so many bytes are reported as written, and so many are.
    Fails {
        errno: i32,
        written: usize,
        reached: usize,
    },
    Dropped,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FillFate {
    Served,
    Fails,
    /// The file ends at this byte of the fill, if not before.
    EndsEarly(usize),
    Dropped,
}

impl SimulatedBackend {
    /// A device that holds `file`.
    pub fn of_memory(file: Arc<MemoryFile>, faults: Faults) -> Self {
        Self::new(Content::Memory(file), faults)
    }

    /// A device that holds `disk`, which remembers what is done to it.
    pub fn of_crash_disk(disk: Arc<CrashDisk>, faults: Faults) -> Self {
        Self::new(Content::Crash(disk), faults)
    }

    /// A device that holds a file of `size` bytes whose pages `generate` writes; `file` is its number,
    /// its identity too. It cannot be written.
    pub fn generated(
        file: u64,
        size: u64,
        generate: impl Fn(u64, u64, &mut [u8]) + Send + Sync + 'static,
        faults: Faults,
    ) -> Self {
        Self::new(Content::Generated { file, size, generate: Box::new(generate) }, faults)
    }

    fn new(content: Content, faults: Faults) -> Self {
        let state = State {
            random: Chance(faults.seed),
            tick: 0,
            held: Vec::new(),
            bad_spots: Vec::new(),
            bad_writes: Vec::new(),
            write_faults: WriteFaults::default(),
            flushes_to_fail: Vec::new(),
            syncs_to_fail: Vec::new(),
            writes: 0,
            written_bytes: 0,
            syncs: 0,
            part: None,
            reads: 0,
            read_bytes: 0,
            page_reads: BTreeMap::new(),
        };
        Self {
            content,
            faults,
            state: Mutex::new(state),
            is_led: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            queues: Mutex::default(),
        }
    }

    /// Makes the device answer each fill in parts of `pages` pages (at least 1), the last part first; each lands at
    /// once. A failure is that of one part, which holds rubbish then.
    #[must_use]
    pub fn in_parts(self, pages: u32) -> Self {
        self.lock().part = Some(pages.max(1) as usize * PAGE_SIZE);
        self
    }

    /// Fills (or parts of them) that touch these bytes of the file fail with `EIO`, so many times.
    pub fn fail_at(&self, bytes: Range<u64>, times: FailureCount) {
        self.lock().bad_spots.push((bytes, times));
    }

    /// Gives the device faults of its writes.
    #[must_use]
    pub fn with_write_faults(self, faults: WriteFaults) -> Self {
        self.lock().write_faults = faults;
        self
    }

    /// Flushes that touch these bytes of the file fail with `EIO`, so many times.
    pub fn fail_writes_at(&self, bytes: Range<u64>, times: FailureCount) {
        self.lock().bad_writes.push((bytes, times));
    }

    /// The `nth` flush from now on, 0 being the next, fails with this number of the system, after a part of it or
    /// before.
    pub fn fail_write(&self, nth: u64, errno: i32) {
        self.lock().flushes_to_fail.push((nth, errno));
    }

    /// The `nth` sync from now on, 0 being the next, fails with this number of the system. A
    /// [`CrashDisk`] loses by that some of what was not durable.
    pub fn fail_sync(&self, nth: u64, errno: i32) {
        self.lock().syncs_to_fail.push((nth, errno));
    }

    /// Ends the failures that were set by [`SimulatedBackend::fail_at`], [`SimulatedBackend::fail_writes_at`],
    /// [`SimulatedBackend::fail_write`] and [`SimulatedBackend::fail_sync`].
    pub fn mend(&self) {
        let mut state = self.lock();
        state.bad_spots.clear();
        state.bad_writes.clear();
        state.flushes_to_fail.clear();
        state.syncs_to_fail.clear();
    }

    /// Completes nothing until [`SimulatedBackend::resume`]; a thread that waits sleeps.
    pub fn pause(&self) {
        self.is_paused.store(true, Ordering::Relaxed);
    }

    /// Completes again.
    pub fn resume(&self) {
        self.is_paused.store(false, Ordering::Relaxed);
        self.wake();
    }

    /// Flushes that have got their outcome.
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    /// Bytes taken over from flushes.
    pub fn written_bytes(&self) -> u64 {
        self.lock().written_bytes
    }

    /// Syncs asked for, those that failed included.
    pub fn syncs(&self) -> u64 {
        self.lock().syncs
    }

    /// Fills and flushes submitted and not completed.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Fills that have got their outcome.
    pub fn reads(&self) -> u64 {
        self.lock().reads
    }

    /// Bytes delivered.
    pub fn read_bytes(&self) -> u64 {
        self.lock().read_bytes
    }

    /// How many of those fills had `page` in them.
    pub fn page_reads(&self, page: u64) -> u64 {
        self.lock().page_reads.get(&page).copied().unwrap_or(0)
    }

    /// The page that was read most often, and how often.
    pub fn most_read_page(&self) -> Option<(u64, u64)> {
        self.lock().page_reads.iter().map(|(&page, &reads)| (page, reads)).max_by_key(|&(_, reads)| reads)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        let queues: Vec<_> = queues.iter().filter_map(Weak::upgrade).collect();
        queues.iter().for_each(|queue| queue.wake());
    }

    /// Holds work until it is reaped, or does it at once.
    fn start(&self, work: impl ExactSizeIterator<Item = Work>) {
        if self.faults.completing == CompletionPoint::WhenSubmitted {
            work.for_each(|work| self.serve(work));
            return;
        }
        let count = work.len();
        let mut state = self.lock();
        for work in work {
            state.hold(work, self.faults.delay_max);
        }
        // Under the lock, so that no thread counts one out before it was counted in.
        self.held.fetch_add(count, Ordering::Relaxed);
        drop(state);
        // Partner: the fence in `WaitQueue::wake`, which follows each giving up of the lead.
        fence(Ordering::SeqCst);
        if self.wants_leader() {
            self.wake();
        }
    }

    /// Completes work. Holds no lock meanwhile.
    fn serve(&self, work: Work) {
        match work {
            Work::Fill(fill) => self.serve_fill(fill),
            Work::Flush(flush) => self.serve_flush(flush),
        }
    }

    fn serve_flush(&self, flush: Flush) {
        let fate = self.lock().write_fate(&flush);
        let (reached, failure) = match fate {
            WriteFate::Served => (flush.len(), None),
            WriteFate::Dropped => return drop(flush),
            WriteFate::Fails { errno, written, reached } => {
                (reached, Some(FlushError { written, error: io::Error::from_raw_os_error(errno) }))
            }
        };
        let outcome = match self.content.copy_from(&flush, reached) {
            Ok(()) => {
                self.lock().written_bytes += reached as u64;
                failure.map_or(Ok(()), Err)
            }
            Err(error) => Err(FlushError { written: 0, error }),
        };
        flush.complete(outcome);
    }

    fn serve_fill(&self, mut fill: Fill) {
        let (fate, part) = self.lock().fate(&fill, &self.faults);
        match (fate, part) {
            (FillFate::Dropped, _) => drop(fill),
            (FillFate::Served | FillFate::Fails, Some(part)) => self.serve_parts(fill, fate, part),
            (FillFate::Fails, None) => fill.complete(Err(io::Error::from_raw_os_error(libc::EIO))),
            (FillFate::Served | FillFate::EndsEarly(_), _) => {
                let mut bytes = self.content.copy_to(&mut fill);
                if let FillFate::EndsEarly(end) = fate {
                    bytes = bytes.min(end);
                }
                self.lock().read_bytes += bytes as u64;
                fill.complete(Ok(bytes));
            }
        }
    }

    /// Serves a fill in parts of `part` bytes, from the last to the first. One of them fails, if the fill is to.
    fn serve_parts(&self, mut fill: Fill, fate: FillFate, part: usize) {
        let there = self.content.copy_to(&mut fill);
        let (position, parts) = (fill.position(), fill.len().div_ceil(part));
        let failing = (fate == FillFate::Fails).then(|| self.lock().below(parts as u64) as usize);
        let mut outcome = Ok(there);
        for number in (0..parts).rev() {
            let (at, end) = (number * part, fill.len().min((number + 1) * part));
            if failing == Some(number) || self.lock().is_bad(position + at as u64..position + end as u64) {
                fill.write(at, &vec![RUBBISH; end - at]);
                outcome = Err(io::Error::from_raw_os_error(libc::EIO));
            } else {
                let end = end.min(there).max(at);
                self.lock().read_bytes += (end - at) as u64;
                fill.pages_were_read(at..end);
            }
        }
        fill.complete(outcome);
    }

    /// Serves what is due. With [`ReapMode::Wait`] time jumps to the next work.
    fn serve_due(&self, how: ReapMode) -> usize {
        let due = self.lock().take_due(how, self.faults.sequence);
        let fills = due.len();
        for held in due {
            self.serve(held.work);
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
        fills
    }
}

impl State {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.next() % bound
    }

    fn hold(&mut self, work: Work, delay_max: u32) {
        let due = self.tick + self.below(u64::from(delay_max) + 1);
        self.held.push(HeldRequest { due, work });
    }

    fn take_due(&mut self, how: ReapMode, sequence: CompletionOrder) -> Vec<HeldRequest> {
        self.tick += 1;
        if how.waits()
            && let Some(first) = self.held.iter().map(|held| held.due).min()
        {
            self.tick = self.tick.max(first);
        }
        let tick = self.tick;
        let mut due: Vec<_> = self.held.extract_if(.., |held| held.due <= tick).collect();
        if sequence == CompletionOrder::Shuffled {
            for last in (1..due.len()).rev() {
                let other = self.below(last as u64 + 1) as usize;
                due.swap(last, other);
            }
        }
        due
    }

    /// The outcome of a fill, and the bytes of its parts, if any: each part looks for bad spots by itself.
    fn fate(&mut self, fill: &Fill, faults: &Faults) -> (FillFate, Option<usize>) {
        self.reads += 1;
        let first = fill.run().index.0;
        for page in first..first + u64::from(fill.run().pages) {
            *self.page_reads.entry(page).or_default() += 1;
        }
        let chance = self.below(1000) as u32;
        let end = self.below(fill.len() as u64 + 1) as usize;
        let (errors, early_ends) = (faults.errors, faults.errors + faults.early_ends);
        let bytes = fill.position()..fill.position() + fill.len() as u64;
        let fate = match chance {
            _ if self.part.is_none() && self.is_bad(bytes) => FillFate::Fails,
            _ if chance < errors => FillFate::Fails,
            _ if chance < early_ends => FillFate::EndsEarly(end),
            _ if chance < early_ends + faults.drops => FillFate::Dropped,
            _ => FillFate::Served,
        };
        (fate, self.part)
    }

    fn write_fate(&mut self, flush: &Flush) -> WriteFate {
        self.writes += 1;
        let bytes = flush.position()..flush.position() + flush.len() as u64;
        let WriteFaults { errors, full, drops, .. } = self.write_faults;
        let chance = self.below(1000) as u32;
        let (written, reached) =
            (self.below(flush.len() as u64) as usize, self.below(flush.len() as u64 + 1) as usize);
        // Neither a bad byte nor what lies behind it is written.
        let bad = self.bad_writes.iter().map(|(spot, _)| spot).find(|spot| overlap(spot, &bytes));
        let good = bad.map_or(flush.len(), |spot| spot.start.saturating_sub(bytes.start) as usize);
        let (written, reached) = (written.min(good), reached.max(written).min(good));
        let fails = |errno| WriteFate::Fails { errno, written, reached };
        if let Some(errno) = count_down(&mut self.flushes_to_fail) {
            return fails(errno);
        }
        match chance {
            _ if meets(&mut self.bad_writes, bytes) => fails(libc::EIO),
            _ if chance < errors => fails(libc::EIO),
            _ if chance < errors + full => fails(libc::ENOSPC),
            _ if chance < errors + full + drops => WriteFate::Dropped,
            _ => WriteFate::Served,
        }
    }

    fn sync_fate(&mut self) -> Option<i32> {
        self.syncs += 1;
        let is_unlucky = self.below(1000) < u64::from(self.write_faults.sync_errors);
        count_down(&mut self.syncs_to_fail).or(is_unlucky.then_some(libc::EIO))
    }

    fn is_bad(&mut self, asked: Range<u64>) -> bool {
        meets(&mut self.bad_spots, asked)
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn cannot_write() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "generated content cannot be written")
}

/// Whether a bad spot is touched; it counts that.
fn meets(spots: &mut Vec<(Range<u64>, FailureCount)>, asked: Range<u64>) -> bool {
    let spot = spots.iter().position(|(bytes, _)| overlap(bytes, &asked));
    let Some(spot) = spot else { return false };
    if let (_, FailureCount::First(times)) = &mut spots[spot] {
        *times = times.saturating_sub(1);
        if *times == 0 {
            spots.remove(spot);
        }
    }
    true
}

/// Counts one call: the number with which it fails, if it was to.
fn count_down(to_fail: &mut Vec<(u64, i32)>) -> Option<i32> {
    let now = to_fail.iter().position(|&(left, _)| left == 0);
    let errno = now.map(|at| to_fail.remove(at).1);
    to_fail.iter_mut().for_each(|(left, _)| *left = left.saturating_sub(1));
    errno
}

impl Content {
    fn copy_to(&self, fill: &mut Fill) -> usize {
        match self {
            Self::Memory(file) => {
                let mut bytes = vec![0; fill.len()];
                let read = file.read_at(&mut bytes, fill.position());
                fill.write(0, &bytes[..read]);
                read
            }
            Self::Crash(disk) => disk.copy_to(fill),
            Self::Generated { file, size, generate } => {
                let mut page = [0; PAGE_SIZE];
                let bytes = size.saturating_sub(fill.position()).min(fill.len() as u64) as usize;
                for (number, at) in (0..bytes).step_by(PAGE_SIZE).enumerate() {
                    generate(*file, fill.run().index.0 + number as u64, &mut page);
                    fill.write(at, &page[..PAGE_SIZE.min(bytes - at)]);
                }
                bytes
            }
        }
    }

    fn copy_from(&self, flush: &Flush, bytes: usize) -> io::Result<()> {
        match self {
            Self::Memory(file) => {
                let mut taken = vec![0; bytes];
                flush.read(0, &mut taken);
                file.write_at(&taken, flush.position())
            }
            Self::Crash(disk) => {
                disk.copy_from(flush, bytes);
                Ok(())
            }
            Self::Generated { .. } => Err(cannot_write()),
        }
    }
}

/// Holds the lead; giving it up wakes the wait queues.
struct LeadGuard<'a>(&'a SimulatedBackend);

impl<'a> LeadGuard<'a> {
    fn take(device: &'a SimulatedBackend) -> Option<Self> {
        // The lead guards nothing but itself; the state has a lock.
        let taken = device.is_led.compare_exchange(false, true, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok().then(|| Self(device))
    }
}

impl Drop for LeadGuard<'_> {
    fn drop(&mut self) {
        self.0.is_led.store(false, Ordering::Relaxed);
        self.0.wake();
    }
}

impl Backend for SimulatedBackend {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(wait_queue));
    }

    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn attributes(&self) -> io::Result<Attributes> {
        match &self.content {
            Content::Memory(file) => file.attributes(),
            Content::Crash(disk) => Ok(disk.attributes()),
            Content::Generated { file, size, .. } => Ok(Attributes {
                identity: Identity { device: DEVICE, inode: *file, born: 0 },
                version: Version { modified: 0, changed: 0, settled: true, steps: true },
                size: *size,
            }),
        }
    }

    fn submit(&self, fills: Vec<Fill>) {
        self.start(fills.into_iter().map(Work::Fill));
    }

    fn can_write(&self) -> bool {
        !matches!(self.content, Content::Generated { .. })
    }

    fn flush(&self, flushes: Vec<Flush>) {
        self.start(flushes.into_iter().map(Work::Flush));
    }

    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        let (fate, seed) = {
            let mut state = self.lock();
            (state.sync_fate(), state.random.next())
        };
        match (&self.content, fate) {
            (Content::Generated { .. }, _) => Err(cannot_write()),
            (Content::Memory(file), None) => file.sync(kind, range),
            (Content::Memory(_), Some(errno)) => Err(io::Error::from_raw_os_error(errno)),
            (Content::Crash(disk), None) => {
                disk.sync(range);
                Ok(())
            }
            (Content::Crash(disk), Some(errno)) => {
                disk.fail_sync(seed);
                Err(io::Error::from_raw_os_error(errno))
            }
        }
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        match &self.content {
            Content::Memory(file) => Backend::set_size(&**file, bytes),
            Content::Crash(disk) => {
                disk.set_size(bytes);
                Ok(())
            }
            Content::Generated { .. } => Err(cannot_write()),
        }
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        match &self.content {
            Content::Memory(file) => file.punch(range),
            Content::Crash(disk) => {
                disk.punch(range);
                Ok(())
            }
            Content::Generated { .. } => Err(cannot_write()),
        }
    }

    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        let Some(_lead) = LeadGuard::take(self) else { return ReapOutcome::Busy };
        if how.waits() && done() {
            return ReapOutcome::Some(0);
        }
        if self.is_paused.load(Ordering::Relaxed) {
            return ReapOutcome::Elsewhere;
        }
        match (self.serve_due(how), how) {
            (0, ReapMode::Wait | ReapMode::WaitFor(_)) => ReapOutcome::Elsewhere,
            (fills, _) => ReapOutcome::Some(fills),
        }
    }

    fn wants_leader(&self) -> bool {
        !self.is_led.load(Ordering::Relaxed)
            && !self.is_paused.load(Ordering::Relaxed)
            && self.held.load(Ordering::Relaxed) > 0
    }
}

impl fmt::Debug for SimulatedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedBackend")
            .field("faults", &self.faults)
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}
