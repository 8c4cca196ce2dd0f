//! Killed owner: an owner is killed, and its viewers do not use what it left.
//!
//! ```text
//!   this test, a viewer                     itself again, as an owner
//!     |<-- "arena control token" ------------ serves
//!     |--- attach, read ------------------->
//!     |--- kill -9 ------------------------> its leases are gone, and its records say what they said
//!     '--- trust: the kernel's
//! ```
//!
//! A stopped owner is not relied upon for long either.
#![cfg(not(quinion_model))]
#![allow(unsafe_code, reason = "a viewer maps files")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use quinion::Cache;
use quinion::internals::arena::control::Operation;
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION, Validation};
use quinion::internals::units::MappingId;
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{Owner, Service, ServiceOptions, listen};
use quinion_owner::internals::viewer::handshake::{JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::{self, ReadEnd, ViewedFile, WantedBytes};

const OWNER_VARIABLE: &str = "QUINION_OUTLIVED_OWNER";
type Lines = std::io::Lines<BufReader<ChildStdout>>;
const BYTES: usize = 50_000;

/// The owner: it ends by a kill, or when asked to.
#[test]
fn be_the_owner() {
    if std::env::var_os(OWNER_VARIABLE).is_none() {
        return;
    }
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let owner = Arc::new(CacheOwner::new(cache));
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let options =
        ServiceOptions { workers: 2, listener: Some(listen(&socket).unwrap()), ..Default::default() };
    let service = Service::start_with(owner.clone(), options).unwrap();
    println!("\nowner {} {}", owner.arena().token(), socket.display());
    std::io::stdin().read_line(&mut String::new()).unwrap();
    service.stop();
    println!("\nstopped");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Reads a file by an owner of its own, and calls `end`, which ends or stops that owner and may ask for the viewer's
/// validation. Returns the validation before and after.
fn validation_after(
    end: impl FnOnce(&mut Child, &mut Lines, &dyn Fn() -> Validation),
) -> (Validation, Validation) {
    // 1 an owner
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "be_the_owner", "--nocapture", "--test-threads=1"]).env(OWNER_VARIABLE, "1");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = lines.find_map(|line| line.unwrap().strip_prefix("owner ").map(str::to_owned)).unwrap();
    let (token, socket) = said.split_once(' ').unwrap();
    // 2 a viewer of it
    let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: token.parse().unwrap(), run: 0 };
    let viewer = viewer::connect(socket.as_ref(), &hello).unwrap().waiting_at_most(60_000);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), [7; BYTES]).unwrap();
    let opened = File::open(folder.path().join("file")).unwrap();
    let data = opened.metadata().unwrap();
    let question = [opened.as_raw_fd() as u64, data.dev(), data.ino()];
    // A process that another test starts has this test's writing descriptor until it executes its program.
    std::thread::sleep(Duration::from_millis(300));
    let attached = || viewer.request(Operation::Attach, question).ok();
    let [handle, place] = std::iter::repeat_with(attached).take(100_000).flatten().next().unwrap();
    let (marker_reported, touched) = (AtomicU64::new(0), AtomicU64::new(0));
    let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
    let file = ViewedFile { handle, cell, id, marker_reported: &marker_reported, touched: &touched };
    // On a busy machine the owner may be silent for a moment.
    let told = || viewer.validation(&file);
    let heard = std::iter::repeat_with(|| {
        let told = told();
        if told == Validation::OwnerLate {
            std::thread::sleep(Duration::from_millis(10));
        }
        told
    });
    let mut heard = heard.filter(|&told| told != Validation::OwnerLate);
    let read = || {
        let mut to = vec![0; BYTES];
        // SAFETY: the buffer is a vector's.
        let outcome = unsafe { viewer.read(&file, WantedBytes::of_slice(0, &mut to)) };
        (outcome.bytes, outcome.end)
    };
    assert!(heard.by_ref().take(100).any(|_| read() == (BYTES, ReadEnd::Full)), "{:?}", read());
    let before = heard.next().expect("it goes on without end");
    end(&mut child, &mut lines, &|| viewer.validation(&file));
    let after = viewer.validation(&file);
    let _ = child.kill();
    child.wait().unwrap();
    (before, after)
}

#[test]
fn state_left_by_a_killed_owner_is_not_believed() {
    let (before, after) = validation_after(|owner, _, _| {
        owner.kill().unwrap();
        owner.wait().unwrap();
    });
    assert_ne!(before, Validation::Kernel);
    assert_eq!(after, Validation::Kernel);
}

#[test]
fn state_left_by_an_owner_that_ends_is_not_believed() {
    let (before, after) = validation_after(|owner, lines, _| {
        use std::io::Write;
        writeln!(owner.stdin.as_mut().unwrap()).unwrap();
        assert!(lines.any(|line| line.unwrap() == "stopped"));
    });
    assert_ne!(before, Validation::Kernel);
    assert_eq!(after, Validation::Kernel);
}

/// 1. The viewer is sure: the owner has a lease.
/// 2. The owner is stopped, and cannot react to opens for writing.
/// 3. Long before the kernel lets such a one go on, the viewer believes nothing.
/// 4. The owner goes on, and the viewer is sure again.
#[test]
fn a_stopped_owner_is_not_believed_for_long() {
    let break_time = std::fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap();
    let break_time = Duration::from_secs(break_time.trim().parse().unwrap());
    let until = |is_so: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < break_time, "not within {break_time:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let (before, _) = validation_after(|owner, _, validation| {
        until(&|| validation() == Validation::Leased); // there is a lease
        let process = Pid::from_raw(owner.id() as i32).unwrap();
        kill_process(process, Signal::STOP).unwrap();
        until(&|| validation() == Validation::OwnerLate);
        kill_process(process, Signal::CONT).unwrap();
        until(&|| validation() == Validation::Leased);
    });
    assert_eq!(before, Validation::Leased);
}
