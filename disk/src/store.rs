//! Store: put, read, open; and the thread that writes.
//!
//! One index finds extents in memory and on the disk, and both are compared with their checksums: a reader that found
//! an extent may meet another one in its place, in either.
//!
//! A disk may hang without an error. A reader gives up after a while (`reads.rs`), and the end of a store waits for the
//! writer only while it makes progress: a writer that hangs is left behind, and has nothing that is not its own. A disk
//! that hangs in writes alone soon has all buffers; then puts that are refused notice that it gives no answers.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{AlignedBuffer, Device, FileDevice};
use crate::error::{DiskError, DiskTrouble};
use crate::health::{Health, WatchedDevice};
use crate::index::{Extent, Index};
use crate::layout::{
    ContentKey, DATA_PAGES, EXTENT_PAGES_MAX, Entry, PAGE_BYTES, SEGMENT_BYTES, checksum, data_bytes,
    segment_start,
};
use crate::opening::{Asker, read_superblock, read_tables};
use crate::options::DiskOptions;
use crate::reads::{PIECES, ReadRequest, ReadThreads, lock};
use crate::staging::{RingPosition, SealedSegment, Staging};
use crate::stats::{Counters, DiskStats};

/// When an open segment is written although it is not full, and the writes are synced.
const IDLE: Duration = Duration::from_secs(1);
const SYNC_SEGMENTS: u32 = 64;
/// Answers in whose time a file takes its space: some file systems write all of it.
const SPACE_ANSWERS: u32 = 12;
const KEPT_PAGES_MAX: u32 = DATA_PAGES as u32 / 2;
const READ_BUFFERS: usize = 4;

/// A store of pages on a disk; see the crate.
pub struct DiskStore {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    process: u32,
}

/// Why pages were not read. In each case they have to be read from the store behind.
#[derive(Debug)]
pub enum Missed {
    /// The store does not have all of the pages.
    NotThere,
    /// The bytes of some pages do not match their checksum.
    Corrupt,
    /// The disk refused.
    Failed(io::Error),
}

#[derive(Debug)]
struct Shared {
    device: Arc<WatchedDevice>,
    health: Health,
    reads: ReadThreads,
    answer_max: Duration,
    staging: Mutex<Staging>,
    index: Mutex<Index>,
    news: Condvar,
    orders: Mutex<Orders>,
    counters: Counters,
    read_buffers: Mutex<Vec<AlignedBuffer>>,
    /// Requests of the writer's that the device has answered.
    answers: AtomicU64,
    refusals: Mutex<Refusals>,
}

/// Puts that were refused since the device's last answer to the writer.
#[derive(Debug)]
struct Refusals {
    answers: u64,
    /// When the last piece of time began.
    since: Instant,
    /// Pieces of time without an answer, the one that began first included; 0: no put was refused.
    silent: u32,
}

#[derive(Default, Debug)]
struct Orders {
    /// A segment was sealed, or the open one has pages that are not on the disk.
    wake: bool,
    /// Flushes that were asked for so far, and, in `flushed`, those that are done.
    flushes: u64,
    flushed: u64,
    stop: bool,
    /// The writer has ended.
    ended: bool,
}

impl DiskStore {
    /// Opens the store that `options` name, or makes it. Reads the tables of the segments, some seconds for 100 GiB,
    /// and does without those that are not read within a minute.
    ///
    /// # Errors
    /// See [`DiskError`]; also if the disk gives no answer for 5 seconds, or for a minute where it takes the space.
    pub fn open(options: &DiskOptions) -> Result<Self, DiskError> {
        Self::open_with(options, || {})
    }

    /// As [`DiskStore::open`]. The store's own thread calls `on_start` before anything else, as to block signals.
    ///
    /// # Errors
    /// As [`DiskStore::open`].
    pub fn open_with(options: &DiskOptions, on_start: fn()) -> Result<Self, DiskError> {
        options.check()?;
        let (folder, in_use_max, bytes) = (options.folder.clone(), options.in_use_max, options.file_bytes());
        let answer_max = options.opening_answer_max;
        let within = |answer_max| Asker { answer_max, on_start };
        let path = folder.clone();
        let device = Self::ask(options, within(answer_max), move || FileDevice::open_in(&path))?;
        let path = folder.clone();
        let lock = move || device.locked(&path, in_use_max);
        let device = Self::ask(options, within(in_use_max + answer_max), lock)?;
        let take_space = move || device.with_space(&folder, bytes);
        let device = Self::ask(options, within(answer_max * SPACE_ANSWERS), take_space)?;
        Self::start(Arc::new(device), options, on_start)
    }

