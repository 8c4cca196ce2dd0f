//! Threads: how many this process has, and which of the others block a signal, as `/proc` says.
//!
//! ```text
//!   /proc/self/stat        how many there are
//!   /proc/self/task        has two links and one for each: told without a descriptor
//!   /proc/self/task/N/stat whether N waits for something, and which signals it blocks
//! ```
//!
//! `thread_list.rs` decides when a list of them is complete.

use super::files::{O_DIRECTORY, close, directory_entries, entry_names, open, pread, stat};
use super::identity::thread;
use crate::thread_list::{BlockedBy, ThreadList, blocked_by};
use quinion_view::viewer::sys::Errno;

pub fn is_single_threaded() -> bool {
    threads() == Some(1)
}

/// Whether the calling thread is the only one of its process; `false` also where the kernel does not tell. This opens
/// no descriptor, which another thread would notice, and makes a call that no filter forbids.
pub fn is_only_thread() -> bool {
    /// A folder has two links of its own, and one for each folder in it.
    const ONE_FOLDER: u64 = 3;
    stat(c"/proc/self/task".as_ptr() as usize).is_some_and(|threads| threads.links == ONE_FOLDER)
}

fn threads() -> Option<u64> {
    let mut line = [0u8; 1024];
    stat_field(stat_line(b"/proc/self/stat\0", &mut line).ok()?, NUM_THREADS)
}

/// Which other threads of this process block `signal`, one of the first 31. If that cannot be told, sleepers do.
pub fn other_threads_that_block(signal: i32) -> BlockedBy {
    blocked_by(|| list_threads(signal), threads)
}

fn list_threads(signal: i32) -> Option<ThreadList> {
    let directory = open(b"/proc/self/task\0", O_DIRECTORY).ok()?;
    let own = thread();
    let mut entries = [0u64; 128];
    let mut list = ThreadList::EMPTY;
    loop {
        let bytes = directory_entries(directory, &mut entries);
        if bytes == 0 {
            break;
        }
        entry_names(&entries, bytes, |name| {
            let number = core::str::from_utf8(name).ok().and_then(|name| name.parse::<u32>().ok());
            let Some(number) = number else { return };
            let blocks = |other: &ThreadSignals| other.blocked >> (signal - 1) & 1 != 0;
            let other = if number == own { None } else { signals_of(name).filter(blocks) };
            list.add(
                number,
                match other {
                    None => BlockedBy::None,
                    Some(other) if other.sleeps => BlockedBy::Sleepers,
                    Some(_) => BlockedBy::Runner,
                },
            );
        });
    }
    close(directory);
    Some(list)
}

struct ThreadSignals {
    sleeps: bool,
    /// The blocked ones of the first 31 signals: bit `n - 1` stands for signal `n`.
    blocked: u64,
}

impl ThreadSignals {
    /// Signals of a thread of which nothing is known.
    const UNKNOWN: Self = Self { sleeps: true, blocked: u64::MAX };
}

/// The state and the blocked signals of a thread of this process; `None` if it has ended. One whose `stat` cannot be
/// read, as for want of a descriptor, or has not these fields, counts as one that sleeps and blocks all signals.
fn signals_of(thread: &[u8]) -> Option<ThreadSignals> {
    let mut path = [0u8; 48];
    let parts: [&[u8]; 3] = [b"/proc/self/task/", thread, b"/stat"];
    let mut length = 0;
    for part in parts {
        path.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    path.get(length)?; // the terminating zero is there
    let mut line = [0u8; 1024];
    let fields = match stat_line(&path, &mut line) {
        Ok(fields) => fields,
        Err(NOENT | Errno::SRCH) => return None,
        Err(_) => return Some(ThreadSignals::UNKNOWN),
    };
    // R: it runs, or waits for a processor. D: it sleeps in a system call that no signal ends.
    let runs =
        fields.split(|&byte| byte == b' ').nth(STATE).is_some_and(|state| matches!(state, b"R" | b"D"));
    Some(ThreadSignals { sleeps: !runs, blocked: stat_field(fields, BLOCKED).unwrap_or(u64::MAX) })
}

/// "No such file or directory": the folder of a thread that has ended.
const NOENT: Errno = Errno(2);

/// Fields of a `stat` behind the name, which ends with the last parenthesis: the 3rd, 20th and 32nd of
/// proc_pid_stat(5).
const STATE: usize = 0;

const NUM_THREADS: usize = 17;
const BLOCKED: usize = 29;

fn stat_line<'a>(path: &[u8], line: &'a mut [u8; 1024]) -> Result<&'a [u8], Errno> {
    let fd = open(path, 0)?;
    // SAFETY: the buffer is the caller's own.
    let read = unsafe { pread(fd, line.as_mut_ptr(), line.len(), 0) };
    close(fd);
    let line = &line[..read?];
    let end = line.iter().rposition(|&byte| byte == b')').ok_or(Errno::INVAL)?;
    line.get(end + 2..).ok_or(Errno::INVAL)
}

fn stat_field(fields: &[u8], at: usize) -> Option<u64> {
    let digits = fields.split(|&byte| byte == b' ').nth(at)?;
    core::str::from_utf8(digits).ok()?.parse().ok()
}
