//! Run: a program on a cache of its own.
//!
//! The owner's half is not wired to the command yet; until it is, the command says so.

use std::process::ExitCode;

use crate::RunArguments;

/// Runs the command.
pub fn main(arguments: RunArguments) -> ExitCode {
    let RunArguments { memory, report, report_file, program } = arguments;
    let asked = format!("{program:?} with {memory:?}, {report:?}, {report_file:?}");
    crate::complain(&format!("cannot run {asked}: this build has no preload object; use `quinion cat`"))
}
