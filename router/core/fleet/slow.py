"""Is a replica slow? Its answers come, but its first tokens take far longer than its peers'.

A first token is compared with what the fleet's model says of a prefill of that size; the model is only a yardstick
here, by which prompts of different sizes become comparable. What counts is the time since the first token before it,
where it waited behind others. A replica is slow when each of its last eight first tokens took SLOW times as long as
its peers' did in the same span of time, by that yardstick, and each by more than SLOW_MS.

Of peers only requests count that found nobody waiting: engines prefill short prompts together, and of a batch all
tokens but the first seem to take no time. Peers without such tokens in that span say nothing; without any, nobody is
slow. So engines that are all slow alike stay, and so does one that is two or three times slower than others: the
policy sends less to it.

Each answer asks, so peers are only looked at where all of the eight took longer than SLOW_MS and longer than the model
says, which is rare where nobody is slow: the model is learned from all. And LEVELS_MAX of them are enough to say what
is usual, not always the same ones: the median of so many is close to that of a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from statistics import median

from router.core.fleet.fleet import Fleet
from router.core.fleet.lease import Lease, Timed
from router.core.fleet.member import TIMED_MAX, Member
from router.core.learned.prefill import FLEET_FLOOR_MS, LEARN_TOKENS_MIN

SLOW, SLOW_MS = 5.0, 50.0  # slow: so many times slower than its peers, and by more than so many milliseconds
STILL_SLOW = 3.0  # times slower than its peers, for the first token of a trial
PEER_TOKENS_MIN = 2  # first tokens of a peer in the same span
LEVELS_MAX = 32  # peers that have a say


def observe(fleet: Fleet, member: Member, lease: Lease, uncached: int, cached: int) -> bool:
    """Take what the engine says was computed for an answer that streamed. Returns whether the member is slow now."""
    took_ms = lease.own_ms
    if took_ms is None or lease.first_token_s is None:
        return False
    expected_ms = member.speeds.prefill.model.ms(uncached, cached)
    if expected_ms < FLEET_FLOOR_MS:
        expected_ms = FLEET_FLOOR_MS
    if uncached < LEARN_TOKENS_MIN and expected_ms < member.speeds.short_ms:
        expected_ms = member.speeds.short_ms
    member.timed.append(Timed(lease.first_token_s, took_ms, lease.queued, expected_ms))
    if took_ms <= expected_ms or len(member.timed) < TIMED_MAX:
        return False
    if any(each.took_ms <= SLOW_MS or each.took_ms <= each.expected_ms for each in member.timed):
        return False
    level = _level(fleet, member, min(each.at_s for each in member.timed))
    return level is not None and all(_slower(each, SLOW, level) for each in member.timed)


def trial_was_slow(fleet: Fleet, member: Member) -> bool:
    """Whether the last first token of a member that was slow shows that it still is."""
    level = _level(fleet, member, float("-inf"))
    return level is not None and bool(member.timed) and _slower(member.timed[-1], STILL_SLOW, level)


def _slower(timed: Timed, times: float, level: float) -> bool:
    usual_ms = level * timed.expected_ms
    return timed.took_ms >= times * usual_ms and timed.took_ms - usual_ms > SLOW_MS


def _level(fleet: Fleet, member: Member, since_s: float) -> float | None:
    """What the member's peers took since then, by the yardstick: their median."""
    levels = list[float]()
    for peer in _peers(fleet, member):
        if not peer.timed or peer.timed[-1].at_s < since_s:
            continue
        timed = [each for each in peer.timed if each.at_s >= since_s and not each.queued]
        if len(timed) >= PEER_TOKENS_MIN:
            levels.append(median([each.took_ms / each.expected_ms for each in timed]))
            if len(levels) == LEVELS_MAX:
                break
    return median(levels) if levels else None


def _peers(fleet: Fleet, member: Member) -> Iterator[Member]:
    """Usable members that have a model in common with it, others first each time."""
    names = fleet.roster.kind(member)
    for others, members in fleet.roster.kinds():
        if others.isdisjoint(names):
            continue
        first = fleet.means.common.answers % len(members)
        for peer in chain(islice(members, first, None), islice(members, first)):
            if peer is not member:
                yield peer
