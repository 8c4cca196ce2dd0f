//! Suites: other projects' tests, with the cache and without; none may differ.
//!
//! ```text
//!   a command of a suite --alone------------------> results by name --.
//!                        --run------------------->  results by name ---+--> what differs, run twice more
//!                        --run --attach at-once-->  results by name --'         `-- differs each time: a failure
//! ```
//!
//! A test need not pass: some fail here without the cache, for what this machine is. It must do the same with it. A
//! command's own end is a result, too, by the name `exit`. A test may also fail now and then by itself, so what differs
//! is run twice more, each way, and named if it differed each time.
//!
//! Each command runs in an empty folder of its own below `target/suites`, which also keeps its output each way, and the
//! reports. `suite/prefix` on the command line names the commands of a suite that begin so.
//!
//! `scripts/setup --suites` installs what is in packages; what is missing is skipped with words. LTP is in no package
//! of Debian 12: `LTP_ROOT` names a folder where it was installed. SQLite's own tests are in its source only:
//! `SQLITE_TESTFIXTURE` names the program that it builds, and `SQLITE_SOURCE` its tree.
//!
//! `sqlite-vfs` compares the same tests with the extension for SQLite in place of `run`: each database is read through
//! it. It caches pages of 4 KiB and more, and SQLite's tests have smaller ones unless the program is built otherwise:
//!
//! ```text
//!   sed -i 's/DEFAULT_PAGE_SIZE=1024/DEFAULT_PAGE_SIZE=4096/' Makefile.in
//!   ./configure --enable-load-extension && make testfixture
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::step::{Action, Failure, Step, execute};
use crate::tools::{cargo, repository, target_folder};

const FOLDER: &str = "target/suites";
const REPEATS: u32 = 2;
/// After which a command is ended, which is a result: so a hang with the cache alone is a difference.
const COMMAND_SECONDS: u32 = 900;
const PYTHON: &str = "/usr/bin/python3.11";
const POSTGRES: &str = "/usr/lib/postgresql/15/bin";

const PYTHON_MODULES: &str = "test_io test_os test_subprocess test_mmap test_asyncio test_zipfile test_tarfile \
    test_socket test_threading test_file test_fileio test_fcntl test_shutil test_tempfile test_posix \
    test_pathlib test_dbm test_shelve test_multiprocessing_fork test_selectors test_largefile";
/// Stressors of file operations that verify what they wrote.
const STRESSORS: &str = "aiol copy-file dup fallocate fcntl file-ioctl fpunch hdd iomix io-uring lockf lockofd mmap \
    mmapfork msync readahead rename seek sendfile splice sync-file tee vm-splice zero";
const LTP_FAMILIES: &str = "\
    read pread preadv readv readahead write pwrite pwritev writev dup fcntl lseek llseek mmap munmap \
    mremap msync madvise mlock mprotect fork vfork clone exec execveat sendfile sendmsg sendmmsg splice \
    tee vmsplice copy_file_range open openat creat close link unlink rename stat statx fstat utime \
    truncate ftruncate fallocate fsync fdatasync sync_file_range posix_fadvise inotify fanotify umount \
    seccomp setuid prctl pipe";
/// A test that makes process numbers go round, which takes minutes and is none of a cache's business.
const LTP_WITHOUT: &str = "fork13";
/// The tests of its pager, locks, logs and backups; not those that break off at random, and have other tests each time.
const SQLITE_FILES: &str = "\
    pager1 pager2 pager3 pager4 pageropt lock lock2 lock3 lock4 lock5 lock6 lock7 wal wal2 wal3 wal4 \
    wal5 wal6 wal7 wal8 wal9 wal64k walbak walblock walcksum walhook walmode walnoshm waloverwrite \
    walpersist walprotocol walro walro2 walshared walvfs walcrash4 backup backup2 backup4 backup5 \
    backup_malloc journal1 journal2 journal3 mmap1 mmap2 mmap3 mmap4 exclusive exclusive2 io shared \
    shared2 shared3 sharedlock incrvacuum incrvacuum2 tempdb atomic atomic2 multiplex zerodamage bigfile";

