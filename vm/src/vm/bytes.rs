//! Bytes: bytes of the snapshot as the kernel takes them: whole pages, of zeros or not, the same as recorded or not.
//!
//! ```text
//!   chunks   [--------|-----][---|-------]        of a pin, which end where folios end, or of a buffer
//!   units    [--------] [--------] [-----..       whole_units: none lies in two chunks
//!   kinds    [00000000] [x1x2x3x4]                same_kind: pages of zeros are asked for, and not copied
//! ```
//!
//! Pure.

use quinion::Pinned;
use quinion::internals::units::PAGE_SIZE;

use super::PAGE;
use crate::pages::ImagePart;

pub(super) enum SnapshotBytes {
    /// Bytes that lie in the cache.
    Pinned(Pinned),
    /// The first `len` of a buffer.
    Copied { buffer: Vec<u8>, len: usize },
}

impl SnapshotBytes {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Pinned(pinned) => pinned.len(),
            Self::Copied { len, .. } => *len,
        }
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        let (pinned, copied) = match self {
            Self::Pinned(pinned) => (Some(pinned), None),
            Self::Copied { buffer, len } => (None, Some(&buffer[..*len])),
        };
        pinned.into_iter().flat_map(Pinned::chunks).chain(copied)
    }

    pub(super) fn pages(&self) -> impl Iterator<Item = &[u8]> {
        self.chunks().flat_map(|chunk| chunk.chunks(PAGE_SIZE))
    }
}

/// The stretches of `part` whose pages are all unchanged. A large page is supplied if what the record names of it is.
pub(super) fn same_parts(part: ImagePart, same: &[bool], unit: u64) -> Vec<ImagePart> {
    if unit != PAGE {
        return if same.iter().all(|same| *same) { vec![part] } else { Vec::new() };
    }
    let (mut parts, mut at) = (Vec::new(), 0);
    for stretch in same.chunk_by(|a, b| a == b) {
        if stretch[0] {
            let skipped = at as u64 * PAGE;
            let (address, offset) = (part.address + skipped, part.offset + skipped);
            parts.push(ImagePart { address, offset, bytes: stretch.len() as u64 * PAGE });
        }
        at += stretch.len();
    }
    parts
}

/// Bytes that are borrowed, or that were put together.
pub(super) enum SuppliedBytes<'a> {
    Borrowed(&'a [u8]),
    Joined(Vec<u8>),
}

impl std::ops::Deref for SuppliedBytes<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Joined(bytes) => bytes,
        }
    }
}

/// `chunks`, whole units together, cut at multiples of `unit`; a unit that lies in several of them is put together.
pub(super) fn whole_units<'a>(
    chunks: impl Iterator<Item = &'a [u8]>,
    unit: usize,
) -> impl Iterator<Item = SuppliedBytes<'a>> {
    let mut open: Vec<u8> = Vec::new();
    chunks.flat_map(move |mut chunk| {
        let mut pieces = Vec::new();
        if !open.is_empty() {
            let (joins, rest) = chunk.split_at(chunk.len().min(unit - open.len()));
            open.extend_from_slice(joins);
            chunk = rest;
            if open.len() == unit {
                pieces.push(SuppliedBytes::Joined(std::mem::take(&mut open)));
            }
        }
        let (whole, rest) = chunk.split_at(chunk.len() / unit * unit);
        if !whole.is_empty() {
            pieces.push(SuppliedBytes::Borrowed(whole));
        }
        open.extend_from_slice(rest);
        pieces
    })
}

/// Bytes as stretches of whole pages that are all zeros, and of others. Large pages are not asked: they cannot be
/// shared.
pub(super) fn same_kind(bytes: &[u8], unit: usize) -> Vec<(&[u8], bool)> {
    let mut parts: Vec<(&[u8], bool)> = Vec::new();
    if unit != PAGE_SIZE {
        return vec![(bytes, false)];
    }
    let (mut begin, mut kind) = (0, None);
    for (number, page) in bytes.chunks(unit).enumerate() {
        let is_zero = is_zero(page);
        if kind.is_some_and(|kind| kind != is_zero) {
            parts.push((&bytes[begin..number * unit], !is_zero));
            begin = number * unit;
        }
        kind = Some(is_zero);
    }
    if let Some(kind) = kind {
        parts.push((&bytes[begin..], kind));
    }
    parts
}

/// Most pages that are not zeros differ in their first bytes.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|some| some.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn units_are_whole_and_in_order(cuts in prop::collection::vec(1..30_usize, 1..20), unit in 1..9_usize) {
            let len = cuts.iter().sum::<usize>().next_multiple_of(unit);
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let (mut chunks, mut rest) = (Vec::new(), &bytes[..]);
            for &cut in &cuts {
                let (chunk, behind) = rest.split_at(cut);
                chunks.push(chunk);
                rest = behind;
            }
            chunks.push(rest);
            let pieces: Vec<SuppliedBytes<'_>> = whole_units(chunks.into_iter(), unit).collect();
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len().is_multiple_of(unit)));
            prop_assert_eq!(pieces.iter().flat_map(|piece| piece.iter().copied()).collect::<Vec<_>>(), bytes);
        }

        #[test]
        fn parts_of_a_trace_are_those_that_are_the_same(same in prop::collection::vec(any::<bool>(), 1..40)) {
            let part = ImagePart { address: 7 << 20, offset: 3 << 20, bytes: same.len() as u64 * PAGE };
            let parts = same_parts(part, &same, PAGE);
            let mut found = vec![false; same.len()];
            for stretch in &parts {
                prop_assert_eq!(stretch.address - part.address, stretch.offset - part.offset);
                let first = ((stretch.offset - part.offset) / PAGE) as usize;
                found[first..first + (stretch.bytes / PAGE) as usize].fill(true);
            }
            prop_assert_eq!(&found, &same);
            prop_assert!(parts.windows(2).all(|pair| pair[0].offset + pair[0].bytes < pair[1].offset));
        }

        #[test]
        fn stretches_are_of_one_kind_and_as_long_as_can_be(pages in prop::collection::vec(0..3_u8, 1..12)) {
            let mut bytes = vec![0; pages.len() * PAGE_SIZE];
            for (number, &kind) in pages.iter().enumerate() {
                let at = number * PAGE_SIZE + if kind == 1 { PAGE_SIZE - 1 } else { 0 };
                bytes[at] = kind;
            }
            let parts = same_kind(&bytes, PAGE_SIZE);
            let naive: Vec<bool> = pages.iter().map(|&kind| kind == 0).collect();
            let found: Vec<bool> =
                parts.iter().flat_map(|(part, kind)| vec![*kind; part.len() / PAGE_SIZE]).collect();
            prop_assert_eq!(found, naive);
            prop_assert!(parts.windows(2).all(|pair| pair[0].1 != pair[1].1));
            prop_assert_eq!(parts.iter().map(|(part, _)| part.len()).sum::<usize>(), bytes.len());
        }
    }
}
