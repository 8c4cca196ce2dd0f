//! Examine: what the code of a running process does besides calling the C library.
//!
//! ```text
//!   viewer, before its first file --Examine--> /proc/PROCESS/maps
//!     the C library, the dynamic linker, the kernel's page, the interposer    known
//!     every other object that can be executed                             its file is scanned, once for all processes
//!     memory that can be executed and has no file                         its bytes are scanned
//!   the worst of all these is the answer
//! ```
//!
//! The C library's system calls are those that wrappers stand before, or that it makes for itself. A second copy of it
//! in one process has no wrappers before it, so it is foreign: be it another file, or a second piece of memory with the
//! same bytes of the file.
//!
//! Invariant: what cannot be examined is taken for the worst.
//!
//! Cost: a few microseconds an object once it is known. A new one is read into memory and scanned, one at a time, if it
//! is not larger than a quarter of the cache's bound, or 128 MiB if that is less; at most 256 MiB are taken so beside
//! the bound. One on a file system whose reads may never end is taken for the worst, unread: see
//! [`super::syscall_scan`]. A process that finds another object being read waits for a bounded time. Verdicts are
//! kept from one run to the next (`plan_cache.rs`).

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use quinion::internals::arena::control::SyscallAudit;
use quinion_owner::internals::serve::mounts::{self, Mount};
use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};

use super::plan_cache::{Identity, OBJECTS, PlanCache, sum};
use super::{object, syscall_scan};
use crate::elf::Elf;

