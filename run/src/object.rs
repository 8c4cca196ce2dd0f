//! Object: the interposer that programs load, as a file.
//!
//! ```text
//!   the user's folder/    libquinion-HASH.so       compared before each use, and replaced if it differs
//! ```
//!
//! Programs pass on `LD_PRELOAD`, even when the owner has ended, so the named file must mean the same for ever, and no
//! other user may be able to change it. A path by the number of a process does not: the next process with the number
//! decides what it leads to. A file in the user's folder ([`super::user_folder`]) does, and it stays there.
//!
//! Its name has a hash of its bytes, so different objects do not replace each other, and programs of two commands may
//! run side by side. The hash protects nothing: all bytes are compared before each use. A file is written under another
//! name, and renamed.
//!
//! A program that has it loaded keeps it if it is replaced or removed. A program that is started later looks for it by
//! name; the object itself removes a missing one from the environment (`frontends/preload/src/ld_preload.rs`). Objects
//! that no run has used for a month are removed when another is written.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;

use super::PRELOAD;
use super::open_files;
use super::user_folder::Folder;

/// A hash of the object that this command has, in hexadecimal; `build.rs` makes it.
pub(super) const HASH: &str = env!("QUINION_OBJECT");
/// How names of objects begin and end; `frontends/preload/src/ld_preload.rs` recognizes its own by it.
const PREFIX: &str = "libquinion-";
const SUFFIX: &str = ".so";
const _: () = assert!(HASH.len() == 32, "the longest name is agreed on with the object");

/// How often writing it is tried, if other processes change it meanwhile.
const TRIES_MAX: usize = 8;

/// Makes sure that the object is in that folder, whatever was there before, and returns its path.
///
/// # Errors
/// It cannot be written there.
pub(super) fn place(folder: &Folder) -> io::Result<PathBuf> {
    place_bytes(folder, HASH, PRELOAD)
}

fn place_bytes(folder: &Folder, hash: &str, bytes: &[u8]) -> io::Result<PathBuf> {
    let name = format!("{PREFIX}{hash}{SUFFIX}");
    let path = folder.path().join(&name);
    let wrong = |error: io::Error| {
        if open_files::are_too_many(&error) {
            return error;
        }
        let path = path.display();
        io::Error::new(error.kind(), format!("cannot write what programs load to {path}: {error}"))
    };
    for _ in 0..TRIES_MAX {
        let found = inspect(folder, &name, bytes).map_err(wrong)?;
        if found == InstalledObject::Right {
            return Ok(path);
        }
        write(folder, &name, bytes, found).map_err(wrong)?;
    }
    Err(wrong(io::Error::other("another process changes it again and again")))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InstalledObject {
    Nothing,
    Right,
    Wrong,
}

/// Checks whether the file of that name is this user's, is not writable by others, and has these bytes.
fn inspect(folder: &Folder, name: &str, bytes: &[u8]) -> io::Result<InstalledObject> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(InstalledObject::Nothing),
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error.into()),
        Err(_) => return Ok(InstalledObject::Wrong), // a link, or a file that may not be read
    };
    let data = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    let is_right = data.is_file()
        && (data.uid(), data.mode() & 0o777) == (user, 0o500)
        && data.len() == bytes.len() as u64
        && has(&file, bytes)?;
    if is_right {
        mark_used(&file, data.modified().ok());
    }
    Ok(if is_right { InstalledObject::Right } else { InstalledObject::Wrong })
}

fn has(mut file: &File, mut bytes: &[u8]) -> io::Result<bool> {
    let mut piece = vec![0; 64 << 10];
    loop {
        match file.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(0) => return Ok(bytes.is_empty()),
            Ok(count) => match bytes.strip_prefix(&piece[..count]) {
                Some(rest) => bytes = rest,
                None => return Ok(false),
            },
        }
    }
}

/// Sets its time once a day while it is used, so that it is not removed as an old one.
fn mark_used(file: &File, modified: Option<SystemTime>) {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    if modified.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > DAY) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        // If this fails, it is removed too early one day, and written anew.
        let _ = rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now });
    }
}

