//! Real: the functions that stand behind the wrappers.
//!
//! The constructor looks them up once: by `dlsym`, or where no loaded object has that in the tables of what is loaded
//! (`loaded.rs`). A wrapper may be called before that, by an allocator that another object's constructor starts; so
//! what is a plain system call begins as one, and the others are looked up when they are needed.
//!
//! Where the C library is patched, a function's place holds the address of the instructions that were moved out of its
//! beginning; its own address would lead back to the wrapper.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use quinion_view::viewer::sys::call;

use crate::kernel::number;
use crate::loaded;

#[link(name = "c")]
unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn fileno(stream: *mut c_void) -> c_int;
    static environ: *const *const c_char;
}

pub fn environment() -> *const *const c_char {
    // SAFETY: the C library's variable, which is there from the start; the program may set it, to a list or null.
    unsafe { core::ptr::read_volatile(&raw const environ) }
}

type Dlsym = unsafe extern "C" fn(handle: *mut c_void, name: *const c_char) -> *mut c_void;
type TestCancel = unsafe extern "C" fn();

const RTLD_NEXT: *mut c_void = usize::MAX as *mut c_void;
const TEST_CANCEL_NAME: &CStr = c"pthread_testcancel";

/// Null until the start, and where an older C library has it in a library that is not loaded.
static TEST_CANCEL: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

static IS_RESOLVED: AtomicBool = AtomicBool::new(false);

#[repr(transparent)]
pub struct Real(AtomicPtr<c_void>);

/// Turns the kernel's answer into the C library's: -1 and `errno` for an error.
pub fn answer(answer: isize) -> isize {
    if (-4095..0).contains(&answer) {
        // SAFETY: the C library gives the calling thread's errno.
        unsafe { *__errno_location() = -answer as c_int };
        return -1;
    }
    answer
}

pub fn last_error() -> c_int {
    // SAFETY: as in `answer`.
    unsafe { *__errno_location() }
}

/// The descriptor of a stream; negative if it has none.
pub fn stream_fd(stream: *mut c_void) -> c_int {
    // SAFETY: the caller got the stream from the C library; the errno is the calling thread's. A stream without a
    // descriptor is no error of the program's.
    unsafe {
        let before = *__errno_location();
        let fd = fileno(stream);
        *__errno_location() = before;
        fd
    }
}

/// Ends the thread here if another thread has cancelled it: a served read is a cancellation point as the real one is.
#[inline]
pub fn test_cancel() {
    let test = TEST_CANCEL.load(Ordering::Relaxed); // code that was there before
    if !test.is_null() {
        // SAFETY: the C library's function, which takes nothing; wrappers that call this may be unwound.
        unsafe { core::mem::transmute::<*mut c_void, TestCancel>(test)() }
    }
}

impl Real {
    const fn later() -> Self {
        Self(AtomicPtr::new(core::ptr::null_mut()))
    }
    const fn call(raw: *mut c_void) -> Self {
        Self(AtomicPtr::new(raw))
    }

    #[inline]
    pub fn get(&self) -> *mut c_void {
        // Relaxed: an address of code that was there before.
        let known = self.0.load(Ordering::Relaxed);
        if known.is_null() { self.find() } else { known }
    }

    pub fn resolved_address(&self) -> usize {
        self.0.load(Ordering::Relaxed) as usize // as in `get`
    }

    /// Looks in what is loaded now, and does not remember it: the library may be gone by the next call.
    #[cold]
    fn find(&self) -> *mut c_void {
        let Some(wrapped) = ALL.iter().find(|wrapped| core::ptr::eq(wrapped.real, self)) else {
            return missing as *mut c_void;
        };
        let found = match dlsym() {
            Some(dlsym) => Some(next(dlsym, wrapped.name)).filter(|found| !found.is_null()),
            // A thread that has no `dlsym` has no `dlopen`: what was not there at the start does not come.
            None if IS_RESOLVED.load(Ordering::Relaxed) => None,
            None => first(wrapped),
        };
        let found = found.or_else(|| if wrapped.may_be_local() { unique_definition(wrapped) } else { None });
        found.unwrap_or_else(|| wrapped.missing())
    }
}

