//! The matrix's databases and storage benchmarks: the same with the cache and without it, and served.
//!
//! | program | what has to be the same | bytes from the cache, of those that it reads |
//! |---|---|---|
//! | fio: psync, sync, vsync, pvsync, pvsync2 | bytes read and errors; it checks a sum in each block itself | all |
//! | fio: posixaio | the same; it reads in threads of the C library's own | not asked |
//! | fio: mmap, libaio, io_uring | the same | none: the kernel's, and not harmed |
//! | db_bench: readseq, readrandom, multireadrandom | keys found and errors; it checks sums of blocks | all, or nearly |
//! | sqlite3 and Python's sqlite3 | the answers | all of a database without locks |
//! | duckdb: Parquet, CSV | the answers | all |
//! | duckdb: its own format | the answers | not asked |
//!
//! The other output of the first three is times, which differ from run to run. The floors follow from what the programs
//! were asked to read: whole files, or a number of blocks. The checks themselves are tested, too: a wrong sum is found.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use tempfile::TempDir;

mod disk;
use disk::{Report, both_in, duckdb, files, plain, program, python, same_in, scratch, size};

// ---- fio ------------------------------------------------------------------------------------------------

/// A little more than the smallest cache holds.
const FIO_BYTES: u64 = 24 << 20;
/// Blocks with checksums and their positions in them.
const FIO_BLOCKS: [&str; 5] =
    ["--name=blocks", "--filename=blocks", "--size=24m", "--bs=4k", "--verify=crc32c"];
const READ_IN_TURN: &str = "--rw=read";
const READ_AT_RANDOM: &str = "--rw=randread";

fn blocks() -> TempDir {
    let folder = scratch();
    let mut fio = plain(program("fio"));
    fio.args(FIO_BLOCKS).args(["--rw=write", "--ioengine=psync", "--do_verify=0"]);
    let output = fio.current_dir(folder.path()).output().expect("fio starts");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(size(&folder.path().join("blocks")), FIO_BYTES);
    folder
}

fn errors_and_kib(output: &Output) -> (String, u64) {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("3;fio-"));
    let fields: Vec<&str> = line.unwrap_or_else(|| panic!("{output:?}")).split(';').collect();
    (fields[4].to_owned(), fields[5].parse().expect("a number"))
}

/// Reads the whole file both ways; no checksum may be wrong either way.
#[track_caller]
fn fio(folder: &Path, engine: &str, way: &str) -> Report {
    let engine = format!("--ioengine={engine}");
    let more = [
        "--output-format=terse",
        "--verify_fatal=1",
        "--thread",
        "--invalidate=0",
        "--randseed=7",
        &engine,
        way,
    ];
    let words: Vec<&str> = ["fio"].into_iter().chain(FIO_BLOCKS).chain(more).collect();
    let (served, expected, report) = both_in(folder, &words);
    let right = ("0".to_owned(), FIO_BYTES >> 10);
    assert_eq!(errors_and_kib(&expected), right, "{engine} {way}: {expected:?}");
    assert_eq!(errors_and_kib(&served), right, "{engine} {way}: {served:?}");
    assert_eq!((served.status, served.stderr), (expected.status, expected.stderr), "{engine} {way}");
    report
}

#[test]
fn fio_by_calls_that_read() {
    let folder = blocks();
    for engine in ["psync", "sync", "vsync", "pvsync", "pvsync2"] {
        for way in [READ_IN_TURN, READ_AT_RANDOM] {
            let report = fio(folder.path(), engine, way);
            assert!(report.served() >= FIO_BYTES, "{engine} {way}: {report:?}");
        }
    }
}

#[test]
fn fio_by_the_c_librarys_threads() {
    let folder = blocks();
    for way in [READ_IN_TURN, READ_AT_RANDOM] {
        fio(folder.path(), "posixaio", way);
    }
}

#[test]
fn fio_by_calls_that_the_kernel_serves() {
    let folder = blocks();
    for engine in ["mmap", "libaio", "io_uring"] {
        for way in [READ_IN_TURN, READ_AT_RANDOM] {
            fio(folder.path(), engine, way);
        }
    }
}

