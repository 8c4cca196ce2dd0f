//! Output: lines on the terminal, and the exit codes that go with them.
//!
//! The reader of the output may go away (`quinion stat FILE | head -1`). That is no error to complain about and no
//! reason to panic: the command ends as a shell says of a program that SIGPIPE ended.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

/// A file, or the command as a whole, failed.
pub const EXIT_FAILED: u8 = 1;
/// The command line was not understood.
pub const EXIT_NOT_UNDERSTOOD: u8 = 2;
/// A program cannot be served.
pub const EXIT_NOT_SERVED: u8 = 3;
/// The reader of standard output went away: 128 + SIGPIPE.
pub const EXIT_BROKEN_PIPE: u8 = 141;

/// Prints the error on standard error, and returns the exit code of a command that failed for it.
pub fn complain(wrong: &dyn Display) -> ExitCode {
    complain_only(wrong);
    ExitCode::from(EXIT_FAILED)
}

/// Prints a message on standard error, if that has a reader.
pub fn complain_only(wrong: &dyn Display) {
    let _ = writeln!(io::stderr(), "quinion: {wrong}");
}

/// Prints to standard output.
///
/// # Errors
/// The exit code to end with: the reader went away, or the text cannot be written, which was said on standard error.
pub fn print(text: &str) -> Result<(), ExitCode> {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ExitCode::from(EXIT_BROKEN_PIPE)),
        Err(error) => Err(complain(&format!("cannot write to standard output: {error}"))),
    }
}
