//! Ends: how a connection ends, and which of its parts are kept until they may be let go.
//!
//! ```text
//!   its process is no more --> forgotten
//!   something is wrong --handed over its memory?--> yes: given up, killed if so wanted; its descriptor stays until it
//!                                                        is no more, or its memory would read as zeros
//!                                             '---> no: told why, and forgotten
//!   the server ends --> each VM is killed or left, as the options say
//! ```

use std::iter;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::connection::{Connection, ConnectionState, HeldUffds, Kind, token};
use super::greeting::memory_of;
use super::{DYING, ENDING, ONCE, SOON, Shared};
use crate::peer::{Handshake, has_one_ended, refusal, send_message};
use crate::{Event, OnFailure, PeerError};

impl Shared {
    pub(super) fn end_connection(&self, connection: &Connection) {
        // A thread that has it finds out that it is over, and lets it go.
        let (stage, is_given_up) = {
            let mut place = connection.place();
            (std::mem::replace(&mut place.stage, ConnectionState::Over), place.is_given_up)
        };
        let was_known = self.forget(connection);
        let (vm, process) = (connection.number, connection.peer.process());
        match stage {
            ConnectionState::Greeting { .. } if was_known => {
                self.table().peers_refused += 1;
                self.emit_event(&Event::Refused { process, why: PeerError::HungUp });
            }
            ConnectionState::Serving(_) | ConnectionState::Taken if was_known && !is_given_up => {
                let counters = Box::new(connection.counted());
                self.emit_event(&Event::Ended { vm, process, counters });
            }
            _ => {}
        }
    }

    /// Whether it was in the table.
    pub(super) fn forget(&self, connection: &Connection) -> bool {
        let mut table = self.table();
        let was_known = table.connections.remove(&connection.number).is_some();
        if was_known {
            table.refused.remove(&connection.number);
            table.vms.remove(&connection.number);
            table.past.merge(&connection.counted());
        }
        drop(table);
        if was_known {
            // Others may have what this closes, and then epoll would go on telling of it.
            let _ = epoll::delete(&self.epoll, &connection.socket);
            if let Some(alive) = connection.peer.alive() {
                let _ = epoll::delete(&self.epoll, alive);
            }
        }
        was_known
    }

    pub(super) fn fail(
        &self,
        connection: &Connection,
        stage: ConnectionState,
        why: PeerError,
    ) -> ConnectionState {
        match stage {
            ConnectionState::Serving(mut vm) => {
                self.unwatch(vm.spaces());
                // The server has ended meanwhile, or the peer, and told so.
                if matches!(connection.place().stage, ConnectionState::Over) {
                    return ConnectionState::Over;
                }
                self.give_up(connection, HeldUffds::Vm { _vm: vm }, why)
            }
            other => other,
        }
    }

    /// A peer that greets gets the error, and is forgotten; or given up, if it handed over its memory.
    pub(super) fn refuse(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
        why: PeerError,
    ) -> ConnectionState {
        match memory_of(greeting) {
            // It is a VM, and waits for this server.
            Some(kept) => self.give_up(connection, kept, why),
            None => {
                self.refused(connection, why);
                ConnectionState::Over
            }
        }
    }

    fn give_up(&self, connection: &Connection, kept: HeldUffds, why: PeerError) -> ConnectionState {
        let _ = send_message(connection.socket.as_fd(), &refusal(&why), None);
        // Its end is then not taken for one of its own, whichever thread notices it first.
        connection.place().is_given_up = true;
        // Counted before it can end: another thread then forgets the connection, and the server may end.
        {
            let mut table = self.table();
            table.vms_given_up += 1;
            table.note_vm(connection.number);
        }
        let killed = self.options.on_failure == OnFailure::Kill && connection.peer.kill();
        let (vm, process) = (connection.number, connection.peer.process());
        self.emit_event(&Event::GivenUp { vm, process, why, killed });
        if killed {
            self.await_end(connection);
            return ConnectionState::Dying { _kept: kept };
        }
        self.forget(connection);
        ConnectionState::Over
    }

