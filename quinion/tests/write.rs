//! What a write promises: the bytes are there, whole page by whole page, and nothing is read that need not be.
//!
//! The file under test is beside a twin, a vector, that is written in the same way; what is read must be the twin's,
//! from the cache and, when it was synced, from a cache of its own.

use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::{Attributes, Backend, Fill, Identity, MemoryFile, SyncKind, Version, WaitQueue};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::filemap::{Filemap, Reader, Truncation, WaitPolicy};
use quinion::internals::mapping::{Mapping, NewMapping, ReadBatch};
use quinion::internals::readahead::{Config, Readahead};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::system_files::{Engine, EngineOptions};
use quinion::internals::units::{MappingId, Order, Orders, PageIndex};
use quinion::{
    BatchWrite, Cache, Durability, ErrorKind, File, OnPinned, OpenOptions, PageState, ReadOptions,
    WriteOptions,
};
use quinion_testing::content::Dice;
use quinion_testing::doubles::{Faults, SimulatedBackend};

const PAGE: usize = 4096;

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache")
}

fn writing() -> OpenOptions {
    *OpenOptions::new().write(true)
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut dice = Dice::new(seed);
    (0..len).map(|_| dice.roll() as u8).collect()
}

struct Pair {
    cache: Cache,
    memory: Arc<MemoryFile>,
    file: File,
    twin: Vec<u8>,
}

impl Pair {
    fn new(size: usize) -> Self {
        Self::of(cache(), size)
    }
    fn of(cache: Cache, size: usize) -> Self {
        let twin = bytes(1, size);
        let memory = Arc::new(MemoryFile::new(twin.clone()));
        let file =
            cache.open_backend_with(Arc::clone(&memory) as Arc<dyn Backend>, &writing()).expect("it opens");
        Self { cache, memory, file, twin }
    }
    fn write(&mut self, seed: u64, position: usize, len: usize) {
        let new = bytes(seed, len);
        self.file.write_all_at(&new, position as u64).expect("a write");
        self.note(position, &new);
    }
    fn note(&mut self, position: usize, new: &[u8]) {
        self.twin.resize(self.twin.len().max(position + new.len()), 0);
        self.twin[position..][..new.len()].copy_from_slice(new);
    }
    /// Compares the cache with the twin; and, when it was synced, a read past the cache.
    fn check(&self) {
        assert_same(&self.file, &self.twin);
        self.file.sync_data().expect("a sync");
        assert_eq!(self.file.dirty_bytes().expect("ours"), 0);
        assert_same(&open_elsewhere(&self.memory), &self.twin);
        assert_same(&self.file, &self.twin);
        self.cache.check().expect("a sound cache");
    }
}

/// Waits until so many pages of a file are cached. The thread that reaps a flush drops behind it: that may be the
/// background, and a sync that had nothing to flush does not wait for that.
fn wait_for_pages(file: &File, pages: u64) {
    let begun = Instant::now();
    while file.cached_pages() != pages {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} pages are cached", file.cached_pages());
        thread::yield_now();
    }
}

fn open_elsewhere(memory: &Arc<MemoryFile>) -> File {
    cache().open_backend(Arc::clone(memory) as Arc<dyn Backend>).expect("it opens")
}

fn assert_same(file: &File, twin: &[u8]) {
    assert_eq!(file.len(), twin.len() as u64);
    let mut there = vec![0xee; twin.len() + 1];
    let mut done = 0;
    while done < twin.len() {
        match file.read_at(&mut there[done..], done as u64).expect("a read") {
            0 => panic!("the file ends at {done}"),
            read => done += read,
        }
    }
    assert_eq!(done, twin.len());
    if let Some(at) = there.iter().zip(twin).position(|(is, should)| is != should) {
        panic!("byte {at} of {}: {} is not {}", twin.len(), there[at], twin[at]);
    }
}

#[test]
fn written_bytes_of_any_size_and_place_are_read() {
    let lens = [1, 7, 63, 64, 1000, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 65_536 + 13, 300 * PAGE + 5];
    for (nth, len) in lens.into_iter().enumerate() {
        let mut pair = Pair::new(10 * PAGE + 100);
        for (seed, position) in
            [0, 1, 100, PAGE - 1, PAGE, 2 * PAGE + 17, 5 * PAGE - 3].into_iter().enumerate()
        {
            pair.write((nth * 100 + seed) as u64, position, len);
        }
        pair.check();
    }
}

#[test]
fn any_writes_in_any_order_leave_the_file_that_they_should() {
    let mut dice = Dice::new(77);
    for round in 0..6 {
        let orders = dice.below(10) as u8;
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(orders);
        let cache = if round % 2 == 0 { cache } else { cache.folio_order_min(orders.min(2)) };
        let mut pair = Pair::of(cache.build().expect("a small cache"), dice.below(200_000) as usize);
        for step in 0..150 {
            let (position, len_max) = (dice.below(600_000) as usize, 1 << dice.below(18));
            let len = 1 + dice.below(len_max) as usize;
            match dice.below(10) {
                0 => {
                    let mut some = vec![0; len];
                    let read = pair.file.read_at(&mut some, position as u64).expect("a read");
                    let should = &pair.twin[position.min(pair.twin.len())..];
                    assert_eq!(some[..read], should[..len.min(should.len())]);
                }
                1 => drop(pair.file.dont_need(position as u64, len as u64).expect("ours")),
                2 => pair.file.sync_data().expect("a sync"),
                3 => {
                    let new = bytes(step, len % 5000 + 1);
                    assert_eq!(pair.file.append(&new).expect("an append"), pair.twin.len() as u64);
                    pair.note(pair.twin.len(), &new);
                }
                _ => pair.write(step, position, len),
            }
        }
        pair.check();
    }
}

