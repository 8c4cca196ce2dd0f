//! What does a hit cost in another process?
//!
//! The owner's `File::read_at` and a viewer's `Viewer::read`, over the same
//! cached pages, in turn: the viewer is this program started again, and does a
//! repetition when it is told to. Ratios of medians of CPU time; above 1 the
//! viewer is the faster.
//!
//! Run: `cargo bench --bench viewer [-- MIB]` (the size of the file; 512 if not given).
//! Answers recorded: BENCHMARKS.md.

#![allow(unsafe_code, reason = "a viewer reads to addresses")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use quinion::Cache;
use quinion::internals::arena::control::Operation;
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION};
use quinion::internals::units::MappingId;
use quinion_owner::internals::serve::{Owner, Service, ServiceOptions, listen};
use quinion_owner::internals::viewer::handshake::{JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{self, ReadEnd, ViewedFile, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

const VIEW: &str = "QUINION_BENCH_VIEW";
const REPEATS: u64 = 15;

struct Row {
    name: &'static str,
    bytes: usize,
    step: u64,
    /// Positions lie below this; 0 for the whole file.
    span: u64,
    operations: u64,
}

const ROWS: [Row; 4] = [
    Row { name: "4 KiB random", bytes: 4096, step: 4096, span: 0, operations: 200_000 },
    Row { name: "64 B random", bytes: 64, step: 64, span: 0, operations: 400_000 },
    Row { name: "4 KiB, one page", bytes: 4096, step: 4096, span: 4096, operations: 400_000 },
    Row { name: "64 B, one page", bytes: 64, step: 64, span: 4096, operations: 1_000_000 },
];

fn cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CPU nanoseconds per read of one repetition.
fn run(row: &Row, size: u64, seed: u64, read: impl Fn(&mut [u8], u64) -> usize) -> f64 {
    let places = if row.span == 0 { size } else { row.span } / row.step;
    let mut buffer = vec![0u8; row.bytes + 4096];
    let start = buffer.as_ptr().align_offset(4096).min(4095);
    let buffer = &mut buffer[start..start + row.bytes];
    let mut state = seed;
    let begin = cpu_ns();
    for _ in 0..row.operations {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let place = ((u128::from(state >> 11) * u128::from(places)) >> 53) as u64;
        assert_eq!(read(buffer, place * row.step), row.bytes);
        std::hint::black_box(&buffer);
    }
    (cpu_ns() - begin) as f64 / row.operations as f64
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::var(VIEW) {
        Ok(view) => view_along(&view),
        Err(_) => own(),
    }
}

fn own() -> Result<(), Box<dyn std::error::Error>> {
    let mib: u64 = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(512);
    let mut temp = tempfile::NamedTempFile::new_in(std::env::current_dir()?)?;
    for piece in 0..mib {
        temp.write_all(&vec![piece as u8; 1 << 20])?;
    }
    temp.as_file().sync_all()?;
    let size = mib << 20;
    let cache = Cache::builder().memory(size + size / 16 + (64 << 20)).build()?;
    let file = cache.open(temp.path())?;
    let mut page = [0; 4096];
    (0..size / 4096).try_for_each(|at| file.read_exact_at(&mut page, at * 4096))?;

    let owner: Arc<dyn Owner> = Arc::new(CacheOwner::new(cache.clone()).with_rules(by_times()));
    let arena = owner.arena();
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let view = format!("{}:{}:{}", arena.token(), socket.display(), temp.path().display());
    let options = ServiceOptions { workers: 1, listener: Some(listen(&socket)?), ..Default::default() };
    let service = Service::start_with(Arc::clone(&owner), options)?;
    let mut child = Command::new(std::env::current_exe()?)
        .env(VIEW, view)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (mut tell, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut answers = hear.lines();

    println!("file {mib} MiB; CPU ns per read, medians of {REPEATS}");
    println!("{:<20} {:>9} {:>9}   owner / viewer", "", "owner", "viewer");
    for (number, row) in ROWS.iter().enumerate() {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for repeat in 0..REPEATS {
            ours.push(run(row, size, repeat + 1, |buffer, at| file.read_at(buffer, at).expect("a hit")));
            writeln!(tell, "{number} {repeat}")?;
            theirs.push(answers.next().expect("the viewer answers")?.parse()?);
        }
        let (ours, theirs) = (median(ours), median(theirs));
        println!("{:<20} {ours:>9.1} {theirs:>9.1}   {:>5.2}x", row.name, ours / theirs);
    }
    drop(tell);
    child.wait()?;
    service.stop();
    Ok(())
}

fn view_along(view: &str) -> Result<(), Box<dyn std::error::Error>> {
    let fields: Vec<&str> = view.splitn(3, ':').collect();
    let [token, socket, path] = fields[..] else { return Err("not a view".into()) };
    let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: token.parse()?, run: 0 };
    let viewer = viewer::connect(socket.as_ref(), &hello)?;
    let file = std::fs::File::open(path)?;
    let known = file.metadata()?;
    let question = [file.as_raw_fd() as u64, known.dev(), known.ino()];
    let [handle, place] = viewer.request(Operation::Attach, question).map_err(|e| format!("{e:?}"))?;
    let (marker_reported, touched) = (AtomicU64::new(0), AtomicU64::new(0));
    let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
    let viewed = ViewedFile { handle, cell, id, marker_reported: &marker_reported, touched: &touched };
    for line in std::io::stdin().lines() {
        let line = line?;
        let (number, repeat) = line.split_once(' ').ok_or("not a wish")?;
        let row = &ROWS[number.parse::<usize>()?];
        let ns = run(row, known.len(), repeat.parse::<u64>()? + 1, |buffer, at| {
            // SAFETY: the buffer is a unique slice outside the arena.
            let outcome = unsafe { viewer.read(&viewed, WantedBytes::of_slice(at, buffer)) };
            assert_eq!((outcome.asked, outcome.end), (0, ReadEnd::Full), "only hits are measured");
            outcome.bytes
        });
        println!("{ns}");
    }
    Ok(())
}

/// Rules by which a file is served that this very process has open for writing.
fn by_times() -> ServeRules {
    ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() }
}
