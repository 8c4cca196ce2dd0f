//! What viewers can count on, and what they cannot do to the owner.
//!
//! A viewer here is this test program started again, or code that writes anything into a viewer's page. The owner is a
//! naive one, so that what fails is the service or the viewer and not the cache.
#![cfg(not(quinion_model))]
#![allow(unsafe_code, reason = "a viewer maps files")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quinion::internals::arena::control::{
    Counter, GROUP_VIEWERS, Operation, REQUEST_SLOTS, Request, SENT, SaturatingCount, state,
};
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION, Validation};
use quinion::internals::units::{FileId, MappingId};
use quinion_owner::internals::serve::{Owner, Service, ServiceOptions, listen};
use quinion_owner::internals::viewer::handshake::{DescriptorOffer, JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{
    self, ReadEnd, ReadOutcome, RequestError, ViewedFile, Viewer, WantedBytes,
};

use quinion_testing::hanging::Hanging;
use quinion_testing::naive_owner::NaiveOwner;

const BAD_DESCRIPTOR: RequestError = RequestError::Errno(9);
const IO_ERROR: RequestError = RequestError::Errno(5);

/// The owner's files mapped in this process a second time, as another process would have them. It waits for long, so
/// that a busy machine changes nothing.
fn viewer(service: &Service, process: u32) -> Viewer {
    service.admit(process).unwrap().view().unwrap().waiting_at_most(60_000)
}

fn word(file: u64, at: u64) -> u64 {
    (file << 48) ^ (at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn temporary(file: u64, bytes: u64) -> tempfile::NamedTempFile {
    let temporary = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|i| word(file, i * 8).to_le_bytes()).collect();
    std::fs::write(temporary.path(), &content[..bytes as usize]).unwrap();
    temporary
}

/// The arguments of a request of this process to have `file` attached.
fn attach_arguments(file: &File) -> [u64; 3] {
    let data = file.metadata().unwrap();
    [file.as_raw_fd() as u64, data.dev(), data.ino()]
}

struct Open<'a> {
    viewer: &'a Viewer,
    handle: u64,
    place: u64,
    marker: AtomicU64,
    touched: AtomicU64,
}

impl<'a> Open<'a> {
    fn of(viewer: &'a Viewer, file: &File) -> Self {
        let [handle, place] = viewer.request(Operation::Attach, attach_arguments(file)).unwrap();
        Self { viewer, handle, place, marker: AtomicU64::new(0), touched: AtomicU64::new(0) }
    }
    fn read(&self, position: u64, to: &mut [u8]) -> ReadOutcome {
        let file = ViewedFile {
            handle: self.handle,
            cell: CellNumber(self.place as u32),
            id: MappingId((self.place >> 32) as u32),
            marker_reported: &self.marker,
            touched: &self.touched,
        };
        // SAFETY: the buffer is a slice.
        unsafe { self.viewer.read(&file, WantedBytes::of_slice(position, to)) }
    }
    /// Reads words at `position`, a multiple of 8, and checks each; returns how many.
    fn check(&self, file: u64, position: u64, bytes: usize) -> usize {
        let mut to = vec![0u8; bytes];
        let outcome = self.read(position, &mut to);
        assert!(matches!(outcome.end, ReadEnd::Full | ReadEnd::EndOfFile(_)), "{outcome:?}");
        verify(file, position, &to[..outcome.bytes]);
        outcome.bytes / 8
    }
    /// As [`Open::check`], and tries again after each read that found nothing. A read gives up when its page was gone
    /// four times before it was copied. With a cache of a few pages and competing readers, the order in which threads
    /// run decides how often that is, and whether the owner has handled all markers before more is asked; but no word
    /// may be wrong.
    fn check_among_others(&self, file: u64, position: u64, bytes: usize) {
        let (mut to, mut done) = (vec![0u8; bytes], 0);
        loop {
            let outcome = self.read(position + done as u64, &mut to[done..]);
            done += outcome.bytes;
            match outcome.end {
                ReadEnd::Full | ReadEnd::EndOfFile(_) => break,
                ReadEnd::Failed(RequestError::Fruitless | RequestError::NoSlot) => std::thread::yield_now(),
                end => panic!("{end:?}"),
            }
        }
        verify(file, position, &to[..done]);
    }
}

fn verify(file: u64, position: u64, words: &[u8]) {
    for (i, found) in words.chunks_exact(8).enumerate() {
        let at = position + 8 * i as u64;
        assert_eq!(u64::from_le_bytes(found.try_into().unwrap()), word(file, at), "file {file} at {at}");
    }
}

/// 1. A viewer says that its process is about to become another program, and the process has the arena mapped still.
/// 2. The owner looks, more than once, and takes nothing back.
#[test]
fn a_viewer_that_marks_an_exec_and_goes_on_keeps_its_files() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 100_000);
    let open = Open::of(&viewer, file.as_file());
    viewer.begin_exec();
    viewer.begin_exec();
    std::thread::sleep(Duration::from_millis(3500));
    viewer.end_exec();
    assert_eq!(service.viewers(), 1);
    assert_eq!(open.check(1, 0, 80_000), 10_000);
    viewer.end_exec();
    viewer.end_exec(); // one too many counts nothing
    assert_eq!(viewer.page().counters[Counter::Execs as usize].load(Ordering::Relaxed), 0);
}

fn us() -> u32 {
    std::process::id()
}

#[test]
fn a_viewer_reads_the_file_and_asks_only_for_missing_bytes() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 100_004);
    let open = Open::of(&viewer, file.as_file());
    assert_eq!(open.check(1, 0, 100_000), 12_500);
    let asked = owner.fills.load(Ordering::Relaxed);
    assert!(asked > 0);
    let mut to = [0; 200_000];
    let again = open.read(0, &mut to);
    assert_eq!((again.bytes, again.end, again.asked), (100_004, ReadEnd::EndOfFile(100_004), 0));
    assert_eq!(open.read(100_000, &mut to[..100]).bytes, 4);
    assert_eq!(open.read(100_004, &mut to[..100]).bytes, 0);
    assert_eq!(open.read(u64::MAX - 5, &mut to[..100]).bytes, 0);
    // The reads are reported to the owner a little later.
    while owner.touches.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    viewer.notify(Operation::Detach, [open.handle, 0, 0]).unwrap();
    while owner.detached.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(open.read(0, &mut to).end, ReadEnd::Stale, "the record is nobody's now");
    drop(service);
}

#[test]
fn an_error_is_answered_and_not_remembered_and_neither_is_a_panic() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 10_000);
    let open = Open::of(&viewer, file.as_file());
    owner.failing_fills.store(1, Ordering::Relaxed);
    assert_eq!(open.read(0, &mut [0; 100]).end, ReadEnd::Failed(IO_ERROR));
    owner.panics.store(1, Ordering::Relaxed);
    assert_eq!(open.read(0, &mut [0; 100]).end, ReadEnd::Failed(IO_ERROR));
    owner.panics.store(0, Ordering::Relaxed);
    open.check(1, 0, 4096);
}

#[test]
fn a_file_whose_attach_panicked_does_not_count_as_attached() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 10_000);
    let arguments = attach_arguments(file.as_file());
    owner.panics.store(1, Ordering::Relaxed);
    assert_eq!(viewer.request(Operation::Attach, arguments), Err(IO_ERROR));
    assert!(!viewer.has_attached_files(), "a program that writes any file would ask the owner for ever");
    owner.panics.store(0, Ordering::Relaxed);
    viewer.request(Operation::Attach, arguments).unwrap();
    assert!(viewer.has_attached_files());
}

/// 1. A viewer gives a pin up before it is answered, and the owner panics when it takes the pin back.
/// 2. The worker ends, and the viewer's slot stays busy, also when its process has ended.
#[test]
fn an_unpin_that_panics_costs_neither_the_worker_nor_the_slot() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let file = temporary(1, 10_000);
    let data = file.as_file().metadata().unwrap();
    let mut dying = Command::new("sleep").arg("1000").stdin(file.reopen().unwrap()).spawn().unwrap();
    let theirs = viewer(&service, dying.id());
    let [handle, _] = theirs.request(Operation::Attach, [0, data.dev(), data.ino()]).unwrap();
    let theirs = theirs.waiting_at_most(1);
    owner.panics.store(1, Ordering::Relaxed);
    owner.pin_millis.store(300, Ordering::Relaxed);
    while owner.unpins.load(Ordering::Relaxed) == 0 {
        let _ = theirs.request(Operation::Pin, [handle, 0, 4096]);
        std::thread::sleep(Duration::from_millis(350)); // a heartbeat, so that it is asked again
    }
    owner.panics.store(0, Ordering::Relaxed);
    owner.pin_millis.store(0, Ordering::Relaxed);
    Open::of(&viewer(&service, us()), file.as_file()).check(1, 0, 4096);
    dying.kill().unwrap();
    while service.viewers() != 1 {
        std::thread::yield_now();
    }
    dying.wait().unwrap();
}

