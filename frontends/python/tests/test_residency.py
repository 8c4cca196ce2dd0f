"""Residency and prefetch: what a cache says that it has is what it has, and what was asked for is there."""

import errno
import io
import os
import signal
import subprocess
import sys

import pytest
import quinion
from conftest import DATA, SIZE, ServerProcess, engine, in_child, wait_until

URL = "data://s/a"
PAGE = 4096


def test_residency_grows_with_what_was_read(opener):
    file = opener.open(URL)
    before = file.residency()
    assert (before.size, before.cached, before.ranges) == (SIZE, 0, [])
    file.read_at(SIZE - 10, 10)
    some = opener.residency(URL)
    assert some.cached >= 10 and sum(some.ranges[-1]) == SIZE
    file.read()
    whole = opener.residency(URL)
    assert whole.ranges == [(0, SIZE)] and whole.cached == whole.size == SIZE
    part = file.residency(PAGE + 5, 100)
    assert part.ranges == [(PAGE + 5, 100)] and part.size == 100
    assert file.residency(SIZE + 5, 100).size == 0 and file.residency(SIZE - 1, 100).cached == 1
    assert repr(whole) == f"<quinion.Residency of {URL!r}: {SIZE} of {SIZE} bytes, 100.0 %>"


def test_residency_is_the_servers_and_not_the_processs(server, client):
    client.open(URL).read()
    program = "import quinion, sys; print(quinion.residency(sys.argv[1], server=sys.argv[2]).cached)"
    told = subprocess.run([sys.executable, "-c", program, URL, server.name], capture_output=True, text=True, check=True)
    assert int(told.stdout) == SIZE


def test_residency_tells_what_was_evicted(tmp_path):
    server = ServerProcess(tmp_path, memory=16 << 20)
    try:
        for n in range(12):
            (server.objects / str(n)).write_bytes(DATA)
        client = quinion.connect(server.name)
        for n in range(12):
            assert client.open(f"data://s/{n}").read() == DATA
        # Twelve times three MiB went through sixteen.
        assert sum(client.residency(f"data://s/{n}").cached for n in range(12)) <= 16 << 20
        assert client.residency("data://s/0").cached < SIZE
    finally:
        server.kill()


def test_local_files_of_a_cache_have_a_residency(tmp_path):
    (tmp_path / "f").write_bytes(DATA)
    with quinion.Cache(memory=64 << 20) as cache:
        file = cache.open(tmp_path / "f")
        assert file.residency().cached == 0
        file.read()
        assert cache.residency(tmp_path / "f").ranges == [(0, SIZE)]
        assert cache.residency("/dev/null").ranges == []


def test_a_prefetch_that_waits_brings_all(opener):
    file = opener.open(URL)
    file.prefetch(wait=True)
    assert file.residency().ranges == [(0, SIZE)]
    assert file.read() == DATA
    with pytest.raises(ValueError):
        file.prefetch(-1)


def test_a_prefetch_asks_and_does_not_wait(web, web_opener):
    file = web_opener.open(f"{web.url}/a")
    web.stall_gets()
    file.prefetch(0, 1 << 20)
    web.wait_until_stalled()
    assert file.residency().cached == 0
    web.flow()
    assert file.read_at(0, 1 << 20) == DATA[: 1 << 20]


def test_a_prefetch_of_more_than_may_be_pinned_brings_it_all_the_same(tmp_path):
    server = ServerProcess(tmp_path, memory=16 << 20)
    try:
        (server.objects / "a").write_bytes(DATA * 8)
        client = quinion.connect(server.name)
        file = client.open(URL)
        kept = file.pin(0, 3 << 20)
        with pytest.raises(OSError) as refused:
            file.pin(4 << 20, 3 << 20)
        assert refused.value.errno == errno.ENOBUFS
        file.prefetch(0, 9 << 20, wait=True)
        assert bytes(kept) == DATA[: 3 << 20] and server.stats()["fetched_bytes"] >= 9 << 20
    finally:
        server.kill()


def test_a_prefetch_shows_a_bar(opener, capsys):
    engine("tqdm")
    opener.open(URL).prefetch(progress=True)
    assert "100%" in capsys.readouterr().err


def test_a_bar_without_tqdm_says_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="tqdm"):
        client.open(URL).prefetch(progress=True)


