//! `quinion-bench` runs, prints what it was asked for, and leaves nothing behind.
//!
//! No figure is checked: speed is no promise, and this build has checks in it. The tests check that each row exists and
//! can be parsed.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The keys of every row, in their order.
const KEYS: [&str; 15] = [
    "experiment",
    "case",
    "metric",
    "unit",
    "quinion",
    "peer",
    "peer_name",
    "ratio",
    "spread",
    "goal",
    "met",
    "steady",
    "judged_by",
    "quinion_runs",
    "peer_runs",
];

const EXPERIMENTS: [&str; 17] = [
    "hit",
    "insert",
    "split",
    "readbatch",
    "cold",
    "readseq",
    "programs",
    "evict",
    "thrash",
    "stream",
    "write",
    "memfile",
    "populate",
    "restore",
    "tier",
    "endpoint",
    "ratio",
];

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.args(arguments).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("it prints UTF-8")
}

/// The keys and values of a JSON object without nested objects; the values are not unescaped.
fn members(line: &str) -> Vec<(String, String)> {
    let inside = line.strip_prefix('{').and_then(|line| line.strip_suffix('}'));
    let inside = inside.unwrap_or_else(|| panic!("{line} is no object"));
    let mut members = Vec::new();
    let (mut start, mut depth, mut is_quoted) = (0, 0, false);
    for (at, character) in inside.char_indices().chain([(inside.len(), ',')]) {
        match character {
            '"' if !inside[..at].ends_with('\\') => is_quoted = !is_quoted,
            '[' if !is_quoted => depth += 1,
            ']' if !is_quoted => depth -= 1,
            ',' if !is_quoted && depth == 0 => {
                let (key, value) = inside[start..at].split_once(':').expect("a key and a value");
                members.push((key.trim_matches('"').to_owned(), value.to_owned()));
                start = at + 1;
            }
            _ => {}
        }
    }
    assert!(!is_quoted && depth == 0, "{line}");
    members
}

/// Whether a value has the form that its key wants.
fn is_right(key: &str, value: &str) -> bool {
    let is_number = |text: &str| text.parse::<f64>().is_ok();
    let is_text = value.len() >= 2 && value.starts_with('"') && value.ends_with('"');
    match key {
        "experiment" | "case" | "metric" | "unit" | "judged_by" => is_text,
        "quinion_runs" | "peer_runs" => value.starts_with('[') && value.ends_with(']'),
        _ if value == "null" => true,
        "peer_name" => is_text,
        "met" | "steady" => value == "true" || value == "false",
        "spread" => {
            let inside = value.strip_prefix('[').and_then(|value| value.strip_suffix(']'));
            inside.is_some_and(|inside| inside.split(',').count() == 2 && inside.split(',').all(is_number))
        }
        _ => is_number(value),
    }
}

fn names_in(folder: &Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
fn every_experiment_prints_rows_that_can_be_read() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for experiment in EXPERIMENTS {
        let dir = folder.path().to_str().unwrap();
        let output = bench(&["--quick", "--repeat", "1", "--json", "--scratch", dir, experiment]);
        let nothing = text(&output.stderr).contains("nothing was measured");
        assert_eq!(output.status.code(), Some(i32::from(nothing)), "{experiment}: {}", text(&output.stderr));
        let lines = text(&output.stdout);
        let excused = text(&output.stderr).contains("not measured");
        assert!(lines.lines().count() > 0 || excused, "{experiment} has no row: {}", text(&output.stderr));
        for line in lines.lines() {
            let members = members(line);
            let keys: Vec<&str> = members.iter().map(|(key, _)| key.as_str()).collect();
            assert_eq!(keys, KEYS, "{line}");
            assert_eq!(members[0].1, format!("\"{experiment}\""), "{line}");
            let wrong = members.iter().find(|(key, value)| !is_right(key, value));
            assert!(wrong.is_none(), "{wrong:?} in {line}");
        }
    }
    assert!(names_in(folder.path()).is_empty(), "{:?}", names_in(folder.path()));
}

