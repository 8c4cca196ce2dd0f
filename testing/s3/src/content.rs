//! Content: bytes that follow from a version and a position.
//!
//! Any byte can be checked by itself, wherever a read began. Two versions have the same byte at one place of 256, so a
//! test that tells versions apart reads more than some bytes.
//!
//! Not an invariant: that two objects differ. Give each versions of its own, where a test is to see a mixture.

use bytes::Bytes;

/// The bytes of an object of `len` bytes in its `version`.
pub fn content(version: u32, len: usize) -> Bytes {
    (0..len).map(|at| byte(version, at as u64)).collect::<Vec<u8>>().into()
}

/// The byte at `at` of an object in its `version`.
pub fn byte(version: u32, at: u64) -> u8 {
    let mixed = (at ^ u64::from(version) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8 ^ version as u8
}

/// Whether `bytes`, read at `offset`, are those of `version`.
///
/// # Panics
/// They are not.
#[track_caller]
pub fn check(version: u32, offset: u64, bytes: &[u8]) {
    let wrong = bytes.iter().enumerate().find(|&(at, &is)| is != byte(version, offset + at as u64));
    if let Some((at, is)) = wrong {
        panic!("byte {} of version {version} is {is}", offset + at as u64);
    }
}

/// The version that an ETag of the server's tells.
pub fn version_of(e_tag: &str) -> Option<u32> {
    e_tag.trim_matches('"').strip_prefix('v')?.parse().ok()
}