/// More of them, for the extension: SQL that reads much, and what depends on a file's pages.
const SQLITE_VFS_FILES: &str = "\
    select1 select2 select4 insert insert2 update delete delete2 index index2 trans trans2 savepoint savepoint2 \
    savepoint6 rollback join subquery view vacuum vacuum2 vacuum3 autovacuum autovacuum2 alter attach2 attach3 \
    pagesize pragma2 cache corrupt corrupt2 quota memdb tempfault ioerr2 rollbackfault readonly uri";
/// Files that are not run with the extension, and why.
const SQLITE_VFS_WITHOUT: [(&str, &str); 5] = [
    ("mmap1", "counts the reads that maps spare: the extension has none, so `mmap_size` is 0"),
    ("mmap2", "as mmap1"),
    ("mmap3", "as mmap1"),
    ("mmap4", "as mmap1"),
    (
        "walvfs",
        "its own VFS below the databases counts the calls that reach it: a page of the cache makes none",
    ),
];
const SQLITE_VFS: &str = "sqlite-vfs";

/// Accepted differences: the suite, the command, the prefixes of its tests' names, and why.
const EXPLAINED: [(&str, &str, &[&str], &str); 3] = [
    (
        "ltp",
        "readahead02",
        // The lines are those of two versions of LTP.
        &[
            "readahead02.c:352",
            "readahead02.c:353",
            "readahead02.c:370",
            "readahead02.c:371",
            "exit",
            "summary",
        ],
        "what it wants read ahead is read into our cache; it looks for it in the kernel's, by mincore",
    ),
    ("sqlite-vfs", "incrvacuum", &["incrvacuum-16.1"], "sets `mmap_size`, which is 0 here"),
    (
        "sqlite-vfs",
        "wal4",
        &["wal4-2-ioerr"],
        "fails the first call of the system, then the second, and so on; a page of the cache makes none",
    ),
];

struct Case {
    name: String,
    /// For a shell in an empty folder; `SOURCE` is this repository.
    script: String,
    /// The command with the cache, where that is not the same under `quinion run`.
    with: Option<String>,
    /// The user that it runs as where xtask is run by root; the folder is that user's.
    user: Option<&'static str>,
}

struct Suite {
    name: &'static str,
    cases: Result<Vec<Case>, String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Alone,
    Default,
    AtOnce,
}

const WITH: [Way; 2] = [Way::Default, Way::AtOnce];

type Results = BTreeMap<String, String>;

#[derive(Default)]
struct Row {
    tests: usize,
    passed: [usize; 3],
    bytes: [u64; 3],
    differing: BTreeSet<String>,
}

pub fn step() -> Step {
    Step::new("suites", Action::Call(|| run(&[])))
}

/// Runs the suites that `words` name, or all, `suite/prefix` only the commands of it that begin so; `--json` prints
/// rows for programs, `--quick` takes one command of each eight.
pub fn run(words: &[String]) -> Result<(), Failure> {
    let (options, names): (Vec<&String>, Vec<&String>) =
        words.iter().partition(|word| word.starts_with("--"));
    let has = |option: &str| options.iter().any(|word| *word == option);
    if let Some(unknown) = options.iter().find(|word| !matches!(word.as_str(), "--json" | "--quick")) {
        return Err(Failure::new(format!("`{unknown}` is not an option of `suites`")));
    }
    let all = suites();
    let split = |name: &&String| match name.split_once('/') {
        Some((suite, prefix)) => (suite.to_owned(), prefix.to_owned()),
        None => ((*name).clone(), String::new()),
    };
    let names: Vec<(String, String)> = names.iter().map(split).collect();
    if let Some((unknown, _)) = names.iter().find(|(name, _)| all.iter().all(|suite| suite.name != name)) {
        let known: Vec<&str> = all.iter().map(|suite| suite.name).collect();
        return Err(Failure::new(format!("there is no suite `{unknown}`; there are {}", known.join(", "))));
    }
    let is_asked = |suite: &str| names.is_empty() || names.iter().any(|(name, _)| name == suite);
    let quinion = if all.iter().any(|suite| suite.name != SQLITE_VFS && is_asked(suite.name)) {
        build()?
    } else {
        PathBuf::new() // of no use to the one suite that is left
    };
    let mut differing = 0;
    for suite in all {
        let asked = |case: &str| {
            names.is_empty()
                || names.iter().any(|(name, prefix)| name == suite.name && case.starts_with(prefix))
        };
        if !is_asked(suite.name) {
            continue;
        }
        let cases = match suite.cases {
            Ok(cases) => cases,
            Err(why) => {
                println!("SKIPPED {}: {why}", suite.name);
                continue;
            }
        };
        if suite.name == SQLITE_VFS {
            let mut build =
                cargo("build --release --locked --manifest-path frontends/sqlite/Cargo.toml --target-dir");
            execute(build.arg(target_folder().join("sqlite")))?;
        }
        let step = if has("--quick") { 8 } else { 1 };
        let cases = cases.iter().filter(|case| asked(&case.name)).step_by(step);
        let row = run_suite(suite.name, cases, &quinion)?;
        println!("{}", if has("--json") { row.json(suite.name) } else { row.text(suite.name) });
        differing += row.differing.len();
    }
    if differing == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("{differing} tests differ with the cache; see above")))
    }
}

