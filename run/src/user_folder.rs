//! User folder: the one place for what programs load and for where caches listen.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/quinion                              the first that is safe and usable
//!   $XDG_CACHE_HOME/quinion, or $HOME/.cache/quinion
//!   /var/cache/quinion                                    root's alone
//!   /tmp/quinion-UID
//! ```
//!
//! **Safe**: only root and the user can change what its path leads to. Each folder above it, from the root on and with
//! links resolved, belongs to one of the two, and others cannot write there. In a sticky folder, such as `/tmp`, they
//! may, since they cannot rename files of other users. The folder itself belongs to the user, and others may not enter
//! it.
//!
//! **Usable**: the dynamic linker can load from it, and a socket in it has an address. So it is not mounted `noexec`,
//! has no letter that separates or replaces names in `LD_PRELOAD`, and its path is short.
//!
//! Each command looks in the same order and by the same rules, and so finds the same folder: `run` makes it, `keeps`
//! and `stop` do not. A folder that another user has made before, in `/tmp`, is skipped.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{DirBuilder, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, Stat, StatVfsMountFlags};

use super::open_files;

/// Bytes of the longest path. An address of a socket has 108, and a name in it up to 24.
pub(super) const PATH_MAX: usize = 80;

const WRITTEN_BY_OTHERS: u32 = 0o022;
/// Users can rename or remove there only their own files.
const STICKY: u32 = 0o1000;

/// The folder, open.
#[derive(Debug)]
pub struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// The user's folder, made if it is not there.
    ///
    /// # Errors
    /// There is no place for it.
    pub fn of_user() -> io::Result<Self> {
        find(IfMissing::Make)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The user's folder, if it is there: for a command that only looks.
    ///
    /// # Errors
    /// There is no place for it.
    pub fn of_user_if_any() -> io::Result<Option<Self>> {
        find(IfMissing::Leave)
    }

    /// The folder at `path`, if no other user can enter it, or change it, or put another in its place.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = resolve(path)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let descriptor = rustix::fs::open(&path, flags, Mode::empty())?;
        if !is_ours_alone(&rustix::fs::fstat(&descriptor)?) {
            return Err(io::Error::other("it belongs to another user, or others may enter it"));
        }
        Ok(Self { descriptor, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file `name` here, while this is open.
    pub fn within(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.descriptor.as_raw_fd()))
    }

    /// Removes files that were not written for a month, of those whose names are `ours`: of earlier commands, and of an
    /// owner that was killed.
    pub fn remove_old(&self, ours: impl Fn(&str) -> bool) {
        const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
        let Ok(entries) = std::fs::read_dir(self.within("")) else { return };
        for entry in entries.flatten() {
            let written = entry.metadata().and_then(|data| data.modified());
            let is_old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > MONTH));
            if is_old && ours(&entry.file_name().to_string_lossy()) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn is_ours_alone(stat: &Stat) -> bool {
    stat.st_uid == rustix::process::geteuid().as_raw()
        && Permissions::from_mode(stat.st_mode).mode() & 0o077 == 0
}

/// Whether a missing folder is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfMissing {
    Make,
    /// The result is `None`.
    Leave,
}

/// The user's folder.
///
/// # Errors
/// There is no place for it: which were looked at, what is wrong with each, and what to do.
fn find(missing: IfMissing) -> io::Result<Option<Folder>> {
    let user = rustix::process::geteuid().as_raw();
    find_among(&candidates(|name| std::env::var_os(name), user), missing)
}

fn find_among(candidates: &[Candidate], missing: IfMissing) -> io::Result<Option<Folder>> {
    let mut wrong = String::new();
    for candidate in candidates {
        match candidate.find(missing) {
            Ok(folder) => return Ok(folder),
            // That does not concern the folder, and no other must replace it.
            Err(error) if open_files::are_too_many(&error) => return Err(error),
            Err(error) => {
                let _ = write!(wrong, "{}: {error}; ", candidate.path.display());
            }
        }
    }
    Err(io::Error::other(format!(
        "there is no folder for what programs load and where caches listen ({}); set XDG_RUNTIME_DIR to a folder of \
         your own that others cannot write to, with a short path and not mounted noexec",
        wrong.trim_end_matches("; ")
    )))
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Candidate {
    path: PathBuf,
    /// How many missing folders above it may be made.
    makes: usize,
}

fn candidates(variable: impl Fn(&str) -> Option<OsString>, user: u32) -> Vec<Candidate> {
    const ROOT: u32 = 0;
    let folder = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let within = |path: PathBuf, makes| Candidate { path: path.join("quinion"), makes };
    let runtime = folder("XDG_RUNTIME_DIR").map(|path| within(path, 0));
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|path| path.join(".cache")));
    let cache = cache.map(|path| within(path, 1));
    let roots = (user == ROOT).then(|| within("/var/cache".into(), 0));
    let temporary = Candidate { path: format!("/tmp/quinion-{user}").into(), makes: 0 };
    runtime.into_iter().chain(cache).chain(roots).chain([temporary]).collect()
}