/// A byte was changed behind fio's back: it reports that, with the cache as without it.
#[test]
fn fio_would_find_it() {
    let folder = blocks();
    let file = File::options().write(true).open(folder.path().join("blocks")).expect("the file is ours");
    file.write_all_at(b"other", 5_000_000).expect("the file is ours");
    let words: Vec<&str> = ["fio"].into_iter().chain(FIO_BLOCKS).collect();
    let more = ["--output-format=terse", "--verify_fatal=1", "--thread", "--ioengine=psync", READ_IN_TURN];
    let words: Vec<&str> = words.into_iter().chain(more).collect();
    let (served, expected, _) = both_in(folder.path(), &words);
    assert_eq!(served.status, expected.status);
    assert!(!served.status.success(), "{served:?}");
    assert_eq!(errors_and_kib(&served).0, errors_and_kib(&expected).0, "{served:?}");
}

// ---- db_bench -------------------------------------------------------------------------------------------

/// Bytes of all keys and values, which are not compressed.
const DB_BYTES: u64 = 20_000 * (16 + 1_000);
const DB_SHAPE: [&str; 4] = ["--db=database", "--num=20000", "--value_size=1000", "--compression_type=none"];

fn database() -> TempDir {
    let folder = scratch();
    let mut fill = plain(program("db_bench"));
    fill.args(DB_SHAPE).args(["--benchmarks=fillseq", "--disable_wal=1", "--threads=1"]);
    let output = fill.current_dir(folder.path()).output().expect("db_bench starts");
    assert!(output.status.success(), "{output:?}");
    folder
}

/// The number of operations and of keys found, from its output: all but the times.
fn counts(output: &Output, benchmark: &str) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let is_result = |line: &&str| line.split_once(" :").is_some_and(|(name, _)| name.trim_end() == benchmark);
    let line = text.lines().find(is_result).unwrap_or_else(|| panic!("{benchmark}: {output:?}"));
    let found = line.split_once('(').map(|(_, found)| found.trim_end_matches(')').to_owned());
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| word.starts_with("operations")).expect("it counts operations");
    std::iter::once(words[at - 1].to_owned()).chain(found).collect()
}

#[track_caller]
fn db_bench(benchmark: &str, more: &[&str], expected_counts: &[&str]) -> u64 {
    let folder = database();
    let benchmarks = format!("--benchmarks={benchmark}");
    let common = ["--use_existing_db=1", "--verify_checksum=1", "--seed=5", &benchmarks];
    let words: Vec<&str> =
        ["db_bench"].into_iter().chain(DB_SHAPE).chain(common).chain(more.iter().copied()).collect();
    let (served, expected, report) = both_in(folder.path(), &words);
    assert_eq!(counts(&expected, benchmark), expected_counts, "the test itself is wrong: {expected:?}");
    assert_eq!(counts(&served, benchmark), expected_counts, "{served:?}");
    assert_eq!(served.status, expected.status);
    let errors = |output: &Output| String::from_utf8_lossy(&output.stderr).matches("rror").count();
    assert_eq!((errors(&served), errors(&expected)), (0, 0), "{served:?}");
    report.served()
}

#[test]
fn db_bench_in_turn() {
    let served = db_bench("readseq", &["--threads=2"], &["40000"]);
    assert!(served >= DB_BYTES, "{served} bytes");
}

/// RocksDB's own cache is small, so that it reads again and again; most keys cost a block of 4 KiB.
#[test]
fn db_bench_at_random() {
    let small = ["--threads=2", "--reads=10000", "--cache_size=1000000"];
    let found = "10000 of 10000 found";
    for benchmark in ["readrandom", "multireadrandom"] {
        let served = db_bench(benchmark, &small, &["20000", found]);
        assert!(served >= 2 * DB_BYTES, "{benchmark}: {served} bytes");
    }
}

