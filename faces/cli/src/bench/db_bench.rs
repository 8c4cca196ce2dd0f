//! Db_bench: RocksDB's own benchmark, as a program that is called and whose words are read.
//!
//! ```text
//!   readseq      :       7.500 micros/op 120000 ops/sec 4.000 seconds 480000 operations; 900.0 MB/s
//!   Percentiles: P50: 1.50 P75: 2.50 P99: 700.00 P99.9: 1500.00 P99.99: 4000.00
//! ```
//!
//! Nothing of it is changed; it does not know that it is measured. Older
//! versions leave out the seconds and the operations, which we do not need.

use std::path::Path;
use std::process::Command;

use quinion_cli::size::Size;

use super::harness::{Settings, Unmeasured};

/// What the program is called.
const PROGRAM: &str = "db_bench";

/// The databases and the work, where the command line says them.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Shape of readseq")]
pub struct Options {
    /// How many databases; 8 if not given, 2 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    dbs: Option<u32>,
    /// How many threads, each of which reads all of them; 8 if not given, 2 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    threads: Option<u32>,
    /// Keys of each database; 64000 if not given, 4000 in a quick run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    num: Option<u64>,
    /// What a value takes, in bytes; 8192 if not given.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    value_size: Option<u64>,
    /// RocksDB's own cache, such as 8M; 16G if not given.
    #[arg(long, value_name = "SIZE")]
    cache_size: Option<Size>,
}

/// The databases and the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    dbs: u32,
    threads: u32,
    num: u64,
    value_size: u64,
    cache_size: u64,
}

impl Shape {
    /// What the settings say, or the usual.
    pub fn of(settings: &Settings) -> Self {
        let options = &settings.db_bench;
        let cache_size = options.cache_size.map(|size| size.bytes(quinion::process_limit()));
        Self {
            dbs: options.dbs.unwrap_or(settings.pick(2, 8)),
            threads: options.threads.unwrap_or(settings.pick(2, 8)),
            num: options.num.unwrap_or(settings.pick(4_000, 64_000)),
            value_size: options.value_size.unwrap_or(8192),
            cache_size: cache_size.unwrap_or(16 << 30),
        }
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> u64 {
        u64::from(self.dbs) * self.num * self.value_size
    }

    fn arguments(&self, folder: &Path) -> Vec<String> {
        vec![
            format!("--num_multi_db={}", self.dbs),
            format!("--num={}", self.num),
            format!("--value_size={}", self.value_size),
            "--compression_type=none".to_owned(),
            format!("--db={}", folder.display()),
        ]
    }

    /// The words that write the databases into `folder`.
    pub fn fill(&self, folder: &Path) -> Vec<String> {
        let words = [PROGRAM, "--benchmarks=fillseq", "--disable_wal=1", "--threads=1"].map(str::to_owned);
        words.into_iter().chain(self.arguments(folder)).collect()
    }

    /// The words that read them.
    pub fn read(&self, folder: &Path) -> Vec<String> {
        let words =
            [PROGRAM, "--benchmarks=readseq", "--use_existing_db=1", "--histogram=1"].map(str::to_owned);
        let more = [format!("--threads={}", self.threads), format!("--cache_size={}", self.cache_size)];
        words.into_iter().chain(more).chain(self.arguments(folder)).collect()
    }
}

/// Whether there is such a program.
pub fn look_for_it() -> Result<(), Unmeasured> {
    Command::new(PROGRAM).arg("--version").output().map(|_| ()).map_err(|error| {
        Unmeasured::Missing(format!(
            "{PROGRAM} cannot be run: {error}; install it (Debian and Ubuntu: the package rocksdb-tools)"
        ))
    })
}

/// What it says of a benchmark.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BenchOutput {
    /// Operations a second of all threads together.
    pub ops_per_second: f64,
    /// Microseconds that half, three quarters, 99 of 100 and 999 of 1000 operations stay below.
    pub percentiles: [f64; 4],
}

/// What `text` says of `readseq`; `None` if it does not.
pub fn said(text: &str) -> Option<BenchOutput> {
    let mut lines = text.lines().skip_while(|line| !is_result(line));
    let ops_per_second = before(lines.next()?, "ops/sec")?;
    let percentiles = lines.find(|line| line.starts_with("Percentiles:"))?;
    let after = |name: &str| {
        let mut words = percentiles.split_whitespace().skip_while(|word| *word != name);
        words.nth(1)?.parse().ok()
    };
    let percentiles = [after("P50:")?, after("P75:")?, after("P99:")?, after("P99.9:")?];
    Some(BenchOutput { ops_per_second, percentiles })
}

fn is_result(line: &str) -> bool {
    line.split_once(':').is_some_and(|(name, _)| name.trim_end() == "readseq")
}

/// The number before `unit`.
fn before(line: &str, unit: &str) -> Option<f64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| *word == unit)?;
    words[at.checked_sub(1)?].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::harness::{Extent, Repeat};
    use std::path::PathBuf;

    const SAMPLE: &str = "\
Keys:       16 bytes each
Entries:    1000
------------------------------------------------
DB path: [/somewhere/readseq : 9 ops/sec]
readseq      :       7.500 micros/op 120000 ops/sec 4.000 seconds 480000 operations;  900.5 MB/s
Microseconds per read:
Count: 480000 Average: 7.5000  StdDev: 44.00
Min: 0  Median: 1.5000  Max: 7000
Percentiles: P50: 1.50 P75: 2.25 P99: 701.00 P99.9: 1500.00 P99.99: 4000.00
------------------------------------------------------
[       0,       1 ]   100000  20.833%  20.833% ####
";

    #[test]
    fn a_result_and_its_percentiles_are_found() {
        let said_of = |text: &str| said(text).map(|said| (said.ops_per_second, said.percentiles));
        assert_eq!(said_of(SAMPLE), Some((120_000.0, [1.5, 2.25, 701.0, 1500.0])));
        let older = SAMPLE.replace(" 4.000 seconds 480000 operations;", "");
        assert_eq!(said_of(&older), Some((120_000.0, [1.5, 2.25, 701.0, 1500.0])));
    }

    #[test]
    fn what_is_missing_is_not_made_up() {
        for gone in ["readseq      :", "ops/sec", "Percentiles:", "P75:", "P99.9:"] {
            assert_eq!(said(&SAMPLE.replace(gone, "?")), None, "{gone}");
        }
        assert_eq!(said(&SAMPLE.replace("701.00", "many")), None);
        assert_eq!(said("open error: IO error\n"), None);
    }

    #[test]
    fn a_shape_is_what_was_said_or_the_usual() {
        let settings = |db_bench| Settings {
            extent: Extent::Full,
            repeat: Repeat::Usual(1),
            folder: PathBuf::from("."),
            db_bench,
            ratio: Default::default(),
            programs: Default::default(),
        };
        let usual = Shape::of(&settings(Options::default()));
        assert_eq!(usual.bytes(), 8 * 64_000 * 8192);
        let told = Options { dbs: Some(3), cache_size: Some(Size::Bytes(8 << 20)), ..Options::default() };
        let told = Shape::of(&settings(told));
        assert_eq!(told, Shape { dbs: 3, cache_size: 8 << 20, ..usual });
        let words = told.read(Path::new("/f"));
        for word in ["--threads=8", "--cache_size=8388608", "--num_multi_db=3", "--db=/f"] {
            assert!(words.iter().any(|found| found == word), "{word} is not in {words:?}");
        }
    }
}
