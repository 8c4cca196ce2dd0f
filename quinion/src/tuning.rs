//! Tuning: switches for ablations in benchmarks and tests. A cache that ships has the defaults.
//!
//! What a choice is for: a benchmark that shows what a mechanism is worth runs
//! the same cache without it, and a test that needs the rare makes it happen
//! each time. None of them changes what a reader sees.
//!
//! ```text
//!   insertion      Batched    the folios of a window under one lock, one way down for each run of frames
//!                  OneByOne   a lock and a way down for each folio
//!   descent        Single     conflict, shadow, split and store on one way down
//!                  Naive      three ways down, each from the top: is a folio there, what order has the shadow, store
//!   node reserve   Enough     all nodes that an insertion can need, before its lock is taken
//!                  AtMost(n)  n of them, so that it runs out under the lock, lets it go and comes back
//!   grabbing       Batched    folios of a range looked up together, and inserted under one lock
//!                  LookupBatched  looked up together; a lock and a way down for each that is inserted
//!                  OneByOne   a lookup, too, for each
//!   policy         S3Fifo     what was read again after its first use stays; see `policy.rs`
//! ```
//!
//! Invariants: a [`Tuning`] is plain values, handed down from
//! [`Builder::tuning`](crate::Builder::tuning); nothing here is global, and
//! nothing here is read on a hit.
//!
//! Not an invariant: that the choices of one version are those of the next.

/// How a cache works inside. [`Tuning::default`] is what an untuned cache has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Tuning {
    /// How the folios of a window enter the index.
    pub insertion: Insertion,
    /// How a folio alone finds its place. Batches always descend once.
    pub descent: Descent,
    /// How many index nodes are taken before a lock.
    pub node_reserve: NodeReserve,
    /// How a range of folios is grabbed.
    pub grabbing: Grabbing,
    /// Which folios go when room is wanted.
    pub policy: PolicyKind,
}

impl Tuning {
    /// With this way to insert a window.
    #[must_use]
    pub fn insertion(mut self, insertion: Insertion) -> Self {
        self.insertion = insertion;
        self
    }
    /// With this way to insert a folio.
    #[must_use]
    pub fn descent(mut self, descent: Descent) -> Self {
        self.descent = descent;
        self
    }
    /// With this reserve of nodes.
    #[must_use]
    pub fn node_reserve(mut self, node_reserve: NodeReserve) -> Self {
        self.node_reserve = node_reserve;
        self
    }
    /// With this way to grab a range.
    #[must_use]
    pub fn grabbing(mut self, grabbing: Grabbing) -> Self {
        self.grabbing = grabbing;
        self
    }
    /// With this policy.
    #[must_use]
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = policy;
        self
    }
}

/// Which folios go when room is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Two queues: what is new proves itself in the small one, and what was read again stays in the large one.
    #[default]
    S3Fifo,
    /// Linux's active and inactive lists, with the distance of refaults; to compare with.
    TwoList,
}

/// How the folios of a window enter the index.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Insertion {
    /// All under one hold of the lock.
    #[default]
    Batched,
    /// Each under a hold of its own.
    OneByOne,
}

/// How a range of folios is grabbed: found or created, and locked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Grabbing {
    /// Looked up together, and what is missing inserted under one hold of the lock.
    #[default]
    Batched,
    /// Looked up together, and inserted each under a hold of its own.
    LookupBatched,
    /// Looked up and inserted each by itself. What the batches are measured against.
    OneByOne,
}

/// How a folio alone finds its place in the index: one of the smallest order that is read by itself, or any that is
/// inserted one by one.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Descent {
    /// One way down, on which everything is found out and done.
    #[default]
    Single,
    /// Three, split or not: the conflict check, the order of what is there, the store. What the single one is measured
    /// against.
    Naive,
}

/// How many index nodes an insertion takes before it takes the lock.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum NodeReserve {
    /// As many as it can need, and a few for the next ones.
    #[default]
    Enough,
    /// So many each time, and none is kept for the next. With 0 no node is ever to be had.
    AtMost(u32),
}
