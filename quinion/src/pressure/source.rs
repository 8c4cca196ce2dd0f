//! Source: the numbers of pressure, out of files of the system.
//!
//! ```text
//!   memory.pressure, or /proc/pressure/memory     some avg10=0.00 avg60=0.00 avg300=0.00 total=1234      microseconds
//!   a group's usage, its limits                   memory.current, memory.max, memory.high                version 2
//!                                                 memory.usage_in_bytes, memory.limit_in_bytes           version 1
//!   and memory.stat                               inactive_file: what the kernel takes back by itself
//!   /proc/meminfo                                 MemAvailable, MemTotal
//! ```
//!
//! Of the process's group and all groups around it, and the machine, the one with the smallest part
//! of its limit left is reported. The kernel's page cache counts as used by a group, and is
//! reclaimed when others need the memory: the part of it that was not touched twice is subtracted.
//!
//! Not an invariant: that any of the files is there. A file that cannot be read is left out. A gauge is a list of
//! paths, so a test points it to files of its own.

use std::path::{Path, PathBuf};

use crate::arena::{GroupVersion, memory_groups};

use super::Headroom;

/// The files that memory pressure is read from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PressureSource {
    /// A file of pressure stall information, in the order of preference: the first that can be read is taken.
    pub stalls: Vec<PathBuf>,
    /// Control groups with their limits.
    pub groups: Vec<Group>,
    /// As `/proc/meminfo`.
    pub meminfo: Option<PathBuf>,
}

/// One control group's files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// A file with the bytes in use.
    pub usage: PathBuf,
    /// Files with a limit, in bytes; "max" is none.
    pub limits: Vec<PathBuf>,
    /// Numbers with names, a line each.
    pub stat: PathBuf,
}

/// One reading of the source's files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceReading {
    /// Microseconds in which some task waited for memory, ever.
    pub stalled_us: Option<u64>,
    /// The tightest limit.
    pub headroom: Option<Headroom>,
}

impl PressureSource {
    /// The files of this process's control groups, and of the machine.
    pub fn of_this_process() -> Self {
        let mut gauge = Self { meminfo: Some("/proc/meminfo".into()), ..Self::default() };
        for (version, folder) in memory_groups() {
            if version == GroupVersion::Two {
                gauge.stalls.push(folder.join("memory.pressure"));
            }
            gauge.groups.push(Group::of(version, &folder));
        }
        gauge.stalls.push("/proc/pressure/memory".into());
        gauge
    }

    /// Looks once: reads a few small files.
    pub fn read(&self) -> SourceReading {
        let stalled_us = self.stalls.iter().find_map(|file| some_total(&text(file)?));
        let machine = self.meminfo.as_ref().and_then(|file| machine_headroom(&text(file)?));
        let total = machine.map_or(u64::MAX, |headroom| headroom.limit);
        let groups = self.groups.iter().filter_map(|group| group.headroom());
        // A limit above the machine's memory is none.
        let headrooms = groups.filter(|headroom| headroom.limit < total).chain(machine);
        let headroom = headrooms
            .min_by_key(|headroom| (u128::from(headroom.free) << 32) / u128::from(headroom.limit.max(1)));
        SourceReading { stalled_us, headroom }
    }
}

impl Group {
    /// The files of the group in `folder`.
    pub fn of(version: GroupVersion, folder: &Path) -> Self {
        let usage = match version {
            GroupVersion::One => "memory.usage_in_bytes",
            GroupVersion::Two => "memory.current",
        };
        Self {
            usage: folder.join(usage),
            limits: version.files().iter().map(|file| folder.join(file)).collect(),
            stat: folder.join("memory.stat"),
        }
    }

    fn headroom(&self) -> Option<Headroom> {
        let usage: u64 = text(&self.usage)?.trim().parse().ok()?;
        let limit: u64 = self.limits.iter().filter_map(|file| text(file)?.trim().parse().ok()).min()?;
        let idle = text(&self.stat).and_then(|stat| inactive_file(&stat)).unwrap_or(0);
        Some(Headroom { free: limit.saturating_sub(usage.saturating_sub(idle)), limit })
    }
}

fn text(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok()
}

/// The total of the line "some" of pressure stall information, in microseconds.
fn some_total(stalls: &str) -> Option<u64> {
    let some = stalls.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("total="))?.trim().parse().ok()
}

/// Pages of files that the kernel takes back first, in bytes. A version 1 group has its inner groups' in another line.
fn inactive_file(stat: &str) -> Option<u64> {
    let number = |name: &str| {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    };
    number("total_inactive_file").or_else(|| number("inactive_file"))
}

fn machine_headroom(meminfo: &str) -> Option<Headroom> {
    let number = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Headroom { free: number("MemAvailable:")?, limit: number("MemTotal:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn the_tightest_of_all_limits_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let meminfo = write(&folder, "meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\n");
        let mut gauge = PressureSource { meminfo: Some(meminfo), ..PressureSource::default() };
        assert_eq!(gauge.read().headroom, Some(Headroom { free: 512_000, limit: 1_024_000 }));
        gauge.groups.push(Group::of(GroupVersion::Two, folder.path()));
        write(&folder, "memory.current", "90000\n");
        write(&folder, "memory.max", "max\n");
        assert_eq!(gauge.read().headroom.unwrap().limit, 1_024_000, "a group without a limit");
        write(&folder, "memory.high", "100000\n");
        assert_eq!(gauge.read().headroom, Some(Headroom { free: 10_000, limit: 100_000 }));
        write(&folder, "memory.stat", "anon 5\nactive_file 7\ninactive_file 60000\n");
        assert_eq!(
            gauge.read().headroom,
            Some(Headroom { free: 512_000, limit: 1_024_000 }),
            "70 of 100 are free"
        );
        write(&folder, "memory.high", "max\n");
        write(&folder, "memory.max", "9223372036854771712\n");
        write(&folder, "memory.current", "1\n");
        assert_eq!(gauge.read().headroom.unwrap().limit, 1_024_000, "more than the machine has is no limit");
    }

    #[test]
    fn a_group_of_version_1() {
        let folder = tempfile::tempdir().unwrap();
        let gauge = PressureSource {
            groups: vec![Group::of(GroupVersion::One, folder.path())],
            ..PressureSource::default()
        };
        assert_eq!(gauge.read(), SourceReading::default());
        write(&folder, "memory.usage_in_bytes", "800\n");
        write(&folder, "memory.limit_in_bytes", "1000\n");
        write(&folder, "memory.stat", "inactive_file 1\ntotal_inactive_file 300\n");
        assert_eq!(gauge.read().headroom, Some(Headroom { free: 500, limit: 1000 }));
    }

    #[test]
    fn stalls_are_the_first_that_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let psi = |total: u64| {
            format!(
                "some avg10=1.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n"
            )
        };
        let inner = folder.path().join("memory.pressure");
        let outer = write(&folder, "outer", &psi(7));
        let gauge = PressureSource { stalls: vec![inner, outer], ..PressureSource::default() };
        assert_eq!(gauge.read().stalled_us, Some(7));
        write(&folder, "memory.pressure", &psi(12));
        assert_eq!(gauge.read().stalled_us, Some(12));
        write(&folder, "memory.pressure", "nonsense");
        assert_eq!(gauge.read().stalled_us, Some(7));
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let headroom = PressureSource::of_this_process().read().headroom.expect("/proc/meminfo has numbers");
        assert!(headroom.free <= headroom.limit && headroom.limit > 1 << 20, "{headroom:?}");
    }
}
