//! Snapshot: the file that VMs are restored from, as an ordinary file of the cache, and whether it is still the same.
//!
//! ```text
//!   open      the file; a moment, if it was written just now, so that the next change shows;
//!             the cache opens the very same one by its descriptor; size and time noted; fingerprint;
//!             read through the kernel's page cache if that holds half of it or more
//!   answer    pin the bytes, or copy what the kernel holds  ->  look at size and time  ->  supply them
//! ```
//!
//! **What the kernel holds** is copied from its page cache into a buffer, and from there into the VM: both are as fast
//! as memory, and cost this cache neither room nor time. Only for a snapshot of which the kernel held half or more in
//! the beginning: else each try would have the kernel read ahead what this cache reads past it.
//!
//! All VMs share what is cached of it. The check comes **after** the bytes are held: if the file is then what it was in
//! the beginning, so are they. Once a check finds it changed, or cut, nothing of it is supplied to any VM: a VM with
//! half of its memory from one snapshot and half from another is worse than none.
//!
//! A snapshot may be a base and diffs, in files of their own (`snapshot/layers.rs`). Each of them is checked, and the
//! fingerprint covers where the diffs have data, and pages of that. Or it is a pack (`snapshot/pack.rs`), which is seen
//! by its first and last bytes (`snapshot/recognition.rs`): each file of it is checked, and its identity is that of the
//! flat snapshot that it was made of.
//!
//! A snapshot that is removed, or replaced under its name, is no other snapshot: its VMs go on, and new VMs get the old
//! one until the server is started anew.
//!
//! A file that is open in the cache already, as an object of a store, has no time that could be looked at. Its backend
//! says that it has changed by the error of a read (`ESTALE`), and pages that came before are those of the version that
//! was opened. That error is kept: from then on the snapshot has changed, for all VMs.
//!
//! Not an invariant: that each change is seen. A program that sets the file's time back is not detected, nor, at once,
//! a store to a mapping of it (the kernel sets the time of these later).

