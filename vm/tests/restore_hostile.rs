//! Hostile: a page-fault server serves well-behaved monitors, whatever other peers send to its socket.
//!
//! ```text
//!   a peer that lies, is silent, sends what it should not, is one of thousands  ---> closed, with an error
//!   a monitor beside it                                                         ---> its pages
//! ```

use quinion_testing::vmm;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use quinion::Cache;
use quinion_vm::{OnFailure, RestoreOptions, Server};
use tempfile::TempDir;

use quinion_testing::vmm::kernel::{self, Userfault};
use quinion_testing::vmm::{Image, Monitor, Need, Plan};

fn options(choose: impl FnOnce(&mut RestoreOptions)) -> RestoreOptions {
    let mut options = RestoreOptions::default();
    choose(&mut options);
    options
}

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const PAGES: u64 = 300;

/// A child process closes its copies of this process's descriptors when it starts, and waits if one of those sockets
/// lingers. So the test with lingering sockets runs alone.
static APART: RwLock<()> = RwLock::new(());

enum Turn {
    Beside(#[expect(dead_code, reason = "held")] RwLockReadGuard<'static, ()>),
    Alone(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>),
}

struct Fixture {
    folder: TempDir,
    image: Image,
    cache: Cache,
    _turn: Turn,
}

impl Fixture {
    fn new() -> Self {
        Self::with(Turn::Beside(APART.read().unwrap_or_else(PoisonError::into_inner)))
    }
    fn alone() -> Self {
        Self::with(Turn::Alone(APART.write().unwrap_or_else(PoisonError::into_inner)))
    }
    fn with(turn: Turn) -> Self {
        let fixture = Self {
            _turn: turn,
            folder: tempfile::tempdir().unwrap(),
            image: Image::new(21, PAGES),
            cache: Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap(),
        };
        fixture.image.write(&fixture.snapshot());
        fixture
    }
    fn snapshot(&self) -> PathBuf {
        self.folder.path().join("memory")
    }
    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }
    fn serve(&self, options: RestoreOptions) -> Server {
        Server::start(&self.cache, &self.snapshot(), &self.socket(), options).unwrap()
    }
    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream
    }
    fn say(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> String {
        let stream = self.connect();
        // The server may close the connection before it has read all of the message.
        let _ = kernel::send(&stream, message, descriptors);
        let _ = stream.shutdown(Shutdown::Write);
        rest(stream)
    }
    fn is_well(&self) {
        let mut monitor = Monitor::start(&Plan::new(self.socket(), self.image));
        monitor.does(&format!("touch 0 {PAGES} 2"));
    }
}

fn rest(mut stream: UnixStream) -> String {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        // The server closed the connection while bytes from this process were unread.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the server does not close: {error}"),
    }
    String::from_utf8_lossy(&said).into_owned()
}

fn region(address: &str, size: &str, offset: &str, page_size: &str) -> String {
    format!(
        "{{\"base_host_virt_addr\":{address},\"size\":{size},\"offset\":{offset},\
         \"page_size\":{page_size},\"page_size_kib\":{page_size}}}"
    )
}

fn good() -> String {
    region("140000000000000", "8192", "0", "4096").replace("140000000000000", "139999999995904")
}

