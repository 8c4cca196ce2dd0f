//! Scratch: files without a name.
//!
//! An experiment's file has no name in any folder, so it is gone when the
//! process is, however it ends: no signal has to be caught for that. Others
//! open it through `/proc`, as long as we have it.
//!
//! What is in it tells its place: each 8 bytes hold their position, mixed with
//! a constant, so that a read from the wrong place is seen.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};

use super::harness::Unmeasured;
use super::pages::PAGE;

/// Bytes that are written at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// A file without a name.
pub struct Scratch {
    file: File,
    bytes: u64,
}

impl Scratch {
    /// A file of `bytes`, a multiple of 1 MiB, in `folder`, written to the device.
    pub fn new(folder: &Path, bytes: u64) -> Result<Self, Unmeasured> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let wrong = |error: std::io::Error| {
            Unmeasured::Failed(format!(
                "{}: cannot make a file of {} MiB without a name there: {error}; choose another folder by --scratch",
                folder.display(),
                bytes >> 20
            ))
        };
        let mut file =
            open(folder, flags, Mode::RUSR | Mode::WUSR).map(File::from).map_err(|e| wrong(e.into()))?;
        write_content(&mut file, bytes).map_err(wrong)?;
        Ok(Self { file, bytes })
    }

    /// A path by which it can be opened while this lives, by this process and others of its user.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Opens it for reads past the kernel's page cache.
    pub fn open_direct(&self) -> Result<File, Unmeasured> {
        let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        open(self.path(), flags, Mode::empty()).map(File::from).map_err(|error| {
            Unmeasured::Missing(format!(
                "the file system has no direct reads: {error}; choose another folder by --scratch"
            ))
        })
    }
}

/// Writes to `file`, which is empty, `bytes` bytes that tell their place, a multiple of 1 MiB, and waits
/// for the device.
pub fn write_content(file: &mut File, bytes: u64) -> std::io::Result<()> {
    put_content(file, bytes)?;
    file.sync_all()
}

/// Writes them to whatever takes them.
pub fn put_content(to: &mut impl Write, bytes: u64) -> std::io::Result<()> {
    for start in (0..bytes).step_by(PIECE_BYTES as usize) {
        to.write_all(&piece(start))?;
    }
    Ok(())
}

/// What stands at `position`, a multiple of 8.
pub fn word_at(position: u64) -> u64 {
    position ^ 0x5149_4e49_4f4e_0000
}

fn piece(start: u64) -> Vec<u8> {
    let mut piece = vec![0; PIECE_BYTES as usize];
    for (word, position) in piece.chunks_exact_mut(8).zip((start..).step_by(8)) {
        word.copy_from_slice(&word_at(position).to_le_bytes());
    }
    piece
}

/// Whether `bytes` begin with what stands at `position`.
pub fn is_from(bytes: &[u8], position: u64) -> bool {
    bytes.first_chunk::<8>().is_some_and(|&word| u64::from_le_bytes(word) == word_at(position))
}

/// A look at the first word of each page that was read: the same little work for everybody, after which each
/// page has been touched and is known to be the right one.
#[derive(Default, Debug)]
pub struct FirstWords {
    wrong: u64,
    bytes: u64,
}

impl FirstWords {
    /// At `bytes`, which are said to stand at `position`, the beginning of a page.
    pub fn at(&mut self, bytes: &[u8], position: u64) {
        let pages = (position..).step_by(PAGE).zip(bytes.chunks(PAGE));
        for (position, page) in pages {
            let word = page.first_chunk().map_or(!word_at(position), |&word| u64::from_le_bytes(word));
            self.wrong |= word ^ word_at(position);
        }
        self.bytes += bytes.len() as u64;
    }

    /// So many bytes have been looked at, and all were right.
    pub fn expect(&self, bytes: u64) -> Result<(), Unmeasured> {
        if self.wrong != 0 {
            return Err(Unmeasured::Failed("what was read is not what stands there".to_owned()));
        }
        if self.bytes != bytes {
            return Err(Unmeasured::Failed(format!("{} of {bytes} bytes were read", self.bytes)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_scratch_file_has_its_content_and_no_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let scratch = Scratch::new(folder.path(), 2 << 20).expect("a file");
        assert_eq!(std::fs::read_dir(folder.path()).expect("it is there").count(), 0);
        let mut bytes = Vec::new();
        File::open(scratch.path()).expect("by its path").read_to_end(&mut bytes).expect("it is read");
        assert_eq!(bytes.len() as u64, scratch.bytes());
        assert!(is_from(&bytes, 0) && is_from(&bytes[(1 << 20) + 4096..], (1 << 20) + 4096));
        assert!(!is_from(&bytes[8..], 0) && !is_from(&[], 0));
        let mut look = FirstWords::default();
        look.at(&bytes[4096..], 4096);
        assert!(look.expect(scratch.bytes() - 4096).is_ok() && look.expect(scratch.bytes()).is_err());
        look.at(&bytes[4096..], 8192);
        assert!(look.expect(2 * (scratch.bytes() - 4096)).is_err());
    }

    #[test]
    fn a_folder_that_is_not_there_is_named_with_a_remedy() {
        let wrong = Scratch::new(Path::new("no/such/folder"), 1 << 20).err().expect("it cannot be made");
        assert!(
            wrong.to_string().contains("no/such/folder") && wrong.to_string().contains("--scratch"),
            "{wrong}"
        );
    }
}
