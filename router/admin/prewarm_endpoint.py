"""Prewarming on request. `POST /admin/prewarm` warms replicas now; `GET /admin/prewarm` shows the jobs and their
results.

    {"replicas": [ids], "requests": [{"path": ..., "body": {...}}], "templates": n, "tokens_max": N, "wait": true}

All fields are optional. Without `replicas` all ready ones are warmed. Without `requests` and `templates` they are
warmed with those of the settings.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, admin_refusal, get_route, json_answer
from router.core.fleet.registry import Fleet
from router.core.prompts.json_fields import UNREADABLE
from router.prewarm.prefixes import PrefixesError, PrefixRow, WarmupPrompt, prompts_from_request
from router.prewarm.warmer import Busy, Warmer

PATH = "/admin/prewarm"
BODY_BYTES_MAX, REQUESTS_MAX, TEMPLATES_MAX = 4 << 20, 64, 256
TOKENS_MAX = 1 << 30


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    replicas: list[str] | None = None
    requests: Annotated[list[PrefixRow], Meta(max_length=REQUESTS_MAX)] = []
    templates: Annotated[int, Meta(ge=0, le=TEMPLATES_MAX)] = 0
    tokens_max: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    wait: bool = False


_decode = msgspec.json.Decoder(_Wanted).decode


class PrewarmPage:
    """Handlers of `/admin/prewarm`."""

    def __init__(self, fleet: Fleet, warmer: Warmer) -> None:
        self._fleet = fleet
        self._warmer = warmer

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            AdminRoute(method="POST", path=PATH, page=self.warm, body_bytes_max=BODY_BYTES_MAX),
            get_route(PATH, self.state),
        ]

    async def state(self, _: AdminRequest) -> AdminResponse:
        """Answer with the running jobs, the waiting jobs, and the last results."""
        return json_answer(self._warmer.state())

    async def warm(self, call: AdminRequest) -> AdminResponse:
        """Warm replicas. Answers 202 and the prompts to be sent, or with `wait` 200 and the results. Raises Refusal."""
        try:
            wanted, prefixes = await asyncio.get_running_loop().run_in_executor(None, _parse_body, call)
            replicas = self._replicas(wanted.replicas)
            file, templates = self._sources(wanted)
            jobs, tasks = self._warmer.request(
                replicas,
                prefixes,
                templates,
                file=file,
                tokens_max=wanted.tokens_max or self._warmer.settings.tokens_max,
            )
        except Busy as error:
            raise admin_refusal(409, "busy", "Too many calls are queued; GET lists them.") from error
        if wanted.wait:
            await asyncio.wait(tasks)
            return json_answer({"replicas": [job.row() for job in jobs]})
        will = {"replicas": replicas, "requests": len(prefixes), "prefixes_file": file, "templates": templates}
        return json_answer({**will, "tokens_max": jobs[0].tokens_max}, 202)

    def _sources(self, wanted: _Wanted) -> tuple[str, int]:
        """Return the file and the number of templates to send. Raises Refusal."""
        if wanted.requests or wanted.templates:
            return "", wanted.templates
        s = self._warmer.settings
        if not (s.prefixes_file or s.templates):
            raise admin_refusal(
                400, "nothing_wanted", "Set 'requests' or 'templates': the settings configure no prompts."
            )
        return s.prefixes_file, s.templates

    def _replicas(self, named: list[str] | None) -> list[str]:
        """Return the replicas named, once each, or all that are ready. Raises Refusal."""
        ready = {member.id: None for member in self._fleet.ready()}
        ids = list(dict.fromkeys(named) if named is not None else ready)
        for id_ in ids:
            if self._fleet.member(id_) is None:
                raise admin_refusal(400, "unknown_replica", f"There is no replica '{id_}'.")
            if id_ not in ready and not self._fleet.is_warming_up(id_):
                raise admin_refusal(400, "not_ready", f"The replica '{id_}' is not ready.")
        if not ids:
            raise admin_refusal(400, "no_replica", "No replica is given or ready.")
        return ids


def _parse_body(call: AdminRequest) -> tuple[_Wanted, list[WarmupPrompt]]:
    """Parse a body; safe in any thread. Raises Refusal."""
    try:
        wanted = _decode(call.body or b"{}")
        return wanted, prompts_from_request(wanted.requests)
    except UNREADABLE as error:
        raise admin_refusal(400, "bad_body", f"The body is invalid: {error}.") from error
    except PrefixesError as error:
        raise admin_refusal(400, "bad_request", f"{error}.") from error
