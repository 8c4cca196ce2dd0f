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
//!
//!   touched      all pages in their order; or a fifth of them: in runs of 256 KiB that lie anywhere, or scattered
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

use super::guest::{Touched, handled};
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
    /// The order in which a guest touches it, recorded once for each of [`Touched`].
    records: [OnceCell<FaultRecord>; 3],
}

impl Snapshot {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = bytes(settings);
        // The guest's memory, the kernel's, and Quinion's cold and warm.
        check_memory(4 * bytes + (512 << 20))?;
        let host = Host::new(settings, bytes)?;
        let file = File::open(host.scratch.path())?;
        Ok(Self { host, file, drops: Drops::of(settings), records: Default::default() })
    }

    fn len(&self) -> usize {
        self.host.len()
    }

    fn prepare(&self, way: &str, Situation { before, touched }: Situation) -> Result<(), Unmeasured> {
        let record = &self.records[touched as usize];
        if way == REPLAYED && record.get().is_none() {
            let mut options = RestoreOptions::new();
            options.record = true;
            let recorded = served(self, Situation { before: Before::Warm, touched }, options, Guest::copied)?;
            let recorded = recorded.ok_or_else(|| Unmeasured::Failed("nothing was recorded".to_owned()))?;
            record.get_or_init(|| recorded);
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

/// The part of the snapshot that is in memory, and the part that the guest wants.
#[derive(Clone, Copy)]
struct Situation {
    before: Before,
    touched: Touched,
}

const SITUATIONS: [(&str, Situation); 4] = [
    ("cold", Situation { before: Before::Cold, touched: Touched::All }),
    ("warm", Situation { before: Before::Warm, touched: Touched::All }),
    ("cold, 20 % in runs", Situation { before: Before::Cold, touched: Touched::Runs }),
    ("cold, 20 % scattered", Situation { before: Before::Cold, touched: Touched::Scattered }),
];

pub fn cases(settings: &Settings) -> [Case; 4] {
    let snapshot = Shared::new(settings, Snapshot::new);
    SITUATIONS.map(|(name, situation)| {
        let snapshot = snapshot.clone();
        let name = format!("snapshot file of {} MiB, {name}", bytes(settings) >> 20);
        let (ours, peers) = ways(situation);
        let has_bound = situation.before == Before::Cold && situation.touched == Touched::All;
        let case = Case::new(name, &METRICS, move || {
            let snapshot = snapshot.get()?;
            let bound: &[(&str, Run)] = if has_bound { &[(RAW, raw)] } else { &[] };
            let all = ours.iter().chain(peers).chain(bound);
            Ok(all.map(|(name, run)| alternative(&snapshot, name, *run, situation)).collect())
        });
        let case = ours
            .iter()
            .filter(|_| has_bound)
            .fold(case, |case, (ours, _)| case.bound("time", ours, RAW))
            .compare("time", REPLAYED, COPY)
            .goal(1.0);
        let pairs = ours.iter().flat_map(|(ours, _)| peers.iter().map(|(peer, _)| (*ours, *peer)));
        pairs.fold(case.usually(REPEAT).without_warm_up(), |case, (ours, peer)| {
            let goal = goal(situation, ours).filter(|_| peer == MAP_PRIVATE);
            let case = case.compare("time", ours, peer).goal(goal).compare("cpu", ours, peer);
            let is_cold = situation.before == Before::Cold;
            if is_cold { case.compare(DEVICE, ours, peer) } else { case }
        })
    })
}

/// The least speed, beside `MAP_PRIVATE`.
fn goal(Situation { before, touched }: Situation, ours: &str) -> Option<f64> {
    match (before, touched, ours) {
        (Before::Cold, Touched::All, COPY) => Some(0.9),
        (Before::Cold, Touched::Scattered, REPLAYED) => Some(2.0),
        (Before::Warm, Touched::All, COPY) => Some(0.3),
        (Before::Warm, Touched::All, CONTINUE) => Some(0.9),
        _ => None,
    }
}

/// A copy of all of it ahead, and the image, are measured where all of it is wanted.
fn ways(Situation { touched, .. }: Situation) -> (Ways, Ways) {
    match touched {
        Touched::All => (&OURS, &PEERS),
        Touched::Runs | Touched::Scattered => (&OURS[..2], &PEERS[..2]),
    }
}

type Run = fn(&Snapshot, Situation) -> Result<(), Unmeasured>;
type Ways = &'static [(&'static str, Run)];

