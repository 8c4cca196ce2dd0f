//! Restore: memory that is registered, handed over and touched has the snapshot's bytes, whatever its VM does to it
//! meanwhile.
//!
//! The VMs here are ranges of this process, touched by its threads; the server's threads run beside them. So the server
//! leaves a VM that it gives up (`OnFailure::Leave`) and does not kill it. The command's tests kill VMs, in processes
//! of their own.
#![allow(unsafe_code, reason = "memory is mapped, touched and given back by address")]

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::ptr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quinion::Cache;
use quinion_vm::internals::{Modes, Uffd, feature};
use quinion_vm::{Event, OnFailure, PeerError, RestoreOptions, Server};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

const PAGE: usize = 4096;
const PAGES: usize = 1024;

const WATCHDOG: Duration = Duration::from_secs(300);

/// If not, it prints why the tests are skipped.
fn may() -> bool {
    match Uffd::create() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: userfaultfd cannot be used here: {error}");
            false
        }
    }
}

/// Byte `at` of the image; every fourth page is zeros.
fn byte(at: usize) -> u8 {
    let page = at / PAGE;
    if page.is_multiple_of(4) { 0 } else { (page * 31 + at % PAGE * 7 + 1) as u8 }
}

struct Fixture {
    folder: tempfile::TempDir,
    cache: Cache,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let bytes: Vec<u8> = (0..PAGES * PAGE).map(byte).collect();
        std::fs::write(folder.path().join("snapshot"), bytes).expect("room for it");
        Self { folder, cache: Cache::builder().memory(32 << 20).build().expect("a small cache") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A server, with a receiver of its events.
    fn serve(&self, mut options: RestoreOptions) -> (Server, Receiver<EventText>) {
        let (sender, receiver) = channel();
        options.on_failure = OnFailure::Leave;
        if options.greeting == RestoreOptions::new().greeting {
            // Long enough for a slow machine.
            options.greeting = WATCHDOG;
        }
        let sender: Mutex<Sender<EventText>> = Mutex::new(sender);
        options.observer = Some(Arc::new(move |event: &Event| {
            let _ = sender.lock().expect("a sender").send(EventText::of(event));
        }));
        let server = Server::start(&self.cache, &self.path("snapshot"), &self.path("socket"), options);
        (server.expect("a server"), receiver)
    }
}

#[derive(Debug)]
struct EventText(String);

impl EventText {
    fn of(event: &Event) -> Self {
        Self(match event {
            Event::Refused { why, .. } => format!("refused: {why}"),
            Event::GivenUp { why, .. } => format!("given up: {why}"),
            other => format!("{other:?}"),
        })
    }
}

fn wait_for(events: &Receiver<EventText>, text: &str) -> String {
    loop {
        let EventText(event) = events.recv_timeout(WATCHDOG).expect("it is told in the end");
        if event.contains(text) {
            return event;
        }
    }
}

struct Memory {
    base: *mut u8,
    pages: usize,
    uffd: Uffd,
    _socket: UnixStream,
}

// SAFETY: any thread may touch the memory; all accesses are volatile.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

fn map(pages: usize) -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let base = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        rustix::mm::mmap_anonymous(ptr::null_mut(), pages * PAGE, protection, flags).expect("room for it")
    };
    // SAFETY: the range was just mapped. Without the advice a first touch could supply a large page.
    unsafe { rustix::mm::madvise(base, pages * PAGE, Advice::LinuxNoHugepage).expect("advice") };
    base.cast()
}

fn send(socket: &UnixStream, text: &str, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let words = [IoSlice::new(text.as_bytes())];
    let sent = rustix::net::sendmsg(socket, &words, &mut control, SendFlags::NOSIGNAL).expect("it listens");
    assert_eq!(sent, text.len());
}