#[test]
fn whole_pages_are_not_read_and_of_others_just_their_own() {
    let mut pair = Pair::new(64 * PAGE);
    pair.write(2, 8 * PAGE, 8 * PAGE);
    assert_eq!(pair.memory.reads(), 0, "whole pages");
    pair.write(3, 20 * PAGE + 10, 3 * PAGE);
    assert_eq!(pair.memory.reads(), 2, "the two at the edges");
    assert_eq!(pair.memory.read_bytes(), 2 * PAGE as u64);
    assert_eq!(pair.file.cached_pages(), 8 + 4);
    pair.write(4, 63 * PAGE + 1, 2 * PAGE);
    assert_eq!(pair.memory.reads(), 3, "what lies behind the end is not read");
    pair.write(5, 90 * PAGE + 100, 10);
    assert_eq!(pair.memory.reads(), 3);
    assert_eq!(pair.twin.len() as u64, pair.file.len());
    pair.check();
}

#[test]
fn a_last_page_that_is_overwritten_to_the_end_is_not_read() {
    let mut pair = Pair::new(3 * PAGE + 100);
    pair.write(2, 3 * PAGE, 100);
    assert_eq!(pair.memory.reads(), 0);
    pair.check();
    let mut pair = Pair::new(3 * PAGE + 100);
    pair.write(2, 3 * PAGE, 99);
    assert_eq!(pair.memory.reads(), 1, "one byte of it stays");
    pair.check();
}

#[test]
fn holes_read_as_zeros_before_they_are_written_back_and_after() {
    let mut pair = Pair::new(100);
    pair.write(2, 1 << 20, 5000);
    assert_same(&pair.file, &pair.twin);
    assert!(pair.memory.read_bytes() <= PAGE as u64, "nothing of the hole is asked for");
    pair.file.dont_need(0, u64::MAX).expect("ours");
    assert_same(&pair.file, &pair.twin);
    pair.check();
    pair.file.dont_need(0, u64::MAX).expect("ours");
    assert_same(&pair.file, &pair.twin);
    // In a page that has a byte of the file, and behind a cached last page.
    pair.write(3, pair.twin.len() + 1000, 1);
    pair.write(4, pair.twin.len() + 5 * PAGE, 1);
    pair.check();
}

#[test]
fn an_empty_file_grows_from_nothing() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.file.write_at(&[], 100).expect("nothing"), 0);
    assert_eq!(pair.file.len(), 0);
    for step in 0..50 {
        let new = bytes(step, 333);
        assert_eq!(pair.file.append(&new).expect("an append"), pair.twin.len() as u64);
        pair.note(pair.twin.len(), &new);
    }
    assert_eq!(pair.memory.reads(), 0);
    pair.check();
}

#[test]
fn two_handles_see_each_others_writes_and_only_one_may_write() {
    let pair = Pair::new(10 * PAGE);
    let reader = pair.cache.open_backend(Arc::clone(&pair.memory) as Arc<dyn Backend>).expect("it opens");
    assert!(!reader.is_writable() && pair.file.is_writable());
    pair.file.write_all_at(b"hello", 3 * PAGE as u64 - 2).expect("a write");
    let mut five = [0; 5];
    reader.read_exact_at(&mut five, 3 * PAGE as u64 - 2).expect("a read");
    assert_eq!(&five, b"hello");
    pair.file.append(b"world").expect("an append");
    assert_eq!(reader.len(), 10 * PAGE as u64 + 5);
    reader.read_exact_at(&mut five, 10 * PAGE as u64).expect("a read");
    assert_eq!(&five, b"world");
    for error in [
        reader.write_at(b"no", 0).map(drop),
        reader.append(b"no").map(drop),
        reader.set_len(0),
        reader.punch_hole(0, 1),
        reader.allocate(0, 1),
    ] {
        assert_eq!(error.expect_err("it only reads").kind(), ErrorKind::ReadOnly);
    }
    reader.sync_data().expect("who reads may sync");
    assert_eq!(pair.file.dirty_bytes().expect("ours"), 0);
}

#[test]
fn impossible_ranges_are_refused_and_change_nothing() {
    let pair = Pair::new(PAGE);
    let far = i64::MAX as u64;
    for (error, kind) in [
        (pair.file.write_at(b"ab", far - 1).map(drop), ErrorKind::InvalidInput),
        (pair.file.write_at(b"a", u64::MAX).map(drop), ErrorKind::InvalidInput),
        (pair.file.set_len(far + 1), ErrorKind::InvalidInput),
        (pair.file.punch_hole(far, 2), ErrorKind::InvalidInput),
        (pair.file.sync_range(1, far), ErrorKind::InvalidInput),
    ] {
        assert_eq!(error.expect_err("it cannot be").kind(), kind);
    }
    let only_read = *OpenOptions::new().truncate(true);
    let memory = || Arc::clone(&pair.memory) as Arc<dyn Backend>;
    let refused = pair.cache.open_backend_with(memory(), &only_read).expect_err("it would be emptied");
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert_eq!(pair.file.len(), PAGE as u64);
    pair.check();
}

#[test]
fn a_stream_writes_at_its_position_and_an_appending_one_at_the_end() {
    let pair = Pair::new(0);
    let mut stream = pair.file.clone();
    stream.write_all(b"0123456789").expect("a write");
    stream.seek(SeekFrom::Start(3)).expect("inside");
    stream.write_all(b"abc").expect("a write");
    stream.flush().expect("it does nothing");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("a read");
    assert_eq!(rest, b"6789");
    let append = *OpenOptions::new().append(true);
    let memory = Arc::clone(&pair.memory) as Arc<dyn Backend>;
    let mut appender = pair.cache.open_backend_with(memory, &append).expect("it opens");
    appender.write_all(b"X").expect("a write");
    stream.write_all(b"Y").expect("behind its own end: over the X");
    appender.write_all(b"Z").expect("a write");
    appender.write_at(b"!", 0).expect("where it is told");
    assert_same(&pair.file, b"!12abc6789YZ");
}

#[test]
fn a_batch_and_pieces_are_as_writes_by_themselves() {
    let mut pair = Pair::new(5 * PAGE);
    let (one, two) = (bytes(5, 5000), bytes(6, 10));
    let mut writes =
        [BatchWrite::new(&one, 100), BatchWrite::new(&two, 4 * PAGE as u64), BatchWrite::new(&two, u64::MAX)];
    pair.file.write_batch(&mut writes);
    assert_eq!(writes[0].result().ok(), Some(5000));
    assert_eq!(writes[1].result().ok(), Some(10));
    assert_eq!(writes[2].result().expect_err("no such place").kind(), ErrorKind::InvalidInput);
    pair.note(100, &one);
    pair.note(4 * PAGE, &two);
    let pieces = [&one[..], &[], &two[..]].map(std::io::IoSlice::new);
    assert_eq!(pair.file.write_vectored_at(&pieces, 7 * PAGE as u64).expect("a write"), 5010);
    pair.note(7 * PAGE, &one);
    pair.note(7 * PAGE + 5000, &two);
    pair.check();
}