    /// Has epoll report the end of the peer's process, if it does not yet. If epoll has no room, the process is polled.
    pub(super) fn await_end(&self, connection: &Connection) {
        let (number, Some(alive)) = (connection.number, connection.peer.alive()) else { return };
        match epoll::add(&self.epoll, alive, token(number, Kind::Process), ONCE) {
            Ok(()) => {}
            // It may have been reported before, as of a process whose forks were served on.
            Err(Errno::EXIST) => self.arm(alive, number, Kind::Process),
            Err(_) if has_one_ended(iter::once(connection.end())) => self.end_connection(connection),
            Err(_) => self.want_after(number, DYING),
        }
    }

    pub(super) fn refused(&self, connection: &Connection, why: PeerError) {
        self.forget(connection);
        let _ = send_message(connection.socket.as_fd(), &refusal(&why), None);
        self.table().peers_refused += 1;
        self.emit_event(&Event::Refused { process: connection.peer.process(), why });
    }

    /// At the server's end, of a connection that another thread has had for all that time: that waits in the kernel, as
    /// for a disk that does not answer, and its peer may have handed over its memory. The thread closes the userfaultfd
    /// when it goes on. Returns what that thread has put back since it was looked at, and whether the peer was killed.
    fn leave_taken(&self, connection: &Connection) -> (bool, ConnectionState) {
        let was_known = self.forget(connection);
        let (stage, is_given_up) = {
            let mut place = connection.place();
            (std::mem::replace(&mut place.stage, ConnectionState::Over), place.is_given_up)
        };
        let may_be_vm = was_known && !is_given_up && !matches!(stage, ConnectionState::Over);
        let killed = may_be_vm && self.drop_vm(connection);
        (killed, stage)
    }

    /// Tells that a peer is not served any more; whether it was killed.
    pub(super) fn drop_vm(&self, connection: &Connection) -> bool {
        let (vm, process) = (connection.number, connection.peer.process());
        let killed = self.options.on_failure == OnFailure::Kill && connection.peer.kill();
        self.emit_event(&Event::Dropped { vm, process, killed });
        killed
    }

    pub(super) fn drop_all(&self) {
        let until = Instant::now() + ENDING;
        while self.table().accepting > 0 && Instant::now() < until {
            std::thread::sleep(SOON);
        }
        let all: Vec<Arc<Connection>> = {
            let mut table = self.table();
            table.is_closed = true;
            table.connections.values().cloned().collect()
        };
        // A message that has come and was not read may hand over memory, too: their threads check.
        for connection in all.iter().filter(|connection| connection.may_greet()) {
            let _ = rustix::net::shutdown(&connection.socket, Shutdown::Read);
        }
        let until = Instant::now() + ENDING;
        while all.iter().any(|connection| connection.is_busy()) && Instant::now() < until {
            std::thread::sleep(SOON);
        }
        let mut kept = Vec::new();
        for connection in all {
            let Some(stage) = connection.take(Kind::Faults) else {
                let (killed, stage) = self.leave_taken(&connection);
                kept.push((killed, stage, connection));
                continue;
            };
            let (is_vm, stage) = match stage {
                ConnectionState::Serving(_) => (true, stage),
                ConnectionState::Unserved(kept) => (true, ConnectionState::Dying { _kept: kept }),
                other => (false, other),
            };
            let mut killed = matches!(stage, ConnectionState::Dying { .. });
            if is_vm {
                killed = self.drop_vm(&connection);
            }
            self.forget(&connection);
            kept.push((killed, stage, connection));
        }
        let until = Instant::now() + ENDING;
        for (killed, stage, connection) in kept {
            if killed {
                connection.peer.wait_for_its_end(until);
            }
            drop(stage);
        }
    }
}