fn region(base: *mut u8, pages: usize, page_size: usize) -> String {
    let (base, size) = (base.addr(), pages * PAGE);
    format!(r#"{{"base_host_virt_addr":{base},"size":{size},"offset":0,"page_size":{page_size}}}"#)
}

impl Memory {
    fn new(fixture: &Fixture, features: u64) -> Self {
        Self::at(fixture, map(PAGES), PAGE, features)
    }

    fn at(fixture: &Fixture, base: *mut u8, page_size: usize, features: u64) -> Self {
        let uffd = Uffd::create().expect("it may be used");
        uffd.handshake(features).expect("the kernel has these");
        let start = base.addr() as u64;
        // SAFETY: the range was mapped for this VM.
        unsafe { uffd.register(start..start + (PAGES * PAGE) as u64, Modes::Missing) }
            .expect("anonymous memory");
        let socket = UnixStream::connect(fixture.path("socket")).expect("it listens");
        send(&socket, &format!("[{}]", region(base, PAGES, page_size)), &[uffd.as_fd()]);
        Self { base, pages: PAGES, uffd, _socket: socket }
    }

    fn read(&self, at: usize) -> u8 {
        assert!(at < self.pages * PAGE);
        // SAFETY: it is mapped; a thread that touches a missing page waits for the server.
        unsafe { self.base.add(at).read_volatile() }
    }

    fn write(&self, at: usize, value: u8) {
        assert!(at < self.pages * PAGE);
        // SAFETY: as above.
        unsafe { self.base.add(at).write_volatile(value) }
    }

    #[track_caller]
    fn expect_page(&self, page: usize) {
        for inside in [0, 1, 2047, 4095] {
            let at = page * PAGE + inside;
            assert_eq!(self.read(at), byte(at), "byte {inside} of page {page}");
        }
    }

    fn remove(&self, first: usize, pages: usize) {
        // SAFETY: the range is this test's, and reads as zeros afterwards.
        let result = unsafe {
            rustix::mm::madvise(self.base.add(first * PAGE).cast(), pages * PAGE, Advice::LinuxDontNeed)
        };
        result.expect("it is mapped");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no thread touches the range any more; unmapping a hole is not an error.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.pages * PAGE) };
    }
}

#[test]
fn several_threads_read_the_snapshots_bytes() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    std::thread::scope(|threads| {
        for thread in 0..3 {
            let memory = &memory;
            threads.spawn(move || {
                // Each thread reads in another order, and every thread reads every page.
                (0..PAGES).for_each(|i| memory.expect_page(i * (2 * thread + 1) * 37 % PAGES));
            });
        }
    });
    wait_for(&events, "Begun");
    let stats = server.stop();
    let counters = &stats.counters;
    assert_eq!((stats.vms_total, stats.vms_given_up, stats.peers_refused), (1, 0, 0));
    // A fault brings sixteen pages, and half of 2 MiB the rest; two threads that touch one page cause two faults.
    let faults = counters.faults - counters.faults_present;
    assert!((PAGES as u64 / 32..PAGES as u64 / 4).contains(&faults), "{counters:?}");
    assert!(counters.demand_bytes + counters.ahead_bytes >= (PAGES * PAGE) as u64, "{counters:?}");
    assert!(counters.zero_bytes >= (PAGES * PAGE / 4) as u64, "{counters:?}");
    assert_eq!(counters.latency.count(), counters.faults);
}

#[test]
fn memory_given_back_is_zeros_and_stays_so() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    memory.expect_page(33);
    // The range has pages that were present and pages that were not.
    memory.remove(32, 64);
    (32..96).for_each(|page| assert_eq!(memory.read(page * PAGE + 1), 0, "page {page}"));
    memory.write(33 * PAGE + 1, 9);
    memory.remove(33, 1);
    assert_eq!(memory.read(33 * PAGE + 1), 0);
    (0..32).chain(96..128).for_each(|page| memory.expect_page(page));
    assert_eq!(server.stop().counters.removed_bytes, 65 * PAGE as u64);
}

