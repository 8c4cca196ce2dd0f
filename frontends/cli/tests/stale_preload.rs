//! The object that `run` preloads: a file that no other user can create or change, and that stays when the owner ends.
//!
//! A path that names a process, as `/proc/PID/fd/N`, leads to another process's file when that number is reused. So the
//! tests check the value of `LD_PRELOAD` in programs, the file that it names, and what happens if another file has that
//! name.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;

mod disk;
use disk::{Report, quinion, scratch};

/// A user with two places for the object: the first choice, and a home.
struct User {
    runtime: TempDir,
    home: TempDir,
}

impl User {
    fn new() -> Self {
        let [runtime, home] = [(); 2].map(|()| TempDir::new().expect("a folder"));
        set_mode(runtime.path(), 0o700);
        set_mode(home.path(), 0o700);
        Self { runtime, home }
    }

    fn quinion(&self, words: &[&str]) -> Command {
        let mut command = quinion();
        command.env("XDG_RUNTIME_DIR", self.runtime.path()).env("HOME", self.home.path());
        command.env_remove("XDG_CACHE_HOME").env_remove("LD_PRELOAD").args(words);
        command
    }

    /// `quinion run` without a report.
    fn run(&self, words: &[&str]) -> Command {
        let mut command =
            self.quinion(&["run", "--memory", "64M", "--attach", "at-once", "--report", "none"]);
        command.arg("--").args(words);
        command
    }

    /// The value of `LD_PRELOAD` in a program under `run`.
    #[track_caller]
    fn object(&self) -> PathBuf {
        let output = self.run(&["sh", "-c", "echo $LD_PRELOAD"]).output().expect("it starts");
        PathBuf::from(said(&output).trim_end())
    }

