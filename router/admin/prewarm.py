"""`POST /admin/prewarm`: warm replicas now; `GET /admin/prewarm`: what is being warmed, and what came of it.

    {"replicas": [ids], "requests": [{"path": ..., "body": {...}}], "templates": n, "tokens_max": N, "wait": true}

All fields are optional: without `replicas` all ready ones are warmed, without `requests` and `templates` with those of
the settings.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from router.admin.guard import refused
from router.core.placement.router import Router
from router.core.prompts.bodies import UNREADABLE
from router.prewarm.prefixes import Prefix, PrefixesError, Row, given
from router.prewarm.warmer import Busy, Warmer

BODY_BYTES_MAX, REQUESTS_MAX, TEMPLATES_MAX = 4 << 20, 64, 256
TOKENS_MAX = 1 << 30


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    replicas: list[str] | None = None
    requests: Annotated[list[Row], Meta(max_length=REQUESTS_MAX)] = []
    templates: Annotated[int, Meta(ge=0, le=TEMPLATES_MAX)] = 0
    tokens_max: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    wait: bool = False


_decode = msgspec.json.Decoder(_Wanted).decode


class _Refused(Exception):
    """The call is refused with this answer."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__()
        self.answer = answer


class PrewarmPage:
    """Handlers of `/admin/prewarm`."""

    def __init__(self, router: Router, warmer: Warmer) -> None:
        self._router = router
        self._warmer = warmer

    def routes(self) -> list[web.RouteDef]:
        """Routes for the admin listener."""
        return [web.post("/admin/prewarm", self.warm), web.get("/admin/prewarm", self.state)]

    async def state(self, _: web.Request) -> web.Response:
        """Jobs that run, jobs that wait, and the last results."""
        return _json(200, self._warmer.state())

    async def warm(self, request: web.Request) -> web.Response:
        """202 and what will be sent, or with `wait` 200 and what was sent."""
        body = await _body(request)
        if len(body) > BODY_BYTES_MAX:
            return refused(413, "too_long", f"The body must not be longer than {BODY_BYTES_MAX >> 20} MiB.")
        try:
            wanted, prefixes = await asyncio.get_running_loop().run_in_executor(None, _understood, body)
            replicas = self._replicas(wanted.replicas)
            file, templates = self._sources(wanted)
            jobs, tasks = self._warmer.ask(
                replicas,
                prefixes,
                templates,
                file=file,
                tokens_max=wanted.tokens_max or self._warmer.settings.tokens_max,
            )
        except _Refused as error:
            return error.answer
        except Busy:
            return refused(409, "busy", "Too many calls wait already; GET shows them.")
        if wanted.wait:
            await asyncio.wait(tasks)
            return _json(200, {"replicas": [job.row() for job in jobs]})
        will = {"replicas": replicas, "requests": len(prefixes), "prefixes_file": file, "templates": templates}
        return _json(202, {**will, "tokens_max": jobs[0].tokens_max})

    def _sources(self, wanted: _Wanted) -> tuple[str, int]:
        """The file and the number of templates to send. Raises _Refused."""
        if wanted.requests or wanted.templates:
            return "", wanted.templates
        s = self._warmer.settings
        if not (s.prefixes_file or s.templates):
            raise _Refused(
                refused(400, "nothing_wanted", "Give 'requests' or 'templates': the settings name no prompts.")
            )
        return s.prefixes_file, s.templates

    def _replicas(self, named: list[str] | None) -> list[str]:
        """The replicas named, once each, or all that are ready. Raises _Refused."""
        ready = {member.id: None for member in self._router.ready()}
        ids = list(dict.fromkeys(named) if named is not None else ready)
        for id_ in ids:
            if self._router.member(id_) is None:
                raise _Refused(refused(400, "unknown_replica", f"There is no replica '{id_}'."))
            if id_ not in ready and not self._router.is_warming_up(id_):
                raise _Refused(refused(400, "not_ready", f"The replica '{id_}' is not ready."))
        if not ids:
            raise _Refused(refused(400, "no_replica", "No replica is named, or ready."))
        return ids


async def _body(request: web.Request) -> bytes:
    """The request's body, at most BODY_BYTES_MAX + 1 bytes of it; this page takes longer bodies than others."""
    pieces, left = list[bytes](), BODY_BYTES_MAX + 1
    while left > 0 and (piece := await request.content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _understood(body: bytes) -> tuple[_Wanted, list[Prefix]]:
    """Parse a body; safe in any thread. Raises _Refused."""
    try:
        wanted = _decode(body or b"{}")
        return wanted, given(wanted.requests)
    except UNREADABLE as error:
        raise _Refused(refused(400, "bad_body", f"The body cannot be understood: {error}.")) from error
    except PrefixesError as error:
        raise _Refused(refused(400, "bad_request", f"{error}.")) from error


def _json(status: int, value: Any) -> web.Response:  # noqa: ANN401 - anything JSON
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
