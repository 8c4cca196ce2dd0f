"""Storm: processes write and read one database, some through the cache and some not, and all must see one history.

    storm.py EXTENSION FOLDER --seconds 10 --seed 1 --journal wal --page 4096 --kills 5
       |-- worker quinion, worker quinion, worker unix     each with some threads, each thread with a connection
       `-- kills one of them now and then, and starts another in its place

A transaction that writes adds 1 to a counter, gives some rows this number and contents that follow from it, and notes
the number in a second table. So in each transaction that reads
  - a row's number is the one that was noted for it, in another tree of pages,
  - its contents are those of its number,
  - no number is above the counter, and the counter is not below what a connection without the cache saw before.
With `--server` the pages of the workers that have the cache are those of a server. With `--seldom` all writes fall into
the first quarter of each 0.6 s, so that the times of the file settle, and revisions are read.
With `--visits` connections come and go, mostly to read, with pauses in which there may be none: logs are deleted, and
readers alone open the next one. A page from before any change would break one of these. The database is larger than the cache. The last line says how
many reads the cache answered, so that a storm that went past it can be told.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

ROWS = 12000
SOME = 12


def contents(row, number):
    """What a row holds: up to four pages, a multiple of eight bytes."""
    word = (row * 2654435761 + number * 40503) & (2**64 - 1)
    return word.to_bytes(8, "little") * (1 + word % 1400 if row % 7 == 0 else 1 + word % 200)


def connect(options, vfs):
    return prepare(idle(options, vfs))


def idle(options, vfs):
    """A connection that has read nothing, and so has no lock."""
    server = f"&server={options.server}" if options.server and vfs == "quinion" else ""
    return sqlite3.connect(f"file:{options.database}?vfs={vfs}{server}", uri=True, isolation_level=None, timeout=30)


def prepare(connection):
    connection.execute("PRAGMA cache_size = 20")  # pages: SQLite's own cache is not what is looked at
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def load(options):
    """Has this process know the VFS."""
    connection = sqlite3.connect(":memory:")
    connection.enable_load_extension(True)
    connection.load_extension(options.extension)


def make(options):
    connection = connect(options, "unix")
    connection.execute(f"PRAGMA page_size = {options.page}")
    connection.execute(f"PRAGMA journal_mode = {options.journal}")
    connection.executescript(
        "CREATE TABLE counter (number); INSERT INTO counter VALUES (0);"
        "CREATE TABLE data (row INTEGER PRIMARY KEY, number, contents);"
        "CREATE TABLE noted (row INTEGER PRIMARY KEY, number);"
    )
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO data VALUES (?, 0, ?)", ((row, contents(row, 0)) for row in range(ROWS)))
    connection.executemany("INSERT INTO noted VALUES (?, 0)", ((row,) for row in range(ROWS)))
    connection.execute("COMMIT")
    connection.close()


class Wrong(Exception):
    """A read that no history explains."""


class Worker:
    """One thread's connection, and what it does."""

    def __init__(self, options, vfs, seed):
        self.options, self.vfs, self.random = options, vfs, random.Random(seed)
        self.connection = connect(options, vfs)
        self.plain = connect(options, "unix")
        self.idle = 0  # transactions that read while the log had no frame
        self.shared = 0  # transactions that read pages of the server
        self.coming = []

    def write(self):
        """A transaction that is kept, or given up after more than SQLite's own cache holds was written."""
        execute, draw = self.connection.execute, self.random
        execute("BEGIN IMMEDIATE")
        number = execute("SELECT number FROM counter").fetchone()[0] + 1
        execute("UPDATE counter SET number = ?", (number,))
        keep = draw.random() < 0.8
        for row in draw.sample(range(ROWS), SOME if keep else 200):
            execute("UPDATE data SET number = ?, contents = ? WHERE row = ?", (number, contents(row, number), row))
            execute("UPDATE noted SET number = ? WHERE row = ?", (number, row))
        execute("COMMIT" if keep else "ROLLBACK")

    def read(self):
        """Some rows, or all, as one transaction sees them."""
        floor = self.plain.execute("SELECT number FROM counter").fetchone()[0]
        execute = self.connection.execute
        execute("BEGIN")
        try:
            counter = execute("SELECT number FROM counter").fetchone()[0]
            log = self.options.database + "-wal"
            self.idle += os.path.exists(log) and os.path.getsize(log) == 0
            if counter < floor:
                raise Wrong(f"the counter is {counter}, and was {floor} before")
            if self.random.random() < (0.02 if self.options.visits else 0.1):
                found = execute("SELECT data.row, data.number, contents, noted.number FROM data JOIN noted USING (row)")
                self.check(found.fetchall(), counter, ROWS)
            for row in self.random.sample(range(ROWS), SOME):
                found = execute(
                    "SELECT data.row, data.number, contents, noted.number FROM data JOIN noted USING (row) WHERE row = ?",
                    (row,),
                )
                self.check(found.fetchall(), counter, 1)
        finally:
            execute("ROLLBACK")
            if self.options.server and self.vfs == "quinion":
                told = json.loads(execute("PRAGMA quinion_database").fetchone()[0])
                self.shared += told["last_transaction"] == "cached by the server"

    def check(self, rows, counter, count):
        if len(rows) != count:
            raise Wrong(f"{len(rows)} rows were found and not {count}")
        for row, number, found, noted in rows:
            if number != noted or number > counter or found != contents(row, number):
                same = found == contents(row, number)
                raise Wrong(f"row {row} has number {number}, noted {noted}, counter {counter}, own contents: {same}")

    def other(self):
        """What happens seldom."""
        draw = self.random
        kind = draw.choice(["checkpoint", "checkpoint", "reopen", "vacuum", "mode", "check"])
        execute = self.connection.execute
        if kind == "checkpoint":
            execute(f"PRAGMA wal_checkpoint({draw.choice(['PASSIVE', 'FULL', 'RESTART', 'TRUNCATE'])})").fetchall()
        elif kind == "reopen":
            self.connection.close()
            self.connection = connect(self.options, self.vfs)
        elif kind == "vacuum" and draw.random() < 0.1:
            execute("VACUUM")
        elif kind == "mode" and self.options.switch:
            execute(f"PRAGMA journal_mode = {draw.choice(['DELETE', 'TRUNCATE', 'PERSIST', 'WAL'])}").fetchall()
        elif kind == "check" and draw.random() < 0.1:
            found = execute("PRAGMA integrity_check").fetchall()
            if found != [("ok",)]:
                raise Wrong(f"integrity_check: {found[:3]}")

    def visit(self):
        """A connection that was opened some time ago comes, reads mostly, and goes."""
        time.sleep(self.random.uniform(0, 0.4))
        if not self.coming:
            self.coming = [idle(self.options, self.vfs) for _ in range(10)]
        self.plain = connect(self.options, "unix")  # first: the cache does not hear that it makes the index
        self.connection = prepare(self.coming.pop())
        # What one process has cached, another changes, and leaves.
        for _ in range(self.random.randrange(1, 4)):
            self.step(writes=0.02 if self.vfs == "quinion" else 0.15)
        self.leave()

    def leave(self):
        self.connection.close()
        self.plain.close()

    def step(self, writes=0.3):
        choice = self.random.random()
        if self.options.seldom and time.time() % 0.6 > 0.15:
            choice = writes  # it reads
        try:
            if choice < writes:
                self.write()
            elif choice < 0.95:
                self.read()
            else:
                self.other()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) and "busy" not in str(error):
                raise
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")


