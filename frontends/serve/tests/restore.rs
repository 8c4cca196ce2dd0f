//! Restore: VMs whose snapshot is an object: their pages come through the server's cache, and its store may fail.
//!
//! ```text
//!   quinion-testing-s3, here  <--GETs--  quinion-serve, a process  <--faults--  fake machine monitors, processes
//!     counts, delays, fails                one cache, a disk tier                 each checks what it reads
//! ```
//!
//! Where the system has no userfaultfd, these tests say SKIPPED.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};
use quinion::Cache;
use quinion_service::Client;
use quinion_testing::vmm::{self, Image, Monitor, Need, PAGE, Plan, kernel};
use quinion_testing_s3::{self as s3, Fault};
use quinion_vm::pack::{PackRequest, pack};
use quinion_vm::{FaultRecord, RestoreOptions, Server as RestoreServer};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

mod exposition;

#[test]
fn be_the_monitor() {
    vmm::monitor::be_the_monitor();
}

const REMOVALS: Need = Need::Userfault(kernel::EVENT_REMOVE);
/// A watchdog for a busy machine.
const TIME_MAX: Duration = Duration::from_secs(120);
const URL: &str = "s3://bucket/vm.mem";
/// Pages that the server reads to know a snapshot.
const SAMPLED_PAGES: u64 = 32;
/// And to see that it is no pack, with those that are read ahead there.
const RECOGNITION_PAGES: u64 = 4;

/// A store with a snapshot, and a folder for sockets.
struct Fixture {
    store: s3::Server,
    image: Image,
    folder: TempDir,
}

impl Fixture {
    fn new(image: Image) -> Self {
        let fixture = Self { store: s3::Server::new(), image, folder: tempfile::tempdir().unwrap() };
        let bytes: Vec<u8> = (0..image.pages).flat_map(|page| image.page(page)).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let store: &dyn ObjectStore = &*fixture.store.store();
        runtime.block_on(store.put(&Key::from("vm.mem"), bytes.into())).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("vm.sock")
    }

    fn plan(&self) -> Plan {
        Plan::new(self.socket(), self.image)
    }

    /// The program, with the store and no credentials.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-serve"));
        let names = std::env::vars_os().map(|(name, _)| name);
        names.filter(|name| name.to_string_lossy().starts_with("AWS_")).for_each(|name| {
            command.env_remove(name);
        });
        command.env("AWS_SKIP_SIGNATURE", "true").env("AWS_REGION", "us-east-1");
        command.env("AWS_ENDPOINT_URL_S3", format!("http://{}", self.store.address()));
        command.env_remove("NOTIFY_SOCKET").args(["--memory", "64M", "--store", "s3://bucket", "--name"]);
        command.arg(self.path("q/s.sock")).args(words);
        command
    }

    /// A server of the snapshot, with other options.
    fn serve(&self, words: &[&str]) -> Served {
        let restore = format!("{URL}={}", self.socket().display());
        let served = Served::start(self.command(&[&["--restore", &restore], words].concat()));
        served.says("restoring");
        served
    }

    /// A server of the snapshot with these lines in its table.
    fn configured(&self, lines: &str) -> Served {
        let config = self.path("serve.toml");
        let table = format!("[[restore]]\nsnapshot = {URL:?}\nsocket = {:?}\n{lines}", self.socket());
        std::fs::write(&config, table).unwrap();
        let served = Served::start(self.command(&["--config", config.to_str().unwrap()]));
        served.says("restoring");
        served
    }

    fn sent_bytes(&self) -> u64 {
        self.store.control.ranges().iter().map(|(first, end)| end - first).sum()
    }
}

/// A program that runs, and its events.
struct Served {
    process: Child,
    events: Receiver<String>,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Served {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let errors = BufReader::new(process.stderr.take().unwrap());
        let (teller, events) = channel();
        std::thread::spawn(move || {
            errors.lines().map_while(Result::ok).try_for_each(|line| teller.send(line)).ok();
        });
        Self { process, events }
    }

