"""A router core with replicas that answer when told to, and a clock that moves when told to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from router.core.dialects import OPENAI
from router.core.fleet.lease import Lease
from router.core.insights.breakdown import Explainer
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.prompts.block_keys import chain_of, ring_key
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.requests import RequestSpec
from tests.core.ready import ready

MODEL = "m"
CHAT = "/v1/chat/completions"


def words(seed: int, tokens: int) -> str:
    """Text of that many tokens, at four bytes a token; the same for the same seed, and a prefix of any longer one."""
    return "".join(f"{Random(f'{seed}:{n}').randrange(1_000):03d} " for n in range(tokens))


def chat(*turns: str, system: str = "", **fields: Any) -> RequestSpec:
    """A streaming conversation of alternating user and assistant messages."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return OPENAI.parse(CHAT, json.dumps({"model": MODEL, "stream": True, "messages": messages, **fields}).encode())


class World:
    """All replicas are fit and serve MODEL."""

    def __init__(
        self,
        ids: Sequence[str] = "abcd",
        policy: str = "warm",
        *,
        blocks_max: int = 4_096,
        explainer: Explainer | None = None,
    ) -> None:
        self.router = Router(
            POLICIES[policy](),
            index_bytes_max=1 << 26,
            remembered_prompts_max=1_000,
            default_cache_blocks=blocks_max,
            explainer=explainer,
        )
        self.now_s = 1_000.0
        ready(self.router, ids, MODEL)

    def place(self, ask: RequestSpec, *, session: str | None = None, model: str | None = MODEL, **how: Any) -> Lease:
        """Route one request now."""
        chain = chain_of(ask, model or "")
        key = ring_key(ask, chain, session, b"body")
        known = {name: how.pop(name) for name in ("tokens", "body_tokens", "sighting", "conversation") if name in how}
        return self.router.route(PlacementRequest(ask, model, chain, key, **known), self.now_s, **how)

    def first_token(self, lease: Lease, *, after_s: float = 0.0) -> None:
        """The first token arrives."""
        self.now_s += after_s
        self.router.first_token(lease, self.now_s)

    def finish(
        self, lease: Lease, ending: EndReason = EndReason.OK, usage: Usage | None = None, *, events: int = 0
    ) -> None:
        """The lease ends now."""
        self.router.finish(lease, Outcome(ending, usage, events), self.now_s)

    def serve(
        self, ask: RequestSpec, *, output_tokens: int = 10, cached_tokens: int | None = None, **how: Any
    ) -> Lease:
        """Place, prefill as modelled, and end well; the engine counts four bytes a token."""
        lease = self.place(ask, **how)
        self.first_token(lease, after_s=lease.prefill_ms / 1e3)
        prompt_tokens = len(ask.prompt.text) // 4 if ask.prompt else 1
        self.finish(lease, usage=Usage(prompt_tokens, output_tokens, cached_tokens))
        return lease

    def depth(self, ask: RequestSpec, id_: str) -> int:
        """Leading blocks of a prompt that a replica is believed to hold."""
        chain = chain_of(ask, MODEL)
        assert chain is not None
        return self.router.index.match(chain.keys).get(id_, 0)

    def in_use(self) -> list[tuple[int, int, float]]:
        """Leases, what they keep in the KV pool (blocks and tokens) and pending work of every replica."""
        members = self.router.fleet.members.values()
        return [
            (len(m.leases), m.work.kv.blocks + m.work.kv.own_tokens, m.queue.pending_ms(self.now_s)) for m in members
        ]
