//! Numbers: what a run's programs and the cache did, on its way from the owner to the runner.
//!
//! ```text
//!   viewers that said the run's number  -->  totals            of this run alone
//!   the cache now, less at the start    -->  device, readahead, evicted      of all runs that were at work meanwhile
//!   the arena now                       -->  memory            of all
//!   files that any of them attached     -->  how changes by others are seen, of the first few hundred
//! ```
//!
//! Invariant: one list names all numbers, and both ways go by it.

use quinion::arena::ArenaStats;
use quinion::serve::{FileMode, ViewerTotals};

use super::message::Message;
use crate::run::OwnerNumbers;
use crate::run::report::{mode_name, mode_of};

/// Files that are told of at most: a message has an end.
const FILES_MAX: usize = 256;
/// Between a file's mode, its path and the reason.
const BETWEEN: char = '\u{1f}';

/// What the report of a run in a kept cache is made of.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Numbers {
    /// What the run's viewers did.
    pub totals: ViewerTotals,
    /// What the cache did since the run began.
    pub owner: OwnerNumbers,
    /// The memory, of which only what a report shows.
    pub stats: ArenaStats,
    /// How many other runs the cache served meanwhile.
    pub others: u64,
    /// What is done about others who may change files that the cache has.
    pub modes: Vec<FileMode>,
}

impl Numbers {
    /// Every number with its name.
    fn all(&mut self) -> Vec<(String, &mut u64)> {
        let Self { totals, owner, stats, others, modes: _ } = self;
        let mut all = vec![
            ("others", others),
            ("viewers", &mut totals.viewers),
            ("reads", &mut totals.reads),
            ("bytes", &mut totals.bytes),
            ("asked", &mut totals.asked),
            ("misses", &mut totals.misses),
            ("files", &mut totals.files),
            ("kernel_reads", &mut totals.kernel_reads),
            ("bound", &mut stats.bound_bytes),
            ("grown", &mut stats.grown_bytes),
            ("huge", &mut stats.extents_huge),
            ("small", &mut stats.extents_small),
        ];
        all.extend(owner.fields());
        let reasons = totals.reasons.iter_mut().enumerate();
        let patching = totals.patching.iter_mut().enumerate();
        let named = all.into_iter().map(|(name, number)| (name.to_owned(), number));
        let named = named.chain(reasons.map(|(number, count)| (format!("reason_{number}"), count)));
        named.chain(patching.map(|(number, count)| (format!("patching_{number}"), count))).collect()
    }

    /// `message` with all of them.
    pub fn put(&self, message: Message) -> Message {
        let mut copy = self.clone();
        let message =
            copy.all().into_iter().fold(message, |message, (name, number)| message.number(&name, *number));
        self.modes.iter().take(FILES_MAX).enumerate().fold(message, |message, (place, file)| {
            let path = file.path.to_string_lossy();
            let words = [mode_name(file.trust), &path, &file.why].join(&BETWEEN.to_string());
            message.text(&file_name(place), &words)
        })
    }

    /// The numbers in `message`; `None` if one is missing.
    pub fn of(message: &Message) -> Option<Self> {
        let mut numbers = Self::default();
        for (name, number) in numbers.all() {
            *number = message.number_of(&name)?;
        }
        let files = (0..).map_while(|place| message.text_of(&file_name(place)));
        numbers.modes = files.filter_map(read_file).collect();
        Some(numbers)
    }
}

fn file_name(place: usize) -> String {
    format!("file_{place}")
}

/// The reason has no such character in it; what the path has is the path's.
fn read_file(words: &str) -> Option<FileMode> {
    let (mode, rest) = words.split_once(BETWEEN)?;
    let (path, why) = rest.rsplit_once(BETWEEN)?;
    Some(FileMode { path: path.into(), trust: mode_of(mode)?, why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quinion::arena::Trust;

    #[test]
    fn every_number_arrives_at_its_place() {
        let mut numbers = Numbers::default();
        for (place, (_, number)) in numbers.all().into_iter().enumerate() {
            *number = place as u64 + 1;
        }
        assert!(numbers.owner.evicted_pages > 0 && numbers.totals.reasons.iter().all(|&count| count > 0));
        let file = |path: &str, trust, why: &str| FileMode { path: path.into(), trust, why: why.to_owned() };
        numbers.modes = vec![
            file("/a b\n\u{1f}\"c", Trust::Checked, "somebody has it open for writing"),
            file("/d", Trust::Sure, ""),
        ];
        let line = numbers.put(Message::answer("numbers")).line();
        let message = Message::parse(&line).expect("it is one of ours");
        assert_eq!(Numbers::of(&message), Some(numbers));
        assert_eq!(Numbers::of(&Message::answer("numbers")), None);
        let names: std::collections::HashSet<String> =
            Numbers::default().all().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), Numbers::default().all().len(), "no name twice");
    }
}
