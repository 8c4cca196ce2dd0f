//! Files that every program has closed do not keep their file system busy: `umount` under `run` returns what it returns
//! without, and so it does outside, when a cache that outlives its command has read from there. A file that a program
//! has open keeps it busy, as without.
//!
//! ```text
//!   mount --> read until it is served, or being copied --> close --> umount: 0
//!                                                    `--> umount: EBUSY, close, umount: 0
//! ```

mod disk;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use disk::{Report, noise, plain, quinion, scratch};
use tempfile::TempDir;

const FILE_BYTES: usize = 24 << 20;

/// Mounts, reads, closes and unmounts, several times, and prints the result of each `umount`: by itself, by programs
/// that it starts, and while it has the file open.
const PROGRAM: &str = r"
import ctypes, os, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
words, place = sys.argv[1:-1], sys.argv[-1]
path = place + '/file'
def mount():
    subprocess.run(words + [place], check=True)
    if not os.path.exists(path):
        with open(path, 'wb') as file: file.write(os.urandom(24 << 20))
        time.sleep(0.1)
def read(file, times):
    for _ in range(times):
        for at in range(0, 24 << 20, 1 << 20): os.pread(file, 1 << 20, at)
def unmount():
    return ctypes.get_errno() if libc.umount2(place.encode(), 0) else 0
for turn in range(6):
    mount()
    file = os.open(path, os.O_RDONLY)
    read(file, 4 + turn % 2)
    if turn == 4:
        print('open', unmount())
        read(file, 1)
    os.close(file)
    if turn % 2:
        subprocess.run(['cat', path, path], stdout=subprocess.DEVNULL, check=True)
    if turn < 5: print('closed', unmount())
    else: print('umount', subprocess.run(['umount', place]).returncode)
";
const EXPECTED: &str = "closed 0\nclosed 0\nclosed 0\nclosed 0\nopen 16\nclosed 0\numount 0\n";

/// Serves file systems without leases, too.
const ALL: &[&str] = &["--file-systems", "all", "--coherence", "times"];

/// A folder to mount at; unmounted when it is dropped.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = scratch();
        for name in ["place", "lower", "upper", "work"] {
            fs::create_dir(folder.path().join(name)).expect("the disk has room");
        }
        Self { folder }
    }
    fn at(&self) -> PathBuf {
        self.folder.path().join("place")
    }
    fn file(&self) -> PathBuf {
        self.at().join("file")
    }
    /// An image of a file system with `file`, which holds `bytes`.
    fn image(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let image = self.folder.path().join(name);
        fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("the disk has room");
        done(plain("mkfs.ext4").args(["-q", "-F", "-b", "4096", "-O", "^has_journal"]).arg(&image));
        self.mount(&["-o", "loop", words(&image)]);
        fs::write(self.file(), bytes).expect("it has room");
        self.unmount();
        image
    }
    fn mount(&self, options: &[&str]) {
        done(plain("mount").args(options).arg(self.at()));
    }
    #[track_caller]
    fn unmount(&self) {
        done(plain("umount").arg(self.at()));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while fs::metadata(self.at()).ok().map(|is| is.dev())
            != fs::metadata(self.folder.path()).ok().map(|is| is.dev())
            && plain("umount").arg("-l").arg(self.at()).status().is_ok_and(|status| status.success())
        {
        }
    }
}