impl Candidate {
    /// The folder here; `None` if it is missing and is to be left so, but could be made.
    fn find(&self, missing: IfMissing) -> io::Result<Option<Folder>> {
        if let Err(error) = self.path.symlink_metadata() {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            let above = self.missing_above()?;
            if missing == IfMissing::Leave {
                return Ok(None);
            }
            for path in above {
                // Another process may have made it meanwhile; its owner is checked when it is opened.
                let made = DirBuilder::new().mode(0o700).create(path);
                made.or_else(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => Ok(()),
                    _ => Err(error),
                })?;
            }
        }
        Folder::open(&self.path).map(Some)
    }

    /// Checks whether the folder could be made, and be safe and usable; returns the missing ones, the uppermost first.
    fn missing_above(&self) -> io::Result<Vec<&Path>> {
        let mut missing = vec![self.path.as_path()];
        let above = self.path.ancestors().skip(1).take(self.makes + 1);
        for path in above {
            match path.canonicalize() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(path),
                Err(error) => return Err(error),
                Ok(above) => {
                    missing.reverse();
                    let rest = missing.last().and_then(|last| last.strip_prefix(path).ok());
                    check_above(&above)?;
                    check_use(&above.join(rest.unwrap_or(Path::new(""))), &above)?;
                    rustix::fs::accessat(CWD, &above, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)?;
                    return Ok(missing);
                }
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }
}

/// The path of the folder at `path` with all links above it resolved, if others cannot change what that leads to, and
/// it can be used. The folder itself is checked when it is opened.
///
/// # Errors
/// It is not such a path: the error says why.
pub(super) fn resolve(path: &Path) -> io::Result<PathBuf> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("it is not a folder of its own"));
    };
    let above = above.canonicalize()?;
    check_above(&above)?;
    let path = above.join(name);
    check_use(&path, &path)?;
    Ok(path)
}

/// Whether only root and this user can change what `path`, which has no links, leads to.
fn check_above(path: &Path) -> io::Result<()> {
    let us = rustix::process::geteuid().as_raw();
    for path in path.ancestors() {
        if let Some(why) = fault(&path.symlink_metadata()?, us) {
            return Err(io::Error::other(format!("{} {why}", path.display())));
        }
    }
    Ok(())
}

fn fault(data: &Metadata, us: u32) -> Option<&'static str> {
    const ROOT: u32 = 0;
    if !data.is_dir() {
        Some("is not a folder")
    } else if ![ROOT, us].contains(&data.uid()) {
        Some("belongs to another user")
    } else if data.mode() & WRITTEN_BY_OTHERS != 0 && data.mode() & STICKY == 0 {
        Some("can be written by others")
    } else {
        None
    }
}

