//! Marked files: those to which this process does more than read, and which are left to the kernel here for that.
//!
//! Two lists that only grow, and a count of the threads that are about to have the owner open a file; `written.rs` says
//! what marks a file. A forked child has the same lists; the count begins anew.
//!
//! Not an invariant: that a file which is found here was marked. Two files may have one digest, and full lists hold
//! all.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use quinion_view::arena::control::place_of;
use quinion_view::units::FileId;

pub struct Files {
    places: [AtomicU64; Files::PLACES],
    is_full: AtomicBool,
}

impl Files {
    const PLACES: usize = 64;

    const fn none() -> Self {
        Self { places: [const { AtomicU64::new(0) }; Self::PLACES], is_full: AtomicBool::new(false) }
    }

    fn digest(id: FileId) -> u64 {
        place_of(id, usize::MAX) as u64 + 1
    }

    pub fn add(&self, id: FileId) {
        let file = Self::digest(id);
        for place in &self.places {
            // SeqCst, partner: `has`: a thread that is asked for a file after this is told.
            match place.compare_exchange(0, file, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return,
                Err(known) if known == file => return,
                Err(_) => {}
            }
        }
        self.is_full.store(true, Ordering::SeqCst); // partner: `has`
    }

    pub fn has(&self, id: FileId) -> bool {
        let file = Self::digest(id);
        let mut known = self.places.iter().map(|place| place.load(Ordering::SeqCst)); // partner: `add`
        known.by_ref().take_while(|&known| known != 0).any(|known| known == file)
            || self.is_full.load(Ordering::SeqCst) // partner: `add`
    }
}

/// Files that are, or were, mapped so that they can be stored to.
pub static MAPPED: Files = Files::none();

/// Files on which a lease was wanted.
pub static LEASED: Files = Files::none();

static ATTACHING: AtomicU32 = AtomicU32::new(0);

pub fn attaching<T>(attach: impl FnOnce() -> T) -> T {
    // SeqCst, partner: `are_attaching`, for `written::wants_lease`, which notes the file and then looks at this count.
    // Either it waits for this thread, or this thread sees the file.
    ATTACHING.fetch_add(1, Ordering::SeqCst);
    let answer = attach();
    ATTACHING.fetch_sub(1, Ordering::SeqCst); // as above
    answer
}

pub fn are_attaching() -> bool {
    ATTACHING.load(Ordering::SeqCst) != 0 // partner: `attaching`
}

/// In a forked child: what other threads of the parent were in the middle of is not under way here.
pub fn settle_child() {
    ATTACHING.store(0, Ordering::SeqCst); // partner: `are_attaching`
}
