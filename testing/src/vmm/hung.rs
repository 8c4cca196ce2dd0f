//! Hung: a FUSE file system whose files can be opened and their attributes read, but neither read nor closed.
//!
//! ```text
//!   mount ---> INIT, LOOKUP, GETATTR, OPEN   answered
//!              READ, FLUSH, all others       not answered, as by a network that hangs
//!   drop  ---> the connection is aborted, and what waits goes on with an error
//! ```
//!
//! Written from `linux/fuse.h`, protocol 7.31.

#![allow(unsafe_code, reason = "system calls")]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use super::kernel::checked;

const ROOT: u64 = 1;
const FILE: u64 = 2;

/// A file system that is mounted.
#[derive(Debug)]
pub struct Hung {
    folder: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl Hung {
    /// Mounts a file system at `folder`, which is empty. It has one file, [`Hung::path`].
    pub fn mount(folder: &Path) -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let (place, options) = (name_of(folder), CString::new(options).expect("no zero in it"));
        // SAFETY: four strings that end with a zero.
        checked(unsafe {
            let (name, kind) = (c"hung".as_ptr(), c"fuse".as_ptr());
            libc::mount(name, place.as_ptr(), kind, 0, options.as_ptr().cast())
        })?;
        let server = std::thread::spawn(move || serve(device));
        Ok(Self { folder: folder.to_owned(), server: Some(server) })
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join("file")
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let place = name_of(&self.folder);
        // SAFETY: a string that ends with a zero. The first call aborts the connection.
        let _ = unsafe { libc::umount2(place.as_ptr(), libc::MNT_FORCE) };
        // SAFETY: as above.
        let _ = unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
        let _ = self.server.take().expect("it is dropped once").join();
    }
}

fn name_of(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no zero in it")
}

fn attributes(node: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [node, 1 << 20, 2048, 0, 0, 0] {
        bytes.extend(u64::to_ne_bytes(word));
    }
    let mode = if node == ROOT { libc::S_IFDIR | 0o755 } else { libc::S_IFREG | 0o644 };
    for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        bytes.extend(u32::to_ne_bytes(word));
    }
    bytes
}

fn serve(mut device: File) {
    const LONG: u64 = 1000;
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let mut request = vec![0; 1 << 20];
    // Its end is the connection's.
    while let Ok(40..) = device.read(&mut request) {
        let word = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("eight bytes"));
        let (operation, unique, node) = ((word(0) >> 32) as u32, word(8), word(16));
        let reply = match operation {
            // LOOKUP
            1 => [words(&[FILE, 0, LONG, LONG, 0]), attributes(FILE)].concat(),
            // GETATTR
            3 => [words(&[LONG, 0]), attributes(node)].concat(),
            // OPEN, OPENDIR
            14 | 27 => words(&[0, 0]),
            // INIT
            26 => {
                let mut reply: Vec<u8> =
                    [7_u32, 31, 0, 0, 0, 4096].iter().flat_map(|n| n.to_ne_bytes()).collect();
                reply.resize(64, 0);
                reply
            }
            _ => continue,
        };
        let mut answer = Vec::new();
        answer.extend((16 + reply.len() as u32).to_ne_bytes());
        answer.extend(0_u32.to_ne_bytes());
        answer.extend(unique.to_ne_bytes());
        answer.extend(reply);
        if device.write_all(&answer).is_err() {
            return;
        }
    }
}
