"""Disaggregated prefill over HTTP, at the simulated engines of one process: prefill requests and decode requests, their
waiting times and responses. `PrefillExports` has the rules of the KV connectors.

The fields are those of vLLM 0.32 and SGLang 0.5.23 (router/core/disagg/bodies.py names the sources). If the
blocks of a decode request are unavailable, the outcome depends on the connector. With NIXL the engine is notified, and
the request fails according to `kv_load_failure_policy: fail`. With the others, the engine waits until its own time
limit, as observed on real engines. An SGLang engine is a prefill or a decode server, and refuses a request without
`bootstrap_room`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from aiohttp import web

from loadtest.fake_engine.peers import PeerLimits
from loadtest.fake_engine.prefill_export import WAIT_S, EngineCrashed, LegError, NotComputed, PrefillExports
from router.core.types.disagg_types import KvConnector, Role

POLL_S = 0.002
"""Polling interval of an engine that waits for another engine."""


class Moment(StrEnum):
    """Points of a prefill or decode request at which a fault can be injected."""

    ARRIVED = "arrived"  # the request has arrived, and was not processed yet
    READY = "ready"  # the prefill is computed, or the decode request has its blocks
    ANSWERED = "answered"  # the first event of a decode request was sent


class KvPlace(msgspec.Struct):
    """An engine to fetch from: `remote_kv_source` and `remote_prefiller`. Ignored, as in vLLM, if a field is
    missing."""

    kv_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None

    @property
    def address(self) -> str:
        """`host:port` of the engine; "" if a field is missing."""
        whole = self.kv_request_id and self.remote_host and self.remote_port
        return f"{self.remote_host}:{self.remote_port}" if whole else ""


class KvTransferParams(msgspec.Struct):
    """vLLM's `kv_transfer_params`, limited to the implemented fields; others are ignored."""

    remote_kv_source: KvPlace | None = None
    remote_prefiller: KvPlace | None = None
    remote_decoder: KvPlace | None = None
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_prefill_cached_tokens: int | None = None


