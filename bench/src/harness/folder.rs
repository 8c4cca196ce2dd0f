//! Folder: a scratch folder with a name, which is removed when this process ends.
//!
//! The measured programs need folders with names. A name outlives a benchmark that is killed, so another process has to
//! clean up:
//!
//! ```text
//!   this process                       the sweeper: this command again, in a process group of its own
//!     |-- holds a pipe ---------------->  reads it, and gets nothing
//!     X   ends, however it ends           the pipe ends: the folder is removed
//! ```
//!
//! Ctrl-C signals the benchmark's process group and not the sweeper's; and no signal has to be caught, so SIGKILL is no
//! exception. The folder is removed in one way only, which each run takes. A benchmark that is killed may leave behind
//! a program that is just starting, and that makes the folder again. So after such an end the sweeper stays until the
//! folder has been absent for a second.
//!
//! A control group is such a folder, too. The kernel owns the files in it, which are removed with it; and it can be
//! removed once it has no process any more. Remaining processes are the benchmark's workers, and are killed.
//!
//! Folders for the results of a run may hold other files: [`EmptyFolders`] are removed only if they are empty.
//!
//! Invariant: the sweeper removes only a folder with the prefix of these names, or an empty one.

use std::fs::{create_dir, create_dir_all, read_to_string, remove_dir, remove_dir_all};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::Unmeasured;

const PREFIX: &str = "quinion-bench-";
pub const GROUP_FILE: &str = "cgroup.procs";
/// Text that the sweeper reads before the pipe ends, if no measured program runs any more.
const ORDERLY: &[u8] = b"done";
/// Consecutive checks that have to find the folder absent, after a disorderly end.
const ABSENT_CHECKS: u32 = 10;
/// How often the sweeper tries, while programs that are still ending may write; and its pauses.
const TRIES: u32 = 300;
const PAUSE: Duration = Duration::from_millis(100);

/// A folder for programs to write into.
pub struct ScratchFolder {
    path: PathBuf,
    sweeper: Child,
}

impl ScratchFolder {
    pub fn new(parent: &Path) -> Result<Self, Unmeasured> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let wrong = |error: std::io::Error| {
            Unmeasured::Failed(format!(
                "{}: cannot make a folder there: {error}; choose another one by --scratch",
                parent.display()
            ))
        };
        let parent = parent.canonicalize().map_err(wrong)?;
        let path = parent.join(format!("{PREFIX}{}-{count}", std::process::id()));
        let mut sweeper = Command::new(std::env::current_exe()?);
        sweeper.args(["--sweep"]).arg(&path).process_group(0);
        sweeper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let folder = Self { sweeper: sweeper.spawn()?, path };
        create_dir(&folder.path).map_err(wrong)?;
        Ok(folder)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        if let Some(mut pipe) = self.sweeper.stdin.take() {
            let _ = pipe.write_all(ORDERLY); // it fails only if the sweeper has ended
        }
        // The folder shows whether it was removed; a sweeper that was killed is no reason to panic.
        let _ = self.sweeper.wait();
    }
}

/// Folders that this process has made, which are removed at the end if they are still empty.
#[derive(Debug)]
pub struct EmptyFolders {
    sweeper: Option<Child>,
}

impl EmptyFolders {
    pub fn make(folder: &Path) -> std::io::Result<Self> {
        let folder = std::path::absolute(folder)?;
        let is_missing = |path: &&Path| !path.exists();
        let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
        let mut made = Self { sweeper: None };
        if !missing.is_empty() {
            let mut sweeper = Command::new(std::env::current_exe()?);
            sweeper.args(["--sweep-empty"]).args(&missing).process_group(0);
            sweeper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            made.sweeper = Some(sweeper.spawn()?);
        }
        create_dir_all(&folder)?;
        Ok(made)
    }
}

impl Drop for EmptyFolders {
    fn drop(&mut self) {
        let Some(sweeper) = &mut self.sweeper else { return };
        drop(sweeper.stdin.take());
        // As above: the folders show whether they were removed.
        let _ = sweeper.wait();
    }
}

/// Waits for the end of standard input, and removes those of `folders`, the innermost first, that are empty.
pub fn sweep_empty(folders: &[PathBuf]) -> Result<(), Unmeasured> {
    std::io::stdin().read_to_end(&mut Vec::new())?;
    // The first folder that is not empty keeps its parents, too.
    let _ = folders.iter().try_for_each(remove_dir);
    Ok(())
}

/// The sweeper's work: waits for the end of standard input, and removes `folder` with its contents.
pub fn sweep(folder: &Path) -> Result<(), Unmeasured> {
    let name = folder.file_name().map(|name| name.to_string_lossy());
    if !name.is_some_and(|name| name.starts_with(PREFIX)) {
        return Err(Unmeasured::Failed(format!("{} is no folder of a benchmark", folder.display())));
    }
    let mut said = Vec::new();
    std::io::stdin().read_to_end(&mut said)?;
    let checks = if said == ORDERLY { 1 } else { ABSENT_CHECKS };
    let mut gone = 0;
    for _ in 0..TRIES {
        let _ = remove(folder); // the next check sees whether it was
        gone = if folder.exists() { 0 } else { gone + 1 };
        if gone == checks {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    Err(Unmeasured::Failed(format!("{} cannot be removed", folder.display())))
}

fn remove(folder: &Path) -> std::io::Result<()> {
    let Ok(workers) = read_to_string(folder.join(GROUP_FILE)) else { return remove_dir_all(folder) };
    for worker in workers.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
        // The benchmark of these workers has ended. A worker that ended just now is no error.
        let _ = kill_process(worker, Signal::KILL);
    }
    remove_dir(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_our_own_folders_is_swept() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(sweep(folder.path()).is_err());
        assert!(sweep(Path::new("/")).is_err());
        assert!(folder.path().exists());
    }
}
