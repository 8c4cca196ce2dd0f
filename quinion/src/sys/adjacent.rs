//! Adjacent: pieces of the cache's memory, mapped a second time so that they lie together.
//!
//! ```text
//!   the arena      [ ... 0-2 MiB ... | other files | 2-4 MiB ... ]     mapped once
//!   a mapping      [ 0-2 MiB | 2-4 MiB ]                               the same memory, by mremap(2)
//! ```
//!
//! Bytes that are pinned lie in as many pieces as they have folios. Where these are long, a second mapping costs less
//! than a copy. It begins at the same place within a large page as most of the bytes do, for the kernel to map such.
//!
//! Invariants:
//!  1. A mapping is read-only, and in no process but the one that made it: a forked child may have other memory at its
//!     addresses, and does not unmap it.
//!  2. Nothing but the caller keeps the bytes where they are. It ends the mapping before it lets them go.
//!
//! Cost: `mremap` and `mprotect` for each piece, 2 to 4 microseconds, and the first touch of each page.

use std::ffi::c_void;
use std::fmt;
use std::ptr::null_mut;

use rustix::mm::{
    MapFlags, MprotectFlags, MremapFlags, ProtFlags, mmap_anonymous, mprotect, mremap_fixed, munmap,
};

use crate::units::{EXTENT_SIZE, PAGE_SIZE};

use super::fork::ForkGuard;

/// Pieces that are shorter than this on average are not worth a system call each: copying them costs less.
const PIECE_BYTES_MIN: usize = 64 << 10;

/// Pieces of memory, mapped once more in their order.
pub struct AdjacentMapping {
    /// The reserved addresses, which are more than the bytes.
    reservation: (*mut c_void, usize),
    first: *const u8,
    len: usize,
    process: ForkGuard,
}

// SAFETY: the mapping is read-only, and of memory that no thread changes while the caller keeps it.
unsafe impl Send for AdjacentMapping {}
// SAFETY: as above.
unsafe impl Sync for AdjacentMapping {}

impl AdjacentMapping {
    /// Maps `chunks`, which follow each other in a file. `None`: they are too short for it, or do not meet at the ends
    /// of pages, or the kernel does not map them a second time; the caller copies them.
    ///
    /// # Safety
    /// They are of shared memory that is mapped, and not written, for as long as the mapping lives.
    pub unsafe fn of<'c>(chunks: impl Iterator<Item = &'c [u8]>) -> Option<Self> {
        let pieces = joined(chunks);
        // 1 is it worth it, and possible?
        if !join_at_page_boundaries(&pieces) {
            return None;
        }
        let len: usize = pieces.iter().map(|piece| piece.len).sum();
        if len / pieces.len() < PIECE_BYTES_MIN {
            return None;
        }
        // 2 addresses, and the place in them where most bytes are at their place within a large page
        let inside = pieces[0].first.addr() % PAGE_SIZE;
        let bytes = (inside + len).next_multiple_of(PAGE_SIZE) + EXTENT_SIZE;
        // SAFETY: fresh addresses, of the kernel's choice.
        let base = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
        let base = base.ok()?;
        let place = phase(&pieces).wrapping_sub(inside).wrapping_sub(base.addr()) % EXTENT_SIZE;
        let first = base.wrapping_byte_add(place + inside).cast::<u8>().cast_const();
        // From here on the drop gives the addresses back.
        let made = Self { reservation: (base, bytes), first, len, process: ForkGuard::new() };
        // 3 each piece, behind the one before
        let mut to = base.wrapping_byte_add(place);
        for piece in &pieces {
            let before = piece.first.addr() % PAGE_SIZE;
            let from = piece.first.wrapping_sub(before).cast_mut().cast::<c_void>();
            let bytes = (before + piece.len).next_multiple_of(PAGE_SIZE);
            // SAFETY: with an old length of 0, `mremap` leaves the pages that are mapped at `from`, as the caller
            // promises, and maps them at `to` as well, which lies in what was reserved.
            unsafe {
                mremap_fixed(from, 0, bytes, MremapFlags::MAYMOVE, to).ok()?;
                mprotect(to, bytes, MprotectFlags::READ).ok()?;
            }
            to = to.wrapping_byte_add(bytes);
        }
        Some(made)
    }

    /// The bytes; `None` in a forked child, which does not have them.
    pub fn bytes(&self) -> Option<&[u8]> {
        // SAFETY: mapped by `of` as long as this lives, of bytes that do not change meanwhile, as its caller promised.
        let bytes = || unsafe { std::slice::from_raw_parts(self.first, self.len) };
        (!self.process.is_forked()).then(bytes)
    }
}

impl Drop for AdjacentMapping {
    fn drop(&mut self) {
        if !self.process.is_forked() {
            let (base, bytes) = self.reservation;
            // SAFETY: these addresses are this value's own, and no slice of it is left. Where the kernel refuses,
            // they stay reserved.
            let _stays = unsafe { munmap(base, bytes) };
        }
    }
}

