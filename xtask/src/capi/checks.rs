//! Checks of the installed library by the step `capi`, as its users have it: by pkg-config, cc, c++, Go and Python.
//!
//! ```text
//!   symbols     those of quinion.map, each with its version, and no other
//!   calls.c     every function, under AddressSanitizer and UndefinedBehaviorSanitizer, then under valgrind
//!   differential.c    a file through the cache and its twin, under the sanitizers
//!   examples    the four languages print the same
//!   hits.c      a hit takes few instructions more than in Rust, as callgrind counts them
//!   pages       groff does not complain
//! ```

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{SYSTEM_LIBRARIES, package, printed, write};
use crate::step::{Failure, execute};
use crate::tools::{cargo, is_installed, target_folder};

/// Instructions that a hit may take more than in Rust, above the 88 that it takes: 10 nanoseconds are what it may cost.
const MORE_INSTRUCTIONS_MAX: i64 = 95;
const SEEDS: u32 = 6;
const OPERATIONS: u32 = 3000;
/// The output of each example for a file of one page.
const EXPECTED: &str = "4096 bytes, 0 hits\n4096 bytes, 1 hits\n";

struct Installed<'a> {
    prefix: &'a Path,
    folder: PathBuf,
}

pub fn all(prefix: &Path) -> Result<(), Failure> {
    let folder = target_folder().join("capi/tests");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|error| Failure::of(&folder, &error))?;
    }
    std::fs::create_dir_all(&folder).map_err(|error| Failure::of(&folder, &error))?;
    let installed = Installed { prefix, folder };
    execute(&mut cargo("build --release --locked -p quinion-capi --examples"))?;
    installed.symbols()?;
    installed.calls()?;
    installed.differential()?;
    installed.examples()?;
    installed.hits()?;
    installed.pages()
}

/// A server that ends with this value.
struct Server {
    child: Child,
    name: String,
}

