//! Manual: the manual pages and the shells' completions, made from the command line's own definition.
//!
//! ```text
//!   quinion man [VERB]             one page, for `man -l -`
//!   quinion man --out DIR          a page for the command, and one for each verb
//!   quinion completions SHELL      what the shell wants to read
//! ```
//!
//! Both are made of `--help`'s text. `clap_complete` has no kind of value that is a file or a URL; so for `cat` and
//! `stat`, which take both, the scripts of Bash, Zsh and Fish get a part that offers the schemes of stores as well. The
//! page of `run` has more sections, on what is no option. Hidden verbs are in neither. Packages are made with them
//! (`cargo xtask package`).

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{CommandLine, complain, print};

/// Print a manual page in troff, or write all of them. `quinion man run | man -l -` shows one.
#[derive(clap::Args, Debug)]
pub struct ManArguments {
    /// The verb to print the page of; if not given, the page of the command as a whole.
    #[arg(value_name = "VERB", conflicts_with = "out")]
    verb: Option<String>,
    /// Write all pages into this folder, which is made if it is not there.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    out: Option<PathBuf>,
}

/// Print a completion script for a shell.
#[derive(clap::Args, Debug)]
pub struct CompletionsArguments {
    /// For which shell.
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

pub fn man(arguments: ManArguments) -> ExitCode {
    let done = match &arguments.out {
        Some(folder) => write_pages(folder).map_err(|wrong| complain(&wrong)),
        None => {
            page_of(arguments.verb.as_deref()).map_err(|wrong| complain(&wrong)).and_then(|page| print(&page))
        }
    };
    done.map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

pub fn completions(arguments: CompletionsArguments) -> ExitCode {
    print(&script_for(arguments.shell)).map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

fn script_for(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut without_secrets(), "quinion", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => script + &BASH_URLS.replace("SCHEMES", SCHEMES),
        Shell::Fish => script + &FISH_URLS.replace("SCHEMES", SCHEMES),
        Shell::Zsh => with_urls_in_zsh(&script),
        _ => script,
    }
}

/// Adds URLs to the zsh script, for the argument of `cat` and `stat`; other verbs take files alone.
fn with_urls_in_zsh(script: &str) -> String {
    let line_with_urls = |line: &str| match line.starts_with("'*::files -- ") {
        true => line.replace(":_files'", ":_quinion_files_or_urls'"),
        false => line.to_owned(),
    };
    let lines: Vec<_> = script.split('\n').map(line_with_urls).collect();
    // The script's first line names its kind, and stays the first.
    format!("{}\n\n{}{}", lines[0], ZSH_URLS.replace("SCHEMES", SCHEMES), lines[1..].join("\n"))
}

const SCHEMES: &str = "s3:// gs:// az:// http:// https://";

/// A word that begins like a scheme may be one, or a file. Bash cuts words at colons, so nothing is offered behind one.
const BASH_URLS: &str = r#"
_quinion_or_url() {
    _quinion "$@"
    local word="${COMP_WORDS[COMP_CWORD]}" IFS=$'\n' schemes
    case "${COMP_WORDS[1]}" in cat | stat) ;; *) return 0 ;; esac
    case "${COMP_WORDS[COMP_CWORD - 1]}" in --memory | --server | --freshness | =) return 0 ;; esac
    case "${word}" in "" | -* | */*) return 0 ;; esac
    schemes=($(IFS=' '; compgen -W "SCHEMES" -- "${word}"))
    [[ ${#schemes[@]} -gt 0 ]] || return 0
    COMPREPLY=("${schemes[@]}" $(compgen -f -- "${word}"))
    compopt -o nospace 2>/dev/null
    return 0
}
complete -F _quinion_or_url -o nosort -o bashdefault -o default quinion 2>/dev/null ||
    complete -F _quinion_or_url -o bashdefault -o default quinion
"#;

const FISH_URLS: &str = "\
complete -c quinion -n '__fish_quinion_using_subcommand cat; or __fish_quinion_using_subcommand stat' \
-a 'SCHEMES' -d 'An object of a store'
";

const ZSH_URLS: &str = "\
_quinion_files_or_urls() {
    _alternative 'urls:object of a store:compadd -S \"\" SCHEMES' 'files:file:_files'
}

";

/// The command without the hidden verbs, which the generator of completions would offer.
fn without_secrets() -> clap::Command {
    let command = CommandLine::command();
    let plain = clap::Command::new("quinion").version(env!("CARGO_PKG_VERSION"));
    plain.about(command.get_about().cloned().unwrap_or_default()).subcommands(verbs(&command).cloned())
}

/// The command with every verb named as its page is: quinion-run.
fn command() -> clap::Command {
    let mut command = CommandLine::command().disable_help_subcommand(true);
    command.build();
    command
}

fn verbs(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command.get_subcommands().filter(|verb| !verb.is_hide_set())
}

fn page_of(verb: Option<&str>) -> Result<String, String> {
    let command = command();
    let wanted = match verb {
        None => &command,
        Some(verb) => verbs(&command).find(|known| known.get_name() == verb).ok_or_else(|| {
            let known: Vec<&str> = verbs(&command).map(clap::Command::get_name).collect();
            format!(
                "cannot show the manual page of `{verb}`: there is no such command; there are {}",
                known.join(", ")
            )
        })?,
    };
    page(wanted).map_err(|error| error.to_string())
}

fn page(command: &clap::Command) -> io::Result<String> {
    let mut page = Vec::new();
    let source = concat!("quinion ", env!("CARGO_PKG_VERSION"));
    // The text behind the options is in lines that stay as they are.
    let behind = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    let command_alone = command.clone().after_help(None::<&str>).after_long_help(None::<&str>);
    clap_mangen::Man::new(command_alone).source(source).render(&mut page)?;
    let mut page = String::from_utf8_lossy(&page).into_owned();
    if command.get_name() == "run" {
        RUN_SECTIONS.iter().for_each(|(title, lines)| add_section(&mut page, title, lines));
    }
    if let Some(lines) = behind {
        add_section(&mut page, "NOTES", &lines);
    }
    Ok(page)
}

const RUN_SECTIONS: [(&str, &str); 4] = [
    (
        "EXIT STATUS",
        "\
That of the program. If a signal ended it, that signal ends quinion, too (a shell says 128 + its number).
1    the cache could not be made, or the report could not be written, which is seen before the program
     is started; a report that cannot be written afterwards is said, and changes no status
2    the command line was not understood
126  the program, or what runs it, cannot be run
127  there is no such program",
    ),
    (
        "ENVIRONMENT",
        "\
PATH             where the program is looked for
QUINION_IO       `threads` reads without io_uring, `ring` with it where the system allows it
XDG_RUNTIME_DIR, XDG_CACHE_HOME, HOME
                 the folder for the preload object and for kept caches; see FILES
The program gets all of the environment. LD_PRELOAD and ASAN_OPTIONS are extended (what is in them stays), and
QUINION_VIEW, QUINION_FILTERS and QUINION_RUN are set; --intercept off sets none.",
    ),
    (
        "FILES",
        "\
$XDG_RUNTIME_DIR/quinion, $XDG_CACHE_HOME/quinion or $HOME/.cache/quinion, /var/cache/quinion (root),
/tmp/quinion-UID: the first that is yours, that no other user can enter or replace, that is not mounted
noexec, and whose path is short and has no blanks or colons
     libquinion-*.so          what programs load; they look for it for as long as they run
     view-*.socket            where they find their cache
     NAME.lock, NAME.socket   a cache that stays (--keep)
     plan-*, objects-*        what runs found out about the files of programs; may be removed at any time",
    ),
    (
        "EXAMPLES",
        "\
quinion run -- grep -c the FILE
quinion run --memory 512M --attach at-once -- ./prog --its-own-option
quinion run --report json --report-file r.json -- PROGRAM
quinion run --report json --report-file - -- PROGRAM
quinion run --keep -- PROGRAM
quinion doctor PROGRAM                 what run would serve of it",
    ),
];

fn add_section(page: &mut String, title: &str, lines: &str) {
    write!(page, ".SH \"{title}\"\n.nf\n").expect("a string takes it");
    for line in lines.lines() {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // Without the guard roff would take it for a request.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        writeln!(page, "{guard}{line}").expect("a string takes it");
    }
    page.push_str(".fi\n");
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
        for name in
            ["quinion.1", "quinion-run.1", "quinion-restore.1", "quinion-pack.1", "quinion-completions.1"]
        {
            assert!(names().any(|known| known == name), "{:?}", names().collect::<Vec<_>>());
        }
        assert!(names().all(|name| !name.contains("repair")));
        let page = fs::read_to_string(folder.path().join("quinion-run.1")).unwrap();
        assert!(page.contains(".TH quinion-run 1"), "{page}");
        assert!(page.contains("quinion run") && page.contains(env!("CARGO_PKG_VERSION")), "{page}");
        assert!(page.contains("\\-\\-memory") && page.contains("\\-\\-live"), "{page}");
    }

    #[test]
    fn lists_stay_lists_in_the_manual_page_of_run() {
        let page = page_of(Some("run")).unwrap();
        for title in ["EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES", "NOTES"] {
            assert!(page.contains(&format!(".SH \"{title}\"\n.nf\n")), "{title}: {page}");
        }
        assert!(!page.contains("EXTRA"), "{page}");
        assert!(page.contains("\n127  there is no such program\n.fi\n"), "{page}");
        let mut page = String::new();
        add_section(&mut page, "A", ".b \\c -d");
        assert_eq!(page, ".SH \"A\"\n.nf\n\\&.b \\ec \\-d\n.fi\n");
    }

    #[test]
    fn completions_offer_no_secrets_and_know_what_a_word_is() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script_for(shell);
            assert!(script.contains("doctor") && script.contains("report-file"), "{script}");
            assert!(!script.contains("keep-owner") && !script.contains("repair-terminal"), "{script}");
        }
        let zsh = script_for(Shell::Zsh);
        assert!(zsh.contains("_cmdambivalent") && zsh.contains("_files -/"), "{zsh}");
    }

    /// Bash's completions of the last of some words.
    fn completed_by_bash(words: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("s3-notes"), "").unwrap();
        let script = folder.path().join("script");
        let ask = "COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1))\n\
                   _quinion_or_url quinion \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"\n\
                   printf '%s\\n' \"${COMPREPLY[@]}\"";
        fs::write(&script, format!("{}\n{ask}\n", script_for(Shell::Bash))).unwrap();
        let mut bash = std::process::Command::new("bash");
        let done = bash.arg(&script).args(words).current_dir(folder.path()).output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
        String::from_utf8(done.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn schemes_of_stores_are_completed_where_a_url_may_stand() {
        for verb in ["cat", "stat"] {
            assert_eq!(completed_by_bash(&["quinion", verb, "s3"]), ["s3://", "s3-notes"]);
            assert_eq!(completed_by_bash(&["quinion", verb, "a", "h"]), ["http://", "https://"]);
            assert_eq!(completed_by_bash(&["quinion", verb, "--server", "s3"]), ["s3-notes"]);
            let scheme = "s3://".to_owned();
            assert!(!completed_by_bash(&["quinion", verb, "--server", "=", "s3"]).contains(&scheme));
            assert!(completed_by_bash(&["quinion", verb, "--se"]).contains(&"--server".to_owned()));
        }
        assert!(!completed_by_bash(&["quinion", "run", "s3"]).contains(&"s3://".to_owned()));
        for scheme in SCHEMES.split(' ') {
            assert!(crate::other_program::is_url(Path::new(scheme)), "{scheme}");
        }
        let (zsh, fish) = (script_for(Shell::Zsh), script_for(Shell::Fish));
        assert_eq!(zsh.matches(":_quinion_files_or_urls' \\").count(), 2, "of cat and stat: {zsh}");
        assert!(
            zsh.contains("_quinion_files_or_urls() {") && zsh.contains("compadd -S \"\" s3:// gs://"),
            "{zsh}"
        );
        assert!(zsh.starts_with("#compdef quinion\n"), "{zsh}");
        assert!(fish.contains("-a 's3:// gs:// az:// http:// https://'"), "{fish}");
    }

    #[test]
    fn a_page_is_printed_by_the_verbs_name() {
        assert_eq!(page_of(Some("run")).map(|page| page.contains("quinion-run")), Ok(true));
        assert!(page_of(None).is_ok_and(|page| page.contains("quinion")));
        assert!(page_of(Some("dog")).is_err_and(|wrong| wrong.contains("run")));
    }
}
