//! The simulated device: what it was told goes wrong goes wrong, the same way for the same seed, and nothing else does.
//!
//! The device serves a generated file; a test reads it by fills over ordinary memory, and checks each byte.
//!
//! Invariant: every fill ends exactly once (`Request` insists on it).

use std::sync::Arc;

use quinion::backend::{Backend, ReapMode, ReapOutcome, WaitQueue};
use quinion_testing::doubles::{
    CompletionOrder, CompletionPoint, FailureCount, Faults, Request, SimulatedBackend,
};

const PAGES: u64 = 64;

fn page(file: u64, page: u64, bytes: &mut [u8]) {
    for (at, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (file << 48 ^ page << 16 ^ at as u64).to_le_bytes();
    }
}

fn device(faults: Faults) -> (Arc<WaitQueue>, SimulatedBackend) {
    let wait_queue = Arc::new(WaitQueue::new());
    let device = SimulatedBackend::generated(7, PAGES * 4096 - 100, page, faults);
    device.attach(&wait_queue);
    (wait_queue, device)
}

fn wanted(first: u64, pages: u64) -> Vec<u8> {
    let mut bytes = vec![0; (pages * 4096) as usize];
    for (number, bytes) in (first..).zip(bytes.chunks_mut(4096)) {
        page(7, number, bytes);
    }
    bytes.truncate((PAGES * 4096 - 100).saturating_sub(first * 4096).min(pages * 4096) as usize);
    bytes
}

#[test]
fn a_simulated_backend_without_faults_is_a_file() {
    for completing in [CompletionPoint::WhenReaped, CompletionPoint::WhenSubmitted] {
        let (wait_queue, device) = device(Faults { completing, ..Faults::default() });
        for (first, pages) in [(0, 1), (3, 5), (60, 4), (63, 1), (64, 2)] {
            let (fill, request) = Request::new(&wait_queue, first, pages);
            device.submit(vec![fill]);
            assert_eq!(request.is_done(), completing == CompletionPoint::WhenSubmitted);
            assert_eq!(request.wait(&device).unwrap(), wanted(first, pages.into()));
        }
        assert_eq!((device.reads(), device.held()), (5, 0));
        assert_eq!((device.page_reads(63), device.page_reads(2)), (2, 0));
        assert_eq!(device.most_read_page(), Some((63, 2)));
        assert_eq!(device.read_bytes(), 4096 * 11 - 2 * 100);
    }
}

/// What became of sixty fills, in the order in which they completed.
fn history(seed: u64) -> Vec<String> {
    let faults = Faults {
        seed,
        errors: 100,
        early_ends: 100,
        drops: 100,
        delay_max: 5,
        sequence: CompletionOrder::Shuffled,
        completing: CompletionPoint::WhenReaped,
    };
    let (wait_queue, device) = device(faults);
    let (fills, requests): (Vec<_>, Vec<_>) = (0..60).map(|n| Request::new(&wait_queue, n, 2)).unzip();
    device.submit(fills);
    let mut left: Vec<_> = requests.iter().enumerate().collect();
    let mut history = Vec::new();
    while !left.is_empty() {
        assert!(matches!(device.reap(ReapMode::Wait, &mut || false), ReapOutcome::Some(1..)));
        for (n, request) in left.extract_if(.., |(_, request)| request.is_done()) {
            let got = request.take();
            if let Ok(bytes) = &got {
                assert!(wanted(n as u64, 2).starts_with(bytes));
            }
            history.push(format!("{n}: {:?}", got.map(|bytes| bytes.len()).map_err(|e| e.to_string())));
        }
    }
    assert_eq!(device.held(), 0);
    history
}

#[test]
fn the_seed_decides_everything() {
    let first = history(1);
    assert_eq!(first, history(1));
    assert_ne!(first, history(2));
    let met = |what: &str| first.iter().any(|line| line.contains(what));
    assert!(met("os error 5") && met("dropped the request") && met("Ok(8192)"), "{first:?}");
    assert!(first.iter().any(|line| line.contains("Ok(") && !line.contains("8192")), "{first:?}");
}

#[test]
fn a_bad_spot_fails_as_often_as_was_said() {
    let (wait_queue, device) = device(Faults::default());
    device.fail_at(8192..8193, FailureCount::First(2));
    device.fail_at(40_000..50_000, FailureCount::Always);
    let read = |first, pages| {
        let (fill, request) = Request::new(&wait_queue, first, pages);
        device.submit(vec![fill]);
        request.wait(&device).is_ok()
    };
    assert!(read(0, 2) && read(3, 1));
    assert_eq!([read(0, 3), read(2, 1), read(2, 1)], [false, false, true]);
    assert_eq!([read(9, 1), read(12, 1), read(13, 1), read(5, 20)], [false, false, true, false]);
    device.mend();
    assert!(device.page_reads(12) == 2);
}

#[test]
fn a_paused_device_completes_when_it_is_resumed() {
    let (wait_queue, device) = device(Faults::default());
    device.pause();
    let (fill, request) = Request::new(&wait_queue, 0, 1);
    device.submit(vec![fill]);
    assert_eq!(device.reap(ReapMode::Ready, &mut || false), ReapOutcome::Elsewhere);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(request.wait(&device).unwrap(), wanted(0, 1)));
        device.resume();
    });
}

#[test]
fn a_fill_held_by_a_device_that_goes_away_fails() {
    let (wait_queue, device) = device(Faults::default());
    let (fill, request) = Request::new(&wait_queue, 0, 1);
    device.submit(vec![fill]);
    drop(device);
    assert!(request.take().is_err());
}

#[test]
fn many_threads_hand_the_lead_on() {
    let faults = Faults { seed: 3, delay_max: 9, sequence: CompletionOrder::Shuffled, ..Faults::default() };
    let (wait_queue, device) = device(faults);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (wait_queue, device) = (&wait_queue, &device);
            scope.spawn(move || {
                for round in 0..500u64 {
                    let (fill, request) = Request::new(wait_queue, (thread * 7 + round) % PAGES, 1);
                    device.submit(vec![fill]);
                    assert_eq!(request.wait(device).unwrap(), wanted((thread * 7 + round) % PAGES, 1));
                }
            });
        }
    });
    assert_eq!((device.reads(), device.held()), (4000, 0));
}
