//! Restore: machines receive their snapshot by page faults, whatever they do to their memory meanwhile.
//!
//! ```text
//!   snapshot --device--> one cache --copy--> monitor, monitor, monitor     each checks what it reads (vmm/)
//! ```

use quinion_testing::vmm;
mod fixture;

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixture::{Fixture, options};
use quinion::backend::MemoryFile;
use quinion::{Cache, ErrorKind, Hint, Pinned};
use quinion_vm::{FaultRecord, Fill, OnFailure, RestoreOptions, Server};

use quinion_testing::vmm::{Backing, Image, Monitor, Need, PAGE, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const ALL_EVENTS: u64 = kernel::EVENT_REMOVE | kernel::EVENT_FORK | kernel::EVENT_REMAP | kernel::EVENT_UNMAP;

#[test]
fn machines_read_the_snapshot_and_their_writes_and_zeros_where_the_balloon_was() {
    let test = "machines_read_the_snapshot_and_their_writes_and_zeros_where_the_balloon_was";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(1, 1500));
    for run_bytes in [4 << 10, 64 << 10, 2 << 20] {
        let server = fixture.serve(options(|o| o.run_bytes = run_bytes));
        for regions in [1, 3] {
            let mut monitor = Monitor::start(&fixture.plan().in_regions(regions));
            monitor.does("touch 0 700 4");
            monitor.does("write 650 200 77");
            monitor.does("balloon 600 150 dontneed");
            monitor.does("balloon 1000 1 dontneed");
            monitor.does("balloon 1002 300 dontneed");
            monitor.does("touch 0 1500 4");
            monitor.does("write 700 350 78");
            monitor.does("touch 0 1500 1");
        }
        server.stop();
    }
}

#[test]
fn a_balloon_may_be_at_it_while_threads_read() {
    if !vmm::has("a_balloon_may_be_at_it_while_threads_read", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(2, 400));
    for run_bytes in [4 << 10, 64 << 10, 2 << 20] {
        for workers in [1, 4] {
            let server = fixture.serve(options(|o| {
                o.run_bytes = run_bytes;
                o.workers = workers;
            }));
            let mut monitors = [(); 3].map(|()| Monitor::start(&fixture.plan()));
            monitors.iter_mut().for_each(|monitor| monitor.tell("race 150 3"));
            for monitor in &mut monitors {
                assert_eq!(monitor.answer().as_deref(), Some("done"), "{run_bytes} {workers}");
                monitor.does("touch 0 400 2");
            }
            server.stop();
        }
    }
}

#[test]
fn memory_that_is_unmapped_moved_or_inherited_is_followed() {
    if !vmm::has("memory_that_is_unmapped_moved_or_inherited_is_followed", &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(3, 900));
    let _server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().features(ALL_EVENTS).in_regions(3));
    monitor.does("touch 0 100 2");
    monitor.does("balloon 50 30 dontneed");
    monitor.does("unmap 880 20");
    monitor.does("remap 0");
    monitor.does("touch 20 200 2");
    monitor.does("fork touch 0 400 2; balloon 100 350 dontneed; write 100 3 5; touch 0 880 2");
    monitor.does("remap 1");
    monitor.does("touch 0 880 3");
    // Two children at once, which change their copies in different ways.
    monitor.does("fork balloon 600 100 dontneed; fork touch 0 880 1; touch 0 880 1");
    monitor.does("touch 0 880 1");
}

/// 1. A VM's process forks, and ends before its fork.
/// 2. The server closes what it has of the VM.
/// 3. Pages that the fork has not touched read as zeros.
#[test]
fn a_fork_that_outlives_its_machine_is_served_to_its_end() {
    let test = "a_fork_that_outlives_its_machine_is_served_to_its_end";
    if !vmm::has(test, &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(23, 400));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().features(ALL_EVENTS));
    monitor.does("touch 0 100 2");
    let folder = tempfile::tempdir().unwrap();
    let outcome = folder.path().join("outcome");
    monitor.does(&format!(
        "orphan {} balloon 50 20 dontneed; fork touch 0 300 1; touch 0 400 2",
        outcome.display()
    ));
    monitor.kill();
    let since = Instant::now();
    while !outcome.exists() && since.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(std::fs::read_to_string(&outcome).expect("the fork goes on"), "done");
    while server.stats().vms > 0 && since.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(server.stats().vms, 0, "its end is noticed");
}

