//! Owner: a cache on behalf of viewers in other processes.
//!
//! ```text
//!   viewer: attach(a duplicate of its descriptor) --> we open the very same file through that,
//!                                                     with a description of our own
//!           fill, advance, revalidate(handle)   --> the paths of the cache, with that handle's readahead
//! ```
//!
//! A handle is an open [`File`]: it keeps its mapping, so the record that a
//! viewer looks at stays what it is until the viewer has let go.
//!
//! What is done about others who may change a file is the owner's choice, for all files of viewers
//! ([`CacheOwner::with_outside`]). A look comes before a page is made ready, not before a viewer's hit: with a lease
//! nothing from before a change is found after it, but a page that is made ready while somebody writes stays
//! until the file is looked at again.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::arena::control::{Advice, Manners};
use crate::arena::{ArenaShare, Trust};
use crate::cache::{Cache, Claim, File, OpenOptions, Outside};
use crate::error::{Error, ErrorKind};
use crate::filemap::touch;
use crate::lease::NoLease;
use crate::readahead::Hint;
use crate::serve::{Attached, FileMode, FileName, House, Owner, Writers};
use crate::sync::{Rank, RankedMutex};
use crate::units::{Frame, MappingId, PAGE_SIZE, PageIndex};
use crate::viewer::sys::Errno;

mod heat;
mod polite;

use heat::Heat;
pub use heat::HotFile;
use polite::{Polite, Wish};

/// A [`Cache`] as viewers' owner; see [`crate::serve::Service`].
#[derive(Debug)]
pub struct CacheOwner {
    cache: Cache,
    outside: Outside,
    files: RankedMutex<HashMap<u64, Attachment>>,
    /// What was done about others, by device and inode.
    modes: RankedMutex<BTreeMap<(u64, u64), FileMode>>,
    last: AtomicU64,
    heat: Heat,
    /// If what the kernel holds is left to it.
    polite: Option<Polite>,
}

/// A file as one viewer attached it.
#[derive(Clone, Debug)]
struct Attachment {
    file: Arc<File>,
    inode: (u64, u64),
    path: PathBuf,
    /// Whether it counts among those that can write.
    can_write: bool,
}

/// Of so many files it is remembered what was done about others.
const MODES_MAX: usize = 1000;

impl CacheOwner {
    /// Makes `cache` the owner.
    pub fn new(cache: Cache) -> Self {
        let files = RankedMutex::new(Rank::Viewer, HashMap::new());
        let modes = RankedMutex::new(Rank::Viewer, BTreeMap::new());
        let (outside, last) = (Outside::default(), AtomicU64::new(0));
        Self { cache, outside, files, modes, last, heat: Heat::new(), polite: None }
    }

    /// The same, which leaves files to the kernel until they have been read some times. Then they are copied out of its
    /// page cache while nobody waits, and taken over. So no read is slower than without us, and those of what is read
    /// once are not faster.
    #[must_use]
    pub fn polite(mut self) -> Self {
        self.polite = Some(Polite::new());
        self
    }

