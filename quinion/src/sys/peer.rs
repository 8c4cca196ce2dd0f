//! Peer: the process at the other end of a connected Unix socket.
//!
//! The kernel notes it when the connection is made. If it can give a process descriptor (6.5), that is one of the
//! very process that connected; a number may be another process's by the time a descriptor is opened for it.
//!
//! A number is given again when its process has been reaped. So facts about a process are kept by its [`ProcessName`]:
//! the number, and the inode of a descriptor of the process, which is another for each process that there ever is
//! (Linux 6.9; before that it is the same for all, and the number alone tells them apart).

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::fstat;

/// The option as all machines number it that this crate is built for (SPARC and PA-RISC have another number).
const SO_PEERPIDFD: libc::c_int = 77;

/// A process, and none that has its number later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ProcessName {
    number: u32,
    /// 0 if that is not known.
    inode: u64,
}

impl ProcessName {
    /// The name of the process `number`, of which `process` is a descriptor.
    pub fn of(number: u32, process: impl AsFd) -> Self {
        Self { number, inode: fstat(process).map_or(0, |stat| stat.st_ino) }
    }

    /// The name of the process that connected; of process 0 if that is not known.
    pub fn of_peer(socket: BorrowedFd<'_>) -> Self {
        let number = process(socket).unwrap_or(0) as u32;
        descriptor(socket).map_or(Self { number, inode: 0 }, |process| Self::of(number, process))
    }
}

/// The number of the process that connected; `None` if it has none here: it may live in another name space.
pub fn process(socket: BorrowedFd<'_>) -> Option<i32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    // SAFETY: the kernel writes so many bytes, which are there.
    let is_whole = unsafe { option(socket, libc::SO_PEERCRED, &mut peer) };
    // SAFETY: it has written all of them, and they are three numbers.
    is_whole.then(|| unsafe { peer.assume_init() }.pid).filter(|&process| process > 0)
}

/// The effective user of the process that connected, or listens, at the other end, as of then.
pub fn user(socket: BorrowedFd<'_>) -> Option<u32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    // SAFETY: as in `process`.
    let is_whole = unsafe { option(socket, libc::SO_PEERCRED, &mut peer) };
    // SAFETY: as in `process`.
    is_whole.then(|| unsafe { peer.assume_init() }.uid)
}

/// A descriptor of the process that connected.
///
/// # Errors
/// The system's number: `ENOPROTOOPT` before Linux 6.5; another if the process was reaped before this was asked, or no
/// descriptor is left.
pub fn descriptor(socket: BorrowedFd<'_>) -> Result<OwnedFd, i32> {
    let mut fd = MaybeUninit::<libc::c_int>::uninit();
    // SAFETY: the kernel writes so many bytes, which are there.
    if !unsafe { option(socket, SO_PEERPIDFD, &mut fd) } {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    }
    // SAFETY: it has written a number.
    let fd = unsafe { fd.assume_init() };
    if fd < 0 {
        return Err(libc::ESRCH);
    }
    // SAFETY: the kernel has just made this descriptor for this process, close-on-exec, and says its number once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads an option of a socket. Whether all of `value` was written.
///
/// # Safety
/// The option writes `T` at most.
unsafe fn option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut MaybeUninit<T>) -> bool {
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the caller's; the kernel writes `bytes` bytes at most.
    let result = unsafe {
        let value = value.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, &raw mut bytes)
    };
    result == 0 && bytes as usize == size_of::<T>()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (socket, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(process(socket.as_fd()), i32::try_from(std::process::id()).ok());
        if let Ok(descriptor) = descriptor(socket.as_fd()) {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()));
            let wanted = format!("Pid:\t{}\n", std::process::id());
            assert!(info.expect("ours").contains(&wanted), "a descriptor of another process");
        }
    }

    /// 1. A process ends, and another one gets its number.
    /// 2. A thread that waits for the first is kept waiting by the second: it is taken for the same.
    #[test]
    fn a_process_that_has_anothers_number_has_another_name() {
        let started = || std::process::Command::new("sleep").arg("100").spawn().expect("sleep starts");
        let name = |child: &std::process::Child| {
            let number = rustix::process::Pid::from_child(child);
            let process = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty());
            ProcessName::of(child.id(), process.expect("it is there"))
        };
        let end = |mut child: std::process::Child| {
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
        };
        let first = started();
        let (number, before) = (first.id(), name(&first));
        assert_eq!(name(&first), before, "it has one name");
        end(first);
        for _ in 0..1000 {
            // The next process gets the number behind the last one, unless another program starts one first.
            if std::fs::write("/proc/sys/kernel/ns_last_pid", (number - 1).to_string()).is_err() {
                return println!("SKIPPED: the kernel lets us choose no number for a process");
            }
            let second = started();
            let (again, after) = (second.id() == number, name(&second));
            end(second);
            if again && before.inode == after.inode {
                return println!(
                    "SKIPPED: this kernel's descriptors do not tell processes apart (before 6.9)"
                );
            }
            if again {
                return assert_ne!(before, after);
            }
        }
        println!("SKIPPED: somebody else was always faster to take the number");
    }

    #[test]
    fn a_descriptor_that_is_no_socket_has_no_peer() {
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(process(file.as_fd()), None);
        assert_eq!(descriptor(file.as_fd()).map(drop), Err(libc::ENOTSOCK));
    }
}
