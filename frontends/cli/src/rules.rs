//! Rules: the options that say which files a run serves, and by what.
//!
//! A kept cache has the rules that it was started with. A run may rely on them, so a run with other rules does not join
//! it: the words of the options are compared.

use std::path::PathBuf;

/// Which files are served, and by what.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug, Default)]
pub struct Arguments {
    /// How changes by other processes are noticed: by a read lease of the kernel's (leases), without which a file is
    /// left to the kernel; or, where there is none, by its times and size, checked before each read (times). By times a
    /// program may be shown old bytes, or some old and some new: of a file that one `write` has been changing for
    /// longer than 50 ms, during that and until the file is changed again; and of one that is stored to through a
    /// shared mapping, at any time until then. Do not use it for databases that others write.
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    coherence: Coherence,
    /// No file below this folder ever changes: they are served without a lease, and their times are not looked at. If
    /// one is changed all the same, programs may read it as it was. May be given more than once.
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    immutable: Vec<PathBuf>,
    /// Files of which file systems are served: those of this machine on which leases work, such as ext4, XFS, Btrfs and
    /// tmpfs (local), or of others too, such as NFS, FUSE and overlayfs (all). The others need --coherence times or
    /// --immutable; one that hangs may hold up reads of other files.
    #[arg(long, value_enum, value_name = "WHICH", default_value_t)]
    file_systems: FileSystems,
}

/// How changes by other processes are noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum Coherence {
    /// Take a read lease; a file without one is left to the kernel.
    #[default]
    Leases,
    /// Take a read lease, or without one check the file's times and size before each read.
    Times,
}

/// Which file systems are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
enum FileSystems {
    /// File systems on which a lease keeps other processes from changing a file.
    #[default]
    Local,
    /// All that have files with content.
    All,
}

impl Arguments {
    /// Makes the folders' paths absolute, and resolves their links.
    ///
    /// # Errors
    /// A folder is not there, or its name is not UTF-8.
    pub fn settled(self) -> Result<Self, String> {
        let settle = |folder: PathBuf| {
            let found = folder.canonicalize();
            let found = found.map_err(|error| {
                format!("cannot use --immutable {}: {error}; name a folder that is there", folder.display())
            })?;
            match found.to_str() {
                Some(_) => Ok(found),
                None => Err(format!(
                    "cannot use --immutable {}: its name is not UTF-8; rename it",
                    found.display()
                )),
            }
        };
        let immutable = self.immutable.into_iter().map(settle).collect::<Result<_, _>>()?;
        Ok(Self { immutable, ..self })
    }

    /// As options, without defaults: the arguments of a process that stays.
    pub fn words(&self) -> Vec<String> {
        let coherence = (self.coherence == Coherence::Times).then(|| "--coherence=times".to_owned());
        let file_systems = (self.file_systems == FileSystems::All).then(|| "--file-systems=all".to_owned());
        let immutable = self.immutable.iter().map(|folder| format!("--immutable={}", folder.display()));
        coherence.into_iter().chain(file_systems).chain(immutable).collect()
    }

    pub fn into_rules(self) -> quinion_owner::ServeRules {
        quinion_owner::ServeRules {
            coherence: match self.coherence {
                Coherence::Leases => quinion_owner::WithoutLease::LeaveToKernel,
                Coherence::Times => quinion_owner::WithoutLease::CheckTimes,
            },
            immutable: self.immutable,
            any_file_system: self.file_systems == FileSystems::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        rules: Arguments,
    }

    #[test]
    fn rules_handed_to_a_started_process_are_the_same() {
        let all =
            ["x", "--coherence", "times", "--immutable", "/", "--immutable=/proc", "--file-systems", "all"];
        let rules = Line::parse_from(all).rules.settled().unwrap();
        let again = Line::parse_from(["x".to_owned()].into_iter().chain(rules.words())).rules;
        assert_eq!(again, rules);
        assert_eq!(rules.words().len(), 4);
        assert_eq!(Line::parse_from(["x"]).rules.words(), Vec::<String>::new(), "the default needs no words");
        assert!(Line::parse_from(["x", "--immutable", "/no/such/folder"]).rules.settled().is_err());
    }
}
