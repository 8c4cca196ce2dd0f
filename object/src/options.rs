//! Options: how objects are fetched, and how old their known metadata may be.
//!
//! The defaults are for a store in the same region: some tens of milliseconds to the first byte, and some tens of
//! megabytes a second for each connection. There a request is dear and a byte is cheap, so neighbours join, and small
//! objects come whole.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use quinion::internals::units::{Order, PAGE_SIZE};

use crate::error::{Error, Result};

const TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// How an [`ObjectCache`](crate::ObjectCache) fetches.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) store_name: Option<String>,
    pub(crate) etags_are_times: bool,
    pub(crate) requests_max: usize,
    pub(crate) in_flight_max: u64,
    pub(crate) request_max: u64,
    pub(crate) gap_max: u64,
    pub(crate) whole_max: u64,
    pub(crate) tail_max: u64,
    pub(crate) fill_min: u64,
    pub(crate) attempts_max: u32,
    pub(crate) stall_max: Duration,
    pub(crate) deadline: Duration,
    pub(crate) backoff: (Duration, Duration),
    pub(crate) failure_pause: Duration,
    pub(crate) hedge_percent: Option<u8>,
    pub(crate) threads: usize,
    pub(crate) freshness: Freshness,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            store_name: None,
            etags_are_times: false,
            requests_max: 32,
            in_flight_max: 64 << 20,
            request_max: 8 << 20,
            gap_max: 256 << 10,
            whole_max: 1 << 20,
            tail_max: 512 << 10,
            fill_min: 64 << 10,
            attempts_max: 8,
            stall_max: Duration::from_secs(10),
            deadline: Duration::from_secs(60),
            backoff: (Duration::from_millis(50), Duration::from_secs(2)),
            failure_pause: Duration::from_secs(1),
            hedge_percent: None,
            threads: 2,
            freshness: Freshness::Always,
        }
    }
}

