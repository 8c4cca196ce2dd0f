//! Object: a database that is an object of a store, read through the server of the node.
//!
//! ```text
//!   file:any-name?vfs=quinion&url=s3://bucket/x.db&server=main
//!        `-- the server opens it with its stores and credentials; its memory and disk tier are for all processes
//! ```
//!
//! It is read only, and one version of the object for as long as it is open. SQLite is told that the file is immutable,
//! so it takes no locks and looks for no journal that is to be rolled back. An object whose write-ahead log was not
//! copied back into it before it was uploaded lacks what stands there.

use std::ffi::{CStr, c_int, c_void};

use libsqlite3_sys::*;
use quinion_service::{Client, ClientFile};

use crate::ffi::{guarded, log};
use crate::pragma;

/// The default server.
const SERVER: &str = "default";

/// A file as SQLite has it.
#[repr(C)]
struct ObjectFile {
    base: sqlite3_file,
    object: *mut ClientFile,
}

/// Bytes that SQLite has to have for it.
pub const FILE_BYTES: usize = size_of::<ObjectFile>();

/// Opens an object.
///
/// # Safety
/// As SQLite calls xOpen.
pub unsafe fn open(
    file: *mut sqlite3_file,
    url: &CStr,
    server: Option<&CStr>,
    out_flags: *mut c_int,
) -> c_int {
    let opened = || {
        let text = |text: &CStr| text.to_str().map(str::to_owned).map_err(|_| "it is not UTF-8".to_owned());
        let server = server.map_or_else(|| Ok(SERVER.to_owned()), text)?;
        let client = Client::connect(&server).map_err(|error| error.to_string())?;
        client.open(&text(url)?).map_err(|error| error.to_string())
    };
    let object = match opened() {
        Ok(object) => object,
        Err(wrong) => {
            log(SQLITE_CANTOPEN, &format!("{}: {wrong}", url.to_string_lossy()));
            return SQLITE_CANTOPEN;
        }
    };
    let ours =
        ObjectFile { base: sqlite3_file { pMethods: &METHODS }, object: Box::into_raw(Box::new(object)) };
    // SAFETY: the caller's contract: memory of SQLite's for a file, and a place for flags or null.
    unsafe {
        file.cast::<ObjectFile>().write(ours);
        if let Some(flags) = out_flags.as_mut() {
            *flags = SQLITE_OPEN_READONLY | SQLITE_OPEN_MAIN_DB;
        }
    }
    SQLITE_OK
}

/// # Safety
/// `open` has made the file.
unsafe fn object<'f>(file: *mut sqlite3_file) -> &'f ClientFile {
    // SAFETY: the caller's contract.
    unsafe { &*(*file.cast::<ObjectFile>()).object }
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
    xUnlock: Some(lock),
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

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    // SAFETY: `open` has made it, and it is the last method that SQLite calls.
    let object = unsafe { Box::from_raw((*file.cast::<ObjectFile>()).object) };
    guarded((), || drop(object));
    SQLITE_OK
}

unsafe extern "C" fn read(file: *mut sqlite3_file, to: *mut c_void, len: c_int, position: i64) -> c_int {
    let read = || {
        let (Ok(len), Ok(position)) = (usize::try_from(len), u64::try_from(position)) else {
            return SQLITE_IOERR_READ;
        };
        // SAFETY: as SQLite calls it. The bytes may never have been written, and are only written here.
        let (object, buffer) =
            unsafe { (object(file), std::slice::from_raw_parts_mut(to.cast::<u8>(), len)) };
        let there = object.len().saturating_sub(position).min(len as u64) as usize;
        let (there, missing) = buffer.split_at_mut(there);
        if let Err(error) = object.read_exact_at(there, position) {
            log(SQLITE_IOERR_READ, &format!("{}: {error}", object.name()));
            return SQLITE_IOERR_READ;
        }
        missing.fill(0);
        if missing.is_empty() { SQLITE_OK } else { SQLITE_IOERR_SHORT_READ }
    };
    guarded(SQLITE_IOERR_READ, read)
}

unsafe extern "C" fn write(
    _file: *mut sqlite3_file,
    _from: *const c_void,
    _len: c_int,
    _position: i64,
) -> c_int {
    SQLITE_READONLY
}

unsafe extern "C" fn truncate(_file: *mut sqlite3_file, _bytes: i64) -> c_int {
    SQLITE_READONLY
}

unsafe extern "C" fn sync(_file: *mut sqlite3_file, _flags: c_int) -> c_int {
    SQLITE_OK
}

unsafe extern "C" fn file_size(file: *mut sqlite3_file, bytes: *mut i64) -> c_int {
    // SAFETY: as SQLite calls it.
    unsafe { *bytes = i64::try_from(object(file).len()).unwrap_or(i64::MAX) };
    SQLITE_OK
}

unsafe extern "C" fn lock(_file: *mut sqlite3_file, _level: c_int) -> c_int {
    SQLITE_OK
}

unsafe extern "C" fn check_reserved_lock(_file: *mut sqlite3_file, is_locked: *mut c_int) -> c_int {
    // SAFETY: as SQLite calls it.
    unsafe { *is_locked = 0 };
    SQLITE_OK
}

unsafe extern "C" fn file_control(
    _file: *mut sqlite3_file,
    operation: c_int,
    argument: *mut c_void,
) -> c_int {
    match operation {
        SQLITE_FCNTL_PRAGMA => {
            // SAFETY: as SQLite calls it with this operation.
            let ours = guarded(Some(SQLITE_ERROR), || unsafe { pragma::answer(argument.cast(), || None) });
            ours.unwrap_or(SQLITE_NOTFOUND)
        }
        SQLITE_FCNTL_VFSNAME => {
            // SAFETY: the argument of this operation is the place of a text of SQLite's.
            guarded((), || unsafe { pragma::prefix_name(argument.cast()) });
            SQLITE_OK
        }
        _ => SQLITE_NOTFOUND,
    }
}

unsafe extern "C" fn sector_size(_file: *mut sqlite3_file) -> c_int {
    4096
}

unsafe extern "C" fn device_characteristics(_file: *mut sqlite3_file) -> c_int {
    SQLITE_IOCAP_IMMUTABLE
}
