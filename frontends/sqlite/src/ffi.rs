//! FFI: what crosses from Rust to SQLite besides numbers.
//!
//! ```text
//!   a panic     ends at the method in which it happened, which fails
//!   a text      in memory of SQLite's, which frees it
//!   a message   for SQLite's error log (`SQLITE_CONFIG_LOG`)
//! ```

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use libsqlite3_sys::{sqlite3_log, sqlite3_malloc64};

/// The method's result, or `failed` if it panics: no panic leaves a method.
pub fn guarded<T>(failed: T, method: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(method)).unwrap_or_else(|panic| {
        std::mem::forget(panic); // its end may panic again
        failed
    })
}

/// A text that SQLite frees. Null if there is no memory.
pub fn text_of_sqlite(text: &str) -> *mut c_char {
    let text = text.split('\0').next().unwrap_or_default();
    // SAFETY: SQLite is there; what it gives has so many bytes, all of which are written.
    unsafe {
        let place = sqlite3_malloc64(text.len() as u64 + 1).cast::<u8>();
        if !place.is_null() {
            place.copy_from_nonoverlapping(text.as_ptr(), text.len());
            place.add(text.len()).write(0);
        }
        place.cast()
    }
}

pub fn log(code: c_int, text: &str) {
    let text = text.replace('\0', "?") + "\0";
    // SAFETY: a format, and the text for it.
    unsafe { sqlite3_log(code, c"%s".as_ptr(), text.as_ptr().cast::<c_char>()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_answer() {
        assert_eq!(guarded(7, || 3), 3);
        assert_eq!(guarded(7, || panic!("the shelf is empty")), 7);
    }
}
