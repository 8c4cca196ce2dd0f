//! `run` as its callers see it: exit statuses, signals, reports, an owner that dies, and common programs.
//!
//! This test binary is its own `quinion run`: started with `QUINION_TEST_RUN` set, it runs the program in its
//! arguments, as the command would, with a naive owner. So it has a `main` of its own.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::Ordering;

use quinion_owner::internals::serve::Owner;
use quinion_run::report::Form;
use quinion_run::{Intercept, OwnerNumbers, PRELOAD, Planning, RunOptions, WATCH_STOP_VERB, run, watch_stop};

use quinion_testing::naive_owner::NaiveOwner;

/// 4 MiB of the files' 16.
const PAGES: usize = 1024;
const FILE_BYTES: usize = 16 << 20;

fn main() {
    if std::env::args().nth(1).is_some_and(|verb| verb == WATCH_STOP_VERB) {
        let number = |word| std::env::args().nth(word).and_then(|word| word.parse().ok()).expect("a process");
        return watch_stop([number(2), number(3)]);
    }
    if std::env::var_os("QUINION_TEST_RUN").is_some() {
        be_the_command();
    }
    heed_signals();
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for (name, test) in TESTS {
        if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
            println!("test {name} ...");
            test();
        }
    }
    println!("all well");
}

/// Resets signals that this process was started to ignore, as a shell without job control does for `&`. Every program
/// started here would inherit that, and some of them wait for a signal.
fn heed_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default is no handler, and no other thread runs yet.
        #[allow(unsafe_code, reason = "a plain call")]
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

fn be_the_command() -> ! {
    let take = |name: &str| {
        let value = std::env::var_os(name);
        // SAFETY: no other thread runs yet.
        #[allow(unsafe_code, reason = "the program must not see what is meant for us")]
        unsafe {
            std::env::remove_var(name);
        }
        value
    };
    take("QUINION_TEST_RUN");
    let report = match take("QUINION_TEST_REPORT") {
        Some(format) if format == "json" => Some(Form::Json),
        Some(_) => Some(Form::Text),
        None => None,
    };
    let options = RunOptions {
        report,
        report_file: take("QUINION_TEST_REPORT_FILE").map(PathBuf::from),
        intercept: match take("QUINION_TEST_INTERCEPT") {
            Some(how) if how == "plt" => Intercept::Plt,
            Some(how) if how == "off" => Intercept::Off,
            _ => Intercept::Auto,
        },
        live: false,
        program: std::env::args_os().skip(1).collect(),
    };
    let owner = NaiveOwner::minding_writers(PAGES);
    let device = {
        let owner = owner.clone();
        move || OwnerNumbers { device_reads: owner.fills.load(Ordering::Relaxed), ..OwnerNumbers::default() }
    };
    let owner: std::sync::Arc<dyn Owner> = owner;
    let planned = Planning::begin(&options);
    match planned.and_then(|planning| run(&options, planning, owner, &device)) {
        Ok(ended) => ended.leave(),
        Err(error) => {
            eprintln!("quinion: {error}");
            std::process::exit(125)
        }
    }
}

fn quinion(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(words).env("QUINION_TEST_RUN", "1").stdin(Stdio::null());
    command
}

