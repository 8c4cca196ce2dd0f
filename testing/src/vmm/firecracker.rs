//! Firecracker: a real machine monitor, by its API, with a guest that verifies its own memory.
//!
//! ```text
//!   boot      the guest fills its memory, says READY, and waits for an order
//!   snapshot  state, and memory: a file whose offsets are the guest's addresses   <- the order is written into it
//!   restore   by the kernel (`Backend::File`), or by a page-fault server (`Backend::Uffd`)
//!   report    "R mode=A pages=32256 bad=0 ..": each page was what it had to be
//! ```
//!
//! Neither is part of this repository: `$FIRECRACKER_BIN` names the monitor, `$FIRECRACKER_GUEST` the guest, an ELF
//! file that Firecracker boots. The guest's contract:
//!
//! | where | what |
//! |---|---|
//! | from 2 MiB to its end | a pattern that follows from the page's number; no page is zeros |
//! | [`ORDER`] | a magic number when it is ready, then [`Order`]'s words, all zeros until the test writes them |
//! | serial port | lines: `READY`; `G` when it begins; `P` after each `chunk` pages; `R` when it is through |
//! | and then | `W` if it wrote and looked again; `S` if it looked at all pages; a reset, unless it is to stay |
//!
//! A monitor is killed when it goes out of scope.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Where the guest looks for its order, in its memory and in the file of it.
pub const ORDER: u64 = 0x18_0000;
/// The word that the guest has written there when it is ready.
const MAGIC: u64 = 0x3164_6c75_6763_6674;
/// Where the pages begin that the guest verifies.
const PATTERN: u64 = 2 << 20;
const WATCHDOG: Duration = Duration::from_secs(300);

/// A monitor and a guest.
#[derive(Clone, Debug)]
pub struct Kit {
    pub binary: PathBuf,
    pub guest: PathBuf,
}

impl Kit {
    /// The kit that the environment names.
    ///
    /// # Errors
    /// A variable is not set, or names no file.
    pub fn find() -> Result<Self, String> {
        Ok(Self { binary: binary()?, guest: named("FIRECRACKER_GUEST")? })
    }

    /// Boots the guest and takes a snapshot of it when it is ready.
    pub fn snapshot(&self, folder: &Path, config: Config) -> Snapshot {
        let mut monitor = self.boot(folder, config);
        monitor.line("READY");
        monitor.snapshot(folder, config.mib)
    }

