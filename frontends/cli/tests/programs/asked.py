"""Reads commands for a file from standard input, one a line, and answers with one line each."""
import hashlib
import os
import sys

fd = -1
for line in sys.stdin:
    what, *rest = line.split()
    if what == "open":
        fd = os.open(rest[0], os.O_RDONLY)
        answer = "open"
    elif what == "read":
        bytes_read = os.pread(fd, int(rest[1]), int(rest[0]))
        answer = "%d %s" % (len(bytes_read), hashlib.sha256(bytes_read).hexdigest())
    else:
        total = b"".join(iter(lambda: os.read(fd, 50000), b""))
        answer = "%d %s" % (len(total), hashlib.sha256(total).hexdigest())
    print(answer, flush=True)
