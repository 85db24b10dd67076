"""Types of disaggregated prefill: roles of replicas, and the prefill stage of a request.

In disaggregated prefill one engine prefills the prompt and sends its KV blocks to another engine, which decodes. The
two engines connect through a KV connector (`KvConnector`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct


class Role(StrEnum):
    """Stages that a replica takes, from its label `warmroute.io/role` or `llm-d.ai/role`."""

    BOTH = "both"  # whole requests, and either stage
    PREFILL = "prefill"  # prefill stages; whole requests only if no other replica is available
    DECODE = "decode"  # decode stages, and whole requests


class KvConnector(StrEnum):
    """KV connector: the method by which a decoding engine obtains the blocks of a prefilling one."""

    NIXL = "nixl"  # vLLM's NixlConnector: the answer of the prefill stage names the blocks
    MOONCAKE = "mooncake"  # vLLM's MooncakeConnector: one transfer id for both stages
    OFFLOADING = "offloading"  # vLLM's OffloadingConnector with a p2p tier: one request id for both stages
    SGLANG = "sglang"  # SGLang's bootstrap server: one `bootstrap_room` for both stages

    @property
    def traits(self) -> ConnectorTraits:
        """Properties of the connector."""
        return _TRAITS[self]


class Probe(StrEnum):
    """Check of the server that decoding engines contact."""

    NONE = "none"  # there is no such server
    ZMTP = "zmtp"  # a ZeroMQ greeting
    HTTP = "http"  # a page


@dataclass(frozen=True)
class ConnectorTraits:
    """Properties of a KV connector that decide how the router runs the two stages of a request."""

    concurrent: bool = True
    """Both stages begin at once, and the engines wait for each other. If false, the decode stage needs the answer of
    the prefill stage."""
    single_stage_engines: bool = False
    """An engine is started either to prefill or to decode, and answers requests with both stages with 400 (SGLang
    0.5.23, srt/managers/scheduler.py: "Disaggregated request received without bootstrap room id")."""
    answers_after_transfer: bool = False
    """The prefill stage is answered when the decoding engine has the blocks. If false, when they are computed."""
    reserves_until_sent: bool = False
    """The decoding engine reserves memory for requested blocks until they arrive, even if the request is aborted."""
    integer_ids: bool = False
    """Both stages have a signed integer of 64 bits in common. If false, a string."""
    probe: Probe = Probe.NONE
    probe_path: str = ""
    port: int = 0
    """Default port of the server that decoding engines contact."""
    has_p2p_server: bool = False
    """That server is the one of P2P KV transfers: discovery may name it, and each data-parallel rank has the next
    port."""


_TRAITS = {
    KvConnector.NIXL: ConnectorTraits(concurrent=False),
    # VLLM_MOONCAKE_BOOTSTRAP_PORT
    KvConnector.MOONCAKE: ConnectorTraits(reserves_until_sent=True, probe=Probe.HTTP, probe_path="/query", port=8998),
    # VLLM_P2P_SIDE_CHANNEL_PORT
    KvConnector.OFFLOADING: ConnectorTraits(probe=Probe.ZMTP, port=5710, has_p2p_server=True),
    # --disaggregation-bootstrap-port
    KvConnector.SGLANG: ConnectorTraits(
        single_stage_engines=True,
        answers_after_transfer=True,
        integer_ids=True,
        probe=Probe.HTTP,
        probe_path="/health",
        port=8998,
    ),
}


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
    connector: KvConnector
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
    def traits(self) -> ConnectorTraits:
        """Properties of the KV connector."""
        return _TRAITS[self.connector]
