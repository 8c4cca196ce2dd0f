//! Check: every invariant of a whole tree, and the tree as text.
//!
//! The check walks down once and adds up on the way back: a node's own numbers (its count, its shadows, its marks) are
//! compared with the slots below it.
//!
//! ```text
//!   root     as low as it can be; its marks are those of what hangs below
//!   node     knows its parent and its shift; holds something; counts what it holds
//!   entry    stands on the level of its order, at a multiple of its length, the same in every slot
//!   marks    at an entry's first slot only; in a node above exactly if somewhere below
//!   listed   the allocator was told of each node that holds shadows alone, and of no other
//! ```
//!
//! It says the first thing that is wrong, with the place, and stops there: later findings are often only a consequence.
//! It takes the tree as its writer sees it, so it needs the tree's lock, and its cost is the whole tree.
//!
//! Not checked: whether a folio is alive and whose it is. The tree does not
//! know; `Mapping::check` asks the descriptors.

use std::fmt::Write;
use std::string::String;

use super::mark::Mark;
use super::tree::{NodeSlab, XArray, is_shadow};
use quinion_view::xarray::{Entry, Kind, Root};

/// The marks and counts that a node must agree with, as found below it.
struct Sum {
    marks: u8,
    nodes: u32,
}

macro_rules! ensure {
    ($ok:expr, $($why:tt)+) => { if !$ok { return Err(format!($($why)+)); } };
}

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// Looks at the whole tree and says the first thing that is wrong with it. On success: how many nodes
    /// it has. For tests and bug reports; cost: all of the tree.
    pub fn check(&self) -> Result<u32, String> {
        let Root { entry, levels } = self.root();
        let sum = match entry.kind() {
            Kind::Empty => {
                ensure!(levels == 0, "an empty tree has {levels} levels");
                Sum { marks: 0, nodes: 0 }
            }
            Kind::Node(node) => {
                ensure!(levels > 0, "a node hangs in a root without levels");
                let top = self.node(node);
                let low = top.count() == 1
                    && match top.get(0).kind() {
                        Kind::Empty => false,
                        Kind::Node(_) => true,
                        _ => levels == 1,
                    };
                ensure!(!low, "the tree could be lower: only slot 0 of the topmost node is left");
                self.check_node(node, (u32::from(levels) - 1) * BITS, 0, None)?
            }
            Kind::Folio(_) | Kind::Value(_) => {
                ensure!(levels == 0, "{entry:?} stands in a root of {levels} levels");
                ensure!(self.order_of(entry) == 0, "{entry:?} in the root is larger than a page");
                Sum { marks: self.root_marks(), nodes: 0 }
            }
        };
        ensure!(
            sum.marks == self.root_marks(),
            "the root's marks are {:03b}, not {:03b}",
            self.root_marks(),
            sum.marks
        );
        Ok(sum.nodes)
    }

    fn check_node(
        &self,
        number: u32,
        shift: u32,
        base: u64,
        parent: Option<(u32, u32)>,
    ) -> Result<Sum, String> {
        let node = self.node(number);
        let here = format!("node {number} of shift {shift} at {base}");
        ensure!(node.parent() == parent, "{here}: its parent is {:?}, not {parent:?}", node.parent());
        ensure!(node.shift() == shift, "{here}: it says shift {}", node.shift());
        let mut sum = Sum { marks: 0, nodes: 1 };
        let (mut count, mut shadows, mut slot) = (0, 0, 0);
        while slot < Self::SLOTS {
            let entry = node.get(slot);
            let index = base + (u64::from(slot) << shift);
            let (run, marks) = match entry.kind() {
                Kind::Empty => (1, 0),
                Kind::Node(child) => {
                    ensure!(shift > 0, "{here}: a node below the last level");
                    let below = self.check_node(child, shift - BITS, index, Some((number, slot)))?;
                    sum.nodes += below.nodes;
                    (1, below.marks)
                }
                Kind::Folio(_) | Kind::Value(_) => {
                    let order = self.order_of(entry);
                    ensure!(
                        Self::shift_for(order) == shift,
                        "{here}: {entry:?} of order {order} in slot {slot}"
                    );
                    ensure!(
                        index & ((1 << order) - 1) == 0,
                        "{here}: {entry:?} of order {order} starts at {index}"
                    );
                    let run = Self::run_of(order);
                    for more in slot..slot + run {
                        ensure!(
                            node.get(more) == entry,
                            "{here}: {entry:?} at {index} is broken in slot {more}"
                        );
                    }
                    (run, self.check_marks(number, slot, run, &here)?)
                }
            };
            for mark in Mark::ALL {
                let set = node.marks(mark) >> slot & 1 != 0;
                ensure!(
                    set == (marks & mark.bit() != 0),
                    "{here}: {mark:?} in slot {slot} does not agree with what is there"
                );
            }
            sum.marks |= marks;
            count += if entry.is_empty() { 0 } else { run };
            shadows += if is_shadow(entry) { run } else { 0 };
            slot += run;
        }
        ensure!(count > 0, "{here}: it is empty");
        ensure!(node.count() == count, "{here}: its count is {}, not {count}", node.count());
        let (_, counted) = node.counts();
        ensure!(counted == shadows, "{here}: its shadows are {counted}, not {shadows}");
        ensure!(node.is_listed() == (count == shadows), "{here}: the allocator was not told what it holds");
        Ok(sum)
    }

    /// The marks of an entry; they stand at its first slot alone.
    fn check_marks(&self, number: u32, slot: u32, run: u32, here: &str) -> Result<u8, String> {
        let mut found = 0;
        for mark in Mark::ALL {
            let bits = self.node(number).marks(mark) >> slot & (u64::MAX >> (64 - run));
            ensure!(bits <= 1, "{here}: {mark:?} inside the entry at slot {slot}");
            found |= if bits == 1 { mark.bit() } else { 0 };
        }
        Ok(found)
    }

    /// The nodes that hold shadows and nothing else, in the order of their numbers. Cost: the whole tree.
    pub fn shadow_only_nodes(&self) -> std::vec::Vec<u32> {
        let mut found = std::vec::Vec::new();
        if let Kind::Node(node) = self.root().entry.kind() {
            self.add_shadow_only(node, &mut found);
        }
        found.sort_unstable();
        found
    }

    fn add_shadow_only(&self, number: u32, found: &mut std::vec::Vec<u32>) {
        let node = self.node(number);
        found.extend(node.is_shadow_only().then_some(number));
        for slot in 0..Self::SLOTS {
            if let Kind::Node(child) = node.get(slot).kind() {
                self.add_shadow_only(child, found);
            }
        }
    }

    /// The tree as text: its entries by line, `first..=last  entry  marks`, nodes not shown.
    pub fn dump(&self) -> String {
        let mut text = String::new();
        for (first, entry, order) in self.range(0, u64::MAX) {
            let last = first + (1 << order) - 1;
            let marks: String =
                Mark::ALL.iter().map(|&mark| if self.has_mark(first, mark) { '*' } else { '.' }).collect();
            let what = match entry.kind() {
                Kind::Folio(folio) => format!("folio {folio} order {order}"),
                _ => format!("{entry:?}"),
            };
            writeln!(text, "{first}..={last} {what} {marks}").expect("a string takes text");
        }
        text
    }
}

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// The tree as text with its nodes: the entry of every slot.
    pub fn dump_nodes(&self) -> String {
        let mut text = format!("{:?} marks {:03b}\n", self.root(), self.root_marks());
        if let Kind::Node(node) = self.root().entry.kind() {
            self.dump_node(node, 1, &mut text);
        }
        text
    }

    fn dump_node(&self, number: u32, depth: usize, text: &mut String) {
        let node = self.node(number);
        let slots: std::vec::Vec<Entry> = (0..Self::SLOTS).map(|slot| node.get(slot)).collect();
        let marks = Mark::ALL.map(|mark| node.marks(mark));
        writeln!(text, "{:depth$}node {number}: {slots:?} marks {marks:x?}", "")
            .expect("a string takes text");
        for entry in slots {
            if let Kind::Node(child) = entry.kind() {
                self.dump_node(child, depth + 1, text);
            }
        }
    }
}