/// Half of the keys do not exist, and as many are missed with the cache as without it.
#[test]
fn db_bench_looks_for_absent_keys() {
    let folder = database();
    let words = ["db_bench", "--db=database", "--num=40000", "--value_size=1000", "--use_existing_db=1"];
    let more = ["--benchmarks=readrandom", "--reads=5000", "--seed=5", "--cache_size=1000000"];
    let words: Vec<&str> = words.into_iter().chain(more).collect();
    let (served, expected, _) = both_in(folder.path(), &words);
    let found = counts(&expected, "readrandom");
    assert!(found[1] != "5000 of 5000 found" && !found[1].starts_with("0 of"), "{found:?}");
    assert_eq!((counts(&served, "readrandom"), served.status), (found, expected.status));
}

// ---- sqlite ---------------------------------------------------------------------------------------------

const PYTHONS_SQLITE: &str = "
import sqlite3, sys
line = sqlite3.connect(sys.argv[1], uri=True)
print(line.execute('SELECT count(*), sum(scattered), max(words) FROM line').fetchall())
print(line.execute('SELECT id, words FROM line WHERE scattered > 4290000000 ORDER BY scattered').fetchall())
print(line.execute('PRAGMA integrity_check').fetchall())
";

/// SQLite locks because of writers; a database that no process writes is read without locks, if the caller declares
/// that.
#[test]
fn pythons_sqlite3() {
    let python = python().to_str().expect("a plain path");
    let bytes = size(&files().join("database"));
    let report = same_in(files(), &[python, "-c", PYTHONS_SQLITE, "file:database?mode=ro&immutable=1"]);
    assert!(report.served() >= bytes, "{report:?}");
    same_in(files(), &[python, "-c", PYTHONS_SQLITE, "file:database?mode=ro"]);
}

/// SQLite reads, writes, rolls back and reads again; each way with a database of its own.
#[test]
fn sqlite3_that_writes() {
    let script = "
        rm -f copy copy-journal copy-wal; cp $from/database copy
        sqlite3 copy 'PRAGMA mmap_size=0; SELECT sum(scattered) FROM line;
            BEGIN; UPDATE line SET words = \"other\" WHERE id % 1000 = 7;
            SELECT count(*) FROM line WHERE words = \"other\"; ROLLBACK;
            SELECT count(*) FROM line WHERE words = \"other\";
            DELETE FROM line WHERE id % 3 = 0; SELECT count(*), sum(scattered) FROM line; PRAGMA integrity_check;'
        sqlite3 copy 'PRAGMA journal_mode=WAL;
            INSERT INTO line(scattered, words) SELECT id, \"more\" FROM line LIMIT 9999;
            SELECT count(*), max(id) FROM line; PRAGMA wal_checkpoint(TRUNCATE); VACUUM; PRAGMA integrity_check'
        sqlite3 copy 'SELECT count(*), sum(scattered), sum(length(words)) FROM line'
        sqlite3 -readonly 'file:copy?immutable=1' .dump | sha256sum; rm -f copy copy-wal copy-shm";
    let folder = scratch();
    let script = format!("from={}; {script}", files().display());
    same_in(folder.path(), &["sh", "-c", &script]);
}

// ---- duckdb ---------------------------------------------------------------------------------------------

#[test]
fn duckdb_tables() {
    let Some(python) = duckdb() else {
        println!("SKIPPED: there is no duckdb in the target folder; scripts/setup installs it");
        return;
    };
    let python = python.to_str().expect("a plain path");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/tables.py");
    let folder = scratch();
    let made = plain(python).args([script, "make"]).current_dir(folder.path()).output().expect("it starts");
    assert!(made.status.success(), "{made:?}");
    let of = |way: &str| same_in(folder.path(), &[python, script, way]).served();
    let (parquet, csv) = (of("parquet"), of("csv"));
    let bytes = |name: &str| size(&folder.path().join(name));
    assert!(parquet >= bytes("table.parquet") / 10 * 9, "{parquet} bytes");
    assert!(csv >= bytes("table.csv"), "{csv} bytes");
    of("db");
    fs::remove_file(folder.path().join("table.db")).expect("the folder is ours");
}
