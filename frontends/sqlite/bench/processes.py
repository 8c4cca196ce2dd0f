"""Processes: random point reads of one SQLite database by several processes, in one bound of memory.

    processes.py DB --reads ./point_reads --extension libquinion_vfs.so --server quinion-serve

DB is one that `point_reads make` has made. The alternatives run in turn, each in a control group whose processes, page
cache included, may use `--memory` MiB:

    shared     the extension, with a server that has most of the bound for pages
    private    the extension, each process with its part of it
    unix       SQLite's own VFS: the kernel's page cache
    mmap       the same, with mmap_size above the database's size

Each process reads all rows once; then all begin together. A line of JSON for each run: operations a second and CPU
microseconds for each of all processes, their median of P99, the peak of the group's memory in MiB. Needs root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

V2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
ROOT = "/sys/fs/cgroup" if V2 else "/sys/fs/cgroup/memory"
LIMIT, PEAK = ("memory.max", "memory.peak") if V2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
OTHERS = 64  # MiB of the bound that are not pages: heaps, stacks, the server's tables


class Group:
    """A control group with a limit; processes that `enter` are in it."""

    def __init__(self, mib):
        self.path = os.path.join(ROOT, f"quinion-sqlite-{os.getpid()}")
        os.mkdir(self.path)
        self.write(LIMIT, mib << 20)

    def write(self, name, value):
        with open(os.path.join(self.path, name), "w") as file:
            file.write(str(value))

    def enter(self):
        self.write("cgroup.procs", os.getpid())

    def peak(self):
        with open(os.path.join(self.path, PEAK)) as file:
            return int(file.read()) >> 20

    def remove(self):
        for _ in range(50):
            try:
                return os.rmdir(self.path)
            except OSError:
                time.sleep(0.1)


def forget(database):
    """Has the kernel drop the database's pages, which may be another group's."""
    descriptor = os.open(database, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def run(options, way):
    group, server, folder = Group(options.memory), None, tempfile.mkdtemp()
    environment = {**os.environ, "POINT_READS_WAIT": "1", "QUINION_SQLITE_MEMORY": "16M"}
    vfs, extension, mapped = "unix", "-", 0
    if way in ("shared", "private"):
        vfs, extension = "quinion", options.extension
    if way == "private":
        environment["QUINION_SQLITE_MEMORY"] = f"{(options.memory - OTHERS) // options.processes}M"
    if way == "mmap":
        mapped = 2 * os.path.getsize(options.database)
    forget(options.database)
    if way == "shared":
        os.chmod(folder, 0o700)
        socket = os.path.join(folder, "socket")
        # SQLite's own caches of 2 MB, and what else a process has, are in the bound, too.
        pages = options.memory - OTHERS - 8 * options.processes
        words = [options.server, "--name", socket, "--memory", f"{pages}M"]
        server = subprocess.Popen(words, preexec_fn=group.enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not os.path.exists(socket):
            time.sleep(0.05)
        vfs += f"&server={socket}"
    words = [options.reads, options.database, vfs, extension, "1", str(options.seconds), str(mapped)]
    pipe = subprocess.PIPE
    readers = [
        subprocess.Popen(words, preexec_fn=group.enter, stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(options.processes)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n", "a process has failed"
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    told = [json.loads(reader.communicate()[0]) for reader in readers]
    peak = group.peak()
    if server:
        server.terminate()
        server.wait()
    group.remove()
    rate = sum(each["ops_per_second"] for each in told)
    cpu = statistics.mean(each["cpu_us_per_op"] for each in told)
    p99 = statistics.median(each["p99_ns"] for each in told)
    print(json.dumps({"way": way, "ops_per_second": rate, "cpu_us_per_op": round(cpu, 3), "p99_ns": p99,
                      "memory_mib": peak}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database")
    parser.add_argument("--reads", required=True)
    parser.add_argument("--extension", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--memory", type=int, default=1024, help="MiB")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", default="shared,private,unix,mmap")
    options = parser.parse_args()
    ways = options.ways.split(",")
    for turn in range(options.turns):
        for at in range(len(ways)):
            run(options, ways[(at + turn) % len(ways)])


if __name__ == "__main__":
    sys.exit(main())
