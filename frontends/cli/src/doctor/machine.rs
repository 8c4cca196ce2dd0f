//! Machine: what the kernel and its settings allow.
//!
//! Each line says "yes", or what is wrong, what that costs and what to do. Only readable files are needed: every "no"
//! has a slower way.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use quinion::internals::arena::file_systems::FileSystem;
use quinion::{Cache, MemFileOptions};
use quinion_owner::internals::serve::mounts;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::process::{Resource, getrlimit};

use crate::report::{Report, Value};
use quinion_cli::sys;

/// The report on the machine, and on the file systems of `folders`.
pub fn report(folders: &[impl AsRef<Path>]) -> Report {
    let mut report = Report::new();
    report
        .add("kernel", "kernel", line("/proc/sys/kernel/osrelease"))
        .add("io_uring", "io_uring", tried(io_uring(), "reads go by a pool of threads instead"))
        .add("huge_pages_shared", "2 MiB pages in shared memory", huge_pages())
        .add("memlock_bytes", "memory lock limit", memlock())
        .add("memory_bytes", "memory a cache may use", bytes_or(quinion::process_limit(), Value::Unknown))
        .add("cgroup_limit_bytes", "control group limit", cgroup_limit())
        .add("ptrace_scope", "ptrace", ptrace())
        .add("files_of_others", "files of other users", Value::Text(files_of_others().into()))
        .add("userfaultfd", "userfaultfd", userfaultfd())
        .add("kvm", "KVM", tried(open_kvm(), "only restore's own tests want it"))
        .add(
            "folders",
            "folder",
            Value::List(folders.iter().map(|f| Value::Group(folder(f.as_ref()))).collect()),
        );
    report
}

/// "yes", or why not and what then.
fn tried(result: io::Result<()>, then: &str) -> Value {
    Value::Text(match result {
        Ok(()) => "yes".to_owned(),
        Err(error) => format!("no ({error}); {then}"),
    })
}

fn text(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn line(path: &str) -> Value {
    text(path).map_or(Value::Unknown, Value::Text)
}

fn io_uring() -> io::Result<()> {
    io_uring::IoUring::new(2).map(drop).map_err(|error| {
        match text("/proc/sys/kernel/io_uring_disabled").as_deref() {
            Some("1") => {
                io::Error::other("only one group may use it; allow it by sysctl kernel.io_uring_disabled=0")
            }
            Some("2") => {
                io::Error::other("it is switched off; allow it by sysctl kernel.io_uring_disabled=0")
            }
            _ => error,
        }
    })
}

/// The setting, and whether a cache gets them all the same: it asks for each by itself (`MADV_COLLAPSE`).
fn huge_pages() -> Value {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Some(setting) = text(PATH) else { return Value::Unknown };
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or_default();
    let gets_them = || -> quinion::error::Result<bool> {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build()?;
        cache.mem_file(MemFileOptions::new().size(1))?.write_all_at(&[1], 0)?;
        Ok(cache.stats().huge_bytes > 0)
    };
    Value::Text(match chosen {
        "always" | "advise" | "within_size" | "force" => format!("yes ({chosen})"),
        _ if gets_them().is_ok_and(|gets| gets) => {
            format!("yes (set to {chosen}; a cache asks for them one by one)")
        }
        _ => format!("no ({chosen}); the cache works with 4 KiB pages, slower: echo advise > {PATH}"),
    })
}

fn memlock() -> Value {
    getrlimit(Resource::Memlock).current.map_or(Value::Text("unlimited".into()), Value::Bytes)
}

/// `bytes` as a value, or `none` if the number means that there is no bound; version 1 of control groups says so by the
/// largest number of whole pages.
fn bytes_or(bytes: u64, none: Value) -> Value {
    const NO_BOUND: u64 = 1 << 62;
    if bytes < NO_BOUND { Value::Bytes(bytes) } else { none }
}

/// The least limit of this process's control groups, as the library finds it.
fn cgroup_limit() -> Value {
    if text("/proc/self/cgroup").is_none() {
        return Value::Unknown;
    }
    let groups = quinion::internals::arena::memory_groups();
    let files =
        groups.iter().flat_map(|(version, group)| version.files().iter().map(|file| group.join(file)));
    narrowest(files.filter_map(|file| fs::read_to_string(file).ok()))
}

/// The least limit in these texts; what is no number is no limit.
fn narrowest(texts: impl Iterator<Item = String>) -> Value {
    let limit = texts.filter_map(|text| text.trim().parse().ok()).min();
    bytes_or(limit.unwrap_or(u64::MAX), Value::Text("none".into()))
}

fn ptrace() -> Value {
    Value::Text(match text("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None | Some("0" | "1") => "yes".into(),
        Some(scope) => format!(
            "restricted (kernel.yama.ptrace_scope is {scope}); code that a program makes for itself cannot be looked \
             at, and such a program is served with care"
        ),
    })
}

/// Whether the kernel gives this user leases on them.
fn files_of_others() -> &'static str {
    if quinion_run::leases_files_of_others() {
        "yes"
    } else {
        "no (a lease needs the file's owner, or CAP_LEASE); run serves only files that you own, and others by \
         --immutable FOLDER"
    }
}

