//! Limits: how much memory this process may hope for.
//!
//! The least of: the machine's memory; the memory limits of the process's control group and of every group around it,
//! versions 1 and 2; the limit on its address space; the limit on the size of its files, for the arena is one (and a
//! file that would be too large is not refused but punished, by SIGXFSZ).
//!
//! ```text
//!   /proc/self/cgroup       which group              4:memory:/jobs/7     0::/jobs/7
//!   /proc/self/mountinfo    where groups are files   /sys/fs/cgroup/memory, which shows /
//!   -> /sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes, then of jobs, then of the root
//! ```
//!
//! A limit that cannot be read counts as none: a machine without control groups, or without `/proc`, is not an error.
//! The texts are parsed apart from reading them.
#![deny(unsafe_code)]

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::sys::mountinfo::Line;

use rustix::process::{Resource, getrlimit};

/// The most memory, in bytes, that this process may use by the limits of the machine, its control
/// groups and its own resource limits. `u64::MAX` if none can be read. Reads a few files.
pub fn process_limit() -> u64 {
    let machine = read("/proc/meminfo").and_then(|text| memory_total(&text));
    let groups = group_limits(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
        .into_iter()
        .filter_map(|file| group_limit(&read(file)?));
    let own = [Resource::As, Resource::Fsize].into_iter().filter_map(|resource| getrlimit(resource).current);
    machine.into_iter().chain(groups).chain(own).min().unwrap_or(u64::MAX)
}

/// The files of the kernel have no size to go by; a read that does not fit makes the kernel write the whole text again.
fn read(path: impl AsRef<Path>) -> Option<String> {
    let mut text = Vec::with_capacity(16 << 10);
    std::fs::File::open(path).ok()?.read_to_end(&mut text).ok()?;
    String::from_utf8(text).ok()
}

fn memory_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The number in a group's limit file, in bytes; `None` for "max".
fn group_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Every file that may hold a memory limit of this process: its groups' and their ancestors'.
fn group_limits(cgroup: &Option<String>, mountinfo: &Option<String>) -> Vec<PathBuf> {
    let folders = group_folders(cgroup, mountinfo);
    folders
        .iter()
        .flat_map(|(version, folder)| version.files().iter().map(|name| folder.join(name)))
        .collect()
}

/// The folders of the memory groups of this process and of those around them, inner before outer.
pub fn memory_groups() -> Vec<(GroupVersion, PathBuf)> {
    group_folders(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

fn group_folders(cgroup: &Option<String>, mountinfo: &Option<String>) -> Vec<(GroupVersion, PathBuf)> {
    let (Some(cgroup), Some(mountinfo)) = (cgroup, mountinfo) else { return Vec::new() };
    let mut folders = Vec::new();
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        for group in cgroup.lines().filter_map(|line| mount.group_of(line)) {
            folders.extend(mount.levels(group).into_iter().map(|level| (mount.version, level)));
        }
    }
    folders
}

/// How a control group's files are named.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupVersion {
    /// `memory.limit_in_bytes` and so on.
    One,
    /// `memory.max` and so on.
    Two,
}

impl GroupVersion {
    /// The files of a group that limit its memory. Above `memory.high` a group is throttled until memory is freed, and
    /// a cache's is not freed by that; so it is a limit for a cache.
    pub fn files(self) -> &'static [&'static str] {
        match self {
            GroupVersion::One => &["memory.limit_in_bytes"],
            GroupVersion::Two => &["memory.max", "memory.high"],
        }
    }
}

#[derive(PartialEq, Eq, Debug)]
struct Mount {
    version: GroupVersion,
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// One line of `/proc/self/mountinfo`; `None` if it mounts no memory groups.
    fn parse(line: &str) -> Option<Self> {
        let line = Line::parse(line)?;
        let version = match line.kind {
            "cgroup2" => GroupVersion::Two,
            "cgroup" if line.options.split(',').any(|option| option == "memory") => GroupVersion::One,
            _ => return None,
        };
        Some(Self { version, root: line.root.into(), point: line.point.into() })
    }

