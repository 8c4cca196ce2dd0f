//! `quinion restore` as a user types it: machines are served, signals end it, and its messages are right.
//!
//! ```text
//!   quinion restore --snapshot FILE --socket PATH  <--- the fake machine monitors of the library's tests
//! ```
//!
//! Here the server is a process of its own, so its open descriptors and its memory can be counted.

use quinion_testing::vmm;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use quinion_testing::vmm::{Backing, Image, Monitor, Need, Plan, kernel, memory};
use tempfile::TempDir;

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
/// The longest that a test waits for a message of the server.
const WATCHDOG: Duration = Duration::from_secs(300);

struct Fixture {
    sockets: TempDir,
    disk: TempDir,
    image: Image,
}

impl Fixture {
    fn new(image: Image) -> Self {
        let sockets = tempfile::tempdir().unwrap();
        let fixture = Self { sockets, disk: TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), image };
        image.write(&fixture.snapshot());
        fixture
    }
    fn snapshot(&self) -> PathBuf {
        self.disk.path().join("memory")
    }
    fn path(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }
    fn socket(&self) -> PathBuf {
        self.sockets.path().join("socket")
    }
    fn plan(&self) -> Plan {
        Plan::new(self.socket(), self.image)
    }
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
        command.arg("restore").arg("--snapshot").arg(self.snapshot()).arg("--socket").arg(self.socket());
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
    fn serve(&self, words: &[&str]) -> Served {
        Served::start(self.command(words))
    }
    fn fails(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }
}

/// A `quinion restore` that serves. It is killed when it goes out of scope.
struct Served {
    child: Child,
    lines: Receiver<String>,
}

impl Served {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (teller, lines) = channel();
        std::thread::spawn(move || {
            errors.lines().map_while(Result::ok).try_for_each(|line| teller.send(line)).ok();
        });
        let served = Self { child, lines };
        served.says("serving");
        served
    }
    fn says(&self, words: &str) -> String {
        self.says_one_of(&[words])
    }
    /// Waits for a line that contains any of `words`.
    fn says_one_of(&self, words: &[&str]) -> String {
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(WATCHDOG) {
                Ok(line) if words.iter().any(|words| line.contains(words)) => return line,
                Ok(line) => said.push(line),
                Err(_) => panic!("it does not say {words:?}, but {said:#?}"),
            }
        }
    }
    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
    fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }
    /// Resident anonymous memory, without the arena.
    fn anonymous_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
    fn signal(&self, signal: i32) {
        // SAFETY: a plain call, on this process's child.
        #[allow(unsafe_code, reason = "the standard library sends one signal only")]
        unsafe {
            libc::kill(self.child.id() as i32, signal)
        };
    }
    /// Stops it, as if it got no processor time; until [`Served::go_on`].
    fn pause(&self) {
        self.signal(libc::SIGSTOP);
        // One thread takes the signal, and the others run until they notice.
        let state = |task: &Path| fs::read_to_string(task.join("stat")).unwrap_or_default();
        let is_stopped =
            |task: PathBuf| state(&task).rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"));
        let tasks = || fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        until("it stops", || tasks().all(|task| is_stopped(task.unwrap().path())));
    }
    fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }
    fn stop(mut self, signal: i32) -> (Option<i32>, String) {
        self.signal(signal);
        let mut report = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        (self.child.wait().unwrap().code(), report)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WATCHDOG, "{what}: it does not happen");
        std::thread::yield_now();
    }
}

#[track_caller]
fn assert_fails(output: &Output, code: i32, words: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(words), "`{words}` is not in: {said}");
}

#[track_caller]
fn number(report: &str, name: &str) -> u64 {
    let (_, rest) = report.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name}: {report}"));
    let digits = rest.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("{name}: {report}"))
}

#[test]
fn machines_are_served_and_reported() {
    if !vmm::has("machines_are_served_and_reported", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(31, 3000));
    let served = fixture.serve(&["--memory", "64M", "--json", "--on-failure", "leave"]);
    let socket = fs::metadata(fixture.socket()).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o777, 0o600, "other users may not connect");
    let mut monitors = [(); 4].map(|()| Monitor::start(&fixture.plan().in_regions(2)));
    monitors.iter_mut().for_each(|monitor| monitor.tell("touch 0 3000 2"));
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
        monitor.does("balloon 100 1000 dontneed");
        monitor.does("touch 0 3000 2");
    }
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!(code, Some(0));
    assert_eq!(report.lines().count(), 1, "one line: {report}");
    println!("{report}");
    assert!(number(&report, "faults") >= 4);
    monitors.iter_mut().for_each(|monitor| monitor.does("touch 0 3000 1"));
    assert!(!fixture.socket().exists(), "the socket goes with its server");
}

