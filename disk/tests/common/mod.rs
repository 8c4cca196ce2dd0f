//! Common: contents whose bytes follow from their names, and a device in memory that loses power and fails on request.
//!
//! Each read is compared with the bytes that its name says. The device keeps what was there before each write since the
//! last sync: a power cut puts any part of that back, sector by sector.

#![allow(dead_code, reason = "each test uses a part")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use quinion_disk::internals::{PAGE_BYTES, SEGMENT_BYTES};
use quinion_disk::{ContentKey, Device, DiskOptions, DiskStore};

/// A small generator (SplitMix64), so that a seed names a run.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

pub fn key(of: u64) -> ContentKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&of.to_le_bytes());
    bytes[31] = 1;
    ContentKey(bytes)
}

pub fn content(of: u64, page: u64, pages: u64) -> Vec<u8> {
    let words = PAGE_BYTES as u64 / 8;
    let word = |at: u64| Random(of << 40 ^ at).next().to_le_bytes();
    (page * words..(page + pages) * words).flat_map(word).collect()
}

pub fn read_checked(store: &DiskStore, of: u64, page: u64, pages: u32) -> bool {
    let mut got = vec![0; pages as usize * PAGE_BYTES];
    let read =
        store.read(&key(of), page, pages, &mut |at, bytes| got[at..at + bytes.len()].copy_from_slice(bytes));
    if read.is_ok() {
        assert!(got == content(of, page, pages.into()), "content {of}, page {page}: wrong bytes");
    }
    read.is_ok()
}

/// A device in memory. What was written and not synced may be lost when the power fails.
#[derive(Clone, Debug)]
pub struct Disk(Arc<State>);

#[derive(Debug)]
struct State {
    bytes: Mutex<Vec<u8>>,
    undo: Mutex<Vec<(usize, Vec<u8>)>>,
    pub writes_left: AtomicU64,
    pub reads_fail: AtomicBool,
    pub writes_fail: AtomicBool,
    holds: (Mutex<bool>, Condvar),
    reads_held: (Mutex<bool>, Condvar),
}

const SECTOR: usize = 512;

impl Disk {
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(State {
            bytes: Mutex::new(vec![0; bytes as usize]),
            undo: Mutex::default(),
            writes_left: AtomicU64::new(u64::MAX),
            reads_fail: AtomicBool::new(false),
            writes_fail: AtomicBool::new(false),
            holds: Default::default(),
            reads_held: Default::default(),
        }))
    }
    pub fn of(options: &DiskOptions) -> Self {
        Self::new(options.bytes)
    }
    pub fn options(mib: u64) -> DiskOptions {
        DiskOptions::new("", mib * SEGMENT_BYTES as u64).buffer_bytes(4 << 20)
    }
    pub fn open(&self, options: &DiskOptions) -> DiskStore {
        DiskStore::open_on(Box::new(self.clone()), options).unwrap()
    }
    pub fn fail_reads(&self, fail: bool) {
        self.0.reads_fail.store(fail, Ordering::Relaxed);
    }
    pub fn fail_writes(&self, fail: bool) {
        self.0.writes_fail.store(fail, Ordering::Relaxed);
    }
    pub fn hold(&self, hold: bool) {
        *self.0.holds.0.lock().unwrap() = hold;
        self.0.holds.1.notify_all();
    }
    pub fn hold_reads(&self, hold: bool) {
        *self.0.reads_held.0.lock().unwrap() = hold;
        self.0.reads_held.1.notify_all();
    }
    /// From now on so many writes reach the device; of the last a part. The rest vanishes without an error.
    pub fn cut_after(&self, writes: u64) {
        self.0.writes_left.store(writes, Ordering::Relaxed);
    }
    pub fn bytes_mut<R>(&self, change: impl FnOnce(&mut [u8]) -> R) -> R {
        change(&mut self.0.bytes.lock().unwrap())
    }

    /// What the disk may hold after a power cut: of the writes since the last sync each sector or not, in any order.
    pub fn after_power_cut(&self, random: &mut Random) -> Self {
        let mut bytes = self.0.bytes.lock().unwrap().clone();
        for (at, before) in self.0.undo.lock().unwrap().iter().rev() {
            let lost = random.below(3); // all of it, none, or each sector by chance
            for (sector, old) in before.chunks(SECTOR).enumerate() {
                if lost == 0 || lost == 1 && random.below(2) == 0 {
                    bytes[at + sector * SECTOR..][..old.len()].copy_from_slice(old);
                }
            }
        }
        let disk = Self::new(bytes.len() as u64);
        *disk.0.bytes.lock().unwrap() = bytes;
        disk
    }
}

impl Device for Disk {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        check_aligned(buffer, offset);
        if self.0.reads_fail.load(Ordering::Relaxed) {
            return Err(io::Error::other("a bad sector"));
        }
        let held = self.0.reads_held.0.lock().unwrap();
        drop(self.0.reads_held.1.wait_while(held, |holds| *holds).unwrap());
        let bytes = self.0.bytes.lock().unwrap();
        buffer.copy_from_slice(&bytes[offset as usize..][..buffer.len()]);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        check_aligned(bytes, offset);
        if self.0.writes_fail.load(Ordering::Relaxed) {
            return Err(io::Error::other("no such device"));
        }
        let held = self.0.holds.0.lock().unwrap();
        drop(self.0.holds.1.wait_while(held, |holds| *holds).unwrap());
        let left = self.0.writes_left.load(Ordering::Relaxed);
        self.0.writes_left.store(left.saturating_sub(1), Ordering::Relaxed);
        let len = match left {
            0 => 0,
            1 => bytes.len() / 3 / SECTOR * SECTOR,
            _ => bytes.len(),
        };
        let mut all = self.0.bytes.lock().unwrap();
        let to = &mut all[offset as usize..][..len];
        self.0.undo.lock().unwrap().push((offset as usize, to.to_vec()));
        to.copy_from_slice(&bytes[..len]);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.undo.lock().unwrap().clear();
        Ok(())
    }
}

fn check_aligned(bytes: &[u8], offset: u64) {
    assert!(offset.is_multiple_of(PAGE_BYTES as u64) && bytes.len().is_multiple_of(PAGE_BYTES));
    assert!(bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES), "direct I/O needs aligned memory");
}
