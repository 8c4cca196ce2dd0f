//! Crash: databases that are written through the extension, after crashes of the machine.
//!
//! `crash.py` says what is written, what a disk may have after a crash, and what SQLite must make of that. `recorder.c`
//! records what reaches SQLite's own VFS. Syncs are recorded, not timed: the disk that loses things is in the replay,
//! so each state is one that some crash may leave, and each run ends as soon as its transactions have.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Folder, extension, python, server};

/// Where times tell of each write: else no page of the server's would be read.
const FOLDERS: &str = "/dev/shm";

fn recorder(folder: &Folder) -> PathBuf {
    let built = folder.0.join("recorder.so");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&built);
    let ended = cc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorder.c")).output();
    let ended = ended.expect("no C compiler; install one (scripts/setup)");
    let words = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "SQLite's headers are Debian's libsqlite3-dev (scripts/setup): {words}");
    built
}

fn crashes(folder: &Folder, words: &[&str]) -> Output {
    let mut command = Command::new(python());
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/crash.py"));
    command.arg(extension()).arg(recorder(folder)).arg(&folder.0);
    // More of them: `QUINION_CRASHES=5000`, with transactions in proportion.
    if let Some(crashes) = std::env::var("QUINION_CRASHES").ok().and_then(|text| text.parse::<u32>().ok()) {
        command.args(["--crashes", &crashes.to_string(), "--transactions", &(crashes / 3).to_string()]);
    }
    command.args(words).output().unwrap()
}

fn told(ended: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr))
}

/// After each crash the database is whole, and has what was committed.
fn survives(name: &str, words: &[&str]) {
    let folder = Folder::below(Path::new(FOLDERS), name);
    let ended = crashes(&folder, words);
    let told = told(&ended);
    assert!(ended.status.success(), "{words:?}: {told}");
    assert!(told.contains("\"faults\": []") && !told.contains("\"hits\": 0,"), "{words:?}: {told}");
}

/// A disk that does nothing at syncs of one kind of file leaves faults, and they are found.
fn is_found(kind: &str, words: &[&str]) {
    let folder = Folder::below(Path::new(FOLDERS), &format!("lost-{kind}"));
    let ended = crashes(&folder, &[words, &["--lose", kind]].concat());
    let told = told(&ended);
    assert!(!ended.status.success() && told.contains("crash after note"), "{kind}: {told}");
}

#[test]
fn crashes_with_a_deleted_journal_leave_whole_databases() {
    survives("deleted", &["--journal", "delete", "--synchronous", "extra"]);
}

#[test]
fn crashes_before_the_deletion_is_synced_lose_the_last_transaction_at_most() {
    survives("unsynced", &["--journal", "delete", "--connections", "3"]);
}

#[test]
fn crashes_with_a_truncated_journal_leave_whole_databases() {
    survives("truncated", &["--journal", "truncate", "--connections", "3"]);
}

#[test]
fn crashes_with_a_journal_that_stays_leave_whole_databases() {
    survives("kept", &["--journal", "persist", "--workers", "3"]);
}

#[test]
fn crashes_with_a_write_ahead_log_leave_whole_databases() {
    survives("wal", &["--journal", "wal"]);
}

#[test]
fn crashes_of_several_processes_with_a_write_ahead_log_leave_whole_databases() {
    survives("processes", &["--journal", "wal", "--workers", "3", "--connections", "3"]);
}

#[test]
fn crashes_of_processes_that_share_pages_by_a_server_leave_whole_databases() {
    for (journal, workers) in [("wal", "2"), ("wal", "1"), ("truncate", "2"), ("truncate", "1")] {
        // Another worker may write so often that no times settle, and on a busy machine one alone: then again, for
        // longer.
        let is_shared = ["60", "240", "960"].iter().any(|transactions| {
            let folder = Folder::below(Path::new(FOLDERS), &format!("server-{journal}{workers}"));
            let (server, socket) = server(&folder, 64 << 20);
            let words = [
                ["--journal", journal, "--workers", workers, "--server", socket.to_str().unwrap()].as_slice(),
                &["--transactions", transactions],
            ]
            .concat();
            let ended = crashes(&folder, &words);
            server.stop();
            let told = told(&ended);
            assert!(ended.status.success() && told.contains("\"faults\": []"), "{words:?}: {told}");
            workers != "1" || !told.contains("\"server_reads\": 0}")
        });
        assert!(is_shared, "{journal}, {workers}: no page was the server's");
    }
}

#[test]
fn a_journal_that_is_not_synced_is_found() {
    is_found("journal", &["--journal", "truncate"]);
}

#[test]
fn a_log_that_is_not_synced_is_found() {
    is_found("wal", &["--journal", "wal"]);
}

#[test]
fn a_database_that_is_not_synced_is_found() {
    is_found("db", &["--journal", "delete", "--synchronous", "extra"]);
}
