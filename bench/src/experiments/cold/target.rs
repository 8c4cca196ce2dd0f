//! Target: the file that is read cold, and the cost of reading it.
//!
//! The clock and the counters run from opening the file to dropping everything that was built to read it. The file is
//! made cold before, which does not count. The peak of memory covers the same time (`limit`).

use std::fs::File as KernelFile;
use std::path::PathBuf;
use std::time::Instant;

use quinion::{Cache, File};

use crate::fixtures::caches::Drops;
use crate::fixtures::limit::peak_of;
use crate::fixtures::scratch::Scratch;
use crate::harness::machine::{device_bytes, kernel_thread_seconds, passed, process_bytes};
use crate::harness::{Settings, Unmeasured};

pub struct Target {
    pub scratch: Scratch,
    /// MiB of the caches that read the file from end to end.
    pub memory_mib: u64,
    folder: PathBuf,
    drops: Drops,
}

#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub seconds: f64,
    pub cpu_seconds: f64,
    /// CPU time of the kernel's threads, of the whole machine.
    pub kernel_seconds: f64,
    /// The peak of memory, the kernel's page cache included; not a number if it was not counted.
    pub memory_bytes: f64,
    /// Bytes that the device read, as the disk, the process and the cache count them; not a number where there is no
    /// such counter.
    pub device_bytes: [f64; 3],
}

impl Target {
    pub fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(&settings.folder, settings.pick(256 << 20, 4 << 30))?;
        let (memory_mib, folder) = (settings.pick(64, 256), settings.folder.clone());
        Ok(Self { scratch, memory_mib, folder, drops: Drops::of(settings) })
    }

    pub fn open(&self) -> Result<KernelFile, Unmeasured> {
        Ok(KernelFile::open(self.scratch.path())?)
    }

    /// The cost of `run` from a cold start. `run` returns what the cache says it has read, if there was one.
    pub fn measure(
        &self,
        cpu_ns: fn() -> f64,
        run: impl FnOnce() -> Result<Option<u64>, Unmeasured>,
    ) -> Result<Cost, Unmeasured> {
        self.drops.make_cold(&[self.open()?])?;
        let counts = || [device_bytes(&self.folder), process_bytes()];
        let timed = || {
            let (before, [kernel, _]) = (counts(), kernel_thread_seconds());
            let (cpu, start) = (cpu_ns(), Instant::now());
            let cache = run()?;
            let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_ns() - cpu);
            let kernel_seconds = kernel_thread_seconds()[0] - kernel;
            Ok((cache, seconds, cpu, kernel_seconds, [before, counts()]))
        };
        let ((cache, seconds, cpu, kernel_seconds, [before, after]), memory_bytes) = peak_of(timed)?;
        let [disk, process] = [0, 1].map(|count| passed(before[count], after[count]));
        let device_bytes = [disk, process, cache.map_or(f64::NAN, |bytes| bytes as f64)];
        Ok(Cost { seconds, cpu_seconds: cpu / 1e9, kernel_seconds, memory_bytes, device_bytes })
    }

    pub fn cached(&self, memory: u64) -> Result<Cached, Unmeasured> {
        let cache = Cache::builder().memory(memory).build()?;
        let file = cache.open(self.scratch.path())?;
        if !file.is_direct() {
            let why = "the file system refuses direct reads; choose another folder by --scratch";
            return Err(Unmeasured::Missing(why.to_owned()));
        }
        Ok(Cached { file, cache })
    }
}

pub struct Cached {
    pub file: File,
    cache: Cache,
}

impl Cached {
    pub fn device_bytes(self) -> Option<u64> {
        Some(self.cache.stats().device_bytes)
    }
}
