//! Reads: one read of a served object, chosen by dice among the ways that a client has.
//!
//! ```text
//!   dice --> pin, ranges, prefetch and residency, ready bytes, or a plain read --> each byte checked by `s3::check`
//! ```
//!
//! Not an invariant: that each call reads. A prefetch and a look at what is resident copy nothing.

use quinion_service::{ClientFile, RangeRead};
use quinion_testing::content::Dice;
use quinion_testing_s3 as s3;

/// Reads some bytes of version 1.
pub fn read_once(file: &ClientFile, random: &mut Dice) {
    let len = 1 + random.below(200_000);
    let at = random.below(file.len() - 2 * len);
    let mut buffer = vec![0; len as usize];
    match random.below(6) {
        0 => {
            let pin = file.pin(at..at + len).unwrap();
            assert_eq!(pin.len() as u64, len);
            s3::check(1, at, &pin.to_vec());
        }
        1 => {
            let mut second = buffer.clone();
            let mut ranges = [
                RangeRead { offset: at, buffer: &mut buffer },
                RangeRead { offset: at + len, buffer: &mut second },
            ];
            file.read_ranges(&mut ranges).unwrap();
            ranges.iter().for_each(|range| s3::check(1, range.offset, range.buffer));
        }
        2 => {
            file.prefetch(at..at + len).unwrap();
            file.residents(at..at + len).unwrap();
            file.is_served().unwrap();
        }
        3 => {
            if file.read_ready(&mut buffer, at).unwrap() {
                s3::check(1, at, &buffer);
            }
        }
        _ => {
            file.read_exact_at(&mut buffer, at).unwrap();
            s3::check(1, at, &buffer);
        }
    }
}
