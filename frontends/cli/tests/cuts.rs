//! Cuts: files that are cut by `open(O_RDONLY | O_TRUNC)`, of which the kernel tells no lease: while the
//! cache's owner is stopped, by processes that cannot tell it, or by ones that are not under `run`.
//!
//! ```text
//!   parent   reads FILE ....................................... reads it by the same descriptor: nothing is left
//!   child               (the owner is stopped)  cuts FILE, ends
//! ```
//!
//! While the owner is stopped the parent may read the old bytes. When it goes on, and has a processor, it may not.
#![cfg(target_os = "linux")]

use std::process::Command;

mod disk;
use disk::{plain, quinion, scratch};

/// Cuts files in one of some ways, and prints how many show their old bytes for good.
const CUTS: &str = r"
import os, signal, subprocess, sys, time
way, folder, owner = sys.argv[1], sys.argv[2], os.getppid()
paths = [f'{folder}/{way}{number}' for number in range(40 if way == 'many' else 1)]
other = f'{folder}/other'
for path in paths + [other]:
    with open(path, 'wb') as file: file.write(b'old' * 3000)
def served(path):
    file = os.open(path, os.O_RDONLY)
    assert os.pread(file, 10, 0) == os.pread(file, 10, 300)
    return file
def cut(): [os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)) for path in paths]
def stop(): os.kill(owner, signal.SIGSTOP)
def go_on(): os.kill(owner, signal.SIGCONT)
files = [served(path) for path in paths]
if way == 'written before':
    with open(paths[0], 'r+b') as file: file.write(b'old')
    time.sleep(0.3) # times are so old then that they are believed
    for _ in range(50): [os.pread(file, 10, at) for file in files for at in range(0, 9000, 1000)]
if way in ('outside', 'written before'):
    plain = {name: value for name, value in os.environ.items() if 'QUINION' not in name and name != 'LD_PRELOAD'}
    code = 'import os, sys; os.open(sys.argv[1], os.O_RDONLY | os.O_TRUNC)'
    subprocess.run([sys.executable, '-c', code, *paths], env=plain, check=True)
elif os.fork() == 0:
    if way in ('many', 'ends'):
        served(other)
        stop()
        cut()
    elif way == 'no viewer':
        stop()
        cut()
    elif way == 'was late':
        stop()
        served(other)
        go_on()
        time.sleep(0.5)
        cut()
    os._exit(0)
else:
    assert os.wait()[1] == 0
    go_on()
for _ in range(100): # the owner may have no processor for a while
    old = [file for file in files if os.pread(file, 10, 0)]
    if not old: break
    time.sleep(0.1)
print(len(old))
";

#[track_caller]
fn nothing_old_is_left(way: &str) {
    nothing_old_is_left_by(quinion(), &[], way);
}

/// Like `nothing_old_is_left`, by a command that starts Quinion, and with these options of `run`.
#[track_caller]
fn nothing_old_is_left_by(mut command: Command, options: &[&str], way: &str) {
    let folder = scratch();
    command.env_remove("QUINION_WAIT_MS"); // an answer is late as soon as anywhere
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none"]).args(options);
    command.args(["--", "python3", "-c", CUTS, way]).arg(folder.path());
    let output = command.output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{output:?}");
}

/// 1. The owner is stopped.
/// 2. A viewer cuts more files than it can leave word of.
#[test]
fn a_stopped_owner_hears_of_many_cuts() {
    nothing_old_is_left("many");
}

/// 1. The owner is stopped.
/// 2. A viewer cuts a file, and ends before the owner goes on.
#[test]
fn a_stopped_owner_hears_of_a_cut_by_a_viewer_that_has_ended() {
    nothing_old_is_left("ends");
}

/// 1. The owner is stopped.
/// 2. A forked child that is no viewer yet cuts a file.
#[test]
fn a_stopped_owner_hears_of_a_cut_by_a_child_that_is_no_viewer() {
    nothing_old_is_left("no viewer");
}

/// 1. A forked child wants to be served, and the owner is too late for that.
/// 2. The owner is well again, and the child cuts a file.
#[test]
fn an_owner_hears_of_a_cut_by_a_child_for_which_it_was_late() {
    nothing_old_is_left("was late");
}

#[test]
fn an_owner_hears_of_a_cut_by_a_process_that_is_not_under_run() {
    nothing_old_is_left("outside");
}

/// Where times are looked at they are not as long as there is a lease.
#[test]
fn an_owner_that_looks_at_times_hears_of_a_cut_under_a_lease() {
    nothing_old_is_left_by(quinion(), &["--coherence", "times"], "outside");
    nothing_old_is_left_by(quinion(), &["--coherence", "times"], "written before");
}

/// The user may have no watch, or no descriptor for them. A cut could not be heard, so nothing is served.
#[test]
fn an_owner_that_can_watch_no_file_shows_no_old_bytes() {
    for limit in ["watches", "instances"] {
        let script = format!("echo 0 > /proc/sys/user/max_inotify_{limit} && exec \"$@\"");
        let unshared = |program: &Command| {
            let mut command = plain("unshare");
            command.args(["--user", "--map-root-user", "sh", "-c", &script, "sh"]).arg(program.get_program());
            command
        };
        if !unshared(&Command::new("true")).status().is_ok_and(|status| status.success()) {
            return println!("SKIPPED: there are no name spaces of users here");
        }
        nothing_old_is_left_by(unshared(&quinion()), &[], "outside");
    }
}
