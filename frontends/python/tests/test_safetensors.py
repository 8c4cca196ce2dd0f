"""Safetensors: each tensor has its bytes, and no broken file is believed."""

import json
import struct

import numpy
import pytest
import quinion
from conftest import permissions_at
from quinion import safetensors

TENSORS = {
    "weights": numpy.arange(300_000, dtype="<f4").reshape(300, 1000),
    "bias": numpy.arange(7, dtype="<i8"),
    "none": numpy.zeros((0, 3), dtype="<f2"),
    "flags": numpy.array([[True, False, True]]),
    "one": numpy.array(2.5, dtype="<f8"),
}
KINDS = {"<f4": "F32", "<i8": "I64", "<f2": "F16", "|b1": "BOOL", "<f8": "F64", "|u1": "U8"}


def file_of(tensors, change=lambda header: header):
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, tensor in tensors.items():
        place = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": KINDS[tensor.dtype.str], "shape": list(tensor.shape), "data_offsets": place}
        data += tensor.tobytes()
    text = json.dumps(change(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_tensors_are_views_of_the_cache(opener, server):
    (server.objects / "m").write_bytes(file_of(TENSORS))
    found = safetensors.load(opener, "data://s/m")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert numpy.array_equal(found[name], tensor) and not found[name].flags.writeable
        # In memory of the cache's, and not of this process's own.
        assert tensor.nbytes == 0 or permissions_at(found[name].ctypes.data).endswith("s")
    del found
    if isinstance(opener, quinion.Cache):
        assert opener.stats()["pinned_bytes"] == 0
    else:
        server.wait_for("pins", 0)


def changed(name, **values):
    def change(header):
        header[name].update(values)
        return header

    return change


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        file_of(TENSORS, changed("bias", data_offsets=[0, 1])),
        file_of(TENSORS, changed("bias", data_offsets=[1 << 60, (1 << 60) + 56])),
        file_of(TENSORS, changed("bias", data_offsets=[-56, 0])),
        file_of(TENSORS, changed("bias", shape=[-7])),
        file_of(TENSORS, changed("bias", shape=8)),
        file_of(TENSORS, changed("bias", data_offsets=5)),
        file_of(TENSORS, changed("bias", shape=[1] * 65)),
        file_of(TENSORS, changed("bias", shape=[10**4000] * 60)),
        file_of({"flags": numpy.array([1, 7, 1], dtype="u1")}, changed("flags", dtype="BOOL")),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_broken_files_are_refused(client, server, data):
    (server.objects / "m").write_bytes(data)
    with pytest.raises(ValueError, match="not a safetensors file"):
        safetensors.load(client, "data://s/m")


def test_types_that_numpy_has_not_are_said(client, server):
    (server.objects / "m").write_bytes(file_of(TENSORS, changed("bias", dtype="BF16")))
    with pytest.raises(TypeError, match="BF16"):
        safetensors.load(client, "data://s/m")


def test_what_cannot_be_pinned_is_copied(client, server):
    big = {"a": numpy.arange(5 << 20, dtype="<i8"), "b": numpy.arange(5 << 20, dtype="<i8")}
    (server.objects / "m").write_bytes(file_of(big))
    found = safetensors.load(client, "data://s/m")
    assert all(numpy.array_equal(found[name], big[name]) for name in big)
