//! Plan: which ranges go into one GET.
//!
//! ```text
//!   wanted    [--a--][--b--]   [--c--]              [--d--]
//!   GETs      [------- 1 -------------]             [- 2 -]      the gap before c is cheaper than another request
//! ```
//!
//! Pure: ranges in, groups out. A request costs as much as the bytes that come in the time to its first byte, so a
//! short gap is fetched and thrown away. A group longer than the largest request is cut where a range begins: the
//! parts go side by side.
//!
//! Invariants:
//!  1. Every range is in one group, and the groups are in order.
//!  2. No group is longer than the limit, but one of a single range.

use std::ops::Range;

#[derive(Clone, Copy, Debug)]
pub(crate) struct JoinLimits {
    /// The longest gap between two, in bytes.
    pub(crate) gap: u64,
    /// The longest GET, in bytes.
    pub(crate) bytes: u64,
}

/// Which of `wanted`, sorted by starts, go together: their places.
pub(crate) fn join(wanted: &[Range<u64>], limits: JoinLimits) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut end = 0;
    for (at, range) in wanted.iter().enumerate() {
        let joins = groups.last().is_some_and(|group| {
            let gap = range.start.saturating_sub(end);
            let bytes = range.end.max(end) - wanted[group.start].start;
            gap <= limits.gap && bytes <= limits.bytes
        });
        match groups.last_mut() {
            Some(group) if joins => {
                group.end = at + 1;
                end = end.max(range.end);
            }
            _ => {
                groups.push(at..at + 1);
                end = range.end;
            }
        }
    }
    groups
}

/// In order, with gaps of up to `gap` bytes closed; empty ranges are left out.
pub(crate) fn covering(wanted: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut sorted: Vec<_> = wanted.iter().filter(|range| range.start < range.end).cloned().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let groups = join(&sorted, JoinLimits { gap, bytes: u64::MAX });
    groups
        .into_iter()
        .map(|group| {
            let end = sorted[group.clone()].iter().map(|range| range.end).max().unwrap_or(0);
            sorted[group.start].start..end
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_join_and_long_ones_are_cut() {
        let limits = JoinLimits { gap: 10, bytes: 100 };
        assert_eq!(join(&[0..10, 10..20, 30..40, 51..60], limits), [0..3, 3..4]);
        assert_eq!(join(&[0..60, 60..100, 100..160], limits), [0..2, 2..3]);
        assert_eq!(join(&[0..500, 500..510], limits), [0..1, 1..2], "one that is too long goes alone");
        assert_eq!(join(&[], limits), []);
        assert_eq!(covering(&[40..50, 0..10, 5..7, 20..20, 12..14], 2), [0..14, 40..50]);
    }

    proptest! {
        #[test]
        fn every_range_is_in_one_group_and_groups_keep_the_limits(
            pieces in prop::collection::vec((0_u64..40, 1_u64..60), 0..40),
            gap in 0_u64..30,
            bytes in 1_u64..300,
        ) {
            let mut at = 0;
            let wanted: Vec<Range<u64>> = pieces.iter().map(|(space, len)| {
                let start = at + space;
                at = start + len;
                start..at
            }).collect();
            let groups = join(&wanted, JoinLimits { gap, bytes });
            let places: Vec<usize> = groups.iter().cloned().flatten().collect();
            prop_assert_eq!(places, (0..wanted.len()).collect::<Vec<_>>());
            for group in &groups {
                let len = wanted[group.end - 1].end - wanted[group.start].start;
                prop_assert!(group.len() == 1 || len <= bytes);
                for at in group.start + 1..group.end {
                    prop_assert!(wanted[at].start - wanted[at - 1].end <= gap);
                }
            }
        }
    }
}
