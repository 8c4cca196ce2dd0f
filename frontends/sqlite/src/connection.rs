//! Connection: a main database as one connection has it open.
//!
//! ```text
//!   xLock SHARED, xShmLock of a read lock      a transaction begins: its first page asks whether the pages are right
//!   xRead of a page                            from the pages, if there are; else, and all other reads, SQLite's file
//!   xLock EXCLUSIVE, xShmLock to copy frames   the right to write: what is written is forgotten
//!   xWrite, xTruncate                          SQLite's file, and then forgotten
//!   all else                                   SQLite's file
//! ```
//!
//! The file that SQLite's VFS opened lies behind this library's in one piece of memory, which SQLite made.
//!
//! Invariant: pages are read by a connection only while it has a lock under which no other process writes what it may
//! read: [`Connection::pages`] is given when the lock is there, and taken before it is given back.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull, addr_of_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use libsqlite3_sys::*;
use quinion_service::RevisionRead;

use crate::database::{Counters, Database, Generation};
use crate::ffi::guarded;
use crate::node::{NodeDatabase, NodePages};
use crate::place::{Place, Times};
use crate::process::Process;
use crate::stamp::{HEADER_AT, HEADER_BYTES, Stamp};
use crate::{pages, pragma, process, stamp};

/// The lock that copies frames to the file, and the first lock of readers, by their numbers in the wal-index.
const CHECKPOINT_LOCK: c_int = 1;
const READ_LOCKS: c_int = 3;
/// The locks of the wal-index, as bits, each of which keeps other processes from writing to the file: of the readers
/// that take no frame from the log, and of checkpoints.
const FIXING_LOCKS: u8 = 1 << READ_LOCKS | 1 << CHECKPOINT_LOCK;
/// Reads of a part of a page, a property that this VFS has not: whole pages are cached. (Since SQLite 3.48.)
const IOCAP_SUBPAGE_READ: c_int = 0x8000;
/// Bytes that SQLite's pager reads to see whether its own cache is right still: place and length.
const CHANGE_AT: i64 = 24;
const CHANGE_BYTES: usize = 16;

/// A file as SQLite has it.
#[repr(C)]
pub struct MainFile {
    base: sqlite3_file,
    connection: *mut Connection,
}

/// Bytes before SQLite's own file.
pub const REAL_AT: usize = size_of::<MainFile>().next_multiple_of(16);

/// State of a connection.
struct Connection {
    real: NonNull<sqlite3_file>,
    database: Arc<Database>,
    /// The database at the server that the URI names.
    node: Option<Arc<NodeDatabase>>,
    /// The transaction has met a page that the server does not have, and reads by itself.
    is_past_node: bool,
    /// `None` if the file's place is not known.
    place: Option<Place>,
    pages: Pages,
    lock: c_int,
    /// Whether it has written to the file with the lock that it has, and SQLite has not yet said that it is committed.
    is_uncommitted: bool,
    /// The URI says so: no process changes the file, and SQLite takes no locks.
    is_immutable: bool,
    /// Bytes of the header, read under the lock that it has.
    header: Option<[u8; HEADER_BYTES]>,
    /// The start of the wal-index, while it is mapped.
    wal_index: *const AtomicU32,
    /// Read locks of the wal-index that it has, as bits.
    read_locks: u8,
    /// Rights to write that it has by locks of the wal-index: the first locks, as bits.
    write_locks: u8,
    /// The answer to the last transaction that asked for pages.
    last: Answer,
    /// Reads that were served and are not yet counted by the database, whose counter all threads share.
    served: u64,
}

/// Reads that a connection counts by itself, at most.
const SERVED_ALONE_MAX: u64 = 256;

#[derive(Clone, Copy)]
enum Answer {
    Unasked,
    Pages,
    Node,
    /// There was a stamp, and no cache, or no room in it.
    NoRoom,
    /// There was no stamp; with the read locks of the wal-index that are held.
    NoStamp(u8),
}

enum Pages {
    /// The connection has no lock under which it may use pages, or they cannot be right for it.
    None,
    /// The connection may use pages, and has not asked for them.
    Unasked,
    Some(Arc<Generation>),
    /// Pages that processes of the node share.
    Node(Arc<NodePages>),
}