fn build() -> Result<PathBuf, Failure> {
    let status = cargo("build --release -p quinion-cli").status();
    if !status.is_ok_and(|status| status.success()) {
        return Err(Failure::new("`cargo build --release -p quinion-cli` failed".to_owned()));
    }
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    Ok(target.join("release/quinion"))
}

fn run_suite<'a>(name: &str, cases: impl Iterator<Item = &'a Case>, quinion: &Path) -> Result<Row, Failure> {
    let mut row = Row::default();
    for case in cases {
        let mut run = |way: Way| -> Result<Results, Failure> {
            let (results, bytes) = run_case(name, case, way, quinion)?;
            row.bytes[way as usize] += bytes;
            Ok(results)
        };
        let alone = run(Way::Alone)?;
        // A command of its own has one way: it stands for both.
        let default = run(Way::Default)?;
        let at_once = if case.with.is_some() { default.clone() } else { run(Way::AtOnce)? };
        let with = [default, at_once];
        let mut differ: Vec<BTreeSet<String>> = with.iter().map(|with| differing(&alone, with)).collect();
        differ.truncate(if case.with.is_some() { 1 } else { WITH.len() });
        for _ in 0..REPEATS {
            if differ.iter().all(BTreeSet::is_empty) {
                break;
            }
            let alone = run(Way::Alone)?;
            for (differ, way) in differ.iter_mut().zip(WITH).filter(|(differ, _)| !differ.is_empty()) {
                let now = differing(&alone, &run(way)?);
                differ.retain(|test| now.contains(test));
            }
        }
        for (differ, (way, with)) in differ.iter().zip(WITH.iter().zip(&with)) {
            for test in differ {
                let said =
                    |results: &Results| results.get(test).map_or("(not there)".to_owned(), String::clone);
                let why = explained(name, &case.name, test);
                let word = if why.is_some() { "EXPLAINED" } else { "DIFFERS" };
                let because = why.map_or(String::new(), |why| format!(": {why}"));
                println!(
                    "{word} {name} {} {test}: {way:?} {}, alone {}{because}",
                    case.name,
                    said(with),
                    said(&alone)
                );
                if why.is_none() {
                    row.differing.insert(format!("{} {test} ({way:?})", case.name));
                }
            }
        }
        row.tests += alone.len();
        for (passed, results) in row.passed.iter_mut().zip([&alone, &with[0], &with[1]]) {
            *passed += results.values().filter(|result| is_good(result)).count();
        }
    }
    Ok(row)
}

/// Removes a folder and what is in it, but not what a test left mounted there.
fn clear(folder: &Path) -> std::io::Result<()> {
    // The fifth field is the place; the last line is the latest mount.
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let left: Vec<&Path> = places.filter(|place| place.starts_with(folder)).collect();
    for place in left.into_iter().rev() {
        if !Command::new("umount").arg("--lazy").arg(place).status()?.success() {
            return Err(std::io::Error::other(format!("{} stays mounted", place.display())));
        }
    }
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn is_good(result: &str) -> bool {
    // A long one is the checksum of an output.
    matches!(result, "ok" | "0" | "TPASS" | "Ok") || result.len() >= 64
}

fn explained(suite: &str, case: &str, test: &str) -> Option<&'static str> {
    let is = |(of, command, tests, _): &&(&str, &str, &[&str], &str)| {
        *of == suite && *command == case && tests.iter().any(|begin| test.starts_with(begin))
    };
    EXPLAINED.iter().find(is).map(|(_, _, _, why)| *why)
}

