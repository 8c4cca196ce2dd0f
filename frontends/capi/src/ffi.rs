//! FFI: what crosses from Rust to C is a number, and a message that waits in the thread.
//!
//! ```text
//!   Ok(answer)      the answer
//!   Err(failure)    -errno; the message is kept for qn_error_message()
//!   a panic         -ENOTRECOVERABLE, and a message; what unwound has run its destructors
//! ```
//!
//! A panic is a defect of Quinion: its message says so, and that the cache is not to be relied upon any more. One of a
//! callback that is written in Rust is caught before it reaches the cache, and is an error of the backend's.
//!
//! Not an invariant: that the process lives on when memory for a few bytes cannot be had. Rust ends it then, as the
//! kernel would a little later.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use quinion::ErrorKind;
use quinion_service::ErrorKind as ServiceErrorKind;

/// Why a call failed: an error number, and what was asked, what is wrong, what to do.
#[derive(Debug)]
pub(crate) struct Failure(Box<(i32, String)>);

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(errno: i32, text: impl Into<String>) -> Self {
        Self(Box::new((errno, text.into())))
    }

    pub(crate) fn errno(&self) -> i32 {
        self.0.0
    }

    #[cold]
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, text)
    }
}

impl From<quinion::Error> for Failure {
    #[cold]
    fn from(error: quinion::Error) -> Self {
        let (kind, known, text) = (error.kind(), error.raw_os_error(), in_words_of_c(error.to_string()));
        let is_directory = io::Error::from(error).kind() == io::ErrorKind::IsADirectory;
        let errno = match kind {
            ErrorKind::Open if is_directory => libc::EISDIR,
            ErrorKind::Open | ErrorKind::Build => known.unwrap_or(libc::EINVAL),
            ErrorKind::WouldBlock => libc::EAGAIN,
            ErrorKind::NoMemory => libc::ENOBUFS,
            ErrorKind::Forked => libc::ECHILD,
            ErrorKind::InvalidInput => libc::EINVAL,
            ErrorKind::Unsupported => libc::EOPNOTSUPP,
            ErrorKind::ReadOnly => known.unwrap_or(libc::EBADF),
            ErrorKind::NoSpace => known.unwrap_or(libc::ENOSPC),
            ErrorKind::Busy => libc::EBUSY,
            ErrorKind::Changed => libc::ESTALE,
            _ => known.unwrap_or(libc::EIO),
        };
        Self::new(errno, text)
    }
}

impl From<quinion_service::Error> for Failure {
    #[cold]
    fn from(error: quinion_service::Error) -> Self {
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
        let known = source.and_then(io::Error::raw_os_error);
        let errno = match error.kind() {
            ServiceErrorKind::Connect
                if source.is_some_and(|source| source.kind() == io::ErrorKind::InvalidInput) =>
            {
                libc::EINVAL
            }
            // No socket of that name is no server, and not a missing file of the caller's.
            ServiceErrorKind::Connect => {
                known.filter(|&number| number != libc::ENOENT).unwrap_or(libc::ECONNREFUSED)
            }
            ServiceErrorKind::Changed => libc::ESTALE,
            ServiceErrorKind::Fetch => libc::EREMOTEIO,
            ServiceErrorKind::OwnerDead => libc::ECONNRESET,
            ServiceErrorKind::TimedOut => libc::ETIMEDOUT,
            ServiceErrorKind::Full => libc::ENOBUFS,
            ServiceErrorKind::Forked => libc::ECHILD,
            ServiceErrorKind::Open => known.unwrap_or(libc::EINVAL),
            _ => known.unwrap_or(libc::EIO),
        };
        Self::new(errno, error.to_string())
    }
}

/// Remedies in the library's messages, for callers in Rust, and the same in C. `tests/c/calls.c` looks for each.
const REMEDIES: [(&str, &str); 6] = [
    ("open it by Cache::open_with, with OpenOptions::new().write(true)", "open it with QN_OPEN_WRITE"),
    ("add OpenOptions::write(true)", "add QN_OPEN_WRITE"),
    ("without nowait and cached_only", "without QN_READ_NOWAIT and QN_READ_CACHED_ONLY"),
    ("after nowait,", "after QN_READ_NOWAIT,"),
    ("open the file with OnPinned::Detach", "open the file with a pin_wait_ms of 0"),
    ("raise the limit by Pool::set_limit", "raise the limit by qn_pool_set_limit()"),
];

