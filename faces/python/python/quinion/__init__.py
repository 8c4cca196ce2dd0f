"""Quinion: one cache of objects and files for all processes of a user.

One process serves; others connect by a name, and read what is cached out of shared memory:

>>> import os, quinion
>>> name = f"doc-{os.getpid()}"
>>> server = quinion.serve(name, memory=64 << 20, stores={"mem://t": {"a": b"hello, world"}})
>>> with quinion.connect(name).open("mem://t/a") as file:
...     file.read_at(7, 5), file.size
(b'world', 12)
>>> server.stop()
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ._quinion import Pin, RawClient, RawFile, Server

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Client", "File", "Pin", "Server", "connect", "serve"]

# Counts forks: what was connected or opened under another number is the parent's.
_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)

_Identity = tuple[int, str | None, str | None, int | None]


def serve(
    name: str, *, memory: int, stores: Mapping[str, str | Mapping[str, str] | Mapping[str, bytes]] | None = None
) -> Server:
    """Starts a server in this process: a cache of `memory` bytes, which other processes of this user reach by `name`.

    `stores` says what URLs lead to, by their beginnings. The value is a folder (`"file:///data"`), options of an S3
    bucket (`{"endpoint": ..., "region": ...}`, by their names in the Rust crate object_store, in place of what
    the environment's `AWS_...` say), or objects in memory (`{"key": b"bytes"}`).
    """
    return Server(name, memory, {prefix: _plain(store) for prefix, store in (stores or {}).items()})


def _plain(store: str | Mapping[str, Any]) -> str | dict[str, Any]:
    return store if isinstance(store, str) else dict(store)


def connect(name: str) -> Client:
    """Connects to the server of that name; a name with a slash is the path of its socket."""
    return Client(name)


class Client:
    """A connection to a server. Pickles as its name; a forked child connects by itself."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._state = (_generation, RawClient(name))

    def _raw(self) -> RawClient:
        generation, raw = self._state
        if generation != _generation:
            raw = RawClient(self.name)
            self._state = (_generation, raw)
        return raw

    def open(self, url: str) -> File:
        """Opens an object by its URL, or a local file by its path, for reading."""
        return File(self, url)

    @property
    def owner_is_dead(self) -> bool:
        """Whether the server has ended."""
        return self._raw().owner_is_dead()

    def __reduce__(self) -> tuple[Any, ...]:
        return (connect, (self.name,))

    def __repr__(self) -> str:
        return f"<quinion.Client of {self.name!r}>"


class File(io.RawIOBase):
    """An object or local file, open for reading. Wrap it in `io.BufferedReader` for small reads.

    A handle is of one version of an object: also where it is opened again, in a forked child or after pickling.
    """

    def __init__(self, client: Client, url: str, _identity: _Identity | None = None) -> None:
        super().__init__()
        self._client = client
        self._position = 0
        self.name = url
        self._state: tuple[int, RawFile] | None = None
        self._identity = _identity
        self._open()

    def _open(self) -> RawFile:
        raw = self._client._raw().open(self.name)
        if raw.is_object:
            found = (raw.size, raw.etag, raw.version, raw.modified_ns)
            if self._identity is not None and found != self._identity:
                text = f"cannot open {self.name} again: it was replaced since it was opened"
                raise OSError(errno.ESTALE, text)
            if self._identity is not None and found[1:] == (None, None, None):
                text = f"cannot open {self.name} again: its store tells no ETag, version or time to know it by"
                raise OSError(errno.ESTALE, text)
            self._identity = found
        self._state = (_generation, raw)
        return raw

    def _raw(self) -> RawFile:
        state = self._state
        if state is None:
            raise ValueError(f"{self.name} is closed")
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

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """The bytes of each `(offset, length)`. What is missing is fetched side by side."""
        return self._raw().read_ranges(list(ranges))

    def pin(self, offset: int, length: int) -> Pin:
        """Bytes as a read-only buffer, without a copy where they lie together in the cache. The `Pin`, its views, and
        arrays of those keep them."""
        return self._raw().pin(offset, length)

    def readable(self) -> bool:
        self._raw()
        return True

    def seekable(self) -> bool:
        self._raw()
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with memoryview(buffer) as view, view.cast("B") as target:
            done = self._raw().read_into(self._position, target)
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
        position = (self.size if start is None else start) + offset
        self._raw()
        if position < 0:
            raise OSError(errno.EINVAL, f"cannot seek {self.name} to {position}, before its beginning")
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
        return (_reopen, (self._client.name, self.name, self._identity, self._position))

    def __repr__(self) -> str:
        state = "closed" if self._state is None else f"at {self._position}"
        return f"<quinion.File {self.name!r}, {state}>"


def _reopen(server: str, url: str, identity: _Identity | None, position: int) -> File:
    file = File(Client(server), url, identity)
    file.seek(position)
    return file