fn sh(script: &str) -> Command {
    quinion(&["sh", "-c", script])
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const TESTS: &[(&str, fn())] = &[
    ("the_programs_status_is_ours", the_programs_status_is_ours),
    ("a_program_that_cannot_be_started", a_program_that_cannot_be_started),
    (
        "a_report_that_cannot_be_written_replaces_no_status",
        a_report_that_cannot_be_written_replaces_no_status,
    ),
    ("a_report_goes_where_it_is_wanted", a_report_goes_where_it_is_wanted),
    ("signals_sent_to_us_reach_the_program", signals_sent_to_us_reach_the_program),
    ("a_signal_to_the_whole_group_comes_once", a_signal_to_the_whole_group_comes_once),
    ("ignored_signals_stay_ignored", ignored_signals_stay_ignored),
    ("standard_streams_that_are_closed_stay_closed", standard_streams_that_are_closed_stay_closed),
    ("we_stop_and_go_on_with_the_program", we_stop_and_go_on_with_the_program),
    ("a_program_that_others_continue_does_not_hang_us", a_program_that_others_continue_does_not_hang_us),
    ("a_timer_from_before_the_start_is_the_programs", a_timer_from_before_the_start_is_the_programs),
    ("blocked_signals_stay_blocked", blocked_signals_stay_blocked),
    ("an_ignored_end_of_children_stays_ignored", an_ignored_end_of_children_stays_ignored),
    ("programs_everybody_has_print_the_same", programs_everybody_has_print_the_same),
    ("programs_started_by_the_program_are_served", programs_started_by_the_program_are_served),
    ("objects_that_are_preloaded_already_stay", objects_that_are_preloaded_already_stay),
    ("the_report_has_its_schema", the_report_has_its_schema),
    ("calls_reach_us_as_was_asked", calls_reach_us_as_was_asked),
    ("a_static_program_runs_unharmed_and_the_report_says_why", a_static_program_runs_unharmed),
    ("what_did_not_attach_is_told_with_what_may_be_why", a_failed_attachment_is_reported),
    ("a_program_finishes_without_its_owner", a_program_finishes_without_its_owner),
    ("a_program_finishes_beside_an_owner_that_stands_still", a_program_finishes_beside_a_stopped_owner),
    ("the_object_replaces_the_functions_it_should_and_no_others", the_objects_exports),
    ("the_object_calls_nothing_that_allocates_and_no_other_library", the_objects_imports),
];

fn the_programs_status_is_ours() {
    for status in [0, 1, 7, 255] {
        let exit = format!("exit {status}");
        assert_eq!(sh(&exit).status().unwrap().code(), Some(status));
    }
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGSEGV] {
        let status = sh(&format!("kill -{signal} $$")).status().unwrap();
        assert_eq!((status.code(), status.signal(), status.core_dumped()), (None, Some(signal), false));
    }
}

fn a_program_that_cannot_be_started() {
    let output = quinion(&["no-such-program-anywhere"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("no-such-program-anywhere"), "{output:?}");
    assert_eq!(quinion(&["/no/such/program"]).status().unwrap().code(), Some(127));
    for refused in ["/etc/passwd", "/"] {
        let output = quinion(&[refused]).output().unwrap();
        assert_eq!(output.status.code(), Some(126), "{output:?}");
    }
    assert_eq!(quinion(&[]).output().unwrap().status.code(), Some(125));
}

fn pipe_without_reader() -> std::io::PipeWriter {
    std::io::pipe().unwrap().1
}

fn reporting_to(script: &str, form: &str, file: Option<&Path>) -> Command {
    let mut command = sh(script);
    command.env("QUINION_TEST_REPORT", form);
    if let Some(file) = file {
        command.env("QUINION_TEST_REPORT_FILE", file);
    }
    command
}

fn a_report_that_cannot_be_written_replaces_no_status() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let full = Path::new("/dev/full");
    for (file, why) in [(full, "No space left"), (&pipe, "a pipe without a reader")] {
        let output = reporting_to("exit 7", "json", Some(file)).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        assert!(text(&output.stderr).contains(why), "{output:?}");
        let output = reporting_to("kill -TERM $$", "text", Some(file)).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{output:?}");
    }
    // Standard error cannot take the message.
    let full = std::fs::File::options().write(true).open(full).unwrap();
    let status = reporting_to("exit 7", "text", None).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(7));
    let status = reporting_to("kill -TERM $$", "text", None).stderr(pipe_without_reader()).status().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGTERM));
    let status = quinion(&["no-such-program-anywhere"]).stderr(pipe_without_reader()).status().unwrap();
    assert_eq!(status.code(), Some(127));
}

fn a_report_goes_where_it_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = reporting_to("echo out", "json", Some(Path::new("-")));
    let output = command.current_dir(folder.path()).output().unwrap();
    assert!(text(&output.stdout).starts_with("out\n{\"schema\":1,"), "{output:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file is named so");
    // A pipe with a reader takes the whole report; an open for reading and writing does not wait for another process.
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut reader = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let output = reporting_to("exit 0", "json", Some(&pipe)).output().unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
    let mut bytes = vec![0; 64 << 10];
    let count = reader.read(&mut bytes).unwrap();
    assert!(text(&bytes[..count]).ends_with("}\n"));
}

fn started(mut command: Command) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (child, lines)
}

#[allow(unsafe_code, reason = "a plain call")]
fn kill(child: &Child, signal: i32) {
    // SAFETY: the arguments are plain numbers.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn rest(mut lines: impl Read) -> String {
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    rest
}

/// Not for ever: a program that no signal reaches is not to hang the test.
const WAITS: &str = "n=0; while [ $n -lt 500 ]; do sleep 0.02; n=$((n + 1)); done";

