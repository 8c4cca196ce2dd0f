"""Fsspec: a file system whose reads go through a server's cache, and whose other calls go to the one it is chained to.

`quinion::s3://bucket/key` lists, writes and deletes by the file system of `s3`, with that one's credentials, and reads by a
server that has a store for `s3://bucket`:

    pandas.read_parquet("quinion::s3://bucket/key", storage_options={"quinion": {"server": "tables"}})

A URL is the server's by its store, and not by its file system's name for it: those of `abfs://` and `abfss://` are read as
`az://`, of `gcs://` as `gs://`, of `s3a://` as `s3://`.

Each open asks for the object's version, so a read sees what was put before it. With `freshness=30` beside `server`, an
answer serves the opens of 30 seconds (`quinion.Freshness`). The server is not told of writes. So what was written,
copied or removed through this file system is opened by it as if it had `freshness="always"`, and read as it is now.
Within that time other processes may read what was there before.

It is asynchronous as fsspec means that: `_cat_file`, `_info` and the like are coroutines, and `asynchronous=True` makes the
other file system so as well. Its other calls wait themselves, on no loop of fsspec's. A file system without coroutines is
called on threads.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.chained import ChainedFileSystem  # type: ignore[import-untyped]

from . import _POSITION_MAX, File, Freshness, connect

__all__ = ["QuinionFileSystem"]

# Names of adlfs, gcsfs and s3fs for stores that servers have by the second name, unless they have them by the first.
_SCHEMES = {"abfs": "az", "abfss": "az", "gcs": "gs", "s3a": "s3"}

# The folder of all paths, as `_WrittenPaths` has it.
_ALL = ""
_WRITTEN_MAX = 10_000

_Bounds = list[tuple[int | None, int | None]]

# Options of opens and reads by which the same bytes come.
_OF_TRANSFER = {"autocommit", "batch_size", "block_size", "cache_options", "cache_type", "fill_cache", "size"}


def _concern_content(options: dict[str, Any]) -> bool:
    """Whether options may ask for other bytes, as `version_id` of s3fs does. Only the other file system knows them."""
    return any(value is not None and name not in _OF_TRANSFER for name, value in options.items())


def _other_name(url: str, error: OSError) -> str | None:
    """The URL by the name that servers use, if they have no store by the one that it has."""
    scheme, _, rest = url.partition("://")
    has_another = error.errno == errno.ENODEV and scheme in _SCHEMES
    return f"{_SCHEMES[scheme]}://{rest}" if has_another else None


def _fixed_part(path: str) -> str:
    """The path, or the folder of all that match if it is a pattern."""
    before = re.split(r"[*?\[]", path, maxsplit=1)[0]
    return path.rstrip("/") if before == path else before.rpartition("/")[0]


class _WrittenPaths:
    """Paths that were written or removed, each with all below it: the server may know older objects there."""

    def __init__(self) -> None:
        self._paths: set[str] = set()

    def add(self, paths: Any) -> None:
        names = [_fixed_part(path) for path in (paths if isinstance(paths, list) else [paths])]
        if len(self._paths) + len(names) > _WRITTEN_MAX:
            self._paths = {_ALL}  # one wrong answer too many costs a question, and no memory
        self._paths.update(names)

    def has(self, path: str) -> bool:
        if _ALL in self._paths:
            return True
        while path and path not in self._paths:
            path = path.rpartition("/")[0]
        return bool(path)


# fsspec makes a file system for each thread: what one writes another reads, so they have this in common.
_WRITTEN: dict[tuple[str, str], _WrittenPaths] = {}


class QuinionFileSystem(AsyncFileSystem, ChainedFileSystem):  # type: ignore[misc]
    """Reads by the server `server`; the rest by the file system of `target_protocol`."""

    protocol = "quinion"
    mirror_sync_methods = False  # each has both

    def __init__(
        self,
        server: str,
        target_protocol: str,
        target_options: dict[str, Any] | None = None,
        freshness: Freshness = None,
        fo: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.client = connect(server, freshness=freshness)
        options_of_target = dict(target_options or {})
        if self.asynchronous and fsspec.get_filesystem_class(target_protocol).async_impl:
            options_of_target["asynchronous"] = True
        self.fs = fsspec.filesystem(target_protocol, **options_of_target)
        store = _SCHEMES.get(target_protocol, target_protocol)
        self._written = _WRITTEN.setdefault((server, store), _WrittenPaths())
        # Of the instance alone: the class knows no other file system.
        self.__dict__["_strip_protocol"] = self._strip

    def _to_write(self, path: Any) -> Any:
        """The other file system's name of what is to be written or removed, which is noted."""
        stripped = self._strip_protocol(path)
        self._written.add(stripped)
        return stripped

    def _freshness(self, path: str) -> Freshness:
        """That of an open; `None` as the client or the server has it."""
        return "always" if self._written.has(self._strip_protocol(path).rstrip("/")) else None

    def _strip(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._strip(one) for one in path]
        return self.fs._strip_protocol(type(self)._strip_protocol(path))

    def _url(self, path: str) -> str:
        url: str = self.fs.unstrip_protocol(self._strip_protocol(path))
        scheme, _, rest = url.partition("://")
        # The server decodes the keys of URLs. Paths of local files are taken as they are, and a web server's are URLs.
        return url if scheme in ("file", "http", "https") else f"{scheme}://{quote(rest, safe='/')}"

    def _file(self, path: str) -> File:
        url, freshness = self._url(path), self._freshness(path)
        try:
            return self.client.open(url, freshness=freshness)
        except OSError as error:
            other = _other_name(url, error)
            if other is None:
                raise
        return self.client.open(other, freshness=freshness)

    async def _afile(self, path: str) -> File:
        """As `_file`."""
        url, freshness = self._url(path), self._freshness(path)
        try:
            return await self.client.aopen(url, freshness=freshness)
        except OSError as error:
            other = _other_name(url, error)
            if other is None:
                raise
        return await self.client.aopen(other, freshness=freshness)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb" and not _concern_content(options):
            return self._file(path)
        stripped = self._strip_protocol(path) if set(mode) <= set("rbt") else self._to_write(path)
        return self.fs.open(stripped, mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if _concern_content(options):
            data: bytes = self.fs.cat_file(self._strip_protocol(path), start=start, end=end, **options)
            return data
        with self._file(path) as file:
            return _read_slice(file, start, end)

    def cat_ranges(
        self, paths: Any, starts: Any, ends: Any, max_gap: Any = None, on_error: str = "return", **options: Any
    ) -> list[Any]:
        if _concern_content(options):
            options |= {"max_gap": max_gap, "on_error": on_error}
            found: list[Any] = self.fs.cat_ranges(self._strip_protocol(paths), starts, ends, **options)
            return found
        wanted = _by_path(paths, starts, ends)
        answers: list[Any] = [None] * len(paths)
        for path, places, ranges in wanted:
            found = self._ranges(path, ranges, on_error)
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    def _ranges(self, path: str, wanted: _Bounds, on_error: str) -> list[Any]:
        """Ranges of one object, side by side; if they fail and errors are answers, each by itself."""
        try:
            with self._file(path) as file:
                return file.read_ranges([_range(file.size, *one) for one in wanted])
        except Exception as error:
            if on_error != "return":
                raise
            if len(wanted) == 1:
                return [error]
        return [self._ranges(path, [one], on_error)[0] for one in wanted]

    # Paths come with the prefix `quinion://` or without it, and the other file system gets them without.

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.fs.ls(self._strip_protocol(path), detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self.fs.info(self._strip_protocol(path), **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.fs.invalidate_cache(path if path is None else self._strip_protocol(path))

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        self.fs.mkdir(self._strip_protocol(path), create_parents=create_parents, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.fs.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        self.fs.rmdir(self._strip_protocol(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.fs.rm(self._to_write(path), recursive=recursive, maxdepth=maxdepth)

    def rm_file(self, path: str) -> None:
        self.fs.rm_file(self._to_write(path))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.fs.cp_file(self._strip_protocol(path1), self._to_write(path2), **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.fs.pipe_file(self._to_write(path), value, mode=mode, **options)

    def created(self, path: str) -> Any:
        return self.fs.created(self._strip_protocol(path))

    def modified(self, path: str) -> Any:
        return self.fs.modified(self._strip_protocol(path))


    # The same as coroutines.

    async def _ask(self, call: str, *arguments: Any, **options: Any) -> Any:
        """What the other file system answers."""
        if self.fs.async_impl:
            return await getattr(self.fs, f"_{call}")(*arguments, **options)
        answer: Callable[..., Any] = getattr(self.fs, call)
        return await asyncio.to_thread(answer, *arguments, **options)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if _concern_content(options):
            data: bytes = await self._ask("cat_file", self._strip_protocol(path), start=start, end=end, **options)
            return data
        with await self._afile(path) as file:
            return await _aread_slice(file, start, end)

    async def _cat_ranges(
        self, paths: Any, starts: Any, ends: Any, max_gap: Any = None, on_error: str = "return", **options: Any
    ) -> list[Any]:
        if _concern_content(options):
            options |= {"max_gap": max_gap, "on_error": on_error}
            asked: list[Any] = await self._ask("cat_ranges", self._strip_protocol(paths), starts, ends, **options)
            return asked
        wanted = _by_path(paths, starts, ends)
        answers: list[Any] = [None] * len(paths)
        all_found = await asyncio.gather(*(self._aranges(path, ranges, on_error) for path, _, ranges in wanted))
        for (_, places, _), found in zip(wanted, all_found, strict=True):
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    async def _aranges(self, path: str, wanted: _Bounds, on_error: str) -> list[Any]:
        """As `_ranges`."""
        try:
            with await self._afile(path) as file:
                return await file.aread_ranges([_range(file.size, *one) for one in wanted])
        except Exception as error:
            if on_error != "return":
                raise
            if len(wanted) == 1:
                return [error]
        return [(await self._aranges(path, [one], on_error))[0] for one in wanted]

    async def _get_file(self, rpath: str, lpath: Any, **options: Any) -> None:
        await asyncio.to_thread(self.get_file, rpath, lpath, **options)

    async def _put_file(self, lpath: Any, rpath: str, mode: str = "overwrite", **options: Any) -> None:
        await self._ask("put_file", lpath, self._to_write(rpath), mode=mode, **options)

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return await self._ask("ls", self._strip_protocol(path), detail=detail, **options)

    async def _info(self, path: str, **options: Any) -> Any:
        return await self._ask("info", self._strip_protocol(path), **options)

    async def _mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        await self._ask("mkdir", self._strip_protocol(path), create_parents=create_parents, **options)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        await self._ask("makedirs", self._strip_protocol(path), exist_ok=exist_ok)

    async def _rm(
        self, path: Any, recursive: bool = False, batch_size: int | None = None, maxdepth: int | None = None
    ) -> None:
        await self._ask("rm", self._to_write(path), recursive=recursive, maxdepth=maxdepth)

    async def _rm_file(self, path: str, **_options: Any) -> None:
        await self._ask("rm_file", self._to_write(path))

    async def _cp_file(self, path1: str, path2: str, **options: Any) -> None:
        await self._ask("cp_file", self._strip_protocol(path1), self._to_write(path2), **options)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        await self._ask("pipe_file", self._to_write(path), value, mode=mode, **options)


def _by_path(paths: Any, starts: Any, ends: Any) -> list[tuple[str, list[int], _Bounds]]:
    """The ranges of each path, with their places among all of them."""
    if not isinstance(paths, list):
        raise TypeError(f"paths must be a list, and are {type(paths).__name__}")
    starts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
    ends = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
    if not len(paths) == len(starts) == len(ends):
        raise ValueError("there must be as many starts and ends as paths")
    places = defaultdict(list)
    for place, path in enumerate(paths):
        places[path].append(place)
    return [(path, of_path, [(starts[n], ends[n]) for n in of_path]) for path, of_path in places.items()]


def _read_slice(file: File, start: int | None, end: int | None) -> bytes:
    """A slice's bytes. A file's size is not known before its end, as in /proc, or of a log that grows."""
    first, last = _bounds(file, start, end)
    parts = []
    while first < last and (part := file.read_at(first, last - first)):
        first += len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _aread_slice(file: File, start: int | None, end: int | None) -> bytes:
    """As `_read_slice`."""
    first, last = _bounds(file, start, end)
    parts = []
    while first < last and (part := await file.aread_at(first, last - first)):
        first += len(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _bounds(file: File, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's first byte, and the one behind its last. Only a slice that counts from the end needs the size, which is
    0 of the files of /proc."""
    first, last = start or 0, _POSITION_MAX if end is None else end
    if first < 0 or last < 0:
        first, length = _range(file.size, start, end)
        last = first + length
    return min(first, _POSITION_MAX), min(last, _POSITION_MAX)


def _range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's bytes within `size`, as offset and length."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(last - first, 0)
