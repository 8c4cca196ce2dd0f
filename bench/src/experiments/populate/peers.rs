//! Peers: all the ways by which the kernel lets memory be filled, or be mapped once it is.
//!
//! ```text
//!   write         a file in memory, by chunks: no fault, no page table
//!   mmap+memcpy   the same file, by touching it: a fault for each page
//!   UFFDIO_COPY   as a page-fault server does it, ahead of the faults
//!   UFFDIO_CONTINUE, MAP_PRIVATE, MAP_SHARED      what is filled already, and only mapped: no bytes are copied,
//!                 but where a write makes a page private
//! ```
//!
//! Each makes its memory anew in each repetition, empty, and frees it afterwards; neither is timed. They copy from one
//! large page that stays near the processor, unless the name says "from snap", which is a file in memory as long as
//! what is filled.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::word_at;
use crate::fixtures::store::{Store, free_hugetlb_pages};
use crate::harness::Unmeasured;
use crate::harness::timing::{Spent, alone, together};
use crate::sys::{Absent, HugeMemory, PageKind, Region, Uffd};

pub const SOURCE_BYTES: usize = 2 << 20;
const STEP: usize = SOURCE_BYTES;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    Anonymous,
    AnonymousHuge,
    Memfd,
    TmpfsHuge,
    Hugetlb,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Writes of so many bytes, by so many threads.
    Write(usize, usize),
    Copy,
    CopyOfSnap,
    /// The kernel fills pages for a caller that would have waited: so many bytes at a time.
    Uffd(usize),
    UffdOfSnap(usize),
    /// Pages that are filled already are mapped, so many bytes at a time.
    Continue(usize),
    /// Pages that are filled already are read, or written, through a private mapping; or read through a shared one.
    ReadPrivate,
    WritePrivate,
    ReadShared,
}

#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub name: &'static str,
    pub on: On,
    pub way: Way,
}

impl Peer {
    pub fn copies(&self) -> bool {
        !matches!(self.way, Way::Continue(_) | Way::ReadPrivate | Way::ReadShared)
    }
}

