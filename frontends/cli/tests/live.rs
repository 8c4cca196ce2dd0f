//! `quinion run --live` on a terminal, and `quinion top`: the panel is shown while the program runs, the program's
//! output stays, and the terminal is restored however the run ends.
//!
//! The terminal is a pseudo-terminal whose other end is an emulator, so the tests see what a user would see. A shell
//! runs between, as in real use: without one the kernel hangs the terminal up when its leader is killed.
#![allow(unsafe_code, reason = "a pseudo-terminal is made and given to a child")]

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROWS: u16 = 24;
const COLUMNS: u16 = 80;
const MARK: &str = "- quinion: ";
/// A machine that takes longer than this is stuck, not slow.
const WAIT_MAX: Duration = Duration::from_secs(120);

struct Terminal {
    master: File,
    screen: vt100::Parser,
    bytes: Vec<u8>,
    child: Child,
}

impl Terminal {
    /// Runs `quinion run ARGUMENTS` from a shell on a terminal of `rows` rows. The shell prints its exit status.
    fn run(rows: u16, arguments: &[&str]) -> Self {
        Self::run_in(&std::env::temp_dir(), rows, arguments)
    }

    /// Like `run`, with kept caches in `runtime`.
    fn run_in(runtime: &Path, rows: u16, arguments: &[&str]) -> Self {
        Self::command_in(runtime, rows, &[&["run"], arguments].concat())
    }

    fn command_in(runtime: &Path, rows: u16, arguments: &[&str]) -> Self {
        Self::script_in(runtime, rows, ("\"$@\"; echo ended with $?; read line", arguments))
    }

    fn script_in(runtime: &Path, rows: u16, (script, arguments): (&str, &[&str])) -> Self {
        let (master, slave) = pseudo_terminal(rows);
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh", env!("CARGO_BIN_EXE_quinion")]);
        shell
            .args(arguments)
            .env("XDG_RUNTIME_DIR", runtime)
            .env("TERM", "xterm")
            .env("LC_ALL", "C")
            .env_remove("NO_COLOR");
        let end = || Stdio::from(slave.try_clone().unwrap());
        shell.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: all calls may be made between fork and exec.
        unsafe {
            shell.pre_exec(|| {
                // A test that runs in a shell's background has it ignored, and passes that on.
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                let leads = libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0;
                if leads { Ok(()) } else { Err(std::io::Error::last_os_error()) }
            });
        }
        let screen = vt100::Parser::new(sized(rows), sized(COLUMNS), 1000);
        Self { master, screen, bytes: Vec::new(), child: shell.spawn().unwrap() }
    }

