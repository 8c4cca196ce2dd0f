//! Death notice: the word in shared memory that the kernel marks if this process is killed.
//!
//! ```text
//!   word, in shared memory    a thread's number     --the thread ends, however--> FUTEX_OWNER_DIED
//! ```
//!
//! When a process is killed, its read leases end, and a thread that waited for one continues and writes. Viewers that
//! read because the owner guarantees that there is no writer must learn of the owner's death first. The kernel does one
//! thing for a process that ends by `SIGKILL`: it walks the list of futexes that each of its threads registered as
//! held (`get_robust_list(2)`), and marks each as one whose owner died. The owner registers one.
//!
//! The kernel walks the list when a thread lets go of its memory, and closes the process's files when its last thread
//! lets go of them, which each does after its memory. So the word is marked before any lease is gone.
//!
//! The C library's own list of the thread is put back at the end; a thread of the library that holds a death notice
//! uses none of the C library's robust mutexes meanwhile. The list is this process's own; others see the word only.

use std::ffi::{c_long, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

/// The bit that the kernel sets in a futex whose owner ended: its FUTEX_OWNER_DIED.
pub const ENDED: u32 = 0x4000_0000;

/// The kernel's `struct robust_list`: the next entry, at last the head again.
#[repr(C)]
struct Entry(*const Entry);

/// The kernel's `struct robust_list_head`.
#[repr(C)]
struct Head {
    first: Entry,
    offset: c_long,
    pending: *const Entry,
}

struct List {
    head: Head,
    entry: Entry,
}

/// While it is there, the word is marked if the process, or the thread that made this, ends; and when it is dropped.
pub struct DeathNotice<'a> {
    word: &'a AtomicU32,
    /// The list that the kernel walks: it does not move.
    list: *mut List,
    before: *const c_void,
    _on_this_thread: PhantomData<*const ()>,
}

impl<'a> DeathNotice<'a> {
    /// Has `word` marked at the end of the calling thread, or, where the kernel does not do that, when this is dropped.
    pub fn new(word: &'a AtomicU32) -> Self {
        let list = Box::into_raw(Box::new(List {
            head: Head { first: Entry(std::ptr::null()), offset: 0, pending: std::ptr::null() },
            entry: Entry(std::ptr::null()),
        }));
        let (mut before, mut bytes) = (std::ptr::null::<c_void>(), 0usize);
        // SAFETY: the list is this value's alone until the kernel is told of it, and stays until it is told of another.
        // The kernel writes an address and a length, and reads the list when the thread ends, while the word is mapped.
        unsafe {
            let (head, entry) = (&raw mut (*list).head, &raw mut (*list).entry);
            (*head).first = Entry(entry);
            (*head).offset = (word.as_ptr() as c_long).wrapping_sub(entry as c_long);
            (*entry).0 = head.cast();
            libc::syscall(libc::SYS_get_robust_list, 0, &raw mut before, &raw mut bytes);
            libc::syscall(libc::SYS_set_robust_list, head, size_of::<Head>());
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        word.store(thread, Ordering::SeqCst); // partner: as of the mark, `View::owner_has_ended`
        Self { word, list, before, _on_this_thread: PhantomData }
    }
}

impl Drop for DeathNotice<'_> {
    fn drop(&mut self) {
        // The mark first: there is no moment at which neither the kernel nor this code would make it.
        self.word.store(ENDED, Ordering::SeqCst); // partner: `View::owner_has_ended`
        // SAFETY: the thread's own list of before; no list refers to this value's then.
        unsafe {
            libc::syscall(libc::SYS_set_robust_list, self.before, size_of::<Head>());
            drop(Box::from_raw(self.list));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ends_without_a_word_has_one() {
        let word = Box::leak(Box::new(AtomicU32::new(0)));
        let on = &*word;
        std::thread::spawn(|| {
            let last = DeathNotice::new(on);
            assert!(on.load(Ordering::SeqCst) != 0 && on.load(Ordering::SeqCst) & ENDED == 0);
            std::mem::forget(last);
        })
        .join()
        .unwrap();
        // `join` may come back some moments before the kernel is through with the thread.
        while on.load(Ordering::SeqCst) & ENDED == 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_c_librarys_list_is_put_back() {
        let list = || {
            let (mut list, mut bytes) = (std::ptr::null::<c_void>(), 0usize);
            // SAFETY: as in `new`.
            unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &raw mut list, &raw mut bytes) };
            list
        };
        let (before, word) = (list(), AtomicU32::new(0));
        let last = DeathNotice::new(&word);
        assert_ne!(list(), before);
        drop(last);
        assert_eq!((list(), word.load(Ordering::SeqCst)), (before, ENDED));
    }
}
