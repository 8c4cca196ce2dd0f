//! Program: what `run` would do with a program, determined from its file and those of its libraries.
//!
//! ```text
//!   name --> file --> script: its interpreter, or the program that it becomes (shim.rs)
//!              |
//!              `----> linked how? --> libraries --> code of their own, names they ask for --> verdict
//!                         `--- nothing is served
//! ```
//!
//! The verdict uses the same parts as `run` itself, [`run::classify`] and the scan for system calls, so the two cannot
//! disagree about a file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use quinion::internals::arena::control::SyscallAudit;
use quinion_run::elf::{Elf, SymbolKind};
use quinion_run::examine::is_c_library;
use quinion_run::syscall_scan::{self, Site};
use quinion_run::{self as run, Kind};

use super::libraries::{self, Libraries};
use super::shim::{self, ShimTarget};
use crate::report::{Report, Value};

pub struct ProgramInspection {
    name: String,
    /// The file that was named, and the interpreters up to the program that runs; for a script that becomes another
    /// program, that program's, too.
    chain: Vec<PathBuf>,
    /// Whether it is a script that becomes a program whose name is not in it.
    target_is_unknown: bool,
    kind: Kind,
    linked: Option<Linked>,
}

struct Linked {
    linker: PathBuf,
    elf: Elf,
    libraries: Libraries,
    /// Objects with code that enters the kernel by itself.
    foreign: Vec<(PathBuf, Vec<Site>)>,
}

/// Examines the program that `name` means.
///
/// # Errors
/// If there is none, or it cannot be read; in words.
pub fn inspect(name: &OsStr) -> Result<ProgramInspection, String> {
    /// Scripts that become scripts.
    const SHIMS_MAX: usize = 4;
    let mut inspected = inspect_one(name)?;
    let mut last = 0; // where the chain of the last program begins
    for _ in 0..SHIMS_MAX {
        match shim::target_of(&inspected.chain[last..]) {
            Some(ShimTarget::Program(next)) => {
                let Ok(next) = inspect_one(&next) else { break };
                let ProgramInspection { name, mut chain, .. } = inspected;
                last = chain.len();
                chain.extend(next.chain.iter().cloned());
                inspected = ProgramInspection { name, chain, ..next };
            }
            target => {
                inspected.target_is_unknown = target == Some(ShimTarget::Unknown);
                break;
            }
        }
    }
    Ok(inspected)
}

fn inspect_one(name: &OsStr) -> Result<ProgramInspection, String> {
    let shown = name.display().to_string();
    let named = run::quoted(name);
    if let Some(found) = run::obstacle(&[name.to_owned()]) {
        return Err(format!("{named} cannot be run: {}; {}", found.wrong, found.remedy));
    }
    let chain = run::chain_of(name);
    let Some(path) = chain.last() else {
        return Err(format!("{named} is not a file; name a program that can be run"));
    };
    let kind = run::classify(name);
    if kind == Kind::Unknown && !is_unreadable(path) {
        let path = run::quoted(path);
        return Err(format!(
            "{path} cannot be examined: {}; name a program that can be run",
            wrong_with(&chain)
        ));
    }
    let linked = (kind == Kind::Served).then(|| inspect_linked(path)).flatten();
    Ok(ProgramInspection { name: shown, chain, target_is_unknown: false, kind, linked })
}

