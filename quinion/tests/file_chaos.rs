//! File chaos: threads write, punch, cut, extend, read in all ways, pin, sync and drop pages of one file at once, and
//! no byte is one that was not written there.
//!
//! ```text
//!   file     [ zone 0 | zone 1 | zone 2 | zone 3 ]      one thread changes a zone; all threads read all of them
//!   cell     [ 61 words of (number of the cell, version) ]     of 488 bytes, so that cells lie across pages
//!   truth    of each cell: the last version begun, the last that has ended, and the last that made it zeros
//! ```
//!
//! A read notes what had ended before it, and what has begun after it. A version of a cell outside of that is a lost
//! or stale byte, and two versions of a cell inside one page are a torn page. To the thread of the zone both are the
//! same version, so it knows each byte; and so do all when the threads have ended. Then the kernel is asked for the
//! same file.
//!
//! A change that failed may have been made, in part: its cells have their old version or the new one until the next
//! change. Pinned bytes are compared with a copy of them when they are let go.
//!
//! The file is larger than the memory, which another thread makes smaller and larger. There is one storm of a file with
//! large folios, one of a file with small ones, and two on devices whose reads, writes and syncs fail now and then,
//! where what was written is there all the same. And there are four of memory files that spill: packed, not packed, and
//! each into a spill file that becomes full; there, too, no read is refused. A failure says its seed:
//! `QUINION_CHAOS_SEED=N` repeats its operations, though not how the threads meet.
//!
//! `QUINION_SOAK=1 cargo test --release -p quinion --test file_chaos -- --nocapture` blows for 30 seconds each.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use quinion::backend::MemoryFile;
use quinion::{
    BatchRead, BatchWrite, Cache, Error, ErrorKind, File, Hint, MemFile, MemFileOptions, OpenOptions, Pinned,
    ReadOptions, SpillOptions, WriteOptions,
};

use quinion_testing::block_on::block_on;
use quinion_testing::content::Dice;
use quinion_testing::doubles::{CompletionOrder, Faults, SimulatedBackend, WriteFaults};

const PAGE: u64 = 4096;
const WORD: usize = 8;
const CELL: u64 = 488;
const ZONES: u64 = 4;
/// A zone of 11 MB; the last begins behind 33 MB, which is twice the memory.
const ZONE_CELLS: u64 = 23_011;
const RUN_CELLS: u64 = 40;
const LARGE_RUN_CELLS: u64 = 4_000;
const MEMORY: u64 = Cache::MEMORY_MIN;
const PINS: usize = 3;
const WAYS: u64 = 8;
const NOWAIT: u64 = 2;
const CACHED_ONLY: u64 = 3;
/// The file is never shorter.
const LEAST_LEN: u64 = (ZONES - 1) * ZONE_CELLS * CELL;

/// What may be in each cell.
struct Truth {
    begun: Vec<AtomicU32>,
    ended: Vec<AtomicU32>,
    zeroed: Vec<AtomicU32>,
}

fn cells(range: &Range<u64>) -> Range<usize> {
    (range.start / CELL) as usize..range.end.div_ceil(CELL) as usize
}

fn stamp(cell: usize, version: u32) -> u64 {
    (cell as u64) << 32 | u64::from(version)
}

fn filled(range: Range<u64>, version: u32) -> Vec<u8> {
    cells(&range).flat_map(|cell| stamp(cell, version).to_le_bytes().repeat(CELL as usize / WORD)).collect()
}

impl Truth {
    fn new() -> Self {
        let zeros = || (0..ZONES * ZONE_CELLS).map(|_| AtomicU32::new(0)).collect();
        Self { begun: zeros(), ended: zeros(), zeroed: zeros() }
    }

    // SeqCst, all of them: a read's two looks at the truth stand before and after what it reads, also in the eyes of
    // a thread that changes it.
    fn begin(&self, range: &Range<u64>, version: u32, zeros: bool) {
        for cell in cells(range) {
            self.begun[cell].store(version, Ordering::SeqCst);
            if zeros {
                self.zeroed[cell].store(version, Ordering::SeqCst);
            }
        }
    }

