//! Plan cache: what a run found out about files of programs, for the next run.
//!
//! ```text
//!   the user's folder/    plan-KEY       how a C library is patched: replaced as a whole
//!                         objects-KEY    what the code of objects does: a line each, added at the end
//! ```
//!
//! The folder is that of kept caches, which no other user can change: see [`Folder`]. A key names the command, since
//! another one may find other results; and a result holds for one device, inode, size and time of change. A file that
//! changed a moment ago may change again and look the same: nothing is remembered of it. Where the time has whole
//! seconds, images of disks may have chosen times, so that two files of two images look the same. Results of such a
//! file are remembered with its build-id, by which its linker tells builds apart, and not at all if it has none.
//!
//! Invariant: whatever is wrong with the folder, or its files, costs only the time to find things out anew. So each
//! piece has a checksum, and one that does not match is ignored.

use std::fs::{self, File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::user_folder::Folder;
use crate::elf::build_id_of;

/// The prefixes of all names here.
pub(super) const PLAN: &str = "plan";
pub(super) const OBJECTS: &str = "objects";
const WHATS: [&str; 2] = [PLAN, OBJECTS];
/// A longer file is not this command's, or old enough to be dropped.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Identity {
    pub device: u64,
    pub inode: u64,
    pub bytes: u64,
    /// Seconds and nanoseconds.
    pub changed: [i64; 2],
    /// A hash of its build-id where the time has whole seconds; else, or without one, 0.
    pub build: u64,
}

impl Identity {
    /// The identity of `file`, whose metadata are `data`. Reads its first page, if its time of change does not tell
    /// enough.
    pub fn of(file: &File, data: &Metadata) -> Self {
        let changed = [data.ctime(), data.ctime_nsec()];
        let build = if changed[1] == 0 { build_id_of(file) } else { None };
        let build = build.map_or(0, |build| sum(&build));
        Self { device: data.dev(), inode: data.ino(), bytes: data.len(), changed, build }
    }

    pub fn of_path(path: &Path) -> Option<Self> {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        let data = file.metadata().ok().filter(Metadata::is_file)?;
        Some(Self::of(&file, &data))
    }

    /// Whether a later change would give it another time, as far as that can be seen.
    pub fn is_settled(&self) -> bool {
        const STEP: Duration = Duration::from_millis(2500);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let changed = Duration::from_secs(u64::try_from(self.changed[0]).unwrap_or(u64::MAX));
        (self.changed[1] != 0 || self.build != 0) && now.checked_sub(changed).is_some_and(|age| age > STEP)
    }
}

#[derive(Debug)]
pub(super) struct PlanCache {
    folder: Folder,
    us: u64,
}

impl PlanCache {
    /// The user's, for this very command; `None` if there is no such folder.
    pub fn of_user() -> Option<Self> {
        Self::of(Folder::of_user().ok()?)
    }

    /// The results in `folder`, for this very command; `None` if the command cannot be identified.
    pub fn of(folder: Folder) -> Option<Self> {
        Self::within(folder, Identity::of_path(Path::new("/proc/self/exe"))?)
    }

    fn within(folder: Folder, us: Identity) -> Option<Self> {
        us.is_settled().then(|| Self { folder, us: sum(&(us, env!("CARGO_PKG_VERSION"))) })
    }

    fn name(&self, what: &str, key: impl Hash) -> String {
        format!("{what}-{:016x}", sum(&(self.us, key)))
    }

    /// The bytes of `what` for `key`; empty if there are none, or far too many.
    pub fn read(&self, what: &str, key: impl Hash) -> Vec<u8> {
        let read = || {
            let mut bytes = Vec::new();
            let file = self.open(&self.name(what, key), File::options().read(true))?;
            file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map(|_| bytes)
        };
        read().ok().filter(|bytes: &Vec<u8>| bytes.len() as u64 <= BYTES_MAX).unwrap_or_default()
    }

    /// Writes `bytes` there as a whole: a concurrent reader finds the former bytes.
    pub fn replace(&self, what: &str, key: impl Hash, bytes: &[u8]) -> io::Result<()> {
        self.folder.remove_old(is_cache_file_name);
        let name = self.name(what, key);
        let new = format!("{name}.{}", std::process::id());
        let (from, to) = (self.folder.within(&new), self.folder.within(&name));
        // A process with the same number may have been killed here.
        let _ = fs::remove_file(&from);
        let written = self
            .open(&new, File::options().write(true).create_new(true))
            .and_then(|mut file| file.write_all(bytes))
            .and_then(|()| fs::rename(&from, to));
        written.inspect_err(|_| drop(fs::remove_file(&from)))
    }

    /// Adds a line at the end, in one piece.
    pub fn add(&self, what: &str, key: impl Hash, line: &str) -> io::Result<()> {
        let name = self.name(what, key);
        let mut file = self.open(&name, File::options().append(true).create(true))?;
        match file.metadata()?.len() {
            0 => self.folder.remove_old(is_cache_file_name),
            bytes if bytes + line.len() as u64 >= BYTES_MAX => {
                return fs::remove_file(self.folder.within(&name));
            }
            _ => {}
        }
        file.write_all(format!("{line}\n").as_bytes())
    }

