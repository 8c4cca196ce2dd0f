//! A file through the cache and its twin through the kernel, side by side: each operation on both must give the same.
//! Shared by the differential test and the fuzz target.
//!
//! ```text
//!   Op --> Pair.step --> the cache's file, by two handles      ---> what was read, how long it is
//!                   \--> its twin, by the kernel               ---> the same, or the complaint
//!
//!   after a sync      what was changed, read by the kernel from the cache's file, is what the twin has
//!   after a change    what is pinned is what it was when it was pinned
//!   at the end        the cache is gone (after a sync, or without one): all bytes of both files are the same
//! ```
//!
//! What is written holds its generation and its place in every 8 bytes, so that a complaint tells which write is there
//! instead. A program outside changes the cache's file by the kernel, as it changes the twin. Before it does, the test
//! syncs (of a page that both have changed, the cache's is the one that counts), and after it the cache checks the file
//! again.
//!
//! The caches are small and the positions of a few kinds: near each other, so that operations meet; about the
//! file's end; and anywhere in somewhat more than the memory, so that changed pages have to leave for others.

use std::fmt;
use std::fs::{self, OpenOptions as KernelOptions};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use quinion::{
    BatchRead, BatchWrite, Cache, Durability, ErrorKind, File, Mechanism, OpenOptions, Pinned, ReadOptions,
    WriteOptions,
};

const PAGE: u64 = 4096;
/// No file becomes longer: some MiB more than the least memory.
pub const FILE_MAX: u64 = 20 << 20;
/// The least and the most memory of a cache, in MiB.
const MEMORY_MIB: [u64; 2] = [16, 24];
const HANDLES: usize = 2;
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    Plain,
    Uncached,
    /// Three in one call.
    Batch,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writing {
    Plain,
    Uncached,
    /// Durable when it returns.
    Durable,
    /// From three buffers.
    Vectored,
    /// Three in one call.
    Batch,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syncing {
    Data,
    All,
    Range {
        at: At,
        len: u32,
    },
    /// Only begun.
    WriteBack,
}

/// An operation on a file. Positions need not lie in it, nor below [`FILE_MAX`]: each is made to fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Read {
        by: u8,
        at: At,
        len: u32,
        how: Reading,
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
        how: Writing,
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
    Sync {
        by: u8,
        how: Syncing,
    },
    DontNeed {
        by: u8,
        at: At,
        len: u32,
    },
    WillNeed {
        by: u8,
        at: At,
        len: u32,
    },
    /// Space is kept, and nothing else changes.
    Allocate {
        by: u8,
        at: At,
        len: u32,
    },
    /// The handle is closed and opened.
    Reopen {
        by: u8,
    },
    /// And the file emptied by that.
    ReopenEmpty {
        by: u8,
    },
    /// A third handle, that only reads, and is gone again.
    ReadOnly {
        at: At,
        len: u32,
    },
    /// The cache gets another bound.
    Resize {
        mib: u8,
    },
    /// Another program writes, and the cache checks the file again.
    ExternalWrite {
        by: u8,
        at: At,
        len: u32,
    },
    /// Another program cuts or extends the file, and the cache checks it again.
    ExternalSetLen {
        by: u8,
        to: At,
    },
    /// The cache ends, without a sync, and another one begins.
    Reborn,
    /// The cache checks itself.
    Check,
}

/// How the cache ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// After a sync.
    Synced,
    /// As it is: it writes back what it has.
    Dropped,
}

/// Where and how a pair lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    pub folder: PathBuf,
    pub mechanism: Mechanism,
    /// The smallest and the largest folio, as log2 of pages.
    pub orders: [u8; 2],
    pub ending: Ending,
}

/// `Ok`, or what differs.
pub type CheckResult = Result<(), String>;

/// The cache's file and its twin.
pub struct Pair {
    setting: Setting,
    // Before the files, and these before the cache: in this order they are dropped.
    pins: Vec<(Pinned, Vec<u8>)>,
    files: Vec<File>,
    cache: Option<Cache>,
    folder: Folder,
    /// The cache's file as the kernel sees it.
    outside: fs::File,
    twin: fs::File,
    size: u64,
    generation: u32,
    /// Ranges that were changed since the last sync of everything.
    changed: Vec<Range<u64>>,
}

struct Folder(PathBuf);

