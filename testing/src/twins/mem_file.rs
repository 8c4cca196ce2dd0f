//! A memory file and its twin, a memfd, side by side: each operation on both must give the same.
//!
//! ```text
//!   Op --> MemPair.step --> the cache's memory file, by two handles ---> what was read, how long it is, where data is
//!                       \--> its twin, the kernel's (tmpfs)         ---> the same, or the complaint
//!
//!   after a change    what is pinned is what it was when it was pinned
//!   now and then      each page of the file is in one state, and the numbers of them say so
//!   at the end        all bytes of both files are the same; and when the file is gone, so is its memory
//! ```
//!
//! The cache's file lives in one of three caches. One is wide. One is so tight that writes fail: then bytes that were
//! not written to it are not written to the twin either, and an error must have changed nothing. The third is as tight,
//! with a spill file that is large enough for all of it. How tmpfs behaves without memory is not tested here.
//!
//! Where data is: both say so, of pages that were written to. With folios of a page both must say the same. With larger
//! ones data may be where the twin has a hole, but what is called a hole is zeros in both.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use quinion::{Cache, ErrorKind, MemFile, MemFileOptions, Pinned, SpillOptions};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};

use super::cache::{CheckResult, checked, compare, content, kernel_read};
use crate::content::Dice;

const PAGE: u64 = 4096;
/// The least memory a cache can have, and one in which everything fits.
const MEMORY_TIGHT: u64 = Cache::MEMORY_MIN;
const MEMORY_WIDE: u64 = 40 << 20;
/// No file becomes longer: somewhat more than the least memory holds.
pub const FILE_MAX: u64 = 20 << 20;
const HANDLES: usize = 2;
/// Pins that are kept at most; the oldest goes.
const PINS_MAX: usize = 4;
/// The longest that is compared at a time.
const PIECE: usize = 1 << 20;
/// The byte that fills a buffer before it is read into.
const POISON: u8 = 0xa5;

/// Where an operation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    Byte(u64),
    /// Bytes past the file's end, or before it if negative.
    End(i64),
}

/// In how many pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    Plain,
    /// Three buffers in one call.
    Vectored,
}

/// An operation on a file. Positions need not lie in it, nor below [`FILE_MAX`]: each is made to fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Read {
        by: u8,
        at: At,
        len: u32,
        how: How,
    },
    Pin {
        by: u8,
        at: At,
        len: u32,
    },
    Unpin {
        nth: u8,
    },
    Write {
        by: u8,
        at: At,
        len: u32,
        how: How,
    },
    Append {
        by: u8,
        len: u32,
    },
    SetLen {
        by: u8,
        to: At,
    },
    Punch {
        by: u8,
        at: At,
        len: u32,
    },
    /// Memory is given to a range, as far as it lies in the file.
    Preallocate {
        by: u8,
        at: At,
        len: u32,
    },
    /// A range is filled, as far as it lies in the file, by a source that gives so many bytes at a time.
    Populate {
        by: u8,
        at: At,
        len: u32,
        step: u16,
    },
    /// Where data begins from here on, and where it ends.
    Seek {
        by: u8,
        at: At,
    },
    /// The handle is dropped, and cloned from the other.
    Reclone {
        by: u8,
    },
    /// The file is dropped, and another one begins.
    Reborn,
    Check,
}

/// How much there is for a pair's file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Capacity {
    /// More than it takes.
    Wide,
    /// Less, and what does not fit is refused.
    Tight,
    /// Less, and what does not fit goes to a file.
    Spilling,
}

/// Where a pair lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    pub capacity: Capacity,
    /// The largest folio, as log2 of pages.
    pub order_max: u8,
    /// Where the spill file is, if the room is [`Capacity::Spilling`].
    pub spill_folder: &'static str,
}

/// The cache's file and its twin.
pub struct MemPair {
    setting: Setting,
    // Before the files, and these before the cache: in this order they are dropped.
    pins: Vec<(Pinned, Vec<u8>)>,
    files: Vec<MemFile>,
    cache: Cache,
    twin: fs::File,
    size: u64,
    generation: u32,
    /// Operations that found no memory.
    pub refused: u64,
}

