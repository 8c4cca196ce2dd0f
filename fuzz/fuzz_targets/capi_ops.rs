//! Any bytes as a sequence of calls of the C library, right ones and wrong ones, beside a model: a right call does what
//! its header says, a wrong one is -EINVAL with words, and nothing is lost, leaked or freed twice.
//!
//! ```text
//!   a byte             which call
//!   the bytes behind   which handle (closed ones are NULL), offsets, lengths, flags, the size of an option struct
//!
//!   caches   pools     each slot holds an open handle or NULL, and handles end in any order: files outlive their
//!   files    pins      cache, pins outlive their file
//! ```
//!
//! The model of a file is a vector of bytes. A file of the system is shared by the handles of one cache; a memory file
//! and a backend's file are of one handle. A pin has the bytes of the moment at which it was taken, whatever is written
//! later. What was made durable is compared with what lies behind the cache. What a caller must not do (use a closed
//! handle, pass an address of nothing) is not done here.
#![no_main]

mod report;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use quinion_capi::*;
use rustix::io::Errno;

const CALLS_MAX: usize = 120;
const FOLDER: &str = "/dev/shm";
/// No file of a run is longer, in bytes.
const LENGTH_MAX: u64 = 300_000;
/// Bytes of one read, write or pin, at most.
const TRANSFER_MAX: u64 = 70_000;
const MEMORY: u64 = 32 << 20;
/// How long the library's threads may take to free what a cache had.
const RELEASED_WITHIN: Duration = Duration::from_secs(20);

const INVALID: i64 = negative(Errno::INVAL);

const fn negative(error: Errno) -> i64 {
    -(error.raw_os_error() as i64)
}

fuzz_target!(|data: &[u8]| {
    let calls: Vec<Call> = Input(data).take(CALLS_MAX).collect();
    report::trying("capi_ops", &calls);
    let mut world = World::new();
    for call in &calls {
        world.call(call);
    }
    world.end();
});

#[derive(Clone, Copy, Debug)]
struct Call {
    kind: u8,
    slot: usize,
    other: usize,
    offset: u64,
    length: u64,
    flags: u8,
}

struct Input<'a>(&'a [u8]);

impl Iterator for Input<'_> {
    type Item = Call;

    fn next(&mut self) -> Option<Call> {
        let (bytes, rest) = self.0.split_first_chunk::<9>()?;
        self.0 = rest;
        let [kind, slots, o1, o2, o3, l1, l2, flags, how] = *bytes;
        let mut offset = u64::from(u32::from_le_bytes([o1, o2, o3 & 7, 0])) % LENGTH_MAX;
        let mut length = u64::from(u16::from_le_bytes([l1, l2])) + 1;
        match how {
            0..=15 => offset &= !4095,
            16..=31 => (offset, length) = (offset & !4095, (length | 4095) + 1),
            32 => offset = u64::MAX - offset,
            33 => offset = i64::MAX as u64 - length / 2,
            34 => length = 0,
            _ => {}
        }
        let length = length.min(TRANSFER_MAX);
        Some(Call {
            kind,
            slot: usize::from(slots & 15),
            other: usize::from(slots >> 4),
            offset,
            length,
            flags,
        })
    }
}

impl Call {
    /// Whether the range ends where no file does.
    fn is_too_far(&self) -> bool {
        self.offset.checked_add(self.length).is_none_or(|end| end > i64::MAX as u64)
    }

    fn bytes(&self) -> Vec<u8> {
        (0..self.length).map(|at| (at.wrapping_mul(31) as u8) ^ self.flags).collect()
    }
}

type Content = Rc<RefCell<Vec<u8>>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    System,
    Memory,
    Backend,
}

struct File {
    handle: *mut qn_file,
    content: Content,
    kind: Kind,
    can_write: bool,
    cache: usize,
    store: Option<Arc<Store>>,
    name: usize,
}

struct Pin {
    handle: *mut qn_pin,
    bytes: Vec<u8>,
}

struct OpenCache {
    handle: *mut qn_cache,
    /// Distinguishes it from earlier ones, whose files may be open still.
    number: usize,
}

struct OpenPool {
    handle: *mut qn_pool,
    cache: usize,
}

