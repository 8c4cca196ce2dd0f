//! `quinion keeps`: the caches that `run --keep` left behind, and their contents.
//!
//! ```text
//!   NAME         PROCESS     MEMORY       HELD  RUNS  PROGRAMS    UNUSED  ENDS AFTER
//!   default         4711    1.0 GiB  312.5 MiB     0         0       12s         30m
//! ```
//!
//! | key in JSON | |
//! |---|---|
//! | `schema` | 1 |
//! | `kept` | a list, by name: |
//! | `name`, `process`, `answers` | the process is 0 if it has no number here; the rest is 0 or null if it does not answer |
//! | `version` | of the command that started it |
//! | `memory` | {bound_bytes, grown_bytes, held_bytes}: the bound, what of it is taken, what of that holds data |
//! | `served_bytes` | what programs read from it so far |
//! | `runs`, `runs_begun`, `programs` | runs now; runs so far; processes that view it now |
//! | `age_ms`, `unused_ms`, `idle_ms` | how old it is; how long it is unused; after how long of that it ends, or null |

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use quinion_run::keep::{self, Idle, ObservedCache, Status};
use quinion_run::report::{Form, Report, Value};

use crate::{complain, print, size};

/// Show the caches that `run --keep` left behind.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

pub fn main(arguments: &Arguments) -> ExitCode {
    let kept = match keep::list() {
        Ok(kept) => kept,
        Err(error) => return complain(&error),
    };
    let text = if arguments.json { json(&kept) } else { text(&kept) };
    print(&text).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

fn text(kept: &[ObservedCache]) -> String {
    if kept.is_empty() {
        return "no cache is kept; `quinion run --keep -- PROGRAM` leaves one behind\n".to_owned();
    }
    let mut text = String::from(
        "NAME             PROCESS     MEMORY       HELD   RUNS  PROGRAMS     UNUSED  ENDS AFTER\n",
    );
    for ObservedCache { name, process, status } in kept {
        let name = name.to_string();
        let line = match status {
            None => writeln!(text, "{name:<15} {process:>8}  does not answer; `quinion stop {name}` ends it"),
            Some(status) => writeln!(
                text,
                "{name:<15} {process:>8} {:>10} {:>10} {:>6} {:>9} {:>10}  {:>10}",
                size::shown(status.bound_bytes),
                size::shown(status.cached_bytes),
                status.runs,
                status.viewers,
                time(status.unused_ms),
                status.idle_ms.map_or("never".to_owned(), time),
            ),
        };
        line.expect("a string takes it");
    }
    text
}

/// Whole seconds are enough for people.
fn time(millis: u64) -> String {
    let millis = if millis < 1000 { millis } else { millis / 1000 * 1000 };
    Idle::For(Duration::from_millis(millis)).to_string()
}

fn json(kept: &[ObservedCache]) -> String {
    let mut report = Report::new();
    report.add("schema", "schema", Value::Number(1));
    report.add("kept", "kept", Value::List(kept.iter().map(one).collect()));
    report.printed(Form::Json)
}

fn one(seen: &ObservedCache) -> Value {
    let status = seen.status.clone().unwrap_or_default();
    let Status { version, bound_bytes, grown_bytes, cached_bytes, served_bytes, .. } = status;
    let mut memory = Report::new();
    memory.add("bound_bytes", "bound", Value::Bytes(bound_bytes));
    memory.add("grown_bytes", "grown", Value::Bytes(grown_bytes));
    memory.add("held_bytes", "held", Value::Bytes(cached_bytes));
    let mut one = Report::new();
    one.add("name", "name", Value::Text(seen.name.to_string()));
    one.add("process", "process", Value::Number(seen.process.into()));
    one.add("answers", "answers", Value::Truth(seen.status.is_some()));
    one.add("version", "version", Value::Text(version));
    one.add("memory", "memory", Value::Group(memory));
    one.add("served_bytes", "served", Value::Bytes(served_bytes));
    one.add("runs", "runs", Value::Number(status.runs));
    one.add("runs_begun", "runs begun", Value::Number(status.runs_begun));
    one.add("programs", "programs", Value::Number(status.viewers));
    one.add("age_ms", "age", Value::Number(status.age_ms));
    one.add("unused_ms", "unused", Value::Number(status.unused_ms));
    one.add("idle_ms", "ends after", status.idle_ms.map_or(Value::Unknown, Value::Number));
    Value::Group(one)
}
