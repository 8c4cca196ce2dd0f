//! What does a hit cost, beside the kernel's own?
//!
//! Random reads of a file that is wholly cached: by the kernel for `pread`, by
//! us for `File::read_at`, one at a time, and for `File::read_batch`, 16 and 32
//! to a call. The bare copy at the same offsets stands beside them as the bound.
//! The alternatives of a row are interleaved in every repetition, so that a slow
//! moment of the machine falls on all of them, and the ratio of medians of CPU
//! time is what counts.
//!
//! Run: `cargo bench --bench hit [-- MIB]` (the size of the file; 1024 if not given).
//! Answers recorded: BENCHMARKS.md.

#![allow(unsafe_code, reason = "the bare copy wants memory in 2 MiB pages")]

use std::fs::File as KernelFile;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::time::Instant;

use quinion::{BatchRead, Cache, File};

const REPEATS: usize = 7;

/// A stream of numbers that is the same for every alternative.
struct Offsets(u64);

impl Offsets {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((u128::from(self.0 >> 11) * u128::from(below)) >> 53) as u64
    }
}

type Read<'a> = Box<dyn Fn(&mut [u8], u64) + Sync + 'a>;

/// One of what is compared.
enum Way<'a> {
    /// One read a call, always into the same buffer.
    Single(Read<'a>),
    /// So many reads a call, each into a buffer of its own.
    Batch(usize, &'a File),
}

/// The largest batch.
const BATCH_MAX: usize = 32;

struct Row<'a> {
    name: &'a str,
    bytes: usize,
    /// Positions are multiples of this, below `span`.
    step: u64,
    span: u64,
    threads: usize,
    operations: usize,
}

