//! Restore: VMs that begin to run before their memory is there, from a snapshot in the cache.
//!
//! ```text
//!   start     cache -> record, if one is replayed -> server -> "serving ... on ..."
//!   meanwhile one line for each VM and each peer that was refused, on standard error
//!             a line that moves, if that is a terminal; numbers for Prometheus, if they are asked for
//!   a signal  stop -> write what was recorded -> print the report on standard output
//! ```
//!
//! This module decides only where the numbers go. The server is the library's.

mod metrics;
mod ready;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quinion_vm::{
    Event, FaultRecord, FaultRecordError, Fill, ImageIdentity, OnFailure, RestoreOptions, RestoreStats,
    Server, identify_layers,
};

use crate::report::{Form, Report, Value};
use crate::size::{self, Size};
use crate::{EXIT_FAILED, build_cache, complain};
use metrics::{Metrics, MetricsTarget};
use quinion_cli::sys::EndSignals;

const TICK: Duration = Duration::from_secs(1);

const MORE: &str = r#"How to use it:
  quinion restore --snapshot memory.bin --socket /run/vm.sock
      Then have each VMM connect there. Firecracker does that when a snapshot is loaded with
      {"mem_backend": {"backend_type": "Uffd", "backend_path": "/run/vm.sock"}, ...}
      Many VMs may be started from one server: they share what the cache has of the file.
  quinion restore --snapshot base.mem --diff monday.mem --diff tuesday.mem --socket /run/vm.sock
      A snapshot in layers: a base, and the diffs above it, the oldest first.
  quinion restore ... --record boot.record     run a VM for a while, then end this command
  quinion restore ... --replay boot.record     the next VMs find these pages before they ask for them
  quinion restore ... --fill all              VMs get all of their memory, from its beginning, while they run

What is recorded is each page that a VM touched, in the order of the first touch. VMs are slower
meanwhile: each page is a fault. With --replay as well, the new record begins with the pages of the
old one. A record of an earlier snapshot of the same VM may be replayed: each page is compared with
what it was, and ignored if it differs. A record that is damaged is used as far as it is whole.

Rights: this command needs none but to read the snapshot. The VMM makes the userfaultfd,
for which it needs CAP_SYS_PTRACE, or to open /dev/userfaultfd, or the sysctl
vm.unprivileged_userfaultfd=1; and it has to run as a user that may write to the socket, which is
yours alone unless --socket-owner and --socket-mode say otherwise: with Firecracker's jailer, give
the numbers of its --uid and --gid, and a path inside its chroot. To kill a VM of another user that
cannot be served, this command has to be root, or have CAP_KILL. Each VM takes three open files
here (ulimit -n).

A diff is a sparse file of the base's size. Keep it as it was written: zeros that become holes
(`cp --sparse=always`, `fallocate --dig-holes`) show the layer below, and holes that become zeros
(copies that are not sparse) hide it. A diff without any hole is refused, and one on a file system
that does not tell holes page by page. The record of layers is of all of them.

The snapshot must stay as it is while it is served, with all its diffs. If its size or its time of
change becomes another, or a part of it cannot be read and the kernel cannot tell the VM so
(UFFDIO_POISON, Linux 6.6), the VMs that need more of it are given up; see --on-failure.

Ending: SIGINT, SIGTERM or SIGHUP. VMs that are still there are killed then, or left, by
--on-failure: memory that they have not touched exists only here. The socket is removed, and the
report printed on standard output. What happens meanwhile is on standard error, a line for each VM.

If this command is killed itself (SIGKILL, or for want of memory) it cannot end its VMs. Each hangs
at the first page that it has not got, for Firecracker keeps the userfaultfd open and does not
watch the connection. So the VMs have to be ended by what supervises them, when the process of
this command ends: with systemd, BindsTo= and After= the unit of this command in the units of the
VMs; elsewhere, kill them when waitpid or a pidfd reports its end. A new server can serve new VMs
at once, and none of the old ones. A unit comes with Quinion's package, quinion-restore.service:
the command tells systemd when VMs may connect (Type=notify).

Own protocol of --minor: send {"quinion_restore":1,"want":"image"}; the answer says size
and page_size, and comes with a descriptor. Map that privately, touch none of it, and send
the regions as Firecracker does, with the userfaultfd. The answer
{"quinion_restore":1,"ready":true} says that they are registered.

Exit status: 0 ended by a signal; 1 it could not begin, or the record could not be
written; 2 the command line is wrong."#;