/// Writes it under another name, and renames it to this one. Where there was nothing, a file that another process put
/// there meanwhile stays, and is checked next: another run may have it loaded.
fn write(folder: &Folder, name: &str, bytes: &[u8], found: InstalledObject) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    folder.remove_old(|name| name.starts_with(PREFIX));
    let new = format!("{name}.{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    // A process with the same number may have been killed here.
    let _ = rustix::fs::unlinkat(folder, &new, rustix::fs::AtFlags::empty());
    let written = write_new(folder, &new, bytes).and_then(|_| {
        let flags =
            if found == InstalledObject::Nothing { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        match rustix::fs::renameat_with(folder, &new, folder, name, flags) {
            // A file system without that flag.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(folder, &new, folder, name),
            renamed => renamed,
        }
        .map_err(io::Error::from)
    });
    match written {
        Ok(()) => Ok(()),
        Err(error) => {
            let _ = rustix::fs::unlinkat(folder, &new, rustix::fs::AtFlags::empty());
            if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
        }
    }
}

fn write_new(folder: &Folder, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: OwnedFd = rustix::fs::openat(folder, name, flags, Mode::RUSR | Mode::XUSR)?;
    rustix::fs::fchmod(file.as_fd(), Mode::RUSR | Mode::XUSR)?; // whatever the mask was
    File::from(file).write_all(bytes)
}

/// Whether a process that has mapped the file of this path and inode has mapped the object. The device is not compared:
/// some file systems give another number in `maps` than by `stat`. The path leads to a folder that has only the user's
/// own files.
pub(super) fn is_at(object: &Path, path: &str, inode: u64) -> bool {
    object.as_os_str() == path
        && object.symlink_metadata().is_ok_and(|data| data.is_file() && data.ino() == inode)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder() -> (tempfile::TempDir, Folder) {
        let outer = tempfile::tempdir().unwrap();
        fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        let folder = Folder::open(outer.path()).unwrap();
        (outer, folder)
    }

    fn names(folder: &Folder) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_object_is_written_once_and_stays() {
        let (_outer, folder) = folder();
        let path = place_bytes(&folder, "a", b"bytes").unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), names(&folder)),
            (b"bytes".to_vec(), vec!["libquinion-a.so".into()])
        );
        let before = path.metadata().unwrap();
        assert_eq!(before.mode() & 0o7777, 0o500);
        assert_eq!(place_bytes(&folder, "a", b"bytes").unwrap(), path);
        assert_eq!(path.metadata().unwrap().ino(), before.ino());
        assert!(is_at(&path, path.to_str().unwrap(), before.ino()));
        assert!(!is_at(&path, path.to_str().unwrap(), before.ino() + 1));
        assert!(!is_at(&path, "/elsewhere", before.ino()));
    }

    #[test]
    fn many_that_write_it_at_once_all_have_the_same_file() {
        let (_outer, folder) = folder();
        let bytes = vec![7; 300_000];
        let inode = || {
            let path = place_bytes(&folder, "a", &bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
            path.metadata().unwrap().ino()
        };
        let inodes: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(inode)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(inodes.iter().all(|&other| other == inodes[0]), "{inodes:?}");
        assert_eq!(names(&folder), ["libquinion-a.so"]);
    }

    #[test]
    fn an_object_that_cannot_be_replaced_is_an_error_and_leaves_nothing_behind() {
        let (_outer, folder) = folder();
        fs::create_dir_all(folder.path().join("libquinion-a.so/full")).unwrap();
        let error = place_bytes(&folder, "a", b"bytes").unwrap_err().to_string();
        assert!(error.contains("libquinion-a.so"), "{error}");
        assert_eq!(names(&folder), ["libquinion-a.so"]);
    }

    #[test]
    fn objects_unused_for_a_month_are_removed() {
        let (_outer, folder) = folder();
        let month = Duration::from_secs(31 * 24 * 3600);
        let [old, used] = ["old", "used"].map(|hash| place_bytes(&folder, hash, b"bytes").unwrap());
        let left = folder.path().join("libquinion-new.so.7.0");
        fs::write(&left, "").unwrap();
        for path in [&old, &used, &left] {
            let time = Timespec {
                tv_sec: (SystemTime::now() - month).duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
                    as i64,
                tv_nsec: 0,
            };
            let times = Timestamps { last_access: time, last_modification: time };
            rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::empty()).unwrap();
        }
        place_bytes(&folder, "used", b"bytes").unwrap();
        place_bytes(&folder, "new", b"bytes").unwrap();
        assert_eq!(names(&folder), ["libquinion-new.so", "libquinion-used.so"]);
    }
}
