//! Write: what does a buffered write cost, beside the kernel's own?
//!
//! ```text
//!   new pages      4 KiB to pages that are not cached, in order and at random, as many as may be dirty
//!                  before writing back begins                                             `cached`
//!   overwrites     of what is cached: changed already, and clean, which takes a lock once for each page
//!   appends        a few bytes, and a sync, again and again: what a log does              `synced`
//!   latency        of overwrites, of which one in a thousand takes longer: while nothing is written back, and
//!                  while all of it is, without a pause                                    `latency`
//! ```
//!
//! Quinion and the kernel write to files of their own, in turns, so that neither takes the other's pages away. Each
//! writes the same places in a repetition, and what was written is checked afterwards.
//!
//! The kernel may have a tenth of the machine dirty before it begins to write, and Quinion a tenth of the cache. All
//! stays below the smaller of these but where writing back is measured; a sync between repetitions, to begin the next
//! one clean, is not timed.
//!
//! CPU time counts where threads only compute. Of a sync, the elapsed time counts, and the CPU time of the process.

mod cached;
mod latency;
mod synced;

use std::fs::File as KernelFile;
use std::os::unix::fs::FileExt;
use std::path::Path;

use quinion::{Cache, File, OpenOptions};

use crate::fixtures::caches::{Drops, kept_bytes};
use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::{Scratch, word_at};
use crate::harness::{Case, Settings, Unmeasured};

const THREADS_MAX: usize = 2;
/// A cache is so many times as large as what may be dirty in it before writing back begins, and a little more.
const MEMORY_OF_CHANGED: u64 = 11;

pub fn cases(settings: &Settings) -> Vec<Case> {
    let cached = cached::cases(settings);
    cached.into_iter().chain(synced::cases(settings)).chain(latency::cases(settings)).collect()
}

enum Target {
    Ours(Box<File>),
    /// Each thread writes by a descriptor of its own: a shared one is dearer.
    Kernel([KernelFile; THREADS_MAX]),
}

impl Target {
    #[inline]
    fn write(&self, thread: usize, bytes: &[u8], position: u64) {
        match self {
            Self::Ours(file) => {
                assert_eq!(file.write_at(bytes, position).expect("it is written"), bytes.len());
            }
            Self::Kernel(files) => files[thread].write_all_at(bytes, position).expect("it is written"),
        }
    }

    fn read(&self, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
        match self {
            Self::Ours(file) => Ok(file.read_exact_at(buffer, position)?),
            Self::Kernel(files) => Ok(files[0].read_exact_at(buffer, position)?),
        }
    }

    fn sync(&self) -> Result<(), Unmeasured> {
        match self {
            Self::Ours(file) => Ok(file.sync_data()?),
            Self::Kernel(files) => Ok(files[0].sync_data()?),
        }
    }

    fn make_cold(&self) -> Result<(), Unmeasured> {
        self.sync()?;
        match self {
            Self::Kernel(files) => Drops::OurFiles.make_cold(&files[..1]),
            Self::Ours(file) => {
                file.dont_need(0, u64::MAX)?;
                match file.cached_pages() {
                    0 => Ok(()),
                    pages => Err(Unmeasured::Failed(format!("{pages} pages stay in our cache"))),
                }
            }
        }
    }

    fn make_warm(&self, bytes: u64) -> Result<(), Unmeasured> {
        let mut buffer = vec![0; 1 << 20];
        for position in (0..bytes).step_by(buffer.len()) {
            self.read(&mut buffer, position)?;
        }
        let kept = match self {
            Self::Ours(file) => file.cached_pages() * PAGE as u64,
            Self::Kernel(files) => kept_bytes(&files[..1])?,
        };
        if kept >= bytes {
            return Ok(());
        }
        Err(Unmeasured::Missing(format!("only {kept} of {bytes} bytes stay cached; it takes more memory")))
    }

    fn check(&self, position: u64, written: &[u8]) -> Result<(), Unmeasured> {
        let mut found = vec![0; written.len()];
        self.read(&mut found, position)?;
        if found == written {
            return Ok(());
        }
        Err(Unmeasured::Failed(format!("at byte {position} stands something else than was written")))
    }
}

struct Written {
    target: Target,
    bytes: u64,
    /// Has no name; the target has opened it by what this is.
    _scratch: Scratch,
}

impl Written {
    /// Quinion's, of `bytes` bytes, in a cache that begins to write back at so many dirty pages, with folios of up to
    /// this order.
    fn ours(folder: &Path, bytes: u64, order: u8) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(folder, bytes)?;
        let memory = bytes * MEMORY_OF_CHANGED + (64 << 20);
        let cache = Cache::builder().memory(memory).folio_order_max(order).build()?;
        let file = cache.open_with(scratch.path(), OpenOptions::new().write(true))?;
        Ok(Self { target: Target::Ours(Box::new(file)), bytes, _scratch: scratch })
    }

    fn kernel(folder: &Path, bytes: u64) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(folder, bytes)?;
        let open = || KernelFile::options().read(true).write(true).open(scratch.path());
        Ok(Self { target: Target::Kernel([open()?, open()?]), bytes, _scratch: scratch })
    }
}

/// A page, or a part of one, that holds its place and its repetition.
struct Source {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Source {
    /// Bytes at the start of a page, as an aligned program has them.
    fn new(len: usize) -> Self {
        let memory = vec![0x57; len + PAGE];
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE - 1);
        Self { memory, start, len }
    }

    #[inline]
    fn of(&mut self, position: u64, repetition: u64) -> &[u8] {
        let bytes = &mut self.memory[self.start..self.start + self.len];
        bytes[..8].copy_from_slice(&(word_at(position) ^ repetition << 48).to_le_bytes());
        bytes
    }
}
