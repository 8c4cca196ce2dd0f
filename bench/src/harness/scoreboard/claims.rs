//! Claims: what the originals of the five mechanisms were announced with, and which of Quinion's rows ask the same.
//!
//! The causes say what is known from profiles and counts, or that nothing is known.

use super::super::recorded::RecordedRow;

/// Which of two ratios is compared with the claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Baseline {
    /// With the mechanism beside without it, as the original's author did with the kernel.
    Without,
    /// Quinion beside the kernel: where the claim is one of the whole.
    Kernel,
}

/// A row of another case that shows what the kernel does.
#[derive(Clone, Copy, Debug)]
pub struct Elsewhere {
    pub experiment: &'static str,
    pub case: &'static str,
    pub way: &'static str,
    pub metric: &'static str,
    pub peer: &'static str,
}

/// A number that an original was announced with, and the row that asks the same.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub original: &'static str,
    /// In the words of its author, about.
    pub claim: &'static str,
    /// The claim as a ratio; `None` if no row is of the same thing.
    pub ratio: Option<f64>,
    pub experiment: &'static str,
    /// The prefix of the situation's name, a part of it, and its end.
    pub begins: &'static str,
    pub has: &'static str,
    pub ends: &'static str,
    pub way: &'static str,
    pub metric: &'static str,
    pub without: Option<&'static str>,
    pub kernel: Option<&'static str>,
    pub elsewhere: Option<Elsewhere>,
    pub baseline: Baseline,
    /// Why the ratio is less than what was claimed, if it is.
    pub cause: &'static str,
    /// The known cause of repetitions that lie far apart, if they do.
    pub unsteady: &'static str,
}

impl Claim {
    /// Whether the row is of the claim's situation, way and metric.
    pub fn is_of(&self, row: &RecordedRow) -> bool {
        let (situation, way) = row.situation();
        row.experiment == self.experiment
            && situation.starts_with(self.begins)
            && situation.contains(self.has)
            && situation.ends_with(self.ends)
            && way == self.way
            && row.metric == self.metric
    }
}

impl Elsewhere {
    pub fn is(&self, row: &RecordedRow) -> bool {
        let (situation, way) = row.situation();
        let is_beside = row.peer_name.as_deref() == Some(self.peer);
        row.experiment == self.experiment
            && situation.contains(self.case)
            && way == self.way
            && row.metric == self.metric
            && is_beside
    }
}

/// The ratio that a cost has if it is so many per cent lower.
const fn lower_by(percent: f64) -> f64 {
    100.0 / (100.0 - percent)
}

const INSERTION: &str = "batched insertion";
const WALK: &str = "single-walk insertion";
const READS: &str = "read batch";
const MEMORY: &str = "memory files by the batch";
const UNCACHED: &str = "uncached reads";
const GRABS: &str = "grabbed folios";

const WAITS: &str = "by a profile (4 GiB, half of it in the cache, order 0) insertion one by one is 0.3 % of the \
    processor's time, batched 0.1 %; db_bench itself is 90 %, clearing memory 6 %. Readers do not insert: the owner's \
    few threads do, and all waits of theirs for locks are 0.1 %";
const WALKS: &str = "the walks that are saved are a small part of a miss; the device and threads that sleep take \
    most of it";
const COUNTS: &str =
    "the step that is saved is as many instructions, of a read that here does more around it";
const DEVICE: &str =
    "where the device is the limit throughput is the device's, and the processor's time alone is saved";
const COPIES: &str = "30 to 50 % of an uncached stream's time is its copy, 10 to 35 % the clearing of memory that a \
    new cache gets; a copy costs the kernel as much";
const UNEVEN: &str = "not known";
const TURNS: &str =
    "32 threads take turns on two cores, and an operation takes microseconds where a turn takes milliseconds";
const SLOWEST: &str = "the one slowest interval of a run decides";
const ONE_LOOKUP: &str =
    "what is saved is a lookup and a lock a folio, which the copy of its bytes hides where folios are large";
const CLEARED: &str = "55 to 79 % of populating fresh memory is the kernel's clearing of it, which a write to tmpfs \
    does without";

