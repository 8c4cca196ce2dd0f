//! Hanging: a snapshot's disk that gives no answer holds up no end of a server, and no late greeting.
//!
//! ```text
//!   snapshot on a file system that hangs --a worker's read, a greeting's look--> no answer
//!                                         '--> the server ends all the same, and the VMs are killed
//! ```
//!
//! This process has the snapshot open. A child of it closes its copies of descriptors before it becomes another
//! program, and no close is answered while the disk hangs. So these tests run one at a time, in a process without
//! others, and start their monitors before.

use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use quinion::Cache;
use quinion_testing::hanging::Hanging;
use quinion_testing::vmm;
use quinion_testing::vmm::{Image, Monitor, Need, Plan, kernel};
use quinion_vm::{Event, RestoreOptions, Server};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 1. The disk of a snapshot stops to answer, while a VM waits for a page of it.
/// 2. The server is told to end. It waits for its worker, which waits for the disk; its VMs are not killed.
#[test]
fn a_disk_that_hangs_holds_up_no_end_and_its_machines_are_killed() {
    if !vmm::has("a_disk_that_hangs_holds_up_no_end_and_its_machines_are_killed", &[REMOVALS]) {
        return;
    }
    let _alone = alone();
    let Some(disk) = Hanging::new() else { return };
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("socket");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let dropped = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&dropped);
    let mut options = RestoreOptions::default();
    (options.workers, options.greeting) = (2, Duration::from_secs(1));
    options.observer = Some(Arc::new(move |event: &Event| {
        if let Event::Dropped { killed, .. } = event {
            events.lock().unwrap().push(*killed);
        }
    }));
    let server = Server::start(&cache, &disk.path(), &socket, options).unwrap();
    let (mut machine, mut late) = (Monitor::idle(), Monitor::idle());
    let plan = Plan::new(&socket, Image::new(16, 256));
    machine.does(&plan.command());
    let since = Instant::now();
    while server.stats().vms_total == 0 && since.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
    disk.hang();
    machine.tell("touch 200 1 1");
    // Its greeting waits for the disk as well. It is late, and a thread that closes its memory would leave it zeros.
    late.does(&plan.command());
    let ended_late = late.ended().signal();
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(Box::new(server.stop())));
    let stats = ended.recv_timeout(Duration::from_secs(60));
    drop(disk); // what hangs goes on, with an error
    stats.expect("the server ends");
    assert_eq!(*dropped.lock().unwrap(), [true], "the other was refused");
    assert_eq!((machine.ended().signal(), ended_late), (Some(libc::SIGKILL), Some(libc::SIGKILL)));
}

/// 1. A server has nothing to do: its workers sleep until something happens.
/// 2. A VM connects, and its greeting waits for the snapshot's disk. Nothing else happens that would wake a worker.
#[test]
fn a_late_greeting_is_ended_by_a_server_that_has_nothing_else_to_do() {
    if !vmm::has("a_late_greeting_is_ended_by_a_server_that_has_nothing_else_to_do", &[REMOVALS]) {
        return;
    }
    let _alone = alone();
    let Some(disk) = Hanging::new() else { return };
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("socket");
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let mut options = RestoreOptions::default();
    (options.workers, options.greeting) = (2, Duration::from_secs(1));
    let server = Server::start(&cache, &disk.path(), &socket, options).unwrap();
    let mut late = Monitor::idle();
    disk.hang();
    late.does(&Plan::new(&socket, Image::new(17, 256)).command());
    let ended = late.ended().signal();
    drop(disk); // what hangs goes on, with an error
    assert_eq!(ended, Some(libc::SIGKILL));
    drop(server);
}
