//! Quinion for SQLite: a VFS that reads databases through one page cache of the process.
//!
//! ```text
//!   .load ./quinion_vfs                          once in a process; then, by each connection,
//!   .open file:x.db?vfs=quinion                  through the cache
//!   .open file:x.db?vfs=quinion&server=main      the same, and its pages are those of all processes of the node
//!   .open file:x?vfs=quinion&url=s3://b/x.db     an object, through the server of a node; read only
//!
//!   lib ---> vfs ---> connection ---> database ---> pages ---> the cache (crate `quinion`)
//!             |           |              |-- stamp -- clock
//!             |           |              `-- place
//!             |           |-- pragma
//!             |           `---> node ----.
//!             `---> object --------------+--> the node's server (crate `quinion-service`)
//!   process: the cache and the open databases, for all of these
//! ```
//!
//! SQLite gives each connection a page cache of its own, of 2 MB unless told. Under it lies the kernel's, which has no
//! bound but the machine's. This VFS puts one cache between: bounded, of all connections of a process, and by Quinion's
//! replacement policy. All but reads of whole pages goes to SQLite's own VFS as it is: locks, journals, the write-ahead
//! log, syncs. So other processes may use the same databases at the same time, with this VFS or without.
//!
//! Cached pages are right as long as SQLite's own page cache would be; `stamp.rs` says why, and `database.rs` how.
//!
//! Not here: pages of less than 4 KiB, which are read past the cache; memory maps (`PRAGMA mmap_size` is 0).

mod ffi;
mod clock;
mod connection;
mod database;
mod node;
mod object;
mod pages;
mod place;
mod pragma;
mod process;
mod stamp;
mod vfs;

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use libsqlite3_sys::{SQLITE_ERROR, SQLITE_OK_LOAD_PERMANENTLY, sqlite3, sqlite3_api_routines};

use crate::ffi::{guarded, text_of_sqlite};

/// The error for a second copy of SQLite in the process: the first would go on with the functions of the second.
const ANOTHER: &CStr = c"another copy of SQLite in this process has loaded this extension, which serves one";

/// Called by SQLite when it loads `quinion_vfs`: registers the VFS `quinion`, which stays until the process ends.
///
/// # Safety
/// As SQLite calls the entry point of an extension.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sqlite3_quinionvfs_init(
    _connection: *mut sqlite3,
    message: *mut *mut c_char,
    functions: *mut sqlite3_api_routines,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { load(message, functions, vfs::VfsRole::Named) }
}

/// Loads the VFS as the default: databases that are opened without `vfs=` in a URI are read through it.
///
/// # Safety
/// As SQLite calls the entry point of an extension.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sqlite3_quinionvfsdefault_init(
    _connection: *mut sqlite3,
    message: *mut *mut c_char,
    functions: *mut sqlite3_api_routines,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { load(message, functions, vfs::VfsRole::Default) }
}

/// # Safety
/// As the entry points.
unsafe fn load(message: *mut *mut c_char, functions: *mut sqlite3_api_routines, role: vfs::VfsRole) -> c_int {
    static FIRST: AtomicPtr<sqlite3_api_routines> = AtomicPtr::new(null_mut());
    // Relaxed: what it points to is SQLite's, and never written.
    let first = FIRST.compare_exchange(null_mut(), functions, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_err_and(|first| first != functions) {
        // SAFETY: the caller's contract. The text is made, and later freed, by the SQLite that calls.
        unsafe {
            if let (Some(message), Some(print)) = (message.as_mut(), (*functions).mprintf) {
                *message = print(ANOTHER.as_ptr());
            }
        }
        return SQLITE_ERROR;
    }
    let register = || {
        // SAFETY: the caller's contract.
        unsafe { libsqlite3_sys::rusqlite_extension_init2(functions) }.map_err(|error| error.to_string())?;
        vfs::register(role)
    };
    match guarded(Err("a defect of Quinion stopped the registration".to_owned()), register) {
        Ok(()) => SQLITE_OK_LOAD_PERMANENTLY,
        Err(why) => {
            // SAFETY: the caller's contract: it is null or a place for a text of SQLite's.
            if let Some(message) = unsafe { message.as_mut() } {
                *message = text_of_sqlite(&why);
            }
            SQLITE_ERROR
        }
    }
}
