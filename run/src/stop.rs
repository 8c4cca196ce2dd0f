//! Stop: this process stops when its program does, and goes on when the program does.
//!
//! ```text
//!   the program                this process                        the watcher: this command again
//!     stops           ---->      starts the watcher, and stops       looks at the program, many times a second
//!                                  (a shell sees its job stop)
//!     goes on, or ends  ----------------------------------------->   continues this process
//!     goes on         <----      is continued by a shell             is ended by this process
//! ```
//!
//! A shell continues the whole job. But a process that knows the program's number alone continues the program, or ends
//! it, and this process would stay stopped for ever; so would whatever waits for it. No thread of a stopped process
//! runs, so another process has to look. It has a process group of its own, which no stop of the job reaches.
//!
//! Invariant: the watcher ends before this process asks for the program's status. So the number that the watcher looks
//! at is the program's.

use std::io;
use std::os::unix::process::{CommandExt as _, parent_id};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::signals;

/// The hidden verb of the command that continues a stopped `quinion run`.
pub const WATCH_STOP_VERB: &str = "watch-stop";

/// The time from one look of the watcher's to the next.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Stops this process with its program, which has stopped by the signal `by`, until one of both goes on. Returns the
/// watcher's number, by which its signal is told from others'. Where no watcher can be started, this process stops only
/// for signals by which terminals and shells stop jobs: they continue the job. Nor is there one for a program that is
/// not seen to be stopped: its first thread has ended, or it is another user's on a `/proc` that hides those. A watcher
/// would continue this process at once.
pub fn stop_with(program: u32, by: i32) -> Option<u32> {
    if signals::is_continued(program) {
        return None;
    }
    let watcher = is_stopped(program).then(|| StopWatcher::start(program).ok()).flatten();
    if watcher.is_none() && by == libc::SIGSTOP {
        return None;
    }
    signals::stop_here();
    let number = watcher.as_ref().map(|StopWatcher(child)| child.id());
    drop(watcher);
    if is_stopped(program) && !signals::has_stopped(program) {
        signals::send(program, signals::CONTINUE); // this process alone was continued
    }
    number
}

struct StopWatcher(Child);

impl StopWatcher {
    fn start(program: u32) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(WATCH_STOP_VERB).args([std::process::id(), program].map(|number| number.to_string()));
        command.process_group(0).current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn()?))
    }
}

impl Drop for StopWatcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Continues `run`, the process that started this one, once `program` is not stopped any more; again and again, since
/// that process may be about to stop. It ends this one; if it is gone, this returns.
pub fn watch_stop([run, program]: [u32; 2]) {
    while parent_id() == run {
        if !is_stopped(program) && is_stopped(run) {
            signals::send(run, signals::CONTINUE);
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

/// Whether a process is stopped, by a signal or by a debugger.
fn is_stopped(process: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else { return false };
    // The name before it may hold any letter.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs() {
        let mut child = Command::new("sleep").arg("100").spawn().expect("it is on each machine");
        let becomes = |wanted: bool| {
            let checks = (0..1000).map(|_| std::thread::sleep(Duration::from_millis(5)));
            checks.map(|()| is_stopped(child.id())).any(|stopped| stopped == wanted)
        };
        assert!(!is_stopped(child.id()));
        signals::send(child.id(), libc::SIGSTOP);
        assert!(becomes(true));
        signals::send(child.id(), signals::CONTINUE);
        assert!(becomes(false));
        child.kill().expect("it runs");
        child.wait().expect("it is a child");
        assert!(!is_stopped(child.id()));
    }
}
