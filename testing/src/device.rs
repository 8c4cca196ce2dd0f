//! A device for tests: its bytes hold their place, and a test can hold it, make it fail and watch it.
//!
//! Every eight bytes hold the file's number, its generation and their own position, so that a byte of another file,
//! place or time is noticed.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use quinion::backend::{Attributes, Backend, Fill, Identity, Version};

#[derive(Debug, Default)]
pub struct Device {
    pub number: u64,
    pub size: AtomicU64,
    pub generation: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bad: BTreeSet<u64>,
    reads: Vec<(u64, u32)>,
    submissions: usize,
    holding: bool,
    held: Vec<Fill>,
}

fn word(number: u64, generation: u64, position: u64) -> [u8; 8] {
    let mixed = (position ^ number << 44 ^ generation << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).to_le_bytes()
}

/// Panics if `bytes` are not what `device` holds at `position` now.
pub fn verify(bytes: &[u8], device: &Device, position: u64) {
    let generation = device.generation.load(Ordering::Relaxed);
    let mut at = 0;
    while at < bytes.len() {
        let place = position + at as u64;
        let (base, inside) = (place & !7, (place & 7) as usize);
        let len = (8 - inside).min(bytes.len() - at);
        let want = &word(device.number, generation, base)[inside..inside + len];
        assert!(&bytes[at..at + len] == want, "wrong bytes at {place} of file {}", device.number);
        at += len;
    }
}

impl Device {
    pub fn new(size: u64) -> Arc<Self> {
        Self::with_number(1, size)
    }
    pub fn with_number(number: u64, size: u64) -> Arc<Self> {
        Arc::new(Self { number, size: AtomicU64::new(size), ..Self::default() })
    }
    /// From now on, requests are kept until [`Device::release`].
    pub fn hold(&self) {
        self.state.lock().unwrap().holding = true;
    }
    /// Serves the requests that were kept, and everything from now on.
    pub fn release(&self) {
        let held = {
            let mut state = self.state.lock().unwrap();
            state.holding = false;
            std::mem::take(&mut state.held)
        };
        held.into_iter().for_each(|fill| self.answer(fill));
    }
    /// Waits until `fills` requests have come.
    pub fn wait_for_fills(&self, fills: usize) {
        let mut state = self.state.lock().unwrap();
        while state.reads.len() < fills {
            state = self.changed.wait(state).unwrap();
        }
    }
    pub fn fail(&self, page: u64) {
        self.state.lock().unwrap().bad.insert(page);
    }
    pub fn mend(&self, page: u64) {
        self.state.lock().unwrap().bad.remove(&page);
    }
    /// Every request so far, as (first page, pages).
    pub fn reads(&self) -> Vec<(u64, u32)> {
        self.state.lock().unwrap().reads.clone()
    }
    /// How many calls brought them.
    pub fn submissions(&self) -> usize {
        self.state.lock().unwrap().submissions
    }
    /// How often each page was asked for.
    pub fn times_read(&self) -> Vec<u32> {
        let pages = self.size.load(Ordering::Relaxed).div_ceil(4096) as usize;
        let mut times = vec![0; pages];
        for (first, count) in self.reads() {
            (first..first + u64::from(count)).for_each(|page| times[page as usize] += 1);
        }
        times
    }

    fn answer(&self, mut fill: Fill) {
        let run = fill.run();
        let pages = run.index.0..run.index.0 + u64::from(run.pages);
        if self.state.lock().unwrap().bad.range(pages).next().is_some() {
            return fill.complete(Err(io::Error::from_raw_os_error(5)));
        }
        let mut whole = vec![0; fill.len()];
        let bytes = content(self, fill.position(), &mut whole);
        fill.write(0, &whole[..bytes]);
        fill.complete(Ok(bytes));
    }
}

/// Writes what `device` holds at `position`, a multiple of 8, to `to`; how many bytes there are.
pub fn content(device: &Device, position: u64, to: &mut [u8]) -> usize {
    let left = device.size.load(Ordering::Relaxed).saturating_sub(position);
    let bytes = left.min(to.len() as u64) as usize;
    let generation = device.generation.load(Ordering::Relaxed);
    for (at, piece) in to[..bytes].chunks_mut(8).enumerate() {
        piece.copy_from_slice(&word(device.number, generation, position + 8 * at as u64)[..piece.len()]);
    }
    bytes
}

impl Backend for Device {
    fn name(&self) -> &'static str {
        "device"
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let generation = self.generation.load(Ordering::Relaxed) as i64;
        Ok(Attributes {
            identity: Identity { device: 0, inode: self.number, born: 0 },
            version: Version { modified: generation, changed: generation, settled: true, steps: true },
            size: self.size.load(Ordering::Relaxed),
        })
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.state.lock().unwrap().submissions += 1;
        for fill in fills {
            let mut state = self.state.lock().unwrap();
            state.reads.push((fill.run().index.0, fill.run().pages));
            self.changed.notify_all();
            if state.holding {
                state.held.push(fill);
            } else {
                drop(state);
                self.answer(fill);
            }
        }
    }
}
