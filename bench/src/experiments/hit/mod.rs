//! Hit: what does a read of cached data cost, beside the kernel's own?
//!
//! ```text
//!   pread          the kernel's, from its page cache, by a descriptor for each thread
//!   order 0        File::read_at, folios of a page         order 9   of up to 2 MiB
//!   .., 16 a call  File::read_batch of so many, each into a buffer of its own
//!   pinned         a copy from Pinned::mapped, all of the file in folios of up to 2 MiB
//!   kernel mmap    a copy from the kernel's mapping, each page of which was touched before
//!   bare copy      the same bytes from memory in 2 MiB pages, without looking anything up: the bound
//!   .., 32 buffers one after another, into as many buffers as a batch fills
//! ```
//!
//! One file, wholly cached by each of them; reads at random places, the same for all in a repetition. CPU time counts,
//! since threads only compute. Two cases ask what a second thread on the same page costs; others what a hit costs in
//! another process (`another`), by C (`by_c`), and beside caches of values (`values`).
//!
//! Threads that share a descriptor pay for its reference count at each `pread`, twice as much as for a small read
//! itself. So the peer has a descriptor for each thread, though Quinion's threads share one `File`; with two threads,
//! the cost of sharing in the kernel is shown too.
//!
//! One read at a time goes into the same buffer again and again, which stays near the processor. A batch cannot do
//! that, and its buffers are larger than the nearest cache. So a batch stands beside `pread` into as many buffers; and
//! where a goal is set, beside the bare copy into one, which is the harder bound.

mod another;
mod by_c;
mod values;

use std::fs::File as KernelFile;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use quinion::{BatchRead, Cache, File, Pinned};

use crate::fixtures::caches::check_warm;
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::{Places, ThreadRun};
use crate::fixtures::scratch::{Scratch, is_from};
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::timing::together_ready;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{HugeMemory, Mapped};

pub use another::{JOB, work};

const METRICS: [Metric; 1] = [Metric::cost("cpu", "ns/read")];
const PREAD: &str = "pread";
const PREAD_SHARED: &str = "pread, one descriptor";
const THREADS_MAX: usize = 2;
const ORDER_0: &str = "order 0";
const ORDER_9: &str = "order 9";
const PINNED: &str = "pinned";
const MMAP: &str = "kernel mmap";
/// A range that is pinned is at least as fast as one that the kernel maps.
const PINNED_GOAL: f64 = 1.0;
const COPY: &str = "bare copy";
const COPY_AROUND: &str = "bare copy, 32 buffers";
const BATCH_MAX: usize = 32;
const TWO: &str = "order 0, 2 threads";
/// A second thread on a page may make a read dearer by a tenth.
const TWO_GOAL: f64 = 1.0 / 1.1;

/// A single hit may cost a quarter more than the bare copy of its bytes.
const COPY_GOAL: f64 = 0.8;
/// A batch may cost a twentieth more than the bare copy.
const BATCH_GOAL: f64 = 1.0 / 1.05;

/// Reads in a call, and the peer: the same reads by the kernel into as many buffers.
const AROUND: [(&str, usize); 2] = [("pread, 16 buffers", 16), ("pread, 32 buffers", BATCH_MAX)];

struct Batch {
    name: &'static str,
    reads: usize,
    of: FileOf,
    peer: &'static str,
    single: &'static str,
}
type FileOf = fn(&Files) -> &File;

const BATCHES: [Batch; 4] = [
    Batch {
        name: "order 0, 16 a call",
        reads: 16,
        of: |files| &files.order_0,
        peer: AROUND[0].0,
        single: ORDER_0,
    },
    Batch {
        name: "order 0, 32 a call",
        reads: BATCH_MAX,
        of: |files| &files.order_0,
        peer: AROUND[1].0,
        single: ORDER_0,
    },
    Batch {
        name: "order 9, 16 a call",
        reads: 16,
        of: |files| &files.order_9,
        peer: AROUND[0].0,
        single: ORDER_9,
    },
    Batch {
        name: "order 9, 32 a call",
        reads: BATCH_MAX,
        of: |files| &files.order_9,
        peer: AROUND[1].0,
        single: ORDER_9,
    },
];

#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    bytes: usize,
    step: u64,
    /// Bytes from the start in which positions lie; the whole file if `None`.
    span: Option<u64>,
    threads: usize,
    reads: usize,
    /// The ratios to `pread` that are wanted at least, at order 0 and at order 9.
    goals: [Option<f64>; 2],
}

