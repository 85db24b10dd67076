"""Common base of rules: it keeps the router's last input and ignores the later events of a request."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from loadtest.simulate.engine.placer import SimView
from loadtest.simulate.engine.workload import SimRequest
from router.core.types.placements import Candidate


class SimPolicy:
    """A SimPolicy without its `choose`."""

    cache_aware = True
    sight: SimView

    def see(self, sight: SimView) -> None:
        """Keep the router's input."""
        self.sight = sight

    def on_placed(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Ignore the placement. A rule with books overrides this."""

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Ignore the first token. A rule with books overrides this."""

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Ignore the end. A rule with books overrides this."""


def draw_number(turn: SimRequest, count: int) -> int:
    """Return a pseudo-random number below `count`. It is the same for a turn in every run. Two routers never get the
    same turn, so they do not draw alike."""
    return xxh3_64_intdigest(turn.number.to_bytes(8, "little")) % count


def least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest requests in flight; the first of several."""
    return min(candidates, key=lambda c: c.in_flight)


def one_of_least_loaded(candidates: Sequence[Candidate], turn: SimRequest) -> Candidate:
    """Return any candidate with the fewest requests."""
    least = min(c.in_flight for c in candidates)
    tied = [c for c in candidates if c.in_flight == least]
    return tied[draw_number(turn, len(tied))]
