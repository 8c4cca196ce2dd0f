"""Quinion: one cache of objects and files for all processes of a user.

One process serves; others connect by a name, and read what is cached out of shared memory:

>>> import os, quinion
>>> name = f"doc-{os.getpid()}"
>>> server = quinion.serve(name, memory=64 << 20, stores={"mem://t": {"a": b"hello, world"}})
>>> with quinion.connect(name).open("mem://t/a") as file:
...     file.read_at(7, 5), file.size
(b'world', 12)
>>> server.stop()

A `Cache` is for one process, and needs no server:

>>> with quinion.Cache(memory=64 << 20, stores={"mem://t": {"a": b"hello, world"}}) as cache:
...     cache.open("mem://t/a").read()
b'hello, world'
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from . import _aio
from ._residency import Residency
from ._top import top
from ._quinion import Pin, RawCache, RawClient, RawFile, RawWaiter, Server

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = [
    "Cache", "Client", "File", "Freshness", "Pin", "Residency", "Server", "Stores",
    "connect", "ensure_service", "residency", "serve", "top",
]  # fmt: skip

Stores: TypeAlias = Mapping[str, str | Mapping[str, str] | Mapping[str, bytes]]
"""What URLs lead to, by their beginnings: a folder, options of a store, or objects; see `serve`."""

Name: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""What is opened: a URL, or the path of a local file, as Python's own `open` takes one."""

Freshness: TypeAlias = float | Literal["always", "immutable"] | None
"""How old what is known of an object may be when an open takes it for current. `"always"`, or 0: each open asks the
store, and waits for its answer. A number of seconds: an answer serves the opens of that time. `"immutable"`: it serves all
later opens. When a read finds that the object has changed, the next open asks the store. `None`: as was said for the
cache, the client or the server, and else `"always"`. An open file is of one version in any case."""

# More seconds than this are no time that a user means.
_FRESHNESS_MAX = 1e9

# Counts forks: what was connected or opened under another number is the parent's.
_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1
    _aio.forked()


os.register_at_fork(after_in_child=_forked)

# How long a server's numbers are waited for: by a program, and to be shown.
_STATS_SECONDS = 10.0
_REPR_SECONDS = 1.0

# The last position that a file of the kernel can have.
_POSITION_MAX = (1 << 63) - 1

# More bytes than any bound.
_MEMORY_ALL = (1 << 64) - 1

# What is waited for at a time by a prefetch, and what it has asked for ahead of that.
_STEP_BYTES = 8 << 20
_AHEAD_BYTES = 64 << 20

# An object's size, ETag, version and time; a local file's device, inode and time of birth: its inode number alone is
# that of the next file as soon as it is deleted.
_Identity = tuple[int, str | None, str | None, int | None] | tuple[int, int, int]


def serve(name: str, *, memory: int, stores: Stores | None = None, freshness: Freshness = None) -> Server:
    """Starts a server in this process: a cache of `memory` bytes, which other processes of this user reach by `name`.

    `stores` says what URLs lead to, by their beginnings. The value is a folder (`"file:///data"`), options of a store
    whose prefix is `s3://bucket`, `gs://bucket`, `az://container`, `http://host` or `https://host`
    (`{"endpoint": ..., "region": ...}`, by their names in the Rust crate object_store, in place of what the
    environment's `AWS_...`, `GOOGLE_...` and `AZURE_...` say), or objects in memory (`{"key": b"bytes"}`). `freshness`
    is for opens of clients that say no other.
    """
    return Server(name, memory, _all_plain(stores), _freshness(freshness))


def _freshness(freshness: Freshness) -> str | None:
    """As the compiled half reads it. A `ValueError` if it is none."""
    if isinstance(freshness, (int, float)) and 0 <= freshness <= _FRESHNESS_MAX:
        return f"{freshness:.9f}"
    if freshness is None or freshness in ("always", "immutable"):
        return freshness
    raise ValueError(f"there is no freshness {freshness!r}; give seconds, 'always' or 'immutable'")


def _all_plain(stores: Stores | None) -> dict[str, str | dict[str, Any]]:
    return {prefix: _plain(store) for prefix, store in (stores or {}).items()}


def _plain(store: str | Mapping[str, Any]) -> str | dict[str, Any]:
    return store if isinstance(store, str) else dict(store)