#[test]
fn a_server_that_ends_kills_the_machines_that_need_it() {
    if !vmm::has("a_server_that_ends_kills_the_machines_that_need_it", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(32, 500));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let served = fixture.serve(&[]);
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("touch 0 100 1");
        let (code, report) = served.stop(signal);
        assert_eq!(code, Some(0), "{report}");
        assert!(report.contains("fault"), "{report}");
        assert_eq!(monitor.ended().signal(), Some(libc::SIGKILL));
    }
}

/// The reader of its messages has ended, as `| head` does: that is no reason to give any machine up.
#[test]
fn machines_are_served_when_the_servers_output_is_not_read() {
    if !vmm::has("machines_are_served_when_the_servers_output_is_not_read", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(39, 300));
    let mut child = fixture.command(&["--json"]).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("serving"), "{first}");
    let served = Served { child, lines: channel().1 };
    for _ in 0..3 {
        Monitor::start(&fixture.plan()).does("touch 0 300 2");
    }
    // More peers than workers are silent.
    for _ in 0..10 {
        let mut peer = UnixStream::connect(fixture.socket()).unwrap();
        peer.write_all(b"nonsense\n").unwrap();
        let mut answer = String::new();
        let _ = peer.read_to_string(&mut answer);
    }
    let mut last = Monitor::start(&fixture.plan());
    last.does("touch 0 300 2");
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!((number(&report, "vms"), number(&report, "vms_given_up")), (4, 0), "{report}");
}

#[test]
fn a_record_names_the_pages_that_were_touched_and_is_replayed() {
    let test = "a_record_names_the_pages_that_were_touched_and_is_replayed";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(33, 2000));
    let record = fixture.path("record");
    let record = record.to_str().unwrap();
    let served = fixture.serve(&["--record", record, "--json"]);
    let mut monitor = Monitor::start(&fixture.plan());
    for page in [1800, 30, 1000, 31] {
        monitor.does(&format!("touch {page} 1 1"));
    }
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!(code, Some(0));
    assert_eq!(number(&report, "recorded_bytes"), 4 * 4096, "{report}");
    assert!(fs::metadata(record).unwrap().len() < 100, "it is compact");

    // A second run adds what the first did not touch.
    let served = fixture.serve(&["--record", record, "--replay", record, "--json"]);
    Monitor::start(&fixture.plan()).does("touch 500 1 1");
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!((code, number(&report, "recorded_bytes")), (Some(0), 5 * 4096), "{report}");

    let served = fixture.serve(&["--replay", record, "--json"]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 2000 3");
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!((code, number(&report, "stale_bytes")), (Some(0), 0), "{report}");
}

/// Faults overtake the record, since the machine begins at its end: still it gets what the record names, and nothing
/// around that.
#[test]
fn a_machine_gets_the_pages_of_its_record_and_no_others() {
    let test = "a_machine_gets_the_pages_of_its_record_and_no_others";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(48, 6000));
    let record = fixture.path("record");
    let record = record.to_str().unwrap();
    let touched = Vec::from_iter((0..6000).step_by(5));
    let served = fixture.serve(&["--record", record]);
    let mut monitor = Monitor::start(&fixture.plan());
    touched.iter().for_each(|page| monitor.does(&format!("touch {page} 1 1")));
    served.stop(libc::SIGTERM);
    for is_held in [false, true] {
        if !is_held {
            vmm::evict(&fixture.snapshot(), 0, None);
        }
        let served = fixture.serve(&["--replay", record, "--json"]);
        let mut monitor = Monitor::start(&fixture.plan());
        touched.iter().rev().for_each(|page| monitor.does(&format!("touch {page} 1 1")));
        let (_, report) = served.stop(libc::SIGTERM);
        let supplied = number(&report, "demand_bytes") + number(&report, "ahead_bytes");
        // A page may be asked for while it is on its way, and counts twice then.
        let bytes = touched.len() as u64 * 4096;
        assert!((bytes..bytes + bytes / 10).contains(&supplied), "{report}");
    }
}

/// In a machine's first 2 MiB it touches more than half of the runs of 64 KiB, in an order that is no walk; in the next
/// a third.
#[test]
fn a_crowd_of_faults_brings_the_rest_of_its_neighbourhood() {
    if !vmm::has("a_crowd_of_faults_brings_the_rest_of_its_neighbourhood", &[REMOVALS]) {
        return;
    }
    const RUN: u64 = 64 << 10;
    let fixture = Fixture::new(Image::new(50, 2048));
    let metrics = fixture.path("metrics");
    let served = fixture.serve(&["--json", "--metrics", metrics.to_str().unwrap()]);
    let mut monitor = Monitor::start(&fixture.plan());
    let mut touch = |begin: u64, runs: u64| {
        (0..runs).for_each(|i| monitor.does(&format!("touch {} 1 1", begin + i * 7 % 32 * 16)));
    };
    touch(0, 17);
    until("the rest of it is there", || metric(&metrics, "ahead_bytes_total") >= (15 * RUN) as f64);
    touch(512, 10);
    monitor.does("touch 0 512 2");
    let (_, report) = served.stop(libc::SIGTERM);
    let supplied = number(&report, "demand_bytes") + number(&report, "ahead_bytes");
    assert_eq!(supplied, (32 + 10) * RUN, "{report}");
}

