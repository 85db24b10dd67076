"""Worker's reports of templates to the hub: every EVERY_S those that changed, and the body of each only once.

A new hub gets all of them. Bodies may be long, so they are sent a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from router.core.types.misses import Template

EVERY_S = 2.0  # interval at which changes are collected from the edge
BODY_BYTES_MAX = 256 << 10  # longer bodies are not sent
TOLD_BYTES_MAX = 1 << 20  # bytes of bodies sent at once
TOLD_MAX = 64  # templates sent at once


class TemplateUpdates:
    """Templates that must be sent to the hub; at most `templates_max`, those that changed last."""

    def __init__(self, changed: Callable[[], Iterable[Template]], templates_max: int) -> None:
        """`changed` returns templates that are new or changed since its last call."""
        self._changed = changed
        self._templates_max = templates_max
        self._known: dict[int, Template] = {}
        self._due: dict[int, None] = {}
        self._sent_ids: set[int] = set()  # ids of templates with bodies that this hub has
        self._asked_s = float("-inf")

    def resend_all(self) -> None:
        """Send all templates again, because the hub is a new one."""
        self._due = dict.fromkeys(self._known)
        self._sent_ids.clear()

    def due(self, now_s: float) -> list[Template]:
        """Return templates to send now; those that do not fit are due the next time."""
        if now_s - self._asked_s >= EVERY_S:
            self._asked_s = now_s
            self._take(self._changed())
        told: list[Template] = []
        size = 0
        for id_ in list(self._due):
            template = self._known[id_]
            body = b"" if id_ in self._sent_ids or len(template.body) > BODY_BYTES_MAX else template.body
            if told and (size + len(body) > TOLD_BYTES_MAX or len(told) >= TOLD_MAX):
                break
            size += len(body)
            told.append(template if body is template.body else replace(template, body=body))
            del self._due[id_]
            if body:
                self._sent_ids.add(id_)
        return told

    def _take(self, templates: Iterable[Template]) -> None:
        for template in templates:
            before = self._known.pop(template.id, None)
            body = template.body or (before.body if before is not None else b"")
            self._known[template.id] = template if body is template.body else replace(template, body=body)
            self._due[template.id] = None
        while len(self._known) > self._templates_max:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._due.pop(oldest, None)
            self._sent_ids.discard(oldest)
