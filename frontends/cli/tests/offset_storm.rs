//! Offsets that are handed over while threads, duplicates and children use them (`programs/offset_storm.c`).
//!
//! ```text
//!   storm   each byte of a phase is given to one caller, and the last offset is where the kernel alone would have it
//!   fifo    a real-time reader that meets a hand-over does not starve the thread that does it
//! ```
//!
//! The program itself checks that its results are possible, with the cache and without it. It prints that on its
//! standard output, or fails with the difference.

use std::path::{Path, PathBuf};
use std::process::Output;

mod disk;
use disk::{Report, plain, program, quinion, scratch};

struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(scratch());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/offset_storm.c");
        let mut compiler = plain(program("cc"));
        compiler.args(["-O1", "-w", "-pthread", "-o"]).arg(fixture.path("storm")).arg(source).arg("-ldl");
        assert!(compiler.status().expect("the compiler starts").success());
        let numbers: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
        std::fs::write(fixture.path("numbers"), numbers).expect("the disk has room");
        fixture
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    fn alone(&self, words: &[&str]) -> Output {
        let mut command = plain(self.path("storm"));
        command.current_dir(self.0.path()).args(words).output().expect("it starts")
    }
    fn served(&self, words: &[&str]) -> (Output, u64) {
        let report = self.path("report");
        let mut command = quinion();
        command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
        command.arg(&report).arg("--").arg(self.path("storm")).args(words);
        let output = command.current_dir(self.0.path()).output().expect("it starts");
        (output, Report::read(&report).served())
    }
}

#[track_caller]
fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

#[test]
fn offset_storm() {
    let fixture = Fixture::new();
    assert_eq!(said(&fixture.alone(&["storm", "numbers", "0.5", "1"])), "no difference");
    for seed in ["1", "2", "3"] {
        let (output, served) = fixture.served(&["storm", "numbers", "1.5", seed]);
        assert_eq!(said(&output), "no difference");
        assert!(served > 1 << 20, "so little was served that nothing is shown: {served} bytes");
    }
}

#[test]
fn a_real_time_reader_lets_a_hand_over_end() {
    let fixture = Fixture::new();
    let (output, served) = fixture.served(&["fifo", "numbers"]);
    match said(&output).as_str() {
        "no real-time class" => println!("SKIPPED: this user may not have threads of a real-time class"),
        "no difference" => assert!(served > 0, "nothing was served"),
        other => panic!("{other}"),
    }
}
