//! `quinion doctor` predicts correctly what `run` does.
//!
//! Each kind of program is made here and examined, and where `run` can start it, the prediction is compared with what
//! `run` then does.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn quinion(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quinion")).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn asked(program: &Path) -> (String, i32) {
    let folder = tempfile::tempdir().unwrap();
    let output = quinion(&[
        "doctor",
        "--json",
        "--folder",
        folder.path().to_str().unwrap(),
        program.to_str().unwrap(),
    ]);
    assert!(output.stderr.is_empty(), "{output:?}");
    let said = text(&output.stdout);
    assert!(
        said.starts_with("{\"schema\":1,\"machine\":{") && said.ends_with("}\n") && said.lines().count() == 1,
        "{said}"
    );
    (said, output.status.code().unwrap())
}

fn is_run_served(program: &Path, arguments: &[&str]) -> bool {
    let words = [
        "run",
        "--attach",
        "at-once",
        "--memory",
        "16M",
        "--report",
        "json",
        "--",
        program.to_str().unwrap(),
    ];
    let output = quinion(&[&words, arguments].concat());
    let report = text(&output.stderr);
    assert!(report.contains("\"processes\":"), "{report}");
    !report.contains("nothing was served: ")
}

fn executable(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn compile(source: &str, to: &Path, words: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let mut command = Command::new("cc");
    command.args(["-O2", "-w", "-pthread", "-o"]).arg(to).arg(&source).args(words);
    assert!(command.status().expect("a C compiler named cc").success(), "{command:?}");
}

fn cat() -> PathBuf {
    PathBuf::from("/bin/cat")
}

#[test]
fn the_machine_is_described_in_words_and_in_json() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let output = quinion(&["doctor", "--json", "--folder", folder]);
    let said = text(&output.stdout);
    assert!(said.starts_with("{\"schema\":1,\"machine\":{"), "{said}");
    for key in [
        "kernel",
        "io_uring",
        "huge_pages_shared",
        "memlock_bytes",
        "memory_bytes",
        "ptrace_scope",
        "userfaultfd",
        "kvm",
        "folders",
        "file_system",
        "direct",
        "lease",
        "cachestat",
        "uncached_reads",
    ] {
        assert!(said.contains(&format!("\"{key}\":")), "{key} is missing in {said}");
    }
    assert!(!said.contains("\"program\":"), "{said}");
    let output = quinion(&["doctor", "--folder", folder]);
    assert!(text(&output.stdout).lines().count() > 10 && output.status.success(), "{output:?}");
    assert!(!text(&output.stdout).contains("schema"), "that is for programs: {output:?}");
}

/// Only root can give up the right; any other user is without it.
#[test]
fn a_user_without_leases_on_files_of_others_is_told() {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-lease", env!("CARGO_BIN_EXE_quinion"), "doctor", "cat"]);
    match command.output() {
        Ok(output) if output.status.success() => {
            let said = text(&output.stdout);
            assert!(
                said.contains("files of other users: the kernel gives a lease to a file's owner"),
                "{said}"
            );
            assert!(said.contains("no (a lease needs the file's owner, or CAP_LEASE)"), "{said}");
        }
        other => println!("SKIPPED: the right could not be given up: {other:?}"),
    }
}

#[test]
fn a_folder_that_is_none_is_an_error_and_one_that_refuses_a_trial_is_a_finding() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let none = folder.path().join("none");
    for (wrong, what) in [(&file, "name the folder that it lies in"), (&none, "name a folder that is there")]
    {
        let output = quinion(&["doctor", "--json", "--folder", "/tmp", "--folder", wrong.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(what) && said.contains(wrong.to_str().unwrap()), "{said}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
    let output = quinion(&["doctor", "--json", "--folder", "/proc"]);
    assert!(
        output.status.success() && text(&output.stdout).contains("no file could be made there"),
        "{output:?}"
    );
}

#[test]
fn a_plain_program_is_served() {
    let (said, code) = asked(Path::new("cat"));
    assert_eq!(code, 0, "{said}");
    for part in ["\"served\":true", "\"c_library_version\":\"2.", "libc.so.6", "dynamically"] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    assert!(!said.contains("system_calls_of_its_own"), "{said}");
    assert!(is_run_served(&cat(), &["/bin/sh"]));
}

#[test]
fn a_script_is_described_by_the_program_that_runs_it() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    executable(&script, b"#!/bin/cat\n");
    let (said, code) = asked(&script);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("\"interpreters\":[\"/bin/cat\"]"), "{said}");
}

#[test]
fn a_static_program_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("static");
    compile("static.c", &program, &["-static"]);
    let (said, code) = asked(&program);
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("\"linked\":\"statically\"") && said.contains("\"served\":false"), "{said}");
    assert!(!is_run_served(&program, &["/etc/passwd"]));
}