    /// Boots the guest.
    pub fn boot(&self, folder: &Path, config: Config) -> Firecracker {
        let monitor = self.monitor(folder, "boot");
        let guest = self.guest.to_str().expect("a path that is text");
        monitor.must(
            "PUT",
            "/boot-source",
            &format!(r#"{{"kernel_image_path":"{guest}","boot_args":"none"}}"#),
        );
        let pages = if config.has_huge_pages { r#","huge_pages":"2M""# } else { "" };
        let machine = format!(r#"{{"vcpu_count":1,"mem_size_mib":{}{pages}}}"#, config.mib);
        monitor.must("PUT", "/machine-config", &machine);
        if config.has_balloon {
            monitor.must("PUT", "/balloon", r#"{"amount_mib":0,"deflate_on_oom":false}"#);
        }
        monitor.must("PUT", "/actions", r#"{"action_type":"InstanceStart"}"#);
        monitor
    }

    /// A monitor that has nothing yet, with its API in `folder`.
    pub fn monitor(&self, folder: &Path, name: &str) -> Firecracker {
        Firecracker::start(Command::new(&self.binary), &folder.join(name))
    }
}

/// The monitor alone.
///
/// # Errors
/// The variable is not set, or names no file.
pub fn binary() -> Result<PathBuf, String> {
    named("FIRECRACKER_BIN")
}

fn named(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os(name).ok_or_else(|| {
        format!(
            "${name} is not set; to run this, set $FIRECRACKER_BIN to a Firecracker, and \
             $FIRECRACKER_GUEST to its guest (see testing/src/vmm/firecracker.rs)"
        )
    })?;
    let path = PathBuf::from(path);
    if path.is_file() { Ok(path) } else { Err(format!("${name}: there is no {}", path.display())) }
}

/// The configuration of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub mib: u64,
    pub has_balloon: bool,
    pub has_huge_pages: bool,
}

impl Config {
    pub fn new(mib: u64) -> Self {
        Self { mib, has_balloon: false, has_huge_pages: false }
    }
}

/// A snapshot's two files.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub state: PathBuf,
    pub memory: PathBuf,
    mib: u64,
}

impl Snapshot {
    /// The pages that the guest verifies.
    pub fn pages(&self) -> u64 {
        ((self.mib << 20) - PATTERN) / super::PAGE as u64
    }

    /// A copy of the memory in `folder`, with an order for the guest that is restored from it.
    pub fn ordered(&self, folder: &Path, name: &str, order: Order) -> Self {
        let memory = folder.join(name);
        fs::copy(&self.memory, &memory).expect("room for a copy");
        let copy = Self { state: self.state.clone(), memory, mib: self.mib };
        copy.order(order);
        copy
    }

    /// Writes an order into the memory.
    pub fn order(&self, order: Order) {
        let file = OpenOptions::new().read(true).write(true).open(&self.memory).expect("it is ours");
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, ORDER).expect("it is longer");
        assert_eq!(u64::from_le_bytes(magic), MAGIC, "this is no memory of a guest that is ready");
        let mode = u64::from(order.mode as u8);
        let words = [mode, order.thousandths, order.op as u64, order.again.into(), order.hold.into(), 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.write_all_at(&bytes, ORDER + 8).expect("room for it");
        file.write_all_at(&order.chunk.to_le_bytes(), ORDER + 64).expect("room for it");
        file.sync_all().expect("on its disk");
    }
}

/// Which pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// All pages, in turn.
    All = b'A' as isize,
    /// Scattered pages, so many thousandths of all, in an order that is always the same.
    Scattered = b'B' as isize,
    /// Gives pages back by the balloon, in many ways, and then looks at all.
    Balloon = b'L' as isize,
}

/// A guest's operation on a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Verifies each word.
    Verify = 0,
    /// Verifies the first word.
    Touch = 1,
    /// Verifies the first and writes the second; verifies all of that in the end.
    Write = 2,
}

/// The guest's work after its restore.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub mode: Mode,
    pub thousandths: u64,
    pub op: Op,
    /// The guest verifies all pages when it is through.
    pub again: bool,
    /// The guest stays when it is through, and spins.
    pub hold: bool,
    /// After so many pages the guest says how many; 0 for never.
    pub chunk: u64,
}

impl Order {
    pub fn new(mode: Mode) -> Self {
        Self { mode, thousandths: 1000, op: Op::Verify, again: false, hold: false, chunk: 0 }
    }

    /// An order for so many thousandths of the pages, scattered.
    pub fn scattered(thousandths: u64) -> Self {
        Self { thousandths, ..Self::new(Mode::Scattered) }
    }
}

/// The source of a restored machine's memory.
#[derive(Clone, Copy, Debug)]
pub enum Backend<'a> {
    /// The kernel: the file is mapped.
    File,
    /// The server at this socket.
    Uffd(&'a Path),
}

