//! Named: files that a viewer opens by a name, such as objects of a store.
//!
//! ```text
//!   viewer                               event loop                       worker                      Owner
//!     Name { .. } "s3://bucket/key" -->  keeps it: a ticket
//!     OpenNamed(ticket), by its page ------------------------------>  of the domain still? ---->  which store?
//!                                                                     room for work on it? ---->  open_named
//!     NameReply, text  <------------  by the connection of the name,  <------------------------   record, text
//!     answer: handle, record  <-----  by the page
//! ```
//!
//! A name that comes with a descriptor is that of a revision: the file behind the descriptor as it is now. It is opened
//! as an attached file is, by the viewer's right to read it, and by the same rules. A close of any of
//! its descriptors here ends this process's POSIX locks on the file. So an owner says whether it opens any, before the
//! descriptor is taken; and a viewer of this very process has none.
//!
//! A file is attached by a descriptor, which shows that the viewer may read it. An object is opened with the owner's
//! credentials: so an owner opens by name only objects that all of its domain may read, for a process that is of the
//! domain when it asks. Work on each store is bounded as on a file system (`workers.rs`).
//!
//! Invariants:
//!  1. The text is sent before the answer: a viewer that has the answer finds it.
//!  2. A name is opened once for each ticket, and a ticket is of use to its viewer alone.

use std::io::IoSlice;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::Shared;
use super::attaching::check_readable;
use super::handles::HANDLES_MAX;
use super::owner::{NAMED_DEVICE, NameRefusal, NamedAttachment, RevisionRequest};
use super::peer_connection::PeerConnection;
use super::viewer_slot::{Handle, ViewerJob};
use super::workers::WorkKey;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::handshake::{NAME_TEXT_MAX, NameReply};
use crate::viewer::sys::Errno;
use quinion::internals::units::FileId;

impl Shared {
    pub(super) fn open_named(&self, job: &ViewerJob, ticket: u64) -> Result<[u64; 2], Errno> {
        let ticket = u32::try_from(ticket).map_err(|_| Errno::BADF)?;
        let offer = self.viewers.slot(job.viewer).lock().offers.remove(&ticket).ok_or(Errno::BADF)?;
        let name = offer.name.ok_or(Errno::BADF)?;
        let opened = match offer.has_descriptor {
            false => self.open_for(job, &name),
            true => self.open_revision(job, RevisionOffer { name: &name, connection: &offer.connection }),
        };
        let (error, text) = match &opened {
            Ok((_, text)) => (0, text.as_str()),
            Err(refusal) => (refusal.error.0 as u32, refusal.text.as_str()),
        };
        let sent = send_reply(&offer.connection, NameReply { error }, text);
        match (opened, sent) {
            (Ok((answer, _)), Ok(())) => Ok(answer),
            (Ok(([handle, _], _)), Err(error)) => {
                self.handles.detach(job.viewer, handle); // its viewer gets no answer
                Err(error)
            }
            (Err(refusal), _) => Err(refusal.error),
        }
    }

    fn open_for(&self, job: &ViewerJob, name: &[u8]) -> Result<([u64; 2], String), NameRefusal> {
        self.check_domain(job)?;
        let device = self.owner.device_of_name(name)? | NAMED_DEVICE;
        let stuck =
            || refusal(Errno::AGAIN, "too many earlier requests to this store have no answer yet; try again");
        let _at_work = self.workers.enter(WorkKey::Files(device)).ok_or_else(stuck)?;
        self.viewers.wait_for_death_notice();
        self.note_named(job, self.owner.open_named(name)?, device)
    }

    fn open_revision(
        &self,
        job: &ViewerJob,
        offer: RevisionOffer<'_>,
    ) -> Result<([u64; 2], String), NameRefusal> {
        // Not the error of an expired ticket, by which the viewer would ask again.
        let unserved = |_| refusal(Errno::OPNOTSUPP, "this file cannot be served; read it by itself");
        self.check_domain(job)?;
        if !self.owner.opens_revisions() {
            let text = "this server opens no revisions of local files; `quinion serve` does";
            return Err(refusal(Errno::OPNOTSUPP, text));
        }
        if job.process.number == std::process::id() {
            let text =
                "the server is this very process, and would end its locks on the file; run it in another one";
            return Err(refusal(Errno::OPNOTSUPP, text));
        }
        let file = offer.connection.descriptor().map_err(unserved)?;
        let (file, mount) = self.check_mount(job, file, FileId::default()).map_err(unserved)?;
        let Some(_at_work) = self.workers.enter(WorkKey::Files(mount.device)) else {
            self.queues.close(QueueKey::Device(mount.device), file);
            return Err(refusal(
                Errno::AGAIN,
                "too many earlier requests to this file system have no answer yet",
            ));
        };
        if let Err(error) = check_readable(&file) {
            self.queues.close(QueueKey::Device(mount.device), file);
            return Err(unserved(error));
        }
        self.viewers.wait_for_death_notice();
        let opened = self.owner.open_revision(RevisionRequest { name: offer.name, file })?;
        self.note_named(job, opened, mount.device)
    }

    fn check_domain(&self, job: &ViewerJob) -> Result<(), NameRefusal> {
        let busy =
            || refusal(Errno::AGAIN, "an earlier request of this process has no answer yet; try again");
        let _probe = self.workers.probe(job.process.name).ok_or_else(busy)?;
        if self.domain.has(&job.process.member) {
            return Ok(());
        }
        Err(refusal(
            Errno::ACCES,
            "this process has other credentials than the owner; run both as one user, with the same groups",
        ))
    }

    /// Gives the viewer a handle for what was opened for it. `device` bounds the work on it.
    fn note_named(
        &self,
        job: &ViewerJob,
        opened: NamedAttachment,
        device: u64,
    ) -> Result<([u64; 2], String), NameRefusal> {
        let NamedAttachment { attached, id, text } = opened;
        let handle = Handle { place: self.handles.enter(id).into_place(), device };
        let answer = self.handles.note(job.viewer, attached, handle).map_err(|error| match error {
            Errno::SRCH => refusal(error, "the server has ended; connect to the one that follows it"),
            _ => {
                let text = "files open here, as many as it may; close some";
                refusal(error, &format!("this process has {HANDLES_MAX} {text}"))
            }
        })?;
        Ok((answer, text))
    }
}

/// A name, and the connection in which the descriptor lies that came with it.
struct RevisionOffer<'o> {
    name: &'o [u8],
    connection: &'o PeerConnection,
}

fn refusal(error: Errno, text: &str) -> NameRefusal {
    NameRefusal { error, text: text.into() }
}

fn send_reply(connection: &PeerConnection, reply: NameReply, text: &str) -> Result<(), Errno> {
    let (head, text) = (reply.bytes(), &text.as_bytes()[..text.len().min(NAME_TEXT_MAX)]);
    let parts = [IoSlice::new(&head), IoSlice::new(text)];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(connection, &parts, &mut SendAncillaryBuffer::default(), flags);
    sent.map(drop).map_err(|error| Errno(error.raw_os_error()))
}