impl From<Option<Arc<Generation>>> for Pages {
    fn from(pages: Option<Arc<Generation>>) -> Self {
        pages.map_or(Self::None, Self::Some)
    }
}

impl Connection {
    /// # Safety
    /// The real file is open.
    unsafe fn methods(&self) -> &'static sqlite3_io_methods {
        // SAFETY: an open file has methods, and those of a VFS stay.
        unsafe { &*self.real.as_ref().pMethods }
    }

    /// The change counter and what follows it, if no other process can change it while the connection's lock lasts.
    fn change_counter(&mut self) -> Option<[u8; CHANGE_BYTES]> {
        if self.lock < SQLITE_LOCK_SHARED || self.read_locks != 0 {
            return None;
        }
        let header = self.read_header()?;
        if Stamp::of_header(header).is_none_or(|stamp| !stamp.is_rollback()) {
            self.header = None;
            return None;
        }
        header[(CHANGE_AT as u64 - HEADER_AT) as usize..].try_into().ok()
    }

    /// Bytes 16 to 39 of the file, as they are since the connection has its lock on the file.
    fn read_header(&mut self) -> Option<[u8; HEADER_BYTES]> {
        if self.header.is_none() {
            self.header = self.present_header();
        }
        self.header
    }

    fn present_header(&self) -> Option<[u8; HEADER_BYTES]> {
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: the file is open, and the buffer has so many bytes.
        let code = unsafe {
            let read = self.methods().xRead?;
            read(self.real.as_ptr(), bytes.as_mut_ptr().cast(), HEADER_BYTES as c_int, HEADER_AT as i64)
        };
        (code == SQLITE_OK).then_some(bytes)
    }

    fn times(&self) -> Option<Times> {
        self.place.as_ref().and_then(Place::times)
    }

    fn header_stamp(&mut self) -> Option<Stamp> {
        self.read_header().and_then(Stamp::of_header)
    }

    /// The stamp from the log, under these locks of the wal-index.
    fn wal_stamp(&self, locks: u8) -> Option<Stamp> {
        let words = NonNull::new(self.wal_index.cast_mut())?;
        let word = |at: usize| {
            // SAFETY: the first part of the wal-index, of 32 KiB, is mapped. Other processes write it, too.
            // Acquire, partner: the barriers of SQLite's checkpoint, which has written the file before these words.
            unsafe { words.add(at).as_ref() }.load(Ordering::Acquire)
        };
        let stamp = Stamp::of_wal_index(word);
        let is_idle = || locks & FIXING_LOCKS != 0 && stamp::is_idle(word);
        if stamp.is_none() && is_idle() { self.idle_stamp() } else { stamp }
    }

    /// The stamp of a log without frames, while no other process can be writing to the file.
    fn idle_stamp(&self) -> Option<Stamp> {
        let place = self.place.as_ref().filter(|place| place.is_clocked())?;
        let times = Process::get().clock().settled(place.times()?)?;
        Stamp::of_idle(self.present_header()?, times)
    }

    /// Asks for the pages that a page may be read from now, if it has not yet.
    fn ask_for_pages(&mut self) {
        if !matches!(self.pages, Pages::Unasked) {
            return;
        }
        let stamp = match self.read_locks {
            0 if self.is_immutable => self.header_stamp(),
            // A file whose header names a write-ahead log that is not open yet: other processes may be writing to the
            // file.
            0 => self.header_stamp().filter(Stamp::is_rollback),
            locks => self.wal_stamp(locks),
        };
        if let Some(node) = stamp.and_then(|stamp| self.node_pages(&stamp)) {
            (self.pages, self.last) = (Pages::Node(node), Answer::Node);
            return;
        }
        self.pages = stamp.and_then(|stamp| self.database.begin(stamp, || self.times())).into();
        self.last = match (&self.pages, stamp) {
            (Pages::Some(_), _) => Answer::Pages,
            (_, Some(_)) => Answer::NoRoom,
            (_, None) => Answer::NoStamp(self.read_locks),
        };
    }

    /// The pages of a revision that has this stamp, under the lock that the stamp was read under.
    fn node_pages(&self, stamp: &Stamp) -> Option<Arc<NodePages>> {
        let node = self.node.as_ref().filter(|_| !self.is_past_node)?;
        let times = self.times().and_then(|times| Process::get().clock().settled(times))?;
        node.pages(stamp, times)
    }

    /// Whether the last transaction was served, or why not, in words.
    fn last_in_words(&self) -> &'static str {
        let locks = match self.last {
            Answer::Unasked => return "none has read a page",
            Answer::Pages => return "cached",
            Answer::Node => return "cached by the server",
            Answer::NoRoom => return "the cache could not be made, or has no room for it",
            Answer::NoStamp(locks) => locks,
        };
        // In the words, another header is as good: only its size of pages counts. No transaction pays for them.
        let header = self.header.or_else(|| self.present_header());
        match header.and_then(Stamp::of_header) {
            None => "it is empty, or its pages have less than 4 KiB",
            Some(_) if locks == 0 => "its write-ahead log is not open yet",
            Some(_) if self.wal_index.is_null() => "the index of its log is read only, or not shared",
            Some(_) if self.place.as_ref().is_none_or(|place| !place.is_clocked()) => {
                "its log has no commit yet, and times of its file system do not tell of writes"
            }
            Some(_) => "its log is new, and the file was written just now",
        }
    }

    fn count(&mut self) {
        self.database.served.fetch_add(std::mem::take(&mut self.served), Ordering::Relaxed);
    }

    fn counters(&mut self) -> String {
        self.count();
        let Counters { hits, misses, by_server, direct, bytes } = self.database.counters();
        let past = self.last_in_words();
        format!(
            "{{\"hits\":{hits},\"misses\":{misses},\"server_reads\":{by_server},\"direct_reads\":{direct},\
             \"cached_bytes\":{bytes},\
             \"last_transaction\":\"{past}\"}}"
        )
    }

    /// Reads a page from the pages. Returns whether the buffer has it.
    fn read_page(&mut self, buffer: &mut [u8], position: u64) -> bool {
        self.ask_for_pages();
        if let Pages::Node(pages) = &self.pages
            && pages.is_page(position, buffer.len())
        {
            match pages.read(buffer, position) {
                RevisionRead::Whole => {
                    self.database.by_server.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                RevisionRead::Unanswered => self.node.iter().for_each(|node| node.unanswered()),
                RevisionRead::Over => {}
            }
            // For the rest of the transaction there are the process's own pages.
            self.is_past_node = true;
            self.pages = Pages::Unasked;
            self.ask_for_pages();
        }
        match &self.pages {
            Pages::Some(pages) if pages.is_page(position, buffer.len()) => {
                // SAFETY: the file is open, and SQLite has the thread read it.
                unsafe { pages::read(self.real, pages.file(), buffer, position) }
            }
            _ => false,
        }
    }

    /// Forgets the pages of bytes that were written or cut off.
    fn written(&mut self, position: u64, len: u64) {
        self.header = None;
        self.is_uncommitted = true;
        let pages = self.database.written(position, len);
        if matches!(self.pages, Pages::Some(_) | Pages::Node(_)) {
            self.pages = pages.into();
        }
    }

    fn locked(&mut self, level: c_int) {
        if self.lock == SQLITE_LOCK_NONE {
            self.header = None;
            self.is_past_node = false;
            self.pages = Pages::Unasked;
        }
        if level == SQLITE_LOCK_EXCLUSIVE && self.lock < level {
            let stamp = self.header_stamp();
            self.is_uncommitted = false;
            self.pages = self.database.begin_writes(stamp, || self.times()).into();
        }
        self.lock = self.lock.max(level);
    }

    /// Before a lock is given back, down to `level`.
    fn unlocking(&mut self, level: c_int) {
        if self.lock == SQLITE_LOCK_EXCLUSIVE && level < self.lock {
            self.header = None;
            // If there is a write-ahead log, others change the file without its change counter. An uncommitted
            // transaction is rolled back, perhaps by others, and the change counter may be in use again then.
            let is_uncommitted = std::mem::take(&mut self.is_uncommitted);
            let stamp = self.header_stamp().filter(|stamp| stamp.is_rollback() && !is_uncommitted);
            self.database.end_writes(stamp, self.times());
            self.pages = Pages::Unasked;
        }
        if level == SQLITE_LOCK_NONE {
            self.header = None;
            self.pages = Pages::None;
            self.count();
        }
        self.lock = self.lock.min(level);
    }

    fn shm_locked(&mut self, first: c_int, count: c_int, flags: c_int) {
        if flags & SQLITE_SHM_SHARED != 0 && first >= READ_LOCKS {
            self.read_locks |= 1 << first;
            self.is_past_node = false;
            self.pages = Pages::Unasked;
        } else if flags & SQLITE_SHM_EXCLUSIVE != 0 && may_write(first, count) {
            let locks = self.write_locks | 1 << first;
            self.database.begin_writes(self.wal_stamp(locks), || self.times());
            self.write_locks = locks;
        }
    }

    fn shm_unlocking(&mut self, first: c_int, flags: c_int) {
        let bit = 1 << first;
        if flags & SQLITE_SHM_SHARED != 0 && self.read_locks & bit != 0 {
            self.read_locks &= !bit;
            self.pages = Pages::None;
            self.count();
        } else if flags & SQLITE_SHM_EXCLUSIVE != 0 && self.write_locks & bit != 0 {
            let stamp = self.wal_stamp(self.write_locks);
            self.write_locks &= !bit;
            self.database.end_writes(stamp, self.times());
        }
    }

    /// Before the wal-index goes, and with it all locks on it.
    fn shm_gone(&mut self) {
        while self.write_locks != 0 {
            let stamp = self.wal_stamp(self.write_locks);
            self.write_locks &= self.write_locks - 1;
            self.database.end_writes(stamp, self.times());
        }
        if self.read_locks != 0 {
            self.pages = Pages::None;
        }
        self.read_locks = 0;
        self.wal_index = ptr::null();
    }
}

