"""Rows of replicas on the dashboard's page: state with its reason, load, recent traffic, and a comparison with peers.

Peers are the replicas with the same models and the same role. A replica is slow if the router has learned that the same
work takes it SLOW_WORK times as long as the median of its peers, or if half of its recent first tokens take SLOW_TTFT
times as long as theirs, or if all come DELAY_S later than its work explains. Times to first token depend on prompts, so
the second limit is higher. A replica is idle if it could take requests, and got less than IDLE_SHARE of the mean of its
peers. All medians come from one sorted list for each group of peers, so the work grows with n log n of n replicas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from router.core.cache_state.prefix_index import PrefixIndex
from router.core.fleet.breaker import State
from router.core.fleet.member import ReplicaState
from router.core.insights.ledger.recent_traffic import ReplicaTraffic

SLOW_WORK = 1.5  # below 1.25 a difference is noise (speed_factor.py); the evidence against an avoided replica fades
SLOW_TTFT, SLOW_TTFT_S = 3.0, 0.2  # times as long as on peers, and at least that much longer
DELAY_S = 1.0  # unexplained delay of first tokens beyond that of peers, from which a replica is slow
FIRST_TOKENS_MIN = 5.0  # recent first tokens from which a median is compared
IDLE_SHARE, IDLE_REQUESTS_MIN = 0.1, 10.0  # of the peers' mean; recent requests of which that is at least
NAMED_MODELS_MAX = 50

Traffic = dict[str, ReplicaTraffic]


def explain_health(member: ReplicaState) -> str:
    """Return the result of the replica's health checks, or that discovery excludes it."""
    return member.health.why if member.replica.ready else "not ready according to discovery"


def describe_breaker(member: ReplicaState, now_s: float) -> dict[str, Any]:
    """Return the state of the replica's breaker, the reason, and the time for which it gets no requests."""
    state = member.state(now_s)
    until_s = {State.OPEN: member.breaker.until_s, State.RESTING: member.restrictions.rest_until_s}.get(state, now_s)
    why = "requested by the replica" if state is State.RESTING else member.breaker.why
    return {"state": state, "why": why, "for_s": round(until_s - now_s, 1)}


def explain_state(member: ReplicaState, now_s: float) -> str:
    """Return the reason for which the replica takes no requests or only trials; else the result of its health
    checks."""
    breaker = describe_breaker(member, now_s)
    if not member.ready or breaker["state"] is State.CLOSED:
        return explain_health(member)
    if breaker["state"] is State.HALF_OPEN:
        return f"{breaker['why']}; one trial at a time"
    return f"{breaker['why']}; for another {max(breaker['for_s'], 0.0):.1f} s"


class Peers:
    """Comparison of replicas with their peers. A replica with other models than at the construction has no peers."""

    def __init__(self, members: Iterable[ReplicaState], traffic: Traffic) -> None:
        self._traffic = traffic
        groups: dict[tuple[int, str], list[ReplicaState]] = {}
        for member in members:
            groups.setdefault(_group(member), []).append(member)
        self._prefill, self._step, self._delay, self._ttft = (
            {key: sorted(value for each in group if (value := read(each)) is not None) for key, group in groups.items()}
            for read in (_prefill, _step, _delay, self._ttft_s)
        )
        self._requests = {
            key: (len(group), sum(traffic[each.id].requests for each in group)) for key, group in groups.items()
        }

    def explain_slow(self, member: ReplicaState) -> str:
        """Return in what the replica is slower than its peers; "" if it is not, or has no peers."""
        key, found = _group(member), list[str]()
        for what, own, all_ in (
            ("prefill", _prefill(member), self._prefill.get(key, [])),
            ("a decode step", _step(member), self._step.get(key, [])),
        ):
            usual = _median_of_others(all_, own)
            if usual and own >= SLOW_WORK * usual:
                found.append(f"{what} takes {own / usual:.1f} times as long as on its peers")
        ttft_s = self._ttft_s(member)
        usual_s = _median_of_others(self._ttft.get(key, []), ttft_s) if ttft_s is not None else None
        if ttft_s is not None and usual_s is not None and ttft_s >= max(SLOW_TTFT * usual_s, usual_s + SLOW_TTFT_S):
            found.append(f"half of its first tokens take {ttft_s:.2f} s or longer, and {usual_s:.2f} s on its peers")
        delay_ms = member.own_speed.delay.ms
        usual_ms = _median_of_others(self._delay.get(key, []), delay_ms)
        if usual_ms is not None and delay_ms >= max(SLOW_TTFT * usual_ms, usual_ms + DELAY_S * 1e3):
            found.append(
                f"its first tokens come {delay_ms / 1e3:.2f} s later than its work explains: "
                "check the network and the proxies before it"
            )
        return "; ".join(found)

    def explain_idle(self, member: ReplicaState, now_s: float) -> str:
        """Return how many requests the peers get of a replica that could take some and gets few; "" for others."""
        count, requests = self._requests.get(_group(member), (0, 0.0))
        own = self._traffic[member.id].requests
        if count < 2 or member.replica.only_prefills:
            return ""
        if not member.ready or member.state(now_s) is not State.CLOSED:
            return ""
        mean = (requests - own) / (count - 1)
        if mean < IDLE_REQUESTS_MIN or own > IDLE_SHARE * mean:
            return ""
        return f"it got {own:.0f} requests in the last minutes, and its peers got {mean:.0f} each"

    def _ttft_s(self, member: ReplicaState) -> float | None:
        traffic = self._traffic[member.id]
        return traffic.ttft_p50_s if traffic.first_tokens >= FIRST_TOKENS_MIN else None


