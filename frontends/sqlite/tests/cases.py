"""Cases: orders of events, most of them such that pages from before a change could be used again. Each went wrong once.

    cases.py EXTENSION FOLDER NAME
       |-- this process reads and writes through the cache, with connections that use little memory of SQLite's own
       `-- others (`other`) write without it

A row is `old` or `new`; `changed` counts the new ones. The end of each case says what must be found.
"""

import ctypes
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import time

EXTENSION, FOLDER, NAME = sys.argv[1:]
DATABASE = os.path.join(FOLDER, "x.db")
ROWS = 400


def connect(words=""):
    connection = sqlite3.connect(f"file:{DATABASE}?vfs=quinion{words}", uri=True, isolation_level=None)
    connection.execute("PRAGMA cache_size = 5")
    return connection


def idle():
    """A connection that has read nothing. It keeps the process's pages."""
    return sqlite3.connect(f"file:{DATABASE}?vfs=quinion", uri=True, isolation_level=None)


def changed(connection):
    return connection.execute("SELECT count(*) FROM t WHERE substr(b, 2999) != x'0000'").fetchone()[0]


def change(which):
    return f"UPDATE t SET b = zeroblob(2999) || x'ff' WHERE {which}"


def other(*statements, pause=False, database=DATABASE):
    """Another process, which has a connection without the cache. With a pause, it waits before the last of them."""
    program = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA cache_size = 5')\n"
        "for statement in sys.argv[3:-1]: connection.execute(statement).fetchall()\n"
        "if sys.argv[2] == 'True': print('there', flush=True); sys.stdin.read()\n"
        "connection.execute(sys.argv[-1]).fetchall()\n"
        "connection.close()\n"
    )
    words = [sys.executable, "-c", program, database, str(pause), *statements]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if pause:
        assert process.stdout.readline() == b"there\n"
        return process
    process.communicate()
    assert process.returncode == 0


def make(journal, contents="zeroblob(3000)", database=DATABASE):
    rows = f"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {ROWS})"
    other(
        f"PRAGMA journal_mode = {journal}",
        "CREATE TABLE t (a INTEGER PRIMARY KEY, b)",
        f"{rows} INSERT INTO t SELECT x, {contents} FROM n",
        database=database,
    )


def expect(found, wanted, when):
    if found != wanted:
        sys.exit(f"{NAME}: {found} rows are new and not {wanted}, {when}")


def a_log_between_two_journals():
    """The log's writers change the file, by a checkpoint, and not its change counter."""
    make("delete")
    connection = connect()
    expect(changed(connection), 0, "at first")
    connection.execute("PRAGMA journal_mode = wal").fetchall()
    other(change("a = 300"), "PRAGMA wal_checkpoint")
    connection.execute("PRAGMA journal_mode = delete").fetchall()
    expect(changed(connection), 1, "after the log")


def a_log_of_connections_that_exclude_others():
    """They keep the wal-index in memory of their own, and lock the file alone."""
    make("wal")
    keeper = idle()
    for wanted in [0, 1]:
        connection = idle()
        connection.execute("PRAGMA locking_mode = exclusive").fetchall()
        expect(changed(connection), wanted, "with an exclusive lock")
        connection.close()
        other(change("a = 300"))
    keeper.close()


def an_immutable_reader_of_what_is_not_committed():
    """Its URI is wrong, and it reads what it reads. Other connections have nothing of it."""
    make("delete")
    keeper = idle()
    writer = other("BEGIN", change("true"), "ROLLBACK", pause=True)
    wrong = connect("&immutable=1")
    if changed(wrong) < ROWS // 2:
        sys.exit("nothing was spilled to the file before the end of the transaction")
    writer.communicate()
    expect(changed(keeper), 0, "in a connection of before")
    expect(changed(connect()), 0, "in a connection of after")


def a_file_that_was_copied_over():
    """The new database has the change counter of the old one. A connection that is opened then reads the new one."""
    make("delete")
    another = DATABASE + ".new"
    make("delete", "zeroblob(2999) || x'ff'", another)
    keepers = idle(), idle()
    for words in ["", "&immutable=1"]:
        connection = connect(words)
        expect(changed(connection), 0, f"at first {words}")
        keepers += (connection,)
    subprocess.check_call(["cp", another, DATABASE])
    for words in ["", "&immutable=1", "&mode=ro"]:
        expect(changed(connect(words)), ROWS, f"after the copy {words}")


