//! Stats: what the page-fault server did, in numbers, for programs and for Prometheus.
//!
//! ```text
//!   demand    bytes of the image that a fault was answered with            device    bytes the cache read meanwhile
//!   ahead     bytes that were supplied ahead of a fault, by a record       zeros     pages of which no byte was copied
//!   latency   from the moment that a fault was read to its answer: what the kernel and the processor add is not in it
//! ```
//!
//! How much of the pages supplied ahead was used is not known: a page that is there makes no fault. Faults on pages
//! that the record had not come to count as demand.
//!
//! Of the VMs that are served now each has rows of its own, 256 of them at most: a series ends with its VM.
//!
//! A program with several servers tells monitors of each by itself: [`RestoreStats::numbers`] and [`VmStats::numbers`]
//! have the names and the help of the text here.
//!
//! Invariant: the names in the text for Prometheus are a promise, as those of a report are.

use std::fmt::{self, Write};

use super::latency::LatencyHistogram;

/// Counts of the work done for VMs; they add up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RestoreCounters {
    /// Faults that were answered.
    pub faults: u64,
    /// Answered faults of pages that were there already.
    pub faults_present: u64,
    /// Bytes of the image that faults were answered with, and those around them; zeros included.
    pub demand_bytes: u64,
    /// Bytes of the image that were supplied ahead of a fault, zeros included.
    pub ahead_bytes: u64,
    /// Bytes for which the kernel gave zeros, of the image and of memory that was given back.
    pub zero_bytes: u64,
    /// Bytes that were mapped and not copied.
    pub mapped_bytes: u64,
    /// Bytes that VMs have given back.
    pub removed_bytes: u64,
    /// Bytes of a record that were not supplied, because the snapshot has something else there now.
    pub stale_bytes: u64,
    /// Bytes that could not be read, and that are bus errors in their VM now.
    pub poisoned_bytes: u64,
    /// Answers that the kernel refused because a VM's memory was changing, and that were given again.
    pub retries: u64,
    /// How long faults waited here.
    pub latency: LatencyHistogram,
}

impl RestoreCounters {
    /// Adds what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        let sums = [
            (&mut self.faults, other.faults),
            (&mut self.faults_present, other.faults_present),
            (&mut self.demand_bytes, other.demand_bytes),
            (&mut self.ahead_bytes, other.ahead_bytes),
            (&mut self.zero_bytes, other.zero_bytes),
            (&mut self.mapped_bytes, other.mapped_bytes),
            (&mut self.removed_bytes, other.removed_bytes),
            (&mut self.stale_bytes, other.stale_bytes),
            (&mut self.poisoned_bytes, other.poisoned_bytes),
            (&mut self.retries, other.retries),
        ];
        for (sum, number) in sums {
            *sum += number;
        }
        self.latency.merge(&other.latency);
    }
}

/// Statistics of a server since it began.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RestoreStats {
    /// VMs that are served now.
    pub vms: u64,
    /// VMs that were served, those of now included.
    pub vms_total: u64,
    /// VMs of these that another server had served before.
    pub vms_taken_over: u64,
    /// VMs of these that another server has taken over.
    pub vms_handed_over: u64,
    /// VMs that were given up. It may be more than `vms_total`: a peer that has handed over its memory, and cannot be
    /// served, is given up and was never served.
    pub vms_given_up: u64,
    /// Peers that were refused before they were a VM's. One for which there was no room, and whose memory had come, is
    /// a VM that was given up.
    pub peers_refused: u64,
    /// The image's size.
    pub image_bytes: u64,
    /// Bytes that the cache read from devices since the server began, for others too.
    pub device_bytes: u64,
    /// Counts for all VMs.
    pub counters: RestoreCounters,
    /// The VMs that are served now, in the order of their numbers: the first 256 of them.
    pub each: Vec<VmStats>,
}

/// VMs of which [`RestoreStats::each`] tells at most.
const EACH_MAX: usize = 256;

/// One VM that is served.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct VmStats {
    /// The VM's number, from 1 on, as [`Event::Begun`](crate::Event::Begun) tells it.
    pub vm: u64,
    /// The VM's process, 0 if that is not known.
    pub process: u32,
    /// Counts of the work done for it.
    pub counters: RestoreCounters,
}

/// A number of a server or of a VM, as monitors are told of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RestoreNumber {
    /// The name, without `quinion_restore_` or `quinion_restore_vm_` before it, and without `_total` behind it.
    pub name: &'static str,
    /// The number's meaning, in a few words.
    pub help: &'static str,
    /// Whether it only rises. Its name ends in `_total` then.
    pub is_count: bool,
    /// The number.
    pub value: RestoreValue,
}

/// The value of a [`RestoreNumber`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "each is said by its name")]
pub enum RestoreValue {
    Whole(u64),
    /// A time, which is told in seconds.
    Nanoseconds(u64),
}

