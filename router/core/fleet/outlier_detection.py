"""Detection of latency outliers: replicas that answer, but with first tokens far later than those of their peers.

A first token is compared with the fleet's model of a prefill of that size. The model is only a scale here, which makes
prompts of different sizes comparable. If a request waited behind others, its time counts from the first token before
it. A replica is an outlier if each of its last eight first tokens took SLOW times as long as those of its peers in the
same time span, on that scale, and exceeded them by more than SLOW_MS.

Of peers, only requests that found an empty queue count. Engines prefill short prompts together, and all first tokens of
a batch except the first seem to take no time. Peers without such tokens in the span do not count, and without any peer
no replica is an outlier. So engines that are all equally slow stay in use. An engine that is two or three times slower
than others stays too: the policy sends less to it.

The check runs for each answer. So peers are examined only if all eight first tokens took longer than SLOW_MS and longer
than the model predicts. That is rare without an outlier, because the model is learned from all replicas. LEVELS_MAX
peers, different ones each time, are enough: the median of that number is close to that of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from statistics import median

from router.core.estimators.prefill import FLEET_FLOOR_MS, LEARN_TOKENS_MIN
from router.core.fleet.evidence import TIMED_MAX, TtftSample
from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet

SLOW, SLOW_MS = 5.0, 50.0  # outlier: at least SLOW times slower than its peers, by more than SLOW_MS milliseconds
STILL_SLOW = 3.0  # times slower than its peers, for the first token of a trial
PEER_TOKENS_MIN = 2  # first tokens of a peer in the same span
LEVELS_MAX = 32  # peers that are compared


def observe(fleet: Fleet, member: ReplicaState, lease: Lease, uncached: int, cached: int) -> bool:
    """Record the first token of an answer that streamed, with the engine's counts of its prompt. Return True if the
    member is an outlier now."""
    took_ms, timed = lease.measurements.own_ms, member.evidence.timed
    if took_ms is None or lease.first_token_s is None:
        return False
    expected_ms = member.speeds.prefill.model.ms(uncached, cached)
    if expected_ms < FLEET_FLOOR_MS:
        expected_ms = FLEET_FLOOR_MS
    if uncached < LEARN_TOKENS_MIN and expected_ms < member.speeds.short_ms:
        expected_ms = member.speeds.short_ms
    timed.append(TtftSample(lease.first_token_s, took_ms, lease.measurements.queued, expected_ms))
    if took_ms <= expected_ms or len(timed) < TIMED_MAX:
        return False
    if any(each.took_ms <= SLOW_MS or each.took_ms <= each.expected_ms for each in timed):
        return False
    level = _level(fleet, member, min(each.at_s for each in timed))
    return level is not None and all(_slower(each, SLOW, level) for each in timed)


def is_probe_slow(fleet: Fleet, member: ReplicaState) -> bool:
    """True if the last first token of a member that was an outlier shows that it still is."""
    level, timed = _level(fleet, member, float("-inf")), member.evidence.timed
    return level is not None and bool(timed) and _slower(timed[-1], STILL_SLOW, level)


def _slower(timed: TtftSample, times: float, level: float) -> bool:
    usual_ms = level * timed.expected_ms
    return timed.took_ms >= times * usual_ms and timed.took_ms - usual_ms > SLOW_MS


def _level(fleet: Fleet, member: ReplicaState, since_s: float) -> float | None:
    """Return the median of the peers' times since then, relative to the model; None without peers."""
    levels = list[float]()
    for peer in _peers(fleet, member):
        samples = peer.evidence.timed
        if not samples or samples[-1].at_s < since_s:
            continue
        timed = [each for each in samples if each.at_s >= since_s and not each.queued]
        if len(timed) >= PEER_TOKENS_MIN:
            levels.append(median([each.took_ms / each.expected_ms for each in timed]))
            if len(levels) == LEVELS_MAX:
                break
    return median(levels) if levels else None


def _peers(fleet: Fleet, member: ReplicaState) -> Iterator[ReplicaState]:
    """Yield usable members that have a model in common with it, starting at another one each time."""
    names = fleet.roster.kind(member)
    for others, members in fleet.roster.kinds():
        if others.isdisjoint(names):
            continue
        first = fleet.means.common.answers % len(members)
        for peer in chain(islice(members, first, None), islice(members, first)):
            if peer is not member:
                yield peer
