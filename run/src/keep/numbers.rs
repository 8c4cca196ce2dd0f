//! Numbers: those of a run's programs and of the cache, on the way from the owner to the runner.
//!
//! ```text
//!   viewers that said the run's number  -->  totals            of this run alone
//!   the cache now, less at the start    -->  device, readahead, evicted      of all runs that were at work meanwhile
//!   the arena now                       -->  memory            of all
//!   files that any of them attached     -->  how changes by others are seen, of the first few hundred
//!                                            and which are read most, as many as are asked for
//! ```
//!
//! Invariant: one list names all numbers, for both directions.

use quinion::internals::arena::ArenaStats;
use quinion_owner::internals::serve::{FileMode, ViewerTotals};

use super::message::Message;
use crate::modes::{mode_name, mode_of};
use crate::{HotFileSize, OwnerNumbers};

const FILES_MAX: usize = 256;
/// The separator between a file's mode and its path.
const BETWEEN: char = '\u{1f}';
/// Key of the number of hottest files that are asked for.
const HOTTEST: &str = "hottest";
/// In place of a hot file's bytes when no program has it open.
const CLOSED: &str = "closed";

/// Numbers for the report of a run in a kept cache.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KeptCacheNumbers {
    /// Totals of the run's viewers.
    pub totals: ViewerTotals,
    /// The cache's numbers since the run began.
    pub owner: OwnerNumbers,
    /// The memory, with the fields that a report shows.
    pub stats: ArenaStats,
    /// How many other runs the cache served meanwhile.
    pub others: u64,
    /// How changes by others are detected, of files that the cache has.
    pub modes: Vec<FileMode>,
    /// The files that all viewers read most, hottest first.
    pub hottest: Vec<HotFileSize>,
}

/// The question for these numbers, with so many of the hottest files.
pub fn question(hottest: usize) -> Message {
    Message::ask("numbers").number(HOTTEST, hottest as u64)
}

/// How many of the hottest files such a question asks for; 0 if it does not say.
pub fn hottest_in(question: &Message) -> usize {
    let asked = question.number_of(HOTTEST).and_then(|asked| usize::try_from(asked).ok());
    asked.unwrap_or(0).min(FILES_MAX)
}

impl KeptCacheNumbers {
    fn all(&mut self) -> Vec<(String, &mut u64)> {
        let Self { totals, owner, stats, others, modes: _, hottest: _ } = self;
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
        let message =
            self.modes.iter().take(FILES_MAX).enumerate().fold(message, |message, (place, file)| {
                let path = file.path.to_string_lossy();
                let words = [mode_name(file.validation), &path, &file.why].join(&BETWEEN.to_string());
                message.text(&file_name(place), &words)
            });
        self.hottest.iter().enumerate().fold(message, |message, (place, file)| {
            let cached = file.cached_bytes.map_or(CLOSED.to_owned(), |bytes| bytes.to_string());
            message.text(&hot_name(place), &format!("{cached}{BETWEEN}{}", file.name.to_string_lossy()))
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
        let hottest = (0..).map_while(|place| message.text_of(&hot_name(place)));
        numbers.hottest = hottest.filter_map(read_hot).collect();
        Some(numbers)
    }
}

fn file_name(place: usize) -> String {
    format!("file_{place}")
}

fn hot_name(place: usize) -> String {
    format!("hot_{place}")
}

fn read_hot(words: &str) -> Option<HotFileSize> {
    let (cached, name) = words.split_once(BETWEEN)?;
    let cached_bytes = if cached == CLOSED { None } else { Some(cached.parse().ok()?) };
    Some(HotFileSize { name: name.into(), cached_bytes })
}

/// The reason has no such character in it; what the path has is the path's.
fn read_file(words: &str) -> Option<FileMode> {
    let (mode, rest) = words.split_once(BETWEEN)?;
    let (path, why) = rest.rsplit_once(BETWEEN)?;
    Some(FileMode { path: path.into(), validation: mode_of(mode)?, why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quinion::internals::arena::Validation;

    #[test]
    fn every_number_arrives_at_its_place() {
        let mut numbers = KeptCacheNumbers::default();
        for (place, (_, number)) in numbers.all().into_iter().enumerate() {
            *number = place as u64 + 1;
        }
        assert!(numbers.owner.evicted_pages > 0 && numbers.totals.reasons.iter().all(|&count| count > 0));
        let file = |path: &str, validation, why: &str| FileMode {
            path: path.into(),
            validation,
            why: why.to_owned(),
        };
        numbers.modes = vec![
            file("/a b\n\u{1f}\"c", Validation::Kernel, "somebody has it open for writing"),
            file("/d", Validation::Leased, ""),
        ];
        let hot = |name: &str, cached_bytes| HotFileSize { name: name.into(), cached_bytes };
        numbers.hottest = vec![hot("/a b\n\u{1f}\"c", Some(0)), hot("/d", None), hot("", Some(u64::MAX))];
        let line = numbers.put(Message::answer("numbers")).line();
        let message = Message::parse(&line).expect("it is one of ours");
        assert_eq!(KeptCacheNumbers::of(&message), Some(numbers));
        assert_eq!(KeptCacheNumbers::of(&Message::answer("numbers")), None);
        let names: std::collections::HashSet<String> =
            KeptCacheNumbers::default().all().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), KeptCacheNumbers::default().all().len(), "no name twice");
    }
    #[test]
    fn the_number_of_hot_files_asked_for_fits_a_message() {
        let asked = [0, 3, usize::MAX].map(|files| hottest_in(&question(files)));
        assert_eq!(asked, [0, 3, FILES_MAX]);
        assert_eq!(hottest_in(&Message::ask("numbers")), 0, "an earlier version does not ask");
    }
}
