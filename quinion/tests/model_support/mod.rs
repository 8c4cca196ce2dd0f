//! What the models share: a scenario run under every interleaving, and run again with a step left out.
//!
//! ```text
//!   explore     a scenario, whose outcomes must be those listed, neither more nor fewer
//!   all_needed  for each step: the named scenarios fail without it, with the named words
//! ```
//!
//! The checker does not survive a failure, so a scenario without a step runs in a process of its own: this test's
//! program again, with the step to leave out in its environment.

#![allow(dead_code, reason = "each model uses its part")]

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Arc, Mutex};

use quinion::internals::sync::{Mutant, model};

/// Names the step to leave out to a process that runs one scenario.
const LEFT_OUT: &str = "QUINION_MODEL_LEFT_OUT";

/// A step, and the scenarios that fail without it, each with words of what it fails with.
pub type Needed = (Mutant, &'static [(&'static str, &'static str)]);

/// Runs `scenario` under every interleaving and every value that a load may return, with at most `preemptions_max`
/// preemptions in one run, and checks that exactly the outcomes `expected` were met.
pub fn explore(
    preemptions_max: Option<usize>,
    expected: &[&str],
    scenario: impl Fn() -> String + Send + Sync + 'static,
) {
    let left_out = std::env::var(LEFT_OUT).ok();
    model::leave_out(left_out.as_deref().map_or(Mutant::None, step_of_name));
    let met = Arc::new(Mutex::new((0, BTreeSet::new())));
    let noted = met.clone();
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = preemptions_max;
    checker.check(move || {
        let outcome = scenario();
        let mut noted = noted.lock().unwrap();
        noted.0 += 1;
        noted.1.insert(outcome);
    });
    let (runs, outcomes) = &*met.lock().unwrap();
    println!("{runs} runs: {outcomes:?}");
    if left_out.is_none() {
        assert!(outcomes.iter().eq(expected), "the model met {outcomes:?} and not {expected:?}");
    }
}

fn step_of_name(name: &str) -> Mutant {
    *Mutant::ALL.iter().find(|step| format!("{step:?}") == name).expect("a step of this name")
}

/// Checks that each of `steps`, which this program's scenarios are about, is needed by one of them.
pub fn all_needed(steps: &[Mutant], needed: &[Needed]) {
    let named: Vec<Mutant> = needed.iter().map(|&(step, _)| step).collect();
    assert_eq!(named, steps, "every step is in the table, once, in its order");
    each_fails(needed);
}

pub fn each_fails(needed: &[Needed]) {
    for &(step, failures) in needed {
        assert!(!failures.is_empty(), "{step:?}: no scenario needs it");
        for (scenario, reason) in failures {
            let met = run_without(step, scenario);
            println!("{step:>16} {scenario:<26} {met}", step = format!("{step:?}"));
            assert!(
                met.contains(reason),
                "{scenario} without {step:?} must fail with '{reason}'; it met: {met}"
            );
        }
    }
}

/// Runs `scenario` without `step`; returns the failure's words, or "nothing".
fn run_without(step: Mutant, scenario: &str) -> String {
    let run = Command::new(std::env::current_exe().expect("a test knows its own name"))
        .args([scenario, "--exact", "--nocapture"])
        .env(LEFT_OUT, format!("{step:?}"))
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("a test can be started again");
    let told = String::from_utf8_lossy(&run.stdout);
    assert!(told.contains("running 1 test"), "there is no scenario {scenario}");
    if run.status.success() {
        return "nothing".into();
    }
    let told = String::from_utf8_lossy(&run.stderr);
    let after = told.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
    after.unwrap_or("a failure without a message").trim().into()
}
