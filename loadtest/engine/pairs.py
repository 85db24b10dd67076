"""The two legs of a request over HTTP, at the simulated engines of one process: which fields of a body make a leg of
it, when an engine lets it go on, and what it answers. The rules of the handshakes are `Legs`.

Fields are vLLM 0.32's and SGLang 0.5.23's (router/core/dialects/legs.py names the sources). A decode leg whose blocks
cannot be had fails as `kv_load_failure_policy: fail` has it, where its engine is told so (NIXL); with the other
handshakes its engine goes on waiting, as was seen of them, until their own time is over. An engine of SGLang's is a
prefill or a decode server, and refuses a request without a room.
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

from loadtest.engine.legs import WAIT_S, EngineCrashed, LegError, Legs, NotComputed
from loadtest.engine.peers import PeerLimits
from router.core.facts.legs import Handshake, Role

POLL_S = 0.002
"""Between two looks of an engine that waits for another one."""


class Moment(StrEnum):
    """Where in a leg something may be made to happen."""

    ARRIVED = "arrived"  # its request is here, and nothing was done for it
    READY = "ready"  # a prefill is computed; a decode leg has its blocks
    ANSWERED = "answered"  # a decode leg's first event was sent


class KvPlace(msgspec.Struct):
    """An engine to fetch from: `remote_kv_source` and `remote_prefiller`. Without one of its fields it is passed over,
    as there."""

    kv_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None

    @property
    def address(self) -> str:
        """`host:port` of the engine; "" where the order is not whole."""
        whole = self.kv_request_id and self.remote_host and self.remote_port
        return f"{self.remote_host}:{self.remote_port}" if whole else ""


class KvTransferParams(msgspec.Struct):
    """vLLM's `kv_transfer_params`, as far as implemented; other fields are ignored."""

    remote_kv_source: KvPlace | None = None
    remote_prefiller: KvPlace | None = None
    remote_decoder: KvPlace | None = None
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_prefill_cached_tokens: int | None = None


