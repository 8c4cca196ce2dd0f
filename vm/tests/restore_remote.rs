//! Remote: a snapshot whose pages come from another machine: late, not at all for a while, or never again.
//!
//! ```text
//!   the test --works, holds, fails, says that it has changed--> source --fills--> cache --> server --> monitors
//! ```
//!
//! The source is a backend that does as it is told. So no test waits for a time that a network takes.

use quinion_testing::vmm;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use quinion::backend::{Attributes, Backend, Fill, Identity, Version};
use quinion::{Cache, File};
use quinion_testing::vmm::{Image, Monitor, Need, PAGE, Plan, kernel};
use quinion_vm::{Event, FaultRecord, RestoreOptions, Server, identify, identify_file};
use tempfile::TempDir;

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
const TIME_MAX: Duration = Duration::from_secs(60);
const NAME: &str = "s3://bucket/vm.mem";

/// What the source does with a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    Works,
    Holds,
    Fails,
    SaysChanged,
}

#[derive(Debug)]
struct Source {
    image: Image,
    mode: Mutex<Mode>,
    held: Mutex<Vec<Fill>>,
}

impl Source {
    fn set(&self, mode: Mode) {
        *self.mode.lock().unwrap() = mode;
        if mode == Mode::Works {
            let held = std::mem::take(&mut *self.held.lock().unwrap());
            held.into_iter().for_each(|fill| self.fill(fill));
        }
    }

    fn fill(&self, mut fill: Fill) {
        let wanted = (fill.len() as u64).min(self.image.bytes() - fill.position());
        let first = fill.position() / PAGE as u64;
        let pages = first..first + wanted / PAGE as u64;
        let bytes: Vec<u8> = pages.flat_map(|page| self.image.page(page)).collect();
        fill.write(0, &bytes);
        fill.complete(Ok(bytes.len()));
    }

    fn is_asked(&self) -> bool {
        !self.held.lock().unwrap().is_empty()
    }
}

impl Backend for Source {
    fn name(&self) -> &'static str {
        "source"
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let mut digest = *b"quinion-vm test         ";
        digest[20..].copy_from_slice(&self.image.number.to_le_bytes());
        let version = Version { modified: 1, changed: 1, settled: true, steps: true };
        Ok(Attributes { identity: Identity::of_digest(digest), version, size: self.image.bytes() })
    }

    fn attributes_may_wait(&self) -> bool {
        false
    }

    fn submit(&self, fills: Vec<Fill>) {
        let mode = *self.mode.lock().unwrap();
        for fill in fills {
            match mode {
                Mode::Works => self.fill(fill),
                Mode::Holds => self.held.lock().unwrap().push(fill),
                Mode::Fails => fill.complete(Err(io::Error::other("the store is gone"))),
                Mode::SaysChanged => {
                    let kind = io::ErrorKind::StaleNetworkFileHandle;
                    fill.complete(Err(io::Error::new(kind, "it is another by now")));
                }
            }
        }
    }
}

struct Fixture {
    sockets: TempDir,
    source: Arc<Source>,
    cache: Cache,
    file: File,
    events: Arc<Mutex<Vec<String>>>,
}

impl Fixture {
    fn new(image: Image) -> Self {
        let source = Source { image, mode: Mutex::new(Mode::Works), held: Mutex::default() };
        let source = Arc::new(source);
        let cache = Cache::builder().memory(64 << 20).build().unwrap();
        let file = cache.open_backend(source.clone()).unwrap();
        Self { sockets: tempfile::tempdir().unwrap(), source, cache, file, events: Arc::default() }
    }

    /// A server of one worker, which tries reads again for so long.
    fn serve(&self, retry_reads: Duration, choose: impl FnOnce(&mut RestoreOptions)) -> Server {
        let mut options = RestoreOptions::new();
        (options.workers, options.retry_reads) = (1, retry_reads);
        options.snapshot_name = Some(NAME.to_owned());
        let events = Arc::clone(&self.events);
        options.observer =
            Some(Arc::new(move |event: &Event| events.lock().unwrap().push(event.to_string())));
        choose(&mut options);
        Server::start_file(&self.cache, &self.file, &self.plan().socket, options).unwrap()
    }

    fn plan(&self) -> Plan {
        Plan::new(self.sockets.path().join("socket"), self.source.image)
    }

    /// An event has these words. It follows the end of a machine that is killed.
    #[track_caller]
    fn told(&self, words: &str) {
        until(words, || self.events.lock().unwrap().iter().any(|event| event.contains(words)));
    }
}

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIME_MAX, "{what}: it does not happen");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_worker_serves_other_machines_while_a_page_is_on_its_way() {
    let test = "one_worker_serves_other_machines_while_a_page_is_on_its_way";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(60, 4000));
    let server = fixture.serve(Duration::ZERO, |_| ());
    let [mut one, mut other] = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    one.does("touch 0 100 1");
    fixture.source.set(Mode::Holds);
    one.tell("touch 3050 1 1");
    until("the page is asked for", || fixture.source.is_asked());
    // Its pages are in the cache.
    other.does("touch 0 100 2");
    one.tell("touch 3050 1 1");
    fixture.source.set(Mode::Works);
    assert_eq!([one.answer(), one.answer()].map(|answer| answer.unwrap()), ["done", "done"]);
    // Of several threads each waits for a page of its own.
    fixture.source.set(Mode::Holds);
    other.tell("touch 3500 400 8");
    until("a page is asked for", || fixture.source.is_asked());
    fixture.source.set(Mode::Works);
    assert_eq!(other.answer().as_deref(), Some("done"));
    one.does("touch 0 4000 4");
    assert_eq!(server.stop().vms_given_up, 0);
}

