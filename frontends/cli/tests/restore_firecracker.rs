//! A real Firecracker, if `$FIRECRACKER_BIN` names one: its snapshots are restored with memory that `quinion restore`
//! serves.
//!
//! ```text
//!   first    boots a guest, which fills its memory and waits          --pause--> memory, state
//!   second   loads the state, with a page-fault server for its memory: the guest verifies each page, and reports
//! ```
//!
//! One test has a guest of 81 bytes in an ELF file that it writes, which needs no kernel and no disk. The others need
//! the guest that `$FIRECRACKER_GUEST` names: it takes orders (`quinion_testing::vmm::firecracker`). A VM that is
//! never served waits for ever, so that is found by the harness's own watchdog, and no time is asserted here.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use quinion_testing::vmm;
use quinion_testing::vmm::firecracker::{Backend, Config, Firecracker, Kit, Mode, Op, Order, Snapshot};
use quinion_testing::vmm::firecracker::{binary, field, huge_mib};
use quinion_testing::vmm::{Need, kernel};
use tempfile::TempDir;

const WATCHDOG: Duration = Duration::from_secs(300);
/// The guest's memory.
const MIB: u64 = 128;
/// How long a guest that goes on is never silent, if it says something every few pages.
const SILENCE: Duration = Duration::from_secs(2);

/// Long mode, identity-mapped. Each word of its 2 MiB holds its own address. (No more, since some KVMs emulate ring 0
/// instruction by instruction.)
const GUEST: [u8; 81] = [
    0x48, 0xc7, 0xc7, 0x00, 0x00, 0x00, 0x02, //          mov  rdi, 32 MiB
    0x48, 0xc7, 0xc1, 0x00, 0x00, 0x04, 0x00, //          mov  rcx, 2 MiB / 8
    0x48, 0x89, 0x3f, //                            fill: mov  [rdi], rdi
    0x48, 0x83, 0xc7, 0x08, //                            add  rdi, 8
    0x48, 0xff, 0xc9, //                                  dec  rcx
    0x75, 0xf4, //                                        jnz  fill
    0x66, 0xba, 0xf8, 0x03, //                            mov  dx, the serial port
    0xb0, b'F', 0xee, //                                  mov  al, 'F'; out  dx, al
    0xb0, b'\n', 0xee, //                                 mov  al, '\n'; out  dx, al
    0x48, 0xc7, 0xc7, 0x00, 0x00, 0x00, 0x02, //    next: mov  rdi, 32 MiB
    0x48, 0xc7, 0xc1, 0x00, 0x00, 0x04, 0x00, //          mov  rcx, 2 MiB / 8
    0x48, 0x39, 0x3f, //                           check: cmp  [rdi], rdi
    0x75, 0x11, //                                        jne  bad
    0x48, 0x83, 0xc7, 0x08, //                            add  rdi, 8
    0x48, 0xff, 0xc9, //                                  dec  rcx
    0x75, 0xf2, //                                        jnz  check
    0xb0, b'V', 0xee, //                                  mov  al, 'V'; out  dx, al
    0xb0, b'\n', 0xee, //                                 mov  al, '\n'; out  dx, al
    0xeb, 0xdc, //                                        jmp  next
    0xb0, b'X', 0xee, //                             bad: mov  al, 'X'; out  dx, al
    0xb0, b'\n', 0xee, //                                 mov  al, '\n'; out  dx, al
    0xf4, //                                        stop: hlt
    0xeb, 0xfd, //                                        jmp  stop
];
const GUEST_ADDRESS: u64 = 16 << 20;

fn elf() -> Vec<u8> {
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend([2u16, 62].iter().flat_map(|half| half.to_le_bytes()));
    file.extend(1u32.to_le_bytes());
    // Entry, program headers, section headers.
    file.extend([GUEST_ADDRESS, 64, 0].iter().flat_map(|word| word.to_le_bytes()));
    file.extend(0u32.to_le_bytes());
    file.extend([64u16, 56, 1, 64, 0, 0].iter().flat_map(|half| half.to_le_bytes()));
    // A segment to load: readable, writable, executable.
    file.extend([1u32, 7].iter().flat_map(|half| half.to_le_bytes()));
    let bytes = GUEST.len() as u64;
    let segment = [4096, GUEST_ADDRESS, GUEST_ADDRESS, bytes, bytes, 4096];
    file.extend(segment.iter().flat_map(|word| word.to_le_bytes()));
    file.resize(4096, 0);
    file.extend(GUEST);
    file
}

