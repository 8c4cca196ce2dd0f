//! Totals: the counts of all viewers, added up.
//!
//! Each viewer counts in its own page; the sums of dead viewers lie in their viewer slots. None of it is trusted: a
//! viewer may write any number, and sums wrap.

use std::sync::atomic::Ordering;

use quinion::internals::arena::control::{Counter, Patching, Reason, ViewerPage};

/// Totals of all viewers, dead ones included, as they report them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ViewerTotals {
    /// Processes that attached.
    pub viewers: u64,
    /// Read calls served from the cache, wholly or in part.
    pub reads: u64,
    /// Bytes that these calls got from the cache.
    pub bytes: u64,
    /// Read calls that had to ask the owner.
    pub asked: u64,
    /// Requests to the owner for bytes; one read call may make several.
    pub misses: u64,
    /// Times that a viewer attached a file.
    pub files: u64,
    /// Read calls on regular files that were left to the kernel.
    pub kernel_reads: u64,
    /// Descriptors left to the kernel, in the order of [`Reason::ALL`].
    pub reasons: [u64; Reason::ALL.len()],
    /// Processes by the outcome of patching their C library, in the order of [`Patching::ALL`].
    pub patching: [u64; Patching::ALL.len()],
}

impl ViewerTotals {
    pub(super) fn add(&mut self, page: &ViewerPage) {
        let counted = |place: usize| page.counters[place].load(Ordering::Relaxed);
        let sums = [
            (&mut self.reads, Counter::Reads),
            (&mut self.bytes, Counter::Bytes),
            (&mut self.asked, Counter::Asked),
            (&mut self.misses, Counter::Misses),
            (&mut self.files, Counter::Files),
            (&mut self.kernel_reads, Counter::KernelReads),
        ];
        for (sum, counter) in sums {
            *sum = sum.wrapping_add(counted(counter as usize));
        }
        for (number, sum) in self.reasons.iter_mut().enumerate() {
            *sum = sum.wrapping_add(counted(Counter::FirstReason as usize + number));
        }
        for (number, sum) in self.patching.iter_mut().enumerate() {
            *sum = sum.wrapping_add(counted(Counter::FirstPatching as usize + number));
        }
        self.viewers += 1;
    }

    pub(super) fn merge(&mut self, other: &ViewerTotals) {
        self.viewers += other.viewers;
        self.reads = self.reads.wrapping_add(other.reads);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.asked = self.asked.wrapping_add(other.asked);
        self.misses = self.misses.wrapping_add(other.misses);
        self.files = self.files.wrapping_add(other.files);
        self.kernel_reads = self.kernel_reads.wrapping_add(other.kernel_reads);
        let counts = self.reasons.iter_mut().zip(other.reasons);
        for (sum, more) in counts.chain(self.patching.iter_mut().zip(other.patching)) {
            *sum = sum.wrapping_add(more);
        }
    }
}
