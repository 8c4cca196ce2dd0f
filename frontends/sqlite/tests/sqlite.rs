//! SQLite: the extension in unmodified programs: the shell, and Python's module.
//!
//! `storm.py` says what its workers do and how a wrong byte would show. Here it runs in each journal mode, with pages
//! of several sizes, with connections that are killed in the middle of transactions.

mod common;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStoreExt, PutPayload};
use quinion_service::Server;

use common::{Folder, extension, python, server};

fn folder(name: &str) -> Folder {
    Folder::below(Path::new(env!("CARGO_TARGET_TMPDIR")), name)
}

/// What the shell prints for these statements, with the extension loaded.
fn shell(folder: &Folder, statements: &str) -> Output {
    shell_of(folder, "file:x.db?vfs=quinion", statements)
}

fn shell_of(folder: &Folder, uri: &str, statements: &str) -> Output {
    let mut command = Command::new("sqlite3");
    command.current_dir(&folder.0).args(["-batch", "-bail", ":memory:"]);
    command.arg(format!(".load {}", extension().display())).arg(format!(".open {uri}"));
    command.arg(statements).output().expect("no sqlite3; install it (scripts/setup)")
}

fn storm(name: &str, words: &[&str]) {
    storm_in(&folder(name), words);
}

/// Returns what it told.
fn storm_in(folder: &Folder, words: &[&str]) -> String {
    let mut command = Command::new(python());
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/storm.py")).arg(extension()).arg(&folder.0);
    // One of an hour: `QUINION_STORM_SECONDS=3600`.
    let seconds = std::env::var("QUINION_STORM_SECONDS").unwrap_or_else(|_| "6".to_owned());
    let ended = command.args(["--seconds", &seconds]).args(words).output().unwrap();
    let told =
        format!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{words:?}: {told}");
    told
}

#[test]
fn a_storm_with_a_rollback_journal_sees_one_history() {
    storm("delete", &["--journal", "delete", "--kills", "3"]);
}

#[test]
fn a_storm_with_a_write_ahead_log_sees_one_history() {
    storm("wal", &["--journal", "wal", "--kills", "3"]);
}

#[test]
fn a_storm_that_changes_journal_modes_sees_one_history() {
    storm("switch", &["--journal", "persist", "--kills", "3", "--switch", "--page", "8192"]);
}

#[test]
fn a_storm_with_the_largest_pages_sees_one_history() {
    storm("largest", &["--journal", "wal", "--kills", "2", "--page", "65536", "--memory", "32M"]);
}

#[test]
fn a_storm_of_connections_that_come_and_go_sees_one_history() {
    // Where times tell of each write, as in `idle_case`; else idle logs would be read past the cache.
    let folder = Folder::below(Path::new("/dev/shm"), "visits");
    let told = storm_in(&folder, &["--journal", "wal", "--kills", "3", "--visits"]);
    assert!(!told.contains("\"idle\": 0,"), "no transaction met an idle log: {told}");
}

/// On a file system whose times tell of each write. On a busy machine writers may leave no pause in which times settle:
/// then again, for longer.
fn shared_storm(words: &[&str]) {
    for longer in [&[][..], &["--seconds", "20"], &["--seconds", "60"]] {
        let folder = Folder::below(Path::new("/dev/shm"), &words.join(""));
        let (server, socket) = server(&folder, 16 << 20);
        let more = ["--seldom", "--kills", "3", "--server", socket.to_str().unwrap()];
        let told = storm_in(&folder, &[words, &more, longer].concat());
        server.stop();
        if !told.contains("\"shared\": 0, \"workers\"") {
            return;
        }
    }
    panic!("no transaction read pages of the server");
}

#[test]
fn a_storm_over_a_server_with_a_rollback_journal_sees_one_history() {
    shared_storm(&["--journal", "delete"]);
}

#[test]
fn a_storm_over_a_server_with_a_write_ahead_log_sees_one_history() {
    shared_storm(&["--journal", "wal"]);
}

#[test]
fn a_storm_over_a_server_that_changes_journal_modes_sees_one_history() {
    shared_storm(&["--journal", "persist", "--switch", "--page", "8192"]);
}

