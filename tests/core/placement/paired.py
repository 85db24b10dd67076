"""A router in front of replicas that may prefill for each other, all of them warm pairs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from router.core.disagg.pair_disaggregator import PairDisaggregator
from router.core.estimators.decode_step import StepModel
from router.core.estimators.prefill import PrefillModel
from router.core.estimators.tier_load import LoadModel
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.prompts.block_keys import BLOCK_BYTES, Chain, chain
from router.core.types.disagg_types import KvConnector, PrefillStage, Role
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import Prompt, RequestSpec
from router.core.types.tiers import LEG
from tests.core.ready import router_of

TOKENS = 20_000
TRANSFER = LoadModel(50.0, 0.01)
APART = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}


@lru_cache(64)
def chain_of(seed: int, tokens: int = TOKENS) -> Chain:
    """The chain of a prompt of that length, four bytes a token; one seed's longer prompts continue its shorter ones."""
    text = array("Q", [seed * 1_000_000 + n for n in range(tokens // 2)]).tobytes()
    keys = chain(text, 7)
    return Chain(keys[: len(text) // BLOCK_BYTES], 7, hash((seed, tokens)) & (1 << 63) - 1, (), seed)


class PairedFleet:
    """Replicas by their roles, whose prefill takes 0.06 ms a token, and whose streams are slow to end."""

    def __init__(self, roles: Mapping[str, Role] = APART, *, pair: bool = True, **more: Any) -> None:
        self.now_s, self.roles = 100.0, dict(roles)
        self.router: Router = router_of(
            list(roles), load_guesses={LEG: TRANSFER}, disaggregation=PairDisaggregator, **more
        )
        self.discover()
        for name in roles:
            self.router.observations.observe_load(name, Load(kv_tokens_max=2_000_000, block_tokens=16))
        speeds = self.router.fleet.members[next(iter(roles))].speeds
        speeds.prefill.model, speeds.steps.model = PrefillModel(20.0, 0.06, 0.0), StepModel(20.0, 0.1, 5e-5)
        if pair:
            self.pair()

    def discover(self, *names: str, **revisions: str) -> None:
        """Discovery tells of all replicas, or of these, with their roles, and the revisions of some."""
        found = [Replica(name, role=self.roles[name], revision=revisions.get(name, "")) for name in names or self.roles]
        self.router.replace(found)
        for name in names or self.roles:
            self.router.fleet.observe_health(name, ok=True)
            self.router.observations.observe_models(name, [ServedModel("m")])

    def pair(self, handshake: KvConnector = KvConnector.NIXL) -> list[tuple[str, str]]:
        """Every replica shakes hands, and all pairs are warmed; returns those."""
        for name in self.roles:
            self.router.disaggregator.set_connector(name, handshake, f"{name}:8998")
        warmed = list[tuple[str, str]]()
        while pairs := self.router.disaggregator.pairs_to_warm(self.now_s):
            for pair in pairs:
                self.router.disaggregator.pair_warmed(*pair, ok=True, now_s=self.now_s)
                warmed.append(pair)
        return warmed

    def place(self, seed: int = 0, tokens: int = TOKENS, *, may_split: bool = True, **how: Any) -> Lease:
        """Route a streaming request now."""
        wanted = self.wanted(seed, tokens, stream=bool(how.pop("stream", True)), may_split=may_split)
        wanted.response_bypasses_router = bool(how.pop("unseen", False))
        return self.router.route(wanted, self.now_s, **how)

    def wanted(
        self, seed: int = 0, tokens: int = TOKENS, *, stream: bool = True, may_split: bool = True
    ) -> PlacementRequest:
        """A request."""
        prompt = Prompt(text=b"", first_user_end=0, skipped_bytes=4 * tokens)
        ask = RequestSpec("m", prompt, stream=stream)
        return PlacementRequest(ask, "m", chain_of(seed, tokens), f"key {seed}", may_split=may_split)

    def streams(self, *names: str, count: int = 4) -> list[Lease]:
        """Short prompts whose answers go on at these replicas."""
        leases = [self.place(1_000 + n, 40, only=name) for name in names for n in range(count)]
        for lease in leases:
            self.now_s += 0.01
            self.router.first_token(lease, self.now_s)
        return leases

    def split(self, seed: int = 0, tokens: int = TOKENS, **how: Any) -> tuple[Lease, PrefillStage]:
        """Route a request that goes in two legs."""
        lease = self.place(seed, tokens, **how)
        assert lease.receipt.leg is not None
        return lease, lease.receipt.leg

    def prefilled(self, lease: Lease, cached_tokens: int = 0, ending: EndReason = EndReason.OK) -> None:
        """The prefill leg ends now."""
        usage = Usage(lease.prompt_tokens, 1, cached_tokens) if ending is EndReason.OK else None
        self.router.finish_prefill(lease, Outcome(ending, usage), self.now_s)

    def finish(self, lease: Lease, ending: EndReason = EndReason.OK) -> None:
        """The answer ends now."""
        self.router.finish(lease, self.ok(lease) if ending is EndReason.OK else Outcome(ending), self.now_s)

    def ok(self, lease: Lease) -> Outcome:
        """A good end; the decoding engine counts all that came as cached, as by most handshakes."""
        return Outcome(EndReason.OK, Usage(lease.prompt_tokens, 100, lease.prompt_tokens - 1))

    def serve(self, seed: int = 0, tokens: int = TOKENS, *, transfer_s: float = 0.25, **how: Any) -> Lease:
        """A request from its placement to its end, in as many legs as it gets."""
        lease = self.place(seed, tokens, **how)
        if lease.receipt.leg is not None:
            self.now_s += lease.receipt.leg.uncached_ms / 1e3
            self.prefilled(lease, lease.receipt.leg.cached_tokens)
            self.now_s += transfer_s
        else:
            self.now_s += lease.prefill_ms / 1e3
        self.router.first_token(lease, self.now_s)
        self.now_s += 3.0
        self.finish(lease)
        return lease

    def depth(self, name: str, seed: int = 0, tokens: int = TOKENS) -> int:
        """Leading blocks of a prompt that a replica is believed to hold."""
        return self.router.index.match(chain_of(seed, tokens).keys).get(name, 0)

    def idle(self) -> bool:
        """Whether nothing is left of any lease: no lease, no work that waits, no stream, no room in a KV pool."""
        members = self.router.fleet.members.values()
        legs = self.router.disaggregator.pairs
        return not (legs.open or legs.decoders) and not any(
            m.leases
            or m.queue.count_waiting()
            or m.queue.computing
            or m.work.decoding
            or m.work.context_tokens
            or m.clock.streams
            or m.work.kv.own_tokens
            or m.work.kv.unshared_blocks
            or m.work.waiting_for_kv
            or m.work.awaiting_transfer
            or m.queue.pending_ms(self.now_s)
            for m in members
        )