    fn wait_until(&mut self, what: &str, is_so: impl Fn(&str) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.shown()) {
            assert!(begun.elapsed() < WAIT_MAX, "never: {what}\n{}\n{:?}", self.shown(), self.written());
            let mut fds = [libc::pollfd { fd: self.master.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            // SAFETY: one descriptor, which this process owns.
            if unsafe { libc::poll(fds.as_mut_ptr(), 1, 100) } == 1 {
                let mut some = [0; 4096];
                let read = self.master.read(&mut some).unwrap_or(0);
                self.screen.process(&some[..read]);
                self.bytes.extend_from_slice(&some[..read]);
            }
        }
    }

    fn shown(&self) -> String {
        self.screen.screen().contents()
    }

    fn written(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    fn say(&mut self, line: &str) {
        writeln!(self.master, "{line}").unwrap();
    }

    fn number_after(&self, name: &str) -> i32 {
        let shown = self.shown();
        let number = shown.lines().find_map(|line| line.strip_prefix(name));
        number.expect("it was waited for").trim().parse().unwrap()
    }

    /// Fails unless the whole screen scrolls again: written lines reach the last row.
    fn expect_given_back(&mut self) {
        assert!(!self.shown().contains(MARK), "{}", self.shown());
        let lines: String = (0..ROWS * 2).map(|line| format!("\r\nline {line}")).collect();
        self.screen.process(lines.as_bytes());
        let last = self.screen.screen().rows(0, COLUMNS).last().unwrap();
        assert_eq!(last, format!("line {}", ROWS * 2 - 1), "{}", self.shown());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sized(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("a terminal has a size")
}

fn pseudo_terminal(rows: u16) -> (File, OwnedFd) {
    let size = libc::winsize { ws_row: rows, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut master, mut slave) = (-1, -1);
    let nothing = std::ptr::null_mut();
    // SAFETY: the call writes two numbers and reads a size; it opens descriptors that no other value owns.
    unsafe {
        let answer = libc::openpty(&raw mut master, &raw mut slave, nothing, nothing.cast(), &raw const size);
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        // Children do not inherit the ends, except where they are passed explicitly.
        libc::fcntl(master, libc::F_SETFD, libc::FD_CLOEXEC);
        libc::fcntl(slave, libc::F_SETFD, libc::FD_CLOEXEC);
        (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
    }
}

/// Whether a line begins with `beginning`; the panel shows a program's own text, too, but not at the beginning of a
/// line.
fn has_line(shown: &str, beginning: &str) -> bool {
    shown.lines().any(|line| line.starts_with(beginning))
}

/// Whether the panel names a file, with how much of it is cached, or as closed.
fn names(shown: &str, file: &str) -> bool {
    let is_told = |row: &str| row.contains(file) && (row.ends_with(" cached") || row.ends_with(" closed"));
    shown.lines().skip(usize::from(ROWS) - 3).any(is_told)
}

fn kill(process: i32, signal: i32) {
    // SAFETY: the arguments are plain numbers.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

fn watched(script: &str) -> [&str; 8] {
    ["--live", "--attach=at-once", "--memory=16M", "--report=none", "--", "sh", "-c", script]
}

#[test]
fn the_panel_is_below_the_output_and_removed_afterwards() {
    let script = "seq 1 100; cat /etc/passwd > /dev/null; read line; echo heard $line";
    let mut terminal = Terminal::run(ROWS, &watched(script));
    terminal.wait_until("a panel with numbers", |shown| shown.contains(MARK) && shown.contains("memory "));
    terminal.wait_until("all of the output", |shown| shown.contains("\n100\n"));
    let rows: Vec<String> = terminal.screen.screen().rows(0, COLUMNS).collect();
    let panel = usize::from(ROWS) - 8;
    assert!(rows[panel].contains("sh -c seq 1 100; cat"), "{rows:#?}");
    let labels: Vec<&str> = rows[panel + 1..].iter().filter_map(|row| row.split(' ').next()).collect();
    assert_eq!(labels[..4], ["hits", "served", "device", "memory"], "{rows:#?}");
    assert_eq!(rows[panel - 2..panel], ["100", ""], "the output ends right above: {rows:#?}");

    terminal.say("you");
    terminal.wait_until("the end", |shown| shown.contains("ended with 0"));
    assert!(terminal.shown().contains("98\n99\n100\nyou\nheard you\nended with 0"), "{}", terminal.shown());
    terminal.expect_given_back();
    // The lines that scrolled off are all there, too.
    terminal.screen.screen_mut().set_scrollback(1000);
    assert!(terminal.shown().starts_with("1\n2\n3\n"), "{}", terminal.shown());
}

#[test]
fn the_file_that_is_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("much-read.txt");
    std::fs::write(&file, vec![b'x'; 4 << 20]).unwrap();
    let script = format!("cat {0} {0} > /dev/null; exec 3< {0}; read line", file.display());
    let mut terminal = Terminal::run(ROWS, &watched(&script));
    terminal.wait_until("the file's name", |shown| names(shown, "much-read.txt"));
    terminal.wait_until("bytes that were served", |shown| shown.contains("8.0 MiB in all"));
    terminal.say("");
    terminal.wait_until("the end", |shown| shown.contains("ended with"));
    terminal.expect_given_back();
}

/// The numbers come from the process that owns the cache; when that has ended, the panel and the program continue.
#[test]
fn a_kept_cache_is_shown_and_its_end_is_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kept-file");
    std::fs::write(&file, vec![b'x'; 4 << 20]).unwrap();
    let script = format!("cat {0} {0} > /dev/null; exec 3< {0}; read line; echo heard $line", file.display());
    let mut arguments = watched(&script).to_vec();
    arguments.splice(0..0, ["--keep", "--idle=1s"]);
    let mut terminal = Terminal::run_in(folder.path(), ROWS, &arguments);
    terminal.wait_until("bytes that were served", |shown| shown.contains("8.0 MiB in all"));
    terminal.wait_until("the file's name", |shown| names(shown, "kept-file"));
    let mut stop = Command::new(env!("CARGO_BIN_EXE_quinion"));
    let stopped = stop.args(["stop", "--all"]).env("XDG_RUNTIME_DIR", folder.path()).output().unwrap();
    assert!(stopped.status.success(), "{stopped:?}");
    terminal.say("you");
    terminal.wait_until("the end", |shown| shown.contains("heard you\nended with 0"));
    terminal.expect_given_back();
}

/// 1. The panel has reserved its rows.
/// 2. Another process kills `quinion run` by a signal that cannot be caught.
/// 3. From then on the terminal scrolls in its upper part only.
#[test]
fn a_run_that_is_killed_gives_the_rows_back() {
    let mut terminal = Terminal::run(ROWS, &watched("echo parent $PPID; read line; exit 0"));
    terminal.wait_until("the panel", |shown| shown.contains(MARK) && has_line(shown, "parent "));
    kill(terminal.number_after("parent "), libc::SIGKILL);
    terminal.wait_until("the rows again", |shown| !shown.contains(MARK) && shown.contains("ended with 137"));
    terminal.expect_given_back();
    terminal.say("");
}

#[test]
fn a_run_that_is_ended_by_a_signal_gives_the_rows_back() {
    let mut terminal = Terminal::run(ROWS, &watched("echo ready; read line; kill -TERM $$"));
    terminal.wait_until("the panel", |shown| shown.contains(MARK) && has_line(shown, "ready"));
    terminal.say("");
    terminal.wait_until("the end", |shown| shown.contains("ended with 143"));
    terminal.expect_given_back();
}

#[test]
fn a_run_that_is_stopped_gives_the_rows_back_until_it_goes_on() {
    let script = "echo parent $PPID; kill -STOP $$; echo going on; read line";
    let mut terminal = Terminal::run(ROWS, &watched(script));
    terminal.wait_until("its parent", |shown| has_line(shown, "parent "));
    let parent = terminal.number_after("parent ");
    let is_stopped = || {
        let stat = std::fs::read_to_string(format!("/proc/{parent}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    while !is_stopped() {
        std::thread::yield_now();
    }
    terminal.wait_until("the rows again", |shown| !shown.contains(MARK) && has_line(shown, "parent "));
    kill(parent, libc::SIGCONT);
    terminal.wait_until("the panel again", |shown| shown.contains(MARK) && has_line(shown, "going on"));
    terminal.say("");
    terminal.wait_until("the end", |shown| shown.contains("ended with 0"));
    terminal.expect_given_back();
}

#[test]
fn a_program_that_cannot_be_started_leaves_its_message_and_no_panel() {
    let arguments = ["--live", "--memory=16M", "--report=none", "--", "no-such-program-anywhere"];
    let mut terminal = Terminal::run(ROWS, &arguments);
    terminal.wait_until("the end", |shown| shown.contains("ended with 127"));
    assert!(terminal.shown().contains("cannot start `no-such-program-anywhere`"), "{}", terminal.shown());
    terminal.expect_given_back();
}

#[test]
fn a_terminal_without_room_shows_the_program_alone() {
    let mut terminal = Terminal::run(8, &watched("echo one; echo two"));
    terminal.wait_until("the end", |shown| shown.contains("ended with 0"));
    assert_eq!(terminal.written(), "one\r\ntwo\r\nended with 0\r\n");
}

#[test]
fn live_output_into_a_pipe_is_quiet() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
    let output = command.arg("run").args(watched("echo one; echo two >&2")).output().unwrap();
    assert_eq!((&*output.stdout, &*output.stderr), (&b"one\n"[..], &b"two\n"[..]));
}

/// Answers each monitor with these metrics, until the test ends; the address.
fn monitored(metrics: &'static str) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // All of it: what is left unread when the connection is closed would reset it.
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                asked.extend(byte);
            }
            assert!(asked.starts_with(b"GET /metrics HTTP/1.0\r\n"));
            write!(stream, "HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n{metrics}").unwrap();
        }
    });
    address
}

const METRICS: &str = "\
quinion_service_socket{socket=\"/run/q.sock\"} 1
quinion_service_clients 3
quinion_service_reads_total 1000
quinion_service_asked_reads_total 100
quinion_service_read_bytes_total 3221225472
quinion_cache_memory_bytes 8388608
quinion_cache_grown_bytes 2097152
quinion_saved_gets 900
quinion_saved_bytes 1073741824
quinion_saved_price 0.25
quinion_spent_price 0.125
quinion_disk_pages 256
quinion_store_gets_total{store=\"s3://bucket\"} 100
quinion_store_first_byte_seconds{store=\"s3://bucket\",quantile=\"0.5\"} 0.02
# EOF
";

#[test]
fn top_draws_a_servers_numbers_until_it_is_interrupted() {
    let address = monitored(METRICS);
    let mut terminal = Terminal::command_in(&std::env::temp_dir(), ROWS, &["top", &address]);
    terminal.wait_until("a panel with the store", |shown| {
        shown.contains(MARK) && has_line(shown, "s3://bucket ")
    });
    let shown = terminal.shown();
    for line in [
        "hits      ##################--  90.0 % of 1000 reads, 3 clients",
        "saved     900 GETs, 1.0 GiB, for 0.2500; spent 0.1250",
        "memory    #####---------------  2.0 MiB of 8.0 MiB",
        "disk      1.0 MiB held",
    ] {
        assert!(has_line(&shown, line), "{line} is not in\n{shown}");
    }
    assert!(shown.contains("p50 20.0 p95 - p99 -"), "{shown}");
    // The repairer gives the rows back. The shell would end of Control-C as well, and the terminal with it.
    let shell = terminal.child.id();
    let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).unwrap();
    kill(children.trim().parse().unwrap(), libc::SIGINT);
    terminal.wait_until("the end", |shown| shown.contains("ended with 130") && !shown.contains(MARK));
    terminal.expect_given_back();
}

/// 1. A shell whose children ignore that the terminal is hung up, as `nohup` has them do.
/// 2. The terminal goes.
#[test]
fn top_ends_with_its_terminal() {
    let address = monitored(METRICS);
    let script = ("trap '' HUP; exec \"$@\"", &["top", &address][..]);
    let mut terminal = Terminal::script_in(&std::env::temp_dir(), ROWS, script);
    terminal.wait_until("a panel", |shown| shown.contains(MARK));
    terminal.master = File::open("/dev/null").unwrap();
    let begun = Instant::now();
    while terminal.child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < WAIT_MAX, "it draws on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn top_prints_once_where_there_is_no_terminal() {
    let address = monitored(METRICS);
    let top = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_quinion")).arg("top").args(words).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, out, err) = top(&[&address]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("90.0 %") && out.contains("s3://bucket") && !out.contains('\x1b'), "{out}");
    let whose = format!("/run/q.sock at {address}");
    assert!(out.lines().next().is_some_and(|line| line.contains(&whose)), "{out}");
    let (code, out, err) = top(&["--json", &format!("http://{address}/metrics")]);
    assert_eq!((code, err.as_str(), out.lines().count()), (Some(0), "", 1));
    assert!(
        out.contains("\"reads\":1000,\"hits\":900,") && out.contains("\"store\":\"s3://bucket\""),
        "{out}"
    );
    // What is no server of Quinion's.
    let (code, out, err) = top(&[&monitored("up 1\n# EOF\n")]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("--metrics"), "{err}");
}