/// 1. A worker attaches a file for a viewer that is killed meanwhile, and so does not give up.
/// 2. It takes longer than the end of the service waits for it.
/// 3. It notes a handle where no viewer slot is looked at any more: the file stays open as long as the process lives.
#[test]
fn a_handle_that_comes_after_the_end_of_the_service_is_detached() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 10_000);
    owner.attach_millis.store(4000, Ordering::Relaxed);
    // The request of a viewer that does nothing more.
    let request = &viewer.page().requests[7];
    request.operation.store(Operation::Attach as u32, Ordering::Relaxed);
    let arguments = attach_arguments(file.as_file());
    request.arguments.iter().zip(arguments).for_each(|(place, value)| place.store(value, Ordering::Relaxed));
    request.state.store(state::PENDING, Ordering::Release); // partner: the worker that takes it
    viewer.post_late(Operation::Removes, [0; 3]); // which rings
    while request.state.load(Ordering::Relaxed) != state::TAKEN {
        std::thread::yield_now();
    }
    let totals = service.stop();
    assert_eq!((totals.viewers, owner.attached.load(Ordering::Acquire)), (1, 0), "the end waited for it");
    while owner.detached.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    assert!(!viewer.has_attached_files());
}

/// 1. Two threads let one process join at the same time.
/// 2. Each finds no slot of that process, and takes one.
#[test]
fn a_process_that_joins_by_two_threads_at_once_has_one_slot() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner, 1).unwrap();
    for _ in 0..100 {
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    together.wait();
                    service.admit(us()).unwrap();
                });
            }
        });
        assert_eq!(service.viewers(), 1);
    }
}

#[test]
fn a_handle_is_of_use_only_to_the_viewer_that_has_it() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let mut other = asleep();
    let (mine, theirs) = (viewer(&service, us()), viewer(&service, other.id()));
    let file = temporary(1, 10_000);
    let open = Open::of(&mine, file.as_file());
    for operation in [Operation::Fill, Operation::Revalidate, Operation::Detach, Operation::Advance] {
        assert_eq!(theirs.request(operation, [open.handle, 0, 100]), Err(BAD_DESCRIPTOR));
        assert_eq!(mine.request(operation, [77, 0, 100]), Err(BAD_DESCRIPTOR));
    }
    assert_eq!(mine.request(Operation::Revalidate, [open.handle, 0, 0]), Ok([10_000, 0]));
    let data = file.as_file().metadata().unwrap();
    let fd = file.as_file().as_raw_fd() as u64;
    let wrong =
        [[fd, data.dev(), data.ino() + 1], [fd, data.dev() + 1, data.ino()], [u64::MAX, 0, 0], [4000, 0, 0]];
    for arguments in wrong {
        assert!(matches!(mine.request(Operation::Attach, arguments), Err(RequestError::Errno(_))));
    }
    other.kill().unwrap();
    other.wait().unwrap();
}

fn asleep() -> Child {
    Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_dead_viewer_leaves_nothing_behind() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let file = temporary(1, 10_000);
    let mut dying = Command::new("sleep").arg("1000").stdin(file.reopen().unwrap()).spawn().unwrap();
    let theirs = viewer(&service, dying.id());
    let data = file.as_file().metadata().unwrap();
    theirs.request(Operation::Attach, [0, data.dev(), data.ino()]).unwrap();
    theirs.count(Counter::Reads, 5);
    assert_eq!(service.viewers(), 1);
    dying.kill().unwrap();
    // A zombie counts as dead: the test does not reap it until its place is free.
    while service.viewers() != 0 {
        std::thread::yield_now();
    }
    while owner.detached.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    dying.wait().unwrap();
    let totals = service.stop();
    assert_eq!((totals.viewers, totals.reads), (1, 5), "what it did is remembered");
}

/// A viewer that opens a file for writing sees that it is attached, and tells the owner, which detaches it from all
/// viewers.
#[test]
fn a_viewer_that_opens_an_attached_file_for_writing_notifies_the_owner() {
    let owner = NaiveOwner::minding_writers(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), vec![1; 10_000]).unwrap();
    let file = std::fs::File::open(folder.path().join("file")).unwrap();
    let (device, inode) = (file.metadata().unwrap().dev(), file.metadata().unwrap().ino());
    let attach = || viewer.request(Operation::Attach, [file.as_fd().as_raw_fd() as u64, device, inode]);

    assert!(!viewer.has_attached_files() && !viewer.is_attached(FileId { device, inode }));
    // A process that another test starts has this test's writing descriptor until it executes its program.
    let [handle, place] = std::iter::repeat_with(attach).take(100_000).find_map(Result::ok).unwrap();
    assert!(
        viewer.has_attached_files() && viewer.is_attached(FileId { device, inode }),
        "there is somebody to tell"
    );
    let validation = || viewer.arena().record(CellNumber(place as u32)).unwrap().validation();
    assert_eq!(validation(), Validation::Immutable);
    for cuts in [0, 1] {
        viewer.request(Operation::WriterOpened, [u64::MAX, u64::MAX, cuts]).unwrap();
    }
    viewer.request(Operation::LetGo, [u64::MAX, u64::MAX, 0]).unwrap();
    assert_eq!(validation(), Validation::Immutable, "those were other files");
    viewer.request(Operation::WriterOpened, [device, inode, 0]).unwrap();
    assert_eq!(validation(), Validation::Kernel);
    viewer.request(Operation::Detach, [handle, 0, 0]).unwrap();
    assert!(!viewer.has_attached_files() && !viewer.is_attached(FileId { device, inode }));
    let writer = std::fs::OpenOptions::new().append(true).open(folder.path().join("file")).unwrap();
    assert_eq!(attach(), Err(RequestError::Errno(26)));
    assert!(!viewer.is_attached(FileId { device, inode }), "what was refused is not attached");
    drop(writer);
}

/// A count that was full once says for good that there is something.
#[test]
fn a_full_tally_stays_full() {
    let tally = SaturatingCount::default();
    for round in 1..=254 {
        (0..round).for_each(|_| tally.raise());
        assert!(!tally.is_zero());
        (0..round).for_each(|_| tally.lower());
        assert!(tally.is_zero(), "{round} were raised and lowered");
    }
    (0..300).for_each(|_| tally.raise());
    (0..300).for_each(|_| tally.lower());
    assert!(!tally.is_zero());
}

/// Two runs side by side, one of which has a viewer that dies, and one that comes when its run has ended.
#[test]
fn runs_are_counted_apart_whether_their_viewers_live_or_not() {
    let owner = NaiveOwner::new(1000);
    let mut service = Service::start(owner.clone(), 1).unwrap();
    let (first, second) = (service.begin_run(), service.begin_run());
    assert!(first != second && first.min(second) > 0);
    let (mut dying, lasting, nobodys) =
        (asleep(), viewer(&service, us()), viewer(&service, std::os::unix::process::parent_id()));
    let theirs = viewer(&service, dying.id());
    theirs.count_for(first);
    lasting.count_for(second);
    for (viewer, reads) in [(&theirs, 5), (&lasting, 7), (&nobodys, 11)] {
        viewer.count(Counter::Reads, reads);
    }
    let reads = |service: &Service, run| service.totals_of(run).reads;
    assert_eq!((reads(&service, first), reads(&service, second), service.totals().reads), (5, 7, 23));
    assert_eq!(service.viewers(), 3);
    dying.kill().unwrap();
    // Whether its page is read before, while or after it is reused, each has what it counted.
    while service.viewers() == 3 {
        assert_eq!((reads(&service, first), service.totals().reads), (5, 23));
    }
    dying.wait().unwrap();
    assert_eq!(
        (reads(&service, first), service.totals_of(first).viewers, service.totals().reads),
        (5, 1, 23)
    );
    service.end_run(first);
    let mut dying = asleep();
    let late = viewer(&service, dying.id());
    late.count_for(first);
    late.count(Counter::Reads, 1);
    dying.kill().unwrap();
    while service.viewers() == 3 {
        std::thread::yield_now(); // its numbers go to no run's sums
    }
    dying.wait().unwrap();
    assert_eq!((reads(&service, first), reads(&service, second), service.totals().reads), (0, 7, 24));
    service.stop_serving();
    assert_eq!((reads(&service, second), service.stop().reads), (7, 24), "stopped twice, counted once");
}

#[test]
fn a_process_that_became_another_program_gets_a_new_page() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let first = viewer(&service, us());
    let file = temporary(1, 10_000);
    Open::of(&first, file.as_file());
    let second = viewer(&service, us());
    while service.viewers() != 1 {
        std::thread::yield_now(); // a worker was still at work for the first
    }
    while owner.detached.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    let open = Open::of(&second, file.as_file());
    open.check(1, 0, 8192);
    // Writes to the page it had reach no process.
    first.page().requests[0].state.store(state::PENDING, Ordering::Relaxed);
    assert_eq!(second.page().requests[0].state.load(Ordering::Relaxed), state::FREE);
    assert_eq!(service.stop().viewers, 2);
}