#[test]
fn several_experiments_come_in_their_order_with_every_peer() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = folder.path().to_str().unwrap();
    let output = bench(&["--quick", "--repeat", "1", "--json", "--scratch", dir, "cold", "hit"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (lines, wrong) = (text(&output.stdout), text(&output.stderr));
    let of = |experiment: &str| lines.find(&format!("{{\"experiment\":\"{experiment}\""));
    assert!(of("hit") < of("cold"), "{lines}");
    // A machine without io_uring or direct reads has no such rows, and the output says so.
    for peer in ["pread, 32 buffers", "bare copy", "kernel 64 KiB", "kernel mmap", "raw io_uring", "cat"] {
        let named = format!("\"peer_name\":\"{peer}\"");
        assert!(lines.contains(&named) || wrong.contains("not measured"), "no {peer} in\n{lines}{wrong}");
    }
    // The kernel caches the file of 256 MiB, except for what it reclaims meanwhile; a cache of 64 MiB takes no more
    // than that, with its process.
    let memory = |line: &&str| value_of(line, "metric").starts_with("memory");
    for line in lines.lines().filter(memory) {
        let [ours, kernel] = ["quinion", "peer"].map(|key| value_of(line, key).parse::<f64>());
        match (ours, kernel) {
            (Ok(ours), Ok(kernel)) => assert!((20.0..100.0).contains(&ours) && kernel > 2.0 * ours, "{line}"),
            _ => assert!(wrong.contains("memory that was held is not told"), "{line}\n{wrong}"),
        }
    }
    assert!(wrong.contains("not measured") || lines.lines().any(|line| memory(&line)), "{lines}");
}

#[test]
fn a_run_is_kept_as_lines_and_as_one_page() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (scratch, out) = (folder.path().join("scratch"), folder.path().join("out"));
    std::fs::create_dir(&scratch).unwrap();
    let dirs = ["--scratch", scratch.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let output = bench(&[&["--quick", "--repeat", "2", "--json", "split", "ratio"][..], &dirs].concat());
    let (printed, wrong) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && wrong.contains("index.html"), "{wrong}");
    let mut names = names_in(&out);
    names.sort();
    assert_eq!(names, ["index.html", "machine.txt", "rows.jsonl", "series.jsonl"]);
    assert_eq!(std::fs::read_to_string(out.join("rows.jsonl")).unwrap(), printed);

    let page = std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    for fetched in ["http:", "https:", "src=", "url(", "@import", "<script", "<link"] {
        assert!(!page.contains(fetched), "{fetched} in the page");
    }
    for words in
        ["read_ahead_kb", "prefers-color-scheme: dark", "id=\"split\"", "id=\"ratio\"", "12.5 % faster"]
    {
        assert!(page.contains(words), "{words} is not in the page");
    }
    assert!(page.contains("<polyline") && page.contains("class=\"whisker\""), "curves and spreads are drawn");
    // The page contains each row's case and each peer.
    let as_in_html = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    for line in printed.lines() {
        let case = value_of(line, "case");
        for part in case.rsplitn(2, ": ").chain([value_of(line, "peer_name").as_str()]) {
            assert!(part == "null" || page.contains(&as_in_html(part)), "{part} of {line}");
        }
    }
}

/// 1. A stream's rows are in GiB/s, and hold a list of numbers in MB/s.
/// 2. A reader of the lines mistakes one unit for the other.
#[test]
fn the_series_of_a_stream_is_kept_beside_the_rows_with_its_own_unit() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let out = folder.path().join("out");
    let dirs = ["--scratch", folder.path().to_str().unwrap(), "--out", out.to_str().unwrap()];
    let output = bench(&[&["--quick", "--repeat", "1", "--json", "stream"][..], &dirs].concat());
    if text(&output.stdout).is_empty() {
        return eprintln!("not tested: {}", text(&output.stderr));
    }
    let lines = std::fs::read_to_string(out.join("series.jsonl")).unwrap();
    assert!(lines.lines().count() > 2, "{lines}");
    for line in lines.lines() {
        let members = members(line);
        let keys: Vec<&str> = members.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["experiment", "case", "metric", "unit", "seconds", "values"], "{line}");
        assert_eq!(members[3].1, "\"MB/s\"");
        assert_eq!(members[4].1.split(',').count(), members[5].1.split(',').count(), "{line}");
    }
    let page = std::fs::read_to_string(out.join("index.html")).unwrap();
    assert!(page.contains("MB/s\n</text>") && page.contains("seconds from the beginning\n</text>"));
}

#[test]
fn a_folder_that_cannot_be_made_is_reported_before_anything_is_measured() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = bench(&["--out", file.path().to_str().unwrap(), "--quick", "split"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("--out"), "{}", text(&output.stderr));
}

