"""kubeai_chwbl: KubeAI's PrefixHash, consistent hashing with bounded loads by the first characters of a prompt.

    key    = XXH64 of the first 100 characters of the first user message (after the adapter's name)
    ring   = 256 points a replica, XXH64 of its name and the number of the point
    chosen = from the key's place on, the first replica with load + 1 <= 1.25 * (all loads + 1) / replicas
             (any while no request runs); if there is no such replica, the first

Conversations with the same first 100 characters have one key, for any text after them. The rest of a prompt does not
count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from xxhash import xxh64_intdigest

from loadtest.simulate.engine.workload import SimRequest
from loadtest.simulate.policies.base import SimPolicy
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

PREFIX_CHARS = 100
POINTS = 256
LOAD_FACTOR = 1.25
PLACES_MAX = 65_536


class PrefixHash(SimPolicy):
    """Policy with another ring: its hash and its bound differ from ours."""

    name = "kubeai_chwbl"
    cache_aware = False

    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()
        self._ring: list[tuple[int, str]] = []
        self._hashes: dict[tuple[int, int], int] = {}

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the first replica under the bound."""
        loads = {c.id: c.in_flight for c in candidates}
        if self._known != loads.keys():
            self._known = frozenset(loads)
            points = ((xxh64_intdigest(f"{name}{point}".encode()), name) for name in loads for point in range(POINTS))
            self._ring = sorted(points)
        total = sum(loads.values())
        bound = LOAD_FACTOR * (total + 1) / len(loads)
        start = bisect_left(self._ring, (self._hash(self.sight.turn), ""))
        order = dict.fromkeys(name for _, name in islice(self._ring * 2, start, start + len(self._ring)))
        first = next(iter(order))
        chosen = first if not total else next((name for name in order if loads[name] + 1 <= bound), first)
        return PolicyDecision(chosen, tied=False)

    def _hash(self, turn: SimRequest) -> int:
        """Return a hash of the first characters. The first block key stands for them, because prompts with the same key
        share these characters, and the key costs less than the text."""
        chars = min(PREFIX_CHARS, turn.first_user_bytes)
        known = (turn.chain[0] if turn.chain else turn.end_key, chars)
        found = self._hashes.get(known)
        if found is None:
            if len(self._hashes) >= PLACES_MAX:
                self._hashes.clear()
            found = self._hashes[known] = xxh64_intdigest(turn.text()[:chars].encode())
        return found
