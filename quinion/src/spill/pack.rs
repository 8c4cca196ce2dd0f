//! Pack: a folio's bytes made smaller, if they can be, and a number by which they are known again. Pure.
//!
//! ```text
//!   folio of 8 pages  --lz4-->  9,700 bytes  -->  3 slots of 8, the rest of the last is zeros
//!                     --lz4--> 30,000 bytes  -->  no slot is saved: the 8 pages as they are
//! ```
//!
//! A folio that does not become at least a slot smaller is kept **plain**, so a single page always is. A plain folio
//! can be brought back in parts and split; one that is **packed** comes back as a whole.
//!
//! The checksum is 32 bits of a slot's bytes and its number. It detects devices that return other bytes than were
//! written, and stray writes by other programs, but no attacker, which could write a matching sum. Four lanes of 64
//! bits are multiplied by odd numbers and folded; a change of one word always changes its lane.

use crate::units::PAGE_SIZE;

pub const SLOT_BYTES: usize = PAGE_SIZE;

const ODD: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0xd6e8_feb8_6659_fd93];

/// The checksum by which the bytes of `slot` are verified when they are read back.
pub fn checksum(slot: u32, bytes: &[u8; SLOT_BYTES]) -> u32 {
    let mut lanes = ODD.map(|odd| odd ^ u64::from(slot));
    for words in bytes.as_chunks::<32>().0 {
        for ((lane, word), odd) in lanes.iter_mut().zip(words.as_chunks::<8>().0).zip(ODD) {
            *lane = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(odd).rotate_left(29);
        }
    }
    let folded =
        lanes.into_iter().fold(0, |sum: u64, lane| (sum ^ lane).wrapping_mul(ODD[0]).rotate_left(31));
    (folded ^ folded >> 32) as u32
}

/// `bytes` made smaller, if that saves a slot at least.
pub fn pack(bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.len() <= SLOT_BYTES {
        return None;
    }
    let mut packed = vec![0; lz4_flex::block::get_maximum_output_size(bytes.len())];
    let len = lz4_flex::block::compress_into(bytes, &mut packed).ok()?;
    packed.truncate(len);
    (len.div_ceil(SLOT_BYTES) < bytes.len() / SLOT_BYTES).then_some(packed)
}

/// The bytes of which `packed` was made; `None` unless they fill `bytes` exactly.
pub fn unpack(packed: &[u8], bytes: &mut [u8]) -> Option<()> {
    let len = lz4_flex::block::decompress_into(packed, bytes).ok()?;
    (len == bytes.len()).then_some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_folio_whose_packing_saves_no_slot_stays_as_it_is() {
        assert_eq!(pack(&[0; SLOT_BYTES]), None, "a page has no slot to save");
        let mut seed = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed as u8
        })
        .take(8 * SLOT_BYTES)
        .collect();
        assert_eq!(pack(&noise), None);
        assert!(pack(&[7; 8 * SLOT_BYTES]).unwrap().len() < SLOT_BYTES);
    }

    #[test]
    fn every_changed_bit_and_a_wrong_place_change_the_checksum() {
        let mut bytes = [0x5a; SLOT_BYTES];
        let sum = checksum(3, &bytes);
        assert_ne!(sum, checksum(4, &bytes));
        for bit in 0..SLOT_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum, checksum(3, &bytes), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let first: [u8; 8] = bytes[..8].try_into().unwrap();
        bytes[..8].copy_from_slice(&[1; 8]);
        bytes[32..40].copy_from_slice(&first);
        assert_ne!(sum, checksum(3, &bytes));
    }

    proptest! {
        #[test]
        fn packed_bytes_are_unpacked_unchanged(
            pages in 2usize..9,
            pieces in proptest::collection::vec((any::<u8>(), 1usize..9000), 1..40),
        ) {
            let mut bytes: Vec<u8> = Vec::new();
            pieces.iter().cycle().take(200).for_each(|(byte, len)| bytes.extend(std::iter::repeat_n(*byte, *len)));
            bytes.resize(pages * SLOT_BYTES, 0);
            if let Some(packed) = pack(&bytes) {
                prop_assert!(packed.len().div_ceil(SLOT_BYTES) < pages);
                let mut back = vec![0; bytes.len()];
                prop_assert_eq!(unpack(&packed, &mut back), Some(()));
                prop_assert_eq!(&back, &bytes);
                let mut short = vec![0; bytes.len() + SLOT_BYTES];
                prop_assert_eq!(unpack(&packed, &mut short), None, "not of that length");
            }
        }
    }
}