/// Pins all that may be pinned of the cache of `fixture`, page by page.
fn pins_of_all(fixture: &Fixture) -> Vec<Pinned> {
    let bytes = 64 << 20;
    let file = fixture.cache.open_backend(Arc::new(MemoryFile::new(vec![1; bytes]))).unwrap();
    file.advise(Hint::Random).unwrap();
    let pins = (0..bytes as u64).step_by(PAGE).filter_map(|at| file.pin(at, PAGE).ok()).collect();
    let refused = fixture.cache.open(fixture.snapshot()).unwrap().pin(0, PAGE).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoMemory, "no page more can be pinned");
    pins
}

/// 1. Another part of the program has pinned all that may be pinned, and keeps it.
/// 2. Machines fault on pages that are in the cache, and on others.
#[test]
fn machines_get_their_pages_while_all_that_may_be_pinned_is_kept_by_others() {
    let test = "machines_get_their_pages_while_all_that_may_be_pinned_is_kept_by_others";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    for is_object in [false, true] {
        let fixture = Fixture::new(Image::new(18, 1000));
        let server = if is_object {
            let bytes: Vec<u8> = (0..1000).flat_map(|page| fixture.image.page(page)).collect();
            let file = fixture.cache.open_backend(Arc::new(MemoryFile::new(bytes))).unwrap();
            Server::start_file(&fixture.cache, &file, &fixture.socket(), RestoreOptions::default()).unwrap()
        } else {
            fixture.serve(RestoreOptions::default())
        };
        let mut first = Monitor::start(&fixture.plan());
        first.does("touch 0 200 2");
        let pins = pins_of_all(&fixture);
        first.does("touch 0 1000 3");
        Monitor::start(&fixture.plan()).does("touch 0 1000 3");
        drop(pins);
        assert_eq!(server.stop().vms_given_up, 0);
    }
}

/// The kernel gives a child's descriptor the flags of the monitor's. If its reads block, a poll reports it ready for
/// ever.
#[test]
fn the_descriptor_of_a_child_is_never_waited_on_nor_inherited() {
    let test = "the_descriptor_of_a_child_is_never_waited_on_nor_inherited";
    if !vmm::has(test, &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(17, 100));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().features(ALL_EVENTS | kernel::WAITING));
    monitor.does("fork touch 0 100 1");
    // The server runs in this process: its descriptors are found here, the child's among them.
    let mut flags = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_one =
            std::fs::read_link(entry.path()).is_ok_and(|link| link.ends_with("anon_inode:[userfaultfd]"));
        let info = std::path::Path::new("/proc/self/fdinfo").join(entry.file_name());
        if let Some(text) = is_one.then(|| std::fs::read_to_string(info).ok()).flatten() {
            let line = text.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            flags.push(i32::from_str_radix(line.trim(), 8).unwrap());
        }
    }
    assert!(flags.len() >= 2, "that of the monitor and that of its child: {flags:?}");
    let both = libc::O_NONBLOCK | libc::O_CLOEXEC;
    assert!(flags.iter().all(|flags| flags & both == both), "{flags:?}");
    monitor.does("touch 0 100 1");
    server.stop();
}

#[test]
fn a_file_in_memory_beside_the_descriptor_is_none_of_our_business() {
    let need = Need::Userfault(kernel::EVENT_REMOVE | kernel::MISSING_SHMEM);
    if !vmm::has("a_file_in_memory_beside_the_descriptor_is_none_of_our_business", &[need]) {
        return;
    }
    let fixture = Fixture::new(Image::new(4, 500));
    let _server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().backing(Backing::Shared).in_regions(2));
    monitor.does("touch 0 300 3");
    monitor.does("write 100 20 7");
    monitor.does("balloon 200 150 remove");
    monitor.does("touch 0 500 3");
}

