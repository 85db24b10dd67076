"""Mooncake's Conductor: the least estimated time to first token.

    argmin T_queue(r) + T_prefill(prompt, hit(q, r)),  T_queue = the sum of T_prefill of the requests that wait there

Source: Mooncake (FAST '25), algorithm 1. T_prefill is a polynomial that its operators fit offline. Here it is the
calibration's own formula, which is the best possible fit. Left out:

- KV transfer between replicas: no replica here can fetch another's blocks, so T_transfer never wins
- rejection of requests over their limit: it is off, so that rows answer the same requests
- the decode pool: every replica does both stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.fake_engine.calibration import StepTimes
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.workload import Workload
from loadtest.simulate.policies.load_accounting import ScoringPolicy, least
from loadtest.simulate.policies.prefill_times import prefill_s
from router.core.placement.policies import Policy
from router.core.types.placements import Candidate


class MooncakeConductor(ScoringPolicy):
    """Policy with books in microseconds."""

    name = "mooncake_conductor"

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[str, StepTimes] = {}

    def prepare_run(self, replicas: Mapping[str, VirtualReplica], workload: Workload, first: Policy) -> None:
        """Receive the result of the offline fit: the speed of each replica's model on its machine."""
        self._times = {name: replica.calibration.times for name, replica in replicas.items()}

    def _work(self, candidate: Candidate) -> int:
        return round(1e6 * prefill_s(self._times[candidate.id], candidate.uncached_tokens, candidate.cached_tokens))

    def _pick(self, candidates: Sequence[Candidate]) -> Candidate:
        return self._any(least(candidates, lambda c: self._get_pending(c) + self._work(c)))
