//! Mark: one of the three bits that an entry can carry.
//!
//! A node keeps a word of each mark for its slots, and an entry's ancestors carry a mark as long as one below them
//! does; `marking.rs` sets them, finds by them and takes them off.

/// One of the three marks. Their meaning is the user's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mark {
    /// The first.
    Zero = 0,
    /// The second.
    One = 1,
    /// The third.
    Two = 2,
}

impl Mark {
    /// All three.
    pub const ALL: [Mark; 3] = [Mark::Zero, Mark::One, Mark::Two];
    #[inline]
    pub(super) const fn bit(self) -> u8 {
        1 << self as u8
    }
}
