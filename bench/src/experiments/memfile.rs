//! Memfile: what does a read of a file in memory cost, beside tmpfs?
//!
//! ```text
//!   data           written from end to end             beside tmpfs of 4 KiB and of 2 MiB pages, a cached file of
//!   preallocated   there is memory, and no byte of it  the disk, that file mapped and copied from, and the bare copy
//!   holes          there is nothing                    beside tmpfs, and beside clearing the buffer
//!
//!   .., pinned     Quinion's without copying: pins of as many bytes, and a read of the first word of each piece
//!   .., order 0    Quinion's in folios of a page; else of up to 2 MiB
//! ```
//!
//! Each file is read from its first byte to its last, in reads of one size, by one thread into one buffer. CPU time is
//! measured, since no read waits.

use std::fs::File as KernelFile;
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use quinion::{Cache, MemFile, MemFileOptions};
use rustix::fs::{FallocateFlags, fallocate};

use crate::fixtures::caches::check_warm;
use crate::fixtures::scratch::{Scratch, is_from, put_content, write_content};
use crate::fixtures::shared::Shared;
use crate::fixtures::store::Store;
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{HugeMemory, Mapped};

const METRICS: [Metric; 1] = [Metric::cost("cpu", "ns/read")];

const OURS: &str = "quinion";
const OURS_PAGES: &str = "quinion, order 0";
const PINNED: &str = "quinion, pinned";
const TMPFS: &str = "tmpfs 4K";
const TMPFS_HUGE: &str = "tmpfs huge";
const CACHED: &str = "cached file";
const MAPPED: &str = "cached file, mmap";
const COPY: &str = "bare copy";
const CLEAR: &str = "bare clear";

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

/// Reads of one size, and the least ratios wanted of them beside tmpfs: for data, and for holes.
struct Size {
    name: &'static str,
    bytes: usize,
    data_goal: Option<f64>,
    hole_goal: Option<f64>,
}

const SIZES: [Size; 3] = [
    Size { name: "4 KiB", bytes: 4 << 10, data_goal: Some(1.5), hole_goal: Some(2.0) },
    Size { name: "64 KiB", bytes: 64 << 10, data_goal: None, hole_goal: None },
    Size { name: "1 MiB", bytes: 1 << 20, data_goal: Some(1.1), hole_goal: Some(1.0) },
];

impl Size {
    fn goal(&self, kind: Kind) -> Option<f64> {
        match kind {
            Kind::Data => self.data_goal,
            Kind::Preallocated => None,
            Kind::Holes => self.hole_goal,
        }
    }
}

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

struct Ours([MemFile; 3]);

impl Ours {
    fn new(bytes: u64, order: u8) -> Result<Self, Unmeasured> {
        let memory = 2 * bytes + bytes / 8 + (64 << 20);
        let cache = Cache::builder().memory(memory).folio_order_max(order).build()?;
        let file = |kind: Kind| cache.mem_file(MemFileOptions::new().size(bytes).name(kind.name()));
        let [mut data, preallocated, holes] =
            [file(Kind::Data)?, file(Kind::Preallocated)?, file(Kind::Holes)?];
        put_content(&mut data, bytes)?;
        preallocated.preallocate(0, bytes)?;
        Ok(Self([data, preallocated, holes]))
    }
}

struct Files {
    bytes: u64,
    ours: Ours,
    ours_pages: Ours,
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
        // Data and preallocated pages, of two peers and of Quinion in two sizes of folios; the cached file, the copy.
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
        // Read twice: the kernel may have reclaimed some of the pages that it cached by the writes.
        cached.read_exact_at(&mut copy, 0)?;
        cached.read_exact_at(&mut copy, 0)?;
        check_warm(std::slice::from_ref(&cached))?;
        let mapped = Mapped::new(&cached, bytes as usize)?;
        let tmpfs_huge = Store::huge().and_then(|store| Peer::new(&store, bytes));
        let tmpfs = Peer::new(&Store::small(), bytes)?;
        let (ours, ours_pages) = (Ours::new(bytes, 9)?, Ours::new(bytes, 0)?);
        Ok(Self { bytes, ours, ours_pages, tmpfs, tmpfs_huge, cached, mapped, copy, _scratch: scratch })
    }
}

type Read = fn(&Files, Kind, &mut [u8], u64) -> Result<(), Unmeasured>;