struct World {
    folder: tempfile::TempDir,
    caches: [Option<OpenCache>; 2],
    pools: [Option<OpenPool>; 2],
    files: [Option<File>; 6],
    pins: [Option<Pin>; 4],
    contents: HashMap<(usize, usize), Content>,
    caches_so_far: usize,
    pools_so_far: usize,
    backends_open: Arc<AtomicUsize>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("quinion-fuzz").tempdir_in(FOLDER).unwrap();
        Self {
            folder,
            caches: Default::default(),
            pools: Default::default(),
            files: Default::default(),
            pins: Default::default(),
            contents: HashMap::new(),
            caches_so_far: 0,
            pools_so_far: 0,
            backends_open: Arc::default(),
        }
    }

    fn call(&mut self, call: &Call) {
        match call.kind % 32 {
            0 => self.open_cache(call),
            1 => self.close_cache(call),
            2 => self.use_cache(call),
            3 => self.pool(call),
            4..=6 => self.open_file(call),
            7 => self.open_memory_file(call),
            8 => self.open_backend(call),
            9 => self.close_file(call),
            10..=14 => self.write(call),
            15 => self.append(call),
            16 => self.truncate(call),
            17 => self.punch(call),
            18 => self.sync(call),
            19 => self.hint(call),
            20..=22 => self.pin(call),
            23 => self.unpin(call),
            24 => self.check_pin(call),
            25 | 26 => self.read_batch(call),
            27 => self.allocate(call),
            _ => self.read(call),
        }
    }

    fn open_cache(&mut self, call: &Call) {
        let place = call.slot % self.caches.len();
        if self.caches[place].is_some() {
            return;
        }
        // SAFETY: all bytes being zero is a value of an option struct.
        let mut options: qn_cache_options = unsafe { std::mem::zeroed() };
        (options.size, options.memory) = (size_of::<qn_cache_options>(), MEMORY);
        let is_wrong = match call.flags {
            0 => set(&mut options.size, 0),
            1 => set(&mut options.memory, 4096),
            2 => set(&mut options.flags, 1 << 31),
            3 => set(&mut options.memory_max, MEMORY / 2),
            4 => set(&mut options.reserved, 1),
            5 => set(&mut options.size, usize::MAX),
            6 => set(&mut options.disk_bytes, 1 << 20),
            7 => set(&mut options.spill_bytes, 1 << 20),
            _ => false,
        };
        let (options, asks_more) = newer(options, |options| &mut options.size, call);
        let (is_wrong, mut handle) = (is_wrong || asks_more, dangling());
        // SAFETY: a struct that says its size, and a place for a handle.
        let result = unsafe { qn_cache_open((&raw const options).cast(), &raw mut handle) };
        if is_opened(result, handle, is_wrong) {
            self.caches[place] = Some(OpenCache { handle, number: self.caches_so_far });
            self.caches_so_far += 1;
        }
    }

    fn close_cache(&mut self, call: &Call) {
        let place = call.slot % self.caches.len();
        let number = self.number(place);
        let handle = self.caches[place].take().map_or(null_mut(), |cache| cache.handle);
        // SAFETY: NULL, or an open handle that is forgotten here.
        expect(unsafe { qn_cache_close(handle) }, !handle.is_null());
        self.assert_durable(number);
    }

    /// What was written to files of this cache is behind it, also of those that are closed.
    fn assert_durable(&self, cache: Option<usize>) {
        for ((number, name), content) in &self.contents {
            if Some(*number) == cache {
                let bytes = fs::read(self.path(*number, *name)).unwrap();
                assert!(bytes == *content.borrow(), "the file {number}-{name} has other bytes");
            }
        }
        self.files.iter().flatten().filter(|file| Some(file.cache) == cache).for_each(File::assert_stored);
    }

    fn path(&self, cache: usize, name: usize) -> PathBuf {
        self.folder.path().join(format!("{cache}-{name}"))
    }

    fn use_cache(&mut self, call: &Call) {
        let cache = self.cache(call.slot);
        let is_open = !cache.is_null();
        // SAFETY: here and below: NULL, or an open handle.
        match call.flags % 6 {
            0 => self.sync_cache(call.slot),
            1 => expect(unsafe { qn_cache_check(cache) }, is_open),
            2 => expect(unsafe { qn_cache_resize(cache, MEMORY) }, is_open),
            3 => expect(unsafe { qn_cache_resize(cache, u64::MAX - call.offset) }, false),
            4 => self.stats(cache, call),
            _ => {
                let (mut value, name) = (0, [c"reads", c"no such number"][call.slot & 1]);
                // SAFETY: as above, with a text and a place for a number.
                let result = unsafe { qn_cache_stat(cache, name.as_ptr(), &raw mut value) };
                match (is_open, call.slot & 1) {
                    (true, 1) => assert_eq!(i64::from(result), negative(Errno::NOENT)),
                    (is_open, _) => expect(result, is_open),
                }
            }
        }
    }

    fn sync_cache(&self, slot: usize) {
        let cache = self.cache(slot);
        // SAFETY: NULL, or an open handle.
        expect(unsafe { qn_cache_sync(cache) }, !cache.is_null());
        self.assert_durable(self.number(slot));
    }

    /// The struct of an older or newer caller: nothing behind it is written.
    fn stats(&self, cache: *const qn_cache, call: &Call) {
        const WORDS: usize = 200;
        let known = size_of::<qn_stats>() / 8;
        let words = if call.flags < 128 { call.other * 2 } else { call.length as usize % WORDS };
        let mut room = [u64::MAX; WORDS];
        room[0] = words as u64 * 8;
        // SAFETY: NULL or an open handle; a struct of `WORDS` words, which says that it has no more.
        let result = unsafe { qn_cache_stats(cache, room.as_mut_ptr().cast()) };
        let is_right = !cache.is_null() && words >= 2;
        expect(result, is_right);
        let end = if is_right { words } else { 1 };
        assert!(room[1..end.min(known)].iter().all(|word| *word != u64::MAX), "numbers are missing");
        assert!(room[end.min(known)..end].iter().all(|word| *word == 0), "what is not known is not 0");
        assert!(room[end..].iter().all(|word| *word == u64::MAX), "written behind the struct");
    }

    fn pool(&mut self, call: &Call) {
        let place = call.slot % self.pools.len();
        let Some(pool) = &self.pools[place] else { return self.add_pool(call, place) };
        let (handle, limit) = (pool.handle, 1 << 20);
        // SAFETY: here and below: an open handle, which is forgotten when it is closed.
        match call.flags % 4 {
            0 => expect(unsafe { qn_pool_set_limit(handle, limit * u64::from(call.other as u8)) }, true),
            1 => expect(unsafe { qn_pool_set_protected(handle, u64::MAX) }, false),
            2 => {
                // SAFETY: all bytes being zero is a value of it.
                let mut usage: qn_pool_usage = unsafe { std::mem::zeroed() };
                usage.size = size_of::<qn_pool_usage>();
                // SAFETY: as above, with a struct that says its size.
                expect(unsafe { qn_pool_stats(handle, &raw mut usage) }, true);
            }
            _ => {
                self.pools[place] = None;
                expect(unsafe { qn_pool_close(handle) }, true);
            }
        }
    }

    fn add_pool(&mut self, call: &Call, place: usize) {
        let (cache, mut handle) = (self.cache(call.other), dangling());
        self.pools_so_far += 1;
        let name = CString::new(format!("pool {}", self.pools_so_far)).unwrap();
        let name = if call.flags == 0 { c"\xff".as_ptr() } else { name.as_ptr() };
        // SAFETY: NULL or an open handle, a text, no options, and a place for a handle.
        let result = unsafe { qn_pool_add(cache, name, null(), &raw mut handle) };
        let is_wrong = cache.is_null() || call.flags == 0;
        if is_opened(result, handle, is_wrong) {
            self.pools[place] = Some(OpenPool { handle, cache: self.number(call.other).unwrap() });
        }
    }

    /// A file of the system: each cache has two of them, which nothing else writes. By its path, or by a descriptor.
    fn open_file(&mut self, call: &Call) {
        let place = call.slot % self.files.len();
        if self.files[place].is_some() {
            return;
        }
        let (cache, name) = (self.cache(call.other), call.other / 4 % 2);
        let number = self.number(call.other).unwrap_or(usize::MAX);
        let is_there = self.contents.contains_key(&(number, name));
        let can_write = call.flags & 64 == 0 || !is_there;
        let cuts = can_write && call.flags & 16 != 0;
        let mut options = open_options();
        options.flags = [
            (can_write && call.flags & 32 == 0, QN_OPEN_WRITE),
            (can_write && call.flags & 32 != 0, QN_OPEN_APPEND),
            (can_write, QN_OPEN_CREATE),
            (cuts, QN_OPEN_TRUNCATE),
            (call.flags & 128 != 0, QN_OPEN_UNCACHED),
        ]
        .iter()
        .fold(0, |flags, (is_set, flag)| flags | if *is_set { *flag } else { 0 });
        (options.durability, options.coherence) = ((call.length % 3) as u32, (call.length / 3 % 2) as u32);
        let is_wrong = match call.flags {
            0 => set(&mut options.size, 1),
            1 => set(&mut options.flags, 1 << 20),
            2 => set(&mut options.coherence, 77),
            3 => set(&mut options.durability, 77),
            4 => set(&mut options.reserved, 1),
            5 => set(&mut options.flags, QN_OPEN_TRUNCATE),
            _ => false,
        } || cache.is_null();
        options.pool = if call.flags & 8 == 0 { null() } else { self.pool_of(number) };
        let (options, asks_more) = newer(options, |options| &mut options.size, call);
        let (is_wrong, mut handle) = (is_wrong || asks_more, dangling());
        let path = self.path(number, name);
        let opened = fs::File::open(&path).ok().filter(|_| is_there && call.other & 8 != 0);
        let path = CString::new(path.to_str().unwrap()).unwrap();
        let options = (&raw const options).cast();
        let result = match &opened {
            // SAFETY: NULL or an open handle, a descriptor that is open, a struct that says its size, and a place for a
            // handle.
            Some(file) => unsafe { qn_open_fd(cache, file.as_raw_fd(), options, &raw mut handle) },
            // SAFETY: the same with a text.
            None => unsafe { qn_open(cache, path.as_ptr(), options, &raw mut handle) },
        };
        if is_opened(result, handle, is_wrong) {
            let content = Rc::clone(self.contents.entry((number, name)).or_default());
            if cuts {
                content.borrow_mut().clear();
            }
            self.files[place] = Some(File {
                handle,
                content,
                kind: Kind::System,
                can_write,
                cache: number,
                store: None,
                name,
            });
        }
    }

    fn open_memory_file(&mut self, call: &Call) {
        let place = call.slot % self.files.len();
        if self.files[place].is_some() {
            return;
        }
        let cache = self.cache(call.other);
        // SAFETY: all bytes being zero is a value of an option struct.
        let mut options: qn_memory_file_options = unsafe { std::mem::zeroed() };
        (options.size, options.length) = (size_of::<qn_memory_file_options>(), call.length);
        let is_wrong = match call.flags {
            0 => set(&mut options.size, 9),
            1 => set(&mut options.flags, 1 << 30),
            2 => set(&mut options.length, u64::MAX),
            3 => set(&mut options.name, c"\xff".as_ptr()),
            _ => false,
        } || cache.is_null();
        let (options, asks_more) = newer(options, |options| &mut options.size, call);
        let (is_wrong, mut handle) = (is_wrong || asks_more, dangling());
        // SAFETY: as in `open_file`.
        let result = unsafe { qn_memory_file(cache, (&raw const options).cast(), &raw mut handle) };
        if is_opened(result, handle, is_wrong) {
            let content = Rc::new(RefCell::new(vec![0; call.length as usize]));
            let (kind, cache) = (Kind::Memory, self.number(call.other).unwrap());
            let file = File { handle, content, kind, can_write: true, cache, store: None, name: 0 };
            self.files[place] = Some(file);
        }
    }

    fn open_backend(&mut self, call: &Call) {
        let place = call.slot % self.files.len();
        if self.files[place].is_some() {
            return;
        }
        let cache = self.cache(call.other);
        let store =
            Arc::new(Store { bytes: Mutex::new(call.bytes()), open: Arc::clone(&self.backends_open) });
        let mut functions = backend(&store);
        let mut options = open_options();
        options.flags = QN_OPEN_WRITE;
        let is_wrong = match call.flags {
            0 => set(&mut functions.size, 8),
            1 => functions.read.take().is_some(),
            2 => functions.attributes.take().is_some(),
            3 => functions.sync.take().is_some(),
            4 => set(&mut functions.reserved, 1),
            5 => set(&mut functions.threads, u32::MAX),
            _ => false,
        } || cache.is_null();
        let mut handle = dangling();
        self.backends_open.fetch_add(1, Relaxed);
        let context = functions.context;
        // SAFETY: as in `open_file`; the context is kept until `release` frees it.
        let result =
            unsafe { qn_open_backend(cache, &raw const functions, &raw const options, &raw mut handle) };
        if is_opened(result, handle, is_wrong) {
            let content = Rc::new(RefCell::new(call.bytes()));
            let (kind, cache) = (Kind::Backend, self.number(call.other).unwrap());
            let file = File { handle, content, kind, can_write: true, cache, store: Some(store), name: 0 };
            self.files[place] = Some(file);
        } else {
            // SAFETY: the open failed, so the context is the caller's again.
            unsafe { release(context) };
        }
    }

    fn close_file(&mut self, call: &Call) {
        let place = call.slot % self.files.len();
        let handle = self.files[place].take().map_or(null_mut(), |file| file.handle);
        // SAFETY: NULL, or an open handle that is forgotten here.
        expect(unsafe { qn_close(handle) }, !handle.is_null());
    }

    fn read(&self, call: &Call) {
        let (file, mut buffer) = (self.file(call.slot), vec![0; call.length as usize]);
        let handle = raw(file);
        let address = if call.flags == 1 { null_mut() } else { buffer.as_mut_ptr().cast::<c_void>() };
        let takes_flags = call.flags & 1 == 0;
        let flags = match call.flags {
            _ if !takes_flags => 0,
            0 => 1 << 9,
            flags => u32::from(flags) >> 1 & (QN_READ_NOWAIT | QN_READ_CACHED_ONLY | QN_READ_UNCACHED),
        };
        // SAFETY: NULL or an open handle; NULL or a buffer of that length.
        let result = if takes_flags {
            unsafe { qn_pread_with(handle, address, buffer.len(), call.offset, flags) }
        } else {
            unsafe { qn_pread(handle, address, buffer.len(), call.offset) }
        };
        let is_right = call.length == 0 || !address.is_null() && !call.is_too_far();
        let Some(file) = file.filter(|_| is_right && call.flags != 0) else { return assert_invalid(result) };
        if file.kind == Kind::Memory && flags != 0 {
            return assert_eq!(result, negative(Errno::OPNOTSUPP), "{}", message());
        }
        let content = file.content.borrow();
        let mut expected = part(&content, call.offset, call.length);
        if flags & (QN_READ_NOWAIT | QN_READ_CACHED_ONLY) != 0 {
            // What is not there is not waited for.
            if result == negative(Errno::AGAIN) && !expected.is_empty() {
                return;
            }
            let some = usize::try_from(result).unwrap_or_else(|_| panic!("{result}: {}", message()));
            assert!(some > 0 || expected.is_empty(), "nothing was read, and the file has not ended");
            expected = &expected[..some.min(expected.len())];
        }
        assert_eq!(result, expected.len() as i64, "{}", message());
        assert!(buffer[..expected.len()] == *expected, "other bytes");
    }

    fn read_batch(&self, call: &Call) {
        let length = (call.length / 2) as usize;
        let mut buffers = [vec![0; length], vec![0; length], vec![0; length]];
        let is_wrong = |number: usize| call.is_too_far() || number == 1 && call.flags == 0;
        let files = [call.slot, call.other, call.slot + 1].map(|slot| self.file(slot));
        let mut reads: Vec<qn_read> = files
            .iter()
            .zip(&mut buffers)
            .enumerate()
            .map(|(number, (file, buffer))| qn_read {
                file: raw(*file),
                buffer: if is_wrong(number) { null_mut() } else { buffer.as_mut_ptr().cast() },
                length,
                offset: call.offset.wrapping_add(number as u64 * 5000),
                result: 77,
            })
            .collect();
        // SAFETY: reads whose buffers are NULL or have their length, and do not overlap; files are NULL or open.
        let result = unsafe { qn_pread_batch(reads.as_mut_ptr(), reads.len(), 0) };
        // One that cannot be made as it is leaves all unread.
        let is_right = |number: usize| files[number].is_some() && (length == 0 || !is_wrong(number));
        let all_are_right = (0..reads.len()).all(is_right);
        for ((read, buffer), file) in reads.iter().zip(&buffers).zip(files) {
            let Some(file) = file.filter(|_| all_are_right) else {
                assert_eq!(read.result, INVALID);
                continue;
            };
            let content = file.content.borrow();
            let expected = part(&content, read.offset, length as u64);
            assert_eq!(read.result, expected.len() as i64, "{}", message());
            assert!(buffer[..expected.len()] == *expected, "other bytes");
        }
        expect(result, all_are_right);
    }

    fn write(&self, call: &Call) {
        let (file, bytes) = (self.file(call.slot), call.bytes());
        // SAFETY: NULL or an open handle, and bytes of that length.
        let result = unsafe { qn_pwrite(raw(file), bytes.as_ptr().cast(), bytes.len(), call.offset) };
        match file {
            None => assert_invalid(result),
            Some(_) if call.length > 0 && call.is_too_far() => assert_invalid(result),
            Some(file) if !file.can_write => assert_refused(result, call.length),
            Some(file) => {
                assert_eq!(result, call.length as i64, "{}", message());
                write_at(&file.content, &bytes, call.offset);
            }
        }
    }

    fn append(&self, call: &Call) {
        let (file, bytes) = (self.file(call.slot), call.bytes());
        if file.is_some_and(|file| file.content.borrow().len() as u64 > LENGTH_MAX) {
            return;
        }
        // SAFETY: as in `write`.
        let result = unsafe { qn_append(raw(file), bytes.as_ptr().cast(), bytes.len()) };
        match file {
            None => assert_invalid(result),
            Some(file) if !file.can_write => assert_refused(result, call.length),
            Some(file) => {
                let end = file.content.borrow().len() as u64;
                assert_eq!(result, end as i64, "{}", message());
                write_at(&file.content, &bytes, end);
            }
        }
    }

    fn truncate(&self, call: &Call) {
        let file = self.file(call.slot);
        let has_end = call.offset <= i64::MAX as u64;
        if has_end && call.offset > LENGTH_MAX && file.is_some_and(|file| file.can_write) {
            return; // a file may be as long, and the model may not
        }
        // SAFETY: NULL or an open handle.
        let result = unsafe { qn_truncate(raw(file), call.offset) };
        match file {
            None => assert_invalid(result.into()),
            Some(_) if !has_end => assert_invalid(result.into()),
            Some(file) if !file.can_write => assert_refused(result.into(), 1),
            Some(file) => {
                expect(result, true);
                file.content.borrow_mut().resize(call.offset as usize, 0);
            }
        }
        // SAFETY: as above.
        let length = unsafe { qn_length(raw(file)) };
        match file {
            None => assert_invalid(length),
            Some(file) => assert_eq!(length, file.content.borrow().len() as i64),
        }
    }

    fn punch(&self, call: &Call) {
        let file = self.file(call.slot);
        // SAFETY: NULL or an open handle.
        let result = unsafe { qn_punch_hole(raw(file), call.offset, call.length) };
        match file {
            None => assert_invalid(result.into()),
            Some(_) if call.is_too_far() => assert_invalid(result.into()),
            Some(file) if !file.can_write => assert_refused(result.into(), call.length),
            Some(file) => {
                expect(result, true);
                let mut content = file.content.borrow_mut();
                let end = content.len() as u64;
                let range = call.offset.min(end) as usize..(call.offset + call.length).min(end) as usize;
                content[range].fill(0);
            }
        }
    }

    /// Space is reserved, and the length stays.
    fn allocate(&self, call: &Call) {
        let file = self.file(call.slot);
        // SAFETY: NULL or an open handle.
        let result = unsafe { qn_allocate(raw(file), call.offset, call.length) };
        let Some(file) = file.filter(|_| !call.is_too_far()) else { return assert_invalid(result.into()) };
        let length = file.content.borrow().len() as u64;
        match file.kind {
            Kind::Memory => expect(result, call.offset + call.length <= length),
            _ if !file.can_write => assert_refused(result.into(), call.length),
            Kind::System => expect(result, true),
            Kind::Backend => assert_eq!(i64::from(result), negative(Errno::OPNOTSUPP)),
        }
        // SAFETY: an open handle.
        assert_eq!(unsafe { qn_length(file.handle) }, length as i64);
    }

    fn sync(&self, call: &Call) {
        let (file, kind) = (self.file(call.slot), u32::from(call.flags % 3));
        // SAFETY: NULL or an open handle.
        expect(unsafe { qn_sync(raw(file), kind) }, file.is_some() && kind < 2);
        if let Some(file) = file.filter(|_| kind < 2) {
            file.assert_stored();
            if file.kind == Kind::System {
                let bytes = fs::read(self.path(file.cache, file.name)).unwrap();
                assert!(bytes == *file.content.borrow(), "the file has other bytes");
            }
        }
    }

    /// What may do something or nothing, and changes no byte.
    fn hint(&self, call: &Call) {
        let file = self.file(call.slot);
        let (handle, what) = (raw(file), call.flags % 4);
        // SAFETY: here and below: NULL or an open handle.
        let result = match what {
            0 => unsafe { qn_will_need(handle, call.offset, call.length) },
            1 => unsafe { qn_dont_need(handle, call.offset, call.length) },
            2 => unsafe { qn_advise(handle, call.other as u32) }.into(),
            _ => unsafe { qn_revalidate(handle) }.into(),
        };
        let is_wrong = what < 2 && call.is_too_far() || what == 2 && call.other as u32 > QN_ADVICE_NO_REUSE;
        match file {
            None => assert_invalid(result),
            Some(_) if is_wrong => assert_invalid(result),
            Some(file) if file.kind == Kind::Memory => assert_eq!(result, negative(Errno::OPNOTSUPP)),
            Some(_) => {
                let most = [i64::MAX, i64::MAX, 0, 1][usize::from(what)];
                assert!((0..=most).contains(&result), "{result}: {}", message());
            }
        }
    }

    fn pin(&mut self, call: &Call) {
        let place = call.other % self.pins.len();
        if self.pins[place].is_some() {
            return;
        }
        let (file, mut handle) = (self.file(call.slot), dangling());
        // SAFETY: NULL or an open handle, and a place for a handle.
        let result = unsafe { qn_pin_range(raw(file), call.offset, call.length as usize, &raw mut handle) };
        // Folios are pinned whole, and there is a bound.
        let is_refused = i64::from(result) == negative(Errno::NOBUFS);
        let is_wrong = file.is_none() || call.length > 0 && call.is_too_far();
        if is_refused && !is_wrong {
            assert!(handle.is_null());
        } else if is_opened(result, handle, is_wrong) {
            let bytes = part(&file.unwrap().content.borrow(), call.offset, call.length).to_vec();
            self.pins[place] = Some(Pin { handle, bytes });
        }
    }

    fn check_pin(&self, call: &Call) {
        let Some(pin) = &self.pins[call.other % self.pins.len()] else {
            // SAFETY: NULL is refused.
            return assert_invalid(unsafe { qn_pin_length(null()) });
        };
        let (mut runs, mut count, mut data) = (null(), 0, null());
        // SAFETY: an open handle, and places for the answers.
        unsafe {
            assert_eq!(qn_pin_length(pin.handle), pin.bytes.len() as i64);
            expect(qn_pin_runs(pin.handle, &raw mut runs, &raw mut count), true);
            let mut at = 0;
            for run in 0..count {
                let run = &*runs.add(run);
                let bytes = std::slice::from_raw_parts(run.data.cast::<u8>(), run.length);
                assert!(pin.bytes[at..at + run.length] == *bytes, "a pin changed");
                at += run.length;
            }
            assert_eq!(at, pin.bytes.len());
            if call.flags & 1 == 0 && qn_pin_mapped(pin.handle, &raw mut data) == 0 && !pin.bytes.is_empty() {
                let bytes = std::slice::from_raw_parts(data.cast::<u8>(), pin.bytes.len());
                assert!(*bytes == pin.bytes[..], "a mapped pin has other bytes");
            }
        }
    }

    fn unpin(&mut self, call: &Call) {
        self.check_pin(call);
        let place = call.other % self.pins.len();
        let handle = self.pins[place].take().map_or(null_mut(), |pin| pin.handle);
        // SAFETY: NULL, or an open handle that is forgotten here.
        expect(unsafe { qn_unpin(handle) }, !handle.is_null());
    }

    /// Closes what is open, and checks that the library returned all bytes and contexts of backends.
    fn end(mut self) {
        let any =
            |number: usize| Call { kind: 0, slot: number, other: number, offset: 0, length: 0, flags: 0 };
        for number in 0..self.files.len() {
            self.close_file(&any(number));
            self.unpin(&any(number));
        }
        for pool in self.pools.iter_mut().filter_map(Option::take) {
            // SAFETY: an open handle that is forgotten here.
            expect(unsafe { qn_pool_close(pool.handle) }, true);
        }
        for number in 0..self.caches.len() {
            self.close_cache(&any(number));
        }
        let until = Instant::now() + RELEASED_WITHIN;
        while self.backends_open.load(Relaxed) > 0 {
            assert!(
                Instant::now() < until,
                "{} backends were not released",
                self.backends_open.load(Relaxed)
            );
            std::thread::yield_now();
        }
    }

    // Handles; NULL where a slot is empty.

    fn cache(&self, slot: usize) -> *mut qn_cache {
        self.caches[slot % self.caches.len()].as_ref().map_or(null_mut(), |cache| cache.handle)
    }

    fn number(&self, slot: usize) -> Option<usize> {
        self.caches[slot % self.caches.len()].as_ref().map(|cache| cache.number)
    }

    /// A pool of that cache: with a pool of another, the file would be of that other cache.
    fn pool_of(&self, cache: usize) -> *const qn_pool {
        let pool = self.pools.iter().flatten().find(|pool| pool.cache == cache);
        pool.map_or(null(), |pool| pool.handle.cast_const())
    }

    fn file(&self, slot: usize) -> Option<&File> {
        self.files[slot % self.files.len()].as_ref()
    }
}