impl Options {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }
    /// The name of the store: `ObjectCache`s over one [`quinion::Cache`] whose stores have the same name share cached
    /// pages. Put into it all that tells contents and rights apart: the endpoint, the bucket, and whose credentials
    /// are used. Without a name an `ObjectCache` shares with its own clones only.
    #[must_use]
    pub fn store_name(mut self, name: impl Into<String>) -> Self {
        self.store_name = Some(name.into());
        self
    }
    /// Says that the store makes ETags of the times of files, which any program may set to those of an earlier version:
    /// such as a folder (`object_store`'s `LocalFileSystem`). Then no disk tier keeps its bytes.
    ///
    /// Bytes of a file that changes while it is read are found out by its time, and only if the change leaves another
    /// one. Stores to a page of a shared mapping that is dirty already leave none, nor may a second write within a step
    /// of a file server's clock, if that clock is ahead of this machine's or behind it. Replace such files by a rename.
    #[must_use]
    pub fn etags_are_times(mut self) -> Self {
        self.etags_are_times = true;
        self
    }
    /// The name that the store was given ([`Options::store_name`]).
    pub fn name(&self) -> Option<&str> {
        self.store_name.as_deref()
    }
    /// The most GETs under way at a time; at least 1. The default is 32.
    #[must_use]
    pub fn requests_max(mut self, requests: usize) -> Self {
        self.requests_max = requests;
        self
    }
    /// The most bytes that GETs under way have asked for. The default is 64 MiB; less than one largest request means
    /// that requests become as small as this.
    #[must_use]
    pub fn in_flight_max(mut self, bytes: u64) -> Self {
        self.in_flight_max = bytes;
        self
    }
    /// The largest GET, in bytes; at least 1 MiB, the longest run that the cache fills in one piece. The default is 8
    /// MiB. A longer range is fetched by several GETs side by side.
    #[must_use]
    pub fn request_max(mut self, bytes: u64) -> Self {
        self.request_max = bytes;
        self
    }
    /// Ranges that are apart by no more than this are fetched by one GET. The default is 256 KiB.
    #[must_use]
    pub fn gap_max(mut self, bytes: u64) -> Self {
        self.gap_max = bytes;
        self
    }
    /// Objects up to this size come whole with the first read. The default is 1 MiB.
    #[must_use]
    pub fn whole_max(mut self, bytes: u64) -> Self {
        self.whole_max = bytes;
        self
    }
    /// If the first read of a handle is of the last bytes of a larger object, so much of its end comes with them:
    /// formats as Parquet have footers there, of a length that the last bytes tell. The default is 512 KiB.
    #[must_use]
    pub fn tail_max(mut self, bytes: u64) -> Self {
        self.tail_max = bytes;
        self
    }
    /// The least that is fetched around a byte that is not cached; rounded up to a power of two from 4 KiB to 2 MiB,
    /// and no more than the cache's own largest folio. The default is 64 KiB.
    #[must_use]
    pub fn fill_min(mut self, bytes: u64) -> Self {
        self.fill_min = bytes;
        self
    }
    /// How many GETs in a row may bring nothing before a fetch fails; at least 1. The default is 8.
    #[must_use]
    pub fn attempts_max(mut self, attempts: u32) -> Self {
        self.attempts_max = attempts;
        self
    }
    /// How long a GET may bring no byte before another takes its place. The default is 10 seconds.
    #[must_use]
    pub fn stall_max(mut self, time: Duration) -> Self {
        self.stall_max = time;
        self
    }
    /// How long a fetch may take, with all its attempts and pauses. The wait for its turn counts only as far as no
    /// fetch of the store brings a byte meanwhile. The default is 60 seconds. A caller with less time can drop the
    /// future of an async read; the fetch goes on for the cache.
    #[must_use]
    pub fn deadline(mut self, time: Duration) -> Self {
        self.deadline = time;
        self
    }
    /// The pause after the first GET that failed, and the longest: each is twice the one before, and half of it is
    /// random. The default is 50 milliseconds and 2 seconds.
    #[must_use]
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        self.backoff = (first, longest);
        self
    }
    /// For how long a range whose fetch has failed is refused with the same error, so that readers that waited for one
    /// fetch do not each wait for a deadline. An open ends it. The default is a second.
    #[must_use]
    pub fn failure_pause(mut self, time: Duration) -> Self {
        self.failure_pause = time;
        self
    }
    /// Sends a second GET beside one whose answer has not begun in the time within which `percent` of 100 answers did,
    /// and uses the answer that begins first: with 95, some 5 % more requests, and no wait for the slowest. From 50 to
    /// 99; off by default. It takes one of [`Options::requests_max`], and is not sent if none is free.
    #[must_use]
    pub fn hedge_slower_than(mut self, percent: u8) -> Self {
        self.hedge_percent = Some(percent.clamp(50, 99));
        self
    }
    /// How many threads do the network's work; at least 1. The default is 2.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }
    /// How old the known metadata of an object may be when [`ObjectCache::open`](crate::ObjectCache::open) takes it for
    /// current, unless [`ObjectCache::with_freshness`](crate::ObjectCache::with_freshness) says otherwise. By default
    /// each open asks the store by a HEAD.
    #[must_use]
    pub fn freshness(mut self, freshness: Freshness) -> Self {
        self.freshness = freshness;
        self
    }

    /// With all values brought inside their ranges.
    ///
    /// # Errors
    /// A time of zero, with which nothing could ever be fetched.
    pub(crate) fn checked(mut self) -> Result<Self> {
        for (time, name) in [(self.stall_max, "stall_max"), (self.deadline, "deadline")] {
            if time.is_zero() {
                let words = format!("{name} is zero, so nothing could be fetched; give it some seconds");
                return Err(Error::Options(words));
            }
        }
        self.requests_max = self.requests_max.clamp(1, 1 << 16);
        self.request_max = self.request_max.clamp(1 << 20, 1 << 30);
        self.in_flight_max = self.in_flight_max.clamp(1 << 20, 1 << 40);
        self.request_max = self.request_max.min(self.in_flight_max);
        self.attempts_max = self.attempts_max.max(1);
        // A clock that is asked for a time beyond its end panics.
        let (first, longest) = &mut self.backoff;
        for time in [first, longest, &mut self.stall_max, &mut self.deadline, &mut self.failure_pause] {
            *time = (*time).min(TIME_MAX);
        }
        self.threads = self.threads.clamp(1, 256);
        Ok(self)
    }

    pub(crate) fn fill_order(&self) -> u8 {
        let pages = self.fill_min.div_ceil(PAGE_SIZE as u64).clamp(1, Order::MAX.pages().into());
        pages.next_power_of_two().trailing_zeros() as u8
    }
}