impl Load {
    /// Whether each read goes to a page that no cache of the processor holds: there, mappings are compared as well.
    fn is_far(&self) -> bool {
        self.bytes == PAGE && self.span.is_none()
    }

    /// The goal of a single hit at order 0 beside the bare copy, if the load [`is_far`](Self::is_far).
    fn copy_goal(&self) -> Option<f64> {
        (self.is_far() && self.threads == 1).then_some(COPY_GOAL)
    }

    /// The goal of batches, if the load [`is_far`](Self::is_far).
    fn batch_goal(&self) -> Option<f64> {
        self.is_far().then_some(BATCH_GOAL)
    }
}

const LOADS: [Load; 10] = [
    load("4 KiB random, DRAM, 1 thread", PAGE, 200_000).at_least([Some(1.7), Some(2.0)]),
    load("4 KiB random, DRAM, 2 threads", PAGE, 100_000).by_two().at_least([Some(1.7), Some(2.0)]),
    load("64 B random, DRAM", 64, 400_000),
    load("4 KiB in 1 MiB (L2)", PAGE, 400_000).within(1 << 20).at_least([Some(4.0); 2]),
    load("64 B, one page", 64, 1_000_000).within(4096).at_least([Some(12.0); 2]),
    load("64 B, one page, 2 threads", 64, 1_000_000).within(4096).by_two(),
    load("4 KiB, one page", PAGE, 400_000).within(4096),
    load("4 KiB, one page, 2 threads", PAGE, 400_000).within(4096).by_two().at_least([Some(8.0); 2]),
    load("64 KiB random, DRAM", 64 << 10, 20_000),
    load("1 MiB random, DRAM", 1 << 20, 1_000),
];

const fn load(name: &'static str, bytes: usize, reads: usize) -> Load {
    let step = if bytes < PAGE { bytes as u64 } else { PAGE as u64 };
    Load { name, bytes, step, span: None, threads: 1, reads, goals: [None; 2] }
}

impl Load {
    const fn within(self, span: u64) -> Self {
        Self { span: Some(span), ..self }
    }
    const fn by_two(self) -> Self {
        Self { threads: 2, ..self }
    }
    const fn at_least(self, goals: [Option<f64>; 2]) -> Self {
        Self { goals, ..self }
    }
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let fewer = settings.pick(20, 1);
    let loads = LOADS.map(|load| Load { reads: load.reads / fewer, ..load });
    let beside = |load: &Load| load.threads == 2 && load.span == Some(4096);
    let beside_one = loads.iter().filter(|load| beside(load)).map(|load| beside_one(&files, *load));
    let beside_pread = loads.iter().map(|load| beside_pread(&files, *load));
    // First: their own files are gone when the others make theirs.
    let first = [another::case(settings)].into_iter().chain(by_c::cases(settings));
    first.chain(beside_pread).chain(beside_one).chain(values::cases(settings, &files)).collect()
}

fn beside_pread(files: &Shared<Files>, load: Load) -> Case {
    let files = files.clone();
    let case = Case::new(load.name, &METRICS, move || Ok(ways(&files.get()?, load)));
    let case = case
        .compare("cpu", ORDER_0, PREAD)
        .goal(load.goals[0])
        .compare("cpu", ORDER_9, PREAD)
        .goal(load.goals[1])
        .bound("cpu", ORDER_0, COPY)
        .goal(load.copy_goal())
        .bound("cpu", ORDER_9, COPY);
    let case = match load.is_far() {
        true => case.compare("cpu", PINNED, MMAP).goal(PINNED_GOAL).bound("cpu", PINNED, COPY),
        false => case,
    };
    let case = if load.threads == 1 { case } else { case.compare("cpu", ORDER_0, PREAD_SHARED) };
    BATCHES.iter().fold(case, |case, batch| {
        let case = case.compare("cpu", batch.name, batch.peer);
        let case = case.compare("cpu", batch.name, batch.single);
        match load.batch_goal() {
            Some(goal) => case.bound("cpu", batch.name, COPY).goal(goal),
            None if batch.reads == BATCH_MAX => case.bound("cpu", batch.name, COPY_AROUND),
            None => case,
        }
    })
}

