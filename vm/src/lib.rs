//! Restore: a server of page faults, by which VMs begin to run before their memory is there.
//!
//! ```text
//!   VMM                                         server                            cache
//!    maps its memory, registers it,
//!    connects, sends regions + userfaultfd -->  check (message), Pages
//!    a processor touches a page, sleeps    -->  worker: read                      (vm)
//!                                               events first: given back, unmapped, moved, forked
//!                                               what does the fault need?         (pages: pure)
//!                                               bytes of the snapshot  <--------  pin: shared by all VMs
//!                                               still the same snapshot?          (snapshot)
//!    goes on                               <--  copy straight from the cache's memory, that page alone
//!                                               then what lies around it, and what is supplied unasked
//! ```
//!
//! The protocol is the one of Firecracker's memory backend `Uffd`: one message with the regions and the descriptor, on
//! a stream socket, and nothing after it. Many VMs of one snapshot share the server, its workers and the cache.
//!
//! A VMM that can map the server's memory asks for the **image** instead, and its faults are answered by mapping, not
//! copying:
//!
//! ```text
//!   VMM -> server   {"quinion_restore":1,"want":"image"}
//!   server -> VMM   {"quinion_restore":1,"size":BYTES,"page_size":4096}     and the image's memory, for reading only
//!   VMM             maps it privately, and touches none of it
//!   VMM -> server   the regions as Firecracker's, `offset` as in what was mapped; and the userfaultfd
//!   server -> VMM   {"quinion_restore":1,"ready":true}
//! ```
//!
//! A VMM would read zeros where the image has no memory yet, or a page that is not filled yet, without a fault, unless
//! both missing **and** minor faults are told. So the server registers the regions for both, with the descriptor that
//! was sent, and says so. A VMM that registered for both itself need not wait for that word; any other must, before it
//! touches its memory. (A range that a VMM registered for both and write protection is left so.) Regions that cannot be
//! registered, since nothing of the kind is mapped there, are the VM's end.
//!
//! All VMs of the image share its pages until they write to them. In either dialect an error is answered by
//! {"error":"..."} and the end of the connection.
//!
//! | file | what |
//! |---|---|
//! | `pages` | the state of each page of a VM, and what a fault needs; pure |
//! | `message` | what VMMs say, and whether it can be so; pure |
//! | `fault_record` | the order in which pages of an image were wanted: made, kept, read |
//! | `replay` | a record as a plan of reads, and what of it is stale; pure |
//! | `streams` | whether a VM walks through its memory; pure |
//! | `latency`, `stats` | how long, how much |
//! | `takeover` | what two servers say while one hands its VMs to the other; pure |
//! | `text` | events as text, and options from text; pure |
//! | `snapshot` | the file, or a base and diffs, a pack, or an object, and whether it is still the same |
//! | `peer` | the process at the other end: its message, its end |
//! | `vm` | one VM: reads what its userfaultfd says, and answers |
//! | `server` | all of them: connections, workers, whose turn it is |
//!
//! **Fail closed.** Once a userfaultfd was handed over, a thread that touches memory that is not supplied waits without
//! end, or, if no process holds the descriptor any more, reads zeros without an error. So a VM that cannot be served
//! (wrong regions, a changed snapshot, an unreadable sector where the kernel cannot poison the page) is **given up**.
//! The server kills its process by its process descriptor, and closes the userfaultfd only when the process has ended;
//! the same at the server's own end. [`OnFailure::Leave`] leaves that to the embedder, which learns of it by [`Event`]
//! and by the end of the connection. A peer for which there is no place, or whose message is wrong or late, is such a
//! VM, too, if its userfaultfd has come, read or not. A server that is killed can do neither: a supervisor has to watch
//! its process (`waitpid`, or `poll` on a pidfd) and end the VMs then. The end of the connection tells no VMM:
//! Firecracker keeps the socket and never looks at it.
//!
//! **Takeover.** A server may take over the VMs of one that runs ([`RestoreOptions::replace`]). The running one answers
//! the faults that it has read, or has them made anew, sends all that it knows of each VM, and touches none from then
//! on, unless the successor died or refused before it said that it has all. Of the two one serves, whichever dies;
//! `server/handover.rs` argues why. Pages that were given back stay zeros. VMs that have mapped the image are not
//! handed over.
//!
//! **One worker for one VM at a time.** So events are noted in their order, and whatever a worker notes holds for all
//! answers that follow. Faults that come together start all their reads before the first is waited for.
//!
//! **No worker waits for another machine.** A worker waits for the read of a local file. The read of a file that is
//! open in the cache ([`Server::start_file`]), as an object of a store, is polled: its waker has a worker look at the
//! VM again, and meanwhile the workers serve other VMs, and can end. A read that fails is tried again for as long as
//! [`RestoreOptions::retry_reads`] says, since a store that is gone for seconds comes back; the VM waits in its fault.
//! An error that says that the file has changed is final.
//!
//! **Another process.** A process that is served by a server of its own must not fork by the C library: the kernel
//! keeps a fork until its event was read, and the C library its allocator locked, which workers may want.
//!
//! **Bounded.** Connections by `vms_max` (and four that were refused, and are dying), threads by `workers`, one for
//! each peer that greets, and at most 512 that wait in the close of what a peer sent (see `server`). A message by
//! 64 KiB, four descriptors and `greeting`. Memory for each VM by two bits a page
//! and `pages::PIECES_MAX`. Also forks of a VM, messages read at a time, and pins, by a run for each worker. A pack
//! takes its index, 16 MiB of chunks or 8 of them, and two chunks for each of its threads.
//!
//! Invariants:
//!  1. A peer's acts harm no other: it alone is closed or given up.
//!  2. No lock of this module is held while a file is read, a VM is answered, or an observer is called; but that of one
//!     chunk of a pack while it is read, which only threads take that want this chunk.
//!  3. A page is supplied from the snapshot once at most, and never after it was given back.
//!  4. No memory of a VM is ever mapped here: nothing that a VM or its snapshot does can raise SIGBUS in this process.
//!
//! Not an invariant: that faults are answered in their order. One that the kernel refuses waits for the next round.

