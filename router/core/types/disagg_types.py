"""Types of disaggregated prefill: roles of replicas, and the prefill stage of a request.

In disaggregated prefill one engine prefills the prompt and sends its KV blocks to another engine, which decodes. The
two engines connect through a KV connector (`KvConnector`).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Role(StrEnum):
    """Stages that a replica takes, from its label `warmroute.io/role` or `llm-d.ai/role`."""

    BOTH = "both"  # whole requests, and either stage
    PREFILL = "prefill"  # prefill stages; whole requests only if no other replica is available
    DECODE = "decode"  # decode stages, and whole requests


class KvConnector(StrEnum):
    """KV connector: the method by which a decoding engine obtains the blocks of a prefilling one."""

    NIXL = "nixl"  # vLLM's NixlConnector: the answer of the prefill stage names the blocks, so it must come first
    MOONCAKE = "mooncake"  # vLLM's MooncakeConnector: both stages at once, under one transfer id
    OFFLOADING = "offloading"  # vLLM's OffloadingConnector with a p2p tier: both stages at once, under one request id
    SGLANG = "sglang"  # SGLang's bootstrap server: both stages at once, under one `bootstrap_room`


class PairState(StrEnum):
    """State of two replicas as a pair for disaggregated prefill."""

    WARM = "warm"  # takes requests
    NEW = "new"  # takes no requests before a first transfer has succeeded
    COOLDOWN = "resting"  # takes no requests for now, because a transfer failed


class PairStatus(Struct, gc=False):
    """A pair of replicas, for status pages. Numbers are counts since they form a pair."""

    prefill: str
    decode: str
    state: PairState
    rests_s: float  # seconds until the pair is tried again; 0 if it is not in cooldown
    sent: int  # requests placed on the pair
    prefills_failed: int  # requests with a failed prefill stage
    broken: int  # requests with blocks that did not arrive, by all evidence


class PrefillStage(Struct, gc=False):
    """The prefill stage of a request that another replica decodes. Times are milliseconds."""

    replica: str
    handshake: KvConnector
    # `host:port` at which the decoding engine requests the blocks. With NIXL the answer of the prefill stage names the
    # host, and this is the comma-separated list of the pod's addresses.
    address: str
    cached_tokens: int  # part of the prompt estimated as cached at this replica
    pending_ms: float  # time until its prefill begins there
    uncached_ms: float  # prefill time of the uncached part
    transfer_ms: float  # time until the blocks are at the decoding replica, once they are computed
    lease: int = 0  # id of the lease that is open there
    found_tokens: int | None = None  # cached part of the prompt as the engine reported it after the stage ended
    alone: bool = False  # the prefill stage failed, and the decoding replica computed the prompt itself

    @property
    def concurrent(self) -> bool:
        """True if both stages begin at once, and the engines wait for each other."""
        return self.handshake is not KvConnector.NIXL