    fn end(&self, range: &Range<u64>, version: u32) {
        cells(range).for_each(|cell| self.ended[cell].store(version, Ordering::SeqCst));
    }

    fn ended(&self, range: &Range<u64>) -> Vec<u32> {
        cells(range).map(|cell| self.ended[cell].load(Ordering::SeqCst)).collect()
    }

    /// Whether `bytes`, read at `position`, may be there, if `ended` was the truth before the read.
    fn verify(&self, bytes: &[u8], position: u64, ended: &[u32]) -> Result<(), String> {
        let first = position / CELL;
        let mut at = position;
        let end = position + bytes.len() as u64;
        while at < end {
            let cell = at / CELL;
            let piece_end = ((cell + 1) * CELL).min((at / PAGE + 1) * PAGE).min(end);
            let piece = &bytes[(at - position) as usize..(piece_end - position) as usize];
            let least = ended[(cell - first) as usize];
            self.verify_piece(piece, cell as usize, least).map_err(|why| format!("at byte {at}: {why}"))?;
            at = piece_end;
        }
        Ok(())
    }

    fn verify_piece(&self, piece: &[u8], cell: usize, least: u32) -> Result<(), String> {
        let word = |nth: usize| u64::from_le_bytes(piece[nth * WORD..][..WORD].try_into().expect("a word"));
        let found = word(0);
        if let Some(nth) = (0..piece.len() / WORD).find(|&nth| word(nth) != found) {
            return Err(format!(
                "cell {cell} is torn inside a page: {found:x}, then {:x} at word {nth}",
                word(nth)
            ));
        }
        let zeroed = self.zeroed[cell].load(Ordering::SeqCst);
        let most = self.begun[cell].load(Ordering::SeqCst);
        let may_be_zero = least == 0 || (least..=most).contains(&zeroed);
        let version = (found & u64::from(u32::MAX)) as u32;
        let right = match found {
            0 => may_be_zero,
            _ => found == stamp(cell, version) && (least..=most).contains(&version),
        };
        let words = || {
            format!("cell {cell} has {found:x}, and versions {least} to {most} are right (zeros: {zeroed})")
        };
        if right { Ok(()) } else { Err(words()) }
    }
}

/// The file of a storm.
#[derive(Clone)]
enum Subject {
    File(Box<File>),
    Memory(Box<MemFile>),
}
use Subject::{File as Plain, Memory};

impl Subject {
    fn write(&self, dice: &mut Dice, bytes: &[u8], position: u64) -> Result<usize, Error> {
        // Whole pages go together: a page is written at one moment.
        let (one, other) = bytes.split_at((PAGE as usize - (position % PAGE) as usize).min(bytes.len()));
        match (self, dice.below(5)) {
            (Plain(file), 4) => {
                file.write_vectored_at(&[IoSlice::new(one), IoSlice::new(&[]), IoSlice::new(other)], position)
            }
            (Memory(file), 4) => {
                file.write_vectored_at(&[IoSlice::new(one), IoSlice::new(&[]), IoSlice::new(other)], position)
            }
            (Plain(file), 0) => block_on(file.write_at_async(bytes, position)),
            (Plain(file), 1) => file.write_at_with(bytes, position, WriteOptions::new().uncached(true)),
            (Plain(file), 2) => {
                let mut batch = [BatchWrite::new(bytes, position)];
                file.write_batch(&mut batch);
                let [write] = batch;
                write.into_result()
            }
            (Plain(file), _) => file.write_at(bytes, position),
            (Memory(file), 0) if position + bytes.len() as u64 <= file.len() => {
                let mut rest = bytes;
                let range = position..position + bytes.len() as u64;
                let came = file.populate_with(range, |slice| {
                    let put = slice.put(rest);
                    rest = &rest[put..];
                    Ok(())
                });
                came.map(|bytes| bytes as usize)
            }
            (Memory(file), _) => file.write_at(bytes, position),
        }
    }