    /// The same, which opens viewers' files so. A viewer's process that itself opens such a file for writing waits for
    /// the owner then, as any other does.
    #[must_use]
    pub fn with_outside(mut self, outside: Outside) -> Self {
        self.outside = outside;
        self
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The files that viewers read most, of those they attached last; at most `most`, hottest first. For who watches:
    /// it costs some ten nanoseconds for each folio that is cached of these files.
    pub fn hottest(&self, most: usize) -> Vec<HotFile> {
        let hottest = self.heat.hottest(most).into_iter();
        hottest
            .map(|(id, name, heard)| HotFile { name, heard, cached_bytes: self.cached_bytes(id) })
            .collect()
    }

    /// Bytes that are cached of a file that some viewer has open.
    fn cached_bytes(&self, id: MappingId) -> Option<u64> {
        let open = self
            .files
            .lock()
            .values()
            .map(|known| &known.file)
            .find(|file| file.record().1 == id)
            .cloned()?;
        let residency = open.residency(0, u64::MAX).ok()?;
        Some(residency.cached_pages * PAGE_SIZE as u64)
    }

    fn file(&self, handle: u64) -> Result<Arc<File>, Errno> {
        self.files.lock().get(&handle).map(|known| Arc::clone(&known.file)).ok_or(Errno(libc::EBADF))
    }

    /// A handle's file, unless its viewer is not to believe what it would find.
    fn trusted(&self, handle: u64) -> Result<Arc<File>, Errno> {
        let file = self.file(handle)?;
        if file.trust() == Trust::Kernel { Err(Errno::TXTBSY) } else { Ok(file) }
    }

    /// A handle of that file, if it is attached.
    fn of_inode(&self, inode: (u64, u64)) -> Option<Arc<File>> {
        let files = self.files.lock();
        files.values().find(|known| known.inode == inode).map(|known| Arc::clone(&known.file))
    }

    /// Copies a file out of the kernel's cache. Meanwhile it is attached, by nobody: who is about to write it makes
    /// that nobody believes the copy.
    fn copy(&self, wish: &Wish, house: &dyn House) -> crate::Result<()> {
        let path = format!("/proc/self/fd/{}", wish.file().as_raw_fd());
        let file = Arc::new(self.cache.open_with(&path, OpenOptions::new().outside(self.outside))?);
        file.read_by_kernels_cache();
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let known =
            Attachment { file: Arc::clone(&file), inode: wish.name(), path: path.into(), can_write: false };
        self.files.lock().insert(handle, known);
        let done = wish.steps().take_while(|_| house.goes_on()).try_for_each(|step| {
            let begun = Instant::now();
            file.make_ready(step.start, (step.end - step.start) as usize)?;
            if house.has_viewers() {
                sleep(polite::rest_after(begun.elapsed()));
            }
            Ok(())
        });
        let known = self.files.lock().remove(&handle);
        drop(known); // outside the lock
        done
    }

    fn note_mode(&self, known: &Attachment, trust: Trust, why: String) {
        let mut modes = self.modes.lock();
        if modes.len() < MODES_MAX || modes.contains_key(&known.inode) {
            modes.insert(known.inode, FileMode { path: known.path.clone(), trust, why });
        }
    }
}

/// Why viewers went to the kernel where somebody writes.
const WRITTEN: &str = "somebody writes the file, or has it open for writing";

/// Why no more was done than was.
fn why(trust: Trust, no_lease: NoLease, claim: Claim) -> String {
    match (trust, no_lease) {
        (Trust::Sure, _) => String::new(),
        (Trust::Kernel, _) => WRITTEN.into(),
        (Trust::Looked, _) if claim == Claim::CanWrite => "the program has the file open for writing".into(),
        (_, no_lease) => no_lease.to_string(),
    }
}

fn errno(error: &Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(match error.kind() {
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::Open => libc::EINVAL,
        _ => libc::EIO,
    }))
}