fn ways(files: &Rc<Files>, load: Load) -> Vec<Alternative> {
    let of = |name, way| alternative(files, name, load, way);
    let mut ways = vec![
        of(PREAD, Way::Single(pread)),
        of(PREAD_SHARED, Way::Single(pread_shared)),
        of(ORDER_0, Way::Single(order_0)),
        of(ORDER_9, Way::Single(order_9)),
        of(COPY, Way::Single(bare_copy)),
        of(COPY_AROUND, Way::Around(bare_copy, BATCH_MAX)),
    ];
    if load.is_far() {
        ways.extend([of(PINNED, Way::Single(pinned)), of(MMAP, Way::Single(kernel_mmap))]);
    }
    ways.extend(AROUND.map(|(name, buffers)| of(name, Way::Around(pread, buffers))));
    ways.extend(BATCHES.iter().map(|batch| of(batch.name, Way::Batch(batch.of, batch.reads))));
    ways
}

fn beside_one(files: &Shared<Files>, load: Load) -> Case {
    let files = files.clone();
    let goal = (load.bytes == PAGE).then_some(TWO_GOAL);
    let case = Case::new(load.name, &METRICS, move || {
        let files = files.get()?;
        let alone = Load { threads: 1, ..load };
        let of = |name, load| alternative(&files, name, load, Way::Single(order_0));
        Ok(vec![of(TWO, load), of("1 thread", alone)])
    });
    case.compare("cpu", TWO, "1 thread").goal(goal)
}

struct Files {
    bytes: u64,
    kernel: [KernelFile; THREADS_MAX],
    order_0: File,
    order_9: File,
    pinned: Pinned,
    kernel_mapped: Mapped,
    copy: HugeMemory,
}

impl Files {
    /// How long the file is: a power of two.
    fn bytes_in(settings: &Settings) -> u64 {
        settings.pick(32 << 20, 1 << 30)
    }

    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = Self::bytes_in(settings);
        check_memory(bytes * 4 + (512 << 20))?;
        let scratch = Scratch::new(&settings.folder, bytes)?;
        let cached = |order| {
            let builder =
                Cache::builder().memory(bytes + bytes / 16 + (64 << 20)).pinned_max(bytes + (4 << 20));
            let file = builder.folio_order_max(order).build()?.open(scratch.path())?;
            warm(file)
        };
        let (order_0, order_9) = (cached(0)?, cached(9)?);
        let kernel = [KernelFile::open(scratch.path())?, KernelFile::open(scratch.path())?];
        let mut copy = HugeMemory::new(bytes as usize)?;
        // Twice: the kernel may have dropped pages meanwhile that it had from the writing.
        kernel[0].read_exact_at(&mut copy, 0)?;
        kernel[0].read_exact_at(&mut copy, 0)?;
        check_warm(&kernel[..1])?;
        let pinned = order_9.pin(0, bytes as usize)?;
        let kernel_mapped = Mapped::at_random(&kernel[0], bytes as usize)?;
        for mapped in [pinned.as_ref(), &kernel_mapped] {
            check_content(mapped)?;
        }
        Ok(Self { bytes, kernel, order_0, order_9, pinned, kernel_mapped, copy })
    }
}

/// Looks at each page of what is mapped, which is the file.
fn check_content(mapped: &[u8]) -> Result<(), Unmeasured> {
    let pages = (0_u64..).step_by(PAGE).zip(mapped.chunks(PAGE));
    match pages.into_iter().find(|(position, page)| !is_from(page, *position)) {
        None => Ok(()),
        Some((position, _)) => {
            Err(Unmeasured::Failed(format!("what is mapped is not what stands at {position}")))
        }
    }
}

fn warm(file: File) -> Result<File, Unmeasured> {
    let mut buffer = vec![0; 1 << 20];
    let mut position = 0;
    while let bytes @ 1.. = file.read_at(&mut buffer, position)? {
        position += bytes as u64;
    }
    if file.cached_pages() == file.len() / PAGE as u64 {
        return Ok(file);
    }
    Err(Unmeasured::Failed(format!("only {} pages of it were kept", file.cached_pages())))
}

type Read = fn(&Files, usize, &mut [u8], u64);

/// Where a page is read to: at the beginning of one, as a program that cares would have it.
#[repr(align(4096))]
struct Aligned([u8; PAGE]);

#[derive(Clone, Copy)]
enum Way {
    /// One after another, always into the same buffer.
    Single(Read),
    /// One after another, each into the next of so many buffers.
    Around(Read, usize),
    /// A number of reads in each call, each into a buffer of its own.
    Batch(FileOf, usize),
}

impl Way {
    fn buffers(self) -> usize {
        match self {
            Self::Single(_) => 1,
            Self::Around(_, buffers) | Self::Batch(_, buffers) => buffers,
        }
    }
}