use std::fmt;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quinion::{Cache, Error, File, Image};

mod fault_record;
mod latency;
mod message;
mod pages;
mod peer;
mod replay;
mod server;
mod snapshot;
mod stats;
mod streams;
mod takeover;
mod text;
#[allow(unsafe_code, reason = "system calls")]
mod uffd;
mod vm;

pub use fault_record::{FaultRecord, FaultRecordError, ImageIdentity, RecordedPage, ReplayRecord};
pub use latency::LatencyHistogram;
pub use message::BadMessage;
pub use pages::TooManyPieces;
pub use server::Server;
#[cfg(feature = "pack")]
pub use snapshot::pack;
pub use stats::{RestoreCounters, RestoreNumber, RestoreStats, RestoreValue, VmStats};
pub use takeover::TakeoverError;
pub use text::{SocketMode, SocketOwner};

/// For this workspace's tests and fuzz targets: no version promises anything of it.
#[doc(hidden)]
pub mod internals {
    pub use crate::fault_record::digest;
    pub use crate::message::{ParseStep, VmmRegion, check, parse};
    #[cfg(feature = "pack")]
    pub use crate::snapshot::pack::reader::read_made_up;
    pub use crate::uffd::{Modes, Uffd, feature};
}

/// Treatment of the process of a VM that cannot be served any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFailure {
    /// The process is killed: better no VM than one that reads zeros where its memory was. The process that connected
    /// ends as a whole: if one of its connections cannot be served, or is refused with its memory, all its VMs end.
    #[default]
    Kill,
    /// The process is left to the embedder. It waits without end where memory is missing, or finds zeros there.
    Leave,
}

