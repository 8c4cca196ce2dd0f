//! `quinion pack` as a user types it: packs are written whole or not at all, and reports and messages are right.
//!
//! ```text
//!   snapshot --quinion pack--> a pack --quinion pack--> a pack of the pack, as one of the snapshot itself
//!               |
//!               '-- killed, ended by a signal: nothing under the pack's name
//! ```

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use quinion_testing::vmm::Image;
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn snapshot(&self, name: &str, image: Image) -> PathBuf {
        image.write(&self.path(name));
        self.path(name)
    }
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
    /// `quinion pack` with options, each with the file of that name in this folder.
    fn command(&self, options: &[(&str, &str)], more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
        command.arg("pack").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (option, name) in options {
            command.arg(option).arg(self.path(name));
        }
        command.args(more);
        command
    }
    fn packs(&self, options: &[(&str, &str)], more: &[&str]) -> String {
        let output = self.command(options, more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.is_empty(), "{said}");
        String::from_utf8(output.stdout).unwrap()
    }
    #[track_caller]
    fn fails(&self, options: &[(&str, &str)], more: &[&str], code: i32, words: &[&str]) -> Output {
        let output = self.command(options, more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "`{word}` is not in: {said}"));
        output
    }
    fn identity(&self, pack: &str) -> String {
        let report = self.packs(&[("--verify", pack)], &["--json"]);
        assert_eq!(number(&report, "damaged_chunks"), 0);
        let (_, rest) = report.split_once("\"identity\":\"").unwrap();
        rest[..64].to_owned()
    }
}

fn number(report: &str, key: &str) -> u64 {
    let (_, rest) = report.split_once(&format!("\"{key}\":")).unwrap_or_else(|| panic!("{key}: {report}"));
    rest[..rest.find([',', '}']).unwrap()].parse().unwrap()
}

#[test]
fn a_second_snapshot_costs_its_changes_and_a_pack_is_packed_again_into_one() {
    let folder = Folder::new();
    let image = Image::new(91, 2000);
    folder.snapshot("monday.mem", image);
    let first = folder.packs(&[("--snapshot", "monday.mem"), ("--out", "monday.pack")], &["--json"]);
    assert_eq!(number(&first, "image_bytes"), image.bytes());
    assert_eq!(number(&first, "shared_bytes"), 0);
    assert_eq!(number(&first, "pack_bytes"), fs::metadata(folder.path("monday.pack")).unwrap().len());
    let later = folder.snapshot("tuesday.mem", image);
    let file = fs::OpenOptions::new().write(true).open(later).unwrap();
    let other = Image { generation: 5, ..image };
    for page in [100, 101, 900] {
        file.write_all_at(&other.page(page), page * 4096).unwrap();
    }
    drop(file);
    let tuesday = [("--snapshot", "tuesday.mem"), ("--against", "monday.pack"), ("--out", "tuesday.pack")];
    let second = folder.packs(&tuesday, &["--json"]);
    assert!(second.contains("\"packs\":[\"monday.pack\"]"), "{second}");
    assert_eq!(number(&second, "shared_bytes"), image.bytes() - 2 * (256 << 10));
    assert!(number(&second, "pack_bytes") < number(&first, "pack_bytes") / 4, "{second}");
    // The same bytes in one pack, by way of the pack and at once.
    folder.packs(&[("--snapshot", "tuesday.pack"), ("--out", "alone.pack")], &[]);
    let text = folder.packs(&[("--snapshot", "tuesday.mem"), ("--out", "again.pack")], &[]);
    assert!(text.contains("snapshot / pack") && !text.contains("refers to"), "{text}");
    assert_eq!(folder.identity("alone.pack"), folder.identity("again.pack"));
    assert_ne!(folder.identity("alone.pack"), folder.identity("tuesday.pack"));
}