/// 1 W writes a page in two pieces; R reads it between them, and has half of it.
/// 2 Nor need such a page be read before it is written.
#[test]
fn pieces_in_one_page_are_one_write_of_it() {
    let lens = [2048, 2048, 1, 0, 3 * PAGE, 5000, 1, 1, PAGE - 3, 2 * PAGE + 100, 0, 96, 700, PAGE - 700, 0];
    for start in [0, PAGE, 1000] {
        let mut pair = Pair::new(16 * PAGE);
        let parts: Vec<Vec<u8>> = lens.iter().enumerate().map(|(nth, &len)| bytes(nth as u64, len)).collect();
        let pieces: Vec<_> = parts.iter().map(|part| std::io::IoSlice::new(part)).collect();
        let all = parts.concat();
        assert_eq!(pair.file.write_vectored_at(&pieces, start as u64).expect("a write"), all.len());
        pair.note(start, &all);
        let edges = usize::from(start % PAGE > 0) + usize::from((start + all.len()) % PAGE > 0);
        assert_eq!(pair.memory.reads(), edges as u64, "no page is read but those at the edges");
        pair.check();
    }
    let pair = Pair::new(0);
    assert_eq!(pair.file.write_vectored_at(&[], 7).expect("nothing"), 0);
    let empty = [std::io::IoSlice::new(&[]), std::io::IoSlice::new(&[])];
    assert_eq!(pair.file.write_vectored_at(&empty, 7).expect("nothing"), 0);
    pair.check();
}

#[test]
fn writes_of_a_durable_handle_are_in_the_file_when_they_return() {
    for durability in [Durability::Data, Durability::All] {
        let memory = Arc::new(MemoryFile::new(vec![1; 3 * PAGE]));
        let cache = cache();
        let options = *writing().durability(durability);
        let file =
            cache.open_backend_with(Arc::clone(&memory) as Arc<dyn Backend>, &options).expect("it opens");
        file.write_all_at(&[2; 100], 50).expect("a write");
        assert_eq!(file.dirty_bytes().expect("ours"), 0);
        file.append(&[3; 10]).expect("an append");
        file.write_at_with(&[4; 10], 0, WriteOptions::new().durability(Durability::OnSync)).expect("a write");
        assert_eq!(file.dirty_bytes().expect("ours"), PAGE as u64, "said otherwise");
        let mut twin = vec![1; 3 * PAGE];
        twin[50..150].fill(2);
        twin.extend([3; 10]);
        assert_same(&open_elsewhere(&memory), &twin);
    }
}

#[test]
fn a_small_cache_keeps_dirty_pages_while_others_are_read() {
    let mut pair = Pair::new(8 << 20);
    let memory = Arc::new(MemoryFile::new(vec![9; 64 << 20]));
    let other = pair.cache.open_backend(memory).expect("it opens");
    for page in (0..2048).step_by(9) {
        pair.write(page as u64, page * PAGE + 7, 100);
    }
    let mut buffer = vec![0; 1 << 20];
    for at in 0..64 {
        other.read_exact_at(&mut buffer, at << 20).expect("a read");
    }
    assert_eq!(pair.file.dirty_bytes().expect("ours"), (2048usize.div_ceil(9) * PAGE) as u64);
    pair.check();
}

#[test]
fn threads_on_different_pages_do_not_disturb_each_other() {
    let mut pair = Pair::new(64 * PAGE);
    thread::scope(|scope| {
        for thread in 0..4 {
            let file = &pair.file;
            scope.spawn(move || {
                for round in 0..30 {
                    for page in (thread..64).step_by(4) {
                        let new = bytes((round * 64 + page) as u64, 3000);
                        file.write_all_at(&new, (page * PAGE + 500) as u64).expect("a write");
                    }
                }
            });
        }
    });
    for page in 0..64 {
        let new = bytes((29 * 64 + page) as u64, 3000);
        pair.note(page * PAGE + 500, &new);
    }
    pair.check();
}

