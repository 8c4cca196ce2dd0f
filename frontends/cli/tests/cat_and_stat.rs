//! `quinion cat` and `quinion stat` as a user types them, on files of known content.
//!
//! Standard output is compared byte by byte; standard error must name the file and, where there is one, the remedy.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written"))
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    /// A file of `bytes` bytes in which every position can be told from its neighbours.
    fn file(&self, name: &str, bytes: usize) -> (PathBuf, Vec<u8>) {
        let content: Vec<u8> = (0..bytes).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
        fs::write(self.path(name), &content).expect("room for a small file");
        (self.path(name), content)
    }
}

fn quinion(words: &[&str], files: &[&Path]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
    command.args(words).args(files).stdin(Stdio::null());
    command
}

fn output(words: &[&str], files: &[&Path]) -> Output {
    quinion(words, files).output().expect("our own command starts")
}

#[track_caller]
fn assert_complains(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in: {said}");
    }
}

#[test]
fn cat_gives_the_bytes_of_every_size_of_file() {
    let files = Files::new();
    for bytes in [0, 1, 4095, 4096, 4097, 65_536, (1 << 20) - 1, 1 << 20, (3 << 20) + 17] {
        let (path, content) = files.file("content", bytes);
        let output = output(&["cat"], &[&path]);
        assert!(output.stdout == content, "{bytes} bytes came out as {}", output.stdout.len());
        assert_complains(&output, 0, &[]);
        assert!(output.stderr.is_empty(), "nothing is said in a pipe");
    }
}

#[test]
fn cat_of_more_than_the_memory_is_complete() {
    let files = Files::new();
    let (path, content) = files.file("large", 160 << 20);
    let output = output(&["cat", "--memory", "64M"], &[&path]);
    assert!(output.stdout == content);
}

#[test]
fn cat_uncached_gives_the_same_bytes() {
    let files = Files::new();
    let (path, mut content) = files.file("large", 40 << 20);
    content.extend_from_within(..);
    let output = output(&["cat", "--uncached", "--memory", "16M"], &[&path, &path]);
    assert!(output.stdout == content);
    assert_complains(&output, 0, &[]);
}

#[test]
fn cat_joins_files_in_their_order() {
    let files = Files::new();
    let ((a, mut joined), (b, second)) = (files.file("a", 5000), files.file("b", 70_001));
    joined.extend(second);
    joined.extend_from_within(..5000);
    assert!(output(&["cat"], &[&a, &b, &a]).stdout == joined);
}

#[test]
fn cat_names_files_it_cannot_read_and_goes_on() {
    let files = Files::new();
    let ((a, mut joined), (b, second)) = (files.file("a", 100), files.file("b", 200));
    joined.extend(second);
    let output = output(&["cat"], &[&a, &files.path("missing"), files.0.path(), Path::new("-"), &b]);
    assert!(output.stdout == joined);
    assert_complains(&output, 1, &["missing", "No such file", "`-`", "./-"]);
}

