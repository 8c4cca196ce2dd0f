//! Snapshot: how long does a guest take to touch all of a snapshot in a file, page by page, starting from nothing?
//!
//! ```text
//!   cold   nothing of the file is in memory, Quinion's or the kernel's      warm   all of it is
//!
//!   server, COPY        Quinion's: a page-fault server, and a guest that hands its faults over as Firecracker does
//!   server, CONTINUE    the same, and the guest maps the server's image instead of being copied to
//!   server, replayed    by copies: what the guest touched at its last restore is copied ahead of its faults
//!
//!   MAP_PRIVATE         the kernel's own way: the file is mapped, and read ahead as it likes
//!   handler, COPY 4K    as the example handlers do it: the file is mapped, and each fault copies a page from there
//!   eager, COPY 2M      all of the file is copied before the guest begins
//!   raw io_uring        no restore: the file is read past the kernel's cache, as fast as that can be
//! ```
//!
//! In the cold cases the bytes that the device reads are counted, for the process: a page that is read twice, or read
//! ahead and never touched, shows there. CPU time is that of the whole process, the faulting threads and the server
//! together. The server and its cache start and end with each restore. In the warm cases the cache is older than the
//! server, and the image's server older than the guest.

use std::cell::OnceCell;
use std::fs::File;
use std::rc::Rc;
use std::time::Instant;

use quinion_vm::{FaultRecord, RestoreOptions};

use super::guest::{handled, touch_all};
use super::host::{Host, NewGuest, handing_out_the_image};
use super::vmm::Guest;
use super::{Before, REPEAT, pick};
use crate::experiments::cold::no_ring;
use crate::experiments::populate::faults_of;
use crate::fixtures::caches::{Drops, check_warm};
use crate::fixtures::pages::PAGE;
use crate::fixtures::shared::Shared;
use crate::harness::machine::{check_memory, passed, process_bytes};
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{Absent, Mapped, PageKind, RawReader, Region, Waiting};

const DEVICE: &str = "device (process)";
const METRICS: [Metric; 3] =
    [Metric::cost("time", "s"), Metric::cost("cpu", "s"), Metric::cost(DEVICE, "bytes per byte")];

const COPY: &str = "server, COPY";
const CONTINUE: &str = "server, CONTINUE";
const REPLAYED: &str = "server, replayed";
const MAP_PRIVATE: &str = "MAP_PRIVATE";
const HANDLER: &str = "handler, COPY 4K";
const EAGER: &str = "eager, COPY 2M";
/// The bound of the cold cases.
const RAW: &str = "raw io_uring";
const RAW_DEPTH: usize = 4;
const UNIT: usize = 2 << 20;

struct Snapshot {
    host: Host,
    file: File,
    drops: Drops,
    /// The order in which a guest touches it, recorded once.
    record: OnceCell<FaultRecord>,
}

impl Snapshot {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = bytes(settings);
        // The guest's memory, the kernel's, and Quinion's cold and warm.
        check_memory(4 * bytes + (512 << 20))?;
        let host = Host::new(settings, bytes)?;
        let file = File::open(host.scratch.path())?;
        Ok(Self { host, file, drops: Drops::of(settings), record: OnceCell::new() })
    }

    fn len(&self) -> usize {
        self.host.len()
    }

    fn prepare(&self, way: &str, before: Before) -> Result<(), Unmeasured> {
        if way == REPLAYED && self.record.get().is_none() {
            let mut options = RestoreOptions::new();
            options.record = true;
            let record = served(self, Before::Warm, options, Guest::copied)?;
            let record = record.ok_or_else(|| Unmeasured::Failed("nothing was recorded".to_owned()))?;
            self.record.get_or_init(|| record);
        }
        match (before, way) {
            (Before::Warm, CONTINUE) => self.host.serve_resident(handing_out_the_image(), |_| Ok(()))?,
            (Before::Warm, _) => drop(self.host.warm_cache()?),
            (Before::Cold, _) => {}
        }
        let files = std::slice::from_ref(&self.file);
        match before {
            Before::Cold => self.drops.make_cold(files),
            Before::Warm => {
                let mapped = Mapped::new(&self.file, self.len())?;
                let sum = mapped.iter().step_by(PAGE).fold(0_u64, |sum, &byte| sum + u64::from(byte));
                std::hint::black_box(sum);
                check_warm(files)
            }
        }
    }
}

fn bytes(settings: &Settings) -> u64 {
    pick(settings, 8 << 20, 256 << 20, 1 << 30)
}

