//! Limit: a group of processes that may use no more than so much memory, the kernel's page cache for them included; or
//! one that only counts how much that is.
//!
//! ```text
//!   /sys/fs/cgroup/memory/<our own group>/quinion-bench-PID-N     version 1: memory.limit_in_bytes,
//!                                                                            memory.max_usage_in_bytes
//!   /sys/fs/cgroup/<our own group>/quinion-bench-PID-N            version 2: memory.max, memory.peak
//! ```
//!
//! Each measured process gets a group of its own, which begins with nothing in
//! it. A group is a folder, and swept away as all of our folders are, whoever
//! kills us. It takes root, or a group that was handed over to us.
//!
//! Whom the kernel ended because it wanted more, is counted by the group: that is said of the way that was measured,
//! and is no failure of the others.
//!
//! To be counted, this process goes into such a group itself for as long as something is measured, and whom it starts
//! meanwhile is in it too. What it had before stays with the group that it came from; so the peak is what the measured
//! work took: memory of processes, memory files, and pages of files that the kernel has read for it.
//!
//! Not an invariant: that nothing else limits us. The group lies in our own, whose limits hold too.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::{GROUP_FILE, ScratchFolder};
use super::harness::Unmeasured;

/// What the metric of [`peak_of`] is called.
pub const MEMORY: &str = "memory (peak, with page cache)";
/// Where a group counts whom the kernel has ended in it for want of memory, in version 1 and in version 2.
const COUNTS: [&str; 2] = ["memory.oom_control", "memory.events"];
/// Where a group says the most that it has held.
const PEAKS: [&str; 2] = ["memory.max_usage_in_bytes", "memory.peak"];

/// A group with a limit; gone when this is dropped.
pub struct Limit {
    folder: ScratchFolder,
    bytes: u64,
}

impl Limit {
    /// A group that may use `bytes`.
    pub fn new(bytes: u64) -> Result<Self, Unmeasured> {
        let (parent, file) = place()?;
        let folder = ScratchFolder::new(&parent).map_err(|why| missing(&parent, &why.to_string()))?;
        let limit = Self { folder, bytes };
        let written = fs::write(limit.folder.path().join(file), bytes.to_string());
        written.map_err(|error| missing(&parent, &format!("{file} cannot be written: {error}")))?;
        Ok(limit)
    }

    /// What of a limit of `bytes` our cache may be: all but what our process needs itself.
    pub fn memory_within(bytes: u64) -> u64 {
        bytes - bytes / 32 - (16 << 20)
    }

    /// What a process writes its number to, to belong to it.
    pub fn door(&self) -> PathBuf {
        self.folder.path().join(GROUP_FILE)
    }

    /// `ended` as it came, but if it failed because the kernel ended the process for want of memory: then that is
    /// what is missing.
    pub fn judge<T>(&self, ended: Result<T, Unmeasured>) -> Result<T, Unmeasured> {
        match ended {
            Err(Unmeasured::Failed(_)) if self.has_killed() => Err(Unmeasured::Missing(format!(
                "it took more than the {} MiB of memory that everybody has here, and the kernel ended it; measure it \
                 without --quick if this is a quick run, where there is more",
                self.bytes >> 20
            ))),
            ended => ended,
        }
    }

    /// Whether the kernel has ended a process of the group for want of memory.
    fn has_killed(&self) -> bool {
        let text = |name| fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        COUNTS.iter().any(|name| killed(&text(*name)) > 0)
    }
}

/// What `work` comes to, and the most bytes that this process and all that it starts take for it, the kernel's page
/// cache for them included; not a number where no group counts them, which [`why_no_peak`] explains. All of this
/// process is counted, so one at a time; what `work` started and did not wait for is killed.
pub fn peak_of<T>(work: impl FnOnce() -> Result<T, Unmeasured>) -> Result<(T, f64), Unmeasured> {
    let Ok(inside) = Inside::new() else { return Ok((work()?, f64::NAN)) };
    let done = work()?;
    let peak = fs::read_to_string(&inside.peak)?.trim().parse().unwrap_or(f64::NAN);
    Ok((done, peak))
}

/// Why the most memory that a piece of work takes cannot be told; `None` if it can.
pub fn why_no_peak() -> Option<String> {
    Inside::new().err().map(|why| why.to_string())
}

/// A group that this process is in, until this is dropped.
struct Inside {
    /// What says the most that the group has held.
    peak: PathBuf,
    /// What to write to, to be back where we were.
    home: PathBuf,
    /// Goes after we have left: a process that is in it then is killed.
    _folder: ScratchFolder,
}

