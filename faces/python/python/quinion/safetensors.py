"""Safetensors: the tensors of a file as numpy arrays, which are views of the cache where that is possible.

A tensor is a view if its bytes lie together in the cache and its process may pin as many more; else it is a copy. Views are
read-only and may be unaligned. They keep their bytes pinned until the last of them is gone.

Of a file nothing is believed: its header's numbers are checked before they are used.
"""

from __future__ import annotations

import errno
import json
import math
from typing import Any

import numpy

from . import Cache, Client, File

__all__ = ["load"]

_HEADER_BYTES_MAX = 100_000_000
_DIMENSIONS_MAX = 64  # numpy's
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

Array = numpy.ndarray[Any, numpy.dtype[Any]]


def load(client: Client | Cache, url: str) -> dict[str, Array]:
    """All tensors of an object or file, by name. `BF16` and the 8-bit floats have no numpy type: a `TypeError`."""
    with client.open(url) as file:
        header, begin = _header(file)
        return {name: _tensor(file, name, about, begin) for name, about in header.items()}


def _wrong(file: File, what: str) -> ValueError:
    return ValueError(f"{file.name} is not a safetensors file: {what}")


def _header(file: File) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read_at(0, 8), "little")
    if not 2 <= length <= min(file.size - 8, _HEADER_BYTES_MAX):
        raise _wrong(file, f"its header has {length} bytes")
    try:
        header = json.loads(file.read_at(8, length))
    except (ValueError, RecursionError) as error:
        raise _wrong(file, f"its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise _wrong(file, "its header is no object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _tensor(file: File, name: str, about: Any, begin: int) -> Array:
    try:
        kind, shape, (first, end) = about["dtype"], about["shape"], about["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(file, f"of {name!r} it does not tell type, shape and place") from error
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in [*shape, first, end]):
        raise _wrong(file, f"shape or place of {name!r} are no counts")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise TypeError(f"the tensor {name!r} of {file.name} has the type {kind!r}, which numpy has not")
    dtype = numpy.dtype(_TYPES[kind])
    # Before they are multiplied: a product of many and large numbers takes for ever.
    if len(shape) > _DIMENSIONS_MAX or any(n > file.size for n in shape):
        raise _wrong(file, f"the shape of {name!r} does not fit")
    if end - first != math.prod(shape) * dtype.itemsize or begin + end > file.size:
        raise _wrong(file, f"{name!r} has {end - first} bytes at {first}, which do not fit")
    data = _bytes(file, begin + first, end - first)
    if kind == "BOOL" and numpy.frombuffer(data, dtype="u1").max(initial=0) > 1:
        raise _wrong(file, f"{name!r} has bytes that are neither true nor false")
    return numpy.frombuffer(data, dtype=dtype).reshape(shape)


def _bytes(file: File, offset: int, length: int) -> Any:
    try:
        return file.pin(offset, length)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return file.read_ranges([(offset, length)])[0]