    /// Waits for an event that contains these words.
    #[track_caller]
    fn says(&self, words: &str) -> String {
        let mut said = Vec::new();
        loop {
            match self.events.recv_timeout(TIME_MAX) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => said.push(line),
                Err(_) => panic!("it does not say {words:?}, but {said:#?}"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    #[track_caller]
    fn ended(&mut self) -> Option<i32> {
        let begun = Instant::now();
        while begun.elapsed() < TIME_MAX {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            sleep(Duration::from_millis(5));
        }
        panic!("it does not end");
    }

    /// Ends it in order.
    #[track_caller]
    fn stop(mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.ended(), Some(0));
    }
}

/// The number behind a metric of that name and labels.
#[track_caller]
fn number(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: {text}")).trim().parse().unwrap()
}

fn metrics_at(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

#[test]
fn machines_begin_before_their_object_is_there_and_share_its_pages_with_clients() {
    let test = "machines_begin_before_their_object_is_there_and_share_its_pages_with_clients";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(70, 8000));
    fixture.store.control.set_latency(Duration::from_millis(2));
    let restore = format!("{URL}={}", fixture.socket().display());
    let mut served = Served::start(fixture.command(&["--restore", &restore, "--metrics", "127.0.0.1:0"]));
    let listening = served.says("listening");
    let address = listening.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    served.says("restoring");
    assert_eq!(std::fs::metadata(fixture.socket()).unwrap().permissions().mode() & 0o777, 0o600);
    let [mut first, mut second] = [(); 2].map(|()| Monitor::start(&fixture.plan().in_regions(2)));
    first.does("touch 1000 200 2");
    let sent = fixture.sent_bytes();
    assert!(sent < fixture.image.bytes() / 2, "{sent} bytes were sent for 200 pages");
    first.does("touch 0 8000 4");
    first.does("balloon 100 50 dontneed");
    first.does("touch 0 8000 2");
    // A GET that joins two faults fetches what lies between them, too, whether that is cached or not.
    let sent = fixture.sent_bytes();
    assert!(sent < 3 * fixture.image.bytes(), "{sent} bytes were sent");
    // What is cached, the second machine and a client get without a GET.
    let gets = fixture.store.control.gets();
    second.does("touch 0 8000 3");
    let client = Client::connect(fixture.path("q/s.sock").to_str().unwrap()).unwrap();
    let mut page = [0; PAGE];
    client.open(URL).unwrap().read_exact_at(&mut page, 5000 * PAGE as u64).unwrap();
    assert_eq!(page, fixture.image.page(5000));
    assert_eq!(fixture.store.control.gets(), gets);
    let text = metrics_at(&address);
    assert_eq!(exposition::check(&text), Ok(()), "{text}");
    let socket = fixture.socket();
    let of = |name: &str| number(&text, &format!("{name}{{socket=\"{}\"}}", socket.display()));
    assert_eq!((of("quinion_restore_vms"), of("quinion_restore_vms_served_total")), (2.0, 2.0));
    assert_eq!(of("quinion_restore_image_bytes"), fixture.image.bytes() as f64);
    // Those are the whole cache's.
    assert!(!text.contains("quinion_restore_device_bytes"), "{text}");
    assert!(of("quinion_restore_fault_seconds_count") > 0.0);
    assert_eq!(text.matches("quinion_restore_vm_faults_total{").count(), 2, "{text}");
    // In order: the machines need the server still.
    served.signal(Signal::TERM);
    served.says("was still there at the end: its process was killed");
    assert!(served.says("restored").contains("vms=\"2\" vms_given_up=\"0\""));
    assert_eq!(served.ended(), Some(0));
    assert_eq!([first.wait().signal(), second.wait().signal()], [Some(Signal::KILL.as_raw()); 2]);
    assert!(!socket.exists());
}

/// A pack that has no chunk of its own: all are in the one that it refers to.
#[test]
fn machines_get_their_bytes_from_packs_in_a_store() {
    if !vmm::has("machines_get_their_bytes_from_packs_in_a_store", &[]) {
        return;
    }
    let fixture = Fixture::new(Image::new(78, 1500));
    let (flat, older, newer) = (fixture.path("flat"), fixture.path("older"), fixture.path("newer"));
    let bytes: Vec<u8> = (0..1500).flat_map(|page| fixture.image.page(page)).collect();
    std::fs::write(&flat, bytes).unwrap();
    pack(&PackRequest::new(vec![flat.clone()], older.clone()), &mut |_| ControlFlow::Continue(())).unwrap();
    let mut against = PackRequest::new(vec![flat], newer.clone());
    against.against = vec![older.clone()];
    let report = pack(&against, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(report.stored_bytes, 0);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let store: &dyn ObjectStore = &*fixture.store.store();
    for (key, path) in [("older.pack", &older), ("vm.mem", &newer)] {
        runtime.block_on(store.put(&Key::from(key), std::fs::read(path).unwrap().into())).unwrap();
    }
    let served = fixture.configured("packs = [\"s3://bucket/older.pack\"]");
    let mut machine = Monitor::start(&fixture.plan());
    machine.does("touch 0 1500 4");
    served.stop();
    assert_eq!(machine.wait().signal(), Some(Signal::KILL.as_raw()));
    // Without the pack that it refers to it is refused, by name.
    let alone = format!("{URL}={}", fixture.socket().display());
    let mut refused = Served::start(fixture.command(&["--restore", &alone]));
    assert!(refused.says("cannot serve the snapshot").contains("older"));
    assert_eq!(refused.ended(), Some(1));
}

#[test]
fn machines_get_their_bytes_from_a_store_that_refuses_cuts_and_delays() {
    let test = "machines_get_their_bytes_from_a_store_that_refuses_cuts_and_delays";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(71, 4000));
    let served = fixture.serve(&[]);
    let trouble = [
        Fault::Status(503),
        Fault::Cut(5000),
        Fault::Short(4096),
        Fault::Late(200),
        Fault::Reset(100),
        Fault::Status(500),
        Fault::OtherRange,
        Fault::Longer(9000),
        Fault::Whole,
        Fault::Cut(0),
    ];
    fixture.store.control.trouble(trouble.iter().cycle().take(40).copied());
    let mut monitors = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    monitors.iter_mut().for_each(|monitor| monitor.tell("touch 0 4000 4"));
    for monitor in &mut monitors {
        assert_eq!(monitor.answer().as_deref(), Some("done"));
    }
    assert!(!fixture.store.control.faults().is_empty());
    served.stop();
}

/// The store answers nothing for some seconds: machines wait, and others that have their pages go on.
#[test]
fn machines_wait_for_a_store_that_is_gone_for_a_while() {
    if !vmm::has("machines_wait_for_a_store_that_is_gone_for_a_while", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(72, 4000));
    let served = fixture.configured("workers = 1\ndeadline = 100\n");
    let [mut one, mut other] = [(); 2].map(|()| Monitor::start(&fixture.plan()));
    one.does("touch 0 64 1");
    fixture.store.control.hold();
    one.tell("touch 2070 1 1");
    sleep(Duration::from_secs(2));
    other.does("touch 0 64 2");
    fixture.store.control.release();
    assert_eq!(one.answer().as_deref(), Some("done"));
    one.does("touch 0 4000 2");
    served.stop();
}

#[test]
fn machines_of_an_object_that_is_replaced_are_given_up_and_never_mixed() {
    let test = "machines_of_an_object_that_is_replaced_are_given_up_and_never_mixed";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    for trouble in [None, Some(Fault::ChangedAfter(4096)), Some(Fault::Unconditional)] {
        let fixture = Fixture::new(Image::new(73, 4000));
        let served = fixture.serve(&[]);
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("touch 0 200 2");
        match trouble {
            Some(fault) => fixture.store.control.trouble([fault]),
            None => drop(fixture.store.control.change("vm.mem")),
        }
        monitor.tell("touch 0 4000 4");
        // It is killed before it has read a byte of the other version: it would say so.
        assert_eq!(monitor.answer(), None, "{trouble:?}");
        assert_eq!(monitor.wait().signal(), Some(Signal::KILL.as_raw()), "{trouble:?}");
        let event = served.says("was given up");
        assert!(event.contains("s3://bucket/vm.mem was changed or cut"), "{event}");
        // The server goes on, and serves no machine of it.
        let mut late = Monitor::idle();
        late.tell(&fixture.plan().command());
        assert_eq!(late.wait().signal(), Some(Signal::KILL.as_raw()));
        served.stop();
    }
}

#[test]
fn a_second_start_with_a_warm_disk_tier_sends_no_get() {
    if !vmm::has("a_second_start_with_a_warm_disk_tier_sends_no_get", &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(74, 4000));
    let disk = format!("{}:256M", fixture.path("disk").display());
    let run = || {
        let served = fixture.serve(&["--disk", &disk]);
        let mut monitor = Monitor::start(&fixture.plan());
        monitor.does("touch 0 4000 2");
        // What came faster than the disk writes is written from memory meanwhile.
        sleep(Duration::from_millis(500));
        served.stop();
        fixture.store.control.gets()
    };
    let gets = run();
    assert!(gets > 0);
    assert_eq!(run(), gets, "the disk has all of it");
}

#[test]
fn a_record_is_written_at_the_end_and_its_replay_fetches_the_pages_that_it_names() {
    let test = "a_record_is_written_at_the_end_and_its_replay_fetches_the_pages_that_it_names";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(75, 16384));
    let record = fixture.path("boot.record");
    let line = |key: &str| format!("{key} = {record:?}\n");
    // Further apart than a gap that is fetched with what lies around it.
    let touched: Vec<u64> = (0..16384 / 16).step_by(10).map(|run| run * 16 + 3).collect();
    let served = fixture.configured(&line("record"));
    let mut monitor = Monitor::start(&fixture.plan());
    touched.iter().for_each(|page| monitor.does(&format!("touch {page} 1 1")));
    served.stop();
    assert!(std::fs::metadata(&record).unwrap().len() < 4096, "it is compact");

    let before = fixture.sent_bytes();
    let config = fixture.path("serve.toml");
    let table =
        format!("[[restore]]\nsnapshot = {URL:?}\nsocket = {:?}\n{}", fixture.socket(), line("replay"));
    std::fs::write(&config, table).unwrap();
    let words = ["--config", config.to_str().unwrap(), "--metrics", "127.0.0.1:0"];
    let served = Served::start(fixture.command(&words));
    let listening = served.says("listening");
    let address = listening.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    served.says("restoring");
    let mut monitor = Monitor::start(&fixture.plan());
    let name = format!("quinion_restore_ahead_bytes_total{{socket=\"{}\"}}", fixture.socket().display());
    let (wanted, begun) = ((touched.len() * PAGE) as f64, Instant::now());
    while number(&metrics_at(&address), &name) < wanted {
        assert!(begun.elapsed() < TIME_MAX, "it is not replayed: {}", metrics_at(&address));
        sleep(Duration::from_millis(20));
    }
    let sent = fixture.sent_bytes() - before;
    let most = (touched.len() as u64 + SAMPLED_PAGES + RECOGNITION_PAGES) * PAGE as u64;
    assert!(sent <= most, "{sent} bytes were sent for {} pages", touched.len());
    touched.iter().for_each(|page| monitor.does(&format!("touch {page} 1 1")));
    let name = format!("quinion_restore_demand_bytes_total{{socket=\"{}\"}}", fixture.socket().display());
    assert_eq!(number(&metrics_at(&address), &name), 0.0, "no page was waited for");
    served.stop();
}

/// The store answers nothing: the snapshot cannot be opened, and a signal ends the program all the same.
#[test]
fn a_signal_ends_the_program_while_a_snapshot_is_opened() {
    let fixture = Fixture::new(Image::new(76, 100));
    fixture.store.control.hold();
    let restore = format!("{URL}={}", fixture.socket().display());
    let mut served = Served::start(fixture.command(&["--restore", &restore]));
    served.says("listening");
    let begun = Instant::now();
    while fixture.store.control.under_way() == 0 {
        assert!(begun.elapsed() < TIME_MAX, "it does not ask for the object");
        sleep(Duration::from_millis(5));
    }
    let begun = Instant::now();
    served.signal(Signal::TERM);
    assert_eq!(served.ended(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(!fixture.socket().exists());
    fixture.store.control.release();
}

#[test]
fn machines_of_one_snapshot_are_ended_in_order_while_another_is_opened() {
    if !vmm::has("machines_of_one_snapshot_are_ended_in_order_while_another_is_opened", &[]) {
        return;
    }
    let fixture = Fixture::new(Image::new(79, 100));
    fixture.store.control.hold();
    let [flat, socket, record, config] =
        ["flat", "flat.sock", "flat.record", "serve.toml"].map(|of| fixture.path(of));
    let bytes: Vec<u8> = (0..100).flat_map(|page| fixture.image.page(page)).collect();
    std::fs::write(&flat, bytes).unwrap();
    let first = format!("[[restore]]\nsnapshot = {flat:?}\nsocket = {socket:?}\nrecord = {record:?}\n");
    let second = format!("[[restore]]\nsnapshot = {URL:?}\nsocket = {:?}\n", fixture.socket());
    std::fs::write(&config, first + &second).unwrap();
    let mut served = Served::start(fixture.command(&["--config", config.to_str().unwrap()]));
    served.says("restoring");
    let mut machine = Monitor::start(&Plan::new(socket.clone(), fixture.image));
    machine.does("touch 0 50 1");
    let begun = Instant::now();
    while fixture.store.control.under_way() == 0 {
        assert!(begun.elapsed() < TIME_MAX, "it does not ask for the object");
        sleep(Duration::from_millis(5));
    }
    served.signal(Signal::TERM);
    assert!(served.says("restored").contains("recorded_pages=\"50\""));
    assert_eq!(served.ended(), Some(0));
    assert_eq!(machine.wait().signal(), Some(Signal::KILL.as_raw()));
    assert!(record.exists() && !socket.exists());
    fixture.store.control.release();
}

/// Set for the process of [`be_the_taker`]: the snapshot and the socket.
const TAKER: &str = "QUINION_TEST_TAKER";

fn taking_over(flat: &Path, socket: &Path) -> RestoreServer {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let mut options = RestoreOptions::new();
    (options.replace, options.record) = (true, true);
    RestoreServer::start(&cache, flat, socket, options).unwrap()
}

/// A process that takes over the VMs of a server, says so, and serves them until it is killed.
#[test]
fn be_the_taker() {
    let Ok(places) = std::env::var(TAKER) else { return };
    let (flat, socket) = places.split_once(' ').unwrap();
    let _server = taking_over(Path::new(flat), Path::new(socket));
    println!("taker: serving");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// The program with a local snapshot, which can be handed over, and a machine that has touched half of its pages.
struct Handing {
    fixture: Fixture,
    flat: PathBuf,
    record: PathBuf,
    served: Served,
    machine: Monitor,
}

impl Handing {
    fn new(number: u32) -> Self {
        let fixture = Fixture::new(Image::new(number, 100));
        let [flat, record, config] = ["flat", "record", "serve.toml"].map(|of| fixture.path(of));
        fixture.image.write(&flat);
        let table = format!(
            "[[restore]]\nsnapshot = {flat:?}\nsocket = {:?}\nrecord = {record:?}\n",
            fixture.socket()
        );
        std::fs::write(&config, table).unwrap();
        let served = Served::start(fixture.command(&["--config", config.to_str().unwrap()]));
        served.says("restoring");
        let mut machine = Monitor::start(&fixture.plan());
        machine.does("touch 0 50 1");
        Self { fixture, flat, record, served, machine }
    }
}

/// 1. Another server takes over, and goes on with the record. This program ends its own server, and writes its record.
/// 2. The other server writes the longer record.
/// 3. This program ends. It has nothing to write over that.
#[test]
fn a_record_that_a_server_which_took_over_has_written_stays() {
    if !vmm::has("a_record_that_a_server_which_took_over_has_written_stays", &[REMOVALS]) {
        return;
    }
    let Handing { fixture, flat, record, mut served, mut machine } = Handing::new(80);
    let other = taking_over(&flat, &fixture.socket());
    let restored = served.says("restored");
    let expected = "vms_handed_over=\"1\"";
    assert!(restored.contains(expected) && restored.contains("recorded_pages=\"50\""), "{restored}");
    let pages = || FaultRecord::read(&record, other.image()).unwrap().pages();
    assert_eq!(pages(), 50);
    machine.does("touch 0 80 1");
    other.record().unwrap().write(&record).unwrap();
    served.signal(Signal::TERM);
    assert_eq!(served.ended(), Some(0));
    assert_eq!(pages(), 80);
    machine.does("touch 0 100 1");
}

/// 1. Another server takes over, and is killed.
/// 2. VMMs that connect are refused, and not kept waiting by this program, which has the socket from before.
/// 3. A new server has the socket.
#[test]
fn a_socket_is_free_when_the_server_that_took_it_over_was_killed() {
    if !vmm::has("a_socket_is_free_when_the_server_that_took_it_over_was_killed", &[REMOVALS]) {
        return;
    }
    let Handing { fixture, flat, served, machine, .. } = Handing::new(81);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "be_the_taker", "--nocapture", "--test-threads=1"]);
    command.env(TAKER, format!("{} {}", flat.display(), fixture.socket().display()));
    let mut taker = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(taker.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("taker: serving")), "it has not taken over");
    taker.kill().unwrap();
    taker.wait().unwrap();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let begun = Instant::now();
    let next = loop {
        match RestoreServer::start(&cache, &flat, &fixture.socket(), RestoreOptions::new()) {
            Ok(server) => break server,
            Err(error) => assert!(begun.elapsed() < TIME_MAX, "{error}"),
        }
        sleep(Duration::from_millis(20));
    };
    Monitor::start(&fixture.plan()).does("touch 0 100 2");
    drop(next);
    served.stop();
    drop(machine);
}

#[test]
fn a_snapshot_that_cannot_be_served_is_named_with_the_reason() {
    let fixture = Fixture::new(Image::new(77, 100));
    let fails = |words: &[&str], parts: &[&str]| {
        let mut served = Served::start(fixture.command(words));
        let event = served.says("failed");
        for part in parts {
            assert!(event.contains(part), "{part}: {event}");
        }
        assert_eq!(served.ended(), Some(1));
    };
    fails(&["--restore", "s3://bucket/none=/tmp/none.sock"], &["s3://bucket/none", "/tmp/none.sock"]);
    fails(&["--restore", "s3://other/vm.mem=/tmp/none.sock"], &["s3://other/vm.mem", "has no store for it"]);
    fails(&["--restore", "/nowhere/vm.mem=/tmp/none.sock"], &["/nowhere/vm.mem"]);
    let twice = ["--restore", "s3://bucket/a=/tmp/x.sock", "--restore", "s3://bucket/b=/tmp/x.sock"];
    fails(&twice, &["two snapshots at /tmp/x.sock"]);
}

/// A file with a diff, as `quinion restore` serves it; and a reload, which leaves the machines alone.
#[test]
fn a_local_snapshot_with_a_diff_is_served_and_a_reload_says_that_another_waits() {
    let test = "a_local_snapshot_with_a_diff_is_served_and_a_reload_says_that_another_waits";
    if !vmm::has(test, &[REMOVALS]) {
        return;
    }
    let fixture = Fixture::new(Image::new(78, 300));
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (base, diff) = (folder.path().join("base"), folder.path().join("diff"));
    let image = fixture.image;
    // The base has other pages where the diff has data.
    let other = Image { generation: 2, ..image };
    let page_of = |page: u64| if page < 10 { other.page(page) } else { image.page(page) };
    std::fs::write(&base, (0..300).flat_map(page_of).collect::<Vec<u8>>()).unwrap();
    let file = std::fs::File::create(&diff).unwrap();
    file.set_len(image.bytes()).unwrap();
    for page in 0..10 {
        std::os::unix::fs::FileExt::write_all_at(&file, &image.page(page), page * PAGE as u64).unwrap();
    }
    file.sync_all().unwrap();
    let config = fixture.path("serve.toml");
    let socket = fixture.socket();
    let table = format!("[[restore]]\nsnapshot = {base:?}\ndiff = [{diff:?}]\nsocket = {socket:?}\n");
    std::fs::write(&config, &table).unwrap();
    sleep(Duration::from_millis(60));
    let served = Served::start(fixture.command(&["--config", config.to_str().unwrap()]));
    served.says("restoring");
    let mut monitor = Monitor::start(&fixture.plan());
    monitor.does("touch 0 200 2");
    std::fs::write(&config, table + "vms_max = 3\n").unwrap();
    served.signal(Signal::HUP);
    let event = served.says("reloaded");
    assert!(event.contains("after_restart=\"restore\""), "{event}");
    monitor.does("touch 0 300 2");
    served.stop();
}

#[test]
fn a_socket_path_of_another_program_is_left_alone() {
    let fixture = Fixture::new(Image::new(79, 100));
    std::fs::write(fixture.socket(), "a file").unwrap();
    let restore = format!("{URL}={}", fixture.socket().display());
    let mut served = Served::start(fixture.command(&["--restore", &restore]));
    assert!(served.says("failed").contains("something else is there"));
    assert_eq!(served.ended(), Some(1));
    assert_eq!(std::fs::read(fixture.socket()).unwrap(), b"a file");
    assert!(Path::new(&fixture.socket()).exists());
}

/// The record would be written when the server ends.
#[test]
fn a_record_that_would_replace_the_snapshot_is_refused() {
    let fixture = Fixture::new(Image::new(80, 100));
    let (base, config) = (fixture.path("base"), fixture.path("serve.toml"));
    fixture.image.write(&base);
    let memory = std::fs::read(&base).unwrap();
    let socket = fixture.socket();
    let table = format!("[[restore]]\nsnapshot = {base:?}\nrecord = {base:?}\nsocket = {socket:?}\n");
    std::fs::write(&config, table).unwrap();
    let mut served = Served::start(fixture.command(&["--config", config.to_str().unwrap()]));
    assert!(served.says("failed").contains("is no record of page faults"));
    assert_eq!(served.ended(), Some(1));
    assert!(std::fs::read(&base).unwrap() == memory);
}