fn words(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

#[track_caller]
fn done(command: &mut Command) -> Output {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// Whether file systems can be mounted here; prints a message if not.
fn can_mount() -> bool {
    let place = Place::new();
    let mounts = plain("mount").args(["-t", "tmpfs", "none"]).arg(place.at()).output();
    let can = mounts.as_ref().is_ok_and(|output| output.status.success());
    if !can {
        println!("SKIPPED: nothing can be mounted here: {mounts:?}");
    }
    can
}

/// The program prints the same under `run` as without, in a mount name space of its own or not.
#[track_caller]
fn unmounts(mount: &[&str], place: &Place, options: &[&str], apart: bool) -> Report {
    let name_space: &[&str] = if apart { &["unshare", "-m"] } else { &[] };
    let (at, report) = (place.at(), place.folder.path().join("report"));
    let program: Vec<&str> = [name_space, &["python3", "-c", PROGRAM], mount, &[words(&at)]].concat();
    let mut run = quinion();
    run.args(["run", "--memory", "256M", "--report", "json", "--report-file"]).arg(&report).args(options);
    let with = run.arg("--").args(&program).output().expect("our own command starts");
    let said = String::from_utf8_lossy(&with.stdout);
    assert_eq!(said, EXPECTED, "{mount:?} {options:?} apart {apart}: {with:?}");
    Report::read(&report)
}

/// Runs `unmounts` in both attach modes, in a mount name space of its own and not.
#[track_caller]
fn unmounts_always(mount: &[&str], place: &Place, more: &[&str]) {
    let without =
        plain("unshare").args(["-m", "python3", "-c", PROGRAM]).args(mount).arg(place.at()).output();
    let without = without.expect("it starts");
    assert_eq!(String::from_utf8_lossy(&without.stdout), EXPECTED, "without us: {without:?}");
    for apart in [true, false] {
        unmounts(mount, place, more, apart);
        let report = unmounts(mount, place, &[&["--attach", "at-once"], more].concat(), apart);
        assert!(report.served() >= 20 * FILE_BYTES as u64, "{mount:?} was to be served: {report:?}");
    }
}

#[test]
fn umount_of_a_disk_inside_the_run() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let image = place.image("image", &noise(FILE_BYTES, 1));
    unmounts_always(&["mount", "-o", "loop", words(&image)], &place, &[]);
}

#[test]
fn umount_of_memory_inside_the_run() {
    if !can_mount() {
        return;
    }
    unmounts_always(&["mount", "-t", "tmpfs", "none"], &Place::new(), &[]);
}

/// A file system without leases, which is served only if the user asks for that.
#[test]
fn umount_of_an_overlay_inside_the_run() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let [lower, upper, work] = ["lower", "upper", "work"].map(|name| place.folder.path().join(name));
    fs::write(lower.join("file"), noise(FILE_BYTES, 2)).expect("the disk has room");
    let layers = format!("lowerdir={},upperdir={},workdir={}", words(&lower), words(&upper), words(&work));
    unmounts_always(&["mount", "-t", "overlay", "none", "-o", &layers], &place, ALL);
}