fn cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CPU nanoseconds per operation and thread.
fn run(row: &Row<'_>, way: &Way<'_>, seed: u64) -> f64 {
    let barrier = Barrier::new(row.threads);
    let total: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..row.threads)
            .map(|thread| {
                let (barrier, row) = (&barrier, row);
                scope.spawn(move || {
                    let buffers = if let Way::Batch(reads, _) = way { *reads } else { 1 };
                    let mut memory = vec![0u8; row.bytes * buffers + 4096];
                    let start = memory.as_ptr().align_offset(4096).min(4095);
                    let memory = &mut memory[start..start + row.bytes * buffers];
                    let mut offsets = Offsets(seed + thread as u64);
                    let mut next = || offsets.next(row.span / row.step) * row.step;
                    barrier.wait();
                    let begin = cpu_ns();
                    match way {
                        Way::Single(read) => (0..row.operations).for_each(|_| {
                            read(memory, next());
                            std::hint::black_box(&memory);
                        }),
                        Way::Batch(_, file) => read_batches(row, file, memory, next),
                    }
                    cpu_ns() - begin
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no worker panics")).sum()
    });
    total as f64 / (row.threads * row.operations) as f64
}

/// The row's reads, as many to a call as there are buffers in `memory`.
fn read_batches(row: &Row<'_>, file: &File, memory: &mut [u8], mut next: impl FnMut() -> u64) {
    let buffers = memory.len() / row.bytes;
    for _ in 0..row.operations / buffers {
        // Arrays on the stack, as a program would have them; the longer one for both sizes.
        let mut chunks = memory.chunks_exact_mut(row.bytes);
        let mut reads: [_; BATCH_MAX] = std::array::from_fn(|_| match chunks.next() {
            Some(buffer) => BatchRead::new(buffer, next()),
            None => BatchRead::new(&mut [], 0),
        });
        file.read_batch(&mut reads[..buffers]);
        let full = reads[..buffers].iter().all(|read| read.result().is_ok_and(|bytes| bytes == row.bytes));
        assert!(full, "every read of a batch is answered in full");
        std::hint::black_box(&reads);
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn warm(file: &File) {
    let mut buffer = vec![0u8; 1 << 20];
    let mut position = 0;
    while let Ok(bytes @ 1..) = file.read_at(&mut buffer, position) {
        position += bytes as u64;
    }
    assert_eq!(file.cached_pages(), file.len() / 4096, "the whole file is cached");
}

/// Memory in 2 MiB pages where the system has them, so that the bare copy is not slowed by small ones.
fn huge(bytes: usize) -> &'static mut [u8] {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    let (flags, protection) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: fresh anonymous memory, ours alone and never unmapped.
    unsafe {
        let memory =
            mmap_anonymous(std::ptr::null_mut(), bytes + (2 << 20), protection, flags).expect("memory");
        let aligned = memory.byte_add(memory.align_offset(2 << 20));
        let _ = madvise(aligned, bytes, Advice::LinuxHugepage);
        std::slice::from_raw_parts_mut(aligned.cast(), bytes)
    }
}

/// Measures all ways at a row, interleaved, and prints it.
fn measure(row: &Row<'_>, ways: &[Way<'_>; 8]) {
    let mut times = vec![Vec::new(); ways.len()];
    for repeat in 0..REPEATS {
        for (times, way) in times.iter_mut().zip(ways) {
            times.push(run(row, way, repeat as u64 * 77 + 1));
        }
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    print!("{:<32}", row.name);
    medians.iter().for_each(|ns| print!(" {ns:>9.1}"));
    let [pread, singly0, singly9, batch0, _, batch9, ..] = medians[..] else { unreachable!("eight ways") };
    let [singly0, singly9, batch0, batch9] = [singly0, singly9, batch0, batch9].map(|ns| pread / ns);
    println!("   {singly0:>5.2}x {singly9:>5.2}x singly, {batch0:>5.2}x {batch9:>5.2}x in batches");
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: u64 = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(1024);
    let mut temp = tempfile::NamedTempFile::new_in(std::env::current_dir()?)?;
    let piece: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
    for _ in 0..mib {
        temp.write_all(&piece)?;
    }
    temp.as_file().sync_all()?;
    let size = mib << 20;

    let build = |order| Cache::builder().memory(size + size / 16 + (64 << 20)).folio_order_max(order).build();
    let (cache0, cache9) = (build(0)?, build(9)?);
    let (file0, file9) = (cache0.open(temp.path())?, cache9.open(temp.path())?);
    warm(&file0);
    warm(&file9);
    let kernel = KernelFile::open(temp.path())?;
    let all = huge(size as usize);
    kernel.read_exact_at(all, 0)?;
    println!("file {mib} MiB; 2 MiB pages: {} MiB of the order-0 arena", cache0.stats().huge_bytes >> 20);

    let hit = |file: &File, buffer: &mut [u8], at| {
        assert_eq!(file.read_at(buffer, at).expect("hit"), buffer.len());
    };
    let alternatives: [Way<'_>; 8] = [
        Way::Single(Box::new(|buffer, at| kernel.read_exact_at(buffer, at).expect("pread"))),
        Way::Single(Box::new(|buffer, at| hit(&file0, buffer, at))),
        Way::Single(Box::new(|buffer, at| hit(&file9, buffer, at))),
        Way::Batch(16, &file0),
        Way::Batch(BATCH_MAX, &file0),
        Way::Batch(16, &file9),
        Way::Batch(BATCH_MAX, &file9),
        Way::Single(Box::new(|buffer, at| buffer.copy_from_slice(&all[at as usize..][..buffer.len()]))),
    ];
    let row =
        |name, bytes, step, span, threads, operations| Row { name, bytes, step, span, threads, operations };
    let rows = [
        row("4 KiB random, DRAM, 1 thread", 4096, 4096, size, 1, 200_000),
        row("4 KiB random, DRAM, 2 threads", 4096, 4096, size, 2, 100_000),
        row("64 B random, DRAM", 64, 64, size, 1, 400_000),
        row("4 KiB in 1 MiB (L2)", 4096, 4096, 1 << 20, 1, 400_000),
        row("64 B, one page", 64, 64, 4096, 1, 1_000_000),
        row("64 B, one page, 2 threads", 64, 64, 4096, 2, 1_000_000),
        row("4 KiB, one page", 4096, 4096, 4096, 1, 400_000),
        row("4 KiB, one page, 2 threads", 4096, 4096, 4096, 2, 400_000),
        row("64 KiB random, DRAM", 65536, 4096, size - 65536, 1, 20_000),
        row("1 MiB random, DRAM", 1 << 20, 4096, size - (1 << 20), 1, 1_000),
    ];
    println!(
        "CPU ns per read, medians of {REPEATS}; then pread over order 0 and 9, singly and in batches of 16"
    );
    print!("{:<32}", "");
    for name in ["pread", "order 0", "order 9", "0 x 16", "0 x 32", "9 x 16", "9 x 32", "memcpy"] {
        print!(" {name:>9}");
    }
    println!();
    let started = Instant::now();
    let wanted = std::env::args().nth(2).filter(|name| !name.starts_with('-'));
    for row in rows.iter().filter(|row| wanted.as_ref().is_none_or(|name| row.name.contains(name))) {
        measure(row, &alternatives);
    }
    println!("{:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}
