//! Page read: the read of a page for which a thread of the VM waits, and no worker.
//!
//! ```text
//!   a fault --> a read begins, with what lies around the page --polled--> on its way: the fault is put back
//!                   ^                                            |         its waker, or a pause, brings the next poll
//!                   |                                            +-------> there: the page is supplied
//!                   '--- for as long as reads are tried again ---+-------> failed
//! ```
//!
//! A read belongs to a place in the snapshot: all faults of the VM that want the page share it, those of its forks too.
//!
//! Invariant: what a poll returns was checked as all bytes of the snapshot are ([`Vm::checked`]).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use quinion::{Error, ErrorKind, File};

use super::bytes::SnapshotBytes;
use super::{Source, Vm, VmShared};
use crate::PeerError;
use crate::pages::ImagePart;

pub(super) struct PageRead(Pin<Box<dyn Future<Output = Result<SnapshotBytes, Error>> + Send>>);

impl fmt::Debug for PageRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageRead").finish_non_exhaustive()
    }
}

impl PageRead {
    fn new(file: &File, part: ImagePart) -> Self {
        let (file, ImagePart { offset, bytes, .. }) = (file.clone(), part);
        Self(Box::pin(async move {
            match file.pin_async(offset, bytes as usize).await {
                Err(error) if error.kind() == ErrorKind::NoMemory => {
                    copied(&file, offset, bytes as usize).await
                }
                pinned => pinned.map(SnapshotBytes::Pinned),
            }
        }))
    }
}

/// Bytes of which no pin is to be had now.
async fn copied(file: &File, offset: u64, bytes: usize) -> Result<SnapshotBytes, Error> {
    let (mut buffer, mut len) = (vec![0; bytes], 0);
    while len < bytes {
        match file.read_at_async(&mut buffer[len..], offset + len as u64).await? {
            0 => break,
            read => len += read,
        }
    }
    Ok(SnapshotBytes::Copied { buffer, len })
}

impl Vm {
    /// The bytes of the page `alone`, which lies in `run`, or why they cannot be had; `None` while they are on their
    /// way.
    pub(super) fn poll_page(
        &mut self,
        alone: ImagePart,
        run: ImagePart,
        common: &VmShared<'_>,
    ) -> Result<Option<Result<SnapshotBytes, Error>>, PeerError> {
        let is_new = !self.reads.contains_key(&alone.offset);
        if is_new && run != alone {
            // One read for all of it.
            self.start_read(run.offset, run.bytes);
        }
        let Source::Copied(file) = &self.source else { unreachable!("what is mapped is not copied") };
        let read = self.reads.entry(alone.offset).or_insert_with(|| PageRead::new(file, alone));
        let waker = (common.waker)();
        let Poll::Ready(bytes) = read.0.as_mut().poll(&mut Context::from_waker(&waker)) else {
            return Ok(None);
        };
        self.reads.remove(&alone.offset);
        Self::checked(bytes, alone, common).map(Some)
    }
}
