"""Top: what caches do, line by line, while it happens.

A line is of the time since the one before: reads and bytes of programs, how many of the reads waited for nothing, and what
was asked of stores for them.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

__all__ = ["top"]

_HEAD = f"{'cache':<24} {'reads/s':>10} {'hit %':>6} {'MiB/s':>9} {'GETs/s':>8} {'fetched MiB/s':>13}"
_MIB = 1 << 20


class _Counted(Protocol):
    def stats(self) -> Mapping[str, int]: ...


def _line(name: str, old: Mapping[str, int], new: Mapping[str, int], seconds: float) -> str:
    def rate(what: str) -> float:
        more = new.get(what, 0) - old.get(what, 0)
        # A server that follows another counts from 0.
        return (more if more >= 0 else new.get(what, 0)) / seconds

    # A cache counts its hits, and a server the reads that had to ask.
    reads = rate("reads")
    hits = rate("hits") if "hits" in new else reads - rate("asked")
    percent = f"{100 * hits / reads:.1f}" if reads > 0 else "-"
    return (
        f"{name[:24]:<24} {reads:>10.0f} {percent:>6} {rate('bytes') / _MIB:>9.1f} {rate('gets'):>8.1f} "
        f"{rate('fetched_bytes') / _MIB:>13.1f}"
    )


def _numbers(cache: _Counted) -> dict[str, int] | None:
    """`None` while there is no server."""
    try:
        return dict(cache.stats())
    except OSError:
        return None


def top(
    *caches: _Counted, every: float = 1.0, times: int | None = None, file: TextIO | None = None
) -> None:
    """Shows what caches do, a line for each `every` seconds: `times` times, or until Ctrl-C. A cache is a `Cache` or `Server` of
    this process, or a `Client`, whose server is asked: the lines are of all of its clients. Without any it is the server
    `"node"`.
    """
    if every <= 0:
        raise ValueError(f"lines come every so many seconds, and not every {every}")
    if not caches:
        from . import connect

        caches = (connect(),)
    out = sys.stdout if file is None else file
    names = [f"{type(cache).__name__} {number}" for number, cache in enumerate(caches, 1)]
    print(_HEAD, file=out)
    before, began = [dict(cache.stats()) for cache in caches], time.monotonic()
    try:
        for _ in itertools.count() if times is None else range(times):
            time.sleep(every)
            now, ended = [_numbers(cache) for cache in caches], time.monotonic()
            for place, (name, new) in enumerate(zip(names, now, strict=True)):
                line = f"{name[:24]:<24} does not answer" if new is None else None
                print(line or _line(name, before[place], new or {}, ended - began), file=out, flush=True)
                before[place] = new or before[place]
            began = ended
    except KeyboardInterrupt:
        return