fn twin() -> Result<fs::File, String> {
    checked("making a memfd", memfd_create("quinion-twin", MemfdFlags::CLOEXEC)).map(fs::File::from)
}

/// The outcome of an operation that may find no memory: `None` then.
fn refusable<T>(what: &str, result: quinion::error::Result<T>) -> Result<Option<T>, String> {
    match result {
        Err(error) if error.kind() == ErrorKind::NoMemory => Ok(None),
        result => checked(what, result).map(Some),
    }
}

/// How long memory may stay with a thread of the cache on a busy machine.
const HELD_MAX: Duration = Duration::from_secs(60);

impl MemPair {
    /// Two empty files.
    pub fn new(setting: &Setting) -> Result<Self, String> {
        let memory = if setting.capacity == Capacity::Wide { MEMORY_WIDE } else { MEMORY_TIGHT };
        let builder = Cache::builder().memory(memory).folio_order_max(setting.order_max);
        let builder = match setting.capacity {
            Capacity::Spilling => builder.spill(SpillOptions::new(setting.spill_folder, 4 * FILE_MAX)),
            Capacity::Wide | Capacity::Tight => builder,
        };
        let (cache, twin) = (checked("building a cache", builder.build())?, twin()?);
        let mut pair = Self {
            setting: setting.clone(),
            pins: Vec::new(),
            files: Vec::new(),
            cache,
            twin,
            size: 0,
            generation: 0,
            refused: 0,
        };
        pair.begin()?;
        Ok(pair)
    }

    fn begin(&mut self) -> CheckResult {
        let file = checked("making a memory file", self.cache.mem_file(MemFileOptions::new().name("ours")))?;
        self.files = vec![file.clone(), file];
        self.twin = twin()?;
        self.size = 0;
        Ok(())
    }

    fn file(&self, by: u8) -> &MemFile {
        &self.files[usize::from(by) % HANDLES]
    }

    fn position(&self, at: At) -> u64 {
        match at {
            At::Byte(byte) => byte % FILE_MAX,
            At::End(offset) => self.size.saturating_add_signed(offset) % FILE_MAX,
        }
    }

    fn range(&self, at: At, len: u32) -> Range<u64> {
        let start = self.position(at);
        start..(start + u64::from(len)).min(FILE_MAX)
    }

    fn next_content(&mut self, position: u64, len: usize) -> Vec<u8> {
        self.generation += 1;
        content(self.generation, position, len)
    }

    /// Does an operation to both files, and compares them.
    pub fn step(&mut self, op: &Op) -> CheckResult {
        match *op {
            Op::Read { by, at, len, how } => self.read(by, self.range(at, len), how)?,
            Op::Pin { by, at, len } => self.pin(by, at, len)?,
            Op::Unpin { nth } => self.unpin(nth)?,
            Op::Write { by, at, len, how } => self.write(by, self.range(at, len), how)?,
            Op::Append { by, len } => self.append(by, len)?,
            Op::SetLen { by, to } => self.set_len(by, to)?,
            Op::Punch { by, at, len } => self.punch(by, at, len)?,
            Op::Preallocate { by, at, len } => self.preallocate(by, at, len)?,
            Op::Populate { by, at, len, step } => self.populate(by, self.inside(at, len), step)?,
            Op::Seek { by, at } => self.seek(by, self.position(at))?,
            Op::Reclone { by } => {
                let other = self.file(by ^ 1).clone();
                self.files[usize::from(by) % HANDLES] = other;
            }
            Op::Reborn => self.reborn()?,
            Op::Check => self.check()?,
        }
        let lens: Vec<u64> = self.files.iter().map(MemFile::len).collect();
        if lens.iter().any(|&len| len != self.size) {
            return Err(format!("the file is {lens:?} bytes long, by each handle, instead of {}", self.size));
        }
        Ok(())
    }

