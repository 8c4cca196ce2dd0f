//! Parked: the placeholder of a backend while the file has no open handle.
//!
//! Its descriptor is closed then, so that the file keeps no mount busy, no space taken and no lease refused; its pages
//! stay. The next open of the file brings a backend of its own, which takes this one's place if the file is unchanged.
//! Requests in flight when the descriptor was released keep it until they have ended: [`ParkedBackend::is_closed`] says
//! when, and [`Backend::reap`] of this fetches their completions.

use std::io;
use std::sync::{Arc, Weak};

use super::engine::EngineShared;
use super::{Attributes, Backend, Fill, ReapMode, ReapOutcome, WaitQueue};

/// Stands for a file of an engine that has no descriptor.
#[derive(Clone, Debug)]
pub struct ParkedBackend {
    engine: Arc<EngineShared>,
    open: Weak<()>,
}

impl ParkedBackend {
    pub(super) fn new(engine: &Arc<EngineShared>, open: &Arc<()>) -> Self {
        Self { engine: Arc::clone(engine), open: Arc::downgrade(open) }
    }

    /// Whether the descriptors of the file whose place it has are closed.
    pub fn is_closed(&self) -> bool {
        self.open.strong_count() == 0
    }

    /// Whether it stands for the same open of a file as `other`.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.open, &other.open)
    }
}

fn not_open() -> io::Error {
    io::Error::other("the file has no open handle; open it and read through that handle")
}

impl Backend for ParkedBackend {
    fn name(&self) -> &'static str {
        self.engine.name()
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.engine.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        Err(not_open())
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| fill.complete(Err(not_open())));
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.engine.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.engine.wants_leader()
    }
}
