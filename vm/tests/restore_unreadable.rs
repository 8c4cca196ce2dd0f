//! Unreadable: an unreadable sector of a snapshot is an error in the machine that touches it, and nowhere else.
//!
//! ```text
//!   simulated device, some bytes fail --fill--> EIO, nothing cached --poison--> SIGBUS in that machine, at that page
//! ```

use quinion_testing::vmm;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinion::{Cache, File};
use quinion_testing::doubles::{FailureCount, Faults, SimulatedBackend};
use quinion_vm::{RestoreOptions, Server};

use quinion_testing::vmm::{Image, Monitor, Need, PAGE, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);

/// A file of a cache, on a device of which some bytes cannot be read.
fn simulated(image: Image, bad: Range<u64>, times: FailureCount) -> (Cache, File, Arc<SimulatedBackend>) {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let page = move |_, page, bytes: &mut [u8]| bytes.copy_from_slice(&image.page(page));
    let device = SimulatedBackend::generated(u64::from(image.number), image.bytes(), page, Faults::default());
    device.fail_at(bad.start * PAGE as u64..bad.end * PAGE as u64, times);
    let device = Arc::new(device);
    let file = cache.open_backend(device.clone()).unwrap();
    (cache, file, device)
}

#[test]
fn an_unreadable_sector_is_a_bus_error_in_the_machine_that_touches_it() {
    let test = "an_unreadable_sector_is_a_bus_error_in_the_machine_that_touches_it";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let can_poison = Need::Userfault(kernel::POISON).check().is_ok();
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("socket");
    let image = Image::new(13, 600);
    let (cache, file, device) = simulated(image, 100..102, FailureCount::Always);
    let server = Server::start_file(&cache, &file, &socket, RestoreOptions::default()).unwrap();
    let plan = Plan::new(&socket, image);
    let mut other = Monitor::start(&plan);
    let mut unlucky = Monitor::start(&plan);
    unlucky.does("touch 0 100 2");
    unlucky.does("touch 102 498 2");
    if can_poison {
        let fault = format!("errno {}", libc::EFAULT);
        for page in [100, 101] {
            assert_eq!(unlucky.ask(&format!("probe {page}")), Some(fault.clone()), "page {page}");
        }
        unlucky.does("touch 0 100 2");
        // The machine continues as soon as its page is poisoned; the server counts the page afterwards.
        let poisoned = || server.stats().counters.poisoned_bytes;
        let since = Instant::now();
        while poisoned() < 2 * PAGE as u64 && since.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        assert_eq!(poisoned(), 2 * PAGE as u64);
        unlucky.tell("touch 100 1 2");
        assert_eq!(unlucky.ended().signal(), Some(libc::SIGBUS));
    } else {
        unlucky.tell("touch 100 1 2");
        assert_eq!(unlucky.ended().signal(), Some(libc::SIGKILL));
    }
    other.does("touch 0 100 2");
    other.does("touch 102 498 2");
    // A sector that has become readable is read again, for machines that have not been given the error yet.
    device.mend();
    other.does("touch 0 600 2");
    Monitor::start(&plan).does("touch 0 600 2");
    server.stop();
}

#[test]
fn a_sector_that_fails_once_fails_no_machine() {
    if !vmm::has("a_sector_that_fails_once_fails_no_machine", &[REMOVALS]) {
        return;
    }
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("socket");
    let image = Image::new(14, 300);
    let (cache, file, _device) = simulated(image, 50..54, FailureCount::First(1));
    let server = Server::start_file(&cache, &file, &socket, RestoreOptions::default()).unwrap();
    Monitor::start(&Plan::new(&socket, image)).does("touch 0 300 1");
    assert_eq!(server.stop().counters.poisoned_bytes, 0);
    assert!(cache.stats().device_errors > 0, "it did fail");
}

#[test]
fn a_guest_that_touches_an_unreadable_sector_stops_and_no_other() {
    let needs = [Need::Userfault(kernel::EVENT_REMOVE | kernel::POISON), Need::Kvm];
    if !vmm::has("a_guest_that_touches_an_unreadable_sector_stops_and_no_other", &needs) {
        return;
    }
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("socket");
    let image = Image::new(15, 300);
    let (cache, file, _device) = simulated(image, 200..201, FailureCount::Always);
    let _server = Server::start_file(&cache, &file, &socket, RestoreOptions::default()).unwrap();
    let plan = Plan::new(&socket, image);
    let mut guest = Monitor::start(&plan);
    guest.does("sum 0 200");
    match guest.ask("sum 150 100") {
        // Some KVMs treat a page that cannot be supplied as device memory, and hand the access to the monitor.
        Some(answer) => {
            assert!(answer.starts_with("the guest stopped") || answer.starts_with("the guest left"))
        }
        None => assert_eq!(guest.ended().signal(), Some(libc::SIGBUS)),
    }
    Monitor::start(&plan).does("sum 201 99");
}