/// Whether a process that has these locks of the wal-index writes to the file, or restarts the log.
fn may_write(first: c_int, count: c_int) -> bool {
    let has = |lock: c_int| (first..first + count).contains(&lock);
    has(CHECKPOINT_LOCK) || (has(READ_LOCKS + 1) && count > 1)
}

/// # Safety
/// `file` has room for this library's file and SQLite's.
pub unsafe fn real_of(file: *mut sqlite3_file) -> *mut sqlite3_file {
    // SAFETY: the caller's contract.
    unsafe { file.byte_add(REAL_AT) }
}

/// The request of [`adopt`].
pub struct Adopted {
    pub database: Arc<Database>,
    pub node: Option<Arc<NodeDatabase>>,
    /// `None` if the file's place is not known.
    pub place: Option<Place>,
    pub is_immutable: bool,
}

/// Makes `file` one of this library's, whose real file is open.
///
/// # Safety
/// As SQLite calls xOpen; the real file is open.
pub unsafe fn adopt(file: *mut sqlite3_file, adopted: Adopted) {
    let Adopted { database, node, place, is_immutable } = adopted;
    database.opened(place.as_ref().and_then(Place::times));
    // SAFETY: the caller's contract.
    let (real, has_shm) = unsafe {
        let real = NonNull::new_unchecked(real_of(file));
        let methods = &*real.as_ref().pMethods;
        (real, methods.iVersion >= 2 && methods.xShmMap.is_some())
    };
    let connection = Box::new(Connection {
        real,
        database,
        node,
        is_past_node: false,
        place,
        pages: if is_immutable { Pages::Unasked } else { Pages::None },
        lock: SQLITE_LOCK_NONE,
        is_uncommitted: false,
        is_immutable,
        header: None,
        wal_index: ptr::null(),
        read_locks: 0,
        write_locks: 0,
        last: Answer::Unasked,
        served: 0,
    });
    let methods: &'static _ = if has_shm { &METHODS_WITH_SHM } else { &METHODS };
    let base = sqlite3_file { pMethods: methods };
    let ours = MainFile { base, connection: Box::into_raw(connection) };
    // SAFETY: the caller's contract.
    unsafe { file.cast::<MainFile>().write(ours) };
}

