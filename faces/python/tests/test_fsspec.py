"""Fsspec: chained to another file system, it is that file system, and its reads are the cache's."""

import os
import pickle
import random

import fsspec
import fsspec.tests.abstract as abstract
import pytest
from conftest import DATA, SIZE, ServerProcess
from fsspec.implementations.memory import MemoryFileSystem

OPERATIONS = 1_000_000 if os.environ.get("QUINION_SOAK") else 20_000


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture(scope="class")
    def fs(self, tmp_path_factory):
        server = ServerProcess(tmp_path_factory.mktemp("server"))
        yield fsspec.filesystem("quinion", server=server.name, target_protocol="file", target_options={"auto_mkdir": True})
        server.kill()

    @pytest.fixture
    def fs_path(self, tmp_path):
        return str(tmp_path)


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


@pytest.fixture
def memory(server):
    """Fsspec's file system in memory, with what the server's store has."""
    memory = MemoryFileSystem()
    for name, data in [("a", DATA), ("with space%41", DATA[:5000]), ("empty", b"")]:
        (server.objects / name).write_bytes(data)
        memory.pipe_file(f"/t/{name}", data)
    yield memory
    memory.rm("/t", recursive=True)


def test_operations_at_random_are_those_of_the_memory_file_system(server, memory):
    ours = fsspec.filesystem("quinion", server=server.name, target_protocol="memory")
    names, rng = ["/t/a", "/t/with space%41", "/t/empty"], random.Random(3)
    def bound():
        return rng.choice([None, rng.randrange(-SIZE, SIZE), rng.randrange(-6000, 6000)])

    files = {name: (ours.open(name), memory.open(name)) for name in names}
    for _ in range(OPERATIONS // 5):
        name = rng.choice(names)
        start = rng.randrange(SIZE)
        end = start + rng.randrange(5000)
        mine, other = files[name]
        assert mine.seek(start) == other.seek(start)
        assert mine.read(end - start) == other.read(end - start)
        assert mine.tell() == other.tell()
        assert ours.cat_file(name, start, end) == memory.cat_file(name, start, end)
        ranges = [rng.choice(names[:2]) for _ in range(3)], [rng.randrange(4000) for _ in range(3)], 4500
        assert ours.cat_ranges(*ranges) == memory.cat_ranges(*ranges)
    for _ in range(200):
        name, start, end = rng.choice(names), bound(), bound()
        size = memory.size(name)
        first, last, _ = slice(start, end).indices(size)
        assert ours.cat_file(name, start, end) == memory.cat_file(name)[first:last]
    assert ours.ls("/t") == memory.ls("/t")
    assert server.stats()["reads"] > 0


def test_chains_and_pickles(server, memory):
    options = {"quinion": {"server": server.name}}
    with fsspec.open("quinion::memory:///t/a", **options) as file:
        assert file.read() == DATA
    fs, path = fsspec.url_to_fs("quinion::memory:///t/a", **options)
    assert path == "/t/a" and pickle.loads(pickle.dumps(fs)).cat_file(path, 5, 10) == DATA[5:10]
    with pytest.raises(FileNotFoundError):
        fs.open("/t/none")
    failed, found = fs.cat_ranges(["/t/none", "/t/a"], 0, 4)
    assert isinstance(failed, FileNotFoundError) and found == DATA[:4]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["/t/none"], 0, 4, on_error="raise")
    # A range that fails is one answer, and the others of its file are theirs.
    found = fs.cat_ranges(["/t/a", "/t/a", "/t/none"], (0, 5, 0), (4, 9, 4))
    assert found[:2] == [DATA[:4], DATA[5:9]] and isinstance(found[2], FileNotFoundError)
    with pytest.raises(TypeError, match="list"):
        fs.cat_ranges("/t/a", 0, 4)
    assert server.stats()["fetched_bytes"] > 0
