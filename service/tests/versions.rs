//! Versions: a client and a server of different releases refuse each other, in words.
//!
//! ```text
//!   this client --> relay --> a server of this version      the relay changes the version of a message, or of the
//!               <--       <--                               files that are shared, as another release would have it
//! ```
//!
//! There is no other release to run, so the relay makes one of this: of what the two sides tell each other, the version
//! is all that they check before they trust it. `view/layouts` keeps builds of one version alike.

use std::fs::{DirBuilder, File};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStoreExt, PutPayload};
use quinion::Cache;
use quinion::internals::arena::LAYOUT_VERSION;
use quinion_object::Options;
use quinion_service::{Client, Server};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect, listen,
    recvmsg, sendmsg, socket_with,
};

const URL: &str = "mem://b/object";
/// Where the version lies: in each message of a client, and in the heads of both files (`view/layouts`).
const VERSION_AT: usize = 8;
/// The files of a reply, by their order.
const ARENA: usize = 0;
const CONTROL: usize = 1;

/// Where the relay puts another version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Other {
    Nowhere,
    /// In the message of a client that joins.
    Join,
    /// In the message of a client that has joined, and opens a name.
    Name,
    /// In the head of a file of the server's.
    File(usize),
    /// In the first bytes of the server's reply: another kind of message.
    Reply,
}

struct Message {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

fn receive(socket: &OwnedFd) -> Option<Message> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let (mut with, mut bytes) = (RecvAncillaryBuffer::new(&mut space), vec![0; 32 << 10]);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut with, RecvFlags::CMSG_CLOEXEC);
    bytes.truncate(received.ok()?.bytes);
    let files = with.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files = files.flatten().collect();
    (!bytes.is_empty()).then_some(Message { bytes, files })
}

fn send(socket: &OwnedFd, message: &Message) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = message.files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        with.push(SendAncillaryMessage::ScmRights(&files));
    }
    // Either side may have ended the connection: then the other is told so by the end of this one.
    let _ = sendmsg(socket, &[IoSlice::new(&message.bytes)], &mut with, SendFlags::NOSIGNAL);
}

fn packets() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn other_version(bytes: &mut [u8]) {
    let place = &mut bytes[VERSION_AT..VERSION_AT + 4];
    assert_eq!(place, LAYOUT_VERSION.to_le_bytes(), "the version lies there");
    place.copy_from_slice(&(LAYOUT_VERSION - 1).to_le_bytes());
}

/// A file like this one, whose head has another version.
fn other_file(file: &OwnedFd) -> OwnedFd {
    let file = File::from(file.try_clone().unwrap());
    let mut head = vec![0; 4096];
    file.read_exact_at(&mut head, 0).unwrap();
    other_version(&mut head);
    let other = File::from(rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    other.set_len(file.metadata().unwrap().len()).unwrap();
    other.write_all_at(&head, 0).unwrap();
    other.into()
}

/// Passes one connection on, until the server ends it.
fn pass_on(client: &OwnedFd, server_path: &Path, other: Other) {
    let server = packets();
    connect(&server, &SocketAddrUnix::new(server_path).unwrap()).unwrap();
    let Some(mut asked) = receive(client) else { return };
    let is_of = |kind: &[u8]| asked.bytes.starts_with(kind);
    if other == Other::Join && is_of(b"QUINHELO") || other == Other::Name && is_of(b"QUINNAME") {
        other_version(&mut asked.bytes);
    }
    send(&server, &asked);
    while let Some(mut answer) = receive(&server) {
        match other {
            Other::File(file) if answer.files.len() > file => {
                answer.files[file] = other_file(&answer.files[file])
            }
            Other::Reply => answer.bytes[0] ^= 1,
            _ => {}
        }
        send(client, &answer);
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    server: Server,
    socket: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(InMemory::new());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let bytes = PutPayload::from(vec![7; 300_000]);
        runtime.block_on(store.put(&ObjectPath::from("object"), bytes)).unwrap();
        let socket = folder.path().join("q/server.sock");
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let server = Server::builder(cache).store("mem://b", store, Options::new());
        let server = server.start(socket.to_str().unwrap()).unwrap();
        Self { folder, server, socket }
    }

    /// Where a client finds the server as `other` has it. The relay's thread ends with the test's process.
    fn relay(&self, other: Other) -> PathBuf {
        let folder = self.folder.path().join(format!("{other:?}").replace(['(', ')'], ""));
        DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let (path, listener, server) = (folder.join("relay.sock"), packets(), self.socket.clone());
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        std::thread::spawn(move || {
            while let Ok(client) = accept(&listener) {
                let server = server.clone();
                std::thread::spawn(move || pass_on(&client, &server, other));
            }
        });
        path
    }

    fn refusal(&self, other: Other) -> String {
        let path = self.relay(other);
        let connected = Client::connect(path.to_str().unwrap());
        connected.err().unwrap_or_else(|| panic!("{other:?}: it was admitted")).to_string()
    }
}

fn read(client: &Client) {
    let mut bytes = vec![0; 300_000];
    client.open(URL).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, vec![7; 300_000]);
}

#[test]
fn a_client_of_another_version_is_refused_and_told_why() {
    let fixture = Fixture::new();
    read(&Client::connect(fixture.relay(Other::Nowhere).to_str().unwrap()).unwrap());
    let before = fixture.server.stats().clients;
    let said = fixture.refusal(Other::Join);
    assert!(said.contains("another version: use the same version for both"), "{said}");
    assert_eq!(fixture.server.stats().clients, before, "it was given a place");
    read(&Client::connect(fixture.socket.to_str().unwrap()).unwrap());
    fixture.server.stop();
}

#[test]
fn a_client_refuses_a_server_of_another_version_that_admits_it() {
    let fixture = Fixture::new();
    for other in [Other::File(ARENA), Other::File(CONTROL)] {
        let said = fixture.refusal(other);
        assert!(
            said.contains("not of this version") && said.contains("one version of Quinion"),
            "{other:?}: {said}"
        );
        assert!(said.contains(&format!("Version({})", LAYOUT_VERSION - 1)), "{other:?}: {said}");
    }
    let said = fixture.refusal(Other::Reply);
    assert!(said.contains("answer is not known") && said.contains("one version of Quinion"), "{said}");
    read(&Client::connect(fixture.socket.to_str().unwrap()).unwrap());
    fixture.server.stop();
}

#[test]
fn a_name_in_a_message_of_another_version_is_refused() {
    let fixture = Fixture::new();
    let client = Client::connect(fixture.relay(Other::Name).to_str().unwrap()).unwrap();
    let said = client.open(URL).unwrap_err().to_string();
    assert!(said.contains(URL) && said.contains("version"), "{said}");
    read(&Client::connect(fixture.socket.to_str().unwrap()).unwrap());
    fixture.server.stop();
}
