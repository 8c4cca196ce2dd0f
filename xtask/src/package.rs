//! Package: packages for Debian and its like, of all that a user installs.
//!
//! ```text
//!   quinion           the command, with its manual pages, the shells' completions and systemd's unit of restore
//!   quinion-serve     the server of a node: quinion-serve, quinion-object, quinion-s3, systemd's units
//!   quinion-sqlite    the extension for SQLite
//!   libquinion0.1     the C library
//!   libquinion-dev    what programs in C are built with
//!
//!   target/package/NAME      what is in it, as it is laid out on a machine
//!   target/package/NAME.deb  by dpkg-deb; the same tree gives the same bytes
//!   target/package/root      all of them, unpacked, to see that they work
//! ```
//!
//! Nothing is installed, and root is not needed. Files have the time of the last commit, so that a package depends on
//! nothing but the sources and the compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::capi;
use crate::step::{Failure, execute};
use crate::tools::{cargo, commit_time, output, repository, target_folder};

const MAINTAINER: &str = "The Quinion maintainers <maintainers@quinion.example>";
const HOMEPAGE: &str = "https://github.com/quinion/quinion";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Completions: the shell, and where its file is looked for.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/quinion"),
    ("zsh", "usr/share/zsh/vendor-completions/_quinion"),
    ("fish", "usr/share/fish/vendor_completions.d/quinion.fish"),
];

struct Package {
    name: &'static str,
    section: &'static str,
    depends: &'static str,
    summary: &'static str,
    description: &'static str,
    /// Files that must be in it; `*` stands for the machine's folder of libraries.
    wanted: &'static [&'static str],
}

const LIBC: &str = "libc6, libgcc-s1";

const PACKAGES: [Package; 5] = [
    Package {
        name: "quinion",
        section: "utils",
        depends: LIBC,
        summary: "page cache in user space: the command",
        description: "The command reads files through a cache of a bounded size, runs unmodified\n\
            programs on it (quinion run), and restores the memory of virtual machines\n\
            from it.",
        wanted: &[
            "usr/bin/quinion",
            "usr/share/man/man1/quinion.1.gz",
            "usr/share/man/man1/quinion-run.1.gz",
            "usr/share/man/man1/quinion-restore.1.gz",
            "usr/share/bash-completion/completions/quinion",
            "usr/share/zsh/vendor-completions/_quinion",
            "usr/share/fish/vendor_completions.d/quinion.fish",
            "usr/lib/systemd/system/quinion-restore.service",
        ],
    },
    Package {
        name: "quinion-serve",
        section: "net",
        depends: "libc6, libgcc-s1, ca-certificates",
        summary: "page cache in user space: one cache of objects for the processes of a node",
        description: "The server keeps objects of stores (S3, GCS, Azure, HTTP) in memory that all\n\
            processes of a user share, and on a disk; quinion-s3 is an endpoint for\n\
            programs that speak S3.",
        wanted: &[
            "usr/bin/quinion-serve",
            "usr/bin/quinion-object",
            "usr/bin/quinion-s3",
            "usr/lib/systemd/user/quinion-serve.service",
            "usr/lib/systemd/user/quinion-serve.socket",
        ],
    },
    Package {
        name: "quinion-sqlite",
        section: "libs",
        depends: LIBC,
        summary: "page cache in user space: a VFS for SQLite",
        description: "A loadable extension: one bounded cache for all connections of a process.",
        wanted: &["usr/lib/*/quinion/quinion_vfs.so"],
    },
    Package {
        name: "libquinion0.1",
        section: "libs",
        depends: LIBC,
        summary: "page cache in user space: the C library",
        description: "What programs need that were built with libquinion-dev.",
        wanted: &["usr/lib/*/libquinion.so.0.1", "usr/lib/*/libquinion.so.0.1.0"],
    },
    Package {
        name: "libquinion-dev",
        section: "libdevel",
        depends: "libquinion0.1",
        summary: "page cache in user space: headers and manual of the C library",
        description: "Headers for C and C++, the static library, a file for pkg-config, and manual\n\
            pages of section 3.",
        wanted: &[
            "usr/include/quinion.h",
            "usr/include/quinion.hpp",
            "usr/lib/*/libquinion.so",
            "usr/lib/*/libquinion.a",
            "usr/lib/*/pkgconfig/quinion.pc",
            "usr/share/man/man3/qn_pread.3.gz",
        ],
    },
];

pub fn build() -> Result<(), Failure> {
    let folder = repository().join("target/package");
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|error| Failure::of(&folder, &error))?;
    }
    build_programs()?;
    lay_out(&folder)?;
    let root = folder.join("root");
    for package in &PACKAGES {
        let built = package.build(&folder)?;
        execute(Command::new("dpkg-deb").arg("--extract").arg(&built).arg(&root))?;
        println!("{}", built.display());
    }
    if let Some(name) = PACKAGES.iter().find_map(|package| package.missing(&root)) {
        return Err(Failure::new(format!("{name} is in none of the packages; see `lay_out`")));
    }
    try_out(&root)?;
    println!("install them by `sudo dpkg -i`");
    Ok(())
}

