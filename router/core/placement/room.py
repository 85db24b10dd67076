"""What a prompt waits for room in a replica's KV pool, and what those wait for whom it takes room.

Engines admit a prompt when all of it has room, first come first served. Answers that decode give their room back
little by little, within the mean time of decoding. So a prompt waits for the part of the pool that lacks, times that
mean; and who waits behind it waits longer by what it keeps: as many as would wait, if each of them keeps what the open
leases keep on average.

Its own wait is that of the shortage there is now. The delays of others are those of the shortage to be expected, since
others come while its answer decodes: a pool three quarters of which are used by many copies of prefixes is full before
the first of them ends. What will be used is taken to be spread around what is used now as a logistic variable, the mean
of whose positive part is a plain formula.
"""

from __future__ import annotations

from math import exp, log1p

from router.core.fleet.member import Member
from router.core.placement.match import PromptMatch
from router.core.prompts.blocks import BLOCK_BYTES

SPREAD = 0.15  # how far the use of a pool to come may be from its use now, as a part of the pool
ROOMY = 0.3  # part of a pool: where less of it is in use, no shortage is expected
SURE = 20.0  # spreads above the whole pool from which on the expected shortage is the one there is


def room(member: Member, match: PromptMatch, decode_ms: float) -> tuple[float, float]:
    """(time until the KV pool has room for the prompt, sum of delays that the room which it keeps causes others), in
    milliseconds. `decode_ms` is how long its own answer would decode there: so long do others, until one has ended."""
    load, live, speeds, size = member.load, member.live, member.speeds, match.size
    capacity, ratio = load.kv_tokens_max or 0, size.pool_bytes_per_token
    decoding = member.decoding + member.others.decoding
    own, probed = live.own_tokens + decoding * speeds.mean_answer_tokens / 2, 0.0
    if load.kv_usage is not None:
        probed = load.kv_usage * capacity
    free = capacity * ROOMY - size.prompt_tokens
    if probed <= free and live.unshared_blocks * BLOCK_BYTES / ratio + own <= free:
        return 0.0, 0.0  # even if open prompts share nothing
    used = max(probed, live.blocks * BLOCK_BYTES / ratio + own)  # the probe also saw the requests of other routers
    if used <= free:
        return 0.0, 0.0
    blocks = live.shared(match.keys)
    shared = min(blocks * BLOCK_BYTES / ratio, size.prompt_tokens)
    over = (used + size.prompt_tokens - shared) / capacity - 1
    lasts_ms = speeds.mean_decode_ms or speeds.mean_open_ms or decode_ms
    # What it shares with open leases stays until the last of them ends: each keeps its part of that.
    kept = size.prompt_tokens - shared + shared / (1 + live.sharers(match.keys, blocks))
    open_n = len(member.leases) + member.others.open
    delayed = kept * open_n / max(used, ROOMY * capacity)  # a pool that is nearly empty has nobody who waits
    return over * lasts_ms if over > 0 else 0.0, shortage(over) * lasts_ms * delayed


def shortage(over: float) -> float:
    """Part of a pool that is expected to lack, where so much more of it is used now than there is; less than 0: is
    free."""
    return over if over > SURE * SPREAD else SPREAD * log1p(exp(over / SPREAD))
