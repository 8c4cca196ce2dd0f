"""Ray: workers of one node share one cache.

>>> ray.init(runtime_env=quinion.ray.runtime_env(memory=8 << 30, stores={"s3://bucket": {}}))    # doctest: +SKIP

Each worker process then finds its node's server, or starts it, before its first task. Tasks reach it by
`quinion.ray.client()`, which starts another if the server has ended, as when it was killed. A server's name may have
`{node_id}` in it, which is Ray's number of the node, or `{node_id:.8}`, its beginning: then nodes that share a machine,
as those of `ray.cluster_utils.Cluster`, have a server each.

`affinity(url)` is a scheduling strategy for tasks that read `url`: the node that has most of it in memory now. It is a hint,
and soft: where that node is busy or gone, another runs the task, and fetches.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from . import Client, Stores, ensure_service
from .service import is_served

__all__ = ["affinity", "client", "residency", "runtime_env"]

_ray: Any = importlib.import_module("ray")
_strategies: Any = importlib.import_module("ray.util.scheduling_strategies")

# The client of this worker process, which keeps the server from being idle, and how another server is started.
_client: Client | None = None
_ensure: Callable[[], Client] | None = None


def _hook(server: str, memory: int, stores: Stores | None, idle: float) -> Callable[[], None]:
    """What each worker process calls first."""

    def quinion_setup() -> None:
        from quinion import ray

        ray._connect(server, memory, stores, idle)

    return quinion_setup


def _connect(server: str, memory: int, stores: Stores | None, idle: float) -> None:
    global _client, _ensure
    name = server.format(node_id=_ray.get_runtime_context().get_node_id())
    _ensure = functools.partial(ensure_service, name, memory=memory, stores=stores, idle=idle)
    _client = _ensure()


def runtime_env(
    server: str = "node", *, memory: int = 1 << 30, stores: Stores | None = None, idle: float = 300.0
) -> dict[str, Any]:
    """A runtime environment, or a part of one, by which each worker process finds or starts its node's server; the arguments
    are those of `ensure_service`. Ray keeps them, options of stores among them, where its cluster can read them: leave
    credentials to the nodes' own environment.
    """
    return {"worker_process_setup_hook": _hook(server, memory, stores, idle)}


def client() -> Client:
    """The client of this node's server: in tasks and actors of a cluster with `runtime_env`. If the server has ended,
    another is started, with the arguments of `runtime_env`."""
    global _client
    if _client is None or _ensure is None:
        raise RuntimeError("this process has no server; give Ray the runtime_env of quinion.ray.runtime_env()")
    if not is_served(_client):
        _client = _ensure()
    return _client


def _cached(url: str) -> int:
    return client().residency(url).cached


def residency(url: str) -> dict[str, int]:
    """How many bytes of an object each live node has in memory now, by node ids: a task on each node asks."""
    ask = _ray.remote(num_cpus=0)(_cached)
    nodes = [node["NodeID"] for node in _ray.nodes() if node["Alive"]]
    hard = {node: _strategies.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
    asked = {node: ask.options(scheduling_strategy=strategy).remote(url) for node, strategy in hard.items()}
    return {node: _ray.get(answer) for node, answer in asked.items()}


def affinity(url: str) -> Any:
    """A scheduling strategy: softly the node that has most of an object in memory now, or Ray's default if none has any."""
    found = residency(url)
    best = max(found, key=lambda node: found[node], default=None)
    if best is None or found[best] == 0:
        return "DEFAULT"
    return _strategies.NodeAffinitySchedulingStrategy(best, soft=True)
