//! `quinion restore` and `quinion pack` write over none of the files that they read, nor over any other that is not
//! theirs; and they refuse files that cannot be what they are given for.
//!
//! ```text
//!   --record FILE, --metrics FILE, --out FILE    FILE is new, or empty, or what that option has written before
//! ```

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use quinion_testing::vmm::Image;
use quinion_vm::pack::{PackRequest, pack};
use tempfile::TempDir;

/// The head of a record, as far as it tells that it is one.
const RECORD_HEAD: &[u8] = b"qnfaults\x02\0\0\0";

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        Image::new(51, 100).write(&folder.path("vm.mem"));
        folder
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    /// A command with options, each with the file of that name in this folder.
    fn command(&self, name: &str, options: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
        command.arg(name).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (option, name) in options {
            command.arg(option).arg(self.path(name));
        }
        command
    }
    fn restore(&self, options: &[(&str, &str)]) -> Command {
        let mut command = self.command("restore", options);
        command.arg("--socket").arg(self.path("socket")).args(["--memory", "32M"]);
        command
    }
    /// Serves until it does, has `meanwhile` happen, and ends it. What it says, and whether all went well.
    fn serves(&self, options: &[(&str, &str)], meanwhile: impl FnOnce()) -> (String, bool) {
        let mut child = self.restore(options).spawn().unwrap();
        let (mut errors, mut said) = (BufReader::new(child.stderr.take().unwrap()), String::new());
        while errors.read_line(&mut said).unwrap() > 0 && !said.contains("serving") {}
        meanwhile();
        // SAFETY: a plain call, on this process's child.
        #[allow(unsafe_code, reason = "the standard library sends one signal only")]
        unsafe {
            libc::kill(child.id().cast_signed(), libc::SIGTERM)
        };
        errors.read_to_string(&mut said).unwrap();
        (said, child.wait().unwrap().success())
    }
}

/// What a command says that does not begin. One that does is ended by the test's own end.
fn refused(mut command: Command) -> String {
    let Output { status, stderr, .. } = timed(&mut command);
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(1), "{said}");
    said
}

