"""Sums of all requests of five seconds, placed or not: counts, tokens, times and load.

An interval is a mapping of names to numbers, so that intervals add up to longer ones name by name. This also holds for
an interval that another version of the router stored. Names are those of the page's points, except for

    miss:REASON            prompt tokens that missed the cache, by reason
    place:PLACE            prompt tokens by the place where they ended
    held:CAUSE             of those held elsewhere, by the cause for which the holder was passed over
    ttft:N, itl:N, e2e:N, waited:N   requests in bucket N of a time's histogram
    by:...                 sums by model and group (breakdowns.py)
    NAME_max               a maximum, which does not add up
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from router.core.insights.ledger.decaying_sums import TTFT_S, percentile
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import MissReason, TokenBreakdown, TokenFate
from router.core.types.placements import EndReason, Receipt, Usage
from router.telemetry.request_record import RequestRecord

STEP_S = 5
STEPS = 720  # intervals kept in memory: an hour

Sums: TypeAlias = dict[str, float]

_ITL_S = tuple(round(0.0005 * 1.25**step, 7) for step in range(45))  # bounds of buckets, to 9 s
_BOUNDS: dict[str, Sequence[float]] = {"ttft": TTFT_S, "itl": _ITL_S, "e2e": TTFT_S, "waited": TTFT_S}
_KEYS = {name: tuple(f"{name}:{n}" for n in range(len(bounds) + 1)) for name, bounds in _BOUNDS.items()}
_MISSES = {miss: f"miss:{miss.value}" for miss in MissReason}
_PLACES = {place: f"place:{place.value}" for place in TokenFate}
_HELD = {cause.value: f"held:{cause.value}" for cause in SpillCause}
_CACHED_ELSEWHERE = TokenFate.CACHED_ON_OTHER_REPLICA
_PARTS = {"ttft": (0.5, 0.9, 0.99), "itl": (0.5, 0.9, 0.99), "e2e": (0.5, 0.9, 0.99), "waited": (0.9,)}
_COUNTED = (
    "requests", "placed", "answered", "errors_5xx", "errors_4xx", "shed", "left", "broken", "retries",
    "prompt_tokens", "completion_tokens", "predicted_tokens", "hit_tokens", "genuine_tokens", "replay_tokens",
    "verified_tokens", "verified_hit_tokens", "verified_predicted_tokens",
)  # fmt: skip
(
    _REQUESTS, _PLACED, _ANSWERED, _ERRORS_5XX, _ERRORS_4XX, _SHED, _LEFT, _BROKEN, _RETRIES,
    _PROMPT, _COMPLETION, _PREDICTED, _HIT, _GENUINE, _REPLAY,
    _VERIFIED, _VERIFIED_HIT, _VERIFIED_PREDICTED,
) = range(len(_COUNTED))  # fmt: skip


class Intervals:
    """Intervals of the last hour. `move` ends the current one.

    The current interval consists of plain lists, because every request adds to it; it becomes a mapping when it is
    over.
    """

    def __init__(self, now_s: float) -> None:
        self.number = int(now_s // STEP_S)  # steps since 1970 of the current interval
        self.over: deque[tuple[int, Sums]] = deque(maxlen=STEPS)  # oldest first
        self._begin()

    def _begin(self) -> None:
        self._counts = [0] * len(_COUNTED)
        self._load: Sums = {}
        self._misses = dict.fromkeys(MissReason, 0)
        self._places = dict.fromkeys(TokenFate, 0)
        self._held: dict[str, int] = {}  # tokens held elsewhere, by cause
        self._ttft, self._itl, self._e2e, self._waited = ([0] * len(keys) for keys in _KEYS.values())

    def observe(self, record: RequestRecord) -> None:
        """Add a request that ended."""
        counts, status, receipt = self._counts, record.status, record.receipt
        counts[_REQUESTS] += 1
        counts[_outcome(status, record.ending)] += 1
        if status != 429:
            self._e2e[bisect_left(TTFT_S, record.times.duration_s)] += 1
        if record.times.queued_s > 0:
            self._waited[bisect_left(TTFT_S, record.times.queued_s)] += 1
        if record.times.ttft_s is not None:
            self._ttft[bisect_left(TTFT_S, record.times.ttft_s)] += 1
        if record.times.inter_token_s is not None:
            self._itl[bisect_left(_ITL_S, record.times.inter_token_s)] += 1
        if record.retries:
            counts[_RETRIES] += len(record.retries)
        if record.usage is not None:
            counts[_COMPLETION] += record.usage.completion_tokens
        if receipt is not None:
            counts[_PLACED] += 1
            if record.cache.miss is not None:
                self._tokens(record.cache.miss, receipt, record.usage)
            if record.cache.places is not None:
                self._add_token_fates(record.cache.places, record.cache.miss)

    def _tokens(self, miss: TokenBreakdown, receipt: Receipt, usage: Usage | None) -> None:
        """Add a prompt's tokens: hits, and misses by reason."""
        counts, misses, predicted = self._counts, self._misses, receipt.predicted_cached_tokens
        counts[_PROMPT] += miss.prompt_tokens
        counts[_PREDICTED] += predicted
        counts[_HIT] += miss.hit
        counts[_REPLAY if receipt.replay else _GENUINE] += miss.hit
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens > 0:
            counts[_VERIFIED] += miss.prompt_tokens
            counts[_VERIFIED_HIT] += miss.hit
            counts[_VERIFIED_PREDICTED] += predicted
        for reason, tokens in miss.misses.items():
            misses[reason] += tokens

    def _add_token_fates(self, ended: Mapping[TokenFate, int], miss: TokenBreakdown | None) -> None:
        """Add a prompt's tokens by place. Tokens that another replica holds are also added by the cause for which it
        was passed over."""
        places = self._places
        for place, tokens in ended.items():
            places[place] += tokens
        if _CACHED_ELSEWHERE in ended and miss is not None:
            cause = miss.held[1]
            self._held[cause] = self._held.get(cause, 0) + ended[_CACHED_ELSEWHERE]

    def sample(self, in_flight: int, waiting: int) -> None:
        """Record the number of requests being answered, and how many of them wait in the router."""
        now = {"in_flight": in_flight, "waiting": waiting, "in_flight_max": in_flight, "waiting_max": waiting}
        merge(self._load, {"samples": 1, **now})

    def get_current(self) -> Sums:
        """Return the current interval."""
        sums: Sums = {name: value for name, value in zip(_COUNTED, self._counts, strict=True) if value}
        sums |= {_MISSES[miss]: tokens for miss, tokens in self._misses.items() if tokens}
        sums |= {_PLACES[place]: tokens for place, tokens in self._places.items() if tokens}
        sums |= {_HELD[cause]: tokens for cause, tokens in self._held.items() if cause in _HELD}
        for keys, counts in zip(_KEYS.values(), (self._ttft, self._itl, self._e2e, self._waited), strict=True):
            sums |= {key: count for key, count in zip(keys, counts, strict=True) if count}
        return sums | self._load

    def move(self, now_s: float) -> tuple[int, Sums] | None:
        """Begin a new interval if the current one is over by `now_s`. Returns the one that is over, with its number. A
        clock that was set back begins no interval."""
        number = int(now_s // STEP_S)
        if number <= self.number:
            return None
        ended = (self.number, self.get_current())
        self.over.append(ended)
        self.number = number
        self._begin()
        return ended

    def list_intervals(self) -> list[tuple[int, Sums]]:
        """Return every interval with its number, oldest first, the current one last."""
        return [*self.over, (self.number, self.get_current())]


def _outcome(status: int, ending: str) -> int:
    """Return the count that a request's end belongs to, in addition to the count of all requests."""
    if status == 200 and ending == EndReason.OK.value:
        return _ANSWERED
    if status == 429:
        return _SHED
    # 499 is nginx's code for a client that left before its answer began.
    if status == 499 or ending == EndReason.CLIENT_LEFT.value:
        return _LEFT
    if status >= 500:
        return _ERRORS_5XX
    if status >= 400:
        return _ERRORS_4XX
    return _ANSWERED if ending == EndReason.OK.value else _BROKEN


# -- adding up -----------------------------------------------------------------------------------------------------


def merge(first: Sums, second: Mapping[str, float]) -> Sums:
    """Return the sum of both intervals; `first` is changed and returned."""
    for name, value in second.items():
        first[name] = max(first.get(name, 0), value) if name.endswith("_max") else first.get(name, 0) + value
    return first


def in_steps(known: Iterable[tuple[float, Mapping[str, float]]], step_s: int, steps: dict[int, Sums]) -> None:
    """Add intervals, each given with its beginning in Unix time, to the longer ones in `steps`, which are keyed by
    their beginnings."""
    for at_s, sums in known:
        at = int(at_s // step_s) * step_s
        step = steps.get(at)
        if step is None:
            step = steps[at] = {}
        merge(step, sums)


def point(at_s: int, sums: Mapping[str, float] | None) -> dict[str, Any]:
    """Return an interval as a row of the page; None stands for a time without data."""
    if sums is None:
        return {"at_s": at_s, "known": False}
    samples = sums.get("samples", 0)
    return {
        "at_s": at_s,
        "known": True,
        **{name: round(sums.get(name, 0)) for name in _COUNTED},
        "misses": {miss.value: round(sums[key]) for miss, key in _MISSES.items() if sums.get(key)},
        "places": {place.value: round(sums[key]) for place, key in _PLACES.items() if sums.get(key)},
        "held": {cause: round(sums[key]) for cause, key in _HELD.items() if sums.get(key)},
        **_percentiles(sums),
        **{name: round(sums.get(name, 0) / samples, 2) if samples else None for name in ("in_flight", "waiting")},
        **{name: sums.get(name) for name in ("in_flight_max", "waiting_max")},
    }


def _percentiles(sums: Mapping[str, float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, parts in _PARTS.items():
        counts = [sums.get(key, 0.0) for key in _KEYS[name]]
        any_ = any(counts)
        for part in parts:
            value = percentile(counts, _BOUNDS[name], part) if any_ else None
            found[f"{name}_p{round(part * 100)}_s"] = None if value is None else round(value, 5)
    return found
