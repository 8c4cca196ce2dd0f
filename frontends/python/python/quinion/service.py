"""Service: a server that the first process of a node starts, and that ends by itself when none needs it.

`quinion.ensure_service` runs this as `python -P -m quinion.service NAME`. What it is to serve comes by its input, since
options of stores may be secret. It leaves the process that started it, answers in one line, and then serves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from . import Client, Freshness, Server, Stores, _server, connect, serve

__all__ = ["ensure", "is_served"]

_FIRST_SECONDS = 30.0
"""So long is waited for the first client, which comes as soon as its process has a turn."""
_CHECK_SECONDS = 1.0
_START_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


def ensure(
    name: str, memory: int, stores: Stores | None, idle: float, freshness: Freshness = None
) -> Client:
    """A client of the server of that name, which is started if there is none."""
    if not idle >= 0:  # nor is what is no number
        raise ValueError(f"idle is {idle!r}; give seconds, 0 or more")
    name = _server(name)
    try:
        return connect(name, freshness=freshness)
    except (ConnectionRefusedError, ConnectionResetError):  # none, or one that ended just now
        request = json.dumps({"memory": memory, "stores": _checked(stores), "idle": idle})
    # -P: modules are not looked for in the working directory, which other users may be able to write to.
    command = [sys.executable, "-P", "-m", "quinion.service", name]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=False)
    if done.stdout != "ready\n":
        raise OSError(f"cannot start a server {name!r}: {done.stdout.strip() or 'it ended at once'}")
    return connect(name, freshness=freshness)


def is_served(client: Client) -> bool:
    """Whether the client's server, or one in its place, has not ended."""
    try:
        return not client.owner_is_dead
    except OSError:  # a forked child connects first
        return False


def _checked(stores: Stores | None) -> dict[str, Any]:
    plain = {prefix: store if isinstance(store, str) else dict(store) for prefix, store in (stores or {}).items()}
    for prefix, store in plain.items():
        if not isinstance(store, str) and not all(isinstance(value, str) for value in store.values()):
            raise TypeError(f"the store {prefix} has objects in memory, which no other process can serve")
    return plain


def _start(name: str, request: dict[str, Any]) -> Server | None:
    """The server; `None` if another process was faster."""
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            return serve(name, memory=request["memory"], stores=request["stores"])
        except OSError:
            # Another has the name, and may not answer yet.
            if _is_there(name):
                return None
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)


def _is_there(name: str) -> bool:
    try:
        connect(name)
    except OSError:
        return False
    return True


def _serve_until_idle(server: Server, idle: float) -> None:
    until = time.monotonic() + max(idle, _FIRST_SECONDS)
    while time.monotonic() < until:
        time.sleep(max(_PAUSE_SECONDS, min(_CHECK_SECONDS, idle)))
        if server.stats()["clients"] > 0:
            until = time.monotonic() + idle


def _main() -> None:
    name, request = sys.argv[1], json.load(sys.stdin)
    if os.fork() > 0:
        os._exit(0)  # the one that asked waits for this one, and need not reap the other
    os.setsid()
    os.chdir("/")
    try:
        server = _start(name, request)
        answer = "ready"
    except Exception as error:
        server, answer = None, str(error)
    print(" ".join(answer.split()), flush=True)
    # The one that asked reads up to here.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if server is not None:
        with server:
            _serve_until_idle(server, request["idle"])


if __name__ == "__main__":
    _main()