/// Pages of the snapshot that are supplied to each VM before it asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fill {
    /// Only pages around and behind the VM's faults.
    Nothing,
    /// The pages of [`RestoreOptions::replay`], if there is one.
    #[default]
    Recorded,
    /// Recorded pages first, and then the rest of the image from its beginning. Each VM takes all of its memory then.
    All,
}

/// How VMs are served.
#[derive(Clone)]
#[non_exhaustive]
pub struct RestoreOptions {
    /// Threads that answer; 1 to 64. If not set, one for each processor, and four at most.
    pub workers: usize,
    /// Connections at a time; 1 to 65536. If not set, 64. Peers whose message has not come count, and VMs that were
    /// given up and are dying. A VM that connects when there are so many waits until one ends, or is refused if all are
    /// VMs; of the refused, up to four more may be dying.
    pub vms_max: usize,
    /// The longest answer to one fault, in bytes: a power of two from 4 KiB to 2 MiB. If not set, 64 KiB. The page
    /// that is waited for comes first. A VM that walks through its memory gets up to 2 MiB more each time; while a
    /// record is made each page is answered alone.
    pub run_bytes: u64,
    /// Treatment of a VM that cannot be served.
    pub on_failure: OnFailure,
    /// How long a peer may take to send its message; 1 millisecond to 1 day. If not set, 10 seconds.
    pub greeting: Duration,
    /// The permissions of the socket, as of a file; a process needs write permission to connect. If not set, 0o600.
    pub socket_mode: u32,
    /// The user that the socket is given to. If not set, it belongs to the user of this process. A process that is not
    /// root may give it to none but groups of its own.
    pub socket_owner: Option<u32>,
    /// The group that the socket is given to; see [`RestoreOptions::socket_owner`].
    pub socket_group: Option<u32>,
    /// Whether the order in which the image's pages are wanted is noted, for [`Server::record`]. It takes a bit for
    /// each page and 8 bytes for each that was wanted. Each page is answered alone meanwhile, so VMs are slower.
    pub record: bool,
    /// A record of this snapshot, or of an earlier one of the same VM: VMs get these pages before they ask, when no
    /// fault waits. Pages that hold something else now are left out. With [`RestoreOptions::record`] the new record
    /// goes on from this one, if it is of the same image.
    pub replay: Option<FaultRecord>,
    /// Pages that VMs get before they ask.
    pub fill: Fill,
    /// For [`Server::start_file`] of a pack: files of the cache among which are the packs that it refers to. They are
    /// found by their identities. For a pack that is named by its path these lie in the same folder.
    pub packs: Vec<File>,
    /// Whether VMMs may map the image, by the dialect of the library's first page. It takes the snapshot's size of the
    /// cache's memory at once; a VMM that sends regions of memory of its own is served as ever beside it.
    pub minor: bool,
    /// How errors name the snapshot of [`Server::start_file`], such as the URL of an object. If not set, "the
    /// snapshot".
    pub snapshot_name: Option<String>,
    /// How long a fault may wait for a snapshot of [`Server::start_file`] whose reads fail, before its VM is given up:
    /// for a store that may be gone for a while. Reads are tried again meanwhile; what the backend itself waits and
    /// tries again comes on top. If not set, zero: the page is unreadable after the first read that failed, as that of
    /// a device.
    pub retry_reads: Duration,
    /// Whether VMs of a server that listens at the same path are taken over: it hands them and its socket to this one,
    /// and serves no VM any more ([`Server::is_replaced`]). It has to serve the very same files, for the same user. If
    /// it refuses, or this server does, it goes on as before. Without a server there this changes nothing. The socket
    /// keeps its permissions and its owner. If not set, no.
    pub replace: bool,
    /// A descriptor that is readable once nothing is to be taken over any more, such as a signalfd: until it is decided
    /// that the VMs are this server's, the start ends with an error, and the other server goes on. If not set, the
    /// start is not ended.
    pub ending: Option<Arc<OwnedFd>>,
    /// Called with each event by workers, which wait for it.
    pub observer: Option<Observer>,
}

