"""The interface of policies that compare two replicas with one: the plan of a request's stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from router.core.placement.policies import TransferTimes
from router.core.types.placements import Candidate, DisaggPlan, PlacementContext


@runtime_checkable
class DisaggPolicy(Protocol):
    """A policy that may use disaggregated prefill: one replica prefills a request and another one decodes it."""

    def may_split(self, market: PlacementContext, chosen: Candidate, decode: Sequence[Candidate]) -> bool:
        """True if two replicas can be cheaper than the chosen one alone, for any prefilling replica. It is called
        before prefill candidates are priced."""

    def split(
        self,
        market: PlacementContext,
        chosen: Candidate,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        pairs: TransferTimes,
        *,
        waits_ms: Sequence[float] = (),
        must: bool = False,
    ) -> DisaggPlan | None:
        """Return the pair that is cheaper than the chosen replica alone, or None if there is no such pair.

        - `prefill`: candidates for the prefill stage.
        - `decode`: candidates for the decode stage. Only those that `pairs` connects can be combined.
        - `waits_ms`: the waits of all replicas that may prefill; `prefill` may contain only the best few of them.
        - `must`: the chosen replica cannot serve both stages, so any pair is better.
        """