const C_LIBRARY: &[&str] =
    &["libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "librt.so.1", "libdl.so.2"];

/// Whether a library of this name is the C library or a part of it.
pub fn is_c_library(name: &str) -> bool {
    C_LIBRARY.contains(&name)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Object {
    CLibrary(&'static str),
    Other(SyscallAudit),
}

/// More than the table of mappings of any sane program takes; one with more is not looked at.
const MAPS_BYTES_MAX: u64 = 16 << 20;

fn read_maps(process: u32) -> Option<String> {
    let mut text = String::new();
    let table = File::open(format!("/proc/{process}/maps")).ok()?;
    let bytes = table.take(MAPS_BYTES_MAX).read_to_string(&mut text).ok()?;
    ((bytes as u64) < MAPS_BYTES_MAX).then_some(text)
}

/// Examines processes, and remembers the files that it has scanned.
pub struct ProcessAuditor {
    /// The results of files; those of earlier runs are read when the first process is examined.
    cached_objects: OnceLock<Mutex<HashMap<Identity, Object>>>,
    read_lock: ReadLock,
    object_bytes_max: u64,
    remembered: Option<PlanCache>,
    ours: PathBuf,
    our_object: &'static [u8],
    /// The bytes of memory that it takes from its beginning.
    ours_bytes: OnceLock<u64>,
}

/// Where a part of the C library was found.
struct LibraryCopy {
    name: &'static str,
    inode: u64,
    /// The part's bytes in its file.
    bytes: Range<u64>,
}

impl ProcessAuditor {
    /// An auditor that passes the file `ours`, whose bytes are `our_object`, and knows the `remembered` results of
    /// earlier runs. The cache that it works for has `memory` bytes.
    pub(super) fn new(
        ours: PathBuf,
        our_object: &'static [u8],
        remembered: Option<PlanCache>,
        memory: u64,
    ) -> Self {
        /// No program in one object is larger, and a small cache should serve these, too.
        const OBJECT_BYTES_LEAST: u64 = 128 << 20;
        /// Larger ones take too long.
        const OBJECT_BYTES_MAX: u64 = 256 << 20;
        let object_bytes_max = (memory / 4).clamp(OBJECT_BYTES_LEAST, OBJECT_BYTES_MAX);
        let (cached_objects, read_lock, ours_bytes) = (OnceLock::new(), ReadLock::default(), OnceLock::new());
        Self { cached_objects, read_lock, object_bytes_max, remembered, ours, our_object, ours_bytes }
    }

    fn cached_objects(&self) -> &Mutex<HashMap<Identity, Object>> {
        self.cached_objects.get_or_init(|| {
            let lines = self.remembered.as_ref().map(|remembered| remembered.read(OBJECTS, ()));
            let lines = lines.unwrap_or_default();
            Mutex::new(String::from_utf8_lossy(&lines).lines().filter_map(read_line).collect())
        })
    }

    fn ours_bytes(&self) -> u64 {
        let measure = || Elf::parse(self.our_object.to_vec()).map_or(0, |elf| elf.memory_bytes());
        *self.ours_bytes.get_or_init(measure)
    }

    /// The worst that the code of `process` does.
    pub fn examine(&self, process: u32) -> SyscallAudit {
        self.audit(process).unwrap_or(SyscallAudit::Restricted)
    }

    fn audit(&self, process: u32) -> Option<SyscallAudit> {
        let maps = read_maps(process)?;
        let mut worst = SyscallAudit::Clean;
        let mut c_library = Vec::new();
        // Memory without a file inside the interposer is its own: variables, and moved beginnings of functions.
        let mut ours = 0..0;
        for line in maps.lines() {
            let part = Part::of(line)?;
            if self.is_ours(&part) {
                if part.offset == 0 {
                    ours = part.start..part.start.saturating_add(self.ours_bytes());
                }
                continue;
            }
            if part.has_no_file() && ours.contains(&part.start) && part.end <= ours.end {
                continue;
            }
            if !part.is_code || part.is_kernels() {
                continue;
            }
            let audit = match part.inode {
                _ if part.is_writable => SyscallAudit::Restricted,
                0 => audit_anonymous_memory(process, &part)?,
                _ => match self.object(process, &part)? {
                    Object::Other(audit) => audit,
                    Object::CLibrary(name) => audit_c_library(name, &part, &mut c_library),
                },
            };
            worst = worst.max(audit);
        }
        Some(worst)
    }

    fn is_ours(&self, part: &Part<'_>) -> bool {
        object::is_at(&self.ours, part.path, part.inode)
    }

    fn object(&self, process: u32, part: &Part<'_>) -> Option<Object> {
        let file = open_object(process, part.path)?;
        let data = file.metadata().ok()?;
        // The device is not compared: some file systems give another number here than in `maps`.
        if data.ino() != part.inode || !data.is_file() || data.len() > self.object_bytes_max {
            return None;
        }
        let identity = Identity::of(&file, &data);
        let is_settled = identity.is_settled(); // before its bytes are read
        if let Some(&known) = self.cached_objects().lock().ok()?.get(&identity) {
            return Some(known);
        }
        // One at a time, so that many processes that start at once do not take as many times the memory.
        let guard = self.read_lock.take()?;
        if let Some(&known) = self.cached_objects().lock().ok()?.get(&identity) {
            return Some(known); // a thread that had the lock before has read it
        }
        let mut bytes = Vec::new();
        file.take(data.len()).read_to_end(&mut bytes).ok()?;
        let object = inspect_object(bytes);
        drop(guard);
        self.keep(identity, object)?;
        if let Some(remembered) = self.remembered.as_ref().filter(|_| is_settled) {
            // If this process cannot write there, the next run scans it anew.
            let _ = remembered.add(OBJECTS, (), &line_of(&identity, object));
        }
        Some(object)
    }

    fn keep(&self, identity: Identity, object: Object) -> Option<()> {
        /// Verdicts kept at most: more than the programs of a machine load. At that number all of them are dropped.
        const KNOWN_MAX: usize = 16 << 10;
        let mut known = self.cached_objects().lock().ok()?;
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(identity, object);
        Some(())
    }
}

/// Held while an object is read: one thread at a time reads and scans.
#[derive(Default)]
struct ReadLock {
    taken: Mutex<Option<Instant>>,
    given_back: Condvar,
}

struct ReadLockGuard<'a>(&'a ReadLock);

impl ReadLock {
    /// How long the lock is waited for, counted from when it was taken. A large object is read and scanned in less.
    const MAX: Duration = Duration::from_secs(2);

    /// Takes the lock; `None` if the thread that has it seems to wait for a file system that does not answer.
    fn take(&self) -> Option<ReadLockGuard<'_>> {
        let mut taken = self.taken.lock().ok()?;
        while let Some(since) = *taken {
            let left = Self::MAX.checked_sub(since.elapsed())?;
            taken = self.given_back.wait_timeout(taken, left).ok()?.0;
        }
        *taken = Some(Instant::now());
        Some(ReadLockGuard(self))
    }
}

impl Drop for ReadLockGuard<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.0.given_back.notify_one();
    }
}