#[test]
fn a_storm_over_servers_that_come_and_go_sees_one_history() {
    let folder = Folder::below(Path::new("/dev/shm"), "servers");
    let (first, socket) = server(&folder, 16 << 20);
    let words = ["--journal", "wal", "--seldom", "--server", socket.to_str().unwrap()];
    let told = std::thread::scope(|scope| {
        let storm = scope.spawn(|| storm_in(&folder, &words));
        let mut present = first;
        while !storm.is_finished() {
            std::thread::sleep(Duration::from_millis(1500));
            present.stop();
            std::thread::sleep(Duration::from_millis(100));
            present = server(&folder, 16 << 20).0;
        }
        present.stop();
        storm.join().unwrap()
    });
    assert!(told.contains("\"wrong\": []"), "{told}");
}

/// Two processes read the same pages: the second has none read.
#[test]
fn processes_share_pages_by_a_server_until_one_writes() {
    let folder = Folder::below(Path::new("/dev/shm"), "shared");
    let (server, socket) = server(&folder, 64 << 20);
    let run = |statements: &str| {
        let mut command = Command::new("sqlite3");
        command.current_dir(&folder.0).args(["-batch", "-bail", ":memory:"]);
        command.arg(format!(".load {}", extension().display()));
        command.arg(format!(".open file:x.db?vfs=quinion&server={}", socket.display()));
        let ended = command.arg(statements).output().expect("no sqlite3; install it (scripts/setup)");
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).unwrap()
    };
    let settle = || std::thread::sleep(Duration::from_millis(150));
    run("CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(900000)), (randomblob(7));");
    settle();
    let look = "SELECT length(x) FROM t; PRAGMA integrity_check; PRAGMA quinion_database;";
    let told = run(look);
    assert!(told.starts_with("900000\n7\nok\n") && told.contains("\"cached by the server\""), "{told}");
    let read = server.cache().stats().device_bytes;
    assert!(read > 900_000, "{read}");
    let told = run(look);
    assert!(told.starts_with("900000\n7\nok\n") && told.contains("\"cached by the server\""), "{told}");
    assert!(!told.contains("\"server_reads\":0,") && told.contains("\"misses\":0,"), "{told}");
    assert_eq!(server.cache().stats().device_bytes, read, "another process has read it");
    // What one writes is seen at once, while the times settle, and after that.
    let told = run(
        "UPDATE t SET x = zeroblob(8) WHERE length(x) = 7; SELECT length(x), hex(x) FROM t WHERE rowid = 2;",
    );
    assert_eq!(told, "8|0000000000000000\n");
    assert_eq!(run("SELECT length(x) FROM t;"), "900000\n8\n");
    settle();
    assert_eq!(run("SELECT length(x) FROM t;"), "900000\n8\n");
    server.stop();
    assert_eq!(run("SELECT length(x) FROM t;"), "900000\n8\n", "without a server it is SQLite's file");
}

/// The server's closes of the lent descriptor, and the process's own reads by the server, end no lock.
#[test]
fn a_process_that_shares_pages_keeps_its_locks() {
    let folder = Folder::below(Path::new("/dev/shm"), "locks");
    let (server, socket) = server(&folder, 64 << 20);
    shell(&folder, "CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(900000));");
    std::thread::sleep(Duration::from_millis(150));
    let mut command = Command::new("sqlite3");
    command.current_dir(&folder.0).args(["-batch", ":memory:"]);
    command.arg(format!(".load {}", extension().display()));
    command.arg(format!(".open file:x.db?vfs=quinion&server={}", socket.display()));
    command.args(["BEGIN IMMEDIATE", "SELECT length(x) FROM t", "PRAGMA quinion_database"]);
    command.args([".shell sqlite3 x.db 'INSERT INTO t VALUES (1)'", "COMMIT", "SELECT count(*) FROM t"]);
    let ended = command.output().expect("no sqlite3; install it (scripts/setup)");
    let (told, words) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(told.starts_with("900000\n") && told.contains("\"cached by the server\""), "{told}{words}");
    assert!(words.contains("database is locked"), "another process could write: {told}{words}");
    assert!(told.ends_with("\n1\n"), "{told}{words}");
    server.stop();
}

fn case(name: &str) {
    case_in(&folder(name), name);
}

/// A case of a log without frames, on a file system whose times tell of each write. The tests' own may be another.
fn idle_case(name: &str) {
    case_in(&Folder::below(Path::new("/dev/shm"), name), name);
}