#[test]
fn damaged_and_missing_packs_are_told() {
    let folder = Folder::new();
    folder.snapshot("monday.mem", Image::new(92, 500));
    folder.packs(&[("--snapshot", "monday.mem"), ("--out", "monday.pack")], &[]);
    let (like, against) = (("--snapshot", "monday.mem"), ("--against", "monday.pack"));
    folder.packs(&[like, against, ("--out", "tuesday.pack")], &[]);
    let file = fs::OpenOptions::new().write(true).open(folder.path("monday.pack")).unwrap();
    file.write_all_at(&[1; 100], file.metadata().unwrap().len() - 500).unwrap();
    let words = ["damaged", "monday.pack", "copy that pack again"];
    for pack in ["monday.pack", "tuesday.pack"] {
        let output = folder.fails(&[("--verify", pack)], &["--json"], 1, &words);
        assert_eq!(number(&String::from_utf8_lossy(&output.stdout), "damaged_chunks"), 1);
    }
    fs::remove_file(folder.path("monday.pack")).unwrap();
    folder.fails(&[("--verify", "tuesday.pack")], &[], 1, &["refers to the pack `monday.pack`"]);
    folder.fails(&[("--verify", "monday.mem")], &[], 1, &["this is no pack"]);
}

#[test]
fn wrong_command_lines_are_refused_and_no_file_is_replaced_unasked() {
    let folder = Folder::new();
    let memory = folder.snapshot("memory", Image::new(93, 100));
    fs::set_permissions(memory, fs::Permissions::from_mode(0o640)).unwrap();
    let (snapshot, out) = (("--snapshot", "memory"), ("--out", "pack"));
    folder.fails(&[snapshot], &[], 2, &["--out"]);
    folder.fails(&[out], &[], 2, &["--snapshot"]);
    folder.fails(&[snapshot, out, ("--verify", "pack")], &[], 2, &["--verify"]);
    folder.fails(&[snapshot, out], &["--level", "20"], 2, &["19"]);
    folder.fails(&[snapshot, out], &["--chunk", "100K"], 1, &["power of two"]);
    folder.fails(&[snapshot, out], &["--chunk", "8G"], 1, &["power of two"]);
    // A pack of a snapshot that was cut would be all there is when the original is deleted.
    fs::write(folder.path("cut"), vec![1; 100 * 4096 + 100]).unwrap();
    folder.fails(&[("--snapshot", "cut"), out], &[], 1, &["it was cut", "copy it again"]);
    fs::remove_file(folder.path("cut")).unwrap();
    assert_eq!(folder.names(), ["memory"]);
    folder.packs(&[snapshot, out], &["--chunk", "64K"]);
    let mode = fs::metadata(folder.path("pack")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777 & !0o640, 0, "it is no more readable than the snapshot");
    let before = fs::read(folder.path("pack")).unwrap();
    folder.fails(&[snapshot, out], &[], 1, &["there already", "--replace"]);
    assert!(fs::read(folder.path("pack")).unwrap() == before);
    folder.packs(&[snapshot, out], &["--replace", "--level", "9"]);
    assert_eq!(folder.names(), ["memory", "pack"]);
}

/// A command that packs slowly, and has written something.
fn begun(folder: &Folder) -> Child {
    let child = folder
        .command(&[("--snapshot", "memory"), ("--out", "pack")], &["--level", "19", "--chunk", "4M"])
        .spawn()
        .unwrap();
    let began = Instant::now();
    let has_some = |path: &Path| fs::metadata(path).is_ok_and(|file| file.len() > 0);
    while !folder.names().iter().any(|name| name.ends_with(".new") && has_some(&folder.path(name))) {
        assert!(began.elapsed() < Duration::from_secs(120), "it does not begin to write");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

#[test]
fn a_command_that_is_killed_or_ended_leaves_no_half_pack_under_the_name() {
    let folder = Folder::new();
    folder.snapshot("memory", Image::new(94, 50_000));
    let mut killed = begun(&folder);
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(!folder.path("pack").exists(), "{:?}", folder.names());
    let left: Vec<String> = folder.names().into_iter().filter(|name| name.ends_with(".new")).collect();
    left.iter().for_each(|name| fs::remove_file(folder.path(name)).unwrap());
    let ended = begun(&folder);
    let pid = rustix::process::Pid::from_raw(ended.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = ended.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    assert_eq!(folder.names(), ["memory"]);
}
