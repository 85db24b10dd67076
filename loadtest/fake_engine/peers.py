"""P2P transfers of KV between the CPU memory of engines, as in vLLM's p2p tier on request of the router.

A request names a source. Its engine first uses its own GPU and CPU memory. Then it fetches as many consecutive further
blocks as the source's CPU memory has. They get space in the engine's CPU memory, are sent, and are loaded from there.
Blocks that the source lacks are computed. The source's GPU is not involved, and blocks that only its GPU has are not
sent. (vLLM, docs/features/kv_offloading_usage.md, and v1/kv_offload/tiering/p2p/manager.py.)

Each engine has one outgoing and one incoming link. Transfers on a link are sequential. Each takes a floor for the
protocol round trips plus a time per token. A source that ends before the whole transfer has sent no block, and its
blocks are computed. An address without an engine of the fleet never responds: the request waits until its client
disconnects, as observed on vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.fake_engine.host_tier import HostTier

HANG_S = 86_400.0  # longer than any client waits


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Cost of a transfer: 35 ms and 8.6 us a token.

    Both follow from the ratios that llm-d publishes for gpt-oss-120b on H200 with RDMA, pull against recompute: -55.8 %
    at 2,000 tokens, -77 at 8,000, -83 at 16,000. With a prefill of 60 us a token, the floor is the prefill time of 580
    tokens. A token takes a seventh of its prefill time.
    """

    floor_s: float = 35e-3
    token_s: float = 8.6e-6

    def transfer_s(self, tokens: int) -> float:
        """Return the seconds for which a link is busy with `tokens` tokens."""
        return self.floor_s + self.token_s * tokens


class _Engine:
    """One engine as its peers see it. Times are in simulated seconds."""

    __slots__ = ("in_free_s", "out_free_s", "tier")

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.in_free_s = self.out_free_s = 0.0


class Peers:
    """All engines of a fleet, by name."""

    def __init__(self, limits: PeerLimits) -> None:
        self.limits = limits
        self.sent_tokens = self.transfers = self.lacked = 0  # since the start; `lacked`: requests without a transfer
        self._engines: dict[str, _Engine] = {}

    def join(self, name: str, tier: HostTier) -> None:
        """Add an engine; a new process with the same name replaces the old one."""
        self._engines[name] = _Engine(tier)

    def leave(self, name: str) -> None:
        """Remove an engine that has ended."""
        self._engines.pop(name, None)

    def tier_of(self, name: str) -> HostTier | None:
        """Return the CPU memory of the engine that has this name now."""
        engine = self._engines.get(name)
        return engine.tier if engine is not None else None

    def send(self, source: str, to: str, keys: Sequence[int], tokens: int, now_s: float) -> float:
        """Start to send blocks that the source has. Returns the time of their arrival; the source keeps them until
        `sent`."""
        out, into = self._engines[source], self._engines[to]
        out.tier.hold(keys)
        out.tier.touch(keys)
        done_s = max(now_s, out.out_free_s, into.in_free_s) + self.limits.transfer_s(tokens)
        out.out_free_s = into.in_free_s = done_s
        self.transfers += 1
        self.sent_tokens += tokens
        return done_s

    def end_transfer(self, source: str, tier: HostTier, keys: Sequence[int]) -> bool:
        """End a transfer that is finished or no longer needed. `tier`: the source's tier at its start.

        Returns True if the source is still the same process.
        """
        tier.release_loaded(keys)
        return self.tier_of(source) is tier