/// Whether programs can load from the folder `path`, and sockets in it have addresses. It lies, or will lie, in the
/// file system of `there`.
fn check_use(path: &Path, there: &Path) -> io::Result<()> {
    // The dynamic linker replaces what begins with a `$`, and separates names by colons and blanks. A path that is not
    // UTF-8 could not be found again in a process's table of mappings.
    let is_plain = |letter: char| !letter.is_control() && !matches!(letter, ' ' | ':' | '$' | '\\');
    match path.to_str() {
        Some(text) if !text.chars().all(is_plain) => {
            return Err(io::Error::other("its path has a blank, a colon or a letter of that kind"));
        }
        Some(text) if text.len() > PATH_MAX => return Err(io::Error::other("its path is too long")),
        Some(_) => {}
        None => return Err(io::Error::other("its path is not text")),
    }
    if rustix::fs::statvfs(there)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::other("it is mounted noexec"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn private() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        set_mode(folder.path(), 0o700);
        folder
    }

    #[test]
    fn places_are_looked_at_in_one_order() {
        let paths = |variables: &[(&str, &str)], user| -> Vec<String> {
            let variable = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
            };
            let found = candidates(variable, user);
            found.iter().map(|candidate| candidate.path.display().to_string()).collect()
        };
        let all = [("XDG_RUNTIME_DIR", "/run/user/7"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/h/7")];
        assert_eq!(paths(&all, 7), ["/run/user/7/quinion", "/c/quinion", "/tmp/quinion-7"]);
        assert_eq!(paths(&all[2..], 7), ["/h/7/.cache/quinion", "/tmp/quinion-7"]);
        assert_eq!(paths(&[], 0), ["/var/cache/quinion", "/tmp/quinion-0"]);
        assert_eq!(
            paths(&[("XDG_RUNTIME_DIR", "run"), ("XDG_CACHE_HOME", ""), ("HOME", "/")], 7),
            ["/.cache/quinion", "/tmp/quinion-7"],
            "what does not begin at the root is nowhere"
        );
    }

    #[test]
    fn a_lookup_finds_the_folder_another_process_makes_and_makes_none() {
        let (outer, other) = (private(), private());
        let candidates = [
            Candidate { path: outer.path().join("none/quinion"), makes: 0 },
            Candidate { path: outer.path().join(".cache/quinion"), makes: 1 },
            Candidate { path: other.path().join("quinion"), makes: 0 },
        ];
        assert!(find_among(&candidates, IfMissing::Leave).unwrap().is_none());
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 0);
        let made = find_among(&candidates, IfMissing::Make).unwrap().expect("it is made");
        assert!(made.path().ends_with(".cache/quinion"));
        for path in [made.path(), made.path().parent().unwrap()] {
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        }
        assert_eq!(
            find_among(&candidates, IfMissing::Leave).unwrap().expect("it is found").path(),
            made.path()
        );
        set_mode(made.path(), 0o770);
        let next = find_among(&candidates, IfMissing::Make).unwrap().expect("the next is made");
        assert!(next.path().starts_with(other.path()));
        let error = find_among(&candidates[..2], IfMissing::Leave).unwrap_err().to_string();
        assert!(error.contains("XDG_RUNTIME_DIR") && error.contains(".cache/quinion: "), "{error}");
    }

    #[test]
    fn a_folder_below_one_that_others_can_change_is_refused() {
        let outer = private();
        let middle = outer.path().join("middle");
        fs::create_dir_all(middle.join("quinion")).unwrap();
        set_mode(&middle.join("quinion"), 0o700);
        for (mode, is_safe) in [(0o755, true), (0o775, false), (0o757, false), (0o1777, true), (0o700, true)]
        {
            set_mode(&middle, mode);
            assert_eq!(Folder::open(&middle.join("quinion")).is_ok(), is_safe, "{mode:o}");
            assert_eq!(resolve(&middle.join("quinion")).is_ok(), is_safe, "{mode:o}");
            let absent = Candidate { path: middle.join("absent"), makes: 0 };
            assert_eq!(absent.find(IfMissing::Leave).is_ok(), is_safe, "{mode:o}");
        }
    }

    #[test]
    fn links_above_it_are_resolved() {
        let outer = private();
        fs::create_dir(outer.path().join("real")).unwrap();
        set_mode(&outer.path().join("real"), 0o700);
        std::os::unix::fs::symlink(outer.path().join("real"), outer.path().join("link")).unwrap();
        let candidate = [Candidate { path: outer.path().join("link/quinion"), makes: 0 }];
        let folder = find_among(&candidate, IfMissing::Make).unwrap().expect("it is made");
        assert_eq!(folder.path(), outer.path().canonicalize().unwrap().join("real/quinion"));
    }

    #[test]
    fn paths_that_the_linker_would_not_read_as_one_are_refused() {
        let outer = private();
        let long = "x".repeat(PATH_MAX);
        for name in ["a b", "a:b", "a\tb", "$LIB", "a\\b", &long] {
            let path = outer.path().join(name);
            fs::create_dir_all(path.join("quinion")).unwrap();
            set_mode(&path.join("quinion"), 0o700);
            assert!(Folder::open(&path.join("quinion")).is_err(), "{name:?}");
            let absent = Candidate { path: path.join("absent"), makes: 0 };
            assert!(absent.find(IfMissing::Make).is_err() && !path.join("absent").exists(), "{name:?}");
        }
    }

    fn folder() -> (tempfile::TempDir, Folder) {
        let outer = tempfile::tempdir().unwrap();
        std::fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        let folder = Folder::open(outer.path()).unwrap();
        (outer, folder)
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let (outer, _) = folder();
        for mode in [0o750, 0o701, 0o777] {
            std::fs::set_permissions(outer.path(), Permissions::from_mode(mode)).unwrap();
            let error = Folder::open(outer.path()).unwrap_err().to_string();
            assert!(error.contains("others may enter it"), "{error}");
        }
        let link = outer.path().join("link");
        std::fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(outer.path(), &link).unwrap();
        assert!(Folder::open(&link).is_err(), "nor by way of a link");
    }
}
