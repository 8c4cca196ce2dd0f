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
//! change the times, but a commit changes the stamp. Not for a SQLite that is built with `SQLITE_MMAP_READWRITE`: if it
//! rolls such writes back, a page may stay that the server reads meanwhile for a transaction that is over.
//!
//! A write by any process begins another revision for all. So this is for databases that are read much and written
//! seldom; with a write-ahead log, only checkpoints write to the file.
//!
//! A process lends the server a descriptor of the database. It is opened once, and not closed before the process ends:
//! the close of any descriptor ends the process's locks on the file. So their number is bounded.

use std::collections::HashMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libsqlite3_sys::SQLITE_WARNING;
use quinion_service::{Client, Error, ErrorKind, FileRevision, RevisionRead, RevisionRequest};
use rustix::fs::OFlags;

use crate::clock::Settled;
use crate::ffi::log;
use crate::place::{Inode, Place};
use crate::stamp::Stamp;

/// Databases whose descriptors a process lends at most.
const LENT_MAX: usize = 256;
/// How long no revision is asked for after the file was changed just now.
const CHANGED_PAUSE: Duration = Duration::from_millis(20);
/// The pause after a server did not answer or refused: at first, and at most. Each time doubles it.
const FAILED_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How long a transaction waits for a server that is to be connected to.
const CONNECT_MAX: Duration = Duration::from_millis(200);

/// A descriptor that is lent. Its end closes nothing: see [`LentFiles`].
type LentFile = Arc<ManuallyDrop<File>>;

/// Descriptors that were opened to be lent, which are never closed.
#[derive(Debug, Default)]
pub struct LentFiles(Mutex<HashMap<Inode, LentFile>>);

impl LentFiles {
    /// `None`: it cannot be opened, is another file by now, or too many are open.
    pub fn of(&self, place: &Place) -> Option<LentFile> {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A program that closes what it has not opened may have had this number used again.
        files.retain(|&inode, file| is_of(file, inode));
        if let Some(file) = files.get(&place.inode()) {
            return Some(Arc::clone(file));
        }
        if files.len() >= LENT_MAX {
            return None;
        }
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32; // another kind of file may be there by now
        let file = File::options().read(true).custom_flags(flags).open(place.path()).ok()?;
        let file = Arc::new(ManuallyDrop::new(file));
        let known = file.metadata().ok()?;
        files.insert((known.dev(), known.ino()), file);
        files.get(&place.inode()).cloned()
    }
}

fn is_of(file: &File, inode: Inode) -> bool {
    file.metadata().is_ok_and(|known| (known.dev(), known.ino()) == inode)
}

/// The pages of a revision.
#[derive(Debug)]
pub struct NodePages {
    revision: FileRevision,
    page_bytes: u32,
}

impl NodePages {
    pub fn is_page(&self, position: u64, len: usize) -> bool {
        len == self.page_bytes as usize && position.is_multiple_of(u64::from(self.page_bytes))
    }

    /// Fills the buffer with a page of the database.
    pub fn read(&self, buffer: &mut [u8], position: u64) -> RevisionRead {
        self.revision.read_exact_at(buffer, position).unwrap_or(RevisionRead::Over)
    }
}

/// A database at a server.
#[derive(Debug)]
pub struct NodeDatabase {
    server: String,
    file: LentFile,
    inode: Inode,
    now: Mutex<NodeState>,
}

#[derive(Debug, Default)]
struct NodeState {
    /// `None`: there was no such server yet.
    client: Option<Client>,
    /// The pages of the last revision, with the revision's name.
    pages: Option<(Vec<u8>, Arc<NodePages>)>,
    /// A thread asks for a revision. The others do not wait for it.
    is_asking: bool,
    not_before: Option<Instant>,
    /// The pause after the next failure; `None`: the first one.
    pause: Option<Duration>,
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
    /// file's. Waits some tenths of a second for a server that does not answer, and then seldom again.
    pub fn pages(&self, stamp: &Stamp, times: Settled) -> Option<Arc<NodePages>> {
        if times.is_after_setback() {
            return None; // the same times may be of another content
        }
        let name = name_of(stamp, times);
        let client = {
            let mut now = self.now();
            if let Some((known, pages)) = &now.pages
                && *known == name
                && pages.revision.is_served().unwrap_or(false)
            {
                return Some(Arc::clone(pages));
            }
            // The program may have closed what is lent, and opened another file by its number.
            if !is_of(&self.file, self.inode) {
                return None;
            }
            if now.is_asking || now.not_before.is_some_and(|until| Instant::now() < until) {
                return None;
            }
            now.is_asking = true;
            now.client.clone()
        };
        let asking = Asking(self);
        let opened = self.open(client, &name);
        drop(asking);
        let mut now = self.now();
        match opened {
            Ok((client, revision)) if self.is_meant(&revision, times) => {
                let pages = Arc::new(NodePages { revision, page_bytes: stamp.page_bytes });
                (now.client, now.pause, now.not_before) = (Some(client), None, None);
                let old = now.pages.replace((name, Arc::clone(&pages)));
                drop(now);
                drop(old); // tells the server, without the lock
                Some(pages)
            }
            // It is changed at this moment, by a program that takes no locks; or the descriptor is another file's.
            Ok(_) => {
                now.not_before = Some(Instant::now() + CHANGED_PAUSE);
                None
            }
            Err(error) => {
                now.failed(&error);
                None
            }
        }
    }

