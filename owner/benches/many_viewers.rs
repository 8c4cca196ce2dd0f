//! What do other viewers cost one that asks, and what does an owner cost that has many idle ones?
//!
//! A viewer asks an owner that has 0, 62 and 1,023 others, which do nothing: how long it waits for a page that is not
//! cached, and for an answer that needs no page; as the first that joined, and as the last. Then the processor time
//! that the owner takes in ten seconds without a request. The others are processes that sleep.
//!
//! Run: `cargo bench -p quinion-owner --bench many_viewers`.
//! Answers recorded: BENCHMARKS.md.

#![allow(unsafe_code, reason = "a viewer reads to addresses")]

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use quinion::Cache;
use quinion::internals::arena::CellNumber;
use quinion::internals::arena::control::Operation;
use quinion::internals::units::MappingId;
use quinion_owner::internals::serve::{Owner, Service};
use quinion_owner::internals::viewer::{ReadEnd, ViewedFile, Viewer, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

const FILE_BYTES: u64 = 256 << 20;
const MEMORY: u64 = 64 << 20;
const ROUNDS: usize = 5000;
const IDLE: Duration = Duration::from_secs(10);

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos() as f64 / 1000.0
}

/// Processor time of this process.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn join(service: &Service, process: u32) -> Viewer {
    service.admit(process).unwrap().view().unwrap().waiting_at_most(60_000)
}

/// Median microseconds until a page that is not cached is read, and until a request is answered.
fn ask(viewer: &Viewer, file: &std::fs::File) -> [f64; 2] {
    let known = file.metadata().unwrap();
    let arguments = [file.as_raw_fd() as u64, known.dev(), known.ino()];
    let [handle, place] = viewer.request(Operation::Attach, arguments).unwrap();
    let (marker_reported, touched) = (AtomicU64::new(0), AtomicU64::new(0));
    let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
    let viewed = ViewedFile { handle, cell, id, marker_reported: &marker_reported, touched: &touched };
    let (mut state, mut page) = (1u64, [0u8; 4096]);
    let (mut misses, mut answers) = (Vec::new(), Vec::new());
    while misses.len() < ROUNDS {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let begun = Instant::now();
        let wanted = WantedBytes::of_slice((state >> 33) % (FILE_BYTES / 4096) * 4096, &mut page);
        // SAFETY: the buffer is a slice outside the arena.
        let read = unsafe { viewer.read(&viewed, wanted) };
        assert_eq!(read.end, ReadEnd::Full);
        if read.asked == 1 {
            misses.push(begun.elapsed());
        }
        let begun = Instant::now();
        viewer.request(Operation::Revalidate, [handle, 0, 0]).unwrap();
        answers.push(begun.elapsed());
    }
    viewer.request(Operation::Detach, [handle, 0, 0]).unwrap();
    [median(misses), median(answers)]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut temp = tempfile::NamedTempFile::new_in(std::env::current_dir()?)?;
    for piece in 0..FILE_BYTES >> 20 {
        temp.write_all(&vec![piece as u8; 1 << 20])?;
    }
    let file = temp.as_file();
    println!(
        "{:>7} {:>5} {:>12} {:>10} {:>10} {:>16}",
        "viewers", "asks", "join us", "miss us", "answer us", "idle CPU ms/s"
    );
    for others in [0, 62, 1023] {
        for is_last in [false, true] {
            if others == 0 && is_last {
                continue;
            }
            let cache = Cache::builder().memory(MEMORY).build()?;
            let rules = ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() };
            let owner: Arc<dyn Owner> = Arc::new(CacheOwner::new(cache).with_rules(rules));
            let service = Service::start(Arc::clone(&owner), 4)?;
            let first = (!is_last).then(|| join(&service, std::process::id()));
            let (mut asleep, mut joins): (Vec<Child>, Vec<Duration>) = Default::default();
            for _ in 0..others {
                let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn()?;
                let begun = Instant::now();
                service.admit(child.id())?;
                joins.push(begun.elapsed());
                asleep.push(child);
            }
            let viewer = first.unwrap_or_else(|| join(&service, std::process::id()));
            let [miss, answer] = ask(&viewer, file);
            std::thread::sleep(Duration::from_secs(1)); // what was asked last is over
            let before = cpu();
            std::thread::sleep(IDLE);
            let idle = (cpu() - before).as_secs_f64() * 1000.0 / IDLE.as_secs_f64();
            let (place, late) =
                (if is_last { "last" } else { "first" }, joins.split_off(joins.len() * 9 / 10));
            let join = if late.is_empty() { 0.0 } else { median(late) };
            println!("{:>7} {place:>5} {join:>12.1} {miss:>10.1} {answer:>10.1} {idle:>16.2}", others + 1);
            for child in &mut asleep {
                child.kill()?;
                child.wait()?;
            }
            service.stop();
        }
    }
    Ok(())
}