    /// Changes a byte of the twin alone: for a test of the tests.
    pub fn spoil(&self, byte: u64) {
        self.twin.write_all_at(&[POISON], byte).expect("it is as long");
    }

    fn read(&self, by: u8, range: Range<u64>, how: How) -> CheckResult {
        let should = kernel_read(&self.twin, range.start, (range.end - range.start) as usize)?;
        let mut is = vec![POISON; (range.end - range.start) as usize];
        let done = match how {
            How::Plain => checked("a read", self.file(by).read_at(&mut is, range.start))?,
            How::Vectored => {
                let (first, rest) = is.split_at_mut((range.end - range.start) as usize / 3);
                let (second, third) = rest.split_at_mut(rest.len() / 5);
                let mut pieces = [first, second, third].map(IoSliceMut::new);
                checked("a vectored read", self.file(by).read_vectored_at(&mut pieces, range.start))?
            }
        };
        if is[done..].iter().any(|&byte| byte != POISON) {
            return Err(format!("a read of {range:?} gave {done} bytes and wrote behind them"));
        }
        compare("a read", range.start, &is[..done], &should)
    }

    fn pin(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        let range = self.range(at, len);
        let should = kernel_read(&self.twin, range.start, (range.end - range.start) as usize)?;
        let pinned = self.file(by).pin(range.start, (range.end - range.start) as usize);
        let Some(pinned) = refusable("a pin", pinned)? else {
            self.refused += 1;
            return Ok(());
        };
        let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
        compare("a pin", range.start, &bytes, &should)?;
        if self.pins.len() == PINS_MAX {
            self.unpin(0)?;
        }
        self.pins.push((pinned, bytes));
        Ok(())
    }

    fn unpin(&mut self, nth: u8) -> CheckResult {
        self.check_pins()?;
        if !self.pins.is_empty() {
            self.pins.remove(usize::from(nth) % self.pins.len());
        }
        Ok(())
    }

    fn check_pins(&self) -> CheckResult {
        let is_same = |(pinned, bytes): &(Pinned, Vec<u8>)| pinned.chunks().flatten().eq(bytes.iter());
        if self.pins.iter().all(is_same) { Ok(()) } else { Err("what is pinned has changed".to_owned()) }
    }

    fn write(&mut self, by: u8, range: Range<u64>, how: How) -> CheckResult {
        let bytes = self.next_content(range.start, (range.end - range.start) as usize);
        let mut done = 0;
        loop {
            let (rest, at) = (&bytes[done..], range.start + done as u64);
            let written = match how {
                How::Plain => self.file(by).write_at(rest, at),
                How::Vectored => {
                    let (first, tail) = rest.split_at(rest.len() / 3);
                    let (second, third) = tail.split_at(tail.len() / 5);
                    self.file(by).write_vectored_at(&[first, second, third].map(IoSlice::new), at)
                }
            };
            match refusable("a write", written)? {
                None => break self.refused += 1,
                Some(0) if !rest.is_empty() => {
                    return Err(format!("a write took 0 of {} bytes and no error", rest.len()));
                }
                Some(more) => done += more,
            }
            if done == bytes.len() {
                break;
            }
        }
        self.wrote(range.start, &bytes[..done])
    }

    fn wrote(&mut self, position: u64, bytes: &[u8]) -> CheckResult {
        if !bytes.is_empty() {
            checked("a write to the twin", self.twin.write_all_at(bytes, position))?;
            self.size = self.size.max(position + bytes.len() as u64);
        }
        self.check_pins()
    }

    fn append(&mut self, by: u8, len: u32) -> CheckResult {
        let len = u64::from(len).min(FILE_MAX - self.size) as usize;
        let (end, bytes) = (self.size, self.next_content(self.size, len));
        match refusable("an append", self.file(by).append(&bytes))? {
            Some(at) if at != end => Err(format!("an append stands at {at} instead of {end}")),
            Some(_) => self.wrote(end, &bytes),
            None => {
                // Some of the bytes may be written.
                self.refused += 1;
                let grown = self.file(by).len().saturating_sub(end).min(bytes.len() as u64);
                self.wrote(end, &bytes[..grown as usize])
            }
        }
    }

