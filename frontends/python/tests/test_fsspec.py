"""Fsspec: chained to another file system, it is that file system, and its reads are the cache's."""

import asyncio
import io
import os
import pathlib
import pickle
import random

import fsspec
import fsspec.tests.abstract as abstract
import pytest
import quinion
from conftest import DATA, SIZE, ServerProcess
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

OPERATIONS = 1_000_000 if os.environ.get("QUINION_SOAK") else 10_000


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


class Operations:
    """Operations at random on our file system and on its twin, which is told of nothing but them."""

    NAMES = ("/t/a", "/t/with space%41", "/t/empty", "/t/none")

    def __init__(self, server, memory, seed):
        self.server, self.memory, self.rng = server, memory, random.Random(seed)
        self.ours = fsspec.filesystem("quinion", server=server.name, target_protocol="memory")
        self.files = {}
        self.open()

    def name(self):
        return self.rng.choice(self.NAMES)

    def bound(self):
        return self.rng.choice([None, self.rng.randrange(-SIZE, SIZE), self.rng.randrange(-6000, 6000)])

    def same(self, ask):
        """Both give the same answer, or fail alike."""
        found = []
        for fs in (self.ours, self.memory):
            try:
                found.append(ask(fs))
            except Exception as error:
                found.append(type(error))
        assert found[0] == found[1]

    def open(self):
        for name in self.NAMES[:3]:
            self.files[name] = self.ours.open(name), self.memory.open(name)

    def replace(self):
        """Another object in the place of one; handles are of what was there before, so they are opened again."""
        name, data = self.rng.choice(self.NAMES[1:3]), self.rng.randbytes(self.rng.randrange(9000))
        self.server.put(name.removeprefix("/t/"), data)
        self.memory.pipe_file(name, data)
        self.open()

    def seek(self):
        mine, other = self.files[self.rng.choice(self.NAMES[:3])]
        match self.rng.randrange(3):
            case 0:
                offset = self.rng.randrange(SIZE + 9000)
                assert mine.seek(offset) == other.seek(offset)
            case 1:
                offset = min(self.rng.randrange(5000), len(other.getbuffer()))
                assert mine.seek(-offset, os.SEEK_END) == other.seek(-offset, os.SEEK_END)
            case 2:
                offset = self.rng.randrange(5000)
                assert mine.seek(offset, os.SEEK_CUR) == other.seek(offset, os.SEEK_CUR)
        assert mine.tell() == other.tell()

    def read(self):
        mine, other = self.files[self.rng.choice(self.NAMES[:3])]
        length = self.rng.choice([0, 1, self.rng.randrange(5000)])
        if self.rng.randrange(2):
            assert mine.read(length) == other.read(length)
        else:
            there, here = bytearray(length), bytearray(length)
            assert mine.readinto(here) == other.readinto(there) and here == there
        assert mine.tell() == other.tell()

    def cat_file(self):
        name, start = self.name(), self.rng.randrange(SIZE)
        end = start + self.rng.randrange(5000)
        self.same(lambda fs: fs.cat_file(name, start, end))

    def cat_slice(self):
        name, start, end = self.rng.choice(self.NAMES[1:3]), self.bound(), self.bound()
        first, last, _ = slice(start, end).indices(self.memory.size(name))
        assert self.ours.cat_file(name, start, end) == self.memory.cat_file(name)[first:last]

    def cat_ranges(self):
        names = [self.rng.choice(self.NAMES[:2]) for _ in range(3)]
        starts, end = [self.rng.randrange(4000) for _ in names], 4500
        wanted = [self.memory.cat_file(name, start, end) for name, start in zip(names, starts, strict=True)]
        assert self.ours.cat_ranges(names, starts, end) == wanted

    def look(self):
        name = self.name()
        self.same(lambda fs: (fs.exists(name), fs.isfile(name), fs.size(name)))
        self.same(lambda fs: fs.ls("/t"))

    def step(self):
        often = [self.seek, self.read, self.cat_file, self.cat_ranges, self.cat_slice]
        seldom = [self.look, self.replace]
        self.rng.choice(seldom if self.rng.randrange(50) == 0 else often)()


def test_operations_at_random_are_those_of_the_memory_file_system(server, memory):
    operations = Operations(server, memory, seed=3)
    for _ in range(OPERATIONS):
        operations.step()
    assert server.stats()["reads"] > OPERATIONS // 4


