"""All that a router knows, made into pieces (state.py) a step at a time while it goes on placing.

Each generator yields a piece, or None where a step is done without one: whoever drives it goes on with other work in
between as often as time asks for it. What changes meanwhile is told as it was at some moment; a cache that begins anew
meanwhile is not told at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge

from router.core.cache.estimate import Holder
from router.core.fleet.member import Member
from router.core.kv_events.states import packed
from router.core.placement.router import Router
from router.core.sharing.models import fits_of, learned
from router.core.sharing.state import (
    MODELS_MAX,
    PIECE_KEYS,
    StateFits,
    StateHomes,
    StateModels,
    StateReplica,
    StateTouches,
)

STEP_KEYS = 2_048  # keys that are copied without a break
STEP_USES = 512  # uses of prefixes that are sorted without a break
HOMES_MAX = 65_536  # answers that are told: those given last
HOMES_STEP = 1_024

Use = tuple[int, float, bytes]
"""One use of a prefix: its stamp, its time in seconds, its keys."""


def replica_of(member: Member) -> StateReplica:
    """What tells the engine apart that is there now."""
    load = member.load
    return StateReplica(member.id, member.replica.instance, load.started_s, load.prompt_tokens_total)


def fits(router: Router, id_: str) -> list[StateFits]:
    """What was learned of a replica's own speed, if anything was."""
    return [StateFits(each.prefill, each.steps) for each in fits_of(router, [id_])]


def estimated(router: Router, id_: str, now_s: float) -> Iterator[StateTouches | None]:
    """Our own estimate of a replica's cache, but for blocks that only open leases vouch for."""
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
    """All uses in any order, those that come meanwhile included."""
    recency, unproven, keys_done = holder.recency, holder.unproven, 0
    before, known = recency.newest, list(recency.touches)
    while known:
        for id_ in known:
            used = recency.used(id_)
            if used is None:
                continue
            stamp, at_s, keys = used
            if unproven and not unproven.keys().isdisjoint(keys):
                keys = [key for key in keys if key not in unproven]
            if keys:
                yield stamp, at_s, packed(keys)
            keys_done += len(keys)
            if keys_done >= STEP_KEYS:
                keys_done = 0
                yield None
        # A prompt that came meanwhile may have taken over what an earlier one had.
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
    """Who answered which prompt, of the replicas that were `told`: id -> (place, number of the cache that was told)."""
    for start in range(0, min(len(router.answers), HOMES_MAX), HOMES_STEP):
        rows = list[tuple[int, int, int, int]]()
        for key, answer in router.answers.newest(start, HOMES_STEP):
            place, life = told.get(answer.replica, (0, -1))
            if answer.life == life:
                rows.append((key, place, answer.prompt_tokens, answer.completion_tokens))
        if rows:
            keys, places, prompts, completions = (list(column) for column in zip(*rows, strict=True))
            yield StateHomes(packed(keys), places, prompts, completions)


def models(router: Router) -> StateModels:
    """What was learned of kinds of replicas and of models."""
    return StateModels(learned(router), [(name, list(counts)) for name, counts in router.models.counts(MODELS_MAX)])
