"""cache_aware of sglang-router, vllm-router and SMG for HTTP engines: a threshold on the match, a gate on load.

    share = characters of the prompt that are in the tree / all of its characters
    share >  threshold: a holder of the node at which the prompt leaves the tree, at any load
    share <= threshold: the least loaded
    gate: if load is too uneven, the least loaded, for any match

Load is the router's own count of requests in flight. The text is the contents of all messages, one after the other. In
both cases the prompt is then inserted into the tree as sent to the chosen replica.

The three differ today. sglang-router and vllm-router close the gate for all requests if the busiest replica is too far
ahead of the idlest. A node names one holder, its maker. Of equally loaded replicas the first in their list is taken.
SMG closes the gate for a chosen replica that is too far ahead of the mean, compares all holders of the node by load,
and draws among equals. Older documents and the comments of the source still describe `smallest tree` on a miss. These
versions do not do that: sglang-router 0.3.2 and vllm-router 0.1.17 send prompts without a common part, sent one by one,
all to one replica.

vllm-router 0.1.17 matches token ids. It has them if the client sends ids or if the engine answers `/tokenize`, as vLLM
does. For an engine without `/tokenize`, a request with text is counted as `missing_tokens` and goes to the least
loaded. `VLLM_WITHOUT_TOKENS` restates that as a threshold which no share exceeds. The time of the `/tokenize` request
is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.simulate.policies.base import SimPolicy, least_loaded, one_of_least_loaded
from loadtest.simulate.policies.prompt_tree import Node, PromptTree
from router.core.types.placements import Candidate, PlacementContext, PolicyDecision

BALANCE_ABS_REQUESTS, BALANCE_REL = 64, 1.5
"""Flags with the same defaults in all of them."""


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags that differ between the rows, with the defaults that `--help` of the installed versions gives."""

    cache_threshold: float = 0.3
    eviction_interval_s: float = 60.0
    tree_chars_max: int = 67_108_864
    tree_shared: bool = False
    """True if the limit is for all replicas together."""


SGLANG = Flags()
VLLM = Flags(eviction_interval_s=120.0, tree_chars_max=33_554_432)
VLLM_WITHOUT_TOKENS = Flags(cache_threshold=1.0)
SMG = Flags(tree_shared=True)
SWING_REQUESTS_MIN, SWING_DEVIATIONS = 4, 2


class CacheAware(SimPolicy):
    """The cache-aware policy of sglang-router and vllm-router."""

    def __init__(self, name: str, flags: Flags) -> None:
        self.name = name
        self._flags = flags
        self._tree = PromptTree()
        self._evict_s = flags.eviction_interval_s

    def choose(self, market: PlacementContext, candidates: Sequence[Candidate]) -> PolicyDecision:
        """Return the holder of the longest match, if the match is long enough and load is even."""
        sight, flags = self.sight, self._flags
        if sight.now_s >= self._evict_s:
            self._tree.evict(flags.tree_chars_max, together=flags.tree_shared)
            self._evict_s = sight.now_s + flags.eviction_interval_s
        keys = sight.turn.chain
        chosen = self._choose_if_uneven(candidates)
        if chosen is None:
            matched, node = self._tree.match(keys)
            share = matched / (sight.turn.prompt_tokens * BYTES_PER_TOKEN)
            chosen = self._choose_holder(node, candidates) if share > flags.cache_threshold else self._idle(candidates)
        self._tree.insert(keys, chosen.id)
        return PolicyDecision(chosen.id, tied=False)

    def _choose_if_uneven(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the replica that gets the request without a match while load is uneven, else None."""
        loads = [c.in_flight for c in candidates]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABS_REQUESTS and most > BALANCE_REL * least:
            return self._idle(candidates)
        return None

    def _idle(self, candidates: Sequence[Candidate]) -> Candidate:
        return least_loaded(candidates)

    def _choose_holder(self, node: Node, candidates: Sequence[Candidate]) -> Candidate:
        """Return the holder of a node, or the first candidate if the holder is no candidate."""
        holder = node.holder()
        return next((c for c in candidates if c.id == holder), candidates[0])


class ShepherdCacheAware(CacheAware):
    """The cache-aware policy of SMG."""

    def _choose_if_uneven(self, candidates: Sequence[Candidate]) -> Candidate | None:
        return None

    def _idle(self, candidates: Sequence[Candidate]) -> Candidate:
        return one_of_least_loaded(candidates, self.sight.turn)

    def _choose_holder(self, node: Node, candidates: Sequence[Candidate]) -> Candidate:
        """Return the least loaded holder, unless it is ahead of the mean by the ratio and by a margin.

        The margin is the absolute limit, but at most twice the standard deviation of a random count with this mean.
        That deviation term is at least SWING_REQUESTS_MIN.
        """
        holding = [c for c in candidates if c.id in node.holders]
        chosen = self._idle(holding or candidates)
        mean = sum(c.in_flight for c in candidates) / len(candidates)
        swing = max(float(SWING_REQUESTS_MIN), SWING_DEVIATIONS * sqrt(mean))
        margin = min(float(BALANCE_ABS_REQUESTS), swing)
        if chosen.in_flight > mean * BALANCE_REL and chosen.in_flight > mean + margin:
            return self._idle(candidates)
        return chosen
