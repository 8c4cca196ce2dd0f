//! Synced: a few bytes at the end of a file, and a sync, again and again.
//!
//! Each sync waits for the device, which is nearly all of the time. So no alternative can be much faster than another;
//! the goal is not to be slower. The bytes that the device writes for each byte, the file system's journal included,
//! explain the wait; writes of other processes count in them, too.

use std::cell::Cell;
use std::fs::File as KernelFile;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Instant;

use quinion::{Cache, Durability, File, OpenOptions};

use super::Source;
use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::Scratch;
use crate::harness::machine::{device_written, passed};
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const DEVICE: &str = "device (disk)";
const METRICS: [Metric; 3] = [
    Metric::cost("time", "us/append"),
    Metric::cost("cpu", "us/append"),
    Metric::cost(DEVICE, "bytes written per byte"),
];
const KERNEL: &str = "write and fdatasync";
const OURS: &str = "append and sync_data";
const KERNEL_DURABLE: &str = "O_DSYNC";
const OURS_DURABLE: &str = "Durability::Data";
const GOAL: f64 = 1.0;
const SIZES: [(&str, usize); 3] = [("100 B", 100), ("4 KiB", PAGE), ("16 KiB", 4 * PAGE)];

pub fn cases(settings: &Settings) -> Vec<Case> {
    SIZES.map(|(name, bytes)| case(settings, name, bytes)).into()
}

fn case(settings: &Settings, name: &str, bytes: usize) -> Case {
    let (folder, count) = (settings.folder.clone(), settings.pick(20, 300));
    let prepare = move || {
        let appends = Appends { folder, bytes, count };
        Ok(vec![
            appends.kernel(KERNEL, Durable::BySync)?,
            appends.ours(OURS, Durable::BySync)?,
            appends.kernel(KERNEL_DURABLE, Durable::ByWrite)?,
            appends.ours(OURS_DURABLE, Durable::ByWrite)?,
        ])
    };
    Case::new(format!("appends of {name}, each synced"), &METRICS, prepare)
        .compare("time", OURS, KERNEL)
        .goal(GOAL)
        .compare("cpu", OURS, KERNEL)
        .compare(DEVICE, OURS, KERNEL)
        .compare("time", OURS_DURABLE, KERNEL_DURABLE)
        .goal(GOAL)
        .compare("cpu", OURS_DURABLE, KERNEL_DURABLE)
        .compare(DEVICE, OURS_DURABLE, KERNEL_DURABLE)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Durable {
    BySync,
    ByWrite,
}

/// `count` appends of `bytes` bytes to a new file in `folder`.
#[derive(Clone)]
struct Appends {
    folder: PathBuf,
    bytes: usize,
    count: usize,
}

impl Appends {
    fn timed(&self, mut append: impl FnMut(u64) -> Result<(), Unmeasured>) -> Result<Vec<f64>, Unmeasured> {
        let Self { folder, bytes, count } = self;
        let written = device_written(folder);
        let (start, cpu) = (Instant::now(), process_cpu_ns());
        for nth in 0..*count as u64 {
            append(nth)?;
        }
        let (elapsed, cpu) = (start.elapsed().as_nanos() as f64, process_cpu_ns() - cpu);
        let written = passed(written, device_written(folder));
        let each = |ns: f64| ns / 1000.0 / *count as f64;
        Ok(vec![each(elapsed), each(cpu), written / (bytes * count) as f64])
    }

    fn ours(&self, name: &'static str, durable: Durable) -> Result<Alternative, Unmeasured> {
        let (appends, bytes) = (self.clone(), self.bytes);
        let scratch = Scratch::new(&self.folder, 0)?;
        let cache = Cache::builder().memory(64 << 20).build()?;
        let durability = if durable == Durable::BySync { Durability::OnSync } else { Durability::Data };
        let mut options = OpenOptions::new();
        options.write(true).durability(durability);
        let file: File = cache.open_with(scratch.path(), &options)?;
        let mut source = Source::new(bytes);
        let end = Cell::new(0);
        Ok(Alternative::new(name, move |repetition| {
            let _alive = &scratch;
            let told = appends.timed(|_| {
                end.set(file.append(source.of(end.get(), repetition))? + bytes as u64);
                if durable == Durable::BySync { Ok(file.sync_data()?) } else { Ok(()) }
            })?;
            let dirty = file.dirty_bytes()?;
            if dirty > 0 {
                return Err(Unmeasured::Failed(format!("{dirty} bytes are not written after a sync")));
            }
            Ok(told)
        }))
    }

    fn kernel(&self, name: &'static str, durable: Durable) -> Result<Alternative, Unmeasured> {
        let (appends, bytes) = (self.clone(), self.bytes);
        let scratch = Scratch::new(&self.folder, 0)?;
        let flags = if durable == Durable::BySync { 0 } else { libc::O_DSYNC };
        let file = KernelFile::options().write(true).custom_flags(flags).open(scratch.path())?;
        let mut source = Source::new(bytes);
        let end = Cell::new(0);
        Ok(Alternative::new(name, move |repetition| {
            let _alive = &scratch;
            appends.timed(|_| {
                file.write_all_at(source.of(end.get(), repetition), end.get())?;
                end.set(end.get() + bytes as u64);
                if durable == Durable::BySync { Ok(file.sync_data()?) } else { Ok(()) }
            })
        }))
    }
}
