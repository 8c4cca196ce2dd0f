//! Fault: what goes wrong with a request, by a script or by chance.
//!
//! Chance follows a seed: the faults are the same in each run, though not their requests, since requests that are under
//! way side by side come in any order.

/// A fault of a GET.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The request is answered with this status; 503 is a `SlowDown`, and that and 429 may have a `Retry-After`; 400 is
    /// an `InvalidArgument`.
    Status(u16),
    /// The connection is closed after so many bytes of the body.
    Cut(usize),
    /// The connection is reset after so many bytes of the body: what is on its way may be lost.
    Reset(usize),
    /// The body has so many bytes, and `Content-Length` says that these are all.
    Short(usize),
    /// The body has so many bytes more than were asked for, and `Content-Length` counts them.
    Longer(usize),
    /// The body stops after so many bytes, and the connection stays.
    Stall(usize),
    /// The answer begins so many milliseconds later than others.
    Late(u64),
    /// The answer is of a range that begins a page away, and says so.
    OtherRange,
    /// The answer is the whole object: the range is not looked at.
    Whole,
    /// The object has its next version before the GET is answered.
    ChangedBefore,
    /// The connection is closed after so many bytes, and the object has its next version.
    ChangedAfter(usize),
    /// The object has its next version after so many bytes; the body goes on as it began.
    ChangedWithin(usize),
    /// The object has its next version, and the condition is not looked at.
    Unconditional,
}

/// How many kinds of faults there are.
pub(crate) const KINDS: usize = 13;

impl Fault {
    /// The fault's number, and its name in reports.
    pub(crate) fn kind(self) -> (usize, &'static str) {
        match self {
            Self::Status(_) => (0, "status"),
            Self::Cut(_) => (1, "cut"),
            Self::Reset(_) => (2, "reset"),
            Self::Short(_) => (3, "short"),
            Self::Longer(_) => (4, "longer"),
            Self::Stall(_) => (5, "stall"),
            Self::Late(_) => (6, "late"),
            Self::OtherRange => (7, "other range"),
            Self::Whole => (8, "whole"),
            Self::ChangedBefore => (9, "changed before"),
            Self::ChangedAfter(_) => (10, "changed after"),
            Self::ChangedWithin(_) => (11, "changed within"),
            Self::Unconditional => (12, "unconditional"),
        }
    }

    /// Whether a HEAD can meet it.
    pub(crate) fn is_without_body(self) -> bool {
        matches!(self, Self::Status(_) | Self::Late(_))
    }
}

/// Faults by chance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultPlan {
    /// Which faults come.
    pub seed: u64,
    /// Requests of a thousand that get a fault.
    pub per_mille: u32,
    /// The longest part of a body that comes before something happens to it.
    pub bytes_max: usize,
}

/// Faults as they are drawn.
#[derive(Debug)]
pub(crate) struct Drawing {
    plan: FaultPlan,
    state: u64,
}

impl Drawing {
    pub(crate) fn new(plan: FaultPlan) -> Self {
        Self { plan, state: plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) % end.max(1)
    }

    /// The fault of the next request.
    pub(crate) fn next(&mut self) -> Option<Fault> {
        if self.below(1000) >= self.plan.per_mille.into() {
            return None;
        }
        let bytes = self.below(self.plan.bytes_max as u64 + 1) as usize;
        Some(match self.below(32) {
            0..3 => Fault::Status(503),
            3..5 => Fault::Status(429),
            5 => Fault::Status(500),
            6..9 => Fault::Cut(bytes),
            9..12 => Fault::Reset(bytes),
            12..15 => Fault::Short(bytes),
            15..17 => Fault::Longer(1 + bytes),
            17 => Fault::Stall(bytes),
            18..20 => Fault::Late(1 + self.below(30)),
            20..22 => Fault::OtherRange,
            22 => Fault::Whole,
            23..25 => Fault::ChangedBefore,
            25..27 => Fault::ChangedAfter(bytes),
            27..30 => Fault::ChangedWithin(bytes),
            _ => Fault::Unconditional,
        })
    }
}
