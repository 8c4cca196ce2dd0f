//! The matrix: common programs, on files four times the memory, with the cache and without it.
//!
//! | | standard output, standard error, status | bytes from the cache |
//! |---|---|---|
//! | programs that call `read` and its kin, themselves or through the C library's streams | the same | more than 90 % of the file |
//! | programs that read through descriptors 0 to 2 | the same | not asked |
//! | programs that map files, or have the kernel copy them | the same | not asked |
//!
//! The second column keeps the first honest: an interposer that does nothing would also be always right. Databases and
//! storage benchmarks are in `matrix_storage.rs`.

use std::path::Path;

mod disk;
use disk::{Report, Words, files, plain, python, same, same_in, scratch, size};

/// Checks that the output is the same both ways, and that the cache served over 90 % of all bytes of `read`.
#[track_caller]
fn served(words: Words, read: &[&str]) -> Report {
    let report = same(words);
    let bytes: u64 = read.iter().map(|name| size(&files().join(name))).sum();
    assert!(report.served() > bytes / 10 * 9, "{words:?} read {bytes} bytes, and of these: {report:?}");
    report
}

fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

// ---- programs that are served ---------------------------------------------------------------------------

#[test]
fn cat() {
    served(&["cat", "binary"], &["binary"]);
    same(&["cat", "-n", "text"]); // asks how much is left to read, by the kernel's offset
    served(&["cat", "text", "many/003", "binary", "text"], &["text", "binary", "text"]);
}

#[test]
fn grep() {
    served(&["grep", "-c", "the", "text"], &["text"]);
    served(&["grep", "-n", "line 99", "text", "many/100"], &["text"]);
    served(&["grep", "-c", "the", "binary"], &["binary"]);
    served(&["grep", "-v", ".", "text"], &["text"]); // finds nothing: status 1
}

#[test]
fn head_and_tail() {
    served(&["head", "-c", "63000001", "binary"], &["binary"]);
    served(&["head", "-n", "1000", "text"], &[]);
    same(&["head", "-c", "-1234567", "binary"]);
    same(&["tail", "-c", "60000001", "binary"]);
    same(&["tail", "-c", "+60000001", "binary"]);
    served(&["tail", "-n", "1000001", "text"], &[]);
    served(&["tail", "-n", "+5", "text"], &["text"]);
}

#[test]
fn wc() {
    served(&["wc", "text"], &["text"]);
    served(&["wc", "-l", "text", "binary"], &["text", "binary"]);
    same(&["wc", "-c", "text"]);
}

#[test]
fn tar_to_a_pipe() {
    served(&["tar", "cf", "-", "binary"], &["binary"]);
    served(&sh("tar cf - text binary many | sha256sum"), &["text", "binary"]);
    served(&sh("tar cf - text | tar xOf - | wc -c"), &["text"]);
}

#[test]
fn cmp() {
    let scratch = scratch();
    let copy = scratch.path().join("copy");
    std::fs::copy(files().join("binary"), &copy).expect("the disk has room");
    let copy = copy.to_str().expect("a plain path");
    served(&["cmp", "binary", copy], &["binary", "binary"]);
    same(&["cmp", "-s", "-i", "1:0", "binary", copy]); // decided by the sizes
    same(&["cmp", "text", "binary"]);
}

#[test]
fn python3() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/reads.py");
    let python = python().to_str().expect("a plain path");
    for way in ["whole", "lines", "into", "at", "scattered"] {
        served(&[python, script, "binary", way], &["binary"]);
    }
    served(&[python, script, "text", "words"], &["text"]);
    served(&[python, script, "text", "lines"], &["text"]);
    served(&[python, script, "text", "seek"], &[]);
    same(&[python, script, "binary", "map"]);
    let folder = scratch();
    let copy = folder.path().join("copy");
    same(&[python, script, "binary", "copy", copy.to_str().expect("a plain path")]);
}

/// Through the C library's streams.
#[test]
fn streams() {
    served(&["sha256sum", "text", "binary", "many/100"], &["text", "binary"]);
    served(&["sort", "-S", "16M", "text"], &["text"]);
    served(&["sed", "-n", "100000p;$p", "text"], &["text"]);
    served(&["cut", "-c", "1-8", "text"], &["text"]);
}

#[test]
fn gzip() {
    served(&sh("gzip -1 -c text | sha256sum"), &["text"]);
    let folder = scratch();
    let packed = plain("sh")
        .args(["-c", "gzip -1 -c text > \"$0\"/text.gz"])
        .arg(folder.path())
        .current_dir(files())
        .status()
        .expect("sh starts");
    assert!(packed.success());
    let bytes = size(&folder.path().join("text.gz"));
    for script in
        ["gzip -dc text.gz | sha256sum", "gzip -l text.gz; gzip -t text.gz", "zcat text.gz | tail -n 3"]
    {
        let report = same_in(folder.path(), &sh(script));
        assert!(report.served() > bytes / 10 * 9, "{script}: {report:?}");
    }
}