const CLAIM: Claim = Claim {
    original: "",
    claim: "",
    ratio: None,
    experiment: "",
    begins: "",
    has: "",
    ends: "",
    way: "",
    metric: "",
    without: None,
    kernel: None,
    elsewhere: None,
    baseline: Baseline::Without,
    cause: "",
    unsteady: "why is not known",
};

const READSEQ: Claim = Claim {
    original: INSERTION,
    experiment: "readseq",
    begins: "short of memory",
    way: "quinion run",
    without: Some("one by one"),
    kernel: Some("kernel"),
    cause: WAITS,
    unsteady: TURNS,
    ..CLAIM
};

const STREAM: Claim = Claim {
    original: UNCACHED,
    experiment: "stream",
    way: "quinion uncached",
    without: Some("quinion plain"),
    kernel: Some("kernel buffered"),
    baseline: Baseline::Kernel,
    ..CLAIM
};

const MEMFILE: Claim = Claim {
    original: MEMORY,
    experiment: "memfile",
    way: "quinion, order 0",
    metric: "cpu",
    kernel: Some("tmpfs 4K"),
    baseline: Baseline::Kernel,
    cause: "the bytes are copied once, as by the kernel, and are most of it",
    ..CLAIM
};

pub const CLAIMS: [Claim; 24] = [
    Claim { claim: "RocksDB readseq: throughput 1.51x", ratio: Some(1.51), metric: "throughput", ..READSEQ },
    Claim { claim: "its P50 63.9 % lower", ratio: Some(lower_by(63.9)), metric: "P50", ..READSEQ },
    Claim { claim: "its P75 42.1 % lower", ratio: Some(lower_by(42.1)), metric: "P75", ..READSEQ },
    Claim { claim: "its P99 31.4 % lower", ratio: Some(lower_by(31.4)), metric: "P99", ..READSEQ },
    Claim {
        claim: "instructions per cycle 2.18x, for no thread waits at the lock: two threads at it",
        unsteady: CLAIM.unsteady,
        experiment: "insert",
        begins: "index alone, order 0, 2 threads",
        way: "batches of 32",
        metric: "time",
        without: Some("one at a time"),
        kernel: None,
        ..READSEQ
    },
    Claim {
        claim: "the same of more threads than processors, by a model of the lock",
        unsteady: CLAIM.unsteady,
        experiment: "insert",
        begins: "lock-hold model",
        way: "batches of 32",
        metric: "time (model)",
        without: Some("one at a time"),
        kernel: None,
        ..READSEQ
    },
    Claim {
        claim: "instructions of an operation (not announced)",
        begins: "stream of 8 KiB, order 0",
        way: "8 KiB read, batched, order 0",
        metric: "instructions",
        without: Some("8 KiB read, one by one, order 0"),
        kernel: None,
        ..READSEQ
    },
    Claim {
        claim: "the same, in folios as usual (not announced)",
        begins: "stream of 8 KiB, default orders",
        way: "8 KiB read, batched",
        metric: "instructions",
        without: Some("8 KiB read, one by one"),
        kernel: None,
        ..READSEQ
    },
    Claim {
        original: WALK,
        claim: "thrash of 4 KiB 7.3 % faster",
        ratio: Some(1.073),
        experiment: "thrash",
        begins: "random 4 KiB of twice",
        way: "quinion",
        metric: "rate",
        without: Some("quinion, three walks"),
        kernel: Some("kernel mmap"),
        cause: WALKS,
        ..CLAIM
    },
    Claim {
        original: WALK,
        claim: "12.5 % faster with large folios first",
        ratio: Some(1.125),
        experiment: "thrash",
        begins: "large folios",
        way: "single walk",
        metric: "time",
        without: Some("three walks"),
        cause: WALKS,
        ..CLAIM
    },
    Claim {
        original: WALK,
        claim: "ways down of an insertion: one for three",
        ratio: Some(3.0),
        experiment: "split",
        begins: "order 0 into a shadow of order 0",
        way: "single walk",
        metric: "descents",
        without: Some("three walks"),
        ..CLAIM
    },
    Claim {
        original: READS,
        claim: "instructions of a read 1.4 % fewer",
        ratio: Some(lower_by(1.4)),
        experiment: "readbatch",
        begins: "1 folio",
        way: "batch read of 1",
        metric: "instructions",
        without: Some("batch read of 1, a step more"),
        cause: COUNTS,
        ..CLAIM
    },
    Claim {
        original: READS,
        claim: "branches of a read 1.2 % fewer",
        ratio: Some(lower_by(1.2)),
        experiment: "readbatch",
        begins: "1 folio",
        way: "batch read of 1",
        metric: "branches",
        without: Some("batch read of 1, a step more"),
        cause: COUNTS,
        ..CLAIM
    },
    Claim {
        original: READS,
        claim: "the hit path beside batches of many folios (not announced)",
        experiment: "readbatch",
        begins: "64 KiB of a file, order 0",
        way: "file 64 KiB, hit path",
        metric: "instructions",
        without: Some("file 64 KiB, batch"),
        ..CLAIM
    },
    Claim {
        claim: "shmem reads of 64 KiB up to 42 % faster",
        ratio: Some(1.10),
        begins: "64 KiB, data",
        ..MEMFILE
    },
    Claim { claim: "of 1 MiB 10 % and more", ratio: Some(1.10), begins: "1 MiB, data", ..MEMFILE },
    Claim { claim: "holes 3.5 % slower", ratio: Some(0.965), begins: "64 KiB, holes", ..MEMFILE },
    Claim {
        claim: "the hit path of memory files beside batches of many folios (not announced)",
        experiment: "readbatch",
        begins: "64 KiB of a memory file, order 0",
        way: "memory file 64 KiB, hit path",
        metric: "instructions",
        without: Some("memory file 64 KiB, batch"),
        kernel: None,
        baseline: Baseline::Without,
        cause: "",
        ..MEMFILE
    },
    Claim { claim: "65 % more throughput", ratio: Some(1.65), metric: "throughput", cause: DEVICE, ..STREAM },
    Claim { claim: "half of the processor's time", ratio: Some(2.0), metric: "cpu", cause: COPIES, ..STREAM },
    Claim {
        claim: "a flat line where the kernel's falls off: at least 0.9 of the evenness of O_DIRECT",
        ratio: Some(0.9),
        metric: "evenness",
        without: None,
        kernel: Some("O_DIRECT io_uring"),
        cause: UNEVEN,
        unsteady: SLOWEST,
        ..STREAM
    },
    Claim {
        original: GRABS,
        claim: "3 GiB of guest memory populated 10.3 % faster",
        ratio: Some(1.103),
        experiment: "populate",
        begins: "grab and fill",
        way: "batched",
        metric: "cpu",
        without: Some("one by one"),
        elsewhere: Some(Elsewhere {
            experiment: "populate",
            case: " MiB",
            way: "populate, one thread",
            metric: "cpu",
            peer: "write tmpfs huge 1M",
        }),
        cause: ONE_LOOKUP,
        ..CLAIM
    },
    Claim {
        original: GRABS,
        claim: "9.5 % in Firecracker: a snapshot populated",
        ratio: Some(1.095),
        experiment: "restore",
        has: "populated warm",
        way: "batched",
        metric: "time",
        without: Some("one by one"),
        cause: ONE_LOOKUP,
        ..CLAIM
    },
    Claim {
        original: GRABS,
        claim: "then 2.3 % behind UFFDIO_COPY",
        ratio: Some(0.977),
        experiment: "populate",
        ends: " MiB",
        way: "populate, one thread",
        metric: "time",
        kernel: Some("UFFDIO_COPY anon 4K"),
        baseline: Baseline::Kernel,
        cause: CLEARED,
        ..CLAIM
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_the_ratio_that_it_comes_to() {
        assert!((lower_by(50.0) - 2.0).abs() < 1e-9 && (lower_by(63.9) - 2.77).abs() < 0.001);
    }

    #[test]
    fn each_claim_names_its_peer() {
        for claim in &CLAIMS {
            let beside = match claim.baseline {
                Baseline::Without => claim.without,
                Baseline::Kernel => claim.kernel,
            };
            assert!(beside.is_some() && !claim.original.is_empty(), "{}", claim.claim);
        }
    }
}
