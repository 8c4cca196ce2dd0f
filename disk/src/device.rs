//! Device: the bytes under the store, by calls that block.
//!
//! [`FileDevice`] is a file of a fixed size in a folder: private, locked against a second process, its space taken when
//! it is made, read and written past the kernel's page cache where the file system can. Tests have devices that tear,
//! reorder and refuse.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{
    FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock, fstat, fstatvfs, ftruncate, open,
};
use rustix::io::Errno;

use crate::error::DiskError;
use crate::layout::PAGE_BYTES;

/// How long a store that is in use is waited for by default. One that was just dropped is in use until the requests in
/// flight have ended, or a child that was forked meanwhile has become another program.
pub const IN_USE_MAX: Duration = Duration::from_secs(2);
/// How often space is asked for, if signals come meanwhile.
const TRIES_MAX: u32 = 100;
const LOCK_POLL: Duration = Duration::from_millis(5);
const NAME: &str = "quinion.disk";

/// Where a store keeps its bytes. Offsets and lengths are multiples of 4096, and buffers are aligned to 4096 bytes.
pub trait Device: Send + Sync + fmt::Debug {
    /// Reads all of `buffer` from byte `offset` on. May block.
    ///
    /// # Errors
    /// Some of it could not be read.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` from byte `offset` on. May block.
    ///
    /// # Errors
    /// Any part of it may have been written, in any order.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes durable all writes before the call. May block.
    ///
    /// # Errors
    /// Any of it may be lost.
    fn sync(&self) -> io::Result<()>;
}

/// A file of the store's own.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    is_direct: bool,
}

impl FileDevice {
    /// Opens or makes the file in `folder`, with `bytes` bytes of space, a multiple of 4096. One process at a time:
    /// waits up to 2 seconds for another to end.
    ///
    /// # Errors
    /// See [`DiskError`]. A file of another program is not touched.
    pub fn open(folder: &Path, bytes: u64) -> Result<Self, DiskError> {
        Self::open_within(IN_USE_MAX, folder, bytes)
    }

    /// As [`FileDevice::open`], but waits for so long at most for another process to end.
    fn open_within(in_use_max: Duration, folder: &Path, bytes: u64) -> Result<Self, DiskError> {
        Self::open_in(folder)?.locked(folder, in_use_max)?.with_space(folder, bytes)
    }

    /// 1: opens or makes the file. Blocks for the disk.
    pub(crate) fn open_in(folder: &Path) -> Result<Self, DiskError> {
        let path = folder.join(NAME);
        make_folder(folder).map_err(|source| failed("make the folder of", &path, source))?;
        let (descriptor, is_direct) =
            open_file(&path, OFlags::CREATE).map_err(|e| failed("open", &path, e.into()))?;
        check_private(&descriptor, &path)?;
        Ok(Self { file: descriptor.into(), is_direct })
    }

    /// 2: waits for another process to end, and reads the first page.
    pub(crate) fn locked(self, folder: &Path, in_use_max: Duration) -> Result<Self, DiskError> {
        let path = folder.join(NAME);
        match lock(&self.file, in_use_max) {
            Err(Errno::WOULDBLOCK) => return Err(DiskError::InUse { folder: folder.to_owned() }),
            locked => locked.map_err(|e| failed("lock", &path, e.into()))?,
        }
        self.check_ours(&path)?;
        Ok(self)
    }

    /// 3: takes the space, which some file systems write.
    pub(crate) fn with_space(self, folder: &Path, bytes: u64) -> Result<Self, DiskError> {
        self.take_space(&folder.join(NAME), bytes)?;
        Ok(self)
    }