use std::fs;
use std::io::{IoSliceMut, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use quinion::ErrorKind;
use quinion::backend::Backend;
use quinion::error::{Error, Result};
use quinion::internals::hooks::{cannot_open, invalid_input};
use quinion::internals::units::PAGE_SIZE;
use quinion::{Cache, File, Image};
use rustix::fs::{Advice, Mode, OFlags, fadvise};
use rustix::io::{Errno, ReadWriteFlags};

use super::PeerError;
use super::fault_record::{FaultRecord, Fingerprint, ImageIdentity};

mod layers;
#[cfg(feature = "pack")]
pub mod pack;
mod recognition;

/// The clocks of file systems tick ten times in that time, or more often.
const SETTLED: Duration = Duration::from_millis(40);
/// The name in errors of a snapshot that was given none.
pub(super) const UNNAMED: &str = "the snapshot";
/// Pages that are looked at for the fingerprint.
const SAMPLES: u64 = 32;

#[derive(Debug)]
pub(super) struct Snapshot {
    file: File,
    /// As errors name it.
    name: String,
    /// The file itself, if there is one; size and time of its last change, as they were in the beginning.
    outside: Option<(fs::File, SnapshotVersion)>,
    /// The snapshot's parts, if it is no flat file.
    assembled: Option<Arc<dyn Assembled>>,
    /// Handles of the cache by which its parts are read, if they are the cache's files: closed with the snapshot.
    files: Vec<Arc<File>>,
    identity: ImageIdentity,
    /// Whether the error of a read said that it has changed.
    read_says_changed: AtomicBool,
    /// Whether the kernel's page cache held half of it or more, and says whether it holds a page still.
    is_held: AtomicBool,
}

/// A snapshot that is put together: from a base and diffs, or from the chunks of a pack.
pub(super) trait Assembled: Backend {
    /// The name of a file of it that is not what it was when it was opened.
    fn changed(&self) -> Option<String>;
    /// As [`Snapshot::copy_held`].
    fn copy_held(&self, into: &mut [u8], offset: u64) -> bool;
    /// As [`Snapshot::files`].
    fn files(&self) -> Option<Vec<FileIdentity>>;
}

/// Size and time of the last change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SnapshotVersion {
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl SnapshotVersion {
    fn bytes(self) -> u64 {
        self.size
    }
}

/// Which file a snapshot or a part of it is read from, and in which version: what two servers compare before one takes
/// over from the other. A [`Fingerprint`] looks at some pages only, and two snapshots of one VM may have these in
/// common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct FileIdentity {
    device: u64,
    inode: u64,
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl FileIdentity {
    /// The identity of `file`, of whose version `opened` was noted.
    fn of(file: &fs::File, opened: SnapshotVersion) -> std::io::Result<Self> {
        let status = rustix::fs::fstat(file)?;
        // A device is another by its own number, whichever file names it.
        let device = if status.st_rdev == 0 { status.st_dev } else { status.st_rdev };
        let SnapshotVersion { size, seconds, nanoseconds } = opened;
        Ok(Self { device, inode: status.st_ino, size, seconds, nanoseconds })
    }
}

/// The snapshot has changed, or the layer of it that has this name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SnapshotChanged(pub(super) String);

impl From<SnapshotChanged> for PeerError {
    fn from(SnapshotChanged(name): SnapshotChanged) -> Self {
        Self::SnapshotChanged { name }
    }
}

impl Snapshot {
    pub(super) fn open(cache: &Cache, path: &Path) -> Result<Self> {
        let wrong = |source: std::io::Error| cannot_open(path, source);
        let of_bytes = |kind: fs::FileType| kind.is_file() || kind.is_block_device();
        let Some(raw) = open_if(path, of_bytes).map_err(wrong)? else {
            // By its own name, and not by that of a descriptor.
            cache.open(path)?;
            return Err(replaced(path));
        };
        if is_packed(&raw).map_err(wrong)? {
            return Self::open_pack(cache, path);
        }
        let known = settled(&raw).map_err(wrong)?;
        let file = cache.open(format!("/proc/self/fd/{}", raw.as_raw_fd()))?;
        if file.is_empty() {
            let text =
                format!("{}: the snapshot is empty; name the file with the VM's memory", path.display());
            return Err(invalid_input(text));
        }
        let is_held = file.use_kernel_cache_if_warm()?;
        let snapshot = Self::of(file, &path.display().to_string(), Some((raw, known)))?;
        Ok(Self { is_held: AtomicBool::new(is_held), ..snapshot })
    }

    /// As [`Snapshot::open`], of a base and the diffs above it, each above those before it.
    pub(super) fn open_layers(cache: &Cache, paths: &[PathBuf]) -> Result<Self> {
        if let [path] = paths {
            return Self::open(cache, path);
        }
        let layers = layers::open(paths)?;
        let file = cache.open_backend(Arc::clone(&layers) as Arc<dyn Backend>)?;
        let mut sum = Fingerprint::new();
        // Evenly spread pages of the snapshot may all be the base's.
        let parts: Vec<Range<u64>> = layers.source().diff_parts().collect();
        for part in &parts {
            sum.add(&part.start.to_le_bytes());
            sum.add(&part.end.to_le_bytes());
        }
        for samples in parts.chunks(parts.len().div_ceil(SAMPLES as usize).max(1)) {
            add_page(&file, samples[0].start, &mut sum)?;
        }
        let snapshot = Self::of(file, &paths[0].display().to_string(), None)?;
        sum.add(&snapshot.identity.fingerprint.to_le_bytes());
        let identity = ImageIdentity { fingerprint: sum.value(), ..snapshot.identity };
        Ok(Self { assembled: Some(layers), identity, ..snapshot })
    }

    /// As [`Snapshot::open`], of a file of `cache`, which may be a pack; `packs` are those that it may refer to.
    pub(super) fn of_file(cache: &Cache, file: &File, name: &str, packs: &[File]) -> Result<Self> {
        let read = |into: &mut [u8], position| file.read_exact_at(into, position);
        if recognition::is_pack(file.len(), read)? {
            return Self::of_pack(cache, file, name, packs);
        }
        Self::of(file.clone(), name, None)
    }

    #[cfg(feature = "pack")]
    fn open_pack(cache: &Cache, path: &Path) -> Result<Self> {
        Self::of_assembled(cache, pack::open(path)?, &path.display().to_string())
    }

    #[cfg(not(feature = "pack"))]
    fn open_pack(_: &Cache, path: &Path) -> Result<Self> {
        Err(no_packs(path))
    }

    #[cfg(feature = "pack")]
    fn of_pack(cache: &Cache, file: &File, name: &str, packs: &[File]) -> Result<Self> {
        let pack::PackInCache { backend, files } = pack::open_file(file, packs)?;
        Ok(Self { files, ..Self::of_assembled(cache, backend, name)? })
    }

    #[cfg(not(feature = "pack"))]
    fn of_pack(_: &Cache, _: &File, name: &str, _: &[File]) -> Result<Self> {
        Err(no_packs(Path::new(name)))
    }

    #[cfg(feature = "pack")]
    fn of_assembled(cache: &Cache, assembled: Arc<dyn Assembled>, name: &str) -> Result<Self> {
        let file = cache.open_backend(Arc::clone(&assembled) as Arc<dyn Backend>)?;
        Ok(Self { assembled: Some(assembled), ..Self::of(file, name, None)? })
    }

    /// As [`Snapshot::open`], of an open file that errors name so; `outside` is what others may change.
    pub(super) fn of(file: File, name: &str, outside: Option<(fs::File, SnapshotVersion)>) -> Result<Self> {
        let bytes = file.len();
        if bytes == 0 {
            let text = format!("{name}: the snapshot is empty; name the file with the VM's memory");
            return Err(invalid_input(text));
        }
        let fingerprint = fingerprint(&file, bytes)?;
        Ok(Self {
            file,
            name: name.to_owned(),
            outside,
            assembled: None,
            files: Vec::new(),
            identity: ImageIdentity { bytes, fingerprint },
            read_says_changed: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
        })
    }

    /// Checks that it may be the memory of a VM.
    pub(super) fn check_is_memory(&self) -> Result<()> {
        let (name, bytes) = (&self.name, self.identity.bytes);
        if is_record(&self.file) {
            return Err(invalid_input(format!(
                "{name}: this is a record of page faults, and no snapshot; name the file with the VM's memory, and the \
                 record by --replay"
            )));
        }
        if !bytes.is_multiple_of(PAGE_SIZE as u64) {
            return Err(invalid_input(format!(
                "{name}: the snapshot has {bytes} bytes, which are no whole pages of {PAGE_SIZE} bytes, as a VM's \
                 memory is: it was cut, or is another file; copy it again, or name the file with the VM's memory"
            )));
        }
        Ok(())
    }

    /// Copies the bytes at `offset` from the kernel's page cache, if that holds all of them. Waits for no device.
    pub(super) fn copy_held(&self, into: &mut [u8], offset: u64) -> bool {
        match (&self.assembled, &self.outside) {
            (Some(assembled), _) => assembled.copy_held(into, offset),
            (None, Some((raw, _))) => copy_held(raw, &self.is_held, into, offset),
            (None, None) => false,
        }
    }

    /// A handle for one VM, with readahead of its own.
    pub(super) fn file(&self) -> File {
        self.file.clone()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn identity(&self) -> ImageIdentity {
        self.identity
    }

    /// The files that it is read from, in their order; `None` if they cannot be told from others, as those of a store.
    pub(super) fn files(&self) -> Option<Vec<FileIdentity>> {
        match (&self.assembled, &self.outside) {
            (Some(assembled), _) => assembled.files(),
            (None, Some((raw, opened))) => FileIdentity::of(raw, *opened).ok().map(|file| vec![file]),
            (None, None) => None,
        }
    }

    /// `path` is where the snapshot was opened.
    pub(super) fn image(&self, cache: &Cache, path: &Path) -> Result<Image> {
        if let Some(assembled) = &self.assembled {
            let name = path.display().to_string();
            return Image::from_backend(cache, Arc::clone(assembled) as Arc<dyn Backend>, &name);
        }
        let image = Image::from_snapshot(cache, path)?;
        // Another file may have been put there in between.
        let wrong = |source: std::io::Error| cannot_open(path, source);
        let opened = image.snapshot().identity;
        if let Some((raw, _)) = &self.outside {
            let raw = raw.metadata().map_err(wrong)?;
            if (opened.device, opened.inode) == (raw.dev(), raw.ino()) && image.len() == self.identity.bytes {
                return Ok(image);
            }
        }
        Err(replaced(path))
    }

    /// Whether it is what it was: bytes that were held before this call are the snapshot's then.
    pub(super) fn assure(&self) -> std::result::Result<(), SnapshotChanged> {
        // Relaxed: bytes are those of the version that was opened, whichever thread finds out first.
        let is_as_read = !self.read_says_changed.load(Ordering::Relaxed);
        let is_same = match (&self.assembled, &self.outside) {
            (Some(assembled), _) => match assembled.changed() {
                Some(name) => return Err(SnapshotChanged(name)),
                None => is_as_read,
            },
            (None, Some((raw, before))) => file_version(raw).is_ok_and(|now| now == *before),
            (None, None) => is_as_read && self.file.len() == self.identity.bytes,
        };
        if is_same { Ok(()) } else { Err(SnapshotChanged(self.name.clone())) }
    }

    /// The change that a read has met, by which it got too few bytes.
    pub(super) fn change(&self) -> SnapshotChanged {
        self.assure().err().unwrap_or_else(|| SnapshotChanged(self.name.clone()))
    }

    /// Keeps the error of a read in mind, if it says that the snapshot has changed. Whether it does.
    pub(super) fn note_failure(&self, error: &Error) -> bool {
        let is_stale = is_stale(error);
        if is_stale {
            self.read_says_changed.store(true, Ordering::Relaxed);
        }
        is_stale
    }

    /// Whether a read may take as long as another machine likes: no worker waits for it.
    pub(super) fn reads_may_hang(&self) -> bool {
        self.outside.is_none() && (self.assembled.is_none() || !self.files.is_empty())
    }
}

/// Whether a backend says that the file is another by now (`ESTALE`), as one of objects does.
fn is_stale(error: &Error) -> bool {
    has_kind(error, std::io::ErrorKind::StaleNetworkFileHandle)
}

/// Whether bytes came that are not those which were stored, as of a damaged pack: another read brings the same.
pub(super) fn is_damage(error: &Error) -> bool {
    has_kind(error, std::io::ErrorKind::InvalidData)
}

fn has_kind(error: &Error, kind: std::io::ErrorKind) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source()).any(|error| {
        let error = error.downcast_ref::<std::io::Error>();
        error.is_some_and(|error| error.kind() == kind)
    })
}

