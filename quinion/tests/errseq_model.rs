//! Errseq under a model checker: threads that record against threads that ask, in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test errseq_model --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. The promises are those at the head of `quinion/src/errseq.rs`: no error is
//! lost, no handle reports one twice, and an error that no handle has reported is reported by the next open.

#![cfg(quinion_model)]

use loom::sync::Arc;
use loom::thread;
use quinion::internals::errseq::{ErrorCursor, ErrorSequence};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn asks(errors: &ErrorSequence, cursor: &ErrorCursor, times: usize) -> Vec<i32> {
    (0..times).filter_map(|_| errors.check_and_advance(cursor)).collect()
}

/// E06: of two errors recorded while a handle asks, the last is reported, and the first before it or not at all.
#[test]
fn e06_an_error_is_reported_once_or_replaced_by_the_last() {
    loom::model(|| {
        let errors = Arc::new(ErrorSequence::new());
        let handle = errors.sample();
        let recorder = {
            let errors = Arc::clone(&errors);
            thread::spawn(move || {
                errors.record(EIO);
                errors.record(ENOSPC);
            })
        };
        let mut told = asks(&errors, &handle, 2);
        recorder.join().unwrap();
        told.extend(asks(&errors, &handle, 2));
        assert!(told == [EIO, ENOSPC] || told == [ENOSPC], "{told:?}");
    });
}

/// E04, E05: the same error recorded twice while a handle asks is reported twice if the handle asked between, and else
/// once.
#[test]
fn e04_e05_the_same_error_is_reported_once_or_twice_and_the_last_is_never_lost() {
    loom::model(|| {
        let errors = Arc::new(ErrorSequence::new());
        let (handle, other) = (errors.sample(), errors.sample());
        let recorder = {
            let errors = Arc::clone(&errors);
            thread::spawn(move || {
                errors.record(EIO);
                let told = errors.check_and_advance(&other);
                errors.record(EIO);
                told
            })
        };
        let early = asks(&errors, &handle, 1).len();
        assert_eq!(recorder.join().unwrap(), Some(EIO), "who asks after the error is told");
        let late = asks(&errors, &handle, 2).len();
        // Once for both, or once for each: then the handle asked between the two.
        assert!((1..=2).contains(&(early + late)) && late <= 1, "{early} and {late}");
    });
}

/// E01: two handles that ask while an error is recorded, and again after that, report it once each.
#[test]
fn e01_each_handle_reports_once() {
    loom::model(|| {
        let errors = Arc::new(ErrorSequence::new());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (errors, handle) = (Arc::clone(&errors), errors.sample());
                thread::spawn(move || (asks(&errors, &handle, 1), handle))
            })
            .collect();
        errors.record(EIO);
        for thread in threads {
            let (mut told, handle) = thread.join().unwrap();
            told.extend(asks(&errors, &handle, 2));
            assert_eq!(told, [EIO]);
        }
    });
}

/// Two threads ask by one handle: one of them is told.
#[test]
fn one_handle_reports_once_whichever_thread_asks() {
    loom::model(|| {
        let errors = Arc::new(ErrorSequence::new());
        let handle = Arc::new(errors.sample());
        errors.record(EIO);
        let other = {
            let (errors, handle) = (Arc::clone(&errors), Arc::clone(&handle));
            thread::spawn(move || asks(&errors, &handle, 1))
        };
        let mut told = asks(&errors, &handle, 1);
        told.extend(other.join().unwrap());
        assert_eq!(told, [EIO]);
    });
}

/// E02, E03: a handle that is opened while another reports the error reports it too if it was opened before that, and
/// else does not; the other reports it in any case.
#[test]
fn e02_e03_a_handle_opened_meanwhile_reports_at_most_once_and_never_in_place_of_the_other() {
    loom::model(|| {
        let errors = Arc::new(ErrorSequence::new());
        let first = errors.sample();
        errors.record(EIO);
        let opener = {
            let errors = Arc::clone(&errors);
            thread::spawn(move || asks(&errors, &errors.sample(), 2))
        };
        assert_eq!(asks(&errors, &first, 2), [EIO]);
        let told = opener.join().unwrap();
        assert!(told.is_empty() || told == [EIO], "{told:?}");
    });
}
