//! Manual: the manual pages and the shells' completions, made from the command line's own definition.
//!
//! ```text
//!   quinion man [VERB]             one page, for `man -l -`
//!   quinion man --out DIR          a page for the command, and one for each verb
//!   quinion completions SHELL      what the shell wants to read
//! ```
//!
//! Both say what `--help` says, so they cannot say anything else. Packages are made with them
//! (`cargo xtask package`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;

use crate::{CommandLine, complain, print};

/// Print a manual page, or write all of them.
#[derive(clap::Args, Debug)]
pub struct ManArguments {
    /// Of which verb; of the command as a whole if not given.
    #[arg(value_name = "VERB", conflicts_with = "out")]
    verb: Option<String>,
    /// Write all pages into this folder, which is made if it is not there.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Print what a shell needs to complete this command's words.
#[derive(clap::Args, Debug)]
pub struct CompletionsArguments {
    /// For which shell.
    #[arg(value_enum, value_name = "SHELL")]
    shell: clap_complete::Shell,
}

/// Prints or writes manual pages.
pub fn man(arguments: ManArguments) -> ExitCode {
    let done = match &arguments.out {
        Some(folder) => write_pages(folder).map_err(|wrong| complain(&wrong)),
        None => {
            page_of(arguments.verb.as_deref()).map_err(|wrong| complain(&wrong)).and_then(|page| print(&page))
        }
    };
    done.map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

/// Prints completions.
pub fn completions(arguments: CompletionsArguments) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut CommandLine::command(), "quinion", &mut script);
    print(&String::from_utf8_lossy(&script)).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

/// The command with every verb named as its page is: quinion-run.
fn command() -> clap::Command {
    let mut command = CommandLine::command().disable_help_subcommand(true);
    command.build();
    command
}

/// The verbs that are no secret.
fn verbs(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command.get_subcommands().filter(|verb| !verb.is_hide_set())
}

fn page_of(verb: Option<&str>) -> Result<String, String> {
    let command = command();
    let wanted = match verb {
        None => &command,
        Some(verb) => verbs(&command).find(|known| known.get_name() == verb).ok_or_else(|| {
            let known: Vec<&str> = verbs(&command).map(clap::Command::get_name).collect();
            format!("there is no verb `{verb}`; there are {}", known.join(", "))
        })?,
    };
    page(wanted).map_err(|error| error.to_string())
}

/// The page of a command or verb.
fn page(command: &clap::Command) -> io::Result<String> {
    let mut page = Vec::new();
    let source = concat!("quinion ", env!("CARGO_PKG_VERSION"));
    clap_mangen::Man::new(command.clone()).source(source).render(&mut page)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// "quinion-run" of the verb "run".
fn page_name(command: &clap::Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

fn write_pages(folder: &Path) -> Result<(), String> {
    let wrong = |path: &Path, error: io::Error| {
        format!("{}: {error}; name a folder that can be written", path.display())
    };
    fs::create_dir_all(folder).map_err(|error| wrong(folder, error))?;
    let command = command();
    std::iter::once(&command).chain(verbs(&command)).try_for_each(|of| {
        let path = folder.join(format!("{}.1", page_name(of)));
        page(of).and_then(|page| fs::write(&path, page)).map_err(|error| wrong(&path, error))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_a_page_that_names_its_options_and_secrets_have_none() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(folder.path()).unwrap();
        let names = || {
            fs::read_dir(folder.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        };
        for name in ["quinion.1", "quinion-run.1", "quinion-bench.1", "quinion-completions.1"] {
            assert!(names().any(|known| known == name), "{:?}", names().collect::<Vec<_>>());
        }
        assert!(names().all(|name| !name.contains("mend")));
        let page = fs::read_to_string(folder.path().join("quinion-run.1")).unwrap();
        assert!(page.contains(".TH quinion-run 1"), "{page}");
        assert!(page.contains("quinion run") && page.contains(env!("CARGO_PKG_VERSION")), "{page}");
        assert!(page.contains("\\-\\-memory") && page.contains("\\-\\-live"), "{page}");
    }

    #[test]
    fn a_page_is_printed_by_the_verbs_name() {
        assert_eq!(page_of(Some("run")).map(|page| page.contains("quinion-run")), Ok(true));
        assert!(page_of(None).is_ok_and(|page| page.contains("quinion")));
        assert!(page_of(Some("dog")).is_err_and(|wrong| wrong.contains("run")));
    }
}