/// The connection of a file.
///
/// # Safety
/// `adopt` has made the file, and SQLite calls one method of it at a time.
unsafe fn connection<'f>(file: *mut sqlite3_file) -> &'f mut Connection {
    // SAFETY: the caller's contract.
    unsafe { &mut *(*file.cast::<MainFile>()).connection }
}

/// Calls the method of SQLite's own file, and returns `missing` if there is none.
macro_rules! real {
    ($connection:expr, $method:ident, $missing:expr $(, $argument:expr)*) => {{
        let connection: &mut Connection = $connection;
        // SAFETY: as SQLite calls this method. The real file is open as long as this one.
        unsafe {
            match connection.methods().$method {
                Some(method) => method(connection.real.as_ptr() $(, $argument)*),
                None => $missing,
            }
        }
    }};
}

const METHODS: sqlite3_io_methods = sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

const METHODS_WITH_SHM: sqlite3_io_methods = sqlite3_io_methods {
    iVersion: 2,
    xShmMap: Some(shm_map),
    xShmLock: Some(shm_lock),
    xShmBarrier: Some(shm_barrier),
    xShmUnmap: Some(shm_unmap),
    ..METHODS
};

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    // SAFETY: SQLite calls it as the last method of a file.
    let connection = unsafe { connection(file) };
    let leave = || {
        connection.shm_gone();
        connection.unlocking(SQLITE_LOCK_NONE);
    };
    guarded((), leave);
    let real = connection.real;
    // SAFETY: `adopt` has made it, and nothing uses it after this.
    let gone = unsafe { Box::from_raw(addr_of_mut!(*connection)) };
    // First: once the file is closed, another may get its inode, and would find the pages of this one.
    guarded((), || drop(gone));
    // SAFETY: as SQLite calls it. The real file is open, and its methods stay.
    unsafe {
        let close = real.as_ref().pMethods.as_ref().and_then(|methods| methods.xClose);
        close.map_or(SQLITE_OK, |close| close(real.as_ptr()))
    }
}

