"""The policy interface: candidates come filtered and priced, a policy only chooses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from router.core.facts.placements import Candidate, Choice, Market, Pull, Split


class Policy(Protocol):
    """`cache_aware` says whether the choice looked at what replicas hold; if not, receipts say `policy`."""

    name: str
    cache_aware: bool

    def choose(self, market: Market, candidates: Sequence[Candidate]) -> Choice:
        """Pick one of `candidates` (never empty, in a stable order)."""


@runtime_checkable
class Pulling(Protocol):
    """A policy that may have the replica that it chose bring what that lacks from another one's memory."""

    def pulls(self, market: Market, chosen: Candidate, pull: Pull) -> bool:
        """Whether the pull is better than computing these tokens there."""


class Pairs(Protocol):
    """Which replicas pair, and what it takes to send blocks from one to the other."""

    def transfer_ms(self, prefill: Candidate, decode: Candidate) -> float | None:
        """Modelled time to send what the decoding replica lacks of the prompt; None where the two are no pair."""


@runtime_checkable
class Splitting(Protocol):
    """A policy that may have one replica prefill a request that another one decodes."""

    def may_split(self, market: Market, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """Whether two legs can be better than having the chosen replica do both, whoever may prefill. Asked before
        those are priced."""

    def split(
        self,
        market: Market,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: Pairs,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> Split | None:
        """The two legs that are better than having the chosen replica do both; None where none are. `prefill` and
        `decode` may take the one leg and the other, as far as they pair; `waits_ms` are the waits of all replicas that
        may prefill, of which `prefill` may be the best few. `must`: the chosen one cannot do both, so that any two are
        better."""


@runtime_checkable
class Near(Protocol):
    """A policy that need not be shown every replica of a large fleet: those that can be the cheapest are enough, if the
    ones near a key are among them."""

    def near(self, ring_key: str, ids: Collection[str]) -> list[str]:
        """All `ids`, the nearest to the key first."""