fn userfaultfd() -> Value {
    let then = "restore needs it: sysctl vm.unprivileged_userfaultfd=1, or the right to use /dev/userfaultfd";
    tried(sys::userfaultfd(), then)
}

fn open_kvm() -> io::Result<()> {
    OpenOptions::new().read(true).write(true).open("/dev/kvm").map(drop)
}

/// Capabilities of a folder's file system, tried with a file that has no name.
fn folder(path: &Path) -> Report {
    let mut report = Report::new();
    report.add("folder", "folder", Value::Text(path.display().to_string()));
    report.add("file_system", "file system", file_system(path).map_or(Value::Unknown, Value::Text));
    match Trial::in_folder(path) {
        Ok(trial) => trial.add_to(&mut report),
        Err(error) => {
            let wrong = format!(
                "no file could be made there to try it with ({error}); name a folder you may write to"
            );
            report.add("tried", "tried", Value::Text(wrong));
        }
    }
    report
}

/// The kind of file system that a path lies in.
fn file_system(path: &Path) -> Option<String> {
    mounts::kind_at(&fs::canonicalize(path).ok()?).ok()
}

struct Trial {
    plain: File,
    direct: io::Result<File>,
}

impl Trial {
    fn in_folder(path: &Path) -> io::Result<Self> {
        let mut file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(path)?;
        file.write_all(&[7; 4096])?;
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let plain = File::open(&name)?;
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&name);
        Ok(Self { plain, direct })
    }

    fn lease(&self) -> io::Result<()> {
        let system = FileSystem::of(rustix::fs::fstatfs(&self.plain)?.f_type as u64);
        if !system.may_be_served(false) {
            return Err(io::Error::other("files of this file system can change without a lease break"));
        }
        sys::can_take_lease(&self.plain)
    }

    fn add_to(self, report: &mut Report) {
        let align = rustix::fs::statx(&self.plain, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
        let align = align.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
        let (lease, direct) = (self.lease(), self.direct.map(drop));
        let cached = sys::residency(&self.plain, 4096);
        report
            .add("direct", "O_DIRECT", tried(direct, "files there are read through the kernel's cache too"))
            .add(
                "direct_align_bytes",
                "O_DIRECT aligns to",
                align.map_or(Value::Unknown, |stat| Value::Bytes(stat.stx_dio_offset_align.into())),
            )
            .add(
                "lease",
                "read leases",
                tried(
                    lease,
                    "run leaves files there to the kernel, but for those of --immutable, or --coherence times",
                ),
            )
            .add(
                "cachestat",
                "cachestat",
                Value::Text(match cached {
                    Ok(kept) if kept.method == "cachestat" => "yes".into(),
                    _ => {
                        "no (needs Linux 6.5); run does not know what the kernel has in memory already"
                            .into()
                    }
                }),
            )
            .add(
                "uncached_reads",
                "RWF_DONTCACHE",
                tried(
                    sys::can_read_uncached(&self.plain),
                    "needs Linux 6.14; reads through the kernel's cache leave their bytes there",
                ),
            );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_both_versions_are_read_and_none_is_no_number() {
        let shown = |texts: &[&str]| {
            let mut report = Report::new();
            report.add("limit", "limit", narrowest(texts.iter().map(|&text| text.to_owned())));
            report.printed(crate::report::Form::Json)
        };
        assert_eq!(shown(&["max\n", "1073741824\n", "9223372036854771712\n"]), "{\"limit\":1073741824}\n");
        for texts in [&["max\n"][..], &["9223372036854771712\n"], &[]] {
            assert_eq!(shown(texts), "{\"limit\":\"none\"}\n", "{texts:?}");
        }
        assert!(matches!(bytes_or(u64::MAX, Value::Unknown), Value::Unknown));
    }

    #[test]
    fn a_folder_that_can_be_written_is_tried_and_another_says_why_not() {
        let here = tempfile::tempdir().unwrap();
        let printed = folder(here.path()).printed(crate::report::Form::Json);
        assert!(printed.contains("\"lease\":\"") && printed.contains("\"cachestat\":\""), "{printed}");
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0);
        let printed = folder(Path::new("/proc")).printed(crate::report::Form::Json);
        assert!(
            printed.contains("\"file_system\":\"proc\"") && printed.contains("\"tried\":\"no file"),
            "{printed}"
        );
    }
}
