//! The promise about memory: while a file four times the memory goes through the cache, the owner's
//! proportional memory never exceeds what it was allowed by more than [`MARGIN_BYTES`].
//!
//! Proportional memory divides shared pages equally among the processes that map them, so a viewer's mappings of the
//! arena count in part for the viewer. Both are checked: the owner alone, and, while viewers run, the owner and its
//! program together.
//!
//! The kernel's account is read every few milliseconds. A peak between two readings could be missed, but a cache's
//! memory only grows, so the last readings show it.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

mod disk;
use disk::{Ended, noise, quinion, scratch};

/// Code, stacks, and the library's own data.
const MARGIN_BYTES: u64 = 48 << 20;
const LOOKS_EVERY: Duration = Duration::from_millis(10);

/// Proportional memory of a process, in bytes; `None` if it has ended, or may not be inspected.
fn proportional(process: u32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn children(process: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

#[derive(Default)]
struct Peaks {
    owner: u64,
    together: u64,
    looks: u64,
}

/// Runs the command to its end and samples its memory meanwhile.
fn watch(words: &[&str], file: &Path) -> Peaks {
    let mut command = quinion();
    command.args(words).arg(file).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = Ended(command.spawn().expect("our own command starts"));
    let process = child.0.id();
    let mut peaks = Peaks::default();
    loop {
        if let Some(status) = child.0.try_wait().expect("it is our child") {
            assert!(status.success(), "{words:?}: {status}");
            return peaks;
        }
        if let Some(owner) = proportional(process) {
            let viewers: u64 = children(process).into_iter().filter_map(proportional).sum();
            peaks.owner = peaks.owner.max(owner);
            peaks.together = peaks.together.max(owner + viewers);
            peaks.looks += 1;
        }
        std::thread::sleep(LOOKS_EVERY);
    }
}

fn make(path: &Path, bytes: u64) {
    let mut piece = noise(1 << 20, 7);
    let mut file = File::create(path).expect("the disk can be written");
    for number in 0..bytes >> 20 {
        piece[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all(&piece).expect("the disk has room");
    }
}

fn stays_within(memory: u64) {
    let scratch = scratch();
    let path = scratch.path().join("large");
    make(&path, 4 * memory);
    let size = format!("{}M", memory >> 20);
    for words in
        [&["cat", "--memory", &size][..], &["run", "--attach", "at-once", "--memory", &size, "--", "cat"]]
    {
        let peaks = watch(words, &path);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "quinion {}: at most {:.1} MiB, with its program {:.1} MiB; {} looks",
            words.join(" "),
            mib(peaks.owner),
            mib(peaks.together),
            peaks.looks
        );
        assert!(peaks.looks > 0, "it could not be looked at");
        assert!(peaks.owner <= memory + MARGIN_BYTES, "{words:?}: {} bytes", peaks.owner);
        assert!(peaks.together <= memory + MARGIN_BYTES, "{words:?}: {} bytes together", peaks.together);
    }
}

#[test]
fn an_owner_of_64_mib_stays_within_its_memory() {
    stays_within(64 << 20);
}

#[test]
fn an_owner_of_256_mib_stays_within_its_memory() {
    stays_within(256 << 20);
}
