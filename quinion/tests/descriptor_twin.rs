//! A descriptor whose offset changes hands at random, beside one that is the kernel's all the time: the same answers,
//! the same offsets, and each handle of the owner's is given back once.
//!
//! One thread makes all calls, so there is one right answer to each. `tests/model_descriptor.rs` has several threads.
//! All sequences of three calls are tried, and random ones that are longer.

#![cfg(not(quinion_model))]

use descriptor_support::{Alone, Call, FILES, Program};
use proptest::prelude::*;
use quinion::internals::fdstate::FdState;

mod descriptor_support;

const CALLS: &[Call] = &[
    Call::Read(3),
    Call::DupRead(5),
    Call::Pread,
    Call::Set(7),
    Call::Skip(2),
    Call::SkipBeyond(11),
    Call::Peek,
    Call::Reopen(1),
    Call::Attach,
    Call::AttachWriter,
    Call::Credit(0),
    Call::Credit(4),
    Call::Detach,
    Call::Share,
    Call::Pause,
];

/// Makes `calls` on both. Files beyond the last are not opened: each has one description here.
fn same(calls: &[Call]) {
    let (program, mut alone) = (Program::new(true), Alone::default());
    let mut file = 0;
    for &call in calls {
        let call = match call {
            Call::Reopen(_) if file + 1 < FILES => {
                file += 1;
                Call::Reopen(file)
            }
            Call::Reopen(_) => Call::Pread,
            call => call,
        };
        assert_eq!(program.call(call), alone.answer(call), "{call:?} of {calls:?}");
    }
    program.check();
}

#[test]
fn all_sequences_of_three_calls_are_as_of_the_kernel_alone() {
    for &a in CALLS {
        for &b in CALLS {
            for &c in CALLS {
                same(&[Call::Read(1), a, b, c, Call::Read(1), Call::Peek]);
                same(&[Call::Attach, Call::Read(1), a, b, c, Call::Read(1), Call::Peek]);
            }
        }
    }
}

#[test]
fn a_descriptor_that_can_write_is_never_given_an_offset_of_ours() {
    let program = Program::new(false);
    program.call(Call::AttachWriter);
    assert_eq!(program.state(), FdState::Positioned);
    assert_eq!(program.call(Call::Write(10)), 0);
    assert_eq!(program.call(Call::Read(1)), 10);
    program.check();
}

#[test]
fn a_descriptor_that_is_read_only_is_served_from_where_the_kernel_was() {
    let program = Program::new(false);
    program.call(Call::Credit(5));
    assert_eq!((program.call(Call::Read(5)), program.state()), (0, FdState::Candidate));
    assert_eq!((program.call(Call::Read(5)), program.state()), (5, FdState::Served));
    program.check();
}

proptest! {
    #[test]
    fn random_calls_are_as_of_the_kernel_alone(
        calls in proptest::collection::vec(proptest::sample::select(CALLS), 0..40)
    ) {
        same(&calls);
    }
}
