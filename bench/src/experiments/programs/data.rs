//! Data: what the programs read, made once in a scratch folder and written to the device.
//!
//! ```text
//!   binary     without any pattern, in whole blocks     text       lines that say their numbers
//!   many/      the same lines in small files            database   sqlite's, of lines like these
//!   rocks/     db_bench's database                      repository/  git's, packed, of the files of `many`
//!   table.*    duckdb's: its own, Parquet and CSV; made when a program wants them
//! ```
//!
//! What needs a program that is missing is left out, and its programs say so.

use std::cell::OnceCell;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::turn::plain;
use crate::fixtures::caches::Drops;
use crate::harness::folder::ScratchFolder;
use crate::harness::{Extent, Settings, Unmeasured};

pub const BLOCKS: &str = "binary";
const OPEN_MAX: usize = 200;
/// Where scripts/setup puts duckdb, from the folder in which cargo puts this program.
const DUCKDB: &str = "../tools/duckdb-2.0.0/bin/python";
const VALUE_BYTES: u64 = 1000;

pub struct Data {
    folder: ScratchFolder,
    extent: Extent,
    file_bytes: u64,
    python: OnceCell<Result<String, Unmeasured>>,
    tables: OnceCell<Result<String, Unmeasured>>,
}

impl Data {
    pub fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let data = Self {
            folder: ScratchFolder::new(&settings.folder)?,
            extent: settings.extent,
            file_bytes: settings.pick(8, 256) << 20,
            python: OnceCell::new(),
            tables: OnceCell::new(),
        };
        let path = data.path();
        write_noise(&path.join(BLOCKS), data.file_bytes)?;
        write_text(&path.join("text"), data.file_bytes / 2, 0)?;
        fs::create_dir(path.join("many"))?;
        for file in 0..settings.pick(100, 1000) {
            write_text(&path.join(format!("many/{file:04}")), file * 97, file)?;
        }
        for make in [Self::make_database, Self::make_rocks, Self::make_repository] {
            if let Err(why @ Unmeasured::Failed(_)) = make(&data) {
                return Err(why);
            }
        }
        sync(path)?;
        Ok(data)
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn extent(&self) -> Extent {
        self.extent
    }

    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    pub fn reads(&self) -> u64 {
        self.keys() / 2
    }

    fn keys(&self) -> u64 {
        self.file_bytes / VALUE_BYTES
    }

    pub fn db_bench_shape(&self) -> [String; 4] {
        [
            "--db=rocks".to_owned(),
            format!("--num={}", self.keys()),
            format!("--value_size={VALUE_BYTES}"),
            "--compression_type=none".to_owned(),
        ]
    }

    pub fn memory(&self) -> u64 {
        self.file_bytes * 5 + (64 << 20)
    }

    /// Evicts all of it from the kernel's memory. The programs stay there: reading them is not part of the question.
    pub fn make_cold(&self) -> Result<(), Unmeasured> {
        let mut files = Vec::new();
        take_files(self.path(), &mut files)?;
        files.chunks(OPEN_MAX).try_for_each(|paths| {
            let open: std::io::Result<Vec<File>> = paths.iter().map(File::open).collect();
            let open = open?;
            open.iter().try_for_each(File::sync_all)?;
            Drops::OurFiles.make_cold(&open)
        })
    }

