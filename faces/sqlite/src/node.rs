//! Node: pages of a database that all processes of the node share, by a server.
//!
//! ```text
//!   xRead of a page, under a lock --> the revision of this stamp and these times? --known--> its pages, in its memory
//!                                             |                                      no page: the server reads it
//!                                             `--none--> opened at the server, if the times are settled
//!   no server, times that are not settled, another content ----------------> the process's own pages, or SQLite's file
//! ```
//!
//! A *revision* is the file as it was at its times, and never changes (`revision.rs` of `quinion-service`). The file's
//! times are settled when it is opened, so the next write changes them; and the server looks at them after each read of
//! the file. So a page of a revision has the bytes that the file had while it had these times. A transaction takes a
//! page from the file only while no process writes it: under its lock no process writes to the file at all, or, with a
//! write-ahead log, none writes a page that it takes from there (`stamp.rs`). So the page is as it was when the lock
//! was there and the times were looked at.
//!
//! The stamp is a part of the revision's name for programs that write to the file through a map: such writes need not
//! change the times, but a commit changes the stamp.
//!
//! A write by any process begins another revision for all. So this is for databases that are read much and written
//! seldom; with a write-ahead log, only checkpoints write to the file.
//!
//! A process lends the server a descriptor of the database. It is opened once, and not closed before the process ends:
//! the close of any descriptor ends the process's locks on the file. So their number is bounded.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libsqlite3_sys::SQLITE_WARNING;
use quinion_service::{Client, Error, ErrorKind, FileRevision, RevisionRequest};

use crate::clock::Settled;
use crate::ffi::log;
use crate::place::{Inode, Place};
use crate::stamp::Stamp;

/// Databases whose descriptors a process lends at most.
const LENT_MAX: usize = 256;
/// How long no revision is asked for after one was refused, or after a server did not answer.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
const UNANSWERED_PAUSE: Duration = Duration::from_secs(1);
/// How long a transaction waits for a server that is to be connected to.
const CONNECT_MAX: Duration = Duration::from_millis(200);

/// Descriptors that were opened to be lent, which are never closed.
#[derive(Debug, Default)]
pub struct LentFiles(Mutex<HashMap<Inode, &'static File>>);

impl LentFiles {
    /// `None`: it cannot be opened, is another file by now, or too many are open.
    pub fn of(&self, place: &Place) -> Option<&'static File> {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(&place.inode()) {
            return Some(file);
        }
        if files.len() >= LENT_MAX {
            return None;
        }
        // Never closed: leaked before anything can fail.
        let file: &'static File = Box::leak(Box::new(File::open(place.path()).ok()?));
        let known = file.metadata().ok()?;
        files.insert((known.dev(), known.ino()), file);
        files.get(&place.inode()).copied()
    }
}

/// The pages of a revision.
#[derive(Debug)]
pub struct NodePages {
    revision: FileRevision,
    page_bytes: u32,
}

impl NodePages {
    /// Fills the buffer with a page of the database. `false`: read it otherwise.
    pub fn read(&self, buffer: &mut [u8], position: u64) -> bool {
        let is_page =
            buffer.len() == self.page_bytes as usize && position.is_multiple_of(u64::from(self.page_bytes));
        is_page && self.revision.read_exact_at(buffer, position).unwrap_or(false)
    }
}

/// A database at a server.
#[derive(Debug)]
pub struct NodeDatabase {
    server: String,
    file: &'static File,
    inode: Inode,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    /// `None`: there was no such server yet.
    client: Option<Client>,
    is_logged: bool,
    /// With its name.
    pages: Option<(Vec<u8>, Arc<NodePages>)>,
    asked_again: Option<Instant>,
}

impl NodeDatabase {
    /// Connects to the server when pages are wanted first. `None`, which is logged: the database cannot be shared.
    pub fn new(server: String, place: &Place, lent: &LentFiles) -> Option<Self> {
        let file = match place.is_clocked() {
            true => lent
                .of(place)
                .ok_or("it cannot be opened once more, or this process shares too many databases"),
            false => Err("times of its file system do not tell of each write"),
        };
        let file = file.inspect_err(|why| {
            log(SQLITE_WARNING, &format!("{}: not shared: {why}", place.path().display()))
        });
        Some(Self { server, file: file.ok()?, inode: place.inode(), now: Mutex::default() })
    }

    /// The pages of the file as it is now, under the lock of the stamp; `None`: they are not to be had. `times` are the
    /// file's.
    pub fn pages(&self, stamp: &Stamp, times: Settled) -> Option<Arc<NodePages>> {
        let name = name_of(stamp, times);
        let mut now = self.now();
        if let Some((known, pages)) = &now.pages
            && *known == name
            && pages.revision.is_served().unwrap_or(false)
        {
            return Some(Arc::clone(pages));
        }
        if now.asked_again.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        match self.open(&mut now, &name) {
            Ok(revision) => {
                let pages = Arc::new(NodePages { revision, page_bytes: stamp.page_bytes });
                let is_meant = self.is_meant(&pages.revision, times);
                let old = now.pages.replace((name, Arc::clone(&pages)));
                drop(now);
                drop(old); // tells the server, without the lock
                is_meant.then_some(pages)
            }
            Err(error) => {
                let is_refused = error.kind() == ErrorKind::Open;
                if !is_refused && !std::mem::replace(&mut now.is_logged, true) {
                    log(SQLITE_WARNING, &format!("pages are not shared: {error}"));
                }
                now.asked_again =
                    Some(Instant::now() + if is_refused { REFUSED_PAUSE } else { UNANSWERED_PAUSE });
                None
            }
        }
    }

    fn open(&self, now: &mut Now, name: &[u8]) -> Result<FileRevision, Error> {
        let client = match now.client.take() {
            Some(client) => client,
            None => Client::connect_within(&self.server, CONNECT_MAX)?,
        };
        let client = now.client.insert(client);
        let opened = client.open_revision(RevisionRequest { file: self.file.as_fd(), name });
        if opened.is_ok() {
            now.is_logged = false;
        }
        opened
    }

    /// Whether the server found the file as this process did.
    fn is_meant(&self, revision: &FileRevision, times: Settled) -> bool {
        let (found, times) = (revision.attributes(), times.times());
        (found.device, found.inode) == self.inode
            && found.size == times.file_bytes()
            && found.modified == times.modified_nanos()
            && found.changed == times.changed_nanos()
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name_of(stamp: &Stamp, times: Settled) -> Vec<u8> {
    let times = times.times();
    let mut name = stamp.bytes();
    name.extend(times.file_bytes().to_le_bytes());
    let numbers = [times.modified_nanos(), times.changed_nanos()];
    name.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    name
}