fn metric(file: &Path, name: &str) -> f64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(&format!("quinion_restore_{name} ")));
    line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
}

/// Pages that the kernel holds are copied from there; those that it has dropped are read.
#[test]
fn a_snapshot_that_the_kernel_holds_is_not_taken_into_our_cache() {
    let test = "a_snapshot_that_the_kernel_holds_is_not_taken_into_our_cache";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(49, 16384));
    let read = |words: &[&str]| {
        let served = fixture.serve(&[&["--json"], words].concat());
        let mut monitor = Monitor::start(&fixture.plan().in_regions(2));
        monitor.does("touch 1000 1 1");
        monitor.does("touch 0 16384 3");
        number(&served.stop(libc::SIGTERM).1, "device_bytes")
    };
    if !can_read_held_bytes(&fixture.snapshot()) {
        return vmm::skipped(test, "the file system does not say what the kernel holds");
    }
    for words in [&[][..], &["--fill", "all"]] {
        // What is looked at to know the snapshot is read in any case.
        let bytes = read(words);
        assert!(bytes < 6 << 20, "{bytes} bytes went through our cache");
    }
    for words in [&[][..], &["--fill", "all"]] {
        vmm::evict(&fixture.snapshot(), 20 << 20, Some(24 << 20));
        let bytes = read(words);
        // The kernel reads ahead some of it, too.
        assert!(bytes < 40 << 20, "{bytes} bytes went through our cache");
        fs::read(fixture.snapshot()).unwrap();
    }
}

/// Whether a read that must not wait finds bytes that were just read.
fn can_read_held_bytes(file: &Path) -> bool {
    fs::read(file).unwrap();
    let (file, mut bytes) = (fs::File::open(file).unwrap(), [0; 4096]);
    let into = &mut [std::io::IoSliceMut::new(&mut bytes)];
    rustix::io::preadv2(&file, into, 0, rustix::io::ReadWriteFlags::NOWAIT).is_ok()
}

/// The server says what is wrong with a record and serves without it, or with what is right of it.
#[test]
fn a_record_that_is_damaged_or_stale_is_ignored_with_words() {
    if !vmm::has("a_record_that_is_damaged_or_stale_is_ignored_with_words", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(34, 2000));
    let record = fixture.path("record");
    let record = record.to_str().unwrap();
    let served = fixture.serve(&["--record", record]);
    Monitor::start(&fixture.plan()).does("touch 0 2000 1");
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
    let whole = fs::read(record).unwrap();
    let replays = |words: &str, image: Image| {
        let mut command = fixture.command(&["--replay", record, "--json"]);
        let mut child = command.spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let said: Vec<String> =
            errors.lines().map(Result::unwrap).take_while(|line| !line.contains("serving")).collect();
        assert!(said.iter().any(|line| line.contains(words) && line.contains("record")), "{words}: {said:?}");
        let served = Served { child, lines: channel().1 };
        Monitor::start(&Plan::new(fixture.socket(), image)).does("touch 0 2000 2");
        let (code, report) = served.stop(libc::SIGTERM);
        assert_eq!(code, Some(0), "{report}");
    };
    // Its last part.
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(record, &damaged).unwrap();
    replays("pages are lost", fixture.image);
    // Its head; another version; nothing of it.
    damaged = whole.clone();
    damaged[20] ^= 1;
    fs::write(record, &damaged).unwrap();
    replays("ignored", fixture.image);
    damaged = whole.clone();
    damaged[8] = 1;
    fs::write(record, &damaged).unwrap();
    replays("version 1", fixture.image);
    fs::write(record, "this is no record").unwrap();
    replays("ignored", fixture.image);
    // A record of another image.
    fs::write(record, &whole).unwrap();
    let other = Image::new(35, 2000);
    other.write(&fixture.snapshot());
    replays("another snapshot", other);
    assert_fails(&fixture.fails(&["--replay", "/no/such/record"]), 1, "/no/such/record");
    assert_fails(&fixture.fails(&["--record", record, "--fill", "all"]), 1, "not both");
}

