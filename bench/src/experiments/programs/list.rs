//! List: the programs, and their command lines.
//!
//! To add one: a line in [`PROGRAMS`], with words that read files of `data.rs`, and that print the same each time. The
//! output of a program that behaves differently without a reader (grep, tar) is read.

use super::data::{BLOCKS, Data};
use super::turn::OutputCheck;
use super::{Extent, NOT_WORSE, REPEAT, REPEAT_LONG};
use crate::harness::Unmeasured;

pub struct Program {
    pub name: &'static str,
    /// The program's command line, given whether its files are in memory, Quinion's or the kernel's.
    pub words: Words,
    pub output_check: OutputCheck,
    /// The ratio wanted of its operations per second, if it counts them.
    pub warm_goal: f64,
    pub cold_goal: f64,
    pub repeat: usize,
    /// The extent of a run in which it represents its kind without being named; `None` if it runs only by name.
    pub stands: Option<Extent>,
}

pub type Words = fn(&Data, bool) -> Result<Vec<String>, Unmeasured>;

impl Program {
    const fn new(name: &'static str, words: Words) -> Self {
        let goal = NOT_WORSE;
        Self {
            name,
            words,
            output_check: OutputCheck::Output,
            warm_goal: goal,
            cold_goal: goal,
            repeat: REPEAT,
            stands: None,
        }
    }

    const fn checked_by(self, output_check: OutputCheck, cold_goal: f64, warm_goal: f64) -> Self {
        Self { output_check, cold_goal, warm_goal, ..self }.long()
    }

    const fn long(self) -> Self {
        Self { repeat: REPEAT_LONG, ..self }
    }

    const fn fio(name: &'static str, words: Words, warm_goal: f64) -> Self {
        Self::new(name, words).checked_by(OutputCheck::Fio, NOT_WORSE, warm_goal)
    }

    const fn db_bench(benchmark: &'static str, words: Words, warm_goal: f64) -> Self {
        Self::new(benchmark, words).checked_by(OutputCheck::DbBench(benchmark), 1.0, warm_goal)
    }

    const fn quick(self) -> Self {
        Self { stands: Some(Extent::Quick), ..self }
    }

    const fn full(self) -> Self {
        Self { stands: Some(Extent::Full), ..self }
    }
}

const AT_RANDOM: &str = "randread";
const IN_TURN: &str = "read";

pub const NOTHING: &str = "true";

/// Programs that do little but read come first.
pub const PROGRAMS: [Program; 40] = [
    Program::new(NOTHING, |_, _| plain(NOTHING)).quick(),
    Program::fio("fio randread, psync", |d, m| fio(d, m, "psync", AT_RANDOM), 1.3).quick(),
    Program::fio("fio read, psync", |d, m| fio(d, m, "psync", IN_TURN), 1.5).full(),
    Program::fio("fio randread, sync", |d, m| fio(d, m, "sync", AT_RANDOM), NOT_WORSE),
    Program::fio("fio randread, pvsync", |d, m| fio(d, m, "pvsync", AT_RANDOM), NOT_WORSE),
    Program::fio("fio randread, posixaio", |d, m| fio(d, m, "posixaio", AT_RANDOM), NOT_WORSE),
    Program::fio("fio randread, mmap", |d, m| fio(d, m, "mmap", AT_RANDOM), NOT_WORSE),
    Program::fio("fio randread, libaio", |d, m| fio(d, m, "libaio", AT_RANDOM), NOT_WORSE),
    Program::fio("fio randread, io_uring", |d, m| fio(d, m, "io_uring", AT_RANDOM), NOT_WORSE),
    Program::db_bench("readrandom", |d, _| db_bench(d, "readrandom"), 1.25).quick(),
    Program::db_bench("readseq", |d, _| db_bench(d, "readseq"), 1.1).full(),
    Program::db_bench("multireadrandom", |d, _| db_bench(d, "multireadrandom"), NOT_WORSE).full(),
    Program::new("sqlite3 scan", |_, _| sqlite("database")).quick(),
    Program::new("sqlite3 scan, immutable", |_, _| sqlite("file:database?immutable=1")),
    Program::new("sqlite3 by an index", |_, _| {
        sqlite_says(
            "database",
            "SELECT max(words) FROM line INDEXED BY by_scattered WHERE scattered < 400000000",
        )
    }),
    Program::new("duckdb parquet", |d, _| duckdb(d, "'table.parquet'")),
    Program::new("duckdb csv", |d, _| duckdb(d, "'table.csv'")),
    Program::new("duckdb db", |d, _| duckdb(d, "t")),
    Program::new("python3 read", |d, _| python(d, "print(len(open('binary', 'rb').read()))")).quick(),
    Program::new("python3 lines", |d, _| python(d, "print(sum('the' in line for line in open('text')))")),
    Program::new("python3 blocks", |d, _| python(d, PYTHON_BLOCKS)),
    Program::new("python3 mmap", |d, _| python(d, PYTHON_MMAP)),
    Program::new("python3 copyfile", |d, _| python(d, PYTHON_COPY)),
    Program::new("python3 sqlite3", |d, _| python(d, PYTHON_SQLITE)),
    Program::new("git fsck", |_, _| shell("cd repository && git fsck --full")).quick(),
    Program::new("git cat-file", |_, _| shell(GIT_ALL)),
    Program::new("git grep", |_, _| shell("cd repository && git grep -c longer | cat")),
    Program::new("git log", |_, _| shell("cd repository && git log -p | cksum")),
    Program::new("rg file", |_, _| shell("rg -c the text")),
    Program::new("rg folder", |_, _| shell("rg -c longer many | sort")).quick(),
    Program::new("grep", |_, _| shell("grep -c the text | cat")),
    Program::new("cat", |_, _| shell("cat binary > /dev/null")).quick(),
    Program::new("cat many", |_, _| shell("cat many/* > /dev/null")),
    Program::new("wc", |_, _| plain("wc -l text")),
    Program::new("sort", |_, _| shell("sort -S 512M text | tail -n 1")).long().quick(),
    Program::new("sha256sum", |_, _| plain("sha256sum text")),
    Program::new("tar", |_, _| shell("tar cf - binary many | cat > /dev/null")),
    Program::new("gzip", |_, _| shell("gzip -1 -c text | cksum")).long(),
    Program::new("dd", |_, _| plain("dd if=binary of=/dev/null bs=64k status=none")),
    Program::new("cp", |_, _| shell("cp binary copied && rm copied")),
];

