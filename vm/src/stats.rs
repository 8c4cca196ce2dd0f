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
    /// Its number, from 1 on, as [`Event::Begun`](crate::Event::Begun) tells it.
    pub vm: u64,
    /// Its process, 0 if that is not known.
    pub process: u32,
    /// Counts of the work done for it.
    pub counters: RestoreCounters,
}

/// Powers of two of nanoseconds at which the text for Prometheus counts: 1 us to 1 s.
const POWERS: std::ops::RangeInclusive<u32> = 10..=30;

impl RestoreStats {
    /// Adds the VMs that are served now.
    pub(super) fn tell_each(&mut self, mut vms: Vec<VmStats>) {
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

    fn write_prometheus(&self, out: &mut String) -> fmt::Result {
        let RestoreCounters { latency, .. } = &self.counters;
        let n = &self.counters;
        let rows = [
            ("vms", "gauge", "VMs that are served now", self.vms),
            ("image_bytes", "gauge", "Size of the image", self.image_bytes),
            ("vms_total", "counter", "VMs that were served", self.vms_total),
            ("vms_given_up_total", "counter", "VMs that were given up", self.vms_given_up),
            ("peers_refused_total", "counter", "Peers that were refused", self.peers_refused),
            ("device_bytes_total", "counter", "Bytes read from devices", self.device_bytes),
            ("faults_total", "counter", "Faults that were answered", n.faults),
            (
                "faults_present_total",
                "counter",
                "Faults of pages that were already present",
                n.faults_present,
            ),
            ("demand_bytes_total", "counter", "Bytes that faults were answered with", n.demand_bytes),
            ("ahead_bytes_total", "counter", "Bytes supplied ahead of a fault", n.ahead_bytes),
            ("zero_bytes_total", "counter", "Bytes for which zeros were given", n.zero_bytes),
            ("mapped_bytes_total", "counter", "Bytes mapped and not copied", n.mapped_bytes),
            ("removed_bytes_total", "counter", "Bytes that VMs have given back", n.removed_bytes),
            (
                "stale_bytes_total",
                "counter",
                "Bytes of the record that differ from the snapshot",
                n.stale_bytes,
            ),
            ("poisoned_bytes_total", "counter", "Bytes that could not be read", n.poisoned_bytes),
            ("retries_total", "counter", "Answers that were repeated", n.retries),
        ];
        for (name, kind, help, value) in rows {
            writeln!(out, "# HELP quinion_restore_{name} {help}.")?;
            writeln!(out, "# TYPE quinion_restore_{name} {kind}")?;
            writeln!(out, "quinion_restore_{name} {value}")?;
        }
        let name = "quinion_restore_fault_seconds";
        writeln!(out, "# HELP {name} From reading a fault to its answer.\n# TYPE {name} histogram")?;
        for power in POWERS {
            let nanoseconds = (1_u64 << power) - 1;
            writeln!(out, "{name}_bucket{{le=\"{}\"}} {}", seconds(nanoseconds), latency.up_to(nanoseconds))?;
        }
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", latency.count())?;
        writeln!(out, "{name}_sum {}\n{name}_count {}", seconds(latency.sum()), latency.count())?;
        self.write_each(out)
    }

    /// A family for each number, with a row for each VM.
    fn write_each(&self, out: &mut String) -> fmt::Result {
        type Number = fn(&RestoreCounters) -> String;
        let families: [(&str, &str, &str, Number); 9] = [
            ("faults_total", "counter", "Faults that were answered", |n| n.faults.to_string()),
            ("demand_bytes_total", "counter", "Bytes for faults", |n| n.demand_bytes.to_string()),
            ("ahead_bytes_total", "counter", "Bytes ahead of faults", |n| n.ahead_bytes.to_string()),
            ("zero_bytes_total", "counter", "Bytes of zeros", |n| n.zero_bytes.to_string()),
            ("mapped_bytes_total", "counter", "Bytes that were mapped", |n| n.mapped_bytes.to_string()),
            ("removed_bytes_total", "counter", "Bytes given back", |n| n.removed_bytes.to_string()),
            ("poisoned_bytes_total", "counter", "Bytes not readable", |n| n.poisoned_bytes.to_string()),
            ("fault_seconds_total", "counter", "Time that faults waited", |n| seconds(n.latency.sum())),
            ("fault_seconds_max", "gauge", "The longest of them", |n| seconds(n.latency.max())),
        ];
        for (name, kind, help, number) in families.iter().filter(|_| !self.each.is_empty()) {
            writeln!(out, "# HELP quinion_restore_vm_{name} {help}, of one VM.")?;
            writeln!(out, "# TYPE quinion_restore_vm_{name} {kind}")?;
            for VmStats { vm, process, counters } in &self.each {
                let labels = format!("vm=\"{vm}\",process=\"{process}\"");
                writeln!(out, "quinion_restore_vm_{name}{{{labels}}} {}", number(counters))?;
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
        stats.tell_each(vms.collect());
        assert_eq!((stats.each.len(), stats.each[0].vm, stats.each[255].vm), (256, 1, 256));
        stats.tell_each(vec![vm, VmStats { vm: 3, ..VmStats::default() }]);
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