/// Called with each event.
pub type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// Bounds of [`RestoreOptions::greeting`]: a clock that is asked for that long from now has an answer.
const GREETINGS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60);

impl Default for RestoreOptions {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            workers: processors.min(4),
            vms_max: 64,
            run_bytes: 64 << 10,
            on_failure: OnFailure::default(),
            greeting: Duration::from_secs(10),
            socket_mode: 0o600,
            socket_owner: None,
            socket_group: None,
            record: false,
            replay: None,
            fill: Fill::default(),
            packs: Vec::new(),
            minor: false,
            snapshot_name: None,
            retry_reads: Duration::ZERO,
            replace: false,
            ending: None,
            observer: None,
        }
    }
}

impl fmt::Debug for RestoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("RestoreOptions");
        text.field("workers", &self.workers)
            .field("vms_max", &self.vms_max)
            .field("run_bytes", &self.run_bytes);
        text.field("on_failure", &self.on_failure).field("greeting", &self.greeting).finish_non_exhaustive()
    }
}

impl RestoreOptions {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }

    fn check(&self) -> Result<(), String> {
        let (run, greeting) = (self.run_bytes, self.greeting);
        if !(1..=64).contains(&self.workers) {
            Err(format!("{} workers: choose 1 to 64", self.workers))
        } else if !(1..=65536).contains(&self.vms_max) {
            Err(format!("{} VMs at most: choose 1 to 65536", self.vms_max))
        } else if !run.is_power_of_two() || !(4096..=2 << 20).contains(&run) {
            Err(format!("{run} bytes for one fault: choose a power of two from 4096 to 2097152"))
        } else if !GREETINGS.contains(&greeting) {
            Err(format!("{greeting:?} for a peer's message: choose 1 millisecond to 1 day"))
        } else if self.socket_mode > 0o777 {
            Err(format!("a socket with permissions {:o}: choose 0 to 777, octal", self.socket_mode))
        } else if self.record && self.fill == Fill::All {
            Err(
                "a page that is filled before it is touched is not recorded; record, or fill all, but not both"
                    .to_owned(),
            )
        } else {
            Ok(())
        }
    }
}

