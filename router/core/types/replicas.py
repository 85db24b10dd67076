"""Replicas, the models that they serve, and their load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from urllib.parse import urlsplit

from router.core.types.disagg_types import Role

RANK_MARK = "#dp"  # begins a URL's fragment, which no base URL has
REST_MAX_S = 300.0  # longest cooldown granted: a Retry-After by a clock that is wrong by years must not cost a replica


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine as discovery reports it; its id is stable across routers.

    `id` is the base URL without a trailing slash. If one server runs several data-parallel ranks, each with a cache of
    its own, every rank is a replica with the id `{base URL}#dp{rank}`.
    """

    id: str
    instance: str = ""  # the current engine; another one at the same address has an empty cache
    name: str = ""  # display name: `namespace/pod`
    node: str = ""  # the machine that it runs on
    events: str = ""  # address of its KV events, if discovery provides it: tcp://10.0.0.1:5557
    replay: str = ""  # address at which events are replayed, if discovery provides it; only with `events`
    peer: str = ""  # address for its peers' requests (vLLM's p2p tier), if discovery provides it: 10.0.0.1:5710
    role: Role = Role.BOTH  # stages of a request that it takes
    revision: str = ""  # rollout revision; only replicas of the same one form pairs; "": unknown
    ready: bool = True  # False: discovery excludes it from new requests; its cache still exists
    hosts: tuple[str, ...] = ()  # addresses of its pod, if discovery provides several

    @property
    def url(self) -> str:
        """Base URL to which a request's path is appended: that of the server, the same for all its ranks."""
        return self.id.partition(RANK_MARK)[0]

    @property
    def rank(self) -> int | None:
        """The data-parallel rank, counted from 0 within this server; None if the server has a single rank."""
        rank = self.id.partition(RANK_MARK)[2]
        return int(rank) if rank else None

    @property
    def only_prefills(self) -> bool:
        """True if it answers requests only if no other replica is available."""
        return self.role is Role.PREFILL

    @property
    def pod(self) -> str:
        """The pod's name; "" if discovery provides none."""
        return self.name.rpartition("/")[2]

    @property
    def namespace(self) -> str:
        """The pod's namespace; "" if discovery provides none."""
        return self.name.rpartition("/")[0]

    def select_rank(self, rank: int) -> Replica:
        """Return one rank of this server."""
        return replace(self, id=f"{self.url}{RANK_MARK}{rank}")

    def is_different_engine(self, before: Replica) -> bool:
        """True if this is another engine at the same address. Without both instances, no difference is assumed."""
        return bool(self.instance and before.instance and self.instance != before.instance)

    def merge_previous(self, before: Replica) -> Replica:
        """Return the same engine with its current values; a known instance is kept if the new one is unknown."""
        return self if self.instance or not before.instance else replace(self, instance=before.instance)


@lru_cache(4_096)
def address_of(id_: str) -> str:
    """Return `host:port` of the replica with this id; a URL without a port has its scheme's default."""
    where = urlsplit(id_)
    return where.netloc if where.port else f"{where.netloc}:{443 if where.scheme == 'https' else 80}"


def matches_address(id_: str, addresses: frozenset[str]) -> bool:
    """True if the replica with this id is at one of these addresses: `host:port`, or `host` for all its ports."""
    address = address_of(id_)
    return address in addresses or address.rpartition(":")[0] in addresses


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One row of an engine's `/v1/models`. `parent` is set for a LoRA adapter (vLLM, SGLang)."""

    name: str
    root: str | None = None
    parent: str | None = None
    max_model_len_tokens: int | None = None
    created: int = 0
    owned_by: str = ""
    row: bytes = field(default=b"", compare=False)  # the engine's own JSON; b"" for a row that is too long


class CapacitySource(StrEnum):
    """Origin of a KV capacity."""

    ENGINE = "engine"  # the engine's metrics state it in tokens
    PRODUCT = "product"  # number of blocks times the block size of its metrics
    EVENTS = "events"  # number of blocks times the block size of its KV events
    CONFIG = "config"  # setting routing.kv_tokens_max


class Sleep(StrEnum):
    """Sleep state of an engine: asleep or paused, it accepts requests and does not answer them."""

    AWAKE = "awake"
    PAUSED = "paused"  # the cache is kept (vLLM's level 0)
    ASLEEP = "asleep"  # the cache is gone (vLLM's levels 1 and 2)


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of an engine's `/metrics`; None if it does not publish one."""

    running: int | None = None
    waiting: int | None = None  # requests that wait for KV capacity; for any reason if `deferred` is None
    kv_usage: float | None = None  # 0..1, blocks in use by live requests
    kv_tokens_max: int | None = None  # capacity of the KV pool
    block_tokens: int | None = None  # the engine's own block (page) size
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cache_query_tokens_total: float | None = None
    cache_hit_tokens_total: float | None = None
    prefix_caching: bool | None = None  # False: the engine caches no prefixes
    started_s: float | None = None  # Unix time at which its process began, by the engine's clock
    # updated while tokens are computed, unlike other counters, which may count only finished answers
    computed_tokens_total: float | None = None
    # requests that wait for other reasons than KV capacity: a grammar, an adapter, remote blocks
    deferred: int | None = None
    kv_source: CapacitySource | None = None  # origin of `kv_tokens_max`
    kv_blocks: int | None = None  # blocks (pages) of the KV pool
    sleep: Sleep | None = None