const OURS: [(&str, Run); 3] = [
    (COPY, |snapshot, situation| served(snapshot, situation, RestoreOptions::new(), Guest::copied).map(drop)),
    (REPLAYED, replayed),
    (CONTINUE, mapped),
];
const PEERS: [(&str, Run); 3] = [(MAP_PRIVATE, map_private), (HANDLER, handler), (EAGER, eager)];

fn served(
    snapshot: &Snapshot,
    Situation { before, touched }: Situation,
    options: RestoreOptions,
    guest: NewGuest,
) -> Result<Option<FaultRecord>, Unmeasured> {
    let cache = match before {
        Before::Cold => snapshot.host.cache()?,
        Before::Warm => snapshot.host.warm_cache()?,
    };
    let server = snapshot.host.start(&cache, options)?;
    let ((), record) = server.run(guest, |region| touched.touch(region))?;
    Ok(record)
}

fn mapped(snapshot: &Snapshot, situation: Situation) -> Result<(), Unmeasured> {
    let Situation { before, touched } = situation;
    match before {
        Before::Cold => served(snapshot, situation, handing_out_the_image(), Guest::mapped).map(drop),
        Before::Warm => snapshot.host.serve_resident(handing_out_the_image(), |region| touched.touch(region)),
    }
}

fn replayed(snapshot: &Snapshot, situation: Situation) -> Result<(), Unmeasured> {
    let mut options = RestoreOptions::new();
    options.replay = snapshot.records[situation.touched as usize].get().cloned();
    served(snapshot, situation, options, Guest::copied).map(drop)
}

fn alternative(snapshot: &Rc<Snapshot>, name: &'static str, run: Run, situation: Situation) -> Alternative {
    let snapshot = Rc::clone(snapshot);
    let run = move |_| {
        snapshot.prepare(name, situation)?;
        let device = process_bytes();
        let (start, cpu) = (Instant::now(), process_cpu_ns());
        run(&snapshot, situation)?;
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), process_cpu_ns() - cpu);
        let device = passed(device, process_bytes()) / snapshot.len() as f64;
        Ok(vec![seconds, cpu / 1e9, device])
    };
    Alternative::new(name, run).excused(METRICS.len())
}

fn map_private(snapshot: &Snapshot, situation: Situation) -> Result<(), Unmeasured> {
    situation.touched.touch(&Region::private(&snapshot.file, snapshot.len())?)
}

fn raw(snapshot: &Snapshot, _situation: Situation) -> Result<(), Unmeasured> {
    let (file, mut bytes) = (snapshot.host.scratch.open_direct()?, 0);
    let mut places = (0..snapshot.len() as u64).step_by(UNIT);
    let reader = RawReader::new(&file, UNIT, RAW_DEPTH).map_err(|error| no_ring(&error))?;
    reader.read_all(|| places.next(), |piece, _| bytes += piece.len())?;
    if bytes == snapshot.len() {
        return Ok(());
    }
    Err(Unmeasured::Failed(format!("{bytes} of {} bytes were read", snapshot.len())))
}

fn handler(snapshot: &Snapshot, situation: Situation) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    let copy = |uffd: &crate::sys::Uffd, at: usize| uffd.copy(at, &source[at..at + PAGE]);
    handled(&uffd, Waiting::Asleep, copy, || situation.touched.touch(&region))
}

fn eager(snapshot: &Snapshot, situation: Situation) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    for (at, bytes) in (0..).step_by(UNIT).zip(source.chunks(UNIT)) {
        uffd.copy(at, bytes)?;
    }
    situation.touched.touch(&region)
}