/// 1. A quick run is interrupted by ctrl-C: a signal to its whole group.
/// 2. The folder for experiments and the folder of `--out` are not empty afterwards.
#[test]
fn a_run_that_is_interrupted_leaves_nothing() {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (scratch, out) = (folder.path().join("scratch"), folder.path().join("out"));
    std::fs::create_dir(&scratch).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.args(["--quick", "split", "cold", "readseq", "--scratch"]).arg(&scratch).arg("--out").arg(&out);
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::null());
    // SAFETY: the call may be made between fork and exec.
    #[allow(unsafe_code, reason = "a shell that runs the tests in the background may ignore the signal")]
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut bench = command.spawn().unwrap();
    // The first table is printed, so the run has started.
    let mut lines = std::io::BufReader::new(bench.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("split: ") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut lines, &mut line).unwrap() > 0, "it ended too early");
    }
    // SAFETY: the arguments are plain numbers.
    #[allow(unsafe_code, reason = "a plain call")]
    unsafe {
        libc::kill(-(bench.id() as i32), libc::SIGINT);
    }
    let status = bench.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGINT), "{status}");
    while out.exists() {
        // The other sweeper removes it at the same time, and may be done by now.
        let names = names_in(folder.path());
        assert!(names.iter().all(|name| name == "scratch" || name == "out"), "{names:?}");
        std::thread::yield_now();
    }
    while !names_in(&scratch).is_empty() {
        std::thread::yield_now(); // the sweeper is still removing them
    }
}

fn value_of(line: &str, key: &str) -> String {
    let (_, value) = members(line).into_iter().find(|(name, _)| name == key).expect("every row has the key");
    value.trim_matches('"').to_owned()
}

/// The cases and peers of memory files, guest memory and restores that have to be there: words of the case's name, and
/// the alternatives beside Quinion's in it.
const MEMORY_ROWS: [(&str, &str, &[&str]); 14] = [
    ("memfile", "4 KiB, data", &["tmpfs 4K", "tmpfs huge", "cached file", "cached file, mmap", "bare copy"]),
    ("memfile", "64 KiB, preallocated", &["tmpfs 4K", "tmpfs huge", "bare clear"]),
    ("memfile", "1 MiB, holes", &["tmpfs 4K", "tmpfs huge", "bare clear"]),
    (
        "populate",
        "MiB: populate, one thread",
        &["write tmpfs huge 1M", "write tmpfs huge 1M, 2 threads", "UFFDIO_COPY anon 4K"],
    ),
    (
        "populate",
        "MiB, the rest: populate, one thread",
        &[
            "write memfd 4K",
            "write memfd 64K",
            "write memfd 1M",
            "write tmpfs huge 4K",
            "mmap+memcpy memfd",
            "mmap+memcpy shmem THP",
            "mmap+memcpy MFD_HUGETLB",
            "memcpy anon 4K",
            "memcpy anon THP",
            "UFFDIO_COPY anon 64K",
            "UFFDIO_COPY anon 2M",
            "UFFDIO_COPY memfd 4K",
            "UFFDIO_COPY memfd 2M",
            "UFFDIO_COPY MFD_HUGETLB 2M",
            "UFFDIO_CONTINUE memfd 4K",
            "UFFDIO_CONTINUE memfd 64K",
            "UFFDIO_CONTINUE memfd 2M",
            "UFFDIO_CONTINUE shmem THP 2M",
            "UFFDIO_CONTINUE MFD_HUGETLB 2M",
            "MAP_PRIVATE snap, read touch",
            "MAP_PRIVATE snap, write touch",
            "MAP_SHARED populated memfd, read touch",
        ],
    ),
    ("populate", "grab alone, folios of 4 KiB: batched", &["one by one"]),
    ("populate", "grab and fill, folios of 2 MiB: lookup batched", &["one by one"]),
    ("restore", "resident image, ", &["UFFDIO_COPY 4K", "UFFDIO_COPY 64K", "UFFDIO_COPY 2M"]),
    ("restore", "10 clones of ", &["UFFDIO_COPY", "MAP_PRIVATE of a cached file"]),
    (
        "restore",
        "scattered faults: server, COPY 4K",
        &["COPY anon 4K, handler thread", "kernel: MAP_PRIVATE read"],
    ),
    ("restore", "cold: server, COPY", &["MAP_PRIVATE", "handler, COPY 4K", "eager, COPY 2M"]),
    ("restore", "populated cold, folios of 2 MiB: batched", &["one by one"]),
    ("restore", "populated warm, folios of 4 KiB: batched", &["one by one"]),
    ("restore", "recorded: server, warm disk tier", &["download first, MAP_PRIVATE"]),
];