#[test]
fn appends_of_several_threads_lie_side_by_side() {
    let pair = Pair::new(10);
    let positions: Vec<Vec<(u64, u8)>> = thread::scope(|scope| {
        let threads: Vec<_> = (1..5u8)
            .map(|mine| {
                let file = &pair.file;
                scope.spawn(move || {
                    (0..100).map(|_| (file.append(&[mine; 777]).expect("ours"), mine)).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
    });
    let mut twin = bytes(1, 10);
    twin.resize(10 + 400 * 777, 0);
    for (position, mine) in positions.into_iter().flatten() {
        let place = &mut twin[position as usize..][..777];
        assert!(place.iter().all(|&byte| byte == 0), "two got one place");
        place.fill(mine);
    }
    assert_same(&pair.file, &twin);
}

#[test]
fn a_reader_sees_each_page_whole_while_it_is_written() {
    let (pair, stop) = (Pair::new(0), AtomicBool::new(false));
    pair.file.write_all_at(&vec![0; 16 * PAGE], 0).expect("a write");
    thread::scope(|scope| {
        let (file, stop) = (&pair.file, &stop);
        scope.spawn(move || {
            let mut buffer = vec![0; 16 * PAGE];
            while !stop.load(Ordering::Relaxed) {
                file.read_exact_at(&mut buffer, 0).expect("a read");
                for page in buffer.chunks(PAGE) {
                    assert!(page.iter().all(|&byte| byte == page[0]), "a page of two moments");
                }
            }
        });
        for round in 0..400 {
            file.write_all_at(&vec![round as u8; 16 * PAGE], 0).expect("a write");
            if round % 40 == 0 {
                file.sync_data().expect("a sync");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// R12: a reader of a file that shrinks meanwhile sees bytes of the file alone, no zeros that a cut has left in the
/// page of its end, and after the cut nothing past it: the size is read again after the data is held.
#[test]
fn r12_no_byte_behind_a_new_end_is_read_while_the_file_shrinks() {
    let (pair, stop) = (Pair::new(0), AtomicBool::new(false));
    let (long, short) = (64 * PAGE, 3 * PAGE + 100);
    // Twice the size that the file has, odd while that changes; and how many reads saw one size from end to end.
    let (told, settled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        let (file, stop, told, settled) = (&pair.file, &stop, &told, &settled);
        let reader = scope.spawn(move || {
            let mut buffer = vec![0; 64 * PAGE];
            while !stop.load(Ordering::Relaxed) {
                let before = told.load(Ordering::Acquire); // partner: the Release of the one that cuts
                let read = file.read_at(&mut buffer, 0).expect("a read");
                let after = told.load(Ordering::Acquire); // partner: as above
                let stale = buffer[..read].iter().position(|&byte| byte != 7);
                assert_eq!(stale.map(|at| (at, read)), None);
                if before == after && before % 2 == 0 {
                    assert!(read <= before / 2, "{read} bytes of a file of {}", before / 2);
                    settled.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // As long as it takes until reads have fallen between two changes, however late they begin.
        let goes_on = |round: u32| round < 60 || settled.load(Ordering::Relaxed) < 10;
        for round in (0..).take_while(|&round| goes_on(round) && !reader.is_finished()) {
            told.fetch_or(1, Ordering::Release);
            file.write_all_at(&vec![7; long], 0).expect("a write");
            told.store(2 * long, Ordering::Release); // partner: the reader's Acquire
            told.fetch_or(1, Ordering::Release);
            file.set_len(short as u64).expect("it is cut");
            told.store(2 * short, Ordering::Release); // partner: the reader's Acquire
            assert_eq!(file.read_at(&mut [0; 100], short as u64).expect("nothing there"), 0);
            if round % 4 == 0 {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// R13: a reader of a file that grows sees what was appended, or an end, and never other bytes.
#[test]
fn r13_a_reader_of_a_growing_file_sees_new_bytes_or_none_and_never_others() {
    let (pair, stop) = (Pair::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let (file, stop) = (&pair.file, &stop);
        scope.spawn(move || {
            let mut buffer = vec![0; 10_000];
            while !stop.load(Ordering::Relaxed) {
                let from = file.len().saturating_sub(5000);
                let read = file.read_at(&mut buffer, from).expect("a read");
                for (at, &byte) in buffer[..read].iter().enumerate() {
                    assert_eq!(
                        byte,
                        ((from as usize + at) / 1000 % 250 + 1) as u8,
                        "at {}",
                        from as usize + at
                    );
                }
            }
        });
        for step in 0..2000usize {
            let at = file.append(&[(step % 250 + 1) as u8; 1000]).expect("an append");
            assert_eq!(at, step as u64 * 1000);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// R19: bytes of a held batch stay readable when the file is cut, and the cut does not wait for them; what is read anew
/// ends at the new end.
#[test]
fn r19_a_held_batch_survives_a_cut_and_new_readers_see_the_new_end() {
    let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).expect("an arena"));
    let orders = Orders { min: Order::ZERO, max: Order(3) };
    let filemap = Filemap::new(Arc::clone(&arena), Arc::new(WaitQueue::new()), orders);
    let filemap = Arc::new(filemap);
    let twin = bytes(1, 32 * PAGE);
    let memory: Arc<dyn Backend> = Arc::new(MemoryFile::new(twin.clone()));
    let known = memory.attributes().expect("memory has attributes");
    let mapping = Mapping::new(NewMapping {
        arena: &arena,
        id: MappingId(1),
        backend: Arc::clone(&memory),
        attributes: &known,
        process: ForkGuard::new(),
    });
    let mapping = Arc::new(mapping.expect("a cell").with_dirty_pages(filemap.writeback().totals()));
    mapping.writeback().set_writer(memory);
    let readahead = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(8)));
    let call = Reader::plain(&readahead).call(&mapping, WaitPolicy::Wait);
    let read = |to: &mut [u8]| filemap.read(&call, 0, to);
    assert_eq!(read(&mut vec![0; 32 * PAGE]).expect("a read"), 32 * PAGE);

    let mut batch = ReadBatch::new();
    mapping.get_read_batch(PageIndex(0), PageIndex(31), &mut batch);
    let end = PAGE + 10;
    Truncation::of(&filemap, &mapping).cut(end as u64, OnPinned::Detach).expect("it is cut");
    let mut held = vec![0; 32 * PAGE];
    let mut done = 0;
    for folio in batch.iter() {
        done += folio.copy_out(done as u64, &mut held[done..]);
    }
    assert!(done > end, "the batch reaches behind the cut");
    assert_eq!(held[..end], twin[..end]);
    // What the cut has zeroed in place is zero; nothing is another file's.
    let is_own = |at: usize| held[at] == twin[at] || held[at] == 0;
    assert_eq!((end..done).find(|&at| !is_own(at)), None);
    drop(batch);
    let mut anew = vec![0; 32 * PAGE];
    assert_eq!(read(&mut anew).expect("a read"), end);
    assert_eq!(anew[..end], twin[..end]);
    mapping.check().expect("a sound mapping");
}

#[test]
fn pinned_bytes_survive_a_cut_and_new_readers_see_the_new_end() {
    let pair = Pair::new(32 * PAGE);
    let pinned = pair.file.pin(0, 32 * PAGE).expect("pins");
    pair.file.set_len(PAGE as u64 + 10).expect("it is cut");
    let held: Vec<u8> = pinned.chunks().flatten().copied().collect();
    assert_eq!(held, pair.twin);
    let mut buffer = vec![0; 32 * PAGE];
    let read = pair.file.read_at(&mut buffer, 0).expect("a read");
    assert_eq!(buffer[..read], pair.twin[..PAGE + 10]);
    pair.file.set_len(3 * PAGE as u64).expect("it is extended");
    drop(pinned);
    let mut twin = pair.twin[..PAGE + 10].to_vec();
    twin.resize(3 * PAGE, 0);
    assert_same(&pair.file, &twin);
}

#[test]
fn pinned_bytes_do_not_change_and_new_readers_see_the_write() {
    let mut pair = Pair::new(16 * PAGE);
    pair.write(3, 2 * PAGE + 5, 10); // dirty beside what is pinned
    let pinned = pair.file.pin(2 * PAGE as u64, 3 * PAGE).expect("pins");
    let before = pair.twin[2 * PAGE..5 * PAGE].to_vec();
    pair.write(2, 3 * PAGE + 100, 50);
    pair.write(4, 2 * PAGE, 1);
    assert_eq!(pinned.chunks().flatten().copied().collect::<Vec<_>>(), before);
    assert_same(&pair.file, &pair.twin);
    drop(pinned);
    pair.check();
}

#[test]
fn a_write_reports_pins_that_stay_and_goes_on_when_they_end() {
    let cache = cache();
    let memory = Arc::new(MemoryFile::new(vec![1; 4 * PAGE]));
    let options = *writing().on_pinned(OnPinned::Wait(Duration::from_millis(30)));
    let file = cache.open_backend_with(memory, &options).expect("it opens");
    let pinned = file.pin(0, PAGE).expect("a pin");
    assert_eq!(file.write_at(&[2; 10], 100).expect_err("pinned").kind(), ErrorKind::Busy);
    assert!(pinned.chunks().flatten().all(|&byte| byte == 1));
    thread::scope(|scope| {
        scope.spawn(|| drop(pinned));
        while let Err(error) = file.write_at(&[2; 10], 100) {
            assert_eq!(error.kind(), ErrorKind::Busy);
        }
    });
    let mut ten = [0; 10];
    file.read_exact_at(&mut ten, 100).expect("a read");
    assert_eq!(ten, [2; 10]);
}

/// D14: the pages of an uncached write are dropped once they are written back; what was cached before stays.
#[test]
fn d14_an_uncached_write_leaves_nothing_once_it_is_written_back() {
    let mut pair = Pair::new(64 * PAGE);
    let mut buffer = [0; PAGE];
    pair.file.read_exact_at(&mut buffer, 8 * PAGE as u64).expect("a read");
    let new = bytes(8, 16 * PAGE);
    let uncached = WriteOptions::new().uncached(true);
    assert_eq!(pair.file.write_at_with(&new, 0, uncached).expect("a write"), new.len());
    pair.note(0, &new);
    pair.file.sync_data().expect("a sync");
    wait_for_pages(&pair.file, 1); // what was cached before stays
    pair.check();
}

/// D15: a page of an uncached write that a plain write changes before its write-back stays cached after it.
#[test]
fn d15_an_uncached_write_that_is_overwritten_stays() {
    let (cache, memory) = (cache(), Arc::new(MemoryFile::new(vec![0; 64 * PAGE])));
    let device = Arc::new(SimulatedBackend::of_memory(memory, Faults::default()));
    let file =
        cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &writing()).expect("it opens");
    let uncached = WriteOptions::new().uncached(true);
    // Nothing goes before the overwrite, though the background may have taken it.
    device.pause();
    file.write_at_with(&[5; PAGE], 0, uncached).expect("a write");
    file.write_at_with(&[6; PAGE], PAGE as u64, uncached).expect("a write");
    file.write_at(&[7; 10], 100).expect("a write");
    device.resume();
    file.sync_data().expect("a sync");
    wait_for_pages(&file, 1);
    let mut cached = file.residents(0, 2 * PAGE as u64).expect("ours");
    let first = cached.next().map(|resident| (resident.pages, resident.state));
    assert_eq!(first, Some((1, PageState::Cached)), "the overwritten one stays");
    let (reads, mut ten) = (device.reads(), [0; 10]);
    file.read_exact_at(&mut ten, 100).expect("a read");
    assert_eq!((ten, device.reads()), ([7; 10], reads));
    cache.check().expect("a sound cache");
}

#[test]
fn the_end_of_the_cache_and_of_a_handle_lose_nothing() {
    let memory = Arc::new(MemoryFile::new(vec![0; 10]));
    let cache = cache();
    let file =
        cache.open_backend_with(Arc::clone(&memory) as Arc<dyn Backend>, &writing()).expect("it opens");
    file.write_all_at(&[1; 3 * PAGE], 5).expect("a write");
    drop(file);
    let again = cache.open_backend(Arc::clone(&memory) as Arc<dyn Backend>).expect("it opens");
    let mut twin = vec![0; 5];
    twin.resize(5 + 3 * PAGE, 1);
    assert_same(&again, &twin);
    drop(again);
    drop(cache);
    assert_same(&open_elsewhere(&memory), &twin);
}

#[test]
fn an_open_after_an_external_change_keeps_dirty_pages_and_forgets_the_rest() {
    let mut pair = Pair::new(8 * PAGE);
    assert_same(&pair.file, &pair.twin);
    pair.write(2, 2 * PAGE, PAGE);
    pair.memory.change(|content| content.fill(0xaa));
    let again = pair.cache.open_backend(Arc::clone(&pair.memory) as Arc<dyn Backend>).expect("it opens");
    let mine = pair.twin[2 * PAGE..3 * PAGE].to_vec();
    pair.twin.fill(0xaa);
    pair.twin[2 * PAGE..3 * PAGE].copy_from_slice(&mine);
    assert_same(&again, &pair.twin);
    pair.check();
}

/// Changes a file, behind the cache, of which a page is dirty, with a pin of another page and without; then opens it.
fn the_clean_rest_of_a_partly_dirty_folio_goes(cache: &Cache, Sizes { pages, pinned, dirty }: Sizes) {
    for pin in [false, true] {
        let mut pair = Pair::of(cache.clone(), pages * PAGE);
        assert_same(&pair.file, &pair.twin);
        let stays = pair.file.pin((pinned * PAGE) as u64, 10).expect("a pin");
        let stays = pin.then_some(stays);
        pair.write(2, dirty * PAGE + 7, 3);
        let mine = pair.twin[dirty * PAGE..][..PAGE].to_vec();
        pair.memory.change(|content| content.fill(0xaa));
        let again = pair.cache.open_backend(Arc::clone(&pair.memory) as Arc<dyn Backend>).expect("it opens");
        pair.twin.fill(0xaa);
        pair.twin[dirty * PAGE..][..PAGE].copy_from_slice(&mine);
        assert_same(&again, &pair.twin);
        pair.check();
        drop(stays);
    }
}

/// The length of a file in pages, and two of its pages, by their numbers.
struct Sizes {
    pages: usize,
    pinned: usize,
    dirty: usize,
}

/// 1 A folio of many pages is read, and one of them written.
/// 2 Others change the file, and it is opened: the folio stays, as it is dirty.
/// 3 The version is known anew, so it is never compared again, and all readers get the other pages as they were.
#[test]
fn the_clean_rest_of_a_partly_dirty_folio_is_forgotten() {
    let cache = Cache::builder().memory(64 << 20).folio_order_max(9).build().expect("a cache");
    the_clean_rest_of_a_partly_dirty_folio_goes(&cache, Sizes { pages: 512, pinned: 300, dirty: 100 });
}

/// 1 A page of a smallest folio, which cannot be split, is written.
/// 2 Others change the file, and it is opened: the folio stays whole, and the new version is known of all its pages.
/// 3 The dirty page is written back: the other pages stay as they were, and no look ever finds a change.
#[test]
fn the_clean_rest_of_a_partly_dirty_smallest_folio_is_forgotten() {
    let cache = Cache::builder().memory(64 << 20).folio_order_min(3).build().expect("a cache");
    the_clean_rest_of_a_partly_dirty_folio_goes(&cache, Sizes { pages: 64, pinned: 40, dirty: 20 });
}

/// A device on which something happens while it is asked.
#[derive(Debug)]
struct Eventful {
    memory: MemoryFile,
    fills: Mutex<Vec<quinion::backend::Fill>>,
    flushes: Mutex<Vec<quinion::backend::Flush>>,
    /// How often it is asked what it is until its flushes end, and the event comes, right after the answer is known.
    looks: AtomicUsize,
    /// What others do then, or while a fill is waited for.
    event: Mutex<Option<Event>>,
    /// Whether it tells of its version that the next change has another. Else it is as if it had been written just now.
    is_settled: AtomicBool,
}

struct Event(Box<dyn FnOnce(&MemoryFile) + Send>);

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Event")
    }
}

impl Eventful {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        let memory = MemoryFile::new(bytes);
        let (fills, flushes, event) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (looks, is_settled) = (AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Self { memory, fills, flushes, looks, event, is_settled })
    }
    fn end_flushes(&self) {
        let flushes = std::mem::take(&mut *self.flushes.lock().expect("ours"));
        self.memory.flush(flushes);
    }
    fn take_event(&self) {
        let event = self.event.lock().expect("ours").take();
        if let Some(Event(event)) = event {
            event(&self.memory);
        }
    }
}

impl Backend for Eventful {
    fn name(&self) -> &'static str {
        "eventful"
    }
    fn attributes(&self) -> std::io::Result<quinion::backend::Attributes> {
        let mut known = self.memory.attributes()?;
        known.version.settled &= self.is_settled.load(Ordering::Relaxed);
        if self.looks.load(Ordering::Relaxed) > 0 && self.looks.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.end_flushes();
            self.take_event();
        }
        Ok(known)
    }
    /// `false`, so that a call that starts flushes has started them when it returns.
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<quinion::backend::Fill>) {
        self.fills.lock().expect("ours").extend(fills);
    }
    fn wants_leader(&self) -> bool {
        !self.fills.lock().expect("ours").is_empty()
    }
    fn reap(
        &self,
        how: quinion::backend::ReapMode,
        _: &mut dyn FnMut() -> bool,
    ) -> quinion::backend::ReapOutcome {
        if how.waits() {
            self.end_flushes(); // so that the end of a cache does not wait for ever
        }
        self.take_event();
        let fills = std::mem::take(&mut *self.fills.lock().expect("ours"));
        let count = fills.len();
        self.memory.submit(fills);
        if count > 0 {
            quinion::backend::ReapOutcome::Some(count)
        } else {
            quinion::backend::ReapOutcome::Elsewhere
        }
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<quinion::backend::Flush>) {
        self.flushes.lock().expect("ours").extend(flushes);
    }
    fn sync(&self, kind: quinion::backend::SyncKind, range: std::ops::Range<u64>) -> std::io::Result<()> {
        self.memory.sync(kind, range)
    }
}

/// 1 A flush that makes the file longer is under way; R opens the file, and asks how long it is.
/// 2 The answer is known, and the flush ends: nothing is dirty any more, and the file is longer on its device.
/// 3 R believes the answer: the file is short for all, and the next append goes over what was written.
#[test]
fn a_flush_that_ends_while_others_look_does_not_make_the_file_shorter() {
    let cache = cache();
    let device = Eventful::new(Vec::new());
    let file =
        cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &writing()).expect("it opens");
    let twin = bytes(3, PAGE + 5);
    file.write_all_at(&twin, 0).expect("a write");
    file.write_back().expect("ours");
    assert_eq!(device.flushes.lock().expect("ours").len(), 1, "it is under way");
    device.looks.store(2, Ordering::Relaxed); // by the look whether it has changed, and by the thread that forgets it
    file.revalidate().expect("a look");
    assert_eq!(device.looks.load(Ordering::Relaxed), 0, "it happened");
    assert_same(&file, &twin);
    assert_eq!(file.append(b"x").expect("an append"), twin.len() as u64);
    file.write_back().expect("ours");
    device.end_flushes();
}

/// 1 Others have changed a file of which nothing is dirty; R looks at it, and again to take its new version.
/// 2 W writes a page of a cached folio: the folio stays, since it is dirty.
/// 3 R has the new version: the other pages of the folio pass for the file as it is now, and no look finds a change.
#[test]
fn the_clean_rest_of_a_folio_that_is_written_while_others_look_goes_at_the_next_look() {
    for order_min in [0, 3] {
        let builder = Cache::builder().memory(64 << 20).folio_order_min(order_min).folio_order_max(9);
        let cache = builder.build().expect("a cache");
        let device = Eventful::new(bytes(1, 64 * PAGE));
        device.is_settled.store(true, Ordering::Relaxed);
        let open = || {
            cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &writing()).expect("it opens")
        };
        let (file, other) = (open(), open());
        assert_same(&file, &bytes(1, 64 * PAGE));
        device.memory.change(|content| content.fill(0xaa));
        *device.event.lock().expect("ours") = Some(Event(Box::new(move |_| {
            let write = move || other.write_all_at(&[7; PAGE], 20 * PAGE as u64).expect("a write");
            thread::spawn(write).join().expect("it ends");
        })));
        device.looks.store(2, Ordering::Relaxed); // as above
        file.revalidate().expect("a look");
        assert!(device.event.lock().expect("ours").is_none(), "it happened");
        file.write_back().expect("ours");
        device.end_flushes();
        file.revalidate().expect("the next look");
        let mut twin = vec![0xaa; 64 * PAGE];
        twin[20 * PAGE..21 * PAGE].fill(7);
        assert_same(&file, &twin);
        cache.check().expect("a sound cache");
    }
}

/// 1 W writes three pages inside the file, and waits for the first, of which it writes a part.
/// 2 Others cut the file, and a handle sees it.
/// 3 W goes on: the other two pages are new, and dirty, behind the end. They are never written, and no error is
///   reported.
#[test]
fn a_write_that_others_cut_the_file_under_is_still_in_the_file() {
    let cache = cache();
    let device = Eventful::new(bytes(1, 8 * PAGE));
    let open =
        || cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &writing()).expect("it opens");
    let (file, other) = (open(), Arc::new(open()));
    let sees = Arc::clone(&other); // and stays open: a handle is not closed in the middle of a write
    *device.event.lock().expect("ours") = Some(Event(Box::new(move |memory| {
        memory.change(|content| content.truncate(100));
        sees.revalidate().expect("a look");
        assert_eq!(sees.len(), 100);
    })));
    let mine = bytes(2, 3 * PAGE - 50);
    assert_eq!(file.write_at(&mine, 50).expect("a write"), mine.len());
    assert!(device.event.lock().expect("ours").is_none(), "it happened");
    drop(other);
    let mut twin = bytes(1, 50);
    twin.extend(&mine);
    assert_same(&file, &twin);
    file.write_back().expect("ours");
    device.end_flushes();
    assert_eq!(file.dirty_bytes().expect("ours"), 0);
    cache.check().expect("a sound cache");
}

#[test]
fn a_handle_that_truncates_empties_the_file_for_all() {
    let pair = Pair::new(8 * PAGE);
    pair.file.write_all_at(&[1; 100], 0).expect("a write");
    let memory = Arc::clone(&pair.memory) as Arc<dyn Backend>;
    let emptied = pair.cache.open_backend_with(memory, writing().truncate(true)).expect("it opens");
    assert_eq!((emptied.len(), pair.file.len()), (0, 0));
    pair.file.append(b"new").expect("an append");
    assert_same(&emptied, b"new");
    pair.file.sync_all().expect("a sync");
    assert_same(&open_elsewhere(&pair.memory), b"new");
}

#[test]
fn files_are_made_written_and_read_back_by_the_system() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("new");
    let cache = cache();
    assert_eq!(cache.open_with(&path, &writing()).expect_err("not there").kind(), ErrorKind::Open);
    let file = cache.open_with(&path, writing().create_new(true).mode(0o600)).expect("it is made");
    assert_eq!(
        cache.open_with(&path, writing().create_new(true)).expect_err("there").raw_os_error(),
        Some(17)
    );
    let twin = bytes(9, 3 * PAGE + 777);
    file.write_all_at(&twin, 0).expect("a write");
    file.write_all_at(b"x", 2 * twin.len() as u64).expect("a write");
    file.sync_all().expect("a sync");
    let mut twin = twin;
    twin.resize(2 * twin.len(), 0);
    twin.push(b'x');
    assert_eq!(std::fs::read(&path).expect("the system's way"), twin);
    let again = cache.open_with(&path, writing().create(true)).expect("it is there");
    assert_same(&again, &twin);
    again.punch_hole(100, 5000).expect("a hole");
    twin[100..5100].fill(0);
    assert_same(&file, &twin);
    again.set_len(6000).expect("it is cut");
    twin.truncate(6000);
    assert_same(&file, &twin);
    drop((again, file));
    let emptied = cache.open_with(&path, writing().truncate(true)).expect("it opens");
    assert!(emptied.is_empty());
    assert_eq!(std::fs::metadata(&path).expect("it is there").len(), 0);
    cache.check().expect("a sound cache");
}

#[test]
fn nowait_readers_find_written_bytes() {
    let pair = Pair::new(0);
    pair.file.write_all_at(&[3; 5 * PAGE], 0).expect("a write");
    let mut buffer = vec![0; 5 * PAGE];
    let cached = ReadOptions::new().cached_only(true);
    assert_eq!(pair.file.read_at_with(&mut buffer, 0, cached).expect("it is cached"), 5 * PAGE);
    assert!(buffer.iter().all(|&byte| byte == 3));
}

#[test]
fn a_flush_of_our_own_is_no_change_by_others_and_theirs_are_seen_beside_it() {
    let mut pair = Pair::new(8 * PAGE + 10);
    assert_same(&pair.file, &pair.twin);
    let reads = pair.memory.reads();
    for round in 0..3 {
        pair.write(round, 3 * PAGE + 5, 100);
        pair.file.sync_data().expect("a sync");
        let end = pair.twin.len() as u64;
        assert_eq!(pair.file.read_at(&mut [0; 10], end).expect("nothing there"), 0); // looks at the file
        assert!(!pair.file.revalidate().expect("a look"), "nobody else changed it");
    }
    assert_same(&pair.file, &pair.twin);
    assert_eq!(pair.memory.reads(), reads, "nothing was forgotten");
    // Others write beside it, before the next flush and after it.
    pair.memory.change(|content| content[7 * PAGE] ^= 1);
    pair.twin[7 * PAGE] ^= 1;
    pair.write(9, 3 * PAGE + 5, 100);
    pair.file.sync_data().expect("a sync");
    assert!(pair.file.revalidate().expect("a look"), "somebody did");
    assert_same(&pair.file, &pair.twin);
    pair.memory.change(|content| content[6 * PAGE] ^= 1);
    pair.twin[6 * PAGE] ^= 1;
    assert!(pair.file.revalidate().expect("a look"));
    pair.check();
}

fn times_step(path: &std::path::Path) -> bool {
    let engine = Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default());
    engine.open(path).expect("it opens").attributes().expect("it is there").version.steps
}

/// A table is made, written, closed and opened again: nothing of it comes from the device.
#[test]
fn bytes_written_to_a_new_file_are_still_cached_when_it_is_reopened_at_once() {
    for folder in [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")), tempfile::tempdir_in("/dev/shm")] {
        let folder = folder.expect("a folder");
        let (path, cache) = (folder.path().join("table"), cache());
        let table = cache.open_with(&path, writing().create_new(true)).expect("it is made");
        let twin = bytes(3, 64 * PAGE + 5);
        table.write_all_at(&twin, 0).expect("a write");
        table.sync_all().expect("a sync");
        drop(table);
        let again = cache.open(&path).expect("it opens");
        if !times_step(&path) {
            eprintln!("not tested: times of {} do not step before Linux 6.13", path.display());
            continue;
        }
        assert_same(&again, &twin);
        assert_eq!(cache.stats().device_reads, 0);
        drop(again);
        // Others write one byte, at once.
        let other = std::fs::File::options().write(true).open(&path).expect("it opens");
        std::os::unix::fs::FileExt::write_all_at(&other, &[!twin[0]], 0).expect("a write");
        let again = cache.open(&path).expect("it opens");
        let mut first = [0];
        again.read_exact_at(&mut first, 0).expect("a read");
        assert_eq!(first, [!twin[0]]);
    }
}

/// A file of which one page cannot be read, and that may be one that does not grow.
#[derive(Debug)]
struct Faulty {
    memory: MemoryFile,
    bad_page: u64,
    grows: bool,
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        "faulty"
    }
    fn attributes(&self) -> std::io::Result<quinion::backend::Attributes> {
        self.memory.attributes()
    }
    fn submit(&self, fills: Vec<quinion::backend::Fill>) {
        for fill in fills {
            let first = fill.position() / PAGE as u64;
            if (first..first + (fill.len() / PAGE) as u64).contains(&self.bad_page) {
                fill.complete(Err(std::io::Error::from_raw_os_error(5)));
            } else {
                self.memory.submit(vec![fill]);
            }
        }
    }
    fn can_write(&self) -> bool {
        true
    }
    fn can_grow(&self) -> bool {
        self.grows
    }
    fn flush(&self, flushes: Vec<quinion::backend::Flush>) {
        self.memory.flush(flushes);
    }
    fn sync(&self, kind: quinion::backend::SyncKind, range: std::ops::Range<u64>) -> std::io::Result<()> {
        self.memory.sync(kind, range)
    }
}

#[test]
fn bytes_before_an_error_are_written_and_the_error_comes_with_the_next_call() {
    let faulty = Faulty { memory: MemoryFile::new(vec![1; 8 * PAGE]), bad_page: 3, grows: true };
    let cache = cache();
    let file = cache.open_backend_with(Arc::new(faulty), &writing()).expect("it opens");
    let written = file.write_at(&[2; 2 * PAGE + 10], PAGE as u64).expect("two pages of three");
    assert_eq!(written, 2 * PAGE, "the third would have to be read");
    let error = file.write_at(&[2; 10], 3 * PAGE as u64).expect_err("it cannot be read");
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(5)));
    assert_eq!(file.write_at(&[3; PAGE], 3 * PAGE as u64).expect("as a whole it can"), PAGE);
    file.sync_data().expect("a sync");
    let mut twin = vec![1; 8 * PAGE];
    twin[PAGE..3 * PAGE].fill(2);
    twin[3 * PAGE..4 * PAGE].fill(3);
    assert_same(&file, &twin);
    cache.check().expect("a sound cache");
}

#[test]
fn a_device_is_written_to_its_end_and_no_further() {
    let faulty = Faulty { memory: MemoryFile::new(vec![1; 2 * PAGE]), bad_page: 99, grows: false };
    let cache = cache();
    let file = cache.open_backend_with(Arc::new(faulty), &writing()).expect("it opens");
    assert_eq!(file.write_at(&[2; PAGE], 2 * PAGE as u64 - 10).expect("ten bytes"), 10);
    for refused in [file.write_at(&[2], 2 * PAGE as u64).map(drop), file.append(&[2]).map(drop)] {
        assert_eq!(refused.expect_err("it does not grow").kind(), ErrorKind::NoSpace);
    }
    assert_eq!(file.len(), 2 * PAGE as u64);
    file.sync_data().expect("a sync");
    let mut twin = vec![1; 2 * PAGE];
    twin[2 * PAGE - 10..].fill(2);
    assert_same(&file, &twin);
}

/// A file that others write, and this cache cannot; its syncs go as they are told.
#[derive(Debug, Default)]
struct Others {
    syncs: std::sync::Mutex<Vec<SyncKind>>,
    fails: std::sync::atomic::AtomicBool,
}

impl Backend for Others {
    fn name(&self) -> &'static str {
        "others"
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        let identity = Identity { device: 77, inode: 7, born: 0 };
        let version = Version { modified: 1, changed: 1, settled: true, steps: true };
        Ok(Attributes { identity, version, size: 10 })
    }
    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| fill.complete(Ok(10)));
    }
    fn sync_others(&self, kind: SyncKind) -> std::io::Result<()> {
        self.syncs.lock().unwrap().push(kind);
        match self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(std::io::Error::from_raw_os_error(5)),
            false => Ok(()),
        }
    }
}

/// 1. Another process writes a file.
/// 2. The reader syncs it, gets `Ok`, and relies on that. Nothing has been made durable.
#[test]
fn sync_by_a_reader_makes_writes_of_other_processes_durable() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let others = std::sync::Arc::new(Others::default());
    let file = cache.open_backend(others.clone()).unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    file.sync_range(0, 1).unwrap();
    assert_eq!(*others.syncs.lock().unwrap(), [SyncKind::Data, SyncKind::All, SyncKind::Data]);
    others.fails.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(5));
    // And by the system, of a file that can only be read.
    let temporary = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(temporary.path(), "bytes").unwrap();
    cache.open(temporary.path()).unwrap().sync_all().unwrap();
}
