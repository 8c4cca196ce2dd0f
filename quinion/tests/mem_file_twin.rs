//! A memory file against a naive twin: a vector of pages, each a hole or bytes.
//!
//! ```text
//!   file    folios of all orders, splits, copies for pins, holes looked up     twin   Vec<Option<page>>, a length
//!           after every step: length, bytes, what is data and what is a hole, what is charged; pins as they were
//! ```
//!
//! A page of the twin is data from its first write until it is punched or cut off as a whole. So is the file's, where
//! the smallest folio is a page.

use std::io::{IoSlice, IoSliceMut};

use proptest::prelude::*;
use quinion::{Cache, MemFile, MemFileOptions, Pinned};

const PAGE: usize = 4096;
/// Bytes that steps touch; a little more than the largest folio here.
const BYTES: usize = 80 * PAGE;

#[derive(Clone, Debug)]
enum Op {
    Write { at: usize, len: usize },
    WriteVectored { at: usize, lens: Vec<usize> },
    Append { len: usize },
    SetLen(usize),
    Punch { at: usize, len: usize },
    Read { at: usize, len: usize },
    ReadVectored { at: usize, lens: Vec<usize> },
    SeekData(usize),
    SeekHole(usize),
    Pin { at: usize, len: usize },
    Unpin(usize),
}

fn at() -> impl Strategy<Value = usize> {
    let near = (0..BYTES / PAGE, 0..3usize).prop_map(|(page, near)| (page * PAGE + near).saturating_sub(1));
    prop_oneof![3 => near, 1 => 0..BYTES]
}
fn len() -> impl Strategy<Value = usize> {
    prop_oneof![
        2 => 0..200usize,
        2 => (1..20usize).prop_map(|pages| pages * PAGE),
        2 => 0..20 * PAGE,
        1 => 0..BYTES,
    ]
}
fn lens() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![2 => 0..100usize, 1 => 0..9000usize], 0..6)
}
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (at(), len()).prop_map(|(at, len)| Op::Write { at, len }),
        2 => (at(), lens()).prop_map(|(at, lens)| Op::WriteVectored { at, lens }),
        1 => (0..3 * PAGE).prop_map(|len| Op::Append { len }),
        3 => at().prop_map(Op::SetLen),
        4 => (at(), len()).prop_map(|(at, len)| Op::Punch { at, len }),
        3 => (at(), len()).prop_map(|(at, len)| Op::Read { at, len }),
        1 => (at(), lens()).prop_map(|(at, lens)| Op::ReadVectored { at, lens }),
        1 => at().prop_map(Op::SeekData),
        1 => at().prop_map(Op::SeekHole),
        2 => (at(), len()).prop_map(|(at, len)| Op::Pin { at, len }),
        2 => any::<usize>().prop_map(Op::Unpin),
    ]
}

#[derive(Default)]
struct Twin {
    pages: Vec<Option<Box<[u8; PAGE]>>>,
    len: usize,
}

impl Twin {
    fn write(&mut self, at: usize, bytes: &[u8]) {
        for (nth, &byte) in bytes.iter().enumerate() {
            let (page, inside) = ((at + nth) / PAGE, (at + nth) % PAGE);
            if self.pages.len() <= page {
                self.pages.resize_with(page + 1, || None);
            }
            self.pages[page].get_or_insert_with(|| Box::new([0; PAGE]))[inside] = byte;
        }
        self.len = if bytes.is_empty() { self.len } else { self.len.max(at + bytes.len()) };
    }
    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let end = at.saturating_add(len).min(self.len);
        (at..end).map(|at| self.page(at).map_or(0, |page| page[at % PAGE])).collect()
    }
    fn page(&self, at: usize) -> Option<&[u8; PAGE]> {
        self.pages.get(at / PAGE)?.as_deref()
    }
    fn set_len(&mut self, len: usize) {
        if len < self.len {
            self.zero(len, self.len);
            self.pages.truncate(len.div_ceil(PAGE));
        }
        self.len = len;
    }
    fn punch(&mut self, at: usize, len: usize) {
        let end = (at + len).min(self.len);
        if at >= end {
            return;
        }
        self.zero(at, end);
        // The last page counts as whole if all that the file has of it lies in the range.
        let whole_end = if end == self.len { end.div_ceil(PAGE) } else { end / PAGE };
        (at.div_ceil(PAGE)..whole_end.min(self.pages.len())).for_each(|page| self.pages[page] = None);
    }
    fn zero(&mut self, at: usize, end: usize) {
        for at in at..end {
            if let Some(Some(page)) = self.pages.get_mut(at / PAGE) {
                page[at % PAGE] = 0;
            }
        }
    }
    fn seek_data(&self, at: usize) -> Option<usize> {
        (at..self.len).find(|&at| self.page(at).is_some())
    }
    fn seek_hole(&self, at: usize) -> Option<usize> {
        let found = (at..self.len).find(|&at| self.page(at).is_none());
        found.or((at < self.len).then_some(self.len))
    }
    fn data(&self) -> u64 {
        self.pages.iter().flatten().count() as u64
    }
}

