//! Health: whether the disk is used, and when one that failed or hung is used again.
//!
//! ```text
//!   used --refuses, or no answer for a while--> off --all answered, and a rest is over--> used
//! ```
//!
//! To use a disk again cannot be wrong, for each page is compared with its checksum: one that was busy, or was reset,
//! serves as before, and one that is broken fails again. Each failure makes readers wait, so the rests grow: a minute,
//! and twice as long each time, up to an hour. They begin anew with a disk that was used for longer than its last rest.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::DiskTrouble;
use crate::reads::{READ_ERRORS_MAX, lock};

const DOUBLINGS_MAX: u32 = 6;

/// A device that counts the requests it has not answered.
#[derive(Debug)]
pub struct WatchedDevice {
    device: Arc<dyn Device>,
    unanswered: AtomicU64,
}

/// A request, which is answered when this is dropped, also by a panic of the device.
struct Request<'d>(&'d WatchedDevice);

impl WatchedDevice {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, unanswered: AtomicU64::new(0) }
    }

    /// Whether the device has answered all requests. A hint: others may come meanwhile.
    pub fn has_answered(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) == 0
    }

    fn request(&self) -> Request<'_> {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        Request(self)
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.0.unanswered.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device for WatchedDevice {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let _request = self.request();
        self.device.read_at(buffer, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let _request = self.request();
        self.device.write_at(bytes, offset)
    }
    fn sync(&self) -> io::Result<()> {
        let _request = self.request();
        self.device.sync()
    }
}

#[derive(Debug)]
pub struct Health {
    /// `state` has a trouble. A hint: no bytes depend on it.
    is_off: AtomicBool,
    state: Mutex<HealthState>,
    rest_min: Duration,
}

#[derive(Debug)]
struct HealthState {
    trouble: Option<DiskTrouble>,
    /// When the disk was used, or was left alone, for the first time since it last changed.
    since: Instant,
    rest: Duration,
    /// Since the disk is used.
    refused_reads: u64,
}

impl Health {
    /// A disk that is used, and rests for `rest_min` at first.
    pub fn new(rest_min: Duration) -> Self {
        let state =
            HealthState { trouble: None, since: Instant::now(), rest: Duration::ZERO, refused_reads: 0 };
        Self { is_off: AtomicBool::new(false), state: Mutex::new(state), rest_min }
    }

    /// Whether the disk is to be left alone. It is used again from here on if it `has_answered` and its rest is over.
    pub fn is_off(&self, has_answered: impl FnOnce() -> bool) -> bool {
        self.is_off.load(Ordering::Relaxed) && !self.is_used_again(has_answered)
    }

    #[cold]
    fn is_used_again(&self, has_answered: impl FnOnce() -> bool) -> bool {
        let mut state = lock(&self.state);
        if state.trouble.is_some() && state.since.elapsed() >= state.rest && has_answered() {
            (state.trouble, state.since, state.refused_reads) = (None, Instant::now(), 0);
            self.is_off.store(false, Ordering::Relaxed);
        }
        state.trouble.is_none()
    }

    pub fn trouble(&self) -> Option<DiskTrouble> {
        lock(&self.state).trouble.clone()
    }

    /// Leaves the disk alone. Whether it was used before.
    pub fn leave_alone(&self, action: &'static str, error: &io::Error) -> bool {
        let mut state = lock(&self.state);
        let was_used = state.trouble.is_none();
        if was_used {
            let is_well = state.since.elapsed() > state.rest;
            let longer = (state.rest * 2).min(self.rest_min * (1 << DOUBLINGS_MAX));
            state.rest = if is_well { self.rest_min } else { longer };
            (state.trouble, state.since) =
                (Some(DiskTrouble { action, error: error.to_string() }), Instant::now());
            self.is_off.store(true, Ordering::Relaxed);
        }
        was_used
    }

    /// Notes a read that the disk refused. Whether these are too many to go on.
    pub fn note_refused_read(&self) -> bool {
        let mut state = lock(&self.state);
        state.refused_reads += 1;
        state.refused_reads >= READ_ERRORS_MAX
    }
}
