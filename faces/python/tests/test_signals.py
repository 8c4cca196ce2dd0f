"""Ctrl-C: it ends whatever waits for a store that does not answer, and breaks nothing."""

import os
import signal
import threading

import pytest
import quinion
from conftest import DATA

CALLS = {
    "read": lambda opener, file, url: file.read_at(0, 100),
    "readinto": lambda opener, file, url: file.readinto(bytearray(5000)),
    "read_ranges": lambda opener, file, url: file.read_ranges([(0, 10), (2 << 20, 10)]),
    "pin": lambda opener, file, url: file.pin(0, 100_000),
    "open": lambda opener, file, url: opener.open(url),
}


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
        assert web_opener.stats()["pinned_bytes"] == 0


def test_other_threads_wait_for_themselves(web, web_opener):
    file, found = web_opener.open(f"{web.url}/a"), []
    web.stall()
    thread = threading.Thread(target=lambda: found.append(file.read_at(0, 100)))
    thread.start()
    web.wait_until_stalled()
    assert not found  # and the GIL is ours
    web.flow()
    thread.join()
    assert found == [DATA[:100]]
