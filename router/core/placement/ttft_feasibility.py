"""Candidates that can deliver a first token before the request's deadline.

A candidate's expected first token comes after the replica's wait and the prompt's prefill. The prediction corrects this
expectation by its learned errors (estimators/ttft_quantiles.py). A request with a deadline chooses among the candidates
that keep the deadline, if there are any. The price alone is not enough: it includes the cost of the request's wait to
other requests, but not that a late first token is worthless. If no candidate keeps the deadline, the request is placed
as if it had none, or is rejected if it may be shed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.core.fleet.member import ReplicaState
from router.core.types.placements import Candidate, Shed

UNREACHABLE = "slo_unreachable"  # error code if no replica can keep the deadline


def predicted_ms(candidate: Candidate, members: Mapping[str, ReplicaState]) -> float:
    """Return the median prediction of the time to first token on this candidate, in milliseconds."""
    return members[candidate.id].speeds.first_tokens.predict(candidate.first_token_ms)[0]


def in_time(
    candidates: Sequence[Candidate], members: Mapping[str, ReplicaState], left_ms: float, *, may_shed: bool
) -> Sequence[Candidate]:
    """Return the candidates with a predicted first token within `left_ms`, or all candidates if each of them is too
    late. In the latter case it raises Shed for a request that may be shed."""
    times_ms = [predicted_ms(each, members) for each in candidates]
    able = [each for each, time_ms in zip(candidates, times_ms, strict=True) if time_ms <= left_ms]
    if not able and may_shed:
        raise unreachable(min(times_ms), left_ms)
    return able or candidates


def unreachable(soonest_ms: float, left_ms: float) -> Shed:
    """Return the error for a request with a first token wanted in `left_ms` and expected in `soonest_ms` at the
    earliest."""
    what = f"The first token is expected in {soonest_ms:.0f} ms, after its deadline; try again later."
    return Shed(UNREACHABLE, what, max(0.0, soonest_ms - left_ms) / 1e3)