    /// Opens `name` there, if it is a file: a pipe would make this process wait, and a link may lead elsewhere.
    fn open(&self, name: &str, options: &mut OpenOptions) -> io::Result<File> {
        let options = options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(self.folder.within(name))?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}

fn is_cache_file_name(name: &str) -> bool {
    WHATS.iter().any(|what| name.strip_prefix(what).is_some_and(|rest| rest.starts_with('-')))
}

/// A hash by which two different things are told apart.
pub(super) fn sum(of: &(impl Hash + ?Sized)) -> u64 {
    let mut sum = DefaultHasher::new();
    of.hash(&mut sum);
    sum.finish()
}

#[cfg(test)]
pub(super) fn in_folder(path: &Path) -> PlanCache {
    std::os::unix::fs::DirBuilderExt::mode(fs::DirBuilder::new().recursive(true), 0o700)
        .create(path)
        .expect("made");
    let us = Identity { device: 1, inode: 2, bytes: 3, changed: [4, 5], build: 0 };
    PlanCache::within(Folder::open(path).expect("it is ours"), us).expect("it changed long ago")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_plan_is_found_under_its_key_and_nothing_else_is_left() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("ours");
        let ours = in_folder(&path);
        assert_eq!(ours.read("plan", 1), b"");
        ours.replace("plan", 1, b"one").expect("it is written");
        ours.replace("plan", 1, b"two").expect("over the first");
        ours.add("objects", 1, "a").expect("it is added");
        ours.add("objects", 1, "b").expect("it is added");
        assert_eq!((ours.read("plan", 1), ours.read("plan", 2)), (b"two".to_vec(), Vec::new()));
        assert_eq!(ours.read("objects", 1), b"a\nb\n");
        assert_eq!(fs::read_dir(&path).expect("it is there").count(), 2);
    }

    #[test]
    fn too_much_is_forgotten_and_begun_anew() {
        let parent = tempfile::tempdir().expect("a folder");
        let ours = in_folder(&parent.path().join("ours"));
        let line = "x".repeat(BYTES_MAX as usize / 3);
        let lengths: Vec<usize> = (0..4)
            .map(|_| {
                ours.add("objects", 1, &line).expect("it is added, or all is forgotten");
                ours.read("objects", 1).len() / line.len()
            })
            .collect();
        assert_eq!(lengths, [1, 2, 0, 1]);
        ours.replace("plan", 1, &[0; BYTES_MAX as usize + 1]).expect("it is written");
        assert_eq!(ours.read("plan", 1), b"");
    }

    /// 1. Under the name of the remembered plan lies a pipe, or a link to another file.
    /// 2. The pipe is opened, and waits for a process that is at its other end; the other file is written to.
    #[test]
    fn an_entry_that_is_no_file_is_neither_waited_for_nor_followed() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("ours");
        let ours = in_folder(&path);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path.join(ours.name(OBJECTS, 1)),
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .expect("a pipe");
        let elsewhere = parent.path().join("elsewhere");
        fs::write(&elsewhere, "it").expect("a file");
        std::os::unix::fs::symlink(&elsewhere, path.join(ours.name(OBJECTS, 2))).expect("a link");
        for key in [1, 2] {
            assert_eq!(ours.read(OBJECTS, key), b"");
            ours.add(OBJECTS, key, "line").expect_err("it is no file");
        }
        ours.replace(OBJECTS, 2, b"line").expect("in the place of the link");
        assert_eq!(
            (ours.read(OBJECTS, 2), fs::read(&elsewhere).expect("it is there")),
            (b"line".to_vec(), b"it".to_vec())
        );
    }

    #[test]
    fn old_plans_are_removed() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("ours");
        let ours = in_folder(&path);
        let at = SystemTime::now() - Duration::from_secs(31 * 24 * 3600);
        for (name, modified) in
            [("plan-1", at), ("objects-2.77", at), ("default.lock", at), ("plan-3", SystemTime::now())]
        {
            let file = File::create(path.join(name)).expect("a file");
            file.set_modified(modified).expect("it is ours");
        }
        ours.add(OBJECTS, 1, "line").expect("it is added");
        let left = |name: &str| path.join(name).exists();
        assert!(!left("plan-1") && !left("objects-2.77") && left("default.lock") && left("plan-3"));
    }

    #[test]
    fn a_file_that_changed_a_moment_ago_is_not_settled() {
        let at = |seconds: i64| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs()
                as i64;
            Identity { device: 1, inode: 2, bytes: 3, changed: [now + seconds, 1], build: 0 }.is_settled()
        };
        assert!(at(-60) && !at(-1) && !at(60));
        let of = |changed, build| Identity { device: 1, inode: 2, bytes: 3, changed, build }.is_settled();
        assert!(!of([-1, 1], 7) && !of([1_000_000_000, 0], 0) && of([1_000_000_000, 0], 7));
    }

    /// Images of disks have such times: 1 s, and nothing of a second.
    #[test]
    fn a_file_with_a_time_of_whole_seconds_is_told_from_others_by_its_build_id() {
        let parent = tempfile::tempdir().expect("a folder");
        let ours = std::env::current_exe().expect("this test");
        let identity = |path: &Path| {
            let file = File::open(path).expect("it is there");
            let mut found = Identity::of(&file, &file.metadata().expect("it is a file"));
            (found.changed, found.build) = ([1, 0], build_id_of(&file).map_or(0, |build| sum(&build)));
            found
        };
        assert!(identity(&ours).is_settled(), "Rust's linker writes a build-id");
        let another = parent.path().join("another");
        let mut bytes = fs::read(&ours).expect("this test");
        let id = build_id_of(&File::open(&ours).expect("this test")).expect("as above");
        let at = bytes.windows(id.len()).position(|window| window == id).expect("it was read from there");
        bytes[at] ^= 1;
        fs::write(&another, &bytes).expect("a copy");
        assert_ne!(identity(&another).build, identity(&ours).build);
        fs::write(&another, "#!/bin/sh").expect("a script");
        assert!(!identity(&another).is_settled(), "there is nothing to tell it by");
    }
}
