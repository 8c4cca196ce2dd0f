"""Freshness: an answer of the store serves later opens as long as they let it, until it is known to be wrong."""

import asyncio
import errno
import pickle

import fsspec
import numpy
import pytest
import quinion
from conftest import DATA, SIZE
from quinion import filesystem, safetensors
from test_safetensors import TENSORS, file_of

URL = "data://s/a"
NEW = bytes(byte ^ 0xFF for byte in DATA)


@pytest.fixture
def heads(server, opener):
    """How often the store was asked what an object is."""
    numbers = opener.stats if isinstance(opener, quinion.Cache) else server.stats
    return lambda: numbers()["heads"]


def test_an_open_asks_unless_it_says_otherwise(opener, heads):
    for _ in range(3):
        assert opener.open(URL).read() == DATA
    assert heads() == 3
    for freshness in ("immutable", 3600, 0.5e9):
        assert opener.open(URL, freshness=freshness).read() == DATA
    assert heads() == 3
    for freshness in ("always", 0, 1e-9, None):
        assert opener.open(URL, freshness=freshness).size == SIZE
    assert heads() == 7


def test_a_client_and_a_cache_may_say_it_for_all_opens(server):
    def reads(opener, heads):
        before = heads()
        assert [opener.open(URL).read() == DATA for _ in range(3)] == [True] * 3
        assert heads() == before + 1
        opener.open(URL, freshness="always")
        assert heads() == before + 2

    with quinion.Cache(memory=64 << 20, stores={"data://s": server.objects.as_uri()}, freshness="immutable") as cache:
        reads(cache, lambda: cache.stats()["heads"])
    client = quinion.connect(server.name, freshness=3600)
    reads(client, lambda: server.stats()["heads"])
    again = pickle.loads(pickle.dumps(client))
    assert (again.name, again.freshness) == (server.name, 3600)
    before = server.stats()["heads"]
    assert again.open(URL).read() == DATA
    assert pickle.loads(pickle.dumps(again.open(URL))).read() == DATA
    assert server.stats()["heads"] == before


def test_a_server_may_say_it_for_its_clients(tmp_path):
    name, stores = str(tmp_path / "q" / "s.sock"), {"mem://t": {"a": b"hello"}}
    with quinion.serve(name, memory=16 << 20, stores=stores, freshness="immutable") as server:
        client = quinion.connect(name)
        assert [client.open("mem://t/a").read() for _ in range(3)] == [b"hello"] * 3
        assert server.stats()["heads"] == 1
        client.open("mem://t/a", freshness="always")
        assert server.stats()["heads"] == 2


def test_a_replaced_object_is_read_as_it_was_or_asked_for_again(opener, server, heads):
    assert opener.open(URL).read_at(0, 4096) == DATA[:4096]
    server.put("a", NEW)
    before = heads()
    old = opener.open(URL, freshness="immutable")
    assert old.read_at(0, 4096) == DATA[:4096] and heads() == before
    with pytest.raises(OSError) as failed:
        old.read_at(SIZE - 4096, 4096)
    assert failed.value.errno == errno.ESTALE
    # That error has told: the next open asks.
    assert opener.open(URL, freshness="immutable").read() == NEW and heads() == before + 1
    assert old.read_at(0, 4096) == DATA[:4096]


def test_weights_that_are_cached_are_loaded_without_a_question(opener, server, heads):
    (server.objects / "m").write_bytes(file_of(TENSORS))
    first = safetensors.load(opener, "data://s/m", freshness="immutable")
    asked = heads()
    again = safetensors.load(opener, "data://s/m", freshness="immutable")
    assert heads() == asked == 1
    assert all(numpy.array_equal(again[name], first[name]) for name in TENSORS)
    safetensors.load(opener, "data://s/m")
    assert heads() == 2


def test_a_file_system_may_say_it(server):
    def heads_of(**options):
        fs = fsspec.filesystem("quinion", server=server.name, target_protocol="memory", **options)
        before = server.stats()["heads"]
        assert [fs.cat_file("/t/a", 0, 9) for _ in range(3)] == [DATA[:9]] * 3
        return server.stats()["heads"] - before

    assert [heads_of(), heads_of(freshness="immutable"), heads_of(freshness=3600)] == [3, 0, 0]


def test_what_a_file_system_has_written_is_read_by_it_as_it_is_now(server, tmp_path):
    """1. An answer about the old object serves further opens. 2. A write by the same file system was read as the old one."""
    (tmp_path / "local").write_bytes(NEW)
    writes = [
        lambda fs: fs.pipe_file("/t/a", NEW),
        lambda fs: fs.open("/t/a", "wb").close(),
        lambda fs: fs.put_file(str(tmp_path / "local"), "/t/a"),
        lambda fs: (fs.fs.pipe_file("/t/b", NEW), fs.cp_file("/t/b", "quinion://t/a")),
        lambda fs: asyncio.run(fs._pipe_file("/t/a", NEW)),
        lambda fs: fs.rm("/t", recursive=True),
        lambda fs: fs.rm("/t/[ab]"),
    ]
    for write in writes:
        filesystem._WRITTEN.clear()
        server.put("a", DATA)
        options = {"server": server.name, "target_protocol": "memory", "skip_instance_cache": True}
        fsspec.filesystem("quinion", **options).cat_file("/t/a")
        fs = fsspec.filesystem("quinion", freshness="immutable", **options)
        fs.fs.pipe_file("/t/a", DATA)
        assert fs.cat_file("/t/a", 0, 9) == DATA[:9]
        # As another thread has it.
        other = fsspec.filesystem("quinion", freshness="immutable", **options)
        write(fs)
        server.put("a", NEW)
        assert fs.cat_file("/t/a", 0, 9) == NEW[:9]
        assert asyncio.run(fs._cat_file("/t/a", 0, 9)) == NEW[:9]
        server.put("a", DATA)
        assert other.cat_file("/t/a", 0, 9) == DATA[:9]


@pytest.mark.parametrize("wrong", ["never", "", -1, float("nan"), float("inf")])
def test_what_is_no_freshness_is_refused(opener, wrong):
    for refused in (
        lambda: opener.open(URL, freshness=wrong),
        lambda: quinion.Cache(memory=16 << 20, freshness=wrong),
        lambda: quinion.connect("no-such-server", freshness=wrong),
        lambda: quinion.serve("no-such-server", memory=16 << 20, freshness=wrong),
    ):
        with pytest.raises(ValueError, match="no freshness"):
            refused()
