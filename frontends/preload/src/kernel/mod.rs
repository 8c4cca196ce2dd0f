//! Kernel: the system calls the interposer makes for itself, past the C library and past its own wrappers.
//!
//! ```text
//!   number     of each call
//!   files      what they are, reading them, descriptors
//!   identity   this process and thread; waiting and ending
//!   memory     mapping, covering, unmapping, copying
//!   signals    their actions, holding them back
//!   threads    which of them block a signal
//!   socket     one request to the owner
//! ```
//!
//! Each names only those above it. None touches `errno`, which a served call must leave as it was. None asks whether it
//! may be made: the calling thread has been counted (`process.rs`), or runs the constructor.

mod files;
mod identity;
mod memory;
pub mod number;
mod signals;
mod socket;
mod threads;

pub use files::{
    AT_FDCWD, EMFILE, ENFILE, F_GET_SEALS, F_GETFL, F_SEAL_SHRINK, O_ACCMODE, O_APPEND, O_CREAT, O_DIRECT,
    O_DIRECTORY, O_EXCL, O_NOCTTY, O_NONBLOCK, O_PATH, O_RDWR, O_TMPFILE_BIT, O_TRUNC, O_WRONLY, RWF_NOWAIT,
    SEEK_CUR, SEEK_SET, Stat, accepts_flags, close, directory_entries, entry_names, fcntl, file_system,
    fstat, lseek, now_nanos, open, pread, pread_nowait, stat, stat_at, stat_at_itself,
};
pub use identity::{
    RLIMIT_AS, STATUS_MAX, are_addresses_limited, digits_in_proc, effective_user, end_child, end_process,
    open_process, process, status, thread, wait,
};
pub use memory::{
    Access, READ_EXECUTE, READ_WRITE, cover, keep_from_children, keep_from_cores, map_code_again, map_file,
    map_private, map_where_nothing_is, overwrite, protect, read_memory, unmap, wipe_on_fork,
};
pub use signals::{
    SIGSEGV, SignalAction, SignalsHeld, holds_back, send_to_this_thread, set_signal_action, signal_action,
};
pub use socket::{JoinError, send_hello};
pub use threads::{is_only_thread, is_single_threaded, other_threads_that_block};