class Legged(msgspec.Struct):
    """The fields of a body that make a leg of it."""

    kv_transfer_params: KvTransferParams | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class LegRefused(Exception):
    """A leg is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Link:
    """One engine as the engines that it is paired with know it."""

    handshake: Handshake
    role: Role
    directory: dict[str, Link]
    """All engines of the process, by id and by the address at which they are asked."""
    clock: Callable[[], float]
    """Simulated seconds."""
    crash: Callable[[], None]
    """Ends the engine."""
    legs: Legs
    engine_id: str = ""
    address: str = ""
    gone: bool = False
    trip: Callable[[Role, Moment], Awaitable[None]] | None = None
    """Called at each moment of each leg; what it raises is what happens there."""
    linger: Callable[[], Awaitable[object]] | None = None
    """Awaited behind each prefill whose blocks were fetched, before it is answered."""
    waiting: int = 0
    """Legs that are open now."""
    host: str = "127.0.0.1"
    """Where it says that its blocks are, with NIXL."""

    async def at(self, role: Role, moment: Moment) -> None:
        """A leg has come to this moment."""
        if self.trip is not None:
            await self.trip(role, moment)

    def leg_of(self, body: Legged, prompt_tokens: int, block_tokens: int) -> PrefillSide | DecodeSide | None:
        """The leg that a request is; None for one that is whole. Raises LegRefused."""
        if self.handshake is Handshake.SGLANG:
            return self._of_room(body, prompt_tokens)
        params = body.kv_transfer_params or KvTransferParams()
        if self.handshake is Handshake.OFFLOADING:
            decoder, prefiller = params.remote_decoder, params.remote_prefiller
            if decoder is not None and decoder.kv_request_id:
                return PrefillSide(self, decoder.kv_request_id, prompt_tokens)
            if prefiller is not None and prefiller.address:
                return DecodeSide(self, prefiller.address, prefiller.kv_request_id or "", prompt_tokens)
            return None
        mooncake = self.handshake is Handshake.MOONCAKE
        id_ = params.transfer_id if mooncake else params.remote_request_id
        if params.do_remote_decode and (id_ or not mooncake):
            return PrefillSide(self, id_ or uuid.uuid4().hex, prompt_tokens, full=prompt_tokens >= block_tokens)
        if params.do_remote_prefill and params.remote_engine_id and id_:
            found_tokens = params.remote_prefill_cached_tokens
            return DecodeSide(self, params.remote_engine_id, id_, prompt_tokens, found_tokens=found_tokens)
        return None

    def _of_room(self, body: Legged, prompt_tokens: int) -> PrefillSide | DecodeSide:
        room = body.bootstrap_room
        if room is None:
            raise LegRefused(400, "Invalid request: Disaggregated request received without bootstrap room id.")
        if not 0 <= room < 1 << 63:
            raise LegRefused(400, "bootstrap_room is no signed integer of 64 bits")
        if self.role is Role.PREFILL:
            return PrefillSide(self, str(room), prompt_tokens)
        return DecodeSide(self, f"{body.bootstrap_host}:{body.bootstrap_port}", str(room), prompt_tokens)


class PrefillSide:
    """A prefill leg at its engine."""

    role = Role.PREFILL
    found_tokens: int | None = None
    """See DecodeSide."""

    def __init__(self, link: Link, id_: str, tokens: int, *, full: bool = True) -> None:
        self._link = link
        self._id = id_
        self._tokens = tokens
        self._full = full
        """Whether the prompt fills a block."""
        self._begun = self._kept = False

    async def before(self) -> None:
        """Return when the prompt may be computed; None: here. Raises LegRefused."""
        link, self._begun = self._link, True
        link.waiting += 1
        await link.at(self.role, Moment.ARRIVED)
        try:
            link.legs.begin_prefill(link.handshake, self._id, self._tokens, link.clock())
        except EngineCrashed:
            self._kept = True
            link.crash()
            await asyncio.Event().wait()  # until its process is gone, and with it whoever asked
        except ValueError as error:
            self._kept = True
            raise LegRefused(400, str(error)) from None
        while not link.legs.may_compute(self._id):
            await self._wait()

    async def after(self, cached_tokens: int) -> dict[str, Any]:
        """What the answer has besides."""
        link = self._link
        await link.at(self.role, Moment.READY)
        if link.handshake is Handshake.NIXL and not self._full:
            return {"kv_transfer_params": None}
        link.legs.computed(self._id, link.clock())
        self._kept = True
        if link.handshake is Handshake.SGLANG:
            while self._id in link.legs:  # its answer comes when the blocks have gone
                await self._wait()
        if link.linger is not None:
            await link.linger()
        if link.handshake is not Handshake.NIXL:
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
        """The request is over here."""
        self._link.waiting -= self._begun
        if not self._kept or (self._link.handshake is Handshake.SGLANG and self._id in self._link.legs):
            self._link.legs.drop(self._id)


class DecodeSide:
    """A decode leg at its engine."""

    role = Role.DECODE

    def __init__(self, link: Link, source: str, id_: str, tokens: int, *, found_tokens: int | None = None) -> None:
        self.found_tokens = found_tokens
        """Tokens that the prefill leg found cached, where its answer said so: what usage tells instead of all that
        came (vLLM 0.32, v1/engine/output_processor.py)."""
        self._link = link
        self._tokens = tokens
        self._source = link.directory.get(source)
        self._id = id_
        self._begun = self._fetched = False

    async def before(self) -> tuple[Legs, str]:
        """Return when the blocks are here, from where the engine has them at once. Raises LegRefused."""
        link, source, self._begun = self._link, self._source, True
        link.waiting += 1
        await link.at(self.role, Moment.ARRIVED)
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
        await link.at(self.role, Moment.READY)
        here = Legs(PeerLimits(0.0, 0.0))
        here.begin_prefill(link.handshake, self._id, self._tokens, link.clock())
        here.computed(self._id, link.clock())
        return here, self._id

    def _fetch(self) -> float | None:
        """Seconds that the blocks take to come, once they are taken; None where they are still waited for. Raises
        LegRefused."""
        source, nixl = self._source, self._link.handshake is Handshake.NIXL
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

    async def after(self, _cached_tokens: int) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """The request is over here."""
        self._link.waiting -= self._begun
        if self._begun and self._source is not None and not self._fetched:
            self._source.legs.disconnect(self._id, self._link.clock())


def link(
    handshake: Handshake,
    role: Role,
    directory: dict[str, Link],
    *,
    clock: Callable[[], float],
    crash: Callable[[], None],
    limits: PeerLimits | None = None,
) -> Link:
    """An engine that is paired with those of the directory; it is found there by its id."""
    made = Link(handshake, role, directory, clock, crash, Legs(limits), engine_id=uuid.uuid4().hex)
    directory[made.engine_id] = made
    return made


def bootstrap(engine: Link) -> web.Application:
    """The pages of a bootstrap server: SGLang's `/health`, and Mooncake's `/query`, which has a rank's engine id."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def query(_: web.Request) -> web.Response:
        return web.json_response({"0": {"engine_id": engine.engine_id, "worker_addr": {"0": {"0": "127.0.0.1:1"}}}})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/query", query)
    return app
