"""Replicas added at run time: `POST /admin/replicas {"url": ...}`, `DELETE /admin/replicas?url=...`.

Only addresses in `admin.replicas_allowed` can be added (config/allowed_networks.py). Added replicas join those of the
settings, are probed like them, and are gone after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from router.admin.page_table import AdminRequest, AdminResponse, AdminRoute, json_answer, make_error_response
from router.config.allowed_networks import AllowedNetwork, NotAllowed, check_replica_url
from router.engines.discovery.static import StaticDiscovery

log = logging.getLogger(__name__)

PATH = "/admin/replicas"
ADDED_MAX = 1_024


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    url: str


_decode = msgspec.json.Decoder(_Wanted).decode


class RuntimeReplicas:
    """Handlers of `/admin/replicas`."""

    def __init__(self, replicas: StaticDiscovery, allowed: Sequence[AllowedNetwork]) -> None:
        self._replicas = replicas
        self.allowed = allowed

    def routes(self) -> list[AdminRoute]:
        """Return the routes for the admin listener."""
        return [
            AdminRoute(method="POST", path=PATH, page=self.add),
            AdminRoute(method="DELETE", path=PATH, page=self.remove, takes=("url",)),
        ]

    async def add(self, call: AdminRequest) -> AdminResponse:
        """Add a replica. Answers 201, or 200 if the replica is known already."""
        if not self.allowed:
            return make_error_response(
                403, "none_allowed", "Replicas cannot be added: admin.replicas_allowed is empty."
            )
        try:
            url = check_replica_url(_decode(call.body).url.removesuffix("/"), self.allowed)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return make_error_response(400, "bad_body", 'The body must be {"url": "http://ADDRESS:PORT"}.')
        except NotAllowed as error:
            why = str(error)
            return make_error_response(403, "not_allowed", f"{why[0].upper()}{why[1:]}.")
        if url in self._replicas:
            return _make_url_response(200, url)
        if len(self._replicas.added) >= ADDED_MAX:
            return make_error_response(409, "too_many", f"{ADDED_MAX} replicas are added, which is the maximum.")
        self._replicas.add(url)
        log.info("replica added", extra={"event": "replica_added", "fields": {"replica": url}})
        return _make_url_response(201, url)

    async def remove(self, call: AdminRequest) -> AdminResponse:
        """Remove a replica. Answers 200, or 409 for a replica of the settings, which would be back after a restart."""
        url = call.query.get("url", "").removesuffix("/")
        if url in self._replicas.added:
            self._replicas.remove(url)
            log.info("replica removed", extra={"event": "replica_removed", "fields": {"replica": url}})
            return _make_url_response(200, url)
        if url in self._replicas:
            return make_error_response(409, "not_added", "This replica is configured in the settings; remove it there.")
        return make_error_response(404, "unknown_replica", "This replica was not added here.")


def _make_url_response(status: int, url: str) -> AdminResponse:
    return json_answer({"url": url}, status)
