"""Ctrl-C: it ends whatever waits for a store that does not answer, and breaks nothing."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import quinion
from conftest import DATA, wait_until

CALLS = {
    "read": lambda opener, file, url: file.read_at(0, 100),
    "readinto": lambda opener, file, url: file.readinto(bytearray(5000)),
    "read_ranges": lambda opener, file, url: file.read_ranges([(0, 10), (2 << 20, 10)]),
    "pin": lambda opener, file, url: file.pin(0, 100_000),
    "open": lambda opener, file, url: opener.open(url),
}


@pytest.fixture(autouse=True)
def interrupts():
    """Python's own handler, also where the tests run in the background of a shell, whose jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", CALLS)
def test_it_ends_a_stalled(web, web_opener, call):
    url = f"{web.url}/a"
    file = web_opener.open(url)
    web.stall()

    def interrupt():
        web.wait_until_stalled()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](web_opener, file, url)
        # Without an answer of the server's: it is still stalled.
        assert not web.flowing.is_set()
    finally:
        web.flow()
        thread.join()
    assert web_opener.open(url).read() == DATA and file.read_at(5, 5) == DATA[5:10]
    if isinstance(web_opener, quinion.Cache):
        # A call that was interrupted ends on its own.
        wait_until(lambda: web_opener.stats()["pinned_bytes"] == 0)


def test_other_threads_wait_for_themselves(web, web_opener):
    file, found = web_opener.open(f"{web.url}/a"), []
    web.stall()
    thread = threading.Thread(target=lambda: found.append(file.read_at(0, 100)))
    thread.start()
    web.wait_until_stalled()
    assert not found  # and this thread has the GIL
    web.flow()
    thread.join()
    assert found == [DATA[:100]]


SCRIPTS = {
    "with": "with quinion.Cache(memory=16 << 20) as cache:\n    file = cache.open(url)\n    print('open', flush=True)\n    file.read()\n",
    "without": "file = quinion.Cache(memory=16 << 20).open(url)\nprint('open', flush=True)\nfile.pin(0, 1 << 20)\n",
    "asyncio": """
async def main():
    file = await quinion.Cache(memory=16 << 20).aopen(url)
    print('open', flush=True)
    await asyncio.gather(*(file.aread_at(n << 19, 100) for n in range(5)))
asyncio.run(main())
""",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_program_ends_by_it_while_its_store_is_stalled(web, script):
    text = f"import asyncio, quinion\nurl = {web.url + '/a'!r}\n{SCRIPTS[script]}"
    program = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    web.stall_gets()
    assert program.stdout.readline() == "open\n"
    web.wait_until_stalled()
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=300)
    assert not web.flowing.is_set()
    assert program.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
