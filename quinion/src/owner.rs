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
//! A file is served while somebody says that it stays as it is (`owner/guarantee.rs`): the kernel, by a lease; or
//! whoever declared it. Others are left to the kernel, unless the owner was asked to serve them by a look at their
//! times.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::arena::control::{Advice, Manners};
use crate::arena::{ArenaShare, Trust};
use crate::cache::{Cache, File, OpenOptions, Outside};
use crate::error::{Error, ErrorKind};
use crate::filemap::touch;
use crate::lease::NoLease;
use crate::readahead::Hint;
use crate::serve::{Attached, FileMode, FileName, House, Owner};
use crate::sync::{Rank, RankedMutex};
use crate::units::{Frame, MappingId, PAGE_SIZE, PageIndex};
use crate::viewer::sys::Errno;

mod guarantee;
mod heat;
mod polite;

use guarantee::Unserved;
pub use guarantee::{Coherence, ServeRules};
use heat::Heat;
pub use heat::HotFile;
use polite::{Polite, Wish};

/// A [`Cache`] as viewers' owner; see [`crate::serve::Service`].
#[derive(Debug)]
pub struct CacheOwner {
    cache: Cache,
    rules: ServeRules,
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
}

/// How often, and after what time, a file that is to be let go is looked at again.
const LET_GO_LOOKS: u32 = 20;
const LET_GO_PAUSE: Duration = Duration::from_millis(5);

/// Of so many files it is remembered what was done about others.
const MODES_MAX: usize = 1000;

impl CacheOwner {
    /// Makes `cache` the owner.
    pub fn new(cache: Cache) -> Self {
        let files = RankedMutex::new(Rank::Viewer, HashMap::new());
        let modes = RankedMutex::new(Rank::Viewer, BTreeMap::new());
        let (rules, last) = (ServeRules::default(), AtomicU64::new(0));
        Self { cache, rules, files, modes, last, heat: Heat::new(), polite: None }
    }

    /// The same, which leaves files to the kernel until they have been read some times. Then they are copied out of its
    /// page cache while nobody waits, and taken over. So no read is slower than without us, and those of what is read
    /// once are not faster.
    #[must_use]
    pub fn polite(mut self) -> Self {
        self.polite = Some(Polite::new());
        self
    }

    /// The same, which serves files by these rules. By the default files are served that have a lease.
    #[must_use]
    pub fn with_rules(mut self, rules: ServeRules) -> Self {
        self.rules = rules;
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

    /// Copies a file out of the kernel's cache, if it can be served. Meanwhile it is attached, by nobody: what is
    /// copied is believed by nobody when the lease has ended. Whether all of it was.
    fn copy(&self, wish: &Wish, house: &dyn House) -> bool {
        let path = format!("/proc/self/fd/{}", wish.file().as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_default();
        let Ok(known) = self.open(&path, name, wish.name()) else { return false };
        let file = Arc::clone(&known.file);
        file.read_by_kernels_cache();
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.files.lock().insert(handle, known);
        let done = wish.steps().all(|step| {
            let begun = Instant::now();
            let goes_on = house.goes_on() && self.trusted(handle).is_ok();
            let done = goes_on && file.make_ready(step.start, (step.end - step.start) as usize).is_ok();
            if done && house.has_viewers() {
                sleep(polite::rest_after(begun.elapsed()));
            }
            done
        });
        let known = self.files.lock().remove(&handle);
        drop((known, file)); // outside the lock
        done
    }

    /// Opens the file behind `path`, which a viewer calls `name`, if it may be served; says in its record how far it
    /// may be believed, and notes what was done.
    fn open(&self, path: &str, name: PathBuf, inode: (u64, u64)) -> Result<Attachment, Errno> {
        let unserved = |unserved: Unserved| {
            self.note_mode(&name, inode, Trust::Kernel, unserved.to_string());
            if unserved == Unserved::Gone { Errno(libc::ESTALE) } else { Errno::OPNOTSUPP }
        };
        let without_lease = self.rules.look(path, &name, inode).map_err(unserved)?;
        // What never changes is looked at once, here: it may be another file of the same number.
        let outside = if without_lease == Trust::Immutable { Outside::Check } else { Outside::Lease };
        let options = OpenOptions::new().outside(outside).unseen();
        let file = Arc::new(self.cache.open_with(path, options).map_err(|error| errno(&error))?);
        if !file.is_inode(inode.0, inode.1) {
            return Err(unserved(Unserved::Gone));
        }
        if file.has_unwritten_extents() == Some(true) {
            return Err(unserved(Unserved::Unwritten));
        }
        let (trust, no_lease) = file.admit(without_lease).map_err(|error| errno(&error))?;
        let why = if matches!(trust, Trust::Sure | Trust::Immutable) {
            String::new()
        } else {
            no_lease.to_string()
        };
        self.note_mode(&name, inode, trust, why);
        match trust {
            Trust::Kernel if no_lease.passes() || no_lease == NoLease::WeWrite => Err(Errno::TXTBSY),
            Trust::Kernel => Err(Errno::OPNOTSUPP),
            _ => Ok(Attachment { file, inode, path: name }),
        }
    }

    fn note_mode(&self, path: &Path, inode: (u64, u64), trust: Trust, why: String) {
        let mut modes = self.modes.lock();
        if modes.len() < MODES_MAX || modes.contains_key(&inode) {
            modes.insert(inode, FileMode { path: path.to_owned(), trust, why });
        }
    }
}

/// Why viewers went to the kernel where somebody came to write.
const WRITTEN: &str = "somebody writes the file, or has it open for writing";

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
        let (path, inode) = (format!("/proc/self/fd/{}", file.as_raw_fd()), (name.device, name.inode));
        let name = std::fs::read_link(&path).unwrap_or_else(|_| path.clone().into());
        let known = self.open(&path, name, inode)?;
        drop(file); // it is the viewer's, too: locks that it holds end with its last duplicate
        if self.polite.as_ref().is_some_and(|polite| polite.is_ours(inode)) {
            known.file.read_by_kernels_cache();
        }
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (cell, id) = known.file.record();
        self.heat.attached(id, known.path.clone());
        self.files.lock().insert(handle, known);
        Ok(Attached { handle, cell, id })
    }

