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

mod disk;
use disk::{quinion, scratch};

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
files, (told, tells) = [served(path) for path in paths], os.pipe()
if way == 'outside':
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
    let folder = scratch();
    let mut command = quinion();
    command.env_remove("QUINION_WAIT_MS"); // an answer is late as soon as anywhere
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--"]);
    let output = command.args(["python3", "-c", CUTS, way]).arg(folder.path()).output().expect("it starts");
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