#[test]
fn a_full_house_a_wrong_token_and_a_closed_owner_are_refused() {
    let owner = NaiveOwner::new(1000);
    let viewers_max = GROUP_VIEWERS + 5;
    let options = ServiceOptions { viewers_max, ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let ours = service.admit(us()).unwrap();
    let view = |token| viewer::of_files([&ours.arena, &ours.control, &ours.page], token).map(drop);
    assert!(view(ours.token ^ 1).unwrap_err().to_string().contains("Token"));
    assert!(viewer::of_files([&ours.arena, &ours.page, &ours.page], ours.token).is_err(), "too small");
    assert!(viewer::of_files([&ours.arena, &ours.arena, &ours.page], ours.token).is_err(), "no control file");
    let mut others: Vec<Child> = (1..viewers_max).map(|_| asleep()).collect();
    let viewers: Vec<Viewer> = others.iter().map(|other| viewer(&service, other.id())).collect();
    let mut more = asleep();
    assert_eq!(service.admit(more.id()).unwrap_err().raw_os_error(), Some(87), "EUSERS");
    drop(viewers);
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    while service.admit(more.id()).is_err() {
        std::thread::yield_now();
    }
    more.kill().unwrap();
    more.wait().unwrap();
    assert!(service.admit(more.id()).is_err(), "there is no such process");
    view(ours.token).unwrap();
    drop(service);
    assert!(view(ours.token).unwrap_err().to_string().contains("Closed"));
}

/// A viewer of a group that has a watcher, and processes that sleep, before and behind it.
struct Crowd {
    _others: Children,
    viewer: Viewer,
}

impl Crowd {
    fn join(service: &Service, before: usize, behind: usize) -> Self {
        let mut others = Children(Vec::new());
        let mut fill = |count| {
            for _ in 0..count {
                let other = asleep();
                service.admit(other.id()).unwrap();
                others.0.push(other);
            }
        };
        fill(before);
        let viewer = viewer(service, us());
        fill(behind);
        Self { _others: others, viewer }
    }
}

struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().unwrap(); // no error if it has ended
            child.wait().unwrap();
        }
    }
}

/// A viewer beyond the first group is heard: one request at a time, many at once, and such that no thread waits for.
#[test]
fn a_viewer_of_a_later_group_is_answered_as_one_of_the_first() {
    let owner = NaiveOwner::new(40); // fewer pages than the file has: every round asks
    let service = Service::start(owner.clone(), 2).unwrap();
    let crowd = Crowd::join(&service, GROUP_VIEWERS + 3, 2);
    assert_eq!(service.viewers(), GROUP_VIEWERS + 6);
    let file = temporary(1, 1 << 20);
    let open = Open::of(&crowd.viewer, file.as_file());
    for _ in 0..3 {
        open.check(1, 0, 1 << 20);
    }
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (viewer, handle, place) = (&crowd.viewer, open.handle, open.place);
            scope.spawn(move || {
                let (marker, touched) = (AtomicU64::new(0), AtomicU64::new(0));
                let open = Open { viewer, handle, place, marker, touched };
                (0..200)
                    .for_each(|round| open.check_among_others(1, (thread * 31 + round) % 255 * 4096, 4096));
            });
        }
    });
    let asked = owner.fills.load(Ordering::Relaxed);
    assert!(asked > 100, "{asked}: this shows nothing");
    crowd.viewer.notify(Operation::Detach, [open.handle, 0, 0]).unwrap();
    while owner.detached.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
}

/// 1. A viewer of a later group occupies as many workers as it may, and asks more. The rest of its requests is
///    forgotten, or none of the others' is heard.
/// 2. A viewer rings without end, and asks nothing.
#[test]
fn a_viewer_that_asks_or_rings_without_end_holds_up_no_other() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let crowd = Crowd::join(&service, GROUP_VIEWERS + 1, 0);
    let file = temporary(1, 1 << 20);
    let mut liar = Command::new("sleep").arg("1000").stdin(file.reopen().unwrap()).spawn().unwrap();
    let noisy = viewer(&service, liar.id());
    let open = Open::of(&crowd.viewer, file.as_file());
    owner.attach_millis.store(20, Ordering::Relaxed);
    let data = file.as_file().metadata().unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                for _ in 0..REQUEST_SLOTS {
                    let _ = noisy.notify(Operation::Attach, [0, data.dev(), data.ino()]);
                    noisy.page().request_futex.fetch_add(1, Ordering::SeqCst);
                    quinion_owner::internals::viewer::sys::futex_wake(&noisy.page().request_futex, 1);
                }
            }
        });
        for _ in 0..20 {
            open.check(1, 0, 1 << 20);
            crowd.viewer.request(Operation::Revalidate, [open.handle, 0, 0]).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    // What it asked is answered in the end, too.
    let free = |slot: &Request| slot.state.load(Ordering::Relaxed) == state::FREE;
    while !noisy.page().requests.iter().all(free) {
        std::thread::yield_now();
    }
    liar.kill().unwrap();
    liar.wait().unwrap();
}

/// 1. A viewer steps its futex as fast as it can, and asks nothing.
/// 2. The thread that sleeps for it wakes each time, and has time for nothing else.
#[test]
fn a_viewer_that_rings_and_asks_nothing_wakes_a_thread_a_bounded_number_of_times() {
    const RINGS: u64 = 300_000;
    for before in [0, GROUP_VIEWERS + 1] {
        let service = Service::start(NaiveOwner::new(1000), 2).unwrap();
        let crowd = Crowd::join(&service, before, 0);
        let file = temporary(1, 100_000);
        let mut liar = asleep();
        let noisy = viewer(&service, liar.id());
        let open = Open::of(&crowd.viewer, file.as_file());
        let (rung, is_over) = (AtomicU64::new(0), std::sync::atomic::AtomicBool::new(false));
        let (before_it, begun) = (service.rings_seen(), Instant::now());
        let (seen, seconds) = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    noisy.page().request_futex.fetch_add(1, Ordering::SeqCst);
                    quinion_owner::internals::viewer::sys::futex_wake(&noisy.page().request_futex, 1);
                    rung.fetch_add(1, Ordering::Relaxed);
                }
            });
            wait_until(|| rung.load(Ordering::Relaxed) >= RINGS);
            let seen = (service.rings_seen() - before_it, begun.elapsed().as_secs() + 1);
            // Others are answered meanwhile, as is what it asks itself, if a little later.
            for _ in 0..100 {
                crowd.viewer.request(Operation::Revalidate, [open.handle, 0, 0]).unwrap();
            }
            let answer = noisy.request(Operation::Revalidate, [open.handle, 0, 0]);
            assert_eq!(answer, Err(BAD_DESCRIPTOR), "it has no handle");
            is_over.store(true, Ordering::Relaxed);
            seen
        });
        liar.kill().unwrap();
        liar.wait().unwrap();
        // Looks by each thread that sleeps for it: 512 in a second, and two each 20 milliseconds. The longer this
        // machine takes, the more may be seen.
        let most = (service.workers() as u64 + 1) * seconds * (512 + 100);
        println!("of {RINGS} rings {seen} were seen, and {most} may be");
        assert!(seen <= most, "of {RINGS} rings {seen} were seen, and {most} may be");
    }
}

/// A process that has the file open, and what it would ask.
fn asking(service: &Service, file: &Path) -> (Children, impl Fn() + use<>) {
    let stdin = File::open(file).unwrap();
    let data = stdin.metadata().unwrap();
    let process = Command::new("sleep").arg("1000").stdin(stdin).spawn().unwrap();
    let viewer = viewer(service, process.id());
    let ask = move || {
        let [handle, _] = viewer.request(Operation::Attach, [0, data.dev(), data.ino()]).unwrap();
        viewer.request(Operation::Revalidate, [handle, 0, 0]).unwrap();
    };
    (Children(vec![process]), ask)
}

fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::yield_now();
    }
}

/// A cache that is served, what its owner has set aside for viewers, and its heartbeat.
fn served_cache() -> (Service, impl Fn() -> u64, impl Fn() -> u32) {
    let cache = quinion::Cache::builder().memory(64 << 20).build().unwrap();
    let owner: Arc<dyn Owner> = Arc::new(quinion_owner::CacheOwner::new(cache));
    let service = Service::start(Arc::clone(&owner), 1).unwrap();
    let other = Arc::clone(&owner);
    let bytes = move || owner.arena().stats().control_bytes;
    (service, bytes, move || other.arena().control().control().heartbeat.load(Ordering::Relaxed))
}

