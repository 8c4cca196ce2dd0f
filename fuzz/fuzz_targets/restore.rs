//! Any bytes at the socket of a page-fault server: they cost their own connection, and the next peer is served.
//!
//! ```text
//!   byte 0        in how many pieces the message comes, and which descriptors come with it
//!   the rest      the message
//! ```
//!
//! The parser and the server must agree on each message: regions that pass have places inside the image, and a message
//! that does not parse is refused.
#![no_main]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use quinion::Cache;
use quinion_vm::internals::{ParseStep, check, parse};
use quinion_vm::{OnFailure, RestoreOptions, Server};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const IMAGE_BYTES: u64 = 64 << 12;
const FOLDER: &str = "/dev/shm";
const QUICK: Duration = Duration::from_secs(10);

struct Fixture {
    folder: tempfile::TempDir,
    other: std::fs::File,
    _server: Server,
    _cache: Cache,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("quinion-fuzz").tempdir_in(FOLDER).unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, vec![7; IMAGE_BYTES as usize]).unwrap();
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let mut options = RestoreOptions::default();
        options.on_failure = OnFailure::Leave;
        let server = Server::start(&cache, &image, &folder.path().join("socket"), options).unwrap();
        Self { other: tempfile::tempfile().unwrap(), folder, _server: server, _cache: cache }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(QUICK)).unwrap();
        stream
    }

    /// The server's answer to a message, until it closes.
    fn answer(&self, kind: u8, message: &[u8]) -> String {
        let mut stream = self.connect();
        let pieces = usize::from(kind % 4) + 1;
        for (number, piece) in message.chunks(message.len().div_ceil(pieces).max(1)).enumerate() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut with = SendAncillaryBuffer::new(&mut space);
            let descriptors = vec![self.other.as_fd(); usize::from(kind / 4 % 8)];
            if !descriptors.is_empty() && number == usize::from(kind / 32) % pieces {
                with.push(SendAncillaryMessage::ScmRights(&descriptors));
            }
            // The server may close before it has all.
            if sendmsg(&stream, &[IoSlice::new(piece)], &mut with, SendFlags::NOSIGNAL).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        let mut said = Vec::new();
        if let Err(error) = stream.read_to_end(&mut said) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it does not close");
        }
        String::from_utf8(said).unwrap()
    }

    fn run(&self, kind: u8, message: &[u8]) {
        match parse(message) {
            Ok(ParseStep::Regions(regions)) => {
                if check(&regions, IMAGE_BYTES).is_ok() {
                    let bytes: u64 = regions.iter().map(|region| region.size).sum();
                    assert!(bytes <= IMAGE_BYTES, "more than there is, and no byte twice");
                    assert!(regions.iter().all(|region| region.offset + region.size <= IMAGE_BYTES));
                }
            }
            Ok(ParseStep::WantsImage | ParseStep::Unfinished) | Err(_) => {}
        }
        let said = self.answer(kind, message);
        let is_one_piece_of_nothing = message.iter().all(u8::is_ascii_whitespace);
        if parse(message).is_err() && !is_one_piece_of_nothing {
            assert!(said.is_empty() || said.contains("\"error\""), "{said}");
        }
        // The next message is read, and answered that this server hands out no image.
        let next = self.answer(0, br#"{"quinion_restore":1,"want":"image"}"#);
        assert!(next.contains("\"error\"") && next.contains("--minor"), "{next}");
    }
}

fuzz_target!(|data: &[u8]| {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    let Some((&kind, message)) = data.split_first() else { return };
    FIXTURE.get_or_init(Fixture::new).run(kind, message);
});