impl Folder {
    fn new(parent: &Path) -> io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("pair-{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
    fn ours(&self) -> PathBuf {
        self.0.join("ours")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Files that cannot be removed are left to the system; there is no caller to report to.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Says what was attempted when something failed that must not.
pub fn checked<T, E: fmt::Display>(what: &str, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| format!("{what} failed: {error}"))
}

// ---- contents -----------------------------------------------------------------------------------------

/// Bytes of a generation: each aligned 8 of them are its number and their place.
pub fn content(generation: u32, position: u64, len: usize) -> Vec<u8> {
    let first = position / 8;
    let words = first..(position + len as u64).div_ceil(8);
    let bytes: Vec<u8> =
        words.flat_map(|place| (u64::from(generation) << 32 | place & 0xffff_ffff).to_le_bytes()).collect();
    let skip = (position - first * 8) as usize;
    bytes[skip..skip + len].to_vec()
}

/// The position and generation that the 8 bytes around a byte tell.
fn portrait(bytes: &[u8], start: u64, byte: u64) -> String {
    let aligned = byte / 8 * 8;
    let word = aligned.checked_sub(start).and_then(|at| bytes.get(at as usize..at as usize + 8));
    match word.map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))) {
        None => "a shred".to_owned(),
        Some(0) => "zeros".to_owned(),
        Some(word) if word & 0xffff_ffff == aligned / 8 => format!("generation {}", word >> 32),
        Some(word) => {
            format!("{word:016x}, of byte {} in generation {}", (word & 0xffff_ffff) * 8, word >> 32)
        }
    }
}

/// `is` is `should`, both from byte `start` of the file.
pub fn compare(what: &str, start: u64, is: &[u8], should: &[u8]) -> CheckResult {
    if is == should {
        return Ok(());
    }
    if is.len() != should.len() {
        return Err(format!("{what} at byte {start}: {} bytes instead of {}", is.len(), should.len()));
    }
    let at = is.iter().zip(should).position(|(is, should)| is != should).expect("they differ");
    let byte = start + at as u64;
    let wrong = is.iter().zip(should).filter(|(is, should)| is != should).count();
    Err(format!(
        "{what} from byte {start} on, {} bytes: {wrong} are wrong; the first is byte {byte} (page {}, {} in it): \
         here is {}, and there should be {}",
        is.len(),
        byte / PAGE,
        byte % PAGE,
        portrait(is, start, byte),
        portrait(should, start, byte)
    ))
}