def test_coroutines_answer_as_the_calls_do(server, memory):
    options = {"server": server.name, "target_protocol": "memory", "asynchronous": True, "skip_instance_cache": True}
    fs = fsspec.filesystem("quinion", **options)
    assert fs.async_impl and fs.asynchronous and pickle.loads(pickle.dumps(fs)).asynchronous

    async def ask():
        whole, part, end = await asyncio.gather(
            fs._cat_file("/t/a"), fs._cat_file("/t/a", 5, 10), fs._cat_file("quinion:///t/a", -7)
        )
        assert (whole, part, end) == (DATA, DATA[5:10], DATA[-7:])
        assert await fs._cat_file("/t/with space%41", -10, -5) == DATA[4990:4995]
        assert await fs._ls("/t") == memory.ls("/t") and await fs._info("/t/a") == memory.info("/t/a")
        assert await fs._exists("/t/a") and not await fs._exists("/t/none")
        assert sorted(await fs._find("/t")) == sorted(memory.find("/t"))
        found = await fs._cat_ranges(["/t/a", "/t/none", "/t/a"], [0, 0, 5], 9)
        assert found[0] == DATA[:9] and isinstance(found[1], FileNotFoundError) and found[2] == DATA[5:9]
        with pytest.raises(FileNotFoundError):
            await fs._cat_ranges(["/t/none"], 0, 4, on_error="raise")
        assert await fs._cat(["/t/a", "/t/empty"]) == {"/t/a": DATA, "/t/empty": b""}
        await fs._pipe_file("/t/new", b"new")
        await fs._cp_file("/t/new", "/t/newer")
        assert memory.cat_file("/t/newer") == b"new"
        await fs._rm("/t/new")
        await fs._rm_file("/t/newer")
        assert not memory.exists("/t/new") and not memory.exists("/t/newer")

    before = server.stats()["reads"]
    asyncio.run(ask())
    assert server.stats()["reads"] > before


def test_files_without_a_size_and_files_that_grow_are_read_to_their_end(server, tmp_path):
    """Coroutines read as much as the size was: nothing of a file of /proc, whose size is 0 for the kernel."""
    options = {"server": server.name, "target_protocol": "file", "skip_instance_cache": True}
    fs, waits = (fsspec.filesystem("quinion", asynchronous=is_so, **options) for is_so in (False, True))
    known = pathlib.Path("/proc/filesystems").read_bytes()
    assert os.stat("/proc/filesystems").st_size == 0 < len(known)
    for start, end in [(None, None), (0, 10), (3, 10), (None, 7), (5, len(known) + 9), (5, None), (9, 4), (1 << 70, 1 << 71)]:
        found = fs.cat_file("/proc/filesystems", start, end)
        assert found == asyncio.run(waits._cat_file("/proc/filesystems", start, end)) == known[start:end]
    path = tmp_path / "grows"
    path.write_bytes(DATA)
    size = quinion.File.size

    def and_then_it_grows(file):
        found = size.fget(file)
        with path.open("ab") as appended:
            appended.write(b"x")
        return found

    quinion.File.size = property(and_then_it_grows)
    try:
        found = asyncio.run(waits._cat_file(str(path)))
    finally:
        quinion.File.size = size
    assert found == path.read_bytes()


def test_the_other_file_system_is_asynchronous_as_well(server):
    made = fsspec.filesystem("quinion", server=server.name, target_protocol="http", asynchronous=True)
    assert made.fs.asynchronous
    waits = fsspec.filesystem("quinion", server=server.name, target_protocol="http")
    assert waits.async_impl and not waits.asynchronous and not waits.fs.asynchronous


def test_reads_of_one_loop_are_side_by_side(server, web):
    web_server = ServerProcess(server.objects, stores={web.url: {}})
    try:
        for n in range(4):
            web.objects[f"part-{n}"] = DATA[n:]
        fs = fsspec.filesystem("quinion", server=web_server.name, target_protocol="http", asynchronous=True)

        async def ask():
            opened = [await fs.client.aopen(f"{web.url}/part-{n}") for n in range(4)]
            web.stall_gets()
            reads = [asyncio.create_task(file.aread_at(0, 100)) for file in opened]
            # All four are at the store before any is answered.
            await asyncio.to_thread(web.wait_until_stalled, 4)
            web.flow()
            assert await asyncio.gather(*reads) == [DATA[n : n + 100] for n in range(4)]
            return await asyncio.gather(*(fs._cat_file(f"{web.url}/part-{n}") for n in range(4)))

        assert asyncio.run(ask()) == [DATA[n:] for n in range(4)]
    finally:
        web.flow()
        web_server.kill()


