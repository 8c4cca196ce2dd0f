//! Checker: which version bytes are of, at the speed of a comparison.
//!
//! A reader of many small ranges would spend its time with [`byte`](crate::byte). So the bytes of the latest versions
//! are kept whole.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

use crate::content::content;

/// How many versions are kept.
const KEPT: usize = 24;

/// Knows the bytes of every version of an object of one length.
#[derive(Debug)]
pub struct Checker {
    len: usize,
    kept: Mutex<BTreeMap<u32, Bytes>>,
}

impl Checker {
    /// A checker of objects of `len` bytes.
    pub fn new(len: usize) -> Self {
        Self { len, kept: Mutex::default() }
    }

    fn whole(&self, version: u32) -> Bytes {
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = lock().get(&version) {
            return bytes.clone();
        }
        let bytes = content(version, self.len);
        let mut kept = lock();
        kept.insert(version, bytes.clone());
        while kept.len() > KEPT {
            kept.pop_first();
        }
        bytes
    }

    /// Whether `bytes`, read at `offset`, are those of `version`, as many as there can be.
    pub fn is_of(&self, version: u32, offset: u64, bytes: &[u8]) -> bool {
        let end = (offset as usize).saturating_add(bytes.len());
        end <= self.len && self.whole(version)[offset as usize..end] == *bytes
    }

    /// The one of `versions` that all of `parts`, each with its offset, are of.
    pub fn version_of_all(&self, versions: RangeInclusive<u32>, parts: &[(u64, &[u8])]) -> Option<u32> {
        versions
            .rev()
            .find(|&version| parts.iter().all(|(offset, bytes)| self.is_of(version, *offset, bytes)))
    }
}