const fn peer(name: &'static str, on: On, way: Way) -> Peer {
    Peer { name, on, way }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

pub const BEST: &str = "write tmpfs huge 1M";
pub const BEST_BY_TWO: &str = "write tmpfs huge 1M, 2 threads";
pub const UFFD_COPY: &str = "UFFDIO_COPY anon 4K";

pub const PEERS: [Peer; 27] = [
    peer("write memfd 4K", On::Memfd, Way::Write(4 * KIB, 1)),
    peer("write memfd 64K", On::Memfd, Way::Write(64 * KIB, 1)),
    peer("write memfd 1M", On::Memfd, Way::Write(MIB, 1)),
    peer("write tmpfs huge 4K", On::TmpfsHuge, Way::Write(4 * KIB, 1)),
    peer(BEST, On::TmpfsHuge, Way::Write(MIB, 1)),
    peer(BEST_BY_TWO, On::TmpfsHuge, Way::Write(MIB, 2)),
    peer("mmap+memcpy memfd", On::Memfd, Way::Copy),
    peer("mmap+memcpy shmem THP", On::TmpfsHuge, Way::Copy),
    peer("mmap+memcpy MFD_HUGETLB", On::Hugetlb, Way::Copy),
    peer("memcpy anon 4K", On::Anonymous, Way::Copy),
    peer("memcpy anon THP", On::AnonymousHuge, Way::Copy),
    peer(UFFD_COPY, On::Anonymous, Way::Uffd(4 * KIB)),
    peer("UFFDIO_COPY anon 64K", On::Anonymous, Way::Uffd(64 * KIB)),
    peer("UFFDIO_COPY anon 2M", On::Anonymous, Way::Uffd(2 * MIB)),
    peer("UFFDIO_COPY memfd 4K", On::Memfd, Way::Uffd(4 * KIB)),
    peer("UFFDIO_COPY memfd 2M", On::Memfd, Way::Uffd(2 * MIB)),
    peer("UFFDIO_COPY MFD_HUGETLB 2M", On::Hugetlb, Way::Uffd(2 * MIB)),
    peer("UFFDIO_COPY anon 2M from snap", On::Anonymous, Way::UffdOfSnap(2 * MIB)),
    peer("mmap+memcpy shmem THP from snap", On::TmpfsHuge, Way::CopyOfSnap),
    peer("UFFDIO_CONTINUE memfd 4K", On::Memfd, Way::Continue(4 * KIB)),
    peer("UFFDIO_CONTINUE memfd 64K", On::Memfd, Way::Continue(64 * KIB)),
    peer("UFFDIO_CONTINUE memfd 2M", On::Memfd, Way::Continue(2 * MIB)),
    peer("UFFDIO_CONTINUE shmem THP 2M", On::TmpfsHuge, Way::Continue(2 * MIB)),
    peer("UFFDIO_CONTINUE MFD_HUGETLB 2M", On::Hugetlb, Way::Continue(2 * MIB)),
    peer("MAP_PRIVATE snap, read touch", On::Memfd, Way::ReadPrivate),
    peer("MAP_PRIVATE snap, write touch", On::Memfd, Way::WritePrivate),
    peer("MAP_SHARED populated memfd, read touch", On::Memfd, Way::ReadShared),
];

pub struct PopulateFixture {
    pub bytes: u64,
    /// A large page of bytes that hold their place in it.
    pub source: HugeMemory,
    /// A file in memory that is filled from end to end with what the source has, again and again.
    pub snap: File,
    memfd: Store,
    huge: Result<Store, Unmeasured>,
    hugetlb: Store,
}

impl PopulateFixture {
    /// One of `bytes` bytes to fill, a multiple of 2 MiB.
    pub fn new(bytes: u64) -> Result<Self, Unmeasured> {
        let mut source = HugeMemory::new(SOURCE_BYTES)?;
        for (word, at) in source.chunks_exact_mut(8).zip((0..).step_by(8)) {
            word.copy_from_slice(&word_at(at).to_ne_bytes());
        }
        let memfd = Store::memfd();
        let snap = memfd.file(bytes)?;
        write(&snap, &source, 0..bytes, STEP)?;
        Ok(Self { bytes, source, snap, memfd, huge: Store::huge(), hugetlb: Store::hugetlb() })
    }

    /// Has `peer` fill its memory, and checks the bytes.
    pub fn fill(&self, peer: &Peer) -> Result<Spent, Unmeasured> {
        match peer.way {
            Way::Write(chunk, threads) => self.by_writes(peer.on, chunk, threads),
            Way::Copy => self.by_copies(peer.on, |at| &self.source[at as usize % SOURCE_BYTES..]),
            Way::CopyOfSnap => {
                let snap = crate::sys::Mapped::new(&self.snap, self.bytes as usize)?;
                self.by_copies(peer.on, |at| &snap[at as usize..])
            }
            Way::Uffd(unit) => self.by_uffd(peer.on, unit, |at| &self.source[at as usize % SOURCE_BYTES..]),
            Way::UffdOfSnap(unit) => {
                let snap = crate::sys::Mapped::new(&self.snap, self.bytes as usize)?;
                self.by_uffd(peer.on, unit, |at| &snap[at as usize..])
            }
            Way::Continue(unit) => self.by_continue(peer.on, unit),
            Way::ReadPrivate => self.by_reads(Region::private(&self.snap, self.bytes as usize)?),
            Way::ReadShared => self.by_reads(Region::shared(&self.snap, self.bytes as usize)?),
            Way::WritePrivate => self.by_private_writes(),
        }
    }

    fn file(&self, on: On) -> Result<File, Unmeasured> {
        let store = match on {
            On::TmpfsHuge => self.huge.as_ref().map_err(Clone::clone)?,
            On::Hugetlb => {
                let wanted = self.bytes / SOURCE_BYTES as u64;
                let free = free_hugetlb_pages();
                if free < wanted {
                    return Err(Unmeasured::Missing(format!(
                        "{free} pages of 2 MiB are reserved and free, and it takes {wanted}: write that to \
                         /proc/sys/vm/nr_hugepages"
                    )));
                }
                &self.hugetlb
            }
            On::Memfd | On::Anonymous | On::AnonymousHuge => &self.memfd,
        };
        Ok(store.file(self.bytes)?)
    }

    fn region(&self, on: On) -> Result<Region, Unmeasured> {
        let len = self.bytes as usize;
        Ok(match on {
            On::Anonymous => Region::anonymous(len, PageKind::Small)?,
            On::AnonymousHuge => Region::anonymous(len, PageKind::Huge)?,
            On::Memfd | On::TmpfsHuge | On::Hugetlb => Region::shared(&self.file(on)?, len)?,
        })
    }

    fn by_writes(&self, on: On, chunk: usize, threads: usize) -> Result<Spent, Unmeasured> {
        let file = self.file(on)?;
        let share = self.bytes / threads as u64;
        let part = |thread: usize| {
            let from = thread as u64 * share;
            write(&file, &self.source, from..from + share, chunk).expect("there is memory for it");
        };
        let spent = match threads {
            1 => alone(|| part(0)),
            _ => together(threads, 1, part, |_| {}),
        };
        let mut word = [0; 8];
        self.check(|at| {
            file.read_exact_at(&mut word, at).expect("it is as long");
            u64::from_ne_bytes(word)
        })?;
        Ok(spent)
    }

    fn by_copies<'s>(&self, on: On, source: impl Fn(u64) -> &'s [u8]) -> Result<Spent, Unmeasured> {
        let mut region = self.region(on)?;
        let spent = alone(|| {
            for at in (0..self.bytes).step_by(STEP) {
                region.fill(at as usize, &source(at)[..STEP]);
            }
        });
        self.check(|at| region.word(at as usize))?;
        Ok(spent)
    }

    fn by_uffd<'s>(
        &self,
        on: On,
        unit: usize,
        source: impl Fn(u64) -> &'s [u8],
    ) -> Result<Spent, Unmeasured> {
        let region = self.region(on)?;
        let uffd = faults_of(&region, Absent::Missing)?;
        let spent = timed(|| {
            (0..self.bytes).step_by(unit).try_for_each(|at| uffd.copy(at as usize, &source(at)[..unit]))
        })?;
        self.check(|at| region.word(at as usize))?;
        Ok(spent)
    }

    fn by_continue(&self, on: On, unit: usize) -> Result<Spent, Unmeasured> {
        let len = self.bytes as usize;
        let region = if on == On::Memfd {
            Region::shared(&self.snap, len)?
        } else {
            let file = self.file(on)?;
            let mut filled = Region::shared(&file, len)?;
            (0..len).step_by(STEP).for_each(|at| filled.fill(at, &self.source));
            Region::shared(&file, len)?
        };
        let uffd = faults_of(&region, Absent::Minor)?;
        let spent = timed(|| (0..len).step_by(unit).try_for_each(|at| uffd.map(at, unit)))?;
        self.check(|at| region.word(at as usize))?;
        Ok(spent)
    }

    fn by_reads(&self, region: Region) -> Result<Spent, Unmeasured> {
        let spent = alone(|| {
            for at in (0..region.len()).step_by(PAGE) {
                black_box(region.word(at));
            }
        });
        self.check(|at| region.word(at as usize))?;
        Ok(spent)
    }

    fn by_private_writes(&self) -> Result<Spent, Unmeasured> {
        let mut region = Region::private(&self.snap, self.bytes as usize)?;
        let spent = alone(|| {
            for at in (0..region.len()).step_by(PAGE) {
                region.set_word(at, word_at((at % SOURCE_BYTES) as u64));
            }
        });
        self.check(|at| region.word(at as usize))?;
        Ok(spent)
    }

    /// Checks some places: each has what the source has.
    pub fn check(&self, mut word: impl FnMut(u64) -> u64) -> Result<(), Unmeasured> {
        let places = (0..16).map(|nth| self.bytes / 16 * nth).chain([self.bytes - PAGE as u64]);
        for at in places {
            let at = at / PAGE as u64 * PAGE as u64;
            if word(at) != word_at(at % SOURCE_BYTES as u64) {
                return Err(Unmeasured::Failed(format!(
                    "at byte {at} stands something else than was put there"
                )));
            }
        }
        Ok(())
    }
}

/// The faults of `region`, or what would help.
pub fn faults_of(region: &Region, absent: Absent) -> Result<Uffd, Unmeasured> {
    Uffd::of(region, absent).map_err(|error| {
        Unmeasured::Missing(format!(
            "userfaultfd is refused: {error}; it takes root, or 1 in /proc/sys/vm/unprivileged_userfaultfd, and for \
             minor faults a kernel of 5.14 or later"
        ))
    })
}

pub fn timed(work: impl FnOnce() -> io::Result<()>) -> Result<Spent, Unmeasured> {
    let mut ended = Ok(());
    let spent = alone(|| ended = work());
    ended?;
    Ok(spent)
}

fn write(file: &File, source: &[u8], range: Range<u64>, chunk: usize) -> io::Result<()> {
    for at in range.step_by(chunk) {
        let start = at as usize % SOURCE_BYTES;
        file.write_all_at(&source[start..start + chunk], at)?;
    }
    Ok(())
}