/// Whether a real Firecracker can run here at all; says so if not.
fn can_run(test: &str) -> bool {
    vmm::has(test, &[Need::Userfault(kernel::EVENT_REMOVE), Need::Kvm])
}

struct Fixture {
    kit: Kit,
    folder: TempDir,
    base: Snapshot,
}

impl Fixture {
    /// Prints why and returns `None` without a Firecracker and a guest.
    fn of(test: &str) -> Option<Self> {
        Self::with(test, Config::new(MIB))
    }

    fn with(test: &str, config: Config) -> Option<Self> {
        let (kit, folder) = (Self::kit(test)?, folder());
        let base = kit.snapshot(folder.path(), config);
        Some(Self { kit, folder, base })
    }

    fn kit(test: &str) -> Option<Kit> {
        let kit = Kit::find().inspect_err(|why| vmm::skipped(test, why)).ok()?;
        can_run(test).then_some(kit)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ordered(&self, name: &str, order: Order) -> Snapshot {
        self.base.ordered(self.folder.path(), name, order)
    }

    fn restore(&self, name: &str, snapshot: &Snapshot, backend: Backend<'_>) -> Firecracker {
        let monitor = self.kit.monitor(self.folder.path(), name);
        assert_eq!(monitor.load(snapshot, backend), Ok(()));
        monitor
    }
}

fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

struct Served {
    child: Child,
    lines: Receiver<String>,
    /// Sockets, in a folder with a short path.
    sockets: TempDir,
}

impl Served {
    fn start(snapshot: &Snapshot, words: &[&str]) -> Self {
        let sockets = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
        command.arg("restore").arg("--snapshot").arg(&snapshot.memory);
        command.arg("--socket").arg(sockets.path().join("faults"));
        command.args(["--memory", "512M", "--json"]).args(words);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (teller, lines) = channel();
        std::thread::spawn(move || {
            errors.lines().map_while(Result::ok).try_for_each(|line| teller.send(line)).ok();
        });
        let served = Self { child, lines, sockets };
        served.says("serving");
        served
    }
    fn socket(&self) -> PathBuf {
        self.sockets.path().join("faults")
    }
    fn says(&self, words: &str) {
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(WATCHDOG) {
                Ok(line) if line.contains(words) => return,
                Ok(line) => said.push(line),
                Err(_) => panic!("it does not say {words:?}, but {said:#?}"),
            }
        }
    }
    fn signal(&self, signal: i32) {
        // SAFETY: a plain call, on this process's child.
        #[allow(unsafe_code, reason = "the standard library sends one signal only")]
        unsafe {
            libc::kill(self.child.id() as i32, signal)
        };
    }
    fn stop(mut self) -> String {
        self.signal(libc::SIGTERM);
        let mut report = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{report}");
        report
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn number(report: &str, name: &str) -> u64 {
    let (_, rest) = report.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name}: {report}"));
    let digits = rest.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("{name}: {report}"))
}

#[test]
fn a_real_firecracker_goes_on_from_a_snapshot_that_we_serve() {
    let test = "a_real_firecracker_goes_on_from_a_snapshot_that_we_serve";
    let binary = match binary() {
        Ok(binary) => binary,
        Err(why) => return vmm::skipped(test, &why),
    };
    if !can_run(test) {
        return;
    }
    let folder = folder();
    let kit = Kit { binary, guest: folder.path().join("guest") };
    fs::write(&kit.guest, elf()).unwrap();
    let mut first = kit.boot(folder.path(), Config::new(128));
    let checks = |monitor: &mut Firecracker, times: usize| {
        (0..times).for_each(|_| drop(monitor.line("V")));
        assert!(!monitor.said().contains(&"X".to_owned()), "the guest finds its memory wrong");
    };
    checks(&mut first, 2);
    let snapshot = first.snapshot(folder.path(), 128);
    drop(first);
    let served = Served::start(&snapshot, &[]);
    let mut second = kit.monitor(folder.path(), "second");
    assert_eq!(second.load(&snapshot, Backend::Uffd(&served.socket())), Ok(()));
    checks(&mut second, 5);
}

