//! Any bytes as a packed snapshot: opened, its first chunks read; an error, or bytes that have their digests.
//!
//! ```text
//!   the input     a pack, whose digests are put right first: hardly an input would come past them
//! ```
//!
//! Inputs that do not begin with the magic and a header of version 1 are given both, so that the fuzzer spends its time
//! behind them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quinion_vm::internals::read_made_up;

const HEADER_BYTES: usize = 128;

fuzz_target!(|data: &[u8]| {
    let mut pack = data.to_vec();
    pack.resize(data.len().max(HEADER_BYTES + 16), 0);
    pack[..16].copy_from_slice(b"quinion vm pack\n");
    pack[16..20].copy_from_slice(&1_u32.to_le_bytes());
    let bytes = pack.len() as u64;
    pack[32..40].copy_from_slice(&bytes.to_le_bytes());
    pack[44..48].fill(0);
    pack[80..96].fill(0);
    let _ = read_made_up(pack);
});