    /// Whether [`DiskStore::open`] could open the store, as far as that can be told while another process has it: for a
    /// process that is about to replace that one. Changes nothing, and so does not find out whether the file and its
    /// folder can be made.
    ///
    /// # Errors
    /// As [`DiskStore::open`].
    pub fn try_open(options: &DiskOptions) -> Result<(), DiskError> {
        options.check()?;
        let (folder, bytes) = (options.folder.clone(), options.file_bytes());
        let asker = Asker { answer_max: options.opening_answer_max, on_start: || {} };
        Self::ask(options, asker, move || FileDevice::check(&folder, bytes))
    }

    fn ask<T: Send + 'static>(
        options: &DiskOptions,
        asker: Asker,
        ask: impl FnOnce() -> Result<T, DiskError> + Send + 'static,
    ) -> Result<T, DiskError> {
        let failed = |source| DiskError::Io { action: "open", path: options.folder.clone(), source };
        let answer = asker.ask(ask).map_err(failed)?;
        answer.unwrap_or_else(|| Err(failed(asker.no_answer())))
    }

    /// As [`DiskStore::open`], on a device of the caller's own, which has [`DiskOptions::bytes`] bytes, zeros at first.
    ///
    /// # Errors
    /// [`DiskError::Size`]; [`DiskError::Device`], also if the device holds something else.
    pub fn open_on(device: Box<dyn Device>, options: &DiskOptions) -> Result<Self, DiskError> {
        options.check()?;
        Self::start(Arc::from(device), options, || {})
    }

    fn start(device: Arc<dyn Device>, options: &DiskOptions, on_start: fn()) -> Result<Self, DiskError> {
        let segments = options.segments();
        let asker = Asker { answer_max: options.opening_answer_max, on_start };
        let store = read_superblock(asker, &device)?;
        let (found, are_all) = read_tables(asker, &device, store, segments)?;
        let mut index = Index::new(segments);
        let (mut next, mut sequence) = (0, 0);
        if let Some((segment, table)) = found.first() {
            (next, sequence) = ((segment + 1) % segments, table.sequence);
        }
        if !are_all {
            sequence += u64::from(segments); // no number that an unread table may have is given again
        }
        for (segment, table) in &found {
            for entry in &table.entries {
                index.insert(*segment, entry);
            }
        }
        let buffers = options.buffers().min(segments as usize / 2);
        let shared = Arc::new(Shared {
            device: Arc::new(WatchedDevice::new(device)),
            health: Health::new(options.rest),
            reads: ReadThreads::new(on_start),
            answer_max: options.answer_max,
            staging: Mutex::new(Staging::new(RingPosition { store, segments, next, sequence }, buffers)),
            index: Mutex::new(index),
            news: Condvar::new(),
            orders: Mutex::default(),
            counters: Counters::default(),
            read_buffers: Mutex::default(),
            answers: AtomicU64::new(0),
            refusals: Mutex::new(Refusals { answers: 0, since: Instant::now(), silent: 0 }),
        });
        let writer = {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name("quinion-disk".to_owned());
            thread.spawn(move || {
                on_start();
                let _ended = EndNotice(Arc::clone(&shared));
                Writer::new(shared).run();
            })
        };
        let writer = writer.map_err(|source| DiskError::Device { action: "start the writer of", source })?;
        Ok(Self { shared, writer: Some(writer), process: std::process::id() })
    }

    /// Keeps pages of a content: `bytes`, whole pages, from page `page` on; those that are not here yet. Returns how
    /// many of them are here now; fewer than given if the disk is behind or off. Never waits for the disk.
    ///
    /// # Panics
    /// If `bytes` is not a multiple of 4096 long.
    pub fn put(&self, key: &ContentKey, page: u64, bytes: &[u8]) -> u64 {
        let shared = &*self.shared;
        assert!(bytes.len().is_multiple_of(PAGE_BYTES), "whole pages are put");
        let end = page + (bytes.len() / PAGE_BYTES) as u64;
        // A function of its own, so that the lock is let go of before the body takes it again.
        let gap = |at| lock(&shared.index).gap(key, at, end - at);
        let (mut at, mut refused) = (page, 0);
        while let Some((from, missing)) = gap(at) {
            // Extents begin at multiples of their largest size, so that pages that are read together are put together.
            let most = EXTENT_PAGES_MAX as u64 - from % EXTENT_PAGES_MAX as u64;
            let pages = missing.min(most);
            let start = (from - page) as usize * PAGE_BYTES;
            let data = &bytes[start..start + pages as usize * PAGE_BYTES];
            if shared.is_off() || !shared.stage(key, from, data) {
                refused = end - from;
                Counters::add(&shared.counters.refused_pages, refused);
                break;
            }
            Counters::add(&shared.counters.put_pages, pages);
            at = from + pages;
        }
        end - page - refused
    }

    /// How many segments could be filled now, beside the open one, before the disk is behind: for a caller that leaves
    /// room for what cannot wait. A hint: other threads put as well.
    pub fn free_segments(&self) -> usize {
        lock(&self.shared.staging).free_segments()
    }

    /// Whether all these pages are here.
    pub fn has(&self, key: &ContentKey, page: u64, pages: u32) -> bool {
        !self.shared.is_off() && lock(&self.shared.index).gap(key, page, pages.into()).is_none()
    }

    /// Reads pages of a content, all of them or none: `sink` is given neighbouring bytes, each with its distance from
    /// the first byte. Bytes given before an error are right. Blocks for the disk.
    ///
    /// # Errors
    /// See [`Missed`].
    pub fn read(
        &self,
        key: &ContentKey,
        page: u64,
        pages: u32,
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), Missed> {
        let shared = &*self.shared;
        if shared.is_off() {
            return Err(Missed::NotThere);
        }
        let extents = lock(&shared.index).cover(key, page, pages).ok_or(Missed::NotThere)?;
        let mut buffer = lock(&shared.read_buffers).pop();
        let wanted = page..page + u64::from(pages);
        let outcome = extents.chunk_by(is_neighbour).try_for_each(|run| {
            let bytes = shared.fetch(key, run, &mut buffer)?;
            for extent in run {
                let bytes = &bytes[bytes_in_run(run, extent)];
                let from = extent.page.max(wanted.start);
                let until = (extent.page + u64::from(extent.pages)).min(wanted.end);
                let inside = |page: u64| (page - extent.page) as usize * PAGE_BYTES;
                sink((from - wanted.start) as usize * PAGE_BYTES, &bytes[inside(from)..inside(until)]);
            }
            Ok(())
        });
        let mut kept = lock(&shared.read_buffers);
        if kept.len() < READ_BUFFERS {
            kept.extend(buffer);
        }
        drop(kept);
        if outcome.is_ok() {
            Counters::add(&shared.counters.hit_pages, pages.into());
        }
        outcome
    }

    /// Why the disk is left alone, if it is. It is used again later.
    pub fn trouble(&self) -> Option<DiskTrouble> {
        if self.shared.is_off() { self.shared.health.trouble() } else { None }
    }

    /// Whether the disk is left alone; cheaper than [`DiskStore::trouble`].
    pub fn is_off(&self) -> bool {
        self.shared.is_off()
    }

    /// Counts of the store's operations so far, and of its contents.
    pub fn stats(&self) -> DiskStats {
        let mut stats = DiskStats { is_off: self.is_off(), ..self.shared.counters.read() };
        // Of a disk that is left alone no page can be found.
        if !stats.is_off {
            (stats.extents, stats.pages) = lock(&self.shared.index).totals();
        }
        stats
    }

    /// Writes the pages in memory, and syncs. Blocks for the disk as long as that answers. [`DiskStore::trouble`] says
    /// whether it could. In a forked child, which has no thread for it, nothing is done.
    pub fn flush(&self) {
        if std::process::id() != self.process {
            return;
        }
        let mut orders = lock(&self.shared.orders);
        orders.flushes += 1;
        let mine = orders.flushes;
        self.shared.news.notify_all();
        drop(orders);
        self.shared.wait_for_writer(|orders| orders.flushed >= mine);
    }

    /// Checks its index.
    ///
    /// # Errors
    /// The broken invariant, in words.
    pub fn check(&self) -> Result<(), String> {
        lock(&self.shared.index).check()
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trouble = self.trouble();
        f.debug_struct("DiskStore")
            .field("stats", &self.stats())
            .field("trouble", &trouble)
            .finish_non_exhaustive()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        let Some(writer) = self.writer.take() else { return };
        if std::process::id() != self.process {
            return; // a child of a fork has no such thread
        }
        lock(&self.shared.orders).stop = true;
        self.shared.news.notify_all();
        self.shared.reads.close();
        if self.shared.wait_for_writer(|orders| orders.ended) {
            let _ = writer.join();
        }
    }
}

