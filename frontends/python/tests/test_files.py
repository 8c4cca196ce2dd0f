"""Files: they read as Python's own do, and fail as these do."""

import asyncio
import errno
import io
import math
import mmap
import os
import pathlib
import random
import signal
import tempfile
import threading
import time

import pytest
import quinion
from conftest import DATA, SIZE, in_child

URL = "data://s/a"
OPERATIONS = 1_000_000 if os.environ.get("QUINION_SOAK") else 50_000


def test_operations_at_random_are_those_of_bytesio(opener):
    file, twin, rng = opener.open(URL), io.BytesIO(DATA), random.Random(1)
    for _ in range(OPERATIONS):
        offset = rng.choice([rng.randrange(SIZE + 9000), SIZE - rng.randrange(9000)])
        length = rng.choice([0, 1, rng.randrange(100), rng.randrange(9000)])
        match rng.randrange(7):
            case 0:
                assert file.seek(offset) == twin.seek(offset)
            case 1:
                back = rng.randrange(4096)
                assert file.seek(-back, os.SEEK_END) == twin.seek(-back, os.SEEK_END)
            case 2:
                assert file.read(length) == twin.read(length)
            case 3:
                mine, other = bytearray(length), bytearray(length)
                assert file.readinto(mine) == twin.readinto(other)
                assert mine == other
            case 4:
                assert file.read_at(offset, length) == DATA[offset : offset + length]
            case 5:
                assert bytes(file.pin(offset, length)) == DATA[offset : offset + length]
            case 6:
                mine, there = bytearray(length), DATA[offset : offset + length]
                assert file.readinto_at(offset, mine) == len(there)
                assert mine[: len(there)] == there and not any(mine[len(there) :])
        assert file.tell() == twin.tell()


def test_whole_files_lines_and_buffered_readers(opener):
    with opener.open(URL) as file:
        assert file.size == SIZE and file.etag
        assert file.read() == DATA and file.read() == b""
        file.seek(100)
        assert file.readall() == DATA[100:]
        assert io.BufferedReader(opener.open(URL)).readlines() == io.BytesIO(DATA).readlines()
    with pytest.raises(ValueError):
        file.read(1)
    assert file.closed


def test_ranges(opener):
    ranges = [(random.Random(n).randrange(SIZE - 5000), n) for n in range(0, 5000, 50)]
    assert opener.open(URL).read_ranges(ranges) == [DATA[o : o + n] for o, n in ranges]
    for beyond in [(SIZE - 1, 2), (SIZE + 1, 0), (0, 1 << 63), ((1 << 64) - 1, 2)]:
        with pytest.raises(EOFError):
            opener.open(URL).read_ranges([beyond])
    with pytest.raises(OverflowError):
        opener.open(URL).read_at(-1, 5)


def test_errors_are_those_of_python(client, server, tmp_path):
    with pytest.raises(FileNotFoundError, match="data://s/none"):
        client.open("data://s/none")
    # It may be there: the server cannot know.
    with pytest.raises(OSError, match="no store") as refused:
        client.open("s3://elsewhere/x")
    assert refused.value.errno == errno.ENODEV
    with pytest.raises(FileNotFoundError):
        client.open(str(tmp_path / "none"))
    with pytest.raises(ConnectionRefusedError, match="is the server running"):
        quinion.connect(str(tmp_path / "none.sock"))
    with pytest.raises(ValueError):
        client.open(URL).readinto(b"read only")
    with pytest.raises(ValueError, match="folder"):
        quinion.serve(str(tmp_path / "x"), memory=16 << 20, stores={"a://b": "http://c"})


def test_an_open_that_fails_names_its_file(opener, tmp_path):
    for name, number in [(str(tmp_path / "none"), errno.ENOENT), ("data://s/none", errno.ENOENT), ("no://x", errno.ENODEV)]:
        with pytest.raises(OSError) as failed:
            opener.open(name)
        assert (failed.value.errno, failed.value.filename) == (number, name)
        with pytest.raises(OSError) as failed:
            asyncio.run(opener.aopen(name))
        assert (failed.value.errno, failed.value.filename) == (number, name)


def test_stores_to_a_mapped_file_of_shared_memory_are_seen(server):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared, quinion.Cache(memory=16 << 20) as cache:
        shared.truncate(SIZE)
        files = [quinion.connect(server.name).open(shared.name), cache.open(shared.name)]
        with mmap.mmap(shared.fileno(), SIZE) as mapped:
            until, number = time.monotonic() + 0.5, 0
            while time.monotonic() < until:  # the file's times are of some time ago then
                number = (number + 1) % 256
                mapped[4096] = number
                assert [file.read_at(4096, 1)[0] for file in files] == [number] * 2
                assert [bytes(file.pin(4096, 1))[0] for file in files] == [number] * 2


def test_a_pipe_is_refused_and_not_waited_for(server, tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)

    def refusals():
        found = []
        for opener in [quinion.connect(server.name), quinion.Cache(memory=16 << 20)]:
            try:
                opener.open(pipe)
            except OSError as error:
                found.append((error.errno, error.filename))
        return found

    assert in_child(refusals) == [(errno.ESPIPE, pipe)] * 2


def test_a_folder_is_refused_by_the_open(opener, tmp_path):
    with pytest.raises(IsADirectoryError):
        opener.open(tmp_path)


