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
        keeper.execute(change("a = 300"))  # a log that has nothing is not served
        changed(keeper)
        keeper.execute(change("a = 301"))
        keeper.execute("PRAGMA wal_checkpoint").fetchall()
        before = json.loads(keeper.execute("PRAGMA quinion_stats").fetchone()[0])["misses"]
        expect(changed(connect()), 2, "after own writes")
        missed = json.loads(keeper.execute("PRAGMA quinion_stats").fetchone()[0])["misses"] - before
        if missed > ROWS // 10:
            sys.exit(f"{missed} pages were read again, with journal mode {journal}")
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