def _group(member: ReplicaState) -> tuple[int, str]:
    return id(member.speeds), member.replica.role


def _prefill(member: ReplicaState) -> float:
    return member.own_speed.prefill_factor.value


def _step(member: ReplicaState) -> float:
    return member.own_speed.step_factor.value


def _delay(member: ReplicaState) -> float:
    return member.own_speed.delay.ms


def _median_of_others(values: list[float], own: float) -> float | None:
    """Return the lower median of sorted values, of which one is `own`, without it; None if there are no others."""
    middle = (len(values) - 2) // 2
    if middle < 0 or len(values) < 2:
        return None
    return values[middle if middle < bisect_left(values, own) else middle + 1]


class ReplicaRows:
    """Makes rows of replicas."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        clock: Callable[[], float],
        is_known: Callable[[str], bool],
        grade_why: Callable[[str], str],
        window: Callable[[str], int | None],
        warming: Callable[[str], bool],
        grade_falls: Callable[[str], int],
    ) -> None:
        """Functions that take a replica's id:

        `is_known`: False if the replica has left.
        `grade_why`: reason for its grade.
        `window`: maximum of requests that it may have open.
        `warming`: True if its cache is being filled.
        `grade_falls`: number of times that its grade fell in the last minutes.
        """
        self._index, self._clock, self._is_known, self._grade_why = index, clock, is_known, grade_why
        self._window, self._warming, self._grade_falls = window, warming, grade_falls

    def row(self, member: ReplicaState, traffic: ReplicaTraffic, peers: Peers) -> dict[str, Any]:
        """Return the row of one replica. It may have left since `peers` was made."""
        now_s, load = self._clock(), member.load
        there = self._is_known(member.id)
        return {
            "id": member.id,
            "name": member.replica.name,
            "pod": member.replica.pod,
            "namespace": member.replica.namespace,
            "models": sorted(member.models)[:NAMED_MODELS_MAX],
            "ready": member.ready,
            "why": explain_state(member, now_s),
            "state": member.state(now_s),
            "slow": peers.explain_slow(member),
            "idle": peers.explain_idle(member, now_s),
            "grade": member.grade,
            "grade_why": self._grade_why(member.id),
            "grade_falls": self._grade_falls(member.id),
            "requests_per_s": traffic.requests_per_s,
            "request_share": traffic.share,
            "ttft_p50_s": traffic.ttft_p50_s,
            "ttft_p90_s": traffic.ttft_p90_s,
            "in_flight": len(member.leases),
            "window": self._window(member.id) if there else None,
            "pending_prefill_ms": round(member.queue.pending_ms(now_s), 1),
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "blocks": self._index.blocks(member.id) if there else 0,
            "blocks_max": self._index.capacity(member.id) if there else 0,
            "warming": self._warming(member.id),
        }
