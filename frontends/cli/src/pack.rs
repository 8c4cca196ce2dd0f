//! Pack: snapshots of VMs as compressed chunks, and packs that are looked through for damage.
//!
//! ```text
//!   quinion pack --snapshot FILE --out PACK    chunks --> PACK, and a report on standard output
//!   quinion pack --verify PACK                 each chunk --> compared; a line for each that is damaged
//! ```
//!
//! A bar shows how far it is, if standard error is a terminal. A signal to end removes the file that is being written.
//! This module decides only where the numbers go. The packs are the library's.

use std::io::{IsTerminal, stderr};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quinion::Cache;
use quinion_cli::sys::EndSignals;
use quinion_vm::pack::{PackError, PackProgress, PackReport, PackRequest, VerifyReport, pack, verify};
use quinion_vm::{RestoreOptions, try_layers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::progress::{BarPlace, Progress};
use crate::report::{Form, Report, Value};
use crate::size::{Size, bytes_of};
use crate::{EXIT_FAILED, build_cache, complain, complain_only};

const MORE: &str = r#"How to use it:
  quinion pack --snapshot vm.mem --out monday.pack
      A snapshot as compressed chunks, each with a checksum. `quinion restore --snapshot monday.pack` serves it.
  quinion pack --snapshot base.mem --diff tuesday.mem --out tuesday.pack --against monday.pack
      Chunks that monday.pack has are not stored again: a later snapshot of the same VM costs its
      changes. tuesday.pack needs monday.pack in its folder, under its name and as it is.
  quinion pack --snapshot tuesday.pack --out alone.pack      all of it in one pack again
  quinion pack --verify tuesday.pack                         is all of it readable?

Diffs are merged: a pack has the memory as it was after the last one. A chunk that an older pack
has is read there and compared before it is referred to. A record of page faults of the snapshot is
one of its pack, too.

The pack is written under another name beside FILE (FILE.PID-0.new), synced, and renamed: it appears
whole or not at all. If this command is killed (SIGKILL), the file of the other name is left behind.
By its mode it is readable for no user and no group that may not read the snapshot; access lists
are not looked at.

Exit status: 0 all went well; 1 nothing was written, or a chunk is damaged; 2 the command line is
wrong."#;

/// Make a pack of a VM's snapshot: compressed chunks with checksums, which `restore` serves, and of which two snapshots
/// share those that they have in common.
#[derive(clap::Args, Debug)]
#[command(after_long_help = MORE)]
pub struct Arguments {
    /// The file with the VM's memory; or a pack, which is packed anew.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, required_unless_present = "verify")]
    snapshot: Option<PathBuf>,
    /// A diff above the snapshot, as Firecracker writes it. Name all of them, the oldest first.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    diff: Vec<PathBuf>,
    /// A pack in the folder of --out whose chunks are not stored again. May be given more than once.
    #[arg(long, value_name = "PACK", value_hint = clap::ValueHint::FilePath)]
    against: Vec<PathBuf>,
    /// The pack that is written.
    #[arg(long, value_name = "PACK", value_hint = clap::ValueHint::FilePath, required_unless_present = "verify")]
    out: Option<PathBuf>,
    /// Replace a file of that name. Packs that refer to it cannot be read any more then.
    #[arg(long)]
    replace: bool,
    /// The size of a chunk: a power of two from 64K to 4M; 256K if not given, or that of --against. With larger ones
    /// the pack is smaller, and a page that is wanted alone costs more.
    #[arg(long, value_name = "SIZE", value_parser = bytes_of)]
    chunk: Option<u64>,
    /// How hard zstd tries, 1 to 19.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    level: i32,
    /// Read all of this pack, and compare each chunk with its checksum.
    #[arg(long, value_name = "PACK", value_hint = clap::ValueHint::FilePath,
          conflicts_with_all = ["snapshot", "diff", "against", "out", "replace", "chunk", "level"])]
    verify: Option<PathBuf>,
    /// Print the report as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub fn main(arguments: &Arguments) -> ExitCode {
    // Before there are threads, so that none of them gets the signals.
    let ending = match EndSignals::listen() {
        Ok(ending) => ending,
        Err(error) => {
            let remedy = "allow this process more descriptors (ulimit -n)";
            return complain(&format!("cannot wait for signals: {error}; {remedy}"));
        }
    };
    let form = if arguments.json { Form::Json } else { Form::Text };
    let done = match (&arguments.verify, &arguments.snapshot, &arguments.out) {
        (Some(pack), _, _) => verified(pack, form, &ending),
        (None, Some(snapshot), Some(out)) => packed(&request(arguments, snapshot, out), form, &ending),
        _ => Err("name a snapshot and the pack that is written, or a pack to verify".to_owned()),
    };
    match done {
        Ok(code) => code,
        Err(wrong) => complain(&wrong),
    }
}