    fn set_len(&mut self, by: u8, to: At) -> CheckResult {
        let to = self.position(to);
        if refusable("set_len", self.file(by).set_len(to))?.is_none() {
            self.refused += 1;
            return self.check_pins();
        }
        checked("set_len of the twin", self.twin.set_len(to))?;
        self.size = to;
        self.check_pins()
    }

    fn punch(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        let range = self.range(at, len);
        let len = range.end - range.start;
        if refusable("a punch", self.file(by).punch_hole(range.start, len))?.is_none() {
            // Some of the range may be zeros.
            self.refused += 1;
            return self.adopt_zeros(range);
        }
        if len > 0 {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // If the last page is punched up to the file's end, the cache keeps nothing of it; the kernel, only if
            // checked so.
            let is_to_the_end = (range.start..=range.end).contains(&self.size);
            let end = if is_to_the_end { range.end.next_multiple_of(PAGE) } else { range.end };
            checked(
                "a punch of the twin",
                fallocate(self.twin.as_fd(), flags, range.start, end - range.start),
            )?;
        }
        self.check_pins()
    }

    /// Each byte of the range is what it was, or 0, and becomes that in the twin.
    fn adopt_zeros(&mut self, range: Range<u64>) -> CheckResult {
        let should = kernel_read(&self.twin, range.start, (range.end - range.start) as usize)?;
        let mut is = vec![POISON; should.len()];
        checked("a read", self.file(0).read_exact_at(&mut is, range.start))?;
        let wrong = is.iter().zip(&should).position(|(is, should)| is != should && *is != 0);
        if let Some(wrong) = wrong {
            return Err(format!("a punch that failed changed byte {}", range.start + wrong as u64));
        }
        checked("a write to the twin", self.twin.write_all_at(&is, range.start))
    }

    fn inside(&self, at: At, len: u32) -> Range<u64> {
        let range = self.range(at, len);
        let start = range.start.min(self.size);
        start..range.end.clamp(start, self.size)
    }

    fn preallocate(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        let range = self.inside(at, len);
        let given = self.file(by).preallocate(range.start, range.end - range.start);
        if refusable("preallocate", given)?.is_none() {
            self.refused += 1;
        } else if !range.is_empty() {
            let given =
                fallocate(self.twin.as_fd(), FallocateFlags::KEEP_SIZE, range.start, range.end - range.start);
            checked("a preallocation of the twin", given)?;
        }
        self.check_pins()
    }

    fn populate(&mut self, by: u8, range: Range<u64>, step: u16) -> CheckResult {
        let bytes = self.next_content(range.start, (range.end - range.start) as usize);
        let step = usize::from(step).max(1);
        let came = self.file(by).populate_with(range.clone(), |slice| {
            while slice.left() > 0 {
                let at = (slice.position() - range.start) as usize;
                slice.put(&bytes[at..bytes.len().min(at + step)]);
            }
            Ok(())
        });
        match refusable("populate", came)? {
            None => {
                self.refused += 1;
                self.check_pins()
            }
            Some(came) => {
                self.refused += u64::from(came < bytes.len() as u64);
                self.wrote(range.start, &bytes[..came as usize])
            }
        }
    }

