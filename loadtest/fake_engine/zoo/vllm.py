"""External interface of vLLM: responses by path, the metrics page, errors and sleep mode, with a member's
deviations."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from loadtest.common import answers
from loadtest.fake_engine.bodies import Refused, json_response
from loadtest.fake_engine.metrics import moment_of, render
from loadtest.fake_engine.replica import SimulatedReplica
from loadtest.fake_engine.shapes import Chat, Outlook, Shape
from loadtest.fake_engine.zoo.apis import Messages, Responses, Speech, SpeechEvents, Transcription
from loadtest.fake_engine.zoo.member import Member

WAITING_MAX = 10_000
"""Requests queued at a replica before it answers 503 (vLLM: --max-num-queued-reqs)."""
VERSION, EARLIER = "0.32.0", "0.15.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TRANSCRIPTIONS, SPEECH = "/v1/audio/transcriptions", "/v1/audio/speech"


class Face:
    """External interface of one replica. Pages are generated from the replica on request."""

    owned_by = "vllm"

    def __init__(
        self, member: Member, model_name: str, replica: SimulatedReplica, sources: Mapping[str, Any], *, tell_ttft: bool
    ) -> None:
        """Create the interface; `sources` is the content of vLLM's page `/kv_event_sources`."""
        self.member = member
        self.model_name = model_name
        self._replica = replica
        self._sources = dict(sources)
        self._scrapes = itertools.count()
        self._asleep = 1 if member.sleeps else None  # level
        self._awake = asyncio.Event()
        self._parked_n = 0
        if not member.sleeps:
            self._awake.set()
        outlook = Outlook(
            model_name,
            replica.model.limits.block_tokens,
            tell_ttft,
            member.forces_usage,
            member.streams_reasoning,
        )
        self.shapes = self._shapes(outlook)

    def _shapes(self, outlook: Outlook) -> dict[str, Shape]:
        return {
            CHAT: Chat(outlook),
            COMPLETIONS: Shape(outlook),
            MESSAGES: Messages(outlook),
            RESPONSES: Responses(outlook),
            TRANSCRIPTIONS: Transcription(outlook),
            SPEECH: Speech(outlook),
            f"{SPEECH}:sse": SpeechEvents(outlook),
        }

    def routes(self) -> list[web.RouteDef]:
        """Return the pages that not every engine has."""
        pages = [web.get("/version", self._version)]
        if not self.member.earlier:
            pages.append(web.get("/kv_event_sources", self._kv_event_sources))
        if not self.member.sleeps:
            return pages
        sleep, wake = web.post("/sleep", self._sleep), web.post("/wake_up", self._wake_up)
        return [*pages, sleep, wake, web.get("/is_sleeping", self._is_sleeping)]

    def models(self, created: int) -> dict[str, Any]:
        """Return the `/v1/models` page."""
        longest = self._replica.model.context_tokens_max
        return answers.models(self.model_name, owned_by=self.owned_by, created=created, context_tokens=longest)

    def metrics(self) -> str:
        """Return the `/metrics` page."""
        replica, scrape = self._replica, next(self._scrapes)
        moment = moment_of(self.member, replica.started_s, scrape, asleep=self._asleep, parked_n=self._parked_n)
        return render(replica.model, self.model_name, replica.ttft, replica.e2e, replica.lag_max_s, moment, self.member)

    def full(self, streams: bool) -> Refused | None:
        """Return the refusal of a further request, or None if it can be queued."""
        if self._replica.model.waiting_n >= WAITING_MAX:
            return Refused(503, "The queue is full (max_num_queued_reqs).", "ServiceUnavailableError")
        return None

    def error(self, path: str, refused: Refused) -> web.Response:
        """Return an error as a response."""
        if path == MESSAGES:
            error = {"type": "error", "error": {"type": refused.kind, "message": str(refused)}}
            return json_response(error, status=refused.status)
        return refused.response()

    def error_event(self, refused: Refused) -> dict[str, Any]:
        """Return an error as the data of an event, in a stream whose status and headers were already sent."""
        return {"error": {"message": str(refused), "type": "InternalServerError", "code": refused.status}}

    async def awake(self) -> None:
        """Wait until requests are computed: requests that arrive while the engine sleeps wait."""
        self._parked_n += 1
        try:
            await self._awake.wait()
        finally:
            self._parked_n -= 1

    async def _version(self, _http: web.Request) -> web.Response:
        return json_response({"version": EARLIER if self.member.earlier else VERSION})

    async def _kv_event_sources(self, _http: web.Request) -> web.Response:
        return json_response(self._sources)

    async def _sleep(self, http: web.Request) -> web.Response:
        """Put the engine to sleep. Level 0 only stops it; 1 and 2 also drop the cache. `mode` is abort."""
        level = int(http.query.get("level", "1"))
        self._awake.clear()
        self._asleep = level
        self._replica.abort()
        if level:
            self._replica.model.reset_prefix_cache()
        return json_response({"status": "sleeping", "level": level})

    async def _wake_up(self, http: web.Request) -> web.Response:
        self._asleep = None
        self._awake.set()
        return json_response({"status": "awake", "tags": http.query.getall("tags", None)})

    async def _is_sleeping(self, _http: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._asleep is not None})
