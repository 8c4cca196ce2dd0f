//! Backends that do wrong: what leaves a callback is an error, and the cache stays usable.
//!
//! The functions here are C's, called as C would call them; the backend is in Rust, because only Rust can panic.

#![allow(unsafe_code, reason = "the functions are those of C")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use quinion_capi::*;

const LENGTH: u64 = 1 << 20;

struct Behaviour {
    read_answer: AtomicI64,
    attributes_answer: AtomicI64,
    length: u64,
    released: AtomicU32,
}

const WELL: i64 = 0;
const PANIC: i64 = 1;
const TOO_MUCH: i64 = 2;
const NO_ERRNO: i64 = 3;

impl Behaviour {
    fn new(length: u64) -> Self {
        let well = || AtomicI64::new(WELL);
        Self { read_answer: well(), attributes_answer: well(), length, released: AtomicU32::new(0) }
    }
}

unsafe extern "C-unwind" fn read(
    context: *mut c_void,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> i64 {
    // SAFETY: what `backend` below passes.
    let behaviour = unsafe { &*context.cast::<Behaviour>() };
    match behaviour.read_answer.load(Ordering::Relaxed) {
        WELL => {
            let length = length.min(behaviour.length.saturating_sub(offset) as usize);
            // SAFETY: the library's buffer, of at least so many bytes.
            unsafe { buffer.cast::<u8>().write_bytes(7, length) };
            length as i64
        }
        PANIC => panic!("this backend panics"),
        TOO_MUCH => length as i64 + 1,
        NO_ERRNO => i64::MIN,
        errno => errno,
    }
}

unsafe extern "C-unwind" fn attributes(context: *mut c_void, attributes: *mut qn_attributes) -> c_int {
    // SAFETY: what `backend` below passes.
    let behaviour = unsafe { &*context.cast::<Behaviour>() };
    match behaviour.attributes_answer.load(Ordering::Relaxed) {
        WELL => {
            // SAFETY: the library's struct.
            let attributes = unsafe { &mut *attributes };
            attributes.length = behaviour.length;
            attributes.identity = [context.addr() as u64, 1];
            0
        }
        PANIC => panic!("this backend panics"),
        errno => errno as c_int,
    }
}

unsafe extern "C-unwind" fn release(context: *mut c_void) {
    // SAFETY: what `backend` below passes.
    unsafe { &*context.cast::<Behaviour>() }.released.fetch_add(1, Ordering::Relaxed);
}

fn backend(behaviour: &Behaviour) -> qn_backend {
    qn_backend {
        size: size_of::<qn_backend>(),
        context: std::ptr::from_ref(behaviour).cast_mut().cast(),
        read: Some(read),
        attributes: Some(attributes),
        write: None,
        sync: None,
        truncate: None,
        release: Some(release),
        threads: 2,
        reserved: 0,
    }
}

/// Waits until a backend was released so often, and looks that it is not released again.
fn wait_for_release(behaviour: &Behaviour, times: u32) {
    while behaviour.released.load(Ordering::Relaxed) < times {
        std::thread::yield_now();
    }
    assert_eq!(behaviour.released.load(Ordering::Relaxed), times);
}

fn message() -> String {
    // SAFETY: the text stays until the next failure of this thread.
    unsafe { CStr::from_ptr(qn_error_message()) }.to_str().unwrap().to_owned()
}

fn cache() -> *mut qn_cache {
    // SAFETY: numbers and pointers.
    let mut options: qn_cache_options = unsafe { std::mem::zeroed() };
    (options.size, options.memory) = (size_of::<qn_cache_options>(), 16 << 20);
    let mut cache = null_mut();
    // SAFETY: as the header says.
    assert_eq!(unsafe { qn_cache_open(&options, &mut cache) }, 0, "{}", message());
    cache
}

fn open(cache: *mut qn_cache, behaviour: &Behaviour) -> Result<*mut qn_file, c_int> {
    let mut file = null_mut();
    // SAFETY: as the header says.
    let answer = unsafe { qn_open_backend(cache, &backend(behaviour), null(), &mut file) };
    assert_eq!(file.is_null(), answer != 0);
    if answer == 0 { Ok(file) } else { Err(answer) }
}

fn pread(file: *const qn_file, buffer: &mut [u8], offset: u64) -> i64 {
    // SAFETY: as the header says.
    unsafe { qn_pread(file, buffer.as_mut_ptr().cast(), buffer.len(), offset) }
}

#[test]
fn backends_that_panic_or_lie_fail_their_read_and_nothing_else() {
    let (behaviour, cache) = (Behaviour::new(LENGTH), cache());
    let file = open(cache, &behaviour).unwrap();
    let mut buffer = [0; 100];
    let eio = -i64::from(libc::EIO);
    let wrong = [
        (PANIC, eio, "panics"),
        (TOO_MUCH, eio, "no more than"),
        (NO_ERRNO, eio, "nor an errno"),
        (-5, -5, "error 5"),
    ];
    for (answer, expected, words) in wrong {
        behaviour.read_answer.store(answer, Ordering::Relaxed);
        assert_eq!(pread(file, &mut buffer, 5000), expected, "of {answer}");
        assert!(message().contains(words), "of {answer}: {}", message());
        behaviour.read_answer.store(WELL, Ordering::Relaxed);
        assert_eq!(pread(file, &mut buffer, 0), 100);
        assert_eq!(buffer, [7; 100]);
        // SAFETY: as the header says.
        assert!(unsafe { qn_dont_need(file, 0, LENGTH) } > 0, "{}", message());
    }
    // SAFETY: as the header says.
    unsafe {
        assert_eq!(qn_cache_check(cache), 0, "{}", message());
        assert_eq!((qn_close(file), qn_cache_close(cache)), (0, 0));
    }
    wait_for_release(&behaviour, 1);
}

#[test]
fn opens_of_backends_that_panic_or_fail_do_not_release_them() {
    let (behaviour, cache) = (Behaviour::new(LENGTH), cache());
    for (answer, expected, words) in [(PANIC, -libc::EIO, "panics"), (-13, -13, "denied")] {
        behaviour.attributes_answer.store(answer, Ordering::Relaxed);
        assert_eq!(open(cache, &behaviour), Err(expected), "of {answer}: {}", message());
        assert!(message().contains(words), "of {answer}: {}", message());
    }
    let endless = Behaviour::new(u64::MAX);
    assert_eq!(open(cache, &endless), Err(-libc::EIO), "{}", message());
    // SAFETY: as the header says.
    assert_eq!(unsafe { qn_cache_close(cache) }, 0);
    assert_eq!(behaviour.released.load(Ordering::Relaxed) + endless.released.load(Ordering::Relaxed), 0);
}

#[test]
fn a_backend_that_is_known_already_is_released_once_each() {
    let (behaviour, cache) = (Behaviour::new(LENGTH), cache());
    let files = [(); 3].map(|()| open(cache, &behaviour).unwrap());
    let mut buffer = [0; 10];
    for file in files {
        assert_eq!(pread(file, &mut buffer, 10), 10);
        // SAFETY: as the header says.
        assert_eq!(unsafe { qn_close(file) }, 0);
    }
    // SAFETY: as the header says.
    assert_eq!(unsafe { qn_cache_close(cache) }, 0);
    wait_for_release(&behaviour, 3);
}
