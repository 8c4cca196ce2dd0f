//! Fake kernel: a kernel for the tests of the ring, with every right that the real one has.
//!
//! It takes entries in their order, but fewer at a time than it was told of; it frees their places in the queue
//! only when it leaves; it completes some at once, while it still takes others, and the rest late and in any order,
//! whole, short or with an error. A wait may end early. In the end it may refuse, one caller more than another.
//!
//! ```text
//!   push --> unread: [taken, taken | told of, told of | ..]     enter: takes, one caller at a time
//!                      `- their places are free when that caller leaves
//!   in_flight --any order, by a thread of its own--> arrived --> drain
//! ```
//!
//! It watches its users: no push without a free place, no wait that nothing can end.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use super::doubles::Request;
use super::open_file::OpenFile;
use super::ring::{Kernel, LARGE_SHARE, PLACES_PER_PART, RingDriver, RingParts};
use super::work::Work;
use super::{Attributes, Backend, Fill, ReapMode, ReapOutcome, WaitQueue};
use crate::sys::ring::{
    Completion, CompletionWait, EnterRefused, Entries, Request as KernelRequest, RequestBuffer, SENT_AT_ONCE,
};
use crate::units::PAGE_SIZE;

/// Bytes of the file that may be asked for; it is longer than that.
const PAGES: u64 = 300;

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

#[derive(Debug)]
struct FakeKernelState {
    places: usize,
    unread: Mutex<VecDeque<Entry>>,
    taking: Mutex<()>,
    requests: Mutex<FakeRequests>,
    changed: Condvar,
    dice: AtomicU64,
    refuses: AtomicBool,
    /// Whether all reads are large ones, which are not to be merged.
    reads_are_large: bool,
}

#[derive(Debug, Default)]
struct FakeRequests {
    in_flight: Vec<Entry>,
    completed: Vec<Completion>,
    is_over: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry(KernelRequest);

// SAFETY: the buffer is this request's alone until it has arrived: the promise of `Kernel::push`.
unsafe impl Send for Entry {}

impl FakeKernelState {
    fn roll(&self, sides: u64) -> u64 {
        let mut x = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) % sides
    }

    fn delay(&self) {
        for _ in 0..self.roll(6).saturating_sub(2) {
            thread::yield_now();
        }
    }

    fn serve(&self, Entry(request): Entry) -> Completion {
        let RequestBuffer::Into(buffer) = request.buffer else { unreachable!("no test writes here") };
        let len = request.len as usize;
        let result = match self.roll(16) {
            0 => -[libc::EAGAIN, libc::EINTR, libc::ECANCELED][self.roll(3) as usize],
            1 if self.roll(4) == 0 => -libc::EIO,
            2 | 3 => ((self.roll(len as u64 / 512) + 1) * 512) as i32,
            _ => len as i32,
        };
        let came = usize::try_from(result).unwrap_or(0);
        let bytes: Vec<u8> =
            (0..len).map(|at| if at < came { byte(request.position + at as u64) } else { 0xbd }).collect();
        // SAFETY: the promise of `Kernel::push`: valid for `len` bytes, and used by no one else, until it completes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer, came) };
        Completion { key: request.key, result }
    }

    fn complete(&self, completed: Completion) {
        self.requests.lock().unwrap().completed.push(completed);
        self.changed.notify_all();
    }

    /// The device's life: one of those that complete_requests, whichever it likes, after a while.
    fn complete_requests(&self) {
        loop {
            let mut requests = self.requests.lock().unwrap();
            while requests.in_flight.is_empty() {
                if requests.is_over {
                    return;
                }
                requests = self.changed.wait(requests).unwrap();
            }
            let which = self.roll(requests.in_flight.len() as u64) as usize;
            let entry = requests.in_flight[which];
            drop(requests);
            self.delay();
            let completed = self.serve(entry);
            let mut requests = self.requests.lock().unwrap();
            requests.in_flight.swap_remove(which); // others only push
            requests.completed.push(completed);
            drop(requests);
            self.changed.notify_all();
        }
    }

    /// Takes so many of the oldest entries; their places are free at the end.
    fn take(&self, entries: usize) {
        for at in 0..entries {
            let entry = self.unread.lock().unwrap()[at];
            if self.roll(3) == 0 {
                self.complete(self.serve(entry));
            } else {
                self.requests.lock().unwrap().in_flight.push(entry);
                self.changed.notify_all();
            }
            self.delay();
        }
        self.unread.lock().unwrap().drain(..entries);
    }

