//! Foreign panics: wakers and sources of the program's that panic, and its signals, beside pending reads.
//!
//! The poller is one thread for all pending reads of a cache. A panic of the program's code on it must end the
//! program's own read at most, and no other.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use quinion::backend::{Attributes, Backend, Fill};
use quinion::{Cache, ErrorKind, File};
use quinion_testing::block_on::{Unpark, block_on};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;

fn read(file: &File, device: &Device, position: u64) {
    let mut buffer = [0; 100];
    assert_eq!(block_on(file.read_at_async(&mut buffer, position)).unwrap(), 100);
    verify(&buffer, device, position);
}

/// Counts its calls and panics at each.
#[derive(Default)]
struct Panics(AtomicUsize);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        panic!("a waker of a test");
    }
}

#[test]
fn a_waker_that_panics_takes_no_other_wake_up_with_it() {
    let (cache, device) =
        (Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build(), Device::new(100 * PAGE));
    let (cache, panics) = (cache.unwrap(), Arc::new(Panics::default()));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    device.hold();
    let woken = Arc::new(Unpark(thread::current()));
    let (bad, good): (Waker, Waker) = (Arc::clone(&panics).into(), Arc::clone(&woken).into());
    let mut buffers = [[0; 100]; 3];
    let [first, second, third] = &mut buffers;
    let mut futures = [first, second, third].map(|buffer| file.read_at_async(buffer, 7 * PAGE));
    for (future, waker) in futures.iter_mut().zip([&bad, &bad, &good]) {
        assert!(pin!(future).poll(&mut Context::from_waker(waker)).is_pending());
    }
    device.release();
    assert_eq!(panics.0.load(Ordering::Relaxed), 2);
    thread::park(); // the good one was called, after the bad ones
    for future in &mut futures {
        assert!(matches!(pin!(future).poll(&mut Context::from_waker(&good)), Poll::Ready(Ok(100))));
    }
    // The same on the poller: a blocking task ends by a call of the bad waker.
    device.fail(20);
    let mut buffer = [0; 100];
    let mut future = pin!(file.read_at_async(&mut buffer, 100 * PAGE));
    // The poller may be so quick that it is ready at once; it calls the waker all the same.
    let outcome = future.as_mut().poll(&mut Context::from_waker(&bad));
    while panics.0.load(Ordering::Relaxed) < 3 {
        thread::yield_now();
    }
    if outcome.is_pending() {
        assert!(matches!(future.as_mut().poll(&mut Context::from_waker(&good)), Poll::Ready(Ok(0))));
    }
    let error = block_on(file.read_at_async(&mut [0; 10], 20 * PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "the poller still does blocking tasks");
    cache.check().unwrap();
}

/// A device that panics when it is asked for its attributes, if told to.
#[derive(Debug)]
struct PanickingDevice {
    device: Arc<Device>,
    panics: AtomicBool,
}

impl Backend for PanickingDevice {
    fn name(&self) -> &'static str {
        "panicking"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        assert!(!self.panics.load(Ordering::Relaxed), "a source of a test");
        self.device.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.device.submit(fills);
    }
}

#[test]
fn a_source_that_panics_fails_its_own_requests_and_no_more() {
    let (cache, device) =
        (Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap(), Device::new(100 * PAGE));
    let panicking = Arc::new(PanickingDevice { device: Arc::clone(&device), panics: AtomicBool::new(false) });
    let file = cache.open_backend(Arc::clone(&panicking) as _).unwrap();
    panicking.panics.store(true, Ordering::Relaxed);
    // At the end the poller checks the file again.
    let error = block_on(file.read_at_async(&mut [0; 10], 100 * PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("panicked"), "{error}");
    read(&file, &device, 50 * PAGE);
    panicking.panics.store(false, Ordering::Relaxed);
    assert_eq!(block_on(file.read_at_async(&mut [0; 10], 100 * PAGE)).unwrap(), 0);
    cache.check().unwrap();
}

/// The signal mask of the thread called `name`.
fn blocked(name: &str) -> Option<u64> {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().find_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        (line("Name:")? == name).then(|| u64::from_str_radix(line("SigBlk:").unwrap(), 16).unwrap())
    })
}

#[test]
fn the_poller_takes_none_of_the_programs_signals() {
    let (cache, device) =
        (Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap(), Device::new(100 * PAGE));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    device.hold();
    let mut buffer = [0; 10];
    let mut future = pin!(file.read_at_async(&mut buffer, 0));
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let is_deaf = || blocked("quinion-poller").is_some_and(|mask| mask & 1 << (libc::SIGUSR1 - 1) != 0);
    while !is_deaf() {
        thread::yield_now(); // it has been started, and says so in a moment
    }
    device.release();
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}