/// Each signal whose default ends or stops a process, but for those that no process catches, and faults.
fn signals_sent_to_us_reach_the_program() {
    let more = [
        libc::SIGALRM,
        libc::SIGVTALRM,
        libc::SIGPROF,
        libc::SIGIO,
        libc::SIGPWR,
        libc::SIGSTKFLT,
        libc::SIGXCPU,
        libc::SIGXFSZ,
        libc::SIGABRT,
        libc::SIGRTMIN(),
        libc::SIGRTMAX(),
    ];
    let common = [
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGUSR1,
        libc::SIGWINCH,
        libc::SIGTSTP,
    ];
    for signal in common.into_iter().chain(more) {
        let script = format!("trap 'echo {signal}; exit 3' {signal}; echo ready; {WAITS}");
        let (mut child, lines) = started(sh(&script));
        kill(&child, signal);
        assert_eq!(rest(lines), format!("{signal}\n"));
        assert_eq!(child.wait().unwrap().code(), Some(3));
    }
}

/// Runs the words of its arguments with a timer that runs out soon, or with signals ignored or blocked.
const STARTS: &str = "import os, signal, sys
if sys.argv[1] == 'timer': signal.setitimer(signal.ITIMER_REAL, 1)
elif sys.argv[1] == 'ignored': signal.signal(signal.SIGCHLD, signal.SIG_IGN)
else: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
os.execv(sys.argv[2], sys.argv[2:])
";

fn started_by(how: &str, words: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", STARTS, how]).arg(std::env::current_exe().unwrap()).args(words);
    command.env("QUINION_TEST_RUN", "1").stdin(Stdio::null());
    command
}

fn a_timer_from_before_the_start_is_the_programs() {
    let script = format!("trap 'echo late; exit 3' ALRM; {WAITS}");
    let output = started_by("timer", &["sh", "-c", &script]).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(3), "late\n".into()), "{output:?}");
}

/// No shell lets a program have it so.
fn an_ignored_end_of_children_stays_ignored() {
    let output = started_by("ignored", &["grep", "SigIgn", "/proc/self/status"]).output().unwrap();
    let mask = u64::from_str_radix(text(&output.stdout).split_whitespace().nth(1).unwrap(), 16).unwrap();
    assert_eq!(mask & 1 << (libc::SIGCHLD - 1), 1 << (libc::SIGCHLD - 1), "{output:?}");
}

/// The program, and not this process, decides when it takes them.
fn blocked_signals_stay_blocked() {
    let output = started_by("blocked", &["grep", "SigBlk", "/proc/self/status"]).output().unwrap();
    let blocked = 1u64 << (libc::SIGTERM - 1) | 1 << (libc::SIGCHLD - 1);
    assert_eq!(text(&output.stdout), format!("SigBlk:\t{blocked:016x}\n"), "{output:?}");
    let program = "import signal\nprint('ready', flush=True)\nprint(signal.sigtimedwait([15], 20).si_signo)";
    let (mut child, lines) = started(started_by("blocked", &["python3", "-c", program]));
    kill(&child, libc::SIGTERM);
    assert_eq!(rest(lines), "15\n");
    assert!(child.wait().unwrap().success());
}

/// Counts the interrupts that it gets, until none has come for a while.
const COUNTS: &str = "import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); print('ready', flush=True); n = 0
while signal.sigtimedwait([signal.SIGINT], 0.5 if n else 20): n += 1
print(n)
";

/// Starts the command of its arguments, in one process group with itself, and interrupts it: it alone, or the group
/// after it, as timeout(1) does, and with that name; it ignores the signal itself from the start, from then on, or not
/// at all.
const INTERRUPTS: &str = "import os, signal, subprocess, sys
os.setpgid(0, 0)
default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
if 'ignoring' in sys.argv[1]: signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE, preexec_fn=default, text=True)
assert child.stdout.readline() == 'ready\\n'
if 'later' in sys.argv[1]: signal.signal(signal.SIGINT, signal.SIG_IGN)
if 'group' in sys.argv[1]: open('/proc/self/comm', 'w').write('timeout')
os.kill(child.pid, signal.SIGINT)
if 'group' in sys.argv[1]: signal.signal(signal.SIGINT, signal.SIG_IGN); os.killpg(0, signal.SIGINT)
print(child.stdout.read().strip(), child.wait())
";

