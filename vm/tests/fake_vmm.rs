//! Fake VMM: the harness of the page-fault server's tests is itself tested, against servers whose faults are known.
//!
//! ```text
//!   the monitor  <--- faults --->  a naive server, right: everything goes well
//!                                  the same, wrong in one way: the monitor says so
//! ```

use quinion_testing::vmm;
use std::os::unix::process::ExitStatusExt;

use quinion_testing::vmm::naive::{Naive, Wrong};
use quinion_testing::vmm::{Backing, Image, Monitor, Need, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

struct Fixture {
    folder: tempfile::TempDir,
    image: Image,
}

impl Fixture {
    fn new(pages: u64) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), image: Image::new(7, pages) }
    }
    fn serve(&self, wrong: Wrong) -> Naive {
        let socket = self.plan().socket;
        let _ = std::fs::remove_file(&socket);
        Naive::start(&socket, self.image, wrong)
    }
    fn plan(&self) -> Plan {
        Plan::new(self.folder.path().join("socket"), self.image)
    }
}

const ALL_EVENTS: u64 = kernel::EVENT_REMOVE | kernel::EVENT_FORK | kernel::EVENT_REMAP | kernel::EVENT_UNMAP;

#[test]
fn a_right_server_is_found_right() {
    if !vmm::has("a_right_server_is_found_right", &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(600);
    for backing in [Backing::Anonymous, Backing::Shared] {
        let server = fixture.serve(Wrong::Nothing);
        let plan = fixture.plan().backing(backing.clone()).features(ALL_EVENTS).in_regions(3);
        let mut monitor = Monitor::start(&plan);
        monitor.does("touch 0 300 4");
        monitor.does("write 10 20 77");
        monitor.does("balloon 20 30 dontneed");
        if backing == Backing::Shared {
            // The file still has the pages: the call only removed them from the mapping, and they are not missing.
            monitor.does("balloon 20 30 remove");
        }
        monitor.does("touch 0 600 2");
        monitor.does("unmap 580 20");
        monitor.does("remap 0");
        monitor.does("touch 0 600 2");
        let faults = server.stop();
        assert!(faults >= 600, "{faults} faults");
    }
}

#[test]
fn a_balloon_may_be_at_it_while_threads_read() {
    if !vmm::has("a_balloon_may_be_at_it_while_threads_read", &[Need::Userfault(kernel::EVENT_REMOVE)]) {
        return;
    }
    let fixture = Fixture::new(200);
    let _server = fixture.serve(Wrong::Nothing);
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("race 200 3");
    monitor.does("touch 0 200 3");
}

#[test]
fn a_child_is_served_with_its_parents_image() {
    if !vmm::has("a_child_is_served_with_its_parents_image", &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(200);
    let _server = fixture.serve(Wrong::Nothing);
    let mut monitor = Monitor::start(&fixture.plan().features(ALL_EVENTS));
    monitor.does("touch 0 50 1");
    monitor.does("balloon 10 10 dontneed");
    monitor.does("fork touch 0 100 1; balloon 60 20 dontneed; touch 0 200 1");
    monitor.does("touch 0 200 2");
    assert!(monitor.ask("fork write 0 1 5; nonsense").unwrap().contains("ended by"));
}

#[test]
fn every_mistake_of_a_server_is_noticed() {
    if !vmm::has("every_mistake_of_a_server_is_noticed", &[Need::Userfault(kernel::EVENT_REMOVE)]) {
        return;
    }
    let fixture = Fixture::new(64);
    for wrong in [Wrong::Byte(10), Wrong::Neighbour, Wrong::Removed, Wrong::RemovedBeside] {
        let _server = fixture.serve(wrong);
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("write 5 1 77");
        // Neither the page before the range nor the first page of it is zeros in the image.
        monitor.does("balloon 22 38 dontneed");
        let is_wrong = |answer: &String| answer.starts_with("page ");
        let answers = ["touch 21 1 1", "touch 0 64 2"].map(|command| monitor.ask(command).unwrap());
        assert!(answers.iter().any(is_wrong), "{wrong:?} has to be noticed: {answers:?}");
    }
}

#[test]
fn clones_of_an_image_in_memory_get_minor_faults() {
    let test = "clones_of_an_image_in_memory_get_minor_faults";
    if !vmm::has(test, &[Need::Userfault(kernel::MINOR_SHMEM)]) {
        return;
    }
    let fixture = Fixture::new(128);
    // The server answers with CONTINUE; the file has the bytes.
    let file = kernel::memfd(fixture.image.bytes());
    let path = vmm::naive::path_of(&file);
    fixture.image.write(&path);
    let _server = fixture.serve(Wrong::Nothing);
    let plan = fixture.plan().features(kernel::MINOR_SHMEM).backing(Backing::Clone(path.clone()));
    let mut clones = [Monitor::start(&plan), Monitor::start(&plan)];
    for clone in &mut clones {
        clone.does("touch 0 128 3");
        clone.does("write 3 4 99");
        clone.does("touch 0 128 3");
    }
    let bytes = std::fs::read(&path).unwrap();
    assert!((0..128).all(|page| bytes[page * 4096..][..4096] == fixture.image.page(page as u64)));
}

#[test]
fn a_monitor_may_be_killed_in_a_fault() {
    if !vmm::has("a_monitor_may_be_killed_in_a_fault", &[Need::Userfault(kernel::EVENT_REMOVE)]) {
        return;
    }
    let fixture = Fixture::new(64);
    // The listener accepts no connection and answers no fault.
    let _listener = std::os::unix::net::UnixListener::bind(fixture.plan().socket).unwrap();
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.tell("touch 0 64 2");
    monitor.kill();
    assert_eq!(monitor.ended().signal(), Some(libc::SIGKILL));
}

#[test]
fn a_guest_sums_and_writes_the_servers_pages() {
    let needs = [Need::Userfault(kernel::EVENT_REMOVE), Need::Kvm];
    if !vmm::has("a_guest_sums_and_writes_the_servers_pages", &needs) {
        return;
    }
    let fixture = Fixture::new(256);
    let server = fixture.serve(Wrong::Nothing);
    let mut monitor = Monitor::start(&fixture.plan().in_regions(2));
    monitor.does("sum 0 100");
    monitor.does("set 50 100 123456789012345");
    monitor.does("sum 0 256");
    monitor.does("balloon 140 20 dontneed");
    monitor.does("sum 0 256");
    monitor.does("touch 0 256 2");
    assert!(server.stop() >= 256);
    let _wrong = fixture.serve(Wrong::Byte(33));
    let answer = Monitor::start(&fixture.plan()).ask("sum 2 40").unwrap();
    assert!(answer.starts_with("the guest's sum"), "{answer}");
}

/// A process that may not receive faults, or has no KVM, gets an error that gives the reason.
#[test]
fn an_unprivileged_process_is_told_why_it_is_skipped() {
    #[allow(unsafe_code, reason = "a plain call")]
    let asked = std::thread::spawn(|| {
        // SAFETY: the call changes the ids of this thread alone, which does nothing else. It fails in an unprivileged
        // process, which changes nothing.
        let _ = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        [Need::Userfault(0), Need::Kvm].map(Need::check)
    });
    for why in asked.join().unwrap().into_iter().filter_map(Result::err) {
        assert!(why.contains("is not to be had here: ") || why.contains("switched off"), "{why}");
    }
}
