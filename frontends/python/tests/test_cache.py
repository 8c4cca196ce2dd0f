"""A cache of the process itself: what a client's does, without a server, and nothing of it in a forked child."""

import errno
import os
import pickle
import sys
import threading

import numpy
import pytest
import quinion
from conftest import DATA, SIZE, Web, in_child, wait_until

URL = "data://s/a"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "objects"
    made.mkdir()
    (made / "a").write_bytes(DATA)
    return made


@pytest.fixture
def cache(folder):
    with quinion.Cache(memory=64 << 20, stores={"data://s": folder.as_uri()}) as made:
        yield made


def test_each_byte_is_fetched_once_and_the_numbers_say_so(cache):
    assert cache.open(URL).read() == DATA
    before = cache.stats()
    assert before["fetched_bytes"] == SIZE and before["gets"] >= 1 and before["heads"] == 1
    assert cache.open(URL).read() == DATA and cache.open(URL).read_ranges([(5, 9)]) == [DATA[5:14]]
    after = cache.stats()
    assert (after["gets"], after["fetched_bytes"]) == (before["gets"], SIZE)
    assert after["hits"] > before["hits"] and after["bytes"] == 2 * SIZE + 9
    assert SIZE <= after["cached_bytes"] <= after["memory_bytes"] == 64 << 20
    assert "% of" in repr(cache) and str(after["cached_bytes"]) in repr(cache)


def test_memory_is_taken_before_it_is_needed():
    with quinion.Cache(memory=64 << 20) as lazy, quinion.Cache(memory=64 << 20, populate=True) as eager:
        assert lazy.stats()["grown_bytes"] < 32 << 20 < eager.stats()["grown_bytes"] <= 64 << 20
        assert 40 << 20 <= lazy.populate(40 << 20) <= lazy.stats()["grown_bytes"] < 48 << 20
        assert 40 << 20 <= lazy.populate(1) < 48 << 20
        assert 48 << 20 < lazy.populate() == lazy.populate(1 << 70) == eager.populate() <= 64 << 20
        for wrong in [-1, "1G"]:
            with pytest.raises((TypeError, ValueError)):
                lazy.populate(wrong)
    with pytest.raises(ValueError, match="closed"):
        lazy.populate()


def test_a_pin_is_the_cache_itself_and_outlives_it(cache, tmp_path):
    file = cache.open(URL)
    pin, again = file.pin(4096, 4096), file.pin(4096, 4096)
    view = memoryview(pin)
    assert view.readonly and not pin.is_copied and view == DATA[4096:8192]
    addresses = [numpy.frombuffer(one, dtype="u1").ctypes.data for one in (pin, again)]
    assert addresses[0] == addresses[1]
    assert cache.stats()["pinned_bytes"] >= 4096
    del again
    cache.close()
    assert view == DATA[4096:8192]


def test_pins_do_not_leak(cache, tmp_path):
    local = tmp_path / "local"
    local.write_bytes(DATA)
    for file in (cache.open(URL), cache.open(local)):
        for n in range(50_000):
            offset = n * 4096 % (SIZE - 100)
            assert memoryview(file.pin(offset, 1))[0] == DATA[offset]
    assert cache.stats()["pinned_bytes"] == 0


def test_too_much_that_is_pinned_is_an_error(folder):
    with (folder / "big").open("wb") as big:
        big.truncate(64 << 20)
    with quinion.Cache(memory=16 << 20, stores={"data://s": folder.as_uri()}) as cache:
        with pytest.raises(OSError) as failed:
            cache.open("data://s/big").pin(0, 64 << 20)
        assert failed.value.errno == errno.ENOBUFS
        assert cache.open("data://s/big").read() == bytes(64 << 20)


def test_a_closed_cache_is_closed_with_its_files(cache):
    file = cache.open(URL)
    cache.close()
    cache.close()
    assert file.closed and "closed" in repr(cache)
    for use in (lambda: cache.open(URL), cache.stats, lambda: file.read_at(0, 1)):
        with pytest.raises(ValueError):
            use()


