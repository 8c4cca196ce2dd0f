//! Backends that do wrong: what leaves a callback is an error, and the cache stays usable.
//!
//! The functions here are C's, called as C would call them; the backend is in Rust, because only Rust can panic.

#![allow(unsafe_code, reason = "the functions are those of C")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::Mutex;
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

/// A file of several backends, as programs have it that open the same object each by a context of its own.
struct SharedFile {
    identity: u64,
    bytes: Mutex<Vec<u8>>,
}

struct Opener<'f> {
    file: &'f SharedFile,
    truncate_answer: c_int,
    calls: AtomicU32,
    released: AtomicU32,
}

impl<'f> Opener<'f> {
    fn new(file: &'f SharedFile, truncate_answer: c_int) -> Self {
        Self { file, truncate_answer, calls: AtomicU32::new(0), released: AtomicU32::new(0) }
    }

    fn open(&self, cache: *mut qn_cache, flags: u32) -> Result<*mut qn_file, c_int> {
        let functions = qn_backend {
            size: size_of::<qn_backend>(),
            context: std::ptr::from_ref(self).cast_mut().cast(),
            read: Some(read_shared),
            attributes: Some(shared_attributes),
            write: Some(write_shared),
            sync: Some(sync_shared),
            truncate: Some(truncate_shared),
            release: Some(release_shared),
            threads: 2,
            reserved: 0,
        };
        // SAFETY: numbers and a pointer.
        let mut options: qn_open_options = unsafe { std::mem::zeroed() };
        (options.size, options.flags) = (size_of::<qn_open_options>(), flags);
        let mut file = null_mut();
        // SAFETY: as the header says.
        let answer = unsafe { qn_open_backend(cache, &functions, &options, &mut file) };
        if answer == 0 { Ok(file) } else { Err(answer) }
    }
}

/// The opener behind a context, one call of which is counted.
fn opener<'c>(context: *mut c_void) -> &'c Opener<'c> {
    // SAFETY: what `Opener::open` passes.
    let opener = unsafe { &*context.cast::<Opener>() };
    opener.calls.fetch_add(1, Ordering::Relaxed);
    opener
}

unsafe extern "C-unwind" fn read_shared(
    context: *mut c_void,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> i64 {
    let bytes = opener(context).file.bytes.lock().unwrap();
    let from = bytes.get(offset as usize..).unwrap_or_default();
    let length = length.min(from.len());
    // SAFETY: the library's buffer, of at least so many bytes.
    unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(from.as_ptr(), length) };
    length as i64
}

unsafe extern "C-unwind" fn shared_attributes(context: *mut c_void, attributes: *mut qn_attributes) -> c_int {
    let opener = opener(context);
    // SAFETY: the library's struct.
    let attributes = unsafe { &mut *attributes };
    attributes.length = opener.file.bytes.lock().unwrap().len() as u64;
    attributes.identity = [opener.file.identity, 2];
    0
}

