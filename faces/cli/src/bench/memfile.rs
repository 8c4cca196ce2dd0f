//! Memfile: what does a read of a file in memory cost, beside tmpfs?
//!
//! ```text
//!   data           written from end to end             beside tmpfs of 4 KiB and of 2 MiB pages, a cached file of
//!   preallocated   there is memory, and no byte of it  the disk, that file mapped and copied from, and the bare copy
//!   holes          there is nothing                    beside tmpfs, and beside clearing the buffer
//!
//!   .., pinned     ours without copying: pins of as many bytes, and a look at the first word of each piece
//! ```
//!
//! Each is read from its first byte to its last, in reads of one size, by one thread into one buffer. CPU time
//! counts, for nobody waits for anything.

use std::fs::File as KernelFile;
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use rustix::fs::{FallocateFlags, fallocate};

use super::caches::check_warm;
use super::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use super::scratch::{Scratch, is_from, write_content};
use super::shared::Shared;
use super::store::Store;
use super::timing::alone;
use crate::sys::{HugeMemory, Mapped};

const METRICS: [Metric; 1] = [Metric::cost("cpu", "ns/read")];

const TMPFS: &str = "tmpfs 4K";
const TMPFS_HUGE: &str = "tmpfs huge";
const CACHED: &str = "cached file";
const MAPPED: &str = "cached file, mmap";
const COPY: &str = "bare copy";
const CLEAR: &str = "bare clear";

/// What stands where is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Data,
    Preallocated,
    Holes,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Data, Self::Preallocated, Self::Holes];

    fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Preallocated => "preallocated",
            Self::Holes => "holes",
        }
    }
}

/// Sizes of reads.
const SIZES: [(&str, usize); 3] = [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)];

/// A file of a tmpfs for each kind.
struct Peer([KernelFile; 3]);

impl Peer {
    fn new(store: &Store, bytes: u64) -> Result<Self, Unmeasured> {
        let data = || -> io::Result<KernelFile> {
            let mut file = store.file(bytes)?;
            write_content(&mut file, bytes)?;
            Ok(file)
        };
        let preallocated = || -> io::Result<KernelFile> {
            let file = store.file(bytes)?;
            fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
            Ok(file)
        };
        Ok(Self([data()?, preallocated()?, store.file(bytes)?]))
    }
}

/// The files, all as long.
struct Files {
    bytes: u64,
    tmpfs: Peer,
    tmpfs_huge: Result<Peer, Unmeasured>,
    cached: KernelFile,
    mapped: Mapped,
    copy: HugeMemory,
    _scratch: Scratch,
}

impl Files {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = settings.pick(if cfg!(debug_assertions) { 4 << 20 } else { 32 << 20 }, 512 << 20);
        // Data and what is preallocated, of two peers and of ours in two sizes of folios; the cached file, the copy.
        let wanted = 10 * bytes + (512 << 20);
        if quinion::process_limit() < wanted {
            return Err(Unmeasured::Missing(format!(
                "it takes {} MiB of memory, more than we may use; with --quick it takes less",
                wanted >> 20
            )));
        }
        let scratch = Scratch::new(&settings.folder, bytes)?;
        let cached = KernelFile::open(scratch.path())?;
        let mut copy = HugeMemory::new(bytes as usize)?;
        // Twice: the kernel may have let go of pages meanwhile that it had from the writing.
        cached.read_exact_at(&mut copy, 0)?;
        cached.read_exact_at(&mut copy, 0)?;
        check_warm(std::slice::from_ref(&cached))?;
        let mapped = Mapped::new(&cached, bytes as usize)?;
        let tmpfs_huge = Store::huge().and_then(|store| Peer::new(&store, bytes));
        let tmpfs = Peer::new(&Store::small(), bytes)?;
        Ok(Self { bytes, tmpfs, tmpfs_huge, cached, mapped, copy, _scratch: scratch })
    }
}

/// A read of the file of a kind: into a buffer, from a place.
type Read = fn(&Files, Kind, &mut [u8], u64) -> Result<(), Unmeasured>;

fn tmpfs(files: &Files, kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    Ok(files.tmpfs.0[kind as usize].read_exact_at(buffer, position)?)
}
fn tmpfs_huge(files: &Files, kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    let peer = files.tmpfs_huge.as_ref().map_err(Clone::clone)?;
    Ok(peer.0[kind as usize].read_exact_at(buffer, position)?)
}
fn cached(files: &Files, _kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    Ok(files.cached.read_exact_at(buffer, position)?)
}
fn mapped(files: &Files, _kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    buffer.copy_from_slice(&files.mapped[position as usize..][..buffer.len()]);
    Ok(())
}
fn bare_copy(files: &Files, _kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    buffer.copy_from_slice(&files.copy[position as usize..][..buffer.len()]);
    Ok(())
}
fn bare_clear(_files: &Files, _kind: Kind, buffer: &mut [u8], _position: u64) -> Result<(), Unmeasured> {
    buffer.fill(0);
    Ok(())
}

/// Every kind in every size.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let all = Kind::ALL.into_iter().flat_map(|kind| SIZES.map(|size| (kind, size)));
    all.map(|(kind, size)| case(&files, kind, size)).collect()
}

fn case(files: &Shared<Files>, kind: Kind, (name, bytes): (&'static str, usize)) -> Case {
    let files = files.clone();
    let case = Case::new(format!("{name}, {}", kind.name()), &METRICS, move || {
        let files = files.get()?;
        let of = |name, read| alternative(&files, name, kind, bytes, read);
        let mut ways = vec![of(TMPFS, tmpfs), of(TMPFS_HUGE, tmpfs_huge)];
        match kind {
            Kind::Data => ways.extend([of(CACHED, cached), of(MAPPED, mapped), of(COPY, bare_copy)]),
            Kind::Preallocated | Kind::Holes => ways.push(of(CLEAR, bare_clear)),
        }
        Ok(ways)
    });
    case.told("cpu", TMPFS).told("cpu", TMPFS_HUGE)
}

fn alternative(files: &Rc<Files>, name: &'static str, kind: Kind, bytes: usize, read: Read) -> Alternative {
    let files = Rc::clone(files);
    let run = move |_| read_all(&files, kind, bytes, |buffer, position| read(&files, kind, buffer, position));
    Alternative::new(name, run).excused(METRICS.len())
}

/// Nanoseconds that each read takes, of all the file.
fn read_all(
    files: &Files,
    kind: Kind,
    bytes: usize,
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), Unmeasured>,
) -> Result<Vec<f64>, Unmeasured> {
    let mut buffer = HugeMemory::new(bytes)?;
    // Written to, so that no read is the first that touches it; and what is not read shows.
    buffer.fill(0xa5);
    let mut ended: Result<(), Unmeasured> = Ok(());
    let spent = alone(|| {
        ended = (0..files.bytes).step_by(bytes).try_for_each(|position| {
            read(&mut buffer, position)?;
            black_box(&mut buffer[..]);
            Ok(())
        });
    });
    ended?;
    let last = files.bytes - bytes as u64;
    let is_right = match kind {
        Kind::Data => is_from(&buffer, last),
        Kind::Preallocated | Kind::Holes => buffer.iter().all(|&byte| byte == 0),
    };
    if !is_right {
        return Err(Unmeasured::Failed(format!("what was read is not what stands at {last}")));
    }
    Ok(vec![spent.cpu_ns / (files.bytes / bytes as u64) as f64])
}