    fn seek(&self, by: u8, position: u64) -> CheckResult {
        let file = self.file(by);
        let data = checked("seek_data", file.seek_data(position))?;
        let hole = checked("seek_hole", file.seek_hole(position))?;
        // Bounds that both have, whatever folios the cache's file has.
        let is_inside = position < self.size;
        if hole.is_some() != is_inside || (!is_inside && data.is_some()) {
            return Err(format!(
                "from byte {position} of {}: data at {data:?}, a hole at {hole:?}",
                self.size
            ));
        }
        if !is_inside {
            return Ok(());
        }
        let hole = hole.expect("it was just looked at");
        if data.is_some_and(|data| !(position..self.size).contains(&data))
            || !(position..=self.size).contains(&hole)
            || (data == Some(position)) == (hole == position)
        {
            return Err(format!("from byte {position} of {}: data at {data:?}, a hole at {hole}", self.size));
        }
        self.expect_zeros(position..data.unwrap_or(self.size))?;
        if hole < self.size {
            self.expect_zeros(hole..(hole / PAGE * PAGE + PAGE).min(self.size))?;
        }
        if self.setting.order_max == 0 { self.compare_seeks(position, data, hole) } else { Ok(()) }
    }

    fn expect_zeros(&self, range: Range<u64>) -> CheckResult {
        for at in range.clone().step_by(PIECE) {
            let bytes = kernel_read(&self.twin, at, (range.end - at).min(PIECE as u64) as usize)?;
            if let Some(byte) = bytes.iter().position(|&byte| byte != 0) {
                return Err(format!("byte {} is called a hole, and is none", at + byte as u64));
            }
        }
        Ok(())
    }

    /// With folios of a page the cache knows as well as the twin which pages were written to.
    fn compare_seeks(&self, position: u64, data: Option<u64>, hole: u64) -> CheckResult {
        let twins = |to: SeekFrom| match seek(self.twin.as_fd(), to) {
            Err(rustix::io::Errno::NXIO) => Ok(None),
            found => checked("a seek of the twin", found).map(Some),
        };
        let should = (twins(SeekFrom::Data(position))?, twins(SeekFrom::Hole(position))?);
        if (data, Some(hole)) == should {
            return Ok(());
        }
        Err(format!("from byte {position}: data at {data:?}, a hole at {hole}; the twin says {should:?}"))
    }

    fn check(&self) -> CheckResult {
        self.check_pins()?;
        let stats = checked("stats", self.file(0).stats())?;
        let pages = stats.data_pages + stats.allocated_pages + stats.spilled_pages + stats.hole_pages;
        if pages != self.size.div_ceil(PAGE) {
            return Err(format!("{stats:?} are not the pages of {} bytes", self.size));
        }
        self.cache.check()
    }

    /// Compares all of the file and drops it, and with it its memory.
    fn reborn(&mut self) -> CheckResult {
        self.end()?;
        self.begin()
    }

    /// Compares all bytes and drops everything.
    pub fn end(&mut self) -> CheckResult {
        self.check()?;
        for at in (0..self.size).step_by(PIECE) {
            let should = kernel_read(&self.twin, at, PIECE)?;
            let mut is = vec![POISON; should.len()];
            checked("a read", self.file(0).read_exact_at(&mut is, at))?;
            compare("at the end, a read", at, &is, &should)?;
        }
        self.pins.clear();
        self.files.clear();
        self.cache.check()?;
        // Folios that are being written to the spill file keep their memory until the background thread has ended their
        // requests.
        let held = || {
            let stats = self.cache.stats();
            stats.data_bytes - stats.free_bytes
        };
        let begun = Instant::now();
        while held() > 0 && begun.elapsed() < HELD_MAX {
            std::thread::sleep(Duration::from_millis(1));
        }
        match held() {
            0 => Ok(()),
            bytes => Err(format!("{bytes} bytes of memory stay behind when the file is gone")),
        }
    }
}

/// Does all of it, and counts how often there was no memory; a complaint says at which operation it arose.
pub fn run(setting: &Setting, ops: &[Op]) -> Result<u64, String> {
    let mut pair = MemPair::new(setting)?;
    for (number, op) in ops.iter().enumerate() {
        pair.step(op).map_err(|complaint| format!("operation {number}, {op:?}: {complaint}"))?;
    }
    pair.end().map_err(|complaint| format!("at the end: {complaint}"))?;
    Ok(pair.refused)
}