/// A file system in user space, mounted at its argument, with one file; it ends when it is unmounted.
const SERVER: &str = r"
import ctypes, os, struct, sys
SIZE, PART = 24 << 20, b'quinion!' * 512
fuse = os.open('/dev/fuse', os.O_RDWR)
libc, how = ctypes.CDLL(None, use_errno=True), 'fd=%d,rootmode=40000,user_id=0,group_id=0' % fuse
assert libc.mount(b'fuse', sys.argv[1].encode(), b'fuse', 0, how.encode()) == 0, os.strerror(ctypes.get_errno())
def attributes(node):
    mode, size = (0o100644, SIZE) if node == 2 else (0o40755, 0)
    return struct.pack('<6Q10I', node, size, size >> 9, 9, 9, 9, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
def answer(operation, node, body):
    if operation == 26: return struct.pack('<IIIIHHIIHHI28x', 7, 31, 1 << 17, 0, 9, 9, 1 << 17, 1, 0, 0, 0)
    if operation == 1 and body == b'file\0': return struct.pack('<4QII', 2, 0, 9, 9, 0, 0) + attributes(2)
    if operation == 3: return struct.pack('<QII', 9, 0, 0) + attributes(node)
    if operation in (14, 27): return struct.pack('<QII', 0, 0, 0)
    if operation == 15:
        at, size = struct.unpack_from('<QI', body, 8)
        return PART[at % 4096:] + PART * (size // 4096) if at < SIZE else b''
    if operation == 17: return bytes(80)
    return b'' if operation in (18, 25, 29, 34, 38) else None
def serve():
    while True:
        try: said = os.read(fuse, 1 << 18)
        except InterruptedError: continue
        except OSError: return
        length, operation, unique, node = struct.unpack_from('<IIQQ', said)
        if operation in (2, 36, 42): continue
        body = answer(operation, node, said[40:length])
        if operation == 15: body = body[:struct.unpack_from('<I', said, 56)[0]]
        error = 0 if body is not None else -2 if operation == 1 else -38
        try: os.write(fuse, struct.pack('<IiQ', 16 + len(body or b''), error, unique) + (body or b''))
        except OSError: pass
if os.fork() == 0:
    os.setsid()
    null = os.open('/dev/null', os.O_RDWR)
    for number in range(3): os.dup2(null, number)
    serve()
    os._exit(0)
";

/// As `fusermount3 -u` does.
#[test]
fn umount_of_fuse_inside_the_run() {
    if !can_mount() {
        return;
    }
    if !Path::new("/dev/fuse").exists() {
        return println!("SKIPPED: there is no /dev/fuse");
    }
    unmounts_always(&["env", "-u", "LD_PRELOAD", "python3", "-c", SERVER], &Place::new(), ALL);
}

/// A cache that outlives its commands, which is ended.
struct Kept {
    runtime: TempDir,
}

impl Kept {
    fn new() -> Self {
        let runtime = tempfile::tempdir().expect("a folder");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(runtime.path(), mode).expect("it is ours");
        Self { runtime }
    }
    /// Runs a program under it, and returns its output and the report.
    #[track_caller]
    fn run(&self, options: &[&str], words: &[&str]) -> (Vec<u8>, Report) {
        let report = self.runtime.path().join("report");
        let mut run = quinion();
        run.env("XDG_RUNTIME_DIR", self.runtime.path());
        run.args(["run", "--keep", "--report", "json", "--report-file"]).arg(&report).args(options);
        let output = done(run.arg("--").args(words));
        (output.stdout, Report::read(&report))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = quinion().env("XDG_RUNTIME_DIR", self.runtime.path()).args(["stop", "--all"]).output();
    }
}

/// Reads a file several times and closes it.
const READS: &str = r"
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(6):
    for at in range(0, 24 << 20, 1 << 20): os.pread(file, 1 << 20, at)
os.close(file)
";

/// A file system from which a kept cache has read, or copied, can be unmounted by any process a few seconds later; the
/// files were cached until then.
#[test]
fn umount_from_outside_of_a_file_system_that_a_kept_cache_has_read() {
    if !can_mount() {
        return;
    }
    for options in [&["--attach", "at-once"][..], &[]] {
        let (place, kept) = (Place::new(), Kept::new());
        let image = place.image("image", &noise(FILE_BYTES, 3));
        place.mount(&["-o", "loop", words(&image)]);
        std::thread::sleep(Duration::from_millis(100));
        let (file, memory) = (place.file(), ["--memory", "256M"]);
        let options = [&memory, options].concat();
        kept.run(&options, &["python3", "-c", READS, words(&file)]);
        let again = Instant::now();
        let (_, report) = kept.run(&options, &["python3", "-c", READS, words(&file)]);
        if options.len() > 2 {
            assert!(report.served() >= 6 * FILE_BYTES as u64, "{report:?}");
            assert_eq!(report.number("device", "bytes"), 0, "it was there: {report:?}");
        }
        std::thread::sleep(Duration::from_secs(5).saturating_sub(again.elapsed()));
        place.unmount();
    }
}

/// 1. A kept cache has read a file, and its file system is unmounted.
/// 2. Another takes its place, with the same device number and a file of the same inode, size and times.
#[test]
fn another_file_system_in_the_place_of_one_that_was_read() {
    if !can_mount() {
        return;
    }
    let (place, kept) = (Place::new(), Kept::new());
    let (old, new) = (noise(FILE_BYTES, 4), noise(FILE_BYTES, 5));
    let image = place.image("image", &old);
    let other = place.folder.path().join("other");
    // The same blocks, with other bytes in those of the file.
    let mut bytes = fs::read(&image).expect("it is ours");
    for (old, new) in old.chunks(4096).zip(new.chunks(4096)) {
        let is_it = |block: &[u8]| block == old;
        let block = bytes.chunks_mut(4096).find(|block| is_it(block)).expect("it holds the file");
        block.copy_from_slice(new);
    }
    fs::write(&other, bytes).expect("the disk has room");
    let identity = || {
        let is = fs::metadata(place.file()).expect("it is there");
        (is.dev(), is.ino(), is.len(), is.mtime_nsec(), is.ctime_nsec(), is.created().ok())
    };
    let options = ["--memory", "256M", "--attach", "at-once"];
    place.mount(&["-o", "loop", words(&image)]);
    let first = identity();
    let (read, _) = kept.run(&options, &["cat", words(&place.file())]);
    disk::assert_bytes("the first", &read, &old);
    let (_, report) = kept.run(&options, &["cat", words(&place.file())]);
    assert_eq!(report.number("device", "bytes"), 0, "it was there: {report:?}");
    place.unmount();
    place.mount(&["-o", "loop", words(&other)]);
    if identity() != first {
        println!("SKIPPED: the system gave another device number: {:?} {first:?}", identity());
    }
    let (read, report) = kept.run(&options, &["cat", words(&place.file())]);
    disk::assert_bytes("the second", &read, &new);
    assert_eq!(report.served(), FILE_BYTES as u64, "{report:?}");
    place.unmount();
}

/// Writes, reads and removes a file that takes more than half of the space, several times: by `unlink`, by a rename
/// over it, and by a program that it starts.
const REMOVER: &str = r"
import os, subprocess, sys, time
place = sys.argv[1]
def write(path, size):
    with open(path, 'wb', buffering=0) as file:
        for _ in range(size): assert file.write(os.urandom(1 << 20)) == 1 << 20
        os.fsync(file.fileno())
for turn in range(12):
    path = place + '/file'
    try: write(path, 36)
    except OSError as error: print('write', error.errno)
    for _ in range(12):
        file = os.open(path, os.O_RDONLY)
        # Whole, or so far that readahead has begun, and is under way when the file is closed.
        if turn % 2 == 0:
            for at in range(0, 36 << 20, 1 << 20): os.pread(file, 1 << 20, at)
        else:
            for _ in range(5): os.read(file, 4096)
        os.close(file)
    # At once, or when all has been heard of that these processes have closed it.
    if turn >= 6: time.sleep(0.1)
    if turn % 3 == 0: os.unlink(path)
    elif turn % 3 == 1:
        write(place + '/small', 1)
        os.rename(place + '/small', path)
    else: subprocess.run(['rm', path], check=True)
print('done')
";

/// The space of a removed file is free when the call returns.
#[test]
fn removed_space() {
    for options in [&[][..], &["--attach", "at-once"]] {
        let place = Place::new();
        let image = place.image("image", b"nothing");
        let report = place.folder.path().join("report");
        for mount in [&["-o", "loop", words(&image)][..], &["-t", "tmpfs", "-o", "size=60m", "none"]] {
            place.mount(mount);
            let mut run = quinion();
            run.args(["run", "--memory", "128M", "--report", "json", "--report-file"]).arg(&report);
            let said = run.args(options).args(["--", "python3", "-c", REMOVER]).arg(place.at()).output();
            place.unmount();
            let said = said.expect("it starts");
            assert_eq!(String::from_utf8_lossy(&said.stdout), "done\n", "{options:?} {mount:?}: {said:?}");
            if !options.is_empty() {
                assert!(Report::read(&report).served() > 0, "nothing was cached, so nothing is shown");
            }
        }
    }
}

/// Closes files while the process that has them open for it is stopped.
const LATE_CLOSER: &str = r"
import os, signal, sys, time
place, owner = sys.argv[1], os.getppid()
def free(): return os.statvfs(place).f_bfree
def look(name):
    with open(name, 'rb') as file: os.pread(file.fileno(), 10, 0)
with open(place + '/other', 'wb') as file: file.write(bytes(8192))
before = free()
for turn in range(4):
    with open(place + '/file', 'wb') as file: file.write(bytes(1 << 20))
    file = os.open(place + '/file', os.O_RDONLY)
    os.pread(file, 10, 0)
    os.kill(owner, signal.SIGSTOP)
    time.sleep(0.02)
    os.pread(file, 10, 700000)
    os.close(file)
    os.kill(owner, signal.SIGCONT)
    # Until it is heard of again.
    for _ in range(20):
        time.sleep(0.1)
        look(place + '/other')
    os.unlink(place + '/file')
    print(free() == before)
";

/// A file that was closed while the cache could not be told of it is closed there, too, when it can be told.
#[test]
fn a_close_while_the_cache_is_stopped_is_made_up_for() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    place.mount(&["-t", "tmpfs", "-o", "size=60m", "none"]);
    let mut run = quinion();
    run.args(["run", "--memory", "128M", "--attach", "at-once", "--report", "none", "--"]);
    run.env_remove("QUINION_WAIT_MS"); // it is waited for a stopped one as long as anywhere
    let said = run.args(["python3", "-c", LATE_CLOSER]).arg(place.at()).output().expect("it starts");
    place.unmount();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "True\n".repeat(4), "{said:?}");
}

