"""Replicas, the models that they serve, and their load, as facts that nobody changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from urllib.parse import urlsplit

from router.core.facts.legs import Role

RANK_MARK = "#dp"  # begins a URL's fragment, which no base URL has
REST_MAX_S = 300.0  # longest rest granted: a Retry-After by a clock that is wrong by years must not cost a replica


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine as discovery reports it; its id is stable across routers.

    `id` is the base URL without a trailing slash. Where one server runs several data-parallel ranks, each with a
    cache of its own, every rank is a replica with the id `{base URL}#dp{rank}`.
    """

    id: str
    instance: str = ""  # the engine that is there now; another one at the same address has an empty cache
    name: str = ""  # name for people: `namespace/pod`
    node: str = ""  # the machine that it runs on
    events: str = ""  # address of its KV events, if discovery knows: tcp://10.0.0.1:5557
    replay: str = ""  # address at which events are replayed, if discovery knows; only with `events`
    peer: str = ""  # where it takes orders of its peers (vLLM's p2p tier), if discovery knows: 10.0.0.1:5710
    role: Role = Role.BOTH  # which legs of a request it takes
    revision: str = ""  # of a rollout, whose replicas pair only among themselves; "": none is known
    ready: bool = True  # False: discovery says to send nothing new there; its cache is still held
    hosts: tuple[str, ...] = ()  # addresses of its pod, where discovery knows several

    @property
    def url(self) -> str:
        """Base URL to which a request's path is appended: that of the server, the same for all its ranks."""
        return self.id.partition(RANK_MARK)[0]

    @property
    def rank(self) -> int | None:
        """The data-parallel rank, counted from 0 within this server; None where it has only one."""
        rank = self.id.partition(RANK_MARK)[2]
        return int(rank) if rank else None

    @property
    def pod(self) -> str:
        """The pod's name; "" where discovery knows none."""
        return self.name.rpartition("/")[2]

    @property
    def namespace(self) -> str:
        """The pod's namespace; "" where discovery knows none."""
        return self.name.rpartition("/")[0]

    def of_rank(self, rank: int) -> Replica:
        """One rank of this server."""
        return replace(self, id=f"{self.url}{RANK_MARK}{rank}")

    def is_another(self, before: Replica) -> bool:
        """Whether this is another engine at the same address; where one of the two is not known, nothing says so."""
        return bool(self.instance and before.instance and self.instance != before.instance)

    def after(self, before: Replica) -> Replica:
        """The same engine, as far as known, with the facts of today: an instance that was known still is."""
        return self if self.instance or not before.instance else replace(self, instance=before.instance)


@lru_cache(4_096)
def address_of(id_: str) -> str:
    """`host:port` of the replica with this id; the port is its scheme's where the URL has none."""
    where = urlsplit(id_)
    return where.netloc if where.port else f"{where.netloc}:{443 if where.scheme == 'https' else 80}"


def is_among(id_: str, addresses: frozenset[str]) -> bool:
    """Whether the replica with this id is at one of these addresses: `host:port`, or `host` for all its ports."""
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
    row: bytes = field(default=b"", compare=False)  # as the engine wrote it, JSON; b"" for one that is too long


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
    """An engine's `/metrics`, as numbers; None if it does not state one."""

    running: int | None = None
    waiting: int | None = None  # requests that wait for room; for anything if `deferred` is None
    kv_usage: float | None = None  # 0..1, blocks in use by live requests
    kv_tokens_max: int | None = None  # capacity of the KV pool
    block_tokens: int | None = None  # the engine's own block (page) size
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cache_query_tokens_total: float | None = None
    cache_hit_tokens_total: float | None = None
    prefix_caching: bool | None = None  # False: nothing is ever held
    started_s: float | None = None  # Unix time at which its process began, by the engine's clock
    computed_tokens_total: float | None = None  # counted as they are computed, where others count answers that ended
    deferred: int | None = None  # requests that wait for something else than room: a grammar, an adapter, remote blocks
    kv_source: CapacitySource | None = None  # origin of `kv_tokens_max`
    kv_blocks: int | None = None  # blocks (pages) of the KV pool
    sleep: Sleep | None = None
