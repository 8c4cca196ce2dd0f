//! Machine: what a figure depends on besides the code.
//!
//! Quinion's version, the time, kernel, processor, memory, the file system and the device below it, whether there are
//! large pages, the compiler, and how busy the machine was. An undetermined property is unknown, and no error.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use quinion_run::report::{Form, Report, Value};
use rustix::fs::{major, minor};

use super::{Extent, Settings, Unmeasured};

/// Checks that `wanted` bytes are available; the error says what would help.
pub fn check_memory(wanted: u64) -> Result<(), Unmeasured> {
    if quinion::process_limit() >= wanted {
        return Ok(());
    }
    Err(Unmeasured::Missing(format!(
        "it takes {} MiB of memory, more than we may use; with --quick it takes less",
        wanted >> 20
    )))
}

/// Bytes that the kernel reports as available without swapping; `None` if it does not.
pub fn available_bytes() -> Option<u64> {
    available(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn available(text: &str) -> Option<u64> {
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.trim().strip_suffix("kB")?;
    Some(kib.trim().parse::<u64>().ok()? << 10)
}

pub fn described(settings: &Settings) -> String {
    let folder = settings.folder.as_path();
    let mut machine = Report::new();
    machine
        .add("version", "quinion", Value::Text(version()))
        .add("date", "date", text_or_unknown(date()))
        .add("kernel", "kernel", line("/proc/sys/kernel/osrelease"))
        .add("processor", "processor", text_or_unknown(processor()))
        .add("cores", "cores we may use", cores())
        .add("memory_bytes", "memory we may use", Value::Bytes(quinion::process_limit()))
        .add("file_system", "file system", text_or_unknown(file_system(folder)))
        .add("read_ahead_kb", "read_ahead_kb", text_or_unknown(read_ahead(folder)))
        .add("huge_pages", "2 MiB pages", chosen("/sys/kernel/mm/transparent_hugepage/enabled"))
        .add(
            "huge_shared",
            "2 MiB pages, shared",
            chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        )
        .add("reclaimed_ahead", "reclaimed ahead of need", Value::Text(reclaimed_ahead(Path::new(DAMON))))
        .add("compiler", "compiler", Value::Text(env!("QUINION_COMPILER").to_owned()))
        .add("checks", "build", build())
        .add("load", "load at the start", line("/proc/loadavg"))
        .add("extent", "run", Value::Text(extent(settings.extent).to_owned()));
    machine.printed(Form::Text)
}

/// Quinion's version, and the commit of this build, if that was known.
fn version() -> String {
    let commit = match env!("QUINION_COMMIT") {
        "" => "commit: none".to_owned(),
        commit => format!("commit {commit}"),
    };
    format!("{} ({commit})", env!("CARGO_PKG_VERSION"))
}

fn date() -> Option<String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(date_after(now.as_secs()))
}

fn date_after(seconds: u64) -> String {
    let (mut days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    let mut year = 1970;
    while days >= days_of(year).iter().sum() {
        days -= days_of(year).iter().sum::<u64>();
        year += 1;
    }
    let mut month = 0;
    while days >= days_of(year)[month] {
        days -= days_of(year)[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02} {:02}:{:02} UTC", month + 1, days + 1, minutes / 60, minutes % 60)
}

fn days_of(year: u64) -> [u64; 12] {
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
}

fn text_or_unknown(text: Option<String>) -> Value {
    text.map_or(Value::Unknown, Value::Text)
}

fn line(path: &str) -> Value {
    text_or_unknown(fs::read_to_string(path).ok().map(|text| text.trim().to_owned()))
}

fn cores() -> Value {
    std::thread::available_parallelism().map_or(Value::Unknown, |cores| Value::Number(cores.get() as u64))
}

fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The word in brackets, by which the kernel marks the current setting.
fn chosen(path: &str) -> Value {
    text_or_unknown(fs::read_to_string(path).ok().and_then(|text| in_brackets(&text)))
}

fn in_brackets(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";

/// Whether the kernel reclaims memory proactively: pages of its cache, among others, so that a peer's cached file may
/// be dropped while it is measured. `threads` is [`DAMON`].
fn reclaimed_ahead(threads: &Path) -> String {
    let inside =
        |folder| fs::read_dir::<PathBuf>(folder).into_iter().flatten().flatten().map(|found| found.path());
    let says = |file, word| fs::read_to_string::<PathBuf>(file).is_ok_and(|text| text.trim() == word);
    let is_by_damon = inside(threads.to_owned())
        .filter(|thread| says(thread.join("state"), "on"))
        .flat_map(|thread| inside(thread.join("contexts")))
        .flat_map(|context| inside(context.join("schemes")))
        .any(|scheme| says(scheme.join("action"), "pageout"));
    if is_by_damon { "by DAMON" } else { "no" }.to_owned()
}

fn build() -> Value {
    let words = if cfg!(debug_assertions) {
        "with checks: its times mean nothing; build with --release"
    } else {
        "release"
    };
    Value::Text(words.to_owned())
}

fn extent(extent: Extent) -> &'static str {
    match extent {
        Extent::Quick => "quick: an order of magnitude; names and goals are those of a full run",
        Extent::Full => "full",
    }
}

/// The numbers of the device that `folder` lies on, in the format of the kernel's files.
fn device(folder: &Path) -> Option<String> {
    let device = fs::metadata(folder).ok()?.dev();
    Some(format!("{}:{}", major(device), minor(device)))
}

fn read_ahead(folder: &Path) -> Option<String> {
    let path = format!("/sys/class/bdi/{}/read_ahead_kb", device(folder)?);
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn file_system(folder: &Path) -> Option<String> {
    mounted(&fs::read_to_string("/proc/self/mountinfo").ok()?, &device(folder)?)
}

/// Type and source of what is mounted from `device`.
fn mounted(mounts: &str, device: &str) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(device))?;
    let mut words = line.split_once(" - ")?.1.split(' ');
    Some(format!("{} on {}", words.next()?, words.next()?))
}

/// Bytes that the device below `folder` has read since it was attached; `None` if there is no single one.
pub fn device_bytes(folder: &Path) -> Option<u64> {
    sectors(&device_stat(folder)?, 2)
}

pub fn device_written(folder: &Path) -> Option<u64> {
    sectors(&device_stat(folder)?, 6)
}

fn device_stat(folder: &Path) -> Option<String> {
    fs::read_to_string(format!("/sys/dev/block/{}/stat", device(folder)?)).ok()
}

fn sectors(stat: &str, field: usize) -> Option<u64> {
    Some(stat.split_whitespace().nth(field)?.parse::<u64>().ok()? * 512)
}

/// The increase of a counter between two readings; not a number if there is no such counter.
pub fn passed(before: Option<u64>, after: Option<u64>) -> f64 {
    after.zip(before).map_or(f64::NAN, |(after, before)| after.saturating_sub(before) as f64)
}

/// Bytes that this process, and its children that have ended, have read from devices; `None` if the kernel does not
/// count them.
pub fn process_bytes() -> Option<u64> {
    read_bytes(&fs::read_to_string("/proc/self/io").ok()?)
}

fn read_bytes(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// CPU seconds of the kernel's threads since the start of each: of all, and of those that reclaim memory (`kswapd`). In
/// steps of a clock tick, mostly 10 ms.
pub fn kernel_thread_seconds() -> [f64; 2] {
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let mut seconds = [0.0; 2];
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let Some(KernelThread { is_kswapd, ticks }) = kernel_thread(&stat) else { continue };
        seconds[0] += ticks as f64 / ticks_per_second;
        seconds[1] += if is_kswapd { ticks as f64 / ticks_per_second } else { 0.0 };
    }
    seconds
}

/// CPU seconds of all threads of a process, of those that have ended as well; not a number if there is no such process.
/// In steps of a clock tick.
pub fn process_seconds(process: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let ticks = ticks_of(&stat).map_or(f64::NAN, |ticks| ticks as f64);
    ticks / rustix::param::clock_ticks_per_second() as f64
}

/// The ticks in a `stat` that are the user's and the kernel's.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let word = |at: usize| rest.split_whitespace().nth(at)?.parse::<u64>().ok();
    Some(word(11)? + word(12)?)
}

#[derive(PartialEq, Eq, Debug)]
struct KernelThread {
    is_kswapd: bool,
    ticks: u64,
}

/// The `stat` of a kernel thread; `None` if the thread is not the kernel's.
fn kernel_thread(stat: &str) -> Option<KernelThread> {
    /// `PF_KTHREAD`, as the kernel's `stat` files show it.
    const KERNEL_THREAD: u64 = 0x0020_0000;
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let word = |at: usize| rest.split_whitespace().nth(at)?.parse::<u64>().ok();
    let is_one = word(6)? & KERNEL_THREAD != 0;
    is_one.then_some(())?;
    Some(KernelThread { is_kswapd: name.starts_with("kswapd"), ticks: ticks_of(stat)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Repeat;

    #[test]
    fn the_kernels_files_are_understood() {
        assert_eq!(in_brackets("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(in_brackets("none"), None);
        assert_eq!(available("MemFree: 7 kB\nMemAvailable:   12 kB\n"), Some(12 << 10));
        assert_eq!(available("MemFree: 7 kB\n"), None);
        let mounts = "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n23 22 0:21 / /proc rw - proc proc rw\n";
        assert_eq!(mounted(mounts, "254:0").as_deref(), Some("ext4 on /dev/vda"));
        assert_eq!(mounted(mounts, "9:9"), None);
        assert_eq!(read_bytes("rchar: 1\nread_bytes: 8192\nwrite_bytes: 4096\n"), Some(8192));
        assert_eq!(read_bytes("rchar: 1\n"), None);
        let stat = "  10 1 80 3  20 2 160 4  0 5 6\n";
        assert_eq!([sectors(stat, 2), sectors(stat, 6), sectors("", 2)], [Some(40960), Some(81920), None]);
        let stat = |name, flags| format!("9 ({name}) S 2 0 0 0 -1 {flags} 0 0 0 0 3 40 0 0 20 0 1 0 7");
        let thread = |is_kswapd| Some(KernelThread { is_kswapd, ticks: 43 });
        assert_eq!(kernel_thread(&stat("kswapd0", 0x0022_0840)), thread(true));
        assert_eq!(kernel_thread(&stat("a) (b", 0x0020_0000)), thread(false));
        assert_eq!(kernel_thread(&stat("kswapd0", 0x0040_0100)), None);
        assert_eq!(kernel_thread(""), None);
    }

    #[test]
    fn a_thread_that_takes_memory_ahead_is_found_if_it_runs() {
        let folder = tempfile::tempdir().expect("there is room");
        let scheme = folder.path().join("0/contexts/0/schemes/0");
        fs::create_dir_all(&scheme).expect("there is room");
        let tell = |file: PathBuf, text| fs::write(file, text).expect("there is room");
        let found = || reclaimed_ahead(folder.path());
        assert_eq!(found(), "no");
        tell(scheme.join("action"), "pageout\n");
        for (state, expected) in [("off\n", "no"), ("on\n", "by DAMON")] {
            tell(folder.path().join("0/state"), state);
            assert_eq!(found(), expected);
        }
        tell(scheme.join("action"), "stat\n");
        assert_eq!(found(), "no");
        assert_eq!(reclaimed_ahead(&folder.path().join("none")), "no");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let dates = [0, 951_782_400, 1_709_251_199, 1_735_689_599, 4_107_542_399].map(date_after);
        let expected = [
            "1970-01-01 00:00 UTC",
            "2000-02-29 00:00 UTC",
            "2024-02-29 23:59 UTC",
            "2024-12-31 23:59 UTC",
            "2100-02-28 23:59 UTC",
        ];
        assert_eq!(dates, expected);
    }

    #[test]
    fn every_line_says_something() {
        let settings = Settings { extent: Extent::Quick, repeat: Repeat::Usual(1), folder: ".".into() };
        let text = described(&settings);
        assert!(
            text.starts_with("quinion")
                && text.contains(env!("CARGO_PKG_VERSION"))
                && text.contains("compiler"),
            "{text}"
        );
        assert!(text.contains("quick: "), "{text}");
    }
}