/// A monitor's process.
#[derive(Debug)]
pub struct Firecracker {
    api: PathBuf,
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Firecracker {
    /// `command` is one that runs Firecracker; its API is at `api`.
    pub fn start(mut command: Command, api: &Path) -> Self {
        command.arg("--api-sock").arg(api).args(["--level", "Warn"]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("$FIRECRACKER_BIN can be started");
        let serial = BufReader::new(child.stdout.take().expect("it was asked for"));
        let (teller, lines) = channel();
        std::thread::spawn(move || {
            let mut said = serial.lines().map_while(Result::ok);
            said.try_for_each(|line| teller.send(line.trim().to_owned())).ok();
        });
        let mut monitor = Self { api: api.to_owned(), child, lines, said: Vec::new() };
        let began = Instant::now();
        while UnixStream::connect(api).is_err() {
            let has_ended = monitor.child.try_wait().expect("it is ours").is_some();
            assert!(!has_ended && began.elapsed() < WATCHDOG, "it opens no API socket");
            std::thread::sleep(Duration::from_millis(1));
        }
        monitor
    }

    /// Has the monitor restore and resume `snapshot`.
    ///
    /// # Errors
    /// The monitor's answer, if it refuses.
    pub fn load(&self, snapshot: &Snapshot, backend: Backend<'_>) -> Result<(), String> {
        let text = |path: &Path| path.to_str().expect("a path that is text").to_owned();
        let (kind, path) = match backend {
            Backend::File => ("File", text(&snapshot.memory)),
            Backend::Uffd(socket) => ("Uffd", text(socket)),
        };
        let backend = format!(r#"{{"backend_type":"{kind}","backend_path":"{path}"}}"#);
        let state = text(&snapshot.state);
        let body = format!(r#"{{"snapshot_path":"{state}","mem_backend":{backend},"resume_vm":true}}"#);
        self.ask("PUT", "/snapshot/load", &body)
    }

    /// Sends a request to its API.
    ///
    /// # Errors
    /// The answer, if that is no success, or that there is none.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> Result<(), String> {
        let answer = self.answer(method, path, body).map_err(|error| error.to_string())?;
        if answer.starts_with("HTTP/1.1 20") { Ok(()) } else { Err(answer) }
    }

    fn answer(&self, method: &str, path: &str, body: &str) -> io::Result<String> {
        let mut stream = UnixStream::connect(&self.api)?;
        stream.set_read_timeout(Some(WATCHDOG))?;
        let bytes = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n");
        stream.write_all(format!("{head}Content-Length: {bytes}\r\n\r\n{body}").as_bytes())?;
        // An answer to a request is one write, and short.
        let mut answer = [0; 4096];
        let read = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..read]).into_owned())
    }

    #[track_caller]
    pub fn must(&self, method: &str, path: &str, body: &str) {
        let asked = self.ask(method, path, body);
        assert_eq!(asked, Ok(()), "{method} {path}; it said {:#?}", self.said);
    }

    /// Pauses it and writes its memory and state to `folder`. It does not go on.
    pub fn snapshot(&self, folder: &Path, mib: u64) -> Snapshot {
        let snapshot = Snapshot { state: folder.join("state"), memory: folder.join("memory"), mib };
        let (state, memory) = (snapshot.state.display(), snapshot.memory.display());
        self.must("PATCH", "/vm", r#"{"state":"Paused"}"#);
        let body = format!(r#""snapshot_path":"{state}","mem_file_path":"{memory}""#);
        self.must("PUT", "/snapshot/create", &format!(r#"{{"snapshot_type":"Full",{body}}}"#));
        snapshot
    }

    /// Waits for the next line with this prefix.
    #[track_caller]
    pub fn line(&mut self, prefix: &str) -> String {
        self.line_in(prefix, WATCHDOG)
            .unwrap_or_else(|why| panic!("no {prefix}: {why}; it said {:#?}", self.said))
    }

    /// The next line with this prefix, if it comes before the guest is silent for so long.
    ///
    /// # Errors
    /// It is silent, or has ended.
    pub fn line_in(&mut self, prefix: &str, silence: Duration) -> Result<String, RecvTimeoutError> {
        loop {
            let line = self.lines.recv_timeout(silence)?;
            self.said.push(line.clone());
            if line.starts_with(prefix) {
                return Ok(line);
            }
        }
    }

    /// Waits for the guest's report, which must say that `pages` pages are right.
    #[track_caller]
    pub fn right(&mut self, prefix: &str, pages: u64) {
        let line = self.line(prefix);
        assert_eq!((field(&line, "pages"), field(&line, "bad")), (pages, 0), "{line}");
    }

    /// The lines so far, up to the last that was waited for.
    pub fn said(&self) -> &[String] {
        &self.said
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the process to end.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is ours") {
                return status;
            }
            assert!(began.elapsed() < WATCHDOG, "it does not end; it said {:#?}", self.said);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Firecracker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The number behind `name=` in a line.
#[track_caller]
pub fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("no {name} in: {line}"))
}

/// Free large pages of the system, in MiB.
pub fn huge_mib() -> u64 {
    let folder = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = fs::read_to_string(folder).unwrap_or_default();
    2 * free.trim().parse::<u64>().unwrap_or(0)
}