/// Opens a file of a wanted kind for reading; `None` if it is of another. The kind is looked at before: the open of a
/// pipe would wait for a writer.
fn open_if(path: &Path, is_wanted: impl Fn(fs::FileType) -> bool) -> std::io::Result<Option<fs::File>> {
    let found = fs::File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    if !is_wanted(found.metadata()?.file_type()) {
        return Ok(None);
    }
    fs::File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map(Some)
}

/// Whether a file or a device is a pack, or is meant to be one.
fn is_packed(file: &fs::File) -> std::io::Result<bool> {
    // A device's metadata have no size.
    let bytes = (&*file).seek(SeekFrom::End(0))?;
    // The kernel would read ahead, and a small snapshot count as held by its page cache.
    let _ = fadvise(file, 0, None, Advice::Random);
    let is_packed = recognition::is_pack(bytes, |into, position| file.read_exact_at(into, position));
    let _ = fadvise(file, 0, None, Advice::Normal);
    is_packed
}

#[cfg(not(feature = "pack"))]
fn no_packs(path: &Path) -> Error {
    let path = path.display();
    invalid_input(format!(
        "{path}: this snapshot is a pack, and this program reads none; build it with the feature `pack` of quinion-vm"
    ))
}

fn replaced(path: &Path) -> Error {
    invalid_input(format!("{}: the snapshot was replaced while it was opened; try again", path.display()))
}

