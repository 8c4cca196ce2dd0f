//! Polite: which files are left to the kernel, and for how long.
//!
//! Taking a file over costs a question and a copy of all that is read, from the device or out of the kernel's page
//! cache. Where the kernel holds the file already, that is a copy more than without us. So the kernel goes on to
//! serve it until it has served so much that another copy does not matter:
//!
//! ```text
//!   asked for --cachestat--> cold    ------------------------------------------> ATTACH, read from the device
//!                            partly  ------------------------------------------> ATTACH, read through the kernel's cache
//!                            held    --> LEFT for 4 times its size --asked again--> WISHED, copied while nobody waits
//!                                                                                      |
//!                                                                 ATTACH <--asked again--'
//! ```
//!
//! This is the rule of the ski hirer: who does not know how long the season is, hires until the hire has cost what the
//! skis cost, and never pays more than twice (Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988).
//! Here the skis are bought by a thread that nobody waits for, and the factor is 4, so what is lost is less.
//!
//! A file is known by device and inode. What is known of it may be forgotten at any time; then it is looked at again.
//!
//! Invariants:
//!  1. No lock is held while the kernel is asked for anything.
//!  2. A file that was taken over once is not left to the kernel again while it is known.
//!
//! Not an invariant: that what the kernel held when it was asked is what it holds now. That costs time only.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Advice, FileType, Mode, OFlags, fadvise, fstat, open};

use crate::arena::control::Manners;
use crate::sync::{Rank, RankedMutex};
use crate::sys::io::{KernelHolds, kernel_holds};
use crate::units::PAGE_SIZE;

/// A file of 4 MiB pays for the question when it is read once; a smaller one after some dozens of calls.
pub(super) const MANNERS: Manners = Manners { large_bytes: 4 << 20, credit_bytes: 256 << 10 };
/// How often the kernel is to read a file before it is copied out of its cache.
const TIMES: u64 = 4;
/// How often a file may be asked for anew, and left to the kernel, before it counts as read often.
const OPENINGS_MAX: u32 = 16;
/// Files that are known at most; then all are forgotten.
const KNOWN_MAX: usize = 4096;
/// Bytes of one step of a copy.
const STEP: u64 = 1 << 20;

/// Device and inode.
type Name = (u64, u64);

/// What is to be done about a file that a viewer asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// It is taken over.
    Attach,
    /// The kernel is to read so many bytes of it first.
    Kernels(u64),
}

/// What is known of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// Left to the kernel so often.
    Left(u32),
    /// To be copied, or being copied.
    Wished,
    /// Taken over; whether it is filled through the kernel's cache.
    Ours { by_kernel: bool },
}

/// A file to be copied out of the kernel's cache while nobody waits.
#[derive(Debug)]
pub(super) struct Wish {
    name: Name,
    file: OwnedFd,
    bytes: u64,
}

impl Wish {
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    /// The ranges of the file, in bytes, one after the other.
    pub(super) fn steps(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let bytes = self.bytes;
        (0..bytes.div_ceil(STEP)).map(move |i| i * STEP..bytes.min((i + 1) * STEP))
    }
}

/// What is known of all files.
#[derive(Debug)]
pub(super) struct Polite {
    state: RankedMutex<State>,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<Name, Known>,
    wishes: VecDeque<Wish>,
}

impl Polite {
    pub(super) fn new() -> Self {
        Self { state: RankedMutex::new(Rank::Viewer, State::default()) }
    }

    /// What is to be done about the file `name` behind `descriptor` of `process`. `spent` says that the kernel has
    /// read all it was to read; `room` is how large a file may be that is copied, in bytes.
    pub(super) fn judge(&self, process: u32, descriptor: i32, name: Name, spent: bool, room: u64) -> Verdict {
        // 1 What is known?
        let known = self.state.lock().known.get(&name).copied();
        if let Some(Known::Ours { .. }) = known {
            return Verdict::Attach;
        }
        // 2 What does the kernel hold? What cannot be looked at, the attaching finds out.
        let Some((file, bytes)) = look(process, descriptor, name) else { return Verdict::Attach };
        if known == Some(Known::Wished) {
            return Verdict::Kernels(bytes);
        }
        let holds = kernel_holds(file.as_fd(), bytes).unwrap_or_default();
        // 3 Whose turn is it?
        let times = if let Some(Known::Left(times)) = known { times } else { 0 };
        let often = spent || times >= OPENINGS_MAX;
        let (verdict, next) = match Held::of(holds, bytes) {
            Held::Not => (Verdict::Attach, Known::Ours { by_kernel: false }),
            Held::Partly => (Verdict::Attach, Known::Ours { by_kernel: true }),
            Held::Wholly if often && bytes <= room => (Verdict::Kernels(bytes), Known::Wished),
            Held::Wholly => (Verdict::Kernels(bytes.saturating_mul(TIMES)), Known::Left(times + 1)),
        };
        self.note(name, next, (next == Known::Wished).then_some(Wish { name, file, bytes }));
        verdict
    }

    /// Whether a file that is taken over is filled through the kernel's cache.
    pub(super) fn is_filled_by_kernel(&self, name: Name) -> bool {
        self.state.lock().known.get(&name) == Some(&Known::Ours { by_kernel: true })
    }

    /// The next file to be copied.
    pub(super) fn next_wish(&self) -> Option<Wish> {
        self.state.lock().wishes.pop_front()
    }

    /// A copy is done, or could not be.
    pub(super) fn end(&self, wish: &Wish, done: bool) {
        let next = if done { Known::Ours { by_kernel: true } } else { Known::Left(0) };
        self.note(wish.name, next, None);
    }

    fn note(&self, name: Name, next: Known, wish: Option<Wish>) {
        let mut state = self.state.lock();
        if state.known.len() >= KNOWN_MAX {
            // Those that wait to be copied are known again when that is done.
            state.known.clear();
        }
        // Two that ask at once wish once.
        if state.known.insert(name, next) != Some(Known::Wished) {
            state.wishes.extend(wish);
        }
    }
}

/// How much of a file the kernel holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    /// Next to nothing.
    Not,
    /// Some of it.
    Partly,
    /// Nearly all; or the device does not have all of it yet, so that reading there would mean to write first.
    Wholly,
}

impl Held {
    fn of(holds: KernelHolds, bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE_SIZE as u64);
        match holds.pages {
            _ if holds.unwritten > 0 => Self::Wholly,
            held if held >= pages - pages / 4 => Self::Wholly,
            held if held > pages / 64 => Self::Partly,
            _ => Self::Not,
        }
    }
}

/// The file behind a descriptor of another process, and its bytes, if it is still the regular file `name`.
fn look(process: u32, descriptor: i32, name: Name) -> Option<(OwnedFd, u64)> {
    let mut path = String::new();
    write!(path, "/proc/{process}/fd/{descriptor}").ok()?;
    // It may be anything by now: a pipe must not make us wait.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty()).ok()?;
    let stat = fstat(&file).ok()?;
    let is_it = (stat.st_dev, stat.st_ino) == name && FileType::from_raw_mode(stat.st_mode).is_file();
    // Where pages are tried one by one, only these are read.
    let _ = fadvise(&file, 0, None, Advice::Random);
    is_it.then_some((file, stat.st_size as u64))
}
