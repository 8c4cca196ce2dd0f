//! Viewer slot: what the owner notes of one viewer, which has one seat and one page.
//!
//! The page is the viewer's, and may say anything; what is noted here is in the owner's memory, under the seat's lock.
//! So a handle counts if it is in this list, and a request is under way if a worker has noted it here.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::peer_connection::{HELLO_MAX, PeerConnection};
use super::totals::ViewerTotals;
use crate::arena::control::{Operation, REQUEST_SLOTS};
use crate::sys::domain::Member;
use crate::sys::peer::ProcessName;

/// What the owner knows of the viewer that has one page.
#[derive(Debug, Default)]
pub(super) struct ViewerSlot {
    /// The process; `None` if the seat is free.
    pub(super) process: Option<Process>,
    /// What it has attached.
    pub(super) handles: HashMap<u64, Handle>,
    /// How far its ring of what it read has been looked at.
    pub(super) tail: u32,
    /// Workers that are at work for it.
    pub(super) busy: u32,
    /// For each of its slots what the worker is at that took it: not what the page says.
    pub(super) jobs: [Option<RunningJob>; REQUEST_SLOTS],
    /// How often a thread waited in vain for what workers are at for it.
    pub(super) delays: u32,
    /// What it has sent and not asked for, by ticket; the last ticket.
    pub(super) offers: HashMap<u32, Offer>,
    /// What it has pinned, by the owner's number.
    pub(super) pins: HashMap<u64, PinnedRange>,
    pub(super) last_ticket: u32,
    /// Whether the process has joined anew since, as another program.
    pub(super) is_replaced: bool,
    /// Sums of the viewers that had the page and are no more, by run; stays when the viewer goes.
    pub(super) past: BTreeMap<u64, ViewerTotals>,
}

impl ViewerSlot {
    /// What it has sent and did not ask for.
    pub(super) fn take_late_offers(&mut self) -> Vec<Offer> {
        if self.offers.is_empty() {
            return Vec::new();
        }
        let late = self.offers.extract_if(|_, offer| offer.theirs.since.elapsed() > HELLO_MAX);
        late.map(|(_, offer)| offer).collect()
    }

    /// Whether it is of a viewer that is no more.
    pub(super) fn is_over(&self) -> bool {
        self.is_replaced || self.process.as_ref().is_some_and(|process| has_ended(&process.alive))
    }

    /// Forgets a handle, and its pins with it, which the owner lets go with the handle.
    pub(super) fn remove_handle(&mut self, handle: u64) -> Option<Handle> {
        self.pins.retain(|_, pin| pin.handle != handle);
        self.handles.remove(&handle)
    }

    /// Whether the process of that number has pinned something here, and lives.
    pub(super) fn has_pins_of(&self, number: u32) -> bool {
        let lives = |process: &Process| process.number == number && !has_ended(&process.alive);
        !self.pins.is_empty() && self.process.as_ref().is_some_and(lives)
    }

    /// The handles with pins whose viewer may look at them still; the pins are forgotten.
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

    /// Bytes of all that it has pinned.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pins.values().map(|pin| pin.bytes).sum()
    }
}

/// A range that a viewer has pinned.
#[derive(Clone, Copy, Debug)]
pub(super) struct PinnedRange {
    pub(super) handle: u64,
    pub(super) bytes: u64,
}

/// What a viewer has sent.
#[derive(Debug)]
pub(super) struct Offer {
    /// A descriptor lies in it, unless there is a name.
    pub(super) theirs: PeerConnection,
    pub(super) name: Option<Box<[u8]>>,
}

/// What a worker is at.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningJob {
    pub(super) operation: u32,
    /// The later it began the larger.
    pub(super) number: u64,
}

/// A process that has joined.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) number: u32,
    pub(super) name: ProcessName,
    /// Tells when it has ended, and names it and no other.
    pub(super) alive: Arc<OwnedFd>,
    /// Asks whether it still is of our domain.
    pub(super) member: Arc<Member>,
}

/// A file that a viewer has attached.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    /// Its place among all that are attached.
    pub(super) place: usize,
    /// The device it lies on.
    pub(super) device: u64,
}

/// A request that a worker has taken.
pub(super) struct ViewerJob {
    pub(super) viewer: usize,
    pub(super) slot: usize,
    pub(super) process: Process,
    pub(super) operation: u32,
    pub(super) arguments: [u64; 3],
    pub(super) attended: bool,
}

impl ViewerJob {
    /// The device of which something is said here that the owner must hear of, however late; `None` if the request may
    /// be refused: the kernel has a writer wait for a lease, and a file that stays open a while longer is no harm.
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

/// Whether the process has ended that this is a descriptor of.
pub(super) fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}