impl Shared {
    /// `false`: there is no room in memory.
    fn stage(&self, key: &ContentKey, page: u64, bytes: &[u8]) -> bool {
        let checksum = checksum(key, page, bytes);
        let pages = (bytes.len() / PAGE_BYTES) as u16;
        let mut staging = lock(&self.staging);
        let is_reserved = staging.reserve_pages(pages, |segment| lock(&self.index).forget_segment(segment));
        let mut is_news = !staging.is_drained();
        if let Some((segment, at)) = staging.place().filter(|_| is_reserved) {
            let entry = Entry { key: *key, page, at, pages, checksum };
            // Another thread may have put the same pages since.
            if lock(&self.index).insert(segment, &entry) {
                is_news |= staging.add(entry, bytes);
            }
        }
        drop(staging);
        if is_news {
            self.wake_writer();
        }
        if !is_reserved {
            self.note_refusal();
        }
        is_reserved
    }

    fn wake_writer(&self) {
        let mut orders = lock(&self.orders);
        if !orders.wake {
            orders.wake = true;
            self.news.notify_all();
        }
    }

    /// Waits until `is_done`, or until the writer had no answer of the disk for a while, which is left alone then.
    /// Whether it is done.
    fn wait_for_writer(&self, is_done: impl Fn(&Orders) -> bool) -> bool {
        let mut orders = lock(&self.orders);
        let (mut answers, mut silent) = (self.answers.load(Ordering::Relaxed), 0);
        while !is_done(&orders) && silent < PIECES {
            let waited =
                self.news.wait_timeout_while(orders, self.answer_max / PIECES, |orders| !is_done(orders));
            orders = waited.unwrap_or_else(PoisonError::into_inner).0;
            let before = std::mem::replace(&mut answers, self.answers.load(Ordering::Relaxed));
            silent = if answers == before { silent + 1 } else { 0 };
        }
        let is_done = is_done(&orders);
        drop(orders);
        if !is_done {
            self.leave_silent();
        }
        is_done
    }

