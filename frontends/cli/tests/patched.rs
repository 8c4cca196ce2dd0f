//! Patched: reads inside the C library are served, too, and where it cannot be patched nothing is lost.
//!
//! ```text
//!   programs/patched.c CASE   --alone----------------------> its output
//!                             --names alone----------------> the same; what of it could be served
//!                             --C library patched----------> the same; all of it served
//!                             --patched, but not possible--> the same, as by names alone; counted why
//! ```
//!
//! The rules of `rules.rs` run in both ways there. Here is what only patching makes different.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use quinion::Cache;
use quinion::internals::arena::control::Patching;
use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::ViewerTotals;
use quinion_run::elf::Elf;
use quinion_run::plan::{PatchRefused, Plan, library_of};
use quinion_run::{LINKER, PRELOAD, Session, plan_for};

const FILE_BYTES: usize = 300_123;

struct Built {
    folder: tempfile::TempDir,
}

impl Built {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = Built { folder: tempfile::tempdir().unwrap() };
        let library: &[&str] = &["-shared", "-fPIC"];
        for (name, source, options) in [
            ("patched", "patched.c", &[][..]),
            ("library.so", "library.c", library),
            ("wraps.so", "library.c", &["-shared", "-fPIC", "-DWRAPS"]),
            ("threads.so", "library.c", &["-shared", "-fPIC", "-DTHREADS"]),
        ] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
            let mut compiler = Command::new("cc");
            compiler
                .args(["-O2", "-w", "-pthread"])
                .args(options)
                .arg("-o")
                .arg(built.path(name))
                .arg(source);
            assert!(compiler.status().expect("a C compiler named cc").success());
        }
        built
    })
}

/// Lines of text without any repeated part.
fn content() -> Vec<u8> {
    let mut text = String::new();
    let mut state = 88172645463325252u64;
    while text.len() < FILE_BYTES {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        text.push_str(&format!("{:x} {}\n", state, "-".repeat((state >> 60) as usize * 5)));
    }
    text.truncate(FILE_BYTES);
    text.into_bytes()
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, content()).unwrap();
    (folder, path)
}

fn output(words: &[&str], file: &Path, session: Option<&Session>, preload: Option<&str>) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(file.file_name().unwrap()).current_dir(file.parent().unwrap());
    command.arg(built().path("library.so")).stdin(std::process::Stdio::null());
    if let Some(session) = session {
        session.point_to(&mut command);
        if let Some(name) = preload {
            let ours =
                command.get_envs().find(|(name, _)| *name == "LD_PRELOAD").unwrap().1.unwrap().to_owned();
            let both = format!("{}:{}", ours.to_str().unwrap(), built().path(name).display());
            command.env("LD_PRELOAD", both);
        }
    }
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn same(words: &[&str], plan: Option<&Plan>, preload: Option<&str>) -> ViewerTotals {
    let (_one, without) = file();
    let expected = output(words, &without, None, None);
    let (_other, with) = file();
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let mut session = Session::start(Arc::new(CacheOwner::new(cache))).unwrap();
    if let Some(plan) = plan {
        session.patch_by(&plan.bytes()).unwrap();
    }
    assert_eq!(
        output(words, &with, Some(&session), preload),
        expected,
        "{words:?} (right: without the cache)"
    );
    assert_eq!(
        std::fs::read(&with).unwrap(),
        std::fs::read(&without).unwrap(),
        "{words:?} wrote something else"
    );
    let totals = session.stop();
    assert!(totals.viewers > 0, "{words:?} did not attach");
    totals
}

fn case(name: &str, plan: Option<&Plan>) -> ViewerTotals {
    same(&[built().path("patched").to_str().unwrap(), name], plan, None)
}

fn plan() -> &'static Plan {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    PLAN.get_or_init(|| plan_for(Path::new(LINKER)).unwrap())
}

fn outcome(totals: &ViewerTotals, outcome: Patching) -> u64 {
    totals.patching[outcome as usize]
}

/// The case prints the same by names alone and patched; and patched at least `bytes` of it came from the cache.
#[track_caller]
fn served_when_patched(name: &str, bytes: usize) {
    let by_names = case(name, None);
    assert_eq!(outcome(&by_names, Patching::NoPlan), by_names.viewers);
    let patched = case(name, Some(plan()));
    assert_eq!(outcome(&patched, Patching::Patched), patched.viewers);
    assert!(patched.bytes >= bytes as u64, "{name}: {patched:?}");
    assert!(by_names.bytes < patched.bytes, "{name}: {by_names:?} {patched:?}");
}

#[test]
fn streams_are_served() {
    served_when_patched("streams", 6 * FILE_BYTES);
}

