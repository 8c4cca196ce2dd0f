//! Open file: what a client has open, as handles and pins keep it.
//!
//! The server knows an open file by its handle. The last that keeps it, a handle or a pin, gives the handle back, and
//! the server gives back with it what was pinned. Not in a forked child: there it is the parent's.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use quinion::internals::arena::CellNumber;
use quinion::internals::arena::control::Operation;
use quinion::internals::units::MappingId;
use quinion::internals::viewer::ViewedFile;

use crate::connection::Connection;
use crate::stores::About;

/// What the clones of a `ClientFile` share, and what is pinned of it.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) connection: Arc<Connection>,
    pub(crate) name: String,
    /// `None` of a file that the kernel reads.
    pub(crate) viewed: Option<Viewed>,
    pub(crate) source: Source,
}

/// What is open.
#[derive(Debug)]
pub(crate) enum Source {
    Object(About),
    Local(File),
}

/// Where the server has it.
#[derive(Debug)]
pub(crate) struct Viewed {
    pub(crate) handle: u64,
    cell: CellNumber,
    id: MappingId,
    marker: AtomicU64,
    touched: AtomicU64,
}

impl Viewed {
    pub(crate) fn of([handle, place]: [u64; 2]) -> Self {
        let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
        Self { handle, cell, id, marker: AtomicU64::new(0), touched: AtomicU64::new(0) }
    }

    pub(crate) fn file(&self) -> ViewedFile<'_> {
        let Self { handle, cell, id, marker, touched } = self;
        ViewedFile { handle: *handle, cell: *cell, id: *id, marker_told: marker, touched }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(viewed) = &self.viewed {
            self.connection.give_back(Operation::Detach, [viewed.handle, 0, 0]);
        }
    }
}
