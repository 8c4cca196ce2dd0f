//! Signal: a library's threads take none of the program's signals.
//!
//! A program's handlers may count on running on the program's own threads, and
//! a thread that waits for a device should not be interrupted for nothing.

/// Blocks every signal on the calling thread, so that the program's handlers run on the program's own
/// threads. Signals that a fault of this very thread raises still come.
pub fn block_all() {
    // SAFETY: an all-zero set is valid memory for `sigfillset` to fill; both calls only write to it and to
    // the calling thread's mask.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGABRT] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