fn case_in(folder: &Folder, name: &str) {
    let mut command = Command::new(python());
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases.py"))
        .arg(extension())
        .arg(&folder.0)
        .arg(name);
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn a_log_between_two_journals_is_seen() {
    case("a_log_between_two_journals");
}

#[test]
fn logs_of_connections_that_exclude_others_are_seen() {
    case("a_log_of_connections_that_exclude_others");
}

#[test]
fn a_log_that_readers_alone_have_opened_is_served() {
    idle_case("a_log_that_readers_alone_have_opened");
}

#[test]
fn two_databases_are_counted_apart() {
    idle_case("two_databases_that_are_counted_apart");
}

#[test]
fn a_log_that_is_deleted_between_two_readers_is_seen() {
    idle_case("a_log_that_is_deleted_between_two_readers");
}

#[test]
fn an_index_that_is_made_anew_from_nothing_is_seen() {
    idle_case("an_index_that_is_made_anew_from_nothing");
}

#[test]
fn a_file_that_was_written_just_now_is_read_past_the_cache() {
    idle_case("a_file_that_was_written_just_now");
}

#[test]
fn an_immutable_connection_shares_its_pages_with_no_other() {
    case("an_immutable_reader_of_what_is_not_committed");
}

#[test]
fn a_file_that_was_copied_over_is_seen_by_connections_of_after() {
    case("a_file_that_was_copied_over");
}

#[test]
fn a_connection_that_is_opened_after_own_writes_finds_the_pages() {
    case("a_connection_that_is_opened_after_own_writes");
}

#[test]
fn a_transaction_that_another_process_rolls_back_is_not_seen() {
    case("a_transaction_that_another_process_rolls_back");
}

#[test]
fn a_process_without_memory_reads_without_a_cache() {
    case("a_process_without_memory");
}

#[test]
fn a_second_copy_of_sqlite_is_refused() {
    case("two_copies_of_sqlite");
}

#[test]
fn reads_of_the_shell_are_served() {
    let folder = folder("shell");
    let made = shell(
        &folder,
        "CREATE TABLE t (x); WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 50000) \
         INSERT INTO t SELECT x FROM n; PRAGMA cache_size = 10; SELECT sum(x) FROM t; SELECT sum(x) FROM t; \
         PRAGMA quinion_stats; PRAGMA integrity_check;",
    );
    let told = String::from_utf8_lossy(&made.stdout).into_owned();
    let lines: Vec<_> = told.lines().collect();
    assert_eq!(lines[..2], ["1250025000"; 2], "{told}{}", String::from_utf8_lossy(&made.stderr));
    assert_eq!(lines[3], "ok");
    let hits = lines[2].split("\"hits\":").nth(1).and_then(|rest| rest.split([',', '}']).next());
    assert!(hits.and_then(|hits| hits.parse::<u64>().ok()).is_some_and(|hits| hits > 100), "{told}");
    // Without the extension it is the same database.
    let plain =
        Command::new("sqlite3").arg(folder.0.join("x.db")).arg("SELECT sum(x) FROM t").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&plain.stdout), "1250025000\n");
}

#[test]
fn pages_that_are_too_small_are_read_past_the_cache() {
    let folder = folder("small");
    let made = shell(
        &folder,
        "PRAGMA page_size = 1024; CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(100000)); \
         PRAGMA cache_size = 10; SELECT length(x) FROM t; PRAGMA quinion_stats;",
    );
    let told = String::from_utf8_lossy(&made.stdout);
    assert!(told.starts_with("100000\n") && told.contains("\"hits\":0,"), "{told}");
}

#[test]
fn the_bound_is_said_in_sql_and_a_wrong_one_in_words() {
    let folder = folder("bound");
    let told = shell(&folder, "PRAGMA quinion_memory = '64M'; PRAGMA quinion_memory;");
    assert_eq!(String::from_utf8_lossy(&told.stdout), "67108864\n67108864\n");
    // It was built for the first bound alone: each larger one was an error, whose remedy was a call in Rust.
    let told = shell(&folder, "PRAGMA quinion_memory = '1G'; PRAGMA quinion_memory = '256M';");
    assert_eq!(String::from_utf8_lossy(&told.stdout), "1073741824\n268435456\n");
    let beyond = shell(&folder, "PRAGMA quinion_memory = '1100M';");
    let words = String::from_utf8_lossy(&beyond.stderr);
    assert!(!beyond.status.success() && words.contains("1073741824 bytes at most"), "{words}");
    assert!(words.contains("quinion_memory_max in the URI") && !words.contains("build"), "{words}");
    let uri = "file:x.db?vfs=quinion&quinion_memory=16M&quinion_memory_max=40M";
    let told = shell_of(&folder, uri, "PRAGMA quinion_memory = '40M'; PRAGMA quinion_memory = '42M';");
    let words = String::from_utf8_lossy(&told.stderr);
    assert!(told.stdout == b"41943040\n" && words.contains("41943040 bytes at most"), "{words}");
    // Its tables would take more than the bound.
    let uri = "file:x.db?vfs=quinion&quinion_memory=16M&quinion_memory_max=1T";
    let told = shell_of(&folder, uri, "PRAGMA quinion_memory; PRAGMA quinion_memory = '32M';");
    let words = String::from_utf8_lossy(&told.stderr);
    assert!(told.stdout == b"16777216\n" && words.contains("16777216 bytes at most"), "{words}");
    let wrong = shell(&folder, "PRAGMA quinion_memory = 'much';");
    assert!(!wrong.status.success());
    let words = String::from_utf8_lossy(&wrong.stderr);
    assert!(words.contains("`much` is not a size") && words.contains("256M"), "{words}");
}