pub fn cases(settings: &Settings) -> [Case; 2] {
    let snapshot = Shared::new(settings, Snapshot::new);
    [("cold", Before::Cold), ("warm", Before::Warm)].map(|(name, before)| {
        let snapshot = snapshot.clone();
        let name = format!("snapshot file of {} MiB, {name}", bytes(settings) >> 20);
        let case = Case::new(name, &METRICS, move || {
            let snapshot = snapshot.get()?;
            let bound: &[(&str, Run)] = if before == Before::Cold { &[(RAW, raw)] } else { &[] };
            let all = OURS.iter().chain(&PEERS).chain(bound);
            Ok(all.map(|(name, run)| alternative(&snapshot, name, *run, before)).collect())
        });
        let pairs = OURS.iter().flat_map(|(ours, _)| PEERS.map(|(peer, _)| (*ours, peer)));
        let case = OURS
            .iter()
            .filter(|_| before == Before::Cold)
            .fold(case, |case, (ours, _)| case.bound("time", ours, RAW, None));
        pairs.fold(case.usually(REPEAT).without_warm_up(), |case, (ours, peer)| {
            let case = case.compare("time", ours, peer, None).compare("cpu", ours, peer, None);
            if before == Before::Cold { case.compare(DEVICE, ours, peer, None) } else { case }
        })
    })
}

type Run = fn(&Snapshot, Before) -> Result<(), Unmeasured>;

const OURS: [(&str, Run); 3] = [
    (COPY, |snapshot, before| served(snapshot, before, RestoreOptions::new(), Guest::copied).map(drop)),
    (CONTINUE, mapped),
    (REPLAYED, replayed),
];
const PEERS: [(&str, Run); 3] = [(MAP_PRIVATE, map_private), (HANDLER, handler), (EAGER, eager)];

fn served(
    snapshot: &Snapshot,
    before: Before,
    options: RestoreOptions,
    guest: NewGuest,
) -> Result<Option<FaultRecord>, Unmeasured> {
    let cache = match before {
        Before::Cold => snapshot.host.cache()?,
        Before::Warm => snapshot.host.warm_cache()?,
    };
    let ((), record) = snapshot.host.serve(&cache, options, guest, |region| touch_all(region))?;
    Ok(record)
}

fn mapped(snapshot: &Snapshot, before: Before) -> Result<(), Unmeasured> {
    match before {
        Before::Cold => served(snapshot, before, handing_out_the_image(), Guest::mapped).map(drop),
        Before::Warm => snapshot.host.serve_resident(handing_out_the_image(), |region| touch_all(region)),
    }
}

fn replayed(snapshot: &Snapshot, before: Before) -> Result<(), Unmeasured> {
    let mut options = RestoreOptions::new();
    options.replay = snapshot.record.get().cloned();
    served(snapshot, before, options, Guest::copied).map(drop)
}

fn alternative(snapshot: &Rc<Snapshot>, name: &'static str, run: Run, before: Before) -> Alternative {
    let snapshot = Rc::clone(snapshot);
    let run = move |_| {
        snapshot.prepare(name, before)?;
        let device = process_bytes();
        let (start, cpu) = (Instant::now(), process_cpu_ns());
        run(&snapshot, before)?;
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), process_cpu_ns() - cpu);
        let device = passed(device, process_bytes()) / snapshot.len() as f64;
        Ok(vec![seconds, cpu / 1e9, device])
    };
    Alternative::new(name, run).excused(METRICS.len())
}

fn map_private(snapshot: &Snapshot, _before: Before) -> Result<(), Unmeasured> {
    touch_all(&Region::private(&snapshot.file, snapshot.len())?)
}

fn raw(snapshot: &Snapshot, _before: Before) -> Result<(), Unmeasured> {
    let (file, mut bytes) = (snapshot.host.scratch.open_direct()?, 0);
    let mut places = (0..snapshot.len() as u64).step_by(UNIT);
    let reader = RawReader::new(&file, UNIT, RAW_DEPTH).map_err(|error| no_ring(&error))?;
    reader.read_all(|| places.next(), |piece, _| bytes += piece.len())?;
    if bytes == snapshot.len() {
        return Ok(());
    }
    Err(Unmeasured::Failed(format!("{bytes} of {} bytes were read", snapshot.len())))
}

fn handler(snapshot: &Snapshot, _before: Before) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    let copy = |uffd: &crate::sys::Uffd, at: usize| uffd.copy(at, &source[at..at + PAGE]);
    handled(&uffd, Waiting::Asleep, copy, || touch_all(&region))
}

fn eager(snapshot: &Snapshot, _before: Before) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    for (at, bytes) in (0..).step_by(UNIT).zip(source.chunks(UNIT)) {
        uffd.copy(at, bytes)?;
    }
    touch_all(&region)
}
