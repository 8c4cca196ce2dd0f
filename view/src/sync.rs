//! Sync: the one place where atomics and fences come from.
//!
//! All atomics come from [`atomic`], so that one cfg, `quinion_model`, exchanges them for the model checker's: the code
//! that is checked is the code that runs. The cfg is not the usual one because other crates look at that.
//!
//! [`mutant`] proves that each fence, check and ordering is needed: the model switches one off and must then find a
//! wrong read. Outside the model it is the constant `false`.

/// Atomics and fences, from the standard library or from the model checker.
pub mod atomic {
    #[cfg(not(quinion_model))]
    pub use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    #[cfg(quinion_model)]
    pub use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
}

/// A step that the model can leave out to prove it necessary. Up to [`MarkerFlag`](Mutant::MarkerFlag) they are
/// `tests/model_hit.rs`'s, to [`WalkLeaf`](Mutant::WalkLeaf) `tests/xarray_model.rs`'s, to
/// [`PauseGeneration`](Mutant::PauseGeneration) `tests/model_descriptor.rs`'s, and the rest
/// `tests/doorbells_model.rs`'s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mutant {
    /// No step is left out.
    None = 0,
    /// The reader's fence between its copy and its second look at the word.
    ReaderFence,
    /// The reader's second look at the word.
    ReaderRecheck,
    /// The reader's comparison of the mapping.
    ReaderMapping,
    /// The reader's comparison of the index.
    ReaderIndex,
    /// The reader's refusal of an odd sequence.
    ReaderParity,
    /// The reader's refusal of a folio that is not up to date.
    ReaderUptodate,
    /// The reader's acquire ordering on its first look at the word.
    ReaderAcquire,
    /// The fence before a frame gets a new identity.
    PrepareFence,
    /// The step of the sequence to an even number that was not there before.
    PrepareStep,
    /// The release ordering with which a folio gets its word before it is filled.
    PrepareRelease,
    /// The fence before a thread writes bytes of a folio.
    FillFence,
    /// The release ordering with which a fill ends.
    CompleteRelease,
    /// The step of the sequence to odd when a folio is retired.
    RetireStep,
    /// The refusal to evict a folio that is held.
    RetireHolds,
    /// The refusal to evict a folio whose bytes are not in the file.
    RetireUnwritten,
    /// The note that a retired folio is still held.
    RetireDetached,
    /// The acquire ordering of retiring.
    RetireAcquire,
    /// The release ordering of retiring.
    RetireRelease,
    /// The acquire ordering of taking a hold.
    HoldAcquire,
    /// The refusal to hold a folio that is not up to date.
    HoldUptodate,
    /// The comparison of the whole word when a hold is taken.
    HoldCompare,
    /// The acquire ordering of giving a hold back.
    PutAcquire,
    /// The release ordering of giving a hold back.
    PutRelease,
    /// The look whether another hold is left, by a thread that gives one back.
    PutHolds,
    /// The acquire ordering of a holder's look whether its folio is filled.
    ReadableAcquire,
    /// A holder's comparison of the sequence when it looks whether its folio is filled.
    ReadableSequence,
    /// The release ordering with which a page is said to have arrived.
    PagesReadRelease,
    /// The acquire ordering of a look whether a page has arrived.
    PagesReadAcquire,
    /// The clearing of the bits of arrived pages before frames are freed.
    PagesReadClear,
    /// The check of a reader that holds nothing whether its page has been read.
    ReaderPartialUptodate,
    /// The acquire ordering with which such a reader loads the word before it looks at the bits.
    ReaderWordAcquire,
    /// The reader's refusal to copy a written folio as if it were steady.
    ReaderSteady,
    /// The acquire ordering with which the reader of a written folio loads its word.
    WrittenAcquire,
    /// The step of the sequence when a folio is written first.
    WrittenStep,
    /// The step of a page's sequence to odd when a writer enters.
    WriteOdd,
    /// The fence between a writer's entering and its bytes.
    WriteFence,
    /// The order of that fence with the one of a pin: release alone is left.
    WriteFenceOrder,
    /// The release ordering with which a writer leaves a page.
    WriteRelease,
    /// The reader's refusal of a page with a writer in it.
    PageOdd,
    /// The acquire ordering with which the reader loads a page's sequence.
    PageAcquire,
    /// The reader's fence between its copy of a page and its second look at the sequence.
    PageFence,
    /// The reader's second look at a page's sequence.
    PageRecheck,
    /// A holder's fence between its copy and its second look.
    HolderFence,
    /// A holder's second look, whether its folio was written.
    HolderRecheck,
    /// The fence between a pin and its look for writers.
    PinFence,
    /// A pin's look for writers.
    PinWritten,
    /// The acquire ordering of a pin's look whether a page has a writer.
    NoWriterAcquire,
    /// A writer's look for pins.
    WritePins,
    /// The acquire ordering of that look.
    PinnedAcquire,
    /// The release ordering with which a pin is given back.
    UnpinRelease,
    /// The step of the sequence when a folio is split.
    SplitStep,
    /// The fence before a piece of a folio gets its identity.
    PieceFence,
    /// The release ordering with which a piece gets its word.
    PieceRelease,
    /// The refusal of a folio lock that another thread holds.
    LockTaken,
    /// The acquire ordering with which the folio lock is taken.
    LockAcquire,
    /// The release ordering with which the folio lock is given back.
    UnlockRelease,
    /// The fence between a writer's bytes and its look whether the page is dirty already.
    DirtyWriteFence,
    /// The fence between the clearing of dirty bits and the reading of the bytes that are written back.
    DirtyFlushFence,
    /// The comparison of the sequence when the marker is taken.
    MarkerSequence,
    /// The look whether the marker is still there when it is taken.
    MarkerFlag,
    /// The release ordering with which a slot of a node is stored.
    SlotRelease,
    /// The acquire ordering with which a reader loads a slot.
    SlotAcquire,
    /// The release ordering with which a tree's root is stored.
    RootRelease,
    /// The acquire ordering with which a reader loads a root.
    RootAcquire,
    /// The emptying of a new node's slots.
    NodeInit,
    /// The preparation of missing nodes before they are linked.
    PlantLast,
    /// The filling of the node into which a shadow is split before it is linked.
    SplitLast,
    /// The filling of the nodes into which a folio is split before they are linked.
    CutLast,
    /// The reader's refusal of a node where only entries can be.
    WalkLeaf,
    /// The acquire ordering of a look at a descriptor's word.
    WordAcquire,
    /// The comparison when a private offset is moved on.
    AdvanceExchange,
    /// The fence between a copy and the second look at a descriptor's word.
    StillFence,
    /// The second look at a descriptor's word, after a positional read.
    StillRecheck,
    /// The wait for a thread that hands an offset over.
    SettledWait,
    /// The release ordering with which a hand-over ends.
    MovingRelease,
    /// The state of moving while a private offset is given to the kernel.
    LeaveMoving,
    /// The setting of the kernel's offset when a private one ends.
    LeaveOffset,
    /// The new generation of a number that is opened.
    OpenGeneration,
    /// The look for a fork before a descriptor that was opened becomes a candidate.
    OpenForked,
    /// The count of a call at the kernel's offset.
    CallCounted,
    /// The refusal of a private offset to a descriptor that can write.
    PublishWriter,
    /// The refusal of a private offset while the kernel's is in use.
    PublishCalls,
    /// The state of moving while the kernel's offset is read.
    PublishMoving,
    /// The fence before a descriptor's attachment is stored.
    PublishFence,
    /// The count of a seek of a candidate.
    SeekCounted,
    /// The state of moving while the kernel works out a seek of a served descriptor.
    SeekMoving,
    /// The new generation of a descriptor that may be attached again.
    PauseGeneration,
    /// The acquire ordering of a watcher's look at a viewer's futex.
    DoorbellHeard,
    /// The sleep of a watcher on the number that it looked at, and not on a later one.
    DoorbellNumber,
    /// The release ordering with which a doorbell is put up.
    DoorbellRelease,
    /// The acquire ordering with which a doorbell is taken down.
    DoorbellAcquire,
    /// The acquire ordering with which a worker reads the number that it may sleep on.
    DoorbellRings,
    /// The taking down of a doorbell before its viewer's requests are looked at.
    DoorbellFirst,
    /// The putting up again of a doorbell for the requests that are left.
    DoorbellAgain,
}

