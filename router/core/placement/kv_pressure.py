"""A prompt's wait for space in a replica's KV pool, and the delay of others by the space that it takes.

Engines admit a prompt when all of it has space, first come first served. Decoding answers release their space
gradually, within the mean decode time. So a prompt waits for that mean, times the missing share of the pool. Requests
in the queue after it wait longer by the space that it keeps. Their number is the number of requests that would wait if
each of them kept the average of the open leases.

Its own wait follows from the current shortage. The delays of others follow from the expected shortage, because others
arrive during its answer: a pool with three quarters in use by many copies of prefixes is full before the first of them
ends. The future use is modelled as a logistic variable around the current use. The mean of its positive part has a
closed form.
"""

from __future__ import annotations

from math import exp, log1p

from router.core.fleet.member import ReplicaState
from router.core.placement.prefix_match import PromptMatch
from router.core.prompts.block_keys import BLOCK_BYTES

SPREAD = 0.15  # spread of a pool's future use around its current use, as a share of the pool
LOW_USE_FRACTION = 0.3  # share of a pool: below this use no shortage is expected
CERTAIN_AT_SIGMAS = 20.0  # spreads above the whole pool beyond which the expected shortage equals the current one


def kv_pressure(member: ReplicaState, match: PromptMatch, decode_ms: float) -> tuple[float, float]:
    """Return (time until the KV pool has space for the prompt, sum of the delays that its space causes others), both in
    milliseconds.

    `decode_ms` is the decode time of its own answer on this replica. It stands for the decode time of others until an
    answer has ended.
    """
    load, live, speeds, size = member.load, member.work.kv, member.speeds, match.size
    capacity, ratio = load.kv_tokens_max or 0, size.pool_bytes_per_token
    decoding = member.work.decoding + member.others.decoding
    own, probed = live.own_tokens + decoding * speeds.mean_answer_tokens / 2, 0.0
    if load.kv_usage is not None:
        probed = load.kv_usage * capacity
    free = capacity * LOW_USE_FRACTION - size.prompt_tokens
    if probed <= free and live.unshared_blocks * BLOCK_BYTES / ratio + own <= free:
        return 0.0, 0.0  # even if open prompts share nothing
    used = max(probed, live.blocks * BLOCK_BYTES / ratio + own)  # the probe also counted the requests of other routers
    if used <= free:
        return 0.0, 0.0
    blocks = live.count_live_blocks(match.keys)
    shared = min(blocks * BLOCK_BYTES / ratio, size.prompt_tokens)
    over = (used + size.prompt_tokens - shared) / capacity - 1
    lasts_ms = speeds.mean_decode_ms or speeds.mean_open_ms or decode_ms
    # Blocks that it shares with open leases stay until the last of these ends: each keeps its part of them.
    kept = size.prompt_tokens - shared + shared / (1 + live.sharers(match.keys, blocks))
    open_n = len(member.leases) + member.others.open
    delayed = kept * open_n / max(used, LOW_USE_FRACTION * capacity)  # in a pool that is nearly empty no request waits
    return over * lasts_ms if over > 0 else 0.0, shortage(over) * lasts_ms * delayed


def shortage(over: float) -> float:
    """Return the share of a pool that is expected to be missing. `over` is the current use beyond the pool's size, as a
    share of the size; a negative value is a free share."""
    return over if over > CERTAIN_AT_SIGMAS * SPREAD else SPREAD * log1p(exp(over / SPREAD))