def test_a_failed_prefetch_is_an_error_if_it_is_waited_for(server, client):
    file = client.open(URL)
    (server.objects / "a").unlink()
    with pytest.raises(OSError):
        file.prefetch(wait=True)


def test_top_shows_what_a_cache_did_between_two_lines(server):
    with quinion.Cache(memory=64 << 20, stores={"data://s": server.objects.as_uri()}) as cache:

        class Reading:
            """A cache that is read by each look at it."""

            def stats(self):
                with cache.open(URL) as file:
                    file.read()
                return cache.stats()

        out = io.StringIO()
        quinion.top(Reading(), cache, every=0.01, times=2, file=out)
    head, *lines = out.getvalue().splitlines()
    assert head.split()[:2] == ["cache", "reads/s"] and len(lines) == 4
    reading = [line.split() for line in lines if line.startswith("Reading 1")]
    # Both rounds read what was there by then.
    assert all(float(words[2]) > 0 and words[3] == "100.0" for words in reading) and len(reading) == 2


def test_top_shows_a_server(web):
    with quinion.serve(f"top-{id(web)}", memory=16 << 20, stores={"mem://t": {"a": DATA}}) as server:
        out = io.StringIO()
        quinion.top(server, every=0.01, times=1, file=out)
        assert out.getvalue().splitlines()[1].split()[:4] == ["Server", "1", "0", "-"]


def test_top_goes_on_while_there_is_no_server_and_when_another_counts_from_zero():
    numbers = iter([{"reads": 100}, ConnectionResetError(), {"reads": 8}])

    class Restarted:
        def stats(self):
            answer = next(numbers)
            if isinstance(answer, OSError):
                raise answer
            return answer

    out = io.StringIO()
    quinion.top(Restarted(), every=0.01, times=2, file=out)
    _, gone, back = out.getvalue().splitlines()
    assert gone.endswith("does not answer") and float(back.split()[2]) > 0, out.getvalue()


def test_a_client_tells_what_its_server_does(server, client):
    before = client.stats()
    assert before["clients"] == 1 and (before["reads"], before["heads"], before["memory_bytes"]) == (0, 0, 64 << 20)
    file = client.open(URL)
    pin = file.pin(0, SIZE)
    other = "import quinion, sys; quinion.connect(sys.argv[1]).open(sys.argv[2]).read()"
    subprocess.run([sys.executable, "-c", other, server.name, URL], check=True)
    server.wait_for("clients", 1)
    server.wait_for("open_files", 1)
    stats = client.stats()
    # Of all clients: this one has read nothing.
    assert stats["reads"] > 0 and stats["bytes"] == SIZE == stats["fetched_bytes"] and stats["heads"] == 2
    assert (stats["open_files"], stats["pins"]) == (1, 1) and stats["cached_bytes"] >= stats["pinned_bytes"] >= SIZE
    assert stats == server.stats()
    shown = f"100.0 % of {stats['reads']} reads hit, {SIZE} bytes, 1 clients, {stats['cached_bytes']} of {64 << 20}"
    wait_until(lambda: shown in repr(client))  # a busy machine may answer late
    assert len(pin) == SIZE


def test_a_client_shows_what_is_wrong_with_its_server(server, client):
    os.kill(server.process.pid, signal.SIGSTOP)
    assert repr(client).endswith("which does not answer>")
    os.kill(server.process.pid, signal.SIGCONT)
    wait_until(lambda: "reads hit" in repr(client))
    assert "not yet connected" in in_child(lambda: repr(client))
    assert in_child(client.stats)["clients"] == 2  # which connects
    server.kill()
    wait_until(lambda: "has ended" in repr(client))
    with pytest.raises(ConnectionResetError):
        client.stats()


def test_top_shows_the_server_of_a_client(server, client):
    with client.open(URL) as file:
        file.read()

        class Reading:
            """A client that reads at each look at it."""

            def stats(self):
                file.read_at(0, 1 << 20)
                return client.stats()

        out = io.StringIO()
        quinion.top(Reading(), client, every=0.01, times=2, file=out)
    lines = [line.split() for line in out.getvalue().splitlines()[1:]]
    assert [line[0] for line in lines] == ["Reading", "Client"] * 2
    assert all(float(line[2]) > 0 and line[3] == "100.0" for line in lines)