unsafe extern "C" fn read(file: *mut sqlite3_file, to: *mut c_void, len: c_int, position: i64) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    let from_us = |connection: &mut Connection| {
        let (bytes, at) = (usize::try_from(len).ok()?, u64::try_from(position).ok()?);
        // SAFETY: SQLite's buffer of so many bytes. They may never have been written, and are only written here.
        let buffer = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        if position == CHANGE_AT && bytes == CHANGE_BYTES {
            buffer.copy_from_slice(&connection.change_counter()?);
            return Some(());
        }
        if connection.read_page(buffer, at) {
            connection.served += 1;
            if connection.served == SERVED_ALONE_MAX {
                connection.count();
            }
            return Some(());
        }
        connection.database.direct.fetch_add(1, Ordering::Relaxed);
        process::DIRECT_READS.fetch_add(1, Ordering::Relaxed);
        None
    };
    match guarded(None, || from_us(connection)) {
        Some(()) => SQLITE_OK,
        None => real!(connection, xRead, SQLITE_IOERR, to, len, position),
    }
}

unsafe extern "C" fn write(file: *mut sqlite3_file, from: *const c_void, len: c_int, position: i64) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    let code = real!(connection, xWrite, SQLITE_IOERR, from, len, position);
    // Also if it failed: a part may have been written.
    changed(connection, position, i64::from(len), code)
}

unsafe extern "C" fn truncate(file: *mut sqlite3_file, bytes: i64) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    let code = real!(connection, xTruncate, SQLITE_IOERR, bytes);
    changed(connection, bytes, i64::MAX - bytes.max(0), code)
}

/// Notes a change by this process; `code` is what the call returned.
fn changed(connection: &mut Connection, position: i64, len: i64, code: c_int) -> c_int {
    let tell = || {
        connection.written(position.max(0) as u64, len.max(0) as u64);
        true
    };
    // If that failed, what is cached is not known any more, and SQLite rolls back.
    if guarded(false, tell) { code } else { SQLITE_IOERR_WRITE }
}

unsafe extern "C" fn sync(file: *mut sqlite3_file, flags: c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    real!(unsafe { connection(file) }, xSync, SQLITE_IOERR, flags)
}

unsafe extern "C" fn file_size(file: *mut sqlite3_file, bytes: *mut i64) -> c_int {
    // SAFETY: as SQLite calls it.
    real!(unsafe { connection(file) }, xFileSize, SQLITE_IOERR, bytes)
}

unsafe extern "C" fn lock(file: *mut sqlite3_file, level: c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    let code = real!(connection, xLock, SQLITE_IOERR, level);
    if code == SQLITE_OK {
        guarded((), || connection.locked(level));
    }
    code
}

unsafe extern "C" fn unlock(file: *mut sqlite3_file, level: c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    guarded((), || connection.unlocking(level));
    real!(connection, xUnlock, SQLITE_IOERR, level)
}