def connect(name: str = "node", *, freshness: Freshness = None) -> Client:
    """Connects to the server of that name; a name with a slash is the path of its socket."""
    return Client(name, freshness)


def ensure_service(
    name: str = "node",
    *,
    memory: int = 1 << 30,
    stores: Stores | None = None,
    idle: float = 300.0,
    freshness: Freshness = None,
) -> Client:
    """Connects to the server of that name, which is started as a process of its own if there is none: so all processes of
    a user on one node that call this share one cache. A server that is there is taken as it is. `freshness` is this
    client's.

    It reads stores with the environment of the process that started it, and ends when it has had no client for `idle`
    seconds.
    """
    from . import service

    return service.ensure(name, memory, stores, idle, freshness)


def residency(url: str, *, server: str = "node") -> Residency:
    """What of an object the server of that name has in memory now: a hint for schedulers, see `Client.residency`."""
    return connect(server).residency(url)


def _server(name: str) -> str:
    """The name that means the same server from any working directory."""
    is_relative = "/" in name and not os.path.isabs(name)
    return os.path.join(os.getcwd(), name) if is_relative else name


class _RawOpener(Protocol):
    """The compiled half of what opens files."""

    def open(self, target: str | bytes, freshness: str | None) -> RawFile: ...
    def start_open(self, waiter: RawWaiter, number: int, target: str | bytes, freshness: str | None) -> None: ...


class Client:
    """A connection to a server. `freshness` is for its opens that say no other. Pickles as its name and freshness; a
    forked child connects by itself."""

    def __init__(self, name: str, freshness: Freshness = None) -> None:
        _freshness(freshness)  # a wrong one is refused here, and not by each open
        self.name = name = _server(name)
        self.freshness = freshness
        self._state = (_generation, RawClient(name))

    def _raw(self) -> RawClient:
        generation, raw = self._state
        if generation != _generation:
            raw = RawClient(self.name)
            self._state = (_generation, raw)
        return raw

    def open(self, url: Name, *, freshness: Freshness = None) -> File:
        """Opens an object by its URL, or a local file by its path, for reading. Bytes are a path."""
        return File(self, _name(url), freshness)

    async def aopen(self, url: Name, *, freshness: Freshness = None) -> File:
        """As `open`, for asyncio."""
        return await _aopen(self, _name(url), freshness)

    def residency(self, url: Name) -> Residency:
        """What of an object is in the server's memory now. It is a hint: the next moment may evict or fetch. It costs an
        open, and no bytes of the object; what a disk tier has is not counted."""
        with self.open(url) as file:
            return file.residency()

    def stats(self) -> dict[str, int]:
        """What the server has done for all of its clients, and has: the numbers of `Server.stats`. It is a question to the
        server, whose answer is waited for 10 seconds at most (`TimeoutError`)."""
        return self._raw().stats(_STATS_SECONDS)

    @property
    def owner_is_dead(self) -> bool:
        """Whether the server has ended."""
        return self._raw().owner_is_dead()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Client, (self.name, self.freshness))

    def __repr__(self) -> str:
        generation, raw = getattr(self, "_state", (None, None))
        if raw is None or generation != _generation:
            return f"<quinion.Client of {self.name!r}, not yet connected in this process>"
        try:
            stats = raw.stats(_REPR_SECONDS)
        except OSError as error:
            why = "does not answer" if isinstance(error, TimeoutError) else "has ended"
            if not isinstance(error, (ConnectionError, TimeoutError)):
                why = f"cannot be asked: {error}"
            return f"<quinion.Client of {self.name!r}, which {why}>"
        hits = 100 * max(stats["reads"] - stats["asked"], 0) / max(stats["reads"], 1)
        return (
            f"<quinion.Client of {self.name!r}: {hits:.1f} % of {stats['reads']} reads hit, {stats['bytes']} bytes, "
            f"{stats['clients']} clients, {stats['cached_bytes']} of {stats['memory_bytes']} bytes cached>"
        )