/// 1. Many processes view the cache, and end. What was set aside for their pages stays set aside.
/// 2. Or it is given back while there is still a viewer.
/// 3. Others come: no thread sleeps for them, or their pages are those of the dead.
#[test]
fn the_memory_for_groups_of_viewers_is_given_back_when_they_are_gone() {
    let (service, bytes, heartbeat) = served_cache();
    let (least, file) = (bytes(), temporary(1, 100_000).into_temp_path()); // no process can write it
    for _ in 0..3 {
        let crowd = Children((0..2 * GROUP_VIEWERS).map(|_| asleep()).collect());
        crowd.0.iter().for_each(|other| drop(service.admit(other.id()).unwrap()));
        let (last, ask) = asking(&service, &file);
        ask();
        assert_eq!((service.viewers(), bytes()), (2 * GROUP_VIEWERS + 1, least + (4 << 20)));
        // The first groups have no viewer any more, but the last has.
        drop(crowd);
        wait_until(|| service.viewers() == 1);
        let until = heartbeat() + 12;
        wait_until(|| heartbeat() >= until);
        assert_eq!(bytes(), least + (4 << 20));
        ask();
        drop(last);
        wait_until(|| bytes() == least);
        assert_eq!(service.viewers(), 0);
    }
}

/// 1. The last group has no viewer any more: its memory is about to be given back.
/// 2. Processes join meanwhile. One finds no page, or one that is taken from it in a moment.
#[test]
fn a_process_that_joins_while_a_group_is_given_back_is_answered() {
    let (service, bytes, heartbeat) = served_cache();
    let (least, file) = (bytes(), temporary(1, 100_000).into_temp_path()); // no process can write it
    let first = Children((0..GROUP_VIEWERS).map(|_| asleep()).collect());
    first.0.iter().for_each(|other| drop(service.admit(other.id()).unwrap()));
    let (until, given_back) = (heartbeat() + 60, AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while heartbeat() < until || given_back.load(Ordering::Relaxed) < 4 {
                    for _ in 0..10 {
                        let (process, ask) = asking(&service, &file);
                        ask();
                        drop(process);
                    }
                    let now = heartbeat();
                    wait_until(|| bytes() == least || heartbeat() > now + 7);
                    given_back.fetch_add(u64::from(bytes() == least), Ordering::Relaxed);
                }
            });
        }
    });
}

/// 1. The bound has no room for the pages of more viewers, and they are let in all the same.
#[test]
fn a_cache_without_room_for_more_viewers_refuses_them() {
    let cache = quinion::Cache::builder().memory(quinion::Cache::MEMORY_MIN).build().unwrap();
    let owner: Arc<dyn Owner> = Arc::new(quinion_owner::CacheOwner::new(cache));
    let service = Service::start(Arc::clone(&owner), 1).unwrap();
    let crowd = Crowd::join(&service, GROUP_VIEWERS - 1, 0);
    let mut more = asleep();
    assert_eq!(service.admit(more.id()).unwrap_err().raw_os_error(), Some(libc::ENOBUFS));
    assert_eq!(service.viewers(), GROUP_VIEWERS);
    drop(crowd);
    while service.admit(more.id()).is_err() {
        std::thread::yield_now(); // those that have ended are noticed by and by
    }
    more.kill().unwrap();
    more.wait().unwrap();
}

/// 1. A viewer that maps what all viewers see, or another's page, for writing decides what others believe.
#[test]
fn a_viewer_can_write_its_own_page_and_nothing_else() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let mut other = asleep();
    let (ours, theirs) = (service.admit(us()).unwrap(), service.admit(other.id()).unwrap());
    let write = |file: BorrowedFd<'_>| {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of one page, which is not used yet.
        unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, file, 0) }.map(drop)
    };
    for file in [&ours.arena, &ours.control, &theirs.arena, &theirs.control] {
        assert_eq!(write(file.as_fd()), Err(rustix::io::Errno::ACCESS));
    }
    write(ours.page.as_fd()).unwrap();
    let pages = [&ours.page, &theirs.page].map(|page| rustix::fs::fstat(page).unwrap().st_ino);
    assert_ne!(pages[0], pages[1]);
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn a_viewer_that_waits_when_the_owner_closes_is_released_and_never_asks_again() {
    let owner = NaiveOwner::new(24); // far too few pages for the file: every round asks
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 1 << 20);
    let open = Open::of(&viewer, file.as_file());
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut to = vec![0; 1 << 20];
            loop {
                match open.read(0, &mut to).end {
                    ReadEnd::Failed(error) => return error,
                    // Between two reads the service has released the file, and no request is sent for a stale one.
                    ReadEnd::Stale => break,
                    ReadEnd::Full | ReadEnd::EndOfFile(_) => {}
                }
            }
            viewer.request(Operation::Revalidate, [open.handle, 0, 0]).unwrap_err()
        });
        while owner.fills.load(Ordering::Relaxed) < 3 {
            std::thread::yield_now();
        }
        service.stop();
        assert_eq!(reader.join().unwrap(), RequestError::OwnerDead);
    });
    assert_eq!(viewer.request(Operation::Revalidate, [open.handle, 0, 0]), Err(RequestError::OwnerDead));
    assert!(viewer.owner_is_dead());
}

/// 1. The owner does not answer in time: the device is slow, or it was stopped.
/// 2. A viewer waits for it, without end; or asks again and again, and waits each time.
/// 3. The late answer arrives in a slot that has another request by then; or leaves an unknown handle.
#[test]
fn a_late_answer_is_not_waited_for_and_leaves_nothing_behind() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 100_000);
    Open::of(&viewer, file.as_file());
    let viewer = service.admit(us()).unwrap().view().unwrap().waiting_at_most(20);
    let open = Open::of(&viewer, file.as_file());
    owner.hung_device.store(file.as_file().metadata().unwrap().dev(), Ordering::Relaxed);
    assert_eq!(open.read(0, &mut [0; 100]).end, ReadEnd::Failed(RequestError::Late));
    owner.hung_device.store(0, Ordering::Relaxed);
    // The heartbeat rises on, so it is asked again; and what was late is there by then.
    while open.read(0, &mut [0; 100]).bytes != 100 {
        std::thread::yield_now();
    }
    let free = |slot: &Request| slot.state.load(Ordering::Relaxed) == state::FREE;
    while !viewer.page().requests.iter().all(free) {
        std::thread::yield_now();
    }
}

/// 1. A viewer attaches a file, and gives up before it is answered.
/// 2. The handle is not given back.
#[test]
fn a_file_that_was_attached_too_late_is_detached() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let viewer = viewer.waiting_at_most(1);
    let file = temporary(1, 10_000);
    let arguments = attach_arguments(file.as_file());
    owner.attach_millis.store(50, Ordering::Relaxed);
    let mut given_up = 0;
    for _ in 0..5 {
        given_up += u64::from(viewer.request(Operation::Attach, arguments) == Err(RequestError::Late));
        std::thread::sleep(Duration::from_millis(250)); // a heartbeat, so that it is asked again
    }
    assert!(given_up > 0);
    // One that was given up before a worker saw it is not attached at all.
    let count = |of: &AtomicU64| of.load(Ordering::Acquire);
    while count(&owner.attached) == 0 || count(&owner.detached) < count(&owner.attached) - (5 - given_up) {
        std::thread::yield_now();
    }
}

/// 1. A program removes a file that the owner has open, and its space is not free.
#[test]
fn a_viewer_that_removes_a_file_notifies_the_owner() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    viewer.request(Operation::Removes, [7, 8, 0]).unwrap();
    assert_eq!(*owner.removed.lock().unwrap(), [FileId { device: 7, inode: 8 }]);
}

/// 1. The owner was stopped. Each read waits for it as long as it may.
#[test]
fn an_owner_that_does_not_move_is_waited_for_once() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let admission = service.admit(us()).unwrap();
    // A viewer whose owner has been stopped: no answers, and no heartbeat.
    let stopped = NaiveOwner::new(1000);
    let page = stopped.arena().make_viewer_page(0).unwrap();
    let [arena, control] = [stopped.arena().arena_fd(), stopped.arena().control_fd()];
    stopped.arena().populate_control().unwrap();
    let viewer = viewer::of_files([arena, control, page.as_fd()], stopped.arena().token()).unwrap();
    // A thousand waits would be an hour and a half.
    let viewer = viewer.waiting_at_most(5000);
    let begun = Instant::now();
    for _ in 0..1000 {
        assert_eq!(viewer.request(Operation::Revalidate, [1, 0, 0]), Err(RequestError::Late));
    }
    assert!(begun.elapsed() < Duration::from_secs(300), "it was waited for again and again");
    drop(admission);
}