fn request(arguments: &Arguments, snapshot: &Path, out: &Path) -> PackRequest {
    let layers = std::iter::once(snapshot.to_owned()).chain(arguments.diff.iter().cloned()).collect();
    let mut request = PackRequest::new(layers, out.to_owned());
    request.against.clone_from(&arguments.against);
    (request.replace, request.level) = (arguments.replace, arguments.level);
    // A size beyond the numbers of chunks is beyond the largest chunk, too, and is refused as that.
    request.chunk_bytes = arguments.chunk.map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX));
    request
}

/// Refuses what `restore` would refuse when the pack is all there is: a snapshot that was cut, or is none.
fn check_is_snapshot(layers: &[PathBuf]) -> Result<(), String> {
    let cache = build_cache(Some(Size::Bytes(Cache::MEMORY_MIN)))?;
    let mut options = RestoreOptions::new();
    options.vms_max = 1; // of its descriptors
    try_layers(&cache, layers, &options).map(drop).map_err(|error| error.to_string())
}

fn packed(request: &PackRequest, form: Form, ending: &EndSignals) -> Result<ExitCode, String> {
    check_is_snapshot(&request.layers)?;
    let mut shown = ShownProgress::new(&request.layers[0], ending);
    let report = pack(request, &mut |progress| shown.note(progress));
    drop(shown);
    let report = report.map_err(|error| match error {
        PackError::Exists(_) => format!("{error} (--replace)"),
        error => error.to_string(),
    })?;
    Ok(printed(&pack_report(&report, form), form, ExitCode::SUCCESS))
}

fn verified(path: &Path, form: Form, ending: &EndSignals) -> Result<ExitCode, String> {
    let mut shown = ShownProgress::new(path, ending);
    let report = verify(path, &mut |progress| shown.note(progress));
    drop(shown);
    let report = report.map_err(|error| error.to_string())?;
    report.damaged.iter().for_each(|damaged| complain_only(&damaged.error));
    let left = report.damaged_chunks - report.damaged.len() as u64;
    if left > 0 {
        complain_only(&format!("and {left} more chunks are damaged"));
    }
    let code = if report.damaged_chunks == 0 { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) };
    Ok(printed(&verify_report(&report, form), form, code))
}

fn printed(report: &Report, form: Form, code: ExitCode) -> ExitCode {
    crate::print(&report.printed(form)).map_or_else(|failed| failed, |()| code)
}

/// A bar, once it is known how long it is; and whether a signal asks to end.
struct ShownProgress<'a> {
    path: &'a Path,
    ending: &'a EndSignals,
    bar: Option<Progress>,
}

impl<'a> ShownProgress<'a> {
    fn new(path: &'a Path, ending: &'a EndSignals) -> Self {
        Self { path, ending, bar: None }
    }

    fn note(&mut self, progress: PackProgress) -> ControlFlow<()> {
        let place = if stderr().is_terminal() { BarPlace::Terminal } else { BarPlace::Hidden };
        self.bar
            .get_or_insert_with(|| Progress::new(place, self.path, progress.bytes))
            .at(progress.done_bytes);
        if is_ending(self.ending) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn is_ending(ending: &EndSignals) -> bool {
    let mut fds = [PollFd::new(ending, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}

fn add_names(lines: &mut Report, packs: &[PathBuf], form: Form) {
    if !packs.is_empty() || form == Form::Json {
        let names = packs.iter().map(|name| Value::Text(name.display().to_string()));
        lines.add("packs", "refers to", Value::List(names.collect()));
    }
}

fn pack_report(report: &PackReport, form: Form) -> Report {
    let mut lines = Report::new();
    lines.add("image_bytes", "snapshot", Value::Bytes(report.bytes));
    lines.add("zero_bytes", "zeros", Value::Bytes(report.zero_bytes));
    lines.add("shared_bytes", "in other packs", Value::Bytes(report.shared_bytes));
    lines.add("repeated_bytes", "repeated", Value::Bytes(report.repeated_bytes));
    lines.add("stored_bytes", "stored", Value::Bytes(report.stored_bytes));
    lines.add("pack_bytes", "pack", Value::Bytes(report.file_bytes));
    lines.add("chunk_bytes", "chunk", Value::Bytes(report.chunk_bytes.into()));
    lines.add("ratio", "snapshot / pack", Value::Real(report.bytes as f64 / report.file_bytes as f64));
    add_names(&mut lines, &report.packs, form);
    lines
}

fn verify_report(report: &VerifyReport, form: Form) -> Report {
    let mut lines = Report::new();
    lines.add("identity", "identity", Value::Text(report.identity.to_string()));
    lines.add("image_bytes", "snapshot", Value::Bytes(report.bytes));
    lines.add("pack_bytes", "pack", Value::Bytes(report.file_bytes));
    lines.add("chunks", "chunks", Value::Number(report.chunks));
    lines.add("damaged_chunks", "damaged chunks", Value::Number(report.damaged_chunks));
    add_names(&mut lines, &report.packs, form);
    lines
}
