"""Pins: their bytes stay as long as a pin, a view or an array is held, and no longer."""

import ctypes
import gc
import os
import pathlib
import sys

import numpy
import pytest
import quinion
from conftest import DATA, SIZE, in_child, permissions_at

URL = "data://s/a"
PINS = 1_000_000 if os.environ.get("QUINION_SOAK") else 100_000


def test_a_pin_is_read_only_and_not_copied(client):
    file = client.open(URL)
    pin = file.pin(4096, 4096)
    view = memoryview(pin)
    assert not pin.is_copied and len(pin) == 4096 and view.readonly and view == DATA[4096:8192]
    array = numpy.frombuffer(pin, dtype=numpy.uint8)
    assert not array.flags.writeable and array.tobytes() == DATA[4096:8192]
    again = numpy.frombuffer(file.pin(4096, 4096), dtype=numpy.uint8)
    assert array.ctypes.data == again.ctypes.data
    with pytest.raises(ValueError):
        array.flags.writeable = True
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * 4096).from_buffer(pin)


def test_a_long_pin_is_one_range_of_addresses_whatever_lies_between_its_pieces(opener, server):
    (server.objects / "b").write_bytes(DATA)
    first, second = opener.open(URL), opener.open("data://s/b")
    # Their pieces lie in turns in the cache.
    for offset in range(0, SIZE, 256 << 10):
        first.read_at(offset, 256 << 10), second.read_at(offset, 256 << 10)
    maps = len(pathlib.Path("/proc/self/maps").read_text().splitlines())
    for file in (first, second):
        pin = file.pin(5, SIZE - 9)
        array = numpy.frombuffer(pin, dtype=numpy.uint8)
        assert not pin.is_copied and permissions_at(array.ctypes.data).endswith("s") and not array.flags.writeable
        assert array.tobytes() == DATA[5 : SIZE - 4]
        assert in_child(lambda pin=pin: refused(pin))
        assert array.tobytes() == DATA[5 : SIZE - 4]
        del pin, array
    # What was mapped for them is mapped no more.
    assert len(pathlib.Path("/proc/self/maps").read_text().splitlines()) <= maps + 2


def refused(pin):
    """Whether a child is lent nothing of its parent's pin."""
    try:
        memoryview(pin)
    except BufferError:
        return True
    return False


def test_long_pins_do_not_leak_what_is_mapped(client, server):
    file = client.open(URL)
    file.read()
    for n in range(3000):
        offset = n * 4096 % (1 << 20)
        assert memoryview(file.pin(offset, 2 << 20))[-1] == DATA[offset + (2 << 20) - 1]
    # 65,530 is the most that a process may have.
    assert len(pathlib.Path("/proc/self/maps").read_text().splitlines()) < 2000
    server.wait_for("pins", 0)


def test_the_last_holder_gives_a_pin_back(client, server):
    file = client.open(URL)
    pin = file.pin(0, 10_000)
    array = numpy.frombuffer(pin, dtype=numpy.uint8)
    part = memoryview(array)[100:200]
    server.wait_for("pins", 1)
    del pin, array
    file.close()
    gc.collect()
    assert server.stats()["pins"] == 1
    assert part == DATA[100:200]
    del part
    server.wait_for("pins", 0)
    server.wait_for("open_files", 0)


def test_pins_do_not_leak(client, server):
    file = client.open(URL)
    kept = [file.pin(offset, 1) for offset in range(100)]

    def references():
        gc.collect()
        return sys.getrefcount(file), sys.getrefcount(kept[0]), sys.getrefcount(quinion.Pin)

    before, blocks = references(), sys.getallocatedblocks()
    for n in range(PINS):
        offset = n * 4096 % (SIZE - 100)
        assert memoryview(file.pin(offset, 1))[0] == DATA[offset]
    assert references() == before
    # Caches of the interpreter's own may grow a little; a block for each pin would be far more.
    assert sys.getallocatedblocks() < blocks + PINS // 100
    server.wait_for("pins", len(kept))
    del kept
    server.wait_for("pins", 0)
    del file
    server.wait_for("open_files", 0)


def test_empty_pins_and_pins_beyond_the_end(client):
    file = client.open(URL)
    assert bytes(file.pin(0, 0)) == b"" and bytes(file.pin(SIZE, 5)) == b"" and bytes(file.pin(SIZE + 9, 5)) == b""
    assert bytes(file.pin(SIZE - 2, 1 << 62)) == DATA[-2:]