#[test]
fn more_requests_than_slots_are_refused() {
    let owner = NaiveOwner::new(1000);
    owner.arena().populate_control().unwrap();
    let page = owner.arena().make_viewer_page(0).unwrap();
    let [arena, control] = [owner.arena().arena_fd(), owner.arena().control_fd()];
    let viewer = viewer::of_files([arena, control, page.as_fd()], owner.arena().token()).unwrap();
    for _ in 0..REQUEST_SLOTS {
        viewer.notify(Operation::Detach, [1, 0, 0]).unwrap();
    }
    assert_eq!(viewer.notify(Operation::Detach, [1, 0, 0]), Err(RequestError::NoSlot));
    // A thread that has waited in vain for an owner without progress does not wait again, nor does another.
    viewer.settle(1);
    assert_eq!(viewer.notify(Operation::Detach, [1, 0, 0]), Err(RequestError::Late));
}

/// 1. Reads of one file system hang, and take one worker after the other.
/// 2. The requests of other viewers are not answered any more.
#[test]
fn a_file_system_that_hangs_keeps_some_workers_and_not_all() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 1 << 20);
    let open = Open::of(&viewer, file.as_file());
    let data = file.as_file().metadata().unwrap();
    owner.hung_device.store(data.dev(), Ordering::Relaxed);
    // More than there are workers, and more than may be at work on one file system.
    for page in 0..20 {
        let _ = viewer.notify(Operation::Fill, [open.handle, page * 4096, 8]);
    }
    // Another file system is served all the same.
    let elsewhere = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    assert_ne!(elsewhere.as_file().metadata().unwrap().dev(), data.dev());
    std::fs::write(elsewhere.path(), std::fs::read(file.path()).unwrap()).unwrap();
    Open::of(&viewer, elsewhere.as_file()).check(1, 0, 100_000);
    // And so is a viewer that asks for the hung one: it is told at once.
    let refused = RequestError::Errno(11);
    while viewer.request(Operation::Revalidate, [open.handle, 0, 0]) != Err(refused) {
        std::thread::yield_now();
    }
    let begun = Instant::now();
    drop(service);
    assert!(begun.elapsed() < Duration::from_secs(100), "the end waited for what hangs");
    owner.hung_device.store(0, Ordering::Relaxed);
}

/// 1. Processes say of files of one file system that they are cut, watched and removed; and it hangs.
/// 2. Each takes a worker, until none is left for the requests of others.
#[test]
fn notices_about_a_hanging_file_system_occupy_few_workers_and_are_done_in_the_end() {
    const HUNG: u64 = 77;
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let file = temporary(1, 1 << 20);
    let (honest, mut others) = (viewer(&service, us()), (0..8).map(|_| asleep()).collect::<Vec<_>>());
    let open = Open::of(&honest, file.as_file());
    owner.hung_device.store(HUNG, Ordering::Relaxed);
    let data = file.as_file().metadata().unwrap();
    for (number, other) in others.iter().enumerate() {
        let theirs = viewer(&service, other.id());
        let says = [Operation::WriterOpened, Operation::LetGo, Operation::Removes][number % 3];
        (0..20).for_each(|inode| theirs.notify(says, [HUNG, inode, 1]).unwrap());
    }
    // More than there may be workers: until all are taken, if they can be.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        let answer = honest.request(Operation::Revalidate, [open.handle, 0, 0]);
        answer.expect("a viewer that asks of another file system waited as long as it may");
        assert!(service.workers() < 40, "{} workers", service.workers());
        std::thread::sleep(Duration::from_millis(20));
    }
    // The cut of this very file waits, too; it is done when the file system answers.
    assert_eq!(
        honest.arena().record(CellNumber(open.place as u32)).unwrap().validation(),
        Validation::Immutable
    );
    owner.hung_device.store(data.dev(), Ordering::Relaxed);
    let theirs = viewer(&service, std::os::unix::process::parent_id());
    (0..20).for_each(|_| theirs.notify(Operation::WriterOpened, [data.dev(), data.ino(), 1]).unwrap());
    std::thread::sleep(Duration::from_secs(2));
    owner.hung_device.store(0, Ordering::Relaxed);
    while honest.arena().record(CellNumber(open.place as u32)).unwrap().validation() != Validation::Kernel {
        std::thread::yield_now();
    }
    theirs.settle(60_000);
    assert!(theirs.page().requests.iter().all(|r| r.state.load(Ordering::Relaxed) == state::FREE));
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

/// 1. Reads hang for a while, and workers are started for the others.
/// 2. They stay for ever, each with its memory, though there is nothing to do.
#[test]
fn workers_that_are_too_many_end() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 1 << 20);
    let open = Open::of(&viewer, file.as_file());
    owner.hung_device.store(file.as_file().metadata().unwrap().dev(), Ordering::Relaxed);
    for page in 0..4 {
        viewer.notify(Operation::Fill, [open.handle, page * 4096, 8]).unwrap();
    }
    while service.workers() <= 4 {
        std::thread::yield_now();
    }
    owner.hung_device.store(0, Ordering::Relaxed);
    open.check(1, 0, 100_000);
    let begun = Instant::now();
    while service.workers() > 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} workers are left", service.workers());
        std::thread::sleep(Duration::from_millis(10));
    }
    // The services that are left stay, and answer.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(service.workers(), 2);
    open.check(1, 100_000, 100_000);
    viewer.request(Operation::Revalidate, [open.handle, 0, 0]).unwrap();
}

/// 1. A process joins. Of the workers that sleep one alone waits for its futex.
/// 2. That worker is at a request of the process that hangs, and its next request is not taken for a second.
#[test]
fn a_request_behind_a_hanging_one_is_answered_at_once() {
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 4).unwrap();
    let file = temporary(1, 1 << 20);
    let mut late = 0;
    for _ in 0..30 {
        owner.hung_device.store(0, Ordering::Relaxed);
        // All workers sleep when it joins.
        std::thread::sleep(Duration::from_millis(50));
        let viewer = service.admit(us()).unwrap().view().unwrap().waiting_at_most(300);
        let open = Open::of(&viewer, file.as_file());
        owner.hung_device.store(file.as_file().metadata().unwrap().dev(), Ordering::Relaxed);
        viewer.notify(Operation::Fill, [open.handle, 0, 8]).unwrap();
        viewer.notify(Operation::Fill, [open.handle, 4096, 8]).unwrap();
        late += u32::from(viewer.request(Operation::Revalidate, [open.handle, 0, 0]).is_err());
    }
    owner.hung_device.store(0, Ordering::Relaxed);
    // Some on a machine that is busy. A worker that is not woken looks after a second: that is late seven times of ten.
    assert!(late <= 10, "{late} of 30 were not heard in time");
}

fn release(viewer: &Viewer, count: u64) {
    for _ in 0..count {
        viewer.request(Operation::Release, [0; 3]).unwrap();
    }
}

/// 1. A viewer writes into its page that workers are at requests of its, or that it has given them up; or asks without
///    end for what they are indeed at; or for what never ends.
/// 2. A viewer that unmounts or removes a file waits for these, each time anew.
#[test]
fn a_viewer_that_lies_about_requests_under_way_delays_no_other() {
    const RELEASES: u64 = 40;
    /// A fourth of the waits if each waits.
    const MOST: u64 = RELEASES / 4;
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 4).unwrap();
    let mut liar = asleep();
    let honest = viewer(&service, us());
    // Requests that no worker has taken. A viewer that was waited for in vain some times is waited for no more, so
    // the liar joins anew.
    for _ in 0..RELEASES / 4 {
        let lying = viewer(&service, liar.id());
        for (slot, request) in lying.page().requests.iter().enumerate() {
            request
                .operation
                .store([Operation::Attach, Operation::Detach][slot % 2] as u32, Ordering::Relaxed);
            request.state.store([state::TAKEN, state::GIVEN_UP][slot / 2 % 2], Ordering::Relaxed);
        }
        release(&honest, 4);
    }
    let by_words = service.waits_in_vain();
    assert!(by_words < MOST, "{by_words} waits for words alone");
    // Requests without end, each of which takes some time.
    owner.attach_millis.store(30, Ordering::Relaxed);
    let file = temporary(1, 1 << 20);
    let arguments = attach_arguments(file.as_file());
    let ends = std::sync::atomic::AtomicBool::new(false);
    let asks = service.admit(us()).unwrap().view().unwrap().waiting_at_most(60_000);
    let honest = viewer(&service, std::os::unix::process::parent_id());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let [handle, _] = asks.request(Operation::Attach, arguments).unwrap();
                    asks.request(Operation::Detach, [handle, 0, 0]).unwrap();
                }
            });
        }
        release(&honest, RELEASES);
        ends.store(true, Ordering::Relaxed);
    });
    let by_asking = service.waits_in_vain() - by_words;
    assert!(by_asking < MOST, "{by_asking} waits for what is asked without end");
    // What never ends is waited for some times.
    owner.attach_millis.store(0, Ordering::Relaxed);
    let open = Open::of(&asks, file.as_file());
    owner.hung_device.store(file.as_file().metadata().unwrap().dev(), Ordering::Relaxed);
    let _ = asks.notify(Operation::Advance, [open.handle, 0, 0]);
    for page in 0..3 {
        let slot = &asks.page().requests[10 + page];
        slot.operation.store(Operation::Fill as u32, Ordering::Relaxed);
        slot.arguments[0].store(open.handle, Ordering::Relaxed);
        slot.state.store(state::PENDING, Ordering::Relaxed);
    }
    let taken =
        || asks.page().requests[10..13].iter().all(|r| r.state.load(Ordering::Relaxed) == state::TAKEN);
    while !taken() {
        asks.page().request_futex.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(1));
    }
    (10..13).for_each(|slot| asks.page().requests[slot].state.store(state::GIVEN_UP, Ordering::Relaxed));
    release(&honest, RELEASES);
    let by_hanging = service.waits_in_vain() - by_words - by_asking;
    assert!((1..MOST).contains(&by_hanging), "{by_hanging} waits for what never ends");
    owner.hung_device.store(0, Ordering::Relaxed);
    liar.kill().unwrap();
    liar.wait().unwrap();
}

