//! Uffd: a thread that touches an absent page of a region waits until a handler supplies it.
//!
//! ```text
//!   a thread touches a page --fault--> waits         MISSING   nothing is there: COPY brings bytes
//!   a handler reads which page that is               MINOR     the file has it, the page table has not:
//!   COPY or CONTINUE ----------------> goes on                 CONTINUE maps it
//! ```
//!
//! It is the peer of Quinion's page-fault server: the same system calls, made by the simplest possible program. It does
//! not handle balloons and children; a region that is unmapped meanwhile gives an error.

use std::fs::File;
use std::io::{self, Read};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr;
use std::time::Duration;

use super::region::Region;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Absent {
    /// Pages that do not exist yet.
    Missing,
    /// Pages that the file has and the region's page table has not.
    Minor,
    Either,
}

/// A region's faults, for a caller that answers them.
pub struct Uffd {
    file: File,
    start: usize,
    len: usize,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
struct Continue {
    start: u64,
    len: u64,
    mode: u64,
    mapped: i64,
}

/// The kernel's number of a read-write request with an argument of `bytes` bytes.
const fn request(number: u64, bytes: usize) -> libc::c_ulong {
    (3 << 30 | (bytes as u64) << 16 | 0xaa << 8 | number) as libc::c_ulong
}
const API: libc::c_ulong = request(0x3f, size_of::<Api>());
const REGISTER: libc::c_ulong = request(0x00, size_of::<Register>());
const COPY: libc::c_ulong = request(0x03, size_of::<Copy>());
const CONTINUE: libc::c_ulong = request(0x07, size_of::<Continue>());

const API_VERSION: u64 = 0xaa;
const MISSING_HUGETLBFS: u64 = 1 << 4;
const MISSING_SHMEM: u64 = 1 << 5;
const MINOR_HUGETLBFS: u64 = 1 << 9;
const MINOR_SHMEM: u64 = 1 << 10;
const MODE_MISSING: u64 = 1;
const MODE_MINOR: u64 = 4;
const EVENT_FAULT: u8 = 0x12;

/// Bytes of a message, and the offset of the address in it.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
/// Messages in one read.
const MESSAGES: usize = 16;
/// How long a poll for faults waits at most.
const WAIT_MAX: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiting {
    Asleep,
    Spinning,
}

impl Uffd {
    /// The faults of `region`, which has to outlive the answers.
    ///
    /// # Errors
    /// This kernel does not support it, or this user may not use it.
    pub fn of(region: &Region, absent: Absent) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: no memory is concerned.
        let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let opened = i32::try_from(ended(opened)?).expect("a descriptor is an int");
        // SAFETY: the descriptor was just opened, and no other value owns it.
        let file = unsafe { File::from_raw_fd(opened) };
        let uffd = Self { file, start: region.address(), len: region.len() };
        let (mode, features) = match absent {
            Absent::Missing => (MODE_MISSING, MISSING_SHMEM | MISSING_HUGETLBFS),
            Absent::Minor => (MODE_MINOR, MINOR_SHMEM | MINOR_HUGETLBFS),
            Absent::Either => (MODE_MISSING | MODE_MINOR, MISSING_SHMEM | MINOR_SHMEM),
        };
        uffd.ask(API, &mut Api { api: API_VERSION, features, ioctls: 0 })?;
        let (start, len) = (uffd.start as u64, uffd.len as u64);
        uffd.ask(REGISTER, &mut Register { start, len, mode, ioctls: 0 })?;
        Ok(uffd)
    }