#[test]
fn all_memory_is_filled_on_request_and_none_otherwise() {
    if !vmm::has("all_memory_is_filled_on_request_and_none_otherwise", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(47, 3000));
    let metrics = fixture.path("metrics");
    let served = fixture.serve(&["--fill", "all", "--json", "--metrics", metrics.to_str().unwrap()]);
    let mut monitor = Monitor::start(&fixture.plan());
    until("all of it is there", || metric(&metrics, "ahead_bytes_total") >= 3000.0 * 4096.0);
    monitor.does("touch 0 3000 2");
    let (_, report) = served.stop(libc::SIGTERM);
    assert_eq!(number(&report, "faults"), 0, "nothing was asked for: {report}");

    let served = fixture.serve(&["--json"]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 1000 1 1");
    let (_, report) = served.stop(libc::SIGTERM);
    assert_eq!(number(&report, "ahead_bytes"), 0, "{report}");
}

/// The base has one half of the image, and other bytes where the diff has its half.
#[test]
fn a_base_and_its_diff_are_served_as_one_snapshot() {
    use std::os::unix::fs::FileExt;
    if !vmm::has("a_base_and_its_diff_are_served_as_one_snapshot", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(38, 600));
    let diff = fs::File::create(fixture.path("diff")).unwrap();
    let base = fs::OpenOptions::new().write(true).open(fixture.snapshot()).unwrap();
    diff.set_len(fixture.image.bytes()).unwrap();
    for page in 200..500 {
        diff.write_all_at(&fixture.image.page(page), page * 4096).unwrap();
        base.write_all_at(&[0xEE; 4096], page * 4096).unwrap();
    }
    let path = fixture.path("diff");
    let words = ["--diff", path.to_str().unwrap(), "--json"];
    let served = fixture.serve(&words);
    Monitor::start(&fixture.plan()).does("touch 0 600 2");
    let (_, report) = served.stop(libc::SIGTERM);
    assert_eq!(number(&report, "vms"), 1, "{report}");
    diff.set_len(fixture.image.bytes() - 4096).unwrap();
    assert_fails(&fixture.fails(&words), 1, "name diffs of this base");
    assert_fails(&fixture.fails(&["--diff", "/no/such/diff"]), 1, "/no/such/diff");
}

/// A VM that is ordered after the unit finds the socket.
#[test]
fn the_service_manager_is_told_when_vms_may_connect_and_when_the_server_ends() {
    let fixture = Fixture::new(Image::new(39, 10));
    let manager = std::os::unix::net::UnixDatagram::bind(fixture.sockets.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(WATCHDOG)).unwrap();
    let mut command = fixture.command(&[]);
    command.env("NOTIFY_SOCKET", fixture.sockets.path().join("notify"));
    let served = Served::start(command);
    let said = || {
        let mut bytes = [0; 100];
        let len = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    assert_eq!(said(), "READY=1");
    assert!(UnixStream::connect(fixture.socket()).is_ok());
    served.stop(libc::SIGTERM);
    assert_eq!(said(), "STOPPING=1");
    // A manager that cannot be told is no reason to serve no VM.
    let mut command = fixture.command(&[]);
    command.env("NOTIFY_SOCKET", "/no/such/manager");
    Served::start(command).says("cannot tell the service manager");
}

/// The unit in `packaging/`.
#[test]
fn the_unit_for_systemd_has_options_that_the_command_takes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/quinion-restore.service");
    let unit = fs::read_to_string(path).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    assert_eq!(words[..2], ["/usr/bin/quinion", "restore"]);
    let help = Command::new(env!("CARGO_BIN_EXE_quinion")).args(["restore", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let words_of_unit = unit.split(|c: char| !(c.is_alphanumeric() || c == '-'));
    // `systemctl enable --now`.
    for option in words_of_unit.filter(|word| word.starts_with("--") && *word != "--now") {
        assert!(help.contains(&format!("{option} ")), "{option} is not in {help}");
    }
    // The variables that the command line names are set, the snapshot's too.
    for name in ["SNAPSHOT", "OPTIONS"] {
        assert!(line.contains(name) && unit.contains(&format!("\nEnvironment={name}=")), "{name}");
    }
    let socket = words.iter().find(|word| word.ends_with("vm.sock")).unwrap();
    assert!(
        unit.contains("\nRuntimeDirectory=quinion-restore\n") && socket.starts_with("/run/quinion-restore/")
    );
    assert!(unit.contains("\nType=notify\n"));
}

#[test]
fn the_server_does_not_start_with_a_wrong_snapshot_or_argument() {
    let fixture = Fixture::new(Image::new(35, 10));
    let nowhere = Fixture { sockets: tempfile::tempdir().unwrap(), ..Fixture::new(Image::new(35, 10)) };
    fs::remove_file(nowhere.snapshot()).unwrap();
    assert_fails(&nowhere.fails(&[]), 1, "memory");
    fs::create_dir(nowhere.snapshot()).unwrap();
    assert_fails(&nowhere.fails(&[]), 1, "memory");
    fs::remove_dir(nowhere.snapshot()).unwrap();
    fs::write(nowhere.snapshot(), "").unwrap();
    assert_fails(&nowhere.fails(&[]), 1, "memory: the snapshot is empty");
    for words in [&["--workers", "none"][..], &["--on-failure", "pray"], &["--nonsense"]] {
        assert_eq!(fixture.fails(words).status.code(), Some(2), "{words:?}");
    }
    for words in ["9100", "localhost:9100", "127.0.0.1:99999"] {
        assert_fails(&fixture.fails(&["--metrics", words]), 2, "127.0.0.1:9100");
    }
    // The error comes at the start, and not after hours, when the record is written.
    assert_fails(&fixture.fails(&["--record", "/no/such/record"]), 1, "/no/such/record");
    assert_fails(&fixture.fails(&["--record", fixture.disk.path().to_str().unwrap()]), 1, "record");
    assert_eq!(fs::read_dir(fixture.disk.path()).unwrap().count(), 1, "nothing is left of the try");
    // A file is not replaced by a socket.
    fs::write(fixture.socket(), "precious").unwrap();
    assert_fails(&fixture.fails(&[]), 1, "socket");
    assert_eq!(fs::read(fixture.socket()).unwrap(), b"precious");
    fs::remove_file(fixture.socket()).unwrap();
    // A socket on which another process listens is not replaced either.
    let living = UnixListener::bind(fixture.socket()).unwrap();
    assert_fails(&fixture.fails(&[]), 1, "socket");
    assert!(UnixStream::connect(fixture.socket()).is_ok(), "it is still there");
    // A socket on which no process listens any more is replaced.
    drop(living);
    let served = fixture.serve(&[]);
    assert_fails(&fixture.fails(&[]), 1, "socket");
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
}

/// Thousands of connections that are silent, or send nonsense, to a process that may open few files. (Only as many at a
/// time as the backlog has room for: more silent ones would wait to be connected until others have timed out.)
#[test]
fn thousands_of_peers_cost_little() {
    if !vmm::has("thousands_of_peers_cost_little", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(36, 500));
    let too_many = may_open(200, fixture.command(&["--vms-max", "1000"])).output().unwrap();
    assert_fails(&too_many, 1, "ulimit");
    let served = Served::start(may_open(200, fixture.command(&["--vms-max", "40"])));
    let mut witness = Monitor::start(&fixture.plan());
    witness.does("touch 0 50 1");
    let (descriptors, threads, memory) = (served.descriptors(), served.threads(), served.anonymous_kib());
    for wave in 0..20u64 {
        let mut peers = Vec::new();
        for _ in 0..150 {
            let Ok(mut peer) = UnixStream::connect(fixture.socket()) else { continue };
            match wave % 3 {
                0 => {}
                1 => drop(peer.write_all(b"[{\"base")),
                _ => drop(peer.write_all(b"nonsense\n")),
            }
            peers.push(peer);
        }
        witness.does(&format!("touch {} 20 1", 50 + wave * 20));
    }
    until("they are let go", || served.descriptors() <= descriptors);
    until("their threads end", || served.threads() <= threads);
    let grown = served.anonymous_kib().saturating_sub(memory);
    assert!(grown < 64 << 10, "{grown} KiB more than before");
    let mut late = Monitor::start(&fixture.plan());
    late.does("touch 0 500 2");
}

/// A crowd of peers fills the table, and a machine waits in the backlog for ever:
///  1 the server is busy; a crowd connects, and closes its connections
///  2 a machine connects behind them and sends its memory, which succeeds: that needs no accept
///  3 the server accepts all of them at once; closed connections take its places, and the machine is refused
///  4 its message is closed unread, and no process answers its first fault
#[test]
fn a_peer_that_hung_up_delays_no_other() {
    if !vmm::has("a_peer_that_hung_up_delays_no_other", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(45, 100));
    for silent in [true, false] {
        let served = fixture.serve(&["--vms-max", "4", "--workers", "1"]);
        served.pause();
        for _ in 0..60 {
            let mut peer = UnixStream::connect(fixture.socket()).unwrap();
            if !silent {
                peer.write_all(b"[{\"base").unwrap();
            }
        }
        let mut late = Monitor::start(&fixture.plan());
        served.go_on();
        late.does("touch 0 100 2");
        assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
    }
}

/// A machine for which there is no room has sent its memory before it learns that. It would wait without end.
#[test]
fn a_machine_too_many_does_not_wait_without_end() {
    if !vmm::has("a_machine_too_many_does_not_wait_without_end", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(46, 100));
    let served = fixture.serve(&["--vms-max", "1"]);
    let mut first = Monitor::start(&fixture.plan());
    first.does("touch 0 50 1");
    let descriptors = served.descriptors();
    for _ in 0..20 {
        served.pause();
        let mut late = Monitor::start(&fixture.plan());
        late.tell("touch 0 100 1");
        served.go_on();
        assert_eq!(late.ended().signal(), Some(libc::SIGKILL));
        assert!(served.says("given up").contains("1 VMs are served already"));
    }
    first.does("touch 0 100 2");
    until("they are let go", || served.descriptors() <= descriptors);
    drop(first);
    until("there is room", || served.descriptors() < descriptors);
    Monitor::start(&fixture.plan()).does("touch 0 100 1");
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
}

/// A refused machine that has not died yet occupies no place:
///  1 the first machine has the only place; late ones are refused, killed, and held in their exit, up to a maximum
///  2 that is reported once; the next machine waits in the backlog
///  3 the first machine ends: the waiting one is served, though the refused ones are still dying
///  4 they die: no machine has to wait any more, and the next is refused
#[test]
fn a_refused_machine_that_does_not_die_occupies_no_place() {
    let test = "a_refused_machine_that_does_not_die_occupies_no_place";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    const CROWDED: &str = "cannot accept connections";
    let fixture = Fixture::new(Image::new(48, 100));
    let served = fixture.serve(&["--vms-max", "1", "--json"]);
    // Its memory is sent before the server accepts it.
    let late = || {
        served.pause();
        let late = Monitor::start(&fixture.plan());
        let held = kernel::Held::at_its_end(late.pid());
        served.go_on();
        (held, late)
    };
    let mut first = Monitor::start(&fixture.plan());
    first.does("touch 0 50 1");
    let mut dying = Vec::new();
    let mut waiting = loop {
        let (held, late) = late();
        let mut held = match held {
            Ok(held) => held,
            Err(error) => return vmm::skipped(test, &format!("no process can be held here: {error}")),
        };
        if served.says_one_of(&["was given up", CROWDED]).contains(CROWDED) {
            break late;
        }
        until("it is on its way out", || held.is_ending());
        dying.push((held, late));
    };
    first.does("touch 50 50 1");
    first.kill();
    first.wait();
    assert!(served.says_one_of(&["has ended", CROWDED]).contains("has ended"), "it was told already");
    waiting.does("touch 0 100 2");
    let (held, mut last) = late();
    // This machine is not held.
    drop(held);
    served.says(CROWDED);
    let refused = dying.len() as u64 + 1;
    for (held, mut late) in dying {
        drop(held);
        assert_eq!(late.wait().signal(), Some(libc::SIGKILL));
    }
    assert_eq!(last.wait().signal(), Some(libc::SIGKILL));
    waiting.does("touch 0 100 1");
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!(code, Some(0), "{report}");
    let told = ["vms", "vms_given_up", "peers_refused"].map(|name| number(&report, name));
    assert_eq!(told, [2, refused, 0], "{report}");
}

/// The command, with a limit of open files.
fn may_open(files: u64, mut command: Command) -> Command {
    // SAFETY: one system call between fork and exec.
    #[allow(unsafe_code, reason = "between fork and exec")]
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
            kernel::checked(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)).map(drop)
        })
    };
    command
}

