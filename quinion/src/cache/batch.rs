//! Batch: several reads in one call.
//!
//! ```text
//!   1 groups of 16   walked side by side; plain hits are read here and never seen again
//!   2 look           the rest, one by one: which of its pages the cache holds
//!   3 start          the missing pages of all of them, without waiting     a wave at a time, so that a
//!   4 finish         each in order; waits as its options say               batch does not evict itself
//!   5 drop behind    pages that uncached reads of the wave have passed
//! ```
//!
//! Each read is answered as by `File::read_at_with`; the call gives the processor and the device several to work on
//! at a time. No heap is used, and 2 to 4 happen only if something is left for them.
//!
//! Invariants:
//!  1. After the call every read has an answer, and one read's error is no other's.
//!
//! Not an invariant: that all reads see the file at one moment, or in order.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::arena::GrownView;
use crate::error::{Error, Repr, Result};
use crate::filemap::{BatchedRead, GROUP_MAX, PendingRead, Progress, ReadProgress, Span, read_group, touch};
use crate::units::FILE_BYTES_MAX;

use super::{Cache, File, PositionedRead, ReadOptions};

/// One read of a batch, and its result once it was made.
pub struct BatchRead<'b> {
    buffer: &'b mut [u8],
    position: u64,
    answer: BatchResult,
}

enum BatchResult {
    Read(usize),
    Unread,
    Missing(usize),
    Failed(Error),
}

impl<'b> BatchRead<'b> {
    /// A read of up to `buffer.len()` bytes at byte `position` into `buffer`.
    #[inline]
    pub fn new(buffer: &'b mut [u8], position: u64) -> Self {
        Self { buffer, position, answer: BatchResult::Unread }
    }
    /// The byte of the file that it begins at.
    #[inline]
    pub fn position(&self) -> u64 {
        self.position
    }
    /// Moves it to another byte, for the next batch; its result is forgotten.
    #[inline]
    pub fn set_position(&mut self, position: u64) {
        (self.position, self.answer) = (position, BatchResult::Unread);
    }
    /// How many bytes were read, as [`File::read_at`] counts them; 0 before it was made.
    ///
    /// # Errors
    /// Those of [`File::read_at_with`]; nothing was read then.
    #[inline]
    pub fn result(&self) -> std::result::Result<usize, &Error> {
        match &self.answer {
            BatchResult::Read(bytes) => Ok(*bytes),
            BatchResult::Unread | BatchResult::Missing(_) => Ok(0),
            BatchResult::Failed(error) => Err(error),
        }
    }
    /// As [`BatchRead::result`], with the error itself.
    ///
    /// # Errors
    /// As there.
    pub fn into_result(self) -> Result<usize> {
        match self.answer {
            BatchResult::Read(bytes) => Ok(bytes),
            BatchResult::Unread | BatchResult::Missing(_) => Ok(0),
            BatchResult::Failed(error) => Err(error),
        }
    }
    /// The bytes that were read; none before it was made, or if it failed.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.result().unwrap_or(0)]
    }

    pub(super) fn buffer(&mut self) -> &mut [u8] {
        self.buffer
    }

    pub(super) fn answer(&mut self, result: Result<usize>) {
        self.answer = match result {
            Ok(bytes) => BatchResult::Read(bytes),
            Err(error) => BatchResult::Failed(error),
        };
    }

    fn missing(&self) -> Option<Span> {
        let BatchResult::Missing(done) = self.answer else { return None };
        Some(Span::of(self.position + done as u64, self.buffer.len() - done))
    }
}

/// Several reads that are under way or have not begun; see [`File::read_batch_async`].
#[derive(Debug)]
#[must_use = "a future does nothing until it is polled"]
pub struct BatchReadFuture<'a, 'b> {
    file: &'a File,
    reads: &'a mut [BatchRead<'b>],
    /// `None` if it is answered. Empty before the first poll.
    progress: Vec<Option<PendingRead>>,
}