/// For a function the C library does not have: ENOSYS, as from a kernel that lacks the call.
extern "C" fn missing() -> isize {
    answer(-ENOSYS)
}

/// As `missing`, for a function that answers with an address.
extern "C" fn nothing() -> *mut c_void {
    answer(-ENOSYS);
    core::ptr::null_mut()
}

/// As `missing`, for a function that answers with the negative error and leaves `errno`.
extern "C" fn not_supported() -> isize {
    -ENOSYS
}

/// Stands for `closefrom`, which cannot fail: a caller that finds the wrapper of that name closes by it alone.
extern "C" fn close_from(first: c_int) {
    let args = [first.max(0) as usize, u32::MAX as usize, 0, 0, 0, 0];
    // SAFETY: the call is the program's.
    unsafe { call(number::CLOSE_RANGE, args) };
}

const ENOSYS: isize = 38;

/// Whether the C library, or another object behind this one, has the function.
pub fn is_there(real: &Real) -> bool {
    let found = real.get();
    found != missing as *mut c_void
}

pub extern "C" fn find_for_trampoline(real: &Real) -> *mut c_void {
    real.get()
}

pub fn resolve() {
    match dlsym() {
        Some(dlsym) => {
            keep(&TEST_CANCEL, next(dlsym, TEST_CANCEL_NAME));
            ALL.iter().for_each(|wrapped| keep(&wrapped.real.0, next(dlsym, wrapped.name)));
        }
        None => resolve_by_tables(),
    }
    IS_RESOLVED.store(true, Ordering::Relaxed); // by the only thread there is, or before any that comes
}

/// [`resolve`], where no loaded object has `dlsym`: in one walk over what is loaded.
#[cold]
fn resolve_by_tables() {
    const TEST_CANCEL_HASH: u32 = loaded::hash(TEST_CANCEL_NAME);
    let (mut test_cancel, mut found) = (None, [None; ALL.len()]);
    loaded::for_each_later_object(&mut |names| {
        test_cancel = test_cancel.or_else(|| names.function(TEST_CANCEL_NAME, TEST_CANCEL_HASH));
        for (found, wrapped) in found.iter_mut().zip(ALL) {
            *found = found.or_else(|| names.function(wrapped.name, wrapped.hash));
        }
    });
    keep(&TEST_CANCEL, test_cancel.unwrap_or_default());
    for (wrapped, found) in ALL.iter().zip(found) {
        keep(&wrapped.real.0, found.unwrap_or_default());
    }
}

fn first(wrapped: &Wrapped) -> Option<*mut c_void> {
    let mut found = None;
    loaded::for_each_later_object(&mut |names| {
        found = found.or_else(|| names.function(wrapped.name, wrapped.hash))
    });
    found
}

/// The function of the one object that has it. If several were loaded locally it cannot be told which is meant: then
/// there is none.
fn unique_definition(wrapped: &Wrapped) -> Option<*mut c_void> {
    let (mut found, mut others) = (None, 0);
    loaded::for_each_later_object(&mut |names| {
        if let Some(function) = names.function(wrapped.name, wrapped.hash) {
            (found, others) = (Some(function), others + 1);
        }
    });
    found.filter(|_| others == 1)
}

fn keep(place: &AtomicPtr<c_void>, found: *mut c_void) {
    if !found.is_null() {
        place.store(found, Ordering::Relaxed); // as in `get`
    }
}

