"""Draining of replicas: `POST /admin/replicas/drain {"url": ...}`, undone by DELETE with the parameter `url`.

A draining replica is treated like one that discovery reports as not ready. It receives no new requests, and its answers
continue. After `upstream.drain_migrate_after_s` those streams that another replica can continue are moved there. The
replica drains until the call is undone, or until discovery no longer lists it.
"""

from __future__ import annotations

import logging

import msgspec

from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, json_answer, make_error_response
from router.engines.discovery.combined_source import MergedDiscovery

log = logging.getLogger(__name__)

PATH = "/admin/replicas/drain"


class _Drained(msgspec.Struct, forbid_unknown_fields=True):
    url: str


_decode = msgspec.json.Decoder(_Drained).decode


class DrainPage:
    """Handlers of `/admin/replicas/drain`."""

    def __init__(self, discoveries: MergedDiscovery) -> None:
        self._discoveries = discoveries

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            AdminRoute(method="POST", path=PATH, page=self.drain),
            AdminRoute(method="DELETE", path=PATH, page=self.take_back, takes=("url",)),
        ]

    async def drain(self, call: AdminRequest) -> AdminResponse:
        """Drain a replica. Answers 200, or 404 for an unknown replica."""
        try:
            url = _decode(call.body).url.rstrip("/")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return make_error_response(400, "bad_body", 'The body must be {"url": "http://ADDRESS:PORT"}.')
        if not self._discoveries.drain(url):
            return make_error_response(404, "unknown_replica", "This replica is unknown.")
        log.info("replica drains", extra={"event": "replica_drains", "fields": {"replica": url}})
        return json_answer({"url": url}, 200)

    async def take_back(self, call: AdminRequest) -> AdminResponse:
        """Undo the draining. Answers 200, or 404 for a replica that does not drain."""
        url = call.query.get("url", "").rstrip("/")
        if not self._discoveries.undrain(url):
            return make_error_response(404, "unknown_replica", "This replica is not draining.")
        log.info("replica no longer drains", extra={"event": "replica_drain_cancelled", "fields": {"replica": url}})
        return json_answer({"url": url}, 200)
