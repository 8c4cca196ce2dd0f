"""Dask: workers of one node share one cache.

>>> client.register_plugin(quinion.dask.Plugin(memory=8 << 30, stores={"s3://bucket": {}}))    # doctest: +SKIP

Each worker finds the node's server, or starts it. Tasks reach it by its name: `quinion.connect("node")`, or
`storage_options={"quinion": {"server": "node"}}`.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from . import Client, Stores, ensure_service

__all__ = ["Plugin"]

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
