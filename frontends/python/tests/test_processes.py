"""Processes: each way to start one gives a child that reads, and many cost the GETs of one."""

import contextlib
import errno
import multiprocessing
import os
import pickle
import time

import pytest
import quinion
from conftest import DATA, in_child

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


def test_a_child_reads_the_local_file_that_was_opened_and_no_other(client, tmp_path, monkeypatch):
    """A handle of a path was opened again by that path. From another working directory, or after the file was replaced,
    a child read another file at the same position."""
    here, other = tmp_path / "here", tmp_path / "other"
    for folder, data in ((here, DATA), (other, bytes(len(DATA)))):
        folder.mkdir()
        (folder / "data").write_bytes(data)
    monkeypatch.chdir(here)
    file = client.open("data")
    file.seek(7)
    kept = pickle.dumps(file)

    def elsewhere():
        os.chdir(other)
        return [one.read(9) for one in (file, pickle.loads(kept))]

    assert in_child(elsewhere) == [DATA[7:16]] * 2
    (other / "data").replace(here / "data")

    def replaced():
        numbers = []
        for again in (lambda: file, lambda: pickle.loads(kept)):
            try:
                again().read(9)
            except OSError as error:
                numbers.append(error.errno)
        return numbers

    assert in_child(replaced) == [errno.ESTALE] * 2
    assert file.read(9) == DATA[7:16], "the handle itself goes on"


@pytest.mark.parametrize("is_served", [True, False])
def test_a_file_that_has_the_inode_number_of_a_deleted_one_is_another(client, server, tmp_path, is_served):
    """ext4 gives the number of a deleted file to the next one. A pickled file was known by it alone, and was that one."""
    path = tmp_path / "data"
    for n in range(100):
        path.write_bytes(DATA)
        # The kernel reads what another process has open for writing, and no server keeps it.
        with open(path, "r+b") if not is_served else contextlib.nullcontext(), client.open(path) as file:
            kept, number = pickle.dumps(file), path.stat().st_ino
            assert file.read_at(0, 5) == DATA[:5]
        path.unlink()
        time.sleep(0.02)  # longer than the clock of births stands still
        path.write_bytes(bytes(len(DATA)))
        if path.stat().st_ino == number:
            break
        path.unlink()
    else:
        pytest.skip("SKIPPED: this file system gave no number again, or the server keeps the file")
    with pytest.raises(OSError) as failed:
        pickle.loads(kept)
    assert failed.value.errno == errno.ESTALE


def test_a_server_by_a_relative_path_is_the_same_from_another_working_directory(server, monkeypatch):
    """Opens looked for the socket from where the process was by then."""
    folder, socket = os.path.split(server.name)
    monkeypatch.chdir(folder)
    client = quinion.connect(f"./{socket}")
    monkeypatch.chdir("/")
    assert client.open(URL).read() == DATA
    assert in_child(lambda: client.open(URL).read()) == DATA
    assert pickle.loads(pickle.dumps(client)).open(URL).read() == DATA


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