    /// A put found no buffer, so the writer has work. The disk is left alone if it answers none of that for a while.
    fn note_refusal(&self) {
        let (mut refusals, now) = (lock(&self.refusals), Instant::now());
        let answers = self.answers.load(Ordering::Relaxed);
        if refusals.silent == 0 || refusals.answers != answers {
            *refusals = Refusals { answers, since: now, silent: 1 };
        } else if now - refusals.since >= self.answer_max / PIECES {
            (refusals.since, refusals.silent) = (now, refusals.silent + 1);
        }
        let is_silent = refusals.silent > PIECES;
        drop(refusals);
        if is_silent && !self.is_off() {
            self.leave_silent();
        }
    }

    /// The disk does not answer the writer.
    fn leave_silent(&self) {
        if self.leave_alone("write", &self.no_answer()) {
            Counters::add(&self.counters.errors, 1);
        }
    }

    fn no_answer(&self) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, format!("no answer for {:?}", self.answer_max))
    }

    /// The bytes of `run`, in `buffer`; compares their checksums, too.
    fn fetch<'b>(
        &self,
        key: &ContentKey,
        run: &[Extent],
        buffer: &'b mut Option<AlignedBuffer>,
    ) -> Result<&'b [u8], Missed> {
        let (first, last) = (run[0], run[run.len() - 1]);
        let range = data_bytes(first.at, 0).start..data_bytes(last.at, last.pages).end;
        let mut to = buffer.take().unwrap_or_else(|| AlignedBuffer::new(SEGMENT_BYTES));
        let in_memory =
            lock(&self.staging).copy_to(first.segment, range.clone(), &mut to.bytes_mut()[..range.len()]);
        if !in_memory {
            let device = Arc::clone(&self.device) as Arc<dyn Device>;
            let offset = segment_start(first.segment) + range.start as u64;
            let request = ReadRequest { device, buffer: to, len: range.len(), offset };
            let Some(answer) = self.reads.read(request, self.answer_max) else {
                let error = self.no_answer();
                Counters::add(&self.counters.errors, 1);
                self.leave_alone("read", &error);
                self.forget(key, run); // else the same page would be asked for when the disk is used again
                return Err(Missed::Failed(error));
            };
            to = answer.buffer;
            if let Err(error) = answer.outcome {
                *buffer = Some(to);
                self.forget(key, run);
                self.note_read_error(&error);
                return Err(Missed::Failed(error));
            }
        }
        let bytes = buffer.insert(to).bytes();
        for extent in run {
            if checksum(key, extent.page, &bytes[bytes_in_run(run, extent)]) != extent.checksum {
                // If it was written over meanwhile, the index has it no more, and nothing is wrong.
                let is_corrupt = lock(&self.index).remove(key, extent);
                Counters::add(&self.counters.corrupt_extents, is_corrupt.into());
                return Err(if is_corrupt { Missed::Corrupt } else { Missed::NotThere });
            }
        }
        Ok(bytes)
    }

    fn forget(&self, key: &ContentKey, run: &[Extent]) {
        let mut index = lock(&self.index);
        for extent in run {
            index.remove(key, extent);
        }
    }

    fn note_read_error(&self, error: &io::Error) {
        Counters::add(&self.counters.errors, 1);
        if self.health.note_refused_read() {
            self.leave_alone("read", error);
        }
    }

    /// The device has answered a request of the writer's.
    fn note_answer(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Segments that wait to be written will not be, so their extents are not here any more. Whether the disk was used
    /// until now.
    fn leave_alone(&self, action: &'static str, error: &io::Error) -> bool {
        let was_used = self.health.leave_alone(action, error);
        let mut staging = lock(&self.staging);
        let mut index = lock(&self.index);
        for segment in staging.clear() {
            index.forget_segment(segment);
        }
        was_used
    }

    fn is_off(&self) -> bool {
        self.health.is_off(|| self.device.has_answered())
    }
}