#[cfg(quinion_model)]
impl Mutant {
    /// Every step.
    pub const ALL: &'static [Mutant] = &[
        Mutant::ReaderFence,
        Mutant::ReaderRecheck,
        Mutant::ReaderMapping,
        Mutant::ReaderIndex,
        Mutant::ReaderParity,
        Mutant::ReaderUptodate,
        Mutant::ReaderAcquire,
        Mutant::PrepareFence,
        Mutant::PrepareStep,
        Mutant::PrepareRelease,
        Mutant::FillFence,
        Mutant::CompleteRelease,
        Mutant::RetireStep,
        Mutant::RetireHolds,
        Mutant::RetireUnwritten,
        Mutant::RetireDetached,
        Mutant::RetireAcquire,
        Mutant::RetireRelease,
        Mutant::HoldAcquire,
        Mutant::HoldUptodate,
        Mutant::HoldCompare,
        Mutant::PutAcquire,
        Mutant::PutRelease,
        Mutant::PutHolds,
        Mutant::ReadableAcquire,
        Mutant::ReadableSequence,
        Mutant::PagesReadRelease,
        Mutant::PagesReadAcquire,
        Mutant::PagesReadClear,
        Mutant::ReaderPartialUptodate,
        Mutant::ReaderWordAcquire,
        Mutant::ReaderSteady,
        Mutant::WrittenAcquire,
        Mutant::WrittenStep,
        Mutant::WriteOdd,
        Mutant::WriteFence,
        Mutant::WriteFenceOrder,
        Mutant::WriteRelease,
        Mutant::PageOdd,
        Mutant::PageAcquire,
        Mutant::PageFence,
        Mutant::PageRecheck,
        Mutant::HolderFence,
        Mutant::HolderRecheck,
        Mutant::PinFence,
        Mutant::PinWritten,
        Mutant::NoWriterAcquire,
        Mutant::WritePins,
        Mutant::PinnedAcquire,
        Mutant::UnpinRelease,
        Mutant::SplitStep,
        Mutant::PieceFence,
        Mutant::PieceRelease,
        Mutant::LockTaken,
        Mutant::LockAcquire,
        Mutant::UnlockRelease,
        Mutant::DirtyWriteFence,
        Mutant::DirtyFlushFence,
        Mutant::MarkerSequence,
        Mutant::MarkerFlag,
        Mutant::SlotRelease,
        Mutant::SlotAcquire,
        Mutant::RootRelease,
        Mutant::RootAcquire,
        Mutant::NodeInit,
        Mutant::PlantLast,
        Mutant::SplitLast,
        Mutant::CutLast,
        Mutant::WalkLeaf,
        Mutant::WordAcquire,
        Mutant::AdvanceExchange,
        Mutant::StillFence,
        Mutant::StillRecheck,
        Mutant::SettledWait,
        Mutant::MovingRelease,
        Mutant::LeaveMoving,
        Mutant::LeaveOffset,
        Mutant::OpenGeneration,
        Mutant::OpenForked,
        Mutant::CallCounted,
        Mutant::PublishWriter,
        Mutant::PublishCalls,
        Mutant::PublishMoving,
        Mutant::PublishFence,
        Mutant::SeekCounted,
        Mutant::SeekMoving,
        Mutant::PauseGeneration,
        Mutant::DoorbellHeard,
        Mutant::DoorbellNumber,
        Mutant::DoorbellRelease,
        Mutant::DoorbellAcquire,
        Mutant::DoorbellRings,
        Mutant::DoorbellFirst,
        Mutant::DoorbellAgain,
    ];
    const HIT: usize = Mutant::MarkerFlag as usize;
    const TREE: usize = Mutant::WalkLeaf as usize;
    const OFFSET: usize = Mutant::PauseGeneration as usize;

    /// The steps of the hit protocol and of the holds.
    #[inline]
    pub fn of_hits() -> &'static [Mutant] {
        &Self::ALL[..Self::HIT]
    }
    /// The steps of the tree.
    #[inline]
    pub fn of_trees() -> &'static [Mutant] {
        &Self::ALL[Self::HIT..Self::TREE]
    }
    /// The steps of the hand-over of an offset.
    #[inline]
    pub fn of_descriptors() -> &'static [Mutant] {
        &Self::ALL[Self::TREE..Self::OFFSET]
    }
    /// The steps of the hand-over of requests by doorbells.
    #[inline]
    pub fn of_doorbells() -> &'static [Mutant] {
        &Self::ALL[Self::OFFSET..]
    }
}