impl File {
    fn assert_stored(&self) {
        if let Some(store) = &self.store {
            assert!(*store.bytes.lock().unwrap() == *self.content.borrow(), "the backend has other bytes");
        }
    }
}

fn raw(file: Option<&File>) -> *const qn_file {
    file.map_or(null(), |file| file.handle.cast_const())
}

fn part(content: &[u8], offset: u64, length: u64) -> &[u8] {
    let end = content.len() as u64;
    &content[offset.min(end) as usize..offset.saturating_add(length).min(end) as usize]
}

fn write_at(content: &Content, bytes: &[u8], offset: u64) {
    if bytes.is_empty() {
        return;
    }
    let (mut content, offset) = (content.borrow_mut(), offset as usize);
    if content.len() < offset + bytes.len() {
        content.resize(offset + bytes.len(), 0);
    }
    content[offset..offset + bytes.len()].copy_from_slice(bytes);
}

fn set<T>(field: &mut T, value: T) -> bool {
    *field = value;
    true
}

fn dangling<T>() -> *mut T {
    std::ptr::without_provenance_mut(usize::MAX)
}

fn message() -> String {
    // SAFETY: the library's text, which is there until the next failure.
    unsafe { CStr::from_ptr(qn_error_message()) }.to_str().expect("messages are UTF-8").to_owned()
}

