"""Runs SQL statements from standard input, one a line, and answers each with a line."""
import sqlite3, sys

database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
database.execute("PRAGMA cache_size = 8")
print("ready", flush=True)
for line in sys.stdin:
    print(database.execute(line).fetchall(), flush=True)
