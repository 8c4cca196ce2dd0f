//! Report: the operations that a target tried when it failed, as a list that a test can be made of, and how to run the
//! same input again. It comes before the usual report, which ends the process.
//!
//! Each thread has its own; a failure on a thread that a target starts has the usual report alone.

use std::cell::RefCell;
use std::fmt::Debug;
use std::panic;
use std::sync::Once;

thread_local! {
    /// Prints what is being tried.
    static TRIED: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

/// From here on `target` tries `ops`, which a failure prints.
pub fn trying<Op: Clone + Debug + 'static>(target: &'static str, ops: &[Op]) {
    static HOOK: Once = Once::new();
    HOOK.call_once(report_failures);
    let ops = ops.to_vec();
    TRIED.set(Some(Box::new(move || {
        eprintln!("the operations were\nvec!{ops:?}");
        eprintln!("to run them again, with the file that is named below (\"Test unit written to\"):");
        eprintln!("    cargo run --release --manifest-path fuzz/Cargo.toml --bin {target} -- FILE");
    })));
}

fn report_failures() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        TRIED.with_borrow(|tried| tried.iter().for_each(|say| say()));
        usual(panic);
    }));
}