#[test]
fn cat_ends_quietly_when_its_reader_closes() {
    let files = Files::new();
    let (path, content) = files.file("large", 8 << 20);
    let mut child =
        quinion(&["cat"], &[&path]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut first = [0; 10];
    let mut pipe = child.stdout.take().expect("it is piped");
    pipe.read_exact(&mut first).expect("it writes");
    drop(pipe);
    assert_eq!(first, content[..10]);
    let output = child.wait_with_output().expect("it ends");
    assert_complains(&output, 141, &[]);
    assert!(output.stderr.is_empty());
}

#[test]
fn cat_says_when_the_output_is_full() {
    let files = Files::new();
    let (path, _) = files.file("some", 10_000);
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
    let output = quinion(&["cat"], &[&path]).stdout(full).output().expect("it starts");
    assert_complains(&output, 1, &["standard output", "No space left"]);
}

#[test]
fn cat_of_its_own_output_is_refused() {
    let files = Files::new();
    let (path, content) = files.file("self", 10_000);
    let append = OpenOptions::new().append(true).open(&path).expect("we made it");
    let output = quinion(&["cat"], &[&path]).stdout(append).output().expect("it starts");
    assert_complains(&output, 1, &["self", "standard output itself"]);
    assert!(fs::read(&path).expect("it is there") == content);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let files = Files::new();
    let (path, _) = files.file("some", 10);
    assert_complains(&output(&["cat", "--memory", "64XB"], &[&path]), 2, &["use K, M, G or T"]);
    assert_complains(&output(&["cat", "--memory", "1K"], &[&path]), 1, &["quinion:"]);
}

#[test]
fn stat_tells_size_and_residency() {
    let files = Files::new();
    let (path, content) = files.file("some", 10_000);
    // The kernel has just read it, so it has all three pages cached unless memory is very short.
    let mut read = Vec::new();
    File::open(&path).and_then(|mut file| file.read_to_end(&mut read)).expect("it is there");
    assert_eq!(read, content);
    let json = output(&["stat", "--json"], &[&path, &path]);
    let lines: Vec<_> = json.stdout.split(|byte| *byte == b'\n').map(String::from_utf8_lossy).collect();
    assert_eq!(lines.len(), 3, "one line for each file, each ended");
    for key in [
        "\"size_bytes\":10000,\"pages\":3",
        "\"inode\":",
        "\"mechanism\":\"",
        "\"direct\":",
        "\"resident_pages\":",
    ] {
        assert!(lines[0].contains(key), "{key} is not in {}", lines[0]);
    }
    let text = String::from_utf8_lossy(&output(&["stat"], &[&path]).stdout).into_owned();
    assert!(text.contains("9.8 KiB (10000 bytes)"), "{text}");
}

#[test]
fn stat_names_files_it_cannot_look_at() {
    let files = Files::new();
    let (path, _) = files.file("some", 10);
    let output = output(&["stat"], &[&files.path("missing"), files.0.path(), &path]);
    assert_complains(&output, 1, &["missing", "No such file"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("some"), "the last file is there");
}

/// The command in a folder with a `quinion-object` of the test's, which shows what it was asked.
#[test]
fn urls_among_files_are_handed_to_the_program_beside_the_command() {
    use std::os::unix::fs::PermissionsExt;
    let files = Files::new();
    let ours = files.path("quinion");
    fs::hard_link(env!("CARGO_BIN_EXE_quinion"), &ours)
        .or_else(|_| fs::copy(env!("CARGO_BIN_EXE_quinion"), &ours).map(|_| ()))
        .expect("room for the command");
    let run = |words: &[&str]| {
        Command::new(&ours)
            .args(words)
            .env("PATH", "/nowhere")
            .stdin(Stdio::null())
            .output()
            .expect("it starts")
    };
    assert_complains(
        &run(&["cat", "s3://b/k"]),
        1,
        &["quinion-object", "cargo install --locked --path frontends/serve"],
    );
    assert_complains(
        &run(&["serve", "--name", "n"]),
        1,
        &["quinion-serve", "cargo install --locked --path frontends/serve"],
    );
    let program = "#!/bin/sh\nfor word; do last=$word; done\necho \"$*\"\nexit \"${last##*/}\"\n";
    for name in ["quinion-object", "quinion-s3"] {
        fs::write(files.path(name), program).expect("room for a script");
        fs::set_permissions(files.path(name), fs::Permissions::from_mode(0o755)).expect("it is ours");
    }
    let (path, content) = files.file("content", 5000);
    let file = path.to_str().expect("a plain path");
    let output = run(&["cat", "s3://b/0", file, "--server", "n", "gs://b/0"]);
    let expected = [b"cat --server n s3://b/0\n", &content[..], b"cat --server n gs://b/0\n"].concat();
    assert_complains(&output, 0, &[]);
    assert!(output.stdout == expected, "files and objects come in their order");
    let output = run(&["cat", "--memory", "64MiB", "s3://b/0"]);
    assert_eq!(output.stdout, b"cat --memory 67108864 s3://b/0\n");
    let output = run(&["stat", "--json", "s3://b/3", "https://h/0"]);
    assert_complains(&output, 3, &[]);
    assert_eq!(output.stdout, b"stat --json s3://b/3\nstat --json https://h/0\n");
    for verb in ["cat", "stat"] {
        let output = run(&[verb, "--server", "n", "--freshness", "0.5", "s3://b/0"]);
        assert_eq!(output.stdout, format!("{verb} --server n --freshness 0.5 s3://b/0\n").as_bytes());
        assert_complains(&run(&[verb, "--freshness", "5", "s3://b/0"]), 2, &["--server"]);
    }
    assert_complains(&run(&["cat", "s3://b/141", file]), 141, &[]);
    assert_complains(&run(&["cat", "--server", "n", file]), 2, &["--server"]);
    let output = run(&["s3", "--store", "s3://b", "--help", "x/7"]);
    assert_complains(&output, 7, &[]);
    assert_eq!(output.stdout, b"serve --store s3://b --help x/7\n");
    // As the usage of the program says it.
    assert_eq!(run(&["s3", "serve", "--help", "x/0"]).stdout, b"serve --help x/0\n");
}
