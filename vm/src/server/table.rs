//! Table: all connections, which of them wait for a turn, and what was counted of those that are no more.
//!
//! One lock is for all of it, held for a look or a change, and never while something is done for a peer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::connection::Connection;
use crate::stats::RestoreCounters;

#[derive(Default)]
pub(super) struct Table {
    pub(super) connections: HashMap<u64, Arc<Connection>>,
    /// Connections for which there was no place.
    pub(super) refused: HashSet<u64>,
    /// Connections of VMs: their message has come, or their memory did.
    pub(super) vms: HashSet<u64>,
    /// Threads of peers: of those that greet, and of those whose descriptors block in close.
    pub(super) threads: usize,
    /// Whether it was reported that no further peer can be refused, or that no more threads may wait.
    pub(super) is_crowd_logged: bool,
    /// Threads that may be about to accept a peer.
    pub(super) accepting: usize,
    /// No peer is accepted: VMs are being handed over, or were.
    pub(super) is_paused: bool,
    /// The server ends, and has seen to all that are here: no other is added.
    pub(super) is_closed: bool,
    pub(super) last: u64,
    pub(super) ahead: VecDeque<u64>,
    pub(super) soon: VecDeque<(Instant, u64)>,
    pub(super) vms_total: u64,
    pub(super) vms_taken_over: u64,
    pub(super) vms_handed_over: u64,
    pub(super) vms_given_up: u64,
    pub(super) peers_refused: u64,
    pub(super) past: RestoreCounters,
}

impl Table {
    /// If the connection is there still, and has a place.
    pub(super) fn note_vm(&mut self, number: u64) {
        if self.connections.contains_key(&number) && !self.refused.contains(&number) {
            self.vms.insert(number);
        }
    }
}
