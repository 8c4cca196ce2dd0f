"""Crash: what a machine's crash leaves of databases that are written through the extension, and what SQLite makes of it.

    crash.py EXTENSION RECORDER FOLDER --journal wal --workers 2 --synchronous full
       |-- workers write one database, each by some connections; `recorder.c` notes each write, cut, sync and deletion
       |-- the notes are replayed; at each sync and commit, and at points between, some states that a disk may have then
       `-- each state is opened twice, by SQLite's own VFS and by the extension's, and must have
             - no fault (`PRAGMA integrity_check`),
             - the rows of one number of transactions: all that were committed, at most those that were begun.

Transaction N changes rows that follow from N, so the rows after it are known. The disk is that of `CrashDisk`
(`quinion-testing`), which itself is a backend of the cache and holds no files of SQLite:

    a sector that was written since the file's last sync       as it was then, or after any write to it since
    the file's size, and what was cut off                      those before some point since then, and none after it
    names: files that were made and deleted                    the same; durable by a synced deletion, and by the first
                                                               sync of a journal or log, when SQLite syncs the folder

With `--lose KIND` the disk does nothing at syncs of journals, logs or databases (`journal`, `wal`, `db`): then faults
must be found.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import time

SECTOR = 512
ROWS = 60
WRITE, TRUNCATE, SYNC, MAKE, DELETE, DELETE_SYNCED, BEGIN, COMMITTED = range(1, 9)


# --- the transactions ---


def changes(number):
    """The rows that transaction `number` changes; `None`: deletes."""
    chance = random.Random(number)
    rows = chance.sample(range(ROWS), chance.choice((1, 3, 12, 30)))
    return {row: None if chance.random() < 0.3 else number for row in rows}


def contents(row, number):
    word = (row * 2654435761 + number * 40503) & (2**64 - 1)
    return word.to_bytes(8, "little") * (1 + word % (1500 if row % 5 == 0 else 60))


def history(transactions):
    """Rows and their numbers after each transaction."""
    states = [{}]
    for number in range(1, transactions + 1):
        rows = {**states[-1], **changes(number)}
        states.append({row: at for row, at in rows.items() if at is not None})
    return states


# --- workers ---


def load(path):
    connection = sqlite3.connect(":memory:")
    connection.enable_load_extension(True)
    connection.load_extension(path)
    connection.close()


def connect(options, vfs, database):
    server = f"&server={options.server}" if options.server and vfs == "quinion" else ""
    uri = f"file:{database}?vfs={vfs}{server}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60)
    connection.execute("PRAGMA cache_size = 5")  # so that large transactions write before they are committed
    connection.execute(f"PRAGMA synchronous = {options.synchronous}")
    connection.execute("PRAGMA wal_autocheckpoint = 20")
    connection.execute(f"PRAGMA journal_mode = {options.journal}")
    return connection


def apply(connection, rows):
    for row, number in rows.items():
        if number is None:
            connection.execute("DELETE FROM t WHERE id = ?", (row,))
        else:
            new = (row, number, contents(row, number))
            connection.execute("INSERT OR REPLACE INTO t VALUES (?, ?, ?)", new)


def transact(options, connection, chance, recorder):
    connection.execute("BEGIN IMMEDIATE")
    number = connection.execute("SELECT number FROM counter").fetchone()[0] + 1
    # Not with a write-ahead log: SQLite 3.40.1 then leaves a frame without a checksum among those of the transaction,
    # which so ends there after a crash. `recorder.c` alone, without the extension, shows the same.
    if options.journal != "wal" and chance.random() < 0.2:
        connection.execute("SAVEPOINT s")
        apply(connection, {row: -number for row in range(ROWS)})
        connection.execute("ROLLBACK TO s")
    connection.execute("UPDATE counter SET number = ?", (number,))
    apply(connection, changes(number))
    if chance.random() < 0.15:
        connection.execute("ROLLBACK")
        return
    recorder.recorder_begin(ctypes.c_int64(number))
    connection.execute("COMMIT")
    recorder.recorder_committed(ctypes.c_int64(number))


def work(options):
    load(options.recorder)
    load(options.extension)
    recorder = ctypes.CDLL(options.recorder)
    chance = random.Random(options.work)
    # One worker in three goes past the extension.
    vfs = "recorder" if options.work % 3 == 2 else "quinion"
    connections = [connect(options, vfs, options.database) for _ in range(options.connections)]
    until = options.transactions // options.workers
    for turn in range(until):
        at = chance.randrange(len(connections))
        connection = connections[at]
        if chance.random() < 0.05:
            connection.close()
            connection = connections[at] = connect(options, vfs, options.database)
        try:
            transact(options, connection, chance, recorder)
            if chance.random() < 0.06:
                connection.execute(chance.choice(("VACUUM", "PRAGMA incremental_vacuum", "PRAGMA wal_checkpoint(TRUNCATE)")))
        except sqlite3.OperationalError as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if "locked" not in str(error):
                raise
        if options.server and turn % 4 == 0:
            time.sleep(0.1)  # the file's times settle, and pages of the server are read
            connection.execute("SELECT sum(length(body)) FROM t").fetchall()
    if vfs == "quinion":
        connections[0].execute("SELECT count(*) FROM t").fetchall()
        print(connections[0].execute("PRAGMA quinion_database").fetchone()[0])
    for connection in connections:
        connection.close()


# --- the disk ---


class File:
    def __init__(self, data=b""):
        self.durable = bytes(data)
        self.pending = []  # (position, data), or (size, None)

    def sync(self):
        self.durable, self.pending = self.present(), []

    def present(self):
        return self.state(lambda changed: len(self.pending), lambda count: count)

    def state(self, sizes, writes):
        """The contents with so many of the changes of size, and so many of the writes to each sector, as these say."""
        pending = self.pending
        journal = sizes(pending)
        size = len(self.durable)
        cut = []  # after this change, nothing from here on is left of what was before
        for at, (position, data) in enumerate(pending[:journal]):
            if data is None:
                cut.append((at, position))
                size = position
            else:
                size = max(size, position + len(data))
        out = bytearray(self.durable[:size].ljust(size, b"\0"))
        for _, position in cut:
            out[position:] = bytes(max(size - position, 0))
        touched = {}
        for at, (position, data) in enumerate(pending):
            if data is None:
                continue
            for sector in range(position // SECTOR, -(-(position + len(data)) // SECTOR)):
                touched.setdefault(sector, []).append(at)
        for sector, ats in touched.items():
            start, end = sector * SECTOR, min((sector + 1) * SECTOR, size)
            if start >= size:
                continue
            for at in ats[: writes(len(ats))]:
                position, data = pending[at]
                first, last = max(start, position), min(end, position + len(data))
                # What the journal cut off later does not come back.
                last = min([last] + [edge for later, edge in cut if later > at])
                if first < last:
                    out[first:last] = data[first - position : last - position]
        return bytes(out)


class Disk:
    def __init__(self, folder, options):
        self.options = options
        self.names = {name: File(open(os.path.join(folder, name), "rb").read()) for name in os.listdir(folder)}
        self.durable_names = dict(self.names)
        self.pending_names = []  # (name, file or None)

    def kind(self, name):
        return "wal" if name.endswith("-wal") else "journal" if name.endswith("-journal") else "db"

    def do(self, kind, name, position, data):
        if kind == MAKE:
            self.names[name] = File()
            self.pending_names.append((name, self.names[name]))
        elif kind in (DELETE, DELETE_SYNCED):
            self.names.pop(name, None)
            self.pending_names.append((name, None))
            if kind == DELETE_SYNCED:
                self.sync_names()
        elif kind == WRITE:
            self.names[name].pending.append((position, data))
        elif kind == TRUNCATE:
            self.names[name].pending.append((position, None))
        elif kind == SYNC and self.kind(name) != self.options.lose:
            self.names[name].sync()
            if any(file is self.names[name] for _, file in self.pending_names):
                self.sync_names()

    def sync_names(self):
        for name, file in self.pending_names:
            self.durable_names[name] = file
        self.durable_names = {name: file for name, file in self.durable_names.items() if file}
        self.pending_names = []

    def state(self, chance):
        """Files by name, as a crash may leave them."""
        way = chance.choice(("all", "none", "some", "some", "files"))
        names = dict(self.durable_names)
        count = {"all": len(self.pending_names), "none": 0}.get(way, chance.randint(0, len(self.pending_names)))
        names.update(self.pending_names[:count])
        out = {}
        for name, file in sorted(names.items()):
            if file is None:
                continue
            # Of some files all, of some nothing, or sector by sector.
            each = chance.choice(("all", "none")) if way == "files" else way
            pick = {"all": lambda n: n, "none": lambda n: 0}.get(each, lambda n: chance.randint(0, n))
            out[name] = file.state(lambda pending: pick(len(pending)), pick)
        return out


def notes(path):
    with open(path, "rb") as file:
        while head := file.read(24):
            kind, name_bytes, position, length = struct.unpack("<IIqq", head)
            name = file.read(name_bytes).decode()
            yield kind, name, position, file.read(length) if kind == WRITE else b""


# --- the check ---


def found(options, vfs, folder):
    """What the database has after SQLite has opened it."""
    connection = sqlite3.connect(f"file:{folder}/x.db?vfs={vfs}", uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA cache_size = 5")
        said = connection.execute("PRAGMA integrity_check").fetchall()
        if said != [("ok",)]:
            return f"integrity_check says {said[:3]}"
        number = connection.execute("SELECT number FROM counter").fetchone()[0]
        rows = {}
        for row, at, body in connection.execute("SELECT id, number, body FROM t"):
            if body != contents(row, at):
                return f"row {row} has not the contents of transaction {at}"
            rows[row] = at
        return number, rows
    except sqlite3.DatabaseError as error:
        return f"it cannot be read: {error}"
    finally:
        connection.close()


class Check:
    def __init__(self, options, states):
        self.options, self.states = options, states
        self.tried, self.faults, self.rolled_back = 0, [], 0

    def crash(self, disk, at, seed, committed, begun):
        files = disk.state(random.Random(seed))
        for vfs in ("unix", "quinion"):
            folder = os.path.join(self.options.folder, f"state-{vfs}-{self.tried}")
            os.mkdir(folder)
            for name, data in files.items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(data)
            fault = self.fault(found(self.options, vfs, folder), committed, begun)
            if fault:
                self.faults.append(f"crash after note {at}, seed {seed}, opened by {vfs}: {fault[:200]}")
            shutil.rmtree(folder)
        self.tried += 1

    def fault(self, found, committed, begun):
        if isinstance(found, str):
            return found
        number, rows = found
        # With FULL, SQLite does not sync the folder after it deletes the journal of a commit: the last may be undone.
        unsure = self.options.journal == "delete" and self.options.synchronous == "full"
        if not committed - unsure <= number <= begun:
            return f"it has {number} transactions, and {committed} were committed, {begun} begun"
        self.rolled_back += number < begun
        if rows != self.states[number]:
            return f"its rows are not those of transaction {number}"
        return None


def replay(options, start, path):
    everything = list(notes(path))
    states = history(max(position for kind, _, position, _ in everything if kind in (BEGIN, COMMITTED)))
    chance, disk, check = random.Random(options.seed), Disk(start, options), Check(options, states)
    committed = begun = 0
    syncs = [at for at, note in enumerate(everything) if note[0] in (SYNC, DELETE, DELETE_SYNCED, COMMITTED)]
    chosen = set(syncs if len(syncs) <= options.crashes else chance.sample(syncs, options.crashes))
    chosen |= set(chance.sample(range(len(everything)), min(options.crashes // 2, len(everything))))
    for at, (kind, name, position, data) in enumerate(everything):
        if at in chosen:
            check.crash(disk, at, chance.random(), committed, begun)
        if kind == BEGIN:
            begun = max(begun, position)
        elif kind == COMMITTED:
            committed = max(committed, position)
        else:
            disk.do(kind, name, position, data)
        if at in chosen and kind in (SYNC, DELETE, DELETE_SYNCED, COMMITTED):
            check.crash(disk, at + 1, chance.random(), committed, begun)
        if len(check.faults) > 8:
            break
    else:
        for name, file in disk.names.items():
            with open(os.path.join(options.folder, "run", name), "rb") as there:
                assert there.read() == file.present(), f"{name}: the notes are not what was done"
    kinds = [kind for kind, *_ in everything]
    told = {"notes": len(kinds), "syncs": kinds.count(SYNC), "transactions": committed, "crashes": check.tried,
            "without_last": check.rolled_back, "faults": check.faults}
    return told


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extension")
    parser.add_argument("recorder")
    parser.add_argument("folder")
    parser.add_argument("--journal", default="wal")
    parser.add_argument("--synchronous", default="full")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--transactions", type=int, default=60)
    parser.add_argument("--crashes", type=int, default=200, help="points of syncs at most; half as many between")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server")
    parser.add_argument("--lose", choices=("journal", "wal", "db"), help="leave out the syncs of these files")
    parser.add_argument("--work", type=int, help="(a worker)")
    parser.add_argument("--database")
    options = parser.parse_args()
    if options.work is not None:
        return work(options)
    start, run, path = (os.path.join(options.folder, name) for name in ("start", "run", "notes"))
    os.mkdir(start)
    made = sqlite3.connect(os.path.join(start, "x.db"), isolation_level=None)
    made.execute("PRAGMA auto_vacuum = INCREMENTAL")
    made.execute("CREATE TABLE counter (number)")
    made.execute("INSERT INTO counter VALUES (0)")
    made.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, number, body)")
    made.execute("CREATE INDEX i ON t (number)")
    made.execute(f"PRAGMA journal_mode = {options.journal}")
    made.close()
    shutil.copytree(start, run)
    words = [sys.executable, *sys.argv, "--database", os.path.join(run, "x.db")]
    environment = {**os.environ, "QUINION_RECORD": path}
    pipe = subprocess.PIPE
    workers = [
        subprocess.Popen([*words, "--work", str(at)], env=environment, stdout=pipe, text=True)
        for at in range(options.workers)
    ]
    said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        return "a worker has failed"
    load(options.extension)
    told = replay(options, start, path)
    counters = [json.loads(line) for line in "".join(said).splitlines()]
    told["hits"] = sum(each["hits"] for each in counters)
    told["server_reads"] = sum(each["server_reads"] for each in counters)
    print(json.dumps(told))
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
