//! Populated: a snapshot file becomes a guest's memory, from its first byte to its last. What do batched grabs gain?
//!
//! ```text
//!   cold   nothing of the file is in memory, and the cache is new: the device and fresh memory are in it
//!   warm   the same cache has all of the file, and had as much memory before: look up, take folios, copy
//!
//!   batched      the folios of a range are found and created together, under one hold of the index lock
//!   one by one   a lookup, and a hold of the lock, for each
//! ```
//!
//! The memory is a memory file: in folios of a page, like the kernel's guest memory, and in folios of up to 2 MiB,
//! Quinion's default. `populate` measures the grabs alone.

use std::cell::OnceCell;
use std::fs::File as KernelFile;
use std::rc::Rc;
use std::time::Instant;

use quinion::internals::mapping::IndexHooks;
use quinion::{Cache, File};
use quinion_testing::ablations::OneByOne;

use super::{Before, pick};
use crate::experiments::populate::{cache, file};
use crate::fixtures::caches::Drops;
use crate::fixtures::scratch::{FirstWords, Scratch};
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 2] = [Metric::cost("time", "s"), Metric::cost("cpu", "s")];
const BATCHED: &str = "batched";
const SINGLE: &str = "one by one";
const WAYS: [Insertion; 2] = [
    Insertion { name: BATCHED, hooks: None },
    Insertion { name: SINGLE, hooks: OneByOne::GRABS_AND_LOOKUPS },
];
const REPEAT: usize = 3;
const STEP: usize = 2 << 20;

const CASES: [(&str, u8, Before); 4] = [
    ("populated cold, folios of 4 KiB", 0, Before::Cold),
    ("populated cold, folios of 2 MiB", 9, Before::Cold),
    ("populated warm, folios of 4 KiB", 0, Before::Warm),
    ("populated warm, folios of 2 MiB", 9, Before::Warm),
];

/// How folios come into the index of a cache.
#[derive(Clone, Copy)]
struct Insertion {
    name: &'static str,
    hooks: Option<&'static dyn IndexHooks>,
}

struct Snapshot {
    scratch: Scratch,
    drops: Drops,
}

fn bytes(settings: &Settings) -> u64 {
    pick(settings, 8 << 20, 64 << 20, 512 << 20)
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let snapshot = Shared::new(settings, |settings| {
        // Both ways keep a cache with the file and the memory.
        check_memory(6 * bytes(settings) + (512 << 20))?;
        let scratch = Scratch::new(&settings.folder, bytes(settings))?;
        Ok(Snapshot { scratch, drops: Drops::of(settings) })
    });
    let mib = bytes(settings) >> 20;
    let case = |(name, order, before)| {
        let snapshot = snapshot.clone();
        let case = Case::new(format!("snapshot file of {mib} MiB, {name}"), &METRICS, move || {
            let snapshot = snapshot.get()?;
            Ok(WAYS.map(|insertion| alternative(&snapshot, insertion, order, before)).into())
        });
        let case = case.compare("time", BATCHED, SINGLE).compare("cpu", BATCHED, SINGLE);
        // A run that starts with the file cached needs a run before it that cached it.
        if before == Before::Cold { case.without_warm_up() } else { case }.usually(REPEAT)
    };
    CASES.into_iter().map(case).collect()
}

fn alternative(snapshot: &Rc<Snapshot>, insertion: Insertion, order: u8, before: Before) -> Alternative {
    let (snapshot, warm) = (Rc::clone(snapshot), OnceCell::new());
    Alternative::new(insertion.name, move |_| {
        let cache = || cache(2 * snapshot.scratch.bytes(), order, insertion.hooks);
        if before == Before::Warm {
            if warm.get().is_none() {
                let _ = warm.set(snapshot.warmed(cache()?)?);
            }
            let (cache, source) = warm.get().expect("it was just made");
            return snapshot.populate(cache, || Ok(source.clone()));
        }
        snapshot.drops.make_cold(&[KernelFile::open(snapshot.scratch.path())?])?;
        let cache = cache()?;
        snapshot.populate(&cache, || Ok(cache.open(snapshot.scratch.path())?))
    })
}

impl Snapshot {
    fn warmed(&self, cache: Cache) -> Result<(Cache, File), Unmeasured> {
        let source = cache.open(self.scratch.path())?;
        let (mut buffer, mut position) = (vec![0; STEP], 0);
        while let bytes @ 1.. = source.read_at(&mut buffer, position)? {
            position += bytes as u64;
        }
        Ok((cache, source))
    }

    fn populate(
        &self,
        cache: &Cache,
        open: impl FnOnce() -> Result<File, Unmeasured>,
    ) -> Result<Vec<f64>, Unmeasured> {
        let bytes = self.scratch.bytes();
        let (start, cpu) = (Instant::now(), process_cpu_ns());
        let memory = file(cache, bytes)?;
        let came = memory.populate_from_file(0..bytes, &open()?, 0)?;
        let spent = vec![start.elapsed().as_secs_f64(), (process_cpu_ns() - cpu) / 1e9];
        if came < bytes {
            return Err(Unmeasured::Failed(format!(
                "only {came} of {bytes} bytes came into the guest's memory"
            )));
        }
        let (mut buffer, mut first_words) = (vec![0; STEP], FirstWords::default());
        for position in (0..bytes).step_by(STEP) {
            let found = memory.read_at(&mut buffer, position)?;
            first_words.at(&buffer[..found], position);
        }
        first_words.expect(bytes)?;
        Ok(spent)
    }
}
