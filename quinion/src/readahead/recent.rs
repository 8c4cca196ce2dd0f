//! Recent: the last requests that no stream expected, and the pattern that they hint at.
//!
//! ```text
//!   [100,101)  [5000,5001)  [101,102)?   right behind the first: a forward stream
//!   [5002,5003) d=2   [5004,5005) d=2,1   [5006,5007) d=2,2   equal distances: a strided one
//! ```
//!
//! Two requests that touch are a stream going forward or backward, unless the handle has read at random lately: then it
//! takes three. Four with three equal distances between them are a strided one, or eight if others came between. The
//! distance of a request is the one to the nearest of the newest few, so that streams may take turns.
//!
//! Invariants: at most [`RECENT_MAX`] requests are remembered, the oldest is
//! forgotten first, and one that became a stream is forgotten at once.

use crate::units::PageIndex;

use super::window::ReadRequest;

pub(super) const RECENT_MAX: usize = 16;
/// How many of the newest requests are looked at for a distance: with more, steps are seen where there are none.
const DISTANCE_REQUESTS: usize = 4;
/// Further distances equal to the first that make a strided stream: where the requests follow each other, and where
/// others lie between them. (Random requests may lie at equal distances by the half dozen.)
const REPEATS_MIN: u8 = 2;
const REPEATS_APART_MIN: u8 = 6;

#[derive(Clone, Copy, Debug)]
struct RecentRead {
    first: PageIndex,
    end: PageIndex,
    /// Pages from the nearest request before it in time, and how many times in a row it was the same.
    distance: i64,
    repeats: u8,
    /// How many requests in a row touched each other, and where the first of them began.
    links: u8,
    origin: PageIndex,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DetectedPattern {
    /// The request begins where another ended; the first of those that touch began at this page.
    Forward(PageIndex),
    Backward,
    /// The request lies as far from another as that did from a third, and so on.
    Strided(i64),
    None,
}

#[derive(Clone, Copy, Debug)]
enum StrideMatch {
    /// The request lies as far from an earlier one as that one lies from the request before it.
    InStep {
        /// The place of the earlier request among the newest, 0 for the very last.
        age: usize,
        distance: i64,
        repeats: u8,
    },
    /// The request is in no step: pages from the nearest request; 0 if there is none.
    None(i64),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RecentRequests {
    requests: [RecentRead; RECENT_MAX],
    oldest: usize,
    bounds: LowBounds,
}

/// The low 16 bits of where each request begins and ends. They lie side by side, so that the processor compares eight
/// of them at a time: nearly always they tell that no request touches another.
#[derive(Clone, Copy, Debug)]
struct LowBounds {
    firsts: [u16; RECENT_MAX],
    ends: [u16; RECENT_MAX],
}

impl LowBounds {
    const NOWHERE: Self = {
        let RecentRead { first, end, .. } = RecentRead::NONE;
        Self { firsts: [first.0 as u16; RECENT_MAX], ends: [end.0 as u16; RECENT_MAX] }
    };

    fn set(&mut self, at: usize, request: &RecentRead) {
        (self.firsts[at], self.ends[at]) = (request.first.0 as u16, request.end.0 as u16);
    }

    /// Whether a request may end where the pages `first..end` begin, or begin behind the first of them and not behind
    /// `end`; never `false` if one does.
    fn may_touch(&self, first: u64, end: u64) -> bool {
        let (low, behind) = (first as u16, (end - first).saturating_sub(1).min(u16::MAX.into()) as u16);
        let begins_there = |other: u16| other.wrapping_sub(low).wrapping_sub(1) <= behind;
        let pairs = self.firsts.iter().zip(&self.ends);
        pairs.fold(false, |touches, (&other, &ends)| touches | (ends == low) | begins_there(other))
    }
}

impl RecentRequests {
    pub fn new() -> Self {
        Self { requests: [RecentRead::NONE; RECENT_MAX], oldest: 0, bounds: LowBounds::NOWHERE }
    }

