//! Restore, takeover: a server takes over the VMs of one that runs, and each fault is answered once, by one of the two.
//!
//! ```text
//!   monitors ~~~ faults, balloons, forks ~~~> server 1 --hands over--> server 2 --> server 3 ..
//!                                                |  '-- a successor that dies, refuses, or is of something else:
//!                                                |      server 1 goes on
//!                                                '-- made up by a test, so that it can die at any step
//! ```

use quinion_testing::vmm;
mod fixture;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fixture::{Fixture, options};
use quinion_vm::{Event, OnFailure, RestoreOptions, Server, identify};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use quinion_testing::vmm::{Backing, Image, Monitor, Need, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const ALL_EVENTS: u64 = kernel::EVENT_REMOVE | kernel::EVENT_FORK | kernel::EVENT_REMAP | kernel::EVENT_UNMAP;

fn replacing() -> RestoreOptions {
    options(|o| o.replace = true)
}

/// The socket at which successors ask.
fn door(fixture: &Fixture) -> PathBuf {
    let mut name = fixture.socket().into_os_string();
    name.push(".takeover");
    name.into()
}

fn packet_socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn ask(fixture: &Fixture) -> OwnedFd {
    let socket = packet_socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(door(fixture)).unwrap()).unwrap();
    socket
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

fn receive(socket: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>) {
    let mut bytes = vec![0; 64 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    bytes.truncate(received.bytes);
    (bytes, fds)
}

fn said(socket: &OwnedFd) -> String {
    String::from_utf8(receive(socket).0).unwrap()
}

/// Waits until a successor's last packet was read.
fn wait_until_replaced(server: &Server) {
    let begun = Instant::now();
    while !server.is_replaced() {
        assert!(begun.elapsed() < Duration::from_secs(120), "it is not replaced");
        std::thread::yield_now();
    }
}

/// What a successor with the snapshot of `fixture` asks.
fn request(fixture: &Fixture) -> String {
    let image = identify(&fixture.cache, &fixture.snapshot()).unwrap();
    let file = std::fs::metadata(fixture.snapshot()).unwrap();
    let (device, inode, size) = (file.dev(), file.ino(), file.size());
    let (seconds, nanoseconds) = (file.mtime(), file.mtime_nsec());
    format!(
        "{{\"quinion_takeover\":1,\"image_bytes\":{},\"fingerprint\":{},\"vms_max\":9,\"files\":[{{\"device\":\
         {device},\"inode\":{inode},\"size\":{size},\"seconds\":{seconds},\"nanoseconds\":{nanoseconds}}}]}}",
        image.bytes, image.fingerprint
    )
}

const TAKEN: &[u8] = br#"{"quinion_takeover":1,"answer":"taken"}"#;
const SERVING: &[u8] = br#"{"quinion_takeover":1,"answer":"serving"}"#;
const REFUSED: &[u8] = br#"{"quinion_takeover":1,"answer":{"refused":"not today"}}"#;

/// Every page is read by three threads while pages are given back and servers follow each other.
#[test]
fn machines_that_fault_meanwhile_read_right_bytes_through_many_takeovers() {
    let test = "machines_that_fault_meanwhile_read_right_bytes_through_many_takeovers";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(31, 3000));
    let told = Arc::new(Mutex::new(Vec::new()));
    let with_log = |workers| {
        let log = Arc::clone(&told);
        options(|o| {
            (o.replace, o.workers) = (true, workers);
            o.observer = Some(Arc::new(move |event: &Event| log.lock().unwrap().push(event.to_string())));
        })
    };
    let mut server = fixture.serve(with_log(2));
    let mut monitors = [(); 3].map(|()| Monitor::start(&fixture.plan().in_regions(2)));
    for monitor in &mut monitors {
        monitor.does("balloon 0 20 dontneed");
        monitor.does("write 2500 10 77");
        monitor.tell("race 400 3");
    }
    for round in 0..12 {
        let next = fixture.serve(with_log(1 + round % 4));
        assert!(!next.is_replaced(), "round {round}");
        let new = next.stats();
        let old = server.stop();
        assert_eq!((old.vms, old.vms_handed_over, old.vms_given_up), (0, 3, 0), "round {round}");
        assert_eq!((new.vms, new.vms_taken_over, new.vms_total), (3, 3, 3), "round {round}");
        server = next;
    }
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
        monitor.does("touch 0 3000 3");
    }
    let mut late = Monitor::start(&fixture.plan());
    late.does("touch 0 3000 2");
    let stats = server.stop();
    assert_eq!((stats.vms_total, stats.vms_taken_over, stats.vms_given_up), (4, 3, 0));
    let told = told.lock().unwrap();
    assert_eq!(
        told.iter().filter(|line| line.contains("at the end") || line.contains("given up")).count(),
        4
    );
    let count = |part: &str| told.iter().filter(|line| line.contains(part)).count();
    assert_eq!((count("was handed over"), count("taken over, serving")), (36, 36));
    assert!(!fixture.socket().exists() && !door(&fixture).exists());
}