/// The address of the name's next function after this object's; null if there is none.
fn next(dlsym: Dlsym, name: &CStr) -> *mut c_void {
    // SAFETY: the name is a string.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// The dynamic linker's `dlsym`, by the first version it ever had. `None` before version 2.34 of the C library, where
/// it is in a library of its own, if the program has not loaded that: a strong reference would have the linker end it.
#[inline(never)] // the directives stand once
fn dlsym() -> Option<Dlsym> {
    let address: usize;
    // SAFETY: it reads an address that the dynamic linker has filled in, or left 0.
    unsafe {
        core::arch::asm!(
            ".weak quinion_dlsym",
            ".symver quinion_dlsym, dlsym@GLIBC_2.2.5",
            "mov {address}, qword ptr [rip + quinion_dlsym@GOTPCREL]",
            address = out(reg) address,
            options(nostack, preserves_flags, readonly, pure),
        );
        // SAFETY: the type is what dlsym(3) says; 0 is `None`.
        core::mem::transmute::<usize, Option<Dlsym>>(address)
    }
}

/// Whether the C library is GNU's. Others, such as musl, call constructors without arguments.
#[inline(never)] // the directive stands once
pub fn is_library_gnus() -> bool {
    let address: usize;
    // SAFETY: it reads an address that the dynamic linker has filled in, or left 0.
    unsafe {
        core::arch::asm!(
            ".weak gnu_get_libc_version",
            "mov {address}, qword ptr [rip + gnu_get_libc_version@GOTPCREL]",
            address = out(reg) address,
            options(nostack, preserves_flags, readonly, pure),
        );
    }
    address != 0
}

pub struct Wrapped {
    name: &'static CStr,
    hash: u32,
    pub real: &'static Real,
    pub wrapper: unsafe extern "C" fn(),
}

impl Wrapped {
    /// Whether libraries have it that may be loaded for one other library alone, where `dlsym` does not look: liburing,
    /// and the smaller ones that the C library had before version 2.34. Not for others, at each call: a child that was
    /// forked while another thread had the dynamic linker's lock would wait for it for ever.
    fn may_be_local(&self) -> bool {
        self.has_prefix_io()
            || matches!(
                self.name.to_bytes(),
                b"shm_open" | b"forkpty" | b"login_tty" | b"dlopen" | b"dlmopen"
            )
    }

    fn has_prefix_io(&self) -> bool {
        self.name.to_bytes().starts_with(b"io_")
    }

    fn missing(&self) -> *mut c_void {
        match self.name.to_bytes() {
            b"fopen" | b"fopen64" | b"freopen" | b"freopen64" | b"fdopen" | b"popen" | b"dlopen"
            | b"dlmopen" => nothing as *mut c_void,
            b"closefrom" => close_from as *mut c_void,
            _ if self.has_prefix_io() => not_supported as *mut c_void,
            _ => missing as *mut c_void,
        }
    }
}

/// The wrapper of the function at `address`, if there is one; wrappers of its several names do the same.
pub fn wrapped_at(address: usize) -> Option<&'static Wrapped> {
    ALL.iter()
        .find(|wrapped| wrapped.real.resolved_address() == address && wrapped.wrapper as usize != address)
}

pub fn move_all(from: usize, to: usize) {
    for wrapped in ALL.iter().filter(|wrapped| wrapped.real.resolved_address() == from) {
        wrapped.real.0.store(to as *mut c_void, Ordering::Relaxed); // as in `get`
    }
}

/// A system call in the shape of its C function: arguments and result in the same places.
macro_rules! raw {
    ($($name:ident = $number:ident;)*) => { $(
        pub unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
            // SAFETY: the arguments are the program's.
            answer(unsafe { call(number::$number, [a, b, c, d, e, f]) })
        }
    )* };
}
mod raw {
    use super::{answer, call, number};
    raw! {
        read = READ; pread64 = PREAD64; readv = READV; preadv = PREADV; lseek = LSEEK; close = CLOSE;
        open = OPEN; openat = OPENAT; creat = CREAT; mmap = MMAP; dup = DUP; dup2 = DUP2; dup3 = DUP3; fcntl = FCNTL;
        ioctl = IOCTL; sendfile = SENDFILE; splice = SPLICE; copy_file_range = COPY_FILE_RANGE;
        truncate = TRUNCATE; sendmsg = SENDMSG; recvmsg = RECVMSG; execve = EXECVE;
        close_range = CLOSE_RANGE;
    }
}

