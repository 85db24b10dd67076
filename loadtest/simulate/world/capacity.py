"""How many requests a second a cluster can sustain, whoever routes them: what loads are shares of.

A request takes its replica's time twice. Its prefill takes what a step is longer for having it, for those tokens that
no cache held. Its decodes take their share of a step for every token, in a batch as large as the KV cache has room for.
The sum over a workload, divided by the replicas that work side by side, is the time in which the fleet can do it.

A replica's KV cache holds those that run and what may be found again: half is counted for each. What is found is what
one LRU cache finds that is as large as those halves together, asked in the workload's order. No router can quite have
that, for what is held in one place is worth nothing in another; and some can do a little more, for the room is not
parted in life. It is a figure that depends on no policy, and at it a good one begins to queue.

Where replicas differ, each has its own speed, batch and cache; one that caches nothing computes every prompt and has
all of its room for what runs. Each model of a fleet has a capacity of its own, by the replicas that serve it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loadtest.engine.calibration import Calibration
from loadtest.simulate.world.machine import Machine
from loadtest.simulate.world.setting import Setting
from loadtest.simulate.world.turns import Turn

CACHE_SHARE = 0.5
STRIDE_BLOCKS = 8
"""Keys name whole prefixes, so every eighth says as much as all of them, in an eighth of the time."""


def capacity_rps(turns: Sequence[Turn], setting: Setting, block_tokens: int, cache_share: float = CACHE_SHARE) -> float:
    """Requests a second of this kind that the fleet can sustain at best. Of several models, as many as the one that
    comes to its limit first lets be asked of all, at their shares of the turns."""
    asked: dict[str, list[Turn]] = {}
    for turn in turns:
        asked.setdefault(turn.model, []).append(turn)
    return min(
        _model_rps(each, [one for one in setting.fleet() if one[0].model == model], block_tokens, cache_share)
        * (len(turns) / len(each))
        for model, each in asked.items()
    )


def _model_rps(
    turns: Sequence[Turn], fleet: Sequence[tuple[Machine, Calibration, int]], block_tokens: int, cache_share: float
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


def fleet_kv_tokens(setting: Setting) -> int:
    """What the caches of all replicas hold together."""
    return sum(kv_tokens for _, _, kv_tokens in setting.fleet())


def busy_s(turns: Sequence[Turn], found: Sequence[int], calibration: Calibration, kv_tokens: int, room: float) -> float:
    """What the mean turn takes of a replica's time. `found`: how many tokens of each are cached; `room`: how many such
    requests run at a time, in a KV cache of `kv_tokens`."""
    times, batch = calibration.times, max(1, int(room))
    busy = 0.0
    for turn, cached in zip(turns, found, strict=True):
        fresh = turn.prompt_tokens - cached
        context = batch * (turn.prompt_tokens + turn.output_tokens // 2)
        step_s = times.decodes_s(batch, context, 1, kv_tokens)
        busy += times.mixed_s(fresh, fresh * (cached + fresh / 2), batch, context, kv_tokens) - step_s
        busy += turn.output_tokens * step_s / batch
    return busy / len(turns)


def pooled_hits(turns: Sequence[Turn], kv_tokens: int, block_tokens: int) -> list[int]:
    """Tokens of each turn that one LRU cache of that size holds when it is asked. Answers take room as well."""
    stride = STRIDE_BLOCKS * block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    found, room = [], kv_tokens // stride
    answers = 0  # keys of answers count down: nothing asks for them
    for turn in turns:
        depth, keys = 0, turn.engine_keys[STRIDE_BLOCKS - 1 :: STRIDE_BLOCKS]
        while depth < len(keys) and keys[depth] in cache:
            depth += 1
        found.append(min(depth * stride, turn.prompt_tokens - 1))
        for _ in range(turn.output_tokens // stride):
            answers -= 1
            cache[answers] = None
        for key in reversed(keys):  # deepest first, as an engine frees them: what many share goes last
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > room:
            cache.popitem(last=False)
    return found


def private_tokens(turns: Sequence[Turn], block_tokens: int) -> list[int]:
    """Tokens of each prompt that no other session asks for; a batch holds once what several share."""
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
