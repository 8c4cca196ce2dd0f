//! Naive: a page-fault server of a few lines, by which the monitor is tested before the server is.
//!
//! ```text
//!   a fault    page removed? zeros : the image's page, one by one        EAGAIN: events first, then again
//!   an event   the pages of it are removed, moved, or another process's too
//! ```
//!
//! And [`Wrong`]: what a server may have wrong, each of which the monitor has to notice.

#![allow(unsafe_code, reason = "descriptors that events bring")]

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::kernel::{self, Event, Userfault};
use super::memory::Region;
use super::{Image, PAGE};

/// A bug of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    Nothing,
    /// One byte of one page.
    Byte(u64),
    /// Each page is its neighbour.
    Neighbour,
    /// A removed page comes back.
    Removed,
    /// A removed page comes back beside the one asked for.
    RemovedBeside,
}

/// A server that runs, until it goes out of scope.
pub struct Naive {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

struct Served {
    userfault: Userfault,
    regions: Vec<Region>,
    removed: HashSet<u64>,
    /// Faults that had to wait for events.
    waiting: Vec<(u64, bool)>,
    _stream: Option<UnixStream>,
}

impl Naive {
    pub fn start(socket: &Path, image: Image, wrong: Wrong) -> Self {
        let listener = UnixListener::bind(socket).expect("a socket of our own");
        listener.set_nonblocking(true).expect("a plain call");
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let is_over = is_over.clone();
            move || serve(&listener, FaultyImage { image, wrong }, &is_over)
        });
        Self { is_over, thread: Some(thread) }
    }

    /// Ends it, and returns how many faults it was told of.
    pub fn stop(mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().expect("it is stopped once").join().expect("it runs to its end")
    }
}

impl Drop for Naive {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An image, and what its server has wrong.
#[derive(Clone, Copy)]
struct FaultyImage {
    image: Image,
    wrong: Wrong,
}

fn serve(listener: &UnixListener, image: FaultyImage, is_over: &AtomicBool) -> u64 {
    let mut served: Vec<Served> = Vec::new();
    let mut faults = 0;
    while !is_over.load(Ordering::Relaxed) {
        let mut watched: Vec<BorrowedFd<'_>> = served.iter().map(|one| one.userfault.as_fd()).collect();
        watched.push(listener.as_fd());
        kernel::wait(&watched, 10).expect("descriptors of our own");
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(false).expect("a plain call");
            served.extend(greet(stream));
        }
        let mut born = Vec::new();
        served.retain_mut(|one| one.turn(image, &mut faults, &mut born).is_ok());
        served.extend(born);
    }
    faults
}

fn greet(stream: UnixStream) -> Option<Served> {
    let (message, mut descriptors) = kernel::receive(&stream).ok()?;
    let text = String::from_utf8(message).ok()?;
    let number = |object: &str, name: &str| -> Option<u64> {
        let (_, rest) = object.split_once(&format!("\"{name}\":"))?;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let region = |object: &str| {
        let address = number(object, "base_host_virt_addr")?;
        Some(Region { address, offset: number(object, "offset")?, bytes: number(object, "size")? })
    };
    let regions = text.split('}').filter(|object| object.contains('{')).map(region).collect::<Option<_>>()?;
    let userfault = Userfault(descriptors.drain(..).next()?);
    Some(Served { userfault, regions, removed: HashSet::new(), waiting: Vec::new(), _stream: Some(stream) })
}

impl Served {
    fn turn(&mut self, image: FaultyImage, faults: &mut u64, born: &mut Vec<Self>) -> io::Result<()> {
        while let Some(event) = self.userfault.next()? {
            match event {
                Event::Fault { address, is_minor } => {
                    *faults += 1;
                    self.waiting.push((address & !(PAGE as u64 - 1), is_minor));
                }
                Event::Remove { start, end } | Event::Unmap { start, end } => {
                    self.removed.extend((start..end).step_by(PAGE));
                }
                Event::Remap { from, to, bytes } => self.moved(from, to, bytes),
                Event::Fork { descriptor } => born.push(self.child(descriptor)),
            }
        }
        let waiting = std::mem::take(&mut self.waiting);
        for (address, is_minor) in waiting {
            let answered = match is_minor {
                true => self.userfault.go_on(address, PAGE as u64),
                false => self.answer(address, image),
            };
            match answered {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    self.waiting.push((address, is_minor));
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    self.userfault.wake(address, PAGE as u64)?;
                }
                // Unmapped meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                answered => answered?,
            }
        }
        Ok(())
    }

    fn answer(&self, address: u64, FaultyImage { image, wrong }: FaultyImage) -> io::Result<()> {
        if self.removed.contains(&address) && wrong != Wrong::Removed {
            return self.userfault.zero(address, PAGE as u64);
        }
        let Some(page) = self.page(address) else { return Err(io::Error::from_raw_os_error(libc::ENOENT)) };
        let bytes = match wrong {
            Wrong::Neighbour => image.page((page + 1) % image.pages),
            _ => image.page(page),
        };
        let mut bytes = bytes.to_vec();
        if wrong == Wrong::Byte(page) {
            // In a word that guests sum, too.
            bytes[24] ^= 1;
        }
        self.userfault.copy(address, &bytes)?;
        if wrong == Wrong::RemovedBeside && self.page(address + PAGE as u64) == Some(page + 1) {
            let _ = self.userfault.copy(address + PAGE as u64, &image.page(page + 1));
        }
        Ok(())
    }

    fn page(&self, address: u64) -> Option<u64> {
        let region = self.regions.iter().find(|r| (r.address..r.address + r.bytes).contains(&address))?;
        Some((address - region.address + region.offset) / PAGE as u64)
    }

    fn moved(&mut self, from: u64, to: u64, bytes: u64) {
        for region in self.regions.iter_mut().filter(|r| r.address == from && r.bytes == bytes) {
            region.address = to;
        }
        let is_inside = |address: &u64| (from..from + bytes).contains(address);
        let inside: Vec<u64> = self.removed.iter().copied().filter(is_inside).collect();
        for address in inside {
            self.removed.remove(&address);
            self.removed.insert(address - from + to);
        }
    }

    fn child(&self, descriptor: i32) -> Self {
        // SAFETY: the kernel has just given it to this process with the event.
        let userfault = Userfault(unsafe { OwnedFd::from_raw_fd(descriptor) });
        let (regions, removed) = (self.regions.clone(), self.removed.clone());
        Self { userfault, regions, removed, waiting: Vec::new(), _stream: None }
    }
}

/// A path by which another process of this user opens a file that has no name.
pub fn path_of(file: &OwnedFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