fn differing(alone: &Results, with: &Results) -> BTreeSet<String> {
    let names: BTreeSet<&String> = alone.keys().chain(with.keys()).collect();
    names.into_iter().filter(|name| alone.get(*name) != with.get(*name)).cloned().collect()
}

fn run_case(suite: &str, case: &Case, way: Way, quinion: &Path) -> Result<(Results, u64), Failure> {
    let folder = repository().join(FOLDER).join(suite).join(&case.name);
    let work = folder.join("work");
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", folder.display()));
    clear(&work).map_err(failed)?;
    fs::create_dir_all(&work).map_err(failed)?;
    let is_under_run = way != Way::Alone && case.with.is_none();
    let script = case.with.as_ref().filter(|_| way != Way::Alone).unwrap_or(&case.script);
    let (report, shell) = (folder.join(format!("report-{way:?}")), ["sh", "-c", script]);
    let _ = fs::remove_file(&report);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=20", &COMMAND_SECONDS.to_string()]);
    if let Some(user) = case.user.filter(|_| is_root()) {
        // The owner too: it serves programs of its own user only.
        command.arg("setpriv").args([
            &format!("--reuid={user}"),
            &format!("--regid={user}"),
            "--clear-groups",
        ]);
        command.env("HOME", &work);
        for folder in [&folder, &work] {
            let given = Command::new("chown").arg(user).arg(folder).status();
            if !given.is_ok_and(|status| status.success()) {
                return Err(Failure::new(format!("{} cannot be given to {user}", folder.display())));
            }
        }
    }
    if is_under_run {
        command.arg(quinion).args(["run", "--report", "json", "--report-file"]).arg(&report);
        command.args(if way == Way::AtOnce { &["--attach", "at-once", "--"][..] } else { &["--"] });
    }
    command.args(shell).current_dir(&work).env("SOURCE", repository()).env("LC_ALL", "C");
    // The users' wait for the owner, and not that of Quinion's own tests.
    command.stdin(Stdio::null()).env_remove("QUINION_WAIT_MS");
    // Each in a file: a pipe ends only when all processes that a command leaves behind have ended.
    let said = folder.join(format!("said-{way:?}"));
    let file = fs::File::create(&said).map_err(failed)?;
    let start = Instant::now();
    let status = command.stdout(file.try_clone().map_err(failed)?).stderr(file).status().map_err(failed)?;
    let seconds = start.elapsed().as_secs();
    let _ = clear(&work); // who is left behind may still write; the next run says so
    let said = fs::read(&said).map_err(failed)?;
    let said = String::from_utf8_lossy(&said);
    let mut results = results(&said);
    results
        .insert("exit".to_owned(), status.code().map_or_else(|| status.to_string(), |code| code.to_string()));
    let reported = fs::read_to_string(&report).ok().and_then(|report| served(&report));
    let bytes = reported.or_else(|| pages_served(&said).map(|pages| pages * 4096)).unwrap_or(0);
    println!(
        "   {suite} {} {way:?}: {} tests, ended with {status} after {seconds} s, {bytes} bytes served",
        case.name,
        results.len()
    );
    Ok((results, bytes))
}