/// The bytes that the kernel reads of a file from `position` on.
pub fn kernel_read(file: &fs::File, position: u64, len: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![POISON; len];
    let mut done = 0;
    while done < len {
        match checked("a read by the kernel", file.read_at(&mut bytes[done..], position + done as u64))? {
            0 => break,
            more => done += more,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

// ---- the pair -----------------------------------------------------------------------------------------

impl Pair {
    /// Two empty files.
    pub fn new(setting: &Setting) -> Result<Self, String> {
        let folder = checked("making a folder", Folder::new(&setting.folder))?;
        let new = |path: PathBuf| {
            let options = KernelOptions::new().read(true).write(true).create_new(true).open(path);
            checked("making a file", options)
        };
        let (outside, twin) = (new(folder.ours())?, new(folder.0.join("twin"))?);
        let mut pair = Self {
            setting: setting.clone(),
            pins: Vec::new(),
            files: Vec::new(),
            cache: None,
            folder,
            outside,
            twin,
            size: 0,
            generation: 0,
            changed: Vec::new(),
        };
        pair.begin()?;
        Ok(pair)
    }

    fn begin(&mut self) -> CheckResult {
        let [least, most] = self.setting.orders;
        let cache = Cache::builder()
            .memory(MEMORY_MIB[0] << 20)
            .memory_max(MEMORY_MIB[1] << 20)
            .folio_order_max(most)
            .folio_order_min(least)
            .mechanism(self.setting.mechanism);
        self.cache = Some(checked("building a cache", cache.build())?);
        for _ in 0..HANDLES {
            let file = self.open(*OpenOptions::new().write(true))?;
            self.files.push(file);
        }
        Ok(())
    }

    fn open(&self, options: OpenOptions) -> Result<File, String> {
        let cache = self.cache.as_ref().expect("it has begun");
        checked("an open", cache.open_with(self.folder.ours(), &options))
    }

    fn file(&self, by: u8) -> &File {
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
            Op::Sync { by, how } => self.sync(by, how)?,
            Op::DontNeed { by, at, len } => {
                let range = self.range(at, len);
                checked("dont_need", self.file(by).dont_need(range.start, range.end - range.start))?;
            }
            Op::WillNeed { by, at, len } => {
                let range = self.range(at, len);
                checked("will_need", self.file(by).will_need(range.start, range.end - range.start))?;
            }
            Op::Allocate { by, at, len } => {
                let range = self.range(at, len.max(1));
                checked("allocate", self.file(by).allocate(range.start, range.end - range.start))?;
            }
            Op::Reopen { by } => self.reopen(by)?,
            Op::ReopenEmpty { by } => self.reopen_empty(by)?,
            Op::ReadOnly { at, len } => self.read_only(at, len)?,
            Op::Resize { mib } => self.resize(mib)?,
            Op::ExternalWrite { by, at, len } => self.external_write(by, at, len)?,
            Op::ExternalSetLen { by, to } => self.external_set_len(by, to)?,
            Op::Reborn => self.reborn()?,
            Op::Check => self.check()?,
        }
        let lens: Vec<u64> = self.files.iter().map(File::len).collect();
        if lens.iter().any(|&len| len != self.size) {
            return Err(format!("the file is {lens:?} bytes long, by each handle, instead of {}", self.size));
        }
        Ok(())
    }

    fn read(&mut self, by: u8, range: Range<u64>, how: Reading) -> CheckResult {
        match how {
            Reading::Plain => self.read_with(self.file(by), range, ReadOptions::new()),
            Reading::Uncached => self.read_with(self.file(by), range, ReadOptions::new().uncached(true)),
            Reading::Batch => self.read_batch(by, range),
        }
    }

    fn read_with(&self, file: &File, range: Range<u64>, options: ReadOptions) -> CheckResult {
        let should = kernel_read(&self.twin, range.start, (range.end - range.start) as usize)?;
        let mut is = vec![POISON; (range.end - range.start) as usize];
        // A read may be shorter than asked, if it then goes on; only the end gives nothing.
        let mut done = 0;
        while done < is.len() {
            match checked("a read", file.read_at_with(&mut is[done..], range.start + done as u64, options))? {
                0 => break,
                bytes => done += bytes,
            }
        }
        if is[done..].iter().any(|&byte| byte != POISON) {
            return Err(format!("a read of {range:?} gave {done} bytes and wrote behind them"));
        }
        compare("a read", range.start, &is[..done], &should)
    }

    fn read_batch(&self, by: u8, range: Range<u64>) -> CheckResult {
        let len = (range.end - range.start) as usize;
        let places = [range.start, range.end.min(FILE_MAX - 1), range.start / 2];
        let mut buffers = [len, len / 2, len / 3 + 1].map(|len| vec![POISON; len]);
        let mut reads: Vec<_> =
            buffers.iter_mut().zip(places).map(|(buffer, at)| BatchRead::new(buffer, at)).collect();
        self.file(by).read_batch(&mut reads);
        for (read, len) in reads.iter().zip([len, len / 2, len / 3 + 1]) {
            checked("a read of a batch", read.result())?;
            let should = kernel_read(&self.twin, read.position(), len)?;
            compare("a read of a batch", read.position(), read.bytes(), &should)?;
        }
        Ok(())
    }

    fn pin(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        let range = self.range(at, len);
        let should = kernel_read(&self.twin, range.start, (range.end - range.start) as usize)?;
        let pinned = checked("a pin", self.file(by).pin(range.start, (range.end - range.start) as usize))?;
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
            let nth = usize::from(nth) % self.pins.len();
            drop(self.pins.remove(nth));
        }
        Ok(())
    }

    fn check_pins(&self) -> CheckResult {
        for (pinned, bytes) in &self.pins {
            let mut rest: &[u8] = bytes;
            for chunk in pinned.chunks() {
                let (was, later) = rest.split_at(chunk.len());
                if chunk != was {
                    return Err(format!("{} bytes changed under a pin", bytes.len()));
                }
                rest = later;
            }
        }
        Ok(())
    }

    fn write(&mut self, by: u8, range: Range<u64>, how: Writing) -> CheckResult {
        let len = (range.end - range.start) as usize;
        if how == Writing::Batch {
            return self.write_batch(by, range);
        }
        let bytes = self.next_content(range.start, len);
        let file = self.file(by);
        match how {
            Writing::Vectored => write_vectored(file, &bytes, range.start)?,
            Writing::Uncached => write_with(file, &bytes, range.start, WriteOptions::new().uncached(true))?,
            Writing::Durable => {
                let options = WriteOptions::new().durability(Durability::Data);
                write_with(file, &bytes, range.start, options)?;
            }
            Writing::Plain | Writing::Batch => checked("a write", file.write_all_at(&bytes, range.start))?,
        }
        self.wrote(range.start, &bytes)?;
        if how == Writing::Durable { self.compare_on_disk(range) } else { Ok(()) }
    }

    fn write_batch(&mut self, by: u8, range: Range<u64>) -> CheckResult {
        // With gaps between them, so that each order of the three differs.
        let third = (range.end - range.start) / 3;
        let places = [0, 1, 2].map(|nth| range.start + nth * (third + 100));
        let mut parts = Vec::new();
        for place in places {
            let end = (place + third).min(FILE_MAX).max(place);
            let bytes = self.next_content(place, (end - place) as usize);
            parts.push((place, bytes));
        }
        let mut writes: Vec<_> = parts.iter().map(|(at, bytes)| BatchWrite::new(bytes, *at)).collect();
        self.file(by).write_batch(&mut writes);
        for (write, (_, bytes)) in writes.iter().zip(&parts) {
            let taken = checked("a write of a batch", write.result())?;
            if taken != bytes.len() {
                return Err(format!("a write of a batch took {taken} of {} bytes and no error", bytes.len()));
            }
        }
        parts.iter().try_for_each(|(place, bytes)| self.wrote(*place, bytes))
    }

    fn wrote(&mut self, position: u64, bytes: &[u8]) -> CheckResult {
        checked("a write to the twin", self.twin.write_all_at(bytes, position))?;
        if !bytes.is_empty() {
            let end = position + bytes.len() as u64;
            // The bytes between the old end and the new ones have become readable.
            self.changed.push(position.min(self.size)..end);
            self.size = self.size.max(end);
        }
        self.check_pins()
    }

    fn append(&mut self, by: u8, len: u32) -> CheckResult {
        let len = u64::from(len).min(FILE_MAX - self.size) as usize;
        let bytes = self.next_content(self.size, len);
        let place = checked("an append", self.file(by).append(&bytes))?;
        if place != self.size && len > 0 {
            return Err(format!("an append went to byte {place} instead of {}", self.size));
        }
        self.wrote(self.size, &bytes)
    }

    fn set_len(&mut self, by: u8, to: At) -> CheckResult {
        let to = self.position(to);
        checked("set_len", self.file(by).set_len(to))?;
        self.was_set(to)
    }

    fn was_set(&mut self, to: u64) -> CheckResult {
        checked("set_len of the twin", self.twin.set_len(to))?;
        self.changed.push(self.size.min(to)..to);
        self.size = to;
        self.check_pins()
    }

    fn punch(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        let range = self.range(at, len);
        checked("a punch", self.file(by).punch_hole(range.start, range.end - range.start))?;
        let end = range.end.min(self.size);
        let zeros = vec![0; end.saturating_sub(range.start) as usize];
        self.wrote(range.start, &zeros)
    }

    fn sync(&mut self, by: u8, how: Syncing) -> CheckResult {
        let file = self.file(by);
        match how {
            Syncing::Data => checked("sync_data", file.sync_data())?,
            Syncing::All => checked("sync_all", file.sync_all())?,
            Syncing::WriteBack => return checked("write_back", file.write_back()),
            Syncing::Range { at, len } => {
                let range = self.range(at, len);
                checked("sync_range", file.sync_range(range.start, range.end - range.start))?;
                return self.compare_on_disk(range);
            }
        }
        self.compare_changed()
    }

    fn compare_changed(&mut self) -> CheckResult {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().try_for_each(|range| self.compare_on_disk(range))?;
        let len = checked("asking for the length", self.outside.metadata())?.len();
        if len != self.size {
            return Err(format!("after a sync the file is {len} bytes long instead of {}", self.size));
        }
        Ok(())
    }

    /// Checks that the kernel reads the same of the cache's file and of the twin. Behind the end of the cache's file
    /// zeros are expected: a sync of a range makes the file no longer than the range's bytes do.
    fn compare_on_disk(&self, range: Range<u64>) -> CheckResult {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(PIECE as u64) as usize;
            let should = kernel_read(&self.twin, at, len)?;
            let mut is = kernel_read(&self.outside, at, len)?;
            is.resize(is.len().max(should.len()), 0);
            compare("on the disk, after a sync,", at, &is, &should)?;
            at += len as u64;
        }
        Ok(())
    }

    fn reopen(&mut self, by: u8) -> CheckResult {
        // Closed first: for a moment there may be one handle less.
        let by = usize::from(by) % HANDLES;
        drop(self.files.remove(by));
        let file = self.open(*OpenOptions::new().write(true))?;
        self.files.insert(by, file);
        Ok(())
    }

    fn reopen_empty(&mut self, by: u8) -> CheckResult {
        let by = usize::from(by) % HANDLES;
        drop(self.files.remove(by));
        let file = self.open(*OpenOptions::new().write(true).truncate(true))?;
        self.files.insert(by, file);
        self.was_set(0)
    }

    fn read_only(&mut self, at: At, len: u32) -> CheckResult {
        let range = self.range(at, len);
        let file = self.open(OpenOptions::new())?;
        self.read_with(&file, range.clone(), ReadOptions::new())?;
        match file.write_at(b"no", range.start) {
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(()),
            other => Err(format!("a write through a handle for reading: {other:?}")),
        }
    }

    fn resize(&mut self, mib: u8) -> CheckResult {
        let [least, most] = MEMORY_MIB;
        let bytes = (least + 1 + u64::from(mib) % (most - least)) << 20;
        let resized = self.cache.as_ref().expect("it has begun").resize(bytes);
        checked("a resize", resized.map(drop))?;
        self.check_pins()
    }

    fn external_write(&mut self, by: u8, at: At, len: u32) -> CheckResult {
        self.sync(by, Syncing::All)?;
        let range = self.range(at, len);
        let bytes = self.next_content(range.start, (range.end - range.start) as usize);
        checked("a write from outside", self.outside.write_all_at(&bytes, range.start))?;
        checked("revalidate", self.file(by).revalidate())?;
        self.wrote(range.start, &bytes)
    }

    fn external_set_len(&mut self, by: u8, to: At) -> CheckResult {
        self.sync(by, Syncing::All)?;
        let to = self.position(to);
        checked("set_len from outside", self.outside.set_len(to))?;
        checked("revalidate", self.file(by).revalidate())?;
        self.was_set(to)
    }

    fn reborn(&mut self) -> CheckResult {
        self.end()?;
        self.begin()
    }

    fn check(&self) -> CheckResult {
        self.check_pins()?;
        self.cache.as_ref().map_or(Ok(()), Cache::check)
    }

    /// Drops everything but the files, which must be the same then.
    fn end(&mut self) -> CheckResult {
        self.check()?;
        self.pins.clear();
        if self.setting.ending == Ending::Synced {
            self.sync(0, Syncing::All)?;
            let dirty = checked("dirty_bytes", self.file(0).dirty_bytes())?;
            if dirty > 0 {
                return Err(format!("{dirty} bytes are to be written after a sync of all"));
            }
        }
        self.files.clear();
        self.cache = None;
        self.changed.clear();
        self.changed.push(0..self.size);
        self.compare_changed()
    }
}