/// Serve the memory of VMs from a snapshot, fault by fault, as Firecracker's `Uffd` memory backend asks for it.
#[derive(clap::Args, Debug)]
#[command(after_long_help = MORE)]
pub struct Arguments {
    /// The file with the VMs' memory.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    snapshot: PathBuf,
    /// A diff above the snapshot, as Firecracker writes it: its data are the pages that changed, its holes show what
    /// lies below. Name all of them, the oldest first.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    diff: Vec<PathBuf>,
    /// Where VMMs connect: a socket, which only you can use if not told otherwise. It is created; a leftover one
    /// without a listener is replaced.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Permissions of the socket, octal: a process needs write permission to connect.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    socket_mode: u32,
    /// Give the socket to this user, or to this user and group, by their numbers.
    #[arg(long, value_name = "UID[:GID]", value_parser = owner)]
    socket_owner: Option<(u32, Option<u32>)>,
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, and a quarter of the
    /// machine's if not given. The VMs' own memory is not in it.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Write to this file, at the end, which pages VMs touched, in their order, for `--replay`.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// Give VMs the pages that such a file names before they ask for them. It is made for the same snapshot, or a
    /// copy of it; of another one, pages that differ are ignored.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    replay: Option<PathBuf>,
    /// Memory that VMs get before they ask for it.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    fill: FillChoice,
    /// Numbers for Prometheus: a file, written every second, or an address to ask over HTTP, such as 127.0.0.1:9100
    /// (with port 0, one that is free). The VMs that are served now have rows of their own, 256 of them at most.
    #[arg(long, value_name = "FILE|ADDRESS")]
    metrics: Option<MetricsTarget>,
    /// Offer the snapshot's memory to VMMs that can map it, so that their VMs share it: `--memory` must have room for
    /// it, and all of that counts at once.
    #[arg(long)]
    minor: bool,
    /// Treatment of a VM that cannot be served any more.
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

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "give permissions in octal, such as 660".to_owned())
}

fn owner(text: &str) -> Result<(u32, Option<u32>), String> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user.parse().ok(), Some(group.parse().ok())),
        None => (text.parse().ok(), None),
    };
    match (user, group) {
        (Some(user), None) => Ok((user, None)),
        (Some(user), Some(Some(group))) => Ok((user, Some(group))),
        _ => Err("give numbers, such as 1000 or 1000:1000".to_owned()),
    }
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

/// As [`Fill`], for the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum FillChoice {
    /// Nothing but what lies around and behind their faults.
    None,
    /// The pages of --replay.
    #[default]
    Recorded,
    /// These first, and then all the rest: each VM takes all of its memory.
    All,
}

pub fn main(arguments: Arguments) -> ExitCode {
    match restore(&arguments) {
        Ok(code) => code,
        Err(wrong) => complain(&wrong),
    }
}

fn restore(arguments: &Arguments) -> Result<ExitCode, String> {
    // Before there are threads, so that none of them gets the signals.
    let ending = EndSignals::listen().map_err(|error| {
        format!("cannot wait for signals: {error}; allow this process more descriptors (ulimit -n)")
    })?;
    arguments.record.as_deref().map_or(Ok(()), check_record)?;
    let metrics = arguments.metrics.as_ref().map(Metrics::start).transpose()?;
    let bar = bar();
    let server = start(arguments, &bar)?;
    let (snapshot, socket) = (shown_layers(arguments), arguments.socket.display());
    let bytes = size::shown(server.image().bytes);
    say(&bar, &format!("serving {snapshot} ({bytes}) on {socket}"));
    if let Some(address) = metrics.as_ref().and_then(Metrics::address) {
        say(&bar, &format!("numbers for Prometheus at http://{address}/metrics"));
    }
    if let Err(wrong) = ready::tell("READY=1") {
        say(&bar, &wrong);
    }
    watch(&server, &ending, metrics.as_ref(), &bar);
    // It takes a moment to end the VMs and to write the record.
    let _ = ready::tell("STOPPING=1");
    bar.finish_and_clear();
    let record = server.record();
    let stats = server.stop();
    if let Some(metrics) = &metrics {
        metrics.keep(&stats);
    }
    let written = record
        .as_ref()
        .zip(arguments.record.as_ref())
        .map_or(Ok(()), |(record, path)| record.write(path).map_err(|error| named(path, &error)));
    let form = if arguments.json { Form::Json } else { Form::Text };
    if let Err(code) = crate::print(&report(&stats, record.as_ref(), form).printed(form)) {
        return Ok(code);
    }
    match written {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(wrong) => {
            crate::complain_only(&wrong);
            Ok(ExitCode::from(EXIT_FAILED))
        }
    }
}

