//! VFS: what SQLite asks of a file system. The VFS that was the default when this library was loaded answers all of it.
//!
//! ```text
//!   xOpen of a main database      SQLite's file behind one of this library (connection)
//!        with `url` in its URI    an object of the node's server (object)
//!        with `server` alone      as the first, and its pages are shared by that server (node)
//!        of all else              SQLite's file as it is
//!   the rest                      passed on
//! ```
//!
//! A database is known by device and inode, for which its path is asked. SQLite's file says whether the path is its own
//! (`SQLITE_FCNTL_HAS_MOVED`); if it is not, or not a regular file, or changes meanwhile, the connection reads past the
//! cache.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null;

use libsqlite3_sys::*;

use crate::connection::Adopted;
use crate::ffi::{guarded, log};
use crate::place::Place;
use crate::process::{Key, MemoryBounds, NodeKey, Process, memory_of_text};
use crate::{connection, object};

const NAME: &CStr = c"quinion";

/// The databases that use the VFS.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum VfsRole {
    /// Databases that name it.
    Named,
    /// Databases that name no other.
    Default,
}

/// Registers the VFS in this role, unless it is there already.
///
/// # Errors
/// SQLite has no VFS of its own, or refuses this one, in words.
pub fn register(role: VfsRole) -> Result<(), String> {
    // SAFETY: SQLite is loaded, since it calls this. A registered VFS stays registered.
    unsafe {
        let ours = sqlite3_vfs_find(NAME.as_ptr());
        if !ours.is_null() {
            return registered(ours, role);
        }
        let real = sqlite3_vfs_find(null());
        let Some(known) = real.as_ref() else {
            return Err("SQLite has no VFS below which the files are; build it with one".to_owned());
        };
        let longest = connection::REAL_AT as c_int + known.szOsFile;
        let ours = Box::new(sqlite3_vfs {
            iVersion: known.iVersion.min(3),
            szOsFile: longest.max(object::FILE_BYTES as c_int),
            mxPathname: known.mxPathname,
            pNext: std::ptr::null_mut(),
            zName: NAME.as_ptr(),
            pAppData: real.cast(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: Some(dl_open),
            xDlError: Some(dl_error),
            xDlSym: Some(dl_sym),
            xDlClose: Some(dl_close),
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: Some(get_last_error),
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: Some(set_system_call),
            xGetSystemCall: Some(get_system_call),
            xNextSystemCall: Some(next_system_call),
        });
        registered(Box::into_raw(ours), role)
    }
}

/// # Safety
/// `ours` stays.
unsafe fn registered(ours: *mut sqlite3_vfs, role: VfsRole) -> Result<(), String> {
    // SAFETY: the caller's contract.
    match unsafe { sqlite3_vfs_register(ours, (role == VfsRole::Default).into()) } {
        SQLITE_OK => Ok(()),
        code => Err(format!("SQLite does not register the VFS, with result code {code}")),
    }
}

/// The VFS to which this one passes calls on.
///
/// # Safety
/// `vfs` is the one that was registered here.
unsafe fn real_vfs(vfs: *mut sqlite3_vfs) -> *mut sqlite3_vfs {
    // SAFETY: the caller's contract.
    unsafe { (*vfs).pAppData.cast() }
}

/// A parameter of the URI by which a main database is opened.
///
/// # Safety
/// `name` is a file's name as xOpen has it.
unsafe fn parameter<'n>(name: *const c_char, key: &CStr) -> Option<&'n CStr> {
    // SAFETY: the caller's contract.
    unsafe {
        let value = sqlite3_uri_parameter(name, key.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

/// The bounds of the cache that a URI gives.
///
/// # Safety
/// As that of [`parameter`].
unsafe fn bounds_of(name: *const c_char) -> Result<MemoryBounds, String> {
    let bytes_of = |key: &CStr| {
        // SAFETY: the caller's contract.
        let text = unsafe { parameter(name, key) }.map(CStr::to_string_lossy);
        let bytes = text.map(|text| memory_of_text(&text)).transpose();
        bytes.map_err(|wrong| format!("{} of the URI: {wrong}", key.to_string_lossy()))
    };
    Ok(MemoryBounds { memory: bytes_of(c"quinion_memory")?, memory_max: bytes_of(c"quinion_memory_max")? })
}

unsafe extern "C" fn open(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: as SQLite calls it; a file without methods is not closed.
    unsafe { (*file).pMethods = null() };
    // SAFETY: as SQLite calls it.
    let real = unsafe { real_vfs(vfs) };
    // SAFETY: as SQLite calls it.
    let Some(real_open) = (unsafe { (*real).xOpen }) else {
        return SQLITE_CANTOPEN;
    };
    if flags & SQLITE_OPEN_MAIN_DB == 0 || name.is_null() {
        // SAFETY: as SQLite calls it.
        return unsafe { real_open(real, name, file, flags, out_flags) };
    }
    // SAFETY: the name of a main database.
    if let Some(url) = unsafe { parameter(name, c"url") } {
        // SAFETY: the name of a main database.
        let server = unsafe { parameter(name, c"server") };
        // SAFETY: as SQLite calls it.
        return guarded(SQLITE_CANTOPEN, || unsafe { object::open(file, url, server, out_flags) });
    }
    // SAFETY: the name of a main database.
    let before = guarded(None, || Place::of_name(unsafe { CStr::from_ptr(name) }));
    // SAFETY: the memory behind this file's own has as many bytes as it wants.
    let inner = unsafe { connection::real_of(file) };
    // SAFETY: as SQLite calls it.
    let code = unsafe {
        (*inner).pMethods = null();
        real_open(real, name, inner, flags, out_flags)
    };
    if code != SQLITE_OK {
        return code;
    }
    let wrap = || {
        // SAFETY: `inner` is open.
        unsafe { wrap(name, file, inner, before) }
    };
    match guarded(SQLITE_CANTOPEN, wrap) {
        SQLITE_OK => SQLITE_OK,
        code => {
            // SAFETY: it is open, and SQLite does not know of it.
            unsafe {
                (*inner).pMethods.as_ref().and_then(|methods| methods.xClose).map(|close| close(inner))
            };
            code
        }
    }
}

/// Puts this library's file before `inner`, which is open. `before` is what its path was.
///
/// # Safety
/// As above.
unsafe fn wrap(
    name: *const c_char,
    file: *mut sqlite3_file,
    inner: *mut sqlite3_file,
    before: Option<Place>,
) -> c_int {
    // SAFETY: the name of a main database.
    let bounds = match unsafe { bounds_of(name) } {
        Ok(bounds) => bounds,
        Err(wrong) => {
            log(SQLITE_CANTOPEN, &wrong);
            return SQLITE_CANTOPEN;
        }
    };
    // SAFETY: the name of a main database.
    let is_immutable = unsafe { sqlite3_uri_boolean(name, c"immutable".as_ptr(), 0) != 0 };
    // SAFETY: as above. A new file has been made by the open.
    let place = unsafe { own_place(name, inner) };
    let place = place.filter(|place| before.is_none_or(|before| before.inode() == place.inode()));
    let database = match &place {
        Some(place) => Process::get().database(Key { inode: place.inode(), is_immutable }, bounds),
        None => Process::get().lone_database(bounds),
    };
    // SAFETY: the name of a main database.
    let server = unsafe { parameter(name, c"server") };
    let node = server.zip(place.as_ref()).and_then(|(server, place)| {
        Process::get().node_database(NodeKey { inode: place.inode(), server: server.to_owned() }, place)
    });
    match database {
        // SAFETY: as above.
        Ok(database) => unsafe {
            connection::adopt(file, Adopted { database, node, place, is_immutable });
            SQLITE_OK
        },
        Err(wrong) => {
            log(SQLITE_CANTOPEN, &format!("the cache of databases cannot be made: {wrong}"));
            SQLITE_CANTOPEN
        }
    }
}

/// The place of an open file, if its path still leads to it.
///
/// # Safety
/// `name` is the name of the open file `inner`.
unsafe fn own_place(name: *const c_char, inner: *mut sqlite3_file) -> Option<Place> {
    // SAFETY: the caller's contract.
    unsafe {
        let name = CStr::from_ptr(name);
        let place = Place::of_name(name)?;
        let mut has_moved: c_int = 1;
        let control = (*inner).pMethods.as_ref()?.xFileControl?;
        let code = control(inner, SQLITE_FCNTL_HAS_MOVED, (&raw mut has_moved).cast());
        let again = Place::of_name(name)?;
        (code == SQLITE_OK && has_moved == 0 && again.inode() == place.inode()).then_some(place)
    }
}

/// Calls the function of the VFS below, and returns `missing` if it has none.
macro_rules! real {
    ($vfs:ident, $function:ident, $missing:expr $(, $argument:expr)*) => {
        // SAFETY: as SQLite calls this method.
        unsafe {
            let real = real_vfs($vfs);
            match (*real).$function {
                Some(function) => function(real $(, $argument)*),
                None => $missing,
            }
        }
    };
}

unsafe extern "C" fn delete(vfs: *mut sqlite3_vfs, name: *const c_char, sync: c_int) -> c_int {
    real!(vfs, xDelete, SQLITE_IOERR, name, sync)
}

unsafe extern "C" fn access(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    flags: c_int,
    place: *mut c_int,
) -> c_int {
    real!(vfs, xAccess, SQLITE_IOERR, name, flags, place)
}

unsafe extern "C" fn full_pathname(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    len: c_int,
    place: *mut c_char,
) -> c_int {
    real!(vfs, xFullPathname, SQLITE_CANTOPEN, name, len, place)
}

unsafe extern "C" fn dl_open(vfs: *mut sqlite3_vfs, name: *const c_char) -> *mut c_void {
    real!(vfs, xDlOpen, std::ptr::null_mut(), name)
}

unsafe extern "C" fn dl_error(vfs: *mut sqlite3_vfs, len: c_int, place: *mut c_char) {
    real!(vfs, xDlError, (), len, place);
}

type Symbol = Option<unsafe extern "C" fn(*mut sqlite3_vfs, *mut c_void, *const c_char)>;

unsafe extern "C" fn dl_sym(vfs: *mut sqlite3_vfs, library: *mut c_void, name: *const c_char) -> Symbol {
    real!(vfs, xDlSym, None, library, name)
}

unsafe extern "C" fn dl_close(vfs: *mut sqlite3_vfs, library: *mut c_void) {
    real!(vfs, xDlClose, (), library);
}

unsafe extern "C" fn randomness(vfs: *mut sqlite3_vfs, len: c_int, place: *mut c_char) -> c_int {
    real!(vfs, xRandomness, 0, len, place)
}

unsafe extern "C" fn sleep(vfs: *mut sqlite3_vfs, microseconds: c_int) -> c_int {
    real!(vfs, xSleep, 0, microseconds)
}

unsafe extern "C" fn current_time(vfs: *mut sqlite3_vfs, place: *mut f64) -> c_int {
    real!(vfs, xCurrentTime, SQLITE_ERROR, place)
}

unsafe extern "C" fn get_last_error(vfs: *mut sqlite3_vfs, len: c_int, place: *mut c_char) -> c_int {
    real!(vfs, xGetLastError, 0, len, place)
}

unsafe extern "C" fn current_time_int64(vfs: *mut sqlite3_vfs, place: *mut i64) -> c_int {
    real!(vfs, xCurrentTimeInt64, SQLITE_ERROR, place)
}

unsafe extern "C" fn set_system_call(
    vfs: *mut sqlite3_vfs,
    name: *const c_char,
    function: sqlite3_syscall_ptr,
) -> c_int {
    real!(vfs, xSetSystemCall, SQLITE_NOTFOUND, name, function)
}

unsafe extern "C" fn get_system_call(vfs: *mut sqlite3_vfs, name: *const c_char) -> sqlite3_syscall_ptr {
    real!(vfs, xGetSystemCall, None, name)
}

unsafe extern "C" fn next_system_call(vfs: *mut sqlite3_vfs, name: *const c_char) -> *const c_char {
    real!(vfs, xNextSystemCall, null(), name)
}
