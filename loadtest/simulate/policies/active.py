"""Blocks of the open requests, each counted once for any number of requests that share it."""

from __future__ import annotations

from collections.abc import Iterable


class ActiveBlocks:
    """Set of active blocks: `key in active`, and `len(active)` of distinct ones."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, keys: Iterable[int]) -> None:
        """Add the keys of a request that opens."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def remove(self, keys: Iterable[int]) -> None:
        """Remove the keys of a request that was added."""
        counts = self._counts
        for key in keys:
            count = counts[key]
            if count == 1:
                del counts[key]
            else:
                counts[key] = count - 1