def test_a_file_that_is_opened_while_the_cache_is_closed_is_closed(cache, monkeypatch):
    """1. A thread has opened a file. 2. Another closes the cache, and all files that it knows.
    3. The first adds its file, which stayed open."""
    opened, opens = [], quinion.File._open

    def and_closed(file, *arguments):
        raw = opens(file, *arguments)
        opened.append(file)
        closing = threading.Thread(target=cache.close)
        closing.start()
        closing.join()
        return raw

    monkeypatch.setattr(quinion.File, "_open", and_closed)
    with pytest.raises(ValueError, match="closed"):
        cache.open(URL)
    assert [file.closed for file in opened] == [True]


def test_caches_are_closed_beside_opens(folder):
    """The close went through the files while another thread added one: "Set changed size during iteration"."""
    interval, failures = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            cache, files = quinion.Cache(memory=16 << 20), []

            def opens(cache=cache, files=files):
                try:
                    while True:
                        files.append(cache.open(folder / "a"))
                except ValueError:
                    pass
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=opens) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda files=files: len(files) > 500)
            try:
                cache.close()
            except BaseException as error:
                failures.append(error)
                cache._raw_cache = None
            for thread in threads:
                thread.join()
            assert not failures and all(file.closed for file in files)
    finally:
        sys.setswitchinterval(interval)


def test_a_forked_child_is_told_that_it_has_no_cache(cache):
    file = cache.open(URL)
    pin = file.pin(0, 10)
    uses = [
        lambda: cache.open(URL), lambda: cache.stats(), lambda: file.read_at(0, 5), lambda: file.pin(0, 5),
        lambda: file.read_ranges([(0, 5)]), lambda: file.size, lambda: cache._raw_cache.open(URL, None),
        lambda: file._state[1].read_at(0, 5), lambda: file._state[1].pin(0, 5),
    ]  # fmt: skip

    def use_each():
        told = []
        for use in uses:
            try:
                use()
            except RuntimeError as error:
                told.append("fork" in str(error))
        try:
            memoryview(pin)
        except BufferError:
            told.append(True)
        cache.close()
        return told, repr(cache), os.path.exists("/proc/self")

    told, text, _ = in_child(use_each)
    assert told == [True] * (len(uses) + 1) and text in ("<quinion.Cache: closed>", "<quinion.Cache: of another process>")
    assert file.read() == DATA and bytes(pin) == DATA[:10]


def test_forks_beside_reads_hang_nothing(cache, folder):
    with (folder / "big").open("wb") as big:
        big.truncate(40 << 20)
    stop = threading.Event()

    def read():
        file, buffer = cache.open("data://s/big"), bytearray(1 << 20)
        while not stop.is_set():
            for offset in range(0, 40 << 20, 1 << 20):
                file.readinto_at(offset, buffer)

    def use():
        with pytest.raises(RuntimeError):
            cache.open(URL)
        with quinion.Cache(memory=16 << 20, stores={"data://s": folder.as_uri()}) as own:
            return own.open(URL).read()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(use) == DATA
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_it_does_not_pickle(cache):
    with pytest.raises(TypeError, match="serve"):
        pickle.dumps(cache)
    with pytest.raises(TypeError, match="serve"):
        pickle.dumps(cache.open(URL))


def test_local_files_are_read_as_they_are_now(cache, tmp_path):
    path = tmp_path / "local"
    path.write_bytes(DATA)
    file = cache.open(path)
    pin = file.pin(10, 10)
    assert file.read() == DATA and bytes(pin) == DATA[10:20] and not pin.is_copied and file.size == SIZE
    assert file.read_ranges([(SIZE - 5, 5), (0, 7)]) == [DATA[-5:], DATA[:7]]
    with pytest.raises(EOFError):
        file.read_ranges([(SIZE - 5, 6)])
    with path.open("r+b") as other:
        other.write(b"changed")
    assert file.read_at(0, 8) == b"changed" + DATA[7:8] and cache.open(path.as_uri()).read_at(0, 7) == b"changed"
    assert cache.open("/proc/self/status").read().startswith(b"Name:")
    with pytest.raises(IsADirectoryError):
        cache.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        cache.open(tmp_path / "none")


