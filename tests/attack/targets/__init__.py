"""All targets by name: one for each parser of bytes that others make."""

from __future__ import annotations

from tests.attack.target import Target
from tests.attack.targets import (
    bodies,
    engine_pages,
    http,
    kubernetes,
    kv_events,
    logs,
    models,
    settings,
    sharing,
    streams,
)

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (http, bodies, streams, logs, kv_events, settings, sharing, kubernetes, engine_pages, models)
    for target in module.TARGETS
}
