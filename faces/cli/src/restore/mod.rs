//! Restore: VMs that begin to run before their memory is there, from a snapshot in the cache.
//!
//! ```text
//!   start     cache -> trace, if one is replayed -> server -> "serving ... on ..."
//!   meanwhile one line for each VM and each peer that was refused, on standard error
//!             a line that moves, if that is a terminal; numbers for Prometheus, if somebody wants them
//!   a signal  stop -> write what was recorded -> print the report on standard output
//! ```
//!
//! All that is decided here is where the numbers go. The server is the library's.

mod metrics;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quinion::restore::{Event, OnFailure, RestoreOptions, RestoreStats, Server, Trace, identify};

use crate::report::{Form, Report, Value};
use crate::size::{self, Size};
use crate::sys::Ending;
use crate::{EXIT_FAILED, build_cache, complain};
use metrics::{Metrics, Where};

/// How often numbers are shown and written.
const TICK: Duration = Duration::from_secs(1);

/// Serve the memory of VMs from a snapshot, fault by fault, as Firecracker's `Uffd` memory backend asks for it.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The file with the VMs' memory.
    #[arg(long, value_name = "FILE")]
    snapshot: PathBuf,
    /// Where VMMs connect: a socket, which only you can use.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, and a quarter of the
    /// machine's if not given. The VMs' own memory is not in it.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Write to this file, at the end, in which order the snapshot was wanted.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Give VMs what such a file says before they ask for it.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Numbers for Prometheus: a file, written every second, or an address to ask, such as 127.0.0.1:9100.
    #[arg(long, value_name = "FILE|ADDRESS")]
    metrics: Option<Where>,
    /// Offer the snapshot's memory to VMMs that can map it, so that their VMs share it: `--memory` must have room for
    /// it.
    #[arg(long)]
    minor: bool,
    /// What is done with a VM that cannot be served any more.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    on_failure: Failure,
    /// Threads that answer; one for each processor and four at most if not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: Option<u16>,
    /// VMs at a time.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    vms_max: u32,
    /// Print the report as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// As [`OnFailure`], for the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Failure {
    /// Its process is killed, so that it never reads zeros where its memory was.
    #[default]
    Kill,
    /// It is left to you: it hangs where memory is missing, or finds zeros there.
    Leave,
}

/// Runs the command.
pub fn main(arguments: Arguments) -> ExitCode {
    match restore(&arguments) {
        Ok(code) => code,
        Err(wrong) => complain(&wrong),
    }
}

fn restore(arguments: &Arguments) -> Result<ExitCode, String> {
    // Before there are threads, so that none of them gets the signals.
    let ending = Ending::hear().map_err(|error| format!("cannot wait for signals: {error}"))?;
    let metrics = arguments.metrics.as_ref().map(Metrics::start).transpose()?;
    let bar = bar();
    let server = start(arguments, &bar)?;
    let (snapshot, socket) = (arguments.snapshot.display(), arguments.socket.display());
    let bytes = size::shown(server.image().bytes);
    say(&bar, &format!("serving {snapshot} ({bytes}) on {socket}"));
    watch(&server, &ending, metrics.as_ref(), &bar);
    bar.finish_and_clear();
    let trace = server.trace();
    let stats = server.stop();
    if let Some(metrics) = &metrics {
        metrics.keep(&stats);
    }
    let written = trace
        .as_ref()
        .zip(arguments.record.as_ref())
        .map_or(Ok(()), |(trace, path)| trace.write(path).map_err(|error| named(path, &error)));
    let form = if arguments.json { Form::Json } else { Form::Text };
    if let Err(code) = crate::print(&report(&stats, trace.as_ref()).printed(form)) {
        return Ok(code);
    }
    match written {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(wrong) => {
            eprintln!("quinion: {wrong}");
            Ok(ExitCode::from(EXIT_FAILED))
        }
    }
}

fn named(path: &Path, error: &dyn std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

fn start(arguments: &Arguments, bar: &ProgressBar) -> Result<Server, String> {
    let cache = build_cache(arguments.memory)?;
    let mut options = RestoreOptions::new();
    if let Some(path) = &arguments.replay {
        let image = identify(&cache, &arguments.snapshot).map_err(|error| error.to_string())?;
        options.replay = Some(Trace::read(path, image).map_err(|error| named(path, &error))?);
    }
    if let Some(workers) = arguments.workers {
        options.workers = workers.into();
    }
    options.vms_max = arguments.vms_max as usize;
    options.minor = arguments.minor;
    options.record = arguments.record.is_some();
    options.on_failure = match arguments.on_failure {
        Failure::Kill => OnFailure::Kill,
        Failure::Leave => OnFailure::Leave,
    };
    let bar = bar.clone();
    options.observer = Some(Arc::new(move |event: &Event| say(&bar, &told(event))));
    Server::start(&cache, &arguments.snapshot, &arguments.socket, options).map_err(|error| error.to_string())
}

/// Until somebody wants us to end.
fn watch(server: &Server, ending: &Ending, metrics: Option<&Metrics>, bar: &ProgressBar) {
    loop {
        if metrics::wait(ending, metrics, TICK) {
            return;
        }
        let stats = server.stats();
        bar.set_message(line(&stats));
        bar.tick();
        if let Some(metrics) = metrics {
            metrics.keep(&stats);
            metrics.answer(|| server.stats());
        }
    }
}

/// The line that moves; hidden if standard error is no terminal.
fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is a constant"));
    bar
}

