"""Residency: what of an object is in a cache's memory, as a hint to those who place work."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Residency"]


@dataclass(frozen=True)
class Residency:
    """What was cached of an object, or of a part, at one moment."""

    name: str
    size: int
    """Bytes of the object, or of the part that was asked about."""
    ranges: list[tuple[int, int]]
    """What is cached: offsets and lengths, in rising order."""

    @property
    def cached(self) -> int:
        """Bytes that are cached."""
        return sum(length for _, length in self.ranges)

    def __repr__(self) -> str:
        percent = 100 * self.cached / max(self.size, 1)
        return f"<quinion.Residency of {self.name!r}: {self.cached} of {self.size} bytes, {percent:.1f} %>"
