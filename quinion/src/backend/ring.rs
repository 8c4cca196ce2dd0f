//! The ring: reads by io_uring, reaped by whoever waits.
//!
//! ```text
//!   submitters --[Submit lock]--> submission queue --> kernel --> completion queue --[leader]--> fills
//! ```
//!
//! There is one leader at a time. It alone looks at the completion queue; it
//! waits in the kernel, completes what has come, and then lets go of its office
//! and wakes the room, so that one who still waits takes it over.
//!
//! No wakeup is lost. A follower goes to sleep only after it has seen, with the
//! room's door locked, that its folio is not ready and that there is a leader.
//! The leader lets go first and then, through the same door, wakes. So either
//! the follower sees that the office is vacant, or it is asleep and is woken.
//! And nobody waits in the kernel for what is already there: a new leader asks
//! `done` after it has the office, when nobody else can be completing anything.
//!
//! Invariants:
//!  1. At most `depth` requests are in flight, so no completion overflows its queue.
//!  2. No lock is held while a fill is completed.
//!  3. A request's fill, and with it its frames, lives until the kernel has answered.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use io_uring::{IoUring, opcode, types};

use crate::sync::{Rank, RankedMutex};

use super::file::{Answer, Source};
use super::{Fill, Reap, Reaped, WaitRoom};

/// `io_uring_enter` shall wait for completions.
const ENTER_GETEVENTS: u32 = 1;

pub(super) struct Ring {
    ring: IoUring,
    requests: RankedMutex<Requests>,
    leader: AtomicBool,
    in_flight: AtomicUsize,
    depth: usize,
    room: Arc<WaitRoom>,
}

/// What the kernel has been asked, by number.
#[derive(Default)]
struct Requests {
    slots: Vec<Option<Request>>,
    free: Vec<usize>,
}

struct Request {
    source: Arc<Source>,
    fill: Fill,
    done: usize,
}

