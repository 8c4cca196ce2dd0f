//! Remembered: what a run found out about files of programs, for the next run.
//!
//! ```text
//!   the user's folder/    plan-KEY       how a C library is patched: replaced as a whole
//!                         objects-KEY    what the code of objects does: a line each, added at the end
//! ```
//!
//! The folder is that of kept caches, which nobody else can change: see [`Folder`]. A key says which command found it
//! out, for another one may know better; and what is said of a file holds for one device, inode, size and time of change.
//! A file that changed a moment ago may change again and look the same; nothing is remembered of it.
//!
//! Invariant: whatever is wrong with the folder, or with what is in it, costs the time to find things out anew, and no
//! more. So each piece has a sum, and one that is not right is not there.

use std::fs::{self, File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
#[cfg(test)]
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::keep::folder::Folder;

/// What is longer was not written by us, or is time to forget.
const BYTES_MAX: u64 = 1 << 20;

/// A file as it was when it was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Identity {
    pub device: u64,
    pub inode: u64,
    pub bytes: u64,
    /// Seconds and nanoseconds.
    pub changed: [i64; 2],
}

impl Identity {
    pub fn of(data: &Metadata) -> Self {
        let changed = [data.ctime(), data.ctime_nsec()];
        Self { device: data.dev(), inode: data.ino(), bytes: data.len(), changed }
    }

    /// Whether a change from now on would give it another time.
    pub fn is_settled(&self) -> bool {
        /// Longer than a step of any file system's clock.
        const STEP: Duration = Duration::from_millis(2500);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let changed = Duration::from_secs(u64::try_from(self.changed[0]).unwrap_or(u64::MAX));
        now.checked_sub(changed).is_some_and(|age| age > STEP)
    }
}

/// The place for it.
#[derive(Debug)]
pub(super) struct Remembered {
    folder: Folder,
    us: u64,
}

impl Remembered {
    /// The user's, for this very command; `None` if there is no such place.
    pub fn of_user() -> Option<Self> {
        let us = Identity::of(&fs::metadata("/proc/self/exe").ok()?);
        Self::within(Folder::of_user().ok()?, us)
    }

    fn within(folder: Folder, us: Identity) -> Option<Self> {
        us.is_settled().then(|| Self { folder, us: sum(&us) })
    }

    fn name(&self, what: &str, key: impl Hash) -> String {
        format!("{what}-{:016x}", sum(&(self.us, key)))
    }

    /// What stands under `what` for `key`; nothing if there is nothing, or far too much.
    pub fn read(&self, what: &str, key: impl Hash) -> Vec<u8> {
        let read = || {
            let mut bytes = Vec::new();
            let file = File::open(self.folder.within(&self.name(what, key)))?;
            file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map(|_| bytes)
        };
        read().ok().filter(|bytes: &Vec<u8>| bytes.len() as u64 <= BYTES_MAX).unwrap_or_default()
    }

    /// Puts `bytes` there as a whole: who reads meanwhile finds what was there before.
    pub fn replace(&self, what: &str, key: impl Hash, bytes: &[u8]) -> io::Result<()> {
        let name = self.name(what, key);
        let new = self.folder.within(&format!("{name}.{}", std::process::id()));
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?.write_all(bytes)?;
        fs::rename(new, self.folder.within(&name))
    }

    /// Adds a line at the end, in one piece.
    pub fn add(&self, what: &str, key: impl Hash, line: &str) -> io::Result<()> {
        let path = self.folder.within(&self.name(what, key));
        let mut file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        if file.metadata()?.len() + line.len() as u64 >= BYTES_MAX {
            return fs::remove_file(path);
        }
        file.write_all(format!("{line}\n").as_bytes())
    }
}

/// A number that two different things hardly share.
pub(super) fn sum(of: &(impl Hash + ?Sized)) -> u64 {
    let mut sum = DefaultHasher::new();
    of.hash(&mut sum);
    sum.finish()
}

/// A place for tests, in a folder of theirs.
#[cfg(test)]
pub(super) fn in_folder(path: &Path) -> Remembered {
    std::os::unix::fs::DirBuilderExt::mode(fs::DirBuilder::new().recursive(true), 0o700)
        .create(path)
        .expect("made");
    let us = Identity { device: 1, inode: 2, bytes: 3, changed: [4, 5] };
    Remembered::within(Folder::open(path).expect("it is ours"), us).expect("it changed long ago")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_there_is_there_under_its_key_and_nothing_else_is_left() {
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

    #[test]
    fn what_changed_a_moment_ago_is_not_settled() {
        let at = |seconds: i64| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs()
                as i64;
            Identity { device: 1, inode: 2, bytes: 3, changed: [now + seconds, 0] }.is_settled()
        };
        assert!(at(-60) && !at(-1) && !at(60));
        assert!(!Identity { device: 1, inode: 2, bytes: 3, changed: [-1, 0] }.is_settled());
    }
}
