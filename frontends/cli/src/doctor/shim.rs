//! Shim: a script of a shell that becomes another program, and which one that is.
//!
//! ```text
//!   #!/bin/sh
//!   PYTHONPATH=/opt/lib
//!   exec /usr/bin/python3 -m tool "$@"      -->  /usr/bin/python3
//! ```
//!
//! That program reads files, and not the shell. The script is not run: its last command that begins with `exec` is
//! read, and used only if it names a program in plain letters. A name that the script finds out while it runs (`exec
//! "$program"`) is not known here, and the shell is described instead, with a hint.
//!
//! Not an invariant: that the script gets there. It may end, or become another program, before.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

/// Shells whose `exec` means what is told above.
const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "busybox"];
/// A longer script is a program of its own.
const SCRIPT_BYTES_MAX: u64 = 64 << 10;

/// The program that a shell's script becomes at its end.
#[derive(PartialEq, Eq, Debug)]
pub enum ShimTarget {
    Program(OsString),
    /// A program that it finds out while it runs.
    Unknown,
}

/// The program that the first of a [chain](quinion_run::chain_of) becomes; `None` if none.
pub fn target_of(chain: &[PathBuf]) -> Option<ShimTarget> {
    let (script, shell) = (chain.first()?, chain.last()?.file_name()?.to_str()?);
    if chain.len() < 2 || !SHELLS.contains(&shell) {
        return None;
    }
    let mut text = String::new();
    File::open(script).ok()?.take(SCRIPT_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.lines().rev().find_map(|line| exec_of(line.trim()))
}

/// The program of an `exec` in that line.
fn exec_of(line: &str) -> Option<ShimTarget> {
    let mut words = line.strip_prefix("exec ")?.split_ascii_whitespace();
    let mut word = words.next()?;
    while word.starts_with('-') {
        // `-a` gives the program another name.
        word = if word == "-a" { words.nth(1)? } else { words.next()? };
    }
    if word.starts_with(['<', '>', '&', '|', ';']) || word.starts_with(|c: char| c.is_ascii_digit()) {
        return None; // it moves descriptors, and becomes nothing
    }
    let word = word.trim_matches(['"', '\'']);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    let is_named = !word.is_empty() && word.chars().all(is_plain);
    Some(if is_named { ShimTarget::Program(word.into()) } else { ShimTarget::Unknown })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_becomes_the_program_of_its_last_exec() {
        let program = |name: &str| Some(ShimTarget::Program(name.into()));
        assert_eq!(exec_of("exec /usr/bin/python3 -m tool \"$@\""), program("/usr/bin/python3"));
        assert_eq!(exec_of("exec -a name -c /bin/cat x"), program("/bin/cat"));
        assert_eq!(exec_of("exec 'cat' x"), program("cat"));
        assert_eq!(exec_of("exec \"$program\" \"$@\""), Some(ShimTarget::Unknown));
        assert_eq!(exec_of("exec $(which cat)"), Some(ShimTarget::Unknown));
        for line in ["exec 2>/dev/null", "exec >log", "exec <&3", "execute it", "# exec cat", "exec "] {
            assert_eq!(exec_of(line), None, "{line}");
        }
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "#!/bin/sh\nif false; then\n  exec true\nfi\nexec cat \"$@\"\n# end\n")
            .unwrap();
        let chain = |last: &str| [script.clone(), PathBuf::from(last)];
        assert_eq!(target_of(&chain("/bin/sh")), program("cat"));
        assert_eq!(target_of(&chain("/usr/bin/python3")), None, "it is no shell's");
        assert_eq!(target_of(&chain("/bin/sh")[..1]), None, "it is no script");
    }
}