fn a_signal_to_the_whole_group_comes_once() {
    let run = std::env::current_exe().unwrap();
    for how in ["alone", "alone, ignoring", "alone, later", "group"] {
        for _ in 0..3 {
            let mut command = Command::new("python3");
            command.args(["-c", INTERRUPTS, how]).arg(&run).args(["python3", "-c", COUNTS]);
            let output = command.env("QUINION_TEST_RUN", "1").output().unwrap();
            assert_eq!(text(&output.stdout), "1 0\n", "{how}: {output:?}");
        }
    }
}

fn ignored_signals_stay_ignored() {
    let script = "trap '' HUP; QUINION_TEST_RUN=1 \"$0\" sh -c 'echo ready; read line; echo $line'";
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{script} & me=$!; wait $me")]).arg(std::env::current_exe().unwrap());
    // A shell gives no input to a background program, so the program waits for another file's end instead.
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    assert!(rest(child.stdout.take().unwrap()).starts_with("ready\n"));
    assert!(child.wait().unwrap().success());
    for (trapped, bits) in [("HUP", 1), ("PIPE", 1 << 12), ("HUP PIPE", 1 | 1 << 12), ("URG", 0)] {
        let script = format!("trap '' {trapped}; QUINION_TEST_RUN=1 \"$0\" grep SigIgn /proc/self/status");
        let output =
            Command::new("sh").args(["-c", &script]).arg(std::env::current_exe().unwrap()).output().unwrap();
        let mask = u64::from_str_radix(text(&output.stdout).split_whitespace().nth(1).unwrap(), 16).unwrap();
        assert_eq!(
            mask & (1 | 1 << 12),
            bits,
            "{trapped} and no other is ignored in the program: {output:?}"
        );
    }
}

fn with_streams(redirection: &str, words: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("QUINION_TEST_RUN=1 \"$0\" \"$@\" {redirection}")]);
    command.arg(std::env::current_exe().unwrap()).args(words).stdin(Stdio::null()).output().unwrap()
}

fn standard_streams_that_are_closed_stay_closed() {
    // Its exit status says which streams are open.
    let open = "s=0; for n in 0 1 2; do test -e /proc/$$/fd/$n && s=$((s + (1 << n))); done; exit $s";
    for closed in 0..8 {
        let streams = ["<&-", ">&-", "2>&-"].into_iter().enumerate();
        let words: Vec<&str> =
            streams.filter(|(stream, _)| closed >> stream & 1 == 1).map(|(_, word)| word).collect();
        let output = with_streams(&words.join(" "), &["sh", "-c", open]);
        assert_eq!(output.status.code(), Some(7 & !closed), "{words:?}: {output:?}");
    }
    // So a closed stream is not taken for an empty one, and no output is lost silently.
    for (redirection, words) in [("<&-", &["cat"][..]), (">&-", &["cat", "/etc/passwd"])] {
        let output = with_streams(redirection, words);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains("Bad file descriptor"), "{output:?}");
    }
}

fn we_stop_and_go_on_with_the_program() {
    let (mut child, lines) = started(sh("echo ready; kill -STOP $$; echo went on"));
    #[allow(unsafe_code, reason = "a plain call")]
    // SAFETY: a plain call with a valid pointer for the status.
    let status = unsafe {
        let mut status = 0;
        assert_eq!(libc::waitpid(child.id() as i32, &raw mut status, libc::WUNTRACED), child.id() as i32);
        status
    };
    assert!(libc::WIFSTOPPED(status));
    kill(&child, libc::SIGCONT);
    assert_eq!(rest(lines), "went on\n");
    assert!(child.wait().unwrap().success());
}

/// Waits for its end; kills it if that does not come.
fn end_of(mut child: Child) -> Output {
    let begun = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > std::time::Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("it hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// 1. The program stops, and so does this process.
/// 2. A process that knows the program's number alone continues it, or ends it.
fn a_program_that_others_continue_does_not_hang_us() {
    for stop in ["STOP", "TSTP", "TTIN"] {
        for round in 0..3 {
            // At times before this process has stopped.
            let pause = ["0.01", "0.05", "0.5"][round];
            // Once more, in case the first came before the stop.
            let others = format!("(sleep {pause}; kill -CONT $$; sleep 2; kill -CONT $$) >&- 2>&- &");
            let script = format!("{others} kill -{stop} $$; echo done");
            let mut command = sh(&script);
            command.env("QUINION_WAIT_MS", "50"); // those others wait for the owner, which is this stopped process
            let output = end_of(command.stdout(Stdio::piped()).spawn().unwrap());
            assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "done\n".into()), "{stop}");
        }
    }
    let mut command = sh("(sleep 0.3; kill -KILL $$) & kill -STOP $$");
    let output = end_of(command.env("QUINION_WAIT_MS", "50").spawn().unwrap());
    assert_eq!(output.status.signal(), Some(libc::SIGKILL));
}

