//! Experiments: each asks one question, by cases that stand beside peers.
//!
//! To add one: a file with its essay and a function that lists its cases, an entry in [`ABOUT`], and one in [`all`].
//! The tests run every experiment quickly.

mod cold;
mod endpoint;
mod evict;
mod hit;
mod insert;
mod memfile;
mod populate;
mod programs;
mod ratio;
mod readbatch;
mod readseq;
mod restore;
mod split;
mod stream;
mod thrash;
mod tier;
mod write;

use crate::fixtures::worker::Job;
use crate::fixtures::{db_bench, disk};
use crate::harness::{CacheStart, Estimate, Experiment, ExperimentDescription, ListCases, hit_ratios};

/// Descriptions of the experiments, in the order in which they run.
pub const ABOUT: [ExperimentDescription; 17] = [
    ExperimentDescription {
        name: "hit",
        question: "hit: what does a read of cached data cost, beside the kernel's own and caches of values?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [1.5, 1.5], full: [15.0, 20.0] },
    },
    ExperimentDescription {
        name: "insert",
        question: "insert: what does it cost to put a folio into the index, alone and in batches?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.3, 0.3], full: [2.0, 2.5] },
    },
    ExperimentDescription {
        name: "split",
        question: "split: what does it cost to insert where a shadow is, which may be larger?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.02, 0.03], full: [0.2, 0.4] },
    },
    ExperimentDescription {
        name: "readbatch",
        question: "readbatch: what does it cost to find a few cached folios or many, and to look one too far?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [35.0, 1.5], full: [35.0, 3.0] },
    },
    ExperimentDescription {
        name: "cold",
        question: "cold: how fast is an uncached file read, beside the kernel?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [1.0, 4.0], full: [10.0, 55.0] },
    },
    ExperimentDescription {
        name: "readseq",
        question: "readseq: how fast does RocksDB, unmodified, read its databases from end to end?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [1.5, 3.0], full: [130.0, 140.0] },
    },
    ExperimentDescription {
        name: "programs",
        question: "programs: how fast are programs that people have, cold and warm, by `quinion run`?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [8.0, 13.0], full: [60.0, 90.0] },
    },
    ExperimentDescription {
        name: "evict",
        question: "evict: what does it cost to put a new page into a full cache, data included?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.1], full: [2.5, 0.3] },
    },
    ExperimentDescription {
        name: "thrash",
        question: "thrash: what is left of a cache when the file is twice as large as it?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.3, 2.0], full: [10.0, 100.0] },
    },
    ExperimentDescription {
        name: "stream",
        question: "stream: what does it cost to read a large file once, and what is left of what was hot?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [0.6, 3.0], full: [20.0, 170.0] },
    },
    ExperimentDescription {
        name: "write",
        question: "write: what does a buffered write cost, and one that is synced, beside the kernel's own?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.2, 1.5], full: [7.0, 12.0] },
    },
    ExperimentDescription {
        name: "memfile",
        question: "memfile: what does a read of a file in memory cost, beside tmpfs?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.4], full: [2.0, 4.0] },
    },
    ExperimentDescription {
        name: "populate",
        question: "populate: how fast is a virtual machine's memory filled, beside all ways that the kernel has?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.5, 5.0], full: [10.0, 75.0] },
    },
    ExperimentDescription {
        name: "restore",
        question: "restore: how soon has a virtual machine the memory of its snapshot?",
        starts: CacheStart::Cold,
        takes: Estimate { quick: [2.0, 6.5], full: [15.0, 95.0] },
    },
    ExperimentDescription {
        name: "tier",
        question: "tier: what do writes to a cache's disk tier and reads from it cost, beside foyer's?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [2.0, 1.5], full: [6.0, 4.0] },
    },
    ExperimentDescription {
        name: "endpoint",
        question: "endpoint: what does a warm GET of 1 MiB cost at quinion-s3, beside versitygw on the same files?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [3.0, 5.0], full: [3.0, 8.0] },
    },
    ExperimentDescription {
        name: hit_ratios::NAME,
        question: "ratio: how many reads does a cache answer, by which rules, on what people asked for?",
        starts: CacheStart::Anyhow,
        takes: Estimate { quick: [0.1, 0.4], full: [5.0, 15.0] },
    },
];

pub const JOBS: [Job; 7] = [
    (hit::JOB, hit::work),
    (disk::MAKE, disk::make),
    (thrash::JOB, thrash::work),
    (thrash::SWITCH_JOB, thrash::switch),
    (stream::JOB, stream::work),
    (restore::JOB, restore::work),
    (programs::JOB, programs::work),
];

/// Options of single experiments.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(id = "experiments-options")]
pub struct Options {
    #[command(flatten)]
    db_bench: db_bench::Options,
    #[command(flatten)]
    ratio: ratio::Options,
    #[command(flatten)]
    programs: programs::Options,
}

impl Options {
    /// Checks the options, and that each is of an experiment that `runs`.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn check(&self, runs: impl Fn(&str) -> bool) -> Result<(), String> {
        self.programs.check()?;
        for (name, is_given, options) in [
            ("programs", self.programs.is_given(), "--only"),
            (hit_ratios::NAME, self.ratio.is_given(), "--traces and --sizes"),
        ] {
            if is_given && !runs(name) {
                return Err(format!(
                    "{options} is for `{name}`, which is not asked for; name it as well, or none"
                ));
            }
        }
        Ok(())
    }
}

pub fn all(options: &Options) -> Vec<Experiment> {
    let Options { db_bench: readseq_options, ratio: ratio_options, programs: programs_options } =
        options.clone();
    let cases: [ListCases; ABOUT.len()] = [
        Box::new(hit::cases),
        Box::new(insert::cases),
        Box::new(split::cases),
        Box::new(readbatch::cases),
        Box::new(cold::cases),
        Box::new(move |settings| readseq::cases(settings, &readseq_options)),
        Box::new(move |settings| programs::cases(settings, &programs_options)),
        Box::new(evict::cases),
        Box::new(thrash::cases),
        Box::new(stream::cases),
        Box::new(write::cases),
        Box::new(memfile::cases),
        Box::new(populate::cases),
        Box::new(restore::cases),
        Box::new(tier::cases),
        Box::new(endpoint::cases),
        Box::new(move |settings| ratio::cases(settings, &ratio_options)),
    ];
    ABOUT.iter().zip(cases).map(|(about, cases)| Experiment { about, cases }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{Extent, Repeat, Settings};

    /// The cases of each have the same index as its description. A case does not name its experiment, but each of these
    /// has a name that no other has.
    #[test]
    fn each_has_its_own_cases() {
        let settings = Settings { extent: Extent::Quick, repeat: Repeat::Usual(1), folder: ".".into() };
        let known =
            [("hit", "in another process"), ("split", "shadow"), ("thrash", "random"), ("ratio", "loop of")];
        let experiments = all(&Options::default());
        for (name, part) in known {
            let experiment = experiments.iter().find(|experiment| experiment.about.name == name).expect(name);
            let cases = (experiment.cases)(&settings);
            let names: Vec<&str> = cases.iter().map(|case| case.name()).collect();
            assert!(names.iter().any(|case| case.contains(part)), "{name}: {names:?}");
        }
    }
}