#[test]
fn memory_in_large_pages_is_supplied_in_large_pages() {
    if !may() {
        return;
    }
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::HUGETLB);
    // SAFETY: the kernel chooses an unused address.
    let mapped = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), PAGES * PAGE, protection, flags) };
    let Ok(base) = mapped else {
        eprintln!("skipped: this machine keeps no large pages (vm.nr_hugepages)");
        return;
    };
    let fixture = Fixture::new();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::at(&fixture, base.cast(), 2 << 20, feature::EVENT_REMOVE);
    (0..PAGES).rev().for_each(|page| memory.expect_page(page));
    memory.remove(PAGES / 2, PAGES / 2);
    (0..PAGES / 2).for_each(|page| memory.expect_page(page));
    (PAGES / 2..PAGES).for_each(|page| assert_eq!(memory.read(page * PAGE + 1), 0, "page {page}"));
    // Two large pages of the snapshot, and one of zeros.
    assert_eq!(server.stop().counters.faults, 3);
}

#[test]
fn pages_are_given_back_while_others_are_touched() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    std::thread::scope(|threads| {
        // The lower half is given back piece by piece, and read behind that; other threads read the upper half
        // meanwhile.
        threads.spawn(|| {
            for first in (0..PAGES / 2).step_by(8) {
                memory.remove(first, 8);
                (first..first + 8)
                    .for_each(|page| assert_eq!(memory.read(page * PAGE + 5), 0, "page {page}"));
            }
        });
        for thread in 0..2 {
            let memory = &memory;
            threads.spawn(move || {
                (0..PAGES / 2)
                    .for_each(|i| memory.expect_page(PAGES / 2 + i * (2 * thread + 1) * 5 % (PAGES / 2)));
            });
        }
    });
    drop(server);
}

#[test]
fn memory_that_is_moved_or_unmapped_keeps_its_bytes_or_goes() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let events = feature::EVENT_REMOVE | feature::EVENT_REMAP | feature::EVENT_UNMAP;
    let memory = Memory::new(&fixture, events);
    memory.expect_page(17);
    let target = map(64);
    // SAFETY: both ranges are this test's, and no thread touches the first one any more.
    unsafe {
        let flags = MremapFlags::MAYMOVE;
        let from = memory.base.add(16 * PAGE).cast();
        rustix::mm::mremap_fixed(from, 32 * PAGE, 32 * PAGE, flags, target.cast()).expect("moved");
        rustix::mm::munmap(memory.base.add(100 * PAGE).cast(), 8 * PAGE).expect("unmapped");
    }
    for (page, inside) in [(0, 3), (1, 3), (15, 4095), (31, 7)] {
        // SAFETY: the range was just moved there.
        let found = unsafe { target.add(page * PAGE + inside).read_volatile() };
        assert_eq!(found, byte((16 + page) * PAGE + inside), "page {page} behind the move");
    }
    (0..16).chain(48..100).chain(108..140).for_each(|page| memory.expect_page(page));
    // SAFETY: no thread touches the range any more.
    unsafe { rustix::mm::munmap(target.cast(), 64 * PAGE) }.expect("ours");
    // The server has to read this unmap event, too, before it ends: the unmapping thread waits until it has.
    drop(memory);
    drop(server);
}

#[test]
fn a_fork_has_its_parents_pages_and_the_snapshot_for_the_rest() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE | feature::EVENT_FORK);
    memory.expect_page(1);
    memory.write(PAGE, 77);
    memory.remove(64, 16);
    // A raw system call: the C library's `fork` keeps the allocator locked until the server, in this process, has read
    // the event.
    // SAFETY: the child touches memory and ends; it allocates nothing and takes no lock.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    if child == 0 {
        let right = memory.read(PAGE) == 77
            && memory.read(PAGE + 1) == byte(PAGE + 1)
            && (65..80).all(|page| memory.read(page * PAGE + 1) == 0)
            && (200..300).all(|page| memory.read(page * PAGE + 9) == byte(page * PAGE + 9));
        // SAFETY: the child ends without running any destructor or exit handler.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    assert!(child > 0);
    (200..300).for_each(|page| memory.expect_page(page));
    let mut status = -1;
    // SAFETY: the child is this process's, and is waited for once.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0), "the child found something else");
    drop(server);
}