    /// Whether [`FileDevice::open`] could have the file, as far as that can be told while another process has it.
    /// Changes nothing.
    pub(crate) fn check(folder: &Path, bytes: u64) -> Result<(), DiskError> {
        let path = folder.join(NAME);
        // Past the kernel's cache: it may have the page of a disk that does not answer.
        match open_file(&path, OFlags::empty()) {
            Ok((descriptor, is_direct)) => {
                check_private(&descriptor, &path)?;
                let device = Self { file: descriptor.into(), is_direct };
                device.check_ours(&path)?;
                device.check_space(&path, bytes).map(drop)
            }
            // It will be made. The folder's disk is asked, if there is a folder.
            Err(Errno::NOENT) => match File::open(folder) {
                Ok(file) => Self { file, is_direct: false }.check_space(&path, bytes).map(drop),
                Err(_) => Ok(()),
            },
            Err(error) => Err(failed("open", &path, error.into())),
        }
    }

    /// Whether it is read and written past the kernel's page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Refuses a file that has bytes of another program, before anything is done to it.
    fn check_ours(&self, path: &Path) -> Result<(), DiskError> {
        use crate::layout::{Superblock, SuperblockState};
        let len = self.file.metadata().map_err(|e| failed("look at", path, e))?.len();
        if len == 0 {
            return Ok(());
        }
        let foreign = || DiskError::Foreign { path: path.to_owned() };
        if len < PAGE_BYTES as u64 {
            return Err(foreign());
        }
        let mut page = AlignedBuffer::new(PAGE_BYTES);
        self.read_at(page.bytes_mut(), 0).map_err(|e| failed("read", path, e))?;
        match Superblock::decode(page.bytes()) {
            SuperblockState::Foreign => Err(foreign()),
            _ => Ok(()),
        }
    }

    /// Whether the disk has `bytes` bytes, those included that the file has already. Returns the file's attributes.
    fn check_space(&self, path: &Path, bytes: u64) -> Result<Metadata, DiskError> {
        let before = self.file.metadata().map_err(|e| failed("look at", path, e))?;
        let free = fstatvfs(&self.file).map_err(|e| failed("look at the disk of", path, e.into()))?;
        let can_have = free.f_bavail.saturating_mul(free.f_frsize).saturating_add(before.blocks() * 512);
        if can_have < bytes { Err(DiskError::NoSpace { path: path.to_owned(), bytes }) } else { Ok(before) }
    }

    fn take_space(&self, path: &Path, bytes: u64) -> Result<(), DiskError> {
        // The system would take all that is left before it found out, and other programs would have none.
        let before = self.check_space(path, bytes)?;
        ftruncate(&self.file, bytes).map_err(|e| failed("size", path, e.into()))?;
        // A signal's handler may run meanwhile; some file systems then begin anew, and a timer may come each time.
        let take = || fallocate(&self.file, FallocateFlags::empty(), 0, bytes);
        let taken = (0..TRIES_MAX).map(|_| take()).find(|taken| *taken != Err(Errno::INTR));
        let taken = taken.unwrap_or(Err(Errno::INTR));
        // Without `fallocate` space is found, or not, when it is written.
        let Some(error) = taken.err().filter(|error| *error != Errno::OPNOTSUPP) else { return Ok(()) };
        // Give back the part of the space that was taken.
        let _ = ftruncate(&self.file, before.len().min(bytes));
        Err(match error {
            Errno::NOSPC | Errno::DQUOT => DiskError::NoSpace { path: path.to_owned(), bytes },
            error => failed("take space for", path, error.into()),
        })
    }
}

impl Device for FileDevice {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn open_file(path: &Path, create: OFlags) -> Result<(OwnedFd, bool), Errno> {
    let flags = OFlags::RDWR | create | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let open_with = |more| open(path, flags | more, Mode::RUSR | Mode::WUSR);
    match open_with(OFlags::DIRECT) {
        Err(Errno::INVAL) => Ok((open_with(OFlags::empty())?, false)),
        opened => Ok((opened?, true)),
    }
}

/// Locks the file against a second process, and against a second store in this one.
fn lock(file: &File, in_use_max: Duration) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < in_use_max => sleep(LOCK_POLL),
            Err(Errno::INTR) => {}
            locked => return locked,
        }
    }
}