/// ripgrep maps a single file; of many files, and without maps, it reads them.
#[test]
fn ripgrep() {
    disk::program("rg");
    same(&["rg", "-c", "the", "text"]);
    same(&["rg", "-n", "line 99[0-9]*1$", "text"]);
    served(&["rg", "--no-mmap", "-c", "the", "text"], &["text"]);
    served(&["rg", "--no-mmap", "-a", "-c", "q+z", "binary"], &["binary"]);
    let report = same(&["rg", "--sort", "path", "-c", "longer", "many", "text"]);
    assert!(report.served() > many_bytes() / 10 * 9, "{report:?}");
    let report = same(&sh("rg --no-mmap 'line 7.*1$' many | sort"));
    assert!(report.served() > many_bytes() / 10 * 9, "{report:?}");
}

fn many_bytes() -> u64 {
    let entries = files().join("many").read_dir().expect("the folder is there");
    entries.map(|entry| size(&entry.expect("it can be read").path())).sum()
}

/// Loose objects are read, packs are mapped.
#[test]
fn git() {
    let folder = scratch();
    let make = "
        git init -q . && git config user.name a && git config user.email a@example.org && git config gc.auto 0 &&
        mkdir many && cp \"$0\"/many/0* many && git add . && git commit -q -m one && git repack -q -a -d &&
        for i in 10 20 30 40 50; do echo more >> many/0$i; git commit -q -a -m $i; done &&
        git tag -a -m tagged first HEAD~3";
    let output = plain("sh").args(["-c", make]).arg(files()).current_dir(folder.path()).output();
    let output = output.expect("sh starts");
    assert!(output.status.success(), "{output:?}");
    for script in [
        "git fsck --full; git status --short; git count-objects",
        "git log --stat | sha256sum; git log -p HEAD~2 | sha256sum; git describe",
        "git rev-list --objects --all | cut -d' ' -f1 | git cat-file --batch | sha256sum",
        "git cat-file -p HEAD:many/080 | sha256sum; git show HEAD:many/030 | tail -n 2",
        "git grep -c longer | tail -n 5; git grep -c 'line 1' HEAD~4 | sha256sum",
        "git diff HEAD~5 | sha256sum; git archive HEAD | sha256sum; git blame many/010 | tail -n 1",
        "echo x >> many/001; git diff --stat; git stash -q; git status -s; git stash pop -q; git checkout -q many/001",
        "git clone -q --no-local . clone && cd clone && git gc -q --prune=now && git fsck --strict &&
            git log --format=%H%T | sha256sum; git status -s; cd .. && rm -rf clone; git status -s",
    ] {
        same_in(folder.path(), &sh(script));
    }
}

/// A database that no process writes can be opened as `immutable`: without locks. With locks it is served as well, as
/// long as no process writes.
#[test]
fn sqlite3() {
    disk::program("sqlite3");
    let immutable = "file:database?immutable=1";
    served(&["sqlite3", "-readonly", immutable, "PRAGMA integrity_check"], &["database"]);
    same(&sh("sqlite3 -readonly 'file:database?immutable=1' .dump | sha256sum"));
    for database in [immutable, "database"] {
        same(&[
            "sqlite3",
            "-readonly",
            database,
            "SELECT count(*), sum(scattered), sum(length(words)) FROM line",
        ]);
        same(&[
            "sqlite3",
            "-readonly",
            database,
            "SELECT * FROM line WHERE scattered BETWEEN 10000000 AND 30000000",
        ]);
        same(&["sqlite3", "-readonly", database, "SELECT words FROM line ORDER BY scattered LIMIT 20000"]);
    }
    same(&["sqlite3", "database", "SELECT max(scattered) FROM line; SELECT nothing"]); // an error at the end
}

// ---- programs that are left to the kernel, in part or whole ---------------------------------------------------------

/// dd opens its file as descriptor 0, where C library streams might read unseen.
#[test]
fn dd() {
    same(&["dd", "if=binary", "bs=64k", "status=none"]);
    same(&["dd", "if=binary", "bs=12345", "skip=777", "count=1234", "status=none"]);
    same(&["dd", "if=text", "bs=1M", "skip=12345671", "iflag=skip_bytes,fullblock", "status=none"]);
    same(&["dd", "if=text", "bs=4095", "skip=20000", "status=none"]); // past the end
    let folder = scratch();
    let script = format!(
        "for flags in '' iflag=direct oflag=append conv=sparse; do
            dd if=binary of={0}/copy bs=256k status=none $flags; cmp binary {0}/copy && rm {0}/copy && echo same
        done",
        folder.path().display()
    );
    same(&sh(&script));
}