class Cache:
    """A cache of `memory` bytes in this process, without a server: for one process that reads the same bytes again.

    `disk` is a folder and a size: what stores have sent is kept there as well, and is there after a restart. `stores`
    are those of `serve`; of `s3://`, `gs://`, `az://`, `http://` and `https://` URLs that no prefix begins, the store is
    opened with the environment's credentials. `freshness` is for its opens that say no other. It cannot be pickled, and
    a forked child cannot use it: `RuntimeError`. With `populate`, all of its memory is taken from the machine before
    this returns, and not as it fills: the first reads are faster then.
    """

    def __init__(
        self,
        *,
        memory: int,
        disk: tuple[str | os.PathLike[str], int] | None = None,
        stores: Stores | None = None,
        freshness: Freshness = None,
        populate: bool = False,
    ) -> None:
        self.freshness = freshness
        self._generation = _generation
        # Guards the files and whether it is closed. A signal handler may open a file within an open.
        self._lock = threading.RLock()
        self._files: weakref.WeakSet[File] = weakref.WeakSet()
        self._raw_cache: RawCache | None = None
        self._raw_cache = RawCache(memory, disk, _all_plain(stores), _freshness(freshness))
        if populate:
            self.populate()

    def _raw(self) -> RawCache:
        if self._generation != _generation:
            raise RuntimeError("this cache is of the process that this one was forked from; make one here")
        raw = self._raw_cache
        if raw is None:
            raise ValueError("this cache is closed")
        return raw

    def _add(self, file: File) -> File:
        """A file that was opened just now, and belongs to it unless it was closed meanwhile."""
        with self._lock:
            self._files.add(file)
            # Only now: a handler of a signal may close the cache here, which has the lock already.
            is_closed = self._raw_cache is None
        if is_closed:
            file.close()
            raise ValueError("this cache is closed")
        return file

    def open(self, url: Name, *, freshness: Freshness = None) -> File:
        """Opens an object by its URL, or a local file by its path, for reading. Bytes are a path."""
        return self._add(File(self, _name(url), freshness))

    async def aopen(self, url: Name, *, freshness: Freshness = None) -> File:
        """As `open`, for asyncio."""
        return self._add(await _aopen(self, _name(url), freshness))

    def residency(self, url: Name) -> Residency:
        """What of an object or file is in this cache's memory now; see `Client.residency`."""
        with self.open(url) as file:
            return file.residency()

    def populate(self, bytes: int | None = None) -> int:
        """Takes memory from the machine until the cache has `bytes` of it, or all that it may have, or there is no more;
        returns how much it has. By itself it takes memory as it fills. Other threads read meanwhile."""
        if bytes is not None and bytes < 0:
            raise ValueError(f"cannot take {bytes} bytes of memory; give 0 or more")
        return self._raw().populate(_MEMORY_ALL if bytes is None else min(bytes, _MEMORY_ALL))

    def stats(self) -> dict[str, int]:
        """What the cache has done, and has: `reads` and `hits` (those that waited for nothing) by its files, `heads`,
        `gets` and `fetched_bytes` from stores, `grown_bytes` (memory that it has taken), `cached_bytes` and
        `pinned_bytes` now."""
        return self._raw().stats()

    def close(self) -> None:
        """Closes the cache and its files. Memory is given back with the last pin."""
        if self._generation != _generation:
            self._raw_cache = None  # a thread that this child lacks may have the lock
            return
        with self._lock:
            raw, self._raw_cache = self._raw_cache, None
            files = list(self._files)
        if raw is not None:
            for file in files:
                file.close()
            raw.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_why: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a cache is of one process; for several use quinion.serve and quinion.connect")

    def __repr__(self) -> str:
        raw = self._raw_cache
        if raw is None or self._generation != _generation:
            return f"<quinion.Cache: {'closed' if raw is None else 'of another process'}>"
        stats = raw.stats()
        hits = 100 * stats["hits"] / max(stats["reads"], 1)
        return (
            f"<quinion.Cache: {hits:.1f} % of {stats['reads']} reads hit, "
            f"{stats['cached_bytes']} of {stats['memory_bytes']} bytes>"
        )


def _name(url: Name) -> str | bytes:
    """The name of what is opened. As Python's own opens, it refuses a NUL."""
    name = os.fspath(url)
    if "\0" in name if isinstance(name, str) else b"\0" in name:
        raise ValueError(f"cannot open {name!r}: embedded null character")
    return name


def _target(name: str | bytes) -> str | bytes:
    """As the compiled half opens it: a URL is text, and a path bytes, which need not be UTF-8."""
    if isinstance(name, bytes):
        return name
    scheme, has_scheme, rest = name.partition("://")
    if has_scheme and scheme != "file":
        name.encode()  # a URL is UTF-8: else an error, as of Python's own strings
        return name
    return os.fsencode(rest if has_scheme else name)


