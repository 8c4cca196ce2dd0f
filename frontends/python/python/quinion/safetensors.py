"""Safetensors: the tensors of a file as arrays of numpy or tensors of torch, which are views of the cache where that is
possible.

All of them are views of one pin, if this process may pin as much: then the file stays in the cache until the last tensor
is gone, and processes of a node that load it share its memory. Else each tensor is a pin of its own, and a copy where even
that is too much. Views are read-only, and may be unaligned. Torch has no read-only tensors: what writes to a view of
torch's ends the process by SIGSEGV, so clone what is to be changed.

Of a file nothing is believed: its header's numbers are checked before they are used.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import warnings
from collections.abc import Callable
from typing import Any, overload

import numpy

from . import Cache, Client, File, Freshness, Name, Pin, connect

__all__ = ["load"]

_HEADER_BYTES_MAX = 100_000_000
_DIMENSIONS_MAX = 64  # numpy's
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

# Torch's names of types. It has some that numpy has not.
_TORCH_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
# A process has 1024 pins at most.
_STEP_BYTES, _AHEAD_BYTES, _STEPS_MAX = 8 << 20, 64 << 20, 512
_BYTES = {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}

Array = numpy.ndarray[Any, numpy.dtype[Any]]
_Lend = Callable[[int, int], Any]


@overload
def load(
    url: Name, /, *, framework: str = "np", freshness: Freshness = None
) -> dict[str, Any]: ...
@overload
def load(
    client: Client | Cache, url: Name, *, framework: str = "np", freshness: Freshness = None
) -> dict[str, Any]: ...
def load(
    client: Client | Cache | Name,
    url: Name | None = None,
    *,
    framework: str = "np",
    freshness: Freshness = None,
) -> dict[str, Any]:
    """All tensors of an object or file, by name: numpy's arrays, or torch's tensors for `framework="pt"`. `BF16` and the
    8-bit floats have no numpy type: a `TypeError`. Without a client or cache it is read by the server `"node"`.

    Say `freshness="immutable"` for weights that are never replaced: once they are cached, they are loaded without a
    request to their store. Else each load waits for one, which asks which version they are; see `quinion.Freshness`."""
    opener, name = _opener(client, url)
    if framework not in ("np", "pt"):
        raise ValueError(f"there is no framework {framework!r}; choose 'np' or 'pt'")
    torch = importlib.import_module("torch") if framework == "pt" else None
    with opener.open(name, freshness=freshness) as file:
        if file.residency().cached < file.size:
            # Before the short reads of the header: what is asked for at once comes into large pages.
            file.prefetch(0, _AHEAD_BYTES)
        header, begin = _header(file)
        # All are looked at before the first is read.
        places = {name: _place(file, name, about, begin, torch) for name, about in header.items()}
        lend = _lender(file, begin)
        return {name: _tensor(file, name, place, (lend, torch)) for name, place in places.items()}


def _opener(
    client: Client | Cache | Name, url: Name | None
) -> tuple[Client | Cache, Name]:
    if isinstance(client, (Client, Cache)):
        if url is None:
            raise TypeError("name a URL or path to load: load(client, url)")
        return client, url
    if url is not None:
        raise TypeError(f"{client!r} is neither a quinion.Client nor a quinion.Cache; load(url) names none")
    if not isinstance(client, (str, bytes, os.PathLike)):
        raise TypeError(f"{client!r} is neither a quinion.Client nor a quinion.Cache, nor a URL or path")
    return connect(), client


def _wrong(file: File, what: str) -> ValueError:
    return ValueError(f"{file._text} is not a safetensors file: {what}")


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


_Place = tuple[str, list[int], int, int]


def _place(file: File, name: str, about: Any, begin: int, torch: Any) -> _Place:
    """Type, shape, offset and length of a tensor, which fit each other and the file."""
    try:
        kind, shape, (first, end) = about["dtype"], about["shape"], about["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(file, f"of {name!r} it does not tell type, shape and place") from error
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in [*shape, first, end]):
        raise _wrong(file, f"shape or place of {name!r} are no counts")
    library, types = ("numpy", _TYPES) if torch is None else ("torch", _TORCH_TYPES)
    if not isinstance(kind, str) or kind not in types:
        raise TypeError(f"the tensor {name!r} of {file._text} has the type {kind!r}, which {library} has not")
    # Before they are multiplied: a product of many and large numbers takes for ever.
    if len(shape) > _DIMENSIONS_MAX or any(n > file.size for n in shape):
        raise _wrong(file, f"the shape of {name!r} does not fit")
    item = _BYTES.get(kind) or numpy.dtype(_TYPES[kind]).itemsize
    if end - first != math.prod(shape) * item or begin + end > file.size:
        raise _wrong(file, f"{name!r} has {end - first} bytes at {first}, which do not fit")
    return kind, shape, begin + first, end - first


def _tensor(file: File, name: str, place: _Place, by: tuple[_Lend, Any]) -> Any:
    (kind, shape, offset, length), (lend, torch) = place, by
    data = lend(offset, length)
    if kind == "BOOL" and numpy.frombuffer(data, dtype="u1").max(initial=0) > 1:
        raise _wrong(file, f"{name!r} has bytes that are neither true nor false")
    if torch is None:
        return numpy.frombuffer(data, dtype=_TYPES[kind]).reshape(shape)
    dtype = getattr(torch, _TORCH_TYPES[kind])
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _lender(file: File, begin: int) -> _Lend:
    """What lends the bytes of tensors: parts of one pin, or pins of their own."""
    pin = _pin_all(file, begin)
    if pin is None or pin.is_copied:
        return lambda offset, length: _bytes(file, offset, length)
    view = memoryview(pin)
    return lambda offset, length: view[offset - begin : offset - begin + length]


def _pin_all(file: File, begin: int) -> Pin | None:
    """As `_pin`, of all from `begin` on. What is missing is fetched before, some at a time: a store that is asked for
    all of it at once takes longer."""
    held = []  # so that what is too much is told before it is fetched
    if file.residency().cached < file.size:
        step = max(_STEP_BYTES, file.size // _STEPS_MAX)
        for offset in range(0, file.size, step):
            file.prefetch(offset, _AHEAD_BYTES)
            if (part := _pin(file, offset, step)) is None:
                return None
            if not part.is_copied:
                held.append(part)
    held.clear()
    return _pin(file, begin, file.size - begin)


def _pin(file: File, offset: int, length: int) -> Pin | None:
    """`None`: that is more than this process may pin."""
    try:
        return file.pin(offset, length)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return None


def _bytes(file: File, offset: int, length: int) -> Any:
    pin = _pin(file, offset, length)
    return file.read_ranges([(offset, length)])[0] if pin is None else pin
