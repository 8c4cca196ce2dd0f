//! Recognition: whether a file with a VM's memory is a pack, by its first and its last bytes.
//!
//! ```text
//!   pack   [ magic, 16 | header, index, chunks ..  | magic, 16 ]
//!   flat   [ the VM's memory, as it is                         ]
//! ```
//!
//! A pack that is taken for flat memory would be served as such: wrong bytes. So a file counts as a pack if **most** of
//! either magic is there, and it is refused then if it is no whole pack. One damaged byte, or one damaged sector at
//! either end, hides no pack. A file that was cut within its first bytes counts, too. A flat snapshot has neither magic
//! unless the VM has put it there; that VM harms itself alone, since a pack is read as hostile input.
//!
//! Builds without the feature `pack` recognize packs as well, and refuse them.

/// The first bytes of a pack.
pub(super) const MAGIC: [u8; 16] = *b"quinion vm pack\n";
/// The last bytes of a pack.
pub(super) const END_MAGIC: [u8; 16] = *b"\nend of vm pack\n";
/// Bytes of a magic that have to be right.
const ALIKE_MIN: usize = 12;

/// Whether a file of `bytes` bytes is a pack, or is meant to be one. `read` fills its buffer from a position.
///
/// # Errors
/// Neither end can be read. (An unreadable sector of a flat snapshot is an error of the fault that wants it.)
pub(super) fn is_pack<E>(
    bytes: u64,
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
) -> Result<bool, E> {
    let len = bytes.min(MAGIC.len() as u64);
    let [first, last] = [(MAGIC, 0), (END_MAGIC, bytes - len)].map(|(magic, position)| {
        let mut found = [0; MAGIC.len()];
        let found = &mut found[..len as usize];
        read(found, position).map(|()| is_alike(found, &magic))
    });
    match (first, last) {
        (Ok(true), _) | (_, Ok(true)) => Ok(true),
        (Ok(false), _) | (_, Ok(false)) => Ok(false),
        (Err(error), Err(_)) => Err(error),
    }
}

fn is_alike(found: &[u8], magic: &[u8; MAGIC.len()]) -> bool {
    let alike = found.iter().zip(magic).filter(|(a, b)| a == b).count();
    let is_cut = found.len() < magic.len() && !found.is_empty();
    alike >= ALIKE_MIN || (is_cut && alike == found.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(bytes: &[u8]) -> bool {
        let read = |into: &mut [u8], position: u64| {
            into.copy_from_slice(&bytes[position as usize..position as usize + into.len()]);
            Ok::<(), ()>(())
        };
        is_pack(bytes.len() as u64, read).expect("memory can be read")
    }

    #[test]
    fn a_pack_with_a_damaged_byte_or_end_is_recognized_and_so_is_a_cut_one() {
        let whole = [&MAGIC[..], &[7; 100], &END_MAGIC].concat();
        assert!(told(&whole));
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << bit;
                assert!(told(&damaged), "byte {at}");
            }
        }
        (1..whole.len()).for_each(|len| assert!(told(&whole[..len]), "cut at {len}"));
        let (mut first, mut last) = (whole.clone(), whole);
        first[..16].fill(0);
        last[100..].fill(0);
        assert!(told(&first) && told(&last));
        first[..16].copy_from_slice(&MAGIC);
        (first[5], first[120]) = (0xFF, 0xFF);
        assert!(told(&first), "one byte of each end is damaged");
    }

    #[test]
    fn flat_memory_is_no_pack() {
        for flat in [&[][..], &[0; 5], &[0; 4096], b"quinion is a page cache in user space", b"x"] {
            assert!(!told(flat), "{flat:?}");
        }
    }

    #[test]
    fn one_unreadable_end_hides_nothing_and_two_are_an_error() {
        let of = |first: Result<&[u8; 16], u8>, last: Result<&[u8; 16], u8>| {
            is_pack(4096, |into, position| {
                into.copy_from_slice(if position == 0 { first? } else { last? });
                Ok(())
            })
        };
        assert_eq!(of(Err(5), Ok(&END_MAGIC)), Ok(true));
        assert_eq!(of(Ok(&MAGIC), Err(5)), Ok(true));
        assert_eq!(of(Err(5), Ok(&[0; 16])), Ok(false));
        assert_eq!(of(Ok(&[0; 16]), Err(5)), Ok(false));
        assert_eq!(of(Err(5), Err(6)), Err(5));
    }
}
