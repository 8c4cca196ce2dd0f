//! Planned: a plan in the form that programs and reports need, kept from one run to the next.
//!
//! Making a plan takes longer than all else at the start of `run`, and its result is the same until the C library
//! changes. A checksum shows whether the stored plan is whole, and the object in the program compares the library's
//! build-id and the bytes that are replaced. The replacement is not checked: a process that can write to the user's
//! folder decides it, as a process that can write there decides what programs read.

use std::fmt::Write as _;
use std::hash::Hash;
use std::path::Path;

use super::plan::{Plan, library_of};
use super::plan_cache::{Identity, PLAN, PlanCache, sum};
use super::plan_for;

const FUNCTIONS: &str = "functions ";
const LEFT: &str = "left ";
const SUM: &str = "sum ";
/// Where the words end and the plan begins.
const END: &str = "\n\n";

/// A plan, and its part of a report.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Planned {
    /// In the form that the object reads.
    pub bytes: Vec<u8>,
    /// The number of names by which functions are patched.
    pub functions: u64,
    /// The functions that are not patched, and why.
    pub left: Vec<String>,
}

impl From<&Plan> for Planned {
    fn from(plan: &Plan) -> Self {
        let left = plan.left.iter().map(|left| format!("{}: {}", left.name, left.why));
        Self { bytes: plan.bytes(), functions: plan.functions.len() as u64, left: left.collect() }
    }
}

impl Planned {
    /// The plan for the C library that `linker` loads, stored or made. The error says why there is none.
    pub(super) fn of(linker: &Path) -> Result<Self, String> {
        let identify = || Identity::of_path(&library_of(linker)?);
        let remembered = identify().filter(Identity::is_settled).zip(PlanCache::of_user());
        let read =
            |(library, remembered): &(Identity, PlanCache)| Self::read(&remembered.read(PLAN, library));
        if let Some(planned) = remembered.as_ref().and_then(read) {
            return Ok(planned);
        }
        let planned = Self::from(&plan_for(linker)?);
        if let Some((library, remembered)) = remembered.filter(|(library, _)| identify() == Some(*library)) {
            // A process that cannot write there makes it anew.
            let _ = remembered.replace(PLAN, library, &planned.written());
        }
        Ok(planned)
    }

    fn written(&self) -> Vec<u8> {
        let mut words = format!("{FUNCTIONS}{}\n", self.functions);
        for left in &self.left {
            let _ = writeln!(words, "{LEFT}{left}");
        }
        let _ = write!(words, "{SUM}{}{END}", sum(self));
        [words.as_bytes(), &self.bytes].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(END.len()).position(|window| window == END.as_bytes())?;
        let mut words = std::str::from_utf8(&bytes[..end]).ok()?.lines();
        let functions = words.next()?.strip_prefix(FUNCTIONS)?.parse().ok()?;
        let mut planned = Self { bytes: bytes[end + END.len()..].to_vec(), functions, left: Vec::new() };
        for line in words {
            match (line.strip_prefix(LEFT), line.strip_prefix(SUM)) {
                (Some(left), _) => planned.left.push(left.to_owned()),
                (_, Some(said)) => return (said == sum(&planned).to_string()).then_some(planned),
                _ => return None,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_as_it_was_written_and_not_if_a_byte_is_another() {
        let left = vec!["memcpy: it is chosen at start among several".to_owned(), String::new()];
        let planned = Planned { bytes: b"QNPATCH\x01\n\nsum 7\n\n".to_vec(), functions: 3, left };
        let written = planned.written();
        assert_eq!(Planned::read(&written), Some(planned));
        for at in 0..written.len() {
            let mut changed = written.clone();
            changed[at] ^= 1;
            assert_eq!(Planned::read(&changed), None, "byte {at}");
            assert_eq!(Planned::read(&written[..at]), None, "of {at} bytes");
        }
    }
}
