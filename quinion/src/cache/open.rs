//! Open: how a file is opened, and which rights its handle has.
//!
//! ```text
//!   OpenOptions --check--> a backend that reads, or reads and writes --> the file's mapping
//!                                                                          |
//!         the first handle that writes gives it its second backend <-------+
//! ```
//!
//! Handles of one file share its pages: bytes written by one are read at once by the others, each page whole. They do
//! not share the options here: whether they write, when writes are durable, how they treat pinned bytes, and which
//! errors have been reported to them.

use crate::error::{Repr, Result};
use crate::filemap::OnPinned;

use super::Coherence;

/// How a file is opened, as [`std::fs::OpenOptions`]. The default reads a file that exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenOptions {
    write: bool,
    append: bool,
    creation: CreateMode,
    truncate: bool,
    mode: Option<u32>,
    durability: Durability,
    uncached: bool,
    on_pinned: OnPinned,
    coherence: Coherence,
    pub(super) for_viewer: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum CreateMode {
    #[default]
    Never,
    IfMissing,
    /// The open fails if the file exists.
    Always,
}

/// When a write of a handle is durable: when it returns, or after a sync.
///
/// | | a write that has returned `Ok` |
/// |---|---|
/// | [`OnSync`](Durability::OnSync) | is seen by all readers of the cache; is durable after a sync that began later |
/// | [`Data`](Durability::Data) | is durable: its bytes, and the size they need |
/// | [`All`](Durability::All) | the same, and the file's times |
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Durability {
    /// At a sync: [`File::sync_data`](crate::File::sync_data) and its like.
    #[default]
    OnSync,
    /// When the write returns, as if [`File::sync_range`](crate::File::sync_range) of its bytes came next
    /// (`O_DSYNC`).
    Data,
    /// When the write returns, as if [`File::sync_all`](crate::File::sync_all) came next (`O_SYNC`).
    All,
}

impl OpenOptions {
    /// Reading only, of a file that exists.
    pub fn new() -> Self {
        Self::default()
    }
    /// Whether the handle may write, too. The cache then has the file open for writing as long as it knows the file,
    /// also when the handle is closed.
    pub fn write(&mut self, write: bool) -> &mut Self {
        self.write = write;
        self
    }
    /// Whether [`Write`](std::io::Write) writes at the end of the file; the handle may write then. Neither
    /// [`File::write_at`](crate::File::write_at) nor [`File::append`](crate::File::append) is affected.
    pub fn append(&mut self, append: bool) -> &mut Self {
        self.append = append;
        self
    }
    /// Whether the file is made if it is not there; needs a handle that writes. The name of a new file is durable
    /// when its folder was synced, which the cache does not do.
    pub fn create(&mut self, create: bool) -> &mut Self {
        self.creation = match (create, self.creation) {
            (true, CreateMode::Never) => CreateMode::IfMissing,
            (false, CreateMode::IfMissing) => CreateMode::Never,
            (_, as_it_is) => as_it_is,
        };
        self
    }
    /// Whether the file is made, and must not be there; then `create` and `truncate` do not matter.
    pub fn create_new(&mut self, create_new: bool) -> &mut Self {
        self.creation = match (create_new, self.creation) {
            (true, _) => CreateMode::Always,
            (false, CreateMode::Always) => CreateMode::Never,
            (false, as_it_is) => as_it_is,
        };
        self
    }
    /// Whether the file is emptied, for all handles, unwritten bytes included; needs a handle that writes. A block
    /// device keeps its bytes.
    pub fn truncate(&mut self, truncate: bool) -> &mut Self {
        self.truncate = truncate;
        self
    }
    /// The permissions of a new file, less the process's mask. The default is 0o666.
    pub fn mode(&mut self, mode: u32) -> &mut Self {
        self.mode = Some(mode);
        self
    }
    /// When writes of the handle are durable. The default is at a sync.
    pub fn durability(&mut self, durability: Durability) -> &mut Self {
        self.durability = durability;
        self
    }
    /// Whether all reads and writes of the handle are [uncached](crate::ReadOptions::uncached) ones.
    pub fn uncached(&mut self, uncached: bool) -> &mut Self {
        self.uncached = uncached;
        self
    }
    /// How changes by the handle treat pinned bytes; by default these stay with their pins.
    pub fn on_pinned(&mut self, on_pinned: OnPinned) -> &mut Self {
        self.on_pinned = on_pinned;
        self
    }
    /// How the handle notices that the file was changed past this cache. The default is [`Coherence::Check`].
    pub fn coherence(&mut self, coherence: Coherence) -> &mut Self {
        self.coherence = coherence;
        self
    }

    pub(super) fn is_for_viewer(&self) -> bool {
        self.for_viewer
    }
    pub(super) fn writes(&self) -> bool {
        self.write || self.append
    }
    pub(super) fn empties(&self) -> bool {
        self.truncate && self.creation != CreateMode::Always
    }
    pub(super) fn is_uncached(&self) -> bool {
        self.uncached
    }
    /// A local file is emptied when its mapping is known, not here: its pages go with its bytes.
    pub(super) fn for_backend(&self) -> crate::backend::OpenForWrite {
        use crate::backend::{Creation, InitialContent};
        let creation = match self.creation {
            CreateMode::Never => Creation::MustExist,
            CreateMode::IfMissing => Creation::IfMissing,
            CreateMode::Always => Creation::MustBeNew,
        };
        crate::backend::OpenForWrite {
            creation,
            start: InitialContent::Kept,
            mode: self.mode.unwrap_or(0o666),
        }
    }
    pub(super) fn access(&self) -> OpenMode {
        OpenMode {
            writes: self.writes(),
            appends: self.append,
            durability: self.durability,
            on_pinned: self.on_pinned,
            coherence: self.coherence,
            for_viewer: self.for_viewer,
        }
    }
    pub(super) fn check(&self) -> Result<()> {
        if self.writes() || (self.creation == CreateMode::Never && !self.truncate) {
            return Ok(());
        }
        let text =
            "cannot make or empty a file that is opened for reading only; add OpenOptions::write(true)";
        Err(Repr::InvalidInput(text.to_owned()).into())
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenMode {
    pub writes: bool,
    /// Writes without a position go to the end.
    pub appends: bool,
    pub durability: Durability,
    pub on_pinned: OnPinned,
    pub coherence: Coherence,
    /// The viewers' owner watches the file for cuts from before it was opened.
    pub for_viewer: bool,
}
