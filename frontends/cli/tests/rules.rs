//! Never wrong: a program that uses descriptors in common ways prints the same with the cache and without it. The
//! program is `programs/rules.c`.
//!
//! ```text
//!   programs/rules.c RULE --alone-----------> its output, and how it ended
//!                         --under `run`-----> the same, byte for byte
//! ```
//!
//! Each rule is a test of its own name, and most run four times: with a naive owner that has room for 6 pages, where
//! nearly every read waits and evicts, and with the cache itself, where nearly every read is a hit; each by names
//! alone, and with the C library patched. All run again with an owner that leaves each file to the kernel at first, so
//! that files are taken over in the middle of the run. A rule about reads that must not be served also checks the
//! numbers of the session.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use quinion::Cache;
use quinion::internals::arena::control::{Advice, AttachPolicy, Patching};
use quinion::internals::units::{FileId, Frame, PageIndex};
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::{AttachReason, Attached, Caching, Owner, ViewerTotals, WriterAccess};
use quinion_owner::internals::viewer::sys::Errno;
use quinion_run::plan::Plan;
use quinion_run::{LINKER, Session, plan_for};

use quinion_testing::naive_owner::NaiveOwner;

const FILE_BYTES: usize = 300_123;

struct Rules {
    _folder: tempfile::TempDir,
    program: PathBuf,
}

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

#[derive(Clone, Copy)]
enum OwnerKind {
    /// A naive owner with room for a few pages: nearly every read waits for it and evicts.
    FewPages,
    /// The cache itself, in which everything fits: nearly every read is a hit.
    Cache,
    /// The cache, with an owner that leaves each file to the kernel for some reads, twice.
    Hesitant,
}

/// A cache whose owner declines each file once.
#[derive(Debug)]
struct Hesitant {
    owner: CacheOwner,
    asked: std::sync::Mutex<std::collections::HashSet<FileId>>,
}

impl Owner for Hesitant {
    fn attach_policy(&self) -> AttachPolicy {
        AttachPolicy { large_bytes: u64::MAX, credit_bytes: 9_000, ..AttachPolicy::default() }
    }
    fn leaves_to_kernel(&self, _: BorrowedFd<'_>, id: FileId, reason: AttachReason) -> Option<u64> {
        let is_new = self.asked.lock().unwrap().insert(id);
        assert!(!is_new || reason == AttachReason::Read, "credit was spent that was not given");
        is_new.then_some(7_000)
    }
    fn arena(&self) -> quinion::internals::arena::ArenaShare<'_> {
        self.owner.arena()
    }
    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno> {
        self.owner.attach(file, id)
    }
    fn leases_valid_for(&self) -> std::time::Duration {
        self.owner.leases_valid_for()
    }
    fn writer_opened(&self, id: FileId, access: WriterAccess) {
        self.owner.writer_opened(id, access);
    }
    fn revoke(&self, id: FileId) {
        self.owner.revoke(id);
    }
    fn fill(&self, handle: u64, position: u64, len: u64, caching: Caching) -> Result<(), Errno> {
        self.owner.fill(handle, position, len, caching)
    }
    fn advance(&self, handle: u64, page: PageIndex, caching: Caching) {
        self.owner.advance(handle, page, caching);
    }
    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        self.owner.advise(handle, advice, position, len)
    }
    fn revalidate(&self, handle: u64) -> Result<u64, Errno> {
        self.owner.revalidate(handle)
    }
    fn detach(&self, handle: u64) {
        self.owner.detach(handle);
    }
    fn touched(&self, frame: Frame) {
        self.owner.touched(frame);
    }
}

fn cache_owner() -> CacheOwner {
    CacheOwner::new(Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap())
}