    fn open(&self, client: Option<Client>, name: &[u8]) -> Result<(Client, FileRevision), Error> {
        let client = match client {
            Some(client) => client,
            None => Client::connect_within(&self.server, CONNECT_MAX)?,
        };
        let revision = client.open_revision(RevisionRequest { file: self.file.as_fd(), name })?;
        Ok((client, revision))
    }

    /// The server did not answer a read in time: nothing is asked of it for a while.
    pub fn unanswered(&self) {
        let mut now = self.now();
        let pause = now.next_pause();
        now.not_before = Some(Instant::now() + pause);
        now.pages = None;
    }

    /// Whether the server found the file as this process did.
    fn is_meant(&self, revision: &FileRevision, times: Settled) -> bool {
        let (found, times) = (revision.attributes(), times.times());
        (found.device, found.inode) == self.inode
            && found.size == times.file_bytes()
            && found.modified == times.modified_nanos()
            && found.changed == times.changed_nanos()
    }

    fn now(&self) -> MutexGuard<'_, NodeState> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NodeState {
    fn failed(&mut self, error: &Error) {
        if error.kind() == ErrorKind::Changed {
            self.not_before = Some(Instant::now() + CHANGED_PAUSE);
            return;
        }
        if self.pause.is_none() {
            log(SQLITE_WARNING, &format!("pages are not shared: {error}"));
        }
        self.not_before = Some(Instant::now() + self.next_pause());
    }

    /// Twice as long each time, until an open goes well.
    fn next_pause(&mut self) -> Duration {
        let pause = self.pause.unwrap_or(FAILED_PAUSES.0);
        self.pause = Some((pause * 2).min(FAILED_PAUSES.1));
        pause
    }
}

/// The turn of the one thread that asks the server; its end is the end of this.
struct Asking<'n>(&'n NodeDatabase);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.now().is_asking = false;
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

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::path::PathBuf;

    use super::*;

    struct Named(PathBuf);

    impl Named {
        fn new(name: &str) -> Self {
            let path = PathBuf::from(format!("/dev/shm/quinion-node-{name}-{}", std::process::id()));
            std::fs::write(&path, name).unwrap();
            Self(path)
        }

        fn place(&self) -> Place {
            Place::of_name(&CString::new(self.0.to_str().unwrap()).unwrap()).unwrap()
        }
    }

    impl Drop for Named {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn leads_to(descriptor: i32) -> String {
        let path = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
        path.map_or_else(|_| String::new(), |path| path.display().to_string())
    }

    #[test]
    fn a_descriptor_that_is_another_files_by_now_is_neither_lent_nor_closed() {
        let (lent, meant, other) = (LentFiles::default(), Named::new("meant"), Named::new("other"));
        let first = lent.of(&meant.place()).unwrap();
        let number = first.as_raw_fd();
        assert_eq!(lent.of(&meant.place()).unwrap().as_raw_fd(), number, "it is opened once");
        drop(first);
        // As a program does that closes all descriptors, and opens others.
        // SAFETY: the number is open, and given up again at once.
        let mut taken = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::dup2(File::open(&other.0).unwrap(), &mut taken).unwrap();
        std::mem::forget(taken);
        let again = lent.of(&meant.place()).unwrap();
        assert!(again.as_raw_fd() != number && is_of(&again, meant.place().inode()));
        assert_eq!(leads_to(number), other.0.display().to_string(), "it is the program's");
    }
}