fn build_programs() -> Result<(), Failure> {
    execute(&mut cargo("build --release --locked -p quinion-cli -p quinion-serve -p quinion-s3"))?;
    let mut sqlite =
        cargo("build --release --locked --manifest-path frontends/sqlite/Cargo.toml --target-dir");
    execute(sqlite.arg(target_folder().join("sqlite")))
}

fn libraries() -> String {
    format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH)
}

fn lay_out(folder: &Path) -> Result<(), Failure> {
    let of = |package: &str, place: &str| folder.join(package).join(place);
    let release = |name: &str| target_folder().join("release").join(name);
    let lib = libraries();

    install_program(&release("quinion"), &of("quinion", "usr/bin/quinion"))?;
    let mut pages = Command::new(release("quinion"));
    execute(pages.args(["man", "--out"]).arg(of("quinion", "usr/share/man/man1")))?;
    for (shell, place) in COMPLETIONS {
        let mut completions = Command::new(release("quinion"));
        completions.args(["completions", shell]);
        write(&of("quinion", place), &output(&mut completions)?)?;
    }

    for program in ["quinion-serve", "quinion-object", "quinion-s3"] {
        install_program(&release(program), &of("quinion-serve", &format!("usr/bin/{program}")))?;
    }
    let unit = "quinion-restore.service";
    let place = of("quinion", &format!("usr/lib/systemd/system/{unit}"));
    copy(&repository().join("packaging").join(unit), &place)?;
    for unit in ["quinion-serve.service", "quinion-serve.socket"] {
        let place = of("quinion-serve", &format!("usr/lib/systemd/user/{unit}"));
        copy(&repository().join("packaging").join(unit), &place)?;
    }

    let extension = target_folder().join("sqlite/release/libquinion_vfs.so");
    install_program(&extension, &of("quinion-sqlite", &format!("{lib}/quinion/quinion_vfs.so")))?;

    let installed = folder.join("capi");
    capi::install(&installed, Path::new("/usr"), &lib["usr/".len()..])?;
    for (package, names) in [
        ("libquinion0.1", &["libquinion.so.0.1", "libquinion.so.0.1.0"][..]),
        ("libquinion-dev", &["libquinion.so", "libquinion.a", "pkgconfig"][..]),
    ] {
        for name in names {
            let place = of(package, &format!("{lib}/{name}"));
            rename(&installed.join(&lib["usr/".len()..]).join(name), &place)?;
        }
    }
    for name in ["include", "share"] {
        rename(&installed.join(name), &of("libquinion-dev", &format!("usr/{name}")))?;
    }
    fs::remove_dir_all(&installed).map_err(|error| Failure::of(&installed, &error))
}

impl Package {
    fn build(&self, folder: &Path) -> Result<PathBuf, Failure> {
        let tree = folder.join(self.name);
        let docs = tree.join("usr/share/doc").join(self.name);
        for name in ["LICENSE-APACHE", "LICENSE-MIT", "CHANGELOG.md"] {
            copy(&repository().join(name), &docs.join(name))?;
        }
        write(&docs.join("copyright"), copyright().as_bytes())?;
        let manual = tree.join("usr/share/man");
        if manual.exists() {
            // Names and times are left out, so that the same tree gives the same bytes.
            execute(Command::new("gzip").args(["-9", "-n", "--recursive"]).arg(&manual))?;
        }
        let size = output(Command::new("du").args(["--summarize", "--apparent-size", "-k"]).arg(&tree))?;
        let size = String::from_utf8_lossy(&size).split_whitespace().next().unwrap_or("0").to_owned();
        write(&tree.join("DEBIAN/control"), self.control(&size)?.as_bytes())?;
        let built = folder.join(format!("{}.deb", self.name));
        self.pack(&tree, &built)?;
        let again = folder.join("again.deb");
        self.pack(&tree, &again)?;
        if read(&built)? != read(&again)? {
            return Err(Failure::new(format!("{}: the same tree gives two packages", self.name)));
        }
        fs::remove_file(&again).map_err(|error| Failure::of(&again, &error))?;
        Ok(built)
    }

    fn pack(&self, tree: &Path, built: &Path) -> Result<(), Failure> {
        let mut pack = Command::new("dpkg-deb");
        pack.env("SOURCE_DATE_EPOCH", commit_time()?);
        execute(pack.args(["--root-owner-group", "-Zxz", "--build"]).arg(tree).arg(built))
    }

