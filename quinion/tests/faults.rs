//! Faults: requests that fail, end early, come late, out of order or never; and readers that get the right
//! bytes or a clear error all the same.
//!
//! First each request in turn goes wrong, in each way, once: for a reader who scans, one who jumps and one who reads by
//! futures. Then everything goes wrong under a seed, for several readers at a time. Afterwards nothing is in flight, no
//! frame is lost, and what is cached is right.

use quinion_testing::content;
use quinion_testing::device;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use quinion::backend::{Attributes, Backend, Fill};
use quinion::error::Result;
use quinion::{Cache, ErrorKind, File};
use quinion_testing::block_on::{block_on, block_on_while};
use quinion_testing::content::Dice;
use quinion_testing::device::{Device, verify};
use quinion_testing::doubles::{CompletionOrder, CompletionPoint, Faults, SimulatedBackend};

const PAGE: u64 = 4096;
const PAGES: u64 = 120;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Fails,
    IsShort(usize),
    IsDropped,
    /// The request ends after all those that were submitted before the cache was dropped or the next reader waited.
    IsLate,
}

#[derive(Debug)]
struct Once {
    device: Arc<Device>,
    fault: Fault,
    number: u64,
    requests: AtomicU64,
    late: Mutex<Vec<Fill>>,
}

impl Once {
    fn is_over(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > self.number
    }
    fn deliver(&self) {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        self.device.submit(late);
    }
}

impl Backend for Once {
    fn name(&self) -> &'static str {
        "once"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.device.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            if self.requests.fetch_add(1, Ordering::Relaxed) != self.number {
                self.device.submit(vec![fill]);
                continue;
            }
            match self.fault {
                Fault::Fails => fill.complete(Err(io::Error::from_raw_os_error(5))),
                Fault::IsDropped => drop(fill),
                Fault::IsLate => self.late.lock().unwrap().push(fill),
                Fault::IsShort(bytes) => {
                    let mut whole = vec![0; fill.len()];
                    let there = device::content(&self.device, fill.position(), &mut whole);
                    let bytes = bytes.min(there);
                    fill.write(0, &whole[..bytes]);
                    fill.complete(Ok(bytes));
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Scans,
    Jumps,
    Polls,
}

const WAYS: [Way; 3] = [Way::Scans, Way::Jumps, Way::Polls];

/// Reads all of the file by reads of a few pages, each again if it fails; returns how many failed.
fn read_all(file: &File, device: &Device, way: Way, while_waiting: impl Fn()) -> u32 {
    let mut errors = 0;
    let mut buffer = vec![0; 3 * PAGE as usize + 100];
    let step = if way == Way::Scans { 1 } else { 37 };
    for number in 0..PAGES {
        let position = number * step % PAGES * PAGE + 10;
        let mut done = 0;
        while done < buffer.len() && position + (done as u64) < PAGES * PAGE {
            let (at, rest) = (position + done as u64, &mut buffer[done..]);
            let read: Result<usize> = match way {
                Way::Polls => block_on_while(file.read_at_async(rest, at), &while_waiting),
                Way::Scans | Way::Jumps => file.read_at(rest, at),
            };
            match read {
                Ok(0) => panic!("the file does not end at {at}"),
                Ok(bytes) => done += bytes,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                    errors += 1;
                    assert!(errors < 5, "one fault, and still: {error}");
                }
            }
        }
        verify(&buffer[..done], device, position);
    }
    errors
}

fn each_request_in_turn(fault: Fault, way: Way) {
    for number in 0.. {
        let device = Device::new(PAGES * PAGE);
        let backend = Arc::new(Once {
            device: Arc::clone(&device),
            fault,
            number,
            requests: AtomicU64::new(0),
            late: Mutex::default(),
        });
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(64 * PAGE).build().unwrap();
        let file = cache.open_backend(Arc::clone(&backend) as _).unwrap();
        let errors = read_all(&file, &device, way, || backend.deliver());
        backend.deliver();
        // A request that is bad once is tried again by the reads that need its pages.
        assert!(errors <= 1, "{fault:?} of request {number}: {errors} errors");
        assert_eq!(cache.stats().in_flight, 0);
        cache.check().unwrap_or_else(|what| panic!("{fault:?} of request {number}, {way:?}: {what}"));
        // (A file that seemed to end is checked, and dropped since it does not.)
        assert!(file.cached_pages() == PAGES || matches!(fault, Fault::IsShort(_)));
        if !backend.is_over() {
            return assert!(number > 2, "there were requests to break");
        }
    }
}

/// 1. A backend says that its file has 2^64 - 1 bytes. 2. Positions in it overflow.
#[test]
fn a_size_that_no_file_has_is_not_believed() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let device = Device::new(u64::MAX);
    let file = cache.open_backend(device.clone()).unwrap();
    assert_eq!(file.len(), i64::MAX as u64);
    device.size.store(u64::MAX - 1, Ordering::Relaxed);
    device.generation.fetch_add(1, Ordering::Relaxed);
    file.revalidate().unwrap();
    assert_eq!(file.len(), i64::MAX as u64);
    file.read_exact_at(&mut [0; 10], 5).unwrap();
    assert!(file.read_exact_at(&mut [0; 10], u64::MAX - 5).is_err());
}