/// Whether it may be executed, as was checked before, but not read.
fn is_unreadable(path: &Path) -> bool {
    File::open(path).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

/// Why the last of a chain cannot be examined.
fn wrong_with(chain: &[PathBuf]) -> String {
    let mut start = [0; 4];
    let read = chain.last().map(|path| File::open(path)?.read_exact(&mut start));
    match read {
        Some(Ok(())) if start == *b"\x7fELF" => "it begins as an ELF program, and is cut short".into(),
        Some(Err(error)) if error.kind() != ErrorKind::UnexpectedEof => error.to_string(),
        _ => "it is neither a script nor an ELF program".into(),
    }
}

fn inspect_linked(path: &Path) -> Option<Linked> {
    let elf = Elf::open(path).ok()?;
    let linker = PathBuf::from(elf.interpreter()?);
    let libraries = libraries::of(path, &elf, &linker);
    let mut foreign: Vec<(PathBuf, Vec<Site>)> = vec![(path.to_owned(), sites(&elf))];
    for loaded in
        libraries.found.iter().filter(|loaded| !loaded.elf.soname().is_some_and(|n| is_c_library(&n)))
    {
        foreign.push((loaded.path.clone(), sites(&loaded.elf)));
    }
    foreign.retain(|(_, sites)| !sites.is_empty());
    Some(Linked { linker, elf, libraries, foreign })
}

/// Where an object enters the kernel; an unknown site, if that cannot be found out.
fn sites(elf: &Elf) -> Vec<Site> {
    syscall_scan::scan(elf.bytes()).unwrap_or_else(|_| vec![Site { address: 0, number: None }])
}

impl Linked {
    fn audit(&self) -> SyscallAudit {
        self.foreign
            .iter()
            .map(|(_, sites)| syscall_scan::audit_of(sites))
            .max()
            .unwrap_or(SyscallAudit::Clean)
    }

    fn c_library(&self) -> Option<&libraries::Loaded> {
        self.libraries.found.iter().find(|loaded| loaded.elf.soname().as_deref() == Some("libc.so.6"))
    }

    fn asks_for(&self, names: &[&str]) -> bool {
        let others =
            self.libraries.found.iter().filter(|l| !l.elf.soname().is_some_and(|n| is_c_library(&n)));
        let asks = |elf: &Elf| elf.symbols().iter().any(|s| !s.is_defined && names.contains(&s.name));
        asks(&self.elf) || others.map(|loaded| &loaded.elf).any(asks)
    }
}

/// Functions that show how a program reads its data, and the note for a program that imports them.
const TELLING: &[(&str, &[&str], &str)] = &[
    (
        "mmap",
        &["mmap", "mmap64"],
        "what it reads from files that it maps (mmap): the kernel's page cache serves that",
    ),
    (
        "sendfile",
        &["sendfile", "sendfile64", "copy_file_range", "splice"],
        "what the kernel copies from file to file (sendfile, copy_file_range, splice)",
    ),
    (
        "io_uring",
        &["io_uring_queue_init", "io_uring_queue_init_params", "io_uring_setup"],
        "anything from the moment it makes an io_uring ring",
    ),
    ("libaio", &["io_submit"], "what it reads by libaio (io_submit)"),
];

impl ProgramInspection {
    /// Whether anything of it can be served; `None` if that is not known: it cannot be read, or becomes another
    /// program.
    pub fn is_served(&self) -> Option<bool> {
        (self.kind != Kind::Unknown && !self.target_is_unknown).then_some(self.linked.is_some())
    }

    pub fn report(&self) -> Report {
        let mut report = Report::new();
        let path = |path: &Path| Value::Text(path.display().to_string());
        report.add("name", "name", Value::Text(self.name.clone()));
        report.add("path", "file", self.chain.first().map_or(Value::Unknown, |first| path(first)));
        if self.chain.len() > 1 {
            let rest = self.chain[1..].iter().map(|p| path(p)).collect();
            report.add("interpreters", "script, interpreted by", Value::List(rest));
        }
        report.add("linked", "linked", Value::Text(self.linked_words()));
        if let Some(linked) = &self.linked {
            linked.add_to(&mut report);
        }
        report
    }

    fn linked_words(&self) -> String {
        match &self.kind {
            Kind::Served => "dynamically, with the GNU C library".into(),
            Kind::Static(_) => "statically".into(),
            Kind::SetId(_) => "dynamically; set-uid or set-gid".into(),
            Kind::Foreign(_, what) => what.clone(),
            Kind::Unknown => "unknown: it may be run, and not be read".into(),
        }
    }

    /// The verdict: what `run` will do, will not do, and what can be done about that.
    pub fn verdict(&self) -> Report {
        let (mut will, mut will_not, mut advice) = (Vec::new(), Vec::new(), Vec::new());
        match &self.linked {
            _ if self.target_is_unknown => advice.push(
                "the script starts another program that is chosen while it runs, and only its shell is shown: run \
                 `quinion doctor` on that program"
                    .into(),
            ),
            Some(linked) => linked.add_findings(&mut will, &mut will_not, &mut advice),
            None if self.is_served().is_none() => {
                advice.push("run it: the report of `quinion run` says what was served of it".into());
            }
            None => {
                will_not.push("anything: the program runs as without Quinion".into());
                advice.push(self.remedy().to_owned());
            }
        }
        let mut report = Report::new();
        report.add("served", "something is served", self.is_served().map_or(Value::Unknown, Value::Truth));
        for (key, label, lines) in [
            ("will_serve", "serves", will),
            ("will_not_serve", "does not serve", will_not),
            ("advice", "advice", advice),
        ] {
            report.add(key, label, Value::Lines(lines));
        }
        report
    }

    fn remedy(&self) -> &'static str {
        match &self.kind {
            Kind::Static(_) => {
                "a static program (most Go programs) cannot load the preload object: use a build that is linked \
                 dynamically to the C library, if there is one"
            }
            Kind::SetId(_) => {
                "the dynamic linker ignores LD_PRELOAD for set-uid and set-gid programs: run a copy without that bit, \
                 as the user or group that it changes to"
            }
            Kind::Foreign(_, what) if what.contains("musl") => {
                "the preload object is for the GNU C library: use a build of the program for that"
            }
            _ => "use a build of the program for x86-64 Linux and the GNU C library",
        }
    }
}

