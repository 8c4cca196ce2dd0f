//! Start: making the process that stays.
//!
//! ```text
//!   the runner                               the owner: this very command, by way of /proc/self/exe
//!     0  the lock, as descriptor 0   ------>   keeps it for life
//!     1  a pipe, as 1 and 2          ------>   "ready", or in words what is wrong
//!     waits for a line, or the end   <------
//! ```
//!
//! The runner has closed its copy of the lock by then. If it is killed before, the owner finds the pipe closed when it
//! reports "ready", and stays for the next run. If the owner is killed, the pipe ends, and the lock is free: another is
//! started, a few times, because a program must not be refused its start if another run's owner was killed in these
//! milliseconds.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use super::CacheRequest;
use super::locks::Lock;
use crate::user_folder::Folder;

/// The owner's message when it listens.
pub const READY: &str = "ready";
/// The variables that an owner inherits: how to read, and where a panic happened.
const PASSED_ON: [&str; 2] = ["QUINION_IO", "RUST_BACKTRACE"];
/// Bytes of an owner's error that are passed on.
const WRONG_MAX: u64 = 4096;

pub enum StartOutcome {
    Listens,
    /// A signal ended it before it said anything; in words, which.
    Killed(io::Error),
}

/// Starts an owner and waits until it listens.
///
/// # Errors
/// It cannot be started, or reports an error.
pub fn start(folder: &Folder, lock: Lock, wanted: &CacheRequest) -> io::Result<StartOutcome> {
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("quinion").arg("keep-owner").arg("--folder").arg(folder.path());
    command.args(["--name", &wanted.name.to_string()]);
    if let Some(attach) = &wanted.attach {
        command.args(["--attach", attach]);
    }
    command.args(&wanted.rules);
    if let Some(memory) = wanted.memory {
        command.args(["--memory", &memory.to_string()]);
    }
    if let Some(idle) = wanted.idle {
        command.args(["--idle", &idle.to_string()]);
    }
    command.env_clear().envs(std::env::vars_os().filter(|(name, _)| is_passed_on(name)));
    command.current_dir("/");
    command.stdin(Stdio::from(lock.into_descriptor())).stderr(writer.try_clone()?).stdout(writer);
    let child = command.spawn()?;
    drop(command); // and with it this process's copies of the lock and of the pipe
    let mut said = BufReader::new(reader.take(WRONG_MAX));
    let mut line = String::new();
    said.read_line(&mut line)?;
    if line.trim_end() == READY {
        return Ok(StartOutcome::Listens); // init's child when this process has ended
    }
    said.read_to_string(&mut line)?;
    let mut child = child;
    let status = child.wait()?;
    let why = if line.is_empty() { status.to_string() } else { line.trim_end().replace('\n', "; ") };
    let error = io::Error::other(format!("cannot start the cache `{}`: {why}", wanted.name));
    if line.is_empty() && status.signal().is_some() { Ok(StartOutcome::Killed(error)) } else { Err(error) }
}

fn is_passed_on(name: &OsStr) -> bool {
    PASSED_ON.iter().any(|passed| name == *passed)
}