    fn punch(&self, range: &Range<u64>) -> Result<(), Error> {
        let len = range.end - range.start;
        match self {
            Plain(file) => file.punch_hole(range.start, len),
            Memory(file) => file.punch_hole(range.start, len),
        }
    }

    fn append(&self, bytes: &[u8]) -> Result<u64, Error> {
        match self {
            Plain(file) => file.append(bytes),
            Memory(file) => file.append(bytes),
        }
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        match self {
            Plain(file) => file.set_len(bytes),
            Memory(file) => file.set_len(bytes),
        }
    }

    /// One way of reading: there are [`WAYS`].
    fn read(&self, way: u64, buffer: &mut [u8], position: u64) -> Result<usize, Error> {
        // A page is of one moment in one buffer, so none lies in two.
        let middle = (PAGE as usize - (position % PAGE) as usize).min(buffer.len());
        let options = ReadOptions::new();
        match (self, way) {
            (Plain(file), 0) => block_on(file.read_at_async(buffer, position)),
            (Plain(file), 1) => file.read_at_with(buffer, position, options.uncached(true)),
            (Plain(file), NOWAIT) => file.read_at_with(buffer, position, options.nowait(true)),
            (Plain(file), CACHED_ONLY) => file.read_at_with(buffer, position, options.cached_only(true)),
            (Plain(file), 4) => {
                let mut batch = [BatchRead::new(buffer, position)];
                file.read_batch(&mut batch);
                let [read] = batch;
                read.into_result()
            }
            (Plain(file), 5) => {
                let (one, other) = buffer.split_at_mut(middle);
                file.read_vectored_at(&mut [IoSliceMut::new(one), IoSliceMut::new(other)], position)
            }
            (Memory(file), 5) => {
                let (one, other) = buffer.split_at_mut(middle);
                file.read_vectored_at(&mut [IoSliceMut::new(one), IoSliceMut::new(other)], position)
            }
            (Plain(file), _) => file.read_at(buffer, position),
            (Memory(file), _) => file.read_at(buffer, position),
        }
    }

    fn pin(&self, position: u64, len: usize) -> Result<Pinned, Error> {
        match self {
            Plain(file) => file.pin(position, len),
            Memory(file) => file.pin(position, len),
        }
    }

    /// An operation that changes no byte.
    fn touch(&self, dice: &mut Dice, range: &Range<u64>) -> Result<(), Error> {
        let (start, len) = (range.start, range.end - range.start);
        match (self, dice.below(14)) {
            (Plain(file), 5) => file.residency(start, len).map(drop),
            (Plain(file), 6) => {
                file.advise([Hint::Normal, Hint::Random, Hint::Sequential][dice.below(3) as usize])
            }
            (Plain(file), 7) => file.set_folio_orders(0, dice.below(10) as u8),
            (Plain(file), 8) => file.sync_all(),
            (Plain(file), 9) => block_on(file.sync_data_async()),
            (Plain(file), 0) => file.sync_data(),
            (Plain(file), 1) => file.sync_range(start, len),
            (Plain(file), 2) => file.write_back(),
            (Plain(file), 3) => file.will_need(start, len).map(drop),
            (Plain(file), 4) => file.revalidate().map(drop),
            (Plain(file), _) => file.dont_need(start, len).map(drop),
            (Memory(file), 0 | 1) => file.preallocate(start, len),
            (Memory(file), 2) => file.pin_folios(range.clone(), 4).map(drop),
            (Memory(file), 3) => file.stats().map(drop),
            (Memory(file), 4) => file.seek_hole(start).map(drop),
            (Memory(file), _) => file.seek_data(start).map(drop),
        }
    }
}

struct Storm<'a> {
    subject: Subject,
    truth: &'a Truth,
    /// Whether the spill file or the memory may be full.
    may_fail: bool,
}