impl fmt::Debug for AdjacentMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdjacentMapping").field("len", &self.len).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    first: *const u8,
    len: usize,
}

fn joined<'c>(chunks: impl Iterator<Item = &'c [u8]>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for chunk in chunks.filter(|chunk| !chunk.is_empty()) {
        match pieces.last_mut() {
            Some(last) if std::ptr::eq(last.first.wrapping_add(last.len), chunk.as_ptr()) => {
                last.len += chunk.len()
            }
            _ => pieces.push(Piece { first: chunk.as_ptr(), len: chunk.len() }),
        }
    }
    pieces
}

/// There is one piece at least.
fn join_at_page_boundaries(pieces: &[Piece]) -> bool {
    let Some((_, behind)) = pieces.split_first() else { return false };
    let end = |piece: &Piece| piece.first.addr() + piece.len;
    behind.iter().all(|piece| piece.first.addr().is_multiple_of(PAGE_SIZE))
        && pieces[..behind.len()].iter().all(|piece| end(piece).is_multiple_of(PAGE_SIZE))
}

/// Where byte 0 has to lie within a large page so that the bytes of the longest piece lie as they do now.
fn phase(pieces: &[Piece]) -> usize {
    let (mut before, mut longest, mut phase) = (0, 0, 0);
    for piece in pieces {
        if piece.len > longest {
            (longest, phase) = (piece.len, piece.first.addr().wrapping_sub(before));
        }
        before += piece.len;
    }
    phase
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 64 << 10;

    fn shared(pieces: usize) -> &'static [u8] {
        let bytes = pieces * PIECE;
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: fresh addresses, which are never given back, and written before a slice is made.
        unsafe {
            let at = mmap_anonymous(null_mut(), bytes, read_write, MapFlags::SHARED).unwrap().cast::<u8>();
            for offset in 0..bytes {
                at.add(offset).write((offset / PAGE_SIZE * 7 + offset % 13) as u8);
            }
            std::slice::from_raw_parts(at, bytes)
        }
    }

    fn mapped(chunks: &[&[u8]]) -> Option<AdjacentMapping> {
        // SAFETY: all chunks of the tests are of memory that stays, and is not written.
        unsafe { AdjacentMapping::of(chunks.iter().copied()) }
    }

    #[test]
    fn pieces_in_any_order_lie_together() {
        let memory = shared(8);
        let piece = |nth: usize| &memory[nth * PIECE..(nth + 1) * PIECE];
        let chunks = [&piece(5)[100..], piece(6), piece(1), piece(3), &piece(0)[..PIECE - 77]];
        let mapping = mapped(&chunks).expect("they are long, and meet at pages");
        assert_eq!(mapping.bytes().unwrap(), chunks.concat());
        let inside = |first: *const u8| first.addr() % PAGE_SIZE;
        assert_eq!(inside(mapping.first), inside(chunks[0].as_ptr()), "pages are mapped as they are");
    }

    #[test]
    fn the_longest_piece_keeps_its_place_within_a_large_page() {
        let memory = shared(80);
        let chunks = [&memory[..PIECE], &memory[4 * PIECE..79 * PIECE], &memory[2 * PIECE..3 * PIECE]];
        let mapping = mapped(&chunks).unwrap();
        assert_eq!(mapping.bytes().unwrap(), chunks.concat());
        let place = |first: *const u8| first.addr() % EXTENT_SIZE;
        assert_eq!(place(mapping.first.wrapping_add(PIECE)), place(chunks[1].as_ptr()));
    }

    #[test]
    fn short_pieces_and_private_pages_are_left_to_a_copy() {
        let memory = shared(4);
        let private = vec![0_u8; 2 * PIECE];
        assert!(mapped(&[]).is_none(), "nothing");
        assert!(mapped(&[&memory[..PIECE - 1], &memory[PIECE..3 * PIECE]]).is_none(), "a gap within a page");
        assert!(
            mapped(&[&memory[..PAGE_SIZE], &memory[2 * PAGE_SIZE..3 * PAGE_SIZE]]).is_none(),
            "short ones"
        );
        assert!(mapped(&[&private[..PIECE], &memory[PIECE..3 * PIECE]]).is_none(), "private memory");
    }

    #[test]
    fn mappings_are_given_back() {
        let memory = shared(4);
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let chunks = [&memory[2 * PIECE..], &memory[..PIECE]];
        drop(mapped(&chunks));
        let before = maps();
        for _ in 0..1000 {
            assert!(mapped(&chunks).is_some());
        }
        // Other tests map memory meanwhile, but not by the thousand.
        assert!(maps() < before + 500, "{before} mappings before, {} now", maps());
    }
}