#[test]
fn bytes_written_by_one_stream_are_read_by_another() {
    let patched = case("written", Some(plan()));
    assert_eq!(outcome(&patched, Patching::Patched), 1);
    case("written", None);
}

/// 1. A writable stream reads; the kernel keeps its descriptor's offset.
/// 2. The stream is closed with unwritten bytes.
/// 3. These are written at the stream's position, relative to the descriptor's offset, which has to be right.
#[test]
fn bytes_that_a_stream_writes_at_its_close_go_to_its_offset() {
    let patched = case("updated", Some(plan()));
    assert!(patched.files == 0 && patched.kernel_reads > 0, "{patched:?}");
    assert!(patched.reads == 0 && outcome(&patched, Patching::Patched) == 1, "{patched:?}");
    case("updated", None);
}

#[test]
fn posix_aio_is_served() {
    served_when_patched("aio", FILE_BYTES);
}

#[test]
fn a_library_bound_to_the_c_library_itself_is_served() {
    served_when_patched("deepbind", FILE_BYTES);
}

/// If calls are intercepted by name alone, the result is wrong, which cannot be helped.
#[test]
fn calls_of_such_a_library_on_our_descriptors_are_seen() {
    let patched = case("unseen", Some(plan()));
    assert!(patched.bytes > 0 && outcome(&patched, Patching::Patched) == 1, "{patched:?}");
}

#[test]
fn no_page_is_writable_and_executable_afterwards() {
    served_when_patched("maps", FILE_BYTES);
    let (_folder, file) = file();
    let printed = output(&[built().path("patched").to_str().unwrap(), "maps"], &file, None, None);
    assert!(printed.starts_with("writable and executable 0 "), "{printed}");
}

#[test]
fn a_thread_that_waits_in_a_patched_read_can_be_cancelled() {
    served_when_patched("cancelled", FILE_BYTES);
}

#[test]
fn children_that_are_made_without_clone3_do_not_end_it() {
    served_when_patched("filtered", 3 * FILE_BYTES);
}

/// Common programs that read through streams.
#[test]
fn sha256sum_and_sort_are_served() {
    for words in [&["sha256sum"][..], &["sort"], &["cut", "-c", "1-8"], &["sed", "-n", "1000p"]] {
        let run = |plan: Option<&Plan>| {
            let (_folder, path) = file();
            let read = |session: Option<&Session>| {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]).arg("file").current_dir(path.parent().unwrap()).env("LC_ALL", "C");
                if let Some(session) = session {
                    session.point_to(&mut command);
                }
                let output = command.output().unwrap();
                assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
                output.stdout
            };
            let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
            let mut session = Session::start(Arc::new(CacheOwner::new(cache))).unwrap();
            if let Some(plan) = plan {
                session.patch_by(&plan.bytes()).unwrap();
            }
            assert!(read(Some(&session)) == read(None), "{words:?} prints something else");
            session.stop()
        };
        assert_eq!(run(None).bytes, 0, "{words:?} reads through streams");
        let patched = run(Some(plan()));
        assert!(patched.bytes >= FILE_BYTES as u64, "{words:?}: {patched:?}");
    }
}

/// Before version 2.34 of the C library, `dlsym` was in a library that few programs load. Then no program has
/// it, and the object finds the functions by itself.
#[test]
fn programs_without_dlsym_are_served_and_patched() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    std::fs::copy(LINKER, place("linker")).unwrap();
    let mut library = std::fs::read(library_of(Path::new(LINKER)).unwrap()).unwrap();
    let names = library.windows(7).enumerate().filter(|(_, bytes)| bytes == b"\0dlsym\0");
    let names: Vec<usize> = names.map(|(at, _)| at).collect();
    assert_eq!(names.len(), 1, "the C library has the name once");
    library[names[0] + 1] = b'x';
    std::fs::write(place("libc.so.6"), library).unwrap();
    let (linker, program) = (place("linker"), built().path("patched"));
    let words = [&linker, Path::new("--library-path"), folder.path(), &program, Path::new("streams")];
    let words = words.map(|word| word.to_str().unwrap());
    for (plan, expected) in [(None, Patching::NoPlan), (Some(plan()), Patching::Patched)] {
        let totals = same(&words, plan, None);
        assert_eq!(outcome(&totals, expected), totals.viewers, "{totals:?}");
        assert_eq!(totals.bytes >= 6 * FILE_BYTES as u64, plan.is_some(), "{totals:?}");
    }
}

