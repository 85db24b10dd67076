"""A router in front of replicas of which events say what they hold, on the GPU and behind it."""

from __future__ import annotations

from array import array

from router.core.estimators.prefill import PrefillModel
from router.core.estimators.tier_load import LoadModel
from router.core.fleet.lease import Lease
from router.core.kv_events.batch_decoder import Removed, Stored
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.prompts.block_keys import Chain, token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, EndReason, Outcome, Usage
from router.core.types.replicas import Load
from router.core.types.requests import Prompt, RequestSpec
from router.core.types.tiers import CPU, PEER
from tests.core.ready import router_of

BLOCK, TOKENS = 16, 16_000
GUESS = LoadModel(floor_ms=10.0, per_token_ms=0.01)
PULL_GUESS = LoadModel(floor_ms=30.0, per_token_ms=0.01)
HASHES = list(range(1, TOKENS // BLOCK + 1))


def prompt_of(seed: int = 0, more: int = 10) -> TokenPrompt:
    """A prompt of 1,000 blocks and so many tokens more; no two seeds share any."""
    ids = array("I", range(seed, seed + TOKENS + more)).tobytes()
    return TokenPrompt(ids, "", b"", {BLOCK: token_chain(ids, BLOCK, token_root("", b"", BLOCK))})


class TieredFleet:
    """Replicas `a` and `b`, or those of other names, of which events say what they hold."""

    def __init__(self, names: str = "ab", **more: object) -> None:
        self.now_s = 100.0
        self.router: Router = router_of(names, load_guesses={CPU: GUESS, PEER: PULL_GUESS}, **more)
        for name in names:
            self.router.knowledge.set_untokenizable(name, "")
            self.router.knowledge.grade(name, Confidence.EXACT, "joined", 0.0)
            self.router.observations.observe_load(name, Load(kv_tokens_max=200_000, block_tokens=BLOCK))
        speeds = self.router.fleet.members[names[0]].speeds
        speeds.prefill.model = PrefillModel(20.0, 0.05, 0.0)

    def says(self, name: str, *mediums: str, blocks: int = len(HASHES), seed: int = 0) -> None:
        """The replica has the first blocks of a prompt there."""
        hashes = [each + 10_000 * seed for each in HASHES[:blocks]]
        for medium in mediums:
            ids = prompt_of(seed).ids[: 4 * BLOCK * blocks]
            event = Stored(hashes, None, ids, BLOCK, "", b"", None, medium, 0, prefix=True)
            self.router.knowledge.apply(name, event, self.now_s)

    def evicts(self, name: str, *, seed: int = 0) -> None:
        """Nothing of the prompt is on the GPU any more."""
        self.router.knowledge.apply(name, Removed([each + 10_000 * seed for each in HASHES], "GPU", 0), self.now_s)

    def place(self, *, seed: int = 0, more: int = 10, **how: object) -> Lease:
        """Route a request for a prompt now."""
        ask = RequestSpec("m", Prompt(text=b"", first_user_end=0, skipped_bytes=4 * (TOKENS + more)), stream=True)
        wanted = PlacementRequest(ask, "m", Chain([], 0, seed + 1, (), 0), "key", prompt_of(seed, more))
        return self.router.route(wanted, self.now_s, **how)  # type: ignore[arg-type]  # names of its parameters

    def answers(self, lease: Lease, took_s: float, cached_tokens: int) -> None:
        """The first token comes after so long, and then the end."""
        self.now_s = lease.placed_s + took_s
        self.router.first_token(lease, self.now_s)
        self.finish(lease, cached_tokens)

    def finish(self, lease: Lease, cached_tokens: int) -> None:
        """The answer ends well."""
        self.router.finish(lease, Outcome(EndReason.OK, Usage(lease.prompt_tokens, 1, cached_tokens)), self.now_s)