def a_connection_that_is_opened_after_own_writes():
    """It finds the pages that were cached before, but for those that were written."""
    for journal in ["delete", "wal"]:
        if os.path.exists(DATABASE):
            os.unlink(DATABASE)
        make(journal)
        keeper = connect()
        keeper.execute(change("a = 300"))  # a file that was written just now is not served, if its log has nothing
        changed(keeper)
        keeper.execute(change("a = 301"))
        keeper.execute("PRAGMA wal_checkpoint").fetchall()
        before = json.loads(keeper.execute("PRAGMA quinion_stats").fetchone()[0])["misses"]
        expect(changed(connect()), 2, "after own writes")
        missed = json.loads(keeper.execute("PRAGMA quinion_stats").fetchone()[0])["misses"] - before
        if missed > ROWS // 10:
            sys.exit(f"{missed} pages were read again, with journal mode {journal}")
        keeper.close()


def numbers(connection):
    """What was read so far: of the cache, into it, and past it."""
    stats = json.loads(connection.execute("PRAGMA quinion_stats").fetchone()[0])
    return stats["hits"], stats["misses"], stats["direct_reads"]


def is_served(connection, wanted, when):
    """Whether a transaction that reads all rows, of which `wanted` are new, has them from the cache."""
    before = numbers(connection)
    expect(changed(connection), wanted, when)
    hits, misses, direct = (after - before for after, before in zip(numbers(connection), before))
    return hits + misses > ROWS // 2 and direct < ROWS // 10


def served(connection, wanted, when):
    """Waits until all is served, and cached: the file's last change has to be some time ago. Each read finds `wanted`."""
    end = time.monotonic() + 60
    while not is_served(connection, wanted, when):
        if time.monotonic() > end:
            sys.exit(f"{NAME}: nothing is served, {when}")
        time.sleep(0.01)
    misses = numbers(connection)[1]
    expect(changed(connection), wanted, when)
    if numbers(connection)[1] - misses > ROWS // 10:
        sys.exit(f"{NAME}: pages were read again, {when}")


def a_log_that_readers_alone_have_opened():
    """It has no frame, and nothing in its index tells of the file. A checkpoint of it changes nothing."""
    make("wal")
    connection, second = connect(), connect()
    served(connection, 0, "at first")
    misses = numbers(connection)[1]
    for kind in ["PASSIVE", "FULL", "RESTART", "TRUNCATE"]:
        connection.execute(f"PRAGMA wal_checkpoint({kind})").fetchall()
        expect(changed(second), 0, f"after a checkpoint, {kind}")
    if numbers(connection)[1] - misses > ROWS // 10:
        sys.exit("pages were read again after checkpoints of nothing")
    second.execute(change("a = 300"))
    expect(changed(connection), 1, "after the first commit")
    other(change("a = 301"))
    expect(changed(connection), 2, "after another's commit")


def two_databases_that_are_counted_apart():
    """Each tells what was read of it, and why if it is read past the cache."""
    make("wal")
    another = DATABASE + ".delete"
    make("delete", database=another)
    names = {DATABASE: "wal", another: "delete"}
    for path in names:
        connection = sqlite3.connect(f"file:{path}?vfs=quinion", uri=True, isolation_level=None)
        told = lambda: json.loads(connection.execute("PRAGMA quinion_database").fetchone()[0])
        if told()["hits"] + told()["misses"] + told()["direct_reads"] > 1:  # SQLite reads a part of the header
            sys.exit(f"{told()} is not of {names[path]} alone")
        if told()["last_transaction"] != "none has read a page":
            sys.exit(f"{told()} before the first transaction")
        connection.execute("PRAGMA cache_size = 5")
        served(connection, 0, names[path])
        found = told()
        if found["last_transaction"] != "cached" or min(found["hits"], found["misses"]) < ROWS // 2:
            sys.exit(f"{found} of {names[path]}")
        if not ROWS // 2 * 4096 < found["cached_bytes"] <= os.path.getsize(path):
            sys.exit(f"{found} of {names[path]}, whose file has {os.path.getsize(path)} bytes")
        connection.close()
    small = sqlite3.connect(f"file:{DATABASE}.small?vfs=quinion", uri=True, isolation_level=None)
    small.executescript("PRAGMA page_size = 1024; PRAGMA cache_size = 5; CREATE TABLE t (a);")
    small.execute("INSERT INTO t VALUES (zeroblob(90000))")
    small.close()
    small = sqlite3.connect(f"file:{DATABASE}.small?vfs=quinion", uri=True, isolation_level=None)
    small.execute("SELECT hex(a) FROM t").fetchall()
    found = json.loads(small.execute("PRAGMA quinion_database").fetchone()[0])
    if "4 KiB" not in found["last_transaction"] or found["hits"] != 0:
        sys.exit(f"{found} of small pages")