    /// The interpreter itself, and not a script that finds it.
    pub fn python(&self) -> Result<String, Unmeasured> {
        let find = || {
            let mut command = Command::new("python3");
            command.args(["-c", "import sys; print(sys.executable)"]);
            let output = finish(command, self.path())?;
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        self.python.get_or_init(find).clone()
    }

    pub fn tables(&self) -> Result<String, Unmeasured> {
        let make = || {
            let beside = std::env::current_exe()?.parent().map(|folder| folder.join(DUCKDB));
            let ours = beside.filter(|path| path.exists()).map(|path| path.display().to_string());
            let python = ours.map_or_else(|| self.python(), Ok)?;
            let mut probe = Command::new(&python);
            probe.args(["-c", "import duckdb"]);
            finish(probe, self.path()).map_err(|_| {
                Unmeasured::Missing(
                    "there is no duckdb beside this program or in python3; scripts/setup installs it"
                        .to_owned(),
                )
            })?;
            let rows = self.file_bytes / 100;
            let script = format!(
                "import duckdb\nwith duckdb.connect('table.db') as c:\n \
                 c.sql('CREATE TABLE t AS SELECT i, hash(i) AS scattered, md5(i::VARCHAR) AS words \
                 FROM range({rows}) AS r(i)')\n \
                 c.sql(\"COPY t TO 'table.parquet'\")\n c.sql(\"COPY t TO 'table.csv'\")"
            );
            let mut make = Command::new(&python);
            make.args(["-c", &script]);
            finish(make, self.path())?;
            sync(self.path())?;
            Ok(python)
        };
        self.tables.get_or_init(make).clone()
    }

    fn make_database(&self) -> Result<(), Unmeasured> {
        let rows = self.file_bytes / 1000;
        let statements = format!(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;
             CREATE TABLE line(id INTEGER PRIMARY KEY, scattered INTEGER, words TEXT);
             WITH RECURSIVE counted(n) AS (SELECT 0 UNION ALL SELECT n+1 FROM counted WHERE n < {rows})
                 INSERT INTO line SELECT n, (n * 2654435761) % 4294967296, printf('%0230d', n * n) FROM counted;
             CREATE INDEX by_scattered ON line(scattered);"
        );
        let mut command = Command::new("sqlite3");
        command.args(["database", &statements]);
        finish(command, self.path()).map(|_| ())
    }

    fn make_rocks(&self) -> Result<(), Unmeasured> {
        let mut command = Command::new("db_bench");
        command.args(["--benchmarks=fillseq", "--disable_wal=1", "--threads=1"]).args(self.db_bench_shape());
        finish(command, self.path()).map(|_| ())
    }

    fn make_repository(&self) -> Result<(), Unmeasured> {
        let script = "
            git init -q repository && cd repository && git config gc.auto 0 && git config user.name a &&
            git config user.email a@example.org && cp -r ../many . && git add . && git commit -q -m all &&
            for i in 1 2 3 4 5; do echo more >> many/000$i; git commit -q -a -m $i || exit; done &&
            git repack -q -a -d";
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        finish(command, self.path()).map(|_| ())
    }
}

fn finish(mut command: Command, folder: &Path) -> Result<Output, Unmeasured> {
    plain(&mut command);
    let program = command.get_program().display().to_string();
    let output = command.current_dir(folder).output().map_err(|error| {
        Unmeasured::Missing(format!("{program} cannot be run: {error}; scripts/setup installs it"))
    })?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(match output.status.code() {
        Some(127) => Unmeasured::Missing(said.into_owned()),
        _ => Unmeasured::Failed(format!("{program} ended with {}: {}", output.status, said.trim_end())),
    })
}

fn take_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Unmeasured> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            take_files(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn sync(folder: &Path) -> Result<(), Unmeasured> {
    let mut files = Vec::new();
    take_files(folder, &mut files)?;
    files.iter().try_for_each(|path| Ok(File::open(path)?.sync_all()?))
}

fn write_noise(path: &Path, bytes: u64) -> Result<(), Unmeasured> {
    let (mut file, mut state) = (BufWriter::new(File::create(path)?), 0x9e37_79b9_7f4a_7c15_u64);
    for _ in 0..bytes / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.write_all(&state.to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// At least so many bytes of lines, those of each `seed` different.
fn write_text(path: &Path, bytes: u64, seed: u64) -> Result<(), Unmeasured> {
    let (mut file, mut written, mut line) = (BufWriter::new(File::create(path)?), 0, String::new());
    for number in seed << 20.. {
        if written >= bytes {
            break;
        }
        let scattered = u64::wrapping_mul(number, 0x9e37_79b9_7f4a_7c15) >> 40;
        line.clear();
        let _ = match number % 3 {
            0 => writeln!(line, "{scattered:08x} is the line {number}"),
            1 => writeln!(line, "{scattered:08x} line {number}"),
            _ => writeln!(line, "{scattered:08x} other {number} the longer by some words than all the rest"),
        };
        file.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    Ok(file.flush()?)
}
