"""Cases: orders of events in which pages from before a change could be used again. Each was served wrongly once.

    cases.py EXTENSION FOLDER NAME
       |-- this process reads and writes through the cache, with connections that use little memory of SQLite's own
       `-- others (`other`) write without it

A row is `old` or `new`; `changed` counts the new ones. The end of each case says what must be found.
"""

import os
import resource
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


def other(*statements, pause=False):
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
    words = [sys.executable, "-c", program, DATABASE, str(pause), *statements]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if pause:
        assert process.stdout.readline() == b"there\n"
        return process
    process.communicate()
    assert process.returncode == 0


def make(journal):
    rows = f"WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {ROWS})"
    other(
        f"PRAGMA journal_mode = {journal}",
        "CREATE TABLE t (a INTEGER PRIMARY KEY, b)",
        f"{rows} INSERT INTO t SELECT x, zeroblob(3000) FROM n",
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


loader = sqlite3.connect(":memory:")
loader.enable_load_extension(True)
loader.load_extension(EXTENSION)
globals()[NAME]()