fn write_with(file: &File, bytes: &[u8], position: u64, options: WriteOptions) -> CheckResult {
    let mut done = 0;
    while done < bytes.len() {
        match checked("a write", file.write_at_with(&bytes[done..], position + done as u64, options))? {
            0 => return Err(format!("a write took {done} of {} bytes and no error", bytes.len())),
            more => done += more,
        }
    }
    Ok(())
}

fn write_vectored(file: &File, bytes: &[u8], position: u64) -> CheckResult {
    let (first, rest) = bytes.split_at(bytes.len() / 3);
    let (second, third) = rest.split_at(rest.len() / 5);
    let slices = [first, second, third].map(IoSlice::new);
    let taken = checked("a vectored write", file.write_vectored_at(&slices, position))?;
    write_with(file, &bytes[taken..], position + taken as u64, WriteOptions::new())
}

// ---- operations from bytes ----------------------------------------------------------------------------

/// Operations from any bytes. Missing bytes count as zero, so that a prefix is a shorter run.
pub struct Bytes<'a>(pub &'a [u8]);

/// Lengths about the edges of what there are edges of.
const LENS: [u32; 16] =
    [1, 0, 3, 64, 511, 512, 513, 4095, 4096, 4097, 8192, 12_293, 65_536, 70_001, 262_144, 400_001];