#[test]
fn each_request_in_turn_fails() {
    WAYS.into_iter().for_each(|way| each_request_in_turn(Fault::Fails, way));
}

#[test]
fn each_request_in_turn_is_short() {
    for bytes in [0, 100, 4097] {
        WAYS.into_iter().for_each(|way| each_request_in_turn(Fault::IsShort(bytes), way));
    }
}

#[test]
fn each_request_in_turn_is_dropped_by_its_backend() {
    WAYS.into_iter().for_each(|way| each_request_in_turn(Fault::IsDropped, way));
}

#[test]
fn each_request_in_turn_is_late() {
    each_request_in_turn(Fault::IsLate, Way::Polls);
}

#[test]
fn a_cache_ends_with_requests_in_flight() {
    for held in [1, 10, 50] {
        let device = Device::new(PAGES * PAGE);
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().unwrap();
        let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
        device.hold();
        for page in 0..held {
            assert!(
                file.read_at_with(&mut [0], page * 2 * PAGE, quinion::ReadOptions::new().nowait(true))
                    .is_err()
            );
        }
        assert_eq!(cache.stats().in_flight, held);
        drop((file, cache));
        device.release(); // into frames that are still there
        assert_eq!(device.reads().len(), held as usize);
    }
}

fn storm(seed: u64) {
    let faults = Faults {
        seed,
        errors: 30,
        early_ends: 30,
        drops: 10,
        delay_max: 5,
        sequence: CompletionOrder::Shuffled,
        completing: CompletionPoint::WhenReaped,
    };
    let size = 3000 * PAGE + 777;
    let page = |file: u64, page: u64, bytes: &mut [u8]| {
        bytes.copy_from_slice(&content::page_content(file as u32, page, 0));
    };
    // Every other storm is one of large folios that land and fail in parts.
    let (order, parts) = if seed.is_multiple_of(2) { (9, 3) } else { (0, 1 << 20) };
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(64 * PAGE).folio_order_max(order);
    let cache = builder.build().unwrap();
    let backend = Arc::new(SimulatedBackend::generated(1, size, page, faults).in_parts(parts));
    let file = cache.open_backend(Arc::clone(&backend) as _).unwrap();
    thread::scope(|scope| {
        for reader in 0..4 {
            let file = file.clone();
            scope.spawn(move || {
                let mut dice = Dice::new(seed ^ reader << 32);
                let mut buffer = vec![0; 40_000];
                for _ in 0..400 {
                    let position = dice.below(size);
                    let len = dice.below(buffer.len() as u64) as usize + 1;
                    let read = if reader == 0 {
                        block_on(file.read_at_async(&mut buffer[..len], position))
                    } else {
                        file.read_at(&mut buffer[..len], position)
                    };
                    match read {
                        Ok(bytes) => content::verify(&buffer[..bytes], 1, position).unwrap(),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error}"),
                    }
                }
            });
        }
    });
    // Fills that readahead left in flight complete when a thread reaps.
    let read = |position| loop {
        if file.read_at(&mut [0; 1], position).is_ok() {
            break;
        }
    };
    (0..size).step_by(PAGE as usize).for_each(read);
    cache.check().unwrap();
    drop((file, cache));
}

#[test]
fn a_storm_of_faults_reads_nothing_wrong_and_loses_nothing() {
    let storms = if std::env::var_os("QUINION_SOAK").is_some() { 500 } else { 12 };
    (0..storms).for_each(storm);
}