/// A library that was loaded only as another one's dependency has a function that the object interposes, and its
/// `dlsym` does not see it: liburing under a plug-in. The call has to reach that function.
#[test]
fn functions_of_a_plug_ins_dependency_are_called() {
    let folder = tempfile::tempdir().unwrap();
    let build = |name: &str, source: &str, more: &[&str]| {
        let path = folder.path().join(name);
        std::fs::write(path.with_extension("c"), source).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-w", "-o"]).arg(&path).arg(path.with_extension("c"));
        compiler.args(more).arg(format!("-L{0}", folder.path().display()));
        assert!(compiler.status().expect("a C compiler named cc").success(), "{compiler:?}");
        path
    };
    let library = ["-shared", "-fPIC"];
    build(
        "libring.so",
        "int io_uring_queue_init(unsigned n, void *ring, unsigned flags) { return n + 35; }",
        &library,
    );
    let plug_in = "int io_uring_queue_init(unsigned, void *, unsigned); \
                   int start(void) { return io_uring_queue_init(7, 0, 0); }";
    build("plugin.so", plug_in, &["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-lring"]);
    let program = "#include <dlfcn.h>\n#include <stdio.h>\n\
                   int main(int n, char **words) { \
                       int (*start)(void) = dlsym(dlopen(words[1], RTLD_NOW), \"start\"); \
                       printf(\"%d\\n\", start()); \
                   }";
    let program = build("program", program, &[]);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let session = Session::start(Arc::new(CacheOwner::new(cache))).unwrap();
    let mut command = Command::new(program);
    session.point_to(command.arg(folder.path().join("plugin.so")));
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{output:?}");
    assert_eq!(session.stop().viewers, 1);
}

// ---- where it is not possible ---------------------------------------------------------------------------------

/// The machine's C library, its bytes changed by `change`, which gets the file offset of each function.
fn changed(change: impl FnOnce(&mut [u8], &dyn Fn(&str) -> usize)) -> Elf {
    let path = library_of(Path::new(LINKER)).unwrap();
    let library = Elf::open(&path).unwrap();
    let place = |name: &str| {
        let address = library.symbols().iter().find(|s| s.name == name && s.is_defined).unwrap().address;
        let code = library.segments().iter().find(|segment| segment.is_code).unwrap();
        code.range.start + (address - code.address) as usize
    };
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes, &place);
    Elf::parse(bytes).unwrap()
}

fn plan_of(library: &Elf) -> Plan {
    Plan::make(library, &Elf::parse(PRELOAD.to_vec()).unwrap()).unwrap()
}

#[test]
fn a_plan_for_another_library_does_nothing() {
    let id = Elf::open(&library_of(Path::new(LINKER)).unwrap()).unwrap().build_id().unwrap();
    let library = changed(|bytes, _| {
        let at = bytes.windows(id.len()).position(|window| window == id).unwrap();
        bytes[at] ^= 1;
    });
    let totals = case("streams", Some(&plan_of(&library)));
    assert_eq!(outcome(&totals, Patching::OtherLibrary), totals.viewers);
    assert_eq!(totals.bytes, 0, "names lead some calls to us, so the offsets are the kernel's");
}

/// The plan is for a library with the same build number, but other bytes.
#[test]
fn a_plan_whose_bytes_are_not_there_does_nothing() {
    let library = changed(|bytes, place| {
        let at = place("readahead"); // mov $187, %eax
        assert_eq!(bytes[at], 0xb8);
        bytes[at + 1] ^= 1;
    });
    let totals = case("streams", Some(&plan_of(&library)));
    assert_eq!(outcome(&totals, Patching::OtherLibrary), totals.viewers);
}

#[test]
fn a_function_that_cannot_be_patched_is_reached_by_its_name() {
    let library = changed(|bytes, place| bytes[place("readahead")] = 0xe8); // a call
    let plan = plan_of(&library);
    assert_eq!(
        plan.left.iter().map(|left| (&*left.name, left.why)).collect::<Vec<_>>(),
        [("readahead", PatchRefused::Unmovable)]
    );
    let totals = case("streams", Some(&plan));
    assert_eq!(outcome(&totals, Patching::Patched), totals.viewers);
    assert!(totals.bytes >= 6 * FILE_BYTES as u64);
}

#[test]
fn a_process_that_has_threads_is_not_patched() {
    let program = built().path("patched");
    let totals = same(&[program.to_str().unwrap(), "streams"], Some(plan()), Some("threads.so"));
    assert!(outcome(&totals, Patching::Threads) > 0, "{totals:?}");
}

#[test]
fn a_function_that_another_object_wraps_is_left_to_that_object() {
    let program = built().path("patched");
    let totals = same(&[program.to_str().unwrap(), "streams"], Some(plan()), Some("wraps.so"));
    assert!(outcome(&totals, Patching::Interposed) > 0, "{totals:?}");
}