#[test]
fn machines_of_one_image_read_it_from_the_device_once() {
    if !vmm::has("machines_of_one_image_read_it_from_the_device_once", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(5, 4096));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitors: Vec<Monitor> = (0..6).map(|_| Monitor::start(&fixture.plan())).collect();
    monitors.iter_mut().for_each(|monitor| monitor.tell("touch 0 4096 1"));
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
    }
    let read = fixture.cache.stats().device_bytes;
    assert_eq!(read, fixture.image.bytes(), "each byte of the snapshot is read once for all machines");
    drop(monitors);
    let mut late = Monitor::start(&fixture.plan());
    late.does("touch 0 4096 2");
    assert_eq!(fixture.cache.stats().device_bytes, read, "and never again");
    server.stop();
    fixture.cache.check().unwrap();
}

#[test]
fn a_cache_smaller_than_its_images_serves_them() {
    if !vmm::has("a_cache_smaller_than_its_images_serves_them", &[REMOVALS]) {
        return;
    }
    let mut fixture = Fixture::new(Image::new(6, 6000));
    fixture.cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let server = fixture.serve(options(|o| o.run_bytes = 1 << 20));
    let mut monitors: Vec<Monitor> = (0..3).map(|_| Monitor::start(&fixture.plan())).collect();
    monitors.iter_mut().for_each(|monitor| monitor.tell("touch 0 6000 2"));
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
    }
    server.stop();
    fixture.cache.check().unwrap();
}

#[test]
fn a_machine_is_killed_when_the_server_ends_and_lives_on_if_so_configured() {
    let test = "a_machine_is_killed_when_the_server_ends_and_lives_on_if_so_configured";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(7, 200));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitors = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    monitors.iter_mut().for_each(|monitor| monitor.does("touch 0 100 1"));
    drop(server);
    for monitor in &mut monitors {
        assert_eq!(monitor.ended().signal(), Some(libc::SIGKILL), "fail closed");
    }
    let server = fixture.serve(options(|o| o.on_failure = OnFailure::Leave));
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 100 1");
    server.stop();
    monitor.does("touch 0 100 1");
}

#[test]
fn machines_may_die_at_any_moment() {
    if !vmm::has("machines_may_die_at_any_moment", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(8, 2000));
    let server = fixture.serve(options(|o| o.vms_max = 16));
    let mut witness = Monitor::start(&fixture.plan());
    for round in 0..12 {
        let mut dying = Monitor::idle();
        dying.tell(&fixture.plan().command());
        if round % 2 == 0 {
            assert_eq!(dying.answer().as_deref(), Some("done"));
        }
        match round % 4 {
            0 => dying.tell("touch 0 2000 4"),
            1 => {}
            2 => dying.tell("race 1000 2"),
            _ => dying.tell("hang_up"),
        }
        dying.kill();
        dying.wait();
        witness.does(&format!("touch {} 150 2", round * 160));
    }
    let mut last = Monitor::start(&fixture.plan());
    last.does("touch 0 2000 2");
    server.stop();
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}: it does not happen");
        std::thread::yield_now();
    }
}

#[test]
fn a_snapshot_that_is_cut_or_changed_while_it_is_served_is_given_up() {
    let test = "a_snapshot_that_is_cut_or_changed_while_it_is_served_is_given_up";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    for is_cut in [true, false] {
        let fixture = Fixture::new(Image::new(9, 1000));
        let _server = fixture.serve(RestoreOptions::default());
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("touch 0 100 2");
        if is_cut {
            let file = std::fs::OpenOptions::new().write(true).open(fixture.snapshot()).unwrap();
            file.set_len(500 * PAGE as u64).unwrap();
        } else {
            Image { generation: 2, ..fixture.image }.write(&fixture.snapshot());
        }
        // Until the monitor is killed, it still reads the old bytes of the snapshot.
        assert_eq!(monitor.ask("touch 0 1000 2"), None, "cut: {is_cut}");
        assert_eq!(monitor.ended().signal(), Some(libc::SIGKILL));
        // A machine that connects after the change does not start with half of the snapshot.
        let mut late = Monitor::idle();
        late.tell(&fixture.plan().command());
        late.tell("touch 0 10 1");
        assert_eq!(late.wait().signal(), Some(libc::SIGKILL));
    }
}

