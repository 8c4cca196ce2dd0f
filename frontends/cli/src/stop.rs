//! `quinion stop`: the end of caches that `run --keep` left behind.
//!
//! ```text
//!   stop            the cache `default`
//!   stop A B        these
//!   stop --all      all of this user
//! ```
//!
//! It returns when they have ended and their memory is free. Programs that use one go on by the kernel. One that does
//! not answer is killed: its data is in files, too. A missing cache is an error only if it was named.

use std::fmt::Write as _;
use std::process::ExitCode;

use quinion_run::keep::{self, Name, StopOutcome};

use crate::{EXIT_FAILED, complain, complain_only, print};

/// End caches that `run --keep` left behind.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The caches' names; `default` if none is given.
    #[arg(value_name = "NAME")]
    names: Vec<Name>,
    /// End all caches of this user.
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

/// Stops them; what went wrong with one keeps none of the others from ending.
pub fn main(arguments: &Arguments) -> ExitCode {
    let names = match names_of(arguments) {
        Ok(names) => names,
        Err(error) => return complain(&error),
    };
    let (mut text, mut failed) = (String::new(), false);
    for name in names {
        match keep::stop(&name) {
            Ok(StopOutcome::Ended) => {
                writeln!(text, "the cache `{name}` has ended").expect("a string takes it")
            }
            Ok(StopOutcome::Killed) => {
                writeln!(text, "the cache `{name}` did not answer and was killed; nothing is lost")
                    .expect("a string takes it")
            }
            Ok(StopOutcome::NotThere) if arguments.all => {}
            Ok(StopOutcome::NotThere) => {
                complain_only(&format!(
                    "there is no cache `{name}`; `quinion keeps` shows those that are there"
                ));
                failed = true;
            }
            Err(error) => {
                complain_only(&format!(
                    "cannot stop the cache `{name}`: {error}; `quinion keeps` shows its process, which `kill -9` ends"
                ));
                failed = true;
            }
        }
    }
    match print(&text) {
        Err(code) => code,
        Ok(()) if failed => ExitCode::from(EXIT_FAILED),
        Ok(()) => ExitCode::SUCCESS,
    }
}

fn names_of(arguments: &Arguments) -> std::io::Result<Vec<Name>> {
    match (arguments.all, &arguments.names[..]) {
        (true, _) => Ok(keep::list()?.into_iter().map(|seen| seen.name).collect()),
        (false, []) => Ok(vec![Name::default()]),
        (false, names) => Ok(names.to_vec()),
    }
}
