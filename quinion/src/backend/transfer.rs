//! Transfer: how one contiguous read or write comes to its end.
//!
//! A system call may deliver less than it was asked for. Whether that is the file's end, and where to go on if not, is
//! decided here, for every mechanism, by a value that does no input or output. A write falls short as a read does; it
//! has no end to meet, so one that stands still has failed.
//!
//! ```text
//!   0          from        done                     len
//!   |===========:===========|.........................|     asked: [from, len)
//!               ^ done, aligned down to what the file's direct I/O needs
//! ```
//!
//! Direct I/O delivers a number of bytes that is not aligned only where the file ends. Going on from there must begin
//! at an aligned byte, so up to one block is read a second time; if that brings nothing new, the end it is.
//!
//! Invariants:
//!  1. `from <= done <= len`, and `from` is aligned.
//!  2. Every `Again` has made progress, except after an interruption; so a transfer ends.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Transfer {
    len: usize,
    done: usize,
    /// Where a call must begin: a power of two, 1 if anywhere.
    align: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TransferStep {
    Complete,
    /// The file ends after this many bytes of the transfer.
    Ended(usize),
    Again,
}

impl Transfer {
    pub(super) fn new(len: usize, align: usize) -> Self {
        debug_assert!(align.is_power_of_two() && len > 0);
        Self { len, done: 0, align }
    }
    pub(super) fn len(&self) -> usize {
        self.len
    }
    /// The transfer begun anew, for another alignment.
    pub(super) fn restart(self, align: usize) -> Self {
        Self::new(self.len, align)
    }
    /// The rest to ask for: where in the transfer, and how many bytes.
    pub(super) fn rest(&self) -> (usize, usize) {
        let from = self.done & !(self.align - 1);
        (from, self.len - from)
    }
    /// A system call for [`Transfer::rest`] delivered `bytes`. `is_end` says whether the file, as it is
    /// now, ends at or before a byte of the transfer; it is asked only if the call fell short.
    pub(super) fn advance(&mut self, bytes: usize, is_end: impl FnOnce(usize) -> bool) -> TransferStep {
        let (from, asked) = self.rest();
        assert!(bytes <= asked, "a call delivers no more than it was asked for");
        let now = from + bytes;
        if now == self.len {
            self.done = now;
            return TransferStep::Complete;
        }
        // No progress is the end. It may lie before `done`, if the file was cut meanwhile: direct I/O may then have
        // overwritten the bytes that came before, so only those that came now count.
        if bytes == 0 || now <= self.done {
            return TransferStep::Ended(now);
        }
        self.done = now;
        if is_end(now) { TransferStep::Ended(now) } else { TransferStep::Again }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads `len` bytes of a file of `size` bytes whose calls fall short as `shorts` says.
    fn run(len: usize, size: usize, align: usize, shorts: &[usize], knows_end: bool) -> (usize, usize) {
        let mut transfer = Transfer::new(len, align);
        let mut calls = 0;
        loop {
            let (from, asked) = transfer.rest();
            assert_eq!(from % align, 0);
            let there = size.saturating_sub(from).min(asked);
            // A short read that is not the end is aligned, as direct I/O is, and brings something new.
            let short = shorts.get(calls).map_or(there, |&s| s / align * align);
            let bytes = if short > transfer.done - from { short.min(there) } else { there };
            calls += 1;
            match transfer.advance(bytes, |at| knows_end && at >= size) {
                TransferStep::Complete => return (len, calls),
                TransferStep::Ended(at) => return (at, calls),
                TransferStep::Again => assert!(calls < 10_000, "it does not end"),
            }
        }
    }

    proptest! {
        #[test]
        fn a_transfer_delivers_the_bytes_of_the_file(
            pages in 1usize..5, size in 0usize..20_000, shift in prop_oneof![Just(0u32), Just(9), Just(12)],
            shorts in prop::collection::vec(1usize..9000, 0..6), knows_end: bool,
        ) {
            let len = pages * 4096;
            let (got, calls) = run(len, size, 1 << shift, &shorts, knows_end);
            prop_assert_eq!(got, len.min(size));
            prop_assert!(calls <= shorts.len() + 3);
        }
    }

    #[test]
    fn an_end_that_is_known_needs_no_second_call() {
        assert_eq!(run(4096, 513, 512, &[], true), (513, 1));
        assert_eq!(run(4096, 513, 512, &[], false), (513, 2));
    }

    #[test]
    fn a_file_cut_while_it_is_read_ends_where_the_last_call_says() {
        let mut transfer = Transfer::new(8192, 512);
        assert_eq!(transfer.advance(1000, |_| false), TransferStep::Again);
        assert_eq!(transfer.rest(), (512, 7680));
        assert_eq!(transfer.advance(100, |_| false), TransferStep::Ended(612));
    }
}