#[test]
fn recorded_pages_are_there_before_they_are_asked_for() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let mut options = RestoreOptions::new();
    options.record = true;
    options.run_bytes = 4096;
    let (server, _events) = fixture.serve(options);
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    let wanted = [900, 901, 902, 5, 6, 7, 333, 1];
    wanted.iter().for_each(|&page| memory.expect_page(page));
    let record = server.record().expect("it was recorded");
    drop(server);
    let pages: Vec<usize> = record.entries().iter().map(|entry| entry.page as usize).collect();
    assert_eq!(pages, wanted);
    let path = fixture.path("record");
    record.write(&path).expect("room for it");

    let mut options = RestoreOptions::new();
    options.run_bytes = 4096;
    options.replay = Some(record.clone());
    let (server, _events) = fixture.serve(options);
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    while server.stats().counters.ahead_bytes < (wanted.len() * PAGE) as u64 {
        std::thread::yield_now();
    }
    let before = server.stats().counters.faults;
    wanted.iter().for_each(|&page| memory.expect_page(page));
    let counters = server.stop().counters;
    assert_eq!((before, counters.faults, counters.demand_bytes), (0, 0, 0), "nothing had to be asked for");
    drop(memory);
}

/// The image's memory, as a peer that asks for it receives it.
fn ask_for_the_image(socket: &UnixStream) -> OwnedFd {
    send(socket, r#"{"quinion_restore":1,"want":"image"}"#, &[]);
    let (mut text, mut found) = ([0; 256], None);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut words = [IoSliceMut::new(&mut text)];
    let received = rustix::net::recvmsg(socket, &mut words, &mut control, RecvFlags::CMSG_CLOEXEC);
    let bytes = received.expect("an answer").bytes;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            found = fds.last();
        }
    }
    let wanted = format!("{{\"quinion_restore\":1,\"size\":{},\"page_size\":4096}}\n", PAGES * PAGE);
    assert_eq!(String::from_utf8_lossy(&text[..bytes]), wanted);
    found.expect("the image's memory")
}

impl Memory {
    fn mapped(fixture: &Fixture) -> Self {
        let socket = UnixStream::connect(fixture.path("socket")).expect("it listens");
        let image = ask_for_the_image(&socket);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused address.
        let base = unsafe {
            rustix::mm::mmap(ptr::null_mut(), PAGES * PAGE, protection, MapFlags::PRIVATE, &image, 0)
        };
        let base = base.expect("it can be mapped").cast::<u8>();
        let uffd = Uffd::create().expect("it may be used");
        let features = feature::MISSING_SHMEM | feature::MINOR_SHMEM | feature::EVENT_REMOVE;
        uffd.handshake(features).expect("the kernel has these");
        let start = base.addr() as u64;
        let range = start..start + (PAGES * PAGE) as u64;
        // SAFETY: the range was mapped for this VM.
        unsafe { uffd.register(range, Modes::MissingAndMinor) }.expect("memory of a file");
        send(&socket, &format!("[{}]", region(base, PAGES, PAGE)), &[uffd.as_fd()]);
        Self { base, pages: PAGES, uffd, _socket: socket }
    }
}

