//! The hand-over of a descriptor's offset, run under a model checker: what several threads read, seek and write is what
//! the kernel alone could have given them, and no step of the protocol can be left out.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test model_descriptor --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. Each scenario runs under every interleaving (of a bounded number of
//! preemptions) and every value that a relaxed load may return, with the real code of `quinion::fdstate`. Then the
//! fixture looks for an order of its calls in which a kernel without Quinion gives the same answers and ends with the
//! same offset, and in which no call is moved before its begin or behind its end; without one the history is wrong. So
//! is a handle of the owner's that is released twice or never.
//!
//! The checker notes the last access of an atomic only, and so overlooks some orders of threads that look before they
//! change. So each scenario runs twice, with either thread as the model's first, and the fixture marks where one thread
//! may be overtaken by another (`turn` in `descriptor_support`).
//!
//! Each scenario lists the answers that it must meet, so that none passes because it met nothing.
//!
//! # What the checker does not show
//!
//! * Sequential consistency. It knows SeqCst as acquire and release, which allows more. Where the protocol needs the
//!   one order of two threads (opening against forking), the fixture uses read-modify-writes, which see the last value.
//! * Signals. A handler that interrupts a thread that is Moving would wait for it; that signals are held back then is
//!   `viewer::sys`'s.
//! * The wrap of the generation.

#![cfg(quinion_model)]

use std::sync::Arc;

use descriptor_support::{Call, Program};
use loom::thread;
use model_support::{Needed, all_needed, explore};
use quinion::internals::sync::Mutant;

mod descriptor_support;
mod model_support;

fn answers(reopens: bool, before: &[Call], threads: [&'static [Call]; 2]) -> [String; 2] {
    let program = Arc::new(Program::new(reopens));
    for &call in before {
        program.call(call);
    }
    let make = |program: Arc<Program>, calls: &'static [Call]| {
        calls.iter().map(|&call| program.call(call).to_string()).collect::<Vec<_>>().join(" ")
    };
    let other = {
        let program = Arc::clone(&program);
        thread::spawn(move || make(program, threads[1]))
    };
    let first = make(Arc::clone(&program), threads[0]);
    let second = other.join().unwrap();
    program.check();
    [first, second]
}

const SERVED: &[Call] = &[Call::Attach, Call::Read(10)];
const POSITIONED: &[Call] = &[Call::Attach, Call::Share];
const LEFT: &[Call] = &[Call::Credit(900)];

