//! Target: where a read puts its bytes: one buffer, or several that follow each other.
//!
//! A read takes the next stretch, of no more bytes than it has to put there, as often as it needs. So the zeros of a
//! hole are laid over all the buffers that it spans, and a hole is looked up once.

use std::io::IoSliceMut;

pub(crate) trait Target {
    /// How many bytes it still takes.
    fn left(&self) -> usize;
    /// The next bytes of it, at most `max` and at least one, if it takes any and `max` is not 0.
    fn next(&mut self, max: usize) -> &mut [u8];

    fn zero(&mut self, len: usize) {
        let mut done = 0;
        while done < len {
            let part = self.next(len - done);
            part.fill(0);
            done += part.len();
        }
    }
}

#[derive(Debug)]
pub(crate) struct OneBuffer<'b> {
    bytes: &'b mut [u8],
    at: usize,
}

impl<'b> OneBuffer<'b> {
    /// The rest of `bytes` from `at` on.
    pub fn from(bytes: &'b mut [u8], at: usize) -> Self {
        Self { bytes, at }
    }
}

impl Target for OneBuffer<'_> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
    fn next(&mut self, max: usize) -> &mut [u8] {
        let len = max.min(self.left());
        self.at += len;
        &mut self.bytes[self.at - len..self.at]
    }
}

#[derive(Debug)]
pub(crate) struct BufferList<'a, 'b> {
    pieces: &'a mut [IoSliceMut<'b>],
    /// The piece that is next, and the bytes of it that are taken.
    piece: usize,
    at: usize,
    left: usize,
}

impl<'a, 'b> BufferList<'a, 'b> {
    pub fn of(pieces: &'a mut [IoSliceMut<'b>]) -> Self {
        let left = pieces.iter().map(|piece| piece.len()).sum();
        Self { pieces, piece: 0, at: 0, left }
    }
}

impl Target for BufferList<'_, '_> {
    fn left(&self) -> usize {
        self.left
    }
    fn next(&mut self, max: usize) -> &mut [u8] {
        while self.left > 0 && self.at == self.pieces[self.piece].len() {
            (self.piece, self.at) = (self.piece + 1, 0);
        }
        if self.left == 0 {
            return &mut [];
        }
        let piece = &mut self.pieces[self.piece];
        let len = max.min(piece.len() - self.at);
        (self.at, self.left) = (self.at + len, self.left - len);
        &mut piece[self.at - len..self.at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_in_order_and_empty_ones_passed_over() {
        let (mut a, mut b, mut c, mut d) = ([1u8; 3], [1u8; 0], [1u8; 4], [1u8; 0]);
        let mut slices = [&mut a[..], &mut b, &mut c, &mut d].map(IoSliceMut::new);
        let mut pieces = BufferList::of(&mut slices);
        assert_eq!((pieces.left(), pieces.next(0).len()), (7, 0));
        assert_eq!((pieces.next(2).len(), pieces.next(9).len(), pieces.left()), (2, 1, 4));
        pieces.zero(3);
        assert_eq!((pieces.next(9).len(), pieces.left(), pieces.next(9).len()), (1, 0, 0));
        assert_eq!((a, c), ([1; 3], [0, 0, 0, 1]));
        let mut one = [1u8; 5];
        let mut whole = OneBuffer::from(&mut one, 2);
        whole.zero(2);
        assert_eq!((whole.left(), whole.next(9).len(), whole.next(9).len()), (1, 1, 0));
        assert_eq!(one, [1, 1, 0, 0, 1]);
    }
}
