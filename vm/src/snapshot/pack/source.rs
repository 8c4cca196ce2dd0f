//! Source: where the stored bytes of one pack are: a file of the system, or a file of a cache, such as an object.
//!
//! ```text
//!   LocalPack    past the kernel's page cache, unless that holds half of the pack or more     as layers are read
//!   CachedPack   a cache's file, by uncached reads that do not wait for memory
//! ```
//!
//! Compressed bytes are read once for each time that their chunk is decompressed, and the cache keeps the chunk's
//! pages: so no cache keeps them as well.
//!
//! **No wait for memory.** The reader of a [`CachedPack`] is itself a fill of a cache, perhaps of the same one: pages
//! of that fill are locked until it ends. If such fills had all memory and each waited for memory to read by, none
//! would end. So a read here waits for bytes and never for memory: it takes what can be had at once, looks again after
//! a moment, and is an error after [`STALL_MAX`] in which nothing came. (A page that could not be had so is unreadable
//! for the VM that wants it. Before that all memory has to be pinned, or on its way to others, for that long.)
//!
//! **Whose handle it is.** A cache keeps a backend as long as it has pages of it, and a handle keeps its cache. So a
//! [`CachedPack`] has no handle, but looks for one that the open snapshot has: else the cache would keep itself.
//!
//! Invariant: a read fills all of its buffer, or is an error.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use quinion::error::Result;
use quinion::{ErrorKind, File, ReadOptions};

use super::super::FileIdentity;
use super::super::layers::LayerFile;

/// How long a read waits in which nothing comes. Stores have deadlines of their own, which are shorter.
const STALL_MAX: Duration = Duration::from_secs(120);
/// The first pause between two looks, and the longest.
const PAUSE: std::ops::Range<Duration> = Duration::from_micros(50)..Duration::from_millis(2);

/// The bytes of one pack.
pub(super) trait PackSource: Send + Sync + fmt::Debug {
    /// The pack's size in bytes when it was opened.
    fn bytes(&self) -> u64;
    /// Fills `into` from `position` on. May block.
    fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()>;
    /// Whether it is not what it was when it was opened.
    fn has_changed(&self) -> bool;
    /// The file that it is, if it can be told from others.
    fn identity(&self) -> Option<FileIdentity>;
    /// The pack's name for messages.
    fn name(&self) -> String;
}

/// A pack in a file of the system.
#[derive(Debug)]
pub(super) struct LocalPack(LayerFile);

impl LocalPack {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let mut file = LayerFile::open(path)?;
        file.choose_way_of_all();
        Ok(Self(file))
    }
}

impl PackSource for LocalPack {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        self.0.read_exact(into, position)
    }
    fn has_changed(&self) -> bool {
        self.0.has_changed()
    }
    fn identity(&self) -> Option<FileIdentity> {
        self.0.identity()
    }
    fn name(&self) -> String {
        self.0.path().display().to_string()
    }
}

/// A pack in a file of a cache.
#[derive(Debug)]
pub(super) struct CachedPack {
    file: Weak<File>,
    name: String,
    bytes: u64,
    /// [`STALL_MAX`]; tests have less time.
    pub(super) stall_max: Duration,
}

/// A handle of `file` whose reads leave nothing in the cache.
pub(super) fn uncached_handle(file: &File) -> Arc<File> {
    let file = file.clone();
    // Refused by backends whose bytes are dear: they stay in the cache then.
    let _ = file.set_uncached(true);
    Arc::new(file)
}

impl CachedPack {
    /// A pack that can be read as long as `file` is there.
    pub(super) fn new(file: &Arc<File>) -> Self {
        let name = file.path().map_or("the pack".to_owned(), |path| path.display().to_string());
        Self { file: Arc::downgrade(file), name, bytes: file.len(), stall_max: STALL_MAX }
    }
}

impl PackSource for CachedPack {
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        let closed = || io::Error::other("the snapshot was closed");
        let options = ReadOptions::new().nowait(true);
        let (mut done, mut pause, mut since) = (0, PAUSE.start, Instant::now());
        while done < into.len() {
            // Not kept in between: the end of the snapshot ends the read, and the cache may go then.
            let file = self.file.upgrade().ok_or_else(closed)?;
            let read = file.read_at_with(&mut into[done..], position + done as u64, options);
            drop(file);
            match read {
                Ok(0) => {
                    return Err(io::Error::other(format!("{} was cut while it was served", self.name())));
                }
                Ok(read) => {
                    done += read;
                    (pause, since) = (PAUSE.start, Instant::now());
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) if since.elapsed() > self.stall_max => {
                    let why = format!(
                        "byte {} of {} did not come within {:?}: its store does not answer, or all memory of the \
                         cache is pinned",
                        position + done as u64,
                        self.name,
                        self.stall_max
                    );
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Err(_) => {
                    thread::sleep(pause);
                    pause = (2 * pause).min(PAUSE.end);
                }
            }
        }
        Ok(())
    }
    fn has_changed(&self) -> bool {
        self.file.upgrade().is_none_or(|file| file.len() != self.bytes)
    }
    fn identity(&self) -> Option<FileIdentity> {
        None
    }
    fn name(&self) -> String {
        self.name.clone()
    }
}

/// A pack in memory: of tests and of the fuzzer.
impl PackSource for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }
    fn read_exact(&self, into: &mut [u8], position: u64) -> io::Result<()> {
        let from = usize::try_from(position).ok().and_then(|at| self.get(at..)?.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
    fn has_changed(&self) -> bool {
        false
    }
    fn identity(&self) -> Option<FileIdentity> {
        None
    }
    fn name(&self) -> String {
        "the pack".to_owned()
    }
}
