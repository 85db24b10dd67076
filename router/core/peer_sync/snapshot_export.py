"""Export of a router's state as pieces (snapshot_format.py), in small steps while the router keeps placing requests.

Each generator yields a piece, or None after a step without a complete piece. The caller runs other work between two
steps as needed. State that changes during the export is included as it was at some moment. A cache that is cleared
during the export is not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge

from router.core.cache_state.prefix_index import Holder
from router.core.fleet.member import ReplicaState
from router.core.kv_events.event_state_codec import pack_numbers
from router.core.peer_sync.learned_models import export_models, fits_of
from router.core.peer_sync.snapshot_format import (
    MODELS_MAX,
    PIECE_KEYS,
    StateFits,
    StateHomes,
    StateModels,
    StateReplica,
    StateTouches,
)
from router.core.placement.router import Router

STEP_KEYS = 2_048  # keys that are copied in one step
STEP_USES = 512  # uses of prefixes that are sorted in one step
HOMES_MAX = 65_536  # limit of exported answers: the latest ones
HOMES_STEP = 1_024

Use = tuple[int, float, bytes]
"""One use of a prefix: its stamp, its time in seconds, its keys."""


def replica_of(member: ReplicaState) -> StateReplica:
    """Return a replica's piece, with values that identify its current engine process."""
    load = member.load
    return StateReplica(member.id, member.replica.instance, load.started_s, load.prompt_tokens_total)


def fits(router: Router, id_: str) -> list[StateFits]:
    """Return the speed learned for a replica, if any."""
    return [StateFits(each.prefill, each.steps) for each in fits_of(router, [id_])]


def export_estimate(router: Router, id_: str, now_s: float) -> Iterator[StateTouches | None]:
    """Export our own estimate of a replica's cache, without blocks that only open leases support."""
    holder = router.index.holders.get(id_)
    if holder is None:
        return
    chunks = list[list[Use]]()
    for use in _uses(holder):
        if use is None:
            yield None
            continue
        if not chunks or len(chunks[-1]) >= STEP_USES:
            if chunks:
                chunks[-1].sort(reverse=True)
                yield None
            chunks.append([])
        chunks[-1].append(use)
    if chunks:
        chunks[-1].sort(reverse=True)
    yield from _touches(merge(*chunks, reverse=True), now_s)


def _uses(holder: Holder) -> Iterator[Use | None]:
    """Yield all uses in any order, including those added during the export."""
    recency, unproven, keys_done = holder.recency, holder.unproven, 0
    before, known = recency.newest, list(recency.touches)
    while known:
        for id_ in known:
            used = recency.get_touch(id_)
            if used is None:
                continue
            stamp, at_s, keys = used
            if unproven:
                keys = unproven.exclude_pending(keys)
            if keys:
                yield stamp, at_s, pack_numbers(keys)
            keys_done += len(keys)
            if keys_done >= STEP_KEYS:
                keys_done = 0
                yield None
        # A prompt that was added during the export may have taken over the keys of an earlier one.
        before, known = recency.newest, list(range(before + 1, recency.newest + 1))


def _touches(uses: Iterator[Use], now_s: float) -> Iterator[StateTouches | None]:
    idle_s, lengths, keys, size = list[float](), list[int](), list[bytes](), 0
    for n, (_, at_s, some) in enumerate(uses):
        idle_s.append(max(0.0, now_s - at_s))
        lengths.append(len(some) // 8)
        keys.append(some)
        size += len(some) // 8
        if size >= PIECE_KEYS:
            yield StateTouches(idle_s, lengths, b"".join(keys))
            idle_s, lengths, keys, size = [], [], [], 0
        elif not n % STEP_USES:
            yield None
    if size:
        yield StateTouches(idle_s, lengths, b"".join(keys))


def homes(router: Router, told: Mapping[str, tuple[int, int]]) -> Iterator[StateHomes]:
    """Export the replica of each recent answer. `told` are the exported replicas: id -> (place, cache epoch at
    export)."""
    for start in range(0, min(len(router.answers), HOMES_MAX), HOMES_STEP):
        rows = list[tuple[int, int, int, int]]()
        for key, answer in router.answers.newest(start, HOMES_STEP):
            place, life = told.get(answer.replica, (0, -1))
            if answer.life == life:
                rows.append((key, place, answer.prompt_tokens, answer.completion_tokens))
        if rows:
            keys, places, prompts, completions = (list(column) for column in zip(*rows, strict=True))
            yield StateHomes(pack_numbers(keys), places, prompts, completions)


def models(router: Router) -> StateModels:
    """Return the values learned for kinds of replicas and for models."""
    return StateModels(
        export_models(router), [(name, list(counts)) for name, counts in router.models.counts(MODELS_MAX)]
    )