const PYTHON_BLOCKS: &str = "
import os
fd, total, at = os.open('binary', os.O_RDONLY), 0, 1
size = os.fstat(fd).st_size // 4096
for _ in range(20000):
    at = (at * 1103515245 + 12345) % 2147483648
    total += os.pread(fd, 4096, at % size * 4096)[0]
print(total)";
const PYTHON_MMAP: &str = "
import mmap
with open('binary', 'rb') as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as seen:
    print(sum(seen[at] for at in range(0, len(seen), 4096)))";
const PYTHON_COPY: &str = "
import os, shutil
shutil.copyfile('binary', 'copied')
print(os.path.getsize('copied'))
os.remove('copied')";
const PYTHON_SQLITE: &str = "
import sqlite3
line = sqlite3.connect('file:database?mode=ro', uri=True)
print(line.execute('SELECT count(*), sum(scattered), max(words) FROM line').fetchall())";
const GIT_ALL: &str =
    "cd repository && git rev-list --objects --all | cut -d' ' -f1 | git cat-file --batch | cksum";

fn plain(words: &str) -> Result<Vec<String>, Unmeasured> {
    Ok(words.split(' ').map(str::to_owned).collect())
}

/// A script fails if any command of a pipe fails.
fn shell(script: &str) -> Result<Vec<String>, Unmeasured> {
    Ok(["bash", "-o", "pipefail", "-c", script].map(str::to_owned).to_vec())
}

/// Blocks of 4 KiB. Cold, an eighth of the file at random, since the device answers one by one; or the file in order.
/// In memory, no more distinct blocks than the file has, for long enough to be measured.
fn fio(data: &Data, is_in_memory: bool, engine: &str, way: &str) -> Result<Vec<String>, Unmeasured> {
    let bytes = data.file_bytes();
    let read = match data.extent() {
        Extent::Full if is_in_memory => 2 * bytes,
        Extent::Full if way == AT_RANDOM => bytes / 8,
        _ => bytes,
    };
    let words = ["fio", "--name=blocks", "--output-format=terse", "--thread", "--invalidate=0", "--bs=4k"];
    let more = [
        format!("--filename={BLOCKS}"),
        format!("--size={bytes}"),
        format!("--io_size={read}"),
        format!("--ioengine={engine}"),
        format!("--rw={way}"),
        "--randseed=7".to_owned(),
        "--norandommap".to_owned(),
    ];
    let depth = matches!(engine, "posixaio" | "libaio" | "io_uring").then(|| "--iodepth=8".to_owned());
    Ok(words.map(str::to_owned).into_iter().chain(more).chain(depth).collect())
}

/// RocksDB's own cache is small, so that its reads become reads of files.
fn db_bench(data: &Data, benchmark: &str) -> Result<Vec<String>, Unmeasured> {
    let reads = if benchmark == "readseq" { -1 } else { data.reads() as i64 };
    let words = ["db_bench", "--use_existing_db=1", "--threads=2", "--seed=5", "--verify_checksum=1"];
    let more =
        [format!("--benchmarks={benchmark}"), format!("--reads={reads}"), "--cache_size=1000000".to_owned()];
    Ok(words.map(str::to_owned).into_iter().chain(more).chain(data.db_bench_shape()).collect())
}

fn sqlite(database: &str) -> Result<Vec<String>, Unmeasured> {
    sqlite_says(database, "SELECT count(*), sum(scattered), max(words) FROM line")
}

fn sqlite_says(database: &str, question: &str) -> Result<Vec<String>, Unmeasured> {
    Ok(["sqlite3", "-readonly", database, question].map(str::to_owned).to_vec())
}

fn python(data: &Data, script: &str) -> Result<Vec<String>, Unmeasured> {
    Ok(vec![data.python()?, "-c".to_owned(), script.to_owned()])
}

fn duckdb(data: &Data, table: &str) -> Result<Vec<String>, Unmeasured> {
    let python = data.tables()?;
    let script = format!(
        "import duckdb; c = duckdb.connect('table.db', read_only=True); \
         print(c.sql(\"SELECT count(*), sum(scattered), max(words) FROM {table}\").fetchall())"
    );
    Ok(vec![python, "-c".to_owned(), script])
}