/// Events that one server has read are known to the next, and those that none has read are read by the next.
#[test]
fn memory_that_was_given_back_moved_or_inherited_before_a_takeover_is_known_after_it() {
    let test = "memory_that_was_given_back_moved_or_inherited_before_a_takeover_is_known_after_it";
    if !vmm::has(test, &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(32, 900));
    let first = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().features(ALL_EVENTS).in_regions(3));
    monitor.does("touch 0 100 2");
    monitor.does("balloon 50 300 dontneed");
    monitor.does("unmap 880 20");
    monitor.does("remap 0");
    let second = fixture.serve(replacing());
    drop(first);
    monitor.does("touch 20 200 2");
    monitor.does("balloon 100 350 dontneed");
    monitor.does("remap 1");
    monitor.tell("fork touch 0 400 2; balloon 500 100 dontneed; write 100 3 5; touch 0 880 2");
    let third = fixture.serve(replacing());
    drop(second);
    assert_eq!(monitor.answer().as_deref(), Some("done"));
    monitor.does("touch 0 880 3");
    assert_eq!(third.stop().vms_taken_over, 1);
}

#[test]
fn a_successor_that_ends_at_any_step_or_says_something_wrong_leaves_all_to_the_running_server() {
    let test = "a_successor_that_ends_at_any_step_or_says_something_wrong_leaves_all_to_the_running_server";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(33, 2000));
    let told = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&told);
    let server = fixture.serve(options(|o| {
        o.observer = Some(Arc::new(move |event: &Event| log.lock().unwrap().push(event.to_string())));
    }));
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("balloon 0 700 dontneed");
    let request = request(&fixture);
    let wrong = [
        (request.replace("takeover\":1", "takeover\":2"), "by version 2"),
        (request.replace("\"inode\":", "\"inode\":1"), "another snapshot"),
        (request.replace("\"seconds\":", "\"seconds\":1"), "another snapshot"),
        (request.replace("\"fingerprint\":", "\"fingerprint\":1"), "another snapshot"),
        (request.replace("\"vms_max\":9", "\"vms_max\":0"), "this one takes 0"),
        ("[]".to_owned(), "cannot be read"),
        (" ".to_owned(), "cannot be read"),
    ];
    for (text, part) in wrong {
        let socket = ask(&fixture);
        send(&socket, text.as_bytes(), &[]).unwrap();
        let answer = said(&socket);
        assert!(answer.contains("refused") && answer.contains(part), "{text}: {answer}");
        monitor.does("touch 0 50 2");
    }
    drop(ask(&fixture)); // it only looks whether there is a server
    // The offer, the VM, its states: 2000 pages are a packet.
    for packets in 0..4 {
        let socket = ask(&fixture);
        send(&socket, request.as_bytes(), &[]).unwrap();
        let mut fds = Vec::new();
        for _ in 0..packets {
            fds.push(receive(&socket));
        }
        // Faults wait meanwhile, and none is lost.
        monitor.tell(&format!("touch {} 150 3", 600 + packets * 150));
        if packets == 3 {
            send(&socket, REFUSED, &[]).unwrap();
            assert!(said(&socket).contains("not today"), "it is told that it has refused");
        }
        drop(socket);
        assert_eq!(monitor.answer().as_deref(), Some("done"), "{packets} packets");
        assert!(!server.is_replaced());
    }
    monitor.does("touch 0 2000 3");
    let told = told.lock().unwrap();
    let failed = told.iter().filter(|line| line.contains("not taken over")).count();
    assert_eq!(failed, 11, "{told:?}");
    assert!(told.iter().any(|line| line.contains("not today")), "{told:?}");
}