    fn group_of<'a>(&self, line: &'a str) -> Option<&'a Path> {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let has_memory = match self.version {
            GroupVersion::One => controllers.split(',').any(|controller| controller == "memory"),
            GroupVersion::Two => controllers.is_empty(),
        };
        has_memory.then(|| Path::new(path))
    }

    /// The folders of `group` and of the groups around it, as far as this mount shows them; else of its root.
    fn levels(&self, group: &Path) -> Vec<PathBuf> {
        let inside = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let plain = inside.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let inside = if plain { inside } else { Path::new("") };
        inside.ancestors().map(|level| self.point.join(level)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, default_memory};
    use crate::units::EXTENT_SIZE;

    fn files(cgroup: &str, mountinfo: &str) -> Vec<String> {
        let files = group_limits(&Some(cgroup.into()), &Some(mountinfo.into()));
        files.iter().map(|file| file.to_str().unwrap().to_owned()).collect()
    }

    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";

    #[test]
    fn version_1_with_nested_groups() {
        let cgroup = "9:name=systemd:/\n4:memory:/jobs/7\n3:cpuset:/jobs";
        assert_eq!(
            files(cgroup, V1),
            [
                "/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ]
        );
    }

    #[test]
    fn version_2_with_a_nested_group() {
        let mountinfo = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(
            files("0::/user.slice/app", mountinfo),
            [
                "/sys/fs/cgroup/user.slice/app/memory.max",
                "/sys/fs/cgroup/user.slice/app/memory.high",
                "/sys/fs/cgroup/user.slice/memory.max",
                "/sys/fs/cgroup/user.slice/memory.high",
                "/sys/fs/cgroup/memory.max",
                "/sys/fs/cgroup/memory.high",
            ]
        );
    }

    #[test]
    fn both_versions_at_once() {
        let found = files("4:memory:/a\n0::/b", V1);
        assert!(found.contains(&"/sys/fs/cgroup/memory/a/memory.limit_in_bytes".into()));
        assert!(found.contains(&"/sys/fs/cgroup/unified/b/memory.max".into()));
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let mountinfo = "700 690 0:32 /docker/4f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
        let at_root = ["/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(files("4:memory:/docker/4f", mountinfo), at_root);
        assert_eq!(files("4:memory:/elsewhere", mountinfo), at_root);
        assert_eq!(files("4:memory:/docker/4f/../x", mountinfo), at_root);
        assert_eq!(files("4:memory:/docker/4f/inner", mountinfo).len(), 2);
    }

    #[test]
    fn memory_may_share_a_hierarchy_and_a_mount_point_may_have_a_space() {
        let mountinfo = r"35 31 0:32 / /my\040groups/m rw - cgroup none rw,cpu,memory";
        assert_eq!(files("4:cpu,memory:/", mountinfo), ["/my groups/m/memory.limit_in_bytes"]);
    }

    #[test]
    fn nonsense_is_no_limit() {
        for (cgroup, mountinfo) in
            [("", ""), ("4:memory", V1), ("\n4:\n4:cpu:/a\n", V1), ("4:memory:/", "a - b")]
        {
            assert_eq!(files(cgroup, mountinfo), [""; 0], "{cgroup:?} {mountinfo:?}");
        }
        assert!(group_limits(&None, &Some(V1.into())).is_empty());
    }

    #[test]
    fn numbers() {
        assert_eq!(group_limit("max\n"), None);
        assert_eq!(group_limit("1073741824\n"), Some(1 << 30));
        assert_eq!(group_limit(""), None);
        assert_eq!(memory_total("MemTotal:       24683848 kB\nMemFree: 1 kB\n"), Some(24683848 * 1024));
        assert_eq!(memory_total("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn this_process_has_a_limit_and_a_default_below_it() {
        let limit = process_limit();
        assert!(limit > Arena::MEMORY_MIN, "{limit}");
        let default = default_memory();
        assert!((Arena::MEMORY_MIN..=limit).contains(&default));
        assert_eq!(default % EXTENT_SIZE as u64, 0);
    }
}