#[test]
fn an_immutable_database_is_served_without_locks() {
    let folder = folder("immutable");
    let made = shell(&folder, "CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(900000)); SELECT 1;");
    assert_eq!(String::from_utf8_lossy(&made.stdout), "1\n");
    let mut command = Command::new("sqlite3");
    command.current_dir(&folder.0).args(["-batch", "-bail", ":memory:"]);
    command.arg(format!(".load {}", extension().display()));
    command.arg(".open file:x.db?vfs=quinion&immutable=1");
    let read = command
        .arg(
            "PRAGMA cache_size = 10; SELECT length(x) FROM t; SELECT length(x) FROM t; PRAGMA quinion_stats;",
        )
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&read.stdout);
    let direct = told.split("\"direct_reads\":").nth(1).and_then(|rest| rest.split(',').next());
    assert!(told.starts_with("900000\n900000\n"), "{told}");
    assert!(direct.and_then(|direct| direct.parse::<u64>().ok()).is_some_and(|direct| direct < 5), "{told}");
}

#[test]
fn a_database_that_is_an_object_is_read_through_the_server() {
    let folder = Folder::below(&std::env::temp_dir(), "remote"); // the path of a socket has at most 107 bytes
    let made = shell(
        &folder,
        "CREATE TABLE t (x); INSERT INTO t VALUES (randomblob(900000)), (randomblob(7)); PRAGMA journal_mode = wal;",
    );
    assert_eq!(String::from_utf8_lossy(&made.stdout), "wal\n");
    let store = Arc::new(InMemory::new());
    let bytes = std::fs::read(folder.0.join("x.db")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put(&ObjectPath::from("x.db"), PutPayload::from(bytes))).unwrap();
    let cache = quinion::Cache::builder().memory(64 << 20).build().unwrap();
    let socket = folder.0.join("server.sock");
    let server = Server::builder(cache).store("mem://b", store, Default::default());
    let server = server.start(socket.to_str().unwrap()).unwrap();

    let read = |statements: &str| {
        let mut command = Command::new("sqlite3");
        command.args(["-batch", "-bail", ":memory:"]).arg(format!(".load {}", extension().display()));
        command.arg(format!(".open file:any?vfs=quinion&url=mem://b/x.db&server={}", socket.display()));
        command.arg(statements).output().unwrap()
    };
    let told = read("SELECT length(x) FROM t; PRAGMA integrity_check;");
    let words = String::from_utf8_lossy(&told.stderr);
    assert_eq!(String::from_utf8_lossy(&told.stdout), "900000\n7\nok\n", "{words}");
    assert!(server.stats().bytes > 900_000, "{:?}", server.stats());
    let written = read("INSERT INTO t VALUES (1);");
    let words = String::from_utf8_lossy(&written.stderr);
    assert!(!written.status.success() && words.contains("readonly"), "{words}");
    server.stop();
}

#[test]
fn an_object_that_no_server_has_is_an_error() {
    let folder = folder("object");
    let mut command = Command::new("sqlite3");
    command.current_dir(&folder.0).args(["-batch", "-bail", ":memory:"]);
    command.arg(format!(".load {}", extension().display()));
    command.arg(".open file:any?vfs=quinion&url=s3://bucket/x.db&server=no-such-server");
    let opened = command.arg("SELECT 1").output().unwrap();
    let words = String::from_utf8_lossy(&opened.stderr);
    assert!(words.contains("unable to open database"), "{words}");
}