fn pread(files: &Files, thread: usize, buffer: &mut [u8], position: u64) {
    files.kernel[thread].read_exact_at(buffer, position).expect("the kernel has it");
}
fn pread_shared(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    pread(files, 0, buffer, position);
}
fn order_0(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    assert_eq!(files.order_0.read_at(buffer, position).expect("it is cached"), buffer.len());
}
fn order_9(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    assert_eq!(files.order_9.read_at(buffer, position).expect("it is cached"), buffer.len());
}
fn pinned(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    buffer.copy_from_slice(&files.pinned.as_ref()[position as usize..][..buffer.len()]);
}
fn kernel_mmap(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    buffer.copy_from_slice(&files.kernel_mapped[position as usize..][..buffer.len()]);
}
fn bare_copy(files: &Files, _thread: usize, buffer: &mut [u8], position: u64) {
    buffer.copy_from_slice(&files.copy[position as usize..][..buffer.len()]);
}

fn alternative(files: &Rc<Files>, name: &'static str, load: Load, way: Way) -> Alternative {
    let files = Rc::clone(files);
    Alternative::new(name, move |repetition| {
        let files: &Files = &files;
        let ready = |thread| Reader::new(files, load, way, ThreadRun { thread, repetition });
        let spent = together_ready(load.threads, ready, Reader::read_all, |_| {});
        Ok(vec![spent.cpu_ns / (load.threads * load.reads) as f64])
    })
}

struct Reader<'f> {
    files: &'f Files,
    load: Load,
    way: Way,
    thread: usize,
    places: Places,
    memory: Vec<u8>,
    /// Where in `memory` the first buffer begins: at a page, as a program that cares would have it.
    start: usize,
}

impl<'f> Reader<'f> {
    /// With buffers that have been written to, so that no read is the first that touches one.
    fn new(files: &'f Files, load: Load, way: Way, run: ThreadRun) -> Self {
        let memory = vec![1; load.bytes * way.buffers() + PAGE];
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE - 1);
        Self { files, load, way, thread: run.thread, places: run.places(), memory, start }
    }

    fn read_all(&mut self) {
        let Self { files, load, way, thread, places, memory, start } = self;
        let span = load.span.unwrap_or(files.bytes - load.bytes as u64 + load.step);
        let next = || places.next(span / load.step) * load.step;
        let memory = &mut memory[*start..*start + load.bytes * way.buffers()];
        match *way {
            Way::Single(read) | Way::Around(read, _) => {
                let read = |buffer: &mut [u8], position| read(files, *thread, buffer, position);
                singly(*load, read, memory, next);
            }
            Way::Batch(of, _) => batches(of(files), *load, memory, next),
        }
    }
}

fn singly(load: Load, read: impl Fn(&mut [u8], u64), memory: &mut [u8], mut next: impl FnMut() -> u64) {
    let (mut position, mut start) = (0, 0);
    for _ in 0..load.reads {
        position = next();
        let buffer = &mut memory[start..start + load.bytes];
        read(buffer, position);
        std::hint::black_box(&buffer);
        start = (start + load.bytes) % memory.len();
    }
    let last = &memory[(start + memory.len() - load.bytes) % memory.len()..];
    assert!(is_from(last, position), "what was read is not what stands at {position}");
}

fn batches(file: &File, load: Load, memory: &mut [u8], mut next: impl FnMut() -> u64) {
    let buffers = memory.len() / load.bytes;
    let mut left = load.reads;
    while left > 0 {
        let count = left.min(buffers);
        // Arrays on the stack, as a program would have them; the longer one for both sizes.
        let mut chunks = memory.chunks_exact_mut(load.bytes).take(count);
        let mut reads: [_; BATCH_MAX] = std::array::from_fn(|_| match chunks.next() {
            Some(buffer) => BatchRead::new(buffer, next()),
            None => BatchRead::new(&mut [], 0),
        });
        file.read_batch(&mut reads[..count]);
        let is_full = |read: &BatchRead<'_>| read.result().is_ok_and(|bytes| bytes == load.bytes);
        assert!(reads[..count].iter().all(is_full), "every read of a batch is answered in full");
        let is_right = |read: &BatchRead<'_>| is_from(read.bytes(), read.position());
        left -= count;
        if left == 0 {
            assert!(reads[..count].iter().all(is_right), "each answer is what stands at its place");
        }
        std::hint::black_box(&reads);
    }
}