#[test]
fn memory_stands_beside_every_peer_in_every_case() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = folder.path().to_str().unwrap();
    let experiments = ["memfile", "populate", "restore"];
    let output =
        bench(&[&["--quick", "--repeat", "1", "--json", "--scratch", dir][..], &experiments].concat());
    let (lines, wrong) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{wrong}");
    let rows: Vec<[String; 4]> = lines
        .lines()
        .map(|line| ["experiment", "case", "peer_name", "peer"].map(|key| value_of(line, key)))
        .collect();
    for (experiment, case, peers) in MEMORY_ROWS {
        for peer in peers {
            let row = rows.iter().find(|[e, c, p, _]| e == experiment && c.contains(case) && p == peer);
            let row = row.unwrap_or_else(|| panic!("no {peer} beside {case} in\n{lines}{wrong}"));
            // Peers that this machine does not have (large pages, mounts, page faults without root) are reported.
            let name = format!("`{peer}`");
            let is_said = wrong.lines().any(|line| line.contains("not measured: ") && line.contains(&name));
            assert!((row[3] == "null") == is_said, "{row:?}, {wrong}");
        }
    }
    assert!(names_in(folder.path()).is_empty(), "{:?}", names_in(folder.path()));
}

fn sweeper(folder: &Path) -> Child {
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("file"), "left behind").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.arg("--sweep").arg(folder).stdin(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command starts")
}

#[test]
fn a_folder_is_swept_when_its_owner_is_dead_and_not_before() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("quinion-bench-0-0");
    let mut sweeper = sweeper(&folder);
    sweeper.stdin.as_mut().unwrap().write_all(b"still here").unwrap();
    assert!(sweeper.try_wait().unwrap().is_none() && folder.exists());
    drop(sweeper.stdin.take());
    assert!(sweeper.wait().unwrap().success());
    assert!(names_in(parent.path()).is_empty());
}

#[test]
fn another_users_folder_is_not_swept() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("my-own-files");
    let output = sweeper(&folder).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("my-own-files") && folder.join("file").exists());
}

/// 1. A benchmark has made a folder for RocksDB.
/// 2. Another process kills it by a signal that cannot be caught.
/// 3. The contents of the folder stay for ever.
#[test]
fn a_benchmark_that_is_killed_leaves_nothing() {
    let parent = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.args(["--quick", "readseq", "--scratch"]).arg(parent.path());
    let mut bench = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    // Without db_bench the benchmark makes no folder, and ends.
    while names_in(parent.path()).is_empty() && bench.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    bench.kill().unwrap();
    bench.wait().unwrap();
    let begun = Instant::now();
    while !names_in(parent.path()).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?} is left", names_in(parent.path()));
        std::thread::yield_now();
    }
}

/// 1. A benchmark is killed; its folder is swept.
/// 2. A program that it had just started makes the folder again, and puts a file there.
/// 3. That file stays for ever.
#[test]
fn a_folder_that_is_made_again_is_swept_again() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("quinion-bench-0-0");
    let mut sweeper = sweeper(&folder);
    drop(sweeper.stdin.take());
    while folder.exists() {
        std::thread::yield_now();
    }
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("file"), "by a program that was starting").unwrap();
    assert!(sweeper.wait().unwrap().success());
    assert!(names_in(parent.path()).is_empty());
}

/// Control groups that the benchmark `owner` has made in `groups` or below.
fn groups_of(groups: &Path, owner: u32) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let below = std::fs::read_dir(groups).into_iter().flatten().flatten();
    for path in below.map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()) {
        if path.file_name().unwrap().to_string_lossy().starts_with(&format!("quinion-bench-{owner}-")) {
            found.push(path);
        } else {
            found.extend(groups_of(&path, owner));
        }
    }
    found
}

/// 1. A benchmark has made a group with a limit, and a worker is in it.
/// 2. Another process kills the benchmark by a signal that cannot be caught.
/// 3. The group stays for ever, and the worker keeps running without a benchmark.
#[test]
fn a_benchmark_that_is_killed_leaves_no_group_and_no_worker() {
    let parent = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.args(["--quick", "thrash", "--scratch"]).arg(parent.path());
    let mut bench = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let groups = Path::new("/sys/fs/cgroup");
    // Without root the benchmark makes no group, and ends.
    let mut found = Vec::new();
    while found.is_empty() && bench.try_wait().unwrap().is_none() {
        std::thread::yield_now();
        found = groups_of(groups, bench.id());
    }
    if found.is_empty() {
        eprintln!("not tested: no group was made; it takes root and the memory controller of cgroups");
    }
    bench.kill().unwrap();
    bench.wait().unwrap();
    // Other processes start and end meanwhile, so the groups that were found are checked and not the whole tree.
    while found.iter().any(|group| group.exists()) {
        std::thread::yield_now();
    }
    assert!(names_in(parent.path()).is_empty(), "the disk was seen by the workers alone");
}