macro_rules! scenarios {
    ($(
        $(#[$doc:meta])* $name:ident: $reopens:expr, $bound:expr, $first:expr,
        [$($thread:expr),*] => [$($expected:expr),*];
    )*) => { $(
        $(#[$doc])*
        #[test]
        fn $name() {
            explore($bound, &[$($expected),*], || answers($reopens, $first, [$(&$thread),*]).join(", "));
            explore($bound, &[$($expected),*], || {
                let [first, second] = [$(&$thread as &'static [Call]),*];
                let [second, first] = answers($reopens, $first, [second, first]);
                format!("{first}, {second}")
            });
        }
    )* };
}

scenarios! {
    read_and_read: false, None, SERVED,
        [[Call::Read(1), Call::Read(2)], [Call::Read(4)]]
        => ["10 11, 13", "10 15, 11", "14 15, 10"];
    read_and_seek: false, None, SERVED,
        [[Call::Read(1), Call::Set(50)], [Call::Read(4)]]
        => ["10 50, 11", "10 50, 50", "14 50, 10"];
    read_and_skip: false, None, SERVED,
        [[Call::Skip(50)], [Call::Read(4), Call::Read(1)]]
        => ["60, 60 64", "64, 10 64", "65, 10 14"];
    read_and_attach: false, Some(2), LEFT,
        [[Call::Attach, Call::Read(1)], [Call::Read(4), Call::Read(2)]]
        => ["0 0, 1 5", "0 4, 0 5", "0 6, 0 4"];
    seek_and_attach: false, Some(2), LEFT,
        [[Call::Attach, Call::Read(1)], [Call::Set(50), Call::Read(4)]]
        => ["0 0, 50 50", "0 50, 50 51", "0 54, 50 50"];
    skip_and_attach: false, None, LEFT,
        [[Call::Attach, Call::Read(1)], [Call::Skip(50)]]
        => ["0 0, 51", "0 50, 50"];
    first_seek_and_attach: false, Some(2), &[],
        [[Call::Attach, Call::Read(1)], [Call::Skip(50)]]
        => ["0 0, 51", "0 50, 50"];
    write_and_attach: false, None, LEFT,
        [[Call::AttachWriter, Call::Read(1)], [Call::Write(4)]]
        => ["0 0, 1", "0 4, 0"];
    two_attach: false, None, LEFT,
        [[Call::Attach, Call::Read(1)], [Call::Attach, Call::Read(4)]]
        => ["0 0, 0 1", "0 4, 0 0"];
    detach_and_read: false, None, SERVED,
        [[Call::Detach], [Call::Read(1), Call::Read(4)]]
        => ["0, 10 11"];
    detach_and_seek: false, None, SERVED,
        [[Call::Detach, Call::Read(1)], [Call::SkipBeyond(50)]]
        => ["0 10, 61", "0 60, 60"];
    detach_and_detach: false, None, SERVED,
        [[Call::Detach, Call::Read(1)], [Call::Share, Call::Read(4)]]
        => ["0 10, 0 11", "0 14, 0 10"];
    duplicate_and_read: false, None, SERVED,
        [[Call::DupRead(1)], [Call::Read(4), Call::Read(2)]]
        => ["10, 11 15", "14, 10 15", "16, 10 14"];
    duplicate_and_seek: false, None, SERVED,
        [[Call::DupRead(1)], [Call::SkipBeyond(50)]]
        => ["10, 61", "60, 60"];
    two_duplicates: false, None, SERVED,
        [[Call::DupRead(1)], [Call::DupRead(4)]]
        => ["10, 11", "14, 10"];
    duplicate_and_attach: false, None, LEFT,
        [[Call::DupRead(1)], [Call::Attach, Call::Read(4)]]
        => ["0, 0 1", "4, 0 0"];
    look_and_read: false, None, SERVED,
        [[Call::Peek], [Call::Read(4), Call::DupRead(1)]]
        => ["10, 10 14", "14, 10 14", "15, 10 14"];
    positional_and_attach: false, None, LEFT,
        [[Call::Attach], [Call::Pread, Call::Pread]]
        => ["0, 0 0"];
    reopen_and_read: true, Some(2), SERVED,
        [[Call::Reopen(1), Call::Attach, Call::Set(10)], [Call::Read(4)]]
        => ["0 0 10, 10", "0 0 10, 1000", "0 0 10, 1010", "0 0 10, 999999"];
    reopen_and_kernels_read: true, Some(2), LEFT,
        [[Call::Reopen(1), Call::Attach, Call::Read(1)], [Call::Read(4)]]
        => ["0 0 1000, 0", "0 0 1000, 1001", "0 0 1000, 999999", "0 0 1004, 1000"];
    reopen_and_positional: true, Some(3), POSITIONED,
        [[Call::Reopen(1), Call::Attach], [Call::Pread]]
        => ["0 0, 0", "0 0, 1000", "0 0, 999999"];
    reopen_and_attach: true, Some(2), LEFT,
        [[Call::Reopen(1), Call::Read(1)], [Call::Attach]]
        => ["0 1000, 0"];
    pause_and_read: false, None, SERVED,
        [[Call::Pause], [Call::Read(1), Call::Read(4)]]
        => ["0, 10 11"];
    pause_attach_and_close: true, Some(2), SERVED,
        [[Call::Pause, Call::Attach], [Call::Reopen(1)]]
        => ["0 0, 0"];
}

/// A thread forks while another opens the file, and a handler there uses the new number before the open has returned.
#[test]
fn fork_and_open() {
    explore(None, &["0, 1", "4, 0"], || {
        let program = Arc::new(Program::unopened());
        let opener = {
            let program = Arc::clone(&program);
            thread::spawn(move || {
                let mut guessed = 0;
                program.opened_meanwhile(0, || {
                    program.call(Call::Attach);
                    guessed = program.call(Call::Read(4));
                });
                guessed
            })
        };
        let child = program.fork(1);
        let guessed = opener.join().unwrap();
        program.check();
        format!("{child}, {guessed}")
    });
}

/// A thread becomes another program, which reads, while another opens the file and reads until it is ended by that.
#[test]
fn exec_and_open() {
    explore(None, &["0, 1", "4, 0"], || {
        let program = Arc::new(Program::unopened());
        let opener = {
            let program = Arc::clone(&program);
            thread::spawn(move || {
                program.open();
                program.call(Call::Attach);
                program.call(Call::Read(4))
            })
        };
        let next = program.fork(1);
        let read = opener.join().unwrap();
        program.check();
        format!("{next}, {read}")
    });
}

// ---- each step is needed ------------------------------------------------------------------------------

const WRONG: &str = "wrong history";

const NEEDED: &[Needed] = &[
    (Mutant::WordAcquire, &[("positional_and_attach", WRONG)]),
    (Mutant::AdvanceExchange, &[("read_and_read", WRONG)]),
    (Mutant::StillFence, &[("reopen_and_positional", WRONG)]),
    (Mutant::StillRecheck, &[("reopen_and_positional", WRONG)]),
    (Mutant::SettledWait, &[("two_duplicates", WRONG)]),
    (Mutant::MovingRelease, &[("positional_and_attach", WRONG)]),
    (Mutant::LeaveMoving, &[("two_duplicates", WRONG)]),
    (
        Mutant::LeaveOffset,
        &[("detach_and_read", WRONG), ("duplicate_and_read", WRONG), ("pause_and_read", WRONG)],
    ),
    (Mutant::OpenGeneration, &[("reopen_and_read", WRONG)]),
    (Mutant::OpenForked, &[("fork_and_open", WRONG)]),
    (Mutant::CallCounted, &[("read_and_attach", WRONG)]),
    (Mutant::PublishWriter, &[("write_and_attach", WRONG)]),
    (Mutant::PublishCalls, &[("read_and_attach", WRONG), ("reopen_and_kernels_read", WRONG)]),
    (Mutant::PublishMoving, &[("skip_and_attach", WRONG)]),
    (Mutant::PublishFence, &[("reopen_and_positional", WRONG)]),
    (Mutant::SeekCounted, &[("skip_and_attach", WRONG)]),
    (Mutant::SeekMoving, &[("detach_and_seek", WRONG), ("duplicate_and_seek", WRONG)]),
    (Mutant::PauseGeneration, &[("pause_attach_and_close", "wrong: handle")]),
];

#[test]
fn no_step_can_be_left_out() {
    all_needed(Mutant::of_descriptors(), NEEDED);
}