/// Distances from the start of a page, or from the file's end.
const NEAR: [i64; 8] = [0, -1, 1, 17, 512, 2048, 4095, 4097];

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn near(&mut self) -> i64 {
        NEAR[usize::from(self.byte()) % NEAR.len()]
    }

    /// Mostly in a few pages, sometimes about the end, sometimes anywhere.
    fn at(&mut self) -> At {
        let (kind, page) = (self.byte(), self.byte());
        let byte_of = |page: u64, near: i64| At::Byte((page * PAGE).saturating_add_signed(near));
        match kind {
            0..=119 => byte_of(u64::from(page) % 24, self.near()),
            120..=159 => byte_of(u64::from(page) * 2, self.near()),
            160..=199 => byte_of(u64::from(page) << 8 | u64::from(self.byte()), self.near()),
            200..=239 => At::End(self.near() - i64::from(page % 4) * PAGE as i64),
            240.. => At::End(i64::from(page) * 64),
        }
    }

    /// Mostly short.
    fn len(&mut self) -> u32 {
        match self.byte() {
            byte @ 0..=191 => LENS[usize::from(byte) % 12],
            byte @ 192..=247 => u32::from(byte) * 41,
            byte => LENS[usize::from(byte) % LENS.len()],
        }
    }

    fn reading(&mut self, by: u8, how: Reading) -> Op {
        Op::Read { by, at: self.at(), len: self.len(), how }
    }
    fn writing(&mut self, by: u8, how: Writing) -> Op {
        Op::Write { by, at: self.at(), len: self.len(), how }
    }
    fn syncing(&mut self, by: u8, what: u8) -> Op {
        let how = match what % 4 {
            0 => Syncing::Data,
            1 => Syncing::All,
            2 => Syncing::Range { at: self.at(), len: self.len() },
            _ => Syncing::WriteBack,
        };
        Op::Sync { by, how }
    }
    fn rare(&mut self, by: u8) -> Op {
        match self.byte() % 16 {
            0 | 1 => Op::Reopen { by },
            2 => Op::Allocate { by, at: self.at(), len: self.len() },
            3 => Op::ReopenEmpty { by },
            4 | 5 => Op::ReadOnly { at: self.at(), len: self.len() },
            6 | 7 => Op::Resize { mib: self.byte() },
            8..=10 => Op::ExternalWrite { by, at: self.at(), len: self.len() },
            11 => Op::ExternalSetLen { by, to: self.at() },
            12 => Op::Reborn,
            13 => Op::DontNeed { by, at: At::Byte(0), len: u32::MAX },
            14 => Op::WillNeed { by, at: self.at(), len: self.len() },
            _ => Op::Check,
        }
    }
}

