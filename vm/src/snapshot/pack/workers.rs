//! Workers: the chunks of a batch, each handled by one of some threads, and the results in the chunks' order.
//!
//! ```text
//!   chunks of the batch    0   1   2   3   4   5 ..
//!   worker                 a   b   c   a   b   c ..      each in its own order: a result's place is known
//! ```
//!
//! The threads live as long as the batch: so a worker's state is borrowed, and nothing is left when one fails.

use std::io;
use std::ops::Range;
use std::thread;

/// Worker threads at most.
const WORKERS_MAX: usize = 16;
/// Bytes of chunks in a batch, for each worker.
const BATCH_BYTES: u64 = 4 << 20;

/// The system has refused a thread.
#[derive(Debug)]
pub(super) struct NoThread(pub io::Error);

/// How many workers there should be: one for each processor.
pub(super) fn workers_of_machine() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(WORKERS_MAX)
}

/// Batches of 0 up to `chunks` for so many workers.
pub(super) fn batches(chunks: u64, chunk_bytes: u32, workers: usize) -> impl Iterator<Item = Range<u64>> {
    let step = workers as u64 * (BATCH_BYTES / u64::from(chunk_bytes)).max(1);
    (0..chunks).step_by(step as usize).map(move |first| first..chunks.min(first + step))
}

/// Calls `work` for each chunk of `batch`, on a thread for each of `workers`, and returns its results in order.
///
/// # Errors
/// The first of `work`, by the order of the workers; or a thread cannot be started.
pub(super) fn each_chunk<W, T, E>(
    workers: &mut [W],
    batch: Range<u64>,
    work: impl Fn(&mut W, u64) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E>
where
    W: Send,
    T: Send,
    E: Send + From<NoThread>,
{
    let (step, work, chunks) = (workers.len(), &work, batch.clone());
    let mut shares = thread::scope(|scope| {
        let started = workers.iter_mut().enumerate().map(|(first, worker)| {
            let mine = batch.clone().skip(first).step_by(step);
            let handle = move || mine.map(|chunk| work(worker, chunk)).collect::<Result<Vec<T>, E>>();
            thread::Builder::new().name("quinion-pack".to_owned()).spawn_scoped(scope, handle)
        });
        // All of them are started before the first is waited for.
        let started: Vec<_> = started.collect();
        let ended = started.into_iter().map(|thread| {
            let share =
                thread.map_err(NoThread)?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok(share.into_iter())
        });
        ended.collect::<Result<Vec<_>, E>>()
    })?;
    Ok(chunks.zip((0..step).cycle()).filter_map(|(_, worker)| shares[worker].next()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_handled_once_and_the_results_are_in_order() {
        for workers in 1..5 {
            for chunks in [0, 1, 7, 64, 65, 200] {
                let mut counts = vec![0_u64; workers];
                let mut found = Vec::new();
                for batch in batches(chunks, 64 << 10, workers) {
                    let work = |count: &mut u64, chunk| {
                        *count += 1;
                        Ok::<u64, NoThread>(chunk)
                    };
                    found.extend(each_chunk(&mut counts, batch, work).expect("no chunk fails"));
                }
                assert_eq!(found, (0..chunks).collect::<Vec<_>>());
                assert_eq!(counts.iter().sum::<u64>(), chunks);
            }
        }
    }

    #[test]
    fn an_error_of_one_chunk_is_the_error_of_the_batch() {
        let failed = |_: &mut (), chunk: u64| {
            if chunk == 5 { Err(NoThread(io::ErrorKind::InvalidData.into())) } else { Ok(()) }
        };
        let NoThread(error) = each_chunk(&mut [(), (), ()], 0..9, failed).expect_err("chunk 5 fails");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