    fn sure_for(&self) -> Duration {
        self.cache.leases_seen_for() // records say that they are sure only where there is a lease
    }

    fn writer_opened(&self, device: u64, inode: u64, cuts: bool) {
        let Some(file) = self.of_inode((device, inode)) else { return };
        if cuts {
            file.give_way_to_cut();
        } else {
            file.expect_writer(self.rules.without_lease());
        }
    }

    fn let_go(&self, device: u64, inode: u64) {
        let mut gone = Vec::new();
        self.files.lock().retain(|_, known| {
            let stays = known.inode != (device, inode);
            if !stays {
                gone.push(known.clone());
            }
            stays
        });
        if let Some(known) = gone.first() {
            known.file.give_way_to_cut(); // a viewer that looks from here on finds that it may believe nothing
            self.note_mode(&known.path, known.inode, Trust::Kernel, "a program wants a lease on it".into());
        }
        drop(gone);
        if let Some(polite) = &self.polite {
            polite.forget((device, inode));
        }
        // A question for it that is being answered still, or a copy, keeps it a moment longer.
        for _ in 0..LET_GO_LOOKS {
            if self.cache.forget_idle(device, inode) {
                return;
            }
            sleep(LET_GO_PAUSE);
        }
    }

    fn modes(&self) -> Vec<FileMode> {
        self.modes.lock().values().cloned().collect()
    }

    fn manners(&self) -> Manners {
        let manners = self.polite.as_ref().map_or(Manners::default(), |_| polite::MANNERS);
        Manners {
            looks_at_times: self.rules.coherence == Coherence::Times,
            any_file_system: self.rules.any_file_system,
            ..manners
        }
    }

    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, name: FileName, spent: bool) -> Option<u64> {
        let room = self.cache.arena().bound() / 4;
        let (polite, inode) = (self.polite.as_ref()?, (name.device, name.inode));
        // What is not served anyway is not opened; who attaches it is told why.
        self.rules.look(&format!("/proc/self/fd/{}", file.as_raw_fd()), Path::new(""), inode).ok()?;
        polite.judge(file, inode, spent, room)
    }

    fn prepare(&self, house: &dyn House) {
        let Some(polite) = &self.polite else { return };
        while let Some(wish) = polite.next_wish() {
            let (device, inode) = wish.name();
            let mut done = false;
            house.while_attached(device, inode, &mut || done = self.copy(&wish, house));
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
            self.note_mode(&gone.path, gone.inode, Trust::Kernel, WRITTEN.into());
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
