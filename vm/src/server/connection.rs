//! Connection: one peer, from its greeting to its end, and whose turn it is.
//!
//! ```text
//!   Greeting --> Serving --> Over          Taken: a worker has it, or its thread; an event that comes meanwhile
//!      |            '-> Dying --^                 is noted, and done before it is put back
//!      '--> Unserved: it came when the server was about to end
//! ```
//!
//! No lock is held while a stage is worked on: it is taken out of its place, and put back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventData;

use crate::peer::Peer;
use crate::stats::RestoreCounters;
use crate::uffd::Uffd;
use crate::vm::Vm;

pub(super) struct Connection {
    pub(super) number: u64,
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) counters: Arc<Mutex<RestoreCounters>>,
    pub(super) place: Mutex<ConnectionSlot>,
}

#[derive(Default)]
pub(super) struct ConnectionSlot {
    pub(super) stage: ConnectionState,
    /// Another thread came for this while it was taken.
    pub(super) wanted: Option<Kind>,
    /// No worker takes it: it is being handed over to another server.
    pub(super) is_paused: bool,
    /// Whether `GivenUp` was reported.
    pub(super) is_given_up: bool,
    pub(super) forks: ForkState,
}

/// Forks of a VM's process that are served with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum ForkState {
    /// The process was never forked, as far as was read.
    #[default]
    None,
    /// The process was forked; some of the forks may live.
    Some,
    /// The process has ended, and forks of it live.
    Orphaned,
}

#[derive(Default)]
pub(super) enum ConnectionState {
    /// The peer's message has not come; its thread waits for that.
    Greeting { since: Instant },
    /// The VM is served.
    Serving(Box<Vm>),
    /// The peer was given up, and its process is to be no more before its descriptor is let go.
    Dying { _kept: HeldUffds },
    /// The peer handed over its memory when the server was about to end.
    Unserved(HeldUffds),
    /// A worker has it, or its thread, which has received all.
    #[default]
    Taken,
    /// The connection has ended.
    Over,
}

pub(super) enum HeldUffds {
    Vm { _vm: Box<Vm> },
    Descriptors { _uffds: Vec<Uffd> },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Listener = 0,
    Wake = 1,
    Socket = 2,
    Process = 3,
    Faults = 4,
    Clock = 5,
    /// No event: its regions have just arrived.
    Beginning = 6,
    /// No event: it has just been taken over.
    TakenOver = 7,
}

impl Kind {
    /// Whether it may be the end of the peer, which no other event tells again.
    fn is_of_end(self) -> bool {
        matches!(self, Self::Socket | Self::Process)
    }
}

const KIND_BITS: u32 = 3;

pub(super) fn token(number: u64, kind: Kind) -> EventData {
    EventData::new_u64(number << KIND_BITS | kind as u64)
}

pub(super) fn of_token(data: EventData) -> (u64, Kind) {
    let kinds = [Kind::Listener, Kind::Wake, Kind::Socket, Kind::Process, Kind::Faults, Kind::Clock];
    (data.u64() >> KIND_BITS, kinds[(data.u64() & ((1 << KIND_BITS) - 1)) as usize])
}

impl Connection {
    pub(super) fn place(&self) -> MutexGuard<'_, ConnectionSlot> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn counted(&self) -> RestoreCounters {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn end(&self) -> (&Peer, BorrowedFd<'_>) {
        (&self.peer, self.socket.as_fd())
    }

    /// Takes the state for the calling worker; `None`, with the event noted, if another thread has it.
    pub(super) fn take(&self, kind: Kind) -> Option<ConnectionState> {
        let mut place = self.place();
        if place.is_paused {
            // Other events are dropped: when serving resumes, a worker looks at the VM in any case.
            if kind.is_of_end() {
                place.wanted = Some(kind);
            }
            return None;
        }
        match std::mem::replace(&mut place.stage, ConnectionState::Taken) {
            ConnectionState::Taken => {
                // An event that may be the end is not replaced: after any event, faults are looked for.
                if !place.wanted.is_some_and(Kind::is_of_end) {
                    place.wanted = Some(kind);
                }
                None
            }
            ConnectionState::Over => {
                place.stage = ConnectionState::Over;
                None
            }
            // The thread that receives the greeting has it; no worker takes it.
            greeting @ ConnectionState::Greeting { .. } => {
                place.stage = greeting;
                None
            }
            stage => Some(stage),
        }
    }

    pub(super) fn forks(&self) -> ForkState {
        self.place().forks
    }

    pub(super) fn note_fork(&self) {
        let mut place = self.place();
        if place.forks == ForkState::None {
            place.forks = ForkState::Some; // an orphan's fork is one, too
        }
    }

    pub(super) fn set_orphaned(&self) {
        self.place().forks = ForkState::Orphaned;
    }

    pub(super) fn may_greet(&self) -> bool {
        self.greets_since().is_some()
    }

    /// When it was accepted, if its message has not come.
    pub(super) fn greets_since(&self) -> Option<Instant> {
        match self.place().stage {
            ConnectionState::Greeting { since } => Some(since),
            _ => None,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        matches!(self.place().stage, ConnectionState::Greeting { .. } | ConnectionState::Taken)
    }

    /// Takes the connection of a peer that has greeted for the caller; `false` if it is over.
    pub(super) fn begin(&self) -> bool {
        self.take_if(|stage| matches!(stage, ConnectionState::Greeting { .. })).is_some()
    }

    /// Takes the state if `is_so` says yes to it; it must not say so to [`ConnectionState::Taken`].
    pub(super) fn take_if(&self, is_so: impl FnOnce(&ConnectionState) -> bool) -> Option<ConnectionState> {
        let mut place = self.place();
        is_so(&place.stage).then(|| std::mem::replace(&mut place.stage, ConnectionState::Taken))
    }

    /// Takes the connection of a peer that greets and was accepted so long ago. It has been no VM, also if its end is
    /// noticed before it is refused.
    pub(super) fn take_late(&self, late_after: Duration) -> bool {
        let mut place = self.place();
        let is_late =
            matches!(place.stage, ConnectionState::Greeting { since } if since.elapsed() >= late_after);
        if is_late {
            (place.stage, place.is_given_up) = (ConnectionState::Taken, true);
        }
        is_late
    }

    /// Sets whether workers leave the connection alone, as while it is handed over to another server.
    pub(super) fn pause(&self, is_paused: bool) {
        self.place().is_paused = is_paused;
    }

    /// Puts the state back, or returns it with an event that came meanwhile; drops it if the connection has ended.
    pub(super) fn put_back(&self, stage: ConnectionState) -> Option<(ConnectionState, Kind)> {
        let mut place = self.place();
        if matches!(place.stage, ConnectionState::Over) {
            return None;
        }
        let is_paused = place.is_paused;
        if let Some(kind) = place.wanted.take_if(|_| !is_paused) {
            return Some((stage, kind));
        }
        place.stage = stage;
        None
    }
}
