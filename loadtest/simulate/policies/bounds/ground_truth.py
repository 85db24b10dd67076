"""True state of the replicas, for upper bounds. No router can know it.

A first token arrives when the step under way and the prefills before it are done. Prefills run in steps of the token
budget, and each such step also decodes for every stream that decodes now. KV space for the request is not considered.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.prefill_times import STEP_TOKENS

Work = tuple[int, float]
"""Prompt tokens to compute, and the tokens that they attend to, summed."""


def work(uncached_tokens: int, cached_tokens: int) -> Work:
    """Return the work of prefilling `uncached_tokens` after `cached_tokens`."""
    return uncached_tokens, uncached_tokens * (cached_tokens + (uncached_tokens + 1) / 2)


class GroundTruth:
    """True prefill work under way at each replica, and its cost."""

    def __init__(self, replicas: Mapping[str, VirtualReplica]) -> None:
        self.replicas = replicas
        self._waiting: dict[str, dict[SimRequest, Work]] = {name: {} for name in replicas}
        self._sums: dict[str, list[float]] = {name: [0, 0.0] for name in replicas}

    def add_waiting(self, turn: SimRequest, replica: str, its_work: Work) -> None:
        """Count the request as waiting on the replica."""
        self._waiting[replica][turn] = its_work
        self._sums[replica][0] += its_work[0]
        self._sums[replica][1] += its_work[1]

    def remove_waiting(self, turn: SimRequest, replica: str) -> None:
        """Remove a request that has its first token or has ended. A second call has no effect."""
        tokens, pairs = self._waiting[replica].pop(turn, (0, 0.0))
        self._sums[replica][0] -= tokens
        self._sums[replica][1] -= pairs

    def waiting_tokens(self, name: str) -> float:
        """Return the prompt tokens that wait for prefill on the replica, those of the step under way included."""
        return self._sums[name][0]

    def first_token_s(self, name: str, own: Work, now_s: float) -> float:
        """Return seconds until the first token of a request that is placed there now."""
        replica = self.replicas[name]
        step_s, batch = replica.under_way(now_s)
        tokens, pairs = self._sums[name]
        waiting = self._waiting[name]
        for turn, left, computed in batch.prefilling:
            booked = waiting.get(turn)  # type: ignore[call-overload]
            if booked is not None:
                more = work(left, computed)
                tokens += more[0] - booked[0]
                pairs += more[1] - booked[1]
        tokens, pairs = max(0.0, tokens) + own[0], max(0.0, pairs) + own[1]
        steps = max(1, -(-int(tokens) // STEP_TOKENS))
        share = int(tokens / steps)
        decodes, context, held = batch.decodes, batch.context_tokens, batch.held_tokens
        return step_s + steps * replica.times.mixed_s(share, pairs / steps, decodes, context, held)
