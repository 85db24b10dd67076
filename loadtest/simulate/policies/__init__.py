"""Rows of the race by name: our policies, and rules of other routers restated from their formulas.

To add one: a file here with a Policy (see router/core/placement/policies/policy.py), or with a SimPolicy, which gets
more input (simulate/engine/placer.py), and a line in ROWS that names its source and defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loadtest.simulate.policies import aibrix, cache_aware
from loadtest.simulate.policies.bounds.clairvoyant import Clairvoyant
from loadtest.simulate.policies.bounds.shared_cache import SharedCache
from loadtest.simulate.policies.cold_pool import ColdPool
from loadtest.simulate.policies.dualmap import DualMap
from loadtest.simulate.policies.dynamo import Dynamo
from loadtest.simulate.policies.hash_unbounded import HashUnbounded
from loadtest.simulate.policies.infera import Infera
from loadtest.simulate.policies.kubeai import PrefixHash
from loadtest.simulate.policies.lbgr import Lbgr
from loadtest.simulate.policies.llmd_affinity import LlmdAffinity
from loadtest.simulate.policies.llmd_weights import LlmdWeights, score_capped_share, score_range
from loadtest.simulate.policies.lmetric import LMetric
from loadtest.simulate.policies.lpwl import Lpwl
from loadtest.simulate.policies.mooncake_conductor import MooncakeConductor
from loadtest.simulate.policies.preble import ExploitExplore
from loadtest.simulate.policies.random_choice import AtRandom
from loadtest.simulate.policies.ray_serve import PrefixAffinity
from loadtest.simulate.policies.remaining_work import WorkClasses
from loadtest.simulate.policies.sticky_override import StickyOverride
from router.core.placement.policies import POLICIES, Policy


@dataclass(frozen=True, slots=True)
class RowSource:
    """The source of a row; `make` gives a fresh policy."""

    make: Callable[[], Policy]
    source: str
    """Origin and version of the rule, and its defaults."""
    bound: bool = False
    """True if the row uses knowledge or means that no router can have. Such a row is not a rival."""
    foreknowledge: bool = False
    """True if the router gets each answer's length before the answer begins."""

    def __str__(self) -> str:
        return f"(bound) {self.source}" if self.bound else self.source


_OURS = {name: RowSource(make, "warmroute's own") for name, make in POLICIES.items()}
_SCORED = {
    "llmd_weights": RowSource(LlmdWeights, "llm-d-router chart 2026: prefix share 3, free KV 2, queue 2; random ties"),
    "llmd_weights_2025": RowSource(
        lambda: LlmdWeights("llmd_weights_2025", score_range), "llm-d 2025-09, precise: match by range 3, KV 2, queue 2"
    ),
    "llmd_default": RowSource(
        lambda: LlmdWeights("llmd_default", score_capped_share, (1, 1, 1)),
        "llm-d 2025-09, estimated: 1:1:1, 256 blocks of 64 characters seen",
    ),
    "llmd_affinity": RowSource(
        LlmdAffinity, "llm-d-router 2026 guides: affinity 0.80, penalty 18,000 ms at 15,928 tok/s, load of 4,194,304"
    ),
    "dynamo": RowSource(Dynamo, "Dynamo 1.4-1.6: prefill load scale 1.0, overlap credit 1.0, temperature 0"),
    "lmetric": RowSource(LMetric, "LMetric, arXiv 2603.15202: prefill tokens x batch size, idle scores 0"),
    "lmetric_plus_one": RowSource(
        lambda: LMetric("lmetric_plus_one", 1), "LMetric as in llm-d-router #2351: the request is in its batch"
    ),
    "lpwl": RowSource(Lpwl, "LPWL, gahow/agentic-kvc 2026-05: no parameters"),
    "mooncake_conductor": RowSource(
        MooncakeConductor, "Mooncake, FAST '25, algorithm 1: the calibration's own prefill times, no rejection"
    ),
    "remaining_work": RowSource(
        lambda: WorkClasses("remaining_work", remaining=True),
        "llm-d-router #2559 (2026-08) without pulls: half of the replicas for up to 8,192 uncached tokens",
    ),
    "total_length": RowSource(
        lambda: WorkClasses("total_length", remaining=False),
        "llm-d's context-length-aware, what #2559 is held against: the same by length of the prompt",
    ),
    "dynamo_cold_pool": RowSource(
        ColdPool, "Dynamo draft #12806 (2026-08) as far as stated: 65,536 uncached tokens, a quarter of the replicas"
    ),
    "infera": RowSource(Infera, "AMD Infera 5890f7f (2026-08): overlap weight 1.0, recent misses x 0.97 a pick"),
    "sticky_override": RowSource(
        StickyOverride, "gahow/agentic-kvc 012d73f596 (2026-05): sessions stay below 2 x the mean of open prompt tokens"
    ),
    "dualmap": RowSource(
        DualMap, "DualMap (ICLR 2026) as far as stated: first 1,024 tokens on two rings, TTFT of 5 s at 15,928 tok/s"
    ),
    "lbgr": RowSource(Lbgr, "LBGR, arXiv 2601.18999 and code: 1 ms a character, 31/32 every 20 ms, forgetting 0.95"),
}
_BOUNDS = {
    "foreknowledge": RowSource(
        POLICIES["warm"], "warm, given the length of each answer before it begins", bound=True, foreknowledge=True
    ),
    "shared_cache": RowSource(
        SharedCache, "one infinite cache for all replicas, KV room without limit, true waits", bound=True
    ),
    "clairvoyant": RowSource(
        Clairvoyant, "a mark, not a proof: greedy, by the engines' true state and all that will be asked", bound=True
    ),
}
ROWS: dict[str, RowSource] = _OURS | _SCORED | _BOUNDS

