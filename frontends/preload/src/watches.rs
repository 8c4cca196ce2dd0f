//! Watches: what this process is about to see of the owner, or what the owner is about to be in the way of.
//!
//! | before | the owner |
//! |---|---|
//! | an unmount | closes what no process has open, once it has heard what was closed |
//! | a watch of a file (inotify, fanotify) | closes it, and opens it no more |
//! | a watch of a folder's files, or of more, for accesses (dnotify, too) | closes all files, and opens none |
//!
//! A program that watches would see the owner's opens and reads, and not the reads that are served. If the owner is
//! late, this process is served nothing from then on, so that it sees at least its own.

use core::ffi::c_int;

use quinion_view::arena::control::{Operation, Reason};
use quinion_view::units::FileId;

use crate::{deferred_detach, descriptors, join, kernel, process, stop};

/// Before an unmount: the owner, once it has read which files were closed, closes all that no process has open.
pub extern "C" fn unmounts() {
    const SETTLED_MILLIS_MAX: u32 = 100;
    if let Some(_inside) = process::enter()
        && let Some(viewer) = join::join()
    {
        descriptors::give_back_unseen();
        deferred_detach::send_pending();
        viewer.settle(SETTLED_MILLIS_MAX);
        let _ = viewer.request_long(Operation::Release, [0; 3]);
    }
}

/// Events that the kernel reports of the owner's opens and reads, and not of those that are served: reads, opens, and
/// closes of files that were not open for writing. These bits mean the same to both kinds of watches.
const ACCESSES: usize = 1 | 0x10 | 0x20;

/// Before a watch of a file, or of a folder's files, by inotify.
///
/// A watched file is not served from here on, whatever is watched: its deletion is told when no process has it open any
/// more. Of a folder only the accesses to what is in it matter; device and inode cannot name that, so then it is all
/// files.
pub extern "C" fn watches(_instance: usize, path: usize, mask: usize) {
    let Some(_inside) = process::enter() else { return };
    let Some(stat) = kernel::stat(path) else { return };
    if stat.is_regular() {
        is_watched(stat.id);
    } else if mask & ACCESSES != 0 {
        is_watched(ALL_FILES);
    }
}

/// Before a watch by fanotify, of a file or of all that lies beside it, below it or on its file system.
pub extern "C" fn marks(_group: usize, flags: usize, mask: usize, at: usize, path: usize) {
    const ADD: usize = 1;
    /// Flags of a mark on all files of a mount, or of a file system.
    const MANY: usize = 0x10 | 0x100;
    /// Running a file, being asked before it is opened, read or run, and before it is read for the first time.
    const MORE_ACCESSES: usize = 0x1000 | 0x1_0000 | 0x2_0000 | 0x4_0000 | 0x10_0000;
    if flags & ADD == 0 {
        return;
    }
    let Some(_inside) = process::enter() else { return };
    if mask & (ACCESSES | MORE_ACCESSES) != 0 {
        is_watched(ALL_FILES);
    } else if flags & MANY == 0
        && let Some(stat) = kernel::stat_at(at as c_int, path).filter(kernel::Stat::is_regular)
    {
        is_watched(stat.id);
    }
}

/// Before a watch of a folder's files by dnotify, for accesses among others. The files cannot be named, so it is all.
pub fn accesses_are_watched() {
    if let Some(_inside) = process::enter() {
        is_watched(ALL_FILES);
    }
}

/// Argument of [`is_watched`] that stands for all files.
const ALL_FILES: FileId = FileId { device: 0, inode: 0 };

/// Has the owner close a file, or all, and open it no more; done when this returns. If it is late the process is served
/// nothing, so that it sees at least its own reads.
fn is_watched(id: FileId) {
    const SETTLED_MILLIS_MAX: u32 = 100;
    let Some(viewer) = join::join() else { return };
    viewer.count_reason(Reason::Watched);
    viewer.settle(SETTLED_MILLIS_MAX);
    if viewer.request_long(Operation::LetGo, [id.device, id.inode, 1]).is_err() {
        stop::stop(Reason::Watched);
    }
}

/// Whether a call of `fcntl` asks for a signal at each access to a file of a folder (dnotify).
pub fn is_for_accesses(command: usize, argument: usize) -> bool {
    const F_NOTIFY: c_int = 1026;
    const DN_ACCESS: c_int = 1;
    command as c_int == F_NOTIFY && argument as c_int & DN_ACCESS != 0 // the lower halves, as above
}