    /// One system call: how many entries it took.
    fn call(&self, entries: usize) -> io::Result<usize> {
        assert!(entries <= SENT_AT_ONCE || !self.reads_are_large, "the kernel would merge large reads");
        let _taking = self.taking.lock().unwrap();
        if self.refuses.load(Ordering::Relaxed) && self.roll(4) == 0 {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        let some = if self.roll(4) == 0 { self.roll(entries as u64 + 1) as usize } else { entries };
        self.take(some);
        Ok(some)
    }

    fn wait(&self) {
        let mut requests = self.requests.lock().unwrap();
        assert!(requests.in_flight.len() + requests.completed.len() > 0, "a leader waits for nothing");
        if self.roll(8) == 0 {
            return; // a signal
        }
        while requests.completed.is_empty() {
            requests = self.changed.wait(requests).unwrap();
        }
    }
}

#[derive(Debug)]
struct FakeKernel;

impl Kernel for FakeKernel {
    type Submit = Arc<FakeKernelState>;
    type Gate = Arc<FakeKernelState>;
    type Reap = Arc<FakeKernelState>;

    fn submit_places(half: &Arc<FakeKernelState>) -> usize {
        half.places
    }
    fn reap_places(half: &Arc<FakeKernelState>) -> usize {
        2 * half.places
    }
    fn queued(half: &mut Arc<FakeKernelState>) -> usize {
        half.unread.lock().unwrap().len()
    }
    unsafe fn push(half: &mut Arc<FakeKernelState>, _: BorrowedFd<'_>, request: KernelRequest) {
        let mut unread = half.unread.lock().unwrap();
        assert!(unread.len() < half.places, "no more are pushed than fit");
        unread.push_back(Entry(request));
    }
    fn enter(
        gate: &Arc<FakeKernelState>,
        entries: Entries,
        wait: CompletionWait,
    ) -> Result<(), EnterRefused> {
        let mut left = entries.count;
        gate.delay();
        while left > 0 {
            left -= gate.call(left.min(entries.at_a_time)).map_err(|error| EnterRefused { left, error })?;
        }
        match wait {
            CompletionWait::AwaitedFor(_) => gate.wait(),
            CompletionWait::NotAwaited => gate.delay(),
        }
        Ok(())
    }
    fn drain(half: &mut Arc<FakeKernelState>, completed: &mut Vec<Completion>) {
        let mut requests = half.requests.lock().unwrap();
        assert!(requests.completed.len() <= 2 * half.places, "no more complete than fit");
        let count = half.roll(requests.completed.len() as u64 + 1) as usize;
        let at_least_one = count.max(usize::from(!requests.completed.is_empty()));
        completed.extend(requests.completed.drain(..at_least_one));
    }
}

#[derive(Debug)]
struct RingFixture {
    driver: RingDriver<FakeKernel>,
    kernel_state: Arc<FakeKernelState>,
    file: Arc<OpenFile>,
    wait_queue: Arc<WaitQueue>,
    /// Fills that any thread may wait for.
    deferred: Mutex<Vec<PendingFill>>,
}

impl Backend for RingFixture {
    fn name(&self) -> &'static str {
        "fixture"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        unreachable!("no test opens it")
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.driver.submit(&self.file, fills.into_iter().map(Work::Fill));
    }
    fn submit_with_reap(&self, fills: Vec<Fill>) {
        self.driver.submit_with_reap(&self.file, fills.into_iter().map(Work::Fill));
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.driver.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.driver.wants_leader()
    }
}