/// Closes files by a function that it looks up in the C library, past all names; then removes one, and unmounts.
const CLOSES_UNSEEN: &str = r"
import ctypes, os, sys, time
library, place = ctypes.CDLL('libc.so.6'), sys.argv[1]
before = os.statvfs(place).f_bfree
for name in ('/one', '/two'):
    with open(place + name, 'wb') as file: file.write(bytes(1 << 20))
time.sleep(2.5) # one that was just changed is not served by looks
for name in ('/one', '/two'):
    file = os.open(place + name, os.O_RDONLY)
    os.pread(file, 10, 0), os.pread(file, 10, 700000)
    library.close(file)
    if name == '/one':
        os.unlink(place + name)
        print(os.statvfs(place).f_bfree - before)
print(ctypes.CDLL(None, use_errno=True).umount2(place.encode(), 0), ctypes.get_errno())
";

/// Also in a process whose C library could not be patched, as few descriptors were left.
#[test]
fn a_file_that_was_closed_unseen_keeps_no_space_and_no_mount() {
    if !can_mount() {
        return;
    }
    for few in ["", "ulimit -n 7; "] {
        let place = Place::new();
        place.mount(&["-t", "tmpfs", "-o", "size=60m", "none"]);
        let mut run = quinion();
        run.args(["run", "--memory", "128M", "--attach", "at-once", "--report", "none", "--", "sh", "-c"]);
        run.arg(format!("{few}exec \"$@\"")).args(["sh", "python3", "-c", CLOSES_UNSEEN]);
        let said = run.arg(place.at()).output().expect("it starts");
        assert_eq!(String::from_utf8_lossy(&said.stdout), "-256\n0 0\n", "{few}: {said:?}");
    }
}