impl<'a, 'b> BatchReadFuture<'a, 'b> {
    fn new(file: &'a File, reads: &'a mut [BatchRead<'b>]) -> Self {
        Self { file, reads, progress: Vec::new() }
    }
}

impl Future for BatchReadFuture<'_, '_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { file, reads, progress } = self.get_mut();
        progress.resize_with(reads.len(), || Some(PendingRead::default()));
        let mut is_pending = false;
        for (read, progress) in reads.iter_mut().zip(progress) {
            let Some(under_way) = progress else { continue };
            let asked = PositionedRead { position: read.position(), options: ReadOptions::default() };
            match file.poll_read(under_way, read.buffer(), asked, context) {
                Poll::Pending => is_pending = true,
                Poll::Ready(result) => {
                    read.answer(result);
                    *progress = None;
                }
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl fmt::Debug for BatchRead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("BatchRead");
        text.field("position", &self.position).field("len", &self.buffer.len());
        text.field("result", &self.result()).finish()
    }
}

impl File {
    /// Makes several reads of this file; each [`BatchRead`] gets the result that [`File::read_at`] would return. Hits
    /// are found side by side, which pays where the file is much larger than the processor's caches and the positions
    /// are scattered. The device is asked for all missing pages before the first is waited for. Any number, order and
    /// length; reads of ascending positions let neighbouring missing pages be read as one.
    pub fn read_batch(&self, reads: &mut [BatchRead<'_>]) {
        self.read_batch_with(reads, ReadOptions::default());
    }

    /// As [`File::read_batch`], as a future: the first poll answers hits one by one and asks the device for all that
    /// is missing; it is ready when all are answered. A poll looks at each read that is not answered yet.
    pub fn read_batch_async<'a, 'b>(&'a self, reads: &'a mut [BatchRead<'b>]) -> BatchReadFuture<'a, 'b> {
        BatchReadFuture::new(self, reads)
    }

    /// As [`File::read_batch`], with options, which hold for each read.
    pub fn read_batch_with(&self, reads: &mut [BatchRead<'_>], options: ReadOptions) {
        read_all(self, reads, |read| (self, read), options);
    }
}

impl Cache {
    /// As [`File::read_batch`], of several files of this cache.
    pub fn read_batch(&self, reads: &mut [(&File, BatchRead<'_>)]) {
        self.read_batch_with(reads, ReadOptions::default());
    }

    /// As [`Cache::read_batch`], with options. (A file of another cache is read by itself.)
    pub fn read_batch_with(&self, reads: &mut [(&File, BatchRead<'_>)], options: ReadOptions) {
        let Some((leader, _)) = reads.iter().find(|(file, _)| Arc::ptr_eq(&file.handle.shared, &self.shared))
        else {
            return reads.iter_mut().for_each(|(file, read)| {
                file.read_batch_with(std::slice::from_mut(read), options);
            });
        };
        let leader: &File = leader;
        read_all(leader, reads, |(file, read)| (*file, read), options);
    }
}

#[inline]
fn read_all<'f, 'b: 'f, T>(
    leader: &'f File,
    items: &mut [T],
    parts: impl for<'x> Fn(&'x mut T) -> (&'f File, &'x mut BatchRead<'b>),
    options: ReadOptions,
) {
    if leader.process.is_forked() {
        items.iter_mut().map(&parts).for_each(|(_, read)| read.answer = BatchResult::Unread);
        return read_rest(items, &parts, options);
    }
    let left: usize =
        items.chunks_mut(GROUP_MAX).map(|group| read_hits(leader, group, &parts, options)).sum();
    if left > 0 {
        read_rest(items, &parts, options);
    }
}

#[inline]
fn read_hits<'f, 'b: 'f, T>(
    leader: &'f File,
    group: &mut [T],
    parts: &impl for<'x> Fn(&'x mut T) -> (&'f File, &'x mut BatchRead<'b>),
    options: ReadOptions,
) -> usize {
    let mut wanted = [const { BatchedRead::nothing() }; GROUP_MAX];
    let reads = group.len();
    for (wanted, item) in wanted.iter_mut().zip(group.iter_mut()) {
        let (file, read) = parts(item);
        if !options.uncached && Arc::ptr_eq(&file.counters, &leader.counters) {
            *wanted = BatchedRead::new(file.current_lookup_cell(), file.id, read.position, read.buffer);
        }
    }
    // Among reads that follow each other in one folio, only the first counts.
    let mut last = None;
    let touch = |grown: GrownView<'_>, frame| {
        if last.replace(frame) != Some(frame) {
            touch(grown, frame);
        }
    };
    let served = read_group(&leader.view, &mut wanted[..reads], touch);
    let mut bytes = 0;
    for (nth, item) in group.iter_mut().enumerate() {
        let (_, read) = parts(item);
        read.answer = BatchResult::Unread;
        if served.has(nth) {
            read.answer = BatchResult::Read(read.buffer.len());
            bytes += read.buffer.len();
        }
    }
    leader.counters.add_hits(u64::from(served.count()), bytes as u64);
    reads - served.count() as usize
}

#[cold]
fn read_rest<'f, 'b: 'f, T>(
    items: &mut [T],
    parts: &impl for<'x> Fn(&'x mut T) -> (&'f File, &'x mut BatchRead<'b>),
    options: ReadOptions,
) {
    for (file, read) in items.iter_mut().map(parts) {
        read.read_cached(file, options); // 2
    }
    let mut rest = items;
    while !rest.is_empty() {
        let started = start_wave(rest, parts, options); // 3
        let (wave, behind) = rest.split_at_mut(started);
        for (file, read) in wave.iter_mut().map(parts) {
            read.finish(file, options); // 4
            file.note_read(read.position, read.result().unwrap_or(0));
        }
        for (file, read) in wave.iter_mut().map(parts) {
            read.end_drop_behind(file, options); // 5
        }
        rest = behind;
    }
}

/// 3: as many reads as one wave has room for, at least one; returns how many, those that miss nothing among them.
fn start_wave<'f, 'b: 'f, T>(
    items: &mut [T],
    parts: &impl for<'x> Fn(&'x mut T) -> (&'f File, &'x mut BatchRead<'b>),
    options: ReadOptions,
) -> usize {
    let mut pages = 0;
    let mut gathered: Option<(&File, Vec<Span>)> = None;
    let mut reads = 0;
    for (file, read) in items.iter_mut().map(parts) {
        if let Some(span) = read.missing() {
            pages += span.pages();
            if reads > 0 && pages > file.started_pages_max() {
                break;
            }
            match &mut gathered {
                Some((of, spans)) if std::ptr::eq(*of, file) => add_or_join(spans, span),
                others => {
                    start(others.replace((file, vec![span])), options);
                }
            }
        }
        reads += 1;
    }
    start(gathered, options);
    reads
}

fn add_or_join(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) => match last.joined(span) {
            Some(both) => *last = both,
            None => spans.push(span),
        },
        None => spans.push(span),
    }
}

fn start(gathered: Option<(&File, Vec<Span>)>, options: ReadOptions) {
    if let Some((file, spans)) = gathered {
        file.start(&spans, options);
    }
}

impl BatchRead<'_> {
    fn read_cached(&mut self, file: &File, options: ReadOptions) {
        if !matches!(self.answer, BatchResult::Unread) {
            return;
        }
        self.answer = if file.process.is_forked() {
            BatchResult::Failed(Repr::Forked.into())
        } else if self.buffer.is_empty() || self.position >= FILE_BYTES_MAX {
            BatchResult::Read(0)
        } else {
            let passing = match file.assure().and_then(|()| file.passing_with(options)) {
                Ok(passing) => passing,
                Err(error) => {
                    self.answer = BatchResult::Failed(error);
                    return;
                }
            };
            let call = file.call(passing.as_ref(), options.wait_policy());
            match file.handle.shared.filemap.copy_cached(&call, self.position, self.buffer) {
                Progress::Unread => BatchResult::Unread,
                Progress::Read(bytes) => BatchResult::Read(bytes),
                Progress::Missing(done) => BatchResult::Missing(done),
            }
        };
    }

