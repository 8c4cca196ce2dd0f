//! Revision: a local file as it is now, cached for all processes of the node under the caller's own locks.
//!
//! ```text
//!   engine, under its lock --name of the content, descriptor--> server: are the times settled?  no: refused
//!      read                <--a copy of what is cached----------  the same pages for each process with that name
//!                          <--unanswered, over--------- else: the engine reads its file by itself
//! ```
//!
//! A file that several processes change is cached by a server only while a lease stands, which a database that is open
//! for writing never gives. But an engine with locks knows when its file does not change, and a name for what it is
//! then: a change counter, say. A revision is the file under that name, with the size and the times that the server
//! sees. It never changes. The server looks at the times again after each read of the file, and refuses the bytes if
//! they are others: so a page of a revision is as the file was while it had these times.
//!
//! Invariant: a read that is whole has bytes of the revision.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use quinion::internals::arena::control::Operation;
use quinion_owner::internals::viewer::{ReadEnd, RequestError, Viewer};

use crate::connection::{Connection, NamedOpen};
use crate::error::{Error, ErrorKind, Result};
use crate::file::{is_valid, note};
use crate::open_file::Viewed;
use crate::revision_attributes::RevisionAttributes;

/// Bytes of a revision's name, at most.
const NAME_BYTES_MAX: usize = 128;
/// How long a server is waited for on the way to a revision, before the engine reads.
const OPEN_MAX: Duration = Duration::from_millis(200);
/// How long it is waited for on the way to a page: longer than a busy device or machine takes.
const READ_MAX: Duration = Duration::from_millis(500);
/// How often a page that was made ready may be gone again before it is copied.
const FRUITLESS_MAX: u32 = 4;

/// The request of [`Client::open_revision`](crate::Client::open_revision).
#[derive(Clone, Copy, Debug)]
pub struct RevisionRequest<'r> {
    /// The file, open for reading. It is lent to the server, which opens the file anew; no descriptor is opened or
    /// closed in this process, where a close would end the process's POSIX locks on the file.
    pub file: BorrowedFd<'r>,
    /// Tells contents apart that have the same size and times, as stores to mapped memory leave them; such as a change
    /// counter. 1 to 128 bytes.
    pub name: &'r [u8],
}

/// The end of [`FileRevision::read_exact_at`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RevisionRead {
    /// The buffer has all bytes.
    Whole,
    /// The server does not answer in time, or has no room for them: read the file. Other reads may go well.
    Unanswered,
    /// The file has another content than the revision, or the server has ended: read the file, and no uncached bytes of
    /// the revision any more.
    Over,
}

/// A local file as it was when it was opened, at a server; never changed.
#[derive(Debug)]
pub struct FileRevision {
    connection: Arc<Connection>,
    viewed: Viewed,
    attributes: RevisionAttributes,
}

impl FileRevision {
    pub(crate) fn open(connection: &Arc<Connection>, request: RevisionRequest<'_>) -> Result<Self> {
        let RevisionRequest { file, name } = request;
        let shown = "the revision of a file";
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let text = format!(
                "cannot open {shown} by a name of {} bytes: give 1 to {NAME_BYTES_MAX} bytes",
                name.len()
            );
            return Err(Error::new(ErrorKind::Open, text));
        }
        let open = NamedOpen { shown, name, descriptor: Some(file), time: OPEN_MAX };
        let changed = |error: Error| match error.errno() {
            Some(libc::ETXTBSY) => {
                let text =
                    format!("cannot open {shown}: the file was changed just now; open it again in 20 ms");
                Error::new(ErrorKind::Changed, text)
            }
            _ => error,
        };
        let (answer, text) = connection.open_named(&open).map_err(changed)?;
        let attributes = text.ok().and_then(|text| RevisionAttributes::of_text(&text));
        let viewed = Viewed::of(answer);
        // Also one of which the server does not say enough: its end gives the handle back.
        let opened =
            Self { connection: Arc::clone(connection), viewed, attributes: attributes.unwrap_or_default() };
        let unknown = || {
            let text = format!(
                "cannot open {shown}: the server does not say of which file; use one version for both"
            );
            Error::new(ErrorKind::Other, text)
        };
        attributes.map(|_| opened).ok_or_else(unknown)
    }

    /// The file as the server found it. A descriptor that was closed meanwhile, and used again, may have led it to
    /// another file than the caller meant: compare.
    pub fn attributes(&self) -> &RevisionAttributes {
        &self.attributes
    }

    /// The revision's size in bytes.
    pub fn len(&self) -> u64 {
        self.attributes.size
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills the buffer from byte `offset` on. Cached bytes are copied without a system call; for others the server is
    /// waited for, half a second at most each time it is asked. A range that is not inside the revision is
    /// [`RevisionRead::Over`].
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<RevisionRead> {
        let viewer = self.connection.viewer()?;
        let is_inside = offset.checked_add(buffer.len() as u64).is_some_and(|end| end <= self.len());
        if !is_inside || !is_valid(viewer, &self.viewed) {
            return Ok(RevisionRead::Over);
        }
        let found = viewer.read_ready_into(&self.viewed.file(), offset, buffer);
        if found.is_some_and(|found| found.bytes == buffer.len()) {
            note(viewer, buffer.len(), 0);
            return Ok(RevisionRead::Whole);
        }
        Ok(self.read_asking(viewer, buffer, offset))
    }

    #[cold]
    fn read_asking(&self, viewer: &Viewer, buffer: &mut [u8], offset: u64) -> RevisionRead {
        let (file, mut done, mut asked, mut fruitless) = (self.viewed.file(), 0, 0, 0);
        while done < buffer.len() {
            let arguments = [self.viewed.handle, offset + done as u64, (buffer.len() - done) as u64];
            match self.connection.ask(Operation::Fill, arguments, READ_MAX) {
                Ok(_) => asked += 1,
                Err(RequestError::Errno(libc::ESTALE) | RequestError::OwnerDead) => {
                    return RevisionRead::Over;
                }
                Err(_) => return RevisionRead::Unanswered,
            }
            if !is_valid(viewer, &self.viewed) {
                return RevisionRead::Over;
            }
            match viewer.read_ready_into(&file, offset + done as u64, &mut buffer[done..]) {
                Some(found) if found.end == ReadEnd::Full => done += found.bytes,
                Some(_) => return RevisionRead::Over,
                None if fruitless == FRUITLESS_MAX => return RevisionRead::Unanswered,
                None => fruitless += 1,
            }
        }
        note(viewer, done, asked);
        RevisionRead::Whole
    }

    /// Whether the server still serves it.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    pub fn is_served(&self) -> Result<bool> {
        Ok(is_valid(self.connection.viewer()?, &self.viewed))
    }
}

impl Drop for FileRevision {
    fn drop(&mut self) {
        // The engine has a lock, perhaps.
        self.connection.give_back_later(Operation::Detach, [self.viewed.handle, 0, 0]);
    }
}