impl Ring {
    /// A ring for `depth` reads at a time; an error if the system has none for us or it cannot read.
    pub(super) fn new(room: Arc<WaitRoom>, depth: u32) -> io::Result<Self> {
        let depth = depth.clamp(1, 4096).next_power_of_two();
        let ring: IoUring = IoUring::builder().dontfork().build(depth)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !ring.params().is_feature_nodrop() {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        Ok(Self {
            ring,
            requests: RankedMutex::new(Rank::Submit, Requests::default()),
            leader: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            depth: depth as usize,
            room,
        })
    }

    pub(super) fn has_room(&self, fills: usize) -> bool {
        self.in_flight.load(Ordering::Relaxed) + fills <= self.depth
    }

    pub(super) fn wants_leader(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 0 && !self.leader.load(Ordering::Relaxed)
    }

    /// Starts reading each of `fills`; waits for room in the queue where there is none.
    pub(super) fn submit(&self, source: &Arc<Source>, fills: Vec<Fill>) {
        let mut waiting: VecDeque<Request> =
            fills.into_iter().map(|fill| Request { source: Arc::clone(source), fill, done: 0 }).collect();
        while !waiting.is_empty() {
            let mut requests = self.requests.lock();
            while self.has_room(1)
                && let Some(request) = waiting.pop_front()
            {
                self.in_flight.fetch_add(1, Ordering::Relaxed);
                self.push(&mut requests, request);
            }
            self.enter_all();
            drop(requests);
            if !waiting.is_empty() {
                self.wait_for_room();
            }
        }
    }

    fn wait_for_room(&self) {
        while !self.has_room(1) {
            match self.reap(Reap::Wait, &mut || self.has_room(1)) {
                Reaped::Some(_) => {}
                Reaped::Busy | Reaped::Elsewhere => {
                    self.room.sleep(&mut || self.has_room(1) || self.wants_leader());
                }
            }
        }
    }

    /// Puts a request into the submission queue; the caller has counted it as in flight.
    fn push(&self, requests: &mut Requests, request: Request) {
        let (fill, done) = (&request.fill, request.done);
        let descriptor = types::Fd(request.source.file().as_raw_fd());
        let length = (fill.len() - done).min(1 << 30) as u32;
        // SAFETY: `done` is less than the fill's length.
        let buffer = unsafe { fill.as_ptr().add(done) };
        let entry =
            opcode::Read::new(descriptor, buffer, length).offset(fill.position() + done as u64).build();
        let number = requests.insert(request);
        // SAFETY: the lock makes us the only ones at the submission queue. The buffer is the fill's and
        // the descriptor the source's, and both live in the request until the kernel has answered.
        unsafe {
            let mut queue = self.ring.submission_shared();
            queue.push(&entry.user_data(number as u64)).expect("the queue is as deep as requests are many");
        }
    }

    /// Hands what is queued to the kernel. The caller has the lock.
    fn enter_all(&self) {
        loop {
            // SAFETY: the lock makes us the only ones at the submission queue.
            let queued = unsafe { self.ring.submission_shared().len() };
            if queued == 0 {
                return;
            }
            match self.ring.submit() {
                Ok(_) => {}
                // The kernel is short of something that its own work will give back.
                Err(error) if is_passing(&error) => std::thread::yield_now(),
                Err(error) => panic!("the kernel refuses requests of a ring it has made: {error}"),
            }
        }
    }

    /// See [`super::Backend::reap`].
    pub(super) fn reap(&self, how: Reap, done: &mut dyn FnMut() -> bool) -> Reaped {
        let Some(_office) = Office::take(self) else { return Reaped::Busy };
        loop {
            let completed = self.complete_ready();
            if completed > 0 || how == Reap::Ready || done() {
                return Reaped::Some(completed);
            }
            if self.in_flight.load(Ordering::Relaxed) == 0 {
                return Reaped::Elsewhere;
            }
            // SAFETY: submits nothing and passes no argument; it waits for one completion.
            let waited =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, ENTER_GETEVENTS, None) };
            if let Err(error) = waited
                && !is_passing(&error)
            {
                panic!("the kernel lets nobody wait at a ring it has made: {error}");
            }
        }
    }

    /// Waits until nothing is in flight.
    pub(super) fn drain(&self) {
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            if self.reap(Reap::Wait, &mut || self.in_flight.load(Ordering::Relaxed) == 0) == Reaped::Busy {
                self.room.sleep(&mut || self.wants_leader() || self.in_flight.load(Ordering::Relaxed) == 0);
            }
        }
    }

    /// Completes what the kernel has answered; returns how many fills ended. The caller leads.
    fn complete_ready(&self) -> usize {
        let mut completed = 0;
        loop {
            // SAFETY: only the leader is at the completion queue.
            let answer = unsafe { self.ring.completion_shared().next() };
            let Some(answer) = answer else { return completed };
            let result = match answer.result() {
                bytes @ 0.. => Ok(bytes as usize),
                error => Err(io::Error::from_raw_os_error(-error)),
            };
            let request = self.requests.lock().remove(answer.user_data() as usize);
            completed += usize::from(self.answer(request, result));
        }
    }

    /// Ends a request or takes it up again; whether it ended.
    fn answer(&self, mut request: Request, result: io::Result<usize>) -> bool {
        let end = match request.source.judge(result, request.done, request.fill.len()) {
            Answer::Done(bytes) => Ok(bytes),
            Answer::Failed(error) => Err(error),
            Answer::Again(done) => {
                request.done = done;
                let mut requests = self.requests.lock();
                self.push(&mut requests, request);
                self.enter_all();
                return false;
            }
        };
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        request.fill.complete(end);
        true
    }
}

impl Requests {
    fn insert(&mut self, request: Request) -> usize {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[number] = Some(request);
        number
    }
    fn remove(&mut self, number: usize) -> Request {
        self.free.push(number);
        self.slots[number].take().expect("the kernel answers what it was asked, once")
    }
}

/// Whether the call may simply be made again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// The leader's office; given up when dropped.
struct Office<'a>(&'a Ring);

impl<'a> Office<'a> {
    fn take(ring: &'a Ring) -> Option<Self> {
        // Acquire, partner: the Release in `drop`: what the last leader did at the queue is done.
        let taken = ring.leader.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then_some(Self(ring))
    }
}

impl Drop for Office<'_> {
    fn drop(&mut self) {
        // Release, partner: the Acquire in `take`.
        self.0.leader.store(false, Ordering::Release);
        self.0.room.wake();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.drain();
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        f.debug_struct("Ring")
            .field("depth", &self.depth)
            .field("in_flight", &in_flight)
            .finish_non_exhaustive()
    }
}