/// Each machine has two pages of its own; this process plays all of them.
#[test]
fn hundreds_of_machines_are_served_at_once() {
    if !vmm::has("hundreds_of_machines_are_served_at_once", &[REMOVALS]) {
        return;
    }
    const MACHINES: u64 = 250;
    let fixture = Fixture::new(Image::new(38, 2 * MACHINES));
    let command = fixture.command(&["--vms-max", "300", "--on-failure", "leave"]);
    let served = Served::start(may_open(1024, command));
    let before = served.descriptors();
    // A machine's end is that of this process, not that of its connection: Firecracker promises nothing about
    // connections.
    let machines: Vec<_> = (0..MACHINES)
        .map(|number| {
            let userfault = kernel::Userfault::open(kernel::EVENT_REMOVE).unwrap();
            let bytes = 2 * vmm::PAGE as u64;
            let address = memory::map(&memory::Of::Anonymous, 0, bytes).unwrap();
            userfault.register(address, bytes, kernel::MISSING).unwrap();
            let stream = UnixStream::connect(fixture.socket()).unwrap();
            let region = memory::Region { address, offset: number * bytes, bytes };
            let message = vmm::monitor::message(&[region]);
            kernel::send(&stream, message.as_bytes(), &[userfault.as_fd()]).unwrap();
            (memory::Memory::new(fixture.image, vec![region]), userfault, stream)
        })
        .collect();
    let (teller, told) = channel();
    let reader = std::thread::spawn(move || {
        for (number, (memory, ..)) in machines.iter().enumerate() {
            for page in [1, 0] {
                teller.send(memory.check_page(2 * number as u64 + page)).unwrap();
            }
        }
    });
    for page in 0..2 * MACHINES {
        let checked = told.recv_timeout(WATCHDOG).unwrap_or_else(|_| panic!("page {page} is not answered"));
        assert_eq!(checked, Ok(()));
    }
    reader.join().unwrap();
    let each = (served.descriptors() - before) as u64 / MACHINES;
    assert!(each <= 3, "{each} descriptors for each of them");
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
}

