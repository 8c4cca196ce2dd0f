//! Viewer slot: the owner's notes of one viewer, which has one slot and one page. (A slot of that page in which a
//! request stands is a *request slot*.)
//!
//! The page is the viewer's, and may say anything; the owner's notes are here, under the slot's lock: a handle or a
//! request counts if it is in them.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::peer_connection::{HELLO_MAX, PeerConnection};
use super::totals::ViewerTotals;
use crate::sys::domain::Member;
pub(super) use crate::sys::processes::has_ended;
use quinion::internals::arena::control::{Operation, REQUEST_SLOTS};
use quinion::internals::folio::KeptMemory;
use quinion::internals::sys::peer::ProcessName;

#[derive(Debug, Default)]
pub(super) struct ViewerSlot {
    pub(super) process: Option<Process>,
    pub(super) handles: HashMap<u64, Handle>,
    /// How far its ring of read pages was looked at.
    pub(super) tail: u32,
    pub(super) busy: u32,
    /// The job that a worker does for each request slot, whatever the page says.
    pub(super) jobs: [Option<RunningJob>; REQUEST_SLOTS],
    /// Waits in vain for its workers.
    pub(super) delays: u32,
    /// Offers that were sent and not requested yet, by ticket.
    pub(super) offers: HashMap<u32, Offer>,
    pub(super) pins: HashMap<u64, PinnedRange>,
    pub(super) last_ticket: u32,
    pub(super) is_replaced: bool,
    pub(super) exec_checks: Option<ExecCheckTimes>,
    /// Sums of former viewers, by run; stays when the viewer goes.
    pub(super) past: BTreeMap<u64, ViewerTotals>,
}

impl ViewerSlot {
    pub(super) fn take_late_offers(&mut self) -> Vec<Offer> {
        if self.offers.is_empty() {
            return Vec::new();
        }
        let late = self.offers.extract_if(|_, offer| offer.connection.since.elapsed() > HELLO_MAX);
        late.map(|(_, offer)| offer).collect()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_replaced || self.process.as_ref().is_some_and(|process| has_ended(&process.alive))
    }

    /// The process, if its page says that it has become another program, or is about to, and it is time to look.
    pub(super) fn process_to_check(&mut self, execs: u64) -> Option<Process> {
        if execs == 0 {
            self.exec_checks = None;
            return None;
        }
        let checks = self.exec_checks.get_or_insert_with(ExecCheckTimes::begin);
        if checks.due > Instant::now() {
            return None;
        }
        checks.pause = (2 * checks.pause).min(EXEC_CHECK_PAUSE_MAX);
        checks.due = Instant::now() + checks.pause;
        self.process.clone().filter(|_| !self.is_replaced)
    }

    /// Notes that `process`, if it has the slot, has become another program: the slot is over.
    pub(super) fn note_replaced(&mut self, process: &Process) {
        let is_its = |known: &Process| Arc::ptr_eq(&known.alive, &process.alive);
        self.is_replaced |= self.process.as_ref().is_some_and(is_its);
    }

    pub(super) fn remove_handle(&mut self, handle: u64) -> Option<Handle> {
        self.pins.retain(|_, pin| pin.handle != handle);
        self.handles.remove(&handle)
    }

    pub(super) fn has_pins_of(&self, number: u32) -> bool {
        let lives = |process: &Process| process.number == number && !has_ended(&process.alive);
        !self.pins.is_empty() && self.process.as_ref().is_some_and(lives)
    }

    /// Forgets the pins. Returns their handles if the process lives: it may look at the bytes still.
    pub(super) fn take_pinned_handles(&mut self) -> Vec<u64> {
        let pins = std::mem::take(&mut self.pins);
        if self.process.as_ref().is_none_or(|process| has_ended(&process.alive)) {
            return Vec::new();
        }
        let mut handles: Vec<u64> = pins.into_values().map(|pin| pin.handle).collect();
        handles.sort_unstable();
        handles.dedup();
        handles
    }

    /// The memory that its pins keep with one more, in bytes, or more: a folio counts for each pin that has it whole,
    /// and once for those that have parts of it.
    pub(super) fn kept_bytes_with(&self, more: &KeptMemory) -> u64 {
        KeptMemory::sum_bytes(self.pins.values().map(|pin| &pin.kept).chain([more]))
    }
}

/// From the first mark of an exec to the first look: most programs join anew long before.
const EXEC_CHECK_AFTER: Duration = Duration::from_secs(1);
/// A mark may stay, of a child that had its parent's memory. Then the pauses grow up to this.
const EXEC_CHECK_PAUSE_MAX: Duration = Duration::from_secs(64);

/// When it is time to look whether the process has become another program.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExecCheckTimes {
    due: Instant,
    pause: Duration,
}

impl ExecCheckTimes {
    fn begin() -> Self {
        Self { due: Instant::now() + EXEC_CHECK_AFTER, pause: EXEC_CHECK_AFTER }
    }
}

#[derive(Clone, Debug)]
pub(super) struct PinnedRange {
    pub(super) handle: u64,
    pub(super) kept: KeptMemory,
}

#[derive(Debug)]
pub(super) struct Offer {
    /// The descriptor lies in it, if there is one.
    pub(super) connection: PeerConnection,
    pub(super) has_descriptor: bool,
    pub(super) name: Option<Box<[u8]>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RunningJob {
    pub(super) operation: u32,
    pub(super) number: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) number: u32,
    pub(super) name: ProcessName,
    /// Tells when it has ended, and names it and no other.
    pub(super) alive: Arc<OwnedFd>,
    pub(super) member: Arc<Member>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    pub(super) place: usize,
    pub(super) device: u64,
}

pub(super) struct ViewerJob {
    pub(super) viewer: usize,
    pub(super) request_slot: usize,
    pub(super) process: Process,
    pub(super) operation: u32,
    pub(super) arguments: [u64; 3],
    pub(super) attended: bool,
}

impl ViewerJob {
    /// The device of which the owner must be told, however late; `None`: the request may be refused, since the kernel
    /// has writers wait for a lease.
    pub(super) fn device_to_notify(&self) -> Option<u64> {
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        let [device, _, third] = self.arguments;
        match self.operation {
            WRITER_OPENED if third != 0 => Some(device),
            LET_GO => Some(device),
            _ => None,
        }
    }
}