#[test]
fn each_page_is_right_by_the_kernel_and_by_ours() {
    let Some(fixture) = Fixture::of("each_page_is_right_by_the_kernel_and_by_ours") else { return };
    let scattered = Order { again: true, ..Order::scattered(200) };
    for (which, order) in [Order::new(Mode::All), scattered].into_iter().enumerate() {
        let snapshot = fixture.ordered("ordered", order);
        let touched = fixture.base.pages() * order.thousandths / 1000;
        let verified = |mut monitor: Firecracker| {
            monitor.right("R", touched);
            if order.again {
                monitor.right("S", fixture.base.pages());
            }
            assert!(monitor.ended().success());
        };
        verified(fixture.restore(&format!("file{which}"), &snapshot, Backend::File));
        for (way, words) in [&[][..], &["--fill", "all"], &["--fill", "none"]].into_iter().enumerate() {
            for is_cold in [true, false] {
                if is_cold {
                    vmm::evict(&snapshot.memory, 0, None);
                }
                let served = Served::start(&snapshot, words);
                let name = format!("ours{which}{way}{is_cold}");
                verified(fixture.restore(&name, &snapshot, Backend::Uffd(&served.socket())));
                let report = served.stop();
                assert_eq!((number(&report, "vms"), number(&report, "vms_given_up")), (1, 0), "{report}");
            }
        }
    }
}

#[test]
fn four_machines_at_a_time_are_right() {
    let Some(fixture) = Fixture::of("four_machines_at_a_time_are_right") else { return };
    // They write, and find each its own.
    let snapshot = fixture.ordered("ordered", Order { op: Op::Write, again: true, ..Order::scattered(300) });
    let touched = fixture.base.pages() * 300 / 1000;
    let served = Served::start(&snapshot, &[]);
    let mut monitors =
        Vec::from_iter((0..4).map(|number| {
            fixture.restore(&format!("vm{number}"), &snapshot, Backend::Uffd(&served.socket()))
        }));
    for monitor in &mut monitors {
        monitor.right("R", touched);
        monitor.right("W", touched);
        monitor.right("S", fixture.base.pages());
        assert!(monitor.ended().success());
    }
    let report = served.stop();
    assert_eq!((number(&report, "vms"), number(&report, "vms_given_up")), (4, 0), "{report}");
}

/// A server that is killed leaves its machine waiting: it sees no page that is not the snapshot's. One that is ended
/// kills it.
#[test]
fn a_machine_whose_server_ends_sees_no_wrong_page() {
    let Some(fixture) = Fixture::of("a_machine_whose_server_ends_sees_no_wrong_page") else { return };
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let snapshot = fixture.ordered("ordered", Order { chunk: 64, ..Order::scattered(1000) });
        vmm::evict(&snapshot.memory, 0, None);
        let served = Served::start(&snapshot, &["--fill", "none"]);
        let name = format!("vm{signal}");
        let mut monitor = fixture.restore(&name, &snapshot, Backend::Uffd(&served.socket()));
        monitor.line("P");
        served.signal(signal);
        // It says what it has found when it is through; here it never is, or it found all pages right.
        let report = monitor.line_in("R ", SILENCE);
        if let Ok(line) = &report {
            assert_eq!(field(line, "bad"), 0, "{line}");
        }
        if signal == libc::SIGTERM {
            assert!(report.is_ok() || monitor.ended().signal() == Some(libc::SIGKILL));
        }
    }
}

/// A snapshot that is cut while a machine runs on it: the machine is ended, or it had all of its memory before. It
/// never goes on with what is not there.
#[test]
fn a_machine_whose_snapshot_is_cut_sees_no_wrong_page() {
    let Some(fixture) = Fixture::of("a_machine_whose_snapshot_is_cut_sees_no_wrong_page") else { return };
    let snapshot = fixture.ordered("ordered", Order { chunk: 16, ..Order::scattered(1000) });
    vmm::evict(&snapshot.memory, 0, None);
    let served = Served::start(&snapshot, &["--fill", "none"]);
    let mut monitor = fixture.restore("vm", &snapshot, Backend::Uffd(&served.socket()));
    monitor.line("P");
    served.signal(libc::SIGSTOP);
    fs::OpenOptions::new().write(true).open(&snapshot.memory).unwrap().set_len(8 << 20).unwrap();
    served.signal(libc::SIGCONT);
    let status = monitor.ended();
    match monitor.line_in("R ", SILENCE) {
        Ok(line) => assert_eq!(field(&line, "bad"), 0, "{line}"),
        Err(_) => assert_eq!(status.signal(), Some(libc::SIGKILL), "{:?}", monitor.said()),
    }
    // New machines get nothing either.
    let mut other = fixture.kit.monitor(fixture.folder.path(), "other");
    if other.load(&snapshot, Backend::Uffd(&served.socket())).is_ok() {
        assert_eq!(other.ended().signal(), Some(libc::SIGKILL));
    }
    served.says("changed");
    let report = served.stop();
    assert!(number(&report, "vms_given_up") >= 1, "{report}");
}