#[cold]
fn in_words_of_c(text: String) -> String {
    REMEDIES.iter().fold(text, |text, (rust, c)| text.replace(rust, c))
}

pub(crate) trait Answer {
    fn of_errno(errno: i32) -> Self;
}

impl Answer for i32 {
    fn of_errno(errno: i32) -> Self {
        -errno
    }
}

impl Answer for i64 {
    fn of_errno(errno: i32) -> Self {
        -i64::from(errno)
    }
}

#[inline(always)]
pub(crate) fn ffi_call<A: Answer>(call: impl FnOnce() -> Result<A>) -> A {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(answer)) => answer,
        Ok(Err(failure)) => A::of_errno(set_last_error(failure)),
        Err(panic) => A::of_errno(set_last_error(panicked(panic))),
    }
}

/// Like `ffi_call`, for a callback: a panic in it is an error of the backend's.
pub(crate) fn guarded<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(io::Error::other(text_of(panic))))
}

#[cold]
fn panicked(panic: Box<dyn Any + Send>) -> Failure {
    let text = format!(
        "a defect of Quinion, or of a callback, stopped this call: {}; report it, and do not rely on this cache",
        text_of(panic)
    );
    Failure::new(libc::ENOTRECOVERABLE, text)
}

/// A panic's text. Its payload is not dropped, because that may panic again.
fn text_of(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    std::mem::forget(panic);
    text.unwrap_or_else(|| "a panic without a text".to_owned())
}

thread_local! {
    static MESSAGE: RefCell<Option<CString>> = const { RefCell::new(None) };
}

#[cold]
fn set_last_error(failure: Failure) -> i32 {
    let (errno, text) = *failure.0;
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // A thread that is ending has no message any more.
    let _ = MESSAGE.try_with(|message| *message.borrow_mut() = Some(text));
    errno
}

/// The message of the last call of this thread that failed: what was asked, what is wrong, what to do.
///
/// Never NULL; "" before the first failure. The text is the library's, in UTF-8, and stays until the next call of this
/// thread that fails. A call that succeeds does not change it. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn qn_error_message() -> *const c_char {
    // This cannot panic, and has no number to return.
    let text = |message: &RefCell<Option<CString>>| match &*message.borrow() {
        Some(text) => text.as_ptr(),
        None => c"".as_ptr(),
    };
    MESSAGE.try_with(text).unwrap_or(c"this thread is ending and has no message any more".as_ptr())
}

/// The release of the library that runs, as major * 65536 + minor * 256 + patch: compare with QN_VERSION, that of the
/// header. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn qn_version() -> u32 {
    QN_VERSION
}

/// The release of this header, as qn_version() tells that of the library.
pub const QN_VERSION: u32 = 0x000100;

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn message() -> String {
        // SAFETY: the function returns a text that stays until the next failure of this thread.
        unsafe { CStr::from_ptr(qn_error_message()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_number_and_a_message() {
        assert_eq!(ffi_call(|| -> Result<i32> { panic!("the shelf is empty") }), -libc::ENOTRECOVERABLE);
        assert!(message().contains("the shelf is empty"), "{}", message());
        let number = 7;
        assert_eq!(ffi_call(|| -> Result<i64> { panic!("of {number}") }), -i64::from(libc::ENOTRECOVERABLE));
        assert!(message().contains("of 7"), "{}", message());
    }

    struct Worse;

    impl Drop for Worse {
        fn drop(&mut self) {
            panic!("and again");
        }
    }

    #[test]
    fn a_payload_that_panics_when_dropped_does_not_leave_either() {
        assert_eq!(ffi_call(|| -> Result<i32> { std::panic::panic_any(Worse) }), -libc::ENOTRECOVERABLE);
    }

    #[test]
    fn messages_are_of_a_thread_and_stay_until_the_next_failure() {
        assert_eq!(ffi_call(|| -> Result<i32> { Err(Failure::invalid("one\0two")) }), -libc::EINVAL);
        assert_eq!(ffi_call(|| Ok(3)), 3);
        std::thread::spawn(|| assert_eq!(message(), "")).join().unwrap();
        assert_eq!(message(), "one?two");
    }

    #[test]
    fn the_version_is_that_of_the_package() {
        let parts = env!("CARGO_PKG_VERSION").split('.').map(|part| part.parse::<u32>().unwrap());
        assert_eq!(parts.fold(0, |version, part| version << 8 | part), QN_VERSION);
    }
}