    /// Bytes that programs read from the cache.
    #[track_caller]
    fn served(&self) -> u64 {
        let folder = scratch();
        let [file, report] = ["file", "report"].map(|name| folder.path().join(name));
        fs::write(&file, disk::noise(1 << 20, 1)).expect("the disk has room");
        let mut command =
            self.quinion(&["run", "--memory", "64M", "--attach", "at-once", "--report", "json"]);
        command.arg("--report-file").arg(&report).args(["--", "cksum"]).arg(&file);
        said(&command.output().expect("it starts"));
        Report::read(&report).served()
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
}

/// The output of a command that must succeed without messages.
#[track_caller]
fn said(output: &Output) -> String {
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether only root and this user can change the file that `path` leads to, all the way from the root.
#[track_caller]
fn assert_only_the_user_can_change(path: &Path) {
    let us = rustix::process::geteuid().as_raw();
    assert!(path.is_absolute() && !path.starts_with("/proc"), "{}", path.display());
    let object = path.symlink_metadata().expect("it is there");
    assert!(object.is_file() && object.uid() == us && object.mode() & 0o222 == 0, "{object:?}");
    let folder = path.parent().expect("it lies in one").symlink_metadata().expect("it is there");
    assert!(folder.uid() == us && folder.mode() & 0o777 == 0o700, "{folder:?}");
    for above in path.ancestors().skip(1) {
        let data = above.symlink_metadata().expect("it is there");
        let is_sticky = data.mode() & 0o1000 != 0;
        assert!(data.is_dir() && [0, us].contains(&data.uid()), "{}", above.display());
        assert!(is_sticky || data.mode() & 0o022 == 0, "{}", above.display());
    }
}

/// 1. A shell is started under `run`, and leaves a second one behind that waits.
/// 2. `run` ends, and the cache with it.
/// 3. The second shell starts programs, as itself and as another user. Their `LD_PRELOAD` is unchanged, and they print
///    no message. (When another user's process reuses the owner's number, a path by that number is chosen by that user:
///    root's next program would run that user's code.)
#[test]
fn stale_preload() {
    let (user, folder) = (User::new(), scratch());
    let [out, complaints] = ["out", "complaints"].map(|name| folder.path().join(name));
    let mut script = "
        ( exec </dev/null >out.new 2>/dev/null
          while kill -0 $PARENT; do sleep 0.01; done
          exec 2>complaints
          echo $LD_PRELOAD; sh -c 'echo $LD_PRELOAD'; cat text
          OTHERS
          mv out.new out ) &"
        .to_owned();
    fs::write(folder.path().join("text"), "two\n").expect("the disk has room");
    let others = [
        "setpriv --reuid=65534 --clear-groups sh -c 'echo $LD_PRELOAD; echo three' | tr -d :",
        "su nobody -s /bin/sh -c 'echo $LD_PRELOAD; echo three' | tr -d :",
    ];
    // If the container forbids it, it is forbidden without the interposer, too.
    let can = |other: &&str| {
        let alone = Command::new("sh").args(["-c", other]).env_remove("LD_PRELOAD").output();
        is_root() && alone.is_ok_and(|output| output.stdout == b"\nthree\n")
    };
    let others: Vec<_> = others.into_iter().filter(can).collect();
    if others.is_empty() {
        println!("SKIPPED: programs of another user; it takes root, and setpriv or su");
    }
    script = format!("PARENT=$PPID; {}", script.replace("OTHERS", &others.join("; ")));
    said(&user.run(&["sh", "-c", &script]).current_dir(folder.path()).output().expect("it starts"));
    let end = Instant::now() + Duration::from_secs(60);
    while !out.exists() {
        assert!(Instant::now() < end, "the end did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(fs::read_to_string(&complaints).expect("it is there"), "");
    let out = fs::read_to_string(&out).expect("it is there");
    let (object, rest) = out.split_once('\n').expect("a line");
    assert_only_the_user_can_change(Path::new(object));
    // Another user's programs could not load it, and are not told to.
    assert_eq!(rest, format!("{object}\ntwo\n{}", "\nthree\n".repeat(others.len())));
}

/// 1. The object that programs have loaded is removed, or another file gets its name.
/// 2. The next program is told to load it, and its linker complains, or loads that other file.
#[test]
fn a_removed_or_replaced_object_is_not_handed_on() {
    let (user, folder) = (User::new(), scratch());
    fs::write(folder.path().join("text"), "one\n").expect("the disk has room");
    for change in
        ["rm $o", "mv $o $o.old; echo x >$o", "rm -r ${o%/*}", "chmod 755 ${o%/*}; rm $o; mkfifo $o"]
    {
        let script = format!("o=$LD_PRELOAD; {change}; cat text; (exec cat text); env cat text");
        let output = user.run(&["sh", "-c", &script]).current_dir(folder.path()).output().expect("it starts");
        assert_eq!(said(&output), "one\none\none\n", "{change}");
        let _ = fs::remove_dir_all(user.runtime.path().join("quinion"));
    }
}

/// A file under the object's name is checked before it is used, whatever it is.
#[test]
fn a_planted_object_is_not_loaded() {
    let user = User::new();
    let object = user.object();
    assert_only_the_user_can_change(&object);
    let bytes = fs::read(&object).expect("it is ours");
    let elsewhere = user.home.path().join("elsewhere");
    let plant: [(&str, &dyn Fn()); 6] = [
        ("other bytes", &|| fs::write(&object, vec![b'x'; bytes.len()]).expect("it is ours")),
        ("one other byte", &|| {
            let mut other = bytes.clone();
            *other.last_mut().expect("it is not empty") ^= 1;
            fs::write(&object, other).expect("it is ours");
        }),
        ("fewer bytes", &|| fs::write(&object, &bytes[..bytes.len() / 2]).expect("it is ours")),
        ("a link", &|| {
            fs::write(&elsewhere, "it").expect("it is ours");
            symlink(&elsewhere, &object).expect("it is ours");
        }),
        ("what others can write", &|| {
            fs::write(&object, &bytes).expect("it is ours");
            set_mode(&object, 0o777);
        }),
        ("a pipe", &|| {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(rustix::fs::CWD, &object, rustix::fs::FileType::Fifo, mode, 0).expect("ours");
        }),
    ];
    for (what, plant) in plant {
        fs::remove_file(&object).expect("it is there");
        plant();
        assert_eq!(user.object(), object, "{what}");
        assert_only_the_user_can_change(&object);
        assert_eq!(fs::read(&object).expect("it is ours"), bytes, "{what}");
        assert!(user.served() >= 1 << 20, "{what}");
    }
    assert_eq!(fs::read_to_string(&elsewhere).expect("it is there"), "it", "a link is not followed");
    // A correct file is kept as the same inode: programs have it loaded.
    let inode = || object.metadata().expect("it is there").ino();
    let before = inode();
    user.object();
    assert_eq!(inode(), before);
    let names: Vec<_> = fs::read_dir(object.parent().expect("a folder")).expect("it is ours").collect();
    let objects = names.iter().flatten().filter(|entry| entry.file_name().to_string_lossy().contains(".so"));
    assert_eq!(objects.count(), 1, "nothing else is left: {names:?}");
}

/// A folder that other users can write, or replace, is skipped.
#[test]
fn a_folder_that_others_can_write_is_refused() {
    let user = User::new();
    let first = user.runtime.path().join("quinion");
    assert!(user.object().starts_with(&first));
    let second = user.home.path().join(".cache/quinion");
    for (path, mode) in [
        (first.as_path(), 0o770),
        (&first, 0o707),
        (user.runtime.path(), 0o770),
        (user.runtime.path(), 0o722),
    ] {
        set_mode(path, mode);
        let object = user.object();
        assert!(object.starts_with(&second), "{mode:o}: {}", object.display());
        assert_only_the_user_can_change(&object);
        set_mode(path, 0o700);
    }
    assert!(user.object().starts_with(&first));
    // Through a link, into a folder of this user's.
    fs::remove_dir_all(&first).expect("it is ours");
    symlink(user.home.path(), &first).expect("it is ours");
    assert!(user.object().starts_with(&second));
    // Characters that separate names in `LD_PRELOAD`, or that the linker expands there.
    for name in ["a b", "a:b", "$LIB", "a\nb"] {
        let odd = user.home.path().join(name);
        fs::create_dir(&odd).expect("it is ours");
        set_mode(&odd, 0o700);
        let output = user.run(&["sh", "-c", "echo $LD_PRELOAD"]).env("XDG_RUNTIME_DIR", &odd).output();
        assert!(Path::new(said(&output.expect("it starts")).trim_end()).starts_with(&second), "{name:?}");
    }
}

/// From a file system that is mounted `noexec` the dynamic linker loads nothing.
#[test]
fn a_folder_that_is_mounted_noexec_is_passed_over() {
    let user = User::new();
    let mount = "mount -t tmpfs -o noexec,mode=700 none \"$XDG_RUNTIME_DIR\"";
    let mut alone = Command::new("unshare");
    alone.args(["--mount", "sh", "-c", mount]).env("XDG_RUNTIME_DIR", user.runtime.path());
    if !is_root() || !alone.output().is_ok_and(|output| output.status.success()) {
        return println!("SKIPPED: it takes root that may mount");
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &format!("{mount} && exec \"$0\" \"$@\"")]);
    let run = user.run(&["sh", "-c", "echo $LD_PRELOAD"]);
    command.arg(run.get_program()).args(run.get_args());
    for (name, value) in run.get_envs() {
        value.map(|value| command.env(name, value));
    }
    let object = said(&command.env_remove("XDG_CACHE_HOME").output().expect("it starts"));
    assert!(Path::new(object.trim_end()).starts_with(user.home.path()), "{object}");
}

/// 1. Another user makes `/tmp/quinion-UID` with this user's UID, before this user does.
/// 2. This user's caches are elsewhere; if there is no other place, a message gives a remedy.
#[test]
fn a_folder_of_another_users_denies_nothing() {
    const USER: u32 = 61_234;
    if !is_root() || !Command::new("setpriv").arg("--version").output().is_ok_and(|it| it.status.success()) {
        return println!("SKIPPED: only root becomes another user, by setpriv");
    }
    let user = User::new();
    let program = user.runtime.path().join("program");
    let built = env!("CARGO_BIN_EXE_quinion");
    fs::hard_link(built, &program).or_else(|_| fs::copy(built, &program).map(drop)).expect("room for it");
    set_mode(user.runtime.path(), 0o755);
    chown(user.home.path(), Some(USER), Some(USER)).expect("we are root");
    let as_user = |words: &[&str], home: Option<&Path>| {
        let mut command = disk::plain("setpriv");
        command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string(), "--clear-groups"]);
        command.arg(&program).args(words).current_dir("/").env_remove("LD_PRELOAD");
        command.env_remove("XDG_RUNTIME_DIR").env_remove("XDG_CACHE_HOME").env_remove("HOME");
        home.map(|home| command.env("HOME", home));
        command.output().expect("it starts")
    };
    let denied = PathBuf::from(format!("/tmp/quinion-{USER}"));
    let _ = fs::remove_dir_all(&denied);
    fs::create_dir(&denied).expect("/tmp is everybody's");
    set_mode(&denied, 0o777);
    let home = Some(user.home.path());
    let run = ["run", "--keep", "--memory", "16M", "--report", "none", "--", "sh", "-c", "echo $LD_PRELOAD"];
    let first = as_user(&run, home);
    let [listed, stopped] = [&["keeps", "--json"][..], &["stop"]].map(|words| as_user(words, home));
    let nowhere = as_user(&run, None);
    let shown = as_user(&["keeps"], None);
    fs::remove_dir_all(&denied).expect("it is ours");
    let object = said(&first);
    assert!(Path::new(object.trim_end()).starts_with(user.home.path().join(".cache/quinion")), "{object}");
    assert!(said(&listed).contains("\"name\":\"default\""), "{listed:?}");
    assert!(stopped.status.success(), "{stopped:?}");
    for output in [nowhere, shown] {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{why}");
        assert!(why.contains(&denied.display().to_string()) && why.contains("XDG_RUNTIME_DIR"), "{why}");
        assert_eq!(output.stdout, b"", "the program was not started");
    }
}
