//! Pages: a file that is nowhere, each of whose pages says which one it is.
//!
//! A backend as a user of the library may write one. A fill costs a copy of 4 KiB
//! from memory that is near, so that what is measured is the cache and not where bytes come from.

use std::io;

use quinion::backend::{Attributes, Backend, Fill, Identity, Version};

pub use quinion::units::PAGE_SIZE as PAGE;

/// The content of a page but for its first word.
static PAGE_CONTENT: [u8; PAGE] = [0x51; PAGE];

/// What stands at the beginning of page `page`.
pub fn word_of(page: u64) -> [u8; 8] {
    (page ^ 0x7061_6765_0000_0000).to_le_bytes()
}

/// Writes page `page` to `to`.
pub fn write_page(to: &mut [u8; PAGE], page: u64) {
    to.copy_from_slice(&PAGE_CONTENT);
    to[..8].copy_from_slice(&word_of(page));
}

/// A file of so many such pages.
#[derive(Debug)]
pub struct Pages(pub u64);

impl Backend for Pages {
    fn name(&self) -> &'static str {
        "pages"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        // No device has the number, and each cache here has one such file.
        let identity = Identity { device: u64::MAX - 1, inode: 1, born: 0 };
        let version = Version { modified: 0, changed: 0, settled: true, steps: true };
        Ok(Attributes { identity, version, size: self.0 * PAGE as u64 })
    }
    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            let (first, len) = (fill.position() / PAGE as u64, fill.len());
            for (page, at) in (first..).zip((0..len).step_by(PAGE)) {
                fill.write(at, &PAGE_CONTENT);
                fill.write(at, &word_of(page));
            }
            let bytes = (self.0.saturating_sub(first) * PAGE as u64).min(len as u64);
            fill.complete(Ok(bytes as usize));
        }
    }
}

/// An order of the numbers below 2^`bits` that looks random: no number comes twice.
pub fn shuffled(number: u64, bits: u32) -> u64 {
    let mask = (1 << bits) - 1;
    let mut mixed = number & mask;
    for odd in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb_u64] {
        mixed ^= mixed >> bits.div_ceil(2);
        mixed = mixed.wrapping_mul(odd) & mask;
    }
    mixed ^ (mixed >> bits.div_ceil(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quinion::Cache;
    use std::collections::BTreeSet;
    use std::sync::Arc;

    #[test]
    fn shuffled_numbers_are_all_numbers_once() {
        for bits in [1, 2, 7, 12] {
            let all: BTreeSet<u64> = (0..1 << bits).map(|number| shuffled(number, bits)).collect();
            assert_eq!((all.len(), all.last()), (1 << bits, Some(&((1 << bits) - 1))));
        }
    }

    #[test]
    fn each_page_says_which_it_is() {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().expect("there is memory");
        let file = cache.open_backend(Arc::new(Pages(100))).expect("it is there");
        let (mut page, mut same) = ([0; PAGE], [0; PAGE]);
        for number in [0, 1, 57, 99] {
            assert_eq!(file.read_at(&mut page, number * PAGE as u64).expect("it is read"), PAGE);
            write_page(&mut same, number);
            assert_eq!(page, same);
        }
        assert_eq!(file.read_at(&mut page, 100 * PAGE as u64).expect("it ends"), 0);
    }
}
