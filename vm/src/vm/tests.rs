//! Tests: a VM that touches nothing: its faults are handed in one by one, and the sizes of the answers compared.
//!
//! ```text
//!   memory of this process, registered     a fault by hand --> answer     a step by hand --> how many bytes were ahead
//! ```
//!
//! The kernel copies to pages for which no thread waits as to any other, so one thread does all of it in its order.

use std::fs;

use quinion::Cache;
use quinion_testing::vmm::kernel::{self, Userfault};
use quinion_testing::vmm::memory::{Of, map};
use quinion_testing::vmm::{self, Need};

use super::ahead::{AHEAD_BYTES_MAX, WARM_BYTES};
use super::*;
use crate::fault_record::{FaultRecord, Recorder};
use crate::pages::MappedRegion;
use crate::replay::ReplayReads;
use crate::streams::WINDOW_BYTES_MAX;
use crate::uffd::FaultKind;

const MIB: u64 = 1 << 20;
/// Bytes that a fault is answered with at a time: the default of `run_bytes`.
const RUN: u64 = 64 << 10;

/// Pages that are no zeros, each another's.
fn page(number: u64) -> [u8; PAGE_SIZE] {
    let mut page = [7; PAGE_SIZE];
    page[..8].copy_from_slice(&number.to_le_bytes());
    page
}

/// How a VM gets its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Copied,
    Mapped,
}

const FEATURES: u64 = kernel::MINOR_SHMEM | kernel::MISSING_SHMEM;

/// The ways that the system has.
fn ways(test: &str) -> Vec<Way> {
    let needs = [(Way::Copied, 0), (Way::Mapped, FEATURES)];
    let has = |&(_, features): &(Way, u64)| vmm::has(test, &[Need::Userfault(features)]);
    needs.into_iter().filter(has).map(|(way, _)| way).collect()
}

/// A VM whose faults a test makes up.
struct QuietVm {
    vm: Vm,
    snapshot: Snapshot,
    base: u64,
    replay: Option<Replay>,
    recorder: Option<Mutex<Recorder>>,
    fill: Fill,
    _folder: tempfile::TempDir,
}

impl QuietVm {
    /// One of `bytes` bytes of a snapshot, which is in the cache as a whole if it is copied.
    fn new(way: Way, bytes: u64) -> Self {
        let (folder, path) = written(bytes);
        let cache = Cache::builder().memory(3 * bytes + 32 * MIB).build().expect("a cache");
        let snapshot = Snapshot::open(&cache, &path).expect("a snapshot");
        let (source, base, uffd) = match way {
            Way::Copied => {
                let file = snapshot.file();
                file.read_at(&mut vec![0; bytes as usize], 0).expect("the snapshot can be read");
                let base = map(&Of::Anonymous, 0, bytes).expect("memory");
                (Source::Copied(Box::new(file)), base, registered(base, bytes, 0, kernel::MISSING))
            }
            Way::Mapped => {
                let image = snapshot.image(&cache, &path).expect("an image");
                let memory = image.fd().try_clone_to_owned().expect("a descriptor");
                let base = map(&Of::Private(&memory), 0, bytes).expect("memory");
                let modes = kernel::MISSING | kernel::MINOR;
                (Source::Mapped(image), base, registered(base, bytes, FEATURES, modes))
            }
        };
        let pages = Pages::new(PAGE, &[MappedRegion { base, offset: 0, bytes }]);
        Self {
            vm: Vm::new(uffd, pages, source, Arc::default()),
            snapshot,
            base,
            replay: None,
            recorder: None,
            fill: Fill::Recorded,
            _folder: folder,
        }
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Vm, &VmShared<'_>) -> T) -> T {
        let common = VmShared {
            snapshot: &self.snapshot,
            run_bytes: RUN,
            recorder: self.recorder.as_ref(),
            replay: self.replay.as_ref(),
            fill: self.fill,
            reach_bytes: 2 * MIB,
            replay_ahead_bytes: WARM_BYTES,
            retry_reads: Duration::ZERO,
            waker: &|| Waker::noop().clone(),
            emit_event: &|_| (),
            note_fork: &|| (),
            report_poisoned: &|_, _| (),
        };
        act(&mut self.vm, &common)
    }

    fn fault(&mut self, offset: u64, kind: FaultKind) -> FaultAnswer {
        let fault = Fault { address: self.base + offset, kind };
        let waiting = PendingFault::new(fault, Instant::now());
        self.with(|vm, common| vm.answer(0, waiting, common)).expect("it can be answered")
    }

    fn touched(&mut self, offset: u64) {
        assert_eq!(self.fault(offset, FaultKind::Missing), FaultAnswer::Given, "byte {offset}");
        self.with(|vm, common| vm.supply_beside(0, common)).expect("it is there");
    }

    fn ahead_bytes(&self) -> u64 {
        self.vm.counters.lock().expect("no test panics with it").ahead_bytes
    }

    /// How much one step supplies.
    fn step(&mut self) -> u64 {
        let before = self.ahead_bytes();
        self.with(|vm, common| vm.supply_ahead(common)).expect("it is there");
        self.ahead_bytes() - before
    }