# Thresholds, hashes, prompt trees
ROWS["random"] = RowSource(AtRandom, "a replica at random")
ROWS["consistent_hash_unbounded"] = RowSource(HashUnbounded, "our ring, 160 points a replica, without a load bound")
ROWS["sglang_cache_aware"] = RowSource(
    lambda: cache_aware.CacheAware("sglang_cache_aware", cache_aware.SGLANG),
    "sglang-router 0.3.2 in HTTP mode: threshold 0.3, imbalance 64 and 1.5, eviction 60 s, 67,108,864 characters each",
)
ROWS["vllm_cache_aware"] = RowSource(
    lambda: cache_aware.CacheAware("vllm_cache_aware", cache_aware.VLLM),
    "vllm-router 0.1.17 with token ids: threshold 0.3, imbalance 64 and 1.5, eviction 120 s, 33,554,432 each",
)
ROWS["vllm_cache_aware_no_tokens"] = RowSource(
    lambda: cache_aware.CacheAware("vllm_cache_aware_no_tokens", cache_aware.VLLM_WITHOUT_TOKENS),
    "vllm-router 0.1.17 before engines that do not tokenise for it (`missing_tokens`): the least loaded",
)
ROWS["smg_cache_aware"] = RowSource(
    lambda: cache_aware.ShepherdCacheAware("smg_cache_aware", cache_aware.SMG),
    "SMG 1.13.0 in HTTP mode: threshold 0.3, spill 64 and 1.5, eviction 60 s, 67,108,864 characters together",
)
ROWS["aibrix_prefix"] = RowSource(
    lambda: aibrix.PrefixCache("aibrix_prefix", aibrix.CODE),
    "AIBrix 0.7 rc by its code: imbalance 8, mean + 1 sigma, 200,000 blocks of 4 characters, 20 min",
)
ROWS["aibrix_prefix_readme"] = RowSource(
    lambda: aibrix.PrefixCache("aibrix_prefix_readme", aibrix.README),
    "AIBrix 0.7 rc by its README: imbalance 16, mean + 2 sigma, 200,000 blocks of 128 characters, 20 min",
)
ROWS["kubeai_chwbl"] = RowSource(
    PrefixHash, "KubeAI PrefixHash: XXH64 of 100 characters of the first user message, 256 points, 125 % of the mean"
)
ROWS["ray_prefix"] = RowSource(
    PrefixAffinity, "Ray Serve LLM PrefixCacheAffinityRouter: match 0.1, imbalance infinite, no eviction"
)
ROWS["preble_e2"] = RowSource(
    ExploitExplore, "Preble (ICLR 2025) as far as stated: exploit over half, else load of 3 min + eviction + prefill"
)