/// Lines of text that all differ, much longer than the cache.
fn long_file(folder: &Path) -> PathBuf {
    let path = folder.join("long");
    let mut content = String::with_capacity(FILE_BYTES + 100);
    let mut number = 1u64;
    while content.len() < FILE_BYTES {
        number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        writeln!(content, "{number:x} the quick brown fox {}", number >> 40).unwrap();
    }
    std::fs::write(&path, content).unwrap();
    path
}

/// Common command lines; F is a file and D a database, as words or in quotes.
const SCRIPTS: &[&str] = &[
    "cat F",
    "cat < F",
    "cat F F",
    "dd if=F bs=4k status=none",
    "dd if=F bs=1000 skip=77 count=3000 status=none",
    "dd if=F iflag=direct bs=1M status=none",
    "grep -c the F",
    "grep -n 'fox 77' F",
    "head -c 5000000 F",
    "head -n 1000 F",
    "tail -c 3000000 F",
    "tail -n 1000 F",
    "wc F",
    "wc -c F",
    "tar cf - -C $(dirname F) long",
    "sha256sum F",
    "md5sum < F",
    "sort F | tail -5",
    "cmp F F && echo same",
    "od -A d -t x1 -j 12345678 -N 100 F",
    "split -n 2/3 F",
    "tac F | head -1000",
    "gzip -1 -c F | cksum",
    "xxd -s 9999999 -l 64 F || true",
    "awk 'NR % 1000 == 0' F",
    "sed -n '200000,200010p' F",
    "python3 -c 'import sys; sys.stdout.write(open(\"F\").read())'",
    "python3 -c 'import hashlib; f=open(\"F\",\"rb\"); f.seek(5000); \
     print(hashlib.md5(f.read(9999999)).hexdigest(), f.tell()); f.seek(0); print(len(f.readlines()))'",
    "python3 -c 'import mmap; f=open(\"F\",\"rb\"); f.read(10); m=mmap.mmap(f.fileno(),0,prot=1); \
     print(hash(m[:])!=0, f.read(20))'",
    "python3 -c 'import subprocess; f=open(\"F\",\"rb\",0); f.read(100); \
     print(subprocess.run([\"cksum\"],stdin=f,capture_output=True).stdout, f.tell())'",
    "python3 -c 'import shutil; shutil.copyfile(\"F\",\"F.copy\")' && cksum < F.copy && rm F.copy",
    "cp F F.copy && cksum F.copy | cut -d' ' -f1 && rm F.copy",
    "while read a b; do echo $a; done < F | head -100",
    "{ head -c 10000 >/dev/null; cksum; } < F",
    "diff F F && echo equal",
    "base64 F | tail -c 1000",
    "bash -c 'exec 5<F; read -u 5 x; echo $x; head -c 100 <&5'",
    "perl -e 'open F,\"<\",\"F\"; $/=\\65536; while(<F>){$n+=unpack(\"%32C*\",$_)} print \"$n\\n\"'",
    "git hash-object F",
    "find F -size +1M",
    "sqlite3 -readonly D 'select count(*), sum(length(t)), max(i) from x'",
    "sqlite3 D 'select sum(i) from x where i % 7 = 3'",
    "sqlite3 D 'update x set t = \"changed\" where i % 1000 = 0; select count(*) from x where t = \
     \"changed\"'",
    "python3 -c 'import sqlite3; print(sqlite3.connect(\"D\").execute(\"select count(distinct t), \
     min(i) from x\").fetchall())'",
];

/// Programs that a machine may lack; `scripts/setup` installs every other one.
const OPTIONAL: &[&str] = &["xxd", "perl", "git"];

const MAKE_DATABASE: &str = "create table x(i integer, t text); \
     with recursive c(i) as (select 1 union all select i+1 from c where i < 200000) \
     insert into x select i, hex(i * 7919) || 'some more text to make it long' from c;";