fn line(stats: &RestoreStats) -> String {
    let numbers = &stats.numbers;
    let supplied = size::shown(numbers.demand_bytes + numbers.ahead_bytes);
    let p99 = numbers.latency.quantile(0.99).unwrap_or(0) / 1000;
    format!("{} VMs, {} faults, p99 {p99} us, {supplied} supplied", stats.vms, numbers.faults)
}

fn say(bar: &ProgressBar, text: &str) {
    bar.suspend(|| eprintln!("quinion: {text}"));
}

/// What happened, in a line.
fn told(event: &Event) -> String {
    let killed = |killed: bool| if killed { "its process was killed" } else { "its process was left" };
    match event {
        Event::Begun { vm, process, bytes } => {
            format!("vm {vm} (process {process}): serving {}", size::shown(*bytes))
        }
        Event::Refused { process, why } => format!("process {process} was refused: {why}"),
        Event::GivenUp { vm, process, why, killed: was } => {
            format!("vm {vm} (process {process}) was given up: {why}; {}", killed(*was))
        }
        Event::Ended { vm, process, numbers } => {
            let supplied = size::shown(numbers.demand_bytes + numbers.ahead_bytes);
            format!("vm {vm} (process {process}) has ended: {} faults, {supplied} supplied", numbers.faults)
        }
        Event::Dropped { vm, process, killed: was } => {
            format!("vm {vm} (process {process}) was still there at the end: {}", killed(*was))
        }
        Event::CannotAccept(error) => format!("nobody can be accepted for a moment: {error}"),
        other => format!("{other:?}"),
    }
}

/// What is printed at the end.
fn report(stats: &RestoreStats, trace: Option<&Trace>) -> Report {
    let numbers = &stats.numbers;
    let quantile = |share| numbers.latency.quantile(share).map_or(Value::Unknown, Value::Number);
    let mut report = Report::new();
    report.add("image_bytes", "image", Value::Bytes(stats.image_bytes));
    report.add("vms", "VMs served", Value::Number(stats.vms_total));
    report.add("vms_given_up", "VMs given up", Value::Number(stats.vms_given_up));
    report.add("peers_refused", "peers refused", Value::Number(stats.peers_refused));
    report.add("faults", "faults", Value::Number(numbers.faults));
    report.add("faults_present", "faults of what was there", Value::Number(numbers.faults_present));
    report.add("fault_p50_ns", "fault latency, half (ns)", quantile(0.5));
    report.add("fault_p99_ns", "fault latency, 99 % (ns)", quantile(0.99));
    report.add("fault_max_ns", "fault latency, longest (ns)", Value::Number(numbers.latency.max()));
    report.add("demand_bytes", "supplied when asked for", Value::Bytes(numbers.demand_bytes));
    report.add("ahead_bytes", "supplied ahead", Value::Bytes(numbers.ahead_bytes));
    report.add("zero_bytes", "zeros", Value::Bytes(numbers.zero_bytes));
    report.add("mapped_bytes", "mapped", Value::Bytes(numbers.mapped_bytes));
    report.add("removed_bytes", "given back by VMs", Value::Bytes(numbers.removed_bytes));
    report.add("poisoned_bytes", "unreadable", Value::Bytes(numbers.poisoned_bytes));
    report.add("retries", "answers given again", Value::Number(numbers.retries));
    report.add("device_bytes", "read from devices", Value::Bytes(stats.device_bytes));
    let recorded = trace.map_or(Value::Unknown, |trace| Value::Bytes(trace.pages() * 4096));
    report.add("recorded_bytes", "recorded", recorded);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_what_the_server_counted() {
        let mut stats = RestoreStats::default();
        (stats.vms_total, stats.numbers.faults, stats.numbers.demand_bytes) = (2, 3, 65536);
        stats.numbers.latency.add(5000);
        let printed = report(&stats, None).printed(Form::Json);
        for part in [
            "\"vms\":2",
            "\"faults\":3",
            "\"demand_bytes\":65536",
            "\"fault_p50_ns\":5000",
            "\"recorded_bytes\":null",
        ] {
            assert!(printed.contains(part), "{part} is not in {printed}");
        }
        assert_eq!(line(&stats), "0 VMs, 3 faults, p99 5 us, 64.0 KiB supplied");
    }
}
