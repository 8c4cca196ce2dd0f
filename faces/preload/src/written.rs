//! Written: which files this process has opened for writing.
//!
//! A set of identities that only grows, kept as bits: a file hashes to three
//! of them. It may say "written" of a file that was not, and then that file is
//! read by the kernel; it never says "not written" of one that was.
//!
//! Whoever opens for writing first adds to the set and then looks for served
//! descriptors; whoever starts to serve first publishes the descriptor and then
//! looks in the set. In the one order of the SeqCst steps, one of them sees
//! the other.

use core::sync::atomic::{AtomicU64, Ordering};

const BITS: u64 = 1 << 20;
static WORDS: [AtomicU64; BITS as usize / 64] = [const { AtomicU64::new(0) }; BITS as usize / 64];

/// The three bits of a file.
fn bits(device: u64, inode: u64) -> [u64; 3] {
    let mut x = inode ^ device.rotate_left(32);
    [0, 1, 2].map(|_| {
        // One step of a well-known generator: a good enough mix of all bits.
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let y = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let y = (y ^ (y >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (y ^ (y >> 31)) % BITS
    })
}

/// Adds a file.
pub fn add(device: u64, inode: u64) {
    for bit in bits(device, inode) {
        WORDS[(bit / 64) as usize].fetch_or(1 << (bit % 64), Ordering::SeqCst); // see the head of the file
    }
}

/// Whether a file was added, or looks like one that was.
pub fn contains(device: u64, inode: u64) -> bool {
    let is_set = |bit: u64| WORDS[(bit / 64) as usize].load(Ordering::SeqCst) >> (bit % 64) & 1 != 0;
    bits(device, inode).into_iter().all(is_set)
}