    fn finish(&mut self, file: &File, options: ReadOptions) {
        if matches!(self.answer, BatchResult::Read(_) | BatchResult::Failed(_)) {
            return;
        }
        let (filemap, position) = (&file.handle.shared.filemap, self.position);
        let Ok(passing) = file.passing_with(options) else { return }; // its look has failed with that
        let call = file.call(passing.as_ref(), options.wait_policy());
        let result = match self.answer {
            BatchResult::Read(_) | BatchResult::Failed(_) => return,
            BatchResult::Unread => filemap.read(&call, position, self.buffer),
            BatchResult::Missing(done) => {
                let reading = ReadProgress { done, hit: false, stopped: None };
                filemap.finish(&call, position, self.buffer, reading)
            }
        };
        self.answer = match result {
            Ok(bytes) => BatchResult::Read(bytes),
            Err(error) => BatchResult::Failed(error),
        };
    }

    fn end_drop_behind(&self, file: &File, options: ReadOptions) {
        if let BatchResult::Read(bytes) = self.answer
            && bytes > 0
            && let Ok(Some(passing)) = file.passing_with(options)
        {
            let reader = file.reader(Some(&passing));
            reader.end_drop_behind(self.position, bytes, options.wait_policy().locks());
        }
    }
}

impl File {
    pub(super) fn start(&self, spans: &[Span], options: ReadOptions) {
        let Ok(passing) = self.passing_with(options) else { return };
        let call = self.call(passing.as_ref(), options.wait_policy());
        self.handle.shared.filemap.start(&call, spans);
    }
    fn started_pages_max(&self) -> u64 {
        self.handle.shared.filemap.started_pages_max()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use crate::backend::MemoryFile;

    use super::*;

    const PAGE: usize = 4096;

    fn cached() -> (Cache, File) {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache");
        let backend =
            Arc::new(MemoryFile::new((0..4 * PAGE).map(|at| (at / PAGE) as u8).collect::<Vec<_>>()));
        let file = cache.open_backend(backend).expect("it opens");
        assert_eq!(file.read_at(&mut [1; 4 * PAGE], 0).expect("a read"), 4 * PAGE);
        (cache, file)
    }

    /// Which of pages 0, 1 and 2 a group serves; `meanwhile` runs after the first.
    fn served(file: &File, meanwhile: impl FnOnce()) -> [bool; 3] {
        let mut buffers = [[9; PAGE]; 3];
        let mut at = 0;
        let mut wanted = buffers.each_mut().map(|buffer| {
            at += PAGE;
            BatchedRead::new(file.lookup_cell(), file.id, (at - PAGE) as u64, buffer)
        });
        let mut meanwhile = Some(meanwhile);
        let touch = |_: crate::arena::GrownView<'_>, _| {
            if let Some(act) = meanwhile.take() {
                act();
            }
        };
        let served = read_group(&file.view, &mut wanted, touch);
        let served = [0, 1, 2].map(|nth| served.has(nth));
        assert!(!served[0] || buffers[0] == [0; PAGE]);
        served
    }