    fn control(&self, kibibytes: &str) -> Result<String, Failure> {
        let architecture = output(Command::new("dpkg").arg("--print-architecture"))?;
        let Self { name, section, depends, summary, description, .. } = self;
        let depends = match *depends {
            "libquinion0.1" => format!("libquinion0.1 (= {VERSION})"),
            other => other.to_owned(),
        };
        Ok(format!(
            "Package: {name}\nVersion: {VERSION}\nArchitecture: {}\nMaintainer: {MAINTAINER}\nSection: {section}\n\
             Priority: optional\nInstalled-Size: {kibibytes}\nDepends: {depends}\nHomepage: {HOMEPAGE}\n\
             Description: {summary}\n {}\n",
            String::from_utf8_lossy(&architecture).trim(),
            description.replace('\n', "\n ")
        ))
    }

    /// A file that is not there and should be.
    fn missing(&self, root: &Path) -> Option<String> {
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let mut wanted = self.wanted.iter().map(|name| name.replace('*', &triplet));
        wanted.find(|name| !root.join(name).is_file())
    }
}

fn copyright() -> String {
    format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: quinion\n\
         Source: {HOMEPAGE}\n\nFiles: *\nCopyright: The Quinion maintainers\nLicense: MIT or Apache-2.0\n \
         The texts of both are beside this file, as LICENSE-MIT and LICENSE-APACHE.\n"
    )
}

fn try_out(root: &Path) -> Result<(), Failure> {
    let lib = root.join(libraries());
    let program = |name: &str| Command::new(root.join("usr/bin").join(name));
    let path = repository().join("LICENSE-MIT");
    let mut run = program("quinion");
    run.args(["run", "--memory=16M", "--report=none", "--", "cat"]).arg(&path);
    if output(&mut run)? != read(&path)? {
        return Err(Failure::new("what the package's command runs prints something else than it should"));
    }
    for name in ["quinion-serve", "quinion-object", "quinion-s3"] {
        output(program(name).arg("--version"))?;
    }
    let mut sqlite = Command::new("sqlite3");
    sqlite.args(["-bail", ":memory:"]).arg(format!(".load {}", lib.join("quinion/quinion_vfs").display()));
    sqlite.arg(format!(".open file:{}?vfs=quinion", root.join("x.db").display()));
    if output(sqlite.arg("CREATE TABLE t AS SELECT 7 AS x; SELECT x FROM t"))? != b"7\n" {
        return Err(Failure::new("SQLite does not load the package's extension"));
    }
    let (hello, flags) = (root.join("hello"), pkg_config(root, &lib)?);
    let mut cc = Command::new("cc");
    cc.arg(repository().join("frontends/capi/examples/hello.c")).arg("-o").arg(&hello);
    execute(cc.args(flags.split_whitespace()))?;
    let told =
        output(Command::new(&hello).arg(repository().join("CHANGELOG.md")).env("LD_LIBRARY_PATH", &lib))?;
    if !told.ends_with(b"1 hits\n") {
        return Err(Failure::new("the example in C says something else with the package's library"));
    }
    Ok(())
}

fn pkg_config(root: &Path, lib: &Path) -> Result<String, Failure> {
    let mut flags = Command::new("pkg-config");
    flags.args(["--cflags", "--libs", "quinion"]);
    flags.env("PKG_CONFIG_SYSROOT_DIR", root).env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
    Ok(String::from_utf8_lossy(&output(&mut flags)?).into_owned())
}

fn make_parent(path: &Path) -> Result<(), Failure> {
    let parent = path.parent().expect("a place in a package has a folder");
    fs::create_dir_all(parent).map_err(|error| Failure::of(parent, &error))
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    make_parent(to)?;
    fs::copy(from, to).map(|_| ()).map_err(|error| Failure::of(from, &error))
}

/// A program or library, without symbols for debuggers.
fn install_program(from: &Path, to: &Path) -> Result<(), Failure> {
    make_parent(to)?;
    execute(Command::new("strip").arg("--strip-unneeded").arg(from).arg("-o").arg(to))
}

fn rename(from: &Path, to: &Path) -> Result<(), Failure> {
    make_parent(to)?;
    fs::rename(from, to).map_err(|error| Failure::of(from, &error))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    make_parent(path)?;
    fs::write(path, bytes).map_err(|error| Failure::of(path, &error))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| Failure::of(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_file_is_reported_missing() {
        assert_eq!(PACKAGES[0].missing(Path::new("/nowhere")).as_deref(), Some("usr/bin/quinion"));
    }

    #[test]
    fn each_program_of_the_image_is_in_a_package() {
        let image = fs::read_to_string(repository().join("packaging/Containerfile")).expect("it is there");
        for program in ["quinion", "quinion-serve", "quinion-object", "quinion-s3"] {
            assert!(image.contains(&format!("release/{program}")), "{program}");
            let place = format!("usr/bin/{program}");
            assert!(PACKAGES.iter().any(|package| package.wanted.contains(&&*place)), "{program}");
        }
    }
}
