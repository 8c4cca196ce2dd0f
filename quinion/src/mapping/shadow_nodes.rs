//! Shadow nodes: the cache's nodes that only remember, oldest first.
//!
//! A node of a tree that holds shadows and nothing else costs memory for history alone: such nodes are bounded, and
//! when a node is wanted they go before any data does. This is their list, for all the trees of a cache, in the order
//! in which they came to hold nothing but shadows:
//!
//! ```text
//!   oldest -->  node 84      node 20      node 37  <-- newest        a node's head, the allocator's words:
//!               file 1  <->  file 2  <->  file 1                      5   older | newer << 32
//!                                                                     6   the mapping's number
//! ```
//!
//! A tree reports under its own lock when one of its nodes begins or ceases to hold shadows only
//! ([`NodeSlab::shadow_only`](crate::xarray::NodeSlab::shadow_only)); the list's lock is taken under that one. A thread
//! that wants to forget the oldest nodes needs the two in the other order. So it asks the list whose they are
//! ([`ShadowNodes::owners`]), releases it, locks one of these trees and asks again for a node of just that tree
//! ([`ShadowNodes::oldest_of`]).
//!
//! Invariants (asserted by [`ShadowNodes::check`] and by `Mapping::check`):
//!  1. Each node's neighbours name it as theirs; the ends have none on one side.
//!  2. As many are counted as are linked.
//!  3. The nodes of a mapping that are listed are exactly the shadow-only nodes of its tree.
//!
//! Not an invariant: the value of the allocator's words in a node that is not listed. Membership is known by walking
//! here from an end, never by looking at a node.
//!
//! Locks: `Rank::Shadows`, above a tree's, below the arena's.
//! Cost: linking and unlinking touch two neighbours; a search looks at 64 nodes at most.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::{Arena, CellNumber, GrownView};
use crate::sync::{Rank, RankedMutex};
use crate::units::MappingId;
use crate::xarray::{ALLOCATOR_WORD, Head, ShadowOnly};

/// No node: a number that no cell has.
const NONE: u32 = 0;
/// Nodes from the oldest on that are looked at for one that can be had.
const SCANNED_NODES_MAX: usize = 64;
/// Mappings among these that are told.
pub const OWNERS: usize = 8;

const LINKS: usize = ALLOCATOR_WORD;
const MAPPING: usize = ALLOCATOR_WORD + 1;

/// How far from the oldest a node may be to be forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AgeLimit {
    Oldest,
    /// The node is among the oldest 64.
    Near,
}

/// The list of one cache.
#[derive(Debug)]
pub struct ShadowNodes {
    arena: Arc<Arena>,
    list: RankedMutex<List>,
    /// As in the list, for a caller that looks without its lock.
    count: AtomicU64,
}

#[derive(Debug)]
struct List {
    oldest: u32,
    newest: u32,
    count: u64,
}

/// [`NONE`] at an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Links {
    older: u32,
    newer: u32,
}

impl ShadowNodes {
    /// An empty list, for trees whose nodes are cells of `arena`.
    pub fn new(arena: Arc<Arena>) -> Self {
        let list = List { oldest: NONE, newest: NONE, count: 0 };
        Self { arena, list: RankedMutex::new(Rank::Shadows, list), count: AtomicU64::new(0) }
    }

    /// How many nodes are listed; a moment ago, unless all trees' locks are held.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// A node of `mapping`'s tree came to hold shadows only, or ceased to. The caller holds the tree's lock.
    pub fn note(&self, mapping: MappingId, node: u32, change: ShadowOnly) {
        let mut list = self.list.lock();
        match change {
            ShadowOnly::Became => self.link(&mut list, mapping, node),
            ShadowOnly::Ceased => self.unlink(&mut list, node),
        }
        self.count.store(list.count, Ordering::Relaxed);
    }

    /// The mapping that the oldest node is of, if there is one.
    pub fn owner(&self) -> Option<MappingId> {
        let list = self.list.lock();
        self.oldest_first(&list).next().map(|(_, mapping)| mapping)
    }

    /// The mappings that the oldest nodes are of, each once, oldest first; [`MappingId::NONE`] fills up.
    pub fn owners(&self) -> [MappingId; OWNERS] {
        let mut owners = [MappingId::NONE; OWNERS];
        let mut known = 0;
        let list = self.list.lock();
        for (_, mapping) in self.oldest_first(&list).take(SCANNED_NODES_MAX) {
            if known < OWNERS && !owners[..known].contains(&mapping) {
                owners[known] = mapping;
                known += 1;
            }
        }
        owners
    }

    /// The oldest node of `mapping`'s tree, if it is within `reach`. The caller holds the tree's lock.
    pub(super) fn oldest_of(&self, mapping: MappingId, reach: AgeLimit) -> Option<u32> {
        let scanned = match reach {
            AgeLimit::Oldest => 1,
            AgeLimit::Near => SCANNED_NODES_MAX,
        };
        let list = self.list.lock();
        self.oldest_first(&list).take(scanned).find(|&(_, owner)| owner == mapping).map(|(node, _)| node)
    }

    /// The listed nodes of `mapping`'s tree, in the order of their numbers. For checks; cost: the whole list.
    pub(super) fn all_of(&self, mapping: MappingId) -> Vec<u32> {
        let list = self.list.lock();
        let ours = self.oldest_first(&list).filter(|&(_, owner)| owner == mapping);
        let mut nodes: Vec<u32> = ours.map(|(node, _)| node).collect();
        nodes.sort_unstable();
        nodes
    }

