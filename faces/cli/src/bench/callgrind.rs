//! Callgrind: instructions and branches of a snippet, counted by running it under valgrind.
//!
//! ```text
//!   this process       valgrind --tool=callgrind --toggle-collect=counted_region   quinion bench --inside NAME
//!       |                                                                              |
//!       '-- reads the totals <------- a file without a name <--------------------------'
//! ```
//!
//! Branches are the conditional and the indirect ones together. The numbers are
//! those of one operation, without the bytes of string instructions, see
//! [`Snippet::moved`]; the loop around it, three instructions or so, counts too.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};

use super::counted::{Snippet, counted_region};
use super::harness::Unmeasured;

/// What one operation of a snippet takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Counted {
    /// Instructions, as callgrind counts them.
    pub instructions: f64,
    /// Conditional and indirect branches among them.
    pub branches: f64,
}

/// Runs the snippet `name` in this process, which callgrind watches.
pub fn inside(name: &str) -> Result<(), Unmeasured> {
    let snippet = Snippet::of(name);
    let snippet = snippet.ok_or_else(|| Unmeasured::Failed(format!("there is no snippet `{name}`")))?;
    let mut work = snippet.prepare()?;
    counted_region(&mut work);
    Ok(())
}

/// Counts what an operation of `snippet` takes, by this program once more.
pub fn count(snippet: &Snippet) -> Result<Counted, Unmeasured> {
    let totals =
        File::from(memfd_create("quinion-callgrind", MemfdFlags::empty()).map_err(std::io::Error::from)?);
    let path = format!("/proc/{}/fd/{}", std::process::id(), totals.as_raw_fd());
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--cache-sim=no", "--branch-sim=yes", "--collect-atstart=no"])
        .arg("--toggle-collect=*counted_region*")
        .arg(format!("--callgrind-out-file={path}"))
        .arg(std::env::current_exe()?)
        .args(["bench", "--inside", snippet.name])
        .stdin(Stdio::null());
    let output = command.output().map_err(|error| {
        Unmeasured::Missing(format!("valgrind cannot be run: {error}; install it, or call scripts/setup"))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Unmeasured::Failed(format!(
            "valgrind ended with {}: {}",
            output.status,
            said.trim_end()
        )));
    }
    let counted = totals_of(&fs::read_to_string(path)?);
    let [instructions, branches] = counted.ok_or_else(|| {
        Unmeasured::Failed(
            "callgrind counted nothing; does it know the function `counted_region`?".to_owned(),
        )
    })?;
    let each = |total: u64| total as f64 / snippet.times as f64 - snippet.moved as f64;
    Ok(Counted { instructions: each(instructions), branches: each(branches) })
}

/// Instructions and branches of what callgrind wrote; `None` if it counted none.
fn totals_of(text: &str) -> Option<[u64; 2]> {
    let after = |key: &str| text.lines().rev().find_map(|line| line.strip_prefix(key));
    let events: Vec<&str> = after("events:")?.split_whitespace().collect();
    let totals: Vec<u64> =
        after("totals:")?.split_whitespace().map_while(|total| total.parse().ok()).collect();
    // An event at the end of the line that was never seen is left out of the totals.
    let of =
        |name: &str| Some(totals.get(events.iter().position(|event| *event == name)?).copied().unwrap_or(0));
    let instructions = of("Ir")?;
    (instructions > 0).then_some([instructions, of("Bc")? + of("Bi")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_found_by_their_events() {
        let text = "version: 1\nevents: Ir Bc Bcm Bi Bim\nfn=(1)\n5 100 10 1 2 1\ntotals: 100 10 1 2 1\n";
        assert_eq!(totals_of(text), Some([100, 12]));
        assert_eq!(totals_of("events: Ir Bc Bcm Bi Bim\ntotals: 100 10\n"), Some([100, 10]));
        assert_eq!(totals_of("events: Ir Bc Bcm Bi Bim\ntotals: 0\n"), None);
        assert_eq!(totals_of(""), None);
    }
}