class StoreByOtherNames(fsspec.AbstractFileSystem):
    """What adlfs, gcsfs and s3fs are to us: bucket and key as a path, and names of their own for it."""

    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path):
        return path.partition("://")[2] or path

    def ls(self, path, detail=True, **_options):
        raise FileNotFoundError(path)

    def info(self, path, **_options):
        return {"name": self._strip_protocol(path), "size": SIZE, "type": "file"}


@pytest.mark.parametrize(
    ("names", "scheme"),
    [
        (("abfs", "az", "abfss"), "az"),
        ("abfs", "az"),
        (("abfss", "abfs"), "az"),
        (("gcs", "gs"), "gs"),
        (("gs", "gcs"), "gs"),
        (("s3a", "s3"), "s3"),
        (("s3", "s3a"), "s3"),
    ],
)
def test_stores_that_others_name_otherwise_are_the_servers(tmp_path, monkeypatch, names, scheme):
    stub = type("Stub", (StoreByOtherNames,), {"protocol": names})
    all_names = {scheme, *([names] if isinstance(names, str) else names)}
    for name in all_names:
        monkeypatch.setitem(_registry, name, stub)
    server = str(tmp_path / "q" / "s.sock")
    stores = {f"{scheme}://bucket": {"key with space%41": DATA}}
    with quinion.serve(server, memory=16 << 20, stores=stores):
        for name in all_names:
            with fsspec.open(f"quinion::{name}://bucket/key with space%41", quinion={"server": server}) as file:
                assert file.read() == DATA
            fs = fsspec.filesystem("quinion", server=server, target_protocol=name)
            assert fs.cat_file("bucket/key with space%41", 5, 10) == DATA[5:10]
            with pytest.raises(FileNotFoundError):
                fs.cat_file(f"{name}://bucket/none")


class Versions(StoreByOtherNames):
    """One whose objects have versions, as those of s3fs."""

    protocol = ("s3", "s3a")

    def cat_file(self, path, start=None, end=None, version_id=None, **_options):
        return f"{path} of {version_id}".encode()[start:end]

    def _open(self, path, mode="rb", version_id=None, **_options):
        return io.BytesIO(self.cat_file(path, version_id=version_id))


def test_a_version_that_is_asked_for_is_read_by_the_other_file_system(tmp_path, monkeypatch):
    """The option was left out, and the newest version read."""
    monkeypatch.setitem(_registry, "s3", Versions)
    server = str(tmp_path / "q" / "s.sock")
    with quinion.serve(server, memory=16 << 20, stores={"s3://bucket": {"key": DATA}}):
        options = {"server": server, "target_protocol": "s3"}
        fs = fsspec.filesystem("quinion", **options)
        path, version = "quinion://bucket/key", {"version_id": "7"}
        with fs.open(path, **version) as file:
            assert file.read() == b"bucket/key of 7"
        assert fs.cat_file(path, 7, **version) == b"key of 7" and fs.cat(path, **version) == b"bucket/key of 7"
        assert fs.cat_ranges([path, path], [0, 7], [6, 10], **version) == [b"bucket", b"key"]
        waits = fsspec.filesystem("quinion", asynchronous=True, skip_instance_cache=True, **options)
        assert asyncio.run(waits._cat_file(path, 7, **version)) == b"key of 7"
        assert asyncio.run(waits._cat_ranges([path], 0, 6, **version)) == [b"bucket"]
        # Options by which the same bytes come, and those that are not given, leave it to the cache.
        with fs.open(path, block_size=5, cache_type="none", version_id=None) as file:
            assert file.read() == DATA
        assert fs.cat_file(path, 5, 10, version_id=None) == DATA[5:10]


def test_chains_and_pickles(server, memory):
    options = {"quinion": {"server": server.name}}
    with fsspec.open("quinion::memory:///t/a", **options) as file:
        assert file.read() == DATA
    fs, path = fsspec.url_to_fs("quinion::memory:///t/a", **options)
    assert path == "/t/a" and pickle.loads(pickle.dumps(fs)).cat_file(path, 5, 10) == DATA[5:10]
    with pytest.raises(FileNotFoundError):
        fs.open("/t/none")
    # DuckDB gives paths back with the protocol.
    assert fs.modified("quinion:///t/a") == memory.modified("/t/a") and fs.size("quinion:///t/a") == SIZE
    assert fs.ls("quinion:///t") == memory.ls("/t") and fs.cat_file("quinion:///t/a", 0, 3) == DATA[:3]
    fs.pipe_file("quinion:///t/new", b"new")
    assert memory.cat_file("/t/new") == b"new"
    fs.rm("quinion:///t/new")
    assert not memory.exists("/t/new")
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