fn shown_layers(arguments: &Arguments) -> String {
    let base = arguments.snapshot.display();
    match arguments.diff.len() {
        0 => base.to_string(),
        1 => format!("{base} and 1 diff"),
        diffs => format!("{base} and {diffs} diffs"),
    }
}

fn named(path: &Path, error: &dyn std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

/// Checks now that the record can be written at the end.
fn check_record(path: &Path) -> Result<(), String> {
    let told = |error: std::io::Error| {
        named(
            path,
            &format_args!(
                "the record cannot be written: {error}; name a file in a folder that you may write to"
            ),
        )
    };
    if path.is_dir() {
        return Err(told(std::io::ErrorKind::IsADirectory.into()));
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    std::fs::File::create(&beside).and_then(|_| std::fs::remove_file(&beside)).map_err(told)
}

fn start(arguments: &Arguments, bar: &ProgressBar) -> Result<Server, String> {
    let cache = build_cache(arguments.memory)?;
    let layers: Vec<PathBuf> = std::iter::once(&arguments.snapshot).chain(&arguments.diff).cloned().collect();
    let mut options = RestoreOptions::new();
    if let Some(path) = &arguments.replay {
        let image = identify_layers(&cache, &layers).map_err(|error| error.to_string())?;
        options.replay = record_of(path, image, bar)?;
    }
    options.fill = match arguments.fill {
        FillChoice::None => Fill::Nothing,
        FillChoice::Recorded => Fill::Recorded,
        FillChoice::All => Fill::All,
    };
    if let Some(workers) = arguments.workers {
        options.workers = workers.into();
    }
    options.vms_max = arguments.vms_max as usize;
    options.minor = arguments.minor;
    options.socket_mode = arguments.socket_mode;
    if let Some((user, group)) = arguments.socket_owner {
        (options.socket_owner, options.socket_group) = (Some(user), group);
    }
    options.record = arguments.record.is_some();
    options.on_failure = match arguments.on_failure {
        Failure::Kill => OnFailure::Kill,
        Failure::Leave => OnFailure::Leave,
    };
    let bar = bar.clone();
    options.observer = Some(Arc::new(move |event: &Event| say(&bar, &told(event))));
    Server::start_layers(&cache, &layers, &arguments.socket, options)
        .map_err(|error| no_room(arguments, &cache).unwrap_or_else(|| error.to_string()))
}

/// Why a snapshot that VMMs should map does not fit, in the units of the command line; `None` if it does.
fn no_room(arguments: &Arguments, cache: &quinion::Cache) -> Option<String> {
    let image = std::fs::metadata(&arguments.snapshot).ok()?.len();
    let (memory, wanted) = (cache.stats().memory_bytes, image + 2 * quinion::Cache::MEMORY_MIN);
    (arguments.minor && image + quinion::Cache::MEMORY_MIN > memory).then(|| {
        format!(
            "--minor: the snapshot has {}, for which a memory of {} has no room; give --memory {}M or more",
            size::shown(image),
            Size::Bytes(memory),
            wanted.div_ceil(1 << 20)
        )
    })
}

/// The record at `path`, as far as it is of use for `image`; prints which part is not.
fn record_of(path: &Path, image: ImageIdentity, bar: &ProgressBar) -> Result<Option<FaultRecord>, String> {
    let record = match FaultRecord::read(path, image) {
        Ok(record) => record,
        Err(FaultRecordError::Read(error)) => {
            let remedy = "name a file that `--record` has written, or leave out --replay";
            return Err(format!("cannot read the record {}: {error}; {remedy}", path.display()));
        }
        Err(error) => {
            say(bar, &named(path, &format_args!("{error}. It is ignored")));
            return Ok(None);
        }
    };
    let (lost, left) = (record.lost_pages(), record.pages());
    if lost > 0 {
        let what =
            format_args!("parts of the record are damaged: {lost} pages are lost, and {left} are replayed");
        say(bar, &named(path, &what));
    }
    if record.image() != image {
        let (theirs, ours) = (record.image().bytes, image.bytes);
        let what = format_args!(
            "the record is of another snapshot ({theirs} bytes, this one has {ours}, or other contents): \
             pages that differ are ignored"
        );
        say(bar, &named(path, &what));
    }
    Ok(Some(record))
}

/// Serves until a signal asks this process to end.
fn watch(server: &Server, ending: &EndSignals, metrics: Option<&Metrics>, bar: &ProgressBar) {
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

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is a constant"));
    bar
}

fn line(stats: &RestoreStats) -> String {
    let counters = &stats.counters;
    let supplied = size::shown(counters.demand_bytes + counters.ahead_bytes);
    let p99 = counters.latency.quantile(0.99).unwrap_or(0) / 1000;
    format!("{} VMs, {} faults, p99 {p99} us, {supplied} supplied", stats.vms, counters.faults)
}

fn say(bar: &ProgressBar, text: &str) {
    bar.suspend(|| crate::complain_only(&text));
}

fn told(event: &Event) -> String {
    let killed = |killed: bool| if killed { "its process was killed" } else { "its process was left" };
    match event {
        Event::Begun { vm, process, bytes } => {
            format!("vm {vm} (process {process}): serving {}", size::shown(*bytes))
        }
        Event::SnapshotLarger { vm, process, used_bytes, image_bytes } => format!(
            "vm {vm} (process {process}) uses the first {} of the snapshot, which has {}: \
             is it the snapshot of this VM?",
            size::shown(*used_bytes),
            size::shown(*image_bytes)
        ),
        Event::Refused { process, why } => format!("process {process} was refused: {why}"),
        Event::GivenUp { vm, process, why, killed: was } => {
            format!("vm {vm} (process {process}) was given up: {why}; {}", killed(*was))
        }
        Event::Ended { vm, process, counters } => {
            let supplied = size::shown(counters.demand_bytes + counters.ahead_bytes);
            format!("vm {vm} (process {process}) has ended: {} faults, {supplied} supplied", counters.faults)
        }
        Event::Dropped { vm, process, killed: was } => {
            format!("vm {vm} (process {process}) was still there at the end: {}", killed(*was))
        }
        Event::ReplayStale { differing, compared } => format!(
            "the record is stale: of {compared} pages compared {differing} differ; the rest of it is ignored; \
             record again"
        ),
        Event::CannotAccept(error) => format!("cannot accept connections for a moment: {error}"),
        other => format!("{other:?}"),
    }
}

fn report(stats: &RestoreStats, record: Option<&FaultRecord>, form: Form) -> Report {
    let counters = &stats.counters;
    let quantile = |share| counters.latency.quantile(share).map_or(Value::Unknown, Value::Number);
    let mut report = Report::new();
    report.add("image_bytes", "image", Value::Bytes(stats.image_bytes));
    report.add("vms", "VMs served", Value::Number(stats.vms_total));
    report.add("vms_given_up", "VMs given up", Value::Number(stats.vms_given_up));
    report.add("peers_refused", "peers refused", Value::Number(stats.peers_refused));
    report.add("faults", "faults", Value::Number(counters.faults));
    report.add("faults_present", "faults on present pages", Value::Number(counters.faults_present));
    report.add("fault_p50_ns", "fault latency p50 (ns)", quantile(0.5));
    report.add("fault_p99_ns", "fault latency p99 (ns)", quantile(0.99));
    report.add("fault_max_ns", "fault latency max (ns)", Value::Number(counters.latency.max()));
    report.add("demand_bytes", "supplied on faults", Value::Bytes(counters.demand_bytes));
    report.add("ahead_bytes", "supplied ahead", Value::Bytes(counters.ahead_bytes));
    report.add("zero_bytes", "zeros", Value::Bytes(counters.zero_bytes));
    report.add("mapped_bytes", "mapped", Value::Bytes(counters.mapped_bytes));
    report.add("removed_bytes", "given back by VMs", Value::Bytes(counters.removed_bytes));
    report.add("stale_bytes", "stale in the record", Value::Bytes(counters.stale_bytes));
    report.add("poisoned_bytes", "unreadable", Value::Bytes(counters.poisoned_bytes));
    report.add("retries", "answers repeated", Value::Number(counters.retries));
    report.add("device_bytes", "read from devices", Value::Bytes(stats.device_bytes));
    let recorded = record.map(|record| Value::Bytes(record.pages() * 4096));
    if recorded.is_some() || form == Form::Json {
        report.add("recorded_bytes", "recorded", recorded.unwrap_or(Value::Unknown));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_the_counts_of_the_server() {
        let mut stats = RestoreStats::default();
        (stats.vms_total, stats.counters.faults, stats.counters.demand_bytes) = (2, 3, 65536);
        stats.counters.latency.add(5000);
        assert!(!report(&stats, None, Form::Text).printed(Form::Text).contains("recorded"));
        let printed = report(&stats, None, Form::Json).printed(Form::Json);
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