fn assert_invalid(result: i64) {
    assert_eq!(result, INVALID, "{}", message());
    assert!(!message().is_empty());
}

/// Compares the result of a write by a handle that was opened for reading. One of nothing may be 0.
fn assert_refused(result: i64, length: u64) {
    assert!(result == negative(Errno::BADF) || length == 0 && result == 0, "{result}: {}", message());
}

fn expect(result: c_int, is_right: bool) {
    if is_right {
        assert_eq!(result, 0, "{}", message());
    } else {
        assert_invalid(result.into());
    }
}

/// Whether a handle came, which must be so if and only if nothing was wrong.
fn is_opened<T>(result: c_int, handle: *mut T, is_wrong: bool) -> bool {
    expect(result, !is_wrong);
    assert_eq!(handle.is_null(), is_wrong, "a failure leaves NULL, and nothing else does");
    !is_wrong
}

/// An option struct, and behind it the fields of a newer release.
#[repr(C)]
struct Newer<T> {
    known: T,
    more: [u64; 2],
}

/// Options of a caller of this release or, sometimes, of a newer one, and whether it asks for what is not known.
fn newer<T>(mut known: T, size: impl Fn(&mut T) -> &mut usize, call: &Call) -> (Newer<T>, bool) {
    let place = size(&mut known);
    let is_newer = *place == size_of::<T>() && call.length.is_multiple_of(4);
    if is_newer {
        *place = size_of::<Newer<T>>();
    }
    let asks = is_newer && call.length.is_multiple_of(64);
    (Newer { known, more: [0, u64::from(asks)] }, asks)
}

