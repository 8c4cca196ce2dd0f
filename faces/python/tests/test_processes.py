"""Processes: each way to start one gives a child that reads, and many cost the GETs of one."""

import errno
import multiprocessing
import os
import pickle

import pytest
import quinion
from conftest import DATA

URL = "data://s/a"


def read_all(file, results):
    with file:
        results.put((os.getpid(), file.tell(), file.read_at(0, 1 << 30)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_read_and_cost_the_gets_of_one(client, server, method):
    file = client.open(URL)
    file.seek(7)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    children = [context.Process(target=read_all, args=(file, results)) for _ in range(4)]
    for child in children:
        child.start()
    answers = [results.get(timeout=300) for _ in children]
    for child in children:
        child.join(timeout=300)
        assert child.exitcode == 0
    assert len({pid for pid, *_ in answers} | {os.getpid()}) == 5
    assert all(position == 7 and data == DATA for _, position, data in answers)
    fetched = server.stats()["fetched_bytes"]
    assert fetched == len(DATA)
    gets = server.stats()["gets"]
    assert file.read_at(0, 1 << 30) == DATA
    assert (server.stats()["gets"], server.stats()["fetched_bytes"]) == (gets, fetched)


def test_a_handle_that_is_opened_again_is_of_the_same_version(client, server):
    kept = pickle.dumps(client.open(URL))
    assert pickle.loads(kept).read() == DATA
    new = server.objects / "new"
    new.write_bytes(bytes(len(DATA)))
    new.replace(server.objects / "a")
    with pytest.raises(OSError) as failed:
        pickle.loads(kept)
    assert failed.value.errno == errno.ESTALE
    with pytest.raises(ValueError):
        closed = client.open(URL)
        closed.close()
        pickle.dumps(closed)


def test_a_forked_child_stops_no_server_and_keeps_no_pin(tmp_path):
    name = str(tmp_path / "q" / "s.sock")
    server = quinion.serve(name, memory=16 << 20, stores={"mem://t": {"a": b"hello"}})
    child = os.fork()
    if child == 0:
        server.stop()
        del server
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert quinion.connect(name).open("mem://t/a").read() == b"hello"
    assert "hit" in repr(server)
    server.stop()
    assert "stopped" in repr(server)