impl Inside {
    fn new() -> Result<Self, Unmeasured> {
        let (parent, _) = place()?;
        let folder = ScratchFolder::new(&parent).map_err(|why| missing(&parent, &why.to_string()))?;
        let peak = PEAKS.map(|name| folder.path().join(name)).into_iter().find(|file| file.exists());
        let peak = peak.ok_or_else(|| missing(&parent, "it does not say the most that it has held"))?;
        let door = folder.path().join(GROUP_FILE);
        let inside = Self { peak, home: parent.join(GROUP_FILE), _folder: folder };
        let entered = fs::write(door, std::process::id().to_string());
        entered.map_err(|error| missing(&parent, &format!("it cannot be entered: {error}")))?;
        Ok(inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let left = fs::write(&self.home, std::process::id().to_string());
        left.expect("a group that a process came from takes it back");
    }
}

/// How many a group has lost, by its own count.
fn killed(counts: &str) -> u64 {
    let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
    counts.lines().find_map(count).unwrap_or(0)
}

fn missing(parent: &Path, why: &str) -> Unmeasured {
    Unmeasured::Missing(format!(
        "memory with the kernel's page cache cannot be limited or counted by a group in {}: {why}; it takes root and \
         the memory controller of cgroups",
        parent.display()
    ))
}

/// The group that we are in, and the file that limits one.
fn place() -> Result<(PathBuf, &'static str), Unmeasured> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let found = place_in(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
    found.ok_or_else(|| {
        Unmeasured::Missing(
            "there is no memory controller of cgroups here, so the kernel's page cache cannot be limited or counted; \
             mount one, or use a machine that has it"
                .to_owned(),
        )
    })
}

/// The same, of what `/proc` says: version 1 if its memory controller is mounted.
fn place_in(mounts: &str, groups: &str) -> Option<(PathBuf, &'static str)> {
    let group = |is_ours: &dyn Fn(&str) -> bool| {
        let fields = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        fields.filter(|(controllers, _)| is_ours(controllers)).map(|(_, group)| group.to_owned()).next()
    };
    let mount = |kind: &str, option: &str| {
        let fits = |line: &&str| {
            let Some((_, tail)) = line.split_once(" - ") else { return false };
            let mut words = tail.split(' ');
            words.next() == Some(kind)
                && (option.is_empty() || words.next_back().is_some_and(|o| o.split(',').any(|o| o == option)))
        };
        let line = mounts.lines().find(fits)?;
        let mut words = line.split(' ').skip(3);
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    // What of the hierarchy is mounted may itself be a group; ours is named from the top.
    let inside = |(root, at): (String, String), group: String| {
        let below = group.strip_prefix(root.trim_end_matches('/')).unwrap_or(&group).to_owned();
        Path::new(&at).join(below.trim_start_matches('/'))
    };
    let first = || {
        let group = group(&|controllers| controllers.split(',').any(|one| one == "memory"))?;
        Some((inside(mount("cgroup", "memory")?, group), "memory.limit_in_bytes"))
    };
    let second = || Some((inside(mount("cgroup2", "")?, group(&str::is_empty)?), "memory.max"));
    first().or_else(second)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const CPU: &str = "34 31 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n";
    const SECOND: &str = "36 31 0:33 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn who_was_killed_is_counted_in_either_version() {
        assert_eq!(killed("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"), 2);
        assert_eq!(killed("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!([killed("oom_kill_disable 1\n"), killed("")], [0, 0]);
    }

    #[test]
    fn our_group_is_found_in_either_version() {
        let place = |mounts: String, groups: &str| place_in(&mounts, groups);
        let found = |path: &str, file| Some((PathBuf::from(path), file));
        let groups = "5:cpu:/x\n4:memory:/a/b\n0::/c\n";
        let first = found("/sys/fs/cgroup/memory/a/b", "memory.limit_in_bytes");
        assert_eq!(place(format!("{CPU}{FIRST}{SECOND}"), groups), first);
        let second = found("/sys/fs/cgroup/c", "memory.max");
        assert_eq!(place(format!("{CPU}{SECOND}"), groups), second);
        let nested = FIRST.replace(" / /sys", " /a /sys");
        assert_eq!(place(nested, groups), found("/sys/fs/cgroup/memory/b", "memory.limit_in_bytes"));
        assert_eq!(place(CPU.to_owned(), groups), None);
        assert_eq!(place(String::new(), ""), None);
    }
}
