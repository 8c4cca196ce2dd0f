//! Any bytes from a viewer, at its page and at the socket where processes join: the owner keeps running, attaches what
//! the viewer can read and nothing else, and another viewer reads the right bytes all the while.
//!
//! ```text
//!   liar      a process with three descriptors: one that reads, one that only writes, one that only names a file.
//!             Its page is written by what the input says; it is a new one for each input.
//!   target    sends to the socket what the input says, with one of these descriptors or none
//!   honest    a process whose viewer reads a file in between, and knows what is in it
//! ```
//! The owner is the real one, with a real cache. It is checked: what it is asked to attach must be readable by the
//! process that asks, and it must not be called with a handle that it did not give.
#![no_main]

mod report;

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Write};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use quinion::Cache;
use quinion::internals::arena::control::{
    Advice, AttachPolicy, Operation, REQUEST_SLOTS, Request, SENT, ViewerPage, state,
};
use quinion::internals::arena::{ArenaShare, CellNumber, LAYOUT_VERSION};
use quinion::internals::units::{FileId, Frame, MappingId, PageIndex};
use quinion_owner::internals::serve::{
    AttachReason, Attached, Caching, Owner, Service, ServiceHandle, ServiceOptions, WriterAccess, file_id,
    listen,
};
use quinion_owner::internals::viewer::handshake::{DescriptorOffer, JoinRequest, NO_PLAN};
use quinion_owner::internals::viewer::sys::Errno;
use quinion_owner::internals::viewer::{self, ReadEnd, ViewedFile, Viewer, WantedBytes};
use quinion_owner::{CacheOwner, ServeRules};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, sendmsg, socket_with,
};

const OPS_MAX: usize = 60;
const FILE_BYTES: usize = 1 << 20;
const FOLDER: &str = "/dev/shm";
/// A watchdog for what should be quick: the machine may be busy.
const QUICK: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Op {
    /// Writes so many low bytes of a word anywhere into its page.
    Write {
        offset: u16,
        word: u64,
        bytes: u8,
    },
    /// Makes a request as viewers do; the third argument is a word or a file.
    Ask {
        slot: u8,
        operation: u8,
        arguments: [u64; 3],
        file: Option<u8>,
        pending: u8,
    },
    State {
        slot: u8,
        state: u8,
    },
    Say {
        message: Vec<u8>,
        descriptor: u8,
    },
    Offer {
        descriptor: u8,
    },
    Honest {
        page: u8,
    },
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }
    /// A number of so many bytes as the first says: most are small.
    fn word(&mut self) -> Option<u64> {
        let bytes = self.byte()? % 9;
        (0..bytes).try_fold(0, |word, _| Some(word << 8 | u64::from(self.byte()?)))
    }
}

impl Iterator for Bytes<'_> {
    type Item = Op;
    fn next(&mut self) -> Option<Op> {
        Some(match self.byte()? % 8 {
            0 => Op::Write {
                offset: u16::from_le_bytes([self.byte()?, self.byte()?]),
                word: self.word()?,
                bytes: self.byte()? % 8 + 1,
            },
            1..4 => Op::Ask {
                slot: self.byte()?,
                operation: self.byte()?,
                arguments: [self.word()?, self.word()?, self.word()?],
                file: self.byte().filter(|byte| byte % 4 != 3),
                pending: self.byte()?,
            },
            4 => Op::State { slot: self.byte()?, state: self.byte()? },
            5 => {
                let (length, descriptor) = (usize::from(self.byte()?).min(self.0.len()), self.byte()?);
                let (message, rest) = self.0.split_at(length.min(self.0.len()));
                self.0 = rest;
                Op::Say { message: message.to_vec(), descriptor }
            }
            6 => Op::Offer { descriptor: self.byte()? },
            _ => Op::Honest { page: self.byte()? },
        })
    }
}

#[derive(Debug)]
struct CheckedOwner {
    owner: CacheOwner,
    readable: OnceLock<HashSet<FileId>>,
    given: Mutex<HashSet<u64>>,
    is_wrong: AtomicBool,
}

impl CheckedOwner {
    fn must(&self, is_right: bool) {
        if !is_right {
            self.is_wrong.store(true, Ordering::Relaxed); // a panic here would be caught
        }
    }
    fn knows(&self, handle: u64) {
        self.must(self.given.lock().unwrap().contains(&handle));
    }
}

