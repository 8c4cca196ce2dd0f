"""Dask: workers of one node share one cache.

>>> client.register_plugin(quinion.dask.Plugin(memory=8 << 30, stores={"s3://bucket": {}}))    # doctest: +SKIP

Each worker finds the node's server, or starts it. Tasks reach it by `quinion.dask.client()`, which starts another if the
server has ended, as when it was killed. Where that is not feared its name will do: `quinion.connect("node")`, or
`storage_options={"quinion": {"server": "node"}}`.

`workers_with(client, url)` names the workers whose nodes have something of an object in memory now, as a hint for
`client.submit(..., workers=..., allow_other_workers=True)`.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from . import Client, Stores, connect, ensure_service
from .service import is_served

__all__ = ["Plugin", "client", "workers_with"]

_distributed: Any = importlib.import_module("distributed")


class Plugin(_distributed.WorkerPlugin):  # type: ignore[misc]
    """Has each worker find or start the server `server` of its node; the arguments are those of `ensure_service`."""

    name = "quinion"

    def __init__(
        self, server: str = "node", *, memory: int = 1 << 30, stores: Stores | None = None, idle: float = 300.0
    ) -> None:
        self.server, self.memory, self.stores, self.idle = server, memory, stores, idle
        self.client: Client | None = None

    def _ensure(self) -> Client:
        return ensure_service(self.server, memory=self.memory, stores=self.stores, idle=self.idle)

    async def setup(self, worker: Any) -> None:
        # The worker's loop goes on meanwhile. The client keeps the server from being idle.
        self.client = await asyncio.to_thread(self._ensure)

    def teardown(self, worker: Any) -> None:
        self.client = None

    def ensured(self) -> Client:
        """A client of the server, or of another that is started if that one has ended."""
        if self.client is None or not is_served(self.client):
            self.client = self._ensure()
        return self.client


def client() -> Client:
    """The client of this node's server: in tasks of workers that have the plugin. If the server has ended, another is
    started, with the plugin's arguments."""
    plugins = _distributed.get_worker().plugins.values()
    plugin = next((one for one in plugins if isinstance(one, Plugin)), None)
    if plugin is None:
        raise RuntimeError("this worker has no server; give Dask's client register_plugin(quinion.dask.Plugin(...))")
    ensured: Client = plugin.ensured()
    return ensured


def _cached(server: str, url: str) -> int:
    return connect(server).residency(url).cached


def workers_with(client: Any, url: str, *, server: str = "node") -> list[str]:
    """The addresses of workers whose server has something of an object in memory now, those with most of it first. It is a
    hint, and a question to each worker."""
    found: dict[str, int] = client.run(_cached, server, url)
    return sorted((worker for worker in found if found[worker] > 0), key=lambda worker: -found[worker])