#[cfg(quinion_model)]
const _: () = {
    let mut at = 0;
    while at < Mutant::ALL.len() {
        assert!(Mutant::ALL[at] as usize == at + 1, "every step is in the list, in its order");
        at += 1;
    }
    assert!(Mutant::DoorbellAgain as usize == at, "the last step is in the list");
};

/// Whether the model has switched off `step`. Always false in a real build.
#[inline(always)]
pub fn mutant(step: Mutant) -> bool {
    #[cfg(quinion_model)]
    return model::current() == step as u8;
    #[cfg(not(quinion_model))]
    {
        let _ = step;
        false
    }
}

/// The ordering of a step: `full`, or `rest` while the model leaves `step` out.
#[inline(always)]
pub fn ordering(step: Mutant, full: atomic::Ordering, rest: atomic::Ordering) -> atomic::Ordering {
    if mutant(step) { rest } else { full }
}

/// The model's switch: which step is left out in this run.
#[cfg(quinion_model)]
pub mod model {
    use super::Mutant;
    use std::sync::atomic::{AtomicU8, Ordering};

    static STEP: AtomicU8 = AtomicU8::new(0);

    /// Leaves `step` out of the protocol until the next call.
    #[inline]
    pub fn leave_out(step: Mutant) {
        STEP.store(step as u8, Ordering::SeqCst); // partner: `current`; set before the model starts
    }
    #[inline]
    pub(super) fn current() -> u8 {
        STEP.load(Ordering::SeqCst) // partner: `leave_out`
    }
}
