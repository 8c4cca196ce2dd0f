//! Turns: what a worker does for a connection when something has happened to it.
//!
//! ```text
//!   event --> take its stage, or note that it is wanted --> one step --> put it back --wanted meanwhile?--> once more
//!                                                              '--wrong, or a panic--> given up (`ends.rs`)
//! ```
//!
//! **Forks.** A VM's process that was forked may end before its forks, whose memory would then read as zeros. So the VM
//! is served until the last of them has ended; they are looked at now and then, since the kernel tells of no fork's
//! end. A fork that no worker has noted when its process's end is noticed is not served: microseconds lie between the
//! read of the event, before which no fork runs, and its note.
//!
//! A step that begins a VM has its spaces watched; one that serves it looks for faults in all of them, whatever event
//! it was, and has them told once more.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};

use super::connection::{Connection, ConnectionState, ForkState, Kind, token};
use super::{FORKS_CHECK, ONCE, READ_CHECK, SOON, Shared};
use crate::message::ready;
use crate::peer::send_message;
use crate::takeover::SPACES_MAX;
use crate::vm::{NextWait, Space, Vm, VmShared};
use crate::{Event, Fill, PeerError};
use quinion::Error;
use quinion::internals::sync::contained;
use quinion::internals::units::PAGE_SIZE;

/// Pages that cannot be read and are reported, in a second.
const POISONED_EACH_SECOND: u32 = 10;

/// How many such pages were reported in the second that began then.
#[derive(Debug, Default)]
pub(super) struct PoisonedQuota {
    since: Option<Instant>,
    reported: u32,
}

impl PoisonedQuota {
    /// Whether one more may be reported.
    fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            *self = Self { since: Some(now), reported: 0 };
        }
        self.reported += 1;
        self.reported <= POISONED_EACH_SECOND
    }
}

fn is_peers_end(connection: &Connection, kind: Kind) -> bool {
    kind == Kind::Process || (kind == Kind::Socket && connection.peer.alive().is_none())
}

impl Shared {
    pub(super) fn attend(&self, number: u64, kind: Kind) {
        let Some(connection) = self.table().connections.get(&number).cloned() else { return };
        if kind == Kind::Process && connection.forks() == ForkState::None {
            return self.end_connection(&connection);
        }
        if let Some(stage) = connection.take(kind) {
            self.work_on(&connection, stage, kind);
        }
    }

    /// Puts a stage back, unless something was wanted of it meanwhile; then that is done first.
    pub(super) fn settle(&self, connection: &Connection, stage: ConnectionState) {
        if let Some((stage, kind)) = connection.put_back(stage) {
            self.work_on_for_workers(connection, stage, kind);
        }
    }

    /// As [`Shared::work_on`], on a thread that is no worker: workers may sleep, and one is woken if there is something
    /// to supply ahead.
    pub(super) fn work_on_for_workers(&self, connection: &Connection, stage: ConnectionState, kind: Kind) {
        self.work_on(connection, stage, kind);
        if !self.table().ahead.is_empty() {
            self.wake_worker();
        }
    }

    /// Works on a connection that this thread has, and puts it back.
    fn work_on(&self, connection: &Connection, mut stage: ConnectionState, mut kind: Kind) {
        loop {
            let done = contained(|| self.step(connection, &mut stage, kind));
            let wrong = done.unwrap_or(Err(PeerError::Panicked)).err();
            stage = match wrong {
                Some(wrong) => self.fail(connection, stage, wrong),
                None => stage,
            };
            match connection.put_back(stage) {
                Some(again) => (stage, kind) = again,
                None => return,
            }
        }
    }

    fn step(
        &self,
        connection: &Connection,
        stage: &mut ConnectionState,
        kind: Kind,
    ) -> std::result::Result<(), PeerError> {
        match stage {
            // Nothing that it still sends matters. Without a process, its end is the VM's.
            ConnectionState::Serving(_)
                if is_peers_end(connection, kind) && connection.forks() == ForkState::None =>
            {
                *stage = ConnectionState::Over;
                self.end_connection(connection);
            }
            // Whichever event it was: faults that arrived meanwhile are reported by no other event.
            ConnectionState::Serving(vm) => {
                match kind {
                    Kind::Beginning => self.begin_vm(connection, vm)?,
                    // Another turn serves it: those that come behind it are to be known soon, too.
                    Kind::TakenOver => return self.resume_vm(connection, vm),
                    // Whether forks of it live is found out below.
                    _ if is_peers_end(connection, kind) => connection.set_orphaned(),
                    _ => {}
                }
                if self.serve(connection, vm)? == NextWait::Over {
                    *stage = ConnectionState::Over;
                    self.end_connection(connection);
                }
            }
            ConnectionState::Dying { .. } if kind == Kind::Process => {
                *stage = ConnectionState::Over;
                self.end_connection(connection);
            }
            ConnectionState::Dying { .. } => self.await_end(connection),
            ConnectionState::Greeting { .. }
            | ConnectionState::Unserved(_)
            | ConnectionState::Taken
            | ConnectionState::Over => {}
        }
        Ok(())
    }

