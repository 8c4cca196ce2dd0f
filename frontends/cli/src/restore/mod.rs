//! Restore: VMs that begin to run before their memory is there, from a snapshot in the cache.
//!
//! ```text
//!   start     cache -> record, if one is replayed -> server -> "serving ... on ..."
//!             on a thread of its own: a signal meanwhile ends the command
//!   meanwhile one line for each VM and each peer that was refused, on standard error
//!             a line that moves, if that is a terminal; numbers for Prometheus, if they are asked for
//!             another command took over by --replace: as at a signal, and its VMs go on
//!   a signal  stop -> write what was recorded -> print the report on standard output
//! ```
//!
//! This module decides only where the numbers go. The server is the library's.

mod metrics;
mod outputs;
mod ready;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quinion_vm::{
    Event, FaultRecord, FaultRecordError, Fill, ImageIdentity, OnFailure, RestoreOptions, RestoreStats,
    Server, SocketMode, SocketOwner, identify_layers,
};

use crate::other_program::is_url;
use crate::report::{Form, Report, Value};
use crate::size::{self, Size};
use crate::{EXIT_FAILED, build_cache, complain};
use metrics::{Metrics, MetricsTarget};
use quinion_cli::sys::EndSignals;

const TICK: Duration = Duration::from_secs(1);
/// How often a signal is looked for while the server starts.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);
/// How long a server that was replaced may take to end, and to let go of the address of its metrics.
const METRICS_WAIT: Duration = Duration::from_secs(10);

const MORE: &str = r#"How to use it:
  quinion restore --snapshot memory.bin --socket /run/vm.sock
      Then have each VMM connect there. Firecracker does that when a snapshot is loaded with
      {"mem_backend": {"backend_type": "Uffd", "backend_path": "/run/vm.sock"}, ...}
      Many VMs may be started from one server: they share what the cache has of the file.
  quinion restore --snapshot base.mem --diff monday.mem --diff tuesday.mem --socket /run/vm.sock
      A snapshot in layers: a base, and the diffs above it, the oldest first.
  quinion restore --snapshot monday.pack --socket /run/vm.sock
      A snapshot in compressed chunks, as `quinion pack` writes it. Packs that it refers to lie beside it.
  quinion restore ... --record boot.record     run a VM for a while, then end this command
  quinion restore ... --replay boot.record     the next VMs find these pages before they ask for them
  quinion restore ... --fill all              VMs get all of their memory, from its beginning, while they run
  quinion restore ... --replace               take over from the command that serves this snapshot at this socket

A snapshot that is an object of a store is served by the program that has stores, whose cache and
disk tier its pages go through:
  quinion serve --store s3://bucket --restore s3://bucket/vm.mem=/run/vm.sock

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
report printed on standard output; while the snapshot and its record are being read, the command
ends at once, without a report (with --replace when they have been read; it takes over nothing). What happens
meanwhile is on standard error, a line for each VM.

If this command is killed itself (SIGKILL, or for want of memory) it cannot end its VMs. Each hangs
at the first page that it has not got, for Firecracker keeps the userfaultfd open and does not
watch the connection. So the VMs have to be ended by what supervises them, when the process of
this command ends: with systemd, BindsTo= and After= the unit of this command in the units of the
VMs; elsewhere, kill them when waitpid or a pidfd reports its end. A new server can serve new VMs
at once, and none of the old ones: only a server that runs can hand them over. A unit comes with
Quinion's package, quinion-restore.service: the command tells systemd when VMs may connect
(Type=notify).

Taking over: --replace has the command that runs hand over its VMs, with what each has given back,
moved or got so far, and the socket; then it ends with its report. Both have to be of one user, and
of one version of this protocol, and to name the same files; options may differ. VMs wait in their
faults meanwhile. Both write their records: the new one begins with what the old one had noted, so
give both the same --record. A VM that has mapped the memory of --minor cannot be handed over; then
none is. If the new command dies or refuses before it has all, the old one goes on; if it dies
before it serves them, the old one gives them up. If the old one is killed in the middle of it, the
new one serves the VMs that it has as a whole, kills the others that it knows, and says how many
there were. The new command asks at a second socket beside the first, whose name ends in .takeover
and which only your own user can use. VMs that systemd has bound to the unit of the old command
(BindsTo=) end with that unit.

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
    /// The file with the VMs' memory, or a pack of it.
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
    #[arg(long, value_name = "MODE", default_value = "600")]
    socket_mode: SocketMode,
    /// Give the socket to this user, or to this user and group, by their numbers.
    #[arg(long, value_name = "UID[:GID]")]
    socket_owner: Option<SocketOwner>,
    /// Memory the cache may use in all, such as 256M, 1.5G or 25%; at least 16M, and a quarter of the
    /// machine's if not given. The VMs' own memory is not in it.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Write to this file, at the end, which pages VMs touched, in their order, for `--replay`. It is new, or a record
    /// already: no other file is replaced, and no record by one without a page.
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
    /// Take over the VMs of a `quinion restore` that serves this very snapshot at this socket, and the socket: that
    /// command then ends. No fault is lost; if it cannot be, that command goes on, and this one says why. Without such
    /// a command this changes nothing. The socket keeps its permissions and its owner.
    #[arg(long)]
    replace: bool,
    /// Print the report as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// As [`OnFailure`], for the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Failure {
    /// The VM's process is killed, so that it never reads zeros where its memory was.
    #[default]
    Kill,
    /// The VM is left to you: it hangs where memory is missing, or finds zeros there.
    Leave,
}

