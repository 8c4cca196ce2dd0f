"""Threads: while an end waits, for a server or for a file system, the other threads of the interpreter run."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import quinion
from conftest import DATA

URL = "data://s/a"
FUSE = pathlib.Path(__file__).parents[3] / "testing" / "src" / "fuse.py"
FLUSH = "25"
# More than there is room for messages to a server that stands still.
ENDS = 200


def beside(call):
    """How long a call took, and how often another thread ran meanwhile."""
    times, has_begun, is_done = [], threading.Event(), threading.Event()

    def run():
        while not is_done.is_set():
            times.append(time.monotonic())
            has_begun.set()
            time.sleep(0.002)

    thread = threading.Thread(target=run)
    thread.start()
    has_begun.wait()
    begun = time.monotonic()
    call()
    ended = time.monotonic()
    is_done.set()
    thread.join()
    return ended - begun, sum(begun < at < ended for at in times)


@pytest.mark.parametrize("last", ["pin", "file"])
def test_they_run_while_a_stalled_server_is_told_of_an_end(client, server, last):
    """1. A server stands still while pins are dropped: the messages about them fill their room.
    2. The next end of a pin or file waits for room, up to a second: it did so under the GIL."""
    file = client.open(URL)
    files = [client.open(URL) for _ in range(ENDS)] if last == "file" else []
    pins = [file.pin(0, 1) for _ in range(ENDS)] if last == "pin" else []
    ends = [one.close for one in files] or [pins.pop for _ in range(ENDS)]
    server.process.send_signal(signal.SIGSTOP)
    try:
        found = (0.0, 0)
        while found[0] < 0.3:
            found = beside(ends.pop())
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert found[1] >= 10, found


def test_they_run_while_the_successor_of_a_server_is_asked(client, server):
    """A socket that takes connections and answers none was waited for under the GIL."""
    server.kill()
    os.unlink(server.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(server.name)
        listener.listen(8)
        took, ran = beside(lambda: client.owner_is_dead)
    assert took > 0.1 and ran >= 3, (took, ran)


PROGRAM = """
import sys, threading, time, quinion
name, path, stop = sys.argv[1:]
file = quinion.connect(name).open(path)
assert file.read_at(0, 1) == bytes(1)
open(stop, "w").close()
closing = threading.Event()
thread = threading.Thread(target=lambda: (closing.set(), file.close()))
thread.start()
closing.wait()
time.sleep(0.5)
print("closing" if thread.is_alive() else "closed", flush=True)
"""


def test_they_run_while_a_file_system_answers_no_close(server, tmp_path):
    """A file system that a thread of the same interpreter serves answers a close when that thread runs. The close was
    made under the GIL, so it never did."""
    if os.getuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("SKIPPED: it takes root and /dev/fuse to mount a file system in user space")
    point, stop = tmp_path / "point", tmp_path / "stop"
    point.mkdir()
    fuse = subprocess.Popen([sys.executable, FUSE, point, stop, FLUSH], stdout=subprocess.PIPE, text=True)
    try:
        assert fuse.stdout.readline() == "mounted\n"
        command = [sys.executable, "-c", PROGRAM, server.name, point / "file", stop]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        told = []
        reader = threading.Thread(target=lambda: told.append(program.stdout.readline()))
        reader.start()
        reader.join(timeout=30)
        assert told == ["closing\n"]
    finally:
        # With its server the connection ends, and each close that waits.
        fuse.kill()
        fuse.wait()
        subprocess.run(["umount", "-l", point], check=False)
    assert program.wait(timeout=300) == 0
