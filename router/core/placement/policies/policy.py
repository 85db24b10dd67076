"""The policy interface: a policy only chooses; its candidates are already filtered and priced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from router.core.types.placements import Candidate, PlacementContext, PolicyDecision, Pull


class Policy(Protocol):
    """A placement policy. `cache_aware` is True if the choice considers cached prefixes; if False, receipts give the
    reason `policy`. A policy that compares prices sets `Candidate.price_ms`, and returns their terms with its decision
    (`PolicyDecision.pricing`)."""

    name: str
    cache_aware: bool

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Pick one of `candidates` (never empty, in a stable order)."""


@runtime_checkable
class PullPolicy(Protocol):
    """A policy that may let the chosen replica fetch missing blocks from another replica's memory."""

    def pulls(self, market: PlacementContext, chosen: Candidate, pull: Pull) -> bool:
        """True if the P2P transfer costs less than computing these tokens on the chosen replica."""


class TransferTimes(Protocol):
    """Pairs of replicas, and the cost of sending blocks between them."""

    def transfer_ms(self, prefill: Candidate, decode: Candidate) -> float | None:
        """Return the modelled time to send the part of the prompt that the decoding replica lacks; None if the two are
        no pair."""


@runtime_checkable
class RingOrdered(Protocol):
    """A policy that does not need every replica of a large fleet as a candidate. The replicas that can be the cheapest
    are enough, if they include the ones near the key."""

    def order_by_ring(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """Return all `ids`, the nearest to the key first."""
