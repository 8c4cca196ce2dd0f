//! Shrinker: a cache that becomes smaller while the machine is short of memory.
//!
//! ```text
//!   background thread, twice a second,    source -> sample -> target size -> resize, without waiting
//!   ten times if it is tight                            up to what the user said last
//! ```
//!
//! `pressure/` has the numbers and the decision. The cache returns to the size set when it was built or by the last
//! resize, which is in force at once, also under pressure. Protected minima of pools are not given back. Pages
//! in flight or pinned at a look go at a later one.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::background::BackgroundTask;
use crate::pressure::{Pressure, PressureSample, PressureSource, Sizes, SourceReading, target_size};

use super::shared::Filemap;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// Where less than a quarter of a limit is left: programs that take the rest take it fast.
const SAMPLE_INTERVAL_TIGHT: Duration = Duration::from_millis(100);
/// A shorter time between looks says nothing.
const APART_MIN: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Shrinker {
    filemap: Weak<Filemap>,
    memory_min: u64,
    watch: Mutex<PressureWatch>,
}

#[derive(Debug)]
struct PressureWatch {
    /// Source of the pressure, this process's by default; sought at the first look, which takes a hundred system calls:
    /// more than many a program makes.
    source: Option<PressureSource>,
    at: Instant,
    last: Option<SourceReading>,
    calm_samples: u32,
}

impl Shrinker {
    /// Registers the task with the background thread, as long as the value lives.
    pub fn begin(filemap: &Arc<Filemap>, pressure: Pressure) -> Arc<Self> {
        let watch =
            PressureWatch { source: pressure.source, at: Instant::now(), last: None, calm_samples: 0 };
        let task = Arc::new(Self {
            filemap: Arc::downgrade(filemap),
            memory_min: pressure.memory_min.max(filemap.arena.memory_min()),
            watch: Mutex::new(watch),
        });
        let known: Weak<Self> = Arc::downgrade(&task);
        filemap.supply.background.add(known);
        filemap.supply.background.wake();
        task
    }
}

impl PressureWatch {
    /// `None` too soon after the last look. Waits for memory are known from the second look on.
    fn sample(&mut self) -> Option<PressureSample> {
        let apart = self.at.elapsed();
        if apart < APART_MIN {
            return None;
        }
        let reading = self.source.get_or_insert_with(PressureSource::of_this_process).read();
        let before = self.last.replace(reading).and_then(|last| last.stalled_us);
        let stalled = reading.stalled_us.zip(before).map(|(now, then)| {
            (u128::from(now.saturating_sub(then)) * 1000 / apart.as_micros()).min(1000) as u32
        });
        self.at = Instant::now();
        Some(PressureSample { stalled_thousandths: stalled, headroom: reading.headroom })
    }
}

impl BackgroundTask for Shrinker {
    fn run(&self) -> Option<Duration> {
        let filemap = self.filemap.upgrade()?;
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sample) = watch.sample() else { return Some(SAMPLE_INTERVAL_TIGHT) };
        let is_tight = sample.headroom.is_some_and(|headroom| headroom.free < headroom.limit / 4);
        let again = if is_tight { SAMPLE_INTERVAL_TIGHT } else { SAMPLE_INTERVAL };
        let (stats, max) = (filemap.arena.stats(), filemap.bound().configured());
        let grown = stats.grown_bytes + stats.control_bytes;
        let least =
            self.memory_min.max(filemap.bound().memory_for_protected()).max(filemap.arena.memory_min());
        let sizes = Sizes { bound: stats.bound_bytes, grown, min: least.min(max), max };
        let target = target_size(sample, sizes, &mut watch.calm_samples);
        drop(watch);
        if target != sizes.bound {
            filemap.bound().resize_if_configured(target, max);
        }
        Some(again)
    }
}