def test_a_name_with_a_nul_is_refused_and_a_path_is_taken(opener, tmp_path):
    (tmp_path / "local").write_bytes(DATA)
    assert opener.open(tmp_path / "local").read() == DATA
    for name in ["data://s/a\0b", str(tmp_path / "a\0b")]:
        with pytest.raises(ValueError, match="null"):
            opener.open(name)


def test_names_are_opened_and_told_as_by_pythons_open(opener, tmp_path):
    folder = tmp_path / "names"
    folder.mkdir()
    path = os.fsencode(folder) + b"/\xff caf\xe9 \xc3\xa9"
    with open(path, "wb") as file:
        file.write(DATA)
    os.symlink(path, folder / "valid")
    [entry] = [entry for entry in os.scandir(folder) if not entry.is_symlink()]
    [byte_entry] = [entry for entry in os.scandir(os.fsencode(folder)) if not entry.is_symlink()]
    names = [path, os.fsdecode(path), pathlib.Path(os.fsdecode(path)), entry, byte_entry]
    for name in [*names, os.fsencode(folder / "valid"), folder / "valid"]:
        with opener.open(name) as file, open(name, "rb") as pythons:
            assert file.read() == DATA and file.name == pythons.name
            assert file.residency().size == SIZE and repr(file) and file.read_ranges([(1, 2)]) == [DATA[1:3]]
        with asyncio.run(opener.aopen(name)) as file:
            assert file.read() == DATA and file.name == os.fspath(name)
    assert opener.open("file://" + os.fsdecode(path)).read() == DATA
    os.unlink(path)
    for name in names:
        with pytest.raises(FileNotFoundError) as pythons:
            open(name, "rb")
        for call in [opener.open, lambda name: asyncio.run(opener.aopen(name))]:
            with pytest.raises(FileNotFoundError) as failed:
                call(name)
            assert failed.value.filename == os.fspath(name) == os.fspath(pythons.value.filename)
            assert failed.value.errno == pythons.value.errno


def test_what_is_no_name_is_refused(opener):
    for name in [None, 3.5, ["a"]]:
        with pytest.raises(TypeError):
            opener.open(name)
    with pytest.raises(ValueError, match="surrogates"):
        opener.open("data://s/\udcff")
    with pytest.raises(ValueError, match="null"):
        opener.open(b"a\0b")


def test_a_name_of_no_server_is_an_invalid_argument(server):
    for name in ["", "a b", "x" * 49, "a\0"]:
        for call in [quinion.connect, lambda name: quinion.serve(name, memory=16 << 20)]:
            with pytest.raises(OSError, match="a server's name has") as failed:
                call(name)
            assert failed.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="another server has that name") as failed:
        quinion.serve(server.name, memory=16 << 20)
    assert failed.value.errno == errno.EADDRINUSE


def test_a_write_is_unsupported_as_of_pythons_files_for_reading(opener):
    with pytest.raises(io.UnsupportedOperation, match="reading only"):
        opener.open(URL).write(b"x")


def test_a_seek_to_no_number_is_an_error(opener):
    file = opener.open(URL)
    file.seek(7)
    for wrong in [1.5, math.nan, None, "0"]:
        with pytest.raises(TypeError):
            file.seek(wrong)
    with pytest.raises(OverflowError):
        file.seek(1 << 63)
    assert file.tell() == 7 and file.read_at(0, 3) == DATA[:3]
    assert file.seek((1 << 63) - 1) == (1 << 63) - 1 and file.read() == b""


def test_an_object_that_was_replaced_is_an_error(opener, server):
    file = opener.open(URL)
    new = server.objects / "new"
    new.write_bytes(bytes(SIZE))
    new.replace(server.objects / "a")
    with pytest.raises(OSError) as failed:
        file.read()
    assert failed.value.errno == errno.ESTALE
    assert opener.open(URL).read() == bytes(SIZE)


def test_after_a_new_server_has_come_a_client_opens_there(client, server, tmp_path_factory):
    assert client.open(URL).read_at(0, 4) == DATA[:4]
    server.kill()
    with pytest.raises(OSError):
        client.open(URL)
    with quinion.serve(server.name, memory=16 << 20, stores={"data://s": {"a": b"new"}}):
        assert not client.owner_is_dead and client.open(URL).read() == b"new"


def test_a_killed_server_is_an_error(client, server):
    file = client.open(URL)
    pin = file.pin(0, SIZE)
    server.kill()
    with pytest.raises(ConnectionResetError, match="the server of the cache has ended"):
        file.read()
    assert bytes(pin) == DATA
    assert client.owner_is_dead


def test_local_files(client, tmp_path):
    path = tmp_path / "local"
    path.write_bytes(DATA)
    file = client.open(str(path))
    assert file.read() == DATA and bytes(file.pin(10, 10)) == DATA[10:20] and file.etag is None
    assert client.open(path.as_uri()).read_at(SIZE - 3, 10) == DATA[-3:]
    assert client.open("/proc/self/status").read().startswith(b"Name:")


def test_the_gil_is_let_go_and_a_signal_ends_a_long_read(client, server):
    class Interrupt(Exception):
        pass

    def handler(*_):
        raise Interrupt

    with (server.objects / "big").open("wb") as big:
        big.truncate(1 << 30)
    file, before = client.open("data://s/big"), signal.signal(signal.SIGUSR1, handler)
    buffer = bytearray(1 << 30)
    begun = threading.Event()

    def send():
        begun.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(Interrupt):
            begun.set()
            file.readinto(buffer)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert file.tell() == 0
