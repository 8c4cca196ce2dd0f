//! Health: whether the disk is used, and when one that hung is used again.
//!
//! ```text
//!   used --refuses--------------> off, for good
//!     | ^
//!     | +---- all requests answered, and a rest is over: a minute, twice as long each time, up to an hour ----+
//!     +--no answer for a while--> off ------------------------------------------------------------------------+
//! ```
//!
//! A disk that refuses requests is broken. One that answers late may have been busy: with a sync behind the writes of
//! other programs, with a reset. To use it again cannot be wrong, for each page is compared with its checksum; but each
//! silence makes readers wait, so the rests grow.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::DiskTrouble;
use crate::reads::lock;

/// The rest after a silence doubles so often.
const DOUBLINGS: u32 = 6;

/// A device that counts the requests it has not answered.
#[derive(Debug)]
pub struct WatchedDevice {
    device: Arc<dyn Device>,
    unanswered: AtomicU64,
}

/// One request; it is answered at the end of this, also by a panic of the device.
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

/// Whether a disk is used.
#[derive(Debug)]
pub struct Health {
    /// `state` has a trouble. A hint for those who use the disk: no bytes depend on it.
    is_off: AtomicBool,
    state: Mutex<HealthState>,
    rest: Duration,
}

#[derive(Default, Debug)]
struct HealthState {
    trouble: Option<DiskTrouble>,
    /// When a disk that hung may be used again, if it has answered by then.
    rested_at: Option<Instant>,
    silences: u32,
}

impl Health {
    /// A disk that is used. `rest` is how long it is left alone after its first silence.
    pub fn new(rest: Duration) -> Self {
        Self { is_off: AtomicBool::new(false), state: Mutex::default(), rest }
    }

    /// Whether the disk is to be left alone. One that hung is used again from here on, if it `has_answered` and its
    /// rest is over.
    pub fn is_off(&self, has_answered: impl FnOnce() -> bool) -> bool {
        self.is_off.load(Ordering::Relaxed) && !self.is_used_again(has_answered)
    }

    #[cold]
    fn is_used_again(&self, has_answered: impl FnOnce() -> bool) -> bool {
        let mut state = lock(&self.state);
        let is_rested = state.rested_at.is_some_and(|rested_at| Instant::now() >= rested_at);
        if is_rested && has_answered() {
            (state.trouble, state.rested_at) = (None, None);
            self.is_off.store(false, Ordering::Relaxed);
        }
        state.trouble.is_none()
    }

    pub fn trouble(&self) -> Option<DiskTrouble> {
        lock(&self.state).trouble.clone()
    }

    /// The disk refused `action`: it is off from now on. Whether it was used before.
    pub fn note_refusal(&self, action: &'static str, error: &io::Error) -> bool {
        self.note(DiskTrouble { action, error: error.to_string(), is_silence: false })
    }

    /// The disk did not answer: it is off for a while. Whether it was used before.
    pub fn note_silence(&self, action: &'static str, error: &io::Error) -> bool {
        self.note(DiskTrouble { action, error: error.to_string(), is_silence: true })
    }

    fn note(&self, trouble: DiskTrouble) -> bool {
        let mut state = lock(&self.state);
        let was_used = state.trouble.is_none();
        if !trouble.is_silence {
            // Also after a silence: its late answer may be a refusal.
            (state.trouble, state.rested_at) = (Some(trouble), None);
        } else if was_used {
            let rest = self.rest * (1 << state.silences.min(DOUBLINGS));
            state.silences = state.silences.saturating_add(1);
            (state.trouble, state.rested_at) = (Some(trouble), Some(Instant::now() + rest));
        }
        self.is_off.store(true, Ordering::Relaxed);
        was_used
    }
}