fn recorded(fixture: &Fixture, pages: impl IntoIterator<Item = u64>) -> FaultRecord {
    let server = fixture.serve(options(|o| o.record = true));
    let mut monitor = Monitor::start(&fixture.plan());
    for page in pages {
        monitor.does(&format!("touch {page} 1 1"));
    }
    let record = server.record().expect("it was to record");
    server.stop();
    record
}

#[test]
fn exactly_the_pages_that_were_touched_are_recorded_in_their_order() {
    if !vmm::has("exactly_the_pages_that_were_touched_are_recorded_in_their_order", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(10, 3000));
    // Neighbours, pages of zeros, pages twice, and a walk, which is read ahead of otherwise.
    let walk = 1000..1200;
    let order: Vec<u64> = [2900, 6, 100, 99, 2900, 7].into_iter().chain(walk).collect();
    let record = recorded(&fixture, order.iter().copied());
    let mut once: Vec<u64> = Vec::new();
    for &page in &order {
        if !once.contains(&page) {
            once.push(page);
        }
    }
    let found: Vec<u64> = record.entries().iter().map(|entry| u64::from(entry.page)).collect();
    assert_eq!(found, once);
    let is_digest = |entry: &quinion_vm::RecordedPage| {
        entry.digest == quinion_vm::internals::digest(&fixture.image.page(u64::from(entry.page)))
    };
    assert!(record.entries().iter().all(is_digest));
}

#[test]
fn recorded_pages_are_there_before_they_are_asked_for() {
    if !vmm::has("recorded_pages_are_there_before_they_are_asked_for", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(10, 3000));
    let pages: Vec<u64> = [2900, 100, 1500].into_iter().flat_map(|at| at..at + 40).collect();
    let record = recorded(&fixture, pages.iter().copied());
    let path = fixture.disk.path().join("record");
    record.write(&path).unwrap();

    let cold = Cache::builder().memory(64 << 20).build().unwrap();
    assert_eq!(record.pages(), 120);
    let record = FaultRecord::read(&path, record.image()).unwrap();
    let server =
        Server::start(&cold, &fixture.snapshot(), &fixture.socket(), options(|o| o.replay = Some(record)))
            .unwrap();
    let mut monitor = Monitor::start(&fixture.plan());
    until("what was recorded is given ahead", || server.stats().counters.ahead_bytes >= 120 * PAGE as u64);
    let before = server.stats().counters;
    assert_eq!(before.ahead_bytes, 120 * PAGE as u64, "and nothing else");
    for at in [2900, 100, 1500] {
        monitor.does(&format!("touch {at} 40 1"));
    }
    assert_eq!(server.stats().counters.faults, before.faults, "nothing of it is missed");
    monitor.does("touch 0 3000 3");
    server.stop();
}

#[test]
fn pages_of_a_record_that_differ_now_are_left_to_their_faults() {
    if !vmm::has("pages_of_a_record_that_differ_now_are_left_to_their_faults", &[REMOVALS]) {
        return;
    }
    let mut fixture = Fixture::new(Image { zero_every: 0, ..Image::new(18, 2500) });
    let record = recorded(&fixture, (0..2500).step_by(2));
    // Some pages change, and then all.
    let before = std::fs::read(fixture.snapshot()).unwrap();
    let other = Image { generation: 2, ..fixture.image };
    let mut changed = before.clone();
    let pages = [0_u64, 10, 12, 1000, 2498]; // the first makes it a snapshot of its own
    for page in pages {
        changed[page as usize * PAGE..][..PAGE].copy_from_slice(&other.page(page));
    }
    std::fs::write(fixture.snapshot(), &changed).unwrap();
    let server = fixture.serve(options(|o| (o.replay, o.record) = (Some(record.clone()), true)));
    let _monitor = Monitor::start(&fixture.plan());
    until("it is replayed", || {
        let counters = server.stats().counters;
        counters.ahead_bytes + counters.stale_bytes >= 1250 * PAGE as u64
    });
    let again = server.record().expect("it was to record");
    assert_eq!(again.pages(), 1250 - pages.len() as u64, "what holds what it held is recorded anew");
    let counters = server.stop().counters;
    assert_eq!(counters.stale_bytes, pages.len() as u64 * PAGE as u64);
    assert_eq!(counters.ahead_bytes, (1250 - pages.len() as u64) * PAGE as u64);

    fixture.image = other;
    other.write(&fixture.snapshot());
    let (teller, told) = std::sync::mpsc::channel();
    let teller = std::sync::Mutex::new(teller);
    let server = fixture.serve(options(|o| {
        o.replay = Some(record);
        o.observer = Some(std::sync::Arc::new(move |event: &quinion_vm::Event| {
            if let quinion_vm::Event::ReplayStale { differing, compared } = event {
                teller.lock().unwrap().send((*differing, *compared)).unwrap();
            }
        }));
    }));
    let mut monitor = Monitor::start(&fixture.plan());
    let (differing, compared) = told.recv_timeout(std::time::Duration::from_secs(120)).unwrap();
    assert_eq!(differing, compared);
    monitor.does("touch 0 2500 3");
    let counters = server.stop().counters;
    assert_eq!(counters.stale_bytes, differing * PAGE as u64, "no more of it is read");
    assert!(told.try_recv().is_err(), "it is said once");
}