/// Bytes that no other step writes.
fn bytes_of(step: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31) ^ (at >> 8) ^ (step * 97 + 1)) as u8).collect()
}

fn pinned_bytes(pinned: &Pinned) -> Vec<u8> {
    pinned.chunks().flatten().copied().collect()
}

struct Pair {
    cache: Cache,
    file: MemFile,
    twin: Twin,
    pins: Vec<(Pinned, Vec<u8>)>,
}

impl Pair {
    fn new(order_max: u8) -> Self {
        let cache = Cache::builder().memory(16 << 20).folio_order_max(order_max).build().unwrap();
        let file = cache.mem_file(MemFileOptions::new()).unwrap();
        Self { cache, file, twin: Twin::default(), pins: Vec::new() }
    }

    fn apply(&mut self, step: usize, op: &Op) {
        let (file, twin) = (&self.file, &mut self.twin);
        match op {
            &Op::Write { at, len } => {
                let bytes = bytes_of(step, len);
                file.write_all_at(&bytes, at as u64).unwrap();
                twin.write(at, &bytes);
            }
            Op::WriteVectored { at, lens } => {
                let bytes = bytes_of(step, lens.iter().sum());
                let mut rest = &bytes[..];
                let pieces: Vec<_> =
                    lens.iter().map(|&len| IoSlice::new(rest.split_off(..len).unwrap())).collect();
                assert_eq!(file.write_vectored_at(&pieces, *at as u64).unwrap(), bytes.len());
                twin.write(*at, &bytes);
            }
            &Op::Append { len } => {
                let bytes = bytes_of(step, len);
                assert_eq!(file.append(&bytes).unwrap(), twin.len as u64);
                twin.write(twin.len, &bytes);
            }
            &Op::SetLen(len) => {
                file.set_len(len as u64).unwrap();
                twin.set_len(len);
            }
            &Op::Punch { at, len } => {
                file.punch_hole(at as u64, len as u64).unwrap();
                twin.punch(at, len);
            }
            &Op::Read { at, len } => {
                let mut bytes = vec![0xee; len];
                let read = file.read_at(&mut bytes, at as u64).unwrap();
                assert_eq!(bytes[..read], twin.read(at, len));
                assert!(bytes[read..].iter().all(|&byte| byte == 0xee), "nothing behind the end is touched");
            }
            Op::ReadVectored { at, lens } => {
                let mut buffers: Vec<_> = lens.iter().map(|&len| vec![0xee; len]).collect();
                let mut pieces: Vec<_> = buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
                let read = file.read_vectored_at(&mut pieces, *at as u64).unwrap();
                assert_eq!(buffers.concat()[..read], twin.read(*at, lens.iter().sum()));
            }
            &Op::SeekData(at) => {
                let found = file.seek_data(at as u64).unwrap();
                assert_eq!(found, twin.seek_data(at).map(|at| at as u64));
            }
            &Op::SeekHole(at) => {
                let found = file.seek_hole(at as u64).unwrap();
                assert_eq!(found, twin.seek_hole(at).map(|at| at as u64));
            }
            &Op::Pin { at, len } => {
                let pinned = file.pin(at as u64, len).unwrap();
                let right = twin.read(at, len);
                assert_eq!(pinned_bytes(&pinned), right);
                self.pins.push((pinned, right));
            }
            &Op::Unpin(which) => {
                if !self.pins.is_empty() {
                    self.pins.swap_remove(which % self.pins.len());
                }
            }
        }
        self.compare();
    }

    fn compare(&self) {
        let (file, twin) = (&self.file, &self.twin);
        assert_eq!(file.len(), twin.len as u64);
        let mut bytes = vec![0xee; twin.len];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == twin.read(0, twin.len), "the bytes differ");
        let stats = file.stats().unwrap();
        assert_eq!((stats.data_pages, stats.allocated_pages), (twin.data(), 0));
        assert_eq!(stats.hole_pages, twin.len.div_ceil(PAGE) as u64 - twin.data());
        assert_eq!(self.cache.stats().unevictable_pages, twin.data());
        for (pinned, right) in &self.pins {
            assert!(pinned_bytes(pinned) == *right, "what is pinned has changed");
        }
        self.cache.check().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_memory_file_is_its_twin(order_max in 0..=6u8, ops in prop::collection::vec(op(), 1..40)) {
        let mut pair = Pair::new(order_max);
        for (step, op) in ops.iter().enumerate() {
            pair.apply(step, op);
        }
        let Pair { cache, file, pins, .. } = pair;
        drop(file);
        assert_eq!(cache.stats().unevictable_pages, 0);
        drop(pins);
        let stats = cache.stats();
        assert_eq!((stats.cached_pages, stats.pinned_bytes), (0, 0));
        cache.check().unwrap();
    }
}
