"""Makes tables with duckdb, queries them, and prints the answers."""
import sys

import duckdb

TABLE = "SELECT i, hash(i) AS scattered, i % 97 AS few, md5(i::VARCHAR) AS words FROM range(400000) AS r(i)"
QUESTIONS = [
    "SELECT count(*), sum(scattered), max(words), count(DISTINCT few) FROM {}",
    "SELECT few, count(*), min(words) FROM {} GROUP BY few ORDER BY few",
    "SELECT * FROM {} WHERE i BETWEEN 123456 AND 123460 ORDER BY i",
    "SELECT words FROM {} ORDER BY scattered LIMIT 5",
]

way = sys.argv[1]
if way == "make":
    with duckdb.connect("table.db") as made:
        made.execute(f"CREATE TABLE t AS {TABLE}")
        made.execute("COPY t TO 'table.parquet' (ROW_GROUP_SIZE 50000)")
        made.execute("COPY t TO 'table.csv'")
    sys.exit()
if way == "db":
    connection, table = duckdb.connect("table.db", read_only=True), "t"
else:
    connection, table = duckdb.connect(), f"'table.{way}'"
connection.execute("SET threads = 2")
for question in QUESTIONS:
    print(connection.execute(question.format(table)).fetchall())