    fn ask<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: the argument has the layout of the request, whose number contains its size. The kernel writes to
        // memory in the registered region only, to which no reference exists.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), request, ptr::from_mut(argument)) };
        ended(result.into()).map(drop)
    }

    fn address(&self, at: usize, len: usize) -> u64 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} is outside of {}", self.len);
        (self.start + at) as u64
    }

    /// Copies `bytes` to the absent page at `at`; a thread that waits for it continues.
    pub fn copy(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let (to, len) = (self.address(at, bytes.len()), bytes.len() as u64);
        let mut copy = Copy { to, from: bytes.as_ptr() as u64, len, mode: 0, copied: 0 };
        self.ask(COPY, &mut copy)?;
        whole(copy.copied, bytes.len())
    }

    /// Maps the file's pages at `at`; a thread that waits for them continues.
    pub fn map(&self, at: usize, len: usize) -> io::Result<()> {
        let start = self.address(at, len);
        let mut map = Continue { start, len: len as u64, mode: 0, mapped: 0 };
        self.ask(CONTINUE, &mut map)?;
        whole(map.mapped, len)
    }

    /// Addresses that threads wait for, as many as are pending; none if no thread faulted for a moment.
    pub fn faults(&self, waiting: Waiting) -> io::Result<impl Iterator<Item = usize> + use<>> {
        let mut messages = [0; MESSAGE * MESSAGES];
        let bytes = match (&self.file).read(&mut messages) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if waiting == Waiting::Asleep {
                    self.wait()?;
                }
                0
            }
            read => read?,
        };
        let (start, count) = (self.start, bytes / MESSAGE);
        Ok((0..count).filter_map(move |nth| {
            let message = &messages[nth * MESSAGE..(nth + 1) * MESSAGE];
            let address = message[ADDRESS..].first_chunk().expect("a message is longer");
            (message[0] == EVENT_FAULT).then(|| u64::from_ne_bytes(*address) as usize - start)
        }))
    }

    fn wait(&self) -> io::Result<()> {
        let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel reads and writes one entry, a local variable.
        let result = unsafe { libc::poll(ptr::from_mut(&mut poll), 1, WAIT_MAX.as_millis() as libc::c_int) };
        ended(result.into()).map(drop)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Fails if a request did less than `wanted`: the rest is never sent.
fn whole(done: i64, wanted: usize) -> io::Result<()> {
    if usize::try_from(done) == Ok(wanted) { Ok(()) } else { Err(io::ErrorKind::ResourceBusy.into()) }
}

fn ended(result: libc::c_long) -> io::Result<libc::c_long> {
    if result >= 0 { Ok(result) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::super::region::PageKind;
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::os::unix::fs::FileExt;

    fn uffd(region: &Region, absent: Absent) -> Option<Uffd> {
        match Uffd::of(region, absent) {
            Ok(uffd) => Some(uffd),
            Err(error) => {
                eprintln!("not tested: {error}; it takes root, or vm.unprivileged_userfaultfd");
                None
            }
        }
    }

    #[test]
    fn a_touch_of_a_missing_page_gets_the_copied_bytes() {
        let region = Region::anonymous(8192, PageKind::Small).expect("there is memory");
        let Some(uffd) = uffd(&region, Absent::Missing) else { return };
        std::thread::scope(|scope| {
            let toucher = scope.spawn(|| region.word(4104));
            let mut asked = None;
            while asked.is_none() {
                asked = uffd.faults(Waiting::Asleep).expect("it is ours").next();
            }
            let place = asked.expect("it was asked") / 4096 * 4096;
            assert_eq!(place, 4096);
            uffd.copy(place, &[7; 4096]).expect("nothing is there");
            assert_eq!(toucher.join().expect("it goes on"), u64::from_ne_bytes([7; 8]));
        });
        let again = uffd.copy(4096, &[8; 4096]).expect_err("something is there");
        assert_eq!(again.raw_os_error(), Some(libc::EEXIST));
    }

    #[test]
    fn a_file_is_mapped_and_a_private_write_stays_here() {
        let file = File::from(memfd_create("quinion-test", MemfdFlags::CLOEXEC).expect("there are such"));
        file.write_all_at(&[7; 8192], 0).expect("room for it");
        let mut region = Region::private(&file, 8192).expect("it is mapped");
        let Some(uffd) = uffd(&region, Absent::Minor) else { return };
        uffd.map(0, 8192).expect("the file has it");
        assert_eq!(region.word(4096), u64::from_ne_bytes([7; 8]));
        region.set_word(0, 1);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).expect("it is as long");
        assert_eq!((bytes, region.word(0)), ([7; 8], 1));
    }
}