#[test]
fn clones_of_one_image_share_it_until_they_write() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let mut options = RestoreOptions::new();
    (options.minor, options.record) = (true, true);
    let (server, events) = fixture.serve(options);
    let clones = [Memory::mapped(&fixture), Memory::mapped(&fixture)];
    // A VM that uses the other dialect, beside it.
    let copied = Memory::new(&fixture, feature::EVENT_REMOVE);
    std::thread::scope(|threads| {
        for (number, clone) in clones.iter().enumerate() {
            threads.spawn(move || {
                for page in (0..PAGES).map(|i| i * (2 * number + 1) * 37 % PAGES) {
                    clone.expect_page(page);
                    clone.write(page * PAGE + 1, number as u8 + 100);
                }
            });
        }
        threads.spawn(|| (0..PAGES).for_each(|page| copied.expect_page(page)));
    });
    for (number, clone) in clones.iter().enumerate() {
        assert!((0..PAGES).all(|page| clone.read(page * PAGE + 1) == number as u8 + 100));
        // Pages that are given back show the image again.
        clone.remove(40, 8);
        (40..48).for_each(|page| clone.expect_page(page));
    }
    (0..3).for_each(|_| drop(wait_for(&events, "Begun")));
    let record = server.record().expect("it was recorded");
    assert_eq!(record.pages(), PAGES as u64);
    let counters = server.stop().counters;
    assert!(counters.mapped_bytes >= 2 * (PAGES * PAGE) as u64, "{counters:?}");
    drop(clones);

    // The recorded pages are mapped before the clone touches them.
    let mut options = RestoreOptions::new();
    (options.minor, options.replay) = (true, Some(record));
    let (server, _events) = fixture.serve(options);
    let clone = Memory::mapped(&fixture);
    while server.stats().counters.ahead_bytes < (PAGES * PAGE) as u64 {
        std::thread::yield_now();
    }
    (0..PAGES).for_each(|page| clone.expect_page(page));
    let counters = server.stop().counters;
    assert_eq!((counters.faults, counters.mapped_bytes), (0, (PAGES * PAGE) as u64), "{counters:?}");
}

fn answer(mut socket: &UnixStream) -> String {
    let mut text = String::new();
    // A server that closes the connection with bytes unread resets it, which is an end, too.
    let _ = socket.read_to_string(&mut text);
    text
}

#[test]
fn peers_that_talk_nonsense_get_an_error_and_are_closed_alone() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    memory.expect_page(1);
    let connect = || UnixStream::connect(fixture.path("socket")).expect("it listens");
    let file = std::fs::File::open(fixture.path("snapshot")).expect("it is there");
    let good = format!("[{}]", region(memory.base, 1, PAGE));
    let (none, one, many) = (vec![], vec![file.as_fd()], vec![file.as_fd(); 5]);
    let cases = [
        ("GET / HTTP/1.0\r\n\r\n", &none, "not JSON"),
        (&good, &one, "none of the descriptors"),
        (&good, &many, "more than 4 descriptors"),
        ("[]", &one, "0 regions"),
        (r#"{"quinion_restore":1,"want":"image"}"#, &none, "--minor"),
        (r#"{"quinion_restore":9,"want":"image"}"#, &none, "version 9"),
    ];
    for (text, fds, wanted) in cases {
        let socket = connect();
        send(&socket, text, fds);
        assert!(wait_for(&events, "refused").contains(wanted), "{text}");
        assert!(answer(&socket).contains(wanted), "{text}");
    }
    drop(connect());
    assert!(wait_for(&events, "refused").contains("ended before"));
    // Invalid regions of a VM end that VM.
    let socket = connect();
    send(&socket, &format!("[{}]", region(memory.base, PAGES + 1, PAGE)), &[memory.uffd.as_fd()]);
    assert!(wait_for(&events, "given up").contains("of the snapshot"));
    assert!(answer(&socket).contains("error"));
    // The VM that was there before is still served.
    (2..200).for_each(|page| memory.expect_page(page));
    let stats = server.stop();
    assert_eq!((stats.vms_total, stats.vms_given_up, stats.peers_refused), (1, 1, 7));
}

#[test]
fn a_silent_peer_is_closed_and_one_too_many_is_refused() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let mut options = RestoreOptions::new();
    options.greeting = Duration::from_millis(50);
    let (server, events) = fixture.serve(options);
    let socket = UnixStream::connect(fixture.path("socket")).expect("it listens");
    assert!(wait_for(&events, "refused").contains("did not come within 50ms"));
    assert!(answer(&socket).contains("50ms"));
    // It has said all but for its descriptor.
    let socket = UnixStream::connect(fixture.path("socket")).expect("it listens");
    send(&socket, &format!("[{}]", region(std::ptr::without_provenance_mut(4096), 1, PAGE)), &[]);
    assert!(wait_for(&events, "refused").contains("no userfaultfd came with them"));
    assert!(answer(&socket).contains("no userfaultfd came with them"));
    drop(server);
    let mut options = RestoreOptions::new();
    options.vms_max = 1;
    let (server, events) = fixture.serve(options);
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    memory.expect_page(1);
    let mut socket = UnixStream::connect(fixture.path("socket")).expect("it listens");
    assert!(wait_for(&events, "refused").contains("1 VMs are served already"));
    let _ = socket.write_all(b"[");
    memory.expect_page(100);
    drop(server);
}