/// Why a peer was refused, or a VM given up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each is said by its message")]
#[non_exhaustive]
pub enum PeerError {
    #[error(transparent)]
    Message(BadMessage),
    #[error(
        "a VM asked to be served, and {0} VMs are served already; raise the most (--vms-max), or end some"
    )]
    TooMany(usize),
    #[error(
        "more than {} descriptors came with the message; send the userfaultfd alone",
        message::DESCRIPTORS_MAX
    )]
    TooManyDescriptors,
    #[error("the message came in hundreds of pieces; send it in one")]
    TooManyPieces,
    #[error(
        "none of the descriptors that came is a userfaultfd; send the one that the regions are registered with"
    )]
    NoUserfaultfd,
    #[error(
        "the regions came, and no userfaultfd came with them; send it with the regions, in one message, as SCM_RIGHTS"
    )]
    NoDescriptor,
    #[error("the message did not come within {0:?} of the connection; connect again, and send all of it")]
    Late(Duration),
    #[error("the connection ended before the message did; connect again, and send all of it")]
    HungUp,
    #[error("the connection failed: {0}; connect again")]
    Socket(#[source] io::Error),
    #[error(
        "this server does not hand out the image; start it with --minor, or send regions of memory to be copied to"
    )]
    NoImage,
    #[error(
        "{name} was changed or cut while it was served; start the server anew with the snapshot you mean"
    )]
    SnapshotChanged { name: String },
    #[error(
        "byte {offset} of {name} could not be read for {} seconds: {source}; look after its store, or allow faults to \
         wait longer", waited.as_secs()
    )]
    SourceFailed { name: String, offset: u64, waited: Duration, source: Error },
    #[error(
        "byte {offset} of the snapshot cannot be read: {source}, and the VM cannot be told: {poison}; start it again \
         from a whole snapshot"
    )]
    Unreadable { offset: u64, source: Error, poison: io::Error },
    #[error(
        "byte {offset} of the snapshot is needed, and no memory can be had for it: {source}; give the server more \
         memory, or end some VMs"
    )]
    NoMemory { offset: u64, source: Error },
    #[error("the page at {address:#x} cannot be supplied: {source}; start the VM again, and report it")]
    Kernel { address: u64, source: io::Error },
    #[error(
        "the VM faulted at {address:#x}, which is in none of its regions; send all regions that are registered"
    )]
    OutsideRegions { address: u64 },
    #[error(
        "the region at {address:#x} cannot be registered for missing and minor faults: {source}; map the image there, \
         privately, and send the one userfaultfd that it is registered with, if any"
    )]
    NotRegistered { address: u64, source: io::Error },
    #[error(transparent)]
    CutUp(#[from] TooManyPieces),
    #[error(
        "the VM moved memory to {address:#x} by a part of a page of {bytes} bytes; send the page size that the memory \
         is mapped by"
    )]
    MovedBetweenPages { address: u64, bytes: u64 },
    #[error("the VM was forked again, and {0} forks of it are served already, the most; end some of them")]
    TooManyForks(usize),
    #[error(
        "another fault of the VM came, and 65536 of them wait already, the most; give the VM fewer threads, or look \
         after the snapshot's store"
    )]
    TooManyFaults,
    #[error("the VM's userfaultfd cannot be read: {0}; start the VM again, and report it")]
    Descriptor(#[source] io::Error),
    #[error(
        "this server panicked while it answered a fault; see its panic message on standard error, and report it"
    )]
    Panicked,
    #[error("the server that took it over ended before it served it; see that server's last messages")]
    SuccessorDied,
}

/// Which image the snapshot at `path` is, read through `cache`: what a record should be of.
///
/// # Errors
/// It cannot be opened, or is empty.
pub fn identify(cache: &Cache, path: &Path) -> quinion::error::Result<ImageIdentity> {
    snapshot::Snapshot::open(cache, path).map(|snapshot| snapshot.identity())
}

/// As [`identify`], of a base and the diffs above it, as [`Server::start_layers`] takes them.
///
/// # Errors
/// As there.
pub fn identify_layers(cache: &Cache, layers: &[PathBuf]) -> quinion::error::Result<ImageIdentity> {
    snapshot::Snapshot::open_layers(cache, layers).map(|snapshot| snapshot.identity())
}

/// Whether [`Server::start_layers`] could serve these files with these options, as far as that can be told without its
/// socket: returns the image that VMMs would map, if [`RestoreOptions::minor`] is set, which has its memory of `cache`
/// until it is dropped.
///
/// # Errors
/// As of [`Server::start_layers`], without those of sockets and threads.
pub fn try_layers(
    cache: &Cache,
    layers: &[PathBuf],
    options: &RestoreOptions,
) -> quinion::error::Result<Option<Image>> {
    server::check_options(options)?;
    let snapshot = snapshot::Snapshot::open_layers(cache, layers)?;
    snapshot.check_is_memory()?;
    options.minor.then(|| snapshot.image(cache, &layers[0])).transpose()
}

/// As [`identify`], of a snapshot that is open in `cache`, as [`Server::start_file`] takes it. `packs` are those that
/// it refers to, if it is a pack. Waits for its reads.
///
/// # Errors
/// It is empty, or cannot be read; of a pack as of [`Server::start_file`].
pub fn identify_file(cache: &Cache, file: &File, packs: &[File]) -> quinion::error::Result<ImageIdentity> {
    let snapshot = snapshot::Snapshot::of_file(cache, file, snapshot::UNNAMED, packs)?;
    Ok(snapshot.identity())
}