/// Refuses a file that another user can write: its bytes would be given out as the store's own.
fn check_private(file: &OwnedFd, path: &Path) -> Result<(), DiskError> {
    let found = fstat(file).map_err(|e| failed("look at", path, e.into()))?;
    let is_file = found.st_mode & libc_mode::KIND == libc_mode::REGULAR;
    let is_own = found.st_uid == rustix::process::geteuid().as_raw() && found.st_mode & 0o077 == 0;
    if is_file && is_own { Ok(()) } else { Err(DiskError::NotPrivate { path: path.to_owned() }) }
}

mod libc_mode {
    pub const KIND: u32 = 0o170_000;
    pub const REGULAR: u32 = 0o100_000;
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError::Io { action, path: PathBuf::from(path), source }
}

/// Begins at a multiple of 4096, as direct I/O wants.
#[derive(Debug)]
pub struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        Self { bytes, start, len }
    }
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const BYTES: u64 = 1 << 20;

    #[test]
    fn a_file_that_is_no_store_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        for content in [&b"a letter"[..], &[7; 8192]] {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let error = FileDevice::open(folder.path(), BYTES).unwrap_err();
            assert!(matches!(error, DiskError::Foreign { .. }), "{error}");
            assert_eq!(fs::read(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_file_that_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        let error = FileDevice::open(folder.path(), BYTES).unwrap_err();
        assert!(matches!(error, DiskError::NotPrivate { .. }), "{error}");
    }

    #[test]
    fn neither_a_link_nor_a_fifo_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(matches!(FileDevice::open(folder.path(), BYTES), Err(DiskError::Io { .. })));
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .unwrap();
        assert!(FileDevice::open(folder.path(), BYTES).is_err());
    }

    #[test]
    fn a_wrong_folder_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let taken = folder.path().join("taken");
        fs::create_dir_all(taken.join(NAME)).unwrap();
        let link = folder.path().join("link");
        fs::create_dir(&link).unwrap();
        std::os::unix::fs::symlink("/dev/null", link.join(NAME)).unwrap();
        for (place, words) in [
            (folder.path().join("none/none"), "make the folder"),
            (file.clone(), "name a folder"),
            (file.join("below"), "name a folder"),
            (taken, "a folder has that name"),
            (link, "symbolic link"),
            (PathBuf::from("/proc/quinion"), ";"),
        ] {
            let error = FileDevice::open(&place, BYTES).unwrap_err().to_string();
            assert!(error.starts_with("cannot ") && error.contains(words), "{}: {error}", place.display());
        }
        // Root may write anywhere.
        if !rustix::process::geteuid().is_root() {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
            let error = FileDevice::open(&folder.path().join("new"), BYTES).unwrap_err().to_string();
            assert!(error.contains("let this user"), "{error}");
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        }
        let error = FileDevice::open(folder.path(), 1 << 60).unwrap_err().to_string();
        assert!(error.contains("ask for less"), "{error}");
    }

    #[test]
    fn a_store_that_ends_soon_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let first = FileDevice::open(folder.path(), BYTES).unwrap();
        let end = std::thread::spawn(move || {
            sleep(Duration::from_millis(200));
            drop(first);
        });
        FileDevice::open(folder.path(), BYTES).unwrap();
        end.join().unwrap();
    }

    #[test]
    fn a_second_process_gets_an_error_that_the_store_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let first = FileDevice::open(folder.path(), BYTES).unwrap();
        let error = FileDevice::open(folder.path(), BYTES).unwrap_err();
        assert!(matches!(error, DiskError::InUse { .. }), "{error}");
        drop(first);
        assert_eq!(fs::metadata(folder.path().join(NAME)).unwrap().len(), BYTES);
        FileDevice::open(folder.path(), BYTES).unwrap();
    }
}