/// The places of the real functions, by name, and the list of them all with their wrappers.
macro_rules! reals {
    (calls { $($call:ident = $raw:ident),* $(,)? } functions { $($later:ident),* $(,)? }) => {
        $(
            #[allow(missing_docs, non_upper_case_globals, reason = "the C library's names")]
            pub static $call: Real = Real::call(raw::$raw as *mut c_void);
        )*
        $(
            #[allow(missing_docs, non_upper_case_globals, reason = "the C library's names")]
            pub static $later: Real = Real::later();
        )*
        mod wrapper {
            #[allow(clashing_extern_declarations, reason = "they are our own, defined with their types elsewhere")]
            unsafe extern "C" {
                $(pub fn $call();)*
                $(pub fn $later();)*
            }
        }
        static ALL: &[Wrapped] = &[
            $(Wrapped {
                name: cstr(concat!(stringify!($call), "\0")),
                hash: loaded::hash(cstr(concat!(stringify!($call), "\0"))),
                real: &$call,
                wrapper: wrapper::$call,
            },)*
            $(Wrapped {
                name: cstr(concat!(stringify!($later), "\0")),
                hash: loaded::hash(cstr(concat!(stringify!($later), "\0"))),
                real: &$later,
                wrapper: wrapper::$later,
            },)*
        ];
    };
}

const fn cstr(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with a zero"),
    }
}

reals! {
    calls {
        read = read, pread64 = pread64, readv = readv, preadv64 = preadv, lseek64 = lseek, close = close,
        open = open, open64 = open, openat = openat, openat64 = openat, creat = creat, creat64 = creat,
        mmap = mmap, mmap64 = mmap, dup = dup, dup2 = dup2, dup3 = dup3, fcntl = fcntl, fcntl64 = fcntl,
        ioctl = ioctl, sendfile = sendfile, sendfile64 = sendfile, splice = splice,
        copy_file_range = copy_file_range, truncate = truncate, truncate64 = truncate,
        sendmsg = sendmsg, recvmsg = recvmsg, execve = execve, close_range = close_range,
        __read_nocancel = read, __pread64_nocancel = pread64, __close_nocancel = close,
        __open_nocancel = open, __open64_nocancel = open,
    }
    functions {
        preadv64v2, readahead, posix_fadvise, __read_chk, __pread64_chk, __open_2, __open64_2, __openat_2, __openat64_2,
        open_by_handle_at, shm_open, memfd_create,
        mkstemp, mkstemp64, mkostemp, mkostemp64, mkstemps, mkstemps64, mkostemps, mkostemps64,
        fopen, fopen64, freopen, freopen64, recvmmsg,
        fork, _Fork, vfork, daemon, forkpty, system, popen, posix_spawn, posix_spawnp, pidfd_spawn, pidfd_spawnp,
        wordexp, fdopen, fclose, fcloseall, endmntent, login_tty, lockf, lockf64, sendmmsg, closefrom,
        execv, execvp, execvpe, execl, execlp, execle, fexecve,
        execveat, clone, unshare, syscall, pidfd_getfd, prctl,
        umount, umount2, unlink, unlinkat, rename, renameat, renameat2,
        inotify_add_watch, fanotify_mark,
        setns, chroot, setuid, seteuid, setreuid, setresuid, setgid, setegid, setregid, setresgid, setgroups,
        initgroups, setfsuid, setfsgid, capset,
        setrlimit, setrlimit64, prlimit, prlimit64, mlockall,
        sigaction, signal, sysv_signal, sigset, sigignore, siginterrupt,
        dlopen, dlmopen, io_uring_queue_init, io_uring_queue_init_params, io_uring_queue_init_mem, io_uring_setup,
    }
}
