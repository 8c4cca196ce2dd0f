//! Pragma: settings and counters in SQL.
//!
//! ```text
//!   PRAGMA quinion_memory             the bound of the cache, in bytes
//!   PRAGMA quinion_memory = '512M'    another bound, for all connections of the process
//!   PRAGMA quinion_stats              counters of the process, as one object of JSON
//!   PRAGMA quinion_database           those of the database, and why its last transaction was not served
//! ```

use std::ffi::{CStr, c_char, c_int};
use std::fmt::Write;
use std::sync::atomic::Ordering;

use libsqlite3_sys::{SQLITE_ERROR, SQLITE_OK, sqlite3_free};

use crate::ffi::text_of_sqlite;
use crate::process::{DIRECT_READS, Process, memory_of_text, set_memory};

/// Answers a pragma: `words` are the place of the answer, the pragma's name, and its argument or null. `None`: it is
/// another VFS's. `database` has the counters of the database, if it has any.
///
/// # Safety
/// As the argument of `SQLITE_FCNTL_PRAGMA`.
pub unsafe fn answer(words: *mut *mut c_char, database: impl FnOnce() -> Option<String>) -> Option<c_int> {
    // SAFETY: the caller's contract.
    let (name, argument) = unsafe {
        let argument = *words.add(2);
        (CStr::from_ptr(*words.add(1)), (!argument.is_null()).then(|| CStr::from_ptr(argument)))
    };
    let answer = match name.to_str().ok()?.to_ascii_lowercase().as_str() {
        "quinion_memory" => memory(argument),
        "quinion_stats" => Ok(stats()),
        "quinion_database" => Ok(database()?),
        _ => return None,
    };
    let (text, code) = match &answer {
        Ok(text) => (text, SQLITE_OK),
        Err(wrong) => (wrong, SQLITE_ERROR),
    };
    // SAFETY: the caller's contract.
    unsafe { *words = text_of_sqlite(text) };
    Some(code)
}

fn memory(wanted: Option<&CStr>) -> Result<String, String> {
    let Some(cache) = Process::get().cache() else {
        return Err("the cache could not be made; see SQLite's error log".to_owned());
    };
    if let Some(wanted) = wanted {
        let bytes = memory_of_text(&wanted.to_string_lossy())?;
        set_memory(&cache, bytes)?;
    }
    Ok(cache.stats().memory_bytes.to_string())
}

fn stats() -> String {
    let mut text = format!("{{\"direct_reads\":{}", DIRECT_READS.load(Ordering::Relaxed));
    if let Some(cache) = Process::get().cache() {
        for (name, number) in cache.stats().numbers() {
            let _ = write!(text, ",\"{name}\":{number}");
        }
    }
    text.push('}');
    text
}

/// Says in the name of SQLite's VFS that this one is before it.
///
/// # Safety
/// As the argument of `SQLITE_FCNTL_VFSNAME`, after it was answered.
pub unsafe fn prefix_name(place: *mut *mut c_char) {
    // SAFETY: the caller's contract: a text of SQLite's, or null, which this call may replace.
    unsafe {
        let real = *place;
        if real.is_null() {
            *place = text_of_sqlite("quinion");
            return;
        }
        let name = text_of_sqlite(&format!("quinion/{}", CStr::from_ptr(real).to_string_lossy()));
        if !name.is_null() {
            sqlite3_free(real.cast());
            *place = name;
        }
    }
}
