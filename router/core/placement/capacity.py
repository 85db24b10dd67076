"""Free places for requests, as admission counts them (core/admission), with and without disaggregated prefill.

A request without disaggregated prefill needs a place on one replica that takes whole requests. Other requests can use
such a replica too, or two replicas that are a pair. If no replica takes whole requests (SGLang's servers), a decoding
replica is no place until a prefilling replica of one of its pairs is free. Prompts are prefilled by replicas that take
whole requests, and by replicas that prefill for others.
"""

from __future__ import annotations

from collections.abc import Collection

from router.core.fleet.eligibility import Eligibility
from router.core.fleet.member import ReplicaState
from router.core.fleet.registry import Fleet
from router.core.placement.filters import filter_members, filter_prefill_members, refusal
from router.core.placement.placement_request import PlacementRequest

NOBODY: frozenset[str] = frozenset()


class CapacityPools:
    """Reads the fleet and changes nothing. A request is described by its model, its permitted replicas, and
    `can_disaggregate` (admission.queue.Pool)."""

    def __init__(self, fleet: Fleet, fitness: Eligibility, *, splits: bool) -> None:
        """`splits`: the policy may use disaggregated prefill."""
        self._fleet, self._fitness, self._splits = fleet, fitness, splits

    def may_split(self, wanted: PlacementRequest) -> bool:
        """True if a request may use disaggregated prefill and some replicas support it."""
        return wanted.may_split and self._splits and bool(self._fleet.legs.hands)

    def prefill(
        self, model: str | None, only: str | frozenset[str] | None, may_split: bool, now_s: float
    ) -> list[ReplicaState]:
        """Return the members that may prefill a request, as `Router.route` would find now, full or not. Raises
        NoReplicaReady and Shed."""
        members = self._candidates(model, only, may_split, now_s)
        if not may_split or isinstance(only, str):
            return members
        legs = self._fleet.legs
        able = [m for m in members if legs.serves_unsplit(m) or legs.may_prefill(m)]
        return able + self._only_prefill(model, only, now_s)

    def has_room(
        self,
        model: str | None,
        only: str | frozenset[str] | None,
        may_split: bool,
        now_s: float,
        busy: Collection[str],
    ) -> bool:
        """True if a replica that takes the request whole is not `busy`, or two that are a pair. Raises NoReplicaReady
        and Shed."""
        members, legs = self._candidates(model, only, may_split, now_s), self._fleet.legs
        free = [m for m in members if m.id not in busy]
        if not may_split or isinstance(only, str) or not legs.hands or any(map(legs.serves_unsplit, free)):
            return bool(free)
        prefill = [m for m in members if legs.may_prefill(m)] + self._only_prefill(model, only, now_s)
        if self._is_pair(prefill, free, busy):
            return True
        if not any(map(legs.serves_unsplit, members)) and not self._is_pair(prefill, members, ()):
            raise refusal(self._fleet, model, NOBODY, only, now_s)
        return False

    def filter_places(self, members: list[ReplicaState], *, may_split: bool = False) -> list[ReplicaState]:
        """Return those of `members` that are places for requests, served whole or decoded after another replica's
        prefill. The list must not be modified."""
        legs, members = self._fleet.legs, self._fleet.filter_unsplit(members)
        return legs.filter_unsplit(members) if legs.hands and not may_split else members

    def _candidates(
        self, model: str | None, only: str | frozenset[str] | None, may_split: bool, now_s: float
    ) -> list[ReplicaState]:
        """Return the members that may take a request, or the decode stage of one that `can_disaggregate`, as
        `Router.route` would find now, full or not. The list must not be modified. Raises NoReplicaReady and Shed."""
        return filter_members(self._fleet, self._fitness, model, NOBODY, only, (), now_s, whole=not may_split)

    def _only_prefill(self, model: str | None, among: frozenset[str] | None, now_s: float) -> list[ReplicaState]:
        if not self._fleet.prefillers:
            return []
        return filter_prefill_members(self._fleet, self._fitness, model, NOBODY, among, (), now_s, must=True)

    def _is_pair(self, prefill: list[ReplicaState], decode: list[ReplicaState], busy: Collection[str]) -> bool:
        """True if any two of these take traffic as a pair, and the prefilling one is not busy."""
        legs = self._fleet.legs
        able = [m for m in decode if legs.may_decode(m)]
        return any(legs.is_warm(first, m) for first in prefill if first.id not in busy for m in able)