def _absolute(name: str | bytes) -> str | bytes:
    """The name that leads to the same file from another working directory. A relative path stays where the directory is
    gone, from which nothing can be opened by it either."""
    target = _target(name)
    if isinstance(target, str) or not target or os.path.isabs(target):
        return name
    try:
        return os.path.join(os.getcwdb(), target)
    except OSError:
        return name


@contextlib.contextmanager
def _named(name: str | bytes) -> Iterator[None]:
    """Errors of an open have the name that was given, as those of Python's own opens."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = name
        raise


async def _aopen(opener: Client | Cache, name: str | bytes, freshness: Freshness) -> File:
    raw: _RawOpener = opener._raw()
    target, wanted = _target(name), _wanted(opener, freshness)
    with _named(name):
        opened: RawFile = await _aio.answer(lambda waiter: raw.start_open(*waiter, target, wanted))
    return File(opener, name, freshness, _opened=opened)


def _wanted(opener: Client | Cache, freshness: Freshness) -> str | None:
    """That of an open, or else that of its opener, as the compiled half reads it."""
    return _freshness(opener.freshness if freshness is None else freshness)


class File(io.RawIOBase):
    """An object or local file, open for reading. Wrap it in `io.BufferedReader` for small reads.

    A handle is of one version of an object, or of one local file: also where it is opened again, in a forked child or
    after pickling.

    `aread_at`, `aread_ranges`, `areadinto_at` and `apin` are for asyncio. What is cached is returned at once; what is
    not is waited for by threads, so many calls overlap, and the event loop goes on. They may be cancelled.
    """

    def __init__(
        self,
        client: Client | Cache,
        url: str | bytes,
        freshness: Freshness = None,
        _identity: _Identity | None = None,
        _opened: RawFile | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._freshness = freshness
        self._position = 0
        self.name = url
        self._again = _absolute(url)
        self._text = os.fsdecode(url)  # in messages
        self._state: tuple[int, RawFile] | None = None
        self._identity = _identity
        self._open(_opened)

    def _open(self, opened: RawFile | None = None) -> RawFile:
        raw = opened
        if raw is None:
            name = self.name if self._identity is None else self._again
            target, wanted = _target(name), _wanted(self._client, self._freshness)
            with _named(self.name):
                raw = self._client._raw().open(target, wanted)
        found: _Identity | None = raw.identity
        if raw.is_object:
            found = (raw.size, raw.etag, raw.version, raw.modified_ns)
        if self._identity is not None:
            if found != self._identity:
                text = f"cannot open {self._text} again: it was replaced since it was opened"
                raise OSError(errno.ESTALE, text)
            if raw.is_object and self._identity[1:] == (None, None, None):
                text = f"cannot open {self._text} again: its store tells no ETag, version or time to know it by"
                raise OSError(errno.ESTALE, text)
        self._identity = found
        self._state = (_generation, raw)
        return raw

    def _raw(self) -> RawFile:
        state = self._state
        if state is None:
            raise ValueError(f"{self._text} is closed")
        return state[1] if state[0] == _generation else self._open()

    @property
    def size(self) -> int:
        """Bytes of the object, or of the file now."""
        return self._raw().size

    @property
    def etag(self) -> str | None:
        """The object's ETag, if its store told one."""
        return self._raw().etag

    @property
    def version(self) -> str | None:
        """The object's version id, if its store told one."""
        return self._raw().version

    def read_at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`: fewer only at the end. The position stays."""
        return self._raw().read_at(offset, length)

    def readinto_at(self, offset: int, buffer: WriteableBuffer, /) -> int:
        """Fills `buffer` from `offset` on, and returns how many bytes that are: fewer only at the end. The position
        stays."""
        return _read_into(self._raw(), offset, buffer)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """The bytes of each `(offset, length)`. What is missing is fetched side by side."""
        return self._raw().read_ranges(list(ranges))

    def pin(self, offset: int, length: int) -> Pin:
        """Bytes as a read-only buffer, without a copy where they lie together in the cache. The `Pin`, its views, and
        arrays of those keep them."""
        return self._raw().pin(offset, length)

    def residency(self, offset: int = 0, length: int | None = None) -> Residency:
        """What of it, or of a part, is cached in memory now: a hint. Nothing is read or waited for."""
        first, end = self._part(offset, length)
        return Residency(self._text, end - first, self._raw().residents(first, end - first))

    def prefetch(
        self, offset: int = 0, length: int | None = None, *, wait: bool = False, progress: bool | None = None
    ) -> None:
        """Starts to fetch it, or a part, that far as the cache has room for what is on its way; and waits for all of it
        with `wait=True`, or with `progress=True`, which shows a bar of tqdm's. What is longer than the cache does not
        stay."""
        first, end = self._part(offset, length)
        if not (wait or progress):
            self._raw().prefetch(first, end - first)
            return
        with _bar(self._text, end - first, progress) as told:
            for begin in range(first, end, _STEP_BYTES):
                self._raw().prefetch(begin, min(begin + _AHEAD_BYTES, end) - begin)
                step = min(_STEP_BYTES, end - begin)
                self._wait_for(begin, step)
                told(step)

    def _wait_for(self, offset: int, length: int) -> None:
        try:
            self.pin(offset, length)
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            self.read_at(offset, length)

    def _part(self, offset: int, length: int | None) -> tuple[int, int]:
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"offset {offset} and length {length} of {self._text}: neither may be negative")
        end = self.size if length is None else min(offset + length, self.size)
        return min(offset, end), end

    async def aread_at(self, offset: int, length: int) -> bytes:
        """As `read_at`, for asyncio."""
        raw = self._raw()
        return await _aio.answer(lambda waiter: raw.start_read(waiter, (offset, length)))

    async def areadinto_at(self, offset: int, buffer: WriteableBuffer, /) -> int:
        """As `readinto_at`, for asyncio. The buffer is written to when all of its bytes are there, and not if the call is
        cancelled."""
        with memoryview(buffer) as view, view.cast("B") as target:
            data = await self.aread_at(offset, len(target))
            target[: len(data)] = data
        return len(data)

    async def aread_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """As `read_ranges`, for asyncio."""
        raw, wanted = self._raw(), list(ranges)
        return await _aio.answer(lambda waiter: raw.start_ranges(waiter, wanted))

    async def apin(self, offset: int, length: int) -> Pin:
        """As `pin`, for asyncio."""
        raw = self._raw()
        return await _aio.answer(lambda waiter: raw.start_pin(waiter, (offset, length)))

    def readable(self) -> bool:
        self._raw()
        return True

    def seekable(self) -> bool:
        self._raw()
        return True

    def write(self, _data: object, /) -> int:
        self._raw()
        raise io.UnsupportedOperation(f"{self._text} is open for reading only")

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        done = _read_into(self._raw(), self._position, buffer)
        self._position += done
        return done

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        data = self.read_at(self._position, size)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        parts = []
        while part := self.read_at(self._position, 1 << 62):
            self._position += len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"cannot seek from {whence!r}; use os.SEEK_SET, SEEK_CUR or SEEK_END")
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        position = (self.size if start is None else start) + operator.index(offset)
        self._raw()
        if position < 0:
            raise OSError(errno.EINVAL, f"cannot seek {self._text} to {position}, before its beginning")
        if position > _POSITION_MAX:
            raise OverflowError(f"cannot seek {self._text} to {position}: no file is so long")
        self._position = position
        return position

    def tell(self) -> int:
        self._raw()
        return self._position

    def close(self) -> None:
        self._state = None
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._raw()
        if isinstance(self._client, Cache):
            raise TypeError("a file of a cache is of one process; for several use quinion.serve and quinion.connect")
        return (_reopen, (self._client, self._again, self._freshness, self._identity, self._position))

    def __repr__(self) -> str:
        state = "closed" if self._state is None else f"at {self._position}"
        return f"<quinion.File {self.name!r}, {state}>"


def _read_into(raw: RawFile, offset: int, buffer: WriteableBuffer) -> int:
    if type(buffer) is bytearray:
        return raw.read_into(offset, buffer)
    with memoryview(buffer) as view, view.cast("B") as target:
        return raw.read_into(offset, target)


@contextlib.contextmanager
def _bar(name: str, total: int, progress: bool | None) -> Iterator[Callable[[int], object]]:
    """What is told of bytes that have come."""
    if not progress:
        yield lambda _bytes: None
        return
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError("a progress bar needs the package tqdm; install it, or use wait=True") from error
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


def _reopen(
    client: Client, url: str | bytes, freshness: Freshness, identity: _Identity | None, position: int
) -> File:
    file = File(client, url, freshness, identity)
    file.seek(position)
    return file