    /// Supplies all windows of streams, and returns the largest step.
    fn steps(&mut self) -> u64 {
        let mut largest = 0;
        while !self.vm.windows.is_empty() {
            largest = largest.max(self.step());
        }
        largest
    }

    /// Walks from `from` on until a window of 2 MiB waits to be supplied. Where that begins.
    fn walk(&mut self, from: u64) -> u64 {
        let mut at = from;
        loop {
            self.touched(at);
            let window = self.vm.windows.back().cloned().unwrap_or(at + RUN..at + RUN);
            if window.end - window.start == WINDOW_BYTES_MAX {
                return window.start;
            }
            self.steps();
            at = window.end;
        }
    }
}

fn registered(base: u64, bytes: u64, features: u64, modes: u64) -> Uffd {
    let uffd = Userfault::open(features).expect("it was looked for");
    uffd.register(base, bytes, modes).expect("memory of this process");
    Uffd::accept(uffd.0).expect("it is one")
}

fn written(bytes: u64) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory");
    fs::write(&path, (0..bytes / PAGE).flat_map(page).collect::<Vec<u8>>()).expect("room for it");
    (folder, path)
}

#[test]
fn steps_are_large_while_the_vm_walks_into_them() {
    for way in ways("steps_are_large_while_the_vm_walks_into_them") {
        let mut vm = QuietVm::new(way, 16 * MIB);
        vm.touched(0);
        assert_eq!(vm.vm.ahead_bytes, AHEAD_BYTES, "one fault is no walk");
        let window = vm.walk(0);
        assert_eq!(vm.step(), AHEAD_BYTES_MAX, "{way:?}");
        // It has overtaken what is supplied, and waits for that.
        vm.touched(window + MIB);
        assert_eq!(vm.step(), AHEAD_BYTES_MAX, "{way:?}");
    }
}

type Other = (&'static str, fn(&mut QuietVm, u64));
/// Requests of a VM beside its walk; the second argument is far from that.
const OTHERS: [Other; 5] = [
    ("a page elsewhere", |vm, far| vm.touched(far)),
    ("a page that is there", |vm, _| vm.touched(0)),
    ("a page that was given back", |vm, far| {
        let removed = Message::Removed(vm.base + far..vm.base + far + PAGE);
        vm.vm.note(0, removed, Instant::now()).expect("it is noted");
        vm.touched(far);
    }),
    ("a page that is protected", |vm, _| {
        assert_eq!(vm.fault(0, FaultKind::Protected), FaultAnswer::Given);
    }),
    ("an address in no region", |vm, _| {
        assert_eq!(vm.fault(1 << 40, FaultKind::Missing), FaultAnswer::Stray);
    }),
];

#[test]
fn steps_are_small_as_soon_as_anything_else_is_asked_for() {
    for way in ways("steps_are_small_as_soon_as_anything_else_is_asked_for") {
        for (what, other) in OTHERS {
            let mut vm = QuietVm::new(way, 32 * MIB);
            let window = vm.walk(0);
            assert_eq!(vm.vm.ahead_bytes, AHEAD_BYTES_MAX, "{way:?}, {what}");
            other(&mut vm, 24 * MIB);
            assert_eq!(vm.vm.ahead_bytes, AHEAD_BYTES, "{way:?}, {what}");
            assert_eq!(vm.step(), AHEAD_BYTES, "{way:?}, {what}");
            // The walk goes on.
            vm.touched(window + MIB);
            assert_eq!(vm.step(), AHEAD_BYTES_MAX, "{way:?}, {what}");
        }
    }
}

#[test]
fn steps_of_a_fill_are_large_while_the_vm_is_right_behind() {
    for way in ways("steps_of_a_fill_are_large_while_the_vm_is_right_behind") {
        let mut vm = QuietVm::new(way, 32 * MIB);
        vm.fill = Fill::All;
        assert_eq!(vm.step(), AHEAD_BYTES, "{way:?}: no fault has come");
        vm.touched(MIB);
        assert_eq!(vm.step(), AHEAD_BYTES_MAX, "{way:?}: it is filled next");
        vm.touched(24 * MIB);
        assert_eq!(vm.step(), AHEAD_BYTES, "{way:?}: it is not filled for long");
    }
}

#[test]
fn steps_of_a_record_are_large_while_the_vm_wants_its_pages() {
    for way in ways("steps_of_a_record_are_large_while_the_vm_wants_its_pages") {
        let mut vm = QuietVm::new(way, 32 * MIB);
        let record = record(&vm.snapshot, 0..8 * MIB / PAGE);
        vm.replay = Some(Replay::new(&record, ReplayReads::LOCAL));
        assert_eq!(vm.step(), AHEAD_BYTES, "{way:?}: no fault has come");
        vm.touched(6 * MIB);
        assert_eq!(vm.step(), AHEAD_BYTES_MAX, "{way:?}: the record names it");
        vm.touched(24 * MIB);
        assert_eq!(vm.step(), AHEAD_BYTES, "{way:?}: the record does not name it");
    }
}

fn record(snapshot: &Snapshot, pages: Range<u64>) -> FaultRecord {
    let mut recorder = Recorder::new(snapshot.identity());
    pages.for_each(|number| recorder.note(number * PAGE, &page(number)));
    recorder.record()
}
