"""Releases: for a while a product's prompts are as they should be, and then a release puts a line that changes into
its system prompt, before everything or near its beginning. Sessions that go on and sessions that begin meet it alike.

What is new is first seen against a template that was there before, in which the line has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.conversations import Talk
from tests.core.insights.damage import BASE62, HEX, Apply, Damage, Make, Moment, _epoch_ms, _now, _token, _twelve, _uuid
from tests.core.insights.prose import Prose

RELEASED_AFTER_S = 400.0  # since the first request of the product
NAME = "released"  # begins the names of these damages


def _release(at_byte: int, line: Callable[[Moment], str]) -> Make:
    """Put a line into the first part of the system prompt, from the release on."""

    def make(prose: Prose, talk: Talk) -> Apply:
        began: list[float] = []

        def apply(talk: Talk, moment: Moment) -> Talk:
            began.append(moment.at_s)
            if moment.at_s < began[0] + RELEASED_AFTER_S:
                return talk
            text = talk.system[0].encode()
            head, tail = text[:at_byte].decode(errors="ignore"), text[at_byte:].decode(errors="ignore")
            return talk.with_system(f"{head}{line(moment)}{tail}")

        return apply

    return make


def _damage(kind: DifferenceKind, name: str, at_byte: int, line: Callable[[Moment], str], tools_min: int = 0) -> Damage:
    return Damage(kind, f"{NAME}: {name}, byte {at_byte}", "system", _release(at_byte, line), tools_min)


T, ID, N = DifferenceKind.TIMESTAMP, DifferenceKind.IDENTIFIER, DifferenceKind.COUNTER
RELEASED = [
    _damage(T, "ISO 8601", 0, lambda m: f"It is {_now(m).isoformat(timespec='seconds')}. "),
    _damage(T, "ISO 8601", 23, lambda m: f"It is {_now(m).isoformat(timespec='seconds')}. "),
    _damage(T, "behind the tools", 0, lambda m: f"Current time: {_now(m):%Y-%m-%d %H:%M:%S}\n\n", 4),
    _damage(ID, "UUID of the request", 0, lambda m: f"Request ID: {_uuid(m.fresh)}\n"),
    _damage(T, "in words", 0, lambda m: f"Today is {_twelve(_now(m))}.\n\n"),
    _damage(ID, "request id", 23, lambda m: f" [request req_{_token(m.fresh, BASE62, 20)}] "),
    _damage(T, "milliseconds since 1970", 0, lambda m: f'<context now="{_epoch_ms(m)}"/>\n', 4),
    _damage(ID, "trace id", 0, lambda m: f"trace_id={_token(m.fresh, HEX, 32)}\n", 4),
]
