"""Routers whose replicas are all ready."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica, ServedModel


def ready(router: Router, ids: Collection[str], model: str = "m") -> Router:
    """The router, to which discovery and probes have told of these replicas: all are well and serve the model."""
    router.replace(Replica(id_) for id_ in ids)
    for id_ in ids:
        router.fleet.observe_health(id_, ok=True)
        router.observations.observe_models(id_, [ServedModel(model)])
    return router


def router_of(ids: Collection[str], policy: str = "warm", **more: Any) -> Router:
    """A small router with these replicas, all ready."""
    return ready(
        Router(
            POLICIES[policy](), index_bytes_max=1 << 20, remembered_prompts_max=100, default_cache_blocks=100, **more
        ),
        ids,
    )
