//! Group: how much of a control group's memory a cache may take.
//!
//! A control group that has no memory left kills a process in it, and the kernel cannot reclaim a cache's memory. So a
//! cache of `run` has **half** of its group's limit at most, even if more was requested, which is told at the start:
//! the programs that it serves are in the same group, and should have the other half at once, however fast they take
//! it. When they take more, the cache becomes smaller (`quinion`'s module `pressure`), to its minimum; that takes it a
//! fraction of a second.

use std::path::Path;

use quinion_size::{Size, shown};

/// The part of a group's limit that a cache has at most.
const PART: u64 = 2;

/// The least limit of the control groups that this process is in, if it is less than what the machine has.
pub fn limit() -> Option<u64> {
    let read = |file: &Path| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let groups = quinion::internals::arena::memory_groups();
    let files =
        groups.iter().flat_map(|(version, group)| version.files().iter().map(|file| group.join(file)));
    let limit = files.filter_map(|file| read(&file)).min()?;
    let machine = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = machine.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total = total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    (limit < total.saturating_mul(1024)).then_some(limit)
}

/// The memory of a cache for which `asked` bytes were requested, in a group with that `limit`; and a message, if that
/// is less.
pub fn fit(asked: u64, limit: Option<u64>) -> (u64, Option<String>) {
    let Some(limit) = limit else { return (asked, None) };
    let most = (limit / PART).max(quinion::Cache::MEMORY_MIN);
    if asked <= most {
        return (asked, None);
    }
    let text = format!(
        "the control group may use {} of memory, and of that the cache takes half at most: {}, and not {}; the \
         programs it serves need the rest (say --memory {} or less, or raise the group's limit)",
        shown(limit),
        shown(most),
        shown(asked),
        Size::Bytes(asked).rounded_down(most),
    );
    (most, Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_cache_has_half_of_its_group_at_most() {
        assert_eq!(fit(200 * MIB, None), (200 * MIB, None));
        assert_eq!(fit(150 * MIB, Some(300 * MIB)), (150 * MIB, None));
        let (memory, said) = fit(200 * MIB, Some(300 * MIB));
        let said = said.expect("it is less");
        assert_eq!(memory, 150 * MIB);
        assert!(["300", "150", "200", "--memory"].iter().all(|word| said.contains(word)), "{said}");
        let (_, said) = fit(200_000_000, Some(300 * MIB));
        assert!(said.expect("it is less").contains("--memory 157MB or less"), "in the units that were typed");
        assert_eq!(fit(100 * MIB, Some(10 * MIB)).0, quinion::Cache::MEMORY_MIN, "less is no cache");
    }
}