/// Opens `path` in `process`, if no step can wait for ever. The process has chosen the path: so it is looked up in the
/// process's table of mounts before any file system is asked, and the file that was found is checked again before it is
/// opened. No request goes to a file system that is not served by default (FUSE, a network's).
fn open_object(process: u32, path: &str) -> Option<File> {
    let path = Path::new(path);
    mounts::do_all_answer(process, path).ok().filter(|&all| all)?;
    let root = open(format!("/proc/{process}/root"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    // The path that the kernel tells of a mapping has no symbolic links, and its directory entries stay in the kernel's
    // cache while it is mapped: so the look-up asks no file system.
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::CACHED;
    let found = openat2(root, path, flags, Mode::empty(), how).ok()?;
    mounts::of_own(found.as_fd(), process).ok().filter(Mount::answers)?;
    // A pipe would make this process wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let again = open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty()).ok()?;
    Some(File::from(again))
}

/// Words for results; a part of the C library is its own.
const AUDIT_NAMES: [(SyscallAudit, &str); 3] = [
    (SyscallAudit::Clean, "clean"),
    (SyscallAudit::Harmless, "harmless"),
    (SyscallAudit::Restricted, "restricted"),
];

fn line_of(identity: &Identity, object: Object) -> String {
    let Identity { device, inode, bytes, changed: [seconds, part], build } = identity;
    let word = match object {
        Object::CLibrary(name) => name,
        Object::Other(audit) => {
            AUDIT_NAMES.iter().find(|(of, _)| *of == audit).map_or("restricted", |(_, word)| word)
        }
    };
    let line = format!("{device} {inode} {bytes} {seconds} {part} {build} {word}");
    format!("{line} {}", sum(line.as_str()))
}

fn read_line(line: &str) -> Option<(Identity, Object)> {
    let (said, sum_said) = line.rsplit_once(' ')?;
    if sum(said).to_string() != sum_said {
        return None;
    }
    let mut words = said.split(' ');
    let mut number = || words.next()?.parse::<i128>().ok();
    let [device, inode, bytes] = [number()?, number()?, number()?].map(|number| number as u64);
    let changed = [number()?, number()?].map(|number| number as i64);
    let build = number()? as u64;
    let word = words.next()?;
    let audit = AUDIT_NAMES.iter().find(|(_, known)| *known == word).map(|(audit, _)| Object::Other(*audit));
    let part = || C_LIBRARY.iter().find(|known| **known == word).map(|name| Object::CLibrary(name));
    Some((Identity { device, inode, bytes, changed, build }, audit.or_else(part)?))
}

fn inspect_object(bytes: Vec<u8>) -> Object {
    let Ok(elf) = Elf::parse(bytes) else { return Object::Other(SyscallAudit::Restricted) };
    let name = elf.soname().and_then(|name| C_LIBRARY.iter().find(|known| **known == name));
    if let Some(name) = name {
        return Object::CLibrary(name);
    }
    Object::Other(
        syscall_scan::scan(elf.bytes())
            .map_or(SyscallAudit::Restricted, |sites| syscall_scan::audit_of(&sites)),
    )
}

/// The C library, if it is the only one: neither another file of its name, nor the same bytes once more.
fn audit_c_library(name: &'static str, part: &Part<'_>, found: &mut Vec<LibraryCopy>) -> SyscallAudit {
    let bytes = part.offset..part.offset.saturating_add(part.end.saturating_sub(part.start));
    let is_copy = found.iter().any(|other| {
        let overlaps = bytes.start < other.bytes.end && other.bytes.start < bytes.end;
        other.name == name && (other.inode != part.inode || overlaps)
    });
    found.push(LibraryCopy { name, inode: part.inode, bytes });
    if is_copy { SyscallAudit::Restricted } else { SyscallAudit::Clean }
}

fn audit_anonymous_memory(process: u32, part: &Part<'_>) -> Option<SyscallAudit> {
    const BYTES_MAX: u64 = 64 << 20;
    const PIECE_BYTES: u64 = 1 << 20;
    part.end.checked_sub(part.start).filter(|&len| len <= BYTES_MAX)?;
    let memory = File::open(format!("/proc/{process}/mem")).ok()?;
    let mut bytes = vec![0; PIECE_BYTES as usize + 1];
    for start in (part.start..part.end).step_by(PIECE_BYTES as usize) {
        // With the first byte of the next piece: an instruction of two bytes may begin in one and end in the other.
        let piece = &mut bytes[..(part.end - start).min(PIECE_BYTES + 1) as usize];
        memory.read_exact_at(piece, start).ok()?;
        if syscall_scan::may_enter_kernel(piece) {
            return Some(SyscallAudit::Restricted);
        }
    }
    Some(SyscallAudit::Clean)
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

    fn has_no_file(&self) -> bool {
        self.inode == 0 && self.path.is_empty()
    }

    fn is_kernels(&self) -> bool {
        self.inode == 0 && matches!(self.path, "[vdso]" | "[vsyscall]" | "[uprobes]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan_cache;

    fn examiner() -> ProcessAuditor {
        ProcessAuditor::new("/dev/null".into(), &[], None, 1 << 30)
    }

    /// The result for `program`, a copy of `sleep`, when its C library is loaded, and its number; it has ended then.
    /// Until it has become that program, it is a copy of this process.
    fn examined(examiner: &ProcessAuditor, program: &Path) -> (SyscallAudit, u32) {
        let mut child = std::process::Command::new(program).arg("100").spawn().unwrap();
        let is_ready = |maps: &str| maps.contains("libc.so.6") && !maps.contains("quinion_run");
        while !is_ready(&std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap()) {
            std::thread::yield_now();
        }
        let found = examiner.examine(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        (found, child.id())
    }

    #[test]
    fn the_remembered_verdict_on_an_object_is_the_one_found() {
        let identity =
            Identity { device: 7, inode: u64::MAX, bytes: 0, changed: [-5, 999_999_999], build: 3 };
        let objects = AUDIT_NAMES.map(|(audit, _)| Object::Other(audit));
        for object in objects.into_iter().chain(C_LIBRARY.iter().map(|name| Object::CLibrary(name))) {
            let line = line_of(&identity, object);
            assert_eq!(read_line(&line), Some((identity, object)));
            assert_eq!(read_line(&line.replacen('7', "8", 1)), None);
            assert_eq!(read_line(&line[..line.len() - 1]), None);
        }
        assert_eq!((read_line(""), read_line("1 2 3 4 5 6 clean")), (None, None));
    }

    #[test]
    fn an_object_is_scanned_in_one_run_and_known_in_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let next = || {
            let ours = plan_cache::in_folder(&folder.path().join("ours"));
            ProcessAuditor::new("/dev/null".into(), &[], Some(ours), 1 << 30)
        };
        let first = next();
        assert!(first.cached_objects().lock().unwrap().is_empty());
        // Not this process: other tests in it map and unmap code meanwhile.
        let program = folder.path().join("sleep");
        std::fs::copy("/bin/sleep", &program).unwrap();
        while !Identity::of_path(&program).unwrap().is_settled() {
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(examined(&first, &program).0, SyscallAudit::Clean);
        let known = first.cached_objects().lock().unwrap().clone();
        let next = next().cached_objects().lock().unwrap().clone();
        assert!(!next.is_empty(), "the program is not new");
        assert!(next.iter().all(|(identity, object)| known.get(identity) == Some(object)));
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
    fn a_plain_program_is_clean_and_an_unreadable_one_counts_as_the_worst() {
        let examiner = examiner();
        let (audit, ended) = examined(&examiner, Path::new("/bin/sleep"));
        assert_eq!(audit, SyscallAudit::Clean);
        assert_eq!(examiner.examine(ended), SyscallAudit::Restricted);
    }

    #[test]
    fn a_read_lock_that_is_released_goes_to_the_next_and_one_that_is_held_too_long_is_given_up() {
        let lock = ReadLock::default();
        let taken = lock.take().unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| lock.take().is_some());
            drop(taken);
            assert!(next.join().unwrap());
        });
        let _stuck = lock.take().unwrap();
        *lock.taken.lock().unwrap() = Instant::now().checked_sub(ReadLock::MAX);
        assert!(lock.take().is_none(), "who comes later does not wait at all");
    }

    /// Code that a program makes for itself is looked at in pieces; the instruction lies across two.
    #[test]
    fn code_in_memory_that_lies_across_two_pieces_is_found() {
        const SCRIPT: &str = "import mmap, sys\n\
            m = mmap.mmap(-1, 3 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)\n\
            at = int(sys.argv[1])\n\
            if at: m[at:at+2] = b'\\x0f\\x05'\n\
            import ctypes\naddress = ctypes.addressof(ctypes.c_char.from_buffer(m))\n\
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 3 << 20, 5) == 0\n\
            print(address, flush=True)\nsys.stdin.read()";
        for (at, wanted) in [
            (0, SyscallAudit::Clean),
            ((1 << 20) - 1, SyscallAudit::Restricted),
            ((3 << 20) - 2, SyscallAudit::Restricted),
        ] {
            let piped = std::process::Stdio::piped;
            let mut command = std::process::Command::new("python3");
            command.args(["-c", SCRIPT, &at.to_string()]).stdin(piped()).stdout(piped());
            let mut child = command.spawn().expect("python3");
            let mut said = String::new();
            let output = child.stdout.as_mut().unwrap();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said).unwrap();
            let start: u64 = said.trim().parse().expect("the address");
            let part = Part {
                start,
                end: start + (3 << 20),
                is_code: true,
                is_writable: false,
                offset: 0,
                inode: 0,
                path: "",
            };
            assert_eq!(audit_anonymous_memory(child.id(), &part), Some(wanted), "at {at}");
            drop(child.stdin.take());
            assert!(child.wait().unwrap().success());
        }
    }

    /// The result for a process that has mapped `len` bytes from the beginning of the file at `path` as code, once
    /// `then` was done.
    fn with_mapped(path: &std::path::Path, len: usize, then: impl FnOnce()) -> SyscallAudit {
        const SCRIPT: &str = "import mmap, sys\nfile, bytes = open(sys.argv[1], 'rb'), int(sys.argv[2])\n\
            code = mmap.PROT_READ | mmap.PROT_EXEC\n\
            if bytes: m = mmap.mmap(file.fileno(), bytes, mmap.MAP_PRIVATE, code)\n\
            print('mapped', flush=True)\nsys.stdin.read()";
        let mut command = std::process::Command::new("python3");
        command.args(["-c", SCRIPT]).arg(path).arg(len.to_string());
        let piped = std::process::Stdio::piped;
        let mut child = command.stdin(piped()).stdout(piped()).spawn().expect("python3");
        let mut said = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        then();
        let audit = examiner().examine(child.id());
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        audit
    }

    fn bytes_read() -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
    }

    /// 1. A process maps a file of its own as code that is an object as it begins, and very large, mostly a hole.
    /// 2. It is read whole into the owner's memory, which is more than the cache's bound; for each such process again.
    #[test]
    fn an_object_that_a_process_chose_is_read_within_the_bound_only() {
        let folder = tempfile::tempdir().unwrap();
        let object = folder.path().join("object.so");
        let examiner = examiner();
        for (bytes, read_max) in [(1 << 30, 4 << 20), (1 << 40, 4 << 20), (100 << 20, 110 << 20)] {
            std::fs::copy("/bin/true", &object).unwrap();
            let file = File::options().write(true).open(&object).unwrap();
            if file.set_len(bytes).is_err() {
                continue; // the file system has no files of that size, and so no process has one
            }
            drop(file);
            let before = bytes_read();
            let part = Part {
                start: 0x1000,
                end: 0x2000,
                is_code: true,
                is_writable: false,
                offset: 0,
                inode: std::fs::metadata(&object).unwrap().ino(),
                path: object.to_str().unwrap(),
            };
            let known = examiner.object(std::process::id(), &part);
            let read = bytes_read() - before;
            assert!(read < read_max, "{read} of {bytes} bytes were read");
            // A readable one is scanned, so that the others show something.
            assert_eq!(known.is_some(), bytes < 1 << 30, "{known:?}, of {bytes} bytes");
            assert_eq!(read > bytes, known.is_some(), "{read} of {bytes} bytes were read");
            std::fs::remove_file(&object).unwrap();
        }
    }

    /// 1. A process has so much code of its own making that looking at it takes the owner's memory, or for ever.
    #[test]
    fn code_in_memory_is_looked_at_within_a_bound_only() {
        // Zeros are no system call.
        let memory = vec![0_u8; 65 << 20];
        let part = |bytes: u64| {
            let (start, path) = (memory.as_ptr() as u64, "");
            let end = start + bytes;
            Part { start, end, is_code: true, is_writable: false, offset: 0, inode: 0, path }
        };
        assert_eq!(audit_anonymous_memory(std::process::id(), &part(1 << 20)), Some(SyscallAudit::Clean));
        let before = bytes_read();
        assert_eq!(audit_anonymous_memory(std::process::id(), &part(65 << 20)), None);
        assert!(bytes_read() - before < 1 << 20, "it was read");
    }

    fn c_library() -> std::path::PathBuf {
        let interpreter = Elf::open(&std::env::current_exe().unwrap()).unwrap().interpreter().unwrap();
        std::fs::canonicalize(interpreter).unwrap().with_file_name("libc.so.6")
    }

    /// 1. A process loads another C library than the one before which the wrappers stand, or parts of the same again.
    /// 2. It has a C library's name, and is taken for the one.
    /// 3. Calls by way of it are not seen.
    #[test]
    fn a_second_c_library_is_foreign() {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copy.so");
        std::fs::copy(c_library(), &copy).unwrap();
        let all = std::fs::metadata(&copy).unwrap().len() as usize;
        assert_ne!(with_mapped(&copy, 0, || ()), SyscallAudit::Restricted, "Python itself is not");
        assert_eq!(with_mapped(&copy, all, || ()), SyscallAudit::Restricted);
        assert_eq!(with_mapped(&c_library(), all, || ()), SyscallAudit::Restricted);
    }

    /// 1. A process has code of a file that is gone, and what the kernel says of such a file is the name of a pipe.
    /// 2. The owner opens it, and waits for a writer, for ever.
    #[test]
    fn a_pipe_in_the_place_of_an_object_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copy.so");
        std::fs::copy("/bin/true", &copy).unwrap();
        let replace = || {
            let pipe = folder.path().join("copy.so (deleted)");
            rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
            std::fs::remove_file(&copy).unwrap();
        };
        assert_eq!(with_mapped(&copy, 4096, replace), SyscallAudit::Restricted);
    }
}