unsafe extern "C" fn check_reserved_lock(file: *mut sqlite3_file, is_locked: *mut c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    real!(unsafe { connection(file) }, xCheckReservedLock, SQLITE_IOERR, is_locked)
}

unsafe extern "C" fn file_control(file: *mut sqlite3_file, operation: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    match operation {
        SQLITE_FCNTL_PRAGMA => {
            // SAFETY: as SQLite calls it with this operation.
            let ours = guarded(Some(SQLITE_ERROR), || unsafe {
                pragma::answer(argument.cast(), || Some(connection.counters()))
            });
            ours.unwrap_or_else(|| real!(connection, xFileControl, SQLITE_NOTFOUND, operation, argument))
        }
        SQLITE_FCNTL_MMAP_SIZE => {
            // SAFETY: the argument of this operation is a number of 64 bits.
            unsafe { argument.cast::<i64>().write(0) };
            SQLITE_OK
        }
        SQLITE_FCNTL_COMMIT_PHASETWO => {
            connection.is_uncommitted = false;
            real!(connection, xFileControl, SQLITE_NOTFOUND, operation, argument)
        }
        SQLITE_FCNTL_VFSNAME => {
            let code = real!(connection, xFileControl, SQLITE_NOTFOUND, operation, argument);
            // SAFETY: the argument of this operation is the place of a text of SQLite's.
            guarded((), || unsafe { pragma::prefix_name(argument.cast()) });
            code
        }
        _ => real!(connection, xFileControl, SQLITE_NOTFOUND, operation, argument),
    }
}

unsafe extern "C" fn sector_size(file: *mut sqlite3_file) -> c_int {
    // SAFETY: as SQLite calls it.
    real!(unsafe { connection(file) }, xSectorSize, 4096)
}

unsafe extern "C" fn device_characteristics(file: *mut sqlite3_file) -> c_int {
    // SAFETY: as SQLite calls it.
    let all = real!(unsafe { connection(file) }, xDeviceCharacteristics, 0);
    // A batch that is given up would change bytes without a call that this library sees.
    all & !(SQLITE_IOCAP_BATCH_ATOMIC | IOCAP_SUBPAGE_READ)
}

unsafe extern "C" fn shm_map(
    file: *mut sqlite3_file,
    region: c_int,
    bytes: c_int,
    extend: c_int,
    place: *mut *mut c_void,
) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    let code = real!(connection, xShmMap, SQLITE_IOERR, region, bytes, extend, place);
    if code == SQLITE_OK && region == 0 && bytes as usize >= stamp::WAL_INDEX_WORDS * size_of::<u32>() {
        // SAFETY: SQLite's place for the address.
        connection.wal_index = unsafe { *place }.cast_const().cast();
    }
    code
}

unsafe extern "C" fn shm_lock(file: *mut sqlite3_file, first: c_int, count: c_int, flags: c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    if flags & SQLITE_SHM_UNLOCK != 0 {
        guarded((), || connection.shm_unlocking(first, flags));
    }
    let code = real!(connection, xShmLock, SQLITE_IOERR, first, count, flags);
    if code == SQLITE_OK && flags & SQLITE_SHM_LOCK != 0 {
        guarded((), || connection.shm_locked(first, count, flags));
    }
    code
}

unsafe extern "C" fn shm_barrier(file: *mut sqlite3_file) {
    // SAFETY: as SQLite calls it.
    real!(unsafe { connection(file) }, xShmBarrier, ());
}

unsafe extern "C" fn shm_unmap(file: *mut sqlite3_file, is_last: c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    let connection = unsafe { connection(file) };
    guarded((), || connection.shm_gone());
    real!(connection, xShmUnmap, SQLITE_OK, is_last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_that_let_a_process_write_are_known() {
        assert!(may_write(CHECKPOINT_LOCK, 1), "a checkpoint");
        assert!(may_write(READ_LOCKS + 1, 4), "a restart of the log");
        assert!(may_write(1, 7), "a recovery");
        assert!(!may_write(0, 1), "a writer of the log");
        assert!(!may_write(READ_LOCKS + 1, 1), "a reader that sets its mark");
        assert!(!may_write(READ_LOCKS, 1));
    }
}