/// Lengths about the edges of what there are edges of.
const LENS: [u32; 18] = [
    1,
    0,
    3,
    64,
    511,
    513,
    4095,
    4096,
    4097,
    8192,
    12_293,
    65_536,
    70_001,
    262_144,
    400_001,
    2 << 20,
    2_100_001,
    5 << 20,
];
/// Distances from the start of a page, or from the file's end.
const NEAR: [i64; 8] = [0, -1, 1, 17, 512, 2048, 4095, 4097];

fn near(dice: &mut Dice) -> i64 {
    NEAR[dice.below(NEAR.len() as u64) as usize]
}

/// Mostly in a few pages, sometimes about the end or a large folio's edge, sometimes anywhere.
fn at(dice: &mut Dice) -> At {
    let byte_of = |page: u64, near: i64| At::Byte((page * PAGE).saturating_add_signed(near));
    match dice.below(16) {
        0..=7 => byte_of(dice.below(24), near(dice)),
        8..=10 => byte_of(dice.below(FILE_MAX / PAGE), near(dice)),
        11..=13 => At::End(near(dice) - dice.below(4) as i64 * PAGE as i64),
        14 => byte_of(dice.below(9) * 512, near(dice)),
        _ => At::End(dice.below(1 << 20) as i64),
    }
}

/// Mostly short.
fn len(dice: &mut Dice) -> u32 {
    match dice.below(16) {
        0..=11 => LENS[dice.below(12) as usize],
        12 | 13 => dice.below(10_000) as u32,
        _ => LENS[dice.below(LENS.len() as u64) as usize],
    }
}

fn how(dice: &mut Dice) -> How {
    if dice.below(4) == 0 { How::Vectored } else { How::Plain }
}

/// The next operation.
pub fn op(dice: &mut Dice) -> Op {
    let by = dice.below(2) as u8;
    match dice.below(64) {
        0..=15 => Op::Read { by, at: at(dice), len: len(dice), how: how(dice) },
        16..=19 => Op::Pin { by, at: at(dice), len: len(dice) },
        20 | 21 => Op::Unpin { nth: dice.below(8) as u8 },
        22..=39 => Op::Write { by, at: at(dice), len: len(dice), how: how(dice) },
        40..=43 => Op::Append { by, len: len(dice) },
        44..=47 => Op::SetLen { by, to: at(dice) },
        48..=52 => Op::Punch { by, at: at(dice), len: len(dice) },
        53 | 54 => Op::Preallocate { by, at: at(dice), len: len(dice) },
        55 | 56 => Op::Populate { by, at: at(dice), len: len(dice), step: 1 << dice.below(16) },
        57..=59 => Op::Seek { by, at: at(dice) },
        60 => Op::Reclone { by },
        61 if dice.below(8) == 0 => Op::Reborn,
        _ => Op::Check,
    }
}

/// Operations of the same kind of which less can be said.
pub fn simpler(op: Op) -> Vec<Op> {
    let start = |at| match at {
        At::Byte(byte) => At::Byte(byte / PAGE * PAGE),
        at @ At::End(_) => at,
    };
    let page = PAGE as u32;
    match op {
        Op::Write { by, at, len, .. } => {
            let plain = |at, len| Op::Write { by, at, len, how: How::Plain };
            vec![plain(at, len), plain(start(at), page), plain(at, 1)]
        }
        Op::Read { by, at, len, .. } => {
            let plain = |at, len| Op::Read { by, at, len, how: How::Plain };
            vec![plain(at, len), plain(start(at), page)]
        }
        Op::Pin { by, at, .. } => vec![Op::Pin { by, at: start(at), len: page }],
        Op::Punch { by, at, .. } => vec![Op::Punch { by, at: start(at), len: page }],
        Op::Populate { by, at, len, .. } => {
            let whole = |at, len| Op::Populate { by, at, len, step: u16::MAX };
            vec![whole(at, len), whole(start(at), page)]
        }
        Op::Preallocate { by, at, .. } => vec![Op::Preallocate { by, at: start(at), len: page }],
        Op::Append { by, .. } => vec![Op::Append { by, len: 1 }],
        _ => Vec::new(),
    }
}