fn is_neighbour(a: &Extent, b: &Extent) -> bool {
    a.segment == b.segment && a.at + a.pages == b.at
}

fn bytes_in_run(run: &[Extent], extent: &Extent) -> std::ops::Range<usize> {
    let start = usize::from(extent.at - run[0].at) * PAGE_BYTES;
    start..start + usize::from(extent.pages) * PAGE_BYTES
}

/// How pages are treated that were read, and lie where a segment is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Survivors {
    /// The pages move on, to the open segment.
    PutAgain,
    Drop,
}

/// Pages of the place that a segment is written to, which move on.
struct KeptPages {
    key: ContentKey,
    page: u64,
    bytes: Vec<u8>,
}

/// Says that the writer has ended, also by a panic.
struct EndNotice(Arc<Shared>);

impl Drop for EndNotice {
    fn drop(&mut self) {
        lock(&self.0.orders).ended = true;
        self.0.news.notify_all();
    }
}

struct Writer {
    shared: Arc<Shared>,
    scratch: Option<AlignedBuffer>,
    unsynced: u32,
}

impl Writer {
    fn new(shared: Arc<Shared>) -> Self {
        Self { shared, scratch: None, unsynced: 0 }
    }

    fn run(mut self) {
        loop {
            let (flushes, stop) = self.wait();
            self.write_sealed(Survivors::PutAgain);
            if stop || flushes.is_some() {
                self.write_all();
                self.sync();
            } else {
                self.write_open();
            }
            if let Some(flushes) = flushes {
                lock(&self.shared.orders).flushed = flushes;
                self.shared.news.notify_all();
            }
            if stop {
                return;
            }
        }
    }

    /// Waits until there is something to do; for a second at most, if something waits to be written or synced. Returns
    /// the flushes that are to be done, if any, and whether the store ends.
    fn wait(&mut self) -> (Option<u64>, bool) {
        let is_pending = self.unsynced > 0 || lock(&self.shared.staging).is_open_changed();
        let is_idle = |orders: &mut Orders| !(orders.wake || orders.stop || orders.flushes > orders.flushed);
        let (news, orders) = (&self.shared.news, lock(&self.shared.orders));
        let (mut orders, is_quiet) = if is_pending {
            let (orders, waited) =
                news.wait_timeout_while(orders, IDLE, is_idle).unwrap_or_else(PoisonError::into_inner);
            (orders, waited.timed_out())
        } else {
            (news.wait_while(orders, is_idle).unwrap_or_else(PoisonError::into_inner), false)
        };
        orders.wake = false;
        let wanted = ((orders.flushes > orders.flushed).then_some(orders.flushes), orders.stop);
        drop(orders);
        if is_quiet {
            self.sync();
        }
        wanted
    }