impl Linked {
    fn add_to(&self, report: &mut Report) {
        let path = |path: &Path| Value::Text(path.display().to_string());
        report.add("linker", "dynamic linker", path(&self.linker));
        let library = self.c_library();
        report.add("c_library", "C library", library.map_or(Value::Unknown, |found| path(&found.path)));
        let version = library.and_then(|found| version(&found.elf));
        report.add("c_library_version", "its version, at least", version.map_or(Value::Unknown, Value::Text));
        let id = library.and_then(|found| found.elf.build_id());
        let id = id.map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect());
        report.add("c_library_build_id", "its build-id", id.map_or(Value::Unknown, Value::Text));
        match run::plan_for(&self.linker) {
            Ok(plan) => {
                report.add("patched", "its functions patched", Value::Number(plan.functions.len() as u64));
                let left = plan.left.iter().map(|left| format!("{}: {}", left.name, left.why)).collect();
                report.add("not_patched", "not patched", Value::Lines(left));
            }
            Err(why) => {
                report.add("patched", "its functions patched", Value::Number(0));
                report.add("not_patched", "not patched", Value::Lines(vec![why]));
            }
        }
        report.add("libraries", "libraries", Value::Number(self.libraries.found.len() as u64));
        if !self.libraries.missing.is_empty() {
            let names = self.libraries.missing.iter().cloned().map(Value::Text).collect();
            report.add("libraries_missing", "of these not found", Value::List(names));
        }
        let telling = TELLING.iter().filter(|(_, names, _)| self.asks_for(names));
        let telling: Vec<Value> = telling.map(|(name, ..)| Value::Text((*name).into())).collect();
        report.add(
            "asks_for",
            "imports",
            if telling.is_empty() {
                Value::Lines(vec!["nothing special".into()])
            } else {
                Value::List(telling)
            },
        );
        let objects =
            self.foreign.iter().map(|(path, sites)| Value::Group(foreign_object(path, sites))).collect();
        if !self.foreign.is_empty() {
            report.add("system_calls_of_its_own", "system calls of its own", Value::List(objects));
        }
    }

    fn add_findings(&self, will: &mut Vec<String>, will_not: &mut Vec<String>, advice: &mut Vec<String>) {
        if self.audit() == SyscallAudit::Restricted {
            will.push("positional reads (pread, preadv), each after a check of the descriptor".into());
            will_not.push(
                "reads at the descriptor's offset (read, readv): its own code makes system calls that may \
                 use descriptors unseen"
                    .into(),
            );
        } else {
            will.push(
                "reads of files that it opens (read, pread, readv, preadv), in its children too".into(),
            );
        }
        if run::plan_for(&self.linker).is_ok() {
            will.push("what the C library reads for itself: streams (fopen), POSIX aio".into());
        } else {
            will_not.push(
                "what the C library reads for itself (streams, POSIX aio): it cannot be patched".into(),
            );
        }
        for (_, names, words) in TELLING {
            if self.asks_for(names) {
                will_not.push((*words).to_owned());
            }
        }
        if !run::leases_files_of_others() {
            will_not.push(
                "files of other users: the kernel gives a lease to a file's owner alone, or with CAP_LEASE; \
                 `--immutable FOLDER` serves those that never change"
                    .into(),
            );
        }
        if self.asks_for(&["dlopen", "dlmopen"]) {
            advice.push("it can load libraries at run time; each is examined before its code runs".into());
        }
        if !self.libraries.missing.is_empty() {
            advice.push(
                "libraries were not found and so not examined; set LD_LIBRARY_PATH as you would to run it"
                    .into(),
            );
        }
        if advice.is_empty() {
            advice.push("none; start it with `quinion run -- PROGRAM`".into());
        }
    }
}

fn foreign_object(path: &Path, sites: &[Site]) -> Report {
    let mut names: Vec<String> =
        sites.iter().filter_map(|site| site.number).map(syscall_scan::call_name).collect();
    names.sort();
    names.dedup();
    let unknown = sites.iter().filter(|site| site.number.is_none()).count();
    let mut report = Report::new();
    report
        .add("object", "object", Value::Text(path.display().to_string()))
        .add("calls", "calls", Value::List(names.into_iter().map(Value::Text).collect()))
        .add("unknown_calls", "calls not known", Value::Number(unknown as u64))
        .add("harmless", "harmless", Value::Truth(syscall_scan::audit_of(sites) != SyscallAudit::Restricted));
    report
}

fn version(library: &Elf) -> Option<String> {
    let symbols = library.symbols();
    let versions = symbols.iter().filter(|s| s.is_defined && s.kind == SymbolKind::Function);
    let numbers = versions.filter_map(|symbol| {
        let (major, minor) = symbol.version?.strip_prefix("GLIBC_")?.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.split('.').next()?.parse::<u32>().ok()?))
    });
    numbers.max().map(|(major, minor)| format!("{major}.{minor}"))
}
