//! RAM disk: a block device in memory, for measuring the cost of a cache and not of a disk.
//!
//! ```text
//!   memory file <-- loop device, which is detached when its last user closes it
//!                      ^-- a file system, mounted in a name space that one process and its children see
//! ```
//!
//! Nothing has to be cleaned up. The memory file has no name; the loop device is detached with its last user; a mount
//! in a name space of its own ends with the last process in that name space, and the kernel drops what it had cached of
//! it. Only a device node without a device stays, if no free one existed before.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use rustix::fs::{MemfdFlags, memfd_create};

pub struct RamDisk {
    _device: File,
    path: PathBuf,
}

const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// How many free devices are tried: another process may take one first.
const TRIES: u32 = 16;

#[repr(C)]
struct LoopInfo {
    device_inode_rdevice_offset_limit: [u64; 5],
    number_and_encryption: [u32; 3],
    flags: u32,
    names_and_key: [u8; 160],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    backing: u32,
    block_bytes: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

impl RamDisk {
    /// A device of `bytes` zeros, in blocks of 4 KiB.
    ///
    /// # Errors
    /// There are no loop devices, or this user may not use them: it needs root.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let memory = File::from(memfd_create("quinion-ram-disk", MemfdFlags::CLOEXEC)?);
        memory.set_len(bytes)?;
        let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
        let mut busy = io::Error::from(io::ErrorKind::ResourceBusy);
        for _ in 0..TRIES {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            let number = if number < 0 { return Err(io::Error::last_os_error()) } else { number };
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = OpenOptions::new().read(true).write(true).open(&path)?;
            match configure(&device, &memory) {
                Ok(()) => return Ok(Self { _device: device, path }),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => busy = error,
                Err(error) => return Err(error),
            }
        }
        Err(busy)
    }

    /// The path by which it is opened while this value lives.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn configure(device: &File, memory: &File) -> io::Result<()> {
    let info = LoopInfo {
        device_inode_rdevice_offset_limit: [0; 5],
        number_and_encryption: [0; 3],
        flags: LO_FLAGS_AUTOCLEAR,
        names_and_key: [0; 160],
        init: [0; 2],
    };
    let backing = u32::try_from(memory.as_raw_fd()).map_err(io::Error::other)?;
    let config = LoopConfig { backing, block_bytes: 4096, info, reserved: [0; 8] };
    // SAFETY: the kernel reads one configuration, laid out as it documents.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, ptr::from_ref(&config)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Mounts the ext4 of `device` over the folder `at` for the calling thread and for processes and threads that it starts
/// from now on, in a name space of their own. It is for the first thread of a process that exists for this.
///
/// # Errors
/// It needs root.
pub fn mount_privately(device: &Path, at: &Path, is_read_only: bool) -> io::Result<()> {
    // SAFETY: no memory is concerned; from here on the thread has its own view of mounts.
    ended(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // Mounts made here do not propagate to any other name space.
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the kernel reads one string that ends with a zero, and nothing else where null is allowed.
    ended(unsafe { libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()) })?;
    let [device, at] = [device, at].map(|path| CString::new(path.as_os_str().as_bytes()));
    let (device, at) = (device?, at?);
    let flags = libc::MS_NOATIME | if is_read_only { libc::MS_RDONLY } else { 0 };
    // SAFETY: the kernel reads three strings that end with a zero.
    ended(unsafe { libc::mount(device.as_ptr(), at.as_ptr(), c"ext4".as_ptr(), flags, ptr::null()) })
}

fn ended(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_ram_disk_keeps_written_bytes_until_its_last_user_ends() {
        let disk = match RamDisk::new(1 << 20) {
            Ok(disk) => disk,
            Err(error) => return eprintln!("not tested: {error}; it takes root and loop devices"),
        };
        let backing = format!("/sys/class/block/{}/loop", disk.path().file_name().expect("a name").display());
        let file = OpenOptions::new().read(true).write(true).open(disk.path()).expect("it is ours");
        file.write_all_at(&[7; 4096], 8192).expect("it is as long");
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, 8192).expect("it is as long");
        assert_eq!(bytes, [7; 4096]);
        assert!(Path::new(&backing).exists());
        drop((file, disk));
        assert!((0..60_000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            !Path::new(&backing).exists()
        }));
    }
}
