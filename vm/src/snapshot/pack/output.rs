//! Output: a file that appears under its name when it is whole and durable, or not at all.
//!
//! ```text
//!   create     NAME.PID-N.new, new                        dropped before it is published: removed
//!   publish    sync the file --> rename, or refuse if NAME is there --> sync the folder
//! ```
//!
//! A process that is killed leaves the file of the other name behind, and nothing under the name itself.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Names that are tried: others may have left files of a process of the same number.
const NAMES_MAX: u32 = 1000;

#[derive(Debug)]
pub(super) struct Output {
    file: fs::File,
    out: PathBuf,
    /// Where it is until it is published.
    beside: Option<PathBuf>,
}

/// The folder that `path` is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

impl Output {
    /// A new file beside `out`, with the permissions at most that `mode_for` has for a file of its group.
    pub(super) fn create(out: &Path, mode_for: impl Fn(u32) -> u32) -> io::Result<Self> {
        // The group of a new file is that of this process, or that of its folder: one is made to see which.
        let group_of = |output: &Self| output.file.metadata().map(|file| file.gid());
        let group = group_of(&Self::create_with(out, 0o600)?)?;
        let output = Self::create_with(out, mode_for(group))?;
        if group_of(&output)? != group {
            return Err(io::Error::other("the folder was given to another group meanwhile"));
        }
        Ok(output)
    }

    fn create_with(out: &Path, mode: u32) -> io::Result<Self> {
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(mode);
        let mut number = 0;
        loop {
            let mut name = out.file_name().unwrap_or_default().to_owned();
            name.push(format!(".{}-{number}.new", std::process::id()));
            let beside = out.with_file_name(name);
            match options.open(&beside) {
                Ok(file) => return Ok(Self { file, out: out.to_owned(), beside: Some(beside) }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < NAMES_MAX => {
                    number += 1
                }
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn write(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, position)
    }

    /// Gives it its name. With `replace` in place of a file that is there.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`], or another; then the file is gone, unless the folder could not be synced.
    pub(super) fn publish(mut self, replace: bool) -> io::Result<()> {
        self.file.sync_all()?;
        let beside = self.beside.as_ref().expect("it is published once");
        if replace {
            fs::rename(beside, &self.out)?;
        } else {
            rename_new(beside, &self.out)?;
        }
        self.beside = None;
        fs::File::open(folder_of(&self.out))?.sync_all()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(beside) = &self.beside {
            let _ = fs::remove_file(beside);
        }
    }
}

/// Renames, unless a file of the name is there.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems of the network may not know the flag; a link is refused in the same case.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        done => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name")).collect()
    }

    #[test]
    fn a_file_appears_when_it_is_published_and_leaves_nothing_if_it_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("pack");
        let output = Output::create(&out, |_| 0o600).expect("a file");
        output.write(b"half", 0).expect("room for it");
        assert!(!out.exists());
        drop(output);
        assert!(names(folder.path()).is_empty());
        let (first, second) = (Output::create(&out, |_| 0o600), Output::create(&out, |_| 0o600));
        let [first, second] = [first, second].map(|output| output.expect("each has a name of its own"));
        first.write(b"one", 0).expect("room for it");
        second.write(b"another", 0).expect("room for it");
        first.publish(false).expect("the name is free");
        let refused = second.publish(false).expect_err("the name is taken");
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((fs::read(&out).expect("the first"), names(folder.path()).len()), (b"one".to_vec(), 1));
        let third = Output::create(&out, |_| 0o600).expect("a file");
        third.write(b"three", 0).expect("room for it");
        third.publish(true).expect("it replaces the first");
        assert_eq!(fs::read(&out).expect("the third"), b"three");
    }
}