/// How old the known metadata of an object may be when an open ([`Options::freshness`]) or a call of a
/// [`CachedStore`](crate::CachedStore) takes it for current: HTTP's `max-age`.
///
/// Bytes are those of one version in any case. An answer is as old as the question to it. It is dropped when a fetch
/// has found that the object is another by now, and after a write through a `CachedStore`.
///
/// As text, in options and configurations, it is `always`, `immutable`, or seconds such as `30` or `0.5`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Freshness {
    /// The store is asked each time, by a HEAD; data comes from the cache. A change is seen at once, as by the bare
    /// store.
    #[default]
    Always,
    /// A HEAD serves the calls of this time after it. Writes through this `CachedStore` are seen at once.
    For(Duration),
    /// One HEAD, for stores whose objects are never replaced (tables of Iceberg, Delta or Lance). Writes through this
    /// `CachedStore` are seen at once. An object that was forgotten among 4,096 others is asked for again.
    Immutable,
}

impl Freshness {
    pub(crate) fn allows(self, age: Duration) -> bool {
        match self {
            Self::Always => false,
            Self::For(time) => age < time,
            Self::Immutable => true,
        }
    }
}

impl fmt::Display for Freshness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always => f.write_str("always"),
            Self::For(time) => write!(f, "{}.{:09}", time.as_secs(), time.subsec_nanos()),
            Self::Immutable => f.write_str("immutable"),
        }
    }
}

impl FromStr for Freshness {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "always" => Ok(Self::Always),
            "immutable" => Ok(Self::Immutable),
            _ => match seconds_of(text) {
                Some(Duration::ZERO) => Ok(Self::Always),
                Some(time) => Ok(Self::For(time)),
                None => Err(format!(
                    "{text:?} is not a freshness; write `always`, `immutable`, or seconds such as 30"
                )),
            },
        }
    }
}

/// Seconds with up to nine places, as [`Freshness`] writes them, which no floating-point number holds exactly.
fn seconds_of(text: &str) -> Option<Duration> {
    let (whole, places) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(places) || places.len() > 9 {
        return None;
    }
    Some(Duration::new(whole.parse().ok()?, format!("{places:0<9}").parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_clamped_to_their_limits() {
        let odd = Options::new().requests_max(0).request_max(1).in_flight_max(0).attempts_max(0).threads(0);
        let odd = odd.checked().unwrap();
        assert_eq!((odd.requests_max, odd.attempts_max, odd.threads), (1, 1, 1));
        assert_eq!((odd.request_max, odd.in_flight_max), (1 << 20, 1 << 20));
        let error = Options::new().deadline(Duration::ZERO).checked().unwrap_err();
        assert!(error.to_string().contains("deadline is zero"), "{error}");
    }

    #[test]
    fn a_freshness_is_a_word_or_seconds_and_its_text_is_read_again() {
        let of = |text: &str| text.parse::<Freshness>();
        assert_eq!(
            (of("always"), of("0"), of("0.0")),
            (Ok(Freshness::Always), Ok(Freshness::Always), of("0"))
        );
        assert_eq!(of("immutable"), Ok(Freshness::Immutable));
        assert_eq!(of("5"), Ok(Freshness::For(Duration::from_secs(5))));
        assert_eq!(of("0.25"), Ok(Freshness::For(Duration::from_millis(250))));
        for text in [
            "",
            "-1",
            "never",
            "inf",
            "nan",
            "1e3",
            "1s",
            "1.2.3",
            ".",
            "5.",
            ".5",
            "1.0000000001",
            &"9".repeat(40),
        ] {
            assert!(of(text).unwrap_err().contains("write `always`"), "{text:?}");
        }
        let third = Freshness::For(Duration::from_nanos(1_500_000_000));
        let longest = Freshness::For(Duration::MAX);
        for freshness in [Freshness::Always, Freshness::Immutable, third, longest] {
            assert_eq!(of(&freshness.to_string()), Ok(freshness));
        }
    }

    #[test]
    fn the_least_fill_is_an_order() {
        let order = |bytes| Options::new().fill_min(bytes).fill_order();
        assert_eq!([0, 1, 4096, 4097, 65_536, 2 << 20, u64::MAX].map(order), [0, 0, 0, 1, 4, 9, 9]);
    }
}