fn programs_everybody_has_print_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = long_file(folder.path());
    let database = folder.path().join("data.db");
    let made = Command::new("sqlite3").arg(&database).arg(MAKE_DATABASE).status();
    assert!(made.is_ok_and(|status| status.success()), "sqlite3 does not work; scripts/setup installs it");
    for script in SCRIPTS {
        let script = with_names(script, &file, &database);
        let plain = Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output().unwrap();
        if plain.status.code() == Some(127) {
            let optional = OPTIONAL.iter().any(|program| script.starts_with(program));
            assert!(optional, "a program is missing: {script}: {plain:?}; scripts/setup installs it");
            eprintln!("not run, because its program is not on this machine: {script}");
            continue;
        }
        let meaningful = plain.status.success() && !plain.stdout.is_empty();
        assert!(meaningful, "the test itself is wrong: {script}: {plain:?}");
        let served = sh(&script).output().unwrap();
        same(&script, &plain, &served);
    }
}

fn with_names(script: &str, file: &Path, database: &Path) -> String {
    let (file, database) = (file.display().to_string(), database.display().to_string());
    let word = |word: &str| match word {
        "F" | "F)" | "F.copy" => word.replacen('F', &file, 1),
        _ => word.to_owned(),
    };
    let script = script.replace("D ", &format!("{database} ")).replace("\"D\"", &format!("\"{database}\""));
    let quoted = ["=F", "(F", "\"F", "<F"].into_iter().fold(script, |script, place| {
        let named = format!("{}{file}", &place[..1]);
        script.replace(place, &named)
    });
    quoted.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

fn same(script: &str, plain: &Output, served: &Output) {
    assert_eq!(served.status.code(), plain.status.code(), "{script}");
    assert_eq!(text(&served.stderr), text(&plain.stderr), "{script}");
    assert!(
        served.stdout == plain.stdout,
        "{script}: {} bytes against {}",
        served.stdout.len(),
        plain.stdout.len()
    );
}

fn reported(command: &mut Command) -> (Output, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report");
    command.env("QUINION_TEST_REPORT", "json").env("QUINION_TEST_REPORT_FILE", &file);
    let output = command.output().unwrap();
    (output, std::fs::read_to_string(file).unwrap())
}

fn number(report: &str, key: &str) -> u64 {
    let at = report.find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("no {key} in {report}"));
    let digits = report[at + key.len() + 3..].split(|letter: char| !letter.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("{key} is no number in {report}"))
}

fn programs_started_by_the_program_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = long_file(folder.path());
    let script = format!("for i in 1 2 3; do cat {0} | cksum; (exec grep -c the {0}); done", file.display());
    let (output, report) = reported(&mut sh(&script));
    assert!(output.status.success());
    assert!(number(&report, "processes") >= 10, "{report}");
    assert!(number(&report, "bytes") >= 6 * FILE_BYTES as u64, "{report}");
    assert!(number(&report, "files") >= 6, "{report}"); // and files that the C library reads for itself
    assert_eq!(number(&report, "patched"), number(&report, "processes"), "{report}");
}

fn objects_that_are_preloaded_already_stay() {
    let mut command = sh("echo $LD_PRELOAD");
    let output = command.env("LD_PRELOAD", "/usr/lib/none-such.so").output().unwrap();
    assert!(text(&output.stdout).starts_with("/usr/lib/none-such.so:/"), "{output:?}");
}

/// sha256sum reads through a stream of the C library's.
fn calls_reach_us_as_was_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = long_file(folder.path());
    let name = file.display().to_string();
    let bytes = std::fs::metadata(&file).unwrap().len();
    for (how, processes, patched, served) in [("auto", 1, 1, bytes), ("plt", 1, 0, 0), ("off", 0, 0, 0)] {
        let mut command = quinion(&["sha256sum", &name]);
        let (_, report) = reported(command.env("QUINION_TEST_INTERCEPT", how));
        assert!(report.contains(&format!("\"mode\":\"{how}\"")), "{report}");
        assert_eq!(
            (number(&report, "processes"), number(&report, "patched")),
            (processes, patched),
            "{report}"
        );
        let extra = number(&report, "bytes") - served; // files that the C library reads for itself: users, the locale
        assert!(extra < if how == "auto" { 1 << 20 } else { 1 }, "{report}");
    }
    let output = quinion(&["true"]).env("QUINION_TEST_REPORT", "text").output().unwrap();
    let said = text(&output.stderr);
    assert!(said.contains(" functions of the C library patched in 1 of 1 process"), "{said}");
}

