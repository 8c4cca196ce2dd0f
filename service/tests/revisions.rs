//! Revisions: a local file as it was, shared by the clients of a server under the file's own changes.
//!
//! A revision never changes: what is cached of it stays, and what is not is refused after a change of the file, so that
//! the engine reads by itself. Each test changes the file as another process would, by calls the server does not see.
//! The server is this test program started again (`the_child`): of its own process a server opens no revision.

use std::cell::RefCell;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use quinion::Cache;
use quinion_service::{Client, ErrorKind, FileRevision, RevisionRead, RevisionRequest, Server, Socket};
use rustix::fs::{FlockOperation, fcntl_lock};
use tempfile::TempDir;

const SOCKET: &str = "QUINION_REVISIONS_SOCKET";
const CLIENT: &str = "QUINION_REVISIONS_CLIENT";
const PAGE: usize = 4096;
const PAGES: usize = 64;
/// Longer than the times of a file need to settle.
const SETTLED: Duration = Duration::from_millis(60);

/// A server in a process of its own, which answers a line with what it has read.
struct ServerProcess {
    child: Child,
    answers: BufReader<ChildStdout>,
}

/// What the server's cache has of the device.
#[derive(Clone, Copy, Debug)]
struct Device {
    bytes: u64,
    errors: u64,
    stale: u64,
}

impl ServerProcess {
    fn start(socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env(SOCKET, socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut server = Self { child, answers };
        server.device();
        server
    }

    fn device(&mut self) -> Device {
        writeln!(self.child.stdin.as_ref().unwrap()).unwrap();
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the server has ended");
            if let Some(numbers) = line.strip_prefix("device ") {
                let mut numbers = numbers.split_whitespace().map(|number| number.parse().unwrap());
                let mut next = || numbers.next().unwrap();
                return Device { bytes: next(), errors: next(), stale: next() };
            }
        }
    }

    fn stop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server's process; without its socket it is no test.
#[test]
fn the_child() {
    let Ok(socket) = std::env::var(SOCKET) else { return };
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = Server::builder(cache).revisions(true).start_at(Socket::bind(&socket).unwrap()).unwrap();
    for _ in std::io::stdin().lines() {
        let stats = server.cache().stats();
        println!("\ndevice {} {} {}", stats.device_bytes, stats.device_errors, stats.stale_reads);
    }
    server.stop();
}

struct Fixture {
    server: RefCell<ServerProcess>,
    client: Client,
    path: PathBuf,
    _folder: TempDir,
}

impl Fixture {
    /// With a file whose pages have the bytes `first`, `first + 1`, ..
    fn new(first: u8) -> Self {
        let mode = Permissions::from_mode(0o700);
        let folder =
            tempfile::Builder::new().permissions(mode).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..PAGES).flat_map(|page| [first + page as u8; PAGE]).collect();
        std::fs::write(&path, bytes).unwrap();
        let socket = folder.path().join("socket");
        let server = RefCell::new(ServerProcess::start(&socket));
        let client = Client::connect(socket.to_str().unwrap()).unwrap();
        sleep(SETTLED);
        Self { server, client, path, _folder: folder }
    }

    fn open(&self, name: &[u8]) -> Result<FileRevision, quinion_service::Error> {
        let file = File::open(&self.path).unwrap();
        self.client.open_revision(RevisionRequest { file: file.as_fd(), name })
    }

    fn change(&self, page: usize, byte: u8) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(&[byte; PAGE], (page * PAGE) as u64).unwrap();
    }

    fn device(&self) -> Device {
        self.server.borrow_mut().device()
    }

    fn device_bytes(&self) -> u64 {
        self.device().bytes
    }
}

/// The byte that fills the page; `None` if it was not read.
fn page_of(revision: &FileRevision, page: usize) -> Option<u8> {
    let mut buffer = vec![0; PAGE];
    let is_whole = revision.read_exact_at(&mut buffer, (page * PAGE) as u64).unwrap() == RevisionRead::Whole;
    assert!(
        !is_whole || buffer.iter().all(|&byte| byte == buffer[0]),
        "page {page} has bytes of two contents"
    );
    is_whole.then_some(buffer[0])
}

#[test]
fn handles_of_one_revision_share_its_pages() {
    let fixture = Fixture::new(1);
    let (one, other) = (fixture.open(b"7").unwrap(), fixture.open(b"7").unwrap());
    assert_eq!(one.len(), (PAGES * PAGE) as u64);
    assert_eq!(page_of(&one, 5), Some(6));
    let read = fixture.device_bytes();
    assert!(read >= PAGE as u64 && read < (PAGES * PAGE) as u64, "{read}: a page, and nothing ahead of it");
    assert_eq!(page_of(&other, 5), Some(6));
    assert_eq!(fixture.device_bytes(), read, "the server has read it before");
    drop((one, other));
    assert_eq!(page_of(&fixture.open(b"7").unwrap(), 5), Some(6));
    assert_eq!(fixture.device_bytes(), read, "and has it still, without a handle");
    assert_eq!(page_of(&fixture.open(b"8").unwrap(), 5), Some(6));
    assert!(fixture.device_bytes() > read, "another name is another content");
}