    /// Checks the list. Cost: the whole list.
    pub fn check(&self) -> Result<(), String> {
        let list = self.list.lock();
        let (mut older, mut count) = (NONE, 0);
        for (node, mapping) in self.oldest_first(&list) {
            if Links::of(words(self.arena.view().grown(), node)).older != older {
                return Err(format!("shadow-only node {node} does not know node {older} as the older one"));
            }
            if mapping == MappingId::NONE {
                return Err(format!("shadow-only node {node} belongs to no mapping"));
            }
            (older, count) = (node, count + 1);
            if count > list.count {
                break;
            }
        }
        if older != list.newest || count != list.count {
            let List { newest, count: counted, .. } = *list;
            return Err(format!(
                "{counted} shadow-only nodes are counted up to {newest}; {count} are linked, up to {older}"
            ));
        }
        Ok(())
    }

    fn link(&self, list: &mut List, mapping: MappingId, node: u32) {
        debug_assert_ne!(node, NONE, "no cell has this number");
        let grown = self.arena.view().grown();
        let words = words(grown, node);
        words[MAPPING].store(u64::from(mapping.0), Ordering::Relaxed);
        Links { older: list.newest, newer: NONE }.put(words);
        match list.newest {
            NONE => list.oldest = node,
            newest => Links::change(grown, newest, |links| links.newer = node),
        }
        list.newest = node;
        list.count += 1;
    }

    fn unlink(&self, list: &mut List, node: u32) {
        let grown = self.arena.view().grown();
        let Links { older, newer } = Links::of(words(grown, node));
        debug_assert!(list.count > 0, "node {node} is unlinked once too often");
        match older {
            NONE => list.oldest = newer,
            _ => Links::change(grown, older, |links| links.newer = newer),
        }
        match newer {
            NONE => list.newest = older,
            _ => Links::change(grown, newer, |links| links.older = older),
        }
        list.count -= 1;
    }

    /// The listed nodes with their mappings. `list` is the list, locked.
    fn oldest_first(&self, list: &List) -> impl Iterator<Item = (u32, MappingId)> {
        let (mut next, grown) = (list.oldest, self.arena.view().grown());
        std::iter::from_fn(move || {
            let node = (next != NONE).then_some(next)?;
            let words = words(grown, node);
            next = Links::of(words).newer;
            Some((node, MappingId(words[MAPPING].load(Ordering::Relaxed) as u32)))
        })
    }
}

/// Listed nodes had grown before they were listed, so one look at the grown part will do for a hold of the list's lock.
#[inline]
fn words(grown: GrownView<'_>, node: u32) -> &Head {
    &grown.head(CellNumber(node)).expect("a listed node is a cell").words
}

impl Links {
    fn of(words: &Head) -> Self {
        let word = words[LINKS].load(Ordering::Relaxed);
        Self { older: word as u32, newer: (word >> 32) as u32 }
    }
    fn put(self, words: &Head) {
        let word = u64::from(self.newer) << 32 | u64::from(self.older);
        words[LINKS].store(word, Ordering::Relaxed);
    }
    fn change(grown: GrownView<'_>, node: u32, change: impl FnOnce(&mut Self)) {
        let words = words(grown, node);
        let mut links = Self::of(words);
        change(&mut links);
        links.put(words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaOptions;
    use proptest::prelude::*;

    const NODES: usize = 12;

    fn arena() -> Arc<Arena> {
        Arc::new(Arena::build(ArenaOptions { memory: Arena::MEMORY_MIN }).expect("a small arena"))
    }

    fn first(owners: [MappingId; OWNERS]) -> Vec<u32> {
        owners.iter().map(|owner| owner.0).filter(|&owner| owner != 0).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// The twin: a vector. Each step lists a node that is not listed, or takes one out that is.
        #[test]
        fn agrees_with_a_vector(steps in prop::collection::vec((0..NODES, 1..4u32), 1..80)) {
            let arena = arena();
            let cells: Vec<u32> = (0..NODES).map(|_| arena.alloc_cell().unwrap().0).collect();
            let list = ShadowNodes::new(Arc::clone(&arena));
            let mut twin: Vec<(u32, u32)> = Vec::new();
            for (which, mapping) in steps {
                let node = cells[which];
                match twin.iter().position(|&(listed, _)| listed == node) {
                    Some(at) => {
                        let (_, owner) = twin.remove(at);
                        list.note(MappingId(owner), node, ShadowOnly::Ceased);
                    }
                    None => {
                        twin.push((node, mapping));
                        list.note(MappingId(mapping), node, ShadowOnly::Became);
                    }
                }
                list.check().unwrap();
                prop_assert_eq!(list.count(), twin.len() as u64);
                let mut owners: Vec<u32> = Vec::new();
                twin.iter().for_each(|&(_, o)| if !owners.contains(&o) { owners.push(o) });
                prop_assert_eq!(first(list.owners()), owners.clone());
                prop_assert_eq!(list.owner().map(|owner| owner.0), owners.first().copied());
                for owner in 1..4 {
                    let of_owner = |&&(_, o): &&(u32, u32)| o == owner;
                    let near = twin.iter().find(of_owner).map(|&(node, _)| node);
                    prop_assert_eq!(list.oldest_of(MappingId(owner), AgeLimit::Near), near);
                    let oldest = twin.first().filter(of_owner).map(|&(node, _)| node);
                    prop_assert_eq!(list.oldest_of(MappingId(owner), AgeLimit::Oldest), oldest);
                    let mut all: Vec<u32> = twin.iter().filter(of_owner).map(|&(node, _)| node).collect();
                    all.sort_unstable();
                    prop_assert_eq!(list.all_of(MappingId(owner)), all);
                }
            }
        }
    }
}