unsafe extern "C-unwind" fn write_shared(
    context: *mut c_void,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> i64 {
    let mut bytes = opener(context).file.bytes.lock().unwrap();
    let (start, end) = (offset as usize, offset as usize + length);
    let len = bytes.len().max(end);
    bytes.resize(len, 0);
    // SAFETY: the library's buffer, of so many bytes.
    let from = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
    bytes[start..end].copy_from_slice(from);
    length as i64
}

unsafe extern "C-unwind" fn sync_shared(
    context: *mut c_void,
    _kind: u32,
    _start: u64,
    _length: u64,
) -> c_int {
    opener(context);
    0
}

unsafe extern "C-unwind" fn truncate_shared(context: *mut c_void, length: u64) -> c_int {
    let opener = opener(context);
    if opener.truncate_answer == 0 {
        opener.file.bytes.lock().unwrap().resize(length as usize, 0);
    }
    opener.truncate_answer
}

unsafe extern "C-unwind" fn release_shared(context: *mut c_void) {
    // SAFETY: what `Opener::open` passes.
    unsafe { &*context.cast::<Opener>() }.released.fetch_add(1, Ordering::Relaxed);
}

fn pwrite(file: *const qn_file, bytes: &[u8], offset: u64) -> i64 {
    // SAFETY: as the header says.
    unsafe { qn_pwrite(file, bytes.as_ptr().cast(), bytes.len(), offset) }
}

const WRITES: u32 = QN_OPEN_WRITE;
const EMPTIES: u32 = QN_OPEN_WRITE | QN_OPEN_TRUNCATE;

/// 1 A opens a file to read, or no thread does. 2 B opens it to write and to empty it, its truncate fails, and so does
/// the open: B's context is its caller's again, who frees it. 3 C opens it to write. B was the file's writer still, so
/// C's write, sync and truncate called B's functions.
#[test]
fn a_backend_whose_open_failed_is_not_called_again() {
    for reads_before in [false, true] {
        let shared = SharedFile { identity: 7, bytes: Mutex::new(vec![7; 10_000]) };
        let opener = |truncate_answer| Opener::new(&shared, truncate_answer);
        let (a, b, c, cache) = (opener(0), opener(-libc::EIO), opener(0), cache());
        let reader = reads_before.then(|| a.open(cache, 0).unwrap());
        assert_eq!(b.open(cache, EMPTIES), Err(-libc::EIO));
        let calls = b.calls.load(Ordering::Relaxed);
        let writer = c.open(cache, WRITES).unwrap();
        assert_eq!(pwrite(writer, b"bytes of C", 5), 10, "{}", message());
        // SAFETY: as the header says.
        let answers = unsafe { (qn_sync(writer, QN_SYNC_DATA), qn_truncate(writer, 5000)) };
        assert_eq!(answers, (0, 0), "{}", message());
        assert_eq!(
            shared.bytes.lock().unwrap()[..20],
            *b"\x07\x07\x07\x07\x07bytes of C\x07\x07\x07\x07\x07"
        );
        let mut buffer = [0; 20];
        for file in reader.iter().chain([&writer]) {
            assert_eq!(pread(*file, &mut buffer, 4990), 10);
            // SAFETY: as the header says.
            assert_eq!(unsafe { qn_close(*file) }, 0);
        }
        // SAFETY: as the header says.
        assert_eq!(unsafe { qn_cache_close(cache) }, 0);
        assert_eq!(shared.bytes.lock().unwrap().len(), 5000);
        assert_eq!(b.calls.load(Ordering::Relaxed), calls, "a reader before: {reads_before}");
        assert_eq!(b.released.load(Ordering::Relaxed), 0);
        while c.released.load(Ordering::Relaxed) == 0
            || reads_before && a.released.load(Ordering::Relaxed) == 0
        {
            std::thread::yield_now();
        }
    }
}

/// The backend of a handle that was closed may be the file's writer for as long as the cache knows the file: its
/// context is not freed before.
#[test]
fn a_writer_of_a_closed_handle_is_not_released_while_others_write_by_it() {
    let shared = SharedFile { identity: 8, bytes: Mutex::new(vec![7; 10_000]) };
    let (a, b, c, cache) =
        (Opener::new(&shared, 0), Opener::new(&shared, 0), Opener::new(&shared, 0), cache());
    let reader = a.open(cache, 0).unwrap();
    let first = b.open(cache, EMPTIES).unwrap();
    // SAFETY: as the header says.
    assert_eq!((shared.bytes.lock().unwrap().len(), unsafe { qn_close(first) }), (0, 0));
    let writer = c.open(cache, WRITES).unwrap();
    let calls = b.calls.load(Ordering::Relaxed);
    assert_eq!(pwrite(writer, b"bytes of C", 0), 10, "{}", message());
    // SAFETY: as the header says.
    assert_eq!(unsafe { qn_sync(writer, QN_SYNC_DATA) }, 0, "{}", message());
    assert_eq!(*shared.bytes.lock().unwrap(), b"bytes of C");
    assert!(b.calls.load(Ordering::Relaxed) > calls, "B is the file's writer");
    assert_eq!(b.released.load(Ordering::Relaxed), 0);
    // SAFETY: as the header says.
    assert_eq!(unsafe { (qn_close(reader), qn_close(writer), qn_cache_close(cache)) }, (0, 0, 0));
    for opener in [&a, &b, &c] {
        while opener.released.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(opener.released.load(Ordering::Relaxed), 1);
    }
}

/// The cache keeps the first backend of a file that is opened twice. The second was released inside the open that
/// succeeded: its caller freed the context, which the first open may have, too, before it had the file.
#[test]
fn a_backend_that_the_cache_does_not_keep_is_released_when_its_file_is_closed() {
    let shared = SharedFile { identity: 9, bytes: Mutex::new(vec![7; 10_000]) };
    let (a, b, cache) = (Opener::new(&shared, 0), Opener::new(&shared, 0), cache());
    let (first, second) = (a.open(cache, 0).unwrap(), b.open(cache, 0).unwrap());
    assert_eq!(b.released.load(Ordering::Relaxed), 0);
    assert_eq!(pread(second, &mut [0; 10], 0), 10, "{}", message());
    // SAFETY: as the header says.
    assert_eq!(unsafe { qn_close(second) }, 0);
    assert_eq!((a.released.load(Ordering::Relaxed), b.released.load(Ordering::Relaxed)), (0, 1));
    // One context, opened twice: it is released once for each.
    let again = a.open(cache, 0).unwrap();
    // SAFETY: as the header says.
    assert_eq!(unsafe { (qn_close(first), qn_close(again), qn_cache_close(cache)) }, (0, 0, 0));
    while a.released.load(Ordering::Relaxed) < 2 {
        std::thread::yield_now();
    }
}
