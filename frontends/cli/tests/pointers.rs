//! Pointers: a program that passes addresses outside its memory gets the same results as without the cache. The program
//! is `programs/pointers.c`.
//!
//! ```text
//!   programs/pointers.c CASE --alone-----------> its output, and how it ended
//!                            --under `run`-----> the same, byte for byte
//! ```
//!
//! Each case runs by names alone and with the C library patched, with an owner that takes over each file at its first
//! read (`--attach at-once`) and with one that leaves each file to the kernel at first, as in the default mode. A case
//! of which much has to be served also checks the numbers of the session.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, OnceLock};

use quinion::Cache;
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::ViewerTotals;
use quinion_run::plan::Plan;
use quinion_run::{LINKER, Session, plan_for};

const FILE_BYTES: usize = 300_123;

/// The program, compiled once; and once more with the cases that make system calls by instructions of their own, which
/// change how the whole program is served.
fn program(has_instructions: bool) -> &'static Path {
    static BUILT: [OnceLock<(tempfile::TempDir, PathBuf)>; 2] = [const { OnceLock::new() }; 2];
    let (_, program) = BUILT[usize::from(has_instructions)].get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("pointers");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/pointers.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-w", "-pthread", "-o"]).arg(&program).arg(&source);
        if has_instructions {
            compiler.arg("-DINSTRUCTIONS");
        }
        assert!(compiler.status().expect("a C compiler named cc").success());
        (folder, program)
    });
    program
}

fn content() -> Vec<u8> {
    let mut state = 88172645463325252u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(FILE_BYTES).collect()
}

fn command(case: &str, file: &Path) -> Command {
    let mut command = Command::new(program(case.ends_with("_by_instruction")));
    command.arg(case).arg(file).stdin(Stdio::null());
    command
}

fn told(mut command: Command) -> (String, Option<i32>) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(stderr.is_empty(), "{command:?}: {}", String::from_utf8_lossy(&stderr));
    assert!(status.code().is_some(), "{command:?} ended by {status}: {}", String::from_utf8_lossy(&stdout));
    (String::from_utf8(stdout).unwrap(), status.code())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Attach {
    AtOnce,
    Default,
}

fn session(attach: Attach, is_patched: bool) -> Session {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let mut owner = CacheOwner::new(cache);
    if attach == Attach::Default {
        owner = owner.attach_lazily();
    }
    let mut session = Session::start(Arc::new(owner)).unwrap();
    if is_patched {
        session.patch_by(&PLAN.get_or_init(|| plan_for(Path::new(LINKER)).unwrap()).bytes()).unwrap();
    }
    session
}

fn same_with_and_without(case: &str, attach: Attach, is_patched: bool) -> ViewerTotals {
    let folder = tempfile::tempdir().unwrap();
    let [with, without] = ["with", "without"].map(|name| folder.path().join(name));
    for file in [&with, &without] {
        std::fs::write(file, content()).unwrap();
    }
    let expected = told(command(case, &without));
    let session = session(attach, is_patched);
    let mut served = command(case, &with);
    session.point_to(&mut served);
    let found = told(served);
    let how = format!("{case}, {attach:?}, patched: {is_patched}");
    for (at, (found, expected)) in found.0.lines().zip(expected.0.lines()).enumerate() {
        assert_eq!(found, expected, "{how}: line {} differs (right: without the cache)", at + 1);
    }
    assert_eq!(found, expected, "{how} differs (right: without the cache)");
    assert_eq!(std::fs::read(&with).unwrap(), std::fs::read(&without).unwrap(), "{how} wrote something else");
    let totals = session.stop();
    assert!(totals.viewers > 0, "{how} did not attach");
    totals
}

macro_rules! pointers {
    ($($name:ident: $reads:literal)*) => { $(
        #[test]
        fn $name() {
            for is_patched in [false, true] {
                let totals = same_with_and_without(stringify!($name), Attach::AtOnce, is_patched);
                assert!(totals.reads >= $reads, "too little was served: {totals:?}");
                same_with_and_without(stringify!($name), Attach::Default, is_patched);
            }
        }
    )* };
}
pointers! {
    bad_buffers: 24
    partly_bad_buffers: 27
    bad_buffers_of_cold_files: 8
    bad_arrays: 30
    bad_messages: 3
    bad_environments: 3
    bad_blocks_and_modes: 3
    recovering_handler: 3
    signals_that_are_sent: 3
    ignored: 3
    started_programs: 3
    default_deaths: 3
    many_handlers: 3
    guarded_pages: 4
    threads: 1000
    strict_seccomp: 3
    filter_seccomp: 9
    filter_seccomp_amid_reads: 100
}

/// The object does not notice this filter, so any later system call of its own would end the program: it makes none
/// for a descriptor that is not a served file.
#[test]
fn strict_seccomp_by_instruction() {
    for is_patched in [false, true] {
        same_with_and_without("strict_seccomp_by_instruction", Attach::AtOnce, is_patched);
    }
}
