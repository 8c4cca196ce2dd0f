//! Killed writer: a process that ends in the middle of writing back leaves what it was told is synced, and nothing that
//! it did not write.
//!
//! ```text
//!   this test                        itself again, as a writer
//!     |<-- "begun 4" --------------- writes the pages of round 4, here and there, begins to write back
//!     |<-- "synced 4" -------------- sync_data said Ok
//!     |--- kill -9 ----------------> wherever it is
//!     '--- reads the file by the kernel
//! ```
//!
//! The machine goes on, so the kernel writes what it was handed, and no sector is lost on the way; what a cache holds
//! in its own memory is gone. The pages and bytes of a round follow from its number: so a reader of the file knows what
//! each page was after each round. Each 8 bytes hold their round and their place. The bytes of a page that was being
//! changed while it was being written may be of two rounds, both begun.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use quinion::{Cache, Mechanism, OpenOptions, WriteOptions};
use tempfile::TempDir;

use quinion_testing::content::Dice;

const PAGE: u64 = 4096;
/// Somewhat more than the memory, so that changed pages have to leave between two syncs.
const PAGES: u64 = 5000;
const WRITES: u64 = 40;
const FILE_VARIABLE: &str = "QUINION_KILLED_FILE";
const RING_VARIABLE: &str = "QUINION_KILLED_RING";

/// The writes of a round: pages and how many; and at its end one page more than the file had.
fn writes_of(round: u32) -> Vec<(u64, u64)> {
    let mut dice = Dice::new(u64::from(round));
    let mut writes = Vec::new();
    for _ in 0..WRITES {
        let pages = if dice.below(8) == 0 { 1 + dice.below(200) } else { 1 + dice.below(4) };
        writes.push((dice.below(PAGES - pages), pages));
    }
    writes.push((PAGES + u64::from(round), 1));
    writes
}

fn content(round: u32, page: u64, pages: u64) -> Vec<u8> {
    let words = page * PAGE / 8..(page + pages) * PAGE / 8;
    words.flat_map(|place| (u64::from(round) << 32 | place).to_le_bytes()).collect()
}

/// The writer: it ends only by a kill.
#[test]
fn be_the_writer() {
    let Some(path) = std::env::var_os(FILE_VARIABLE) else { return };
    let mechanism =
        if std::env::var_os(RING_VARIABLE).is_some() { Mechanism::Ring } else { Mechanism::Threads };
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).mechanism(mechanism).build().unwrap();
    let file = cache.open_with(PathBuf::from(path), OpenOptions::new().write(true)).unwrap();
    let mut out = std::io::stdout();
    let mut say = |words: String| {
        // A pipe: what was written to it is there, however this process ends.
        out.write_all(words.as_bytes()).and_then(|()| out.flush()).expect("the test listens");
    };
    for round in 1.. {
        say(format!("\nbegun {round}\n"));
        for (nth, (page, pages)) in writes_of(round).into_iter().enumerate() {
            let bytes = content(round, page, pages);
            if nth % 7 == 3 {
                let uncached = WriteOptions::new().uncached(true);
                assert_eq!(file.write_at_with(&bytes, page * PAGE, uncached).unwrap(), bytes.len());
            } else {
                file.write_all_at(&bytes, page * PAGE).unwrap();
            }
            if nth as u64 == WRITES / 2 {
                file.write_back().unwrap();
                say(format!("half of {round}\n"));
            }
        }
        file.sync_data().unwrap();
        say(format!("synced {round}\n"));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct WriterReport {
    begun: u32,
    synced: u32,
}

fn kill_after(lines: u64, path: &Path, is_ring: bool) -> WriterReport {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "be_the_writer", "--nocapture", "--test-threads=1"]).env(FILE_VARIABLE, path);
    if is_ring {
        command.env(RING_VARIABLE, "1");
    }
    let mut writer = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut report = WriterReport::default();
    let mut said = 0;
    for line in BufReader::new(writer.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let number = |word: &str| line.strip_prefix(word).and_then(|number| number.parse().ok());
        if let Some(round) = number("begun ") {
            report.begun = round;
        }
        if let Some(round) = number("synced ") {
            report.synced = round;
        }
        said +=
            u64::from(line.starts_with("begun") || line.starts_with("half") || line.starts_with("synced"));
        if said == lines {
            writer.kill().unwrap();
        }
    }
    let status = writer.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "it was to be killed, and {status}");
    report
}

/// Checks that the file holds what was synced, or what was begun later, and nothing else.
fn check_file(path: &Path, report: WriterReport) {
    let found = fs::read(path).unwrap();
    let WriterReport { begun, synced } = report;
    let least = if synced == 0 { PAGES } else { PAGES + u64::from(synced) + 1 };
    assert!(found.len() as u64 >= least * PAGE, "{} bytes after {report:?}", found.len());
    let mut rounds: Vec<Vec<u32>> = vec![vec![0]; found.len().div_ceil(PAGE as usize)];
    for round in 1..=begun {
        for (page, pages) in writes_of(round) {
            for page in page..page + pages {
                let Some(rounds) = rounds.get_mut(page as usize) else { continue };
                // What was synced and then overwritten by a later sync is not there any more.
                if round <= synced {
                    rounds.clear();
                }
                rounds.push(round);
            }
        }
    }
    for (page, (bytes, rounds)) in found.chunks(PAGE as usize).zip(&rounds).enumerate() {
        for (nth, word) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            let place = page as u64 * PAGE / 8 + nth as u64;
            let round = (word >> 32) as u32;
            let is_hole = word == 0
                && page as u64 >= PAGES
                && !rounds.iter().any(|&round| (1..=synced).contains(&round));
            let is_of = word & 0xffff_ffff == place && rounds.contains(&round);
            assert!(is_of || is_hole, "page {page} of {report:?}: {word:x} is not of rounds {rounds:?}");
        }
        assert_eq!(bytes.len() % 8, 0, "the file ends where a write did");
    }
}

#[test]
fn synced_bytes_and_nothing_foreign_are_there_after_kill_9() {
    let kills = if std::env::var_os("QUINION_SOAK").is_some() { 300 } else { 8 };
    let mut dice = Dice::new(9);
    let mut synced = 0;
    for kill in 0..kills {
        let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("file");
        fs::write(&path, content(0, 0, PAGES)).unwrap();
        let report = kill_after(1 + dice.below(20), &path, kill % 2 == 0);
        check_file(&path, report);
        synced += report.synced;
    }
    assert!(synced > 0, "no writer came to a sync");
}