struct Actor<'a> {
    storm: &'a Storm<'a>,
    subject: Subject,
    zone: u64,
    version: u32,
    /// The file's length, in the last zone, if no call that changes it has failed.
    len: Option<u64>,
    dice: Dice,
    pins: Vec<(u64, Pinned, Vec<u8>)>,
    buffer: Vec<u8>,
}

impl Actor<'_> {
    fn run(&mut self, is_over: &AtomicBool) -> Result<u64, String> {
        let mut operations = 0;
        while !is_over.load(Ordering::Relaxed) {
            self.operation()?;
            operations += 1;
        }
        self.pins.drain(..).try_for_each(compare_pinned)?;
        Ok(operations)
    }

    fn operation(&mut self) -> Result<(), String> {
        match self.dice.below(20) {
            0..6 => self.change(false),
            6 => self.change(true),
            7 if self.zone == ZONES - 1 && self.dice.below(3) == 0 => self.append(),
            7 if self.zone == ZONES - 1 => self.cut(),
            8 => self.pin(),
            9 => {
                let range = self.run_of(self.zone);
                let touched = self.subject.touch(&mut self.dice, &range);
                self.allow(touched).map(drop)
            }
            10..13 => self.read(self.zone),
            _ => {
                let zone = self.dice.below(ZONES);
                self.read(zone)
            }
        }
    }

    fn run_of(&mut self, zone: u64) -> Range<u64> {
        let most = if self.dice.below(40) == 0 { LARGE_RUN_CELLS } else { RUN_CELLS };
        let count = 1 + self.dice.below(most);
        // Most at a hot spot, for threads to meet.
        let within = if self.dice.below(3) == 0 { ZONE_CELLS - count } else { 600 };
        let first = zone * ZONE_CELLS + self.dice.below(within);
        first * CELL..(first + count) * CELL
    }

    /// What a call returned, if that is allowed: `None` for an error.
    fn allow<T>(&self, result: Result<T, Error>) -> Result<Option<T>, String> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::NoMemory | ErrorKind::Busy | ErrorKind::InvalidInput => {
                    Ok(None)
                }
                _ if self.storm.may_fail => Ok(None),
                kind => Err(format!("{kind:?}: {error}")),
            },
        }
    }

    fn change(&mut self, zeros: bool) -> Result<(), String> {
        let range = self.run_of(self.zone);
        self.version += 1;
        let (truth, version) = (self.storm.truth, self.version);
        truth.begin(&range, version, zeros);
        let done = if zeros {
            let punched = self.subject.punch(&range);
            self.allow(punched)?.map(|()| range.end)
        } else {
            let bytes = filled(range.clone(), version);
            let written = self.subject.write(&mut self.dice, &bytes, range.start);
            self.allow(written)?.map(|bytes| range.start + bytes as u64)
        };
        if let Some(end) = done {
            truth.end(&(range.start..end / CELL * CELL), version);
        }
        if !zeros {
            let is_whole = done == Some(range.end);
            self.len = self.len.filter(|_| is_whole).map(|len| len.max(range.end));
        }
        Ok(())
    }

    /// Cuts the file in the last zone, or extends it there.
    fn cut(&mut self) -> Result<(), String> {
        let cell = (ZONES - 1) * ZONE_CELLS + self.dice.below(ZONE_CELLS);
        let range = cell * CELL..ZONES * ZONE_CELLS * CELL;
        self.version += 1;
        self.storm.truth.begin(&range, self.version, true);
        let cut = self.subject.set_len(range.start);
        let is_cut = self.allow(cut)?.is_some();
        if is_cut {
            self.storm.truth.end(&range, self.version);
        }
        self.len = is_cut.then_some(range.start);
        Ok(())
    }

    /// Appends to the file, whose end this thread knows, and no other moves.
    fn append(&mut self) -> Result<(), String> {
        let count = 1 + self.dice.below(RUN_CELLS);
        let end = |len: u64| len + count * CELL;
        let Some(len) = self.len.filter(|len| len % CELL == 0 && end(*len) <= ZONES * ZONE_CELLS * CELL)
        else {
            return Ok(());
        };
        let range = len..end(len);
        self.version += 1;
        self.storm.truth.begin(&range, self.version, false);
        let appended = self.subject.append(&filled(range.clone(), self.version));
        self.len = match self.allow(appended)? {
            Some(at) if at == len => Some(range.end),
            Some(at) => return Err(format!("bytes for {len} were appended at {at}")),
            None => None,
        };
        if self.len.is_some() {
            self.storm.truth.end(&range, self.version);
        }
        Ok(())
    }

    fn read(&mut self, zone: u64) -> Result<(), String> {
        let mut range = self.run_of(zone);
        range.start += self.dice.below(CELL / WORD as u64) * WORD as u64;
        let ended = self.storm.truth.ended(&range);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.resize((range.end - range.start) as usize, 0xee);
        let way = self.dice.below(WAYS);
        let read = self.subject.read(way, &mut buffer, range.start);
        // The bytes of a memory file are had without memory.
        let allowed = match (&self.subject, read) {
            (Memory(_), Err(error)) => Err(format!("{:?}: {error}", error.kind())),
            (_, read) => self.allow(read),
        };
        let checked = allowed.and_then(|bytes| match bytes {
            Some(bytes) => {
                // Where the device fails, a read ends before the page that did not come.
                let may_fail = self.storm.may_fail || way == NOWAIT || way == CACHED_ONLY;
                let may_be_short = matches!(self.subject, Plain(_)) && may_fail;
                self.check_len(&range, bytes as u64, may_be_short)?;
                self.storm.truth.verify(&buffer[..bytes], range.start, &ended)
            }
            None => Ok(()),
        });
        self.buffer = buffer;
        checked.map_err(|why| format!("{range:?} read by way {way}: {why}"))
    }

    fn check_len(&self, range: &Range<u64>, bytes: u64, may_be_short: bool) -> Result<(), String> {
        let before = |len: u64| range.end.min(len).saturating_sub(range.start);
        let len = self.len.filter(|_| self.zone == ZONES - 1);
        let (least, most) = (before(len.unwrap_or(LEAST_LEN)), before(len.unwrap_or(u64::MAX)));
        let is_right = (least..=most).contains(&bytes) || bytes < least && may_be_short;
        if is_right { Ok(()) } else { Err(format!("{bytes} bytes came, and there are {least} to {most}")) }
    }

    fn pin(&mut self) -> Result<(), String> {
        if self.pins.len() == PINS {
            let nth = self.dice.below(PINS as u64) as usize;
            compare_pinned(self.pins.swap_remove(nth))?;
        }
        let zone = self.dice.below(ZONES);
        let range = self.run_of(zone);
        let ended = self.storm.truth.ended(&range);
        let pinned = self.subject.pin(range.start, (range.end - range.start) as usize);
        let Some(pinned) = self.allow(pinned)? else { return Ok(()) };
        let bytes = pinned.to_vec();
        self.storm.truth.verify(&bytes, range.start, &ended).map_err(|why| format!("pinned: {why}"))?;
        self.pins.push((range.start, pinned, bytes));
        Ok(())
    }
}