def work(options):
    """A worker process."""
    load(options)
    end, wrong, ended = time.monotonic() + options.seconds, [], []

    def thread(number):
        try:
            worker = Worker(options, options.vfs, options.seed * 100 + number)
            if options.visits:
                worker.leave()
            while time.monotonic() < end and not wrong:
                worker.visit() if options.visits else worker.step()
            worker.leave()
            ended.append(worker)
        except Exception as error:  # noqa: BLE001: whatever it is ends the storm
            wrong.append(f"{type(error).__name__}: {error}")

    # The pages stay as long as it is open. It has no lock, unless it reads.
    last = idle(options, options.vfs)
    threads = [threading.Thread(target=thread, args=(number,)) for number in range(options.threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    stats = json.loads(last.execute("PRAGMA quinion_stats").fetchone()[0]) if options.vfs == "quinion" else {}
    print(json.dumps({"vfs": options.vfs, "wrong": wrong, "hits": stats.get("hits", 0), "misses": stats.get("misses", 0),
                      "idle": sum(worker.idle for worker in ended),
                      "shared": sum(worker.shared for worker in ended), "direct": stats.get("direct_reads", 0)}), flush=True)
    return 1 if wrong else 0


def storm(options):
    make(options)
    draw = random.Random(options.seed)
    end, seeds = time.monotonic() + options.seconds, iter(range(options.seed, options.seed + 10000))

    def start(vfs):
        left = max(1.0, end - time.monotonic())
        words = [sys.executable, __file__, options.extension, options.folder, "--worker", vfs]
        words += ["--seconds", str(left), "--seed", str(next(seeds)), "--threads", str(options.threads)]
        words += ["--switch"] if options.switch else []
        words += ["--visits"] if options.visits else []
        words += ["--seldom"] if options.seldom else []
        words += ["--server", options.server] if options.server else []
        environment = {**os.environ, "QUINION_SQLITE_MEMORY": options.memory}
        return vfs, subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    running = [start(vfs) for vfs in ["quinion", "quinion", "unix"]]
    kills = sorted(draw.uniform(0, options.seconds * 0.9) for _ in range(options.kills))
    begun = time.monotonic()
    for at in kills:
        time.sleep(max(0.0, begun + at - time.monotonic()))
        place = draw.randrange(len(running))
        vfs, process = running[place]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        running[place] = start(vfs)
    told = []
    for vfs, process in running:
        output, _ = process.communicate(timeout=options.seconds + 120)
        told.append(json.loads(output) if output else {"vfs": vfs, "wrong": [f"ended with {process.returncode}"]})
    check = connect(options, "unix")
    whole = check.execute("PRAGMA integrity_check").fetchall()
    wrong = [each for worker in told for each in worker["wrong"]] + ([] if whole == [("ok",)] else [str(whole[:3])])
    number = check.execute("SELECT number FROM counter").fetchone()[0]
    hits = sum(worker.get("hits", 0) for worker in told)
    shared = sum(worker.get("shared", 0) for worker in told)
    print(json.dumps({"wrong": wrong, "transactions": number, "hits": hits, "shared": shared, "workers": told}))
    return 1 if wrong or hits == 0 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extension")
    parser.add_argument("folder")
    parser.add_argument("--worker", dest="vfs")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", default="wal")
    parser.add_argument("--page", type=int, default=4096)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", default="16M")
    parser.add_argument("--switch", action="store_true", help="other journal modes now and then")
    parser.add_argument("--server", help="the socket of a server that shares the pages of all workers")
    parser.add_argument("--seldom", action="store_true", help="pauses between writes")
    parser.add_argument("--visits", action="store_true", help="connections that come and go")
    options = parser.parse_args()
    options.database = os.path.join(options.folder, "storm.db")
    return work(options) if options.vfs else storm(options)


if __name__ == "__main__":
    sys.exit(main())
