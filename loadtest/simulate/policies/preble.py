"""preble_e2: Preble's exploit or explore, as stated in its paper and our notes (Srivatsa et al., ICLR 2025).

    if some replica holds more of the prompt than would be left to compute: the least loaded of those that hold most
    else the cheapest of all, by the sum of
        load      prefill of the tokens that requests of the last 3 minutes missed there, and the answers under way
        eviction  the cost to compute again the blocks that this prompt evicts
        prefill   of the tokens that this prompt misses there

An answer under way is priced by the median time of the latest ones, from the first token on. Times come from the same
sources as ours. Prefill uses the speed that the router has learned (Preble: a regression measured for the GPU
beforehand), and the price of eviction comes from the router's books.

Left out because no figures are stated: the move of load off a replica that is far busier than the others, the
replication of a prefix by itself, and fairness inside the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.base import SimPolicy
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

WINDOW_S = 180.0
ANSWERS = 101


class ExploitExplore(SimPolicy):
    """Policy with a window of the requests sent to each replica."""

    name = "preble_e2"

    def __init__(self) -> None:
        self._window: deque[tuple[float, str, float]] = deque()  # time of placement, replica, prefill in ms
        self._prefill_ms: dict[str, float] = {}
        self._began_s: dict[int, float] = {}  # first tokens of answers that have not ended
        self._answers_ms: deque[float] = deque(maxlen=ANSWERS)
        self._answer_ms = 0.0

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Exploit if most of the prompt is held, else explore."""
        self._slide(self.sight.now_s)
        longest = max(c.cached_tokens for c in candidates)
        if longest > self.sight.turn.prompt_tokens - longest:
            chosen = min((c for c in candidates if c.cached_tokens == longest), key=self._load_ms)
        else:
            chosen = min(candidates, key=lambda c: self._load_ms(c) + c.evicted_ms + c.uncached_ms)
        self._window.append((self.sight.now_s, chosen.id, chosen.uncached_ms))
        self._prefill_ms[chosen.id] = self._prefill_ms.get(chosen.id, 0.0) + chosen.uncached_ms
        return PolicyDecision(chosen.id, tied=False)

    def first_token(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Note the time at which the answer begins."""
        self._began_s[turn.number] = now_s

    def on_ended(self, turn: SimRequest, replica: str, now_s: float) -> None:
        """Learn the time of an answer."""
        began_s = self._began_s.pop(turn.number, None)
        if began_s is not None:
            self._answers_ms.append((now_s - began_s) * 1e3)
            self._answer_ms = median(self._answers_ms)

    def _load_ms(self, candidate: Candidate) -> float:
        return self._prefill_ms.get(candidate.id, 0.0) + candidate.in_flight * self._answer_ms

    def _slide(self, now_s: float) -> None:
        window = self._window
        while window and window[0][0] < now_s - WINDOW_S:
            _, replica, prefill_ms = window.popleft()
            self._prefill_ms[replica] -= prefill_ms
