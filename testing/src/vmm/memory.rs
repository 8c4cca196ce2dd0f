//! Memory: what the monitor gives its guest, and what each page of it has to hold.
//!
//! ```text
//!   page   state                       holds
//!          SNAPSHOT                    the image's page
//!          REMOVING                    either, word by word: the balloon is at it
//!          ZERO                        zeros, and never the image's bytes again
//!          GONE                        unmapped; not looked at
//!   and over the first or the third: eight bytes of the test's at its head, if it was written
//! ```
//!
//! A page's state is loaded before its bytes are read and again after. A check demands only what both states say.
//!
//! The words of the model are SeqCst, each the partner of all others: a test compares what several threads did, and a
//! weaker order would have to be argued for each pair.

#![allow(unsafe_code, reason = "memory that others supply")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::kernel::checked;
use super::{Image, PAGE};
use crate::content::verify;

pub const SNAPSHOT: u8 = 0;
pub const REMOVING: u8 = 1;
pub const ZERO: u8 = 2;
pub const UNMAPPED: u8 = 3;

/// A mapping, and which bytes of the image it has.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    pub address: u64,
    pub offset: u64,
    pub bytes: u64,
}

impl Region {
    fn has(&self, page: u64) -> bool {
        let at = page * PAGE as u64;
        (self.offset..self.offset + self.bytes).contains(&at)
    }
}

/// How the balloon takes pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Balloon {
    DontNeed,
    /// A hole in the file behind the mapping.
    Remove,
}

pub struct Memory {
    image: Image,
    pub regions: Vec<Region>,
    states: Vec<AtomicU8>,
    /// The number written over the head of a page; 0: none.
    written: Vec<AtomicU64>,
    /// A file into which the kernel reads a page for a probe.
    probe: Mutex<OwnedFd>,
}