#[test]
fn a_walk_through_memory_is_supplied_ahead_of_its_faults() {
    if !vmm::has("a_walk_through_memory_is_supplied_ahead_of_its_faults", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(19, 8192));
    let server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan());
    let (mut end, mut window, mut faults) = (0, 0, 0);
    while end < 8192 {
        monitor.does(&format!("touch {end} 1 1"));
        faults += 1;
        end = (end + 16 + window).min(8192);
        window = (2 * window).clamp(16, 512);
        until("the window is supplied", || {
            let counters = server.stats().counters;
            counters.demand_bytes + counters.ahead_bytes >= end * PAGE as u64
        });
    }
    assert!(faults < 32, "{faults} faults of 512 runs");
    monitor.does("touch 0 8192 2");
    assert_eq!(server.stop().counters.faults, faults);
}

#[test]
fn reads_run_far_ahead_of_a_long_walk_and_little_ahead_of_a_short_one() {
    if !vmm::has("reads_run_far_ahead_of_a_long_walk_and_little_ahead_of_a_short_one", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(21, 8192));
    // An eighth of the cache is how far reads may run ahead.
    let most_ahead = fixture.cache.stats().memory_bytes / 8 / PAGE as u64;
    assert!((1500..3584).contains(&most_ahead), "{most_ahead} pages are neither the least nor the most");
    let server = fixture.serve(options(|o| o.vms_max = 1));
    let mut monitor = Monitor::start(&fixture.plan());
    let file = fixture.cache.open(fixture.snapshot()).unwrap();
    // Pages that were read, or are on their way.
    let read = || {
        let residency = file.residency(0, file.len()).unwrap();
        residency.cached_pages + residency.filling_pages
    };
    let (mut end, mut window) = (0, 0);
    while window < 512 {
        monitor.does(&format!("touch {end} 1 1"));
        (end, window) = (end + 16 + window, (2 * window).clamp(16, 512));
        until("the window is supplied", || {
            let counters = server.stats().counters;
            counters.demand_bytes + counters.ahead_bytes >= end * PAGE as u64
        });
        // Once as far again, a first page, and whole folios.
        let most = end + window + 512 + 64;
        assert!(read() <= most, "{} read where {end} pages were supplied", read());
    }
    // As far again as it has walked.
    let mut walked = 496;
    for _ in 0..5 {
        monitor.does(&format!("touch {end} 1 1"));
        let ahead = walked.clamp(512, most_ahead);
        until("as much more is read", || read() >= end + 512 + ahead);
        (end, walked) = (end + 16 + 512, walked + 512);
        assert!(read() <= end + most_ahead + 512 + 64, "{} read where {end} pages were supplied", read());
        until("the window is supplied", || {
            let counters = server.stats().counters;
            counters.demand_bytes + counters.ahead_bytes >= end * PAGE as u64
        });
    }
    monitor.does("touch 0 8192 2");
    assert_eq!(server.stats().device_bytes, 8192 * PAGE as u64, "and nothing twice");
    server.stop();
}