/// Fills `into` from the kernel's page cache, if that holds all of it; it is found not to work once at most.
fn copy_held(file: &fs::File, is_held: &AtomicBool, into: &mut [u8], offset: u64) -> bool {
    let mut done = 0;
    // Relaxed: a thread that finds out late makes a call too many.
    while is_held.load(Ordering::Relaxed) && done < into.len() {
        let rest = &mut [IoSliceMut::new(&mut into[done..])];
        match rustix::io::preadv2(file, rest, offset + done as u64, ReadWriteFlags::NOWAIT) {
            Ok(read @ 1..) => done += read,
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => is_held.store(false, Ordering::Relaxed),
            Ok(0) | Err(_) => return false,
        }
    }
    done == into.len()
}

/// As [`file_version`], of a file whose last change is so long ago that the next one carries another time. Waits for
/// that.
fn settled(file: &fs::File) -> std::io::Result<SnapshotVersion> {
    let young = |time: SystemTime| time.elapsed().ok().and_then(|age| SETTLED.checked_sub(age));
    // A file whose time lies in the future would be waited for without end.
    if let Some(rest) = young(file.metadata()?.modified()?) {
        std::thread::sleep(rest);
    }
    file_version(file)
}

fn file_version(file: &fs::File) -> std::io::Result<SnapshotVersion> {
    // Each answer makes this call; `metadata` makes one that costs a tenth more.
    let status = rustix::fs::fstat(file)?;
    Ok(SnapshotVersion {
        size: status.st_size.cast_unsigned(),
        seconds: status.st_mtime,
        nanoseconds: status.st_mtime_nsec.cast_signed(),
    })
}

