//! Resident: what does it cost to give all of a snapshot that is in memory to a machine?
//!
//! ```text
//!   image, CONTINUE    Quinion's: its file is mapped, privately, and CONTINUE fills the page table   nothing is copied
//!   memfd, CONTINUE    the same of a file in memory that the kernel has: the bound
//!   UFFDIO_COPY        the bytes are copied to memory that is the machine's alone
//!   MAP_PRIVATE        the kernel's own faults, of a file that it has cached
//! ```
//!
//! In units of 4 KiB, 64 KiB and 2 MiB, ahead of the guest. The guest's touches are timed too: it should find all of it
//! mapped.

use std::fs::File;
use std::rc::Rc;

use quinion::{Cache, Image};

use super::guest::touch_all;
use super::{REPEAT_OTHERS, pick};
use crate::experiments::populate::{faults_of, timed};
use crate::fixtures::scratch::{Scratch, write_content};
use crate::fixtures::shared::Shared;
use crate::fixtures::store::Store;
use crate::harness::machine::check_memory;
use crate::harness::timing::Spent;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{Absent, Mapped, PageKind, Region};

const METRICS: [Metric; 2] = [Metric::cost("time", "ms"), Metric::cost("touch", "ms")];

/// A unit, and what fills it: Quinion, the peer, and what bounds both.
struct Unit {
    bytes: usize,
    ours: &'static str,
    copy: &'static str,
    memfd: &'static str,
    /// How many times as fast as the copy Quinion should be.
    goal: f64,
}

const UNITS: [Unit; 3] = [
    Unit {
        bytes: 4 << 10,
        ours: "image, CONTINUE 4K",
        copy: "UFFDIO_COPY 4K",
        memfd: "memfd, CONTINUE 4K",
        goal: 2.5,
    },
    Unit {
        bytes: 64 << 10,
        ours: "image, CONTINUE 64K",
        copy: "UFFDIO_COPY 64K",
        memfd: "memfd, CONTINUE 64K",
        goal: 4.0,
    },
    Unit {
        bytes: 2 << 20,
        ours: "image, CONTINUE 2M",
        copy: "UFFDIO_COPY 2M",
        memfd: "memfd, CONTINUE 2M",
        goal: 4.0,
    },
];

const MAP_PRIVATE: &str = "MAP_PRIVATE of a cached file";

/// Quinion's without anything done ahead, and the peer.
const IMAGE: &str = "image, MAP_PRIVATE";

/// The snapshot, in all memories that it is given from.
struct Resident {
    image: Image,
    memfd: File,
    bytes_of_memfd: Mapped,
    cached: File,
    bytes: usize,
    _scratch: Scratch,
}

impl Resident {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = pick(settings, 8 << 20, 128 << 20, 1 << 30);
        check_memory(6 * bytes + (512 << 20))?;
        let scratch = Scratch::new(&settings.folder, bytes)?;
        let mut memfd = Store::memfd().file(bytes)?;
        write_content(&mut memfd, bytes)?;
        let len = bytes as usize;
        let bytes_of_memfd = Mapped::new(&memfd, len)?;
        let cached = File::open(scratch.path())?;
        let image = image(&scratch)?;
        Ok(Self { image, memfd, bytes_of_memfd, cached, bytes: len, _scratch: scratch })
    }
}

fn image(scratch: &Scratch) -> Result<Image, Unmeasured> {
    let cache = Cache::builder().memory(scratch.bytes() + scratch.bytes() / 8 + (64 << 20)).build()?;
    let image = Image::from_snapshot(&cache, scratch.path())?;
    image.populate()?;
    Ok(image)
}

pub fn case(settings: &Settings) -> Case {
    let resident = Shared::new(settings, Resident::new);
    let mib = pick(settings, 8 << 20, 128 << 20, 1 << 30) >> 20;
    let case = Case::new(format!("resident image, {mib} MiB"), &METRICS, move || {
        let resident = resident.get()?;
        let of = |name, run: Run, unit| alternative(&resident, name, run, unit);
        let units = UNITS.iter().flat_map(|unit| {
            [
                of(unit.ours, continued_image, unit.bytes),
                of(unit.copy, copied, unit.bytes),
                of(unit.memfd, continued, unit.bytes),
            ]
        });
        Ok(units.chain([of(IMAGE, map_image, 0), of(MAP_PRIVATE, map_private, 0)]).collect())
    });
    let rows = |case: Case, unit: &Unit| {
        case.compare("time", unit.ours, unit.copy).goal(unit.goal).bound("time", unit.ours, unit.memfd)
    };
    UNITS.iter().fold(case, rows).usually(REPEAT_OTHERS).compare("touch", IMAGE, MAP_PRIVATE)
}

type Run = fn(&Resident, usize) -> Result<(Spent, Region), Unmeasured>;

fn alternative(resident: &Rc<Resident>, name: &'static str, run: Run, unit: usize) -> Alternative {
    let resident = Rc::clone(resident);
    let run = move |_| {
        let (filled, region) = run(&resident, unit)?;
        let start = std::time::Instant::now();
        touch_all(&region)?;
        Ok(vec![filled.elapsed_ns / 1e6, start.elapsed().as_secs_f64() * 1e3])
    };
    Alternative::new(name, run).excused(METRICS.len())
}

fn copied(resident: &Resident, unit: usize) -> Result<(Spent, Region), Unmeasured> {
    let region = Region::anonymous(resident.bytes, PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    let spent = timed(|| {
        let chunks = resident.bytes_of_memfd.chunks_exact(unit);
        (0..).step_by(unit).zip(chunks).try_for_each(|(at, bytes)| uffd.copy(at, bytes))
    })?;
    Ok((spent, region))
}

fn continued(resident: &Resident, unit: usize) -> Result<(Spent, Region), Unmeasured> {
    mapped(Region::private(&resident.memfd, resident.bytes)?, unit)
}

fn continued_image(resident: &Resident, unit: usize) -> Result<(Spent, Region), Unmeasured> {
    mapped(Region::private(resident.image.fd(), resident.bytes)?, unit)
}

fn map_image(resident: &Resident, _unit: usize) -> Result<(Spent, Region), Unmeasured> {
    Ok((Spent::default(), Region::private(resident.image.fd(), resident.bytes)?))
}

fn mapped(region: Region, unit: usize) -> Result<(Spent, Region), Unmeasured> {
    let uffd = faults_of(&region, Absent::Minor)?;
    let spent = timed(|| (0..region.len()).step_by(unit).try_for_each(|at| uffd.map(at, unit)))?;
    Ok((spent, region))
}

/// Does nothing ahead: all of it is the guest's own faults.
fn map_private(resident: &Resident, _unit: usize) -> Result<(Spent, Region), Unmeasured> {
    crate::fixtures::caches::check_warm(std::slice::from_ref(&resident.cached))?;
    Ok((Spent::default(), Region::private(&resident.cached, resident.bytes)?))
}
