//! A control group with little memory: the cache takes half of it at most, and shrinks when programs need memory.
//!
//! The group is a real one, inside the group of the tests, with a limit of 300M. Where none can be made (it takes
//! rights), the tests are skipped with a message. The failure that they look for is a process killed by the kernel.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Output;

mod disk;
use disk::{plain, quinion, scratch};

const MIB: usize = 1 << 20;
const LIMIT: usize = 300 * MIB;

struct Group(PathBuf);

impl Group {
    /// `None`, after printing the reason, if no group can be made.
    fn new(name: &str) -> Option<Self> {
        let skip = |why: &dyn std::fmt::Display| println!("SKIPPED: no control group for memory here: {why}");
        let Some((version, outer)) = quinion::internals::arena::memory_groups().into_iter().next() else {
            skip(&"this process is in none");
            return None;
        };
        let path = outer.join(format!("quinion-test-{}-{name}", std::process::id()));
        if let Err(error) = std::fs::create_dir(&path) {
            skip(&error);
            return None;
        }
        let group = Self(path);
        // Only the limit of the first file: memory.max, or that of version 1.
        match std::fs::write(group.0.join(version.files()[0]), LIMIT.to_string()) {
            Ok(()) => Some(group),
            Err(error) => {
                skip(&error);
                None
            }
        }
    }

    fn run(&self, memory: &str, script: &str, file: &Path, report: &Path) -> Output {
        let mut command = plain("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs"));
        command.arg(quinion().get_program());
        command.args(["run", "--attach", "at-once", "--memory", memory, "--report", "json", "--report-file"]);
        command.arg(report).args(["--", "python3", "-c", script]).arg(file);
        command.output().expect("a shell starts")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Reads the file twice, and then allocates `total` in steps of `step`, each of which takes `seconds`.
fn script(total: usize, step: usize, seconds: f64) -> String {
    format!(
        "
import os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(file).st_size
for _ in range(2):
    for at in range(0, size, 1 << 20):
        assert len(os.pread(file, 1 << 20, at)) == min(1 << 20, size - at)
kept = []
for _ in range(0, {total}, {step}):
    kept.append(bytearray(b'x') * {step})
    time.sleep({seconds})
print(sum(map(len, kept)))
"
    )
}

/// 1. In a group of 300M, with `--memory 200M`, a program fills the cache by its reads, and then allocates 120M at
///    once.
/// 2. It is killed for lack of memory.
#[test]
fn a_cache_leaves_programs_half_of_the_group_and_says_so() {
    let Some(group) = Group::new("half") else { return };
    let folder = scratch();
    let (file, report) = (folder.path().join("file"), folder.path().join("report"));
    std::fs::write(&file, vec![7; 185 * MIB]).expect("the disk has room");
    let output = group.run("200M", &script(120 * MIB, 120 * MIB, 0.0), &file, &report);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, format!("{}\n", 120 * MIB).as_bytes());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.lines().count() == 1 && said.contains("control group") && said.contains("150"), "{said}");
    assert!(disk::Report::read(&report).served() > 100 * MIB as u64);
}

/// 1. A program allocates more than the cache leaves, step by step.
/// 2. The cache does not shrink, and the kernel kills a process.
#[test]
fn a_cache_gives_way_before_the_kernel_kills() {
    let Some(group) = Group::new("way") else { return };
    let folder = scratch();
    let (file, report) = (folder.path().join("file"), folder.path().join("report"));
    std::fs::write(&file, vec![7; 220 * MIB]).expect("the disk has room");
    let output = group.run("150M", &script(220 * MIB, 2 * MIB, 0.05), &file, &report);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(output.stdout, format!("{}\n", 220 * MIB).as_bytes());
    assert!(disk::Report::read(&report).served() > 100 * MIB as u64);
}