#[test]
fn pages_that_a_balloon_took_are_zeros_and_the_others_are_right() {
    let test = "pages_that_a_balloon_took_are_zeros_and_the_others_are_right";
    // The guest's trials take 192 MiB.
    let Some(fixture) = Fixture::with(test, Config { has_balloon: true, ..Config::new(256) }) else { return };
    let snapshot = fixture.ordered("ordered", Order::new(Mode::Balloon));
    for words in [&[][..], &["--fill", "all"]] {
        let served = Served::start(&snapshot, words);
        let name = format!("vm{}", words.len());
        let mut monitor = fixture.restore(&name, &snapshot, Backend::Uffd(&served.socket()));
        let line = monitor.line("R ");
        assert_eq!(field(&line, "bad"), 0, "{line}; {:?}", monitor.said());
        assert!(monitor.ended().success());
        let report = served.stop();
        assert!(number(&report, "removed_bytes") > 32 << 20, "{report}");
    }
}

#[test]
fn a_record_is_replayed_over_several_runs() {
    let Some(fixture) = Fixture::of("a_record_is_replayed_over_several_runs") else { return };
    let (record, pages) = (fixture.path("record"), fixture.base.pages());
    let record = record.to_str().unwrap();
    let run = |name: &str, order: Order, words: &[&str]| {
        // The order is in a page of the snapshot, which differs from run to run: that page is stale then.
        let snapshot = fixture.ordered("ordered", order);
        vmm::evict(&snapshot.memory, 0, None);
        let served = Served::start(&snapshot, words);
        let mut monitor = fixture.restore(name, &snapshot, Backend::Uffd(&served.socket()));
        monitor.right("R", pages * order.thousandths / 1000);
        assert!(monitor.ended().success());
        served.stop()
    };
    let few = 100 * pages / 1000 * 4096;
    let report = run("first", Order::scattered(100), &["--record", record]);
    // And a few that hold its program, its order, and what the monitor touches.
    let recorded = number(&report, "recorded_bytes");
    assert!((few..few + (1 << 20)).contains(&recorded), "{recorded} for {few}: {report}");
    let report = run("second", Order::scattered(200), &["--record", record, "--replay", record]);
    let merged = number(&report, "recorded_bytes");
    assert!((2 * few..2 * few + (1 << 20)).contains(&merged), "{merged} for {few}: {report}");
    let report = run("third", Order::scattered(200), &["--replay", record]);
    assert!(number(&report, "ahead_bytes") > 0, "{report}");
    assert!(number(&report, "stale_bytes") <= 4096, "the page with the order: {report}");
    // One that goes elsewhere, too, is right.
    run("fourth", Order::new(Mode::All), &["--replay", record]);
}

/// A machine that is in the middle of its work is paused, and a snapshot taken of it: what it has never touched comes
/// from the server, what it has written is its own. Of a record of the first snapshot, the pages that were written are
/// stale for the second.
#[test]
fn a_machine_that_we_serve_is_paused_and_restored_again_with_a_stale_record() {
    let test = "a_machine_that_we_serve_is_paused_and_restored_again_with_a_stale_record";
    let Some(fixture) = Fixture::of(test) else { return };
    let (whole, written, pages) = (fixture.path("whole"), fixture.path("written"), fixture.base.pages());
    let (whole, written) = (whole.to_str().unwrap(), written.to_str().unwrap());
    let all = fixture.ordered("all", Order::new(Mode::All));
    let served = Served::start(&all, &["--record", whole]);
    fixture.restore("all's", &all, Backend::Uffd(&served.socket())).right("R", pages);
    served.stop();

    let order = Order { op: Op::Write, again: true, chunk: 16, ..Order::scattered(500) };
    let snapshot = fixture.ordered("ordered", order);
    let served = Served::start(&snapshot, &["--record", written]);
    let mut monitor = fixture.restore("first", &snapshot, Backend::Uffd(&served.socket()));
    (0..40).for_each(|_| drop(monitor.line("P")));
    let folder = fixture.path("again");
    fs::create_dir(&folder).unwrap();
    let again = monitor.snapshot(&folder, MIB);
    drop(monitor);
    served.stop();
    let restored = |name: &str, backend: Backend<'_>| {
        let mut monitor = fixture.restore(name, &again, backend);
        let touched = pages * order.thousandths / 1000;
        monitor.right("R", touched);
        monitor.right("W", touched);
        monitor.right("S", pages);
        assert!(monitor.ended().success());
    };
    restored("by file", Backend::File);
    for words in [&[][..], &["--replay", whole], &["--replay", written]] {
        vmm::evict(&again.memory, 0, None);
        let served = Served::start(&again, words);
        restored(&format!("by ours{words:?}").replace('/', ""), Backend::Uffd(&served.socket()));
        let stale = number(&served.stop(), "stale_bytes") / 4096;
        // Faults overtake some; a record that is mostly stale is given up.
        let expected = if words.is_empty() { 0..1 } else { 1..pages / 2 };
        assert!(expected.contains(&stale), "{words:?}: {stale}");
    }
}

