"""Prefill apart from decode: what replicas do, and the prefill leg of a request, as facts that nobody changes.

A request in two legs is prefilled by one engine, which sends the prompt's KV blocks to another one, and decoded there.
How the two engines find each other is their handshake.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Role(StrEnum):
    """Which legs a replica takes, as its label `warmroute.io/role` or `llm-d.ai/role` says."""

    BOTH = "both"  # whole requests, and either leg
    PREFILL = "prefill"  # prefill legs; whole requests only where nobody else is there
    DECODE = "decode"  # decode legs, and whole requests


class Handshake(StrEnum):
    """How a decoding engine comes by the blocks of a prefilling one."""

    NIXL = "nixl"  # vLLM's NixlConnector: the prefill leg's answer names the blocks, so that it is awaited first
    MOONCAKE = "mooncake"  # vLLM's MooncakeConnector: both legs at once, under one transfer id
    OFFLOADING = "offloading"  # vLLM's OffloadingConnector with a p2p tier: both legs at once, under one request id
    SGLANG = "sglang"  # SGLang's bootstrap server: both legs at once, in one room


class PairState(StrEnum):
    """Whether two replicas take requests in two legs."""

    WARM = "warm"  # requests go there
    NEW = "new"  # no request goes there before the two have handed a prompt over
    RESTING = "resting"  # no request goes there for now, since the two failed to hand a prompt over


class PairSeen(Struct, gc=False):
    """Two replicas that pair, for pages. Numbers are counts since they do."""

    prefill: str
    decode: str
    state: PairState
    rests_s: float  # seconds until they are tried again; 0 where they do not rest
    sent: int  # requests in two legs
    prefills_failed: int  # requests whose prefill leg failed
    broken: int  # requests whose blocks did not come, by all that is known


class PrefillLeg(Struct, gc=False):
    """The replica that prefills a request which another one decodes. Times are milliseconds."""

    replica: str
    handshake: Handshake
    # `host:port` at which the decoding engine asks there; for NIXL, whose answer says where, addresses of its pod.
    address: str
    cached_tokens: int  # part of the prompt that this replica is believed to hold
    pending_ms: float  # time until its prefill begins there
    uncached_ms: float  # prefill time of what it does not hold
    transfer_ms: float  # time until the blocks are at the decoding replica, once they are computed
    lease: int = 0  # id of the lease that is open there
    found_tokens: int | None = None  # part of the prompt that it found cached, once its leg has ended and it has told
    alone: bool = False  # nothing came of it: the decoding replica has computed the prompt, too
