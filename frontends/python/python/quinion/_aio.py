"""Asyncio: reads that threads of the compiled half wait for, and an event loop is told of by a socket.

A call that is cancelled leaves nothing behind: its answer is dropped when it comes, and no buffer is written to.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ._quinion import RawWaiter

_T = TypeVar("_T")


class _Waiter:
    """The reads of one event loop. The loop keeps it, and it keeps no loop but through futures that are waited for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.raw = RawWaiter()
        self.numbers = itertools.count()
        self.futures: dict[int, asyncio.Future[Any]] = {}
        loop.add_reader(self.raw.fileno(), self._answers)

    def _answers(self) -> None:
        for number, value, error in self.raw.take():
            future = self.futures.pop(number, None)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiter] = weakref.WeakKeyDictionary()


def forked() -> None:
    """The parent's loops are none of this process."""
    global _waiters
    _waiters = weakref.WeakKeyDictionary()


async def answer(start: Callable[[tuple[RawWaiter, int]], _T | None]) -> _T:
    """What `start` returns at once, or the answer of the number that it was given."""
    loop = asyncio.get_running_loop()
    waiter = _waiters.get(loop)
    if waiter is None:
        waiter = _waiters[loop] = _Waiter(loop)
    number = next(waiter.numbers)
    ready = start((waiter.raw, number))
    if ready is not None:
        return ready
    future: asyncio.Future[_T] = loop.create_future()
    waiter.futures[number] = future
    try:
        return await future
    finally:
        if waiter.futures.pop(number, None) is not None:
            waiter.raw.cancel(number)
