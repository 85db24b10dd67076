"""What engines count themselves of answers that do not tell: a check of the hit rate where nothing else verifies it.

An answer tells how many of its prompt's tokens were cached only where the client asks for usage and the engine's flags
allow it. But engines count queries and hits of their prefix caches, and these counters are probed. Where practically
all of a replica's work is ours, what it counted less what its answers told is the count of the answers that did not:

    rate of silent answers = (hits counted - hits told) / (queries counted - tokens told), of the last five minutes

Tokens of silent answers are counted at this rate, beside the hit rate and never in it: the counters say nothing of a
single answer, have our own pre-warming in them, and run ahead of answers by what is in flight. Where others use the
replica too (`Member.share` below 1, or not known yet) nothing is counted, and none while it takes legs of requests that
two replicas share: each of them counts such a prompt, in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp
from operator import lt

from router.core.fleet.member import SHARE_TOKENS_MIN, Member

WINDOW_S = 300.0
TOKENS_MIN = 2_000.0  # queries beyond those told of, within the window, before a rate is made of them
PART_MIN = 0.05  # the same as part of all queries: below it, what is in flight weighs too much

Silent = dict[tuple[str, str], float]  # (replica, model's label) -> prompt tokens of answers that did not tell
Told = Mapping[str, list[float]]  # replica -> prompt tokens and hits of answers that told, requests in two legs


class EngineCount:
    """`settle` once a second; `sums` are tokens since the router began, by model's label: prompt, cached."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self._replicas: dict[str, _Window] = {}

    def settle(self, members: Iterable[Member], told: Told, silent: Silent, now_s: float) -> None:
        """Take what engines have counted since the last call, and count silent answers by it; `silent` is emptied."""
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
    """The last minutes of one replica's counters."""

    __slots__ = ("_at_s", "_before", "_legs", "_sums")

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float] | None = None
        self._sums = [0.0] * 4  # queries, hits, tokens told, hits told
        self._at_s = self._legs = 0.0

    def rate(self, member: Member, told: list[float], now_s: float) -> float | None:
        """The hit rate of answers that did not tell; None where the counters say nothing of them."""
        queries, hits = member.load.cache_query_tokens_total, member.load.cache_hit_tokens_total
        ours = member.share >= 1.0 and member.seen_prompt_tokens >= SHARE_TOKENS_MIN
        if queries is None or hits is None or not ours or told[2] != self._legs:
            self._before, self._sums, self._legs = None, [0.0] * 4, told[2]
            return None
        before, now = self._before, (queries, hits, told[0], told[1])
        self._before = now
        if before is None or any(map(lt, now, before)):  # another process counts there now
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