fn open_options() -> qn_open_options {
    // SAFETY: all bytes being zero is a value of an option struct.
    let mut options: qn_open_options = unsafe { std::mem::zeroed() };
    (options.size, options.mode) = (size_of::<qn_open_options>(), 0o600);
    options
}

struct Store {
    bytes: Mutex<Vec<u8>>,
    open: Arc<AtomicUsize>,
}

fn backend(store: &Arc<Store>) -> qn_backend {
    qn_backend {
        size: size_of::<qn_backend>(),
        context: Arc::into_raw(Arc::clone(store)).cast_mut().cast(),
        read: Some(read),
        attributes: Some(attributes),
        write: Some(write),
        sync: Some(sync),
        truncate: Some(truncate),
        release: Some(release),
        threads: 1,
        reserved: 0,
    }
}

fn store<'a>(context: *mut c_void) -> &'a Store {
    // SAFETY: the context of `backend`, which `release` frees, after which no other function is called.
    unsafe { &*context.cast::<Store>() }
}

unsafe extern "C-unwind" fn read(
    context: *mut c_void,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> i64 {
    let bytes = store(context).bytes.lock().unwrap();
    let found = part(&bytes, offset, length as u64);
    // SAFETY: the library's buffer, of `length` bytes.
    unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(found.as_ptr(), found.len()) };
    found.len() as i64
}