#[test]
fn the_text_names_the_machine_and_the_columns() {
    let output = bench(&["--quick", "--repeat", "1", "split"]);
    let printed = text(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    for word in
        ["quinion", "date", "kernel", "cores we may use", "memory we may use", "file system", "read_ahead_kb"]
    {
        assert!(printed.lines().any(|line| line.starts_with(word)), "{word} is missing in\n{printed}");
    }
    for word in ["split: what", "ratio [quartiles]", "single walk", "three walks"] {
        assert!(printed.contains(word), "{word} is missing in\n{printed}");
    }
}

#[test]
fn an_experiment_that_there_is_not_is_refused_with_the_names_there_are() {
    let output = bench(&["inserts"]);
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{wrong}");
    assert!(output.stdout.is_empty());
    for name in EXPERIMENTS {
        assert!(wrong.contains(name), "{wrong}");
    }
}

#[test]
fn a_program_that_there_is_not_is_refused_with_the_names_there_are() {
    let output = bench(&["programs", "--quick", "--only", "git,zzz"]);
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{wrong}");
    assert!(output.stdout.is_empty() && wrong.contains("zzz") && wrong.contains("sqlite3 scan"), "{wrong}");
}

#[test]
fn cases_that_are_not_wanted_are_left_out() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options =
        ["--quick", "--repeat", "1", "--json", "--scratch", folder.path().to_str().unwrap(), "insert"];
    let cases = |output: &Output| -> Vec<String> {
        let lines = text(&output.stdout);
        lines.lines().map(|line| members(line)[1].1.trim_matches('"').to_owned()).collect()
    };
    let all = cases(&bench(&options));
    // A row that stands for one way of a case has the way behind a colon.
    let wanted = all.last().and_then(|name| name.split(": ").next()).expect("it has rows");
    let only = bench(&[&options[..], &["--case", wanted]].concat());
    assert!(only.status.success(), "{}", text(&only.stderr));
    let only = cases(&only);
    assert!(!only.is_empty() && only.len() < all.len(), "{only:?} of {all:?}");
    assert!(only.iter().all(|case| case.contains(wanted)), "{only:?}");
    let none = bench(&[&options[..], &["--case", "no such case"]].concat());
    assert_eq!((none.status.code(), text(&none.stdout).as_str()), (Some(1), ""));
    assert!(
        text(&none.stderr).contains("no case that could be has `no such case`"),
        "{}",
        text(&none.stderr)
    );
}

#[test]
fn a_scratch_folder_that_there_is_not_is_refused_once() {
    let output = bench(&["--quick", "--scratch", "/no/such/folder", "split", "write", "cold"]);
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{wrong}");
    assert!(output.stdout.is_empty() && wrong.lines().count() == 1, "{wrong}");
    assert!(wrong.contains("/no/such/folder") && wrong.contains("--scratch"), "{wrong}");
}

/// 1. The program that an experiment runs is not installed.
/// 2. The table is empty, and the run ends as if it had succeeded.
#[test]
fn a_run_that_measured_nothing_has_failed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-bench"));
    command.args(["--quick", "readseq", "--scratch"]).arg(folder.path());
    let output = command.env("PATH", "/nowhere").output().unwrap();
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{wrong}");
    assert!(wrong.contains("nothing was measured"), "{wrong}");
}

/// 1. The disk of `--out` is full.
/// 2. The error is reported only after all is measured, half an hour later.
#[test]
fn a_full_disk_is_reported_before_anything_is_measured() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let script = "mount -t tmpfs -o size=64k none \"$1\" || exit 77; \
                  exec \"$2\" --quick split --out \"$1/new/out\"";
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", script, "sh"])
        .arg(folder.path())
        .arg(env!("CARGO_BIN_EXE_quinion-bench"));
    match command.output() {
        Ok(output) if output.status.code() == Some(1) && text(&output.stderr).contains("quinion: ") => {
            let wrong = text(&output.stderr);
            assert!(
                output.stdout.is_empty() && wrong.contains("No space") && wrong.contains("--out"),
                "{wrong}"
            );
        }
        Ok(output) if output.status.success() => panic!("it ran: {}", text(&output.stderr)),
        other => eprintln!("not tested: {other:?}; it takes root"),
    }
}

#[test]
fn nothing_is_measured_no_times() {
    let output = bench(&["--repeat", "0", "split"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}
