//! Comments: which share they have of the lines of a package.
//!
//! ```text
//!   //! an essay          counts
//!   /// what it is        counts
//!   // why                counts
//!   f(); // behind code   does not: the line is there in any case
//! ```
//!
//! Essays and rustdoc count like all others: a text that is written once is read a hundred times, and each line of it
//! has to be worth that.

use super::source::Source;

/// A ceiling may lie so many hundredths above the share. More, and it is lowered: else a commit that deletes comments
/// would make room for others.
pub const SLACK: usize = 1;

/// How many of a hundred lines are comments and nothing else, rounded up.
pub fn share<'s>(sources: impl Iterator<Item = &'s Source>) -> usize {
    let (mut comments, mut lines) = (0, 0);
    for source in sources {
        let is_comment = |line: &&str| line.trim_start().starts_with("//");
        comments += source.text.lines().filter(is_comment).count();
        lines += source.text.lines().count();
    }
    (comments * 100).div_ceil(lines.max(1))
}