/// The object that is mapped.
pub enum Of<'f> {
    Anonymous,
    Shared(&'f OwnedFd),
    Private(&'f OwnedFd),
}

pub fn map(of: &Of<'_>, offset: u64, bytes: u64) -> io::Result<u64> {
    let (flags, descriptor) = match of {
        Of::Anonymous => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
        Of::Shared(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        Of::Private(file) => (libc::MAP_PRIVATE, file.as_raw_fd()),
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let offset = if descriptor < 0 { 0 } else { offset as i64 };
    // SAFETY: a place of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, protection, flags, descriptor, offset) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as u64) }
}

impl Memory {
    pub fn new(image: Image, regions: Vec<Region>) -> Self {
        let pages = image.pages as usize;
        Self {
            image,
            regions,
            states: (0..pages).map(|_| AtomicU8::new(SNAPSHOT)).collect(),
            written: (0..pages).map(|_| AtomicU64::new(0)).collect(),
            probe: Mutex::new(super::kernel::memfd(PAGE as u64)),
        }
    }

    pub fn image(&self) -> Image {
        self.image
    }

    pub fn address(&self, page: u64) -> u64 {
        let region = self.regions.iter().find(|region| region.has(page)).expect("a page that is mapped");
        region.address + (page * PAGE as u64 - region.offset)
    }

    /// The places of a range of pages: one for each region that has a part of it.
    fn pieces(&self, pages: &std::ops::Range<u64>) -> Vec<(u64, usize)> {
        let bytes = PAGE as u64;
        let piece = |region: &Region| {
            let begin = region.offset.max(pages.start * bytes);
            let end = (region.offset + region.bytes).min(pages.end * bytes);
            (begin < end).then(|| (region.address + (begin - region.offset), (end - begin) as usize))
        };
        self.regions.iter().filter_map(piece).collect()
    }

    fn state(&self, page: u64) -> u8 {
        // SeqCst: see the head of this file.
        self.states[page as usize].load(Ordering::SeqCst)
    }

    fn set(&self, pages: std::ops::Range<u64>, state: u8) {
        for page in pages {
            // SeqCst: see the head of this file.
            self.written[page as usize].store(0, Ordering::SeqCst);
            // SeqCst: see the head of this file.
            self.states[page as usize].store(state, Ordering::SeqCst);
        }
    }

    fn read(&self, page: u64) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        // SAFETY: mapped, and only the kernel changes it besides this process; whatever is read is checked.
        unsafe {
            let from = self.address(page) as *const u64;
            for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&from.add(at).read_volatile().to_le_bytes());
            }
        }
        bytes
    }

    fn holds(&self, page: u64, state: u8) -> [u8; PAGE] {
        let mut bytes = if state == ZERO { [0; PAGE] } else { self.image.page(page) };
        // SeqCst: see the head of this file.
        let written = self.written[page as usize].load(Ordering::SeqCst);
        if written != 0 {
            bytes[..8].copy_from_slice(&written.to_le_bytes());
        }
        bytes
    }

    /// Reads a page, and returns what is wrong with it.
    pub fn check_page(&self, page: u64) -> Result<(), String> {
        let before = self.state(page);
        if before == UNMAPPED {
            return Ok(());
        }
        let found = self.read(page);
        let after = self.state(page);
        match (before, after) {
            (before, after) if before == after && before != REMOVING => {
                let expected = self.holds(page, before);
                match expected.iter().zip(&found).position(|(a, b)| a != b) {
                    None => Ok(()),
                    Some(at) => {
                        let state = if before == ZERO { "zeros" } else { "the image's" };
                        let is = self.portrait(page, &found);
                        Err(format!("page {page} has to be {state} and differs at byte {at}; it is {is}"))
                    }
                }
            }
            _ => {
                let (zeros, image) = ([0; PAGE], self.image.page(page));
                let words = |bytes: &[u8; PAGE]| -> Vec<[u8; 8]> {
                    bytes.chunks_exact(8).map(|word| word.try_into().expect("eight bytes")).collect()
                };
                let (found, zeros, image) = (words(&found), words(&zeros), words(&image));
                let is_either = |at: usize| found[at] == zeros[at] || found[at] == image[at];
                match (0..found.len()).find(|&at| !is_either(at)) {
                    None => Ok(()),
                    Some(at) => Err(format!("page {page} word {at}: neither the image's nor zero")),
                }
            }
        }
    }

    /// Describes the bytes that were found at a page.
    fn portrait(&self, page: u64, found: &[u8; PAGE]) -> String {
        match found.iter().all(|&byte| byte == 0) {
            true => "all zeros".to_owned(),
            false => match verify(found, self.image.number, page * PAGE as u64) {
                Ok(()) => "the image's bytes".to_owned(),
                Err(why) => why,
            },
        }
    }

    /// Has the kernel read a page: it returns an error where a program gets a signal.
    pub fn probe(&self, page: u64) -> io::Result<()> {
        let file = self.probe.lock().expect("no thread panics with it");
        // SAFETY: the kernel reads a page that is mapped, or says why it cannot.
        let wrote = unsafe { libc::pwrite(file.as_raw_fd(), self.address(page) as *const _, PAGE, 0) };
        if wrote == PAGE as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Writes to the head of each page.
    pub fn write(&self, pages: std::ops::Range<u64>, value: u64) {
        for page in pages {
            // SAFETY: mapped, for writing; there is no reference into it.
            unsafe { (self.address(page) as *mut u64).write_volatile(value) };
            self.note_written(page, value);
        }
    }

    pub fn note_written(&self, page: u64, value: u64) {
        // SeqCst: see the head of this file.
        self.written[page as usize].store(value, Ordering::SeqCst);
    }

    /// Gives pages back to the system.
    pub fn balloon(&self, pages: std::ops::Range<u64>, how: Balloon) -> io::Result<()> {
        let advice = if how == Balloon::Remove { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        self.set(pages.clone(), REMOVING);
        for (address, bytes) in self.pieces(&pages) {
            // SAFETY: pages of this mapping, into which there is no reference.
            checked(unsafe { libc::madvise(address as *mut _, bytes, advice) })?;
        }
        self.set(pages, ZERO);
        Ok(())
    }

    /// Gives pages of a private mapping of a file back: they are the file's again, and here that is the image.
    pub fn reset(&self, pages: std::ops::Range<u64>) -> io::Result<()> {
        self.balloon(pages.clone(), Balloon::DontNeed)?;
        self.set(pages, SNAPSHOT);
        Ok(())
    }

    pub fn unmap(&self, pages: std::ops::Range<u64>) -> io::Result<()> {
        self.set(pages.clone(), UNMAPPED);
        for (address, bytes) in self.pieces(&pages) {
            // SAFETY: pages of this mapping, which are not read any more.
            checked(unsafe { libc::munmap(address as *mut _, bytes) })?;
        }
        Ok(())
    }

    /// Moves a region to another place.
    pub fn remap(&mut self, nth: usize) -> io::Result<()> {
        let region = &mut self.regions[nth];
        let bytes = region.bytes as usize;
        // SAFETY: the new place is a fresh mapping that is given up for it; there is no reference into the old one.
        let moved = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let place = libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            if place == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::mremap(region.address as *mut _, bytes, bytes, flags, place)
        };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        region.address = moved as u64;
        Ok(())
    }

    /// The sum over pages that a guest must answer.
    pub fn sum(&self, pages: std::ops::Range<u64>) -> u32 {
        pages.fold(0, |sum, page| guest_sum(sum, &self.holds(page, self.state(page))))
    }
}

/// The guest program's sum (`machine.rs`) over pages of these bytes: of each 64 the first word, where the guest writes,
/// and one that depends on the whole line. No more, since some KVMs run such a guest instruction by instruction.
pub fn guest_sum(so_far: u32, page: &[u8]) -> u32 {
    let word = |line: &[u8], at: usize| u32::from_le_bytes(line[at..at + 4].try_into().expect("four bytes"));
    let add =
        |sum: u32, line: &[u8]| sum.rotate_left(1).wrapping_add(word(line, 0)).wrapping_add(word(line, 24));
    page.chunks_exact(64).fold(so_far, add)
}