impl Owner for CheckedOwner {
    fn arena(&self) -> ArenaShare<'_> {
        self.owner.arena()
    }
    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno> {
        self.must(self.readable.get().unwrap().contains(&id) && file_id(&file) == Some(id));
        let attached = self.owner.attach(file, id)?;
        self.given.lock().unwrap().insert(attached.handle);
        Ok(attached)
    }
    fn attach_policy(&self) -> AttachPolicy {
        self.owner.attach_policy()
    }
    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, id: FileId, reason: AttachReason) -> Option<u64> {
        self.owner.leaves_to_kernel(file, id, reason)
    }
    fn prepare(&self, service: &dyn ServiceHandle) {
        self.owner.prepare(service);
    }
    fn leases_valid_for(&self) -> Duration {
        self.owner.leases_valid_for()
    }
    fn writer_opened(&self, id: FileId, access: WriterAccess) {
        self.owner.writer_opened(id, access);
    }
    fn revoke(&self, id: FileId) {
        self.owner.revoke(id);
    }
    fn release_idle(&self) {
        self.owner.release_idle();
    }
    fn fill(&self, handle: u64, position: u64, len: u64, caching: Caching) -> Result<(), Errno> {
        self.knows(handle);
        self.owner.fill(handle, position, len, caching)
    }
    fn advance(&self, handle: u64, page: PageIndex, caching: Caching) {
        self.knows(handle);
        self.owner.advance(handle, page, caching);
    }
    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        self.knows(handle);
        self.owner.advise(handle, advice, position, len)
    }
    fn revalidate(&self, handle: u64) -> Result<u64, Errno> {
        self.knows(handle);
        self.owner.revalidate(handle)
    }
    fn detach(&self, handle: u64) {
        self.knows(handle);
        self.owner.detach(handle);
    }
    fn touched(&self, frame: Frame) {
        self.owner.touched(frame);
    }
}

struct Fixture {
    _folder: tempfile::TempDir,
    service: Service,
    owner: Arc<CheckedOwner>,
    socket: std::path::PathBuf,
    liar: Child,
    /// What the liar has at 0, 1 and 2, as descriptors of this process; and their names.
    descriptors: [File; 3],
    ids: [FileId; 3],
    honest: Viewer,
    _honest_process: Child,
    place: [u64; 2],
}