/// Whether it is a record with a whole head. One that cannot be read is none: its page is an error of a fault.
fn is_record(file: &File) -> bool {
    let mut head = [0; FaultRecord::HEAD_BYTES];
    file.read_exact_at(&mut head, 0).is_ok() && FaultRecord::decode(&head, 0).is_ok()
}

fn fingerprint(file: &File, bytes: u64) -> Result<u64> {
    let pages = bytes.div_ceil(PAGE_SIZE as u64);
    let positions = (0..SAMPLES.min(pages)).map(|i| i * pages / SAMPLES.min(pages) * PAGE_SIZE as u64);
    // All of them are on their way before the first is waited for.
    for position in positions.clone() {
        file.will_need(position, PAGE_SIZE as u64)?;
    }
    let mut sum = Fingerprint::new();
    sum.add(&bytes.to_le_bytes());
    for position in positions {
        add_page(file, position, &mut sum)?;
    }
    Ok(sum.value())
}

fn add_page(file: &File, position: u64, sum: &mut Fingerprint) -> Result<()> {
    let mut page = vec![0; PAGE_SIZE];
    match file.read_at(&mut page, position) {
        Ok(read) => sum.add(&page[..read]),
        // A bad sector or a damaged chunk is an error of the fault that wants it, and no reason to serve no VM. A store
        // that fails has no number of the system, and may send the page the next time: then the sum would be another.
        Err(error)
            if error.kind() == ErrorKind::Io && (error.raw_os_error().is_some() || is_damage(&error)) =>
        {
            sum.add(b"unreadable");
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    fn cache() -> Cache {
        Cache::builder().memory(32 << 20).build().expect("a small cache")
    }

    fn written(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(bytes).expect("room for it");
        file
    }

    #[test]
    fn copies_have_one_fingerprint_and_others_another() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
        let (one, copy) = (written(&bytes), written(&bytes));
        let (shorter, mut other) = (written(&bytes[..299_999]), bytes);
        other[0] ^= 1;
        let other = written(&other);
        let cache = cache();
        let of = |file: &tempfile::NamedTempFile| {
            Snapshot::open(&cache, file.path()).expect("a snapshot").identity()
        };
        assert_eq!(of(&one), of(&copy));
        assert_ne!(of(&one), of(&other));
        assert_ne!(of(&one), of(&shorter));
    }

    #[test]
    fn a_change_and_a_cut_are_seen_and_a_removal_is_none() {
        let file = written(&[7; 100_000]);
        let snapshot = Snapshot::open(&cache(), file.path()).expect("a snapshot");
        assert_eq!(snapshot.assure(), Ok(()));
        let moved = file.path().with_extension("moved");
        fs::rename(file.path(), &moved).expect("same folder");
        fs::remove_file(&moved).expect("it was there");
        assert_eq!(snapshot.assure(), Ok(()));
        file.as_file().set_len(99_999).expect("it is ours");
        assert_eq!(snapshot.assure(), Err(SnapshotChanged(file.path().display().to_string())));

        let mut file = written(&[7; 100_000]);
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        file.as_file().set_modified(long_ago).expect("it is ours");
        let snapshot = Snapshot::open(&cache(), file.path()).expect("a snapshot");
        assert_eq!(snapshot.assure(), Ok(()));
        file.seek(SeekFrom::Start(5)).expect("inside");
        file.write_all(b"x").expect("room for it");
        assert_eq!(snapshot.assure(), Err(SnapshotChanged(file.path().display().to_string())));
    }

    #[test]
    fn an_empty_file_and_none_are_refused() {
        let refused = |path: &Path| Snapshot::open(&cache(), path).expect_err("no snapshot").to_string();
        assert!(refused(written(b"").path()).contains("empty"));
        assert!(refused(Path::new("/nowhere/at/all")).contains("/nowhere/at/all"));
    }

    /// A pipe without a writer, whose open for reading would wait for one.
    #[test]
    fn a_pipe_and_a_folder_are_refused_at_once_and_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).expect("it is new");
        let refused = |path: &Path| Snapshot::open(&cache(), path).expect_err("no snapshot").to_string();
        let text = refused(&pipe);
        assert!(text.contains("pipe") && text.contains(&*pipe.to_string_lossy()), "{text}");
        let text = refused(folder.path());
        assert!(text.contains("directory") && text.contains(&*folder.path().to_string_lossy()), "{text}");
    }
}
