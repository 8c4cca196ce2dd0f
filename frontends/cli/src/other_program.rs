//! Other program: verbs that are separate programs, and URLs, which one of these reads.
//!
//! ```text
//!   quinion serve ..          quinion-serve ..            one cache of objects for a node
//!   quinion s3 ..             quinion-s3 serve ..         an S3 endpoint over it; so is `quinion s3 serve ..`
//!   quinion cat s3://..       quinion-object cat ..       an object, for which `cat` and `stat` take URLs beside files
//! ```
//!
//! These link an HTTP client, TLS and stores, which are about 200 crates; a build of `quinion run` needs none of them.
//! A program is looked for beside this one, then in PATH.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use quinion_cli::output::{EXIT_FAILED, complain};

const SCHEMES: [&str; 9] = ["s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "http", "https"];

/// Arguments that a verb hands on, as they stand.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Arguments {
    /// Options of the verb; --help shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
    words: Vec<OsString>,
}

/// Whether it names an object of a store, and no file. A file of such a name is written ./s3://..
pub fn is_url(name: &Path) -> bool {
    let scheme = name.to_str().and_then(|name| name.split_once("://")).map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme))
}

fn found(program: &str) -> PathBuf {
    let beside = std::env::current_exe().ok().map(|ours| ours.with_file_name(program));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| program.into())
}

fn failed(program: &str, package: &str, error: &std::io::Error) -> ExitCode {
    let why = match error.kind() {
        std::io::ErrorKind::NotFound => format!(
            "`{program}` is neither beside this program nor in PATH; install it by \
             `cargo install --locked --path {package}`"
        ),
        _ => format!("cannot start `{program}`: {error}"),
    };
    complain(&why)
}

impl Arguments {
    /// Without that word, if it is the first: the program's own verb may be written, too.
    pub fn without_first(mut self, word: &str) -> Self {
        if self.words.first().is_some_and(|first| first == word) {
            self.words.remove(0);
        }
        self
    }
}

pub fn become_program(program: &str, package: &str, first: &[&str], arguments: &Arguments) -> ExitCode {
    let error = Command::new(found(program)).args(first).args(&arguments.words).exec();
    failed(program, package, &error)
}

/// The server that is asked for URLs, and how.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct AskedServer {
    /// Ask the `quinion serve` of that name for URLs; without this their stores are asked, with credentials from the
    /// environment.
    #[arg(long = "server", value_name = "NAME")]
    name: Option<OsString>,
    /// How old what that server knows of an object may be: always (it asks the store), seconds, or immutable. As the
    /// server was told for that store, if not given.
    #[arg(long, value_name = "HOW", requires = "name")]
    freshness: Option<OsString>,
}

#[derive(Clone, Copy, Debug)]
pub struct ObjectVerb<'a> {
    pub words: &'a [&'a str],
    pub server: &'a AskedServer,
    /// Memory of the cache by which it reads without a server, in bytes, if given.
    pub memory: Option<u64>,
}

impl ObjectVerb<'_> {
    /// Checks that there is a URL if a server is named.
    ///
    /// # Errors
    /// A server is named, and no URL.
    pub fn check(&self, names: &[PathBuf]) -> Result<(), String> {
        match self.server.name {
            Some(_) if !names.iter().any(|name| is_url(name)) => {
                Err("--server is for URLs such as s3://BUCKET/KEY, and files are read by this process".into())
            }
            _ => Ok(()),
        }
    }

    /// Runs it for one URL, and waits.
    ///
    /// # Errors
    /// The exit code of the program; 128 + n if signal n ended it.
    pub fn done_with(&self, url: &Path) -> Result<(), ExitCode> {
        let mut command = Command::new(found("quinion-object"));
        command.args(self.words);
        if let Some(name) = &self.server.name {
            command.arg("--server").arg(name);
            if let Some(freshness) = &self.server.freshness {
                command.arg("--freshness").arg(freshness);
            }
        } else if let Some(memory) = self.memory {
            command.arg("--memory").arg(memory.to_string());
        }
        let status = match command.arg(url).status() {
            Ok(status) => status,
            Err(error) => return Err(failed("quinion-object", "frontends/serve", &error)),
        };
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        match code.and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_FAILED) {
            0 => Ok(()),
            code => Err(ExitCode::from(code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_stores_are_told_from_files() {
        for url in ["s3://b/k", "gs://b/k", "https://h/p", "abfss://c@a/k"] {
            assert!(is_url(Path::new(url)), "{url}");
        }
        for file in ["a", "./s3://b/k", "/s3://b", "file:///a", "ftp://h/a", "s3:/b", "://"] {
            assert!(!is_url(Path::new(file)), "{file}");
        }
        let of = |server: &AskedServer, names: &[&str]| {
            let names: Vec<_> = names.iter().map(PathBuf::from).collect();
            ObjectVerb { words: &["cat"], server, memory: None }.check(&names)
        };
        let server = AskedServer { name: Some("node".into()), freshness: None };
        assert!(of(&server, &["a", "s3://b/k"]).is_ok() && of(&AskedServer::default(), &["a"]).is_ok());
        assert!(of(&server, &["a"]).unwrap_err().contains("--server"));
    }
}