/// The output of a command, which gets SIGTERM after some seconds.
fn timed(command: &mut Command) -> Output {
    let mut limited = Command::new("timeout");
    limited.arg("20").arg(command.get_program()).args(command.get_args());
    limited.stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn assert_same(path: &Path, bytes: &[u8]) {
    assert!(fs::read(path).unwrap() == bytes, "{} was written over", path.display());
}

#[test]
fn a_record_or_metrics_over_an_input_or_a_foreign_file_are_refused_at_the_start() {
    let folder = Folder::new();
    let memory = fs::read(folder.path("vm.mem")).unwrap();
    let record = [RECORD_HEAD, b"and more"].concat();
    fs::write(folder.path("diff.mem"), &memory).unwrap();
    fs::write(folder.path("boot.record"), &record).unwrap();
    fs::write(folder.path("notes"), "mine").unwrap();
    symlink(folder.path("vm.mem"), folder.path("link")).unwrap();
    fs::hard_link(folder.path("vm.mem"), folder.path("hard")).unwrap();
    let packed = folder.command("pack", &[("--snapshot", "vm.mem"), ("--out", "vm.pack")]).output().unwrap();
    assert!(packed.status.success());
    let pack = fs::read(folder.path("vm.pack")).unwrap();
    let (snapshot, other) = (("--snapshot", "vm.mem"), "no");
    let cases: [(&[(&str, &str)], &str); 14] = [
        (&[snapshot, ("--record", "vm.mem")], "--snapshot"),
        (&[snapshot, ("--record", "link")], "--snapshot"),
        (&[snapshot, ("--record", "hard")], "--snapshot"),
        (&[("--snapshot", "link"), ("--record", "vm.mem")], "--snapshot"),
        (&[snapshot, ("--diff", "diff.mem"), ("--record", "diff.mem")], "--diff"),
        (&[("--snapshot", "vm.pack"), ("--record", "vm.pack")], "--snapshot"),
        (&[("--snapshot", "boot.record"), ("--record", "vm.mem")], other),
        (&[snapshot, ("--record", "vm.pack")], other),
        (&[snapshot, ("--record", "notes")], other),
        (&[snapshot, ("--metrics", "vm.mem")], "--snapshot"),
        (&[snapshot, ("--metrics", "notes")], other),
        (&[snapshot, ("--replay", "boot.record"), ("--metrics", "boot.record")], "--replay"),
        (&[snapshot, ("--record", "new"), ("--metrics", "new")], "--metrics"),
        (&[snapshot, ("--record", "socket")], "--socket"),
    ];
    for (options, word) in cases {
        let said = refused(folder.restore(options));
        assert!(said.contains(word) && said.contains("; name another"), "{options:?}: {said}");
        ["vm.mem", "diff.mem", "link", "hard"]
            .iter()
            .for_each(|name| assert_same(&folder.path(name), &memory));
        assert_same(&folder.path("vm.pack"), &pack);
        assert_same(&folder.path("boot.record"), &record);
        assert_same(&folder.path("notes"), b"mine");
        assert!(!folder.path("new").exists() && !folder.path("socket").exists(), "{options:?}");
    }
}

/// A record is written over its own file, and by `--replay` and `--record` of one file it is merged.
#[test]
fn files_of_the_same_kind_are_written_over() {
    let folder = Folder::new();
    fs::write(folder.path("empty"), "").unwrap();
    for metrics in ["q.prom", "q.prom", "empty"] {
        let options = [("--snapshot", "vm.mem"), ("--record", "boot.record"), ("--metrics", metrics)];
        let (said, is_well) = folder.serves(&options, || ());
        assert!(is_well, "{said}");
        let text = fs::read_to_string(folder.path(metrics)).unwrap();
        assert!(text.starts_with("# HELP quinion_restore_"), "{text}");
    }
    assert!(fs::read(folder.path("boot.record")).unwrap().starts_with(RECORD_HEAD));
    let both = [("--snapshot", "vm.mem"), ("--record", "boot.record"), ("--replay", "boot.record")];
    let (said, is_well) = folder.serves(&both, || ());
    assert!(is_well, "{said}");
}

/// No VM came: what an earlier run has recorded is worth more.
#[test]
fn a_record_without_a_page_does_not_replace_one_with_pages() {
    let folder = Folder::new();
    let record = [RECORD_HEAD, &[7; 100]].concat();
    fs::write(folder.path("boot.record"), &record).unwrap();
    let (said, is_well) = folder.serves(&[("--snapshot", "vm.mem"), ("--record", "boot.record")], || ());
    assert!(is_well && said.contains("no page was recorded"), "{said}");
    assert_same(&folder.path("boot.record"), &record);
}

#[test]
fn a_file_that_took_the_name_of_a_record_or_of_metrics_meanwhile_stays() {
    let folder = Folder::new();
    let options = [("--snapshot", "vm.mem"), ("--record", "boot.record"), ("--metrics", "q.prom")];
    let (record, metrics) = (folder.path("boot.record"), folder.path("q.prom"));
    let (said, is_well) = folder.serves(&options, || {
        for path in [&record, &metrics] {
            // As an editor does it: metrics may be written in between, and are replaced by this.
            fs::write(folder.path("mine"), "mine").unwrap();
            fs::rename(folder.path("mine"), path).unwrap();
        }
    });
    assert!(!is_well && said.contains("boot.record") && said.contains("no record"), "{said}");
    assert_same(&record, b"mine");
    assert_same(&metrics, b"mine");
}

#[test]
fn a_pack_replaces_none_of_its_sources() {
    let folder = Folder::new();
    let pack = |options: &[(&str, &str)]| folder.command("pack", options);
    Image::new(52, 100).write(&folder.path("vm.mem"));
    assert!(pack(&[("--snapshot", "vm.mem"), ("--out", "monday.pack")]).output().unwrap().status.success());
    let tuesday = [("--snapshot", "vm.mem"), ("--out", "tuesday.pack"), ("--against", "monday.pack")];
    assert!(pack(&tuesday).output().unwrap().status.success());
    symlink(folder.path("vm.mem"), folder.path("link")).unwrap();
    let before = |name: &str| fs::read(folder.path(name)).unwrap();
    let kept = ["vm.mem", "monday.pack", "tuesday.pack"].map(|name| (name, before(name)));
    for (from, out) in [
        ("vm.mem", "vm.mem"),
        ("vm.mem", "link"),
        ("link", "vm.mem"),
        ("monday.pack", "monday.pack"),
        ("tuesday.pack", "monday.pack"),
    ] {
        let mut command = pack(&[("--snapshot", from), ("--out", out)]);
        command.arg("--replace");
        let said = refused(command);
        assert!(
            said.contains(out) && said.contains("; write it under another name"),
            "{from}, {out}: {said}"
        );
        kept.iter().for_each(|(name, bytes)| assert_same(&folder.path(name), bytes));
    }
}

#[test]
fn a_cut_snapshot_and_a_record_are_no_snapshot() {
    let folder = Folder::new();
    let memory = fs::read(folder.path("vm.mem")).unwrap();
    fs::write(folder.path("cut.mem"), &memory[..memory.len() - 1000]).unwrap();
    let said = refused(folder.restore(&[("--snapshot", "cut.mem")]));
    let bytes = (memory.len() - 1000).to_string();
    assert!(
        said.contains(&bytes) && said.contains("whole pages") && said.contains("copy it again"),
        "{said}"
    );
    let packed =
        folder.command("pack", &[("--snapshot", "cut.mem"), ("--out", "cut.pack")]).output().unwrap();
    assert!(
        String::from_utf8_lossy(&packed.stderr).contains("whole pages") && !folder.path("cut.pack").exists()
    );
    // A pack that other means have made of it.
    let request = PackRequest::new(vec![folder.path("cut.mem")], folder.path("cut.pack"));
    pack(&request, &mut |_| ControlFlow::Continue(())).unwrap();
    let said = refused(folder.restore(&[("--snapshot", "cut.pack")]));
    assert!(said.contains("whole pages"), "{said}");
    let (said, is_well) = folder.serves(&[("--snapshot", "vm.mem"), ("--record", "boot.record")], || ());
    assert!(is_well, "{said}");
    // Also one that has as many bytes as whole pages.
    let mut record = fs::read(folder.path("boot.record")).unwrap();
    for bytes in [record.len(), 4096] {
        record.resize(bytes, 0);
        fs::write(folder.path("boot.record"), &record).unwrap();
        let said = refused(folder.restore(&[("--snapshot", "boot.record")]));
        assert!(said.contains("a record of page faults") && said.contains("--replay"), "{said}");
    }
}

#[test]
fn a_record_that_would_not_be_replayed_is_refused() {
    let folder = Folder::new();
    fs::write(folder.path("boot.record"), RECORD_HEAD).unwrap();
    let options = [("--snapshot", "vm.mem"), ("--replay", "boot.record")];
    let mut command = folder.restore(&options);
    command.args(["--fill", "none"]);
    let said = refused(command);
    assert!(said.contains("--fill none") && said.contains("leave out"), "{said}");
}

#[test]
fn each_byte_at_the_end_of_a_pack_is_looked_at() {
    let folder = Folder::new();
    let packed =
        folder.command("pack", &[("--snapshot", "vm.mem"), ("--out", "monday.pack")]).output().unwrap();
    assert!(packed.status.success());
    let next = [("--snapshot", "vm.mem"), ("--out", "next.pack"), ("--against", "monday.pack")];
    assert!(folder.command("pack", &next).output().unwrap().status.success());
    let mut pack = fs::read(folder.path("monday.pack")).unwrap();
    for at in [pack.len() - 16, pack.len() - 7, pack.len() - 1] {
        pack[at] ^= 0x10;
        fs::write(folder.path("monday.pack"), &pack).unwrap();
        pack[at] ^= 0x10;
        for name in ["monday.pack", "next.pack"] {
            let verified = refused(folder.command("pack", &[("--verify", name)]));
            let served = refused(folder.restore(&[("--snapshot", name)]));
            for said in [verified, served] {
                assert!(said.contains("monday.pack") && said.contains("last 16 bytes"), "{at}: {said}");
            }
        }
    }
}

/// The peer has sent all but the descriptor, and closed its side for writing.
#[test]
fn a_peer_without_a_userfaultfd_and_a_second_server_are_told_what_to_do() {
    let folder = Folder::new();
    let mut answer = String::new();
    let (said, is_well) = folder.serves(&[("--snapshot", "vm.mem")], || {
        let mut peer = UnixStream::connect(folder.path("socket")).unwrap();
        peer.write_all(br#"[{"base_host_virt_addr":4096,"size":4096,"offset":0,"page_size":4096}]"#).unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        peer.read_to_string(&mut answer).unwrap();
        let said = refused(folder.restore(&[("--snapshot", "vm.mem")]));
        assert!(said.contains("another server listens there") && said.contains("--replace"), "{said}");
    });
    assert!(is_well && said.contains("no userfaultfd came with"), "{said}");
    assert!(answer.contains("no userfaultfd came with") && answer.contains("SCM_RIGHTS"), "{answer}");
    let mut command = folder.command("restore", &[("--snapshot", "vm.mem"), ("--socket", "no/such/socket")]);
    command.args(["--memory", "32M"]);
    let said = refused(command);
    assert!(said.contains("make that folder"), "{said}");
}

/// The two have one size.
#[test]
fn the_record_of_another_snapshot_is_told_without_sizes_that_are_equal() {
    let folder = Folder::new();
    let both = [("--snapshot", "vm.mem"), ("--record", "boot.record")];
    assert!(folder.serves(&both, || ()).1);
    Image::new(53, 100).write(&folder.path("vm.mem"));
    let (said, _) = folder.serves(&[("--snapshot", "vm.mem"), ("--replay", "boot.record")], || ());
    assert!(said.contains("of another snapshot") && !said.contains("409600 bytes"), "{said}");
}