/// To an archive and back.
#[test]
fn tar_to_a_file() {
    let folder = scratch();
    let script = "
        tar cf all.tar -C $from binary many && tar tf all.tar | wc -l && tar xf all.tar && cmp binary $from/binary &&
        diff -r many $from/many && tar xOf all.tar many/099 | sha256sum && tar df all.tar && rm -r all.tar binary many";
    let script = format!("from={}; {script}", files().display());
    let report = same_in(folder.path(), &sh(&script));
    assert!(report.served() > size(&files().join("binary")), "{report:?}");
}

#[test]
fn cp() {
    let scratch = scratch();
    let script = format!(
        "cp binary {0}/copy && cmp binary {0}/copy && cp text {0}/copy && cmp text {0}/copy && echo same",
        scratch.path().display()
    );
    same(&sh(&script));
}

// ---- scripts --------------------------------------------------------------------------------------------

#[test]
fn scripts_with_pipes_and_redirections() {
    served(&sh("cat text binary | wc -c"), &["text", "binary"]);
    for script in [
        "(exec 3<binary; head -c 10 <&3; head -c 10 <&3; tail -c 1000 <&3) | sha256sum",
        "exec 3<text; read -r a <&3; read -r b <&3; (read -r c <&3; echo \"$c\"); read -r d <&3; \
         echo \"$a $b $d\"; cat <&3 | wc",
        "head -n 2 < text; { head -c 100; head -c 100; } < text; cat < binary | sha256sum",
        "wc -l < text; cat text | grep -c the; cat binary - < text | wc -c",
        "for f in many/00*; do cat $f > /dev/null && wc -c $f; done; exit 3",
        "a=$(cat many/150); printf %s \"$a\" | sha256sum; kill -TERM $$",
        "cat missing; cat many/010 missing many/020; echo $?",
    ] {
        same(&sh(script));
    }
    for script in [
        "while read -r -u 3 a b; do echo \"$b\"; done 3< many/199",
        "diff <(cat text) <(cat text) && echo same; mapfile -t lines < many/120; echo ${#lines[@]} ${lines[7]}",
        "set -o pipefail; cat binary | head -c 5; echo ${PIPESTATUS[@]}",
    ] {
        same(&["bash", "-c", script]);
    }
}

/// Scripts that write what they read, in a folder of their own.
#[test]
fn scripts_that_write() {
    let script = "
        cat $from/many/* > all; wc -c all; cat all >> twice; cat all >> twice; cmp all twice; sha256sum < twice
        exec 3<>all; head -c 5 <&3; echo written >&3; exec 3>&-; cat all | sha256sum
        cp all b; printf x | dd of=b bs=1 seek=70000 conv=notrunc status=none; cmp all b; cat b | sha256sum
        head -c 4097 all > c; cat c | wc -c; head -c 100 all > c; cat c | wc -c; cat all > c; cat c | sha256sum
        rm -f all twice b c";
    let scratch = scratch();
    let script = format!("from={}; {script}", files().display());
    same_in(scratch.path(), &sh(&script));
}

#[test]
fn many_children() {
    served(&sh("ls many/* | xargs -P 8 -n 3 grep -c the | sort"), &[]);
    let report = served(&["find", "many", "-type", "f", "-exec", "grep", "-c", "the", "{}", ";"], &[]);
    assert!(report.number("served", "files") >= disk::MANY_FILES as u64, "{report:?}");
    served(&["find", "many", "-type", "f", "-exec", "grep", "-c", "the", "{}", "+"], &[]);
    served(&sh("seq 40 | xargs -P 20 -I{} sh -c 'cat text | head -c {}00000 | sha256sum' | sort"), &[]);
}

/// The report has the format for programs.
#[test]
fn the_report_is_json() {
    let report = same(&["cat", "many/100", "a \"file\"\n\\ that is missing"]);
    let scratch = scratch();
    let path = scratch.path().join("report");
    std::fs::write(&path, &report.0).expect("the disk has room");
    let program = "import json, sys; r = json.load(open(sys.argv[1])); \
                   print(r['status'], r['program'][2], r['served']['bytes'], r['processes'])";
    let output = plain(python()).args(["-c", program]).arg(&path).output().expect("python3 starts");
    let bytes = size(Path::new(&files().join("many/100")));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("1 a \"file\"\n\\ that is missing {bytes} 1\n")
    );
}
