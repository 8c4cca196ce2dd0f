//! Open files: the error when this process may not open as many files as a run needs.
//!
//! The kernel says "Too many open files", and neither what for nor what to do. A run needs some dozen besides those
//! that its cache opens; the limit is inherited, so the parent process can raise it.

use std::fmt::Display;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Enough for a run itself.
const ENOUGH: u64 = 256;

/// Whether an error says that this process, or the machine, has too many open files.
pub fn are_too_many(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(code, Some(Errno::MFILE | Errno::NFILE))
}

/// The remedy for an error of that code, if it is that too many files are open.
pub fn remedy(code: Option<i32>) -> Option<String> {
    if Errno::from_raw_os_error(code?) != Errno::MFILE {
        return None;
    }
    let limit = getrlimit(Resource::Nofile).current?;
    let enough = limit.saturating_mul(2).max(ENOUGH);
    Some(format!("a process may have {limit} files open; raise the limit, as by `ulimit -n {enough}`"))
}

/// The remedy where no thread can be started, or no memory is left.
pub const THREAD_REMEDY: &str =
    "raise the limits of memory and of processes (`ulimit -d`, `ulimit -v`, `ulimit -u`)";

/// An error of that code in words, with a remedy if too many files are open, or no thread can be started.
pub fn describe(error: &dyn Display, code: Option<i32>) -> String {
    let of_threads = || {
        matches!(Errno::from_raw_os_error(code?), Errno::AGAIN | Errno::NOMEM).then(|| THREAD_REMEDY.into())
    };
    match remedy(code).or_else(of_threads) {
        Some(remedy) => format!("{error}; {remedy}"),
        None => error.to_string(),
    }
}

/// The result of setting up `what`; if too many files were open for it, the error says so, and what to do.
pub fn needed_for<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match remedy(error.raw_os_error()) {
        Some(remedy) => io::Error::new(error.kind(), format!("cannot set up {what}: {error}; {remedy}")),
        None => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_open_files_have_a_remedy_and_other_errors_stay() {
        let of = |error: Errno| needed_for("it", Err::<(), _>(io::Error::from(error))).unwrap_err();
        let said = of(Errno::MFILE).to_string();
        assert!(said.starts_with("cannot set up it: Too many") && said.contains("`ulimit -n "), "{said}");
        assert_eq!(of(Errno::ACCESS).raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
        assert_eq!(remedy(None), None);
    }
}