#[test]
fn a_revision_keeps_its_pages_and_takes_none_of_a_later_content() {
    let fixture = Fixture::new(1);
    let old = fixture.open(b"7").unwrap();
    assert_eq!(page_of(&old, 5), Some(6));
    fixture.change(5, 200);
    fixture.change(9, 201);
    assert_eq!(page_of(&old, 5), Some(6), "it is cached");
    assert_eq!(page_of(&old, 9), None, "the file has another content now");
    assert_eq!(page_of(&old, 30), None, "which may be of this page, too");
    // The device has failed at nothing, and its errors are not to hide among these.
    let Device { errors, stale, .. } = fixture.device();
    assert!(errors == 0 && stale >= 2, "{errors} errors, {stale} of a changed file");
    sleep(SETTLED);
    assert_eq!(page_of(&old, 9), None);
    let new = fixture.open(b"7").unwrap();
    assert_eq!((page_of(&new, 5), page_of(&new, 9), page_of(&new, 30)), (Some(200), Some(201), Some(31)));
    assert_eq!(page_of(&old, 5), Some(6));
}

#[test]
fn a_file_that_was_changed_just_now_has_no_revision() {
    let fixture = Fixture::new(1);
    // A busy machine may need longer for an open than the times need to settle.
    let change_and_open = |_| {
        fixture.change(5, 200);
        fixture.open(b"7").err()
    };
    let refused = (0..100).find_map(change_and_open).expect("no open comes soon after its change");
    assert_eq!(refused.kind(), ErrorKind::Changed, "{refused}");
    sleep(SETTLED);
    assert_eq!(page_of(&fixture.open(b"7").unwrap(), 5), Some(200));
}

#[test]
fn a_cut_file_gives_nothing_behind_its_end() {
    let fixture = Fixture::new(1);
    let old = fixture.open(b"7").unwrap();
    OpenOptions::new().write(true).open(&fixture.path).unwrap().set_len(PAGE as u64).unwrap();
    assert_eq!(page_of(&old, 5), None);
    assert_eq!(page_of(&old, PAGES), None, "the revision ends before");
    assert_eq!(old.read_exact_at(&mut [0; 2], u64::MAX).unwrap(), RevisionRead::Over);
}

#[test]
fn requests_that_mean_nothing_are_refused_in_words() {
    let fixture = Fixture::new(1);
    for name in [&b""[..], &[7; 129]] {
        let refused = fixture.open(name).map(drop).unwrap_err().to_string();
        assert!(refused.contains("1 to 128 bytes"), "{refused}");
    }
    let open_as = |file: &File| {
        let request = RevisionRequest { file: file.as_fd(), name: b"7" };
        fixture.client.open_revision(request).map(drop)
    };
    let write_only = OpenOptions::new().write(true).open(&fixture.path).unwrap();
    let folder = File::open(fixture.path.parent().unwrap()).unwrap();
    let pseudo = File::open("/proc/self/status").unwrap();
    for (file, what) in [(&write_only, "for writing"), (&folder, "a folder"), (&pseudo, "of /proc")] {
        let refused = open_as(file).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Open, "{what}: {refused}");
    }
    assert_eq!(page_of(&fixture.open(b"7").unwrap(), 1), Some(2), "the server serves on");
}

#[test]
fn after_the_end_of_the_server_the_engine_reads() {
    let fixture = Fixture::new(1);
    let revision = fixture.open(b"7").unwrap();
    assert_eq!(page_of(&revision, 5), Some(6));
    assert!(revision.is_served().unwrap());
    fixture.server.borrow_mut().stop();
    assert_eq!(page_of(&revision, 5), None);
    assert!(!revision.is_served().unwrap());
    assert!(fixture.open(b"7").is_err());
}

/// A close of any descriptor of a file ends the locks of the process on it: none is closed here.
#[test]
fn locks_of_the_process_on_the_file_outlive_its_revisions() {
    let fixture = Fixture::new(1);
    let file = OpenOptions::new().read(true).write(true).open(&fixture.path).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let request = RevisionRequest { file: file.as_fd(), name: b"7" };
    let revision = fixture.client.open_revision(request).unwrap();
    assert_eq!(page_of(&revision, 5), Some(6));
    drop(revision);
    assert_locked(&fixture.path);
    drop(file);
}

#[test]
fn a_server_opens_no_revision_for_its_own_process() {
    let fixture = Fixture::new(1);
    let socket = fixture.path.with_file_name("own").display().to_string();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = Server::builder(cache).revisions(true).start_at(Socket::bind(&socket).unwrap()).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&fixture.path).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let own = Client::connect(&socket).unwrap();
    let refused =
        own.open_revision(RevisionRequest { file: file.as_fd(), name: b"7" }).map(drop).unwrap_err();
    assert!(refused.to_string().contains("this very process"), "{refused}");
    drop((own, server));
    assert_locked(&fixture.path);
}

/// The close of a file ends all POSIX locks that the server's process has on it: a program with a server may have some.
#[test]
fn a_server_opens_revisions_only_if_its_program_allows_that() {
    let fixture = Fixture::new(1);
    let socket = fixture.path.with_file_name("own").display().to_string();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = Server::builder(cache).start_at(Socket::bind(&socket).unwrap()).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&fixture.path).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_client", "--test-threads=1"])
        .env(CLIENT, format!("{socket}\n{}", fixture.path.display()))
        .status();
    assert!(status.unwrap().success());
    assert_locked(&fixture.path);
    server.stop();
}

/// A client in a process of its own, which is refused a revision; without its words it is no test.
#[test]
fn the_client() {
    let Ok(words) = std::env::var(CLIENT) else { return };
    let (socket, path) = words.split_once('\n').unwrap();
    let file = File::open(path).unwrap();
    let request = RevisionRequest { file: file.as_fd(), name: b"7" };
    let refused = Client::connect(socket).unwrap().open_revision(request).map(drop).unwrap_err();
    assert!(refused.to_string().contains("opens no revisions"), "{refused}");
}

/// Another process cannot lock the file.
#[track_caller]
fn assert_locked(path: &Path) {
    let program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1)";
    let other = Command::new("python3").args(["-c", program]).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(said.contains("BlockingIOError"), "another process can lock the file: {said}");
}
