//! Servers: versitygw with its objects, and two endpoints before it, as processes that end with this value.
//!
//! All have the same pair of keys, so that one client signs for each of them.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::fixtures::command;
use crate::harness::folder::ScratchFolder;
use crate::harness::machine::{check_memory, process_seconds};
use crate::harness::{Settings, Unmeasured};

pub const KEY: &str = "bench-key";
pub const SECRET: &str = "bench-secret";
pub const BUCKET: &str = "bucket";
pub const OBJECTS: usize = 64;
pub const OBJECT_BYTES: u64 = 1 << 20;
/// The folders in which `scripts/setup` installs programs, in the target folder.
const VERSITYGW: &str = "versitygw-1.8.0/versitygw";
const PYTHON: &str = "moto-5.2.5/bin/python";
const START_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    Asking,
    Immutable,
    Store,
}

/// A process that is killed when this is dropped.
struct Process {
    child: Child,
    address: SocketAddr,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

pub type Write = fn(&Path, SocketAddr) -> Result<(), Unmeasured>;

pub struct Servers {
    asking: Process,
    immutable: Process,
    store: Process,
    /// A Python with boto3.
    pub python: PathBuf,
    _folder: ScratchFolder,
}

impl Servers {
    pub fn new(settings: &Settings, write: Write) -> Result<Self, Unmeasured> {
        let endpoint = command::beside("quinion-s3")?;
        let (versitygw, python) = (installed(VERSITYGW)?, installed(PYTHON)?);
        check_memory(16 * OBJECTS as u64 * OBJECT_BYTES)?;
        let folder = ScratchFolder::new(&settings.folder)?;
        let data = folder.path().join("data");
        fs::create_dir_all(data.join(BUCKET))?;
        let keys = folder.path().join("keys");
        fs::write(&keys, format!("{KEY} {SECRET}\n"))?;
        fs::set_permissions(&keys, Permissions::from_mode(0o600))?;
        let store = start_store(&versitygw, &data, &folder.path().join("log"))?;
        write(&python, store.address)?;
        let start = |freshness| start_endpoint(&endpoint, store.address, &keys, freshness);
        let (asking, immutable) = (start("always")?, start("immutable")?);
        Ok(Self { asking, immutable, store, python, _folder: folder })
    }

    pub fn address(&self, at: At) -> SocketAddr {
        match at {
            At::Asking => self.asking.address,
            At::Immutable => self.immutable.address,
            At::Store => self.store.address,
        }
    }

    /// CPU seconds of all of them since their start: only one is asked at a time, and those behind it.
    pub fn cpu_seconds(&self) -> f64 {
        [&self.asking, &self.immutable, &self.store]
            .map(|process| process_seconds(process.child.id()))
            .iter()
            .sum()
    }
}

fn installed(program: &str) -> Result<PathBuf, Unmeasured> {
    let own = std::env::current_exe()?;
    let tools = own.ancestors().nth(2).map(|target| target.join("tools"));
    let path = tools.map(|tools| tools.join(program)).filter(|path| path.exists());
    path.ok_or_else(|| Unmeasured::Missing(format!("{program} is not installed; call scripts/setup")))
}

fn free_address() -> std::io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

fn start_store(program: &Path, data: &Path, log: &Path) -> Result<Process, Unmeasured> {
    let (address, log) = (free_address()?, File::create(log)?);
    let mut command = Command::new(program);
    command.args([
        "--quiet",
        "--keep-alive",
        "--access",
        KEY,
        "--secret",
        SECRET,
        "--port",
        &address.to_string(),
        "posix",
    ]);
    command.arg(data).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let store = Process { child: command.spawn()?, address };
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        if begun.elapsed() > START_MAX {
            return Err(Unmeasured::Failed("versitygw does not answer".into()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(store)
}

fn start_endpoint(
    program: &Path,
    store: SocketAddr,
    keys: &Path,
    freshness: &str,
) -> Result<Process, Unmeasured> {
    let mut command = Command::new(program);
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--store", &format!("s3://{BUCKET}"), "--key-file"])
        .arg(keys);
    command.args(["--memory", "256M", "--freshness", freshness]);
    command.env("AWS_ACCESS_KEY_ID", KEY).env("AWS_SECRET_ACCESS_KEY", SECRET).env("AWS_REGION", "us-east-1");
    command.env("AWS_ENDPOINT_URL_S3", format!("http://{store}")).env_remove("NOTIFY_SOCKET");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let events = child.stderr.take().expect("it is a pipe");
    let mut process = Process { child, address: store };
    let mut events = BufReader::new(events);
    let mut line = String::new();
    events.read_line(&mut line)?;
    let address =
        line.split("http://").nth(1).and_then(|rest| rest.trim_end_matches(['"', '\n']).parse().ok());
    process.address =
        address.ok_or_else(|| Unmeasured::Failed(format!("quinion-s3 does not listen: {line}")))?;
    std::thread::spawn(move || std::io::copy(&mut events, &mut std::io::sink()));
    Ok(process)
}