#[test]
fn a_snapshot_that_changes_is_no_longer_served() {
    if !may() {
        return;
    }
    let fixture = Fixture::new();
    let (server, events) = fixture.serve(RestoreOptions::new());
    let memory = Memory::new(&fixture, feature::EVENT_REMOVE);
    memory.expect_page(1);
    let file = std::fs::OpenOptions::new().write(true).open(fixture.path("snapshot")).expect("it is ours");
    file.set_len((PAGES * PAGE / 2) as u64).expect("it is ours");
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("it is ours");
    // The server does not answer this fault any more: a thread of a VM that is left waits until no process holds the
    // userfaultfd.
    let memory = Arc::new(memory);
    let touch = {
        let memory = Arc::clone(&memory);
        std::thread::spawn(move || memory.read(PAGE * 40))
    };
    assert!(wait_for(&events, "given up").contains("changed or cut"));
    let second = Memory::new(&fixture, feature::EVENT_REMOVE);
    assert!(wait_for(&events, "given up").contains("changed or cut"));
    // This process holds the userfaultfd, too, so the fault can be answered here.
    let page = memory.base.addr() as u64 + (PAGE * 40) as u64;
    let moved = memory.uffd.zero(page..page + PAGE as u64);
    assert_eq!(moved.bytes, PAGE as u64, "it was not supplied: {moved:?}");
    assert_eq!(touch.join().expect("it went on"), 0);
    assert_eq!(server.stop().vms_given_up, 2);
    drop(second);
}

#[test]
fn the_socket_is_ours_alone_and_removed_at_the_end() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    let start = |socket: PathBuf| {
        Server::start(&fixture.cache, &fixture.path("snapshot"), &socket, RestoreOptions::new())
    };
    let refused = |socket: PathBuf| start(socket).expect_err("refused").to_string();
    let (server, _events) = fixture.serve(RestoreOptions::new());
    let metadata = std::fs::metadata(fixture.path("socket")).expect("it is there");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(refused(fixture.path("socket")).contains("another server listens there"));
    assert!(refused(fixture.path("snapshot")).contains("something else"));
    assert!(refused(fixture.path("none/socket")).contains("none/socket"));
    drop(server);
    assert!(!fixture.path("socket").exists());
    // The server replaces a socket on which no process listens.
    drop(std::os::unix::net::UnixListener::bind(fixture.path("socket")).expect("a socket"));
    assert!(fixture.path("socket").exists());
    drop(start(fixture.path("socket")).expect("a server"));
    assert!(!fixture.path("socket").exists());
    let mut options = RestoreOptions::new();
    options.run_bytes = 5000;
    let wrong = Server::start(&fixture.cache, &fixture.path("snapshot"), &fixture.path("socket"), options);
    assert!(wrong.expect_err("no power of two").to_string().contains("power of two"));
    assert!(PeerError::HungUp.to_string().contains("before"));
}
