"""The router's own parsing and placement in this process, on a clock that a benchmark advances by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from router.config.schema import Settings
from router.control.admission_controller import AdmissionController
from router.control.local_placement import LocalPlacementService
from router.control.response_owners import ResponseOwners
from router.core.admission.concurrency_windows import AdmissionLimits, NoLimits
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Load, Replica, ServedModel
from router.http.request import Connection, Request


def warm_router(**more: Any) -> Router:  # noqa: ANN401 - arguments of Router
    """Return a router with the policy `warm` and the default limits, unless `more` has others."""
    routing = Settings().routing
    names = ("index_bytes_max", "remembered_prompts_max", "default_cache_blocks")
    return Router(POLICIES["warm"](), **{name: getattr(routing, name) for name in names} | more)


def local_placer(
    router: Router, clock: Callable[[], float], limits: AdmissionLimits | None = None
) -> LocalPlacementService:
    """Return a placer that waits for no event and reports no outcome of a request."""
    owners = ResponseOwners(100)
    admission = AdmissionController(router, owners, limits or NoLimits(), stale_s=3.0, clock=clock, shed=ignore)
    return LocalPlacementService(
        router,
        admission,
        owners,
        clock=clock,
        event_wait_s=0.0,
        observe=ignore,
        failed=ignore,
        refused=ignore,
        page=_no_page,
    )


def join(router: Router, replicas: int, model: str, load: Load) -> list[str]:
    """Add `replicas` healthy replicas that serve `model` and report `load`. Returns their ids."""
    names = [f"http://10.0.0.{number}:8000" for number in range(replicas)]
    router.replace([Replica(name) for name in names])
    for name in names:
        router.fleet.observe_health(name, ok=True)
        router.observations.observe_models(name, [ServedModel(model, owned_by="vllm")])
        router.observations.observe_load(name, load)
    return names


def make_json_request(path: str, body: bytes) -> Request:
    """Return a POST request with a JSON body and no connection, so it gets no response."""
    request = Request(cast("Connection", None))
    request.method, request.target, request.path = "POST", path, path
    request.replace_body([body], len(body))
    request.lines = [(b"content-type", b"Content-Type", b"application/json")]
    request.fields = {b"content-type": b"application/json"}
    return request


def ignore(*_: object) -> None:
    """Ignore the call: the result is not counted."""


async def _no_page(*_: object) -> None:
    """Show no page."""
