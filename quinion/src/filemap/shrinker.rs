//! Give way: a cache that becomes smaller while the machine is short of memory.
//!
//! ```text
//!   background thread, twice a second,    source -> sample -> target size -> resize, without waiting
//!   ten times if it is tight                            up to what the user said last
//! ```
//!
//! The numbers and the decision are in `pressure/`; here the one is taken to the other. What the user said, when
//! the cache was built or by the last resize, is what it comes back to. A user's resize is in force at once, also
//! under pressure, and the next look decides from there. What pools protect is not given way.
//!
//! Not an invariant: that all is given back at a look. What is in flight or pinned then goes at a later one.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::background::BackgroundTask;
use crate::pressure::{Pressure, PressureSample, PressureSource, Sizes, SourceReading, target_size};
use crate::sync::lock::Mutex;

use super::shared::Filemap;

/// From one look to the next.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// The same where there is a limit and less than a quarter of it is left: programs that take the rest take it fast.
const LOOK_SOON: Duration = Duration::from_millis(100);
/// Looks that follow each other more closely than that say nothing of the time between them.
const APART_MIN: Duration = Duration::from_millis(50);

/// The task of looking for pressure.
#[derive(Debug)]
pub(crate) struct Shrinker {
    filemap: Weak<Filemap>,
    gauge: PressureSource,
    memory_min: u64,
    seen: Mutex<LastSample>,
}

/// The last look.
#[derive(Debug)]
struct LastSample {
    at: Instant,
    reading: SourceReading,
    calm_looks: u32,
}

impl Shrinker {
    /// The task for `filemap`, made known to its background thread and begun; it is done as long as the value lives.
    pub fn begin(filemap: &Arc<Filemap>, pressure: Pressure) -> Arc<Self> {
        let gauge = pressure.gauge.unwrap_or_else(PressureSource::of_this_process);
        let seen = LastSample { at: Instant::now(), reading: gauge.read(), calm_looks: 0 };
        let task = Arc::new(Self {
            filemap: Arc::downgrade(filemap),
            memory_min: pressure.memory_min.max(filemap.arena.memory_min()),
            gauge,
            seen: Mutex::new(seen),
        });
        let known: Weak<Self> = Arc::downgrade(&task);
        filemap.supply.background.add(known);
        filemap.supply.background.poke();
        task
    }

    /// What there is to be seen, if the last look is long enough ago.
    fn look(&self, seen: &mut LastSample) -> Option<PressureSample> {
        let apart = seen.at.elapsed();
        if apart < APART_MIN {
            return None;
        }
        let reading = self.gauge.read();
        let stalled = reading.stalled_us.zip(seen.reading.stalled_us).map(|(now, then)| {
            (u128::from(now.saturating_sub(then)) * 1000 / apart.as_micros()).min(1000) as u32
        });
        (seen.at, seen.reading) = (Instant::now(), reading);
        Some(PressureSample { stalled_thousandths: stalled, headroom: reading.headroom })
    }
}

impl BackgroundTask for Shrinker {
    fn run(&self) -> Option<Duration> {
        let filemap = self.filemap.upgrade()?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(look) = self.look(&mut seen) else { return Some(LOOK_SOON) };
        let is_tight = look.headroom.is_some_and(|headroom| headroom.free < headroom.limit / 4);
        let again = if is_tight { LOOK_SOON } else { LOOK_AGAIN };
        let (stats, max) = (filemap.arena.stats(), filemap.memory_configured());
        let grown = stats.grown_bytes + stats.control_bytes;
        let least = self.memory_min.max(filemap.memory_for_protected()).max(filemap.arena.memory_min());
        let sizes = Sizes { bound: stats.bound_bytes, grown, min: least.min(max), max };
        let target = target_size(look, sizes, &mut seen.calm_looks);
        drop(seen);
        if target != sizes.bound {
            filemap.resize_if_configured(target, max);
        }
        Some(again)
    }
}