fn owner(owner_kind: OwnerKind) -> Arc<dyn Owner> {
    match owner_kind {
        OwnerKind::FewPages => NaiveOwner::minding_writers(6),
        OwnerKind::Cache => Arc::new(cache_owner()),
        OwnerKind::Hesitant => Arc::new(Hesitant { owner: cache_owner(), asked: Default::default() }),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Names,
    Patched,
}

fn session(owner_kind: OwnerKind, way: Way) -> Session {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    let mut session = Session::start(owner(owner_kind)).unwrap();
    if way == Way::Patched {
        session.patch_by(&PLAN.get_or_init(|| plan_for(Path::new(LINKER)).unwrap()).bytes()).unwrap();
    }
    session
}

fn same_with_and_without(case: &str, seed: u32, owner_kind: OwnerKind) -> ViewerTotals {
    same_in_a_way(case, seed, owner_kind, Way::Names)
}

fn same_in_a_way(case: &str, seed: u32, owner_kind: OwnerKind, way: Way) -> ViewerTotals {
    let folder = tempfile::tempdir().unwrap();
    let [with, without] = ["with", "without"].map(|name| folder.path().join(name));
    for file in [&with, &without] {
        std::fs::write(file, content(FILE_BYTES)).unwrap();
    }
    let expected = output(command(case, &without, seed));
    let session = session(owner_kind, way);
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
            for owner_kind in [OwnerKind::FewPages, OwnerKind::Cache] {
                for way in [Way::Names, Way::Patched] {
                    let totals = same_in_a_way(stringify!($name), 1, owner_kind, way);
                    assert!(totals.reads > 0, "nothing was served: {totals:?}");
                }
            }
            // A case with few calls may end before the file is taken over.
            same_in_a_way(stringify!($name), 1, OwnerKind::Hesitant, Way::Patched);
        }
    )* };
}

rules! {
    read pread dup fork forkread vfork spawn exec fdopen sendfile write stream truncate truncate_only append grow
    hints vectors seek reuse signals threads cancel errors passed mapped locks syscall temporary children
    positioned unshared adopted forked_viewer fork_among_threads crowd scrubbed vfork_writes_nothing flags read_flags
    advice close_elsewhere longjmp threads_end_mid_read cancel_anywhere cancel_disabled close_cancelled confined aio
    closed_by_stream exec_amid_opens
}

/// 1. A descriptor is duplicated by `dup`, `dup2` and `fcntl`, and sent to itself through a socket.
/// 2. Of each of the five, positional reads are served, and reads at the shared offset are not.
#[test]
fn an_offset_that_is_shared_costs_only_the_reads_that_use_it() {
    let totals = same_with_and_without("positioned", 1, OwnerKind::Cache);
    let (positioned, at_the_offset) = (5 * 3 * 20, 5 * 3);
    assert!(totals.reads >= positioned, "{totals:?}");
    assert!(totals.kernel_reads >= at_the_offset, "{totals:?}");
    let totals = same_with_and_without("unshared", 1, OwnerKind::Cache);
    assert!(totals.reads >= 100, "{totals:?}");
}

/// 1. A program's `exec` calls fail, while no other thread opens anything.
/// 2. Files that it opens afterwards are served at their offset.
#[test]
fn an_exec_that_failed_is_over() {
    let totals = same_with_and_without("exec_amid_opens", 1, OwnerKind::Cache);
    assert!(totals.reads >= 300, "{totals:?}");
}

/// A program that inherits a descriptor as its standard input reads it: positional reads are served.
#[test]
fn an_inherited_descriptor_is_adopted() {
    use quinion::internals::arena::control::Reason;
    let totals = same_with_and_without("adopted", 1, OwnerKind::Cache);
    assert!(totals.reads >= 200, "{totals:?}");
    assert!(totals.reasons[Reason::Foreign as usize] > 0, "{totals:?}");
    assert_eq!(same_with_and_without("inherited_writer", 1, OwnerKind::Cache).reads, 0);
}

/// 1. A process forks, and its child forks twice more. Each reads the file by a descriptor of its own, and by the one
///    that it inherited.
/// 2. Each is a viewer, and nearly all of its reads are hits.
#[test]
fn a_forked_child_is_a_viewer_whose_reads_are_hits() {
    let totals = same_with_and_without("forked_viewer", 1, OwnerKind::Cache);
    assert_eq!(totals.viewers, 4, "{totals:?}");
    // Each child makes 74 reads to the end, 50 more and 100 positional ones; the first 50 of each are by the inherited
    // descriptor.
    assert!(totals.reads >= 4 * 170, "{totals:?}");
    assert!(totals.asked * 4 < totals.reads, "{totals:?}");
}

