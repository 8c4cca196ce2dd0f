//! Packs: machines receive a snapshot out of compressed chunks, as if it were one flat file.
//!
//! ```text
//!   an image --pack--> monday.pack    the image, some pages changed --pack, against it--> tuesday.pack
//!   pack --served--> monitors, which check each page against the image
//! ```

use quinion_testing::vmm;
mod fixture;

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fixture::{Fixture, options};
use quinion::Cache;
use quinion_vm::pack::{PackReport, PackRequest, pack};
use quinion_vm::{Fill, Server, identify};

use quinion_testing::vmm::{Backing, Image, Monitor, Need, PAGE, Plan, kernel};

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const BOTH_KINDS: u64 = kernel::MINOR_SHMEM | kernel::MISSING_SHMEM | kernel::EVENT_REMOVE;

fn pack_path(fixture: &Fixture, name: &str) -> PathBuf {
    fixture.disk.path().join(name)
}

fn packed(request: &PackRequest) -> PackReport {
    pack(request, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// The fixture's snapshot in a pack.
fn pack_of(fixture: &Fixture) -> PathBuf {
    let out = pack_path(fixture, "monday.pack");
    let report = packed(&PackRequest::new(vec![fixture.snapshot()], out.clone()));
    assert_eq!((report.bytes, report.chunk_bytes), (fixture.image.bytes(), 256 << 10));
    out
}

/// The image before its fixture's: some pages of it are others. The fixture's snapshot is packed against it.
fn two_packs_of(fixture: &Fixture) -> PathBuf {
    let older = fs::File::create(pack_path(fixture, "older")).unwrap();
    std::io::copy(&mut fs::File::open(fixture.snapshot()).unwrap(), &mut &older).unwrap();
    let other = Image { generation: fixture.image.generation + 1, ..fixture.image };
    let changed = [3, 4, 5, fixture.image.pages - 1];
    changed.iter().for_each(|&page| older.write_all_at(&other.page(page), page * PAGE as u64).unwrap());
    older.sync_all().unwrap();
    let monday = pack_path(fixture, "monday.pack");
    packed(&PackRequest::new(vec![pack_path(fixture, "older")], monday.clone()));
    let mut request = PackRequest::new(vec![fixture.snapshot()], pack_path(fixture, "tuesday.pack"));
    request.against.push(monday);
    let report = packed(&request);
    assert!(report.shared_bytes >= fixture.image.bytes() - (1 << 20), "{report:?}");
    assert_eq!(report.packs, [PathBuf::from("monday.pack")]);
    request.out
}

#[test]
fn machines_of_a_pack_read_the_pages_of_the_image() {
    if !vmm::has("machines_of_a_pack_read_the_pages_of_the_image", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(81, 1501));
    let path = pack_of(&fixture);
    assert_eq!(
        identify(&fixture.cache, &path).unwrap(),
        identify(&fixture.cache, &fixture.snapshot()).unwrap()
    );
    for fill in [Fill::Nothing, Fill::All] {
        vmm::evict(&path, 0, None);
        let server =
            Server::start(&fixture.cache, &path, &fixture.socket(), options(|o| o.fill = fill)).unwrap();
        Monitor::start(&fixture.plan()).does("touch 0 1501 3");
        let mut monitor = Monitor::start(&fixture.plan().in_regions(3));
        monitor.does("write 650 200 77");
        monitor.does("balloon 600 150 dontneed");
        monitor.does("touch 0 1501 4");
        server.stop();
    }
    fixture.cache.check().unwrap();
}

#[test]
fn machines_of_a_pack_against_another_read_the_pages_of_the_image() {
    if !vmm::has("machines_of_a_pack_against_another_read_the_pages_of_the_image", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(82, 1200));
    let path = two_packs_of(&fixture);
    let server = Server::start(&fixture.cache, &path, &fixture.socket(), options(|_| ())).unwrap();
    Monitor::start(&fixture.plan()).does("touch 0 1200 3");
    server.stop();
    fs::remove_file(pack_path(&fixture, "monday.pack")).unwrap();
    let refused = Server::start(&fixture.cache, &path, &fixture.socket(), options(|_| ())).unwrap_err();
    assert!(refused.to_string().contains("`monday.pack`"), "{refused}");
}

#[test]
fn a_record_of_the_flat_snapshot_is_replayed_from_its_pack() {
    if !vmm::has("a_record_of_the_flat_snapshot_is_replayed_from_its_pack", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(87, 1000));
    let path = pack_of(&fixture);
    let server = fixture.serve(options(|o| o.record = true));
    Monitor::start(&fixture.plan()).does("touch 100 500 1");
    let record = server.record().unwrap();
    server.stop();
    assert_eq!(record.pages(), 500);
    let replay = options(|o| o.replay = Some(record));
    let server = Server::start(&fixture.cache, &path, &fixture.socket(), replay).unwrap();
    let mut monitor = Monitor::start(&fixture.plan());
    let began = Instant::now();
    while server.stats().counters.ahead_bytes < 500 * PAGE as u64 {
        assert!(began.elapsed() < Duration::from_secs(120), "the record is not replayed");
        std::thread::yield_now();
    }
    monitor.does("touch 0 1000 2");
    assert_eq!(server.stop().counters.stale_bytes, 0);
}

#[test]
fn clones_map_the_image_of_a_pack() {
    if !vmm::has("clones_map_the_image_of_a_pack", &[Need::Userfault(BOTH_KINDS)]) {
        return;
    }
    let fixture = Fixture::new(Image::new(83, 1100));
    let path = pack_of(&fixture);
    let server =
        Server::start(&fixture.cache, &path, &fixture.socket(), options(|o| o.minor = true)).unwrap();
    let plan = fixture.plan().backing(Backing::Offered).features(BOTH_KINDS);
    let mut clones = [Monitor::start(&plan), Monitor::start(&plan)];
    for clone in &mut clones {
        clone.does("touch 0 600 3");
        clone.does("write 100 50 9");
        clone.does("touch 0 1100 3");
    }
    assert!(server.stop().counters.mapped_bytes > 0);
}

/// Fills of the pack's pages read compressed bytes through the same cache, which has room for a part of either.
#[test]
fn machines_of_a_pack_in_a_small_cache_that_has_its_bytes_too_wait_for_each_other_and_not_for_ever() {
    let test =
        "machines_of_a_pack_in_a_small_cache_that_has_its_bytes_too_wait_for_each_other_and_not_for_ever";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(84, 9000));
    let (path, monday) = (two_packs_of(&fixture), pack_path(&fixture, "monday.pack"));
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let files = [&path, &monday].map(|path| cache.open(path).unwrap());
    for fill in [Fill::Nothing, Fill::All] {
        let server = Server::start_file(
            &cache,
            &files[0],
            &fixture.socket(),
            options(|o| (o.fill, o.workers, o.packs) = (fill, 4, vec![files[1].clone()])),
        );
        let server = server.unwrap();
        let mut monitors: Vec<Monitor> = (0..4).map(|_| Monitor::start(&fixture.plan())).collect();
        for (number, monitor) in monitors.iter_mut().enumerate() {
            monitor.tell(&format!("touch {} {} 3", 1000 * number, 9000 - 1000 * number));
        }
        monitors.iter_mut().for_each(|monitor| assert_eq!(monitor.answer().as_deref(), Some("done")));
        let stats = server.stop();
        assert_eq!((stats.vms_given_up, stats.counters.poisoned_bytes), (0, 0));
    }
    cache.check().unwrap();
}

/// A damaged chunk is as an unreadable sector: no byte of it reaches a machine.
#[test]
fn a_damaged_chunk_is_an_error_of_the_machine_that_touches_it() {
    let needs = [Need::Userfault(kernel::EVENT_REMOVE | kernel::POISON)];
    if !vmm::has("a_damaged_chunk_is_an_error_of_the_machine_that_touches_it", &needs) {
        return;
    }
    let fixture = Fixture::new(Image::new(85, 640));
    let path = pack_of(&fixture);
    // Near the end of the file: bytes of the last chunks, of 64 pages each.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[0x55; 64], file.metadata().unwrap().len() - 1000).unwrap();
    file.sync_all().unwrap();
    let server = Server::start(&fixture.cache, &path, &fixture.socket(), options(|_| ())).unwrap();
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 512 2");
    let fault = format!("errno {}", libc::EFAULT);
    let poisoned = (512..640).filter(|page| monitor.ask(&format!("probe {page}")) == Some(fault.clone()));
    assert_eq!(poisoned.count(), 64, "one chunk is damaged");
    Monitor::start(&fixture.plan()).does("touch 0 512 3");
    server.stop();
}

#[test]
fn a_pack_that_changes_ends_its_machines() {
    if !vmm::has("a_pack_that_changes_ends_its_machines", &[REMOVALS]) {
        return;
    }
    for changed in ["monday.pack", "tuesday.pack"] {
        let fixture = Fixture::new(Image::new(86, 800));
        let path = two_packs_of(&fixture);
        let server = Server::start(&fixture.cache, &path, &fixture.socket(), options(|_| ())).unwrap();
        let mut monitor = Monitor::start(&Plan::new(fixture.socket(), fixture.image));
        monitor.does("touch 0 10 1");
        let file = fs::OpenOptions::new().write(true).open(pack_path(&fixture, changed)).unwrap();
        file.set_len(file.metadata().unwrap().len() + 1).unwrap();
        monitor.tell("touch 0 800 2");
        assert!(!monitor.ended().success(), "{changed}");
        assert_eq!(server.stop().vms_given_up, 1, "{changed}");
    }
}
