//! Throttle: a writer that dirties more than can be written waits, before it takes a lock.
//!
//! It writes its own file meanwhile, and fetches completions: so a lone writer needs no other thread. It does
//! not sleep in the wait queue of the device, because that wait has no end if the device has none; it sleeps
//! a millisecond at a time and checks the state again. Which writers continue, and when, is `plan::throttle_verdict`.
//! The pages of devices that are stuck count for their own writers alone (`stuck.rs`).
//!
//! Cost, where nothing is to be waited for: some loads. While a device is stuck that has more pages than the throttle
//! allows, a lock, and once in a millisecond a look at the list of files.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::backend::{ReapMode, pause};
use crate::mapping::Mapping;
use crate::stats::Count;

use super::Writeback;
use super::plan::{DirtyLimits, ThrottleVerdict, WriterState, throttle_verdict};
use super::stuck::CountedPages;

/// Sleep of a throttled writer between two looks at the dirty pages.
const SLEEP: Duration = Duration::from_millis(1);

impl Writeback {
    /// A writer is about to dirty `pages` pages of `mapping`, and holds no lock but Write: waits if too much is dirty,
    /// for [`wait_max`](super::WritebackOptions::wait_max) at most.
    ///
    /// # Errors
    /// Too much is dirty, and write-back of this file failed meanwhile: its error, which every handle is told of by its
    /// next sync as well. Or too little was written for as long as is waited, and twice as much is dirty as should be:
    /// of this file's device among others, or nearly all of memory. Either way the write should not be begun.
    pub fn throttle(&self, mapping: &Arc<Mapping>, pages: u64) -> io::Result<()> {
        let limits = self.limits();
        if self.totals.total() <= limits.throttle {
            return Ok(());
        }
        self.wait_for_turn(mapping, pages.max(1))
    }

    /// Whether so much is dirty that a wait in vain may be an error: a call that writes on and on is throttled again.
    pub fn is_above_ceiling(&self) -> bool {
        self.totals.total() > self.limits().ceiling
    }

    #[cold]
    fn wait_for_turn(&self, mapping: &Arc<Mapping>, pages: u64) -> io::Result<()> {
        let began = Instant::now();
        // While another device is stuck, most writes come here and go on at once.
        let limits = self.limits();
        if self.counted_for(mapping, &limits).pages <= limits.throttle {
            return Ok(());
        }
        self.wake();
        // Waiting writers continue when as much was written as they want to dirty together.
        let share = self.awaited.fetch_add(pages, Ordering::Relaxed) + pages;
        let waiting = AwaitedPages { all: &self.awaited, pages };
        let outcome = self.sleep_until_turn(mapping, share, began);
        drop(waiting);
        self.counters.add(Count::ThrottledMicros, began.elapsed().as_micros() as u64);
        outcome
    }

    fn sleep_until_turn(&self, mapping: &Arc<Mapping>, share: u64, began: Instant) -> io::Result<()> {
        let state = mapping.writeback();
        let (failures, written) = (state.failures().count, self.written.load(Ordering::Relaxed));
        loop {
            self.help(mapping);
            // The bound may be another by now.
            let limits = self.limits();
            let CountedPages { pages: unwritten, is_own_stuck } = self.counted_for(mapping, &limits);
            let written_since = self.written.load(Ordering::Relaxed).wrapping_sub(written);
            let waiting = WriterState {
                unwritten,
                own: mapping.writeback().dirty_pages().total(),
                files: self.files_listed() as u64,
                written: if is_own_stuck { 0 } else { written_since },
                share,
                waited: began.elapsed(),
                failed: state.failures().count != failures,
            };
            match throttle_verdict(&limits, &waiting, self.options.wait_max) {
                ThrottleVerdict::Go => return Ok(()),
                ThrottleVerdict::Wait => pause(SLEEP),
                ThrottleVerdict::Fail => return Err(io::Error::from_raw_os_error(state.failures().errno)),
                ThrottleVerdict::Stuck if self.is_held_up_by_others(mapping, &limits) => return Ok(()),
                ThrottleVerdict::Stuck => return Err(stuck(&limits, self.options.wait_max)),
            }
        }
    }

    fn help(&self, mapping: &Arc<Mapping>) {
        if let Some(writer) = mapping.writeback().writer() {
            writer.reap(ReapMode::Ready, &mut || false);
        }
        if mapping.writeback().dirty_pages().writeback() == 0 {
            self.run_pass(mapping);
        }
    }
}

/// Pages that a waiting writer wants to dirty. Dropping this withdraws them, also if a backend panics.
struct AwaitedPages<'a> {
    all: &'a AtomicU64,
    pages: u64,
}

impl Drop for AwaitedPages<'_> {
    fn drop(&mut self) {
        self.all.fetch_sub(self.pages, Ordering::Relaxed);
    }
}

fn stuck(limits: &DirtyLimits, wait_max: Duration) -> io::Error {
    let words = format!(
        "too little was written for {wait_max:?}, and more than {} pages wait for that; check whether the device \
         still answers",
        limits.ceiling
    );
    io::Error::new(io::ErrorKind::TimedOut, words)
}
