"""What the tests share: a folder of objects, and a server of it in a process of its own."""

import json
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import quinion

SIZE = 3 * (1 << 20) + 1234
DATA = random.Random(24).randbytes(SIZE)


class ServerProcess:
    """A server of a folder, which it has under two names."""

    def __init__(self, folder: pathlib.Path, memory: int = 64 << 20) -> None:
        self.objects = folder / "objects"
        self.objects.mkdir()
        self.name = str(folder / "q" / "s.sock")
        folder_url = self.objects.as_uri()
        stores = json.dumps({"data://s": folder_url, "memory:///t": folder_url})
        script = pathlib.Path(__file__).with_name("server_process.py")
        command = [sys.executable, str(script), self.name, str(memory), stores]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def stats(self) -> dict[str, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait_for(self, what: str, value: int) -> None:
        """What clients give back arrives a moment later."""
        until = time.monotonic() + 30
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