    #[test]
    fn a_group_serves_cached_pages() {
        let (_cache, file) = cached();
        assert_eq!(served(&file, || {}), [true; 3]);
    }

    #[test]
    fn a_folio_that_goes_between_its_looks_is_not_served() {
        let (_cache, file) = cached();
        let (filemap, mapping) = (&file.handle.shared.filemap, &file.handle.mapping);
        let forget = || filemap.invalidate(mapping).expect("it is forgotten");
        assert_eq!(served(&file, forget), [true, false, false]);
    }

    #[test]
    fn a_file_that_shrinks_between_the_looks_is_cut() {
        let (_cache, file) = cached();
        let shrink = || file.handle.mapping.shrink_size(2 * PAGE as u64);
        assert_eq!(served(&file, shrink), [true, true, false]);
    }

    #[test]
    fn a_record_that_goes_between_the_looks_ends_all_reads() {
        let (_cache, file) = cached();
        let record = file.view.record(file.lookup_cell()).expect("an open file has one");
        let id = record.id.load(Ordering::Relaxed);
        assert_eq!(served(&file, || record.id.store(0, Ordering::Relaxed)), [true, false, false]);
        record.id.store(id, Ordering::Relaxed);
    }

    #[test]
    fn a_batched_read_that_is_no_plain_hit_is_left_alone() {
        let (_cache, file) = cached();
        let mut buffers = [[9; PAGE]; 5];
        let places = [(PAGE - 1, 2), (4 * PAGE - 1, 2), (1 << 40, 1), (0, 0), (PAGE, PAGE)];
        let mut wanted: Vec<_> = buffers
            .iter_mut()
            .zip(places)
            .map(|(buffer, (at, len))| {
                BatchedRead::new(file.lookup_cell(), file.id, at as u64, &mut buffer[..len])
            })
            .collect();
        let served = read_group(&file.view, &mut wanted, touch);
        assert_eq!((served.count(), served.has(4)), (1, true));
        assert!(buffers[..4].iter().all(|buffer| *buffer == [9; PAGE]));
    }
}
