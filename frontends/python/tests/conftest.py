"""What the tests share: a folder of objects, a server of it in a process of its own, and a web server that stalls."""

import collections
import hashlib
import http.server
import importlib
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import quinion

# What `cargo xtask` has installed for these tests: a test that misses it fails.
REQUIRED = os.environ.get("QUINION_TEST_ENGINES", "").split(",")

SIZE = 3 * (1 << 20) + 1234
DATA = random.Random(24).randbytes(SIZE)


def engine(name, module=False):
    """The module of that name. A test, or a file of tests, is skipped where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name.split(".")[0] in REQUIRED:
            raise
        pytest.skip(f"SKIPPED: {name} is not installed here ({error})", allow_module_level=module)


@pytest.fixture(autouse=True)
def nothing_written():
    """No test knows what the file systems of another have written."""
    if filesystem := sys.modules.get("quinion.filesystem"):
        filesystem._WRITTEN.clear()


def in_child(work):
    """What `work` returns in a forked child, which an alarm ends if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            with open(writer, "wb") as answer:
                pickle.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        found = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return pickle.loads(found)


def processes_of(name):
    """Those that serve under that name, by what they were started as."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"quinion.service" in arguments and name.encode() in arguments:
            found.append(int(entry.name))
    return found


def wait_until(holds):
    until = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def permissions_at(address):
    """Those of the mapping that an address is in: `s` at the end says that other processes may share it."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            return line.split()[1]
    raise ValueError(f"nothing is mapped at {address:x}")


class ServerProcess:
    """A server of a folder, which it has under two names."""

    def __init__(self, folder: pathlib.Path, memory: int = 64 << 20, stores: dict | None = None) -> None:
        self.objects = folder / "objects"
        self.objects.mkdir()
        self.name = str(folder / "q" / "s.sock")
        folder_url = self.objects.as_uri()
        stores = stores or {"data://s": folder_url, "memory:///t": folder_url}
        script = pathlib.Path(__file__).with_name("server_process.py")
        command = [sys.executable, str(script), self.name, str(memory), json.dumps(stores)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def put(self, name: str, data: bytes) -> None:
        """All of it at once, so that no reader meets a half."""
        new = self.objects.parent / "new"
        new.write_bytes(data)
        new.replace(self.objects / name)

    def stats(self) -> dict[str, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait_for(self, what: str, value: int) -> None:
        """What clients give back arrives a moment later."""
        until = time.monotonic() + 300
        while self.stats()[what] != value:
            assert time.monotonic() < until, self.stats()
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path)
    (made.objects / "a").write_bytes(DATA)
    yield made
    made.kill()


@pytest.fixture
def client(server: ServerProcess) -> quinion.Client:
    return quinion.connect(server.name)


@pytest.fixture(params=["client", "cache"])
def opener(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[quinion.Client | quinion.Cache]:
    """Either of the two that open files."""
    if request.param == "client":
        yield quinion.connect(server.name)
    else:
        with quinion.Cache(memory=64 << 20, stores={"data://s": server.objects.as_uri()}) as cache:
            yield cache


class Web:
    """A web server of `objects`, which counts what it sends, and holds up each request while it is stalled."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.sent: collections.Counter[str] = collections.Counter()  # bytes, by object
        self.flowing = threading.Event()
        self.flowing.set()
        self.stalled = ("GET", "HEAD")
        self.waiting = threading.Semaphore(0)  # one for each request that is held up

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(handler) -> None:
                self._answer(handler)

            do_HEAD = do_GET

            def log_message(handler, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(server, *_: object) -> None:
                """A client that does not wait for its answer is what is tested here."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if not self.flowing.is_set() and handler.command in self.stalled:
            self.waiting.release()
            self.flowing.wait()
        data = self.objects.get(handler.path[1:])
        is_get = handler.command == "GET"
        tag = "" if data is None else f'"{hashlib.md5(data).hexdigest()}"'
        status, first, last = 200, 0, len(data or b"")
        if data is None:
            status, data = 404, b""
        elif handler.headers.get("If-Match", tag) != tag:
            status, last = 412, 0
        elif is_get and (wanted := handler.headers.get("Range")):
            begin, end = wanted.removeprefix("bytes=").split("-")
            status, first, last = 206, int(begin), min(int(end) + 1, len(data))
        handler.send_response(status)
        if status == 206:
            handler.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
        handler.send_header("ETag", tag)
        handler.send_header("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")
        handler.send_header("Content-Length", str(last - first))
        handler.end_headers()
        if is_get:
            self.sent[handler.path[1:]] += last - first
            handler.wfile.write(data[first:last])

    def stall(self) -> None:
        while self.waiting.acquire(blocking=False):
            pass
        self.flowing.clear()

    def stall_gets(self) -> None:
        """What is opened is known to be there, and no byte of it comes."""
        self.stalled = ("GET",)
        self.stall()

    def wait_until_stalled(self, requests: int = 1) -> None:
        for _ in range(requests):
            assert self.waiting.acquire(timeout=300)

    def flow(self) -> None:
        self.flowing.set()

    def close(self) -> None:
        self.flow()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    made.objects["a"] = DATA
    yield made
    made.close()


@pytest.fixture(params=["client", "cache"])
def web_opener(
    request: pytest.FixtureRequest, web: Web, tmp_path: pathlib.Path
) -> Iterator[quinion.Client | quinion.Cache]:
    """Either of the two that open files, of a web server that can stall."""
    if request.param == "cache":
        with quinion.Cache(memory=64 << 20) as cache:
            yield cache
            web.flow()  # else the end would wait for what is under way
        return
    server = ServerProcess(tmp_path, stores={web.url: {}})
    yield quinion.connect(server.name)
    web.flow()
    server.kill()
