//! VMM: what a virtual machine's monitor says to a page-fault server, and nothing else of one.
//!
//! ```text
//!   here                                                           server
//!    connects
//!    regions, and their userfaultfd (a descriptor in a message) ---->       Firecracker's dialect
//!
//!    or first: {"quinion_restore":1,"want":"image"}             ---->       Quinion's
//!              maps the image's file, privately                 <----  its size, and a descriptor of it
//! ```
//!
//! The guest is this process, so a server must not kill the process of a guest that it cannot serve. This process
//! releases what it hands over: if the server does too, the guest finds zeros instead of waiting for ever, and that is
//! seen.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::experiments::populate::faults_of;
use crate::harness::Unmeasured;
use crate::sys::{Absent, Region};

/// Memory whose faults a server answers while this value lives.
pub struct Guest {
    pub region: Region,
    _connection: UnixStream,
}

impl Guest {
    pub fn copied(socket: &Path, len: usize) -> Result<Self, Unmeasured> {
        let region = Region::anonymous(len, crate::sys::PageKind::Small)?;
        Self::served(UnixStream::connect(socket)?, region, Absent::Missing)
    }

    pub fn mapped(socket: &Path, len: usize) -> Result<Self, Unmeasured> {
        let connection = UnixStream::connect(socket)?;
        send(&connection, b"{\"quinion_restore\":1,\"want\":\"image\"}\n", &[])?;
        let image = receive(&connection)?;
        let region = Region::private(&image, len)?;
        Self::served(connection, region, Absent::Either)
    }

    fn served(connection: UnixStream, region: Region, absent: Absent) -> Result<Self, Unmeasured> {
        let uffd = faults_of(&region, absent)?;
        let (base, size) = (region.address(), region.len());
        let regions = format!(
            "[{{\"base_host_virt_addr\":{base},\"size\":{size},\"offset\":0,\"page_size\":4096,\
             \"page_size_kib\":4096}}]"
        );
        send(&connection, regions.as_bytes(), &[uffd.as_fd()])?;
        Ok(Self { region, _connection: connection })
    }
}

fn send(
    connection: &UnixStream,
    message: &[u8],
    descriptors: &[std::os::fd::BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room for one");
    }
    let sent = sendmsg(connection, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn receive(connection: &UnixStream) -> Result<OwnedFd, Unmeasured> {
    let (mut text, mut space) = ([0; 512], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(connection, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(io::Error::from)?;
    let mut descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    descriptors.next().ok_or_else(|| {
        let text = String::from_utf8_lossy(&text[..received.bytes]);
        Unmeasured::Failed(format!("the server gave no image, but said: {}", text.trim_end()))
    })
}