/// 1. Others have filled the queues that are the service's, too, with what cannot be closed.
/// 2. The service lets processes in that send more of it, until no descriptor is left.
#[test]
fn work_queued_elsewhere_in_the_owner_counts_for_the_service() {
    use quinion_owner::internals::sys::serial_queues::QueueKey;
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = ServiceOptions { workers: 1, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    viewer::connect(&path, &hello).unwrap();
    let (queues, (go, waits)) = (service.queues(), std::sync::mpsc::channel::<()>());
    while queues.waiting() > 0 {
        std::thread::yield_now(); // what let that one in is about to end, and leaves room
    }
    queues.spawn(QueueKey::Background, move || {
        let _ = waits.recv();
    });
    while !queues.are_full() {
        queues.spawn(QueueKey::Background, || ());
    }
    // It is not looked at before there is room again.
    let waiting = stranger(&path, &hello.bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let mut answer = [0; 64];
    let heard = rustix::net::recv(&waiting, &mut answer, rustix::net::RecvFlags::DONTWAIT);
    assert_eq!(heard.unwrap_err(), rustix::io::Errno::AGAIN, "it was let in");
    drop(go);
    while rustix::net::recv(&waiting, &mut answer, rustix::net::RecvFlags::DONTWAIT).is_err() {
        std::thread::yield_now();
    }
}

/// 1. A process that becomes another user, or gives up a right, keeps the pages that it had mapped before.
#[test]
fn other_domain() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can become another user");
        return;
    }
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let file = temporary(1, 10_000);
    let script = "import os, sys; sys.stdin.readline(); os.setuid(65534); print('x', flush=True); sys.stdin.readline()";
    let mut command = Command::new("python3");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let theirs = viewer(&service, child.id());
    // Its standard input is a pipe, and not that file.
    let data = file.as_file().metadata().unwrap();
    let attach = |fd: u64| theirs.request(Operation::Attach, [fd, data.dev(), data.ino()]);
    assert_eq!(attach(0), Err(RequestError::Errno(libc::EOPNOTSUPP)));
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 2]).unwrap();
    assert_eq!(attach(0), Err(RequestError::Errno(libc::EACCES)));
    assert_eq!(service.admit(child.id()).unwrap_err().raw_os_error(), Some(libc::EACCES));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// 1. A descriptor that only names a file, or can only write it, is handed to the owner, which may read it.
#[test]
fn a_file_is_attached_by_a_descriptor_that_can_read_it() {
    use rustix::fs::{Mode, OFlags, open};
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 10_000);
    let data = file.as_file().metadata().unwrap();
    let attach = |flags| {
        let fd = open(file.path(), flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
        viewer.request(Operation::Attach, [fd.as_raw_fd() as u64, data.dev(), data.ino()])
    };
    assert_eq!(attach(OFlags::PATH).unwrap_err(), BAD_DESCRIPTOR);
    assert_eq!(attach(OFlags::WRONLY).unwrap_err(), BAD_DESCRIPTOR);
    attach(OFlags::RDONLY).unwrap();
    attach(OFlags::RDWR).unwrap();
}

/// 1. A viewer attaches files without end, and the owner's memory goes to what it has to know of them.
#[test]
fn a_viewer_has_so_many_files_at_most() {
    let owner = NaiveOwner::new(20_000);
    let service = Service::start(owner.clone(), 1).unwrap();
    let viewer = viewer(&service, us());
    let file = temporary(1, 10_000);
    let arguments = attach_arguments(file.as_file());
    let mut handles = Vec::new();
    let refused = loop {
        match viewer.request(Operation::Attach, arguments) {
            Ok([handle, _]) => handles.push(handle),
            Err(error) => break error,
        }
        assert!(handles.len() <= 4096);
    };
    assert_eq!((refused, handles.len()), (RequestError::Errno(libc::EMFILE), 4096));
    viewer.request(Operation::Detach, [handles[0], 0, 0]).unwrap();
    viewer.request(Operation::Attach, arguments).expect("one has gone");
}

/// Programs join by the socket; a message of a stranger there costs only the stranger's connection.
#[test]
fn processes_join_by_the_socket() {
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = ServiceOptions { workers: 1, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    // Silent ones, ones with nonsense, and ones whose messages are nearly right. None of them is skipped here.
    let says = |bytes: &[u8]| {
        let socket = connected(&path);
        if !bytes.is_empty() {
            rustix::net::send(&socket, bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
        }
        socket
    };
    let right = hello.bytes();
    let mut strangers: Vec<_> = (0..100).map(|_| says(b"")).collect();
    strangers.extend((0..100).map(|_| says(&[7; 4000])));
    strangers.extend([&right[..right.len() - 1], &[&right[..], b"x"].concat()].map(says));
    let viewer = viewer::connect(&path, &hello).unwrap().waiting_at_most(60_000);
    assert_eq!(service.viewers(), 1, "nobody else was let in");
    for stranger in &strangers {
        let timeout = Some(Duration::from_secs(60));
        let which = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(stranger, which, timeout).unwrap();
        match rustix::net::recv(stranger, &mut [0; 64], rustix::net::RecvFlags::empty()) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => {}
            other => panic!("{other:?}"),
        }
    }
    drop(strangers);
    let file = temporary(1, 100_000);
    Open::of(&viewer, file.as_file()).check(1, 0, 100_000);
    let refused = |hello| viewer::connect(&path, &hello).unwrap_err().raw_os_error();
    assert_eq!(refused(JoinRequest { token: token ^ 1, ..hello }), Some(libc::EPROTO));
    assert_eq!(refused(JoinRequest { version: version - 1, ..hello }), Some(libc::EPROTO));
    assert_eq!(refused(JoinRequest { plan: 0, ..hello }), Some(libc::EINVAL));
    // The earlier viewer is still attached: the refused process was given no place, and took none from others.
    assert_eq!(service.viewers(), 1);
    viewer.request(Operation::Revalidate, [77, 0, 0]).expect_err("it is answered");
    Open::of(&viewer, file.as_file()).check(1, 0, 100_000);
    let plan = service.add_plan(file.reopen().unwrap().into());
    viewer::connect(&path, &JoinRequest { plan, ..hello }).unwrap();
    assert_eq!(service.stop().viewers, 2);
    assert!(viewer::connect(&path, &hello).is_err(), "nobody listens any more");
}

/// A program that starts so many children, each of which sends a hello and prints the answer, -1 for none, and stays
/// until its input ends.
const JOINS: &str = "
import ctypes, os, socket, sys
path, hello, then, count = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], int(sys.argv[4])
def answer():
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.connect(path)
        ours.send(hello)
        said = ours.recv(64)
    except ConnectionError:
        return -1
    return int.from_bytes(said[8:12], 'little') if said else -1
exec(then)
for _ in range(count):
    if os.fork() == 0:
        os.write(1, b'%d\\n' % answer())
        os.read(0, 1)
        os._exit(0)
for _ in range(count):
    os.wait()
";

