"""Engines that send each other what is in their CPU memory, as vLLM's p2p tier does when the router orders it.

A request names a source. Behind what its engine has on the GPU and in its own CPU memory, as many blocks in a row as
the source's CPU memory has come from there: they get room in the engine's CPU memory, are sent, and are loaded from
there. What the source lacks is computed. Its GPU has no part in it, and what only its GPU has does not come. (vLLM,
docs/features/kv_offloading_usage.md, and v1/kv_offload/tiering/p2p/manager.py.)

Each engine has one link out and one in; transfers on either follow each other, each with a floor for the questions back
and forth and so much a token. A source that is gone before it has sent all sends nothing, and its blocks are computed.
At an address where no engine of the fleet is, nobody answers: the request waits until its client leaves, as was seen of
vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.engine.host_tier import HostTier

HANG_S = 86_400.0  # longer than any client waits


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What a transfer takes: 35 ms and 8.6 us a token.

    A prefill of 60 us a token takes that much more by the ratios that llm-d publishes for gpt-oss-120b on H200 with
    RDMA, pull against recompute: -55.8 % at 2,000 tokens, -77 at 8,000, -83 at 16,000: 580 tokens' prefill, and a
    seventh of a token's for each."""

    floor_s: float = 35e-3
    token_s: float = 8.6e-6

    def transfer_s(self, tokens: int) -> float:
        """Seconds that a link is busy with so many tokens."""
        return self.floor_s + self.token_s * tokens


class _Engine:
    """One engine as its peers see it. Times are moments in simulated seconds."""

    __slots__ = ("in_free_s", "out_free_s", "tier")

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.in_free_s = self.out_free_s = 0.0


class Peers:
    """All engines of a fleet, by name."""

    def __init__(self, limits: PeerLimits) -> None:
        self.limits = limits
        self.sent_tokens = self.transfers = self.lacked = 0  # since the start; `lacked`: orders of which nothing came
        self._engines: dict[str, _Engine] = {}

    def join(self, name: str, tier: HostTier) -> None:
        """An engine is there; another process under the same name takes the place of the one before."""
        self._engines[name] = _Engine(tier)

    def leave(self, name: str) -> None:
        """An engine is gone."""
        self._engines.pop(name, None)

    def tier_of(self, name: str) -> HostTier | None:
        """The CPU memory of the engine that has this name now."""
        engine = self._engines.get(name)
        return engine.tier if engine is not None else None

    def send(self, source: str, to: str, keys: Sequence[int], tokens: int, now_s: float) -> float:
        """Begin to send blocks that the source has; returns when they will have come. They stay there until `sent`."""
        out, into = self._engines[source], self._engines[to]
        out.tier.hold(keys)
        out.tier.touch(keys)
        done_s = max(now_s, out.out_free_s, into.in_free_s) + self.limits.transfer_s(tokens)
        out.out_free_s = into.in_free_s = done_s
        self.transfers += 1
        self.sent_tokens += tokens
        return done_s

    def sent(self, source: str, tier: HostTier, keys: Sequence[int]) -> bool:
        """A transfer from what was the source's tier is over, or nobody wants it any more; whether the source is still
        there."""
        tier.loaded(keys)
        return self.tier_of(source) is tier
