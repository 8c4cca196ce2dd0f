//! Disk: files on a disk in memory, for workers.
//!
//! ```text
//!   memory file <- loop device <- ext4       written once by a worker, then read by others
//! ```
//!
//! The kernel caches them as it caches files of any disk, reads them by the same
//! code, and evicts them; only that no disk hides what that costs. The files of `tmpfs`
//! would not do: they *are* the cache.
//!
//! What a loop device computes (it copies, in threads of the kernel) is the same
//! for a caller that has the same bytes read, and is told with what threads of the kernel compute.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::harness::{Settings, Unmeasured};
use super::scratch::write_content;
use super::worker::{Answer, WorkerTask};
use crate::sys::RamDisk;

/// The job of writing the files.
pub const MAKE: &str = "make-files";

/// Some files on a disk in memory.
pub struct Disk {
    ram: RamDisk,
    /// A folder that workers see the disk at, instead of what is there.
    at: PathBuf,
    files: u64,
    bytes: u64,
}

impl Disk {
    /// One with `files` files of `bytes` each, a multiple of 1 MiB.
    pub fn new(settings: &Settings, files: u64, bytes: u64) -> Result<Self, Unmeasured> {
        let whole = files * bytes + files * bytes / 16 + (32 << 20);
        if quinion::process_limit() < 2 * whole {
            return Err(Unmeasured::Missing(format!(
                "a disk in memory of {} MiB and a cache beside it are more than we may use; with --quick it takes less",
                whole >> 20
            )));
        }
        let at = settings.folder.canonicalize()?;
        let ram = RamDisk::new(whole).map_err(|error| {
            Unmeasured::Missing(format!(
                "there is no disk in memory: {error}; it takes root and loop devices"
            ))
        })?;
        let disk = Self { ram, at, files, bytes };
        disk.make_file_system()?;
        let task =
            disk.task(MAKE).with("files", files).with("bytes", bytes).with("folder", disk.at.display());
        task.writing().run(None)?;
        Ok(disk)
    }

    fn make_file_system(&self) -> Result<(), Unmeasured> {
        let mut command = Command::new("mkfs.ext4");
        command.args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal"]);
        command.args(["-E", "nodiscard,lazy_itable_init=0"]).arg(self.ram.path());
        let output = command.stdin(Stdio::null()).output().map_err(|error| {
            Unmeasured::Missing(format!("mkfs.ext4 cannot be run: {error}; install e2fsprogs"))
        })?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(Unmeasured::Failed(format!("mkfs.ext4 ended with {}: {}", output.status, said.trim_end())))
    }

    /// To do `job` where the files are seen.
    pub fn task(&self, job: &str) -> WorkerTask {
        WorkerTask::new(job).on(self.ram.path(), &self.at)
    }

    /// What the files are called, for a caller that sees them.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        (0..self.files).map(|file| path(&self.at, file))
    }

    /// How long each of them is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn path(folder: &Path, file: u64) -> PathBuf {
    folder.join(format!("quinion-bench-{file}"))
}

/// Writes the files.
pub fn make(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let folder = Path::new(task.text("folder")?);
    for file in 0..task.number("files")? {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path(folder, file))?;
        write_content(&mut file, task.number("bytes")?)?;
    }
    Ok(Answer::default())
}