/// Starts the program above by `before`, what stands before its name; returns the answers and the process.
fn joining(before: &[&str], path: &Path, hello: &JoinRequest, then: &str, count: usize) -> (Vec<i32>, Child) {
    use std::io::BufRead as _;
    let hello: String = hello.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let words: Vec<&str> = before.iter().copied().chain(["python3", "-c", JOINS]).collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(path).args([&hello, then, &count.to_string()]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let said = std::io::BufReader::new(child.stdout.take().unwrap());
    let answers: Vec<i32> = said.lines().take(count).map(|line| line.unwrap().parse().unwrap()).collect();
    assert_eq!(answers.len(), count, "{then}: not all were answered");
    (answers, child)
}

/// 1. Processes that are not of the owner's domain reach the socket: of another user, with fewer groups or
///    capabilities, or in a name space of their own, where the first has the number 1.
/// 2. They are let in; or their places are free afterwards, and no other process is let in.
#[test]
fn a_process_of_another_domain_takes_no_place() {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can become another user");
        return;
    }
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let viewers_max = 20;
    let options =
        ServiceOptions { viewers_max, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    // As if the folder were not there: this tests the checks of a process that connects.
    for (path, mode) in [(folder.path(), 0o755), (&path, 0o777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: owner.arena().token(), run: 0 };
    let join = |before: &[&str], then: &str, count| joining(before, &path, &hello, then, count);
    let apart = ["unshare", "--pid", "--fork"];
    let made = Command::new(apart[0]).args(&apart[1..]).arg("true").status();
    let can_be_apart = made.is_ok_and(|status| status.success());
    if !can_be_apart {
        println!("SKIPPED, in part: name spaces of processes cannot be made here");
    }
    let no_capability = "
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, sets) == 0";
    let more = viewers_max + 2;
    for (before, then, answer) in [
        (&[][..], "os.setuid(65534)", -1),
        (&[], "os.setgroups([1])", libc::EACCES),
        (&[], "os.setegid(1)", libc::EACCES),
        (&[], no_capability, libc::EACCES),
        (
            if can_be_apart { &apart } else { &[] },
            "os.setgroups([1]) if os.getpid() != 1 else 0",
            libc::EACCES,
        ),
    ] {
        let (answers, mut child) = join(before, then, more);
        assert_eq!(answers, vec![answer; more], "{then}");
        assert_eq!(service.viewers(), 0, "{then}");
        drop(child.stdin.take());
        child.wait().unwrap();
    }
    // The same are let in as they are, and their places are given back.
    let (answers, mut child) = join(&[], "0", 3);
    assert_eq!((answers, service.viewers()), (vec![0; 3], 3));
    drop(child.stdin.take());
    child.wait().unwrap();
    while service.viewers() != 0 {
        std::thread::yield_now();
    }
    assert_eq!(service.stop().viewers, 3);
}

/// 1. The system does not let the owner duplicate descriptors of the process (Yama), and nothing is served.
/// 2. A descriptor that cannot read, or one of another file, is sent in the place of one that could be taken.
#[test]
fn a_descriptor_is_sent_to_an_owner_that_may_not_take_it() {
    use rustix::fs::{Mode, OFlags, open};
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = ServiceOptions { workers: 1, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let _service = Service::start_with(owner.clone(), options).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let offer = DescriptorOffer { version, token };
    let file = temporary(1, 100_000);
    // The reason may be lost: the refused process has sent a message that is not read, and then the kernel reports a
    // reset.
    let is_refused = |offer| viewer::send_descriptor(&path, &offer, file.as_file()).is_err();
    assert!(is_refused(offer), "we are no viewer yet");
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    let viewer = viewer::connect(&path, &hello).unwrap().waiting_at_most(60_000);
    assert!(is_refused(DescriptorOffer { token: token ^ 1, ..offer }));
    let data = file.as_file().metadata().unwrap();
    let ask = |ticket: u64| viewer.request(Operation::Attach, [ticket | SENT, data.dev(), data.ino()]);
    let send =
        |descriptor: BorrowedFd<'_>| u64::from(viewer::send_descriptor(&path, &offer, descriptor).unwrap());
    let by = |flags| send(open(file.path(), flags | OFlags::CLOEXEC, Mode::empty()).unwrap().as_fd());
    assert_eq!(ask(by(OFlags::PATH)), Err(BAD_DESCRIPTOR));
    assert_eq!(ask(by(OFlags::WRONLY)), Err(BAD_DESCRIPTOR));
    let other = temporary(2, 100_000);
    assert_eq!(ask(send(other.as_file().as_fd())), Err(RequestError::Errno(libc::ESTALE)));
    assert_eq!(ask(7777), Err(BAD_DESCRIPTOR), "nobody has this ticket");
    let ticket = by(OFlags::RDONLY);
    let [handle, place] = ask(ticket).unwrap();
    assert_eq!(ask(ticket), Err(BAD_DESCRIPTOR), "it has been used");
    let (marker, touched) = (AtomicU64::new(0), AtomicU64::new(0));
    Open { viewer: &viewer, handle, place, marker, touched }.check(1, 0, 100_000);
    // What is not asked for is given back by and by, and until then there is room for some.
    let (mut reader, writer) = std::io::pipe().unwrap();
    assert!((0..100).any(|_| viewer::send_descriptor(&path, &offer, &writer).is_err()));
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    ask(by(OFlags::RDONLY)).unwrap();
}

/// 1. A process sends sockets whose close waits for ever, with every message that can be sent on connecting.
/// 2. No other process is let in, and no end is noticed, for as long as that takes.
#[test]
fn hostile_descriptor() {
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = listen(&path).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    let mut others = Vec::new();
    let messages = [&hello.bytes()[..], &DescriptorOffer { version, token }.bytes(), b"x", &[7; 4000]];
    for says in messages.into_iter().chain(messages) {
        let (stream, other) = lingering();
        others.push(other);
        let end = connected(&path);
        send_with(&end, says, &stream);
        // It is not taken yet: so these are not the last descriptors, and then only the owner holds the rest.
        drop((end, stream));
    }
    let options = ServiceOptions { workers: 1, listener: Some(listener), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let begun = Instant::now();
    let again = viewer::connect(&path, &hello).unwrap().waiting_at_most(60_000);
    let file = temporary(1, 100_000);
    Open::of(&again, file.as_file()).check(1, 0, 100_000);
    assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
    // Longer than unrequested messages are kept. Then all of them wait to be closed, and no thread waits for that.
    while service.queues().waiting() < others.len() {
        assert!(begun.elapsed() < Duration::from_secs(100), "{} wait", service.queues().waiting());
        std::thread::sleep(Duration::from_millis(10));
    }
    let last = viewer::connect(&path, &hello).unwrap().waiting_at_most(60_000);
    Open::of(&last, file.as_file()).check(1, 0, 100_000);
    assert!(service.queues().waiting() >= others.len(), "the closes have ended: this shows nothing");
    service.stop();
    drop(others); // ends the closes
}

/// 1. More connect than are let in, and each sends a socket whose close waits for ever.
/// 2. Closing the listener, when the service has ended, closes those.
#[test]
fn sockets_sent_by_refused_processes_delay_no_close() {
    let owner = NaiveOwner::new(64);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = listen(&path).unwrap();
    let mut others = Vec::new();
    for _ in 0..80 {
        let end = stranger(&path, b"").unwrap();
        let (stream, other) = lingering();
        send_with(&end, b"x", &stream);
        others.push((end, other));
        std::thread::spawn(move || drop(stream));
    }
    let options = ServiceOptions { workers: 1, listener: Some(listener), ..Default::default() };
    let begun = Instant::now();
    let service = Service::start_with(owner, options).unwrap();
    service.stop();
    assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
    drop(others); // ends the closes
}

/// A socket whose close waits for ever, and its other end, whose close ends that.
fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(1000))).unwrap();
    stream.set_nonblocking(true).unwrap();
    while (&stream).write(&[0; 1 << 16]).is_ok() {}
    (stream, other)
}

fn send_with(to: impl AsFd, says: &[u8], descriptor: impl AsFd) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(to, &[std::io::IoSlice::new(says)], &mut with, SendFlags::NOSIGNAL).unwrap();
}

/// An accept that fails, as without descriptors, leaves the listener ready.
#[test]
fn a_listener_that_admits_no_process_is_looked_at_now_and_then() {
    let (reader, writer) = std::io::pipe().unwrap(); // not a listener
    (&writer).write_all(b"ready").unwrap();
    let options = ServiceOptions { workers: 1, listener: Some(reader.into()), ..Default::default() };
    let service = Service::start_with(NaiveOwner::new(64), options).unwrap();
    // Services of other tests that run in this process look for a reason.
    let ticks = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
        let ticks = |stat: String| {
            let (name, rest) = stat.split_once(") ").unwrap();
            let of_system: u64 = rest.split(' ').nth(12).unwrap().parse().unwrap();
            name.ends_with("quinion-events").then_some(of_system)
        };
        tasks.filter_map(|task| ticks(stat(task.unwrap())?)).sum::<u64>()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    assert!(ticks() < before + 40, "a fifth of a core, of a hundred ticks a second, for nobody");
    drop((service, writer));
}