/// As [`Fill`], for the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum FillChoice {
    /// Only pages around and behind the VMs' faults; --replay then only begins the record of --record.
    None,
    /// The pages of --replay.
    #[default]
    Recorded,
    /// The pages of --replay first, and then all the rest: each VM takes all of its memory.
    All,
}

pub fn main(arguments: Arguments) -> ExitCode {
    match restore(&Arc::new(arguments)) {
        Ok(code) => code,
        Err(wrong) => complain(&wrong),
    }
}

fn restore(arguments: &Arc<Arguments>) -> Result<ExitCode, String> {
    check_files(arguments)?;
    // Before there are threads, so that none of them gets the signals.
    let ending = EndSignals::listen().map_err(|error| {
        format!("cannot wait for signals: {error}; allow this process more descriptors (ulimit -n)")
    })?;
    outputs::check(arguments)?;
    check_replay(arguments)?;
    // A server that takes over has the address of its metrics when the other has ended.
    let start_metrics = || arguments.metrics.as_ref().map(Metrics::start).transpose();
    let early = if arguments.replace { None } else { start_metrics()? };
    let bar = bar();
    let Some(server) = start_unless_ended(arguments, &ending, &bar)? else { return Ok(ExitCode::SUCCESS) };
    let metrics = if arguments.replace { late(start_metrics, &bar) } else { early };
    let (snapshot, socket) = (shown_layers(arguments), arguments.socket.display());
    let bytes = size::shown(server.image().bytes);
    print_message(&bar, &format!("serving {snapshot} ({bytes}) on {socket}"));
    if let Some(address) = metrics.as_ref().and_then(Metrics::address) {
        print_message(&bar, &format!("numbers for Prometheus at http://{address}/metrics"));
    }
    if let Err(wrong) = ready::notify("READY=1") {
        print_message(&bar, &wrong);
    }
    watch(&server, &ending, metrics.as_ref(), &bar);
    // It takes a moment to end the VMs and to write the record.
    let _ = ready::notify("STOPPING=1");
    bar.finish_and_clear();
    let (record, is_replaced) = (server.record(), server.is_replaced());
    let stats = server.stop();
    // Of a server that was replaced, the file is the other's by now.
    if let (Some(metrics), false) = (&metrics, is_replaced) {
        metrics.keep(&stats);
    }
    let written = record.as_ref().zip(arguments.record.as_ref()).map_or(Ok(()), |(record, path)| {
        if record.is_empty() {
            print_message(
                &bar,
                &format!("no page was recorded; a record that {} has already is left there", path.display()),
            );
        }
        // The other command may have ended by now, and have written its own there.
        let written = if is_replaced { record.write_unless_contained(path) } else { record.write(path) };
        written.map_err(|error| named(path, &error))
    });
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

/// The metrics of a server that has VMs by now: without them it goes on. The other may take a moment to end.
fn late(start: impl Fn() -> Result<Option<Metrics>, String>, bar: &ProgressBar) -> Option<Metrics> {
    let until = Instant::now() + METRICS_WAIT;
    loop {
        match start() {
            Ok(metrics) => return metrics,
            Err(_) if Instant::now() < until => std::thread::sleep(SIGNAL_CHECK),
            Err(wrong) => {
                print_message(bar, &format!("{wrong}; the VMs are served without metrics"));
                return None;
            }
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

/// Checks that no layer is the URL of an object, for which this command has no store.
fn check_files(arguments: &Arguments) -> Result<(), String> {
    let Some(url) = std::iter::once(&arguments.snapshot).chain(&arguments.diff).find(|path| is_url(path))
    else {
        return Ok(());
    };
    let (url, socket) = (url.display(), arguments.socket.display());
    Err(format!(
        "cannot serve {url} by this command, which reads files; `quinion serve` has stores and serves objects: \
         quinion serve --store {} --restore {url}={socket}",
        store_of(&url.to_string())
    ))
}

/// Checks that a record is of use: to be replayed, or for the new record to begin with.
fn check_replay(arguments: &Arguments) -> Result<(), String> {
    let is_unused = arguments.fill == FillChoice::None && arguments.record.is_none();
    match &arguments.replay {
        Some(path) if is_unused => Err(format!(
            "--replay {}: by --fill none no VM gets the pages of a record; leave out --fill none, or --replay",
            path.display()
        )),
        _ => Ok(()),
    }
}

/// The prefix of the store that an object's URL most likely has: scheme and bucket, or host.
fn store_of(url: &str) -> &str {
    let begin = url.find("://").map_or(0, |at| at + 3);
    url[begin..].find('/').map_or(url, |len| &url[..begin + len])
}

/// Starts the server on a thread of its own; `None` if a signal came before it served. That thread may wait for a
/// device or a pipe for long, and the process ends without it; but one that may have taken over VMs by then is waited
/// for: it takes none after the signal.
fn start_unless_ended(
    arguments: &Arc<Arguments>,
    ending: &EndSignals,
    bar: &ProgressBar,
) -> Result<Option<Server>, String> {
    let (sender, receiver) = channel();
    let replaces = arguments.replace;
    let (arguments, bar) = (Arc::clone(arguments), bar.clone());
    let signals = ending.as_fd().try_clone_to_owned();
    let signals =
        signals.map_err(|error| format!("cannot wait for signals: {error}; allow more open files"))?;
    let run = move || {
        // If nothing receives it any more, the server ends here.
        let _ = sender.send(start(&arguments, Arc::new(signals), &bar));
    };
    let thread = std::thread::Builder::new().name("quinion-start".to_owned()).spawn(run);
    thread
        .map_err(|error| format!("cannot start a thread: {error}; allow this process some threads more"))?;
    loop {
        match receiver.recv_timeout(SIGNAL_CHECK) {
            Ok(Err(_)) if metrics::wait(ending, None, Duration::ZERO) => return Ok(None),
            Ok(started) => return started.map(Some),
            Err(RecvTimeoutError::Timeout) if !replaces && metrics::wait(ending, None, Duration::ZERO) => {
                return Ok(None);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(
                    "the thread that starts the server panicked; see its message, and report it".into()
                );
            }
        }
    }
}

fn start(arguments: &Arguments, signals: Arc<OwnedFd>, bar: &ProgressBar) -> Result<Server, String> {
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
    options.replace = arguments.replace;
    options.ending = Some(signals);
    options.socket_mode = arguments.socket_mode.0;
    if let Some(SocketOwner { user, group }) = arguments.socket_owner {
        (options.socket_owner, options.socket_group) = (Some(user), group);
    }
    options.record = arguments.record.is_some();
    options.on_failure = match arguments.on_failure {
        Failure::Kill => OnFailure::Kill,
        Failure::Leave => OnFailure::Leave,
    };
    let bar = bar.clone();
    options.observer = Some(Arc::new(move |event: &Event| print_message(&bar, &event.to_string())));
    Server::start_layers(&cache, &layers, &arguments.socket, options).map_err(|error| {
        match error.kind() {
            quinion::ErrorKind::NoMemory => no_room(arguments, &layers, &cache),
            _ => None,
        }
        .unwrap_or_else(|| error.to_string())
    })
}

/// Why a snapshot that VMMs should map does not fit, in the units of the command line; `None` if it does.
fn no_room(arguments: &Arguments, layers: &[PathBuf], cache: &quinion::Cache) -> Option<String> {
    let image = identify_layers(cache, layers).ok()?.bytes;
    let (memory, wanted) = (cache.stats().memory_bytes, image + image / 32 + 2 * quinion::Cache::MEMORY_MIN);
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
    let remedy = "name a file that `--record` has written, or leave out --replay";
    let read = FaultRecord::for_replay(path, image).map_err(|error| match error {
        FaultRecordError::Read(error) => {
            format!("cannot read the record {}: {error}; {remedy}", path.display())
        }
        error => named(path, &error),
    })?;
    read.remarks.iter().for_each(|remark| print_message(bar, remark));
    Ok(read.record)
}

/// Serves until a signal asks this process to end, or another server has taken over.
fn watch(server: &Server, ending: &EndSignals, metrics: Option<&Metrics>, bar: &ProgressBar) {
    loop {
        if metrics::wait(ending, metrics, TICK) {
            return;
        }
        if server.is_replaced() {
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

fn print_message(bar: &ProgressBar, text: &str) {
    bar.suspend(|| crate::complain_only(&text));
}

fn report(stats: &RestoreStats, record: Option<&FaultRecord>, form: Form) -> Report {
    let counters = &stats.counters;
    let quantile = |share| counters.latency.quantile(share).map_or(Value::Unknown, Value::Number);
    let mut report = Report::new();
    report.add("image_bytes", "image", Value::Bytes(stats.image_bytes));
    report.add("vms", "VMs served", Value::Number(stats.vms_total));
    report.add("vms_taken_over", "VMs taken over", Value::Number(stats.vms_taken_over));
    report.add("vms_handed_over", "VMs handed over", Value::Number(stats.vms_handed_over));
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
    fn the_store_of_a_url_is_its_bucket_or_host() {
        assert_eq!(store_of("s3://bucket/a/b"), "s3://bucket");
        assert_eq!(store_of("https://host:1/a"), "https://host:1");
        assert_eq!(store_of("gs://bucket"), "gs://bucket");
    }

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