fn the_report_has_its_schema() {
    let folder = tempfile::tempdir().unwrap();
    let file = long_file(folder.path());
    let name = file.display().to_string();
    // Interception by name alone misses the files that the C library reads for itself.
    let (_, report) = reported(quinion(&["cat", &name]).env("QUINION_TEST_INTERCEPT", "plt"));
    assert!(
        report.starts_with("{\"schema\":1,\"program\":[\"cat\",\"") && report.ends_with("}\n"),
        "{report}"
    );
    for key in [
        "status",
        "processes",
        "reads",
        "hits",
        "bytes",
        "files",
        "questions",
        "used_pages",
        "wasted_pages",
        "unread_pages",
        "accuracy",
        "bound_bytes",
        "grown_bytes",
        "huge_share",
        "not_regular",
        "writable",
        "flags",
        "duplicated",
        "forked",
        "mapped",
        "passed",
        "number",
        "refused",
        "no_owner",
        "changed",
        "foreign",
        "unguaranteed",
        "intercept",
        "functions",
        "left",
        "patched",
        "names_alone",
        "other_library",
        "interposed",
        "denied",
    ] {
        assert!(report.contains(&format!("\"{key}\":")), "{key} is missing in {report}");
    }
    assert_eq!((number(&report, "status"), number(&report, "processes")), (0, 1));
    assert_eq!(number(&report, "bytes"), std::fs::metadata(&file).unwrap().len());
    assert!(number(&report, "questions") > 0);
    let unread = (number(&report, "wasted_pages"), number(&report, "unread_pages"));
    assert_eq!(unread, (0, 0), "all of the file was read, and that is known: {report}");
    let (_, report) = reported(&mut sh("kill -9 $$"));
    assert!(report.contains("\"status\":null,\"signal\":9"), "{report}");
    let (_, report) =
        reported(&mut quinion(&["dd", &format!("if={name}"), "iflag=direct", "bs=1M", "of=/dev/null"]));
    assert!(number(&report, "flags") == 1 || number(&report, "duplicated") == 1, "{report}");
    let mut told = quinion(&["cat", &name]);
    let output =
        told.env("QUINION_TEST_INTERCEPT", "plt").env("QUINION_TEST_REPORT", "text").output().unwrap();
    assert!(text(&output.stderr).starts_with("quinion: served     16.0 MiB in "), "{}", text(&output.stderr));
}

fn a_static_program_runs_unharmed() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("static.c"), folder.path().join("static"));
    let code = "void _start(void) { __asm__ volatile(\"mov $60, %eax; mov $5, %edi; syscall\"); }";
    std::fs::write(&source, code).unwrap();
    let cc =
        Command::new("cc").args(["-static", "-nostdlib", "-o"]).arg(&program).arg(&source).status().unwrap();
    assert!(cc.success());
    let (output, report) = reported(&mut quinion(&[program.to_str().unwrap()]));
    assert_eq!(output.status.code(), Some(5));
    assert!(report.contains("is statically linked"), "{report}");

    // A set-user-id file of another user: only root can make one, and it takes no right from root.
    let set_id = folder.path().join("cat");
    std::fs::copy("/bin/cat", &set_id).unwrap();
    std::fs::set_permissions(&set_id, std::fs::Permissions::from_mode(0o4755)).unwrap();
    if std::os::unix::fs::chown(&set_id, Some(65534), None).is_ok() {
        std::fs::set_permissions(&set_id, std::fs::Permissions::from_mode(0o4755)).unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let (output, report) = reported(&mut quinion(&[set_id.to_str().unwrap(), "/etc/passwd"]));
        assert!(output.status.success(), "{output:?}");
        assert_eq!(output.stdout, std::fs::read("/etc/passwd").unwrap());
        assert!(report.contains("set-uid"), "{report}");
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

/// A dynamic linker that refuses the object ends the program before any code of the program, or of the object, has run.
fn a_failed_attachment_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (source, linker, program) = (path("code.c"), path("ld-linux-x86-64.so.2"), path("program"));
    let code = "void _start(void) { __asm__ volatile(\"mov $60, %eax; mov $1, %edi; syscall\"); }";
    std::fs::write(&source, code).unwrap();
    let cc = |words: &[&str]| Command::new("cc").args(["-nostdlib", &source]).args(words).status().unwrap();
    assert!(cc(&["-shared", "-fPIC", "-Wl,-e,_start", "-o", &linker]).success());
    let named = format!("-Wl,--dynamic-linker={linker}");
    assert!(cc(&["-pie", "-fPIE", &named, "-o", &program]).success());
    let (output, report) = reported(&mut quinion(&[&program]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    for part in [
        "did not attach",
        "clear its environment",
        "its dynamic linker refused the preload object",
        "older C",
    ] {
        assert!(report.contains(part), "{part} is missing in {report}");
    }
}

/// A program that reads slowly and prints a digest of its reads at the end.
const SLOW: &str = "import sys,time,hashlib,os
fd = os.open(sys.argv[1], os.O_RDONLY); h = hashlib.md5(); n = 0
while True:
    b = os.read(fd, 65536)
    if not b: break
    h.update(b); n += 1
    if n == 20: print('ready', flush=True)
    if n % 5 == 0: time.sleep(0.01)
print(h.hexdigest())
";

fn slow_reader(file: &Path) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let plain = Command::new("python3").args(["-c", SLOW]).arg(file).output().unwrap();
    let expected = text(&plain.stdout).lines().last().unwrap().to_string() + "\n";
    let (child, lines) = started(quinion(&["python3", "-c", SLOW, file.to_str().unwrap()]));
    (child, lines, expected)
}

fn a_program_finishes_without_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, lines, expected) = slow_reader(&long_file(folder.path()));
    kill(&child, libc::SIGKILL);
    child.wait().unwrap();
    assert_eq!(rest(lines), expected);
}