fn ours(files: &Files, kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    full(files.ours.0[kind as usize].read_at(buffer, position)?, buffer)
}
fn ours_pages(files: &Files, kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    full(files.ours_pages.0[kind as usize].read_at(buffer, position)?, buffer)
}
/// Pins as many bytes as the buffer holds, and reads the first word of each chunk. The buffer receives the last one, so
/// that the reads are not optimized away.
fn pinned(files: &Files, kind: Kind, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
    let pinned = files.ours.0[kind as usize].pin(position, buffer.len())?;
    let (mut bytes, mut words) = (0, 0);
    for chunk in pinned.chunks() {
        let word = *chunk.first_chunk().expect("a chunk is a page at least");
        words |= u64::from_le_bytes(word);
        if bytes == 0 {
            buffer[..8].copy_from_slice(&word);
        }
        bytes += chunk.len();
    }
    black_box(words);
    full(bytes, buffer)
}
fn full(bytes: usize, buffer: &[u8]) -> Result<(), Unmeasured> {
    if bytes == buffer.len() {
        return Ok(());
    }
    Err(Unmeasured::Failed(format!("a read gave {bytes} of {} bytes", buffer.len())))
}
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

pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let all = Kind::ALL.into_iter().flat_map(|kind| SIZES.iter().map(move |size| (kind, size)));
    all.map(|(kind, size)| case(&files, kind, size)).collect()
}

fn case(files: &Shared<Files>, kind: Kind, size: &Size) -> Case {
    let (files, bytes, goal) = (files.clone(), size.bytes, size.goal(kind));
    let case = Case::new(format!("{}, {}", size.name, kind.name()), &METRICS, move || {
        let files = files.get()?;
        let of = |name, read| alternative(&files, name, SequentialReads { kind, bytes }, read);
        let mut ways = vec![of(OURS, ours), of(OURS_PAGES, ours_pages), of(PINNED, pinned)];
        ways.extend([of(TMPFS, tmpfs), of(TMPFS_HUGE, tmpfs_huge)]);
        match kind {
            Kind::Data => ways.extend([of(CACHED, cached), of(MAPPED, mapped), of(COPY, bare_copy)]),
            Kind::Preallocated | Kind::Holes => ways.push(of(CLEAR, bare_clear)),
        }
        Ok(ways)
    });
    let case = case
        .compare("cpu", OURS, TMPFS)
        .goal(goal)
        .compare("cpu", OURS, TMPFS_HUGE)
        .goal(goal)
        .compare("cpu", OURS_PAGES, TMPFS)
        .goal(goal)
        .compare("cpu", OURS_PAGES, TMPFS_HUGE)
        .compare("cpu", PINNED, TMPFS_HUGE);
    match kind {
        Kind::Data => {
            let case = case.compare("cpu", OURS, CACHED).compare("cpu", OURS, MAPPED);
            case.bound("cpu", OURS, COPY)
        }
        Kind::Preallocated | Kind::Holes => case.bound("cpu", OURS, CLEAR),
    }
}

/// Reads of a whole file of one kind, each of `bytes` bytes.
#[derive(Clone, Copy, Debug)]
struct SequentialReads {
    kind: Kind,
    bytes: usize,
}

fn alternative(files: &Rc<Files>, name: &'static str, reads: SequentialReads, read: Read) -> Alternative {
    let files = Rc::clone(files);
    let run = move |_| reads.run(&files, |buffer, position| read(&files, reads.kind, buffer, position));
    Alternative::new(name, run).excused(METRICS.len())
}

impl SequentialReads {
    fn run(
        self,
        files: &Files,
        mut read: impl FnMut(&mut [u8], u64) -> Result<(), Unmeasured>,
    ) -> Result<Vec<f64>, Unmeasured> {
        let Self { kind, bytes } = self;
        let mut buffer = HugeMemory::new(bytes)?;
        // The buffer is written first, so that no read is the first to touch it; and bytes that are not read show.
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
            Kind::Preallocated | Kind::Holes => buffer[..8] == [0; 8],
        };
        if !is_right {
            return Err(Unmeasured::Failed(format!("what was read is not what stands at {last}")));
        }
        Ok(vec![spent.cpu_ns / (files.bytes / bytes as u64) as f64])
    }
}