#[test]
fn the_url_of_an_object_is_refused_with_the_command_that_serves_it() {
    let fixture = Fixture::new(Image::new(51, 10));
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
    command.args(["restore", "--snapshot", "s3://bucket/vm.mem", "--socket", "/run/vm.sock"]);
    let served_by = "quinion serve --store s3://bucket --restore s3://bucket/vm.mem=/run/vm.sock";
    assert_fails(&command.output().unwrap(), 1, served_by);
    assert_fails(&fixture.fails(&["--diff", "gs://bucket/monday.mem"]), 1, "gs://bucket/monday.mem=");
}

/// A pipe in the place of the record, into which nothing is written: the command waits for it.
#[test]
fn a_signal_ends_the_command_while_it_reads_its_record() {
    let fixture = Fixture::new(Image::new(52, 300));
    let pipe = fixture.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let child = fixture.command(&["--replay", pipe.to_str().unwrap()]).spawn().unwrap();
        let mut served = Served { child, lines: channel().1 };
        // It has begun to wait for signals by then, and to read.
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(served.child.try_wait().unwrap(), None, "it waits for the record");
        served.signal(signal);
        let began = Instant::now();
        let code = loop {
            match served.child.try_wait().unwrap() {
                Some(status) => break status.code(),
                None => assert!(began.elapsed() < Duration::from_secs(20), "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(code, Some(0));
        assert!(!fixture.socket().exists(), "it did not serve");
    }
}

#[test]
fn a_socket_has_the_owner_and_permissions_that_it_is_given() {
    let fixture = Fixture::new(Image::new(49, 10));
    for (words, mode) in [(&["--socket-mode", "660"][..], 0o660), (&[], 0o600), (&["--socket-mode", "0"], 0)]
    {
        let served = fixture.serve(words);
        let socket = fs::metadata(fixture.socket()).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, mode);
        assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
    }
    for words in ["8", "1777", "rw"] {
        assert_fails(&fixture.fails(&["--socket-mode", words]), 2, "octal");
    }
    for words in ["root", "1:", ":1", "1:2:3"] {
        assert_fails(&fixture.fails(&["--socket-owner", words]), 2, "numbers");
    }
    // Its own user and group, as which any process may name it; and another user, which root alone may.
    let own = fs::metadata(fixture.snapshot()).unwrap();
    let served = fixture.serve(&["--socket-owner", &format!("{}:{}", own.uid(), own.gid())]);
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
    if own.uid() != 0 {
        assert_fails(&fixture.fails(&["--socket-owner", "0:0"]), 1, "run as root");
        assert!(!fixture.socket().exists(), "nothing is left of the try");
        return;
    }
    let served = fixture.serve(&["--socket-owner", "65534:65533", "--socket-mode", "620"]);
    let socket = fs::metadata(fixture.socket()).unwrap();
    assert_eq!((socket.uid(), socket.gid(), socket.permissions().mode() & 0o777), (65534, 65533, 0o620));
    drop(served);
}

/// The server answers a machine that has less memory than the snapshot, and says so.
#[test]
fn a_snapshot_that_is_larger_than_its_machine_is_mentioned() {
    if !vmm::has("a_snapshot_that_is_larger_than_its_machine_is_mentioned", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(50, 600));
    let served = fixture.serve(&[]);
    let mut smaller = fixture.plan();
    smaller.regions = vec![(0, 500 * vmm::PAGE as u64)];
    Monitor::start(&smaller).does("touch 0 500 1");
    let said = served.says("vm 1 (process");
    assert!(said.contains("serving"), "{said}");
    let said = served.says_one_of(&["snapshot of this VM", "has ended"]);
    assert!(said.contains("snapshot of this VM"), "{said}");
    Monitor::start(&fixture.plan()).does("touch 0 600 1");
    let said = served.says_one_of(&["snapshot of this VM", "vm 2 (process"]);
    let ended = served.says_one_of(&["snapshot of this VM", "vm 2 (process"]);
    assert!(said.contains("serving") && ended.contains("has ended"), "{said} {ended}");
}

/// Three commands follow each other while a machine reads and gives back; the first two end by themselves.
#[test]
fn a_command_takes_over_the_machines_of_one_that_runs() {
    let test = "a_command_takes_over_the_machines_of_one_that_runs";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(60, 3000));
    let metrics = fixture.path("metrics");
    let words = ["--replace", "--json", "--metrics", metrics.to_str().unwrap()];
    let mut served = fixture.serve(&words[..2]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("balloon 2900 100 dontneed");
    monitor.does("touch 0 10 1");
    monitor.tell("race 300 3");
    for _ in 0..2 {
        let next = fixture.serve(&words);
        served.says("was handed over");
        let mut report = String::new();
        served.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        assert_eq!(served.child.wait().unwrap().code(), Some(0));
        assert_eq!((number(&report, "vms_handed_over"), number(&report, "vms_given_up")), (1, 0), "{report}");
        served = next;
    }
    until("the numbers tell of it", || metric(&metrics, "vms_taken_over_total") == 1.0);
    assert_eq!(monitor.answer().as_deref(), Some("done"));
    monitor.does("touch 0 3000 2");
    let mut other = Monitor::start(&fixture.plan());
    other.does("touch 0 3000 1");
    let (code, report) = served.stop(libc::SIGTERM);
    assert_eq!(code, Some(0), "{report}");
    let told = ["vms", "vms_taken_over", "vms_handed_over"].map(|name| number(&report, name));
    assert_eq!(told, [2, 1, 0], "{report}");
    assert_eq!(fs::read_dir(fixture.sockets.path()).unwrap().count(), 0);
}

#[test]
fn a_command_with_another_snapshot_takes_over_nothing() {
    if !vmm::has("a_command_with_another_snapshot_takes_over_nothing", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(61, 300));
    let served = fixture.serve(&[]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 1");
    assert_fails(&fixture.fails(&[]), 1, "another server listens there");
    let other = fixture.path("other");
    Image::new(62, 300).write(&other);
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
    command
        .arg("restore")
        .arg("--snapshot")
        .arg(&other)
        .arg("--socket")
        .arg(fixture.socket())
        .arg("--replace");
    assert_fails(&command.output().unwrap(), 1, "serves another snapshot");
    served.says("another snapshot");
    monitor.does("touch 0 300 2");
    assert_eq!(served.stop(libc::SIGTERM).0, Some(0));
}

/// The command that was replaced may be killed at any moment after that: the machine is the other's.
#[test]
fn a_replaced_command_that_is_killed_harms_no_machine() {
    if !vmm::has("a_replaced_command_that_is_killed_harms_no_machine", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(63, 2000));
    let served = fixture.serve(&[]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.tell("race 200 2");
    let next = fixture.serve(&["--replace"]);
    served.signal(libc::SIGKILL);
    drop(served);
    assert_eq!(monitor.answer().as_deref(), Some("done"));
    monitor.does("touch 0 2000 2");
    assert_eq!(next.stop(libc::SIGTERM).0, Some(0));
}

#[test]
fn numbers_are_published_on_request() {
    if !vmm::has("numbers_are_published_on_request", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(37, 400));
    let metrics = fixture.path("metrics");
    let served = fixture.serve(&["--metrics", metrics.to_str().unwrap()]);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 400 1");
    let faults = || {
        let text = fs::read_to_string(&metrics).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with("quinion_restore_faults_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    until("the file says how many faults there were", || faults() >= 1.0);
    drop(served);
}

/// Two chunks of a pack are damaged; the first fault of each page is told, and no more than some in a second.
#[test]
fn a_page_that_cannot_be_read_is_told_with_its_file_and_reason() {
    let needs = [Need::Userfault(kernel::EVENT_REMOVE | kernel::POISON | kernel::MINOR_SHMEM)];
    if !vmm::has("a_page_that_cannot_be_read_is_told_with_its_file_and_reason", &needs) {
        return;
    }
    let fixture = Fixture::new(Image::new(54, 640));
    let flat = fixture.path("flat");
    fs::rename(fixture.snapshot(), &flat).unwrap();
    let mut pack = Command::new(env!("CARGO_BIN_EXE_quinion"));
    pack.args(["pack", "--chunk", "64K", "--snapshot"]).arg(&flat).arg("--out").arg(fixture.snapshot());
    assert!(pack.output().unwrap().status.success());
    let mut bytes = fs::read(fixture.snapshot()).unwrap();
    let at = bytes.len() - 1000;
    bytes[at] ^= 1;
    fs::write(fixture.snapshot(), bytes).unwrap();
    for words in [&["--on-failure", "leave"][..], &["--minor", "--memory", "64M"]] {
        let served = fixture.serve(words);
        let features = kernel::MINOR_SHMEM | kernel::MISSING_SHMEM | kernel::EVENT_REMOVE;
        let plan = match words[0] {
            "--minor" => fixture.plan().backing(Backing::Offered).features(features),
            _ => fixture.plan(),
        };
        let mut monitor = Monitor::start(&plan);
        let fault = format!("errno {}", libc::EFAULT);
        let poisoned = (0..640).filter(|page| monitor.ask(&format!("probe {page}")) == Some(fault.clone()));
        assert_eq!(poisoned.count(), 16, "one chunk is damaged");
        let said = served.says("cannot be read");
        for words in ["vm 1 ", "bytes ", "memory", "checksum differs", "SIGBUS"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        served.signal(libc::SIGTERM);
        let mut more = 1;
        while let Ok(line) = served.lines.recv_timeout(WATCHDOG) {
            more += u32::from(line.contains("cannot be read"));
        }
        assert!(more >= 2, "the line of the VM's end, or one more for a page: {more}");
    }
}