/// 1. A viewer attaches a file of a file system that hangs, and says that it lies on another, so that its workers are
///    not counted: by number, and by sending it.
/// 2. Each request takes a worker until none is left, and the owner cannot be ended, nor killed.
#[test]
fn hung_file_system() {
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = ServiceOptions { workers: 2, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let Some(hanging) = Hanging::new() else { return };
    let (hung, real) = (hanging.file(), temporary(1, 100_000));
    hanging.hang(); // until it is dropped, whatever fails
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    let viewer = viewer::connect(&path, &hello).unwrap().waiting_at_most(10_000);
    let data = real.as_file().metadata().unwrap();
    let begun = Instant::now();
    // The test sends more messages than there may be threads.
    for round in 0..300 {
        let descriptor = match round % 2 {
            0 => hung.as_raw_fd() as u64,
            _ => {
                u64::from(
                    viewer::send_descriptor(&path, &DescriptorOffer { version, token }, hung.as_fd())
                        .unwrap(),
                ) | SENT
            }
        };
        // Another device each time, the honest one's among them.
        let answer = viewer.request(Operation::Attach, [descriptor, data.dev() + round / 2, data.ino()]);
        assert_eq!(answer, Err(RequestError::Errno(libc::EOPNOTSUPP)), "in round {round}");
    }
    Open::of(&viewer, real.as_file()).check(1, 0, 100_000);
    // The sent descriptors wait to be closed, and no other work waits for that.
    let another = viewer::connect(&path, &hello).unwrap().waiting_at_most(10_000);
    Open::of(&another, real.as_file()).check(1, 0, 100_000);
    service.stop();
    assert!(begun.elapsed() < Duration::from_secs(200), "{:?}", begun.elapsed());
}

fn stranger(path: &std::path::Path, says: &[u8]) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
    let _ = send(&socket, says, SendFlags::NOSIGNAL);
    Some(socket)
}

#[test]
fn nonsense_from_one_viewer_hurts_no_other() {
    let owner = NaiveOwner::new(64);
    let service = Service::start(owner.clone(), 3).unwrap();
    let mut liar = asleep();
    let (honest, lying) = (viewer(&service, us()), viewer(&service, liar.id()));
    let file = temporary(3, 1 << 20);
    let open = Open::of(&honest, file.as_file());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut x = 1u64;
            let mut next = move || {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                x
            };
            let page = lying.page();
            for _ in 0..200_000 {
                let slot = &page.requests[next() as usize % REQUEST_SLOTS];
                match next() % 7 {
                    0 => slot.state.store((next() % 8) as u32, Ordering::Relaxed),
                    1 => slot.operation.store((next() % 16) as u32, Ordering::Relaxed),
                    2 => {
                        slot.arguments[next() as usize % 3].store(next() >> (next() % 64), Ordering::Relaxed)
                    }
                    3 => page.ring_head.store(next() as u32, Ordering::Relaxed),
                    4 => page.ring[next() as usize % 4096].store(next() as u32, Ordering::Relaxed),
                    5 => page.counters[next() as usize % 32].store(next(), Ordering::Relaxed),
                    _ => page.request_futex.store(next() as u32, Ordering::Relaxed),
                }
            }
        });
        for i in 0..3000u64 {
            open.check(3, (i * 7919 * 8) % (1 << 20), 5000);
        }
    });
    liar.kill().unwrap();
    liar.wait().unwrap();
    service.stop();
}

#[test]
fn threads_of_a_viewer_read_right_while_everything_is_evicted_under_them() {
    let owner = NaiveOwner::new(24);
    let service = Service::start(owner.clone(), 2).unwrap();
    let viewer = viewer(&service, us());
    let files: Vec<_> = (0..3).map(|number| temporary(number, 300_000)).collect();
    let open: Vec<_> = files.iter().map(|file| Open::of(&viewer, file.as_file())).collect();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let open = &open;
            scope.spawn(move || {
                for i in 0..4000u64 {
                    let x = (i + 1) * (thread * 2 + 7919);
                    let (file, position, bytes) = (x % 3, x * 8 % 300_000, (x % 9000) as usize);
                    open[file as usize].check_among_others(file, position, bytes);
                }
            });
        }
    });
    let totals = service.stop();
    assert!(totals.misses > 0);
    Arc::into_inner(owner).expect("nobody else has it").arena().check().unwrap();
}

fn connected(path: &Path) -> std::os::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// 1. A process sends messages of no bytes, and behind them a socket that lingers, and closes all.
/// 2. The event loop takes the first, takes the second for the end, and closes the connection: it waits for the socket.
#[test]
fn a_descriptor_behind_empty_messages_delays_no_other() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = listen(&path).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    let mut others = Vec::new();
    for empty in [0, 1, 2, 3] {
        let (stream, other) = lingering();
        let end = connected(&path);
        for _ in 0..empty {
            send(&end, b"", SendFlags::NOSIGNAL).unwrap();
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors = [stream.as_fd()];
        assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&end, &[std::io::IoSlice::new(b"x")], &mut with, SendFlags::NOSIGNAL).unwrap();
        others.push(other);
    }
    // All of it lies there before the service starts, and is closed by the other side.
    let options = ServiceOptions { workers: 1, listener: Some(listener), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    let begun = Instant::now();
    viewer::connect(&path, &hello).expect("it is let in beside them");
    service.stop();
    assert!(begun.elapsed() < Duration::from_secs(100), "somebody waited for a socket to linger");
    drop(others); // ends the closes
}

/// 1. More connections than may be silent say nothing.
/// 2. One that speaks is closed unread.
#[test]
fn silent_connections_keep_no_process_out() {
    let owner = NaiveOwner::new(1000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = ServiceOptions { workers: 1, listener: Some(listen(&path).unwrap()), ..Default::default() };
    let _service = Service::start_with(owner.clone(), options).unwrap();
    let (token, version) = (owner.arena().token(), LAYOUT_VERSION);
    let hello = JoinRequest { version, plan: NO_PLAN, token, run: 0 };
    let _silent: Vec<_> = (0..100).map(|_| connected(&path)).collect();
    viewer::connect(&path, &hello).expect("a process that speaks is let in");
}

/// 1. Processes wait for events of an epoll instance, into memory whose faults are never answered: a lock of it is
///    held.
/// 2. They ask for it to be attached, again and again. What the kernel tells of it waits for that lock.
/// 3. No worker is left for other viewers, and none can be killed.
#[test]
fn a_descriptor_whose_lock_is_held_delays_no_other() {
    let Some(fault) = UnansweredFault::new() else {
        return eprintln!("SKIPPED: userfaultfd is refused here");
    };
    let owner = NaiveOwner::new(1000);
    let service = Service::start(owner.clone(), 4).unwrap();
    let poller = fault.epoll_in_wait();
    let file = temporary(1, 100_000);
    let data = file.as_file().metadata().unwrap();
    let (device, inode) = (data.dev(), data.ino());
    let mut children: Vec<_> = (0..5)
        .map(|_| {
            let poller = Stdio::from(poller.try_clone().unwrap());
            Command::new("sleep").arg("1000").stdin(poller).spawn().unwrap()
        })
        .collect();
    std::thread::scope(|scope| {
        for child in &children {
            let theirs = service.admit(child.id()).unwrap().view().unwrap().waiting_at_most(100);
            scope.spawn(move || {
                for _ in 0..100 {
                    std::thread::sleep(Duration::from_millis(10));
                    assert!(theirs.request(Operation::Attach, [0, device, inode]).is_err());
                }
            });
        }
    });
    let honest = service.admit(us()).unwrap().view().unwrap().waiting_at_most(10_000);
    let answer = honest.request(Operation::Attach, [file.as_file().as_raw_fd() as u64, device, inode]);
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    answer.expect("a worker is left");
}

/// Memory whose first touch waits until this is dropped.
struct UnansweredFault {
    _userfaultfd: std::os::fd::OwnedFd,
    hole: usize,
}

impl UnansweredFault {
    /// `None` if the system refuses it.
    fn new() -> Option<Self> {
        use std::os::fd::FromRawFd;
        const API: (libc::Ioctl, [u64; 3]) = (0xc018_aa3f, [0xaa, 0, 0]);
        const REGISTER: libc::Ioctl = 0xc020_aa00;
        // SAFETY: the calls are given memory of this function, of the sizes that they take, and the descriptor is new.
        unsafe {
            let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            if descriptor < 0 {
                return None;
            }
            let _userfaultfd = std::os::fd::OwnedFd::from_raw_fd(descriptor);
            let mut api = API.1;
            assert_eq!(libc::ioctl(descriptor, API.0, api.as_mut_ptr()), 0);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let hole = libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) as usize;
            let mut register = [hole as u64, 4096, 1, 0];
            assert_eq!(libc::ioctl(descriptor, REGISTER, register.as_mut_ptr()), 0);
            Some(Self { _userfaultfd, hole })
        }
    }

    /// An epoll instance of which a thread waits for an event that is there, into this memory.
    fn epoll_in_wait(&self) -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: the descriptors are new; what the thread writes to is not used for anything else.
        unsafe {
            let poller = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let ready = libc::eventfd(1, libc::EFD_CLOEXEC);
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            assert_eq!(libc::epoll_ctl(poller, libc::EPOLL_CTL_ADD, ready, &raw mut event), 0);
            let hole = self.hole;
            std::thread::spawn(move || libc::epoll_wait(poller, hole as *mut _, 8, -1));
            std::thread::sleep(Duration::from_millis(300)); // until it is there
            std::os::fd::OwnedFd::from_raw_fd(poller)
        }
    }
}