def a_log_that_is_deleted_between_two_readers():
    """Another process is there while ours closes, and the last to close. The index is the same before and after."""
    make("wal")
    late = idle()
    for wanted in [0, 1]:
        before = idle()
        last = other("SELECT count(*) FROM t", change("a = 300"), pause=True)
        connection = connect()
        served(connection, wanted, "before the log is deleted")
        connection.close()
        last.communicate()
        if os.path.exists(DATABASE + "-wal"):
            sys.exit("the log is not deleted")
        maker = other("SELECT count(*) FROM t", "SELECT 1", pause=True)  # it makes the index, which no lock tells of
        before.execute("PRAGMA cache_size = 5")  # it looks at the database, and so not before
        served(before, 1, "after the log was deleted")
        before.close()
        maker.communicate()
    late.execute("PRAGMA cache_size = 5")
    served(late, 1, "in the end")


def an_index_that_is_made_anew_from_nothing():
    """The log is copied and truncated, and a crash breaks its index. The one that another process makes is the first."""
    make("wal")
    connection = connect()
    served(connection, 0, "at first")
    other(change("a = 100"), "PRAGMA wal_checkpoint(TRUNCATE)")
    index = DATABASE + "-shm"
    subprocess.check_call(["dd", "if=/dev/zero", f"of={index}", "bs=48", "count=1", "conv=notrunc", "status=none"])
    other("SELECT count(*) FROM t")
    # This process closes no descriptor of the index: that would end its locks.
    words = subprocess.check_output(["od", "-An", "-tx4", "-N48", index], text=True).split()
    if words[3:10] != ["00000001"] + 6 * ["00000000"]:
        sys.exit(f"the index is not that of a log without frames: {words}")
    served(connection, 1, "after the index was made anew")


def a_file_that_was_written_just_now():
    """The next write may give it the same times: nothing of it is cached."""
    make("wal")
    keeper = idle()
    for number in range(1, 9):
        other(change(f"a = {number}"))
        connection = connect()
        is_cached = is_served(connection, number, "after a commit")
        age = time.time() - os.stat(DATABASE).st_ctime
        connection.close()
        if is_cached and age < 0.1:
            sys.exit(f"a file that was written {age:.3f} s ago is served")
    keeper.close()


def a_transaction_that_another_process_rolls_back():
    """A disk that is full, or here a limit, leaves a hot journal. What was written before is cached, and taken back."""
    make("delete")
    keeper, writer = idle(), connect()
    writer.execute("BEGIN")
    writer.execute(change("a < 200"))
    expect(changed(writer), 199, "in the transaction")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(DATABASE), limit[1]))
    try:
        writer.execute("UPDATE t SET b = zeroblob(9000)")
        sys.exit("nothing was over the limit")
    except sqlite3.OperationalError:
        pass
    if writer.in_transaction:
        writer.execute("ROLLBACK")
    if not os.path.exists(DATABASE + "-journal"):
        sys.exit("the journal is not hot")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    other("SELECT count(*) FROM t")
    expect(changed(keeper), 0, "after the rollback")


def a_process_without_memory():
    """The system refuses the cache: the database is read without. A bound that is too small is an error."""
    make("delete")
    with open("/proc/self/statm") as statm:
        bytes = int(statm.read().split()[0]) * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes))
    connection = connect()
    expect(changed(connection), 0, "without a cache")
    connection.execute(change("a = 300"))
    expect(changed(connection), 1, "without a cache")
    try:
        connect("&quinion_memory=1M")
    except sqlite3.OperationalError:
        return
    sys.exit("a bound of 1M is none")


def two_copies_of_sqlite():
    """The second has functions of its own. The first goes on with its own."""
    make("delete")
    with open("/proc/self/maps") as maps:
        library = next(line.split()[-1] for line in maps if "libsqlite3" in line)
    copy = os.path.join(FOLDER, "copy.so")
    shutil.copy(library, copy)
    second, connection, message = ctypes.CDLL(copy), ctypes.c_void_p(), ctypes.c_char_p()
    second.sqlite3_open(b":memory:", ctypes.byref(connection))
    second.sqlite3_enable_load_extension(connection, 1)
    second.sqlite3_load_extension(connection, EXTENSION.encode(), None, ctypes.byref(message))
    if b"another copy of SQLite" not in (message.value or b""):
        sys.exit(f"the second copy is told {message.value}")
    expect(changed(connect()), 0, "in the first copy")


loader = sqlite3.connect(":memory:")
loader.enable_load_extension(True)
loader.load_extension(EXTENSION)
globals()[NAME]()
