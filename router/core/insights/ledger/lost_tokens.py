"""Costs of differences: tokens computed again, by template, kind of difference and place.

Places in a conversation's history move with every turn. After the first two messages, places that differ by their
number only are one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from router.core.types.cache_misses import Difference, DifferenceKind

LOSSES_MAX = 1_024
PIECES_MAX = 64  # different pieces that are counted
PATH_CHARS_MAX = 200
TENANTS_MAX = 20  # tenants with the last cases that are kept
FIRST_MESSAGES = 2  # the system prompt, and the first message of the conversation
MARGIN = 8  # 1 in this number of losses, the least costly, is evicted at once

Key = tuple[int, DifferenceKind, int, str]  # template, change, message, path


Cases = dict[str, float]  # label of a tenant -> Unix time of its last case, in ascending order


def note_case(cases: Cases, tenant: str, now_s: float) -> None:
    """Record a case of a tenant, which is given by its label."""
    cases.pop(tenant, None)
    cases[tenant] = now_s
    if len(cases) > TENANTS_MAX:
        del cases[next(iter(cases))]


class Loss:
    """The cost of one kind of difference in one place. Sums are weighted (sums.Fading)."""

    __slots__ = (
        *(
            "begin_bytes",
            "change",
            "in_conversations",
            "last",
            "last_at_s",
            "message",
            "pieces",
            "requests",
            "template",
            "tenants",
        ),
        *("times", "tokens"),
    )

    def __init__(self, template: int, difference: Difference) -> None:
        self.template = template
        self.change = difference.change
        self.message = difference.message  # number of the first message in which the difference was found
        self.last = difference
        self.last_at_s = 0.0
        self.tenants: Cases = {}
        self.begin_bytes = begin_of(difference)
        self.requests = self.tokens = 0.0
        # requests, and those of them that changed earlier text of their own conversation
        self.times = self.in_conversations = 0
        self.pieces: set[int] = set()  # hashes of the differing texts


class Losses:
    """All losses, at most LOSSES_MAX. Without `excerpts` no text of a prompt is kept, even if a difference contains
    some."""

    def __init__(self, *, excerpts: bool) -> None:
        self._excerpts = excerpts
        self.all: dict[Key, Loss] = {}
        self.templates: set[int] = set()  # templates that have a loss

    def add(
        self,
        template: int,
        difference: Difference,
        tokens: int,
        weight: float,
        now_s: float,
        *,
        own: bool = False,
        tenant: str = "",
    ) -> None:
        """Record that a request of this template differed, and that `tokens` had to be computed again. `own`: it
        changed earlier text of the same conversation. `tenant`: label of its tenant."""
        if not self._excerpts and (difference.before or difference.after):
            difference = _strip_text(difference)
        key = (template, difference.change, *place_of(difference))
        loss = self.all.get(key)
        if loss is None:
            if len(self.all) >= LOSSES_MAX:
                self._make_room()
            loss = self.all[key] = Loss(template, difference)
            self.templates.add(template)
        loss.requests += weight
        loss.tokens += tokens * weight
        loss.last_at_s = now_s
        note_case(loss.tenants, tenant, now_s)
        loss.times += 1
        loss.in_conversations += own
        if difference.token_bytes >= 0:
            loss.begin_bytes = difference.token_bytes
        if difference.before or difference.after or not (loss.last.before or loss.last.after):
            loss.last = difference  # an assumed difference has no words to show
        if difference.message < loss.message:
            loss.message = difference.message
        if len(loss.pieces) < PIECES_MAX:
            loss.pieces.add(difference.piece_hash)

    def fade(self, factor: float) -> None:
        """Multiply all sums when weights begin anew (sums.Fading)."""
        for loss in self.all.values():
            loss.requests *= factor
            loss.tokens *= factor

    def make_row_lookup(self, weight: float, losses_max: int) -> Callable[[int], list[dict[str, Any]]]:
        """Return a function that makes the rows of a template's page, most costly first."""
        of: dict[int, list[Loss]] = {}
        for loss in sorted(self.all.values(), key=lambda each: -each.tokens):
            of.setdefault(loss.template, []).append(loss)
        return lambda template: [_row(loss, weight) for loss in of.get(template, ())[:losses_max]]

    def _make_room(self) -> None:
        least = sorted(self.all, key=lambda key: (self.all[key].tokens, self.all[key].requests))
        for key in least[: LOSSES_MAX // MARGIN]:
            del self.all[key]
        self.templates = {template for template, *_ in self.all}


def begin_of(difference: Difference) -> int:
    """Return the beginning of the token that changes, or else the first byte that differs: the same place for every
    request."""
    return difference.token_bytes if difference.token_bytes >= 0 else difference.at_bytes


def place_of(difference: Difference) -> tuple[int, str]:
    """Return message and path. Places in a conversation's history are merged."""
    message, path = difference.message, difference.path[:PATH_CHARS_MAX]
    if message >= FIRST_MESSAGES:
        message, path = FIRST_MESSAGES, re.sub(r"\[\d+\]", "[*]", path)
    return message, path


def _strip_text(of: Difference) -> Difference:
    lost, piece = of.lost_bytes, of.piece_hash
    made = Difference(of.change, of.message, of.role, of.path, of.offset_bytes, of.at_bytes, lost, of.shape, piece)
    made.token_bytes = of.token_bytes
    return made


def _row(loss: Loss, weight: float) -> dict[str, Any]:
    last = loss.last
    return {
        "change": loss.change.value,
        "message": loss.message,
        "role": last.role,
        "path": last.path[:PATH_CHARS_MAX],
        "at_bytes": loss.begin_bytes,
        "shape": last.shape,
        "requests": round(loss.requests / weight),
        "lost_tokens": round(loss.tokens / weight),
        "last_at_s": round(loss.last_at_s, 3),
        "before": last.before,
        "after": last.after,
    }