    /// Notes `asked` and returns the pattern that it makes; `links_min` requests must touch before that counts.
    /// Requests that become a stream are not noted, and those that it grew from are forgotten.
    pub fn note(&mut self, asked: ReadRequest, links_min: u8) -> DetectedPattern {
        if let Some((at, pattern)) = self.touching(asked) {
            let request = self.put(at, RecentRead::NONE);
            if request.links + 1 >= links_min {
                return pattern;
            }
            self.remember(RecentRead {
                links: request.links + 1,
                origin: request.origin,
                ..RecentRead::alone(asked)
            });
            return DetectedPattern::None;
        }
        match self.stride_among_newest(asked.index) {
            StrideMatch::InStep { age, distance, repeats } => {
                let repeats_min = if age == 0 { REPEATS_MIN } else { REPEATS_APART_MIN };
                if repeats + 1 >= repeats_min {
                    return DetectedPattern::Strided(distance);
                }
                self.remember(RecentRead { distance, repeats: repeats + 1, ..RecentRead::alone(asked) });
            }
            StrideMatch::None(distance) => self.remember(RecentRead { distance, ..RecentRead::alone(asked) }),
        }
        DetectedPattern::None
    }

    fn touching(&self, asked: ReadRequest) -> Option<(usize, DetectedPattern)> {
        let (first, end) = (asked.index.0, asked.end().0);
        if !self.bounds.may_touch(first, end) {
            return None;
        }
        self.requests.iter().enumerate().find_map(|(at, request)| {
            if request.end.0 == first {
                Some((at, DetectedPattern::Forward(request.origin)))
            } else if first < request.first.0 && request.first.0 <= end && end <= request.end.0 {
                // Requests of odd lengths share a page.
                Some((at, DetectedPattern::Backward))
            } else {
                None
            }
        })
    }

    fn stride_among_newest(&self, index: PageIndex) -> StrideMatch {
        let (mut age, mut nearest) = (0, None);
        for back in 1..=DISTANCE_REQUESTS {
            let request = &self.requests[(self.oldest + RECENT_MAX - back) % RECENT_MAX];
            if request.is_none() {
                continue;
            }
            let &RecentRead { distance, repeats, .. } = request;
            let far = index.0.wrapping_sub(request.first.0) as i64; // indices are below 2^52
            if distance != 0 && far == distance {
                return StrideMatch::InStep { age, distance, repeats };
            }
            if nearest.is_none_or(|nearest: i64| far.unsigned_abs() < nearest.unsigned_abs()) {
                nearest = Some(far);
            }
            age += 1;
        }
        StrideMatch::None(nearest.unwrap_or(0))
    }

    /// Returns the request that was there.
    fn put(&mut self, at: usize, request: RecentRead) -> RecentRead {
        self.bounds.set(at, &request);
        std::mem::replace(&mut self.requests[at], request)
    }

    fn remember(&mut self, request: RecentRead) {
        self.put(self.oldest, request);
        self.oldest = (self.oldest + 1) % RECENT_MAX;
    }
}

impl RecentRead {
    /// A request that touches no page that can be asked for.
    const NONE: Self = {
        let nowhere = PageIndex(u64::MAX);
        Self { first: nowhere, end: nowhere, distance: 0, repeats: 0, links: 0, origin: nowhere }
    };
    fn is_none(&self) -> bool {
        self.first == Self::NONE.first
    }
    fn alone(asked: ReadRequest) -> Self {
        let (first, end) = (asked.index, asked.end());
        Self { first, end, distance: 0, repeats: 0, links: 0, origin: first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asked(first: u64, pages: u32) -> ReadRequest {
        ReadRequest { index: PageIndex(first), pages, file_pages: 1 << 52 }
    }

    fn remembered(requests: &[(u64, u32)]) -> RecentRequests {
        let mut recent = RecentRequests::new();
        requests.iter().for_each(|&(first, pages)| recent.remember(RecentRead::alone(asked(first, pages))));
        recent
    }

    /// The pages around a place where 16 bits begin anew, and those as far from it as 16 bits tell nothing of.
    fn page() -> impl Strategy<Value = u64> {
        (0..3u64, (1u64 << 16) - 40..(1 << 16) + 40).prop_map(|(high, low)| (high << 16) + low)
    }

    proptest! {
        /// The twin looks at the whole numbers of all requests.
        #[test]
        fn no_request_is_overlooked(
            requests in prop::collection::vec((page(), 1..40u32), 0..=RECENT_MAX + 2),
            (index, pages) in (page(), prop_oneof![1..40u32, Just(u32::MAX)]),
        ) {
            let recent = remembered(&requests);
            let (first, end) = (index, asked(index, pages).end().0);
            let twin = recent.requests.iter().enumerate().find_map(|(at, request)| {
                let (from, to) = (request.first.0, request.end.0);
                let pattern = if to == first {
                    DetectedPattern::Forward(request.origin)
                } else if first < from && from <= end && end <= to {
                    DetectedPattern::Backward
                } else {
                    return None;
                };
                Some((at, pattern))
            });
            prop_assert_eq!(recent.touching(asked(index, pages)), twin);
        }
    }
}