fn lies() -> Vec<(&'static str, String)> {
    let base = "139999999995904";
    let of = |address: &str, size: &str, offset: &str| format!("[{}]", region(address, size, offset, "4096"));
    let two = |a: (&str, &str, &str), b: (&str, &str, &str)| {
        format!("[{},{}]", region(a.0, a.1, a.2, "4096"), region(b.0, b.1, b.2, "4096"))
    };
    let all = "18446744073709551615";
    let deep = "[".repeat(20_000);
    vec![
        ("nothing", String::new()),
        ("a blank", " ".into()),
        ("no JSON", "hello there".into()),
        ("zeros", "\0\0\0\0\0\0\0\0".into()),
        ("cut", good()[..40].to_owned()),
        ("cut behind a region", format!("[{}", good())),
        ("no list", good()),
        ("an empty list", "[]".into()),
        ("a list of numbers", "[1,2,3]".into()),
        ("a list of lists", "[[],[]]".into()),
        ("null", "null".into()),
        ("an empty region", "[{}]".into()),
        ("more behind it", format!("[{}] and more", good())),
        ("two lists", format!("[{}][{}]", good(), good())),
        ("a name twice", format!("[{}]", good().replace("\"offset\":0", "\"offset\":0,\"offset\":4096"))),
        ("words for numbers", of("\"139999999995904\"", "8192", "0")),
        ("a fraction", of(base, "8192.5", "0")),
        ("an exponent", of(base, "8e3", "0")),
        ("a negative size", of(base, "-8192", "0")),
        ("a negative offset", of(base, "8192", "-4096")),
        ("a negative address", of("-4096", "8192", "0")),
        ("a size of zero", of(base, "0", "0")),
        ("a size beyond the image", of(base, "4096000000", "0")),
        ("an offset beyond the image", of(base, "4096", "4096000000")),
        ("a size of all bits", of(base, all, "0")),
        ("an offset of all bits", of(base, "4096", all)),
        ("size and offset that wrap", of(base, "8192", "18446744073709547520")),
        ("an address that wraps", of("18446744073709547520", "8192", "0")),
        ("a number that is too long", of(&"9".repeat(60), "8192", "0")),
        ("an address between pages", of("139999999995905", "8192", "0")),
        ("a size between pages", of(base, "8191", "0")),
        ("an offset between pages", of(base, "4096", "17")),
        ("pages of no bytes", format!("[{}]", region(base, "8192", "0", "0"))),
        ("pages of three bytes", format!("[{}]", region(base, "8192", "0", "3"))),
        ("pages of 8 KiB", format!("[{}]", region(base, "8192", "0", "8192"))),
        ("pages of 1 TiB", format!("[{}]", region(base, "8192", "0", "1099511627776"))),
        ("one region twice", two((base, "8192", "0"), (base, "8192", "8192"))),
        ("addresses overlap", two((base, "8192", "0"), ("140000000000000", "8192", "8192"))),
        ("65 regions", {
            let one =
                |n: u64| region(&(n * 8192 + (1 << 40)).to_string(), "4096", &(n * 4096).to_string(), "4096");
            format!("[{}]", (0..65).map(one).collect::<Vec<_>>().join(","))
        }),
        ("very deep", deep),
        ("an unknown want", "{\"quinion_restore\":1,\"want\":\"money\"}\n".into()),
        ("an unknown version", "{\"quinion_restore\":99,\"want\":\"image\"}\n".into()),
    ]
}

