//! Examine: what the code of a running process does besides calling the C library.
//!
//! ```text
//!   viewer, before its first file --Examine--> /proc/PROCESS/maps
//!     the C library, the dynamic linker, the kernel's page, our object    known
//!     every other object that can be executed                             its file is scanned, once for all processes
//!     memory that can be executed and has no file                         its bytes are looked at
//!   the worst of all these is the answer
//! ```
//!
//! The C library's system calls are the ones that our wrappers stand before, or
//! it makes them for itself. A second copy of it in one process has no wrappers
//! before it, so it is as foreign as anything.
//!
//! Invariant: what cannot be looked at is taken for the worst.
//!
//! Cost: a few microseconds an object once it is known, and a new one is read
//! and scanned: see [`super::foreign`].

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Mutex;

use quinion::arena::control::Conduct;

use super::foreign;
use crate::elf::Elf;

/// Names by which the parts of the C library are loaded.
const C_LIBRARY: &[&str] =
    &["libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "librt.so.1", "libdl.so.2"];

/// Whether a library of this name is the C library or a part of it.
pub fn is_c_library(name: &str) -> bool {
    C_LIBRARY.contains(&name)
}

/// What a file with code comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Object {
    CLibrary,
    Other(Conduct),
}

/// A file as it was when it was scanned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
    bytes: u64,
}

/// Looks at processes, and remembers the files it has scanned.
pub struct Examiner {
    known: Mutex<HashMap<Identity, Object>>,
    ours: u64,
}

impl Examiner {
    /// One that passes `ours`, the object that programs load of us.
    ///
    /// # Errors
    /// If that cannot be looked at.
    pub fn new(ours: impl AsFd) -> std::io::Result<Self> {
        Ok(Self { known: Mutex::default(), ours: rustix::fs::fstat(ours)?.st_ino })
    }

    /// What the code of `process` does.
    pub fn examine(&self, process: u32) -> Conduct {
        self.look(process).unwrap_or(Conduct::Careful)
    }

    fn look(&self, process: u32) -> Option<Conduct> {
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
        let mut worst = Conduct::Clean;
        let mut c_library = HashSet::new();
        // Memory without a file right behind our object's is its own: variables, and functions' moved beginnings.
        let mut ours_end = 0;
        for line in maps.lines() {
            let part = Part::of(line)?;
            if self.is_ours(&part) || part.inode == 0 && part.path.is_empty() && part.start == ours_end {
                ours_end = part.end;
                continue;
            }
            if !part.is_code || part.is_kernels() {
                continue;
            }
            let conduct = match part.inode {
                _ if part.is_writable => Conduct::Careful,
                0 => conduct_of_memory(process, &part)?,
                _ => match self.object(process, &part)? {
                    Object::Other(conduct) => conduct,
                    // The same piece of it a second time: another copy.
                    Object::CLibrary if c_library.insert((part.inode, part.offset)) => Conduct::Clean,
                    Object::CLibrary => Conduct::Careful,
                },
            };
            worst = worst.max(conduct);
        }
        Some(worst)
    }

    fn is_ours(&self, part: &Part<'_>) -> bool {
        part.inode == self.ours && part.path.starts_with("/memfd:")
    }

    /// What the file behind a part comes to; `None` if it is not there any more.
    fn object(&self, process: u32, part: &Part<'_>) -> Option<Object> {
        let mut file = File::open(format!("/proc/{process}/root{}", part.path)).ok()?;
        let data = file.metadata().ok()?;
        // The device is not compared: some file systems say another one here than there.
        if data.ino() != part.inode || !data.is_file() {
            return None;
        }
        let identity = Identity {
            device: data.dev(),
            inode: data.ino(),
            changed: (data.ctime(), data.ctime_nsec()),
            bytes: data.len(),
        };
        if let Some(&known) = self.known.lock().ok()?.get(&identity) {
            return Some(known);
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let object = look_at(bytes);
        self.known.lock().ok()?.insert(identity, object);
        Some(object)
    }
}

fn look_at(bytes: Vec<u8>) -> Object {
    let Ok(elf) = Elf::parse(bytes) else { return Object::Other(Conduct::Careful) };
    if elf.soname().is_some_and(|name| is_c_library(&name)) {
        return Object::CLibrary;
    }
    Object::Other(foreign::scan(elf.bytes()).map_or(Conduct::Careful, |sites| foreign::conduct(&sites)))
}

/// Code without a file: of a program that makes code for itself.
fn conduct_of_memory(process: u32, part: &Part<'_>) -> Option<Conduct> {
    const BYTES_MAX: u64 = 64 << 20;
    let len = part.end.checked_sub(part.start).filter(|&len| len <= BYTES_MAX)?;
    let mut bytes = vec![0; len as usize];
    File::open(format!("/proc/{process}/mem")).ok()?.read_exact_at(&mut bytes, part.start).ok()?;
    Some(if foreign::may_enter_kernel(&bytes) { Conduct::Careful } else { Conduct::Clean })
}

/// A line of `maps`: `start-end perms offset device inode path`.
#[derive(PartialEq, Eq, Debug)]
struct Part<'a> {
    start: u64,
    end: u64,
    is_code: bool,
    is_writable: bool,
    offset: u64,
    inode: u64,
    path: &'a str,
}

impl<'a> Part<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = after;
            field
        };
        let (range, rights, offset, _device, inode) = (field(), field(), field(), field(), field());
        let (start, end) = range.split_once('-')?;
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        Some(Self {
            start: number(start)?,
            end: number(end)?,
            is_code: rights.as_bytes().get(2) == Some(&b'x'),
            is_writable: rights.as_bytes().get(1) == Some(&b'w'),
            offset: number(offset)?,
            inode: inode.parse().ok()?,
            path: rest.trim_start(),
        })
    }

    /// Whether the kernel put it there.
    fn is_kernels(&self) -> bool {
        self.inode == 0 && matches!(self.path, "[vdso]" | "[vsyscall]" | "[uprobes]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examiner() -> Examiner {
        Examiner::new(File::open("/dev/null").unwrap()).unwrap()
    }

    #[test]
    fn lines_of_maps_are_understood() {
        let line = "7f0d7b200000-7f0d7b228000 r-xp 00028000 fe:01 1234                       /lib/a b.so";
        let part = Part::of(line).unwrap();
        assert_eq!((part.start, part.end, part.offset), (0x7f0d7b200000, 0x7f0d7b228000, 0x28000));
        assert_eq!(
            (part.is_code, part.is_writable, part.inode, part.path),
            (true, false, 1234, "/lib/a b.so")
        );
        let part = Part::of("7ffd-8ffd rwxp 00000000 00:00 0 ").unwrap();
        assert_eq!((part.is_code, part.is_writable, part.inode, part.path), (true, true, 0, ""));
        assert!(Part::of("nonsense").is_none());
    }

    #[test]
    fn a_plain_program_is_clean_and_what_cannot_be_seen_is_the_worst() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let examiner = examiner();
        // Until it has become that program, it is a copy of us.
        let conduct = loop {
            let name = std::fs::read_link(format!("/proc/{}/exe", child.id())).unwrap();
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
            if (name.ends_with("sleep") || name.ends_with("coreutils")) && maps.contains("libc.so.6") {
                break examiner.examine(child.id());
            }
            std::thread::yield_now();
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(conduct, Conduct::Clean);
        assert_eq!(examiner.examine(child.id()), Conduct::Careful);
    }
}
