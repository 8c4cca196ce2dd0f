//! Caches: what the kernel keeps of files, looked at and let go.
//!
//! A cold run begins with nothing of its files in the kernel's memory, a warm
//! one with all of it. Neither is assumed: the kernel is asked before each run.
//!
//! ```text
//!   Machine     root, in a full run: everything that the kernel caches is dropped, so that what
//!               describes the files (where their blocks are) has to be read again too
//!   OurFiles    else: the kernel is told that the pages of these files are not needed
//! ```
//!
//! What is not needed is let go of unless somebody has it just now: pages that are read ahead for somebody who has
//! ended are locked until the device has delivered them. So it is tried for a second before it is said to stay.
//!
//! A quick run leaves the caches of the machine alone also where it is root's.

use std::fs::{self, File};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use super::harness::{Extent, Settings, Unmeasured};
use crate::sys;

/// What is dropped before a cold run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drops {
    /// All that the kernel caches.
    Machine,
    /// What it keeps of the files that are read.
    OurFiles,
}

const PAGE_BYTES: u64 = 4096;
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// How long the kernel is asked again and again to let go of files, and the pauses between.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);
/// Drop pages, and not what is known of names and files.
const PAGES: &str = "1\n";

impl Drops {
    /// What a run of `settings` may drop and wants to.
    pub fn of(settings: &Settings) -> Self {
        let is_root = rustix::process::geteuid().is_root();
        if is_root && settings.extent == Extent::Full { Self::Machine } else { Self::OurFiles }
    }

    /// What a reader of the results has to know of it.
    pub fn note(self, settings: &Settings) -> Option<&'static str> {
        (self == Self::OurFiles && settings.extent == Extent::Full).then_some(
            "the machine's caches cannot be dropped, only root may: before cold runs the kernel is told to \
             drop its pages of the files that are read, and keeps what it knows of their blocks",
        )
    }

    /// Nothing of `files`, which have been written to the device, stays in the kernel's memory.
    pub fn make_cold(self, files: &[File]) -> Result<(), Unmeasured> {
        let (start, bytes) = (Instant::now(), bytes(files)?);
        let kept = loop {
            self.drop_once(files)?;
            let kept = kept_bytes(files)?;
            // A thread that keeps all of it probably has nowhere to put it: a file system in memory.
            let wait_policy = if kept < bytes { PATIENCE } else { PATIENCE / 10 };
            if kept <= bytes / 1000 || start.elapsed() >= wait_policy {
                break kept;
            }
            sleep(PAUSE);
        };
        if kept > bytes / 1000 {
            return Err(Unmeasured::Missing(format!(
                "the kernel keeps {} of {} MiB in memory and does not let go of them; choose a folder on a disk \
                 by --scratch",
                kept >> 20,
                bytes >> 20
            )));
        }
        Ok(())
    }

    fn drop_once(self, files: &[File]) -> Result<(), Unmeasured> {
        for file in files {
            fadvise(file, 0, None, Advice::DontNeed).map_err(std::io::Error::from)?;
        }
        if self == Self::Machine {
            fs::write(DROP_CACHES, PAGES).map_err(|error| {
                Unmeasured::Missing(format!("{DROP_CACHES} cannot be written, though we are root: {error}"))
            })?;
        }
        Ok(())
    }
}

/// All of `files` is in the kernel's memory.
pub fn check_warm(files: &[File]) -> Result<(), Unmeasured> {
    let (kept, bytes) = (kept_bytes(files)?, bytes(files)?);
    if kept >= bytes - bytes / 1000 {
        return Ok(());
    }
    Err(Unmeasured::Missing(format!(
        "the kernel keeps only {} of {} MiB in memory; it takes a machine with more, or a smaller experiment",
        kept >> 20,
        bytes >> 20
    )))
}

/// Bytes of `files` that the kernel keeps.
pub fn kept_bytes(files: &[File]) -> Result<u64, Unmeasured> {
    let kept = |file: &File| -> Result<u64, Unmeasured> {
        Ok(sys::residency(file, file.metadata()?.len())?.pages * PAGE_BYTES)
    };
    files.iter().map(kept).sum()
}

/// How long they are together.
pub fn bytes(files: &[File]) -> Result<u64, Unmeasured> {
    files.iter().map(|file| -> Result<u64, Unmeasured> { Ok(file.metadata()?.len()) }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_is_warm_when_it_was_written_and_cold_when_it_was_dropped() {
        let mut file = tempfile::tempfile_in(".").expect("a temporary file");
        file.write_all(&vec![7; 4 << 20]).expect("room for it");
        file.sync_all().expect("it is written");
        let files = [file];
        check_warm(&files).expect("it was just written");
        // A file system in memory does not let go of it, and says so.
        match Drops::OurFiles.make_cold(&files) {
            Ok(()) => assert!(check_warm(&files).is_err()),
            Err(why) => assert!(why.to_string().contains("--scratch"), "{why}"),
        }
    }

    /// 1. Somebody has a part of a file in use, and lets go of it a little later.
    /// 2. The kernel keeps that part when it is told that nobody needs it.
    /// 3. What would have been measured is given up, though it could be a moment later.
    #[test]
    fn what_is_in_use_for_a_moment_is_waited_for() {
        let mut file = tempfile::tempfile_in(".").expect("a temporary file");
        file.write_all(&vec![7; 4 << 20]).expect("room for it");
        file.sync_all().expect("it is written");
        let mapped = sys::Mapped::new(&file, 1 << 20).expect("it can be mapped");
        assert!((0..1 << 20).step_by(4096).all(|at| mapped[at] == 7));
        let user = std::thread::spawn(move || {
            sleep(Duration::from_millis(100));
            drop(mapped);
        });
        let files = [file];
        let ended = Drops::OurFiles.make_cold(&files);
        user.join().expect("it does not panic");
        // A file system in memory keeps all of it.
        assert!(ended.is_ok() || kept_bytes(&files) == bytes(&files), "{ended:?}");
    }
}
