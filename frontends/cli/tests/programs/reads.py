"""Reads a file in the ways Python has; prints what it saw."""
import hashlib
import os
import sys

path, way = sys.argv[1], sys.argv[2]


def digest(pieces):
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def numbers(count, below):
    state = 12345
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 33) % below


size = os.path.getsize(path)
if way == "whole":
    with open(path, "rb") as file:
        print(digest([file.read()]), file.read())
elif way == "lines":
    with open(path, "rb") as file:
        print(digest([file.readline() for _ in range(1000)]), digest(file), file.tell())
elif way == "words":
    with open(path, encoding="ascii") as file:
        print(sum(line.count("the") for line in file))
elif way == "into":
    room = bytearray(100003)
    with open(path, "rb", buffering=0) as file:
        def pieces():
            while got := file.readinto(room):
                yield bytes(room[:got])
        print(digest(pieces()), file.tell())
elif way == "seek":
    with open(path, "rb") as file:
        def pieces():
            for position in numbers(3000, size):
                file.seek(position)
                yield file.read(position % 9001)
                file.seek(-min(file.tell(), 5000), 1)
                yield file.readline()
                file.seek(-(position % 70000), 2)
                yield file.read(10)
        print(digest(pieces()), file.seek(0, 2), file.read(1), file.seek(size + 5), file.read(1))
elif way == "at":
    fd = os.open(path, os.O_RDONLY)
    print(digest(os.pread(fd, 70001, position) for position in range(0, size + 70001, 70001)))
    print(os.lseek(fd, 0, os.SEEK_CUR), os.pread(fd, 10, size), os.pread(fd, 10, size - 3))
    os.close(fd)
elif way == "scattered":
    fd = os.open(path, os.O_RDONLY)
    rooms = [bytearray(n) for n in (1, 4095, 0, 65537, 4096)]
    whole = sum(map(len, rooms))

    def pieces():
        for position in range(0, size + whole, whole):
            yield str(os.preadv(fd, rooms, position)).encode()
            yield b"".join(rooms)
        while got := os.readv(fd, rooms):
            yield b"".join(rooms)[:got]
    print(digest(pieces()), os.lseek(fd, 0, os.SEEK_CUR))
elif way == "map":
    import mmap
    with open(path, "rb") as file:
        start = file.read(100000)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as seen:
            print(seen[:100000] == start, digest(seen[p:p + 70001] for p in range(0, size, 70001)), file.tell())
            print(all(os.pread(file.fileno(), 5000, p) == seen[p:p + 5000] for p in numbers(1000, size)))
        print(digest([file.read()]))
elif way == "copy":
    import shutil
    for copy in (shutil.copyfile, shutil.copy2):
        copy(path, sys.argv[3])
        with open(sys.argv[3], "rb") as file, open(path, "rb") as original:
            print(os.path.getsize(sys.argv[3]), digest([file.read()]) == digest([original.read()]))
else:
    sys.exit("reads.py: no such way: " + way)