    fn begin_vm(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<(), PeerError> {
        {
            let mut table = self.table();
            table.vms_total += 1;
            table.note_vm(connection.number);
        }
        let (number, process, bytes) = (connection.number, connection.peer.process(), vm.bytes());
        self.emit_event(&Event::Begun { vm: number, process, bytes });
        let (used_bytes, image_bytes) = (vm.image_end(), self.snapshot.identity().bytes);
        if image_bytes > used_bytes {
            self.emit_event(&Event::SnapshotLarger { vm: number, process, used_bytes, image_bytes });
        }
        if vm.guard_image()? {
            // A thread that does not listen did not have to wait.
            let _ = send_message(connection.socket.as_fd(), &ready(), None);
        }
        self.watch_vm(connection, vm)
    }

    /// A VM that another server has served until now.
    fn resume_vm(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<(), PeerError> {
        {
            let mut table = self.table();
            table.vms_total += 1;
            table.vms_taken_over += 1;
            table.note_vm(connection.number);
        }
        let (number, process, bytes) = (connection.number, connection.peer.process(), vm.bytes());
        self.emit_event(&Event::TakenOver { vm: number, process, bytes });
        self.watch_peer(connection).map_err(|error| PeerError::Socket(error.into()))?;
        self.watch_vm(connection, vm)?;
        // A fault that the other server has read, and not answered, is told once more.
        vm.wake_all();
        Ok(())
    }

    fn watch_vm(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<(), PeerError> {
        let number = connection.number;
        self.watch(connection, vm.spaces())?;
        // Its process tells of its end; that it closes the connection means nothing then. (`HUP` is told unasked.)
        if connection.peer.alive().is_none() {
            epoll::add(&self.epoll, &connection.socket, token(number, Kind::Socket), EventFlags::ONESHOT)
                .map_err(|error| PeerError::Socket(error.into()))?;
        }
        if self.replay.is_some() || self.options.fill == Fill::All {
            self.want_ahead(number);
            self.wake_worker();
        }
        Ok(())
    }

    fn watch(&self, connection: &Connection, spaces: &mut [Space]) -> std::result::Result<(), PeerError> {
        debug_assert!(spaces.len() <= SPACES_MAX);
        for space in spaces.iter_mut().filter(|space| !space.is_watched) {
            let token = token(connection.number, Kind::Faults);
            epoll::add(&self.epoll, &space.uffd, token, ONCE)
                .map_err(|error| PeerError::Descriptor(error.into()))?;
            space.is_watched = true;
        }
        Ok(())
    }

    /// Spaces are to be closed. Others may have their descriptors too, so that closing them is not enough.
    pub(super) fn unwatch(&self, spaces: &[Space]) {
        for space in spaces {
            let _ = epoll::delete(&self.epoll, &space.uffd);
        }
    }

    /// Reports some of many poisoned pages: each report costs a line, and a damaged chunk has many.
    fn report_poisoned(&self, connection: &Connection, range: Range<u64>, why: Error) {
        if !self.poisoned.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) {
            return;
        }
        let (vm, process) = (connection.number, connection.peer.process());
        let snapshot = self.snapshot.name().to_owned();
        self.emit_event(&Event::Poisoned { vm, process, snapshot, range, why });
    }

    fn serve(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<NextWait, PeerError> {
        if connection.forks() == ForkState::Orphaned {
            // The kernel tells of no fork's end.
            if !vm.has_living_forks() {
                return Ok(NextWait::Over);
            }
            self.want_after(connection.number, FORKS_CHECK);
        }
        let common = VmShared {
            snapshot: &self.snapshot,
            // While pages are recorded, one that was not touched must not look as if it had been.
            run_bytes: if self.recorder.is_some() { PAGE_SIZE as u64 } else { self.options.run_bytes },
            recorder: self.recorder.as_ref(),
            replay: self.replay.as_ref(),
            fill: self.options.fill,
            reach_bytes: self.reach_bytes,
            replay_ahead_bytes: self.replay_ahead_bytes(),
            retry_reads: self.options.retry_reads,
            note_fork: &|| connection.note_fork(),
            waker: &|| self.wakeups.waker(connection.number),
            emit_event: &|event: &Event| self.emit_event(event),
            report_poisoned: &|range, why| self.report_poisoned(connection, range, why),
        };
        let next = vm.serve(&common)?;
        self.unwatch(&vm.take_ended());
        self.watch(connection, vm.spaces())?;
        match next {
            NextWait::Over => return Ok(next),
            NextWait::Wait => {}
            NextWait::Soon => self.want_after(connection.number, SOON),
            NextWait::Read => self.want_after(connection.number, READ_CHECK),
            NextWait::Ahead => self.want_ahead(connection.number),
        }
        for space in vm.spaces() {
            self.arm(space.uffd.as_fd(), connection.number, Kind::Faults);
        }
        Ok(next)
    }
}