/// Something that happened. Its text (`Display`) is a line for people.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A VM is served from now on.
    Begun {
        /// The VM's number, from 1 on.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// The size of its memory.
        bytes: u64,
    },
    /// The snapshot has more memory than the VM: perhaps it is another VM's.
    SnapshotLarger {
        /// The VM's number.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// The end of what the VM has of the snapshot, in bytes.
        used_bytes: u64,
        /// The snapshot's size.
        image_bytes: u64,
    },
    /// A peer was refused before it was a VM.
    Refused {
        /// The peer's process, 0 if that is not known.
        process: u32,
        /// Why.
        why: PeerError,
    },
    /// A VM cannot be served any more.
    GivenUp {
        /// The VM's number.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// Why.
        why: PeerError,
        /// Whether its process was killed.
        killed: bool,
    },
    /// A page of the snapshot cannot be read, and a touch of it is a bus error (SIGBUS) in the VM. Some of them are
    /// told in each second; [`RestoreCounters::poisoned_bytes`] counts all.
    Poisoned {
        /// The VM's number.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// The snapshot, as errors name it.
        snapshot: String,
        /// The bytes of the snapshot that the VM was refused.
        range: Range<u64>,
        /// Why.
        why: Error,
    },
    /// A VM has ended by itself, and so has the last fork of its process.
    Ended {
        /// The VM's number.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// Counts of the work done for it.
        counters: Box<RestoreCounters>,
    },
    /// A VM was still there when the server ended.
    Dropped {
        /// The VM's number.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// Whether its process was killed.
        killed: bool,
    },
    /// A VM that another server has served is served by this one from now on.
    TakenOver {
        /// The VM's number here.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
        /// The size of its memory.
        bytes: u64,
    },
    /// A VM is served by another server from now on, which has taken over all of them.
    HandedOver {
        /// The VM's number here.
        vm: u64,
        /// The VM's process, 0 if that is not known.
        process: u32,
    },
    /// Another server was to take over, and did not: VMs are served by this one as before. Or the server that handed
    /// them over ended meanwhile, and some of its VMs are served by none.
    NotTakenOver(TakeoverError),
    /// Most pages of the record that were compared hold something else in this snapshot: no more of it is replayed.
    ReplayStale {
        /// Pages that differ.
        differing: u64,
        /// Pages that were compared.
        compared: u64,
    },
    /// No more peers can be accepted for a moment: the system refuses; or all places are taken, by as many refused
    /// peers as may be dying, too. Full places are reported once for each time that they become full.
    CannotAccept(io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that wants no limit says `Duration::MAX`; a worker would then compute a time that there is not, and
    /// end.
    #[test]
    fn options_out_of_their_range_are_refused_with_a_reason() {
        type Change = fn(&mut RestoreOptions);
        let told = |change: Change| {
            let mut options = RestoreOptions::new();
            change(&mut options);
            options.check()
        };
        assert_eq!(told(|_| ()), Ok(()));
        let wrong: [(Change, &str); 9] = [
            (|o| o.workers = 0, "1 to 64"),
            (|o| o.workers = 65, "1 to 64"),
            (|o| o.vms_max = 0, "1 to 65536"),
            (|o| o.vms_max = 65537, "1 to 65536"),
            (|o| o.run_bytes = 5000, "power of two"),
            (|o| o.run_bytes = 4 << 20, "power of two"),
            (|o| o.greeting = Duration::ZERO, "1 millisecond"),
            (|o| o.greeting = Duration::from_secs(24 * 60 * 60 + 1), "1 day"),
            (|o| o.greeting = Duration::MAX, "1 day"),
        ];
        for (change, words) in wrong {
            let why = told(change).expect_err(words);
            assert!(why.contains("choose") && why.contains(words), "{why}");
        }
        assert_eq!(told(|o| o.greeting = *GREETINGS.start()), Ok(()));
        assert_eq!(told(|o| o.greeting = *GREETINGS.end()), Ok(()));
    }
}