fn compare_pinned((position, pinned, bytes): (u64, Pinned, Vec<u8>)) -> Result<(), String> {
    let now = pinned.to_vec();
    let differs = now.iter().zip(&bytes).position(|(now, before)| now != before);
    differs.map_or(Ok(()), |at| Err(format!("byte {at} of those pinned at byte {position} has changed")))
}

/// How a storm is set up.
struct Setting {
    seed: u64,
    order_max: u8,
    spill: Option<SpillOptions>,
    may_fail: bool,
}

fn seconds() -> u64 {
    if std::env::var_os("QUINION_SOAK").is_some() { 30 } else { 2 }
}

fn seed(usual: u64) -> u64 {
    std::env::var("QUINION_CHAOS_SEED")
        .map_or(usual, |seed| seed.parse().expect("QUINION_CHAOS_SEED: a number"))
}

fn resize(cache: &Cache, mut dice: Dice, is_over: &AtomicBool) -> Result<u64, String> {
    let mut resizes = 0;
    while !is_over.load(Ordering::Relaxed) {
        let bytes = MEMORY + dice.below(MEMORY / PAGE) * PAGE;
        cache.resize(bytes).map_err(|error| error.to_string())?;
        if resizes % 8 == 0 {
            let _short = cache.populate(bytes);
        }
        resizes += 1;
        thread::sleep(Duration::from_millis(dice.below(20)));
    }
    Ok(resizes)
}

