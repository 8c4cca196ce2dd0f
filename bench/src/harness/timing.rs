//! Timing: what a piece of work costs, in elapsed time and in CPU time.
//!
//! ```text
//!   thread 0   | work ------------- |         | undo |
//!   thread 1   |   work --------------- |     | undo |        together, round after round
//!              ^ all start              ^ the last is done
//!              '---- elapsed -----------'     not timed
//! ```
//!
//! CPU time is that of the threads that work. Where others work for them, the whole process is measured:
//! [`process_cpu_ns`].

use std::sync::Barrier;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Spent {
    /// Nanoseconds from the first start to the last end.
    pub elapsed_ns: f64,
    /// Nanoseconds of processors.
    pub cpu_ns: f64,
}

impl Spent {
    /// Elapsed and CPU nanoseconds for each of `count` things.
    pub fn each(self, count: usize) -> [f64; 2] {
        [self.elapsed_ns / count as f64, self.cpu_ns / count as f64]
    }
}

fn clock_ns(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

pub fn thread_cpu_ns() -> f64 {
    clock_ns(ClockId::ThreadCPUTime)
}

pub fn process_cpu_ns() -> f64 {
    clock_ns(ClockId::ProcessCPUTime)
}

/// The cost of `work` on this thread.
pub fn alone(work: impl FnOnce()) -> Spent {
    let (start, cpu) = (Instant::now(), thread_cpu_ns());
    work();
    Spent { cpu_ns: thread_cpu_ns() - cpu, elapsed_ns: start.elapsed().as_nanos() as f64 }
}

struct Part {
    start: Instant,
    end: Instant,
    cpu_ns: f64,
}

/// The cost of `work` in `rounds` rounds of `threads` threads at once, each of which is given its number.
/// After each round `undo` makes place for the next one; that is not timed.
pub fn together(
    threads: usize,
    rounds: usize,
    work: impl Fn(usize) + Sync,
    undo: impl Fn(usize) + Sync,
) -> Spent {
    let rounds = Rounds { threads, rounds };
    rounds.run(|thread| thread, |thread| work(*thread), |thread| undo(*thread))
}

/// As [`together`], in one round, with what `ready` makes of each thread's number before it, not timed.
pub fn together_ready<S>(
    threads: usize,
    ready: impl Fn(usize) -> S + Sync,
    work: impl Fn(&mut S) + Sync,
    undo: impl Fn(&mut S) + Sync,
) -> Spent {
    Rounds { threads, rounds: 1 }.run(ready, work, undo)
}

struct Rounds {
    threads: usize,
    rounds: usize,
}

impl Rounds {
    fn run<S>(
        self,
        ready: impl Fn(usize) -> S + Sync,
        work: impl Fn(&mut S) + Sync,
        undo: impl Fn(&mut S) + Sync,
    ) -> Spent {
        let Self { threads, rounds } = self;
        let barrier = Barrier::new(threads);
        let part = |state: &mut S| {
            barrier.wait();
            let (start, cpu) = (Instant::now(), thread_cpu_ns());
            work(state);
            let part = Part { start, cpu_ns: thread_cpu_ns() - cpu, end: Instant::now() };
            barrier.wait();
            undo(state);
            part
        };
        let all_rounds = |thread: usize| {
            let mut state = ready(thread);
            (0..rounds).map(|_| part(&mut state)).collect::<Vec<_>>()
        };
        let parts: Vec<Vec<Part>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|thread| {
                    let all_rounds = &all_rounds;
                    scope.spawn(move || all_rounds(thread))
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().expect("no worker panics")).collect()
        });
        (0..rounds).map(|round| spent(parts.iter().map(|parts| &parts[round]))).fold(Spent::default(), add)
    }
}

fn spent<'a>(parts: impl Iterator<Item = &'a Part> + Clone) -> Spent {
    let start = parts.clone().map(|part| part.start).min().expect("there is a thread");
    let end = parts.clone().map(|part| part.end).max().expect("there is a thread");
    Spent { elapsed_ns: (end - start).as_nanos() as f64, cpu_ns: parts.map(|part| part.cpu_ns).sum() }
}

fn add(a: Spent, b: Spent) -> Spent {
    Spent { elapsed_ns: a.elapsed_ns + b.elapsed_ns, cpu_ns: a.cpu_ns + b.cpu_ns }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_thread_works_and_undoes_in_every_round() {
        let (worked, undone) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let count = |of: &AtomicUsize, thread: usize| of.fetch_add(thread + 1, Ordering::Relaxed);
        let spent = together(
            2,
            3,
            |thread| {
                count(&worked, thread);
            },
            |thread| {
                count(&undone, thread);
            },
        );
        assert_eq!((worked.into_inner(), undone.into_inner()), (9, 9));
        assert!(spent.elapsed_ns > 0.0);
    }
}
