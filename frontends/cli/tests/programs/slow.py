"""Reads a file slowly with os.read and writes its bytes; prints on standard error when it has begun."""
import os
import sys
import time

fd = os.open(sys.argv[1], os.O_RDONLY)
naps = int(sys.argv[2])
count = 0
while piece := os.read(fd, 65536):
    while piece:
        piece = piece[os.write(1, piece):]
    count += 1
    if count == 10:
        os.write(2, b"begun\n")
    if 10 <= count < 10 + naps:
        time.sleep(0.02)
