"""Hit rate of answers without a count of cached tokens, by the engines' own counters. It checks a hit rate that no
other source verifies.

An answer reports how many of its prompt's tokens were cached only if the client requests usage and the engine's flags
allow it. But engines count queries and hits of their prefix caches, and the router probes these counters. If
practically all work of a replica comes from this router, the difference between the engine's counters and the counts in
its answers belongs to the answers without a count ("silent" answers):

    rate of silent answers = (hits counted - hits told) / (queries counted - tokens told), of the last five minutes

RequestTokenizer of silent answers are counted at this rate, in separate series that never enter the hit rate. There are
three
reasons: the counters do not describe a single answer, they include the router's own prewarming, and they run ahead of
answers by the requests in flight.

No tokens are counted if other routers or clients use the replica too (`ReplicaState.share` below 1, or unknown). None
are counted while the replica serves a request together with another replica: both count its prompt, each in its own
way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp
from operator import lt

from router.core.fleet.engine_counters import SHARE_TOKENS_MIN
from router.core.fleet.member import ReplicaState

WINDOW_S = 300.0
TOKENS_MIN = 2_000.0  # minimum of queries in the window that no answer accounts for, before a rate is computed
PART_MIN = 0.05  # the same as a part of all queries; below it, requests in flight distort the rate too much

Silent = dict[tuple[str, str], float]  # (replica, model's label) -> prompt tokens of answers without a count
# replica -> prompt tokens and hits of answers with a count, and requests that two replicas serve
Told = Mapping[str, list[float]]


class EngineHitRate:
    """Counter of silent answers. Call `settle` once a second. `sums` are tokens since the router began, by model's
    label: prompt, cached."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self._replicas: dict[str, _Window] = {}

    def settle(self, members: Iterable[ReplicaState], told: Told, silent: Silent, now_s: float) -> None:
        """Read what engines have counted since the last call, and count silent answers by it. `silent` is emptied."""
        rates: dict[str, float | None] = {}
        windows = self._replicas
        for member in members:
            window = windows.get(member.id) or windows.setdefault(member.id, _Window())
            rates[member.id] = window.rate(member, told.get(member.id) or [0.0, 0.0, 0.0], now_s)
        if len(windows) > len(rates):
            self._replicas = {id_: window for id_, window in windows.items() if id_ in rates}
        for (replica, model), tokens in silent.items():
            rate = rates.get(replica)
            if rate is not None:
                sums = self.sums.get(model) or self.sums.setdefault(model, [0.0, 0.0])
                sums[0] += tokens
                sums[1] += tokens * rate
        silent.clear()


class _Window:
    """Counters of one replica over the last minutes."""

    __slots__ = ("_at_s", "_before", "_legs", "_sums")

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float] | None = None
        self._sums = [0.0] * 4  # queries, hits, and the prompt tokens and hits that answers reported
        self._at_s = self._legs = 0.0

    def rate(self, member: ReplicaState, told: list[float], now_s: float) -> float | None:
        """Return the hit rate of silent answers, or None if the counters do not describe them."""
        queries, hits = member.load.cache_query_tokens_total, member.load.cache_hit_tokens_total
        ours = member.counters.share >= 1.0 and member.counters.engine_prompt_tokens >= SHARE_TOKENS_MIN
        if queries is None or hits is None or not ours or told[2] != self._legs:
            self._before, self._sums, self._legs = None, [0.0] * 4, told[2]
            return None
        before, now = self._before, (queries, hits, told[0], told[1])
        self._before = now
        if before is None or any(map(lt, now, before)):  # a counter fell: another process counts there now
            self._sums = [0.0] * 4
        else:
            fade = exp((self._at_s - now_s) / WINDOW_S)
            self._sums = [
                each * fade + after - earlier for each, after, earlier in zip(self._sums, now, before, strict=True)
            ]
        self._at_s = now_s
        counted, found, told_tokens, told_hits = self._sums
        silent = counted - told_tokens
        if silent < max(TOKENS_MIN, PART_MIN * counted):
            return None
        return min(1.0, max(0.0, (found - told_hits) / silent))
