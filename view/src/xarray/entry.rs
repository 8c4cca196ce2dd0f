//! Entry: the content of a slot of the tree, in 32 bits.
//!
//! ```text
//!   31                                     2 1 0
//!   |        number, 30 bits               | tag |     tag 0 empty (number 0), 1 node, 2 folio, 3 value
//!
//!   a value's 30 bits:  29    28       25 24            0
//!                      | kind |  order   |   payload      |   kind 0 shadow, 1 spill
//! ```
//!
//! A **shadow** remembers an eviction: it may be dropped, split or replaced. A **spill** is data that lives elsewhere:
//! an insertion answers "present", and it is never split, dropped or consumed as a shadow.

use core::fmt;

/// The content of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry(u32);

/// A slot's content, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// The slot is empty.
    Empty,
    /// A node one level down, by number.
    Node(u32),
    /// An object, by number: for the cache, a folio's first frame. Its order is asked of the slab.
    Folio(u32),
    /// A value.
    Value(Value),
}

/// A value: 25 bits of the user's with an order and a kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value(u32);

/// The largest order an entry of the tree may have; the cache uses 0 to 9.
pub const ENTRY_ORDER_MAX: u8 = 15;
/// The first number that does not fit in an entry.
pub const NUMBERS_MAX: u32 = 1 << 30;
/// The first payload that does not fit in a value.
pub const PAYLOADS_MAX: u32 = 1 << 25;

impl Entry {
    /// The content of an empty slot.
    pub const EMPTY: Entry = Entry(0);

    /// A node. Panics if the number does not fit in 30 bits.
    #[inline]
    pub const fn node(number: u32) -> Self {
        assert!(number < NUMBERS_MAX);
        Self(number << 2 | 1)
    }
    /// A folio. Panics if the number does not fit in 30 bits.
    #[inline]
    pub const fn folio(number: u32) -> Self {
        assert!(number < NUMBERS_MAX);
        Self(number << 2 | 2)
    }
    /// A value.
    #[inline]
    pub const fn value(value: Value) -> Self {
        Self(value.0 << 2 | 3)
    }
    /// The entry that a slot's 32 bits mean; a pattern that no writer stores (tag 0 with a number) means empty.
    #[inline]
    pub const fn from_bits(bits: u32) -> Self {
        if bits & 3 == 0 { Self::EMPTY } else { Self(bits) }
    }
    /// The slot's 32 bits.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0
    }
    /// The entry's kind, with its number or value.
    #[inline]
    pub const fn kind(self) -> Kind {
        match self.0 & 3 {
            0 => Kind::Empty,
            1 => Kind::Node(self.0 >> 2),
            2 => Kind::Folio(self.0 >> 2),
            _ => Kind::Value(Value(self.0 >> 2)),
        }
    }
    /// Whether there is nothing.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl Value {
    const SPILL: u32 = 1 << 29;

    /// A memory of an eviction, of 2^`order` pages. Panics if the order or the payload is too large.
    #[inline]
    pub const fn shadow(order: u8, payload: u32) -> Self {
        assert!(order <= ENTRY_ORDER_MAX && payload < PAYLOADS_MAX);
        Self((order as u32) << 25 | payload)
    }
    /// Data that lives elsewhere, of 2^`order` pages. Panics if the order or the payload is too large.
    #[inline]
    pub const fn spill(order: u8, payload: u32) -> Self {
        assert!(order <= ENTRY_ORDER_MAX && payload < PAYLOADS_MAX);
        Self(Self::SPILL | (order as u32) << 25 | payload)
    }
    /// Whether this is a spill; a shadow otherwise.
    #[inline]
    pub const fn is_spill(self) -> bool {
        self.0 & Self::SPILL != 0
    }
    /// log2 of the pages it covers.
    #[inline]
    pub const fn order(self) -> u8 {
        (self.0 >> 25 & 0xf) as u8
    }
    /// The user's 25 bits.
    #[inline]
    pub const fn payload(self) -> u32 {
        self.0 & (PAYLOADS_MAX - 1)
    }
    /// The value as a piece of another order, as a split leaves it.
    #[must_use]
    #[inline]
    pub const fn with_order(self, order: u8) -> Self {
        assert!(order <= ENTRY_ORDER_MAX);
        Self(self.0 & !(0xf << 25) | (order as u32) << 25)
    }
}

impl fmt::Debug for Entry {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Kind::Empty => f.write_str("-"),
            Kind::Node(n) => write!(f, "node {n}"),
            Kind::Folio(n) => write!(f, "folio {n}"),
            Kind::Value(v) => write!(f, "{v:?}"),
        }
    }
}

impl fmt::Debug for Value {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_spill() { "spill" } else { "shadow" };
        write!(f, "{kind} {} order {}", self.payload(), self.order())
    }
}

/// The root of a tree, as one word: the entry and the number of levels of nodes below it. With no level the entry is
/// that of index 0, of order 0.
///
/// ```text
///   63      43  42-40  39    32 31             0
///   | zero    | marks | levels |    entry       |    the marks are the writer's; readers pass them over
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root {
    /// The topmost entry.
    pub entry: Entry,
    /// Levels of nodes: an index of the tree has at most `levels` times the node's bits.
    pub levels: u8,
}

impl Root {
    /// An empty tree.
    pub const EMPTY: Root = Root { entry: Entry::EMPTY, levels: 0 };

    /// From a word, as read by any thread.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self { entry: Entry::from_bits(bits as u32), levels: (bits >> 32) as u8 }
    }
    /// As one word.
    #[inline]
    pub const fn bits(self) -> u64 {
        (self.levels as u64) << 32 | self.entry.bits() as u64
    }
}