fn a_program_finishes_beside_a_stopped_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, mut lines, expected) = slow_reader(&long_file(folder.path()));
    kill(&child, libc::SIGSTOP);
    let mut line = String::new();
    lines.read_line(&mut line).unwrap(); // not to the end: the owner has the write end, too
    assert_eq!(line, expected);
    kill(&child, libc::SIGCONT);
    assert!(child.wait().unwrap().success());
}

fn names_in_object(which: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let object = folder.path().join("preload.so");
    std::fs::File::create(&object).unwrap().write_all(PRELOAD).unwrap();
    assert!(PRELOAD.len() < 300 << 10, "{} bytes", PRELOAD.len());
    let nm = Command::new("nm").args(["-D", which]).arg(&object).output().unwrap();
    let mut names: Vec<String> = text(&nm.stdout).lines().map(|line| line.trim_start().into()).collect();
    names.sort();
    names
}

/// The object has no allocator of its own (`no_std`), so functions that are not in this list are not called: `malloc`,
/// a mutex. `dlsym` and `dl_iterate_phdr` take the linker's lock; only the start calls them, and a wrapper that runs
/// before it.
fn the_objects_imports() {
    let names = names_in_object("--undefined-only");
    let imports: Vec<&str> =
        names.iter().filter_map(|name| name.strip_prefix(['U', 'w'])?.trim().split('@').next()).collect();
    let bytes = ["bcmp", "memcmp", "memcpy", "memmove", "memset", "strlen"];
    // `environ` is a variable: the environment that `execv` and its like pass on. Of `gnu_get_libc_version` it is only
    // asked whether it is there.
    let others =
        ["__errno_location", "dl_iterate_phdr", "dlsym", "environ", "fileno", "gnu_get_libc_version"];
    // Symbols that linkers put into every object, called only if they exist.
    let start =
        ["_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize", "__gmon_start__"];
    let is_known = |name: &&&str| start.contains(name) || bytes.contains(name) || others.contains(name);
    assert_eq!(imports.iter().find(|name| !is_known(name)), None, "{imports:?}");
    // The linker ends a program whose C library lacks the required versions. This is the oldest on x86-64.
    let is_old = |name: &&String| name.ends_with("@GLIBC_2.2.5");
    let versioned: Vec<&String> = names.iter().filter(|name| name.contains('@')).collect();
    assert!(versioned.len() > others.len(), "{names:?}");
    assert_eq!(versioned.into_iter().find(|name| !is_old(name)), None);
    // Before version 2.34 most programs have no `dlsym`, and the linker ends a program that requires it.
    assert!(names.iter().any(|name| name.trim_start().starts_with("w dlsym@")), "{names:?}");
}

fn the_objects_exports() {
    let mut names = names_in_object("--defined-only");
    names.iter_mut().for_each(|line| *line = line.split(' ').next_back().unwrap().into());
    names.sort();
    let expected = include_str!("exports.txt").lines().map(OsString::from).collect::<Vec<_>>();
    assert_eq!(names.iter().map(OsString::from).collect::<Vec<_>>(), expected);
}
