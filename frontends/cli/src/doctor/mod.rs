//! Doctor: what this machine and a program let `quinion` do, in plain words.
//!
//! ```text
//!   quinion doctor                 machine    the kernel, its limits, folders and their file systems
//!   quinion doctor PROGRAM         verdict    what `run` will serve, what it will not, and what can be done
//!                                  program    found where, run by what, linked to what, with which code of its own
//!                                  machine    as above
//! ```
//!
//! In JSON the parts come behind `"schema":1`, as in the reports of `run` and `keeps`. Keys stay; new ones may be
//! added.
//!
//! Features are tried where possible, and nothing of a trial is left behind. The program is never run: its file and
//! the files of its libraries are read. Code that it loads while it runs is not known here; `run` checks it then.
//!
//! | exit code | means |
//! |---|---|
//! | 0 | the machine was examined, and of the program something can be served, or that is not known before it runs |
//! | 1 | there is no such program or folder, or the program cannot be run |
//! | 3 | nothing of the program can be served |

mod libraries;
mod machine;
mod program;
mod shim;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quinion_run::quoted;

use crate::report::{Form, Report, Value};
use crate::{EXIT_NOT_SERVED, complain};

/// Check which features of `run` and of the caches this machine has, and which reads of PROGRAM can be served.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
    /// A folder whose file system is tried; this one and the temporary one if none is given.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    folder: Vec<PathBuf>,
    /// The program that `run` would be given.
    #[arg(value_name = "PROGRAM", value_hint = clap::ValueHint::CommandName)]
    program: Option<OsString>,
}

pub fn main(arguments: Arguments) -> ExitCode {
    if let Some(wrong) = arguments.folder.iter().find_map(|folder| wrong_folder(folder)) {
        return complain(&wrong);
    }
    let folders = if arguments.folder.is_empty() {
        vec![PathBuf::from("."), std::env::temp_dir()]
    } else {
        arguments.folder
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    let mut report = Report::new();
    if form == Form::Json {
        report.add("schema", "schema", Value::Number(1));
    }
    let mut code = ExitCode::SUCCESS;
    let machine = Value::Group(machine::report(&folders));
    match &arguments.program {
        None => drop(report.add("machine", "machine", machine)),
        Some(name) => {
            let inspected = match program::inspect(name) {
                Ok(inspected) => inspected,
                Err(wrong) => return complain(&wrong),
            };
            if inspected.is_served() == Some(false) {
                code = ExitCode::from(EXIT_NOT_SERVED);
            }
            let mut parts = [
                ("machine", "machine", machine),
                ("program", "program", Value::Group(inspected.report())),
                ("verdict", "what run does with it", Value::Group(inspected.verdict())),
            ];
            if form == Form::Text {
                parts.reverse(); // what was asked comes first for people
            }
            for (key, label, part) in parts {
                report.add(key, label, part);
            }
        }
    }
    match crate::print(&report.printed(form)) {
        Ok(()) => code,
        Err(code) => code,
    }
}

/// The error if `folder` is not there or is not a folder. A file system or rights that refuse a trial are no error: the
/// report says so.
fn wrong_folder(folder: &Path) -> Option<String> {
    match folder.metadata() {
        Ok(found) if found.is_dir() => None,
        Ok(_) => Some(format!("{} is not a folder; name the folder that it lies in", quoted(folder))),
        Err(error) => Some(format!("{}: {error}; name a folder that is there", quoted(folder))),
    }
}
