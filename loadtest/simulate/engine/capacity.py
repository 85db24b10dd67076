"""Capacity of a cluster in requests a second, independent of the policy. Loads are shares of it.

A request takes its replica's time twice. Its prefill takes the time by which it makes a step longer, for the tokens
that no cache held. Its decodes take their share of a step for every token, in a batch as large as the KV cache allows.
The sum over a workload, divided by the parallel replicas, is the time that the fleet needs.

A replica's KV cache serves running requests and reuse, and half of it is counted for each. The reuse is that of one LRU
cache as large as all those halves together, with the requests in the workload's order. No router can quite reach that,
because a block that one replica holds is worthless on another. Some routers can exceed it a little, because a real
cache is not divided. The figure depends on no policy, and at it a good policy begins to queue.

If replicas differ, each has its own speed, batch and cache. A replica without prefix caching computes every prompt and
has its whole cache for running requests. Each model of a fleet has a capacity of its own, by the replicas that serve
it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loadtest.fake_engine.calibration import Calibration
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.engine.workload import SimRequest

CACHE_SHARE = 0.5
STRIDE_BLOCKS = 8
"""Stride over keys. Keys name whole prefixes, so every eighth gives as much information as all, in an eighth of the
time."""


def capacity_rps(
    turns: Sequence[SimRequest], setting: ClusterSpec, block_tokens: int, cache_share: float = CACHE_SHARE
) -> float:
    """Return the requests a second of this kind that the fleet can sustain at best. For several models it is the rate
    at which the first of them reaches its limit, with all models at their shares of the turns."""
    asked: dict[str, list[SimRequest]] = {}
    for turn in turns:
        asked.setdefault(turn.model, []).append(turn)
    return min(
        _model_rps(each, [one for one in setting.fleet() if one[0].model == model], block_tokens, cache_share)
        * (len(turns) / len(each))
        for model, each in asked.items()
    )


def _model_rps(
    turns: Sequence[SimRequest],
    fleet: Sequence[tuple[Machine, Calibration, int]],
    block_tokens: int,
    cache_share: float,
) -> float:
    held = sum(kv_tokens for machine, _, kv_tokens in fleet if machine.prefix_caching)
    found = pooled_hits(turns, int(cache_share * held), block_tokens)
    private = private_tokens(turns, block_tokens)
    live = sum(own + turn.output_tokens / 2 for own, turn in zip(private, turns, strict=True)) / len(turns)
    alone = sum(turn.prompt_tokens + turn.output_tokens / 2 for turn in turns) / len(turns)
    rates = list[float]()
    for machine, calibration, kv_tokens in fleet:
        if machine.prefix_caching:
            cached, room = found, (1 - cache_share) * kv_tokens / live
        else:
            cached, room = [0] * len(turns), kv_tokens / alone
        room = min(room, machine.sequences_max)
        rates.append(1 / (machine.slowness * busy_s(turns, cached, calibration, kv_tokens, room)))
    return sum(rates)


def fleet_kv_tokens(setting: ClusterSpec) -> int:
    """Return the capacity of all replicas' caches together."""
    return sum(kv_tokens for _, _, kv_tokens in setting.fleet())


def busy_s(
    turns: Sequence[SimRequest], found: Sequence[int], calibration: Calibration, kv_tokens: int, room: float
) -> float:
    """Return the time that the mean turn takes of a replica.

    - `found`: the cached tokens of each turn
    - `room`: the number of such requests that run at a time, in a KV cache of `kv_tokens`
    """
    times, batch = calibration.times, max(1, int(room))
    busy = 0.0
    for turn, cached in zip(turns, found, strict=True):
        fresh = turn.prompt_tokens - cached
        context = batch * (turn.prompt_tokens + turn.output_tokens // 2)
        step_s = times.decodes_s(batch, context, 1, kv_tokens)
        busy += times.mixed_s(fresh, fresh * (cached + fresh / 2), batch, context, kv_tokens) - step_s
        busy += turn.output_tokens * step_s / batch
    return busy / len(turns)


def pooled_hits(turns: Sequence[SimRequest], kv_tokens: int, block_tokens: int) -> list[int]:
    """Return the tokens of each turn that one LRU cache of that size holds when the turn comes. Answers take
    space too."""
    stride = STRIDE_BLOCKS * block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    found, room = [], kv_tokens // stride
    answers = 0  # keys of answers count down: no prompt uses them
    for turn in turns:
        depth, keys = 0, turn.engine_keys[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS]
        while depth < len(keys) and keys[depth] in cache:
            depth += 1
        found.append(min(depth * stride, turn.prompt_tokens - 1))
        for _ in range(turn.output_tokens // stride):
            answers -= 1
            cache[answers] = None
        for key in reversed(keys):  # deepest first, as an engine frees them: shared prefixes go last
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > room:
            cache.popitem(last=False)
    return found


def private_tokens(turns: Sequence[SimRequest], block_tokens: int) -> list[int]:
    """Return the tokens of each prompt that no other session uses. A batch holds shared tokens once."""
    stride = STRIDE_BLOCKS * block_tokens
    users: dict[int, str | None] = {}
    for turn in turns:
        for key in turn.engine_keys[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS]:
            users[key] = turn.session if users.get(key, turn.session) == turn.session else None
    private = []
    for turn in turns:
        keys = turn.engine_keys[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS]
        private.append(turn.prompt_tokens - stride * sum(users[key] is None for key in keys))
    return private