impl RingFixture {
    fn new(seed: u64, places: usize, queue_depth: usize) -> Self {
        let kernel_state = Arc::new(FakeKernelState {
            places,
            unread: Mutex::default(),
            taking: Mutex::default(),
            requests: Mutex::default(),
            changed: Condvar::new(),
            dice: AtomicU64::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d)),
            refuses: AtomicBool::new(false),
            reads_are_large: part_pages(seed) <= LARGE_SHARE,
        });
        let wait_queue = Arc::new(WaitQueue::new());
        let [half, gate, reap] = [(); 3].map(|()| Arc::clone(&kernel_state));
        let driver = RingDriver::over(
            Arc::clone(&wait_queue),
            RingParts { half, gate, reap },
            queue_depth,
            part_pages(seed) * PAGE_SIZE,
        );
        // The driver asks it for its size and alignment; its bytes come from elsewhere.
        let file = Arc::new(OpenFile::open(&std::env::current_exe().unwrap()).unwrap());
        Self { driver, kernel_state, file, wait_queue, deferred: Mutex::default() }
    }

    fn fill(&self) -> (Fill, PendingFill) {
        let page = self.kernel_state.roll(PAGES - 12);
        let (fill, request) = Request::new(&self.wait_queue, page, self.kernel_state.roll(12) as u32 + 1);
        (fill, PendingFill { page, request })
    }

    /// Whether it brought the file's bytes, and not an error that there was.
    fn check_fill(&self, asked: &PendingFill) -> bool {
        match asked.request.wait(self) {
            Ok(bytes) => {
                let from = asked.page * PAGE_SIZE as u64;
                let is_right = bytes.iter().zip(from..).all(|(&got, at)| got == byte(at));
                assert!(!bytes.is_empty() && is_right, "wrong bytes from page {}", asked.page);
                true
            }
            Err(error) => {
                let code = error.raw_os_error();
                assert!(code == Some(libc::EIO) || code == Some(libc::EPERM), "{error}");
                false
            }
        }
    }

    /// Submits for others, who may wait before it has: it is on the deferred first.
    fn submit_for_others(&self) {
        let (fills, asked): (Vec<_>, Vec<_>) =
            (0..self.kernel_state.roll(5) + 1).map(|_| self.fill()).unzip();
        self.deferred.lock().unwrap().extend(asked);
        self.kernel_state.delay();
        self.submit(fills);
    }

    fn wait_for_another(&self) -> Option<bool> {
        let asked = self.deferred.lock().unwrap().pop()?;
        Some(self.check_fill(&asked))
    }

    fn ask(&self, steps: u64) {
        for _ in 0..steps {
            self.submit_for_others();
            self.kernel_state.delay();
        }
    }

    fn read(&self, steps: u64) -> u64 {
        let mut good = 0;
        for _ in 0..steps {
            let went_well = match self.kernel_state.roll(8) {
                0..3 => {
                    let (fill, asked) = self.fill();
                    self.submit_with_reap(vec![fill]);
                    self.check_fill(&asked)
                }
                3 => {
                    let (fill, asked) = self.fill();
                    self.submit(vec![fill]);
                    self.check_fill(&asked)
                }
                4 => {
                    self.submit_for_others();
                    false
                }
                5 => {
                    self.reap(ReapMode::Ready, &mut || false);
                    false
                }
                _ => self.wait_for_another() == Some(true),
            };
            good += u64::from(went_well);
        }
        good
    }
}

#[derive(Debug)]
struct PendingFill {
    page: u64,
    request: Arc<Request>,
}

/// Pages of the largest request: so few that each read is a large one, or so many that few are.
fn part_pages(seed: u64) -> usize {
    if seed.is_multiple_of(2) { 2 } else { 16 }
}

fn run(seed: u64, refuses: bool) -> u64 {
    let depth = 1 + seed as usize % 5;
    let fixture = RingFixture::new(seed, (depth * PLACES_PER_PART).next_power_of_two(), depth);
    let (readers, steps) = (2 + seed % 4, 40);
    let good = thread::scope(|scope| {
        let device = scope.spawn(|| fixture.kernel_state.complete_requests());
        let asking = scope.spawn(|| fixture.ask(steps / 2));
        let reading: Vec<_> = (0..readers).map(|_| scope.spawn(|| fixture.read(steps))).collect();
        if refuses {
            (0..fixture.kernel_state.roll(200)).for_each(|_| thread::yield_now());
            fixture.kernel_state.refuses.store(true, Ordering::Relaxed);
        }
        let mut good = 0;
        while !asking.is_finished() {
            match fixture.wait_for_another() {
                Some(went_well) => good += u64::from(went_well),
                None => thread::yield_now(),
            }
        }
        good += reading.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>();
        good += std::iter::from_fn(|| fixture.wait_for_another()).map(u64::from).sum::<u64>();
        fixture.driver.drain();
        fixture.kernel_state.requests.lock().unwrap().is_over = true;
        fixture.kernel_state.changed.notify_all();
        device.join().unwrap();
        good
    });
    fixture.driver.check_idle();
    let requests = fixture.kernel_state.requests.lock().unwrap();
    assert_eq!((requests.in_flight.len(), requests.completed.len()), (0, 0));
    good
}

fn storm(refuses: bool) {
    let runs = if std::env::var_os("QUINION_SOAK").is_some() { 20_000 } else { 150 };
    let mut good = 0;
    for seed in 0..runs {
        let (tell, told) = mpsc::channel();
        let running = thread::spawn(move || tell.send(run(seed, refuses)));
        match told.recv_timeout(Duration::from_secs(300)) {
            Ok(fills) => good += fills,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {seed}: a thread waits for ever"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                panic!("seed {seed}: {:?}", running.join().map(drop))
            }
        }
    }
    assert!(good > runs, "hardly anything was read, and this shows nothing");
}

#[test]
fn every_fill_ends_once_and_rightly_under_any_answers_of_the_kernel() {
    storm(false);
}

#[test]
fn every_fill_ends_once_also_if_the_kernel_refuses_some_day() {
    storm(true);
}