impl Iterator for Bytes<'_> {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        if self.0.is_empty() {
            return None;
        }
        let what = self.byte();
        let by = what >> 7;
        Some(match what % 64 {
            0..=13 => self.reading(by, Reading::Plain),
            14..=16 => self.reading(by, Reading::Uncached),
            17 | 18 => self.reading(by, Reading::Batch),
            19..=21 => Op::Pin { by, at: self.at(), len: self.len() },
            22 | 23 => Op::Unpin { nth: self.byte() },
            24..=37 => self.writing(by, Writing::Plain),
            38 | 39 => self.writing(by, Writing::Vectored),
            40 | 41 => self.writing(by, Writing::Batch),
            42..=44 => self.writing(by, Writing::Uncached),
            45 => self.writing(by, Writing::Durable),
            46..=49 => Op::Append { by, len: self.len() },
            50 | 51 => Op::SetLen { by, to: self.at() },
            52..=54 => Op::Punch { by, at: self.at(), len: self.len() },
            55..=58 => self.syncing(by, what),
            59 | 60 => Op::DontNeed { by, at: self.at(), len: self.len() },
            _ => self.rare(by),
        })
    }
}

/// Does all of it; a complaint says at which operation it arose.
pub fn run(setting: &Setting, ops: &[Op]) -> CheckResult {
    let mut pair = Pair::new(setting)?;
    for (number, op) in ops.iter().enumerate() {
        pair.step(op).map_err(|complaint| format!("operation {number}, {op:?}: {complaint}"))?;
    }
    pair.end().map_err(|complaint| format!("at the end: {complaint}"))
}