fn blow(cache: &Cache, storm: &Storm<'_>, seed: u64) {
    let is_over = AtomicBool::new(false);
    let fallen = |outcome: Result<u64, String>, whose: &str| match outcome {
        Ok(count) => println!("{whose}: {count} operations"),
        Err(why) => {
            is_over.store(true, Ordering::Relaxed);
            panic!("QUINION_CHAOS_SEED={seed}: {whose}: {why}");
        }
    };
    thread::scope(|scope| {
        for zone in 0..ZONES {
            let (is_over, fallen) = (&is_over, &fallen);
            let dice = Dice::new(seed << 8 | zone);
            let mut actor = Actor {
                storm,
                subject: storm.subject.clone(),
                zone,
                version: 0,
                len: Some(LEAST_LEN),
                dice,
                pins: Vec::new(),
                buffer: Vec::new(),
            };
            scope.spawn(move || fallen(actor.run(is_over), &format!("the thread of zone {zone}")));
        }
        let (is_over, fallen) = (&is_over, &fallen);
        scope.spawn(move || {
            fallen(resize(cache, Dice::new(seed << 8 | ZONES), is_over), "the thread that resizes");
        });
        let end = Instant::now() + Duration::from_secs(seconds());
        while Instant::now() < end && !is_over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    cache.check().expect("the cache is in order");
}

fn verify_all(storm: &Storm<'_>, seed: u64, read: impl Fn(&mut [u8], u64) -> usize) {
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    loop {
        let bytes = read(&mut buffer, at);
        let ended = storm.truth.ended(&(at..at + bytes as u64));
        let verified = storm.truth.verify(&buffer[..bytes], at, &ended);
        verified.unwrap_or_else(|why| panic!("QUINION_CHAOS_SEED={seed}: at the end: {why}"));
        at += bytes as u64;
        if bytes == 0 {
            return assert!(at >= LEAST_LEN, "the file is too short");
        }
    }
}

fn storm_of_file(setting: &Setting) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = folder.path().join("file");
    let builder = Cache::builder().memory(MEMORY).memory_max(2 * MEMORY).folio_order_max(setting.order_max);
    let cache = builder.build().expect("a cache");
    let file = cache.open_with(&path, OpenOptions::new().write(true).create(true)).expect("a file");
    file.set_len(LEAST_LEN).expect("it is made longer");
    let truth = Truth::new();
    let storm = Storm { subject: Plain(Box::new(file.clone())), truth: &truth, may_fail: setting.may_fail };
    blow(&cache, &storm, setting.seed);
    verify_all(&storm, setting.seed, |buffer, at| file.read_at(buffer, at).expect("it is read"));
    file.sync_all().expect("it is written");
    let kernel = fs::File::open(&path).expect("it is there");
    verify_all(&storm, setting.seed, |buffer, at| kernel.read_at(buffer, at).expect("it is read"));
}

/// A device on which reads and writes fail, end early, are dropped, and come late, in any order; its content is known.
fn storm_of_device(seed: u64, order_max: u8, faults: Faults) {
    let content = Arc::new(MemoryFile::new(Vec::new()));
    let writes = WriteFaults { errors: 10, full: 10, drops: 10, sync_errors: 10 };
    let device = SimulatedBackend::of_memory(Arc::clone(&content), Faults { seed, ..faults });
    let device = Arc::new(device.with_write_faults(writes));
    let builder = Cache::builder().memory(MEMORY).memory_max(2 * MEMORY).folio_order_max(order_max);
    let cache = builder.build().expect("a cache");
    let write = OpenOptions::new().write(true).to_owned();
    let file = cache.open_backend_with(Arc::clone(&device) as _, &write).expect("a file");
    file.set_len(LEAST_LEN).expect("it is made longer");
    let truth = Truth::new();
    let storm = Storm { subject: Plain(Box::new(file.clone())), truth: &truth, may_fail: true };
    blow(&cache, &storm, seed);
    let read = |buffer: &mut [u8], at| loop {
        if let Ok(bytes) = file.read_at(buffer, at) {
            return bytes;
        }
    };
    verify_all(&storm, seed, read);
    while file.sync_all().is_err() {}
    content.change(|bytes| {
        verify_all(&storm, seed, |buffer, at| {
            let rest = &bytes[bytes.len().min(at as usize)..];
            let len = rest.len().min(buffer.len());
            buffer[..len].copy_from_slice(&rest[..len]);
            len
        });
    });
}

fn storm_of_memory(setting: Setting) {
    let mut builder =
        Cache::builder().memory(MEMORY).memory_max(2 * MEMORY).folio_order_max(setting.order_max);
    if let Some(spill) = setting.spill {
        builder = builder.spill(spill);
    }
    let cache = builder.build().expect("a cache");
    let file = cache.mem_file(MemFileOptions::new().size(LEAST_LEN)).expect("a memory file");
    let truth = Truth::new();
    let storm = Storm { subject: Memory(Box::new(file.clone())), truth: &truth, may_fail: setting.may_fail };
    blow(&cache, &storm, setting.seed);
    verify_all(&storm, setting.seed, |buffer, at| file.read_at(buffer, at).expect("it is read"));
    println!("{:?}", cache.spill_stats());
}

/// A spill file for all bytes of the file.
fn wide() -> SpillOptions {
    SpillOptions::new(env!("CARGO_TARGET_TMPDIR"), 128 << 20)
}

#[test]
fn file_of_large_folios_keeps_each_byte() {
    storm_of_file(&Setting { seed: seed(71), order_max: 9, spill: None, may_fail: false });
}

#[test]
fn file_of_pages_keeps_each_byte() {
    storm_of_file(&Setting { seed: seed(72), order_max: 0, spill: None, may_fail: false });
}

#[test]
fn file_of_a_device_with_faults_keeps_each_byte() {
    let faults = Faults { errors: 10, drops: 10, ..Faults::default() };
    storm_of_device(seed(77), 9, faults);
}

#[test]
fn file_of_a_late_device_with_faults_keeps_each_byte() {
    let faults = Faults {
        errors: 5,
        drops: 5,
        delay_max: 6,
        sequence: CompletionOrder::Shuffled,
        ..Faults::default()
    };
    storm_of_device(seed(78), 3, faults);
}

#[test]
fn memory_file_that_spills_keeps_each_byte() {
    storm_of_memory(Setting { seed: seed(73), order_max: 9, spill: Some(wide()), may_fail: false });
}

#[test]
fn memory_file_that_spills_packed_keeps_each_byte() {
    storm_of_memory(Setting {
        seed: seed(74),
        order_max: 4,
        spill: Some(wide().compress(true)),
        may_fail: false,
    });
}

#[test]
fn memory_file_with_a_full_spill_file_keeps_each_byte() {
    let spill = SpillOptions::new(env!("CARGO_TARGET_TMPDIR"), 8 << 20);
    storm_of_memory(Setting { seed: seed(75), order_max: 9, spill: Some(spill), may_fail: true });
}

#[test]
fn memory_file_with_a_full_packed_spill_file_keeps_each_byte() {
    let spill = SpillOptions::new(env!("CARGO_TARGET_TMPDIR"), 2 << 20).compress(true);
    storm_of_memory(Setting { seed: seed(76), order_max: 4, spill: Some(spill), may_fail: true });
}
