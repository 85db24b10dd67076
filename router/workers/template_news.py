"""What a worker tells its hub of templates: those that changed, now and then, and the body of each once.

A hub that is new is told all of them. Bodies may be long, so that not all are told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from router.core.facts.misses import Template

EVERY_S = 2.0  # what has changed is asked for
BODY_BYTES_MAX = 256 << 10  # longer ones stay here
TOLD_BYTES_MAX = 1 << 20  # of bodies, at once
TOLD_MAX = 64  # at once


class Telling:
    """At most `templates_max`: those that changed last."""

    def __init__(self, changed: Callable[[], Iterable[Template]], templates_max: int) -> None:
        """`changed` gives templates that are new or other than when it was last asked."""
        self._changed = changed
        self._templates_max = templates_max
        self._known: dict[int, Template] = {}
        self._due: dict[int, None] = {}
        self._told: set[int] = set()  # whose bodies were
        self._asked_s = float("-inf")

    def again(self) -> None:
        """Whoever is there now knows of nothing."""
        self._due = dict.fromkeys(self._known)
        self._told.clear()

    def due(self, now_s: float) -> list[Template]:
        """What is to be told now; what does not fit is due the next time."""
        if now_s - self._asked_s >= EVERY_S:
            self._asked_s = now_s
            self._take(self._changed())
        told: list[Template] = []
        size = 0
        for id_ in list(self._due):
            template = self._known[id_]
            body = b"" if id_ in self._told or len(template.body) > BODY_BYTES_MAX else template.body
            if told and (size + len(body) > TOLD_BYTES_MAX or len(told) >= TOLD_MAX):
                break
            size += len(body)
            told.append(template if body is template.body else replace(template, body=body))
            del self._due[id_]
            if body:
                self._told.add(id_)
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
            self._told.discard(oldest)