impl Server {
    fn start() -> Result<Self, Failure> {
        let name = format!("capi-test-{}", std::process::id());
        let program = target_folder().join("release/examples/server");
        let mut command = Command::new(program);
        command.arg(&name).stdin(Stdio::piped()).stdout(Stdio::piped());
        let failed = |error| Failure::new(format!("the server for the tests cannot be started: {error}"));
        let mut child = command.spawn().map_err(failed)?;
        let mut line = String::new();
        let output = child.stdout.take().expect("it is piped");
        BufReader::new(output).read_line(&mut line).map_err(failed)?;
        let server = Self { child, name };
        if line == "ready\n" {
            Ok(server)
        } else {
            Err(Failure::new("the server for the tests is not ready"))
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Linked {
    Shared,
    Sanitized,
}

impl Installed<'_> {
    fn lib(&self) -> PathBuf {
        self.prefix.join("lib")
    }

    /// The output of pkg-config.
    fn pkg_config(&self, question: &str) -> Result<Vec<String>, Failure> {
        let mut command = self.command("pkg-config");
        let said = printed(command.args([question, "quinion"]))?;
        Ok(said.split_whitespace().map(str::to_owned).collect())
    }

    /// A command that finds the library, when it is built and when it runs.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("PKG_CONFIG_PATH", self.lib().join("pkgconfig")).env("LD_LIBRARY_PATH", self.lib());
        command.current_dir(&self.folder);
        command
    }

    fn compile(&self, source: &Path, how: Linked) -> Result<PathBuf, Failure> {
        let is_cpp = source.extension().is_some_and(|extension| extension == "cpp");
        let (compiler, standard) = if is_cpp { ("c++", "-std=c++17") } else { ("cc", "-std=gnu11") };
        let suffix = if how == Linked::Shared { "shared" } else { "sanitized" };
        let name = source.file_name().expect("a file has a name").to_string_lossy().replace('.', "-");
        let program = self.folder.join(format!("{name}-{suffix}"));
        let mut command = self.command(compiler);
        command
            .args([standard, "-O1", "-g", "-Wall", "-Wextra", "-Werror"])
            .arg("-o")
            .arg(&program)
            .arg(source);
        command.args(self.pkg_config("--cflags")?);
        match how {
            Linked::Shared => command.args(self.pkg_config("--libs")?),
            Linked::Sanitized => {
                command.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
                command.arg(self.lib().join("libquinion.a")).args(SYSTEM_LIBRARIES)
            }
        };
        execute(&mut command)?;
        Ok(program)
    }

    fn symbols(&self) -> Result<(), Failure> {
        let map = std::fs::read_to_string(package().join("quinion.map"));
        let map = map.map_err(|error| Failure::of(&package(), &error))?;
        let mut expected: Vec<&str> = map
            .lines()
            .map(|line| line.trim().trim_end_matches(';'))
            .filter(|name| name.starts_with("qn_"))
            .collect();
        expected.sort_unstable();
        let mut nm = Command::new("nm");
        let symbols = printed(nm.args(["-D", "--defined-only"]).arg(self.lib().join("libquinion.so")))?;
        let named = symbols.lines().filter(|line| line.contains(" T "));
        let mut found: Vec<&str> = named.filter_map(|line| line.split_whitespace().nth(2)).collect();
        found.sort_unstable();
        let unversioned: Vec<&str> =
            found.iter().filter_map(|name| name.strip_suffix("@@QUINION_0.1")).collect();
        if unversioned != expected || found.len() != expected.len() {
            return Err(Failure::new(format!("the library has {found:?}, and quinion.map {expected:?}")));
        }
        Ok(())
    }

    fn calls(&self) -> Result<(), Failure> {
        let (source, server) = (package().join("tests/c/calls.c"), Server::start()?);
        let sanitized = self.compile(&source, Linked::Sanitized)?;
        execute(self.command(&sanitized).arg(&self.folder).arg(&server.name))?;
        let shared = self.compile(&source, Linked::Shared)?;
        let mut valgrind = self.command("valgrind");
        valgrind.args([
            "--quiet",
            "--error-exitcode=9",
            "--leak-check=full",
            "--child-silent-after-fork=yes",
        ]);
        valgrind.args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"]);
        execute(valgrind.arg(shared).arg(&self.folder).arg(&server.name))
    }

    fn differential(&self) -> Result<(), Failure> {
        let program = self.compile(&package().join("tests/c/differential.c"), Linked::Sanitized)?;
        (1..=SEEDS).try_for_each(|seed| {
            let mut run = self.command(&program);
            execute(run.arg(&self.folder).arg(seed.to_string()).arg(OPERATIONS.to_string()))
        })
    }

    fn examples(&self) -> Result<(), Failure> {
        let file = self.folder.join("file-of-two-pages");
        write(&file, &"a line of sixteen\n".repeat(500))?;
        let folder = package().join("examples");
        let mut commands = Vec::new();
        for name in ["hello.c", "hello.cpp"] {
            commands.push(self.command(self.compile(&folder.join(name), Linked::Shared)?));
        }
        let mut python = self.command("python3");
        python.arg(folder.join("hello.py"));
        commands.push(python);
        match go() {
            Some(go) => commands.push(self.go_example(&go, &folder.join("go"))?),
            None => println!("SKIPPED: there is no go here, so the example in Go is not run"),
        }
        for mut command in commands {
            let said = printed(command.arg(&file))?;
            if said != EXPECTED {
                return Err(Failure::new(format!("{command:?} printed\n{said}and not\n{EXPECTED}")));
            }
        }
        Ok(())
    }

    fn go_example(&self, go: &Path, source: &Path) -> Result<Command, Failure> {
        let program = self.folder.join("hello-go");
        let mut build = self.command(go);
        build.args(["build", "-o"]).arg(&program).arg(".").current_dir(source);
        build
            .env("GOCACHE", target_folder().join("capi/go-cache"))
            .env("GOFLAGS", "-mod=mod -buildvcs=false");
        execute(&mut build)?;
        Ok(self.command(program))
    }

    fn hits(&self) -> Result<(), Failure> {
        let c = self.compile(&package().join("tests/c/hits.c"), Linked::Shared)?;
        let rust = target_folder().join("release/examples/hits");
        for bytes in [64, 4096] {
            let [by_c, by_rust] = [self.instructions(&c, bytes)?, self.instructions(&rust, bytes)?];
            println!("a hit of {bytes} bytes takes {by_c} instructions by C, and {by_rust} in Rust");
            if by_c - by_rust > MORE_INSTRUCTIONS_MAX {
                let text =
                    format!("that is more than {MORE_INSTRUCTIONS_MAX} instructions dearer; find out why");
                return Err(Failure::new(text));
            }
        }
        Ok(())
    }

    /// The instructions of one read: the difference of two runs.
    fn instructions(&self, program: &Path, bytes: u32) -> Result<i64, Failure> {
        const READS: i64 = 50_000;
        let file = self.folder.join("file-of-pages");
        write(&file, &"a line of sixteen\n".repeat(1500))?;
        let counted = |reads: i64| {
            let mut valgrind = self.command("valgrind");
            valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program).arg(&file);
            let said = printed(valgrind.arg(reads.to_string()).arg(bytes.to_string()))?;
            let collected = said.lines().find_map(|line| line.split_once("Collected : "));
            collected
                .and_then(|(_, number)| number.trim().parse::<i64>().ok())
                .ok_or_else(|| Failure::new(format!("callgrind said no number:\n{said}")))
        };
        Ok((counted(1000 + READS)? - counted(1000)?) / READS)
    }

    fn pages(&self) -> Result<(), Failure> {
        let folder = self.prefix.join("share/man/man3");
        let entries = std::fs::read_dir(&folder).map_err(|error| Failure::of(&folder, &error))?;
        let pages: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        if pages.len() < 40 {
            return Err(Failure::new(format!("there are {} manual pages; some are missing", pages.len())));
        }
        if !is_installed("groff") {
            println!("SKIPPED: there is no groff here, which reads the manual pages");
            return Ok(());
        }
        let said = printed(Command::new("groff").args(["-man", "-ww", "-z", "-Tutf8"]).args(&pages))?;
        if said.is_empty() { Ok(()) } else { Err(Failure::new(format!("the manual pages: {said}"))) }
    }
}

/// Where Go is: in PATH, or where its own installation puts it.
fn go() -> Option<PathBuf> {
    let usual = Path::new("/usr/local/go/bin/go");
    if is_installed("go") { Some("go".into()) } else { usual.exists().then(|| usual.to_owned()) }
}
