"""What all requests of five seconds add up to, whether they were placed or not: counts, tokens, times, load.

An interval is a mapping of names to numbers, so that intervals add up to longer ones name by name, and one that was
kept by another version of the router still does. Names are those of the page's points but for
    miss:REASON            prompt tokens that missed the cache, by reason
    ttft:N, itl:N, e2e:N, waited:N   requests in bucket N of a time's histogram
    NAME_max               a maximum, which does not add up
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.core.facts.misses import Miss
from router.core.facts.placements import Ending
from router.core.observatory.ledger.sums import TTFT_S, percentile
from router.telemetry.record import RequestRecord

STEP_S = 5
STEPS = 720  # intervals kept in memory: an hour

Sums = dict[str, float]

_ITL_S = tuple(round(0.0005 * 1.25**step, 7) for step in range(45))  # bounds of buckets, to 9 s
_BOUNDS: dict[str, Sequence[float]] = {"ttft": TTFT_S, "itl": _ITL_S, "e2e": TTFT_S, "waited": TTFT_S}
_KEYS = {name: tuple(f"{name}:{n}" for n in range(len(bounds) + 1)) for name, bounds in _BOUNDS.items()}
_TTFT, _ITL, _E2E, _WAITED = _KEYS.values()
_MISSES = {miss: f"miss:{miss.value}" for miss in Miss}
_PARTS = {"ttft": (0.5, 0.9, 0.99), "itl": (0.5, 0.9, 0.99), "e2e": (0.5, 0.9, 0.99), "waited": (0.9,)}
_COUNTS = (
    "requests", "placed", "errors_5xx", "errors_4xx", "shed", "left", "broken", "retries",
    "prompt_tokens", "completion_tokens", "predicted_tokens", "hit_tokens", "genuine_tokens", "replay_tokens",
    "verified_tokens", "verified_hit_tokens", "verified_predicted_tokens",
)  # fmt: skip
_LEFT, _SHED = 499, 429  # statuses of requests whose clients left, and of those that were turned away


class Intervals:
    """The intervals of the last hour. `now` is the one that is under way; `move` ends it."""

    def __init__(self, now_s: float) -> None:
        self.number = int(now_s // STEP_S)  # steps since 1970 of the interval under way
        self.now: Sums = {}
        self.over: deque[tuple[int, Sums]] = deque(maxlen=STEPS)  # oldest first

    def observe(self, record: RequestRecord) -> None:
        """Add a request that ended."""
        now, status = self.now, record.status
        _add(now, "requests", 1)
        _add(now, _outcome(status, record.ending), 1)
        if record.retries:
            _add(now, "retries", len(record.retries))
        if status != _SHED:
            _add(now, _E2E[bisect_left(TTFT_S, record.duration_s)], 1)
        if record.queued_s > 0:
            _add(now, _WAITED[bisect_left(TTFT_S, record.queued_s)], 1)
        if record.ttft_s is not None:
            _add(now, _TTFT[bisect_left(TTFT_S, record.ttft_s)], 1)
        if record.inter_token_s is not None:
            _add(now, _ITL[bisect_left(_ITL_S, record.inter_token_s)], 1)
        if record.usage is not None:
            _add(now, "completion_tokens", record.usage.completion_tokens)
        if record.receipt is not None:
            _add(now, "placed", 1)
            if record.miss is not None:
                _tokens(now, record)

    def sample(self, in_flight: int, waiting: int) -> None:
        """Note how many requests are being answered, and how many of them wait in the router."""
        now = self.now
        _add(now, "samples", 1)
        for name, value in (("in_flight", in_flight), ("waiting", waiting)):
            _add(now, name, value)
            now[f"{name}_max"] = max(now.get(f"{name}_max", 0), value)

    def move(self, now_s: float) -> tuple[int, Sums] | None:
        """Begin a new interval if the one under way is over by `now_s`. Returns the one that is over, with its
        number. A clock that was set back begins none."""
        number = int(now_s // STEP_S)
        if number <= self.number:
            return None
        ended = (self.number, self.now)
        self.over.append(ended)
        self.number, self.now = number, {}
        return ended

    def all(self) -> list[tuple[int, Sums]]:
        """Every interval with its number, oldest first, the one under way last."""
        return [*self.over, (self.number, self.now)]


def _add(sums: Sums, name: str, value: float) -> None:
    sums[name] = sums.get(name, 0) + value


def _outcome(status: int, ending: str) -> str:
    """The count that a request's end belongs to, besides `requests`."""
    if status == _SHED:
        return "shed"
    if status == _LEFT or ending == Ending.CLIENT_LEFT:
        return "left"
    if status >= 500:
        return "errors_5xx"
    if status >= 400:
        return "errors_4xx"
    return "answered" if ending == Ending.OK else "broken"


def _tokens(now: Sums, record: RequestRecord) -> None:
    """Add a prompt's tokens: hits, and misses by reason."""
    miss, receipt, usage = record.miss, record.receipt, record.usage
    if miss is None or receipt is None:
        return
    _add(now, "prompt_tokens", miss.prompt_tokens)
    _add(now, "predicted_tokens", receipt.predicted_cached_tokens)
    _add(now, "hit_tokens", miss.hit)
    _add(now, "replay_tokens" if receipt.replay else "genuine_tokens", miss.hit)
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens > 0:
        _add(now, "verified_tokens", miss.prompt_tokens)
        _add(now, "verified_hit_tokens", miss.hit)
        _add(now, "verified_predicted_tokens", receipt.predicted_cached_tokens)
    for reason, tokens in miss.misses.items():
        _add(now, _MISSES[reason], tokens)


# -- adding up -----------------------------------------------------------------------------------------------------


def together(first: Sums, second: Mapping[str, float]) -> Sums:
    """Both intervals as one; `first` is changed and returned."""
    for name, value in second.items():
        first[name] = max(first.get(name, 0), value) if name.endswith("_max") else first.get(name, 0) + value
    return first


def in_steps(known: Iterable[tuple[float, Mapping[str, float]]], step_s: int) -> dict[int, Sums]:
    """Intervals, each given with its beginning in Unix time, as longer ones by their beginning."""
    steps: dict[int, Sums] = {}
    for at_s, sums in known:
        at = int(at_s // step_s) * step_s
        steps[at] = together(steps.get(at, {}), sums)
    return steps


def point(at_s: int, sums: Mapping[str, float] | None) -> dict[str, Any]:
    """An interval as a row of the page; None: nobody counted then."""
    if sums is None:
        return {"at_s": at_s, "known": False}
    samples = sums.get("samples", 0)
    return {
        "at_s": at_s,
        "known": True,
        **{name: round(sums.get(name, 0)) for name in _COUNTS},
        "misses": {miss.value: round(sums[key]) for miss, key in _MISSES.items() if sums.get(key)},
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
