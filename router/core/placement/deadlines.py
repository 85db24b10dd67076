"""Which replicas can give a first token in time, and when none can.

A candidate's expected first token is when the wait there is over and the prompt's prefill is done; what is learned of
such expectations (learned/first_tokens.py) makes a prediction of that. A request with a deadline chooses among the
candidates that keep it, if there are any: the price knows what its wait costs others, and not that it is worth nothing
later. Where none keeps it, the choice is as without a deadline, or the request is turned away if it may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.core.facts.placements import Candidate, Shed
from router.core.fleet.member import Member

UNREACHABLE = "slo_unreachable"  # code of a refusal: no replica can be in time


def expected_ms(candidate: Candidate) -> float:
    """Milliseconds from a placement to its first token: the wait, the load from tiers and the prefill."""
    return max(candidate.pending_ms, candidate.kv_wait_ms) + candidate.loading_ms + candidate.uncached_ms


def predicted_ms(candidate: Candidate, members: Mapping[str, Member]) -> float:
    """The same, as often longer as shorter in truth."""
    return members[candidate.id].speeds.first_tokens.predict(expected_ms(candidate))[0]


def in_time(
    candidates: Sequence[Candidate], members: Mapping[str, Member], left_ms: float, *, may_shed: bool
) -> Sequence[Candidate]:
    """Candidates whose first token is predicted within `left_ms`; all of them where none's is. Raises Shed in that case
    for a request that may be turned away."""
    times_ms = [predicted_ms(each, members) for each in candidates]
    able = [each for each, time_ms in zip(candidates, times_ms, strict=True) if time_ms <= left_ms]
    if not able and may_shed:
        raise unreachable(min(times_ms), left_ms)
    return able or candidates


def unreachable(soonest_ms: float, left_ms: float) -> Shed:
    """The refusal of a request whose first token comes in `soonest_ms` at best, and is wanted in `left_ms`."""
    what = f"The first token is expected in {soonest_ms:.0f} ms, later than is wanted; try again later."
    return Shed(UNREACHABLE, what, max(0.0, soonest_ms - left_ms) / 1e3)
