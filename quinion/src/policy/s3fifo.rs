//! S3-FIFO with shadows for ghosts: ours, and the default.

use super::{Arrival, Came, Class, Policy, READS_MAX, Verdict, Weights};
use crate::workingset::Refault;

/// Ours.
#[derive(Clone, Copy, Debug, Default)]
pub struct S3Fifo(());

impl S3Fifo {
    /// Nothing has happened yet.
    pub fn new() -> Self {
        Self(())
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "S3-FIFO"
    }
    fn admit(&mut self, arrival: Arrival, _held: &Weights) -> Class {
        match (arrival.came, arrival.refault) {
            (Came::Uncached, _) => Class::Uncached,
            (_, Some(Refault::Recent)) => Class::Main,
            (Came::Stream, _) => Class::Stream,
            _ => Class::Probation,
        }
    }
    fn reach(&self, held: &Weights) -> u64 {
        held.total()
    }
    fn next(&mut self, held: &Weights) -> Option<Class> {
        let (probation, all) = (held.of(Class::Probation), held.of(Class::Probation) + held.of(Class::Main));
        match held.passing() {
            Some(class) => Some(class),
            None if all == 0 => None,
            None if probation * 10 >= all || !held.holds(Class::Main) => Some(Class::Probation),
            None => Some(Class::Main),
        }
    }
    fn judge(&mut self, class: Class, reads: u8, _pages: u32, _held: &Weights) -> Verdict {
        match class {
            Class::Uncached => Verdict::Evict { remember: false },
            Class::Main if reads > 0 => Verdict::Keep { class, reads: reads.min(READS_MAX) - 1 },
            Class::Stream if reads > 0 => Verdict::Keep { class: Class::Main, reads: 0 },
            Class::Probation if reads > 1 => Verdict::Keep { class: Class::Main, reads: 0 },
            _ => Verdict::Evict { remember: class != Class::Stream },
        }
    }
}