/// A program's hints, before its file is attached and after, reach the owner.
#[test]
fn hints_arrive_at_the_owner() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, content(FILE_BYTES)).unwrap();
    let owner = NaiveOwner::minding_writers(100);
    let session = Session::start(owner.clone()).unwrap();
    let mut advice = command("advice", &file, 1);
    session.point_to(&mut advice);
    output(advice);
    session.stop();
    const ALL: u64 = (1 << 56) - 1;
    // Messages that are sent without waiting may overtake each other.
    let sorted = |mut hints: Vec<(Advice, u64, u64)>| {
        hints.sort_unstable_by_key(|&(advice, position, len)| (advice as u64, position, len));
        hints
    };
    let expected = [
        (Advice::Normal, 0, ALL), // it announced random reads
        (Advice::Sequential, 0, ALL),
        (Advice::WillNeed, 4096, 8192),
        (Advice::WillNeed, 100_000, 50_000),
        (Advice::NoReuse, 0, 100),
        (Advice::DontNeed, 4096, 4096),
        (Advice::Normal, 0, ALL),
    ];
    assert_eq!(sorted(owner.hints.lock().unwrap().clone()), sorted(expected.to_vec()));
}

/// Whether the kernel has every page of `file` cached; `None` if the kernel cannot drop its pages first.
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
/// 3. Each hint makes the kernel read the same bytes into its own page cache, where they are never used.
#[test]
fn hints_of_a_served_file_do_not_fill_the_kernels_cache() {
    let alone = is_filled_by("hints", |command| drop(output(command)));
    let served = is_filled_by("hints", |mut command| {
        let session = Session::start(owner(OwnerKind::Cache)).unwrap();
        session.point_to(&mut command);
        output(command);
        assert!(session.stop().reads > 0);
    });
    // A kernel that drops its pages once need not do so the next time.
    let (Some(alone), Some(served)) = (alone, served) else { return };
    assert_eq!((alone, served), (true, false));
}

#[test]
fn a_file_that_was_written_here_is_never_served() {
    assert_eq!(same_with_and_without("sparse", 1, OwnerKind::Cache).reads, 0);
}

/// 1. A program reads a file in many calls, at its offset and elsewhere, by one thread and by several.
/// 2. The kernel serves the first reads, the cache the rest, and all bytes are right.
#[test]
fn descriptors_change_hands_while_they_are_read() {
    use quinion::internals::arena::control::Reason;
    for case in ["read", "pread", "vectors", "seek", "threads"] {
        let totals = same_with_and_without(case, 1, OwnerKind::Hesitant);
        let left = totals.reasons[Reason::Left as usize];
        assert!(totals.kernel_reads > 0 && totals.reads > 0 && left > 0, "{case}: {totals:?}");
    }
    for seed in 100..130 {
        same_with_and_without("random", seed, OwnerKind::Hesitant);
    }
}

#[test]
fn random_calls_in_random_order() {
    for seed in 0..60 {
        let owner_kind = if seed % 2 == 0 { OwnerKind::FewPages } else { OwnerKind::Cache };
        let way = if seed % 4 < 2 { Way::Names } else { Way::Patched };
        let totals = same_in_a_way("random", seed, owner_kind, way);
        assert!(totals.reads > 0);
    }
}

#[test]
fn reads_left_to_the_kernel_are_counted_with_their_reason() {
    use quinion::internals::arena::control::Reason;
    let cases = [
        ("dup", Reason::Duplicated),
        ("fork", Reason::Forked),
        ("mapped", Reason::Mapped),
        ("sendfile", Reason::Passed),
        ("write", Reason::Writable),
        ("errors", Reason::NotRegular),
        ("adopted", Reason::Foreign),
    ];
    for (case, reason) in cases {
        let totals = same_with_and_without(case, 1, OwnerKind::Cache);
        assert!(totals.reasons[reason as usize] > 0, "{case}: no {reason:?} in {totals:?}");
    }
}
