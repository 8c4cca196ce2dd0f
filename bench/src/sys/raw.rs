//! Raw: reads past the kernel's page cache by io_uring, as a program without any cache would make them.
//!
//! ```text
//!   slot 0  [ buffer ] -- a read --> device        as many slots as reads in flight;
//!   slot 1  [ buffer ] -- a read --> device        a completed read is shown, and its slot
//!   slot 2  [ buffer ] -- a read --> device        starts the next read
//! ```
//!
//! It is the peer at its best: buffers in 2 MiB pages, registered once, a registered file, and completions that run
//! only where the thread waits for them, if the kernel can do that.
//!
//! Invariants:
//!  1. Buffers are registered with the ring, which pins their pages. So a read that is in flight when the reader is
//!     dropped still has pages to write to, which no other allocation uses.
//!  2. When all is read, nothing is pinned any more. A ring that is only closed keeps its buffers pinned until a kernel
//!     thread releases them. Until then they count as this process's, and a caller that reads many files, with a ring
//!     for each, has the memory of several at once: 64 MiB for 16 files, enough to be killed in a group with that
//!     limit.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};

use super::HugeMemory;

pub struct RawReader {
    ring: IoUring,
    memory: HugeMemory,
    piece: usize,
    /// The position of the read of each slot, while it is in flight.
    places: Vec<u64>,
    /// Slots whose reads have completed, with their results.
    completed: Vec<(usize, i32)>,
}

impl RawReader {
    /// Reads of `piece` bytes each of `file`, which was opened for direct reads; `depth` in flight.
    ///
    /// # Errors
    /// No ring can be made, or not enough memory may be locked for it.
    pub fn new(file: &File, piece: usize, depth: usize) -> io::Result<Self> {
        let (ring, mut memory) = (ring(depth as u32)?, HugeMemory::new(piece * depth)?);
        let buffers: Vec<libc::iovec> = memory
            .chunks_exact_mut(piece)
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: piece })
            .collect();
        // SAFETY: the buffers are mapped, and the registration pins their pages.
        unsafe { ring.submitter().register_buffers(&buffers)? };
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(Self { ring, memory, piece, places: vec![0; depth], completed: Vec::with_capacity(depth) })
    }

    /// Reads at every position that `next` returns, and passes the bytes to `seen`, in any order.
    ///
    /// # Errors
    /// A read failed or was short; others may still be in flight then. Or the buffers could not be unregistered.
    pub fn read_all(
        mut self,
        mut next: impl FnMut() -> Option<u64>,
        mut seen: impl FnMut(&[u8], u64),
    ) -> io::Result<()> {
        let mut in_flight = 0;
        for (slot, place) in (0..self.places.len()).zip(std::iter::from_fn(&mut next)) {
            self.push(slot, place);
            in_flight += 1;
        }
        while in_flight > 0 {
            self.wait()?;
            for (slot, result) in std::mem::take(&mut self.completed) {
                seen(self.arrived(slot, result)?, self.places[slot]);
                match next() {
                    Some(place) => self.push(slot, place),
                    None => in_flight -= 1,
                }
            }
        }
        self.ring.submitter().unregister_buffers()
    }

    fn push(&mut self, slot: usize, place: u64) {
        self.places[slot] = place;
        let buffer = self.memory[slot * self.piece..].as_mut_ptr();
        let read = opcode::ReadFixed::new(types::Fixed(0), buffer, self.piece as u32, slot as u16);
        let entry = read.offset(place).build().user_data(slot as u64);
        // SAFETY: the buffer and the file are registered, and no slice of the buffer is borrowed: its slot has
        // completed or was never used.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the queue has a place for each slot");
    }

    fn wait(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        let Self { ring, completed, .. } = self;
        completed.extend(ring.completion().map(|entry| (entry.user_data() as usize, entry.result())));
        Ok(())
    }

    fn arrived(&self, slot: usize, result: i32) -> io::Result<&[u8]> {
        match usize::try_from(result) {
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
            Ok(bytes) if bytes < self.piece => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(&self.memory[slot * self.piece..][..self.piece]),
        }
    }
}

/// The best ring that the kernel supports.
fn ring(entries: u32) -> io::Result<IoUring> {
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    best.or_else(|_| IoUring::new(entries))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Write;

    const PIECE: usize = 4096;

    #[test]
    fn every_place_is_read_once_and_a_short_read_is_an_error() {
        let mut file = tempfile::tempfile().expect("a temporary file");
        for page in 0..10_u8 {
            file.write_all(&[page; PIECE]).expect("room for it");
        }
        let Ok(reader) = RawReader::new(&file, PIECE, 3) else { return };
        let (mut places, mut seen) = ((0..10).rev(), BTreeMap::new());
        let next = || places.next().map(|page: u64| page * PIECE as u64);
        let read = reader.read_all(next, |bytes, place| {
            assert_eq!(seen.insert(place, bytes[PIECE - 1]), None);
        });
        read.expect("all of it is there");
        assert_eq!(seen, (0..10).map(|page| (u64::from(page) * PIECE as u64, page)).collect());

        let mut places = [10 * PIECE as u64].into_iter();
        let reader = RawReader::new(&file, PIECE, 3).expect("as before");
        let error = reader.read_all(|| places.next(), |_, _| panic!("nothing is there"));
        assert_eq!(error.expect_err("it is past the end").kind(), io::ErrorKind::UnexpectedEof);
    }

    /// Memory that this process has pinned, in KiB, as the kernel counts it; tests that run beside this one count, too.
    fn pinned_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("it is always there");
        let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("it has the line");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// 1. A reader has read all of its file and is dropped.
    /// 2. The kernel has closed its ring, and its buffers stay pinned until a kernel thread releases them.
    /// 3. The next reader's buffers exceed the limit of the group.
    #[test]
    fn nothing_is_pinned_when_all_is_read() {
        const LARGE: usize = 4 << 20;
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(LARGE as u64).expect("room for it");
        let before = pinned_kib();
        for _ in 0..16 {
            let Ok(reader) = RawReader::new(&file, LARGE, 1) else { return };
            let mut places = [0].into_iter();
            reader.read_all(|| places.next(), |_, _| {}).expect("it is there");
        }
        // Tests that run beside this one may have two or three buffers pinned.
        let pinned = pinned_kib();
        assert!(pinned < before + 3 * (LARGE as u64 >> 10), "{pinned} KiB, {before} before");
    }
}