/// The lines of an output that are results: unittest's `name (class) ... ok`, LTP's `file.c:1: TPASS: words`,
/// SQLite's `name... Ok`, and xtask's own `result name: words`.
fn results(said: &str) -> Results {
    let mut results = Results::new();
    let mut insert = |name: &str, result: &str| {
        let taken = |name: &String| results.contains_key(name);
        let names = (1..).map(|n| if n == 1 { name.to_owned() } else { format!("{name} ({n})") });
        let name = names.into_iter().find(|name| !taken(name)).expect("there are more names than results");
        results.insert(name, result.to_owned());
    };
    let mut worst = Results::new();
    let mut unsaid: Option<&str> = None;
    for line in said.lines() {
        if let Some((name, result)) = line.strip_prefix("result ").and_then(|l| l.split_once(": ")) {
            insert(name, result);
        } else if let Some((place, result, words)) = ltp_line(line) {
            // The worst of them stands for all of one name: how often a loop says so varies.
            let words = words.split_whitespace().filter(|word| word.chars().all(char::is_alphabetic));
            let name = format!("{place} {}", words.collect::<Vec<_>>().join(" "));
            let said = worst.entry(name).or_insert_with(|| result.to_owned());
            if rank(result) > rank(said) {
                result.clone_into(said);
            }
        } else if let Some((name, number)) = ltp_count(line) {
            insert(&format!("summary {name}"), number);
        } else if let Some((name, words)) = line.rsplit_once(" ... ") {
            // The test's own output may stand between its name and its result.
            unsaid.take().into_iter().for_each(|name| insert(name, "(said otherwise)"));
            match unittest_verdict(words) {
                Some(result) => insert(name, result),
                None => unsaid = Some(name),
            }
        } else if let Some((name, "Ok")) = line.rsplit_once("... ") {
            insert(name, "Ok");
        } else if let (Some(name), Some(result)) = (unsaid, unittest_verdict(line)) {
            insert(name, result);
            unsaid = None;
        }
    }
    unsaid.into_iter().for_each(|name| insert(name, "(said otherwise)"));
    results.extend(worst);
    results
}

fn unittest_verdict(words: &str) -> Option<&'static str> {
    const VERDICTS: [&str; 6] = ["ok", "FAIL", "ERROR", "skipped", "expected failure", "unexpected success"];
    VERDICTS
        .into_iter()
        .find(|verdict| words == *verdict || words.starts_with("skipped '") && *verdict == "skipped")
}

const VERDICTS: [&str; 4] = ["TPASS", "TCONF", "TBROK", "TFAIL"];

fn rank(verdict: &str) -> usize {
    VERDICTS.iter().position(|known| *known == verdict).unwrap_or(VERDICTS.len())
}

/// `file.c:1: TPASS: words`, or of older tests `file01    1  TPASS  :  words`, in parts.
fn ltp_line(line: &str) -> Option<(&str, &str, &str)> {
    let (place, verdict, words) = if let Some((test, words)) = line.split_once(" : ") {
        let (place, verdict) = test.trim_end().rsplit_once(' ')?;
        (place.trim_end(), verdict, words)
    } else {
        let (place, rest) = line.split_once(": ")?;
        let (verdict, words) = rest.split_once(": ")?;
        (place, verdict, words)
    };
    VERDICTS.contains(&verdict).then_some((place, verdict, words))
}

/// `passed   78`, of LTP's summary: shows that a loop says something less often.
fn ltp_count(line: &str) -> Option<(&str, &str)> {
    let (name, number) = line.split_once(' ')?;
    let number = number.trim_start();
    (["passed", "failed", "broken", "skipped"].contains(&name) && number.parse::<u64>().is_ok())
        .then_some((name, number))
}

