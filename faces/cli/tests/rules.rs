//! Never wrong: a program that does to descriptors what programs do prints the same with the cache and
//! without it. The program is `programs/rules.c`.
//!
//! ```text
//!   programs/rules.c RULE --alone-----------> its output, and how it ended
//!                         --under `run`-----> the same, byte for byte
//! ```
//!
//! Each rule is a test of its own name, and most run four times: with a naive owner
//! that has room for 6 pages, where nearly every read waits and evicts, and with
//! the cache itself, where nearly every read is a hit; by names alone, and with the
//! C library patched. A rule that is about what must not be served also says so by
//! the numbers of the session.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use quinion::arena::control::Patching;
use quinion::serve::{Owner, ViewerTotals};
use quinion::{Cache, CacheOwner};
use quinion_cli::run::plan::Plan;
use quinion_cli::run::{LINKER, Session, plan_for};

#[path = "../../../quinion/tests/support/naive_owner.rs"]
mod naive_owner;
use naive_owner::NaiveOwner;

const FILE_BYTES: usize = 300_123;

struct Rules {
    _folder: tempfile::TempDir,
    program: PathBuf,
}

/// The program, compiled once.
fn rules() -> &'static Rules {
    static RULES: OnceLock<Rules> = OnceLock::new();
    RULES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("rules");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/rules.c");
        let status = Command::new("cc")
            .args(["-O2", "-w", "-D_FORTIFY_SOURCE=2", "-pthread", "-o"])
            .arg(&program)
            .arg(&source)
            .status()
            .expect("a C compiler named cc");
        assert!(status.success());
        Rules { _folder: folder, program }
    })
}

/// A file whose every part differs from every other.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 88172645463325252u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

fn command(case: &str, file: &Path, seed: u32) -> Command {
    let mut command = Command::new(&rules().program);
    command.arg(case).arg(file).arg(seed.to_string());
    command.stdin(std::process::Stdio::null());
    command
}

fn output(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Who owns the cache.
#[derive(Clone, Copy)]
enum Room {
    /// A naive owner with room for a few pages: nearly every read waits for it and evicts.
    FewPages,
    /// The cache itself, in which everything fits: nearly every read is a hit.
    Cache,
}

fn owner(room: Room) -> Arc<dyn Owner> {
    match room {
        Room::FewPages => NaiveOwner::new(6),
        Room::Cache => {
            let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
            Arc::new(CacheOwner::new(cache))
        }
    }
}

/// How the program's calls reach us.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// By names alone.
    Names,
    /// By the C library, patched.
    Patched,
}

/// A session whose programs' calls reach us that way.
fn session(room: Room, way: Way) -> Session {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    let mut session = Session::start(owner(room)).unwrap();
    if way == Way::Patched {
        session.patch_by(PLAN.get_or_init(|| plan_for(Path::new(LINKER)).unwrap())).unwrap();
    }
    session
}

/// Runs a case both ways, each with a file of its own, and compares. What the viewers did.
fn same_with_and_without(case: &str, seed: u32, room: Room) -> ViewerTotals {
    same_in_a_way(case, seed, room, Way::Names)
}

fn same_in_a_way(case: &str, seed: u32, room: Room, way: Way) -> ViewerTotals {
    let folder = tempfile::tempdir().unwrap();
    let [with, without] = ["with", "without"].map(|name| folder.path().join(name));
    for file in [&with, &without] {
        std::fs::write(file, content(FILE_BYTES)).unwrap();
    }
    let expected = output(command(case, &without, seed));
    let session = session(room, way);
    let mut served = command(case, &with, seed);
    session.point_to(&mut served);
    assert_eq!(output(served), expected, "{case} {seed} {way:?} differs (right: without the cache)");
    assert_eq!(
        std::fs::read(&with).unwrap(),
        std::fs::read(&without).unwrap(),
        "{case} wrote something else"
    );
    let totals = session.stop();
    assert!(totals.viewers > 0, "{case} did not attach");
    let patched = totals.patching[Patching::Patched as usize];
    assert_eq!(patched, if way == Way::Patched { totals.viewers } else { 0 }, "{case}: {totals:?}");
    totals
}

macro_rules! rules {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            for room in [Room::FewPages, Room::Cache] {
                for way in [Way::Names, Way::Patched] {
                    let totals = same_in_a_way(stringify!($name), 1, room, way);
                    assert!(totals.reads > 0, "nothing was served: {totals:?}");
                }
            }
        }
    )* };
}

rules! {
    read pread dup fork forkread vfork spawn exec fdopen sendfile write stream truncate truncate_only append grow
    hints vectors seek reuse signals threads cancel errors passed mapped locks syscall temporary children
}

/// Whether the kernel has every page of `file`; `None` if it does not let go of what it has.
fn is_filled_by(case: &str, run: impl FnOnce(Command)) -> Option<bool> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, content(FILE_BYTES)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let resident = || {
        let stat = Command::new(env!("CARGO_BIN_EXE_quinion")).args(["stat", "--json"]).arg(&path).output();
        String::from_utf8(stat.unwrap().stdout).unwrap()
    };
    if !resident().contains("\"resident\":0.0000") {
        return None;
    }
    run(command(case, &path, 1));
    Some(resident().contains("\"resident\":1.0000"))
}

/// 1. A program reads a file with hints of its own.
/// 2. Its reads are served.
/// 3. Each hint makes the kernel read the same bytes into its page cache, from which nobody reads them.
#[test]
fn hints_of_a_served_file_do_not_fill_the_kernels_cache() {
    let alone = is_filled_by("hints", |command| drop(output(command)));
    let served = is_filled_by("hints", |mut command| {
        let session = Session::start(owner(Room::Cache)).unwrap();
        session.point_to(&mut command);
        output(command);
        assert!(session.stop().reads > 0);
    });
    // A kernel that lets go of its pages once need not do so the next time.
    let (Some(alone), Some(served)) = (alone, served) else { return };
    assert_eq!((alone, served), (true, false));
}

#[test]
fn a_file_that_was_written_here_is_never_served() {
    assert_eq!(same_with_and_without("sparse", 1, Room::Cache).reads, 0);
}

#[test]
fn random_calls_in_random_order() {
    for seed in 0..60 {
        let room = if seed % 2 == 0 { Room::FewPages } else { Room::Cache };
        let way = if seed % 4 < 2 { Way::Names } else { Way::Patched };
        let totals = same_in_a_way("random", seed, room, way);
        assert!(totals.reads > 0);
    }
}

#[test]
fn what_is_left_to_the_kernel_is_counted_with_its_reason() {
    use quinion::arena::control::Reason;
    let cases = [
        ("dup", Reason::Duplicated),
        ("fork", Reason::Forked),
        ("mapped", Reason::Mapped),
        ("sendfile", Reason::Passed),
        ("locks", Reason::Locked),
        ("write", Reason::Writable),
        ("errors", Reason::NotRegular),
        ("reuse", Reason::Foreign),
    ];
    for (case, reason) in cases {
        let totals = same_with_and_without(case, 1, Room::Cache);
        assert!(totals.reasons[reason as usize] > 0, "{case}: no {reason:?} in {totals:?}");
    }
}