fn content(at: usize) -> u64 {
    (at as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("quinion-fuzz").tempdir_in(FOLDER).unwrap();
        let make = |name: &str| {
            let path = folder.path().join(name);
            let words: Vec<u8> =
                (0..FILE_BYTES).step_by(8).flat_map(|at| content(at).to_le_bytes()).collect();
            File::create(&path).unwrap().write_all(&words).unwrap();
            path
        };
        let honest_file = File::open(make("honest")).unwrap();
        let descriptors = [
            File::open(make("readable")).unwrap(),
            OpenOptions::new().write(true).open(make("written")).unwrap(),
            rustix::fs::open(make("named"), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
                .unwrap()
                .into(),
        ];
        let id_of = |file: &File| {
            let data = file.metadata().unwrap();
            FileId { device: data.dev(), inode: data.ino() }
        };
        let ids = descriptors.each_ref().map(id_of);
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let rules =
            ServeRules { immutable: vec![folder.path().canonicalize().unwrap()], ..ServeRules::default() };
        let owner = Arc::new(CheckedOwner {
            owner: CacheOwner::new(cache).with_rules(rules),
            readable: OnceLock::new(),
            given: Mutex::default(),
            is_wrong: AtomicBool::new(false),
        });
        owner.readable.set([ids[0], id_of(&honest_file)].into()).unwrap();
        let socket = folder.path().join("socket");
        let listener = Some(listen(&socket).unwrap());
        let options = ServiceOptions { workers: 2, listener, ..ServiceOptions::default() };
        let service = Service::start_with(owner.clone(), options).unwrap();
        let sleep = |files: [&File; 3]| {
            let [first, second, third] = files.map(|file| Stdio::from(file.try_clone().unwrap()));
            Command::new("sleep").arg("1000000").stdin(first).stdout(second).stderr(third).spawn().unwrap()
        };
        let liar = sleep(descriptors.each_ref());
        let honest_process = sleep([&honest_file; 3]);
        let admission = service.admit(honest_process.id()).unwrap();
        let honest = admission.view().unwrap().waiting_at_most(QUICK.as_millis() as u32);
        let FileId { device, inode } = id_of(&honest_file);
        let place = honest.request(Operation::Attach, [0, device, inode]).unwrap();
        Self {
            _folder: folder,
            service,
            owner,
            socket,
            liar,
            descriptors,
            ids,
            honest,
            _honest_process: honest_process,
            place,
        }
    }

    fn read(&self, page: u8) {
        let position = usize::from(page) * 4096 + 8;
        let (marker, touched) = (AtomicU64::new(0), AtomicU64::new(0));
        let file = ViewedFile {
            handle: self.place[0],
            cell: CellNumber(self.place[1] as u32),
            id: MappingId((self.place[1] >> 32) as u32),
            marker_reported: &marker,
            touched: &touched,
        };
        let mut to = [0u8; 10_000];
        let wanted = WantedBytes::of_slice(position as u64, &mut to);
        // SAFETY: the buffer is a slice.
        let outcome = unsafe { self.honest.read(&file, wanted) };
        assert!(matches!(outcome.end, ReadEnd::Full | ReadEnd::EndOfFile(_)), "{outcome:?}");
        assert_eq!(outcome.bytes, to.len().min(FILE_BYTES - position));
        for (word, bytes) in to[..outcome.bytes].chunks_exact(8).enumerate() {
            assert_eq!(bytes, content(position + word * 8).to_le_bytes(), "word {word} behind {position}");
        }
    }

    /// Sends bytes to the socket, and waits for no answer.
    fn say(&self, message: &[u8], descriptor: Option<&File>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let end = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        if connect(&end, &SocketAddrUnix::new(&self.socket).unwrap()).is_err() {
            return; // too many connections wait already
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() {
            with.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let _ = sendmsg(&end, &[IoSlice::new(message)], &mut with, SendFlags::NOSIGNAL);
    }

    fn run(&self, ops: &[Op]) {
        let admission = self.service.admit(self.liar.id()).unwrap();
        let page = File::from(admission.page);
        let write = |offset: usize, bytes: &[u8]| {
            let room = size_of::<ViewerPage>().saturating_sub(offset).min(bytes.len());
            page.write_all_at(&bytes[..room], offset as u64).unwrap();
        };
        let slot_at = |slot: usize| offset_of!(ViewerPage, requests) + slot * size_of::<Request>();
        let slot_of = |slot: u8| slot_at(usize::from(slot) % REQUEST_SLOTS);
        let token = self.owner.arena().token();
        let file_of = |descriptor: u8| self.descriptors.get(usize::from(descriptor) % 4);
        for op in ops {
            match op {
                Op::Write { offset, word, bytes } => {
                    write(usize::from(*offset), &word.to_le_bytes()[..usize::from(*bytes)]);
                }
                Op::Ask { slot, operation, arguments, file, pending } => {
                    let at = slot_of(*slot);
                    let mut arguments = *arguments;
                    if let Some(id) = file.and_then(|file| self.ids.get(usize::from(file) % 4)) {
                        (arguments[1], arguments[2]) = (id.device, id.inode);
                        if arguments[0] % 7 == 6 {
                            arguments[0] = arguments[0] / 7 % 8 | SENT;
                        }
                    }
                    write(at + offset_of!(Request, operation), &u32::from(*operation % 16).to_le_bytes());
                    for (number, argument) in arguments.iter().enumerate() {
                        write(at + offset_of!(Request, arguments) + 8 * number, &argument.to_le_bytes());
                    }
                    let asked = if pending % 4 == 0 { state::PENDING_UNATTENDED } else { state::PENDING };
                    write(at + offset_of!(Request, state), &asked.to_le_bytes());
                }
                Op::State { slot, state } => {
                    write(slot_of(*slot) + offset_of!(Request, state), &u32::from(*state % 9).to_le_bytes());
                }
                Op::Say { message, descriptor } => self.say(message, file_of(*descriptor)),
                Op::Offer { descriptor } => {
                    let message = DescriptorOffer { version: LAYOUT_VERSION, token }.bytes();
                    self.say(&message, file_of(*descriptor));
                }
                Op::Honest { page } => self.read(*page),
            }
        }
        // Every request is answered; a worker looks at each change of a futex word.
        let until = Instant::now() + QUICK;
        let is_open = |slot: usize| {
            let mut now = [0; 4];
            page.read_exact_at(&mut now, (slot_at(slot) + offset_of!(Request, state)) as u64).unwrap();
            matches!(u32::from_ne_bytes(now), state::PENDING | state::PENDING_UNATTENDED)
        };
        while (0..REQUEST_SLOTS).any(is_open) {
            assert!(Instant::now() < until, "a request is not answered");
            self.honest.request(Operation::Revalidate, [self.place[0], 0, 0]).unwrap();
        }
        self.read(ops.len() as u8);
        // Every connection is read.
        let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: token ^ 1, run: 0 };
        let refused = viewer::connect(&self.socket, &hello).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(71), "EPROTO and not {refused}");
        assert!(!self.owner.is_wrong.load(Ordering::Relaxed), "the owner was asked what it must not be");
    }
}

fuzz_target!(|data: &[u8]| {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    let ops: Vec<Op> = Bytes(data).take(OPS_MAX).collect();
    report::trying("serve", &ops);
    FIXTURE.get_or_init(Fixture::new).run(&ops);
});