fn served(report: &str) -> Option<u64> {
    let bytes = report.split_once("\"served\":{")?.1.split_once("\"bytes\":")?.1;
    bytes[..bytes.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

/// Pages of 4 KiB or more, as `default_vfs.tcl` says at its end.
fn pages_served(said: &str) -> Option<u64> {
    let stats = said.lines().find_map(|line| line.strip_prefix("quinion_stats "))?;
    let hits = stats.split_once("\"hits\":")?.1;
    hits[..hits.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

impl Row {
    fn text(&self, name: &str) -> String {
        let Self { tests, passed: [alone, default, at_once], bytes, differing } = self;
        format!(
            "| {name} | {tests} | {alone} | {default} | {at_once} | {} | {} | {} |",
            differing.len(),
            bytes[1],
            bytes[2]
        )
    }
    fn json(&self, name: &str) -> String {
        let Self { tests, passed: [alone, default, at_once], bytes, differing } = self;
        let quoted = |test: &String| format!("\"{}\"", test.replace('\\', "\\\\").replace('"', "\\\""));
        let names: Vec<String> = differing.iter().map(quoted).collect();
        format!(
            "{{\"suite\":\"{name}\",\"tests\":{tests},\"without\":{alone},\"with\":{default},\"at_once\":{at_once},\
             \"differing\":[{}],\"served_bytes\":{},\"served_bytes_at_once\":{}}}",
            names.join(","),
            bytes[1],
            bytes[2]
        )
    }
}

fn suites() -> Vec<Suite> {
    let suite = |name, cases| Suite { name, cases };
    vec![
        suite("cpython", cpython()),
        suite("stress-ng", stress_ng()),
        suite("git", git()),
        suite("build", Ok(vec![case("check", BUILD)])),
        suite("postgres", postgres()),
        suite("sqlite", sqlite()),
        suite(SQLITE_VFS, sqlite_vfs()),
        suite("ltp", ltp()),
    ]
}

fn case(name: &str, script: &str) -> Case {
    Case { name: name.to_owned(), script: script.to_owned(), with: None, user: None }
}

fn there(path: impl AsRef<Path>, why: &str) -> Result<(), String> {
    let path = path.as_ref();
    if path.exists() { Ok(()) } else { Err(format!("there is no {}: {why}", path.display())) }
}

const SETUP: &str = "scripts/setup --suites installs it";

fn cpython() -> Result<Vec<Case>, String> {
    there(PYTHON, SETUP)?;
    there("/usr/lib/python3.11/test/test_io.py", SETUP)?;
    // In a virtual machine the tests of VSOCK wait for ever for a host that does not connect.
    let test = "-m test -v -i '*VSOCK*'";
    let script = |module: &str| case(module, &format!("HOME=$PWD TMPDIR=$PWD exec {PYTHON} {test} {module}"));
    let module = |name: &&str| {
        ["", ".py"]
            .iter()
            .any(|end| Path::new("/usr/lib/python3.11/test").join(format!("{name}{end}")).exists())
    };
    Ok(PYTHON_MODULES.split_whitespace().filter(module).map(script).collect())
}

fn stress_ng() -> Result<Vec<Case>, String> {
    there("/usr/bin/stress-ng", SETUP)?;
    // So many operations, not so much time: so a slower run has the same result.
    let script = |name: &str| {
        let command = "stress-ng --verify --temp-path . --timeout 20 --metrics-brief --oomable";
        case(name, &format!("{command} --{name} 2 --{name}-ops 200"))
    };
    Ok(STRESSORS.split_whitespace().map(script).collect())
}

fn git() -> Result<Vec<Case>, String> {
    there(repository().join(".git"), "this is no clone")?;
    let clone = "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 HOME=$PWD; \
                 git clone -q --no-local \"$SOURCE\" c && cd c || exit 90; ";
    let with = |name: &str, rest: &str| case(name, &format!("{clone}{rest}"));
    Ok(vec![
        with("fsck", "git fsck --full --strict; echo result fsck: $?"),
        with(
            "gc",
            "git gc -q --aggressive --prune=now; echo result gc: $?; git fsck --full; echo result after: $?",
        ),
        with(
            "repack",
            "git repack -adfq --depth=50 && git verify-pack .git/objects/pack/*.idx; echo result pack: $?",
        ),
        with(
            "log",
            "echo result log: $(git log -p --stat | sha256sum); test -z \"$(git status --short)\"; echo result \
             clean: $?",
        ),
        with(
            "bundle",
            "git bundle create -q b --all && git clone -q b d && git -C d fsck; echo result bundle: $?",
        ),
    ])
}

/// Into an empty folder: reads each file of the compiler, the crates and this repository, and writes many.
const BUILD: &str = "CARGO_TARGET_DIR=$PWD/target cargo check --quiet --offline --workspace \
    --manifest-path \"$SOURCE/Cargo.toml\"; echo result check: $?";

fn postgres() -> Result<Vec<Case>, String> {
    there(format!("{POSTGRES}/pgbench"), SETUP)?;
    // It does not run as root: then as the user that the package makes.
    let script = format!(
        "PATH={POSTGRES}:$PATH; export PATH PGHOST=$PWD PGDATABASE=postgres PGDATA=$PWD/d;\n\
         initdb -k -A trust -U postgres >/dev/null || exit 90; export PGUSER=postgres\n\
         at() {{ pg_ctl -w -t 120 -l log -o \"-k $PWD -h '' -c shared_buffers=2MB -c fsync=off\" \"$@\" \
         >/dev/null; }}\n\
         at start; echo result start: $?\n\
         pgbench -i -s 5 -q 2>/dev/null; echo result fill: $?\n\
         pgbench -n -c 4 -j 2 -t 500 --random-seed=1 2>/dev/null | grep -i processed; echo result \
         transactions: $?\n\
         pgbench -n -S -c 4 -j 2 -t 2000 --random-seed=1 >/dev/null 2>&1; echo result reads: $?\n\
         q() {{ [ \"$(psql -Atc \"$1\")\" = $2 ]; }}\n\
         q 'select count(*) from pgbench_accounts' 500000; echo result accounts: $?\n\
         q 'select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)' t\n\
         echo result balances: $?\n\
         at restart -m immediate; echo result recovery: $?\n\
         q 'select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)' t\n\
         echo result after: $?\n\
         pg_amcheck -a --install-missing --heapallindexed >/dev/null 2>&1; echo result amcheck: $?\n\
         at stop -m fast; pg_checksums --check | grep -q 'Bad checksums: *0'; echo result checksums: $?"
    );
    Ok(vec![Case { user: Some("postgres"), ..case("checksums", &script) }])
}

/// The program that runs SQLite's own tests, and its source.
fn sqlite_tree() -> Result<(PathBuf, PathBuf), String> {
    let (Some(fixture), Some(source)) = (env::var_os("SQLITE_TESTFIXTURE"), env::var_os("SQLITE_SOURCE"))
    else {
        let why = "no package has SQLite's own tests; SQLITE_TESTFIXTURE and SQLITE_SOURCE name a built tree";
        return Err(why.to_owned());
    };
    let (fixture, source) = (PathBuf::from(fixture), PathBuf::from(source));
    there(&fixture, "SQLITE_TESTFIXTURE names it")?;
    Ok((fixture, source))
}

fn sqlite() -> Result<Vec<Case>, String> {
    let (fixture, source) = sqlite_tree()?;
    let is_there = |name: &&str| source.join(format!("test/{name}.test")).exists();
    let script =
        |name: &str| case(name, &format!("exec {} {}/test/{name}.test", fixture.display(), source.display()));
    Ok(SQLITE_FILES.split_whitespace().filter(is_there).map(script).collect())
}

fn sqlite_vfs() -> Result<Vec<Case>, String> {
    let extension = target_folder().join("sqlite/release/libquinion_vfs.so");
    let loader = repository().join("frontends/sqlite/tests/default_vfs.tcl");
    let fixture = sqlite_tree()?.0;
    let through = |case: Case| {
        let test = case.script.rsplit_once(' ').map_or("", |(_, test)| test);
        let places = [&fixture, &loader, &extension].map(|place| place.display().to_string()).join(" ");
        Case { with: Some(format!("exec {places} {test}")), ..case }
    };
    let (_, source) = sqlite_tree()?;
    let more = SQLITE_VFS_FILES.split_whitespace();
    let more = more
        .filter(|name| source.join(format!("test/{name}.test")).exists())
        .map(|name| case(name, &format!("exec {} {}/test/{name}.test", fixture.display(), source.display())));
    let is_left_out = |case: &Case| SQLITE_VFS_WITHOUT.iter().any(|(name, _)| *name == case.name);
    Ok(sqlite()?.into_iter().chain(more).filter(|case| !is_left_out(case)).map(through).collect())
}

fn ltp() -> Result<Vec<Case>, String> {
    let Some(root) = env::var_os("LTP_ROOT").map(PathBuf::from) else {
        return Err(
            "LTP is in no package of Debian 12; LTP_ROOT names a folder where it was installed".to_owned()
        );
    };
    let folder = root.join("testcases/bin");
    let found = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let is_ours = |name: &str| {
        let family = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
        let rest = |of: &str| family.strip_prefix(of).is_some_and(|rest| rest.len() <= 2);
        name.ends_with(|c: char| c.is_ascii_digit()) && LTP_FAMILIES.split_whitespace().any(rest)
    };
    let names = found.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let names: BTreeSet<String> = names.filter(|name| is_ours(name) && name != LTP_WITHOUT).collect();
    let script = |name: &String| {
        let path = format!(
            "PATH={0}:$PATH LTPROOT={1} TMPDIR=$PWD KCONFIG_SKIP_CHECK=1",
            folder.display(),
            root.display()
        );
        case(name, &format!("{path} LTP_SINGLE_FS_TYPE=ext4 exec {name} 2>&1"))
    };
    Ok(names.iter().map(script).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_each_suite_are_read() {
        let said = "test_read (test.test_io.CIOTest) ... ok\ntest_x (a.B) ... skipped 'no'\npager1-1.1... Ok\n\
                    read01.c:45: TPASS: it reads 5\nread01.c:45: TFAIL: it reads 6\nread01.c:46: TPASS: it\n\
                    passed   2\ntest_y (a.B) ... hello\nok\n\
                    dup01    2  TPASS  :  it dups\ntest_z (a.B)\nIt does ... FAIL\nresult fsck: 0\nanything else";
        let results = results(said);
        assert_eq!(results.len(), 10, "{results:?}");
        assert_eq!(results["test_read (test.test_io.CIOTest)"], "ok");
        assert_eq!(results["test_x (a.B)"], "skipped");
        assert_eq!(results["pager1-1.1"], "Ok");
        assert_eq!(results["read01.c:45 it reads"], "TFAIL");
        assert_eq!(results["test_y (a.B)"], "ok");
        assert_eq!(results["It does"], "FAIL");
        assert_eq!(results["dup01    2 it dups"], "TPASS");
        assert_eq!(results["fsck"], "0");
        assert_eq!(results.values().filter(|result| is_good(result)).count(), 6);
    }

    #[test]
    fn a_result_on_one_side_only_differs() {
        let of = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect::<Results>()
        };
        let alone = of(&[("a", "ok"), ("b", "ok"), ("c", "ok")]);
        assert!(differing(&alone, &alone).is_empty());
        assert_eq!(differing(&alone, &of(&[("a", "ok"), ("b", "FAIL"), ("d", "ok")])).len(), 3);
    }

    #[test]
    fn an_explanation_holds_for_its_test_of_its_command_only() {
        assert!(explained("ltp", "readahead02", "readahead02.c:352 readahead failed").is_some());
        assert!(explained("ltp", "readahead02", "readahead02.c:371 readahead failed").is_some());
        assert!(explained("ltp", "readahead02", "readahead02.c:250 offset").is_none());
        assert!(explained("ltp", "readahead01", "exit").is_none());
        assert!(explained("sqlite-vfs", "incrvacuum", "incrvacuum-16.1").is_some());
        assert!(explained("sqlite-vfs", "incrvacuum", "incrvacuum-15.1").is_none());
    }

    #[test]
    fn files_that_are_left_out_with_the_extension_are_known_and_have_a_reason() {
        let known: Vec<_> =
            SQLITE_FILES.split_whitespace().chain(SQLITE_VFS_FILES.split_whitespace()).collect();
        let twice = known.iter().find(|name| known.iter().filter(|other| other == name).count() > 1);
        assert_eq!(twice, None, "it would be run twice");
        assert!(SQLITE_VFS_WITHOUT.iter().all(|(name, why)| known.contains(name) && !why.is_empty()));
    }

    #[test]
    fn pages_that_the_extension_served_are_read() {
        let said = "x... Ok\nquinion_stats {{\"direct_reads\":3,\"hits\":17,\"misses\":2}}\n";
        assert_eq!((pages_served(said), pages_served("x... Ok\n")), (Some(17), None));
    }

    #[test]
    fn served_bytes_are_read() {
        assert_eq!(served("{\"schema\":1,\"served\":{\"reads\":3,\"bytes\":4096,\"hits\":2}}"), Some(4096));
        assert_eq!(served("{}"), None);
    }
}