#[test]
fn a_server_ends_at_once_while_a_page_is_on_its_way() {
    if !vmm::has("a_server_ends_at_once_while_a_page_is_on_its_way", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(61, 1000));
    let server = fixture.serve(TIME_MAX, |_| ());
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 16 1");
    fixture.source.set(Mode::Holds);
    monitor.tell("touch 700 1 1");
    until("the page is asked for", || fixture.source.is_asked());
    let begun = Instant::now();
    server.stop();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(monitor.wait().signal(), Some(libc::SIGKILL));
    fixture.source.set(Mode::Works);
}

#[test]
fn machines_wait_for_a_source_that_fails_for_a_while() {
    if !vmm::has("machines_wait_for_a_source_that_fails_for_a_while", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(62, 2000));
    let server = fixture.serve(TIME_MAX, |_| ());
    let mut monitors = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    fixture.source.set(Mode::Fails);
    monitors.iter_mut().for_each(|monitor| monitor.tell("touch 0 2000 4"));
    sleep(Duration::from_millis(500));
    fixture.source.set(Mode::Works);
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
    }
    let stats = server.stop();
    assert_eq!((stats.vms_given_up, stats.counters.poisoned_bytes), (0, 0));
    assert!(fixture.cache.stats().device_errors > 0, "it did fail");
}

#[test]
fn a_machine_whose_source_fails_for_too_long_is_given_up_with_the_reason() {
    let test = "a_machine_whose_source_fails_for_too_long_is_given_up_with_the_reason";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(63, 1000));
    let server = fixture.serve(Duration::from_millis(300), |_| ());
    let mut monitor = Monitor::start(&fixture.plan());
    fixture.source.set(Mode::Fails);
    let begun = Instant::now();
    monitor.tell("touch 700 1 1");
    assert_eq!(monitor.wait().signal(), Some(libc::SIGKILL));
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    fixture.told("byte 2867200 of s3://bucket/vm.mem could not be read");
    fixture.told("the store is gone");
    // The server serves others, when the source is back.
    fixture.source.set(Mode::Works);
    Monitor::start(&fixture.plan()).does("touch 0 1000 2");
    assert_eq!(server.stop().vms_given_up, 1);
}

#[test]
fn a_source_that_says_that_it_has_changed_ends_its_machines() {
    if !vmm::has("a_source_that_says_that_it_has_changed_ends_its_machines", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(64, 1000));
    let server = fixture.serve(TIME_MAX, |_| ());
    let [mut one, mut other] = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    one.does("touch 0 100 1");
    fixture.source.set(Mode::SaysChanged);
    one.tell("touch 700 1 1");
    assert_eq!(one.wait().signal(), Some(libc::SIGKILL));
    fixture.told("s3://bucket/vm.mem was changed or cut");
    // Also one whose pages are cached; and no other begins, whatever the source says by then.
    fixture.source.set(Mode::Works);
    other.tell("touch 0 1 1");
    assert_eq!(other.wait().signal(), Some(libc::SIGKILL));
    let mut late = Monitor::idle();
    late.tell(&fixture.plan().command());
    assert_eq!(late.wait().signal(), Some(libc::SIGKILL));
    assert_eq!(server.stop().vms_given_up, 3);
}

/// The pages of a record are not given up for a source that is gone for a moment; those that are lost come by faults.
#[test]
fn a_record_is_replayed_from_a_source_that_fails_for_a_while() {
    if !vmm::has("a_record_is_replayed_from_a_source_that_fails_for_a_while", &[REMOVALS]) {
        return;
    }
    let image = Image::new(65, 3000);
    let touched: Vec<u64> = (0..3000).step_by(7).collect();
    let record: FaultRecord = {
        let fixture = Fixture::new(image);
        let server = fixture.serve(TIME_MAX, |options| options.record = true);
        let mut monitor = Monitor::start(&fixture.plan());
        touched.iter().for_each(|page| monitor.does(&format!("touch {page} 1 1")));
        server.record().unwrap()
    };
    let fixture = Fixture::new(image);
    assert_eq!(record.image(), identify_file(&fixture.cache, &fixture.file, &[]).unwrap());
    fixture.file.dont_need(0, image.bytes()).unwrap();
    let server = fixture.serve(TIME_MAX, |options| options.replay = Some(record));
    fixture.source.set(Mode::Fails);
    let mut monitor = Monitor::start(&fixture.plan());
    sleep(Duration::from_millis(500));
    fixture.source.set(Mode::Works);
    until("it is replayed", || server.stats().counters.ahead_bytes > 100 * PAGE as u64);
    monitor.does("touch 0 3000 2");
    let stats = server.stop();
    assert_eq!((stats.vms_given_up, stats.counters.stale_bytes), (0, 0));
}

#[test]
fn a_copy_in_a_file_has_the_identity_of_the_source_and_a_source_that_fails_has_none() {
    let fixture = Fixture::new(Image::new(66, 500));
    let path = fixture.sockets.path().join("memory");
    fixture.source.image.write(&path);
    assert_eq!(
        identify_file(&fixture.cache, &fixture.file, &[]).unwrap(),
        identify(&fixture.cache, &path).unwrap()
    );
    fixture.file.dont_need(0, fixture.source.image.bytes()).unwrap();
    fixture.source.set(Mode::Fails);
    let said = identify_file(&fixture.cache, &fixture.file, &[]).unwrap_err().to_string();
    assert!(said.contains("the store is gone"), "{said}");
}