class DisaggFields(msgspec.Struct):
    """The fields of a body that make it a prefill or a decode request."""

    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class LegRefused(Exception):
    """A prefill or decode request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Link:
    """One engine as its paired engines see it."""

    handshake: KvConnector
    role: Role
    directory: dict[str, Link]
    """All engines of the process, by id and by the address of their bootstrap server or P2P port."""
    clock: Callable[[], float]
    """Simulated seconds."""
    crash: Callable[[], None]
    """Ends the engine."""
    legs: PrefillExports
    engine_id: str = ""
    address: str = ""
    gone: bool = False
    trip: Callable[[Role, Moment], Awaitable[None]] | None = None
    """Called at each moment of each request; an exception from it is the injected fault."""
    linger: Callable[[], Awaitable[object]] | None = None
    """Awaited after each prefill, once its blocks were fetched, before its response."""
    waiting: int = 0
    """Requests that are open now."""
    host: str = "127.0.0.1"
    """Host of its blocks that it reports, with NIXL."""

    async def inject_fault(self, role: Role, moment: Moment) -> None:
        """Run the fault injection of this moment."""
        if self.trip is not None:
            await self.trip(role, moment)

    def leg_of(self, body: DisaggFields, prompt_tokens: int, block_tokens: int) -> PrefillRole | DecodeRole | None:
        """Return the prefill or decode side of a request; None if it is neither. Raises `LegRefused`."""
        if self.handshake is KvConnector.SGLANG:
            return self._make_room_side(body, prompt_tokens)
        params = body.kv_transfer_params or KvTransferParams()
        if self.handshake is KvConnector.OFFLOADING:
            decoder, prefiller = params.remote_decoder, params.remote_prefiller
            if decoder is not None and decoder.kv_request_id:
                return PrefillRole(self, decoder.kv_request_id, prompt_tokens)
            if prefiller is not None and prefiller.address:
                return DecodeRole(self, prefiller.address, prefiller.kv_request_id or "", prompt_tokens)
            return None
        mooncake = self.handshake is KvConnector.MOONCAKE
        id_ = params.transfer_id if mooncake else params.remote_request_id
        if params.do_remote_decode and (id_ or not mooncake):
            return PrefillRole(self, id_ or uuid.uuid4().hex, prompt_tokens, full=prompt_tokens >= block_tokens)
        if params.do_remote_prefill and params.remote_engine_id and id_:
            found_tokens = params.remote_prefill_cached_tokens
            return DecodeRole(self, params.remote_engine_id, id_, prompt_tokens, found_tokens=found_tokens)
        return None

    def _make_room_side(self, body: DisaggFields, prompt_tokens: int) -> PrefillRole | DecodeRole:
        room = body.bootstrap_room
        if room is None:
            raise LegRefused(400, "Invalid request: Disaggregated request received without bootstrap room id.")
        if not 0 <= room < 1 << 63:
            raise LegRefused(400, "bootstrap_room is no signed integer of 64 bits")
        if self.role is Role.PREFILL:
            return PrefillRole(self, str(room), prompt_tokens)
        return DecodeRole(self, f"{body.bootstrap_host}:{body.bootstrap_port}", str(room), prompt_tokens)


class PrefillRole:
    """A prefill request at its engine."""

    role = Role.PREFILL
    found_tokens: int | None = None
    """See `DecodeRole`."""

    def __init__(self, link: Link, id_: str, tokens: int, *, full: bool = True) -> None:
        self._link = link
        self._id = id_
        self._tokens = tokens
        self._full = full
        """True if the prompt fills a block."""
        self._begun = self._kept = False

    async def prepare(self) -> None:
        """Wait until the prompt may be computed. Returns None: it is computed here. Raises `LegRefused`."""
        link, self._begun = self._link, True
        link.waiting += 1
        await link.inject_fault(self.role, Moment.ARRIVED)
        try:
            link.legs.begin_prefill(link.handshake, self._id, self._tokens, link.clock())
        except EngineCrashed:
            self._kept = True
            link.crash()
            await asyncio.Event().wait()  # until the process is gone, which also ends the client's connection
        except ValueError as error:
            self._kept = True
            raise LegRefused(400, str(error)) from None
        while not link.legs.may_compute(self._id):
            await self._wait()

    async def complete(self, cached_tokens: int) -> dict[str, Any]:
        """Record the end of the prefill, and return additional fields of the response."""
        link = self._link
        await link.inject_fault(self.role, Moment.READY)
        if link.handshake is KvConnector.NIXL and not self._full:
            return {"kv_transfer_params": None}
        link.legs.finish_prefill(self._id, link.clock())
        self._kept = True
        if link.handshake is KvConnector.SGLANG:
            while self._id in link.legs:  # the response is sent after the blocks were fetched
                await self._wait()
        if link.linger is not None:
            await link.linger()
        if link.handshake is not KvConnector.NIXL:
            return {}
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(self._tokens // 16))],
            "remote_engine_id": link.engine_id,
            "remote_request_id": self._id,
            "remote_host": link.host,
            "remote_port": 5600,
            "tp_size": 1,
            "remote_prefill_cached_tokens": cached_tokens,
        }
        return {"kv_transfer_params": told}

    async def _wait(self) -> None:
        await asyncio.sleep(POLL_S)
        if self._id in self._link.legs.expire(self._link.clock()):
            self._kept = True
            raise LegRefused(500, "the decoding engine did not connect in time")

    def close(self) -> None:
        """Record the end of the request at this engine."""
        self._link.waiting -= self._begun
        if not self._kept or (self._link.handshake is KvConnector.SGLANG and self._id in self._link.legs):
            self._link.legs.drop(self._id)


class DecodeRole:
    """A decode request at its engine."""

    role = Role.DECODE

    def __init__(self, link: Link, source: str, id_: str, tokens: int, *, found_tokens: int | None = None) -> None:
        self.found_tokens = found_tokens
        """Tokens that the prefill stage found cached, if its response reported them. `usage` reports this number
        instead of all received tokens (vLLM 0.32, v1/engine/output_processor.py)."""
        self._link = link
        self._tokens = tokens
        self._source = link.directory.get(source)
        self._id = id_
        self._begun = self._fetched = False

    async def prepare(self) -> tuple[PrefillExports, str]:
        """Wait until the blocks have arrived. Returns a source from which the engine has them at once. Raises
        `LegRefused`."""
        link, source, self._begun = self._link, self._source, True
        link.waiting += 1
        await link.inject_fault(self.role, Moment.ARRIVED)
        begun_s = link.clock()
        if source is not None:
            source.legs.expire(begun_s)
            source.legs.connect(link.handshake, self._id, begun_s)
        while (took_s := self._fetch()) is None:
            if link.clock() - begun_s >= WAIT_S[link.handshake]:
                raise LegRefused(500, "KVTransferError: the prefill did not come in time")
            await asyncio.sleep(POLL_S)
        self._fetched = True
        until_s = link.clock() + took_s
        while link.clock() < until_s:  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(POLL_S)
        await link.inject_fault(self.role, Moment.READY)
        here = PrefillExports(PeerLimits(0.0, 0.0))
        here.begin_prefill(link.handshake, self._id, self._tokens, link.clock())
        here.finish_prefill(self._id, link.clock())
        return here, self._id

    def _fetch(self) -> float | None:
        """Return the transfer time of the blocks in seconds; None if the prefill is not finished. Raises
        `LegRefused`."""
        source, nixl = self._source, self._link.handshake is KvConnector.NIXL
        try:
            if source is not None and not source.gone:
                return source.legs.fetch(self._id, self._link.clock())
        except NotComputed:
            return None
        except LegError:
            pass
        if nixl:
            raise LegRefused(500, "Internal server error")
        return None

    async def complete(self, _cached_tokens: int) -> dict[str, Any]:
        """Return no additional fields."""
        return {}

    def close(self) -> None:
        """Record the end of the request at this engine."""
        self._link.waiting -= self._begun
        if self._begun and self._source is not None and not self._fetched:
            self._source.legs.disconnect(self._id, self._link.clock())


def link(
    handshake: KvConnector,
    role: Role,
    directory: dict[str, Link],
    *,
    clock: Callable[[], float],
    crash: Callable[[], None],
    limits: PeerLimits | None = None,
) -> Link:
    """Return an engine that is paired with those of the directory, and add it there by its id."""
    made = Link(handshake, role, directory, clock, crash, PrefillExports(limits), engine_id=uuid.uuid4().hex)
    directory[made.engine_id] = made
    return made


def bootstrap(engine: Link) -> web.Application:
    """Return a bootstrap server with SGLang's `/health`, and Mooncake's `/query`, which has a rank's engine id."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def query(_: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": engine.engine_id, "worker_addr": {"0": {"0": "127.0.0.1:1"}}}})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/query", query)
    return app