/// 1. A successor has received all, and says nothing.
/// 2. The running server is to end: it takes the VM back, and ends it, as at any end.
/// 3. The successor says that it has taken all. It is told that this came too late, and has to leave the VM.
#[test]
fn a_successor_that_is_late_is_told_so_and_the_machine_is_not_left_unserved() {
    let test = "a_successor_that_is_late_is_told_so_and_the_machine_is_not_left_unserved";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(34, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 1 1"); // it is served
    let socket = ask(&fixture);
    send(&socket, request(&fixture).as_bytes(), &[]).unwrap();
    let (_, doors) = receive(&socket);
    let _vm = (receive(&socket), receive(&socket));
    monitor.tell("touch 1 199 2");
    server.stop();
    assert_eq!(monitor.wait().signal(), Some(libc::SIGKILL), "fail closed");
    assert_eq!(send(&socket, TAKEN, &[]), Err(rustix::io::Errno::PIPE));
    let mut rung = [0; 8];
    assert_eq!(rustix::io::read(&doors[3], &mut rung), Ok(8), "the running server says that it went on");
}

/// 1. A successor has taken all, and ends before it serves: it may have touched the VM, or not.
/// 2. The running server has its descriptors still. It gives the VM up, which nothing would serve, and serves others.
#[test]
fn a_machine_whose_successor_ends_before_it_serves_is_given_up() {
    let test = "a_machine_whose_successor_ends_before_it_serves_is_given_up";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(43, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    let socket = ask(&fixture);
    send(&socket, request(&fixture).as_bytes(), &[]).unwrap();
    let _all = (receive(&socket), receive(&socket), receive(&socket));
    send(&socket, TAKEN, &[]).unwrap();
    drop((socket, _all));
    assert_eq!(monitor.wait().signal(), Some(libc::SIGKILL), "fail closed");
    let mut other = Monitor::start(&fixture.plan());
    other.does("touch 0 200 2");
    assert!(!server.is_replaced());
    let stats = server.stop();
    assert_eq!((stats.vms_handed_over, stats.vms_given_up), (0, 1));
}

/// 1. A successor says something wrong, and `taken` right behind it: both are there when the running server reads.
/// 2. That finds the second when it has shut the socket. No more can come: the end of packets is not the successor's.
#[test]
fn a_machine_whose_successor_takes_it_in_the_last_moment_is_the_successors_and_lives() {
    let test = "a_machine_whose_successor_takes_it_in_the_last_moment_is_the_successors_and_lives";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(46, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    // As long as it waits for the first of them, it reads nothing of the second.
    let (first, socket) = (ask(&fixture), ask(&fixture));
    send(&socket, request(&fixture).as_bytes(), &[]).unwrap();
    send(&socket, b"[]", &[]).unwrap();
    send(&socket, TAKEN, &[]).unwrap();
    drop(first);
    let (_, doors) = receive(&socket);
    let _vm = (receive(&socket), receive(&socket));
    wait_until_replaced(&server);
    let stats = server.stop();
    assert_eq!((stats.vms_handed_over, stats.vms_given_up), (1, 0));
    assert_eq!(rustix::io::read(&doors[3], &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
    assert!(fixture.socket().exists(), "it is the successor's");
    monitor.does("touch 0 100 2"); // it was not killed
}

/// 1. A peer is silent, and may be so for an hour. A successor asks, and waits for that peer.
/// 2. The successor hangs up. The running server accepts machines again.
#[test]
fn a_successor_that_hangs_up_while_a_peer_is_waited_for_keeps_no_machine_out() {
    let test = "a_successor_that_hangs_up_while_a_peer_is_waited_for_keeps_no_machine_out";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(47, 200));
    let server = fixture.serve(options(|o| o.greeting = Duration::from_secs(3600)));
    let _silent = UnixStream::connect(fixture.socket()).unwrap();
    // It was accepted before this one.
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    let socket = ask(&fixture);
    send(&socket, request(&fixture).as_bytes(), &[]).unwrap();
    drop(socket);
    Monitor::start(&fixture.plan()).does("touch 0 200 2");
    monitor.does("touch 0 200 2");
    assert!(!server.is_replaced());
}

/// The last packet decides, also if the successor ends right behind it, once it serves.
#[test]
fn a_successor_that_serves_has_all_even_if_it_ends_at_once() {
    let test = "a_successor_that_serves_has_all_even_if_it_ends_at_once";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(35, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    let socket = ask(&fixture);
    send(&socket, request(&fixture).as_bytes(), &[]).unwrap();
    let (_, doors) = receive(&socket);
    let _vm = (receive(&socket), receive(&socket));
    send(&socket, TAKEN, &[]).unwrap();
    send(&socket, SERVING, &[]).unwrap();
    drop(socket);
    wait_until_replaced(&server);
    let stats = server.stop();
    assert_eq!((stats.vms, stats.vms_handed_over, stats.vms_given_up), (0, 1, 0));
    assert!(fixture.socket().exists(), "it is the successor's");
    assert_eq!(rustix::io::read(&doors[3], &mut [0; 8]), Err(rustix::io::Errno::AGAIN));
    monitor.does("touch 0 100 2"); // it was not killed
}

#[test]
fn another_snapshot_and_one_that_a_machine_has_mapped_are_not_taken_over() {
    let test = "another_snapshot_and_one_that_a_machine_has_mapped_are_not_taken_over";
    if !vmm::has(test, &[Need::Userfault(kernel::EVENT_REMOVE | kernel::MINOR_SHMEM)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(36, 300));
    let server = fixture.serve(options(|o| o.minor = true));
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    // A copy has the same pages, and may have others where no sample was taken.
    let copy = fixture.disk.path().join("copy");
    std::fs::copy(fixture.snapshot(), &copy).unwrap();
    let refused = |snapshot: &Path| {
        Server::start(&fixture.cache, snapshot, &fixture.socket(), replacing()).unwrap_err().to_string()
    };
    let why = refused(&copy);
    assert!(why.contains("another snapshot") && why.contains("the very same file"), "{why}");
    monitor.does("touch 0 300 2");

    let mut mapped = Monitor::start(&fixture.plan().backing(Backing::Offered).features(kernel::MINOR_SHMEM));
    mapped.does("touch 0 100 2");
    let why = refused(&fixture.snapshot());
    assert!(why.contains("has mapped the running server's memory"), "{why}");
    mapped.does("touch 0 300 2");
    monitor.does("write 0 10 3");
    drop(mapped);
    while server.stats().vms > 1 {
        std::thread::yield_now();
    }
    let next = fixture.serve(replacing());
    wait_until_replaced(&server);
    drop(server);
    monitor.does("touch 0 300 2");
    assert_eq!(next.stop().vms_taken_over, 1);
}

#[test]
fn a_record_that_is_being_made_goes_on_in_the_next_server() {
    let test = "a_record_that_is_being_made_goes_on_in_the_next_server";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(37, 300));
    let first = fixture.serve(options(|o| o.record = true));
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 100 1 1");
    monitor.does("touch 7 1 1");
    let second = fixture.serve(options(|o| (o.record, o.replace) = (true, true)));
    monitor.does("touch 50 1 1");
    let pages = |server: &Server| {
        let record = server.record().unwrap();
        record.entries().iter().map(|entry| entry.page).collect::<Vec<_>>()
    };
    assert_eq!((pages(&first), pages(&second)), (vec![100, 7], vec![100, 7, 50]));
}

#[test]
fn a_successor_without_a_running_server_just_serves() {
    let test = "a_successor_without_a_running_server_just_serves";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(38, 50));
    // One was killed, and left its sockets.
    drop(UnixListener::bind(fixture.socket()).unwrap());
    let left = packet_socket();
    rustix::net::bind(&left, &SocketAddrUnix::new(door(&fixture)).unwrap()).unwrap();
    drop(left);
    let _server = fixture.serve(replacing());
    Monitor::start(&fixture.plan()).does("touch 0 50 2");
    let other =
        Server::start(&fixture.cache, &fixture.snapshot(), &fixture.socket(), RestoreOptions::default());
    assert!(
        other.unwrap_err().to_string().contains("another server listens"),
        "only who asks for it replaces one"
    );
}

/// A running server made up by a test, with one VM.
struct MadeUp {
    _listener: UnixListener,
    door: OwnedFd,
    process: std::process::Child,
    resumed: OwnedFd,
    connection: std::os::unix::net::UnixStream,
    uffd: OwnedFd,
    address: u64,
    pages: u64,
}

impl MadeUp {
    fn start(fixture: &Fixture, monitor: &mut Monitor) -> Self {
        let listener = UnixListener::bind(fixture.socket()).unwrap();
        let door_of = packet_socket();
        rustix::net::bind(&door_of, &SocketAddrUnix::new(door(fixture)).unwrap()).unwrap();
        rustix::net::listen(&door_of, 1).unwrap();
        monitor.tell(&fixture.plan().command());
        let (connection, _) = listener.accept().unwrap();
        let (text, mut fds) = kernel::receive(&connection).unwrap();
        assert_eq!(monitor.answer().as_deref(), Some("done"));
        let regions: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let number = |key: &str| regions[0][key].as_u64().unwrap();
        Self {
            _listener: listener,
            door: door_of,
            process: std::process::Command::new("sleep").arg("1000").spawn().unwrap(),
            resumed: rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap(),
            connection,
            uffd: fds.remove(0),
            address: number("base_host_virt_addr"),
            pages: number("size") / 4096,
        }
    }

    /// Answers a successor: says that there are `vms` VMs, hands over the descriptors of its one VM for each of them,
    /// and the pages of the first `whole` of them, and hangs up.
    fn hand_over(&self, vms: u64, whole: u64) {
        let socket = rustix::net::accept(&self.door).unwrap();
        assert!(said(&socket).starts_with("{\"quinion_takeover\":1"));
        // It takes no answer, however soon that comes.
        rustix::net::shutdown(&socket, rustix::net::Shutdown::Read).unwrap();
        let pid = rustix::process::Pid::from_child(&self.process);
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let offer = format!("{{\"quinion_takeover\":1,\"vms\":{vms},\"inodes\":[1,2],\"record_bytes\":0}}");
        let doors = [self._listener.as_fd(), self.door.as_fd(), process.as_fd(), self.resumed.as_fd()];
        send(&socket, offer.as_bytes(), &doors).unwrap();
        // The first half of its pages was given back.
        let words = self.pages / 32;
        let mut states = vec![4096, 1, self.address, 0, self.pages];
        states.extend((0..words).map(|word| if word < words / 2 { u64::MAX / 3 * 2 } else { 0 }));
        let bytes: Vec<u8> = states.iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        let pid = rustix::net::sockopt::socket_peercred(&self.connection).unwrap().pid;
        let alive = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let head = format!(
            "{{\"quinion_takeover\":1,\"process\":{pid},\"has_process\":true,\"spaces\":1,\"bytes\":{}}}",
            bytes.len()
        );
        for _ in 0..vms {
            let fds = [self.connection.as_fd(), alive.as_fd(), self.uffd.as_fd()];
            send(&socket, head.as_bytes(), &fds).unwrap();
        }
        for _ in 0..whole {
            send(&socket, &bytes, &[]).unwrap();
        }
    }

    fn die(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for MadeUp {
    fn drop(&mut self) {
        self.die();
    }
}

fn successor(
    fixture: &Fixture,
    told: &Arc<Mutex<Vec<String>>>,
    on_failure: OnFailure,
) -> Result<Server, String> {
    let log = Arc::clone(told);
    let options = options(|o| {
        (o.replace, o.on_failure) = (true, on_failure);
        o.observer = Some(Arc::new(move |event: &Event| log.lock().unwrap().push(event.to_string())));
    });
    Server::start(&fixture.cache, &fixture.snapshot(), &fixture.socket(), options).map_err(|e| e.to_string())
}

/// The running server has handed over all and takes no answer any more. If it says that it goes on, the successor
/// touches nothing; if it has died before it said so, the successor serves. Until either is known it waits.
#[test]
fn a_running_server_that_died_after_it_sent_all_is_succeeded_and_one_that_went_on_is_not() {
    let test = "a_running_server_that_died_after_it_sent_all_is_succeeded_and_one_that_went_on_is_not";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let mut fixture = Fixture::new(Image::new(39, 640));
    let told = Arc::default();
    let mut monitor = Monitor::idle();
    let mut running = MadeUp::start(&fixture, &mut monitor);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| successor(&fixture, &told, OnFailure::Leave));
        running.hand_over(1, 1);
        rustix::io::write(&running.resumed, &1_u64.to_ne_bytes()).unwrap();
        // Also if it dies now: it may have touched the VM.
        running.die();
        let why = next.join().unwrap().unwrap_err();
        assert!(why.contains("hung up"), "{why}");
    });
    assert!(fixture.socket().exists() && told.lock().unwrap().is_empty(), "it has touched nothing");
    drop(running);

    fixture = Fixture::new(Image::new(40, 640));
    let mut monitor = Monitor::idle();
    let mut running = MadeUp::start(&fixture, &mut monitor);
    let server = std::thread::scope(|scope| {
        let next = scope.spawn(|| successor(&fixture, &told, OnFailure::Leave));
        running.hand_over(1, 1);
        running.die();
        next.join().unwrap().unwrap()
    });
    monitor.tell("balloon 0 320 dontneed");
    assert_eq!(monitor.answer().as_deref(), Some("done"));
    monitor.does("touch 0 640 3");
    assert_eq!((server.stats().vms, server.stats().vms_taken_over), (1, 1));
}

#[test]
fn machines_that_a_dead_server_had_not_handed_over_as_a_whole_are_named_and_others_are_served() {
    let test = "machines_that_a_dead_server_had_not_handed_over_as_a_whole_are_named_and_others_are_served";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    for taken in [1, 0] {
        let (fixture, told) = (Fixture::new(Image::new(41, 640)), Arc::default());
        let mut monitor = Monitor::idle();
        let mut running = MadeUp::start(&fixture, &mut monitor);
        let server = std::thread::scope(|scope| {
            let next = scope.spawn(|| successor(&fixture, &told, OnFailure::Leave));
            running.hand_over(2, taken);
            running.die();
            next.join().unwrap().unwrap()
        });
        assert_eq!(server.stats().vms_taken_over, taken);
        let line = format!("{taken} of its 2 VMs are served by this one; end the others");
        assert!(told.lock().unwrap().iter().any(|told| told.contains(&line)), "{told:?}");
        if taken == 1 {
            monitor.does("touch 320 320 2");
        }
    }
}

/// 1. The descriptors of a VM have come, and what is known of its pages has not, when the running server dies.
/// 2. Nothing can serve the VM: it would wait without end, or read zeros.
#[test]
fn a_machine_whose_pages_a_dead_server_had_not_told_of_is_killed() {
    let test = "a_machine_whose_pages_a_dead_server_had_not_told_of_is_killed";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let (fixture, told) = (Fixture::new(Image::new(44, 640)), Arc::default());
    let mut monitor = Monitor::idle();
    let mut running = MadeUp::start(&fixture, &mut monitor);
    let server = std::thread::scope(|scope| {
        let next = scope.spawn(|| successor(&fixture, &told, OnFailure::Kill));
        running.hand_over(1, 0);
        running.die();
        next.join().unwrap().unwrap()
    });
    assert_eq!(monitor.wait().signal(), Some(libc::SIGKILL));
    assert_eq!(server.stats().vms_taken_over, 0);
}

/// 1. A server is to take over, and is told to end before it is decided: a signal, say.
/// 2. The running server goes on with its VMs.
#[test]
fn a_successor_that_is_to_end_before_it_is_decided_takes_nothing() {
    let test = "a_successor_that_is_to_end_before_it_is_decided_takes_nothing";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(45, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 2");
    let ending = rustix::event::eventfd(1, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let options = options(|o| (o.replace, o.ending) = (true, Some(Arc::new(ending))));
    let ended = Server::start(&fixture.cache, &fixture.snapshot(), &fixture.socket(), options);
    let why = ended.unwrap_err().to_string();
    assert!(why.contains("ends"), "{why}");
    monitor.does("touch 0 200 3");
    assert!(!server.is_replaced());
}

/// A path that is as long as one can be has room for no other name beside it, and yet its server can be replaced.
#[test]
fn a_server_at_the_longest_path_is_taken_over() {
    let test = "a_server_at_the_longest_path_is_taken_over";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(42, 100));
    let folder = fixture.socket().parent().unwrap().to_owned();
    let socket = folder.join("s".repeat(107 - folder.as_os_str().len() - 1));
    let start = |options| {
        Server::start(&fixture.cache, &fixture.snapshot(), &socket, options).expect("a path of 107 bytes")
    };
    let first = start(RestoreOptions::default());
    let mut plan = fixture.plan();
    plan.socket = socket.clone();
    let mut monitor = Monitor::start(&plan);
    let second = start(replacing());
    drop(first);
    monitor.does("touch 0 100 2");
    drop(second);
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    // The snapshot itself was only read.
    let mut first_page = vec![0; 4096];
    File::open(fixture.snapshot()).unwrap().read_exact(&mut first_page).unwrap();
    assert_eq!(first_page, fixture.image.page(0));
}
