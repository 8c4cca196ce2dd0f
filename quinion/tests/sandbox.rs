//! Sandbox: io_uring is refused, or taken away while the cache is at work, and every read is right all the same.
//!
//! A refusal at the start costs nothing but the ring: threads read, and the engine says why. A refusal later costs the
//! requests that the kernel did not take; the fill path asks for those pages once more, by threads, so that no reader
//! sees an error and no future is forgotten. Each test lasts in its own process, because a filter on system calls
//! cannot be taken off.

use quinion_testing::content;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use quinion::backend::{Mechanism, WaitQueue};
use quinion::internals::system_files::{ChosenMechanism, Engine, EngineOptions};
use quinion::{Cache, File, Hint};
use quinion_testing::block_on::block_on;
use quinion_testing::hazard::{Scope, in_a_process_of_its_own, refuse};

const PAGE: u64 = 4096;
const PAGES: u64 = 2000;

fn content() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("content");
    let mut bytes = vec![0; (PAGES * PAGE) as usize];
    content::fill_content(&mut bytes, 1, 0, 0);
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).mechanism(Mechanism::Ring).build().unwrap()
}

fn read(file: &File, page: u64) {
    let mut buffer = vec![0; 3 * PAGE as usize];
    file.read_exact_at(&mut buffer, page * PAGE + 100).unwrap();
    content::verify(&buffer, 1, page * PAGE + 100).unwrap();
}

fn read_async(file: &File, page: u64) {
    let mut buffer = vec![0; 3 * PAGE as usize];
    let mut done = 0;
    while done < buffer.len() {
        let position = page * PAGE + 100 + done as u64;
        let bytes = block_on(file.read_at_async(&mut buffer[done..], position)).unwrap();
        assert!(bytes > 0);
        done += bytes;
    }
    content::verify(&buffer, 1, page * PAGE + 100).unwrap();
}

fn without_setup(error: i32, words: &str) {
    refuse(libc::SYS_io_uring_setup, error, Scope::Caller);
    let engine = Engine::new(Arc::new(WaitQueue::new()), EngineOptions::default());
    assert!(matches!(engine.mechanism(), ChosenMechanism::Fallback(_)));
    let said = engine.mechanism().to_string();
    assert!(said.contains(words) && said.contains("sandbox"), "{said}");
    let ((_folder, path), cache) = (content(), cache());
    let file = cache.open(&path).unwrap();
    assert_eq!((cache.stats().mechanism, file.mechanism()), ("threads", "threads"));
    for page in (0..PAGES - 4).step_by(37) {
        read(&file, page);
        read_async(&file, (page * 7 + 1) % (PAGES - 4));
    }
    drop(file.pin(0, 100 * PAGE as usize).unwrap());
    cache.check().unwrap();
}

#[test]
fn a_ring_that_is_not_permitted_leaves_threads_and_a_reason() {
    if in_a_process_of_its_own("a_ring_that_is_not_permitted_leaves_threads_and_a_reason") {
        without_setup(libc::EPERM, "not permitted");
    }
}

#[test]
fn a_ring_that_does_not_exist_leaves_threads_and_a_reason() {
    if in_a_process_of_its_own("a_ring_that_does_not_exist_leaves_threads_and_a_reason") {
        without_setup(libc::ENOSYS, "not implemented");
    }
}

/// Readers, futures and pins at work; then the ring is taken from all of them at once.
#[test]
fn a_ring_that_is_taken_away_is_replaced_by_threads_and_nothing_is_lost() {
    if !in_a_process_of_its_own("a_ring_that_is_taken_away_is_replaced_by_threads_and_nothing_is_lost") {
        return;
    }
    let ((_folder, path), cache) = (content(), cache());
    if cache.stats().mechanism != "io_uring" {
        return println!("SKIPPED: this system has no io_uring to be taken away");
    }
    let file = cache.open(&path).unwrap();
    thread::scope(|scope| {
        for reader in 0..4 {
            let file = file.clone();
            scope.spawn(move || {
                for step in 0..300 {
                    let page = (step * 131 + reader * 17) % (PAGES - 4);
                    match (reader + step) % 3 {
                        0 => read(&file, page),
                        1 => read_async(&file, page),
                        _ => assert_eq!(file.pin(page * PAGE, 9000).unwrap().len(), 9000),
                    }
                    if step % 10 == 0 {
                        file.dont_need(0, PAGES * PAGE).unwrap(); // cold again
                    }
                    if (reader, step) == (0, 100) {
                        refuse(libc::SYS_io_uring_enter, libc::EPERM, Scope::Process);
                    }
                }
            });
        }
    });
    assert_eq!((cache.stats().mechanism, file.mechanism()), ("threads", "threads"), "what reads now is said");
    // Pages read ahead still arrive, reaped by a thread that waits for another page.
    file.advise(Hint::Random).unwrap();
    while cache.stats().in_flight > 0 {
        file.dont_need(0, PAGES * PAGE).unwrap();
        read(&file, 5);
    }
    cache.check().unwrap();
}