impl fmt::Display for RestoreValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Whole(number) => write!(f, "{number}"),
            Self::Nanoseconds(number) => f.write_str(&seconds(number)),
        }
    }
}

impl RestoreNumber {
    fn count(name: &'static str, help: &'static str, number: u64) -> Self {
        Self { name, help, is_count: true, value: RestoreValue::Whole(number) }
    }

    fn gauge(name: &'static str, help: &'static str, number: u64) -> Self {
        Self { is_count: false, ..Self::count(name, help, number) }
    }

    /// The number's name in the text for Prometheus, behind `before`.
    fn full_name(&self, before: &str) -> String {
        format!("{before}{}{}", self.name, if self.is_count { "_total" } else { "" })
    }

    fn write_head(&self, out: &mut String, before: &str, behind: &str) -> fmt::Result {
        let (name, kind) = (self.full_name(before), if self.is_count { "counter" } else { "gauge" });
        writeln!(out, "# HELP {name} {}{behind}.\n# TYPE {name} {kind}", self.help)
    }
}

impl VmStats {
    /// The VM's numbers, as monitors are told of them.
    pub fn numbers(&self) -> Vec<RestoreNumber> {
        let (n, latency) = (&self.counters, &self.counters.latency);
        let waited = RestoreNumber::count("fault_seconds", "Time that faults waited", 0);
        let longest = RestoreNumber::gauge("fault_seconds_max", "The longest of them", 0);
        vec![
            RestoreNumber::count("faults", "Faults that were answered", n.faults),
            RestoreNumber::count("demand_bytes", "Bytes for faults", n.demand_bytes),
            RestoreNumber::count("ahead_bytes", "Bytes ahead of faults", n.ahead_bytes),
            RestoreNumber::count("zero_bytes", "Bytes of zeros", n.zero_bytes),
            RestoreNumber::count("mapped_bytes", "Bytes that were mapped", n.mapped_bytes),
            RestoreNumber::count("removed_bytes", "Bytes given back", n.removed_bytes),
            RestoreNumber::count("poisoned_bytes", "Bytes not readable", n.poisoned_bytes),
            RestoreNumber { value: RestoreValue::Nanoseconds(latency.sum()), ..waited },
            RestoreNumber { value: RestoreValue::Nanoseconds(latency.max()), ..longest },
        ]
    }
}

/// Powers of two of nanoseconds at which the text for Prometheus counts: 1 us to 1 s.
const POWERS: std::ops::RangeInclusive<u32> = 10..=30;

/// The ends of the intervals in which monitors are told of the times of faults, in nanoseconds.
fn latency_ends() -> impl Iterator<Item = u64> {
    POWERS.map(|power| (1_u64 << power) - 1)
}

impl RestoreStats {
    /// Adds the VMs that are served now.
    pub(super) fn set_each(&mut self, mut vms: Vec<VmStats>) {
        vms.sort_unstable_by_key(|vm| vm.vm);
        vms.truncate(EACH_MAX);
        self.each = vms;
    }

