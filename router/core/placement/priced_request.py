"""A request on its way through `Router.route`: the replicas that it may use, and their prices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from router.core.fleet.member import ReplicaState
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.prefix_match import PromptMatch
from router.core.types.placements import Candidate, PlacementContext


class PlacementScope(Struct, gc=False):
    """Replicas that a placement may use. Fields are described at `Router.route`."""

    exclude: frozenset[str]
    only: str | frozenset[str] | None
    full: Collection[str]
    whole: bool  # one replica serves the request

    @property
    def narrowed(self) -> bool:
        """True if the choice may differ from that of another router with the same view of the fleet."""
        return bool(self.exclude or self.only or self.full)


class PricedRequest(Struct, gc=False):
    """A request with its priced candidates."""

    wanted: PlacementRequest
    scope: PlacementScope
    members: list[ReplicaState]  # members that may take the request
    matched: PromptMatch
    market: PlacementContext
    candidates: list[Candidate]  # all members, or of many those that can be the cheapest
    able: Sequence[Candidate]  # the candidates that keep the deadline; all of them without one
    now_s: float
    left_ms: float | None = None  # time until the deadline of the first token; None without one
    may_shed: bool = False  # the request is refused if no replica can keep its deadline
    # candidates for another stage of the request, of the replicas that take no whole requests
    beside: Sequence[Candidate] = ()