/// As the jailer has it: the monitor runs as another user, to whom the socket belongs. It is given devices that it may
/// open, in a mount namespace of its own.
#[test]
fn a_monitor_of_another_user_is_served_if_the_socket_is_its_own() {
    let test = "a_monitor_of_another_user_is_served_if_the_socket_is_its_own";
    let Some(fixture) = Fixture::of(test) else { return };
    let nodes = fixture.path("nodes");
    fs::create_dir(&nodes).unwrap();
    let as_another = || {
        let script = "nodes=$1; shift; for node in kvm userfaultfd; do [ -e /dev/$node ] || continue; \
                      rm -f $nodes/$node && cp -a /dev/$node $nodes && chmod 666 $nodes/$node && \
                      mount --bind $nodes/$node /dev/$node || exit 1; done; \
                      exec setpriv --reuid 12345 --regid 12345 --clear-groups \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&nodes);
        command
    };
    let mut probe = as_another();
    let probe = probe.args(["sh", "-c", ": <>/dev/kvm"]).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|probe| probe.success()) {
        return vmm::skipped(test, "it needs root, and `unshare` and `setpriv`");
    }
    let snapshot = fixture.ordered("ordered", Order::scattered(100));
    let open = |path: &Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for path in [fixture.folder.path(), snapshot.state.parent().unwrap()] {
        open(path, 0o777);
    }
    for path in [&snapshot.state, &snapshot.memory] {
        open(path, 0o644);
    }
    for (owner, is_served) in [("12345:12345", true), ("12346:12346", false)] {
        let served = Served::start(&snapshot, &["--socket-owner", owner]);
        open(served.sockets.path(), 0o755);
        let mut command = as_another();
        command.arg(&fixture.kit.binary);
        let mut monitor = Firecracker::start(command, &fixture.path(owner));
        let loaded = monitor.load(&snapshot, Backend::Uffd(&served.socket()));
        assert_eq!(loaded.is_ok(), is_served, "{owner}: {loaded:?}");
        if is_served {
            monitor.right("R", fixture.base.pages() / 10);
            assert!(monitor.ended().success());
        }
    }
}

#[test]
fn a_machine_of_large_pages_is_right() {
    let test = "a_machine_of_large_pages_is_right";
    // For the machine whose snapshot is taken, and then for the one that is restored.
    if huge_mib() < MIB {
        let why = format!("it needs {} free pages of 2 MiB: `echo {0} >/proc/sys/vm/nr_hugepages`", MIB / 2);
        return vmm::skipped(test, &why);
    }
    let Some(fixture) = Fixture::with(test, Config { has_huge_pages: true, ..Config::new(MIB) }) else {
        return;
    };
    for words in [&[][..], &["--fill", "all"]] {
        for order in [Order::new(Mode::All), Order { again: true, ..Order::scattered(20) }] {
            let snapshot = fixture.ordered("ordered", order);
            let served = Served::start(&snapshot, words);
            let name = format!("vm{}{}", words.len(), order.thousandths);
            let mut monitor = fixture.restore(&name, &snapshot, Backend::Uffd(&served.socket()));
            monitor.right("R", fixture.base.pages() * order.thousandths / 1000);
            if order.again {
                monitor.right("S", fixture.base.pages());
            }
            assert!(monitor.ended().success());
        }
    }
}