    fn write_sealed(&mut self, survivors: Survivors) {
        loop {
            let Some(segment) = lock(&self.shared.staging).begin_write() else { return };
            let kept = self.write(&segment);
            drop(segment);
            lock(&self.shared.staging).end_write();
            if survivors == Survivors::PutAgain {
                self.put_again(&kept);
            }
            if self.unsynced >= SYNC_SEGMENTS {
                self.sync();
            }
        }
    }

    /// Writes the open segment as well, and then the extents kept of its place: that opens another segment, whose place
    /// is forgotten whole and written with as much as there is. Pages read there are not kept, since they would open
    /// one more, and so on round the ring: an end would forget most of a full store. Segments that others fill
    /// meanwhile keep none either.
    fn write_all(&mut self) {
        lock(&self.shared.staging).seal();
        self.write_sealed(Survivors::PutAgain);
        lock(&self.shared.staging).seal();
        self.write_sealed(Survivors::Drop);
    }

    /// As far as it is filled, if it has waited for a second. It stays open.
    fn write_open(&mut self) {
        let Some(before) = Instant::now().checked_sub(IDLE) else { return };
        let scratch = self.scratch.take().unwrap_or_else(|| AlignedBuffer::new(SEGMENT_BYTES));
        let copy = lock(&self.shared.staging).checkpoint(before, scratch);
        match copy {
            Ok(segment) => {
                let kept = self.write(&segment);
                self.scratch = Some(segment.buffer);
                self.put_again(&kept);
            }
            Err(scratch) => self.scratch = Some(scratch),
        }
    }

    /// Returns what of the segment in its place is to be kept, read before.
    fn write(&mut self, segment: &SealedSegment) -> Vec<KeptPages> {
        let shared = &*self.shared;
        if shared.is_off() {
            lock(&shared.index).forget_segment(segment.segment);
            return Vec::new();
        }
        let kept = self.read_kept(&segment.kept);
        let bytes = &segment.buffer.bytes()[..segment.len];
        let written = shared.device.write_at(bytes, segment_start(segment.segment));
        shared.note_answer();
        match written {
            Ok(()) => {
                self.unsynced += 1;
                Counters::add(&shared.counters.written_bytes, segment.len as u64);
            }
            Err(error) => {
                Counters::add(&shared.counters.errors, 1);
                shared.leave_alone("write", &error);
                lock(&shared.index).forget_segment(segment.segment);
            }
        }
        kept
    }

    fn read_kept(&self, kept: &[(ContentKey, Extent)]) -> Vec<KeptPages> {
        let (mut read, mut pages) = (Vec::new(), 0);
        let mut buffer = AlignedBuffer::new(EXTENT_PAGES_MAX * PAGE_BYTES);
        for (key, extent) in kept {
            pages += u32::from(extent.pages);
            if pages > KEPT_PAGES_MAX {
                break;
            }
            let to = &mut buffer.bytes_mut()[..usize::from(extent.pages) * PAGE_BYTES];
            let offset = segment_start(extent.segment) + data_bytes(extent.at, 0).start as u64;
            let is_read = self.shared.device.read_at(to, offset).is_ok();
            self.shared.note_answer();
            if is_read && checksum(key, extent.page, to) == extent.checksum {
                read.push(KeptPages { key: *key, page: extent.page, bytes: to.to_vec() });
            }
        }
        read
    }

    fn put_again(&self, kept: &[KeptPages]) {
        if self.shared.is_off() {
            return;
        }
        for KeptPages { key, page, bytes } in kept {
            if self.shared.stage(key, *page, bytes) {
                Counters::add(&self.shared.counters.kept_pages, (bytes.len() / PAGE_BYTES) as u64);
            }
        }
    }

    fn sync(&mut self) {
        if self.unsynced > 0 && !self.shared.is_off() {
            self.unsynced = 0;
            let synced = self.shared.device.sync();
            self.shared.note_answer();
            if let Err(error) = synced {
                Counters::add(&self.shared.counters.errors, 1);
                self.shared.leave_alone("sync", &error);
            }
        }
    }
}
