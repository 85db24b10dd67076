"""Run-length encoded lists of block ids, as in traces."""

from __future__ import annotations

from collections.abc import Sequence

Runs = tuple[tuple[int, int], ...]
"""Block ids, run-length encoded as (first id, count); no run continues the one before it."""


def merged_runs(pairs: Sequence[tuple[int, int]]) -> Runs:
    """Return the runs with neighbours joined, so that equal block lists are equal runs."""
    merged: list[tuple[int, int]] = []
    for first, count in pairs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)


def block_count(runs: Runs) -> int:
    """Return the number of blocks in all runs."""
    return sum(count for _, count in runs)


def shared_blocks(left: Runs, right: Runs) -> int:
    """Return the number of blocks that both lists begin with."""
    shared = 0
    for (left_first, left_count), (right_first, right_count) in zip(left, right, strict=False):
        if left_first != right_first:
            break
        shared += min(left_count, right_count)
        if left_count != right_count:
            break
    return shared


def block_at(runs: Runs, tail: int | str, position: int) -> int | str:
    """Return the id of the block at this position; `tail` is the id of the block after all runs."""
    for first, count in runs:
        if position < count:
            return first + position
        position -= count
    return tail
