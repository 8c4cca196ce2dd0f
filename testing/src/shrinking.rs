//! Shrinking: a list of operations that fails is made as short as it can be, and still fails.
//!
//! ```text
//!   ops --run on a thread of its own--> a complaint, a panic, or a hang of minutes, which are complaints too
//!    '--- without half of it? without a quarter? .. a single one? with a simpler one in its place? --> a short list
//! ```
//!
//! Shared by the differential tests of files and of memory files.

use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Lists that the search for a shorter one may try.
const SHRINKS_MAX: u32 = 400;
/// A run that has not ended by then hangs.
const STUCK: Duration = Duration::from_secs(300);

/// Runs it on another thread, and returns what was wrong: a panic and a hang are complaints, too.
pub fn complaint(run: impl FnOnce() -> Result<(), String> + Send + 'static) -> Option<String> {
    let (sender, receiver) = mpsc::channel();
    let runner = thread::spawn(move || {
        let outcome = panic::catch_unwind(AssertUnwindSafe(run));
        // An error: the caller has waited for too long, and dropped the receiver.
        let _ = sender.send(outcome.unwrap_or_else(|panic| Err(words_of(&*panic))));
    });
    match receiver.recv_timeout(STUCK) {
        Ok(told) => {
            runner.join().expect("it sent what it had to say");
            told.err()
        }
        Err(_) => Some(format!("it hangs, for {} seconds", STUCK.as_secs())),
    }
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    format!("a panic: {}", words.or(panic.downcast_ref::<&str>().copied()).unwrap_or("of no words"))
}

/// A list of some of the operations, perhaps simpler ones, that still fails, and how: delta debugging (A. Zeller
/// and R. Hildebrandt, 2002), pieces first and single operations last.
pub fn shrunk<O: Copy>(
    mut ops: Vec<O>,
    mut why: String,
    simpler: impl Fn(O) -> Vec<O>,
    fails: impl Fn(&[O]) -> Option<String>,
) -> (Vec<O>, String) {
    let mut runs_left = SHRINKS_MAX;
    let mut attempt = |shorter: Vec<O>, ops: &mut Vec<O>| {
        if runs_left == 0 {
            return false;
        }
        runs_left -= 1;
        let failed = fails(&shorter);
        let is_kept = failed.is_some();
        if let Some(words) = failed {
            (*ops, why) = (shorter, words);
        }
        is_kept
    };
    // 1 Without pieces of it, of half of it at first.
    let mut piece = ops.len().div_ceil(2);
    loop {
        let mut at = 0;
        while at < ops.len() {
            let without = [&ops[..at], &ops[(at + piece).min(ops.len())..]].concat();
            if !attempt(without, &mut ops) {
                at += piece;
            }
        }
        if piece <= 1 {
            break;
        }
        piece = piece.div_ceil(2);
    }
    // 2 With simpler operations in the place of those that are left.
    for nth in 0..ops.len() {
        for simple in simpler(ops[nth]) {
            let mut with = ops.clone();
            with[nth] = simple;
            attempt(with, &mut ops);
        }
    }
    (ops, why)
}
