"""Service: one server for a node, whoever starts it; Dask's workers share it."""

import math
import multiprocessing
import os
import signal
import time
import types

import pytest
import quinion
from conftest import DATA, engine, processes_of, wait_until
from quinion import service

URL = "data://s/a"


@pytest.fixture
def name(tmp_path):
    made = str(tmp_path / "q" / "service.sock")
    yield made
    for process in processes_of(made):
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def stores(tmp_path):
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / "a").write_bytes(DATA)
    return {"data://s": folder.as_uri()}


def read(name, stores, start, results):
    start.wait()
    with quinion.ensure_service(name, memory=32 << 20, stores=stores).open(URL) as file:
        results.put(file.read() == DATA)


def test_many_that_start_at_a_time_share_one(name, stores):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    children = [context.Process(target=read, args=(name, stores, start, results)) for _ in range(4)]
    for child in children:
        child.start()
    start.set()
    assert [results.get(timeout=300) for _ in children] == [True] * 4
    for child in children:
        child.join(timeout=300)
        assert child.exitcode == 0
    wait_until(lambda: len(processes_of(name)) == 1)


def test_modules_of_the_working_directory_are_not_run(name, stores, tmp_path, monkeypatch):
    """A server that a script in `/tmp` started ran what any user had put there as `asyncio.py`."""
    (tmp_path / "asyncio.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    # The path is relative, and the server leaves this directory.
    client = quinion.ensure_service(os.path.relpath(name), memory=16 << 20, stores=stores)
    assert client.open(URL).read() == DATA and client.name == name
    assert not (tmp_path / "ran").exists()


def test_an_idle_time_that_is_none_is_refused(name, stores):
    for idle in [-1, math.nan]:
        with pytest.raises(ValueError, match="idle"):
            quinion.ensure_service(name, memory=16 << 20, stores=stores, idle=idle)
    assert not processes_of(name)


def test_a_server_that_may_not_be_idle_sleeps_between_two_looks(monkeypatch):
    slept, now = [], iter(range(100))
    monkeypatch.setattr(service, "time", types.SimpleNamespace(sleep=slept.append, monotonic=now.__next__))
    service._serve_until_idle(types.SimpleNamespace(stats=lambda: {"clients": 0}), 0)
    assert slept and min(slept) > 0


def test_an_idle_one_ends(name, stores):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=read_briefly, args=(name, stores, results))
    child.start()
    assert results.get(timeout=300) == 1
    child.join(timeout=300)
    wait_until(lambda: not processes_of(name))


def read_briefly(name, stores, results):
    client = quinion.ensure_service(name, memory=16 << 20, stores=stores, idle=0.2)
    # It is not idle while this process is connected, however long that is.
    time.sleep(2)
    assert client.open(URL).read() == DATA
    results.put(len(processes_of(name)))


def test_after_a_killed_one_the_next_is_started_and_open_files_go_on(name, stores):
    client = quinion.ensure_service(name, memory=16 << 20, stores=stores)
    file = client.open(URL)
    assert file.read_at(0, 5) == DATA[:5]
    (process,) = processes_of(name)
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: client.owner_is_dead)
    again = quinion.ensure_service(name, memory=16 << 20, stores=stores)
    assert again.open(URL).read() == DATA and client.open(URL).read() == DATA
    assert processes_of(name) != [process]


def test_what_cannot_be_served_is_said(name, stores):
    with pytest.raises(OSError, match="folder"):
        quinion.ensure_service(name, memory=16 << 20, stores={"a://b": "http://c"})
    with pytest.raises(TypeError, match="memory"):
        quinion.ensure_service(name, memory=16 << 20, stores={"a://b": {"k": b"v"}})
    wait_until(lambda: not processes_of(name))


def length_of_part(name, url):
    with quinion.connect(name).open(url) as file:
        return len(file.read()), os.getpid()


def length_by_dask(url):
    import quinion.dask

    client = quinion.dask.client()
    with client.open(url) as file:
        return len(file.read()), client.name


def test_dask_workers_cost_the_gets_of_one(name, web):
    distributed = engine("distributed")
    from quinion.dask import Plugin, workers_with

    for n in range(8):
        web.objects[f"part-{n}"] = DATA[n:]
    cluster = distributed.LocalCluster(
        n_workers=3, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    )
    with cluster, distributed.Client(cluster, timeout=120) as client:
        client.register_plugin(Plugin(name, memory=64 << 20, stores={web.url: {}}))
        workers = list(client.scheduler_info()["workers"])
        for _epoch in range(2):
            # Each worker reads each part.
            futures = [
                client.submit(length_of_part, name, f"{web.url}/part-{n}", workers=[worker], pure=False)
                for n in range(8)
                for worker in workers
            ]
            found = client.gather(futures)
            assert [length for length, _ in found] == [len(DATA) - n for n in range(8) for _ in workers]
            assert len({process for _, process in found}) == 3
            # Each byte came once, for all workers and both rounds.
            assert sum(web.sent.values()) == sum(len(web.objects[f"part-{n}"]) for n in range(8))
        assert len(processes_of(name)) == 1
        # The hint names workers of the node that has the object, and none for another object.
        web.objects["new"] = DATA
        assert sorted(workers_with(client, f"{web.url}/part-3", server=name)) == sorted(workers)
        assert workers_with(client, f"{web.url}/new", server=name) == []


def test_dask_tasks_go_on_after_the_server_was_killed(name, web):
    distributed = engine("distributed")
    from quinion.dask import Plugin

    web.objects["part"] = DATA
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    )
    with cluster, distributed.Client(cluster, timeout=120) as client:
        stores = {web.url: {}}
        client.register_plugin(Plugin(name, memory=64 << 20, stores=stores))
        length = client.submit(length_of_part, name, f"{web.url}/part", pure=False)
        assert length.result()[0] == len(DATA)
        wait_until(lambda: len(processes_of(name)) == 1)  # both workers may have started one, of which one ends
        (process,) = processes_of(name)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: not processes_of(name))
        # Only the workers may start another.
        workers = list(client.scheduler_info()["workers"])
        url = f"{web.url}/part"
        again = [client.submit(length_by_dask, url, workers=[worker], pure=False) for worker in workers]
        assert client.gather(again) == [(len(DATA), name)] * 2
        wait_until(lambda: len(processes_of(name)) == 1)
        # And a name alone leads there now.
        assert client.submit(length_of_part, name, url, pure=False).result()[0] == len(DATA)


def test_dask_tells_a_worker_without_the_plugin_what_is_missing():
    distributed = engine("distributed")
    import quinion.dask

    with pytest.raises(ValueError, match="orker"):
        quinion.dask.client()  # of no worker
    options = {"n_workers": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster, timeout=120) as client:
        with pytest.raises(RuntimeError, match="register_plugin"):
            client.submit(length_by_dask, "data://s/a", pure=False).result()