impl Owner for CacheOwner {
    fn arena(&self) -> ArenaShare<'_> {
        self.cache.share()
    }

    fn about_to_stop(&self) {
        self.cache.give_up_leases();
    }

    fn attach(&self, file: OwnedFd, name: FileName) -> Result<Attached, Errno> {
        let FileName { device, inode } = name;
        let options = OpenOptions::new().outside(self.outside);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_else(|_| path.clone().into());
        let opened = self.cache.open_with(path, options).map_err(|e| errno(&e))?;
        drop(file); // it is the viewer's, too: locks and leases that it holds end with its last duplicate
        let file = opened;
        if !file.is_inode(device, inode) {
            return Err(Errno(libc::ESTALE));
        }
        if self.polite.as_ref().is_some_and(|polite| polite.is_ours((device, inode))) {
            file.read_by_kernels_cache();
        }
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (cell, id) = file.record();
        self.heat.attached(id, name.clone());
        let inode = (device, inode);
        let known = Attachment { file: Arc::new(file), inode, path: name, can_write: false };
        self.files.lock().insert(handle, known);
        Ok(Attached { handle, cell, id })
    }

    fn admit(&self, handle: u64, viewers: Writers) -> Result<(), Errno> {
        let known = self.files.lock().get(&handle).cloned().ok_or(Errno(libc::EBADF))?;
        let claim = match viewers {
            Writers::None => Claim::Reads,
            Writers::Silent => Claim::CanWrite,
            Writers::Writing => Claim::Writes,
        };
        let (trust, no_lease) = known.file.admit(claim).map_err(|e| errno(&e))?;
        self.note_mode(&known, trust, why(trust, no_lease, claim));
        if trust == Trust::Kernel {
            return Err(Errno::TXTBSY);
        }
        if let Some(known) = self.files.lock().get_mut(&handle) {
            known.can_write = claim == Claim::CanWrite;
        }
        Ok(())
    }

    fn sure_for(&self) -> Duration {
        self.cache.leases_seen_for() // records say that they are sure only where there is a lease
    }

    fn writer_opened(&self, device: u64, inode: u64) {
        if let Some(file) = self.of_inode((device, inode)) {
            file.expect_writer();
        }
    }

    fn writing(&self, device: u64, inode: u64) {
        if let Some(file) = self.of_inode((device, inode)) {
            file.give_way_to_writer();
        }
    }

    fn modes(&self) -> Vec<FileMode> {
        self.modes.lock().values().cloned().collect()
    }

    fn manners(&self) -> Manners {
        self.polite.as_ref().map_or(Manners::default(), |_| polite::MANNERS)
    }

    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, name: FileName, spent: bool) -> Option<u64> {
        let room = self.cache.arena().bound() / 4;
        self.polite.as_ref()?.judge(file, (name.device, name.inode), spent, room)
    }

    fn prepare(&self, house: &dyn House) {
        let Some(polite) = &self.polite else { return };
        while let Some(wish) = polite.next_wish() {
            let (device, inode) = wish.name();
            let mut done = false;
            house.while_attached(device, inode, &mut |is_written| {
                done = !is_written && self.copy(&wish, house).is_ok();
            });
            polite.end(&wish, done);
            if done {
                self.cache.share().control().control().note_taken(device, inode);
            }
        }
    }

    fn fill(&self, handle: u64, position: u64, len: u64, uncached: bool) -> Result<(), Errno> {
        let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        let file = self.trusted(handle)?;
        self.heat.add(file.record().1);
        let ready = if uncached && file.can_drop_behind() {
            file.make_ready_uncached(position, len)
        } else {
            file.make_ready(position, len)
        };
        ready.map_err(|e| errno(&e))
    }

    fn advance(&self, handle: u64, page: PageIndex, uncached: bool) {
        if let Ok(file) = self.trusted(handle) {
            file.advance(page, uncached);
        }
    }

    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        let file = self.trusted(handle)?;
        let done = match advice {
            Advice::Normal => file.advise(Hint::Normal),
            Advice::Random => file.advise(Hint::Random),
            Advice::Sequential => file.advise(Hint::Sequential),
            Advice::NoReuse => file.advise(Hint::NoReuse),
            Advice::WillNeed => file.will_need(position, len).map(drop),
            Advice::DontNeed => file.dont_need(position, len).map(drop),
            Advice::Passed => file.end_uncached(position, len),
        };
        done.map_err(|e| errno(&e))
    }

    fn revalidate(&self, handle: u64) -> Result<u64, Errno> {
        let file = self.trusted(handle)?;
        file.revalidate().map_err(|e| errno(&e))?;
        Ok(file.len())
    }

    fn detach(&self, handle: u64) {
        let Some(gone) = self.files.lock().remove(&handle) else { return };
        if gone.file.trust() == Trust::Kernel {
            self.note_mode(&gone, Trust::Kernel, WRITTEN.into());
        }
        if gone.can_write {
            gone.file.opener_left();
        }
        drop(gone); // outside the lock: it may be the file's last handle
    }

    fn touched(&self, frame: Frame) {
        let grown = self.cache.arena().view().grown();
        touch(grown, frame);
        if let Some(descriptor) = grown.descriptor(frame) {
            self.heat.add(descriptor.mapping());
        }
    }
}