#[test]
fn lies_are_refused_with_a_word() {
    if !vmm::has("lies_are_refused_with_a_word", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let server = fixture.serve(options(|o| o.on_failure = OnFailure::Leave));
    for (name, message) in lies() {
        let said = fixture.say(message.as_bytes(), &[]);
        assert!(message.is_empty() || said.contains("\"error\""), "{name}, without a descriptor: {said:?}");
        let userfault = Userfault::open(kernel::EVENT_REMOVE).unwrap();
        let said = fixture.say(message.as_bytes(), &[userfault.as_fd()]);
        assert!(message.is_empty() || said.contains("\"error\""), "{name}, with a descriptor: {said:?}");
    }
    fixture.is_well();
    server.stop();
}

/// At these addresses no process can have registered memory: the messages never lead to a VM.
#[test]
fn places_without_memory_do_no_harm() {
    if !vmm::has("places_without_memory_do_no_harm", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let _server = fixture.serve(options(|o| o.on_failure = OnFailure::Leave));
    let mut peers = Vec::new();
    for address in ["0", "4096", "139999999995904", "18446603336221196288", "18446744073709535232"] {
        let userfault = Userfault::open(kernel::EVENT_REMOVE).unwrap();
        let stream = fixture.connect();
        let message = format!("[{}]", region(address, "8192", "0", "4096"));
        kernel::send(&stream, message.as_bytes(), &[userfault.as_fd()]).unwrap();
        peers.push((stream, userfault));
        fixture.is_well();
    }
    drop(peers);
    fixture.is_well();
}

#[test]
fn messages_without_end_are_not_read_to_their_end() {
    if !vmm::has("messages_without_end_are_not_read_to_their_end", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let _server = fixture.serve(RestoreOptions::default());
    for filler in [b' ', b'[', b'"', b'0', 0xff] {
        let mut stream = fixture.connect();
        let _ = stream.write_all(b"[");
        let block = [filler; 4096];
        let sent = (0..4096).take_while(|_| stream.write_all(&block).is_ok()).count();
        assert!(sent < 4096, "the server reads 16 MiB of {filler:#x} for a message");
        let _ = rest(stream);
    }
    fixture.is_well();
}

#[test]
fn a_descriptor_that_is_no_userfaultfd_is_not_taken_for_one() {
    if !vmm::has("a_descriptor_that_is_no_userfaultfd_is_not_taken_for_one", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let _server = fixture.serve(options(|o| o.on_failure = OnFailure::Leave));
    let message = format!("[{}]", good());
    let (one, other) = UnixStream::pair().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let kinds: Vec<(&str, OwnedFd)> = vec![
        ("a file in memory", kernel::memfd(8192)),
        ("a file", std::fs::File::open(fixture.snapshot()).unwrap().into()),
        ("a folder", std::fs::File::open(fixture.folder.path()).unwrap().into()),
        ("a device", std::fs::File::open("/dev/zero").unwrap().into()),
        ("nothing's device", std::fs::File::open("/dev/null").unwrap().into()),
        ("a socket", one.into()),
        ("its other end", other.into()),
        ("a pipe", reader.into()),
        ("its other end", writer.into()),
        ("the server's own socket", fixture.connect().into()),
    ];
    let said = fixture.say(message.as_bytes(), &[]);
    assert!(said.contains("\"error\""), "no descriptor: {said:?}");
    for (name, kind) in &kinds {
        let said = fixture.say(message.as_bytes(), &[kind.as_fd()]);
        assert!(said.contains("\"error\""), "{name}: {said:?}");
    }
    let two = [kinds[0].1.as_fd(), kinds[1].1.as_fd()];
    assert!(fixture.say(message.as_bytes(), &two).contains("\"error\""));
    // More descriptors than any message needs.
    let many: Vec<BorrowedFd<'_>> = (0..64).map(|n| kinds[n % kinds.len()].1.as_fd()).collect();
    assert!(fixture.say(message.as_bytes(), &many).contains("\"error\""));
    fixture.is_well();
}

#[test]
fn a_userfaultfd_of_other_memory_harms_no_other() {
    if !vmm::has("a_userfaultfd_of_other_memory_harms_no_other", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let _server = fixture.serve(RestoreOptions::default());
    let socket = fixture.socket();
    let socket = socket.to_str().unwrap();
    let region = |address: &str, offset: &str| region(address, "8192", offset, "4096");
    for (name, message) in [
        ("elsewhere", format!("[{}]", region("4096000", "0"))),
        ("beyond the image", format!("[{}]", region("ADDRESS", "4096000000"))),
        ("not JSON", "ADDRESS".to_owned()),
    ] {
        let mut liar = Monitor::idle();
        // The server may kill the liar before it reports that it is done.
        let _ = liar.ask(&format!("lie {socket} {message}"));
        liar.tell("touch 0 2 1");
        assert_eq!(liar.ended().signal(), Some(libc::SIGKILL), "{name}: no server, so it is killed");
        fixture.is_well();
    }
}

#[test]
fn the_silent_are_let_go() {
    if !vmm::has("the_silent_are_let_go", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let options = options(|o| {
        o.greeting = Duration::from_millis(300);
        o.vms_max = 4;
    });
    let _server = fixture.serve(options);
    let silent: Vec<UnixStream> = (0..4).map(|_| fixture.connect()).collect();
    let mut half = fixture.connect();
    half.write_all(b"[{\"base_host").unwrap();
    for stream in silent {
        let _ = rest(stream);
    }
    let _ = rest(half);
    fixture.is_well();
}

/// The peer behind the silent ones may be a machine, which would have to be killed if it were refused.
#[test]
fn silent_peers_are_waited_for_and_no_other_is_refused_for_them() {
    if !vmm::has("silent_peers_are_waited_for_and_no_other_is_refused_for_them", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let options = options(|o| {
        o.greeting = Duration::from_millis(300);
        o.vms_max = 2;
    });
    let server = fixture.serve(options);
    for _ in 0..3 {
        // The monitor process exists before the silent peers connect, so they are still silent when it connects.
        let mut machine = Monitor::idle();
        let silent = [(); 2].map(|()| fixture.connect());
        machine.does(&Plan::new(fixture.socket(), fixture.image).command());
        machine.does(&format!("touch 0 {PAGES} 2"));
        for stream in silent {
            assert!(rest(stream).contains("did not come"), "the only error is that the message is late");
        }
    }
    let stats = server.stop();
    assert_eq!((stats.vms_total, stats.vms_given_up, stats.peers_refused), (3, 0, 6));
}

/// 1. A silent peer has the only place. A machine waits in the backlog, with its message, in its first fault.
/// 2. The server ends. The machine would wait without end if it were left there.
#[test]
fn a_machine_that_has_connected_and_was_not_accepted_is_ended_with_the_server() {
    let test = "a_machine_that_has_connected_and_was_not_accepted_is_ended_with_the_server";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let options = options(|o| {
        o.greeting = Duration::from_secs(3600);
        o.vms_max = 1;
    });
    let server = fixture.serve(options);
    let (silent, mut machine) = (fixture.connect(), Monitor::idle());
    machine.does(&Plan::new(fixture.socket(), fixture.image).command());
    machine.tell("touch 0 1 1");
    server.stop();
    assert_eq!(machine.wait().signal(), Some(libc::SIGKILL));
    assert!(!fixture.socket().exists());
    assert_eq!(rest(silent), "");
}

/// One worker may learn of the next machine while another worker still closes the previous one.
#[test]
fn a_machine_that_comes_when_the_last_has_ended_is_served() {
    if !vmm::has("a_machine_that_comes_when_the_last_has_ended_is_served", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let options = options(|o| {
        o.workers = 4;
        o.vms_max = 1;
    });
    let server = fixture.serve(options);
    for _ in 0..20 {
        let mut next = Monitor::idle();
        let mut last = Monitor::start(&Plan::new(fixture.socket(), fixture.image));
        last.does("touch 0 10 1");
        last.kill();
        last.wait();
        next.does(&Plan::new(fixture.socket(), fixture.image).command());
        next.does(&format!("touch 0 {PAGES} 2"));
        next.kill();
        next.wait();
    }
    let stats = server.stop();
    assert_eq!((stats.vms_total, stats.vms_given_up), (40, 0));
}

#[test]
fn thousands_of_connections_are_borne() {
    if !vmm::has("thousands_of_connections_are_borne", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new();
    let options = options(|o| {
        o.greeting = Duration::from_millis(500);
        o.vms_max = 8;
    });
    let _server = fixture.serve(options);
    for wave in 0..20 {
        let mut peers = Vec::new();
        for _ in 0..100 {
            // The server may refuse the connection; then the test does not wait for this peer.
            let Ok(mut stream) = UnixStream::connect(fixture.socket()) else { continue };
            let _ = stream.write_all(if wave % 2 == 0 { b"[" } else { b"" });
            peers.push(stream);
        }
        drop(peers);
    }
    until("there is room again", || {
        let mut monitor = Monitor::start(&Plan::new(fixture.socket(), fixture.image));
        monitor.tell(&format!("touch 0 {PAGES} 2"));
        monitor.hear().as_deref() == Some("done")
    });
}

/// A TCP socket whose close blocks for longer than the test takes, with its other end, which keeps it blocked.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(1000))).unwrap();
    (ours.into(), theirs)
}

/// A file system whose reads and closes hang, if the machine allows one.
fn hung_in(folder: &std::path::Path) -> Option<vmm::hung::Hung> {
    let mounted = vmm::hung::Hung::mount(folder);
    if let Err(error) = &mounted {
        let why = format!("FUSE is not to be had: {error}");
        vmm::skipped("hostile_descriptor, its hung file system", &why);
    }
    mounted.ok()
}

/// Threads of the server, by their names, that are blocked in `close`, or in `recvmsg` of descriptors that do not fit.
fn hanging_in_the_server() -> usize {
    const CALLS: [&str; 2] = ["3 ", "47 "]; // close, recvmsg
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let hangs = |task: std::io::Result<std::fs::DirEntry>| {
        let read = |name: &str| std::fs::read_to_string(task.as_ref().ok()?.path().join(name)).ok();
        let (Some(name), Some(call)) = (read("comm"), read("syscall")) else { return false };
        ["quinion-peer", "quinion-close"].contains(&name.trim())
            && CALLS.iter().any(|it| call.starts_with(it))
    };
    tasks.map(hangs).filter(|&hangs| hangs).count()
}

/// The server holds the last copy of a descriptor that is sent alone. Of several, the server may be faster than the
/// test, which then closes the last copy itself.
fn wait_for_hanging(least: usize) {
    until("closes hang in the server", || hanging_in_the_server() >= least);
}

fn ends_of_pipe(reader: &std::io::PipeReader, writer: &std::io::PipeWriter, count: usize) -> Vec<OwnedFd> {
    let end = |n: usize| match n % 2 {
        0 => reader.try_clone().unwrap().into(),
        _ => writer.try_clone().unwrap().into(),
    };
    (0..count).map(end).collect()
}

/// Descriptors whose close blocks, in invalid, incomplete and unread messages, and too many for one. Each costs only
/// its own connection; neither a VM nor the shutdown of the server waits.
#[test]
fn hostile_descriptor() {
    if !vmm::has("hostile_descriptor", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::alone();
    // All processes are started before: a child that starts later closes its copies of descriptors, and blocks.
    let mut honest = Monitor::idle();
    let mut later: Vec<Monitor> = (0..5).map(|_| Monitor::idle()).collect();
    let folder = tempfile::tempdir().unwrap();
    let hung = hung_in(folder.path());
    let options = options(|o| {
        o.on_failure = OnFailure::Leave;
        o.greeting = Duration::from_secs(1);
        o.vms_max = 300;
    });
    let server = fixture.serve(options);
    honest.does(&Plan::new(fixture.socket(), fixture.image).command());
    honest.does("touch 0 10 1");
    const EACH: usize = 12;
    let message = format!("[{}]", good());
    let (mut streams, mut keeps, mut files) = (Vec::new(), Vec::new(), Vec::new());
    for (text, count) in [("nonsense", 1), (&message[..], 1), ("[", 1), ("nonsense", 4), ("nonsense", 40)] {
        let hung_before = hanging_in_the_server();
        for _ in 0..EACH {
            let mut kinds: Vec<Vec<OwnedFd>> = Vec::new();
            let (reader, writer) = std::io::pipe().unwrap();
            keeps.push(reader.try_clone().unwrap());
            kinds.push(ends_of_pipe(&reader, &writer, count));
            let lingers: Vec<_> = (0..count.min(6)).map(|_| lingering()).collect();
            let (sent, theirs): (Vec<_>, Vec<_>) = lingers.into_iter().unzip();
            files.push(theirs);
            kinds.push(sent);
            if let Some(hung) = &hung {
                let file = std::fs::File::open(hung.path()).unwrap();
                let borrowed = vec![file.as_fd(); count];
                let stream = fixture.connect();
                kernel::send(&stream, text.as_bytes(), &borrowed).unwrap();
                streams.push(stream);
                // Closing the file here would block, too.
                std::mem::forget(file);
            }
            for kind in kinds {
                let stream = fixture.connect();
                let borrowed: Vec<BorrowedFd<'_>> = kind.iter().map(AsFd::as_fd).collect();
                kernel::send(&stream, b" ", &borrowed).unwrap();
                // The server has the last copy when it finds the message invalid, unless there were too many.
                let dropped = std::thread::spawn(move || drop(kind));
                if count == 1 {
                    dropped.join().unwrap();
                }
                let _ = kernel::send(&stream, text.as_bytes(), &[]);
                streams.push(stream);
            }
        }
        wait_for_hanging(hung_before + if count == 1 { EACH } else { 1 });
        let began = std::time::Instant::now();
        let next = later.last_mut().unwrap();
        next.does(&Plan::new(fixture.socket(), fixture.image).command());
        next.does(&format!("touch 0 {PAGES} 2"));
        later.pop();
        honest.does(&format!("touch 0 {PAGES} 2"));
        assert!(began.elapsed() < Duration::from_secs(200), "others waited: {:?}", began.elapsed());
    }
    let began = std::time::Instant::now();
    let stats = server.stop();
    assert!(began.elapsed() < Duration::from_secs(200), "the end waited: {:?}", began.elapsed());
    assert_eq!(stats.vms_total, 6);
    drop((streams, keeps, hung));
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}: it does not happen");
        std::thread::yield_now();
    }
}