    /// The numbers in Prometheus's text format.
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        self.write_prometheus(&mut text).expect("a string takes all that is written");
        text
    }

    /// The server's numbers for monitors; the times of faults apart ([`RestoreStats::latency_buckets`]).
    pub fn numbers(&self) -> Vec<RestoreNumber> {
        let n = &self.counters;
        vec![
            RestoreNumber::gauge("vms", "VMs that are served now", self.vms),
            RestoreNumber::gauge("image_bytes", "Size of the image", self.image_bytes),
            RestoreNumber::count("vms", "VMs that were served", self.vms_total),
            RestoreNumber::count(
                "vms_taken_over",
                "VMs that were taken over from another server",
                self.vms_taken_over,
            ),
            RestoreNumber::count(
                "vms_handed_over",
                "VMs that another server has taken over",
                self.vms_handed_over,
            ),
            RestoreNumber::count("vms_given_up", "VMs that were given up", self.vms_given_up),
            RestoreNumber::count("peers_refused", "Peers that were refused", self.peers_refused),
            RestoreNumber::count("device_bytes", "Bytes read from devices", self.device_bytes),
            RestoreNumber::count("faults", "Faults that were answered", n.faults),
            RestoreNumber::count(
                "faults_present",
                "Faults of pages that were already present",
                n.faults_present,
            ),
            RestoreNumber::count("demand_bytes", "Bytes that faults were answered with", n.demand_bytes),
            RestoreNumber::count("ahead_bytes", "Bytes supplied ahead of a fault", n.ahead_bytes),
            RestoreNumber::count("zero_bytes", "Bytes for which zeros were given", n.zero_bytes),
            RestoreNumber::count("mapped_bytes", "Bytes mapped and not copied", n.mapped_bytes),
            RestoreNumber::count("removed_bytes", "Bytes that VMs have given back", n.removed_bytes),
            RestoreNumber::count(
                "stale_bytes",
                "Bytes of the record that differ from the snapshot",
                n.stale_bytes,
            ),
            RestoreNumber::count("poisoned_bytes", "Bytes that could not be read", n.poisoned_bytes),
            RestoreNumber::count("retries", "Answers that were repeated", n.retries),
        ]
    }

    /// How many faults waited for so many nanoseconds at most, for each of some times, the shortest first.
    pub fn latency_buckets(&self) -> Vec<(u64, u64)> {
        latency_ends().map(|end| (end, self.counters.latency.up_to(end))).collect()
    }

    fn write_prometheus(&self, out: &mut String) -> fmt::Result {
        let latency = &self.counters.latency;
        for number in self.numbers() {
            number.write_head(out, "quinion_restore_", "")?;
            writeln!(out, "{} {}", number.full_name("quinion_restore_"), number.value)?;
        }
        let name = "quinion_restore_fault_seconds";
        writeln!(out, "# HELP {name} From reading a fault to its answer.\n# TYPE {name} histogram")?;
        for (end, faults) in self.latency_buckets() {
            writeln!(out, "{name}_bucket{{le=\"{}\"}} {faults}", seconds(end))?;
        }
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", latency.count())?;
        writeln!(out, "{name}_sum {}\n{name}_count {}", seconds(latency.sum()), latency.count())?;
        self.write_each(out)
    }

    /// A family for each number, with a row for each VM.
    fn write_each(&self, out: &mut String) -> fmt::Result {
        let all: Vec<_> = self.each.iter().map(|vm| (vm, vm.numbers())).collect();
        let families = all.first().map_or(0, |(_, numbers)| numbers.len());
        for family in 0..families {
            all[0].1[family].write_head(out, "quinion_restore_vm_", ", of one VM")?;
            for (VmStats { vm, process, .. }, numbers) in &all {
                let (number, labels) = (numbers[family], format!("vm=\"{vm}\",process=\"{process}\""));
                writeln!(out, "{}{{{labels}}} {}", number.full_name("quinion_restore_vm_"), number.value)?;
            }
        }
        Ok(())
    }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prometheus_gets_each_number_with_its_kind() {
        let mut stats = RestoreStats { vms: 3, vms_total: 9, ..RestoreStats::default() };
        for nanoseconds in [500, 1500, 3_000_000_000] {
            stats.counters.latency.add(nanoseconds);
        }
        let text = stats.prometheus();
        for line in [
            "# TYPE quinion_restore_vms gauge\nquinion_restore_vms 3\n",
            "# TYPE quinion_restore_vms_total counter\nquinion_restore_vms_total 9\n",
            "quinion_restore_fault_seconds_bucket{le=\"0.000001023\"} 1\n",
            "quinion_restore_fault_seconds_bucket{le=\"0.000002047\"} 2\n",
            "quinion_restore_fault_seconds_bucket{le=\"1.073741823\"} 2\n",
            "quinion_restore_fault_seconds_bucket{le=\"+Inf\"} 3\n",
            "quinion_restore_fault_seconds_sum 3.000002000\nquinion_restore_fault_seconds_count 3\n",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let mut vm = VmStats { vm: 7, process: 4711, ..VmStats::default() };
        (vm.counters.faults, vm.counters.demand_bytes) = (2, 8192);
        vm.counters.latency.add(1500);
        assert!(!text.contains("quinion_restore_vm_"), "there is no VM");
        let vms = (0..300).map(|number| VmStats { vm: 300 - number, ..VmStats::default() });
        stats.set_each(vms.collect());
        assert_eq!((stats.each.len(), stats.each[0].vm, stats.each[255].vm), (256, 1, 256));
        stats.set_each(vec![vm, VmStats { vm: 3, ..VmStats::default() }]);
        let text = stats.prometheus();
        for line in [
            "# TYPE quinion_restore_vm_faults_total counter\nquinion_restore_vm_faults_total{vm=\"3\",",
            "process=\"0\"} 0\n",
            "quinion_restore_vm_faults_total{vm=\"7\",process=\"4711\"} 2\n",
            "quinion_restore_vm_demand_bytes_total{vm=\"7\",process=\"4711\"} 8192\n",
            "quinion_restore_vm_fault_seconds_total{vm=\"7\",process=\"4711\"} 0.000001500\n",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let is_plain = |line: &str| line.starts_with("# ") || line.split(' ').count() == 2;
        assert!(text.ends_with('\n') && text.lines().all(is_plain));
    }

    #[test]
    fn two_of_them_add_up_in_all_numbers() {
        let mut one =
            RestoreCounters { faults: 1, removed_bytes: 4, retries: 7, ..RestoreCounters::default() };
        one.latency.add(9);
        let both = {
            let mut sum = one.clone();
            sum.merge(&one);
            sum
        };
        assert_eq!((both.faults, both.removed_bytes, both.retries), (2, 8, 14));
        assert_eq!((both.latency.count(), both.demand_bytes), (2, 0));
    }
}
