//! How fast is a file read that nobody has cached, beside the kernel?
//!
//! `cat` of coreutils and `quinion cat`, both to /dev/null, in turn; before
//! each run the kernel is told to drop the file's pages, and checked to have
//! done so by the bytes the run reads from the device. Wall and CPU seconds are the system's own account
//! of the finished process; medians of the ratios are what counts.
//!
//! Run: `cargo bench --bench cold [-- MIB [REPEATS [MEMORY]]]` (4096, 5, 256M if not given).
//! Answers recorded: BENCHMARKS.md.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::{Advice, fadvise};

#[derive(Clone, Copy)]
struct Run {
    wall: f64,
    cpu: f64,
}

fn children_cpu() -> f64 {
    // The fields of /proc/self/stat after the command's name, which may hold anything.
    let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs is mounted");
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name in parentheses") + 2..].split(' ').collect();
    let ticks: u64 = fields[13..15].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

fn device_sectors() -> u64 {
    let stats = std::fs::read_to_string("/proc/diskstats").unwrap_or_default();
    stats.lines().filter_map(|line| line.split_whitespace().nth(5)?.parse::<u64>().ok()).sum()
}

fn run(file: &Path, command: &mut Command) -> Run {
    let handle = File::open(file).expect("the file is there");
    fadvise(&handle, 0, None, Advice::DontNeed).expect("fadvise");
    let (cpu, sectors, start) = (children_cpu(), device_sectors(), Instant::now());
    let status = command.arg(file).stdout(Stdio::null()).status().expect("the command starts");
    let wall = start.elapsed().as_secs_f64();
    assert!(status.success());
    let (read, size) = ((device_sectors() - sectors) * 512, handle.metadata().expect("metadata").len());
    assert!(read >= size / 10 * 9, "{read} bytes came from the device of {size}: the file was cached");
    Run { wall, cpu: children_cpu() - cpu }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    let mib: u64 = numbers.next().and_then(|n| n.parse().ok()).unwrap_or(4096);
    let repeats: usize = numbers.next().and_then(|n| n.parse().ok()).unwrap_or(5);
    let memory = numbers.next().unwrap_or("256M".into());
    let path = std::env::current_dir().expect("a current directory").join(format!("cold-{mib}.bin"));
    make(&path, mib);
    let quinion = env!("CARGO_BIN_EXE_quinion");
    let (mut kernel, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        kernel.push(run(&path, &mut Command::new("cat")));
        ours.push(run(&path, Command::new(quinion).args(["cat", "--memory", &memory])));
    }
    std::fs::remove_file(&path).expect("the file is ours");
    let row = |name: &str, runs: &[Run]| {
        let wall = median(runs.iter().map(|run| run.wall).collect());
        let cpu = median(runs.iter().map(|run| run.cpu).collect());
        let gb = (mib << 20) as f64 / 1e9;
        println!("{name:<24} {:>6.2} GB/s {:>7.3} CPU s/GB", gb / wall, cpu / gb);
    };
    println!("{mib} MiB, cold, {repeats} times in turn, medians; --memory {memory}");
    row("cat (kernel)", &kernel);
    row("quinion cat", &ours);
    let ratio = |of: fn(&Run) -> f64| median(kernel.iter().zip(&ours).map(|(k, q)| of(k) / of(q)).collect());
    println!("throughput {:.2}x of the kernel's; CPU {:.2}x", ratio(|r| r.wall), 1.0 / ratio(|r| r.cpu));
}

fn make(path: &Path, mib: u64) {
    let mut file =
        OpenOptions::new().create(true).truncate(true).write(true).open(path).expect("a file here");
    let mut piece: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
    for at in 0..mib {
        piece[..8].copy_from_slice(&at.to_le_bytes());
        file.write_all(&piece).expect("room on the disk");
    }
    file.sync_all().expect("sync");
}