/// A machine may have less memory than the snapshot that it is given.
#[test]
fn nothing_is_read_behind_the_memory_of_a_machine() {
    if !vmm::has("nothing_is_read_behind_the_memory_of_a_machine", &[REMOVALS]) {
        return;
    }
    // It ends amid 2 MiB.
    let machine = Image::new(22, 5000);
    let walk = ["touch 0 5000 1".to_owned()];
    // Half of the last 2 MiB, and the rest follows.
    let crowd: Vec<String> = (0..12).map(|nth| format!("touch {} 1 1", 4608 + 32 * nth)).collect();
    let ways: [(_, &[String], _); 3] =
        [(Fill::Nothing, &walk, 0..5000), (Fill::Nothing, &crowd, 4608..5000), (Fill::All, &[], 0..5000)];
    for (fill, commands, supplied) in ways {
        let fixture = Fixture::new(Image { pages: 8192, ..machine });
        let server = fixture.serve(options(|o| (o.vms_max, o.fill) = (1, fill)));
        let file = fixture.cache.open(fixture.snapshot()).unwrap();
        let behind = || {
            let residency = file.residency(machine.bytes(), 3192 * PAGE as u64).unwrap();
            residency.cached_pages + residency.filling_pages
        };
        // The snapshot was identified by some of its pages.
        let before = behind();
        let mut monitor = Monitor::start(&Plan::new(fixture.socket(), machine));
        commands.iter().for_each(|command| monitor.does(command));
        let pages = supplied.end - supplied.start;
        // A stream that is seen in the touches puts the rest off to the next fault there: the machine touches on.
        let (mut between, began) = (supplied.clone().skip(16).step_by(32), Instant::now());
        until("its memory is supplied", || {
            let counters = server.stats().counters;
            let is_supplied = counters.demand_bytes + counters.ahead_bytes >= pages * PAGE as u64;
            if !is_supplied
                && began.elapsed() > Duration::from_secs(5)
                && let Some(page) = between.next()
            {
                monitor.does(&format!("touch {page} 1 1"));
            }
            is_supplied
        });
        assert_eq!(behind(), before, "{fill:?}, {commands:?}");
        monitor.does("touch 0 5000 2");
        server.stop();
    }
}

#[test]
fn memory_that_is_filled_unasked_is_right_beside_all_that_the_machine_does() {
    let test = "memory_that_is_filled_unasked_is_right_beside_all_that_the_machine_does";
    if !vmm::has(test, &[Need::Userfault(ALL_EVENTS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(20, 3000));
    for workers in [1, 4] {
        let server = fixture.serve(options(|o| {
            o.fill = Fill::All;
            o.workers = workers;
        }));
        let mut monitors =
            [(); 3].map(|()| Monitor::start(&fixture.plan().features(ALL_EVENTS).in_regions(3)));
        monitors.iter_mut().for_each(|monitor| monitor.tell("race 150 3"));
        for monitor in &mut monitors {
            assert_eq!(monitor.answer().as_deref(), Some("done"), "{workers}");
        }
        let mut other = Monitor::start(&fixture.plan().features(ALL_EVENTS).in_regions(3));
        other.does("balloon 100 1500 dontneed");
        other.does("unmap 2900 100");
        other.does("remap 0");
        other.does("fork touch 0 2900 2; balloon 100 350 dontneed; touch 0 2900 1");
        other.does("touch 0 2900 2");
        for monitor in &mut monitors {
            monitor.does("touch 0 3000 2");
        }
        server.stop();
    }
}

#[test]
fn a_guest_sums_and_writes_its_snapshot_by_missing_faults() {
    if !vmm::has("a_guest_sums_and_writes_its_snapshot_by_missing_faults", &[REMOVALS, Need::Kvm]) {
        return;
    }
    let fixture = Fixture::new(Image::new(11, 1024));
    let _server = fixture.serve(RestoreOptions::default());
    let mut monitor = Monitor::start(&fixture.plan().in_regions(2));
    monitor.does("sum 100 400");
    monitor.does("set 450 300 1234567890123456789");
    monitor.does("balloon 600 100 dontneed");
    monitor.does("sum 0 1024");
    monitor.does("set 650 10 5");
    monitor.does("sum 0 1024");
    monitor.does("touch 0 1024 2");
}