def test_errors_are_those_of_python(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        cache.open("data://s/none")
    with pytest.raises(OSError, match="no store") as refused:
        cache.open("data://elsewhere/x")
    assert refused.value.errno == errno.ENODEV
    with pytest.raises(OSError) as refused:
        cache.open("data://s/a%2")
    assert refused.value.errno in (errno.EINVAL, errno.ENOENT)
    with pytest.raises(ValueError, match="memory"):
        quinion.Cache(memory=1)
    for stores in ({"nothing": {"a": b""}}, {"s3://b/c": {"region": "x"}}, {"s3://b": {"no such": "x"}}):
        with pytest.raises(ValueError):
            quinion.Cache(memory=16 << 20, stores=stores)


@pytest.mark.parametrize(
    ("prefix", "options", "key"),
    [
        ("s3://b", {"endpoint": "URL", "allow_http": "true", "region": "x", "skip_signature": "true"}, "b/a"),
        ("gs://b", {"base_url": "URL", "allow_http": "true", "google_skip_signature": "true"}, "b/a"),
        ("az://b", {"endpoint": "URL/me", "account_name": "me", "allow_http": "true", "skip_signature": "true"}, "me/b/a"),
        ("URL", {"timeout": "50 seconds"}, "a"),
    ],
)
def test_each_scheme_is_read_by_the_protocol_of_its_store(web, prefix, options, key):
    web.objects = {key: DATA}
    stores = {prefix.replace("URL", web.url): {name: value.replace("URL", web.url) for name, value in options.items()}}
    (prefix,) = stores
    with quinion.Cache(memory=32 << 20, stores=stores) as cache:
        file = cache.open(f"{prefix}/a")
        assert file.read() == DATA and file.etag and web.sent[key] == SIZE
        with pytest.raises(FileNotFoundError):
            cache.open(f"{prefix}/none")


@pytest.mark.parametrize("stores", [None, {"s3://b": {}}])
def test_an_endpoint_of_the_environment_is_asked_without_tls_if_it_says_so(web, monkeypatch, stores):
    """1. The environment has an endpoint that begins with http://. 2. Each open failed: "HTTP error: builder error"."""
    web.objects = {"b/a": DATA}
    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": web.url, "AWS_REGION": "x"}
    for name, value in (variables | {"AWS_SKIP_SIGNATURE": "true"}).items():
        monkeypatch.setenv(name, value)
    with quinion.Cache(memory=32 << 20, stores=stores) as cache:
        assert cache.open("s3://b/a").read() == DATA
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with quinion.Cache(memory=32 << 20, stores={"s3://b": {"endpoint": web.url}}) as cache:
        assert cache.open("s3://b/a").read() == DATA


@pytest.mark.parametrize("url, is_kept", [("s3://b/a", True), ("WEB/b/a", False)])
def test_a_disk_keeps_what_was_fetched_but_no_files_of_the_web(web, tmp_path, url, is_kept):
    """A web server makes ETags of times and sizes, which a file may have that was put in another's place."""
    web.objects["b/a"] = DATA
    options = {"endpoint": web.url, "allow_http": "true", "region": "x", "skip_signature": "true"}
    disk, stores = (tmp_path / "disk", 64 << 20), {"s3://b": options}
    for fetched in [SIZE, 0 if is_kept else SIZE]:
        with quinion.Cache(memory=32 << 20, disk=disk, stores=stores) as cache:
            assert cache.open(url.replace("WEB", web.url)).read() == DATA
            stats = cache.stats()
        assert stats["fetched_bytes"] == fetched
    assert (stats["disk_hit_bytes"] >= SIZE) == is_kept


def test_a_url_of_the_web_needs_no_store(web: Web):
    web.objects["b%20c"] = b"spaced"
    with quinion.Cache(memory=16 << 20) as cache:
        assert cache.open(f"{web.url}/a").read() == DATA
        assert cache.open(f"{web.url}/b%20c").read() == b"spaced"
        assert cache.open(f"{web.url}/a").etag and web.sent["a"] == SIZE