#[test]
fn a_program_of_another_machine_or_library_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(cat()).unwrap();
    let linker = b"/lib64/ld-linux-x86-64.so.2\0";
    let at = bytes.windows(linker.len()).position(|part| part == linker).expect("the linker's name");
    let musl = folder.path().join("musl");
    let mut changed = bytes.clone();
    changed[at..at + linker.len()].copy_from_slice(b"/lib/ld-musl-x86_64.so.1\0\0\0\0");
    executable(&musl, &changed);
    let (said, code) = asked(&musl);
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("ld-musl-x86_64") && said.contains("GNU C library: use a build"), "{said}");
    bytes[18] = 183;
    let arm = folder.path().join("arm");
    executable(&arm, &bytes);
    let (said, code) = asked(&arm);
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("another machine"), "{said}");
}

#[test]
fn a_program_that_changes_its_rights_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("cat");
    executable(&program, &std::fs::read(cat()).unwrap());
    let other = rustix::fs::Uid::from_raw(12345);
    if rustix::fs::chown(&program, Some(other), None).is_err() {
        return println!("SKIPPED: this user may not give files away");
    }
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (said, code) = asked(&program);
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("set-uid") && said.contains("\"served\":false"), "{said}");
}

#[test]
fn a_program_that_enters_the_kernel_by_itself_is_served_with_care() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("hostile");
    compile("hostile.c", &program, &[]);
    let (said, code) = asked(&program);
    assert_eq!(code, 0, "{said}");
    for part in
        ["\"system_calls_of_its_own\":[{", "\"unknown_calls\":1", "\"harmless\":false", "each after a check"]
    {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
}

#[test]
fn fio_is_served_as_any_other() {
    let fio = Path::new("/usr/bin/fio");
    if !fio.exists() {
        return println!("SKIPPED: fio is not installed");
    }
    let (said, code) = asked(fio);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("\"calls\":[\"io_uring_enter\"],\"unknown_calls\":0,\"harmless\":true"), "{said}");
    assert!(!said.contains("each after a check"), "{said}");
}

#[test]
fn a_script_run_by_env_is_described_by_the_program_that_env_runs() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    executable(&script, b"#!/usr/bin/env cat\n");
    let (said, code) = asked(&script);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("\"interpreters\":[\"/usr/bin/env\",\"/") && said.contains("/cat\"]"), "{said}");
}

/// A shim reads nothing by itself; the program that it executes does.
#[test]
fn a_script_that_becomes_a_program_is_described_by_that_program() {
    let folder = tempfile::tempdir().unwrap();
    let [inner, outer] = ["inner", "outer"].map(|name| folder.path().join(name));
    executable(&inner, format!("#!/bin/sh\nexec {} \"$@\"\n", cat().display()).as_bytes());
    executable(&outer, format!("#!/bin/sh\nset -e\nexec {} \"$@\"\n", inner.display()).as_bytes());
    let (said, code) = asked(&outer);
    assert_eq!(code, 0);
    let cat = cat().canonicalize().unwrap();
    assert!(said.contains(&format!("/{}\"]", cat.file_name().unwrap().to_str().unwrap())), "{said}");
    executable(&outer, b"#!/bin/sh\nprogram=cat\nexec \"$program\" \"$@\"\n");
    // Which program that is, is not known: what is known of the shell is no verdict on it.
    let (said, code) = asked(&outer);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("run `quinion doctor` on that program"), "{said}");
    assert!(said.contains("\"verdict\":{\"served\":null,\"will_serve\":[],\"will_not_serve\":[]"), "{said}");
    let output = quinion(&["doctor", outer.to_str().unwrap()]);
    assert!(
        text(&output.stdout).starts_with("what run does with it\n"),
        "the verdict comes first: {output:?}"
    );
}

#[test]
fn a_program_that_cannot_be_run_is_an_error_that_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let [cut, junk, lost] = ["cut", "junk", "lost"].map(|name| folder.path().join(name));
    executable(&cut, &std::fs::read(cat()).unwrap()[..100]);
    executable(&junk, b"echo no script says what runs it\n");
    executable(&lost, b"#!/no/such/interpreter\n");
    for (path, wrong) in [
        (Path::new("no-such-program-anywhere"), "`no-such-program-anywhere` cannot be run: "),
        (Path::new("no-such-program-anywhere"), "check the name"),
        (Path::new(""), "`` cannot be run: there is no such program; its name is empty"),
        (Path::new("/etc/passwd"), "may not be executed"),
        (folder.path(), "it is a folder; name a program in it"),
        (&cut, "is cut short"),
        (&junk, "neither a script nor"),
        (&lost, "its interpreter /no/such/interpreter is missing"),
    ] {
        let output = quinion(&["doctor", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(wrong), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}