unsafe extern "C-unwind" fn attributes(context: *mut c_void, attributes: *mut qn_attributes) -> c_int {
    // SAFETY: the library's struct.
    let attributes = unsafe { &mut *attributes };
    attributes.length = store(context).bytes.lock().unwrap().len() as u64;
    attributes.identity = [context.addr() as u64, 1];
    0
}

unsafe extern "C-unwind" fn write(
    context: *mut c_void,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> i64 {
    let mut bytes = store(context).bytes.lock().unwrap();
    let (offset, end) = (offset as usize, offset as usize + length);
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    // SAFETY: the library's bytes, `length` of them.
    bytes[offset..end].copy_from_slice(unsafe { std::slice::from_raw_parts(buffer.cast(), length) });
    length as i64
}

unsafe extern "C-unwind" fn sync(_: *mut c_void, _: u32, _: u64, _: u64) -> c_int {
    0
}

unsafe extern "C-unwind" fn truncate(context: *mut c_void, length: u64) -> c_int {
    store(context).bytes.lock().unwrap().resize(length as usize, 0);
    0
}

unsafe extern "C-unwind" fn release(context: *mut c_void) {
    // SAFETY: what `backend` has made, once.
    let store = unsafe { Arc::from_raw(context.cast::<Store>()) };
    store.open.fetch_sub(1, Relaxed);
}
