//! Totals: a server's numbers, which it tells each client that asks.
//!
//! A client asks as it opens an object, by a name that is no URL: `\ntotals`. The server opens nothing and refuses the
//! name with [`TOTALS`], an error that no other refusal has; its text is one line for each number, a word and a value.
//! So the question costs no handle, and a server that does not know it says that it has no store of that name.
//!
//! A word that the client does not know is passed over: servers may come to tell more.

use std::sync::Weak;

use quinion_owner::CacheOwner;
use quinion_owner::internals::serve::ServiceCounters;
use quinion_owner::internals::viewer::sys::Errno;

/// The name that asks for them.
pub(crate) const TOTALS_NAME: &[u8] = b"\ntotals";
/// The error that comes with them.
pub(crate) const TOTALS: Errno = Errno(libc::ENODATA);
/// Bounds the questions that are under way, as a store's number does its requests; no store has it.
pub(crate) const TOTALS_PLACE: u64 = u64::MAX >> 1;

/// Totals of a server: see [`Client::server_totals`](crate::Client::server_totals).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ServerTotals {
    /// Processes that are connected now.
    pub clients: u64,
    /// Files and objects that they have open.
    pub open_files: u64,
    /// Ranges that they have pinned.
    pub pins: u64,
    /// Reads of all clients so far, as the clients count them.
    pub reads: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Reads that had to ask the server: all others are hits.
    pub asked: u64,
    /// HEADs that were sent to the stores that the server has now; so are the two numbers below.
    pub heads: u64,
    /// GETs that were sent to these stores.
    pub gets: u64,
    /// Bytes that they have sent.
    pub fetched_bytes: u64,
    /// The bound of the server's cache.
    pub memory_bytes: u64,
    /// Bytes of it that have data now.
    pub cached_bytes: u64,
    /// Bytes of these that are pinned.
    pub pinned_bytes: u64,
}

impl ServerTotals {
    fn fields(&mut self) -> [(&'static str, &mut u64); 12] {
        [
            ("clients", &mut self.clients),
            ("open_files", &mut self.open_files),
            ("pins", &mut self.pins),
            ("reads", &mut self.reads),
            ("bytes", &mut self.bytes),
            ("asked", &mut self.asked),
            ("heads", &mut self.heads),
            ("gets", &mut self.gets),
            ("fetched_bytes", &mut self.fetched_bytes),
            ("memory_bytes", &mut self.memory_bytes),
            ("cached_bytes", &mut self.cached_bytes),
            ("pinned_bytes", &mut self.pinned_bytes),
        ]
    }

    /// The totals, by their names.
    pub fn entries(mut self) -> impl Iterator<Item = (&'static str, u64)> {
        self.fields().map(|(name, value)| (name, *value)).into_iter()
    }

    pub(crate) fn text(self) -> String {
        self.entries().map(|(name, value)| format!("{name} {value}\n")).collect()
    }

    /// `None`: that is no such text.
    pub(crate) fn of(text: &str) -> Option<Self> {
        let mut totals = Self::default();
        for line in text.lines() {
            let (name, value) = line.split_once(' ')?;
            if let Some((_, field)) = totals.fields().into_iter().find(|(known, _)| *known == name) {
                *field = value.parse().ok()?;
            }
        }
        Some(totals)
    }
}

/// Where a server's stores find the counts of its clients. Keeps neither the service nor the owner, which keep the
/// stores.
#[derive(Debug)]
pub(crate) struct ClientCounts {
    pub(crate) service: ServiceCounters,
    pub(crate) owner: Weak<CacheOwner>,
}

impl ClientCounts {
    /// With the numbers of clients alone; `None`: the server has ended.
    pub(crate) fn now(&self) -> Option<ServerTotals> {
        let (counts, clients) = self.service.now()?;
        let attachments = self.owner.upgrade()?.attachments();
        Some(ServerTotals {
            clients: clients as u64,
            open_files: attachments.open_files as u64,
            pins: attachments.pinned_ranges as u64,
            reads: counts.reads,
            bytes: counts.bytes,
            asked: counts.asked,
            ..ServerTotals::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_come_back_from_their_text_and_unknown_words_are_passed_over() {
        let mut totals = ServerTotals::default();
        for (number, (_, field)) in totals.fields().into_iter().enumerate() {
            *field = u64::MAX - number as u64;
        }
        assert_eq!(ServerTotals::of(&totals.text()), Some(totals));
        assert_eq!(ServerTotals::of(&format!("later many words\n{}", totals.text())), Some(totals));
        for wrong in ["clients", "clients x", "clients -1", "s3://b: the server has no store for it"] {
            assert_eq!(ServerTotals::of(wrong).filter(|totals| *totals != ServerTotals::default()), None);
        }
    }
}
