//! Cached: writes that wait for nothing, of new pages and over cached ones.
//!
//! Goals are set where the kernel has the page too: its write then is a lookup in the tree, a lock of the page and a
//! copy. One and a half times as fast is what a storage engine would notice.

use std::rc::Rc;

use super::{MEMORY_OF_CHANGED, Source, Written};
use crate::fixtures::pages::{PAGE, shuffled};
use crate::fixtures::places::ThreadRun;
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::timing::together_ready;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 1] = [Metric::cost("cpu", "ns/write")];
const KERNEL: &str = "pwrite";
const ORDER_0: &str = "order 0";
const ORDER_9: &str = "order 9";
const GOAL: f64 = 1.5;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sequence {
    InOrder,
    /// Each page of the file once, in an order that looks random.
    EachOnce,
    Anywhere,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Nothing,
    Clean,
    Changed,
}

#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    bytes: usize,
    places: Sequence,
    before: Before,
    threads: usize,
    /// The divisor of the number of writes in a quick run.
    fewer: usize,
    goal: Option<f64>,
}

const LOADS: [Load; 7] = [
    load("4 KiB in order, new pages", PAGE, Sequence::InOrder, Before::Nothing),
    load("4 KiB random, new pages", PAGE, Sequence::EachOnce, Before::Nothing),
    load("4 KiB random over clean pages", PAGE, Sequence::EachOnce, Before::Clean).at_least(GOAL),
    load("4 KiB random over changed pages", PAGE, Sequence::Anywhere, Before::Changed).at_least(GOAL),
    load("4 KiB random over changed pages, 2 threads", PAGE, Sequence::Anywhere, Before::Changed)
        .by_two()
        .at_least(GOAL),
    load("64 B random over changed pages", 64, Sequence::Anywhere, Before::Changed),
    load("64 B random over changed pages, 2 threads", 64, Sequence::Anywhere, Before::Changed).by_two(),
];

const fn load(name: &'static str, bytes: usize, places: Sequence, before: Before) -> Load {
    Load { name, bytes, places, before, threads: 1, fewer: 1, goal: None }
}

impl Load {
    const fn by_two(self) -> Self {
        Self { threads: 2, ..self }
    }
    const fn at_least(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }
}

struct Files {
    kernel: Written,
    order_0: Written,
    order_9: Written,
}

impl Files {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = settings.pick(8 << 20, 64 << 20);
        check_memory(bytes * (2 * MEMORY_OF_CHANGED + 3) + (512 << 20))?;
        let folder = &settings.folder;
        let (order_0, order_9) = (Written::ours(folder, bytes, 0)?, Written::ours(folder, bytes, 9)?);
        Ok(Self { kernel: Written::kernel(folder, bytes)?, order_0, order_9 })
    }
}

type FileOf = fn(&Files) -> &Written;

pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let fewer = settings.pick(8, 1);
    LOADS.map(|load| case(&files, Load { fewer, ..load })).into()
}

fn case(files: &Shared<Files>, load: Load) -> Case {
    let files = files.clone();
    let prepare = move || {
        let files = files.get()?;
        let of = |name, of: FileOf| alternative(&files, name, of, load);
        Ok(vec![
            of(KERNEL, |files| &files.kernel),
            of(ORDER_0, |files| &files.order_0),
            of(ORDER_9, |files| &files.order_9),
        ])
    };
    Case::new(load.name, &METRICS, prepare)
        .compare("cpu", ORDER_0, KERNEL)
        .goal(load.goal)
        .compare("cpu", ORDER_9, KERNEL)
        .goal(load.goal)
}

fn alternative(files: &Rc<Files>, name: &'static str, of: FileOf, load: Load) -> Alternative {
    let files = Rc::clone(files);
    Alternative::new(name, move |repetition| {
        let written = of(&files);
        prepare(written, load.before)?;
        let writes = match load.places {
            Sequence::Anywhere => 200_000 / load.fewer / load.threads,
            Sequence::InOrder | Sequence::EachOnce => (written.bytes / load.bytes as u64) as usize,
        };
        let ready = |thread| Writer::new(written, load, ThreadRun { thread, repetition }, writes);
        let spent = together_ready(load.threads, ready, Writer::write_all, |writer| writer.check());
        Ok(vec![spent.cpu_ns / (load.threads * writes) as f64])
    })
}

fn prepare(written: &Written, before: Before) -> Result<(), Unmeasured> {
    let Written { target, bytes, .. } = written;
    match before {
        Before::Nothing => target.make_cold(),
        Before::Clean => {
            target.make_warm(*bytes)?;
            target.sync()
        }
        Before::Changed => {
            target.make_warm(*bytes)?;
            let mut source = Source::new(PAGE);
            for position in (0..*bytes).step_by(PAGE) {
                target.write(0, source.of(position, 0), position);
            }
            Ok(())
        }
    }
}

struct Writer<'w> {
    written: &'w Written,
    load: Load,
    run: ThreadRun,
    writes: usize,
    source: Source,
    last: u64,
}

impl<'w> Writer<'w> {
    fn new(written: &'w Written, load: Load, run: ThreadRun, writes: usize) -> Self {
        Self { written, load, run, writes, source: Source::new(load.bytes), last: 0 }
    }

    fn write_all(&mut self) {
        let Self { written, load, run, writes, source, last } = self;
        let ThreadRun { thread, repetition } = *run;
        let (steps, bits) = (written.bytes / load.bytes as u64, (written.bytes / PAGE as u64).ilog2());
        // Threads write in halves of their own, so that each finds what it wrote.
        let (share, mut places) = (steps / load.threads as u64, run.places());
        let mut next = |nth: u64| match load.places {
            Sequence::InOrder => nth,
            Sequence::EachOnce => shuffled(nth, bits),
            Sequence::Anywhere => thread as u64 * share + places.next(share),
        };
        for nth in 0..*writes as u64 {
            *last = next(nth) * load.bytes as u64;
            written.target.write(thread, source.of(*last, repetition), *last);
        }
    }

    fn check(&mut self) {
        let bytes = self.source.of(self.last, self.run.repetition);
        self.written.target.check(self.last, bytes).expect("it was just written");
    }
}
