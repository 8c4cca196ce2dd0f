//! Recent: the last requests that no stream expected, and what they hint at.
//!
//! ```text
//!   [100,101)  [5000,5001)  [101,102)?   right behind the first: a forward stream
//!   [5002,5003) d=2   [5004,5005) d=2,1   [5006,5007) d=2,2   equal distances: a strided one
//! ```
//!
//! A request alone says nothing. Two that touch are a stream going forward or
//! backward, unless the handle has read at random lately: then it takes three.
//! Four with three equal distances between them are a strided one. The distance
//! of a request is the one to the nearest of the newest few, so that streams
//! which take turns do not hide each other's.
//!
//! Invariants: at most [`RECENT_MAX`] requests are remembered, the oldest is
//! forgotten first, and one that became a stream is forgotten at once.

use crate::units::PageIndex;

use super::window::Asked;

/// How many requests are remembered.
pub(super) const RECENT_MAX: usize = 16;
/// Among so many of the newest a distance is looked for: more, and steps are seen where there are none.
const DISTANCE_LOOKS: usize = 4;
/// So many further distances equal to the first make a strided stream.
const REPEATS_MIN: u8 = 2;

/// A request that was read exactly.
#[derive(Clone, Copy, Debug)]
struct Request {
    first: PageIndex,
    end: PageIndex,
    /// Pages from the nearest request before it in time, and how many times in a row it was the same.
    distance: i64,
    repeats: u8,
    /// How many requests in a row touched each other.
    links: u8,
}

/// What a request looks like beside the remembered ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hunch {
    /// It begins where another ended.
    Forward,
    /// It ends where another began.
    Backward,
    /// It lies as far from another as that did from a third, and so on.
    Strided(i64),
    /// Nothing.
    None,
}

/// The requests that no stream expected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recent {
    requests: [Option<Request>; RECENT_MAX],
    oldest: usize,
}

impl Recent {
    pub fn new() -> Self {
        Self { requests: [None; RECENT_MAX], oldest: 0 }
    }

    /// Notes `asked` and says what it looks like; `links_min` requests must touch before that counts. What
    /// becomes a stream is not noted, and what it grew from is forgotten.
    pub fn note(&mut self, asked: Asked, links_min: u8) -> Hunch {
        if let Some((at, way)) = self.touching(asked) {
            let links = self.requests[at].map_or(0, |request| request.links) + 1;
            self.requests[at] = None;
            if links >= links_min {
                return way;
            }
            self.remember(asked, 0, 0, links);
            return Hunch::None;
        }
        let expected =
            |r: &&Request| r.distance != 0 && r.first.0.checked_add_signed(r.distance) == Some(asked.index.0);
        let step = self.newest().find(expected).copied();
        if let Some(Request { distance, repeats, .. }) = step {
            if repeats + 1 >= REPEATS_MIN {
                return Hunch::Strided(distance);
            }
            self.remember(asked, distance, repeats + 1, 0);
            return Hunch::None;
        }
        let distance = self.nearest(asked.index);
        self.remember(asked, distance, 0, 0);
        Hunch::None
    }

    fn touching(&self, asked: Asked) -> Option<(usize, Hunch)> {
        let end = asked.end();
        self.requests.iter().enumerate().find_map(|(at, request)| {
            let request = request.as_ref()?;
            match () {
                () if request.end == asked.index => Some((at, Hunch::Forward)),
                // Requests of odd lengths share a page.
                () if asked.index < request.first && end >= request.first && end <= request.end => {
                    Some((at, Hunch::Backward))
                }
                () => None,
            }
        })
    }

    /// The newest requests, the newest first.
    fn newest(&self) -> impl Iterator<Item = &Request> {
        let places = (1..=DISTANCE_LOOKS).map(|age| (self.oldest + RECENT_MAX - age) % RECENT_MAX);
        places.filter_map(|at| self.requests[at].as_ref())
    }

    /// The distance from the nearest of the newest requests; 0 if there is none.
    fn nearest(&self, index: PageIndex) -> i64 {
        let distances = self.newest().map(|request| index.0 as i64 - request.first.0 as i64);
        distances.min_by_key(|distance| distance.unsigned_abs()).unwrap_or(0)
    }

    fn remember(&mut self, asked: Asked, distance: i64, repeats: u8, links: u8) {
        let request = Request { first: asked.index, end: asked.end(), distance, repeats, links };
        self.requests[self.oldest] = Some(request);
        self.oldest = (self.oldest + 1) % RECENT_MAX;
    }
}
